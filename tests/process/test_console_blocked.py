"""Terminals that are stopped, pipes that no one reads, readers that leave: the job and its files do not notice."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
import threading
import time
import tty
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from gpulayer.console import Console, ConsoleOptions, ShownNode, Terminal
from gpulayer.events import Notice, Output
from gpulayer.logs import RunDirectory
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[2]
ENVIRON = {**os.environ, "PYTHONPATH": str(ROOT)}
NODES = (ShownNode(0, "gpu-01", (0,)),)
LINE = b"x" * 99 + b"\n"
CHUNK = LINE * 655

PROGRAM = """
import sys
from pathlib import Path
from gpulayer.console import Console, ShownNode, Terminal
from gpulayer.events import Notice, Output
from gpulayer.logs import RunPaths
console = Console(Terminal.detect({}), (ShownNode(0, "gpu-01", (0,)),), RunPaths(Path("runs/j")))
for number in range(200):
    console.handle(Output(0, 0, "stdout", b"line %d\\n" % number * 1000), 0.0)
console.handle(Notice("the job is done"), 1.0)
sys.exit(0 if console.close(0.3) else 7)
"""


class Reader(threading.Thread):
    """Reads a descriptor to its end, or until `close` on the other side of a terminal."""

    def __init__(self, fd: int) -> None:
        super().__init__()
        self.fd = fd
        self.data = bytearray()

    def run(self) -> None:
        """Read all there is."""
        try:
            while data := os.read(self.fd, 1 << 16):
                self.data += data
        except OSError:  # a terminal whose other side is closed
            return


@pytest.fixture
def fds(request: pytest.FixtureRequest) -> Iterator[tuple[int, int]]:
    """Return the reading and the writing side of a terminal or a pipe; the test closes the writing side."""
    if request.param == "pty":
        reading, writing = pty.openpty()
        tty.setraw(writing)
    else:
        reading, writing = os.pipe()
    yield reading, writing
    os.close(reading)


@pytest.mark.parametrize("fds", ["pty", "pipe"], indirect=True)
def test_nobody_reads(fds: tuple[int, int], tmp_path: Path) -> None:
    """With no reader at all, 100 MB pass, the files have every byte, and the queue stays within its bound."""
    reading, writing = fds
    with RunDirectory.create_at(tmp_path / "run") as run_dir:
        console = Console(Terminal.detect({}, writing, writing), NODES, run_dir.paths)
        sent = 0
        while sent < 100_000_000:
            event = Output(0, 0, "stdout", CHUNK)
            run_dir.write_output(event)
            console.handle(event, 0.0)
            sent += len(CHUNK)
        console.handle(Notice("never dropped"), 0.0)
        assert run_dir.paths.output(0, 0, "stdout").stat().st_size == sent
        assert console._screen._out._queued_bytes <= (8 << 20) + 100
    reader = Reader(reading)  # the terminal moves again
    reader.start()
    assert console.close(10.0)
    os.close(writing)
    reader.join(10)
    lines = bytes(reader.data).split(b"\n")
    assert lines.pop() == b""
    shown = lines.count(b"[0] " + LINE[:-1])
    missing = sent // len(LINE) - shown
    where = tmp_path / "run"
    told = f"gpulayer: screen too slow: {missing} lines not shown here; all of it is in {where}".encode()
    assert sorted(lines[shown:]) == sorted([b"gpulayer: never dropped", told])
    assert missing > 0


@pytest.mark.parametrize("fds", ["pipe"], indirect=True)
def test_output_goes_on_after_a_gap(fds: tuple[int, int]) -> None:
    """When a reader catches up, the gap is told where it is, and what comes after is shown."""
    reading, writing = fds
    console = Console(Terminal.detect({}, writing, writing), NODES, None, ConsoleOptions(queue_bytes=200_000))
    for _ in range(10):
        console.handle(Output(0, 0, "stdout", CHUNK), 0.0)
    reader = Reader(reading)
    reader.start()
    wait_until(lambda: b"not shown here\n" in reader.data, "the gap was told")
    console.handle(Output(0, 0, "stdout", b"after\n"), 1.0)
    assert console.close(5.0)
    os.close(writing)
    reader.join(10)
    lines = bytes(reader.data).splitlines()
    assert lines[-1] == b"[0] after"
    assert lines[-2] == f"gpulayer: screen too slow: {6550 - len(lines) + 2} lines not shown here".encode()
    assert set(lines[:-2]) == {b"[0] " + LINE[:-1]}


@pytest.mark.parametrize("fds", ["pipe"], indirect=True)
def test_stuck_stdout_holds_back_no_message(fds: tuple[int, int], tmp_path: Path) -> None:
    """With stdout in a pager that waits, what gpulayer says on stderr is there at once."""
    reading, writing = fds
    with (tmp_path / "stderr").open("w+b") as stderr:
        console = Console(Terminal.detect({}, writing, stderr.fileno()), NODES)
        for _ in range(200):
            console.handle(Output(0, 0, "stdout", CHUNK), 0.0)
        console.handle(Notice("still here"), 0.0)
        wait_until(lambda: b"still here" in (tmp_path / "stderr").read_bytes(), "the message")
        begin = time.monotonic()
        assert not console.close(0.3)
        assert 0.2 < time.monotonic() - begin < 5
        said = (tmp_path / "stderr").read_text().splitlines()
        assert said[0] == "gpulayer: still here"
        left_out = [int(line.split()[4]) for line in said[1:]]  # first those that met a full queue, then the queue
        assert sum(left_out) > 200 * 655 - 2 * (1 << 20) // len(LINE)
    drained = Reader(reading)
    drained.start()
    wait_until(lambda: not console._screen._out._thread.is_alive(), "the writer has ended")
    os.close(writing)
    drained.join(10)


@pytest.mark.parametrize("fds", ["pipe"], indirect=True)
def test_slow_reader_is_waited_for(fds: tuple[int, int], tmp_path: Path) -> None:
    """Closing takes longer than its limit as long as the reader keeps reading."""
    reading, writing = fds
    with (tmp_path / "stderr").open("w+b") as stderr:
        console = Console(Terminal.detect({}, writing, stderr.fileno()), NODES)
        for _ in range(8):
            console.handle(Output(0, 0, "stdout", CHUNK), 0.0)
        done = threading.Event()
        got = bytearray()

        def read_slowly() -> None:
            while data := os.read(reading, 1 << 15):
                got.extend(data)
                done.wait(0.1)  # the slowness is what is tested

        slow = threading.Thread(target=read_slowly)
        slow.start()
        begin = time.monotonic()
        assert console.close(1.0)
        assert time.monotonic() - begin > 1.0
        done.set()
        os.close(writing)
        slow.join(10)
    assert len(got) == 8 * len(CHUNK) + 8 * 655 * len(b"[0] ")


@pytest.mark.parametrize("fds", ["pipe"], indirect=True)
def test_descriptor_that_does_not_block(fds: tuple[int, int]) -> None:
    """A stdout that someone made non-blocking loses nothing."""
    reading, writing = fds
    os.set_blocking(writing, False)
    console = Console(Terminal.detect({}, writing, writing), NODES)
    for _ in range(20):
        console.handle(Output(0, 0, "stdout", CHUNK), 0.0)
    reader = Reader(reading)
    reader.start()
    assert console.close(5.0)
    os.close(writing)
    reader.join(10)
    assert bytes(reader.data) == (b"[0] " + LINE) * 20 * 655


def test_full_disk_under_stdout(tmp_path: Path) -> None:
    """Where stdout is a file on a full disk, that is said once on stderr, and the job goes on."""
    with open("/dev/full", "wb") as full, (tmp_path / "stderr").open("w+b") as stderr:  # noqa: PTH123 - a device
        console = Console(Terminal.detect({}, full.fileno(), stderr.fileno()), NODES)
        console.handle(Output(0, 0, "stdout", b"lost\n"), 0.0)
        wait_until(lambda: (tmp_path / "stderr").stat().st_size > 0, "the message")
        console.handle(Output(0, 0, "stdout", b"lost\n"), 0.0)
        assert not console.close(5.0)
    text = "gpulayer: cannot write to stdout: No space left on device; the job goes on\n"
    assert (tmp_path / "stderr").read_text() == text


def test_reader_that_leaves() -> None:
    """`| head -1` ends the printing: no error, no traceback, exit code of the job."""
    with (
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=ENVIRON
        ) as job,
        subprocess.Popen(["head", "-1"], stdin=job.stdout, stdout=subprocess.PIPE) as head,
    ):
        assert job.stdout
        assert job.stderr
        job.stdout.close()
        assert head.communicate(timeout=20)[0] == b"[0] line 0\n"
        assert job.stderr.read() == b"gpulayer: the job is done\n"
        assert job.wait(20) == 0


def test_interpreter_ends_with_a_stuck_writer() -> None:
    """With a writer that is stuck for ever, the program still ends, and says what it did not show."""
    reading, writing = os.pipe()
    try:
        job = subprocess.run(
            [sys.executable, "-c", PROGRAM],
            stdout=writing,
            stderr=subprocess.PIPE,
            timeout=20,
            check=False,
            env=ENVIRON,
        )
    finally:
        os.close(writing)
        os.close(reading)
    assert job.returncode == 7
    first, second = job.stderr.decode().splitlines()
    assert first == "gpulayer: the job is done"
    assert second.startswith("gpulayer: screen too slow: ")
    assert second.endswith(" lines not shown here; all of it is in runs/j")


@pytest.mark.parametrize("first", ["", "import gpulayer.screen as s; s.open_standard_fds(); f = open('log', 'w')"])
def test_closed_stdout(first: str, tmp_path: Path) -> None:
    """Started with stdout closed (`>&-`), the job runs, nothing is printed into its files, messages are on stderr."""
    (tmp_path / "log").write_text("")
    command = ["sh", "-c", 'exec "$0" -c "$1" >&-', sys.executable, f"{first}\n{PROGRAM}"]
    job = subprocess.run(command, stderr=subprocess.PIPE, timeout=20, check=False, cwd=tmp_path, env=ENVIRON)
    assert (job.returncode, job.stderr) == (0, b"gpulayer: the job is done\n")
    assert (tmp_path / "log").read_text() == ""
