"""What the login node lacks: room or permission for the run directory, or open files. Told before, or survived."""

from __future__ import annotations

import os
import re
import shutil
import signal
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from gpulayer.logs import RunPaths
from tests.support import endings
from tests.support.endings import assert_clean, block, outcomes
from tests.support.faults import LOST_BUT_CLEAN, STOPPED, SUCCEEDED
from tests.support.flood import FLOOD
from tests.support.jobs import launch, map_with_fake_torch, run, write_script
from tests.support.stages import collected
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.conftest import ClusterFactory
    from tests.faults.conftest import Row
    from tests.support.cluster import Cluster
    from tests.support.jobs import Finished

pytestmark = pytest.mark.ssh

MEGABYTES = 3
LEAVE = "import os\nopen(os.environ['GPULAYER_OUTPUT_DIR'] + '/big', 'wb').write(bytes(3_000_000))\n"
SPEAK = "import os\nprint('out of', os.environ['RANK'])\n"
# Silence until it is told to go on, then a line.
HOLD_AND_SPEAK = f"{endings.BEGIN}note(f'ready{{rank}}')\nwait_for('go')\nprint('late')\n"
INCOMPLETE = r"gpulayer: job \S+ succeeded, but its logs are incomplete, after [\d.]+ s, exit code 6\n"


class Disk:
    """A small disk that only the login node sees, at `path` there; `seen` is the same folder from here."""

    def __init__(self, cluster: Cluster, size: str) -> None:
        self.path = cluster.new_folder("disk")
        self.seen = Path(f"/proc/{cluster.login_pid}/root{self.path}")
        self._cluster = cluster
        self.mount("-t", "tmpfs", "-o", f"size={size},mode=1777", "tmpfs")

    def mount(self, *words: str) -> None:
        """Mount it, or mount it otherwise."""
        self._cluster.login.run(["mount", "-n", *words, str(self.path)], check=True)


@pytest.fixture
def disk(request: pytest.FixtureRequest, cluster2: Cluster) -> Iterator[Disk]:
    """A disk of the size that the test names."""
    disk = Disk(cluster2, request.param)
    yield disk
    cluster2.login.run(["umount", "-n", "-l", str(disk.path)], check=True)


def _connections(cluster: Cluster) -> list[str]:
    """What the SSH servers have written: a line at least for each connection."""
    return [host.sshd_log.read_text() for host in cluster.hosts]


def _refused(cluster: Cluster, done: Finished, before: list[str]) -> str:
    """Check that nothing was contacted, started or left; return what was said."""
    assert done.returncode == 2, done.stderr
    assert (done.stdout, done.receipt, done.events) == ("", {}, [])
    assert _connections(cluster) == before
    assert_clean(cluster)
    return done.stderr


@pytest.mark.fault("the disk under the run directory full while the outputs are collected")
@pytest.mark.parametrize("disk", ["1m"], indirect=True)
def test_the_disk_is_full_while_outputs_are_collected(cluster2: Cluster, disk: Disk, row: Row) -> None:
    """Told once; no half of a file stays here, so that the receipt has room; all of them stay on the nodes."""
    script = write_script(cluster2, LEAVE)
    options = ["--run-dir", str(disk.path / "run")]
    with launch(cluster2.login, map_with_fake_torch(cluster2), options, script) as live:
        live.run_dir = disk.seen / "run"
        done = live.finish()
    assert done.returncode == done.receipt["exit_code"] == 6, done.stderr
    assert outcomes(done.receipt) == [SUCCEEDED, SUCCEEDED]
    told = [line for line in done.stderr.splitlines() if "No space left on device" in line]
    assert 1 <= len(told) == len(set(told)) <= 2  # the outputs, and a log where that was to be written just then
    assert collected(done.run_dir) == []
    assert re.search(
        r"job \S+ succeeded, but not all its outputs came back, after [\d.]+ s, exit code 6\n", done.stderr
    )
    for node in done.receipt["nodes"]:
        assert node["outputs"]["problems"][0].endswith(": not brought back, since nothing can be written here")
    assert_clean(cluster2, kept_on=cluster2.hosts)
    row.says(
        "exit 6; `outputs that did not come back: h[00-01]: big: not brought back, since nothing can be written here`"
    )


