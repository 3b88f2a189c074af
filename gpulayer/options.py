"""What can be said on the command line, in torchrun's and ssh's words, and what it means for a job.

A command takes one of these classes as its only argument (`takes`). No `from __future__ import annotations` here: typer
reads the annotations themselves.
"""

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from gpulayer.errors import JobError

if TYPE_CHECKING:
    from gpulayer.job import DistributedJob

Options = TypeVar("Options")

NO_SCRIPT = "none"  # what a plan names where only nodes are checked


class Format(StrEnum):
    """How a plan is printed."""

    TEXT = "text"
    JSON = "json"
    SHELL = "shell"


class CheckFormat(StrEnum):
    """How findings are printed."""

    TEXT = "text"
    JSON = "json"


class Backend(StrEnum):
    """What the script gives `init_process_group`."""

    GLOO = "gloo"
    NCCL = "nccl"


class Label(StrEnum):
    """What stands in front of each line."""

    RANK = "rank"
    ID = "id"


def whole_number(text: str) -> int:
    """Read a whole number. What it may be is for job.py and placement.py to say."""
    try:
        return int(text)
    except ValueError:
        raise typer.BadParameter(f"`{text}` is not a whole number") from None


def seconds(text: str) -> float:
    """Read a number of seconds."""
    try:
        return float(text)
    except ValueError:
        raise typer.BadParameter(f"`{text}` is not a number of seconds") from None


def option(*names: str, text: str, metavar: str | None = None) -> Any:
    """Return typer's description of one option."""
    return typer.Option(*names, help=text, metavar=metavar, show_default=False)


def number(*names: str, text: str, metavar: str) -> Any:
    """Return typer's description of an option that takes a whole number."""
    return typer.Option(*names, help=text, metavar=metavar, parser=whole_number, show_default=False)


def duration(*names: str, text: str) -> Any:
    """Return typer's description of an option that takes seconds."""
    return typer.Option(*names, help=text, metavar="SECONDS", parser=seconds, show_default=False)


@dataclass(frozen=True)
class HostsOptions:
    """Which hosts map to read."""

    hosts: Annotated[
        Path | None,
        option("-H", "--hosts", metavar="FILE", text="Hosts map [./hosts.toml]."),
    ] = None


@dataclass(frozen=True, kw_only=True)
class NodesOptions(HostsOptions):
    """Which nodes to draw, and what their part of a job is like."""

    ssh_config: Annotated[
        Path | None,
        option("-F", "--ssh-config", metavar="FILE", text="SSH configuration, or `none` [~/.ssh/config]."),
    ] = None
    nnodes: Annotated[int | None, number("-N", "--nnodes", metavar="N", text="Nodes to draw [all of the pool].")] = None
    nodelist: Annotated[
        str | None,
        option("-w", "--nodelist", metavar="RANGES", text="Draw from these nodes only: gpu-[01-04]."),
    ] = None
    exclude: Annotated[str | None, option("-x", "--exclude", metavar="RANGES", text="Draw none of these nodes.")] = None
    nproc_per_node: Annotated[
        int | None,
        number("--nproc-per-node", metavar="P", text="Processes on each node [the node's `gpus`]."),
    ] = None
    module: Annotated[bool, option("-m", "--module", text="SCRIPT is a module, as for python -m.")] = False
    python: Annotated[
        str | None, option("--python", metavar="PATH", text="Python on the nodes [the map's `python`].")
    ] = None
    workdir: Annotated[
        str | None,
        option("-C", "--workdir", metavar="DIR", text="Folder on the nodes [the map's, else this one]."),
    ] = None
    env: Annotated[
        list[str] | None,
        option(
            "-e",
            "--env",
            metavar="NAME[=VALUE]",
            text="Set a variable for every process, or pass one on from here. Repeatable.",
        ),
    ] = None
    backend: Annotated[
        Backend | None,
        option("--backend", text="Tell the script, in GPULAYER_COMM_BACKEND; nccl is checked for."),
    ] = None
    master_port: Annotated[
        int | None,
        number("--master-port", metavar="PORT", text="Rendezvous port [29500, or the next free one]."),
    ] = None
    interface: Annotated[
        str | None,
        option("--interface", metavar="NAME", text="For gloo and NCCL [the one with the address]."),
    ] = None

    def job_with(self, environ: Mapping[str, str], join_timeout_s: float, **more: Any) -> "DistributedJob":
        """Return the job that these options ask for; `more` are further fields of it. Raises JobError."""
        from gpulayer.job import DEFAULT_MASTER_PORT, DistributedJob, RendezvousSpec, parse_env_options

        return DistributedJob(
            module=self.module,
            nnodes=self.nnodes,
            nproc_per_node=self.nproc_per_node,
            rendezvous=RendezvousSpec(
                port=DEFAULT_MASTER_PORT if self.master_port is None else self.master_port,
                port_is_default=self.master_port is None,
                join_timeout_s=join_timeout_s,
            ),
            comm_backend=self.backend.value if self.backend else None,
            python=self.python,
            workdir=self.workdir,
            interface=self.interface,
            env=parse_env_options(self.env or (), environ),
            **more,
        )


