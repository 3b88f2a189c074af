"""A limit to the memory of chosen processes, as a container or a batch system sets it: beyond it the kernel kills."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import TYPE_CHECKING

from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@contextlib.contextmanager
def limited_memory(limit_bytes: int) -> Iterator[Callable[[int], None]]:
    """Yield what puts a process, by its pid here, under the limit. It must have ended when the block does.

    Version 2 of the kernel's control groups, or version 1 where that has the memory controller.
    """
    folder, limit = _new_group()
    try:
        (folder / limit).write_text(f"{limit_bytes}")
        yield lambda pid: _move(folder, pid)
        wait_until(lambda: not (folder / "cgroup.procs").read_text(), "nothing is left under the limit")
    finally:
        folder.rmdir()


def cannot_be_limited() -> str:
    """Why no limit can be set here, or ""."""
    try:
        _new_group()[0].rmdir()
    except OSError as error:
        return f"no memory limit can be set here: {error}"
    return ""


def _move(folder: Path, pid: int) -> None:
    (folder / "cgroup.procs").write_text(str(pid))


def _new_group() -> tuple[Path, str]:
    name = f"gpulayer-test-{os.getpid()}"
    for line in Path("/proc/mounts").read_text().splitlines():
        _, where, kind, options, *_ = line.split()
        folder = Path(where)
        if kind == "cgroup2" and "memory" in (folder / "cgroup.controllers").read_text().split():
            (folder / "cgroup.subtree_control").write_text("+memory")
            (folder / name).mkdir()
            return folder / name, "memory.max"
        if kind == "cgroup" and "memory" in options.split(","):
            (folder / name).mkdir()
            return folder / name, "memory.limit_in_bytes"
    raise OSError("no memory controller is mounted")
