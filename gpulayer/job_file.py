"""The job file: job.toml -> JobFile, and what it says of a job once the command line has had its say.

values.py has the rules for single values, problems.py the words for what breaks them.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, WithJsonSchema

from gpulayer import values
from gpulayer.errors import JobError, JobFileError
from gpulayer.job import (
    CommBackend,
    DistributedJob,
    EnvValue,
    LauncherName,
    RendezvousKind,
    RendezvousSpec,
    owner_of,
)
from gpulayer.placeholders import ESCAPE
from gpulayer.problems import Problem, explain, listed, shown, table, toml_key
from gpulayer.toml_files import FileKind, parse_toml, read_text
from gpulayer.values import ValueRefusedError

T = TypeVar("T")

JOB_FILE = FileKind(name="job file", option="--job FILE", error=JobFileError)
_STRICT = ConfigDict(frozen=True, extra="forbid", strict=True)
_OTHER_NAMES = {"max_bundle_size": "max_bundle_bytes", "max_output_size": "max_output_bytes"}
"""Keys whose field of the job has another name, since the job has bytes and the file a size."""


def _rule(check: Callable[[T], None]) -> AfterValidator:
    def validate(value: T) -> T:
        check(value)
        return value

    return AfterValidator(validate)


def _default(name: str, model: type[BaseModel] = DistributedJob) -> Any:
    """Return what holds where a key is left out, as the file would say it: the job's own default."""
    value = model.model_fields[_OTHER_NAMES.get(name, name)].default
    return values.size_text(value) if name in _OTHER_NAMES else value


def _refuse_name(name: str) -> None:
    """Refuse a variable that is somebody else's, or a key of the job that stands below `[env]` by mistake."""
    values.check_env_name(name)
    if name in JobFile.model_fields:
        raise ValueRefusedError("is a key of the job, not a variable", "write it above the first [table] of the file")
    if advice := owner_of(name):
        raise ValueRefusedError("cannot be set, torchrun or gpulayer sets it on every node", advice)


def _only_one(wanted: object, text: str, hint: str) -> BeforeValidator:
    """Make a key that has one value yet say why there is no other."""

    def validate(value: object) -> object:
        if type(value) is type(wanted) and value != wanted:
            raise ValueRefusedError(text, hint)
        return value

    return BeforeValidator(validate)


def _sized(value: object) -> object:
    values.parse_size(value)
    return value


_SIZE = WithJsonSchema(
    {"anyOf": [{"type": "integer", "minimum": 1}, {"type": "string", "pattern": values.SIZE.pattern}]}
)
_PORT = WithJsonSchema({"type": "integer", "minimum": 1, "maximum": 65535})
_COUNT = WithJsonSchema({"type": "integer", "minimum": 1})
_POSITIVE = WithJsonSchema({"type": "number", "exclusiveMinimum": 0})
_FROM_ZERO = WithJsonSchema({"type": "number", "minimum": 0})

Count = Annotated[int, _rule(values.check_count), _COUNT]
Seconds = Annotated[float, _rule(values.check_seconds), _POSITIVE]
Word = Annotated[str, _rule(values.check_word)]
OutputPattern = Annotated[str, _rule(values.check_output)]
Size = Annotated[int | str, BeforeValidator(_sized), _SIZE]
EnvName = Annotated[str, _rule(_refuse_name)]
EnvText = Annotated[str, _rule(values.check_env_value)]


class RendezvousKeys(BaseModel):
    """The keys of `[rendezvous]`: where and for how long the nodes wait for each other."""

    model_config = _STRICT

    kind: RendezvousKind = _default("kind", RendezvousSpec)
    """How the nodes meet: `static`, or `c10d` for torchrun's own exchange."""
    port: Annotated[int, _rule(values.check_port), _PORT] = _default("port", RendezvousSpec)
    """The port on node rank 0. Left out: 29500, or the next free one."""
    join_timeout_s: Seconds = _default("join_timeout_s", RendezvousSpec)
    """All ranks of all nodes have started within this time, or the job fails."""


