"""What differs between two plans, in lines for whoever reviews them: each field by its name, nodes folded. Pure."""

from __future__ import annotations

import json
from collections import defaultdict
from difflib import SequenceMatcher
from typing import TYPE_CHECKING, Any

from gpulayer.plan_names import without_job_ids
from gpulayer.ranges import fold
from gpulayer.review import quote

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Iterator, Mapping, Sequence

    from gpulayer.plan_file import SavedPlan

_LONGEST = 300
_BEFORE = 30  # letters in front of the first one that differs
_MOST_UNITS = 2000  # more are compared word by word: aligning them takes their number squared
_NOT_SHOWN = {"version", "digest", "uneven", "recipe", "nodes", "job_id", "script", "gpulayer"}
_OF_NODES = {"node_id", "argv", "env", "ranks"}
_SHA_DIGITS = 12
_NOTHING = "none"


def differences(old: SavedPlan, new: SavedPlan, skip: Container[str] = ()) -> list[str]:
    """Return what differs, a line each: the whole plan first, then nodes in their order. `skip` are ids of nodes."""
    one, other = without_job_ids(old, new)
    both = [node_id for node_id in one if node_id in other and node_id not in skip]
    found: dict[str, list[str]] = defaultdict(list)
    regular = all(_place(one[node_id]) == _place(other[node_id]) for node_id in both)
    for node_id in both:
        for text in _of_node(one[node_id], other[node_id], with_ranks=regular):
            found[text].append(node_id)
    return [
        *_of_plan(old, new),
        *_nodes_there(old, new),
        *(f"{fold(ids)}: {text}" for text, ids in found.items()),
    ]


def changed_by_hand(*plans: SavedPlan) -> list[str]:
    """Return a line for each plan that is not as gpulayer wrote it."""
    return [f"digest: {plan.source} has been changed since it was made" for plan in plans if not plan.is_as_made]


