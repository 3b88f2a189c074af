"""gpulayer itself is gone: the job ends everywhere, by itself."""

from __future__ import annotations

import signal
import time
from typing import TYPE_CHECKING

import pytest

from tests.support import endings, jobs
from tests.support.endings import Watched, assert_clean

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.support.cluster import Cluster
    from tests.support.jobs import LiveRun

pytestmark = pytest.mark.ssh


@pytest.fixture(autouse=True)
def neighbours(cluster4: Cluster) -> Iterator[None]:
    """Processes on every host that must outlive the test."""
    with endings.bystanders(cluster4):
        yield


def _launch(
    cluster: Cluster, options: list[str], source: str = endings.STUBBORN, *, user: str = "root"
) -> tuple[LiveRun, Path]:
    folder = cluster.new_folder("out")
    hosts_file = jobs.map_with_fake_torch(cluster, env={"OUT": str(folder), "SECRETIVE": "1"})
    login = cluster.login if user == "root" else cluster.walker
    return jobs.launch(login, hosts_file, options, jobs.write_script(cluster, source)), folder


def _wait_running(cluster: Cluster, live: LiveRun, daemons: int = 8) -> None:
    live.wait_for_event("stage_reached", stage="running")
    endings.wait_stubborn(cluster, daemons).close()


@pytest.mark.parametrize("user", ["root", "walker"])
def test_sigkill_to_gpulayer(cluster4: Cluster, user: str) -> None:
    """Every host ends its part by itself within 3 s (grace 1 s), daemons with an empty environment included."""
    live, _ = _launch(cluster4, ["--grace", "1"], user=user)
    with live:
        _wait_running(cluster4, live)
        watched = Watched.of(cluster4)
        killed_at = time.monotonic()
        live.process.kill()
        gone_at = watched.wait_gone()
        assert live.finish().returncode == -signal.SIGKILL
    assert_clean(cluster4, kept_on=cluster4.hosts)
    print(f"gpulayer killed, {user}: gone {gone_at - killed_at:.3f} s after it")
    assert gone_at - killed_at < 3
