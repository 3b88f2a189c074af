"""Whether the rendezvous port is free and reached, and whether the nodes reach each other. Pure.

Also the two choices that follow from it: `choose_port`, and which nodes try which (`mesh_targets`).
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpulayer import probe_host
from gpulayer.findings import Check, Finding, failure, warning
from gpulayer.masks import NONE_KNOWN
from gpulayer.ranges import fold

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

    from gpulayer.facts import NodeFacts, ReachResult, ReachState, RendezvousPort
    from gpulayer.findings import CheckOptions, Observations
    from gpulayer.plan import Plan

    Pair = tuple[int, int]

FULL_MESH_NODES = 32
# Ring neighbours, and four others at distances that differ for every size above the full mesh.
_RING = (1, -1)
_FRACTIONS = (2, 3, 5, 7)


def mesh_targets(nnodes: int) -> tuple[tuple[int, ...], ...]:
    """Return, for each node rank, the node ranks that it connects to.

    Up to FULL_MESH_NODES all others; above, both neighbours in a ring of all nodes and four others. There too each node
    is tried by as many as it tries.
    """
    if nnodes <= FULL_MESH_NODES:
        return tuple(tuple(other for other in range(nnodes) if other != node) for node in range(nnodes))
    steps = (*_RING, *(nnodes // fraction for fraction in _FRACTIONS))
    return tuple(tuple(sorted((node + step) % nnodes for step in steps)) for node in range(nnodes))


# --- the port -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PortChoice:
    """The rendezvous port to use, and what to tell the user where it is another one than the plan's."""

    port: int
    notice: str | None = None


def choose_port(plan: Plan, head: NodeFacts, locked_ports: Collection[int] = ()) -> PortChoice:
    """Return the plan's port, or the next free one where that is taken and nobody asked for it.

    `locked_ports` are those that another job of gpulayer holds on the head. A port that was asked for stays, and so
    does the default one where no other is free; `judge` refuses them. A saved plan has `port_is_default` unset.
    """
    port, fact = plan.master_port, head.port
    taken = fact is not None and fact.state == "taken"
    if not plan.port_is_default or not (taken or port in locked_ports):
        return PortChoice(port)
    # A port that is only locked was free to the probe, which then lists no others.
    candidates = head.free_ports if taken else range(port + 1, probe_host.LAST_DEFAULT_PORT + 1)
    free = next((one for one in candidates if one not in locked_ports), None)
    if free is None:
        return PortChoice(port)
    holder = _holder(fact, port in locked_ports)
    return PortChoice(
        free, f"port {port} on {plan.nodes[0].node_id} is in use by {holder}, so port {free} is used instead"
    )


def _holder(fact: RendezvousPort | None, locked: bool) -> str:
    if locked:
        return "another job of gpulayer"
    if fact is None or not fact.user:
        return "a process that is not visible to you"
    if fact.pid is None:
        return f"user {fact.user}, in a process that is not visible to you"
    return f"pid {fact.pid}, user {fact.user}, `{NONE_KNOWN.command(fact.command)}`"


def check_port(plan: Plan, seen: Observations, _: CheckOptions) -> Iterator[Finding]:
    """Yield what keeps rank 0 from listening on the rendezvous port, or may do so by chance."""
    facts = seen.facts.get(0)
    if facts is None:
        return
    head, port, fact = [plan.nodes[0].node_id], plan.master_port, facts.port
    locked = port in seen.locked_ports
    if locked or (fact and fact.port == port and fact.state == "taken"):
        last = probe_host.LAST_DEFAULT_PORT
        found_none = f"the ports after it are taken too, up to {last}; name a free one with `--master-port`"
        asked_for = f"name another with `--master-port`; without it, the first free one up to {last} is used"
        yield failure(
            Check.PORT_TAKEN,
            head,
            f"port {port} is in use by {_holder(fact, locked)}",
            found_none if plan.port_is_default and not facts.free_ports else asked_for,
        )
    elif fact and fact.port == port and fact.state == "denied":
        yield failure(
            Check.PORT_DENIED,
            head,
            f"port {port} cannot be used: {fact.detail}",
            "name a port from 1024 up with `--master-port`",
        )
    elif _is_ephemeral(port, facts):
        first, last = (facts.ephemeral_range or (0, 0))[:2]
        yield warning(
            Check.PORT_EPHEMERAL,
            head,
            f"port {port} is one of {first}-{last}, which the kernel gives to outgoing connections",
            "name one outside of them with `--master-port`, or add it to net.ipv4.ip_local_reserved_ports on the node",
        )


