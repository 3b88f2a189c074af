"""One supervisor as a local child over pipes, spoken to frame by frame, and programs for it to run.

with LocalNode(tmp_path) as node:
    node.prepare(fake_torchrun(node, script, nproc_per_node=2))
    node.start()
    node.wait_for("rank_exit", local_rank=1)
    assert node.finish()["type"] == "ended"
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import secrets
import select
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Self

import pytest

from gpulayer import frames, guard, processes
from gpulayer.bootstrap import bootstrap_command, bootstrap_input
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from types import TracebackType

    from gpulayer.wire import Header

FAKE_TORCH = Path(__file__).parent / "fake_torch"
NONCE = "0123456789abcdef"
GREETING = frames.HELLO + NONCE.encode() + b"\n"
WAIT_S = 20


class LocalNode:
    """A supervisor that has greeted, unless `greet` is false. Nothing is read from it but in the calls that wait.

    `frames` are all headers so far but for output, which `output` holds by local rank (None: the command) and stream.
    """

    def __init__(
        self,
        folder: Path,
        *,
        python: str = sys.executable,
        prelude: str = "",
        environ: Mapping[str, str] | None = None,
        greet: bool = True,
    ) -> None:
        self.folder = folder
        self.marker = secrets.token_hex(16)
        self.job_dir = folder / f"gpulayer-{self.marker[:8]}"
        self.frames: list[Header] = []
        self.payloads: list[bytes] = []
        self.output: dict[tuple[int | None, str], bytearray] = {}
        self.noise = b""
        self.answers_drained = True
        self._reader: frames.FrameReader | None = None
        self._stderr = (folder / f"stderr-{self.marker[:8]}").open("w+b")
        self.process = subprocess.Popen(
            ["/bin/sh", "-c", prelude + bootstrap_command(python)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            env=None if environ is None else dict(environ),
            start_new_session=True,
        )
        self.write(bootstrap_input(NONCE))
        self.hello: Header = self.wait_for("hello") if greet else {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Nothing of it is left, whatever the test did."""
        self.end_of_file()
        for process in self.processes():
            processes.signal_process(process, signal.SIGKILL)
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        for file in (self.process.stdout, self._stderr):
            if file:
                file.close()

    @property
    def stderr(self) -> str:
        """What the shell and the supervisor wrote to stderr."""
        return Path(self._stderr.name).read_text(errors="replace")

    def processes(self) -> list[processes.Process]:
        """The living processes of the job that can be told by its marker, the guard and the supervisor among them."""
        return processes.job_processes(self.marker, set())

    def of_job(self) -> list[int]:
        """The pids of the living processes that carry the marker."""
        entry = processes.marker_entry(self.marker)
        return [one.pid for one in self.processes() if entry in processes.environment_of(one.pid)]

    @property
    def guard_pid(self) -> int:
        """The process between the supervisor and the command."""
        guard = processes.read_process(self.wait_for("started")["pid"])
        return guard.ppid if guard else 0

    # -- to the supervisor

    def write(self, data: bytes) -> None:
        """Write to its stdin; if it is gone, so be it."""
        with contextlib.suppress(BrokenPipeError):
            while self.process.stdin and not self.process.stdin.closed and data:
                data = data[os.write(self.process.stdin.fileno(), data) :]

    def send(self, kind: str, payload: bytes = b"", **fields: object) -> None:
        """Send a frame."""
        self.write(frames.encode_frame({"type": kind, **fields}, payload))

    def prepare(self, argv: Sequence[str], **changes: object) -> Header:
        """Send the job, with these fields changed, and return the answer."""
        job = {
            "argv": list(argv),
            "env": {"PYTHONPATH": str(FAKE_TORCH), "PYTHONUNBUFFERED": "1"},
            "workdir": str(self.folder),
            "job_dir": str(self.job_dir),
            "node_rank": 1,
            "nnodes": 2,
            "nproc_per_node": 1,
            "first_rank": 0,
            "launcher": "torchrun",
            "address": "127.0.0.1",
            "interface": None,
            "master_addr": "127.0.0.1",
            "master_port": 29500,
            "marker": self.marker,
            "grace_s": 1.0,
            "lost_after_s": 60.0,
            "outputs": [],
        }
        self.send("prepare", json.dumps(job | changes).encode())
        return self.wait_for("prepared", "refused", "error")

    def run(self, argv: Sequence[str], **changes: object) -> None:
        """Prepare, start, and see the command started."""
        answer = self.prepare(argv, **changes)
        assert answer["type"] == "prepared", answer
        self.send("start")
        self.wait_for("started")

    def end_of_file(self) -> None:
        """Close its stdin, as the end of an SSH connection does."""
        if self.process.stdin and not self.process.stdin.closed:
            self.process.stdin.close()

    def break_stdout(self) -> None:
        """Close the end of its stdout that is read here."""
        if self.process.stdout:
            self.process.stdout.close()

    # -- from the supervisor

    def wait_for(self, *kinds: str, timeout_s: float = WAIT_S, **fields: object) -> Header:
        """Return the first frame of one of these types with these fields, reading on until there is one."""
        deadline = time.monotonic() + timeout_s
        while True:
            for header in self.frames:
                if header["type"] in kinds and header.items() >= fields.items():
                    return header
            if not self._read(deadline):
                pytest.fail(f"no {kinds} {fields} in {self.frames}; stderr: {self.stderr}", pytrace=False)

    def payload_of(self, header: Header) -> dict[str, bytes]:
        """The parts that came with an `exit` or `rank_exit` frame."""
        payload = self.payloads[next(at for at, one in enumerate(self.frames) if one is header)]
        parts = {}
        for name, size in header["parts"]:
            parts[name], payload = payload[:size], payload[size:]
        assert payload == b""
        return parts

    def wait_for_output(self, local_rank: int | None, text: bytes, stream: str = "stdout") -> None:
        """Read on until a stream holds this text."""
        deadline = time.monotonic() + WAIT_S
        searched = 0
        while (found := self.output.get((local_rank, stream), bytearray())).find(text, searched) < 0:
            searched = max(0, len(found) - len(text))
            if not self._read(deadline):
                pytest.fail(f"no {text!r} after {len(found)} bytes; frames: {self.frames}", pytrace=False)

    def read_until(self, condition: Callable[[], bool], what: str, timeout_s: float = WAIT_S) -> None:
        """Keep reading, as a launcher does, until a condition holds."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, f"not within {timeout_s} s: {what}"
            self._read(time.monotonic() + 0.01)

    def finish(self, timeout_s: float = WAIT_S) -> Header:
        """Read to the end of its stdout, wait for it, and return the last frame."""
        deadline = time.monotonic() + timeout_s
        while self._read(deadline):
            pass
        assert self.process.wait(max(0.1, deadline - time.monotonic())) is not None
        assert self.frames, self.stderr
        return self.frames[-1]

    def _read(self, deadline: float) -> bool:
        """Read a piece; False at the end of file or when time is up."""
        if self.process.stdout is None or self.process.stdout.closed:
            return False
        fd = self.process.stdout.fileno()
        if not select.select([fd], [], [], max(0.0, deadline - time.monotonic()))[0]:
            return False
        data = taken = os.read(fd, 1 << 16)
        if self._reader is None:
            self.noise += data
            before, greeting, data = self.noise.partition(GREETING)
            if greeting:
                self.noise = before
                self._reader = frames.FrameReader(frames.MAX_EVENT_BYTES)
        for header, payload in self._reader.feed(data) if self._reader else ():
            self._take(header, payload)
        return bool(taken)

    def _take(self, header: Header, payload: bytes) -> None:
        if header["type"] == "output":
            key = (header["local_rank"], header["stream"])
            self.output.setdefault(key, bytearray()).extend(payload)
            self.send("seen", bytes=sum(map(len, self.output.values())))
            return
        self.frames.append(header)
        self.payloads.append(payload)
        if header["type"] == "drained" and self.answers_drained:
            self.send("arrived")


def fake_torchrun(node: LocalNode, script: Path, *args: str, nproc_per_node: int = 1) -> list[str]:
    """The argv of a stand-in torchrun that runs a Python script on every rank."""
    flags = f"--nnodes 1 --nproc-per-node {nproc_per_node} --node-rank 0 --rdzv-id j --redirects 3".split()
    run = [sys.executable, "-m", "torch.distributed.run", *flags, "--master-addr", "127.0.0.1", "--master-port", "1"]
    return [*run, "--log-dir", f"{node.job_dir}/ranks", "--", str(script), *args]


def free_port() -> int:
    """A TCP port that nobody has now."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def is_alive(pid: int) -> bool:
    """Tell whether a process is there and no zombie."""
    process = processes.read_process(pid)
    return process is not None and process.alive


