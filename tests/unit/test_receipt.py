"""The receipt, as plain values: of a job that failed, of one that was refused, and of what preflight has seen."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from typing import TYPE_CHECKING

import pytest

import gpulayer
from gpulayer.errors import ConnectRefusedError, RefusedError
from gpulayer.events import (
    CommandExited,
    CommandStarted,
    ExitStatus,
    NodeConnected,
    NodeEnded,
    NodeLost,
    NodePrepared,
    NodeStopping,
    NodeSwept,
    RankExited,
    RankStarted,
    Survivor,
    Tail,
)
from gpulayer.facts import PythonFact, TorchFact
from gpulayer.job import EnvValue
from gpulayer.outcome import LONGEST_ERROR, Ledger, NodeRecord, first_error
from gpulayer.receipt import RunFigures, receipt_json, refusal_json
from tests.support.findings import facts, gpus
from tests.support.plans import JOB_ID, node, nodes, plan, script

if TYPE_CHECKING:
    from gpulayer.events import Event
    from gpulayer.plan import Plan

PLAN = plan(script(env={"API_KEY": EnvValue("s3cr3t-value")}), nodes(2, 2, 2))
STARTED_AT = datetime(2026, 11, 29, 15, 2, 10, 250_000, timezone(timedelta(hours=1)))


def _ledger(job: Plan, *events: Event) -> Ledger:
    """A job whose nodes all started at 1.0 s; the events come half a second apart."""
    ledger = Ledger([NodeRecord(one.node_rank, one.node_id, one.ranks) for one in job.nodes])
    for one in job.nodes:
        ledger.apply(CommandStarted(one.node_rank, 40), 1.0)
        for rank in one.ranks:
            ledger.apply(RankStarted(one.node_rank, rank, 50 + rank), 1.0)
    for number, event in enumerate(events, 1):
        ledger.apply(event, 1 + number / 2)
    return ledger


def _error_file(message: object) -> bytes:
    return json.dumps({"message": message}).encode()


def test_a_job_that_failed() -> None:
    """Everything that is known of the job and of each node, in plain values, and no secret."""
    error = _error_file({"message": "ValueError: no s3cr3t-value\nmore", "extraInfo": {}})
    seen = replace(
        facts(PLAN.nodes[1], PLAN.master_addr),
        python=PythonFact("3.12.1", "/opt/py", "/opt"),
        torch=TorchFact("2.13.0+cu130", "13.0", None, "2.27", "/opt/torch"),
        gpu=gpus(0, 0, 0),
    )
    ledger = _ledger(
        PLAN,
        NodeConnected(1, "host-b", "3.11.2", "6.1.0", 9),
        NodePrepared(1, "ib0"),
        RankExited(1, 2, ExitStatus(code=17), Tail(stderr=b"not in the receipt", error_file=error)),
        NodeStopping(0),
        CommandExited(0, ExitStatus(code=1)),
        NodeSwept(0, 1),
        NodeEnded(0),
        CommandExited(1, ExitStatus(code=1)),
        NodeSwept(1, 1, (Survivor(77, "D", "python train.py"),)),
        NodeEnded(1, "/tmp/kept"),
        NodeLost(2, "cut"),
    )
    figures = RunFigures(STARTED_AT, 12.3456, 99, lambda node_rank: 1000 + node_rank, {1: seen})
    receipt = json.loads(json.dumps(receipt_json(PLAN, ledger, figures)))
    assert {key: value for key, value in receipt.items() if key not in {"cause", "nodes"}} == {
        "version": 1,
        "gpulayer_version": gpulayer.__version__,
        "job_id": JOB_ID,
        "plan_digest": PLAN.digest,
        "bundle_digest": None,
        "exit_code": 5,
        "started_at": "2026-11-29T15:02:10.250+01:00",
        "ended_at": "2026-11-29T15:02:22.595+01:00",
        "took_s": 12.346,
        "lost_log_bytes": 99,
    }
    assert receipt["cause"] == {
        "kind": "rank",
        "at_s": 2.5,
        "node_rank": 1,
        "node_id": "gpu-02",
        "rank": 2,
        "code": 17,
        "signal": None,
        "text": "rank 2 on node 1 (gpu-02) exited with code 17, 2.5 s into the job",
    }
    assert receipt["nodes"][1] == {
        "node_rank": 1,
        "node_id": "gpu-02",
        "ssh": "gpu-02",
        "address": "10.0.0.12",
        "outcome": "failed",
        "verified_clean": False,
        "verified": "by the supervisor",
        "survivors": [{"pid": 77, "state": "D", "command": "python train.py"}],
        "hostname": "host-b",
        "kernel": "6.1.0",
        "python": "3.11.2",
        "job_python": "3.12.1",
        "torch": "2.13.0+cu130",
        "gpus": ["H100", "H100"],
        "interface": "ib0",
        "started_s": 1.0,
        "ended_s": 6.0,
        "code": 1,
        "signal": None,
        "lost": None,
        "output_bytes": 1001,
        "outputs": None,
        "kept_on_node": "/tmp/kept",
        "ranks": [
            {"rank": 2, "pid": 52, "code": 17, "signal": None, "error": "ValueError: no ***"},
            {"rank": 3, "pid": 53, "code": None, "signal": None, "error": None},
        ],
    }
    assert [one["outcome"] for one in receipt["nodes"]] == ["stopped", "failed", "lost"]
    assert (receipt["nodes"][2]["lost"], receipt["nodes"][2]["verified_clean"]) == ("cut", False)
    assert [receipt["nodes"][0][name] for name in ("job_python", "torch", "gpus")] == [None, None, None]


def test_a_success_has_no_cause() -> None:
    """`cause` is null where nothing went wrong."""
    ends = [event for rank in range(3) for event in (CommandExited(rank, ExitStatus(code=0)), NodeSwept(rank, 0))]
    receipt = receipt_json(PLAN, _ledger(PLAN, *ends), RunFigures(STARTED_AT, 1.0))
    assert (receipt["exit_code"], receipt["cause"]) == (0, None)


@pytest.mark.parametrize(
    ("events", "verified", "is_clean"),
    [
        ([CommandExited(0, ExitStatus(code=0)), NodeSwept(0, 0), NodeEnded(0)], "by the supervisor", True),
        ([NodeLost(0, "cut"), NodeSwept(0, 2)], "by a second login", True),
        ([NodeSwept(0, 0), NodeLost(0, "cut")], "by the supervisor", True),
        ([NodeLost(0, "cut")], "not", False),
        ([NodeLost(0, "cut"), NodeSwept(0, 0, (Survivor(7, "D", "x"),))], "by a second login", False),
    ],
)
def test_who_has_looked(events: list[Event], verified: str, is_clean: bool) -> None:
    """The receipt says who has looked at a node, whatever was seen there."""
    one = plan(script(), nodes(1))
    receipt = json.loads(json.dumps(receipt_json(one, _ledger(one, *events), RunFigures(STARTED_AT, 1.0))))
    assert (receipt["nodes"][0]["verified"], receipt["nodes"][0]["verified_clean"]) == (verified, is_clean)


def test_nothing_was_started() -> None:
    """A node where nothing was started is clean, and nobody had to look."""
    ledger = Ledger([NodeRecord(one.node_rank, one.node_id, one.ranks) for one in PLAN.nodes])
    ledger.interrupted(2, 0.5)
    receipt = json.loads(json.dumps(receipt_json(PLAN, ledger, RunFigures(STARTED_AT, 1.0))))
    found = {(one["outcome"], one["verified"], one["verified_clean"]) for one in receipt["nodes"]}
    assert found == {("never started", "nothing was started", True)}


def test_the_gpus_of_a_part_of_a_machine() -> None:
    """Where the map lists devices, the receipt names those; where the tool failed, none are known."""
    part = plan(script(), [node(1, gpus=[1])])
    two = gpus(0, 0)
    two = replace(two, devices=tuple(replace(one, name=f"card {one.index}") for one in two.devices))
    names = []
    for gpu in (two, replace(two, state="failed"), None):
        seen = {0: replace(facts(part.nodes[0], part.master_addr), gpu=gpu)}
        receipt = json.loads(json.dumps(receipt_json(part, _ledger(part), RunFigures(STARTED_AT, 1.0, facts=seen))))
        names.append(receipt["nodes"][0]["gpus"])
    assert names == [["card 1"], None, None]


def test_a_job_that_was_refused() -> None:
    """The same head; then what was said, and why each node cannot take part."""
    problems = {"gpu-02": ConnectRefusedError("port 22 is closed", hint="start sshd")}
    refused = RefusedError("1 of 3 nodes cannot take part", problems, findings=[{"check": "x"}])  # type: ignore[arg-type]
    receipt = json.loads(json.dumps(refusal_json(PLAN, refused, RunFigures(STARTED_AT, 2.0))))
    assert (receipt["exit_code"], receipt["took_s"], receipt["text"]) == (3, 2.0, "1 of 3 nodes cannot take part")
    assert receipt["ended_at"] == "2026-11-29T15:02:12.250+01:00"
    assert receipt["refused"] == [
        {"node_id": "gpu-02", "problem": "ConnectRefusedError", "text": "port 22 is closed", "hint": "start sshd"}
    ]
    assert receipt["findings"] == [{"check": "x"}]


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (_error_file({"message": "\n  RuntimeError: CUDA error\n  a hint\n"}), "RuntimeError: CUDA error"),
        (_error_file("plain words\nmore"), "plain words"),
        (_error_file("x\x1b[2J"), "x\ufffd[2J"),
        (_error_file("y" * 5000), "y" * LONGEST_ERROR + "..."),
        *((data, "") for data in (b"", b"{", b"[]", b"\xff", b"[" * 100_000, b'{"message": 3}', b'{"message": []}')),
    ],
)
def test_the_first_line_of_an_error_file(content: bytes, text: str) -> None:
    """It is cut and safe to show; a file that is not as expected has none."""
    assert first_error(content) == text
