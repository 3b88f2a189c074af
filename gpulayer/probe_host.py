"""What a machine says of itself: network, software, room. Standard library only, Python 3.8; no torch is imported.

Part of the probe, which sends it to nodes: see probe.py. Each fact is a function of the request, in FACTS.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import socket
import stat
import struct
import sys

SHM = "/dev/shm"  # noqa: S108  # looked at, not written to
LAST_DEFAULT_PORT = 29599
MOST_FREE_PORTS = 8
ROOM_BYTES = 1 << 16

# linux/rtnetlink.h, linux/if_link.h, linux/if_addr.h, linux/if_arp.h
RTM_NEWLINK, RTM_GETLINK, RTM_NEWADDR, RTM_GETADDR = 16, 18, 20, 22
IFLA_IFNAME, IFLA_OPERSTATE, IFLA_LINKINFO, IFLA_INFO_KIND = 3, 16, 18, 1
IFA_ADDRESS, IFA_LOCAL, IFA_F_DADFAILED = 1, 2, 0x08
IFF_UP, IFF_LOWER_UP = 0x1, 0x10000
OPER_DOWN = (2, 3)  # down, lower layer down
HARDWARE = {1: "ethernet", 32: "infiniband", 772: "loopback"}
LISTENING = "0A"  # /proc/net/tcp

MISTAKES = (OSError, ValueError, LookupError, TypeError, AttributeError, ImportError, struct.error)

TYPE_CHECKING = False  # mypy takes it for true; importing typing would cost 5 ms
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from importlib.machinery import ModuleSpec
    from typing import Any

    Record = dict[str, Any]


def read_file(path: str) -> bytes:
    """Return a file's bytes, or b"" where it is gone or not ours to read."""
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError:
        return b""


def read_line(path: str) -> str:
    """Return a one-line file's text, or "" where it is gone or not ours to read."""
    return read_file(path).decode("utf-8", "replace").strip()


def list_folder(path: str) -> list[str]:
    """Return the names in a folder, sorted; none where there is no such folder."""
    try:
        return sorted(os.listdir(path))
    except OSError:
        return []


def user_name(uid: int) -> str:
    """Return the name of a user, or the number where it has none here."""
    import pwd

    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def describe_process(pid: int) -> tuple[str, str]:
    """Return (user, command line) of a process, both "" where it cannot be seen from here."""
    try:
        user = user_name(os.stat(f"/proc/{pid}").st_uid)
    except OSError:
        return "", ""
    command = read_file(f"/proc/{pid}/cmdline").replace(b"\0", b" ").decode("utf-8", "replace").strip()
    return user, (command or read_line(f"/proc/{pid}/comm"))[:200]


# --- the network ----------------------------------------------------------------------------------------------------


def netlink_dump(request: int, header_bytes: int) -> Iterator[tuple[bytes, dict[int, bytes]]]:
    """Yield (fixed header, attributes) of every link or address of this network namespace (rtnetlink)."""
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0) as netlink:
        netlink.send(struct.pack("=IHHIIB15x", 32, request, 0x301, 1, 0, 0))  # NLM_F_REQUEST | NLM_F_DUMP
        while True:
            data = netlink.recv(1 << 18)
            while data:
                length, kind = struct.unpack_from("=IH", data)
                if kind not in (RTM_NEWLINK, RTM_NEWADDR):  # NLMSG_DONE, or an error, ends the list
                    return
                yield data[16 : 16 + header_bytes], netlink_attributes(data[16 + header_bytes : length])
                data = data[(length + 3) & ~3 :]


def netlink_attributes(data: bytes) -> dict[int, bytes]:
    """Cut a row of attributes into values by type."""
    values: dict[int, bytes] = {}
    while len(data) >= 4:
        length, kind = struct.unpack_from("=HH", data)
        values[kind & 0x3FFF] = data[4:length]
        data = data[(max(length, 4) + 3) & ~3 :]
    return values


