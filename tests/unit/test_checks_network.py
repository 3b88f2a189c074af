"""Distinct machines, addresses and interfaces: what is refused, and in which words."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from gpulayer.facts import Route
from tests.support import plans
from tests.support.findings import LOOPBACK, interface, plan_of, said

if TYPE_CHECKING:
    from tests.support.findings import Changes

ONE_BOOT = {"boot_id": "1b7e1c2d-0000-4000-8000-000000000000", "hostname": "hpc1"}


def test_two_ids_of_one_machine() -> None:
    """Node ids that reach one machine are refused, those of each machine on their own line."""
    plan = plan_of(1, 1, 1, 1, 1)
    other = {"boot_id": "2c", "hostname": "hpc2"}
    assert said(plan, {0: ONE_BOOT, 1: other, 3: ONE_BOOT}) == (
        "gpu-[01,04]: several node ids are one machine: host name `hpc1`, boot id 1b7e1c2d\n"
        "hint: draw one of them, or correct `ssh` in the hosts map; to use parts of one machine as nodes, give each a "
        "`gpus` list of its own (troubleshooting: same-machine)\n"
    )
    assert said(plan, {0: ONE_BOOT, 1: other, 3: ONE_BOOT, 4: other}).startswith(
        "gpu-[01-02,04-05]: several node ids are one machine:\n"
        "  gpu-[01,04]: host name `hpc1`, boot id 1b7e1c2d\n"
        "  gpu-[02,05]: host name `hpc2`, boot id 2c\n"
    )


@pytest.mark.parametrize("kind", ["net", "pid", "uts"])
def test_containers_on_one_kernel_are_distinct(kind: str) -> None:
    """Nodes that share a kernel and differ in a namespace are two."""
    namespaces = {"net": 1, "pid": 2, "uts": 3, "mnt": 4} | {kind: 9}
    assert said(plan_of(1, 1), {0: ONE_BOOT, 1: {**ONE_BOOT, "namespaces": namespaces}}) == ""


def test_machines_that_cannot_be_told_apart_are_left_alone() -> None:
    """Host names alone say nothing, and a practice cluster is one machine on purpose."""
    unknown = {"boot_id": "", "hostname": "localhost"}
    assert said(plan_of(1, 1), {0: unknown, 1: unknown}) == ""
    assert said(plan_of(1, 1), {0: {**ONE_BOOT, "hostname": "a"}, 1: {**ONE_BOOT, "hostname": "b"}}) == ""
    practice = replace(plan_of(1, 1), practice=True)
    assert said(practice, {0: ONE_BOOT, 1: ONE_BOOT}) == ""


def test_parts_of_one_machine() -> None:
    """Nodes that list different GPUs may share a machine; those that list the same may not."""
    parts = [plans.node(1, gpus=[0, 1]), plans.node(2, gpus=[2, 3]), plans.node(3, gpus=[3, 4])]
    nodes = {rank: {**ONE_BOOT, "gpu": None} for rank in range(3)}
    assert said(plans.plan(plans.script(), parts[:2]), nodes) == ""
    assert said(plans.plan(plans.script(), parts), nodes).startswith("gpu-[02-03]: several node ids are one machine: ")


def test_an_interface_that_does_not_exist() -> None:
    """An interface that was asked for is looked for by name, and those that there are are named."""
    plan = plan_of(1, 1, 1, interface="eth0")
    renamed = {"interfaces": (LOOPBACK, interface("ens5", "10.0.0.12"))}
    others = {"interfaces": (interface("ib0"), interface("ens6", "10.0.0.13"))}
    hint = (
        "hint: correct `--interface`, or `interface` in the hosts map; left out, the one with the node's address is "
        "used (troubleshooting: interface-missing)\n"
    )
    assert said(plan, {1: renamed}) == f"gpu-02: interface `eth0` does not exist: there are ens5, lo\n{hint}"
    assert said(plan, {1: renamed, 2: others}) == (
        "gpu-[02-03]: interface `eth0` does not exist:\n"
        f"  gpu-02: there are ens5, lo\n  gpu-03: there are ens6, ib0\n{hint}"
    )


@pytest.mark.parametrize("asked", [None, "eth0"])
def test_an_interface_that_is_down(asked: str | None) -> None:
    """An interface that is off, or has no carrier, is refused whether it was asked for or holds the address."""
    plan = plan_of(1, 1, 1, interface=asked)
    off = {"interfaces": (LOOPBACK, interface("eth0", "10.0.0.12", switched_on=False))}
    unplugged = {"interfaces": (LOOPBACK, interface("eth0", "10.0.0.13", up=False))}
    assert said(plan, {1: off, 2: unplugged}) == (
        "gpu-02: interface `eth0` is switched off\n"
        "hint: switch it on, `ip link set eth0 up` as root, or use another `address` "
        "(troubleshooting: interface-down)\n"
        "\n"
        "gpu-03: interface `eth0` is switched on, but has no carrier\n"
        "hint: see to its cable and its port on the switch, or set the node's `address` to one of another network "
        "(troubleshooting: interface-down)\n"
    )


def test_an_interface_with_other_addresses() -> None:
    """An interface that was asked for must hold the node's address, and what it holds is named."""
    plan = plan_of(1, 1, 1, interface="eth1")
    nodes: Changes = {
        0: {"interfaces": (interface("eth1", "10.0.0.11"),)},
        1: {"interfaces": (interface("eth0", "10.0.0.12"), interface("eth1", "10.1.0.12", "fd00::12"))},
        2: {"interfaces": (interface("eth0", "10.0.0.13"), interface("eth1"))},
    }
    assert said(plan, nodes) == (
        "gpu-[02-03]: interface `eth1` does not hold the node's address:\n"
        "  gpu-02: 10.1.0.12, fd00::12 instead of 10.0.0.12\n"
        "  gpu-03: nothing instead of 10.0.0.13\n"
        "hint: leave `interface` out to use the one that does, or set the node's `address` to one of this interface "
        "(troubleshooting: interface-address)\n"
    )


