"""One node: ships the supervisor, shakes hands, sends it the plan's command, and tells what happens there as events."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from typing import TYPE_CHECKING, Protocol

from gpulayer import frames, probe
from gpulayer.bootstrap import bootstrap_command, bootstrap_input, probe_argv, probe_input
from gpulayer.errors import HandshakeError, NodeError, PrepareError, PythonMissingError, PythonTooOldError
from gpulayer.events import (
    Event,
    NodeConnected,
    NodeEnded,
    NodeLost,
    NodePrepared,
    NodeStopping,
    NodeSwept,
)
from gpulayer.wire import Header, Hello, parse_event, parse_hello

if TYPE_CHECKING:
    from collections.abc import Callable

    from gpulayer.plan import NodeCommand, Plan

NOISE_BYTES = 4096
PREPARE_HINTS = {
    "workdir": "create it there, or name another folder with `workdir` in the hosts map or -C/--workdir",
    "job_dir": "set `scratch` in the hosts map to a folder on the node that exists and can be written",
    "port": "choose another with --master-port",
    "proc": "mount /proc there; without it no process could be found again and ended",
    "system": "mend that on the node, or leave it out with -x/--exclude",
    "interface": "set `interface` for the node in the hosts map, or correct its `address`",
}


class Channel(Protocol):
    """What a node is reached through: an SSH channel, or in tests a pipe to a local child."""

    def write(self, data: bytes) -> None:
        """Queue bytes for the node; never blocks."""

    def close(self) -> None:
        """Close both directions."""


class RemoteNode:
    """The launcher's end of one supervisor.

    Before the start its coroutines `greet` and `prepare` answer or raise a NodeError; after the start everything that
    happens is told to `emit`, in order, ending with NodeEnded or NodeLost (never both).
    """

    def __init__(self, plan: Plan, node_rank: int, emit: Callable[[Event], None]) -> None:
        self.command = plan.nodes[node_rank]
        self.marker = secrets.token_hex(16)
        self.hello: Hello | None = None
        self.last_heard = time.monotonic()
        self.over = False
        self.closed = asyncio.Event()
        self._plan, self._emit = plan, emit
        self._channel: Channel | None = None
        self._nonce = secrets.token_hex(16)
        self._noise = bytearray()
        self._stderr = bytearray()
        self._reader: frames.FrameReader | None = None
        self._answer: asyncio.Future[Header] = asyncio.get_running_loop().create_future()
        self._started = self._left = False
        self._probe: ProbeLines | None = None
        self._closed_by: tuple[str, bool] | None = None

    # -- what the launcher asks of it

    async def greet(self, channel: Channel) -> NodeConnected:
        """Ship the supervisor and wait for its hello. Raises NodeError."""
        self._channel = channel
        channel.write(bootstrap_input(self._nonce))
        hello = self.hello = parse_hello(await self._next_answer())
        return NodeConnected(self.command.node_rank, hello.hostname, hello.python, hello.kernel, hello.pid)

    async def prepare(self) -> NodePrepared:
        """Send what shall run and wait until the node is ready to start it. Raises PrepareError."""
        self._send({"type": "prepare"}, json.dumps(job_payload(self._plan, self.command, self.marker)).encode())
        answer = await self._next_answer()
        match answer["type"]:
            case "prepared":
                return NodePrepared(self.command.node_rank, str(answer.get("interface", "")))
            case "refused":
                raise PrepareError(str(answer.get("message")), hint=PREPARE_HINTS.get(str(answer.get("code"))))
            case _:
                raise HandshakeError(f"the supervisor answered {str(answer)[:200]}")

    async def reserve(self, port: int) -> bool:
        """Have the node hold the rendezvous port, in place of one that it holds; False where somebody else has it."""
        self._send({"type": "reserve", "port": port})
        answer = await self._next_answer()
        if answer["type"] not in ("reserved", "refused"):
            raise HandshakeError(f"the supervisor answered {str(answer)[:200]}")
        return bool(answer["type"] == "reserved")

    def follow(self, plan: Plan) -> None:
        """Take the node's command from another plan of the same nodes."""
        self._plan, self.command = plan, plan.nodes[self.command.node_rank]

    # -- the probe, through the supervisor

    def start_probe(self) -> None:
        """Start the probe there: the job's own Python, with the job's environment."""
        command, nonce = self.command, secrets.token_hex(16)
        program = {"argv": probe_argv(command.argv[0]), "env": command.env}
        self._probe = ProbeLines(nonce)
        self._send({"type": "helper"}, json.dumps(program).encode())
        self._send({"type": "helper_input"}, probe_input(nonce))

    async def ask_probe(self, line: bytes) -> bytes:
        """Send the probe a line and return its answer. Raises HandshakeError when it ends instead."""
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
        if line is None:
            said = self._stderr.decode("utf-8", "replace").strip().rpartition("\n")[2][:300]
            raise HandshakeError(
                f"`{self.command.argv[0]}` could not run the checks: {said or 'nothing was printed'}",
                hint="try it there; `--no-preflight` leaves the checks out",
            )
        return line

    async def sweep(self, channel: Channel, other: RemoteNode, grace_s: float) -> NodeSwept:
        """Through a supervisor of its own, end what `other` has left on the node. Raises NodeError."""
        await self.greet(channel)
        self._send({"type": "sweep", "marker": other.marker, "grace_s": grace_s})
        event = parse_event(await self._next_answer(), b"", self.command.node_rank, ())
        if not isinstance(event, NodeSwept):
            raise HandshakeError(f"the supervisor answered {event}")
        return event

    def start(self) -> None:
        """Let the command run. From here on, everything is an event."""
        self._started = True
        self._send({"type": "start"})
        self._lose_if_closed()

    def stop(self, grace_s: float) -> None:
        """Tell the node to end its part: SIGTERM, `grace_s` seconds, SIGKILL."""
        self._send({"type": "stop", "grace_s": grace_s})
        self._emit(NodeStopping(self.command.node_rank))

    def kill(self) -> None:
        """Tell the node to end its part with SIGKILL at once."""
        self._send({"type": "kill"})
        self._emit(NodeStopping(self.command.node_rank, now=True))

    def leave(self) -> None:
        """Tell the node to keep the output that it has not sent yet, and to go. Once is enough."""
        if not self._left:
            self._left = True
            self._send({"type": "leave"})

    def dismiss(self) -> None:
        """Nothing will start: tell a supervisor that waits to go."""
        self._send({"type": "kill"})

    def ping(self) -> None:
        """Show the node that the launcher lives; it answers with as much."""
        if self.hello:
            self._send({"type": "ping"})

    def lose(self, reason: str, *, supervisor_died: bool = False) -> None:
        """Give the node up: close its channel and tell it as an event."""
        if not self.over:
            self.over = True
            self.close()
            self._emit(NodeLost(self.command.node_rank, reason, supervisor_died))

    def close(self) -> None:
        """Close the channel. A supervisor that runs ends its part when it sees that."""
        if self._channel:
            self._channel.close()

    # -- what comes from the channel

    def data_received(self, data: bytes) -> None:
        """Take bytes of the supervisor's stdout."""
        self.last_heard = time.monotonic()
        if self._reader is None:
            data = self._after_greeting(data)
        if self._reader is None or self.over:
            return
        try:
            for header, payload in self._reader.feed(data):
                self._take(header, payload)
        except frames.ProtocolError as error:
            if self._started:
                self.lose(f"the supervisor broke the protocol: {error}", supervisor_died=True)
            else:
                self._fail(HandshakeError(f"the supervisor broke the protocol: {error}"))

    def stderr_received(self, data: bytes) -> None:
        """Take bytes of the login shell's or the supervisor's stderr; the last of them explain a failure."""
        self._stderr = (self._stderr + data)[-NOISE_BYTES:]

    def channel_closed(self, exit_status: int | None, exit_signal: str | None, reason: str | None) -> None:
        """Take note that nothing will come any more. `reason` is set when it was the connection that broke."""
        self.closed.set()
        how = f"signal {exit_signal}" if exit_signal else f"exit status {exit_status}"
        self._closed_by = (reason or self._died(how), reason is None)
        self._fail(self._explain(exit_status, exit_signal, reason))
        if self._probe:
            self._probe.end()
        self._lose_if_closed()

    def _lose_if_closed(self) -> None:
        if self._started and self._closed_by:
            reason, supervisor_died = self._closed_by
            self.lose(reason, supervisor_died=supervisor_died)

    def _died(self, how: str) -> str:
        last = self._stderr.decode("utf-8", "replace").strip().rpartition("\n")[2]
        return f"its supervisor died ({how})" + (f": {last}" if last else "")

    def _take(self, header: Header, payload: bytes) -> None:
        if not self._started:
            self._take_early(header, payload)
            return
        if header["type"] == "drained":  # all it has sent is here: it need not keep its files
            self._send({"type": "arrived"})
            return
        event = parse_event(header, payload, self.command.node_rank, self.command.ranks)
        if isinstance(event, NodeLost):
            self.lose(event.reason)
        elif event is not None and not self.over:
            self.over = isinstance(event, NodeEnded)
            self._emit(event)

    def _take_early(self, header: Header, payload: bytes) -> None:
        """Before the start: an answer to the launcher, or what the probe says."""
        match header["type"]:
            case "pong":
                pass
            case "helper_output" if self._probe:
                self._probe.feed(payload)
            case "helper_end" if self._probe:
                self._probe.end()
            case _ if not self._answer.done():
                self._answer.set_result(header)

    def _after_greeting(self, data: bytes) -> bytes:
        """Skip what a login shell printed, up to the greeting; nothing is kept of it but its end."""
        greeting = frames.HELLO + self._nonce.encode() + b"\n"
        self._noise += data
        at = self._noise.find(greeting)
        if at < 0:
            del self._noise[:-NOISE_BYTES]
            return b""
        self._reader = frames.FrameReader(frames.MAX_EVENT_BYTES)
        return bytes(self._noise[at + len(greeting) :])

    def _explain(self, exit_status: int | None, exit_signal: str | None, reason: str | None) -> NodeError:
        """Say why the channel closed before the supervisor was ready."""
        if reason:
            return HandshakeError(f"the connection broke while the supervisor was starting: {reason}")
        said = (bytes(self._stderr).strip() or bytes(self._noise).strip()).decode("utf-8", "replace")
        last = said.rpartition("\n")[2][:300]
        python = self.command.python
        if "Unknown option: -I" in said:
            return PythonTooOldError(f"`{python}` is Python 2", hint="set `python` for the node in the hosts map")
        if self._reader is None and (exit_status in (126, 127) or "ommand not found" in said):
            return PythonMissingError(
                f"`{python}` cannot be run there: {last or f'exit status {exit_status}'}",
                hint="set `python` for the node in the hosts map to the interpreter's absolute path",
            )
        how = f"signal {exit_signal}" if exit_signal else f"exit status {exit_status}"
        return HandshakeError(
            f"logged in, but no supervisor answered ({how}): {last or 'nothing was printed'}",
            hint=f"try `{bootstrap_command(python)} </dev/null` there over ssh",
        )

    def _fail(self, error: NodeError) -> None:
        if not self._answer.done():
            self._answer.set_exception(error)
            self._answer.exception()  # whoever waits gets it; nobody waiting is no fault

    async def _next_answer(self) -> Header:
        answer = await self._answer
        self._answer = asyncio.get_running_loop().create_future()
        return answer

    def _send(self, header: Header, payload: bytes = b"") -> None:
        if self._channel and not self.over:
            self._channel.write(frames.encode_frame(header, payload))


