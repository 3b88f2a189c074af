"""How jobs end: programs that fail, resist and hide, and what is left of them on the hosts, seen from outside.

The clock of these programs is this machine's: `time.monotonic()` is the same number on every host.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import time
from typing import TYPE_CHECKING, Any

from tests.support.leaks import job_processes
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator
    from pathlib import Path

    from tests.support.cluster import Cluster
    from tests.support.host import Host
    from tests.support.jobs import LiveRun
    from tests.support.procs import Process

SECRETIVE = "no-marker-here"  # argv[0] of the daemons that have an empty environment
NEIGHBOUR = "4321"  # the only argument of the processes that are no job's

# What the programs below have in common; OUT is a folder that all of them see.
BEGIN = """
import os, signal, sys, time
rank, out = int(os.environ["RANK"]), os.environ["OUT"]

def note(name):
    with open(f"{out}/.{name}", "w") as file:
        file.write(str(time.monotonic()))
    os.rename(f"{out}/.{name}", f"{out}/{name}")

def wait_for(*names):
    while not all(os.path.exists(f"{out}/{name}") for name in names):
        time.sleep(0.01)
"""

# Rank 2 exits 17 two seconds after it began, the others sleep.
SEVENTEEN = (
    BEGIN
    + """
print("rank", rank, "begins")
note(f"ready{rank}")
if rank == 2:
    time.sleep(2)
    print("the last words of rank 2", file=sys.stderr)
    note("failed")
    sys.exit(17)
time.sleep(100)
"""
)

# Every rank ignores SIGTERM, says nothing and leaves two daemons in sessions of their own, one with an empty
# environment. Rank FAILS (if any) exits 17 once OUT/go is there.
STUBBORN = (
    BEGIN
    + f"""
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)

def daemon(name, environ):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.execve("/bin/sleep", [name, "1000"], environ)
        os._exit(0)
    os.wait()

daemon("marked", os.environ)
if "SECRETIVE" in os.environ:
    daemon({SECRETIVE!r}, {{}})
note(f"ready{{rank}}")
if os.environ.get("FAILS") == str(rank):
    wait_for("go")
    note("failed")
    sys.exit(17)
time.sleep(1000)
"""
)

# Every rank says that it is there, sleeps, and ends politely when it is told to.
POLITE = (
    BEGIN
    + """
print("rank", rank, "begins")
note(f"ready{rank}")
time.sleep(1000)
"""
)


def noted(folder: Path, name: str) -> float:
    """When a program noted this."""
    return float((folder / name).read_text())


def wait_ready(folder: Path, ranks: int, *, timeout_s: float = 60) -> None:
    """Wait until these many ranks have noted that they are ready."""
    wait_until(lambda: len(list(folder.glob("ready*"))) == ranks, f"{ranks} ranks are ready", timeout_s=timeout_s)


def wait_stubborn(cluster: Cluster, daemons: int, *, timeout_s: float = 60) -> Watched:
    """Wait until these many daemons of STUBBORN run; return everything of jobs that runs then."""

    def found() -> int:
        return len([process for process in running(cluster) if process.argv[1:] == ("1000",)])

    wait_until(lambda: found() == daemons, f"{daemons} daemons run", timeout_s=timeout_s)
    return Watched.of(cluster)


class Watched:
    """Processes of a job, followed from outside by pidfd until each is gone."""

    def __init__(self, processes: Iterable[Process]) -> None:
        self.processes = {process.pid: process for process in processes}
        self._fds: dict[int, int] = {}
        for pid in self.processes:
            self._fds[os.pidfd_open(pid)] = pid

    @classmethod
    def of(cls, cluster: Cluster, hosts: Collection[Host] | None = None) -> Watched:
        """Everything of any job that runs on these hosts (default: all) now, marked or not; supervisors left out."""
        namespaces = {host.namespace for host in (cluster.hosts if hosts is None else hosts)}
        return cls(process for process in running(cluster) if process.namespace in namespaces)

    def wait_gone(self, timeout_s: float = 30) -> float:
        """Return when (on the monotonic clock) the last one was gone. Raises TimeoutError naming who is not."""
        poller = select.poll()
        for fd in self._fds:
            poller.register(fd, select.POLLIN)
        deadline = time.monotonic() + timeout_s
        while self._fds:
            ended = poller.poll(max(0.0, deadline - time.monotonic()) * 1000)
            if not ended:
                left = [self.processes[pid] for pid in self._fds.values()]
                self.close()
                raise TimeoutError(f"not within {timeout_s} s: gone are {[(p.pid, p.argv) for p in left]}")
            for fd, _ in ended:
                poller.unregister(fd)
                del self._fds[fd]
                os.close(fd)
        return time.monotonic()

    def close(self) -> None:
        """Follow no more."""
        for fd in self._fds:
            os.close(fd)
        self._fds.clear()

    def alive(self) -> list[Process]:
        """Those that still run."""
        poller = select.poll()
        for fd in self._fds:
            poller.register(fd, select.POLLIN)
        ended = {fd for fd, _ in poller.poll(0)}
        return [self.processes[pid] for fd, pid in self._fds.items() if fd not in ended]


def running(cluster: Cluster) -> list[Process]:
    """The processes of jobs on all hosts: those with a marker, and daemons that have thrown it away."""
    secretive = [process for process in cluster.processes() if process.argv[:1] == (SECRETIVE,)]
    return [*job_processes(cluster), *secretive]


def assert_clean(cluster: Cluster, hosts: Collection[Host] | None = None, *, kept_on: Collection[Host] = ()) -> None:
    """No process of a job is on these hosts (default: all) now, and soon nothing at all that a fresh host has not.

    The latter takes in supervisors, guards and the jobs' folders; neighbours may be there. A host of `kept_on` has kept
    the job's folder, because its output could not be sent; it is removed here.
    """
    looked_at = [host for host in (cluster.hosts if hosts is None else hosts) if host.powered]
    namespaces = {host.namespace: host.name for host in looked_at}
    left = [(namespaces[p.namespace], p.pid, p.argv) for p in running(cluster) if p.namespace in namespaces]
    assert not left, f"left on hosts: {left}"

    def leftovers() -> list[object]:
        strays = [(host.name, p.pid, p.argv) for host in looked_at for p in host.strays() if not is_neighbour(p)]
        return [*strays, *(str(folder) for host in looked_at if host not in kept_on for folder in folders(host))]

    with contextlib.suppress(TimeoutError):
        wait_until(lambda: not leftovers(), "nothing is left", timeout_s=3)
    assert not leftovers(), f"left on hosts: {leftovers()}"
    for host in kept_on:
        (folder,) = folders(host)
        shutil.rmtree(folder)


def folders(host: Host) -> list[Path]:
    """The jobs' folders that are on a host."""
    return list(host.path("/tmp").glob("gpulayer-*"))


