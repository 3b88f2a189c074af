"""The plan: placement plus the fully resolved command, environment and folder of every node. Pure.

What `render` prints and what `run` sends is this very object. A placeholder that would survive is refused here.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpulayer.errors import JobError, PlaceholderError
from gpulayer.hosts import fold
from gpulayer.job import EnvValue, check_env_name, looks_secret
from gpulayer.torchrun import ESCAPE, PLACEHOLDERS, placeholder_values, substitute, survivors, torchrun_argv

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from datetime import datetime
    from pathlib import Path

    from gpulayer.job import DistributedJob
    from gpulayer.placement import PlacedNode, Placement

PLAN_VERSION = 1
MASK = "***"

_JOB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@dataclass(frozen=True, slots=True)
class NodeCommand:
    """One node's part: where to log in, what to run there, in which folder, with which environment.

    `env` holds real values, secrets included: show `shown_env()` to people and in files. `job_dir` is made on the node
    and lives as long as the job. `interface` is None when the node is to choose it by `address`.
    """

    node_rank: int
    node_id: str
    ssh: str
    user: str | None
    port: int | None
    address: str
    nproc_per_node: int
    ranks: tuple[int, ...]
    workdir: str
    argv: tuple[str, ...]
    env: Mapping[str, str]
    python: str
    job_dir: str
    interface: str | None

    def shown_env(self) -> dict[str, str]:
        """Return `env` with MASK for the values whose names look secret."""
        return {name: MASK if looks_secret(name) else value for name, value in self.env.items()}


@dataclass(frozen=True, slots=True)
class Plan:
    """One job, ready to be sent: its nodes in node order, the rendezvous, and its limits in seconds."""

    job_id: str
    nodes: tuple[NodeCommand, ...]
    master_addr: str
    master_port: int
    port_is_default: bool
    practice: bool
    join_timeout_s: float
    grace_s: float
    lost_after_s: float
    timeout_s: float | None
    version: int = PLAN_VERSION

    @property
    def nnodes(self) -> int:
        """How many nodes the job has."""
        return len(self.nodes)

    @property
    def world_size(self) -> int:
        """How many ranks the job has on all its nodes."""
        return sum(node.nproc_per_node for node in self.nodes)

    @property
    def uneven(self) -> bool:
        """True when nodes differ in how many ranks they host."""
        return len({node.nproc_per_node for node in self.nodes}) > 1


def new_job_id(now: datetime, token: str) -> str:
    """Return the id for a job that starts `now`: `20261129-150210-k3f9`. `token` keeps two of one second apart."""
    return check_job_id(f"{now:%Y%m%d-%H%M%S}-{token}")


def check_job_id(job_id: str) -> str:
    """Return `job_id`, or raise JobError when it cannot name a folder and a rendezvous."""
    if not _JOB_ID.fullmatch(job_id):
        raise JobError(
            f"`{job_id}` cannot be a job id",
            hint="use up to 64 letters, digits, `.`, `_` and `-`, the first one a letter or digit",
        )
    return job_id


def build_plan(job: DistributedJob, placement: Placement, job_id: str, cwd: Path) -> Plan:
    """Resolve everything for every node. `cwd` is the folder that gpulayer was started in.

    It is the working directory of nodes that name none, and then data: neither substituted nor refused. A relative
    `--workdir` starts from it. Raises PlaceholderError when a `$NAME`, `${NAME}` or `$(...)` would be left anywhere,
    and JobError when the environment or the job id cannot be had.
    """
    check_job_id(job_id)
    environments = [_typed_env(job, placed.node.id, placed.node.env) for placed in placement.nodes]
    _refuse_survivors(job, placement, environments)
    nodes = tuple(
        _node_command(job, placement, placed, job_id, env, cwd)
        for placed, env in zip(placement.nodes, environments, strict=True)
    )
    return Plan(
        job_id=job_id,
        nodes=nodes,
        master_addr=placement.master_addr,
        master_port=placement.master_port,
        port_is_default=job.rendezvous.port_is_default,
        practice=placement.practice,
        join_timeout_s=job.rendezvous.join_timeout_s,
        grace_s=job.grace_s,
        lost_after_s=job.lost_after_s,
        timeout_s=job.timeout_s,
    )


def _node_command(
    job: DistributedJob,
    placement: Placement,
    placed: PlacedNode,
    job_id: str,
    env: Mapping[str, EnvValue],
    cwd: Path,
) -> NodeCommand:
    node = placed.node
    values = placeholder_values(placement, placed, job_id)
    resolved = {name: item.value if item.literal else substitute(item.value, values) for name, item in env.items()}
    workdir = job.workdir or node.workdir
    typed_interface = job.interface or node.interface
    interface = substitute(typed_interface, values) if typed_interface else None
    job_dir = f"{node.scratch.rstrip('/')}/gpulayer-{job_id}-n{placed.node_rank}"
    return NodeCommand(
        node_rank=placed.node_rank,
        node_id=node.id,
        ssh=node.ssh,
        user=node.user,
        port=node.port,
        address=placed.address,
        nproc_per_node=placed.nproc_per_node,
        ranks=placed.ranks,
        workdir=str(cwd / substitute(workdir, values)) if workdir else str(cwd),
        argv=torchrun_argv(job, placement, placed, job_id, log_dir=f"{job_dir}/ranks"),
        env=resolved | _added_env(job, placement, placed, job_id, resolved, interface),
        python=job.python or node.python,
        job_dir=job_dir,
        interface=interface,
    )


def _typed_env(job: DistributedJob, node_id: str, node_env: Mapping[str, str]) -> dict[str, EnvValue]:
    """Return what the user wants in one node's environment, as typed. The command line wins over the map."""
    for name in node_env:
        check_env_name(name, f"the hosts map, `env` of node {node_id}")
    return {name: EnvValue(value) for name, value in node_env.items()} | dict(job.env)


