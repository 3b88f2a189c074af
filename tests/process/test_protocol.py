"""Neither end trusts the other: what is no frame, or has no place, ends the job cleanly on that node."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from typing import TYPE_CHECKING

import pytest

from gpulayer.bootstrap import bootstrap_command
from gpulayer.errors import HandshakeError, NodeError
from gpulayer.events import CommandStarted, Event, NodeLost, Notice, RankStarted
from gpulayer.frames import MAX_EVENT_BYTES, MAX_HEADER_BYTES, MAX_PAYLOAD_BYTES, encode_frame
from gpulayer.remote import RemoteNode
from tests.process.programs import POLITE
from tests.support.local_node import LocalNode, fake_torchrun, is_alive
from tests.support.pipes import PipeConnector, pipe_plan

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    ScriptWriter = Callable[[str], Path]

NO_FRAMES = [
    b"garbage\n",
    b"\xff\xfe\n",
    b"[]\n",
    b"{}\n",
    b'{"type":1}\n',
    b'{"type":"stop","size":-1}\n',
    b'{"type":"stop","size":true}\n',
    b'{"type":"stop","size":1e3}\n',
    b"[" * 30_000 + b"\n",
    b"x" * (MAX_HEADER_BYTES + 1),
]
TO_SUPERVISOR = [
    *NO_FRAMES,
    encode_frame({"type": "stop", "size": MAX_PAYLOAD_BYTES + 1}),
    encode_frame({"type": "nonsense"}),
    encode_frame({"type": "start"}),  # it runs already
    encode_frame({"type": "prepare"}, b"{}"),
    encode_frame({"type": "sweep", "marker": "x", "grace_s": 1}),
    encode_frame({"type": "arrived"}),
    encode_frame({"type": "stop"}),
    encode_frame({"type": "stop", "grace_s": "soon"}),
    encode_frame({"type": "stop", "grace_s": []}),
]


@pytest.mark.parametrize("data", TO_SUPERVISOR)
def test_a_supervisor_ends_its_job_when_it_is_sent_nonsense(node: LocalNode, script: ScriptWriter, data: bytes) -> None:
    """It says what it did not understand, ends the ranks with the grace, and goes."""
    node.run(fake_torchrun(node, script(POLITE)))
    pids = [node.wait_for("started")["pid"], node.wait_for("rank")["pid"]]
    node.write(data)
    assert node.wait_for("error")["message"].startswith("its supervisor does not understand what it was sent: ")
    node.finish()
    assert node.process.returncode == 1
    assert not any(map(is_alive, pids))


@pytest.mark.parametrize(
    "data",
    [
        *NO_FRAMES[:3],
        encode_frame({"type": "start"}),  # before it is prepared
        encode_frame({"type": "prepare"}, b"not json"),
        encode_frame({"type": "prepare"}, b"[]"),
        encode_frame({"type": "prepare"}, b'{"workdir":"/"}'),
    ],
)
def test_a_supervisor_that_waits_goes_when_it_is_sent_nonsense(node: LocalNode, data: bytes) -> None:
    """Before the start there is nothing to end."""
    node.write(data)
    node.finish()
    assert node.wait_for("error")
    assert node.process.returncode == 1


# A node that answers as it should until the start, and then sends the bytes in the file beside it, and waits.
FALSE_NODE = """#!{python} -ISE
import os, re, sys
first = sys.stdin.buffer.raw.readline()
greeting = re.search(rb"gpulayer:([0-9a-f]{{32}})", first).group(1)
def say(text): os.write(1, text.encode() + b"\\n")
os.write(1, b"\\0gpulayer:" + greeting + b"\\n")
say('{{"type":"hello","version":1,"python":"3","hostname":"h","kernel":"k","pid":1}}')
while True:
    data = os.read(0, 1 << 20)
    if b'"prepare"' in data:
        say('{{"type":"prepared","interface":"lo"}}')
    if b'"start"' in data:
        with open({folder!r} + "/data", "rb") as file:
            data = file.read()
        try:
            while data:
                data = data[os.write(1, data):]
        except BrokenPipeError:
            pass
    if not data:
        break
