"""Whether the nodes are distinct machines, and whether each has its address on an interface that is up. Pure."""

from __future__ import annotations

import ipaddress
import itertools
from typing import TYPE_CHECKING

from gpulayer.findings import Check, Finding, failure, visible_devices, warning

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from gpulayer.facts import Interface, NodeFacts
    from gpulayer.findings import CheckOptions, Observations
    from gpulayer.plan import NodeCommand, Plan

# Two logins on one machine share these. Containers on one kernel differ in at least one.
_NAMESPACES = ("net", "pid", "uts")


def check_machines(plan: Plan, seen: Observations, _: CheckOptions) -> Iterator[Finding]:
    """Yield the node ids that are one machine, unless they are parts of it by their lists of GPUs."""
    groups: dict[tuple[object, ...], list[NodeCommand]] = {}
    for node, facts in seen.of(plan):
        if facts.boot_id and not plan.practice:
            groups.setdefault(_machine(facts), []).append(node)
    for (boot_id, hostname, *_namespaces), nodes in groups.items():
        pairs = [(one, other) for one, other in itertools.combinations(nodes, 2) if not _apart(one, other)]
        if pairs:
            doubled = {node.node_id for pair in pairs for node in pair}
            yield failure(
                Check.SAME_MACHINE,
                [node.node_id for node in nodes if node.node_id in doubled],
                "several node ids are one machine",
                "draw one of them, or correct `ssh` in the hosts map; to use parts of one machine as nodes, give each "
                "a `gpus` list of its own",
                f"host name `{hostname}`, boot id {str(boot_id)[:8]}",
            )


def _machine(facts: NodeFacts) -> tuple[object, ...]:
    namespaces = facts.namespaces or {}
    return (facts.boot_id, facts.hostname, *(namespaces.get(kind) for kind in _NAMESPACES))


def _apart(one: NodeCommand, other: NodeCommand) -> bool:
    """Tell whether two nodes use different GPUs by their lists."""
    first, second = visible_devices(one), visible_devices(other)
    return bool(first and second) and not set(first or ()) & set(second or ())


def check_addresses(plan: Plan, seen: Observations, _: CheckOptions) -> Iterator[Finding]:
    """Yield what is wrong with each node's address, and with the interface that was asked for."""
    for node, facts in seen.of(plan):
        if facts.interfaces is None:
            continue
        if node.interface is not None:
            yield from _asked_for(node, node.interface, facts.interfaces)
        holders = _holders(node.address, facts.interfaces)
        if node.interface is None and holders and not any(one.up for one in holders):
            yield _down(node, holders[0])
        if not holders and plan.nnodes > 1:
            yield _held_by_none(plan, node, facts)


def _asked_for(node: NodeCommand, name: str, interfaces: Sequence[Interface]) -> Iterator[Finding]:
    asked = next((one for one in interfaces if one.name == name), None)
    if asked is None:
        yield failure(
            Check.INTERFACE_MISSING,
            [node.node_id],
            f"interface `{name}` does not exist",
            "correct `--interface`, or `interface` in the hosts map; left out, the one with the node's address is used",
            f"there are {', '.join(sorted(one.name for one in interfaces))}",
        )
        return
    if not asked.up:
        yield _down(node, asked)
    holders = _holders(node.address, interfaces)
    # Every interface has a link-local address (fe80::...), which no node is reached by.
    usable = [one for one in asked.addresses if not getattr(_plain(one), "is_link_local", False)]
    # A translated address is on no interface, so any that has an address may be meant.
    if asked not in holders and (holders or not usable):
        yield failure(
            Check.INTERFACE_ADDRESS,
            [node.node_id],
            f"interface `{name}` does not hold the node's address",
            "leave `interface` out to use the one that does, or set the node's `address` to one of this interface",
            f"{', '.join(usable) or 'nothing'} instead of {node.address}",
        )


def _down(node: NodeCommand, interface: Interface) -> Finding:
    if interface.switched_on:
        return failure(
            Check.INTERFACE_DOWN,
            [node.node_id],
            f"interface `{interface.name}` is switched on, but has no carrier",
            "see to its cable and its port on the switch, or set the node's `address` to one of another network",
        )
    return failure(
        Check.INTERFACE_DOWN,
        [node.node_id],
        f"interface `{interface.name}` is switched off",
        f"switch it on, `ip link set {interface.name} up` as root, or use another `address`",
    )


def _held_by_none(plan: Plan, node: NodeCommand, facts: NodeFacts) -> Finding:
    route = facts.route_to_master
    if node.interface is None and (route is None or not route.interface):
        reason = facts.errors.get("route_to_master", "no interface leads there")
        return failure(
            Check.NO_ROUTE,
            [node.node_id],
            f"no interface holds the node's address or has a route to {plan.master_addr}",
            "correct the node's `address` in the hosts map, or see to the routes: `ip route` on the node",
            f"{node.address}, {reason}",
        )
    used = node.interface or (route.interface if route else "")
    return warning(
        Check.ADDRESS_NOT_HELD,
        [node.node_id],
        f"no interface holds the node's address; the ranks use `{used}`",
        "this is right where the address is translated (NAT); else correct `address` in the hosts map",
        node.address,
    )


def _holders(address: str, interfaces: Sequence[Interface]) -> list[Interface]:
    wanted = _plain(address)
    return [one for one in interfaces if any(_plain(held) == wanted for held in one.addresses)]


def _plain(address: str) -> object:
    """Return an address that can be compared: `fd00::0:1` is `fd00::1`, and `::ffff:10.0.0.1` is `10.0.0.1`."""
    try:
        ip = ipaddress.ip_address(address)
    except ValueError:  # an odd one that a node tells of
        return address
    return getattr(ip, "ipv4_mapped", None) or ip
