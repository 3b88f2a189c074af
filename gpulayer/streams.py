"""The files that ranks write to on a node: followed as they grow, and given back to the disk. Runs on nodes."""

from __future__ import annotations

import contextlib
import ctypes
import os

from gpulayer.frames import encode_frame
from gpulayer.processes import libc, list_folder, read_file

CHUNK_BYTES = 1 << 16
KEEP_BYTES = 64 << 20
PUNCH_BYTES = 16 << 20
TAIL_BYTES = 1 << 13
ERROR_FILE_BYTES = 1 << 16
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


class JobStreams:
    """All streams of a job on its node: the command's own two, and two for each rank as soon as they are there."""

    def __init__(self, job_dir: str, nproc_per_node: int) -> None:
        self._job_dir, self._most = job_dir, 2 + 2 * nproc_per_node
        self._streams: dict[str, Stream] = {}

    def create_own(self) -> list[int]:
        """Make the command's own two files and return descriptors that it shall write to. Raises OSError."""
        outputs = []
        for name in ("stdout", "stderr"):
            path = f"{self._job_dir}/torchrun.{name}.log"
            outputs.append(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_APPEND, 0o600))
            self._streams[path] = Stream(path, None, name)
        return outputs

    @property
    def some_of_ranks(self) -> bool:
        """True once a rank has a file."""
        return len(self._streams) > 2

    def find(self) -> None:
        """Look for files of ranks, until all are there."""
        if len(self._streams) < self._most:
            for folder in [path for attempt in self._attempts() for path in list_folder(attempt)]:
                local_rank = os.path.basename(folder)
                for name in ("stdout", "stderr"):
                    path = f"{folder}/{name}.log"
                    if local_rank.isdigit() and path not in self._streams and os.path.exists(path):
                        self._streams[path] = Stream(path, int(local_rank), name)

    def next_frames(self) -> bytes:
        """Return a piece of every stream that has something new: one that floods does not hold up the others."""
        return b"".join([stream.next_frame() for stream in self._streams.values()])

    def at_end(self) -> bool:
        """Tell whether everything written so far has been taken."""
        return all(stream.at_end() for stream in self._streams.values())

    def last_words(self, local_rank: int | None) -> dict[str, bytes]:
        """Return the last bytes of a rank's streams (None: the command's), and what its error file holds."""
        parts = {stream.name: stream.tail() for stream in self._streams.values() if stream.local_rank == local_rank}
        for attempt in self._attempts() if local_rank is not None else ():
            parts["error_file"] = read_file(f"{attempt}/{local_rank}/error.json", ERROR_FILE_BYTES)
        return parts

    def _attempts(self) -> list[str]:
        runs = list_folder(self._job_dir + "/ranks")
        return [path for run in runs for path in list_folder(run) if "/attempt_" in path]


def remove_tree(path: str) -> None:
    """Remove a folder and all in it (shutil would cost its import at every start). What resists stays."""
    for root, folders, files in os.walk(path, topdown=False):
        for full in [os.path.join(root, name) for name in files + folders]:
            with contextlib.suppress(OSError):
                (os.unlink if os.path.islink(full) or not os.path.isdir(full) else os.rmdir)(full)
    with contextlib.suppress(OSError):
        os.rmdir(path)
