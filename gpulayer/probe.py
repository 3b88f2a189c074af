"""What a node says of itself before a job starts. Standard library only, one file, Python 3.8; torch is not imported.

The supervisor starts it as a child with the job's Python and the job's environment, in a folder that holds no modules
(`/`), and passes lines of JSON on both ways. facts.py makes the requests and reads the answers.

    {"type": "facts", ...}         everything below, told once; opens the listeners
    {"type": "rendezvous", ...}    the head listens on another port instead
    {"type": "reach", ...}         connects to the listeners of other nodes, to all at once
    {"type": "end"}, end of file   closes everything

A fact that cannot be had is {"error": "why"} and takes no other with it. GPU tools run beside everything else; nothing
here waits for one longer than its limit.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import select
import signal
import socket
import stat
import struct
import sys
import time

MIN_PYTHON = (3, 8)
HELLO = b"\0gpulayer-probe:"
MAX_LINE_BYTES = 1 << 20

IDLE_MEMORY_MIB = 500  # what a driver holds on an idle GPU stays below this
SETTLE_S = 1.0  # memory without a process is looked at again after this: a process that just ended gives it back late
SHM = "/dev/shm"  # noqa: S108  # looked at, not written to
LAST_DEFAULT_PORT = 29599
MOST_FREE_PORTS = 8
MOST_GUESTS = 1024
MOST_OUTPUT_BYTES = 1 << 22
KMSG_LIMIT_S = 0.1
TICK_S = 0.05

TOOLS = ("nvidia-smi", "amd-smi", "rocm-smi")
# Not on everyone's PATH in a login without a terminal.
TOOL_FOLDERS = ("/usr/local/bin", "/usr/bin", "/usr/local/nvidia/bin", "/opt/rocm/bin", "/usr/lib/wsl/lib")

# linux/rtnetlink.h, linux/if_link.h, linux/if_addr.h, linux/if_arp.h
RTM_NEWLINK, RTM_GETLINK, RTM_NEWADDR, RTM_GETADDR = 16, 18, 20, 22
IFLA_IFNAME, IFLA_OPERSTATE, IFLA_LINKINFO, IFLA_INFO_KIND = 3, 16, 18, 1
IFA_ADDRESS, IFA_LOCAL, IFA_F_DADFAILED = 1, 2, 0x08
IFF_UP, IFF_LOWER_UP = 0x1, 0x10000
OPER_DOWN = (2, 3)  # down, lower layer down
HARDWARE = {1: "ethernet", 32: "infiniband", 772: "loopback"}
LISTENING = "0A"  # /proc/net/tcp

MISTAKES = (OSError, ValueError, LookupError, TypeError, AttributeError, ImportError, struct.error)
UNREACHABLE = "unreachable"
REACH_STATES = {errno.ECONNREFUSED: "refused", errno.ETIMEDOUT: "timeout", errno.ECONNRESET: "other"}

TYPE_CHECKING = False  # mypy takes it for true; importing typing would cost 5 ms
if TYPE_CHECKING:
    import subprocess
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


def script_fact(request: Record) -> Record | None:
    """Return the file that every rank runs; None where nodes alone are checked."""
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


# --- the GPUs -------------------------------------------------------------------------------------------------------


class Commands:
    """A few commands that run at once, for as long as they may. They are killed then, but not waited for."""

    def __init__(self, argvs: list[list[str]]) -> None:
        import subprocess

        # Tools that are Python scripts have a Python of their own.
        environ = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        self._output: list[list[bytearray]] = []
        self._pipes: dict[int, bytearray] = {}
        self._children: list[subprocess.Popen[bytes]] = []
        for argv in argvs:
            child = subprocess.Popen(
                argv,
                env=environ,
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
            self._children.append(child)
            pipes = [pipe.fileno() for pipe in (child.stdout, child.stderr) if pipe]
            self._output.append([self._pipes.setdefault(fd, bytearray()) for fd in pipes])

    def finish(self, deadline: float) -> list[tuple[int | None, str, str]]:
        """Return (exit status, stdout, stderr) of each; the status is None where it was killed."""
        silent = False  # ended, and nothing came for a tick: a child of it may keep the pipes open for ever
        while self._pipes and time.monotonic() < deadline and not silent:
            over = all(child.poll() is not None for child in self._children)
            silent = not self._read(min(TICK_S, max(0.0, deadline - time.monotonic()))) and over
        while time.monotonic() < deadline and any(child.poll() is None for child in self._children):
            time.sleep(TICK_S / 5)
        ended = []
        for child, (output, errors) in zip(self._children, self._output):
            status = child.poll()
            kill_group(child)
            ended.append((status, output.decode("utf-8", "replace"), errors.decode("utf-8", "replace")))
        return ended

    def _read(self, limit_s: float) -> bool:
        poller = select.poll()
        poller.register(0, 0)
        for fd in self._pipes:
            poller.register(fd, select.POLLIN)
        ready = [fd for fd, _ in poller.poll(limit_s * 1000)]
        if 0 in ready:  # nobody listens any more
            for child in self._children:
                kill_group(child)
            raise SystemExit(0)
        for fd in ready:
            data = os.read(fd, 1 << 16)
            if data and len(self._pipes[fd]) < MOST_OUTPUT_BYTES:
                self._pipes[fd] += data
            elif not data:
                del self._pipes[fd]
        return bool(ready)


def kill_group(child: subprocess.Popen[bytes]) -> None:
    """SIGKILL to a command that still runs, and to what it has started."""
    if child.poll() is None:
        with contextlib.suppress(OSError):
            os.killpg(child.pid, signal.SIGKILL)


def find_tools() -> list[tuple[str, str]]:
    """Return (name, path) of the GPU tools that are there, the one of the GPUs that are there first."""
    folders = [*os.environ.get("PATH", "").split(os.pathsep), *TOOL_FOLDERS]
    found = []
    for name in TOOLS:
        paths = (os.path.join(folder, name) for folder in folders if folder.startswith("/"))
        path = next((path for path in paths if os.path.isfile(path) and os.access(path, os.X_OK)), None)
        if path:
            found.append((name, path))
    if os.path.exists("/dev/kfd") and not os.path.exists("/dev/nvidiactl"):
        found.sort(key=lambda tool: tool[0] == "nvidia-smi")
    return found


def device_files() -> int:
    """Return how many GPUs the kernel shows, whatever the tools say."""
    nvidia = [name for name in list_folder("/dev") if re.fullmatch(r"nvidia\d+", name)]
    nodes = "/sys/class/kfd/kfd/topology/nodes"
    amd = [name for name in list_folder(nodes) if read_line(f"{nodes}/{name}/gpu_id") not in ("", "0")]
    return len(nvidia) + len(amd)


GPU_FIELDS = "index,uuid,pci.bus_id,driver_version,memory.used,memory.total,ecc.errors.uncorrected.volatile.total,name"
PROCESS_FIELDS = "gpu_uuid,pid,used_memory,process_name"
CSV = "--format=csv,noheader,nounits"

COMMANDS = {
    "nvidia-smi": [["--query-gpu=" + GPU_FIELDS, CSV], ["--query-compute-apps=" + PROCESS_FIELDS, CSV]],
    "amd-smi": [
        ["metric", "--mem-usage", "--ecc", "--json"],
        ["process", "--json"],
        ["static", "--asic", "--driver", "--json"],
    ],
    "rocm-smi": [
        ["--showmeminfo", "vram", "--showproductname", "--showuniqueid", "--showdriverversion", "--showpids", "--json"],
    ],
}


class GpuQuery:
    """Asks the vendor's tool; starts with the probe and is collected last.

    A tool that fails hands over to the next one that is installed. One that hangs does not: so would the next.
    """

    def __init__(self, limit_s: float) -> None:
        self._deadline = time.monotonic() + limit_s
        self._tools = find_tools()
        self._running = self._start() if self._tools else None

    def _start(self) -> Commands:
        name, path = self._tools[0]
        return Commands([[path, *arguments] for arguments in COMMANDS[name]])

    def finish(self) -> Record:
        """Return the fact about the GPUs."""
        answers = []
        while self._tools:
            answers.append(self._collect())
            if answers[-1]["state"] != "failed":
                break
            self._tools.pop(0)
            self._running = None
        best = answers[-1] if answers and answers[-1]["state"] == "ok" else None
        fact = best or (answers[0] if answers else gpu_fact(None, "missing"))
        fact["device_files"] = device_files()
        return fact

    def _collect(self) -> Record:
        fact = self._ask()
        if any(holds_memory_alone(device, fact["processes"]) for device in fact["devices"]):
            time.sleep(min(SETTLE_S, max(0.0, self._deadline - time.monotonic())))
            again = self._ask() if time.monotonic() < self._deadline else fact
            fact = again if again["state"] == "ok" else fact
        return fact

    def _ask(self) -> Record:
        name = self._tools[0][0]
        try:
            running, self._running = self._running or self._start(), None
            ended = running.finish(self._deadline)
        except OSError as error:
            return gpu_fact(name, "failed", error.strerror or "")
        if any(status is None for status, _, _ in ended):
            return gpu_fact(name, "hangs")
        if name == "nvidia-smi" and "No devices were found" in ended[0][1]:
            return gpu_fact(name, "ok")
        for status, output, errors in ended:
            if status:
                return gpu_fact(name, "failed", complaint(errors) or complaint(output) or f"exit status {status}")
        try:
            return READERS[name](*(output for _, output, _ in ended))
        except MISTAKES as error:
            return gpu_fact(name, "failed", f"its output makes no sense: {error!r}"[:300])


def gpu_fact(tool: str | None, state: str, message: str = "") -> Record:
    """Return the fact about GPUs with nothing in it yet."""
    return {"tool": tool, "state": state, "message": message, "driver": None, "devices": [], "processes": []}


def complaint(text: str) -> str:
    """Return the first line of a tool's output that is no row of a table."""
    lines = (line.strip() for line in text.splitlines())
    return next((line[:300] for line in lines if line and not line[0].isdigit()), "")


