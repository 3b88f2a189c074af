"""Stands in for DeepSpeed's launcher of one node: what 0.19.8 does for its ranks, without torch and DeepSpeed.

The same options, variables, command lines, log files and ends; deepspeed/launcher/launch.py is the original.
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path


def parse() -> argparse.Namespace:
    """Read the options that gpulayer gives, as DeepSpeed declares them."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--node_rank", type=int, default=0)
    parser.add_argument("--master_addr", default="127.0.0.1")
    parser.add_argument("--master_port", type=int, default=29500)
    parser.add_argument("--world_info", default="None")
    parser.add_argument("--module", action="store_true")
    parser.add_argument("--no_local_rank", action="store_true")
    parser.add_argument("--enable_each_rank_log", default="None")
    parser.add_argument("training_script")
    parser.add_argument("training_script_args", nargs=argparse.REMAINDER)
    return parser.parse_args()


def start(args: argparse.Namespace) -> list[subprocess.Popen[bytes]]:
    """Start a process for each device of this node."""
    world = json.loads(base64.urlsafe_b64decode(args.world_info))
    names = list(world)
    devices = world[names[args.node_rank]]
    first = sum(len(world[name]) for name in names[: args.node_rank])
    env = dict(os.environ)
    env.update(
        CUDA_VISIBLE_DEVICES=",".join(map(str, devices)),
        MASTER_ADDR=args.master_addr,
        MASTER_PORT=str(args.master_port),
        WORLD_SIZE=str(sum(map(len, world.values()))),
        CROSS_RANK=str(args.node_rank),
        CROSS_SIZE=str(len(names)),
        LOCAL_SIZE=str(len(devices)),
    )
    prefix = time.strftime("%Y%m%d%H%M%S", time.localtime())
    processes = []
    for rank in range(first, first + len(devices)):
        local_rank = rank % len(devices)
        env.update(RANK=str(rank), LOCAL_RANK=str(local_rank))
        command = [sys.executable, "-u", *(["-m"] if args.module else []), args.training_script]
        command += [] if args.no_local_rank else [f"--local_rank={local_rank}"]
        with Path(f"{args.enable_each_rank_log}/{prefix}_rank{rank}.log").open("w") as log:
            processes.append(subprocess.Popen([*command, *args.training_script_args], env=env, stdout=log, stderr=log))
    print(f"processes {[one.pid for one in processes]} spawned")
    return processes


def main() -> None:
    """Start the ranks of this node, and end all at the first failure."""
    processes = start(parse())

    def end(code: int) -> None:
        for process in processes:
            process.terminate()
            process.wait()
        sys.exit(code)

    signal.signal(signal.SIGTERM, lambda number, frame: end(1))
    alive = set(processes)
    while alive:
        for process in list(alive):
            if process.poll():
                end(process.returncode)
            if process.poll() == 0:
                alive.remove(process)
        time.sleep(0.05)


if __name__ == "__main__":
    main()
