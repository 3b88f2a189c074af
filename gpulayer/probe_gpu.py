"""What the vendors' tools say of a machine's GPUs. Standard library only, Python 3.8.

Part of the probe, which sends it to nodes: see probe.py. Nothing here waits for a tool longer than its limit.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import signal
import time

from gpulayer.probe_host import MISTAKES, describe_process, list_folder, read_line

IDLE_MEMORY_MIB = 500  # what a driver holds on an idle GPU stays below this
SETTLE_S = 1.0  # memory without a process is looked at again after this: a process that just ended gives it back late
MOST_OUTPUT_BYTES = 1 << 22
KMSG_LIMIT_S = 0.1
TICK_S = 0.05

TOOLS = ("nvidia-smi", "amd-smi", "rocm-smi")
# Not on everyone's PATH in a login without a terminal.
TOOL_FOLDERS = ("/usr/local/bin", "/usr/bin", "/usr/local/nvidia/bin", "/opt/rocm/bin", "/usr/lib/wsl/lib")

TYPE_CHECKING = False  # mypy takes it for true
if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable
    from typing import Any

    from gpulayer.probe_host import Record

STARTED: list[subprocess.Popen[bytes]] = []  # tools, which are ended with the probe


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
            STARTED.append(child)
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
