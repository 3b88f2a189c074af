"""The node's probe as a local child, against what it looks at: interfaces, ports, files, stub packages, fake tools."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from gpulayer import probe, probe_gpu, probe_host
from gpulayer.facts import (
    GpuDevice,
    GpuFact,
    GpuProcess,
    Interface,
    ReachResult,
    ReachTarget,
    RendezvousPort,
    Route,
    ScriptFact,
    TorchFact,
    WorkdirFact,
    Xid,
)
from tests.support import netns
from tests.support.local_node import wait_gone
from tests.support.probes import ProbeProcess, pythons, request
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gpulayer.facts import NodeFacts

NOBODY = 65534
BARE = (sys.executable, "-ISE")  # without site-packages: no torch


def facts_of(workdir: Path, *, env: dict[str, str] | None = None, **fields: object) -> NodeFacts:
    """Run a probe for its facts alone."""
    with ProbeProcess(env=env) as node:
        found = node.facts(request(workdir, **fields))
        assert node.end() == (0, "")
    return found


def free_port() -> int:
    """A port outside the ephemeral range that nothing holds."""
    for port in range(20000, 30000):
        with contextlib.suppress(OSError):
            probe_host.bind_port(port, reuse=False).close()
            return port
    pytest.fail("no free port")


def reserved(port: int) -> socket.socket:
    """Hold a port as a supervisor does: bound, not listening."""
    return probe_host.bind_port(port, reuse=True)


# --- the whole -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("python", pythons())
def test_every_python(tmp_path: Path, python: str) -> None:
    """Every Python from 3.8 on tells every fact without an error, and ends without a word."""
    (tmp_path / "train.py").write_text("pass\n")
    with ProbeProcess((python,)) as node:
        assert node.greeting == probe.HELLO + b"n1\n"
        found = node.facts(request(tmp_path))
        version = subprocess.check_output(
            [python, "-c", "import sys; print(*sys.version_info[:3], sep='.')"], text=True
        )
        assert node.end() == (0, "")
    assert found.errors == {}
    assert found.python
    assert found.python.version == version.strip()
    assert found.script == ScriptFact(str(tmp_path / "train.py"), "ok", hashlib.sha256(b"pass\n").hexdigest(), 5, "")
    assert found.time_s
    assert abs(found.time_s - time.time()) < 5
    assert found.boot_id == Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    assert found.hostname == os.uname().nodename
    assert found.namespaces
    assert found.namespaces["net"] == Path("/proc/self/ns/net").stat().st_ino
    assert found.port is None
    assert found.listener
    assert found.shm
    assert found.nofile
    assert found.scratch
    assert (found.scratch.writable, list(tmp_path.iterdir())) == (True, [tmp_path / "train.py"])


def test_end_of_file_ends_it(tmp_path: Path) -> None:
    """A probe whose stdin ends has nothing more to do."""
    with ProbeProcess() as node:
        node.facts(request(tmp_path))
        assert node.wait() == (0, "")


def test_one_failure_leaves_the_other_facts(tmp_path: Path) -> None:
    """A fact that cannot be had says why, and all others are told."""
    found = facts_of(tmp_path, master_addr="not-an-address.invalid", script="x\0y")
    assert set(found.errors) == {"route_to_master", "script"}
    assert "null byte" in found.errors["script"]
    assert found.script is None
    assert found.interfaces


def test_modules_in_the_workdir_are_not_run(tmp_path: Path) -> None:
    """A job's folder full of modules with the names of Python's own does no harm."""
    for name in ("json", "select", "hashlib", "subprocess", "resource", "pwd", "importlib", "struct"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit(f'{__name__} of the job was imported')\n")
    assert facts_of(tmp_path).errors == {}


# --- workdir, script, module -----------------------------------------------------------------------------------------


def test_workdir(tmp_path: Path) -> None:
    """A folder that is not there, and one that is none, are told apart."""
    (tmp_path / "file").touch()
    assert facts_of(tmp_path / "gone").workdir == WorkdirFact(
        str(tmp_path / "gone"), "missing", "No such file or directory"
    )
    assert facts_of(tmp_path / "file").workdir == WorkdirFact(str(tmp_path / "file"), "not_a_folder", "Not a directory")


@pytest.mark.ssh
def test_what_a_user_may_not_see() -> None:
    """A folder and a script closed to the job's user are `denied` and `unreadable`; scratch there is not writable."""
    base = Path(tempfile.mkdtemp(prefix="gpulayer-probe-"))  # pytest's own folders are closed to other users
    base.chmod(0o755)
    try:
        (base / "closed").mkdir(mode=0o700)
        (base / "secret.py").touch(mode=0o600)
        prefix = ["setpriv", "--reuid", str(NOBODY), "--regid", str(NOBODY), "--clear-groups"]
        with ProbeProcess(("python3",), prefix=prefix, env={"PATH": netns.SYSTEM_PATH}) as node:
            found = node.facts(request(base / "closed", script=str(base / "secret.py"), scratch=str(base)))
            assert node.end() == (0, "")
    finally:
        shutil.rmtree(base)
    assert found.workdir == WorkdirFact(str(base / "closed"), "denied", "Permission denied")
    assert found.script == ScriptFact(str(base / "secret.py"), "unreadable", None, None, "Permission denied")
    assert found.scratch
    assert (found.scratch.writable, found.scratch.detail) == (False, "Permission denied")
    assert found.errors == {}


