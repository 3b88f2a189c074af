"""Frames are cut from any stream in any pieces, and only what makes sense becomes an event."""

from __future__ import annotations

import json
import random

import pytest

from gpulayer.errors import HandshakeError, PythonTooOldError
from gpulayer.events import (
    CommandExited,
    CommandStarted,
    Event,
    ExitStatus,
    NodeEnded,
    NodeLost,
    NodeSwept,
    Output,
    RankExited,
    RankStarted,
    Survivor,
    Tail,
)
from gpulayer.frames import MAX_HEADER_BYTES, VERSION, FrameReader, ProtocolError, encode_frame
from gpulayer.wire import Header, Hello, Story, parse_event, parse_hello

HELLO = {"type": "hello", "version": VERSION, "python": "3.11.2", "hostname": "h", "kernel": "6.1", "pid": 7}
NODE_RANK, RANKS = 3, (6, 7)


def test_frames_survive_any_cuts() -> None:
    """However a stream is cut, the same frames come out, payloads of any bytes included."""
    chance = random.Random(4)
    frames: list[tuple[Header, bytes]] = [({"type": "ping"}, b"")]
    frames += [
        ({"type": "output", "n": n, "size": 0}, chance.randbytes(chance.choice([0, 1, 9, 5000]))) for n in range(60)
    ]
    stream = b"".join(encode_frame(header, payload) for header, payload in frames)
    expected = [(header if not payload else {**header, "size": len(payload)}, payload) for header, payload in frames]
    for _ in range(50):
        reader, rest = FrameReader(), stream
        got: list[tuple[Header, bytes]] = []
        while rest:
            cut = chance.choice([1, 2, 7, 100, 5000, 70_000])
            got += reader.feed(rest[:cut])
            rest = rest[cut:]
        assert got == expected
        assert len(reader._buffer) == 0


def test_text_of_any_kind_survives_a_header() -> None:
    """Newlines, NUL, quotes and bytes that were no UTF-8 are data, never the end of a header."""
    header = {"type": "x", "text": '\n\0"\\ü漢\udcff'}
    assert list(FrameReader().feed(encode_frame(header, b"\n"))) == [({**header, "size": 1}, b"\n")]


@pytest.mark.parametrize(
    "data",
    [
        b"\n",
        b"garbage\n",
        b"\xff\n",
        b"null\n",
        b"1\n",
        b"[]\n",
        b"{}\n",
        b'{"type":null}\n',
        b'{"type":"x","size":"1"}\n',
        b'{"type":"x","size":-1}\n',
        b'{"type":"x","size":true}\n',
        b'{"type":"x","size":1.5}\n',
        b'{"type":"x","size":101}\n',
        b'{"type":"x","size":' + b"9" * 5000 + b"}\n",
        b"[" * 60_000 + b"\n",
        b"x" * (MAX_HEADER_BYTES + 1),
        b'{"type":"' + b"x" * MAX_HEADER_BYTES + b'"}\n',
    ],
)
def test_what_is_no_frame_is_an_error(data: bytes) -> None:
    """The frames before it are given out; then comes an error, and no announced size is believed beyond the limit."""
    frames = FrameReader(max_payload_bytes=100).feed(encode_frame({"type": "good"}) + data)
    assert next(frames) == ({"type": "good"}, b"")
    with pytest.raises(ProtocolError) as caught:
        next(frames)
    assert len(str(caught.value)) < 400


def test_the_limits_themselves_are_allowed() -> None:
    """A header line and a payload of exactly the limit are frames."""
    frame = encode_frame({"type": "x", "pad": ""}, b"y" * 100)
    pad = "p" * (MAX_HEADER_BYTES - frame.index(b"\n"))
    ((header, payload),) = FrameReader(max_payload_bytes=100).feed(encode_frame({"type": "x", "pad": pad}, b"y" * 100))
    assert (header["pad"], payload) == (pad, b"y" * 100)


def test_a_hello_is_read() -> None:
    """What a node tells of itself."""
    assert parse_hello(HELLO) == Hello(python="3.11.2", hostname="h", kernel="6.1", pid=7)


