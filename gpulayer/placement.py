"""Which node has which ranks, and where they meet: `NodePool`, `plan_group`. Who has a node already: `Hold`.

Pure: names are resolved and local addresses recognised by functions that the caller hands in (resolve.py has them).
"""

from __future__ import annotations

import ipaddress
import itertools
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING

from gpulayer.errors import HeldError, PlacementError, PoolError
from gpulayer.hosts import expand, fold, gpus_meet

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from gpulayer.hosts import Node
    from gpulayer.resolve import Address

    IPAddress = ipaddress.IPv4Address | ipaddress.IPv6Address

MOST_HOLDERS = 5  # jobs that one error names


@dataclass(frozen=True, slots=True)
class Hold:
    """Which job has a node: its id, its user, the login node it runs from, and since when, as seconds of the epoch.

    `waiting`: it does not have the node yet, but comes before whoever asks now.
    """

    job_id: str
    user: str
    login: str
    since: float
    waiting: bool = False

    def clock(self, fmt: str = "%H:%M:%S") -> str:
        """Return the time of day since when, with its date where that is not today's."""
        since = datetime.fromtimestamp(self.since)
        return since.strftime(fmt if since.date() == datetime.now().date() else f"%Y-%m-%d {fmt}")

    def __str__(self) -> str:
        """Who it is, in the words of an error."""
        return f"job {self.job_id} of {self.user} on {self.login} since {self.clock()}"


def longer(hint: str | None) -> str | None:
    """Return the hint of a refusal that advises to wait, for somebody who has waited."""
    return hint and hint.replace("wait for", "wait longer for", 1)


class NodePool:
    """The nodes that are free, in the order of the hosts map. `held`: by node id, those that other jobs have."""

    def __init__(self, nodes: Iterable[Node], held: Mapping[str, Hold] | None = None) -> None:
        self._left = {node.id: node for node in nodes}
        self._held = {node_id: hold for node_id, hold in (held or {}).items() if node_id in self._left}

    @property
    def ids(self) -> tuple[str, ...]:
        """The ids that are left and free."""
        return tuple(node_id for node_id in self._left if node_id not in self._held)

    def narrow(self, nodelist: str | None, exclude: str | None) -> NodePool:
        """Return the pool of the nodes in `nodelist` (None: all) without those in `exclude`, map order kept.

        Both are written as in `gpu-[03-05],head`. Raises PoolError for ids that this pool does not have.
        """
        wanted = self._known("--nodelist", nodelist) if nodelist is not None else set(self._left)
        unwanted = self._known("--exclude", exclude) if exclude is not None else set()
        return NodePool((node for node in self._left.values() if node.id in wanted - unwanted), self._held)

    def acquire(self, n: int | None) -> tuple[str, ...]:
        """Take the first `n` free nodes out of the pool and return their ids. None asks for all, held ones too.

        Raises PoolError for less than one node and for more nodes than there are, HeldError for more than are free.
        """
        if n is not None and n < 1:
            raise PoolError(f"asked for {n} nodes, a job needs at least 1")
        if not self._left:
            raise PoolError("no node is left to draw", hint="`--nodelist` and `--exclude` leave none over")
        if n is not None and n > len(self._left):
            left = "1 is left" if len(self._left) == 1 else f"{len(self._left)} are left"
            raise PoolError(
                f"asked for {n} nodes, {left}: {fold(self._left)}",
                hint="ask for fewer with `--nnodes`, or add nodes to the hosts map",
            )
        wanted = len(self._left) if n is None else n
        if wanted > len(self.ids):
            raise self._too_few(wanted)
        return tuple([self._left.pop(node_id).id for node_id in self.ids[:wanted]])

    def _too_few(self, wanted: int) -> HeldError:
        free = self.ids
        fewer = "or ask for fewer with `--nnodes`" if free else "or name others with `--nodelist`"
        return HeldError(
            f"asked for {_count(wanted)}, {_free_words(free)}; {'; '.join(self._holders())}",
            hint=f"wait for them with `--wait`, {fewer}",
        )

    def _holders(self) -> list[str]:
        """Say which nodes are held by whom; from the sixth job on only how many there are."""
        jobs: dict[Hold, list[str]] = {}
        for node_id in self._left:
            if node_id in self._held:
                jobs.setdefault(self._held[node_id], []).append(node_id)
        said = []
        for hold, ids in list(jobs.items())[:MOST_HOLDERS]:
            said.append(f"{fold(ids)} {_are(ids)} {'waited for' if hold.waiting else 'held'} by {hold}")
        if more := list(jobs.values())[MOST_HOLDERS:]:
            others = [node_id for ids in more for node_id in ids]
            said.append(f"{fold(others)} {_are(others)} held by {len(more)} more")
        return said

    def _known(self, option: str, text: str) -> set[str]:
        ids = expand(text) if text.strip() else []
        if not ids:
            raise PoolError(f"`{option}` names no node", hint="leave it out, or write ids as in `gpu-[01-04],gpu-07`")
        unknown = [node_id for node_id in ids if node_id not in self._left]
        if unknown:
            raise PoolError(
                f"`{option}` names {fold(unknown)}, which the hosts map does not have",
                hint=f"the hosts map has {fold(self._left)}",
            )
        return set(ids)


