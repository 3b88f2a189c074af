"""Each rank's own end is told, before torchrun has said a word."""

from __future__ import annotations

import json
import os
import signal
import sys
from typing import TYPE_CHECKING

import pytest

from tests.process.programs import POLITE, QUICK
from tests.support.local_node import LocalNode, fake_torchrun

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    ScriptWriter = Callable[[str], Path]

FAIL = """
import json, os, signal, sys, time
if os.environ["RANK"] == "0":
    time.sleep(1000)
print("x" * 10000 + "the last words")
print("and the reason", file=sys.stderr)
with open(os.environ["TORCHELASTIC_ERROR_FILE"], "w") as file:
    json.dump({"message": "boom"}, file)
"""


@pytest.mark.parametrize(
    ("how", "status"),
    [
        ("sys.exit(17)", 17 << 8),
        ("os.kill(os.getpid(), signal.SIGKILL)", signal.SIGKILL),
        ("signal.signal(signal.SIGSEGV, signal.SIG_DFL); os.kill(os.getpid(), signal.SIGSEGV)", signal.SIGSEGV),
    ],
)
def test_a_failing_rank_is_told_of_first(node: LocalNode, script: ScriptWriter, how: str, status: int) -> None:
    """Its own wait status, its last bytes and its error file come before torchrun has ended (which says 1)."""
    node.run(fake_torchrun(node, script(FAIL + how), nproc_per_node=2), nproc_per_node=2)
    assert node.finish()["type"] == "ended"
    ends = [header for header in node.frames if header["type"] in ("rank_exit", "exit")]
    assert [one["type"] for one in ends] == ["rank_exit", "rank_exit", "exit"]
    first, sibling, command = ends
    assert (first["local_rank"], first["status"] & ~0x80) == (1, status)  # 0x80: it left a core
    parts = node.payload_of(first)
    assert parts["stdout"] == (b"x" * 10000 + b"the last words\n")[-8192:]
    assert parts["stderr"] == b"and the reason\n"
    assert json.loads(parts["error_file"]) == {"message": "boom"}
    assert (sibling["local_rank"], sibling["status"]) == (0, signal.SIGTERM)
    assert command["status"] == 1 << 8
    assert b"local_rank 1 failed" in node.payload_of(command)["stderr"]


def test_ranks_that_end_within_milliseconds_are_seen(node: LocalNode, script: ScriptWriter) -> None:
    """Ranks that have ended before anyone could look are told apart, each with its own code."""
    argv = [sys.executable, str(script(QUICK)), str(node.job_dir), "exit 3", "exit 4", "sleep 0.3; exit 5"]
    node.run(argv, nproc_per_node=3)
    node.finish()
    assert [node.wait_for("rank_exit", local_rank=one)["status"] >> 8 for one in (0, 1, 2)] == [3, 4, 5]
    assert len([one for one in node.frames if one["type"] == "rank"]) == 3


def test_successful_ranks_are_told_of_without_tails(node: LocalNode, script: ScriptWriter) -> None:
    """A job that goes well ends with 0 for every rank and for the command, and its folder is gone."""
    source = "import os, sys; print('rank', os.environ['RANK']); print('bad', file=sys.stderr)"
    node.run(fake_torchrun(node, script(source), nproc_per_node=3), nproc_per_node=3)
    assert node.finish() == {"type": "ended", "kept": "", "outputs": False}
    ends = [header for header in node.frames if header["type"] in ("rank_exit", "exit")]
    assert [(one["status"], one["parts"]) for one in ends] == [(0, [])] * 4
    assert node.output == {
        (rank, stream): text
        for rank in range(3)
        for stream, text in (("stdout", f"rank {rank}\n".encode()), ("stderr", b"bad\n"))
    }
    assert not node.job_dir.exists()


def test_other_children_of_torchrun_are_no_ranks(node: LocalNode, script: ScriptWriter) -> None:
    """A helper that was started first, which has no LOCAL_RANK, is not taken for rank 0, not even once it has ended."""
    helpers = "for argv in (['/bin/sleep', '1000'], ['/bin/true']): subprocess.Popen(argv)"
    source = f"import subprocess, time\n{helpers}\ntime.sleep(0.3)\n{QUICK}"
    node.run([sys.executable, str(script(source)), str(node.job_dir), "exit 3"], nproc_per_node=1)
    node.finish()
    assert [(one["local_rank"], one["status"]) for one in node.frames if one["type"] == "rank_exit"] == [(0, 3 << 8)]


def test_a_rank_killed_from_outside_is_told_of_at_once(node: LocalNode, script: ScriptWriter) -> None:
    """As by the kernel when memory runs out: signal 9, with the last words."""
    node.run(fake_torchrun(node, script(POLITE)))
    node.wait_for_output(0, b"ready")
    os.kill(node.wait_for("rank")["pid"], signal.SIGKILL)
    end = node.wait_for("rank_exit")
    assert (end["status"], node.payload_of(end)["stdout"]) == (signal.SIGKILL, b"ready\n")
    node.finish()


def test_each_rank_says_its_number(node: LocalNode, script: ScriptWriter) -> None:
    """The launcher learns which RANK a process really has, to compare it with the plan."""
    node.run(fake_torchrun(node, script(POLITE), nproc_per_node=2), nproc_per_node=2)
    assert [node.wait_for("rank", local_rank=one)["rank"] for one in (0, 1)] == [0, 1]


def test_deepspeeds_files_are_followed(node: LocalNode, script: ScriptWriter) -> None:
    """One file for both streams of a rank, named by the rank's number in the job; its last words come with its end."""
    source = """
import os, subprocess, sys, time
ranks = []
for local_rank in range(2):
    env = dict(os.environ, LOCAL_RANK=str(local_rank), RANK=str(4 + local_rank))
    with open(f"{sys.argv[1]}/ranks/20261129150210_rank{4 + local_rank}.log", "w") as log:
        shell = f"echo out {local_rank}; echo err {local_rank} >&2; exit {local_rank}"
        ranks.append(subprocess.Popen(["/bin/sh", "-c", shell], env=env, stdout=log, stderr=log))
time.sleep(0.2)  # it looks after them once a second
sys.exit(max(rank.wait() for rank in ranks))
"""
    argv = [sys.executable, str(script(source)), str(node.job_dir)]
    node.run(argv, nproc_per_node=2, launcher="deepspeed", first_rank=4)
    node.finish()
    assert node.output[0, "stdout"] == b"out 0\nerr 0\n"
    assert node.output[1, "stdout"] == b"out 1\nerr 1\n"
    assert (0, "stderr") not in node.output
    end = node.wait_for("rank_exit", local_rank=1)
    assert (end["status"] >> 8, node.payload_of(end)["stdout"]) == (1, b"out 1\nerr 1\n")
