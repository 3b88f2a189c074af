"""The commands: the one place that catches, prints and exits. What an option means is in options.py."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from gpulayer import __version__
from gpulayer.command_words import CommandGroup, RunCommand
from gpulayer.errors import GpulayerError, JobError, RequestError
from gpulayer.options import AskOptions, KillOptions, MapOptions, takes
from gpulayer.options_history import LogsOptions, RunsOptions
from gpulayer.options_init import InitOptions, JobInitOptions
from gpulayer.options_job import (
    NO_SCRIPT,
    CheckFormat,
    CheckOptions,
    ExecOptions,
    Format,
    PlanOptions,
    PreflightOptions,
    RunOptions,
)
from gpulayer.options_plan import STDIO, DiffOptions
from gpulayer.screen import open_standard_fds
from gpulayer.signals import Interrupted, ignore_all

if TYPE_CHECKING:
    from gpulayer.console import Console
    from gpulayer.hosts import HostMap, Node
    from gpulayer.leftovers import Asking
    from gpulayer.plan import Plan
    from gpulayer.preflight import PreflightSettings
    from gpulayer.request import Planned, Request
    from gpulayer.ssh import SshSettings

UsageError: type[Exception] = typer.BadParameter.__mro__[1]  # click's, wherever typer has it from

app = typer.Typer(
    name="gpulayer",
    cls=CommandGroup,
    help="Run one torchrun job across machines over SSH, and get every GPU back when it ends.",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={
        "help_option_names": ["-h", "--help"],
        "token_normalize_func": lambda token: token.replace("_", "-"),  # as torchrun reads its own options
    },
)
HOSTS_COLUMNS = 1000  # a line for each node, however long
SCRIPT_LAST = {"allow_interspersed_args": False}


def main() -> None:
    """Run the command line of this process and exit. Signals raise Interrupted here."""
    open_standard_fds()
    try:
        code = run_cli(sys.argv[1:])
    except Interrupted as interrupted:
        code = interrupted.exit_code
    ignore_all()
    if sys.stdout:  # None where it was closed
        with contextlib.suppress(OSError):
            sys.stdout.flush()  # typer's: --help
    os._exit(code)  # Python's own way out waits for every thread, one that looks up a name for instance


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
    except typer.Abort:  # a question that was not answered
        return _failed(Interrupted(signal.SIGINT))
    except Interrupted as interrupted:
        return _failed(interrupted)


def _failed(error: GpulayerError | Interrupted) -> int:
    with contextlib.suppress(Interrupted):  # an impatient one: how it ended stays as it is
        console = _console()
        if isinstance(error, Interrupted):
            console.block("gpulayer: interrupted", "bad")
        else:
            console.print_error(error)
        console.close()
    return error.exit_code


def _console() -> Console:
    from gpulayer.console import Console, Terminal

    return Console(Terminal.detect(os.environ))


def _tell(text: str) -> None:
    console = _console()
    console.block(f"gpulayer: {text}")
    console.close()


def _warn_of_bundle(request: Request) -> None:
    text = request.bundle.warning() if request.bundle else None
    if text:
        _tell(text)


def _show_version(wanted: bool) -> None:
    if wanted:
        sys.stdout.write(f"gpulayer {__version__}\n")
        raise typer.Exit


@app.callback()
def _gpulayer(
    version: bool = typer.Option(False, "--version", help="Print the version and exit.", callback=_show_version),
) -> None:
    """Take the options that stand before the command."""


@app.command(context_settings=SCRIPT_LAST, short_help="Launch a torchrun job on drawn nodes.", cls=RunCommand)
@takes(RunOptions)
def run(options: RunOptions) -> int:
    """Launch a torchrun job on drawn nodes. All after SCRIPT is the script's."""
    return _run_or_tell(options)


def _run_or_tell(options: RunOptions | ExecOptions) -> int:
    if not options.as_json:
        return _run(options)
    from gpulayer.json_screen import ErrorLine
    from gpulayer.screen import Terminal

    with ErrorLine(Terminal.detect(os.environ)):
        return _run(options)


