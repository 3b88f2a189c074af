"""Whole jobs that succeed: ranks run where the plan says, see what it says, and find each other; 70 hosts too."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from tests.support import jobs
from tests.support.jobs import TELL, launch, map_with_fake_torch, run, told, write_script

if TYPE_CHECKING:
    from pathlib import Path

    from tests.conftest import ClusterFactory
    from tests.support.cluster import Cluster

pytestmark = pytest.mark.ssh

ALL_REDUCE = f"""
import torch, torch.distributed
{TELL}
torch.distributed.init_process_group("gloo")
value = torch.tensor([seen["rank"] + 1.0])
torch.distributed.all_reduce(value)
print("sum", value.item())
torch.distributed.destroy_process_group()
""".replace('"argv"', '"rank": int(os.environ["RANK"]), "argv"', 1)

# Every rank waits until all of them are there.
MEET = """
import os, sys, time
here, count = os.environ["OUT"], int(sys.argv[1])
open(os.path.join(here, os.environ["RANK"]), "w").close()
deadline = time.monotonic() + 60
while len(os.listdir(here)) < count and time.monotonic() < deadline:
    time.sleep(0.2)
print(len(os.listdir(here)), "are here")
"""

NASTY_FOR_TORCHRUN = ("--", "a$$b", "^x$", "--nnodes", "$5", "")


def _plan(run_dir: Path) -> dict[str, Any]:
    plan: dict[str, Any] = json.loads((run_dir / "plan.json").read_text())
    return plan


@pytest.mark.torch
def test_two_hosts_with_two_processes_each_add_up_to_10(cluster2: Cluster) -> None:
    """Four ranks of a real gloo job find each other although each host takes its own name for 127.0.1.1.

    Each rank ran on its host, with the very arguments, environment and folder that plan.json holds.
    """
    script = write_script(cluster2, ALL_REDUCE)
    hosts = cluster2.hosts_toml(defaults={"gpus": 2}, by_name=True)
    done = run(cluster2.login, hosts, ["-e", f"OUT={script.parent}"], script, NASTY_FOR_TORCHRUN, timeout_s=100)

    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"[{rank // 2}/{rank}] sum 10.0" for rank in range(4)]
    seen = told(script.parent)
    assert [seen[rank]["hostname"] for rank in range(4)] == ["h00", "h00", "h01", "h01"]
    first, second = cluster2.hosts
    assert [seen[rank]["namespaces"]["pid"] for rank in range(4)] == [first.namespace] * 2 + [second.namespace] * 2
    assert len({seen[rank]["namespaces"]["net"] for rank in range(4)}) == 2
    for host in cluster2.hosts:
        assert host.run(["getent", "ahostsv4", host.name]).stdout.split()[0] == "127.0.1.1"

    plan = _plan(done.run_dir)
    for node in plan["nodes"]:
        argv = node["argv"]
        assert argv[argv.index("--master-addr") + 1] == plan["master_addr"] == first.address
        assert not [word for word in argv[: argv.index("--")] if "$" in word]
        for rank in node["ranks"]:
            assert argv[argv.index("--") + 1 :] == [str(script), *(a.replace("$", "$$") for a in seen[rank]["argv"])]
            assert seen[rank]["argv"] == list(NASTY_FOR_TORCHRUN)
            assert node["env"].items() <= seen[rank]["env"].items()
            assert seen[rank]["cwd"] == node["workdir"]
            names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "MASTER_ADDR", "WORLD_SIZE", "LOCAL_RANK")
            expected = ["eth0", "=eth0", first.address, "4", str(rank % 2)]
            assert [seen[rank]["env"][name] for name in names] == expected
            assert seen[rank]["stdin"] == "/dev/null"

    assert (done.receipt["exit_code"], done.receipt["cause"]) == (0, None)
    for record in done.receipt["nodes"]:
        assert (record["outcome"], record["verified_clean"], record["hostname"]) == (
            "succeeded",
            True,
            record["node_id"],
        )
        assert [(rank["code"], rank["signal"]) for rank in record["ranks"]] == [(0, None)] * 2
    assert "h[00-01]: succeeded; verified clean" in done.stderr


@pytest.mark.torch
def test_nodes_with_two_one_and_three_processes_share_one_world(cluster4: Cluster) -> None:
    """Ranks run on in node order, 0 and 1, then 2, then 3 to 5, and all six add up to 21."""
    script = write_script(cluster4, ALL_REDUCE)
    hosts = cluster4.hosts_toml(
        hosts=cluster4.hosts[:3], nodes={"h00": {"gpus": 2}, "h01": {"gpus": 1}, "h02": {"gpus": 3}}
    )
    done = run(cluster4.login, hosts, ["-e", f"OUT={script.parent}"], script, timeout_s=110)

    assert done.returncode == 0, done.stderr
    tags = ["[0/0]", "[0/1]", "[1]", "[2/3]", "[2/4]", "[2/5]"]
    assert sorted(done.stdout.splitlines()) == [f"{tag} sum 21.0" for tag in tags]
    nodes = _plan(done.run_dir)["nodes"]
    assert [node["ranks"] for node in nodes] == [[0, 1], [2], [3, 4, 5]]
    assert "$" not in json.dumps(nodes)
    assert all(cluster4.hosts[0].address in node["argv"] for node in nodes)
    assert [seen["hostname"] for _, seen in sorted(told(script.parent).items())] == ["h00"] * 2 + ["h01"] + ["h02"] * 3


def test_an_ordinary_user_runs_a_job_as_themselves(cluster2: Cluster) -> None:
    """Without root on either side, ranks have the user's uid and the job's folder on the node is gone at the end."""
    script = write_script(cluster2, TELL)
    hosts = map_with_fake_torch(cluster2, defaults={"gpus": 2})
    done = run(cluster2.walker, hosts, ["-e", f"OUT={script.parent}"], script)

    assert done.returncode == 0, done.stderr
    seen = told(script.parent)
    assert [(seen[rank]["uid"], seen[rank]["hostname"]) for rank in range(4)] == [(7001, "h00")] * 2 + [
        (7001, "h01")
    ] * 2
    for host in cluster2.hosts:
        assert list(host.path("/tmp").glob("gpulayer-*")) == []


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["-e", "GLOO_SOCKET_IFNAME=lo"], {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "=eth0"}),
        (["--interface", "eth0"], {"GLOO_SOCKET_IFNAME": "eth0", "NCCL_SOCKET_IFNAME": "=eth0"}),
    ],
    ids=["by the user's own variable", "by --interface"],
)
def test_a_user_can_choose_the_interface(cluster2: Cluster, options: list[str], expected: dict[str, str]) -> None:
    """What the user set stays; the rest is chosen on the node."""
    script = write_script(cluster2, TELL)
    done = run(cluster2.login, map_with_fake_torch(cluster2), [*options, "-e", f"OUT={script.parent}"], script)
    assert done.returncode == 0, done.stderr
    for seen in told(script.parent).values():
        assert {name: seen["env"][name] for name in expected} == expected


def test_leftovers_in_a_nodes_own_environment_mislead_nobody(cluster2: Cluster) -> None:
    """A stale PET_* or RANK that a login shell exports reaches neither torchrun nor the script."""
    for host in cluster2.hosts:
        host.path("/root/.bashrc").write_text("export PET_NPROC_PER_NODE=7 MASTER_ADDR=10.9.9.9 RANK=5 MINE=kept\n")
    script = write_script(cluster2, TELL)
    try:
        done = run(cluster2.login, map_with_fake_torch(cluster2), ["-e", f"OUT={script.parent}"], script)
    finally:
        for host in cluster2.hosts:
            host.path("/root/.bashrc").unlink()
    assert done.returncode == 0, done.stderr
    seen = told(script.parent)
    assert sorted(seen) == [0, 1]
    for rank, one in seen.items():
        names = ("RANK", "MASTER_ADDR", "MINE")
        assert [one["env"].get(name) for name in names] == [str(rank), cluster2.hosts[0].address, "kept"]
        assert not [name for name in one["env"] if name.startswith("PET_")]


def test_nodes_are_drawn_as_asked(cluster4: Cluster) -> None:
    """-w, -x and -N decide which hosts run ranks, in the order of the map; the others run nothing."""
    script = write_script(cluster4, TELL)
    options = ["-w", "h[01-03]", "-x", "h02", "-N", "2", "--nproc-per-node", "2", "-e", f"OUT={script.parent}"]
    done = run(cluster4.login, map_with_fake_torch(cluster4), options, script)
    assert done.returncode == 0, done.stderr
    assert [seen["hostname"] for _, seen in sorted(told(script.parent).items())] == ["h01", "h01", "h03", "h03"]


def test_seventy_hosts_run_at_once(make_cluster: ClusterFactory) -> None:
    """More hosts than logins in flight are bounded to: every rank waits for all 70, and all of them come."""
    cluster = make_cluster(70)
    script = write_script(cluster, MEET)
    out = cluster.new_folder("met")
    hosts = map_with_fake_torch(cluster)
    with launch(cluster.login, hosts, ["-e", f"OUT={out}"], script, ["70"]) as live:
        done = live.finish(100)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == sorted(f"[{rank}] 70 are here" for rank in range(70))
    assert [done.log(rank, rank) for rank in range(70)] == [b"70 are here\n"] * 70
    assert {node["outcome"] for node in done.receipt["nodes"]} == {"succeeded"}
    assert {node["verified_clean"] for node in done.receipt["nodes"]} == {True}
    assert sorted(node["hostname"] for node in done.receipt["nodes"]) == [host.name for host in cluster.hosts]


def test_what_render_prints_is_what_run_sends(cluster2: Cluster) -> None:
    """With the same options, `render` and `run --dry-run` print the plan.json of the run, and make nothing."""
    script = write_script(cluster2, TELL)
    hosts = map_with_fake_torch(cluster2, defaults={"gpus": 2}, env={"WHERE": "$NODE_ID of $NNODES"})
    options = ["--hosts", str(hosts), "--job-id", "same-1", "-e", f"OUT={script.parent}"]
    options += ["-C", f"{script.parent}", "--grace", "7"]
    words = [str(script), "$NODE_RANK", "${MASTER_ADDR}:${MASTER_PORT}", "it's"]
    rendered = cluster2.login.run([*jobs.GPULAYER, "render", "--format", "json", *options, *words])
    dry = cluster2.login.run([*jobs.GPULAYER, "run", "--dry-run", "--format", "json", *options, *words])
    assert not (cluster2.login.home / "runs/same-1").exists()
    done = cluster2.login.run([*jobs.GPULAYER, "run", *options, *words])

    assert (rendered.returncode, dry.returncode, done.returncode) == (0, 0, 0), done.stderr
    assert rendered.stderr == dry.stderr == ""
    assert rendered.stdout == dry.stdout == (cluster2.login.home / "runs/same-1/plan.json").read_text()
    address = cluster2.hosts[0].address
    seen = told(script.parent)
    assert [seen[rank]["argv"] for rank in range(4)] == [
        [str(rank // 2), f"{address}:29500", "it's"] for rank in range(4)
    ]
    assert [seen[rank]["env"]["WHERE"] for rank in (0, 3)] == ["h00 of 2", "h01 of 2"]
    assert {one["cwd"] for one in seen.values()} == {str(script.parent)}
