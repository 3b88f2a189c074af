"""The commands: the one place that catches, prints and exits. What an option means is in options.py."""

from __future__ import annotations

import os
import secrets
import signal
import sys
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from gpulayer import __version__
from gpulayer.errors import GpulayerError, JobError, RequestError
from gpulayer.options import (
    CheckFormat,
    CheckOptions,
    Format,
    HostsOptions,
    NodesOptions,
    PlanOptions,
    RunOptions,
    takes,
)
from gpulayer.screen import open_standard_fds

if TYPE_CHECKING:
    from collections.abc import Callable

    from gpulayer.console import Console
    from gpulayer.job import DistributedJob
    from gpulayer.plan import Plan
    from gpulayer.preflight import PreflightSettings
    from gpulayer.ssh import SshSettings

UsageError: type[Exception] = typer.BadParameter.__mro__[1]  # click's, wherever typer has it from
EXIT_INTERRUPTED = 130

app = typer.Typer(
    name="gpulayer",
    help="Run one torchrun job across machines over SSH, and get every GPU back when it ends.",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={
        "help_option_names": ["-h", "--help"],
        "token_normalize_func": lambda token: token.replace("_", "-"),  # as torchrun reads its own options
    },
)
SCRIPT_LAST = {"allow_interspersed_args": False}


def main() -> None:
    """Run the command line of this process and exit."""
    open_standard_fds()
    try:
        code = run_cli(sys.argv[1:])
    except KeyboardInterrupt:  # while it was saying how it ended
        code = EXIT_INTERRUPTED
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Python's own way out would answer with a traceback
    sys.exit(code)


def run_cli(args: list[str]) -> int:
    """Run one command line and return its exit code; whatever a user can cause ends as a message here."""
    try:
        return int(app(args or ["--help"], prog_name="gpulayer", standalone_mode=False) or 0)
    except GpulayerError as error:
        return _failed(error)
    except UsageError as error:
        context = getattr(error, "ctx", None)  # an option without its value has none
        command = context.command_path if context else " ".join(["gpulayer", *filter(str.isidentifier, args[:1])])
        message = error.format_message() if hasattr(error, "format_message") else str(error)
        message = message.removesuffix(".").replace("Value error, ", "")  # pydantic's words, by way of typer
        return _failed(RequestError(message, hint=f"`{command} --help` shows what it takes"))
    except (KeyboardInterrupt, typer.Abort):
        return _failed(None)


def _failed(error: GpulayerError | None) -> int:
    console = _console()
    if error is None:
        console.block("gpulayer: interrupted", "bad")
    else:
        console.print_error(error)
    console.close()
    return error.exit_code if error else EXIT_INTERRUPTED


def _console() -> Console:
    from gpulayer.console import Console, Terminal

    return Console(Terminal.detect(os.environ))


def _show_version(wanted: bool) -> None:
    if wanted:
        sys.stdout.write(f"gpulayer {__version__}\n")
        raise typer.Exit


@app.callback()
def _gpulayer(
    version: bool = typer.Option(False, "--version", help="Print the version and exit.", callback=_show_version),
) -> None:
    """Take the options that stand before the command."""


@app.command(context_settings=SCRIPT_LAST, short_help="Launch a torchrun job on drawn nodes.")
@takes(RunOptions)
def run(options: RunOptions) -> int:
    """Launch a torchrun job on drawn nodes. All after SCRIPT is the script's."""
    planned = make_plan(options, options.job(os.environ), options.job_id)
    ssh = _ssh_settings(options)
    if options.dry_run:
        return show_plan(planned.plan, options.format)
    from gpulayer.console import ConsoleOptions, Terminal
    from gpulayer.launch import LaunchSettings, launch

    settings = LaunchSettings(
        cwd=Path.cwd(),
        run_dir=options.run_dir,
        ssh=ssh,
        console=ConsoleOptions(label=options.label.value, verbose=options.verbose),
        preflight=None if options.no_preflight else _preflight_settings(planned, options),
    )
    return launch(planned.plan, settings, Terminal.detect(os.environ))


@app.command(context_settings=SCRIPT_LAST, short_help="Print the plan of a job and touch nothing.")
@takes(PlanOptions)
def render(options: PlanOptions) -> int:
    """Print the plan of a job and touch nothing: what `run` with the same options would send."""
    return show_plan(make_plan(options, options.job(os.environ), options.job_id).plan, options.format)


