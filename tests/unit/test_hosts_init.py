"""`gpulayer hosts init` without nodes: what it writes and refuses, and what follows from what a node says."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import gpulayer
from gpulayer import cli
from gpulayer.facts import NodeFacts, Route
from gpulayer.hosts import Node, load_hosts
from gpulayer.hosts_init import Described, choose_address, describe_node
from gpulayer.map_text import NODE
from tests.support import findings

if TYPE_CHECKING:
    from collections.abc import Callable

    Run = Callable[..., tuple[int, str, str]]

HOSTFILE = "gpu-01 slots=8\ngpu-02 slots=8\nme@head slots=2\n"
CONFIG = "Host gpu-03\n  HostName 10.0.0.13\nHost gpu-04\n  HostName 10.0.0.14\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, which is also the home folder, with a hostfile and an SSH configuration."""
    (tmp_path / "hostfile").write_text(HOSTFILE)
    (tmp_path / ".ssh").mkdir()
    (tmp_path / ".ssh/config").write_text(CONFIG)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in [name for name in os.environ if name.startswith(("SLURM_", "GPULAYER_HOSTS"))]:
        monkeypatch.delenv(name)
    return tmp_path


@pytest.fixture
def run(folder: Path, capfd: pytest.CaptureFixture[str]) -> Run:
    """Runs a command line in that folder: exit code, stdout, stderr."""

    def run(*words: str) -> tuple[int, str, str]:
        capfd.readouterr()
        code = cli.run_cli(list(words))
        return code, *capfd.readouterr()

    return run


def test_a_hostfile_becomes_a_map(run: Run, folder: Path) -> None:
    """The file is written, said to be, named to editors, and render works with it."""
    code, out, err = run("hosts", "init", "--from", "hostfile")
    assert (code, out) == (0, "")
    assert err == "gpulayer: wrote hosts.toml: gpu-[01-02],head; `gpulayer check -H hosts.toml` checks them\n"
    text = (folder / "hosts.toml").read_text()
    schema = Path(gpulayer.__file__).parent / "schemas" / "hosts.schema.json"
    assert text.splitlines()[:2] == [
        f"#:schema {schema}",
        f"# The nodes of {folder}/hostfile. They are drawn in this order.",
    ]
    assert '[nodes."gpu-[01-02]"]\ngpus = 8\n\n[nodes.head]\nuser = "me"\ngpus = 2\n' in text
    with_map, with_hostfile = (
        run("render", "-F", "none", "-w", "gpu-01", "--job-id", "j", "--format", "json", "-H", source, "--", "s.py")
        for source in ("hosts.toml", "hostfile")
    )
    assert with_map == with_hostfile
    assert with_map[0] == 2  # gpu-01 has no address here
    assert "no address for `gpu-01`" in with_map[2]


def test_render_with_a_map_of_the_ssh_configuration(run: Run, folder: Path) -> None:
    """The names of the configuration are enough: the addresses are its HostNames."""
    assert run("hosts", "init", "--from", "ssh:gpu-*", "-o", "new.toml", "--python", "/opt/py")[0] == 0
    code, out, err = run("render", "-H", "new.toml", "--nproc-per-node", "2", "--format", "json", "s.py")
    assert (code, err) == (0, "")
    plan = json.loads(out)
    assert [(node["node_id"], node["address"]) for node in plan["nodes"]] == [
        ("gpu-03", "10.0.0.13"),
        ("gpu-04", "10.0.0.14"),
    ]
    assert {node["argv"][0] for node in plan["nodes"]} == {"/opt/py"}


