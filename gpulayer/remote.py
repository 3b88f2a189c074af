"""One node of a job: sends it the plan's command over a session, and tells what happens there as events."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from typing import TYPE_CHECKING

from gpulayer.errors import PrepareError
from gpulayer.events import (
    Event,
    NodeConnected,
    NodeEnded,
    NodeLost,
    NodePrepared,
    NodeStopping,
    Notice,
    Output,
    RankStarted,
)
from gpulayer.session import Channel, Session
from gpulayer.untrusted import last_line, one_line
from gpulayer.wire import Header, Story, parse_event, parse_prepared, parse_refused

if TYPE_CHECKING:
    from collections.abc import Callable

    from gpulayer.plan import NodeCommand, Plan

SEEN_PAUSE_S = 0.02
PREPARE_HINTS = {
    "workdir": "create it there, or name another folder with `workdir` in the hosts map or -C/--workdir",
    "job_dir": "set `scratch` in the hosts map to a folder on the node that exists and can be written; where the job's "
    "folder exists, an earlier run with this job id has left output in it: remove it there",
    "port": "choose another with --master-port",
    "proc": "mount /proc there; without it no process could be found again and ended",
    "system": "mend that on the node, or leave it out with -x/--exclude",
    "interface": "set `interface` for the node in the hosts map, or correct its `address`",
}


class RemoteNode(Session):
    """The launcher's end of one supervisor that a job runs under.

    Before the start its coroutines answer or raise a NodeError; after the start everything that happens is told to
    `emit`, in order, ending with NodeEnded or NodeLost (never both).
    """

    def __init__(self, plan: Plan, node_rank: int, emit: Callable[[Event], None]) -> None:
        self.command = plan.nodes[node_rank]
        super().__init__(self.command.python)
        self.marker = secrets.token_hex(16)
        self._plan, self._emit = plan, emit
        self.left_s: float | None = None
        self.last_told = self.last_heard
        self._started = self._owes_count = self._told_of_numbers = False
        self._output_bytes = 0
        self._closed_by: tuple[str, bool] | None = None
        self._story = Story()

    # -- what the launcher asks of it

    async def greet(self, channel: Channel) -> NodeConnected:
        """Ship the supervisor and wait for its hello. Raises NodeError."""
        hello = await self.shake_hands(channel)
        return NodeConnected(self.command.node_rank, hello.hostname, hello.python, hello.kernel, hello.pid)

    async def prepare(self) -> NodePrepared:
        """Send what shall run and wait until the node is ready to start it. Raises PrepareError."""
        payload = json.dumps(job_payload(self._plan, self.command, self.marker)).encode()
        answer, _ = await self.ask("prepare", "prepared", "refused", payload=payload)
        if answer["type"] == "refused":
            code, message = parse_refused(answer)
            raise PrepareError(message, hint=PREPARE_HINTS.get(code))
        return NodePrepared(self.command.node_rank, parse_prepared(answer))

    async def reserve(self, port: int) -> bool:
        """Have the node hold the rendezvous port, in place of one that it holds; False where somebody else has it."""
        answer, _ = await self.ask("reserve", "reserved", "refused", port=port)
        return bool(answer["type"] == "reserved")

    def follow(self, plan: Plan) -> None:
        """Take the node's command from another plan of the same nodes."""
        self._plan, self.command = plan, plan.nodes[self.command.node_rank]

    def start_probe(self) -> None:
        """Start the probe there as the job itself would be: with its Python and its environment."""
        self.begin_probe(self.command.python, self.command.env)

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
        if self.left_s is None:
            self.left_s = time.monotonic()
            self._send({"type": "leave"})

    def abandon(self) -> None:
        """Wait no longer for the last word of a node that is verified: the output that it still has stays there."""
        if not self.over:
            self.over = True
            self.close()
            self._emit(NodeEnded(self.command.node_rank, self.command.job_dir, outputs=True))

    def lose(self, reason: str, *, supervisor_died: bool = False) -> None:
        """Give the node up: close its channel and tell it as an event."""
        if not self.over:
            self.over = True
            self.close()
            self._emit(NodeLost(self.command.node_rank, reason, supervisor_died))

    # -- what comes from the channel

    def channel_closed(self, exit_status: int | None, exit_signal: str | None, reason: str | None) -> None:
        """Take note that nothing will come any more. `reason` is set when it was the connection that broke."""
        how = f"signal {exit_signal}" if exit_signal else f"exit status {exit_status}"
        self._closed_by = (one_line(reason or self._died(how)), reason is None)
        super().channel_closed(exit_status, exit_signal, reason)
        self._lose_if_closed()

    def _lose_if_closed(self) -> None:
        if self._started and self._closed_by:
            reason, supervisor_died = self._closed_by
            self.lose(reason, supervisor_died=supervisor_died)
        elif self._started and self._problem:
            self.lose(str(self._problem), supervisor_died=True)

    def _died(self, how: str) -> str:
        last = last_line(bytes(self._stderr))
        return f"its supervisor died ({how})" + (f": {last}" if last else "")

    def _broke(self, what: str) -> None:
        if self._started:
            self.lose(what, supervisor_died=True)
        else:
            super()._broke(what)

    def _take(self, header: Header, payload: bytes) -> None:
        if not self._started:
            super()._take(header, payload)
            return
        if header["type"] == "pong":
            self._take_pong()
            return
        self.last_told = self.last_heard
        if header["type"] == "drained":  # all it has sent is here: it need not keep its files
            self._story.drained()
            self._send({"type": "arrived"})
        elif event := parse_event(header, payload, self.command.node_rank, self.command.ranks):
            self._tell(event)
            if isinstance(event, RankStarted):
                self._compare(event.rank, header.get("rank"))
            if isinstance(event, Output):
                self._count(len(event.data))

    def _compare(self, planned: int, own: object) -> None:
        """Say once where a rank has another number than the plan gave it: tags and file names would mislead."""
        if type(own) is int and own != planned and not self._told_of_numbers:
            self._told_of_numbers = True
            text = "ranks are numbered otherwise there than planned, and tags and file names have the plan's numbers"
            self._emit(Notice(f"{text}: rank {own} is {planned} here", (self.command.node_rank,)))

    def _count(self, size: int) -> None:
        """Let the node know soon how much output was seen: by that it keeps little under way on a slow line."""
        self._output_bytes += size
        if not self._owes_count:
            self._owes_count = True
            asyncio.get_running_loop().call_later(SEEN_PAUSE_S, self._tell_seen)

    def _tell_seen(self) -> None:
        self._owes_count = False
        self._send({"type": "seen", "bytes": self._output_bytes})

    def _tell(self, event: Event) -> None:
        self._story.take(event)
        if isinstance(event, NodeEnded):
            self.over = True
            kept = self.command.job_dir if event.kept else ""  # not what the node calls it: people will go there
            self._emit(NodeEnded(self.command.node_rank, kept, event.outputs))
        elif isinstance(event, NodeLost):
            self.lose(event.reason)
        elif not self.over:
            self._emit(event)


def job_payload(plan: Plan, command: NodeCommand, marker: str) -> Header:
    """Return what a supervisor needs to know: the plan's own words for its node, and how to end it."""
    return {
        "argv": command.argv,
        "env": command.env,
        "workdir": command.workdir,
        "job_dir": command.job_dir,
        "node_rank": command.node_rank,
        "nnodes": plan.nnodes,
        "nproc_per_node": len(command.ranks),
        "first_rank": command.ranks[0] if command.ranks else 0,
        "launcher": plan.launcher,
        "address": command.address,
        "interface": command.interface,
        "master_addr": plan.master_addr,
        "master_port": plan.master_port,
        "marker": marker,
        "grace_s": plan.grace_s,
        "lost_after_s": plan.lost_after_s,
        "outputs": command.outputs,
    }
