"""What a signal does to gpulayer: before the job it ends it, then it is the job's, and after the job it only hurries.

`end_by_exception` is for the whole process, `SignalGate` for one run. A handler is only ever replaced by another, so
there is no moment in which a signal would do what it does by default: kill, and with that lose how the job ended.
"""

from __future__ import annotations

import contextlib
import os
import signal
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Iterator
    from types import FrameType, TracebackType
    from typing import NoReturn, Self

ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


class Interrupted(BaseException):
    """A signal that ends gpulayer. Not a KeyboardInterrupt, which typer would turn into exit code 130."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.exit_code = 128 + number


def end_by_exception() -> None:
    """Have each signal raise Interrupted in the main thread."""
    for number in _heeded():
        signal.signal(number, _raise)


def ignore_all() -> None:
    """Have no signal change how this process ends: it is about to, with its own exit code."""
    for number in ENDING_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


class SignalGate:
    """The signals of one run, from the first to the last line of it; made in the main thread.

    While `to` is open, a receiver in the event loop gets them. Before, they wait for it; after, they make `hurried`
    true.
    """

    def __init__(self) -> None:
        self._waiting: list[int] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._receive: Callable[[int], None] = self._waiting.append
        self._before = {number: signal.signal(number, self._take) for number in _heeded()}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Where the run has no exit code of its own, have the signals do what they did before."""
        if kind:
            self.restore()

    def restore(self) -> None:
        """Have the signals do again what they did before."""
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @property
    def hurried(self) -> bool:
        """Whether a signal came that nobody received."""
        return bool(self._waiting)

    @contextlib.contextmanager
    def to(self, loop: asyncio.AbstractEventLoop, receive: Callable[[int], None]) -> Iterator[None]:
        """Hand the signals to `receive`, as callbacks of `loop`."""
        self._loop, self._receive = loop, receive
        while self._waiting:
            receive(self._waiting.pop(0))
        try:
            yield
        finally:
            self._loop, self._receive = None, self._waiting.append

    def leave_with(self, exit_code: int) -> None:
        """All is done and said: from here on, a signal ends the process at once, with the exit code of the job."""
        for number in self._before:
            signal.signal(number, lambda *_: os._exit(exit_code))

    def _take(self, number: int, _frame: FrameType | None) -> None:
        if self._loop is None:
            self._waiting.append(number)
        else:
            self._loop.call_soon_threadsafe(self._receive, number)


def _heeded() -> list[signal.Signals]:
    """All that end gpulayer, less those that whoever started it wants ignored: nohup, or `&` in a script."""
    return [number for number in ENDING_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]


def _raise(number: int, _frame: FrameType | None) -> NoReturn:
    raise Interrupted(number)
