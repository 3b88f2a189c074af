"""All nodes at once, over pipes to local children in place of SSH: refusals, failures, limits, signals, lost nodes."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import time
from typing import TYPE_CHECKING, Any, cast

import pytest

from gpulayer.errors import ConnectRefusedError, PrepareError, RefusedError
from gpulayer.events import (
    CommandStarted,
    Event,
    NodeConnected,
    NodeEnded,
    NodeLost,
    NodePrepared,
    NodeStopping,
    NodeSwept,
    Notice,
    Output,
    RankExited,
    RankStarted,
    Stage,
    StageReached,
    Survivor,
)
from gpulayer.fanout import Fanout
from gpulayer.job import EnvValue
from gpulayer.outcome import CauseKind, Fate
from tests.support import plans, procs
from tests.support.jobs import FAKE_TORCH
from tests.support.pipes import PipeConnector, PipeLink
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator
    from pathlib import Path

    from gpulayer.outcome import Ledger
    from gpulayer.plan import Plan
    from gpulayer.remote import RemoteNode
    from gpulayer.session import Session
    from gpulayer.ssh import SshConnector, SshTarget

SLEEP = "import time; print('begins', flush=True); time.sleep(1000)"
STUBBORN = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('begins', flush=True); time.sleep(1000)"
)


class Seen:
    """An observer that keeps every event, and does something when one comes."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.ticks = 0
        self.reactions: list[tuple[Callable[[Event], bool], Callable[[], object]]] = []

    def handle(self, event: Event, at_s: float) -> None:
        """Keep it, then react, once."""
        assert at_s >= 0
        self.events.append(event)
        for reaction in [pair for pair in self.reactions if pair[0](event)]:
            self.reactions.remove(reaction)
            asyncio.get_running_loop().call_soon(reaction[1])

    def tick(self, at_s: float) -> None:
        """Time has passed."""
        self.ticks += 1

    def when(self, is_it: Callable[[Event], bool], react: Callable[[], object]) -> None:
        """React to the first such event."""
        self.reactions.append((is_it, react))

    def of(self, kind: type[Event]) -> list[Any]:
        """All events of a kind, in order."""
        return [event for event in self.events if isinstance(event, kind)]

    @property
    def stages(self) -> list[Stage]:
        """The stages, in order."""
        return [event.stage for event in self.of(StageReached)]


class Connector(PipeConnector):
    """Pipes, and for some nodes something else in place of them, attempt by attempt."""

    def __init__(self, *instead: tuple[str, Callable[[], Coroutine[Any, Any, PipeLink]]]) -> None:
        super().__init__()
        self.instead = list(instead)
        self.connected: list[str] = []

    async def connect(self, target: SshTarget | None = None) -> PipeLink:
        """Connect, or do what is set for this node next."""
        host = target.host if target else ""
        self.connected.append(host)
        for entry in self.instead:
            if entry[0] == host:
                self.instead.remove(entry)
                return await entry[1]()
        return await super().connect(target)


async def _refuse() -> PipeLink:
    raise ConnectRefusedError("nothing listens on port 22", hint="start sshd")


async def _hang() -> PipeLink:
    await asyncio.Event().wait()
    raise AssertionError


@pytest.fixture
def marked() -> Iterator[str]:
    """A mark in the environment of every process that the test starts by way of a supervisor; none is left."""
    mark = f"FANOUT_TEST={os.getpid()}-{time.monotonic_ns()}"

    def left() -> list[procs.Process]:
        namespace = procs.namespace_id(os.getpid(), "pid")
        return procs.processes_in({namespace}, "pid", f"\0{mark}\0")

    yield mark
    found = left()
    assert not found


def _plan(folder: Path, mark: str, source: str, last: dict[str, object] | None = None, **settings: Any) -> Plan:
    """Return a practice plan of two nodes with one rank each that runs `source`. `last`: other keys of the last one."""
    (folder / "job.py").write_text(source)
    with socket.socket() as probe:
        probe.bind(("", 0))
        port = probe.getsockname()[1]
    name, _, value = mark.partition("=")
    keys: dict[str, object] = {"gpus": 1, "python": sys.executable, "scratch": str(folder), "workdir": str(folder)}
    keys["env"] = {"PYTHONPATH": str(FAKE_TORCH), name: value}
    keys["port"] = port  # of no use to pipes, but no two tests at one time hold the same nodes
    nodes = [
        plans.node(1, **{**keys, "address": "127.0.0.1"}),
        plans.node(2, **{**keys, "address": "127.0.0.2", **(last or {})}),
    ]
    job = plans.script(rendezvous={"port": port, "join_timeout_s": settings.pop("join_timeout_s", 60)}, **settings)
    return plans.plan(job.model_copy(update={"entrypoint": "job.py"}), nodes, practice=True)