@pytest.mark.fault("the disk under the run directory full while the job runs")
@pytest.mark.parametrize("disk", ["1m"], indirect=True)
def test_the_disk_is_full_while_the_job_runs(cluster2: Cluster, disk: Disk, row: Row) -> None:
    """The job goes on; the loss is told once, counted in the receipt, which has its room, and gives exit code 6."""
    script = write_script(cluster2, FLOOD)
    options = ["--run-dir", str(disk.path / "run")]
    with launch(cluster2.login, map_with_fake_torch(cluster2), options, script, [str(MEGABYTES)]) as live:
        live.run_dir = disk.seen / "run"
        done = live.finish()
    assert_clean(cluster2)
    assert done.returncode == done.receipt["exit_code"] == 6, done.stderr
    assert outcomes(done.receipt) == [SUCCEEDED, SUCCEEDED]
    assert done.receipt["cause"] is None
    written = sum(len(done.log(rank, rank)) for rank in (0, 1))
    assert 0 < written < 1 << 20
    assert done.receipt["lost_log_bytes"] >= 2 * MEGABYTES * 1_000_000 - written
    told = r"gpulayer: .*cannot write \S+: No space left on device; the job goes on, but its logs miss bytes\n"
    assert len(re.findall(told, done.stderr)) == done.stderr.count("cannot write") == 1
    assert re.match(INCOMPLETE, block(done.stderr))
    assert block(done.stderr).endswith(f"  logs: {disk.path}/run, incomplete\n")
    assert done.stdout.count("\n") > 0
    row.says("exit 6; `cannot write FILE: No space left on device; the job goes on, but its logs miss bytes`")


@pytest.mark.fault("the run directory removed while the job runs")
def test_the_run_directory_is_removed_while_the_job_runs(cluster2: Cluster, row: Row) -> None:
    """The job goes on and ends well; not even the receipt can be kept, and exit code 6 says so."""
    out = cluster2.new_folder("out")
    script = write_script(cluster2, HOLD_AND_SPEAK)
    with launch(cluster2.login, map_with_fake_torch(cluster2, env={"OUT": str(out)}), [], script) as live:
        live.wait_for_event("stage_reached", stage="running")
        endings.wait_ready(out, 2)
        shutil.rmtree(live.run_dir)
        (out / "go").touch()
        done = live.finish()
    assert_clean(cluster2)
    assert (done.returncode, done.receipt) == (6, {}), done.stderr
    assert sorted(done.stdout.splitlines()) == ["[0] late", "[1] late"]
    assert len(re.findall(r"cannot write \S+: No such file or directory; the job goes on", done.stderr)) == 1
    assert re.search(r"gpulayer: cannot write \S+/receipt.json: No such file or directory\n", done.stderr)
    assert re.match(INCOMPLETE, block(done.stderr))
    row.says("exit 6; `cannot write DIR/receipt.json: No such file or directory`")


@pytest.mark.fault("the disk under the run directory full before the start")
@pytest.mark.parametrize("disk", ["8k"], indirect=True)
def test_the_disk_is_full_before_the_start(cluster2: Cluster, disk: Disk, row: Row) -> None:
    """The job is refused before anything is contacted, and leaves no run directory in the way of the next try."""
    before = _connections(cluster2)
    options = ["--run-dir", str(disk.path / "run")]
    done = run(cluster2.login, map_with_fake_torch(cluster2), options, write_script(cluster2, SPEAK))
    said = _refused(cluster2, done, before)
    assert f"gpulayer: error: cannot use the run directory {disk.path}/run: No space left on device" in said
    assert "hint: name a directory that you can write to with `--run-dir DIR`" in said
    assert list(disk.seen.iterdir()) == []
    row.says("exit 2; `cannot use the run directory DIR: No space left on device`")


@pytest.mark.fault("the run directory on a disk that is read-only")
@pytest.mark.parametrize("disk", ["1m"], indirect=True)
def test_the_disk_is_read_only(cluster2: Cluster, disk: Disk, row: Row) -> None:
    """The job is refused before anything is contacted."""
    before = _connections(cluster2)
    disk.mount("-o", "remount,ro")
    options = ["--run-dir", str(disk.path / "run")]
    done = run(cluster2.login, map_with_fake_torch(cluster2), options, write_script(cluster2, SPEAK))
    said = _refused(cluster2, done, before)
    assert f"gpulayer: error: cannot use the run directory {disk.path}/run: Read-only file system" in said
    row.says("exit 2; `cannot use the run directory DIR: Read-only file system`")


@pytest.mark.fault("the run directory not writable")
def test_the_run_directory_is_not_writable(cluster2: Cluster, row: Row) -> None:
    """An ordinary user's job in a folder of root's is refused before anything is contacted."""
    before = _connections(cluster2)
    runs = cluster2.walker.home / "runs"
    runs.mkdir(mode=0o755)
    try:
        done = run(cluster2.walker, map_with_fake_torch(cluster2), [], write_script(cluster2, SPEAK))
    finally:
        runs.rmdir()
    said = _refused(cluster2, done, before)
    assert re.search(r"gpulayer: error: cannot use the run directory \S+/runs/\S+: Permission denied", said)
    row.says("exit 2; `cannot use the run directory DIR: Permission denied`")


