"""The code brought to hosts that share no file system: the job finds it in each one's own /tmp."""

from __future__ import annotations

import os
import re
import shutil
import signal
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

from tests.support.bad_lines import narrow_to
from tests.support.bundles import PACKAGE, STORE, kept_on, write_tree
from tests.support.endings import assert_clean
from tests.support.jobs import launch, map_with_fake_torch, run
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.support.cluster import Cluster
    from tests.support.host import Host
    from tests.support.jobs import Finished, LiveRun

pytestmark = pytest.mark.ssh

# Fails where somebody has left something in its folder, and leaves something.
SELFISH = """
import os, pathlib
print("found", *sorted(os.listdir()))
pathlib.Path("left-behind").write_text("x")
pathlib.Path("steps/second.py").write_text("NUMBER = 0")
"""
NOISE_BYTES = 6_000_000  # far more than what is under way at a time, 2 MiB
NARROW = "16mbit"  # 2 MB a second


@pytest.fixture
def project(cluster2: Cluster) -> Iterator[Path]:
    """A folder in root's home on the login node with a package of two modules; hosts that have no bundle yet."""
    folder = cluster2.login.home / "project"
    shutil.rmtree(folder, ignore_errors=True)
    for host in cluster2.hosts:
        shutil.rmtree(host.path(f"/root/{STORE}"), ignore_errors=True)
    yield write_tree(folder, dict(PACKAGE))
    shutil.rmtree(folder)


def _sent(done: Finished) -> list[int]:
    """What was sent to each node, in node order."""
    events = sorted(done.named("bundle_ready"), key=lambda event: int(event["node_rank"]))
    return [event["sent_bytes"] for event in events]


def _notice(done: Finished) -> str:
    (text,) = [event["text"] for event in done.named("notice") if event["text"].startswith("bundle of")]
    return str(text)


@pytest.mark.torch
def test_torchrun_finds_a_bundled_package_on_hosts_without_it(cluster2: Cluster, project: Path) -> None:
    """One module imports the other on both hosts, from each one's own copy; a second run sends nothing at all."""
    (project / "train.py").write_text(PACKAGE["train.py"] + "import steps.second\nprint(steps.second.__file__)\n")
    hosts_file = cluster2.hosts_toml(defaults={"workdir": "/nowhere"})
    options = ["--bundle", "project", "--backend", "gloo"]
    first = run(cluster2.login, hosts_file, options, "train.py")
    assert first.returncode == 0, first.stderr
    for node_rank in (0, 1):
        folder = f"/tmp/gpulayer-{first.run_dir.name}-n{node_rank}/work"
        assert first.log(node_rank, node_rank) == f"answer 42\n{folder}/steps/second.py\n".encode()
    assert _notice(first).startswith("bundle of 4 files, ")
    assert len(set(_sent(first))) == 1
    assert 100 < _sent(first)[0] < 3000
    second = run(cluster2.login, hosts_file, options, "train.py")
    assert second.returncode == 0, second.stderr
    assert _sent(second) == [0, 0]
    assert _notice(second).endswith(": nothing sent, the nodes have it")
    assert _notice(second) in second.stderr
    assert not [event for event in second.named("stage_reached") if event["stage"] == "sending"]
    assert [len(kept_on(host)) for host in cluster2.hosts] == [1, 1]
    assert_clean(cluster2)


def test_each_job_has_a_copy_of_its_own(cluster2: Cluster, project: Path) -> None:
    """What one job writes in its folder is not seen by the next one, nor is it kept; it can be had back by name."""
    (project / "train.py").write_text(SELFISH)
    hosts_file = map_with_fake_torch(cluster2)
    for _ in range(2):
        done = run(cluster2.login, hosts_file, ["--bundle", "project", "--outputs", "left-*"], "train.py")
        assert done.returncode == 0, done.stderr
        assert [done.log(rank, rank) for rank in (0, 1)] == [b"found steps train.py\n"] * 2
        assert [(done.run_dir / f"node{rank}/outputs/left-behind").read_text() for rank in (0, 1)] == ["x"] * 2
    assert _sent(done) == [0, 0]
    assert_clean(cluster2)


def test_only_what_is_missing_is_sent(cluster2: Cluster, project: Path) -> None:
    """A host that has lost its copy gets it; a changed file is another bundle, which goes to all."""
    hosts_file = map_with_fake_torch(cluster2)
    options = ["--bundle", "project", "-C", "steps"]
    first = run(cluster2.login, hosts_file, options, "../train.py")
    assert (first.returncode, first.log(0, 0)) == (0, b"answer 42\n"), first.stderr
    shutil.rmtree(cluster2.hosts[1].path(f"/root/{STORE}"))
    second = run(cluster2.login, hosts_file, options, "../train.py")
    assert [size > 0 for size in _sent(second)] == [False, True]
    assert "sent to h01, " in _notice(second)
    (project / "steps/second.py").write_text("NUMBER = 1\n")
    third = run(cluster2.login, hosts_file, options, "../train.py")
    assert (third.returncode, third.log(1, 1)) == (0, b"answer 2\n"), third.stderr
    assert [size > 0 for size in _sent(third)] == [True, True]
    assert [len(kept_on(host)) for host in cluster2.hosts] == [2, 2]
    assert_clean(cluster2)