class JobFile(BaseModel):
    """The keys at the top of the file. docs/generate_reference.py reads the docstrings."""

    model_config = _STRICT

    entrypoint: Annotated[str, _rule(values.check_script)] | None = None
    """The script that every rank runs, or with `module` the module, or with `launcher = "command"` the command.
    Placeholders such as `$NODE_RANK` are replaced. Left out: the command line must name it."""
    args: list[Word] = []
    """What follows the script, one string a word. Placeholders are replaced."""
    module: bool = _default("module")
    """`entrypoint` is a module name, as after `python -m`."""
    launcher: LauncherName = _default("launcher")
    """What starts the processes of a node: `torchrun`, `deepspeed` or `accelerate`, or `command`, which starts
    `entrypoint` itself, once on each node."""
    nnodes: Count | None = _default("nnodes")
    """How many nodes to draw. Left out: all that the hosts map has."""
    nproc_per_node: Count | None = _default("nproc_per_node")
    """How many ranks each node has. Left out: as many as the node's `gpus`."""
    comm_backend: CommBackend | None = _default("comm_backend")
    """What the script shall give `init_process_group`: `nccl` or `gloo`. It reaches the script as
    `GPULAYER_COMM_BACKEND`."""
    python: Annotated[str, _rule(values.check_python)] | None = _default("python")
    """The Python on the nodes. It replaces that of the hosts map."""
    workdir: Annotated[str, _rule(values.check_file_folder)] | None = _default("workdir")
    """The folder on the nodes in which the job starts. It replaces that of the hosts map; a relative one starts from
    the folder of the job file. With a `bundle` it is a folder of that. Placeholders are replaced."""
    interface: Annotated[str, _rule(values.check_interface)] | None = _default("interface")
    """The network interface for gloo and NCCL. It replaces that of the hosts map."""
    bundle: Annotated[str, _rule(values.check_file_folder)] | None = _default("bundle")
    """The folder on the login node whose files every node gets; the job then starts in a copy of it. A relative one
    starts from the folder of the job file."""
    max_bundle_size: Size = _default("max_bundle_size")
    """A bundle with more than this is refused."""
    outputs: list[OutputPattern] = []
    """What comes back at the end, besides all in `GPULAYER_OUTPUT_DIR`: paths and patterns, from the working directory
    on. Placeholders are replaced."""
    max_output_size: Size = _default("max_output_size")
    """More than this is not brought back from a node."""
    timeout_s: Seconds | None = _default("timeout_s")
    """The job is ended after this time. Left out: never."""
    grace_s: Annotated[float, _rule(values.check_grace), _FROM_ZERO] = _default("grace_s")
    """The time between SIGTERM and SIGKILL when the job is ended."""
    lost_after_s: Seconds = _default("lost_after_s")
    """A node that has not been heard for this long is lost, and ends its part by itself."""
    failure_policy: Annotated[
        Literal["fail_fast"],
        _only_one(
            "fail_fast",
            "is not obeyed: the first failure ends the job everywhere, since the ranks that are left would wait for it",
            'leave it out, or write "fail_fast"',
        ),
    ] = _default("failure_policy")
    """What the first failure does: it ends the job on all nodes. There is no other policy."""
    max_attempts: Annotated[
        Literal[1],
        _only_one(
            1,
            "is not obeyed: a distributed job is not repeated behind its user's back",
            "leave it out, and start the job again once you know why it failed",
        ),
    ] = _default("max_attempts")
    """How often the job is started: once."""
    rendezvous: RendezvousKeys = RendezvousKeys()
    """A table, `[rendezvous]`."""
    env: Mapping[EnvName, EnvText] = Field(default_factory=dict)
    """Environment variables for all nodes, as strings, in a table `[env]`. They win over the hosts map's, and `-e` wins
    over them. Placeholders are replaced."""


