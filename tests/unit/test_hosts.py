"""hosts.toml to HostMap: what is read, in which order, and from where."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import ValidationError

from docs.generate_reference import PAGES, REFERENCE
from gpulayer.errors import HostsFileError, PoolError
from gpulayer.hosts import HostMap, Node, find_hosts_file, load_hosts

EXAMPLE = Path(__file__).parents[2] / "hosts.example.toml"


def load(tmp_path: Path, text: str | bytes) -> HostMap:
    """Load a hosts.toml with this text."""
    path = tmp_path / "hosts.toml"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return load_hosts(path)


FULL = """
[nodes.gpu-01]
ssh = "gpu-01.cluster"
port = 2222
user = "me"
address = "10.0.0.11"
python = "/opt/torch/bin/python"
workdir = "/shared/$NODE_ID"
gpus = [0, 2]
interface = "ib0"
scratch = "/local"
env = { A = "1", B = "2" }
"""


def test_every_key_is_read(tmp_path: Path) -> None:
    """Each key of a node arrives in the Node, as written."""
    hosts = load(tmp_path, FULL)
    assert hosts == HostMap(
        source=str(tmp_path / "hosts.toml"),
        nodes=(
            Node(
                id="gpu-01",
                ssh="gpu-01.cluster",
                port=2222,
                user="me",
                address="10.0.0.11",
                python="/opt/torch/bin/python",
                workdir="/shared/$NODE_ID",
                gpus=(0, 2),
                interface="ib0",
                scratch="/local",
                env={"A": "1", "B": "2"},
            ),
        ),
        practice=False,
    )
    assert set(Node.model_fields) == hosts.nodes[0].model_fields_set  # so no field is left out above


def test_defaults_of_every_key(tmp_path: Path) -> None:
    """A table without keys is a node with the documented defaults."""
    (node,) = load(tmp_path, "[nodes.gpu-01]").nodes
    assert node.model_dump() == {
        "id": "gpu-01",
        "ssh": "gpu-01",
        "port": None,
        "user": None,
        "address": None,
        "python": "python3",
        "workdir": None,
        "gpus": None,
        "interface": None,
        "scratch": "/tmp",
        "env": {},
    }


@pytest.mark.parametrize(
    ("key", "common", "own"),
    [
        ("port", "22", "2222"),
        ("user", '"a"', '"b"'),
        ("python", '"/a/python"', '"python3.12"'),
        ("workdir", '"/a"', '"/b"'),
        ("gpus", "8", "[0, 1]"),
        ("interface", '"ib0"', '"eth0"'),
        ("scratch", '"/a"', '"/b"'),
    ],
)
def test_a_nodes_key_wins_over_the_default(tmp_path: Path, key: str, common: str, own: str) -> None:
    """[defaults] fills what a node leaves out, and nothing else."""
    text = f"[defaults]\n{key} = {common}\n[nodes.a]\n{key} = {own}\n[nodes.b]\n"
    first, second = load(tmp_path, text).nodes
    (alone,) = load(tmp_path, f"[nodes.a]\n{key} = {own}").nodes
    (filled,) = load(tmp_path, f"[nodes.b]\n{key} = {common}").nodes
    assert (first, second) == (alone, filled)
    assert getattr(first, key) != getattr(second, key)


def test_defaults_of_ssh_and_address(tmp_path: Path) -> None:
    """Even the keys that tell machines apart may have defaults, where ports tell them apart."""
    text = '[defaults]\nssh = "gate"\naddress = "10.0.0.1"\n[nodes.a]\nport = 1\n[nodes.b]\nport = 2\n'
    assert [(node.ssh, node.address, node.port) for node in load(tmp_path, text).nodes] == [
        ("gate", "10.0.0.1", 1),
        ("gate", "10.0.0.1", 2),
    ]


def test_env_is_merged_name_by_name(tmp_path: Path) -> None:
    """A node's variables are added to the defaults, and win."""
    (node,) = load(tmp_path, '[defaults.env]\nA = "1"\nB = "2"\n[nodes.a.env]\nB = "3"\nC = ""\n').nodes
    assert node.env == {"A": "1", "B": "3", "C": ""}


