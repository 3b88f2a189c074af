"""What `ps`, `kill` and `hosts` say of what nodes told: tables, JSON, and what a node is taken for. And reading it."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import datetime
from typing import TYPE_CHECKING

import pytest

from gpulayer.errors import ConnectTimeoutError, HandshakeError
from gpulayer.events import Survivor
from gpulayer.facts import GpuFact, GpuProcess
from gpulayer.inventory import LeftJob, LeftProcess, NodeLease, Survey, parse_holders, parse_survey
from gpulayer.placement import Hold
from gpulayer.remains import (
    EndedJob,
    NodeSeen,
    age_text,
    ended_json,
    found_jobs,
    jobs_json,
    later_hint,
    render_ended,
    render_jobs,
)
from gpulayer.states import NodeFound, NodeState, by_record, hosts_json, hosts_rows, judge_node, with_record
from tests.support import plans

if TYPE_CHECKING:
    from gpulayer.errors import NodeError

NOON = datetime(2026, 11, 29, 12, 0, 0).timestamp()
LEASE = NodeLease("j1", "me", "login", NOON, "", None)
HELD = Hold("j1", "me", "login", NOON)


def job(job_id: str = "j1", marker: str = "a" * 32, **changes: object) -> LeftJob:
    """A job's part with torchrun and one rank."""
    processes = (
        LeftProcess(70, "S", "python3 -m torch.distributed.run", 90.0, None),
        LeftProcess(71, "R", "python3 -u train.py", 80.0, 2),
    )
    command = "python3 -m torch.distributed.run --nnodes 2 -- train.py"
    plain = LeftJob(job_id, marker, 1, "me", True, (68, 69), processes, 2, 90.0, command)
    return replace(plain, **changes)  # type: ignore[arg-type]


def gpu(*processes: tuple[int, int, int | None], state: str = "ok") -> GpuFact:
    """What the tool says: processes as (device, pid, MiB)."""
    found = tuple(GpuProcess(device, pid, "me", "python3", memory) for device, pid, memory in processes)
    return GpuFact("nvidia-smi", state, "", "570", 2, (), found)  # type: ignore[arg-type]


def seen(*jobs: LeftJob, leases: tuple[NodeLease, ...] = (), gpus: GpuFact | None = None) -> NodeSeen:
    """What a node said."""
    return NodeSeen(Survey(leases, jobs), gpus)


# --- ps -------------------------------------------------------------------------------------------------------------


def test_the_table_of_ps() -> None:
    """A row for each part of each job, ordered by job, then as the nodes are; the command is cut to the width."""
    other = job("j0", "b" * 32, supervisor=False, node_rank=None, count=1, age_s=200000.0, command="sleep 1000")
    found = found_jobs({"gpu-01": seen(job(), gpus=gpu((0, 71, 12_700), (0, 99, 500))), "gpu-02": seen(other)})
    assert render_jobs(found, 79) == (
        "job  node    rank  supervisor  procs  gpu mem   age   command\n"
        "j0   gpu-02  -     gone        1      -         2 d   sleep 1000\n"
        "j1   gpu-01  1     alive       2      12.4 GiB  90 s  python3 -m torch.distr...\n"
    )
    assert render_jobs(found, None).splitlines()[2].endswith(job().command)
    assert len(render_jobs(found, 10).splitlines()[2]) == 74  # never less than a few words of it


def test_users_are_named_where_there_are_two() -> None:
    """As root sees it."""
    found = found_jobs({"gpu-01": seen(job(), job("j2", "c" * 32, user="you"))})
    head, *rows = render_jobs(found, None).splitlines()
    assert head.split()[-2:] == ["user", "command"]
    assert [row.split()[8] for row in rows] == ["me", "you"]


def test_parts_of_one_machine_show_a_job_once() -> None:
    """The marker tells; also where one of them sees the keepers alone, and so its first letters."""
    nodes = {"gpu-01-a": seen(job()), "gpu-01-b": seen(job(marker="a" * 10))}
    (found,) = found_jobs(nodes)
    assert found.node_ids == ("gpu-01-a", "gpu-01-b")


@pytest.mark.parametrize(
    ("gpus", "memory_mib"),
    [
        (None, None),
        (gpu(state="failed"), None),
        (replace(gpu(), tool=None, state="missing"), None),
        (gpu(), 0),
        (gpu((0, 71, 100), (1, 71, 200), (1, 5, 7)), 300),
        (gpu((0, 71, None)), None),
    ],
)
def test_gpu_memory(gpus: GpuFact | None, memory_mib: int | None) -> None:
    """That of the job's own processes; None where there is no tool, or it does not say."""
    (found,) = found_jobs({"gpu-01": seen(job(), gpus=gpus)})
    assert found.gpu_memory_mib == memory_mib