def interfaces() -> list[Record]:
    """Return every interface with its addresses, secondary ones too. `up`: switched on, and there is a carrier."""
    found: dict[int, Record] = {}
    for header, values in netlink_dump(RTM_GETLINK, 16):
        hardware, index, flags = struct.unpack("=xxHiI4x", header)
        switched_on = bool(flags & IFF_UP)
        state = values.get(IFLA_OPERSTATE, b"\0")[0]
        special = netlink_attributes(values.get(IFLA_LINKINFO, b"")).get(IFLA_INFO_KIND, b"")
        found[index] = {
            "name": values[IFLA_IFNAME].rstrip(b"\0").decode("utf-8", "replace"),
            "switched_on": switched_on,
            "up": switched_on and bool(flags & IFF_LOWER_UP) and state not in OPER_DOWN,
            "kind": special.rstrip(b"\0").decode() or HARDWARE.get(hardware, "other"),
            "addresses": [],
        }
    for header, values in netlink_dump(RTM_GETADDR, 8):
        family, flags, index = struct.unpack("=BxBxI", header)
        # IFA_LOCAL before IFA_ADDRESS, which is the far end of a point-to-point link
        raw = values.get(IFA_LOCAL, values.get(IFA_ADDRESS))
        if raw and index in found and not flags & IFA_F_DADFAILED:
            found[index]["addresses"].append(socket.inet_ntop(family, raw))
    return list(found.values())


def source_address(target: str) -> str:
    """Return the address that packets to `target` leave from. Connecting a UDP socket sends none."""
    family = socket.AF_INET6 if ":" in target else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((target, 9))
        return str(probe.getsockname()[0])


def route_to_master(request: Record) -> Record:
    """Return the interface and the address that packets to the master leave from."""
    source = source_address(request["master_addr"])
    holders = [one["name"] for one in interfaces() if source in one["addresses"]]
    return {"interface": holders[0] if holders else "", "source": source}


def bind_port(port: int, reuse: bool) -> socket.socket:
    """Return a socket bound to `port` (0: any) on every address, IPv4 and IPv6.

    With `reuse` it gets along with sockets that are bound likewise and don't listen, and with the last connections of
    a server that is gone; without, with nothing.
    """
    try:
        bound = socket.socket(socket.AF_INET6, socket.SOCK_STREAM)
        bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    except OSError:  # a kernel without IPv6
        bound = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        if reuse:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(("", port))
    except OSError:
        bound.close()
        raise
    return bound


def listen(port: int, reuse: bool = False) -> socket.socket:
    """Return a socket that listens on `port` (0: any) on every address."""
    bound = bind_port(port, reuse)
    try:
        bound.listen(1024)
        bound.setblocking(False)
    except OSError:
        bound.close()
        raise
    return bound


def free_ports(port: int) -> list[int]:
    """Return the next ports after `port` on which nothing at all is bound, up to the last one tried by default."""
    found: list[int] = []
    while port < LAST_DEFAULT_PORT and len(found) < MOST_FREE_PORTS:
        port += 1
        try:
            bind_port(port, reuse=False).close()
        except OSError:
            continue
        found.append(port)
    return found


def port_holder(port: int) -> Record:
    """Return pid, command and user of whoever has a TCP port, as far as they can be seen: the user always can."""
    rows = [line.split() for name in ("tcp", "tcp6") for line in read_line(f"/proc/net/{name}").splitlines()[1:]]
    rows = [row for row in rows if int(row[1].rpartition(":")[2], 16) == port]
    rows.sort(key=lambda row: row[3] != LISTENING)
    if not rows:
        return {"pid": None, "command": "", "user": ""}
    uid, inode = int(rows[0][7]), rows[0][9]
    pid = socket_owner(f"socket:[{inode}]")
    return {"pid": pid, "command": describe_process(pid)[1] if pid else "", "user": user_name(uid)}


def socket_owner(name: str) -> int | None:
    """Return a process that has this socket open, or None where it is not ours to see."""
    for pid in list_folder("/proc"):
        if pid.isdigit():
            folder = f"/proc/{pid}/fd"
            with contextlib.suppress(OSError):  # it ended while it was read
                if any(os.readlink(f"{folder}/{fd}") == name for fd in list_folder(folder)):
                    return int(pid)
    return None


def ephemeral_range(request: Record) -> list[int]:
    """Return the first and the last port that the kernel gives to outgoing connections."""
    return [int(number) for number in read_line("/proc/sys/net/ipv4/ip_local_port_range").split()]


def reserved_ports(request: Record) -> list[list[int]]:
    """Return the ranges of ports that the kernel leaves out of the ephemeral range."""
    ranges = [
        part.partition("-") for part in read_line("/proc/sys/net/ipv4/ip_local_reserved_ports").split(",") if part
    ]
    return [[int(first), int(last or first)] for first, _, last in ranges]


