"""The rendezvous port, the way to it, and every node to every node: what is refused, and in which words."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from ipaddress import ip_address
from typing import TYPE_CHECKING

import pytest

from gpulayer.checks_reach import FULL_MESH_NODES, PortChoice, choose_port, is_public, mesh_targets
from gpulayer.facts import RendezvousPort
from gpulayer.findings import CheckOptions
from gpulayer.job import RendezvousSpec
from tests.support import plans
from tests.support.findings import facts, plan_of, port, reached, said

if TYPE_CHECKING:
    from gpulayer.facts import NodeFacts, ReachResult, ReachState
    from gpulayer.plan import Plan

ANN = port(pid=4711, user="ann", command="python train.py")
ASKED_FOR = (
    "hint: name another with `--master-port`; without it, the first free one up to 29599 is used "
    "(troubleshooting: port-taken)\n"
)


def asked_for(number: int, *gpus: int) -> Plan:
    """Return a plan whose port was named with `--master-port`."""
    return plan_of(*(gpus or (1, 1)), rendezvous=RendezvousSpec(port=number, port_is_default=False))


def head(plan: Plan, **changes: object) -> NodeFacts:
    """Return the head's facts, with some changed."""
    return replace(facts(plan.nodes[0], plan.master_addr), **changes)  # type: ignore[arg-type]


# --- the port -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("holder", "text"),
    [
        (ANN, "pid 4711, user ann, `python train.py`"),
        (port(user="ann"), "user ann, in a process that is not visible to you"),
        (port(), "a process that is not visible to you"),
    ],
)
def test_a_taken_port(holder: RendezvousPort, text: str) -> None:
    """A port that was asked for and is taken is refused, with its holder as far as that is visible."""
    assert said(asked_for(29500), {0: {"port": holder}}) == f"gpu-01: port 29500 is in use by {text}\n{ASKED_FOR}"


def test_a_port_of_another_job() -> None:
    """Jobs that only hold their port are known by their lock, and count as much as one that listens."""
    expected = f"gpu-01: port 29500 is in use by another job of gpulayer\n{ASKED_FOR}"
    assert said(asked_for(29500), locked_ports=frozenset({29500})) == expected
    assert said(asked_for(29500), {0: {"port": ANN}}, locked_ports=frozenset({29500})) == expected


PUBLIC = (
    "warning: gpu-01: the rendezvous is at a public address, and torch lets in whoever reaches it: "
    "{address} port 29500\n"
    "hint: give the nodes `address`es of a private network, or have a firewall keep all others from the nodes' ports "
    "(troubleshooting: rendezvous-public)\n"
)


@pytest.mark.parametrize("address", ["9.9.0.11", "2a00:1450::11", "172.32.0.1", "100.128.0.1", "::ffff:9.9.0.11"])
def test_a_public_rendezvous(address: str) -> None:
    """torch asks nobody who they are, so an address of the Internet is a warning: once, for one node or several."""
    expected = PUBLIC.format(address=address)
    others = "fd00::{}" if ip_address(address).version == 6 and "ffff" not in address else "10.0.0.{}"
    for count in (1, 3):
        addresses = [address, *map(others.format, range(2, count + 1))]
        chosen = [plans.node(number, address=one) for number, one in enumerate(addresses, 1)]
        assert said(plans.plan(plans.script(), chosen)) == expected
    strict = said(plans.plan(plans.script(), chosen), options=CheckOptions(strict=True))
    assert strict == expected.removeprefix("warning: ")


@pytest.mark.parametrize(
    "address",
    [
        *("10.0.0.11", "172.16.0.1", "172.31.255.254", "192.168.0.1", "169.254.1.1"),
        *("100.64.0.1", "100.127.255.254", "198.18.0.1", "fd00::1", "fc00::1", "fe80::1", "::ffff:10.0.0.11"),
    ],
)
def test_a_rendezvous_that_is_not_public(address: str) -> None:
    """Private, shared (CGNAT), benchmark, unique local and link-local addresses are nobody's business."""
    assert not is_public(address)
    assert said(plans.plan(plans.script(), [plans.node(1, address=address)])) == ""


