"""`gpulayer exec`: any command, once on each node, as one job: words, environment, failure, the end."""

from __future__ import annotations

import json
import os
import re
import sys
from typing import TYPE_CHECKING

import pytest

from tests.support import jobs
from tests.support.endings import assert_clean, block, outcomes
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from tests.support.cluster import Cluster
    from tests.support.jobs import Finished, LiveRun

pytestmark = pytest.mark.ssh

# Node 0 serves at $MASTER_ADDR:$MASTER_PORT, the others ask it; it ends once all have.
MEET = """
import os, socket, sys, time
address = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
assert address == (sys.argv[1], int(sys.argv[2])), (address, sys.argv)
rank, nnodes = int(os.environ["NODE_RANK"]), int(os.environ["NNODES"])
if rank == 0:
    with socket.create_server(address) as server:
        for _ in range(nnodes - 1):
            with server.accept()[0] as client:
                client.sendall(b"node 0 greets " + client.recv(100))
    print("served")
else:
    deadline = time.monotonic() + 20
    while True:
        try:
            client = socket.create_connection(address)
            break
        except ConnectionRefusedError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)
    with client:
        client.sendall(b"node %d" % rank)
        print(client.recv(100).decode())
"""
TELL = """
import json, os, sys
with open(sys.argv[1], "w") as file:
    json.dump({"argv": sys.argv[2:], "env": dict(os.environ), "cwd": os.getcwd()}, file)
"""
# Node 1 fails once node 0 waits; node 0 says how it was ended.
ONE_FAILS = """
import os, signal, sys, time
folder, rank = sys.argv[1], os.environ["NODE_RANK"]
def told(number, frame):
    print("told to end", flush=True)
    time.sleep(0.3)
    print("ended well", flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, told)
open(f"{folder}/ready{rank}", "w").close()
if rank == "1":
    while not os.path.exists(f"{folder}/ready0"):
        time.sleep(0.01)
    print("last words", file=sys.stderr)
    sys.exit(3)
time.sleep(100)
"""


def launch(cluster: Cluster, hosts_file: Path, options: Sequence[str], *command: str) -> LiveRun:
    """Start `gpulayer exec` with these words."""
    return jobs.launch(cluster.login, hosts_file, [*options, "--"], command[0], command[1:], command="exec")


def run(cluster: Cluster, hosts_file: Path, options: Sequence[str], *command: str) -> Finished:
    """Run `gpulayer exec` to its end."""
    with launch(cluster, hosts_file, options, *command) as live:
        return live.finish()


def test_nodes_meet_at_the_head(cluster2: Cluster) -> None:
    """A server on node 0 is reached by the others at the address and port that placeholders and environment name."""
    program = jobs.write_script(cluster2, MEET)
    done = run(cluster2, cluster2.hosts_toml(), [], sys.executable, str(program), "$MASTER_ADDR", "${MASTER_PORT}")
    assert_clean(cluster2)
    assert done.returncode == 0, done.stderr
    assert outcomes(done.receipt) == [("succeeded", True)] * 2
    assert [done.log(rank, None) for rank in range(2)] == [b"served\n", b"node 0 greets node 1\n"]
    assert sorted(done.stdout.splitlines()) == ["[0] served", "[1] node 0 greets node 1"]
    assert "running a command each on 2 nodes, h[00-01]" in done.stderr
    assert sorted(path.name for path in done.run_dir.glob("node*/*")) == ["command.stdout.log"] * 2


