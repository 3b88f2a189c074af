"""`gpulayer runs` and `gpulayer logs` as they are typed, and the errors of `run --json`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from gpulayer import cli, launch
from gpulayer.errors import HeldError
from gpulayer.events import Output
from tests.unit.test_history import begin

if TYPE_CHECKING:
    from collections.abc import Callable

CHECKOUT = Path(__file__).parents[2]
HOSTS = '[nodes.n01]\naddress = "10.9.0.1"\ngpus = 1\nworkdir = "/work"\n'


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Callable[..., object]:
    """Run a command line in a folder with a hosts map: exit code, stdout, stderr."""
    (tmp_path / "hosts.toml").write_text(HOSTS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GPULAYER_LEASES", str(tmp_path / "leases"))

    def run(*words: str) -> tuple[int, str, str]:
        capfd.readouterr()
        code = cli.run_cli(list(words))
        return (code, *capfd.readouterr())

    return run


def _past(job_id: str, minutes_ago: float, output: bytes) -> None:
    with begin(Path("runs"), job_id, minutes_ago) as past:
        past.write_output(Output(0, 0, "stdout", output), 1.0)
        past.close_files()
        past.write_receipt({"job_id": job_id, "exit_code": 0, "took_s": 1, "cause": None})


def test_no_runs_yet(run: Callable[..., object]) -> None:
    """It is no error that nothing was run here; for a script it is an empty list."""
    assert run("runs") == (0, "", "gpulayer: no runs in runs\n")
    assert run("runs", "--json") == (0, '{\n  "version": 1,\n  "runs": []\n}\n', "")


def test_runs_and_their_logs(run: Callable[..., tuple[int, str, str]]) -> None:
    """`runs` lists them, for people and for scripts; `logs` takes what `runs` lists, and every option is obeyed."""
    _past("one", 2, b"first\n")
    _past("two", 1, b"second\n")
    code, out, err = run("runs")
    assert (code, err) == (0, "")
    assert [line.split()[0] for line in out.splitlines()] == ["job", "one", "two"]
    assert run("runs", "runs") == (0, out, "")
    assert [one["job_id"] for one in json.loads(run("runs", "runs/two", "--json")[1])["runs"]] == ["two"]
    assert run("logs") == run("logs", "last") == (0, "[0/0] second\n", "")
    assert run("logs", "one", "--node", "gpu-01", "--rank", "0", "--merge") == (0, "[0/0] first\n", "")
    nothing = "gpulayer: nothing was written in runs/one by what is asked for\n"
    assert run("logs", "one", "--node", "1") == run("logs", "one", "--rank", "3") == (0, "", nothing)
    assert run("logs", "runs/one", "-f") == (0, "[0/0] first\n", "gpulayer: job one: succeeded, exit code 0\n")


def test_ctrl_c_ends_the_following(run: Callable[..., object]) -> None:
    """`gpulayer logs -f` of a run that goes on is ended by Ctrl-C, with exit code 130."""
    with begin(Path("runs"), "live", 1) as live:
        live.write_output(Output(0, 0, "stdout", b"now\n"), 0.0)
        argv = [sys.executable, "-m", "gpulayer", "logs", "--follow", "live"]
        env = {**os.environ, "PYTHONPATH": str(CHECKOUT)}
        with subprocess.Popen(argv, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            assert process.stdout
            assert process.stderr
            assert process.stdout.readline() == "[0/0] now\n"
            process.send_signal(signal.SIGINT)
            assert process.wait(20) == 130
            assert process.stderr.read() == "gpulayer: interrupted\n"


def test_errors_of_a_run_for_scripts(run: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch) -> None:
    """An error before the job is a line of JSON, with the words and the exit code that people get on stderr."""
    code, out, err = run("run", "--json", "-w", "n09", "s.py")
    text = "`--nodelist` names n09, which the hosts map does not have"
    assert (code, json.loads(out)) == (
        2,
        {"event": "error", "exit_code": 2, "text": text, "hint": "the hosts map has n01"},
    )
    assert err == f"gpulayer: error: {text}\n\nhint: the hosts map has n01\n"

    def fail(*_: object) -> int:
        raise HeldError("too few")

    monkeypatch.setattr(launch, "launch", fail)
    code, out, err = run("run", "--json", "s.py")
    assert (code, json.loads(out)["exit_code"], err) == (3, 3, "gpulayer: error: too few\n")
