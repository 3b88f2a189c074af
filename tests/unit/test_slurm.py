"""A Slurm allocation from the environment of its job. The environments are those of Slurm 22.05, shortened.

They were recorded in tests/ssh/test_slurm.py's cluster, but for the GPUs of batch scripts, which its slurmd does not
have: those are as sbatch(1) describes them.
"""

from __future__ import annotations

import pytest

from gpulayer.errors import HostsFileError
from gpulayer.slurm import read_slurm

SALLOC = {
    "SLURM_CLUSTER_NAME": "test",
    "SLURM_JOB_ID": "17",
    "SLURM_JOB_CPUS_PER_NODE": "1(x2)",
    "SLURM_JOB_NAME": "interactive",
    "SLURM_JOB_NODELIST": "h[00-01]",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_NODE_ALIASES": "(null)",
    "SLURM_NODELIST": "h[00-01]",
    "SLURM_SUBMIT_HOST": "login",
    "SLURM_TASKS_PER_NODE": "1(x2)",
}
SBATCH = {
    **SALLOC,
    "SLURMD_NODENAME": "h00",
    "SLURM_CPUS_ON_NODE": "2",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_NTASKS": "4",
    "SLURM_NTASKS_PER_NODE": "2",
    "SLURM_PROCID": "0",
    "SLURM_TASKS_PER_NODE": "2(x2)",
}
HETEROGENEOUS = {
    "SLURM_HET_SIZE": "2",
    "SLURM_JOB_ID": "3",
    "SLURM_JOB_ID_HET_GROUP_0": "3",
    "SLURM_JOB_ID_HET_GROUP_1": "4",
    "SLURM_JOB_NODELIST_HET_GROUP_0": "h00",
    "SLURM_JOB_NODELIST_HET_GROUP_1": "h01",
    "SLURM_JOB_NODELIST_PACK_GROUP_0": "h00",
    "SLURM_JOB_NODELIST_PACK_GROUP_1": "h01",
}


def gpus(environ: dict[str, str]) -> list[int | None]:
    """Return how many GPUs each node of an allocation has."""
    return [node.gpu_count for node in read_slurm(environ).nodes]


@pytest.mark.parametrize("environ", [SALLOC, SBATCH], ids=["salloc", "sbatch"])
def test_the_nodes_are_those_of_the_allocation(environ: dict[str, str]) -> None:
    """Each node of the list is one of the map, by its name, in Slurm's order; without GPUs nothing is said of them."""
    host_map = read_slurm(environ)
    assert [node.model_dump(exclude_unset=True) for node in host_map.nodes] == [
        {"id": "h00", "ssh": "h00"},
        {"id": "h01", "ssh": "h01"},
    ]
    assert host_map.source == "Slurm job 17"


def test_a_list_of_several_ranges() -> None:
    """Slurm's lists are ClusterShell's: several names, ranges with steps of one, two ranges in a name."""
    ids = [node.id for node in read_slurm({**SALLOC, "SLURM_JOB_NODELIST": "b[9-10],a[01,03],r[1-2]n[1-2]"}).nodes]
    assert ids == ["b9", "b10", "a01", "a03", "r1n1", "r1n2", "r2n1", "r2n2"]


@pytest.mark.parametrize(
    ("said", "count"),
    [
        ({}, None),
        ({"SLURM_GPUS_PER_NODE": "4"}, 4),
        ({"SLURM_GPUS_PER_NODE": "a100:4"}, 4),
        ({"SLURM_GPUS_PER_NODE": "a100:2,v100:1"}, 3),
        ({"SLURM_GPUS_ON_NODE": "8"}, 8),  # --gres=gpu:8: alike everywhere
        ({"SLURM_GPUS_PER_NODE": "2", "SLURM_GPUS_ON_NODE": "8"}, 2),
        ({"SLURM_GPUS": "16", "SLURM_GPUS_ON_NODE": "8"}, 8),
        ({"SLURM_GPUS": "3", "SLURM_GPUS_ON_NODE": "2"}, None),  # two here, one there
        ({"SLURM_GPUS": "16"}, None),
        ({"SLURM_GPUS_PER_NODE": "many"}, None),
    ],
)
def test_gpus_where_slurm_says_how_many_every_node_has(said: dict[str, str], count: int | None) -> None:
    """`gpus` is what holds for all nodes; where Slurm may have spread them unevenly, it is left out."""
    assert gpus({**SBATCH, **said}) == [count, count]


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({}, "`--hosts slurm` is for the inside of a Slurm allocation: SLURM_JOB_NODELIST is not set"),
        ({"SLURM_JOB_NODELIST": ""}, "`--hosts slurm` is for the inside of a Slurm allocation"),
        (HETEROGENEOUS, "this is a heterogeneous Slurm job of 2 parts: SLURM_JOB_NODELIST_HET_GROUP_0, "),
        ({**SBATCH, **HETEROGENEOUS}, "this is a heterogeneous Slurm job of 2 parts"),
        (
            {**SBATCH, "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4"},
            "`srun` has started gpulayer 4 times: SLURM_STEP_NUM_TASKS is 4",
        ),
        ({**SALLOC, "SLURM_JOB_NODELIST": "h[00-"}, "SLURM_JOB_NODELIST: `h[00-` holds brackets that are no range"),
    ],
    ids=["outside", "empty", "heterogeneous", "batch-of-one", "srun", "odd"],
)
def test_what_is_refused(environ: dict[str, str], message: str) -> None:
    """Outside of an allocation, in one of several parts, or started many times over: an error with the next step."""
    with pytest.raises(HostsFileError) as caught:
        read_slurm(environ)
    assert str(caught.value).startswith(message)
    assert caught.value.hint


def test_one_task_of_a_step_is_like_the_script() -> None:
    """A shell in a step of its own, as `salloc` gives where it is set up so, is no second copy."""
    assert gpus({**SBATCH, "SLURM_STEP_ID": "4294967290", "SLURM_STEP_NUM_TASKS": "1"}) == [None, None]
