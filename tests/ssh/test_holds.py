"""Two jobs never share a node, also where they come from two login nodes, which do not see each other's records.

Another login node is here another folder of records.
"""

from __future__ import annotations

import itertools
import re
import signal
from typing import TYPE_CHECKING

import pytest

from tests.support.endings import BEGIN, assert_clean, wait_ready
from tests.support.jobs import GPULAYER, LiveRun, launch, map_with_fake_torch, write_script
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from tests.support.cluster import Cluster, TomlValue

pytestmark = pytest.mark.ssh

# Every rank goes on until OUT/go is there.
UNTIL_GO = BEGIN + "\nnote(f'ready{rank}')\nwait_for('go')\n"
# Told to end, every rank takes all the time that it has.
SLOW_TO_END = BEGIN + "\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nnote(f'ready{rank}')\ntime.sleep(1000)\n"


class Logins:
    """Jobs from one login node after another, each from one of its own. `out` is what their scripts share."""

    def __init__(self, cluster: Cluster, first_port: int = 29500) -> None:
        self.out = cluster.new_folder("out")
        self._cluster = cluster
        self._numbers = itertools.count(first_port - 29500)

    def start(
        self,
        source: str,
        *options: str,
        nodes: dict[str, dict[str, TomlValue]] | None = None,
        gpus: TomlValue = 1,
    ) -> LiveRun:
        """Start a job on all hosts, with a port of its own. `gpus` is what the map says of each host."""
        cluster = self._cluster
        port = 29500 + next(self._numbers)
        hosts_file = map_with_fake_torch(cluster, env={"OUT": str(self.out)}, defaults={"gpus": gpus}, nodes=nodes)
        return launch(
            cluster.login,
            hosts_file,
            ["--no-preflight", "--nproc-per-node", "1", "--master-port", str(port), "--grace", "2", *options],
            write_script(cluster, source),
            env={"GPULAYER_LEASES": str(cluster.new_folder("leases"))},
        )

    def check(self, *options: str) -> tuple[int, str]:
        """Run `gpulayer check` on all hosts, and return its exit code and what it says is wrong."""
        hosts_file = map_with_fake_torch(self._cluster)
        done = self._cluster.login.run([*GPULAYER, "check", "-H", str(hosts_file), *options])
        return done.returncode, done.stdout + done.stderr


def first_to_end(one: LiveRun, other: LiveRun) -> tuple[LiveRun, LiveRun]:
    """Wait until either has ended; return that one first."""
    wait_until(
        lambda: one.process.poll() is not None or other.process.poll() is not None, "one has ended", timeout_s=60
    )
    return (other, one) if one.process.poll() is None else (one, other)


def held_by(run: LiveRun) -> str:
    """What is said of a node that this job has, as a pattern."""
    return rf"held by job {run.run_dir.name} of root on login since \d\d:\d\d:\d\d"


def test_a_second_job_is_refused(cluster2: Cluster) -> None:
    """It is told who has the nodes since when, and nothing is started; `check` says so too; the first one goes on."""
    logins = Logins(cluster2)
    with logins.start(UNTIL_GO) as first:
        wait_ready(logins.out, 2)
        with logins.start(UNTIL_GO) as second:
            refused = second.finish()
        code, checked = logins.check()
        (logins.out / "go").touch()
        assert first.finish().returncode == 0
    assert refused.returncode == 3
    assert re.match(
        "gpulayer: error: 2 of 2 nodes cannot take part, so nothing was started\n\n"
        rf"h\[00-01\]: {held_by(first)}\nhint: wait for it with `--wait`, or leave the node out ",
        refused.stderr,
    )
    assert [one["problem"] for one in refused.receipt["refused"]] == ["NodeHeldError"] * 2
    assert refused.named("command_started") == []
    assert code == 3
    assert re.search(rf"h\[00-01\]: {held_by(first)}\n", checked)
    assert_clean(cluster2)


