"""Ctrl-C and its kin, at every stage: the job ends everywhere, the exit code says why, and there is no traceback."""

from __future__ import annotations

import os
import re
import signal
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support import endings, jobs
from tests.support.endings import assert_clean, block, outcomes
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.cluster import Cluster
    from tests.support.host import Host
    from tests.support.jobs import Finished, LiveRun

pytestmark = pytest.mark.ssh

STOPPED = ("stopped", True)
FAILED = ("failed", True)
NEVER = ("never started", True)
SIGNALS = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGHUP: 129}
each_signal = pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)

# 30 MB from rank 1, then the end.
MUCH = "import os\nif os.environ['RANK'] == '1':\n    os.write(1, b'much output\\n' * 2_500_000)\n"


@pytest.fixture(autouse=True)
def neighbours(cluster2: Cluster) -> Iterator[None]:
    """Processes on every host that must outlive the test."""
    with endings.bystanders(cluster2):
        yield


def _launch(cluster: Cluster, options: list[str], source: str, **env: str) -> tuple[LiveRun, Path]:
    folder = cluster.new_folder("out")
    hosts_file = jobs.map_with_fake_torch(cluster, env={"OUT": str(folder), **env})
    return jobs.launch(cluster.login, hosts_file, options, jobs.write_script(cluster, source)), folder


def _assert_interrupted(done: Finished, number: int, nodes: list[tuple[str, bool]]) -> None:
    assert done.returncode == done.receipt["exit_code"] == 128 + number
    assert (done.receipt["cause"]["kind"], done.receipt["cause"]["signal"]) == ("signal", number)
    assert outcomes(done.receipt) == nodes
    assert re.search(rf" was stopped after [\d.]+ s, exit code {128 + number}\n", block(done.stderr))
    assert f"  first: gpulayer received {signal.Signals(number).name}, " in block(done.stderr)
    assert "Traceback" not in done.stderr


@contextmanager
def _slow(host: Host) -> Iterator[None]:
    """Limit what a host can send to 5 MB/s."""
    host.run(["tc", "qdisc", "add", "dev", "eth0", "root", "tbf", "rate", "40mbit", "burst", "64k", "latency", "100ms"])
    yield
    host.run(["tc", "qdisc", "del", "dev", "eth0", "root"])


@each_signal
def test_while_connecting(cluster2: Cluster, number: signal.Signals) -> None:
    """A host that drops every packet does not hold up the end; no node was started."""
    cluster2.hosts[1].drop_syn()
    live, _ = _launch(cluster2, [], endings.POLITE)
    with live:
        live.wait_for_event("node_connected", node_rank=0)
        live.interrupt(number)
        sent_at = time.monotonic()
        done = live.finish()
        took_s = time.monotonic() - sent_at
    assert_clean(cluster2)
    _assert_interrupted(done, number, [NEVER, NEVER])
    assert took_s < 5  # --connect-timeout is 10


@each_signal
def test_while_a_login_shell_hangs(cluster2: Cluster, number: signal.Signals) -> None:
    """A .bashrc that does not come to its end does not hold up ours, and starts nothing when it does later."""
    startup = cluster2.hosts[1].path("/root/.bashrc")
    startup.write_text("sleep 3456\n")
    live, _ = _launch(cluster2, [], endings.POLITE)

    def hanging() -> list[int]:
        return [process.pid for process in cluster2.hosts[1].processes() if process.argv == ("sleep", "3456")]

    with live:
        live.wait_for_event("node_connected", node_rank=0)
        wait_until(lambda: len(hanging()) == 1, "the login shell hangs")
        live.interrupt(number)
        done = live.finish(timeout_s=5)
    _assert_interrupted(done, number, [NEVER, NEVER])
    startup.unlink()
    os.kill(hanging()[0], signal.SIGKILL)
    assert_clean(cluster2)


