"""Preflight on the network: one host under two ids, interfaces, addresses on none or on another host."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from tests.support.jobs import TELL, map_with_fake_torch, run, told, write_script
from tests.support.preflight import check, hold_port
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.cluster import Cluster
    from tests.support.host import Host

pytestmark = pytest.mark.ssh

ALL_REDUCE = """
import torch, torch.distributed
from os import environ
torch.distributed.init_process_group("gloo")
value = torch.tensor([int(environ["RANK"]) + 1.0])
torch.distributed.all_reduce(value)
print("sum", value.item(), environ["GLOO_SOCKET_IFNAME"], environ["NCCL_SOCKET_IFNAME"], environ["MASTER_PORT"])
torch.distributed.destroy_process_group()
"""


def _rename(host: Host, name: str) -> None:
    """Give eth0 another name."""
    host.ip("link set eth0 down", f"link set eth0 name {name}", f"link set {name} up")


def _second_interface(host: Host, address: str, *, up: bool) -> None:
    """Give it an interface net1, on a network that nobody else is on."""
    host.ip("link add net1 type veth peer name far1", f"addr add {address}/24 dev net1", "link set far1 up")
    host.ip(f"link set net1 {'up' if up else 'down'}")


def _twin_map(cluster: Cluster, gpus: dict[str, list[int]]) -> Path:
    """A map in which `twin` is h01 by way of an alias of ~/.ssh/config and of a second address."""
    _, host = cluster.hosts
    host.ip("addr add 10.77.9.1/16 dev eth0")
    (cluster.login.home / ".ssh/config").write_text("Host other\n  HostName h01\n")
    hosts = map_with_fake_torch(cluster, nodes={name: {"gpus": indices} for name, indices in gpus.items()})
    extra = f"gpus = {gpus['twin']}" if "twin" in gpus else ""
    hosts.write_text(hosts.read_text() + f'[nodes.twin]\nssh = "other"\naddress = "10.77.9.1"\n{extra}\n')
    return hosts


def test_two_ids_for_one_host_are_refused(cluster2: Cluster) -> None:
    """Two names in ~/.ssh/config and two addresses, and one machine: both ids are named, h00 beside them is not."""
    done = check(cluster2, _twin_map(cluster2, {}))
    boot_id = cluster2.hosts[1].path("proc/sys/kernel/random/boot_id").read_text()[:8]
    assert done.findings == [
        (
            f"h01,twin: several node ids are one machine: host name `h01`, boot id {boot_id}\n"
            "hint: draw one of them, or correct `ssh` in the hosts map; to use parts of one machine as nodes, give "
            "each a "
            "`gpus` list of its own (troubleshooting: same-machine)"
        )
    ]
    assert (done.returncode, done.verdict) == (3, "h[00-01],twin: a job would not run")


def test_two_ids_for_parts_of_one_host_are_two_nodes(cluster2: Cluster) -> None:
    """With a list of GPUs each, and no GPU in both, they are meant. h00 has the boot id of h01, as containers have."""
    done = check(cluster2, _twin_map(cluster2, {"h01": [0], "twin": [1]}))
    assert (done.returncode, done.stdout) == (0, "h[00-01],twin: a job would run\n")


def test_an_interface_that_is_missing_switched_off_or_another_is_refused(cluster4: Cluster) -> None:
    """Each node is told what it has instead: the interface was renamed, is down, or is on another subnet."""
    _, renamed, down, elsewhere = cluster4.hosts
    _rename(renamed, "ens5")
    _second_interface(down, "10.88.0.12", up=False)
    _second_interface(elsewhere, "10.99.0.5", up=True)
    nodes = {
        "h01": {"interface": "eth0"},
        "h02": {"address": "10.88.0.12"},
        "h03": {"interface": "net1"},
    }
    done = check(cluster4, map_with_fake_torch(cluster4, nodes=nodes))
    assert done.findings == [
        (
            "h01: interface `eth0` does not exist: there are ens5, lo\n"
            "hint: correct `--interface`, or `interface` in the hosts map; left out, the one with the node's "
            "address is "
            "used (troubleshooting: interface-missing)"
        ),
        (
            "h02: interface `net1` is switched off\n"
            "hint: switch it on, `ip link set net1 up` as root, or use another `address` (troubleshooting: "
            "interface-down)"
        ),
        (
            "h03: interface `net1` does not hold the node's address: 10.99.0.5 instead of 10.77.1.13\n"
            "hint: leave `interface` out to use the one that does, or set the node's `address` to one of this "
            "interface "
            "(troubleshooting: interface-address)"
        ),
        (
            "h02: cannot be reached by any other node: Network is unreachable\n"
            "hint: see `ip route get ADDRESS` on the node that tried, firewalls that reject, and the other's `address` "
            "(troubleshooting: pair-unreachable)"
        ),
    ]
    assert (done.returncode, done.verdict) == (3, "h[00-03]: a job would not run")


def test_the_interface_that_was_asked_for_is_checked_on_every_node(cluster2: Cluster) -> None:
    """`--interface` is not obeyed where it does not hold the address, and is where it does."""
    for host, address in zip(cluster2.hosts, ("10.88.0.10", "10.88.0.11"), strict=True):
        _second_interface(host, address, up=True)
    hosts = map_with_fake_torch(cluster2)
    wrong = check(cluster2, hosts, ["--interface", "net1"])
    assert wrong.findings == [
        (
            "h[00-01]: interface `net1` does not hold the node's address:\n"
            "  h00: 10.88.0.10 instead of 10.77.1.10\n"
            "  h01: 10.88.0.11 instead of 10.77.1.11\n"
            "hint: leave `interface` out to use the one that does, or set the node's `address` to one of this "
            "interface "
            "(troubleshooting: interface-address)"
        )
    ]
    assert wrong.returncode == 3
    right = check(cluster2, hosts, ["--interface", "eth0"])
    assert (right.returncode, right.stdout) == (0, "h[00-01]: a job would run\n")


def _translate(cluster: Cluster, address: str, to: Host) -> None:
    """Have packets to `address` arrive at another host, from every host."""
    for host in cluster.hosts:
        host.nft(
            "add table ip n",
            "add chain ip n o { type nat hook output priority -100; }",
            f"add rule ip n o ip daddr {address} dnat to {to.address}",
        )


@pytest.mark.nft
def test_an_address_may_be_a_second_one_a_bridges_or_a_translated_one(cluster4: Cluster) -> None:
    """All of them pass, the one that is on no interface (NAT) with a warning, and ranks get the right interface.

    A bridge stands for a bond: an interface that has the address while the card is only part of it.
    """
    _, second, bridge, translated = cluster4.hosts
    second.ip("addr add 10.77.9.11/16 dev eth0")
    bridge.ip("link add br1 type bridge", f"addr del {bridge.address}/16 dev eth0", "link set eth0 master br1")
    bridge.ip(f"addr add {bridge.address}/16 dev br1", "link set br1 up")
    carrier = bridge.path("sys/class/net/br1/carrier")
    wait_until(lambda: carrier.read_text() == "1\n", "the bridge has a carrier")
    _translate(cluster4, "10.77.200.5", translated)
    hosts = map_with_fake_torch(cluster4, nodes={"h01": {"address": "10.77.9.11"}, "h03": {"address": "10.77.200.5"}})
    script = write_script(cluster4, TELL)
    done = run(cluster4.login, hosts, ["-e", f"OUT={script.parent}"], script)
    assert done.returncode == 0, done.stderr
    seen = [told(script.parent)[rank]["env"] for rank in range(4)]
    assert [env["GLOO_SOCKET_IFNAME"] for env in seen] == ["eth0", "eth0", "br1", "eth0"]
    assert [env["NCCL_SOCKET_IFNAME"] for env in seen] == ["=eth0", "=eth0", "=br1", "=eth0"]
    assert [env["TP_SOCKET_IFNAME"] for env in seen] == ["eth0", "eth0", "br1", "eth0"]
    warning = "h03: no interface holds the node's address; the ranks use `eth0`: 10.77.200.5"
    assert done.stderr.count(warning) == 1
    assert [entry["text"].partition("\n")[0] for entry in done.named("notice")] == [f"warning: {warning}"]


def test_nodes_that_have_only_ipv6_pass(cluster4: Cluster) -> None:
    """Addresses of the other family are found, reached and used; the times to the rendezvous are told as data."""
    nodes = {host.name: {"address": host.address6} for host in cluster4.hosts}
    for host in cluster4.hosts[1:]:
        host.ip(f"addr add {host.address6.replace('fd77', 'fd78')}/64 dev eth0 nodad")
    done = check(cluster4, map_with_fake_torch(cluster4, nodes=nodes), ["--format", "json"])
    assert done.returncode == 0
    assert (done.data["ok"], done.data["findings"]) == (True, [])
    assert sorted(done.data["rendezvous_rtt_ms"]) == ["h00", "h01", "h02", "h03"]
    assert all(0 < rtt_ms < 1000 for rtt_ms in done.data["rendezvous_rtt_ms"].values())


def _map_of_three(cluster: Cluster, wrong: str) -> Path:
    """Three nodes, of which one has the address of h03, which is not in the map."""
    return map_with_fake_torch(cluster, hosts=cluster.hosts[:3], nodes={wrong: {"address": cluster.hosts[3].address}})


def test_a_head_whose_address_is_another_hosts_is_refused(cluster4: Cluster) -> None:
    """Nothing listens there, or something else does: told apart, for every node that was to meet there."""
    silent = check(cluster4, _map_of_three(cluster4, "h00"))
    address = cluster4.hosts[3].address
    assert silent.findings[:2] == [
        (
            f"h[00-02]: {address} port 29500 (h00) refuses the connection, though h00 listens there\n"
            "hint: a firewall rejects it, or h00's `address` is that of another machine: correct the one or other "
            "(troubleshooting: rendezvous-refused)"
        ),
        (
            "h00: cannot be reached by any other node: connection refused\n"
            "hint: a firewall rejects it, or the `address` of the node that was tried is that of another machine "
            "(troubleshooting: pair-refused)"
        ),
    ]
    assert silent.findings[2].startswith(
        f"warning: h00: no interface holds the node's address; the ranks use `eth0`: {address}"
    )
    assert (silent.returncode, len(silent.findings)) == (3, 3)
    hold_port(cluster4.hosts[3], 29500)
    other = check(cluster4, _map_of_three(cluster4, "h00"))
    assert other.findings[0] == (
        f"h[00-02]: something else than h00 answers on {address} port 29500 (h00): "
        "it said b'hello'\n"
        "hint: h00's `address` leads to another machine or to a proxy: correct it in the hosts map "
        "(troubleshooting: rendezvous-other)"
    )
    assert (other.returncode, len(other.findings)) == (3, 3)


def test_a_node_whose_address_is_another_hosts_is_refused(cluster4: Cluster) -> None:
    """The others name it: they reach that address, and h02 does not answer there."""
    done = check(cluster4, _map_of_three(cluster4, "h02"))
    assert [finding.partition("\n")[0] for finding in done.findings] == [
        "h02: cannot be reached by any other node: connection refused",
        f"warning: h02: no interface holds the node's address; the ranks use `eth0`: {cluster4.hosts[3].address}",
    ]
    assert done.returncode == 3


@pytest.mark.torch
@pytest.mark.timeout(180)
def test_a_real_job_runs_on_interfaces_of_different_names_and_on_the_next_free_port(cluster2: Cluster) -> None:
    """eth0 here and ens5 there, and 29500 taken: gloo's all-reduce goes over both, on 29501, which is told once."""
    pid = hold_port(cluster2.hosts[0], 29500)
    _rename(cluster2.hosts[1], "ens5")
    script = write_script(cluster2, ALL_REDUCE)
    done = run(cluster2.login, cluster2.hosts_toml(), [], script, timeout_s=120)
    assert done.returncode == 0, done.stderr
    assert done.log(0, 0) == b"sum 3.0 eth0 =eth0 29501\n"
    assert done.log(1, 1) == b"sum 3.0 ens5 =ens5 29501\n"
    assert (
        done.stderr.count(f"port 29500 on h00 is in use by pid {pid}, user root, `python3 /tmp/hold.py 29500 1`") == 1
    )
    assert "so port 29501 is used instead" in done.stderr
    plan = json.loads((done.run_dir / "plan.json").read_text())
    assert plan["master_port"] == 29501
