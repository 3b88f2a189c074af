"""The job's folder on a node, and the files that ranks write to: followed, given back to the disk. Runs on nodes."""

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
ROOM_BYTES = 1 << 16
FIRST_BYTES = 1 << 18
LEAST_BYTES = 1 << 16
MOST_BYTES = 1 << 24
LATE_S = 1.0
FALLOC_PUNCH_HOLE = 0x03  # FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE

TYPE_CHECKING = False  # mypy takes it for true; importing typing would cost 5 ms
if TYPE_CHECKING:
    from typing import Iterator


class Stream:
    """One file that a rank (or the command itself: None) writes to, sent as it grows and given back to the disk."""

    def __init__(self, path: str, local_rank: int | None, name: str) -> None:
        self.local_rank, self.name = local_rank, name
        self._fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        self.taken = self._punched = 0

    def next_frame(self) -> bytes:
        """Return the next piece as an `output` frame, or b"" when there is nothing new."""
        data = os.pread(self._fd, CHUNK_BYTES, self.taken)
        if not data:
            return b""
        self.taken += len(data)
        length = self.taken - KEEP_BYTES - self._punched
        if length >= PUNCH_BYTES:
            libc.fallocate(self._fd, FALLOC_PUNCH_HOLE, ctypes.c_int64(self._punched), ctypes.c_int64(length))
            self._punched += length
        return encode_frame({"type": "output", "local_rank": self.local_rank, "stream": self.name}, data)

    def at_end(self) -> bool:
        """Tell whether everything written so far has been taken."""
        return os.fstat(self._fd).st_size <= self.taken

    def tail(self) -> bytes:
        """Return the last bytes written."""
        return os.pread(self._fd, TAIL_BYTES, max(0, os.fstat(self._fd).st_size - TAIL_BYTES))


class JobStreams:
    """All streams of a job on its node: the command's own two, and two for each rank as soon as they are there."""

    def __init__(self, job_dir: str, nproc_per_node: int, launcher: str = "torchrun", first_rank: int = 0) -> None:
        self._job_dir = job_dir
        self._first_rank = first_rank
        self._one_for_both = launcher == "deepspeed"  # it gives a rank one file for stdout and stderr
        self._most = 2 + nproc_per_node * (1 if self._one_for_both else 2)
        self._streams: dict[str, Stream] = {}

    def create_own(self) -> list[int]:
        """Make the command's own two files and return descriptors that it shall write to. Raises OSError."""
        outputs = []
        for name in ("stdout", "stderr"):
            path = f"{self._job_dir}/command.{name}.log"
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
            for path, local_rank, name in self._deepspeeds() if self._one_for_both else self._torchruns():
                if path not in self._streams and os.path.exists(path):
                    self._streams[path] = Stream(path, local_rank, name)

    def has_file(self, local_rank: int) -> bool:
        """Tell whether a rank has a file. A launcher makes it before it starts the rank."""
        self.find()
        return any(stream.local_rank == local_rank for stream in self._streams.values())

    def _torchruns(self) -> Iterator[tuple[str, int, str]]:
        """Yield what torchrun makes: ranks/<id>/attempt_0/<local rank>/stdout.log, and the same for stderr."""
        for folder in [path for attempt in self._attempts() for path in list_folder(attempt)]:
            local_rank = os.path.basename(folder)
            if local_rank.isdigit():
                for name in ("stdout", "stderr"):
                    yield f"{folder}/{name}.log", int(local_rank), name

    def _deepspeeds(self) -> Iterator[tuple[str, int, str]]:
        """Yield what DeepSpeed makes: ranks/<time>_rank<rank>.log."""
        for path in list_folder(self._job_dir + "/ranks"):
            rank = path.rpartition("_rank")[2].partition(".")[0]
            if rank.isdigit():
                yield path, int(rank) - self._first_rank, "stdout"

    def next_frames(self) -> tuple[bytes, int]:
        """Return a piece of every stream that has something new, and how much output that is.

        One that floods does not hold up the others.
        """
        before = sum(stream.taken for stream in self._streams.values())
        frames = b"".join([stream.next_frame() for stream in self._streams.values()])
        return frames, sum(stream.taken for stream in self._streams.values()) - before

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


class Pace:
    """How much output may be under way: what a node has to tell comes after it, and must not be late on a slow line.

    Buffers on the way hold megabytes, which take minutes at 64 kB/s. So the launcher says how much it has seen.
    """

    def __init__(self) -> None:
        self._limit = FIRST_BYTES
        self._sent = self._seen = 0
        self._times: list[tuple[int, float]] = []

    @property
    def room(self) -> bool:
        """True while more may be sent."""
        return self._sent - self._seen < self._limit

    def sent(self, size: int, now: float) -> None:
        """Take note of output that was sent."""
        self._sent += size
        self._times.append((self._sent, now))

    def seen(self, total: int, now: float) -> None:
        """Take note of what the launcher has seen since the beginning. Raises ValueError where that cannot be."""
        if not self._seen <= total <= self._sent:
            raise ValueError(f"{total} bytes cannot have been seen")
        used = self._sent - self._seen
        self._seen = total
        passed = [at for sent, at in self._times if sent <= total]
        if not passed:
            return
        del self._times[: len(passed)]
        late_s = now - passed[-1]
        if late_s > LATE_S:
            self._limit = max(LEAST_BYTES, self._limit // 2)
        elif late_s < LATE_S / 2 and used > self._limit // 2:
            self._limit = min(MOST_BYTES, self._limit * 2)


def make_job_dir(path: str, *, made: bool = False) -> None:
    """Make the job's folder, with room for a few words in it. Raises OSError, and leaves nothing then.

    `made`: it is there already, with the job's files.
    """
    if not made:
        os.mkdir(path, 0o700)
    try:
        for name in ("ranks", "outputs"):
            os.mkdir(f"{path}/{name}", 0o700)
        with open(path + "/room", "wb") as trial:  # on a full disk a folder can be made, and ranks fail without a word
            trial.write(bytes(ROOM_BYTES))
        os.unlink(path + "/room")
    except OSError:
        remove_tree(path)
        raise


def remove_tree(path: str) -> None:
    """Remove a folder and all in it (shutil would cost its import at every start). What resists stays."""
    for root, folders, files in os.walk(path, topdown=False):
        for full in [os.path.join(root, name) for name in files + folders]:
            with contextlib.suppress(OSError):
                (os.unlink if os.path.islink(full) or not os.path.isdir(full) else os.rmdir)(full)
    with contextlib.suppress(OSError):
        os.rmdir(path)