def _limit(soft: int, hard: int) -> list[str]:
    return ["prlimit", f"--nofile={soft}:{hard}"]


@pytest.mark.fault("a hard limit of 64 open files with 70 nodes")
def test_too_few_open_files_are_allowed(cluster2: Cluster, row: Row) -> None:
    """The job is refused before anything is contacted, with the limit and what it would need; `check` says the same."""
    before = _connections(cluster2)
    hosts = map_with_fake_torch(cluster2, hosts=[])
    with hosts.open("a") as file:
        file.write('[nodes."n[01-70]"]\nssh = "10.77.9.[1-70]"\naddress = "10.77.9.[1-70]"\n')
    with launch(cluster2.login, hosts, [], "train.py", through=_limit(64, 64)) as live:
        done = live.finish()
    said = _refused(cluster2, done, before)
    assert not done.run_dir.exists()
    assert said.startswith("gpulayer: error: 70 nodes need 165 open files, and no more than 64 are allowed here\n")
    assert "\nhint: `ulimit -Hn` shows the limit; raise it " in said
    check = ["python3", "-m", "gpulayer", "check", "-H", str(hosts)]
    checked = cluster2.login.run([*_limit(64, 64), *check])
    assert (checked.returncode, checked.stderr) == (2, said)
    row.says("exit 2; `70 nodes need 165 open files, and no more than 64 are allowed here`")


@pytest.mark.slow
@pytest.mark.fault("a soft limit of 64 open files with 70 nodes")
def test_the_soft_limit_is_raised(make_cluster: ClusterFactory, row: Row) -> None:
    """gpulayer raises it as far as the hard one allows, and the job runs."""
    cluster = make_cluster(70)
    hosts, script = map_with_fake_torch(cluster), write_script(cluster, SPEAK)
    with launch(cluster.login, hosts, [], script, through=_limit(64, 4096)) as live:
        done = live.finish(100)
    assert_clean(cluster)
    assert done.returncode == 0, done.stderr
    assert outcomes(done.receipt) == [SUCCEEDED] * 70
    assert [done.log(rank, rank) for rank in range(70)] == [b"out of %d\n" % rank for rank in range(70)]
    row.says("exit 0; `job JOB succeeded`")


@pytest.mark.fault("fewer open files allowed than the job has streams of output, and a node's supervisor killed")
def test_fewer_open_files_than_streams(cluster2: Cluster, row: Row) -> None:
    """Files are closed and opened again, every byte is there, and the one that a new login needs is not used up."""
    turns = "for turn in range(3):\n    for name, file in (('out', sys.stdout), ('err', sys.stderr)):\n"
    source = f"{endings.BEGIN}{turns}        print(name, rank, turn, file=file, flush=True)\n    time.sleep(0.2)\n"
    source += "note(f'ready{rank}')\nwait_for('go')\n"
    out, script = cluster2.new_folder("out"), write_script(cluster2, source)
    hosts = map_with_fake_torch(cluster2, defaults={"gpus": 8}, env={"OUT": str(out)})
    expected = "".join(f"out {turn}\n" for turn in range(3))

    def arrived(rank: int) -> bool:
        paths = [RunPaths(live.run_dir).output(rank // 8, rank, stream) for stream in ("stdout", "stderr")]
        texts = [path.read_text().replace(f" {rank} ", " ") if path.exists() else "" for path in paths]
        return texts == [expected, expected.replace("out", "err")]

    with launch(cluster2.login, hosts, ["--grace", "1"], script, through=_limit(36, 36)) as live:
        endings.wait_ready(out, 16)
        wait_until(lambda: all(arrived(rank) for rank in range(16)), "all that was written is in the files")
        watched = endings.Watched.of(cluster2)
        row.begins()
        os.kill(endings.supervisor_of(live, cluster2, 1), signal.SIGKILL)
        row.clean(watched.wait_gone())
        done = live.finish()
    assert_clean(cluster2, kept_on=[cluster2.hosts[1]])
    assert done.returncode == 4, done.stderr
    assert outcomes(done.receipt) == [STOPPED, LOST_BUT_CLEAN]
    assert done.receipt["lost_log_bytes"] == 0
    row.says("exit 4; `node 1 (h01) was lost: its supervisor died`, `verified clean`")
