"""The plan: placement plus the fully resolved command, environment and folder of every node. Pure.

What `render` prints and what `run` sends is this very object. A placeholder that would survive is refused here.
"""

from __future__ import annotations

import hashlib
import json
import posixpath
import re
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from gpulayer import __version__
from gpulayer.errors import JobError, PlaceholderError
from gpulayer.hosts import fold
from gpulayer.job import DistributedJob, EnvValue, check_env_name
from gpulayer.launchers import check_launcher
from gpulayer.masks import MASK, Part, Secrets, shown
from gpulayer.parts import NodePart
from gpulayer.placeholders import ESCAPE, PLACEHOLDERS, placeholder_values, substitute, survivors

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from datetime import datetime
    from pathlib import Path

    from gpulayer.bundle import BundleRef
    from gpulayer.job import LauncherName, RendezvousKind
    from gpulayer.launchers import Launcher
    from gpulayer.placement import PlacedNode, Placement
    from gpulayer.recipe import Recipe

PLAN_VERSION = 1
BUNDLE_FOLDER = "work"  # in the job's folder on a node (node_bundle.py)
OUTPUT_FOLDER = "outputs"  # the same (node_outputs.py)

_JOB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@dataclass(frozen=True, slots=True)
class NodeCommand:
    """One node's part: where to log in, what to run there, in which folder, with which environment.

    `env` and `argv` hold real values, secrets included: show `shown_env()` and `shown_argv()` to people and in files.
    From word `script_at` on, `argv` is the user's. `ranks` is empty where the launcher starts none; `nproc_per_node` is
    then what a command may want to know. `job_dir` is made on the node and lives as long as the job. `interface` is
    None when the node is to choose it by `address`. `gpus` are the device indices where the node is a part of a
    machine, None where it is all of it. `outputs` are patterns of files in `workdir` that come back at the end.
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
    script_at: int
    env: Mapping[str, str]
    python: str
    job_dir: str
    interface: str | None
    gpus: tuple[int, ...] | None = None
    outputs: tuple[str, ...] = ()

    def shown_env(self) -> dict[str, str]:
        """Return `env` with MASK for what is secret."""
        secrets = Secrets(self.env)
        return {name: shown(secrets.variable(name)) for name in self.env}

    def shown_argv(self) -> list[str]:
        """Return `argv` with MASK for what is secret among the script's arguments."""
        return [shown(parts) for parts in self.argv_parts()]

    def argv_parts(self) -> list[list[Part]]:
        """Return `argv`, each word in parts."""
        script = self.script_at
        return [*([Part(word)] for word in self.argv[:script]), *Secrets(self.env).words(self.argv[script:])]


@dataclass(frozen=True, slots=True)
class ScriptFile:
    """The script of a job where the login node has it too. `sha256` None: it cannot be read here."""

    path: str
    sha256: str | None


@dataclass(frozen=True, slots=True)
class Plan:
    """One job, ready to be sent: its nodes in node order, the rendezvous, and its limits in seconds.

    `recipe` is what it was made from, None where it cannot be made again. `gpulayer` is the version that made it.
    """

    job_id: str
    launcher: LauncherName
    rendezvous: RendezvousKind
    nodes: tuple[NodeCommand, ...]
    master_addr: str
    master_port: int
    port_is_default: bool
    practice: bool
    join_timeout_s: float
    grace_s: float
    lost_after_s: float
    timeout_s: float | None
    max_output_bytes: int = DistributedJob.model_fields["max_output_bytes"].default
    script: ScriptFile | None = None
    bundle: BundleRef | None = None
    recipe: Recipe | None = None
    gpulayer: str = __version__
    version: int = PLAN_VERSION

    @property
    def digest(self) -> str:
        """What names this plan and no other: `sha256:...`. Secrets do not count."""
        return digest_of(plan_json(self))

    @property
    def nnodes(self) -> int:
        """How many nodes the job has."""
        return len(self.nodes)

    def secrets(self) -> Secrets:
        """Return what is to be hidden of texts about the job."""
        return Secrets({}, [item for node in self.nodes for item in node.env.items()])

    @property
    def command_name(self) -> str:
        """What runs on a node, in words: torchrun, or another launcher, or the command itself."""
        return "the command" if self.launcher == "command" else self.launcher

    @property
    def has_ranks(self) -> bool:
        """True where the launcher starts ranks, which are watched."""
        return any(node.ranks for node in self.nodes)

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


