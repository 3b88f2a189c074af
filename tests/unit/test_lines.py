"""Streams of bytes as lines on a screen."""

from __future__ import annotations

import itertools
import random
import time
from typing import TYPE_CHECKING

import pytest

from gpulayer.lines import LINE_LIMIT_BYTES, LineSplitter, make_tag, sanitize, tag_block

if TYPE_CHECKING:
    from collections.abc import Callable


def split(*chunks: bytes, now: float = 0.0) -> list[bytes]:
    """Feed chunks at one moment and end the stream; return the lines without their newlines."""
    splitter = LineSplitter("rank0.stdout.log")
    blocks = [block for chunk in chunks for block in splitter.feed(chunk, now)] + splitter.close()
    assert all(block.endswith(b"\n") for block in blocks)
    return b"".join(blocks)[:-1].split(b"\n") if blocks else []


def test_whole_lines_come_at_once() -> None:
    """A complete line is returned by the feed that completed it; the rest waits."""
    splitter = LineSplitter("log")
    assert splitter.feed(b"one\ntwo\nthr", 0.0) == [b"one\ntwo\n"]
    assert splitter.feed(b"ee\n", 0.0) == [b"three\n"]
    assert splitter.close() == []


def test_chunk_boundaries_do_not_show() -> None:
    """However the bytes are cut, what comes out is what went in."""
    chance = random.Random(7)
    data = b"".join(chance.randbytes(chance.randrange(80)).replace(b"\r", b"-") + b"\n" for _ in range(2000))
    for _ in range(20):
        cuts = sorted(chance.sample(range(len(data)), 60))
        chunks = [data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True)]
        assert split(*chunks) == data[:-1].split(b"\n")


@pytest.mark.parametrize("newline", [b"\r\n", b"\r\r\n"])
def test_carriage_return_before_newline_is_one_line_end(newline: bytes) -> None:
    """Lines that end in CR LF are shown once, wherever the chunks are cut."""
    data = newline.join([b"one", b"", b"three", b""])
    for cut in range(len(data) + 1):
        assert split(data[:cut], data[cut:]) == [b"one", b"", b"three"]
    assert split(*[data[i : i + 1] for i in range(len(data))]) == [b"one", b"", b"three"]


@pytest.mark.parametrize("form", ["before", "after"])
def test_progress_is_shown_at_a_limited_rate(form: str) -> None:
    """Ten updates a second for five seconds: the first within 0.2 s, then at most two a second, the end always."""
    splitter = LineSplitter("log")
    shown: list[tuple[float, bytes]] = []
    for step in range(50):
        now = step / 10
        text = b"%d%%" % (step * 2)
        data = b"\r" + text if form == "before" else text + b"\r"
        shown += [(now, block) for block in splitter.feed(data, now)]
        shown += [(now, block) for block in splitter.tick(now)]
    shown += [(5.0, block) for block in splitter.feed(b"\r100%\n" if form == "before" else b"100%\n", 5.0)]
    assert shown[0][0] <= 0.2
    assert shown[0][1] == b"0%\n"
    assert shown[-1] == (5.0, b"100%\n")
    gaps = [after[0] - before[0] for before, after in itertools.pairwise(shown[:-1])]
    assert min(gaps) > 0.49
    assert 9 <= len(shown) <= 12


def test_held_back_update_comes_when_its_time_has_come() -> None:
    """The latest of several quick updates is shown half a second after the one before it."""
    splitter = LineSplitter("log")
    assert splitter.feed(b"1%\r", 0.0) == [b"1%\n"]
    assert splitter.feed(b"2%\r3%\r", 0.1) == []
    assert splitter.tick(0.4) == []
    assert splitter.tick(0.5) == [b"3%\n"]
    assert splitter.tick(9.0) == []
    assert splitter.feed(b"\n", 9.0) == []
    assert splitter.close() == []


def test_update_overwritten_within_one_line_shows_what_a_terminal_would() -> None:
    """Of texts that overwrite each other before the line ends, the last one is the line."""
    assert split(b"a\rb\rc\nplain\n\rd\n") == [b"c", b"plain", b"d"]


def test_last_update_is_not_lost_at_the_end() -> None:
    """A stream that ends in a held-back update shows it."""
    assert split(b"1\r", b"2\r", b"3\r") == [b"1", b"3"]
    assert split(b"1\r", b"2\r", b"\nnext\n") == [b"1", b"2", b"next"]


def test_partial_line_is_flushed_after_quiet() -> None:
    """Text without a newline is shown after half a second, and its late newline makes no empty line."""
    splitter = LineSplitter("log")
    assert splitter.feed(b"Loading...", 0.0) == []
    assert splitter.tick(0.2) == []
    assert splitter.tick(0.4) == []
    assert splitter.tick(0.6) == [b"Loading...\n"]
    assert splitter.tick(5.0) == []
    assert splitter.feed(b"\ndone\n", 6.0) == [b"done\n"]


def test_partial_line_waits_for_a_second_tick() -> None:
    """Where the process itself was held up, one late tick does not break a line that is already on its way."""
    splitter = LineSplitter("log")
    splitter.feed(b"half of a ", 0.0)
    assert splitter.tick(3.0) == []
    assert splitter.feed(b"line\n", 3.0) == [b"half of a line\n"]


def test_line_that_never_ends_is_shown_while_it_grows() -> None:
    """Dots without a newline are shown every five seconds although they never pause."""
    splitter = LineSplitter("log")
    shown = []
    for step in range(120):
        splitter.feed(b".", step / 10)
        shown += splitter.tick(step / 10)
    assert b"".join(shown).replace(b"\n", b"") == b"." * sum(len(block) - 1 for block in shown)
    assert len(shown) == 2


