"""The command lines of launchers other than torchrun, for one node: any command, DeepSpeed's, Accelerate's."""

from __future__ import annotations

import base64
import json
import math
from typing import TYPE_CHECKING

from gpulayer.parts import Rendered, escaped, rendered
from gpulayer.placeholders import placeholder_values

if TYPE_CHECKING:
    from gpulayer.parts import NodePart

COMMAND_NAMES = ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "NNODES", "NPROC_PER_NODE", "WORLD_SIZE")
"""What a command finds in its environment: the placeholders of the same names."""


def render_command(part: NodePart) -> Rendered:
    """Return the user's own command, as it is."""
    values = placeholder_values(part.placement, part.placed, part.job_id)
    return rendered((), part.words, {name: values[name] for name in COMMAND_NAMES})


def render_deepspeed(part: NodePart) -> Rendered:
    """Return DeepSpeed's launcher of one node.

    It is what DeepSpeed's own runner starts on each node over pdsh (deepspeed/launcher/multinode_runner.py). Read with
    0.19.8: `world_info` has the devices of all nodes in their order, and they become CUDA_VISIBLE_DEVICES; each rank's
    stdout and stderr go to one file, `<time>_rank<RANK>.log`. The script gets
    `--local_rank=N` in front of its arguments.
    """
    devices = {
        placed.node.id: list(placed.node.gpus[: placed.nproc_per_node])
        if isinstance(placed.node.gpus, tuple)
        else list(range(placed.nproc_per_node))
        for placed in part.placement.nodes
    }
    options = (
        f"--world_info={base64.urlsafe_b64encode(json.dumps(devices).encode()).decode()}",
        f"--node_rank={part.placed.node_rank}",
        f"--master_addr={part.placement.master_addr}",
        f"--master_port={part.placement.master_port}",
        f"--enable_each_rank_log={part.log_dir}",
        *(("--module",) if part.job.module else ()),
        "--",
    )
    return rendered((part.python, "-m", "deepspeed.launcher.launch", *options), part.words)


def render_accelerate(part: NodePart) -> Rendered:
    """Return Accelerate's launcher of one node. Read with 1.15.0, accelerate/commands/launch.py.

    It runs torchrun in its own process, and takes from the command line the options below alone; what torchrun needs
    besides is left to torchrun's defaults, which its PET_ variables are.
    """
    placement = part.placement
    options = (
        "--multi_gpu",  # ranks by torchrun, whatever they compute on
        ("--num_machines", str(placement.nnodes)),
        ("--num_processes", str(placement.world_size)),
        ("--machine_rank", str(part.placed.node_rank)),
        "--same_network",
        ("--main_process_ip", placement.master_addr),
        ("--main_process_port", str(placement.master_port)),
        ("--rdzv_backend", "static"),
        ("--rdzv_conf", f"timeout={math.ceil(part.job.rendezvous.join_timeout_s)}"),
        ("--max_restarts", "0"),
        ("--monitor_interval", "0.1"),
        ("--role", "default"),
        ("--tee", "0"),
        ("--log_dir", part.log_dir),
        *(("--module",) if part.job.module else ()),
    )
    words = (word for option in options for word in ((option,) if isinstance(option, str) else option))
    launcher = (part.python, "-m", "accelerate.commands.launch", *words, "--")
    env = {"PET_RDZV_ID": part.job_id, "PET_REDIRECTS": "3"}
    return rendered(launcher, escaped(part.words), env)
