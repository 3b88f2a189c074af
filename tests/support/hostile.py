"""Nodes that lie: a program in place of a node's Python, and what must not come of it on the login node.

hosts_file = lying_map(cluster, {"h01": 'relay(lambda header, payload: [(header, payload), b"garbage"])'})

liar.py is what the program can say. It knows the nonce, which comes with the source that it was sent.
"""

from __future__ import annotations

import os
import re
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from tests.support import jobs
from tests.support.liar import TOKEN

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tests.support.cluster import Cluster, LoginNode, TomlValue
    from tests.support.host import Host
    from tests.support.jobs import LiveRun

MOST_BYTES = 200 << 20  # what the launcher may take at its peak
LIAR = Path(__file__).with_name("liar.py")


def lying_python(folder: Path, behaviour: str) -> Path:
    """Write a program that stands in for a node's Python and behaves like this, in the words of liar.py.

    What the job itself runs with it, torchrun and the probe, gets the real one.
    """
    path = folder / "python3"
    job = "import os, sys\nif sys.argv[1] != '-ISE': os.execv(sys.executable, [sys.executable, *sys.argv[1:]])\n"
    path.write_text(f"#!{sys.executable} -ISE\n{job}exec(open({str(LIAR)!r}).read())\n{behaviour}\n")
    path.chmod(0o755)
    return path


def lying_map(
    cluster: Cluster,
    liars: Mapping[str, str],
    *,
    hosts: Sequence[Host] | None = None,
    defaults: Mapping[str, TomlValue] | None = None,
    env: Mapping[str, str] | None = None,
) -> Path:
    """Write a hosts map in which these nodes have a liar for a Python; the others are honest."""
    nodes = {
        name: {"python": str(lying_python(cluster.new_folder("liar"), behaviour))} for name, behaviour in liars.items()
    }
    return jobs.map_with_fake_torch(cluster, hosts=hosts, defaults=defaults, nodes=nodes, env=env)


class Peak:
    """The most memory that a launcher took, read from outside while it ran."""

    def __init__(self, live: LiveRun) -> None:
        self.bytes = 0
        self._status = Path(f"/proc/{live.process.pid}/status")
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._thread.start()

    def read(self) -> int:
        """Return it, once the launcher is gone."""
        self._thread.join()
        return self.bytes

    def _follow(self) -> None:
        while True:
            try:
                found = re.search(r"VmHWM:\s+(\d+) kB", self._status.read_text())
            except OSError:
                return
            if found is None:  # a zombie has no memory
                return
            self.bytes = int(found[1]) << 10
            time.sleep(0.02)


class Places:
    """The files of the login node outside of run directories: in the user's home, and theirs elsewhere in /tmp."""

    def __init__(self, login: LoginNode) -> None:
        self._login = login
        self._before = self._look()

    def assert_unchanged(self) -> None:
        """Nothing was written there, and nothing anywhere has a name that a liar made up."""
        assert self._look() == self._before

    def _look(self) -> dict[str, tuple[int, int]]:
        home = self._login.home
        found = {}
        for folder, folders, files in os.walk(home):
            if Path(folder) == home / "runs":
                folders.clear()
                continue
            for name in files:
                stat = (Path(folder) / name).lstat()
                found[f"{folder}/{name}"] = (stat.st_size, stat.st_mtime_ns)
        temporary = home.parents[2]  # where the cluster's own folder is, beside those of other test runs
        for path in temporary.iterdir():
            if TOKEN in path.name:
                found[str(path)] = (0, 0)
        return found


_HARMLESS = re.compile("\x1b\\[[0-9;]*m|\r\x1b\\[K|\r\n")
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def assert_harmless(screen: str, *, terminal: bool = False) -> None:
    """No control character is on a screen but new lines and tabs, and on a terminal the colours of gpulayer's own."""
    text = _HARMLESS.sub("", screen) if terminal else screen
    found = _CONTROL.search(text)
    assert not found, text[max(0, found.start() - 200) : found.start() + 100]
    forged = [one for one in text.splitlines() if one.startswith(f"gpulayer: job {TOKEN}")]
    assert not forged
