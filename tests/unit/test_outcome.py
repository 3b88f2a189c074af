"""How a job ends: which failure came first, what became of each node, and the exit code."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

import pytest

from gpulayer.events import (
    CommandExited,
    CommandStarted,
    ExitStatus,
    NodeConnected,
    NodeEnded,
    NodeLost,
    NodePrepared,
    NodeStopping,
    NodeSwept,
    Notice,
    RankExited,
    RankStarted,
    Stage,
    StageReached,
    Survivor,
    Tail,
)
from gpulayer.outcome import CauseKind, Fate, Ledger, NodeRecord

if TYPE_CHECKING:
    from collections.abc import Callable

    from gpulayer.events import Event

OK, FAILED, KILLED, UNSEEN = ExitStatus(code=0), ExitStatus(code=17), ExitStatus(signal=9), ExitStatus()
STUCK = Survivor(77, "D", "python train.py")


def _ledger() -> Ledger:
    """Two nodes of two ranks each."""
    return Ledger([NodeRecord(0, "gpu-01", (0, 1)), NodeRecord(1, "gpu-02", (2, 3))])


def _feed(ledger: Ledger, *events: Event) -> Ledger:
    """Apply events, one a second from 1 s on."""
    for at_s, event in enumerate(events, 1):
        ledger.apply(event, float(at_s))
    return ledger


def _started(node_rank: int) -> list[Event]:
    ranks = (2 * node_rank, 2 * node_rank + 1)
    return [CommandStarted(node_rank, 50), *(RankStarted(node_rank, rank, 60 + rank) for rank in ranks)]


def _ended(node_rank: int, status: ExitStatus = OK, *survivors: Survivor) -> list[Event]:
    return [CommandExited(node_rank, status), NodeSwept(node_rank, 3, survivors), NodeEnded(node_rank)]


def _running() -> Ledger:
    return _feed(_ledger(), *_started(0), *_started(1))


def test_all_that_is_told_of_a_node_is_kept() -> None:
    """The record holds what the node said of itself, of its ranks and of its end."""
    ledger = _feed(
        _ledger(),
        StageReached(Stage.CONNECTING),
        NodeConnected(1, "host-b", "3.11.2", "6.1", 9),
        NodePrepared(1, "ib0"),
        *_started(1),
        Notice("not about a node"),
        RankExited(1, 2, OK),
        CommandExited(1, OK),
        NodeSwept(1, 0),
        NodeEnded(1, "/tmp/kept"),
    )
    node = ledger.nodes[1]
    assert (node.hostname, node.python, node.kernel, node.interface) == ("host-b", "3.11.2", "6.1", "ib0")
    assert (node.started_s, node.ended_s, node.kept) == (4.0, 11.0, "/tmp/kept")
    assert (node.rank_pids, node.rank_statuses, node.status) == ({2: 62, 3: 63}, {2: OK}, OK)
    assert (ledger.nodes[0].fate, node.fate, ledger.cause) == (Fate.NEVER_STARTED, Fate.SUCCEEDED, None)


def test_every_node_succeeded() -> None:
    """Exit code 0 takes a clean end on every node; one that ends early is no failure."""
    ledger = _running()
    assert ledger.all_joined
    _feed(ledger, *_ended(1))
    assert ledger.cause is None
    assert [node.fate for node in ledger.nodes] == [Fate.RUNNING, Fate.SUCCEEDED]
    _feed(ledger, *_ended(0))
    assert [node.fate for node in ledger.nodes] == [Fate.SUCCEEDED] * 2
    assert all(node.clean for node in ledger.nodes)
    assert ledger.exit_code == 0


@pytest.mark.parametrize("status", [FAILED, KILLED])
def test_the_first_rank_that_fails_is_the_cause(status: ExitStatus) -> None:
    """Its own code or signal and its last words are kept; later failures and torchrun's 1 change nothing."""
    tail = Tail(stderr=b"out of memory\n")
    ledger = _feed(
        _running(),
        RankExited(1, 2, status, tail),
        NodeStopping(0),
        NodeStopping(1),
        RankExited(1, 3, ExitStatus(signal=15)),
        RankExited(0, 0, ExitStatus(signal=15)),
        *_ended(1, ExitStatus(code=1)),
        *_ended(0, ExitStatus(code=1)),
    )
    cause = ledger.cause
    assert cause is not None
    assert (cause.kind, cause.at_s, cause.node_rank, cause.rank) == (CauseKind.RANK, 1.0, 1, 2)
    assert (cause.status, cause.tail) == (status, tail)
    assert [node.fate for node in ledger.nodes] == [Fate.STOPPED, Fate.FAILED]
    assert ledger.exit_code == 1


def test_a_rank_whose_end_was_not_seen_is_left_to_torchrun() -> None:
    """Not knowing a rank's status is no failure by itself; torchrun's own exit code decides then."""
    ledger = _feed(_running(), RankExited(0, 0, UNSEEN), *_ended(0), *_ended(1))
    assert (ledger.exit_code, ledger.cause) == (0, None)
    ledger = _feed(_running(), RankExited(0, 0, UNSEEN), *_ended(0, ExitStatus(code=1)), *_ended(1))
    assert ledger.cause is not None
    assert (ledger.exit_code, ledger.cause.kind, ledger.cause.node_rank) == (1, CauseKind.COMMAND, 0)


def test_a_command_whose_end_was_not_seen_has_failed() -> None:
    """An exit status that nobody saw is not success."""
    ledger = _feed(_running(), *_ended(0, UNSEEN), *_ended(1))
    assert ledger.exit_code == 1
    assert ledger.nodes[0].fate is Fate.FAILED


