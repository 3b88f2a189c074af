"""The files that ranks write to on a node: followed as they grow, and given back to the disk. Runs on nodes."""

from __future__ import annotations

import contextlib
import ctypes
import os

from gpulayer.frames import encode_frame
from gpulayer.processes import libc

CHUNK_BYTES = 1 << 16
KEEP_BYTES = 64 << 20
PUNCH_BYTES = 16 << 20
TAIL_BYTES = 1 << 13
FALLOC_PUNCH_HOLE = 0x03  # FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE


class Stream:
    """One file that a rank (or torchrun itself: None) writes to, sent as it grows and given back to the disk."""

    def __init__(self, path: str, local_rank: int | None, name: str) -> None:
        self.local_rank, self.name = local_rank, name
        self._fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        self._sent = self._punched = 0

    def next_frame(self) -> bytes:
        """Return the next piece as an `output` frame, or b"" when there is nothing new."""
        data = os.pread(self._fd, CHUNK_BYTES, self._sent)
        if not data:
            return b""
        self._sent += len(data)
        length = self._sent - KEEP_BYTES - self._punched
        if length >= PUNCH_BYTES:
            libc.fallocate(self._fd, FALLOC_PUNCH_HOLE, ctypes.c_int64(self._punched), ctypes.c_int64(length))
            self._punched += length
        return encode_frame({"type": "output", "local_rank": self.local_rank, "stream": self.name}, data)

    def at_end(self) -> bool:
        """Tell whether everything written so far has been taken."""
        return os.fstat(self._fd).st_size <= self._sent

    def tail(self) -> bytes:
        """Return the last bytes written."""
        return os.pread(self._fd, TAIL_BYTES, max(0, os.fstat(self._fd).st_size - TAIL_BYTES))


def remove_tree(path: str) -> None:
    """Remove a folder and all in it (shutil would cost its import at every start). What resists stays."""
    for root, folders, files in os.walk(path, topdown=False):
        for full in [os.path.join(root, name) for name in files + folders]:
            with contextlib.suppress(OSError):
                (os.unlink if os.path.islink(full) or not os.path.isdir(full) else os.rmdir)(full)
    with contextlib.suppress(OSError):
        os.rmdir(path)
