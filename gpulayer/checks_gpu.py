"""Whether the GPUs that a job will use are there, sound, and used by nobody else. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpulayer import probe_gpu
from gpulayer.findings import Check, Finding, as_warning, failure, visible_devices, warning
from gpulayer.masks import NONE_KNOWN

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from gpulayer.facts import GpuDevice, GpuFact, GpuProcess
    from gpulayer.findings import CheckOptions, Observations
    from gpulayer.plan import NodeCommand, Plan

# What a program does to itself, and what only follows from it (NVIDIA's catalogue of Xid errors).
_XIDS_OF_PROGRAMS = frozenset({13, 31, 43, 45, 68, 69})
_XID_MAX_AGE_S = 24 * 3600
# The user may know better, and says so with --allow-dirty.
_DIRT = frozenset({Check.GPU_TOOL_HANGS, Check.GPU_PROCESS, Check.GPU_MEMORY, Check.GPU_ECC})

_ASK_WHO = "gpulayer ends nothing that is not its own: wait, or have them ended; `--allow-dirty` runs beside them"
_RESET = "reset the GPU or restart the machine; `--allow-dirty` runs all the same"


def check_gpus(plan: Plan, seen: Observations, options: CheckOptions) -> Iterator[Finding]:
    """Yield what is wrong with the GPUs of each node. With `allow_dirty`, dirt is a warning."""
    for node, facts in seen.of(plan):
        if facts.gpu is None:
            continue
        for finding in _of_node(node, facts.gpu, options):
            yield as_warning(finding) if options.allow_dirty and finding.check in _DIRT else finding


def _of_node(node: NodeCommand, gpu: GpuFact, options: CheckOptions) -> Iterator[Finding]:
    match gpu.state:
        case "missing":
            if gpu.device_files:
                yield _tool_missing(node, gpu, options)
        case "hangs":
            yield failure(
                Check.GPU_TOOL_HANGS,
                [node.node_id],
                f"`{gpu.tool}` gave no answer within {options.smi_limit_s:g} s",
                "the GPU driver hangs: see `dmesg`, and restart the machine; `--allow-dirty` runs all the same",
            )
        case "failed":
            yield from _tool_failed(node, gpu, options)
        case "ok":
            yield from _numbers(node, gpu, options)
            for device in used_gpus(node, gpu):
                yield from _memory_alone(node, gpu, device)
                yield from _trouble(node, device)
            yield from _processes(node, gpu)


def _tool_missing(node: NodeCommand, gpu: GpuFact, options: CheckOptions) -> Finding:
    finding = failure(
        Check.GPU_TOOL_MISSING,
        [node.node_id],
        f"none of {', '.join(f'`{name}`' for name in probe_gpu.TOOLS)} is there to check the GPUs with",
        "install the driver's tools, or have PATH name their folder: `env` in the hosts map",
        f"the kernel shows {gpu.device_files}",
    )
    return finding if options.backend == "nccl" else as_warning(finding)


def _tool_failed(node: NodeCommand, gpu: GpuFact, options: CheckOptions) -> Iterator[Finding]:
    """Yield what the tool complained about: it matters less where the kernel shows no GPU, and not at all to gloo."""
    finding = failure(
        Check.GPU_TOOL_FAILED,
        [node.node_id],
        f"`{gpu.tool}` fails: {gpu.message}",
        f"run `{gpu.tool}` on the node; mostly the driver is not loaded, or is another version than its tools",
    )
    if options.backend == "nccl" or gpu.device_files:
        yield as_warning(finding) if options.allow_dirty and gpu.device_files else finding
    elif options.backend is None:
        yield as_warning(finding)


# --- which there are ------------------------------------------------------------------------------------------------


def _named_by(name: str, device: GpuDevice) -> bool:
    """Tell whether CUDA_VISIBLE_DEVICES means this device: by its index or the beginning of its UUID."""
    return name == str(device.index) if name.isdigit() else device.uuid.startswith(name)


def used_gpus(node: NodeCommand, gpu: GpuFact) -> tuple[GpuDevice, ...]:
    """Return the GPUs that the job will use: those listed, else one for each local rank, from the first on."""
    names = visible_devices(node)
    if names is None:
        return gpu.devices[: node.nproc_per_node]
    return tuple(device for device in gpu.devices if any(_named_by(name, device) for name in names))


def _numbers(node: NodeCommand, gpu: GpuFact, options: CheckOptions) -> Iterator[Finding]:
    """Yield GPUs that are listed and not there, and ranks without one. gloo needs none, and may share them."""
    names, wanted = visible_devices(node), len(node.ranks)
    absent = [name for name in names or () if not _is_there(name, gpu)]
    if absent:
        shown = ", ".join(str(device.index) for device in gpu.devices)
        yield failure(
            Check.GPU_NOT_THERE,
            [node.node_id],
            f"the job is to use GPU {', '.join(absent)}, which `{gpu.tool}` does not show",
            "correct `gpus` in the hosts map, or CUDA_VISIBLE_DEVICES if you set that",
            f"it shows {shown or 'none'}",
        )
        return
    count = len(gpu.devices) if names is None else len(names)
    # A node that shows no GPU at all is fine for a job that uses none; the checks for nccl refuse it.
    if options.backend != "gloo" and count < wanted and (count or names is not None):
        listed = f"`{gpu.tool}` shows {count}" if names is None else f"CUDA_VISIBLE_DEVICES leaves {count}"
        yield failure(
            Check.GPUS_TOO_FEW,
            [node.node_id],
            f"fewer GPUs than the {wanted} processes: {listed}",
            "ask for fewer with `--nproc-per-node`, or see in `dmesg` why some are missing; `--backend gloo` is for "
            "ranks that share GPUs or need none",
        )


def _is_there(name: str, gpu: GpuFact) -> bool:
    return name.startswith("MIG-") or any(_named_by(name, device) for device in gpu.devices)


# --- what is on them ------------------------------------------------------------------------------------------------


def _processes(node: NodeCommand, gpu: GpuFact) -> Iterator[Finding]:
    """Yield the processes on the GPUs to be used; a process whose GPU the tool does not say may be on any of them."""
    used = {device.index for device in used_gpus(node, gpu)}
    by_pid: dict[int, list[GpuProcess]] = {}
    for process in gpu.processes:
        if used and (process.device is None or process.device in used):
            by_pid.setdefault(process.pid, []).append(process)
    if by_pid:
        yield failure(
            Check.GPU_PROCESS,
            [node.node_id],
            "processes are on the GPUs of the job",
            _ASK_WHO,
            *(_process_text(processes) for processes in by_pid.values()),
        )


def _process_text(processes: Sequence[GpuProcess]) -> str:
    first = processes[0]
    user = f"user {first.user}" if first.user else "user not visible"
    places = [
        ("memory" if one.memory_mib is None else f"{one.memory_mib} MiB")
        + (" on a GPU" if one.device is None else f" on GPU {one.device}")
        for one in processes
    ]
    return f"pid {first.pid}, {user}, `{NONE_KNOWN.command(first.command)}`: {', '.join(places)}"


def _memory_alone(node: NodeCommand, gpu: GpuFact, device: GpuDevice) -> Iterator[Finding]:
    """Yield memory that is in use on a GPU where no process is to be seen."""
    with_process = any(process.device in (device.index, None) for process in gpu.processes)
    if (device.memory_used_mib or 0) > probe_gpu.IDLE_MEMORY_MIB and not with_process:
        yield failure(
            Check.GPU_MEMORY,
            [node.node_id],
            f"over {probe_gpu.IDLE_MEMORY_MIB} MiB of a GPU's memory are in use by no process that is visible",
            "another container has the GPU, or a process is ending; `--allow-dirty` runs beside it",
            f"GPU {device.index}, {device.memory_used_mib} MiB",
        )


def _trouble(node: NodeCommand, device: GpuDevice) -> Iterator[Finding]:
    if device.ecc_errors:
        yield failure(
            Check.GPU_ECC,
            [node.node_id],
            "uncorrected memory (ECC) errors since the driver was loaded",
            _RESET,
            f"GPU {device.index}, {device.ecc_errors}",
        )
    # A warning: the kernel's log remembers what a reset has mended.
    for xid in device.xids:
        if xid.age_s <= _XID_MAX_AGE_S and xid.code not in _XIDS_OF_PROGRAMS:
            yield warning(
                Check.GPU_XID,
                [node.node_id],
                "the kernel's log has GPU errors (Xid) of the last day",
                "see `dmesg` and NVIDIA's list of Xid errors; if the GPU was not reset since, reset it",
                f"GPU {device.index}, Xid {xid.code}, {_ago(xid.age_s)} ago",
            )


def _ago(age_s: float) -> str:
    return f"{age_s / 3600:.0f} h" if age_s >= 3600 else f"{age_s / 60:.0f} min"
