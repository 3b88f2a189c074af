"""Names to addresses: what decides, in which order, and what is said when there is none."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from gpulayer import resolve
from gpulayer.errors import PlacementError
from gpulayer.hosts import Node
from gpulayer.resolve import Address, is_local_address, machine_keys, resolve_address, resolve_addresses

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

NO_CONFIG = Path("none")
MEND = "mend what is named there, or write each node's `address` in the hosts map: how the others reach it"
needs_ssh = pytest.mark.skipif(
    shutil.which("ssh") is None and "ssh" not in os.environ.get("GPULAYER_REQUIRE", ""), reason="no OpenSSH client here"
)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make an empty home folder the user's."""
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".ssh").mkdir()
    return tmp_path


@pytest.fixture
def names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Mapping[str, list[str]]], None]:
    """Make the system's resolver know only the names that the test hands in, in its order. No name server is asked."""

    def install(table: Mapping[str, list[str]]) -> None:
        def getaddrinfo(name: str, port: None, *, type: int) -> list[tuple[object, ...]]:  # noqa: A002 - socket's name
            if len(name) > 63:
                raise UnicodeError("label too long")
            if name not in table:
                raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
            return [
                (socket.AF_INET6, type, 6, "", (ip, 0, 0, 0)) if ":" in ip else (socket.AF_INET, type, 6, "", (ip, 0))
                for ip in table[name]
            ]

        monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)

    monkeypatch.setattr(resolve, "_HOSTS_FILE", tmp_path / "hosts")
    return install


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("10.0.0.11", "10.0.0.11"),
        ("FD00::0:1", "fd00::1"),
        ("::ffff:10.0.0.1", "10.0.0.1"),
    ],
)
def test_a_literal_address(home: Path, written: str, value: str) -> None:
    """A literal `address` is itself, in its usual spelling, whatever ~/.ssh/config says."""
    (home / ".ssh/config").write_text("Host *\nHostName 10.9.9.9\n")
    node = Node(id="a", address=written)
    assert resolve_address(node, None) == Address(value, "`address` in the hosts map")


@pytest.mark.parametrize(
    ("ssh", "source"),
    [("10.0.0.1", "the node id"), ("fd00::1", "`ssh` in the hosts map"), ("fe80::1%eth0", "`ssh` in the hosts map")],
)
def test_a_literal_ssh_name(ssh: str, source: str) -> None:
    """Without `address` and configuration, the SSH name is the address; a zone is no part of it."""
    node = Node(id="10.0.0.1", ssh=ssh)
    assert resolve_address(node, NO_CONFIG) == Address(ssh.partition("%")[0], source)


def test_names_are_looked_up(names: Callable[[Mapping[str, list[str]]], None], tmp_path: Path) -> None:
    """A name becomes its first IPv4 address, else its first IPv6 one; /etc/hosts is named where it has it."""
    names({"a.x": ["fd00::1", "10.0.0.2", "10.0.0.1"], "b": ["fe80::1%eth0", "fd00::2"], "c": ["127.0.1.1"]})
    (tmp_path / "hosts").write_text("# 127.0.1.1 b\n127.0.1.1\tC c.x # own name\n10.0.0.9 a.x\n")
    nodes = [Node(id="a", address="a.x"), Node(id="b"), Node(id="c1", ssh="c"), Node(id="c2", address="c")]
    assert list(resolve_addresses(nodes, NO_CONFIG).items()) == [
        ("a", Address("10.0.0.2", "/etc/hosts or DNS, for `a.x`: `address` in the hosts map")),
        ("b", Address("fe80::1", "/etc/hosts or DNS, for `b`: the node id")),
        ("c1", Address("127.0.1.1", "/etc/hosts, for `c`: `ssh` in the hosts map")),
        ("c2", Address("127.0.1.1", "/etc/hosts, for `c`: `address` in the hosts map")),
    ]


def test_the_real_resolver_prefers_ipv4() -> None:
    """`localhost` is 127.0.0.1, though it is ::1 as well."""
    assert resolve_address(Node(id="localhost"), NO_CONFIG).value == "127.0.0.1"


def test_no_nodes() -> None:
    """Nothing to resolve is no error."""
    assert resolve_addresses([], None) == {}


