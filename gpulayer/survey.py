"""What of any job is on this node now, whoever started it and whoever is dead. Runs on nodes.

For `gpulayer ps`, `gpulayer kill` and `gpulayer hosts --probe`.
"""

from __future__ import annotations

import contextlib
import os
import pwd

from gpulayer.node_lease import leases
from gpulayer.processes import (
    MARKER_CHARS,
    Process,
    describe,
    environment_of,
    keeper_name,
    process_table,
    read_file,
    select_job,
)

# An answer has a bound (frames.MAX_EVENT_BYTES), and a command line of strange bytes is told in six times its length.
MOST_DESCRIBED = 64  # of one job's processes
MOST_DESCRIBED_OF_ALL = 80
MOST_JOBS = 50
MOST_LEASES = 50

TYPE_CHECKING = False  # mypy takes it for true; importing typing would cost 5 ms
if TYPE_CHECKING:
    from typing import Any

    Header = dict[str, Any]
    Lease = tuple[Header, set[int]]


def survey() -> Header:
    """Return every lease on the node, and every job of which something is alive that this user may look into.

    A job whose keepers alone are left is known by the lease that they have open, and has the first letters of its
    marker for a marker. A daemon that has cleared its environment is seen while it descends from the job's others.
    """
    table = process_table()
    found = leases()
    jobs: dict[str, _Job] = {}
    for process in table.values():
        marks = _marks(process.pid) if process.alive else {}
        marker = marks.get("GPULAYER_MARKER", "")
        if marker:
            jobs.setdefault(marker[:MARKER_CHARS], _Job()).add(process, marks)
    for process in table.values():
        if process.alive and process.name.startswith(keeper_name("")):
            marker = process.name[len(keeper_name("")) :].decode("utf-8", "replace")
            jobs.setdefault(marker, _Job()).add_keeper(process, found, {"GPULAYER_MARKER": marker})
    told = [told for told in (job.told(table) for job in jobs.values()) if told["job_id"]][:MOST_JOBS]
    room = MOST_DESCRIBED_OF_ALL
    for one in told:
        one["processes"] = one["processes"][:room]
        room -= len(one["processes"])
    return {"leases": [facts for facts, _ in found[:MOST_LEASES]], "jobs": told}


class _Job:
    """One marker's processes and keepers."""

    def __init__(self) -> None:
        self.marks: dict[str, str] = {}
        self.ranks: dict[int, str] = {}
        self.marked: list[Process] = []
        self.keepers: list[Process] = []

    def add(self, process: Process, marks: dict[str, str]) -> None:
        self.marked.append(process)
        self.marks = {**marks, **self.marks}
        if "RANK" in marks:
            self.ranks[process.pid] = marks["RANK"]

    def add_keeper(self, process: Process, found: list[Lease], marks: dict[str, str]) -> None:
        self.keepers.append(process)
        sockets = _open_sockets(process.pid)
        held = [facts for facts, inodes in found if inodes & sockets]
        if held:
            marks = dict(marks, GPULAYER_JOB_ID=held[0]["job_id"])
        self.marks = {**marks, **self.marks}

    def told(self, table: dict[int, Process]) -> Header:
        keepers = {keeper.pid for keeper in self.keepers}
        roots = {process.pid for process in self.marked}
        alive = sorted(select_job(table, roots | keepers, keepers | {1}), key=lambda one: one.start)
        eldest = min(self.marked or self.keepers, key=lambda one: one.start)
        return {
            "job_id": self.marks.get("GPULAYER_JOB_ID", ""),
            "marker": self.marks["GPULAYER_MARKER"],
            "node_rank": _number(self.marks.get("GPULAYER_NODE_RANK", "")),
            "user": _owner(eldest.pid),
            "supervisor": any(_is_supervisor(keeper) for keeper in self.keepers),
            "keepers": sorted(keepers),
            "processes": [self._told_process(one) for one in alive[:MOST_DESCRIBED]],
            "count": len(alive),
            "age_s": _age_s(eldest),
            "command": describe(eldest)["command"],
        }

    def _told_process(self, process: Process) -> Header:
        return dict(describe(process), age_s=_age_s(process), rank=_number(self.ranks.get(process.pid, "")))


def _marks(pid: int) -> dict[str, str]:
    pairs = (entry.partition(b"=") for entry in environment_of(pid) if entry.startswith((b"GPULAYER_", b"RANK=")))
    return {name.decode("ascii", "replace"): value.decode("utf-8", "replace") for name, _, value in pairs}


def _open_sockets(pid: int) -> set[int]:
    found = set()
    with contextlib.suppress(OSError):
        for name in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                target = os.readlink(f"/proc/{pid}/fd/{name}")
                if target.startswith("socket:["):
                    found.add(int(target[8:-1]))
    return found


def _is_supervisor(keeper: Process) -> bool:
    """Tell it from the guard, which has /dev/null for its stdin."""
    try:
        return keeper.state not in "Tt" and os.readlink(f"/proc/{keeper.pid}/fd/0") != os.devnull
    except OSError:
        return False


def _age_s(process: Process) -> float:
    uptime_s = float(read_file("/proc/uptime").split()[0])
    return round(max(0.0, uptime_s - process.start / os.sysconf("SC_CLK_TCK")), 2)


def _owner(pid: int) -> str:
    try:
        uid = os.stat(f"/proc/{pid}").st_uid
    except OSError:
        return ""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def _number(text: str) -> int | None:
    return int(text) if text.isdigit() else None
