"""gpulayer held in one stage of a run, from reading its map to its last words, for whatever is then done to it.

with STAGES["while connecting"](cluster, cluster.hosts[:2], grace_s=1) as held:
    held.wait()
    held.live.interrupt()
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from gpulayer.logs import RunPaths
from tests.support import endings, jobs, netns
from tests.support.preflight import write_program
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import AbstractContextManager

    from tests.support.cluster import Cluster
    from tests.support.host import Host
    from tests.support.jobs import LiveRun

    Stage = Callable[[Cluster, Sequence[Host], float], AbstractContextManager["Held"]]

# The second rank writes 10 MB, more than a slow link carries in a moment. Then all end.
MUCH = "import os\nif os.environ['RANK'] == '1':\n    os.write(1, b'much output\\n' * 833_000)\n"
MUCH_BYTES = 12 * 833_000
# Each rank leaves a file for its user, the second rank one that a slow link carries for some seconds.
LEAVE_MUCH = """
import os
size = 12_000_000 if os.environ["RANK"] == "1" else 1000
with open(os.environ["GPULAYER_OUTPUT_DIR"] + "/left.bin", "wb") as file:
    file.write(bytes(size))
"""
LEFT_BYTES = 12_000_000
SPEAK = "print('spoken ' * 20_000)\n"  # more than a pipe holds
SMI_LASTS_S = "86397"


@dataclass(frozen=True, slots=True)
class Held:
    """A run that is on its way into a stage, where it will stay; `wait` returns once it is there."""

    live: LiveRun
    wait: Callable[[], object]
    folder: Path


def _map(cluster: Cluster, hosts: Sequence[Host], **env: str) -> tuple[Path, Path]:
    folder = cluster.new_folder("out")
    return jobs.map_with_fake_torch(cluster, hosts=hosts, env={"OUT": str(folder), **env}), folder


def _launch(cluster: Cluster, hosts_file: Path, grace_s: float, source: str = endings.POLITE) -> LiveRun:
    return jobs.launch(cluster.login, hosts_file, ["--grace", f"{grace_s:g}"], jobs.write_script(cluster, source))


@contextlib.contextmanager
def _reading(cluster: Cluster, hosts: Sequence[Host], grace_s: float) -> Iterator[Held]:
    """The hosts map is on a disk that does not answer: here a pipe that nothing comes from."""
    hosts_file = cluster.new_folder("map") / "hosts.toml"
    os.mkfifo(hosts_file)
    held_open = os.open(hosts_file, os.O_RDWR)
    try:
        with _launch(cluster, hosts_file, grace_s) as live:

            def reads() -> bool:
                with contextlib.suppress(OSError):  # one that was just closed
                    return hosts_file in [one.readlink() for one in Path(f"/proc/{live.process.pid}/fd").iterdir()]
                return False

            yield Held(live, lambda: wait_until(reads, "gpulayer reads its map", timeout_s=30), hosts_file.parent)
    finally:
        os.close(held_open)


@contextlib.contextmanager
def _connecting(cluster: Cluster, hosts: Sequence[Host], grace_s: float) -> Iterator[Held]:
    """No host answers."""
    for host in hosts:
        host.drop_syn()
    hosts_file, folder = _map(cluster, hosts)
    with _launch(cluster, hosts_file, grace_s) as live:
        yield Held(live, lambda: live.wait_for_event("stage_reached", stage="connecting"), folder)


@contextlib.contextmanager
def _half_connected(cluster: Cluster, hosts: Sequence[Host], grace_s: float) -> Iterator[Held]:
    """One host answers, the other drops every packet."""
    hosts[1].drop_syn()
    hosts_file, folder = _map(cluster, hosts)
    with _launch(cluster, hosts_file, grace_s) as live:
        yield Held(live, lambda: live.wait_for_event("node_connected", node_rank=0), folder)


@contextlib.contextmanager
def _preflight(cluster: Cluster, hosts: Sequence[Host], grace_s: float) -> Iterator[Held]:
    """One host has told its facts; the other's `nvidia-smi` hangs."""
    folder = cluster.new_folder("out")
    write_program(folder / "nvidia-smi", f"#!/bin/sh\nsleep {SMI_LASTS_S}\n")
    env = {"PYTHONPATH": str(jobs.FAKE_TORCH), "OUT": str(folder)}
    nodes = {hosts[1].name: {"env": {**env, "PATH": f"{folder}:{netns.SYSTEM_PATH}"}}}
    with _launch(cluster, jobs.map_with_fake_torch(cluster, hosts=hosts, nodes=nodes), grace_s) as live:

        def wait() -> None:
            live.wait_for_event("node_checked", node_rank=0)
            wait_until(
                lambda: any(process.argv == ("sleep", SMI_LASTS_S) for process in hosts[1].processes()),
                "nvidia-smi hangs",
            )

        yield Held(live, wait, folder)


