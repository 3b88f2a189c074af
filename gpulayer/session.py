"""One supervisor that has nothing started yet: shipped, greeted, asked. remote.py has what follows the start."""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Protocol

from gpulayer import frames, probe
from gpulayer.bootstrap import bootstrap_command, bootstrap_input, probe_argv, probe_input
from gpulayer.errors import HandshakeError, NodeError, PrepareError, PythonMissingError, PythonTooOldError
from gpulayer.events import NodeSwept
from gpulayer.inventory import NodeLease, Survey, parse_holders, parse_survey
from gpulayer.masks import NONE_KNOWN
from gpulayer.untrusted import last_line, one_line
from gpulayer.wire import Header, Hello, parse_event, parse_hello, parse_refused, unexpected

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable, Mapping

NOISE_BYTES = 4096
MOST_NOISE_BYTES = 64 << 20  # before a greeting: some login shells print a lot, none this much
ANSWER_LIMIT_S = 30.0


class Channel(Protocol):
    """What a node is reached through: an SSH channel, or in tests a pipe to a local child."""

    def write(self, data: bytes) -> None:
        """Queue bytes for the node; never blocks."""

    async def drain(self) -> None:
        """Wait while a lot is queued."""

    def close(self) -> None:
        """Close both directions."""


class Login(Protocol):
    """What opens a channel: an SSH connection, or in tests what starts a local child."""

    async def open(self, command: str, receiver: Session) -> Channel:
        """Run a command, whose output goes to the receiver. Raises NodeError."""


@contextlib.asynccontextmanager
async def answering(ssh: str) -> AsyncIterator[None]:
    """Await answers of the node with this SSH name in here. Raises HandshakeError where one does not come."""
    try:
        async with asyncio.timeout(ANSWER_LIMIT_S):
            yield
    except TimeoutError:
        raise HandshakeError(
            f"logged in, but no supervisor answered within {ANSWER_LIMIT_S:g} s",
            hint=f"see whether its login shell starts commands at all: `ssh {ssh} true`",
        ) from None


