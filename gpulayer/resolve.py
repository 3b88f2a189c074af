"""Names to addresses, for plans: how the other nodes reach a node, and whether an address is this machine's own.
For leases: which machine a node is.

Nothing is connected. What a name means is asked of OpenSSH (`ssh -G` prints the HostName of an alias) and of the
system's resolver. asyncssh reads $HOME/.ssh/config alone, while OpenSSH takes the home folder from the password file
and adds /etc/ssh/ssh_config; so the file is named to `ssh -G`, and both read the same one.
"""

from __future__ import annotations

import functools
import ipaddress
import re
import socket
import subprocess
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from gpulayer.errors import PlacementError
from gpulayer.hosts import fold

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from gpulayer.hosts import Node

_PARALLEL = 32  # look-ups at once: each waits for a name server or a short-lived process
_SSH_TIMEOUT_S = 10
_HOSTS_FILE = Path("/etc/hosts")


@dataclass(frozen=True, slots=True)
class Address:
    """A literal IP address, without zone or brackets, and where it came from in words that follow its value."""

    value: str
    source: str


class _UnknownNameError(Exception):
    """No address for `name`, which stands in `source`; `reason` is the system's."""

    def __init__(self, name: str, source: str, reason: str) -> None:
        super().__init__(name)
        self.name = name
        self.source = source
        self.reason = reason


def resolve_address(node: Node, ssh_config: Path | None) -> Address:
    """Return how other nodes reach `node`: its `address`, else the HostName that `ssh_config` gives its `ssh` name.

    `ssh_config` None stands for ~/.ssh/config, and a path of `none` for no configuration. A name with addresses of both
    kinds gives its first IPv4 address. Raises PlacementError naming the node and the name.
    """
    return resolve_addresses([node], ssh_config)[node.id]


def resolve_addresses(nodes: Sequence[Node], ssh_config: Path | None) -> dict[str, Address]:
    """Resolve all nodes at once, as resolve_address does; the addresses by node id, in order.

    Raises one PlacementError for all nodes whose names have no address.
    """
    if not nodes:
        return {}
    pool = ThreadPoolExecutor(min(_PARALLEL, len(nodes)))
    try:
        results = list(pool.map(lambda node: _try_resolve(node, ssh_config), nodes))
    finally:
        pool.shutdown(wait=False, cancel_futures=True)  # a signal waits for no name server
    found: dict[str, Address] = {}
    unknown: dict[str, _UnknownNameError] = {}
    for node, result in zip(nodes, results, strict=True):
        if isinstance(result, Address):
            found[node.id] = result
        else:
            unknown[node.id] = result
    if unknown:
        raise _no_address(unknown)
    return found


def _no_address(unknown: dict[str, _UnknownNameError]) -> PlacementError:
    groups: dict[tuple[str, str], list[str]] = defaultdict(list)
    for node_id, one in unknown.items():
        groups[one.source, one.reason].append(node_id)
    faults = []
    for (source, reason), ids in groups.items():
        names = fold(dict.fromkeys(unknown[node_id].name for node_id in ids))
        nodes = f"node{'s' if len(ids) > 1 else ''} {fold(ids)}"
        faults.append(f"{nodes}: no address for `{names}` ({source}): {reason}")
    return PlacementError(
        "; ".join(faults),
        hint="mend what is named there, or write each node's `address` in the hosts map: how the others reach it",
    )


def _try_resolve(node: Node, ssh_config: Path | None) -> Address | _UnknownNameError:
    try:
        if node.address is not None:
            return _look_up(node.address, "`address` in the hosts map")
        return _look_up(*_ssh_host_name(node, ssh_config))
    except _UnknownNameError as unknown:
        return unknown


def _look_up(name: str, source: str) -> Address:
    if literal := _literal(name):
        return Address(literal, source)
    try:
        answers = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except socket.gaierror as error:
        raise _UnknownNameError(name, source, error.strerror or str(error)) from None
    except UnicodeError:  # what the idna codec says to labels longer than DNS allows
        raise _UnknownNameError(name, source, "not a name that DNS can hold") from None
    addresses = [str(answer[4][0]).partition("%")[0] for answer in sorted(answers, key=_is_ipv6)]
    if not addresses:
        raise _UnknownNameError(name, source, "the name has no IP address")
    where = "/etc/hosts" if _in_hosts_file(name, addresses[0]) else "/etc/hosts or DNS"
    return Address(addresses[0], f"{where}, for `{name}`: {source}")


def _is_ipv6(answer: tuple[socket.AddressFamily, object, object, object, object]) -> bool:
    return answer[0] == socket.AF_INET6


def _literal(name: str) -> str | None:
    """Return an IP address in its usual spelling (`::ffff:10.0.0.1` as 10.0.0.1), or None for a name."""
    try:
        address = ipaddress.ip_address(name.partition("%")[0])
    except ValueError:
        return None
    return str(getattr(address, "ipv4_mapped", None) or address)


def _in_hosts_file(name: str, address: str) -> bool:
    try:
        text = _HOSTS_FILE.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    entries = (line.partition("#")[0].lower().split() for line in text.splitlines())
    return any(entry[:1] == [address] and name.lower() in entry[1:] for entry in entries)


