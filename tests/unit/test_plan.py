"""The plan holds every node's resolved command, obeys every field of map and job, and refuses what has no value."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path

import pytest
from pydantic import ValidationError

from gpulayer import __version__
from gpulayer.errors import JobError, PlaceholderError
from gpulayer.hosts import Node
from gpulayer.job import DistributedJob, EnvValue, RendezvousSpec
from gpulayer.placeholders import PLACEHOLDERS
from gpulayer.plan import Plan, build_plan, check_job_id, new_job_id, plan_json
from tests.support.plans import CWD, JOB_ID, node, nodes, place, plan, script


def test_node_command() -> None:
    """A node's part of the plan says where to log in, what to run, in which folder and with which environment."""
    chosen = [
        node(1),
        node(2, ssh="two.cluster", user="me", port=2222, interface="ib0", scratch="/scratch/", gpus=[3, 5]),
    ]
    first, second = plan(script("$NODE_RANK"), chosen).nodes
    assert (first.node_rank, first.node_id, first.ssh, first.user, first.port) == (0, "gpu-01", "gpu-01", None, None)
    assert (first.address, first.ranks, first.interface) == ("10.0.0.11", (0, 1), None)
    assert (second.node_rank, second.node_id, second.ssh, second.user, second.port) == (
        *(1, "gpu-02", "two.cluster"),
        *("me", 2222),
    )
    assert (second.address, second.ranks, second.interface) == ("10.0.0.12", (2, 3), "ib0")
    assert second.job_dir == f"/scratch/gpulayer-{JOB_ID}-n1"
    assert second.argv[second.argv.index("--log-dir") + 1] == f"/scratch/gpulayer-{JOB_ID}-n1/ranks"
    assert (second.argv[0], second.argv[-1], second.python, second.workdir) == ("python3", "1", "python3", str(CWD))
    assert second.env == {
        "GPULAYER_JOB_ID": JOB_ID,
        "GPULAYER_OUTPUT_DIR": f"/scratch/gpulayer-{JOB_ID}-n1/outputs",
        "CUDA_VISIBLE_DEVICES": "3,5",
        "GLOO_SOCKET_IFNAME": "ib0",
        "NCCL_SOCKET_IFNAME": "=ib0",
        "TP_SOCKET_IFNAME": "ib0",
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "PYTHONUNBUFFERED": "1",
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "29",
        "OMP_NUM_THREADS": "1",
    }


def test_plan_is_pure() -> None:
    """The same request gives the same plan."""
    assert plan(script("$JOB_ID"), nodes(2, 1)) == plan(script("$JOB_ID"), nodes(2, 1))


def shown(job: DistributedJob, *chosen: Node) -> str:
    """Return the JSON of a plan and what `run` obeys besides it."""
    made = plan(job, chosen)
    return json.dumps(plan_json(made)) + str([(each.python, each.job_dir) for each in made.nodes])


NODE_CHANGES: dict[str, object] = {
    "id": "other",
    "ssh": "other.cluster",
    "port": 2222,
    "user": "someone",
    "address": "10.9.9.9",
    "python": "/opt/python",
    "workdir": "/elsewhere",
    "gpus": [0, 1],
    "interface": "ib0",
    "scratch": "/scratch",
    "env": {"A": "b"},
}


def test_every_node_field_is_obeyed() -> None:
    """Whatever field of a node changes, the plan changes."""
    assert NODE_CHANGES.keys() == Node.model_fields.keys()
    for name, value in NODE_CHANGES.items():
        assert shown(script(), node(1, **{name: value})) != shown(script(), node(1)), name


JOB_CHANGES: dict[str, object] = {
    "entrypoint": "other.py",
    "args": ("x",),
    "module": True,
    "nproc_per_node": 1,
    "rendezvous": RendezvousSpec(port=29511),
    "launcher": "deepspeed",
    "comm_backend": "gloo",
    "python": "/opt/python",
    "workdir": "sub",
    "bundle": "code",
    "outputs": ("model.pt",),
    "max_output_bytes": 5,
    "interface": "ib0",
    "env": {"A": EnvValue("b")},
    "timeout_s": 60.0,
    "grace_s": 5.0,
    "lost_after_s": 5.0,
}


