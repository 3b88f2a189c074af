"""`gpulayer demo` as users start it, in a process of its own, and the practice cluster under it."""

from __future__ import annotations

import contextlib
import os
import pwd
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from gpulayer.demo import run_demo
from gpulayer.errors import RequestError
from tests.support.netns import DEFAULT_SIGNALS
from tests.support.procs import namespace_id, processes_in
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

REPOSITORY = Path(__file__).parents[2]
DEMO = (sys.executable, "-m", "gpulayer", "demo")
LIMIT_S = 100
STRANGER_UID = 54321  # in no passwd file, so without a name and a home
# What pip and venv put where only root may read can be read, and nothing more can be done than any user can do.
AS_STRANGER = (
    *("setpriv", f"--reuid={STRANGER_UID}", f"--regid={STRANGER_UID}", "--clear-groups"),
    *("--inh-caps=-all,+dac_read_search", "--ambient-caps=+dac_read_search", "--bounding-set=-all,+dac_read_search"),
)


class Place:
    """A folder for temporary files that marks every process that is started with it."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.folder = folder

    def environ(self, **more: str) -> dict[str, str]:
        """Return an environment with little in it."""
        return {"PATH": os.environ["PATH"], "HOME": str(self.folder), "TMPDIR": str(self.folder), **more}

    def processes(self) -> list[str]:
        """Return the command lines of all processes that live with this place in their environment."""
        mark = f"\0TMPDIR={self.folder}\0"
        return [" ".join(process.argv) for process in processes_in({namespace_id(os.getpid(), "pid")}, "pid", mark)]

    def is_clean(self) -> bool:
        """Say whether nothing runs any more and no file is left."""
        return not self.processes() and not list(self.folder.iterdir())


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    """A place whose name is unkind to whoever quotes badly."""
    place = Place(tmp_path / "it's an odd folder")
    yield place
    assert place.is_clean(), f"left by the test: {place.processes()} {list(place.folder.iterdir())}"


def run(argv: Sequence[str], environ: dict[str, str], cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run a program to its end, without a terminal."""
    return subprocess.run(
        argv,
        env=environ,
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )


@contextlib.contextmanager
def started(place: Place, wait_for: bytes) -> Iterator[subprocess.Popen[bytes]]:
    """A demo in a process group of its own, once it has written `wait_for`."""
    with subprocess.Popen(
        [*DEFAULT_SIGNALS, *DEMO],
        env=place.environ(),
        cwd=REPOSITORY,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    ) as process:
        assert process.stdout
        seen: list[bytes] = []
        while not seen or wait_for not in seen[-1]:
            seen.append(process.stdout.readline())
            assert seen[-1], b"".join(seen).decode()
        yield process


def check_success(result: subprocess.CompletedProcess[str]) -> None:
    """Check that a demo has shown a plan, four right sums and a receipt."""
    assert result.returncode == 0, result.stderr
    sums = re.findall(r"^\[(\d)/(\d)\] rank \2 brought (\d)\.0, .* is 10\.0$", result.stdout, re.MULTILINE)
    assert sorted(sums) == [("0", "0", "1"), ("0", "1", "2"), ("1", "2", "3"), ("1", "3", "4")]
    assert "practice: all nodes are this machine" in result.stdout
    plan, run_and_end = result.stderr.split("2. The run")
    assert "$ gpulayer render -H hosts.toml -F ssh_config" in plan
    assert "$ gpulayer run -H hosts.toml -F ssh_config" in run_and_end
    assert "practice-[1-2]: succeeded; verified clean" in run_and_end
    assert "rank0.stdout.log" in run_and_end
    job_ids = set(re.findall(r"demo-[0-9a-f]{4}\b", result.stderr))
    assert len(job_ids) == 1, "what runs is the plan that was shown"


@pytest.mark.torch
def test_the_demo_runs_and_leaves_nothing(place: Place, tmp_path: Path) -> None:
    """The demo succeeds, writes nothing into the folder it is started in, and is gone with all it made."""
    cwd = tmp_path / "cwd"
    cwd.mkdir()
    # Files of the standard library's names in the user's folder must not stand in for the library.
    for name in ("socket.py", "random.py", "torch.py"):
        (cwd / name).write_text("raise SystemExit('the wrong module')\n")
    before = set(cwd.iterdir())
    gpulayer = [sys.executable, "-P", "-c", "from gpulayer.cli import main; main()", "demo"]
    result = run(gpulayer, place.environ(PYTHONPATH=str(REPOSITORY)), cwd)
    check_success(result)
    assert set(cwd.iterdir()) == before
    assert max(len(line) for line in result.stderr.splitlines() if "folder" not in line) < 110
    assert place.is_clean()


