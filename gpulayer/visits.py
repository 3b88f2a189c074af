"""Nodes of the map, visited for a moment: what is on them, and the end of what should not be. No job is started.

Each node gets a supervisor for the time of the visit, which is asked and leaves.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from typing import TYPE_CHECKING, TypeVar

from gpulayer import ending
from gpulayer.errors import HandshakeError, NodeError
from gpulayer.events import Survivor
from gpulayer.facts import FactsRequest, GpuFact, encode_end, encode_gpus, parse_facts, parse_gpus
from gpulayer.processes import MARKER_CHARS
from gpulayer.remains import EndedJob, NodeSeen
from gpulayer.session import Session, answering
from gpulayer.ssh import MAX_IN_FLIGHT, SshTarget

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

    from gpulayer.events import NodeSwept
    from gpulayer.facts import NodeFacts
    from gpulayer.hosts import Node
    from gpulayer.inventory import LeftJob, Survey
    from gpulayer.ssh import SshConnector

Answer = TypeVar("Answer")

LEAVE_LIMIT_S = 1.0
PING_S = 5.0
SMI_LIMIT_S = 10.0
GPU_LIMIT_S = SMI_LIMIT_S + 5.0
DESCRIBE_LIMIT_S = 30.0
DESCRIBE_PORT = 29500
ANYWHERE = "192.0.2.1"  # for documentation (RFC 5737): what the default route leads to
SWEEP_MARGIN_S = ending.KILL_LIMIT_S + 10.0


async def visit_all(
    nodes: Sequence[Node], connector: SshConnector, ask: Callable[[Visit], Awaitable[Answer]]
) -> tuple[dict[str, Answer], dict[str, NodeError]]:
    """Visit all nodes, many at once; return their answers, and the errors of the others, by node id in map order."""
    slots = asyncio.Semaphore(MAX_IN_FLIGHT)

    async def visit(node: Node) -> Answer | NodeError:
        async with slots:
            try:
                async with _logged_in(node, connector) as (session, address):
                    return await ask(Visit(node, session, address))
            except NodeError as error:
                return error

    said = dict(zip([node.id for node in nodes], await asyncio.gather(*map(visit, nodes)), strict=True))
    problems = {node_id: one for node_id, one in said.items() if isinstance(one, NodeError)}
    return {node_id: one for node_id, one in said.items() if not isinstance(one, NodeError)}, problems


@contextlib.asynccontextmanager
async def _logged_in(node: Node, connector: SshConnector) -> AsyncIterator[tuple[Session, str]]:
    """A supervisor of our own on the node, which leaves at the end, and the address that it was reached by."""
    link = await connector.connect(SshTarget.of(node))
    pinging: asyncio.Task[None] | None = None
    try:
        session = Session(node.python)
        await session.begin(link, node.ssh)
        pinging = asyncio.create_task(_ping(session))
        yield session, link.address
        session.dismiss()
        await _wait(session.closed, LEAVE_LIMIT_S)
    finally:
        if pinging:
            pinging.cancel()
        link.abort()


async def _ping(session: Session) -> None:
    while True:
        await asyncio.sleep(PING_S)
        session.ping()


async def _wait(event: asyncio.Event, limit_s: float) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(limit_s):
            await event.wait()


class Visit:
    """One node, logged in to. Its methods raise NodeError."""

    def __init__(self, node: Node, session: Session, address: str) -> None:
        self.node = node
        self.address = address
        """Where the login node reached it, "" where that is not known."""
        self._session = session

    async def look(self) -> NodeSeen:
        """Ask what is there, and the GPUs' tool where a job is."""
        survey = await self.survey()
        return NodeSeen(survey, await self._ask_gpus() if survey.jobs else None)

    async def look_at_all(self) -> NodeSeen:
        """Ask what is there, and the GPUs' tool."""
        return NodeSeen(await self.survey(), await self._ask_gpus())

    async def describe(self) -> NodeFacts:
        """Ask what the node is like: all that the checks before a job ask, for no job."""
        request = FactsRequest(
            node_rank=1,  # not the head: no port is looked at
            master_addr=ANYWHERE,
            master_port=DESCRIBE_PORT,
            workdir="/",
            script=None,
            module=None,
            scratch=self.node.scratch,
            nonce=secrets.token_hex(8),
            smi_limit_s=SMI_LIMIT_S,
        )
        session = self._session
        try:
            async with asyncio.timeout(DESCRIBE_LIMIT_S):
                session.begin_probe(self.node.python, _tool_path(self.node))
                facts = parse_facts(await session.ask_probe(request.encode()))
                await session.end_probe(encode_end())
        except TimeoutError:
            raise HandshakeError(f"its probe did not answer within {DESCRIBE_LIMIT_S:g} s") from None
        return facts

    async def survey(self) -> Survey:
        """Ask what is there."""
        async with answering(self.node.ssh):
            return await self._session.survey()

    async def sweep(self, marker: str, grace_s: float) -> NodeSwept:
        """End what runs under this marker."""
        limit_s = grace_s + SWEEP_MARGIN_S
        try:
            async with asyncio.timeout(limit_s):
                return await self._session.sweep(marker, grace_s, term=True)
        except TimeoutError:
            raise HandshakeError(f"it did not say within {limit_s:g} s how the job ended there") from None

    async def _ask_gpus(self) -> GpuFact | None:
        """Ask the vendor's tool by way of the probe; None where that does not work: the rest is worth telling."""
        session = self._session
        try:
            async with asyncio.timeout(GPU_LIMIT_S):
                session.begin_probe(self.node.python, _tool_path(self.node))
                fact = parse_gpus(await session.ask_probe(encode_gpus(SMI_LIMIT_S)))
                await session.end_probe(encode_end())
                return fact
        except (HandshakeError, TimeoutError):
            return None


