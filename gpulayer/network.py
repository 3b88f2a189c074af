"""A node's network: the interface that holds an address, and the reserved rendezvous port. Runs on nodes."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import socket
import struct

from gpulayer.processes import read_file

SIOCGIFCONF = 0x8912


class RefusalError(Exception):
    """This node cannot take part; made of a code for programs and a message for people."""


def family_of(address: str) -> socket.AddressFamily:
    """Return the address family of a literal address."""
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def interface_addresses() -> list[tuple[str, str]]:
    """Return (interface, address) for every address of this machine, secondary ones too."""
    found = []
    buffer = ctypes.create_string_buffer(1 << 16)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        reply = fcntl.ioctl(probe, SIOCGIFCONF, struct.pack("iP", len(buffer), ctypes.addressof(buffer)))
    entry = struct.Struct(f"16s4x4s{2 * struct.calcsize('P')}x")  # struct ifreq
    for name, packed in entry.iter_unpack(buffer.raw[: struct.unpack_from("i", reply)[0]]):
        label = name.partition(b"\0")[0].partition(b":")[0]  # eth0:1 is a label on eth0
        found.append((label.decode(), socket.inet_ntop(socket.AF_INET, packed)))
    for line in read_file("/proc/net/if_inet6").decode().splitlines():
        fields = line.split()
        found.append((fields[5], socket.inet_ntop(socket.AF_INET6, bytes.fromhex(fields[0]))))
    return found


def choose_interface(address: str, master_addr: str, wanted: str | None) -> str:
    """Return the interface that gloo and NCCL shall use, or "".

    That is `wanted`, else the one that holds `address`, else (the address is translated on the way) the one that routes
    to the master. Raises RefusalError where `wanted` does not fit.
    """
    held = interface_addresses()
    address = socket.inet_ntop(family_of(address), socket.inet_pton(family_of(address), address))  # fd00::0:1
    if wanted:
        names = sorted(name for _, name in socket.if_nameindex())
        if wanted not in names:
            there = ", ".join(names)
            raise RefusalError("interface", f"interface `{wanted}` does not exist; there are: {there}")
        here = [value for name, value in held if name == wanted]
        if address not in here and any(value == address for _, value in held):
            there = ", ".join(here) or "nothing"
            raise RefusalError("interface", f"interface `{wanted}` holds {there}, not {address}")
        return wanted
    local = {value: name for name, value in reversed(held)}
    return local.get(address) or local.get(source_address(master_addr)) or ""


def source_address(target: str) -> str:
    """Return the address that packets to `target` leave from, or "". Connecting a UDP socket sends none."""
    with socket.socket(family_of(target), socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((target, 9))
            return str(probe.getsockname()[0])
        except OSError:
            return ""


def reserve_port(port: int) -> socket.socket:
    """Hold the rendezvous port: bound on every address, not listening, SO_REUSEADDR. Raises RefusalError when taken.

    So nobody's ephemeral port lands on it, and torch can still bind it (measured, torch 2.13).
    """
    try:
        holder = socket.socket(socket.AF_INET6, socket.SOCK_STREAM)
        holder.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    except OSError:  # a kernel without IPv6
        holder = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    return bind_or_refuse(holder, ("", port), f"port {port} is in use")


def lock_port(port: int) -> socket.socket:
    """Keep other gpulayer jobs on this machine off the port: sockets that reserve it do not exclude each other."""
    holder = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    return bind_or_refuse(holder, f"\0gpulayer-port-{port}", f"port {port} is held by another job of gpulayer")


def bind_or_refuse(holder: socket.socket, address: str | tuple[str, int], taken: str) -> socket.socket:
    """Bind a socket and return it. Raises RefusalError."""
    try:
        holder.bind(address)
    except OSError as error:
        holder.close()
        raise RefusalError("port", taken if error.errno == errno.EADDRINUSE else f"{address}: {error}") from None
    return holder
