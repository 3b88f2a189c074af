"""A bundle on its way to supervisors over pipes: what is told, what a node says, and what is not waited for."""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from gpulayer.bootstrap import bootstrap_command
from gpulayer.bundle import Bundle, pack
from gpulayer.events import BundleReady, Event, Notice, SendingProgress, Stage, StageReached
from gpulayer.messages import Roster, ShownNode, Waiting
from gpulayer.remote import RemoteNode
from gpulayer.sending import Sending
from tests.support.bundles import PACKAGE, write_tree
from tests.support.pipes import PipeConnector, pipe_plan

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from gpulayer.errors import NodeError

NOISE_BYTES = 3_000_000


@pytest.fixture(autouse=True)
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where all nodes of a test keep bundles: they are one machine."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache/gpulayer/bundles"


@pytest.fixture
def bundle(tmp_path: Path) -> Bundle:
    """A package, and much that cannot be compressed."""
    return pack(write_tree(tmp_path / "code", {**PACKAGE, "noise": os.urandom(NOISE_BYTES)}), 10**9)


@asynccontextmanager
async def _supervisors(folder: Path, nnodes: int) -> AsyncIterator[list[RemoteNode]]:
    """So many supervisors that have greeted, and are dismissed at the end."""
    plan = pipe_plan(folder, ["train.py"], nnodes=nnodes)
    connector = PipeConnector()
    nodes = [RemoteNode(plan, node.node_rank, lambda event: None) for node in plan.nodes]
    try:
        for node in nodes:
            link = await connector.connect()
            await node.greet(await link.open(bootstrap_command(node.command.python), node))
        yield nodes
        for node in nodes:
            node.dismiss()
        await asyncio.gather(*(node.closed.wait() for node in nodes))
    finally:
        await connector.close()


def _is_placed(node: RemoteNode) -> bool:
    return Path(node.command.job_dir, "work/steps/first.py").exists()


def _send(folder: Path, bundle: Bundle, nnodes: int) -> tuple[dict[str, NodeError], list[Event], list[bool]]:
    """Send a bundle; return the problems, what was told, and for each node whether the copy was there then."""

    async def whole() -> tuple[dict[str, NodeError], list[Event], list[bool]]:
        told: list[Event] = []
        async with asyncio.timeout(60), _supervisors(folder, nnodes) as nodes:
            problems = await Sending(bundle, nodes, 10.0, told.append).run()
            return problems, told, [_is_placed(node) for node in nodes]

    return asyncio.run(whole())


def _watch_reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """From where on pieces are read, as they are."""
    pieces: list[int] = []
    read = Sending._read

    def watched(self: Sending, offset: int) -> bytes:
        pieces.append(offset)
        return read(self, offset)

    monkeypatch.setattr(Sending, "_read", watched)
    return pieces


def test_what_is_told_of_a_bundle_that_is_sent(tmp_path: Path, bundle: Bundle) -> None:
    """That it is sent, how much each node got, and one line for all; the second time that nothing was."""
    problems, told, placed = _send(tmp_path, bundle, 3)
    assert (problems, placed) == ({}, [True] * 3)
    assert told[0] == StageReached(Stage.SENDING)
    ready = [event for event in told if isinstance(event, BundleReady)]
    assert sorted(event.node_rank for event in ready) == [0, 1, 2]
    assert all(event.sent_bytes > NOISE_BYTES for event in ready)
    ref = bundle.ref
    line = f"bundle of 5 files, 3.0 MB, {ref.digest[:19]}: sent to here-[0-2], 3.0 MB each"
    assert told[-1] == Notice(line)
    again = _send(tmp_path, bundle, 3)[1]
    assert [event for event in again if not isinstance(event, BundleReady)] == [
        Notice(f"bundle of 5 files, 3.0 MB, {ref.digest[:19]}: nothing sent, the nodes have it")
    ]
    assert [event.sent_bytes for event in again if isinstance(event, BundleReady)] == [0] * 3


def test_a_node_that_refuses_on_the_way_is_not_sent_the_rest(
    tmp_path: Path, bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its reason is the problem, and what it is asked next it answers as ever."""
    pieces = _watch_reads(monkeypatch)
    lie = replace(bundle, ref=replace(bundle.ref, size_bytes=1000))

    async def whole() -> None:
        async with asyncio.timeout(60), _supervisors(tmp_path, 1) as (node,):
            problems = await Sending(lie, [node], 10.0, lambda event: None).run()
            expected = "the bundle did not arrive as it was sent: it is longer than it should be"
            assert {node_id: str(error) for node_id, error in problems.items()} == {"here-0": expected}
            assert (await node.survey()).leases == ()

    asyncio.run(whole())
    assert max(pieces) < NOISE_BYTES / 2


def test_a_node_that_stands_still_is_given_up_in_time(
    tmp_path: Path, bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it was sent until then is little: no more is read than the way takes."""
    pieces = _watch_reads(monkeypatch)

    async def whole() -> dict[str, NodeError]:
        async with asyncio.timeout(60), _supervisors(tmp_path, 1) as (node,):
            pid = node.hello.pid if node.hello else 0

            def stop(event: Event) -> None:
                if event == StageReached(Stage.SENDING):
                    os.kill(pid, signal.SIGSTOP)

            try:
                return await Sending(bundle, [node], 1.0, stop).run()
            finally:
                os.kill(pid, signal.SIGCONT)

    (problem,) = asyncio.run(whole()).values()
    assert str(problem).startswith("nothing of the bundle was taken for 1 s, after ")
    assert max(pieces) < 1 << 20


def test_no_room_on_the_login_node_is_told_of_the_nodes_that_lack_it(
    tmp_path: Path, bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is sent, and no node has half of it."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "nowhere"))
    problems, told, placed = _send(tmp_path, bundle, 2)
    text = f"the bundle cannot be kept in {tmp_path}/nowhere here: No such file or directory"
    assert {node_id: str(error) for node_id, error in problems.items()} == {"here-0": text, "here-1": text}
    assert placed == [False, False]
    assert not [event for event in told if isinstance(event, BundleReady | Notice)]


def test_the_status_line_says_how_far_the_bundle_is() -> None:
    """How much of it all, how fast, how many nodes are done and for which it waits."""
    waiting = Waiting(Roster([ShownNode(rank, f"gpu-0{rank}", (rank,)) for rank in range(4)]))
    waiting.apply(StageReached(Stage.SENDING), 1.0)
    assert waiting.text(2.0) == "sending the bundle, 0 of 4 done, waiting for gpu-[00-03] (1 s)"
    waiting.apply(SendingProgress(41_300_000, 200_000_000, 9_500_000), 2.0)
    waiting.apply(BundleReady(2, 50_000_000), 3.0)
    assert waiting.text(5.0) == (
        "sending the bundle, 41.3 MB of 200 MB at 9.5 MB/s, 1 of 4 done, waiting for gpu-[00-01,03] (4 s)"
    )
    waiting.apply(StageReached(Stage.PREPARING), 5.0)
    assert waiting.text(6.0).startswith("checking, 0 of 4 done")
