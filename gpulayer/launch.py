"""Carries a plan out: run directory, screen, signals and fan-out brought together for one job."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import datetime
from typing import TYPE_CHECKING

from gpulayer.console import Console, ConsoleOptions
from gpulayer.errors import JobError, RefusedError
from gpulayer.events import Event, Output
from gpulayer.fanout import Fanout
from gpulayer.json_screen import JsonScreen
from gpulayer.logs import RunDirectory, RunPaths, raise_file_limit, run_json
from gpulayer.messages import ShownNode
from gpulayer.plan import Plan, plan_json
from gpulayer.receipt import RunFigures, receipt_json, refusal_json
from gpulayer.report import check_json, render_check, render_report
from gpulayer.signals import SignalGate
from gpulayer.ssh import SshConnector, SshSettings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from gpulayer.bundle import Bundle
    from gpulayer.holds import HoldSettings
    from gpulayer.outcome import Ledger
    from gpulayer.preflight import PreflightResult, PreflightSettings
    from gpulayer.screen import Terminal

FILES_PER_NODE = 2
SPARE_FILES = 24
FLUSH_LIMIT_S = 2.0
REFUSED = RefusedError.exit_code
# Ctrl-Z: a launcher that sleeps is a launcher that is gone, and every node would end its part.
NOT_SUSPENDED = "not suspended: the nodes would take a sleeping launcher for a lost one and end the job"


@dataclass(frozen=True, slots=True)
class LaunchSettings:
    """How to reach the nodes and where to keep and show what happens. `run_dir` None: runs/JOB-ID under `cwd`.

    `as_json`: events are shown as lines of JSON, and `console` is for nothing.
    `holds` None: in the name of whoever runs this, from now on. `found_by`: the options that led to the nodes.
    """

    cwd: Path
    run_dir: Path | None
    ssh: SshSettings
    console: ConsoleOptions
    preflight: PreflightSettings | None
    holds: HoldSettings | None = None
    as_json: bool = False
    bundle: Bundle | None = None
    found_by: str = ""


class RunObserver:
    """Hands every event to the run directory and to the screen."""

    def __init__(self, directory: RunDirectory, console: Console | JsonScreen) -> None:
        self.ledger: Ledger | None = None
        self._directory, self._console = directory, console
        self._told = False

    def handle(self, event: Event, at_s: float) -> None:
        """Keep the event, then show it."""
        write = self._directory.write_output(event, at_s) if isinstance(event, Output) else None
        notice = write or self._directory.record(event, at_s)
        if self.ledger and (cause := self.ledger.cause) and not self._told:
            self._told = True
            if cause.node_rank is not None:
                self._console.first_failure(cause.node_rank, cause.rank)
        self._console.handle(event, at_s)
        if notice:
            self._console.handle(notice, at_s)

    def tick(self, at_s: float) -> None:
        """Let the run directory and the screen catch up."""
        if notice := self._directory.tick(at_s):
            self._console.handle(notice, at_s)
        self._console.tick(at_s)


class RunBook:
    """The first line and the last of a run, in its files and on the screen."""

    def __init__(self, directory: RunDirectory, console: Console | JsonScreen, found_by: str) -> None:
        self._directory, self._console, self._found_by = directory, console, found_by
        self._began_s, self._started_at = time.monotonic(), datetime.now().astimezone()

    @property
    def paths(self) -> RunPaths:
        """The files of the run."""
        return self._directory.paths

    def begin(self, plan: Plan) -> None:
        """Keep the plan, and say which run this is. Raises JobError, and leaves no run directory then."""
        _keep_plan(plan, self._directory)
        first = run_json(plan.job_id, self._directory.paths.root, self._started_at, plan.nodes)
        if notice := self._directory.record_line(first):
            self._console.handle(notice, 0.0)
        if isinstance(self._console, JsonScreen):
            self._console.line(first)

    def finish(self, plan: Plan, ledger: Ledger, checked: PreflightResult | None) -> None:
        """Write the receipt of a job that is over."""
        directory, took_s = self._directory, self._took_s()
        loss = directory.close_files()  # over NFS, only now may a full disk be told
        ledger.logs_lost = directory.incomplete
        receipt = receipt_json(plan, ledger, self._figures(checked))
        unwritten = directory.write_receipt(receipt)
        ledger.logs_lost |= unwritten is not None
        receipt["exit_code"] = ledger.exit_code
        for notice in filter(None, (loss, unwritten)):
            self._console.handle(notice, took_s)
        self._show(receipt, render_report(plan, ledger, took_s, directory.paths.root, self._found_by))

    def refuse(self, plan: Plan, refused: RefusedError) -> None:
        """Write the receipt of a job that did not start."""
        receipt = refusal_json(plan, refused, self._figures(None))
        self._directory.write_receipt(receipt)
        self._show(receipt)

    def _show(self, receipt: dict[str, object], report: str = "") -> None:
        if isinstance(self._console, JsonScreen):
            self._console.line({"event": "receipt", **receipt})
        elif report:
            self._console.block(report, "plain")

    def _figures(self, checked: PreflightResult | None) -> RunFigures:
        directory, facts = self._directory, checked.observations.facts if checked else {}
        return RunFigures(self._started_at, self._took_s(), directory.lost_bytes, directory.node_bytes, facts)

    def _took_s(self) -> float:
        return time.monotonic() - self._began_s


def launch(plan: Plan, settings: LaunchSettings, terminal: Terminal) -> int:
    """Run the plan and return the exit code. Raises JobError (run directory) and RefusedError (nodes)."""
    most_open = _open_files(plan)
    directory = (
        RunDirectory.create_at(settings.run_dir)
        if settings.run_dir
        else RunDirectory.create(settings.cwd / "runs", plan.job_id)
    )
    directory.most_open = most_open
    nodes = _shown_nodes(plan)
    console = JsonScreen(terminal) if settings.as_json else Console(terminal, nodes, directory.paths, settings.console)
    book = RunBook(directory, console, settings.found_by)
    with SignalGate() as gate:
        try:
            book.begin(plan)
            observer = RunObserver(directory, console)
            settings = replace(settings, preflight=_keeping_plan(settings.preflight, directory))
            with _event_loop() as runner:
                ledger = runner.run(_fan_out(plan, settings, observer, gate, book))
        except RefusedError as refused:
            book.refuse(plan, refused)
            raise
        finally:
            directory.close()
            console.close(FLUSH_LIMIT_S, lambda: gate.hurried)
        gate.leave_with(ledger.exit_code)
    return ledger.exit_code


def _shown_nodes(plan: Plan) -> list[ShownNode]:
    return [ShownNode(node.node_rank, node.node_id, node.ranks, plan.command_name) for node in plan.nodes]


def _open_files(plan: Plan) -> int:
    """Make room for connections and files; return how many files of output may be open. Raises JobError."""
    connections = FILES_PER_NODE * plan.nnodes + SPARE_FILES
    outputs = sum(2 * len(node.ranks) + 2 for node in plan.nodes)
    limit = raise_file_limit(connections + outputs)
    if limit <= connections:
        raise JobError(
            f"{plan.nnodes} nodes need {connections + 1} open files, and no more than {limit} are allowed here",
            hint="`ulimit -Hn` shows the limit; raise it in /etc/security/limits.conf, or ask for fewer nodes",
        )
    return limit - connections


def _keep_plan(plan: Plan, directory: RunDirectory) -> None:
    """Write the plan, and make sure of room for the receipt. Raises JobError, and leaves no run directory then."""
    try:
        directory.write_plan(plan_json(plan))
        directory.reserve_receipt(4096 + 2048 * plan.nnodes + 512 * plan.world_size)
    except JobError:
        with contextlib.suppress(OSError):
            directory.remove()
        raise


def _keeping_plan(preflight: PreflightSettings | None, directory: RunDirectory) -> PreflightSettings | None:
    """Have plan.json follow where preflight moves the port."""
    if preflight is None:
        return None

    def replan(port: int) -> Plan:
        plan = preflight.replan(port)
        directory.write_plan(plan_json(plan))
        return plan

    return replace(preflight, replan=replan)


async def _fan_out(
    plan: Plan,
    settings: LaunchSettings,
    observer: RunObserver,
    gate: SignalGate,
    book: RunBook,
) -> Ledger:
    connector = SshConnector(settings.ssh)
    fanout = Fanout(plan, connector, observer, settings.preflight, settings.holds)
    fanout.bundle, fanout.outputs_to = settings.bundle, book.paths.outputs
    connector.tell = fanout.tell
    observer.ledger = fanout.ledger
    with _signals_to(fanout, gate):
        ledger = await fanout.run()
        book.finish(fanout.checked.plan if fanout.checked else plan, ledger, fanout.checked)
        return ledger


@contextlib.contextmanager
def _signals_to(fanout: Fanout, gate: SignalGate) -> Iterator[None]:
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTSTP, fanout.tell, NOT_SUSPENDED)
    try:
        with gate.to(loop, fanout.interrupt):
            yield
    finally:
        loop.remove_signal_handler(signal.SIGTSTP)


def check_nodes(
    plan: Plan,
    ssh: SshSettings,
    preflight: PreflightSettings,
    terminal: Terminal,
    *,
    as_json: bool,
    bundle: Bundle | None = None,
) -> int:
    """Check the nodes of a plan, show what was found, and return the exit code.

    Raises RefusedError where nodes cannot be checked, unless that is shown as data too.
    """
    _open_files(plan)
    console = Console(terminal, _shown_nodes(plan))
    with SignalGate() as gate:
        try:
            with _event_loop() as runner:
                ledger, result = runner.run(_check(plan, ssh, preflight, console, gate, bundle))
            if result is None:
                exit_code = ledger.exit_code
            elif result.problems and not as_json:
                raise result.error()
            else:
                console.data(check_json(plan, result) if as_json else render_check(plan, result))
                exit_code = REFUSED if result.failures or result.problems else 0
        finally:
            console.close(FLUSH_LIMIT_S, lambda: gate.hurried)
        gate.leave_with(exit_code)
    return exit_code


async def _check(
    plan: Plan,
    ssh: SshSettings,
    preflight: PreflightSettings,
    console: Console,
    gate: SignalGate,
    bundle: Bundle | None,
) -> tuple[Ledger, PreflightResult | None]:
    connector = SshConnector(ssh)
    fanout = Fanout(plan, connector, console, preflight)
    fanout.bundle = bundle
    connector.tell = fanout.tell
    with _signals_to(fanout, gate):
        return fanout.ledger, await fanout.check()


@contextlib.contextmanager
def _event_loop() -> Iterator[asyncio.Runner]:
    """A loop whose end does not wait for a name server that does not answer."""
    factory = _loop_factory()
    runner = asyncio.Runner(loop_factory=factory)
    runner.get_loop().set_default_executor(_Unwaited())
    try:
        yield runner
    finally:
        if factory is None:
            runner.close()  # uvloop's would wait for every name that is being looked up, and the process ends soon


class _Unwaited(ThreadPoolExecutor):
    """Threads that nobody waits for."""

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        super().shutdown(wait=False, cancel_futures=True)


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Return uvloop's event loop where it is installed: `pip install gpulayer[uvloop]`."""
    if importlib.util.find_spec("uvloop") is None:
        return None
    import uvloop

    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory
