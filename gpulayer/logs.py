"""The run directory: its file names, its plan, receipt and events, and every byte that the ranks wrote.

`RunPaths` is the one place that spells a file name of a run. Bytes are written as they came; what a screen makes of
them is in lines.py. Once a job runs, a full disk costs log bytes, which are counted, and never the job.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import resource
import sys
from collections import defaultdict
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Self

from gpulayer import __version__
from gpulayer.errors import JobError
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
    NodeStopping,
    NodeSwept,
    Notice,
    Output,
    OutputsCollected,
    RankExited,
    RankStarted,
    SendingProgress,
    StageReached,
    StreamName,
    Survivor,
    Tail,
)
from gpulayer.timeline import Timeline

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime
    from pathlib import Path

    from gpulayer.plan import NodeCommand

# events.jsonl is read by scripts: its names are spelled here, and do not follow the classes when those are renamed.
EVENT_NAMES: dict[type[Event], str] = {
    StageReached: "stage_reached",
    NodeConnected: "node_connected",
    SendingProgress: "sending_progress",
    BundleReady: "bundle_ready",
    NodeChecked: "node_checked",
    NodePrepared: "node_prepared",
    CommandStarted: "command_started",
    RankStarted: "rank_started",
    RankExited: "rank_exited",
    CommandExited: "command_exited",
    NodeSwept: "node_swept",
    NodeEnded: "node_ended",
    CollectingProgress: "collecting_progress",
    OutputsCollected: "outputs_collected",
    NodeStopping: "node_stopping",
    NodeLost: "node_lost",
    Notice: "notice",
}

EVENTS_VERSION = 1  # counts up when a name in events.jsonl changes its meaning or goes

_OutputKey = tuple[int, int | None, StreamName]
_WRITE_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC
_OPEN_FLAGS = _WRITE_FLAGS | os.O_APPEND


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

    @property
    def timeline(self) -> Path:
        """When which bytes of output came."""
        return self.root / "output.jsonl"

    def node(self, node_rank: int) -> Path:
        """The folder of one node."""
        return self.root / f"node{node_rank}"

    def outputs(self, node_rank: int) -> Path:
        """What the job left for its user on a node."""
        return self.node(node_rank) / "outputs"

    def output(self, node_rank: int, rank: int | None, stream: StreamName) -> Path:
        """The bytes of one stream of a rank, or of the node's command itself (torchrun) where `rank` is None."""
        who = "command" if rank is None else f"rank{rank}"
        return self.node(node_rank) / f"{who}.{stream}.log"


