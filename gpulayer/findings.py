"""What preflight finds wrong with the nodes of a job, as types, and how people and scripts read it. Pure.

The checks_*.py files find, each for one theme; checks.py has them all judge a plan. A finding is one cause on one or
more nodes. Each Check has an entry of its name in docs/troubleshooting.md, where the hint points.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING

from gpulayer.ranges import fold

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from gpulayer.facts import NodeFacts, ReachResult
    from gpulayer.job import CommBackend
    from gpulayer.plan import NodeCommand, Plan

_INDENT = "  "


class Severity(StrEnum):
    """A failure refuses the job, a warning does not."""

    FAILURE = "failure"
    WARNING = "warning"


class Check(StrEnum):
    """What is checked, in the order in which findings are shown."""

    NO_ANSWER = "no-answer"
    FACT_UNREAD = "fact-unread"
    SAME_MACHINE = "same-machine"
    INTERFACE_MISSING = "interface-missing"
    INTERFACE_DOWN = "interface-down"
    INTERFACE_ADDRESS = "interface-address"
    NO_ROUTE = "no-route"
    ADDRESS_NOT_HELD = "address-not-held"
    PORT_TAKEN = "port-taken"
    PORT_DENIED = "port-denied"
    PORT_EPHEMERAL = "port-ephemeral"
    RENDEZVOUS_PUBLIC = "rendezvous-public"
    RENDEZVOUS_TIMEOUT = "rendezvous-timeout"
    RENDEZVOUS_REFUSED = "rendezvous-refused"
    RENDEZVOUS_UNREACHABLE = "rendezvous-unreachable"
    RENDEZVOUS_OTHER = "rendezvous-other"
    PAIR_TIMEOUT = "pair-timeout"
    PAIR_REFUSED = "pair-refused"
    PAIR_UNREACHABLE = "pair-unreachable"
    PAIR_OTHER = "pair-other"
    TORCH_MISSING = "torch-missing"
    TORCH_DIFFERS = "torch-differs"
    VERSIONS_DIFFER = "versions-differ"
    NCCL_WITHOUT_CUDA = "nccl-without-cuda"
    NCCL_WITHOUT_GPU = "nccl-without-gpu"
    WORKDIR = "workdir"
    SCRIPT_MISSING = "script-missing"
    SCRIPT_DIFFERS = "script-differs"
    SCRATCH = "scratch"
    GPU_TOOL_MISSING = "gpu-tool-missing"
    GPU_TOOL_HANGS = "gpu-tool-hangs"
    GPU_TOOL_FAILED = "gpu-tool-failed"
    GPUS_TOO_FEW = "gpus-too-few"
    GPU_NOT_THERE = "gpu-not-there"
    GPU_PROCESS = "gpu-process"
    GPU_MEMORY = "gpu-memory"
    GPU_ECC = "gpu-ecc"
    GPU_XID = "gpu-xid"
    SHM_SMALL = "shm-small"
    SCRATCH_FULL = "scratch-full"
    CLOCK_DIFFERS = "clock-differs"
    NOFILE_LOW = "nofile-low"
    MEMLOCK_LOW = "memlock-low"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong: on which nodes (in node order), what was seen and what was expected, and the next step.

    `seen` are lines that end the text, one value or fact each. They differ between nodes where the text does not:
    `merge` puts them into the text, so that nodes with one cause are told of once.
    """

    check: Check
    severity: Severity
    node_ids: tuple[str, ...]
    text: str
    hint: str
    seen: tuple[str, ...] = ()

    @property
    def advice(self) -> str:
        """The hint, and which entry of docs/troubleshooting.md says more."""
        return f"{self.hint} (troubleshooting: {self.check})"


def failure(check: Check, node_ids: Sequence[str], text: str, hint: str, *seen: str) -> Finding:
    """Return a finding that refuses the job."""
    return Finding(check, Severity.FAILURE, tuple(node_ids), text, hint, seen)


def warning(check: Check, node_ids: Sequence[str], text: str, hint: str, *seen: str) -> Finding:
    """Return a finding that the job can live with."""
    return Finding(check, Severity.WARNING, tuple(node_ids), text, hint, seen)


def as_warning(finding: Finding) -> Finding:
    """Return a finding that no longer refuses the job."""
    return replace(finding, severity=Severity.WARNING)


# --- what is judged -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CheckOptions:
    """What the user said about the checks, and how long the nodes were given (all in seconds)."""

    backend: CommBackend | None = None
    allow_dirty: bool = False
    strict: bool = False
    limit_s: float = 30  # for a node to answer at all
    reach_limit_s: float = 5  # for a connection between nodes
    smi_limit_s: float = 10  # for the GPU vendor's tool