def holds_memory_alone(device: Record, processes: list[Record]) -> bool:
    """Tell whether a GPU's memory is in use by no process that can be seen."""
    seen = any(process["device"] in (device["index"], None) for process in processes)
    return (device["memory_used_mib"] or 0) > IDLE_MEMORY_MIB and not seen


def gpu_process(device: int | None, pid: int, memory_mib: int | None, name: str) -> Record:
    """Return a process on a GPU. The tool's own name for it is all there is where it lives in another namespace."""
    user, command = describe_process(pid)
    return {"device": device, "pid": pid, "user": user, "command": command or name[:200], "memory_mib": memory_mib}


def whole(text: str) -> int | None:
    """Return a number of nvidia-smi's, None for `[N/A]` and its like."""
    return int(text) if text.strip().isdigit() else None


def read_nvidia_smi(gpus: str, processes: str) -> Record:
    """Read two tables of comma-separated values; the last column may hold commas."""
    fact = gpu_fact("nvidia-smi", "ok")
    by_uuid, xids = {}, recent_xids()
    for line in filter(None, map(str.strip, gpus.splitlines())):
        index, uuid, bus, driver, used, total, ecc, name = line.split(", ", 7)
        by_uuid[uuid] = int(index)
        fact["driver"] = driver
        device = {"index": int(index), "uuid": uuid, "name": name, "ecc_errors": whole(ecc)}
        device.update(memory_used_mib=whole(used), memory_total_mib=whole(total), xids=xids.get(short_bus(bus), []))
        fact["devices"].append(device)
    for line in filter(None, map(str.strip, processes.splitlines())):
        uuid, pid, used, name = line.split(", ", 3)
        fact["processes"].append(gpu_process(by_uuid.get(uuid), int(pid), whole(used), name))
    return fact


