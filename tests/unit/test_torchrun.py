"""The command of each node: every word of it, placeholders, and what torch's own parser and macros make of it."""

from __future__ import annotations

import sys
import warnings
from typing import TYPE_CHECKING

import pytest

from gpulayer.job import RendezvousSpec
from gpulayer.parts import NodePart
from gpulayer.placeholders import PLACEHOLDERS, placeholder_values, substitute, survivors
from gpulayer.torchrun import render_torchrun
from tests.support.plans import JOB_ID, node, nodes, place, script

if TYPE_CHECKING:
    from gpulayer.hosts import Node
    from gpulayer.job import DistributedJob

JOB_DIR = "/tmp/gpulayer-x-n0"
LOG_DIR = f"{JOB_DIR}/ranks"

AWKWARD = (
    *("", " ", "it's", 'say "hi"', "back\\slash", "bang!", "two\nlines", "tab\there", "Grüße 🦙", "*", "~", ";", "&&"),
    *("--", "-", "--nnodes", "7", "--module", "-m", "--tee=3", "--no-such-option", "#", "`date`", "a=b", "%n", "{}"),
    *("^foo$", "$", "$5", "a$", "a$$b", "$$", "$$$", "$$NODE_RANK", "$-", "$?", "100% of $1", "é$é", "\udcff"),
    "x" * 100_000,
)
"""Arguments that must arrive as they were typed."""


def argvs(job: DistributedJob, chosen: list[Node]) -> list[tuple[str, ...]]:
    """Return the command of every node."""
    placement = place(chosen, nproc_per_node=job.nproc_per_node, master_port=job.rendezvous.port)
    return [render_torchrun(NodePart(job, placement, placed, JOB_ID, JOB_DIR)).argv for placed in placement.nodes]


def test_whole_command() -> None:
    """The command names everything that decides the run, and nothing is left to torchrun's defaults."""
    job = script("--lr", "0.1", rendezvous=RendezvousSpec(port=29511, join_timeout_s=12.5))
    (argv,) = argvs(job, [node(1, python="/opt/torch/bin/python")])
    assert argv == (
        *("/opt/torch/bin/python", "-m", "torch.distributed.run"),
        *("--nnodes", "1", "--nproc-per-node", "2", "--node-rank", "0"),
        *("--master-addr", "10.0.0.11", "--master-port", "29511", "--rdzv-backend", "static", "--rdzv-endpoint="),
        *("--max-restarts=0", "--rdzv-id", JOB_ID, "--rdzv-conf", "timeout=13", "--role", "default"),
        *("--monitor-interval", "0.1", "--redirects", "3", "--tee", "0", "--log-dir", LOG_DIR),
        *("--", "train.py", "--lr", "0.1"),
    )


def test_module() -> None:
    """`--module` is an option of torchrun's, before the `--`, and the rest of the command is the same."""
    (as_script,) = argvs(script("x"), nodes(1))
    (as_module,) = argvs(script("x", module=True), nodes(1))
    assert as_module == (*as_script[:-3], "--module", *as_script[-3:])


def test_one_node_and_three_nodes_alike() -> None:
    """Commands of one-node and three-node jobs differ in the counts and the node's rank alone."""
    job = script("--out", "$NODE_RANK", nproc_per_node=2)
    commands = argvs(job, nodes(1)) + argvs(job, nodes(1, 1, 1))
    for argv, nnodes, node_rank in zip(commands, ("1", "3", "3", "3"), ("0", "0", "1", "2"), strict=True):
        expected = list(commands[0])
        expected[expected.index("--nnodes") + 1] = nnodes
        expected[expected.index("--node-rank") + 1] = node_rank
        expected[-1] = node_rank
        assert list(argv) == expected


def test_python_of_the_job_wins() -> None:
    """`--python` replaces the map's `python`."""
    assert argvs(script(python="/a/python"), [node(1, python="/b/python")])[0][0] == "/a/python"


