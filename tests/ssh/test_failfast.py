"""The first failure ends the job on every node, soon and wholly, and the last block says what it was."""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING

import pytest

from tests.support import endings, jobs
from tests.support.endings import assert_clean, block, outcomes

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.conftest import ClusterFactory
    from tests.support.cluster import Cluster

pytestmark = pytest.mark.ssh

STOPPED = ("stopped", True)
FAILED = ("failed", True)
SUCCEEDED = ("succeeded", True)

# Rank 1 fails once rank 0 has begun; rank 0 answers SIGTERM with a word, and so does rank 1 with its last.
LATE_WORDS = (
    endings.BEGIN
    + """
def late(number, frame):
    print("late words of rank", rank, flush=True)
    sys.exit(0)

signal.signal(signal.SIGTERM, late)
note(f"ready{rank}")
wait_for("ready0", "ready1")
if rank == 1:
    print("last words of rank 1", flush=True)
    print("and the reason", file=sys.stderr, flush=True)
    sys.exit(3)
time.sleep(100)
"""
)

RECORDED = """
from torch.distributed.elastic.multiprocessing.errors import record

@record
def main():
    reason = "the answer is not 42"
    raise ValueError(reason)

main()
"""

# EXITS holds `code` or `code:after` for each rank: exit with that code, after that other rank has noted its end.
EXITS = (
    endings.BEGIN
    + """
code, _, after = sys.argv[1 + rank].partition(":")
if after:
    wait_for(f"ended{after}")
    time.sleep(0.5)  # that rank's torchrun ends
note(f"ended{rank}")
sys.exit(int(code))
"""
)


@pytest.fixture
def neighbours(cluster4: Cluster) -> Iterator[None]:
    """Processes on every host that must outlive the test."""
    with endings.bystanders(cluster4):
        yield


def _map(cluster: Cluster, torch: str, folder: Path, **env: str) -> Path:
    variables = {"OUT": str(folder), **env}
    if torch == "fake":
        return jobs.map_with_fake_torch(cluster, env=variables)
    return cluster.hosts_toml(defaults={"env": variables})


@pytest.mark.usefixtures("neighbours")
@pytest.mark.parametrize("torch", ["fake", pytest.param("real", marks=pytest.mark.torch)])
def test_rank_2_exits_17_after_2_s_while_the_others_sleep(cluster4: Cluster, torch: str) -> None:
    """gpulayer returns 1 within 3 s of it, names node 2, rank 2 and 17 with its last words, and leaves nothing."""
    folder = cluster4.new_folder("out")
    hosts_file = _map(cluster4, torch, folder)
    with jobs.launch(cluster4.login, hosts_file, [], jobs.write_script(cluster4, endings.SEVENTEEN)) as live:
        endings.wait_ready(folder, 4)
        gone_at = endings.Watched.of(cluster4).wait_gone()
        done = live.finish()
        returned_at = time.monotonic()
    assert_clean(cluster4)
    failed_at = endings.noted(folder, "failed")
    print(
        f"4 hosts, {torch} torch: gone {gone_at - failed_at:.3f} s after it, returned {returned_at - failed_at:.3f} s"
    )
    assert returned_at - failed_at < 3
    assert done.returncode == done.receipt["exit_code"] == 1
    assert outcomes(done.receipt) == [STOPPED, STOPPED, FAILED, STOPPED]
    cause = done.receipt["cause"]
    assert (cause["kind"], cause["node_rank"], cause["node_id"], cause["rank"]) == ("rank", 2, "h02", 2)
    assert (cause["code"], cause["signal"]) == (17, None)
    assert [node["ranks"][0]["code"] for node in done.receipt["nodes"]][2] == 17
    lines = block(done.stderr).splitlines()
    assert re.fullmatch(r"gpulayer: job \S+ failed after [\d.]+ s, exit code 1", lines[0])
    assert re.fullmatch(r"  first: rank 2 on node 2 \(h02\) exited with code 17, [\d.]+ s into the job", lines[1])
    assert lines[2:] == [
        "  its last lines on stderr:",
        "    the last words of rank 2",
        "  h[00-01,03]: stopped by gpulayer; verified clean",
        "  h02: failed: rank 2 exited with code 17; verified clean",
        f"  logs: {done.run_dir}",
    ]
    assert done.log(2, 2, "stderr") == b"the last words of rank 2\n"
    assert [done.log(rank, rank) for rank in range(4)] == [f"rank {rank} begins\n".encode() for rank in range(4)]