XID = re.compile(r"^\d+,\d+,(\d+),[^;]*;NVRM: Xid \(PCI:([0-9a-fA-F:.]+)\): (\d+)", re.MULTILINE)


def short_bus(bus: str) -> str:
    """Return a PCI address as `3b:00`: nvidia-smi and the kernel write its domain and function differently."""
    return ":".join(bus.lower().partition(".")[0].split(":")[-2:])


def recent_xids() -> dict[str, list[Record]]:
    """Return the Xid errors in the kernel's log by PCI address; none where it is not ours to read."""
    records, until = [], time.monotonic() + KMSG_LIMIT_S
    try:
        fd = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return {}
    try:
        while time.monotonic() < until:
            records.append(os.read(fd, 8192))
    except OSError:  # EAGAIN: that was all. EPIPE: overtaken by new records
        pass
    finally:
        os.close(fd)
    return xids_in(b"".join(record for record in records if b"Xid" in record).decode("utf-8", "replace"), uptime_s())


def uptime_s() -> float:
    """Return the seconds since this machine was started, on the clock of the kernel's log."""
    return time.clock_gettime(time.CLOCK_MONOTONIC)


def xids_in(log: str, now_s: float) -> dict[str, list[Record]]:
    """Return the last of each Xid error by PCI address. The log is as /dev/kmsg has it, stamped in microseconds."""
    found: dict[str, dict[int, float]] = {}
    for stamp, bus, code in XID.findall(log):
        found.setdefault(short_bus(bus), {})[int(code)] = round(now_s - int(stamp) / 1e6, 1)
    return {bus: [{"code": code, "age_s": age} for code, age in sorted(ages.items())] for bus, ages in found.items()}


