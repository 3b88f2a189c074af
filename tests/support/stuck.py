"""A file system that never answers: who asks it for anything waits in a way that SIGKILL does not end, state D.

with StuckFolder(host) as folder:
    ...  # os.stat(f"{folder.path}/x") on the host does not return
# here the file system is gone, and those who waited have died or go on
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Self

from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from types import TracebackType

    from tests.support.host import Host

# $1 the folder. Mounts a FUSE file system (linux/fuse.h), answers FUSE_INIT, and nothing else, ever. The kernel waits
# for the answer to a request that was read, whatever the one who asked is sent (fs/fuse/dev.c, request_wait_answer).
_SERVER = """
import ctypes, os, struct, sys
FUSE_INIT = 26
fd = os.open("/dev/fuse", os.O_RDWR)
options = f"fd={fd},rootmode=40000,user_id=0,group_id=0,allow_other"
if ctypes.CDLL(None, use_errno=True).mount(b"stuck", sys.argv[1].encode(), b"fuse", 0, options.encode()):
    sys.exit(os.strerror(ctypes.get_errno()))
while True:
    _, opcode, unique = struct.unpack_from("=IIQ", os.read(fd, 1 << 18))
    if opcode == FUSE_INIT:
        init = struct.pack("=4I2H2I2H8I", 7, 31, 0, 0, 0, 0, 4096, 1, 0, 0, *[0] * 8)
        os.write(fd, struct.pack("=IiQ", 16 + len(init), 0, unique) + init)
"""


def cannot_be_made() -> str:
    """Why this machine has no such file system, or ""."""
    return "" if Path("/dev/fuse").exists() else "this kernel has no FUSE"


class StuckFolder:
    """`path` on one host, for as long as the block lasts."""

    def __init__(self, host: Host) -> None:
        self.path = "/run/stuck"
        self._host = host

    def __enter__(self) -> Self:
        self._host.altered = True  # the mount is undone by booting it anew
        self._host.run(["mkdir", "-p", self.path])
        self._host.start([sys.executable, "-c", _SERVER, self.path])
        mounts = self._host.path("/proc/1/mounts")
        wait_until(lambda: f" {self.path} fuse " in mounts.read_text(), "the file system is mounted")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the server; the kernel then answers all requests with an error."""
        for process in self._host.processes():
            if process.argv[1:2] == ("-c",) and process.argv[-1] == self.path:
                os.kill(process.pid, signal.SIGKILL)
