"""Leases on the command line: `run` takes one and gives it back, `--wait`, and what `hosts` shows."""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING

import pytest

from gpulayer import cli, launch
from gpulayer.command_words import spell_out_wait
from gpulayer.leases import Lease, Machine

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from gpulayer.plan import Plan

HOSTS = """
[defaults]
workdir = "/work"

[nodes."n[01-03]"]
address = "10.9.0.[1-3]"
gpus = 2

[nodes.left]
ssh = "n04"
address = "10.9.0.4"
gpus = [0, 1]

[nodes.right]
ssh = "n04"
address = "10.9.0.4"
gpus = [2, 3]
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a hosts map and a folder for records, `leases`."""
    (tmp_path / "hosts.toml").write_text(HOSTS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("GPULAYER_LEASES", "leases")
    monkeypatch.delenv("GPULAYER_HOSTS", raising=False)
    return tmp_path


@pytest.fixture
def launched(folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The nodes of each job that was carried out; each had its record for so long."""
    jobs: list[list[str]] = []

    def carry_out(plan: Plan, *_: object) -> int:
        jobs.append([node.node_id for node in plan.nodes])
        records = [path.name.partition(".")[0] for path in _records(folder)]
        assert (plan.job_id in records) == (folder / "leases").is_dir()
        return 0

    def check(plan: Plan, *_: object, **_more: object) -> int:
        jobs.append([node.node_id for node in plan.nodes])
        return 0

    monkeypatch.setattr(launch, "launch", carry_out)
    monkeypatch.setattr(launch, "check_nodes", check)
    return jobs


def _records(folder: Path) -> list[Path]:
    return list((folder / "leases").glob("*.json"))


@contextlib.contextmanager
def _held(folder: Path, *machines: Machine) -> Iterator[Lease]:
    """Another job has these machines."""
    with Lease(folder / "leases", "other") as lease:
        by_id = {str(number): machine for number, machine in enumerate(machines)}
        lease.draw(by_id, lambda _: tuple(by_id), None, print)
        yield lease


def _run(capfd: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    capfd.readouterr()
    code = cli.run_cli(list(args))
    out, err = capfd.readouterr()
    return code, out, err


def test_run_draws_what_is_free_and_the_others_all(
    folder: Path, launched: list[list[str]], capfd: pytest.CaptureFixture[str]
) -> None:
    """A held node is passed over by `run` alone: a plan and a check follow from the map and the options."""
    plan = _run(capfd, "render", "--job-id", "j", "-N", "2", "s.py")
    with _held(folder, Machine("n01:22", None)):
        assert _run(capfd, "run", "-N", "2", "s.py") == (0, "", "")
        assert _run(capfd, "check", "-N", "2") == (0, "", "")
        assert _run(capfd, "render", "--job-id", "j", "-N", "2", "s.py") == plan
        assert _run(capfd, "run", "--dry-run", "--job-id", "j", "-N", "2", "s.py") == plan
        assert len(_records(folder)) == 1
    assert launched == [["n02", "n03"], ["n01", "n02"]]
    assert _records(folder) == []


def test_too_few_are_free(folder: Path, launched: list[list[str]], capfd: pytest.CaptureFixture[str]) -> None:
    """Exit code 3 with who has what; what the map does not have at all stays exit code 2."""
    with _held(folder, Machine("n01:22", None), Machine("n04:22", (3, 4))) as lease:
        code, out, err = _run(capfd, "run", "s.py")
        assert (code, out) == (3, "")
        who = str(lease.hold)
        assert err == (
            "gpulayer: error: asked for 5 nodes, 3 are free: left,n[02-03]; "
            f"n01,right are held by {who}\n\n"
            "hint: wait for them with `--wait`, or ask for fewer with `--nnodes`\n"
        )
        assert _run(capfd, "run", "-N", "6", "s.py")[0] == 2
        assert _run(capfd, "run", "-w", "left", "s.py") == (0, "", "")
        assert _run(capfd, "run", "-w", "right", "s.py")[0] == 3
    assert launched == [["left"]]


def test_hosts_shows_who_has_what(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A state for each node, on one line each; the machine is the one that the SSH configuration says."""
    with _held(folder, Machine("n01:22", None), Machine("n04:22", (3,)), Machine("10.8.8.8:22", None)) as lease:
        code, out, err = _run(capfd, "hosts")
        assert (code, err) == (0, "")
        hold = lease.hold
        state = f"held by other ({hold.user}@{hold.login}, since {hold.clock('%H:%M')})"
        assert [line[7 : 7 + len(state)].strip() for line in out.splitlines()[1:]] == [
            state,
            "free",
            "free",
            "free",
            state,
        ]
        (folder / "config").write_text("Host n02\n  HostName 10.8.8.8\n")
        assert [" held by " in line for line in _run(capfd, "hosts", "-F", "config")[1].splitlines()[2:4]] == [
            True,
            False,
        ]
    code, out, err = _run(capfd, "hosts", "-F", "none")
    assert (code, err, out.count(" free ")) == (0, "", 5)


def test_a_record_that_cannot_be_kept(
    folder: Path, launched: list[list[str]], capfd: pytest.CaptureFixture[str]
) -> None:
    """One warning, and the job goes on; `hosts` does not say what it does not know."""
    (folder / "leases").touch()
    where = f"{folder}/leases: Not a directory"
    said = f"gpulayer: warning: leases cannot be kept in {where}; other jobs may draw these nodes\n"
    assert _run(capfd, "run", "-N", "1", "s.py") == (0, "", said)
    assert launched == [["n01"]]
    code, out, err = _run(capfd, "hosts")
    assert (code, err) == (0, f"gpulayer: warning: leases cannot be read from {where}\n")
    assert out.count(" unknown ") == 5


def test_wait(folder: Path, launched: list[list[str]], capfd: pytest.CaptureFixture[str]) -> None:
    """It waits until the nodes are free, and says so once at each end; with a number at most for so long."""
    with _held(folder, Machine("n01:22", None)) as lease:
        code, _, err = _run(capfd, "run", "--wait", "0.1", "-w", "n01", "s.py")
        who = f"asked for 1 node, none is free; n01 is held by {lease.hold}"
        assert code == 3
        assert err == (
            f"gpulayer: waiting for nodes: {who}\n"
            f"gpulayer: error: waited for 0.1 s, but {who}\n\n"
            "hint: wait longer for them with `--wait`, or name others with `--nodelist`\n"
        )
        threading.Timer(0.2, lease.release).start()
        code, _, err = _run(capfd, "run", "-w", "n01", "--wait", "s.py")
    first, second = err.splitlines()
    assert (code, first) == (0, f"gpulayer: waiting for nodes: {who}")
    assert second.startswith("gpulayer: drew n01 after ")
    assert launched == [["n01"]]
    assert _records(folder) == []


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("-1", "`--wait` is -1, a number of seconds from 0 up is expected"),
        ("nan", "`--wait` is nan, a number of seconds from 0 up is expected"),
        ("5m", "Invalid value for '--wait': `5m` is not a number of seconds"),
    ],
)
def test_a_time_that_is_none(word: str, message: str, folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """What is no number of seconds is refused, and is not taken for the script."""
    code, out, err = _run(capfd, "run", "--wait", word, "s.py")
    assert (code, out, err.partition("\n")[0]) == (2, "", f"gpulayer: error: {message}")


@pytest.mark.parametrize(
    ("typed", "read"),
    [
        ("--wait s.py", "--wait=inf s.py"),
        ("--wait", "--wait=inf"),
        ("--wait 30 s.py", "--wait 30 s.py"),
        ("--wait .5 s.py", "--wait .5 s.py"),
        ("--wait=30 s.py", "--wait=30 s.py"),
        ("--wait inf s.py", "--wait inf s.py"),
        ("--wait 01_train.py", "--wait=inf 01_train.py"),
        ("--wait -- 30", "--wait=inf -- 30"),
        ("--wait -N 2 s.py", "--wait=inf -N 2 s.py"),
        ("-vN 2 --wait s.py", "-vN 2 --wait=inf s.py"),
        ("-N2 -v --wait s.py", "-N2 -v --wait=inf s.py"),
        ("--job-id --wait s.py --wait", "--job-id --wait s.py --wait"),
        ("--job_id x --wait s.py", "--job_id x --wait=inf s.py"),
        ("--job-id=x --wait s.py", "--job-id=x --wait=inf s.py"),
        ("s.py --wait x", "s.py --wait x"),
        ("-- --wait x", "-- --wait x"),
        ("- --wait x", "- --wait x"),
    ],
)
def test_wait_without_a_number(typed: str, read: str) -> None:
    """`--wait` alone is for ever; the value of another option and what is the script's are not touched."""
    valued = {"--wait", "-N", "--nnodes", "--job-id"}
    assert spell_out_wait(typed.split(), valued) == read.split()
