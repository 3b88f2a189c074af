"""Launchers other than torchrun: their own parsers read what is rendered, and what they cannot do is refused."""

from __future__ import annotations

import argparse
import base64
import json
from typing import TYPE_CHECKING, Any

import pytest

from gpulayer.errors import JobError, PlacementError
from gpulayer.job import LAUNCHER_NAMES, DistributedJob, RendezvousSpec
from gpulayer.launchers import LAUNCHERS, arranged
from gpulayer.placement import by_address
from gpulayer.review import render_shell, render_text
from tests.support.plans import JOB_ID, node, nodes, plan, script

if TYPE_CHECKING:
    from gpulayer.hosts import Node
    from gpulayer.plan import NodeCommand

WORDS = ("--num_machines", "9", "--", "a b", "$5", "a$$b", "--master_port=1", "-m")

# The options of deepspeed/launcher/launch.py in DeepSpeed 0.19.8, as it declares them. DeepSpeed itself is too large a
# package for a test; nothing here runs it.
DEEPSPEED_OPTIONS: dict[str, dict[str, Any]] = {
    "--node_rank": {"type": int, "default": 0},
    "--master_addr": {"type": str, "default": "127.0.0.1"},
    "--master_port": {"type": int, "default": 29500},
    "--world_info": {"type": str, "default": "None"},
    "--module": {"action": "store_true"},
    "--no_python": {"action": "store_true"},
    "--no_local_rank": {"action": "store_true"},
    "--save_pid": {"type": int, "default": 0},
    "--enable_each_rank_log": {"type": str, "default": "None"},
    "--bind_cores_to_rank": {"action": "store_true"},
    "--bind_core_list": {"type": str, "default": None},
    "--log_level": {"type": str, "default": "info", "choices": ["debug", "info", "warning", "error", "critical"]},
    "-q": {"action": "store_true"},
}


def deepspeed_parser() -> argparse.ArgumentParser:
    """Return a parser as DeepSpeed's launcher of one node makes it."""
    parser = argparse.ArgumentParser()
    for name, about in DEEPSPEED_OPTIONS.items():
        parser.add_argument(name, **about)
    parser.add_argument("training_script", type=str)
    parser.add_argument("training_script_args", nargs=argparse.REMAINDER)
    return parser


def commands(launcher: str, chosen: list[Node], **settings: object) -> tuple[NodeCommand, ...]:
    """Return the commands of a job with WORDS as arguments."""
    return plan(script(*WORDS, launcher=launcher, **settings), chosen).nodes


def test_every_launcher_is_in_the_table() -> None:
    """What the job file takes is what there is."""
    assert set(LAUNCHERS) == set(LAUNCHER_NAMES)


# --- accelerate -----------------------------------------------------------------------------------------------------


@pytest.mark.torch
@pytest.mark.parametrize("module", [False, True])
def test_accelerate_reads_its_command(module: bool) -> None:
    """Accelerate's own parser finds each value; what it leaves to torchrun's parser is in the environment."""
    launch = pytest.importorskip("accelerate.commands.launch")
    for node_rank, command in enumerate(commands("accelerate", nodes(2, 2), module=module)):
        python, dash_m, name, *words = command.argv
        assert (python, dash_m, name) == ("python3", "-m", "accelerate.commands.launch")
        args = launch.launch_command_parser().parse_args(words)
        assert (args.num_machines, args.num_processes, args.machine_rank) == (2, 4, node_rank)
        assert (args.main_process_ip, args.main_process_port, args.same_network) == ("10.0.0.11", 29500, True)
        assert (args.rdzv_backend, args.rdzv_conf, args.multi_gpu) == ("static", "timeout=300", True)
        assert (args.max_restarts, args.monitor_interval, args.tee, args.role) == (0, 0.1, "0", "default")
        assert args.log_dir == f"{command.job_dir}/ranks"
        assert (args.training_script, bool(args.module)) == ("train.py", module)
        assert args.training_script_args == [word.replace("$", "$$") for word in WORDS]  # torchrun halves them again
        assert (command.env["PET_RDZV_ID"], command.env["PET_REDIRECTS"]) == (JOB_ID, "3")