def test_a_rendezvous_of_practice_is_not_public() -> None:
    """Loopback addresses lead nowhere else."""
    practice = plans.plan(plans.script(), [plans.node(1, address="127.0.0.1")], practice=True)
    assert said(practice) == ""
    assert not is_public("::1")


def test_no_port_is_free() -> None:
    """Where the default port and all after it are taken, the hint does not promise another."""
    assert said(plan_of(1, 1), {0: {"port": ANN}}) == (
        "gpu-01: port 29500 is in use by pid 4711, user ann, `python train.py`\n"
        "hint: the ports after it are taken too, up to 29599; name a free one with `--master-port` "
        "(troubleshooting: port-taken)\n"
    )


def test_a_port_that_may_not_be_used() -> None:
    """A port that the system refuses is told with the reason."""
    denied = RendezvousPort(80, "denied", None, "", "", "Permission denied")
    assert said(asked_for(80), {0: {"port": denied}}) == (
        "gpu-01: port 80 cannot be used: Permission denied\n"
        "hint: name a port from 1024 up with `--master-port` (troubleshooting: port-denied)\n"
    )


def test_a_port_that_has_moved() -> None:
    """What is known of the port that was given up says nothing of the new one."""
    assert said(asked_for(29501), {0: {"port": ANN}}) == ""


def test_an_ephemeral_port() -> None:
    """A port among those of outgoing connections is a warning, unless the kernel leaves it out of them."""
    free = RendezvousPort(40000, "free", None, "", "", "")
    assert said(asked_for(40000), {0: {"port": free}}) == (
        "warning: gpu-01: port 40000 is one of 32768-60999, which the kernel gives to outgoing connections\n"
        "hint: name one outside of them with `--master-port`, or add it to net.ipv4.ip_local_reserved_ports on the "
        "node (troubleshooting: port-ephemeral)\n"
    )
    assert said(asked_for(40000), {0: {"port": free, "reserved_ports": ((1, 2), (39999, 40001))}}) == ""
    assert said(asked_for(61000), {0: {"port": replace(free, port=61000)}}) == ""


def test_the_default_port_moves() -> None:
    """The next free port is used, and the user is told who has the first one."""
    plan = plan_of(1, 1)
    assert choose_port(plan, head(plan)) == PortChoice(29500)
    assert choose_port(plan, head(plan, port=ANN, free_ports=(29502, 29503))) == PortChoice(
        29502,
        "port 29500 on gpu-01 is in use by pid 4711, user ann, `python train.py`, so port 29502 is used instead",
    )
    assert choose_port(plan, head(plan, port=port(user="ann"), free_ports=(29501,))).notice == (
        "port 29500 on gpu-01 is in use by user ann, in a process that is not visible to you, "
        "so port 29501 is used instead"
    )
    assert choose_port(plan, head(plan, port=port(), free_ports=(29501,))).notice == (
        "port 29500 on gpu-01 is in use by a process that is not visible to you, so port 29501 is used instead"
    )


def test_the_default_port_moves_away_from_another_job() -> None:
    """Ports that jobs of gpulayer hold are taken, whether or not anything listens there yet."""
    plan = plan_of(1, 1)
    notice = "port 29500 on gpu-01 is in use by another job of gpulayer, so port 29502 is used instead"
    assert choose_port(plan, head(plan), {29500, 29501}) == PortChoice(29502, notice)
    assert choose_port(plan, head(plan, port=ANN, free_ports=(29501, 29502)), {29500, 29501}).port == 29502


def test_a_port_that_stays() -> None:
    """A port that was asked for is obeyed or refused, and so is the default one where no other is free."""
    assert choose_port(asked_for(29500), head(asked_for(29500), port=ANN, free_ports=(29501,))) == PortChoice(29500)
    assert choose_port(plan_of(1, 1), head(plan_of(1, 1), port=ANN)) == PortChoice(29500)
    assert choose_port(plan_of(1, 1), head(plan_of(1, 1)), range(29500, 29600)) == PortChoice(29500)
    denied = RendezvousPort(29500, "denied", None, "", "", "Permission denied")
    assert choose_port(plan_of(1, 1), head(plan_of(1, 1), port=denied)) == PortChoice(29500)


