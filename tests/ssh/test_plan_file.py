"""A saved plan on the cluster: its very bytes run on its very hosts, or nothing is contacted and each reason told."""

from __future__ import annotations

import json
import os
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.support import endings
from tests.support.endings import assert_clean, outcomes
from tests.support.jobs import GPULAYER, LiveRun, launch, map_with_fake_torch, write_script
from tests.support.preflight import hold_port
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from tests.support.cluster import Cluster

pytestmark = pytest.mark.ssh

JOB_ID = "a-saved-plan"
SECRET = "hf-5e77" + "aa01"
UNTIL_GO = endings.BEGIN + 'note(f"ready{rank}")\nwait_for("go")\n'
ODD_WORDS = ("--", "two words", "", "a$$b", "line one\nline two", os.fsdecode(b"no \xff utf-8"), "grüße", "$5", "--x=*")


class _Saved:
    """A job whose ranks wait for a file, its map, and its plan in the login node's home."""

    def __init__(self, cluster: Cluster, *options: str, words: Sequence[str] = ()) -> None:
        self.cluster = cluster
        self.script = write_script(cluster, UNTIL_GO)
        self.out = self.script.parent
        self.hosts = map_with_fake_torch(cluster, defaults={"gpus": 2})
        self.path = cluster.login.home / "plan.json"
        given = ["-o", "plan.json", "--job-id", JOB_ID, "-e", f"OUT={self.out}", "--grace", "1", *options]
        argv = [*GPULAYER, "render", "-H", str(self.hosts), *given, str(self.script), *words]
        done = cluster.login.run(argv)
        assert (done.returncode, done.stdout) == (0, ""), done.stderr
        self.plan: dict[str, Any] = json.loads(self.path.read_text())

    def start(self, *options: str, env: Mapping[str, str] | None = None, run_dir: str = "") -> LiveRun:
        """Start `run --plan` in the login node's home."""
        where = ["--run-dir", run_dir] if run_dir else []
        argv = [*GPULAYER, "run", "-H", str(self.hosts), "--plan", "plan.json", *where, *options]
        folder = self.cluster.login.home / (run_dir or f"runs/{JOB_ID}")
        return LiveRun(self.cluster.login.popen(argv, env=env), folder)

    def refused(self, *options: str) -> tuple[int, str]:
        """Run it; return the exit code and its error."""
        with self.start(*options) as live:
            done = live.finish()
        assert done.stdout == ""
        return done.returncode, done.stderr

    def end(self, live: LiveRun) -> list[tuple[str, bool]]:
        """Let the ranks end."""
        (self.out / "go").touch()
        done = live.finish()
        assert done.returncode == 0, done.stderr
        return outcomes(done.receipt)


@pytest.fixture(autouse=True)
def _no_runs(cluster2: Cluster) -> Iterator[None]:
    """Each test begins without runs: all plans here have one job id."""
    yield
    cluster2.login.run(["rm", "-rf", "runs", "again"], check=True)


def _torchruns(cluster: Cluster) -> list[list[bytes]]:
    """Return the command lines of torchrun on each host, as the kernel has them."""
    return [
        [
            line
            for process in host.processes("GPULAYER_JOB_ID")
            if b"torch.distributed.run" in (line := Path(f"/proc/{process.pid}/cmdline").read_bytes())
        ]
        for host in cluster.hosts
    ]


def _cannot(*lines: str) -> str:
    """Return the error of a plan that does not hold any more."""
    said = "".join(f"  {line}\n" for line in lines)
    return (
        f"gpulayer: error: plan.json cannot be run as it stands, and nothing was contacted\n{said}\n"
        "hint: mend what is named there, or make a new plan with `gpulayer render -o FILE`\n"
    )


def test_what_runs_is_the_plan_byte_for_byte(cluster2: Cluster) -> None:
    """torchrun's command lines on the hosts are the plan's argv, odd words and all; so is the record of the run."""
    saved = _Saved(cluster2, words=ODD_WORDS)
    with saved.start() as live:
        endings.wait_ready(saved.out, 4)
        seen = _torchruns(cluster2)
        assert saved.end(live) == [("succeeded", True)] * 2
    expected = [b"".join(os.fsencode(word) + b"\0" for word in node["argv"]) for node in saved.plan["nodes"]]
    assert seen == [[line] for line in expected]
    assert json.loads((live.run_dir / "plan.json").read_text()) == saved.plan
    assert_clean(cluster2)


def test_a_plan_runs_once_in_one_run_directory(cluster2: Cluster) -> None:
    """Its job id is in its bytes: the second run is refused, and `--run-dir` makes room for it."""
    saved = _Saved(cluster2)
    (saved.out / "go").touch()
    with saved.start() as live:
        assert live.finish().returncode == 0
    folder = cluster2.login.home / "runs" / JOB_ID
    reason = f"run directory: {folder} is not empty: has the plan been run? `--run-dir DIR` names another"
    assert saved.refused() == (2, _cannot(reason))
    with saved.start(run_dir="again") as live:
        done = live.finish()
    assert done.returncode == 0, done.stderr
    assert json.loads((live.run_dir / "plan.json").read_text()) == saved.plan
    assert_clean(cluster2)


