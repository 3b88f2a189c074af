"""SIGKILL to gpulayer in every stage: the nodes end their part by themselves; what was written until then stands."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

import pytest

from tests.support import endings
from tests.support.endings import assert_clean, outcomes
from tests.support.stages import LEFT_BYTES, MUCH_BYTES, STAGES, collected

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.faults.conftest import Row
    from tests.support.cluster import Cluster
    from tests.support.jobs import Finished

pytestmark = pytest.mark.ssh

GRACE_S = 4.0  # of which the kill must come within, where a job is being ended
STARTED = ("while starting", "while running", "while a failed job is ended")
SAYS = "nothing, gpulayer is gone; exit 137 in a shell"


@pytest.fixture(autouse=True)
def neighbours(cluster2: Cluster) -> Iterator[None]:
    """Processes on every host that must outlive the test."""
    with endings.bystanders(cluster2):
        yield


def _kill(cluster: Cluster, row: Row, name: str) -> Finished:
    """Hold a job in this stage, kill gpulayer, and wait until nothing of the job is left on a host."""
    with STAGES[name](cluster, cluster.hosts, GRACE_S) as held:
        held.wait()
        watched = endings.Watched.of(cluster)
        row.begins()
        held.live.interrupt(signal.SIGKILL)
        done = held.live.finish()
        gone_at = watched.wait_gone() if watched.processes else None
    assert done.returncode == -signal.SIGKILL
    if gone_at:
        row.clean(gone_at)
    row.says(SAYS)
    return done


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.fault(f"SIGKILL to gpulayer {name}"))
        for name in STAGES
        if name not in ("while the last output comes in", "while the outputs are collected", "while the end is told")
    ],
)
def test_in_every_stage(cluster2: Cluster, row: Row, name: str) -> None:
    """No process of the job is left on any host, only output that may not have arrived; no receipt claims otherwise."""
    done = _kill(cluster2, row, name)
    kept_on = [host for host in cluster2.hosts if name in STARTED and endings.folders(host)]
    assert_clean(cluster2, kept_on=kept_on)
    assert done.receipt == {}
    assert done.run_dir.exists() == (name != "while reading the map")
    assert [event["event"] for event in done.events[:1]] == (["run"] if done.run_dir.exists() else [])


@pytest.mark.fault("SIGKILL to gpulayer while the last output comes in")
def test_while_the_last_output_comes_in(cluster2: Cluster, row: Row) -> None:
    """The node keeps what could not be sent, all of it."""
    done = _kill(cluster2, row, "while the last output comes in")
    (folder,) = endings.folders(cluster2.hosts[1])
    logs = list(folder.glob("ranks/*/attempt_0/0/stdout.log"))
    assert [path.stat().st_size for path in logs] == [MUCH_BYTES]
    assert_clean(cluster2, kept_on=[cluster2.hosts[1]])
    assert done.receipt == {}
    assert 0 < len(done.log(1, 1)) < MUCH_BYTES


@pytest.mark.fault("SIGKILL to gpulayer while the outputs are collected")
def test_while_the_outputs_are_collected(cluster2: Cluster, row: Row) -> None:
    """Nothing half-written has its name, and the node keeps what was not brought back, all of it."""
    done = _kill(cluster2, row, "while the outputs are collected")
    (folder,) = endings.folders(cluster2.hosts[1])
    assert (folder / "outputs/left.bin").stat().st_size == LEFT_BYTES
    assert_clean(cluster2, kept_on=[cluster2.hosts[1]])
    assert done.receipt == {}
    assert collected(done.run_dir) == ["node0/outputs/left.bin", "node1/outputs.part/1"]
    assert (done.run_dir / "node1/outputs.part/1").stat().st_size < LEFT_BYTES


@pytest.mark.fault("SIGKILL to gpulayer while the end is told")
def test_while_the_end_is_told(cluster2: Cluster, row: Row) -> None:
    """The receipt was written before, and is whole."""
    done = _kill(cluster2, row, "while the end is told")
    assert_clean(cluster2)
    assert done.receipt["exit_code"] == 0
    assert outcomes(done.receipt) == [("succeeded", True)] * 2
    assert sorted(path.name for path in done.run_dir.iterdir() if path.is_file()) == [
        "events.jsonl",
        "output.jsonl",
        "plan.json",
        "receipt.json",
    ]