def test_some_of_the_nodes(run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`-w` and `-x` choose, in a Slurm allocation too."""
    monkeypatch.setenv("SLURM_JOB_NODELIST", "h[00-09]")
    assert run("hosts", "init", "--from", "slurm", "-w", "h[02-05]", "-x", "h04")[0] == 0
    assert [node.id for node in load_hosts(folder / "hosts.toml").nodes] == ["h02", "h03", "h05"]


def test_a_map_is_a_source_too(run: Run, folder: Path) -> None:
    """A map that is written again holds the same nodes."""
    (folder / "old.toml").write_text('practice = true\n[defaults]\nssh = "127.0.0.1"\n[nodes.a]\nport = 1\n[nodes.b]\n')
    assert run("hosts", "init", "--from", "old.toml")[0] == 0
    old, new = load_hosts(folder / "old.toml"), load_hosts(folder / "hosts.toml")
    assert (new.nodes, new.practice) == (old.nodes, True)


def test_a_file_that_is_there_is_left_alone(run: Run, folder: Path) -> None:
    """Nothing is overwritten unless that is asked for; a link counts as a file, wherever it leads."""
    (folder / "hosts.toml").write_text("precious")
    (folder / "link.toml").symlink_to("nowhere")
    for name in ("hosts.toml", "link.toml"):
        code, out, err = run("hosts", "init", "--from", "hostfile", "-o", name)
        assert (code, out) == (2, "")
        assert err.startswith(f"gpulayer: error: {name} is there already\n\nhint: ")
    assert (folder / "hosts.toml").read_text() == "precious"
    assert run("hosts", "init", "--from", "hostfile", "--force")[0] == 0
    assert len(load_hosts(folder / "hosts.toml").nodes) == 3
    assert sorted(path.name for path in folder.iterdir()) == [".ssh", "hostfile", "hosts.toml", "link.toml"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--from", "no-such"], "no-such: no such file"),
        (["--from", "slurm"], "`--hosts slurm` is for the inside of a Slurm allocation"),
        (["--from", "ssh:x*"], "no Host of FOLDER/.ssh/config matches `x*`"),
        (["--from", "hostfile", "-w", "gpu-09"], "`--nodelist` names gpu-09, which the hosts map does not have"),
        (["--from", "hostfile", "-o", "no/such/folder.toml"], "no/such/folder.toml: cannot be written: No such file"),
        (["--from", "hostfile", "--python", "~/py"], "`--python ~/py` holds `~` or `$`"),
        (["--from", "hostfile", "--connect-timeout", "3"], "`--connect-timeout` is about logging in"),
        (["--from", "hostfile", "--accept-new-host-keys"], "`--accept-new-host-keys` is about logging in"),
        (["--from", "hostfile", "-F", "none"], "`--ssh-config` is about logging in"),
        (["--from", "ssh:*", "-F", "none"], "`--from ssh:*` has no SSH configuration to look in"),
        ([], "Missing option '--from'"),
        (["--from", "hostfile", "extra"], "Got unexpected extra argument(s) (extra)"),
    ],
)
def test_what_is_refused(words: list[str], message: str, run: Run, folder: Path) -> None:
    """A request that cannot be carried out is told, with the next step, and nothing is written."""
    code, out, err = run("hosts", "init", *words)
    assert (code, out) == (2, "")
    said = err.replace(f"{folder}/no-such", "no-such").replace(str(folder), "FOLDER")
    assert said.startswith(f"gpulayer: error: {message}")
    assert "\nhint: " in err or "cannot be written" in err
    assert not (folder / "hosts.toml").exists()


def test_hosts_alone_is_the_command_that_it_was(run: Run, folder: Path) -> None:
    """`init` is a word of its own only right after `hosts`, and `hosts` takes no other."""
    assert run("hosts", "-H", "hostfile")[1].splitlines()[1].split()[:3] == ["gpu-01", "free", "gpu-01"]
    code, _, err = run("hosts", "-H", "hostfile", "init")
    assert code == 2
    assert "unexpected extra argument(s) (init)" in err


# --- what a node says -----------------------------------------------------------------------------------------------


def facts(**changes: Any) -> NodeFacts:
    """Return what a node with the address 10.0.0.1 says, with these changes."""
    command = findings.plan_of(1).nodes[0]
    return replace(findings.facts(command, command.address), **changes)


ETH = findings.interface("eth0", "10.0.0.1", "fe80::1")
IB = findings.interface("ib0", "10.1.0.1", "fd77::1")
BOTH = findings.interface("eth0", "fd77::3", "10.3.0.1", "10.3.0.2")
DOWN = findings.interface("eth1", "10.2.0.1", up=False)


@pytest.mark.parametrize(
    ("interfaces", "reached_by", "route", "address", "why"),
    [
        ([ETH, IB], "10.1.0.1", Route("eth0", "10.0.0.1"), "10.1.0.1", "on ib0, by which the login node reached it"),
        ([ETH, IB], "fd77:0::1", None, "fd77::1", "on ib0, by which the login node reached it"),
        ([ETH, IB], "::ffff:10.1.0.1", None, "10.1.0.1", "on ib0, by which the login node reached it"),
        ([ETH, IB], "203.0.113.7", Route("eth0", "10.0.0.1"), "10.0.0.1", "on eth0, which has the default route"),
        ([ETH, IB], "gateway", Route("eth0", "10.0.0.1"), "10.0.0.1", "on eth0, which has the default route"),
        ([ETH], "", None, "10.0.0.1", "on eth0, the only interface that leads elsewhere"),
        ([BOTH], "", None, "10.3.0.1", "on eth0, the only interface that leads elsewhere"),
        ([findings.LOOPBACK, ETH], "127.0.0.1", None, "10.0.0.1", "on eth0, the only interface that leads elsewhere"),
        ([ETH, DOWN], "10.2.0.1", None, "10.0.0.1", "on eth0, the only interface that leads elsewhere"),
        ([ETH, IB], "", None, "", "set `address`: none of its addresses is known to be reached by others"),
        ([findings.LOOPBACK], "127.0.0.1", None, "", "set `address`: none of its addresses is known to be reached by"),
        (None, "10.0.0.1", None, "", "set `address`: none of its addresses is known to be reached by others"),
    ],
)
def test_the_address_of_a_node(
    interfaces: list[Any] | None, reached_by: str, route: Route | None, address: str, why: str
) -> None:
    """The one that the login node came by, else that of the default route; never a loopback or another machine's."""
    said = Described(facts(interfaces=interfaces, route_to_master=route), reached_by)
    chosen, reason = choose_address(said)
    assert (chosen, reason[: len(why)]) == (address, why)


@pytest.mark.parametrize(
    ("keys", "changes", "expected", "remarks"),
    [
        ({}, {"gpu": findings.gpus(0, 0)}, {"gpus": 2}, {"gpus": "nvidia-smi lists 2"}),
        ({}, {}, {}, {NODE: "no GPU was found"}),
        ({}, {"gpu": None}, {}, {NODE: "no GPU was found"}),
        ({}, {"gpu": replace(findings.NO_GPU, device_files=8)}, {}, {NODE: "no GPU tool, and 8 GPUs in /dev"}),
        ({}, {"gpu": replace(findings.gpus(), state="failed")}, {}, {NODE: "nvidia-smi failed"}),
        ({}, {"gpu": replace(findings.gpus(), state="hangs")}, {}, {NODE: "nvidia-smi hangs"}),
        ({}, {"gpu": findings.gpus()}, {}, {NODE: "nvidia-smi lists no GPU"}),
        ({"gpus": 2}, {"gpu": findings.gpus(0, 0)}, {}, {}),
        ({"gpus": 8}, {"gpu": findings.gpus(0, 0)}, {}, {"gpus": "nvidia-smi lists 2"}),
        ({"gpus": [0, 1]}, {"gpu": findings.gpus(0, 0, 0, 0)}, {}, {}),
        ({"gpus": 2}, {}, {}, {"gpus": "no GPU was found"}),
        (
            {"gpus": 2},
            {"gpu": findings.gpus(0, 0), "torch": None},
            {},
            {NODE: "its python3 has no PyTorch: set `python`"},
        ),
        ({}, {"torch": None}, {}, {NODE: "no GPU was found; its python3 has no PyTorch: set `python`"}),
        ({"gpus": 2}, {"gpu": findings.gpus(0, 0), "torch": None, "errors": {"torch": "x"}}, {}, {}),
    ],
)
def test_what_is_kept_of_a_nodes_words(
    keys: dict[str, Any], changes: dict[str, Any], expected: dict[str, Any], remarks: dict[str, str]
) -> None:
    """`gpus` is what the tool lists; what the source has said stays, with a remark where the node says otherwise."""
    node = Node.model_validate({"id": "a", "address": "10.0.0.1", **keys})
    assert describe_node(node, Described(facts(**changes), "10.0.0.1")) == (expected, remarks)


def test_an_address_is_added_where_there_is_none() -> None:
    """An address that the source has stays; a practice map needs none."""
    said = Described(facts(gpu=findings.gpus(0), interfaces=(ETH,)), "10.0.0.1")
    bare = Node.model_validate({"id": "a", "gpus": 1})
    assert describe_node(bare, said)[0] == {"address": "10.0.0.1"}
    assert describe_node(bare, said, practice=True)[0] == {}
    named = Node.model_validate({"id": "a", "gpus": 1, "address": "a.cluster"})
    assert describe_node(named, said)[0] == {}
