"""On the network: a cable is cut, at any stage, for good or for a while. The job ends on every side of it by itself."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support import endings, jobs, netns
from tests.support.endings import Watched, assert_clean, block, outcomes
from tests.support.faults import (
    FAILED,
    HIT,
    LOST,
    LOST_BUT_CLEAN,
    STOPPED,
    SUCCEEDED,
    assert_lost,
    first_cause,
    launch,
    wait_running,
)
from tests.support.preflight import assert_nothing_started, write_program
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.faults.conftest import Row
    from tests.support.cluster import Cluster
    from tests.support.host import Host
    from tests.support.jobs import Finished

pytestmark = pytest.mark.ssh

ESTABLISHED = "01"  # include/net/tcp_states.h, as /proc/net/tcp shows it
SILENT = "nothing was heard of it for 2 s"
BY_ITSELF = "could not be verified, its supervisor ends its part by itself within 3 s\n"
QUICK = ["--grace", "1", "--lost-after", "2", "--connect-timeout", "1"]
HANGS = "#!/bin/sh\nsleep 86398 &\nwait\n"

# Each rank counts aloud until it is told to end.
COUNT = (
    endings.BEGIN
    + """
note(f"ready{rank}")
count = 0
while not os.path.exists(f"{out}/go"):
    print(count)
    count += 1
    time.sleep(0.02)
note(f"count{rank}-{count}")
"""
)


@pytest.fixture(autouse=True)
def neighbours(cluster4: Cluster) -> Iterator[None]:
    """Processes on every host that must outlive the test."""
    with endings.bystanders(cluster4):
        yield


def _has_hint(done: Finished, nodes: str) -> bool:
    command = f"gpulayer kill {done.receipt['job_id']} -w {re.escape(nodes)} -H \\S+hosts.toml"
    return bool(re.search(f"  hint: `{command}` looks there again, and ends what is left\n", block(done.stderr)))


def _assert_refused(done: Finished, message: str) -> str:
    """The job is refused with exit code 3, for this reason on h01 alone. Returns what the user sees."""
    assert done.returncode == 3, done.stderr
    assert "gpulayer: error: " in done.stderr
    assert f"\nh01: {message}\n" in done.stderr
    assert done.named("command_started") == []
    assert "Traceback" not in done.stderr
    return f"exit 3; `h01: {message}`"


@pytest.mark.fault("one cable cut before connecting")
def test_a_cable_is_cut_before(cluster4: Cluster, row: Row) -> None:
    """The job is refused, the node is named, and nothing was started on the others."""
    cluster4.hosts[HIT].cut()
    live, _ = launch(cluster4, QUICK)
    with live:
        done = live.finish()
    assert_nothing_started(cluster4)
    assert_clean(cluster4)
    row.says(_assert_refused(done, "h01 port 22 did not answer within 1 s"))


@pytest.mark.fault("one cable cut while connecting")
def test_a_cable_is_cut_while_connecting(cluster4: Cluster, row: Row) -> None:
    """Cut when the connection is there and the login is not, the node is refused all the same."""
    cut = cluster4.hosts[HIT]
    listener = next(process.pid for process in cut.processes() if process.name.startswith("sshd"))
    go_on = endings.stop_process(listener)  # so that the login stands still
    try:
        live, _ = launch(cluster4, [*QUICK[:-1], "3"])
        with live:
            wait_until(lambda: _connections(cut) == 1, "the connection is there", timeout_s=30)
            cut.cut()
            done = live.finish()
    finally:
        go_on()
    assert_nothing_started(cluster4)
    assert_clean(cluster4)
    row.says(_assert_refused(done, "h01 port 22 accepts connections but sent no SSH greeting within 3 s"))


def _connections(host: Host) -> int:
    """How many connections there are to the host's sshd."""
    lines = Path(f"/proc/{host.processes()[0].pid}/net/tcp").read_text().splitlines()[1:]
    return len([line for line in lines if line.split()[1].endswith(":0016") and line.split()[3] == ESTABLISHED])


