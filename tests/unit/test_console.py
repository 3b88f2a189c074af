"""Recorded events on a screen, without nodes: what people read, byte for byte."""

from __future__ import annotations

import os
import pty
import threading
import tty
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from gpulayer.console import Console, ConsoleOptions, ShownNode, Terminal, render_table
from gpulayer.errors import ConnectTimeoutError, HostsFileError, NameNotFoundError, PythonMissingError, RefusedError
from gpulayer.events import (
    CommandExited,
    CommandStarted,
    Event,
    ExitStatus,
    NodeConnected,
    NodeEnded,
    NodeLost,
    NodePrepared,
    NodeStopping,
    NodeSwept,
    Notice,
    Output,
    RankExited,
    RankStarted,
    Stage,
    StageReached,
    Survivor,
)
from gpulayer.logs import RunPaths
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

ONE_EACH = tuple(ShownNode(r, f"gpu-{r + 1:02}", (r,)) for r in range(4))
UNEVEN = (ShownNode(0, "gpu-01", (0, 1)), ShownNode(1, "gpu-02", (2,)))
PATHS = RunPaths(Path("runs/j"))

Recording = list[tuple[float, Event]]


def replay(console: Console, recording: Recording) -> None:
    """Hand the events to the console at their times, with a tick every 0.2 s between them."""
    now = 0.0
    for at_s, event in recording:
        while now + 0.2 < at_s:
            now += 0.2
            console.tick(now)
        now = at_s
        console.handle(event, at_s)


def show(
    tmp_path: Path,
    recording: Recording,
    nodes: Sequence[ShownNode] = ONE_EACH,
    options: ConsoleOptions | None = None,
    then: Callable[[Console], object] = lambda _: None,
) -> tuple[str, str]:
    """Replay events with stdout and stderr in files; return what stands there."""
    fds = [os.open(tmp_path / name, os.O_RDWR | os.O_CREAT | os.O_TRUNC) for name in ("stdout", "stderr")]
    try:
        console = Console(Terminal.detect({"TERM": "xterm"}, *fds), nodes, PATHS, options)
        replay(console, recording)
        then(console)
        assert console.close(5.0)
    finally:
        for fd in fds:
            os.close(fd)
    return (tmp_path / "stdout").read_text(), (tmp_path / "stderr").read_text()


class Pty:
    """A terminal that is read all the time. Raw: newlines come out as they went in."""

    def __init__(self) -> None:
        self.master, self.slave = pty.openpty()
        tty.setraw(self.slave)
        self._read = bytearray()
        self._thread = threading.Thread(target=self._drain)
        self._thread.start()

    def _drain(self) -> None:
        try:
            while data := os.read(self.master, 65536):
                self._read.extend(data)
        except OSError:  # the other side is closed
            return

    def wait_for(self, text: str) -> None:
        """Wait until something has been drawn."""
        wait_until(lambda: text in self._read.decode(errors="replace"), f"{text!r} on the terminal")

    def text(self) -> str:
        """Close the terminal and return all that was drawn."""
        os.close(self.slave)
        self._thread.join(10)
        os.close(self.master)
        return self._read.decode()


@pytest.fixture
def terminal() -> Iterator[Pty]:
    """Return a terminal of 80 columns."""
    screen = Pty()
    yield screen
    if screen._thread.is_alive():
        screen.text()


def draw(
    screen: Pty,
    recording: Recording,
    environ: dict[str, str] | None = None,
    options: ConsoleOptions | None = None,
    nodes: Sequence[ShownNode] = UNEVEN,
) -> str:
    """Replay events with both streams on one terminal."""
    detected = Terminal.detect(environ or {"TERM": "xterm"}, screen.slave, screen.slave)
    console = Console(detected, nodes, PATHS, options)
    replay(console, recording)
    assert console.close(5.0)
    return screen.text()


def started(nodes: Sequence[ShownNode]) -> Recording:
    """Return the events of a job that has come as far as running."""
    events: list[Event] = [StageReached(Stage.CONNECTING)]
    for node in nodes:
        events += [NodeConnected(node.node_rank, f"{node.node_id}.x", "3.11.7", "Linux 6.1", 40 + node.node_rank)]
        events += [NodePrepared(node.node_rank, "eth0")]
    events += [StageReached(Stage.STARTING)]
    for node in nodes:
        events += [CommandStarted(node.node_rank, 100 + node.node_rank)]
        events += [RankStarted(node.node_rank, rank, 200 + rank) for rank in node.ranks]
    return [(0.0, event) for event in [*events, StageReached(Stage.RUNNING)]]