def _run(plan: Plan, connector: PipeConnector, seen: Seen, prepare: Callable[[Fanout], object] | None = None) -> Ledger:
    async def run() -> Ledger:
        fanout = Fanout(plan, cast("SshConnector", connector), seen)
        if prepare:
            prepare(fanout)
        async with asyncio.timeout(60):
            return await fanout.run()

    return asyncio.run(run())


def _fates(ledger: Ledger) -> list[tuple[Fate, bool]]:
    return [(node.fate, node.clean) for node in ledger.nodes]


def test_a_job_that_succeeds(tmp_path: Path, marked: str) -> None:
    """Stages come in order, every rank's end is seen, and nothing is left: no folder, no child."""
    seen, connector = Seen(), Connector()
    ledger = _run(_plan(tmp_path, marked, "import os; print('rank', os.environ['RANK'])"), connector, seen)
    assert ledger.exit_code == 0
    assert ledger.cause is None
    assert _fates(ledger) == [(Fate.SUCCEEDED, True)] * 2
    assert seen.stages == [Stage.CONNECTING, Stage.PREPARING, Stage.STARTING, Stage.RUNNING, Stage.DONE]
    assert sorted((event.rank, event.status.code) for event in seen.of(RankExited)) == [(0, 0), (1, 0)]
    assert {(event.rank, event.data) for event in seen.of(Output)} == {(0, b"rank 0\n"), (1, b"rank 1\n")}
    assert seen.of(NodeStopping) == []
    assert list(tmp_path.glob("gpulayer-*")) == []
    assert [process.returncode for link in connector.links for process in link.processes] == [0, 0]


def test_the_first_failure_stops_the_others(tmp_path: Path, marked: str) -> None:
    """The rank's own code is the cause; both nodes are told to stop; the other one's end is no failure."""
    seen = Seen()
    source = f"import os, sys\nif os.environ['RANK'] == '1': sys.exit(17)\n{SLEEP}"
    ledger = _run(_plan(tmp_path, marked, source), Connector(), seen)
    assert ledger.exit_code == 1
    assert ledger.cause is not None
    assert (ledger.cause.kind, ledger.cause.rank, ledger.cause.status.code) == (CauseKind.RANK, 1, 17)
    assert _fates(ledger) == [(Fate.STOPPED, True), (Fate.FAILED, True)]
    failed = next(i for i, e in enumerate(seen.events) if isinstance(e, RankExited))
    assert [event.node_rank for event in seen.events[failed:] if isinstance(event, NodeStopping)] == [0, 1]
    assert seen.stages[-2:] == [Stage.ENDING, Stage.DONE]


def test_nothing_starts_where_one_node_cannot_be_reached(tmp_path: Path, marked: str) -> None:
    """The refusal has each failed node's own reason; the node that was ready starts nothing and its child ends."""
    seen, connector = Seen(), Connector(("gpu-02", _refuse))
    with pytest.raises(RefusedError, match="1 of 2 nodes cannot take part, so nothing was started") as refused:
        _run(_plan(tmp_path, marked, SLEEP), connector, seen)
    assert {node: str(error) for node, error in refused.value.problems.items()} == {
        "gpu-02": "nothing listens on port 22"
    }
    assert seen.of(CommandStarted) == []
    assert list(tmp_path.glob("gpulayer-*")) == []
    assert [process.returncode for link in connector.links for process in link.processes] == [0]


def test_nothing_starts_where_one_node_refuses(tmp_path: Path, marked: str) -> None:
    """A workdir that is not there is that node's problem, with a hint."""
    seen, connector = Seen(), Connector()
    with pytest.raises(RefusedError) as refused:
        _run(_plan(tmp_path, marked, SLEEP, {"workdir": "/nowhere/at/all"}), connector, seen)
    (problem,) = refused.value.problems.values()
    assert isinstance(problem, PrepareError)
    assert "workdir /nowhere/at/all " in str(problem)
    assert problem.hint is not None
    assert [event.node_rank for event in seen.of(NodePrepared)] == [0]
    assert seen.of(CommandStarted) == []
    assert list(tmp_path.glob("gpulayer-*")) == []