@dataclass(frozen=True, kw_only=True)
class PlanOptions(NodesOptions):
    """All that decides a plan."""

    script: Annotated[str, typer.Argument(metavar="SCRIPT", show_default=False, hidden=True)]
    args: Annotated[list[str] | None, typer.Argument(metavar="ARGS", show_default=False, hidden=True)] = None
    timeout: Annotated[float | None, duration("--timeout", text="End the job after this [never].")] = None
    join_timeout: Annotated[
        float,
        duration("--join-timeout", text="All ranks have started within this [300]."),
    ] = 300.0
    grace: Annotated[float, duration("--grace", text="Between SIGTERM and SIGKILL [30].")] = 30.0
    lost_after: Annotated[
        float,
        duration("--lost-after", text="A node unheard for this long is lost [30]."),
    ] = 30.0
    job_id: Annotated[str | None, option("--job-id", metavar="ID", text="Name the job [time and chance].")] = None
    format: Annotated[Format, option("--format", text="How a plan is printed [text].")] = Format.TEXT

    def job(self, environ: Mapping[str, str]) -> "DistributedJob":
        """Return the job that these options ask for. Raises JobError."""
        return self.job_with(
            environ,
            self.join_timeout,
            entrypoint=self.script,
            args=tuple(self.args or ()),
            timeout_s=self.timeout,
            grace_s=self.grace,
            lost_after_s=self.lost_after,
        )


@dataclass(frozen=True, kw_only=True)
class PreflightOptions:
    """How nodes are reached and checked before anything starts."""

    connect_timeout: Annotated[
        float,
        duration("--connect-timeout", text="For the SSH login on each node [10]."),
    ] = 10.0
    preflight_timeout: Annotated[
        float,
        duration("--preflight-timeout", text="For the checks on each node [30]."),
    ] = 30.0
    allow_dirty: Annotated[
        bool, option("--allow-dirty", text="Run beside other processes on the GPUs, with a warning.")
    ] = False
    strict: Annotated[bool, option("--strict", text="Take each warning of the checks for a failure.")] = False


@dataclass(frozen=True, kw_only=True)
class CheckOptions(PreflightOptions, NodesOptions):
    """The checks alone, for a script or for none."""

    script: Annotated[str | None, typer.Argument(metavar="SCRIPT", show_default=False, hidden=True)] = None
    format: Annotated[CheckFormat, option("--format", text="How findings are printed [text].")] = CheckFormat.TEXT

    def job(self, environ: Mapping[str, str]) -> "DistributedJob":
        """Return a job to check for. Raises JobError."""
        if self.module and self.script is None:
            raise JobError("`--module` says what SCRIPT is, and there is none", hint="name the module, or leave it out")
        return self.job_with(environ, 300.0, entrypoint=self.script or NO_SCRIPT)


@dataclass(frozen=True, kw_only=True)
class RunOptions(PreflightOptions, PlanOptions):
    """A plan, and how to carry it out and show it."""

    dry_run: Annotated[bool, option("--dry-run", text="Print the plan and touch nothing.")] = False
    no_preflight: Annotated[bool, option("--no-preflight", text="Start without the checks.")] = False
    run_dir: Annotated[
        Path | None,
        option("--run-dir", metavar="DIR", text="Logs and receipt of this run [runs/JOB-ID]."),
    ] = None
    label: Annotated[Label, option("--label", text="In front of each line: node rank or node id [rank].")] = Label.RANK
    verbose: Annotated[
        bool, option("-v", "--verbose", text="Show each node's steps, and its output while it ends.")
    ] = False

    def __post_init__(self) -> None:
        """Refuse an option that would be read and not obeyed."""
        if self.format is not Format.TEXT and not self.dry_run:
            raise JobError(
                f"`--format {self.format}` says how a plan is printed, and a run prints none",
                hint="add `--dry-run` to print the plan, or leave `--format` out",
            )
        if self.no_preflight and (self.allow_dirty or self.strict):
            option_name = "--allow-dirty" if self.allow_dirty else "--strict"
            raise JobError(
                f"`{option_name}` is about the checks, which `--no-preflight` leaves out", hint="keep one of the two"
            )


def takes(options: type[Options]) -> Callable[[Callable[[Options], int]], Callable[..., int]]:
    """Turn a function of one options object into a command whose parameters are the object's fields."""

    def decorate(function: Callable[[Options], int]) -> Callable[..., int]:
        @functools.wraps(function)
        def command(**values: object) -> int:
            return function(options(**values))

        signature = inspect.signature(options)
        del command.__wrapped__  # typer would look through it
        command.__signature__ = signature  # type: ignore[attr-defined]  # what inspect.signature looks for first
        command.__annotations__ = {name: item.annotation for name, item in signature.parameters.items()}
        return command

    return decorate