def out(node_rank: int, rank: int | None, data: bytes) -> Output:
    """Return output on stdout."""
    return Output(node_rank, rank, "stdout", data)


def err(node_rank: int, rank: int | None, data: bytes) -> Output:
    """Return output on stderr."""
    return Output(node_rank, rank, "stderr", data)


FAILURE: Recording = [
    *started(ONE_EACH),
    (1.0, out(0, 0, b"step 1\nstep 2\n")),
    (1.0, out(2, 2, b"loading")),
    (1.1, err(2, 2, b"Traceback:\n  boom\n")),
    (2.0, RankExited(2, 2, ExitStatus(code=17))),
    *[(2.0, NodeStopping(r)) for r in range(4)],
    (2.1, err(0, 0, b"SIGTERM received\n")),
    (2.1, err(2, 2, b"last words\n")),
    (2.2, err(2, None, b"torchrun: failed\n")),
    (2.3, RankExited(0, 0, ExitStatus(signal=15))),
    (2.3, CommandExited(2, ExitStatus(code=1))),
    *[(2.4, NodeSwept(r, 1)) for r in range(4)],
    *[(2.4, NodeEnded(r)) for r in range(4)],
    (2.5, StageReached(Stage.DONE)),
]


def test_failing_job(tmp_path: Path) -> None:
    """The first failure is told at once; what follows from it is in the files, but the failed rank is heard out."""
    stdout, stderr = show(tmp_path, FAILURE)
    assert stdout == "[0] step 1\n[0] step 2\n[2] loading\n"
    assert stderr == (
        "gpulayer: running 4 ranks on 4 nodes, gpu-[01-04]; logs in runs/j\n"
        "[2] Traceback:\n"
        "[2]   boom\n"
        "gpulayer: rank 2 on gpu-03 exited with code 17\n"
        "gpulayer: ending the job on gpu-[01-04]\n"
        "[2] last words\n"
    )


def test_failing_job_verbose(tmp_path: Path) -> None:
    """--verbose shows every step and all output."""
    _, stderr = show(tmp_path, FAILURE, options=ConsoleOptions(verbose=True))
    lines = stderr.splitlines()
    assert lines[:3] == [
        "gpulayer: gpu-01: connected to gpu-01.x, Python 3.11.7, Linux 6.1",
        "gpulayer: gpu-01: ready, interface eth0",
        "gpulayer: gpu-02: connected to gpu-02.x, Python 3.11.7, Linux 6.1",
    ]
    assert lines[-10:] == [
        "gpulayer: ending the job on gpu-[01-04]",
        "[0] SIGTERM received",
        "[2] last words",
        "[2] torchrun: failed",
        "gpulayer: rank 0 on gpu-01 was killed by SIGTERM",
        "gpulayer: torchrun on gpu-03 exited with code 1",
        *[f"gpulayer: gpu-0{number}: clean, 1 process killed" for number in (1, 2, 3, 4)],
    ]


def test_tags_of_uneven_nodes(tmp_path: Path) -> None:
    """A node with several ranks has the rank in its tags; torchrun itself has the node alone."""
    recording: Recording = [(0.0, out(0, 1, b"a\n")), (0.0, out(0, None, b"b\n")), (0.0, out(1, 2, b"c\n"))]
    assert show(tmp_path, recording, UNEVEN)[0] == "[0/1] a\n[0] b\n[1] c\n"
    by_id = ConsoleOptions(label="id")
    assert show(tmp_path, recording, UNEVEN, by_id)[0] == "[gpu-01/1] a\n[gpu-01] b\n[gpu-02] c\n"


def test_bytes_pass_raw_where_no_terminal_is(tmp_path: Path) -> None:
    """In a file or a pipe, bytes stay as they are: NUL, invalid UTF-8, control sequences."""
    fd = os.open(tmp_path / "both", os.O_RDWR | os.O_CREAT)
    console = Console(Terminal.detect({"TERM": "xterm"}, fd, fd), ONE_EACH, PATHS)
    console.handle(out(0, 0, b"\x00\xff\xfe\xc3\x1b[2J\x07\n"), 0.0)
    assert console.close(5.0)
    os.close(fd)
    assert (tmp_path / "both").read_bytes() == b"[0] \x00\xff\xfe\xc3\x1b[2J\x07\n"


