"""Preflight: asks every node what it is like and whether the nodes reach each other, before anything starts.

checks.py judges what is seen here; facts.py has the words that go over the wire; probe.py answers on the nodes.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from gpulayer.checks import judge
from gpulayer.checks_reach import choose_port, mesh_targets
from gpulayer.errors import HandshakeError, NodeError, RefusedError
from gpulayer.events import Event, NodeChecked
from gpulayer.facts import (
    FactsRequest,
    NodeFacts,
    ReachResult,
    ReachTarget,
    encode_end,
    encode_reach,
    encode_rendezvous,
    parse_facts,
    parse_reach,
    parse_rendezvous,
)
from gpulayer.findings import CheckOptions, Finding, Observations, Severity, findings_json, render_findings
from gpulayer.ranges import fold

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence

    from gpulayer.plan import Plan
    from gpulayer.remote import RemoteNode

END_LIMIT_S = 2.0
ANSWER_MARGIN_S = 1.0
RENDEZVOUS = "rendezvous"


@dataclass(frozen=True, slots=True)
class PreflightSettings:
    """What to check for. `script` None: no script is looked at; `replan` returns the plan with another port."""

    options: CheckOptions
    script: str | None
    is_module: bool
    replan: Callable[[int], Plan]


@dataclass(frozen=True, slots=True)
class PreflightResult:
    """What was found, the plan that it holds for, and what to tell where that is not the plan that was asked about."""

    plan: Plan
    findings: list[Finding]
    moved: str | None
    problems: dict[str, NodeError]
    observations: Observations

    @property
    def failures(self) -> list[Finding]:
        """What refuses the job."""
        return [finding for finding in self.findings if finding.severity is Severity.FAILURE]

    @property
    def warnings(self) -> list[Finding]:
        """What the job can live with."""
        return [finding for finding in self.findings if finding.severity is Severity.WARNING]

    def notices(self) -> list[str]:
        """Return what to tell where the job goes on: that the port has moved, and each warning."""
        return [*([self.moved] if self.moved else []), *(render_findings([one]).rstrip() for one in self.warnings)]

    def error(self) -> RefusedError:
        """Return the error of a job that cannot start: nodes that cannot take part, then all that was found."""
        failing = {node_id for finding in self.failures for node_id in finding.node_ids}
        ids = [node.node_id for node in self.plan.nodes if node.node_id in failing]
        message = f"the job would not run on {fold(ids)}, so nothing was started"
        return RefusedError(
            cannot_take_part(self.plan, self.problems) if self.problems else message,
            self.problems,
            render_findings(self.findings),
            findings_json(self.findings),
        )


def cannot_take_part(plan: Plan, problems: Mapping[str, NodeError]) -> str:
    """Return what is said where some nodes cannot take part."""
    who = f"{len(problems)} of {plan.nnodes} nodes" if plan.nnodes > 1 else "the node"
    return f"{who} cannot take part, so nothing was started"


class Preflight:
    """One round of checks. Nodes that already have one of `problems` are left alone; new ones are added to it."""

    def __init__(
        self,
        plan: Plan,
        nodes: Sequence[RemoteNode],
        settings: PreflightSettings,
        problems: dict[str, NodeError],
        emit: Callable[[Event], None],
    ) -> None:
        self._plan, self._nodes, self._settings, self._problems = plan, nodes, settings, problems
        self._emit = emit
        self._deadline_s = time.monotonic() + settings.options.limit_s
        self._nonces = [secrets.token_hex(8) for _ in nodes]
        self._facts: dict[int, NodeFacts] = {}
        self._skew_s: dict[int, float] = {}
        self._missing: dict[int, str] = {}
        self._locked: set[int] = set()
        self._moved: str | None = None

    async def run(self) -> PreflightResult:
        """Check everything on all nodes at once. A node that breaks the protocol is one of the result's `problems`."""
        await self._on_each([0], self._reserve)
        await self._on_each([rank for rank in range(len(self._nodes)) if rank not in self._missing], self._ask_facts)
        await self._on_each([rank for rank in self._facts if rank == 0], self._settle_port_in_time)
        rendezvous: dict[int, ReachResult] = {}
        mesh: dict[tuple[int, int], ReachResult] = {}
        await self._on_each(self._facts, lambda rank: self._reach(rank, rendezvous, mesh))
        await self._on_each(self._facts, self._end)
        seen = Observations(self._facts, self._missing, rendezvous, mesh, self._skew_s, frozenset(self._locked))
        findings = judge(self._plan, seen, self._settings.options)
        return PreflightResult(self._plan, findings, self._moved, self._problems, seen)

    async def _on_each(self, ranks: Iterable[int], step: Callable[[int], Awaitable[None]]) -> None:
        """Take one step on some nodes at once, and note whose NodeError it was."""
        ids = {rank: self._plan.nodes[rank].node_id for rank in ranks}
        left = [rank for rank, node_id in ids.items() if node_id not in self._problems]
        for rank, result in zip(left, await asyncio.gather(*map(step, left), return_exceptions=True), strict=True):
            if isinstance(result, NodeError):
                self._problems[ids[rank]] = result
            elif isinstance(result, BaseException):
                raise result

    async def _reserve(self, rank: int) -> None:
        try:
            async with asyncio.timeout(self._settings.options.limit_s / 2):  # the others are asked after it
                if not await self._nodes[rank].reserve(self._plan.master_port):
                    self._locked.add(self._plan.master_port)
        except TimeoutError:
            self._missing[rank] = "its rendezvous port"

    async def _ask_facts(self, rank: int) -> None:
        node, plan, settings = self._nodes[rank], self._plan, self._settings
        command = plan.nodes[rank]
        request = FactsRequest(
            node_rank=rank,
            master_addr=plan.master_addr,
            master_port=plan.master_port,
            workdir=command.workdir,
            script=None if settings.is_module else settings.script,
            module=settings.script if settings.is_module else None,
            scratch=command.job_dir.rpartition("/")[0] or "/",
            nonce=self._nonces[rank],
            smi_limit_s=settings.options.smi_limit_s,
            command=command.argv[0] if plan.launcher == "command" else None,
        )
        try:
            async with self._time_left():
                node.start_probe()
                line = await node.ask_probe(request.encode())
        except TimeoutError:
            self._missing[rank] = ""
            return
        self._facts[rank] = facts = parse_facts(line)
        self._emit(NodeChecked(rank))
        if facts.time_s is not None:
            self._skew_s[rank] = facts.time_s - time.time()

    async def _settle_port_in_time(self, rank: int) -> None:
        try:
            async with self._time_left():
                await self._settle_port(rank)
        except TimeoutError:
            self._missing[rank] = "its rendezvous port"

    async def _settle_port(self, rank: int) -> None:
        """Reserve the next free port where the default one is taken, and have the plan and the head's probe follow.

        A port that the supervisor could not have and the probe could is held by another job of gpulayer.
        """
        node, head, wanted = self._nodes[rank], self._facts[rank], self._plan.master_port
        if wanted not in self._locked:
            return
        if head.port and head.port.state != "free":
            self._locked.clear()
        excluded = set(self._locked)
        while (choice := choose_port(self._plan, head, excluded)).port != wanted:
            if not await node.reserve(choice.port):
                excluded.add(choice.port)
                continue
            self._moved = choice.notice
            self._plan = self._settings.replan(choice.port)
            for one in self._nodes:
                one.follow(self._plan)
            answer = parse_rendezvous(await node.ask_probe(encode_rendezvous(choice.port)))
            self._facts[rank] = replace(head, port=answer.port, free_ports=answer.free_ports)
            self._locked.clear()
            return

    async def _reach(
        self, rank: int, rendezvous: dict[int, ReachResult], mesh: dict[tuple[int, int], ReachResult]
    ) -> None:
        """Have a node connect to the rendezvous and to its part of the mesh."""
        others = mesh_targets(len(self._nodes))[rank]
        targets = [*self._rendezvous_target(), *self._mesh_targets(others)]
        left_s = self._deadline_s - time.monotonic() - ANSWER_MARGIN_S
        limit_s = min(self._settings.options.reach_limit_s, max(ANSWER_MARGIN_S, left_s))
        try:
            # Also where one node has used up the time: those that answer are checked against each other.
            async with asyncio.timeout(limit_s + ANSWER_MARGIN_S):
                line = await self._nodes[rank].ask_probe(encode_reach(targets, limit_s))
        except TimeoutError:
            self._missing[rank] = "its connections to the others"
            return
        for result in parse_reach(line, targets):
            if result.name == RENDEZVOUS:
                rendezvous[rank] = result
            else:
                mesh[rank, int(result.name)] = result

    def _rendezvous_target(self) -> list[ReachTarget]:
        head = self._facts.get(0)
        if head is None or head.port is None or head.port.state != "free" or self._locked:
            return []
        plan = self._plan
        return [ReachTarget(RENDEZVOUS, plan.master_addr, plan.master_port, self._nonces[0])]

    def _mesh_targets(self, others: Sequence[int]) -> list[ReachTarget]:
        listeners = {rank: facts.listener for rank, facts in self._facts.items() if facts.listener}
        return [
            ReachTarget(str(other), self._plan.nodes[other].address, listeners[other].port, self._nonces[other])
            for other in others
            if other in listeners
        ]

    async def _end(self, rank: int) -> None:
        """Let the probe go: the head's listens where torchrun is about to."""
        try:
            async with asyncio.timeout(END_LIMIT_S):
                await self._nodes[rank].end_probe(encode_end())
        except TimeoutError:
            raise HandshakeError("its probe does not end") from None

    def _time_left(self) -> asyncio.Timeout:
        return asyncio.timeout(max(0.0, self._deadline_s - time.monotonic()))