class ProbeLines:
    """What a probe says, line by line, after its greeting; None where it has ended."""

    def __init__(self, nonce: str) -> None:
        self.lines: asyncio.Queue[bytes | None] = asyncio.Queue()
        self.gone = asyncio.Event()
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
        while self._greeted and (end := self._buffer.find(b"\n")) >= 0:
            self.lines.put_nowait(bytes(self._buffer[:end]))
            del self._buffer[: end + 1]
        if len(self._buffer) > probe.MAX_LINE_BYTES:
            raise frames.ProtocolError("a line of its probe has no end")

    def end(self) -> None:
        """Nothing will come any more."""
        self.gone.set()
        self.lines.put_nowait(None)


def job_payload(plan: Plan, command: NodeCommand, marker: str) -> Header:
    """Return what a supervisor needs to know: the plan's own words for its node, and how to end it."""
    return {
        "argv": command.argv,
        "env": command.env,
        "workdir": command.workdir,
        "job_dir": command.job_dir,
        "node_rank": command.node_rank,
        "nnodes": plan.nnodes,
        "nproc_per_node": command.nproc_per_node,
        "address": command.address,
        "interface": command.interface,
        "master_addr": plan.master_addr,
        "master_port": plan.master_port,
        "marker": marker,
        "grace_s": plan.grace_s,
        "lost_after_s": plan.lost_after_s,
    }
