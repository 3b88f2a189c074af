"""Ctrl-C before a job has a launcher: while modules are read, and while the plan is made."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from typing import TYPE_CHECKING

import pytest

from gpulayer.signals import ENDING_SIGNALS
from tests.support.cluster import CHECKOUT
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from pathlib import Path


def _start(*args: str, path: str = "") -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "gpulayer", *args],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [path, str(CHECKOUT)]))},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize("number", ENDING_SIGNALS, ids=lambda number: number.name)
def test_a_signal_while_modules_are_read(tmp_path: Path, number: int) -> None:
    """128 and its number, and not a word."""
    (tmp_path / "typer.py").write_text(f"import os, time\nos.kill(os.getpid(), {number})\ntime.sleep(60)\n")
    with _start("run", "train.py", path=str(tmp_path)) as process:
        out, err = process.communicate(timeout=30)
    assert (process.returncode, out, err) == (128 + number, "", "")


def test_ctrl_c_while_the_plan_is_made(tmp_path: Path) -> None:
    """A hosts map on a disk that does not answer: exit 130, no traceback, nothing made."""
    hosts_file = tmp_path / "hosts.toml"
    os.mkfifo(hosts_file)
    run_dir = tmp_path / "run"
    with _start("run", "--hosts", str(hosts_file), "--run-dir", str(run_dir), "train.py") as process:
        opened = threading.Event()

        def open_it() -> None:
            with hosts_file.open("w"):  # returns once gpulayer reads
                opened.set()
                process.wait()

        writer = threading.Thread(target=open_it)
        writer.start()
        wait_until(opened.is_set, "gpulayer reads its hosts map", timeout_s=30)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)
        writer.join()
    assert (process.returncode, out) == (130, "")
    assert err == "gpulayer: interrupted\n"
    assert not run_dir.exists()
