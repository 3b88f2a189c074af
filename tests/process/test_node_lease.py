"""A node's own lease: a second job is refused while a process of the first has it open, and no longer."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from gpulayer.node_lease import PREFIX, Lease, LeaseHeldError, in_conflict, leases, parse_leases
from tests.process.programs import POLITE
from tests.support.local_node import LocalNode, wait_gone

if TYPE_CHECKING:
    from collections.abc import Callable

    from gpulayer.wire import Header

    ScriptWriter = Callable[[str], Path]


def _facts(job_id: str = "first", gpus: list[int] | None = None, **changes: object) -> Header:
    """A job's lease, in a scope of this test run alone."""
    facts = {"job_id": job_id, "user": "ada", "login": "login1", "since": 1764439391.25, "gpus": gpus}
    return {**facts, "scope": f"test-{os.getpid()}", **changes}


def _hold(node: LocalNode, facts: Header) -> tuple[str, list[Header]]:
    """Ask a node for a lease; return the answer's type, and who has it."""
    node.frames.clear()
    node.payloads.clear()
    node.send("hold", **facts)
    answer = node.wait_for("held", "refused")
    return answer["type"], json.loads(node.payloads[-1] or b"[]")


@pytest.mark.parametrize(
    ("held", "wanted", "conflict"),
    [
        (None, None, True),
        (None, [0], True),
        ([0], None, True),
        ([0, 1], [1, 2], True),
        ([0, 1], [2, 3], False),
    ],
)
def test_two_jobs_share_a_machine_if_their_gpus_are_apart(
    held: list[int] | None, wanted: list[int] | None, conflict: bool
) -> None:
    """A count of GPUs is the whole machine; lists may stand side by side."""
    assert in_conflict(_facts("second", wanted), _facts("first", held)) is conflict
    lease = Lease(_facts("first", held))
    with pytest.raises(LeaseHeldError) if conflict else contextlib.nullcontext() as refused:
        Lease(_facts("second", wanted)).release()
    lease.release()
    assert refused is None or refused.value.args[0] == [_facts("first", held)]


def test_a_job_is_not_in_its_own_way_and_practice_clusters_not_in_each_others() -> None:
    """Two nodes of one job may be one machine that lists no GPUs; each practice node has a scope of its own."""
    assert not in_conflict(_facts(), _facts())
    assert in_conflict(_facts(), _facts(since=1764439391.5))
    assert not in_conflict(_facts("second", scope="127.0.0.1:2222"), _facts(scope="127.0.0.1:2223"))


def test_a_lease_says_who_holds_what_since_when() -> None:
    """Names are bounded to 107 bytes by the kernel; a long job id, any user and many GPUs are told in several."""
    facts = _facts("j" * 64, list(range(64)), user="ünal o/brien", login="login-" + "x" * 60)
    lease = Lease(facts)
    assert len(lease.sockets) > 4
    assert [held for held, _ in leases() if held["scope"] == facts["scope"]] == [facts]
    lease.release()
    assert [held for held, _ in leases() if held["scope"] == facts["scope"]] == []


def test_names_that_make_no_sense_are_passed_over() -> None:
    """Any user can bind any name: half a lease, other words and no JSON are not taken for a lease, and do no harm."""
    good = json.dumps(_facts(), separators=(",", ":"))
    rows = [
        "Num       RefCount Protocol Flags    Type St Inode Path",
        "0000: 00000002 00000000 00000000 0002 01 17 /run/systemd/notify",
        f"0000: 00000002 00000000 00000000 0002 01 18 @{PREFIX}a/0/2/{good[:60]}",
        f"0000: 00000002 00000000 00000000 0002 01 19 @{PREFIX}a/1/2/{good[60:]}",
        f"0000: 00000002 00000000 00000000 0002 01 20 @{PREFIX}b/0/2/{good[:60]}",
        f"0000: 00000002 00000000 00000000 0002 01 21 @{PREFIX}c/0/1/{{}}",
        f"0000: 00000002 00000000 00000000 0002 01 22 @{PREFIX}d/x/1/{good}",
        f"0000: 00000002 00000000 00000000 0002 01 23 @{PREFIX}e/0/99999999999/{good}",
        f"0000: 00000002 00000000 00000000 0002 01 24 @{PREFIX}f/0/1/{'[' * 100_000}",
        f"0000: 00000002 00000000 00000000 0002 01 25 @{PREFIX}g",
        f"0000: 00000002 00000000 00000000 0002 01 26 @{PREFIX}h/0/1/{good.replace('null', '[1.5]')}",
        f"0000: 00000002 00000000 00000000 0002 01 27 @{PREFIX}i/0/1/{good.replace('1764439391.25', 'NaN')}",
        f"@{PREFIX}j/0/1/{good}",
    ]
    assert parse_leases("\n".join(rows)) == [(_facts(), {18, 19})]


