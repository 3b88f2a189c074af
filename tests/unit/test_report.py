"""The last block on the screen, as a whole text."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from gpulayer.events import (
    CommandExited,
    CommandStarted,
    ExitStatus,
    NodeEnded,
    NodeLost,
    NodeStopping,
    NodeSwept,
    RankExited,
    RankStarted,
    Survivor,
    Tail,
)
from gpulayer.outcome import Ledger, NodeRecord
from gpulayer.report import TAIL_LINES, render_report
from tests.support.plans import JOB_ID, nodes, plan, script

if TYPE_CHECKING:
    from collections.abc import Iterable

    from gpulayer.events import Event

OK = ExitStatus(code=0)
PLAN = plan(script(grace_s=5, lost_after_s=7), nodes(2, 2, 2))
RUN_DIR = Path("runs") / JOB_ID
HINT = f"  hint: `gpulayer kill {JOB_ID} -w gpu-02` looks there again, and ends what is left"
UNVERIFIED = "could not be verified, its supervisor ends its part by itself within 12 s"


def _ledger(*events: Event, started: Iterable[int] = (0, 1, 2)) -> Ledger:
    """A job of three nodes with two ranks each; the events come half a second apart, from 1.5 s on."""
    ledger = Ledger([NodeRecord(node.node_rank, node.node_id, node.ranks) for node in PLAN.nodes])
    for node_rank in started:
        ledger.apply(CommandStarted(node_rank, 40), 1.0)
        for local_rank in (0, 1):
            ledger.apply(RankStarted(node_rank, 2 * node_rank + local_rank, 50 + local_rank), 1.0)
    for number, event in enumerate(events, 1):
        ledger.apply(event, 1 + number / 2)
    return ledger


def _ended(node_rank: int, code: int = 0, *survivors: Survivor, kept: str = "") -> list[Event]:
    exited = CommandExited(node_rank, ExitStatus(code=code))
    return [exited, NodeSwept(node_rank, 1, survivors), NodeEnded(node_rank, kept)]


def _stopped(*node_ranks: int) -> list[Event]:
    told: list[Event] = [NodeStopping(node_rank) for node_rank in node_ranks]
    return told + [event for node_rank in node_ranks for event in _ended(node_rank, 1)]


def _report(ledger: Ledger) -> list[str]:
    text = render_report(PLAN, ledger, 12.34, RUN_DIR)
    assert text.endswith("\n")
    return text.splitlines()


def test_success() -> None:
    """Nodes that fared alike share a line."""
    assert _report(_ledger(*_ended(2), *_ended(0), *_ended(1))) == [
        f"gpulayer: job {JOB_ID} succeeded after 12.3 s",
        "  gpu-[01-03]: succeeded; verified clean",
        f"  logs: runs/{JOB_ID}",
    ]


def test_a_success_whose_logs_are_incomplete() -> None:
    """The exit code is explained in the first line and the last; a failure keeps its own."""
    ledger = _ledger(*_ended(2), *_ended(0), *_ended(1))
    ledger.logs_lost = True
    first, *_, last = _report(ledger)
    assert first == f"gpulayer: job {JOB_ID} succeeded, but its logs are incomplete, after 12.3 s, exit code 6"
    assert last == f"  logs: runs/{JOB_ID}, incomplete"


def test_a_rank_that_failed() -> None:
    """Rank, node, code, time and last lines of the first failure; then each node, those it took along too."""
    tail = Tail(stdout=b"step 1\n", stderr=b"Traceback:\r\n  boom \xff\n\n")
    failed = RankExited(1, 2, ExitStatus(code=17), tail)
    taken = RankExited(1, 3, ExitStatus(signal=15))
    assert _report(_ledger(failed, taken, *_stopped(0, 2), *_ended(1, 1))) == [
        f"gpulayer: job {JOB_ID} failed after 12.3 s, exit code 1",
        "  first: rank 2 on node 1 (gpu-02) exited with code 17, 1.5 s into the job",
        "  its last lines on stderr:",
        "    Traceback:",
        "      boom \ufffd",
        "  gpu-[01,03]: stopped by gpulayer; verified clean",
        "  gpu-02: failed: rank 2 exited with code 17; verified clean",
        f"  logs: runs/{JOB_ID}",
    ]


def test_a_rank_that_was_killed_and_said_nothing_on_stderr() -> None:
    """A signal is named, and stdout's last lines stand in."""
    failed = RankExited(0, 1, ExitStatus(signal=9), Tail(stdout=b"step 1\nstep 2\n", stderr=b" \n"))
    assert _report(_ledger(failed, *_ended(0, 1), *_stopped(1, 2)))[1:5] == [
        "  first: rank 1 on node 0 (gpu-01) was killed by SIGKILL, 1.5 s into the job",
        "  its last lines on stdout:",
        "    step 1",
        "    step 2",
    ]


