"""Leases between whole jobs on the cluster: nodes refused, passed over, shared by GPUs, waited for; several users."""

from __future__ import annotations

import json
import re
import signal
from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest

from tests.support import endings, jobs
from tests.support.endings import assert_clean, outcomes
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.cluster import Cluster, LoginNode
    from tests.support.jobs import LiveRun

pytestmark = pytest.mark.ssh

SUCCEEDED = ("succeeded", True)
SINCE = r"\d\d:\d\d:\d\d"
# Each rank says that it is there, and ends once OUT/go is.
UNTIL_GO = endings.BEGIN + 'note(f"ready{rank}")\nwait_for("go")\n'


class _Job:
    """A job that goes on until it is told to end."""

    def __init__(
        self,
        cluster: Cluster,
        stack: ExitStack,
        *options: str,
        login: LoginNode | None = None,
        map_: Path | None = None,
    ) -> None:
        self.folder = cluster.new_folder("out")
        hosts_file = map_ or jobs.map_with_fake_torch(cluster)
        words = ["--grace", "1", "-e", f"OUT={self.folder}", *options]
        script = jobs.write_script(cluster, UNTIL_GO)
        self.live: LiveRun = stack.enter_context(jobs.launch(login or cluster.login, hosts_file, words, script))
        self.id = self.live.run_dir.name

    def wait_ready(self, ranks: int) -> None:
        """Wait until these many of its ranks run."""
        endings.wait_ready(self.folder, ranks)

    def wait_said(self, text: str) -> None:
        """Wait until it has said this."""
        wait_until(lambda: text in self.live.stderr_so_far, f"it says {text!r}", timeout_s=30)

    def end(self) -> list[tuple[str, bool]]:
        """Let it end well; return what became of its nodes."""
        (self.folder / "go").touch()
        done = self.live.finish()
        assert done.returncode == 0, done.stderr
        return outcomes(done.receipt)


def _records(cluster: Cluster) -> list[str]:
    return sorted(path.name.partition(".")[0] for path in cluster.leases.glob("*.json"))


def _nodes(live: LiveRun) -> list[str]:
    plan = json.loads((live.run_dir / "plan.json").read_text())
    return [node["node_id"] for node in plan["nodes"]]


def _run(cluster: Cluster, *options: str, login: LoginNode | None = None) -> jobs.Finished:
    script = jobs.write_script(cluster, "print('hello')")
    return jobs.run(login or cluster.login, jobs.map_with_fake_torch(cluster), [*options], script)


def test_a_second_job_is_refused_or_draws_what_is_free(cluster4: Cluster) -> None:
    """Nothing of a job that wants held nodes is started, and it is told who has them; one that asks for less runs."""
    with ExitStack() as stack:
        first = _Job(cluster4, stack, "-N", "2")
        first.wait_ready(2)
        refused = _run(cluster4)
        assert refused.returncode == 3
        assert re.fullmatch(
            r"gpulayer: error: asked for 4 nodes, 2 are free: h\[02-03\]; "
            rf"h\[00-01\] are held by job {first.id} of root on login since {SINCE}\n\n"
            r"hint: wait for them with `--wait`, or ask for fewer with `--nnodes`\n",
            refused.stderr,
        )
        assert not refused.run_dir.exists()
        second = _Job(cluster4, stack, "-N", "2")
        second.wait_ready(2)
        assert _nodes(second.live) == ["h02", "h03"]
        assert _records(cluster4) == sorted([first.id, second.id])
        table = cluster4.login.run([*jobs.GPULAYER, "hosts", "-H", str(jobs.map_with_fake_torch(cluster4))]).stdout
        states = [re.split(" {2,}", line)[1] for line in table.splitlines()[1:]]
        held = [rf"held by {job.id} \(root@login, since \d\d:\d\d\)" for job in (first, first, second, second)]
        assert all(re.fullmatch(*pair) for pair in zip(held, states, strict=True)), table
        assert [first.end(), second.end()] == [[SUCCEEDED, SUCCEEDED]] * 2
    assert _records(cluster4) == []
    assert_clean(cluster4)