def test_an_old_python_is_named() -> None:
    """The version that is there, and the one that is needed."""
    with pytest.raises(PythonTooOldError, match=r"its Python is 3\.6\.8, and 3\.8 or newer is needed"):
        parse_hello({"type": "too_old", "python": "3.6.8"})


@pytest.mark.parametrize(
    "change",
    [{"type": "error"}, {"version": VERSION + 1}, {"version": None}, {"pid": "7"}, {"pid": None}, {"hostname": ["h"]}],
)
def test_a_hello_that_makes_no_sense_is_refused(change: Header) -> None:
    """Another frame, another version, a value of another type."""
    with pytest.raises(HandshakeError):
        parse_hello(HELLO | change)


PARTS = [["stdout", 3], ["stderr", 0], ["error_file", 2]]


@pytest.mark.parametrize(
    ("header", "payload", "event"),
    [
        ({"type": "pong"}, b"", None),
        ({"type": "started", "pid": 5}, b"", CommandStarted(NODE_RANK, 5)),
        ({"type": "rank", "local_rank": 1, "pid": 6}, b"", RankStarted(NODE_RANK, 7, 6)),
        ({"type": "output", "local_rank": 0, "stream": "stdout"}, b"\xff", Output(NODE_RANK, 6, "stdout", b"\xff")),
        ({"type": "output", "local_rank": None, "stream": "stderr"}, b"", Output(NODE_RANK, None, "stderr", b"")),
        (
            {"type": "rank_exit", "local_rank": 0, "status": 17 << 8, "parts": PARTS},
            b"outer",
            RankExited(NODE_RANK, 6, ExitStatus(code=17), Tail(b"out", b"", b"er")),
        ),
        ({"type": "exit", "status": 0, "parts": []}, b"", CommandExited(NODE_RANK, ExitStatus(code=0))),
        ({"type": "exit", "status": 0x8B, "parts": []}, b"", CommandExited(NODE_RANK, ExitStatus(signal=11))),
        ({"type": "exit", "status": None, "parts": []}, b"", CommandExited(NODE_RANK, ExitStatus())),
        ({"type": "swept", "killed": 2, "survivors": []}, b"", NodeSwept(NODE_RANK, 2)),
        (
            {"type": "swept", "killed": 2, "survivors": [{"pid": 9, "state": "D", "command": "c"}]},
            b"",
            NodeSwept(NODE_RANK, 2, (Survivor(9, "D", "c"),)),
        ),
        ({"type": "ended", "kept": "/tmp/x", "outputs": True}, b"", NodeEnded(NODE_RANK, "/tmp/x", outputs=True)),
        ({"type": "error", "message": "why"}, b"", NodeLost(NODE_RANK, "why")),
    ],
)
def test_frames_become_events(header: Header, payload: bytes, event: Event | None) -> None:
    """Local ranks become global ones, wait statuses become codes and signals."""
    assert parse_event(header, payload, NODE_RANK, RANKS) == event


@pytest.mark.parametrize(
    "header",
    [
        {"type": "hello"},
        {"type": "drained"},
        {"type": "started"},
        {"type": "started", "pid": "5"},
        {"type": "started", "pid": -1},
        {"type": "started", "pid": True},
        {"type": "rank", "local_rank": 2, "pid": 6},
        {"type": "rank", "local_rank": -1, "pid": 6},
        {"type": "rank", "local_rank": None, "pid": 6},
        {"type": "rank", "local_rank": 0.0, "pid": 6},
        {"type": "output", "local_rank": 7, "stream": "stdout"},
        {"type": "output", "local_rank": [], "stream": "stdout"},
        {"type": "output", "local_rank": 0, "stream": "stdin"},
        {"type": "exit", "status": 1.0, "parts": []},
        {"type": "exit", "status": float("inf"), "parts": []},
        {"type": "exit", "status": 1 << 80, "parts": []},
        {"type": "exit", "status": 0},
        {"type": "exit", "status": 0, "parts": 3},
        {"type": "exit", "status": 0, "parts": [["stdout"]]},
        {"type": "exit", "status": 0, "parts": [["stdout", -1]]},
        {"type": "exit", "status": 0, "parts": [[1, 1]]},
        {"type": "swept", "killed": None, "survivors": []},
        {"type": "swept", "killed": 0, "survivors": None},
        {"type": "swept", "killed": 0, "survivors": [3]},
        {"type": "swept", "killed": 0, "survivors": [{"pid": 1}]},
        {"type": "swept", "killed": 0, "survivors": [{"pid": 1, "state": "DD", "command": ""}]},
        {"type": "exit", "status": 0, "parts": [["stdout", 1], ["stdout", 1]]},
        {"type": "exit", "status": 0, "parts": [["other", 1]]},
        {"type": "exit", "status": 0, "parts": [[["stdout"], 1]]},
        {"type": "ended", "kept": None},
        {"type": "error"},
    ],
)
def test_frames_that_make_no_sense_are_errors(header: Header) -> None:
    """No field is believed before it is looked at, and the message stays short."""
    with pytest.raises(ProtocolError) as caught:
        parse_event(json.loads(json.dumps(header)), b"payload", NODE_RANK, RANKS)
    assert len(str(caught.value)) < 500


