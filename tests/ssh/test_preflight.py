"""Preflight as a whole: all that is wrong is shown at once, nothing was started, and it takes no time to speak of."""

from __future__ import annotations

import json
import signal
import sys
import time
from typing import TYPE_CHECKING

import pytest

from tests.support.jobs import GPULAYER, map_with_fake_torch, run, write_script
from tests.support.preflight import check, hold_port, refused, write_program, write_torch
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from pathlib import Path

    from tests.conftest import ClusterFactory
    from tests.support.cluster import Cluster, TomlValue

pytestmark = pytest.mark.ssh


def _slow_python(cluster: Cluster) -> str:
    """A Python that runs the supervisor, which is started isolated, and then hangs: as on a broken file system."""
    text = f'#!/bin/sh\ncase "$1" in -I*) exec {sys.executable} "$@" ;; esac\nsleep 86397\n'
    return str(write_program(cluster.new_folder("bin") / "python3", text))


def _map_with_faults(cluster: Cluster) -> tuple[Path, int]:
    """A map of four nodes of which three have a fault of their own, and who holds the port on the head."""
    pid = hold_port(cluster.hosts[0], 29400)
    old = write_torch(cluster.new_folder("torch"), "1.9")
    nodes: dict[str, dict[str, TomlValue]] = {
        "h01": {"workdir": "/nowhere/at all"},
        "h02": {"env": {"PYTHONPATH": str(old)}},
        "h03": {"workdir": "/nowhere/at all"},
    }
    cluster.hosts[3].mount("-o", "remount,size=16m", "/dev/shm")
    return map_with_fake_torch(cluster, nodes=nodes), pid


def test_all_that_is_wrong_on_all_nodes_is_shown_at_once_and_nothing_was_started(cluster4: Cluster) -> None:
    """`run` and `check` say the same, as text and as data: failures first, nodes with one cause folded."""
    hosts, pid = _map_with_faults(cluster4)
    done = check(cluster4, hosts, ["--master-port", "29400"])
    assert [finding.partition("\n")[0] for finding in done.findings] == [
        f"h00: port 29400 is in use by pid {pid}, user root, `python3 /tmp/hold.py 29400 1`",
        "h[00-03]: different versions of torch:",
        "h[01,03]: workdir /nowhere/at all cannot be entered: No such file or directory",
        "warning: h03: /dev/shm has 16 MiB, 64 MiB or more is expected for 1 process",
    ]
    assert (done.returncode, done.verdict) == (3, "h[00-03]: a job would not run")
    data = check(cluster4, hosts, ["--master-port", "29400", "--format", "json"])
    found = [(one["check"], one["severity"], one["nodes"]) for one in data.data["findings"]]
    assert found == [
        ("port-taken", "failure", ["h00"]),
        ("torch-differs", "failure", ["h00", "h01", "h02", "h03"]),
        ("workdir", "failure", ["h01", "h03"]),
        ("shm-small", "warning", ["h03"]),
    ]
    assert (data.returncode, data.data["ok"], data.data["master_port"]) == (3, False, 29400)
    ran = refused(cluster4, hosts, ["--master-port", "29400"])
    head, *blocks = ran.stderr[ran.stderr.index("gpulayer: error:") :].strip().split("\n\n")
    assert head == "gpulayer: error: the job would not run on h[00-03], so nothing was started"
    assert [block.partition("\n")[0] for block in blocks[:3]] == [one.partition("\n")[0] for one in done.findings[:3]]
    assert ran.receipt["findings"][0] == data.data["findings"][0]
    assert (ran.receipt["exit_code"], ran.receipt["refused"]) == (3, [])


def test_without_preflight_only_what_is_needed_to_start_is_looked_at(cluster2: Cluster) -> None:
    """A script that differs runs then; a folder that cannot be entered still keeps the job from starting."""
    for host, word in zip(cluster2.hosts, ("one", "two"), strict=True):
        host.path("/root/train.py").write_text(f"print({word!r})\n")
    hosts = map_with_fake_torch(cluster2, defaults={"workdir": "/root"})
    assert check(cluster2, hosts, [], "train.py").returncode == 3
    done = run(cluster2.login, hosts, ["--no-preflight"], "train.py")
    assert (done.returncode, done.log(0, 0), done.log(1, 1)) == (0, b"one\n", b"two\n")
    assert done.named("node_checked") == []
    missing = refused(
        cluster2, map_with_fake_torch(cluster2, nodes={"h01": {"workdir": "/nowhere"}}), ["--no-preflight"]
    )
    assert "h01: workdir /nowhere cannot be entered: No such file or directory" in missing.stderr


