"""Writing to stdout and stderr so that the caller never waits: writer threads, their queues, the status line.

A stopped terminal (Ctrl-S) or a pipe that no one reads blocks a thread here and nothing else. The files of the run hold
every byte, so output that finds its queue full is counted and left out; gpulayer's own messages never are.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from gpulayer.events import StreamName

QUEUE_BYTES = 8 << 20
ERASE_LINE = b"\r\x1b[K"

_WRITE_MIN_BYTES = 4096  # what a slow reader gets at a time, so that close() can see it move
_WRITE_MAX_BYTES = 1 << 20  # a fast one: each write costs the thread a wait for the interpreter lock
_QUICK_WRITE_S = 0.05
_LOOK_AGAIN_S = 0.02
_READER_GONE = frozenset({errno.EPIPE, errno.EIO, errno.EBADF})


@dataclass(frozen=True, slots=True)
class Terminal:
    """The two file descriptors and what may be drawn there. `live`: stderr can hold a status line that is redrawn."""

    stdout_fd: int = 1
    stderr_fd: int = 2
    stdout_tty: bool = False
    stderr_tty: bool = False
    color: bool = False
    live: bool = False

    @classmethod
    def detect(cls, environ: Mapping[str, str], stdout_fd: int = 1, stderr_fd: int = 2) -> Terminal:
        """Look at the descriptors, $NO_COLOR (https://no-color.org: set and not empty) and $TERM."""
        stdout_tty, stderr_tty = _is_tty(stdout_fd), _is_tty(stderr_fd)
        dumb = environ.get("TERM", "") in {"", "dumb"}
        color = not dumb and not environ.get("NO_COLOR")
        return cls(stdout_fd, stderr_fd, stdout_tty, stderr_tty, color, live=stderr_tty and not dumb)

    def fd(self, stream: StreamName) -> int:
        """Return the descriptor of a stream."""
        return self.stdout_fd if stream == "stdout" else self.stderr_fd

    def is_tty(self, stream: StreamName) -> bool:
        """Say whether a stream is a terminal."""
        return self.stdout_tty if stream == "stdout" else self.stderr_tty

    def colored(self, stream: StreamName) -> bool:
        """Say whether gpulayer may use colour on a stream."""
        return self.color and self.is_tty(stream)

    @property
    def columns(self) -> int:
        """The width of stderr's terminal, looked up anew each time."""
        try:
            return os.get_terminal_size(self.stderr_fd).columns or 80
        except OSError:
            return 80


def open_standard_fds() -> None:
    """Put /dev/null where stdin, stdout or stderr is closed. To be called before any file is opened.

    Else the next file that is opened takes that number, and output would be written into it.
    """
    for fd in (0, 1, 2):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number, which is `fd`


class Screen:
    """stdout and stderr of the login node. `slow_text` words the line that says how many lines were left out.

    `patient`: output that finds its queue full waits for room, and none is left out.
    """

    def __init__(
        self,
        terminal: Terminal,
        slow_text: Callable[[int], bytes],
        limit_bytes: int = QUEUE_BYTES,
        *,
        slow_stream: StreamName = "stderr",
        patient: bool = False,
    ) -> None:
        self._terminal = terminal
        self._slow_text, self._slow_stream = slow_text, slow_stream
        self._patient = patient
        self._err = _Lane(self._tell_slow, self._tell_broken, limit_bytes, patient=patient)
        # One thread for one device keeps the order; two for two, so that `| less` holds back no message on stderr.
        shared = _same_device(terminal.stdout_fd, terminal.stderr_fd)
        self._out = self._err if shared else _Lane(self._tell_slow, self._tell_broken, limit_bytes, patient=patient)

    def output(self, stream: StreamName, block: bytes) -> None:
        """Show lines of a rank, or count them where the reader is too slow. Returns at once, unless it is patient."""
        self._lane(stream).put(self._terminal.fd(stream), block, droppable=True)

    def is_gone(self, stream: StreamName) -> bool:
        """Tell whether nothing can be written there any more: its reader has left, or a disk is full."""
        return self._lane(stream).is_broken(self._terminal.fd(stream))

    def message(self, text: bytes, stream: StreamName = "stderr") -> None:
        """Show something of gpulayer's own, after what is queued already. Returns at once."""
        self._lane(stream).put(self._terminal.fd(stream), text, droppable=False)

    def status(self, line: bytes) -> None:
        """Keep `line` (no newline) below everything else on stderr's terminal; an empty one removes it."""
        self._err.set_status(self._terminal.stderr_fd, line)

    def close(self, timeout_s: float, hurried: Callable[[], bool] = lambda: False) -> bool:
        """Write what is queued; returns whether all was written.

        Gives up after `timeout_s` without progress, or once it is `hurried`. A reader that has left (`| head -1`) has
        all that it wanted; a full disk has not.
        """
        self.status(b"")
        done = self._out.close(timeout_s, hurried) if self._out is not self._err else True
        return self._err.close(timeout_s, hurried) and done

    def _lane(self, stream: StreamName) -> _Lane:
        return self._out if stream == "stdout" else self._err

    def _tell_slow(self, lines: int) -> None:
        self.message(self._slow_text(lines), self._slow_stream)

    def _tell_broken(self, fd: int, exc: OSError) -> None:
        if fd == self._terminal.stdout_fd and exc.errno not in _READER_GONE:
            effect = "" if self._patient else "; the job goes on"
            self.message(f"gpulayer: cannot write to stdout: {exc.strerror}{effect}\n".encode())


class _Lane:
    """One device, one queue, one thread."""

    def __init__(
        self,
        tell_slow: Callable[[int], None],
        tell_broken: Callable[[int, OSError], None],
        limit_bytes: int,
        *,
        patient: bool,
    ) -> None:
        self._tell_slow = tell_slow
        self._tell_broken = tell_broken
        self._limit_bytes = limit_bytes
        self._patient = patient
        lock = threading.RLock()  # guards what follows; never held while writing
        self._ready, self._room = threading.Condition(lock), threading.Condition(lock)
        self._items: deque[tuple[int, bytes]] = deque()
        self._queued_bytes = 0
        self._lines_left_out = 0
        self._broken: set[int] = set()
        self._status = b""
        self._status_fd = -1
        self._drawn = b""  # the status that is on the terminal now
        self._closing = False
        self._failed = False
        self._moved_bytes = 0
        self._write_bytes = _WRITE_MIN_BYTES * 16
        # A daemon: a write that never returns must not keep the interpreter from ending.
        self._thread = threading.Thread(target=self._run, name="gpulayer-screen", daemon=True)
        self._thread.start()

    def put(self, fd: int, data: bytes, *, droppable: bool) -> None:
        with self._ready:
            if fd in self._broken or not data:
                return
            if droppable and self._patient:
                self._room.wait_for(lambda: not self._is_full(len(data)) or fd in self._broken)
                if fd in self._broken:
                    return
            elif droppable and self._is_full(len(data)):
                self._lines_left_out += data.count(b"\n")
                return
        if droppable:
            self._tell_left_out()  # before the lines that come after the gap
        with self._ready:
            self._items.append((fd, data))
            self._queued_bytes += len(data)
            self._ready.notify()

    def is_broken(self, fd: int) -> bool:
        with self._ready:
            return fd in self._broken

    def set_status(self, fd: int, line: bytes) -> None:
        with self._ready:
            if line != self._status:
                self._status, self._status_fd = line, fd
                self._ready.notify()

    def close(self, timeout_s: float, hurried: Callable[[], bool]) -> bool:
        self._tell_left_out()
        with self._ready:
            self._closing = True
            self._ready.notify()
        moved, deadline = self._moved_bytes, time.monotonic() + timeout_s
        while self._thread.is_alive():
            self._thread.join(_LOOK_AGAIN_S if timeout_s else 0)
            if hurried():
                break
            if self._moved_bytes != moved:
                moved, deadline = self._moved_bytes, time.monotonic() + timeout_s
            elif time.monotonic() >= deadline:
                break
        with self._ready:
            left = sum(data.count(b"\n") for _, data in self._items)
            self._items.clear()
        if self._thread.is_alive() and left:
            self._tell_slow(left)  # seen where stderr is another device
        return not self._thread.is_alive() and not self._failed

    def _is_full(self, more_bytes: int) -> bool:
        """Once full, it stays so until half of it has been written: fewer, larger gaps."""
        limit = self._limit_bytes // 2 if self._lines_left_out else self._limit_bytes
        return self._queued_bytes > 0 and self._queued_bytes + more_bytes > limit

    def _tell_left_out(self) -> None:
        with self._ready:
            lines, self._lines_left_out = self._lines_left_out, 0
        if lines:
            self._tell_slow(lines)

    def _run(self) -> None:
        while (write := self._next()) is not None:
            begin_s = time.monotonic()
            self._write(*write)
            quick = time.monotonic() - begin_s < _QUICK_WRITE_S
            size = self._write_bytes * 2 if quick else self._write_bytes // 4
            self._write_bytes = min(_WRITE_MAX_BYTES, max(_WRITE_MIN_BYTES, size))
            if not self._items:
                self._tell_left_out()

    def _next(self) -> tuple[int, bytes] | None:
        """Wait for something to write; None when all is written and the lane is closing."""
        with self._ready:
            while not self._items and self._status == self._drawn:
                if self._closing:
                    return None
                self._ready.wait()
            fd = self._items[0][0] if self._items else self._status_fd
            parts = [ERASE_LINE] if self._drawn else []
            parts += self._take(fd)
            self._drawn = self._status if self._status and _ends_line(parts) else b""
            if self._drawn:
                parts.append(self._drawn)
        return fd, b"".join(parts)

    def _take(self, fd: int) -> list[bytes]:
        taken: list[bytes] = []
        room = self._write_bytes
        while self._items and self._items[0][0] == fd and room > 0:
            _, data = self._items.popleft()
            if len(data) > room:
                self._items.appendleft((fd, data[room:]))
                data = data[:room]
            taken.append(data)
            room -= len(data)
            self._queued_bytes -= len(data)
        self._room.notify_all()
        return taken

    def _write(self, fd: int, data: bytes) -> None:
        view = memoryview(data)
        while view:
            try:
                written = os.write(fd, view)
            except BlockingIOError:  # whoever started us made the descriptor non-blocking
                with contextlib.suppress(OSError):
                    _wait_writable(fd)
                continue
            except OSError as exc:
                self._give_up(fd, exc)
                return
            view = view[written:]
            self._moved_bytes += written

    def _give_up(self, fd: int, exc: OSError) -> None:
        with self._ready:
            self._broken.add(fd)
            self._failed = self._failed or exc.errno not in _READER_GONE
            self._items = deque(item for item in self._items if item[0] != fd)
            self._queued_bytes = sum(len(data) for _, data in self._items)
            self._lines_left_out = 0
            self._room.notify_all()
            if fd == self._status_fd:
                self._status = self._drawn = b""
        self._tell_broken(fd, exc)


def _ends_line(parts: list[bytes]) -> bool:
    return not parts or parts[-1] == ERASE_LINE or parts[-1].endswith(b"\n")


def _wait_writable(fd: int) -> None:
    poll = select.poll()
    poll.register(fd, select.POLLOUT)
    poll.poll()


def _is_tty(fd: int) -> bool:
    try:
        return os.isatty(fd)
    except OSError:
        return False


def _same_device(one_fd: int, other_fd: int) -> bool:
    try:
        return os.path.sameopenfile(one_fd, other_fd)
    except OSError:
        return False
