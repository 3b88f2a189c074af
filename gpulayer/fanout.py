"""All nodes of a job at once: ready everywhere, start everywhere, the first failure, the stop, an end for every node.

What an event means is outcome.py's matter; this file acts on it.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol, TypeVar

from gpulayer import ending
from gpulayer.bootstrap import bootstrap_command
from gpulayer.errors import HandshakeError, NodeError, RefusedError
from gpulayer.events import Event, NodeLost, Notice, Output, Stage, StageReached
from gpulayer.outcome import Ledger, NodeRecord
from gpulayer.preflight import Preflight, cannot_take_part
from gpulayer.remote import RemoteNode
from gpulayer.ssh import SshTarget

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

    from gpulayer.plan import NodeCommand, Plan
    from gpulayer.preflight import PreflightResult, PreflightSettings
    from gpulayer.ssh import SshConnector, SshLink

Result = TypeVar("Result")

TICK_S = 0.2
HANDSHAKE_LIMIT_S = 30.0
DISMISS_LIMIT_S = 3.0
DRAIN_LIMIT_S = 60.0
VERIFY_MARGIN_S = 5.0
SWEEP_LIMIT_S = ending.KILL_LIMIT_S + 5.0
VERIFY_PAUSE_S = 1.0


class Observer(Protocol):
    """Whoever wants to know what happens: the run directory, the screen. Must never block."""

    def handle(self, event: Event, at_s: float) -> None:
        """Take note of one event, `at_s` seconds after the job began."""

    def tick(self, at_s: float) -> None:
        """Time has passed."""


class Fanout:
    """One run of a plan. `run` returns the ledger; `interrupt` may be called at any time from the same thread."""

    def __init__(
        self, plan: Plan, connector: SshConnector, observer: Observer, preflight: PreflightSettings | None = None
    ) -> None:
        self.ledger = Ledger([NodeRecord(node.node_rank, node.node_id, node.ranks) for node in plan.nodes])
        self.checked: PreflightResult | None = None
        self._plan, self._connector, self._observer, self._preflight = plan, connector, observer, preflight
        self._only_check = False
        self._problems: dict[str, NodeError] = {}
        self._began_s = time.monotonic()
        self._started_s: float | None = None
        self._pinged_s = 0.0
        self._drain_until_s = 0.0
        self._nodes: list[RemoteNode] = []
        self._links: list[SshLink] = []
        self._verifying: dict[int, asyncio.Task[None]] = {}
        self._ending = self._closed = False
        self._signals = 0
        self._changed = asyncio.Event()

    async def run(self) -> Ledger:
        """Run the job to its end.

        Raises RefusedError when nodes cannot take part or would not run it; nothing was started then.
        """
        async with self._connecting():
            if await self._ready_all():
                self._start_all()
                await self._supervise()
            self._emit(StageReached(Stage.DONE))
        return self.ledger

    async def check(self) -> PreflightResult | None:
        """Preflight alone: return what was found, None when a signal came first."""
        self._only_check = True
        async with self._connecting():
            if await self._on_all(self._greet) and await self._check():
                await self._dismiss()
        return None if self._signals else self.checked

    @contextlib.asynccontextmanager
    async def _connecting(self) -> AsyncIterator[None]:
        self._nodes = [RemoteNode(self._plan, node.node_rank, self._emit) for node in self._plan.nodes]
        try:
            self._emit(StageReached(Stage.CONNECTING))
            yield
        finally:
            await self._close()

    def interrupt(self, signal_number: int) -> None:
        """A signal that ends the job: the first time with the grace, the second at once, the third leaves."""
        if self._closed:
            return  # too late to change how it ended
        self._signals += 1
        self.ledger.interrupted(signal_number, self._now_s())
        if self._started_s is not None:
            if self._signals == 1:
                self.tell("interrupted; once more kills the job at once")
                self._end()
            elif self._signals == 2:
                self.tell("killing the job on every node; once more leaves at once, whatever still runs")
                self._kill()
        self._changed.set()

    def tell(self, text: str) -> None:
        """Say something about the whole job."""
        self._emit(Notice(text))

    # -- before the start

    async def _ready_all(self) -> bool:
        """Bring all nodes to where they can start; False when a signal came first. Raises RefusedError.

        A node that cannot be reached does not keep the others from being looked at: all that is wrong is told at once.
        """
        if not await self._on_all(self._greet) or not await self._check():
            return False
        if self.checked and (self._problems or self.checked.failures):
            await self._dismiss()
            raise self.checked.error()
        if not await self._on_all(self._prepare):
            return False
        if self._problems:
            await self._dismiss()
            raise RefusedError(cannot_take_part(self._plan, self._problems), self._in_order(self._problems))
        return True

    async def _on_all(self, step: Callable[[RemoteNode], Awaitable[None]]) -> bool:
        """Take one step on all nodes at once that have no problem yet; False when a signal came first."""
        nodes = [node for node in self._nodes if node.command.node_id not in self._problems]
        for node, result in zip(nodes, await self._unless_interrupted([step(node) for node in nodes]), strict=False):
            if isinstance(result, NodeError):
                self._problems[node.command.node_id] = result
            elif isinstance(result, BaseException):
                raise result
        return not self._signals

    async def _check(self) -> bool:
        """Preflight, if it was asked for; False when a signal came first."""
        if len(self._problems) < len(self._nodes):
            self._emit(StageReached(Stage.PREPARING))
        if self._preflight is None:
            return True
        preflight = Preflight(self._plan, self._nodes, self._preflight, self._problems, self._emit)
        for result in await self._unless_interrupted([preflight.run()]):
            if isinstance(result, BaseException):
                raise result
            self.checked = replace(result, problems=self._in_order(self._problems))
            self._plan = result.plan
            if not self._only_check and not result.failures and not self._problems:
                for text in result.notices():
                    self.tell(text)
        return not self._signals

    def _in_order(self, problems: dict[str, NodeError]) -> dict[str, NodeError]:
        ids = [node.command.node_id for node in self._nodes]
        return {node_id: problems[node_id] for node_id in ids if node_id in problems}

    async def _unless_interrupted(self, steps: Sequence[Awaitable[Result]]) -> list[Result | BaseException]:
        """Await all steps and return how each went; nothing, and nothing goes on, when a signal came first."""
        tasks = [asyncio.ensure_future(step) for step in steps]
        waiting = asyncio.gather(*tasks, return_exceptions=True)
        waiting.add_done_callback(lambda _: self._changed.set())
        while not waiting.done() and not self._signals:
            await self._wait()
            self._tick()
        if not self._signals:
            return waiting.result()
        for task in tasks:
            task.cancel()
        await waiting
        await self._dismiss()
        return []

    async def _greet(self, node: RemoteNode) -> None:
        link = await self._connector.connect(_target(node.command))
        self._links.append(link)
        async with self._answering(node):
            channel = await link.open(bootstrap_command(node.command.python), node)
            self._emit(await node.greet(channel))

    async def _prepare(self, node: RemoteNode) -> None:
        async with self._answering(node):
            self._emit(await node.prepare())

    @contextlib.asynccontextmanager
    async def _answering(self, node: RemoteNode) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(HANDSHAKE_LIMIT_S):
                yield
        except TimeoutError:
            raise HandshakeError(
                f"logged in, but no supervisor answered within {HANDSHAKE_LIMIT_S:g} s",
                hint=f"see whether its login shell starts commands at all: `ssh {node.command.ssh} true`",
            ) from None

    async def _dismiss(self) -> None:
        """Nothing starts: end the supervisors that wait, and see them go."""
        for node in self._nodes:
            node.dismiss()
        waits = [asyncio.create_task(node.closed.wait()) for node in self._nodes if node.hello]
        if waits:
            _, pending = await asyncio.wait(waits, timeout=DISMISS_LIMIT_S)
            for wait in pending:
                wait.cancel()

    # -- while it runs

    def _start_all(self) -> None:
        self._emit(StageReached(Stage.STARTING))
        self._started_s = time.monotonic()
        for node in self._nodes:
            node.start()

    async def _supervise(self) -> None:
        running = False
        while not all(self._settled(node) for node in self._nodes) and self._signals < 3:
            await self._wait()
            self._tick()
            if not running and not self._ending and self.ledger.all_joined:
                running = True
                self._emit(StageReached(Stage.RUNNING))

    async def _wait(self) -> None:
        """Wait until something has happened, or it is time for a tick."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(TICK_S):
                await self._changed.wait()
        self._changed.clear()

    def _settled(self, node: RemoteNode) -> bool:
        record = self.ledger.nodes[node.command.node_rank]
        verifying = self._verifying.get(record.node_rank)
        return record.over or (verifying is not None and verifying.done())

    def _emit(self, event: Event) -> None:
        if self._closed:
            return  # a channel that this end has closed is no news
        at_s = self._now_s()
        if isinstance(event, Output):
            self._observer.handle(event, at_s)
            return
        self.ledger.apply(event, at_s)
        self._observer.handle(event, at_s)
        if isinstance(event, NodeLost):
            self._verifying[event.node_rank] = asyncio.create_task(self._verify(self._nodes[event.node_rank]))
        if self.ledger.cause and not self._ending and self._started_s is not None:
            self._end()
        self._changed.set()

    def _tick(self) -> None:
        now = time.monotonic()
        self._observer.tick(self._now_s())
        if now - self._pinged_s > min(5.0, self._plan.lost_after_s / 4):
            self._pinged_s = now
            for node in self._nodes:
                node.ping()
        if self._started_s is None:
            return
        for node in self._nodes:
            if not node.over and now - node.last_heard > self._plan.lost_after_s:
                node.lose(f"nothing was heard of it for {self._plan.lost_after_s:g} s")
        self._check_limits(now - self._started_s)
        self._limit_draining(now)

    def _check_limits(self, running_s: float) -> None:
        plan = self._plan
        if self._ending or all(record.status for record in self.ledger.nodes):
            return
        if plan.timeout_s is not None and running_s > plan.timeout_s:
            self.ledger.timed_out(plan.timeout_s, self._now_s())
            self._end()
        elif running_s > plan.join_timeout_s and not self.ledger.all_joined:
            self.ledger.join_timed_out(plan.join_timeout_s, self._now_s())
            self._end()

    def _limit_draining(self, now: float) -> None:
        """Once a job that failed has ended everywhere, do not wait for ever for output that a slow link holds up."""
        if not self._ending or not all(record.swept or record.lost for record in self.ledger.nodes):
            return
        if not self._drain_until_s:
            self._drain_until_s = now + DRAIN_LIMIT_S
        if now > self._drain_until_s or self._signals > 1:
            for node in self._nodes:
                node.leave()

    # -- the end

    def _end(self) -> None:
        """End the job everywhere, with the grace."""
        if self._ending:
            return
        self._ending = True
        self._emit(StageReached(Stage.ENDING))
        for node in self._living():
            node.stop(self._plan.grace_s)

    def _kill(self) -> None:
        for node in self._living():
            node.kill()

    def _living(self) -> list[RemoteNode]:
        records = self.ledger.nodes
        return [node for node in self._nodes if not node.over and records[node.command.node_rank].status is None]

    async def _verify(self, lost: RemoteNode) -> None:
        """Log in anew, end what the lost node still runs and see that it is gone; try for as long as the grace."""
        record = self.ledger.nodes[lost.command.node_rank]
        if record.swept:
            return  # only its last output is missing
        self.tell(f"logging in to {record.node_id} again, to see that nothing is left there")
        give_up_s = time.monotonic() + self._plan.grace_s + VERIFY_MARGIN_S
        while (left_s := give_up_s - time.monotonic()) > 0 and self._signals < 2:
            try:
                async with asyncio.timeout(left_s):
                    link = await self._connector.connect(_target(lost.command))
                self._links.append(link)
                async with asyncio.timeout(left_s + SWEEP_LIMIT_S):
                    sweeper = RemoteNode(self._plan, lost.command.node_rank, self._emit)
                    channel = await link.open(bootstrap_command(lost.command.python), sweeper)
                    self._emit(await sweeper.sweep(channel, lost, max(0.0, left_s - VERIFY_MARGIN_S)))
                    break
            except (NodeError, TimeoutError):
                await asyncio.sleep(min(VERIFY_PAUSE_S, max(0.0, left_s)))
        self._changed.set()

    async def _close(self) -> None:
        self._closed = True
        for task in self._verifying.values():
            task.cancel()
        await asyncio.gather(*self._verifying.values(), return_exceptions=True)
        for node in self._nodes:
            node.close()
        for link in self._links:
            link.abort()
        await self._connector.close()

    def _now_s(self) -> float:
        return time.monotonic() - self._began_s


def _target(command: NodeCommand) -> SshTarget:
    return SshTarget(command.ssh, command.user, command.port)
