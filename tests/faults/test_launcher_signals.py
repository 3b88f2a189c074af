"""Signals that end gpulayer, in every stage: the job ends everywhere, the exit code says why, there is no traceback."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from typing import TYPE_CHECKING

import pytest

from tests.support import endings, jobs
from tests.support.endings import assert_clean, block, outcomes
from tests.support.stages import LEFT_BYTES, MUCH_BYTES, STAGES, collected
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.faults.conftest import Row
    from tests.support.cluster import Cluster
    from tests.support.host import Host
    from tests.support.jobs import Finished
    from tests.support.stages import Held

pytestmark = pytest.mark.ssh

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
NAMES = "SIGINT, SIGTERM, SIGHUP or SIGQUIT"
Nodes = list[tuple[str, bool]]
NEVER: Nodes = [("never started", True)] * 2
STOPPED: Nodes = [("stopped", True)] * 2
SUCCEEDED: Nodes = [("succeeded", True)] * 2
HANG = 3456


def stage(name: str) -> pytest.MarkDecorator:
    """Mark the test of a stage as its row."""
    return pytest.mark.fault(f"{NAMES} {name}")


def pairs(cluster: Cluster) -> list[list[Host]]:
    """Two hosts for each signal: four jobs are interrupted at a time."""
    return [cluster.hosts[at : at + 2] for at in range(0, 8, 2)]


@contextlib.contextmanager
def four(cluster: Cluster, name: str, *, grace_s: float = 30) -> Iterator[list[Held]]:
    """Four jobs in this stage."""
    with contextlib.ExitStack() as stack:
        held = [stack.enter_context(STAGES[name](cluster, hosts, grace_s)) for hosts in pairs(cluster)]
        for one in held:
            one.wait()
        yield held


def interrupt(held: list[Held], row: Row, *, times: int = 1, limit_s: float = 25) -> list[Finished]:
    """Send each of the four its own signal, so many times; a second one follows once the first was answered."""
    row.begins()
    for _ in range(times):
        for one, number in zip(held, SIGNALS, strict=True):
            one.live.interrupt(number)
        if times > 1:
            wait_until(lambda: all("once more" in one.live.stderr_so_far for one in held), "the signals are answered")
    return [one.live.finish(limit_s) for one in held]


def assert_interrupted(done: list[Finished], nodes: Nodes) -> None:
    """Each has the exit code and the cause of its signal, on the screen and in the receipt."""
    for one, number in zip(done, SIGNALS, strict=True):
        assert one.returncode == one.receipt["exit_code"] == 128 + number
        assert (one.receipt["cause"]["kind"], one.receipt["cause"]["signal"]) == ("signal", number)
        assert outcomes(one.receipt) == nodes
        assert re.search(rf" was stopped after [\d.]+ s, exit code {128 + number}\n", block(one.stderr))
        assert f"  first: gpulayer received {number.name}, " in block(one.stderr)
        assert "Traceback" not in one.stderr


SAYS = "exit 130, 143, 129, 131; `job JOB was stopped, first: gpulayer received SIGINT`"


@stage("while reading the map")
def test_while_reading_the_map(cluster8: Cluster, row: Row) -> None:
    """A map on a disk that does not answer: it ends at once, and has made and contacted nothing."""
    with four(cluster8, "while reading the map") as held:
        done = interrupt(held, row)
    for one, number in zip(done, SIGNALS, strict=True):
        assert (one.returncode, one.stdout, one.stderr) == (128 + number, "", "gpulayer: interrupted\n")
        assert not one.run_dir.exists()
    assert_clean(cluster8)
    row.says("exit 130, 143, 129, 131; `interrupted`")


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=stage(name)) for name in ("while connecting", "while half connected", "in preflight")],
)
def test_before_the_start(cluster8: Cluster, row: Row, name: str) -> None:
    """Hosts that do not answer, and checks that do not end, hold nobody up; nothing was started, nothing is left."""
    with four(cluster8, name) as held:
        sent_at = time.monotonic()
        done = interrupt(held, row)
        assert time.monotonic() - sent_at < 9  # --connect-timeout and nvidia-smi's limit are 10
    assert_clean(cluster8)
    assert_interrupted(done, NEVER)
    row.says(SAYS)


@stage("while a login shell hangs")
def test_while_a_login_shell_hangs(cluster8: Cluster, row: Row) -> None:
    """A .bashrc that does not come to its end does not hold up ours, and starts nothing when it does later."""
    silent = [hosts[1] for hosts in pairs(cluster8)]
    for host in silent:
        host.path("/root/.bashrc").write_text(f"sleep {HANG}\n")

    def hanging() -> list[int]:
        return [process.pid for process in cluster8.processes() if process.argv == ("sleep", str(HANG))]

    with contextlib.ExitStack() as stack:
        held = [stack.enter_context(STAGES["while running"](cluster8, hosts, 30)) for hosts in pairs(cluster8)]
        for one in held:
            one.live.wait_for_event("node_connected", node_rank=0)
        wait_until(lambda: len(hanging()) == 4, "the login shells hang")
        done = interrupt(held, row)
    for host in silent:
        host.path("/root/.bashrc").unlink()
    for pid in hanging():
        os.kill(pid, signal.SIGKILL)
    assert_clean(cluster8)
    assert_interrupted(done, NEVER)
    row.says(SAYS)


@stage("while starting")
def test_while_starting(cluster8: Cluster, row: Row) -> None:
    """torchrun is ended on every node before it has started a rank."""
    with four(cluster8, "while starting") as held:
        watched = endings.Watched.of(cluster8)
        done = interrupt(held, row)
        row.clean(watched.wait_gone())
    assert_clean(cluster8)
    assert_interrupted(done, STOPPED)
    assert [one.named("rank_started") for one in done] == [[]] * 4
    row.says(SAYS)


@stage("while running")
def test_while_running(cluster8: Cluster, row: Row) -> None:
    """Ranks that are polite are gone well before the grace of 30 s is over."""
    with four(cluster8, "while running") as held:
        watched = endings.Watched.of(cluster8)
        done = interrupt(held, row)
        row.clean(watched.wait_gone())
    assert_clean(cluster8)
    assert_interrupted(done, STOPPED)
    for one in done:
        assert [node["ranks"][0]["signal"] for node in one.receipt["nodes"]] == [signal.SIGTERM] * 2
        assert "interrupted; once more kills the job at once" in one.stderr
    row.says(SAYS)


@stage("while the last output comes in")
def test_while_the_last_output_comes_in(cluster8: Cluster, row: Row) -> None:
    """The ranks have ended and a slow link still carries what they wrote: the second signal leaves the rest there."""
    with four(cluster8, "while the last output comes in") as held:
        done = interrupt(held, row, times=2)
    for one, hosts in zip(done, pairs(cluster8), strict=True):
        kept = one.receipt["nodes"][1]["kept_on_node"]
        assert kept == f"/tmp/gpulayer-{one.run_dir.name}-n1"
        logs = hosts[1].path(kept).glob("ranks/*/attempt_0/0/stdout.log")
        assert [path.stat().st_size for path in logs] == [MUCH_BYTES]
        assert 0 < len(one.log(1, 1)) < MUCH_BYTES
        assert f"    output that did not arrive is on {hosts[1].name} in {kept}\n" in block(one.stderr)
    assert_clean(cluster8, kept_on=[hosts[1] for hosts in pairs(cluster8)])
    assert_interrupted(done, SUCCEEDED)
    row.says(f"{SAYS}, `output that did not arrive is on h01 in /tmp/gpulayer-JOB-n1`")


@stage("while the outputs are collected")
def test_while_the_outputs_are_collected(cluster8: Cluster, row: Row) -> None:
    """It stops at once: what is whole stays, of the rest nothing is here, and the node still has all of it."""
    with four(cluster8, "while the outputs are collected") as held:
        done = interrupt(held, row)
    for one, hosts in zip(done, pairs(cluster8), strict=True):
        kept = f"/tmp/gpulayer-{one.run_dir.name}-n1"
        assert [node["kept_on_node"] for node in one.receipt["nodes"]] == [None, kept]
        assert hosts[1].path(f"{kept}/outputs/left.bin").stat().st_size == LEFT_BYTES
        assert collected(one.run_dir) == ["node0/outputs/left.bin"]
        lost = "left.bin: not brought back, since gpulayer was told to stop"
        assert f"    {hosts[1].name}: {lost}\n" in block(one.stderr)
        assert f"    output that did not arrive is on {hosts[1].name} in {kept}\n" in block(one.stderr)
        assert "interrupted; outputs that are not here yet stay on the nodes" in one.stderr
    assert_clean(cluster8, kept_on=[hosts[1] for hosts in pairs(cluster8)])
    assert_interrupted(done, SUCCEEDED)
    row.says(f"{SAYS}, `h01: left.bin: not brought back, since gpulayer was told to stop`")


@stage("while a failed job is ended")
def test_while_a_failed_job_is_ended(cluster8: Cluster, row: Row) -> None:
    """The first cause stays the cause; the second signal ends the wait for the grace of 60 s."""
    with four(cluster8, "while a failed job is ended", grace_s=60) as held:
        watched = endings.Watched.of(cluster8)
        done = interrupt(held, row, times=2)
        row.clean(watched.wait_gone())
    assert_clean(cluster8)
    for one in done:
        assert one.returncode == one.receipt["exit_code"] == 1
        assert outcomes(one.receipt) == [("stopped", True), ("failed", True)]
        assert (one.receipt["cause"]["rank"], one.receipt["cause"]["code"]) == (1, 17)
        assert "Traceback" not in one.stderr
    row.says("exit 1; `first: rank 1 on node 1 (h01) exited with code 17`")


@stage("while the end is told")
def test_while_the_end_is_told(cluster8: Cluster, row: Row) -> None:
    """The receipt stands, and the signal only ends the wait for a screen that nobody reads: the code stays 0."""
    with four(cluster8, "while the end is told") as held:
        done = interrupt(held, row)
    assert_clean(cluster8)
    assert [one.returncode for one in done] == [0] * 4
    assert [outcomes(one.receipt) for one in done] == [SUCCEEDED] * 4
    row.says("exit 0; the receipt says how the job ended")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP], ids=lambda number: number.name)
@pytest.mark.fault("signals in quick succession from the first failure on")
def test_signals_in_quick_succession_change_nothing(cluster8: Cluster, row: Row, number: signal.Signals) -> None:
    """From the last node's end to that of the process: the receipt is there, the exit code is its, no traceback."""
    with STAGES["while a failed job is ended"](cluster8, cluster8.hosts[:2], 1) as held:
        held.wait()
        row.begins()
        for node_rank in (0, 1):
            held.live.wait_for_event("node_ended", node_rank=node_rank)
        while held.live.process.poll() is None:
            held.live.interrupt(number)
            time.sleep(0.002)
        done = held.live.finish()
    assert_clean(cluster8)
    row.clean()
    assert "Traceback" not in done.stderr
    assert done.returncode == done.receipt["exit_code"] == 1
    row.says("exit 1; `job JOB failed`")


@pytest.mark.fault("SIGHUP to a gpulayer that was started with nohup")
def test_nohup_is_obeyed(cluster8: Cluster, row: Row) -> None:
    """A signal that was ignored when gpulayer began stays ignored: the job lives on when its terminal is closed."""
    with contextlib.ExitStack() as stack:
        out = cluster8.new_folder("out")
        hosts_file = jobs.map_with_fake_torch(cluster8, hosts=cluster8.hosts[:2], env={"OUT": str(out)})
        script = jobs.write_script(cluster8, endings.BEGIN + "note(f'ready{rank}')\nwait_for('go')\n")
        live = stack.enter_context(
            jobs.launch(cluster8.login, hosts_file, [], script, through=["env", "--ignore-signal=HUP"])
        )
        endings.wait_ready(out, 2)
        row.begins()
        live.interrupt(signal.SIGHUP)
        live.wait_for_event("stage_reached", stage="running")
        (out / "go").touch()
        done = live.finish()
    assert_clean(cluster8)
    assert done.returncode == 0
    assert outcomes(done.receipt) == SUCCEEDED
    row.says("exit 0; `job JOB succeeded`")