@dataclass(frozen=True, slots=True)
class JobSettings:
    """What was said of a job: by a file, by options, or by both. Each may leave anything out.

    `fields` are those of DistributedJob, `rendezvous` those of RendezvousSpec.
    """

    fields: Mapping[str, Any]
    rendezvous: Mapping[str, Any]
    env: Mapping[str, EnvValue]

    def replaced_by(self, other: "JobSettings") -> "JobSettings":
        """Return the settings in which what `other` says wins. A script replaces all that was said of another one."""
        fields = dict(self.fields)
        if "entrypoint" in other.fields:
            fields = {name: value for name, value in fields.items() if name not in {"entrypoint", "args", "module"}}
        return JobSettings(
            {**fields, **other.fields}, {**self.rendezvous, **other.rendezvous}, {**self.env, **other.env}
        )

    def job(self, source: Path | None = None) -> DistributedJob:
        """Return the job. `source` is the job file, if there is one. Raises JobError, and JobFileError."""
        if "entrypoint" not in self.fields:
            if source:
                raise JobFileError(f"{source}: has no `entrypoint`, and the command line names no SCRIPT")
            raise JobError(
                "there is no SCRIPT to run, and no `--job FILE` that names one",
                hint="`gpulayer run --help` shows what it takes",
            )
        if "max_bundle_bytes" in self.fields and "bundle" not in self.fields:
            raise JobError(
                "`--max-bundle-size` says how large a bundle may be, and there is none", hint="add `--bundle DIR`"
            )
        return DistributedJob(**self.fields, rendezvous=RendezvousSpec(**self.rendezvous), env=dict(self.env))


def load_job(path: Path, text: str | None = None) -> JobSettings:
    """Read and check a job file, `text` or what the file holds. Raises JobFileError naming each key to mend."""
    document = parse_toml(path, read_text(path, JOB_FILE) if text is None else text, JOB_FILE)
    try:
        file = JobFile.model_validate(document)
    except ValidationError as error:
        _fail(path, [_explain(dict(details)) for details in error.errors(include_url=False)])
    return _settings(file, path.absolute().parent)


def _settings(file: JobFile, folder: Path) -> JobSettings:
    said = {name: getattr(file, name) for name in file.model_fields_set}
    rendezvous = {name: getattr(file.rendezvous, name) for name in file.rendezvous.model_fields_set}
    if "port" in rendezvous:
        rendezvous["port_is_default"] = False
    said.pop("rendezvous", None)
    env = {name: EnvValue(value) for name, value in said.pop("env", {}).items()}
    fields = {_OTHER_NAMES.get(name, name): value for name, value in said.items()}
    sizes = {other: values.parse_size(said[name]) for name, other in _OTHER_NAMES.items() if name in said}
    if "bundle" in said:
        fields["bundle"] = str(folder / said["bundle"])
    if "workdir" in said and "bundle" not in said:  # the folder's own name is data: nothing in it is a placeholder
        fields["workdir"] = str(Path(str(folder).replace("$", f"${{{ESCAPE}}}")) / said["workdir"])
    return JobSettings({**fields, **sizes}, rendezvous, env)


def _fail(path: Path, problems: list[Problem]) -> NoReturn:
    message, hint = listed(path, problems)
    raise JobFileError(message, hint=hint)


def _explain(details: dict[str, Any]) -> Problem:
    """Put one entry of pydantic's `errors()` in plain words."""
    known = (tuple(JobFile.model_fields), tuple(RendezvousKeys.model_fields))
    if isinstance(details["loc"][-1], int):
        return _explain_item(str(details["loc"][0]), details["loc"][-1], details)
    *tables, key = (str(part) for part in details["loc"] if part != "[key]")
    if details["type"] == "extra_forbidden":
        where = f"{table(*tables)} {toml_key(key)}" if tables else toml_key(key)
        if tables and key in known[0]:
            return Problem(
                where, "is a key of the job, not of this table", "write it above the first [table] of the file"
            )
        if not tables and key in known[1]:
            return Problem(where, "is a key of a table", "write it below [rendezvous]")
    return explain(details, known)


def _explain_item(key: str, number: int, details: Mapping[str, Any]) -> Problem:
    """Say what is wrong with one word of a list."""
    where = f"{key}[{number}] = {shown(details['input'])}"
    refused = details.get("ctx", {}).get("error")
    if isinstance(refused, ValueRefusedError):
        return Problem(where, str(refused), refused.hint)
    return Problem(where, "is not a string", "put it in quotes")