@pytest.mark.fault("one cable cut in preflight")
@pytest.mark.slow
def test_a_cable_is_cut_in_preflight(cluster4: Cluster, row: Row) -> None:
    """The node falls silent while it is checked: nothing is started, and what checks it goes by itself."""
    cut = cluster4.hosts[HIT]
    tools = cluster4.new_folder("bin")
    write_program(tools / "nvidia-smi", HANGS)
    path = f"{tools}:{netns.SYSTEM_PATH}"
    options = [*QUICK, "--preflight-timeout", "3"]
    live, _ = launch(cluster4, options, nodes={cut.name: {"env": {"PATH": path, "PYTHONPATH": str(jobs.FAKE_TORCH)}}})

    def checked() -> list[int]:
        return [process.pid for process in cut.processes() if process.argv == ("sleep", "86398")]

    with live:
        wait_until(lambda: bool(checked()), "the node is being checked", timeout_s=30)
        row.begins()
        cut.cut()
        done = live.finish()
    assert_clean(cluster4, [host for host in cluster4.hosts if host is not cut])
    row.says(_assert_refused(done, "no answer to the checks within 3 s"))
    wait_until(lambda: not [p for p in cut.strays() if not endings.is_neighbour(p)], "it is clean", timeout_s=80)
    row.clean()
    assert_nothing_started(cluster4)
    assert_clean(cluster4)


@pytest.mark.fault("one cable cut while running")
@pytest.mark.slow
def test_a_cable_is_cut(cluster4: Cluster, row: Row) -> None:
    """The job fails within --lost-after, the others end at once, the cut host by itself; healing changes nothing."""
    cut = cluster4.hosts[HIT]
    others = [host for host in cluster4.hosts if host is not cut]
    live, _ = launch(cluster4, QUICK)
    with live:
        wait_running(cluster4, live).close()
        here, there = Watched.of(cluster4, [cut]), Watched.of(cluster4, others)
        cut_at = time.monotonic()
        row.begins()
        cut.cut()
        others_gone_at = there.wait_gone()
        cut_gone_at = here.wait_gone()
        row.clean(max(others_gone_at, cut_gone_at))
        done = live.finish()
    assert_clean(cluster4, others)
    row.says(assert_lost(done, [STOPPED, LOST, STOPPED, STOPPED], SILENT))
    assert BY_ITSELF in block(done.stderr)
    assert _has_hint(done, "h01")
    lost_s = done.named("node_lost")[0]["t"]
    told_s = [event["t"] for event in done.named("node_stopping")]
    assert max(told_s) - lost_s < 0.5  # the others were told at once
    assert done.receipt["took_s"] - lost_s > 1 + 5  # the grace and 5 s: so long it tried to verify the node
    assert others_gone_at - cut_at < 2 + 1 + 3
    assert cut_gone_at - cut_at < 2 + 1 + 3
    cut.heal()
    assert_clean(cluster4, kept_on=[cut])
    hosts_file = jobs.map_with_fake_torch(cluster4)
    assert jobs.run(cluster4.login, hosts_file, [], jobs.write_script(cluster4, "")).returncode == 0
    assert_clean(cluster4)


@pytest.mark.fault("one cable cut while killing")
@pytest.mark.slow
def test_a_cable_is_cut_while_killing(cluster4: Cluster, row: Row) -> None:
    """The cut host has been told to end, and does; the failure that came first stays the cause, with exit code 1."""
    cut = cluster4.hosts[HIT]
    options = ["--grace", "2", "--lost-after", "2", "--connect-timeout", "1"]
    live, folder = launch(cluster4, options, FAILS="0")
    with live:
        watched = wait_running(cluster4, live)
        (folder / "go").touch()
        live.wait_for_event("node_stopping", node_rank=HIT)
        row.begins()
        cut.cut()
        row.clean(watched.wait_gone())
        done = live.finish()
    assert_clean(cluster4, [host for host in cluster4.hosts if host is not cut])
    assert done.returncode == 1
    assert outcomes(done.receipt) == [FAILED, LOST, STOPPED, STOPPED]
    assert (done.receipt["cause"]["kind"], done.receipt["cause"]["code"]) == ("rank", 17)
    said = block(done.stderr)
    assert f"  h01: lost: {SILENT}; could not be verified, its supervisor ends its part by itself within 4 s\n" in said
    assert _has_hint(done, "h01")
    row.says(f"{first_cause(done)}, and `h01: lost: {SILENT}`")
    cut.heal()
    assert_clean(cluster4, kept_on=[cut])