def test_order_is_the_files(tmp_path: Path) -> None:
    """Nodes come in the order of the file, ranges expanded in place, as written."""
    text = '[nodes.z]\n[nodes."gpu-[03,01]"]\n[nodes.a]\n[nodes."r[1-2]n[08-10/2]"]\n'
    ids = [node.id for node in load(tmp_path, text).nodes]
    assert ids == ["z", "gpu-03", "gpu-01", "a", "r1n08", "r1n10", "r2n08", "r2n10"]


def test_ranges_in_values_count_along(tmp_path: Path) -> None:
    """Each value with a range gives each node its own, in every key that has ranges."""
    text = """
[nodes."gpu-[08-10]"]
ssh = "g[8-10].cluster"
address = "fd00::[1-3]"
python = "/opt/[a]/py[1-3]"
workdir = "/data/[3,1,2]"
scratch = "/local"
"""
    nodes = load(tmp_path, text).nodes
    assert [(n.id, n.ssh, n.address, n.python, n.workdir, n.scratch) for n in nodes] == [
        ("gpu-08", "g8.cluster", "fd00::1", "/opt/[a]/py1", "/data/3", "/local"),
        ("gpu-09", "g9.cluster", "fd00::2", "/opt/[a]/py2", "/data/1", "/local"),
        ("gpu-10", "g10.cluster", "fd00::3", "/opt/[a]/py3", "/data/2", "/local"),
    ]


def test_a_range_in_defaults_counts_along(tmp_path: Path) -> None:
    """A range may stand in [defaults], where every id has one of its length."""
    nodes = load(tmp_path, '[defaults]\nscratch = "/nvme[0-1]"\n[nodes."a[1-2]"]\n').nodes
    assert [node.scratch for node in nodes] == ["/nvme0", "/nvme1"]


@pytest.mark.parametrize("value", ["fd00::1", "10.0.0.1", "gpu-01.cluster", "gpu_1", "::1"])
def test_a_plain_address_is_untouched(tmp_path: Path, value: str) -> None:
    """Addresses without a range arrive byte for byte."""
    assert load(tmp_path, f'[nodes.a]\naddress = "{value}"').nodes[0].address == value


def test_gpu_count() -> None:
    """A count counts itself, a list its devices, and nothing is not known."""
    assert [Node(id="a", gpus=gpus).gpu_count for gpus in (8, (0, 3), None)] == [8, 2, None]


def test_models_are_frozen(tmp_path: Path) -> None:
    """Neither map nor node can be changed."""
    hosts = load(tmp_path, "[nodes.a]")
    with pytest.raises(ValidationError, match="frozen"):
        hosts.nodes[0].port = 1
    with pytest.raises(AttributeError):
        hosts.practice = True  # type: ignore[misc]


def test_node_by_id(tmp_path: Path) -> None:
    """A node is found by its id; an unknown one is named, with those that there are."""
    hosts = load(tmp_path, '[nodes."gpu-[1-3]"]')
    assert hosts.node("gpu-2") is hosts.nodes[1]
    with pytest.raises(PoolError) as caught:
        hosts.node("gpu-4")
    assert (str(caught.value), caught.value.hint) == (
        f"gpu-4 is not in {tmp_path}/hosts.toml",
        "the nodes there are gpu-[1-3]",
    )


def test_a_machine_may_be_parted_by_gpus(tmp_path: Path) -> None:
    """Two nodes may be one machine when their lists of devices share none."""
    text = '[defaults]\nssh = "big"\n[nodes.a]\ngpus = [0, 1]\n[nodes.b]\ngpus = [2, 3]\n'
    assert [node.gpus for node in load(tmp_path, text).nodes] == [(0, 1), (2, 3)]


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.1.1", "::1", "localhost"])
def test_practice(tmp_path: Path, address: str) -> None:
    """A practice map says so, and its addresses are loopback ones."""
    hosts = load(tmp_path, f'practice = true\n[nodes.a]\nssh = "{address}"\nport = 1\n')
    assert hosts.practice is True


def test_byte_order_mark_and_crlf(tmp_path: Path) -> None:
    """A file from another editor's world is read."""
    assert load(tmp_path, b'\xef\xbb\xbf[nodes.a]\r\nuser = "me"\r\n').nodes[0].user == "me"


