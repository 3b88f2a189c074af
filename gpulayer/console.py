"""Events on a screen: tagged output of the ranks, gpulayer's own messages, what is waited for, errors. The only rich.

messages.py has the words, lines.py cuts streams into lines, screen.py writes without making anyone wait.
Ranks' stdout goes to stdout; their stderr, and all that gpulayer itself says, go to stderr.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from gpulayer.events import (
    CommandExited,
    Event,
    NodeLost,
    NodeStopping,
    Notice,
    Output,
    RankExited,
    Stage,
    StageReached,
    StreamName,
)
from gpulayer.lines import LineSplitter, make_tag, sanitize, tag_block
from gpulayer.messages import (
    PREFIX,
    Message,
    Roster,
    ShownNode,
    Tone,
    Waiting,
    describe_alike,
    describe_event,
    error_text,
    failed,
)
from gpulayer.screen import QUEUE_BYTES, Screen, Terminal

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from gpulayer.errors import GpulayerError
    from gpulayer.logs import RunPaths

__all__ = ["Console", "ConsoleOptions", "ShownNode", "Terminal", "render_table"]

# Told apart on dark and on light backgrounds; red is for failures.
_NODE_COLORS = (36, 35, 33, 34, 32, 96, 95, 94, 92, 93)
_TONE_COLORS: dict[Tone, str] = {"plain": "", "good": "32", "bad": "31", "dim": "2"}

_HINT = re.compile(rb"^hint:", re.MULTILINE)

_STATUS_AFTER_S = 1.0
_PLAIN_STATUS_S = (1.0, 10.0, 30.0)  # then every minute
_PLAIN_STATUS_EVERY_S = 60.0

_Key = tuple[int, int | None, StreamName]


@dataclass(frozen=True, slots=True)
class ConsoleOptions:
    """What a user can choose. `label`: the node rank or the node id in front of each line.

    `patient`: output waits for whoever reads it, and none is left out.
    """

    label: Literal["rank", "id"] = "rank"
    verbose: bool = False
    queue_bytes: int = QUEUE_BYTES
    patient: bool = False


@dataclass(frozen=True, slots=True)
class _Stream:
    splitter: LineSplitter
    tag: bytes


class Console:
    """The screen of one command. `nodes` is empty and `paths` None where no job runs.

    `at_s` and `now` are seconds on one clock. No call waits for a terminal or a pipe but `close`, unless it is patient.
    """

    def __init__(
        self,
        terminal: Terminal,
        nodes: Sequence[ShownNode] = (),
        paths: RunPaths | None = None,
        options: ConsoleOptions | None = None,
    ) -> None:
        self._options = options or ConsoleOptions()
        self._terminal = terminal
        self._paths = paths
        self._roster = Roster(nodes)
        self._waiting = Waiting(self._roster)
        self._streams: dict[_Key, _Stream] = {}
        self._first: tuple[int, int | None] | None = None
        self._stopping: set[int] = set()
        self._stopping_untold: set[int] = set()
        self._alike: tuple[str, bool] = "", False  # what came last of one node after the other; True: that it is lost
        self._alike_untold: list[int] = []
        self._failed_nodes: set[int] = set()
        self._succeeded: set[int] = set()
        self._told_waiting = 0
        self._screen = Screen(terminal, self._slow_text, self._options.queue_bytes, patient=self._options.patient)

    def handle(self, event: Event, at_s: float) -> None:
        """Show one event."""
        if isinstance(event, NodeStopping):
            self._tell_alike()
            self._stop(event.node_rank, at_s)
            return
        self._tell_stopping()  # they come all together, and are told in one line
        if isinstance(event, NodeLost) or (isinstance(event, Notice) and event.node_ranks):
            self._waiting.apply(event, at_s)
            self._hold_alike(event)
            return
        self._tell_alike()
        if isinstance(event, Output):
            self._output(event, at_s)
            return
        self._waiting.apply(event, at_s)
        if isinstance(event, RankExited) and event.status.ok:
            self._succeeded.add(event.rank)
        if isinstance(event, StageReached):
            self._told_waiting = 0
            self._draw_status(at_s)
        message = describe_event(event, self._roster, self._paths.root if self._paths else None)
        detail = self._is_consequence(event) or (message is not None and message.detail)
        if message and (self._options.verbose or not detail):
            self._say(message)

    def first_failure(self, node_rank: int, rank: int | None) -> None:
        """Name the rank (or the node's command, None) that failed first: its output is shown to the end.

        Where nobody says so, it is the first one whose failure was handled.
        """
        self._first = (node_rank, rank)

    def tick(self, now: float) -> None:
        """Show what waited for time to pass. To be called a few times a second."""
        for key, stream in self._streams.items():
            for block in stream.splitter.tick(now):
                self._show(key, stream, block)
        self._tell_stopping()
        self._tell_alike()
        self._draw_status(now)

    def end_lines(self) -> None:
        """Show what has not ended in a newline yet: what comes next has nothing to do with it."""
        self._end_streams()

    @property
    def gone(self) -> bool:
        """Whether nobody reads stdout any more, or it cannot be written."""
        return self._screen.is_gone("stdout")

    def block(self, text: str, tone: Tone = "plain") -> None:
        """Show text of gpulayer's own on stderr, as it is laid out."""
        self._tell_stopping()
        self._tell_alike()
        self._message(text, tone)

    def data(self, text: str) -> None:
        """Show what the command was asked for (a plan, a table) on stdout."""
        self._screen.message(_encode(text if text.endswith("\n") else text + "\n"), "stdout")

    def print_error(self, error: GpulayerError) -> None:
        """Show an error with its hint; where nodes could not take part, each distinct reason with its nodes."""
        self._end_streams()
        data = self._prepare(error_text(error))
        if self._terminal.colored("stderr"):
            data = data.replace(b"error:", b"\x1b[1;31merror:\x1b[0m", 1)
            data = _HINT.sub(b"\x1b[36mhint:\x1b[0m", data)
        self._screen.message(data)

    def close(self, timeout_s: float = 2.0, hurried: Callable[[], bool] = lambda: False) -> bool:
        """Show the rest; returns whether all was. Gives up after `timeout_s` in which nothing could be written.

        Gives up at once when it is `hurried`.
        """
        self._end_streams()
        self._tell_stopping()
        self._tell_alike()
        return self._screen.close(timeout_s, hurried)

    def _output(self, event: Output, at_s: float) -> None:
        if self._is_hidden(event.node_rank, event.rank) or self._is_after_success(event):
            return
        key = (event.node_rank, event.rank, event.stream)
        stream = self._streams.get(key)
        if stream is None:
            stream = self._streams[key] = self._open(key)
        for block in stream.splitter.feed(event.data, at_s):
            self._show(key, stream, block)

    def _open(self, key: _Key) -> _Stream:
        node_rank, rank, stream = key
        node = self._roster.nodes.get(node_rank)
        several = node is not None and len(node.ranks) > 1
        who = self._roster.name(node_rank) if self._options.label == "id" else node_rank
        tag = make_tag(who, rank if several else None)
        if self._terminal.colored(stream):
            tag = f"\x1b[{_NODE_COLORS[node_rank % len(_NODE_COLORS)]}m{tag}\x1b[0m"
        log_name = str(self._paths.output(*key)) if self._paths else "the log file"
        return _Stream(LineSplitter(log_name), f"{tag} ".encode())

    def _show(self, key: _Key, stream: _Stream, block: bytes) -> None:
        name = key[2]
        if self._terminal.is_tty(name):
            block = sanitize(block)
        self._screen.output(name, tag_block(block, stream.tag))

    def _is_hidden(self, node_rank: int, rank: int | None) -> bool:
        stopping = node_rank in self._stopping and not self._options.verbose
        return stopping and (node_rank, rank) != self._first

    def _is_after_success(self, event: Output) -> bool:
        """True for what torchrun itself says once all of its ranks have succeeded.

        Where the head's torchrun leaves first, the others fill a screen with its missing store, and exit 0.
        """
        if event.rank is not None or self._options.verbose:
            return False
        node = self._roster.nodes.get(event.node_rank)
        return node is not None and bool(node.ranks) and set(node.ranks) <= self._succeeded

    def _is_consequence(self, event: Event) -> bool:
        """True for an end that something told earlier explains: another failure on the node, or that it was stopped."""
        if not isinstance(event, RankExited | CommandExited) or not failed(event.status):
            return False
        if event.node_rank in self._stopping | self._failed_nodes:
            return True
        self._failed_nodes.add(event.node_rank)
        self._first = self._first or (event.node_rank, event.rank if isinstance(event, RankExited) else None)
        return False

    def _stop(self, node_rank: int, at_s: float) -> None:
        if node_rank in self._stopping:
            return
        for key, stream in self._streams.items():
            if key[0] == node_rank and key[:2] != self._first:
                self._end_stream(key, stream)
        self._stopping.add(node_rank)
        self._stopping_untold.add(node_rank)
        if self._waiting.stage is not Stage.ENDING:
            self._waiting.enter(Stage.ENDING, at_s)
            self._told_waiting = 0

    def _end_streams(self) -> None:
        for key, stream in self._streams.items():
            self._end_stream(key, stream)

    def _end_stream(self, key: _Key, stream: _Stream) -> None:
        for block in stream.splitter.close():
            self._show(key, stream, block)

    def _hold_alike(self, event: NodeLost | Notice) -> None:
        """A switch takes many nodes with it: what is the same for all of them is told once, at the next tick."""
        lost = isinstance(event, NodeLost)
        alike = (event.reason if isinstance(event, NodeLost) else event.text, lost)
        if alike != self._alike:
            self._tell_alike()
        self._alike = alike
        self._alike_untold += [event.node_rank] if isinstance(event, NodeLost) else event.node_ranks

    def _tell_alike(self) -> None:
        node_ranks, self._alike_untold = self._alike_untold, []
        if node_ranks:
            text, lost = self._alike
            self._say(describe_alike(text, node_ranks, self._roster, lost=lost))

    def _tell_stopping(self) -> None:
        if self._stopping_untold:
            text = f"ending the job on {self._roster.fold(self._stopping_untold)}"
            self._stopping_untold.clear()
            self._say(Message(text))

    def _draw_status(self, now: float) -> None:
        waited_s = now - self._waiting.since_s
        text = self._waiting.text(now) if waited_s >= _STATUS_AFTER_S else ""
        if self._terminal.live:
            self._screen.status(_encode(_shorten(PREFIX + text, self._terminal.columns - 1)) if text else b"")
        elif text and waited_s >= _plain_status_at(self._told_waiting):
            self._told_waiting += 1
            self._say(Message(text))

    def _say(self, message: Message) -> None:
        text = message.text.replace("\n", "\n" + " " * len(PREFIX))
        self._message(PREFIX + text, message.tone)

    def _message(self, text: str, tone: Tone) -> None:
        data = self._prepare(text if text.endswith("\n") else text + "\n")
        color = _TONE_COLORS[tone]
        if color and self._terminal.colored("stderr"):
            data = f"\x1b[{color}m".encode() + data[:-1] + b"\x1b[0m\n"
        self._screen.message(data)

    def _prepare(self, text: str) -> bytes:
        data = _encode(text)
        return sanitize(data) if self._terminal.is_tty("stderr") else data

    def _slow_text(self, lines: int) -> bytes:
        where = f"; all of it is in {self._paths.root}" if self._paths else ""
        noun = "1 line" if lines == 1 else f"{lines} lines"
        return _encode(f"{PREFIX}screen too slow: {noun} not shown here{where}\n")


def render_table(columns: Sequence[str], rows: Iterable[Sequence[str]], width: int) -> str:
    """Lay out a table as plain text, at most `width` columns wide."""
    import io

    from rich.console import Console as RichConsole
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in columns:
        table.add_column(name, overflow="fold")
    for row in rows:
        table.add_row(*[Text(cell) for cell in row])
    file = io.StringIO()
    RichConsole(file=file, width=width, color_system=None, force_terminal=False).print(table)
    return "".join(line.rstrip() + "\n" for line in file.getvalue().splitlines())


def _plain_status_at(told: int) -> float:
    """Return after how many seconds of waiting the next plain line is due."""
    if told < len(_PLAIN_STATUS_S):
        return _PLAIN_STATUS_S[told]
    return _PLAIN_STATUS_EVERY_S * (told - len(_PLAIN_STATUS_S) + 1)


def _shorten(text: str, columns: int) -> str:
    return text if len(text) <= columns else text[: max(0, columns - 3)] + "..."


def _encode(text: str) -> bytes:
    return text.encode("utf-8", "backslashreplace")
