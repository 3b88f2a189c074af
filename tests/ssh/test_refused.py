"""If one node cannot take part, nothing starts anywhere: exit code 3, each node's own reason, and nothing left."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest

from tests.support import leaks
from tests.support.jobs import map_with_fake_torch, run, write_script
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from tests.support.cluster import Cluster, TomlValue
    from tests.support.host import Host
    from tests.support.jobs import Finished

    NodeKeys = Mapping[str, TomlValue]

pytestmark = pytest.mark.ssh

TOUCH = "import os; open(os.path.join(os.environ['OUT'], os.environ['RANK']), 'w').close()"
LISTEN = """
import socket, time
taken = socket.create_server(("", 29500))
open("/tmp/listening", "w").close()
time.sleep(1000)
"""


def _forget_key(cluster: Cluster, host: Host) -> None:
    known = cluster.login.home / ".ssh/known_hosts"
    known.write_text("".join(line for line in known.read_text().splitlines(True) if not line.startswith(host.name)))


def _change_key(cluster: Cluster, host: Host) -> None:
    _forget_key(cluster, host)
    other = next(one for one in cluster.hosts if one is not host)
    with (cluster.login.home / ".ssh/known_hosts").open("a") as known:
        known.write(f"{host.name} {other.public_key}\n")


def _stop_sshd(cluster: Cluster, host: Host) -> None:
    host.stop_sshd()


def _take_port(cluster: Cluster, host: Host) -> None:
    host.start(["python3", "-c", LISTEN], env={"PATH": "/usr/bin:/bin"})
    wait_until(host.path("/tmp/listening").exists, "the port is taken")


def _nothing(cluster: Cluster, host: Host) -> None:
    pass


# What is done to a host, the keys of its node, and what is then said: the reason, and what the hint begins with.
FAULTS: dict[str, tuple[Callable[[Cluster, Host], None], NodeKeys, str, str]] = {
    "unknown host key": (
        _forget_key,
        {},
        "the host key of {name} port 22 is not in known_hosts",
        "hint: compare it with `ssh-keygen -lf ",
    ),
    "changed host key": (
        _change_key,
        {},
        "the host key of {name} port 22 has changed: known_hosts has ssh-ed25519 SHA256:",
        "hint: another machine may be answering in its place",
    ),
    "permission denied": (
        _nothing,
        {"user": "nobody-here"},
        "permission denied for user nobody-here on {name} port 22",
        "hint: is nobody-here the right user?",
    ),
    "no such python": (
        _nothing,
        {"python": "/opt/none/bin/python"},
        "`/opt/none/bin/python` cannot be run there",
        "hint: set `python` for the node in the hosts map",
    ),
    "no such workdir": (
        _nothing,
        {"workdir": "/nowhere/at all"},
        "workdir /nowhere/at all cannot be entered: No such file or directory",
        "hint: create it there, or name another folder with `workdir`",
    ),
    "no such interface": (
        _nothing,
        {"interface": "ib7"},
        "interface `ib7` does not exist; there are: eth0, lo",
        "hint: set `interface` for the node",
    ),
    "no such scratch": (
        _nothing,
        {"scratch": "/nowhere"},
        "the job's folder /nowhere/gpulayer-",
        "hint: set `scratch` in the hosts map",
    ),
    "sshd stopped": (_stop_sshd, {}, "{name} port 22", "hint: "),
}


def _refused(cluster: Cluster, hosts: Path, options: tuple[str, ...] = (), *, as_walker: bool = False) -> Finished:
    """Run a job, and see that it was refused and that nothing of it was or is anywhere."""
    script = write_script(cluster, TOUCH)
    out = cluster.new_folder("out")
    login = cluster.walker if as_walker else cluster.login
    done = run(login, hosts, [*options, "-e", f"OUT={out}"], script)
    assert done.returncode == 3, done.stderr
    assert list(out.iterdir()) == []
    assert leaks.job_processes(cluster) == []
    for host in cluster.hosts:
        assert list(host.path("/tmp").glob("gpulayer-*")) == []
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    assert {entry["stage"] for entry in done.named("stage_reached")} <= {"connecting", "preparing"}
    assert done.named("command_started") == []
    return done


def _blocks(stderr: str) -> list[list[str]]:
    """The error screen in its blocks of lines, from `gpulayer: error:` on."""
    text = stderr[stderr.index("gpulayer: error:") :].strip()
    return [block.splitlines() for block in text.split("\n\n")]


@pytest.mark.parametrize("fault", FAULTS)
def test_one_faulty_node_keeps_the_others_from_starting(cluster2: Cluster, fault: str) -> None:
    """The node is named with its own reason and advice; the sound node runs nothing and keeps nothing."""
    break_it, keys, reason, hint = FAULTS[fault]
    host = cluster2.hosts[1]
    break_it(cluster2, host)
    done = _refused(cluster2, map_with_fake_torch(cluster2, nodes={host.name: keys}), ("--no-preflight",))
    head, problem = _blocks(done.stderr)
    assert head == ["gpulayer: error: 1 of 2 nodes cannot take part, so nothing was started"]
    assert problem[0].startswith("h01: ")
    assert reason.format(name=host.name) in problem[0]
    assert problem[1].startswith(hint)
    assert len(problem) == 2


def test_a_rendezvous_port_that_is_taken_is_found_before_the_start(cluster2: Cluster) -> None:
    """The head, and the head alone, needs the port: named, with the option that chooses another; then it runs."""
    _take_port(cluster2, cluster2.hosts[0])
    hosts = map_with_fake_torch(cluster2)
    head, problem = _blocks(_refused(cluster2, hosts, ("--no-preflight",)).stderr)
    assert head == ["gpulayer: error: 1 of 2 nodes cannot take part, so nothing was started"]
    assert problem == ["h00: port 29500 is in use", "hint: choose another with --master-port"]
    out = cluster2.new_folder("out")
    script = write_script(cluster2, TOUCH)
    assert run(cluster2.login, hosts, ["--master-port", "29501", "-e", f"OUT={out}"], script).returncode == 0
    assert run(cluster2.login, hosts, ["-x", "h00", "-e", f"OUT={out}"], script).returncode == 0


def test_one_of_eight_that_drops_packets_stops_all_after_one_timeout(cluster8: Cluster) -> None:
    """Seven are ready and one never answers: nothing starts, and it takes one connect timeout, not several."""
    cluster8.hosts[5].drop_syn()
    start = time.monotonic()
    done = _refused(cluster8, map_with_fake_torch(cluster8), ("--connect-timeout", "3"))
    took_s = time.monotonic() - start
    assert 3 <= took_s < 12
    head, problem = _blocks(done.stderr)
    assert head == ["gpulayer: error: 1 of 8 nodes cannot take part, so nothing was started"]
    assert problem[0].startswith("h05: ")
    assert "3 s" in problem[0]
    assert problem[1].startswith("hint: ")
    assert len(done.named("node_checked")) == 7


@pytest.mark.parametrize("preflight", [True, False])
def test_all_failures_are_reported_together_and_folded(cluster8: Cluster, preflight: bool) -> None:
    """Eight nodes with five reasons: each reason once, with its nodes, in node order; what checks find comes last."""
    hosts = cluster8.hosts
    faults = {"unknown host key": 1, "permission denied": 3, "sshd stopped": 5}
    nodes: dict[str, NodeKeys] = {}
    for fault, index in faults.items():
        break_it, keys, _, _ = FAULTS[fault]
        break_it(cluster8, hosts[index])
        nodes[hosts[index].name] = keys
    for index in (2, 6, 7):
        nodes[hosts[index].name] = {"workdir": "/nowhere/at all"}
    nodes["h04"] = {"python": "/opt/none/bin/python"}
    done = _refused(cluster8, map_with_fake_torch(cluster8, nodes=nodes), () if preflight else ("--no-preflight",))
    head, *problems = _blocks(done.stderr)
    count = 4 if preflight else 7
    assert head == [f"gpulayer: error: {count} of 8 nodes cannot take part, so nothing was started"]
    names = [problem[0].partition(": ")[0] for problem in problems]
    alone = ["h01", "h03", "h04", "h05"]
    assert names == ([*alone, "h[02,06-07]"] if preflight else [alone[0], "h[02,06-07]", *alone[1:]])
    assert all(problem[-1].startswith("hint: ") for problem in problems)


def test_an_ordinary_user_is_refused_in_the_same_words(cluster2: Cluster) -> None:
    """A folder that walker may not enter, and a host key that walker does not know."""
    hosts = map_with_fake_torch(cluster2, nodes={"h00": {"workdir": "/run/closed"}})
    cluster2.hosts[0].run(["mkdir", "-m", "700", "/run/closed"])
    known = cluster2.walker.home / ".ssh/known_hosts"
    known.write_text(known.read_text().splitlines(keepends=True)[0])
    problems = _blocks(_refused(cluster2, hosts, ("--no-preflight",), as_walker=True).stderr)[1:]
    assert problems[0][0] == "h00: workdir /run/closed cannot be entered: Permission denied"
    assert problems[1][0].startswith("h01: the host key of h01 port 22 is not in known_hosts")


def test_a_run_that_is_refused_says_so_in_its_folder_and_can_be_repeated(cluster2: Cluster) -> None:
    """plan.json and the events are there; once mended, the same line runs."""
    host = cluster2.hosts[1]
    host.stop_sshd()
    hosts = map_with_fake_torch(cluster2)
    done = _refused(cluster2, hosts)
    assert (done.run_dir / "plan.json").exists()
    host.start_sshd()
    out = cluster2.new_folder("out")
    assert run(cluster2.login, hosts, ["-e", f"OUT={out}"], write_script(cluster2, TOUCH)).returncode == 0
    assert sorted(path.name for path in out.iterdir()) == ["0", "1"]


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["--nnodes", "5"], "asked for 5 nodes"),
        (["-e", "A=$HOME/x"], "environment variable `A`: `$HOME` has no value there"),
        (["-C", "/data/${USER}"], "the working directory: `${USER}` has no value there"),
        (["-w", "h09"], "h09"),
    ],
)
def test_a_wrong_request_contacts_nobody_and_leaves_nothing(cluster2: Cluster, words: list[str], part: str) -> None:
    """Exit code 2 at once, even where no node could be reached; no run directory is made."""
    for host in cluster2.hosts:
        host.stop_sshd()
    done = run(cluster2.login, map_with_fake_torch(cluster2), words, "train.py")
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("gpulayer: error: ")
    assert part in done.stderr
    assert "hint: " in done.stderr
    assert (done.stdout, done.run_dir.exists()) == ("", False)


def test_a_loopback_address_is_refused_with_its_source(cluster2: Cluster) -> None:
    """Debian's 127.0.1.1 line on the login node is caught before anything is contacted, naming /etc/hosts."""
    hosts = cluster2.hosts_toml()
    hosts.write_text(hosts.read_text() + '[nodes.login]\nssh = "login"\n')
    done = run(cluster2.login, hosts, [], "train.py")
    assert done.returncode == 2, done.stderr
    assert "login" in done.stderr
    assert "127.0.1.1" in done.stderr
    assert "/etc/hosts" in done.stderr
    assert not done.run_dir.exists()


