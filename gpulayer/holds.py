"""All nodes of a job at once: held for it, or none of them. Each node itself says who has it (node_lease.py there).

Two launches that meet each other's nodes would wait for each other for ever. So the older one tries again for a while
where a younger one has come first, and the younger one, wherever it meets an older one, gives everything back.
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpulayer.errors import NodeError, NodeHeldError
from gpulayer.events import Event, Notice
from gpulayer.inventory import NodeLease
from gpulayer.lease_folder import user_name
from gpulayer.placement import Hold, longer
from gpulayer.ranges import fold
from gpulayer.session import answering
from gpulayer.untrusted import one_line

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from gpulayer.plan import NodeCommand, Plan
    from gpulayer.remote import RemoteNode

INSIST_S = 3.0  # how long the older one tries again
INSIST_PAUSE_S = 0.1
WAIT_PAUSE_S = 1.0
HINT = "wait for it with `--wait`, or leave the node out with `-x/--exclude`; `gpulayer ps` shows what runs there"
CHECK_HINT = "leave the node out with `-x/--exclude`; `gpulayer ps` shows what runs there"


@dataclass(frozen=True, slots=True)
class HoldSettings:
    """In whose name nodes are held, and until when (on the monotonic clock) to wait for those that others have."""

    hold: Hold
    wait_until_s: float = 0.0


def new_hold(job_id: str) -> Hold:
    """Return what is said of a job that begins now, here, for whoever runs this."""
    return Hold(job_id, user_name(os.geteuid()), socket.gethostname(), time.time())


def lease_of(plan: Plan, command: NodeCommand, hold: Hold) -> NodeLease:
    """Return what a job wants of one node. The nodes of a practice map are one machine, and differ in their ports."""
    scope = f"{command.address}:{command.port or 22}" if plan.practice else ""
    return NodeLease(hold.job_id, hold.user, hold.login, hold.since, scope, command.gpus)


def held_by(leases: Iterable[NodeLease], hint: str = HINT) -> NodeHeldError:
    """Return the error of a node that is held already."""
    said = [f"job {_who(lease)}" for lease in leases]
    return NodeHeldError(f"held by {one_line(' and by '.join(dict.fromkeys(said)))}", hint=hint)


def _who(lease: NodeLease) -> str:
    words = str(lease.hold).removeprefix("job ")
    return words if lease.gpus is None else f"{words}, {_gpus(lease.gpus)}"


def _gpus(gpus: Sequence[int]) -> str:
    return f"GPU{'s' if len(gpus) != 1 else ''} {', '.join(map(str, gpus))}"


async def find_held(plan: Plan, nodes: Sequence[RemoteNode], hold: Hold) -> dict[str, NodeError]:
    """Hold nothing: return the errors of the nodes that others have, and of those that do not answer, by node id."""

    async def look(node: RemoteNode) -> NodeError | None:
        wanted = lease_of(plan, node.command, hold)
        try:
            async with answering(node.command.ssh):
                survey = await node.survey()
        except NodeError as error:
            return error
        held = [lease for lease in survey.leases if lease.meets(wanted.scope, wanted.gpus)]
        return held_by(held, CHECK_HINT) if held else None

    errors = await asyncio.gather(*map(look, nodes))
    return {node.command.node_id: error for node, error in zip(nodes, errors, strict=True) if error}


class Holding:
    """The nodes of one job, on the way to being held. `emit` is told what is waited for."""

    def __init__(
        self, plan: Plan, nodes: Sequence[RemoteNode], settings: HoldSettings, emit: Callable[[Event], None]
    ) -> None:
        self._plan, self._nodes, self._settings, self._emit = plan, nodes, settings, emit
        self._held: list[RemoteNode] = []
        self._problems: dict[str, NodeError] = {}

    async def run(self) -> dict[str, NodeError]:
        """Hold all nodes and return {}; or none of them, and return each error by node id, in node order."""
        waiting = False
        while await self._attempt():
            only_held = all(isinstance(error, NodeHeldError) for error in self._problems.values())
            if not only_held:
                return self._problems
            if time.monotonic() + WAIT_PAUSE_S > self._settings.wait_until_s:
                return (
                    {node_id: _after_waiting(one) for node_id, one in self._problems.items()}
                    if waiting
                    else self._problems
                )
            if not waiting:
                waiting = True
                ids = fold(self._problems)
                self._emit(Notice(f"waiting for {ids}, {next(iter(self._problems.values()))}"))
            await asyncio.sleep(WAIT_PAUSE_S)
        if waiting:
            self._emit(Notice("all nodes are free now"))
        return {}

    async def _attempt(self) -> bool:
        """Try once; True where it did not work out, with the `_problems` and nothing held."""
        self._held, self._problems = [], {}
        await asyncio.gather(*map(self._hold, self._nodes))
        order = [node.command.node_id for node in self._nodes]
        self._problems = {node_id: self._problems[node_id] for node_id in order if node_id in self._problems}
        return bool(self._problems)

    async def _hold(self, node: RemoteNode) -> None:
        wanted = lease_of(self._plan, node.command, self._settings.hold)
        insist_until_s = time.monotonic() + INSIST_S
        while not self._problems:
            try:
                async with answering(node.command.ssh):
                    holders = await node.hold(wanted, self._plan.lost_after_s)
            except NodeError as error:
                await self._give_up(node, error)
                return
            if not holders:
                self._held.append(node)
                if self._problems:  # it came too late
                    await self._release()
                return
            if time.monotonic() > insist_until_s or not all(_is_younger(one, wanted) for one in holders):
                await self._give_up(node, held_by(holders))
                return
            await asyncio.sleep(INSIST_PAUSE_S)

    async def _give_up(self, node: RemoteNode, error: NodeError) -> None:
        self._problems[node.command.node_id] = error
        await self._release()

    async def _release(self) -> None:
        held, self._held = self._held, []
        for node, result in zip(held, await asyncio.gather(*map(_release, held), return_exceptions=True), strict=True):
            if isinstance(result, NodeError):
                self._problems[node.command.node_id] = result
            elif isinstance(result, BaseException):
                raise result


def _after_waiting(error: NodeError) -> NodeError:
    return NodeHeldError(str(error), hint=longer(error.hint))


async def _release(node: RemoteNode) -> None:
    async with answering(node.command.ssh):
        await node.release()


def _is_younger(other: NodeLease, wanted: NodeLease) -> bool:
    return (other.since, other.job_id) > (wanted.since, wanted.job_id)