def wait_gone(*pids: int, timeout_s: float = 5) -> float:
    """Wait until none of these processes is alive, and return how many seconds that took."""
    return wait_until(lambda: not any(map(is_alive, pids)), f"{pids} are gone", timeout_s=timeout_s)


def pid_in(path: Path) -> int:
    """The pid that a program of the job writes to a file, once it is there."""
    wait_until(lambda: path.exists() and path.read_text().endswith("\n"), f"{path.name} holds a pid", timeout_s=WAIT_S)
    return int(path.read_text())


class Subreaper:
    """Makes this process the one that escaped descendants come to, so that none can escape a test unseen."""

    def __enter__(self) -> Self:
        self._before = self._children()
        self._set(1)
        return self

    def __exit__(self, *_: object) -> None:
        self._set(0)

    def left(self) -> list[str]:
        """Kill what the test left, and say what it was."""
        found = []
        for process in [one for one in self._children() if one.pid not in {old.pid for old in self._before}]:
            if process.alive:
                found.append(f"{process.pid} {processes.describe(process)['command']}")
            os.kill(process.pid, signal.SIGKILL)  # a child that nobody has waited for: the pid is its own
            os.waitpid(process.pid, 0)
        return found

    def living(self) -> bool:
        """Tell whether a child that was not there before is alive."""
        before = {old.pid for old in self._before}
        return any(one.alive and one.pid not in before for one in self._children())

    @staticmethod
    def _children() -> list[processes.Process]:
        return processes.children_of(os.getpid())

    @staticmethod
    def _set(value: int) -> None:
        ctypes.CDLL(None).prctl(guard.PR_SET_CHILD_SUBREAPER, value, 0, 0, 0)
