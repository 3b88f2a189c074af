"""Nodes are drawn in the order of the map, each drawn one is placed, and addresses that cannot meet are refused."""

from __future__ import annotations

import random

import pytest

from gpulayer.errors import PlacementError, PoolError
from gpulayer.placement import NodePool, Placement, plan_group
from gpulayer.resolve import Address
from tests.support.plans import node, nodes, place, written_address

WILDCARD = "0.0.0.0"  # noqa: S104 - to be refused, never bound


@pytest.fixture
def pool() -> NodePool:
    """Five nodes, gpu-01 to gpu-05."""
    return NodePool(nodes(1, 1, 1, 1, 1))


def test_acquire_takes_nodes_in_map_order(pool: NodePool) -> None:
    """Nodes come in the order of the map, and one that is drawn is not drawn again."""
    assert pool.acquire(2) == ("gpu-01", "gpu-02")
    assert pool.acquire(1) == ("gpu-03",)
    assert pool.ids == ("gpu-04", "gpu-05")
    assert pool.acquire(None) == ("gpu-04", "gpu-05")
    with pytest.raises(PoolError, match="no node is left to draw"):
        pool.acquire(None)


@pytest.mark.parametrize(
    ("nodelist", "exclude", "expected"),
    [
        (None, None, ("gpu-01", "gpu-02", "gpu-03", "gpu-04", "gpu-05")),
        ("gpu-[04,02]", None, ("gpu-02", "gpu-04")),
        ("gpu-01,gpu-01", None, ("gpu-01",)),
        (None, "gpu-[01-03]", ("gpu-04", "gpu-05")),
        ("gpu-[01-03]", "gpu-02,gpu-05", ("gpu-01", "gpu-03")),
        ("gpu-01", "gpu-01", ()),
    ],
)
def test_narrow(pool: NodePool, nodelist: str | None, exclude: str | None, expected: tuple[str, ...]) -> None:
    """`--nodelist` and `--exclude` choose nodes; the order stays the map's."""
    assert pool.narrow(nodelist, exclude).ids == expected


@pytest.mark.parametrize(
    ("nodelist", "exclude", "message"),
    [
        ("gpu-[05-07]", None, r"`--nodelist` names gpu-\[06-07\], which the hosts map does not have"),
        (None, "gpu-1", "`--exclude` names gpu-1, which the hosts map does not have"),
    ],
)
def test_narrow_to_unknown_nodes(pool: NodePool, nodelist: str | None, exclude: str | None, message: str) -> None:
    """An id that is not in the map is an error with the ids that are, zeros in front included."""
    with pytest.raises(PoolError, match=message) as caught:
        pool.narrow(nodelist, exclude)
    assert caught.value.hint == "the hosts map has gpu-[01-05]"


@pytest.mark.parametrize(("nodelist", "exclude"), [("", None), (None, " ")])
def test_narrow_to_nothing(pool: NodePool, nodelist: str | None, exclude: str | None) -> None:
    """An option that names no node (an unset shell variable) never means all nodes."""
    with pytest.raises(PoolError, match="names no node"):
        pool.narrow(nodelist, exclude)


@pytest.mark.parametrize(
    ("n", "message"),
    [
        (6, r"asked for 6 nodes, 5 are left: gpu-\[01-05\]"),
        (0, "asked for 0 nodes, a job needs at least 1"),
        (-1, "asked for -1 nodes"),
    ],
)
def test_acquire_refused(pool: NodePool, n: int, message: str) -> None:
    """Asking for more than is there says what is there; nothing is taken by a draw that fails."""
    with pytest.raises(PoolError, match=message):
        pool.acquire(n)
    assert len(pool.ids) == 5


def test_acquire_after_exclusion() -> None:
    """A pool that was narrowed to nothing says so."""
    with pytest.raises(PoolError, match="no node is left to draw") as caught:
        NodePool(nodes(1)).narrow(None, "gpu-01").acquire(None)
    assert caught.value.hint == "`--nodelist` and `--exclude` leave none over"


