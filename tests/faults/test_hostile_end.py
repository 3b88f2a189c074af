"""A node that does not come to its end holds the launcher up no longer than the limits say.

Over pipes, and with limits of seconds: they are minutes, for slow links.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING, cast

import pytest

from gpulayer import fanout
from gpulayer.fanout import Fanout
from gpulayer.outcome import Fate
from tests.support.hostile import lying_python
from tests.support.local_node import free_port
from tests.support.pipes import PipeConnector, pipe_plan

if TYPE_CHECKING:
    from pathlib import Path

    from gpulayer.events import Event
    from gpulayer.outcome import Ledger
    from gpulayer.ssh import SshConnector
    from tests.faults.conftest import Row

LIMITS = "a minute and some seconds after it was due"
IN_TIME = "it answers, but has not ended its part in time"


class _Nobody:
    """An observer that looks away."""

    def handle(self, event: Event, at_s: float) -> None:
        """Take note of nothing."""

    def tick(self, at_s: float) -> None:
        """Time has passed."""


def _run(folder: Path, behaviour: str, *, exit_code: int, timeout_s: float | None = None) -> Ledger:
    """Run a job of an honest node, whose rank ends at once with this code, and one that behaves like this."""
    script = folder / "script.py"
    script.write_text(f"raise SystemExit({exit_code})")
    plan = pipe_plan(folder, [str(script)], nnodes=2, grace_s=0.5, master_port=free_port(), timeout_s=timeout_s)
    liar = lying_python(folder, f"run()\n{behaviour}")
    plan = replace(plan, nodes=(plan.nodes[0], replace(plan.nodes[1], python=str(liar))))

    async def whole() -> Ledger:
        async with asyncio.timeout(30):
            return await Fanout(plan, cast("SshConnector", PipeConnector()), _Nobody()).run()

    return asyncio.run(whole())


@pytest.fixture(autouse=True)
def short_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seconds in place of minutes."""
    monkeypatch.setattr(fanout, "DRAIN_LIMIT_S", 1.0)
    monkeypatch.setattr(fanout, "END_LIMIT_S", 1.5)
    monkeypatch.setattr(fanout, "LEAVE_LIMIT_S", 0.5)


@pytest.mark.fault("a node does not end its part when it is told to")
@pytest.mark.parametrize(
    "behaviour", ["wait()", "hear('stop'); tell('exit', status=15, parts=[]); wait()", "trickle()"]
)
def test_a_node_that_does_not_end_its_part(tmp_path: Path, behaviour: str, row: Row) -> None:
    """It is given up, and looked after over a second connection; the honest node's own failure stays the cause."""
    ledger = _run(tmp_path, behaviour, exit_code=17)
    assert ledger.exit_code == 1
    assert [(node.fate, node.clean) for node in ledger.nodes] == [(Fate.FAILED, True), (Fate.LOST, True)]
    assert ledger.nodes[1].lost == IN_TIME
    row.says(f"exit 1; `h01: lost: {IN_TIME}; verified clean`, {LIMITS}")


@pytest.mark.fault("a node sends output without end, after the end")
@pytest.mark.parametrize("behaviour", ["hear('stop'); succeed(); trickle()", "hear('stop'); succeed(); wait()"])
def test_a_node_whose_output_does_not_end(tmp_path: Path, behaviour: str, row: Row) -> None:
    """Of a job that failed, output is waited for so long; what has not come then is said to be on the node."""
    ledger = _run(tmp_path, behaviour, exit_code=17)
    assert ledger.exit_code == 1
    assert [node.clean for node in ledger.nodes] == [True, True]
    assert ledger.nodes[1].kept.endswith("-n1")
    row.says(f"exit 1; `output that did not arrive is on h01 in /tmp/gpulayer-JOB-n1`, {LIMITS}")


@pytest.mark.parametrize(("behaviour", "timeout_s"), [("succeed(); wait()", None), ("succeed(); trickle()", 2.0)])
def test_a_node_that_succeeded_and_stays(tmp_path: Path, behaviour: str, timeout_s: float | None) -> None:
    """A success is not lost over it: silence has its limit, and output without end has the job's."""
    ledger = _run(tmp_path, behaviour, exit_code=0, timeout_s=timeout_s)
    assert ledger.exit_code == 0
    assert [node.fate for node in ledger.nodes] == [Fate.SUCCEEDED, Fate.SUCCEEDED]
    assert ledger.nodes[1].kept.endswith("-n1")


def test_success_without_a_look(tmp_path: Path) -> None:
    """A node that has exited with 0, and never says what it found left, is given up and looked after."""
    ledger = _run(tmp_path, "tell('exit', status=0, parts=[]); wait()", exit_code=0)
    assert ledger.exit_code == 4
    assert [(node.fate, node.clean) for node in ledger.nodes] == [(Fate.SUCCEEDED, True), (Fate.LOST, True)]
    assert ledger.nodes[1].lost == IN_TIME