def test_what_comes_of_many_nodes_at_once_is_told_once(tmp_path: Path) -> None:
    """A switch takes three nodes with it, for one reason: one line, and one for what is done about it."""
    recording: Recording = [
        *started(ONE_EACH),
        *((1.0, NodeLost(node_rank, "nothing was heard of it for 30 s")) for node_rank in (1, 2)),
        (1.0, NodeStopping(0)),
        (1.0, NodeLost(3, "nothing was heard of it for 30 s")),
        *((1.0, Notice("logging in again", (node_rank,))) for node_rank in (1, 2, 3)),
        (1.0, NodeSwept(1, 0)),
    ]
    assert show(tmp_path, recording)[1].splitlines()[1:] == [
        "gpulayer: gpu-[02-03] are lost: nothing was heard of it for 30 s",
        "gpulayer: ending the job on gpu-01",
        "gpulayer: gpu-04 is lost: nothing was heard of it for 30 s",
        "gpulayer: gpu-[02-04]: logging in again",
    ]


def test_other_messages(tmp_path: Path) -> None:
    """Loss, survivors, kept output and notices name their nodes."""
    recording: Recording = [
        *started(ONE_EACH),
        (1.0, NodeLost(1, "nothing was heard of it for 30 s")),
        (1.0, NodeLost(2, "its link closed", supervisor_died=True)),
        (1.0, NodeSwept(0, 3, (Survivor(77, "D", "python train.py"), Survivor(78, "Z", "x")))),
        (1.0, NodeEnded(0, "/tmp/gpulayer-j-n0")),
        (1.0, Notice("clock is off", (0, 1, 3))),
        (1.0, Notice("two\nlines")),
        (1.0, RankExited(3, 3, ExitStatus(signal=99))),
        (1.0, RankExited(3, 3, ExitStatus())),
    ]
    assert show(tmp_path, recording)[1].splitlines()[1:] == [
        "gpulayer: gpu-02 is lost: nothing was heard of it for 30 s",
        "gpulayer: gpu-03 is lost: its link closed",
        "gpulayer: gpu-01: 2 processes outlived SIGKILL:",
        "            pid 77, state D: python train.py",
        "            pid 78, state Z: x",
        "gpulayer: gpu-01: not all output arrived; it is kept there in /tmp/gpulayer-j-n0",
        "gpulayer: gpu-[01-02,04]: clock is off",
        "gpulayer: two",
        "          lines",
        "gpulayer: rank 3 on gpu-04 was killed by signal 99",
    ]


def waiting_for_two() -> Recording:
    """Return a job in which gpu-03 connects late and gpu-02's ranks start late."""
    steps: Recording = [(0.0, StageReached(Stage.CONNECTING))]
    steps += [(0.2, NodeConnected(r, "h", "3.11", "k", 1)) for r in (0, 1, 3)]
    steps += [(0.2, NodePrepared(r, "")) for r in (0, 1, 3)]
    steps += [(12.5, NodeConnected(2, "h", "3.11", "k", 1)), (14.0, NodePrepared(2, ""))]
    steps += [(14.0, StageReached(Stage.STARTING))]
    steps += [(14.2, RankStarted(r, r, 1)) for r in (0, 2, 3)]
    steps += [(16.0, RankStarted(1, 1, 1)), (16.0, StageReached(Stage.RUNNING)), (30.0, Notice("end"))]
    return steps


def test_waiting_is_told_in_plain_lines(tmp_path: Path) -> None:
    """Where no terminal is, a line says what is waited for after a second, and again at growing intervals."""
    assert show(tmp_path, waiting_for_two())[1] == (
        "gpulayer: connecting, 3 of 4 done, waiting for gpu-03 (1 s)\n"
        "gpulayer: connecting, 3 of 4 done, waiting for gpu-03 (10 s)\n"
        "gpulayer: starting, 3 of 4 done, waiting for gpu-02 (1 s)\n"
        "gpulayer: running 4 ranks on 4 nodes, gpu-[01-04]; logs in runs/j\n"
        "gpulayer: end\n"
    )


def test_waiting_is_drawn_and_erased_on_a_terminal(terminal: Pty) -> None:
    """On a terminal one line at the bottom says what is waited for; it is gone in the end."""
    console = Console(Terminal.detect({"TERM": "xterm"}, terminal.slave, terminal.slave), ONE_EACH, PATHS)
    recording = waiting_for_two()
    replay(console, [step for step in recording if step[0] < 13])
    console.tick(13.0)
    terminal.wait_for("gpulayer: checking, 3 of 4 done, waiting for gpu-03 (13 s)")
    console.handle(Notice("hello"), 13.1)
    terminal.wait_for("\r\x1b[Kgpulayer: hello\ngpulayer: checking, 3 of 4 done, waiting for gpu-03 (13 s)")
    replay(console, [step for step in recording if step[0] >= 13])
    assert console.close(5.0)
    assert after_erasing(terminal.text()) == (
        "gpulayer: hello\n"
        "\x1b[32mgpulayer: running 4 ranks on 4 nodes, gpu-[01-04]; logs in runs/j\x1b[0m\n"
        "gpulayer: end\n"
    )