def ranks(placement: Placement) -> list[tuple[int, ...]]:
    """Return the ranks of each node."""
    return [placed.ranks for placed in placement.nodes]


def test_even_ranks() -> None:
    """With P ranks on each node, node r hosts ranks [r*P, (r+1)*P)."""
    placement = place(nodes(8, 8, 8), nproc_per_node=2)
    assert ranks(placement) == [(0, 1), (2, 3), (4, 5)]
    assert [placed.node_rank for placed in placement.nodes] == [0, 1, 2]
    assert (placement.nnodes, placement.world_size, placement.uneven) == (3, 6, False)
    assert (placement.master_addr, placement.master_port) == ("10.0.0.11", 29500)


def test_uneven_ranks() -> None:
    """Where nodes differ, ranks run on in node order."""
    placement = place([node(1, gpus=2), node(2, gpus=1), node(3, gpus=[4, 5, 6])])
    assert ranks(placement) == [(0, 1), (2,), (3, 4, 5)]
    assert (placement.world_size, placement.uneven) == (6, True)


def test_every_rank_once() -> None:
    """Whatever the counts, each node is placed once, and ranks are 0 to world size - 1, each once."""
    chance = random.Random(7)
    for _ in range(50):
        drawn = nodes(*(chance.randint(1, 9) for _ in range(chance.randint(1, 20))))
        placement = place(drawn)
        assert [placed.node for placed in placement.nodes] == drawn
        assert [rank for each in ranks(placement) for rank in each] == list(range(placement.world_size))


def test_process_counts_missing() -> None:
    """Nodes without `gpus` need `--nproc-per-node`; the error names them."""
    drawn = [node(1), node(2, gpus=None), node(3, gpus=None)]
    with pytest.raises(PlacementError, match=r"how many processes to start on gpu-\[02-03\]") as caught:
        place(drawn)
    assert caught.value.hint == "give `--nproc-per-node`, or `gpus` in the hosts map"
    assert ranks(place(drawn, nproc_per_node=1)) == [(0,), (1,), (2,)]


def test_listed_gpus_are_too_few() -> None:
    """More processes than a `gpus` list has devices is an error; fewer is not."""
    drawn = [node(1, gpus=[0, 1]), node(2, gpus=[0, 1, 2])]
    with pytest.raises(PlacementError, match=r"`--nproc-per-node` is 3, .*: gpu-01 lists 2"):
        place(drawn, nproc_per_node=3)
    assert ranks(place(drawn, nproc_per_node=1)) == [(0,), (1,)]


@pytest.mark.parametrize("port", [0, -1, 65536])
def test_port_out_of_range(port: int) -> None:
    """A port that nothing can listen on is refused."""
    with pytest.raises(PlacementError, match=f"`--master-port` is {port}, a port from 1 to 65535 is expected"):
        place(nodes(1), master_port=port)


@pytest.mark.parametrize("count", [0, -2])
def test_nproc_out_of_range(count: int) -> None:
    """A node without processes is no part of a job."""
    with pytest.raises(PlacementError, match=f"`--nproc-per-node` is {count}, at least 1 is expected"):
        place(nodes(1), nproc_per_node=count)


def test_no_nodes() -> None:
    """A job without nodes cannot be placed."""
    with pytest.raises(PlacementError, match="there is no node"):
        place([])


def refused(*addresses: str, practice: bool = False, local: frozenset[str] = frozenset()) -> str:
    """Return the message that a plan with these addresses is refused with."""
    drawn = [node(number, address=address) for number, address in enumerate(addresses, 1)]
    with pytest.raises(PlacementError) as caught:
        plan_group(
            drawn,
            nproc_per_node=1,
            master_port=29500,
            resolve=lambda node: Address(node.address or "", "/etc/hosts or DNS"),
            is_local=local.__contains__,
            practice=practice,
        )
    return str(caught.value)


