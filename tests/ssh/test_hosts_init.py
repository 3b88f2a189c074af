"""`gpulayer hosts init --probe`: what it writes of hosts that it has asked, and that a job runs with it."""

from __future__ import annotations

import signal
import sys
import tomllib
from typing import TYPE_CHECKING

import pytest

from gpulayer.hosts import load_hosts
from tests.support.endings import assert_clean
from tests.support.jobs import FAKE_TORCH, GPULAYER, run, write_script
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    import subprocess
    from pathlib import Path

    from tests.support.cluster import Cluster, LoginNode
    from tests.support.host import Host

pytestmark = pytest.mark.ssh

SMI = """#!/bin/sh
case "$1" in
--query-gpu=*) {lines} ;;
esac
"""
GPU = 'echo "{0}, GPU-{0}a, 00000000:0{0}:00.0, 550.90.07, 1, 81559, 0, NVIDIA H100"; '


def give_gpus(host: Host, count: int, *, before: str = "") -> None:
    """Have the host find an `nvidia-smi` that lists so many GPUs, in a folder that every login has on its PATH."""
    host.mount("-t", "tmpfs", "tmpfs", "/usr/local/bin")
    tool = host.path("/usr/local/bin/nvidia-smi")
    tool.write_text(SMI.format(lines=before + "".join(GPU.format(index) for index in range(count))))
    tool.chmod(0o755)


def init(login: LoginNode, folder: Path, *words: str | Path) -> subprocess.CompletedProcess[str]:
    """Run `gpulayer hosts init` in a folder."""
    return login.run([*GPULAYER, "hosts", "init", *map(str, words)], cwd=folder)


def test_hosts_say_what_they_have(cluster4: Cluster) -> None:
    """GPUs and addresses are written down with the reason; hosts that are alike are one range; a job runs with it."""
    folder = cluster4.new_folder("map")
    for host, count in zip(cluster4.hosts, (2, 2, 1, 0), strict=True):
        if count:
            give_gpus(host, count)
    (folder / "hostfile").write_text("h00\nh01\nh02 slots=2\nh03 slots=1\n")
    done = init(cluster4.login, folder, "--from", "hostfile", "--probe", "--python", sys.executable)
    assert (done.returncode, done.stdout) == (0, "")
    assert done.stderr == (
        "gpulayer: asking h[00-03]\ngpulayer: wrote hosts.toml: h[00-03]; `gpulayer check -H hosts.toml` checks them\n"
    )
    text = (folder / "hosts.toml").read_text()
    why = "on eth0, by which the login node reached it"
    assert '[nodes."h[00-01]"]\n' in text
    assert f'address = "10.77.1.[10-11]" # {why}\ngpus = 2 # nvidia-smi lists 2\n' in text
    assert f'[nodes.h02]\naddress = "10.77.1.12" # {why}\ngpus = 2 # nvidia-smi lists 1\n' in text
    assert f'[nodes.h03]\naddress = "10.77.1.13" # {why}\ngpus = 1 # no GPU was found\n' in text
    nodes = load_hosts(folder / "hosts.toml").nodes
    assert [(node.address, node.gpu_count) for node in nodes] == [
        (host.address, count) for host, count in zip(cluster4.hosts, (2, 2, 2, 1), strict=True)
    ]
    script = write_script(cluster4, "pass")
    options = ["-e", f"PYTHONPATH={FAKE_TORCH}", "-C", str(cluster4.shared), "--nproc-per-node", "1", "--no-preflight"]
    ran = run(cluster4.login, folder / "hosts.toml", options, script)
    assert ran.returncode == 0, ran.stderr
    assert_clean(cluster4)


