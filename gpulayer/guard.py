"""The guard, torchrun's parent on a node: starts the command, outlives the supervisor, ends the job. Runs on nodes."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket

from gpulayer.ending import TICK_S, Ending
from gpulayer.processes import libc
from gpulayer.programs import start_command

PR_SET_CHILD_SUBREAPER = 36

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
        run_guard(its, keepers | {os.getpid()}, job, start_command(argv, env))
    finally:
        os._exit(0)
    raise AssertionError("not reached")


def run_guard(link: socket.socket, keepers: set[int], job: Header, command: int) -> None:
    """Tell the supervisor of all that ends; end the job when it says how soon, or when it dies."""

    def tell(message: Header) -> None:
        with contextlib.suppress(OSError):  # it is dead, as the next look at the link shows
            link.send(json.dumps(message).encode())

    wake = catch_signals(signal.SIGCHLD)
    poller = select.poll()
    poller.register(link, select.POLLIN)
    poller.register(wake, select.POLLIN)
    ending = Ending(job["marker"], keepers, tell, command)
    tell({"type": "started", "pid": command})
    while not ending.step():
        for fd, _ in poller.poll(TICK_S * 1000 if ending.begun else None):
            if fd == wake:
                os.read(wake, 4096)
                continue
            try:
                told = link.recv(64)
            except ConnectionError:
                told = b""
            if not told:
                poller.unregister(link)
            ending.begin(float(told or job["grace_s"]))
    with contextlib.suppress(OSError):
        link.recv(64)  # nothing comes; it ends when the supervisor has
