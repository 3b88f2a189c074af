"""Whether the nodes have the same Python, torch, NCCL and driver, and the same code to run. Pure."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from gpulayer.findings import Check, Finding, failure, warning
from gpulayer.ranges import fold

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from gpulayer.facts import GpuFact, NodeFacts, TorchFact
    from gpulayer.findings import CheckOptions, Observations
    from gpulayer.plan import NodeCommand, Plan

_COLUMNS = ("Python", "torch", "CUDA", "NCCL", "driver")
# With these, ranks misunderstand each other or hang; the others are merely odd.
_MUST_AGREE = ("torch", "NCCL")
_UNKNOWN = "-"
_NO_CUDA = "none"
_HASH_DIGITS = 12


# --- versions -------------------------------------------------------------------------------------------------------


def check_versions(plan: Plan, seen: Observations, options: CheckOptions) -> Iterator[Finding]:
    """Yield where torch is missing, where versions differ, and where `--backend nccl` cannot work."""
    for node, facts in seen.of(plan):
        if node.ranks and facts.torch is None and "torch" not in facts.errors:
            yield _torch_missing(node, facts)
        if options.backend == "nccl":
            yield from _nccl_obstacles(node, facts)
    if plan.has_ranks:  # a command may run anything
        yield from _differences(plan, seen)


def _torch_missing(node: NodeCommand, facts: NodeFacts) -> Finding:
    python = (facts.python and facts.python.executable) or node.python
    return failure(
        Check.TORCH_MISSING,
        [node.node_id],
        f"`{python}` has no torch",
        f"set `python` in the hosts map to the interpreter that has it, or install it: `{python} -m pip install torch`",
    )


def _nccl_obstacles(node: NodeCommand, facts: NodeFacts) -> Iterator[Finding]:
    if facts.torch and not _has_cuda(facts.torch):
        yield failure(
            Check.NCCL_WITHOUT_CUDA,
            [node.node_id],
            f"`--backend nccl`, but torch {facts.torch.version} is built without CUDA",
            "install a torch with CUDA, or use `--backend gloo`",
            facts.torch.path,
        )
    if facts.gpu and _shows_none(facts.gpu):
        yield failure(
            Check.NCCL_WITHOUT_GPU,
            [node.node_id],
            "`--backend nccl`, but the node shows no GPU",
            "leave the node out with `--exclude`, or use `--backend gloo`; a container must be given its GPUs",
        )


def _has_cuda(torch: TorchFact) -> bool:
    """Tell whether a torch has CUDA or ROCm, by its version where nothing else says so."""
    return bool(torch.cuda or torch.hip or re.search(r"\+(?:cu[0-9]|rocm)", torch.version))


def _shows_none(gpu: GpuFact) -> bool:
    """Tell whether neither the vendor's tool nor the kernel shows a GPU."""
    return gpu.state in ("ok", "missing") and not gpu.devices and not (gpu.state == "missing" and gpu.device_files)


def _differences(plan: Plan, seen: Observations) -> Iterator[Finding]:
    """Yield one finding for all versions that differ, with the versions of all nodes as a table."""
    versions = {node.node_id: _versions(facts) for node, facts in seen.of(plan)}
    differing = [name for name in _COLUMNS if len({_compared(name, row) for row in versions.values()} - {None}) > 1]
    if not differing:
        return
    names = " and ".join(filter(None, [", ".join(differing[:-1]), differing[-1]]))
    text, table = f"different versions of {names}", _table(versions)
    if set(differing) & set(_MUST_AGREE):
        yield failure(
            Check.TORCH_DIFFERS,
            list(versions),
            text,
            "give all nodes the same environment: `python` in the hosts map names each node's interpreter",
            *table,
        )
    else:
        yield warning(
            Check.VERSIONS_DIFFER,
            list(versions),
            text,
            "this can work; if ranks hang or fail oddly, make the versions equal first",
            *table,
        )