def test_scratch_that_is_not_there(tmp_path: Path) -> None:
    """A scratch folder that does not exist has no room, and cannot be written."""
    scratch = facts_of(tmp_path, scratch=str(tmp_path / "gone")).scratch
    assert scratch
    assert (scratch.free_bytes, scratch.writable, scratch.detail) == (None, False, "No such file or directory")


def test_scripts(tmp_path: Path) -> None:
    """Scripts are hashed byte for byte; a folder stands for its __main__.py; what is no file does not hang it."""
    (tmp_path / "a.py").write_text("x = 1\n")
    (tmp_path / "b.py").write_text("x = 2\n")
    (tmp_path / "app").mkdir()
    (tmp_path / "app/__main__.py").write_text("x = 1\n")
    os.mkfifo(tmp_path / "fifo")
    with ProbeProcess() as node:
        asked = ("a.py", "b.py", "app", str(tmp_path / "a.py"), "gone.py", "a.py/x", "fifo")
        found = [node.facts(request(tmp_path, script=name)).script for name in asked]
    digests = [hashlib.sha256(f"x = {number}\n".encode()).hexdigest() for number in (1, 2)]
    assert [one and (one.state, one.sha256, one.size_bytes, one.detail) for one in found] == [
        ("ok", digests[0], 6, ""),
        ("ok", digests[1], 6, ""),
        ("ok", digests[0], 6, ""),
        ("ok", digests[0], 6, ""),
        ("missing", None, None, "No such file or directory"),
        ("missing", None, None, "Not a directory"),
        ("unreadable", None, None, "not a regular file"),
    ]


def test_commands(tmp_path: Path) -> None:
    """A command is found as execvp will find it: by the job's PATH, or from the job's folder if its name has a `/`."""
    for name in ("bin/tool", "here", "plain"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o644 if name == "plain" else 0o755)
    asked = ("tool", "./here", str(tmp_path / "here"), "here", "plain", "./plain", "bin", "gone")
    with ProbeProcess(env={"PATH": f"/no/such:{tmp_path}/bin"}) as node:
        found = [node.facts(request(tmp_path, script=None, command=name)).script for name in asked]
    assert [one and one.state for one in found] == ["ok"] * 3 + ["not_found_command"] * 5
    assert found[0] is not None
    assert (found[0].path, found[0].sha256) == (f"{tmp_path}/bin/tool", None)