def load_json(text: str) -> Any:
    """Read JSON that may come after lines of warnings."""
    start = re.search(r"^[\[{]", text, re.MULTILINE)
    return json.loads(text[start.start() :] if start else text)


def rows_of(text: str) -> list[Record]:
    """Return amd-smi's rows, one for each GPU. Since ROCm 7 they stand under `gpu_data`."""
    data = load_json(text)
    rows = data["gpu_data"] if isinstance(data, dict) else data
    return [row for row in rows if isinstance(row.get("gpu"), int)]


UNITS = {"B": 1 / (1 << 20), "KB": 1 / 1024, "MB": 1, "GB": 1024}  # amd-smi writes MB and means MiB


def amount_mib(value: Any, unit: str) -> int | None:
    """Return an amount of amd-smi's in MiB: {"value": 1, "unit": "MB"} or a number; None for "N/A"."""
    if isinstance(value, dict):
        unit = value.get("unit") or unit
        value = value.get("value")
    return int(value * UNITS[unit]) if isinstance(value, (int, float)) else None


def section(row: Record, name: str) -> Record:
    """Return a part of amd-smi's output, empty where it is "N/A"."""
    part = row.get(name)
    return part if isinstance(part, dict) else {}


def read_amd_smi(metric: str, process: str, static: str) -> Record:
    """Read `amd-smi` metric, process and static."""
    fact = gpu_fact("amd-smi", "ok")
    known = {row["gpu"]: row for row in rows_of(static)}
    for row in rows_of(metric):
        memory, more = section(row, "mem_usage"), known.get(row["gpu"], {})
        ecc = section(row, "ecc").get("total_uncorrectable_count")
        fact["driver"] = section(more, "driver").get("version") or fact["driver"]
        device = {"index": row["gpu"], "uuid": str(section(more, "asic").get("asic_serial", "")), "xids": []}
        device.update(
            name=str(section(more, "asic").get("market_name", "")),
            memory_used_mib=amount_mib(memory.get("used_vram"), "MB"),
            memory_total_mib=amount_mib(memory.get("total_vram"), "MB"),
            ecc_errors=ecc if isinstance(ecc, int) else None,
        )
        fact["devices"].append(device)
    for row in rows_of(process):
        for entry in row.get("process_list", []):
            one = section(entry, "process_info")  # text where there are none
            used = amount_mib(section(one, "memory_usage").get("vram_mem", one.get("mem_usage")), "B")
            if one and used != 0:  # a process is listed on every GPU that it could use
                fact["processes"].append(gpu_process(row["gpu"], int(one["pid"]), used, str(one.get("name", ""))))
    return fact


def read_rocm_smi(output: str) -> Record:
    """Read `rocm-smi`. It does not say which GPU a process is on: `device` is None."""
    fact = gpu_fact("rocm-smi", "ok")
    data = load_json(output)
    system = data.pop("system", {})
    fact["driver"] = system.get("Driver version")
    for card, row in data.items():
        device = {"index": int(card[len("card") :]), "uuid": str(row.get("Unique ID", "")), "ecc_errors": None}
        device.update(
            name=str(row.get("Card Series", row.get("Card series", ""))).strip(),
            memory_used_mib=amount_mib(int(row["VRAM Total Used Memory (B)"]), "B"),
            memory_total_mib=amount_mib(int(row["VRAM Total Memory (B)"]), "B"),
            xids=[],
        )
        fact["devices"].append(device)
    for key, value in system.items():
        if re.fullmatch(r"PID\d+", key):
            name, _, used, _, _ = value.rsplit(", ", 4)
            if used != "0":
                memory = amount_mib(int(used), "B") if used.isdigit() else None
                fact["processes"].append(gpu_process(None, int(key[3:]), memory, name))
    return fact


