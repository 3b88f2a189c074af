"""Launchers on hosts of their own: c10d with real torchrun, Accelerate's, and a stand-in for DeepSpeed's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import tests.support
from tests.support import jobs
from tests.support.endings import assert_clean, outcomes

if TYPE_CHECKING:
    from tests.support.cluster import Cluster
    from tests.support.jobs import Finished

pytestmark = pytest.mark.ssh

FAKE_DEEPSPEED = Path(tests.support.__file__).parent / "fake_deepspeed"

ALL_REDUCE = """
import os, sys, torch
import torch.distributed as dist
dist.init_process_group(os.environ.get("GPULAYER_COMM_BACKEND", "nccl"))
total = torch.tensor([dist.get_rank() + 1])
dist.all_reduce(total)
where = os.uname().nodename
print("rank", dist.get_rank(), "on", where, "of", dist.get_world_size(), "sum", total.item(), sys.argv[1:])
dist.destroy_process_group()
"""
# Rank 2 fails once all have begun.
SAY = """
import json, os, sys, time
rank = int(os.environ["RANK"])
names = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "LOCAL_RANK", "CUDA_VISIBLE_DEVICES", "GPULAYER_COMM_BACKEND")
print("rank", rank, json.dumps([os.environ[name] for name in names]), json.dumps(sys.argv[1:]), flush=True)
print("words of", rank, "on stderr", file=sys.stderr, flush=True)
folder = os.environ["OUT"]
open(f"{folder}/{rank}", "w").close()
while len(os.listdir(folder)) < 4:
    time.sleep(0.01)
if sys.argv[-1] == "fail":
    if rank == 2:
        sys.exit(17)
    time.sleep(100)
"""


def rank_lines(done: Finished) -> dict[int, str]:
    """Return what each rank printed, by its place in the run directory."""
    return {
        rank: done.log(node_rank, rank).decode()
        for node_rank, node in enumerate(done.receipt["nodes"])
        for rank in [one["rank"] for one in node["ranks"]]
    }


@pytest.mark.torch
def test_c10d_with_real_torchrun(cluster2: Cluster) -> None:
    """The agents meet by c10d at node 0, which is the one that torchrun numbers so, whatever the map's order.

    Tags, logs and the receipt have the numbers that the ranks themselves have.
    """
    backwards = cluster2.hosts_toml(hosts=list(reversed(cluster2.hosts)), defaults={"gpus": 1})
    script = jobs.write_script(cluster2, ALL_REDUCE)
    options = ["--rendezvous", "c10d", "--backend", "gloo", "--join-timeout", "60"]
    done = jobs.run(cluster2.login, backwards, options, script, ["$NODE_RANK", "a$$b"], timeout_s=90)
    assert_clean(cluster2)
    assert done.returncode == 0, done.stderr
    assert outcomes(done.receipt) == [("succeeded", True)] * 2
    assert [node["node_id"] for node in done.receipt["nodes"]] == ["h00", "h01"]
    assert rank_lines(done) == {rank: f"rank {rank} on h0{rank} of 2 sum 3 ['{rank}', 'a$$b']\n" for rank in range(2)}
    assert "are numbered otherwise" not in done.stderr


@pytest.mark.torch
@pytest.mark.slow
def test_accelerate(cluster2: Cluster) -> None:
    """Accelerate's launcher on each node, with torchrun in it: ranks, their own logs, words, the backend."""
    pytest.importorskip("accelerate")
    script = jobs.write_script(cluster2, ALL_REDUCE)
    options = ["--launcher", "accelerate", "--backend", "gloo"]
    words = ["$NODE_RANK", "a$$b", "--", "two words"]
    done = jobs.run(cluster2.login, cluster2.hosts_toml(defaults={"gpus": 1}), options, script, words, timeout_s=110)
    assert_clean(cluster2)
    assert done.returncode == 0, done.stderr
    assert outcomes(done.receipt) == [("succeeded", True)] * 2
    assert rank_lines(done) == {
        rank: f"rank {rank} on h0{rank} of 2 sum 3 ['{rank}', 'a$$b', '--', 'two words']\n" for rank in range(2)
    }


@pytest.mark.parametrize("fails", [False, True])
def test_deepspeed(cluster2: Cluster, fails: bool) -> None:
    """DeepSpeed's launcher of one node gets devices, ranks and address; each rank has a file and a tag of its own.

    Where a rank fails, it is told with its own code, before the launcher has said a word.
    """
    folder = cluster2.new_folder("out")
    env = {"PYTHONPATH": str(FAKE_DEEPSPEED), "OUT": str(folder)}
    nodes = {"h00": {"gpus": [4, 6]}, "h01": {"gpus": [0, 1]}}
    hosts_file = cluster2.hosts_toml(defaults={"env": env}, nodes=nodes)
    options = ["--launcher", "deepspeed", "--backend", "gloo", "--no-preflight"]
    words = ["$NODE_RANK", "two words", "--", "fail" if fails else "go on"]
    done = jobs.run(cluster2.login, hosts_file, options, jobs.write_script(cluster2, SAY), words)
    assert_clean(cluster2)
    assert done.returncode == (1 if fails else 0), done.stderr
    expected = {}
    for rank in range(4):
        node_rank, local_rank = divmod(rank, 2)
        devices = ("4,6", "0,1")[node_rank]
        env_words = [cluster2.hosts[0].address, "29500", "4", str(local_rank), devices, "gloo"]
        args = [f"--local_rank={local_rank}", str(node_rank), *words[1:]]
        expected[rank] = f"rank {rank} {json.dumps(env_words)} {json.dumps(args)}\nwords of {rank} on stderr\n"
    assert rank_lines(done) == expected
    if fails:
        assert outcomes(done.receipt) == [("stopped", True), ("failed", True)]
        cause = done.receipt["cause"]
        assert (cause["kind"], cause["rank"], cause["code"]) == ("rank", 2, 17)
        assert "  first: rank 2 on node 1 (h01) exited with code 17" in done.stderr
    else:
        assert outcomes(done.receipt) == [("succeeded", True)] * 2
        assert b"spawned" in done.log(0, None)
