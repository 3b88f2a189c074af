"""What a job leaves on hosts that share no file system comes back: where it succeeds, fails, is stopped or cut off."""

from __future__ import annotations

import os
import re
import signal
from hashlib import sha256
from typing import TYPE_CHECKING

import pytest

from tests.support import bad_lines, endings, jobs
from tests.support.endings import assert_clean, block, outcomes
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.cluster import Cluster
    from tests.support.jobs import Finished, LiveRun

pytestmark = pytest.mark.ssh

WORKDIR = "/tmp/proj"  # on each host a folder of its own
# Each rank writes 1 MB to the output folder and a file to its workdir; then it does as WHAT says.
WRITE = """
import os, sys, time
rank, out, node = os.environ["RANK"], os.environ["GPULAYER_OUTPUT_DIR"], os.environ["GPULAYER_NODE_RANK"]
os.makedirs(f"{out}/deep/er", exist_ok=True)
os.makedirs("ckpt", exist_ok=True)
for path, size in ((f"{out}/deep/er/rank{rank}.bin", 1 << 20), (f"{out}/empty-{rank}", 0), (f"ckpt/rank{rank}.pt", 9)):
    with open(path, "wb") as file:
        file.write(bytes(range(256)) * (size // 256) + b"x" * (size % 256))
with open("ckpt/other.txt", "w") as file:
    file.write("not asked for")
"""
BIG = """
import os
with open(os.environ["GPULAYER_OUTPUT_DIR"] + "/big.bin", "wb") as file:
    for number in range(MEGABYTES):
        file.write(os.urandom(1 << 20))
"""


def _launch(cluster: Cluster, options: list[str], source: str, **env: str) -> LiveRun:
    for host in cluster.hosts:
        host.path(WORKDIR).mkdir(exist_ok=True)
    hosts_file = jobs.map_with_fake_torch(cluster, env=env)
    return jobs.launch(cluster.login, hosts_file, ["-C", WORKDIR, *options], jobs.write_script(cluster, source))


def _run(cluster: Cluster, options: list[str], source: str = WRITE, **env: str) -> Finished:
    with _launch(cluster, options, source, **env) as live:
        return live.finish()


def _found(done: Finished, node_rank: int) -> dict[str, int]:
    """The outputs of a node that are here, with their sizes."""
    folder = done.run_dir / f"node{node_rank}" / "outputs"
    return {str(path.relative_to(folder)): path.stat().st_size for path in sorted(folder.rglob("*")) if path.is_file()}


def _all_of(node_rank: int) -> dict[str, int]:
    return {
        f"ckpt/rank{node_rank}.pt": 9,
        f"deep/er/rank{node_rank}.bin": 1 << 20,
        f"empty-{node_rank}": 0,
    }


def _parts(run_dir: Path) -> list[Path]:
    return list(run_dir.glob("node*/outputs.part"))


def test_outputs_come_back_from_every_node(cluster2: Cluster) -> None:
    """All of the output folder, and what patterns name of the workdir, each node's in a folder of its own."""
    done = _run(cluster2, ["--outputs", "ckpt/*.pt", "--outputs", "no/such"])
    assert_clean(cluster2)
    assert (done.returncode, outcomes(done.receipt)) == (0, [("succeeded", True)] * 2)
    for node_rank, node in enumerate(done.receipt["nodes"]):
        assert _found(done, node_rank) == _all_of(node_rank)
        said = {"files": 3, "bytes": (1 << 20) + 9, "links": 0, "problems": [], "unmatched": ["no/such"]}
        assert node["outputs"] == said
        content = (done.run_dir / f"node{node_rank}/outputs/deep/er/rank{node_rank}.bin").read_bytes()
        assert content == bytes(range(256)) * 4096
    assert _parts(done.run_dir) == []
    paths = list(done.run_dir.glob("node*/outputs/**/*"))
    assert {path.stat().st_mode & 0o777 for path in paths if path.is_file()} == {0o600}
    assert {path.stat().st_mode & 0o777 for path in paths if path.is_dir()} == {0o700}
    assert f"  outputs: 6 files, 2.1 MB, in {done.run_dir}/node*/outputs\n" in block(done.stderr)
    assert "  no node has anything that fits `--outputs no/such`\n" in block(done.stderr)


def test_a_job_without_outputs_collects_nothing(cluster2: Cluster) -> None:
    """Nobody logs in again, no folder is made, and nothing is said of outputs."""
    done = _run(cluster2, [], "print('nothing to keep')")
    assert_clean(cluster2)
    assert done.returncode == 0
    assert [node["outputs"] for node in done.receipt["nodes"]] == [None, None]
    assert "output" not in block(done.stderr)
    assert done.named("outputs_collected") == []
    assert list(done.run_dir.glob("node*/outputs")) == []