def _versions(facts: NodeFacts) -> dict[str, str]:
    torch = facts.torch
    return {
        "Python": facts.python.version if facts.python else _UNKNOWN,
        "torch": (torch and torch.version) or _UNKNOWN,
        "CUDA": _cuda_version(torch) if torch else _UNKNOWN,
        "NCCL": (torch and torch.nccl) or _UNKNOWN,
        "driver": (facts.gpu and facts.gpu.driver) or _UNKNOWN,
    }


def _cuda_version(torch: TorchFact) -> str:
    if torch.cuda or torch.hip:
        return torch.cuda or f"ROCm {torch.hip}"
    return _UNKNOWN if torch.path.endswith("-info") else _NO_CUDA  # the record of an installation does not say


def _compared(column: str, row: Mapping[str, str]) -> str | None:
    """Return what must be equal on all nodes; None where it is not known. A patch of Python changes nothing here."""
    value = row[column]
    if value == _UNKNOWN:
        return None
    return ".".join(value.split(".")[:2]) if column == "Python" else value


def _table(versions: Mapping[str, Mapping[str, str]]) -> list[str]:
    """Return the lines of a table with a row for all nodes that are alike."""
    columns = [name for name in _COLUMNS if any(row[name] != _UNKNOWN for row in versions.values())]
    groups: dict[tuple[str, ...], list[str]] = {}
    for node_id, row in versions.items():
        groups.setdefault(tuple(row[name] for name in columns), []).append(node_id)
    rows = [("nodes", *columns), *((fold(ids), *values) for values, ids in groups.items())]
    widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


# --- code -----------------------------------------------------------------------------------------------------------


def check_code(plan: Plan, seen: Observations, _: CheckOptions) -> Iterator[Finding]:
    """Yield folders that cannot be used, and scripts that are missing or not the same."""
    for node, facts in seen.of(plan):
        workdir, scratch = facts.workdir, facts.scratch
        if workdir and workdir.state != "ok":
            yield failure(
                Check.WORKDIR,
                [node.node_id],
                f"workdir {workdir.path} cannot be entered: {workdir.detail}",
                "take the code along with `--bundle`, make the folder there, or name another with `--workdir`",
            )
        else:
            yield from _script(node, facts)
        if scratch and not scratch.writable:
            yield failure(
                Check.SCRATCH,
                [node.node_id],
                f"no folder for the job's output can be made in {scratch.path}: {scratch.detail}",
                "free or open it for your user, or name another with `scratch` in the hosts map",
            )
    yield from _same_script([(node, facts) for node, facts in seen.of(plan) if facts.script and facts.script.sha256])


def _script(node: NodeCommand, facts: NodeFacts) -> Iterator[Finding]:
    script = facts.script
    if script is None or script.state in ("ok", "unknown"):
        return
    if script.state == "not_found_module":
        text, python = f"there is no module `{script.path}`", (facts.python and facts.python.executable) or node.python
        hint = f"it must be in {node.workdir}, on PYTHONPATH or installed for `{python}`; `--workdir` names the folder"
    elif script.state == "not_found_command":
        text = f"there is no command `{script.path}`"
        hint = "name its full path; PATH is what the SSH server gives a command, and `-e PATH` passes yours on instead"
    else:
        text = f"the script {script.path} cannot be read: {script.detail}"
        hint = "its path starts from the workdir, which must hold it on every node; `--bundle` takes the code along"
    yield failure(Check.SCRIPT_MISSING, [node.node_id], text, hint)


def _same_script(nodes: Sequence[tuple[NodeCommand, NodeFacts]]) -> Iterator[Finding]:
    scripts = [(node, facts.script) for node, facts in nodes if facts.script]
    if len({script.sha256 for _, script in scripts}) < 2:
        return
    for node, script in scripts:
        yield failure(
            Check.SCRIPT_DIFFERS,
            [node.node_id],
            "the script is not the same on all nodes",
            "copy the right one to all nodes, or use a shared folder",
            f"{script.path}, {script.size_bytes} bytes, sha256 {(script.sha256 or '')[:_HASH_DIGITS]}",
        )
