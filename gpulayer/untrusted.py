"""Text that others wrote (nodes, login shells, SSH servers), made safe to show within a line of gpulayer's. Pure."""

from __future__ import annotations

LONGEST_TEXT = 1000
LONGEST_LAST_LINE = 300


def printable(text: str) -> str:
    """Return the text with U+FFFD for all that has no place in a line, and could steer a terminal or forge a line."""
    return text if text.isprintable() else "".join(char if char.isprintable() else "\ufffd" for char in text)


def one_line(text: str, limit: int = LONGEST_TEXT) -> str:
    """Return printable text, cut where it is longer than the limit."""
    return printable(text if len(text) <= limit else text[:limit] + "...")


def last_line(data: bytes) -> str:
    """Return the last line of some output, "" where there is none: mostly that one says what went wrong."""
    lines = data.decode("utf-8", "replace").strip().split("\n")
    return one_line(lines[-1], LONGEST_LAST_LINE)


def shown(value: object, limit: int = 80) -> str:
    """Return a value that was read from JSON as Python writes it, cut."""
    try:
        return printable(repr(value)[:limit])
    except RecursionError:
        return "a value within a value, too deep"