def build_plan(
    job: DistributedJob, placement: Placement, job_id: str, cwd: Path, bundle: BundleRef | None = None
) -> Plan:
    """Resolve everything for every node. `cwd` is the folder that gpulayer was started in.

    It is the working directory of nodes that name none, and then data: neither substituted nor refused. A relative
    `--workdir` starts from it. With a bundle, the working directory is a copy of that, or a folder in it. Raises
    PlaceholderError when a `$NAME`, `${NAME}` or `$(...)` would be left anywhere, and JobError when the environment or
    the job id cannot be had.
    """
    check_job_id(job_id)
    launcher = check_launcher(job, placement)
    environments = [_typed_env(job, placed.node.id, placed.node.env) for placed in placement.nodes]
    _refuse_survivors(job, placement, environments)
    nodes = tuple(
        _node_command(launcher, NodePart(job, placement, placed, job_id, _job_dir(placed, job_id)), env, cwd)
        for placed, env in zip(placement.nodes, environments, strict=True)
    )
    return Plan(
        job_id=job_id,
        launcher=job.launcher,
        rendezvous=job.rendezvous.kind,
        nodes=nodes,
        master_addr=placement.master_addr,
        master_port=placement.master_port,
        port_is_default=job.rendezvous.port_is_default,
        practice=placement.practice,
        join_timeout_s=job.rendezvous.join_timeout_s,
        grace_s=job.grace_s,
        lost_after_s=job.lost_after_s,
        timeout_s=job.timeout_s,
        max_output_bytes=job.max_output_bytes,
        bundle=bundle,
    )


def _job_dir(placed: PlacedNode, job_id: str) -> str:
    return f"{placed.node.scratch.rstrip('/')}/gpulayer-{job_id}-n{placed.node_rank}"


def _node_command(launcher: Launcher, part: NodePart, env: Mapping[str, EnvValue], cwd: Path) -> NodeCommand:
    job, placed, node = part.job, part.placed, part.placed.node
    values = placeholder_values(part.placement, placed, part.job_id)
    resolved = {name: item.value if item.literal else substitute(item.value, values) for name, item in env.items()}
    typed_interface = job.interface or node.interface
    interface = substitute(typed_interface, values) if typed_interface else None
    made = launcher.render(part)
    added = _added_env(launcher, part, resolved, interface)
    return NodeCommand(
        node_rank=placed.node_rank,
        node_id=node.id,
        ssh=node.ssh,
        user=node.user,
        port=node.port,
        address=placed.address,
        nproc_per_node=placed.nproc_per_node,
        ranks=placed.ranks if launcher.has_ranks else (),
        workdir=_workdir(part, values, cwd),
        argv=made.argv,
        script_at=made.script_at,
        env=resolved | dict(made.env) | added,
        python=part.python,
        job_dir=part.job_dir,
        interface=interface,
        gpus=node.devices,
        outputs=tuple(substitute(one, values) for one in job.outputs),
    )


def _workdir(part: NodePart, values: Mapping[str, str], cwd: Path) -> str:
    job = part.job
    if job.bundle is not None:  # what the map says of folders is about those that are there already
        return posixpath.normpath(f"{part.job_dir}/{BUNDLE_FOLDER}/{substitute(job.workdir or '.', values)}")
    workdir = job.workdir or part.placed.node.workdir
    return str(cwd / substitute(workdir, values)) if workdir else str(cwd)


def _typed_env(job: DistributedJob, node_id: str, node_env: Mapping[str, str]) -> dict[str, EnvValue]:
    """Return what the user wants in one node's environment, as typed. The command line wins over the map."""
    for name in node_env:
        check_env_name(name, f"the hosts map, `env` of node {node_id}")
    return {name: EnvValue(value) for name, value in node_env.items()} | dict(job.env)