def test_flush_does_not_cut_a_character() -> None:
    """The first byte of a character of two is kept for its second."""
    splitter = LineSplitter("log")
    splitter.feed("é".encode() + "é".encode()[:1], 0.0)
    assert [splitter.tick(0.4), splitter.tick(0.6)] == [[], ["é\n".encode()]]
    assert splitter.feed("é\n".encode()[1:], 1.0) == ["é\n".encode()]


@pytest.mark.parametrize("chunk_bytes", [1 << 15, 1 << 20, 1 << 23])
def test_long_line_is_cut_with_a_marker(chunk_bytes: int) -> None:
    """Of a line of 5 MB the first MiB is shown, then how much is missing and where it is; its neighbours are whole."""
    data = b"before\n" + b"x" * 5_000_000 + b"\nafter\n"
    lines = split(*[data[i : i + chunk_bytes] for i in range(0, len(data), chunk_bytes)])
    left_out = 5_000_000 - LINE_LIMIT_BYTES
    marker = f" ... [{left_out} more bytes of this line are only in rank0.stdout.log]".encode()
    assert lines == [b"before", b"x" * LINE_LIMIT_BYTES + marker, b"after"]


def test_long_line_at_the_limit_is_whole() -> None:
    """A line of exactly the limit is not cut; one byte more is."""
    splitter = LineSplitter("log", line_limit_bytes=8)
    assert b"".join(splitter.feed(b"12345678\n123456789\n", 0.0)).count(b"more bytes") == 1
    assert splitter.feed(b"123456789", 0.0) == []
    assert splitter.close() == [b"12345678 ... [1 more bytes of this line are only in log]\n"]


def test_run_of_carriage_returns_is_cheap() -> None:
    """A megabyte of carriage returns is no line, and takes no noticeable time (as a regular expression: minutes)."""
    begin = time.process_time()
    assert split(b"\r" * 1_000_000, b"x\n") == [b"x"]
    assert time.process_time() - begin < 1.0


def test_splitting_is_not_done_line_by_line() -> None:
    """Splitting and tagging costs less than half of what a bare loop over the lines costs."""
    data = (b"x" * 64 + b"\n") * 200_000

    def by_chunk() -> int:
        splitter = LineSplitter("log")
        blocks = [block for i in range(0, len(data), 1 << 15) for block in splitter.feed(data[i : i + (1 << 15)], 0.0)]
        return sum(len(tag_block(block, b"[0] ")) for block in blocks)

    def by_line() -> int:
        return sum(len(b"[0] " + line) for line in data.splitlines(keepends=True))

    assert by_chunk() == by_line()
    assert best_of_five(by_chunk) < best_of_five(by_line) / 2


def best_of_five(work: Callable[[], int]) -> float:
    """Return the least CPU time of five runs, in seconds."""
    times = []
    for _ in range(5):
        begin = time.process_time()
        work()
        times.append(time.process_time() - begin)
    return min(times)


def test_tags() -> None:
    """A tag stands in front of every line of a block, empty ones too."""
    assert (make_tag(3), make_tag(1, 9), make_tag("gpu-01"), make_tag("gpu-01", 9)) == (
        "[3]", "[1/9]", "[gpu-01]", "[gpu-01/9]",
    )  # fmt: skip
    assert tag_block(b"a\n\nb\n", b"[3] ") == b"[3] a\n[3] \n[3] b\n"
    assert tag_block(b"\n", b"[3] ") == b"[3] \n"


@pytest.mark.parametrize(
    ("raw", "shown"),
    [
        (b"plain\ttext\n", b"plain\ttext\n"),
        ("accents é 漢字 🙂\n".encode(), "accents é 漢字 🙂\n".encode()),
        (b"\x1b[31mred\x1b[0m\n", b"\x1b[31mred\x1b[0m\n"),
        (b"\x1b[1;38;5;9mopen\nnext\n", b"\x1b[1;38;5;9mopen\x1b[0m\nnext\n"),
        (b"\x1b[2J\x1b[1;1Hgone\n", b"^[[2J^[[1;1Hgone\n"),
        (b"\x1b[2K\x1b[Kline\n", b"line\n"),
        (b"\x1b]0;title\x07\n", b"^[]0;title^G\n"),
        (b"\x1bc\x1b(0\n", b"^[c^[(0\n"),
        (b"nul\x00 bell\x07 back\x08 del\x7f cr\r\n", b"nul^@ bell^G back^H del^? cr^M\n"),
        (b"\xc2\x9b2J\n", b"\\x9b2J\n"),
        (b"\x9b2J \xff\xfe \xc3\n", "\ufffd2J \ufffd\ufffd \ufffd\n".encode()),
        ("\u202eevil\u2066\n".encode(), b"\\u202eevil\\u2066\n"),
        (b"\x1b[31\n", b"^[[31\n"),
    ],
)
def test_sanitize(raw: bytes, shown: bytes) -> None:
    """Text and colours stay; what could move the cursor, retitle the window or sound the bell shows as text."""
    assert sanitize(raw) == shown


def test_sanitize_leaves_no_control_byte() -> None:
    """Whatever bytes come in, only tabs, newlines and colours can control a terminal afterwards."""
    chance = random.Random(3)
    for _ in range(300):
        text = sanitize(chance.randbytes(200) + b"\n").decode()
        assert text.count("\n") >= 1
        bare = text.replace("\x1b[", "").replace("\n", "").replace("\t", "")
        assert not [char for char in bare if ord(char) < 0x20 or 0x7F <= ord(char) <= 0x9F]
