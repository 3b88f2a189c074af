"""`gpulayer ps` and `gpulayer hosts --probe`: what the hosts say of themselves."""

from __future__ import annotations

import json
import signal
from typing import TYPE_CHECKING, Any

import pytest

from tests.support import netns
from tests.support.endings import POLITE, assert_clean, wait_ready
from tests.support.jobs import FAKE_TORCH, GPULAYER, launch, map_with_fake_torch, write_script
from tests.support.leftovers import DEAF, abandon, gpulayer, job_id, jobs_in, kill, start
from tests.support.preflight import nvidia_smi, write_program
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.cluster import Cluster, LoginNode

pytestmark = pytest.mark.ssh


def test_ps_of_a_job_that_runs(cluster2: Cluster) -> None:
    """A row for each node of the job, in words and as JSON; afterwards there is none, and it says so."""
    run, hosts_file = start(cluster2, POLITE)
    with run:
        listed = gpulayer(cluster2.login, "ps", "-H", hosts_file)
        assert (listed.returncode, listed.stderr) == (0, "")
        head, *rows = (line.split() for line in listed.stdout.splitlines())
        assert " ".join(head) == "job node rank supervisor procs gpu mem age command"
        assert [row[:6] for row in rows] == [[job_id(run), f"h0{n}", str(n), "alive", "2", "-"] for n in (0, 1)]
        assert all("torch.distributed.run" in " ".join(row) for row in rows)
        jobs = jobs_in(gpulayer(cluster2.login, "ps", "-H", hosts_file, "-w", "h01", "--json"))
        assert [(job["job_id"], job["nodes"], job["node_rank"]) for job in jobs] == [(job_id(run), ["h01"], 1)]
        assert [process["rank"] for process in jobs[0]["processes"]] == [None, 1]
        assert (jobs[0]["user"], jobs[0]["supervisor"], len(jobs[0]["keepers"])) == ("root", True, 2)
        run.interrupt()
        run.finish()
    empty = gpulayer(cluster2.login, "ps", "-H", hosts_file)
    assert (empty.returncode, empty.stdout, empty.stderr) == (0, "no job runs on h[00-01]\n", "")
    assert jobs_in(gpulayer(cluster2.login, "ps", "-H", hosts_file, "--json")) == []
    assert_clean(cluster2)


def test_ps_shows_the_gpu_memory_of_a_job(cluster2: Cluster) -> None:
    """What the vendor's tool says of the job's processes, and of no others; the tool stands on the map's PATH."""
    tools = cluster2.new_folder("bin")
    folder = cluster2.new_folder("out")
    env = {"PYTHONPATH": str(FAKE_TORCH), "OUT": str(folder), "PATH": f"{tools}:{netns.SYSTEM_PATH}"}
    hosts_file = map_with_fake_torch(cluster2, nodes={"h00": {"env": env}}, env={"OUT": str(folder)})
    with launch(cluster2.login, hosts_file, ["--no-preflight"], write_script(cluster2, POLITE)) as run:
        wait_ready(folder, 2)
        (job,) = jobs_in(gpulayer(cluster2.login, "ps", "-H", hosts_file, "-w", "h00", "--json"))
        (rank,) = (process["pid"] for process in job["processes"] if process["rank"] == 0)
        write_program(tools / "nvidia-smi", nvidia_smi([15000, 4], [(0, rank, 12700), (0, 1, 300)]))
        rows = [line.split() for line in gpulayer(cluster2.login, "ps", "-H", hosts_file).stdout.splitlines()[1:]]
        assert [row[5] for row in rows] == ["12.4", "-"]
        run.interrupt()
        run.finish()
    assert_clean(cluster2)


def test_hosts_probe(cluster2: Cluster) -> None:
    """Each host's state is its own word: free, held by a job, dirty, unreachable."""
    run, hosts_file = start(cluster2, DEAF)
    with run:
        elsewhere = {"GPULAYER_LEASES": str(cluster2.new_folder("leases"))}
        held = states(cluster2.login, hosts_file, elsewhere)
        assert [(one["state"], one["held_by"]["job_id"], one["held_by"]["user"]) for one in held] == [
            ("held", job_id(run), "root")
        ] * 2
        text = cluster2.login.run([*GPULAYER, "hosts", "--probe", "-H", str(hosts_file)], env=elsewhere).stdout
        assert text.count(f"held by {job_id(run)} (root@login, since ") == 2
        abandon(cluster2, run)
    cluster2.hosts[1].drop_syn()
    dirty, unreachable = states(cluster2.login, hosts_file, elsewhere)
    assert (dirty["state"], dirty["detail"]) == ("dirty", f"dirty: 2 processes of job {job_id(run)}")
    assert unreachable["state"] == "unreachable"
    assert unreachable["detail"].startswith("unreachable: h01 port 22 did not answer ")
    cluster2.hosts[1].heal()
    assert kill(cluster2.login, job_id(run), hosts_file).returncode == 0
    assert [one["state"] for one in states(cluster2.login, hosts_file, elsewhere)] == ["free", "free"]
    assert_clean(cluster2, kept_on=cluster2.hosts)


def states(login: LoginNode, hosts_file: Path, env: dict[str, str]) -> list[dict[str, Any]]:
    """What `hosts --probe --json` says of each node."""
    argv = [*GPULAYER, "hosts", "--probe", "--json", "-H", str(hosts_file), "--connect-timeout", "1"]
    done = login.run(argv, env=env)
    assert done.returncode == 0, done.stderr
    nodes: list[dict[str, Any]] = json.loads(done.stdout)["nodes"]
    return nodes


@pytest.mark.parametrize("words", [["ps"], ["kill", "x"], ["hosts", "--probe"]])
def test_ctrl_c_while_a_host_does_not_answer(cluster2: Cluster, words: list[str]) -> None:
    """It leaves at once, with 130."""
    cluster2.hosts[1].drop_syn()
    hosts_file = cluster2.hosts_toml()
    with cluster2.login.popen([*GPULAYER, *words, "-H", str(hosts_file), "--connect-timeout", "60"]) as process:
        wait_until(lambda: "SYN-SENT" in cluster2.login.run(["ss", "-tn"]).stdout, "it connects")
        process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate(timeout=20)
    assert (process.returncode, stdout, stderr) == (130, b"", b"gpulayer: interrupted\n")
    assert_clean(cluster2)
