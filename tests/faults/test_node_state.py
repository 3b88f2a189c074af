"""On a node: what its disk, /proc, clock and login shell are like. A job is refused before it starts, or unharmed."""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import TYPE_CHECKING

import pytest

from tests.support import endings, jobs, leaks
from tests.support.cluster import CHECKOUT
from tests.support.endings import assert_clean, outcomes
from tests.support.faults import HIT, SUCCEEDED, wait_ready
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from tests.faults.conftest import Row
    from tests.support.cluster import Cluster
    from tests.support.jobs import Finished

pytestmark = pytest.mark.ssh

SAY = "import os\nprint('hello from', os.environ['RANK'])\n"
HELLO = [b"hello from 0\n", b"hello from 1\n"]
each_check = pytest.mark.parametrize("options", [[], ["--no-preflight"]], ids=["preflight", "no preflight"])


def _run(cluster: Cluster, options: list[str], **node: str) -> Finished:
    hosts_file = jobs.map_with_fake_torch(cluster, nodes={"h01": node})
    return jobs.run(cluster.login, hosts_file, options, jobs.write_script(cluster, SAY))


def _assert_refused(cluster: Cluster, done: Finished, reason: str, hint: str) -> str:
    """Nothing was started or left anywhere, and the screen names h01, this reason and, in the hint, a way out."""
    assert done.returncode == done.receipt["exit_code"] == 3, done.stderr
    assert leaks.job_processes(cluster) == []
    assert_clean(cluster)
    assert done.named("command_started") == []
    lines = done.stderr.splitlines()
    at = next(at for at, line in enumerate(lines) if line.startswith("h01: "))
    assert reason in lines[at]
    assert lines[at + 1].startswith("hint: ")
    assert hint in lines[at + 1]
    assert "Traceback" not in done.stderr
    return f"exit 3; `{lines[at]}`".replace(done.run_dir.name, "JOB-ID")


def _assert_said_hello(cluster: Cluster, done: Finished) -> None:
    assert done.returncode == 0, done.stderr
    assert_clean(cluster)
    assert outcomes(done.receipt) == [SUCCEEDED, SUCCEEDED]
    assert [done.log(rank, rank) for rank in (0, 1)] == HELLO


@pytest.mark.fault("/tmp is read-only")
@each_check
def test_a_read_only_tmp(cluster2: Cluster, row: Row, options: list[str]) -> None:
    """Refused in the kernel's words, with `scratch` as the way out; and that way works."""
    cluster2.hosts[HIT].mount("-o", "remount,ro", "/tmp")
    done = _run(cluster2, options)
    row.says(_assert_refused(cluster2, done, "Read-only file system", "`scratch` in the hosts map"))
    _assert_said_hello(cluster2, _run(cluster2, options, scratch="/run"))


@pytest.mark.fault("/tmp is full")
@each_check
def test_a_full_tmp(cluster2: Cluster, row: Row, options: list[str]) -> None:
    """A folder can be made there, but nothing written: refused, and not begun to fail without a word."""
    host = cluster2.hosts[HIT]
    host.mount("-o", "remount,size=64k", "/tmp")
    host.run(["sh", "-c", "head -c 1000000 /dev/zero >/tmp/full"], check=False)
    done = _run(cluster2, options)
    row.says(_assert_refused(cluster2, done, "No space left on device", "`scratch` in the hosts map"))
    _assert_said_hello(cluster2, _run(cluster2, options, scratch="/run"))


@pytest.mark.fault("no /proc")
@each_check
def test_no_proc(cluster2: Cluster, row: Row, options: list[str]) -> None:
    """Refused: processes that could not be found could not be ended."""
    cluster2.hosts[HIT].mount("-t", "tmpfs", "tmpfs", "/proc")
    done = _run(cluster2, options)
    row.says(_assert_refused(cluster2, done, "/proc is not mounted", "mount /proc there"))