def test_outputs_of_a_job_that_failed(cluster2: Cluster) -> None:
    """The node that failed and the one that was stopped for it give theirs back; the exit code stays 1."""
    source = WRITE + "if rank == '1':\n    sys.exit(17)\nprint('written', flush=True)\ntime.sleep(100)\n"
    done = _run(cluster2, ["--grace", "5", "--outputs", "ckpt/rank*"], source)
    assert_clean(cluster2)
    assert (done.returncode, outcomes(done.receipt)) == (1, [("stopped", True), ("failed", True)])
    assert done.receipt["cause"]["code"] == 17
    assert _found(done, 1) == _all_of(1)
    assert set(_found(done, 0)) <= set(_all_of(0))  # it may have been stopped before it had written all
    assert [node["outputs"]["problems"] for node in done.receipt["nodes"]] == [[], []]


def test_outputs_of_a_node_that_was_lost(cluster2: Cluster) -> None:
    """A node whose supervisor was killed can be reached again: its outputs come back, its logs stay there."""
    source = WRITE + "print('written', flush=True)\nopen(os.environ['OUT'] + '/ready' + rank, 'w')\ntime.sleep(100)\n"
    folder = cluster2.new_folder("out")
    with _launch(cluster2, ["--grace", "1", "--outputs", "ckpt/rank*"], source, OUT=str(folder)) as live:
        endings.wait_ready(folder, 2)
        live.wait_for_event("stage_reached", stage="running")
        os.kill(endings.supervisor_of(live, cluster2, 1), signal.SIGKILL)
        done = live.finish()
    assert (done.returncode, outcomes(done.receipt)) == (4, [("stopped", True), ("lost", True)])
    assert [_found(done, 0), _found(done, 1)] == [_all_of(0), _all_of(1)]
    kept = done.receipt["nodes"][1]["kept_on_node"]
    assert sorted(path.name for path in cluster2.hosts[1].path(kept).iterdir()) == [
        "command.stderr.log",
        "command.stdout.log",
        "ranks",
    ]
    assert_clean(cluster2, kept_on=[cluster2.hosts[1]])


def test_a_connection_that_breaks_is_made_again_and_the_file_goes_on(cluster2: Cluster) -> None:
    """What has come is not sent again, and the whole file is what the rank wrote."""
    source = BIG.replace("MEGABYTES", "6") + (
        "from hashlib import sha256\n"
        "data = open(os.environ['GPULAYER_OUTPUT_DIR'] + '/big.bin', 'rb').read()\n"
        "print(sha256(data).hexdigest())\n"
    )
    far = cluster2.hosts[1]
    with bad_lines.narrow(far, "16mbit"), _launch(cluster2, ["--grace", "5"], source) as live:
        _wait_coming(live)
        far.restart_sshd(drop_sessions=True)
        live.wait_for_event("notice", node_ranks=[1])
        done = live.finish()
    assert_clean(cluster2)
    assert (done.returncode, outcomes(done.receipt)) == (0, [("succeeded", True)] * 2)
    for node_rank in (0, 1):
        data = (done.run_dir / f"node{node_rank}/outputs/big.bin").read_bytes()
        assert sha256(data).hexdigest() == done.log(node_rank, node_rank).decode().strip()
    assert "logging in again for the outputs" in done.stderr
    assert done.named("collecting_progress")[-1]["received_bytes"] == 2 * (6 << 20)


@pytest.mark.slow
def test_a_node_that_stays_away_costs_its_outputs_alone(cluster2: Cluster) -> None:
    """The cable is cut while they come in, for longer than the grace: exit 6, no half of a file, the folder named."""
    far = cluster2.hosts[1]
    options = ["--grace", "1", "--lost-after", "2", "--connect-timeout", "2"]
    with bad_lines.narrow(far, "16mbit"), _launch(cluster2, options, BIG.replace("MEGABYTES", "12")) as live:
        _wait_coming(live)
        far.cut()
        done = live.finish()
        far.heal()
    assert (done.returncode, outcomes(done.receipt)) == (6, [("succeeded", True)] * 2)
    assert _found(done, 0) == {"big.bin": 12 << 20}
    assert (_found(done, 1), _parts(done.run_dir)) == ({}, [])
    kept = done.receipt["nodes"][1]["kept_on_node"]
    assert far.path(f"{kept}/outputs/big.bin").stat().st_size == 12 << 20
    assert re.search(r"succeeded, but not all its outputs came back, after [\d.]+ s, exit code 6\n", block(done.stderr))
    assert re.search(r"  outputs that did not come back:\n    h01: big.bin: not brought back, ", block(done.stderr))
    assert f"    output that did not arrive is on h01 in {kept}\n" in block(done.stderr)
    wait_until(lambda: not far.strays(), "the supervisor there has given up", timeout_s=80)
    assert_clean(cluster2, kept_on=[far])


