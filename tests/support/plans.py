"""Samples for tests of the pure half: nodes, placements, jobs and plans that differ only in what a test asks for."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from gpulayer.hosts import Node
from gpulayer.job import DistributedJob
from gpulayer.placement import Placement, plan_group
from gpulayer.plan import Plan, build_plan
from gpulayer.resolve import Address

if TYPE_CHECKING:
    from collections.abc import Sequence

JOB_ID = "20261129-150210-k3f9"
CWD = Path("/home/me/project")
GOLDEN = Path(__file__).parent.parent / "golden"


def node(number: int, **keys: object) -> Node:
    """Return `gpu-<number>` at 10.0.0.<10 + number> with two GPUs, or with other keys."""
    keys = {"id": f"gpu-{number:02}", "address": f"10.0.0.{10 + number}", "gpus": 2} | keys
    return Node.model_validate(keys)


def nodes(*gpus: int) -> list[Node]:
    """Return nodes from gpu-01 on with these many GPUs."""
    return [node(number, gpus=count) for number, count in enumerate(gpus, 1)]


def written_address(node: Node) -> Address:
    """Resolve a node as its `address` is written."""
    return Address(node.address or "", "`address` in hosts.toml")


def place(
    chosen: Sequence[Node], *, nproc_per_node: int | None = None, master_port: int = 29500, practice: bool = False
) -> Placement:
    """Place ranks on nodes, none of which is the login node."""
    return plan_group(
        chosen,
        nproc_per_node=nproc_per_node,
        master_port=master_port,
        resolve=written_address,
        is_local=lambda _: False,
        practice=practice,
    )


def plan(job: DistributedJob, chosen: Sequence[Node], *, practice: bool = False) -> Plan:
    """Return the plan of `job` on these nodes, as the command line would make it."""
    placement = place(chosen, nproc_per_node=job.nproc_per_node, master_port=job.rendezvous.port, practice=practice)
    return build_plan(job, placement, JOB_ID, CWD)


def script(*args: str, **settings: object) -> DistributedJob:
    """Return a job that runs train.py with these arguments."""
    return DistributedJob.model_validate({"entrypoint": "train.py", "args": args} | settings)
