"""A hosts map as text: what `gpulayer hosts init` writes. Owns which nodes share a table, and the comments."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpulayer.hosts import RANGED_KEYS, NodeKeys
from gpulayer.problems import table, toml_key
from gpulayer.ranges import expand_ranges, has_range
from gpulayer.values import ValueRefusedError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from gpulayer.hosts import HostMap, Node

NODE = ""
"""The remark on a node as a whole, in the place of a key."""

# What stands there as a comment where no node has the key.
_LEFT_OUT = {
    "user": ('"me"', "left out: what ~/.ssh/config says, else your login name here"),
    "gpus": ("8", "processes per node; left out: `--nproc-per-node` must say it"),
    "python": ('"/opt/torch/bin/python"', "a Python with PyTorch in it; left out: python3"),
    "workdir": ('"/shared/project"', "left out: the folder that gpulayer is started in"),
}
_NUMBER = re.compile(r"([0-9]+)")


@dataclass(frozen=True, slots=True)
class _Entry:
    """A node on paper: its keys, each with its remark."""

    node_id: str
    keys: Mapping[str, tuple[object, str]]
    remark: str

    def without(self, names: set[str]) -> _Entry:
        """The same without the keys that stand elsewhere."""
        left = {name: value for name, value in self.keys.items() if name not in names}
        return _Entry(self.node_id, left, self.remark)


def render_map(host_map: HostMap, remarks: Mapping[str, Mapping[str, str]], schema: str) -> str:
    """Return the text of a hosts.toml that loads as this map.

    `remarks`: by node id and key (NODE: on the node itself) why a value is there. `schema` is named to editors.
    """
    entries = [_entry(node, remarks.get(node.id, {})) for node in host_map.nodes]
    shared = _shared(entries)
    lines = [f"#:schema {schema}", f"# The nodes of {_plain(host_map.source)}. They are drawn in this order."]
    if host_map.practice:
        lines.append("practice = true")
    known = {name for entry in entries for name in entry.keys}
    lines += ["", "[defaults] # keys for every node; a node's own key wins", *_keys(shared)]
    lines += [f"# {name} = {value} # {text}" for name, (value, text) in _LEFT_OUT.items() if name not in known]
    for group in _groups([entry.without(set(shared)) for entry in entries]):
        lines += ["", *_group(group)]
    return "\n".join(lines) + "\n"


def _entry(node: Node, remarks: Mapping[str, str]) -> _Entry:
    values = node.model_dump(exclude_unset=True)
    keys = {
        name: (values[name], remarks.get(name, ""))
        for name in NodeKeys.model_fields
        if name in values and values[name] != {} and (name, values[name]) != ("ssh", node.id)
    }
    return _Entry(node.id, keys, remarks.get(NODE, ""))


def _shared(entries: Sequence[_Entry]) -> dict[str, tuple[object, str]]:
    """Return the keys that all nodes have with one value, where there are several nodes."""
    first = entries[0].keys if len(entries) > 1 else {}
    return {name: value for name, value in first.items() if all(entry.keys.get(name) == value for entry in entries)}


def _groups(entries: Sequence[_Entry]) -> Iterator[list[_Entry]]:
    """Yield runs of nodes that one table can hold."""
    group: list[_Entry] = []
    for entry in entries:
        if group and _folded([*group, entry]) is None:
            yield group
            group = []
        group.append(entry)
    yield group


def _group(group: Sequence[_Entry]) -> Iterator[str]:
    node_id, keys = _folded(group) or (group[0].node_id, group[0].keys)
    yield table("nodes", node_id) + _comment(group[0].remark)
    yield from _keys(keys)


def _folded(group: Sequence[_Entry]) -> tuple[str, Mapping[str, tuple[object, str]]] | None:
    """Return the id and the keys of one table for all of these nodes; None where one cannot hold them."""
    if len(group) == 1:
        return group[0].node_id, group[0].keys
    first = group[0]
    if any(list(one.keys) != list(first.keys) or one.remark != first.remark for one in group):
        return None
    node_id = _count_along([one.node_id for one in group])
    keys: dict[str, tuple[object, str]] = {}
    for name, (value, remark) in first.keys.items():
        column = [one.keys[name][0] for one in group]
        if any(one.keys[name][1] != remark for one in group):
            return None
        alike = all(one == value for one in column)
        written = value if alike else _count_along([str(one) for one in column]) if name in RANGED_KEYS else None
        if written is None:
            return None
        keys[name] = (written, remark)
    return None if node_id is None else (node_id, keys)


def _count_along(texts: Sequence[str]) -> str | None:
    """Return these texts as one with a range, `gpu-[01-03]`, or None where that would not give them back."""
    split = [_NUMBER.split(text) for text in texts]
    places = [place for place in range(len(split[0])) if len({part[place] for part in split if place < len(part)}) > 1]
    if len(places) != 1 or len({len(part) for part in split}) != 1 or any(map(has_range, texts)):
        return None
    (place,) = places
    pieces = [*split[0][:place], f"[{split[0][place]}-{split[-1][place]}]", *split[0][place + 1 :]]
    folded = "".join(pieces)
    try:
        return folded if expand_ranges(folded) == list(texts) else None
    except ValueRefusedError:
        return None


def _keys(keys: Mapping[str, tuple[object, str]]) -> Iterator[str]:
    return (f"{name} = {_value(value)}{_comment(remark)}" for name, (value, remark) in keys.items())


def _value(value: object) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{toml_key(key)} = {_value(one)}" for key, one in value.items()) + " }"
    # JSON's strings, numbers and lists are TOML's, but for the one control character that JSON leaves as it is.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _comment(text: str) -> str:
    return f" # {_plain(text)}" if text else ""


def _plain(text: str) -> str:
    """Return what a comment can hold: nodes have a say in it, and a line that they end would be read as a key."""
    return "".join(char if char.isprintable() else "?" for char in text)
