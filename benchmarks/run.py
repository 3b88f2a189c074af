"""The benchmarks: gpulayer beside pdsh and clush on the test cluster, in one run, as ratios. `make bench` runs all.

Needs root, the packages of the test cluster, and pdsh. clush comes with ClusterShell, which gpulayer depends on.
docs/performance.md holds the figures of one run and says how to read them.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.support.cluster import Cluster

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ROUNDS = 5
LOG_ROUNDS = 1  # clush takes minutes for one
LINES, LINE_BYTES, LOG_HOSTS = 2_000_000, 65, 4
CLUSH = str(Path(sys.executable).with_name("clush"))
SSH_OPTIONS = "-o BatchMode=yes -o StrictHostKeyChecking=yes"


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds of wall clock, and of CPU on the login side (children included)."""

    wall_s: float
    cpu_s: float


def measure(cluster: Cluster, argv: list[str], out: Path, env: dict[str, str] | None = None) -> tuple[Cost, int]:
    """Run a command on the login node with its output in a file; return its cost and exit code."""
    with out.open("wb") as file:
        began_s = time.monotonic()
        process = cluster.login.popen(argv, stdout=file, stderr=file, env=env)
        _, status, usage = os.wait4(process.pid, 0)
        cost = Cost(time.monotonic() - began_s, usage.ru_utime + usage.ru_stime)
    process.returncode = os.waitstatus_to_exitcode(status)
    return cost, process.returncode


def median(costs: list[Cost]) -> Cost:
    """Return the medians of wall and CPU, each by itself."""
    return Cost(statistics.median(cost.wall_s for cost in costs), statistics.median(cost.cpu_s for cost in costs))


@contextmanager
def cluster_of(size: int) -> Iterator[Cluster]:
    """A cluster whose sshd take as many logins at once as anyone likes."""
    with Cluster(size, sshd_options=["MaxStartups 1000"]) as cluster:
        yield cluster


