"""Preflight and firewalls: packets dropped or rejected, on the rendezvous port, on all others, in one direction."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.support.jobs import map_with_fake_torch
from tests.support.preflight import check

if TYPE_CHECKING:
    from tests.support.cluster import Cluster

pytestmark = [pytest.mark.ssh, pytest.mark.nft]

NEW = "tcp flags & (syn | ack) == syn"  # a connection that begins
EPHEMERAL = f"tcp dport 32768-60999 {NEW}"


def test_a_firewall_that_drops_is_named_by_port_node_and_direction(cluster4: Cluster) -> None:
    """h00 drops the rendezvous of h03; h02 drops all ephemeral ports; h03 drops what it would send h01."""
    head, _, closed, one_way = cluster4.hosts
    head.firewall(f"input ip saddr {one_way.address} tcp dport 29500 drop")
    closed.firewall(f"input iif != lo {EPHEMERAL} drop")
    one_way.firewall(f"output ip daddr {cluster4.hosts[1].address} {EPHEMERAL} drop")
    done = check(cluster4, map_with_fake_torch(cluster4))
    hint = (
        "\nhint: mostly a firewall: open all TCP ports between the nodes, as gloo and NCCL choose theirs freely "
        "(troubleshooting: pair-timeout)"
    )
    assert done.findings == [
        (
            "h03: no answer from 10.77.1.10 port 29500 (h00) within 5 s\n"
            "hint: mostly a firewall: open TCP port 29500 on h00, or name a port that is open with `--master-port` "
            "(troubleshooting: rendezvous-timeout)"
        ),
        "h[01,03]: some nodes do not reach others: h03 -> h01: no answer within 5 s" + hint,
        "h02: cannot be reached by any other node: no answer within 5 s" + hint,
    ]
    assert (done.returncode, done.verdict) == (3, "h[00-03]: a job would not run")


def test_a_firewall_that_rejects_is_named_by_port_node_and_direction(cluster4: Cluster) -> None:
    """The same with answers: a reset looks like nobody listening, an ICMP message like no way there."""
    head, _, closed, one_way = cluster4.hosts
    head.firewall("input iif != lo tcp dport 29500 reject with tcp reset")
    closed.firewall(f"input iif != lo {EPHEMERAL} reject with icmpx admin-prohibited")
    one_way.firewall(f"output ip daddr {cluster4.hosts[1].address} {EPHEMERAL} reject with tcp reset")
    done = check(cluster4, map_with_fake_torch(cluster4))
    assert done.findings == [
        (
            "h[01-03]: 10.77.1.10 port 29500 (h00) refuses the connection, though h00 listens there\n"
            "hint: a firewall rejects it, or h00's `address` is that of another machine: correct the one or other "
            "(troubleshooting: rendezvous-refused)"
        ),
        (
            "h[01,03]: some nodes do not reach others: h03 -> h01: connection refused\n"
            "hint: a firewall rejects it, or the `address` of the node that was tried is that of another machine "
            "(troubleshooting: pair-refused)"
        ),
        (
            "h02: cannot be reached by any other node: No route to host\n"
            "hint: see `ip route get ADDRESS` on the node that tried, firewalls that reject, and the other's `address` "
            "(troubleshooting: pair-unreachable)"
        ),
    ]
    assert (done.returncode, done.verdict) == (3, "h[00-03]: a job would not run")
