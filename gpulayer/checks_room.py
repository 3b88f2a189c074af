"""Whether there is room for the job, whether limits are wide enough, and whether the clocks agree. Pure; warnings."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpulayer import probe_host
from gpulayer.findings import Check, Finding, size, warning
from gpulayer.ranges import fold

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from gpulayer.facts import NodeFacts
    from gpulayer.findings import CheckOptions, Observations
    from gpulayer.plan import NodeCommand, Plan

_SHM_BYTES_PER_PROCESS = 64 << 20  # data loaders and NCCL pass data through it; what Docker gives by default
_SCRATCH_BYTES = 1 << 30
_CLOCKS_APART_S = 2.0
_NOFILE = 4096


def check_room(plan: Plan, seen: Observations, _: CheckOptions) -> Iterator[Finding]:
    """Yield what is small, low or off on each node."""
    for node, facts in seen.of(plan):
        yield from _shm(node, facts)
        yield from _scratch(node, facts)
        yield from _limits(node, facts)
    yield from _clocks([node for node in plan.nodes if node.node_rank in seen.skew_s], seen.skew_s)


def _shm(node: NodeCommand, facts: NodeFacts) -> Iterator[Finding]:
    wanted = node.nproc_per_node * _SHM_BYTES_PER_PROCESS
    total = facts.shm.total_bytes if facts.shm else 0
    if total >= wanted or "shm" in facts.errors:
        return
    found = f"has {size(total)}" if facts.shm else "does not exist"
    count = f"{node.nproc_per_node} process{'es' if node.nproc_per_node > 1 else ''}"
    yield warning(
        Check.SHM_SMALL,
        [node.node_id],
        f"{probe_host.SHM} {found}, {size(wanted)} or more is expected for {count}",
        f"give a container more with `--shm-size`, or `mount -o remount,size={wanted >> 20}M {probe_host.SHM}` as root",
    )


def _scratch(node: NodeCommand, facts: NodeFacts) -> Iterator[Finding]:
    scratch = facts.scratch
    if scratch and scratch.writable and scratch.free_bytes is not None and scratch.free_bytes < _SCRATCH_BYTES:
        yield warning(
            Check.SCRATCH_FULL,
            [node.node_id],
            f"less than {size(_SCRATCH_BYTES)} is free in {scratch.path}, where the job's output goes",
            "make room there, or name another folder with `scratch` in the hosts map",
            size(scratch.free_bytes),
        )


def _limits(node: NodeCommand, facts: NodeFacts) -> Iterator[Finding]:
    nofile, memlock, infiniband = facts.nofile, facts.memlock_bytes, facts.infiniband
    if nofile is not None and 0 <= nofile < _NOFILE:
        yield warning(
            Check.NOFILE_LOW,
            [node.node_id],
            f"`ulimit -n` is {nofile}, {_NOFILE} or more is expected",
            "raise `nofile` in /etc/security/limits.conf on the node",
        )
    if infiniband and memlock is not None and memlock >= 0:
        yield warning(
            Check.MEMLOCK_LOW,
            [node.node_id],
            f"`ulimit -l` is {size(memlock)}, and InfiniBand ({', '.join(infiniband)}) wants it unlimited",
            "set `memlock` to unlimited in /etc/security/limits.conf on the node, or `--ulimit memlock=-1` for Docker",
        )


def _clocks(nodes: Sequence[NodeCommand], skew_s: Mapping[int, float]) -> Iterator[Finding]:
    """Yield the nodes whose clocks are away from the clock that most nodes agree with (of two, the head's)."""
    for reference in sorted(nodes, key=lambda node: -len(_near(node, nodes, skew_s))):
        near = _near(reference, nodes, skew_s)
        away = [node for node in nodes if node not in near]
        for node in away:
            yield warning(
                Check.CLOCK_DIFFERS,
                [node.node_id],
                f"the clock is more than {_CLOCKS_APART_S:g} s away from that of " + fold(one.node_id for one in near),
                "set the clocks by NTP: `timedatectl` on the node shows whether it does",
                f"{skew_s[node.node_rank] - skew_s[reference.node_rank]:+.1f} s",
            )
        if away:
            return


def _near(node: NodeCommand, nodes: Sequence[NodeCommand], skew_s: Mapping[int, float]) -> list[NodeCommand]:
    own = skew_s[node.node_rank]
    return [other for other in nodes if abs(skew_s[other.node_rank] - own) <= _CLOCKS_APART_S]
