"""A job is ended politely first and surely in the end, and nothing else is touched."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest

from tests.process.programs import BARRIER, CHAIN, NOTING, POLITE, STUBBORN, TREE
from tests.support.local_node import LocalNode, fake_torchrun, is_alive, pid_in, wait_gone
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    ScriptWriter = Callable[[str], Path]

SIGKILLED = int(signal.SIGKILL)


@pytest.fixture(autouse=True)
def bystanders() -> Iterator[list[int]]:
    """A plain process of the same user and one of another job, which live through all of it."""
    environ = os.environ | {"GPULAYER_MARKER": "f" * 32, "GPULAYER_JOB_ID": "another"}
    others = [subprocess.Popen(["sleep", "1000"], env=env, start_new_session=True) for env in (None, environ)]
    yield [other.pid for other in others]
    codes = [other.poll() for other in others]
    for other in others:
        other.kill()
        other.wait()
    assert codes == [None, None]


def _stubborn(node: LocalNode, script: ScriptWriter, **changes: object) -> list[int]:
    """Run two stubborn ranks and return the pids of both and of their daemons."""
    node.run(
        fake_torchrun(node, script(STUBBORN), str(node.folder), nproc_per_node=2), **({"nproc_per_node": 2} | changes)
    )
    names = [f"{kind}-{rank}" for kind in ("worker", "daemon") for rank in (0, 1)]
    return [pid_in(node.folder / name) for name in names]


def test_polite_ranks_end_at_once_and_are_all_told_of(node: LocalNode, script: ScriptWriter) -> None:
    """A stop ends ranks that obey SIGTERM long before the grace, and each end is told, the sweep last."""
    node.run(fake_torchrun(node, script(POLITE), nproc_per_node=2), nproc_per_node=2)
    for local_rank in (0, 1):
        node.wait_for_output(local_rank, b"ready")
    guard = node.guard_pid
    node.send("stop", grace_s=30)
    node.wait_for("ended", timeout_s=10)
    assert not is_alive(guard)
    assert node.finish() == {"type": "ended", "kept": "", "outputs": False}
    kinds = [header["type"] for header in node.frames]
    assert kinds[-3:] == ["swept", "drained", "ended"]
    assert kinds.count("exit") == 1
    ends = [(one["local_rank"], one["status"], one["parts"]) for one in node.frames if one["type"] == "rank_exit"]
    assert sorted(ends) == [(0, signal.SIGTERM, []), (1, signal.SIGTERM, [])]
    assert node.wait_for("swept")["survivors"] == []


def test_stubborn_ranks_and_hidden_daemons_end_with_the_grace(node: LocalNode, script: ScriptWriter) -> None:
    """Ranks that ignore SIGTERM and daemons without session, parent or marker live through the grace, not longer."""
    pids = _stubborn(node, script)
    began = time.monotonic()
    node.send("stop", grace_s=1)
    swept = node.wait_for("swept")
    took = time.monotonic() - began
    assert [pid for pid in pids if is_alive(pid)] == []
    assert 1 <= took < 1 + 2
    assert swept["survivors"] == []
    assert swept["killed"] == 5  # torchrun, two ranks, two daemons
    assert node.finish()["type"] == "ended"


def test_the_command_gets_one_sigterm_and_nobody_else_any(node: LocalNode, script: ScriptWriter) -> None:
    """However often and in whatever way a job is told to end, its command sees SIGTERM once, its child nothing."""
    node.run([sys.executable, str(script(NOTING)), str(node.folder)], nproc_per_node=0)
    node.wait_for_output(None, b"ready command")
    node.wait_for_output(None, b"ready child")
    node.send("stop", grace_s=20)
    wait_until(lambda: (node.folder / "command").read_text() != "", "the command has noted a signal")
    node.send("stop", grace_s=10)
    os.kill(node.hello["pid"], signal.SIGTERM)
    node.end_of_file()
    os.kill(node.hello["pid"], signal.SIGKILL)  # the guard goes on with the grace of the job, 1 s
    wait_gone(node.wait_for("started")["pid"])
    assert (node.folder / "command").read_text() == "SIGTERM\n"
    assert (node.folder / "child").read_text() == ""


def test_kill_sends_no_sigterm_and_does_not_wait(node: LocalNode, script: ScriptWriter) -> None:
    """`kill` is SIGKILL at once, whatever the grace."""
    node.run([sys.executable, str(script(NOTING)), str(node.folder)], nproc_per_node=0, grace_s=60)
    node.wait_for_output(None, b"ready command")
    node.wait_for_output(None, b"ready child")
    node.send("kill")
    assert node.finish(5)["type"] == "ended"
    assert (node.folder / "command").read_text() == ""
    assert node.wait_for("exit")["status"] == SIGKILLED


def test_a_later_stop_can_only_shorten_the_grace(node: LocalNode, script: ScriptWriter) -> None:
    """Told 30 s, then 0.3 s, then 60 s, a node kills after 0.3 s."""
    pids = _stubborn(node, script)
    node.send("stop", grace_s=30)
    node.send("stop", grace_s=0.3)
    node.send("stop", grace_s=60)
    assert node.wait_for("swept", timeout_s=5)["killed"] == 5
    assert not any(map(is_alive, pids))


def test_torchrun_without_ranks_is_not_waited_for(node: LocalNode, script: ScriptWriter) -> None:
    """A command that has no living child any more and ignores SIGTERM is killed at once, not after the grace."""
    node.run([sys.executable, str(script(BARRIER))], nproc_per_node=0)
    node.wait_for_output(None, b"ready")
    node.send("stop", grace_s=60)
    assert node.wait_for("exit", timeout_s=5)["status"] == SIGKILLED


def test_ranks_do_not_outlive_their_torchrun(node: LocalNode, script: ScriptWriter) -> None:
    """With torchrun killed, its ranks and their daemons are killed without a grace, and the ranks' ends told."""
    pids = _stubborn(node, script, grace_s=60)
    for local_rank in (0, 1):
        node.wait_for("rank", local_rank=local_rank)
    os.kill(node.wait_for("started")["pid"], signal.SIGKILL)
    assert node.finish(10)["type"] == "ended"
    assert not any(map(is_alive, pids))
    assert node.wait_for("exit")["status"] == SIGKILLED
    assert node.wait_for("swept")["killed"] == 4
    assert [node.wait_for("rank_exit", local_rank=one)["status"] for one in (0, 1)] == [SIGKILLED, SIGKILLED]