class Session:
    """The launcher's end of one supervisor, which answers what it is asked, one thing at a time.

    Each coroutine answers or raises a NodeError. The bytes come by the methods at the end, which a channel calls.
    """

    def __init__(self, python: str) -> None:
        self.python = python
        self.hello: Hello | None = None
        self.last_heard = time.monotonic()
        self.over = False
        self.closed = asyncio.Event()
        self._channel: Channel | None = None
        self._nonce = secrets.token_hex(16)
        self._noise = bytearray()
        self._stderr = bytearray()
        self._reader: frames.FrameReader | None = None
        self._answer: asyncio.Future[tuple[Header, bytes]] = asyncio.get_running_loop().create_future()
        self._asked = self._dismissed = False
        self._pings = self._noise_bytes = 0
        self._problem: NodeError | None = None
        self._probe: ProbeLines | None = None

    # -- what the launcher asks

    async def begin(self, link: Login, ssh: str) -> Hello:
        """Have a supervisor run over a login to the node with this SSH name, and shake hands with it."""
        async with answering(ssh):
            return await self.shake_hands(await link.open(bootstrap_command(self.python), self))

    async def shake_hands(self, channel: Channel) -> Hello:
        """Ship the supervisor and wait for its hello."""
        self._channel = channel
        channel.write(bootstrap_input(self._nonce))
        header, _ = await self._next_answer()
        self.hello = parse_hello(header)
        return self.hello

    async def ask(self, kind: str, *answers: str, payload: bytes = b"", **fields: object) -> tuple[Header, bytes]:
        """Send a frame and return the answer. Raises HandshakeError where it is none of `answers`."""
        self._send({"type": kind, **fields}, payload)
        header, data = await self._next_answer()
        if header["type"] not in answers:
            raise unexpected(header)
        return header, data

    async def stream(self, kind: str, pieces: Iterable[bytes], end: str, *answers: str) -> Header:
        """Send pieces, each once the link has taken the one before, then `end`; return the answer to all of it.

        It may come early: then the rest is not sent.
        """
        answer = asyncio.ensure_future(self._next_answer())
        try:
            for piece in pieces:
                await asyncio.sleep(0)  # the others have their turn, and the news theirs
                if answer.done():
                    break
                self._send({"type": kind}, piece)
                if self._channel:
                    await self._channel.drain()
            self._send({"type": end})
            header, _ = await answer
        finally:
            answer.cancel()
        if header["type"] not in answers:
            raise unexpected(header)
        return header

    async def hold(self, wanted: NodeLease, lost_after_s: float) -> tuple[NodeLease, ...]:
        """Have the node take a lease, in place of the one it has; return who holds it instead, nobody: it is ours.

        From now on it gives the lease back, and goes, when it has heard nothing for `lost_after_s`.
        """
        header, data = await self.ask("hold", "held", "refused", **asdict(wanted), lost_after_s=lost_after_s)
        if header["type"] == "held":
            return ()
        code, message = parse_refused(header)
        if code != "held":
            raise PrepareError(message, hint="try again; `ss -xap` there shows who has its lock")
        return parse_holders(data)

    async def release(self) -> None:
        """Have the node give its lease back."""
        await self.ask("release", "released")

    async def survey(self) -> Survey:
        """Return what is on the node, of any job."""
        _, data = await self.ask("survey", "surveyed")
        return parse_survey(data)

    async def sweep(self, marker: str, grace_s: float, *, term: bool = False) -> NodeSwept:
        """End what runs under a marker, and return what was seen of that; the event's `node_rank` is 0.

        `term`: with a SIGTERM first, else only the grace is waited for.
        """
        header, _ = await self.ask("sweep", "swept", marker=marker, grace_s=grace_s, term=term)
        try:
            event = parse_event(header, b"", 0, ())
        except frames.ProtocolError as error:
            raise HandshakeError(f"the supervisor broke the protocol: {error}") from error
        if not isinstance(event, NodeSwept):
            raise unexpected(header)
        return NONE_KNOWN.mask_swept(event)

    def dismiss(self) -> None:
        """Nothing will start: tell a supervisor that waits to go."""
        self._dismissed = True
        self._send({"type": "kill"})

    def ping(self) -> None:
        """Show the node that the launcher lives; it answers with as much."""
        if self.hello:
            self._pings += 1
            self._send({"type": "ping"})

    def close(self) -> None:
        """Close the channel. A supervisor that runs ends its part when it sees that."""
        if self._channel:
            self._channel.close()

    # -- the probe, through the supervisor

    def begin_probe(self, python: str, env: Mapping[str, str]) -> None:
        """Start the probe there: the job's own Python, with the job's environment."""
        nonce = secrets.token_hex(16)
        self._probe = ProbeLines(nonce, python)
        self._send({"type": "helper"}, json.dumps({"argv": probe_argv(python), "env": dict(env)}).encode())
        self._send({"type": "helper_input"}, probe_input(nonce))

    async def ask_probe(self, line: bytes) -> bytes:
        """Send the probe a line and return its answer. Raises HandshakeError when it ends instead."""
        if self._probe:
            self._probe.asked += 1
        self._send({"type": "helper_input"}, line)
        return await self._probe_said()

    async def end_probe(self, line: bytes) -> None:
        """Send the probe its last line and wait until it is gone."""
        self._send({"type": "helper_input"}, line)
        if self._probe:
            await self._probe.gone.wait()

    async def _probe_said(self) -> bytes:
        if self._probe is None:
            raise HandshakeError("no probe was started")
        line = await self._probe.lines.get()
        if line is None and self._problem:
            raise self._problem
        if line is None:
            said = last_line(bytes(self._stderr)) or "nothing was printed"
            raise HandshakeError(
                f"`{self._probe.python}` could not run the checks: {said}",
                hint="try it there; `--no-preflight` leaves the checks out",
            )
        return line

    # -- what comes from the channel

    def data_received(self, data: bytes) -> None:
        """Take bytes of the supervisor's stdout."""
        self.last_heard = time.monotonic()
        if self._problem or self.over:
            return  # it is given up: what still comes is not even looked at
        if self._reader is None:
            data = self._after_greeting(data)
        if self._reader is None:
            return
        try:
            for header, payload in self._reader.feed(data):
                if not (self._problem or self.over):
                    self._take(header, payload)
        except frames.ProtocolError as error:
            self._broke(f"the supervisor broke the protocol: {error}")

    def stderr_received(self, data: bytes) -> None:
        """Take bytes of the login shell's or the supervisor's stderr; the last of them explain a failure."""
        self._stderr = (self._stderr + data)[-NOISE_BYTES:]

    def channel_closed(self, exit_status: int | None, exit_signal: str | None, reason: str | None) -> None:
        """Take note that nothing will come any more. `reason` is set when it was the connection that broke."""
        self.closed.set()
        self._fail(self._explain(exit_status, exit_signal, reason))
        if self._probe:
            self._probe.end()

    def _broke(self, what: str) -> None:
        self._give_up(HandshakeError(what))

    def _give_up(self, error: NodeError) -> None:
        self._fail(error)
        self.close()

    def _take(self, header: Header, payload: bytes) -> None:
        """Take an answer to the launcher, or what the probe says."""
        match header["type"]:
            case "pong":
                self._take_pong()
            case "reaped":
                pass
            case "helper_output" if self._probe:
                self._probe.feed(payload)
            case "helper_end" if self._probe:
                self._probe.end()
            case _ if self._asked:
                self._asked = False
                self._answer.set_result((header, payload))
            case "refused":  # to start the probe, which is not waited for
                self._give_up(PrepareError(parse_refused(header)[1]))
            case _ if not self._dismissed:
                self._give_up(unexpected(header))

    def _take_pong(self) -> None:
        self._pings -= 1
        if self._pings < 0:
            raise frames.ProtocolError("a pong that nobody asked for")

    def _after_greeting(self, data: bytes) -> bytes:
        """Skip what a login shell printed, up to the greeting; nothing is kept of it but its end."""
        greeting = frames.HELLO + self._nonce.encode() + b"\n"
        self._noise += data
        self._noise_bytes += len(data)
        at = self._noise.find(greeting)
        if at < 0:
            del self._noise[:-NOISE_BYTES]
            if self._noise_bytes > MOST_NOISE_BYTES:
                self._give_up(_endless_noise())
            return b""
        self._reader = frames.FrameReader(frames.MAX_EVENT_BYTES)
        return bytes(self._noise[at + len(greeting) :])

    def _explain(self, exit_status: int | None, exit_signal: str | None, reason: str | None) -> NodeError:
        """Say why the channel closed before the supervisor was ready."""
        if reason:
            return HandshakeError(f"the connection broke while the supervisor was starting: {one_line(reason)}")
        said = bytes(self._stderr).strip() or bytes(self._noise).strip()
        last = last_line(said)
        python = self.python
        if b"Unknown option: -I" in said:
            return PythonTooOldError(f"`{python}` is Python 2", hint="set `python` for the node in the hosts map")
        if self._reader is None and (exit_status in (126, 127) or b"ommand not found" in said):
            return PythonMissingError(
                f"`{python}` cannot be run there: {last or f'exit status {exit_status}'}",
                hint="set `python` for the node in the hosts map to the interpreter's absolute path",
            )
        how = one_line(f"signal {exit_signal}" if exit_signal else f"exit status {exit_status}")
        return HandshakeError(
            f"logged in, but no supervisor answered ({how}): {last or 'nothing was printed'}",
            hint=f"try `{bootstrap_command(python)} </dev/null` there over ssh",
        )

    def _fail(self, error: NodeError) -> None:
        """Nothing more can be asked. An answer that came before is still given out."""
        if self._problem is None:
            self._problem = error
            self._asked = False
            self._let_know()
            if self._probe:
                self._probe.end()

    def _let_know(self) -> None:
        if self._problem and not self._answer.done():
            self._answer.set_exception(self._problem)
            self._answer.exception()  # whoever waits gets it; nobody waiting is no fault

    async def _next_answer(self) -> tuple[Header, bytes]:
        self._asked = not self._answer.done()
        try:
            answer = await self._answer
        except asyncio.CancelledError:
            self._asked = False  # what comes now answers nobody
            self._await_another()
            raise
        self._await_another()
        return answer

    def _await_another(self) -> None:
        self._answer = asyncio.get_running_loop().create_future()
        self._let_know()

    def _send(self, header: Header, payload: bytes = b"") -> None:
        if self._channel and not self.over:
            self._channel.write(frames.encode_frame(header, payload))


