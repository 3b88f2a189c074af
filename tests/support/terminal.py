"""A terminal for gpulayer that scrolls only when a test lets it."""

from __future__ import annotations

import contextlib
import os
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


class Pty:
    """A terminal for gpulayer: `slave` is its end, `text` what it drew. Nobody reads it before `start_reading`."""

    def __init__(self) -> None:
        self.master, self.slave = os.openpty()
        self._data = bytearray()
        self._reader = threading.Thread(target=self._read, daemon=True)

    @property
    def text(self) -> str:
        """What was drawn so far."""
        return bytes(self._data).decode("utf-8", "replace")

    def start_reading(self) -> None:
        """Let the terminal scroll."""
        self._reader.start()

    def hang_up(self) -> None:
        """Close our copy of gpulayer's end, and read on until gpulayer has closed its own."""
        os.close(self.slave)
        if self._reader.is_alive():
            self._reader.join(10)
        os.close(self.master)

    def _read(self) -> None:
        with contextlib.suppress(OSError):  # EIO: the last one has closed the other end
            while piece := os.read(self.master, 1 << 16):
                self._data += piece


@contextlib.contextmanager
def terminal() -> Iterator[Pty]:
    """A terminal of 80 columns, hung up at the end unless it was before."""
    pty = Pty()
    yield pty
    with contextlib.suppress(OSError):
        pty.hang_up()
