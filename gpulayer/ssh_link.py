"""One logged-in SSH connection and the commands on it, as raw bytes: callbacks out, writes in, nothing in between."""

from __future__ import annotations

import asyncio
from typing import Protocol

import asyncssh

from gpulayer.errors import ConnectTimeoutError
from gpulayer.ssh_errors import FAILURES, explain_session

# With MaxSessions 1, sshd still counts a session for a moment after it has told us of its end.
SESSION_FREED_S = (0.01, 0.05, 0.2, 1.0)


class Receiver(Protocol):
    """What a channel calls, from the event loop. Nothing is called before `open` returns."""

    def data_received(self, data: bytes) -> None:
        """Bytes of the command's stdout, as they come."""

    def stderr_received(self, data: bytes) -> None:
        """Bytes of the command's stderr, as they come."""

    def channel_closed(self, exit_status: int | None, exit_signal: str | None, reason: str | None) -> None:
        """The end, called once. `exit_status` None: not known. `reason`: why it ended without one, if not by us."""


class SshLink:
    """One logged-in connection."""

    def __init__(self, conn: asyncssh.SSHClientConnection, place: str, timeout_s: float) -> None:
        self._conn = conn
        self._place = place
        self._timeout_s = timeout_s
        self._sessions: list[_Session] = []

    @property
    def address(self) -> str:
        """The address at the other end, as it was connected to; "" where that is not known."""
        peer = self._conn.get_extra_info("peername")
        return str(peer[0]) if peer else ""

    async def open(self, command: str, receiver: Receiver) -> SshChannel:
        """Run a command. Raises ConnectionDroppedError or ConnectTimeoutError; the receiver is then never called."""
        session = _Session(receiver)
        try:
            async with asyncio.timeout(self._timeout_s):
                channel = await self._create(command, session)
        except TimeoutError as exc:
            raise ConnectTimeoutError(
                f"{self._place} accepted the login but ran no command within {self._timeout_s:g} s",
                hint="the machine or its user directory may be hanging; --connect-timeout gives it longer",
            ) from exc
        except (*FAILURES, AttributeError) as exc:  # asyncssh 2.24 trips over a connection that ends just now
            raise explain_session(exc, self._place) from exc
        session.opened = True
        self._sessions.append(session)
        return SshChannel(channel, session)

    async def _create(self, command: str, session: _Session) -> asyncssh.SSHClientChannel[bytes]:
        pauses_s = iter(SESSION_FREED_S)
        while True:
            try:
                channel, _ = await self._conn.create_session(
                    lambda: session, command, env=None, send_env=None, request_pty=False, encoding=None
                )
                return channel
            except asyncssh.ChannelOpenError:
                pause_s = next(pauses_s, None)
                if pause_s is None or not self._sessions or not all(earlier.ended for earlier in self._sessions):
                    raise
            await asyncio.sleep(pause_s)

    async def close(self) -> None:
        """Close in good order, without waiting for the other side."""
        for session in self._sessions:
            session.ended_here = True
        self._conn.close()
        await self._conn.wait_closed()

    def abort(self) -> None:
        """Close at once. Its channels report their end on the next turn of the event loop."""
        for session in self._sessions:
            session.ended_here = True
        self._conn.abort()


class SshChannel:
    """A running command's stdin, and the flow of its output."""

    def __init__(self, channel: asyncssh.SSHClientChannel[bytes], session: _Session) -> None:
        self._channel = channel
        self._session = session

    def write(self, data: bytes) -> None:
        """Send to the command's stdin. Never blocks; what is written after the end is dropped."""
        if not self._channel.is_closing():
            self._channel.write(data)

    async def drain(self) -> None:
        """Wait until most of what was written is on its way: the window of the other side (2 MiB) has taken it."""
        await self._session.writable.wait()

    def write_eof(self) -> None:
        """End the command's stdin."""
        if not self._channel.is_closing():
            self._channel.write_eof()

    def pause(self) -> None:
        """Stop delivering output: 2 MiB later the command blocks when it writes."""
        self._channel.pause_reading()

    def resume(self) -> None:
        """Deliver output again."""
        self._channel.resume_reading()

    def close(self) -> None:
        """Close this channel and leave the connection open. The receiver is told once the other side agrees."""
        self._session.ended_here = True
        self._channel.close()


class _Session(asyncssh.SSHClientSession[bytes]):
    def __init__(self, receiver: Receiver) -> None:
        self._receiver = receiver
        self._status: int | None = None
        self._signal: str | None = None
        self.writable = asyncio.Event()
        self.writable.set()
        self.opened = False
        self.ended = False
        self.ended_here = False

    def data_received(self, data: bytes, datatype: int | None) -> None:
        if datatype is None:
            self._receiver.data_received(data)
        else:
            self._receiver.stderr_received(data)

    def pause_writing(self) -> None:
        self.writable.clear()

    def resume_writing(self) -> None:
        self.writable.set()

    def eof_received(self) -> bool:
        return True  # the command's stdin stays open until we end it

    def exit_status_received(self, status: int) -> None:
        self._status = status

    def exit_signal_received(self, signal: str, core_dumped: bool, msg: str, lang: str) -> None:
        self._signal = signal

    def connection_lost(self, exc: Exception | None) -> None:
        self.ended = True
        self.writable.set()  # what is written now is dropped
        if self.opened:
            self._receiver.channel_closed(self._status, self._signal, self._reason(exc))

    def _reason(self, exc: Exception | None) -> str | None:
        if exc is not None:
            return str(exc) or type(exc).__name__
        if self.ended_here or self._status is not None or self._signal is not None:
            return None
        return "the session ended without an exit status"