def test_a_node_that_hangs_is_named_by_the_time_limit_and_the_others_are_checked(cluster4: Cluster) -> None:
    """h02 does not answer: what is wrong elsewhere is told beside it, and nothing of the others is blamed."""
    nodes = {"h02": {"python": _slow_python(cluster4)}, "h03": {"scratch": "/nowhere"}}
    hosts = map_with_fake_torch(cluster4, nodes=nodes)
    done = check(cluster4, hosts, ["--preflight-timeout", "3"])
    assert done.findings == [
        (
            "h02: no answer to the checks within 3 s\n"
            "hint: log in and see what hangs: a network file system (`df`), the GPU driver (`nvidia-smi`); "
            "`--preflight-timeout` gives it longer (troubleshooting: no-answer)"
        ),
        (
            "h03: no folder for the job's output can be made in /nowhere: No such file or directory\n"
            "hint: free or open it for your user, or name another with `scratch` in the hosts map "
            "(troubleshooting: scratch)"
        ),
    ]
    assert done.returncode == 3
    assert any(line.startswith("gpulayer: checking, 3 of 4 done, waiting for h02 (") for line in done.progress)
    assert done.took_s < 15
    wait_until(lambda: cluster4.hosts[2].strays() == [], "what hung is ended")


@pytest.mark.parametrize("command", ["run", "check"])
def test_ctrl_c_during_preflight_ends_at_once_and_leaves_nothing(cluster2: Cluster, command: str) -> None:
    """Exit code 130, though a node hangs; no traceback, nothing started, no process and no folder left."""
    hosts = map_with_fake_torch(cluster2, nodes={"h01": {"python": _slow_python(cluster2)}})
    script = write_script(cluster2, "print('never')")
    process = cluster2.login.popen([*GPULAYER, command, "--hosts", str(hosts), str(script)])
    try:
        wait_until(
            lambda: any("86397" in p.argv for p in cluster2.hosts[1].processes()), "the checks run", timeout_s=30
        )
        start = time.monotonic()
        process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate(timeout=20)
    finally:
        process.kill()
        process.communicate()
    assert time.monotonic() - start < 5
    assert process.returncode == 130
    assert b"Traceback" not in stderr
    assert stdout == b""
    wait_until(lambda: all(host.strays() == [] for host in cluster2.hosts), "nothing is left")
    assert [list(host.path("/tmp").glob("gpulayer-*")) for host in cluster2.hosts] == [[], []]


def test_a_python_that_cannot_run_the_checks_is_told_in_its_own_words(cluster2: Cluster) -> None:
    """The job's own Python ends with a message: the node, the interpreter and the last line."""
    text = f'#!/bin/sh\ncase "$1" in -I*) exec {sys.executable} "$@" ;; esac\necho "no licence left" >&2\nexit 4\n'
    python = str(write_program(cluster2.new_folder("bin") / "python3", text))
    done = refused(cluster2, map_with_fake_torch(cluster2, nodes={"h01": {"python": python}}))
    assert f"h01: `{python}` could not run the checks: no licence left\nhint: try it there; " in done.stderr


def test_a_node_that_cannot_be_reached_is_data_too(cluster2: Cluster) -> None:
    """`check --format json` says who cannot take part, and what was found on the others; exit code 3."""
    cluster2.hosts[1].stop_sshd()
    hosts = map_with_fake_torch(cluster2)
    done = cluster2.login.run([*GPULAYER, "check", "--hosts", str(hosts), "--format", "json"])
    assert (done.returncode, done.stderr) == (3, "")
    told = json.loads(done.stdout)
    assert (told["ok"], told["findings"], told["nodes"]) == (False, [], ["h00", "h01"])
    assert [one["node_id"] for one in told["refused"]] == ["h01"]
    assert "refuses connections" in told["refused"][0]["text"]
    assert list(told["rendezvous_rtt_ms"]) == ["h00"]


def test_four_nodes_are_checked_within_a_second(cluster4: Cluster) -> None:
    """From the last login to the start, on the clock of the events; docs/performance.md has what was measured."""
    assert _checking_took_s(cluster4) < 1.0


@pytest.mark.timeout(180)
def test_sixty_four_nodes_are_checked_within_four_seconds(make_cluster: ClusterFactory) -> None:
    """Every node tries six others and the head; all are found to be well."""
    assert _checking_took_s(make_cluster(64)) < 4.0


def _checking_took_s(cluster: Cluster) -> float:
    """Return the seconds between connecting and starting."""
    hosts, script = map_with_fake_torch(cluster), write_script(cluster, "print(1)")
    done = run(cluster.login, hosts, [], script, timeout_s=120)
    assert done.returncode == 0, done.stderr
    assert len(done.named("node_checked")) == len(cluster.hosts)
    stages = {entry["stage"]: float(entry["t"]) for entry in done.named("stage_reached")}
    return stages["starting"] - stages["preparing"]
