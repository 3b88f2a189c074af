"""`run --json`: lines that a script reads, what becomes of output, and of a reader that is slow or leaves."""

from __future__ import annotations

import base64
import json
import os
import threading
from typing import TYPE_CHECKING, Any

import pytest

from gpulayer.errors import HeldError, RefusedError
from gpulayer.events import Event, ExitStatus, Notice, Output, RankExited
from gpulayer.json_screen import PIECE_BYTES, ErrorLine, JsonScreen
from gpulayer.screen import Terminal
from gpulayer.signals import Interrupted

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

Json = dict[str, Any]


def show(tmp_path: Path, then: Callable[[JsonScreen], object]) -> list[Json]:
    """Return the lines on stdout; stderr stays empty."""
    fds = [os.open(tmp_path / name, os.O_RDWR | os.O_CREAT | os.O_TRUNC) for name in ("out", "err")]
    screen = JsonScreen(Terminal.detect({}, *fds))
    then(screen)
    assert screen.close(5.0)
    for fd in fds:
        os.close(fd)
    assert (tmp_path / "err").read_bytes() == b""
    return [json.loads(line) for line in (tmp_path / "out").read_bytes().splitlines()]


def content(lines: list[Json], rank: int | None = 0, stream: str = "stdout") -> bytes:
    """Put the pieces of one stream together."""
    mine = [one for one in lines if one["event"] == "output" and (one["rank"], one["stream"]) == (rank, stream)]
    return b"".join(one["text"].encode() if "text" in one else base64.b64decode(one["base64"]) for one in mine)


def test_events_and_output_in_order(tmp_path: Path) -> None:
    """Events are those of events.jsonl; output stands between them, whole lines as far as they go."""

    def story(screen: JsonScreen) -> None:
        screen.line({"t": 0.0, "event": "run", "version": 1})
        events: list[Event] = [
            Output(0, 0, "stdout", b"one\ntwo\nthr"),
            Output(0, 0, "stdout", b"ee\n"),
            Output(1, None, "stderr", b"torchrun\n"),
            RankExited(0, 0, ExitStatus(code=17)),
            Notice("text", (1,)),
            Output(0, 0, "stdout", b"the end"),
        ]
        for number, event in enumerate(events, 1):
            screen.handle(event, number / 10)
        screen.line({"event": "receipt", "exit_code": 1})

    assert show(tmp_path, story) == [
        {"t": 0.0, "event": "run", "version": 1},
        {"t": 0.1, "event": "output", "node_rank": 0, "rank": 0, "stream": "stdout", "text": "one\ntwo\n"},
        {"t": 0.2, "event": "output", "node_rank": 0, "rank": 0, "stream": "stdout", "text": "three\n"},
        {"t": 0.3, "event": "output", "node_rank": 1, "rank": None, "stream": "stderr", "text": "torchrun\n"},
        {"t": 0.4, "event": "rank_exited", "node_rank": 0, "rank": 0, "code": 17, "signal": None},
        {"t": 0.5, "event": "notice", "text": "text", "node_ranks": [1]},
        {"t": 0.6, "event": "output", "node_rank": 0, "rank": 0, "stream": "stdout", "text": "the end"},
        {"event": "receipt", "exit_code": 1},
    ]


def test_a_line_that_does_not_end_is_not_kept_back_for_ever(tmp_path: Path) -> None:
    """A prompt comes after half a second, less a character that is not whole; a progress bar in bounded pieces."""

    def story(screen: JsonScreen) -> None:
        screen.handle(Output(0, 0, "stdout", "name? ü".encode()[:-1]), 1.0)
        screen.tick(1.2)
        screen.tick(1.6)
        screen.handle(Output(0, 0, "stdout", b"\xbc and more\r"), 1.7)
        screen.handle(Output(0, 1, "stdout", b"#" * (3 * PIECE_BYTES)), 1.8)

    lines = show(tmp_path, story)
    assert [(one["t"], one["text"]) for one in lines if one["rank"] == 0] == [(1.6, "name? "), (1.8, "ü and more\r")]
    assert [len(one["text"]) for one in lines if one["rank"] == 1] == [PIECE_BYTES] * 3


