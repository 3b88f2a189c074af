"""What can be said on the command line, in torchrun's and ssh's words, about hosts maps and nodes.

A command takes one of these classes as its only argument (`takes`). No `from __future__ import annotations` here: typer
reads the annotations themselves.
"""

import functools
import inspect
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from gpulayer.errors import JobError

Options = TypeVar("Options")


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


def size_in_bytes(text: str) -> int:
    """Read a size."""
    from gpulayer.values import ValueRefusedError, parse_size

    try:
        return parse_size(int(text) if text.isascii() and text.isdigit() else text)
    except ValueRefusedError as error:
        raise typer.BadParameter(f"`{text}` {error}") from None


def option(*names: str, text: str, metavar: str | None = None) -> Any:
    """Return typer's description of one option."""
    return typer.Option(*names, help=text, metavar=metavar, show_default=False)


def number(*names: str, text: str, metavar: str) -> Any:
    """Return typer's description of an option that takes a whole number."""
    return typer.Option(*names, help=text, metavar=metavar, parser=whole_number, show_default=False)


def size(*names: str, text: str) -> Any:
    """Return typer's description of an option that takes a size, as in `200MB`."""
    return typer.Option(*names, help=text, metavar="SIZE", parser=size_in_bytes, show_default=False)


def duration(*names: str, text: str) -> Any:
    """Return typer's description of an option that takes seconds."""
    return typer.Option(*names, help=text, metavar="SECONDS", parser=seconds, show_default=False)


@dataclass(frozen=True)
class HostsOptions:
    """Which hosts map to read."""

    hosts: Annotated[
        str | None,
        option("-H", "--hosts", metavar="FILE", text="Hosts map, hostfile or `slurm` [./hosts.toml]."),
    ] = None
    ssh_config: Annotated[
        Path | None,
        option("-F", "--ssh-config", metavar="FILE", text="SSH configuration, or `none` [~/.ssh/config]."),
    ] = None

    @property
    def found_by(self) -> str:
        """What another command must be given to find the same nodes, each with a space before it."""
        given = (("-H", self.hosts), ("-F", self.ssh_config))
        return "".join(f" {name} {shlex.quote(str(value))}" for name, value in given if value is not None)


@dataclass(frozen=True, kw_only=True)
class ReachOptions:
    """How nodes are logged in to."""

    connect_timeout: Annotated[
        float,
        duration("--connect-timeout", text="For the SSH login on each node [10]."),
    ] = 10.0
    accept_new_host_keys: Annotated[
        bool, option("--accept-new-host-keys", text="Add the host keys of new hosts to known_hosts.")
    ] = False


def refuse_unprobed(options: ReachOptions, **more: object) -> None:
    """Raise JobError for an option about logging in, where nobody does. `more` are further ones, None where unset."""
    plain = ReachOptions()
    for name, value in {**vars(options), **more}.items():
        if (name in vars(plain) or name in more) and value != vars(plain).get(name):
            option_name = "--" + name.replace("_", "-")
            raise JobError(f"`{option_name}` is about logging in, which only `--probe` does here", hint="add `--probe`")


@dataclass(frozen=True, kw_only=True)
class AskOptions(ReachOptions, HostsOptions):
    """Which nodes to ask what is on them, and how the answer is printed."""

    nodelist: Annotated[
        str | None,
        option("-w", "--nodelist", metavar="RANGES", text="These nodes only: gpu-[01-04]."),
    ] = None
    exclude: Annotated[str | None, option("-x", "--exclude", metavar="RANGES", text="None of these nodes.")] = None
    as_json: Annotated[bool, option("--json", text="Print JSON.")] = False


@dataclass(frozen=True, kw_only=True)
class MapOptions(AskOptions):
    """What to show of the map."""

    probe: Annotated[bool, option("--probe", text="Log in to the nodes and ask them.")] = False

    def __post_init__(self) -> None:
        """Refuse an option that would be read and not obeyed."""
        if not self.probe:
            refuse_unprobed(self)


@dataclass(frozen=True, kw_only=True)
class KillOptions(AskOptions):
    """Which job to end, and how soon."""

    job: Annotated[str | None, typer.Argument(metavar="JOB", show_default=False, hidden=True)] = None
    all: Annotated[bool, option("--all", text="End every job of yours; of root's: of everyone's.")] = False
    yes: Annotated[bool, option("-y", "--yes", text="With --all: do not ask.")] = False
    grace: Annotated[float, duration("--grace", text="Between SIGTERM and SIGKILL [30].")] = 30.0

    def __post_init__(self) -> None:
        """Refuse what does not say which job is meant, or would be read and not obeyed."""
        if bool(self.job) == self.all:
            what = "both name what to end" if self.all else "neither of them is given"
            raise JobError(f"JOB or `--all`: {what}", hint="`gpulayer ps` lists the jobs")
        if self.yes and not self.all:
            raise JobError("`--yes` answers what `--all` asks", hint="leave it out: `gpulayer kill JOB` does not ask")


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
