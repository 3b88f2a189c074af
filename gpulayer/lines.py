"""What a stream of bytes looks like on a screen: lines, tags, harmless control characters. Pure.

The files of a run hold every byte; this is only the view of them. Work is done on whole chunks, not line by line,
because millions of lines pass through here while the same thread reads from the nodes.
"""

from __future__ import annotations

import re

LINE_LIMIT_BYTES = 1 << 20
UPDATE_S = 0.5
PARTIAL_S = 0.5
PARTIAL_MAX_S = 5.0

_PRINTABLE = bytes([0x09, 0x0A, *range(0x20, 0x7F)])
# In this order: colours (kept); erase-in-line (every line is a fresh one here, so there is nothing to erase);
# any other control character, C1 included; marks that reverse the order in which a terminal draws text.
_UNSAFE = re.compile("\x1b\\[[0-9;:]*m|\x1b\\[[0-2]?K|[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
_COLOUR = re.compile("\x1b\\[[0-9;:]*m")
_RESET = "\x1b[0m"
_RESETS = frozenset({"\x1b[m", _RESET})


class LineSplitter:
    """Cuts one stream into blocks of whole lines, each line ended by one newline byte.

    `log_name` is where all of the stream can be read; it is named where a line is cut. `now` is in seconds on any clock
    that does not go back. A carriage return means that what follows overwrites the line, so of several updates the
    latest is shown, at most one every `UPDATE_S`, the first at once.
    """

    __slots__ = (
        "_left_out_bytes", "_limit", "_log_name", "_pending", "_piece", "_shown_open",
        "_since_s", "_ticked", "_touched_s", "_update", "_update_s",
    )  # fmt: skip

    def __init__(self, log_name: str, line_limit_bytes: int = LINE_LIMIT_BYTES) -> None:
        self._log_name = log_name
        self._limit = line_limit_bytes
        self._piece = max(1, line_limit_bytes // 4)  # so that only the first line of a piece can be over the limit
        self._pending = bytearray()  # a line that has not ended
        self._left_out_bytes = 0  # of that line, beyond the limit
        self._update: bytes | None = None  # ended by a carriage return and not shown yet
        self._update_s = float("-inf")  # when an update was shown last
        self._shown_open = False  # what came last is on the screen, but its own end of line has not come
        self._since_s = 0.0  # when the pending line began
        self._touched_s = 0.0  # when data came last
        self._ticked = False  # a tick has seen the pending line as it is now

    def feed(self, data: bytes, now: float) -> list[bytes]:
        """Take the next bytes of the stream; return the blocks to show now."""
        blocks: list[bytes] = []
        self._touched_s = now
        self._ticked = False
        if len(data) <= self._piece:
            self._feed(data, now, blocks)
        else:
            for start in range(0, len(data), self._piece):
                self._feed(data[start : start + self._piece], now, blocks)
        return blocks

    def tick(self, now: float) -> list[bytes]:
        """Return what has waited long enough: a held-back update, or a line that does not end."""
        if self._pending and self._partial_is_due(now):
            partial = self._take_partial()
            if partial:
                self._update = None
                self._update_s = now
                self._shown_open = not self._pending
                return [partial]
        if self._update is not None and now - self._update_s >= UPDATE_S:
            block = self._update + b"\n"
            self._update = None
            self._update_s = now
            self._shown_open = not self._pending
            return [block]
        return []

    def close(self) -> list[bytes]:
        """Return whatever has not been shown; the stream is over."""
        rest = bytes(self._pending) or self._update or b""
        if self._left_out_bytes:
            rest += self._marker()
        self._pending.clear()
        self._left_out_bytes = 0
        self._update = None
        self._shown_open = False
        return [rest + b"\n"] if rest else []

    def _feed(self, data: bytes, now: float, blocks: list[bytes]) -> None:
        if not self._pending and (self._shown_open or self._update is not None):
            data = self._after_open_end(data)
        if len(self._pending) + len(data) > self._limit:
            data = self._cap(data)
        if b"\r" in data:
            self._feed_returns(data, now, blocks)
            return
        end = data.rfind(b"\n") + 1
        if end:
            block = data[:end]
            if self._pending:
                block = bytes(self._pending) + block
                self._pending.clear()
            self._update = None
            blocks.append(block)
        self._hold(data[end:] if end else data, now)

    def _feed_returns(self, data: bytes, now: float, blocks: list[bytes]) -> None:
        while b"\r\r" in data:  # quadratic as a regular expression
            data = data.replace(b"\r\r", b"\r")
        text = bytes(self._pending) + data.replace(b"\r\n", b"\n")
        self._pending.clear()
        body, newline, rest = text.rpartition(b"\n")
        if newline:
            self._update = None
            if b"\r" in body:
                body = b"\n".join([line[line.rfind(b"\r") + 1 :] for line in body.split(b"\n")])
            blocks.append(body + newline)
        head, _, tail = rest.rpartition(b"\r")
        update = head[head.rfind(b"\r") + 1 :]
        if update and now - self._update_s >= UPDATE_S:
            blocks.append(update + b"\n")
            self._update = None
            self._update_s = now
            self._shown_open = not tail
        elif update:
            self._update = update
        self._hold(tail, now)

    def _hold(self, data: bytes, now: float) -> None:
        if data:
            if not self._pending:
                self._since_s = now
            self._pending += data

    def _after_open_end(self, data: bytes) -> bytes:
        """Look for the end of a line that is on the screen already, or of an update that was held back."""
        text = data.lstrip(b"\r") if data.startswith(b"\r") else data
        if not text:
            return b""
        shown, self._shown_open = self._shown_open, False
        if not text.startswith(b"\n"):
            return data
        if shown:
            return text[1:]
        if self._update is not None:
            self._pending += self._update
            self._update = None
        return text

    def _cap(self, data: bytes) -> bytes:
        """Keep the first bytes of a line that is too long, count the others; return the data from the line's end on."""
        ends = [end for end in (data.find(b"\n"), data.find(b"\r")) if end >= 0]
        stop = min(ends, default=len(data))
        room = max(0, self._limit - len(self._pending))
        if stop > room:
            self._pending += data[:room]
            self._left_out_bytes += stop - room
            data = data[stop:]
        if ends and self._left_out_bytes:
            self._pending += self._marker()
            self._left_out_bytes = 0
        return data

    def _marker(self) -> bytes:
        text = f" ... [{self._left_out_bytes} more bytes of this line are only in {self._log_name}]"
        return text.encode("utf-8", "surrogateescape")

    def _partial_is_due(self, now: float) -> bool:
        if self._left_out_bytes:
            return False
        if now - self._since_s >= PARTIAL_MAX_S:
            return True
        # Where this process itself was held up, the rest of the line may be waiting to be read: a second tick decides.
        seen, self._ticked = self._ticked, True
        return seen and now - self._touched_s >= PARTIAL_S

    def _take_partial(self) -> bytes:
        keep = unfinished_bytes(self._pending)
        cut = len(self._pending) - keep
        partial = bytes(self._pending[:cut])
        del self._pending[:cut]
        return partial + b"\n" if partial else b""


def unfinished_bytes(data: bytes | bytearray) -> int:
    """Return how many bytes at the end are the beginning of a UTF-8 character (0 to 3)."""
    for count in range(1, min(3, len(data)) + 1):
        byte = data[-count]
        if byte & 0xC0 == 0x80:
            continue
        size = 4 if 0xF0 <= byte <= 0xF4 else 3 if byte >= 0xE0 else 2 if byte >= 0xC2 else 1
        return count if byte <= 0xF4 and size > count else 0
    return 0


def make_tag(node: int | str, rank: int | None = None) -> str:
    """Return `[node]`, or `[node/rank]` where a node has several ranks; `node` is the node rank or the node id."""
    return f"[{node}]" if rank is None else f"[{node}/{rank}]"


def tag_block(block: bytes, tag: bytes) -> bytes:
    """Put `tag` in front of each line of a block that ends in a newline."""
    return tag + block[:-1].replace(b"\n", b"\n" + tag) + b"\n"


def sanitize(block: bytes) -> bytes:
    r"""Make a block safe to draw on a terminal.

    Colours and tabs stay, and a colour left on at the end of a line is reset there. Any other control sequence shows as
    text (`^[[2J`, `^G`, `\x9b`), so nothing can move the cursor, retitle the window or make the terminal answer.
    Bytes that are not UTF-8 show as U+FFFD.
    """
    if not block.translate(None, _PRINTABLE):
        return block
    text = _UNSAFE.sub(_harmless, block.decode("utf-8", "replace"))
    if "\x1b" in text:
        text = "\n".join([_close_colour(line) for line in text.split("\n")])
    return text.encode()


def _harmless(match: re.Match[str]) -> str:
    found = match.group()
    if len(found) > 1:
        return found if found.endswith("m") else ""
    code = ord(found)
    if code < 0x20:
        return "^" + chr(code + 0x40)
    if code == 0x7F:
        return "^?"
    return f"\\x{code:02x}" if code <= 0xFF else f"\\u{code:04x}"


def _close_colour(line: str) -> str:
    colours = _COLOUR.findall(line)
    return line + _RESET if colours and colours[-1] not in _RESETS else line