def _endless_noise() -> HandshakeError:
    return HandshakeError(
        f"logged in, but no supervisor answered, and its login shell printed more than {MOST_NOISE_BYTES >> 20} MiB",
        hint="see what its start-up files print, and have them do so in interactive shells alone",
    )


class ProbeLines:
    """What a probe says, a line for each time it was `asked`, after its greeting; None where it has ended."""

    def __init__(self, nonce: str, python: str) -> None:
        self.lines: asyncio.Queue[bytes | None] = asyncio.Queue()
        self.gone = asyncio.Event()
        self.python = python
        self.asked = 0
        self._greeting = probe.HELLO + nonce.encode() + b"\n"
        self._greeted = False
        self._buffer = bytearray()

    def feed(self, data: bytes) -> None:
        """Take bytes of its stdout. Raises ProtocolError where a line has no end."""
        self._buffer += data
        if not self._greeted:
            before, greeting, after = self._buffer.partition(self._greeting)
            self._greeted = bool(greeting)
            self._buffer = after if greeting else before[-NOISE_BYTES:]
        while self._greeted and self.asked and (end := self._buffer.find(b"\n")) >= 0:
            self.asked -= 1
            self.lines.put_nowait(bytes(self._buffer[:end]))
            del self._buffer[: end + 1]
        if self._greeted and not self.asked:  # nobody will want it
            del self._buffer[: self._buffer.rfind(b"\n") + 1]
        if len(self._buffer) > probe.MAX_LINE_BYTES:
            raise frames.ProtocolError("a line of its probe has no end")

    def end(self) -> None:
        """Nothing will come any more."""
        if not self.gone.is_set():
            self.gone.set()
            self.lines.put_nowait(None)
