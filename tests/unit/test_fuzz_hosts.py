"""Whatever stands in a hosts map: a map, or an error of ours; within bounds of time and memory."""

from __future__ import annotations

import contextlib
import json
import math
import time
import tracemalloc
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpulayer.errors import HostsFileError, PoolError
from gpulayer.hosts import HostMap, NodeKeys, load_hosts
from gpulayer.messages import error_text
from gpulayer.ranges import MAX_NAMES, expand, fold
from tests.support.fuzz import examples, nearly

if TYPE_CHECKING:
    from pathlib import Path

ENOUGH_S = 20
ENOUGH_BYTES = 200 << 20
DOCUMENT: dict[str, Any] = {
    "practice": False,
    "defaults": {"user": "me", "python": "/opt/py", "gpus": 8, "port": 22, "env": {"A": "1"}},
    "nodes": {
        "gpu-01": {"ssh": "gpu-01.cluster", "address": "10.0.0.11", "workdir": "/w", "scratch": "/tmp"},
        "gpu-[02-04]": {"address": "10.0.0.[12-14]", "gpus": [0, 1], "interface": "ib0", "env": {"B": "$NODE_RANK"}},
    },
}
FRAGMENTS = [
    *(
        "[nodes.a]",
        "[nodes",
        '[nodes."n[1-3]"]',
        "[defaults]",
        "\n",
        "\n",
        "=",
        " = ",
        '"',
        '"""',
        "'''",
        "[",
        "]",
        "{",
        "}",
    ),
    *(
        ",",
        "#",
        ".",
        "\0",
        "\ufeff",
        "\u2028",
        "env",
        "nodes",
        "gpus",
        "ssh",
        "1979-05-27T07:32:00Z",
        "inf",
        "0x" + "f" * 99,
    ),
    *("[1-9]", "[01-3]", "[,]", "[9-1]", "[1-9999]", "[1-2/0]", "$", "\\u0041", "\\x", "9" * 5000, "true", "é"),
]
RANGE_PARTS = [
    "[",
    "]",
    "-",
    ",",
    "/",
    " ",
    "0",
    "1",
    "9",
    "007",
    "9999",
    "999999999",
    "1" * 30,
    "a",
    "n",
    "@",
    "!",
    "&",
    "^",
]


def load(folder: Path, data: bytes | str) -> HostMap | None:
    """Load a map; None where it is refused, with a message that can be shown."""
    path = folder / "hosts.toml"
    path.write_bytes(data if isinstance(data, bytes) else data.encode("utf-8", "surrogatepass"))
    began_s = time.monotonic()
    try:
        return load_hosts(path)
    except HostsFileError as error:
        said = error_text(error)
    finally:
        assert time.monotonic() - began_s < ENOUGH_S
    assert str(path) in said
    return None


def toml(value: Any) -> str:
    """Return a value as TOML writes it, in a line; null, which TOML lacks, is a date."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(str(key))} = {toml(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(toml, value)) + "]"
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if math.isnan(value) else "inf"
    return "1979-05-27" if value is None else json.dumps(value)


def document(value: Any) -> str:
    """Return a whole file."""
    items = value.items() if isinstance(value, dict) else [("nodes", value)]
    return "".join(f"{json.dumps(str(key))} = {toml(item)}\n" for key, item in items)


@examples(150)
@given(st.binary(max_size=60))
def test_bytes_of_any_kind(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    """No file is too strange to be refused in words."""
    load(tmp_path_factory.getbasetemp(), data)


@examples(200)
@given(st.lists(st.sampled_from(FRAGMENTS), max_size=12).map("".join))
def test_pieces_of_toml_in_any_order(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    """Text that looks like a hosts map here and there."""
    load(tmp_path_factory.getbasetemp(), text)


@examples(200)
@given(nearly(DOCUMENT))
def test_a_map_with_other_values_in_some_places(tmp_path_factory: pytest.TempPathFactory, value: Any) -> None:
    """Any type in any place; a map that is taken has nodes with ids and addresses that are text."""
    found = load(tmp_path_factory.getbasetemp(), document(value))
    assert found is None or all(type(node.ssh) is str and node.id for node in found.nodes)


@examples(200)
@given(st.sampled_from(sorted(NodeKeys.model_fields)), st.lists(st.sampled_from(RANGE_PARTS), max_size=8).map("".join))
def test_ranges_of_any_kind_in_ids_and_values(tmp_path_factory: pytest.TempPathFactory, key: str, text: str) -> None:
    """Malformed, backwards, endless, with letters, in any key."""
    load(tmp_path_factory.getbasetemp(), f"[nodes.{json.dumps('n' + text)}]\n{key} = {json.dumps(text)}\n")


@examples(200)
@given(st.lists(st.sampled_from(RANGE_PARTS), max_size=10).map("".join))
def test_lists_of_nodes_of_any_kind(text: str) -> None:
    """`--nodelist` reads the same ranges: ids, or a PoolError; what is folded can be read again."""
    with contextlib.suppress(PoolError):
        ids = expand(text)
        assert len(ids) <= MAX_NAMES
        assert sorted(expand(fold(ids))) == sorted(ids)


BOMBS = {
    "a long range": '[nodes."n[1-999999999]"]',
    "many parts": f'[nodes."n[{",".join(["1-9999"] * 2000)}]"]',
    "many ranges": f'[nodes."n{"[1-2]" * 200}"]',
    "ranges of ranges": '[nodes."n[1-9999][1-9999][1-9999]"]',
    "many tables": "".join(f'[nodes."n{number}-[1-9999]"]\n' for number in range(300)),
    "a range in a value": '[nodes."n[1-9]"]\naddress = "10.[0-255].[0-255].[0-255]"',
    "many parts in a value": f'[nodes."n[1-9]"]\naddress = "10.0.0.[{",".join(["1-9999"] * 2000)}]"',
    "deep arrays": f"x = {'[' * 100_000}",
    "deep tables": f"x = {'{a=' * 100_000}",
    "deep keys": f"{'a.' * 50_000}b = 1",
    "a long number": f"[nodes.a]\nport = {'9' * 100_000}",
    "a long hexadecimal number": f"[nodes.a]\nport = 0x{'f' * 100_000}",
    "a long key": f"[nodes.a]\n{'x' * 100_000} = 1",
    "a long value": f'[nodes.a]\nuser = "{"x " * 100_000}"',
    "many unknown keys": "[nodes.a]\n" + "".join(f"key{number} = 1\n" for number in range(1000)),
    "many mistakes": "".join(f"[nodes.a{number}]\nport = 0\n" for number in range(1000)),
    "one machine many times": "".join(f'[nodes.a{n}]\nssh = "x"\ngpus = [{n}]\n' for n in range(200)),
}


@pytest.mark.parametrize("bomb", BOMBS)
def test_a_small_file_that_stands_for_much_is_refused_before_it_is_made(tmp_path: Path, bomb: str) -> None:
    """Little time and memory is spent on it; what is not refused is a map of a size that files have."""
    tracemalloc.start()
    try:
        found = load(tmp_path, BOMBS[bomb])
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < ENOUGH_BYTES
    assert (found is not None) == (bomb == "one machine many times")
    assert found is None or len(found.nodes) <= MAX_NAMES


def test_a_file_that_never_ends_is_not_read_to_the_end(tmp_path: Path) -> None:
    """A device, or a disk image in place of a map."""
    with pytest.raises(HostsFileError, match=r"is larger than 4 MiB"):
        load_hosts(tmp_path.joinpath("/dev/zero"))