def after_erasing(text: str) -> str:
    """Return what a terminal still shows where `\\r ESC[K` erases the line it is on."""
    lines = [line.rsplit("\r\x1b[K", 1)[-1] for line in text.split("\n")]
    return "\n".join(lines)


def test_status_fits_one_line(terminal: Pty) -> None:
    """A status longer than the terminal is wide is cut, as a wrapped line could not be erased."""
    nodes = tuple(ShownNode(r, f"node-{r * 7 % 100}-{'ab'[r % 2]}", (r,)) for r in range(64))
    console = Console(Terminal.detect({"TERM": "xterm"}, terminal.slave, terminal.slave), nodes)
    console.handle(StageReached(Stage.CONNECTING), 0.0)
    console.tick(3.0)
    terminal.wait_for("...")
    assert console.close(5.0)
    drawn, erased = terminal.text().split("\r\x1b[K")
    assert drawn.startswith("gpulayer: connecting, 0 of 64 done, waiting for node-")
    assert (len(drawn), erased) == (79, "")


def test_ending_is_waited_for(tmp_path: Path) -> None:
    """While nodes end, those that are still at it are named."""
    recording: Recording = [
        *started(ONE_EACH),
        *[(1.0, NodeStopping(r)) for r in range(4)],
        *[(1.5, NodeEnded(r)) for r in (0, 1)],
        (3.0, NodeEnded(2)),
        (3.0, NodeLost(3, "gone")),
        (20.0, StageReached(Stage.DONE)),
    ]
    assert show(tmp_path, recording)[1].splitlines()[1:] == [
        "gpulayer: ending the job on gpu-[01-04]",
        "gpulayer: ending, 2 of 4 done, waiting for gpu-[03-04] (1 s)",
        "gpulayer: gpu-04 is lost: gone",
    ]


def test_terminal_has_colors_and_no_control_sequences(terminal: Pty) -> None:
    """Tags are coloured by node; the job's own colours stay; nothing of it can move the cursor or set a title."""
    recording: Recording = [
        (0.0, out(0, 0, b"\x1b[2J\x1b]0;owned\x07 \xff\xfe\x00\n\x1b[31mred\n")),
        (0.0, err(1, 2, b"\xc2\x9b2J\n")),
        (0.0, Notice("banner \x1b[2J")),
    ]
    assert draw(terminal, recording) == (
        "\x1b[36m[0/0]\x1b[0m ^[[2J^[]0;owned^G \ufffd\ufffd^@\n"
        "\x1b[36m[0/0]\x1b[0m \x1b[31mred\x1b[0m\n"
        "\x1b[35m[1]\x1b[0m \\x9b2J\n"
        "gpulayer: banner ^[[2J\n"
    )


@pytest.mark.parametrize("environ", [{"TERM": "xterm", "NO_COLOR": "1"}, {"TERM": "dumb"}, {}])
def test_no_color(terminal: Pty, environ: dict[str, str]) -> None:
    """NO_COLOR and terminals without colour get none; unsafe sequences stay harmless."""
    recording: Recording = [(0.0, out(0, 0, b"a\x1b[2J\n")), (0.0, RankExited(1, 2, ExitStatus(code=1)))]
    assert draw(terminal, recording, environ or {"LANG": "C"}) == (
        "[0/0] a^[[2J\ngpulayer: rank 2 on gpu-02 exited with code 1\n"
    )


def test_no_color_set_but_empty_means_color() -> None:
    """NO_COLOR counts when it is not empty, as its definition says."""
    fd, other = pty.openpty()
    try:
        assert Terminal.detect({"TERM": "xterm", "NO_COLOR": ""}, other, other).colored("stdout")
        assert not Terminal.detect({"TERM": "xterm", "NO_COLOR": "0"}, other, other).colored("stdout")
    finally:
        os.close(fd)
        os.close(other)


def test_color_is_decided_stream_by_stream(tmp_path: Path, terminal: Pty) -> None:
    """With stdout in a file and stderr on a terminal, only stderr is coloured."""
    fd = os.open(tmp_path / "stdout", os.O_RDWR | os.O_CREAT)
    console = Console(Terminal.detect({"TERM": "xterm"}, fd, terminal.slave), UNEVEN, PATHS)
    console.handle(out(0, 0, b"\x1b[2J\n"), 0.0)
    console.handle(err(0, 0, b"\x1b[2J\n"), 0.0)
    assert console.close(5.0)
    os.close(fd)
    assert (tmp_path / "stdout").read_text() == "[0/0] \x1b[2J\n"
    assert terminal.text() == "\x1b[36m[0/0]\x1b[0m ^[[2J\n"