class Sweeper:
    """Ends jobs wherever it comes. Entries of the map that are one machine see the same job; the first one ends it."""

    def __init__(self, wanted: Callable[[str], bool], grace_s: float, found: Callable[[str], None]) -> None:
        self._wanted, self._grace_s, self._found = wanted, grace_s, found
        self._swept: dict[str, asyncio.Event] = {}

    async def end(self, visit: Visit) -> list[EndedJob]:
        """End the jobs that are wanted on this node, look again, and return what became of each that was there."""
        jobs = [job for job in (await visit.survey()).jobs if self._wanted(job.job_id)]
        swept = {_key(job): await self._sweep(visit, job) for job in jobs}
        if not jobs:
            return []
        left = {_key(job): job for job in (await visit.survey()).jobs if self._wanted(job.job_id)}
        before = {_key(job): job for job in jobs}
        return [
            _ended(visit.node.id, before.get(key), swept.get(key), left.get(key))
            for key in {**before, **left}
            if swept.get(key) or key in left
        ]

    async def _sweep(self, visit: Visit, job: LeftJob) -> NodeSwept | None:
        """End one; None where another visit did."""
        if done := self._swept.get(_key(job)):
            await done.wait()
            return None
        done = self._swept[_key(job)] = asyncio.Event()
        self._found(job.job_id)
        try:
            return await visit.sweep(job.marker, self._grace_s)
        finally:
            done.set()


def _key(job: LeftJob) -> str:
    return job.marker[:MARKER_CHARS]  # all that is known of it where only its keepers are left


def _ended(node_id: str, before: LeftJob | None, swept: NodeSwept | None, left: LeftJob | None) -> EndedJob:
    survivors = tuple(Survivor(one.pid, one.state, one.command) for one in left.processes) if left else ()
    if left and not survivors:  # its keepers alone
        survivors = tuple(Survivor(pid, "?", "gpulayer's supervisor or guard") for pid in left.keepers)
    job = before or left
    if job is None:
        raise ValueError(f"nothing was there on {node_id}")
    return EndedJob(node_id, job.job_id, job.count + len(job.keepers), swept.killed if swept else 0, survivors)


def scope_of(node: Node, *, practice: bool) -> str:
    """Return what a practice map's nodes, which are one machine, have their leases told apart by."""
    return f"{node.address or node.ssh}:{node.port or 22}" if practice else ""


def _tool_path(node: Node) -> dict[str, str]:
    """Return the PATH that the map has for a node: there, too, a vendor's tool may be. `$` would be a placeholder."""
    path = node.env.get("PATH", "$")
    return {} if "$" in path else {"PATH": path}
