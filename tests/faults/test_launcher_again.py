"""Ctrl-C once more, and once more, and while a name server is silent; Ctrl-Z: what an impatient user can do."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support import endings, faults, jobs
from tests.support.endings import assert_clean, block, outcomes
from tests.support.faults import STOPPED, SUCCEEDED
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.faults.conftest import Row
    from tests.support.cluster import Cluster
    from tests.support.jobs import Finished

pytestmark = pytest.mark.ssh

LOOPBACK = "127.0.0.53"
PATIENT = "options timeout:30 attempts:2"
NAME_SERVER = f"""
import socket, sys
server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
server.bind(("{LOOPBACK}", 53))
with open(sys.argv[1], "w") as asked:
    while True:
        print(server.recv(1024), file=asked, flush=True)
"""


@pytest.fixture(autouse=True)
def neighbours(cluster2: Cluster) -> Iterator[None]:
    """Processes on every host that must outlive the test."""
    with endings.bystanders(cluster2):
        yield


def _assert_interrupted(done: Finished, nodes: list[tuple[str, bool]]) -> None:
    assert done.returncode == done.receipt["exit_code"] == 130
    assert (done.receipt["cause"]["kind"], done.receipt["cause"]["signal"]) == ("signal", signal.SIGINT)
    assert outcomes(done.receipt) == nodes
    assert re.search(r" was stopped after [\d.]+ s, exit code 130\n", block(done.stderr))
    assert "  first: gpulayer received SIGINT, " in block(done.stderr)
    assert "Traceback" not in done.stderr


@pytest.mark.fault("Ctrl-C twice")
def test_the_second_one_kills_at_once(cluster2: Cluster, row: Row) -> None:
    """Workers that ignore SIGTERM and daemons that hide are gone at once; a grace of 60 s is not waited for."""
    live, _ = faults.launch(cluster2, ["--grace", "60"])
    with live:
        watched = faults.wait_running(cluster2, live)
        live.interrupt()
        live.wait_for_event("node_stopping", node_rank=1)
        assert len(watched.alive()) == len(watched.processes)
        row.begins()
        live.interrupt()
        row.clean(watched.wait_gone(timeout_s=20))
        done = live.finish(20)
    assert_clean(cluster2)
    _assert_interrupted(done, [STOPPED, STOPPED])
    assert [event["now"] for event in done.named("node_stopping")] == [False, False, True, True]
    assert "once more leaves at once" in done.stderr
    row.says("exit 130; `killing the job on every node; once more leaves at once, whatever still runs`")


@pytest.mark.fault("Ctrl-C three times, with a node that does not answer")
def test_the_third_one_leaves_at_once_and_says_what_may_still_run(cluster2: Cluster, row: Row) -> None:
    """A node whose supervisor does not answer is left alone; it ends its part when it can."""
    live, _ = faults.launch(cluster2, ["--grace", "60"])
    with live:
        watched = faults.wait_running(cluster2, live)
        go_on = endings.stop_process(endings.supervisor_of(live, cluster2, 1))
        try:
            live.interrupt()
            wait_until(lambda: "once more kills" in live.stderr_so_far, "the first is answered")
            live.interrupt()
            live.wait_for_event("node_ended", node_rank=0)
            live.interrupt()
            done = live.finish(10)
            assert len(watched.alive()) >= 2
        finally:
            row.begins()
            go_on()
    row.clean(watched.wait_gone())
    assert_clean(cluster2, kept_on=[host for host in cluster2.hosts if endings.folders(host)])
    _assert_interrupted(done, [STOPPED, ("running", False)])
    assert "  h00: stopped by gpulayer; verified clean\n" in block(done.stderr)
    assert "  h01: running; could not be verified, its supervisor ends its part by itself" in block(done.stderr)
    row.says("exit 130; `h01: running; could not be verified, its supervisor ends its part by itself`")


@pytest.fixture
def silent_name_server(cluster2: Cluster) -> Iterator[Path]:
    """The login node's only name server never answers. It writes into this file what it was asked."""
    folder = cluster2.new_folder("names")
    files = {"nsswitch.conf": "passwd: files\nhosts: files dns\n", "resolv.conf": f"nameserver {LOOPBACK}\n{PATIENT}\n"}
    for name, text in files.items():
        (folder / name).write_text(text)
        cluster2.login.run(["mount", "-n", "--bind", str(folder / name), f"/etc/{name}"], check=True)
    argv, nowhere = [sys.executable, "-c", NAME_SERVER, str(folder / "asked")], subprocess.DEVNULL
    server = cluster2.login.popen(argv, stdout=nowhere, stderr=nowhere)
    wait_until((folder / "asked").exists, "the name server listens")
    yield folder / "asked"
    server.kill()
    server.wait()
    for name in files:
        cluster2.login.run(["umount", "-n", f"/etc/{name}"], check=True)


ASKED_FOR = {
    "addresses are looked up": ("", False),
    "connecting": ('address = "10.77.1.10"\n', True),
}


@pytest.mark.parametrize(
    "stage",
    [pytest.param(one, marks=pytest.mark.fault(f"Ctrl-C while {one}, with a silent name server")) for one in ASKED_FOR],
)
def test_a_name_server_that_is_silent(cluster2: Cluster, row: Row, silent_name_server: Path, stage: str) -> None:
    """Nobody waits for it: its limit is a minute, and gpulayer ends at once."""
    keys, run_dir = ASKED_FOR[stage]
    hosts = jobs.map_with_fake_torch(cluster2, hosts=[])
    hosts.write_text(f'{hosts.read_text()}[nodes.h00]\nssh = "nowhere.example"\n{keys}')
    with jobs.launch(cluster2.login, hosts, [], "train.py") as live:
        wait_until(lambda: silent_name_server.read_text() != "", "a name is looked up")
        live.interrupt()
        done = live.finish(20)
    assert_clean(cluster2)
    assert done.returncode == 130
    assert "Traceback" not in done.stderr
    assert (done.run_dir.exists(), done.stderr == "gpulayer: interrupted\n") == (run_dir, not run_dir)
    if run_dir:
        _assert_interrupted(done, [("never started", True)])
    row.says("exit 130; `interrupted`" if not run_dir else "exit 130; `job JOB was stopped`")


@pytest.mark.fault("Ctrl-Z")
def test_ctrl_z_does_not_suspend(cluster2: Cluster, row: Row) -> None:
    """gpulayer says why it goes on, and the job succeeds."""
    source = endings.BEGIN + "note(f'ready{rank}')\nwait_for('go')\n"
    live, folder = faults.launch(cluster2, [], source)
    with live:
        endings.wait_ready(folder, 2)
        row.begins()
        live.interrupt(signal.SIGTSTP)
        wait_until(lambda: "gpulayer: not suspended: " in live.stderr_so_far, "it says so")
        state = Path(f"/proc/{live.process.pid}/stat").read_text().rpartition(")")[2].split()[0]
        assert state != "T"
        (folder / "go").touch()
        done = live.finish()
    assert_clean(cluster2)
    assert done.returncode == 0
    assert outcomes(done.receipt) == [SUCCEEDED, SUCCEEDED]
    row.says("exit 0; `not suspended: the nodes would take a sleeping launcher for a lost one and end the job`")
