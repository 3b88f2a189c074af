"""What to run: `DistributedJob`, `RendezvousSpec`, and the environment that a job may carry.

Which node gets which part is placement.py's matter; how it is spelt for torchrun is torchrun.py's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator

from gpulayer import values
from gpulayer.errors import JobError
from gpulayer.values import ValueRefusedError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

CommBackend = Literal["gloo", "nccl"]
RendezvousKind = Literal["static", "c10d"]
LauncherName = Literal["torchrun", "command", "deepspeed", "accelerate"]
LAUNCHER_NAMES: tuple[LauncherName, ...] = get_args(LauncherName)

DEFAULT_MASTER_PORT = 29500

# Names that torchrun or gpulayer sets on every node. A value given for one of them would be overwritten or would
# mislead the script, so it is refused instead of ignored. Sources, in torch/distributed:
# elastic/agent/server/local_elastic_agent.py (worker_env), run.py (PYTHON_EXEC), argparse_util.py (PET_*).
_OWNED_NAMES: Mapping[str, str] = {
    "RANK": "the layout of the nodes decides it",
    "LOCAL_RANK": "the layout of the nodes decides it",
    "WORLD_SIZE": "use `--nnodes` and `--nproc-per-node`",
    "LOCAL_WORLD_SIZE": "use `--nproc-per-node`",
    "GROUP_RANK": "the order of the hosts map decides it",
    "GROUP_WORLD_SIZE": "use `--nnodes`",
    "NODE_RANK": "the order of the hosts map decides it",
    "MASTER_ADDR": "give the first node an `address` in the hosts map",
    "MASTER_PORT": "use `--master-port`",
    "PYTHON_EXEC": "use `--python`, or `python` in the hosts map",
    "TORCH_ELASTIC_WORKER_IDENTICAL": "it gives ranks the wrong numbers where nodes differ in their process counts",
    "GPULAYER_JOB_ID": "use `--job-id`",
    "GPULAYER_NODE_RANK": "it is the node's place in the job",
    "GPULAYER_OUTPUT_DIR": "it is the folder that gpulayer makes for the job; `--outputs` names other files",
    "GPULAYER_MARKER": "it is how a node knows the processes of the job",
}
_OWNED_PREFIXES: Mapping[str, str] = {
    "PET_": "torchrun would read it as one of its own options; use gpulayer's option instead",
    "TORCHELASTIC_": "it belongs to torchrun and its worker processes",
    "ROLE_": "it belongs to torchrun and its worker processes",
}


def owner_of(name: str) -> str | None:
    """Return what to do instead of setting a variable that torchrun or gpulayer sets; None for any other."""
    return _OWNED_NAMES.get(name) or next(
        (text for prefix, text in _OWNED_PREFIXES.items() if name.startswith(prefix)), None
    )


def check_env_name(name: str, where: str) -> None:
    """Raise JobError when a job may not set this environment variable. `where` says where it was written."""
    _check(values.check_env_name, name, where)
    if name.startswith("-"):
        raise JobError(f"{where}: `{name}` is no variable name: it begins with `-`")
    if advice := owner_of(name):
        raise JobError(f"{where}: `{name}` cannot be set, torchrun or gpulayer sets it on every node", hint=advice)


@dataclass(frozen=True, slots=True)
class EnvValue:
    """A value for one environment variable of the job.

    `literal` values came by name from the login environment: they are data, neither substituted nor checked for
    placeholders.
    """

    value: str
    literal: bool = False


def parse_env_option(text: str, environ: Mapping[str, str]) -> tuple[str, EnvValue]:
    """Read one `--env` option: `NAME=VALUE`, or `NAME` to pass on what `environ` holds.

    Raises JobError for a name that cannot be set and for a `NAME` that `environ` lacks.
    """
    name, equals, value = text.partition("=")
    check_env_name(name, f"`--env {name}`")
    if equals:
        return name, EnvValue(value)
    if name not in environ:
        raise JobError(
            f"`--env {name}`: `{name}` is not set here",
            hint=f"export it first, or give a value: `--env {name}=VALUE`",
        )
    return name, EnvValue(environ[name], literal=True)


def parse_env_options(texts: Iterable[str], environ: Mapping[str, str]) -> dict[str, EnvValue]:
    """Read all `--env` options. Raises JobError as `parse_env_option` does, and for one name with two values."""
    env: dict[str, EnvValue] = {}
    for text in texts:
        name, value = parse_env_option(text, environ)
        if env.setdefault(name, value) != value:
            raise JobError(f"`--env {name}` is given twice with different values", hint="keep one of the two")
    return env


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class RendezvousSpec(_Frozen):
    """Where and for how long the nodes wait for each other. The address is the placement's: node rank 0's."""

    kind: RendezvousKind = "static"
    """How torchrun's agents meet: `static` or `c10d`."""
    port: int = DEFAULT_MASTER_PORT
    """Port on node rank 0 (`--master-port`)."""
    port_is_default: bool = True
    """False when somebody asked for this port: then no other one may be proposed."""
    join_timeout_s: float = 300.0
    """All ranks of all nodes have started within this time, or the job fails (`--join-timeout`)."""

    @field_validator("join_timeout_s")
    @classmethod
    def _join_timeout(cls, value: float) -> float:
        return seconds("--join-timeout", value)