def test_the_error_file_of_torchrun_comes_first() -> None:
    """Where the script recorded its exception, that traceback is shown."""
    error = {"message": {"message": "ValueError: no", "extraInfo": {"py_callstack": "Traceback:\n  ValueError: no\n"}}}
    tail = Tail(stderr=b"noise\n", error_file=json.dumps(error).encode())
    lines = _report(_ledger(RankExited(0, 0, ExitStatus(code=1), tail)))
    assert lines[2:5] == ["  its error file says:", "    Traceback:", "      ValueError: no"]


def test_a_port_that_was_taken_at_the_last_moment() -> None:
    """torchrun's own words for it are followed by gpulayer's; a script's are not, nor those about another port."""
    words = b"DistNetworkError: failed to listen. port: %d, useIpv6: false, code: -98, name: EADDRINUSE\n"
    status, hint = ExitStatus(code=1), "  hint: another process took port 29500 on gpu-01 after it was found free: "
    lines = _report(_ledger(CommandExited(0, status, Tail(stderr=words % 29500))))
    assert lines[4] == hint + "start the job again, or name another port with `--master-port`"
    others = (CommandExited(0, status, Tail(stderr=words % 8265)), RankExited(0, 0, status, Tail(stderr=words % 29500)))
    assert [line for other in others for line in _report(_ledger(other)) if "hint: another" in line] == []


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b'{"message": "text"}', b'{"message": {"extraInfo": {}}}', b"[" * 100_000, b"\xff"]
)
def test_any_other_error_file_is_passed_over(content: bytes) -> None:
    """An error file that is not as expected costs nothing but itself."""
    tail = Tail(stderr=b"the reason\n", error_file=content)
    lines = _report(_ledger(RankExited(0, 0, ExitStatus(code=1), tail)))
    assert lines[2:4] == ["  its last lines on stderr:", "    the reason"]


def test_no_more_than_the_last_lines_are_shown() -> None:
    """A long tail is cut at the front."""
    tail = Tail(stderr=b"".join(b"line %d\n" % number for number in range(100)))
    lines = _report(_ledger(RankExited(0, 0, ExitStatus(code=1), tail)))
    assert lines[3 : 3 + TAIL_LINES] == [f"    line {number}" for number in range(100 - TAIL_LINES, 100)]


def test_torchrun_that_failed_by_itself() -> None:
    """Where no rank failed before, the command is blamed, with its own last lines."""
    failed = CommandExited(2, ExitStatus(code=2), Tail(stderr=b"usage: torchrun\n"))
    assert _report(_ledger(failed, NodeSwept(2, 0), NodeEnded(2), *_stopped(0, 1))) == [
        f"gpulayer: job {JOB_ID} failed after 12.3 s, exit code 1",
        "  first: torchrun on node 2 (gpu-03) exited with code 2, 1.5 s into the job",
        "  its last lines on stderr:",
        "    usage: torchrun",
        "  gpu-[01-02]: stopped by gpulayer; verified clean",
        "  gpu-03: failed; verified clean",
        f"  logs: runs/{JOB_ID}",
    ]


def test_a_node_that_was_lost() -> None:
    """It could not be looked at, so it says by when it ends by itself, where output is kept, and how to look later."""
    assert _report(_ledger(NodeLost(1, "nothing was heard of it for 7 s"), *_stopped(0, 2))) == [
        f"gpulayer: job {JOB_ID} failed after 12.3 s, exit code 4",
        "  first: node 1 (gpu-02) was lost: nothing was heard of it for 7 s, 1.5 s into the job",
        "  gpu-[01,03]: stopped by gpulayer; verified clean",
        f"  gpu-02: lost: nothing was heard of it for 7 s; {UNVERIFIED}",
        f"    output that did not arrive is on gpu-02 in /tmp/gpulayer-{JOB_ID}-n1",
        HINT,
        f"  logs: runs/{JOB_ID}",
    ]


def test_nodes_that_are_lost_for_several_reasons_are_looked_at_by_one_command() -> None:
    """Each has its line; the command names them all, and none that was seen to be clean."""
    lost = [NodeLost(0, "nothing was heard of it for 7 s"), NodeLost(2, "its supervisor died", supervisor_died=True)]
    lines = _report(_ledger(*lost, *_stopped(1)))
    assert [line.partition(":")[0] for line in lines if ": lost: " in line] == ["  gpu-01", "  gpu-03"]
    hint = f"  hint: `gpulayer kill {JOB_ID} -w gpu-[01,03]` looks there again, and ends what is left"
    assert lines[-2:] == [hint, f"  logs: runs/{JOB_ID}"]
    assert len([line for line in lines if "hint: " in line]) == 1