def test_modules(tmp_path: Path) -> None:
    """Modules are found as `-m` finds them and never imported; one that only an import could find is left alone."""
    bomb = "raise SystemExit('imported')\n"
    files = {
        "flat.py": bomb,
        "pack/__init__.py": bomb,
        "pack/__main__.py": bomb + "# pack",
        "pack/train.py": bomb + "# train",
        "space/inner/job.py": bomb + "# job",
        "lib/package/listed.py": bomb + "# listed",
        "moving/__init__.py": "__path__ = []\n" + bomb,
        "nomain/__init__.py": bomb,
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    expected = {
        "flat": ("ok", "flat.py"),
        "pack": ("ok", "pack/__main__.py"),
        "pack.train": ("ok", "pack/train.py"),
        "space.inner.job": ("ok", "space/inner/job.py"),
        "package.listed": ("ok", "lib/package/listed.py"),
        "moving.inside": ("unknown", None),
        "nomain": ("not_found_module", None),
        "pack.gone": ("not_found_module", None),
        "gone": ("not_found_module", None),
        "flat.inside": ("not_found_module", None),
    }
    with ProbeProcess(env={"PYTHONPATH": "lib"}) as node:
        found = {name: node.facts(request(tmp_path, script=None, module=name)) for name in expected}
        assert node.end() == (0, "")
    seen = {name: (one.script.state, one.script.sha256) if one.script else one.errors for name, one in found.items()}
    assert seen == {
        name: (state, hashlib.sha256(files[path].encode()).hexdigest() if path else None)
        for name, (state, path) in expected.items()
    }


# --- torch -----------------------------------------------------------------------------------------------------------


def stub_torch(folder: Path, version: str, *, cuda: str | None = None, hip: str | None = None, nccl: str = "") -> None:
    """A torch that must not be imported, laid out as pip does."""
    (folder / "torch").mkdir(parents=True)
    (folder / "torch/__init__.py").write_text("raise SystemExit('torch was imported')\n")
    (folder / "torch/version.py").write_text(
        f"from typing import Optional\n\n__all__ = ['__version__', 'cuda', 'hip']\n__version__ = '{version}'\n"
        f"debug = False\ncuda: Optional[str] = {cuda!r}\ngit_version = 'cf30153c4c'\nhip: Optional[str] = {hip!r}\n"
    )
    (folder / f"torch-{version}.dist-info").mkdir()
    if nccl:
        (folder / f"nvidia_nccl_cu12-{nccl}.dist-info").mkdir()


def test_torch_versions(tmp_path: Path) -> None:
    """Versions are read from what lies there, the first torch on the path, without importing it."""
    stub_torch(tmp_path / "cuda", "2.7.1+cu126", cuda="12.6", nccl="2.26.2")
    stub_torch(tmp_path / "hip", "2.7.0+rocm6.3", hip="6.3.42131")
    (tmp_path / "bare/torch-2.4.0.dist-info").mkdir(parents=True)
    (tmp_path / "bare/nvidia_nccl_cu12-2.20.5.dist-info").mkdir()
    (tmp_path / "old/torch").mkdir(parents=True)
    (tmp_path / "old/torch/__init__.py").touch()
    (tmp_path / "old/torch/version.py").write_text("__version__ = '1.13.1'\ncuda = '11.7'\nhip = None\n")
    (tmp_path / "unnamed/torch").mkdir(parents=True)
    (tmp_path / "unnamed/torch/__init__.py").touch()
    (tmp_path / "work/torch").mkdir(parents=True)  # a folder of that name in the workdir is no torch
    (tmp_path / "work/torch/README").touch()
    work = tmp_path / "work"
    found = {}
    for name in ("cuda", "hip", "old", "unnamed"):
        found[name] = facts_of(work, env={"PYTHONPATH": f"../{name}"}).torch
    assert found == {
        "cuda": TorchFact("2.7.1+cu126", "12.6", None, "2.26.2", f"{work}/../cuda/torch"),
        "hip": TorchFact("2.7.0+rocm6.3", None, "6.3.42131", None, f"{work}/../hip/torch"),
        "old": TorchFact("1.13.1", "11.7", None, None, f"{work}/../old/torch"),
        "unnamed": found["unnamed"],
    }
    assert found["unnamed"]
    assert found["unnamed"].path == f"{work}/../unnamed/torch"
    with ProbeProcess((sys.executable, "-S"), env={"PYTHONPATH": str(tmp_path / "bare")}) as node:
        bare = node.facts(request(work)).torch
    folder = str(tmp_path / "bare/torch-2.4.0.dist-info")
    assert bare == TorchFact("2.4.0", None, None, "2.20.5", folder)


def test_no_torch(tmp_path: Path) -> None:
    """A Python without torch says so, which is no error."""
    with ProbeProcess(BARE) as node:
        found = node.facts(request(tmp_path))
    assert (found.torch, found.errors) == (None, {})


# --- GPUs ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def tools(tmp_path: Path) -> Path:
    """A folder in front of PATH for fake tools."""
    folder = tmp_path / "bin"
    folder.mkdir()
    return folder


def fake_tool(folder: Path, name: str, script: str) -> None:
    """A GPU vendor's tool that does what `script` says to sh."""
    (folder / name).write_text(f"#!/bin/sh\n{script}\n")
    (folder / name).chmod(0o755)


def fake_nvidia_smi(folder: Path, gpus: list[str], processes: list[str], *, more: str = "") -> None:
    """An nvidia-smi with these rows; `more` is done before it prints them."""
    (folder / "gpus").write_text("".join(f"{row}\n" for row in gpus))
    (folder / "apps").write_text("".join(f"{row}\n" for row in processes))
    script = f'{more}\ncase "$1" in --query-gpu=*) cat {folder}/gpus;; --query-compute-apps=*) cat {folder}/apps;; esac'
    fake_tool(folder, "nvidia-smi", script)


def gpu_row(index: int, used: str = "4", ecc: str = "0", name: str = "NVIDIA H100 80GB HBM3") -> str:
    """One line of `nvidia-smi --query-gpu`."""
    return f"{index}, GPU-{index}, 00000000:{index:02X}:00.0, 550.90.07, {used}, 81559, {ecc}, {name}"


def gpu(index: int, used: int | None = 4, ecc: int | None = 0, name: str = "NVIDIA H100 80GB HBM3") -> GpuDevice:
    """The GPU of that line."""
    return GpuDevice(index, f"GPU-{index}", name, used, 81559, ecc, ())


def ask_gpus(tools: Path, **fields: object) -> GpuFact:
    """The probe's fact about GPUs with these tools."""
    path = f"{tools}:{os.environ['PATH']}"
    found = facts_of(tools.parent, env={"PATH": path}, **fields).gpu
    assert found
    return found


def test_clean_gpus(tools: Path) -> None:
    """Idle GPUs, as many as there are; what a GPU does not say is None; a comma in a name is part of it."""
    rows = [gpu_row(0), gpu_row(1, "[N/A]", "[N/A]"), gpu_row(2), gpu_row(3, name="Quadro, or so")]
    fake_nvidia_smi(tools, rows, [])
    found = ask_gpus(tools)
    assert found == GpuFact(
        "nvidia-smi",
        "ok",
        "",
        "550.90.07",
        found.device_files,
        (gpu(0), gpu(1, None, None), gpu(2), gpu(3, name="Quadro, or so")),
        (),
    )


def test_ecc_errors(tools: Path) -> None:
    """Uncorrected memory errors are counted."""
    fake_nvidia_smi(tools, [gpu_row(0, ecc="3")], [])
    assert ask_gpus(tools).devices == (gpu(0, ecc=3),)


def test_processes_on_gpus(tools: Path) -> None:
    """A process is told with its user and command line; one in another namespace with the name that the tool gives."""
    me = os.getpid()
    gone = 2**22 + 1
    rows = [f"GPU-1, {me}, 30000, /usr/bin/python3", f"GPU-0, {gone}, [N/A], [Not Found]"]
    fake_nvidia_smi(tools, [gpu_row(0, "20000"), gpu_row(1, "30000")], rows)
    processes = ask_gpus(tools).processes
    command = Path("/proc/self/cmdline").read_bytes().replace(b"\0", b" ").decode().strip()[:200]
    assert processes == (
        GpuProcess(1, me, probe_host.user_name(os.getuid()), command, 30000),
        GpuProcess(0, gone, "", "[Not Found]", None),
    )


def test_memory_without_a_process_is_looked_at_twice(tools: Path) -> None:
    """Memory that a process which just ended gives back late is no finding; memory that stays is."""
    idle = f"echo '{gpu_row(0)}' >{tools}/new-$1; mv {tools}/new-$1 {tools}/gpus"  # in one piece, beside a reader
    once = f"if [ -e {tools}/seen-$1 ]; then {idle}; fi; : >{tools}/seen-$1"
    fake_nvidia_smi(tools, [gpu_row(0, "9000")], [], more=once.replace("$1", "${1%%=*}"))
    assert ask_gpus(tools).devices == (gpu(0),)
    fake_nvidia_smi(tools, [gpu_row(0, "9000")], [])
    assert ask_gpus(tools).devices == (gpu(0, 9000),)


def test_a_tool_that_hangs(tools: Path) -> None:
    """A tool that ignores SIGTERM is told after the limit, and is not left running."""
    fake_tool(tools, "nvidia-smi", f"trap '' TERM INT HUP; echo $$ >>{tools}/pids; while :; do sleep 1; done")
    start = time.monotonic()
    found = ask_gpus(tools, smi_limit_s=0.5)
    assert 0.5 < time.monotonic() - start < 5
    assert (found.tool, found.state, found.devices) == ("nvidia-smi", "hangs", ())
    pids = (tools / "pids").read_text().split()
    assert len(pids) == 2
    wait_gone(*map(int, pids))


@pytest.mark.parametrize("by_signal", [False, True])
def test_the_tool_ends_with_the_launcher_and_with_the_supervisor(tools: Path, by_signal: bool) -> None:
    """When nobody waits for the facts any more, neither the probe nor the tool goes on; SIGTERM says so too."""
    fake_tool(tools, "nvidia-smi", f"trap '' TERM; echo $$ >>{tools}/pids; while :; do sleep 1; done")
    with ProbeProcess(env={"PATH": f"{tools}:{os.environ['PATH']}"}) as node:
        node.send_facts(request(tools.parent, smi_limit_s=60))
        wait_until(lambda: (tools / "pids").exists() and len((tools / "pids").read_text().split()) == 2, "it runs")
        if by_signal:
            node.process.terminate()
        assert node.wait() == (0, "")
    pids = (tools / "pids").read_text().split()
    wait_gone(*map(int, pids))


def test_a_tool_that_leaves_a_child(tools: Path) -> None:
    """A child of the tool that keeps its output open does not hold up the facts."""
    fake_nvidia_smi(tools, [gpu_row(0)], [], more=f"sleep 300 & echo $! >>{tools}/pids")
    start = time.monotonic()
    try:
        assert ask_gpus(tools, smi_limit_s=60).devices == (gpu(0),)
        assert time.monotonic() - start < 20
    finally:
        netns.kill(int(pid) for pid in (tools / "pids").read_text().split())


@pytest.mark.parametrize(
    ("script", "state", "message"),
    [
        ("echo 'No devices were found'; exit 6", "ok", ""),
        (
            "echo 'Failed to initialize NVML: Driver/library version mismatch'; echo 'NVML library: 550.90'; exit 18",
            "failed",
            "Failed to initialize NVML: Driver/library version mismatch",
        ),
        (
            f"echo '{gpu_row(0)}'; echo 'Unable to determine the device handle for GPU 0000:41:00.0: Unknown'; exit 1",
            "failed",
            "Unable to determine the device handle for GPU 0000:41:00.0: Unknown",
        ),
        ("exit 3", "failed", "exit status 3"),
        ("echo 0, 1, 2", "failed", None),
    ],
)
def test_a_tool_that_fails(tools: Path, script: str, state: str, message: str | None) -> None:
    """What the tool complains about is passed on; output that is no table is a failure too."""
    fake_tool(tools, "nvidia-smi", script)
    found = ask_gpus(tools)
    assert (found.tool, found.state, found.devices) == ("nvidia-smi", state, ())
    if message is None:
        assert found.message.startswith("its output makes no sense: ")
    else:
        assert found.message == message


@pytest.mark.skipif(bool(probe_gpu.find_tools()), reason="a GPU tool is installed here")
def test_no_tool(tools: Path) -> None:
    """A machine without any tool says just that."""
    assert ask_gpus(tools) == GpuFact(None, "missing", "", None, probe_gpu.device_files(), (), ())


BROKEN = 'echo "NVIDIA-SMI has failed because it couldn\'t communicate with the NVIDIA driver."; exit 9'

AMD_STATIC = [
    {
        "gpu": index,
        "asic": {"market_name": "AMD Instinct MI300X", "vendor_id": "0x1002", "asic_serial": f"0x{index}A"},
        "driver": {"name": "amdgpu", "version": "6.10.5"},
    }
    for index in range(2)
]
AMD_METRIC = [
    {
        "gpu": 0,
        "mem_usage": {
            "total_vram": {"value": 196592, "unit": "MB"},
            "used_vram": {"value": 284, "unit": "MB"},
            "free_vram": {"value": 196308, "unit": "MB"},
        },
        "ecc": {"total_correctable_count": 4, "total_uncorrectable_count": 1, "total_deferred_count": 0},
    },
    {"gpu": 1, "mem_usage": "N/A", "ecc": {"total_uncorrectable_count": "N/A"}},
]


def amd_process(pid: int, vram: object) -> dict[str, object]:
    """One entry of `amd-smi process --json`."""
    memory = {"gtt_mem": {"value": 0, "unit": "B"}, "cpu_mem": {"value": 0, "unit": "B"}, "vram_mem": vram}
    return {"process_info": {"name": "python3", "pid": pid, "memory_usage": memory, "mem_usage": vram}}


AMD_PROCESS = [
    {"gpu": 0, "process_list": [amd_process(2**22 + 1, {"value": 6352367616, "unit": "B"})]},
    # the same process, which could use this GPU and does not
    {"gpu": 1, "process_list": [amd_process(2**22 + 1, {"value": 0, "unit": "B"}), amd_process(2**22 + 2, "N/A")]},
]


@pytest.mark.parametrize("wrapped", [False, True])
def test_amd_smi(tools: Path, *, wrapped: bool) -> None:
    """amd-smi is read in both its forms, with warnings in front, where NVIDIA's tool fails."""
    fake_tool(tools, "nvidia-smi", BROKEN)
    for name, rows in (("static", AMD_STATIC), ("metric", AMD_METRIC), ("process", AMD_PROCESS)):
        data = {"gpu_data": rows} if wrapped and name != "process" else rows
        (tools / name).write_text("WARNING: User is missing the following required groups: render\n" + json.dumps(data))
    fake_tool(tools, "amd-smi", f'cat {tools}/"$1"')
    found = ask_gpus(tools)
    name = "AMD Instinct MI300X"
    assert found == GpuFact(
        "amd-smi",
        "ok",
        "",
        "6.10.5",
        found.device_files,
        (GpuDevice(0, "0x0A", name, 284, 196592, 1, ()), GpuDevice(1, "0x1A", name, None, None, None, ())),
        (GpuProcess(0, 2**22 + 1, "", "python3", 6058), GpuProcess(1, 2**22 + 2, "", "python3", None)),
    )


def test_amd_smi_without_processes(tools: Path) -> None:
    """A GPU on which nothing runs has a sentence where its processes would be."""
    fake_tool(tools, "nvidia-smi", BROKEN)
    idle = [{"gpu": 0, "process_list": [{"process_info": "No running processes detected"}]}]
    for name, rows in (("static", AMD_STATIC[:1]), ("metric", AMD_METRIC[:1]), ("process", idle)):
        (tools / name).write_text(json.dumps(rows))
    fake_tool(tools, "amd-smi", f'cat {tools}/"$1"')
    found = ask_gpus(tools)
    assert (found.state, len(found.devices), found.processes) == ("ok", 1, ())


ROCM = {
    "card0": {
        "Unique ID": "0x8d3a",
        "VRAM Total Memory (B)": "68702699520",
        "VRAM Total Used Memory (B)": "10960896",
        "Card Series": "AMD INSTINCT MI250X",
    },
    "card1": {
        "Unique ID": "0x8d3b",
        "VRAM Total Memory (B)": "68702699520",
        "VRAM Total Used Memory (B)": "6352367616",
        "Card series": "\t\tAMD INSTINCT MI250X",  # older releases
    },
    "system": {
        "Driver version": "6.3.6",
        f"PID{2**22 + 1}": "ray::train, 1, 6352367616, 0, unknown",
        f"PID{2**22 + 2}": "idle, 0, 0, 0, 0",
        f"PID{2**22 + 3}": "other, UNKNOWN, UNKNOWN, UNKNOWN, UNKNOWN",
    },
}


def test_rocm_smi(tools: Path) -> None:
    """rocm-smi is read where nothing better works; it does not say which GPU a process is on."""
    fake_tool(tools, "nvidia-smi", BROKEN)
    fake_tool(tools, "amd-smi", "echo 'ImportError: no module named amdsmi' >&2; exit 1")
    (tools / "rocm").write_text(json.dumps(ROCM))
    fake_tool(tools, "rocm-smi", f"cat {tools}/rocm")
    found = ask_gpus(tools)
    name = "AMD INSTINCT MI250X"
    assert found == GpuFact(
        "rocm-smi",
        "ok",
        "",
        "6.3.6",
        found.device_files,
        (GpuDevice(0, "0x8d3a", name, 10, 65520, None, ()), GpuDevice(1, "0x8d3b", name, 6058, 65520, None, ())),
        (
            GpuProcess(None, 2**22 + 1, "", "ray::train", 6058),
            GpuProcess(None, 2**22 + 3, "", "other", None),
        ),
    )


def test_the_first_failure_is_told(tools: Path) -> None:
    """Where every tool fails, the first one's complaint is told."""
    fake_tool(tools, "nvidia-smi", BROKEN)
    fake_tool(tools, "amd-smi", "exit 1")
    fake_tool(tools, "rocm-smi", "exit 1")
    found = ask_gpus(tools)
    complaint = "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver."
    assert (found.tool, found.state, found.message) == ("nvidia-smi", "failed", complaint)


def test_xid_errors_in_the_kernel_log() -> None:
    """The last of each Xid is kept for each GPU, whichever way its PCI address is written."""
    log = (
        "6,1001,5000000,-;NVRM: loading NVIDIA UNIX x86_64 Kernel Module\n"
        "4,1002,10000000,-;NVRM: Xid (PCI:0000:3b:00): 79, pid=<unknown>, GPU has fallen off the bus.\n"
        "4,1003,20000000,-;NVRM: Xid (PCI:0000:3b:00): 13, pid=1234, Graphics Exception\n"
        "4,1004,40000000,-;NVRM: Xid (PCI:0000:3b:00): 13, pid=1234, Graphics Exception\n"
        "4,1005,50000000,c;NVRM: Xid (PCI:0000:af:00): 48, pid=7, DBE\n"
    )
    found = probe_gpu.xids_in(log, 100.0)
    assert found == {
        "3b:00": [{"code": 13, "age_s": 60.0}, {"code": 79, "age_s": 90.0}],
        "af:00": [{"code": 48, "age_s": 50.0}],
    }
    assert probe_gpu.short_bus("00000000:3B:00.0") == "3b:00"
    assert Xid(**found["af:00"][0]) == Xid(48, 50.0)


# --- ports -----------------------------------------------------------------------------------------------------------


def test_a_free_port(tmp_path: Path) -> None:
    """The head listens on a free port, beside a supervisor that holds it, and leaves nothing on it."""
    port = free_port()
    with reserved(port), ProbeProcess() as head, ProbeProcess() as other:
        found = head.facts(request(tmp_path, node_rank=0, master_port=port))
        assert found.port == RendezvousPort(port, "free", None, "", "", "")
        assert found.free_ports == ()
        assert found.listener
        targets = [
            ReachTarget("rendezvous", "127.0.0.1", port, "abc"),
            ReachTarget("again", "::1", port, "abc"),
            ReachTarget("listener", "127.0.0.1", found.listener.port, "abc"),
        ]
        for node in (head, other):
            assert [result.state for result in node.reach(targets)] == ["ok", "ok", "ok"]
        with socket.create_connection(("127.0.0.1", port)) as stays:
            assert stays.recv(100) == b"abc\n"
            assert (head.end(), other.end()) == ((0, ""), (0, ""))
    probe_host.bind_port(port, reuse=False).close()


def test_a_taken_port(tmp_path: Path) -> None:
    """Whoever listens on the port is named, the next free ones are told, and the head can move to one of them."""
    port = free_port()
    with probe_host.listen(port), ProbeProcess() as head:
        found = head.facts(request(tmp_path, node_rank=0, master_port=port))
        assert found.port
        command = Path("/proc/self/cmdline").read_bytes().replace(b"\0", b" ").decode().strip()[:200]
        me = probe_host.user_name(os.getuid())
        assert found.port == RendezvousPort(port, "taken", os.getpid(), command, me, "Address already in use")
        assert len(found.free_ports) == probe_host.MOST_FREE_PORTS
        assert port < found.free_ports[0] <= found.free_ports[-1] <= probe_host.LAST_DEFAULT_PORT
        moved = head.rendezvous(found.free_ports[0])
        assert moved.port == RendezvousPort(found.free_ports[0], "free", None, "", "", "")
        target = ReachTarget("moved", "127.0.0.1", moved.port.port, "abc")
        assert head.reach([target])[0].state == "ok"
        assert head.rendezvous(port).port.state == "taken"
        assert head.reach([target])[0].state == "refused"


def test_ports_reserved_by_another_job_are_not_offered(tmp_path: Path) -> None:
    """A port that another supervisor holds without listening is none of the free ones."""
    port = free_port()
    with probe_host.listen(port), reserved(port + 1), ProbeProcess() as head:
        found = head.facts(request(tmp_path, node_rank=0, master_port=port))
    assert found.free_ports
    assert port + 1 not in found.free_ports


def test_the_last_port_has_no_next(tmp_path: Path) -> None:
    """Above the last default port nothing is offered."""
    with probe_host.listen(0) as taken, ProbeProcess() as head:
        port = taken.getsockname()[1]
        assert head.facts(request(tmp_path, node_rank=0, master_port=port)).free_ports == ()


@pytest.mark.ssh
def test_a_port_of_another_user(tmp_path: Path) -> None:
    """The user who holds a port is known in any case, the process only to those who may see it."""
    port = free_port()
    program = f"import socket; s = socket.create_server(('', {port})); print(flush=True); input()"
    argv = ["setpriv", "--reuid", str(NOBODY), "--regid", str(NOBODY), "--clear-groups"]
    holder = subprocess.Popen(
        [*argv, "python3", "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={"PATH": netns.SYSTEM_PATH},
        cwd="/",
    )
    with holder:
        if holder.stdout:
            holder.stdout.readline()
        asked = request(tmp_path, node_rank=0, master_port=port)
        with ProbeProcess() as head:
            seen = head.facts(asked).port
        prefix = ["setpriv", "--reuid", str(NOBODY - 1), "--regid", str(NOBODY), "--clear-groups"]
        with ProbeProcess(("python3",), prefix=prefix, env={"PATH": netns.SYSTEM_PATH}) as head:
            hidden = head.facts(asked).port
        holder.kill()
    nobody = probe_host.user_name(NOBODY)
    command = f"python3 -c {program}"[:200]
    assert seen == RendezvousPort(port, "taken", holder.pid, command, nobody, "Address already in use")
    assert hidden == RendezvousPort(port, "taken", None, "", nobody, "Address already in use")


# --- reaching others -------------------------------------------------------------------------------------------------


def test_what_answers_is_told_apart(tmp_path: Path) -> None:
    """The right nonce, another one, other words, a hang-up, silence and a closed port are told apart, all at once."""
    words = {"words": b"SSH-2.0-OpenSSH_9.2\r\n", "hangs up": b"", "silence": None, "half": b"ab"}
    servers = {name: socket.create_server(("127.0.0.1", 0)) for name in words}
    guests: list[socket.socket] = []

    def serve(name: str) -> None:
        guest, _ = servers[name].accept()
        said = words[name]
        if said is None:
            guests.append(guest)
            return
        guest.sendall(said)
        guest.close()

    threads = [threading.Thread(target=serve, args=(name,)) for name in words]
    for thread in threads:
        thread.start()
    closed = free_port()
    with ProbeProcess() as node, ProbeProcess() as other:
        own = node.facts(request(tmp_path, nonce="abc")).listener
        peer = other.facts(request(tmp_path, nonce="xyz")).listener
        assert own
        assert peer
        targets = [
            ReachTarget("own", "127.0.0.1", own.port, "abc"),
            ReachTarget("peer", "127.0.0.1", peer.port, "xyz"),
            ReachTarget("wrong", "127.0.0.1", peer.port, "abc"),
            ReachTarget("closed", "127.0.0.1", closed, "abc"),
            *(ReachTarget(name, "127.0.0.1", server.getsockname()[1], "abc") for name, server in servers.items()),
        ]
        results = node.reach(targets, limit_s=1)
        assert node.reach([]) == ()
    for thread in threads:
        thread.join()
    for one in (*servers.values(), *guests):
        one.close()
    assert [(result.name, result.state, result.detail) for result in results] == [
        ("own", "ok", ""),
        ("peer", "ok", ""),
        ("wrong", "other", "it said b'xyz\\n'"),
        ("closed", "refused", "Connection refused"),
        ("words", "other", "it said b'SSH-2.0-OpenSSH_9.2\\r\\n'"),
        ("hangs up", "other", "it hung up"),
        ("silence", "other", "it took the connection and said nothing"),
        ("half", "other", "it hung up"),
    ]
    assert [result.rtt_ms is not None and result.rtt_ms < 1000 for result in results] == [
        name != "closed" for name in ("own", "peer", "wrong", "closed", "", "", "", "")
    ]


def test_many_at_once(tmp_path: Path) -> None:
    """More connections than a mesh of 64 nodes makes: all are answered, from one probe to another."""
    with ProbeProcess() as node, ProbeProcess() as other:
        listener = other.facts(request(tmp_path)).listener
        assert listener
        targets = [ReachTarget(str(number), "127.0.0.1", listener.port, "abc") for number in range(300)]
        assert {result.state for result in node.reach(targets)} == {"ok"}


def test_a_visitor_who_stays_or_resets(tmp_path: Path) -> None:
    """Visitors who say things, stay or reset do not disturb the probe."""
    with ProbeProcess() as node:
        listener = node.facts(request(tmp_path)).listener
        assert listener
        address = ("127.0.0.1", listener.port)
        with socket.create_connection(address) as stays, socket.create_connection(address) as resets:
            resets.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            stays.settimeout(10)
            assert stays.recv(100) == b"abc\n"
            resets.close()
            assert node.reach([ReachTarget("own", *address, "abc")])[0].state == "ok"
            assert node.end() == (0, "")


# --- the network, in a namespace -------------------------------------------------------------------------------------


@pytest.fixture
def network(tmp_path: Path) -> Iterator[int]:
    """A network namespace with a loopback interface alone; its value is a process in it."""
    holder = netns.Holder(["-n"], ["sh", "-c", "echo ready; exec sleep infinity"], tmp_path / "holder.log")
    holder.expect("ready")
    netns.ip_batch(holder.pid, ["link set lo up"])
    try:
        yield holder.pid
    finally:
        netns.kill([holder.pid])
        holder.wait()
        holder.hang_up()


@pytest.mark.ssh
def test_interfaces(tmp_path: Path, network: int) -> None:
    """Interfaces are told whatever their names: with several addresses, IPv6 alone, switched off, without a carrier."""
    lines = [
        "link add eth0 type veth peer name far0",
        "link add ens5 type veth peer name far1",
        "link add six type veth peer name far2",
        "link add off0 type veth peer name far3",
        *(f"link set {name} up" for name in ("eth0", "far0", "ens5", "six", "far2", "far3")),
        "addr add 10.9.0.1/24 dev eth0",
        "addr add 10.9.0.2/24 dev eth0",
        "addr add fd09::1/64 dev eth0 nodad",
        "addr add 10.10.0.1/24 dev ens5",
        "addr add 10.12.0.1 peer 10.12.0.2 dev ens5",
        "addr add fd0a::1/64 dev six nodad",
        "addr add 10.11.0.1/24 dev off0",
    ]
    netns.ip_batch(network, lines)
    with ProbeProcess(prefix=netns.enter(network, "n")) as node:
        found = node.facts(request(tmp_path, master_addr="10.9.0.9"))
        six = node.facts(request(tmp_path, master_addr="fd0a::9"))
        nowhere = node.facts(request(tmp_path, master_addr="192.0.2.1"))
        netns.ip_batch(network, ["link set eth0 down", "link set eth0 name renamed0", "link set renamed0 up"])
        renamed = node.facts(request(tmp_path, master_addr="10.9.0.9"))
        assert node.end() == (0, "")
    assert found.interfaces
    seen = {
        one.name: (one.switched_on, one.up, one.kind, [a for a in one.addresses if not a.startswith("fe80:")])
        for one in found.interfaces
        if not one.name.startswith("far") and one.name not in HARNESS_INTERFACES
    }
    assert seen == {
        "lo": (True, True, "loopback", ["127.0.0.1", "::1"]),
        "eth0": (True, True, "veth", ["10.9.0.1", "10.9.0.2", "fd09::1"]),
        "ens5": (True, False, "veth", ["10.10.0.1", "10.12.0.1"]),
        "six": (True, True, "veth", ["fd0a::1"]),
        "off0": (False, False, "veth", ["10.11.0.1"]),
    }
    assert found.route_to_master == Route("eth0", "10.9.0.1")
    assert six.route_to_master == Route("six", "fd0a::1")
    assert (nowhere.route_to_master, nowhere.errors) == (None, {"route_to_master": "Network is unreachable"})
    assert renamed.route_to_master == Route("renamed0", "10.9.0.1")


# What a kernel puts into every new network namespace where the modules for it are built in.
HARNESS_INTERFACES = {"tunl0", "gre0", "gretap0", "erspan0", "sit0", "ip6tnl0", "ip6gre0", "ip_vti0", "ip6_vti0"}


@pytest.mark.ssh
def test_many_interfaces(tmp_path: Path, network: int) -> None:
    """More interfaces and addresses than one message of the kernel holds are all told."""
    names = [f"d{number}" for number in range(150)]
    lines = [f"link add {name} type veth peer name p{name}" for name in names]
    lines += [f"addr add 10.9.{number}.1/24 dev {name}" for number, name in enumerate(names)]
    netns.ip_batch(network, lines)
    with ProbeProcess(prefix=netns.enter(network, "n")) as node:
        found = node.facts(request(tmp_path))
    assert found.interfaces
    held = {one.name: one.addresses for one in found.interfaces if one.name in names}
    assert held == {name: (f"10.9.{number}.1",) for number, name in enumerate(names)}
    assert Interface("pd149", False, False, "veth", ()) in found.interfaces


@pytest.mark.ssh
def test_ports_of_the_kernel(tmp_path: Path, network: int) -> None:
    """The ephemeral range and what is left out of it are those of the node's own network namespace."""
    settings = {"ip_local_port_range": "20000 40000", "ip_local_reserved_ports": "29500-29599,30001"}
    for name, value in settings.items():
        argv = [*netns.enter(network, "n"), "sh", "-c", f"echo {value} >/proc/sys/net/ipv4/{name}"]
        subprocess.run(argv, check=True)
    with ProbeProcess(prefix=netns.enter(network, "n")) as node:
        found = node.facts(request(tmp_path))
    assert found.ephemeral_range == (20000, 40000)
    assert found.reserved_ports == ((29500, 29599), (30001, 30001))


@pytest.mark.ssh
def test_what_does_not_answer_is_told_apart(tmp_path: Path, network: int) -> None:
    """Silence is a timeout; no route and a route that refuses are `unreachable`; nobody waits longer than the limit."""
    lines = [
        "link add eth0 type veth peer name far0",
        "link set eth0 up",
        "link set far0 up",
        "addr add 10.9.0.1/24 dev eth0",
        "neigh add 10.9.0.9 lladdr 02:00:00:00:00:09 dev eth0",  # packets leave and nobody answers
        "route add unreachable 10.8.0.0/24",
        "route add prohibit 10.7.0.0/24",
    ]
    netns.ip_batch(network, lines)
    addresses = {"silence": "10.9.0.9", "unreachable": "10.8.0.1", "prohibit": "10.7.0.1", "nowhere": "192.0.2.1"}
    start = time.monotonic()
    with ProbeProcess(prefix=netns.enter(network, "n")) as node:
        node.facts(request(tmp_path))
        results = node.reach([ReachTarget(name, address, 9, "abc") for name, address in addresses.items()], limit_s=0.5)
    assert time.monotonic() - start < 5
    assert results == (
        ReachResult("silence", "timeout", None, "no answer"),
        ReachResult("unreachable", "unreachable", None, "No route to host"),
        ReachResult("prohibit", "unreachable", None, "Permission denied"),
        ReachResult("nowhere", "unreachable", None, "Network is unreachable"),
    )
