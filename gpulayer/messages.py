"""The words of gpulayer's own messages while a job runs, and of its error screens. Pure text; console.py shows it."""

from __future__ import annotations

import signal
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from gpulayer.errors import GpulayerError, NodeError, RefusedError
from gpulayer.events import (
    BundleReady,
    CollectingProgress,
    CommandExited,
    CommandStarted,
    Event,
    ExitStatus,
    NodeChecked,
    NodeConnected,
    NodeEnded,
    NodeLost,
    NodePrepared,
    NodeSwept,
    Notice,
    OutputsCollected,
    RankExited,
    RankStarted,
    SendingProgress,
    Stage,
    StageReached,
)
from gpulayer.ranges import fold
from gpulayer.values import bytes_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from pathlib import Path

PREFIX = "gpulayer: "

Tone = Literal["plain", "good", "bad", "dim"]

_WAITS_FOR = {
    Stage.CONNECTING: "connecting",
    Stage.SENDING: "sending the bundle",
    Stage.PREPARING: "checking",
    Stage.STARTING: "starting",
    Stage.ENDING: "ending",
    Stage.COLLECTING: "collecting the outputs",
}


@dataclass(frozen=True, slots=True)
class ShownNode:
    """What a screen needs to know of a node: its node rank, its id, the ranks it hosts, and what starts them."""

    node_rank: int
    node_id: str
    ranks: tuple[int, ...]
    command: str = "torchrun"


@dataclass(frozen=True, slots=True)
class Message:
    """One message. `detail`: shown with --verbose only."""

    text: str
    tone: Tone = "plain"
    detail: bool = False


class Roster:
    """The nodes of a job by node rank, and their folded names."""

    def __init__(self, nodes: Iterable[ShownNode]) -> None:
        self.nodes = {node.node_rank: node for node in nodes}

    def name(self, node_rank: int) -> str:
        """Return the id of one node."""
        node = self.nodes.get(node_rank)
        return node.node_id if node else f"node {node_rank}"

    def command(self, node_rank: int) -> str:
        """Return what runs on one node, in words."""
        node = self.nodes.get(node_rank)
        return node.command if node else "the command"

    def fold(self, node_ranks: Iterable[int]) -> str:
        """Return the folded ids of some nodes, in node order."""
        return fold(self.name(node_rank) for node_rank in sorted(node_ranks))


def failed(status: ExitStatus) -> bool:
    """True where a process is known to have failed. Whoever was not seen to end is judged by what ended it."""
    return not status.ok and status != ExitStatus()


def describe_status(status: ExitStatus) -> str:
    """Say how a process ended, as the end of a sentence that begins with its name."""
    if status.signal is not None:
        try:
            name = signal.Signals(status.signal).name
        except ValueError:
            name = f"signal {status.signal}"
        return f"was killed by {name}"
    return "ended, its exit code was not seen" if status.code is None else f"exited with code {status.code}"


def describe_event(event: Event, roster: Roster, where: Path | None = None) -> Message | None:
    """Word one event, or None where there is nothing to say. `where` is the run directory."""
    if isinstance(event, StageReached):
        return _running(roster, where) if event.stage is Stage.RUNNING else None
    words = _WORDS.get(type(event))
    return words(event, roster) if words else None


def _running(roster: Roster, where: Path | None) -> Message:
    ranks = sum(len(node.ranks) for node in roster.nodes.values())
    what = _count(ranks, "rank") if ranks else "a command each"
    text = f"{what} on {_count(len(roster.nodes), 'node')}, {roster.fold(roster.nodes)}"
    return Message(f"running {text}; logs in {where}" if where else f"running {text}", "good")


def _connected(event: NodeConnected, roster: Roster) -> Message:
    text = f"{roster.name(event.node_rank)}: connected to {event.hostname}, Python {event.python}, {event.kernel}"
    return Message(text, "dim", detail=True)


def _bundle_ready(event: BundleReady, roster: Roster) -> Message:
    what = f"{bytes_text(event.sent_bytes)} sent" if event.sent_bytes else "nothing sent, it had it"
    return Message(f"{roster.name(event.node_rank)}: the bundle is there, {what}", "dim", detail=True)