def test_a_signal_while_a_connect_hangs(tmp_path: Path, marked: str) -> None:
    """One is enough: nothing was started, so there is nothing to wait for."""
    seen, connector = Seen(), Connector(("gpu-02", _hang))
    ledger = _run(
        _plan(tmp_path, marked, SLEEP),
        connector,
        seen,
        lambda fanout: seen.when(
            lambda event: isinstance(event, NodeConnected), lambda: fanout.interrupt(signal.SIGHUP)
        ),
    )
    assert ledger.exit_code == 129
    assert _fates(ledger) == [(Fate.NEVER_STARTED, True)] * 2
    assert seen.of(CommandStarted) == []
    assert seen.stages == [Stage.CONNECTING, Stage.DONE]
    assert list(tmp_path.glob("gpulayer-*")) == []


@pytest.mark.parametrize("limit", ["timeout_s", "join_timeout_s"])
def test_limits(tmp_path: Path, marked: str, limit: str) -> None:
    """The time limit is 124; a rank that is not there by the join timeout is a failure that names its node."""
    name, _, value = marked.partition("=")
    hanging: dict[str, object] = {"env": {"PYTHONPATH": str(_hanging_torch(tmp_path)), name: value}}
    last = hanging if limit == "join_timeout_s" else None
    settings: dict[str, Any] = {limit: 0.5}
    plan = _plan(tmp_path, marked, SLEEP, last, **settings)
    ledger = _run(plan, Connector(), seen := Seen())
    assert ledger.cause is not None
    assert ledger.exit_code == (124 if limit == "timeout_s" else 1)
    assert ledger.cause.kind.value == limit.removesuffix("_s")
    assert ledger.cause.missing == ((1,) if limit == "join_timeout_s" else ())
    assert _fates(ledger) == [(Fate.STOPPED, True)] * 2
    assert len(seen.of(NodeSwept)) == 2


def test_signals_one_two_three(tmp_path: Path, marked: str) -> None:
    """The first has the grace, the second kills, and each says what the next one does; a fourth changes nothing."""
    seen = Seen()
    plan = _plan(tmp_path, marked, STUBBORN, grace_s=60.0)

    def prepare(fanout: Fanout) -> None:
        begun = {"count": 0}

        def begins(event: Event) -> bool:
            begun["count"] += isinstance(event, Output) and event.data == b"begins\n"
            return begun["count"] == 2

        seen.when(begins, lambda: fanout.interrupt(signal.SIGINT))
        seen.when(lambda event: isinstance(event, NodeStopping), lambda: fanout.interrupt(signal.SIGTERM))
        seen.when(lambda event: event == StageReached(Stage.DONE), lambda: fanout.interrupt(signal.SIGTERM))

    ledger = _run(plan, Connector(), seen, prepare)
    assert ledger.exit_code == 130  # the first one decides
    assert _fates(ledger) == [(Fate.STOPPED, True)] * 2
    assert [event.now for event in seen.of(NodeStopping)] == [False, False, True, True]
    notices = [event.text for event in seen.of(Notice)]
    assert [notice.partition("; ")[2] for notice in notices] == [
        "once more kills the job at once",
        "once more leaves at once, whatever still runs",
    ]


class _Breaks(PipeLink):
    """A link whose node says something that is no frame once its rank has begun, or falls silent."""

    def __init__(self, tampering: Callable[[RemoteNode, bytes], None]) -> None:
        super().__init__()
        self._tampering = tampering

    async def open(self, command: str, receiver: Session) -> Any:
        """Put the tampering between the child and its receiver."""
        tampered = _Tampered(cast("RemoteNode", receiver), self._tampering)
        return await super().open(command, cast("Session", tampered))


class _Tampered:
    def __init__(self, receiver: RemoteNode, tampering: Callable[[RemoteNode, bytes], None]) -> None:
        self._receiver, self._tampering = receiver, tampering
        self._seen = b""

    def data_received(self, data: bytes) -> None:
        self._seen += data
        if b"begins\n" in self._seen:
            self._tampering(self._receiver, data)
        else:
            self._receiver.data_received(data)

    def stderr_received(self, data: bytes) -> None:
        self._receiver.stderr_received(data)

    def channel_closed(self, status: int | None, number: str | None, reason: str | None) -> None:
        if status != 0 or number:
            self._receiver.channel_closed(status, number, reason)


def _garble(receiver: RemoteNode, _: bytes) -> None:
    receiver.data_received(b"no frame\n")


def _silence(receiver: RemoteNode, _: bytes) -> None:
    return


class _TamperedConnector(Connector):
    """The first connection to gpu-02 is tampered with; it keeps its link for the wait at the end."""

    def __init__(self, tampering: Callable[[RemoteNode, bytes], None], *later: Any) -> None:
        async def first() -> PipeLink:
            link = _Breaks(tampering)
            self.links.append(link)
            return link

        super().__init__(("gpu-02", first), *later)