def test_every_byte_arrives(tmp_path: Path) -> None:
    """Bytes that are no UTF-8 come as base64; the pieces of a stream together are what the rank wrote."""
    data = bytes(range(256)) * 700 + "grüße 世界 🚀\n".encode() * 9000 + b"\xff\xf0\x9f\n" + b"\x9f" * 200_000
    for size in (7063, 65_536, 1 << 20):

        def story(screen: JsonScreen, size: int = size) -> None:
            for start in range(0, len(data), size):
                screen.handle(Output(0, 0, "stdout", data[start : start + size]), 1.0)

        lines = show(tmp_path, story)
        assert content(lines) == data
        assert {frozenset(one) & {"text", "base64"} for one in lines} == {frozenset({"text"}), frozenset({"base64"})}
        assert max(len(one.get("text", "").encode()) for one in lines) <= PIECE_BYTES


def test_a_reader_that_is_too_slow_misses_output_and_no_event(tmp_path: Path) -> None:
    """What was left out is counted where it is missing; every event is there, and nobody has waited."""
    reading, writing = os.pipe()
    err = os.open(tmp_path / "err", os.O_RDWR | os.O_CREAT)
    screen = JsonScreen(Terminal.detect({}, writing, err), queue_bytes=200_000)
    for number in range(1000):
        screen.handle(Output(0, 0, "stdout", b"x" * 5000 + b"\n"), number / 1000)
        screen.handle(Notice(f"event {number}"), number / 1000)
    data = bytearray()

    def read() -> None:
        while piece := os.read(reading, 65_536):
            data.extend(piece)

    reader = threading.Thread(target=read)
    reader.start()
    assert screen.close(10.0)
    os.close(writing)
    reader.join(10)
    os.close(reading)
    os.close(err)
    assert (tmp_path / "err").read_bytes() == b""
    lines = [json.loads(line) for line in data.splitlines()]
    assert [one["text"] for one in lines if one["event"] == "notice"] == [f"event {number}" for number in range(1000)]
    shown = sum(one["event"] == "output" for one in lines)
    assert 0 < shown < 1000
    assert shown + sum(one["count"] for one in lines if one["event"] == "output_left_out") == 1000


def test_a_reader_that_leaves_is_no_error() -> None:
    """`gpulayer run --json | head -1` ends the printing, not the job."""
    reading, writing = os.pipe()
    screen = JsonScreen(Terminal.detect({}, writing, 2))
    os.close(reading)
    for number in range(100):
        screen.handle(Notice("text"), number)
    assert screen.close(5.0)
    os.close(writing)


def end_with(error: BaseException | None) -> None:
    """Raise it, where there is one."""
    if error:
        raise error


@pytest.mark.parametrize(
    ("error", "lines"),
    [
        (HeldError("2 are free", hint="`--wait`"), [{"exit_code": 3, "text": "2 are free", "hint": "`--wait`"}]),
        (Interrupted(2), [{"exit_code": 130, "text": "interrupted", "hint": None}]),
        (RefusedError("its receipt has it", {}), []),
        (ValueError("a mistake of gpulayer's"), []),
        (None, []),
    ],
)
def test_an_error_is_a_line_too(error: BaseException | None, lines: list[Json], tmp_path: Path) -> None:
    """It goes on to whoever catches it; one that nodes gave is in the receipt, the line before."""
    caught: BaseException | None = None
    out = os.open(tmp_path / "out", os.O_RDWR | os.O_CREAT)
    try:
        with ErrorLine(Terminal.detect({}, out, 2)):
            end_with(error)
    except BaseException as exc:  # noqa: BLE001 - whatever it is
        caught = exc
    os.close(out)
    assert caught is error
    said = [json.loads(line) for line in (tmp_path / "out").read_text().splitlines()]
    assert said == [{"event": "error", **line} for line in lines]
