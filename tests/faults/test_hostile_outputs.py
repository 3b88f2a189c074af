"""A node that lies about the outputs of its job: nothing gets a wrong name, nothing half-written gets any, and it ends.

Over pipes: a job whose rank writes one file, on a node that changes what its supervisor says when it is collected.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

import pytest

from gpulayer import collecting
from gpulayer.events import OutputsCollected
from gpulayer.fanout import Fanout
from gpulayer.outcome import Fate, Ledger
from tests.support.hostile import lying_python
from tests.support.liar import TOKEN
from tests.support.local_node import free_port
from tests.support.pipes import PipeConnector, pipe_plan

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gpulayer.events import Event
    from gpulayer.ssh import SshConnector
    from tests.faults.conftest import Row

SIZE = 300_000
WRITE = f"""
import os
with open(os.environ["GPULAYER_OUTPUT_DIR"] + "/file", "wb") as file:
    file.write(b"x" * {SIZE})
"""
# `lie` is given each frame with its kind, and returns what is sent instead.
RELAY = """
def change(header, payload):
    return lie(header["type"], header, payload)

def passed_on(header, payload):
    return [(header, payload)]
"""
BAD_NAMES = [
    f"../../{TOKEN}", f"/tmp/{TOKEN}", f"a/../../{TOKEN}", "..", ".", "", "a//b", "a/", "\0", f"{TOKEN}\n", "\x1b[2J",
    "\x9b2J", "\u202egnp.exe", "\ud800", "n" * 256, "d/" * 1200 + "d", "x" * 50_000,
]  # fmt: skip
BROKE = "the supervisor broke the protocol: "
# What it says in place of some frames, and what is then said of it.
LIES = {
    "if kind == 'file_data': return [(header, payload)] * 2": BROKE + "more bytes of a file than it has",
    "if kind == 'file_data': return [(header, payload[1:])]": BROKE + "fewer bytes of a file than it has",
    "if kind == 'file_data': return [(header, b'y' * len(payload))]": "did not arrive as it is there",
    "if kind == 'file_end': return [({'type': 'file_end', 'sha256': DEEP}, b'')]": "did not arrive as it is there",
    "if kind == 'file_end': return [({'type': 'file_gone', 'why': NASTY * 50}, b'')]": "../../../../tmp/",
    "if kind == 'file_end': return [({'type': 'file_gone'}, b'')]": "not brought back",
    "if kind == 'file_data': return [({'type': 'read_done'}, b'')]": BROKE + "1 files did not come",
    "if kind == 'listed': return [({'type': 'list_part'}, b'[]' + b' ' * 65000)] * 600": "outputs has no end",
    "if kind == 'list_part': return [(header, payload)] * 50_001": "it lists more than 50000 outputs",
    "if kind == 'list_part': return [(header, line([['folder', 'file', 'file', -1, 0]]))]": " is no file",
    "if kind == 'list_part': return [(header, line([['elsewhere', 'file', 'file', 1, 0]]))]": " is no file",
    "if kind == 'list_part': return [(header, b'[' * 100_000)]": "no JSON: ",
    "if kind == 'list_part': return [(header, line({}))]": "{} is no list",
    "if kind == 'listed': return [(header, line({}))]": "its list of outputs makes no sense: ",
    "if kind == 'listed': return [(header, line({'passed_over': [[1]], 'unmatched': []}))]": "makes no sense: ",
    "if kind == 'listed': return [({'type': 'forgotten'}, b'')]": "the supervisor answered {'type': 'forgotten'}",
    "if kind == 'list_part': os._exit(7)": "logged in, but no supervisor answered (exit status 7)",
    "if kind == 'listed': __import__('time').sleep(7)": "nothing was heard of it for 3 s",
    "if kind in ('list_part', 'listed'): return []": "it answers, but gives nothing out for 3 s",
    "if kind == 'file_data': return []": "fewer bytes of a file than it has",
    "if kind in ('file_data', 'file_end', 'read_done'): return []": "it answers, but gives nothing out for 3 s",
}


class Screen:
    """What is told; nothing may steer a terminal."""

    def __init__(self) -> None:
        self.collected: list[OutputsCollected] = []

    def handle(self, event: Event, at_s: float) -> None:
        """Keep what came of the outputs."""
        if isinstance(event, OutputsCollected):
            self.collected.append(event)

    def tick(self, at_s: float) -> None:
        """Time has passed."""


def _run(folder: Path, lies: Sequence[str]) -> tuple[Ledger, list[OutputsCollected]]:
    """Run a job of nodes that lie so, each in its way. Outputs come to FOLDER/run/node<r>/outputs."""
    script = folder / "script.py"
    script.write_text(WRITE)
    (folder / "run").mkdir()
    plan = pipe_plan(folder, [str(script)], nnodes=len(lies), master_port=free_port(), grace_s=0.2, lost_after_s=3.0)
    nodes = [replace(node, python=_liar(folder, node.node_rank, lies[node.node_rank])) for node in plan.nodes]
    screen = Screen()

    async def whole() -> Ledger:
        async with asyncio.timeout(100):
            job = Fanout(replace(plan, nodes=tuple(nodes)), cast("SshConnector", PipeConnector()), screen)
            job.outputs_to = lambda node_rank: folder / "run" / f"node{node_rank}" / "outputs"
            return await job.run()

    ledger = asyncio.run(whole())
    assert all(text.isprintable() for one in screen.collected for text in one.problems)
    return ledger, sorted(screen.collected, key=lambda one: one.node_rank)


def _liar(folder: Path, node_rank: int, lie: str) -> str:
    behaviour = f"{RELAY}\ndef lie(kind, header, payload):\n    {lie}\n    return [(header, payload)]\nrelay(change)"
    own = folder / f"liar{node_rank}"
    own.mkdir()
    return str(lying_python(own, behaviour))


def _files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


@pytest.fixture(autouse=True)
def short_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Less patience than with a real node."""
    monkeypatch.setattr(collecting, "MARGIN_S", 0.2)
    monkeypatch.setattr(collecting, "PAUSE_S", 0.1)
    monkeypatch.setattr(collecting, "TICK_S", 0.1)


