"""All nodes or none: two jobs that want the same nodes, each node a supervisor of its own over pipes."""

from __future__ import annotations

import asyncio
import re
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from gpulayer import holds
from gpulayer.bootstrap import bootstrap_command
from gpulayer.errors import NodeHeldError
from gpulayer.events import Event, Notice
from gpulayer.holds import Holding, HoldSettings, find_held, lease_of
from gpulayer.placement import Hold
from gpulayer.remote import RemoteNode
from tests.support.pipes import PipeConnector, pipe_plan

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

    import pytest

    from gpulayer.plan import Plan

OLDER = Hold("older", "me", "login-1", 1_790_000_000.25)
YOUNGER = Hold("younger", "you", "login-2", 1_790_000_000.75)


class Job:
    """One job's end of the supervisors on all nodes."""

    def __init__(self, plan: Plan, hold: Hold) -> None:
        self.plan, self.hold = plan, hold
        self.told: list[Event] = []
        self.heard = asyncio.Event()
        self.nodes = [RemoteNode(plan, node.node_rank, self.tell) for node in plan.nodes]

    def tell(self, event: Event) -> None:
        """Keep what is told."""
        self.told.append(event)
        self.heard.set()

    async def greet(self, connector: PipeConnector) -> None:
        """Start a supervisor for each node."""
        for node in self.nodes:
            link = await connector.connect()
            await node.greet(await link.open(bootstrap_command(node.python), node))

    async def take(self, node_rank: int) -> tuple[object, ...]:
        """Hold one node alone."""
        node = self.nodes[node_rank]
        return await node.hold(lease_of(self.plan, node.command, self.hold), 30.0)

    async def run(self, wait_s: float = 0.0) -> dict[str, Any]:
        """Hold all nodes."""
        settings = HoldSettings(self.hold, time.monotonic() + wait_s)
        return dict(await Holding(self.plan, self.nodes, settings, self.tell).run())

    async def look(self) -> dict[str, Any]:
        """Hold nothing, and look."""
        return dict(await find_held(self.plan, self.nodes, self.hold))


def meet(plan: Plan, scene: Callable[[Job, Job], Awaitable[None]]) -> None:
    """Play a scene with two jobs on the same nodes."""

    async def whole() -> None:
        connector = PipeConnector()
        jobs = (Job(plan, OLDER), Job(plan, YOUNGER))
        try:
            async with asyncio.timeout(60):
                for job in jobs:
                    await job.greet(connector)
                await scene(*jobs)
        finally:
            await connector.close()

    asyncio.run(whole())


def test_the_older_of_two_that_meet_gets_all(tmp_path: Path) -> None:
    """Each has one of the two nodes: the younger gives its own back at once, and the older has both."""

    async def scene(older: Job, younger: Job) -> None:
        assert await older.take(0) == ()
        assert await younger.take(1) == ()
        won, lost = await asyncio.gather(older.run(), younger.run())
        assert won == {}
        assert "here-0" in lost
        assert all(isinstance(error, NodeHeldError) for error in lost.values())
        assert {str(error)[:22] for error in (await younger.look()).values()} == {"held by job older of m"}
        assert len(await younger.look()) == 2

    meet(pipe_plan(tmp_path, ["unused"], nnodes=2), scene)


def test_the_older_gives_up_where_the_younger_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A younger job that has started keeps its nodes; the other one gets none, and says who has which since when."""
    monkeypatch.setattr(holds, "INSIST_S", 0.3)

    async def scene(older: Job, younger: Job) -> None:
        assert await younger.take(1) == ()
        lost = await older.run()
        assert list(lost) == ["here-1"]
        said = r"held by job younger of you on login-2 since 2026-\d\d-\d\d \d\d:\d\d:\d\d"
        assert re.fullmatch(said, str(lost["here-1"]))
        assert "--wait" in str(lost["here-1"].hint)
        assert list(await older.look()) == ["here-1"]  # what it had of the others is free again

    meet(pipe_plan(tmp_path, ["unused"], nnodes=3), scene)


def test_waiting_for_a_node(tmp_path: Path) -> None:
    """With a time to wait, it is told once what for, nothing is held meanwhile, and it goes on once all is free."""

    async def scene(older: Job, younger: Job) -> None:
        assert await older.take(0) == ()
        waiting = asyncio.create_task(younger.run(wait_s=30))
        await younger.heard.wait()
        assert list(await older.look()) == ["here-0"]
        await older.nodes[0].release()
        assert await waiting == {}
        texts = [event.text for event in younger.told if isinstance(event, Notice)]
        assert [re.sub(r" since .*", "", text) for text in texts] == [
            "waiting for here-0, held by job older of me on login-1",
            "all nodes are free now",
        ]
        assert set(await older.look()) == {"here-0", "here-1"}

    meet(pipe_plan(tmp_path, ["unused"], nnodes=2), scene)


def test_parts_of_a_machine(tmp_path: Path) -> None:
    """Jobs with other GPUs of one machine do not meet; who wants all of it meets both, and hears of their GPUs."""
    plan = pipe_plan(tmp_path, ["unused"])
    part = {gpus: replace(plan, nodes=(replace(plan.nodes[0], gpus=gpus),)) for gpus in ((0, 1), (2,), None)}

    async def scene(older: Job, younger: Job) -> None:
        older.plan, younger.plan = part[0, 1], part[(2,)]
        older.nodes[0].follow(older.plan)
        younger.nodes[0].follow(younger.plan)
        assert await older.run() == await younger.run() == {}
        whole = Job(part[None], Hold("third", "me", "login-1", 1_800_000_000.0))
        connector = PipeConnector()
        await whole.greet(connector)
        (error,) = (await whole.run()).values()
        said = re.sub(r"since \S+ \S+,", "since then,", str(error))
        assert "job older of me on login-1 since then, GPUs 0, 1" in said
        assert "job younger of you on login-2 since then, GPU 2" in said
        await connector.close()

    meet(plan, scene)