def test_names_without_address(names: Callable[[Mapping[str, list[str]]], None]) -> None:
    """All nodes whose names have no address are told in one message, alike ones together."""
    names({"ok": ["10.0.0.1"], "void": []})
    nodes = [Node(id=node_id) for node_id in ("gpu-1", "ok", "gpu-2", "void")] + [Node(id="x", address="h" * 64)]
    with pytest.raises(PlacementError) as caught:
        resolve_addresses(nodes, NO_CONFIG)
    assert (str(caught.value), caught.value.hint) == (
        (
            "nodes gpu-[1-2]: no address for `gpu-[1-2]` (the node id): Name or service not known; "
            "node void: no address for `void` (the node id): the name has no IP address; "
            f"node x: no address for `{'h' * 64}` (`address` in the hosts map): not a name that DNS can hold"
        ),
        MEND,
    )


CONFIG = """
Host gpu-01 alias
    HostName 10.0.0.1
Host gpu-*
    HostName %h.cluster
Match host byuser user me
    HostName 10.0.0.7
"""


@needs_ssh
def test_the_host_name_of_ssh_config(home: Path, names: Callable[[Mapping[str, list[str]]], None]) -> None:
    """What `ssh` would connect to is the address: Host, patterns, %h and Match as OpenSSH reads them."""
    config = home / ".ssh/config"
    config.write_text(CONFIG)
    names({"gpu-02.cluster": ["10.0.0.2"], "plain": ["10.0.0.3"], "byuser": ["10.0.0.6"]})
    nodes = [
        Node(id="gpu-01"),
        Node(id="gpu-02"),
        Node(id="x", ssh="alias"),
        Node(id="Plain", ssh="plain"),
        Node(id="y", ssh="byuser", user="me"),
        Node(id="z", ssh="byuser", user="you"),
        Node(id="w", ssh="FD00::1"),
    ]
    assert resolve_addresses(nodes, None) == {
        "gpu-01": Address("10.0.0.1", f"HostName in {config}"),
        "gpu-02": Address("10.0.0.2", f"/etc/hosts or DNS, for `gpu-02.cluster`: HostName in {config}"),
        "x": Address("10.0.0.1", f"HostName in {config}"),
        "Plain": Address("10.0.0.3", "/etc/hosts or DNS, for `plain`: `ssh` in the hosts map"),
        "y": Address("10.0.0.7", f"HostName in {config}"),
        "z": Address("10.0.0.6", "/etc/hosts or DNS, for `byuser`: `ssh` in the hosts map"),
        "w": Address("fd00::1", "`ssh` in the hosts map"),
    }


@needs_ssh
def test_which_ssh_config(home: Path, tmp_path: Path) -> None:
    """A file that is named replaces ~/.ssh/config; `none` stands for neither."""
    (home / ".ssh/config").write_text("Host 10.0.0.1\nHostName 10.0.0.2\n")
    other = tmp_path / "other"
    other.write_text("Host 10.0.0.1\nHostName 10.0.0.3\n")
    node = Node(id="10.0.0.1")
    assert [resolve_address(node, config).value for config in (None, other, NO_CONFIG)] == [
        "10.0.0.2",
        "10.0.0.3",
        "10.0.0.1",
    ]


@needs_ssh
@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("Bogus yes\n", "{path}: line 1: Bad configuration option: bogus"),
        (None, "Can't open user config file {path}: No such file or directory"),
    ],
)
def test_an_ssh_config_that_cannot_be_read(tmp_path: Path, text: str | None, reason: str) -> None:
    """What OpenSSH says about the file is passed on."""
    path = tmp_path / "config"
    if text:
        path.write_text(text)
    with pytest.raises(PlacementError) as caught:
        resolve_address(Node(id="gpu-01"), path)
    assert (str(caught.value), caught.value.hint) == (
        f"node gpu-01: no address for `gpu-01` (the node id): `ssh -G` failed: {reason.format(path=path)}",
        MEND,
    )


def test_no_ssh_command(
    home: Path, monkeypatch: pytest.MonkeyPatch, names: Callable[[Mapping[str, list[str]]], None]
) -> None:
    """Without OpenSSH, a configuration that might rename the node is not passed over in silence."""
    names({"gpu-01": ["10.0.0.1"]})
    monkeypatch.setenv("PATH", str(home))
    assert resolve_address(Node(id="gpu-01"), None).value == "10.0.0.1"
    config = home / ".ssh/config"
    config.touch()
    assert resolve_address(Node(id="a", ssh="10.0.0.9"), None) == Address("10.0.0.9", "`ssh` in the hosts map")
    with pytest.raises(PlacementError) as caught:
        resolve_address(Node(id="gpu-01"), None)
    assert (str(caught.value), caught.value.hint) == (
        (
            "node gpu-01: no address for `gpu-01` (the node id): "
            f"the `ssh` command, which would read {config}, is not installed"
        ),
        MEND,
    )


