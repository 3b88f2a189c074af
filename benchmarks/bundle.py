"""Sending a source bundle to many hosts over narrow lines: is the line the bound, or the launcher?

    python benchmarks/bundle.py [HOSTS [MEGABYTES [MBIT]]]

What cannot be compressed goes to all hosts at once, each on a line of its own. The second run sends nothing, so that
the difference between the two is the launcher's own work for sending. Needs what the test cluster needs.
"""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.run import Cost, events, measure
from tests.support.bad_lines import narrow_to
from tests.support.cluster import Cluster

HOSTS, MEGABYTES, MBIT = 16, 50, 40
FILES = 50
# TCP, IP and Ethernet around 1448 bytes of data, and SSH around 32 kB: what of a line's rate is left for files.
SHARE = 1448 / 1514 * 0.998


@dataclass(frozen=True, slots=True)
class Sent:
    """One run: its cost on the login node, how long sending took until the last host had it, and the bytes for each."""

    cost: Cost
    sending_s: float
    bytes_each: int


def run_once(cluster: Cluster, number: int) -> Sent:
    """Run a job of nothing on all hosts, from the bundle in `code`."""
    run_dir = cluster.base / f"bundle-{number}"
    python = cluster.shared / "python"
    python.write_text(f'#!/bin/sh\ncase "$1" in -m) exec true;; esac\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    hosts = cluster.hosts_toml(defaults={"gpus": 1, "python": str(python)})
    own = [sys.executable, "-m", "gpulayer", "run", "-H", str(hosts), "--run-dir", str(run_dir), "--no-preflight"]
    out = cluster.base / "out"
    cost, code = measure(cluster, [*own, "--bundle", str(cluster.base / "code"), "script.py"], out)
    if code:
        sys.exit(out.read_text())
    told = events(run_dir)
    ready = [event for event in told if event["event"] == "bundle_ready"]
    began = [float(str(event["t"])) for event in told if event.get("stage") == "sending"]
    sending_s = max(float(str(event["t"])) for event in ready) - began[0] if began else 0.0
    return Sent(cost, sending_s, max(int(str(event["sent_bytes"])) for event in ready))


def main() -> None:
    """Measure, and print what docs/performance.md has."""
    hosts, megabytes, mbit = [int(word) for word in sys.argv[1:]] + [HOSTS, MEGABYTES, MBIT][len(sys.argv) - 1 :]
    with Cluster(hosts, sshd_options=["MaxStartups 1000"]) as cluster:
        code = cluster.base / "code"
        code.mkdir()
        (code / "script.py").touch()
        for number in range(FILES):
            (code / f"{number}.bin").write_bytes(os.urandom(megabytes * 10**6 // FILES))
        with narrow_to(cluster, cluster.hosts, f"{mbit}mbit"):
            first = run_once(cluster, 1)
        second = run_once(cluster, 2)
    line_s = first.bytes_each * 8 / (mbit * 1e6 * SHARE)
    cpu_s = first.cost.cpu_s - second.cost.cpu_s
    rate = hosts * first.bytes_each / 1e6
    print(f"{os.cpu_count()} cores, Python {sys.version.split()[0]}, Linux {os.uname().release}, {time.strftime('%F')}")
    print(f"{hosts} hosts, {first.bytes_each / 1e6:.1f} MB to each, lines of {mbit} Mbit/s\n")
    print(f"the lines alone: {line_s:.1f} s; until the last host had it: {first.sending_s:.1f} s")
    print(
        f"CPU of the launcher for it: {cpu_s:.1f} s, {cpu_s / first.sending_s:.0%} of a core, {rate / cpu_s:.0f} MB/s"
    )
    print(f"the second run sent {second.bytes_each} bytes; wall {second.cost.wall_s:.1f} s")


if __name__ == "__main__":
    main()