def _ssh_host_name(node: Node, ssh_config: Path | None) -> tuple[str, str]:
    """Return the name that `ssh` would connect to for this node, and where that name stands."""
    own = (node.ssh, "the node id" if node.ssh == node.id else "`ssh` in the hosts map")
    config = _config_path(ssh_config)
    if config is None:
        return own
    try:
        name = _ask_ssh(node, config).get("hostname", node.ssh)
    except FileNotFoundError:
        if _literal(node.ssh):
            return own
        raise _UnknownNameError(*own, f"the `ssh` command, which would read {config}, is not installed") from None
    except subprocess.TimeoutExpired:
        raise _UnknownNameError(*own, f"`ssh -G` gave no answer within {_SSH_TIMEOUT_S} s") from None
    except subprocess.CalledProcessError as failed:
        lines = failed.stderr.decode(errors="replace").splitlines()
        said = [line for line in lines if not line.startswith("Pseudo-terminal")]
        reason = said[0] if said else f"exit code {failed.returncode}"
        raise _UnknownNameError(*own, f"`ssh -G` failed: {reason}") from None
    return own if name.lower() == node.ssh.lower() else (name, f"HostName in {config}")


def _config_path(ssh_config: Path | None) -> Path | None:
    config = Path.home() / ".ssh" / "config" if ssh_config is None else ssh_config
    return None if str(config) == "none" or (ssh_config is None and not config.exists()) else config


def _ask_ssh(node: Node, config: Path) -> Mapping[str, str]:
    """Return what `ssh -G` says of the node: keywords in lower case, and the first value of each.

    Raises FileNotFoundError without `ssh`, TimeoutExpired, and CalledProcessError where it refuses the file.
    """
    changed = config.stat().st_mtime_ns if config.exists() else 0
    return _asked_ssh(node.ssh, node.user, config, changed)


@functools.cache
def _asked_ssh(name: str, user: str | None, config: Path, _changed: int) -> Mapping[str, str]:
    login = ["-l", user] if user else []  # `Match user` may decide
    command = ["ssh", "-G", "-F", str(config), *login, "--", name]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=_SSH_TIMEOUT_S, check=True)
    words = (line.split(maxsplit=1) for line in done.stdout.decode(errors="replace").splitlines())
    said: dict[str, str] = {}
    for pair in words:
        if len(pair) == 2:
            said.setdefault(pair[0].lower(), pair[1].strip())
    return said


def machine_keys(nodes: Sequence[Node], ssh_config: Path | None) -> dict[str, str]:
    """Return, by node id, which machine `ssh` goes to: `10.0.0.11:22`, with ` via JUMP` behind a jump host.

    Two entries with one key are one machine. No name is looked up. What `ssh -G` cannot say is taken from the map.
    """
    config = _config_path(ssh_config)
    if config is None or not _may_lead_elsewhere(config):
        return {node.id: _machine_key(node, {}) for node in nodes}

    def key(node: Node) -> str:
        try:
            return _machine_key(node, _ask_ssh(node, config))
        except (OSError, subprocess.SubprocessError):  # logging in will say what is wrong
            return _machine_key(node, {})

    with ThreadPoolExecutor(min(_PARALLEL, len(nodes)) or 1) as pool:
        return dict(zip((node.id for node in nodes), pool.map(key, nodes), strict=True))


def _machine_key(node: Node, said: Mapping[str, str]) -> str:
    host = said.get("hostname", node.ssh)
    port = node.port or said.get("port", "22")
    jump = said.get("proxyjump", "none")
    literal = None if "%" in host else _literal(host)  # one link-local address on two interfaces is two machines
    return f"{literal or host.lower().rstrip('.')}:{port}" + ("" if jump == "none" else f" via {jump}")


def _may_lead_elsewhere(config: Path) -> bool:
    """False for a file that only says how to log in, as most do: asking `ssh -G` for many nodes takes a while."""
    try:
        text = config.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    words = {re.split(r"[\s=]", line.strip(), maxsplit=1)[0].lower().strip('"') for line in text.splitlines()}
    return bool(words & {"hostname", "port", "proxyjump", "include", "canonicalizehostname"})


def is_local_address(ip: str) -> bool:
    """True when a literal IP address is one of this machine's own. Nothing is sent: a socket is bound to it."""
    family = socket.AF_INET6 if ":" in ip else socket.AF_INET
    nowhere = "2001:db8::1" if ":" in ip else "192.0.2.1"  # for documentation only: RFC 5737 and RFC 3849
    if not _can_bind(family, ip):
        return False
    # With ip_nonlocal_bind, as on machines that share a floating address, binding to any address works.
    # The second look then misses an interface's further addresses, which spares a refusal and causes none.
    return not _can_bind(family, nowhere) or _is_own_source(family, ip)


def _can_bind(family: socket.AddressFamily, ip: str) -> bool:
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((ip, 0))
    except OSError:
        return False
    return True


def _is_own_source(family: socket.AddressFamily, ip: str) -> bool:
    """True when datagrams to `ip` would leave from `ip` itself. Connecting a datagram socket sends nothing."""
    if ipaddress.ip_address(ip).is_loopback:
        return True
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((ip, 9))
            return str(probe.getsockname()[0]) == ip
    except OSError:
        return False
