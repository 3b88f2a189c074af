"""Lines between hosts and the login node that delay, lose and hold up what goes over them.

`delayed` does what netem does, in a program of its own, since not every kernel has netem: a host's cable ends in a TAP
device in place of the login node's bridge, and the program carries each frame to another TAP device in that bridge.
"""

from __future__ import annotations

import fcntl
import os
import select
import struct
import subprocess
import sys
import time
from collections import deque
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tests.support.cluster import Cluster
    from tests.support.host import Host

# linux/if_tun.h
TUNSETIFF = 0x400454CA
IFF_TAP, IFF_NO_PI = 0x0002, 0x1000
MAX_FRAME_BYTES = 1 << 16


@contextmanager
def delayed(cluster: Cluster, hosts: Sequence[Host], *, delay_s: float, one_of: int) -> Iterator[None]:
    """Delay what goes to and from these hosts, half of `delay_s` each way, and lose one of so many frames each way.

    Frames are lost at a steady pace, not by chance, so that a test does not fail once in a thousand times.
    """
    from tests.support import netns  # not where this file runs as a program

    login = cluster.login_pid
    names = [str(host.index) for host in hosts]
    argv = [*netns.enter(login, "n"), sys.executable, __file__, str(delay_s / 2), str(one_of), *names]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as program:
        if program.stdin is None or program.stdout is None or program.stdout.readline() != b"ready\n":
            raise RuntimeError("the slow line is not there")
        plug = [
            f"link {line}"
            for name in names
            for line in (
                f"add d{name} type bridge mcast_snooping 0",
                f"set d{name} up",
                f"set ta{name} master d{name} up",
                f"set tb{name} master br0 up",
                f"set v{name} master d{name}",
            )
        ]
        netns.ip_batch(login, plug)
        try:
            yield
        finally:
            program.stdin.close()  # it ends, and its TAP devices with it
            program.wait()
            powered = [str(host.index) for host in hosts if host.powered]
            netns.ip_batch(login, [f"link set v{name} master br0" for name in powered])
            netns.ip_batch(login, [f"link del d{name}" for name in names])


@contextmanager
def narrow(host: Host, rate: str) -> Iterator[None]:
    """Limit what a host can send, as in `512kbit`; the buffer in front of the line holds 0.4 s of it."""
    host.run(["tc", "qdisc", "add", "dev", "eth0", "root", "tbf", "rate", rate, "burst", "16k", "latency", "400ms"])
    try:
        yield
    finally:
        host.run(["tc", "qdisc", "del", "dev", "eth0", "root"])


@contextmanager
def narrow_to(cluster: Cluster, hosts: Sequence[Host], rate: str) -> Iterator[None]:
    """Limit what each of these hosts can be sent, as in `8mbit`; the buffer in front of each line holds 0.4 s of it."""

    def tc(host: Host, *words: str) -> None:
        cluster.login.run(["tc", "qdisc", words[0], "dev", f"v{host.index}", "root", *words[1:]], check=True)

    for host in hosts:
        tc(host, "add", "tbf", "rate", rate, "burst", "64k", "latency", "400ms")
    try:
        yield
    finally:
        for host in hosts:
            if host.powered:
                tc(host, "del")


def carry(delay_s: float, one_of: int, names: Sequence[str]) -> None:
    """Carry frames between the TAP devices ta<name> and tb<name>, until stdin ends."""
    others: dict[int, int] = {}
    for name in names:
        near, far = _tap(f"ta{name}"), _tap(f"tb{name}")
        others.update({near: far, far: near})
    print("ready", flush=True)
    under_way: deque[tuple[float, int, bytes]] = deque()
    counts = dict.fromkeys(others, 0)
    poller = select.poll()
    for fd in (0, *others):
        poller.register(fd, select.POLLIN)
    while True:
        wait_s = under_way[0][0] - time.monotonic() if under_way else 1.0
        for fd, _ in poller.poll(max(0.0, wait_s) * 1000):
            if fd == 0:
                return
            frame = os.read(fd, MAX_FRAME_BYTES)
            counts[fd] += 1
            if counts[fd] % one_of:
                under_way.append((time.monotonic() + delay_s, others[fd], frame))
        while under_way and under_way[0][0] <= time.monotonic():
            _, fd, frame = under_way.popleft()
            os.write(fd, frame)


def _tap(name: str) -> int:
    fd = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(fd, TUNSETIFF, struct.pack("16sH", name.encode(), IFF_TAP | IFF_NO_PI))
    return fd


if __name__ == "__main__":
    carry(float(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