class DistributedJob(_Frozen):
    """One torchrun job, before it is known where it runs.

    Values are checked when the job is made; a wrong one raises JobError. `None` leaves a choice to the hosts map.
    """

    entrypoint: str
    """The script, or with `module` the module, that torchrun starts on every rank."""
    args: tuple[str, ...] = ()
    """What follows the script, as typed."""
    module: bool = False
    """`entrypoint` is a module name, as after `python -m`."""
    nnodes: int | None = None
    """How many nodes to draw; None: all of them."""
    nproc_per_node: int | None = None
    """Ranks on each node; None: as many as the node's `gpus`."""
    rendezvous: RendezvousSpec = RendezvousSpec()
    """Port and patience of the rendezvous."""
    launcher: LauncherName = "torchrun"
    """What starts the processes of a node."""
    comm_backend: CommBackend | None = None
    """What the script shall give `init_process_group`; it reaches the script as GPULAYER_COMM_BACKEND."""
    python: str | None = None
    """Replaces `python` of every node."""
    workdir: str | None = None
    """Replaces `workdir` of every node."""
    interface: str | None = None
    """Replaces `interface` of every node."""
    env: dict[str, EnvValue] = {}
    """Environment for all nodes; it wins over the hosts map."""
    bundle: str | None = None
    """The folder on the login node whose files every node gets; the job's working directory is then a copy of it."""
    max_bundle_bytes: int = 2_000_000_000
    """A larger bundle is refused."""
    outputs: tuple[str, ...] = ()
    """What comes back at the end: paths and patterns, relative to the working directory."""
    max_output_bytes: int = 10_000_000_000
    """More than this is not brought back from a node."""
    failure_policy: Literal["fail_fast"] = "fail_fast"
    """The first failure ends the job everywhere."""
    max_attempts: Literal[1] = 1
    """A distributed job is not repeated behind its user's back."""
    timeout_s: float | None = None
    """The job is ended after this time; None: never."""
    grace_s: float = 30.0
    """Between SIGTERM and SIGKILL when the job is ended."""
    lost_after_s: float = 30.0
    """A node that has not been heard for this long is lost, and ends its part by itself."""

    @field_validator("entrypoint")
    @classmethod
    def _entrypoint(cls, value: str) -> str:
        if not value:
            raise JobError("the script is an empty string", hint="name the script that every rank runs")
        if value.startswith("-"):
            # `python -u -x.py` would read it as an option of Python's.
            raise JobError(f"the script `{value}` begins with `-`", hint=f"write `./{value}`")
        return value

    @field_validator("python", "interface")
    @classmethod
    def _replacement(cls, value: str | None, info: ValidationInfo) -> str | None:
        if value is not None:
            check = values.check_python if info.field_name == "python" else values.check_interface
            _check(check, value, f"`--{info.field_name}`")
        return value

    @field_validator("bundle")
    @classmethod
    def _bundle(cls, value: str | None) -> str | None:
        if value is not None:
            _check(values.check_file_folder, value, "`--bundle`")
        return value

    @field_validator("workdir")
    @classmethod
    def _workdir(cls, value: str | None) -> str | None:
        if value is not None:
            if value.startswith("~"):
                raise JobError(f"`--workdir {value}`: nothing expands `~` here", hint="write the full path")
            # An option may be relative to where gpulayer is started, as for other commands; the map's keys may not.
            _check(values.check_workdir, value if value.startswith("/") or not value else f"/{value}", "`--workdir`")
        return value

    @field_validator("outputs")
    @classmethod
    def _outputs(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for pattern in value:
            check_output(pattern)
        return value

    @field_validator("env")
    @classmethod
    def _env(cls, value: dict[str, EnvValue]) -> dict[str, EnvValue]:
        for name in value:
            check_env_name(name, f"`--env {name}`")
        return value

    @field_validator("timeout_s")
    @classmethod
    def _timeout(cls, value: float | None) -> float | None:
        return value if value is None else seconds("--timeout", value)

    @field_validator("grace_s")
    @classmethod
    def _grace(cls, value: float) -> float:
        return seconds("--grace", value, zero=True)

    @field_validator("lost_after_s")
    @classmethod
    def _lost_after(cls, value: float) -> float:
        return seconds("--lost-after", value)


def _check(check: Callable[[str], None], value: str, where: str) -> None:
    """Hold an option to the rule for the key of the hosts map that it replaces."""
    try:
        check(value)
    except ValueRefusedError as error:
        raise JobError(f"{where}: `{value}` {error}", hint=error.hint) from error


def check_output(pattern: str) -> None:
    """Raise JobError for what cannot be brought back from a working directory."""
    _check(values.check_output, pattern, "`--outputs`")


def seconds(option: str, value: float, *, zero: bool = False) -> float:
    """Return a duration that makes sense. Raises JobError naming the option for any other."""
    if math.isfinite(value) and (value > 0 or (zero and value == 0)):
        return value
    raise JobError(f"`{option}` is {value:g}, a number of seconds {'from 0 up' if zero else 'above 0'} is expected")