def _count(nodes: int) -> str:
    return "1 node" if nodes == 1 else f"{nodes} nodes"


def _free_words(ids: Sequence[str]) -> str:
    return f"{len(ids)} {_are(ids)} free: {fold(ids)}" if ids else "none is free"


def _are(ids: Sequence[str]) -> str:
    return "is" if len(ids) == 1 else "are"


@dataclass(frozen=True, slots=True)
class PlacedNode:
    """One node with its place in the job. `address` is a literal IP that the other nodes reach it by."""

    node: Node
    node_rank: int
    nproc_per_node: int
    ranks: tuple[int, ...]
    address: str


@dataclass(frozen=True, slots=True)
class Placement:
    """All nodes of a job in node order, and the rendezvous. `practice`: the nodes are this machine, and say so."""

    nodes: tuple[PlacedNode, ...]
    master_port: int
    practice: bool = False

    @property
    def master_addr(self) -> str:
        """Node rank 0's address: under static rendezvous it is node rank 0 that listens."""
        return self.nodes[0].address

    @property
    def nnodes(self) -> int:
        """How many nodes the job has."""
        return len(self.nodes)

    @property
    def world_size(self) -> int:
        """How many ranks the job has on all its nodes."""
        return sum(placed.nproc_per_node for placed in self.nodes)

    @property
    def uneven(self) -> bool:
        """True when nodes differ in how many ranks they host."""
        return len({placed.nproc_per_node for placed in self.nodes}) > 1


def plan_group(
    nodes: Sequence[Node],
    *,
    nproc_per_node: int | None,
    master_port: int,
    resolve: Callable[[Node], Address],
    is_local: Callable[[str], bool],
    practice: bool,
) -> Placement:
    """Lay ranks out over `nodes`, in their order, and find the rendezvous.

    Ranks run on from node to node; with P ranks on each, node r hosts [r*P, (r+1)*P). Raises PlacementError when a
    port or a process count is out of range, and, for more than one node, when addresses could not meet: loopback,
    link-local, unspecified or multicast ones, two of one machine, IPv4 mixed with IPv6, or no machine but this one.
    `practice` is a hosts map's open word that loopback and this machine are meant.
    """
    if not nodes:
        raise PlacementError("there is no node to place ranks on")
    if not 1 <= master_port <= 65535:
        raise PlacementError(f"`--master-port` is {master_port}, a port from 1 to 65535 is expected")
    counts = _process_counts(nodes, nproc_per_node)
    addresses = [resolve(node) for node in nodes]
    _check_addresses(nodes, addresses, practice=practice)
    if len(nodes) > 1 and not practice and all(is_local(address.value) for address in addresses):
        raise PlacementError(
            f"all nodes are the machine that gpulayer runs on: {_with_addresses(nodes, addresses)}",
            hint="draw a node that is another machine, or run on one node with `--nnodes 1`",
        )
    placed: list[PlacedNode] = []
    first = 0
    for node_rank, (node, count, address) in enumerate(zip(nodes, counts, addresses, strict=True)):
        placed.append(PlacedNode(node, node_rank, count, tuple(range(first, first + count)), address.value))
        first += count
    return Placement(tuple(placed), master_port, practice)


