"""From a supervisor's frames to events. Nothing that a node sends is trusted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gpulayer import frames
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
    StreamName,
    Survivor,
    Tail,
)
from gpulayer.untrusted import one_line, printable, shown

Header = dict[str, Any]

LONGEST_NAME = 255
MOST_SURVIVORS = 32
PARTS = frozenset({"stdout", "stderr", "error_file"})


@dataclass(frozen=True, slots=True)
class Hello:
    """What a node tells of itself when it answers."""

    python: str
    hostname: str
    kernel: str
    pid: int


def parse_hello(header: Header) -> Hello:
    """Read the first frame of a node. Raises PythonTooOldError, or HandshakeError for anything but a hello."""
    kind = header["type"]
    if kind not in ("hello", "too_old") or (kind == "hello" and header.get("version") != frames.VERSION):
        raise HandshakeError(f"the supervisor answered {shown(header, 200)}, not hello in version {frames.VERSION}")
    try:
        python = _name(header["python"])
        if kind == "hello":
            return Hello(python, _name(header["hostname"]), _name(header["kernel"]), _number(header["pid"]))
    except (KeyError, ValueError) as error:
        raise HandshakeError(f"the supervisor's hello makes no sense: {shown(error, 200)}") from None
    wanted = ".".join(map(str, frames.MIN_PYTHON))
    raise PythonTooOldError(
        f"its Python is {python}, and {wanted} or newer is needed",
        hint="set `python` for the node in the hosts map to a newer interpreter",
    )


def parse_prepared(header: Header) -> str:
    """Return the interface that a node has chosen, "" where it needs none. Raises HandshakeError."""
    try:
        return _name(header.get("interface", ""))
    except ValueError as error:
        raise unexpected(header) from error


def parse_refused(header: Header) -> tuple[str, str]:
    """Return why a node cannot take part: a code, and in words. Raises HandshakeError."""
    try:
        return _name(header["code"]), _text(header["message"])
    except (KeyError, ValueError) as error:
        raise unexpected(header) from error


def unexpected(header: Header) -> HandshakeError:
    """Return the error for a frame that is no answer to what was asked."""
    return HandshakeError(f"the supervisor answered {shown(header, 200)}")


def parse_event(header: Header, payload: bytes, node_rank: int, ranks: tuple[int, ...]) -> Event | None:
    """Return the event that a frame of a running job stands for, None for a pong. Raises ProtocolError.

    On the wire a node knows its ranks by local rank; `ranks` are the global ones. A local rank that the node does not
    have is as wrong as a frame that is none.
    """
    try:
        return None if header["type"] == "pong" else _event(header, payload, node_rank, ranks)
    except (LookupError, TypeError, ValueError) as error:
        raise frames.ProtocolError(f"a {shown(header['type'])} frame makes no sense: {shown(error, 200)}") from error


def _event(header: Header, payload: bytes, node_rank: int, ranks: tuple[int, ...]) -> Event:
    match header["type"]:
        case "output":
            rank = None if header["local_rank"] is None else _rank(header, ranks)
            return Output(node_rank, rank, _stream(header), payload)
        case "started":
            return CommandStarted(node_rank, _number(header["pid"]))
        case "rank":
            return RankStarted(node_rank, _rank(header, ranks), _number(header["pid"]))
        case "rank_exit":
            return RankExited(node_rank, _rank(header, ranks), _status(header), _tail(header, payload))
        case "exit":
            return CommandExited(node_rank, _status(header), _tail(header, payload))
        case "swept":
            return NodeSwept(node_rank, _number(header["killed"]), _survivors(header))
        case "ended":
            return NodeEnded(node_rank, _text(header["kept"]), header["outputs"] is True)
        case "error":
            return NodeLost(node_rank, _text(header["message"]))
        case kind:
            raise frames.ProtocolError(f"frame {shown(kind)} has no place here")


def _number(value: object) -> int:
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise ValueError(f"{shown(value)} is no number")
    return value


def _text(value: object) -> str:
    if type(value) is not str:
        raise ValueError(f"{shown(value)} is no text")
    return one_line(value)


def _name(value: object) -> str:
    """Read what is short on every machine: the name of a host, of an interface."""
    if type(value) is not str or len(value) > LONGEST_NAME:
        raise ValueError(f"{shown(value)} is no name")
    return printable(value)


def _letter(value: object) -> str:
    if type(value) is not str or len(value) != 1:
        raise ValueError(f"{shown(value)} is no letter")
    return printable(value)


def _rank(header: Header, ranks: tuple[int, ...]) -> int:
    return ranks[_number(header["local_rank"])]


def _stream(header: Header) -> StreamName:
    name = header["stream"]
    if name == "stdout":
        return "stdout"
    if name == "stderr":
        return "stderr"
    raise ValueError(f"stream {shown(name)}")


def _status(header: Header) -> ExitStatus:
    """Read a wait status as Linux has it: the signal in the low seven bits, else the exit code above the eighth."""
    if header["status"] is None:
        return ExitStatus()
    status = _number(header["status"])
    return ExitStatus(signal=status & 0x7F) if status & 0x7F else ExitStatus(code=status >> 8 & 0xFF)


def _tail(header: Header, payload: bytes) -> Tail:
    parts: dict[str, bytes] = {}
    for name, size in header["parts"]:
        if name not in PARTS - parts.keys():
            raise ValueError(f"part {shown(name)}")
        parts[name], payload = payload[: _number(size)], payload[size:]
    return Tail(parts.get("stdout", b""), parts.get("stderr", b""), parts.get("error_file", b""))


def _survivors(header: Header) -> tuple[Survivor, ...]:
    return tuple(
        Survivor(_number(one["pid"]), _letter(one["state"]), _text(one["command"]))
        for one in header["survivors"][:MOST_SURVIVORS]
    )


class Story:
    """What a node has told of its part of a job so far: each thing comes once, and after what it follows from.

    So it can be told that something ended only once that has begun, and endless news are found out at the second one.
    """

    def __init__(self) -> None:
        self._told: set[tuple[str, int | None]] = set()

    def take(self, event: Event) -> None:
        """Take note of an event. Raises ProtocolError where it cannot be next."""
        match event:
            case CommandStarted():
                self._once("started")
            case RankStarted():
                self._once("rank", event.rank, after=("started", None))
            case RankExited():
                self._once("rank_exit", event.rank, after=("rank", event.rank))
            case CommandExited():
                self._once("exit", after=("started", None))
            case NodeSwept():
                self._once("swept", after=("started", None))
            case NodeEnded():
                self._once("ended", after=("swept", None))

    def drained(self) -> None:
        """Take note that all output was sent. Raises ProtocolError where it cannot be next."""
        self._once("drained", after=("swept", None))

    def _once(self, kind: str, rank: int | None = None, *, after: tuple[str, int | None] | None = None) -> None:
        if after and after not in self._told:
            raise frames.ProtocolError(f"frame {kind!r} came before {after[0]!r}")
        if (kind, rank) in self._told:
            raise frames.ProtocolError(f"frame {kind!r} came twice")
        self._told.add((kind, rank))
