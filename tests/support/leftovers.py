"""`gpulayer ps` and `gpulayer kill` on the test cluster, and jobs that nobody watches any more."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.support.endings import BEGIN, wait_ready
from tests.support.jobs import GPULAYER, LiveRun, launch, map_with_fake_torch, write_script
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tests.support.cluster import Cluster, LoginNode
    from tests.support.host import Host

Done = subprocess.CompletedProcess[str]

# Every rank says that it is there and ignores SIGTERM: it stays where nobody is left to kill it.
DEAF = BEGIN + "\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nnote(f'ready{rank}')\ntime.sleep(1000)\n"


def gpulayer(login: LoginNode, *words: str | Path) -> Done:
    """Run one of gpulayer's commands to its end."""
    return login.run([*GPULAYER, *map(str, words)])


def kill(login: LoginNode, job: str, hosts_file: Path, *options: str, grace: str = "0.5") -> Done:
    """End a job, with a short grace."""
    return gpulayer(login, "kill", job, "-H", hosts_file, "--grace", grace, *options)


def ended(job: str, hosts: str) -> re.Pattern[str]:
    """What is said of hosts where a job was ended."""
    return re.compile(rf"job {job} on {re.escape(hosts)}: \d+ process(es)? ended(, \d+ by SIGKILL)?; verified clean\n")


def start(
    cluster: Cluster, source: str, *, login: LoginNode | None = None, options: Sequence[str] = (), gpus: int = 0
) -> tuple[LiveRun, Path]:
    """Start a job of one rank a host and wait until all are ready; return it and its hosts map.

    `gpus`: the one device that each node of the map has, so that two jobs can share a host.
    """
    folder = cluster.new_folder("out")
    hosts_file = map_with_fake_torch(cluster, env={"OUT": str(folder)}, defaults={"gpus": [gpus]})
    run = launch(
        login or cluster.login,
        hosts_file,
        ["--no-preflight", "--master-port", str(29500 + gpus), *options],
        write_script(cluster, source),
    )
    wait_ready(folder, len(cluster.hosts))
    return run, hosts_file


def job_id(run: LiveRun) -> str:
    """The id of a run's job."""
    return run.run_dir.name


def keepers(host: Host) -> list[int]:
    """The supervisors and guards on a host, seen from outside."""
    return [process.pid for process in host.processes() if process.name.startswith("gpul-")]


def abandon(cluster: Cluster, run: LiveRun) -> None:
    """Kill the launcher, the supervisors and the guards, all before any of them can end the job.

    The guards last: torchrun gets SIGTERM when its parent dies, and again if that left it to a supervisor that dies.
    """
    watching = [pid for host in cluster.hosts for pid in keepers(host)]
    assert len(watching) == 2 * len(cluster.hosts)
    guards = [pid for pid in watching if _parent(pid) in watching]
    for pid in watching:
        os.kill(pid, signal.SIGSTOP)
    for group in (set(watching) - set(guards), guards):
        for pid in group:
            os.kill(pid, signal.SIGKILL)
        _wait_gone(group)
    run.process.kill()
    wait_until(lambda: not any(keepers(host) for host in cluster.hosts), "nobody watches any more")


def _wait_gone(pids: Iterable[int]) -> None:
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), "they are gone")


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()[1])


def jobs_in(done: Done) -> list[dict[str, Any]]:
    """What `ps --json` listed."""
    document = json.loads(done.stdout)
    assert document["version"] == 1
    jobs: list[dict[str, Any]] = document["jobs"]
    return jobs