def test_what_a_successful_job_leaves_behind_is_ended(node: LocalNode, script: ScriptWriter) -> None:
    """A daemon that outlives its job is killed when the command has exited 0."""
    source = STUBBORN.replace("time.sleep(1000)", "")
    node.run(fake_torchrun(node, script(source), str(node.folder)))
    assert node.finish()["type"] == "ended"
    assert node.wait_for("exit")["status"] == 0
    assert node.wait_for("swept") == {"type": "swept", "killed": 1, "survivors": []}
    assert not is_alive(pid_in(node.folder / "daemon-0"))


@pytest.mark.parametrize("storm", [CHAIN, TREE])
def test_a_storm_of_forks_is_ended(node: LocalNode, script: ScriptWriter, storm: str) -> None:
    """Processes that keep forking in sessions of their own are all gone soon after the kill."""
    node.run(fake_torchrun(node, script(storm + POLITE)))
    node.wait_for_output(0, b"ready")
    node.send("kill")
    assert node.wait_for("swept", timeout_s=15)["survivors"] == []
    assert node.finish()["type"] == "ended"


def test_a_process_whose_first_thread_has_ended_is_alive_and_ended(node: LocalNode, script: ScriptWriter) -> None:
    """A leader that is a zombie while its threads run on is killed like any other."""
    source = (
        "import ctypes, os, platform, sys, threading, time\n"
        "def work():\n"
        "    with open(sys.argv[1] + '/leader', 'w') as file: print(os.getpid(), file=file)\n"
        "    time.sleep(1000)\n"
        "if os.fork() == 0:\n"
        "    os.setsid()\n"
        "    threading.Thread(target=work).start()\n"
        "    ctypes.CDLL(None).syscall({'x86_64': 60, 'aarch64': 93}[platform.machine()], 0)\n"
    )
    node.run(fake_torchrun(node, script(source + POLITE), str(node.folder)))
    leader = pid_in(node.folder / "leader")
    node.wait_for_output(0, b"ready")
    assert is_alive(leader)
    node.send("stop", grace_s=0.2)
    assert node.wait_for("swept")["survivors"] == []
    assert not is_alive(leader)