def gpulayer(cluster: Cluster, command: str, run_dir: Path, *options: str) -> list[str]:
    """The command line of a job whose every node runs a shell command in torchrun's place, as pdsh and clush do.

    What stands for Python on the nodes runs it when asked for torchrun, and is Python when asked for a supervisor.
    """
    python = cluster.shared / "python"
    python.write_text(f'#!/bin/sh\ncase "$1" in -m) exec {command};; esac\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    hosts = cluster.hosts_toml(defaults={"gpus": 1, "python": str(python)})
    command_line = [sys.executable, "-m", "gpulayer", "run", "-H", str(hosts), "--run-dir", str(run_dir)]
    (cluster.shared / "script.py").touch()
    return [*command_line, "--grace", "5", *options, "script.py"]


def failing(cluster: Cluster, run_dir: Path) -> list[str]:
    """The command line of a job in which rank 1 fails, under the stand-in for torchrun of the tests."""
    script = cluster.shared / "fail.py"
    script.write_text("import os, sys, time\ntime.sleep(2 if os.environ['RANK'] == '1' else 100)\nsys.exit(17)\n")
    fake_torch = Path(__file__).resolve().parents[1] / "tests/support/fake_torch"
    hosts = cluster.hosts_toml(defaults={"gpus": 1, "env": {"PYTHONPATH": str(fake_torch)}})
    command_line = [sys.executable, "-m", "gpulayer", "run", "-H", str(hosts), "--run-dir", str(run_dir)]
    return [*command_line, "--grace", "5", str(script)]


def peers(cluster: Cluster, command: str) -> dict[str, list[str]]:
    """The same command line on all hosts, with pdsh and with clush, as parallel as gpulayer."""
    names = ",".join(host.name for host in cluster.hosts)
    fanout = str(len(cluster.hosts))
    found = {
        "pdsh": ["pdsh", "-R", "ssh", "-f", fanout, "-w", names, command],
        "clush": [sys.executable, CLUSH, "-f", fanout, "-o", SSH_OPTIONS, "-w", names, command],
    }
    return {name: argv for name, argv in found.items() if shutil.which(argv[0]) and Path(CLUSH).exists()}


def events(run_dir: Path) -> list[dict[str, object]]:
    """Return a run's events."""
    return [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]


def seconds(run_dir: Path, name: str, pick: Callable[[list[float]], float] = max) -> float:
    """When the last (or first: `pick`) event of a kind happened, in seconds after the job began."""
    return pick([float(str(event["t"])) for event in events(run_dir) if event["event"] == name])


def bench_start(size: int) -> None:
    """From Enter to all started, against `true` under pdsh and clush."""
    print(f"\n## {size} hosts, a trivial command (median of {ROUNDS})\n")
    with cluster_of(size) as cluster:
        bare = started(cluster, "--no-preflight")
        rows = {
            "gpulayer run --no-preflight, Enter to all started": bare,
            "gpulayer run, with the checks, Enter to all started": started(cluster),
        }
        for name, argv in peers(cluster, "true").items():
            env = {"PDSH_SSH_ARGS_APPEND": SSH_OPTIONS}
            rows[f"{name} true"] = median([measure(cluster, argv, cluster.base / "out", env)[0] for _ in range(ROUNDS)])
        table(rows, bare)


def started(cluster: Cluster, *options: str) -> Cost:
    """From Enter until `true` runs on all hosts; the CPU is that of the whole run."""
    walls: list[float] = []
    cpus: list[float] = []
    for number in range(ROUNDS):
        run_dir = cluster.base / f"start{'-'.join(options)}-{number}"
        before_s = time.monotonic()
        cost, code = measure(cluster, gpulayer(cluster, "true", run_dir, *options), cluster.base / "out")
        if code:
            sys.exit((cluster.base / "out").read_text())
        own_s = float(json.loads((run_dir / "receipt.json").read_text())["took_s"])
        walls.append(time.monotonic() - before_s - own_s + seconds(run_dir, "command_started"))
        cpus.append(cost.cpu_s)
    return Cost(statistics.median(walls), statistics.median(cpus))


def bench_logs() -> None:
    """Two million lines from four hosts, tagged, and for gpulayer in files as well."""
    print(f"\n## {LINES:,} lines of {LINE_BYTES} bytes from {LOG_HOSTS} hosts, tagged (one run each)\n")
    with cluster_of(LOG_HOSTS) as cluster:
        lines = cluster.shared / "lines"
        lines.write_bytes((b"x" * (LINE_BYTES - 1) + b"\n") * (LINES // LOG_HOSTS))
        ours: list[Cost] = []
        for number in range(LOG_ROUNDS):
            run_dir = cluster.base / f"logs-{number}"
            cost, code = measure(cluster, gpulayer(cluster, f"cat {lines}", run_dir), cluster.base / "out")
            shown = sum(1 for line in (cluster.base / "out").open("rb") if line.endswith(b"x\n"))
            kept = sum(path.stat().st_size for path in run_dir.glob("node*/command.stdout.log"))
            if code or kept != LINES * LINE_BYTES:
                sys.exit(f"exit code {code}, {shown} lines shown, {kept} bytes kept")
            print(f"gpulayer: {shown:,} of {LINES:,} lines on the screen, {kept:,} bytes in files")
            ours.append(cost)
        rows = {"gpulayer run": median(ours)}
        for name, argv in peers(cluster, f"cat {lines}").items():
            env = {"PDSH_SSH_ARGS_APPEND": SSH_OPTIONS}
            rows[name] = median([measure(cluster, argv, cluster.base / "out", env)[0] for _ in range(LOG_ROUNDS)])
        table(rows, rows["gpulayer run"])


def bench_failure(size: int) -> None:
    """From a rank's exit to the last process of the job gone, everywhere, as the launcher sees it."""
    with cluster_of(size) as cluster:
        taken: list[float] = []
        for number in range(ROUNDS):
            run_dir = cluster.base / f"fail-{number}"
            measure(cluster, failing(cluster, run_dir), cluster.base / "out")
            taken.append(seconds(run_dir, "node_swept") - seconds(run_dir, "rank_exited", min))
            left = cluster.processes("GPULAYER_MARKER=")
            if left:
                sys.exit(f"left: {left}")
        print(f"| {size} | {statistics.median(taken):.2f} | {max(taken):.2f} |")


def bench_quick() -> None:
    """What nothing but this machine does: render, --help."""
    print(f"\n## render and --help (best of {ROUNDS})\n\n| command | wall s | CPU s |\n|---|---|---|")
    with cluster_of(2) as cluster:
        hosts = str(cluster.hosts_toml(defaults={"gpus": 2}))
        own = [sys.executable, "-m", "gpulayer"]
        commands = {
            "python -c pass": [sys.executable, "-c", "pass"],
            "gpulayer --help": [*own, "--help"],
            "gpulayer render": [*own, "render", "-H", hosts, "train.py"],
        }
        for name, argv in commands.items():
            costs = [measure(cluster, argv, cluster.base / "out")[0] for _ in range(ROUNDS)]
            print(f"| {name} | {min(c.wall_s for c in costs):.2f} | {min(c.cpu_s for c in costs):.2f} |")


def table(rows: dict[str, Cost], ours: Cost) -> None:
    """Print costs, and how many times as much each is of gpulayer's."""
    print("\n| | wall s | CPU s, login node | gpulayer's wall / this | gpulayer's CPU / this |\n|---|---|---|---|---|")
    for name, cost in rows.items():
        ratios = f"{ours.wall_s / cost.wall_s:.2f} | {ours.cpu_s / cost.cpu_s:.2f}"
        print(f"| {name} | {cost.wall_s:.2f} | {cost.cpu_s:.2f} | {ratios} |")


def main() -> None:
    """Run what was asked for, by name, or all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=[], help="start, logs, failure, quick")
    names = parser.parse_args().names or ["quick", "start", "logs", "failure"]
    print(f"{os.cpu_count()} cores, Python {sys.version.split()[0]}, Linux {os.uname().release}")
    if "quick" in names:
        bench_quick()
    if "start" in names:
        bench_start(64)
    if "logs" in names:
        bench_logs()
    if "failure" in names:
        print(
            "\n## From the first failing rank to the last process gone\n\n| hosts | median s | worst s |\n|---|---|---|"
        )
        bench_failure(4)
        bench_failure(64)


if __name__ == "__main__":
    main()