READERS: dict[str, Callable[..., Record]] = {
    "nvidia-smi": read_nvidia_smi,
    "amd-smi": read_amd_smi,
    "rocm-smi": read_rocm_smi,
}


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
    """Return the room under the scratch folder, and whether a folder can be made in it: tried, then removed."""
    path, detail = request["scratch"], ""
    trial = os.path.join(path, ".gpulayer-" + request["nonce"])
    try:
        os.mkdir(trial, 0o700)
        os.rmdir(trial)
    except OSError as error:
        detail = error.strerror or ""
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


def attempt(find: Callable[[], Any]) -> Any:
    """Return a fact, or why there is none."""
    try:
        return find()
    except MISTAKES as error:
        return {"error": (f"{error.strerror or error}" if isinstance(error, OSError) else repr(error))[:300]}


# --- reaching others ------------------------------------------------------------------------------------------------


def abandon(connection: socket.socket) -> None:
    """Close with a reset, so that neither end keeps the port for a minute."""
    with contextlib.suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


class Attempt:
    """One connection to the listener of another node, until it is known how that went (`state`)."""

    def __init__(self, target: Record) -> None:
        self.name = target["name"]
        self.state, self.detail = "", ""
        self.rtt_ms: float | None = None
        self._expected = (target["nonce"] + "\n").encode()
        self._heard = b""
        self._begun = time.monotonic()
        self.socket = socket.socket(socket.AF_INET6 if ":" in target["address"] else socket.AF_INET)
        self.socket.setblocking(False)
        number = self.socket.connect_ex((target["address"], target["port"]))
        if number not in (0, errno.EINPROGRESS):
            self._failed(number)

    @property
    def events(self) -> int:
        """What to wait for next."""
        return select.POLLOUT if self.rtt_ms is None else select.POLLIN

    def _failed(self, number: int) -> None:
        self._over(REACH_STATES.get(number, UNREACHABLE), os.strerror(number))

    def _over(self, state: str, detail: str) -> None:
        self.state, self.detail = state, detail
        abandon(self.socket)

    def advance(self) -> None:
        """Go on: connected, or something was said."""
        if self.rtt_ms is None:
            number = self.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if number:
                self._failed(number)
            else:
                self.rtt_ms = round((time.monotonic() - self._begun) * 1000, 3)
            return
        try:
            data = self.socket.recv(256)
        except OSError as error:
            self._over("other", error.strerror or "")
            return
        self._heard += data
        if self._heard == self._expected:
            self._over("ok", "")
        elif not data:
            self._over("other", "it hung up")
        elif not self._expected.startswith(self._heard):
            self._over("other", f"it said {self._heard[:40]!r}")

    def give_up(self) -> None:
        """The time is over."""
        if self.rtt_ms is None:
            self._over("timeout", "no answer")
        else:
            self._over("other", "it took the connection and said nothing")

    def result(self) -> Record:
        """Return how it went."""
        return {"name": self.name, "state": self.state, "rtt_ms": self.rtt_ms, "detail": self.detail}