def check_public(plan: Plan, _seen: Observations, _: CheckOptions) -> Iterator[Finding]:
    """Yield that the rendezvous is at an address of the public Internet. torch asks nobody there who they are."""
    if is_public(plan.master_addr):
        yield warning(
            Check.RENDEZVOUS_PUBLIC,
            [plan.nodes[0].node_id],
            "the rendezvous is at a public address, and torch lets in whoever reaches it",
            "give the nodes `address`es of a private network, or have a firewall keep all others from the nodes' ports",
            f"{plan.master_addr} port {plan.master_port}",
        )


def is_public(address: str) -> bool:
    """True for a literal IP address that the Internet can route to: not for private, shared, local or loopback ones."""
    ip = ipaddress.ip_address(address)
    return (getattr(ip, "ipv4_mapped", None) or ip).is_global


def _is_ephemeral(port: int, facts: NodeFacts) -> bool:
    found = facts.ephemeral_range
    if found is None or len(found) != 2 or not found[0] <= port <= found[1]:
        return False
    return not any(len(held) == 2 and held[0] <= port <= held[1] for held in facts.reserved_ports or ())


def check_rendezvous(plan: Plan, seen: Observations, options: CheckOptions) -> Iterator[Finding]:
    """Yield how nodes fail to reach the rendezvous, unless it is known why nothing of ours could listen there."""
    fact = seen.facts[0].port if 0 in seen.facts else None
    if plan.master_port in seen.locked_ports or (
        fact and fact.port == plan.master_port and fact.state in ("taken", "denied")
    ):
        return
    failed = {node_rank: one for node_rank, one in seen.rendezvous.items() if one.state != "ok"}
    for node in plan.nodes:
        result = failed.get(node.node_rank)
        if result:
            yield _no_rendezvous(plan, node.node_id, result, options, head_only=set(failed) == {0} and plan.nnodes > 1)


def _no_rendezvous(plan: Plan, node_id: str, result: ReachResult, options: CheckOptions, *, head_only: bool) -> Finding:
    head, port = plan.nodes[0].node_id, plan.master_port
    where = f"{plan.master_addr} port {port} ({head})"
    match result.state:
        case "timeout":
            check, text = Check.RENDEZVOUS_TIMEOUT, f"no answer from {where} within {options.reach_limit_s:g} s"
            hint = (
                f"mostly a firewall: open TCP port {port} on {head}, or name a port that is open with `--master-port`"
            )
        case "refused":
            check, text = Check.RENDEZVOUS_REFUSED, f"{where} refuses the connection, though {head} listens there"
            hint = f"a firewall rejects it, or {head}'s `address` is that of another machine: correct the one or other"
        case "unreachable":
            check, text = Check.RENDEZVOUS_UNREACHABLE, f"{where} cannot be reached: {result.detail}"
            hint = f"see `ip route get {plan.master_addr}` on the node, firewalls that reject, and {head}'s `address`"
        case _:
            check, text = Check.RENDEZVOUS_OTHER, f"something else than {head} answers on {where}: {result.detail}"
            hint = f"{head}'s `address` leads to another machine or to a proxy: correct it in the hosts map"
    if head_only:
        hint = f"{head}'s own ranks connect to this address too: give it an `address` that it reaches itself"
    return failure(check, [node_id], text, hint)


# --- every node to every node ---------------------------------------------------------------------------------------

