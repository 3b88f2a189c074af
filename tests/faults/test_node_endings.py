"""On a node: what makes an end hard. A storm of forks, a process in state D, one of another user, a pid used again."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from typing import TYPE_CHECKING

import pytest

from tests.support import endings, jobs, procs, stuck
from tests.support.cluster import CHECKOUT
from tests.support.endings import Watched, assert_clean, block, outcomes
from tests.support.faults import FAILED, STOPPED, first_cause, launch, wait_ready
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.faults.conftest import Row
    from tests.support.cluster import Cluster

pytestmark = pytest.mark.ssh

# Told to end, a rank starts 40 processes, and a chain of them, each of which forks and exits at once, in a session of
# its own. A look at the process table may miss that one, so what tells of it is the time of OUT/beat. It is bounded.
STORM = (
    endings.BEGIN
    + """
import subprocess
CHAIN = 'f() { echo >$OUT/beat$RANK; [ $1 = 100000 ] || f $(($1 + 1)) & exit; }; f 0'

def storm(number, frame):
    for _ in range(40):
        subprocess.Popen(["sleep", "60"], start_new_session=True)
    subprocess.Popen(["/bin/sh", "-c", CHAIN], start_new_session=True)

signal.signal(signal.SIGTERM, storm)
note(f"ready{rank}")
while True:
    time.sleep(1000)
"""
)

# Rank 1 asks a file system for something; rank 0 fails once OUT/go is there.
STUCK = (
    endings.BEGIN
    + """
note(f"ready{rank}")
if rank == 1:
    os.stat(os.environ["STUCK"] + "/anything")
wait_for("go")
sys.exit(17)
"""
)

# Rank 0 starts a process of root's, by way of a program that may do so, then fails.
FOREIGN = (
    endings.BEGIN
    + """
import subprocess
subprocess.Popen([f"{out}/as-root", "--ruid", "0", "--", "sleep", "5432"], start_new_session=True)
wait_for("go")
sys.exit(17)
"""
)

# For each pid of sys.argv, once it is free: a process with this pid that is no job's. The kernel hands out the pid
# after the last one; other processes may come in between.
REUSE = f"""
import os, sys
for pid in map(int, sys.argv[1:]):
    while os.path.exists(f"/proc/{{pid}}"):
        pass
    got = 0
    while got != pid:
        with open("/proc/sys/kernel/ns_last_pid", "w") as last:
            last.write(str(pid - 1))
        got = os.fork()
        if got == 0:
            os.setsid()
            if os.getpid() != pid:
                os._exit(0)
            for fd in (1, 2):
                os.dup2(0, fd)
            os.execve("/bin/sleep", ["sleep", "{endings.NEIGHBOUR}"], {{}})
        if got != pid:
            os.waitpid(got, 0)
"""

# A process is seen, ends, and another gets its pid; then what was seen is to be killed, and in the end what is there.
# Says which of the two was hit.
MISTAKEN = """
import os, signal, subprocess, sys, time
from gpulayer.processes import read_process, signal_process
first, second = subprocess.Popen(["sleep", "1000"]), None
seen = read_process(first.pid)
first.kill()
first.wait()
time.sleep(0.05)  # start times are counted in hundredths of a second
while not second or second.pid != first.pid:
    if second:
        second.kill()
        second.wait()
    with open("/proc/sys/kernel/ns_last_pid", "w") as last:
        last.write(str(first.pid - 1))
    second = subprocess.Popen(["sleep", "1000"])
signal_process(seen, signal.SIGKILL)
time.sleep(0.2)
hit = second.poll() is not None
if not hit:
    signal_process(read_process(second.pid), signal.SIGKILL)
