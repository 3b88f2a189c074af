"""When which bytes came: output.jsonl of a run directory, by which `gpulayer logs --merge` puts streams together.

A line is `[t, node_rank, rank, stream, end]`: by the time `t`, the file of that stream had grown to `end` bytes. `rank`
is null for the node's command itself. What comes of one stream within INTERVAL_S is one line, so its cost is bounded
however small the pieces are. A line that is missing takes nothing with it: the next one of its stream covers its bytes.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from gpulayer.events import StreamName

    StreamKey = tuple[int, int | None, StreamName]  # node rank, rank, stream

INTERVAL_S = 0.1


@dataclass(frozen=True, slots=True)
class Piece:
    """What one stream brought: its file had `end_bytes` bytes by `at_s`."""

    at_s: float
    key: StreamKey
    end_bytes: int


class Timeline:
    """How far each stream's file has grown, and the lines of output.jsonl that have not been taken yet."""

    def __init__(self) -> None:
        self._ends: dict[StreamKey, int] = {}
        self._open: dict[StreamKey, tuple[float, int]] = {}  # when a piece began, and where its file ends by now
        self._due: list[tuple[float, StreamKey, int]] = []

    def add(self, key: StreamKey, at_s: float, size_bytes: int) -> None:
        """Take note of bytes that have been written to a stream's file."""
        if not size_bytes:
            return
        end = self._ends[key] = self._ends.get(key, 0) + size_bytes
        piece = self._open.get(key)
        if piece and at_s - piece[0] >= INTERVAL_S:
            self._due.append((piece[0], key, piece[1]))
            piece = None
        self._open[key] = (piece[0] if piece else at_s, end)

    def node_bytes(self, node_rank: int) -> int:
        """Return how many bytes one node's files hold."""
        return sum(size for key, size in self._ends.items() if key[0] == node_rank)

    def take(self, now: float = float("inf")) -> bytes:
        """Return lines for all pieces that began INTERVAL_S before `now` or earlier, the oldest first."""
        over = [key for key, (at_s, _) in self._open.items() if now - at_s >= INTERVAL_S]
        for key in over:
            at_s, end = self._open.pop(key)
            self._due.append((at_s, key, end))
        rows, self._due = sorted(self._due, key=lambda row: row[0]), []
        return b"".join(
            json.dumps([round(at_s, 3), *key, end], separators=(",", ":")).encode() + b"\n" for at_s, key, end in rows
        )


def read_pieces(lines: Iterable[bytes]) -> Iterator[Piece]:
    """Read lines of output.jsonl. One that is cut short, as a full disk leaves it, is passed over."""
    for line in lines:
        try:
            at_s, node_rank, rank, stream, end = json.loads(line)
            piece = Piece(float(at_s), (int(node_rank), None if rank is None else int(rank), stream), int(end))
        except (ValueError, TypeError, OverflowError, RecursionError):
            continue
        if stream in ("stdout", "stderr"):
            yield piece