def test_a_whole_story_is_taken() -> None:
    """Each thing in its order, output and the news of ranks after the command's own end among them."""
    story = Story()
    for event in (
        Output(NODE_RANK, None, "stdout", b"early"),
        CommandStarted(NODE_RANK, 1),
        RankStarted(NODE_RANK, 6, 2),
        RankStarted(NODE_RANK, 7, 3),
        RankExited(NODE_RANK, 7, ExitStatus(code=0)),
        CommandExited(NODE_RANK, ExitStatus(code=0)),
        NodeSwept(NODE_RANK, 0),
        RankExited(NODE_RANK, 6, ExitStatus()),
        Output(NODE_RANK, 6, "stdout", b"late"),
    ):
        story.take(event)
    story.drained()
    story.take(NodeEnded(NODE_RANK))


@pytest.mark.parametrize(
    ("events", "reason"),
    [
        ([RankStarted(NODE_RANK, 6, 1)], "frame 'rank' came before 'started'"),
        ([CommandExited(NODE_RANK, ExitStatus())], "frame 'exit' came before 'started'"),
        ([NodeSwept(NODE_RANK, 0)], "frame 'swept' came before 'started'"),
        ([CommandStarted(NODE_RANK, 1)] * 2, "frame 'started' came twice"),
        (
            [CommandStarted(NODE_RANK, 1), RankExited(NODE_RANK, 6, ExitStatus())],
            "frame 'rank_exit' came before 'rank'",
        ),
        ([CommandStarted(NODE_RANK, 1), *[RankStarted(NODE_RANK, 6, 1)] * 2], "frame 'rank' came twice"),
        ([CommandStarted(NODE_RANK, 1), *[NodeSwept(NODE_RANK, 0)] * 2], "frame 'swept' came twice"),
        ([CommandStarted(NODE_RANK, 1), NodeEnded(NODE_RANK)], "frame 'ended' came before 'swept'"),
    ],
)
def test_a_story_that_cannot_be(events: list[Event], reason: str) -> None:
    """What comes twice, or before that which it follows from."""
    story = Story()
    *before, last = events
    for event in before:
        story.take(event)
    with pytest.raises(ProtocolError, match=reason):
        story.take(last)


def test_texts_of_a_node_are_made_safe() -> None:
    """No escape, no line end and no length is taken over; what should be a name must be as short as one."""
    lost = parse_event({"type": "error", "message": "\x1b[2J\n" * 1000}, b"", NODE_RANK, RANKS)
    assert lost == NodeLost(NODE_RANK, ("\ufffd[2J\ufffd" * 200) + "...")
    with pytest.raises(HandshakeError, match="makes no sense"):
        parse_hello(HELLO | {"hostname": "h" * 256})
    survivors = [{"pid": 9, "state": "D", "command": "c"}] * 100
    swept = parse_event({"type": "swept", "killed": 0, "survivors": survivors}, b"", NODE_RANK, RANKS)
    assert isinstance(swept, NodeSwept)
    assert len(swept.survivors) == 32
