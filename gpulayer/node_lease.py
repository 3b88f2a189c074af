"""A node's own lease: while a job lives here, no second one starts on the same GPUs. Runs on nodes.

A lease is a few abstract unix sockets whose names, put together, say in JSON who holds what. The kernel lists them to
everyone in /proc/net/unix and frees them with the last process that has them open: the supervisor, or its guard. No
file is left that could block a node. Who shares no network namespace (containers) does not see each other's leases.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time

from gpulayer.processes import read_file

LEASE_FACTS = ("job_id", "user", "login", "since", "scope", "gpus")
PREFIX = "gpulayer-lease/"
MUTEX = "\0gpulayer-lease-mutex"
MUTEX_LIMIT_S = 5.0
MUTEX_PAUSE_S = 0.005
PIECE_CHARS = 64  # a name has 107 bytes at most (unix(7))
MOST_PIECES = 20

TYPE_CHECKING = False  # mypy takes it for true; importing typing would cost 5 ms
if TYPE_CHECKING:
    from typing import Any, Iterator

    Header = dict[str, Any]


class LeaseHeldError(Exception):
    """Other jobs hold what was asked for; made of their facts."""


class Lease:
    """What a job holds of this node, until `release`, or until every process that has it open is gone.

    `facts` are job_id, user, login, since (seconds since 1970), scope (machines of one practice cluster differ in it)
    and gpus (device indices; None: the whole machine).
    """

    def __init__(self, facts: Header) -> None:
        """Take it. Raises LeaseHeldError where other jobs hold any of it."""
        self.sockets: list[socket.socket] = []
        with _mutex():
            holders = [other for other, _ in leases() if in_conflict(facts, other)]
            if holders:
                raise LeaseHeldError(holders)
            text = json.dumps(facts, separators=(",", ":"))
            pieces = [text[at : at + PIECE_CHARS] for at in range(0, len(text), PIECE_CHARS)]
            if len(pieces) > MOST_PIECES:
                raise ValueError("a lease says too much")
            token = os.urandom(6).hex()
            for place, piece in enumerate(pieces):
                holder = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
                self.sockets.append(holder)
                holder.bind(f"\0{PREFIX}{token}/{place}/{len(pieces)}/{piece}")

    def release(self) -> None:
        """Give it back."""
        for holder in self.sockets:
            holder.close()
        self.sockets = []


def in_conflict(wanted: Header, held: Header) -> bool:
    """Tell whether two jobs cannot have these at one time; pure. One job is never in conflict with itself."""
    names = ("job_id", "user", "login", "since")
    if wanted["scope"] != held["scope"] or all(wanted[name] == held[name] for name in names):
        return False
    # As hosts.gpus_meet on the login node, which is not sent to nodes.
    return wanted["gpus"] is None or held["gpus"] is None or bool(set(wanted["gpus"]) & set(held["gpus"]))


def leases() -> list[tuple[Header, set[int]]]:
    """Return the facts of every lease on this machine, each with the inodes of its sockets."""
    return parse_leases(read_file("/proc/net/unix").decode("utf-8", "replace"))


def parse_leases(table: str) -> list[tuple[Header, set[int]]]:
    """Read what /proc/net/unix says. Any user can bind such names, so what makes no sense is passed over."""
    pieces: dict[tuple[str, int], dict[int, tuple[str, int]]] = {}
    for line in table.split("\n"):
        before, _, name = line.partition(f" @{PREFIX}")
        with contextlib.suppress(ValueError, IndexError):
            token, place, length, piece = name.split("/", 3)
            pieces.setdefault((token, int(length)), {})[int(place)] = (piece, int(before.split()[6]))
    found = []
    for (_, count), parts in pieces.items():
        if count <= MOST_PIECES and sorted(parts) == list(range(count)):
            facts = _parse_facts("".join(parts[number][0] for number in range(count)))
            if facts:
                found.append((facts, {inode for _, inode in parts.values()}))
    return found


def _parse_facts(text: str) -> Header | None:
    try:
        facts = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(facts, dict) or set(facts) != set(LEASE_FACTS):
        return None
    gpus = facts["gpus"]
    sound = (
        all(isinstance(facts[name], str) for name in ("job_id", "user", "login", "scope"))
        and isinstance(facts["since"], (int, float))
        and 0 <= facts["since"] < 1e11
        and (gpus is None or (isinstance(gpus, list) and all(type(gpu) is int for gpu in gpus)))
    )
    return facts if sound else None


@contextlib.contextmanager
def _mutex() -> Iterator[None]:
    """Let one at a time look and take. Raises OSError where somebody does not give it back."""
    holder = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    give_up_at = time.monotonic() + MUTEX_LIMIT_S
    with holder:
        while True:
            try:
                holder.bind(MUTEX)
                break
            except OSError:
                if time.monotonic() > give_up_at:
                    raise
            time.sleep(MUTEX_PAUSE_S)
        yield
