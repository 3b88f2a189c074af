"""The guard, torchrun's parent on a node: starts the command, outlives the supervisor, ends the job. Runs on nodes."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import struct
import time

from gpulayer.ending import TICK_S, Ending
from gpulayer.processes import libc
from gpulayer.programs import start_command

PR_SET_CHILD_SUBREAPER = 36
ALIVE = b"alive"
SILENT_LOOKS = 5

TYPE_CHECKING = False  # mypy takes it for true; importing typing would cost 5 ms
if TYPE_CHECKING:
    from typing import Any

    Header = dict[str, Any]


def catch_signals(*numbers: int) -> int:
    """Return a file descriptor from which these signals can be read, a byte each."""
    reader, writer = os.pipe()
    for fd in (reader, writer):
        os.set_blocking(fd, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    for number in numbers:
        signal.signal(number, lambda number, frame: None)
    return reader


def fork_guard(
    job: Header, argv: list[bytes], env: dict[bytes, bytes], outputs: list[int], kept: list[int]
) -> tuple[int, socket.socket]:
    """Fork the guard, which starts the command and keeps `kept` open. Return its pid and the link to it."""
    mine, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    keepers = {os.getpid()}
    pid = os.fork()
    if pid:
        its.close()
        return pid, mine
    try:
        os.setsid()
        libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        for fd, source in enumerate((os.open(os.devnull, os.O_RDONLY), *outputs)):
            os.dup2(source, fd)
        for fd in map(int, os.listdir("/proc/self/fd")):
            if fd > 2 and fd not in (its.fileno(), *kept):
                with contextlib.suppress(OSError):
                    os.close(fd)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        Guard(its, keepers | {os.getpid()}, job, start_command(argv, env)).run()
    finally:
        os._exit(0)
    raise AssertionError("not reached")


def tell_guard(link: socket.socket, word: bytes) -> None:
    """Send the guard how soon to end the job, in seconds, or ALIVE; one that is dead or stands still misses it."""
    with contextlib.suppress(OSError):
        link.send(word, socket.MSG_DONTWAIT)


class Guard:
    """Ends the job when the supervisor says how soon, when it dies, and when nothing is heard of it any more.

    A supervisor that stands still would not notice that the launcher is gone. Silence is counted in looks, so that it
    is no reason when the machine as a whole stood still.
    """

    def __init__(self, link: socket.socket, keepers: set[int], job: Header, command: int) -> None:
        self._link, self._grace_s = link, job["grace_s"]
        self._look_s = job["lost_after_s"] / SILENT_LOOKS
        self._look_at_s = time.monotonic() + self._look_s
        self._silent_looks = self._send_flags = 0
        self._wake = catch_signals(signal.SIGCHLD)
        link.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", 1, 0))
        to_group = job["launcher"] == "command"
        self._ending = Ending(job["marker"], keepers, self._tell, command, to_group=to_group)
        self._tell({"type": "started", "pid": command})

    def run(self) -> None:
        """Serve until nothing of the job is left, and the supervisor has ended."""
        poller = select.poll()
        poller.register(self._link, select.POLLIN)
        poller.register(self._wake, select.POLLIN)
        while not self._ending.step():
            for fd, _ in poller.poll(1000 * (TICK_S if self._ending.begun else self._look_s)):
                if fd == self._wake:
                    os.read(fd, 4096)
                elif not self._hear():
                    poller.unregister(self._link)
            self._look()
        with contextlib.suppress(OSError):
            while self._link.recv(64):
                pass

    def _tell(self, message: Header) -> None:
        try:
            self._link.send(json.dumps(message).encode(), self._send_flags)
        except BlockingIOError:  # it reads nothing; what it misses is no reason to wait again
            self._send_flags = socket.MSG_DONTWAIT
        except OSError:  # it is dead, as the next look at the link shows
            pass

    def _hear(self) -> bool:
        """Take a word of the supervisor's; False when it is dead."""
        try:
            told = self._link.recv(64)
        except ConnectionError:
            told = b""
        self._silent_looks = self._send_flags = 0
        if told != ALIVE:
            self._ending.begin(float(told or self._grace_s))
        return bool(told)

    def _look(self) -> None:
        now = time.monotonic()
        if now >= self._look_at_s:
            self._look_at_s, self._silent_looks = now + self._look_s, self._silent_looks + 1
            if self._silent_looks >= SILENT_LOOKS:
                self._ending.begin(self._grace_s)
