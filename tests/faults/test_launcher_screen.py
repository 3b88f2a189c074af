"""Screens that are stopped, full, closed or gone: the job and its files do not notice, the exit code is the job's."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from gpulayer.logs import RunPaths
from tests.support import endings
from tests.support.endings import assert_clean, outcomes
from tests.support.faults import STOPPED, SUCCEEDED
from tests.support.flood import FLOOD, file_hash, flood_hash
from tests.support.jobs import LiveRun, launch, map_with_fake_torch, write_script
from tests.support.terminal import terminal
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.faults.conftest import Row
    from tests.support.cluster import Cluster
    from tests.support.jobs import Finished
    from tests.support.terminal import Pty

pytestmark = pytest.mark.ssh

STOPPED_FOR_S = 60
SPEAK = "import os\nprint('out of', os.environ['RANK'])\n"
# A flood, then silence until it is told to end with one line more.
FLOOD_AND_HOLD = f"{FLOOD}{endings.BEGIN}note(f'ready{{rank}}')\nwait_for('go')\nprint('the end')\n"


@pytest.fixture
def pty() -> Iterator[Pty]:
    """A terminal of 80 columns."""
    with terminal() as pty:
        yield pty


def _assert_succeeded(done: Finished, megabytes: int, more: bytes = b"") -> None:
    """Exit code 0, and every byte of the flood is in the files."""
    assert done.returncode == done.receipt["exit_code"] == 0, done.stderr
    assert outcomes(done.receipt) == [SUCCEEDED] * len(done.receipt["nodes"])
    assert done.receipt["lost_log_bytes"] == 0
    assert [node["kept_on_node"] for node in done.receipt["nodes"]] == [None] * len(done.receipt["nodes"])
    for rank in range(len(done.receipt["nodes"])):
        assert file_hash(RunPaths(done.run_dir).output(rank, rank, "stdout")) == flood_hash(megabytes, more)


def _peak_bytes(live: LiveRun) -> int:
    """The most memory that gpulayer has held, looked at until it ends."""
    status = Path(f"/proc/{live.process.pid}/status")
    peak_kib = 0

    def over() -> bool:
        nonlocal peak_kib
        with contextlib.suppress(OSError):
            if found := re.search(r"VmHWM:\s+(\d+) kB", status.read_text()):
                peak_kib = int(found[1])
        return live.process.poll() is not None

    wait_until(over, "gpulayer ends", timeout_s=90)
    return peak_kib * 1024


@pytest.mark.fault("a terminal that is stopped (Ctrl-S) for all of the job")
def test_a_stopped_terminal_delays_nothing_and_costs_no_memory(cluster2: Cluster, pty: Pty, row: Row) -> None:
    """100 MB from one node while nobody reads the terminal: exit code 0, files exact, under 200 MB of memory."""
    script = write_script(cluster2, FLOOD)
    hosts = map_with_fake_torch(cluster2, hosts=cluster2.hosts[:1])
    with launch(cluster2.login, hosts, [], script, ["100"], stdout=pty.slave, stderr=pty.slave) as live:
        peak_bytes = _peak_bytes(live)
        done = live.finish()
    assert_clean(cluster2)
    _assert_succeeded(done, 100)
    assert 10_000_000 < peak_bytes < 200_000_000
    row.says("exit 0; the log files are complete")


@pytest.mark.slow
@pytest.mark.fault("a terminal that is stopped (Ctrl-S) for a minute")
def test_a_terminal_stopped_for_a_minute(cluster2: Cluster, pty: Pty, row: Row) -> None:
    """No node is lost though --lost-after is 5 s; once it moves again it shows where lines are missing, and the end."""
    script, out = write_script(cluster2, FLOOD_AND_HOLD), cluster2.new_folder("out")
    hosts = map_with_fake_torch(cluster2, env={"OUT": str(out)})
    options = ["--lost-after", "5"]
    with launch(cluster2.login, hosts, options, script, ["20"], stdout=pty.slave, stderr=pty.slave) as live:
        endings.wait_ready(out, 2)
        stopped_at = time.monotonic()

        def a_minute_has_passed() -> bool:
            assert live.process.poll() is None
            return time.monotonic() - stopped_at > STOPPED_FOR_S

        wait_until(a_minute_has_passed, "the terminal moves again", timeout_s=2 * STOPPED_FOR_S, poll_s=0.5)
        pty.start_reading()
        wait_until(lambda: "not shown here" in pty.text, "the gap is told")
        (out / "go").touch()
        done = live.finish()
    pty.hang_up()
    assert_clean(cluster2)
    _assert_succeeded(done, 20, b"the end\n")
    assert re.search(r"screen too slow: \d+ lines not shown here", pty.text)
    assert {line for line in pty.text.splitlines() if line.endswith("the end")} == {"[0] the end", "[1] the end"}
    assert "succeeded after" in pty.text
    row.says("exit 0; `screen too slow: N lines not shown here`")


@pytest.mark.fault("stdout a pipe that is full and that nobody reads")
def test_a_pipe_that_nobody_reads_delays_nothing(cluster2: Cluster, row: Row) -> None:
    """The job ends while stdout is full; stderr still says how it went and that lines are in the files only."""
    reader, writer = os.pipe()
    try:
        hosts, script = map_with_fake_torch(cluster2), write_script(cluster2, FLOOD)
        with launch(cluster2.login, hosts, [], script, ["12"], stdout=writer) as live:
            done = live.finish()
    finally:
        os.close(reader)
        os.close(writer)
    assert_clean(cluster2)
    _assert_succeeded(done, 12)
    assert "succeeded" in done.stderr
    assert re.search(r"screen too slow: \d+ lines not shown", done.stderr)
    row.says("exit 0; `screen too slow: N lines not shown here; all of it is in DIR`")


@pytest.mark.fault("stdout closed (`>&-`)")
def test_stdout_closed(cluster2: Cluster, row: Row) -> None:
    """The job runs, its files are complete and hold nothing that was meant for the screen."""
    hosts, script = map_with_fake_torch(cluster2), write_script(cluster2, SPEAK)
    with launch(cluster2.login, hosts, [], script, through=["sh", "-c", 'exec "$@" >&-', "sh"]) as live:
        done = live.finish()
    assert_clean(cluster2)
    assert (done.returncode, done.stdout) == (0, "")
    assert [done.log(rank, rank) for rank in (0, 1)] == [b"out of 0\n", b"out of 1\n"]
    assert outcomes(done.receipt) == [SUCCEEDED, SUCCEEDED]
    assert "[0] out" not in (done.run_dir / "events.jsonl").read_text()
    assert "succeeded" in done.stderr
    row.says("exit 0; `job JOB succeeded`, on stderr")


@pytest.mark.fault("stdout a file on a full disk")
def test_stdout_on_a_full_disk(cluster2: Cluster, row: Row) -> None:
    """It is said once, the job goes on, and its files are complete."""
    hosts, script = map_with_fake_torch(cluster2), write_script(cluster2, FLOOD)
    with open("/dev/full", "wb") as full, launch(cluster2.login, hosts, [], script, ["2"], stdout=full) as live:  # noqa: PTH123 - a device
        done = live.finish()
    assert_clean(cluster2)
    _assert_succeeded(done, 2)
    said = "gpulayer: cannot write to stdout: No space left on device; the job goes on\n"
    assert done.stderr.count("cannot write") == done.stderr.count(said) == 1
    row.says("exit 0; `cannot write to stdout: No space left on device; the job goes on`")


@pytest.mark.fault("the reader of stdout goes away (`| head -1`)")
def test_a_reader_that_goes_away_ends_the_printing_and_not_the_job(cluster2: Cluster, row: Row) -> None:
    """`gpulayer run ... | head -1` shows one line; the job runs to its end and the files are complete."""
    hosts, script = map_with_fake_torch(cluster2), write_script(cluster2, FLOOD)
    with subprocess.Popen(["head", "-1"], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as head:
        assert head.stdin is not None
        assert head.stdout is not None
        with launch(cluster2.login, hosts, [], script, ["5"], stdout=head.stdin) as live:
            head.stdin.close()
            done = live.finish()
        line = head.stdout.read()
    assert re.fullmatch(rb"\[[01]\] 00000000 y{90}\n", line)
    assert_clean(cluster2)
    _assert_succeeded(done, 5)
    assert "succeeded" in done.stderr
    assert "roken pipe" not in done.stderr
    row.says("exit 0; `job JOB succeeded`, on stderr")


@pytest.mark.fault("the reader of both screens goes away (`2>&1 | head -1`)")
def test_both_screens_gone_and_the_job_still_ends_well(cluster2: Cluster, row: Row) -> None:
    """Not even the report can be shown, and the exit code is still the job's."""
    hosts, script = map_with_fake_torch(cluster2), write_script(cluster2, FLOOD)
    reader, writer = os.pipe()
    with launch(cluster2.login, hosts, [], script, ["2"], stdout=writer, stderr=writer) as live:
        os.close(writer)
        os.close(reader)
        done = live.finish()
    assert_clean(cluster2)
    _assert_succeeded(done, 2)
    row.says("exit 0; the receipt says how the job ended")


@pytest.mark.fault("the terminal is closed")
def test_the_terminal_is_closed(cluster2: Cluster, pty: Pty, row: Row) -> None:
    """The kernel's SIGHUP ends the job on every node, though no screen is left to say so: exit 129, and a receipt."""
    out = cluster2.new_folder("out")
    hosts, script = map_with_fake_torch(cluster2, env={"OUT": str(out)}), write_script(cluster2, endings.POLITE)
    end, session = pty.slave, ["setsid", "--ctty"]
    with launch(cluster2.login, hosts, [], script, stdin=end, stdout=end, stderr=end, through=session) as live:
        live.wait_for_event("stage_reached", stage="running")
        endings.wait_ready(out, 2)
        watched = endings.Watched.of(cluster2)
        row.begins()
        pty.hang_up()
        row.clean(watched.wait_gone())
        done = live.finish()
    assert_clean(cluster2)
    assert done.returncode == done.receipt["exit_code"] == 129
    assert done.receipt["cause"]["signal"] == signal.SIGHUP
    assert outcomes(done.receipt) == [STOPPED, STOPPED]
    row.says("exit 129; the receipt says how the job ended")