def run_json(job_id: str, root: Path, started_at: datetime, nodes: Sequence[NodeCommand]) -> dict[str, object]:
    """Return the first line of events.jsonl: which run this is, and the version of what follows."""
    return {
        "t": 0.0,
        "event": "run",
        "version": EVENTS_VERSION,
        "gpulayer_version": __version__,
        "job_id": job_id,
        "run_dir": str(root.absolute()),
        "started_at": started_at.isoformat(timespec="milliseconds"),
        "nodes": [{"node_rank": node.node_rank, "node_id": node.node_id, "ranks": list(node.ranks)} for node in nodes],
    }


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

    def __init__(self, root: Path, events_fd: int, timeline_fd: int, *, is_new: bool = False) -> None:
        self.paths = RunPaths(root)
        self._is_new = is_new
        self.most_open = sys.maxsize  # output files at a time
        self._events_fd = events_fd
        self._lock_fd = os.dup(events_fd)  # what is locked stays so until the last of these is closed
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self._timeline = Timeline()
        self._timeline_fd = timeline_fd
        self._sizes: defaultdict[Path, int] = defaultdict(int)  # of the files that are written line by line
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
            for parent in reversed(root.parents):  # by the user's umask, but for others to write to in no case
                parent.mkdir(mode=0o775, exist_ok=True)
            is_new = not root.exists()
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
            timeline_fd = os.open(RunPaths(root).timeline, _OPEN_FLAGS | os.O_EXCL, 0o600)
        except OSError as exc:
            raise _cannot_use(root, exc) from exc
        return cls(root, events_fd, timeline_fd, is_new=is_new)

    @property
    def lost_bytes(self) -> int:
        """How many bytes could not be written, over all files."""
        return sum(self._lost.values())

    @property
    def incomplete(self) -> bool:
        """Whether anything is missing in a file, or may be."""
        return self._told

    @property
    def losses(self) -> dict[Path, int]:
        """How many bytes are missing in each file that misses some."""
        return dict(self._lost)

    def remove(self) -> None:
        """Take back a run directory of a job that cannot begin; what was there before stays."""
        self.close()
        for path in (self.paths.plan, self.paths.events, self.paths.timeline):
            path.unlink(missing_ok=True)
        if self._is_new:
            self.paths.root.rmdir()

    def write_plan(self, plan: object) -> None:
        """Write plan.json. Raises JobError: nothing has been started, so a plan that cannot be kept stops the run."""
        try:
            _write_json(self.paths.plan, plan)
        except OSError as exc:
            raise _cannot_use(self.paths.root, exc) from exc

    def reserve_receipt(self, size_bytes: int) -> None:
        """Take the room that the receipt will need, so that it can be written when logs have filled the disk.

        Raises JobError where there is too little even for that. A file system that cannot do this goes without.
        """
        try:
            fd = os.open(_temporary(self.paths.receipt), _WRITE_FLAGS, 0o600)
            try:
                os.posix_fallocate(fd, 0, size_bytes)
            finally:
                os.close(fd)
        except OSError as exc:
            if exc.errno in (errno.ENOSPC, errno.EDQUOT):
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
        return self.record_line(event_json(event, at_s))

    def record_line(self, line: object) -> Notice | None:
        """Add a line to events.jsonl. Returns the notice of the run's first loss."""
        return self._append(self.paths.events, self._events_fd, json.dumps(line).encode() + b"\n")

    def tick(self, at_s: float = float("inf")) -> Notice | None:
        """Add to output.jsonl what has come in the meantime. Returns the notice of the run's first loss."""
        lines = self._timeline.take(at_s)
        return self._append(self.paths.timeline, self._timeline_fd, lines) if lines else None

    def node_bytes(self, node_rank: int) -> int:
        """Return how many bytes of a node's output are in its files."""
        return self._timeline.node_bytes(node_rank)

    def _append(self, path: Path, fd: int, lines: bytes) -> Notice | None:
        view = memoryview(lines)
        try:
            while view:
                view = view[os.write(fd, view) :]
        except OSError as exc:
            with contextlib.suppress(OSError):
                os.ftruncate(fd, self._sizes[path])  # no half of a line before the next one
            return self._lose(path, len(lines), exc, ())
        self._sizes[path] += len(lines)
        return None

    def write_output(self, event: Output, at_s: float = 0.0) -> Notice | None:
        """Append the event's bytes, which came at `at_s`, to their file.

        Returns the notice of the run's first loss; never raises OSError.
        """
        key = (event.node_rank, event.rank, event.stream)
        view = memoryview(event.data)
        try:
            fd = self._output_fds.get(key)
            if fd is None:
                fd = self._open_output(key)
            while view:
                view = view[os.write(fd, view) :]
        except OSError as exc:
            self._timeline.add(key, at_s, len(event.data) - len(view))
            return self._lose(self.paths.output(*key), len(view), exc, (event.node_rank,))
        self._timeline.add(key, at_s, len(event.data))
        return None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close all files, and give back the room of a receipt that was not written."""
        self.close_files()
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1
        with contextlib.suppress(OSError):
            _temporary(self.paths.receipt).unlink(missing_ok=True)

    def close_files(self) -> Notice | None:
        """Close events and output; once is enough. Returns what NFS may tell only now: that the disk is full."""
        notice = self.tick()
        files = [(self.paths.events, self._events_fd), (self.paths.timeline, self._timeline_fd)]
        files = files if self._events_fd >= 0 else []
        files += [(self.paths.output(*key), fd) for key, fd in self._output_fds.items()]
        for path, fd in files:
            try:
                os.close(fd)
            except OSError as exc:
                notice = self._lose(path, 0, exc, ()) or notice
        self._output_fds.clear()
        self._events_fd = self._timeline_fd = -1
        return notice

    def _lose(self, path: Path, lost_bytes: int, exc: OSError, node_ranks: tuple[int, ...]) -> Notice | None:
        self._lost[path] += lost_bytes
        if self._told:
            return None
        self._told = True
        return Notice(f"cannot write {path}: {exc.strerror}; the job goes on, but its logs miss bytes", node_ranks)

    def _open_output(self, key: _OutputKey) -> int:
        path = self.paths.output(*key)
        if len(self._output_fds) >= self.most_open:
            self._close_oldest()
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


def is_held(paths: RunPaths) -> bool:
    """Tell whether the launcher of a run lives: it holds a lock. Over a network file system this may not be seen."""
    try:
        fd = os.open(paths.events, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(fd)
    return False


def raise_file_limit(needed: int) -> int:
    """Let this process hold `needed` open files, as far as the system allows. Returns how many it may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return needed
    reachable = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (reachable, hard))
    except (OSError, ValueError):
        return soft
    return reachable


def _open_append(path: Path) -> int:
    try:
        return os.open(path, _OPEN_FLAGS, 0o600)
    except FileNotFoundError:
        path.parent.mkdir(mode=0o700, exist_ok=True)
        return os.open(path, _OPEN_FLAGS, 0o600)


def _write_json(path: Path, value: object) -> None:
    temporary = _temporary(path)
    fd = os.open(temporary, _WRITE_FLAGS, 0o600)  # not emptied first: it may hold the room that it needs
    try:
        with os.fdopen(fd, "w", encoding="utf-8") as file:
            json.dump(value, file, indent=2)
            file.write("\n")
            file.truncate()
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _temporary(path: Path) -> Path:
    return path.with_name(f".{path.name}.tmp")


def _cannot_use(root: Path, exc: OSError) -> JobError:
    where = exc.filename if isinstance(exc.filename, str) else str(root)
    message = f"cannot use the run directory {root}: {exc.strerror}"
    if where != str(root):
        message += f" ({where})"
    return JobError(message, hint="name a directory that you can write to with `--run-dir DIR`")