# --- the rendezvous -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("result", "expected"),
    [
        (
            reached("timeout", "no answer"),
            (
                "gpu-[02-03]: no answer from 10.0.0.11 port 29500 (gpu-01) within 5 s\n"
                "hint: mostly a firewall: open TCP port 29500 on gpu-01, or name a port that is open with "
                "`--master-port` (troubleshooting: rendezvous-timeout)\n"
            ),
        ),
        (
            reached("refused", "Connection refused"),
            (
                "gpu-[02-03]: 10.0.0.11 port 29500 (gpu-01) refuses the connection, though gpu-01 listens there\n"
                "hint: a firewall rejects it, or gpu-01's `address` is that of another machine: correct the one or "
                "other (troubleshooting: rendezvous-refused)\n"
            ),
        ),
        (
            reached("unreachable", "No route to host"),
            (
                "gpu-[02-03]: 10.0.0.11 port 29500 (gpu-01) cannot be reached: No route to host\n"
                "hint: see `ip route get 10.0.0.11` on the node, firewalls that reject, and gpu-01's `address` "
                "(troubleshooting: rendezvous-unreachable)\n"
            ),
        ),
        (
            reached("other", "it hung up"),
            (
                "gpu-[02-03]: something else than gpu-01 answers on 10.0.0.11 port 29500 (gpu-01): it hung up\n"
                "hint: gpu-01's `address` leads to another machine or to a proxy: correct it in the hosts map "
                "(troubleshooting: rendezvous-other)\n"
            ),
        ),
    ],
    ids=lambda value: getattr(value, "state", ""),
)
def test_the_rendezvous_is_not_reached(result: ReachResult, expected: str) -> None:
    """Silence, a refusal, no way and a wrong answer are told apart, folded over the nodes."""
    results = {0: reached("ok"), 1: result, 2: result}
    assert said(plan_of(1, 1, 1), rendezvous=results) == expected


def test_the_head_alone_does_not_reach_itself() -> None:
    """Where only node rank 0 fails, its address does not lead back to it."""
    results = {0: reached("timeout", "no answer"), 1: reached("ok")}
    assert said(plan_of(1, 1), rendezvous=results) == (
        "gpu-01: no answer from 10.0.0.11 port 29500 (gpu-01) within 5 s\n"
        "hint: gpu-01's own ranks connect to this address too: give it an `address` that it reaches itself "
        "(troubleshooting: rendezvous-timeout)\n"
    )


def test_one_cause_is_told_once() -> None:
    """Where something else has the port, that it answers the nodes is no finding of its own."""
    results = {rank: reached("other", "it hung up") for rank in range(2)}
    assert said(asked_for(29500), {0: {"port": ANN}}, rendezvous=results).count("hint:") == 1
    assert said(asked_for(29500), rendezvous=results, locked_ports=frozenset({29500})).count("hint:") == 1


# --- every node to every node ---------------------------------------------------------------------------------------


def mesh(nnodes: int, *failing: tuple[int, int], state: ReachState = "timeout") -> dict[tuple[int, int], ReachResult]:
    """Return all pairs that are tried, with some of them failing."""
    bad = reached(state, "No route to host" if state == "unreachable" else "")
    pairs = [(node, target) for node, targets in enumerate(mesh_targets(nnodes)) for target in targets]
    return {pair: bad if pair in failing else reached("ok") for pair in pairs}


HINTS: dict[ReachState, tuple[str, str]] = {
    "timeout": (
        "no answer within 5 s",
        (
            "hint: mostly a firewall: open all TCP ports between the nodes, as gloo and NCCL choose theirs freely "
            "(troubleshooting: pair-timeout)\n"
        ),
    ),
    "refused": (
        "connection refused",
        (
            "hint: a firewall rejects it, or the `address` of the node that was tried is that of another machine "
            "(troubleshooting: pair-refused)\n"
        ),
    ),
    "unreachable": (
        "No route to host",
        (
            "hint: see `ip route get ADDRESS` on the node that tried, firewalls that reject, and the other's `address` "
            "(troubleshooting: pair-unreachable)\n"
        ),
    ),
    "other": (
        "something else answers there",
        (
            "hint: the `address` of the node that was tried leads to another machine or to a proxy: correct it in the "
            "hosts map (troubleshooting: pair-other)\n"
        ),
    ),
}


