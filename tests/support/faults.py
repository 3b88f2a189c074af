"""What rows of the fault matrix share: a job whose ranks resist their end, and what is told of a node that was lost."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from tests.support import endings, jobs
from tests.support.endings import block, outcomes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from tests.support.cluster import Cluster, TomlValue
    from tests.support.host import Host
    from tests.support.jobs import Finished, LiveRun

HIT = 1  # the node that something happens to
STOPPED = ("stopped", True)
FAILED = ("failed", True)
SUCCEEDED = ("succeeded", True)
LOST = ("lost", False)
LOST_BUT_CLEAN = ("lost", True)


def launch(
    cluster: Cluster,
    options: Sequence[str],
    source: str = endings.STUBBORN,
    *,
    user: str = "root",
    secretive: bool = True,
    hosts: Sequence[Host] | None = None,
    nodes: Mapping[str, Mapping[str, TomlValue]] | None = None,
    **env: str,
) -> tuple[LiveRun, Path]:
    """Start a job with the stand-in for torchrun on these hosts (default: all).

    Returns it, and the folder that is OUT to its ranks. `secretive`: ranks of STUBBORN have a daemon without a marker.
    """
    folder = cluster.new_folder("out")
    variables = {"OUT": str(folder), **({"SECRETIVE": "1"} if secretive else {}), **env}
    hosts_file = jobs.map_with_fake_torch(cluster, hosts=hosts, env=variables, nodes=nodes)
    login = cluster.login if user == "root" else cluster.walker
    return jobs.launch(login, hosts_file, options, jobs.write_script(cluster, source)), folder


def wait_running(cluster: Cluster, live: LiveRun, hosts: Sequence[Host] | None = None) -> endings.Watched:
    """Wait until a job of STUBBORN runs on these hosts (default: all), a rank and two daemons on each; return them."""
    live.wait_for_event("stage_reached", stage="running")
    return endings.wait_stubborn(cluster, 2 * len(cluster.hosts if hosts is None else hosts))


def wait_ready(live: LiveRun, folder: Path, ranks: int) -> None:
    """Wait until the job runs and these many ranks have noted in OUT that they are ready."""
    live.wait_for_event("stage_reached", stage="running")
    endings.wait_ready(folder, ranks)


def assert_lost(
    done: Finished,
    nodes: list[tuple[str, bool]],
    reason: str,
    *,
    lost: str = "h01",
    stopped: str = "h[00,02-03]",
) -> str:
    """The first cause is that a node was lost, for this reason (a regular expression), and the exit code is 4.

    Every node fared as expected; `lost` and `stopped` are the last block's words for them. Returns what the user sees.
    """
    assert done.returncode == done.receipt["exit_code"] == 4, done.stderr
    assert outcomes(done.receipt) == nodes
    cause = done.receipt["cause"]
    assert (cause["kind"], cause["rank"], nodes[cause["node_rank"]][0]) == ("lost", None, "lost")
    said = block(done.stderr)
    who = rf"node {cause['node_rank']} \({cause['node_id']}\)"
    first = re.search(rf"  first: ({who} was lost: .*{reason}.*), [\d.]+ s into the job\n", said)
    assert first, said
    assert f"  {stopped}: stopped by gpulayer; verified clean\n" in said
    assert re.search(rf"  {re.escape(lost)}: lost: .*{reason}", said)
    assert "Traceback" not in done.stderr
    return f"exit 4; `{first[1]}`"


def first_cause(done: Finished) -> str:
    """The exit code, and the sentence of the last block that names the first cause, less its time."""
    found = re.search(r"^  first: (.*?)(, [\d.]+ s into the job)?$", block(done.stderr), re.MULTILINE)
    assert found, done.stderr
    return f"exit {done.returncode}; `first: {found[1]}`"