@dataclass(frozen=True, slots=True)
class Observations:
    """What was seen of the nodes, by node rank; what was not looked at is left out and gives no finding.

    `missing` are the nodes that did not answer in time, each with what was being waited for ("": everything).
    `rendezvous` is how each node, the head too, reached the rendezvous; `mesh` how (from, to) went for each pair.
    `skew_s` is a node's clock minus this machine's. `locked_ports` are those that another job of gpulayer holds on the
    head. Where the rendezvous has moved, the head's facts hold the port that was last asked for.
    """

    facts: Mapping[int, NodeFacts] = field(default_factory=dict)
    missing: Mapping[int, str] = field(default_factory=dict)
    rendezvous: Mapping[int, ReachResult] = field(default_factory=dict)
    mesh: Mapping[tuple[int, int], ReachResult] = field(default_factory=dict)
    skew_s: Mapping[int, float] = field(default_factory=dict)
    locked_ports: frozenset[int] = frozenset()

    def of(self, plan: Plan) -> Iterator[tuple[NodeCommand, NodeFacts]]:
        """Yield each node that has told its facts, in node order."""
        for node in plan.nodes:
            if node.node_rank in self.facts:
                yield node, self.facts[node.node_rank]


def visible_devices(node: NodeCommand) -> tuple[str, ...] | None:
    """Return the GPUs that the job may use on a node, as CUDA_VISIBLE_DEVICES names them; None where all are.

    A `gpus` list of the hosts map has become that variable in the plan.
    """
    value = node.env.get("CUDA_VISIBLE_DEVICES")
    if value is None:
        return None
    names = [name.strip() for name in value.split(",")]
    return tuple(name for name in names if name and name != "-1")


def size(count_bytes: int) -> str:
    """Return a number of bytes as people read it: in GiB, MiB or KiB, rounded down to a tenth."""
    for unit, shift in (("GiB", 30), ("MiB", 20)):
        if count_bytes >> shift:
            return f"{(count_bytes * 10 >> shift) / 10:g} {unit}"
    return f"{count_bytes >> 10} KiB"


# --- folding and showing --------------------------------------------------------------------------------------------


def merge(findings: Iterable[Finding], node_ids: Sequence[str]) -> list[Finding]:
    """Return each cause once, with all its nodes: failures first, then by check, then by node. `node_ids` is the order.

    Values that differ between nodes become lines of the text that name their nodes.
    """
    place = {node_id: number for number, node_id in enumerate(node_ids)}
    order = {check: number for number, check in enumerate(Check)}
    groups: dict[tuple[object, ...], list[Finding]] = {}
    for one in findings:
        groups.setdefault((one.check, one.severity, one.text, one.hint), []).append(one)
    merged = [_merged(group, place) for group in groups.values()]
    return sorted(merged, key=lambda one: (str(one.severity), order[one.check], place.get(one.node_ids[0], 0)))


def _merged(group: Sequence[Finding], place: Mapping[str, int]) -> Finding:
    seen: dict[str, list[str]] = {}
    for one in group:
        for node_id in one.node_ids:
            seen.setdefault(node_id, []).extend(one.seen)
    node_ids = sorted(seen, key=lambda node_id: place.get(node_id, 0))
    alike: dict[tuple[str, ...], list[str]] = {}
    for node_id in node_ids:
        alike.setdefault(tuple(seen[node_id]), []).append(node_id)
    lines = [line if len(alike) == 1 else f"{fold(ids)}: {line}" for lines, ids in alike.items() for line in lines]
    return replace(group[0], node_ids=tuple(node_ids), text=_with_lines(group[0].text, lines), seen=())


def _with_lines(text: str, lines: Sequence[str]) -> str:
    if len(lines) == 1:
        return f"{text}: {lines[0]}"
    return "\n".join([f"{text}:", *(_INDENT + line for line in lines)]) if lines else text


def render_findings(findings: Iterable[Finding]) -> str:
    """Return a block for each finding of `judge`, failures first, or "": its nodes, what is wrong, and the hint."""
    blocks = [
        ("warning: " if one.severity is Severity.WARNING else "")
        + f"{fold(one.node_ids)}: {one.text}\nhint: {one.advice}"
        for one in sorted(findings, key=lambda one: str(one.severity))
    ]
    return "\n\n".join(blocks) + "\n" if blocks else ""


def findings_json(findings: Iterable[Finding]) -> list[dict[str, object]]:
    """Return the findings of `judge` as plain values. `check` is also the name of the entry in the docs."""
    return [
        {
            "check": str(one.check),
            "severity": str(one.severity),
            "nodes": list(one.node_ids),
            "text": one.text,
            "hint": one.hint,
        }
        for one in findings
    ]
