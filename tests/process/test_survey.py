"""What is on a node of any job, and ending it from another login, whoever is dead."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

from gpulayer.processes import read_process
from tests.process.programs import NOTING, POLITE
from tests.support.local_node import LocalNode, is_alive, wait_gone
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from gpulayer.wire import Header

    ScriptWriter = Callable[[str], Path]

JOB = {"GPULAYER_JOB_ID": "a-job"}


def _survey(node: LocalNode) -> Header:
    """What a node says of itself now."""
    node.frames.clear()
    node.payloads.clear()
    node.send("survey")
    node.wait_for("surveyed")
    found: Header = json.loads(node.payloads[-1])
    return found


def _job(node: LocalNode, marker: str) -> Header | None:
    """What a node says of the job with this marker."""
    return next((job for job in _survey(node)["jobs"] if job["marker"][:10] == marker[:10]), None)


def _run(node: LocalNode, path: Path, *args: str, environ: dict[str, str] | None = None, **changes: object) -> None:
    node.run([sys.executable, "-u", str(path), *args], env=JOB | (environ or {}), **changes)
    node.wait_for_output(None, b"ready")


def test_a_job_that_runs_is_told_with_its_processes(node: LocalNode, script: ScriptWriter, tmp_path: Path) -> None:
    """Job id, node rank, who is alive, since when, and each process with its rank, but for the keepers."""
    _run(node, script(POLITE), environ={"RANK": "7"})
    command, guard = node.wait_for("started")["pid"], node.guard_pid
    with LocalNode(tmp_path) as other:
        job = _job(other, node.marker)
        assert job
        assert (job["job_id"], job["marker"], job["node_rank"]) == ("a-job", node.marker, 1)
        assert (job["supervisor"], job["keepers"]) == (True, sorted([node.hello["pid"], guard]))
        assert [(one["pid"], one["rank"]) for one in job["processes"]] == [(command, 7)]
        assert job["count"] == 1
        assert str(script(POLITE)) in job["command"]
        assert 0 <= job["age_s"] < 60
        node.send("kill")
        node.finish()
        assert _job(other, node.marker) is None


def test_what_is_left_when_all_keepers_are_dead_is_found_and_ended(
    node: LocalNode, script: ScriptWriter, tmp_path: Path
) -> None:
    """With supervisor and guard killed at once, a deaf process is left; it is told of, gets SIGTERM, then SIGKILL."""
    _run(node, script(NOTING), str(tmp_path))
    for name in (b"ready command", b"ready child"):
        node.wait_for_output(None, name)
    pids = [node.wait_for("started")["pid"]]
    os.kill(node.guard_pid, signal.SIGSTOP)
    guard = node.guard_pid
    os.kill(node.hello["pid"], signal.SIGKILL)
    node.process.wait(10)
    os.kill(guard, signal.SIGKILL)
    wait_gone(guard)
    wait_until(lambda: (tmp_path / "command").read_text() == "SIGTERM\n", "the kernel has told it")
    with LocalNode(tmp_path) as other:
        job = _job(other, node.marker)
        assert job
        assert (job["job_id"], job["supervisor"], job["keepers"], job["count"]) == ("a-job", False, [], 2)
        other.send("sweep", marker=node.marker, grace_s=0.3, term=True)
        assert other.wait_for("swept") == {"type": "swept", "killed": 2, "survivors": []}
        assert not any(map(is_alive, pids))
        assert _job(other, node.marker) is None
    assert (tmp_path / "command").read_text() == "SIGTERM\nSIGTERM\n"
    assert (tmp_path / "child").read_text() == ""


def test_a_job_that_lives_is_ended_by_its_own_supervisor(node: LocalNode, script: ScriptWriter, tmp_path: Path) -> None:
    """A sweep with SIGTERM tells the supervisor, which ends the command with one SIGTERM and tells its launcher why."""
    _run(node, script(POLITE), grace_s=30.0)
    with LocalNode(tmp_path) as other:
        other.send("sweep", marker=node.marker, grace_s=10, term=True)
        assert other.wait_for("swept")["survivors"] == []
    assert node.wait_for("error")["message"] == "its supervisor got SIGTERM there"
    assert node.process.wait(10) == 1


def test_keepers_without_a_process_are_told_by_their_lease(
    node: LocalNode, script: ScriptWriter, tmp_path: Path
) -> None:
    """A supervisor that is prepared and waits is a job too; its marker is the part that its name shows."""
    facts: dict[str, object] = {"job_id": "waiting-job", "user": "ada", "login": "login1", "since": 1.5, "gpus": None}
    node.send("hold", b"", **facts, scope=f"test-{os.getpid()}")
    node.wait_for("held")
    node.prepare([sys.executable, str(script(POLITE))])
    with LocalNode(tmp_path) as other:
        found = _survey(other)
        (job,) = [job for job in found["jobs"] if job["marker"] == node.marker[:10]]
        assert (job["job_id"], job["processes"], job["count"]) == ("waiting-job", [], 0)
        assert (job["supervisor"], job["keepers"]) == (True, [node.hello["pid"]])
        assert {**facts, "scope": f"test-{os.getpid()}"} in found["leases"]
        other.send("sweep", marker=job["marker"], grace_s=5, term=True)
        assert other.wait_for("swept")["survivors"] == []
    assert node.process.wait(10) == 1


def test_a_process_of_no_job_is_neither_told_nor_touched(node: LocalNode, tmp_path: Path) -> None:
    """A program that only mentions gpulayer's names, on its command line or in another variable, is nobody's job."""
    marker = secrets.token_hex(16)
    lookalike = subprocess.Popen(["sleep", "1000"], env={"X": f"GPULAYER_MARKER={marker}", "GPULAYER_JOB_ID": "a-job"})
    try:
        assert _job(node, marker) is None
        node.send("sweep", marker=marker, grace_s=0, term=True)
        assert node.wait_for("swept") == {"type": "swept", "killed": 0, "survivors": []}
        seen = read_process(lookalike.pid)
        assert seen
        assert seen.alive
    finally:
        lookalike.kill()
        lookalike.wait()
