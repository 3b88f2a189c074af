"""How a job ends: the ledger that reads events in order, names the first failure and decides the exit code. Pure.

fanout feeds it and asks what to do; report.py and the receipt print what it holds.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from enum import StrEnum

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
    OutputsCollected,
    RankExited,
    RankStarted,
    Survivor,
    Tail,
)
from gpulayer.untrusted import one_line

EXIT_FAILED = 1
EXIT_LOST = 4
EXIT_UNCLEAN = 5
EXIT_INCOMPLETE = 6
EXIT_TIMEOUT = 124
LONGEST_ERROR = 200

LOGS_INCOMPLETE = "succeeded, but its logs are incomplete"
OUTPUTS_MISSING = "succeeded, but not all its outputs came back"


class CauseKind(StrEnum):
    """What made a job end before all its nodes had succeeded."""

    RANK = "rank"
    COMMAND = "command"
    LOST = "lost"
    JOIN_TIMEOUT = "join_timeout"
    TIMEOUT = "timeout"
    SIGNAL = "signal"


class Fate(StrEnum):
    """What became of one node."""

    SUCCEEDED = "succeeded"
    FAILED = "failed"
    STOPPED = "stopped"
    LOST = "lost"
    NEVER_STARTED = "never started"
    RUNNING = "running"


class Verified(StrEnum):
    """Who has looked whether anything of the job is left on a node."""

    SUPERVISOR = "by the supervisor"
    SECOND_LOGIN = "by a second login"
    NOT = "not"
    NOTHING_STARTED = "nothing was started"


@dataclass(frozen=True, slots=True)
class Cause:
    """The first thing that went wrong. `at_s` counts from the start of the job; `status` is the process's own.

    `missing` are the nodes whose ranks had not all started when the join timeout was reached.
    """

    kind: CauseKind
    at_s: float
    node_rank: int | None = None
    rank: int | None = None
    status: ExitStatus = field(default_factory=ExitStatus)
    tail: Tail = field(default_factory=Tail)
    detail: str = ""
    missing: tuple[int, ...] = ()


@dataclass(slots=True)
class NodeRecord:
    """All that is known of one node of the job. Times are seconds since the job began."""

    node_rank: int
    node_id: str
    ranks: tuple[int, ...]
    hostname: str = ""
    python: str = ""
    kernel: str = ""
    interface: str = ""
    started_s: float | None = None
    ended_s: float | None = None
    rank_pids: dict[int, int] = field(default_factory=dict)
    rank_statuses: dict[int, ExitStatus] = field(default_factory=dict)
    rank_errors: dict[int, str] = field(default_factory=dict)
    status: ExitStatus | None = None
    stopping: bool = False
    failed: bool = False
    lost: str = ""
    supervisor_died: bool = False
    swept: bool = False
    swept_again: bool = False  # by a second login, the node's own supervisor being lost
    survivors: tuple[Survivor, ...] = ()
    over: bool = False
    kept: str = ""
    has_outputs: bool = False
    collected: OutputsCollected | None = None

    @property
    def may_have_outputs(self) -> bool:
        """There may be something for the user on the node, and nothing of the job is there that could change it."""
        return self.has_outputs or bool(self.lost and self.started_s is not None and self.clean)

    @property
    def clean(self) -> bool:
        """Verified: nothing of the job is alive there, or nothing was ever started."""
        return (self.swept and not self.survivors) or self.started_s is None

    @property
    def verified(self) -> Verified:
        """Who has looked, whatever was seen."""
        if self.swept:
            return Verified.SECOND_LOGIN if self.swept_again else Verified.SUPERVISOR
        return Verified.NOTHING_STARTED if self.started_s is None else Verified.NOT

    @property
    def may_still_run(self) -> bool:
        """Something outlived SIGKILL, or nobody is left there to end the job and nobody could look.

        A node that merely cannot be heard is not counted: its supervisor ends its part by itself.
        """
        return bool(self.survivors) or (self.supervisor_died and not self.swept)

    @property
    def joined(self) -> bool:
        """All ranks were seen running, or the command where there are none, or it has come and gone."""
        if self.status is not None:
            return True
        return len(self.rank_pids) == len(self.ranks) if self.ranks else self.started_s is not None

    @property
    def fate(self) -> Fate:
        """What became of the node, in one word."""
        if self.lost:
            return Fate.LOST
        if self.started_s is None:
            return Fate.NEVER_STARTED
        if self.failed:
            return Fate.FAILED
        if self.status is None:
            return Fate.STOPPED if self.over else Fate.RUNNING
        if self.stopping and not self.ranks:
            return Fate.STOPPED  # a command that was told to end may well exit with 0
        return Fate.SUCCEEDED if self.status.ok else Fate.STOPPED


class Ledger:
    """Reads the events of one job, in order. The first failure becomes `cause`, and stays it."""

    def __init__(self, nodes: list[NodeRecord]) -> None:
        self.nodes = nodes
        self.cause: Cause | None = None
        self.logs_lost = False  # something that the run directory should hold could not be written

    def apply(self, event: Event, at_s: float) -> None:
        """Take note of one event."""
        if (node_rank := getattr(event, "node_rank", None)) is None:
            return
        node = self.nodes[node_rank]
        match event:
            case NodeConnected():
                node.hostname, node.python, node.kernel = event.hostname, event.python, event.kernel
            case NodePrepared():
                node.interface = event.interface
            case CommandStarted():
                node.started_s = at_s
            case RankStarted():
                node.rank_pids[event.rank] = event.pid
            case NodeStopping():
                node.stopping = True
            case NodeSwept():
                node.swept, node.swept_again, node.survivors = True, bool(node.lost), event.survivors
            case RankExited() | CommandExited() | NodeLost():
                self._apply_ending(event, node, at_s)
            case _:
                self._apply_rest(event, node, at_s)

    def _apply_rest(self, event: Event, node: NodeRecord, at_s: float) -> None:
        match event:
            case NodeEnded():
                node.over, node.kept, node.ended_s, node.has_outputs = True, event.kept, at_s, event.outputs
            case OutputsCollected():
                node.collected, node.kept = event, node.kept or event.kept

    def _apply_ending(self, event: RankExited | CommandExited | NodeLost, node: NodeRecord, at_s: float) -> None:
        match event:
            case RankExited():
                node.rank_statuses[event.rank] = event.status
                if text := first_error(event.tail.error_file):
                    node.rank_errors[event.rank] = text
                if not event.status.ok and event.status != ExitStatus() and not node.stopping:
                    node.failed = True
                    self._blame(Cause(CauseKind.RANK, at_s, node.node_rank, event.rank, event.status, event.tail))
            case CommandExited():
                node.status = event.status
                if node.started_s is None:
                    node.started_s = at_s  # it could not even be started; its stderr says why
                if not event.status.ok and not node.stopping:
                    node.failed = True
                    self._blame(Cause(CauseKind.COMMAND, at_s, node.node_rank, None, event.status, event.tail))
            case NodeLost():
                node.lost, node.supervisor_died, node.ended_s = event.reason, event.supervisor_died, at_s
                self._blame(Cause(CauseKind.LOST, at_s, node.node_rank, detail=event.reason))

    def _blame(self, cause: Cause) -> None:
        if self.cause is None:
            self.cause = cause

    def interrupted(self, signal_number: int, at_s: float) -> None:
        """The launcher got a signal that ends the job."""
        self._blame(Cause(CauseKind.SIGNAL, at_s, status=ExitStatus(signal=signal_number)))

    def timed_out(self, limit_s: float, at_s: float) -> None:
        """The time limit was reached."""
        self._blame(Cause(CauseKind.TIMEOUT, at_s, detail=f"{limit_s:g} s"))

    def join_timed_out(self, limit_s: float, at_s: float) -> None:
        """Not all nodes' ranks were running within the join timeout."""
        missing = tuple(node.node_rank for node in self.nodes if not node.joined)
        self._blame(Cause(CauseKind.JOIN_TIMEOUT, at_s, detail=f"{limit_s:g} s", missing=missing))

    @property
    def outputs_lost(self) -> bool:
        """Something that the job left for its user did not come back."""
        return any(node.collected and node.collected.problems for node in self.nodes)

    @property
    def all_joined(self) -> bool:
        """Every node's ranks have started."""
        return all(node.joined for node in self.nodes)

    @property
    def exit_code(self) -> int:
        """The exit code of the whole job: the first cause decides, but 5 beats 0, 1, 4 and 124."""
        if self.cause and self.cause.kind is CauseKind.SIGNAL:
            return 128 + (self.cause.status.signal or 0)
        if any(node.may_still_run for node in self.nodes):
            return EXIT_UNCLEAN
        match self.cause.kind if self.cause else None:
            case None:
                return EXIT_INCOMPLETE if self.logs_lost or self.outputs_lost else 0
            case CauseKind.TIMEOUT:
                return EXIT_TIMEOUT
            case CauseKind.LOST:
                return EXIT_LOST
            case _:
                return EXIT_FAILED


def first_error(error_file: bytes) -> str:
    """Return the first line of the message in torchrun's error.json, "" where it is not as expected."""
    try:
        message = json.loads(error_file)["message"]
        text = message if isinstance(message, str) else message["message"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return ""
    return one_line(text.strip().partition("\n")[0].strip(), LONGEST_ERROR) if isinstance(text, str) else ""