@app.command("exec", context_settings=SCRIPT_LAST, short_help="Run a command on drawn nodes.", cls=RunCommand)
@takes(ExecOptions)
def exec_command(options: ExecOptions) -> int:
    """Run CMD once on each drawn node, as one job: the first that fails ends all. All after CMD is the command's."""
    return _run_or_tell(options)


def _run(options: RunOptions | ExecOptions) -> int:
    request, planned = _planned(options)
    _warn_of_bundle(request)
    ssh = replace(_ssh_settings(options), config=request.ssh_config)
    if options.dry_run:
        return _give_plan(planned, options)
    from gpulayer.console import ConsoleOptions, Terminal
    from gpulayer.holds import HoldSettings
    from gpulayer.launch import LaunchSettings, launch
    from gpulayer.leases import Lease, leases_folder

    began_s = time.monotonic()
    with Lease(leases_folder(os.environ), request.job_id) as lease:
        node_ids = lease.draw(request.machines(), request.acquire, options.wait, _tell)
        if set(node_ids) != set(planned.node_ids):
            planned = request.plan(node_ids)
        settings = LaunchSettings(
            cwd=Path.cwd(),
            run_dir=options.run_dir,
            ssh=ssh,
            console=ConsoleOptions(label=options.label.value, verbose=options.verbose),
            preflight=None if options.no_preflight else _preflight_settings(request, planned, options),
            holds=HoldSettings(lease.hold, began_s + (options.wait or 0.0)),
            as_json=options.as_json,
            bundle=request.bundle,
            found_by=options.found_by,
        )
        return launch(planned.plan, settings, Terminal.detect(os.environ))


@app.command(context_settings=SCRIPT_LAST, short_help="Print the plan of a job and touch nothing.")
@takes(PlanOptions)
def render(options: PlanOptions) -> int:
    """Print the plan of a job and touch nothing: what `run` with the same options would send."""
    request, planned = _planned(options)
    _warn_of_bundle(request)
    return _give_plan(planned, options)


@app.command(short_help="Show what differs between two plans.")
@takes(DiffOptions)
def diff(options: DiffOptions) -> int:
    """Show what differs between two saved plans; with one PLAN, between it and what today's hosts map makes of it."""
    from gpulayer.plan_again import changes_between, changes_since

    if options.second is None:
        lines = changes_since(options.first, options.hosts, options.ssh_config, os.environ)
    else:
        lines = changes_between(options.first, options.second)
    console = _console()
    if lines:
        console.data("".join(f"{line}\n" for line in lines))
    else:
        console.block("gpulayer: no difference")
    console.close()
    return 1 if lines else 0


@app.command(context_settings=SCRIPT_LAST, short_help="Check whether a job would run, and start nothing.")
@takes(CheckOptions)
def check(options: CheckOptions) -> int:
    """Run the checks of `run` on the drawn nodes, for SCRIPT or for none, and start nothing."""
    from gpulayer.console import Terminal
    from gpulayer.launch import check_nodes
    from gpulayer.request import read_request

    request = read_request(options, options.job(os.environ), None)
    planned = request.plan_if_all_were_free()
    _warn_of_bundle(request)
    settings = _preflight_settings(request, planned, options)
    as_json = options.format is CheckFormat.JSON
    terminal = Terminal.detect(os.environ)
    ssh = _ssh_settings(options)
    return check_nodes(planned.plan, ssh, settings, terminal, as_json=as_json, bundle=request.bundle)


@app.command("job init", short_help="Write a job file to start from.")
@takes(JobInitOptions)
def job_init(options: JobInitOptions) -> int:
    """Write a job file with all its keys and what they mean, for you to change. A file that is there is left alone."""
    from gpulayer.job_init import write_job_file

    write_job_file(options.file)
    _tell(f"wrote {options.file}; `gpulayer render --job {options.file}` shows what it would run")
    return 0


