"""The script that `gpulayer demo` runs: each rank brings its rank + 1, and all of them get the sum.

A script as a user would write it for torchrun; it needs nothing of gpulayer. A rank whose sum is wrong exits with 1.
"""

import os
import sys

import torch
import torch.distributed as dist


def main() -> None:
    """Sum up over all ranks and check it."""
    dist.init_process_group(os.environ.get("GPULAYER_COMM_BACKEND", "gloo"))
    rank, ranks = dist.get_rank(), dist.get_world_size()
    print(f"rank {rank} of {ranks}, pid {os.getpid()}, meets the others at {os.environ['MASTER_ADDR']}")

    value = torch.tensor([rank + 1.0])
    dist.all_reduce(value)
    expected = sum(range(1, ranks + 1))
    print(f"rank {rank} brought {rank + 1}.0, the sum over all ranks is {value.item()}")

    dist.destroy_process_group()
    sys.exit(value.item() != expected)


if __name__ == "__main__":
    main()
