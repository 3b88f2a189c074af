"""Carries a plan out: run directory, screen, signals and fan-out brought together for one job."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import signal
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from gpulayer.console import Console, ConsoleOptions
from gpulayer.errors import RefusedError
from gpulayer.events import Event, Output
from gpulayer.fanout import Fanout
from gpulayer.logs import RunDirectory, raise_file_limit
from gpulayer.messages import ShownNode
from gpulayer.plan import Plan, plan_json
from gpulayer.report import check_json, receipt_json, refusal_json, render_check, render_report
from gpulayer.ssh import SshConnector, SshSettings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from gpulayer.outcome import Ledger
    from gpulayer.preflight import PreflightResult, PreflightSettings
    from gpulayer.screen import Terminal

ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
FILES_PER_NODE = 2
SPARE_FILES = 64
FLUSH_LIMIT_S = 2.0
REFUSED = RefusedError.exit_code
# Ctrl-Z: a launcher that sleeps is a launcher that is gone, and every node would end its part.
NOT_SUSPENDED = "not suspended: the nodes would take a sleeping launcher for a lost one and end the job"


@dataclass(frozen=True, slots=True)
class LaunchSettings:
    """How to reach the nodes and where to keep and show what happens. `run_dir` None: runs/JOB-ID under `cwd`."""

    cwd: Path
    run_dir: Path | None
    ssh: SshSettings
    console: ConsoleOptions
    preflight: PreflightSettings | None


class RunObserver:
    """Hands every event to the run directory and to the screen."""

    def __init__(self, directory: RunDirectory, console: Console) -> None:
        self.ledger: Ledger | None = None
        self._directory, self._console = directory, console
        self._told = False

    def handle(self, event: Event, at_s: float) -> None:
        """Keep the event, then show it."""
        write = self._directory.write_output(event) if isinstance(event, Output) else None
        notice = write or self._directory.record(event, at_s)
        if self.ledger and (cause := self.ledger.cause) and not self._told:
            self._told = True
            if cause.node_rank is not None:
                self._console.first_failure(cause.node_rank, cause.rank)
        self._console.handle(event, at_s)
        if notice:
            self._console.handle(notice, at_s)

    def tick(self, at_s: float) -> None:
        """Let the screen catch up."""
        self._console.tick(at_s)


def launch(plan: Plan, settings: LaunchSettings, terminal: Terminal) -> int:
    """Run the plan and return the exit code. Raises JobError (run directory) and RefusedError (nodes)."""
    streams = sum(2 * len(node.ranks) + 2 for node in plan.nodes)
    raise_file_limit(streams + FILES_PER_NODE * plan.nnodes + SPARE_FILES)
    directory = (
        RunDirectory.create_at(settings.run_dir)
        if settings.run_dir
        else RunDirectory.create(settings.cwd / "runs", plan.job_id)
    )
    nodes = [ShownNode(node.node_rank, node.node_id, node.ranks) for node in plan.nodes]
    console = Console(terminal, nodes, directory.paths, settings.console)
    began_s = time.monotonic()

    def finish(ledger: Ledger) -> None:
        took_s = time.monotonic() - began_s
        loss = directory.write_receipt(receipt_json(plan, ledger, took_s, directory.lost_bytes))
        if loss:
            console.handle(loss, took_s)
        console.block(render_report(plan, ledger, took_s, directory.paths.root), "plain")

    try:
        directory.write_plan(plan_json(plan))
        observer = RunObserver(directory, console)
        fan_out = _fan_out(plan, settings.ssh, observer, _keeping_plan(settings.preflight, directory), finish)
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            return runner.run(fan_out).exit_code
    except RefusedError as refused:
        directory.write_receipt(refusal_json(plan, refused, time.monotonic() - began_s))
        raise
    finally:
        directory.close()
        with contextlib.suppress(KeyboardInterrupt):  # of a slow terminal, not of the job
            console.close(FLUSH_LIMIT_S)


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
    ssh: SshSettings,
    observer: RunObserver,
    preflight: PreflightSettings | None,
    finish: Callable[[Ledger], None],
) -> Ledger:
    fanout = Fanout(plan, SshConnector(ssh), observer, preflight)
    observer.ledger = fanout.ledger
    with _signals_to(fanout):
        ledger = await fanout.run()
        finish(ledger)  # here, where a signal is still ours: an impatient one must not cost the receipt
        return ledger


@contextlib.contextmanager
def _signals_to(fanout: Fanout) -> Iterator[None]:
    loop = asyncio.get_running_loop()
    for number in ENDING_SIGNALS:
        loop.add_signal_handler(number, fanout.interrupt, number)
    loop.add_signal_handler(signal.SIGTSTP, fanout.tell, NOT_SUSPENDED)
    try:
        yield
    finally:
        for number in (*ENDING_SIGNALS, signal.SIGTSTP):
            loop.remove_signal_handler(number)


def check_nodes(
    plan: Plan, ssh: SshSettings, preflight: PreflightSettings, terminal: Terminal, *, as_json: bool
) -> int:
    """Check the nodes of a plan, show what was found, and return the exit code.

    Raises RefusedError where nodes cannot be checked, unless that is shown as data too.
    """
    console = Console(terminal, [ShownNode(node.node_rank, node.node_id, node.ranks) for node in plan.nodes])
    try:
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            ledger, result = runner.run(_check(plan, ssh, preflight, console))
        if result is None:
            return ledger.exit_code
        if result.problems and not as_json:
            raise result.error()
        console.data(check_json(plan, result) if as_json else render_check(plan, result))
        return REFUSED if result.failures or result.problems else 0
    finally:
        console.close(FLUSH_LIMIT_S)


async def _check(
    plan: Plan, ssh: SshSettings, preflight: PreflightSettings, console: Console
) -> tuple[Ledger, PreflightResult | None]:
    fanout = Fanout(plan, SshConnector(ssh), console, preflight)
    with _signals_to(fanout):
        return fanout.ledger, await fanout.check()


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Return uvloop's event loop where it is installed: `pip install gpulayer[uvloop]`."""
    if importlib.util.find_spec("uvloop") is None:
        return None
    import uvloop

    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory
