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

Header = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Hello:
    """What a node tells of itself when it answers."""

    python: str
    hostname: str
    kernel: str
    pid: int


def parse_hello(header: Header) -> Hello:
    """Read the first frame of a node. Raises PythonTooOldError, or HandshakeError for anything but a hello."""
    if header["type"] == "too_old":
        wanted = ".".join(map(str, frames.MIN_PYTHON))
        raise PythonTooOldError(
            f"its Python is {header.get('python')}, and {wanted} or newer is needed",
            hint="set `python` for the node in the hosts map to a newer interpreter",
        )
    if header["type"] != "hello" or header.get("version") != frames.VERSION:
        raise HandshakeError(f"the supervisor answered {header!r:.200}, not hello in version {frames.VERSION}")
    try:
        return Hello(
            _text(header["python"]), _text(header["hostname"]), _text(header["kernel"]), _number(header["pid"])
        )
    except (KeyError, ValueError) as error:
        raise HandshakeError(f"the supervisor's hello makes no sense: {error!r:.200}") from None


def parse_event(header: Header, payload: bytes, node_rank: int, ranks: tuple[int, ...]) -> Event | None:
    """Return the event that a frame of a running job stands for, None for a pong. Raises ProtocolError.

    On the wire a node knows its ranks by local rank; `ranks` are the global ones. A local rank that the node does not
    have is as wrong as a frame that is none.
    """
    try:
        return None if header["type"] == "pong" else _event(header, payload, node_rank, ranks)
    except (LookupError, TypeError, ValueError) as error:
        raise frames.ProtocolError(f"a {header['type']!r:.80} frame makes no sense: {error!r:.200}") from error


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
            return NodeEnded(node_rank, _text(header["kept"]))
        case "error":
            return NodeLost(node_rank, _text(header["message"]))
        case kind:
            raise frames.ProtocolError(f"frame {kind!r:.80} has no place here")


def _number(value: object) -> int:
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise ValueError(f"{value!r:.80} is no number")
    return value


def _text(value: object) -> str:
    if type(value) is not str:
        raise ValueError(f"{value!r:.80} is no text")
    return value


def _rank(header: Header, ranks: tuple[int, ...]) -> int:
    return ranks[_number(header["local_rank"])]


def _stream(header: Header) -> StreamName:
    name = header["stream"]
    if name == "stdout":
        return "stdout"
    if name == "stderr":
        return "stderr"
    raise ValueError(f"stream {name!r:.40}")


def _status(header: Header) -> ExitStatus:
    """Read a wait status as Linux has it: the signal in the low seven bits, else the exit code above the eighth."""
    if header["status"] is None:
        return ExitStatus()
    status = _number(header["status"])
    return ExitStatus(signal=status & 0x7F) if status & 0x7F else ExitStatus(code=status >> 8 & 0xFF)


def _tail(header: Header, payload: bytes) -> Tail:
    parts: dict[str, bytes] = {}
    for name, size in header["parts"]:
        parts[_text(name)], payload = payload[: _number(size)], payload[size:]
    return Tail(parts.get("stdout", b""), parts.get("stderr", b""), parts.get("error_file", b""))


def _survivors(header: Header) -> tuple[Survivor, ...]:
    return tuple(
        Survivor(_number(one["pid"]), _text(one["state"]), _text(one["command"])) for one in header["survivors"]
    )