@pytest.mark.parametrize("state", HINTS)
def test_pairs_in_one_direction(state: ReachState) -> None:
    """Pairs are told with the direction that fails, folded at both ends."""
    how, hint = HINTS[state]
    failing = mesh(5, (0, 2), (0, 3), (1, 2), (1, 3), (4, 0), state=state)
    assert said(plan_of(1, 1, 1, 1, 1), mesh=failing) == (
        "gpu-[01-05]: some nodes do not reach others:\n"
        f"  gpu-[01-02] -> gpu-[03-04]: {how}\n"
        f"  gpu-05 -> gpu-01: {how}\n"
        f"{hint}"
    )
    assert said(plan_of(1, 1), mesh=mesh(2, (0, 1), state=state)) == (
        f"gpu-[01-02]: some nodes do not reach others: gpu-01 -> gpu-02: {how}\n{hint}"
    )


@pytest.mark.parametrize("state", HINTS)
def test_nodes_cut_off(state: ReachState) -> None:
    """A node that nobody reaches, and one that reaches nobody, are named as such instead of by their pairs."""
    how, hint = HINTS[state]
    inbound = [(node, 3) for node in (0, 1, 2)]
    outbound = [(3, node) for node in (0, 1, 2)]
    unreached = f"gpu-04: cannot be reached by any other node: {how}\n{hint}"
    mute = f"gpu-04: cannot reach any other node: {how}\n{hint}"
    plan = plan_of(1, 1, 1, 1)
    assert said(plan, mesh=mesh(4, *inbound, state=state)) == unreached
    assert said(plan, mesh=mesh(4, *outbound, state=state)) == mute
    assert said(plan, mesh=mesh(4, *inbound, *outbound, state=state)) == f"{unreached}\n{mute}"
    everything = [pair for pair in mesh(4) if pair]
    assert said(plan, mesh=mesh(4, *everything, state=state)) == (
        f"gpu-[01-04]: no node reaches another: {how}\n{hint}"
    )


def test_several_ways_of_failing() -> None:
    """Pairs that fail in different ways are different findings, and reasons of one kind are joined."""
    failing = mesh(3) | {
        (0, 1): reached("refused"),
        (1, 2): reached("unreachable", "No route to host"),
        (2, 0): reached("unreachable", "Network is unreachable"),
    }
    lines = said(plan_of(1, 1, 1), mesh=failing).splitlines()
    assert lines[0] == "gpu-[01-02]: some nodes do not reach others: gpu-01 -> gpu-02: connection refused"
    assert lines[3:6] == [
        "gpu-[01-03]: some nodes do not reach others:",
        "  gpu-02 -> gpu-03: Network is unreachable or No route to host",
        "  gpu-03 -> gpu-01: Network is unreachable or No route to host",
    ]


def test_a_large_job() -> None:
    """Above the full mesh a message does not claim more than was tried."""
    nnodes = FULL_MESH_NODES + 1
    plan = plan_of(*[1] * nnodes)
    failing = [pair for pair in mesh(nnodes) if 4 in pair]
    how, hint = HINTS["timeout"]
    assert said(plan, mesh=mesh(nnodes, *failing)) == (
        f"gpu-05: cannot be reached by any of the nodes tried: {how}\n{hint}"
        "\n"
        f"gpu-05: cannot reach any of the nodes tried: {how}\n{hint}"
    )


@pytest.mark.parametrize("nnodes", [1, 2, 3, FULL_MESH_NODES])
def test_the_full_mesh(nnodes: int) -> None:
    """Up to 32 nodes, each node tries all others."""
    assert mesh_targets(nnodes) == tuple(
        tuple(other for other in range(nnodes) if other != node) for node in range(nnodes)
    )


def test_the_sparse_mesh() -> None:
    """Above, each node tries six different others, its neighbours among them, and is tried by six."""
    for nnodes in (*range(FULL_MESH_NODES + 1, 300), 1024):
        targets = mesh_targets(nnodes)
        for node, others in enumerate(targets):
            assert len(set(others) - {node}) == len(others) == 6
            assert {(node + 1) % nnodes, (node - 1) % nnodes} <= set(others)
        assert set(Counter(other for others in targets for other in others).values()) == {6}