@pytest.mark.parametrize(("tampering", "reason"), [(_garble, "broke the protocol"), (_silence, "nothing was heard")])
def test_a_lost_node_is_verified_over_a_second_connection(
    tmp_path: Path, marked: str, tampering: Callable[[RemoteNode, bytes], None], reason: str
) -> None:
    """The node is the cause, its processes are gone, and the job exits 4; the other node is stopped."""
    seen, connector = Seen(), _TamperedConnector(tampering)
    plan = _plan(tmp_path, marked, SLEEP, lost_after_s=1.0, grace_s=1.0)
    ledger = _run(plan, connector, seen)
    assert ledger.exit_code == 4
    assert ledger.cause is not None
    assert (ledger.cause.kind, ledger.cause.node_rank) == (CauseKind.LOST, 1)
    assert reason in ledger.cause.detail
    assert _fates(ledger) == [(Fate.STOPPED, True), (Fate.LOST, True)]
    assert connector.connected.count("gpu-02") == 2
    assert [event.node_rank for event in seen.of(NodeLost)] == [1]
    assert [event.node_rank for event in seen.of(NodeEnded)] == [0]


@pytest.mark.parametrize(("tampering", "code"), [(_garble, 5), (_silence, 4)])
def test_a_lost_node_that_cannot_be_verified(
    tmp_path: Path, marked: str, tampering: Callable[[RemoteNode, bytes], None], code: int
) -> None:
    """Exit 5 where nobody is left there to end the job; 4 where its supervisor will, since it is only not heard."""
    refusals = [("gpu-02", _refuse)] * 20
    seen, connector = Seen(), _TamperedConnector(tampering, *refusals)
    plan = _plan(tmp_path, marked, SLEEP, lost_after_s=1.0, grace_s=0.5)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gpulayer.verify.MARGIN_S", 0.5)
        ledger = _run(plan, connector, seen)
    assert ledger.exit_code == code
    assert _fates(ledger) == [(Fate.STOPPED, True), (Fate.LOST, False)]
    assert ledger.nodes[1].may_still_run == (code == 5)
    assert connector.connected.count("gpu-02") >= 2


def test_a_node_that_is_loaded_but_alive_is_not_lost(tmp_path: Path, marked: str) -> None:
    """Heartbeats alone keep a silent job alive for many times --lost-after."""
    source = "import time; time.sleep(3)"
    ledger = _run(_plan(tmp_path, marked, source, lost_after_s=1.0), Connector(), seen := Seen())
    assert ledger.exit_code == 0
    assert len(seen.of(RankStarted)) == 2
    assert seen.ticks > 5


def test_an_error_that_is_nobodys_fault_leaves_no_child(tmp_path: Path, marked: str) -> None:
    """Whatever a connector raises comes out as it is, and the nodes that were ready are let go."""

    async def break_down() -> PipeLink:
        raise ZeroDivisionError

    connector = Connector(("gpu-02", break_down))
    with pytest.raises(ZeroDivisionError):
        _run(_plan(tmp_path, marked, SLEEP), connector, Seen())
    assert all(process.returncode is not None for link in connector.links for process in link.processes)
    wait_until(lambda: not list(tmp_path.glob("gpulayer-*")), "the job's folder is gone")


def _hanging_torch(folder: Path) -> Path:
    package = folder / "hanging" / "torch" / "distributed"
    package.mkdir(parents=True)
    for path in (package.parent / "__init__.py", package / "__init__.py"):
        path.touch()
    (package / "run.py").write_text("import time\ntime.sleep(1000)\n")
    return package.parents[1]


def test_a_secret_in_what_is_told_is_masked_for_files_and_screen_alike() -> None:
    """A notice, a survivor's command line and the reason of a loss: observers and ledger get them without the value."""
    env = {"HF_TOKEN": EnvValue("hf-0123456789")}
    seen, connector = Seen(), cast("SshConnector", PipeConnector())

    async def tell() -> Ledger:
        fanout = Fanout(plans.plan(plans.script(env=env), plans.nodes(1)), connector, seen)
        fanout.tell("it said hf-0123456789")
        fanout._emit(NodeSwept(0, 1, (Survivor(7, "D", "python train.py --key hf-0123456789 --api-key abc"),)))
        return fanout.ledger

    ledger = asyncio.run(tell())
    (survivor,) = ledger.nodes[0].survivors
    assert survivor.command == "python train.py --key *** --api-key ***"
    assert [event.text for event in seen.of(Notice)] == ["it said ***"]
    assert "0123456789" not in repr(seen.events)
