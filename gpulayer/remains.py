"""What nodes were found to hold, in words, as a table and as JSON: for `ps` and `kill`. Pure.

LEFTOVERS_VERSION counts up when a name in the JSON changes its meaning or goes.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from gpulayer.processes import MARKER_CHARS
from gpulayer.ranges import fold

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from gpulayer.errors import NodeError
    from gpulayer.events import Survivor
    from gpulayer.facts import GpuFact
    from gpulayer.inventory import LeftJob, Survey

LEFTOVERS_VERSION = 1
SHORTEST_COMMAND = 20
JOBS_TABLE = ("job", "node", "rank", "supervisor", "procs", "gpu mem", "age", "command")
_GAP = "  "


@dataclass(frozen=True, slots=True)
class NodeSeen:
    """What one node said. `gpu` None: nobody asked, or nothing could be asked."""

    survey: Survey
    gpu: GpuFact | None = None


@dataclass(frozen=True, slots=True)
class FoundJob:
    """A job's part on a machine, and the entries of the map that are this machine, mostly one."""

    node_ids: tuple[str, ...]
    job: LeftJob
    gpu_memory_mib: int | None


def found_jobs(seen: Mapping[str, NodeSeen]) -> list[FoundJob]:
    """Return every part of every job, ordered by job and then as the nodes are."""
    found: dict[str, FoundJob] = {}
    for node_id, node in seen.items():
        for job in node.survey.jobs:
            known = found.get(job.marker[:MARKER_CHARS])
            if known:  # parts of one machine, which see the same processes
                found[job.marker[:MARKER_CHARS]] = replace(known, node_ids=(*known.node_ids, node_id))
            else:
                found[job.marker[:MARKER_CHARS]] = FoundJob((node_id,), job, _gpu_memory_mib(job, node.gpu))
    return sorted(found.values(), key=lambda one: one.job.job_id)


def _gpu_memory_mib(job: LeftJob, gpu: GpuFact | None) -> int | None:
    if gpu is None or gpu.tool is None or gpu.state != "ok":
        return None
    used = [process.memory_mib for process in gpu.processes if process.pid in job.pids]
    known = [memory_mib for memory_mib in used if memory_mib is not None]
    return sum(known) if known or not used else None


# --- ps -------------------------------------------------------------------------------------------------------------


def render_jobs(found: Sequence[FoundJob], columns: int | None) -> str:
    """Return the table of `ps`, `columns` wide (None: as wide as it gets). With two users, it names the user."""
    several = len({one.job.user for one in found}) > 1
    rows = [[*_cells(one), *([one.job.user] if several else []), one.job.command or "-"] for one in found]
    names = [*JOBS_TABLE[:-1], *(["user"] if several else []), JOBS_TABLE[-1]]
    return _table([names, *rows], columns)


def _cells(one: FoundJob) -> list[str]:
    job = one.job
    return [
        job.job_id,
        fold(one.node_ids),
        "-" if job.node_rank is None else str(job.node_rank),
        "alive" if job.supervisor else "gone",
        str(job.count),
        _memory_text(one.gpu_memory_mib),
        age_text(job.age_s),
    ]


def _table(rows: Sequence[Sequence[str]], columns: int | None) -> str:
    """Lay out columns; the last one is cut, and no other."""
    widths = [max(len(row[place]) for row in rows) for place in range(len(rows[0]) - 1)]
    lines = []
    for row in rows:
        head = "".join(cell.ljust(width) + _GAP for cell, width in zip(row, widths, strict=False))
        room = None if columns is None else max(SHORTEST_COMMAND, columns - len(head))
        lines.append((head + _cut(row[-1], room)).rstrip() + "\n")
    return "".join(lines)


def _cut(text: str, room: int | None) -> str:
    return text if room is None or len(text) <= room else text[: room - 3] + "..."


def _memory_text(memory_mib: int | None) -> str:
    if memory_mib is None:
        return "-"
    return f"{memory_mib / 1024:.1f} GiB" if memory_mib else "0"


def age_text(age_s: float) -> str:
    """Return an age in the unit that suits it."""
    for unit_s, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if age_s >= 2 * unit_s:
            return f"{age_s / unit_s:.0f} {unit}"
    return f"{age_s:.0f} s"


