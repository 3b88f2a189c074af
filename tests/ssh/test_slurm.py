"""`--hosts slurm` inside allocations of a real Slurm: what its variables say there, and jobs that run with them."""

from __future__ import annotations

import json
import shlex
import sys
from typing import TYPE_CHECKING

import pytest

from tests.support import leaks
from tests.support.cluster import Cluster
from tests.support.endings import folders
from tests.support.jobs import FAKE_TORCH, GPULAYER, write_script
from tests.support.slurm import GPUS, Slurm
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.ssh, pytest.mark.slurm, pytest.mark.slow]

SAYS = "import os; print('rank', os.environ['RANK'], 'of', os.environ['WORLD_SIZE'], flush=True)"


@pytest.fixture(scope="module")
def slurm() -> Iterator[tuple[Cluster, Slurm]]:
    """Two hosts with a Slurm."""
    with Cluster(2) as cluster, Slurm(cluster) as slurm:
        yield cluster, slurm


def job(cluster: Cluster, *options: str) -> list[str]:
    """The command line of a job of one rank a host that says which rank it is."""
    out = cluster.new_folder("out")
    script = write_script(cluster, SAYS)
    given = ["--python", sys.executable, "-C", str(cluster.shared), "-e", f"PYTHONPATH={FAKE_TORCH}"]
    return [*GPULAYER, "run", *options, *given, "--no-preflight", "--run-dir", str(out / "run"), str(script)]


def assert_no_job(cluster: Cluster) -> None:
    """No process of a job is on a host, and soon no folder of one. Slurm's own processes may be there."""
    assert leaks.job_processes(cluster) == []
    wait_until(lambda: not any(map(folders, cluster.hosts)), "the folders of jobs are gone")


def test_in_salloc(slurm: tuple[Cluster, Slurm]) -> None:
    """The nodes and the GPUs are those that were granted; a job runs on them, started where salloc was."""
    cluster, real = slurm
    options = ["salloc", "-N2", f"--gpus-per-node={GPUS}"]
    shown = real.run([*options, *GPULAYER, "hosts", "-H", "slurm"])
    assert shown.returncode == 0, shown.stderr
    assert [line.split()[0] for line in shown.stdout.splitlines()] == ["node", "h00", "h01"]
    rendered = real.run([*options, *GPULAYER, "render", "-H", "slurm", "--format", "json", "s.py"])
    assert rendered.returncode == 0, rendered.stderr
    plan = json.loads(rendered.stdout)
    assert [(node["node_id"], len(node["ranks"])) for node in plan["nodes"]] == [("h00", GPUS), ("h01", GPUS)]
    done = real.run(["salloc", "-N2", *job(cluster, "-H", "slurm", "--nproc-per-node", "1")])
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["[0] rank 0 of 2", "[1] rank 1 of 2"]
    assert_no_job(cluster)


def test_in_a_batch_script(slurm: tuple[Cluster, Slurm]) -> None:
    """On a node of the job itself, whose own name is a loopback address there, a map with addresses makes it run."""
    cluster, real = slurm
    folder = cluster.new_folder("map")
    init = [
        *GPULAYER,
        "hosts",
        "init",
        "--from",
        "slurm",
        "--probe",
        "--python",
        sys.executable,
        "-o",
        f"{folder}/m.toml",
    ]
    run = job(cluster, "-H", f"{folder}/m.toml", "--nproc-per-node", "1")
    refused = [*GPULAYER, "render", "-H", "slurm", "--nproc-per-node", "1", "s.py"]
    lines = [f"{shlex.join(refused)} && exit 9", shlex.join(init) + " || exit 8", shlex.join(run)]
    code, output = real.batch(lines, "-N2")
    assert code == 0, output
    assert "node h00: 127.0.1.1 (/etc/hosts, for `h00`: the node id) is a loopback address" in output
    assert {"[0] rank 0 of 2", "[1] rank 1 of 2"} <= set(output.splitlines())
    assert "# The nodes of Slurm job " in (folder / "m.toml").read_text()
    assert_no_job(cluster)


def test_in_a_step_of_several_tasks(slurm: tuple[Cluster, Slurm]) -> None:
    """`srun gpulayer` would start as many jobs as it has tasks."""
    _, real = slurm
    done = real.run(["salloc", "-N2", "srun", "-N2", "-n2", *GPULAYER, "hosts", "-H", "slurm"])
    assert done.returncode == 2
    assert done.stderr.count("gpulayer: error: `srun` has started gpulayer 2 times: SLURM_STEP_NUM_TASKS is 2\n") == 2


@pytest.mark.parametrize("batch", [False, True], ids=["salloc", "sbatch"])
def test_in_a_heterogeneous_job(batch: bool, slurm: tuple[Cluster, Slurm]) -> None:
    """Its parts have lists of their own, of which the first alone must not pass for the whole."""
    _, real = slurm
    command = [*GPULAYER, "hosts", "-H", "slurm"]
    if batch:
        code, said = real.batch([shlex.join(command)], "-N1", ":", "-N1")
    else:
        done = real.run(["salloc", "-N1", ":", "-N1", *command])
        code, said = done.returncode, done.stderr
    assert code == 2, said
    assert "gpulayer: error: this is a heterogeneous Slurm job of 2 parts: SLURM_JOB_NODELIST_HET_GROUP_0, " in said


def test_outside_of_an_allocation(slurm: tuple[Cluster, Slurm]) -> None:
    """Where Slurm is, and no job of it, the next step is told."""
    _, real = slurm
    done = real.run([*GPULAYER, "hosts", "-H", "slurm"])
    assert (done.returncode, done.stdout) == (2, "")
    assert "start gpulayer from a script for `sbatch`, or in `salloc`" in done.stderr
