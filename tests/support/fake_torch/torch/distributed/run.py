"""A stand-in for torchrun: the processes, sessions, environment, log files and signals of torch 2.13's, and no torch.

Put `tests/support/fake_torch` on PYTHONPATH and run `python -m torch.distributed.run`. It differs in this: there is no
rendezvous (so every node must have the same number of processes) and no exit barrier.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from types import FrameType

POLL_S = 0.1
FLAGS = ("nnodes", "nproc-per-node", "node-rank", "master-addr", "master-port", "rdzv-id", "log-dir", "redirects")
FLAGS_WITHOUT_EFFECT = (
    *("rdzv-backend", "rdzv-endpoint", "rdzv-conf", "max-restarts", "monitor-interval", "start-method", "role", "tee"),
    *("event-log-handler", "local-ranks-filter", "local-addr", "signals-to-handle", "shutdown-timeout"),
)


class Stopped(BaseException):
    """torchrun was told to end by this signal."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def parse(argv: list[str]) -> argparse.Namespace:
    """Read the flags as torchrun's own parser does: both spellings, abbreviations, the first `--` dropped."""
    parser = argparse.ArgumentParser("torchrun")
    for name in (*FLAGS, *FLAGS_WITHOUT_EFFECT):
        short = {"redirects": ["-r"], "tee": ["-t"]}.get(name, [])
        parser.add_argument(*short, *dict.fromkeys([f"--{name}", f"--{name.replace('-', '_')}"]), default="")
    for name, short in (("module", ["-m"]), ("no-python", []), ("standalone", []), ("run-path", [])):
        parser.add_argument(*short, f"--{name}", action="store_true")
    parser.add_argument("script")
    parser.add_argument("script_args", nargs=argparse.REMAINDER)
    return parser.parse_args(argv)


def worker_environ(flags: argparse.Namespace, local_rank: int, folder: Path) -> dict[str, str]:
    """What torchrun adds to a worker's environment."""
    per_node, nodes, node_rank = int(flags.nproc_per_node), int(flags.nnodes), int(flags.node_rank)
    rank, world_size = str(node_rank * per_node + local_rank), str(nodes * per_node)
    return {
        "LOCAL_RANK": str(local_rank),
        "RANK": rank,
        "ROLE_RANK": rank,
        "GROUP_RANK": str(node_rank),
        "ROLE_NAME": "default",
        "LOCAL_WORLD_SIZE": str(per_node),
        "WORLD_SIZE": world_size,
        "ROLE_WORLD_SIZE": world_size,
        "GROUP_WORLD_SIZE": str(nodes),
        "MASTER_ADDR": flags.master_addr,
        "MASTER_PORT": flags.master_port,
        "TORCHELASTIC_RUN_ID": flags.rdzv_id,
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_ERROR_FILE": str(folder / "error.json"),
    }


def start(flags: argparse.Namespace, attempt: Path, local_rank: int) -> subprocess.Popen[bytes]:
    """Start one worker in a session of its own, its output in its own files."""
    folder = attempt / str(local_rank)
    folder.mkdir()
    command = [] if flags.no_python else [sys.executable, "-u"]
    words = [*(["-m"] if flags.module else []), flags.script, *flags.script_args]
    command += [Template(word).safe_substitute(local_rank=str(local_rank)) for word in words]
    environ = os.environ | worker_environ(flags, local_rank, folder)
    if flags.redirects != "3":
        return subprocess.Popen(command, env=environ, start_new_session=True)
    with (folder / "stdout.log").open("wb") as out, (folder / "stderr.log").open("wb") as err:
        return subprocess.Popen(command, env=environ, start_new_session=True, stdout=out, stderr=err)


def close(workers: list[subprocess.Popen[bytes]], number: int, timeout_s: float) -> None:
    """Send the signal to every worker's group, wait for the workers, then SIGKILL to the groups of those left."""
    for worker in workers:
        _signal_group(worker, number)
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline and any(worker.poll() is None for worker in workers):
        time.sleep(POLL_S)
    for worker in workers:
        if worker.poll() is None:
            _signal_group(worker, signal.SIGKILL)
        worker.wait()


def _signal_group(worker: subprocess.Popen[bytes], number: int) -> None:
    if worker.poll() is None:
        os.killpg(worker.pid, number)


def watch(workers: list[subprocess.Popen[bytes]]) -> int:
    """Wait for all workers, or for the first that fails; it takes the others with it. Returns torchrun's exit code."""
    while any(worker.poll() is None for worker in workers):
        if any(worker.poll() for worker in workers):
            break
        time.sleep(POLL_S)
    failed = [(rank, worker.returncode) for rank, worker in enumerate(workers) if worker.returncode]
    close(workers, signal.SIGTERM, 30)  # torch obeys its shutdown timeout only when it is stopped by a signal
    for local_rank, code in failed:
        print(f"torchrun: local_rank {local_rank} failed (exitcode: {code})", file=sys.stderr)
    return 1 if failed else 0


def main(argv: list[str]) -> int:
    """Run the workers to their end."""
    flags = parse(argv)
    root = flags.log_dir or tempfile.mkdtemp(prefix="torchelastic_")
    Path(root).mkdir(parents=True, exist_ok=True)
    attempt = Path(tempfile.mkdtemp(prefix=f"{flags.rdzv_id}_", dir=root)) / "attempt_0"
    attempt.mkdir()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, _stop)
    workers: list[subprocess.Popen[bytes]] = []
    try:
        for local_rank in range(int(flags.nproc_per_node)):
            workers.append(start(flags, attempt, local_rank))  # noqa: PERF401 - those started must be known at any time
        return watch(workers)
    except Stopped as stopped:
        print(f"torchrun: got signal: {stopped.number}", file=sys.stderr, flush=True)  # first, as the real one does
        close(workers, stopped.number, float(os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "30")))
        return 1


def _stop(number: int, frame: FrameType | None) -> NoReturn:
    raise Stopped(number)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