def by_address(nodes: Sequence[Node], addresses: Mapping[str, str]) -> list[Node]:
    """Return the nodes in the order of their addresses as texts, as torchrun's c10d rendezvous numbers them.

    `addresses` are by node id. Raises PlacementError where two have the same.
    """
    ordered = sorted(nodes, key=lambda node: addresses[node.id])
    for one, other in itertools.pairwise(ordered):
        if addresses[one.id] == addresses[other.id]:
            raise PlacementError(
                f"c10d numbers nodes by their addresses, and {one.id} and {other.id} have the same: "
                f"{addresses[one.id]}",
                hint="leave out `--rendezvous c10d`, or draw one of them",
            )
    return ordered


def _process_counts(nodes: Sequence[Node], nproc_per_node: int | None) -> list[int]:
    if nproc_per_node is not None:
        if nproc_per_node < 1:
            raise PlacementError(f"`--nproc-per-node` is {nproc_per_node}, at least 1 is expected")
        short = [node for node in nodes if isinstance(node.gpus, tuple) and len(node.gpus) < nproc_per_node]
        if short:
            listed = ", ".join(f"{node.id} lists {node.gpu_count}" for node in short)
            raise PlacementError(
                f"`--nproc-per-node` is {nproc_per_node}, more than the GPUs that `gpus` lists: {listed}",
                hint="ask for fewer processes, or list more devices in the hosts map",
            )
        return [nproc_per_node] * len(nodes)
    unknown = [node.id for node in nodes if not node.gpu_count]
    if unknown:
        raise PlacementError(
            f"nothing says how many processes to start on {fold(unknown)}",
            hint="give `--nproc-per-node`, or `gpus` in the hosts map",
        )
    return [node.gpu_count or 0 for node in nodes]


def _check_addresses(nodes: Sequence[Node], addresses: Sequence[Address], *, practice: bool) -> None:
    parsed = [_parse(node, address) for node, address in zip(nodes, addresses, strict=True)]
    if len(nodes) < 2:
        return
    problems = [
        f"node {node.id}: {address.value} ({address.source}) is {fault}"
        for node, address, ip in zip(nodes, addresses, parsed, strict=True)
        if (fault := _fault(ip, practice=practice))
    ]
    if problems:
        raise PlacementError(
            "; ".join(problems),
            hint="give each node an `address` in the hosts map: the one that the other nodes reach it by",
        )
    if len({ip.version for ip in parsed}) > 1:
        raise PlacementError(
            f"IPv4 and IPv6 addresses cannot meet in one job: {_with_addresses(nodes, addresses)}",
            hint="give all nodes an `address` of one kind in the hosts map",
        )
    if not practice:
        _check_distinct(nodes, addresses, parsed)


def _parse(node: Node, address: Address) -> IPAddress:
    """Read an address; an IPv4 address in IPv6 clothes (`::ffff:127.0.0.1`) is judged as what it is."""
    try:
        ip = ipaddress.ip_address(address.value)
    except ValueError as error:
        raise PlacementError(f"node {node.id}: `{address.value}` ({address.source}) is not an IP address") from error
    return getattr(ip, "ipv4_mapped", None) or ip


def _fault(ip: IPAddress, *, practice: bool) -> str | None:
    """Say what keeps other nodes from reaching this address, or None."""
    if ip.is_unspecified:
        return "the wildcard address, which is no node's own"
    if ip.is_multicast:
        return "a multicast address, which is no node's own"
    if ip.is_link_local:
        return "a link-local address, which means another interface on each node"
    if ip.is_loopback and not practice:
        return "a loopback address, which other nodes cannot reach"
    return None


def _check_distinct(nodes: Sequence[Node], addresses: Sequence[Address], parsed: Sequence[IPAddress]) -> None:
    """Refuse two names for one machine: its GPUs would be used twice. Parts of a machine list their own `gpus`."""
    seen: dict[tuple[IPAddress, int | None], list[Node]] = {}
    for node, address, ip in zip(nodes, addresses, parsed, strict=True):
        for other in seen.setdefault((ip, node.port or 22), []):
            if not gpus_meet(node.devices, other.devices):
                continue
            raise PlacementError(
                f"nodes {other.id} and {node.id} are one machine: both have the address {address.value}",
                hint="draw one of them, or give each its own `gpus` list in the hosts map",
            )
        seen[ip, node.port or 22].append(node)


def _with_addresses(nodes: Sequence[Node], addresses: Sequence[Address]) -> str:
    return ", ".join(f"{node.id} {address.value}" for node, address in zip(nodes, addresses, strict=True))
