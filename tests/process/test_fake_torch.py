"""The stand-in for torchrun behaves as torchrun does where gpulayer looks."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.waiting import wait_until

FAKE_TORCH = Path(__file__).parents[1] / "support" / "fake_torch"
SHOW = """
import json, os, sys
names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"]
print(json.dumps([sys.argv[1:], [os.environ[name] for name in names], os.getsid(0) == os.getpid()]))
print("to stderr", file=sys.stderr)
"""
STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready'); time.sleep(100)"


def _start(folder: Path, source: str, *args: str, **env: str) -> subprocess.Popen[str]:
    script = folder / "script.py"
    script.write_text(source)
    flags = "--nnodes 3 --nproc_per_node 2 --node-rank 1 --master-addr 10.0.0.1 --master-port 29500 --max-restarts=0"
    more = f"--rdzv-id job-1 --rdzv-conf timeout=9 --redirects 3 --log-dir {folder}/ranks --"
    return subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", *flags.split(), *more.split(), str(script), *args],
        env={**os.environ, "PYTHONPATH": str(FAKE_TORCH), **env},
        stderr=subprocess.PIPE,
        text=True,
    )


def _logs(folder: Path, name: str) -> list[Path]:
    return sorted(folder.glob(f"ranks/job-1_*/attempt_0/*/{name}"))


def test_workers_get_ranks_arguments_sessions_and_files_of_their_own(tmp_path: Path) -> None:
    """Two workers of node 1 of 3 are ranks 2 and 3 of 6; `$$` arrives as `$`, as in torchrun."""
    with _start(tmp_path, SHOW, "a b", "--", "$$x", "$local_rank") as torchrun:
        assert torchrun.wait(30) == 0
    said = [json.loads(path.read_text()) for path in _logs(tmp_path, "stdout.log")]
    assert said == [
        [["a b", "--", "$x", "0"], ["2", "0", "6", "10.0.0.1", "29500"], True],
        [["a b", "--", "$x", "1"], ["3", "1", "6", "10.0.0.1", "29500"], True],
    ]
    assert [path.read_text() for path in _logs(tmp_path, "stderr.log")] == ["to stderr\n"] * 2


def test_a_failing_worker_ends_its_sibling_and_torchrun_exits_1(tmp_path: Path) -> None:
    """The sibling gets SIGTERM at once, and the worker's own exit code is not torchrun's."""
    source = "import os, sys, time\nif os.environ['RANK'] == '3': sys.exit(17)\ntime.sleep(100)"
    with _start(tmp_path, source) as torchrun:
        assert torchrun.wait(10) == 1
        assert torchrun.stderr is not None
        assert "local_rank 1 failed (exitcode: 17)" in torchrun.stderr.read()


@pytest.mark.parametrize(("timeout", "least_s", "most_s"), [("0", 0, 2), ("1", 1, 3)])
def test_sigterm_reaches_the_workers_and_becomes_sigkill(
    tmp_path: Path, timeout: str, least_s: float, most_s: float
) -> None:
    """Workers that ignore SIGTERM are killed after TORCH_ELASTIC_SHUTDOWN_TIMEOUT."""
    with _start(tmp_path, STUBBORN, TORCH_ELASTIC_SHUTDOWN_TIMEOUT=timeout) as torchrun:
        wait_until(lambda: [p.read_text() for p in _logs(tmp_path, "stdout.log")] == ["ready\n"] * 2, "both are ready")
        torchrun.send_signal(signal.SIGTERM)
        took = wait_until(lambda: torchrun.poll() is not None, "torchrun ends")
        assert torchrun.returncode == 1
        assert least_s <= took < most_s
