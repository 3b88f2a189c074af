"""Whatever a node sends, in whatever pieces: an event, an answer or an error of ours, within bounds."""

from __future__ import annotations

import asyncio
import contextlib
import json
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gpulayer import frames, probe
from gpulayer.checks import judge
from gpulayer.errors import GpulayerError, HandshakeError
from gpulayer.events import Event, NodeEnded, NodeLost, Output
from gpulayer.facts import (
    FactsRequest,
    ReachTarget,
    parse_facts,
    parse_gpus,
    parse_reach,
    parse_rendezvous,
)
from gpulayer.findings import CheckOptions, Observations, render_findings
from gpulayer.frames import FrameReader, ProtocolError, encode_frame
from gpulayer.inventory import NodeLease, parse_holders, parse_survey
from gpulayer.leases import State, read_record
from gpulayer.logs import event_json
from gpulayer.node_lease import LEASE_FACTS, PREFIX, in_conflict, parse_leases
from gpulayer.remote import RemoteNode
from gpulayer.session import MOST_NOISE_BYTES, NOISE_BYTES
from gpulayer.wire import parse_event, parse_hello, parse_prepared, parse_refused
from tests.support import findings, plans
from tests.support.fuzz import CUTS, JSON, examples, nearly, pieces

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

RANKS = (6, 7)
PLAN = plans.plan(plans.script(), plans.nodes(2, 2))
HELLO = {"type": "hello", "version": frames.VERSION, "python": "3.11.2", "hostname": "h", "kernel": "6.1", "pid": 7}
SURVIVOR = {"pid": 9, "state": "D", "command": "python"}
FRAMES: list[dict[str, Any]] = [
    HELLO,
    {"type": "too_old", "python": "3.6"},
    {"type": "held"},
    {"type": "refused", "code": "held", "message": "no"},
    {"type": "prepared", "interface": "eth0"},
    {"type": "reserved"},
    {"type": "released"},
    {"type": "surveyed"},
    {"type": "pong"},
    {"type": "started", "pid": 5},
    {"type": "rank", "local_rank": 0, "pid": 6},
    {"type": "output", "local_rank": 1, "stream": "stdout"},
    {"type": "output", "local_rank": None, "stream": "stderr"},
    {"type": "rank_exit", "local_rank": 0, "status": 256, "parts": [["stdout", 3], ["stderr", 2]]},
    {"type": "exit", "status": 0, "parts": []},
    {"type": "swept", "killed": 0, "survivors": [SURVIVOR]},
    {"type": "drained"},
    {"type": "reaped"},
    {"type": "ended", "kept": "", "outputs": False},
    {"type": "error", "message": "bad"},
    {"type": "helper_output"},
    {"type": "helper_end"},
]
HEADERS = st.one_of([nearly(frame) for frame in FRAMES])
WHOLE = st.builds(encode_frame, HEADERS.filter(lambda made: isinstance(made, dict)), st.binary(max_size=30))
STREAM = st.lists(st.one_of(WHOLE, WHOLE, WHOLE, st.binary(max_size=40)), max_size=8).map(b"".join)


def typed(header: object) -> dict[str, Any] | None:
    """Return a header as FrameReader lets it pass, None where it does not."""
    with contextlib.suppress(ProtocolError, UnicodeError):
        for found, _ in FrameReader().feed(json.dumps(header).encode() + b"\n"):
            return found
    return None


# --- frames ---------------------------------------------------------------------------------------------------------


@examples(150)
@given(STREAM, CUTS)
def test_a_stream_of_anything_is_frames_or_an_error(stream: bytes, at: list[int]) -> None:
    """The same frames come, then the same error, however the stream is cut; what is held has a bound."""

    def read(cut: list[bytes]) -> tuple[list[object], bool]:
        reader = FrameReader(frames.MAX_EVENT_BYTES)
        found: list[object] = []
        with contextlib.suppress(ProtocolError):
            for piece in cut:
                found.extend(map(repr, reader.feed(piece)))
                assert len(reader._buffer) <= len(stream)
            return found, True
        return found, False

    assert read([stream]) == read(pieces(stream, at))


