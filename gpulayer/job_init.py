"""`gpulayer job init`: a commented job file to start from."""

from __future__ import annotations

import importlib.resources
from typing import TYPE_CHECKING

from gpulayer.errors import JobError

if TYPE_CHECKING:
    from pathlib import Path

TEMPLATE = """\
#:schema {schema}
# What to run: `gpulayer run --job {name}`, or `gpulayer render --job {name}` for the plan alone.
# Options on the command line win over what stands here. A key that is not known is an error.
# Keys in comments show what they look like; all but the first may be left out.

entrypoint = "train.py" # on every node, from the working directory
# args = ["--epochs", "3"] # $NODE_RANK, $MASTER_ADDR and the like are replaced
# module = false # entrypoint is a module, as after `python -m`
# launcher = "torchrun" # or "deepspeed", "accelerate", or "command": entrypoint itself, once on each node

# nnodes = 2 # left out: all nodes of the hosts map
# nproc_per_node = 8 # left out: the node's `gpus`
# comm_backend = "nccl" # or "gloo"; the script finds it in GPULAYER_COMM_BACKEND

# python = "/opt/torch/bin/python" # left out: the hosts map's
# workdir = "/shared/project" # on the nodes; left out: the hosts map's, else the folder gpulayer is started in
# interface = "ib0" # left out: the one with the node's address

# bundle = "." # a folder here whose files go to every node; the job then starts in a copy of it
# max_bundle_size = "2GB" # a larger one is refused
# outputs = ["checkpoints/*.pt"] # come back at the end, from the working directory
# max_output_size = "10GB" # of a node

# timeout_s = 86400 # left out: never
# grace_s = 30 # between SIGTERM and SIGKILL
# lost_after_s = 30 # a node unheard for this long is lost
# failure_policy = "fail_fast" # the first failure ends the job everywhere; there is no other policy
# max_attempts = 1 # a job is not repeated; there is no other number

# Tables stand last: a key below a [table] belongs to it.

# [rendezvous]
# kind = "static" # or "c10d"
# port = 29500 # left out: this one, or the next free one
# join_timeout_s = 300 # all ranks have started within this

# [env] # for every process; no secrets: pass them on with `-e NAME`
# NCCL_DEBUG = "WARN"
"""


def job_template(name: str) -> str:
    """Return the text of a new job file that is called `name`."""
    schema = importlib.resources.files("gpulayer") / "schemas" / "job.schema.json"
    return TEMPLATE.format(schema=schema, name=name)


def write_job_file(path: Path) -> None:
    """Write a new job file. Raises JobError where something is there already, or nothing can be written."""
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(job_template(path.name))
    except FileExistsError:
        raise JobError(f"{path} is there already", hint="name another file: `gpulayer job init FILE`") from None
    except OSError as error:
        raise JobError(f"{path}: cannot be written: {error.strerror}") from None