def test_ages() -> None:
    """In the unit that suits it."""
    assert [age_text(age_s) for age_s in (0.2, 119, 120, 7199, 7200, 172_799, 172_800)] == [
        *("0 s", "119 s", "2 min", "120 min", "2 h", "48 h", "2 d")
    ]


def test_ps_for_scripts() -> None:
    """One document with a version, every job with its processes, and the nodes that could not be asked."""
    problems: dict[str, NodeError] = {"gpu-02": ConnectTimeoutError("no answer", hint="is it on?")}
    document = json.loads(jobs_json(found_jobs({"gpu-01": seen(job())}), problems))
    assert document["version"] == 1
    assert document["refused"] == [{"node_id": "gpu-02", "text": "no answer", "hint": "is it on?"}]
    (listed,) = document["jobs"]
    assert listed["processes"][1] == {
        "pid": 71,
        "rank": 2,
        "state": "R",
        "age_s": 80.0,
        "command": "python3 -u train.py",
    }
    assert {name: listed[name] for name in ("job_id", "nodes", "node_rank", "user", "supervisor", "keepers")} == {
        "job_id": "j1",
        "nodes": ["gpu-01"],
        "node_rank": 1,
        "user": "me",
        "supervisor": True,
        "keepers": [68, 69],
    }
    assert (listed["count"], listed["gpu_memory_mib"], listed["age_s"]) == (2, None, 90.0)


# --- kill -----------------------------------------------------------------------------------------------------------


def test_what_kill_says() -> None:
    """Nodes that fared alike share a line; what outlived SIGKILL is named; the others had nothing."""
    stuck = Survivor(77, "D", "cp /nfs/x .")
    ended = [
        EndedJob("gpu-01", "j1", 4, 0),
        EndedJob("gpu-02", "j1", 4, 0),
        EndedJob("gpu-03", "j1", 4, 2),
        EndedJob("gpu-04", "j1", 1, 0),
        EndedJob("gpu-05", "j1", 3, 2, (stuck,)),
    ]
    assert render_ended(ended, ["gpu-06", "gpu-07"], "j1") == (
        "job j1 on gpu-[01-02]: 4 processes ended; verified clean\n"
        "job j1 on gpu-03: 4 processes ended, 2 by SIGKILL; verified clean\n"
        "job j1 on gpu-04: 1 process ended; verified clean\n"
        "job j1 on gpu-05: 2 processes ended, 2 by SIGKILL; 1 process outlived SIGKILL\n"
        "    gpu-05: pid 77, state D, cp /nfs/x .\n"
        "nothing of job j1 runs on gpu-[06-07]\n"
    )
    assert render_ended([], ["gpu-01"], None) == "nothing of any job runs on gpu-01\n"
    both = [EndedJob("gpu-01", "j1", 4, 0), EndedJob("gpu-01", "j2", 4, 0)]
    assert render_ended(both, [], None) == "jobs j1, j2 on gpu-01: 4 processes ended; verified clean\n"
    document = json.loads(ended_json(ended[4:], ["gpu-06"], {}))
    assert document == {
        "version": 1,
        "ended": [
            {
                "job_id": "j1",
                "node": "gpu-05",
                "count": 3,
                "killed": 2,
                "verified_clean": False,
                "survivors": [{"pid": 77, "state": "D", "command": "cp /nfs/x ."}],
            }
        ],
        "nothing_on": ["gpu-06"],
        "refused": [],
    }


def test_the_command_for_later() -> None:
    """It can be pasted."""
    assert later_hint("j1", ["gpu-01", "gpu-02"]).startswith("`gpulayer kill j1 -w gpu-[01-02]` looks there again")
    assert later_hint("j1", ["a"], " -H 'my map.toml' -F none").startswith(
        "`gpulayer kill j1 -w a -H 'my map.toml' -F none` "
    )
    assert later_hint(None, ["gpu-01"]).startswith("`gpulayer kill --all -w gpu-01` ")


# --- hosts ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("said", "gpus", "state", "text"),
    [
        (seen(), None, "free", ""),
        (seen(job(), leases=(LEASE,)), None, "held", ""),
        (seen(job()), None, "dirty", "dirty: 4 processes of job j1"),
        (seen(job("j2"), leases=(replace(LEASE, gpus=(0,)),)), (1,), "dirty", "dirty: 4 processes of job j2"),
        (seen(job(), leases=(replace(LEASE, gpus=(0,)),)), (0,), "held", ""),
        (seen(job(), leases=(replace(LEASE, gpus=(0,)),)), (1,), "free", ""),
        (seen(leases=(replace(LEASE, scope="127.0.0.1:2201"),)), None, "free", ""),
        (seen(gpus=gpu((0, 5, 1), (1, 5, 1), (1, 6, 1))), None, "dirty", "dirty: 2 other processes on its GPUs"),
        (seen(gpus=gpu((0, 5, 1))), (1,), "free", ""),
        (seen(gpus=gpu((0, 5, 1)), leases=(replace(LEASE, gpus=(0,)),)), (1,), "free", ""),
        (
            seen(job(count=0, processes=()), gpus=gpu((0, 5, 1))),
            None,
            "dirty",
            "dirty: 2 processes of job j1, 1 other process on its GPUs",
        ),
        (seen(job(), gpus=gpu((0, 71, 1))), None, "dirty", "dirty: 4 processes of job j1"),
        (ConnectTimeoutError("no answer"), None, "unreachable", "unreachable: no answer"),
    ],
)
def test_what_a_node_is_taken_for(
    said: NodeSeen | NodeError, gpus: tuple[int, ...] | None, state: str, text: str
) -> None:
    """Held where a lease is on it, dirty where something runs that no lease is for, else free."""
    found = judge_node("", gpus, said)
    assert (found.state, found.text) == (state, text)
    assert found.hold == (HELD if state == "held" else None)


