"""All checks on all nodes of a plan: `judge`. Pure: what was seen goes in, findings come out."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from gpulayer import probe_host
from gpulayer.checks_gpu import check_gpus
from gpulayer.checks_network import check_addresses, check_machines
from gpulayer.checks_reach import check_mesh, check_port, check_public, check_rendezvous
from gpulayer.checks_room import check_room
from gpulayer.checks_software import check_code, check_versions
from gpulayer.findings import Check, Finding, Severity, failure, merge, warning

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gpulayer.findings import CheckOptions, Observations
    from gpulayer.plan import Plan

_CHECKS = (
    check_machines,
    check_addresses,
    check_port,
    check_public,
    check_rendezvous,
    check_mesh,
    check_versions,
    check_code,
    check_gpus,
    check_room,
)

_NAMES = {
    "interfaces": "network interfaces",
    "listener": "a listening port",
    "ephemeral_range": "the range of ephemeral ports",
    "reserved_ports": "the reserved ports",
    "python": "the version of Python",
    "torch": "the version of torch",
    "gpu": "the GPUs",
    "shm": probe_host.SHM,
    "nofile": "`ulimit -n`",
    "memlock_bytes": "`ulimit -l`",
    "infiniband": "InfiniBand devices",
}


def judge(plan: Plan, seen: Observations, options: CheckOptions) -> list[Finding]:
    """Return what is wrong with these nodes for this plan: each cause once, failures first, in the order of Check.

    A Severity.FAILURE among them refuses the job.
    """
    findings = [*_unanswered(plan, seen, options), *_unread(plan, seen)]
    for check in _CHECKS:
        findings += check(plan, seen, options)
    if options.strict:
        findings = [replace(one, severity=Severity.FAILURE) for one in findings]
    return merge(findings, [node.node_id for node in plan.nodes])


def _unanswered(plan: Plan, seen: Observations, options: CheckOptions) -> Iterator[Finding]:
    for node in plan.nodes:
        if node.node_rank in seen.missing:
            awaited = seen.missing[node.node_rank]
            yield failure(
                Check.NO_ANSWER,
                [node.node_id],
                f"no answer to the checks within {options.limit_s:g} s",
                "log in and see what hangs: a network file system (`df`), the GPU driver (`nvidia-smi`); "
                "`--preflight-timeout` gives it longer",
                *([awaited] if awaited else []),
            )


def _unread(plan: Plan, seen: Observations) -> Iterator[Finding]:
    for node, facts in seen.of(plan):
        # No route to the head is judged where addresses are.
        for name, reason in sorted(facts.errors.items()):
            if name != "route_to_master":
                yield warning(
                    Check.FACT_UNREAD,
                    [node.node_id],
                    f"{_NAMES.get(name, name.replace('_', ' '))} could not be checked",
                    "the job may still run; what keeps gpulayer from looking there may keep the job from it too",
                    reason,
                )
