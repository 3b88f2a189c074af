"""Preflight on GPUs, by a stand-in for `nvidia-smi` on each host's PATH: clean, in use, too few, hanging, missing."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

import pytest

from tests.support import netns
from tests.support.jobs import FAKE_TORCH, launch, map_with_fake_torch, run, write_script
from tests.support.preflight import check, nvidia_smi, pid_of, write_program
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.cluster import Cluster
    from tests.support.host import Host

pytestmark = pytest.mark.ssh

HANGS = "#!/bin/sh\nsleep 86398 &\nwait\n"


def _map(cluster: Cluster, tools: dict[str, str]) -> Path:
    """A hosts map whose nodes have these `nvidia-smi` on their PATH; the others have none."""
    nodes = {}
    for name, text in tools.items():
        folder = cluster.new_folder("bin")
        write_program(folder / "nvidia-smi", text)
        nodes[name] = {"env": {"PYTHONPATH": str(FAKE_TORCH), "PATH": f"{folder}:{netns.SYSTEM_PATH}"}}
    return map_with_fake_torch(cluster, nodes=nodes)


def _train(host: Host, user: str) -> int:
    """Start what stands for a training of another user; return its pid on the host."""
    host.start(["bash", "-c", "exec -a train sleep 86399"], user=user)
    return pid_of(host, "train", "86399")


def test_a_dirty_node_is_refused_by_name_and_never_cleaned(cluster8: Cluster) -> None:
    """Eight GPUs are asked for: who uses them is named, by pid, user, command and MiB. `--allow-dirty` goes on."""
    hosts = cluster8.hosts
    pid = _train(hosts[1], "walker")
    idle = [4] * 8
    tools = {
        "h00": nvidia_smi(idle),
        "h01": nvidia_smi([4, 40000, *idle[2:]], [(1, pid, 39990)]),
        "h02": nvidia_smi([4, 4, 40001, *idle[3:]]),
        "h03": nvidia_smi(idle[:4]),
        "h04": "#!/bin/sh\necho 'NVIDIA-SMI has failed because it could not communicate with the driver' >&2\nexit 9\n",
        "h06": nvidia_smi(idle),
        "h07": nvidia_smi([500, *idle[1:]]),
    }
    map_file = _map(cluster8, tools)
    dirt = [
        (
            f"h01: processes are on the GPUs of the job: pid {pid}, user walker, `train 86399`: 39990 MiB on GPU 1\n"
            "hint: gpulayer ends nothing that is not its own: wait, or have them ended; `--allow-dirty` runs beside "
            "them "
            "(troubleshooting: gpu-process)"
        ),
        (
            "h02: over 500 MiB of a GPU's memory are in use by no process that is visible: GPU 2, 40001 MiB\n"
            "hint: another container has the GPU, or a process is ending; `--allow-dirty` runs beside it "
            "(troubleshooting: gpu-memory)"
        ),
    ]
    few = (
        "h03: fewer GPUs than the 8 processes: `nvidia-smi` shows 4\n"
        "hint: ask for fewer with `--nproc-per-node`, or see in `dmesg` why some are missing; `--backend gloo` is for "
        "ranks that share GPUs or need none (troubleshooting: gpus-too-few)"
    )
    fails = (
        "warning: h04: `nvidia-smi` fails: NVIDIA-SMI has failed because it could not communicate with the driver\n"
        "hint: run `nvidia-smi` on the node; mostly the driver is not loaded, or is another version than its tools "
        "(troubleshooting: gpu-tool-failed)"
    )
    done = check(cluster8, map_file, ["--nproc-per-node", "8", "-x", "h05"])
    shm = [finding for finding in done.findings if "/dev/shm" in finding]
    assert [finding for finding in done.findings if finding not in shm] == [few, *dirt, fails]
    assert done.returncode == 3
    assert pid_of(hosts[1], "train", "86399") == pid

    beside = check(cluster8, map_file, ["--nproc-per-node", "8", "-w", "h[00-02,06-07]", "--allow-dirty"])
    assert [finding for finding in beside.findings if finding not in shm] == [f"warning: {finding}" for finding in dirt]
    assert (beside.returncode, beside.verdict) == (0, f"h[00-02,06-07]: a job would run, with {2 + len(shm)} warnings")

    clean = check(cluster8, map_file, ["-w", "h[00,05-07]"])
    assert (clean.returncode, clean.stdout) == (0, "h[00,05-07]: a job would run\n")


def test_only_the_gpus_that_the_job_will_use_are_looked_at(cluster2: Cluster) -> None:
    """With a list of GPUs in the map, a process on another one is its owner's matter."""
    pid = _train(cluster2.hosts[0], "walker")
    hosts = _map(cluster2, dict.fromkeys(("h00", "h01"), nvidia_smi([4, 4, 40000, 4], [(2, pid, 39990)])))
    other = hosts.read_text().replace("gpus = 1\n", "gpus = [0, 1]\n")
    hosts.write_text(other)
    done = check(cluster2, hosts)
    assert [finding for finding in done.findings if "/dev/shm" not in finding] == []
    assert done.returncode == 0
    hosts.write_text(other.replace("gpus = [0, 1]\n", "gpus = [2, 7]\n"))
    done = check(cluster2, hosts)
    assert done.findings[0].startswith(
        "h[00-01]: the job is to use GPU 7, which `nvidia-smi` does not show: it shows 0, 1, 2, 3\nhint: "
    )
    assert done.findings[1].startswith(
        f"h[00-01]: processes are on the GPUs of the job:\n  h00: pid {pid}, user walker"
    )
    assert done.returncode == 3


def test_a_tool_that_hangs_is_a_finding_and_is_not_left_behind(cluster2: Cluster) -> None:
    """After its 10 s; a run with `--allow-dirty` goes on all the same."""
    hosts = _map(cluster2, {"h01": HANGS})
    script = write_script(cluster2, "print('ran')")
    done = run(cluster2.login, hosts, ["--allow-dirty"], script)
    assert done.returncode == 0, done.stderr
    assert [entry["text"] for entry in done.named("notice")] == [
        (
            "warning: h01: `nvidia-smi` gave no answer within 10 s\n"
            "hint: the GPU driver hangs: see `dmesg`, and restart the machine; `--allow-dirty` runs all the same "
            "(troubleshooting: gpu-tool-hangs)"
        )
    ]
    assert _tools(cluster2) == []


def test_ctrl_c_while_a_tool_hangs_ends_the_tool(cluster2: Cluster) -> None:
    """Exit code 130 at once, and neither probe nor tool nor what that started is left."""
    hosts = _map(cluster2, {"h01": HANGS})
    with launch(cluster2.login, hosts, [], write_script(cluster2, "print('never')")) as live:
        live.wait_for_event("node_checked", node_rank=0)
        wait_until(lambda: len(_tools(cluster2)) > 0, "the tool runs")
        live.interrupt(signal.SIGINT)
        done = live.finish(10)
    assert done.returncode == 130
    assert done.named("command_started") == []
    wait_until(lambda: _tools(cluster2) == [] and cluster2.hosts[1].strays() == [], "nothing is left")


def _tools(cluster: Cluster) -> list[tuple[str, ...]]:
    """The command lines of stand-ins and of what they started."""
    return [
        p.argv
        for host in cluster.hosts
        for p in host.processes()
        if "nvidia-smi" in " ".join(p.argv) or "86398" in p.argv
    ]
