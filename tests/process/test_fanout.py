"""Whole jobs on nodes that are children of this process: the launcher's half and the nodes' half together."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from typing import TYPE_CHECKING, cast

import pytest

from gpulayer.errors import PrepareError, RefusedError
from gpulayer.events import CommandStarted, Event, NodeConnected, NodeSwept, Output, RankExited, RankStarted
from gpulayer.fanout import Fanout
from gpulayer.outcome import CauseKind, Fate, Ledger
from tests.process.programs import POLITE, STUBBORN
from tests.support.local_node import free_port, is_alive, pid_in
from tests.support.pipes import PipeConnector, pipe_plan

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from gpulayer.plan import Plan
    from gpulayer.ssh import SshConnector

    ScriptWriter = Callable[[str], Path]


class Watcher:
    """An observer that keeps every event, and calls `react` with each."""

    def __init__(self, react: Callable[[Event, Watcher], None] = lambda event, watcher: None) -> None:
        self.events: list[Event] = []
        self.fanout: Fanout | None = None
        self._react = react

    def handle(self, event: Event, at_s: float) -> None:
        """Keep an event."""
        self.events.append(event)
        self._react(event, self)

    def tick(self, at_s: float) -> None:
        """Nothing waits for time here."""

    def output(self, rank: int, stream: str = "stdout") -> bytes:
        """All that a rank wrote."""
        found = [event for event in self.events if isinstance(event, Output)]
        return b"".join(event.data for event in found if (event.rank, event.stream) == (rank, stream))

    def all(self, kind: type[Event]) -> list[Event]:
        """All events of a kind."""
        return [event for event in self.events if isinstance(event, kind)]


def run(plan: Plan, watcher: Watcher) -> Ledger:
    """Run a plan on this machine."""

    async def whole() -> Ledger:
        watcher.fanout = Fanout(plan, cast("SshConnector", PipeConnector()), watcher)
        async with asyncio.timeout(60):
            return await watcher.fanout.run()

    return asyncio.run(whole())


def test_a_job_that_succeeds(tmp_path: Path, script: ScriptWriter) -> None:
    """Two nodes of two ranks: every rank's output under its global rank, everything verified, nothing left on disk."""
    watcher = Watcher()
    path = script("import os, sys, time; print(*sys.argv[1:], 'rank', os.environ['RANK']); time.sleep(0.3)")
    ledger = run(
        pipe_plan(tmp_path, [str(path), "hello"], nnodes=2, nproc_per_node=2, master_port=free_port()), watcher
    )
    assert (ledger.exit_code, ledger.cause) == (0, None)
    assert [watcher.output(rank) for rank in range(4)] == [f"hello rank {rank}\n".encode() for rank in range(4)]
    for node in ledger.nodes:
        assert (node.fate, node.clean, node.kept) == (Fate.SUCCEEDED, True, "")
        assert [status.code for status in node.rank_statuses.values()] == [0, 0]
    assert not list(tmp_path.glob("gpulayer-*"))


def test_the_first_rank_that_fails_ends_the_job_everywhere(tmp_path: Path, script: ScriptWriter) -> None:
    """Rank 2 exits 17 while the others would go on: it is the cause, with its own code and words."""
    watcher = Watcher()
    path = script("import os, sys\nif os.environ['RANK'] == '2': print('why'); sys.exit(17)\n" + POLITE)
    ledger = run(pipe_plan(tmp_path, [str(path)], nnodes=2, nproc_per_node=2, master_port=free_port()), watcher)
    assert ledger.exit_code == 1
    assert ledger.cause
    assert (ledger.cause.kind, ledger.cause.node_rank, ledger.cause.rank) == (CauseKind.RANK, 1, 2)
    assert (ledger.cause.status.code, ledger.cause.tail.stdout) == (17, b"why\n")
    assert [(node.fate, node.clean) for node in ledger.nodes] == [(Fate.STOPPED, True), (Fate.FAILED, True)]


