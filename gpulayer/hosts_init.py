"""`gpulayer hosts init`: a hosts map of nodes that another source names, with what the nodes say of themselves."""

from __future__ import annotations

import importlib.resources
import ipaddress
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpulayer.console import Console
from gpulayer.errors import JobError
from gpulayer.hosts import HostMap, Node, load_hosts
from gpulayer.leftovers import ask_all, not_asked
from gpulayer.map_text import NODE, render_map
from gpulayer.placement import NodePool
from gpulayer.ranges import fold
from gpulayer.values import ValueRefusedError, check_python

if TYPE_CHECKING:
    from pathlib import Path

    from gpulayer.facts import GpuFact, NodeFacts
    from gpulayer.leftovers import Asking
    from gpulayer.visits import Visit


@dataclass(frozen=True, slots=True)
class Described:
    """What a node says of itself, and by which address the login node reached it ("": not known)."""

    facts: NodeFacts
    reached_by: str


def check_target(path: Path, *, force: bool) -> None:
    """Raise JobError where the file is there, unless it is to be replaced."""
    if not force and (path.exists() or path.is_symlink()):
        raise JobError(f"{path} is there already", hint="name another file with `--output`, or replace it: `--force`")


def choose_nodes(host_map: HostMap, nodelist: str | None, exclude: str | None, python: str | None) -> HostMap:
    """Return the map with these of its nodes and this Python. Raises PoolError and JobError."""
    try:
        if python is not None:
            check_python(python)
    except ValueRefusedError as error:
        raise JobError(f"`--python {python}` {error}", hint=error.hint) from None
    own = {} if python is None else {"python": python}
    ids = NodePool(host_map.nodes).narrow(nodelist, exclude).acquire(None)
    nodes = tuple(host_map.node(node_id).model_copy(update=own) for node_id in ids)
    return HostMap(host_map.source, nodes, host_map.practice)


def write_map(host_map: HostMap, path: Path, *, asking: Asking | None, force: bool) -> None:
    """Write the map to a file that is not there, or is to be replaced.

    `asking`: ask the nodes first. Raises JobError and HostsFileError, and RefusedError where a node cannot be asked;
    nothing is written then.
    """
    check_target(path, force=force)
    remarks: dict[str, dict[str, str]] = {}
    if asking:
        host_map, remarks = _with_facts(host_map, asking)
    schema = importlib.resources.files("gpulayer") / "schemas" / "hosts.schema.json"
    text = render_map(host_map, remarks, str(schema))
    load_hosts(path, text)  # two names for one machine show only now
    try:
        _write(path, text, force=force)
    except FileExistsError:
        check_target(path, force=False)
    except OSError as error:
        raise JobError(f"{path}: cannot be written: {error.strerror}") from None


def _write(path: Path, text: str, *, force: bool) -> None:
    if not force:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
        return
    beside = path.with_name(f"{path.name}.{os.getpid()}.new")
    try:
        beside.write_text(text, encoding="utf-8")
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


def _with_facts(host_map: HostMap, asking: Asking) -> tuple[HostMap, dict[str, dict[str, str]]]:
    """Return the map with what its nodes say, and why each value is what it is. What the source says stays."""
    console = Console(asking.terminal)
    try:
        console.block(f"gpulayer: asking {fold(node.id for node in host_map.nodes)}")
        said, problems = ask_all(asking, console, _describe)
    finally:
        console.close()
    if problems:
        raise not_asked(asking, problems)
    nodes, remarks = [], {}
    for node in host_map.nodes:
        keys, remarks[node.id] = describe_node(node, said[node.id], practice=host_map.practice)
        nodes.append(Node.model_validate({**node.model_dump(exclude_unset=True), **keys}))
    return HostMap(host_map.source, tuple(nodes), host_map.practice), remarks


async def _describe(visit: Visit) -> Described:
    return Described(await visit.describe(), visit.address)


def describe_node(node: Node, said: Described, *, practice: bool = False) -> tuple[dict[str, object], dict[str, str]]:
    """Return the keys that a node's own words give it, and a remark for each key and for the node. Pure."""
    facts = said.facts
    keys: dict[str, object] = {}
    remarks: dict[str, str] = {}
    if node.address is None and not practice:
        address, why = choose_address(said)
        remarks["address" if address else NODE] = why
        if address:
            keys["address"] = address
    count, why = _count_gpus(facts.gpu)
    if node.gpu_count is None and count:
        keys["gpus"], remarks["gpus"] = count, why
    elif isinstance(node.gpus, int) and count != node.gpus:  # a list is a choice
        remarks["gpus"] = why
    elif not count:
        remarks[NODE] = "; ".join(filter(None, (remarks.get(NODE), why)))
    if facts.torch is None and "torch" not in facts.errors:
        no_torch = f"its {node.python} has no PyTorch: set `python`"
        remarks[NODE] = "; ".join(filter(None, (remarks.get(NODE), no_torch)))
    return keys, remarks


def choose_address(said: Described) -> tuple[str, str]:
    """Return the address by which other nodes may reach it, or "", and why.

    The one that the login node came by, if the node itself has it: behind a jump host or a translated address it has
    not. Else the one that its default route leaves from.
    """
    own = {
        str(ip): interface.name
        for interface in said.facts.interfaces or ()
        for ip in map(_plain_ip, interface.addresses)
        if interface.up and ip and not (ip.is_loopback or ip.is_link_local)
    }
    reached_by = str(_plain_ip(said.reached_by) or "")
    if reached_by in own:
        return reached_by, f"on {own[reached_by]}, by which the login node reached it"
    route = said.facts.route_to_master
    if route and route.source in own:
        return route.source, f"on {own[route.source]}, which has the default route"
    if len(set(own.values())) == 1:
        address = min(own, key=lambda ip: ":" in ip)  # the first IPv4 address, if any
        return address, f"on {own[address]}, the only interface that leads elsewhere"
    return "", "set `address`: none of its addresses is known to be reached by others"


def _plain_ip(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        ip = ipaddress.ip_address(text)
    except ValueError:
        return None
    return getattr(ip, "ipv4_mapped", None) or ip


def _count_gpus(gpu: GpuFact | None) -> tuple[int, str]:
    """Return how many GPUs the vendor's tool lists, and how it is said."""
    if gpu is None or gpu.state == "missing":
        files = gpu.device_files if gpu else 0
        return 0, f"no GPU tool, and {files} GPUs in /dev" if files else "no GPU was found"
    if gpu.state != "ok":
        return 0, f"{gpu.tool} failed" if gpu.state == "failed" else f"{gpu.tool} hangs"
    return len(gpu.devices), f"{gpu.tool} lists {len(gpu.devices) or 'no GPU'}"
