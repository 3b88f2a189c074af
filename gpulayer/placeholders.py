"""Placeholders: `$NODE_RANK` and the like, what each stands for on a node, and the check for what is left of them.

How text is read. A placeholder is `$NAME` or `${NAME}` with a name from PLACEHOLDERS; it becomes that node's value, and
the value is not read again. `${DOLLAR}` becomes one `$`: the way to have `$HOME` arrive as it stands is
`${DOLLAR}HOME`. Any other `$NAME`, `${...}` or `$(...)` is a survivor. Every other `$` is text: `^foo$`, `$5`, and
`$$`, which is a pair of plain dollar signs wherever it stands, so that `a$$b` arrives as `a$$b`.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from gpulayer.placement import PlacedNode, Placement

PLACEHOLDERS = (
    "NODE_RANK",
    "NNODES",
    "NPROC_PER_NODE",
    "WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "HEAD_ADDR",
    "NODE_ID",
    "JOB_ID",
)
"""The names that have a value on every node."""

ESCAPE = "DOLLAR"
"""The name that stands for a plain `$`."""

# One pass from the left. A pair comes first, so that its second `$` begins nothing.
_DOLLAR = re.compile(r"\$(?:(?P<pair>\$)|(?P<bare>[A-Za-z_][A-Za-z0-9_]*)|\{(?P<braced>[^{}]*)\}|(?P<open>[{(]))")


def placeholder_values(placement: Placement, placed: PlacedNode, job_id: str) -> dict[str, str]:
    """Return the value of every placeholder on one node, the escape included."""
    return {
        "NODE_RANK": str(placed.node_rank),
        "NNODES": str(placement.nnodes),
        "NPROC_PER_NODE": str(placed.nproc_per_node),
        "WORLD_SIZE": str(placement.world_size),
        "MASTER_ADDR": placement.master_addr,
        "MASTER_PORT": str(placement.master_port),
        "HEAD_ADDR": placement.master_addr,
        "NODE_ID": placed.node.id,
        "JOB_ID": job_id,
        ESCAPE: "$",
    }


def substitute(text: str, values: Mapping[str, str]) -> str:
    """Replace each `$NAME` and `${NAME}` that `values` knows, once; leave all else as it is."""

    def value(match: re.Match[str]) -> str:
        name = match["bare"] or match["braced"]
        return match[0] if name is None else values.get(name, match[0])

    return _DOLLAR.sub(value, text)


def survivors(text: str, known: Collection[str] = (*PLACEHOLDERS, ESCAPE)) -> tuple[str, ...]:
    """Return what `substitute` would leave of `text` as it was typed: `$NAME`, `${NAME}` and `$(...)`, each once."""
    found: dict[str, None] = {}
    for match in _DOLLAR.finditer(text):
        name = match["bare"] or match["braced"]
        if match["open"]:
            found[_bracketed(text, match)] = None
        elif not match["pair"] and name not in known:
            found[match[0]] = None
    return tuple(found)


def _bracketed(text: str, match: re.Match[str]) -> str:
    """Return `$(...)` or an unclosed `${...` for a message: to the closing bracket, or as far as is good to read."""
    end = text.find(")" if match["open"] == "(" else "}", match.end())
    whole = text[match.start() :] if end < 0 else text[match.start() : end + 1]
    return whole if len(whole) <= 60 else f"{whole[:57]}..."
