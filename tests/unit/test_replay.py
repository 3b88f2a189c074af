"""`gpulayer logs` on real run directories: order, tags, what is chosen, following, readers that leave or are slow."""

from __future__ import annotations

import json
import os
import threading
import time
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

import pytest

from gpulayer.errors import JobError
from gpulayer.events import Output
from gpulayer.history import read_run
from gpulayer.replay import Choice, show_logs
from gpulayer.screen import Terminal
from tests.support.terminal import terminal
from tests.support.waiting import wait_until
from tests.unit.test_history import begin

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from gpulayer.logs import RunDirectory

# Nodes 0 and 1 have ranks 0, 1 and 2, 3. When, of whom, where, what.
STORY = [
    (0.1, 0, None, "stderr", b"torchrun begins\n"),
    (0.5, 1, 2, "stdout", b"two A\n"),
    (0.7, 0, 0, "stdout", b"zero A\nzero "),
    (0.9, 1, 2, "stderr", b"two warns\n"),
    (1.1, 0, 0, "stdout", b"B\n"),
    (1.3, 1, 2, "stdout", b"two B\nno end"),
    (1.5, 0, 1, "stdout", b"one A\n"),
]


def tell(run: RunDirectory, story: list[tuple[float, int, int | None, str, bytes]]) -> None:
    """Write output as the launcher does."""
    for at_s, node_rank, rank, stream, data in story:
        run.write_output(Output(node_rank, rank, stream, data), at_s)  # type: ignore[arg-type]
        run.tick(at_s)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[RunDirectory]:
    """A run that goes on."""
    with begin(tmp_path, "job", 1) as run:
        yield run


def end(run: RunDirectory, **receipt: object) -> None:
    """End a run as the launcher does."""
    run.close_files()
    run.write_receipt({"job_id": "job", "exit_code": 0, "took_s": 1.0, "cause": None, **receipt})
    run.close()


def show(root: Path, choice: Choice, screens: Path) -> tuple[int, str, str]:
    """Return the exit code of `gpulayer logs`, its stdout and its stderr."""
    fds = [os.open(screens / name, os.O_RDWR | os.O_CREAT | os.O_TRUNC) for name in ("out", "err")]
    past = read_run(root)
    assert past
    try:
        code = show_logs(past, choice, Terminal.detect({}, *fds))
    finally:
        for fd in fds:
            os.close(fd)
    return code, (screens / "out").read_text(), (screens / "err").read_text()


def test_one_stream_after_the_other(run: RunDirectory, tmp_path: Path) -> None:
    """In the order of nodes and ranks, torchrun's last, under the screen's tags; each stream ends its own last line."""
    tell(run, STORY)
    end(run)
    assert show(run.paths.root, Choice(), tmp_path) == (
        0,
        "[0/0] zero A\n[0/0] zero B\n[0/1] one A\n[1/2] two A\n[1/2] two B\n[1/2] no end\n",
        "[0] torchrun begins\n[1/2] two warns\n",
    )


def test_a_stream_that_has_no_last_newline(run: RunDirectory, tmp_path: Path) -> None:
    """Its end is shown before the next stream begins."""
    tell(run, [(0.1, 0, 0, "stdout", b"zero"), (0.2, 0, 1, "stdout", b"one\n"), (0.3, 1, 2, "stdout", b"two")])
    end(run)
    assert show(run.paths.root, Choice(), tmp_path)[1] == "[0/0] zero\n[0/1] one\n[1/2] two\n"


def test_merged_by_time(run: RunDirectory, tmp_path: Path) -> None:
    """All streams together, in the order in which lines came to their end; stderr stays stderr."""
    tell(run, STORY)
    end(run)
    code, out, err = show(run.paths.root, Choice(merge=True), tmp_path)
    lines = "[1/2] two A\n[0/0] zero A\n[0/0] zero B\n[1/2] two B\n[0/1] one A\n[1/2] no end\n"
    assert (code, out, err) == (0, lines, "[0] torchrun begins\n[1/2] two warns\n")
    both = tmp_path / "both"
    with both.open("w") as file:
        past = read_run(run.paths.root)
        assert past
        assert show_logs(past, Choice(merge=True), Terminal.detect({}, file.fileno(), file.fileno())) == 0
    assert both.read_text().splitlines()[:4] == [
        "[0] torchrun begins",
        "[1/2] two A",
        "[0/0] zero A",
        "[1/2] two warns",
    ]


