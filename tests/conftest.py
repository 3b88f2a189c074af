"""The rings that this machine can run, clusters for tests, and the check that a test leaves nothing behind."""

from __future__ import annotations

import functools
import importlib.util
import os
import shutil
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support import cluster as clusters
from tests.support import leaks, netns, slurm, sshd
from tests.support.cluster import Cluster

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    ClusterFactory = Callable[..., Cluster]


@functools.cache
def _missing_for(ring: str) -> str:
    """Why this machine cannot run a ring's tests, or ""."""
    if ring == "torch":
        return "" if importlib.util.find_spec("torch") else "torch is not installed"
    if ring == "nft":
        return "" if shutil.which("nft", path=netns.SYSTEM_PATH) else "`nft` is missing"
    if ring == "slurm":
        return slurm.missing()
    reasons = netns.missing()
    if not Path(sshd.SSHD).exists():
        reasons.append(f"{sshd.SSHD} is missing")
    return ", ".join(reasons)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip the tests of a ring that is missing here; fail them where GPULAYER_REQUIRE names the ring."""
    required = os.environ.get("GPULAYER_REQUIRE", "").replace(",", " ").split()
    for ring in ("ssh", "torch", "nft", "slurm"):
        reason = _missing_for(ring) if item.get_closest_marker(ring) else ""
        if reason and ring in required:
            pytest.fail(f"GPULAYER_REQUIRE has `{ring}`, but: {reason}", pytrace=False)
        if reason:
            pytest.skip(f"ring `{ring}`: {reason}")


@pytest.fixture(scope="session", autouse=True)
def own_leases(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Jobs of this test run are no matter of another one's on this machine: their maps name the same nodes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GPULAYER_LEASES", str(tmp_path_factory.mktemp("leases")))
        yield


@pytest.fixture(autouse=True)
def nothing_left_here(request: pytest.FixtureRequest) -> Iterator[None]:
    """An ssh test leaves no child process, pipe or socket of the test run behind."""
    if not request.node.get_closest_marker("ssh"):
        yield
        return
    before = leaks.Belongings.now(clusters.RUNNING)
    yield
    left = leaks.Belongings.now(clusters.RUNNING).left_since(before)
    assert not left, f"left by the test: {left}"


@contextmanager
def _clean_after(cluster: Cluster) -> Iterator[Cluster]:
    """Once the test is over, check that no process of a job is left on a host; then make the cluster as new."""
    yield cluster
    left = leaks.left_behind(cluster)
    cluster.reset()
    assert not left, f"left by the test: {left}"


@pytest.fixture(scope="module")
def module_cluster2() -> Iterator[Cluster]:
    """Two hosts for a module."""
    with Cluster(2) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def module_cluster4() -> Iterator[Cluster]:
    """Four hosts for a module."""
    with Cluster(4) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def module_cluster8() -> Iterator[Cluster]:
    """Eight hosts for a module."""
    with Cluster(8) as cluster:
        yield cluster


@pytest.fixture
def cluster2(module_cluster2: Cluster) -> Iterator[Cluster]:
    """Two hosts, as new; a module's tests share them one after the other."""
    with _clean_after(module_cluster2):
        yield module_cluster2


@pytest.fixture
def cluster4(module_cluster4: Cluster) -> Iterator[Cluster]:
    """Four hosts, as new; a module's tests share them one after the other."""
    with _clean_after(module_cluster4):
        yield module_cluster4


@pytest.fixture
def cluster8(module_cluster8: Cluster) -> Iterator[Cluster]:
    """Eight hosts, as new; a module's tests share them one after the other."""
    with _clean_after(module_cluster8):
        yield module_cluster8


@pytest.fixture
def make_cluster() -> Iterator[ClusterFactory]:
    """`make_cluster(70)`, `make_cluster(2, sshd_options=["MaxStartups 3:100:3"])`: a cluster for this test alone."""
    with ExitStack() as stack:

        def make(size: int, *, sshd_options: Sequence[str] = ()) -> Cluster:
            cluster = stack.enter_context(Cluster(size, sshd_options=sshd_options))
            return stack.enter_context(_clean_after(cluster))

        yield make
