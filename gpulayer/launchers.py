"""What can start the processes of a node: a table of launchers, all behind one interface.

torchrun.py has torchrun's command line, other_launchers.py those of the others.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpulayer.errors import JobError
from gpulayer.other_launchers import render_accelerate, render_command, render_deepspeed
from gpulayer.placement import by_address
from gpulayer.torchrun import render_torchrun

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from gpulayer.hosts import Node
    from gpulayer.job import DistributedJob, LauncherName
    from gpulayer.parts import NodePart, Rendered
    from gpulayer.placement import Placement


@dataclass(frozen=True, slots=True)
class Launcher:
    """One of them: how it is spelt on a node, and what it cannot do.

    `has_ranks`: it starts processes that have a RANK in their environment, which the supervisor then watches.
    """

    render: Callable[[NodePart], Rendered]
    has_ranks: bool = True
    takes_module: bool = True
    takes_c10d: bool = False
    takes_uneven: bool = False
    least_processes: int = 1


LAUNCHERS: Mapping[LauncherName, Launcher] = {
    "torchrun": Launcher(render_torchrun, takes_c10d=True, takes_uneven=True),
    "command": Launcher(render_command, has_ranks=False, takes_module=False, takes_uneven=True),
    "deepspeed": Launcher(render_deepspeed),
    "accelerate": Launcher(render_accelerate, least_processes=2),
}


def arranged(job: DistributedJob, nodes: Sequence[Node], addresses: Mapping[str, str]) -> list[Node]:
    """Return the nodes as the launcher of a job wants them placed. Raises PlacementError.

    Under c10d torchrun numbers them itself, by their addresses. A command is one process a node, so where the map does
    not say how many processes a node has, it is one.
    """
    if job.rendezvous.kind == "c10d" and LAUNCHERS[job.launcher].takes_c10d:
        nodes = by_address(nodes, addresses)
    if LAUNCHERS[job.launcher].has_ranks:
        return list(nodes)
    return [node if node.gpu_count else node.model_copy(update={"gpus": 1}) for node in nodes]


def check_launcher(job: DistributedJob, placement: Placement) -> Launcher:
    """Return the launcher of a job. Raises JobError where it cannot do what the job asks for."""
    launcher, name = LAUNCHERS[job.launcher], job.launcher
    if job.module and not launcher.takes_module:
        raise JobError(
            "`module` is about a script, and a command is none",
            hint="leave it out, or run the module as a command: `python3 -m NAME`",
        )
    if job.rendezvous.kind == "c10d" and not launcher.takes_c10d:
        raise JobError(f"`{name}` has no c10d rendezvous; torchrun has", hint="leave out `--rendezvous c10d`")
    if placement.uneven and not launcher.takes_uneven:
        counts = ", ".join(f"{one.node.id} {one.nproc_per_node}" for one in placement.nodes)
        raise JobError(
            f"`{name}` needs as many processes on each node, and they differ: {counts}",
            hint="give `--nproc-per-node`, or use torchrun",
        )
    if placement.world_size < launcher.least_processes:
        raise JobError(
            f"`{name}` starts no ranks for fewer than {launcher.least_processes} processes",
            hint="ask for more with `--nproc-per-node`, or use torchrun",
        )
    return launcher