@pytest.mark.parametrize(("number", "words"), [(signal.SIGKILL, "supervisor died"), (signal.SIGSTOP, "heard of it")])
def test_a_node_whose_supervisor_dies_or_hangs_is_verified_clean(
    tmp_path: Path, script: ScriptWriter, number: signal.Signals, words: str
) -> None:
    """The job fails, and the launcher logs in anew and sees the last stubborn daemon of that node gone."""

    def react(event: Event, watcher: Watcher) -> None:
        if isinstance(event, RankStarted) and len(watcher.all(RankStarted)) == 2:
            for rank in (0, 1):
                pid_in(tmp_path / f"daemon-{rank}")
            (victim,) = [one for one in watcher.events if isinstance(one, NodeConnected) and one.node_rank == 1]
            os.kill(victim.supervisor_pid, number)

    watcher = Watcher(react)
    path = script(STUBBORN)
    plan = pipe_plan(
        tmp_path, [str(path), str(tmp_path)], nnodes=2, grace_s=0.5, lost_after_s=1.5, master_port=free_port()
    )
    ledger = run(plan, watcher)
    assert ledger.exit_code == 4
    assert ledger.cause
    assert (ledger.cause.kind, ledger.cause.node_rank) == (CauseKind.LOST, 1)
    assert words in ledger.cause.detail
    assert [node.clean for node in ledger.nodes] == [True, True]
    assert len(watcher.all(NodeSwept)) == 2
    assert not any(is_alive(pid_in(tmp_path / f"{kind}-{rank}")) for kind in ("worker", "daemon") for rank in (0, 1))


def test_one_node_that_cannot_take_part_starts_nothing_anywhere(tmp_path: Path, script: ScriptWriter) -> None:
    """The port that is taken on the head is told; the other node, which was ready, is dismissed."""
    watcher = Watcher()
    with socket.socket() as listener:
        listener.bind(("", 0))
        listener.listen()
        port = listener.getsockname()[1]
        with pytest.raises(RefusedError) as caught:
            run(pipe_plan(tmp_path, [str(script(POLITE))], nnodes=2, master_port=port), watcher)
    ((name, problem),) = caught.value.problems.items()
    assert (name, type(problem), str(problem)) == ("here-0", PrepareError, f"port {port} is in use")
    assert watcher.all(CommandStarted) == []
    assert not list(tmp_path.glob("gpulayer-*"))


@pytest.mark.parametrize(("signals", "least_s"), [(1, 1.0), (2, 0.0)])
def test_interrupts_end_with_the_grace_then_at_once(
    tmp_path: Path, script: ScriptWriter, signals: int, least_s: float
) -> None:
    """One signal gives stubborn ranks the grace; a second kills them. The exit code is the signal's."""
    sent: list[int] = []

    def react(event: Event, watcher: Watcher) -> None:
        if isinstance(event, RankStarted) and not sent and watcher.fanout:
            pid_in(tmp_path / "daemon-0")
            for _ in range(signals):
                sent.append(signal.SIGINT)
                asyncio.get_running_loop().call_soon(watcher.fanout.interrupt, signal.SIGINT)

    watcher = Watcher(react)
    grace_s = 1.0 if signals == 1 else 60.0
    ledger = run(pipe_plan(tmp_path, [str(script(STUBBORN)), str(tmp_path)], grace_s=grace_s), watcher)
    assert ledger.exit_code == 130
    assert [node.clean for node in ledger.nodes] == [True]
    assert not is_alive(pid_in(tmp_path / "daemon-0"))


@pytest.mark.torch
def test_real_torchrun_succeeds(tmp_path: Path, script: ScriptWriter) -> None:
    """Two nodes of two ranks rendezvous and end with 0; each rank is seen."""
    watcher = Watcher()
    path = script("import os; print('rank', os.environ['RANK'], 'of', os.environ['WORLD_SIZE'])")
    plan = pipe_plan(tmp_path, [str(path)], nnodes=2, nproc_per_node=2, fake=False, master_port=free_port())
    ledger = run(plan, watcher)
    assert (ledger.exit_code, ledger.cause) == (0, None)
    assert [watcher.output(rank) for rank in range(4)] == [f"rank {rank} of 4\n".encode() for rank in range(4)]
    ends = [event for event in watcher.events if isinstance(event, RankExited)]
    assert sorted((event.rank, event.status.code) for event in ends) == [(rank, 0) for rank in range(4)]


@pytest.mark.torch
def test_real_torchrun_with_a_failing_rank(tmp_path: Path, script: ScriptWriter) -> None:
    """Rank 1 exits 17 and rank 0 ignores SIGTERM: the cause is rank 1 and 17, and all is gone with the grace."""
    watcher = Watcher()
    path = script("import os, sys\nif os.environ['RANK'] == '1': sys.exit(17)\n" + STUBBORN)
    plan = pipe_plan(
        tmp_path, [str(path), str(tmp_path)], nproc_per_node=2, fake=False, grace_s=1.0, master_port=free_port()
    )
    ledger = run(plan, watcher)
    assert ledger.exit_code == 1
    assert ledger.cause
    assert (ledger.cause.rank, ledger.cause.status.code) == (1, 17)
    assert [(node.fate, node.clean) for node in ledger.nodes] == [(Fate.FAILED, True)]