def test_placeholders() -> None:
    """Every placeholder has its value on every node, in either spelling."""
    text = " ".join(f"${name} ${{{name}}}" for name in PLACEHOLDERS)
    expected = {
        0: "0 0 2 2 2 2 3 3 10.0.0.11 10.0.0.11 29500 29500 10.0.0.11 10.0.0.11 gpu-01 gpu-01",
        1: "1 1 2 2 1 1 3 3 10.0.0.11 10.0.0.11 29500 29500 10.0.0.11 10.0.0.11 gpu-02 gpu-02",
    }
    placement = place(nodes(2, 1))
    for placed in placement.nodes:
        values = placeholder_values(placement, placed, JOB_ID)
        assert substitute(text, values) == f"{expected[placed.node_rank]} {JOB_ID} {JOB_ID}"


@pytest.mark.parametrize(
    ("typed", "arrives"),
    [
        ("a$NODE_RANK.b", "a1.b"),
        ("${NODE_RANK}b", "1b"),
        ("$NODE_RANK$NODE_RANK", "11"),
        ("$NODE_RANKS", "$NODE_RANKS"),
        ("$$NODE_RANK", "$$NODE_RANK"),
        ("$$$NODE_RANK", "$$1"),
        ("${DOLLAR}HOME", "$HOME"),
        ("${DOLLAR}{NODE_RANK}", "${NODE_RANK}"),
        ("${DOLLAR}${DOLLAR}", "$$"),
        ("$ODD", "$NODE_RANK ${DOLLAR}"),
        ("$", "$"),
        ("^foo$", "^foo$"),
        ("", ""),
    ],
)
def test_substitution(typed: str, arrives: str) -> None:
    """Text is read once from the left; values are not read again, and a pair of dollar signs is text."""
    assert substitute(typed, {"NODE_RANK": "1", "DOLLAR": "$", "ODD": "$NODE_RANK ${DOLLAR}"}) == arrives


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("$SCRATCH/$NODE_RANK/${HOME}", ("$SCRATCH", "${HOME}")),
        ("$A$A", ("$A",)),
        ("$(hostname -I)", ("$(hostname -I)",)),
        ("$(unclosed", ("$(unclosed",)),
        ("$(echo $HOME)", ("$(echo $HOME)", "$HOME")),
        ("${HOME:-/x}", ("${HOME:-/x}",)),
        ("${model.dim}", ("${model.dim}",)),
        ("${}", ("${}",)),
        ("${a${NODE_RANK}", ("${a${NODE_RANK}",)),
        ("$local_rank", ("$local_rank",)),
        ("$node_rank", ("$node_rank",)),
        ("$$$HOME", ("$HOME",)),
        ("$(" + "x" * 100 + ")", ("$(" + "x" * 55 + "...",)),
    ],
)
def test_survivors(text: str, expected: tuple[str, ...]) -> None:
    """What has no value is found, as it was typed."""
    assert survivors(text) == expected


@pytest.mark.parametrize("text", [*AWKWARD, "${DOLLAR}HOME", "$DOLLAR", *(f"${name}" for name in PLACEHOLDERS)])
def test_no_survivors(text: str) -> None:
    """Placeholders, the escape, and a `$` that begins no name are nothing to complain of."""
    assert survivors(text) == ()


def test_no_dollar_without_one_typed() -> None:
    """A command whose placeholders are all known holds no `$`."""
    job = script(*(f"--{name}=${name}" for name in PLACEHOLDERS), "${NODE_ID}")
    assert not [word for argv in argvs(job, nodes(1, 2, 3)) for word in argv if "$" in word]