# Fields that are obeyed before there is a plan, and fields that have one value.
BEFORE_THE_PLAN = {"nnodes", "max_bundle_bytes"}
ONE_VALUE = {"failure_policy", "max_attempts"}


def test_every_job_field_is_obeyed() -> None:
    """Whatever field of a job changes, the plan changes, but for what is obeyed before and what has one value."""
    assert JOB_CHANGES.keys() == DistributedJob.model_fields.keys() - BEFORE_THE_PLAN - ONE_VALUE
    for name, value in JOB_CHANGES.items():
        assert shown(script(**{name: value}), node(1)) != shown(script(), node(1)), name
    for name, value in (("join_timeout_s", 5), ("kind", "c10d")):
        other = script(rendezvous=RendezvousSpec.model_validate({name: value}))
        assert shown(other, node(1)) != shown(script(), node(1))
    for name in ONE_VALUE:
        with pytest.raises(ValidationError):
            script(**{name: "other"})
    assert not plan(script(rendezvous=RendezvousSpec(port_is_default=False)), nodes(1)).port_is_default


def env_of(job: DistributedJob, chosen: Node) -> dict[str, str]:
    """Return the environment of a job on one node."""
    return dict(plan(job, [chosen]).nodes[0].env)


def test_command_line_environment_wins() -> None:
    """`--env` wins over the map, and both over what gpulayer would set."""
    job = script(env={"A": EnvValue("job"), "OMP_NUM_THREADS": EnvValue("4")}, grace_s=0)
    env = env_of(job, node(1, env={"A": "map", "B": "map", "PYTHONUNBUFFERED": ""}))
    assert (env["A"], env["B"], env["OMP_NUM_THREADS"], env["PYTHONUNBUFFERED"]) == ("job", "map", "4", "")
    assert env["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] == "1"


def test_environment_is_substituted() -> None:
    """Values are text with placeholders, but for those passed by name from the login environment: they are data."""
    job = script(env={"A": EnvValue("$NODE_ID"), "B": EnvValue("$NODE_ID $HOME $(x)", literal=True)})
    env = env_of(job, node(1, env={"C": "${MASTER_ADDR}", "D": "${DOLLAR}HOME", "B": "$NOPE"}))
    assert (env["A"], env["B"], env["C"], env["D"]) == ("gpu-01", "$NODE_ID $HOME $(x)", "10.0.0.11", "$HOME")


def test_threads_are_alike_on_uneven_nodes() -> None:
    """OMP_NUM_THREADS is set on all nodes if it is on one: torchrun would set it only where there are several ranks."""
    assert [each.env.get("OMP_NUM_THREADS") for each in plan(script(), nodes(1, 2)).nodes] == ["1", "1"]
    assert [each.env.get("OMP_NUM_THREADS") for each in plan(script(), nodes(1, 1)).nodes] == [None, None]


@pytest.mark.parametrize(
    ("env", "settings", "keys", "message"),
    [
        (
            {"CUDA_VISIBLE_DEVICES": "0"},
            {},
            {"gpus": [2, 3]},
            "node gpu-01: `CUDA_VISIBLE_DEVICES` is `0`, but `gpus` makes it `2,3`",
        ),
        (
            {"GPULAYER_COMM_BACKEND": "nccl"},
            {"comm_backend": "gloo"},
            {},
            "node gpu-01: `GPULAYER_COMM_BACKEND` is `nccl`, but `--backend` makes it `gloo`",
        ),
    ],
)
def test_contradictions(
    env: dict[str, str], settings: dict[str, object], keys: dict[str, object], message: str
) -> None:
    """A variable that says another thing than an option or field is refused, from the command line and from the map."""
    with pytest.raises(JobError) as caught:
        plan(script(env={name: EnvValue(value) for name, value in env.items()}, **settings), [node(1, **keys)])
    assert str(caught.value) == message
    with pytest.raises(JobError) as caught:
        plan(script(**settings), [node(1, env=env, **keys)])
    assert str(caught.value) == message


def test_owned_names_in_the_map() -> None:
    """A variable that torchrun sets is refused in the map too, naming the node."""
    with pytest.raises(JobError, match="the hosts map, `env` of node gpu-02: `MASTER_PORT` cannot be set"):
        plan(script(), [node(1), node(2, env={"MASTER_PORT": "1"})])


@pytest.mark.parametrize(
    ("job", "map_workdir", "expected"),
    [
        (None, None, "/home/me/project"),
        (None, "/shared/$NODE_ID", "/shared/gpu-01"),
        ("/data/${JOB_ID}", "/shared", f"/data/{JOB_ID}"),
        ("sub/./$NODE_RANK", "/shared", "/home/me/project/sub/0"),
        (".", "/shared", "/home/me/project"),
        ("a'${DOLLAR}(touch x)'b", None, "/home/me/project/a'$(touch x)'b"),
    ],
)
def test_workdir(job: str | None, map_workdir: str | None, expected: str) -> None:
    """The working directory is the option's, else the map's, else where gpulayer was started, which is the base."""
    assert plan(script(workdir=job), [node(1, workdir=map_workdir)]).nodes[0].workdir == expected


def test_start_folder_is_data() -> None:
    """The folder that gpulayer was started in is used as it is, whatever its name looks like."""
    cwd = Path("/tmp/a'$(touch pwned)'$HOME$NODE_RANK")
    assert build_plan(script(), place(nodes(1)), JOB_ID, cwd).nodes[0].workdir == str(cwd)
    assert build_plan(script(workdir="x"), place(nodes(1)), JOB_ID, cwd).nodes[0].workdir == f"{cwd}/x"


@pytest.mark.parametrize(
    ("settings", "keys", "message"),
    [
        ({"args": ("a", "--x=$SCRATCH/y")}, {}, "argument 2: `$SCRATCH` has no value there"),
        ({"args": ("${HOME}",)}, {}, "argument 1: `${HOME}` has no value there"),
        ({"args": ("$LOCAL_RANK",)}, {}, "argument 1: `$LOCAL_RANK` has no value there"),
        ({"args": ("$(hostname)",)}, {}, "argument 1: `$(hostname)` has no value there"),
        ({"entrypoint": "$HOME/t.py"}, {}, "argument 0 (the script): `$HOME` has no value there"),
        ({"env": {"A": EnvValue("$B")}}, {}, "environment variable `A`: `$B` has no value there"),
        ({}, {"env": {"A": "$B"}}, "environment variable `A`: `$B` has no value there"),
        ({"workdir": "$HOME/x"}, {}, "the working directory: `$HOME` has no value there"),
        ({}, {"workdir": "/x/$USER"}, "the working directory: `$USER` has no value there"),
        ({"interface": "$IF"}, {}, "the interface: `$IF` has no value there"),
    ],
)
def test_survivors(settings: dict[str, object], keys: dict[str, object], message: str) -> None:
    """A name without a value is an error that names node, place, name, and what there is."""
    with pytest.raises(PlaceholderError) as caught:
        plan(script(**settings), [node(1, **keys)])
    assert str(caught.value) == f"node gpu-01: {message}"
    assert caught.value.exit_code == 2
    hint = caught.value.hint or ""
    assert all(f"${name}" in hint for name in PLACEHOLDERS)
    assert "$LOCAL_RANK" in hint
    assert "`${DOLLAR}`" in hint


def test_survivors_on_many_nodes() -> None:
    """Each place is named once, with the nodes where it is wrong; a place that is overridden is not."""
    chosen = [node(1, workdir="/$A"), *(node(number, workdir="/$A", env={"E": "$B"}) for number in (2, 3, 4))]
    with pytest.raises(PlaceholderError) as caught:
        plan(script("$C", "$C $D", workdir="/x"), chosen)
    assert str(caught.value).splitlines() == [
        "node gpu-01: argument 1: `$C` has no value there, nor on gpu-[02-04]",
        "node gpu-01: argument 2: `$C` has no value there, nor on gpu-[02-04]",
        "node gpu-01: argument 2: `$D` has no value there, nor on gpu-[02-04]",
        "node gpu-02: environment variable `E`: `$B` has no value there, nor on gpu-[03-04]",
    ]


def test_job_ids() -> None:
    """An id made of time and chance is valid, and sorts by time."""
    assert new_job_id(datetime(2026, 11, 29, 15, 2, 10), "k3f9") == JOB_ID
    assert check_job_id("a.B_c-1") == "a.B_c-1"


@pytest.mark.parametrize("job_id", ["", "..", "-x", ".x", "a/b", "a b", "a\n", "$NODE_ID", "ä", "x" * 65])
def test_bad_job_ids(job_id: str) -> None:
    """An id that cannot name a folder and a rendezvous is refused."""
    with pytest.raises(JobError, match="cannot be a job id"):
        build_plan(script(), place(nodes(1)), job_id, CWD)


def test_json() -> None:
    """The JSON has the documented keys, and nothing but what JSON holds."""
    made = plan(script("--x"), [node(1), node(2, gpus=1)])
    document = json.loads(json.dumps(plan_json(made)))
    first = document["nodes"][0]
    assert first.pop("argv") == list(made.nodes[0].argv)
    assert first.pop("env") == made.nodes[0].env
    assert first == {
        "node_rank": 0,
        "node_id": "gpu-01",
        "ssh": "gpu-01",
        "user": None,
        "port": None,
        "address": "10.0.0.11",
        "nproc_per_node": 2,
        "ranks": [0, 1],
        "workdir": str(CWD),
        "interface": None,
        "gpus": None,
        "python": "python3",
        "job_dir": f"/tmp/gpulayer-{JOB_ID}-n0",
        "outputs": [],
        "script_at": made.nodes[0].argv.index("--") + 1,
    }
    assert len(document.pop("nodes")) == 2
    assert document.pop("digest") == made.digest
    assert document == {
        "version": 1,
        "gpulayer": __version__,
        "job_id": JOB_ID,
        "launcher": "torchrun",
        "rendezvous": "static",
        "nnodes": 2,
        "world_size": 3,
        "uneven": True,
        "practice": False,
        "master_addr": "10.0.0.11",
        "master_port": 29500,
        "join_timeout_s": 300,
        "grace_s": 30,
        "lost_after_s": 30,
        "timeout_s": None,
        "max_output_bytes": 10**10,
        "bundle": None,
        "script": None,
        "recipe": None,
    }


@pytest.mark.parametrize("literal", [True, False])
def test_secrets(literal: bool) -> None:
    """A value whose name looks secret is masked in JSON and real in the plan, whichever way it was given."""
    made = plan(script(env={"HF_TOKEN": EnvValue("hf_abc", literal)}), [node(1, env={"API_KEY": "k-123", "OPEN": "o"})])
    env = made.nodes[0].env
    assert (env["HF_TOKEN"], env["API_KEY"], env["OPEN"]) == ("hf_abc", "k-123", "o")
    text = json.dumps(plan_json(made))
    assert "hf_abc" not in text
    assert "k-123" not in text
    hidden = made.nodes[0].shown_env()
    assert (hidden["HF_TOKEN"], hidden["API_KEY"], hidden["OPEN"]) == ("***", "***", "o")


def test_practice_and_unevenness_are_said() -> None:
    """The plan says when the nodes differ in process counts, and when they are a practice cluster."""
    practice: Plan = plan(script(), [node(1, address="127.0.0.1")], practice=True)
    assert (practice.practice, practice.uneven, practice.world_size, practice.nnodes) == (True, False, 2, 1)
    assert plan(script(), nodes(1, 2)).uneven
