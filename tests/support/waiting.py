"""Waiting for a condition, so that no test sleeps for one."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


def wait_until(condition: Callable[[], bool], what: str, *, timeout_s: float = 10, poll_s: float = 0.01) -> float:
    """Return the seconds it took for `condition` to hold. Raises TimeoutError naming `what`."""
    start = time.monotonic()
    while not condition():
        if time.monotonic() - start > timeout_s:
            raise TimeoutError(f"not within {timeout_s} s: {what}")
        time.sleep(poll_s)
    return time.monotonic() - start