def test_a_node_that_was_lost_and_seen_to_be_clean_needs_no_command() -> None:
    """A second login has looked."""
    lines = _report(_ledger(NodeLost(1, "cut"), *_stopped(0, 2), NodeSwept(1, 1)))
    assert "  gpu-02: lost: cut; verified clean" in lines
    assert [line for line in lines if "hint: " in line] == []


def test_a_supervisor_that_died() -> None:
    """Seen clean by a second login, it is exit code 4; not seen, 5, and how to look."""
    died = NodeLost(1, "its supervisor died (signal KILL)", supervisor_died=True)
    seen = _report(_ledger(died, *_stopped(0, 2), NodeSwept(1, 2)))
    assert seen[0] == f"gpulayer: job {JOB_ID} failed after 12.3 s, exit code 4"
    assert seen[3] == "  gpu-02: lost: its supervisor died (signal KILL); verified clean"
    unseen = _report(_ledger(died, *_stopped(0, 2)))
    assert unseen[0] == f"gpulayer: job {JOB_ID} failed after 12.3 s, exit code 5"
    assert unseen[3] == "  gpu-02: lost: its supervisor died (signal KILL); something may still run there"
    assert unseen[-2:] == [HINT, f"  logs: runs/{JOB_ID}"]


def test_a_process_that_will_not_die() -> None:
    """After a success too: what is left is named, and the exit code is 5."""
    stuck = Survivor(77, "D", "python train.py")
    assert _report(_ledger(*_ended(0), *_ended(1, 0, stuck), *_ended(2))) == [
        f"gpulayer: job {JOB_ID} ended, but something may still run, after 12.3 s, exit code 5",
        "  gpu-[01,03]: succeeded; verified clean",
        "  gpu-02: succeeded; something may still run there",
        "    still there: pid 77, state D, python train.py",
        HINT,
        f"  logs: runs/{JOB_ID}",
    ]


def test_output_that_did_not_arrive() -> None:
    """The folder that was kept on a node is named."""
    lines = _report(_ledger(*_ended(0), *_ended(1, kept="/tmp/gpulayer-x-n1"), *_ended(2)))
    assert lines[1:3] == [
        "  gpu-[01-03]: succeeded; verified clean",
        "    output that did not arrive is on gpu-02 in /tmp/gpulayer-x-n1",
    ]


def test_output_that_did_not_arrive_from_several_nodes() -> None:
    """Their folders differ in the node rank alone: one line, and a pattern that a shell reads."""
    kept = [event for node_rank in (0, 2) for event in _ended(node_rank, kept=f"/tmp/gpulayer-x-n{node_rank}")]
    assert _report(_ledger(*kept, *_ended(1)))[1:3] == [
        "  gpu-[01-03]: succeeded; verified clean",
        "    output that did not arrive is on gpu-[01,03] in /tmp/gpulayer-x-n*",
    ]


def test_stopped_by_a_signal_before_the_start() -> None:
    """Nothing had started anywhere, and it says so."""
    ledger = _ledger(started=())
    ledger.interrupted(signal.SIGINT, 0.25)
    assert _report(ledger) == [
        f"gpulayer: job {JOB_ID} was stopped after 12.3 s, exit code 130",
        "  first: gpulayer received SIGINT, 0.2 s into the job",
        "  gpu-[01-03]: never started",
        f"  logs: runs/{JOB_ID}",
    ]


def test_left_at_once_while_it_runs() -> None:
    """After the third Ctrl-C nothing is verified; each node says what becomes of it, and one line how to look."""
    ledger = _ledger()
    ledger.interrupted(signal.SIGTERM, 2.0)
    assert _report(ledger)[2:4] == [f"  gpu-[01-03]: running; {UNVERIFIED}", HINT.replace("gpu-02", "gpu-[01-03]")]


def test_limits() -> None:
    """The option whose limit was reached is named with its value; the join limit with the nodes that are late."""
    ledger = _ledger()
    ledger.timed_out(90, 91.04)
    assert _report(ledger)[:2] == [
        f"gpulayer: job {JOB_ID} reached its time limit after 12.3 s, exit code 124",
        "  first: --timeout, 90 s, was reached",
    ]
    ledger = _ledger(started=(1,))
    ledger.join_timed_out(300, 300.1)
    assert _report(ledger)[:2] == [
        f"gpulayer: job {JOB_ID} failed after 12.3 s, exit code 1",
        "  first: within --join-timeout, 300 s, not all ranks had started on gpu-[01,03]",
    ]
