"""torchrun's command line for one node."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from gpulayer.parts import Rendered, escaped, rendered

if TYPE_CHECKING:
    from gpulayer.parts import NodePart

C10D_READ_TIMEOUT_S = 60


def render_torchrun(part: NodePart) -> Rendered:
    """Return the command of one node. `plan.build_plan` has refused survivors of placeholders before.

    Every option is there whose absence would leave the choice to a default or to a `PET_*` variable. Long options in
    the spelling that torch has had since 2.1. IPv6 addresses stand bare in `--master-addr`.
    """
    placement, placed, job = part.placement, part.placed, part.job
    backend, conf = _rendezvous(part)
    options = (
        ("--nnodes", str(placement.nnodes)),
        ("--nproc-per-node", str(placed.nproc_per_node)),
        ("--node-rank", str(placed.node_rank)),
        ("--master-addr", placement.master_addr),
        ("--master-port", str(placement.master_port)),
        backend,
        ("--max-restarts=0",),
        # Two jobs with torchrun's default id, "none", can join each other.
        ("--rdzv-id", part.job_id),
        conf,
        ("--role", "default"),
        ("--monitor-interval", "0.1"),
        ("--redirects", "3"),
        ("--tee", "0"),
        ("--log-dir", part.log_dir),
        ("--module",) if job.module else (),
    )
    # `--` ends torchrun's options, and keeps a `--` among the script's arguments from being dropped by argparse.
    launcher = (part.python, "-m", "torch.distributed.run", *(word for option in options for word in option), "--")
    return rendered(launcher, escaped(part.words))


def _rendezvous(part: NodePart) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return how the agents meet: by which backend, and its settings.

    Static: `timeout` must be a whole number of seconds, and nothing else is obeyed
    (torch/distributed/elastic/rendezvous/static_tcp_rendezvous.py). c10d: each agent must be told whether it is the
    host, since it would guess that from its host name, and by which address the others know it; they are numbered in
    the order of these addresses (dynamic_rendezvous.py, `_mark_rendezvous_complete`), as the placement has them.
    """
    timeout_s = math.ceil(part.job.rendezvous.join_timeout_s)
    if part.job.rendezvous.kind == "static":
        # An endpoint would win over address and port, so none is set, and openly.
        return ("--rdzv-backend", "static", "--rdzv-endpoint="), ("--rdzv-conf", f"timeout={timeout_s}")
    address = part.placement.master_addr
    host = f"[{address}]" if ":" in address else address
    settings = {
        "is_host": int(part.placed.node_rank == 0),
        "join_timeout": timeout_s,
        "read_timeout": max(timeout_s, C10D_READ_TIMEOUT_S),
    }
    return (
        ("--rdzv-backend", "c10d", "--rdzv-endpoint", f"{host}:{part.placement.master_port}"),
        (
            *("--rdzv-conf", ",".join(f"{name}={value}" for name, value in settings.items())),
            *("--local-addr", part.placed.address),
        ),
    )
