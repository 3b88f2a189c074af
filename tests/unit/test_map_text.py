"""A hosts map as text: it loads as the map that it was made of, folded where one table can hold several nodes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gpulayer.hosts import HostMap, Node, load_hosts
from gpulayer.map_text import NODE, render_map

Keys = dict[str, Any]


def host_map(*nodes: Keys, practice: bool = False) -> HostMap:
    """Return a map of these nodes."""
    return HostMap("a test", tuple(Node.model_validate(keys) for keys in nodes), practice)


def render(*nodes: Keys, remarks: dict[str, dict[str, str]] | None = None) -> str:
    """Return the text of a map without its first lines and comments, after seeing that it loads as the map."""
    written = host_map(*nodes)
    text = render_map(written, remarks or {}, "/x/hosts.schema.json")
    read = load_hosts(Path("hosts.toml"), text)
    assert [node.model_dump() for node in read.nodes] == [node.model_dump() for node in written.nodes]
    assert read.practice == written.practice
    head, *lines = [line for line in text.splitlines() if not line.startswith("# ")]
    assert head == "#:schema /x/hosts.schema.json"
    return "\n".join(line for line in lines if line)


DEFAULTS = "[defaults] # keys for every node; a node's own key wins\n"


@pytest.mark.parametrize(
    ("nodes", "text"),
    [
        ([{"id": "a"}], "[nodes.a]"),
        ([{"id": "a", "gpus": 8}], "[nodes.a]\ngpus = 8"),
        ([{"id": "gpu-01"}, {"id": "gpu-02"}], '[nodes."gpu-[01-02]"]'),
        ([{"id": "gpu-9"}, {"id": "gpu-10"}], '[nodes."gpu-[9-10]"]'),
        ([{"id": "gpu-099"}, {"id": "gpu-100"}], '[nodes."gpu-[099-100]"]'),
        ([{"id": "gpu-9"}, {"id": "gpu-010"}], "[nodes.gpu-9]\n[nodes.gpu-010]"),
        ([{"id": "gpu-02"}, {"id": "gpu-01"}], "[nodes.gpu-02]\n[nodes.gpu-01]"),  # the order is the order of ranks
        ([{"id": "gpu-01"}, {"id": "gpu-03"}], "[nodes.gpu-01]\n[nodes.gpu-03]"),
        ([{"id": "r1n1"}, {"id": "r1n2"}, {"id": "r2n1"}], '[nodes."r1n[1-2]"]\n[nodes.r2n1]'),
        ([{"id": "10.0.0.9"}, {"id": "10.0.0.10"}], '[nodes."10.0.0.[9-10]"]'),
        (
            [{"id": "a1", "address": "10.0.0.11"}, {"id": "a2", "address": "10.0.0.12"}],
            '[nodes."a[1-2]"]\naddress = "10.0.0.[11-12]"',
        ),
        (
            [{"id": "a1", "address": "10.0.0.11"}, {"id": "a2", "address": "10.0.0.13"}],
            '[nodes.a1]\naddress = "10.0.0.11"\n[nodes.a2]\naddress = "10.0.0.13"',
        ),
        (
            [{"id": "a1", "ssh": "x-1.y"}, {"id": "a2", "ssh": "x-2.y"}],
            '[nodes."a[1-2]"]\nssh = "x-[1-2].y"',
        ),
        (
            [{"id": "a1", "gpus": 8}, {"id": "a2", "gpus": 8}, {"id": "a3", "gpus": 4}],
            '[nodes."a[1-2]"]\ngpus = 8\n[nodes.a3]\ngpus = 4',
        ),
        (
            [{"id": "a1", "user": "u1"}, {"id": "a2", "user": "u2"}],  # no key that counts along
            '[nodes.a1]\nuser = "u1"\n[nodes.a2]\nuser = "u2"',
        ),
        (
            [{"id": "a", "workdir": "/data/[old]/1"}, {"id": "b", "workdir": "/data/[old]/2"}],
            '[nodes.a]\nworkdir = "/data/[old]/1"\n[nodes.b]\nworkdir = "/data/[old]/2"',
        ),
    ],
)
def test_which_nodes_share_a_table(nodes: list[Keys], text: str) -> None:
    """Neighbours whose keys are alike, or count along with the id, are one range; all others have their own table."""
    assert render(*nodes) == DEFAULTS + text


def test_what_all_nodes_have_is_a_default() -> None:
    """A key with one value on all nodes stands once, at the top; what is odd in a value is written as TOML needs it."""
    shared = {"gpus": [0, 1], "python": "/opt/my torch/python", "env": {"A B": 'x"\\\n\x7fé\U0001f600', "C": ""}}
    text = render({"id": "a", **shared, "ssh": "x"}, {"id": "b.c", **shared, "port": 2222})
    assert text == (
        f"{DEFAULTS}"
        'python = "/opt/my torch/python"\n'
        "gpus = [0, 1]\n"
        'env = { "A B" = "x\\"\\\\\\n\\u007fé\U0001f600", C = "" }\n'
        '[nodes.a]\nssh = "x"\n[nodes."b.c"]\nport = 2222'
    )


def test_remarks_say_why_a_value_is_there() -> None:
    """Nodes with another remark are no range; what a node says cannot end the line of a comment."""
    why = {"gpus": "what nvidia-smi lists", NODE: "no PyTorch"}
    text = render(
        {"id": "a1", "gpus": 8},
        {"id": "a2", "gpus": 8},
        {"id": "a3", "gpus": 8},
        {"id": "b", "gpus": 2},
        remarks={"a1": why, "a2": why, "a3": {}, "b": {"gpus": 'evil\ngpus = 1 # \x1b[2J"'}},
    )
    assert text == (
        f"{DEFAULTS}"
        '[nodes."a[1-2]"] # no PyTorch\n'
        "gpus = 8 # what nvidia-smi lists\n"
        "[nodes.a3]\ngpus = 8\n"
        '[nodes.b]\ngpus = 2 # evil?gpus = 1 # ?[2J"'
    )


def test_keys_that_nobody_has_are_there_as_comments() -> None:
    """They show what can be written, and what holds without them."""
    text = render_map(host_map({"id": "a", "user": "me"}), {}, "s")
    assert "\n# gpus = 8 # " in text
    assert "\n# python = " in text
    assert "# user" not in text


def test_a_practice_map_stays_one() -> None:
    """Only such a map may use loopback addresses."""
    nodes = [{"id": "a", "ssh": "127.0.0.1", "port": 1}, {"id": "b", "ssh": "127.0.0.1", "port": 2}]
    text = render_map(host_map(*nodes, practice=True), {}, "s")
    assert load_hosts(Path("hosts.toml"), text).practice