@pytest.mark.parametrize(
    ("choice", "lines"),
    [
        (Choice(node="0"), ["[0/0] zero A", "[0/0] zero B", "[0/1] one A"]),
        (Choice(node="gpu-02"), ["[1/2] two A", "[1/2] two B", "[1/2] no end"]),
        (Choice(rank=1), ["[0/1] one A"]),
        (Choice(rank=2, merge=True), ["[1/2] two A", "[1/2] two B", "[1/2] no end"]),
        (Choice(node="1", rank=3), []),
    ],
)
def test_what_is_chosen(run: RunDirectory, tmp_path: Path, choice: Choice, lines: list[str]) -> None:
    """--node takes a node rank or an id, --rank a rank; whoever wrote nothing is said to have."""
    tell(run, STORY)
    end(run)
    code, out, err = show(run.paths.root, choice, tmp_path)
    assert (code, out.splitlines()) == (0, lines)
    nothing = f"gpulayer: nothing was written in {run.paths.root} by what is asked for\n"
    assert (nothing in err) == (lines == [])


@pytest.mark.parametrize(
    ("choice", "message", "hint"),
    [
        (Choice(node="7"), "`--node 7`: the run has none such", "it had node ranks [0-1]: gpu-[01-02]"),
        (Choice(rank=4), "`--rank 4`: there is none such", "there were ranks [0-3]"),
        (Choice(node="1", rank=0), "`--rank 0`: there is none such", "there were ranks [2-3]"),
    ],
)
def test_what_cannot_be_chosen(run: RunDirectory, tmp_path: Path, choice: Choice, message: str, hint: str) -> None:
    """The error says what the run had."""
    with pytest.raises(JobError) as caught:
        show(run.paths.root, choice, tmp_path)
    assert (str(caught.value), caught.value.hint) == (message, hint)


def test_without_its_index(run: RunDirectory, tmp_path: Path) -> None:
    """A run without output.jsonl cannot be merged, and can be read stream by stream."""
    tell(run, STORY)
    end(run)
    run.paths.timeline.unlink()
    with pytest.raises(JobError, match=r"output\.jsonl is missing, which says when output came"):
        show(run.paths.root, Choice(merge=True), tmp_path)
    assert show(run.paths.root, Choice(), tmp_path)[1].count("\n") == 6


def test_an_index_with_gaps(run: RunDirectory, tmp_path: Path) -> None:
    """A line that a full disk cost takes no byte with it: they come with the next line, or at the end."""
    tell(run, STORY)
    end(run)
    lines = run.paths.timeline.read_bytes().splitlines(keepends=True)
    torn = [line for line in lines if json.loads(line)[0] not in (0.7, 1.5)]
    run.paths.timeline.write_bytes(b"".join(torn) + b"[1.6,0")
    code, out, _ = show(run.paths.root, Choice(merge=True), tmp_path)
    assert (code, out.splitlines()) == (
        0,
        ["[1/2] two A", "[0/0] zero A", "[0/0] zero B", "[1/2] two B", "[0/1] one A", "[1/2] no end"],
    )


@contextmanager
def following(run: RunDirectory, choice: Choice, screens: Path) -> Iterator[list[tuple[int, str, str]]]:
    """Follow a run on another thread; its result is there when the block ends."""
    result: list[tuple[int, str, str]] = []
    thread = threading.Thread(target=lambda: result.append(show(run.paths.root, choice, screens)), daemon=True)
    thread.start()
    yield result
    thread.join(30)
    assert not thread.is_alive()


def _has(path: Path, text: str) -> bool:
    return path.exists() and text in path.read_text()