def _added_env(launcher: Launcher, part: NodePart, env: Mapping[str, str], interface: str | None) -> dict[str, str]:
    """Return what gpulayer adds. What the user set stays, unless it contradicts an option: then JobError."""
    job, placed, gpus = part.job, part.placed, part.placed.node.gpus
    demanded = {"GPULAYER_JOB_ID": (part.job_id, "--job-id")}
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
    added["GPULAYER_OUTPUT_DIR"] = f"{part.job_dir}/{OUTPUT_FOLDER}"
    added["PYTHONUNBUFFERED"] = "1"  # the last lines before a SIGKILL are the ones that are wanted
    if launcher.has_ranks:
        # torchrun's own patience with ranks that ignore SIGTERM, 30 s if unset, must end before gpulayer's.
        added["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = str(max(1, int(job.grace_s) - 1))
    if launcher.has_ranks and any(other.nproc_per_node > 1 for other in part.placement.nodes):
        # torchrun would set it only where there are several ranks, so that uneven nodes would run differently.
        added["OMP_NUM_THREADS"] = "1"
    return {name: value for name, value in added.items() if name not in env}


def _refuse_survivors(job: DistributedJob, placement: Placement, environments: list[dict[str, EnvValue]]) -> None:
    """Raise PlaceholderError if anything typed holds a `$NAME` without a value, naming each place once."""
    found: dict[tuple[str, str], list[str]] = {}
    for placed, env in zip(placement.nodes, environments, strict=True):
        for place, text, is_secret in _typed_texts(job, placed, env):
            for survivor in survivors(text):
                found.setdefault((place, f"${MASK}" if is_secret else survivor), []).append(placed.node.id)
    if not found:
        return
    raise PlaceholderError(
        "\n".join(_survivor_text(place, survivor, ids) for (place, survivor), ids in found.items()),
        hint=f"known names: {', '.join(f'${name}' for name in PLACEHOLDERS)}. "
        "$RANK, $LOCAL_RANK and the like differ between the processes of a node: "
        "the script finds them in its environment. "
        f"For a plain dollar sign write `${{{ESCAPE}}}`, as in `${{{ESCAPE}}}HOME`",
    )


def _typed_texts(
    job: DistributedJob, placed: PlacedNode, env: Mapping[str, EnvValue]
) -> Iterator[tuple[str, str, bool]]:
    """Yield each text that placeholders apply to on one node: its place, it, and whether it holds a secret.

    Arguments count from 1, as in sys.argv.
    """
    yield "argument 0 (the script)", job.entrypoint, False
    secrets = Secrets({name: item.value for name, item in env.items()})
    for number, (arg, parts) in enumerate(zip(job.args, secrets.words(job.args), strict=True), 1):
        yield f"argument {number}", arg, any(part.variable for part in parts)
    for name, item in env.items():
        if not item.literal:
            yield f"environment variable `{name}`", item.value, any(part.variable for part in secrets.variable(name))
    workdir = job.workdir if job.bundle is not None else job.workdir or placed.node.workdir
    yield "the working directory", workdir or "", False
    for pattern in job.outputs:
        yield f"`--outputs {pattern}`", pattern, False
    yield "the interface", job.interface or placed.node.interface or "", False


def _survivor_text(place: str, survivor: str, node_ids: list[str]) -> str:
    first, *others = node_ids
    alike = f", nor on {fold(others)}" if others else ""
    return f"node {first}: {place}: `{survivor}` has no value there{alike}"


def digest_of(document: Mapping[str, object]) -> str:
    """Return the digest of a plan in its JSON form. A digest that stands in it already does not count."""
    plain = {key: value for key, value in document.items() if key != "digest"}
    return f"sha256:{hashlib.sha256(json.dumps(plain, sort_keys=True, separators=(',', ':')).encode()).hexdigest()}"


def plan_json(plan: Plan) -> dict[str, object]:
    """Return the plan for scripts and for plan.json: lists, texts and numbers only, secret values masked."""
    document = _plan_json(plan)
    return {"version": plan.version, "digest": digest_of(document)} | document


def _plan_json(plan: Plan) -> dict[str, object]:
    return {
        "version": plan.version,
        "gpulayer": plan.gpulayer,
        "job_id": plan.job_id,
        "launcher": plan.launcher,
        "rendezvous": plan.rendezvous,
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
        "max_output_bytes": plan.max_output_bytes,
        "bundle": None if plan.bundle is None else asdict(plan.bundle),
        "script": None if plan.script is None else {"path": plan.script.path, "sha256": plan.script.sha256},
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
                "gpus": None if node.gpus is None else list(node.gpus),
                "python": node.python,
                "job_dir": node.job_dir,
                "outputs": list(node.outputs),
                "argv": node.shown_argv(),
                "script_at": node.script_at,
                "env": node.shown_env(),
            }
            for node in plan.nodes
        ],
        "recipe": None if plan.recipe is None else plan.recipe.json(),
    }