def test_more_than_is_wanted_stays_there(cluster2: Cluster) -> None:
    """--max-output-size counts for each node; what has no room is told, and stays on the node."""
    done = _run(cluster2, ["--max-output-size", "1MB", "--outputs", "ckpt/rank*"])
    assert done.returncode == 6
    assert [_found(done, rank) for rank in (0, 1)] == [
        {f"ckpt/rank{rank}.pt": 9, f"empty-{rank}": 0} for rank in (0, 1)
    ]
    why = "more than --max-output-size, 1.0 MB, has room for"
    assert f"    h00: deep/er/rank0.bin: {why}\n    h01: deep/er/rank1.bin: {why}\n" in block(done.stderr)
    assert f"    output that did not arrive is on h[00-01] in /tmp/gpulayer-{done.run_dir.name}-n*\n" in done.stderr
    assert_clean(cluster2, kept_on=cluster2.hosts)


LINKS = """
import os
out = os.environ["GPULAYER_OUTPUT_DIR"]
open(out + "/real", "w").write("real")
os.symlink("real", out + "/same")
os.symlink("/etc/passwd", out + "/out")
os.symlink("/etc", out + "/folder")
os.mkfifo(out + "/pipe")
open(out + "/new\\nline", "w").write("n")
open(os.fsencode(out) + b"/byte\\xff", "w").write("b")
"""


def test_what_is_no_file_is_told_and_not_followed(cluster2: Cluster) -> None:
    """A link that leads out, a pipe, a name with a new line: not here. Other bytes in a name are kept."""
    done = _run(cluster2, ["-N", "1"], LINKS)
    assert done.returncode == 6
    folder = done.run_dir / "node0/outputs"
    assert sorted(path.name for path in folder.iterdir()) == ["byte\udcff", "real"]
    problems = done.receipt["nodes"][0]["outputs"]["problems"]
    assert problems == [
        "folder, out: a link that is not followed",
        "pipe: no regular file",
        "new\ufffdline: cannot have such a name here",
    ]
    assert done.receipt["nodes"][0]["outputs"]["links"] == 1
    assert_clean(cluster2, kept_on=[cluster2.hosts[0]])


def _wait_coming(live: LiveRun) -> None:
    """Wait until a good part of the far host's file has come, but by no means all."""
    part = live.run_dir / "node1/outputs.part/1"
    wait_until(lambda: part.exists() and part.stat().st_size > 1 << 20, "a part of the file is here", timeout_s=40)


def test_outputs_of_a_job_that_was_stopped(cluster2: Cluster) -> None:
    """After Ctrl-C the nodes end their part, and what they had written comes back; the exit code says what it was."""
    folder = cluster2.new_folder("out")
    source = WRITE + "open(os.environ['OUT'] + '/ready' + rank, 'w')\ntime.sleep(100)\n"
    with _launch(cluster2, ["--outputs", "ckpt/rank*"], source, OUT=str(folder)) as live:
        endings.wait_ready(folder, 2)
        live.wait_for_event("stage_reached", stage="running")
        live.interrupt()
        done = live.finish()
    assert_clean(cluster2)
    assert (done.returncode, outcomes(done.receipt)) == (130, [("stopped", True)] * 2)
    assert [_found(done, 0), _found(done, 1)] == [_all_of(0), _all_of(1)]


def test_outputs_of_a_bundle(cluster2: Cluster) -> None:
    """The working directory is in the job's folder then: patterns name files of it, and all of it is gone after."""
    code = cluster2.login.home / "code"
    code.mkdir(exist_ok=True)
    (code / "train.py").write_text("open('made.txt', 'w').write('made')\n")
    hosts_file = jobs.map_with_fake_torch(cluster2)
    with jobs.launch(cluster2.login, hosts_file, ["--bundle", str(code), "--outputs", "*.txt"], "train.py") as live:
        done = live.finish()
    assert_clean(cluster2)
    assert done.returncode == 0, done.stderr
    assert [_found(done, 0), _found(done, 1)] == [{"made.txt": 4}, {"made.txt": 4}]