@pytest.mark.fault("a login shell that prints megabytes first")
def test_a_login_shell_that_prints_megabytes(cluster2: Cluster, row: Row) -> None:
    """8 MB on stdout and 300 kB of any bytes on stderr, before anything else: none of it is taken for an answer."""
    startup = cluster2.hosts[HIT].path("/root/.bashrc")
    startup.write_text("head -c 8000000 /dev/zero | tr '\\0' 'x'; head -c 300000 /dev/urandom >&2\n")
    try:
        assert "x" * 8_000_000 in cluster2.login.run(["ssh", "h01", "true"]).stdout
        done = _run(cluster2, [])
    finally:
        startup.unlink()
    _assert_said_hello(cluster2, done)
    assert "xxxx" not in done.stdout + done.stderr
    row.says("exit 0; nothing of it")


@pytest.mark.fault("a login shell that never returns")
@pytest.mark.slow
def test_a_login_shell_that_never_returns(cluster2: Cluster, row: Row) -> None:
    """Refused after 30 s with a command that shows it; when the shell goes on after all, nothing starts."""
    host = cluster2.hosts[HIT]
    startup = host.path("/root/.bashrc")
    startup.write_text("sleep 3456\n")

    def hanging() -> list[int]:
        return [process.pid for process in host.processes() if process.argv == ("sleep", "3456")]

    try:
        done = _run(cluster2, [])
    finally:
        startup.unlink()
        for pid in hanging():
            os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not host.strays(), "the login shell has come to its end, and all that it was told to run")
    reason = "logged in, but no supervisor answered within 30 s"
    row.says(_assert_refused(cluster2, done, reason, "`ssh h01 true`"))


# A clock that goes an hour ahead, then an hour back, as the files FORWARD and BACK appear: time.time of one program.
CLOCK = """
import os, time
_real = time.time
def _stepped():
    return _real() + 3600 * os.path.exists("FORWARD") - 7200 * os.path.exists("BACK")
time.time = _stepped
time.time_ns = lambda: int(_stepped() * 1e9)
"""

# An interpreter with that clock for the supervisor, which is run as `python -ISE -c SOURCE`; a plain one for the rest.
PYTHON = """#!{python} -S
import sys
{clock}
if sys.argv[1] == "-ISE":
    exec(sys.argv[3])
else:
    os.execv("{python}", ["{python}", *sys.argv[1:]])
"""


@pytest.mark.fault("the clock is stepped by an hour during the run")
def test_the_clock_is_stepped(cluster2: Cluster, row: Row) -> None:
    """Neither limit nor duration is counted by the clock on the wall, on the login node or on a node.

    One kernel has one clock, so what is stepped is the clock of the two programs, at the place where they read it.
    """
    folder = cluster2.new_folder("clock")
    clock = CLOCK.replace("FORWARD", f"{folder}/forward").replace("BACK", f"{folder}/back")
    (folder / "sitecustomize.py").write_text(clock)
    python = folder / "python"
    python.write_text(PYTHON.format(python=sys.executable, clock=clock))
    python.chmod(0o755)
    out = cluster2.new_folder("out")
    nodes = {"h01": {"python": str(python)}}
    hosts_file = jobs.map_with_fake_torch(cluster2, nodes=nodes, env={"OUT": str(out)})
    script = jobs.write_script(cluster2, endings.BEGIN + "note(f'ready{rank}')\nwait_for('end')\n")
    options = ["--lost-after", "20", "--timeout", "300", "--join-timeout", "300", "--no-preflight"]
    env = {"PYTHONPATH": f"{folder}:{CHECKOUT}"}
    began = time.monotonic()
    with jobs.launch(cluster2.login, hosts_file, options, script, env=env) as live:
        wait_ready(live, out, 2)
        for step in ("forward", "back"):
            (folder / step).touch()
            _wait_a_second()  # both look at their clocks several times a second
            assert live.process.poll() is None, live.stderr_so_far
        (out / "end").touch()
        row.begins()
        done = live.finish()
    assert_clean(cluster2)
    row.clean()
    assert done.returncode == 0, done.stderr
    assert outcomes(done.receipt) == [SUCCEEDED, SUCCEEDED]
    assert 2 < done.receipt["took_s"] < time.monotonic() - began
    times_s = [event["t"] for event in done.events]
    assert times_s == sorted(times_s)
    row.says("exit 0; the job goes on, and the times in its receipt are right")


def _wait_a_second() -> None:
    began_s = time.monotonic()
    wait_until(lambda: time.monotonic() - began_s > 1, "a second has passed")
