"""GPUs: what is refused, what --allow-dirty changes, and in which words."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from gpulayer.facts import GpuFact, GpuProcess, Xid
from gpulayer.findings import CheckOptions
from tests.support import plans
from tests.support.findings import NO_GPU, everywhere, gpus, plan_of, said

if TYPE_CHECKING:
    from gpulayer.facts import GpuState
    from gpulayer.plan import Plan

GLOO, NCCL = CheckOptions(backend="gloo"), CheckOptions(backend="nccl")
DIRTY = CheckOptions(allow_dirty=True)


def listing(*indices: int) -> Plan:
    """Return a plan for one node that lists these GPUs."""
    return plans.plan(plans.script(), [plans.node(1, gpus=list(indices))])


def without_devices(state: GpuState, device_files: int = 0, message: str = "") -> GpuFact:
    """Return what is known of GPUs where the tool tells of none."""
    return GpuFact(None if state == "missing" else "nvidia-smi", state, message, None, device_files, (), ())


# --- the tool -------------------------------------------------------------------------------------------------------


def test_no_tool() -> None:
    """GPUs that cannot be looked at are refused for nccl and a warning else; no GPU at all is fine but for nccl."""
    plan = plan_of(4, 4)
    nodes = everywhere(plan, gpu=without_devices("missing", device_files=4))
    text = (
        "gpu-[01-02]: none of `nvidia-smi`, `amd-smi`, `rocm-smi` is there to check the GPUs with: the kernel shows 4\n"
        "hint: install the driver's tools, or have PATH name their folder: `env` in the hosts map "
        "(troubleshooting: gpu-tool-missing)\n"
    )
    assert said(plan, nodes, NCCL) == text
    assert said(plan, nodes) == said(plan, nodes, GLOO) == f"warning: {text}"
    assert said(plan, everywhere(plan, gpu=NO_GPU)) == said(plan, everywhere(plan, gpu=NO_GPU), GLOO) == ""


@pytest.mark.parametrize("options", [CheckOptions(), GLOO, NCCL], ids=["unsaid", "gloo", "nccl"])
def test_a_tool_that_hangs(options: CheckOptions) -> None:
    """A tool that does not answer means a driver that is stuck, whatever the job talks over."""
    assert said(plan_of(1, 1), {1: {"gpu": without_devices("hangs")}, 0: {"gpu": gpus(0)}}, options) == (
        "gpu-02: `nvidia-smi` gave no answer within 10 s\n"
        "hint: the GPU driver hangs: see `dmesg`, and restart the machine; `--allow-dirty` runs all the same "
        "(troubleshooting: gpu-tool-hangs)\n"
    )


def test_a_tool_that_fails() -> None:
    """What the tool says is passed on: refused where there are GPUs or must be, a warning or nothing elsewhere."""
    text = (
        "gpu-01: `nvidia-smi` fails: Failed to initialize NVML: Driver/library version mismatch\n"
        "hint: run `nvidia-smi` on the node; mostly the driver is not loaded, or is another version than its tools "
        "(troubleshooting: gpu-tool-failed)\n"
    )
    message = "Failed to initialize NVML: Driver/library version mismatch"
    plan, bare = plan_of(1), {0: {"gpu": without_devices("failed", message=message)}}
    with_gpus = {0: {"gpu": without_devices("failed", 4, message)}}
    assert said(plan, with_gpus) == said(plan, with_gpus, GLOO) == said(plan, bare, NCCL) == text
    assert said(plan, with_gpus, DIRTY) == said(plan, bare) == f"warning: {text}"
    assert said(plan, bare, CheckOptions(backend="nccl", allow_dirty=True)) == text
    assert said(plan, bare, GLOO) == ""


# --- which there are ------------------------------------------------------------------------------------------------


def test_fewer_gpus_than_processes() -> None:
    """Each rank has a GPU, unless the job says gloo or its node has none at all."""
    plan = plan_of(8, 8)
    nodes = {0: {"gpu": gpus(*[0] * 8)}, 1: {"gpu": gpus(*[0] * 4)}}
    hint = (
        "hint: ask for fewer with `--nproc-per-node`, or see in `dmesg` why some are missing; `--backend gloo` is for "
        "ranks that share GPUs or need none (troubleshooting: gpus-too-few)\n"
    )
    expected = f"gpu-02: fewer GPUs than the 8 processes: `nvidia-smi` shows 4\n{hint}"
    assert said(plan, nodes) == said(plan, nodes, NCCL) == said(plan, nodes, DIRTY) == expected
    assert said(plan, nodes, GLOO) == said(plan, everywhere(plan, gpu=gpus())) == ""
    limited = plan_of(2, env={"CUDA_VISIBLE_DEVICES": {"value": "1"}})
    assert said(limited, {0: {"gpu": gpus(0, 0)}}) == (
        f"gpu-01: fewer GPUs than the 2 processes: CUDA_VISIBLE_DEVICES leaves 1\n{hint}"
    )


def test_a_listed_gpu_that_is_not_there() -> None:
    """What `gpus` lists, by index, or CUDA_VISIBLE_DEVICES by UUID, must be there; for gloo too."""
    hint = (
        "hint: correct `gpus` in the hosts map, or CUDA_VISIBLE_DEVICES if you set that "
        "(troubleshooting: gpu-not-there)\n"
    )
    assert said(listing(1, 4, 5), {0: {"gpu": gpus(0, 0)}}, GLOO) == (
        f"gpu-01: the job is to use GPU 4, 5, which `nvidia-smi` does not show: it shows 0, 1\n{hint}"
    )
    assert said(listing(0), {0: {"gpu": gpus(tool="rocm-smi")}}) == (
        f"gpu-01: the job is to use GPU 0, which `rocm-smi` does not show: it shows none\n{hint}"
    )
    for value in ("GPU-1", "MIG-5f", "GPU-0a, GPU-1a"):
        assert said(plan_of(1, env={"CUDA_VISIBLE_DEVICES": {"value": value}}), {0: {"gpu": gpus(0, 0)}}) == ""
    other = plan_of(1, env={"CUDA_VISIBLE_DEVICES": {"value": "GPU-9"}})
    assert said(other, {0: {"gpu": gpus(0)}}).startswith("gpu-01: the job is to use GPU GPU-9, which `nvidia-smi` does")


# --- what is on them ------------------------------------------------------------------------------------------------

ANN = GpuProcess(0, 4711, "ann", "python train.py", 40321)
ASK = (
    "hint: gpulayer ends nothing that is not its own: wait, or have them ended; `--allow-dirty` runs beside them "
    "(troubleshooting: gpu-process)\n"
)


def test_processes_of_others() -> None:
    """Each process is named once, with pid, user, command and its memory on each GPU."""
    plan = plan_of(2, 2, 2)
    several = [ANN, GpuProcess(1, 4711, "ann", "python train.py", 812), GpuProcess(1, 88, "", "[Not Found]", None)]
    nodes = {
        0: {"gpu": gpus(40321, 812, processes=several)},
        1: {"gpu": gpus(40321, 0, processes=[ANN])},
        2: {"gpu": gpus(0, 0)},
    }
    one = "pid 4711, user ann, `python train.py`: 40321 MiB on GPU 0"
    text = (
        "gpu-[01-02]: processes are on the GPUs of the job:\n"
        f"  gpu-01: {one}, 812 MiB on GPU 1\n"
        "  gpu-01: pid 88, user not visible, `[Not Found]`: memory on GPU 1\n"
        f"  gpu-02: {one}\n"
        f"{ASK}"
    )
    assert said(plan, nodes) == said(plan, nodes, GLOO) == said(plan, nodes, NCCL) == text
    assert said(plan, nodes, DIRTY) == f"warning: {text}"
    assert said(plan_of(2), {0: nodes[1]}) == f"gpu-01: processes are on the GPUs of the job: {one}\n{ASK}"


def test_gpus_that_the_job_does_not_use() -> None:
    """What runs on a GPU beyond those listed, or beyond the first ones for the ranks, does not matter."""
    busy = gpus(40321, 9000, 0, processes=[ANN], ecc_errors={1: 3})
    assert said(listing(2), {0: {"gpu": busy}}) == ""
    assert said(plan_of(1), {0: {"gpu": gpus(0, 9000, processes=[GpuProcess(1, 7, "bob", "x", 9000)])}}) == ""
    assert said(listing(0), {0: {"gpu": busy}}).startswith("gpu-01: processes are on the GPUs of the job: pid 4711")


def test_a_process_on_an_unknown_gpu() -> None:
    """A tool that does not say where a process is leaves any GPU possible."""
    process = GpuProcess(None, 9, "bob", "python x.py", 512)
    assert said(listing(1), {0: {"gpu": gpus(0, 9000, tool="rocm-smi", processes=[process])}}) == (
        f"gpu-01: processes are on the GPUs of the job: pid 9, user bob, `python x.py`: 512 MiB on a GPU\n{ASK}"
    )


def test_memory_of_nobody() -> None:
    """More than 500 MiB in use where no process is to be seen is another container, or one that is ending."""
    plan = plan_of(3, 3)
    text = (
        "gpu-[01-02]: over 500 MiB of a GPU's memory are in use by no process that is visible:\n"
        "  gpu-01: GPU 1, 501 MiB\n"
        "  gpu-01: GPU 2, 70000 MiB\n"
        "  gpu-02: GPU 0, 9000 MiB\n"
        "hint: another container has the GPU, or a process is ending; `--allow-dirty` runs beside it "
        "(troubleshooting: gpu-memory)\n"
    )
    nodes = {0: {"gpu": gpus(500, 501, 70000)}, 1: {"gpu": gpus(9000, 4, None)}}
    assert said(plan, nodes) == text
    assert said(plan, nodes, DIRTY) == f"warning: {text}"


def test_memory_errors() -> None:
    """Uncorrected errors refuse the node until the GPU is reset, which clears their count."""
    plan = plan_of(2)
    text = (
        "gpu-01: uncorrected memory (ECC) errors since the driver was loaded: GPU 1, 3\n"
        "hint: reset the GPU or restart the machine; `--allow-dirty` runs all the same (troubleshooting: gpu-ecc)\n"
    )
    assert said(plan, {0: {"gpu": gpus(0, 0, ecc_errors={0: 0, 1: 3})}}) == text
    assert said(plan, {0: {"gpu": gpus(0, 0, ecc_errors={0: 0, 1: 3})}}, DIRTY) == f"warning: {text}"


def test_errors_in_the_kernel_log() -> None:
    """Xid errors of the last day are a warning; those of programs, and old ones, are not."""
    xids = {0: [Xid(13, 5), Xid(31, 5), Xid(79, 3 * 3600)], 1: [Xid(48, 90), Xid(79, 25 * 3600)]}
    assert said(plan_of(2), {0: {"gpu": gpus(0, 0, xids=xids)}}) == (
        "warning: gpu-01: the kernel's log has GPU errors (Xid) of the last day:\n"
        "  GPU 0, Xid 79, 3 h ago\n"
        "  GPU 1, Xid 48, 2 min ago\n"
        "hint: see `dmesg` and NVIDIA's list of Xid errors; if the GPU was not reset since, reset it "
        "(troubleshooting: gpu-xid)\n"
    )


def test_allow_dirty_makes_a_hang_a_warning() -> None:
    """The user may know that the tool alone is at fault."""
    assert said(plan_of(1), {0: {"gpu": without_devices("hangs")}}, DIRTY).startswith(
        "warning: gpu-01: `nvidia-smi` gave no answer within 10 s\n"
    )
