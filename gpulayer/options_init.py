"""The options of `gpulayer hosts init` and `gpulayer job init`.

No `from __future__ import annotations` here: typer reads the annotations themselves.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from gpulayer.options import ReachOptions, option, refuse_unprobed

DEFAULT_OUTPUT = Path("hosts.toml")
SSH = "ssh:"  # as in sources.py, which takes long to import


@dataclass(frozen=True, kw_only=True)
class MapSource:
    """Where a new hosts map has its nodes from, what is asked of them, and where it goes."""

    source: Annotated[
        str, option("--from", metavar="SOURCE", text="Hostfile, hosts map, `slurm`, or `ssh:PATTERN` of Host names.")
    ]
    output: Annotated[Path, option("-o", "--output", metavar="FILE", text="The file to write [./hosts.toml].")] = (
        DEFAULT_OUTPUT
    )
    force: Annotated[bool, option("--force", text="Replace the file that is there.")] = False
    nodelist: Annotated[
        str | None,
        option("-w", "--nodelist", metavar="RANGES", text="These nodes only: gpu-[01-04]."),
    ] = None
    exclude: Annotated[str | None, option("-x", "--exclude", metavar="RANGES", text="None of these nodes.")] = None
    python: Annotated[
        str | None, option("--python", metavar="PATH", text="Python on the nodes [what SOURCE says].")
    ] = None
    probe: Annotated[bool, option("--probe", text="Log in to the nodes, and ask for GPUs and addresses.")] = False
    ssh_config: Annotated[
        Path | None,
        option("-F", "--ssh-config", metavar="FILE", text="SSH configuration, or `none` [~/.ssh/config]."),
    ] = None


@dataclass(frozen=True, kw_only=True)
class InitOptions(ReachOptions, MapSource):
    """A new hosts map, and how its nodes are logged in to."""

    def __post_init__(self) -> None:
        """Refuse an option that would be read and not obeyed."""
        if not self.probe:
            refuse_unprobed(self, ssh_config=None if self.source.startswith(SSH) else self.ssh_config)


@dataclass(frozen=True, kw_only=True)
class JobInitOptions:
    """Where a new job file goes."""

    file: Annotated[Path, typer.Argument(metavar="FILE", show_default=False, hidden=True)] = Path("job.toml")
