"""Hostfiles of MPI and DeepSpeed: what is read, and what is refused on which line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gpulayer.errors import HostsFileError
from gpulayer.hostfile import is_toml, parse_hostfile

FILE = Path("/project/hostfile")


def nodes(text: str) -> list[dict[str, Any]]:
    """Return the keys that a hostfile's text sets on each node."""
    return [node.model_dump(exclude_unset=True) for node in parse_hostfile(FILE, text).nodes]


def refusal(text: str) -> str:
    """Return the message and the hint with which a text is refused."""
    with pytest.raises(HostsFileError) as caught:
        parse_hostfile(FILE, text)
    return f"{caught.value}\nhint: {caught.value.hint}"


@pytest.mark.parametrize(
    ("line", "keys"),
    [
        ("gpu-01", {"ssh": "gpu-01"}),
        ("gpu-01 slots=8", {"ssh": "gpu-01", "gpus": 8}),  # Open MPI, DeepSpeed
        ("  gpu-01\tslots = 8  # eight\r", {"ssh": "gpu-01", "gpus": 8}),
        ("gpu-01 slots=8 max_slots=8", {"ssh": "gpu-01", "gpus": 8}),
        ("gpu-01 max-slots=4", {"ssh": "gpu-01", "gpus": 4}),
        ("gpu-01 cpu=2", {"ssh": "gpu-01", "gpus": 2}),
        ("gpu-01 count=2", {"ssh": "gpu-01", "gpus": 2}),
        ("me@gpu-01 slots=2", {"ssh": "gpu-01", "gpus": 2, "user": "me"}),
        ("gpu-01 username=me", {"ssh": "gpu-01", "user": "me"}),
        ("gpu-01 port=2222", {"ssh": "gpu-01", "port": 2222}),  # PRRTE
        ("gpu-01:8", {"ssh": "gpu-01", "gpus": 8}),  # MPICH, Intel MPI
        ("gpu-01:8 user=me", {"ssh": "gpu-01", "gpus": 8, "user": "me"}),
        ("gpu-01.cluster:8", {"ssh": "gpu-01.cluster", "gpus": 8}),
        ("10.0.0.11 slots=8", {"ssh": "10.0.0.11", "gpus": 8}),
        ("fd77::1:10 slots=8", {"ssh": "fd77::1:10", "gpus": 8}),
    ],
)
def test_a_line(line: str, keys: dict[str, object]) -> None:
    """Each way of writing a host that the tools have in common with us, and what it sets."""
    expected = {"id": str(keys["ssh"]).replace(":", "-"), **keys}
    assert nodes(f"# hosts\n\n{line}\n") == [expected]


def test_the_order_is_that_of_the_file() -> None:
    """The first line is drawn first; ids are the hosts' names."""
    host_map = parse_hostfile(FILE, "b slots=1\n\n#c slots=9\na slots=2")
    assert [(node.id, node.gpus) for node in host_map.nodes] == [("b", 1), ("a", 2)]
    assert host_map.source == str(FILE)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "/project/hostfile: the hostfile names no hosts"),
        ("# nothing\n\n", "/project/hostfile: the hostfile names no hosts"),
        ("a slots=8\nb slot=8", "line 2: `slot=8` means nothing in a hostfile here"),
        ("a binding=user:0", "line 1: `binding=user:0` means nothing in a hostfile here"),
        ("a 8", "line 1: `8` means nothing in a hostfile here"),
        ("rank 0=a slot=0", "line 1: `0=a` means nothing in a hostfile here"),
        ("a slots", "line 1: `slots` means nothing in a hostfile here"),
        ("a slots=eight", "line 1: `slots=eight` has no whole number"),
        ("a slots=", "line 1: `slots=` has no whole number"),
        ("a slots=-1", "line 1: `slots=-1` has no whole number"),
        ("a slots=٣", "line 1: `slots=٣` has no whole number"),
        ("a slots=0", "line 1: `slots=0` is not 1 or more"),
        ("a:", "line 1: `a:` has no whole number"),
        ("a:8:2", "line 1: `a:8:2` has no whole number"),
        ("a:8 slots=8", "line 1: `slots=8` says again what the line has said"),
        ("me@a user=me", "line 1: `user=me` says again what the line has said"),
        ("a slots=4 max_slots=2", "line 1: `a slots=4 max_slots=2` allows fewer slots than it has"),
        ("a port=0", "line 1: `port=0` is no port"),
        ("-a slots=1", "line 1: `-a` is no node id"),
        ("+n0", "line 1: `+n0` is no node id"),
        ("^a", "line 1: `^a` is no node id"),
        ("gpu-[01-04] slots=8", "line 1: `gpu-[01-04]` is a range, which hostfiles do not have"),
        ("a slots=1\nb\na slots=1", "line 3: `a` is on line 1 too"),
        ("a\nA.", "line 2: `A.` is on line 1 too"),
        ("a\na port=2222", "line 2: `a` is on line 1 too"),
    ],
)
def test_what_is_refused(text: str, message: str) -> None:
    """A word that means nothing, a number that is none and a host named twice are errors with file and line."""
    assert message in refusal(text)
    assert str(FILE) in refusal(text)
    assert "hint: None" not in refusal(text) or "2 mistakes" in refusal(text)  # each has its own hint then


def test_all_mistakes_are_told_at_once() -> None:
    """Each line to mend is named, in the order of the file."""
    text = refusal("a slots=x\nb slots=1\nc wrong\n")
    assert text.startswith("/project/hostfile has 2 mistakes:\n  line 1: `slots=x` has no whole number")
    assert "\n  line 3: `wrong` means nothing in a hostfile here" in text


@pytest.mark.parametrize(
    "text",
    [
        "[nodes.a]",
        "# x\n\n  [defaults]",
        "practice = true",
        "nodes = { a = { gpus = 8 } }",
        "defaults.gpus=8\n",
        '"nodes".a.gpus = 8',
    ],
)
def test_text_that_is_toml(text: str) -> None:
    """The first line with content is a table, or a word that `=` follows."""
    assert is_toml(text)


@pytest.mark.parametrize(
    "text", ["", "# x", "gpu-01", "nodes slots=8", "nodes.cluster slots = 8", "a:8", "me@a user=b"]
)
def test_text_that_is_a_hostfile(text: str) -> None:
    """A hostfile's first word is a host, and `=` comes later if at all."""
    assert not is_toml(text)


def test_a_file_that_is_hardly_a_hostfile() -> None:
    """What a file can stand for has a bound, and a long line costs no more than its length."""
    assert "the hostfile names more than 10000 hosts" in refusal("\n".join(f"a{number}" for number in range(10_001)))
    assert nodes("a" + " " * 1_000_000 + "slots=1") == [{"id": "a", "ssh": "a", "gpus": 1}]
