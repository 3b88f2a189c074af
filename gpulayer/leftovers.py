"""`ps`, `kill` and `hosts --probe`: asks the nodes of the map, shows what they say, ends what is to end.

visits.py has what is said to a node, remains.py the words for what was found.
"""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from gpulayer.console import Console
from gpulayer.errors import NodeError, RefusedError
from gpulayer.leases import Record, leases_folder, live_records
from gpulayer.outcome import EXIT_UNCLEAN
from gpulayer.ranges import fold
from gpulayer.remains import (
    NodeSeen,
    ended_json,
    found_jobs,
    jobs_json,
    later_hint,
    render_ended,
    render_jobs,
)
from gpulayer.signals import Interrupted, SignalGate
from gpulayer.ssh import SshConnector, SshSettings
from gpulayer.states import NodeFound, judge_node
from gpulayer.visits import Sweeper, Visit, scope_of, visit_all

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Mapping

    from gpulayer.hosts import Node
    from gpulayer.screen import Terminal

Answer = TypeVar("Answer")
Said = tuple[dict[str, Answer], dict[str, NodeError]]


@dataclass(frozen=True, slots=True)
class Asking:
    """Which nodes to ask, how to reach them, and where to show what they say, as JSON or as text.

    `found_by` are the options that led to them, for commands that are named in hints.
    """

    nodes: tuple[Node, ...]
    ssh: SshSettings
    terminal: Terminal
    as_json: bool = False
    found_by: str = ""


def show_jobs(asking: Asking) -> int:
    """Show the jobs on the nodes. Raises RefusedError for those that could not be asked, after showing the others."""
    console = Console(asking.terminal)
    try:
        seen, problems = ask_all(asking, console, Visit.look)
        found = found_jobs(seen)
        if asking.as_json:
            console.data(jobs_json(found, problems))
        elif found:
            console.data(render_jobs(found, _columns(asking.terminal)))
        elif seen:
            console.data(f"no job runs on {fold(seen)}")
    finally:
        console.close()
    if problems:
        raise not_asked(asking, problems)
    return 0


def probe_nodes(asking: Asking, *, practice: bool) -> dict[str, NodeFound]:
    """Return what each node is found to be, by node id, in their order."""
    console = Console(asking.terminal)
    try:
        seen, problems = ask_all(asking, console, Visit.look_at_all)
    finally:
        console.close()
    found = {}
    for node in asking.nodes:
        said: NodeSeen | NodeError = problems[node.id] if node.id in problems else seen[node.id]
        found[node.id] = judge_node(scope_of(node, practice=practice), node.devices, said)
    return found


def end_jobs(asking: Asking, job_id: str | None, grace_s: float, confirm: Callable[[str], bool] | None) -> int:
    """End a job on the nodes (None: every job there that may be ended), look again, and say what became of it.

    `confirm`, if any, is asked first, with what is about to end. Returns EXIT_UNCLEAN where something is left, or where
    a node could not be looked at. Raises RefusedError where no node could be asked.
    """
    console = Console(asking.terminal)
    try:
        wanted = {job_id} if job_id else None
        if confirm:
            seen, problems = ask_all(asking, console, Visit.look)
            found = found_jobs(seen)
            wanted = {one.job.job_id for one in found}
            _refuse_if_none(asking, seen, problems)
            if found and not confirm(render_jobs(found, _columns(asking.terminal))):
                console.block("gpulayer: nothing was ended")
                return 0
        return _end(asking, console, job_id, wanted, grace_s)
    finally:
        console.close()


def _end(asking: Asking, console: Console, job_id: str | None, wanted: set[str] | None, grace_s: float) -> int:
    told: set[str] = set()

    def about_to_end(one: str) -> None:
        if one not in told:
            told.add(one)
            _tell_of_launcher(console, one)
            console.block(f"gpulayer: ending job {one}; what is left of it after {grace_s:g} s gets SIGKILL")

    sweeper = Sweeper(lambda one: wanted is None or one in wanted, grace_s, about_to_end)
    try:
        seen, problems = ask_all(asking, console, sweeper.end)
    except Interrupted:
        if told:
            console.block("gpulayer: nodes that were told to end it go on with that; `gpulayer ps` shows what is left")
        raise
    _refuse_if_none(asking, seen, problems)
    ended = [one for node in seen.values() for one in node]
    nothing_on = [node_id for node_id, node in seen.items() if not node]
    text = ended_json(ended, nothing_on, problems) if asking.as_json else render_ended(ended, nothing_on, job_id)
    console.data(text)
    if problems:
        console.print_error(not_asked(asking, problems))
    unclean = [*dict.fromkeys(one.node_id for one in ended if not one.clean), *problems]
    if not unclean:
        return 0
    console.block(
        f"gpulayer: not verified clean: {fold(unclean)}\nhint: {later_hint(job_id, unclean, asking.found_by)}", "bad"
    )
    return EXIT_UNCLEAN


def _tell_of_launcher(console: Console, job_id: str) -> None:
    for record in live_records(leases_folder(os.environ)):
        if record.job_id == job_id:
            console.block(f"gpulayer: {_launcher(record)}")


def _launcher(record: Record) -> str:
    return f"job {record.job_id} is still run from here, by pid {record.pid} of {record.user}, which will see it end"


def not_asked(asking: Asking, problems: Mapping[str, NodeError]) -> RefusedError:
    """Return the error of nodes that could not be asked."""
    who = f"{len(problems)} of {len(asking.nodes)} nodes" if len(asking.nodes) > 1 else "the node"
    return RefusedError(f"{who} could not be asked", dict(problems))


def _refuse_if_none(asking: Asking, seen: Mapping[str, object], problems: Mapping[str, NodeError]) -> None:
    if not seen:
        raise not_asked(asking, problems)


def _columns(terminal: Terminal) -> int | None:
    """Return how wide stdout is, None where it is no terminal: what reads it then gets everything."""
    if not terminal.is_tty("stdout"):
        return None
    try:
        return os.get_terminal_size(terminal.fd("stdout")).columns or 80
    except OSError:
        return 80


def ask_all(asking: Asking, console: Console, ask: Callable[[Visit], Awaitable[Answer]]) -> Said[Answer]:
    """Ask all nodes at once; return their answers, and the errors of the others. A signal is raised as Interrupted."""

    async def whole() -> Said[Answer]:
        connector = SshConnector(asking.ssh)
        connector.tell = lambda text: console.block(f"gpulayer: {text}")
        try:
            return await visit_all(asking.nodes, connector, ask)
        finally:
            await connector.close()

    return _until_signal(whole())


def _until_signal(work: Coroutine[object, object, Answer]) -> Answer:
    """Run it; a signal cancels it and all that it waits for, and is raised as Interrupted then."""
    received: list[int] = []

    async def cancellable(gate: SignalGate) -> Answer | None:
        task = asyncio.ensure_future(work)

        def stop(number: int) -> None:
            received.append(number)
            task.cancel()

        with gate.to(asyncio.get_running_loop(), stop):
            await asyncio.wait([task])
        return None if task.cancelled() else task.result()

    with SignalGate() as gate, asyncio.Runner() as runner:
        answer = runner.run(cancellable(gate))
    gate.restore()
    if answer is None:
        raise Interrupted(received[0])
    return answer