def test_64_hosts(make_cluster: ClusterFactory) -> None:
    """A rank fails while 63 hosts work: every process is gone, each node is told of, and the block stays short."""
    cluster = make_cluster(64)
    folder = cluster.new_folder("out")
    hosts_file = _map(cluster, "fake", folder)
    with jobs.launch(cluster.login, hosts_file, [], jobs.write_script(cluster, endings.SEVENTEEN)) as live:
        endings.wait_ready(folder, 64)
        gone_at = endings.Watched.of(cluster).wait_gone()
        done = live.finish()
        returned_at = time.monotonic()
    assert_clean(cluster)
    failed_at = endings.noted(folder, "failed")
    print(f"64 hosts: gone {gone_at - failed_at:.3f} s after it, returned {returned_at - failed_at:.3f} s")
    assert done.returncode == done.receipt["exit_code"] == 1
    assert outcomes(done.receipt) == [FAILED if rank == 2 else STOPPED for rank in range(64)]
    assert (done.receipt["cause"]["rank"], done.receipt["cause"]["code"]) == (2, 17)
    assert "  h[00-01,03-63]: stopped by gpulayer; verified clean\n" in block(done.stderr)
    assert len(block(done.stderr).splitlines()) == 7


@pytest.mark.torch
def test_the_traceback_of_torchruns_error_file_is_shown(cluster2: Cluster) -> None:
    """A script under torch's @record ends with its own traceback in the block."""
    done = jobs.run(
        cluster2.login,
        _map(cluster2, "real", cluster2.new_folder("out")),
        ["-N", "1"],
        jobs.write_script(cluster2, RECORDED),
    )
    assert_clean(cluster2)
    assert done.returncode == 1
    assert done.receipt["cause"]["kind"] == "rank"
    said = block(done.stderr).split("its error file says:\n")[1]
    assert "    Traceback (most recent call last):\n" in said
    assert "    ValueError: the answer is not 42\n" in said


@pytest.mark.parametrize("options", [[], ["--verbose"]])
def test_what_a_node_says_after_it_was_told_to_stop(cluster2: Cluster, options: list[str]) -> None:
    """It is in its file, and on the screen only with --verbose; the failed rank's last words are on the screen."""
    folder = cluster2.new_folder("out")
    script = jobs.write_script(cluster2, LATE_WORDS)
    done = jobs.run(cluster2.login, _map(cluster2, "fake", folder), options, script)
    assert_clean(cluster2)
    assert done.returncode == 1
    assert outcomes(done.receipt) == [STOPPED, FAILED]
    assert done.log(0, 0) == b"late words of rank 0\n"
    assert "[1] last words of rank 1\n" in done.stdout
    assert "[1] and the reason\n" in done.stderr
    assert ("[0] late words of rank 0\n" in done.stdout) == bool(options)
    assert done.log(1, 1) == b"last words of rank 1\n"
    assert ("torchrun: got signal: 15" in done.stderr) == bool(options)


