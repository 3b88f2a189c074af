"""On a node: the machine, its sshd or its supervisor is gone, or stands still. The job ends everywhere."""

from __future__ import annotations

import os
import signal
import time
from typing import TYPE_CHECKING

import pytest

from tests.support import endings
from tests.support.endings import assert_clean, block, outcomes
from tests.support.faults import (
    HIT,
    LOST,
    LOST_BUT_CLEAN,
    STOPPED,
    SUCCEEDED,
    assert_lost,
    launch,
    wait_ready,
    wait_running,
)
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.faults.conftest import Row
    from tests.support.cluster import Cluster

pytestmark = pytest.mark.ssh

BY_ITSELF = "could not be verified, its supervisor ends its part by itself within 3 s\n"


@pytest.fixture(autouse=True)
def neighbours(cluster4: Cluster) -> Iterator[None]:
    """Processes on every host that must outlive the test."""
    with endings.bystanders(cluster4):
        yield


@pytest.mark.fault("a node is powered off")
@pytest.mark.slow
def test_a_host_loses_power(cluster4: Cluster, row: Row) -> None:
    """Exit 4, the others are clean, and the block says of the dead host what is known: it could not be looked at."""
    dead = cluster4.hosts[HIT]
    live, _ = launch(cluster4, ["--grace", "1", "--lost-after", "2", "--connect-timeout", "1"])
    with live:
        watched = wait_running(cluster4, live)
        row.begins()
        dead.crash()
        row.clean(watched.wait_gone())
        done = live.finish()
    assert_clean(cluster4)
    row.says(assert_lost(done, [STOPPED, LOST, STOPPED, STOPPED], "nothing was heard of it for 2 s"))
    assert BY_ITSELF in block(done.stderr)


@pytest.mark.fault("sshd restarted while a job runs")
def test_sshd_is_restarted_while_a_job_runs(cluster4: Cluster, row: Row) -> None:
    """The job lives on, and ends when its ranks do; somebody else can log in meanwhile."""
    host = cluster4.hosts[HIT]
    source = endings.BEGIN + "note(f'ready{rank}')\nwait_for('go')\nprint('done', rank)\n"
    live, folder = launch(cluster4, ["--lost-after", "2"], source)
    with live:
        wait_ready(live, folder, 4)
        host.restart_sshd()
        heard = time.monotonic()
        assert cluster4.login.run(["ssh", host.name, "hostname"], check=True).stdout == f"{host.name}\n"
        wait_until(lambda: time.monotonic() - heard > 2.5, "longer than --lost-after has passed")
        assert live.process.poll() is None
        (folder / "go").touch()
        row.begins()
        done = live.finish()
    assert_clean(cluster4)
    row.clean()
    assert done.returncode == 0
    assert outcomes(done.receipt) == [SUCCEEDED] * 4
    assert [done.log(rank, rank) for rank in range(4)] == [f"done {rank}\n".encode() for rank in range(4)]
    row.says("exit 0; the job goes on, and new connections work")


@pytest.mark.fault("sshd killed with its sessions, and started again")
def test_sshd_is_killed_with_its_sessions(cluster4: Cluster, row: Row) -> None:
    """The node's part ends by itself; a new connection, made as soon as sshd is back, verifies that it is clean."""
    host = cluster4.hosts[HIT]
    live, _ = launch(cluster4, ["--grace", "1"])
    with live:
        watched = wait_running(cluster4, live)
        row.begins()
        _kill_sshd(cluster4)
        row.clean(watched.wait_gone())
        live.wait_for_event("node_lost", node_rank=HIT)
        host.start_sshd()
        done = live.finish()
    assert_clean(cluster4, kept_on=[host])
    row.says(assert_lost(done, [STOPPED, LOST_BUT_CLEAN, STOPPED, STOPPED], "Connection lost"))
    assert [event["node_rank"] for event in done.named("node_swept")].count(HIT) == 1


@pytest.mark.fault("sshd killed with its sessions, for good")
@pytest.mark.slow
def test_sshd_is_killed_for_good(cluster4: Cluster, row: Row) -> None:
    """Nobody can log in any more, and the node's part ends by itself all the same; the block says by when."""
    live, _ = launch(cluster4, ["--grace", "1", "--lost-after", "2"])
    with live:
        watched = wait_running(cluster4, live)
        row.begins()
        _kill_sshd(cluster4)
        row.clean(watched.wait_gone())
        done = live.finish()
    assert_clean(cluster4, kept_on=[cluster4.hosts[HIT]])
    row.says(assert_lost(done, [STOPPED, LOST, STOPPED, STOPPED], "Connection lost"))
    assert BY_ITSELF in block(done.stderr)


def _kill_sshd(cluster: Cluster) -> None:
    """SIGKILL to every sshd of the host, the sessions' too."""
    for process in cluster.hosts[HIT].processes():
        if process.name.startswith("sshd"):
            os.kill(process.pid, signal.SIGKILL)