def test_an_ssh_command_that_hangs(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A configuration whose `Match exec` never returns does not hang the plan."""
    (home / "ssh").write_text("#!/bin/sh\nexec sleep 60\n")
    (home / "ssh").chmod(0o755)
    (home / ".ssh/config").touch()
    monkeypatch.setenv("PATH", f"{home}:{os.environ['PATH']}")
    monkeypatch.setattr(resolve, "_SSH_TIMEOUT_S", 0.2)
    with pytest.raises(PlacementError) as caught:
        resolve_address(Node(id="gpu-01"), None)
    assert str(caught.value) == (
        "node gpu-01: no address for `gpu-01` (the node id): `ssh -G` gave no answer within 0.2 s"
    )


# The map's entry, and which machine it is with PLACES.
PLACES = """
Host alias
  HostName 10.0.0.7
  Port 2200
Host inner
  HostName 192.168.0.7
  ProxyJump gate
Host direct
  ProxyJump none
Host practice-*
  HostName 127.0.0.1
Match user bob
  HostName 10.0.0.8
"""
MACHINES = [
    ({"id": "a"}, "a:22"),
    ({"id": "a", "ssh": "GPU-01.Cluster."}, "gpu-01.cluster:22"),
    ({"id": "a", "ssh": "10.0.0.1", "port": 2201}, "10.0.0.1:2201"),
    ({"id": "a", "ssh": "FD00::0:1"}, "fd00::1:22"),
    ({"id": "a", "ssh": "fe80::1%eth0"}, "fe80::1%eth0:22"),
    ({"id": "a", "ssh": "alias", "address": "10.9.9.9"}, "10.0.0.7:2200"),
    ({"id": "a", "ssh": "alias", "port": 22}, "10.0.0.7:22"),
    ({"id": "a", "ssh": "inner"}, "192.168.0.7:22 via gate"),
    ({"id": "a", "ssh": "direct"}, "direct:22"),
    ({"id": "a", "ssh": "practice-1", "address": "127.0.0.1", "port": 2201}, "127.0.0.1:2201"),
    ({"id": "a", "ssh": "other", "user": "bob"}, "10.0.0.8:22"),
]


@needs_ssh
@pytest.mark.parametrize(("keys", "key"), MACHINES, ids=[key for _, key in MACHINES])
def test_which_machine_a_node_is(keys: dict[str, object], key: str, home: Path) -> None:
    """What `ssh` goes to with its configuration, by address or name and port; no name is looked up for it."""
    (home / ".ssh/config").write_text(PLACES)
    node = Node.model_validate(keys)
    assert machine_keys([node], None) == {"a": key}


def test_which_machine_a_node_is_without_ssh_to_ask(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The map decides where `ssh` cannot be asked, and where its configuration names no place: then none is run."""
    monkeypatch.setenv("PATH", "")
    (home / ".ssh/config").write_text(PLACES)
    nodes = [Node(id="alias"), Node(id="b", port=23)]
    assert machine_keys(nodes, None) == {"alias": "alias:22", "b": "b:23"}
    assert machine_keys([], None) == {}
    (tmp_path / "plain").write_text("# HostName\nHost *\n  User me\n  IdentityFile ~/.ssh/key\n")

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("nothing needs to be asked")

    monkeypatch.setattr(subprocess, "run", refuse)
    assert machine_keys(nodes, tmp_path / "plain") == {"alias": "alias:22", "b": "b:23"}


def test_many_nodes_are_looked_up_at_once() -> None:
    """More nodes than look-ups in flight: each gets its own answer, in order."""
    nodes = [Node(id=f"n{number}", address=f"10.0.{number // 256}.{number % 256}") for number in range(300)]
    found = resolve_addresses(nodes, None)
    assert [(node_id, address.value) for node_id, address in found.items()] == [(n.id, n.address) for n in nodes]


@pytest.mark.parametrize(
    ("ip", "local"), [("127.0.0.1", True), ("127.0.1.1", True), ("192.0.2.7", False), ("2001:db8::7", False)]
)
@pytest.mark.parametrize("binds_to_all", [False, True])
def test_is_local_address(monkeypatch: pytest.MonkeyPatch, ip: str, *, local: bool, binds_to_all: bool) -> None:
    """Own addresses are told from others, also where ip_nonlocal_bind lets a socket bind to any address."""
    if binds_to_all:
        monkeypatch.setattr(resolve, "_can_bind", lambda _family, _ip: True)
    assert is_local_address(ip) is local
