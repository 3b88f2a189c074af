"""A job ends what is its own and nothing else; what it cannot end it names; many jobs leave no trace."""

from __future__ import annotations

import os
import shutil
import signal
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support import endings, jobs, procs
from tests.support.endings import assert_clean, block, outcomes
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.cluster import Cluster
    from tests.support.host import Host
    from tests.support.jobs import LiveRun

pytestmark = pytest.mark.ssh

STOPPED = ("stopped", True)
FAILED = ("failed", True)
SUCCEEDED = ("succeeded", True)

# A daemon in a session of its own, then work until OUT/go is there; it goes well only if the daemon is still alive.
WORK = (
    endings.BEGIN
    + """
import subprocess
daemon = subprocess.Popen(["sleep", "2000"], start_new_session=True)
note(f"ready{rank}")
wait_for("go")
sys.exit(0 if daemon.poll() is None else 9)
"""
)

# Rank 0 starts a process of root's, by way of a program that may do so, then fails.
UNKILLABLE = (
    endings.BEGIN
    + """
import subprocess
subprocess.Popen([f"{out}/as-root", "--ruid", "0", "--", "sleep", "5432"], start_new_session=True)
wait_for("go")
sys.exit(17)
"""
)


@pytest.fixture(autouse=True)
def neighbours(cluster4: Cluster) -> Iterator[None]:
    """Processes on every host that must outlive the test."""
    with endings.bystanders(cluster4):
        yield


class _Job:
    """One of two jobs that run at once."""

    def __init__(self, cluster: Cluster, stack: ExitStack, hosts: list[Host], source: str, *options: str) -> None:
        self.folder = cluster.new_folder("out")
        hosts_file = jobs.map_with_fake_torch(cluster, hosts=hosts, env={"OUT": str(self.folder)})
        script = jobs.write_script(cluster, source)
        self.live: LiveRun = stack.enter_context(jobs.launch(cluster.login, hosts_file, [*options], script))
        self.size = len(hosts)
        self._cluster = cluster

    def processes(self) -> set[int]:
        """Everything that has its job id or descends from its supervisors, and those, once all its ranks are ready."""
        endings.wait_ready(self.folder, self.size)
        mark = f"\0GPULAYER_JOB_ID={self.live.run_dir.name}\0".encode()
        own = {process.pid for process in self._cluster.processes() if mark in process.environ}
        assert len(own) == 3 * self.size
        hosts = {record["node_rank"]: record for record in self.live.events() if record["event"] == "node_connected"}
        names = {host.name: host for host in self._cluster.hosts}
        for record in hosts.values():
            inside = record["supervisor_pid"]
            own |= {p.pid for p in names[record["hostname"]].processes() if p.pid_inside == inside}
        assert len(own) == 4 * self.size
        return own


@pytest.mark.parametrize("shared", [False, True], ids=["disjoint-nodes", "same-nodes"])
@pytest.mark.parametrize("ending", ["fails", "interrupted", "launcher-killed", "supervisor-killed"])
def test_one_of_two_jobs_ends(cluster4: Cluster, ending: str, shared: bool) -> None:
    """However one ends, every process of the other lives on, and that other one succeeds."""
    first, second = (cluster4.hosts[:2], cluster4.hosts[:2] if shared else cluster4.hosts[2:])
    with ExitStack() as stack:
        failing = WORK.replace('wait_for("go")', 'wait_for("fail")\nsys.exit(3)')
        doomed = _Job(cluster4, stack, first, failing, "--grace", "1")
        other = _Job(cluster4, stack, second, WORK, "--master-port", "29600")
        others = other.processes()
        doomed_pids = doomed.processes()
        if ending == "fails":
            (doomed.folder / "fail").touch()
        elif ending == "interrupted":
            doomed.live.interrupt()
        elif ending == "launcher-killed":
            doomed.live.process.kill()
        else:
            os.kill(endings.supervisor_of(doomed.live, cluster4, 0), signal.SIGKILL)
        ended = doomed.live.finish()
        wait_until(lambda: not any(_alive(pid) for pid in doomed_pids), "the one job is gone")
        assert all(_alive(pid) for pid in others)
        (other.folder / "go").touch()
        done = other.live.finish()
    expected = {"fails": 1, "interrupted": 130, "launcher-killed": -9, "supervisor-killed": 4}
    assert ended.returncode == expected[ending]
    assert done.returncode == 0
    assert outcomes(done.receipt) == [SUCCEEDED, SUCCEEDED]
    kept = {"launcher-killed": first, "supervisor-killed": first[:1]}.get(ending, [])
    assert_clean(cluster4, kept_on=kept)