def test_check_brings_the_bundle_and_starts_nothing(cluster2: Cluster, project: Path) -> None:
    """The checks then find the script where the job would; the copy is gone afterwards, and is not sent again."""
    hosts_file = map_with_fake_torch(cluster2)
    argv = ["check", "-H", str(hosts_file), "--bundle", str(project), "train.py"]
    done = cluster2.login.run(["python", "-m", "gpulayer", *argv])
    assert done.returncode == 0, done.stderr
    assert "a job would run" in done.stdout
    assert [len(kept_on(host)) for host in cluster2.hosts] == [1, 1]
    assert_clean(cluster2)
    assert _sent(run(cluster2.login, hosts_file, ["--bundle", "project"], "train.py")) == [0, 0]


def test_a_home_that_cannot_be_written_refuses_the_job(cluster2: Cluster, project: Path) -> None:
    """The folder and the way out are named, for that node alone, and nothing is started."""
    cluster2.hosts[1].path("/root/.cache").mkdir(exist_ok=True)
    cluster2.hosts[1].mount("-t", "tmpfs", "-o", "ro", "tmpfs", "/root/.cache")
    done = run(cluster2.login, map_with_fake_torch(cluster2), ["--bundle", "project"], "train.py")
    assert done.returncode == 3
    assert (
        f"h01: bundles cannot be kept in /root/{STORE}: Read-only file system\n"
        "hint: make that folder one that can be written, with room in it; or have logins there set XDG_CACHE_HOME to"
        " another\n"
    ) in done.stderr
    assert [one["node_id"] for one in done.receipt["refused"]] == ["h01"]
    assert done.named("command_started") == []
    assert_clean(cluster2)


# --- stopped on the way ---------------------------------------------------------------------------------------------


@contextmanager
def _half_sent(cluster: Cluster, project: Path, *options: str) -> Iterator[LiveRun]:
    """A run whose bundle is half on its way to both hosts, over lines that are slow for so long."""
    (project / "noise").write_bytes(os.urandom(NOISE_BYTES))
    hosts_file = map_with_fake_torch(cluster)
    with (
        narrow_to(cluster, cluster.hosts, NARROW),
        launch(cluster.login, hosts_file, ["--bundle", "project", *options], "train.py") as live,
    ):
        live.wait_for_event("stage_reached", stage="sending")
        wait_until(lambda: all(_part_bytes(host) > 300_000 for host in cluster.hosts), "it is half there")
        yield live


def _part_bytes(host: Host) -> int:
    folder = host.path(f"/root/{STORE}")
    return max((path.stat().st_size for path in folder.glob("*.part")), default=0) if folder.is_dir() else 0


def _works_then(cluster: Cluster, project: Path) -> None:
    """A new run sends the bundle anew, and its ranks see all of it."""
    (project / "train.py").write_text("import os\nprint(os.path.getsize('noise'))\n")
    done = run(cluster.login, map_with_fake_torch(cluster), ["--bundle", "project"], "train.py")
    assert done.returncode == 0, done.stderr
    assert [done.log(rank, rank) for rank in (0, 1)] == [f"{NOISE_BYTES}\n".encode()] * 2
    assert all(size > NOISE_BYTES for size in _sent(done))
    assert_clean(cluster)


def test_an_interrupt_while_sending_leaves_nothing_half(cluster2: Cluster, project: Path) -> None:
    """Ctrl-C ends it with 130; no node keeps a part, and a new run works."""
    with _half_sent(cluster2, project) as live:
        live.interrupt(signal.SIGINT)
        done = live.finish(20)
    assert done.returncode == 130, done.stderr
    wait_until(lambda: [kept_on(host) for host in cluster2.hosts] == [[], []], "no part is left")
    assert_clean(cluster2)
    _works_then(cluster2, project)


def test_a_launcher_killed_while_sending_leaves_nothing_half(cluster2: Cluster, project: Path) -> None:
    """SIGKILL on the login node: the nodes notice, remove what they have, and a new run works."""
    with _half_sent(cluster2, project) as live:
        live.interrupt(signal.SIGKILL)
        assert live.finish(20).returncode == -signal.SIGKILL
    wait_until(lambda: [kept_on(host) for host in cluster2.hosts] == [[], []], "no part is left", timeout_s=30)
    assert_clean(cluster2)
    _works_then(cluster2, project)


def test_a_cable_cut_while_sending_refuses_that_node(cluster2: Cluster, project: Path) -> None:
    """The node is given up within `--lost-after`, and removes its half; the other one keeps its bundle."""
    with _half_sent(cluster2, project, "--lost-after", "2", "--preflight-timeout", "2") as live:
        cluster2.hosts[1].cut()
        received = _part_bytes(cluster2.hosts[1])
        began_s = time.monotonic()
        done = live.finish(40)
    assert time.monotonic() - began_s < 30
    assert done.returncode == 3, done.stderr
    taken = re.search(r"h01: nothing of the bundle was taken for 2 s, after ([\d.]+) MB of 6.0 MB\n", done.stderr)
    assert taken, done.stderr
    assert float(taken[1]) < received / 1e6 + 2.5  # 2 MiB are under way, and no more
    assert [one["node_id"] for one in done.receipt["refused"]] == ["h01"]
    assert done.named("command_started") == []
    assert [name.endswith(".tar") for name in kept_on(cluster2.hosts[0])] == [True]
    wait_until(lambda: kept_on(cluster2.hosts[1]) == [], "no part is left")
    cluster2.hosts[1].heal()
    assert_clean(cluster2)
    _works_then(cluster2, project)