# --- the software ---------------------------------------------------------------------------------------------------


def import_path(workdir: str) -> list[str]:
    """Return where the job's Python looks for modules: the workdir, PYTHONPATH seen from there, then its own places."""
    listed = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    return [workdir, *(os.path.join(workdir, entry) for entry in listed), *sys.path]


def find_module(name: str, path: list[str]) -> ModuleSpec | None:
    """Return what `import name` would load, without importing it or the packages around it."""
    from importlib.machinery import PathFinder

    spec: ModuleSpec | None = None
    for part in name.split("."):
        # The last part alone: Python wants the parents of a dotted name imported.
        package = spec
        spec = PathFinder.find_spec(part, path)
        if spec is None and package is None:
            spec = find_elsewhere(part)
        if spec is None:
            return None
        path = list(spec.submodule_search_locations or ())
    return spec


def find_elsewhere(name: str) -> ModuleSpec | None:
    """Ask the finders that this Python has beside sys.path: editable installs have one each."""
    for finder in sys.meta_path:
        find = getattr(finder, "find_spec", None)
        spec = find(name, None) if find else None
        if spec:
            return spec  # type: ignore[no-any-return]
    return None


def module_fact(name: str, path: list[str]) -> Record:
    """Return which file `-m name` runs. A package that changes its own search path is left alone: `unknown`."""
    spec = find_module(name, path)
    if spec and spec.submodule_search_locations is not None:
        name, spec = name + ".__main__", find_module(name + ".__main__", path)
    if spec and spec.origin and os.path.isfile(spec.origin):
        return file_fact(spec.origin)
    parent = find_module(name.rpartition(".")[0], path) if "." in name else None
    known = spec is None and not (parent and parent.origin and b"__path__" in read_file(parent.origin))
    return no_file(name, "not_found_module" if known else "unknown", "no module named " + name if known else "")


def file_fact(path: str) -> Record:
    """Return the hash and the size of a script. Python also runs a folder that holds a __main__.py."""
    import hashlib

    if os.path.isdir(path):
        path = os.path.join(path, "__main__.py")
    digest, size = hashlib.sha256(), 0
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                return no_file(path, "unreadable", "not a regular file")
            for piece in iter(lambda: file.read(1 << 16), b""):
                digest.update(piece)
                size += len(piece)
    except (FileNotFoundError, NotADirectoryError) as error:
        return no_file(path, "missing", error.strerror or "")
    except OSError as error:
        return no_file(path, "unreadable", error.strerror or "")
    return {"path": path, "state": "ok", "sha256": digest.hexdigest(), "size_bytes": size, "detail": ""}


def no_file(path: str, state: str, detail: str) -> Record:
    """Return the fact about a script that there is not."""
    return {"path": path, "state": state, "sha256": None, "size_bytes": None, "detail": detail}


def command_fact(name: str, workdir: str) -> Record:
    """Return the program that a command names, as it will be found: by the job's PATH, or from its folder."""
    folders = os.environ.get("PATH", os.defpath).split(os.pathsep)
    places = [workdir] if "/" in name else [os.path.join(workdir, folder) for folder in folders]
    for path in [os.path.join(place, name) for place in places]:
        if os.path.isfile(path) and os.access(path, os.X_OK):
            return {"path": path, "state": "ok", "sha256": None, "size_bytes": None, "detail": ""}
    return no_file(name, "not_found_command", "")


def script_fact(request: Record) -> Record | None:
    """Return the file that every rank runs; None where nodes alone are checked."""
    if request["command"]:
        return command_fact(request["command"], request["workdir"])
    if request["module"]:
        return module_fact(request["module"], import_path(request["workdir"]))
    if request["script"] is None:
        return None
    return file_fact(os.path.join(request["workdir"], request["script"]))


VERSION_LINE = re.compile(r"""^(__version__|cuda|hip)\b[^=\n]*=\s*['"]([^'"\n]+)""", re.MULTILINE)
DISTRIBUTION = re.compile(r"(torch|nvidia[_.-]nccl[_.-]cu\d+)-([^-]+)(-.*)?\.(dist|egg)-info", re.IGNORECASE)


