"""The options about saved plans: which ones to compare, and which others a saved plan leaves no room for.

No `from __future__ import annotations` here: typer reads the annotations themselves.
"""

import dataclasses
from collections.abc import Container
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from gpulayer.errors import JobError
from gpulayer.options import HostsOptions

STDIO = "-"


@dataclass(frozen=True, kw_only=True)
class DiffOptions(HostsOptions):
    """Which plans to compare."""

    first: Annotated[str, typer.Argument(metavar="PLAN", show_default=False, hidden=True)]
    second: Annotated[str | None, typer.Argument(metavar="PLAN", show_default=False, hidden=True)] = None

    def __post_init__(self) -> None:
        """Refuse what would be read and not obeyed, and stdin twice."""
        if self.first == self.second == STDIO:
            raise JobError("both plans are `-`, and stdin holds one", hint="name a file for one of them")
        given = "--hosts" if self.hosts else "--ssh-config" if self.ssh_config else None
        if self.second is not None and given:
            raise JobError(
                f"`{given}` is about one plan and the hosts map of today, and two plans are given",
                hint="leave it out, or name one plan",
            )


def refuse_beside_plan(options: Any, kind: type, kept: Container[str]) -> None:
    """Raise JobError for options that would change a saved plan: fields of `kind` that were given, but those `kept`."""
    given = [
        _spelled(field)
        for field in dataclasses.fields(kind)
        if field.name not in kept and getattr(options, field.name) != field.default
    ]
    if given:
        raise JobError(
            f"`--plan` runs a plan as it is, and {', '.join(given)} would change it",
            hint="leave that out, or render a new plan with it",
        )


def _spelled(field: Any) -> str:
    """Return an option or argument as a user types it."""
    described = field.type.__metadata__[0]
    words = [described.default, *(described.param_decls or ())]  # in Annotated, typer takes the first for a default
    names = [word for word in words if isinstance(word, str) and word.startswith("--")]
    return f"`{names[0]}`" if names else str(described.metavar)
