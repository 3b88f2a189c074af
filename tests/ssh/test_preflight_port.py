"""Preflight on the rendezvous: a port that is taken and by whom, the next free one, one taken at the last moment."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from tests.support import leaks
from tests.support.jobs import TELL, launch, map_with_fake_torch, run, told, write_script
from tests.support.preflight import check, hold_port, refused
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from tests.support.cluster import Cluster

pytestmark = pytest.mark.ssh

HINT = (
    "\nhint: name another with `--master-port`; without it, the first free one up to 29599 is used "
    "(troubleshooting: port-taken)"
)
# Takes the port as soon as nobody listens on it, beside whoever has bound it with SO_REUSEADDR and does not listen.
THIEF = """
import socket, sys, time
port = int(sys.argv[1])
while True:
    taken = socket.socket()
    taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        taken.bind(("", port))
        taken.listen()
        break
    except OSError:
        taken.close()
        time.sleep(0.01)
while True:
    guest, _ = taken.accept()
"""


def test_a_port_that_was_asked_for_and_is_taken_is_refused_and_its_holder_named(cluster2: Cluster) -> None:
    """Root is told pid, command and user; an ordinary user at least whose it is. Nothing is started."""
    head = cluster2.hosts[0]
    by_root, by_walker = hold_port(head, 29400), hold_port(head, 29410, user="walker")
    hosts = map_with_fake_torch(cluster2)
    roots = check(cluster2, hosts, ["--master-port", "29400"])
    assert roots.findings == [
        f"h00: port 29400 is in use by pid {by_root}, user root, `python3 /tmp/hold.py 29400 1`" + HINT
    ]
    assert (roots.returncode, roots.verdict) == (3, "h[00-01]: a job would not run")
    done = refused(cluster2, hosts, ["--master-port", "29410"])
    head_line, finding = done.stderr.strip().split("\n\n")
    assert head_line == "gpulayer: error: the job would not run on h00, so nothing was started"
    assert finding == (
        f"h00: port 29410 is in use by pid {by_walker}, user walker, `python3 /tmp/hold.py 29410 1`" + HINT
    )
    assert [entry["check"] for entry in done.receipt["findings"]] == ["port-taken"]
    seen = check(cluster2, hosts, ["--master-port", "29400"], login=cluster2.walker)
    assert seen.findings == ["h00: port 29400 is in use by user root, in a process that is not visible to you" + HINT]


def test_a_port_that_may_not_be_had_or_that_others_get_by_chance_is_told_of(cluster2: Cluster) -> None:
    """A privileged one is refused to an ordinary user; one of the ephemeral range is a warning."""
    hosts = map_with_fake_torch(cluster2)
    denied = check(cluster2, hosts, ["--master-port", "80"], login=cluster2.walker)
    assert denied.findings == [
        (
            "h00: port 80 cannot be used: Permission denied\n"
            "hint: name a port from 1024 up with `--master-port` (troubleshooting: port-denied)"
        )
    ]
    assert denied.returncode == 3
    chance = check(cluster2, hosts, ["--master-port", "40123"])
    assert chance.findings == [
        (
            "warning: h00: port 40123 is one of 32768-60999, which the kernel gives to outgoing connections\n"
            "hint: name one outside of them with `--master-port`, or add it to net.ipv4.ip_local_reserved_ports on the "
            "node (troubleshooting: port-ephemeral)"
        )
    ]
    assert (chance.returncode, chance.verdict) == (0, "h[00-01]: a job would run, with 1 warning")


def test_the_default_port_moves_to_the_next_free_one_and_says_so(cluster2: Cluster) -> None:
    """29500 and 29501 are taken: plan, torchrun and script have 29502; with all of them taken the job is refused."""
    pid = hold_port(cluster2.hosts[0], 29500, count=2)
    hosts, script = map_with_fake_torch(cluster2), write_script(cluster2, TELL)
    done = run(cluster2.login, hosts, ["-e", f"OUT={script.parent}", "-e", "WHERE=$MASTER_PORT"], script)
    assert done.returncode == 0, done.stderr
    (notice,) = done.named("notice")
    assert notice["text"] == (
        f"port 29500 on h00 is in use by pid {pid}, user root, `python3 /tmp/hold.py 29500 2`, "
        "so port 29502 is used instead"
    )
    assert done.stderr.count("is used instead") == 1
    seen = [told(script.parent)[rank]["env"] for rank in (0, 1)]
    assert [env["MASTER_PORT"] for env in seen] == [env["WHERE"] for env in seen] == ["29502", "29502"]
    plan = json.loads((done.run_dir / "plan.json").read_text())
    assert plan["master_port"] == 29502
    assert [("29502" in node["argv"], "29500" in node["argv"]) for node in plan["nodes"]] == [(True, False)] * 2
    hold_port(cluster2.hosts[0], 29502, count=98)
    none = check(cluster2, hosts)
    assert none.findings == [
        (
            f"h00: port 29500 is in use by pid {pid}, user root, `python3 /tmp/hold.py 29500 2`\n"
            "hint: the ports after it are taken too, up to 29599; name a free one with `--master-port` "
            "(troubleshooting: port-taken)"
        )
    ]
    assert none.returncode == 3


def test_a_port_that_another_job_of_gpulayer_holds_is_left_to_it(cluster2: Cluster) -> None:
    """Its ranks may not listen yet: a second job moves on by itself, and is refused where it insists."""
    first, second = (map_with_fake_torch(cluster2, defaults={"gpus": [gpu]}) for gpu in (0, 1))
    with launch(
        cluster2.login, first, ["--grace", "1"], write_script(cluster2, "import time; time.sleep(1000)")
    ) as live:
        live.wait_for_event("rank_started", rank=1)
        argv = ["--hosts", str(second)]
        insists = cluster2.login.run(["python", "-m", "gpulayer", "check", *argv, "--master-port", "29500"])
        moves = cluster2.login.run(["python", "-m", "gpulayer", "check", *argv])
        live.interrupt()
        live.finish()
    assert insists.stdout.startswith("h00: port 29500 is in use by another job of gpulayer" + HINT)
    assert (insists.returncode, moves.returncode) == (3, 0)
    assert moves.stdout == (
        "port 29500 on h00 is in use by another job of gpulayer, so port 29501 is used instead\n\n"
        "h[00-01]: a job would run\n"
    )


@pytest.mark.torch
@pytest.mark.timeout(180)
def test_a_port_that_is_taken_after_the_check_ends_the_job_with_its_reason(cluster2: Cluster) -> None:
    """A process that binds beside the reservation and listens first: the job fails at once, and says that it did."""
    head = cluster2.hosts[0]
    script = write_script(cluster2, "print('never')")
    hosts = cluster2.hosts_toml()
    with launch(cluster2.login, hosts, ["--master-port", "29510", "--grace", "2"], script) as live:
        live.wait_for_event("command_started", node_rank=0)
        head.start(["python3", "-c", THIEF, "29510"])
        done = live.finish(100)
    assert done.returncode not in (0, 3), done.stderr
    assert done.receipt["cause"]["node_id"] == "h00"
    assert "EADDRINUSE" in done.stderr
    hint = "another process took port 29510 on h00 after it was found free: start the job again, or name another port"
    assert f"\n  hint: {hint} with `--master-port`\n" in done.stderr
    assert done.receipt["took_s"] < 60
    wait_until(lambda: leaks.job_processes(cluster2) == [], "the nodes are clean")
