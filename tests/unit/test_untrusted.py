"""What others wrote, within a line of gpulayer's own."""

from __future__ import annotations

import json

import pytest

from gpulayer.untrusted import last_line, one_line, printable, shown


@pytest.mark.parametrize(
    ("text", "safe"),
    [
        ("", ""),
        ("gpu-01, grün 漢 🚀", "gpu-01, grün 漢 🚀"),
        ("\x1b[2J\x9b2J\0\r\n\t\x7f", "�[2J�2J�����"),
        ("\u202eabc\u2028\u2066\ud800\ufeff", "�abc����"),
    ],
)
def test_printable(text: str, safe: str) -> None:
    """Letters of any script stay; controls, line ends, marks of direction and halves of characters do not."""
    assert printable(text) == safe


def test_a_line_has_a_limit() -> None:
    """A longer one is cut, and shows it."""
    assert one_line("abcdef", 6) == "abcdef"
    assert one_line("abcdefg", 6) == "abcdef..."


@pytest.mark.parametrize(
    ("data", "line"), [(b"", ""), (b" \r\n ", ""), (b"one\n\ntwo \x1b[31m\xff\n", "two �[31m�"), (b"x\ry\n", "x�y")]
)
def test_last_line(data: bytes, line: str) -> None:
    """The last line that has something in it."""
    assert last_line(data) == line


def test_values_of_any_depth_can_be_shown() -> None:
    """A value is cut; one that Python itself cannot write is named as such."""
    assert shown({"a": "\x1b"}) == "{'a': '\\x1b'}"
    assert shown("x" * 500) == "'" + "x" * 79
    assert len(shown(json.loads("[" * 900 + "]" * 900))) <= 80
    value: list[object] = []
    for _ in range(100_000):
        value = [value]
    assert shown(value) == "a value within a value, too deep"