@pytest.mark.torch
def test_torchrun_finds_the_rest_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """What Accelerate has no option for reaches torchrun's parser, which Accelerate fills from its own."""
    run = pytest.importorskip("torch.distributed.run")
    launching = pytest.importorskip("accelerate.utils.launch")
    launch = pytest.importorskip("accelerate.commands.launch")
    command = commands("accelerate", nodes(2, 2))[1]
    for name, value in command.env.items():
        monkeypatch.setenv(name, value)
    args = launch.launch_command_parser().parse_args(list(command.argv[3:]))
    args.mixed_precision, args.dynamo_backend, args.debug, args.gpu_ids = "no", "no", False, "all"
    launching.prepare_multi_gpu_env(args)
    script_words = ["--training_script", args.training_script, "--training_script_args", args.training_script_args]
    filled = launching._filter_args(args, run.get_args_parser(), script_words)
    assert (filled.rdzv_id, filled.redirects, filled.log_dir) == (JOB_ID, "3", f"{command.job_dir}/ranks")
    assert (filled.nnodes, filled.nproc_per_node, filled.node_rank) == ("2", "2", 1)
    assert (filled.master_addr, filled.master_port, filled.rdzv_endpoint) == ("10.0.0.11", "29500", "")
    config, _, words = run.config_from_args(filled)
    assert (config.run_id, config.rdzv_backend, config.rdzv_endpoint) == (JOB_ID, "static", "10.0.0.11:29500")
    assert words[-len(WORDS) :] == [word.replace("$", "$$") for word in WORDS]


# --- deepspeed ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("module", [False, True])
def test_deepspeed_reads_its_command(module: bool) -> None:
    """A parser with DeepSpeed's options finds each value; the devices of all nodes are in the world's description."""
    chosen = [node(1, gpus=[4, 6]), node(2)]
    for node_rank, command in enumerate(commands("deepspeed", chosen, module=module)):
        python, dash_m, name, *words = command.argv
        assert (python, dash_m, name) == ("python3", "-m", "deepspeed.launcher.launch")
        args = deepspeed_parser().parse_args(words)
        assert json.loads(base64.urlsafe_b64decode(args.world_info)) == {"gpu-01": [4, 6], "gpu-02": [0, 1]}
        assert (args.node_rank, args.master_addr, args.master_port) == (node_rank, "10.0.0.11", 29500)
        assert args.enable_each_rank_log == f"{command.job_dir}/ranks"
        assert (args.training_script, args.module) == ("train.py", module)
        assert args.training_script_args == list(WORDS)
        assert command.ranks == ((0, 1), (2, 3))[node_rank]


# --- commands -------------------------------------------------------------------------------------------------------


def test_a_command_is_what_was_typed() -> None:
    """Nothing stands before it, no rank is expected, and its environment has what a rendezvous needs."""
    job = DistributedJob(entrypoint="serve", args=("--rank", "$NODE_RANK", *WORDS), launcher="command")
    made = plan(job, [node(1), node(2)])
    for node_rank, command in enumerate(made.nodes):
        assert command.argv == ("serve", "--rank", str(node_rank), *WORDS)
        assert (command.script_at, command.ranks, command.nproc_per_node) == (0, (), 2)
        assert {name: command.env[name] for name in ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "WORLD_SIZE")} == {
            "MASTER_ADDR": "10.0.0.11",
            "MASTER_PORT": "29500",
            "NODE_RANK": str(node_rank),
            "WORLD_SIZE": "4",
        }
    assert "2 nodes, a command on each" in render_text(made)
    assert "            serve --rank 0 --num_machines 9 -- 'a b' " in render_text(made)
    assert "PYTHONUNBUFFERED=1 serve --rank 1 --num_machines" in render_shell(made)


