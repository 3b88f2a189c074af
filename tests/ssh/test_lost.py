"""A launcher, a supervisor, a connection, a cable or a host gone: the job ends everywhere, by itself if need be."""

from __future__ import annotations

import os
import re
import signal
import time
from typing import TYPE_CHECKING

import pytest

from tests.support import endings, jobs
from tests.support.endings import Watched, assert_clean, block, outcomes
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.support.cluster import Cluster
    from tests.support.jobs import Finished, LiveRun

pytestmark = pytest.mark.ssh

STOPPED = ("stopped", True)
LOST_BUT_CLEAN = ("lost", True)
LOST = ("lost", False)
CUT = 1  # the node that something happens to


@pytest.fixture(autouse=True)
def neighbours(cluster4: Cluster) -> Iterator[None]:
    """Processes on every host that must outlive the test."""
    with endings.bystanders(cluster4):
        yield


def _launch(
    cluster: Cluster, options: list[str], source: str = endings.STUBBORN, *, user: str = "root"
) -> tuple[LiveRun, Path]:
    folder = cluster.new_folder("out")
    hosts_file = jobs.map_with_fake_torch(cluster, env={"OUT": str(folder), "SECRETIVE": "1"})
    login = cluster.login if user == "root" else cluster.walker
    return jobs.launch(login, hosts_file, options, jobs.write_script(cluster, source)), folder


def _wait_running(cluster: Cluster, live: LiveRun, daemons: int = 8) -> None:
    live.wait_for_event("stage_reached", stage="running")
    endings.wait_stubborn(cluster, daemons).close()


def _assert_lost(done: Finished, nodes: list[tuple[str, bool]], reason: str) -> None:
    """The first cause is that node CUT was lost, for this reason; every node fared as expected."""
    assert done.returncode == done.receipt["exit_code"] == 4
    assert outcomes(done.receipt) == nodes
    cause = done.receipt["cause"]
    assert (cause["kind"], cause["node_rank"], cause["node_id"], cause["rank"]) == ("lost", 1, "h01", None)
    said = block(done.stderr)
    assert re.search(rf"  first: node 1 \(h01\) was lost: .*{reason}.*, [\d.]+ s into the job\n", said)
    assert "  h[00,02-03]: stopped by gpulayer; verified clean\n" in said
    assert re.search(rf"  h01: lost: .*{reason}", said)
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("user", ["root", "walker"])
def test_sigkill_to_gpulayer(cluster4: Cluster, user: str) -> None:
    """Every host ends its part by itself within 3 s (grace 1 s), daemons with an empty environment included."""
    live, _ = _launch(cluster4, ["--grace", "1"], user=user)
    with live:
        _wait_running(cluster4, live)
        watched = Watched.of(cluster4)
        killed_at = time.monotonic()
        live.process.kill()
        gone_at = watched.wait_gone()
        assert live.finish().returncode == -signal.SIGKILL
    assert_clean(cluster4, kept_on=cluster4.hosts)
    print(f"gpulayer killed, {user}: gone {gone_at - killed_at:.3f} s after it")
    assert gone_at - killed_at < 3


@pytest.mark.parametrize("user", ["root", "walker"])
def test_sigkill_to_a_supervisor(cluster4: Cluster, user: str) -> None:
    """The guard cleans its node, the job fails, and a second connection verifies that the node is clean."""
    live, _ = _launch(cluster4, ["--grace", "1"], user=user)
    with live:
        _wait_running(cluster4, live)
        watched = Watched.of(cluster4)
        killed_at = time.monotonic()
        os.kill(endings.supervisor_of(live, cluster4, CUT), signal.SIGKILL)
        gone_at = watched.wait_gone()
        done = live.finish()
    assert_clean(cluster4, kept_on=[cluster4.hosts[CUT]])
    print(f"supervisor killed, {user}: gone {gone_at - killed_at:.3f} s after it")
    _assert_lost(done, [STOPPED, LOST_BUT_CLEAN, STOPPED, STOPPED], r"its supervisor died \(signal KILL\)")
    assert [event["node_rank"] for event in done.named("node_swept")].count(CUT) == 1
    assert cluster4.hosts[CUT].sshd_log.read_text().count("Accepted publickey") >= 2


def test_sigstop_to_a_supervisor(cluster4: Cluster) -> None:
    """It is lost after --lost-after; the second connection ends the stopped supervisor and all that was its."""
    live, _ = _launch(cluster4, ["--grace", "1", "--lost-after", "2"])
    with live:
        _wait_running(cluster4, live)
        stopped_s = time.monotonic()
        go_on = endings.stop_process(endings.supervisor_of(live, cluster4, CUT))
        try:
            done = live.finish()
        finally:
            go_on()
    took_s = time.monotonic() - stopped_s
    assert_clean(cluster4, kept_on=[cluster4.hosts[CUT]])
    print(f"supervisor stopped: all over {took_s:.3f} s after it")
    _assert_lost(done, [STOPPED, LOST_BUT_CLEAN, STOPPED, STOPPED], "nothing was heard of it for 2 s")