def jobs_json(found: Sequence[FoundJob], problems: Mapping[str, NodeError]) -> str:
    """Return what `ps --json` prints."""
    jobs = [
        {
            "job_id": one.job.job_id,
            "nodes": list(one.node_ids),
            "node_rank": one.job.node_rank,
            "user": one.job.user,
            "supervisor": one.job.supervisor,
            "keepers": list(one.job.keepers),
            "count": one.job.count,
            "processes": [
                {"pid": each.pid, "rank": each.rank, "state": each.state, "age_s": each.age_s, "command": each.command}
                for each in one.job.processes
            ],
            "gpu_memory_mib": one.gpu_memory_mib,
            "age_s": one.job.age_s,
            "command": one.job.command,
        }
        for one in found
    ]
    return json_document({"jobs": jobs, "refused": _problems_json(problems)})


# --- kill -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class EndedJob:
    """What became of a job's part on a node: so many processes were there, so many got SIGKILL, these are left."""

    node_id: str
    job_id: str
    count: int
    killed: int
    survivors: tuple[Survivor, ...] = ()

    @property
    def clean(self) -> bool:
        """Somebody has looked again, and nothing was left."""
        return not self.survivors


def render_ended(ended: Sequence[EndedJob], nothing_on: Sequence[str], job_id: str | None) -> str:
    """Return what `kill` did, a line for the nodes that fared alike. `job_id` None: all jobs were to end."""
    groups: dict[str, list[EndedJob]] = {}
    for one in ended:
        groups.setdefault(_ended_text(one), []).append(one)
    lines = []
    for text, alike in groups.items():
        jobs = dict.fromkeys(one.job_id for one in alike)
        noun = "job" if len(jobs) == 1 else "jobs"
        lines.append(f"{noun} {', '.join(jobs)} on {fold(dict.fromkeys(one.node_id for one in alike))}: {text}")
        for one in alike:
            lines += [
                f"    {one.node_id}: pid {left.pid}, state {left.state}, {left.command}" for left in one.survivors
            ]
    if nothing_on:
        lines.append(f"nothing of {f'job {job_id}' if job_id else 'any job'} runs on {fold(nothing_on)}")
    return "".join(f"{line}\n" for line in lines)


def _ended_text(one: EndedJob) -> str:
    by_force = f", {one.killed} by SIGKILL" if one.killed else ""
    text = f"{count_of(one.count - len(one.survivors), 'process', 'es')} ended{by_force}"
    if one.clean:
        return f"{text}; verified clean"
    return f"{text}; {count_of(len(one.survivors), 'process', 'es')} outlived SIGKILL"


def ended_json(ended: Sequence[EndedJob], nothing_on: Sequence[str], problems: Mapping[str, NodeError]) -> str:
    """Return what `kill --json` prints."""
    parts = [
        {
            "job_id": one.job_id,
            "node": one.node_id,
            "count": one.count,
            "killed": one.killed,
            "verified_clean": one.clean,
            "survivors": [{"pid": left.pid, "state": left.state, "command": left.command} for left in one.survivors],
        }
        for one in ended
    ]
    return json_document({"ended": parts, "nothing_on": list(nothing_on), "refused": _problems_json(problems)})


def later_hint(job_id: str | None, node_ids: Iterable[str], found_by: str = "") -> str:
    """Return the command that looks again, for later."""
    return f"`gpulayer kill {job_id or '--all'} -w {fold(node_ids)}{found_by}` looks there again, and ends what is left"


# --- all ------------------------------------------------------------------------------------------------------------


def _problems_json(problems: Mapping[str, NodeError]) -> list[dict[str, str | None]]:
    return [{"node_id": node_id, "text": str(error), "hint": error.hint} for node_id, error in problems.items()]


def json_document(content: Mapping[str, object]) -> str:
    """Return a document for scripts."""
    return json.dumps({"version": LEFTOVERS_VERSION, **content}, indent=2) + "\n"


def count_of(number: int, noun: str, plural: str = "s") -> str:
    """Return a number with its noun."""
    return f"{number} {noun}{'' if number == 1 else plural}"