def _of_script(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[str]:
    one, other = _sha(old.get("script")), _sha(new.get("script"))
    if one != other:
        yield f"script: {_named_script(old, new)}: sha256 {_short(one)} -> {_short(other)}"


def _named_script(*documents: Mapping[str, Any]) -> str:
    scripts = (document.get("script") for document in documents)
    return next((_value(script.get("path")) for script in scripts if isinstance(script, dict)), "?")


def _sha(script: object) -> str | None:
    sha256 = script.get("sha256") if isinstance(script, dict) else None
    return sha256 if isinstance(sha256, str) else None


def _short(sha256: str | None) -> str:
    return "not readable here" if sha256 is None else _value(sha256[:_SHA_DIGITS])


def _of_plan(old: SavedPlan, new: SavedPlan) -> Iterator[str]:
    if old.job_id != new.job_id:
        yield f"job_id: {old.job_id} -> {new.job_id}"
    yield from _values(old.document, new.document, _NOT_SHOWN)
    yield from _of_script(old.document, new.document)


def _values(old: Mapping[str, Any], new: Mapping[str, Any], leave_out: Container[str]) -> Iterator[str]:
    for key in dict.fromkeys((*old, *new)):
        one, other = old.get(key), new.get(key)
        if key in leave_out or one == other:
            continue
        if isinstance(one, dict) and isinstance(other, dict):
            yield from (f"{_value(key)}.{text}" for text in _values(one, other, ()))
        else:
            yield f"{_value(key)}: {_arrow(_value(one), _value(other))}"


def _nodes_there(old: SavedPlan, new: SavedPlan) -> Iterator[str]:
    for words, ids in (
        ("only in the first plan", [node_id for node_id in old.nodes if node_id not in new.nodes]),
        ("only in the second plan", [node_id for node_id in new.nodes if node_id not in old.nodes]),
    ):
        if ids:
            yield f"{fold(ids)}: {words}"


def _place(node: Mapping[str, Any]) -> tuple[object, object]:
    return node.get("node_rank"), node.get("nproc_per_node")


def _of_node(old: Mapping[str, Any], new: Mapping[str, Any], *, with_ranks: bool) -> Iterator[str]:
    """Yield what differs on one node. Ranks follow from places and counts, and are told where those are alike."""
    yield from _values(old, new, _OF_NODES - ({"ranks"} if with_ranks else set()))
    yield from (f"argv: {text}" for text in _of_argv(old["argv"], new["argv"]))
    yield from (f"env: {text}" for text in _of_env(old["env"], new["env"]))


# --- the environment ------------------------------------------------------------------------------------------------


def _of_env(old: Mapping[str, str], new: Mapping[str, str]) -> Iterator[str]:
    for name in dict.fromkeys((*old, *new)):
        if name not in new:
            yield f"- {_cut(f'{_word(name)}={_word(old[name])}')}"
        elif name not in old:
            yield f"+ {_cut(f'{_word(name)}={_word(new[name])}')}"
        elif old[name] != new[name]:
            yield f"{_word(name)}: {_arrow(_word(old[name]), _word(new[name]))}"


# --- the command ----------------------------------------------------------------------------------------------------

_Unit = tuple[str, ...]
"""A word of a command, or an option with the value that follows it."""


def _of_argv(old: Sequence[str], new: Sequence[str]) -> Iterator[str]:
    if old == new:
        return
    one, other = _units(old), _units(new)
    if max(len(one), len(other)) > _MOST_UNITS:
        yield from _by_place(one, other)
        return
    for tag, begin, end, other_begin, other_end in SequenceMatcher(None, one, other, autojunk=False).get_opcodes():
        if tag != "equal":
            yield from _replaced(one[begin:end], other[other_begin:other_end])


def _units(argv: Sequence[str]) -> list[_Unit]:
    units: list[_Unit] = []
    for word in argv:
        if units and len(units[-1]) == 1 and _is_option(units[-1][0]) and not word.startswith("-"):
            units[-1] = (units[-1][0], word)
        else:
            units.append((word,))
    return units


def _is_option(word: str) -> bool:
    return word.startswith("-") and word.strip("-") != "" and "=" not in word


def _key(unit: _Unit) -> str:
    """Return what a unit sets: the option's name, or "" for a word that is none."""
    word = unit[0]
    return word.partition("=")[0] if word.startswith("-") else ""


def _replaced(old: list[_Unit], new: list[_Unit]) -> Iterator[str]:
    """Say how one part of a command became another: by options of one name, then one by one, then what is left."""
    left = list(new)
    alone: list[_Unit] = []
    for unit in old:
        match = next((other for other in left if _key(other) == _key(unit) != ""), None)
        if match is None:
            alone.append(unit)
            continue
        left.remove(match)
        if match != unit:
            yield _changed(unit, match)
    if len(alone) == len(left) and all(_key(unit) == "" for unit in (*alone, *left)):
        yield from (_arrow(_unit(one), _unit(other)) for one, other in zip(alone, left, strict=True))
        return
    yield from (f"- {_cut(_unit(unit))}" for unit in alone)
    yield from (f"+ {_cut(_unit(unit))}" for unit in left)


def _changed(old: _Unit, new: _Unit) -> str:
    if len(old) == len(new) == 2:
        return f"{_word(old[0])} {_arrow(_word(old[1]), _word(new[1]))}"
    return _arrow(_unit(old), _unit(new))


def _by_place(old: Sequence[_Unit], new: Sequence[_Unit]) -> Iterator[str]:
    place = next((at for at, (one, other) in enumerate(zip(old, new, strict=False)) if one != other), None)
    place = min(len(old), len(new)) if place is None else place
    one, other = ([*units[place : place + 1], ()][0] for units in (old, new))
    yield f"{len(old)} options and words -> {len(new)}, the first that differs: {_arrow(_unit(one), _unit(other))}"


def _unit(unit: Iterable[str]) -> str:
    return " ".join(map(_word, unit)) or _NOTHING


# --- values ---------------------------------------------------------------------------------------------------------


def _word(text: str) -> str:
    """Return a word as a shell has it typed; as JSON where a terminal would not show it as it is."""
    return quote(text) if text.isprintable() else json.dumps(text)


def _value(value: object) -> str:
    if value is None:
        return _NOTHING
    if isinstance(value, str):
        return _word(value) if value else "''"
    return json.dumps(value)


def _arrow(old: str, new: str) -> str:
    """Say that one text became another; of long ones, what stands about the first place where they differ."""
    common = next((at for at, (one, other) in enumerate(zip(old, new, strict=False)) if one != other), 0)
    begin = common - _BEFORE if common > _LONGEST // 2 else 0
    one, other = (("..." if begin else "") + _cut(text[begin:]) for text in (old, new))
    return f"{one} -> {other}"


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