@pytest.mark.torch
@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("setpriv"), reason="only root can become another user")
def test_the_demo_runs_as_a_user_without_a_home_or_a_name(place: Place) -> None:
    """A user who is in no passwd file, with HOME unset, can run the demo."""
    with pytest.raises(KeyError):
        pwd.getpwuid(STRANGER_UID)
    os.chown(place.folder, STRANGER_UID, STRANGER_UID)
    for parent in list(place.folder.parents)[:3]:
        parent.chmod(0o755)
    environ = place.environ()
    del environ["HOME"]
    check_success(run([*AS_STRANGER, *DEMO], environ, REPOSITORY))
    assert place.is_clean()


@pytest.mark.torch
def test_ctrl_c_ends_the_demo_cleanly(place: Place) -> None:
    """Ctrl-C while torchrun starts ends everything, exit code 130, without a traceback."""
    with started(place, b"$ gpulayer run") as process:
        wait_until(lambda: any("torch.distributed.run" in line for line in place.processes()), "torchrun runs")
        os.killpg(process.pid, signal.SIGINT)
        rest, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 130
    assert b"received SIGINT" in rest
    assert b"Traceback" not in rest
    assert place.is_clean()


@pytest.mark.torch
def test_ctrl_c_during_the_plan_ends_the_demo_cleanly(place: Place) -> None:
    """Ctrl-C before the run ends it there, exit code 130."""
    with started(place, b"1. The plan") as process:
        os.killpg(process.pid, signal.SIGINT)
        rest, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 130
    assert b"Traceback" not in rest
    assert place.is_clean()


@pytest.mark.torch
def test_a_killed_demo_leaves_nothing(place: Place) -> None:
    """SIGKILL to the demo while its job runs: the nodes end the job, the cluster ends and removes the folder."""
    with started(place, b"$ gpulayer run") as process:
        wait_until(lambda: any("torch.distributed.run" in line for line in place.processes()), "torchrun runs")
        process.kill()
        process.communicate(timeout=LIMIT_S)
    wait_until(place.is_clean, "the cluster is gone", timeout_s=40)


def test_without_torch_the_demo_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without PyTorch the demo starts nothing and names the package to install."""
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    with pytest.raises(RequestError, match="has no PyTorch") as caught:
        run_demo(lambda _args: pytest.fail("nothing is run"))
    assert caught.value.hint == "`pip install 'gpulayer[torch]'`"


@contextlib.contextmanager
def practice(place: Place) -> Iterator[Path]:
    """A practice cluster by itself."""
    folder = place.folder / "cluster"
    folder.mkdir(mode=0o700)
    with subprocess.Popen(
        [sys.executable, "-m", "gpulayer.practice", str(folder)],
        env=place.environ(),
        cwd=REPOSITORY,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdout
        assert process.stdin
        words = process.stdout.readline().decode().split()
        assert [word.partition(":")[0] for word in words] == ["ready", "practice-1", "practice-2"]
        yield folder
        process.stdin.close()
        assert process.wait(LIMIT_S) == 0
    assert not folder.exists()


@pytest.mark.skipif(not shutil.which("ssh"), reason="OpenSSH's client is not installed")
def test_openssh_reaches_the_practice_cluster(place: Place) -> None:
    """OpenSSH's client logs in with the files of the cluster, and gets output and exit status as from any server."""
    with practice(place) as folder:
        port = re.findall(r"^port = (\d+)$", (folder / "hosts.toml").read_text(), re.MULTILINE)[1]
        ssh = ["ssh", "-F", str(folder / "ssh_config"), "-o", "BatchMode=yes", "-p", port]
        command = "cat; head -c 300000 /dev/zero; echo gone >&2; exit 7"
        result = subprocess.run(
            [*ssh, "practice-2", command], input=b"here", capture_output=True, timeout=LIMIT_S, check=False
        )
        assert (result.returncode, result.stdout, result.stderr) == (7, b"here" + bytes(300000), b"gone\n")

        refused = run([*ssh, "-i", "/dev/null", "-F", "none", "-o", "StrictHostKeyChecking=no", "127.0.0.1"],
                      place.environ(), folder)  # fmt: skip
        assert refused.returncode == 255
        assert "Permission denied (publickey)" in refused.stderr
