"""Versions and code: what is refused, and in which words."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gpulayer.facts import PythonFact, ScratchFact, ScriptFact, TorchFact, WorkdirFact
from gpulayer.findings import CheckOptions
from tests.support.findings import CPU_TORCH, NO_GPU, TORCH, everywhere, gpus, plan_of, said, script

NCCL = CheckOptions(backend="nccl")


def python(version: str) -> PythonFact:
    """Return a Python of this version."""
    return PythonFact(version, "/opt/torch/bin/python3", "/opt/torch")


# --- versions -------------------------------------------------------------------------------------------------------


def test_no_torch() -> None:
    """A Python without torch is refused by its path."""
    plan = plan_of(1, 1, 1)
    system = {"torch": None, "python": PythonFact("3.11.2", "/usr/bin/python3", "/usr")}
    assert said(plan, {1: system, 2: system}) == (
        "gpu-[02-03]: `/usr/bin/python3` has no torch\n"
        "hint: set `python` in the hosts map to the interpreter that has it, or install it: `/usr/bin/python3 -m pip "
        "install torch` (troubleshooting: torch-missing)\n"
    )
    assert said(plan, {1: {"torch": None, "python": None}}).startswith("gpu-02: `python3` has no torch\n")


def test_different_torch_and_nccl() -> None:
    """Different torch or NCCL is refused, with a table of all versions against all nodes."""
    plan = plan_of(1, 1, 1, 1)
    old = {"torch": TorchFact("2.6.0+cu124", "12.4", None, "2.21.5", "/t"), "python": python("3.10.14")}
    unknown = {"torch": TorchFact("2.7.1+cu126", "12.6", None, None, "/t"), "gpu": gpus(0)}
    hint = (
        "hint: give all nodes the same environment: `python` in the hosts map names each node's interpreter "
        "(troubleshooting: torch-differs)\n"
    )
    assert said(plan, {1: old, 3: unknown}) == (
        "gpu-[01-04]: different versions of Python, torch, CUDA and NCCL:\n"
        "  nodes        Python   torch        CUDA  NCCL    driver\n"
        "  gpu-[01,03]  3.11.7   2.7.1+cu126  12.6  2.26.2  -\n"
        "  gpu-02       3.10.14  2.6.0+cu124  12.4  2.21.5  -\n"
        "  gpu-04       3.11.7   2.7.1+cu126  12.6  -       550.90.07\n"
        f"{hint}"
    )
    assert said(plan_of(1, 1), {1: {"torch": replace(TORCH, nccl="2.27.3")}}) == (
        "gpu-[01-02]: different versions of NCCL:\n"
        "  nodes   Python  torch        CUDA  NCCL\n"
        "  gpu-01  3.11.7  2.7.1+cu126  12.6  2.26.2\n"
        "  gpu-02  3.11.7  2.7.1+cu126  12.6  2.27.3\n"
        f"{hint}"
    )


def test_versions_that_may_differ() -> None:
    """A different Python, CUDA or driver is a warning with the same table."""
    plan = plan_of(1, 1, 1)
    cuda = TorchFact("2.7.1", "12.6", None, None, "/t")
    rocm = TorchFact("2.7.1", None, "6.2", None, "/t")
    none = TorchFact("2.7.1", None, None, None, "/t")
    hint = (
        "hint: this can work; if ranks hang or fail oddly, make the versions equal first "
        "(troubleshooting: versions-differ)\n"
    )
    assert said(plan, {0: {"torch": cuda}, 1: {"torch": rocm}, 2: {"torch": none}}) == (
        "warning: gpu-[01-03]: different versions of CUDA:\n"
        "  nodes   Python  torch  CUDA\n"
        "  gpu-01  3.11.7  2.7.1  12.6\n"
        "  gpu-02  3.11.7  2.7.1  ROCm 6.2\n"
        "  gpu-03  3.11.7  2.7.1  none\n"
        f"{hint}"
    )
    older = {"gpu": gpus(0, driver="535.54.03"), "python": python("3.12.1")}
    assert said(plan, {**everywhere(plan, gpu=gpus(0)), 2: older}) == (
        "warning: gpu-[01-03]: different versions of Python and driver:\n"
        "  nodes        Python  torch        CUDA  NCCL    driver\n"
        "  gpu-[01-02]  3.11.7  2.7.1+cu126  12.6  2.26.2  550.90.07\n"
        "  gpu-03       3.12.1  2.7.1+cu126  12.6  2.26.2  535.54.03\n"
        f"{hint}"
    )


def test_versions_that_are_equal_enough() -> None:
    """A patch of Python, what is not known, and a node without torch make no difference."""
    plan = plan_of(1, 1, 1)
    record = TorchFact("2.7.1+cu126", None, None, None, "/site-packages/torch-2.7.1.dist-info")
    assert said(plan, {0: {"python": python("3.11.9")}, 1: {"torch": record}, 2: {"python": None}}) == ""
    assert "different" not in said(plan, {1: {"torch": None}})


def test_nccl_without_cuda() -> None:
    """`--backend nccl` needs a torch that is built for it; ROCm is one, and so is one that says it in its version."""
    plan = plan_of(1, 1)
    nodes = everywhere(plan, torch=CPU_TORCH, gpu=gpus(0))
    assert said(plan, nodes, NCCL) == (
        "gpu-[01-02]: `--backend nccl`, but torch 2.7.1+cpu is built without CUDA: /opt/torch/lib/torch\n"
        "hint: install a torch with CUDA, or use `--backend gloo` (troubleshooting: nccl-without-cuda)\n"
    )
    assert said(plan, nodes, CheckOptions(backend="gloo")) == said(plan, nodes) == ""
    for torch in (TorchFact("2.7.1", None, "6.2", None, "/t"), TorchFact("2.7.1+cu126", None, None, None, "/t")):
        assert said(plan, everywhere(plan, torch=torch, gpu=gpus(0)), NCCL) == ""


def test_nccl_without_gpus() -> None:
    """`--backend nccl` needs a GPU on each node; gloo, and a job that says nothing, do not."""
    plan = plan_of(2, 2)
    nodes = {0: {"gpu": gpus(0, 0)}, 1: {"gpu": NO_GPU}}
    assert said(plan, nodes, NCCL) == (
        "gpu-02: `--backend nccl`, but the node shows no GPU\n"
        "hint: leave the node out with `--exclude`, or use `--backend gloo`; a container must be given its GPUs "
        "(troubleshooting: nccl-without-gpu)\n"
    )
    assert said(plan, {**nodes, 1: {"gpu": gpus()}}, NCCL).startswith("gpu-02: `--backend nccl`, but the node shows no")
    assert said(plan, nodes, CheckOptions(backend="gloo")) == said(plan, nodes) == ""


# --- code -----------------------------------------------------------------------------------------------------------


def test_a_workdir_that_cannot_be_entered() -> None:
    """A workdir that is missing, closed or no folder is refused, and its script is not looked for as well."""
    plan = plan_of(1, 1, 1)
    missing = {
        "workdir": WorkdirFact("/home/me/project", "missing", "No such file or directory"),
        "script": ScriptFact("/home/me/project/train.py", "missing", None, None, "No such file or directory"),
    }
    closed = {"workdir": WorkdirFact("/home/me/project", "denied", "Permission denied")}
    hint = (
        "hint: take the code along with `--bundle`, make the folder there, or name another with `--workdir` "
        "(troubleshooting: workdir)\n"
    )
    assert said(plan, {0: missing, 1: closed, 2: missing}) == (
        f"gpu-[01,03]: workdir /home/me/project cannot be entered: No such file or directory\n{hint}"
        "\n"
        f"gpu-02: workdir /home/me/project cannot be entered: Permission denied\n{hint}"
    )


@pytest.mark.parametrize(
    ("state", "detail"), [("missing", "No such file or directory"), ("unreadable", "Permission denied")]
)
def test_a_script_that_cannot_be_read(state: str, detail: str) -> None:
    """A script that is not there, or is closed, is refused with the path that was tried."""
    fact = ScriptFact("/home/me/project/train.py", state, None, None, detail)  # type: ignore[arg-type]
    assert said(plan_of(1, 1, 1), {1: {"script": fact}, 2: {"script": fact}}) == (
        f"gpu-[02-03]: the script /home/me/project/train.py cannot be read: {detail}\n"
        "hint: its path starts from the workdir, which must hold it on every node; `--bundle` takes the code along "
        "(troubleshooting: script-missing)\n"
    )


def test_a_module_that_is_not_there() -> None:
    """A module is looked for where Python would; one that cannot be found without importing gives no finding."""
    fact = ScriptFact("pkg.train", "not_found_module", None, None, "no module named pkg.train")
    assert said(plan_of(1, 1), {1: {"script": fact}}) == (
        "gpu-02: there is no module `pkg.train`\n"
        "hint: it must be in /home/me/project, on PYTHONPATH or installed for `/opt/torch/bin/python3`; `--workdir` "
        "names the folder (troubleshooting: script-missing)\n"
    )
    assert said(plan_of(1, 1), {1: {"script": ScriptFact("pkg", "unknown", None, None, "")}}) == ""


def test_a_command_that_is_not_there() -> None:
    """A command is looked for on each node; of what only scripts need, nothing is said."""
    plan = plan_of(2, 2, launcher="command", entrypoint="serve")
    fact = ScriptFact("serve", "not_found_command", None, None, "")
    assert said(plan, {0: {"torch": None}, 1: {"script": fact, "torch": None}}) == (
        "gpu-02: there is no command `serve`\n"
        "hint: name its full path; PATH is what the SSH server gives a command, and `-e PATH` passes yours on instead "
        "(troubleshooting: script-missing)\n"
    )
    assert said(plan, {1: {"gpu": gpus(1), "script": None}}) == ""  # fewer than the map's count: there are no ranks
    assert "gpu-02" in said(plan_of(2, 2), {1: {"gpu": gpus(1)}})


def test_scripts_that_differ() -> None:
    """Scripts that are not equal byte for byte are refused, with the size and the hash of each."""
    plan = plan_of(1, 1, 1, 1)
    nodes = {2: {"script": script("cd", size_bytes=11)}, 3: {"script": script("cd", path="/scratch/train.py")}}
    assert said(plan, nodes) == (
        "gpu-[01-04]: the script is not the same on all nodes:\n"
        "  gpu-[01-02]: /home/me/project/train.py, 10 bytes, sha256 abababababab\n"
        "  gpu-03: /home/me/project/train.py, 11 bytes, sha256 cdcdcdcdcdcd\n"
        "  gpu-04: /scratch/train.py, 10 bytes, sha256 cdcdcdcdcdcd\n"
        "hint: copy the right one to all nodes, or use a shared folder (troubleshooting: script-differs)\n"
    )
    assert said(plan, {3: {"script": script(path="/scratch/train.py")}}) == ""


def test_an_output_folder_that_cannot_be_made() -> None:
    """Without room of its own on the node a job cannot run."""
    full = ScratchFact("/tmp", None, False, "Read-only file system")
    assert said(plan_of(1, 1), {1: {"scratch": full}}) == (
        "gpu-02: no folder for the job's output can be made in /tmp: Read-only file system\n"
        "hint: free or open it for your user, or name another with `scratch` in the hosts map "
        "(troubleshooting: scratch)\n"
    )
