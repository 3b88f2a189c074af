"""`gpulayer kill`: the end of jobs that nobody watches any more, and of those that live."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from typing import TYPE_CHECKING

import pytest

from tests.support.endings import BEGIN, POLITE, STUBBORN, assert_clean, bystanders, running, wait_stubborn
from tests.support.jobs import GPULAYER
from tests.support.leftovers import DEAF, abandon, ended, gpulayer, job_id, jobs_in, kill, start
from tests.support.stuck import StuckFolder, cannot_be_made
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.cluster import Cluster, LoginNode

pytestmark = pytest.mark.ssh


@pytest.fixture(autouse=True)
def _neighbours(cluster2: Cluster) -> Iterator[None]:
    """Nothing here may touch what is no job's."""
    with bystanders(cluster2):
        yield


def test_kill_ends_what_nobody_watches(cluster2: Cluster) -> None:
    """Launcher, supervisors and guards are dead; processes that ignore SIGTERM get SIGKILL after the grace.

    Another login of the same user, with the job's id in its environment, goes on.
    """
    run, hosts_file = start(cluster2, STUBBORN)
    with run:
        watched = wait_stubborn(cluster2, 2)
        abandon(cluster2, run)
    shell = cluster2.login.popen(["ssh", "h00", f"export GPULAYER_JOB_ID={job_id(run)}; sh"], stdin=subprocess.PIPE)
    listed = gpulayer(cluster2.login, "ps", "-H", hosts_file)
    rows = [line.split()[:4] for line in listed.stdout.splitlines()[1:]]
    assert rows == [[job_id(run), "h00", "0", "gone"], [job_id(run), "h01", "1", "gone"]]
    done = kill(cluster2.login, job_id(run), hosts_file)
    watched.wait_gone(0)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"job {job_id(run)} on h[00-01]: ")
    assert done.stdout.endswith(" by SIGKILL; verified clean\n")
    assert f"gpulayer: ending job {job_id(run)}; what is left of it after 0.5 s gets SIGKILL" in done.stderr
    again = kill(cluster2.login, job_id(run), hosts_file)
    assert (again.returncode, again.stdout, again.stderr) == (0, f"nothing of job {job_id(run)} runs on h[00-01]\n", "")
    output, _ = shell.communicate(b"echo still here\n", timeout=20)
    assert (shell.returncode, output) == (0, b"still here\n")
    assert_clean(cluster2, kept_on=cluster2.hosts)


def test_kill_ends_a_lone_daemon(cluster2: Cluster) -> None:
    """Of the job only a daemon is left, in a session of its own, whose parent is process 1; its marker is enough."""
    run, hosts_file = start(cluster2, STUBBORN)
    with run:
        wait_stubborn(cluster2, 2)
        abandon(cluster2, run)
    for process in running(cluster2):
        if process.argv[1:] != ("1000",):
            os.kill(process.pid, signal.SIGKILL)
    wait_until(lambda: [process.argv for process in running(cluster2)] == [("marked", "1000")] * 2, "daemons are left")
    jobs = jobs_in(gpulayer(cluster2.login, "ps", "-H", hosts_file, "--json"))
    assert [(job["nodes"], job["supervisor"], job["count"], job["command"]) for job in jobs] == [
        (["h00"], False, 1, "marked 1000"),
        (["h01"], False, 1, "marked 1000"),
    ]
    done = kill(cluster2.login, job_id(run), hosts_file, "--json")
    assert (done.returncode, running(cluster2)) == (0, [])
    report = json.loads(done.stdout)
    assert [(one["node"], one["count"], one["killed"], one["verified_clean"]) for one in report["ended"]] == [
        ("h00", 1, 1, True),
        ("h01", 1, 1, True),
    ]
    assert (report["nothing_on"], report["refused"]) == ([], [])
    assert_clean(cluster2, kept_on=cluster2.hosts)