@pytest.mark.fault("one cable cut and healed within --lost-after")
def test_a_cable_is_cut_and_healed_within_the_limit(cluster4: Cluster, row: Row) -> None:
    """Nobody is lost, the job goes on, and all that was written meanwhile arrives."""
    cut = cluster4.hosts[HIT]
    live, folder = launch(cluster4, ["--lost-after", "10"], COUNT)
    with live:
        endings.wait_ready(folder, 4)
        live.wait_for_event("stage_reached", stage="running")
        cut.cut()
        cut_at = time.monotonic()
        wait_until(lambda: time.monotonic() - cut_at > 2, "the cable is out for a while")
        cut.heal()
        (folder / "go").touch()
        row.begins()
        done = live.finish()
    row.clean()
    assert_clean(cluster4)
    assert done.returncode == 0, done.stderr
    assert outcomes(done.receipt) == [SUCCEEDED] * 4
    assert done.named("node_lost") == []
    for rank in range(4):
        (noted,) = folder.glob(f"count{rank}-*")
        count = int(noted.name.partition("-")[2])
        assert done.log(rank, rank) == b"".join(b"%d\n" % number for number in range(count))
    row.says("exit 0; the job goes on")


@pytest.mark.fault("one cable cut and healed after --lost-after")
def test_a_cable_that_is_healed_while_the_node_is_verified(cluster4: Cluster, row: Row) -> None:
    """The node stays lost, and is verified clean once it can be reached."""
    cut = cluster4.hosts[HIT]
    live, _ = launch(cluster4, ["--grace", "3", "--lost-after", "2"])
    with live:
        watched = wait_running(cluster4, live)
        row.begins()
        cut.cut()
        live.wait_for_event("node_lost", node_rank=HIT)
        cut.heal()
        row.clean(watched.wait_gone())
        done = live.finish()
    assert_clean(cluster4, kept_on=[cut])
    row.says(assert_lost(done, [STOPPED, LOST_BUT_CLEAN, STOPPED, STOPPED], SILENT))
    assert "gpulayer kill" not in done.stderr


@pytest.mark.fault("half the cluster cut")
@pytest.mark.slow
@pytest.mark.parametrize("half", [(0, 1), (2, 3)], ids=["with the head", "without the head"])
def test_half_the_cluster_is_cut(cluster4: Cluster, row: Row, half: tuple[int, int]) -> None:
    """Both halves end, the one that is cut off by itself; the block names its hosts together."""
    cut = [cluster4.hosts[index] for index in half]
    others = [host for host in cluster4.hosts if host not in cut]
    live, _ = launch(cluster4, QUICK)
    with live:
        watched = wait_running(cluster4, live)
        row.begins()
        for host in cut:
            host.cut()
        row.clean(watched.wait_gone())
        done = live.finish()
    assert_clean(cluster4, others)
    nodes = [LOST if host in cut else STOPPED for host in cluster4.hosts]
    names, rest = ("h[00-01]", "h[02-03]") if 0 in half else ("h[02-03]", "h[00-01]")
    row.says(assert_lost(done, nodes, SILENT, lost=names, stopped=rest))
    assert _has_hint(done, names)
    for host in cut:
        host.heal()
    assert_clean(cluster4, kept_on=cut)


@pytest.mark.fault("one SSH connection ended")
def test_a_connection_is_lost(cluster4: Cluster, row: Row) -> None:
    """The end of one sshd session process is noticed at once; a new connection verifies that its node is clean."""
    host = cluster4.hosts[HIT]
    live, _ = launch(cluster4, ["--grace", "1"])
    with live:
        watched = wait_running(cluster4, live)
        supervisor = endings.supervisor_of(live, cluster4, HIT)
        session = next(process.parent_pid for process in host.processes() if process.pid == supervisor)
        killed_at = time.monotonic()
        row.begins()
        os.kill(session, signal.SIGKILL)
        gone_at = watched.wait_gone()
        row.clean(gone_at)
        done = live.finish()
    assert_clean(cluster4, kept_on=[host])
    row.says(assert_lost(done, [STOPPED, LOST_BUT_CLEAN, STOPPED, STOPPED], ""))
    assert gone_at - killed_at < 5