@each_signal
def test_while_starting(cluster2: Cluster, number: signal.Signals) -> None:
    """torchrun runs and its ranks do not yet."""
    hanging = cluster2.new_folder("hang") / "torch" / "distributed"
    hanging.mkdir(parents=True)
    for path in (hanging.parent / "__init__.py", hanging / "__init__.py"):
        path.touch()
    (hanging / "run.py").write_text("import time\ntime.sleep(1000)\n")
    hosts_file = cluster2.hosts_toml(defaults={"env": {"PYTHONPATH": str(hanging.parents[1])}})
    with jobs.launch(cluster2.login, hosts_file, [], jobs.write_script(cluster2, endings.POLITE)) as live:
        live.wait_for_event("command_started", node_rank=0)
        live.wait_for_event("command_started", node_rank=1)
        live.interrupt(number)
        done = live.finish(timeout_s=20)
    assert_clean(cluster2)
    _assert_interrupted(done, number, [STOPPED, STOPPED])
    assert done.named("rank_started") == []


@each_signal
def test_while_running(cluster2: Cluster, number: signal.Signals) -> None:
    """Ranks that are polite are gone well before the grace of 30 s is over."""
    live, folder = _launch(cluster2, [], endings.POLITE)
    with live:
        live.wait_for_event("stage_reached", stage="running")
        endings.wait_ready(folder, 2)
        live.interrupt(number)
        done = live.finish(timeout_s=20)
    assert_clean(cluster2)
    _assert_interrupted(done, number, [STOPPED, STOPPED])
    assert [node["ranks"][0]["signal"] for node in done.receipt["nodes"]] == [signal.SIGTERM] * 2
    assert "interrupted; once more kills the job at once" in done.stderr


@each_signal
def test_while_the_last_output_comes_in(cluster2: Cluster, number: signal.Signals) -> None:
    """The ranks have ended and a slow link still carries what they wrote: the second signal leaves the rest there."""
    with _slow(cluster2.hosts[1]):
        live, _ = _launch(cluster2, [], MUCH)
        with live:
            live.wait_for_event("node_ended", node_rank=0)
            live.wait_for_event("node_swept", node_rank=1)
            live.interrupt(number)
            wait_until(lambda: "once more" in live.stderr_so_far, "the signal is answered")
            live.interrupt(number)
            done = live.finish(timeout_s=20)
    kept = done.receipt["nodes"][1]["kept_on_node"]
    assert kept == f"/tmp/gpulayer-{live.run_dir.name}-n1"
    log = cluster2.hosts[1].path(kept).glob("ranks/*/attempt_0/0/stdout.log")
    assert [path.stat().st_size for path in log] == [30_000_000]
    assert_clean(cluster2, kept_on=[cluster2.hosts[1]])
    _assert_interrupted(done, number, [("succeeded", True)] * 2)
    assert 0 < len(done.log(1, 1)) < 30_000_000
    assert f"    output that did not arrive is on h01 in {kept}\n" in block(done.stderr)


@each_signal
def test_while_a_failed_job_ends(cluster2: Cluster, number: signal.Signals) -> None:
    """The first cause stays the cause; the second signal ends the wait for the grace."""
    live, folder = _launch(cluster2, ["--grace", "60"], endings.STUBBORN, FAILS="1")
    with live:
        watched = endings.wait_stubborn(cluster2, daemons=2)
        (folder / "go").touch()
        live.wait_for_event("stage_reached", stage="ending")
        live.interrupt(number)
        wait_until(lambda: "once more" in live.stderr_so_far, "the signal is answered")
        live.interrupt(number)
        done = live.finish(timeout_s=20)
    assert watched.alive() == []
    watched.close()
    assert_clean(cluster2)
    assert done.returncode == done.receipt["exit_code"] == 1
    assert outcomes(done.receipt) == [STOPPED, FAILED]
    assert (done.receipt["cause"]["rank"], done.receipt["cause"]["code"]) == (1, 17)
    assert "Traceback" not in done.stderr


