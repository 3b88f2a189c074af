"""Past runs, as their run directories tell of them: which there are, how each ended, and which goes on."""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from gpulayer.errors import JobError
from gpulayer.logs import RunPaths, is_held
from gpulayer.messages import ShownNode
from gpulayer.outcome import EXIT_INCOMPLETE, EXIT_UNCLEAN, LOGS_INCOMPLETE, OUTPUTS_MISSING
from gpulayer.ranges import fold
from gpulayer.untrusted import one_line

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

LAST = "last"
RUNS_TABLE = ("job", "started", "took", "nodes", "exit", "outcome")
RUNS_VERSION = 1
LONGEST_OUTCOME = 200

_MOST_BYTES = 64 << 20  # of a receipt; no launcher writes such a one
_FIRST_LINE_BYTES = 4 << 20


class RunState(StrEnum):
    """Whether a run goes on. One without a receipt was killed with its launcher, or its machine went down."""

    RUNNING = "running"
    ENDED = "ended"
    NO_RECEIPT = "no receipt"


@dataclass(frozen=True, slots=True)
class PastRun:
    """One run. `took_s`, `exit_code` and `text` are what its receipt says; None and "" without one."""

    job_id: str
    root: Path
    state: RunState
    started_at: datetime | None
    nodes: tuple[ShownNode, ...]
    took_s: float | None = None
    exit_code: int | None = None
    text: str = ""

    @property
    def outcome(self) -> str:
        """How it ended, in one line."""
        if self.state is not RunState.ENDED:
            return "running" if self.state is RunState.RUNNING else "ended without a receipt"
        words = self.text or ("succeeded" if self.exit_code == 0 else "ended")
        return f"{words}; something may still run" if self.exit_code == EXIT_UNCLEAN else words


def find_runs(folder: Path) -> list[PastRun]:
    """Return the runs in a folder, or the one that it is itself, the newest last. Raises JobError."""
    try:
        itself = read_run(folder)
        roots = [path for path in folder.iterdir() if path.is_dir()] if itself is None else []
    except OSError as exc:
        raise JobError(
            f"`{folder}` is no folder with runs: {exc.strerror}",
            hint="`gpulayer runs DIR` lists those of another folder",
        ) from exc
    found = [itself] if itself else [run for root in roots if (run := read_run(root))]
    oldest = datetime.min.replace(tzinfo=UTC)
    return sorted(found, key=lambda run: (run.started_at or oldest, run.job_id))


def choose_run(name: str, folder: Path) -> PastRun:
    """Return the run that is meant: by its job id in `folder`, by its path, or the `last` one. Raises JobError."""
    if name == LAST:
        runs = find_runs(folder) if folder.exists() else []
        if not runs:
            raise JobError(f"there is no run in {folder}", hint="`gpulayer logs DIR` takes a run directory too")
        return runs[-1]
    for root in (folder / name, folder.parent / name):
        if run := read_run(root):
            return run
    raise JobError(
        f"`{name}` is no run directory, and no job id of a run in {folder}", hint="`gpulayer runs` lists those here"
    )


def read_run(root: Path) -> PastRun | None:
    """Return what a run directory tells, None where a folder is none."""
    paths = RunPaths(root)
    begun, receipt = _begun(paths), _read(paths.receipt)
    if not begun and not receipt:
        return None
    state = RunState.ENDED if receipt else RunState.RUNNING if is_held(paths) else RunState.NO_RECEIPT
    if state is RunState.NO_RECEIPT and (receipt := _read(paths.receipt)):
        state = RunState.ENDED  # meanwhile
    return PastRun(
        job_id=_text(begun.get("job_id") or receipt.get("job_id")) or root.name,
        root=root,
        state=state,
        started_at=_time(begun.get("started_at") or receipt.get("started_at")),
        nodes=tuple(_nodes(begun.get("nodes") or receipt.get("nodes"))),
        took_s=_number(receipt.get("took_s")),
        exit_code=receipt["exit_code"] if isinstance(receipt.get("exit_code"), int) else None,
        text=one_line(_words(receipt), LONGEST_OUTCOME),
    )


def runs_rows(runs: Iterable[PastRun], now: datetime) -> list[tuple[str, ...]]:
    """Return the cells of RUNS_TABLE, a row a run. Of one that goes on: how long it has taken so far."""
    rows: list[tuple[str, ...]] = []
    for run in runs:
        took_s = run.took_s
        if run.state is RunState.RUNNING and run.started_at:
            took_s = max(0.0, (now - run.started_at).total_seconds())
        rows.append(
            (
                run.job_id,
                f"{run.started_at:%Y-%m-%d %H:%M:%S}" if run.started_at else "-",
                "-" if took_s is None else duration_text(took_s),
                fold(node.node_id for node in run.nodes) or "-",
                "-" if run.exit_code is None else str(run.exit_code),
                run.outcome,
            )
        )
    return rows


def runs_json(runs: Iterable[PastRun]) -> str:
    """Return the same for scripts. RUNS_VERSION counts up when a name in it changes its meaning or goes."""
    found = [
        {
            "job_id": run.job_id,
            "run_dir": str(run.root.absolute()),
            "state": run.state,
            "started_at": run.started_at and run.started_at.isoformat(timespec="milliseconds"),
            "took_s": run.took_s,
            "nodes": [node.node_id for node in run.nodes],
            "exit_code": run.exit_code,
            "outcome": run.outcome,
        }
        for run in runs
    ]
    return json.dumps({"version": RUNS_VERSION, "runs": found}, indent=2) + "\n"


def duration_text(seconds: float) -> str:
    """Return a duration as people read it."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes = int(seconds) // 60
    return f"{minutes} min {int(seconds) % 60:02} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02} min"


def _words(receipt: dict[str, Any]) -> str:
    """Return how a run ended, as its receipt has it: the cause, the refusal, or what is missing; "" for a success."""
    cause = receipt.get("cause")
    if text := _text(cause.get("text") if isinstance(cause, dict) else receipt.get("text")):
        return text
    if receipt.get("exit_code") != EXIT_INCOMPLETE:
        return ""
    nodes = receipt.get("nodes")
    outputs = [node.get("outputs") for node in (nodes if isinstance(nodes, list) else ()) if isinstance(node, dict)]
    missing = any(one.get("problems") for one in outputs if isinstance(one, dict))
    return OUTPUTS_MISSING if missing and not receipt.get("lost_log_bytes") else LOGS_INCOMPLETE


def _begun(paths: RunPaths) -> dict[str, Any]:
    """Return the first line of events.jsonl, {} where it is none of a run."""
    try:
        with paths.events.open("rb") as file:
            line = json.loads(file.readline(_FIRST_LINE_BYTES))
    except (OSError, ValueError, RecursionError):
        return {}
    return line if isinstance(line, dict) and line.get("event") == "run" else {}


def _read(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            value = json.loads(file.read(_MOST_BYTES))
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _nodes(value: object) -> Iterable[ShownNode]:
    for node in value if isinstance(value, list) else ():
        if isinstance(node, dict) and isinstance(node.get("node_rank"), int):
            ranks = [one.get("rank") if isinstance(one, dict) else one for one in node.get("ranks") or ()]
            known = tuple(rank for rank in ranks if isinstance(rank, int))
            yield ShownNode(node["node_rank"], _text(node.get("node_id")) or str(node["node_rank"]), known)


def _text(value: object) -> str:
    return one_line(value) if isinstance(value, str) else ""


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) else None


def _time(value: object) -> datetime | None:
    try:
        time = datetime.fromisoformat(value) if isinstance(value, str) else None
    except ValueError:
        return None
    return time if time and time.tzinfo else None