def test_the_example_loads() -> None:
    """hosts.example.toml is two nodes of eight GPUs."""
    hosts = load_hosts(EXAMPLE)
    assert [(n.id, n.ssh, n.address, n.gpus, n.user, n.env) for n in hosts.nodes] == [
        ("gpu-01", "gpu-01.cluster", "10.0.0.11", 8, "me", {"NCCL_DEBUG": "WARN"}),
        ("gpu-02", "gpu-02.cluster", "10.0.0.12", 8, "me", {"NCCL_DEBUG": "WARN"}),
    ]


def test_the_examples_comments_load_too(tmp_path: Path) -> None:
    """What hosts.example.toml has commented out is right as well."""
    lines = [
        line.removeprefix("# ")
        if line.startswith(("# interface =", "# scratch =", "# port =", "# [", "# ssh", "# addr"))
        else line
        for line in EXAMPLE.read_text().splitlines()
    ]
    nodes = load(tmp_path, "\n".join(lines)).nodes
    assert (len(nodes), nodes[0].interface, nodes[0].port) == (17, "ib0", 22)
    assert (nodes[16].id, nodes[16].ssh, nodes[16].address) == ("gpu-17", "gpu-17.cluster", "10.0.0.27")


def test_the_reference_page_is_up_to_date() -> None:
    """docs/reference/hosts-file.md is what the docstrings make it."""
    page = PAGES["hosts-file"]()
    assert (REFERENCE / "hosts-file.md").read_text(encoding="utf-8") == page
    assert [line for line in page.splitlines() if line.startswith("### ")] == [
        f"### `{key}`" for key in ("practice", "defaults", "nodes", *(k for k in Node.model_fields if k != "id"))
    ]


def test_where_the_map_is_looked_for(tmp_path: Path) -> None:
    """--hosts, $GPULAYER_HOSTS, ./hosts.toml, ~/.config/gpulayer/hosts.toml: the first that there is."""
    home, cwd = tmp_path / "home", tmp_path / "cwd"
    theirs, here = home / ".config/gpulayer/hosts.toml", cwd / "hosts.toml"
    for file in (theirs, here):
        file.parent.mkdir(parents=True)
        file.touch()
    environ = {"HOME": str(home), "GPULAYER_HOSTS": "named.toml"}
    assert find_hosts_file(Path("/x/y.toml"), environ, cwd) == Path("/x/y.toml")
    assert find_hosts_file(Path("y.toml"), environ, cwd) == cwd / "y.toml"
    assert find_hosts_file(None, environ, cwd) == cwd / "named.toml"
    environ["GPULAYER_HOSTS"] = ""
    assert find_hosts_file(None, environ, cwd) == here
    here.unlink()
    assert find_hosts_file(None, environ, cwd) == theirs
    here.symlink_to(tmp_path / "gone")
    assert find_hosts_file(None, environ, cwd) == here


def test_no_map_anywhere(tmp_path: Path) -> None:
    """Without a map, the places that were looked at are named."""
    with pytest.raises(HostsFileError) as caught:
        find_hosts_file(None, {"HOME": "/nowhere"}, tmp_path)
    assert (str(caught.value), caught.value.hint) == (
        f"no hosts map: there is no {tmp_path}/hosts.toml and no /nowhere/.config/gpulayer/hosts.toml",
        "write one (see hosts.example.toml), or name one with `--hosts FILE` or $GPULAYER_HOSTS",
    )


def test_a_map_without_ranges_loads_without_clustershell(tmp_path: Path) -> None:
    """Start-up does not pay for ClusterShell where nothing is folded or expanded."""
    (tmp_path / "hosts.toml").write_text("[nodes.a]\n[nodes.b]\n")
    program = (
        "import sys, pathlib; from gpulayer.hosts import load_hosts; load_hosts(pathlib.Path(sys.argv[1]))\n"
        "print([name for name in sys.modules if name.startswith(('ClusterShell', 'asyncssh', 'rich'))])"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "hosts.toml")]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=EXAMPLE.parent)
    assert done.stdout == "[]\n"
