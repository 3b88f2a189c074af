"""Preflight where the rendezvous is at an address of the public Internet, which here is one of the test's networks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.support.jobs import TELL, map_with_fake_torch, run, write_script
from tests.support.preflight import check, refused

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.cluster import Cluster

pytestmark = pytest.mark.ssh

WARNING = "the rendezvous is at a public address, and torch lets in whoever reaches it: {address} port 29500"
HINT = (
    "hint: give the nodes `address`es of a private network, or have a firewall keep all others from the nodes' ports "
    "(troubleshooting: rendezvous-public)"
)
NETWORKS = {"IPv4": ("9.77.1.1{}", 16, ""), "IPv6": ("2a77::1{}", 64, " nodad")}


def _public_map(cluster: Cluster, network: str) -> Path:
    """Give the hosts addresses of a public network, with a route to it on these hosts alone."""
    pattern, bits, rest = NETWORKS[network]
    for host in cluster.hosts:
        host.ip(f"addr add {pattern.format(host.index)}/{bits} dev eth0{rest}")
    nodes = {host.name: {"address": pattern.format(host.index)} for host in cluster.hosts}
    return map_with_fake_torch(cluster, nodes=nodes)


@pytest.mark.parametrize("network", NETWORKS)
def test_a_public_rendezvous_is_a_warning(cluster2: Cluster, network: str) -> None:
    """check and run say it once, of node rank 0; --strict makes it a failure; without the checks nothing is said."""
    hosts, text = _public_map(cluster2, network), WARNING.format(address=NETWORKS[network][0].format(0))
    done = check(cluster2, hosts)
    assert (done.returncode, done.findings) == (0, [f"warning: h00: {text}\n{HINT}"])
    assert done.verdict == "h[00-01]: a job would run, with 1 warning"
    script = write_script(cluster2, TELL)
    ran = run(cluster2.login, hosts, ["-e", f"OUT={script.parent}"], script)
    assert ran.returncode == 0, ran.stderr
    assert ran.stderr.count("public address") == 1
    assert [notice["text"] for notice in ran.named("notice")] == [f"warning: h00: {text}\n{HINT}"]
    assert f"h00: {text}\n{HINT}" in refused(cluster2, hosts, ["--strict"]).stderr
    bare = run(cluster2.login, hosts, ["--no-preflight", "-e", f"OUT={script.parent}"], script)
    assert (bare.returncode, "public address" in bare.stderr) == (0, False)
