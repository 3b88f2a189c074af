"""Whatever dies or falls silent, the node ends its part of the job by itself."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from gpulayer import processes
from tests.process.programs import POLITE, STUBBORN
from tests.process.test_ending import bystanders  # noqa: F401 - a fixture: what must live through all of it
from tests.support.local_node import LocalNode, fake_torchrun, free_port, is_alive, pid_in, wait_gone
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable

    ScriptWriter = Callable[[str], Path]

# Part of a rank: 600 processes whose parent is gone, which live for 2 s.
ORPHANS = """
import os, time
for _ in range(600):
    if os.fork() == 0:
        if os.fork() == 0:
            time.sleep(2)
        os._exit(0)
"""
FLOOD = "import os\nblock = b'x' * 65535 + b'\\n'\nwhile True: os.write(1, block)"


def _stubborn(node: LocalNode, script: ScriptWriter, **changes: object) -> list[int]:
    """Run a stubborn rank; return the pids of the supervisor, the guard, torchrun, the rank and its daemon."""
    node.run(fake_torchrun(node, script(STUBBORN), str(node.folder)), **changes)
    ranks = [pid_in(node.folder / name) for name in ("worker-0", "daemon-0")]
    return [node.hello["pid"], node.guard_pid, node.wait_for("started")["pid"], *ranks]


def _polite(node: LocalNode, script: ScriptWriter, **changes: object) -> list[int]:
    """Run a polite rank; return the pids of the supervisor, the guard, torchrun and the rank."""
    node.run(fake_torchrun(node, script(POLITE)), **changes)
    node.wait_for_output(0, b"ready")
    return [node.hello["pid"], node.guard_pid, node.wait_for("started")["pid"], node.wait_for("rank")["pid"]]


def test_polite_ranks_end_at_once_when_the_supervisor_is_killed(node: LocalNode, script: ScriptWriter) -> None:
    """The guard passes SIGTERM on, and waits no longer than the ranks take."""
    pids = _polite(node, script, grace_s=60)
    os.kill(node.hello["pid"], signal.SIGKILL)
    assert wait_gone(*pids) < 5


def test_the_guard_ends_all_of_it_when_the_supervisor_is_killed(node: LocalNode, script: ScriptWriter) -> None:
    """Ranks that ignore SIGTERM and daemons without a marker have the grace, then the guard kills them."""
    pids = _stubborn(node, script, grace_s=1)
    os.kill(node.hello["pid"], signal.SIGKILL)
    assert 1 <= wait_gone(*pids) < 1 + 2


def test_the_supervisor_ends_all_of_it_when_the_guard_is_killed(node: LocalNode, script: ScriptWriter) -> None:
    """The supervisor says why and does what the guard would have done."""
    pids = _stubborn(node, script, grace_s=1)
    os.kill(node.guard_pid, signal.SIGKILL)
    assert "guard" in node.wait_for("error")["message"]
    assert wait_gone(*pids) < 1 + 2


def test_the_guard_ends_all_of_it_when_the_supervisor_stands_still(node: LocalNode, script: ScriptWriter) -> None:
    """A stopped supervisor does not see that the launcher is gone; its guard does not hear of it, and ends the job.

    Nor is the guard held up by all that it has to tell, here of 600 orphans.
    """
    pids = _stubborn(node, lambda source: script(ORPHANS + source), lost_after_s=4.0, grace_s=1)
    os.kill(node.hello["pid"], signal.SIGSTOP)
    assert wait_gone(*pids[2:], timeout_s=15) > 2
    os.kill(node.hello["pid"], signal.SIGCONT)
    node.finish()


def test_with_both_killed_torchrun_is_told_by_the_kernel(node: LocalNode, script: ScriptWriter) -> None:
    """The parent-death signal is what is left then, and polite ranks end by it."""
    pids = _polite(node, script, grace_s=60)
    os.kill(node.hello["pid"], signal.SIGSTOP)
    os.kill(node.guard_pid, signal.SIGKILL)
    os.kill(node.hello["pid"], signal.SIGKILL)
    wait_gone(*pids)


def test_a_signal_to_the_supervisor_ends_the_job_and_is_told(node: LocalNode, script: ScriptWriter) -> None:
    """A machine that shuts down sends SIGTERM: the launcher is told so, and the job ends with its grace."""
    pids = _stubborn(node, script, grace_s=0.5)
    os.kill(node.hello["pid"], signal.SIGTERM)
    assert node.wait_for("error")["message"] == "its supervisor got SIGTERM there"
    assert wait_gone(*pids) < 0.5 + 2


def test_end_of_file_ends_the_job(node: LocalNode, script: ScriptWriter) -> None:
    """The launcher's end shows as end of file on stdin, and the grace begins then."""
    pids = _stubborn(node, script, grace_s=0.5)
    node.end_of_file()
    assert wait_gone(*pids) < 0.5 + 2
    assert node.process.wait(5) == 1


