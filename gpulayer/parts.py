"""One node's part of a job, before and after a launcher has made a command of it.

What a launcher is given, and what it gives back: launchers.py has the table of them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from gpulayer.placeholders import placeholder_values, substitute

if TYPE_CHECKING:
    from collections.abc import Mapping

    from gpulayer.job import DistributedJob
    from gpulayer.placement import PlacedNode, Placement


@dataclass(frozen=True, slots=True)
class NodePart:
    """All that decides the command of one node. `job_dir` is the job's folder there."""

    job: DistributedJob
    placement: Placement
    placed: PlacedNode
    job_id: str
    job_dir: str

    @property
    def python(self) -> str:
        """The Python on the node."""
        return self.job.python or self.placed.node.python

    @property
    def log_dir(self) -> str:
        """Where a launcher puts a file for each rank and stream: ranks that share a pipe break each other's lines."""
        return f"{self.job_dir}/ranks"

    @property
    def words(self) -> tuple[str, ...]:
        """The script and its arguments, or the command and its own, placeholders substituted."""
        values = placeholder_values(self.placement, self.placed, self.job_id)
        return tuple(substitute(text, values) for text in (self.job.entrypoint, *self.job.args))


@dataclass(frozen=True, slots=True)
class Rendered:
    """The command of one node. `script_at`: from which word on it is the user's. `env` is for the launcher itself."""

    argv: tuple[str, ...]
    script_at: int
    env: Mapping[str, str] = field(default_factory=dict)


def rendered(launcher: tuple[str, ...], words: tuple[str, ...], env: Mapping[str, str] | None = None) -> Rendered:
    """Join the launcher's own words and the user's."""
    return Rendered((*launcher, *words), len(launcher), env or {})


def escaped(words: tuple[str, ...]) -> tuple[str, ...]:
    """Return what torchrun turns into `words`.

    It passes the script and its arguments through string.Template with `local_rank` as the only name
    (torch/distributed/elastic/utils/api.py, `macros.substitute`).
    """
    return tuple(word.replace("$", "$$") for word in words)
