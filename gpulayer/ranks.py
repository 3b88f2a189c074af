"""The ranks of a job on a node: torchrun's workers, each watched until its own wait status is known. Runs on nodes."""

from __future__ import annotations

import fcntl
import struct

from gpulayer.processes import Process, environment_of, marker_entry, open_pidfd, read_process

PIDFD_GET_INFO = 0xC040FF0B  # linux/pidfd.h, since 6.13; its exit code since 6.15
PIDFD_INFO_EXIT = 1 << 3

TYPE_CHECKING = False  # mypy takes it for true; importing typing would cost 5 ms
if TYPE_CHECKING:
    from typing import Iterable


class RankWatch:
    """One worker process of torchrun, from when it is seen until its own wait status is known."""

    def __init__(self, process: Process) -> None:
        self.process = process
        self.fd = open_pidfd(process.pid)
        self.told = False
        self.reaped: int | None = None  # its wait status, if torchrun died and the guard had to reap it

    def look(self) -> tuple[bool, int | None]:
        """Return whether it has ended, and its wait status, None where that could not be seen."""
        current = read_process(self.process.pid)
        if current and current.start == self.process.start:
            return not current.alive, current.wait_status
        return True, self._status_after_reaping() if self.reaped is None else self.reaped

    def _status_after_reaping(self) -> int | None:
        """torchrun was quicker than we were: ask the kernel through the pidfd (Linux 6.15 and later)."""
        request = bytearray(struct.pack("=Q56x", PIDFD_INFO_EXIT))
        try:
            fcntl.ioctl(self.fd, PIDFD_GET_INFO, request)
        except (OSError, ValueError):
            return None
        return struct.unpack_from("=i", request, 60)[0] if request[0] & PIDFD_INFO_EXIT else None


class Children:
    """Which children of torchrun's are its workers."""

    def __init__(self) -> None:
        self._others: set[tuple[int, int]] = set()

    def local_rank(self, process: Process, marker: str, following: int, has_file: bool) -> int | None:
        """Return the local rank of a child, None if it is no worker (yet).

        A worker that ended before it was seen shows no environment any more. But torchrun starts workers in order, so
        it is the one that is `following`, unless it was there before that one's file: that is made first, and another
        child, such as nvidia-smi, has ended.
        """
        entries = environment_of(process.pid)
        local_rank = number_in(entries, b"LOCAL_RANK=")
        if local_rank is None and not has_file:
            self._others.add((process.pid, process.start))
        if local_rank is not None or marker_entry(marker) in entries:
            return local_rank
        return None if (process.pid, process.start) in self._others else following


def number_in(entries: Iterable[bytes], name: bytes) -> int | None:
    """Return the number that an environment has under `name`, which ends in `=`; None where it has none."""
    for entry in entries:
        if entry.startswith(name) and entry[len(name) :].isdigit():
            return int(entry[len(name) :])
    return None
