"""Many: lines, nodes that die, jobs one after the other. Nothing is lost or mixed, and nothing is left or grows."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.support import endings, jobs
from tests.support.endings import assert_clean, outcomes
from tests.support.hostile import MOST_BYTES, Peak
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from tests.conftest import ClusterFactory
    from tests.faults.conftest import Row
    from tests.support.cluster import Cluster
    from tests.support.host import Host

pytestmark = [pytest.mark.ssh, pytest.mark.slow]

LINES = 50_000
BLOCK = 1000

# Every rank writes LINES lines, in blocks, at a sixteenth of 200 lines a millisecond.
WRITE = f"""
import os, sys, time
rank, began = int(os.environ["RANK"]), time.monotonic()
for first in range(0, {LINES}, {BLOCK}):
    block = b"".join(b"rank %02d line %06d of it\\n" % (rank, number) for number in range(first, first + {BLOCK}))
    sys.stdout.buffer.write(block)
    sys.stdout.flush()
    time.sleep(max(0.0, began + first / 12_500 - time.monotonic()))
"""


@pytest.mark.fault("200 lines a millisecond from 16 nodes")
def test_lines_of_sixteen_nodes(make_cluster: ClusterFactory, row: Row) -> None:
    """Every line is in its file, in order, and none on the screen is mixed with another; memory stays bounded."""
    cluster = make_cluster(16)
    hosts_file = jobs.map_with_fake_torch(cluster)
    row.begins()
    with jobs.launch(cluster.login, hosts_file, [], jobs.write_script(cluster, WRITE)) as live:
        peak = Peak(live)
        done = live.finish(100)
    row.clean()
    assert done.returncode == 0, done.stderr
    assert_clean(cluster)
    for rank in range(16):
        expected = b"".join(b"rank %02d line %06d of it\n" % (rank, number) for number in range(LINES))
        assert done.log(rank, rank) == expected
    line = re.compile(r"\[(\d+)\] rank (\d\d) line \d{6} of it")
    shown = [line.fullmatch(one) for one in done.stdout.splitlines()]
    assert all(one and int(one[1]) == int(one[2]) for one in shown)
    left_out = sum(int(number) for number in re.findall(r"screen too slow: (\d+) lines? not shown", done.stderr))
    assert len(shown) + left_out == 16 * LINES
    assert peak.read() < MOST_BYTES
    row.says(f"exit 0; every line in its file; the launcher's memory peaks at {peak.read() >> 20} MiB")


@pytest.mark.fault("64 nodes, of which 32 lose power at once")
@pytest.mark.timeout(300)
def test_half_of_64_nodes_die(make_cluster: ClusterFactory, row: Row) -> None:
    """Exit 4 with one cause; the dead are told in folded text, and the living are ended and verified clean."""
    cluster = make_cluster(64)
    out = cluster.new_folder("out")
    hosts_file = jobs.map_with_fake_torch(cluster, env={"OUT": str(out)})
    options = ["--grace", "1", "--lost-after", "6", "--connect-timeout", "5", "--no-preflight"]
    script = jobs.write_script(cluster, endings.STUBBORN)
    with jobs.launch(cluster.login, hosts_file, options, script) as live:
        peak = Peak(live)
        live.wait_for_event("stage_reached", stage="running", timeout_s=120)
        watched = endings.wait_stubborn(cluster, 64)
        row.begins()
        cluster.crash(cluster.hosts[32:])
        row.clean(watched.wait_gone(120))
        began_s = time.monotonic()
        done = live.finish(120)
        print(time.monotonic() - began_s, peak.read() >> 20, done.stderr)
    assert_clean(cluster)
    assert done.returncode == done.receipt["exit_code"] == 4
    assert "Traceback" not in done.stderr
    assert outcomes(done.receipt) == [("stopped", True)] * 32 + [("lost", False)] * 32
    said = endings.block(done.stderr)
    assert (
        len(re.findall(r"^  first: node \d+ \(h\d\d\) was lost: nothing was heard of it for 6 s", said, re.MULTILINE))
        == 1
    )
    assert "\n  h[00-31]: stopped by gpulayer; verified clean\n" in said
    assert "\n  h[32-63]: lost: nothing was heard of it for 6 s; could not be verified, its supervisor" in said
    assert peak.read() < MOST_BYTES
    row.says(
        "exit 4; `h[32-63]: lost: nothing was heard of it for 6 s`; `h[00-31]: stopped by gpulayer; verified clean`"
    )


@pytest.mark.fault("100 jobs one after the other")
@pytest.mark.timeout(900)
def test_a_hundred_jobs_leave_no_trace(cluster2: Cluster, row: Row) -> None:
    """No process, namespace, mount, file, memory or socket is on hosts or login node that was not there before."""
    hosts_file = jobs.map_with_fake_torch(cluster2, defaults={"gpus": 2})
    good = jobs.write_script(cluster2, "print('hello')")
    bad = jobs.write_script(
        cluster2, "import os, sys, time\nif os.environ['RANK'] == '3': sys.exit(1)\ntime.sleep(100)"
    )
    before = [_traces(cluster2, host) for host in cluster2.hosts]
    files = _files(cluster2)
    for number in range(100):
        done = jobs.run(cluster2.login, hosts_file, ["--grace", "1"], bad if number % 2 else good)
        assert done.returncode == number % 2, done.stderr
    row.begins()
    wait_until(lambda: [_traces(cluster2, host) for host in cluster2.hosts] == before, "nothing is left", timeout_s=30)
    row.clean()
    assert_clean(cluster2)
    assert cluster2.login_processes() == []
    assert _files(cluster2) == sorted({*files, str(cluster2.leases / "mutex")})  # made once, for all jobs
    assert not list(Path("/tmp").glob(f"gpulayer-t{os.getpid()}-*"))
    assert len(list((cluster2.login.home / "runs").iterdir())) >= 100
    row.says("nothing on hosts and login node but a hundred run directories")


# The command line a hundred times in one process, and what that process holds after each.
AGAIN = """
import gc, json, os, sys, threading, time, tracemalloc
sys.modules["uvloop"] = None  # its loop is left open, for a process that ends
from gpulayer.cli import run_cli