@pytest.mark.fault("supervisor SIGKILLed")
@pytest.mark.parametrize("user", ["root", pytest.param("walker", marks=pytest.mark.slow)])
def test_sigkill_to_a_supervisor(cluster4: Cluster, row: Row, user: str) -> None:
    """The guard cleans its node, the job fails, and a second connection verifies that the node is clean."""
    live, _ = launch(cluster4, ["--grace", "1"], user=user)
    with live:
        watched = wait_running(cluster4, live)
        row.begins()
        os.kill(endings.supervisor_of(live, cluster4, HIT), signal.SIGKILL)
        row.clean(watched.wait_gone())
        done = live.finish()
    assert_clean(cluster4, kept_on=[cluster4.hosts[HIT]])
    nodes = [STOPPED, LOST_BUT_CLEAN, STOPPED, STOPPED]
    row.says(assert_lost(done, nodes, r"its supervisor died \(signal KILL\)"))
    assert [event["node_rank"] for event in done.named("node_swept")].count(HIT) == 1
    assert cluster4.hosts[HIT].sshd_log.read_text().count("Accepted publickey") >= 2


@pytest.mark.fault("supervisor and guard SIGKILLed")
def test_sigkill_to_a_supervisor_and_its_guard(cluster4: Cluster, row: Row) -> None:
    """The kernel tells torchrun, and a second connection ends what is left: stubborn ranks, and marked daemons."""
    live, _ = launch(cluster4, ["--grace", "1"], secretive=False)
    with live:
        live.wait_for_event("stage_reached", stage="running")
        watched = endings.wait_stubborn(cluster4, daemons=4)
        supervisor = endings.supervisor_of(live, cluster4, HIT)
        guard = _guard(cluster4, supervisor)
        row.begins()
        for pid in (guard, supervisor):
            os.kill(pid, signal.SIGKILL)
        row.clean(watched.wait_gone())
        done = live.finish()
    assert_clean(cluster4, kept_on=[cluster4.hosts[HIT]])
    row.says(assert_lost(done, [STOPPED, LOST_BUT_CLEAN, STOPPED, STOPPED], "its "))


@pytest.mark.fault("supervisor SIGSTOPped")
def test_sigstop_to_a_supervisor(cluster4: Cluster, row: Row) -> None:
    """It is lost after --lost-after; the second connection ends the stopped supervisor and all that was its."""
    live, _ = launch(cluster4, ["--grace", "1", "--lost-after", "2"])
    with live:
        watched = wait_running(cluster4, live)
        row.begins()
        go_on = endings.stop_process(endings.supervisor_of(live, cluster4, HIT))
        try:
            row.clean(watched.wait_gone())
            done = live.finish()
        finally:
            go_on()
    assert_clean(cluster4, kept_on=[cluster4.hosts[HIT]])
    row.says(assert_lost(done, [STOPPED, LOST_BUT_CLEAN, STOPPED, STOPPED], "nothing was heard of it for 2 s"))


@pytest.mark.fault("supervisor SIGSTOPped, and nobody can log in")
@pytest.mark.slow
def test_a_stopped_supervisor_that_cannot_be_reached(cluster4: Cluster, row: Row) -> None:
    """Its guard hears nothing of it and ends its part, by when the block says."""
    live, _ = launch(cluster4, ["--grace", "1", "--lost-after", "2"])
    with live:
        watched = wait_running(cluster4, live)
        cluster4.hosts[HIT].stop_sshd()
        row.begins()
        go_on = endings.stop_process(endings.supervisor_of(live, cluster4, HIT))
        try:
            row.clean(watched.wait_gone())
            done = live.finish()
        finally:
            go_on()
    assert_clean(cluster4, kept_on=[cluster4.hosts[HIT]])
    row.says(assert_lost(done, [STOPPED, LOST, STOPPED, STOPPED], "nothing was heard of it for 2 s"))
    assert BY_ITSELF in block(done.stderr)


@pytest.mark.fault("guard SIGSTOPped")
@pytest.mark.slow
def test_sigstop_to_a_guard(cluster4: Cluster, row: Row) -> None:
    """When the job is to end, a guard that does nothing is replaced by its supervisor: bounded, and clean."""
    live, _ = launch(cluster4, ["--grace", "1"])
    with live:
        watched = wait_running(cluster4, live)
        go_on = endings.stop_process(_guard(cluster4, endings.supervisor_of(live, cluster4, HIT)))
        try:
            row.begins()
            live.interrupt()
            row.clean(watched.wait_gone())
            done = live.finish()
        finally:
            go_on()
    assert_clean(cluster4, kept_on=[cluster4.hosts[HIT]])
    assert done.returncode == 130
    assert outcomes(done.receipt) == [STOPPED, LOST_BUT_CLEAN, STOPPED, STOPPED]
    row.says("exit 130; `h01: lost: its guard process was killed there; verified clean`")
    assert "  h01: lost: its guard process was killed there; verified clean\n" in block(done.stderr)


def _guard(cluster: Cluster, supervisor: int) -> int:
    return next(process.pid for process in cluster.hosts[HIT].processes() if process.parent_pid == supervisor)