def _prepared(event: NodePrepared, roster: Roster) -> Message:
    using = f", interface {event.interface}" if event.interface else ""
    return Message(f"{roster.name(event.node_rank)}: ready{using}", "dim", detail=True)


def _command_started(event: CommandStarted, roster: Roster) -> Message:
    text = f"{roster.name(event.node_rank)}: {roster.command(event.node_rank)} started, pid {event.pid}"
    return Message(text, "dim", detail=True)


def _rank_started(event: RankStarted, roster: Roster) -> Message:
    return Message(f"{roster.name(event.node_rank)}: rank {event.rank} started, pid {event.pid}", "dim", detail=True)


def _rank_exited(event: RankExited, roster: Roster) -> Message:
    text = f"rank {event.rank} on {roster.name(event.node_rank)} {describe_status(event.status)}"
    return _ending(text, event.status)


def _command_exited(event: CommandExited, roster: Roster) -> Message:
    what = f"{roster.command(event.node_rank)} on {roster.name(event.node_rank)}"
    return _ending(f"{what} {describe_status(event.status)}", event.status)


def _ending(text: str, status: ExitStatus) -> Message:
    return Message(text, "bad") if failed(status) else Message(text, "dim", detail=True)


def _swept(event: NodeSwept, roster: Roster) -> Message:
    name = roster.name(event.node_rank)
    if not event.survivors:
        return Message(f"{name}: clean, {_count(event.killed, 'process', 'es')} killed", "dim", detail=True)
    lines = [f"{name}: {_count(len(event.survivors), 'process', 'es')} outlived SIGKILL:"]
    lines += [f"  pid {one.pid}, state {one.state}: {one.command}" for one in event.survivors]
    return Message("\n".join(lines), "bad")


def _ended(event: NodeEnded, roster: Roster) -> Message | None:
    if not event.kept:
        return None
    return Message(f"{roster.name(event.node_rank)}: not all output arrived; it is kept there in {event.kept}", "bad")


def _collected(event: OutputsCollected, roster: Roster) -> Message:
    name, files = roster.name(event.node_rank), _count(event.files, "output file")
    lines = [f"{name}: {files} here, {bytes_text(event.size_bytes)}", *(f"  {text}" for text in event.problems)]
    return Message("\n".join(lines), "bad" if event.problems else "dim", detail=True)


def describe_alike(text: str, node_ranks: Sequence[int], roster: Roster, *, lost: bool) -> Message:
    """Word what came of several nodes at once: that they are lost for one reason, or one notice."""
    names = roster.fold(node_ranks)
    if lost:
        return Message(f"{names} {'are' if len(node_ranks) > 1 else 'is'} lost: {text}", "bad")
    return Message(f"{names}: {text}")


def _lost(event: NodeLost, roster: Roster) -> Message:
    return describe_alike(event.reason, [event.node_rank], roster, lost=True)


def _notice(event: Notice, roster: Roster) -> Message:
    return describe_alike(event.text, event.node_ranks, roster, lost=False) if event.node_ranks else Message(event.text)


_WORDS: dict[type[Event], Callable[..., Message | None]] = {
    NodeConnected: _connected,
    BundleReady: _bundle_ready,
    NodePrepared: _prepared,
    CommandStarted: _command_started,
    RankStarted: _rank_started,
    RankExited: _rank_exited,
    CommandExited: _command_exited,
    NodeSwept: _swept,
    NodeEnded: _ended,
    OutputsCollected: _collected,
    NodeLost: _lost,
    Notice: _notice,
}