@pytest.mark.parametrize(
    ("address", "kind"),
    [
        ("127.0.0.1", "a loopback address"),
        ("127.0.1.1", "a loopback address"),
        ("::1", "a loopback address"),
        ("::ffff:127.0.0.1", "a loopback address"),
        ("169.254.3.4", "a link-local address"),
        ("fe80::1", "a link-local address"),
        (WILDCARD, "the wildcard address"),
        ("::", "the wildcard address"),
        ("224.0.0.1", "a multicast address"),
        ("ff02::1", "a multicast address"),
    ],
)
def test_addresses_that_cannot_meet(address: str, kind: str) -> None:
    """Such an address of any node is refused with the node, the value and where it came from."""
    other = "fd00::1" if address.startswith(("fe", "ff0")) or address in {"::", "::1"} else "10.0.0.11"
    for addresses, name in (((address, other), "gpu-01"), ((other, address), "gpu-02")):
        assert refused(*addresses).startswith(f"node {name}: {address} (/etc/hosts or DNS) is {kind}")


def test_all_bad_addresses_are_named() -> None:
    """One error names every node whose address must be mended."""
    message = refused("127.0.1.1", "10.0.0.2", "127.0.1.1")
    assert [name for name in ("gpu-01", "gpu-02", "gpu-03") if name in message] == ["gpu-01", "gpu-03"]


def test_mixed_families() -> None:
    """Nodes that only have IPv4 and nodes that only have IPv6 cannot meet."""
    assert refused("10.0.0.11", "fd00::2").endswith("in one job: gpu-01 10.0.0.11, gpu-02 fd00::2")


def test_no_other_machine() -> None:
    """A job of several nodes that are all the login node is refused; one node elsewhere is enough."""
    message = refused("10.0.0.1", "10.0.0.2", local=frozenset({"10.0.0.1", "10.0.0.2"}))
    assert message == "all nodes are the machine that gpulayer runs on: gpu-01 10.0.0.1, gpu-02 10.0.0.2"
    placement = plan_group(
        nodes(1, 1),
        nproc_per_node=None,
        master_port=29500,
        resolve=written_address,
        is_local={"10.0.0.11"}.__contains__,
        practice=False,
    )
    assert placement.nnodes == 2


def test_one_machine_twice() -> None:
    """Two names for one machine are refused: its GPUs would be used twice."""
    assert refused("10.0.0.1", "10.0.0.1") == "nodes gpu-01 and gpu-02 are one machine: both have the address 10.0.0.1"
    assert "one machine" in refused("fd00::1", "fd00:0::1")


def test_parts_of_one_machine() -> None:
    """Two nodes may be parts of one machine when their lists of GPUs share none, or when their SSH ports differ."""
    parts = [node(1, address="10.0.0.1", gpus=[0, 1]), node(2, address="10.0.0.1", gpus=[2])]
    assert ranks(place(parts)) == [(0, 1), (2,)]
    containers = [node(1, address="10.0.0.1"), node(2, address="10.0.0.1", port=2222)]
    assert ranks(place(containers)) == [(0, 1), (2, 3)]
    with pytest.raises(PlacementError, match="one machine"):
        place([parts[0], node(2, address="10.0.0.1", gpus=[1, 2])])


def test_one_node_may_be_anywhere() -> None:
    """A job of one node meets nobody, so any address serves, this machine's included."""
    placement = plan_group(
        [node(1, address="127.0.0.1")],
        nproc_per_node=4,
        master_port=1,
        resolve=written_address,
        is_local=lambda _: True,
        practice=False,
    )
    assert (placement.master_addr, placement.master_port, ranks(placement)) == ("127.0.0.1", 1, [(0, 1, 2, 3)])


def test_practice_map() -> None:
    """A map that declares practice may use loopback, and nothing else that cannot meet."""
    drawn = [node(1, address="127.0.0.1", port=2201), node(2, address="127.0.0.1", port=2202)]
    assert place(drawn, practice=True).practice
    assert "wildcard" in refused("127.0.0.1", WILDCARD, practice=True)


def test_address_that_is_none() -> None:
    """A resolver's answer that is no IP address is refused, for one node too."""
    assert refused("head.cluster") == "node gpu-01: `head.cluster` (/etc/hosts or DNS) is not an IP address"