@pytest.mark.parametrize("merge", [False, True])
def test_a_run_is_followed_to_its_end(run: RunDirectory, tmp_path: Path, merge: bool) -> None:
    """What comes is shown as it comes, a line that does not end too; the last line says how the run ended."""
    out = tmp_path / "out"
    with following(run, Choice(follow=True, merge=merge), tmp_path) as result:
        for number, (_, node_rank, rank, stream, data) in enumerate(STORY[1:3]):
            tell(run, [(number / 2, node_rank, rank, stream, data)])
            run.tick()
            wait_until(partial(_has, out, data.decode().splitlines()[0]), f"{data!r} on the screen")
        wait_until(
            lambda: "[0/0] zero\n" in out.read_text() or "[0/0] zero \n" in out.read_text(), "a line without end"
        )
        assert not result
        tell(run, [(3.0, 1, 3, "stdout", b"the last\n")])
        end(run, exit_code=1, cause={"text": "rank 3 exited with code 1"})
    code, shown, err = result[0]
    assert (code, err) == (0, "gpulayer: job job: rank 3 exited with code 1, exit code 1\n")
    assert shown.splitlines() == ["[1/2] two A", "[0/0] zero A", "[0/0] zero ", "[1/3] the last"]


def test_a_launcher_that_dies_ends_the_following(run: RunDirectory, tmp_path: Path) -> None:
    """Its lock goes with it: nothing more will come, and it says that there is no receipt."""
    with following(run, Choice(follow=True), tmp_path) as result:
        tell(run, STORY[1:2])
        run.close()
    assert result == [(0, "[1/2] two A\n", "gpulayer: job job: ended without a receipt\n")]


def test_a_reader_that_leaves_ends_it(run: RunDirectory) -> None:
    """`gpulayer logs | head -1` is no error, and does not read gigabytes for nobody, nor follow for ever."""
    for _ in range(40):
        run.write_output(Output(0, 0, "stdout", b"a line\n" * 100_000))
    past = read_run(run.paths.root)
    assert past
    reading, writing = os.pipe()
    terminal = Terminal.detect({}, writing, 2)
    codes: list[int] = []
    thread = threading.Thread(target=lambda: codes.append(show_logs(past, Choice(follow=True), terminal)), daemon=True)
    thread.start()
    assert os.read(reading, 100).startswith(b"[0/0] a line\n")
    os.close(reading)
    thread.join(30)
    os.close(writing)
    assert codes == [0]


def test_a_slow_reader_gets_every_line(run: RunDirectory) -> None:
    """More than the screen's queue holds: it waits for the reader, and nothing is left out."""
    line, count = b"x" * 99 + b"\n", 200_000
    for _ in range(100):
        run.write_output(Output(0, 0, "stdout", line * (count // 100)))
    end(run)
    past = read_run(run.paths.root)
    assert past
    reading, writing = os.pipe()
    codes: list[int] = []

    def replay() -> None:
        codes.append(show_logs(past, Choice(), Terminal.detect({}, writing, writing)))
        os.close(writing)

    thread = threading.Thread(target=replay, daemon=True)
    thread.start()
    time.sleep(0.5)  # nobody reads meanwhile
    assert not codes
    seen = 0
    while data := os.read(reading, 1 << 20):
        seen += data.count(b"\n")
    thread.join(30)
    os.close(reading)
    assert (codes, seen) == ([0], count)


def test_stdout_that_cannot_be_written(run: RunDirectory, capfd: pytest.CaptureFixture[str]) -> None:
    """A full disk is told, and is exit code 1."""
    tell(run, STORY)
    end(run)
    past = read_run(run.paths.root)
    assert past
    fd = os.open("/dev/full", os.O_WRONLY)
    try:
        assert show_logs(past, Choice(node="1"), Terminal.detect({}, fd, 2)) == 1
    finally:
        os.close(fd)
    assert "gpulayer: cannot write to stdout: No space left on device\n" in capfd.readouterr().err


def test_a_terminal_is_safe(run: RunDirectory) -> None:
    """Control sequences that a rank wrote show as text, as while it ran."""
    tell(run, [(0.1, 0, 0, "stdout", b"a \x1b[31mred\x1b[0m \x1b[2J\x1b]0;title\x07\n")])
    end(run)
    past = read_run(run.paths.root)
    assert past
    with terminal() as pty:
        pty.start_reading()
        assert show_logs(past, Choice(), Terminal.detect({"TERM": "xterm"}, pty.slave, pty.slave)) == 0
        pty.hang_up()
    assert "[0/0]\x1b[0m a \x1b[31mred\x1b[0m ^[[2J^[]0;title^G" in pty.text