@contextlib.contextmanager
def _starting(cluster: Cluster, hosts: Sequence[Host], grace_s: float) -> Iterator[Held]:
    """torchrun runs and its ranks do not yet."""
    folder = cluster.new_folder("hang")
    hanging = folder / "torch" / "distributed"
    hanging.mkdir(parents=True)
    for path in (hanging.parent / "__init__.py", hanging / "__init__.py"):
        path.touch()
    (hanging / "run.py").write_text("import time\ntime.sleep(1000)\n")
    hosts_file = cluster.hosts_toml(hosts=hosts, defaults={"env": {"PYTHONPATH": str(folder)}})
    with _launch(cluster, hosts_file, grace_s) as live:

        def wait() -> None:
            for node_rank in range(len(hosts)):
                live.wait_for_event("command_started", node_rank=node_rank)

        yield Held(live, wait, folder)


@contextlib.contextmanager
def _running(cluster: Cluster, hosts: Sequence[Host], grace_s: float) -> Iterator[Held]:
    """All ranks have begun their work."""
    hosts_file, folder = _map(cluster, hosts)
    with _launch(cluster, hosts_file, grace_s) as live:

        def wait() -> None:
            live.wait_for_event("stage_reached", stage="running")
            endings.wait_ready(folder, len(hosts))

        yield Held(live, wait, folder)


@contextlib.contextmanager
def _slow(host: Host) -> Iterator[None]:
    """A link of 2 MB/s."""
    slow = ["tbf", "rate", "16mbit", "burst", "64k", "latency", "100ms"]
    host.run(["tc", "qdisc", "add", "dev", "eth0", "root", *slow])
    try:
        yield
    finally:
        host.run(["tc", "qdisc", "del", "dev", "eth0", "root"])


@contextlib.contextmanager
def _draining(cluster: Cluster, hosts: Sequence[Host], grace_s: float) -> Iterator[Held]:
    """The ranks have ended, and a slow link still carries what they wrote."""
    with _slow(hosts[1]):
        hosts_file, folder = _map(cluster, hosts)
        with _launch(cluster, hosts_file, grace_s, MUCH) as live:

            def wait() -> None:
                live.wait_for_event("node_ended", node_rank=0)
                live.wait_for_event("node_swept", node_rank=1)

            yield Held(live, wait, folder)


@contextlib.contextmanager
def _collecting(cluster: Cluster, hosts: Sequence[Host], grace_s: float) -> Iterator[Held]:
    """The job is over, and a slow link carries a file that it has left; a part of it is here."""
    with _slow(hosts[1]):
        hosts_file, folder = _map(cluster, hosts)
        with _launch(cluster, hosts_file, grace_s, LEAVE_MUCH) as live:
            part = RunPaths(live.run_dir).outputs(1).with_name("outputs.part") / "1"

            def wait() -> None:
                live.wait_for_event("outputs_collected", node_rank=0)
                wait_until(lambda: part.exists() and part.stat().st_size > 0, "a part of it is here", timeout_s=30)

            yield Held(live, wait, folder)


@contextlib.contextmanager
def _killing(cluster: Cluster, hosts: Sequence[Host], grace_s: float) -> Iterator[Held]:
    """A rank has failed, and those that are left ignore SIGTERM."""
    hosts_file, folder = _map(cluster, hosts, FAILS="1")
    with _launch(cluster, hosts_file, grace_s, endings.STUBBORN) as live:

        def wait() -> None:
            endings.wait_ready(folder, len(hosts))
            live.wait_for_event("stage_reached", stage="running")
            (folder / "go").touch()
            live.wait_for_event("stage_reached", stage="ending")

        yield Held(live, wait, folder)


@contextlib.contextmanager
def _telling(cluster: Cluster, hosts: Sequence[Host], grace_s: float) -> Iterator[Held]:
    """The receipt is written, and nobody reads what gpulayer still has to say."""
    hosts_file, folder = _map(cluster, hosts)
    reader, writer = os.pipe()
    script, options = jobs.write_script(cluster, SPEAK), ["--grace", f"{grace_s:g}"]
    try:
        with jobs.launch(cluster.login, hosts_file, options, script, stdout=writer, stderr=writer) as live:
            receipt = RunPaths(live.run_dir).receipt
            yield Held(live, lambda: wait_until(receipt.exists, "the receipt is written", timeout_s=60), folder)
    finally:
        os.close(reader)
        os.close(writer)


STAGES: dict[str, Stage] = {
    "while reading the map": _reading,
    "while connecting": _connecting,
    "while half connected": _half_connected,
    "in preflight": _preflight,
    "while starting": _starting,
    "while running": _running,
    "while the last output comes in": _draining,
    "while the outputs are collected": _collecting,
    "while a failed job is ended": _killing,
    "while the end is told": _telling,
}


def collected(run_dir: Path) -> list[str]:
    """The outputs that are in a run directory, whole ones and parts."""
    found = [path for path in run_dir.glob("node*/outputs*/**/*") if path.is_file()]
    return sorted(str(path.relative_to(run_dir)) for path in found)
