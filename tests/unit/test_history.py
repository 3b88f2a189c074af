"""Past runs, read from real run directories: what the table and the JSON say, and which run a name means."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from gpulayer.console import render_table
from gpulayer.errors import JobError
from gpulayer.history import (
    RUNS_TABLE,
    RunState,
    choose_run,
    duration_text,
    find_runs,
    read_run,
    runs_json,
    runs_rows,
)
from gpulayer.logs import RunDirectory, run_json
from tests.support.plans import nodes, plan, script

if TYPE_CHECKING:
    from collections.abc import Iterator

MISSING = {"outputs": {"files": 1, "problems": ["big: not brought back"]}}
NOW = datetime(2026, 11, 29, 15, 0, tzinfo=UTC)
PLAN = plan(script(), nodes(2, 2))
OK = {"exit_code": 0, "cause": None, "took_s": 9.71}
FAILED = {"exit_code": 1, "took_s": 754.2, "cause": {"text": "rank 2 on node 1 (gpu-02) exited\n\x1b[2Jwith code 17"}}
REFUSED = {"exit_code": 3, "took_s": 2.0, "text": "1 of 2 nodes cannot take part, so nothing was started"}


def begin(folder: Path, job_id: str, minutes_ago: float) -> RunDirectory:
    """Start a run as the launcher does."""
    run = RunDirectory.create(folder, job_id)
    run.record_line(run_json(job_id, run.paths.root, NOW - timedelta(minutes=minutes_ago), PLAN.nodes))
    return run


@pytest.fixture
def runs(tmp_path: Path) -> Iterator[Path]:
    """A folder with a run of each kind, and some things that are no runs."""
    folder = tmp_path / "runs"
    for job_id, minutes, receipt in (("b", 30, OK), ("a", 20, FAILED), ("c", 40, REFUSED), ("d", 10, None)):
        with begin(folder, job_id, minutes) as run:
            if receipt:
                run.write_receipt({"job_id": job_id, **receipt})
    (folder / "e").mkdir()
    (folder / "e" / "events.jsonl").write_text("no JSON")
    (folder / "e" / "receipt.json").write_text("[1]")
    (folder / "file").touch()
    with begin(folder, "live", 5):
        yield folder


def test_the_table(runs: Path) -> None:
    """One line a run, the newest last: what goes on, what was refused, and what has no receipt."""
    table = render_table(RUNS_TABLE, runs_rows(find_runs(runs), NOW), 200)
    assert table == (
        "job   started              took         nodes        exit  outcome\n"
        "c     2026-11-29 14:20:00  2.0 s        gpu-[01-02]  3     "
        "1 of 2 nodes cannot take part, so nothing was started\n"
        "b     2026-11-29 14:30:00  9.7 s        gpu-[01-02]  0     succeeded\n"
        "a     2026-11-29 14:40:00  12 min 34 s  gpu-[01-02]  1     "
        "rank 2 on node 1 (gpu-02) exited\ufffd\ufffd[2Jwith code 17\n"
        "d     2026-11-29 14:50:00  -            gpu-[01-02]  -     ended without a receipt\n"
        "live  2026-11-29 14:55:00  5 min 00 s   gpu-[01-02]  -     running\n"
    )


def test_the_same_for_scripts(runs: Path) -> None:
    """JSON has the same runs in the same order, with plain values."""
    document = json.loads(runs_json(find_runs(runs)))
    assert set(document) == {"version", "runs"}
    assert document["version"] == 1
    found = document["runs"]
    assert [(run["job_id"], run["state"], run["exit_code"]) for run in found] == [
        ("c", "ended", 3),
        ("b", "ended", 0),
        ("a", "ended", 1),
        ("d", "no receipt", None),
        ("live", "running", None),
    ]
    assert found[1] == {
        "job_id": "b",
        "run_dir": str(runs / "b"),
        "state": "ended",
        "started_at": "2026-11-29T14:30:00.000+00:00",
        "took_s": 9.71,
        "nodes": ["gpu-01", "gpu-02"],
        "exit_code": 0,
        "outcome": "succeeded",
    }


def test_a_run_goes_on_until_its_launcher_is_done(tmp_path: Path) -> None:
    """It holds a lock to the very end: closing the files does not make it look dead, the receipt ends it."""
    run = begin(tmp_path, "x", 1)
    run.close_files()
    states = [read_run(run.paths.root)]
    run.write_receipt({"exit_code": 0, "took_s": 1})
    states.append(read_run(run.paths.root))
    run.paths.receipt.unlink()
    run.close()
    states.append(read_run(run.paths.root))
    assert [one and one.state for one in states] == [RunState.RUNNING, RunState.ENDED, RunState.NO_RECEIPT]


@pytest.mark.parametrize(
    ("receipt", "outcome"),
    [
        ({"exit_code": 6, "cause": None}, "succeeded, but its logs are incomplete"),
        (
            {"exit_code": 6, "cause": None, "lost_log_bytes": 7, "nodes": [MISSING]},
            "succeeded, but its logs are incomplete",
        ),
        (
            {"exit_code": 6, "cause": None, "lost_log_bytes": 0, "nodes": [{"outputs": None}, MISSING]},
            "succeeded, but not all its outputs came back",
        ),
        ({"exit_code": 5, "cause": None}, "ended; something may still run"),
        ({"exit_code": 5, "cause": {"text": "node 1 was lost"}}, "node 1 was lost; something may still run"),
    ],
)
def test_ends_that_need_a_word_more(receipt: dict[str, object], outcome: str, tmp_path: Path) -> None:
    """A success without all of its logs or outputs, and a node where something may still run."""
    with begin(tmp_path, "x", 1) as run:
        run.write_receipt(receipt)
    past = read_run(tmp_path / "x")
    assert past
    assert past.outcome == outcome


def test_which_run_is_meant(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job id, a path, relative or not, or `last`: the one that began last."""
    monkeypatch.chdir(runs.parent)
    here = Path("runs")
    names = ["b", "runs/b", str(runs / "b"), "last"]
    assert [choose_run(name, here).job_id for name in names] == ["b", "b", "b", "live"]
    assert [run.job_id for run in find_runs(runs / "a")] == ["a"]


def test_a_run_that_is_not_there(runs: Path, tmp_path: Path) -> None:
    """What was named is named again, with the next step."""
    for name in ("e", "nothing", "../runs"):
        with pytest.raises(JobError, match=f"`{name}` is no run directory, and no job id of a run in {runs}") as caught:
            choose_run(name, runs)
        assert caught.value.hint == "`gpulayer runs` lists those here"
    for folder in (tmp_path / "empty", tmp_path):
        with pytest.raises(JobError, match=f"there is no run in {folder}"):
            choose_run("last", folder)
    with pytest.raises(JobError, match=r"`.*/none` is no folder with runs: No such file or directory"):
        find_runs(tmp_path / "none")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.04, "0.0 s"), (59.9, "59.9 s"), (60, "1 min 00 s"), (3600, "1 h 00 min"), (90_061, "25 h 01 min")],
)
def test_durations(seconds: float, text: str) -> None:
    """As people read them."""
    assert duration_text(seconds) == text