def supervisor_of(run: LiveRun, cluster: Cluster, node_rank: int) -> int:
    """The pid, seen from outside, of a node's supervisor. Node ranks are the hosts' own numbers."""
    inside = run.wait_for_event("node_connected", node_rank=node_rank)["supervisor_pid"]
    return next(p.pid for p in cluster.hosts[node_rank].processes() if p.pid_inside == inside)


def outcomes(receipt: dict[str, Any]) -> list[tuple[str, bool]]:
    """Each node's outcome and whether it was verified clean, in node order."""
    return [(node["outcome"], node["verified_clean"]) for node in receipt["nodes"]]


def block(stderr: str) -> str:
    """The last block on the screen: from the verdict on."""
    return stderr[stderr.rindex("gpulayer: job ") :]


class Neighbours:
    """Processes of root and of walker on every host that are no job's, one with a command line like a job's."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        lookalike = "exec -a 'python3 -m torch.distributed.run --nnodes 4 --log-dir /tmp/gpulayer-x/ranks' sleep"
        for host in cluster.hosts:
            for user in ("root", "walker"):
                host.start(["bash", "-c", f"sleep {NEIGHBOUR} & {lookalike} {NEIGHBOUR}"], user=user)
        wait_until(lambda: len(self._found()) == 4 * len(cluster.hosts), "the neighbours live")
        self._namespaces = {process.pid: process.namespace for process in self._found()}
        self._holders = {host.name: host.holder_pid for host in cluster.hosts}

    def assert_alive(self) -> None:
        """Each of them is still there, those on hosts that lost power excepted."""
        # A host that was booted anew may have got the number of its old namespace.
        same = [host for host in self._cluster.hosts if host.holder_pid == self._holders[host.name]]
        powered = {host.namespace for host in same if host.powered}
        expected = {pid for pid, namespace in self._namespaces.items() if namespace in powered}
        assert {process.pid for process in self._found()} >= expected

    def _found(self) -> list[Process]:
        return [process for process in self._cluster.processes() if is_neighbour(process)]


@contextlib.contextmanager
def bystanders(cluster: Cluster) -> Iterator[None]:
    """For the length of a test: Neighbours, who must outlive it; folders of jobs that it left are removed."""
    neighbours = Neighbours(cluster)
    yield
    for host in cluster.hosts:
        for folder in folders(host):
            shutil.rmtree(folder)
    neighbours.assert_alive()


def is_neighbour(process: Process) -> bool:
    """Whether it is one of the Neighbours."""
    return process.argv[1:] == (NEIGHBOUR,)


def stop_process(pid: int) -> Callable[[], None]:
    """SIGSTOP now; what is returned lets it go on, if it is still there."""
    os.kill(pid, signal.SIGSTOP)

    def go_on() -> None:
        try:
            os.kill(pid, signal.SIGCONT)
        except ProcessLookupError:
            return

    return go_on
