"""A Slurm allocation as a hosts map: what Slurm says in the environment of a job -> HostMap.

Which variables Slurm sets depends on where one is. `salloc` and `sbatch` set SLURM_JOB_NODELIST for the job's command,
and SLURM_GPUS_PER_NODE and SLURM_GPUS where an option asked for them. SLURM_GPUS_ON_NODE is there on the job's nodes
alone, so in a batch script and in steps, and is about the node that one is on.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from gpulayer.errors import HostsFileError, PoolError
from gpulayer.hosts import HostMap, Node
from gpulayer.ranges import expand

if TYPE_CHECKING:
    from collections.abc import Mapping

_GROUP = "SLURM_JOB_NODELIST_HET_GROUP_"


def read_slurm(environ: Mapping[str, str]) -> HostMap:
    """Return the nodes of the allocation that this runs in, in Slurm's order.

    Raises HostsFileError outside of one, in a heterogeneous job, and in one of several tasks of a step.
    """
    _refuse(environ)
    nodelist = environ["SLURM_JOB_NODELIST"]
    try:
        ids = expand(nodelist)
    except PoolError as error:
        raise HostsFileError(f"SLURM_JOB_NODELIST: {error}", hint="`scontrol show hostnames` lists the nodes") from None
    gpus = _gpus(environ, len(ids))
    keys: dict[str, object] = {} if gpus is None else {"gpus": gpus}
    job = environ.get("SLURM_JOB_ID", "?")
    return HostMap(f"Slurm job {job}", tuple(Node.model_validate({"id": node_id, **keys}) for node_id in ids))


def _refuse(environ: Mapping[str, str]) -> None:
    # A batch script of such a job also has a SLURM_JOB_NODELIST: that of its first part.
    parts = sorted(name for name in environ if name.startswith(_GROUP))
    if parts:
        raise HostsFileError(
            f"this is a heterogeneous Slurm job of {len(parts)} parts: {', '.join(parts)}",
            hint="write its nodes to a hosts.toml, and name that with `--hosts`",
        )
    if not environ.get("SLURM_JOB_NODELIST"):
        raise HostsFileError(
            "`--hosts slurm` is for the inside of a Slurm allocation: SLURM_JOB_NODELIST is not set",
            hint="start gpulayer from a script for `sbatch`, or in `salloc`; a file of that name is `--hosts ./slurm`",
        )
    tasks = environ.get("SLURM_STEP_NUM_TASKS", "1")
    if "SLURM_STEP_ID" in environ and tasks != "1":
        raise HostsFileError(
            f"`srun` has started gpulayer {tasks} times: SLURM_STEP_NUM_TASKS is {tasks}",
            hint="start it once, without `srun`: it logs in to the other nodes itself",
        )


def _gpus(environ: Mapping[str, str], nnodes: int) -> int | None:
    """Return how many GPUs each node has for the job, None where Slurm does not say it of all of them."""
    per_node = _count(environ.get("SLURM_GPUS_PER_NODE", ""))
    if per_node:
        return per_node
    here, total = _count(environ.get("SLURM_GPUS_ON_NODE", "")), _count(environ.get("SLURM_GPUS", ""))
    if total and here * nnodes != total:  # `--gpus` leaves it to Slurm how to spread them
        return None
    return here or None


def _count(text: str) -> int:
    """Return how many GPUs a Slurm option asks for, as in `4`, `a100:4` and `a100:2,v100:2`; 0 for anything else."""
    counts = [re.fullmatch(r"(?:[^:,]+:)?([0-9]{1,6})", part) for part in text.split(",")]
    return sum(int(count[1]) for count in counts if count) if all(counts) else 0