def test_two_jobs_at_one_port(cluster4: Cluster) -> None:
    """The second one is refused before anything starts, with the way out; the first one goes on."""
    with ExitStack() as stack:
        job = _Job(cluster4, stack, cluster4.hosts[:2], WORK)
        own = job.processes()
        done = jobs.run(
            cluster4.login,
            jobs.map_with_fake_torch(cluster4, hosts=cluster4.hosts[:2]),
            ["--master-port", "29500"],
            jobs.write_script(cluster4, ""),
        )
        assert done.returncode == 3
        assert "h00: port 29500 is in use by another job of gpulayer" in done.stderr
        assert "--master-port" in done.stderr
        assert all(_alive(pid) for pid in own)
        (job.folder / "go").touch()
        assert job.live.finish().returncode == 0
    assert_clean(cluster4)


def test_a_process_that_cannot_be_killed(cluster4: Cluster) -> None:
    """A rank's child that is root's, where the job is walker's: exit 5, and the block names node, pid and command."""
    folder = cluster4.new_folder("out")
    shutil.copy(shutil.which("setpriv") or "setpriv", folder / "as-root")
    (folder / "as-root").chmod(0o4755)
    hosts_file = jobs.map_with_fake_torch(cluster4, hosts=cluster4.hosts[:2], env={"OUT": str(folder)})
    script = jobs.write_script(cluster4, UNKILLABLE)

    def roots() -> list[procs.Process]:
        found = cluster4.processes()
        return [process for process in found if process.argv == ("sleep", "5432") and process.uid == 0]

    with jobs.launch(cluster4.walker, hosts_file, ["--grace", "1", "-N", "1"], script) as live:
        wait_until(lambda: len(roots()) == 1, "the process of root's runs", timeout_s=30)
        (survivor,) = roots()
        (folder / "go").touch()
        done = live.finish()
    assert [process.pid for process in endings.running(cluster4)] == [survivor.pid]
    os.kill(survivor.pid, signal.SIGKILL)
    wait_until(lambda: not roots(), "it is gone")
    assert_clean(cluster4)
    assert done.returncode == done.receipt["exit_code"] == 5
    assert outcomes(done.receipt) == [("failed", False)]
    assert done.receipt["cause"]["code"] == 17
    (node,) = done.receipt["nodes"]
    assert node["survivors"] == [{"pid": survivor.pid_inside, "state": "S", "command": "sleep 5432"}]
    said = block(done.stderr)
    assert "  h00: failed: rank 0 exited with code 17; something may still run there\n" in said
    assert f"    still there: pid {survivor.pid_inside}, state S, sleep 5432\n" in said
    assert "    hint: on h00, `" in said


def test_ten_runs_leave_no_trace(cluster4: Cluster) -> None:
    """No process, namespace, mount, folder or socket is on the hosts or the login node that was not there before."""
    hosts_file = jobs.map_with_fake_torch(cluster4, hosts=cluster4.hosts[:2], defaults={"gpus": 2})
    good = jobs.write_script(cluster4, "print('hello')")
    bad = jobs.write_script(
        cluster4, "import os, sys, time\nif os.environ['RANK'] == '3': sys.exit(1)\ntime.sleep(100)"
    )
    before = [_traces(cluster4, host) for host in cluster4.hosts]
    for number in range(10):
        done = jobs.run(cluster4.login, hosts_file, ["--grace", "1"], bad if number % 2 else good)
        assert done.returncode == number % 2, done.stderr
    assert_clean(cluster4)
    wait_until(lambda: [_traces(cluster4, host) for host in cluster4.hosts] == before, "nothing is left", timeout_s=3)
    assert cluster4.login_processes() == []
    assert not list(Path("/tmp").glob(f"gpulayer-t{os.getpid()}-*"))


def _traces(cluster: Cluster, host: Host) -> dict[str, object]:
    """What a job could leave on a host: processes, files, mounts, shared memory, sockets."""
    files = host.run(["find", "/tmp", "/dev/shm", "/run", "/root", "/home"]).stdout.splitlines()
    sockets = host.run(["ss", "-tulnH"]).stdout.splitlines()
    mounts = host.path("/proc/1/mounts").read_text()
    return {
        "processes": sorted((process.pid, process.argv) for process in host.processes()),
        "files": [file for file in files if str(cluster.base) not in file],
        "sockets": sorted(sockets),
        "mounts": mounts,
        "shm": host.run(["ipcs", "-a"]).stdout,
    }


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