@app.command(context_settings=SCRIPT_LAST, short_help="Check whether a job would run, and start nothing.")
@takes(CheckOptions)
def check(options: CheckOptions) -> int:
    """Run the checks of `run` on the drawn nodes, for SCRIPT or for none, and start nothing."""
    planned = make_plan(options, options.job(os.environ), None)
    from gpulayer.console import Terminal
    from gpulayer.launch import check_nodes

    settings = _preflight_settings(planned, options)
    as_json = options.format is CheckFormat.JSON
    terminal = Terminal.detect(os.environ)
    return check_nodes(planned.plan, _ssh_settings(options), settings, terminal, as_json=as_json)


@app.command(short_help="Show the hosts map.")
@takes(HostsOptions)
def hosts(options: HostsOptions) -> int:
    """Show the hosts map: the nodes in the order in which they are drawn."""
    from gpulayer.console import render_table
    from gpulayer.hosts import find_hosts_file, load_hosts

    host_map = load_hosts(find_hosts_file(options.hosts, os.environ, Path.cwd()))
    rows = [
        (
            node.id,
            node.ssh if node.port is None else f"{node.ssh}:{node.port}",
            node.address or "-",
            "-" if node.gpu_count is None else str(node.gpu_count),
            node.python,
            node.workdir or "-",
        )
        for node in host_map.nodes
    ]
    console = _console()
    console.data(render_table(("node", "ssh", "address", "gpus", "python", "workdir"), rows, 120))
    console.close()
    return 0


@app.command(short_help="Run a real job on a practice cluster on this machine.")
def demo() -> int:
    """Start a practice cluster on this machine and run a real two-node job on it."""
    from gpulayer.demo import run_demo

    return run_demo(run_cli)


@dataclass(frozen=True, slots=True)
class Planned:
    """A plan, and how to have it with another rendezvous port."""

    plan: Plan
    replan: Callable[[int], Plan]


def make_plan(options: NodesOptions, job: DistributedJob, job_id: str | None) -> Planned:
    """Read the map, draw nodes, place ranks and resolve every command. Raises RequestError; contacts nothing."""
    from gpulayer.hosts import find_hosts_file, load_hosts
    from gpulayer.placement import NodePool, plan_group
    from gpulayer.plan import build_plan, new_job_id
    from gpulayer.resolve import is_local_address, resolve_addresses

    cwd = Path.cwd()
    _check_ssh_config(options.ssh_config)
    host_map = load_hosts(find_hosts_file(options.hosts, os.environ, cwd))
    pool = NodePool(host_map.nodes).narrow(options.nodelist, options.exclude)
    nodes = [host_map.node(node_id) for node_id in pool.acquire(job.nnodes)]
    addresses = resolve_addresses(nodes, options.ssh_config)
    placement = plan_group(
        nodes,
        nproc_per_node=job.nproc_per_node,
        master_port=job.rendezvous.port,
        resolve=lambda node: addresses[node.id],
        is_local=is_local_address,
        practice=host_map.practice,
    )
    known_id = new_job_id(datetime.now(), secrets.token_hex(2)) if job_id is None else job_id

    def plan_with(port: int) -> Plan:
        return build_plan(job, replace(placement, master_port=port), known_id, cwd)

    return Planned(plan_with(placement.master_port), plan_with)


def _ssh_settings(options: RunOptions | CheckOptions) -> SshSettings:
    from gpulayer.job import seconds
    from gpulayer.ssh import SshSettings

    connect_timeout_s = seconds("--connect-timeout", options.connect_timeout)
    return SshSettings(config=options.ssh_config, connect_timeout_s=connect_timeout_s)


def _preflight_settings(planned: Planned, options: RunOptions | CheckOptions) -> PreflightSettings:
    from gpulayer.findings import CheckOptions as Judged
    from gpulayer.job import seconds
    from gpulayer.preflight import PreflightSettings

    judged = Judged(
        backend=options.backend.value if options.backend else None,
        allow_dirty=options.allow_dirty,
        strict=options.strict,
        limit_s=seconds("--preflight-timeout", options.preflight_timeout),
    )
    return PreflightSettings(judged, options.script, options.module, planned.replan)


def _check_ssh_config(path: Path | None) -> None:
    """Raise JobError for a file that is not there: read much later, it would be every node's fault."""
    if path and str(path) != "none" and not path.is_file():
        raise JobError(f"`--ssh-config {path}`: there is no such file", hint="`--ssh-config none` reads none")


def show_plan(plan: Plan, form: Format) -> int:
    """Print a plan on stdout."""
    from gpulayer import review

    text = {Format.TEXT: review.render_text, Format.JSON: review.render_json, Format.SHELL: review.render_shell}
    console = _console()
    console.data(text[form](plan))
    return 0 if console.close(timeout_s=float("inf")) else 1
