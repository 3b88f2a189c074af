"""The run directory: its file names, its plan, receipt and events, and every byte that the ranks wrote.

`RunPaths` is the one place that spells a file name of a run. Bytes are written as they came; what a screen makes of
them is in lines.py. Once a job runs, a full disk costs log bytes, which are counted, and never the job.
"""

from __future__ import annotations

import errno
import json
import os
import resource
from collections import defaultdict
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Self

from gpulayer.errors import JobError
from gpulayer.events import (
    CommandExited,
    CommandStarted,
    Event,
    ExitStatus,
    NodeChecked,
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
    StageReached,
    StreamName,
    Survivor,
    Tail,
)

if TYPE_CHECKING:
    from pathlib import Path

# events.jsonl is read by scripts: its names are spelled here, and do not follow the classes when those are renamed.
EVENT_NAMES: dict[type[Event], str] = {
    StageReached: "stage_reached",
    NodeConnected: "node_connected",
    NodeChecked: "node_checked",
    NodePrepared: "node_prepared",
    CommandStarted: "command_started",
    RankStarted: "rank_started",
    RankExited: "rank_exited",
    CommandExited: "command_exited",
    NodeSwept: "node_swept",
    NodeEnded: "node_ended",
    NodeStopping: "node_stopping",
    NodeLost: "node_lost",
    Notice: "notice",
}

_OutputKey = tuple[int, int | None, StreamName]
_OPEN_FLAGS = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC


@dataclass(frozen=True, slots=True)
class RunPaths:
    """The files of one run. `root` is the run directory."""

    root: Path

    @property
    def plan(self) -> Path:
        """The plan that was run, as JSON."""
        return self.root / "plan.json"

    @property
    def receipt(self) -> Path:
        """What happened to each node, as JSON; written at the end."""
        return self.root / "receipt.json"

    @property
    def events(self) -> Path:
        """Everything that happened but output, one JSON object a line."""
        return self.root / "events.jsonl"

    def node(self, node_rank: int) -> Path:
        """The folder of one node."""
        return self.root / f"node{node_rank}"

    def output(self, node_rank: int, rank: int | None, stream: StreamName) -> Path:
        """The bytes of one stream of a rank, or of torchrun itself where `rank` is None."""
        who = "torchrun" if rank is None else f"rank{rank}"
        return self.node(node_rank) / f"{who}.{stream}.log"


def event_json(event: Event, at_s: float) -> dict[str, object]:
    """Return the form of an event in events.jsonl. Tails are left out: their bytes are in the rank's own files."""
    shown: dict[str, object] = {"t": round(at_s, 3), "event": EVENT_NAMES[type(event)]}
    for field in fields(event):
        value = getattr(event, field.name)
        if isinstance(value, ExitStatus):
            shown["code"] = value.code
            shown["signal"] = value.signal
        elif isinstance(value, tuple):
            shown[field.name] = [_survivor_json(item) if isinstance(item, Survivor) else item for item in value]
        elif not isinstance(value, Tail):
            shown[field.name] = value
    return shown


def _survivor_json(survivor: Survivor) -> dict[str, object]:
    return {"pid": survivor.pid, "state": survivor.state, "command": survivor.command}


