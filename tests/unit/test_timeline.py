"""output.jsonl: one line for what a stream brought within an interval, in order of time, and what is made of it."""

from __future__ import annotations

import json

from gpulayer.timeline import INTERVAL_S, Piece, Timeline, read_pieces

OUT, ERR, OTHER = (0, 0, "stdout"), (0, 0, "stderr"), (1, None, "stdout")


def _rows(data: bytes) -> list[list[object]]:
    return [json.loads(line) for line in data.splitlines()]


def test_what_comes_together_is_one_line() -> None:
    """A line says how far the file had grown; it is due once its interval is over, and the oldest comes first."""
    timeline = Timeline()
    for at_s, key, size in ((1.0, OUT, 10), (1.01, ERR, 5), (1.05, OUT, 7), (1.1, OUT, 3), (1.11, OTHER, 1)):
        timeline.add(key, at_s, size)  # type: ignore[arg-type]
    assert _rows(timeline.take(1.15)) == [[1.0, 0, 0, "stdout", 17], [1.01, 0, 0, "stderr", 5]]
    assert timeline.take(1.15) == b""
    assert _rows(timeline.take()) == [[1.1, 0, 0, "stdout", 20], [1.11, 1, None, "stdout", 1]]
    assert (timeline.node_bytes(0), timeline.node_bytes(1), timeline.node_bytes(2)) == (25, 1, 0)


def test_lines_are_in_order_of_time() -> None:
    """Whichever stream's piece was closed first: what began first comes first."""
    timeline = Timeline()
    for at_s, key in ((1.0, OUT), (1.01, ERR), (1.2, OUT)):
        timeline.add(key, at_s, 1)  # type: ignore[arg-type]
    assert [row[0] for row in _rows(timeline.take(1.4))] == [1.0, 1.01, 1.2]


def test_its_cost_is_bounded() -> None:
    """However small the pieces, a stream has no more lines than intervals; and bytes that were lost have none."""
    timeline = Timeline()
    for number in range(10_000):
        timeline.add(OUT, number / 10_000, 1)  # type: ignore[arg-type]
    timeline.add(ERR, 0.5, 0)  # type: ignore[arg-type]
    rows = _rows(timeline.take())
    assert len(rows) <= 1 / INTERVAL_S + 1
    assert rows[-1][4] == 10_000
    assert {row[3] for row in rows} == {"stdout"}


def test_lines_that_are_none_are_passed_over() -> None:
    """A line cut short, another type, another stream: the lines around it are read."""
    lines = [b'[1.5,0,2,"stdout",9]\n', b"[1.5,0", b"7", b'{"a":1}', b'[1,0,0,"x",1]', b'[1,0,null,"stderr",4]\n']
    lines += [b'["x",0,0,"stdout",1]', b"[" * 100_000, b"\xff", b'[Infinity,Infinity,0,"stdout",1]']
    assert list(read_pieces(lines)) == [Piece(1.5, (0, 2, "stdout"), 9), Piece(1.0, (0, None, "stderr"), 4)]