def test_secrets_of_a_command_are_masked() -> None:
    """All words of a command are the user's, the first one too."""
    job = DistributedJob(entrypoint="serve", args=("--api-key", "hunter22"), launcher="command")
    assert "hunter22" not in render_text(plan(job, nodes(1)))


def test_a_command_needs_no_count_of_gpus() -> None:
    """It is one process a node; a map without `gpus` is no reason to refuse it."""
    job = DistributedJob(entrypoint="serve", launcher="command")
    alone = arranged(job, [node(1, gpus=None), node(2, gpus=4)], {})
    assert [one.nproc_per_node for one in plan(job, alone).nodes] == [1, 4]


# --- c10d -----------------------------------------------------------------------------------------------------------


def test_c10d_numbers_nodes_by_their_addresses() -> None:
    """torchrun sorts the nodes by address as text; the placement does so too, so that ranks are what the plan says."""
    job = script(rendezvous=RendezvousSpec(kind="c10d"))
    chosen = [node(1, address="10.0.0.9"), node(2, address="10.0.0.10"), node(3, address="10.0.0.100")]
    ordered = arranged(job, chosen, {one.id: one.address or "" for one in chosen})
    assert [one.id for one in ordered] == ["gpu-02", "gpu-03", "gpu-01"]
    assert arranged(script(), chosen, {}) == chosen


def test_c10d_needs_different_addresses() -> None:
    """Of two nodes at one address nobody could say which comes first."""
    chosen = [node(1, address="10.0.0.9"), node(2, address="10.0.0.9")]
    with pytest.raises(PlacementError, match="c10d numbers nodes by their addresses, and gpu-01 and gpu-02 have the"):
        by_address(chosen, {one.id: one.address or "" for one in chosen})


@pytest.mark.torch
def test_torchrun_reads_a_c10d_command() -> None:
    """torchrun's own parser finds the endpoint, who hosts it, and the address that a node is known by."""
    run = pytest.importorskip("torch.distributed.run")
    job = script(*WORDS, rendezvous=RendezvousSpec(kind="c10d", join_timeout_s=20.5))
    chosen = [node(1, address="fd00::1"), node(2, address="fd00::2")]
    for node_rank, command in enumerate(plan(job, chosen).nodes):
        args = run.parse_args(list(command.argv[3:]))
        config, _, _ = run.config_from_args(args)
        assert (config.rdzv_backend, config.rdzv_endpoint, config.run_id) == ("c10d", "[fd00::1]:29500", JOB_ID)
        assert config.local_addr == command.address == f"fd00::{node_rank + 1}"
        assert config.rdzv_configs["is_host"] == str(int(node_rank == 0))
        assert (config.rdzv_configs["join_timeout"], config.rdzv_configs["read_timeout"]) == ("21", "60")
        assert (config.min_nodes, config.max_nodes, config.max_restarts) == (2, 2, 0)


# --- what they cannot do --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("launcher", "settings", "gpus", "message"),
    [
        ("command", {"module": True}, (1,), "`module` is about a script, and a command is none"),
        *(
            (
                name,
                {"rendezvous": RendezvousSpec(kind="c10d")},
                (2, 2),
                f"`{name}` has no c10d rendezvous; torchrun has",
            )
            for name in ("command", "deepspeed", "accelerate")
        ),
        *(
            (
                *(name, {}, (2, 1)),
                f"`{name}` needs as many processes on each node, and they differ: gpu-01 2, gpu-02 1",
            )
            for name in ("deepspeed", "accelerate")
        ),
        ("accelerate", {}, (1,), "`accelerate` starts no ranks for fewer than 2 processes"),
    ],
)
def test_what_a_launcher_cannot_do_is_refused(
    launcher: str, settings: dict[str, object], gpus: tuple[int, ...], message: str
) -> None:
    """Before anything is contacted, with the way that there is."""
    with pytest.raises(JobError) as caught:
        plan(script(launcher=launcher, **settings), nodes(*gpus))
    assert str(caught.value) == message
    assert caught.value.hint