def test_a_run_directory_in_use_is_refused_before_anything_is_contacted(cluster2: Cluster) -> None:
    """One job id, one run directory: the second run changes nothing in it and starts nothing."""
    script = write_script(cluster2, TOUCH)
    out = cluster2.new_folder("out")
    hosts = map_with_fake_torch(cluster2)
    options = ["-e", f"OUT={out}", "--job-id", "twice-1"]
    first = run(cluster2.login, hosts, options, script)
    before = {path: path.read_bytes() for path in (cluster2.login.home / "runs/twice-1").rglob("*") if path.is_file()}
    for path in out.iterdir():
        path.unlink()
    second = run(cluster2.login, hosts, options, script)
    assert (first.returncode, second.returncode) == (0, 2)
    assert "twice-1 is not empty" in second.stderr
    assert {path: path.read_bytes() for path in before} == before
    assert list(out.iterdir()) == []


def test_stray_output_of_a_node_that_is_refused_does_not_reach_the_screen(cluster2: Cluster) -> None:
    """A login shell that only prints and exits is a node without a supervisor; its last words are quoted."""
    host = cluster2.hosts[1]
    host.path("/root/.bashrc").write_text("echo 'maintenance until noon'; exit 7\n")
    try:
        done = _refused(cluster2, map_with_fake_torch(cluster2))
    finally:
        host.path("/root/.bashrc").unlink()
    problem = _blocks(done.stderr)[1]
    assert problem[0] == "h01: logged in, but no supervisor answered (exit status 7): maintenance until noon"
    assert problem[1].startswith("hint: ")
