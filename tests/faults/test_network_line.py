"""On the network: a line that delays and loses packets, and one that is far slower than what the ranks write."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support import endings
from tests.support.bad_lines import delayed, narrow
from tests.support.endings import Watched, assert_clean, block, folders, noted, outcomes
from tests.support.faults import FAILED, STOPPED, SUCCEEDED, first_cause, launch
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.faults.conftest import Row
    from tests.support.cluster import Cluster
    from tests.support.jobs import Finished

pytestmark = pytest.mark.ssh
needs_tun = pytest.mark.skipif(not Path("/dev/net/tun").exists(), reason="/dev/net/tun is missing")

FAR = 1  # the node behind the bad line
DELAY_S = 0.2
LOST_ONE_OF = 20

TALK = endings.BEGIN + "for number in range(20_000):\n    print(rank, 'says', number)\n"
SPEECH = b"".join(b"%d says %d\n" % (FAR, number) for number in range(20_000))

# Rank FAR writes 50 MB, 10 MB/s, and notes for how long its longest write took. Then it fails if it is to.
PIECE = b"x" * 99_999 + b"\n"
PIECES = 500
FLOOD = (
    endings.BEGIN
    + f"""
if rank == {FAR}:
    piece, longest, begin = b"x" * 99_999 + b"\\n", 0.0, time.monotonic()
    for number in range({PIECES}):
        before = time.monotonic()
        os.write(1, piece)
        longest = max(longest, time.monotonic() - before)
        time.sleep(max(0.0, begin + number / 100 - time.monotonic()))
    with open(f"{{out}}/longest", "w") as file:
        file.write(str(longest))
    note("written")
    if "FAILS" in os.environ:
        sys.exit(17)
note(f"ready{{rank}}")
time.sleep(1000)
"""
)


@pytest.fixture(autouse=True)
def neighbours(cluster2: Cluster) -> Iterator[None]:
    """Processes on every host that must outlive the test."""
    with endings.bystanders(cluster2):
        yield


@needs_tun
@pytest.mark.fault("200 ms delay with 5 % loss")
def test_a_job_behind_a_bad_line(cluster2: Cluster, row: Row) -> None:
    """Checks, start, output and end all work, and every byte arrives."""
    with delayed(cluster2, [cluster2.hosts[FAR]], delay_s=DELAY_S, one_of=LOST_ONE_OF):
        live, _ = launch(cluster2, ["--lost-after", "10"], TALK)
        with live:
            live.wait_for_event("rank_exited", node_rank=FAR, timeout_s=60)
            row.begins()
            done = live.finish()
        row.clean()
    assert_clean(cluster2)
    assert done.returncode == 0, done.stderr
    assert outcomes(done.receipt) == [SUCCEEDED, SUCCEEDED]
    assert done.log(FAR, FAR) == SPEECH
    row.says("exit 0; the job takes longer to begin and to end")


@needs_tun
@pytest.mark.fault("200 ms delay with 5 % loss, and a rank fails")
def test_a_failure_while_a_line_is_bad(cluster2: Cluster, row: Row) -> None:
    """Both hosts end within the grace and a few round trips, and are verified."""
    with delayed(cluster2, [cluster2.hosts[FAR]], delay_s=DELAY_S, one_of=LOST_ONE_OF):
        live, folder = launch(cluster2, ["--lost-after", "10", "--grace", "1"], FAILS="0")
        with live:
            live.wait_for_event("stage_reached", stage="running", timeout_s=60)
            watched = endings.wait_stubborn(cluster2, 4)
            row.begins()
            (folder / "go").touch()
            gone_at = watched.wait_gone()
            row.clean(gone_at)
            done = live.finish()
    assert_clean(cluster2)
    assert done.returncode == 1, done.stderr
    assert outcomes(done.receipt) == [FAILED, STOPPED]
    assert gone_at - noted(folder, "failed") < 10
    row.says(first_cause(done))


@pytest.mark.fault("64 kB/s link under 10 MB/s of output, and Ctrl-C twice")
@pytest.mark.slow
def test_a_narrow_line_and_an_impatient_user(cluster2: Cluster, row: Row) -> None:
    """No rank waits for the line. The second Ctrl-C leaves what has not been sent on the node, and says where."""
    with narrow(cluster2.hosts[FAR], "512kbit"):
        live, folder = launch(cluster2, ["--grace", "1", "--lost-after", "5"], FLOOD)
        with live:
            wait_until((folder / "written").exists, "all is written", timeout_s=60)
            assert live.process.poll() is None
            watched = Watched.of(cluster2)
            row.begins()
            live.interrupt()
            row.clean(watched.wait_gone())
            wait_until(lambda: "once more" in live.stderr_so_far, "the signal is answered")
            live.interrupt()
            sent_at = time.monotonic()
            done = live.finish(timeout_s=60)
            print(f"Ctrl-C twice: over {time.monotonic() - sent_at:.3f} s after the second")
    assert done.returncode == 130
    assert outcomes(done.receipt) == [STOPPED, STOPPED]
    row.says(f"{first_cause(done)}, and `{_assert_kept(cluster2, done, folder)}`")


@pytest.mark.fault("64 kB/s link under 10 MB/s of output, and a rank behind it fails")
@pytest.mark.slow
def test_a_narrow_line_and_a_failure_behind_it(cluster2: Cluster, row: Row) -> None:
    """The news do not wait for the output: the job ends at once. Its output is waited for no longer than a minute."""
    near = cluster2.hosts[0]
    with narrow(cluster2.hosts[FAR], "512kbit"):
        live, folder = launch(cluster2, ["--grace", "1", "--lost-after", "5"], FLOOD, FAILS="1")
        with live:
            endings.wait_ready(folder, 1)
            watched = Watched.of(cluster2, [near])
            gone_at = watched.wait_gone(timeout_s=60)
            done = live.finish(timeout_s=100)
    assert done.returncode == 1, done.stderr
    assert outcomes(done.receipt) == [STOPPED, FAILED]
    after_s = gone_at - noted(folder, "written")
    assert 0 < after_s < 15
    row.clean_s = after_s
    row.says(f"{first_cause(done)}, and `{_assert_kept(cluster2, done, folder)}`")


def _assert_kept(cluster: Cluster, done: Finished, folder: Path) -> str:
    """The rank was not slowed, no byte of it is lost, and the user is told where the rest is. Returns the words."""
    host = cluster.hosts[FAR]
    kept = done.receipt["nodes"][FAR]["kept_on_node"]
    assert [str(path) for path in folders(host)] == [str(host.path(kept))]
    (log,) = host.path(kept).glob("ranks/*/attempt_0/0/stdout.log")
    written = log.read_bytes()
    assert len(written) == len(PIECE) * PIECES
    arrived = done.log(FAR, FAR)
    assert 0 < len(arrived) < len(written)
    assert written.startswith(arrived)
    assert float((folder / "longest").read_text()) < 1  # seconds; the line would have needed ten minutes
    assert "Traceback" not in done.stderr
    told = f"output that did not arrive is on {host.name} in {kept}"
    assert f"    {told}\n" in block(done.stderr)
    assert_clean(cluster, kept_on=[host])
    return told.replace(kept, "DIR")