def held():
    gc.collect()
    until = time.monotonic() + 5
    while threading.active_count() > 1 and time.monotonic() < until:
        time.sleep(0.01)  # threads that nobody waited for
    fds = [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if fd != "3"]
    status = dict(line.split(":\\t", 1) for line in open("/proc/self/status").read().splitlines() if ":\\t" in line)
    return {
        "fds": sorted(name.partition("[")[0] for name in fds if "/fd" not in name),
        "threads": threading.active_count(),
        "children": open(f"/proc/self/task/{os.getpid()}/children").read().split(),
        "rss_bytes": int(status["VmRSS"].split()[0]) << 10,
        "traced_bytes": tracemalloc.get_traced_memory()[0],
    }

seen = []
for number in range(100):
    if number == 20:
        tracemalloc.start()
    code = run_cli(["run", "--hosts", sys.argv[1], "--job-id", f"again-{number}", "--grace", "1", sys.argv[2]])
    if code:
        sys.exit(code)
    if number in (39, 99):
        seen.append(held())
with open(sys.argv[3], "w") as file:
    json.dump(seen, file)
"""


@pytest.mark.fault("100 jobs in one process")
@pytest.mark.timeout(900)
def test_a_hundred_jobs_in_one_process(cluster2: Cluster, row: Row) -> None:
    """Each gives back its file descriptors, threads and children, and memory does not grow with their number."""
    hosts_file = jobs.map_with_fake_torch(cluster2)
    program = jobs.write_script(cluster2, AGAIN)
    script = jobs.write_script(cluster2, "print('hello')")
    told = program.with_name("held.json")
    row.begins()
    argv = [sys.executable, str(program), str(hosts_file), str(script), str(told)]
    done = cluster2.login.run(argv, timeout_s=800)
    assert done.returncode == 0, done.stderr[-3000:]
    early, late = json.loads(told.read_text())
    print(early, late)
    assert_clean(cluster2)
    for name in ("fds", "threads", "children"):
        assert late[name] == early[name]
    assert late["children"] == []
    assert late["traced_bytes"] - early["traced_bytes"] < 1 << 20
    assert late["rss_bytes"] - early["rss_bytes"] < 16 << 20
    grown = (late["rss_bytes"] - early["rss_bytes"]) >> 10
    row.says(f"the same file descriptors and threads after 100 jobs as after 40; {grown} KiB more memory")


def _traces(cluster: Cluster, host: Host) -> dict[str, Any]:
    """What a job could leave on a host: processes, files, mounts, shared memory, sockets."""
    files = host.run(["find", "/tmp", "/dev/shm", "/run", "/root", "/home"]).stdout.splitlines()
    return {
        "processes": sorted((process.pid, process.argv) for process in host.processes()),
        "files": [file for file in files if str(cluster.base) not in file],
        "sockets": sorted(host.run(["ss", "-tulnxH"]).stdout.splitlines()),
        "mounts": host.path("/proc/1/mounts").read_text(),
        "shm": host.run(["ipcs", "-a"]).stdout,
    }


def _files(cluster: Cluster) -> list[str]:
    """The files of the login node's user, and of the leases, run directories left out."""
    runs = cluster.login.home / "runs"
    found = [*cluster.login.home.rglob("*"), *cluster.leases.rglob("*")]
    return sorted(str(path) for path in found if path != runs and runs not in path.parents)
