"""Starting a program on a node in a session of its own, and a helper that the launcher talks with. Runs on nodes."""

from __future__ import annotations

import contextlib
import os
import signal

from gpulayer.processes import libc, process_table, select_job, signal_process

PR_SET_PDEATHSIG = 1
HELPER_CHUNK_BYTES = 1 << 16


def start_command(argv: list[bytes], env: dict[bytes, bytes]) -> int:
    """Start the command in a session of its own and return its pid. One that cannot be run exits 127 with a message."""
    parent = os.getpid()
    pid = os.fork()
    if not pid:
        become(argv, env, parent)
    return pid


def become(argv: list[bytes], env: dict[bytes, bytes], parent: int) -> None:
    """In a child: run a program in a session of its own that gets SIGTERM when the parent dies. Never returns."""
    try:
        os.setsid()
        for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
            signal.signal(number, signal.SIG_DFL)
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        if os.getppid() == parent:
            os.execvpe(argv[0], argv, env)  # noqa: S606 - what runs is the plan's argv, as it is
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        os.write(2, b"gpulayer: %s cannot be run: %s\n" % (argv[0], str(reason).encode()))
    finally:
        os._exit(127)
    raise AssertionError("not reached")


class Helper:
    """A program that the launcher talks with before the start, over pipes; its stderr is the supervisor's."""

    def __init__(self, argv: list[bytes], env: dict[bytes, bytes]) -> None:
        stdin, self.input = os.pipe()
        self.output, stdout = os.pipe()
        os.set_blocking(self.input, False)
        parent = os.getpid()
        self.pid = os.fork()
        if not self.pid:
            os.dup2(stdin, 0)
            os.dup2(stdout, 1)
            os.chdir("/")  # Python looks for modules where it is started, and a job's json.py is not for us
            become(argv, env, parent)
        for fd in (stdin, stdout):
            os.close(fd)

    def write(self, data: bytes) -> None:
        """Give it some input. One that does not read, or is gone, misses it."""
        with contextlib.suppress(OSError):
            os.write(self.input, data)

    def read(self) -> bytes:
        """Return what it has said, b"" at its end."""
        return os.read(self.output, HELPER_CHUNK_BYTES)

    def end(self) -> None:
        """Kill it and what it has started, in sessions of their own too; reap it."""
        for process in select_job(process_table(), {self.pid}, set()):
            signal_process(process, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        for fd in (self.input, self.output):
            os.close(fd)
