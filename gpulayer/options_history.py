"""The options of `gpulayer runs` and `gpulayer logs`.

No `from __future__ import annotations` here: typer reads the annotations themselves.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from gpulayer.options import number, option


@dataclass(frozen=True, kw_only=True)
class RunsOptions:
    """Which runs to list, and how."""

    folder: Annotated[Path | None, typer.Argument(metavar="DIR", show_default=False, hidden=True)] = None
    as_json: Annotated[bool, option("--json", text="Print JSON.")] = False


@dataclass(frozen=True, kw_only=True)
class LogsOptions:
    """Which output of which run to show, and in which order."""

    run: Annotated[str, typer.Argument(metavar="RUN", show_default=False, hidden=True)] = "last"
    node: Annotated[
        str | None, option("--node", metavar="NODE", text="Of this node only: its node rank or its id.")
    ] = None
    rank: Annotated[int | None, number("--rank", metavar="RANK", text="Of this rank only.")] = None
    follow: Annotated[bool, option("-f", "--follow", text="Go on until the run is over.")] = False
    merge: Annotated[bool, option("--merge", text="In the order in which it came, all streams together.")] = False
