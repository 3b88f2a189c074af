"""Nodes in good order as their probes tell of them, and what gpulayer says where something is changed."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from gpulayer.checks import judge
from gpulayer.facts import (
    GpuDevice,
    GpuFact,
    GpuProcess,
    Interface,
    Listener,
    NodeFacts,
    PythonFact,
    ReachResult,
    ReachState,
    RendezvousPort,
    Route,
    ScratchFact,
    ScriptFact,
    ShmFact,
    TorchFact,
    WorkdirFact,
    Xid,
)
from gpulayer.findings import CheckOptions, Finding, Observations, render_findings
from tests.support import plans
from tests.support.docs import ROOT, entries
from tests.support.messages import is_shape_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from gpulayer.plan import NodeCommand, Plan

    Changes = Mapping[int, Mapping[str, Any]]  # by node rank

LOOPBACK = Interface("lo", True, True, "loopback", ("127.0.0.1", "::1"))
NO_GPU = GpuFact(None, "missing", "", None, 0, (), ())
TORCH = TorchFact("2.7.1+cu126", "12.6", None, "2.26.2", "/opt/torch/lib/torch")
CPU_TORCH = TorchFact("2.7.1+cpu", None, None, None, "/opt/torch/lib/torch")
GIB = 1 << 30
ENTRIES = entries(ROOT / "docs/troubleshooting.md", "Preflight")


def plan_of(*gpus: int, **settings: object) -> Plan:
    """Return a plan for gpu-01, gpu-02 and so on, with these many processes on each."""
    return plans.plan(plans.script(**settings), plans.nodes(*gpus))


def interface(name: str, *addresses: str, switched_on: bool = True, up: bool = True) -> Interface:
    """Return a network interface."""
    return Interface(name, switched_on, up and switched_on, "ethernet", addresses)


def script(content: str = "ab", path: str = "/home/me/project/train.py", size_bytes: int = 10) -> ScriptFact:
    """Return a script that is there, with a hash that begins with `content`."""
    return ScriptFact(path, "ok", (content * 64)[:64], size_bytes, "")


def port(number: int = 29500, *, pid: int | None = None, user: str = "", command: str = "") -> RendezvousPort:
    """Return a port that is taken, by whom as far as it can be seen."""
    return RendezvousPort(number, "taken", pid, command, user, "Address already in use")


def gpus(
    *used_mib: int | None,
    tool: str = "nvidia-smi",
    processes: Sequence[GpuProcess] = (),
    ecc_errors: Mapping[int, int] | None = None,
    xids: Mapping[int, Sequence[Xid]] | None = None,
    driver: str = "550.90.07",
) -> GpuFact:
    """Return GPUs with so much memory in use, what runs on them, and what is wrong with some."""
    devices = tuple(
        GpuDevice(
            index,
            f"GPU-{index}a",
            "H100",
            used,
            81559,
            (ecc_errors or {}).get(index),
            tuple((xids or {}).get(index, ())),
        )
        for index, used in enumerate(used_mib)
    )
    return GpuFact(tool, "ok", "", driver, len(devices), devices, tuple(processes))  # type: ignore[arg-type]


def reached(state: ReachState, detail: str = "") -> ReachResult:
    """Return how a connection went."""
    return ReachResult("n", state, 0.2 if state in ("ok", "other") else None, detail)


def facts(node: NodeCommand, master_addr: str) -> NodeFacts:
    """Return what a node without GPUs says when all is well with it."""
    head = node.node_rank == 0
    return NodeFacts(
        time_s=1795966807.0,
        boot_id=f"{node.node_rank}b7e1c2d-0000-4000-8000-000000000000",
        machine_id="",
        hostname=node.node_id,
        namespaces={"net": 1, "pid": 2, "uts": 3, "mnt": 4},
        interfaces=(LOOPBACK, interface("eth0", node.address)),
        route_to_master=Route("eth0", node.address),
        port=RendezvousPort(29500, "free", None, "", "", "") if head else None,
        free_ports=(),
        listener=Listener(40000),
        ephemeral_range=(32768, 60999),
        reserved_ports=(),
        python=PythonFact("3.11.7", "/opt/torch/bin/python3", "/opt/torch"),
        torch=TORCH,
        gpu=NO_GPU,
        script=script(),
        workdir=WorkdirFact("/home/me/project", "ok", ""),
        scratch=ScratchFact("/tmp", 50 * GIB, True, ""),
        shm=ShmFact(64 * GIB, 64 * GIB),
        nofile=65536,
        memlock_bytes=-1,
        infiniband=(),
        errors={},
    )


def observed(plan: Plan, changes: Changes | None = None, **more: Any) -> Observations:
    """Return nodes in good order, with other facts where `changes` names them by node rank; `more` is what else."""
    missing: Mapping[int, str] = more.get("missing", {})
    told = {
        node.node_rank: replace(facts(node, plan.master_addr), **(changes or {}).get(node.node_rank, {}))
        for node in plan.nodes
        if node.node_rank not in missing
    }
    return Observations(facts=told, **more)


def said(
    plan: Plan,
    changes: Changes | None = None,
    options: CheckOptions | None = None,
    **more: Any,
) -> str:
    """Return what a user reads of these nodes, "" where nothing is wrong."""
    findings = judge(plan, observed(plan, changes, **more), options or CheckOptions())
    for finding in findings:
        check_entry(finding)
    return render_findings(findings)


def check_entry(finding: Finding) -> None:
    """Check that docs/troubleshooting.md has the message in the entry that the hint names."""
    head, *lines = finding.text.split("\n")
    for line in map(str.strip, lines or [""]):
        # The lines under a text are one value each, of the nodes that stand in front of it, if any do.
        texts = (f"{head} {line}", f"{head} {line.partition(': ')[2]}")
        assert any(is_shape_of(shape, text) for shape in ENTRIES[finding.check] for text in texts), finding


def everywhere(plan: Plan, **changes: Any) -> Changes:
    """Return the same changes for every node."""
    return {node.node_rank: changes for node in plan.nodes}
