"""The login node's record of which job has which machines: one file for each job, in a folder that all users share.

A launcher holds a lock (flock) on its file for as long as it lives. The kernel takes the lock away when the launcher
dies, however it dies, so a file that nobody has locked says nothing. Another lock, on the file `mutex`, is held for the
moment of drawing: of two jobs that want the last nodes, one gets them all and the other none.

Whose a record is, is taken from the owner of its file; what stands in it can only keep machines from being drawn. Other
login nodes have records of their own: between those, a node's supervisor decides.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import time
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Self

from gpulayer.errors import HeldError
from gpulayer.hosts import fold, gpus_meet
from gpulayer.lease_folder import SUFFIX, LeaseFolder, user_name
from gpulayer.placement import Hold, longer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from types import TracebackType

    from gpulayer.hosts import Node

    Acquire = Callable[[Mapping[str, Hold]], tuple[str, ...]]

FOLDER = "/tmp/gpulayer-leases"  # noqa: S108 - each file in it is its owner's
VERSION = 1
MOST_LETTERS = 64
LATEST_S = 4e9  # of a time that is believed
LAST_TICKET = 1 << 53
POLL_S = 0.5


class State(StrEnum):
    """What a job does with the machines of its record."""

    HELD = "held"
    WAITING = "waiting"


@dataclass(frozen=True, slots=True)
class Machine:
    """A machine, or the part of one that has these device indices. None: all of it."""

    key: str
    gpus: tuple[int, ...] | None

    def meets(self, other: Machine) -> bool:
        """True when two jobs cannot have both at once."""
        return self.key == other.key and gpus_meet(self.gpus, other.gpus)


@dataclass(frozen=True, slots=True)
class Record:
    """One job's record. Jobs that wait come in the order of their tickets."""

    job_id: str
    user: str
    login: str
    pid: int
    since: float
    state: State
    ticket: int
    machines: tuple[Machine, ...]

    @property
    def turn(self) -> tuple[int, float, str]:
        """What orders the jobs that wait."""
        return self.ticket, self.since, self.job_id

    @property
    def hold(self) -> Hold:
        """What others are told of it."""
        return Hold(self.job_id, self.user, self.login, self.since, waiting=self.state is State.WAITING)


def machine(node: Node, key: str) -> Machine:
    """Return the machine of a map's entry: a part of it where the entry lists devices, else all of it."""
    return Machine(key, node.devices)


def held_nodes(
    machines: Mapping[str, Machine], records: Sequence[Record], own: Record | None = None
) -> dict[str, Hold]:
    """Return which of these nodes other jobs have, or wait for and come before `own` (None: a job that comes last)."""
    before = [one for one in records if one.state is State.HELD or own is None or one.turn < own.turn]
    before.sort(key=lambda one: (one.state is State.WAITING, *one.turn))
    held = {}
    for node_id, wanted in machines.items():
        if record := next((one for one in before if any(wanted.meets(other) for other in one.machines)), None):
            held[node_id] = record.hold
    return held


def next_ticket(records: Sequence[Record]) -> int:
    """Return a ticket that comes after all others."""
    return min(LAST_TICKET, max((one.ticket for one in records), default=0) + 1)


def read_records(files: Iterable[tuple[bytes, str]]) -> list[Record]:
    """Return the records in these files, each of which belongs to the user named with it."""
    return [record for data, user in files if (record := read_record(data, user))]


def write_record(record: Record) -> bytes:
    """Return a record as its file holds it. Parts of one machine become one entry."""
    machines: dict[str, list[int] | None] = {}
    for one in record.machines:
        known = machines.get(one.key, [])
        machines[one.key] = None if one.gpus is None or known is None else sorted({*known, *one.gpus})
    return json.dumps({"version": VERSION, **asdict(record), "machines": machines}).encode() + b"\n"


def read_record(data: bytes, user: str) -> Record | None:
    """Read the record in a file of `user`, or None where it is none. Its own word for the user counts for nothing."""
    try:
        said = json.loads(data)
        machines = [
            Machine(str(key), None if gpus is None else _numbers(gpus)) for key, gpus in said["machines"].items()
        ]
        record = Record(
            job_id=_word(said["job_id"]),
            user=user,
            login=_word(said["login"]),
            pid=int(said["pid"]),
            since=float(said["since"]),
            state=State(said["state"]),
            ticket=int(said["ticket"]),
            machines=tuple(machines),
        )
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError, OverflowError):
        return None
    believed = said.get("version") == VERSION and 0 <= record.since < LATEST_S and 0 <= record.ticket <= LAST_TICKET
    return record if believed else None