def test_the_address_that_was_come_by_and_the_one_of_the_default_route(cluster2: Cluster) -> None:
    """A host with two networks gets the address that its SSH name has, where that is its own; else its default one."""
    near, far = cluster2.hosts
    for host in (near, far):
        host.ip("addr add 10.99.0.1/24 dev eth0", "route add default via 10.77.0.1")
    folder = cluster2.new_folder("map")
    # 10.77.0.2 is no address of the host: packets to it are rewritten, as by a load balancer or a floating address.
    far.firewall()
    far.nft(
        "add table ip nat",
        "add chain ip nat pre { type nat hook prerouting priority -100; }",
        f"add rule ip nat pre ip daddr 10.77.0.2 dnat to {far.address}",
    )
    cluster2.login.run(["ip", "neigh", "replace", "10.77.0.2", "lladdr", far.mac, "dev", "br0"], check=True)
    config = cluster2.login.home / ".ssh/config"
    config.write_text("Host far\n  HostName 10.77.0.2\n  HostKeyAlias h01\nHost near\n  HostName h00\n")
    done = init(cluster2.login, folder, "--from", "ssh:*", "--probe", "--python", sys.executable)
    assert done.returncode == 0, done.stderr
    nodes = tomllib.loads((folder / "hosts.toml").read_text())["nodes"]
    assert {name: node["address"] for name, node in nodes.items()} == {"far": far.address, "near": near.address}
    text = (folder / "hosts.toml").read_text()
    assert f'[nodes.far] # no GPU was found\naddress = "{far.address}" # on eth0, which has the default route\n' in text
    assert f'address = "{near.address}" # on eth0, by which the login node reached it\n' in text


def test_a_host_behind_a_jump_host(cluster2: Cluster) -> None:
    """Also what was reached through another host is found by its own address."""
    config = cluster2.login.home / ".ssh/config"
    config.write_text("Host h01\n  ProxyJump h00\n")
    cluster2.login.run(["ip", "route", "add", "blackhole", f"{cluster2.hosts[1].address}/32"], check=True)
    folder = cluster2.new_folder("map")
    try:
        done = init(cluster2.login, folder, "--from", "ssh:h01", "--probe", "--python", sys.executable)
    finally:
        cluster2.login.run(["ip", "route", "del", "blackhole", f"{cluster2.hosts[1].address}/32"], check=True)
    assert done.returncode == 0, done.stderr
    text = (folder / "hosts.toml").read_text()
    assert f'address = "{cluster2.hosts[1].address}" # on eth0, the only interface that leads elsewhere\n' in text


def test_a_host_that_cannot_be_asked(cluster2: Cluster) -> None:
    """It is named with its reason and the next step, and no map is written; without it, one is."""
    cluster2.hosts[1].stop_sshd()
    folder = cluster2.new_folder("map")
    (folder / "hostfile").write_text("h00\nh01\n")
    words = ["--from", "hostfile", "--probe", "--python", sys.executable]
    done = init(cluster2.login, folder, *words)
    assert (done.returncode, done.stdout) == (3, "")
    assert "gpulayer: error: 1 of 2 nodes could not be asked\n\nh01: " in done.stderr
    assert "\nhint: " in done.stderr
    assert not (folder / "hosts.toml").exists()
    assert init(cluster2.login, folder, *words, "-x", "h01").returncode == 0
    assert [node.id for node in load_hosts(folder / "hosts.toml").nodes] == ["h00"]


def test_two_names_for_one_host(cluster2: Cluster) -> None:
    """They show once both have told the same address: the map would be refused, so it is not written."""
    folder = cluster2.new_folder("map")
    (cluster2.login.home / ".ssh/config").write_text(
        "Host one\n  HostName h00\nHost two\n  HostName h00\nHost *\n  HostKeyAlias h00\n"
    )
    done = init(cluster2.login, folder, "--from", "ssh:*", "--probe", "--python", sys.executable)
    assert (done.returncode, done.stdout) == (2, "")
    assert f"[nodes.two] is at {cluster2.hosts[0].address}, port 22, where one is too" in done.stderr
    assert not (folder / "hosts.toml").exists()


def test_ctrl_c_while_hosts_are_asked(cluster2: Cluster) -> None:
    """It ends at once with a signal's exit code; no map is written, and nothing of the question is left anywhere."""
    host = cluster2.hosts[0]
    give_gpus(host, 1, before="touch /tmp/asked; sleep 1000; ")
    folder = cluster2.new_folder("map")
    (folder / "hostfile").write_text("h00\n")
    argv = [*GPULAYER, "hosts", "init", "--from", "hostfile", "--probe", "--python", sys.executable]
    asking = cluster2.login.popen(argv, cwd=folder)
    wait_until(host.path("/tmp/asked").exists, "the tool is asked", timeout_s=30)
    asking.send_signal(signal.SIGINT)
    _, errors = asking.communicate(timeout=30)
    assert (asking.returncode, errors) == (130, b"gpulayer: asking h00\ngpulayer: interrupted\n")
    assert [path.name for path in folder.iterdir()] == ["hostfile"]
    wait_until(lambda: host.strays() == [], "the probe and its tool are gone")
