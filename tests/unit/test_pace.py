"""How much output a node keeps under way: little on a slow line, much on a quick one."""

from __future__ import annotations

from collections import deque

import pytest

from gpulayer.streams import FIRST_BYTES, LATE_S, Pace

PIECE_BYTES = 1 << 14


class Line:
    """A line with a buffer without end in front of it; the launcher says at once what it has seen."""

    def __init__(self) -> None:
        self.pace = Pace()
        self.late_s = 0.0
        self._now = self._free_at = 0.0
        self._sent = 0
        self._on_the_way: deque[tuple[float, int]] = deque()

    def flood(self, bytes_per_s: float, rtt_s: float, lasts_s: float) -> None:
        """Send as much as may be sent; `late_s` is how late the last piece will be."""
        end = self._now + lasts_s
        while self._now < end:
            while self.pace.room:
                self._sent += PIECE_BYTES
                self.pace.sent(PIECE_BYTES, self._now)
                self._free_at = max(self._free_at, self._now) + PIECE_BYTES / bytes_per_s
                self._on_the_way.append((self._free_at + rtt_s, self._sent))
                self.late_s = self._free_at + rtt_s - self._now
            self._now, seen = self._on_the_way.popleft()
            self.pace.seen(seen, self._now)

    def room_bytes(self) -> int:
        """How much may be under way, once all has arrived."""
        self.pace.seen(self._sent, self._now)
        return room_bytes(self.pace, self._now)


def room_bytes(pace: Pace, now: float) -> int:
    """How much may be sent now."""
    sent = 0
    while pace.room:
        pace.sent(PIECE_BYTES, now)
        sent += PIECE_BYTES
    return sent


def test_a_slow_line_carries_about_a_second_of_output() -> None:
    """At 64 kB/s the news come after a second or so, however much the ranks write, and however quick it was before."""
    line = Line()
    line.flood(64e3, 0.2, 60)
    assert line.late_s < 2 * LATE_S
    line = Line()
    line.flood(100e6, 0.001, 1)
    line.flood(64e3, 0.2, 600)
    assert line.late_s < 2 * LATE_S


def test_a_quick_line_that_is_long_is_used_in_full() -> None:
    """At 100 MB/s and 100 ms there may be as much under way as the line holds."""
    line = Line()
    line.flood(100e6, 0.1, 3)
    assert line.room_bytes() >= 100e6 * 0.1


def test_a_rank_that_says_little_earns_no_room() -> None:
    """What was never used up does not grow: a flood later would fill the line with it."""
    pace = Pace()
    for number in range(1, 1000):
        pace.sent(100, float(number))
        pace.seen(100 * number, number + 0.001)
    assert room_bytes(pace, 1000.0) == FIRST_BYTES


@pytest.mark.parametrize("total", [99, 301])
def test_a_count_that_cannot_be_is_an_error(total: int) -> None:
    """Less than before, or more than was sent, is a broken protocol."""
    pace = Pace()
    pace.sent(300, 0.0)
    pace.seen(100, 0.1)
    with pytest.raises(ValueError, match=f"{total} bytes cannot have been seen"):
        pace.seen(total, 0.2)