@app.command(short_help="Show the hosts map and who holds what.")
@takes(MapOptions)
def hosts(options: MapOptions) -> int:
    """Show the hosts map: the nodes in the order in which they are drawn, and which job of this login node has them."""
    from gpulayer.leases import leases_folder, look_up
    from gpulayer.request import machines_of
    from gpulayer.states import HOSTS_TABLE, by_record, hosts_json, hosts_rows, with_record

    host_map, nodes = _chosen_nodes(options)
    record = look_up(leases_folder(os.environ), machines_of(nodes, options.ssh_config), _tell)
    found = by_record(nodes, record)
    if options.probe:
        from gpulayer.leftovers import probe_nodes

        found = with_record(record, probe_nodes(_asking(options, nodes), practice=host_map.practice))
    from gpulayer.console import render_table

    console = _console()
    table = hosts_rows(nodes, found)
    console.data(hosts_json(nodes, found) if options.as_json else render_table(HOSTS_TABLE, table, HOSTS_COLUMNS))
    console.close()
    return 0


@app.command("hosts init", short_help="Write a hosts map of nodes that another source names.")
@takes(InitOptions)
def hosts_init(options: InitOptions) -> int:
    """Write a hosts map of the nodes that a hostfile, a Slurm allocation or the SSH configuration names."""
    from gpulayer.console import Terminal
    from gpulayer.hosts_init import check_target, choose_nodes, write_map
    from gpulayer.leftovers import Asking
    from gpulayer.ranges import fold
    from gpulayer.request import check_ssh_config
    from gpulayer.sources import read_source

    check_ssh_config(options.ssh_config)
    check_target(options.output, force=options.force)
    found = read_source(options.source, os.environ, Path.cwd(), options.ssh_config)
    host_map = choose_nodes(found, options.nodelist, options.exclude, options.python)
    asking = Asking(host_map.nodes, _ssh_settings(options), Terminal.detect(os.environ)) if options.probe else None
    write_map(host_map, options.output, asking=asking, force=options.force)
    ids = fold(node.id for node in host_map.nodes)
    _tell(f"wrote {options.output}: {ids}; `gpulayer check -H {options.output}` checks them")
    return 0


@app.command(short_help="Show what runs on the nodes.")
@takes(AskOptions)
def ps(options: AskOptions) -> int:
    """Ask the nodes which jobs of yours run on them, also those that nobody watches any more. As root: of everyone."""
    from gpulayer.leftovers import show_jobs

    _, nodes = _chosen_nodes(options)
    return show_jobs(_asking(options, nodes))


@app.command(short_help="End a job, or what is left of it.")
@takes(KillOptions)
def kill(options: KillOptions) -> int:
    """End JOB on the nodes from a fresh login, whether or not anything of gpulayer still runs, and see it gone."""
    from gpulayer.job import seconds
    from gpulayer.leftovers import end_jobs
    from gpulayer.plan import check_job_id

    if options.job:
        check_job_id(options.job)
    if options.all and not options.yes and not sys.stdin.isatty():
        raise JobError("`--all` asks before it ends jobs, and stdin is no terminal", hint="add `--yes`")
    grace_s = seconds("--grace", options.grace, zero=True)
    _, nodes = _chosen_nodes(options)
    return end_jobs(
        _asking(options, nodes), options.job, grace_s, _confirm if options.all and not options.yes else None
    )


def _confirm(table: str) -> bool:
    typer.echo(f"{table}end all of these? [y/N] ", nl=False, err=True)  # typer's own question writes on stdout too
    answer = sys.stdin.buffer.readline()
    if not answer:
        raise typer.Abort
    return answer.strip().lower() in {b"y", b"yes"}


def _chosen_nodes(options: AskOptions) -> tuple[HostMap, tuple[Node, ...]]:
    """Return the map, and the nodes of it that are meant. Raises RequestError."""
    from gpulayer.placement import NodePool
    from gpulayer.request import check_ssh_config
    from gpulayer.sources import read_hosts

    check_ssh_config(options.ssh_config)
    host_map = read_hosts(options.hosts, os.environ, Path.cwd())
    ids = NodePool(host_map.nodes).narrow(options.nodelist, options.exclude).acquire(None)
    return host_map, tuple(host_map.node(node_id) for node_id in ids)


def _asking(options: AskOptions, nodes: tuple[Node, ...]) -> Asking:
    from gpulayer.console import Terminal
    from gpulayer.leftovers import Asking

    terminal = Terminal.detect(os.environ)
    return Asking(nodes, _ssh_settings(options), terminal, options.as_json, options.found_by)