@pytest.mark.fault("a node lies about the outputs of the job")
def test_nodes_that_lie_about_outputs(tmp_path: Path, row: Row) -> None:
    """Each is given up; the job has succeeded all the same, exit 6 says that outputs are missing, and none is here."""
    ledger, collected = _run(tmp_path, list(LIES))
    assert (ledger.exit_code, ledger.cause) == (6, None)
    assert {(node.fate, node.clean) for node in ledger.nodes} == {(Fate.SUCCEEDED, True)}
    for one, (lie, reason) in zip(collected, LIES.items(), strict=True):
        assert reason in one.problems[0], lie
        assert (one.files, _files(tmp_path / f"run/node{one.node_rank}")) == (0, []), lie
    assert not list((tmp_path / "run").glob("node*/outputs.part"))
    row.says("exit 6; `outputs that did not come back: h01: model.pt: not brought back, REASON`")


@pytest.mark.fault("a node names outputs so that they would leave the folder")
def test_names_that_would_leave_the_folder(tmp_path: Path, row: Row) -> None:
    """Each is refused and told; files with good names come, and two of one name do not overwrite each other."""
    before = _files(tmp_path.parent)
    names = [*BAD_NAMES, "good", "good", "good/er", "deep/er", "deep", "sub/same"]
    changed = f"[(header, line([[one[0], name, *one[2:]]])) for name in {names!r} for one in json.loads(payload)]"
    ledger, (collected,) = _run(tmp_path, [f"if kind == 'list_part': return {changed}"])
    assert ledger.exit_code == 6
    assert _files(tmp_path / "run") == [f"node0/outputs/{name}" for name in ("deep/er", "good", "sub/same")]
    refused, taken = collected.problems
    assert refused.endswith(f" and {len(BAD_NAMES) - 3} more: cannot have such a name here")
    assert taken == "good, good/er, deep: another file has its name here"
    assert [name for name in _files(tmp_path.parent) if not name.startswith(tmp_path.name)] == before
    assert not list(Path("/tmp").glob(f"{TOKEN}*"))
    row.says("exit 6; `outputs that did not come back: h01: ../../x: cannot have such a name here`")
