"""On the network: the jump host dies that nodes are reached through. They end their part by themselves."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest

from tests.support import endings
from tests.support.endings import assert_clean, block, outcomes
from tests.support.faults import LOST, LOST_BUT_CLEAN, STOPPED, SUCCEEDED, assert_lost, launch, wait_running
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.faults.conftest import Row
    from tests.support.cluster import Cluster
    from tests.support.host import Host

pytestmark = pytest.mark.ssh

BEHIND = "h[01-02]"
QUICK = ["--lost-after", "2", "--connect-timeout", "2"]
SILENT = "nothing was heard of it for 2 s"


@pytest.fixture(autouse=True)
def neighbours(cluster4: Cluster) -> Iterator[None]:
    """Processes on every host that must outlive the test."""
    with endings.bystanders(cluster4):
        yield


@pytest.fixture
def jump(cluster4: Cluster) -> Host:
    """A host that is no node of the job: h01 and h02 are reached through it, h00 is not."""
    (cluster4.login.home / ".ssh" / "config").write_text("Host h01 h02\n  ProxyJump h03\n")
    return cluster4.hosts[3]


def _nodes(cluster: Cluster) -> list[Host]:
    return cluster.hosts[:3]


@pytest.mark.fault("the jump host loses power, for good")
@pytest.mark.slow
def test_the_jump_host_dies(cluster4: Cluster, jump: Host, row: Row) -> None:
    """The nodes behind it end by themselves. The last block names both, and how to look when there is a way again."""
    nodes = _nodes(cluster4)
    live, _ = launch(cluster4, [*QUICK, "--grace", "1"], hosts=nodes)
    with live:
        watched = wait_running(cluster4, live, nodes)
        row.begins()
        jump.crash()
        row.clean(watched.wait_gone())
        done = live.finish()
    row.says(assert_lost(done, [STOPPED, LOST, LOST], SILENT, lost=BEHIND, stopped="h00"))
    said = block(done.stderr)
    assert "; could not be verified, its supervisor ends its part by itself within 3 s\n" in said
    assert f"  hint: `gpulayer kill {done.receipt['job_id']} -w {BEHIND} -H " in said
    assert_clean(cluster4, kept_on=nodes[1:])


@pytest.mark.fault("the jump host loses power, and is back in time")
def test_the_jump_host_is_back(cluster4: Cluster, jump: Host, row: Row) -> None:
    """The nodes behind it stay lost, and are verified clean through it."""
    nodes = _nodes(cluster4)
    live, _ = launch(cluster4, [*QUICK, "--grace", "4"], hosts=nodes)
    with live:
        watched = wait_running(cluster4, live, nodes)
        row.begins()
        jump.crash()
        live.wait_for_event("node_lost", node_rank=1)
        jump.heal()
        row.clean(watched.wait_gone())
        done = live.finish()
    row.says(assert_lost(done, [STOPPED, LOST_BUT_CLEAN, LOST_BUT_CLEAN], SILENT, lost=BEHIND, stopped="h00"))
    assert "gpulayer kill" not in done.stderr
    assert_clean(cluster4, kept_on=nodes[1:])


@pytest.mark.fault("the connection to the jump host hangs")
@pytest.mark.nft
@pytest.mark.slow
def test_a_connection_to_the_jump_host_hangs(cluster4: Cluster, jump: Host, row: Row) -> None:
    """As when a firewall forgets it: neither end is told, and new ones work. The nodes are verified over a new one."""
    nodes = _nodes(cluster4)
    live, _ = launch(cluster4, [*QUICK, "--grace", "6"], hosts=nodes)
    with live:
        watched = wait_running(cluster4, live, nodes)
        row.begins()
        _forget_connections(jump)
        row.clean(watched.wait_gone())
        done = live.finish()
    row.says(assert_lost(done, [STOPPED, LOST_BUT_CLEAN, LOST_BUT_CLEAN], SILENT, lost=BEHIND, stopped="h00"))
    assert_clean(cluster4, kept_on=nodes[1:])


def _forget_connections(host: Host) -> None:
    """Drop what belongs to SSH connections to this host that are there now; new ones are let through."""
    lines = host.run(["ss", "-Htn", "state", "established", "sport", "=", ":22"]).stdout.splitlines()
    ports = ", ".join(sorted(line.split()[3].rpartition(":")[2] for line in lines))
    host.firewall(
        f"input tcp dport 22 tcp sport {{ {ports} }} drop", f"output tcp sport 22 tcp dport {{ {ports} }} drop"
    )


@pytest.mark.fault("the jump host's sshd killed with its sessions, and started again")
def test_the_sshd_of_the_jump_host_is_restarted(cluster4: Cluster, jump: Host, row: Row) -> None:
    """What goes through it ends at once, and so do the nodes behind it; they are verified over a new connection."""
    nodes = _nodes(cluster4)
    live, _ = launch(cluster4, [*QUICK, "--grace", "1"], hosts=nodes)
    with live:
        watched = wait_running(cluster4, live, nodes)
        row.begins()
        jump.restart_sshd(drop_sessions=True)
        row.clean(watched.wait_gone())
        done = live.finish()
    row.says(assert_lost(done, [STOPPED, LOST_BUT_CLEAN, LOST_BUT_CLEAN], "", lost=BEHIND, stopped="h00"))
    assert_clean(cluster4, kept_on=nodes[1:])


@pytest.mark.fault("the jump host cut and healed within --lost-after")
def test_the_jump_host_is_away_for_a_moment(cluster4: Cluster, jump: Host, row: Row) -> None:
    """Nobody is lost, and the job goes on."""
    source = endings.BEGIN + "note(f'ready{rank}')\nwait_for('go')\nprint('done', rank)\n"
    live, folder = launch(cluster4, ["--lost-after", "10"], source, hosts=_nodes(cluster4))
    with live:
        endings.wait_ready(folder, 3)
        jump.cut()
        cut_at = time.monotonic()
        wait_until(lambda: time.monotonic() - cut_at > 2, "it is away for a while")
        jump.heal()
        (folder / "go").touch()
        row.begins()
        done = live.finish()
    row.clean()
    assert_clean(cluster4)
    assert done.returncode == 0, done.stderr
    assert outcomes(done.receipt) == [SUCCEEDED] * 3
    assert [done.log(rank, rank) for rank in range(3)] == [f"done {rank}\n".encode() for rank in range(3)]
    row.says("exit 0; the job goes on")