def test_secrets_are_given_again_and_arrive(cluster2: Cluster) -> None:
    """The file has none; what is given with the run arrives in the environment and within the command."""
    saved = _Saved(cluster2, "-e", f"HF_TOKEN={SECRET}", words=["--auth", f"x:{SECRET}"])
    assert SECRET not in saved.path.read_text()
    missing = "secrets: HF_TOKEN: not kept in the plan: give them again, `-e HF_TOKEN`"
    assert saved.refused() == (2, _cannot(missing))
    with saved.start("-e", "HF_TOKEN", env={"HF_TOKEN": SECRET}) as live:
        endings.wait_ready(saved.out, 4)
        lines = [line for lines in _torchruns(cluster2) for line in lines]
        environments = {
            process.environ.count(f"HF_TOKEN={SECRET}\0".encode())
            for process in cluster2.processes("GPULAYER_JOB_ID")
            if b"torch.distributed.run" in b" ".join(map(os.fsencode, process.argv))
        }
        assert saved.end(live) == [("succeeded", True)] * 2
    assert len(lines) == 2
    assert all(line.endswith(f"\0--auth\0x:{SECRET}\0".encode()) for line in lines)
    assert environments == {1}
    assert json.loads((live.run_dir / "plan.json").read_text()) == saved.plan
    assert not [path for path in live.run_dir.rglob("*") if path.is_file() and SECRET.encode() in path.read_bytes()]
    assert_clean(cluster2)


def test_a_plan_that_does_not_hold_contacts_nothing(cluster2: Cluster) -> None:
    """Another address and another script are told at once; no host is asked, for none would answer."""
    saved = _Saved(cluster2)
    first, second = cluster2.hosts
    for host in cluster2.hosts:
        host.stop_sshd()
    text = saved.hosts.read_text()
    saved.hosts.write_text(text.replace(f'"{second.address}"', '"10.77.9.9"'))
    with saved.script.open("a") as file:
        file.write("# changed\n")
    code, error = saved.refused()
    assert code == 2
    lines = error.splitlines()
    assert lines[0] == "gpulayer: error: plan.json cannot be run as it stands, and nothing was contacted"
    assert lines[1].startswith(f"  script: {saved.script}: sha256 ")
    assert lines[2] == f"  h01: address: {second.address} -> 10.77.9.9"
    assert len(lines) == 5
    saved.hosts.write_text(text.replace("[nodes.h01]", "[nodes.other]"))
    assert saved.refused()[1].splitlines()[1] == f"  h01: not in {saved.hosts} any more"
    assert not (cluster2.login.home / "runs").exists()
    assert first.powered


def test_hosts_that_another_job_has_are_not_drawn_anew(cluster4: Cluster) -> None:
    """A plan is for its hosts alone: where one is held, exit code 3, though others are free; `--wait` waits for it."""
    saved = _Saved(cluster4, "-N", "2")
    with ExitStack() as stack:
        other_script = write_script(cluster4, UNTIL_GO)
        options = ["-w", "h01", "-e", f"OUT={other_script.parent}", "--grace", "1"]
        other = stack.enter_context(launch(cluster4.login, saved.hosts, options, other_script))
        endings.wait_ready(other_script.parent, 2)
        code, error = saved.refused()
        assert code == 3
        assert error.startswith("gpulayer: error: asked for 2 nodes, 1 is free: h00; h01 is held by job ")
        assert error.endswith("\nhint: wait for them with `--wait`, or render a plan for others\n")
        waiting = stack.enter_context(saved.start("--wait"))
        (saved.out / "go").touch()
        wait_until(lambda: "waiting for nodes" in waiting.stderr_so_far, "it waits", timeout_s=30)
        (other_script.parent / "go").touch()
        assert other.finish().returncode == 0
        done = waiting.finish()
    assert done.returncode == 0, done.stderr
    assert json.loads((waiting.run_dir / "plan.json").read_text()) == saved.plan
    assert_clean(cluster4)


def test_the_port_does_not_move(cluster2: Cluster) -> None:
    """Nobody asked for 29500 when the plan was made; it is the plan's now. Where it is taken nothing is started."""
    saved = _Saved(cluster2)
    assert saved.plan["master_port"] == 29500
    hold_port(cluster2.hosts[0], 29500)
    with saved.start() as live:
        done = live.finish()
    assert done.returncode == 3
    assert "h00: port 29500 is in use by pid " in done.stderr
    assert [entry["check"] for entry in done.receipt["findings"]] == ["port-taken"]
    assert json.loads((live.run_dir / "plan.json").read_text()) == saved.plan
    assert not endings.running(cluster2)
