"""What launcher and supervisor say to each other: a JSON line, then as many bytes as its `size` says; for both ends."""

from __future__ import annotations

import json

VERSION = 1
MIN_PYTHON = (3, 8)
HELLO = b"\0gpulayer:"
MAX_HEADER_BYTES = 1 << 16
MAX_PAYLOAD_BYTES = 1 << 25  # a job's argv and environment may be megabytes
MAX_EVENT_BYTES = 1 << 18  # what a node sends comes in small pieces


TYPE_CHECKING = False  # mypy takes it for true; importing typing would cost 5 ms
if TYPE_CHECKING:
    from typing import Any, Iterator

    Header = dict[str, Any]


class ProtocolError(Exception):
    """The other end sent something that is no frame, or a frame that has no place here."""


def encode_frame(header: Header, payload: bytes = b"") -> bytes:
    """Return one frame: the header as a JSON line (with `size` when there is a payload), then the payload."""
    if payload:
        header = dict(header, size=len(payload))
    return json.dumps(header, separators=(",", ":")).encode() + b"\n" + payload


class FrameReader:
    """Cuts a byte stream into frames; what it holds of it is bounded."""

    def __init__(self, max_payload_bytes: int = MAX_PAYLOAD_BYTES) -> None:
        self._max_payload_bytes = max_payload_bytes
        self._buffer = bytearray()
        self._header: Header | None = None

    def feed(self, data: bytes) -> Iterator[tuple[Header, bytes]]:
        """Yield the frames that `data` completes, as (header, payload). Raises ProtocolError after the good ones."""
        self._buffer += data
        while True:
            if self._header is None:
                end = self._buffer.find(b"\n", 0, MAX_HEADER_BYTES + 1)
                if end < 0 and len(self._buffer) > MAX_HEADER_BYTES:
                    raise ProtocolError(f"a header line is longer than {MAX_HEADER_BYTES} bytes")
                if end < 0:
                    return
                self._header = self._parse(bytes(self._buffer[:end]))
                del self._buffer[: end + 1]
            size = self._header.get("size", 0)
            if len(self._buffer) < size:
                return
            header, payload = self._header, bytes(self._buffer[:size])
            del self._buffer[:size]
            self._header = None
            yield header, payload

    def _parse(self, line: bytes) -> Header:
        try:
            header = json.loads(line)
        except (ValueError, RecursionError):
            header = None
        size = header.get("size", 0) if isinstance(header, dict) else None
        if type(size) is not int or not 0 <= size <= self._max_payload_bytes or type(header.get("type")) is not str:
            raise ProtocolError(f"not a frame: {line[:80]!r}")
        return header  # type: ignore[no-any-return]  # JSON is Any; the line above has looked