def torch_fact(request: Record) -> Record | None:
    """Return the versions of the torch that would be imported: from torch/version.py, else as it was installed."""
    path = import_path(request["workdir"])
    spec = find_module("torch", path)
    folder = os.path.dirname(spec.origin) if spec and spec.origin else ""
    if folder:
        path.insert(0, os.path.dirname(folder))
    installed = distributions(path)
    said = dict(VERSION_LINE.findall(read_file(folder + "/version.py").decode("utf-8", "replace") if folder else ""))
    version = said.get("__version__") or installed.get("torch", ("", ""))[0]
    if not folder and not version:
        return None
    cuda = said.get("cuda")
    return {
        "version": version,
        "cuda": cuda,
        "hip": said.get("hip"),
        "nccl": installed.get("nccl", (None, ""))[0] if cuda or not folder else None,
        "path": folder or installed["torch"][1],
    }


def distributions(path: list[str]) -> dict[str, tuple[str, str]]:
    """Return (version, folder) of torch and nccl as installed, the first ones on the path."""
    found: dict[str, tuple[str, str]] = {}
    for entry in dict.fromkeys(path):
        for name in list_folder(entry):
            match = DISTRIBUTION.fullmatch(name)
            if match:
                found.setdefault("torch" if match[1].lower() == "torch" else "nccl", (match[2], entry + "/" + name))
    return found


# --- everything else ------------------------------------------------------------------------------------------------


def namespaces(request: Record) -> dict[str, int]:
    """Return the inodes that name the namespaces of this process."""
    kinds = ("net", "pid", "uts", "mnt", "ipc", "user", "cgroup")
    paths = {kind: f"/proc/self/ns/{kind}" for kind in kinds}
    return {kind: os.stat(path).st_ino for kind, path in paths.items() if os.path.exists(path)}


def workdir_fact(request: Record) -> Record:
    """Return whether the job's folder can be entered; enter it."""
    path, state, detail = request["workdir"], "ok", ""
    try:
        os.chdir(path)
    except OSError as error:
        states = {errno.ENOENT: "missing", errno.EACCES: "denied", errno.ENOTDIR: "not_a_folder"}
        state, detail = states.get(error.errno or 0, "denied"), error.strerror or ""
    return {"path": path, "state": state, "detail": detail}


def scratch_fact(request: Record) -> Record:
    """Return the room under the scratch folder, and whether a folder with a file can be made in it: tried, removed."""
    path, detail = request["scratch"], ""
    trial = os.path.join(path, ".gpulayer-" + request["nonce"])
    try:
        os.mkdir(trial, 0o700)
        with open(trial + "/room", "wb") as file:
            file.write(bytes(ROOM_BYTES))
    except OSError as error:
        detail = error.strerror or ""
    for remove, left in ((os.unlink, trial + "/room"), (os.rmdir, trial)):
        with contextlib.suppress(OSError):
            remove(left)
    free = os.statvfs(path) if os.path.isdir(path) else None
    free_bytes = free.f_bavail * free.f_frsize if free else None
    return {"path": path, "free_bytes": free_bytes, "writable": not detail, "detail": detail}


def shm_fact(request: Record) -> Record | None:
    """Return the size of /dev/shm and what is free of it; None where there is no such folder."""
    if not os.path.isdir(SHM):
        return None
    found = os.statvfs(SHM)
    return {"total_bytes": found.f_blocks * found.f_frsize, "free_bytes": found.f_bavail * found.f_frsize}


def soft_limit(name: str) -> int:
    """Return a soft limit of this process, -1 for none."""
    import resource

    return int(resource.getrlimit(getattr(resource, name))[0])


FACTS: dict[str, Callable[[Record], Any]] = {
    "workdir": workdir_fact,
    "boot_id": lambda request: read_line("/proc/sys/kernel/random/boot_id"),
    "machine_id": lambda request: read_line("/etc/machine-id"),
    "hostname": lambda request: os.uname().nodename,
    "namespaces": namespaces,
    "interfaces": lambda request: interfaces(),
    "route_to_master": route_to_master,
    "ephemeral_range": ephemeral_range,
    "reserved_ports": reserved_ports,
    "python": lambda request: {
        "version": ".".join(map(str, sys.version_info[:3])),
        "executable": sys.executable or "",
        "prefix": sys.prefix,
    },
    "torch": torch_fact,
    "script": script_fact,
    "scratch": scratch_fact,
    "shm": shm_fact,
    "nofile": lambda request: soft_limit("RLIMIT_NOFILE"),
    "memlock_bytes": lambda request: soft_limit("RLIMIT_MEMLOCK"),
    "infiniband": lambda request: list_folder("/sys/class/infiniband"),
}
