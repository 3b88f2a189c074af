"""What happens in a run as lines of JSON on stdout, for scripts: `gpulayer run --json`.

docs/reference/events.md describes the lines. They are those of events.jsonl, with the ranks' output between them. A
reader that is too slow misses output, which is counted, and never an event.
"""

from __future__ import annotations

import base64
import json
from typing import TYPE_CHECKING, Self

from gpulayer.errors import GpulayerError, RefusedError
from gpulayer.events import Output
from gpulayer.lines import unfinished_bytes
from gpulayer.logs import event_json
from gpulayer.screen import QUEUE_BYTES, Screen
from gpulayer.signals import Interrupted

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from types import TracebackType

    from gpulayer.events import Event, StreamName
    from gpulayer.screen import Terminal

    _Key = tuple[int, int | None, StreamName]

PIECE_BYTES = 1 << 16
HOLD_S = 0.5
ERROR_FLUSH_S = 2.0


class _Held:
    """The bytes of one stream that have not ended in a newline yet, and since when the first of them waits."""

    __slots__ = ("data", "since_s")

    def __init__(self) -> None:
        self.data = bytearray()
        self.since_s = 0.0


class JsonScreen:
    """Stands where a Console does. No call waits for whoever reads stdout but `close`."""

    def __init__(self, terminal: Terminal, queue_bytes: int = QUEUE_BYTES) -> None:
        self._at_s = 0.0
        self._held: dict[_Key, _Held] = {}
        self._screen = Screen(terminal, self._left_out, queue_bytes, slow_stream="stdout")

    def line(self, line: Mapping[str, object]) -> None:
        """Write a line that is no event of a node: the first one, the receipt."""
        self._flush_all()
        self._screen.message(_encode(line), "stdout")

    def handle(self, event: Event, at_s: float) -> None:
        """Write one event."""
        self._at_s = at_s
        if isinstance(event, Output):
            self._output(event, at_s)
        else:
            self._screen.message(_encode(event_json(event, at_s)), "stdout")

    def first_failure(self, node_rank: int, rank: int | None) -> None:
        """Nothing: no output is hidden here."""

    def tick(self, at_s: float) -> None:
        """Write what waits for its line to end."""
        self._at_s = at_s
        for key, held in self._held.items():
            if held.data and at_s - held.since_s >= HOLD_S:
                whole = len(held.data) - unfinished_bytes(held.data)
                self._take(key, held, whole or len(held.data), at_s)

    def close(self, timeout_s: float, hurried: Callable[[], bool] = lambda: False) -> bool:
        """Write the rest; returns whether all was written. Gives up as Console.close does."""
        self._flush_all()
        return self._screen.close(timeout_s, hurried)

    def _output(self, event: Output, at_s: float) -> None:
        key = (event.node_rank, event.rank, event.stream)
        held = self._held.get(key)
        if held is None:
            held = self._held[key] = _Held()
        if not held.data:
            held.since_s = at_s
        held.data += event.data
        self._take(key, held, held.data.rfind(b"\n") + 1, at_s)
        while len(held.data) >= PIECE_BYTES:
            self._take(key, held, PIECE_BYTES - unfinished_bytes(held.data[:PIECE_BYTES]), at_s)

    def _flush_all(self) -> None:
        for key, held in self._held.items():
            self._take(key, held, len(held.data), self._at_s)

    def _take(self, key: _Key, held: _Held, count: int, at_s: float) -> None:
        """Write the first bytes that are held, in pieces that end between characters."""
        data = bytes(held.data[:count])
        del held.data[:count]
        held.since_s = at_s
        node_rank, rank, stream = key
        head = {"t": round(at_s, 3), "event": "output", "node_rank": node_rank, "rank": rank, "stream": stream}
        while data:
            piece = data[:PIECE_BYTES]
            if len(data) > PIECE_BYTES:
                piece = piece[: len(piece) - unfinished_bytes(piece)]
            self._screen.output("stdout", _encode({**head, **_content(piece)}))
            data = data[len(piece) :]

    def _left_out(self, count: int) -> bytes:
        return _encode({"t": round(self._at_s, 3), "event": "output_left_out", "count": count})


class ErrorLine:
    """Tells an error that ends gpulayer, as a line of JSON too. One that nodes gave is in the receipt already."""

    def __init__(self, terminal: Terminal) -> None:
        self._terminal = terminal

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Write the line, and let the error go on."""
        line: dict[str, object] = {"event": "error"}
        if isinstance(error, Interrupted):
            line |= {"exit_code": error.exit_code, "text": "interrupted", "hint": None}
        elif isinstance(error, GpulayerError) and not isinstance(error, RefusedError):
            line |= {"exit_code": error.exit_code, "text": str(error), "hint": error.hint}
        else:
            return
        screen = JsonScreen(self._terminal)
        screen.line(line)
        screen.close(ERROR_FLUSH_S)


def _content(data: bytes) -> dict[str, str]:
    try:
        return {"text": data.decode()}
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(data).decode()}


def _encode(line: Mapping[str, object]) -> bytes:
    return json.dumps(line).encode() + b"\n"