def test_kill_of_a_job_that_lives(cluster2: Cluster) -> None:
    """It is told that a launcher will see it; that one says what has happened, and that the hosts are clean."""
    run, hosts_file = start(cluster2, POLITE, options=["--grace", "5"])
    with run:
        done = kill(cluster2.login, job_id(run), hosts_file, grace="5")
        finished = run.finish()
    assert done.returncode == 0, done.stderr
    # One host's part may have been ended by its launcher by now, which lost the other one's.
    ended = rf"(job {job_id(run)} on \S+: \d processes ended; verified clean\n)+"
    assert re.fullmatch(rf"{ended}(nothing of job {job_id(run)} runs on \S+\n)?", done.stdout), done.stdout
    by = f"job {job_id(run)} is still run from here, by pid {run.process.pid} of root, which will see it end"
    assert f"gpulayer: {by}\n" in done.stderr
    assert finished.returncode == 4
    assert "was lost: its supervisor got SIGTERM there" in finished.stderr
    assert finished.stderr.count("; verified clean") >= 1
    assert_clean(cluster2, kept_on=cluster2.hosts)


def test_jobs_of_others_are_neither_listed_nor_touched(cluster2: Cluster) -> None:
    """An ordinary user sees and ends jobs of their own; root sees both, with their users."""
    of_root, roots_map = start(cluster2, POLITE, gpus=0)
    of_walker, walkers_map = start(cluster2, POLITE, login=cluster2.walker, gpus=1)
    with of_root, of_walker:
        listed = jobs_in(gpulayer(cluster2.walker, "ps", "-H", walkers_map, "--json"))
        assert {job["job_id"] for job in listed} == {job_id(of_walker)}
        table = gpulayer(cluster2.login, "ps", "-H", roots_map).stdout
        assert {tuple(line.split()[0:1] + line.split()[7:9]) for line in table.splitlines()[1:]} == {
            (job_id(of_root), "s", "root"),
            (job_id(of_walker), "s", "walker"),
        }
        other = kill(cluster2.walker, job_id(of_root), walkers_map)
        assert (other.returncode, other.stdout) == (0, f"nothing of job {job_id(of_root)} runs on h[00-01]\n")
        own = gpulayer(cluster2.walker, "kill", "--all", "--yes", "-H", walkers_map, "--grace", "5")
        assert own.returncode == 0
        assert "; verified clean\n" in own.stdout
        assert job_id(of_root) not in own.stdout + own.stderr
        assert of_walker.finish().returncode == 4
        assert of_root.process.poll() is None
        of_root.interrupt()
        assert [node["outcome"] for node in of_root.finish().receipt["nodes"]] == ["stopped", "stopped"]
    assert_clean(cluster2, kept_on=cluster2.hosts)


def test_nodes_that_cannot_be_asked(cluster2: Cluster) -> None:
    """The others are listed and cleaned; which ones are missing is told, with the command for later."""
    run, hosts_file = start(cluster2, DEAF)
    with run:
        abandon(cluster2, run)
    cluster2.hosts[1].drop_syn()
    listed = gpulayer(cluster2.login, "ps", "-H", hosts_file, "--connect-timeout", "1")
    assert listed.returncode == 3
    assert [line.split()[1] for line in listed.stdout.splitlines()[1:]] == ["h00"]
    assert listed.stderr.startswith(
        "gpulayer: error: 1 of 2 nodes could not be asked\n\nh01: h01 port 22 did not answer "
    )
    done = kill(cluster2.login, job_id(run), hosts_file, "--connect-timeout", "1")
    assert done.returncode == 5
    assert ended(job_id(run), "h00").fullmatch(done.stdout)
    assert "error: 1 of 2 nodes could not be asked" in done.stderr
    assert f"\ngpulayer: not verified clean: h01\nhint: `gpulayer kill {job_id(run)} -w h01 -H " in done.stderr
    nobody = kill(cluster2.login, job_id(run), hosts_file, "-w", "h01", "--connect-timeout", "1")
    assert nobody.returncode == 3
    assert nobody.stderr.startswith("gpulayer: error: the node could not be asked\n\nh01: h01 port 22 did not answer ")
    cluster2.hosts[1].heal()
    later = kill(cluster2.login, job_id(run), hosts_file, "-w", "h01")
    assert later.returncode == 0
    assert ended(job_id(run), "h01").fullmatch(later.stdout)
    assert_clean(cluster2, kept_on=cluster2.hosts)