def test_a_command_that_could_not_be_started_has_failed() -> None:
    """torchrun's 127 without a start is the cause, and the node was not idle."""
    ledger = _feed(_ledger(), CommandExited(0, ExitStatus(code=127), Tail(stderr=b"no such file")), NodeSwept(0, 0))
    assert ledger.cause is not None
    assert (ledger.cause.kind, ledger.cause.rank, ledger.cause.status.code) == (CauseKind.COMMAND, None, 127)
    assert (ledger.nodes[0].fate, ledger.exit_code) == (Fate.FAILED, 1)


def test_what_ends_because_it_was_told_to_is_stopped() -> None:
    """A node that is stopped has not failed, and one that succeeds all the same has succeeded."""
    ledger = _feed(_running(), RankExited(0, 0, FAILED), NodeStopping(0), NodeStopping(1), RankExited(1, 2, KILLED))
    _feed(ledger, *_ended(0, ExitStatus(code=1)), *_ended(1))
    assert [node.fate for node in ledger.nodes] == [Fate.FAILED, Fate.SUCCEEDED]
    ledger = _feed(_running(), NodeStopping(1), NodeEnded(1))
    assert ledger.nodes[1].fate is Fate.STOPPED


@pytest.mark.parametrize(
    ("events", "fate", "clean", "may_still_run", "code"),
    [
        ([NodeLost(1, "cut")], Fate.LOST, False, False, 4),
        ([NodeLost(1, "cut"), NodeSwept(1, 2)], Fate.LOST, True, False, 4),
        ([NodeLost(1, "killed", supervisor_died=True)], Fate.LOST, False, True, 5),
        ([NodeLost(1, "killed", supervisor_died=True), NodeSwept(1, 2)], Fate.LOST, True, False, 4),
        ([*_ended(1, FAILED, STUCK)], Fate.FAILED, False, True, 5),
        ([*_ended(1, OK, STUCK)], Fate.SUCCEEDED, False, True, 5),
        ([RankExited(1, 2, FAILED), NodeLost(1, "cut")], Fate.LOST, False, False, 1),
    ],
    ids=["cut", "cut, then seen clean", "died", "died, then seen clean", "stuck", "stuck after success", "failed, cut"],
)
def test_lost_and_unclean_nodes(events: list[Event], fate: Fate, clean: bool, may_still_run: bool, code: int) -> None:
    """A node that is merely unheard ends by itself (4); where nobody ends it, or something will not die, it is 5."""
    ledger = _feed(_running(), *events, *_ended(0))
    node = ledger.nodes[1]
    assert (node.fate, node.clean, node.may_still_run) == (fate, clean, may_still_run)
    assert ledger.exit_code == code


LIMITS: list[tuple[Callable[[Ledger], None], CauseKind, str, int]] = [
    (lambda ledger: ledger.timed_out(90, 90.5), CauseKind.TIMEOUT, "90 s", 124),
    (lambda ledger: ledger.join_timed_out(300, 300.5), CauseKind.JOIN_TIMEOUT, "300 s", 1),
    (lambda ledger: ledger.interrupted(signal.SIGINT, 3.0), CauseKind.SIGNAL, "", 130),
    (lambda ledger: ledger.interrupted(signal.SIGTERM, 3.0), CauseKind.SIGNAL, "", 143),
    (lambda ledger: ledger.interrupted(signal.SIGHUP, 3.0), CauseKind.SIGNAL, "", 129),
]


@pytest.mark.parametrize(("happen", "kind", "detail", "code"), LIMITS)
def test_limits_and_signals(happen: Callable[[Ledger], None], kind: CauseKind, detail: str, code: int) -> None:
    """Each has its exit code; what fails afterwards changes nothing, and what came before is not replaced."""
    ledger = _running()
    happen(ledger)
    assert ledger.cause is not None
    assert (ledger.cause.kind, ledger.cause.detail, ledger.cause.node_rank) == (kind, detail, None)
    _feed(ledger, RankExited(0, 1, FAILED), NodeLost(1, "cut"))
    assert (ledger.cause.kind, ledger.exit_code) == (kind, code)
    ledger = _feed(_running(), RankExited(0, 1, FAILED))
    happen(ledger)
    assert ledger.cause is not None
    assert (ledger.cause.kind, ledger.exit_code) == (CauseKind.RANK, 1)


@pytest.mark.parametrize(("happen", "kind", "detail", "code"), LIMITS)
def test_something_left_behind_beats_all_but_a_signal(
    happen: Callable[[Ledger], None], kind: CauseKind, detail: str, code: int
) -> None:
    """5 takes the place of 1, 4 and 124; a signal's code stays, as shells expect it."""
    ledger = _running()
    happen(ledger)
    _feed(ledger, *_ended(1, FAILED, STUCK))
    assert ledger.exit_code == (code if kind is CauseKind.SIGNAL else 5)


def test_lost_logs_take_the_place_of_0_alone() -> None:
    """A job that failed, or left something behind, has a cause that matters more."""
    codes = []
    for happen in (lambda _: None, lambda ledger: ledger.timed_out(60, 1.0), lambda ledger: ledger.interrupted(2, 1.0)):
        ledger = Ledger([NodeRecord(0, "gpu-01", (0,))])
        ledger.logs_lost = True
        happen(ledger)
        codes.append(ledger.exit_code)
    assert codes == [6, 124, 130]


def test_nodes_join_with_all_their_ranks() -> None:
    """A node has joined when all its ranks were seen, or when its command has come and gone unseen."""
    ledger = _feed(_ledger(), *_started(0), CommandStarted(1, 50), RankStarted(1, 2, 62))
    assert [node.joined for node in ledger.nodes] == [True, False]
    ledger.join_timed_out(300, 300.0)
    assert ledger.cause is not None
    assert ledger.cause.missing == (1,)
    _feed(ledger, CommandExited(1, OK))
    assert ledger.all_joined