"""


async def _run_false_node(folder: Path, data: bytes) -> tuple[list[Event], RemoteNode]:
    python = folder / "false-python"
    python.write_text(FALSE_NODE.format(python=sys.executable, folder=str(folder)))
    python.chmod(0o755)
    (folder / "data").write_bytes(data)
    events: list[Event] = []
    lost = asyncio.Event()

    def take(event: Event) -> None:
        events.append(event)
        if isinstance(event, NodeLost):
            lost.set()

    connector = PipeConnector()
    node = RemoteNode(pipe_plan(folder, ["unused"], nproc_per_node=2, python=str(python)), 0, take)
    link = await connector.connect()
    await node.greet(await link.open(bootstrap_command(str(python)), node))
    await node.prepare()
    node.start()
    async with asyncio.timeout(20):
        await lost.wait()
    await connector.close()
    return events, node


STARTED = encode_frame({"type": "started", "pid": 5})
FROM_SUPERVISOR = [
    *NO_FRAMES,
    encode_frame({"type": "output", "size": MAX_EVENT_BYTES + 1}),
    encode_frame({"type": "hello", "version": 1}),
    encode_frame({"type": "prepared", "interface": "lo"}),
    encode_frame({"type": "nonsense"}),
    encode_frame({"type": "rank", "local_rank": 2, "pid": 7}),
    encode_frame({"type": "ended"}),
    b"x" * (1 << 24),
]


@pytest.mark.parametrize("data", FROM_SUPERVISOR)
def test_a_node_that_sends_nonsense_is_given_up(tmp_path: Path, data: bytes) -> None:
    """What it said before is told; then the node is lost, its channel is closed, and nothing more is believed."""
    events, _ = asyncio.run(_run_false_node(tmp_path, STARTED + data + STARTED))
    assert [type(event) for event in events] == [CommandStarted, NodeLost]
    lost = events[1]
    assert isinstance(lost, NodeLost)
    assert lost.supervisor_died
    assert lost.reason.startswith("the supervisor broke the protocol: ")
    assert len(lost.reason) < 500


def test_what_a_supervisor_says_of_its_own_end_is_the_reason(tmp_path: Path) -> None:
    """A node that gives up by itself is lost for the reason that it gives."""
    data = STARTED + encode_frame({"type": "error", "message": "its supervisor got SIGTERM there"})
    events, _ = asyncio.run(_run_false_node(tmp_path, data))
    assert events == [CommandStarted(0, 5), NodeLost(0, "its supervisor got SIGTERM there")]


def test_a_supervisor_that_dies_just_before_the_start_is_lost_at_once(tmp_path: Path) -> None:
    """The node was ready and is not any more: that shows when the start is sent, not after `--lost-after`."""

    async def start() -> list[Event]:
        events: list[Event] = []
        connector = PipeConnector()
        node = RemoteNode(pipe_plan(tmp_path, ["unused"]), 0, events.append)
        link = await connector.connect()
        connected = await node.greet(await link.open(bootstrap_command(sys.executable), node))
        await node.prepare()
        os.kill(connected.supervisor_pid, signal.SIGKILL)
        await node.closed.wait()
        assert events == []
        node.start()
        await connector.close()
        return events

    assert asyncio.run(start()) == [NodeLost(0, "its supervisor died (signal 9)", supervisor_died=True)]


@pytest.mark.parametrize("data", [b"garbage\n", encode_frame({"type": "hello", "version": 99}), b"{}\n"])
def test_a_greeting_that_makes_no_sense_refuses_the_node(tmp_path: Path, data: bytes) -> None:
    """After the greeting only a hello of this version will do."""

    async def greet() -> None:
        node = RemoteNode(pipe_plan(tmp_path, ["unused"]), 0, lambda event: None)

        class Deaf:
            def write(self, written: bytes) -> None:
                greeting = b"\0gpulayer:" + node._nonce.encode() + b"\n"
                node.data_received(b"noise" + greeting[:9])
                node.data_received(greeting[9:] + data)

            async def drain(self) -> None:
                pass

            def close(self) -> None:
                pass

        await node.greet(Deaf())

    with pytest.raises(NodeError) as caught:
        asyncio.run(greet())
    assert isinstance(caught.value, HandshakeError)


def test_ranks_that_are_numbered_otherwise_are_told_once(tmp_path: Path) -> None:
    """Where a rank has another number than the plan gave it, gpulayer says so: tags and file names have the plan's."""
    frames = [encode_frame({"type": "rank", "local_rank": one, "pid": 7 + one, "rank": 1 - one}) for one in (0, 1)]
    events, _ = asyncio.run(_run_false_node(tmp_path, STARTED + b"".join(frames) + b"x" * (1 << 24)))
    assert events[1] == RankStarted(0, 0, 7)
    assert events[3] == RankStarted(0, 1, 8)
    notice = events[2]
    assert isinstance(notice, Notice)
    assert notice.text.startswith("ranks are numbered otherwise there than planned")
    assert notice.text.endswith(": rank 1 is 0 here")
    assert isinstance(events[4], NodeLost)
