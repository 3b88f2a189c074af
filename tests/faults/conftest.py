"""Rows of the fault matrix: which fault it was, what the user saw, and how long it took until all was clean.

With GPULAYER_FAULTS=FILE in the environment, each row is added to FILE as a line of JSON: docs/reliability.md's table.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator


class Row:
    """One row. `faults` are the marks of its test; `clean_s` is None where nothing had been started."""

    def __init__(self, faults: list[str]) -> None:
        self.faults = faults
        self.clean_s: float | None = None
        self.seen = ""
        self._began_s = 0.0

    def begins(self) -> None:
        """The fault has just been made."""
        self._began_s = time.monotonic()

    def clean(self, at_s: float | None = None) -> None:
        """Nothing is left any more, seen from outside, since `at_s` on the monotonic clock (default: now)."""
        self.clean_s = (time.monotonic() if at_s is None else at_s) - self._began_s

    def says(self, text: str) -> None:
        """What the user sees: the exit code and the sentence that tells it."""
        self.seen = text


def pytest_collection_finish(session: pytest.Session) -> None:
    """With GPULAYER_FAULT_NAMES=FILE in the environment, write the words of all rows to FILE."""
    if path := os.environ.get("GPULAYER_FAULT_NAMES"):
        names = {mark.args[0]: None for item in session.items for mark in item.iter_markers("fault")}
        Path(path).write_text(json.dumps(list(names)))


@pytest.fixture
def row(request: pytest.FixtureRequest) -> Iterator[Row]:
    """The row that a test stands for."""
    row = Row([mark.args[0] for mark in request.node.iter_markers("fault")])
    yield row
    if (path := os.environ.get("GPULAYER_FAULTS")) and row.seen:
        with Path(path).open("a") as file:
            entry = {"faults": row.faults, "test": request.node.nodeid, "says": row.seen, "clean_s": row.clean_s}
            file.write(json.dumps(entry) + "\n")