@pytest.mark.parametrize("rounds", [1, pytest.param(10, marks=[pytest.mark.slow, pytest.mark.timeout(600)])])
def test_two_at_the_same_moment(cluster2: Cluster, rounds: int) -> None:
    """One gets all nodes and succeeds, the other none: exit 3, and nothing was started for it."""
    for _ in range(rounds):
        logins = Logins(cluster2)
        with logins.start(UNTIL_GO) as one, logins.start(UNTIL_GO) as other:
            loser, winner = first_to_end(one, other)
            refused = loser.finish()
            assert refused.returncode == 3, refused.stderr
            assert refused.named("command_started") == []
            assert re.search(held_by(winner), refused.stderr)
            wait_ready(logins.out, 2)
            (logins.out / "go").touch()
            done = winner.finish()
            assert done.returncode == 0, done.stderr
    assert_clean(cluster2)


def test_nodes_are_free_once_the_processes_are_gone(cluster2: Cluster) -> None:
    """The first launcher is killed: its nodes are held until they have ended its job, and no longer."""
    logins = Logins(cluster2)
    with logins.start(SLOW_TO_END, "--grace", "8") as first:
        wait_ready(logins.out, 2)
        first.process.send_signal(signal.SIGKILL)
        first.process.wait()
        with logins.start("print('at last')", "--wait", "60") as second:
            done = second.finish()
    assert done.returncode == 0, done.stderr
    assert re.search(rf"gpulayer: waiting for h\S*, {held_by(first)}", done.stderr)
    assert "gpulayer: all nodes are free now\n" in done.stderr
    assert [done.log(rank, rank) for rank in (0, 1)] == [b"at last\n"] * 2
    assert_clean(cluster2, kept_on=cluster2.hosts)


def test_a_wait_ends(cluster2: Cluster) -> None:
    """With the time that was given, or with Ctrl-C; the first job is not disturbed, and nothing was started."""
    logins = Logins(cluster2)
    with logins.start(UNTIL_GO) as first:
        wait_ready(logins.out, 2)
        with logins.start(UNTIL_GO, "--wait") as second:
            wait_until(lambda: "waiting for h[00-01], held by" in second.stderr_so_far, "it waits", timeout_s=30)
            second.interrupt()
            interrupted = second.finish()
        with logins.start(UNTIL_GO, "--wait", "2") as third:
            refused = third.finish()
        (logins.out / "go").touch()
        assert first.finish().returncode == 0
    assert (interrupted.returncode, interrupted.named("command_started")) == (130, [])
    assert (refused.returncode, refused.named("command_started")) == (3, [])
    assert re.search(
        rf"{held_by(first)}\nhint: wait longer for it with `--wait`, or leave the node out", refused.stderr
    )
    assert_clean(cluster2)


def test_two_parts_of_a_machine(cluster2: Cluster) -> None:
    """Jobs on other GPUs of the same hosts run side by side; a third one that wants all of a host is refused."""
    logins = Logins(cluster2)
    with logins.start(UNTIL_GO, gpus=[0, 1]) as first:
        wait_ready(logins.out, 2)
        second_login = Logins(cluster2, 29550)
        with second_login.start(UNTIL_GO, gpus=[2, 3]) as second:
            wait_ready(second_login.out, 2)
            with logins.start(UNTIL_GO) as third:
                refused = third.finish()
            (second_login.out / "go").touch()
            assert second.finish().returncode == 0
        (logins.out / "go").touch()
        assert first.finish().returncode == 0
    assert refused.returncode == 3
    both = rf"{held_by(first)}, GPUs 0, 1 and by {held_by(second)[8:]}, GPUs 2, 3"
    other_way = rf"{held_by(second)}, GPUs 2, 3 and by {held_by(first)[8:]}, GPUs 0, 1"
    assert re.search(rf"{both}|{other_way}", refused.stderr), refused.stderr
    assert_clean(cluster2)