def test_the_login_nodes_record_counts_where_a_node_is_free() -> None:
    """A job that is about to come, or waits, is in the record alone."""
    found = {name: NodeFound(NodeState.FREE) for name in ("gpu-01", "gpu-02")}
    found["gpu-03"] = NodeFound(NodeState.DIRTY, "dirty: 1 process of job x")
    merged = with_record({"gpu-02": HELD, "gpu-03": HELD}, found)
    assert [one.state for one in merged.values()] == ["free", "held", "dirty"]
    nodes = plans.nodes(2, 2)
    assert [one.state for one in by_record(nodes, None).values()] == ["unknown", "unknown"]
    assert [one.state for one in by_record(nodes, {"gpu-01": HELD}).values()] == ["held", "free"]


def test_the_map_in_words_and_for_scripts() -> None:
    """Who has a node since when, or what is wrong with it."""
    nodes = [plans.node(1), plans.node(2, gpus=[0, 1], port=2222), plans.node(3)]
    waiting = replace(HELD, waiting=True)
    found = {
        "gpu-01": NodeFound(NodeState.HELD, hold=HELD),
        "gpu-02": NodeFound(NodeState.HELD, hold=waiting),
        "gpu-03": NodeFound(NodeState.UNREACHABLE, "unreachable: no answer"),
    }
    rows = hosts_rows(nodes, found)
    assert [row[1] for row in rows] == [
        f"held by j1 (me@login, since {HELD.clock('%H:%M')})",
        f"waited for by j1 (me@login, since {HELD.clock('%H:%M')})",
        "unreachable: no answer",
    ]
    document = json.loads(hosts_json(nodes, found))
    assert [node["state"] for node in document["nodes"]] == ["held", "held", "unreachable"]
    first, second, third = document["nodes"]
    assert first["held_by"] == {"job_id": "j1", "user": "me", "login": "login", "since": NOON, "waiting": False}
    assert (second["gpus"], second["port"], second["held_by"]["waiting"]) == ([0, 1], 2222, True)
    assert (third["held_by"], third["detail"], third["address"]) == (None, "unreachable: no answer", "10.0.0.13")


# --- what a node says -----------------------------------------------------------------------------------------------


def test_a_survey_is_read() -> None:
    """Each key has its place."""
    lease = {"job_id": "j1", "user": "me", "login": "login", "since": 5, "scope": "", "gpus": [0, 1]}
    process = {"pid": 71, "state": "R", "command": "sleep\x1b[31m", "age_s": 1, "rank": None}
    left: dict[str, object] = {
        "job_id": "j1",
        "marker": "m",
        "node_rank": None,
        "user": "me",
        "supervisor": False,
        "keepers": [],
    }
    left |= {"processes": [process], "count": 1, "age_s": 1.5, "command": "x"}
    survey = parse_survey(json.dumps({"leases": [lease], "jobs": [left]}).encode())
    assert survey.leases == (NodeLease("j1", "me", "login", 5.0, "", (0, 1)),)
    assert survey.jobs[0].processes[0].command == "sleep\ufffd[31m"
    assert parse_holders(json.dumps([lease]).encode()) == survey.leases


@pytest.mark.parametrize(
    "payload",
    [b"", b"[]", b"{}", b"[" * 5000, b'{"leases": [], "jobs": {}}', b'{"leases": [{"job_id": 5}], "jobs": []}'],
)
def test_what_is_no_survey(payload: bytes) -> None:
    """A node that says anything else is told of as one that does not answer as it should."""
    with pytest.raises(HandshakeError, match="the node's "):
        parse_survey(payload)
    with pytest.raises(HandshakeError, match="the node's list of holders"):
        parse_holders(payload)


def test_a_lease_from_the_end_of_time() -> None:
    """Anyone on a node can write a lease: a time that no clock has is still told."""
    assert str(replace(LEASE, since=1e18).hold).startswith("job j1 of me on login since 2096-")
    assert str(replace(LEASE, since=-1e18).hold).startswith("job j1 of me on login since 1970-")