def test_two_supervisors_of_one_job_leave_each_other_alone(
    node: LocalNode, script: ScriptWriter, tmp_path: Path
) -> None:
    """Two nodes of a job may be one machine: ending one leaves every process of the other."""
    with LocalNode(tmp_path) as other:
        for one in (node, other):
            one.run(fake_torchrun(one, script(POLITE)))
            one.wait_for_output(0, b"ready")
        before = {process.pid for process in other.processes()}
        node.send("kill")
        assert node.finish()["type"] == "ended"
        assert {process.pid for process in other.processes()} == before
        assert len(before) == 4  # supervisor, guard, torchrun, rank
        other.send("kill")
        assert other.finish()["type"] == "ended"


SHELL_CHILD = """
import os, signal, sys, time
def told(number, frame):
    print("told", flush=True)
    time.sleep(0.5)
    print("ended well", flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, told)
print("ready", flush=True)
time.sleep(1000)
"""


def test_a_commands_group_is_told_once_and_has_the_grace(node: LocalNode, script: ScriptWriter) -> None:
    """A shell dies of SIGTERM at once and passes nothing on: its child is told too, and ends in its own time."""
    argv = ["/bin/sh", "-c", f"{sys.executable} {script(SHELL_CHILD)}; echo never"]
    node.run(argv, nproc_per_node=0, launcher="command")
    node.wait_for_output(None, b"ready")
    node.send("stop", grace_s=20)
    node.send("stop", grace_s=10)
    assert node.finish()["type"] == "ended"
    assert node.output[None, "stdout"] == b"ready\ntold\nended well\n"
    assert node.wait_for("exit")["status"] == signal.SIGTERM
    swept = node.wait_for("swept")
    assert (swept["killed"], swept["survivors"]) == (0, [])


def test_a_commands_stubborn_child_ends_with_the_grace(node: LocalNode, script: ScriptWriter) -> None:
    """What ignores SIGTERM, and has outlived the command, is killed when the grace is over."""
    source = SHELL_CHILD.replace("signal.SIGTERM, told", "signal.SIGTERM, signal.SIG_IGN")
    argv = ["/bin/sh", "-c", f"{sys.executable} {script(source)}; echo never"]
    node.run(argv, nproc_per_node=0, launcher="command")
    node.wait_for_output(None, b"ready")
    began = time.monotonic()
    node.send("stop", grace_s=1)
    assert node.wait_for("swept")["killed"] == 1
    assert 1 <= time.monotonic() - began < 1 + 5
    assert node.finish()["type"] == "ended"


def test_a_command_without_children_has_the_grace_too(node: LocalNode, script: ScriptWriter) -> None:
    """torchrun alone is not waited for, once its ranks are gone; a command may need the time to end well."""
    node.run([sys.executable, str(script(SHELL_CHILD))], nproc_per_node=0, launcher="command")
    node.wait_for_output(None, b"ready")
    node.send("stop", grace_s=20)
    node.finish()
    assert node.output[None, "stdout"] == b"ready\ntold\nended well\n"
    assert node.wait_for("exit")["status"] == 0
