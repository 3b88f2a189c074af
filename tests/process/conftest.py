"""What the process ring shares: supervisors as local children, and the check that nothing outlives a test."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import pytest

from tests.support.local_node import LocalNode, Subreaper
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


@pytest.fixture(autouse=True)
def nothing_survives() -> Iterator[None]:
    """Every process that a test starts, however it hides, has ended when the test has (or within 2 s)."""
    with Subreaper() as subreaper:
        yield
        with contextlib.suppress(TimeoutError):
            wait_until(lambda: not subreaper.living(), "all children have ended", timeout_s=2)
        left = subreaper.left()
        assert not left, f"left by the test: {left}"


@pytest.fixture
def node(tmp_path: Path) -> Iterator[LocalNode]:
    """A supervisor that has greeted."""
    with LocalNode(tmp_path) as one:
        yield one


@pytest.fixture
def script(tmp_path: Path) -> Callable[[str], Path]:
    """`script("print(1)")`: a file with this Python in it."""

    def write(source: str) -> Path:
        path = tmp_path / "script.py"
        path.write_text(source)
        return path

    return write