def test_end_of_file_is_seen_while_ranks_flood_and_nobody_reads(node: LocalNode, script: ScriptWriter) -> None:
    """Output that nobody takes does not hide that the launcher is gone. The node keeps it."""
    node.run(fake_torchrun(node, script(FLOOD)), grace_s=1)
    started = node.wait_for("started")["pid"]
    log = "ranks/*/attempt_0/0/stdout.log"
    wait_until(lambda: any(one.stat().st_size > 1 << 22 for one in node.job_dir.glob(log)), "the rank floods")
    node.end_of_file()
    wait_gone(started, node.hello["pid"])
    assert [one.stat().st_size > 1 << 22 for one in node.job_dir.glob(log)] == [True]


def test_a_broken_stdout_ends_the_job(node: LocalNode, script: ScriptWriter) -> None:
    """With nobody to hear it, the supervisor ends the job although it has nothing to say."""
    pids = _stubborn(node, script, grace_s=0.5)
    node.break_stdout()
    assert wait_gone(*pids) < 0.5 + 2


def test_missing_heartbeats_end_the_job(node: LocalNode, script: ScriptWriter) -> None:
    """As long as pings come the job runs; without them it ends after `lost_after_s`, and says why."""
    pids = _polite(node, script, lost_after_s=1.0)
    until = time.monotonic() + 2.5
    while time.monotonic() < until:  # the passing of time is what is tested here
        node.send("ping")
        node.read_until(lambda: node.frames[-1]["type"] == "pong", "a pong comes")
        node.frames.pop()
    assert all(map(is_alive, pids))
    assert wait_gone(*pids) < 1 + 3
    assert node.wait_for("error")["message"] == "nothing was heard there of gpulayer for 1 s"


def test_a_second_supervisor_sweeps_up_after_one_that_hangs(
    node: LocalNode, script: ScriptWriter, tmp_path: Path
) -> None:
    """A stopped supervisor is killed, its guard ends the job politely, and the sweep waits for all of it."""
    pids = _polite(node, script, grace_s=60)
    os.kill(node.hello["pid"], signal.SIGSTOP)
    with LocalNode(tmp_path) as second:
        second.send("sweep", marker=node.marker, grace_s=60)
        assert second.wait_for("swept") == {"type": "swept", "killed": 0, "survivors": []}
        assert not any(map(is_alive, pids))
        second.send("kill")
        assert second.finish() == {"type": "ended", "kept": "", "outputs": False}


def test_a_sweep_kills_what_will_not_go_and_its_keepers(node: LocalNode, script: ScriptWriter, tmp_path: Path) -> None:
    """When the grace is over, the ranks, the daemons without a marker, the guard and the supervisor are killed."""
    pids = _stubborn(node, script, grace_s=60)
    os.kill(node.guard_pid, signal.SIGSTOP)
    with LocalNode(tmp_path) as second:
        second.send("sweep", marker=node.marker, grace_s=0.5)
        swept = second.wait_for("swept")
        assert (swept["survivors"], [pid for pid in pids if is_alive(pid)]) == ([], [])


def test_a_sweep_finds_nothing_where_nothing_is(node: LocalNode) -> None:
    """A node on which the job has ended is reported clean at once, whatever the grace."""
    node.send("sweep", marker="0" * 32, grace_s=60)
    assert node.wait_for("swept", timeout_s=5) == {"type": "swept", "killed": 0, "survivors": []}
    node.send("kill")
    assert node.finish()["type"] == "ended"


def test_the_guard_holds_nothing_of_the_supervisor(node: LocalNode, script: ScriptWriter) -> None:
    """The guard keeps no pipe of the SSH session and no reserved port: the far end sees its supervisor die at once."""
    node.prepare([sys.executable, str(script(POLITE))], node_rank=0, master_port=free_port(), nproc_per_node=0)
    node.send("start")
    links = {str(fd.readlink()) for fd in Path(f"/proc/{node.guard_pid}/fd").iterdir()}
    files = {link for link in links if link.startswith("/")}
    assert files == {"/dev/null", f"{node.job_dir}/command.stdout.log", f"{node.job_dir}/command.stderr.log"}
    assert len(links - files) == 2  # the wake-up pipe, and the link to the supervisor
    os.kill(node.hello["pid"], signal.SIGKILL)
    node.finish()


def test_processes_are_known_by_a_name_of_their_own(node: LocalNode, script: ScriptWriter) -> None:
    """`ps` shows the supervisor and its guard by a name with the start of the marker in it, the command by its own."""
    pids = _polite(node, script)
    found = [processes.read_process(pid) for pid in pids]
    name = b"gpul-" + node.marker[:10].encode()
    assert [one.name == name for one in found if one] == [True, True, False, False]