class Probe:
    """The event loop: requests from stdin, visitors to the listeners, connections to others."""

    def __init__(self) -> None:
        self._lines = bytearray()
        self._over = False
        self._nonce = b""
        self._listener: socket.socket | None = None
        self._rendezvous: socket.socket | None = None
        self._guests: dict[int, socket.socket] = {}
        self._attempts: list[Attempt] = []
        self._deadline = 0.0

    def run(self) -> None:
        """Serve until told to end."""
        while not self._over:
            self._wait()
        for one in (self._listener, self._rendezvous):
            if one:
                one.close()
        for guest in self._guests.values():
            abandon(guest)

    def _wait(self) -> None:
        listeners = {one.fileno(): one for one in (self._listener, self._rendezvous) if one}
        attempts = {one.socket.fileno(): one for one in self._attempts if not one.state}
        poller = select.poll()
        for fd in (0, *listeners, *self._guests):
            poller.register(fd, select.POLLIN)
        for fd, one in attempts.items():
            poller.register(fd, one.events)
        limit_s = max(0.0, self._deadline - time.monotonic()) if self._attempts else None
        for fd, _ in poller.poll(None if limit_s is None else limit_s * 1000 + 1):
            if fd in listeners:
                self._greet(listeners[fd])
            elif fd in attempts:
                attempts[fd].advance()
            elif fd in self._guests:
                abandon(self._guests.pop(fd))
            else:
                self._receive()
        self._finish_reach()

    def _greet(self, listener: socket.socket) -> None:
        """Say the nonce. The visitor hangs up first, so that no old connection is left on the rendezvous port."""
        try:
            guest, _ = listener.accept()
            guest.setblocking(False)
            guest.send(self._nonce)
        except OSError:
            return
        self._guests[guest.fileno()] = guest
        if len(self._guests) > MOST_GUESTS:
            abandon(self._guests.pop(next(iter(self._guests))))

    def _receive(self) -> None:
        data = os.read(0, 1 << 16)
        self._lines += data
        self._over = not data or len(self._lines) > MAX_LINE_BYTES
        while b"\n" in self._lines and not self._over:
            line, _, rest = bytes(self._lines).partition(b"\n")
            self._lines[:] = rest
            self._obey(json.loads(line))

    def _obey(self, request: Record) -> None:
        kind = request["type"]
        if kind == "facts":
            self._tell_facts(request)
        elif kind == "rendezvous":
            self._say({"type": "rendezvous", **self._open_rendezvous(request["port"])})
        elif kind == "reach":
            self._deadline = time.monotonic() + request["limit_s"]
            self._attempts = [Attempt(target) for target in request["targets"]]
            if not self._attempts:
                self._say({"type": "reach", "results": []})
        else:
            self._over = True

    def _say(self, answer: Record) -> None:
        data = json.dumps(answer, separators=(",", ":")).encode() + b"\n"
        while data:
            data = data[os.write(1, data) :]

    def _tell_facts(self, request: Record) -> None:
        gpus = attempt(lambda: GpuQuery(request["smi_limit_s"]))
        self._nonce = (request["nonce"] + "\n").encode()
        facts: Record = {"type": "facts"}
        # Before the listener, which could get this very port.
        head = request["node_rank"] == 0
        facts.update(self._open_rendezvous(request["master_port"]) if head else {"port": None, "free_ports": []})
        facts["listener"] = attempt(self._open_listener)
        for name, find in FACTS.items():
            facts[name] = attempt(lambda find=find: find(request))  # type: ignore[misc]
        facts["gpu"] = attempt(gpus.finish) if isinstance(gpus, GpuQuery) else gpus
        facts["time_s"] = time.time()
        self._say(facts)

    def _open_listener(self) -> Record:
        if self._listener is None:
            self._listener = listen(0)
        return {"port": self._listener.getsockname()[1]}

    def _open_rendezvous(self, port: int) -> Record:
        """Listen where torch's store will, beside the supervisor, which holds the port without listening."""
        if self._rendezvous:
            self._rendezvous.close()
            self._rendezvous = None
        fact: Record = {"port": port, "state": "free", "pid": None, "command": "", "user": "", "detail": ""}
        try:
            self._rendezvous = listen(port, reuse=True)
        except OSError as error:
            taken = error.errno == errno.EADDRINUSE
            fact.update(state="taken" if taken else "denied", detail=error.strerror or "")
            fact.update(attempt(lambda: port_holder(port)) if taken else {})
            fact["detail"] = fact.pop("error", fact["detail"])
        return {"port": fact, "free_ports": free_ports(port) if fact["state"] == "taken" else []}

    def _finish_reach(self) -> None:
        late = bool(self._attempts) and time.monotonic() >= self._deadline
        for one in self._attempts:
            if late and not one.state:
                one.give_up()
        if self._attempts and all(one.state for one in self._attempts):
            self._say({"type": "reach", "results": [one.result() for one in self._attempts]})
            self._attempts = []


def main(nonce: str) -> None:
    """Greet and serve. Whatever a sitecustomize prints cannot pass for the greeting, whose `nonce` it does not know."""
    sys.path[:] = [entry for entry in sys.path if entry]  # modules in the job's folder are the job's, not ours
    os.write(1, HELLO + nonce.encode() + b"\n")
    Probe().run()