def _added_env(
    job: DistributedJob,
    placement: Placement,
    placed: PlacedNode,
    job_id: str,
    env: Mapping[str, str],
    interface: str | None,
) -> dict[str, str]:
    """Return what gpulayer adds. What the user set stays, unless it contradicts an option: then JobError."""
    gpus = placed.node.gpus
    demanded = {"GPULAYER_JOB_ID": (job_id, "--job-id")}
    if isinstance(gpus, tuple):
        demanded["CUDA_VISIBLE_DEVICES"] = (",".join(map(str, gpus)), "gpus")
    if job.comm_backend is not None:
        demanded["GPULAYER_COMM_BACKEND"] = (job.comm_backend, "--backend")
    for name, (value, source) in demanded.items():
        if env.get(name, value) != value:
            raise JobError(
                f"node {placed.node.id}: `{name}` is `{env[name]}`, but `{source}` makes it `{value}`",
                hint=f"keep one of the two, `{name}` or `{source}`",
            )
    added = {name: value for name, (value, _) in demanded.items()}
    if interface:
        # Exact names: gloo and tensorpipe take no other, and NCCL takes a bare one for a prefix.
        added |= {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": f"={interface}", "TP_SOCKET_IFNAME": interface}
    if isinstance(gpus, tuple):
        added["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"  # as nvidia-smi counts; CUDA's own default is fastest first
    added["PYTHONUNBUFFERED"] = "1"  # the last lines before a SIGKILL are the ones that are wanted
    # torchrun's own patience with ranks that ignore SIGTERM, 30 s if unset, must end before gpulayer's.
    added["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = str(max(1, int(job.grace_s) - 1))
    if any(other.nproc_per_node > 1 for other in placement.nodes):
        # torchrun would set it only where there are several ranks, so that uneven nodes would run differently.
        added["OMP_NUM_THREADS"] = "1"
    return {name: value for name, value in added.items() if name not in env}


def _refuse_survivors(job: DistributedJob, placement: Placement, environments: list[dict[str, EnvValue]]) -> None:
    """Raise PlaceholderError if anything typed holds a `$NAME` without a value, naming each place once."""
    found: dict[tuple[str, str], list[str]] = {}
    for placed, env in zip(placement.nodes, environments, strict=True):
        for place, text in _typed_texts(job, placed, env):
            for survivor in survivors(text):
                found.setdefault((place, survivor), []).append(placed.node.id)
    if not found:
        return
    raise PlaceholderError(
        "\n".join(_survivor_text(place, survivor, ids) for (place, survivor), ids in found.items()),
        hint=f"known names: {', '.join(f'${name}' for name in PLACEHOLDERS)}. "
        "$RANK, $LOCAL_RANK and the like differ between the processes of a node: "
        "the script finds them in its environment. "
        f"For a plain dollar sign write `${{{ESCAPE}}}`, as in `${{{ESCAPE}}}HOME`",
    )


def _typed_texts(job: DistributedJob, placed: PlacedNode, env: Mapping[str, EnvValue]) -> Iterator[tuple[str, str]]:
    """Yield each text that placeholders apply to on one node, and its place. Arguments count from 1, as in sys.argv."""
    yield "argument 0 (the script)", job.entrypoint
    for number, arg in enumerate(job.args, 1):
        yield f"argument {number}", arg
    for name, item in env.items():
        if not item.literal:
            yield f"environment variable `{name}`", item.value
    yield "the working directory", job.workdir or placed.node.workdir or ""
    yield "the interface", job.interface or placed.node.interface or ""


def _survivor_text(place: str, survivor: str, node_ids: list[str]) -> str:
    first, *others = node_ids
    alike = f", nor on {fold(others)}" if others else ""
    return f"node {first}: {place}: `{survivor}` has no value there{alike}"


def plan_json(plan: Plan) -> dict[str, object]:
    """Return the plan for scripts and for plan.json: lists, texts and numbers only, secret values masked."""
    return {
        "version": plan.version,
        "job_id": plan.job_id,
        "nnodes": plan.nnodes,
        "world_size": plan.world_size,
        "uneven": plan.uneven,
        "practice": plan.practice,
        "master_addr": plan.master_addr,
        "master_port": plan.master_port,
        "join_timeout_s": plan.join_timeout_s,
        "grace_s": plan.grace_s,
        "lost_after_s": plan.lost_after_s,
        "timeout_s": plan.timeout_s,
        "nodes": [
            {
                "node_rank": node.node_rank,
                "node_id": node.node_id,
                "ssh": node.ssh,
                "user": node.user,
                "port": node.port,
                "address": node.address,
                "nproc_per_node": node.nproc_per_node,
                "ranks": list(node.ranks),
                "workdir": node.workdir,
                "interface": node.interface,
                "argv": list(node.argv),
                "env": node.shown_env(),
            }
            for node in plan.nodes
        ],
    }