@pytest.mark.skipif(bool(cannot_be_made()), reason=cannot_be_made())
def test_what_outlives_sigkill_is_named(cluster2: Cluster) -> None:
    """A process in state D cannot be killed: kill says which it is, and 5."""
    with StuckFolder(cluster2.hosts[1]) as stuck:
        source = f"{BEGIN}\nnote(f'ready{{rank}}')\nif rank == 1: os.stat({stuck.path!r} + '/x')\ntime.sleep(1000)\n"
        run, hosts_file = start(cluster2, source)
        with run:
            abandon(cluster2, run)
        done = kill(cluster2.login, job_id(run), hosts_file)
    assert done.returncode == 5
    assert "1 process outlived SIGKILL\n    h01: pid " in done.stdout
    assert ", state D, " in done.stdout
    assert f"not verified clean: h01\nhint: `gpulayer kill {job_id(run)} -w h01 -H " in done.stderr
    wait_until(lambda: not running(cluster2), "the kernel lets it go")
    assert_clean(cluster2, [cluster2.hosts[0]], kept_on=[cluster2.hosts[0]])


def test_all_asks_first(cluster2: Cluster) -> None:
    """`kill --all` shows what would end and asks; without a terminal it wants `--yes`, and nothing is contacted."""
    run, hosts_file = start(cluster2, DEAF)
    with run:
        abandon(cluster2, run)
    unasked = gpulayer(cluster2.login, "kill", "--all", "-H", hosts_file)
    assert unasked.returncode == 2
    assert unasked.stderr.startswith("gpulayer: error: `--all` asks before it ends jobs, and stdin is no terminal\n")
    for answer, code, ending in (("n\n", 0, "gpulayer: nothing was ended\n"), ("\x03", 130, "gpulayer: interrupted\n")):
        returncode, stdout, stderr = answered(cluster2.login, answer, "kill", "--all", "-H", str(hosts_file))
        assert (returncode, stdout) == (code, "")
        assert stderr.startswith("job ")
        assert f"\n{job_id(run)}  h00 " in stderr
        assert stderr.endswith(ending)
    assert len(running(cluster2)) == 4
    words = ["kill", "--all", "-H", str(hosts_file), "-w", "h00", "--grace", "0.5"]
    returncode, stdout, _ = answered(cluster2.login, "y\n", *words)
    assert returncode == 0
    assert ended(job_id(run), "h00").fullmatch(stdout)
    assert len(running(cluster2)) == 2
    assert gpulayer(cluster2.login, "kill", "--all", "-y", "-H", hosts_file, "--grace", "0.5").returncode == 0
    assert_clean(cluster2, kept_on=cluster2.hosts)


def answered(login: LoginNode, answer: str, *words: str) -> tuple[int, str, str]:
    """Run a command whose stdin is a terminal, and type the answer once it asks."""
    ours, theirs = os.openpty()
    with login.popen(["setsid", "-c", *GPULAYER, *words], stdin=theirs) as process:
        os.close(theirs)
        stderr = b""
        while process.stderr and not stderr.endswith(b"end all of these? [y/N] "):
            piece = os.read(process.stderr.fileno(), 4096)
            assert piece, stderr
            stderr += piece
        os.write(ours, answer.encode())
        stdout, more = process.communicate(timeout=60)
    os.close(ours)
    return process.returncode, stdout.decode(), (stderr + more).decode()


def test_entries_that_are_one_machine(cluster2: Cluster) -> None:
    """Two parts of a host see the same job: it is listed once, under both, and ended once."""
    run, _ = start(cluster2, DEAF)
    with run:
        abandon(cluster2, run)
    parts = cluster2.hosts_toml(nodes={"h00": {"gpus": [0]}, "h01": {"ssh": "h00", "address": "h00", "gpus": [1]}})
    (job,) = jobs_in(gpulayer(cluster2.login, "ps", "-H", parts, "--json"))
    assert (job["nodes"], job["count"]) == (["h00", "h01"], 2)
    done = kill(cluster2.login, job_id(run), parts)
    assert done.returncode == 0
    assert len(ended(job_id(run), "h00").findall(done.stdout) + ended(job_id(run), "h01").findall(done.stdout)) == 1
    assert len(running(cluster2)) == 2
    assert kill(cluster2.login, job_id(run), cluster2.hosts_toml()).returncode == 0
    assert_clean(cluster2, kept_on=cluster2.hosts)