@dataclass(slots=True)
class Waiting:
    """Which nodes the present stage waits for, and since when."""

    roster: Roster
    stage: Stage | None = None
    since_s: float = 0.0
    progress: str = ""
    collecting: tuple[int, ...] = ()
    _past: dict[Stage, set[int]] = field(default_factory=lambda: {stage: set() for stage in Stage})
    _over: set[int] = field(default_factory=set)
    _ranks: dict[int, set[int]] = field(default_factory=dict)

    def apply(self, event: Event, at_s: float) -> None:
        """Take note of one event."""
        match event:
            case StageReached():
                self.enter(event.stage, at_s)
            case NodeConnected():
                self._past[Stage.CONNECTING].add(event.node_rank)
            case SendingProgress() | CollectingProgress():
                self._take_progress(event)
            case BundleReady():
                self._past[Stage.SENDING].add(event.node_rank)
            case NodeChecked() | NodePrepared():
                self._past[Stage.PREPARING].add(event.node_rank)
            case CommandExited():
                self._past[Stage.STARTING].add(event.node_rank)
            case RankStarted() | CommandStarted():
                self._started(event)
            case NodeEnded() | NodeLost():
                self._over.add(event.node_rank)

    def enter(self, stage: Stage, at_s: float) -> None:
        """Begin to wait for all nodes to pass this stage. A stage that was entered already goes on."""
        if stage is not self.stage:
            self.stage, self.since_s = stage, at_s

    def text(self, now: float) -> str:
        """Say what is waited for, or "" where nothing is."""
        stage = self.stage
        if stage not in _WAITS_FOR:
            return ""
        if stage is Stage.CONNECTING and not self._missing(stage):
            stage = Stage.PREPARING  # node by node, it follows at once
        missing = self._missing(stage)
        if not missing:
            return ""
        total = len(self.roster.nodes)
        share = f", {total - len(missing)} of {total} done" if total > 1 else ""
        what = _WAITS_FOR[stage] + (self.progress if stage in (Stage.SENDING, Stage.COLLECTING) else "")
        return f"{what}{share}, waiting for {self.roster.fold(missing)} ({now - self.since_s:.0f} s)"

    def _take_progress(self, event: SendingProgress | CollectingProgress) -> None:
        if isinstance(event, CollectingProgress):
            done_bytes, self.collecting = event.received_bytes, event.node_ranks
        else:
            done_bytes = event.sent_bytes
        done = f"{bytes_text(done_bytes)} of {bytes_text(event.total_bytes)}"
        self.progress = f", {done} at {bytes_text(event.bytes_per_s)}/s"

    def _missing(self, stage: Stage) -> list[int]:
        if stage is Stage.COLLECTING:
            return list(self.collecting)
        past = self._past[stage] | self._over
        return [node_rank for node_rank in self.roster.nodes if node_rank not in past]

    def _started(self, event: RankStarted | CommandStarted) -> None:
        seen = self._ranks.setdefault(event.node_rank, set())
        if isinstance(event, RankStarted):
            seen.add(event.rank)
        node = self.roster.nodes.get(event.node_rank)
        if node and seen.issuperset(node.ranks):
            self._past[Stage.STARTING].add(event.node_rank)


def error_text(error: GpulayerError) -> str:
    """Lay an error out: its message, each distinct problem with its nodes, reason and hint, then its own hint."""
    blocks = [f"{PREFIX}error: {error}"]
    if isinstance(error, RefusedError):
        for text, hint, ids in _alike(error.problems):
            blocks.append(f"{fold(ids)}: {text}" + (f"\nhint: {hint}" if hint else ""))
        if error.report:
            blocks.append(error.report.rstrip())
    if error.hint:
        blocks.append(f"hint: {error.hint}")
    return "\n\n".join(blocks) + "\n"


def _alike(problems: Mapping[str, NodeError]) -> list[tuple[str, str | None, list[str]]]:
    """Return each distinct problem once, with its nodes. Where texts differ by the node's own id alone, it is NODE."""
    groups: dict[tuple[str, str | None], list[str]] = {}
    for node_id, problem in problems.items():
        hint = problem.hint and problem.hint.replace(node_id, "NODE")
        groups.setdefault((str(problem).replace(node_id, "NODE"), hint), []).append(node_id)
    return [
        (text, hint, ids) if len(ids) > 1 else (str(problems[ids[0]]), problems[ids[0]].hint, ids)
        for (text, hint), ids in groups.items()
    ]


def _count(number: int, noun: str, plural: str = "s") -> str:
    return f"{number} {noun}{'' if number == 1 else plural}"