def test_addresses_that_stand() -> None:
    """Several addresses, other names on each node, IPv6 in any spelling and an idle interface do no harm."""
    several = {0: {"interfaces": (interface("bond0", "192.168.0.1", "10.0.0.11"), interface("eth9", up=False))}}
    assert said(plan_of(1, 1), several | {1: {"interfaces": (interface("ens5", "10.0.0.12"),)}}) == ""
    ipv6 = [plans.node(number, address=f"fd00::0:{number}") for number in (1, 2)]
    nodes = {rank: {"interfaces": (interface("eth0", f"fd00::{rank + 1}"),)} for rank in range(2)}
    assert said(plans.plan(plans.script(), ipv6), nodes) == ""


def test_a_translated_address() -> None:
    """An address on no interface is a warning; the ranks use the interface that was asked for, else the route's."""
    inside = {"interfaces": (interface("eth0", "172.16.0.2"),), "route_to_master": Route("eth0", "172.16.0.2")}
    hint = (
        "hint: this is right where the address is translated (NAT); else correct `address` in the hosts map "
        "(troubleshooting: address-not-held)\n"
    )
    assert said(plan_of(1, 1, 1), {1: inside, 2: inside}) == (
        "warning: gpu-[02-03]: no interface holds the node's address; the ranks use `eth0`:\n"
        f"  gpu-02: 10.0.0.12\n  gpu-03: 10.0.0.13\n{hint}"
    )
    asked = plan_of(1, 1, interface="eth1")
    nodes: Changes = {
        0: {"interfaces": (interface("eth1", "10.0.0.11"),)},
        1: {"interfaces": (interface("eth1", "172.16.0.2"),), "route_to_master": Route("eth0", "172.16.9.2")},
    }
    assert said(asked, nodes) == (
        f"warning: gpu-02: no interface holds the node's address; the ranks use `eth1`: 10.0.0.12\n{hint}"
    )
    assert said(plan_of(1), {0: inside}) == ""  # a single node talks to nobody


def test_no_way_to_the_head() -> None:
    """A node without its address and without a route is refused, with what the system says of the route."""
    nowhere: dict[str, object] = {"interfaces": (LOOPBACK,), "route_to_master": None}
    unreachable = nowhere | {"errors": {"route_to_master": "Network is unreachable"}}
    assert said(plan_of(1, 1, 1), {1: unreachable, 2: nowhere}) == (
        "gpu-[02-03]: no interface holds the node's address or has a route to 10.0.0.11:\n"
        "  gpu-02: 10.0.0.12, Network is unreachable\n"
        "  gpu-03: 10.0.0.13, no interface leads there\n"
        "hint: correct the node's `address` in the hosts map, or see to the routes: `ip route` on the node "
        "(troubleshooting: no-route)\n"
    )
