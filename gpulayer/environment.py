"""The environment of what a job starts on a node. Runs on nodes."""

from __future__ import annotations

import os

from gpulayer.processes import environment_of

# What torchrun sets for itself. A leftover in the node's own environment misleads torchrun or the script.
STALE_NAMES = frozenset(
    b"MASTER_ADDR MASTER_PORT RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE GROUP_RANK GROUP_WORLD_SIZE NODE_RANK "
    b"ROLE_RANK ROLE_NAME ROLE_WORLD_SIZE TORCH_ELASTIC_WORKER_IDENTICAL PYTHON_EXEC".split()
)
STALE_PREFIXES = (b"PET_", b"TORCHELASTIC_")

TYPE_CHECKING = False  # mypy takes it for true; importing typing would cost 5 ms
if TYPE_CHECKING:
    from typing import Any

    Header = dict[str, Any]


def to_bytes(text: str) -> bytes:
    """Return the bytes that a string stands for; lone surrogates are bytes that were no UTF-8 on the login node."""
    return text.encode("utf-8", "surrogateescape")


def node_environment(added: dict[str, str]) -> dict[bytes, bytes]:
    """Return the node's own environment, less what would mislead torchrun, and what the plan adds to it."""
    # As the login shell gave it: os.environ has what Python adds to it on a machine without a locale.
    pairs = (entry.partition(b"=") for entry in environment_of(os.getpid()) if entry)
    env = {name: value for name, _, value in pairs}
    env = {name: env[name] for name in env if name not in STALE_NAMES and not name.startswith(STALE_PREFIXES)}
    env.update((to_bytes(name), to_bytes(value)) for name, value in added.items())
    return env


def job_environment(job: Header, interface: str) -> dict[bytes, bytes]:
    """Return what the command is started with: the above, the interface that was chosen, and the job's marks."""
    env = node_environment(job["env"])
    if interface:
        name = interface.encode()
        chosen = {b"GLOO_SOCKET_IFNAME": name, b"TP_SOCKET_IFNAME": name, b"NCCL_SOCKET_IFNAME": b"=" + name}
        env = {**chosen, **env}
    env[b"PWD"] = to_bytes(job["workdir"])  # as after `cd`
    env[b"GPULAYER_NODE_RANK"] = b"%d" % job["node_rank"]
    env[b"GPULAYER_MARKER"] = job["marker"].encode()
    return env