@pytest.mark.parametrize(
    ("exits", "code", "expected"),
    [
        (["0", "0:0"], 0, [SUCCEEDED, SUCCEEDED]),
        (["0:1", "0"], 0, [SUCCEEDED, SUCCEEDED]),
        (["0", "5:0"], 1, [SUCCEEDED, FAILED]),
    ],
)
def test_a_node_that_exits_0_early_is_no_failure_and_no_success(
    cluster2: Cluster, exits: list[str], code: int, expected: list[tuple[str, bool]]
) -> None:
    """The others go on, and it is they who decide."""
    folder = cluster2.new_folder("out")
    script = jobs.write_script(cluster2, EXITS)
    done = jobs.run(cluster2.login, _map(cluster2, "fake", folder), [], script, exits)
    assert_clean(cluster2)
    assert done.returncode == done.receipt["exit_code"] == code
    assert outcomes(done.receipt) == expected
    assert [node["ranks"][0]["code"] for node in done.receipt["nodes"]] == [int(item[0]) for item in exits]
    early = exits.index("0")
    ended = [event["t"] for event in done.named("rank_exited") if event["node_rank"] == early]
    assert ended[0] < min(e["t"] for e in done.named("rank_exited") if e["node_rank"] != early)
    assert ("node 1 (h01) exited with code 5" in block(done.stderr)) == bool(code)


def test_torchrun_that_cannot_start(cluster2: Cluster) -> None:
    """A Python without torchrun on one node fails the job with what that Python said."""
    without = cluster2.new_folder("no-torch")
    (without / "torch").mkdir()
    (without / "torch" / "__init__.py").touch()
    folder = cluster2.new_folder("out")
    env = {"OUT": str(folder), "PYTHONPATH": str(jobs.FAKE_TORCH)}
    hosts_file = cluster2.hosts_toml(defaults={"env": env}, nodes={"h01": {"env": {"PYTHONPATH": str(without)}}})
    script = jobs.write_script(cluster2, endings.POLITE)
    done = jobs.run(cluster2.login, hosts_file, ["--no-preflight", "--grace", "2"], script)
    assert_clean(cluster2)
    assert done.returncode == 1
    assert outcomes(done.receipt) == [STOPPED, FAILED]
    cause = done.receipt["cause"]
    assert (cause["kind"], cause["node_rank"], cause["rank"], cause["code"]) == ("command", 1, None, 1)
    assert "  first: torchrun on node 1 (h01) exited with code 1" in block(done.stderr)
    assert re.search(r"  its last lines on stderr:\n    .*No module named .?torch.distributed", block(done.stderr))


def test_the_time_limit(cluster2: Cluster) -> None:
    """--timeout ends the job as a failure does, and exits 124."""
    folder = cluster2.new_folder("out")
    script = jobs.write_script(cluster2, endings.POLITE)
    done = jobs.run(cluster2.login, _map(cluster2, "fake", folder), ["--timeout", "2"], script)
    assert_clean(cluster2)
    assert done.returncode == done.receipt["exit_code"] == 124
    assert outcomes(done.receipt) == [STOPPED, STOPPED]
    assert done.receipt["cause"]["kind"] == "timeout"
    assert re.search(
        r"reached its time limit after .*, exit code 124\n  first: --timeout, 2 s, was reached\n", block(done.stderr)
    )


def test_ranks_that_never_start(cluster2: Cluster) -> None:
    """--join-timeout fails the job and names the nodes whose ranks were not there."""
    hanging = cluster2.new_folder("hang") / "torch" / "distributed"
    hanging.mkdir(parents=True)
    for path in (hanging.parent / "__init__.py", hanging / "__init__.py"):
        path.touch()
    (hanging / "run.py").write_text("import time\ntime.sleep(1000)\n")
    env = {"OUT": str(cluster2.new_folder("out")), "PYTHONPATH": str(jobs.FAKE_TORCH)}
    nodes = {"h01": {"env": {"PYTHONPATH": str(hanging.parents[1])}}}
    hosts_file = cluster2.hosts_toml(defaults={"env": env}, nodes=nodes)
    script = jobs.write_script(cluster2, endings.POLITE)
    options = ["--no-preflight", "--join-timeout", "2", "--grace", "2"]
    done = jobs.run(cluster2.login, hosts_file, options, script)
    assert_clean(cluster2)
    assert done.returncode == done.receipt["exit_code"] == 1
    assert outcomes(done.receipt) == [STOPPED, STOPPED]
    assert done.receipt["cause"]["kind"] == "join_timeout"
    expected = "first: within --join-timeout, 2 s, not all ranks had started on h01\n"
    assert expected in block(done.stderr)