@pytest.fixture
def hostile_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Import torch, and set a PET_ variable for every value of torchrun's that a command line can decide."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that numpy is not there
        import torch.distributed.run  # noqa: F401 - the tests import parts of it, quietly then
    for name, value in {
        "NNODES": "7:9",
        "NPROC_PER_NODE": "5",
        "NODE_RANK": "3",
        "MASTER_ADDR": "192.0.2.1",
        "MASTER_PORT": "1",
        "RDZV_BACKEND": "c10d",
        "RDZV_ENDPOINT": "192.0.2.1:2",
        "RDZV_ID": "none",
        "RDZV_CONF": "timeout=1,is_host=1",
        "MAX_RESTARTS": "5",
        "MONITOR_INTERVAL": "60",
        "ROLE": "other",
        "REDIRECTS": "0",
        "TEE": "3",
        "LOG_DIR": "/elsewhere",
    }.items():
        monkeypatch.setenv(f"PET_{name}", value)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.mark.torch
@pytest.mark.usefixtures("hostile_environment")
@pytest.mark.parametrize("module", [False, True])
@pytest.mark.parametrize("counts", [(1,), (2, 2), (2, 1, 3)])
def test_torch_reads_what_was_meant(counts: tuple[int, ...], module: bool) -> None:
    """torch's own parser understands every rendered option and argument, whatever PET_ variables say."""
    from torch.distributed.elastic.multiprocessing import Std
    from torch.distributed.elastic.utils.api import macros
    from torch.distributed.run import config_from_args, get_args_parser

    job = script(*AWKWARD, module=module)
    for node_rank, argv in enumerate(argvs(job, nodes(*counts))):
        assert argv[1:3] == ("-m", "torch.distributed.run")
        arguments = get_args_parser().parse_args(list(argv[3:]))
        config, command, command_args = config_from_args(arguments)
        assert (config.min_nodes, config.max_nodes, config.nproc_per_node) == (
            len(counts),
            len(counts),
            counts[node_rank],
        )
        assert (config.rdzv_backend, config.rdzv_endpoint, config.run_id) == ("static", "10.0.0.11:29500", JOB_ID)
        assert config.rdzv_configs == {"timeout": "300", "rank": node_rank}
        assert (config.max_restarts, config.monitor_interval, config.role) == (0, 0.1, "default")
        assert config.logs_specs is not None
        assert config.logs_specs.root_log_dir == LOG_DIR
        assert (config.logs_specs._redirects, config.logs_specs._tee) == (Std.ALL, Std.NONE)
        assert (arguments.module, arguments.no_python, arguments.run_path) == (module, False, False)
        # What torch's agent does to the arguments of each of its workers (local_elastic_agent.py, _start_workers).
        for local_rank in range(counts[node_rank]):
            words = macros.substitute(command_args, str(local_rank))
            assert words == ["-u", *(["-m"] if module else []), "train.py", *AWKWARD]
        assert command == sys.executable


@pytest.mark.torch
@pytest.mark.usefixtures("hostile_environment")
def test_torch_reads_the_script_and_the_escape() -> None:
    """A `$` in the script's own name and one from `${DOLLAR}` arrive as they are; placeholders arrive as values."""
    from torch.distributed.elastic.utils.api import macros
    from torch.distributed.run import config_from_args, get_args_parser

    job = script("${DOLLAR}HOME", "${DOLLAR}{local_rank}", "$NODE_ID").model_copy(update={"entrypoint": "odd$$ $1.py"})
    (argv,) = argvs(job, nodes(1))
    _, _, command_args = config_from_args(get_args_parser().parse_args(list(argv[3:])))
    words = macros.substitute(command_args, "0")
    assert words == ["-u", "odd$$ $1.py", "$HOME", "${local_rank}", "gpu-01"]


@pytest.mark.torch
@pytest.mark.usefixtures("hostile_environment")
def test_torch_reads_ipv6() -> None:
    """An IPv6 address stands bare in `--master-addr`, and torch finds address and port in it."""
    from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint
    from torch.distributed.run import config_from_args, get_args_parser

    argv, _ = argvs(script(), [node(1, address="fd00::1"), node(2, address="fd00::2")])
    assert argv[argv.index("--master-addr") + 1] == "fd00::1"
    config, _, _ = config_from_args(get_args_parser().parse_args(list(argv[3:])))
    assert parse_rendezvous_endpoint(config.rdzv_endpoint, -1) == ("fd00::1", 29500)
