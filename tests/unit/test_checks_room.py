"""Room, limits and clocks: what is warned of, and in which words."""

from __future__ import annotations

from gpulayer.facts import ScratchFact, ShmFact
from tests.support.findings import GIB, everywhere, plan_of, said

MIB = 1 << 20


def test_small_shared_memory() -> None:
    """/dev/shm has 64 MiB for each process of the node, or the user is warned."""
    plan = plan_of(8, 8, 1)
    docker = {"shm": ShmFact(64 * MIB, 64 * MIB)}
    assert said(plan, everywhere(plan, **docker)) == (
        "warning: gpu-[01-02]: /dev/shm has 64 MiB, 512 MiB or more is expected for 8 processes\n"
        "hint: give a container more with `--shm-size`, or `mount -o remount,size=512M /dev/shm` as root "
        "(troubleshooting: shm-small)\n"
    )
    assert said(plan_of(1), {0: {"shm": None}}) == (
        "warning: gpu-01: /dev/shm does not exist, 64 MiB or more is expected for 1 process\n"
        "hint: give a container more with `--shm-size`, or `mount -o remount,size=64M /dev/shm` as root "
        "(troubleshooting: shm-small)\n"
    )
    assert said(plan_of(1), {0: {"shm": ShmFact(65000 * 1024, 0)}}).startswith("warning: gpu-01: /dev/shm has 63.4 MiB")
    assert said(plan_of(8), {0: {"shm": ShmFact(512 * MIB, 0)}}) == ""


def test_a_full_disk() -> None:
    """Less than 1 GiB for the job's output is a warning, with what there is on each node."""
    plan = plan_of(1, 1, 1, 1)
    nodes = {
        0: {"scratch": ScratchFact("/tmp", 312 * MIB, True, "")},
        2: {"scratch": ScratchFact("/tmp", 4096, True, "")},
        3: {"scratch": ScratchFact("/tmp", GIB, True, "")},
    }
    assert said(plan, nodes) == (
        "warning: gpu-[01,03]: less than 1 GiB is free in /tmp, where the job's output goes:\n"
        "  gpu-01: 312 MiB\n"
        "  gpu-03: 4 KiB\n"
        "hint: make room there, or name another folder with `scratch` in the hosts map "
        "(troubleshooting: scratch-full)\n"
    )


def test_a_disk_on_which_nothing_can_be_written_is_told_once() -> None:
    """That is a failure, and no warning on top of it."""
    full = ScratchFact("/tmp", 0, False, "No space left on device")
    assert said(plan_of(1), {0: {"scratch": full}}) == (
        "gpu-01: no folder for the job's output can be made in /tmp: No space left on device\n"
        "hint: free or open it for your user, or name another with `scratch` in the hosts map "
        "(troubleshooting: scratch)\n"
    )


def test_few_open_files() -> None:
    """`ulimit -n` under 4096 is a warning; no limit is none."""
    plan = plan_of(1, 1, 1)
    assert said(plan, {0: {"nofile": 1024}, 1: {"nofile": 4096}, 2: {"nofile": -1}}) == (
        "warning: gpu-01: `ulimit -n` is 1024, 4096 or more is expected\n"
        "hint: raise `nofile` in /etc/security/limits.conf on the node (troubleshooting: nofile-low)\n"
    )


def test_limited_memory_locks() -> None:
    """A limit on locked memory is a warning where there is InfiniBand, and nothing elsewhere."""
    plan = plan_of(1, 1, 1)
    limited = {"memlock_bytes": 8 * MIB}
    assert said(plan, {0: limited, 1: {**limited, "infiniband": ("mlx5_0", "mlx5_1")}, 2: {"infiniband": ("a",)}}) == (
        "warning: gpu-02: `ulimit -l` is 8 MiB, and InfiniBand (mlx5_0, mlx5_1) wants it unlimited\n"
        "hint: set `memlock` to unlimited in /etc/security/limits.conf on the node, or `--ulimit memlock=-1` for "
        "Docker (troubleshooting: memlock-low)\n"
    )


HINT = "hint: set the clocks by NTP: `timedatectl` on the node shows whether it does (troubleshooting: clock-differs)\n"


def test_clocks_that_differ() -> None:
    """The nodes that are off are named, each with how far, against those that agree."""
    plan = plan_of(1, 1, 1, 1, 1)
    assert said(plan, skew_s={0: 95.04, 1: 0.3, 2: -0.2, 3: 0.1, 4: -7.0}) == (
        "warning: gpu-[01,05]: the clock is more than 2 s away from that of gpu-[02-04]:\n"
        "  gpu-01: +94.7 s\n"
        "  gpu-05: -7.3 s\n"
        f"{HINT}"
    )


def test_of_two_clocks_the_head_counts() -> None:
    """With no more than two opinions, the other one is off."""
    assert said(plan_of(1, 1), skew_s={0: 0.0, 1: -2.5}) == (
        f"warning: gpu-02: the clock is more than 2 s away from that of gpu-01: -2.5 s\n{HINT}"
    )


def test_clocks_that_agree() -> None:
    """This machine's own clock does not matter; a chain of small differences with a large one in all does."""
    assert said(plan_of(1, 1), skew_s={0: 3600.0, 1: 3601.9}) == ""
    assert said(plan_of(1), skew_s={0: 3600.0}) == ""
    assert said(plan_of(1, 1, 1), skew_s={0: 0.0, 1: 1.9, 2: 3.8}) == (
        f"warning: gpu-03: the clock is more than 2 s away from that of gpu-[01-02]: +3.8 s\n{HINT}"
    )