def test_the_second_one_kills_at_once(cluster2: Cluster) -> None:
    """Workers that ignore SIGTERM and daemons that hide are gone at once; a grace of 60 s is not waited for."""
    live, _ = _launch(cluster2, ["--grace", "60"], endings.STUBBORN, SECRETIVE="1")
    with live:
        live.wait_for_event("stage_reached", stage="running")
        watched = endings.wait_stubborn(cluster2, daemons=4)
        live.interrupt()
        live.wait_for_event("node_stopping", node_rank=1)
        assert len(watched.alive()) == len(watched.processes)
        live.interrupt()
        second_at = time.monotonic()
        gone_at = watched.wait_gone()
        done = live.finish()
        returned_at = time.monotonic()
    assert_clean(cluster2)
    print(f"second signal: gone {gone_at - second_at:.3f} s after it, returned {returned_at - second_at:.3f} s")
    assert returned_at - second_at < 5
    _assert_interrupted(done, signal.SIGINT, [STOPPED, STOPPED])
    assert [event["now"] for event in done.named("node_stopping")] == [False, False, True, True]
    assert "once more leaves at once" in done.stderr


def test_the_third_one_leaves_at_once_and_says_what_may_still_run(cluster2: Cluster) -> None:
    """A node whose supervisor does not answer is left alone; it ends its part when it can."""
    live, _ = _launch(cluster2, ["--grace", "60"], endings.STUBBORN)
    with live:
        live.wait_for_event("stage_reached", stage="running")
        watched = endings.wait_stubborn(cluster2, daemons=2)
        go_on = endings.stop_process(endings.supervisor_of(live, cluster2, 1))
        try:
            live.interrupt()
            wait_until(lambda: "once more kills" in live.stderr_so_far, "the first is answered")
            live.interrupt()
            live.wait_for_event("node_ended", node_rank=0)
            live.interrupt()
            third_at = time.monotonic()
            done = live.finish()
            took_s = time.monotonic() - third_at
            assert len(watched.alive()) >= 2
        finally:
            go_on()
    watched.wait_gone()
    assert_clean(cluster2, kept_on=[host for host in cluster2.hosts if endings.folders(host)])
    assert took_s < 2
    _assert_interrupted(done, signal.SIGINT, [STOPPED, ("running", False)])
    assert "  h00: stopped by gpulayer; verified clean\n" in block(done.stderr)
    assert "  h01: running; could not be verified, its supervisor ends its part by itself" in block(done.stderr)


def test_ctrl_z_does_not_suspend(cluster2: Cluster) -> None:
    """gpulayer says why it goes on, and the job succeeds."""
    source = endings.BEGIN + "note(f'ready{rank}')\nwait_for('go')\n"
    live, folder = _launch(cluster2, [], source)
    with live:
        endings.wait_ready(folder, 2)
        live.interrupt(signal.SIGTSTP)
        wait_until(lambda: "gpulayer: not suspended: " in live.stderr_so_far, "it says so")
        state = Path(f"/proc/{live.process.pid}/stat").read_text().rpartition(")")[2].split()[0]
        assert state != "T"
        (folder / "go").touch()
        done = live.finish()
    assert_clean(cluster2)
    assert done.returncode == 0
    assert outcomes(done.receipt) == [("succeeded", True)] * 2


def test_a_signal_while_the_receipt_is_written_changes_nothing(cluster2: Cluster) -> None:
    """Signals in quick succession from the first failure on: the receipt is there, and there is no traceback."""
    live, folder = _launch(cluster2, ["--grace", "1"], endings.STUBBORN, FAILS="0")
    with live:
        endings.wait_stubborn(cluster2, daemons=2).close()
        (folder / "go").touch()
        live.wait_for_event("node_ended", node_rank=1)
        while live.process.poll() is None:
            live.interrupt(signal.SIGHUP)
            time.sleep(0.002)
        done = live.finish()
    assert_clean(cluster2)
    assert "Traceback" not in done.stderr
    assert done.receipt["exit_code"] == 1
