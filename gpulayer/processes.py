"""The process table of a node: who belongs to a job, and signals that cannot hit a recycled pid. Runs on nodes."""

from __future__ import annotations

import contextlib
import ctypes
import os

SYS_PIDFD_SEND_SIGNAL = 424
SYS_PIDFD_OPEN = 434
MARKER_CHARS = 10  # of a marker, in the name of a keeper

libc = ctypes.CDLL(None, use_errno=True)

TYPE_CHECKING = False  # mypy takes it for true; importing typing would cost 5 ms
if TYPE_CHECKING:
    from typing import Any

    Header = dict[str, Any]


class Process:
    """A process as last seen. `start` (clock ticks since boot) tells it from another that got its pid later."""

    __slots__ = ("alive", "name", "pid", "ppid", "start", "state", "wait_status")

    def __init__(self, pid: int, stat: bytes) -> None:
        head, _, rest = stat.rpartition(b") ")
        fields = rest.split()
        self.pid = pid
        self.name = head.partition(b" (")[2]
        self.state = fields[0].decode()
        self.ppid = int(fields[1])
        self.start = int(fields[19])
        self.wait_status = int(fields[49])
        # A zombie leader whose other threads run on (pthread_exit in main) is alive.
        self.alive = self.state not in "ZX" or int(fields[17]) > 1


def read_file(path: str, limit: int = -1) -> bytes:
    """Return a file's bytes, or b"" where it is gone or not ours to read."""
    try:
        with open(path, "rb") as file:
            return file.read(limit)
    except OSError:
        return b""


def list_folder(path: str) -> list[str]:
    """Return the paths in a folder, sorted; none where it does not exist (yet, or any more)."""
    try:
        return sorted(os.path.join(path, name) for name in os.listdir(path))
    except OSError:
        return []


def read_process(pid: int) -> Process | None:
    """Return the process with this pid, zombies included, or None."""
    stat = read_file(f"/proc/{pid}/stat")
    return Process(pid, stat) if stat else None


def process_table() -> dict[int, Process]:
    """Return every process of this PID namespace by pid."""
    found = (read_process(int(name)) for name in os.listdir("/proc") if name.isdigit())
    return {process.pid: process for process in found if process}


def children_of(pid: int) -> list[Process]:
    """Return a process's children, oldest first."""
    tasks = list_folder(f"/proc/{pid}/task")
    if tasks and not os.path.exists(tasks[0] + "/children"):  # a kernel without CONFIG_PROC_CHILDREN
        return sorted((one for one in process_table().values() if one.ppid == pid), key=lambda one: one.start)
    found = (read_process(int(child)) for task in tasks for child in read_file(task + "/children").split())
    return [process for process in found if process]


def environment_of(pid: int) -> list[bytes]:
    """Return the `NAME=VALUE` entries that a process was started with; none for a zombie, or if it wrote over them."""
    return read_file(f"/proc/{pid}/environ").split(b"\0")


def marker_entry(marker: str) -> bytes:
    """Return the environment entry that marks a process of the job."""
    return b"GPULAYER_MARKER=" + marker.encode()


def keeper_name(marker: str) -> bytes:
    """Return the name that `ps` shows for the job's supervisor and guard, 15 bytes at most; sweeps know them by it."""
    return b"gpul-" + marker[:MARKER_CHARS].encode()


def select_job(table: dict[int, Process], roots: set[int], spared: set[int]) -> list[Process]:
    """Return the living processes that are in `roots` or descend from them, less `spared`; pure, for any table."""
    children: dict[int, list[int]] = {}
    for process in table.values():
        children.setdefault(process.ppid, []).append(process.pid)
    seen: set[int] = set()
    queue = list(roots)
    while queue:
        pid = queue.pop()
        if pid not in seen:
            seen.add(pid)
            queue.extend(children.get(pid, ()))
    return [table[pid] for pid in seen - spared if pid in table and table[pid].alive]


def job_processes(marker: str, spared: set[int]) -> list[Process]:
    """Return the job's living processes but for `spared`: those marked, its keepers, and what descends from any."""
    table = process_table()
    name, entry = keeper_name(marker), marker_entry(marker)
    roots = {pid for pid in table if table[pid].name == name or entry in environment_of(pid)}
    return select_job(table, roots - {1}, spared | {1})


def open_pidfd(pid: int) -> int:
    """Return a pidfd, or -1 where the process is gone or the kernel older than 5.3. (os.pidfd_open is Python 3.9.)"""
    return int(libc.syscall(SYS_PIDFD_OPEN, pid, 0))


def signal_process(process: Process, number: int) -> None:
    """Signal this very process; never one that got its pid since. Gone, or not ours to signal, is no error."""
    fd = open_pidfd(process.pid)
    current = read_process(process.pid)
    if current and current.start == process.start:
        if fd >= 0:
            libc.syscall(SYS_PIDFD_SEND_SIGNAL, fd, int(number), None, 0)
        else:
            with contextlib.suppress(OSError):
                os.kill(process.pid, number)
    if fd >= 0:
        os.close(fd)


def describe(process: Process) -> Header:
    """Return pid, state and command line of a process, for people."""
    command = read_file(f"/proc/{process.pid}/cmdline", 200).replace(b"\0", b" ") or process.name
    return {"pid": process.pid, "state": process.state, "command": command.decode("utf-8", "replace").strip()}