class RunDirectory:
    """The open files of one run. Make it with `create` or `create_at`; close it at the end."""

    def __init__(self, root: Path, events_fd: int) -> None:
        self.paths = RunPaths(root)
        self._events_fd = events_fd
        self._output_fds: dict[_OutputKey, int] = {}  # oldest first
        self._lost: defaultdict[Path, int] = defaultdict(int)
        self._told = False

    @classmethod
    def create(cls, parent: Path, job_id: str) -> RunDirectory:
        """Make `parent/job_id`. Raises JobError where that cannot be done or something is there already."""
        return cls.create_at(parent / job_id)

    @classmethod
    def create_at(cls, root: Path) -> RunDirectory:
        """Make `root` itself the run directory; an empty directory may be there. Raises JobError."""
        try:
            root.parent.mkdir(parents=True, exist_ok=True)
            root.mkdir(mode=0o700, exist_ok=True)
            used = any(root.iterdir())
        except OSError as exc:
            raise _cannot_use(root, exc) from exc
        if used:
            raise JobError(
                f"the run directory {root} is not empty",
                hint="each run needs a directory of its own: give another with `--run-dir DIR`, or move this one away",
            )
        try:
            events_fd = os.open(RunPaths(root).events, _OPEN_FLAGS | os.O_EXCL, 0o600)
        except OSError as exc:
            raise _cannot_use(root, exc) from exc
        return cls(root, events_fd)

    @property
    def lost_bytes(self) -> int:
        """How many bytes could not be written, over all files."""
        return sum(self._lost.values())

    @property
    def losses(self) -> dict[Path, int]:
        """How many bytes are missing in each file that misses some."""
        return dict(self._lost)

    def write_plan(self, plan: object) -> None:
        """Write plan.json. Raises JobError: nothing has been started, so a plan that cannot be kept stops the run."""
        try:
            _write_json(self.paths.plan, plan)
        except OSError as exc:
            raise _cannot_use(self.paths.root, exc) from exc

    def write_receipt(self, receipt: object) -> Notice | None:
        """Write receipt.json, whole or not at all. Returns what went wrong, if anything did."""
        try:
            _write_json(self.paths.receipt, receipt)
        except OSError as exc:
            return Notice(f"cannot write {self.paths.receipt}: {exc.strerror}")
        return None

    def record(self, event: Event, at_s: float) -> Notice | None:
        """Add a line to events.jsonl (none for Output). Returns the notice of the run's first loss."""
        if isinstance(event, Output):
            return None
        view = memoryview(json.dumps(event_json(event, at_s)).encode() + b"\n")
        try:
            while view:
                view = view[os.write(self._events_fd, view) :]
        except OSError as exc:
            return self._lose(self.paths.events, len(view), exc, ())
        return None

    def write_output(self, event: Output) -> Notice | None:
        """Append the event's bytes to their file. Returns the notice of the run's first loss; never raises OSError."""
        key = (event.node_rank, event.rank, event.stream)
        view = memoryview(event.data)
        try:
            fd = self._output_fds.get(key)
            if fd is None:
                fd = self._open_output(key)
            while view:
                view = view[os.write(fd, view) :]
        except OSError as exc:
            return self._lose(self.paths.output(*key), len(view), exc, (event.node_rank,))
        return None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> Notice | None:
        """Close all files; once is enough. Returns what NFS may tell only now: that the disk is full."""
        notice = None
        files = [(self.paths.events, self._events_fd)] if self._events_fd >= 0 else []
        files += [(self.paths.output(*key), fd) for key, fd in self._output_fds.items()]
        for path, fd in files:
            try:
                os.close(fd)
            except OSError as exc:
                notice = self._lose(path, 0, exc, ()) or notice
        self._output_fds.clear()
        self._events_fd = -1
        return notice

    def _lose(self, path: Path, lost_bytes: int, exc: OSError, node_ranks: tuple[int, ...]) -> Notice | None:
        self._lost[path] += lost_bytes
        if self._told:
            return None
        self._told = True
        return Notice(f"cannot write {path}: {exc.strerror}; the job goes on, but its logs miss bytes", node_ranks)

    def _open_output(self, key: _OutputKey) -> int:
        path = self.paths.output(*key)
        try:
            fd = _open_append(path)
        except OSError as exc:
            if exc.errno not in (errno.EMFILE, errno.ENFILE) or not self._output_fds:
                raise
            self._close_oldest()
            fd = _open_append(path)
        self._output_fds[key] = fd
        return fd

    def _close_oldest(self) -> None:
        """Close half of the output files. Each is opened again, to append, when its stream goes on."""
        for key in list(self._output_fds)[: (len(self._output_fds) + 1) // 2]:
            os.close(self._output_fds.pop(key))


def raise_file_limit(needed: int) -> bool:
    """Let this process hold `needed` open files, as far as the system allows. Returns whether it may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return True
    reachable = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (reachable, hard))
    except (OSError, ValueError):
        return False
    return reachable >= needed


def _open_append(path: Path) -> int:
    try:
        return os.open(path, _OPEN_FLAGS, 0o600)
    except FileNotFoundError:
        path.parent.mkdir(mode=0o700, exist_ok=True)
        return os.open(path, _OPEN_FLAGS, 0o600)


def _write_json(path: Path, value: object) -> None:
    temporary = path.with_name(f".{path.name}.tmp")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(fd, "w", encoding="utf-8") as file:
            json.dump(value, file, indent=2)
            file.write("\n")
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _cannot_use(root: Path, exc: OSError) -> JobError:
    where = exc.filename if isinstance(exc.filename, str) else str(root)
    message = f"cannot use the run directory {root}: {exc.strerror}"
    if where != str(root):
        message += f" ({where})"
    return JobError(message, hint="name a directory that you can write to with `--run-dir DIR`")