def test_progress_and_partial_lines(tmp_path: Path) -> None:
    """Progress is shown now and then, a prompt after half a second, the rest at the end."""
    recording: Recording = [(step / 10, err(0, 0, b"\r%d%%" % step)) for step in range(21)]
    recording += [(2.1, err(0, 0, b"\ndone\n")), (2.2, out(1, 1, b"prompt> ")), (4.0, out(1, 1, b"ok"))]
    stdout, stderr = show(tmp_path, recording)
    assert stdout == "[1] prompt> \n[1] ok\n"
    assert stderr.splitlines() == ["[0] 0%", "[0] 5%", "[0] 10%", "[0] 15%", "[0] 20%", "[0] done"]


def test_long_line_names_its_file(tmp_path: Path) -> None:
    """A line of 5 MB is cut, and says in which file the rest is."""
    stdout, _ = show(tmp_path, [(0.0, out(0, 0, b"y" * 5_000_000 + b"\nnext\n"))])
    head, _, rest = stdout.partition(" ... ")
    assert head == "[0] " + "y" * (1 << 20)
    assert rest == "[3951424 more bytes of this line are only in runs/j/node0/rank0.stdout.log]\n[0] next\n"


def test_error_screen(tmp_path: Path) -> None:
    """An error is one message, a blank line, a hint."""
    error = HostsFileError("hosts.toml: nodes.gpu-01: unknown key `adress`", hint="did you mean `address`?")
    assert show(tmp_path, [], (), then=lambda console: console.print_error(error)) == (
        "",
        "gpulayer: error: hosts.toml: nodes.gpu-01: unknown key `adress`\n\nhint: did you mean `address`?\n",
    )


def test_refused_screen(tmp_path: Path) -> None:
    """Each distinct reason stands once, with its nodes folded and its own hint, in node order."""
    no_answer = "no answer within 10 s"
    error = RefusedError(
        "3 of 4 nodes cannot take part, so nothing was started",
        {
            "gpu-01": ConnectTimeoutError(no_answer, hint="is it up?"),
            "gpu-02": PythonMissingError("no `python3` there"),
            "gpu-03": ConnectTimeoutError(no_answer, hint="is it up?"),
        },
    )
    assert show(tmp_path, [], (), then=lambda console: console.print_error(error))[1] == (
        "gpulayer: error: 3 of 4 nodes cannot take part, so nothing was started\n"
        "\n"
        "gpu-[01,03]: no answer within 10 s\n"
        "hint: is it up?\n"
        "\n"
        "gpu-02: no `python3` there\n"
    )


def test_refusals_that_differ_by_the_name_alone(tmp_path: Path) -> None:
    """Sixty-four names that mean nothing are one block, in which NODE stands for each of them."""
    ids = [f"gpu-{number:02}" for number in range(64)]
    problems = {node_id: NameNotFoundError(f"{node_id}.lan has no address", hint=f"try {node_id}") for node_id in ids}
    error = RefusedError("64 of 64 nodes cannot take part, so nothing was started", {**problems})
    assert show(tmp_path, [], (), then=lambda console: console.print_error(error))[1] == (
        "gpulayer: error: 64 of 64 nodes cannot take part, so nothing was started\n"
        "\n"
        "gpu-[00-63]: NODE.lan has no address\n"
        "hint: try NODE\n"
    )


def test_error_on_a_terminal(terminal: Pty) -> None:
    """Only the words `error` and `hint` are coloured."""
    console = Console(Terminal.detect({"TERM": "xterm"}, terminal.slave, terminal.slave))
    console.print_error(HostsFileError("error: twice", hint="mend it"))
    assert console.close(5.0)
    assert terminal.text() == ("gpulayer: \x1b[1;31merror:\x1b[0m error: twice\n\n\x1b[36mhint:\x1b[0m mend it\n")


def test_blocks_and_data(tmp_path: Path) -> None:
    """A report goes to stderr, what was asked for to stdout; both end in a newline; bad characters do no harm."""

    def both(console: Console) -> None:
        console.block("report\n  of \udcff", "bad")
        console.data('{"a": 1}')

    assert show(tmp_path, [], then=both) == ('{"a": 1}\n', "report\n  of \\udcff\n")


def test_table() -> None:
    """A table is plain text in columns, without trailing blanks; a cell is never read as markup."""
    assert render_table(["node", "gpus"], [["gpu-01", "8"], ["[red]x", ""]], 40) == (
        "node    gpus\ngpu-01  8\n[red]x\n"
    )
