"""What a test must not leave behind: processes of a job on hosts, children and open pipes of the test run."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from tests.support.cluster import Cluster
    from tests.support.procs import Process

MARKERS = ("\0GPULAYER_MARKER=", "\0GPULAYER_JOB_ID=")  # what the supervisor puts in every process of a job


def job_processes(cluster: Cluster) -> list[Process]:
    """Every process of any job that is alive on a host of the cluster now."""
    return [process for process in cluster.processes() if any(mark.encode() in process.environ for mark in MARKERS)]


def left_behind(cluster: Cluster, *, settle_s: float = 2) -> list[str]:
    """Processes of jobs on hosts, and all on the login node, that are still there after `settle_s`."""

    def leftovers() -> list[Process]:
        return [*cluster.login_processes(), *job_processes(cluster)]

    with contextlib.suppress(TimeoutError):
        wait_until(lambda: not leftovers(), "the hosts are clean", timeout_s=settle_s)
    names = {host.namespace: host.name for host in cluster.hosts}
    return [f"{names.get(p.namespace, 'login')}: pid {p.pid} ({p.state}) {' '.join(p.argv)[:200]}" for p in leftovers()]


@dataclass(frozen=True, slots=True)
class Belongings:
    """The children of this process, and its pipes and sockets as /proc names them."""

    children: frozenset[int]
    pipes: frozenset[str]

    @classmethod
    def now(cls, clusters: list[Cluster]) -> Belongings:
        """Look, leaving out what keeps these clusters up."""
        children: set[int] = set()
        for task in Path("/proc/self/task").iterdir():
            with contextlib.suppress(OSError):  # a thread that ends just now
                children |= {int(pid) for pid in (task / "children").read_text().split()}
        holders = {pid for cluster in clusters for pid in cluster.holder_pids()}
        return cls(frozenset(children - holders), frozenset(_pipes()))

    def left_since(self, before: Belongings) -> list[str]:
        """What is here and was not before, in words."""
        children = [f"child process {pid}" for pid in sorted(self.children - before.children)]
        return children + [f"open {pipe}" for pipe in sorted(self.pipes - before.pipes)]


def _pipes() -> set[str]:
    names = set()
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            names.add(str(entry.readlink()))
    return {name for name in names if name.startswith(("pipe:", "socket:"))}
