"""What fuzz tests have in common: how many examples, JSON of any kind, and values that are nearly right.

The examples are the same in each run. `GPULAYER_FUZZ=2000` tries that many, other ones each time.
"""

from __future__ import annotations

import itertools
import os
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

if TYPE_CHECKING:
    from collections.abc import Mapping

_WANTED = os.environ.get("GPULAYER_FUZZ", "")
_UNDER_LOAD = (HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.function_scoped_fixture)


def examples(count: int = 200) -> settings:
    """Return the decorator of a test that takes this many examples. One that takes 20 s hangs."""
    return settings(
        max_examples=int(_WANTED or count),
        derandomize=not _WANTED,
        deadline=timedelta(seconds=20),
        database=None,
        suppress_health_check=_UNDER_LOAD,
        print_blob=False,
    )


_DROP, _TWICE = object(), object()
ODD: list[Any] = [
    *(None, True, False, -1, 0, 1, 2, 255, 1 << 16, (1 << 63) - 1, 1 << 63, -(1 << 63), 10**30, 1e308, -0.5),
    *(
        float("nan"),
        float("inf"),
        "",
        "\x1b[2J",
        "\n",
        "\0",
        "a\r\nb",
        "\u202e",
        "\ud800",
        "x" * 5000,
        "..",
        "/",
        "NaN",
    ),
    *([], {}, [[]], [None], {"error": 1}, {"": []}, [1, "a"]),
]
SCALARS = st.one_of(st.sampled_from(ODD), st.integers(), st.text(max_size=20))
"""Single values, the odd ones first."""
JSON: st.SearchStrategy[Any] = st.recursive(
    SCALARS,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=8), inner, max_size=3)),
    max_leaves=5,
)
"""JSON of any shape, as Python's own reader takes it: NaN, lone surrogates and huge numbers too."""


def nearly(right: Any) -> st.SearchStrategy[Any]:
    """Return values that differ from `right` in up to three places: another value, one less, one twice, one more."""
    change = st.tuples(
        st.integers(0, max(0, _size(right) - 1)), st.one_of(SCALARS, st.sampled_from([_DROP, _TWICE]), JSON)
    )
    return st.lists(change, max_size=3).map(lambda changes: _changed(right, dict(changes)))


def _size(value: Any) -> int:
    """Count the places in a value, itself included."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return 1 + sum(map(_size, inner))


def _changed(value: Any, changes: Mapping[int, Any], at: int = 0) -> Any:
    """Return a copy with other values in the places that `changes` names; `at` is the place of `value`."""
    if changes.get(at, _TWICE) not in (_DROP, _TWICE):
        return changes[at]
    if not isinstance(value, dict | list):
        return value
    place = at + 1
    items: list[tuple[Any, Any]] = []
    for key, item in value.items() if isinstance(value, dict) else enumerate(value):
        change = changes.get(place)
        made = _changed(item, changes, place)
        items += [] if change is _DROP else [(key, made), (f"{key}2", made)] if change is _TWICE else [(key, made)]
        place += _size(item)
    return dict(items) if isinstance(value, dict) else [item for _, item in items]


CUTS = st.lists(st.integers(0, 300), max_size=5)
"""Where a stream is cut."""


def pieces(stream: bytes, at: list[int]) -> list[bytes]:
    """Return the same bytes in pieces."""
    places = sorted({0, len(stream), *(place for place in at if place < len(stream))})
    return [stream[begin:end] for begin, end in itertools.pairwise(places)]