_PAIR_CHECKS: dict[ReachState, tuple[Check, str]] = {
    "timeout": (
        Check.PAIR_TIMEOUT,
        "mostly a firewall: open all TCP ports between the nodes, as gloo and NCCL choose theirs freely",
    ),
    "refused": (
        Check.PAIR_REFUSED,
        "a firewall rejects it, or the `address` of the node that was tried is that of another machine",
    ),
    "unreachable": (
        Check.PAIR_UNREACHABLE,
        "see `ip route get ADDRESS` on the node that tried, firewalls that reject, and the other's `address`",
    ),
    "other": (
        Check.PAIR_OTHER,
        "the `address` of the node that was tried leads to another machine or to a proxy: correct it in the hosts map",
    ),
}


def check_mesh(plan: Plan, seen: Observations, options: CheckOptions) -> Iterator[Finding]:
    """Yield which nodes do not reach which, by how they fail: nodes cut off as such, other pairs with a direction."""
    for state in _PAIR_CHECKS:
        failed = {pair: result for pair, result in seen.mesh.items() if result.state == state}
        if failed:
            how = _how(state, {result.detail for result in failed.values()}, options)
            yield from _Mesh(plan, set(seen.mesh), set(failed), state, how).findings()


def _how(state: ReachState, details: set[str], options: CheckOptions) -> str:
    match state:
        case "timeout":
            return f"no answer within {options.reach_limit_s:g} s"
        case "refused":
            return "connection refused"
        case "unreachable":
            return " or ".join(sorted(details))
        case _:
            return "something else answers there"


class _Mesh:
    """The pairs that fail in one way, told in as few words as they allow."""

    def __init__(self, plan: Plan, tried: set[Pair], failed: set[Pair], state: ReachState, how: str) -> None:
        self._ids = [node.node_id for node in plan.nodes]
        self._others = "any other node" if plan.nnodes <= FULL_MESH_NODES else "any of the nodes tried"
        self._tried, self._failed, self._how = tried, failed, how
        self._check, self._hint = _PAIR_CHECKS[state]

    def findings(self) -> Iterator[Finding]:
        how, left = self._how, set(self._failed)
        if left == self._tried and len({node for pair in left for node in pair}) > 2:
            yield self._finding({node for pair in left for node in pair}, f"no node reaches another: {how}")
            return
        unreached = self._wholly(lambda pair: pair[1])
        left -= {pair for pair in left if pair[1] in unreached}
        if unreached:
            yield self._finding(unreached, f"cannot be reached by {self._others}: {how}")
        # A node that reaches nobody, other than those that nobody reaches.
        mute = self._wholly(lambda pair: pair[0]) & {pair[0] for pair in left}
        left -= {pair for pair in left if pair[0] in mute}
        if mute:
            yield self._finding(mute, f"cannot reach {self._others}: {how}")
        if left:
            nodes = {node for pair in left for node in pair}
            yield self._finding(
                nodes, "some nodes do not reach others", *(f"{line}: {how}" for line in self._lines(left))
            )

    def _finding(self, nodes: set[int], text: str, *seen: str) -> Finding:
        return failure(self._check, [self._ids[node] for node in sorted(nodes)], text, self._hint, *seen)

    def _wholly(self, end: Callable[[Pair], int]) -> set[int]:
        """Return the nodes with several pairs at this end, all of which fail."""
        worked = {end(pair) for pair in self._tried - self._failed}
        nodes = [end(pair) for pair in self._failed]
        return {node for node in nodes if nodes.count(node) > 1} - worked

    def _lines(self, pairs: set[Pair]) -> list[str]:
        """Return `a -> b` for all pairs, folded at both ends."""
        targets: dict[int, list[int]] = {}
        for source, target in sorted(pairs):
            targets.setdefault(source, []).append(target)
        sources: dict[tuple[int, ...], list[int]] = {}
        for source, group in targets.items():
            sources.setdefault(tuple(group), []).append(source)
        return [f"{self._fold(group)} -> {self._fold(targets)}" for targets, group in sources.items()]

    def _fold(self, nodes: Collection[int]) -> str:
        return fold(self._ids[node] for node in nodes)
