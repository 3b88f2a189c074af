"""Ranges in names: `gpu-[02-16]` to fifteen names and back. The only ClusterShell.

ClusterShell's RangeSet expands each range of numbers and its NodeSet folds names. NodeSet does not expand: it sorts
(the file's order is the order of ranks) and reads `@`, `!`, `&`, `^` and `,` as operators, in paths too. Its
modules are imported where they are used, as most commands meet no range.
"""

from __future__ import annotations

import itertools
import math
import re
from typing import TYPE_CHECKING

from gpulayer.errors import PoolError
from gpulayer.values import NODE_ID, ValueRefusedError, check_node_id

if TYPE_CHECKING:
    from collections.abc import Iterable

MAX_NAMES = 10_000  # a mistyped `[1-2000000000]` must not fill the memory
_RANGE = re.compile(r"\[([0-9,/ -]*)\]")
_PART = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9})(?:/[0-9]{1,9})?)?")


def has_range(text: str) -> bool:
    """True when `text` holds brackets with nothing but numbers, `-`, `,` and `/` in them, so no `[old]`."""
    return bool(_RANGE.search(text))


def without_ranges(text: str) -> str:
    """Return `text` with each range replaced by one digit: the shape that every name of it has."""
    return _RANGE.sub("0", text)


def expand_ranges(text: str) -> list[str]:
    """Return the names that `text` stands for, in the order written; several ranges give every combination.

    Zeros in front are kept, and `[1-9/2]` steps by two. Raises ValueRefusedError for a range that is malformed or
    too long.
    """
    pieces = _RANGE.split(text)  # literal, range, literal, ..., literal
    choices = [_numbers(piece) if index % 2 else [piece] for index, piece in enumerate(pieces)]
    if math.prod(map(len, choices)) > MAX_NAMES:
        raise ValueRefusedError(f"stands for more than {MAX_NAMES} names")
    return ["".join(combination) for combination in itertools.product(*choices)]


def _numbers(text: str) -> list[str]:
    from ClusterShell.RangeSet import RangeSet, RangeSetParseError

    numbers: list[str] = []
    for part in map(str.strip, text.split(",")):
        ends = _PART.fullmatch(part)
        if not ends:
            raise ValueRefusedError(
                f"holds `[{text}]`, which is no range", "write a range such as `[01-16]` or `[1,3-5]`"
            )
        low, high = ends[1], ends[2] or ends[1]
        if int(high) < int(low):
            raise ValueRefusedError(f"holds the range `{part}`, which runs backwards", f"write `{high}-{low}`")
        if int(high) - int(low) >= MAX_NAMES:
            raise ValueRefusedError(f"holds the range `{part}`, which is longer than {MAX_NAMES}")
        if len(numbers) > MAX_NAMES:
            raise ValueRefusedError(f"stands for more than {MAX_NAMES} names")
        try:
            numbers += map(str, RangeSet(part))
        except RangeSetParseError:  # `01-3`: are these 1, 2, 3 or 01, 02, 03?
            raise ValueRefusedError(
                f"holds the range `{part}`, whose ends do not fit each other",
                "write both ends with as many digits, and a step of 1 or more",
            ) from None
    return numbers


def expand(text: str) -> list[str]:
    """Return the node ids of a list such as `gpu-[03-05],head`, in the order written, each once.

    Raises PoolError where a name or range in it is malformed.
    """
    ids: list[str] = []
    for piece in map(str.strip, re.split(r",(?![^\[]*\])", text)):
        if not piece:
            raise PoolError(f"`{text}` holds an empty name", hint="write ids as in `gpu-[01-04],gpu-07`")
        try:
            check_node_id(without_ranges(piece))
            ids += expand_ranges(piece)
        except ValueRefusedError as error:
            raise PoolError(f"`{piece}` {error}", hint=error.hint) from None
    return list(dict.fromkeys(ids))


def fold(ids: Iterable[str]) -> str:
    """Return the ids as people read them, sorted, each once: `gpu-[03-05],head`. Odd names are just listed."""
    names = list(dict.fromkeys(ids))
    if len(names) < 2 or not all(NODE_ID.fullmatch(name) for name in names):
        return ",".join(names)
    from ClusterShell.NodeSet import RESOLVER_NOGROUP, NodeSet, NodeSetException

    try:  # without a resolver no group configuration is read
        return str(NodeSet.fromlist(names, resolver=RESOLVER_NOGROUP))
    except NodeSetException:  # a number beyond NodeSet's limit
        return ",".join(names)
