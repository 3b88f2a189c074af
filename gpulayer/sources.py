"""Where the nodes come from: a hosts.toml, a hostfile of MPI or DeepSpeed, a Slurm allocation, the SSH configuration.

The one way in: which of them a name stands for is decided here, and nowhere else.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpulayer.errors import HostsFileError
from gpulayer.hostfile import is_toml, parse_hostfile
from gpulayer.hosts import HostMap, find_hosts_file, load_hosts, read_text
from gpulayer.slurm import read_slurm
from gpulayer.ssh_hosts import read_ssh_hosts

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

SLURM = "slurm"
SSH = "ssh:"


def read_hosts(named: str | None, environ: Mapping[str, str], cwd: Path) -> HostMap:
    """Return the nodes of what `named` (--hosts) or $GPULAYER_HOSTS names, else of the hosts map that is found.

    The word `slurm` is the allocation. A file whose name ends in `.toml` is a hosts map; of another, the first line
    decides. Raises HostsFileError.
    """
    if (named or environ.get("GPULAYER_HOSTS")) == SLURM:
        return read_slurm(environ)
    path = find_hosts_file(named, environ, cwd)
    text = read_text(path)  # once: it may be a pipe
    if path.suffix == ".toml" or is_toml(text):
        return load_hosts(path, text)
    return parse_hostfile(path, text)


def read_source(source: str, environ: Mapping[str, str], cwd: Path, ssh_config: Path | None) -> HostMap:
    """Return the nodes that a new hosts map is made of: those of read_hosts, or of `ssh:PATTERN`.

    Raises HostsFileError.
    """
    if not source.startswith(SSH):
        return read_hosts(source, environ, cwd)
    pattern = source.removeprefix(SSH)
    if not pattern or str(ssh_config) == "none":
        what = "no pattern of Host names" if not pattern else "no SSH configuration to look in"
        raise HostsFileError(f"`--from {source}` has {what}", hint="write one as in `--from 'ssh:gpu-*'`")
    return read_ssh_hosts(pattern, ssh_config)
