"""On a node: a process of the job itself dies, stands still, resists or hides."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

import pytest

from tests.support import endings, memory
from tests.support.endings import Watched, assert_clean, block, outcomes
from tests.support.faults import FAILED, STOPPED, first_cause, launch, wait_ready

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.faults.conftest import Row
    from tests.support.cluster import Cluster
    from tests.support.jobs import Finished, LiveRun

pytestmark = pytest.mark.ssh

# Rank 1 waits for OUT/go, then does what HOW says; the others sleep.
FATAL = (
    endings.BEGIN
    + """
import ctypes, resource
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
note(f"ready{rank}")
if rank == 1:
    wait_for("go")
    note("failed")
    if os.environ["HOW"] == "segfault":
        ctypes.string_at(0)
    hoard = bytearray(1 << 29)
    print("there is room", len(hoard))
time.sleep(1000)
"""
)


@pytest.fixture(autouse=True)
def neighbours(cluster2: Cluster) -> Iterator[None]:
    """Processes on every host that must outlive the test."""
    with endings.bystanders(cluster2):
        yield


def _rank_pid(live: LiveRun, cluster: Cluster, rank: int) -> int:
    """The pid, seen from outside, of a rank; one rank on each host."""
    inside = live.wait_for_event("rank_started", rank=rank)["pid"]
    return next(process.pid for process in cluster.hosts[rank].processes() if process.pid_inside == inside)


def _assert_killed(done: Finished, name: str, number: int) -> str:
    assert done.returncode == done.receipt["exit_code"] == 1, done.stderr
    assert outcomes(done.receipt) == [STOPPED, FAILED]
    cause = done.receipt["cause"]
    assert (cause["node_rank"], cause["rank"]) == (1, None if name == "torchrun" else 1)
    assert (cause["kind"], cause["signal"]) == ("command" if name == "torchrun" else "rank", number)
    assert f"  first: {name} on node 1 (h01) was killed by {signal.Signals(number).name}" in block(done.stderr)
    assert "  h00: stopped by gpulayer; verified clean\n" in block(done.stderr)
    assert "Traceback" not in done.stderr
    return first_cause(done)


@pytest.mark.parametrize(
    "victim",
    [
        pytest.param("rank 1", marks=pytest.mark.fault("a worker SIGKILLed")),
        pytest.param("torchrun", marks=pytest.mark.fault("torchrun SIGKILLed")),
    ],
)
def test_a_killed_worker_and_a_killed_torchrun_are_told_apart(cluster2: Cluster, row: Row, victim: str) -> None:
    """SIGKILL to a worker is that rank's end, to torchrun the command's; what they leave behind is ended too."""
    live, folder = launch(cluster2, ["--grace", "1"])
    with live:
        wait_ready(live, folder, 2)
        started = {"rank 1": "rank_started", "torchrun": "command_started"}[victim]
        inside = live.wait_for_event(started, node_rank=1)["pid"]
        watched = endings.wait_stubborn(cluster2, daemons=4)
        row.begins()
        cluster2.hosts[1].run(["kill", "-9", str(inside)])
        row.clean(watched.wait_gone())
        done = live.finish()
    assert_clean(cluster2)
    row.says(_assert_killed(done, victim, signal.SIGKILL))


@pytest.mark.fault("a worker's SIGSEGV")
def test_a_segmentation_fault(cluster2: Cluster, row: Row) -> None:
    """A rank that reads address 0 fails the job, by the name of the signal."""
    live, folder = launch(cluster2, ["--grace", "1"], FATAL, HOW="segfault")
    with live:
        wait_ready(live, folder, 2)
        watched = Watched.of(cluster2)
        row.begins()
        (folder / "go").touch()
        row.clean(watched.wait_gone())
        done = live.finish()
    assert_clean(cluster2)
    row.says(_assert_killed(done, "rank 1", signal.SIGSEGV))


@pytest.mark.fault("a worker out of memory")
def test_out_of_memory(cluster2: Cluster, row: Row) -> None:
    """The kernel kills a rank that takes more memory than its control group may have; that is the rank's end."""
    if reason := memory.cannot_be_limited():
        pytest.skip(reason)
    live, folder = launch(cluster2, ["--grace", "1"], FATAL, HOW="hoard")
    with live, memory.limited_memory(64 << 20) as put_under_limit:
        wait_ready(live, folder, 2)
        watched = Watched.of(cluster2)
        put_under_limit(_rank_pid(live, cluster2, 1))
        row.begins()
        (folder / "go").touch()
        row.clean(watched.wait_gone())
        done = live.finish()
    assert_clean(cluster2)
    row.says(_assert_killed(done, "rank 1", signal.SIGKILL))
    assert b"there is room" not in done.log(1, 1)


@pytest.mark.fault("a worker SIGSTOPped")
def test_a_stopped_worker_ends_with_the_others(cluster2: Cluster, row: Row) -> None:
    """A rank that stands still is no failure; when another fails, it goes with the grace deaf as it is."""
    source = endings.POLITE.replace("time.sleep(1000)", "if rank == 0:\n    wait_for('go')\n    sys.exit(17)\n") + (
        "time.sleep(1000)\n"
    )
    live, folder = launch(cluster2, ["--grace", "1"], source)
    with live:
        wait_ready(live, folder, 2)
        watched = Watched.of(cluster2)
        os.kill(_rank_pid(live, cluster2, 1), signal.SIGSTOP)
        row.begins()
        (folder / "go").touch()
        row.clean(watched.wait_gone())
        done = live.finish()
    assert_clean(cluster2)
    assert done.returncode == 1
    assert outcomes(done.receipt) == [FAILED, STOPPED]
    assert done.receipt["cause"]["code"] == 17
    assert done.receipt["nodes"][1]["ranks"][0]["signal"] == signal.SIGKILL
    row.says(first_cause(done))


@pytest.mark.fault("a worker that ignores SIGTERM")
@pytest.mark.fault("double-forked daemons, one with an empty environment")
@pytest.mark.parametrize("user", ["root", pytest.param("walker", marks=pytest.mark.slow)])
def test_stubborn_silent_workers_and_their_daemons_are_gone_after_the_grace(
    cluster2: Cluster, row: Row, user: str
) -> None:
    """SIGTERM ignored, daemons in sessions of their own, one with an empty environment: clean soon after the grace."""
    login = cluster2.login if user == "root" else cluster2.walker
    live, folder = launch(cluster2, ["--grace", "2"], user=user, FAILS="1")
    with live:
        watched = endings.wait_stubborn(cluster2, daemons=4)
        assert {process.uid for process in watched.processes.values()} == {login.user.uid}
        wait_ready(live, folder, 2)
        row.begins()
        (folder / "go").touch()
        gone_at = watched.wait_gone()
        row.clean(gone_at)
        done = live.finish()
    assert_clean(cluster2)
    assert gone_at - endings.noted(folder, "failed") < 2 + 4
    assert done.returncode == done.receipt["exit_code"] == 1
    assert outcomes(done.receipt) == [STOPPED, FAILED]
    assert [node["ranks"][0]["code"] for node in done.receipt["nodes"]] == [None, 17]
    assert "  first: rank 1 on node 1 (h01) exited with code 17" in block(done.stderr)
    assert "last lines" not in block(done.stderr)
    assert done.stdout == ""
    row.says(first_cause(done))