print(hit, -second.wait())
"""


@pytest.fixture(autouse=True)
def neighbours(cluster2: Cluster) -> Iterator[None]:
    """Processes on every host that must outlive the test."""
    with endings.bystanders(cluster2):
        yield


@pytest.mark.fault("a storm of forks during the kill")
def test_a_storm_of_forks_during_the_kill(cluster2: Cluster, row: Row) -> None:
    """Ranks that answer SIGTERM with processes faster than one can look are gone soon after the grace all the same."""
    live, folder = launch(cluster2, ["--grace", "1"], STORM)
    with live:
        wait_ready(live, folder, 2)
        live.interrupt()
        beats = [folder / "beat0", folder / "beat1"]
        wait_until(lambda: all(beat.exists() for beat in beats), "the storms have begun")
        row.begins()
        done = live.finish()
    ended_at = [beat.stat().st_mtime_ns for beat in beats]
    assert_clean(cluster2)
    row.clean()
    looked_at = time.monotonic()
    wait_until(lambda: time.monotonic() - looked_at > 0.3, "another would have come by now")
    assert [beat.stat().st_mtime_ns for beat in beats] == ended_at
    assert done.returncode == 130
    assert outcomes(done.receipt) == [STOPPED, STOPPED]
    row.says(first_cause(done))


@pytest.mark.fault("a process in uninterruptible sleep, state D")
@pytest.mark.slow
@pytest.mark.skipif(bool(stuck.cannot_be_made()), reason=stuck.cannot_be_made())
def test_a_process_in_uninterruptible_sleep(cluster2: Cluster, row: Row) -> None:
    """Exit 5 within a bounded time, and the block names node, pid, state and command of what SIGKILL did not end."""
    host = cluster2.hosts[1]
    with stuck.StuckFolder(host) as folder:
        live, out = launch(cluster2, ["--grace", "1"], STUCK, STUCK=folder.path)
        with live:
            wait_ready(live, out, 2)
            watched = Watched.of(cluster2)
            row.begins()
            (out / "go").touch()
            done = live.finish()
        (survivor,) = watched.alive()
        assert survivor.argv[-1].endswith("script.py")
        said = block(done.stderr)
    watched.wait_gone()
    assert_clean(cluster2)
    assert done.returncode == done.receipt["exit_code"] == 5
    assert outcomes(done.receipt) == [FAILED, ("stopped", False)]
    (named,) = done.receipt["nodes"][1]["survivors"]
    assert (named["pid"], named["state"]) == (survivor.pid_inside, "D")
    assert "  h01: stopped by gpulayer; something may still run there\n" in said
    assert f"    still there: pid {survivor.pid_inside}, state D, {' '.join(survivor.argv)}"[:190] in said
    assert "gpulayer kill" in said
    row.says(f"exit 5; `still there: pid {survivor.pid_inside}, state D, ...`, and the `gpulayer kill` line")


@pytest.mark.fault("a process of another user")
@pytest.mark.slow
def test_a_process_that_may_not_be_killed(cluster2: Cluster, row: Row) -> None:
    """A rank's child that is root's, where the job is walker's: exit 5, and the block names node, pid and command."""
    folder = cluster2.new_folder("out")
    shutil.copy(shutil.which("setpriv") or "setpriv", folder / "as-root")
    (folder / "as-root").chmod(0o4755)
    hosts_file = jobs.map_with_fake_torch(cluster2, hosts=cluster2.hosts[:1], env={"OUT": str(folder)})
    script = jobs.write_script(cluster2, FOREIGN)

    def roots() -> list[procs.Process]:
        found = cluster2.processes()
        return [process for process in found if process.argv == ("sleep", "5432") and process.uid == 0]

    with jobs.launch(cluster2.walker, hosts_file, ["--grace", "1"], script) as live:
        wait_until(lambda: len(roots()) == 1, "the process of root's runs", timeout_s=30)
        (survivor,) = roots()
        row.begins()
        (folder / "go").touch()
        done = live.finish()
    assert [process.pid for process in endings.running(cluster2)] == [survivor.pid]
    os.kill(survivor.pid, signal.SIGKILL)
    wait_until(lambda: not roots(), "it is gone")
    assert_clean(cluster2)
    assert done.returncode == done.receipt["exit_code"] == 5
    assert outcomes(done.receipt) == [("failed", False)]
    assert done.receipt["cause"]["code"] == 17
    (node,) = done.receipt["nodes"]
    assert node["survivors"] == [{"pid": survivor.pid_inside, "state": "S", "command": "sleep 5432"}]
    said = block(done.stderr)
    assert "  h00: failed: rank 0 exited with code 17; something may still run there\n" in said
    assert f"    still there: pid {survivor.pid_inside}, state S, sleep 5432\n" in said
    assert "gpulayer kill" in said
    row.says(f"exit 5; `still there: pid {survivor.pid_inside}, state S, sleep 5432`, and the `gpulayer kill` line")


@pytest.mark.fault("a pid that is used again")
def test_pids_of_a_dead_supervisor_guard_and_ranks_that_are_used_again(cluster2: Cluster, row: Row) -> None:
    """A node's part is killed and others get the very pids: the second login leaves them alone, and says clean."""
    host = cluster2.hosts[1]
    live, folder = launch(cluster2, ["--grace", "2"], endings.POLITE)
    with live:
        wait_ready(live, folder, 2)
        supervisor = endings.supervisor_of(live, cluster2, 1)
        doomed = [
            process for process in host.strays() if process.pid == supervisor or not endings.is_neighbour(process)
        ]
        assert len(doomed) == 4  # the supervisor, the guard, torchrun, the rank
        inside = [str(process.pid_inside) for process in doomed]
        host.stop_sshd()  # nobody looks before the pids are taken
        row.begins()
        for process in doomed:
            os.kill(process.pid, signal.SIGKILL)
        host.run([sys.executable, "-c", REUSE, *inside])
        others = {process.pid for process in host.processes() if str(process.pid_inside) in inside}
        assert len(others) == 4
        host.start_sshd()
        done = live.finish()
    assert {process.pid for process in host.processes() if endings.is_neighbour(process)} >= others
    row.clean()
    assert_clean(cluster2, kept_on=[host])
    assert done.returncode == 4
    assert outcomes(done.receipt) == [STOPPED, ("lost", True)]
    assert done.named("node_swept")[-1]["killed"] == 0
    row.says(first_cause(done))


@pytest.mark.fault("a pid that is used again between the look and the signal")
def test_a_signal_does_not_hit_who_got_the_pid_since(cluster2: Cluster, row: Row) -> None:
    """What is signalled is the process that was seen, known by its start time, and not the one that has its pid now."""
    done = cluster2.hosts[0].run([sys.executable, "-c", MISTAKEN], env={"PYTHONPATH": str(CHECKOUT)})
    assert done.stdout == f"False {int(signal.SIGKILL)}\n"
    row.says("nothing: the other process is not touched")
