"""A job ends what is its own and nothing else."""

from __future__ import annotations

import os
import signal
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support import endings, jobs
from tests.support.endings import assert_clean, outcomes
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.cluster import Cluster
    from tests.support.host import Host
    from tests.support.jobs import LiveRun

pytestmark = pytest.mark.ssh

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


@pytest.fixture(autouse=True)
def neighbours(cluster4: Cluster) -> Iterator[None]:
    """Processes on every host that must outlive the test."""
    with endings.bystanders(cluster4):
        yield


class _Job:
    """One of two jobs that run at once. `gpu` is the one device of each host that it has."""

    def __init__(
        self, cluster: Cluster, stack: ExitStack, hosts: list[Host], source: str, *options: str, gpu: int = 0
    ) -> None:
        self.folder = cluster.new_folder("out")
        variables = {"OUT": str(self.folder)}
        hosts_file = jobs.map_with_fake_torch(cluster, hosts=hosts, defaults={"gpus": [gpu]}, env=variables)
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
        other = _Job(cluster4, stack, second, WORK, "--master-port", "29600", gpu=1)
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
            jobs.map_with_fake_torch(cluster4, hosts=cluster4.hosts[:2], defaults={"gpus": [1]}),
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


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
