"""The options of the commands that are about one job, and what they say of it.

No `from __future__ import annotations` here: typer reads the annotations themselves.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gpulayer.errors import JobError
from gpulayer.options import HostsOptions, ReachOptions, duration, number, option, seconds, size
from gpulayer.options_plan import refuse_beside_plan

if TYPE_CHECKING:
    from gpulayer.job import DistributedJob
    from gpulayer.job_file import JobSettings

NO_SCRIPT = "(none)"  # what a plan names where only nodes are checked
BESIDE_PLAN = {"hosts", "ssh_config", "env", "format"}
"""The fields of PlanOptions that do not change a saved plan."""


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


class LauncherChoice(StrEnum):
    """What starts the ranks of a node."""

    TORCHRUN = "torchrun"
    DEEPSPEED = "deepspeed"
    ACCELERATE = "accelerate"


class Rendezvous(StrEnum):
    """How torchrun's agents meet."""

    STATIC = "static"
    C10D = "c10d"


class Label(StrEnum):
    """What stands in front of each line."""

    RANK = "rank"
    ID = "id"


@dataclass(frozen=True, kw_only=True)
class NodesOptions(HostsOptions):
    """Which nodes to draw, and what their part of a job is like."""

    job_file: Annotated[
        Path | None, option("--job", metavar="FILE", text="What to run, in a file. Options win over it.")
    ] = None
    nnodes: Annotated[int | None, number("-N", "--nnodes", metavar="N", text="Nodes to draw [all of the map].")] = None
    nodelist: Annotated[
        str | None,
        option("-w", "--nodelist", metavar="RANGES", text="Draw from these nodes only: gpu-[01-04]."),
    ] = None
    exclude: Annotated[str | None, option("-x", "--exclude", metavar="RANGES", text="Draw none of these nodes.")] = None
    nproc_per_node: Annotated[
        int | None,
        number("--nproc-per-node", metavar="P", text="Processes on each node [the node's `gpus`]."),
    ] = None
    python: Annotated[
        str | None, option("--python", metavar="PATH", text="Python on the nodes [the map's `python`].")
    ] = None
    workdir: Annotated[
        str | None,
        option("-C", "--workdir", metavar="DIR", text="Folder on the nodes [the map's, else this one]."),
    ] = None
    bundle: Annotated[
        str | None,
        option("--bundle", metavar="DIR", text="Take the code in this folder to every node."),
    ] = None
    max_bundle_size: Annotated[
        int | None,
        size("--max-bundle-size", text="Refuse a bundle above this [2GB]."),
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

    def job(self, environ: Mapping[str, str]) -> "DistributedJob":
        """Return the job that is asked for, by options and by the job file. Raises JobError and JobFileError."""
        from gpulayer.job_file import load_job

        said = self.said(environ)
        if self.job_file:
            said = load_job(self.job_file).replaced_by(said)
        return said.job(self.job_file)

    def said(self, environ: Mapping[str, str]) -> "JobSettings":
        """Return what these options say of a job; what they leave out is for the job file and for the job itself."""
        from gpulayer.job import parse_env_options
        from gpulayer.job_file import JobSettings

        fields, rendezvous = self.said_of_fields(), self.said_of_rendezvous()
        return JobSettings(
            {name: value for name, value in fields.items() if value is not None},
            {name: value for name, value in rendezvous.items() if value is not None},
            parse_env_options(self.env or (), environ),
        )

    def said_of_fields(self) -> dict[str, Any]:
        """Return fields of DistributedJob, None for what is left out."""
        return {
            "nnodes": self.nnodes,
            "nproc_per_node": self.nproc_per_node,
            "comm_backend": self.backend and self.backend.value,
            "python": self.python,
            "workdir": self.workdir,
            "bundle": self.bundle,
            "max_bundle_bytes": self.max_bundle_size,
            "interface": self.interface,
        }

    def said_of_rendezvous(self) -> dict[str, Any]:
        """Return fields of RendezvousSpec, None for what is left out."""
        return {"port": self.master_port, "port_is_default": None if self.master_port is None else False}


@dataclass(frozen=True, kw_only=True)
class ScriptOptions:
    """What SCRIPT is."""

    script: Annotated[str | None, typer.Argument(metavar="SCRIPT", show_default=False, hidden=True)] = None
    module: Annotated[bool, option("-m", "--module", text="SCRIPT is a module, as for python -m.")] = False

    def said_of_script(self) -> dict[str, Any]:
        """Return fields of DistributedJob, none where there is no SCRIPT. Raises JobError."""
        if self.script is None:
            if self.module:
                raise JobError(
                    "`--module` says what SCRIPT is, and there is none", hint="name the module, or leave it out"
                )
            return {}
        return {"entrypoint": self.script, "module": self.module}


@dataclass(frozen=True, kw_only=True)
class LimitOptions:
    """How long things may take, the job's name, and the form of its plan."""

    timeout: Annotated[float | None, duration("--timeout", text="End the job after this [never].")] = None
    grace: Annotated[float | None, duration("--grace", text="Between SIGTERM and SIGKILL [30].")] = None
    lost_after: Annotated[
        float | None,
        duration("--lost-after", text="A node unheard for this long is lost [30]."),
    ] = None
    job_id: Annotated[str | None, option("--job-id", metavar="ID", text="Name the job [time and chance].")] = None
    format: Annotated[Format, option("--format", text="How a plan is printed [text].")] = Format.TEXT
    output: Annotated[
        Path | None, option("-o", "--output", metavar="FILE", text="Save the plan for `run --plan`; `-` is stdout.")
    ] = None

    def refuse_unsaved(self, *, runs: bool) -> None:
        """Raise JobError where the plan would not be saved as it was asked for."""
        if self.output and self.format is Format.SHELL:
            raise JobError("`--format shell` is no form that a plan is saved in", hint="leave it out beside `--output`")
        if self.output and runs:
            raise JobError(
                "`--output` saves a plan, and nothing is run then", hint="add `--dry-run`, or use `gpulayer render`"
            )

    def said_of_limits(self) -> dict[str, Any]:
        """Return fields of DistributedJob, None for what is left out."""
        return {"timeout_s": self.timeout, "grace_s": self.grace, "lost_after_s": self.lost_after}


@dataclass(frozen=True, kw_only=True)
class RanksOptions:
    """What starts the ranks, and how they meet."""

    launcher: Annotated[LauncherChoice | None, option("--launcher", text="What starts the ranks [torchrun].")] = None
    rendezvous: Annotated[Rendezvous | None, option("--rendezvous", text="How torchrun's agents meet [static].")] = None
    join_timeout: Annotated[
        float | None,
        duration("--join-timeout", text="All ranks have started within this [300]."),
    ] = None

    def said_of_ranks(self) -> dict[str, Any]:
        """Return fields of RendezvousSpec, None for what is left out."""
        return {"kind": self.rendezvous and self.rendezvous.value, "join_timeout_s": self.join_timeout}


@dataclass(frozen=True, kw_only=True)
class OutputOptions:
    """What comes back at the end."""

    outputs: Annotated[
        list[str] | None,
        option("--outputs", metavar="PATTERN", text="Bring these files of the workdir back. Repeatable."),
    ] = None
    max_output_size: Annotated[
        int | None,
        size("--max-output-size", text="Bring back no more than this from a node [10GB]."),
    ] = None

    def said_of_outputs(self) -> dict[str, Any]:
        """Return fields of DistributedJob, None for what is left out."""
        return {"outputs": tuple(self.outputs) if self.outputs else None, "max_output_bytes": self.max_output_size}


@dataclass(frozen=True, kw_only=True)
class PlanOptions(LimitOptions, OutputOptions, RanksOptions, ScriptOptions, NodesOptions):
    """All that decides a plan."""

    args: Annotated[list[str] | None, typer.Argument(metavar="ARGS", show_default=False, hidden=True)] = None

    def __post_init__(self) -> None:
        """Refuse an option that would be read and not obeyed."""
        self.refuse_unsaved(runs=False)

    def said_of_fields(self) -> dict[str, Any]:
        """Return fields of DistributedJob, None for what is left out. Raises JobError."""
        script = self.said_of_script()
        if script:
            script["args"] = tuple(self.args or ())
        script["launcher"] = self.launcher and self.launcher.value
        return {**super().said_of_fields(), **self.said_of_limits(), **self.said_of_outputs(), **script}

    def said_of_rendezvous(self) -> dict[str, Any]:
        """Return fields of RendezvousSpec, None for what is left out."""
        return {**super().said_of_rendezvous(), **self.said_of_ranks()}


@dataclass(frozen=True, kw_only=True)
class PreflightOptions(ReachOptions):
    """How nodes are reached and checked before anything starts."""

    preflight_timeout: Annotated[
        float,
        duration("--preflight-timeout", text="For the checks on each node [30]."),
    ] = 30.0
    allow_dirty: Annotated[
        bool, option("--allow-dirty", text="Run beside other processes on the GPUs, with a warning.")
    ] = False
    strict: Annotated[bool, option("--strict", text="Take each warning of the checks for a failure.")] = False


@dataclass(frozen=True, kw_only=True)
class CheckOptions(PreflightOptions, ScriptOptions, NodesOptions):
    """The checks alone, for a script or for none."""

    format: Annotated[CheckFormat, option("--format", text="How findings are printed [text].")] = CheckFormat.TEXT

    def said_of_fields(self) -> dict[str, Any]:
        """Return fields of DistributedJob, None for what is left out. Raises JobError."""
        script = self.said_of_script()
        if not script and self.job_file is None:
            script = {"entrypoint": NO_SCRIPT}
        return {**super().said_of_fields(), **script}


@dataclass(frozen=True, kw_only=True)
class CarryOutOptions(PreflightOptions):
    """How to carry a plan out and show it."""

    dry_run: Annotated[bool, option("--dry-run", text="Print the plan and touch nothing.")] = False
    wait: Annotated[
        float | None,
        typer.Option(
            "--wait",
            metavar="[SECONDS]",
            parser=seconds,
            show_default=False,
            help="Wait for nodes that other jobs hold, so long or for ever.",
        ),
    ] = None
    no_preflight: Annotated[bool, option("--no-preflight", text="Start without the checks.")] = False
    run_dir: Annotated[
        Path | None,
        option("--run-dir", metavar="DIR", text="Logs and receipt of this run [runs/JOB-ID]."),
    ] = None
    label: Annotated[Label, option("--label", text="In front of each line: node rank or node id [rank].")] = Label.RANK
    verbose: Annotated[
        bool, option("-v", "--verbose", text="Show each node's steps, and its output while it ends.")
    ] = False
    as_json: Annotated[bool, option("--json", text="Tell what happens as lines of JSON on stdout.")] = False

    def refuse_unobeyed(self, form: Format) -> None:
        """Raise JobError for an option that would be read and not obeyed."""
        if self.wait is not None and not self.wait >= 0:
            raise JobError(f"`--wait` is {self.wait:g}, a number of seconds from 0 up is expected")
        if self.as_json and self.dry_run:
            raise JobError("`--json` is about a run, and `--dry-run` makes none", hint="add `--format json` instead")
        if self.as_json and (self.verbose or self.label is not Label.RANK):
            option_name = "--verbose" if self.verbose else "--label"
            raise JobError(
                f"`{option_name}` is about what people see, and `--json` is for scripts", hint="keep one of the two"
            )
        if form is not Format.TEXT and not self.dry_run:
            raise JobError(
                f"`--format {form}` says how a plan is printed, and a run prints none",
                hint="add `--dry-run` to print the plan, or leave `--format` out",
            )
        if self.no_preflight and (self.allow_dirty or self.strict):
            option_name = "--allow-dirty" if self.allow_dirty else "--strict"
            raise JobError(
                f"`{option_name}` is about the checks, which `--no-preflight` leaves out", hint="keep one of the two"
            )


@dataclass(frozen=True, kw_only=True)
class RunOptions(CarryOutOptions, PlanOptions):
    """A plan, and how to carry it out and show it."""

    plan: Annotated[Path | None, option("--plan", metavar="FILE", text="Run this saved plan, exactly.")] = None

    def __post_init__(self) -> None:
        """Refuse an option that would be read and not obeyed."""
        if self.plan:
            refuse_beside_plan(self, PlanOptions, BESIDE_PLAN)
        self.refuse_unsaved(runs=not self.dry_run)
        self.refuse_unobeyed(self.format)


@dataclass(frozen=True, kw_only=True)
class ExecOptions(CarryOutOptions, LimitOptions, OutputOptions, NodesOptions):
    """A command for every node, and how to carry it out and show it."""

    command: Annotated[str | None, typer.Argument(metavar="CMD", show_default=False, hidden=True)] = None
    args: Annotated[list[str] | None, typer.Argument(metavar="ARGS", show_default=False, hidden=True)] = None

    def __post_init__(self) -> None:
        """Refuse an option that would be read and not obeyed."""
        self.refuse_unsaved(runs=not self.dry_run)
        self.refuse_unobeyed(self.format)

    def job(self, environ: Mapping[str, str]) -> "DistributedJob":
        """Return the job that is asked for. Raises JobError and JobFileError."""
        if self.command is None and self.job_file is None:
            raise JobError(
                "there is no command to run, and no `--job FILE` that has one",
                hint="write it after the options: `gpulayer exec -N 2 -- CMD ARGS...`",
            )
        job = super().job(environ)
        if job.launcher != "command":
            raise JobError(
                f"`exec` is for commands, and `launcher` in {self.job_file} is `{job.launcher}`",
                hint=f"`gpulayer run --job {self.job_file}` runs it",
            )
        return job

    def said_of_fields(self) -> dict[str, Any]:
        """Return fields of DistributedJob, None for what is left out."""
        said = {**super().said_of_fields(), **self.said_of_limits(), **self.said_of_outputs()}
        if self.command is not None:
            said |= {"entrypoint": self.command, "args": tuple(self.args or ()), "launcher": "command"}
        return said