def _word(value: object) -> str:
    if not isinstance(value, str) or not 0 < len(value) <= MOST_LETTERS or not value.isprintable():
        raise ValueError
    return value


def _numbers(value: object) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(type(item) is int for item in value):
        raise ValueError
    return tuple(value)


class Lease:
    """A job's own record: made by the first try to draw that needs it, gone with `release` or with this process."""

    def __init__(self, path: Path, job_id: str) -> None:
        uid = os.geteuid()
        self._path = path
        self._name = f"{job_id}.{uid}.{secrets.token_hex(4)}{SUFFIX}"
        self._folder: LeaseFolder | None = None
        self._fd: int | None = None
        self._record = Record(job_id, user_name(uid), socket.gethostname(), os.getpid(), time.time(), State.HELD, 0, ())

    @property
    def hold(self) -> Hold:
        """What others are told of this job."""
        return self._record.hold

    def draw(
        self,
        machines: Mapping[str, Machine],
        acquire: Acquire,
        wait_s: float | None,
        tell: Callable[[str], None],
    ) -> tuple[str, ...]:
        """Return what `acquire` takes, given who holds which of `machines`, all the nodes it chooses from.

        Where too few are free, raises HeldError: at once (`wait_s` None), or after waiting for so long. A record that
        cannot be kept is told; the nodes are drawn then as if all were free.
        """
        began = time.monotonic()
        waits = False
        while True:
            try:
                ids = self._try(machines, acquire, waits=wait_s is not None)
            except OSError as error:
                self.release()
                tell(
                    f"warning: leases cannot be kept in {self._path}: {error.strerror}; other jobs may draw these nodes"
                )
                return acquire({})
            except HeldError as held:
                waited_s = time.monotonic() - began
                if wait_s is None:
                    raise
                if waited_s >= wait_s:
                    raise HeldError(f"waited for {wait_s:g} s, but {held}", hint=longer(held.hint)) from None
                if not waits:
                    tell(f"waiting for nodes: {held}")
                waits = True
                time.sleep(min(POLL_S, wait_s - waited_s))
            else:
                if waits:
                    tell(f"drew {fold(ids)} after {time.monotonic() - began:.0f} s")
                return ids

    def _try(self, machines: Mapping[str, Machine], acquire: Acquire, *, waits: bool) -> tuple[str, ...]:
        self._folder = self._folder or LeaseFolder(self._path, create=True)
        with self._folder.mutex():
            records = read_records(self._folder.records(self._fd))
            held = held_nodes(machines, records, None if self._fd is None else self._record)
            try:
                ids = acquire(held)
            except HeldError:
                if waits and self._fd is None:
                    self._write(State.WAITING, tuple(machines.values()), next_ticket(records))
                raise
            self._write(State.HELD, tuple(machines[node_id] for node_id in ids), self._record.ticket)
            return ids

    def _write(self, state: State, machines: tuple[Machine, ...], ticket: int) -> None:
        if self._folder is None:
            return
        self._record = replace(self._record, state=state, machines=machines, ticket=ticket, since=time.time())
        if self._fd is None:
            self._fd = self._folder.new_file(self._name)
        data = write_record(self._record)
        os.pwrite(self._fd, data, 0)
        os.ftruncate(self._fd, len(data))

    def release(self) -> None:
        """Give the nodes back."""
        if self._folder is not None:
            with contextlib.suppress(OSError):
                os.unlink(self._name, dir_fd=self._folder.fd)
            self._folder.close()
        if self._fd is not None:
            os.close(self._fd)
        self._folder = self._fd = None

    def __enter__(self) -> Self:
        """Nothing is held before something is drawn."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Give the nodes back."""
        self.release()


def look_up(path: Path, machines: Mapping[str, Machine], tell: Callable[[str], None]) -> dict[str, Hold] | None:
    """Return which of these nodes are held, as of now. None where the folder cannot be read, which is told."""
    try:
        return held_nodes(machines, _records_in(path))
    except FileNotFoundError:
        return {}
    except OSError as error:
        tell(f"warning: leases cannot be read from {path}: {error.strerror}")
        return None


def live_records(path: Path) -> list[Record]:
    """Return the records of all launchers that live here; none where the folder cannot be read."""
    try:
        return _records_in(path)
    except OSError:
        return []


def _records_in(path: Path) -> list[Record]:
    folder = LeaseFolder(path, create=False)
    try:
        with folder.mutex():
            return read_records(folder.records())
    finally:
        folder.close()


def leases_folder(environ: Mapping[str, str]) -> Path:
    """Return where this login node's records are: $GPULAYER_LEASES, else a folder that all its users know."""
    named = environ.get("GPULAYER_LEASES")
    return Path(named).resolve() if named else Path(FOLDER)