def test_two_parts_of_one_machine_run_at_once(cluster2: Cluster) -> None:
    """Entries of one machine whose lists of GPUs share none are two nodes; the same part is not drawn twice."""
    parts = "".join(
        f'[nodes.{name}]\nssh = "h00"\naddress = "{cluster2.hosts[0].address}"\ngpus = [{gpu}]\n'
        for name, gpu in (("left", 0), ("right", 1))
    )
    map_ = jobs.map_with_fake_torch(cluster2, hosts=[])
    map_.write_text(map_.read_text() + "\n" + parts)
    with ExitStack() as stack:
        left = _Job(cluster2, stack, "-w", "left", map_=map_)
        left.wait_ready(1)
        again = jobs.run(cluster2.login, map_, ["-w", "left"], jobs.write_script(cluster2, ""))
        assert again.returncode == 3
        assert f"; left is held by job {left.id} of root on login since " in again.stderr
        right = _Job(cluster2, stack, "-N", "1", map_=map_)
        right.wait_ready(1)
        assert _nodes(right.live) == ["right"]
        assert [left.end(), right.end()] == [[SUCCEEDED], [SUCCEEDED]]
    assert_clean(cluster2)


def test_waiting_jobs_run_in_order_of_arrival(cluster2: Cluster) -> None:
    """Each gets the nodes when the one before it ends, and starts nothing before; who does not wait comes last."""
    with ExitStack() as stack:
        first = _Job(cluster2, stack)
        first.wait_ready(2)
        waiters = []
        for number in range(2):
            waiters.append(_Job(cluster2, stack, "--wait", *(["-N", "1"] if number else [])))
            waiters[-1].wait_said("waiting for nodes: ")
        refused = _run(cluster2, "-N", "1")
        assert refused.returncode == 3
        before = first
        for nnodes, waiter in zip((2, 1), waiters, strict=True):
            assert not waiter.live.run_dir.exists()
            assert before.end()[0] == SUCCEEDED
            waiter.wait_ready(nnodes)
            waiter.wait_said("gpulayer: drew h")
            before = waiter
        assert waiters[1].end() == [SUCCEEDED]
        assert waiters[0].live.process.wait() == 0
    assert _records(cluster2) == []
    assert_clean(cluster2)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def test_a_signal_while_waiting(cluster2: Cluster, number: int) -> None:
    """Ctrl-C ends the waiting, with 130: nothing was contacted, and nobody waits behind it any more."""
    with ExitStack() as stack:
        first = _Job(cluster2, stack, "-N", "1")
        first.wait_ready(1)
        waiter = _Job(cluster2, stack, "--wait", "300")
        waiter.wait_said("waiting for nodes: asked for 2 nodes, 1 is free: h01; ")
        assert _run(cluster2, "-N", "1").returncode == 3
        waiter.live.interrupt(number)
        done = waiter.live.finish()
        assert done.returncode == 128 + number
        assert done.stderr.endswith("\ngpulayer: interrupted\n")
        assert not done.run_dir.exists()
        assert _records(cluster2) == [first.id]
        assert _run(cluster2, "-N", "1").returncode == 0
        assert first.end() == [SUCCEEDED]
    assert_clean(cluster2)


def test_users_among_each_other(cluster2: Cluster) -> None:
    """A job of another user is refused by name, whoever is root; a killed launcher of either holds nothing."""
    for holder, other in ((cluster2.login, cluster2.walker), (cluster2.walker, cluster2.login)):
        with ExitStack() as stack:
            job = _Job(cluster2, stack, login=holder)
            job.wait_ready(2)
            refused = _run(cluster2, login=other)
            assert refused.returncode == 3
            who = f"h[00-01] are held by job {job.id} of {holder.user.name} on login since "
            assert f"asked for 2 nodes, none is free; {who}" in refused.stderr
            job.live.process.kill()
            job.live.process.wait()
            assert _records(cluster2) == [job.id]
            wait_until(lambda: not endings.running(cluster2), "the hosts have noticed", timeout_s=30)
            assert_clean(cluster2, kept_on=cluster2.hosts)
            done = _run(cluster2, login=other)
            assert done.returncode == 0, done.stderr
            assert _records(cluster2) == ([job.id] if other is cluster2.walker else [])
        assert _run(cluster2, login=holder).returncode == 0
        assert _records(cluster2) == []
    assert_clean(cluster2)


def test_a_folder_that_may_not_be_written(cluster2: Cluster) -> None:
    """One warning, and the job runs: root is stopped by no mode, so this is an ordinary user's."""
    cluster2.leases.chmod(0o755)
    try:
        done = _run(cluster2, login=cluster2.walker)
    finally:
        cluster2.leases.chmod(0o1777)
    assert done.returncode == 0
    warning = f"gpulayer: warning: leases cannot be kept in {cluster2.leases}: Permission denied; other jobs may draw"
    assert done.stderr.count(warning) == 1
    assert_clean(cluster2)