def test_words_and_environment_arrive(cluster2: Cluster) -> None:
    """Words come byte for byte, with each node's own values; the environment has the names of a rendezvous."""
    folder = cluster2.new_folder("out")
    program = jobs.write_script(cluster2, TELL)
    words = ["", "two words", "it's", '"quoted"', "a$$b", "--", "-x", "$(no)", os.fsdecode(b"\xff"), "line\nline"]
    words.remove("$(no)")
    hosts_file = cluster2.hosts_toml(defaults={"gpus": 3})
    command = [sys.executable, str(program), f"{folder}/$NODE_RANK.json", *words, "${DOLLAR}HOME", "$NODE_ID"]
    done = run(cluster2, hosts_file, ["-e", "MINE=$NODE_RANK", "--backend", "gloo"], *command)
    assert done.returncode == 0, done.stderr
    for node_rank in range(2):
        seen = json.loads((folder / f"{node_rank}.json").read_text())
        assert seen["argv"] == [*words, "$HOME", f"h0{node_rank}"]
        names = ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "NNODES", "NPROC_PER_NODE", "WORLD_SIZE", "MINE")
        assert [seen["env"].get(name) for name in names] == [
            *(cluster2.hosts[0].address, "29500", str(node_rank), "2", "3", "6", str(node_rank)),
        ]
        assert seen["env"]["GPULAYER_COMM_BACKEND"] == "gloo"
        assert not {"RANK", "LOCAL_RANK", "OMP_NUM_THREADS", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"} & seen["env"].keys()


def test_a_placeholder_without_a_value_is_an_error(cluster2: Cluster) -> None:
    """Nothing is contacted where a `$NAME` would arrive as text."""
    done = run(cluster2, cluster2.hosts_toml(), [], "sh", "-c", "echo $HOME")
    assert done.returncode == 2
    assert "node h00: argument 2: `$HOME` has no value there, nor on h01" in done.stderr


def test_the_first_that_fails_ends_all(cluster2: Cluster) -> None:
    """Node 1 exits 3: the job fails, and node 0's command is told once and has its grace."""
    folder = cluster2.new_folder("out")
    program = jobs.write_script(cluster2, ONE_FAILS)
    done = run(cluster2, cluster2.hosts_toml(), ["--verbose"], sys.executable, str(program), str(folder))
    assert_clean(cluster2)
    assert done.returncode == 1
    assert outcomes(done.receipt) == [("stopped", True), ("failed", True)]
    assert done.log(0, None) == b"told to end\nended well\n"
    lines = block(done.stderr).splitlines()
    assert re.fullmatch(r"  first: the command on node 1 \(h01\) exited with code 3, [\d.]+ s into the job", lines[1])
    assert lines[2:-1] == [
        "  its last lines on stderr:",
        "    last words",
        "  h00: stopped by gpulayer; verified clean",
        "  h01: failed: the command exited with code 3; verified clean",
    ]


@pytest.mark.parametrize(
    ("words", "code", "first"),
    [
        (["sh", "-c", "exit 3"], 1, "exited with code 3"),
        (["sh", "-c", "kill -9 ${DOLLAR}${DOLLAR}"], 1, "was killed by SIGKILL"),
        (["true"], 0, None),
    ],
    ids=["exit", "signal", "true"],
)
def test_exit_codes(words: list[str], code: int, first: str | None, cluster2: Cluster) -> None:
    """0 where all succeed, 1 where one fails; its own code is in the receipt."""
    done = run(cluster2, cluster2.hosts_toml(), ["-N", "1"], *words)
    assert_clean(cluster2)
    assert done.returncode == done.receipt["exit_code"] == code
    if first:
        assert f"the command on node 0 (h00) {first}" in done.stderr
        assert done.receipt["cause"]["kind"] == "command"


def test_what_a_shell_started_has_the_grace(cluster2: Cluster) -> None:
    """A shell passes no signal on: on Ctrl-C its child is told too, and may end in its own time."""
    folder = cluster2.new_folder("out")
    program = jobs.write_script(cluster2, ONE_FAILS.replace('if rank == "1":', "if False:"))
    words = ["sh", "-c", f"{sys.executable} {program} {folder}; echo never"]
    with launch(cluster2, cluster2.hosts_toml(), ["--grace", "20"], *words) as live:
        wait_until(lambda: len(list(folder.iterdir())) == 2, "both commands run")
        live.interrupt()
        done = live.finish()
    assert_clean(cluster2)
    assert done.returncode == 130
    assert [done.log(rank, None) for rank in range(2)] == [b"told to end\nended well\n"] * 2
    assert outcomes(done.receipt) == [("stopped", True)] * 2


def test_what_a_command_leaves_behind_is_ended(cluster2: Cluster) -> None:
    """A command that has ended well ends its node's part: daemons that it left are killed, and the node is clean."""
    done = run(cluster2, cluster2.hosts_toml(), [], "sh", "-c", "setsid sleep 1000 & exit 0")
    assert_clean(cluster2)
    assert done.returncode == 0
    assert outcomes(done.receipt) == [("succeeded", True)] * 2


def test_a_command_that_is_not_there_is_refused(cluster2: Cluster) -> None:
    """Before anything starts the checks name the nodes that lack it; torch is not looked for."""
    done = run(cluster2, cluster2.hosts_toml(), [], "no-such-program", "x")
    assert done.returncode == 3
    assert "h[00-01]: there is no command `no-such-program`" in done.stderr
    assert "torch" not in done.stderr
    assert done.named("command_started") == []


def test_a_job_file_can_hold_a_command(cluster2: Cluster) -> None:
    """`launcher = "command"` in a job file is run by exec, by run and checked by check, with the same words."""
    job = jobs.write_script(
        cluster2, 'launcher = "command"\nentrypoint = "sh"\nargs = ["-c", "echo node $NODE_RANK"]\n', "job.toml"
    )
    for command in ("exec", "run"):
        with jobs.launch(cluster2.login, cluster2.hosts_toml(), ["--job"], job, command=command) as live:
            done = live.finish()
        assert done.returncode == 0, done.stderr
        assert sorted(done.stdout.splitlines()) == ["[0] node 0", "[1] node 1"]


def test_a_command_of_a_bundle(cluster2: Cluster) -> None:
    """A program that only the login node has goes along with `--bundle`, and the checks find it there."""
    folder = cluster2.login.home / "code"
    folder.mkdir(exist_ok=True)
    tool = folder / "tool.sh"
    tool.write_text('#!/bin/sh\necho "$1 of $NNODES"\n')
    tool.chmod(0o755)
    done = run(cluster2, cluster2.hosts_toml(), ["--bundle", str(folder)], "./tool.sh", "$NODE_RANK")
    assert_clean(cluster2)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["[0] 0 of 2", "[1] 1 of 2"]