@app.command(short_help="List past runs, and those that go on.")
@takes(RunsOptions)
def runs(options: RunsOptions) -> int:
    """List the runs whose directories are in DIR, the newest last. DIR is ./runs where none is given."""
    from datetime import datetime

    from gpulayer.console import render_table
    from gpulayer.history import RUNS_TABLE, find_runs, runs_json, runs_rows

    folder = options.folder or Path("runs")
    found = [] if options.folder is None and not folder.exists() else find_runs(folder)
    if not found and not options.as_json:
        _tell(f"no runs in {folder}")
        return 0
    console = _console()
    table = runs_rows(found, datetime.now().astimezone())
    console.data(runs_json(found) if options.as_json else render_table(RUNS_TABLE, table, HOSTS_COLUMNS))
    console.close()
    return 0


@app.command(short_help="Show what a run's ranks wrote.")
@takes(LogsOptions)
def logs(options: LogsOptions) -> int:
    """Show what a run's ranks wrote. RUN is a job id in ./runs, a run directory, or `last`, which began last."""
    from gpulayer.console import Terminal
    from gpulayer.history import choose_run
    from gpulayer.replay import Choice, show_logs

    run = choose_run(options.run, Path("runs"))
    choice = Choice(options.node, options.rank, options.follow, options.merge)
    return show_logs(run, choice, Terminal.detect(os.environ))


@app.command(short_help="Run a real job on a practice cluster on this machine.")
def demo() -> int:
    """Start a practice cluster on this machine and run a real two-node job on it."""
    from gpulayer.demo import run_demo

    return run_demo(run_cli)


def _ssh_settings(options: RunOptions | ExecOptions | CheckOptions | AskOptions | InitOptions) -> SshSettings:
    from gpulayer.job import seconds
    from gpulayer.ssh import SshSettings

    connect_timeout_s = seconds("--connect-timeout", options.connect_timeout)
    return SshSettings(
        config=options.ssh_config,
        connect_timeout_s=connect_timeout_s,
        accept_new_host_keys=options.accept_new_host_keys,
    )


def _preflight_settings(request: Request, planned: Planned, options: PreflightOptions) -> PreflightSettings:
    from gpulayer.findings import CheckOptions as Judged
    from gpulayer.job import seconds
    from gpulayer.preflight import PreflightSettings

    judged = Judged(
        backend=request.job.comm_backend,
        allow_dirty=options.allow_dirty,
        strict=options.strict,
        limit_s=seconds("--preflight-timeout", options.preflight_timeout),
    )
    job = request.job
    script = None if job.entrypoint == NO_SCRIPT or job.launcher == "command" else job.entrypoint
    return PreflightSettings(judged, script, job.module, planned.replan)


def _planned(options: PlanOptions | ExecOptions) -> tuple[Request, Planned]:
    """Return what is to be run: a saved plan, or what the options ask for."""
    if isinstance(options, RunOptions) and options.plan:
        from gpulayer.plan_again import plan_to_run

        source, places = str(options.plan), (options.hosts, options.ssh_config)
        return plan_to_run(source, *places, env=options.env or (), run_dir=options.run_dir, environ=os.environ)
    from gpulayer.request import read_request

    request = read_request(options, options.job(os.environ), options.job_id)
    return request, request.plan_if_all_were_free()


def _give_plan(planned: Planned, options: PlanOptions | ExecOptions) -> int:
    """Print a plan, or save it."""
    if options.output is None:
        return show_plan(planned.plan, options.format)
    if planned.unsaved:
        raise planned.unsaved
    if str(options.output) == STDIO:
        return show_plan(planned.plan, Format.JSON)
    from gpulayer.plan_file import write_plan
    from gpulayer.review import render_json

    write_plan(options.output, render_json(planned.plan))
    _tell(f"wrote {options.output}: job {planned.plan.job_id}, {planned.plan.digest}")
    return 0


def show_plan(plan: Plan, form: Format) -> int:
    """Print a plan on stdout."""
    from gpulayer import review

    text = {Format.TEXT: review.render_text, Format.JSON: review.render_json, Format.SHELL: review.render_shell}
    console = _console()
    console.data(text[form](plan))
    return 0 if console.close(timeout_s=float("inf")) else 1