@examples(20)
@given(st.binary(min_size=1, max_size=100).filter(lambda piece: b"\n" not in piece))
def test_a_line_without_an_end_is_not_kept_for_ever(piece: bytes) -> None:
    """At most a header's worth of it, and one piece more."""
    reader = FrameReader()
    with contextlib.suppress(ProtocolError):
        for _ in range(2 * frames.MAX_HEADER_BYTES // len(piece)):
            assert list(reader.feed(piece)) == []
        raise AssertionError("it was taken for ever")
    assert len(reader._buffer) <= frames.MAX_HEADER_BYTES + len(piece)


@examples(300)
@given(HEADERS, st.binary(max_size=40))
def test_a_header_is_an_event_or_an_error_of_ours(header: object, payload: bytes) -> None:
    """Each reader of headers gives something to show and to keep, or ProtocolError or HandshakeError."""
    found = typed(header)
    if found is None:
        return
    with contextlib.suppress(ProtocolError):
        event = parse_event(found, payload, 1, RANKS)
        if event is not None and not isinstance(event, Output):
            json.dumps(event_json(event, 0.0))
            assert all(text.isprintable() for text in texts(event)), event
    for parse in (parse_hello, parse_prepared, parse_refused):
        with contextlib.suppress(GpulayerError):
            said = parse(found)
            words = texts(said) if not isinstance(said, str | tuple) else [*([said] if isinstance(said, str) else said)]
            assert all(text.isprintable() for text in words), said


def texts(value: object) -> list[str]:
    """Return every text in an event or another frozen type that a screen may show."""
    found: list[str] = []
    pending: list[object] = [asdict(value)]  # type: ignore[call-overload]
    while pending:
        one = pending.pop()
        if isinstance(one, str):
            found.append(one)
        elif isinstance(one, dict):
            pending += one.values()
        elif isinstance(one, list | tuple):
            pending += one
    return found


# --- a whole node ---------------------------------------------------------------------------------------------------


class Wire:
    """A channel that nobody reads."""

    def __init__(self) -> None:
        self.closed = False

    def write(self, data: bytes) -> None:
        """Forget it."""

    async def drain(self) -> None:
        """Wait for nobody."""

    def close(self) -> None:
        """Note it."""
        self.closed = True


async def ask_facts(node: RemoteNode) -> object:
    """Start the probe and ask it."""
    node.start_probe()
    return parse_facts(await node.ask_probe(b"{}\n"))


STEPS: dict[str, Callable[[RemoteNode], Coroutine[Any, Any, object]]] = {
    "greet": lambda node: node.greet(Wire()),
    "hold": lambda node: node.hold(NodeLease("j", "u", "l", 1.0, "", None), 30.0),
    "prepare": RemoteNode.prepare,
    "reserve": lambda node: node.reserve(29500),
    "survey": RemoteNode.survey,
    "bundle": lambda node: node.stream("bundle_data", [b"x"], "bundle_end", "bundle_kept", "refused"),
    "sweep": lambda node: node.sweep("m", 1.0),
    "facts": ask_facts,
}


@dataclass(frozen=True)
class Said:
    """What a node says: a stream, where it is cut, and how its channel closes then, if it does."""

    stream: bytes
    at: list[int]
    closed: tuple[int | None, str | None] | None = None

    def to(self, node: RemoteNode) -> None:
        """Say it."""
        for piece in pieces(self.stream, self.at):
            node.data_received(piece)
            node.stderr_received(piece[:9])
        if self.closed:
            node.channel_closed(self.closed[0], None, self.closed[1])


CLOSED = st.sampled_from([None, None, None, (None, None), (0, None), (127, None), (None, "cut\x1b[2J")])
SAID = st.builds(Said, STREAM, CUTS, CLOSED)


@examples(150)
@given(
    st.lists(st.tuples(st.sampled_from(sorted(STEPS)), SAID), max_size=3),
    st.lists(SAID, max_size=3),
    st.builds(Said, st.binary(max_size=30), CUTS),
)
def test_a_node_that_says_anything_at_any_time_is_judged_in_our_words(
    early: list[tuple[str, Said]], late: list[Said], noise: Said
) -> None:
    """Before the start each question gets an answer or a NodeError; after it come events, and one end at most, last."""
    asyncio.run(converse(early, late, noise))


async def converse(early: list[tuple[str, Said]], late: list[Said], noise: Said) -> None:
    """Greet a node, ask it these things, start it, and hear what else it says."""
    events: list[Event] = []
    node = RemoteNode(PLAN, 1, events.append)
    node._nonce = "n" * 32
    greeting = frames.HELLO + node._nonce.encode() + b"\n"
    Said(noise.stream + greeting, noise.at).to(node)
    for step, said in [("greet", Said(encode_frame(HELLO), [])), *early]:
        asked = asyncio.ensure_future(STEPS[step](node))
        await asyncio.sleep(0)
        said.to(node)
        for _ in range(3):
            await asyncio.sleep(0)
        asked.cancel()
        (result,) = await asyncio.gather(asked, return_exceptions=True)
        assert not isinstance(result, Exception) or isinstance(result, GpulayerError), repr(result)
    node.start()
    for said in late:
        said.to(node)
    node.channel_closed(None, None, None)
    ends = [place for place, event in enumerate(events) if isinstance(event, NodeEnded | NodeLost)]
    assert ends == [len(events) - 1]
    assert all(text.isprintable() for event in events for text in texts(event)), events
    assert len(node._noise) + len(node._stderr) <= 2 * NOISE_BYTES + len(noise.stream) + len(greeting)


def test_an_answer_to_a_question_that_was_given_up_is_no_answer_to_the_next() -> None:
    """Found by the test above: a node that answers after the time limit ended in an error that was not ours."""

    async def ask_in_vain() -> None:
        node = RemoteNode(PLAN, 1, lambda _: None)
        node._nonce = "n" * 32
        node.data_received(frames.HELLO + node._nonce.encode() + b"\n")
        asked = asyncio.ensure_future(node.greet(Wire()))
        await asyncio.sleep(0)
        node.data_received(encode_frame(HELLO))
        await asked
        late = asyncio.ensure_future(node.reserve(29500))
        await asyncio.sleep(0)
        late.cancel()
        await asyncio.gather(late, return_exceptions=True)
        node.data_received(encode_frame({"type": "reserved"}))
        for _ in range(2):  # and it stays given up
            with pytest.raises(HandshakeError, match=r"the supervisor answered .*reserved"):
                await asyncio.wait_for(node.prepare(), 10)

    asyncio.run(ask_in_vain())


def test_noise_before_the_greeting_has_a_bound() -> None:
    """A login shell that prints for ever is given up, and hardly anything of what it prints is kept."""

    async def hear() -> RemoteNode:
        node = RemoteNode(PLAN, 0, lambda _: None)
        for _ in range(MOST_NOISE_BYTES // (1 << 20) + 2):
            node.data_received(b"x" * (1 << 20))
        return node

    node = asyncio.run(hear())
    assert isinstance(node._problem, HandshakeError)
    assert len(node._noise) <= NOISE_BYTES


# --- what is in the payloads ----------------------------------------------------------------------------------------

GOOD = findings.facts(PLAN.nodes[0], PLAN.master_addr)
RIGHT_FACTS = {
    "type": "facts",
    **{name: value for name, value in asdict(replace(GOOD, gpu=findings.gpus(0, 1))).items() if name != "errors"},
}
REQUEST = FactsRequest(0, "10.0.0.11", 29500, "/w", "s.py", None, "/tmp", "n")
TARGETS = [ReachTarget("rendezvous", "10.0.0.11", 29500, "n"), ReachTarget("1", "10.0.0.12", 40000, "m")]
REACH = {
    "type": "reach",
    "results": [{"name": one.name, "state": "ok", "rtt_ms": 0.1, "detail": ""} for one in TARGETS],
}
RENDEZVOUS = {"type": "rendezvous", "port": asdict(findings.port()), "free_ports": [29501]}
LEASE = {"job_id": "j", "user": "u", "login": "l", "since": 1.0, "scope": "", "gpus": [0]}
PROCESS = {"pid": 5, "state": "R", "command": "c", "age_s": 1.0, "rank": 0}
JOB = {
    **dict.fromkeys(("job_id", "marker", "user", "command"), "j"),
    "node_rank": 0,
    "supervisor": True,
    "keepers": [5],
    "processes": [PROCESS],
    "count": 1,
    "age_s": 1.0,
}
RECORD = {
    **dict.fromkeys(("job_id", "user", "login"), "j"),
    **dict.fromkeys(("version", "pid", "since", "ticket"), 1),
    "state": "held",
    "machines": {"10.0.0.11:22": None, "10.0.0.12:22": [0, 1]},
}


def line(value: object) -> bytes:
    """Return a value as a node would send it."""
    return json.dumps(value).encode("utf-8", "surrogatepass")


def lines(right: object) -> st.SearchStrategy[bytes]:
    """Return lines that are nearly as they should be, and some that are not at all."""
    return st.one_of(nearly(right).map(line), st.binary(max_size=40), JSON.map(line))


@examples(150)
@given(lines(json.loads(json.dumps(RIGHT_FACTS))))
@example(line(json.loads(json.dumps(RIGHT_FACTS))))
def test_facts_of_any_kind_are_judged_or_refused(data: bytes) -> None:
    """What a probe tells is a HandshakeError, or something that all checks can judge, and say in printable words."""
    with contextlib.suppress(HandshakeError):
        found = parse_facts(data)
        for options in (CheckOptions(), CheckOptions(backend="nccl", strict=True, allow_dirty=True)):
            text = render_findings(judge(PLAN, Observations(facts={0: found, 1: GOOD}), options))
            assert text.replace("\n", "").isprintable(), text
            judge(PLAN, Observations(facts={0: GOOD, 1: found}), options)


@examples(100)
@given(lines(REACH), lines(RENDEZVOUS), lines({"type": "gpus", "gpu": RIGHT_FACTS["gpu"]}))
def test_other_answers_of_the_probe_are_read_or_refused(reach: bytes, rendezvous: bytes, gpus: bytes) -> None:
    """HandshakeError, or one result for each target."""
    with contextlib.suppress(HandshakeError):
        assert [one.name for one in parse_reach(reach, TARGETS)] == ["rendezvous", "1"]
    with contextlib.suppress(HandshakeError):
        parse_rendezvous(rendezvous)
    with contextlib.suppress(HandshakeError):
        parse_gpus(gpus)


@examples(100)
@given(lines({"leases": [LEASE], "jobs": [JOB]}), lines([LEASE]), lines(RECORD))
def test_surveys_holders_and_records_are_read_or_refused(survey: bytes, holders: bytes, record: bytes) -> None:
    """HandshakeError, or something with words that can be shown; a record that is none is None."""
    with contextlib.suppress(HandshakeError):
        for lease in parse_survey(survey).leases:
            assert str(lease.hold).isprintable()
    with contextlib.suppress(HandshakeError):
        for lease in parse_holders(holders):
            assert str(lease.hold).isprintable()
    found = read_record(record, "me")
    if found is not None:
        assert found.user == "me"
        assert found.state in State
        assert str(found.hold).isprintable()


def test_a_line_of_the_probe_has_a_bound() -> None:
    """A line that is longer than any probe's is refused before it is read."""
    try:
        parse_facts(b" " * (probe.MAX_LINE_BYTES + 1) + line(RIGHT_FACTS))
    except HandshakeError:
        return
    raise AssertionError("it was read")


TABLE_PARTS = [
    "0000: 00000002 00000000 00010000 0002 01 77",
    " @",
    PREFIX,
    "t/0/1/",
    "t/1/2/",
    "\n",
    "{",
    json.dumps(LEASE),
    "/",
]


@examples(150)
@given(st.lists(st.one_of(st.sampled_from(TABLE_PARTS), st.text(max_size=8)), max_size=12).map("".join))
@example(f"{TABLE_PARTS[0]} @{PREFIX}t/0/1/{json.dumps(LEASE)}")
@example(f"{TABLE_PARTS[0]} @{PREFIX}t/0/{'9' * 5000}/x")
def test_names_of_sockets_that_anyone_can_bind_are_leases_or_nothing(table: str) -> None:
    """On a node, a supervisor passes over what makes no sense; what it takes has all that is asked of it."""
    for facts, inodes in parse_leases(table):
        assert set(facts) == set(LEASE_FACTS)
        assert all(type(inode) is int for inode in inodes)
        in_conflict(facts, LEASE)