def test_a_second_supervisor_is_refused_and_told_who_holds_the_node(tmp_path: Path) -> None:
    """It may ask again, and has the node once the first has given it back."""
    with LocalNode(tmp_path) as first, LocalNode(tmp_path) as second:
        assert _hold(first, _facts("first")) == ("held", [])
        assert _hold(second, _facts("second")) == ("refused", [_facts("first")])
        first.send("release")
        first.wait_for("released")
        assert _hold(second, _facts("second")) == ("held", [])
        assert _hold(first, _facts("first")) == ("refused", [_facts("second")])
        second.end_of_file()
        second.process.wait(10)
        assert _hold(first, _facts("first")) == ("held", [])


def test_the_lease_outlives_the_supervisor_while_its_guard_ends_the_job(
    node: LocalNode, script: ScriptWriter, tmp_path: Path
) -> None:
    """After SIGKILL to the supervisor nobody gets the node before the job's processes are gone; then anybody does."""
    assert _hold(node, _facts("first")) == ("held", [])
    node.run([sys.executable, str(script("import signal, time\nsignal.signal(15, signal.SIG_IGN)\ntime.sleep(1000)"))])
    command, guard = node.wait_for("started")["pid"], node.guard_pid
    with LocalNode(tmp_path) as second:
        os.kill(node.hello["pid"], signal.SIGKILL)
        node.process.wait(10)
        assert _hold(second, _facts("second"))[0] == "refused"
        wait_gone(command)
        wait_gone(guard)
        assert _hold(second, _facts("second")) == ("held", [])


def test_a_lease_is_given_back_when_the_launcher_is_silent(node: LocalNode) -> None:
    """With a launcher that is cut off before the start, the node is free after `lost_after_s`."""
    node.send("hold", **_facts(), lost_after_s=0.5)
    node.wait_for("held")
    assert node.wait_for("error")["message"] == "nothing was heard there of gpulayer for 0.5 s"
    node.process.wait(10)
    assert [held for held, _ in leases() if held["scope"] == _facts()["scope"]] == []


def test_the_job_itself_does_not_have_the_lease_open(node: LocalNode, script: ScriptWriter) -> None:
    """A daemon that outlives everything cannot hold the node: only supervisor and guard have the sockets."""
    assert _hold(node, _facts("first")) == ("held", [])
    node.run([sys.executable, str(script(POLITE))])
    node.wait_for_output(None, b"ready")
    ((_, inodes),) = [lease for lease in leases() if lease[0] == _facts("first")]

    def having(pid: int) -> bool:
        links = {str(fd.readlink()) for fd in Path(f"/proc/{pid}/fd").iterdir()}
        return any(f"socket:[{inode}]" in links for inode in inodes)

    pids = [node.hello["pid"], node.guard_pid, node.wait_for("started")["pid"]]
    assert [having(pid) for pid in pids] == [True, True, False]


def test_a_mutex_that_is_not_given_back_is_an_answer(node: LocalNode) -> None:
    """Somebody who keeps the lock for taking a lease delays it by seconds, and is not waited for without end."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as greedy:
        greedy.bind("\0gpulayer-lease-mutex")
        node.send("hold", **_facts())
        answer = node.wait_for("refused", timeout_s=15)
    assert (answer["code"], answer["message"]) == ("lease", "no lease can be had there: Address already in use")
