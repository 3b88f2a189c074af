"""All nodes of a job at once: ready everywhere, start everywhere, the first failure, the stop, an end for every node.

What an event means is outcome.py's matter; this file acts on it.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import replace
from typing import TYPE_CHECKING, NoReturn, Protocol, TypeVar

from gpulayer.bootstrap import bootstrap_command
from gpulayer.collecting import Collecting, Collection
from gpulayer.ending import KILL_LIMIT_S
from gpulayer.errors import NodeError, RefusedError
from gpulayer.events import CommandExited, Event, NodeLost, Notice, Output, Stage, StageReached
from gpulayer.holds import Holding, HoldSettings, find_held, new_hold
from gpulayer.outcome import Ledger, NodeRecord
from gpulayer.preflight import Preflight, cannot_take_part
from gpulayer.remote import RemoteNode
from gpulayer.sending import Sending
from gpulayer.session import answering
from gpulayer.ssh import SshTarget
from gpulayer.verify import Verifier

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
    from pathlib import Path

    from gpulayer.bundle import Bundle
    from gpulayer.plan import Plan
    from gpulayer.preflight import PreflightResult, PreflightSettings
    from gpulayer.ssh import SshConnector, SshLink

Result = TypeVar("Result")

TICK_S = 0.2
DISMISS_LIMIT_S = 3.0
DRAIN_LIMIT_S = 60.0
END_LIMIT_S = KILL_LIMIT_S + DRAIN_LIMIT_S  # beyond the grace: on a slow link the news wait behind output
LEAVE_LIMIT_S = 5.0


class Observer(Protocol):
    """Whoever wants to know what happens: the run directory, the screen. Must never block."""

    def handle(self, event: Event, at_s: float) -> None:
        """Take note of one event, `at_s` seconds after the job began."""

    def tick(self, at_s: float) -> None:
        """Time has passed."""


class Fanout:
    """One run of a plan. `run` returns the ledger; `interrupt` may be called at any time from the same thread."""

    def __init__(
        self,
        plan: Plan,
        connector: SshConnector,
        observer: Observer,
        preflight: PreflightSettings | None = None,
        holds: HoldSettings | None = None,
    ) -> None:
        self.ledger = Ledger([NodeRecord(node.node_rank, node.node_id, node.ranks) for node in plan.nodes])
        self.checked: PreflightResult | None = None
        self.bundle: Bundle | None = None
        self.outputs_to: Callable[[int], Path] | None = None  # by node rank; None: they are left on the nodes
        self._plan, self._connector, self._observer, self._preflight = plan, connector, observer, preflight
        self._secrets = plan.secrets()
        self._holds = holds or HoldSettings(new_hold(plan.job_id))
        self._only_check = False
        self._problems: dict[str, NodeError] = {}
        self._began_s = time.monotonic()
        self._started_s: float | None = None
        self._pinged_s = 0.0
        self._drain_until_s = 0.0
        self._end_by_s: dict[int, float] = {}
        self._nodes: list[RemoteNode] = []
        self._links: list[SshLink] = []
        self._logins: dict[int, SshLink] = {}
        self._verifier = Verifier(connector, plan.grace_s, self._links.append)
        self._verifying: dict[int, asyncio.Task[None]] = {}
        self._ending = self._collecting = self._closed = False
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
                await self._collect()
            self._emit(StageReached(Stage.DONE))
        return self.ledger

    async def check(self) -> PreflightResult | None:
        """Preflight alone: return what was found, None when a signal came first."""
        self._only_check = True
        async with self._connecting():
            if await self._ready_to_check() and await self._check():
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
        if self._collecting:
            self.tell("interrupted; outputs that are not here yet stay on the nodes")
        elif self._started_s is not None:
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
        if not await self._ready_to_check() or not await self._check():
            return False
        if self.checked and (self._problems or self.checked.failures):
            await self._dismiss()
            raise self.checked.error()
        if not await self._on_all(self._prepare):
            return False
        if self._problems:
            await self._refuse()
        return True

    async def _ready_to_check(self) -> bool:
        return await self._on_all(self._greet) and await self._hold() and await self._send_bundle()

    async def _on_all(self, step: Callable[[RemoteNode], Awaitable[None]]) -> bool:
        """Take one step on all nodes at once that have no problem yet; False when a signal came first."""
        nodes = [node for node in self._nodes if node.command.node_id not in self._problems]
        for node, result in zip(nodes, await self._unless_interrupted([step(node) for node in nodes]), strict=False):
            if isinstance(result, NodeError):
                self._problems[node.command.node_id] = result
            elif isinstance(result, BaseException):
                raise result
        return not self._signals

    async def _hold(self) -> bool:
        """Hold all nodes for this job; False when a signal came first. Raises RefusedError where others have some.

        Where nothing will start anyway, nothing is held: nodes that others have are told with the other problems.
        """
        nodes = [node for node in self._nodes if node.command.node_id not in self._problems]
        only_look = self._only_check or bool(self._problems)
        if only_look:
            step = find_held(self._plan, nodes, self._holds.hold)
        else:
            step = Holding(self._plan, nodes, self._holds, self._emit).run()
        await self._note_problems(step)
        if self._problems and not only_look:
            await self._refuse()
        return not self._signals

    async def _send_bundle(self) -> bool:
        """Bring the job's files to all nodes, if it has a bundle; False when a signal came first."""
        nodes = [node for node in self._nodes if node.command.node_id not in self._problems]
        if self.bundle and nodes:
            await self._note_problems(Sending(self.bundle, nodes, self._plan.lost_after_s, self._emit).run())
        return not self._signals

    async def _note_problems(self, step: Awaitable[dict[str, NodeError]]) -> None:
        for result in await self._unless_interrupted([step]):
            if isinstance(result, BaseException):
                raise result
            self._problems |= result

    async def _refuse(self) -> NoReturn:
        await self._dismiss()
        raise RefusedError(cannot_take_part(self._plan, self._problems), self._in_order(self._problems))

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
        command = node.command
        link = await self._connector.connect(SshTarget.of(command))
        self._links.append(link)
        self._logins[command.node_rank] = link
        async with answering(command.ssh):
            channel = await link.open(bootstrap_command(node.command.python), node)
            self._emit(await node.greet(channel))

    async def _prepare(self, node: RemoteNode) -> None:
        async with answering(node.command.ssh):
            self._emit(await node.prepare())

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
        event = self._secrets.mask(event)
        self.ledger.apply(event, at_s)
        self._observer.handle(event, at_s)
        if isinstance(event, NodeLost):
            self._verifying[event.node_rank] = asyncio.create_task(self._verify(self._nodes[event.node_rank]))
        if isinstance(event, CommandExited):
            # What a command leaves behind has the rest of the grace; of torchrun, nothing goes on.
            self._expect_end(event.node_rank, self._plan.grace_s if self._plan.launcher == "command" else 0.0)
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
        self._limit_ending(now)
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

    def _expect_end(self, node_rank: int, grace_s: float) -> None:
        by_s = time.monotonic() + grace_s + END_LIMIT_S
        self._end_by_s[node_rank] = min(by_s, self._end_by_s.get(node_rank, by_s))

    def _limit_ending(self, now: float) -> None:
        """Give up a node that answers, but does not end its part, or never comes to an end with its output."""
        for node in [one for one in self._nodes if not one.over]:
            node_rank = node.command.node_rank
            if self.ledger.nodes[node_rank].swept:
                if now - node.last_told > DRAIN_LIMIT_S:
                    node.leave()
                if node.left_s is not None and now - node.left_s > LEAVE_LIMIT_S:
                    node.abandon()
            elif now > self._end_by_s.get(node_rank, now):
                node.lose("it answers, but has not ended its part in time", supervisor_died=True)

    def _limit_draining(self, now: float) -> None:
        """Once a job that failed has ended everywhere, do not wait for ever for output that a slow link holds up.

        Neither where the time limit is reached while the output of one that succeeded is waited for.
        """
        limit_s, started_s = self._plan.timeout_s, self._started_s
        late = limit_s is not None and started_s is not None and now - started_s > limit_s
        if not (self._ending or late) or not all(record.swept or record.lost for record in self.ledger.nodes):
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
            self._expect_end(node.command.node_rank, self._plan.grace_s)

    def _kill(self) -> None:
        for node in self._living():
            node.kill()
            self._expect_end(node.command.node_rank, 0.0)

    def _living(self) -> list[RemoteNode]:
        records = self.ledger.nodes
        return [node for node in self._nodes if not node.over and records[node.command.node_rank].status is None]

    async def _verify(self, lost: RemoteNode) -> None:
        """See that nothing is left on a node that was lost."""
        record = self.ledger.nodes[lost.command.node_rank]
        if record.swept:
            return  # only its last output is missing
        self._emit(Notice("logging in again, to see that nothing is left there", (record.node_rank,)))
        swept = await self._verifier.verify(lost, lambda: self._signals >= 2)
        if swept:
            self._emit(swept)
        self._changed.set()

    async def _collect(self) -> None:
        """Bring back what the job has left on its nodes, until a signal comes; not at all where two came before."""
        records = [record for record in self.ledger.nodes if record.may_have_outputs]
        if not records or self.outputs_to is None:
            return
        self._ending = self._collecting = True
        before = self._signals
        wanted = [Collection(self._plan, one, self._logins.get(one.node_rank), self.outputs_to) for one in records]
        collecting = Collecting(self._plan, self._connector, wanted, self._emit, self._links.append)
        task = asyncio.create_task(collecting.run())
        task.add_done_callback(lambda _: self._changed.set())
        while not task.done() and self._signals == before < 2:
            await self._wait()
            self._tick()
        task.cancel()
        for error in await asyncio.gather(task, return_exceptions=True):
            if isinstance(error, Exception):
                raise error
        collecting.tell_rest()

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