def test_a_cable_is_cut(cluster4: Cluster) -> None:
    """The job fails within --lost-after, the others end at once, the cut host by itself; healing changes nothing."""
    cut = cluster4.hosts[CUT]
    others = [host for host in cluster4.hosts if host is not cut]
    live, _ = _launch(cluster4, ["--grace", "1", "--lost-after", "2", "--connect-timeout", "1"])
    with live:
        _wait_running(cluster4, live)
        here, there = Watched.of(cluster4, [cut]), Watched.of(cluster4, others)
        cut_at = time.monotonic()
        cut.cut()
        others_gone_at = there.wait_gone()
        cut_gone_at = here.wait_gone()
        done = live.finish()
    print(f"cable cut: others gone {others_gone_at - cut_at:.3f} s after it, the cut host {cut_gone_at - cut_at:.3f} s")
    assert_clean(cluster4, others)
    _assert_lost(done, [STOPPED, LOST, STOPPED, STOPPED], "nothing was heard of it for 2 s")
    assert "could not be verified, its supervisor ends its part by itself within 3 s\n" in block(done.stderr)
    lost_s = done.named("node_lost")[0]["t"]
    told_s = [event["t"] for event in done.named("node_stopping")]
    assert max(told_s) - lost_s < 0.5  # the others were told at once
    assert others_gone_at - cut_at < 2 + 1 + 1
    assert cut_gone_at - cut_at < 2 + 1 + 1
    cut.heal()
    assert_clean(cluster4, kept_on=[cut])
    hosts_file = jobs.map_with_fake_torch(cluster4)
    assert jobs.run(cluster4.login, hosts_file, [], jobs.write_script(cluster4, "")).returncode == 0
    assert_clean(cluster4)


def test_a_cable_that_is_healed_while_the_node_is_verified(cluster4: Cluster) -> None:
    """The node stays lost, and is verified clean once it can be reached."""
    cut = cluster4.hosts[CUT]
    live, _ = _launch(cluster4, ["--grace", "3", "--lost-after", "2"])
    with live:
        _wait_running(cluster4, live)
        cut.cut()
        live.wait_for_event("node_lost", node_rank=CUT)
        cut.heal()
        done = live.finish()
    assert_clean(cluster4, kept_on=[cut])
    _assert_lost(done, [STOPPED, LOST_BUT_CLEAN, STOPPED, STOPPED], "nothing was heard of it for 2 s")


def test_a_host_loses_power(cluster4: Cluster) -> None:
    """Exit 4, the others are clean, and the block says of the dead host what is known: it could not be looked at."""
    dead = cluster4.hosts[CUT]
    live, _ = _launch(cluster4, ["--grace", "1", "--lost-after", "2", "--connect-timeout", "1"])
    with live:
        _wait_running(cluster4, live)
        dead.crash()
        done = live.finish()
    assert_clean(cluster4)
    _assert_lost(done, [STOPPED, LOST, STOPPED, STOPPED], "nothing was heard of it for 2 s")


def test_a_connection_is_lost(cluster4: Cluster) -> None:
    """The end of one sshd session process is noticed at once; a new connection verifies that its node is clean."""
    host = cluster4.hosts[CUT]
    live, _ = _launch(cluster4, ["--grace", "1"])
    with live:
        _wait_running(cluster4, live)
        watched = Watched.of(cluster4)
        supervisor = endings.supervisor_of(live, cluster4, CUT)
        session = next(process.parent_pid for process in host.processes() if process.pid == supervisor)
        killed_at = time.monotonic()
        os.kill(session, signal.SIGKILL)
        gone_at = watched.wait_gone()
        done = live.finish()
    assert_clean(cluster4, kept_on=[cluster4.hosts[CUT]])
    print(f"connection lost: gone {gone_at - killed_at:.3f} s after it")
    _assert_lost(done, [STOPPED, LOST_BUT_CLEAN, STOPPED, STOPPED], "")
    assert gone_at - killed_at < 3


def test_sshd_is_restarted_while_a_job_runs(cluster4: Cluster) -> None:
    """The job lives on, and ends when its ranks do."""
    host = cluster4.hosts[CUT]
    source = endings.BEGIN + "note(f'ready{rank}')\nwait_for('go')\nprint('done', rank)\n"
    live, folder = _launch(cluster4, ["--lost-after", "2"], source)
    with live:
        endings.wait_ready(folder, 4)
        host.restart_sshd()
        heard = time.monotonic()
        wait_until(lambda: time.monotonic() - heard > 3, "longer than --lost-after has passed")
        assert live.process.poll() is None
        (folder / "go").touch()
        done = live.finish()
    assert_clean(cluster4)
    assert done.returncode == 0
    assert outcomes(done.receipt) == [("succeeded", True)] * 4
    assert [done.log(rank, rank) for rank in range(4)] == [f"done {rank}\n".encode() for rank in range(4)]
