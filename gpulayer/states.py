"""What each node of the map is now: free, held by a job, dirty, unreachable; as a table and as JSON. Pure."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from gpulayer.errors import NodeError
from gpulayer.remains import NodeSeen, count_of, json_document

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from gpulayer.facts import GpuProcess
    from gpulayer.hosts import Node
    from gpulayer.inventory import NodeLease
    from gpulayer.placement import Hold

HOSTS_TABLE = ("node", "state", "ssh", "address", "gpus", "python", "workdir")


class NodeState(StrEnum):
    """What a node was found to be."""

    FREE = "free"
    HELD = "held"
    DIRTY = "dirty"
    UNREACHABLE = "unreachable"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class NodeFound:
    """A node's state. `text` has more to say where it is dirty or unreachable, `hold` where it is held."""

    state: NodeState
    text: str = ""
    hold: Hold | None = None


def judge_node(scope: str, gpus: tuple[int, ...] | None, said: NodeSeen | NodeError) -> NodeFound:
    """Tell what one entry of the map is found to be; `gpus` are its devices where it is a part of a machine."""
    if isinstance(said, NodeError):
        return NodeFound(NodeState.UNREACHABLE, f"unreachable: {said}")
    leases = [lease for lease in said.survey.leases if lease.scope == scope]
    held = [lease for lease in leases if lease.meets(scope, gpus)]
    if held:
        return NodeFound(NodeState.HELD, hold=held[0].hold)
    dirt = _dirt(said, leases, gpus)
    return NodeFound(NodeState.DIRTY, f"dirty: {', '.join(dirt)}") if dirt else NodeFound(NodeState.FREE)


def _dirt(said: NodeSeen, leases: Sequence[NodeLease], gpus: tuple[int, ...] | None) -> list[str]:
    """Return what runs there for which there is no lease: jobs' processes, and others on the entry's GPUs."""
    leased = {lease.job_id for lease in said.survey.leases}
    left = [job for job in said.survey.jobs if job.job_id not in leased]
    counts: dict[str, int] = {}
    for job in left:
        counts[job.job_id] = counts.get(job.job_id, 0) + job.count + len(job.keepers)
    dirt = [f"{count_of(count, 'process', 'es')} of job {job_id}" for job_id, count in counts.items()]
    of_jobs = {pid for job in said.survey.jobs for pid in job.pids}
    strange = {
        process.pid
        for process in (said.gpu.processes if said.gpu else ())
        if process.pid not in of_jobs and _is_on(process, gpus) and not any(_covers(one, process) for one in leases)
    }
    return [*dirt, *([f"{count_of(len(strange), 'other process', 'es')} on its GPUs"] if strange else [])]


def _is_on(process: GpuProcess, gpus: tuple[int, ...] | None) -> bool:
    return gpus is None or process.device is None or process.device in gpus


def _covers(lease: NodeLease, process: GpuProcess) -> bool:
    return lease.gpus is None or process.device in lease.gpus


def with_record(record: Mapping[str, Hold] | None, found: Mapping[str, NodeFound]) -> dict[str, NodeFound]:
    """Return what was found, where a node that is free by its own word may be held by the login node's record.

    Such a job is about to come, or waits.
    """
    known = record or {}
    return {
        node_id: NodeFound(NodeState.HELD, hold=known[node_id])
        if one.state is NodeState.FREE and node_id in known
        else one
        for node_id, one in found.items()
    }


def by_record(nodes: Iterable[Node], record: Mapping[str, Hold] | None) -> dict[str, NodeFound]:
    """Return what the login node's record alone says of nodes, None where there is none."""
    if record is None:
        return {node.id: NodeFound(NodeState.UNKNOWN) for node in nodes}
    return with_record(record, {node.id: NodeFound(NodeState.FREE) for node in nodes})


def hosts_rows(nodes: Iterable[Node], found: Mapping[str, NodeFound]) -> list[tuple[str, ...]]:
    """Return the rows of HOSTS_TABLE."""
    return [
        (
            node.id,
            _state(found[node.id]),
            node.ssh if node.port is None else f"{node.ssh}:{node.port}",
            node.address or "-",
            "-" if node.gpu_count is None else str(node.gpu_count),
            node.python,
            node.workdir or "-",
        )
        for node in nodes
    ]


def _state(found: NodeFound) -> str:
    hold = found.hold
    if hold is None:
        return found.text or found.state
    who = f"{hold.job_id} ({hold.user}@{hold.login}, since {hold.clock('%H:%M')})"
    return f"{'waited for' if hold.waiting else 'held'} by {who}"


def hosts_json(nodes: Iterable[Node], found: Mapping[str, NodeFound]) -> str:
    """Return what `hosts --json` prints."""
    rows = [
        {
            "node_id": node.id,
            "state": found[node.id].state,
            "detail": found[node.id].text or None,
            "held_by": _hold_json(found[node.id].hold),
            "ssh": node.ssh,
            "port": node.port,
            "user": node.user,
            "address": node.address,
            "gpus": list(node.gpus) if isinstance(node.gpus, tuple) else node.gpus,
            "python": node.python,
            "workdir": node.workdir,
        }
        for node in nodes
    ]
    return json_document({"nodes": rows})


def _hold_json(hold: Hold | None) -> dict[str, object] | None:
    return None if hold is None else asdict(hold)
