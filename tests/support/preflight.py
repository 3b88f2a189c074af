"""Preflight on the test cluster: `gpulayer check` on the login node, and what a refused run must not have done."""

from __future__ import annotations

import json
import re
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tests.support import leaks
from tests.support.endings import folders
from tests.support.jobs import GPULAYER, run, write_script
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from tests.support.cluster import Cluster, LoginNode
    from tests.support.host import Host
    from tests.support.jobs import Finished

TOUCH = "import os; open(os.path.join(os.environ['OUT'], os.environ['RANK']), 'w').close()"
REFUSED = 3
WAITING = re.compile(r"gpulayer: (connecting|checking), \d+ of \d+ done, waiting for .*")  # where it takes long
HOLDER = "/tmp/hold.py"
HOLD = """
import pathlib, socket, sys
first, count = map(int, sys.argv[1:])
held = [socket.create_server(("", port)) for port in range(first, first + count)]
pathlib.Path(f"/tmp/holds{first}").touch()
while True:
    guest, _ = held[0].accept()
    guest.sendall(b"hello")
    guest.close()
"""


@dataclass(frozen=True, slots=True)
class Checked:
    """A `gpulayer check` that is over.

    `progress` is what it said meanwhile, `findings` are its blocks, `verdict` is its last line.
    """

    returncode: int
    stdout: str
    progress: list[str]
    took_s: float

    @property
    def findings(self) -> list[str]:
        """What was found, a block for each finding."""
        return self.stdout.strip().split("\n\n")[:-1]

    @property
    def verdict(self) -> str:
        """The last line."""
        return self.stdout.strip().split("\n\n")[-1]

    @property
    def data(self) -> dict[str, Any]:
        """What `--format json` prints."""
        found: dict[str, Any] = json.loads(self.stdout)
        return found


def check(
    cluster: Cluster,
    hosts_file: Path,
    options: Sequence[str] = (),
    script: str | Path | None = None,
    *,
    login: LoginNode | None = None,
) -> Checked:
    """Run `gpulayer check`; see that nothing was started by it, and that its screen is its findings alone."""
    argv = [*GPULAYER, "check", "--hosts", str(hosts_file), *options, *([str(script)] if script else [])]
    start = time.monotonic()
    done = (login or cluster.login).run(argv)
    took_s = time.monotonic() - start
    assert_nothing_started(cluster)
    progress = done.stderr.splitlines()
    assert [line for line in progress if not WAITING.fullmatch(line)] == []
    return Checked(done.returncode, done.stdout, progress, took_s)


def refused(
    cluster: Cluster, hosts_file: Path, options: Sequence[str] = (), *, login: LoginNode | None = None
) -> Finished:
    """Run a job, see that preflight refuses it, and that nothing of it was or is anywhere."""
    out = cluster.new_folder("out")
    script = write_script(cluster, TOUCH)
    done = run(login or cluster.login, hosts_file, [*options, "-e", f"OUT={out}"], script)
    assert done.returncode == REFUSED, done.stderr
    assert list(out.iterdir()) == []
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    assert {entry["stage"] for entry in done.named("stage_reached")} <= {"connecting", "preparing"}
    assert done.named("command_started") == []
    assert_nothing_started(cluster)
    return done


def assert_nothing_started(cluster: Cluster) -> None:
    """No process of a job is on a host, no folder of one, and no probe or tool of the checks."""
    assert leaks.job_processes(cluster) == []
    for host in cluster.hosts:
        assert folders(host) == []
        assert list(host.path("/tmp").glob(".gpulayer-*")) == []


def hold_port(host: Host, port: int, *, user: str = "root", count: int = 1) -> int:
    """Have another process of a user listen on these ports, and greet who comes; return its pid on the host."""
    host.path(HOLDER).write_text(HOLD)
    host.start(["python3", HOLDER, str(port), str(count)], user=user)
    wait_until(host.path(f"/tmp/holds{port}").exists, f"port {port} is held")
    host.path(f"/tmp/holds{port}").unlink()
    return pid_of(host, str(port), str(count))


def pid_of(host: Host, *last_words: str) -> int:
    """The pid on the host of the process whose command line ends in these words."""

    def found() -> list[int]:
        return [p.pid_inside for p in host.processes() if p.argv[-len(last_words) :] == last_words]

    wait_until(lambda: len(found()) == 1, f"{last_words} runs")
    return found()[0]


def write_torch(folder: Path, version: str, *, cuda: str | None = None, nccl: str | None = None) -> Path:
    """Make a folder for PYTHONPATH with a torch in it that preflight can read."""
    package = folder / "torch"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('preflight imports no torch')\n")
    (package / "version.py").write_text(f"__version__ = {version!r}\ncuda: str | None = {cuda!r}\nhip = None\n")
    if nccl:
        (folder / f"nvidia_nccl_cu12-{nccl}.dist-info").mkdir()
    return folder


def write_program(path: Path, text: str) -> Path:
    """Make a program that can be run."""
    path.write_text(text)
    path.chmod(0o755)
    return path


def nodes_env(nodes: Mapping[str, Mapping[str, str]]) -> dict[str, dict[str, dict[str, str]]]:
    """The keys of a hosts map that give nodes these environment variables."""
    return {name: {"env": dict(env)} for name, env in nodes.items()}


def nvidia_smi(used_mib: Sequence[int], processes: Sequence[tuple[int, int, int]] = ()) -> str:
    """An `nvidia-smi` that shows GPUs with this memory in use, and processes as (GPU, pid, MiB)."""
    gpus = [
        f"{index}, GPU-{index}a, 00000000:0{index}:00.0, 550.90.07, {used}, 81559, 0, NVIDIA H100"
        for index, used in enumerate(used_mib)
    ]
    apps = [f"GPU-{index}a, {pid}, {mib}, python" for index, pid, mib in processes]
    return (
        "#!/bin/sh\n"
        'case "$1" in\n'
        f"--query-gpu=*) cat <<'EOF'\n{chr(10).join(gpus)}\nEOF\n;;\n"
        f"--query-compute-apps=*) cat <<'EOF'\n{chr(10).join(apps)}\nEOF\n;;\n"
        "*) exit 2 ;;\n"
        "esac\n"
    )
