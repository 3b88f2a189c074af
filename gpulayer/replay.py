"""What a run's ranks wrote, read back from its files: one stream after the other or by time, also while they grow."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpulayer.console import Console, ConsoleOptions
from gpulayer.errors import JobError
from gpulayer.events import Output
from gpulayer.history import RunState, read_run
from gpulayer.logs import RunPaths
from gpulayer.ranges import fold
from gpulayer.timeline import read_pieces

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gpulayer.history import PastRun
    from gpulayer.messages import ShownNode
    from gpulayer.screen import Terminal
    from gpulayer.timeline import Piece, StreamKey

CHUNK_BYTES = 1 << 18
LOOK_AGAIN_S = 0.2


@dataclass(frozen=True, slots=True)
class Choice:
    """Which output to show, and how. `node` is a node rank or a node id."""

    node: str | None = None
    rank: int | None = None
    follow: bool = False
    merge: bool = False


def show_logs(run: PastRun, choice: Choice, terminal: Terminal) -> int:
    """Show the output that was chosen, and return the exit code: 1 where stdout cannot be written. Raises JobError."""
    reader = _Reader(run, _streams(run, choice))
    if choice.merge:
        reader.check_index()
    console = Console(terminal, run.nodes, RunPaths(run.root), ConsoleOptions(patient=True))
    began_s = time.monotonic()
    while True:
        now_run = read_run(run.root) or run
        over = not choice.follow or now_run.state is not RunState.RUNNING  # asked first: all it wrote is there then
        for key, at_s, data in reader.by_time(over=over) if choice.merge else reader.by_stream():
            if not data:
                if not choice.follow:
                    console.end_lines()
                continue
            node_rank, rank, stream = key
            console.handle(Output(node_rank, rank, stream, data), time.monotonic() - began_s if choice.follow else at_s)
            if console.gone:
                return _closed(console)
        if over:
            break
        console.tick(time.monotonic() - began_s)
        time.sleep(LOOK_AGAIN_S)
    if choice.follow:
        code = "" if now_run.exit_code is None else f", exit code {now_run.exit_code}"
        console.end_lines()
        console.block(f"gpulayer: job {now_run.job_id}: {now_run.outcome}{code}")
    elif not reader.found:
        console.block(f"gpulayer: nothing was written in {run.root} by what is asked for")
    return _closed(console)


def _closed(console: Console) -> int:
    return 0 if console.close(timeout_s=float("inf")) else 1


class _Reader:
    """How far each chosen stream has been read."""

    def __init__(self, run: PastRun, keys: list[StreamKey]) -> None:
        self.found = False
        self._paths = RunPaths(run.root)
        self._read: dict[StreamKey, int] = dict.fromkeys(keys, 0)
        self._index_at = 0

    def check_index(self) -> None:
        """Raise JobError where nothing says when which bytes came."""
        if not self._paths.timeline.is_file():
            raise JobError(
                f"{self._paths.timeline} is missing, which says when output came", hint="leave out `--merge`"
            )

    def by_stream(self) -> Iterator[tuple[StreamKey, float, bytes]]:
        """Yield what is new, one stream after the other; b"" where a stream has nothing more."""
        for key in self._read:
            yield from self._new(key, 0.0)
            yield key, 0.0, b""

    def by_time(self, *, over: bool) -> Iterator[tuple[StreamKey, float, bytes]]:
        """Yield what is new in the order in which it came; once it is `over`, also what no line of the index covers."""
        at_s = 0.0
        for piece in self._pieces():
            if piece.key in self._read:
                at_s = max(at_s, piece.at_s)
                yield from self._new(piece.key, at_s, piece.end_bytes)
        if over:
            for key in self._read:
                yield from self._new(key, at_s)

    def _pieces(self) -> Iterator[Piece]:
        with self._paths.timeline.open("rb") as file:
            file.seek(self._index_at)
            for line in file:
                if not line.endswith(b"\n"):
                    return  # it is being written
                self._index_at += len(line)
                yield from read_pieces([line])

    def _new(
        self, key: StreamKey, at_s: float, end_bytes: int | None = None
    ) -> Iterator[tuple[StreamKey, float, bytes]]:
        """Yield the bytes of a stream that have not been read, up to `end_bytes`."""
        if end_bytes is not None and end_bytes <= self._read[key]:
            return
        try:
            file = self._paths.output(*key).open("rb")
        except OSError:  # it has written nothing yet
            return
        with file:
            file.seek(self._read[key])
            left = CHUNK_BYTES
            while left:
                if end_bytes is not None:
                    left = min(CHUNK_BYTES, end_bytes - self._read[key])
                data = file.read(left)
                if not data:
                    return
                self.found = True
                self._read[key] += len(data)
                yield key, at_s, data


def _streams(run: PastRun, choice: Choice) -> list[StreamKey]:
    """Return the streams that were chosen, those of a node's command after its ranks'. Raises JobError."""
    nodes = [node for node in run.nodes if choice.node is None or _is_meant(choice.node, node)]
    if not nodes:
        raise JobError(
            f"`--node {choice.node}`: the run has none such",
            hint=f"it had node ranks {fold(str(node.node_rank) for node in run.nodes)}: "
            f"{fold(node.node_id for node in run.nodes)}",
        )
    ranks = {rank for node in nodes for rank in node.ranks}
    if choice.rank is not None and choice.rank not in ranks:
        raise JobError(f"`--rank {choice.rank}`: there is none such", hint=f"there were {_count(ranks)}")
    wanted = [
        (node.node_rank, rank)
        for node in nodes
        for rank in (*node.ranks, None)
        if choice.rank is None or rank == choice.rank
    ]
    return [(node_rank, rank, stream) for node_rank, rank in wanted for stream in ("stdout", "stderr")]


def _is_meant(name: str, node: ShownNode) -> bool:
    return name == node.node_id or name == str(node.node_rank)


def _count(ranks: set[int]) -> str:
    return f"ranks {fold(str(rank) for rank in sorted(ranks))}" if ranks else "no ranks"
