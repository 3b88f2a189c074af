"""What a lying node runs in place of its Python: it passes for a supervisor, and then says what it likes.

hostile.py writes a program that executes this file and then a few lines that use it. They may speak for themselves
(`greet`, `hear`, `tell`, `flood`), or stand between the launcher and an honest supervisor (`relay`, `lie_to_probe`).
Standard library only: it runs on the nodes.
"""

from __future__ import annotations

import json
import os
import re
import select
import subprocess
import sys
import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

Header = dict[str, Any]
Said = bytes | tuple[Header, bytes]

TOKEN = "gplr-owned"  # noqa: S105 - stands in each name and text that is made up here, so that it can be searched for
# A path that leads elsewhere, a title, a cleared screen, C1, NUL, a line that would pass for the launcher's own, text
# from right to left, half a character.
NASTY = (
    f"../../../../tmp/{TOKEN}; rm -rf {TOKEN}\x1b]0;{TOKEN}\x07\x1b[2J\x1b[1;1H\x9b2J\x1b[31m\0\r\n"
    f"gpulayer: job {TOKEN} succeeded\n\u202e{TOKEN}\u2028\ud800\x7f"
)
HELLO: Header = {"type": "hello", "version": 1, "hostname": "h", "kernel": "6", "python": "3.11.2", "pid": 7}
SWEPT: Header = {"type": "swept", "killed": 0, "survivors": []}
ANSWERS = {"ping": "pong", "hold": "held", "release": "released"}
OUTPUT, END = {"type": "helper_output"}, {"type": "helper_end"}  # of the probe
DEEP = json.loads("[" * 900 + "]" * 900)
PROBE_GREETING = b"\0gpulayer-probe:"


class Stdin:
    """What the launcher has sent and nobody has taken yet."""

    def __init__(self) -> None:
        self.seen = b""

    def read(self) -> bool:
        """Wait for more; False at its end."""
        data = os.read(0, 1 << 16)
        self.seen += data
        return bool(data)

    def take(self, size: int) -> bytes:
        """Return the next bytes. The launcher gone, this program ends."""
        while len(self.seen) < size:
            if not self.read():
                os._exit(0)
        data, self.seen = self.seen[:size], self.seen[size:]
        return data

    def take_line(self) -> bytes:
        """Return the next line with its end."""
        while b"\n" not in self.seen:
            if not self.read():
                os._exit(0)
        return self.take(self.seen.index(b"\n") + 1)

    def take_boot(self) -> tuple[bytes, bytes]:
        """Take what ships a supervisor; return its greeting, which has the nonce, and all of it."""
        first = self.take_line()
        nonce = re.search(rb"gpulayer:([0-9a-f]{32})", first)
        size = re.search(rb"len\(data\)<(\d+)", first)
        if not nonce or not size:
            os._exit(99)
        return b"\0gpulayer:" + nonce[1] + b"\n", first + self.take(int(size[1]))


stdin = Stdin()


def say(data: bytes) -> None:
    """Write to the launcher. It gone, this program ends."""
    try:
        while data:
            data = data[os.write(1, data) :]
    except OSError:
        os._exit(1)


def flood(piece: bytes) -> None:
    """Write this for ever, as fast as it goes."""
    block = piece * max(1, (1 << 16) // len(piece))
    while True:
        say(block)


def frame(header: Header, payload: bytes = b"") -> bytes:
    """Return a frame."""
    return json.dumps(dict(header, size=len(payload)) if payload else header).encode() + b"\n" + payload


def tell(kind: str, payload: bytes = b"", **fields: object) -> None:
    """Send a frame."""
    say(frame({"type": kind, **fields}, payload))


def hear(*kinds: str) -> Header:
    """Wait for a frame of one of these kinds; meanwhile answer pings, and give out the node."""
    while True:
        header: Header = json.loads(stdin.take_line())
        stdin.take(header.get("size", 0))
        if header["type"] in kinds:
            return header
        if header["type"] in ANSWERS:
            tell(ANSWERS[header["type"]])


def greet(hello: Header | bytes = HELLO) -> None:
    """Say the greeting, then this in place of a hello."""
    greeting, _ = stdin.take_boot()
    say(greeting + (hello if isinstance(hello, bytes) else frame(hello)))


def wait() -> None:
    """Answer pings, do nothing else, until the launcher is gone."""
    while True:
        hear()


def trickle() -> None:
    """Send output for ever, a little at a time, until the launcher is gone."""
    while True:
        tell("output", b"more\n", local_rank=0, stream="stdout")
        if select.select([0], [], [], 0.01)[0] and not stdin.read():
            os._exit(0)


def run(swept: Header | bytes = SWEPT) -> None:
    """Pass for a supervisor until the command runs. To a launcher that comes to clean up, say `swept` instead."""
    greet()
    if hear("prepare", "sweep")["type"] == "sweep":
        say(swept if isinstance(swept, bytes) else frame(swept))
        wait()
    tell("prepared", interface="eth0")
    hear("start")
    tell("started", pid=11)
    tell("rank", local_rank=0, pid=12)


def succeed(**swept: object) -> None:
    """End as an honest node that succeeded does, but for what is changed of `swept`."""
    tell("rank_exit", local_rank=0, status=0, parts=[])
    tell("exit", status=0, parts=[])
    say(frame({**SWEPT, **swept}))


def nasty(value: Any) -> Any:
    """Return the value with each text in it replaced."""
    if isinstance(value, dict):
        return {key: one if key in ("type", "stream") else nasty(one) for key, one in value.items()}
    if isinstance(value, list):
        return [nasty(one) for one in value]
    return NASTY if isinstance(value, str) else value


class Honest:
    """An honest supervisor behind this program; the launcher's words go to it as they come."""

    def __init__(self) -> None:
        self.greeting, source = stdin.take_boot()
        argv = [sys.executable, "-ISE", "-c", sys.argv[-1]]
        self._process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)
        self._out = b""
        threading.Thread(target=self._forward, args=(source + stdin.seen,), daemon=True).start()

    def _forward(self, data: bytes) -> None:
        pipe = self._process.stdin
        while data and pipe:
            pipe.write(data)
            data = os.read(0, 1 << 16)
        if pipe:
            pipe.close()

    def read(self) -> None:
        """Wait for more. It gone, this program ends too."""
        data = os.read(self._process.stdout.fileno(), 1 << 16) if self._process.stdout else b""
        if not data:
            os._exit(self._process.wait())
        self._out += data

    def take_greeting(self) -> None:
        """Wait for its greeting."""
        while self.greeting not in self._out:
            self.read()
        self._out = self._out.partition(self.greeting)[2]

    def take_frame(self) -> tuple[Header, bytes]:
        """Return its next frame, the size left out."""
        while b"\n" not in self._out:
            self.read()
        line, _, self._out = self._out.partition(b"\n")
        header: Header = json.loads(line)
        size = header.pop("size", 0)
        while len(self._out) < size:
            self.read()
        payload, self._out = self._out[:size], self._out[size:]
        return header, payload


def relay(change: Callable[[Header, bytes], Iterable[Said]]) -> None:
    """Stand between the launcher and an honest supervisor. `change` returns what is sent in place of a frame."""
    honest = Honest()
    honest.take_greeting()
    say(honest.greeting)
    while True:
        for one in change(*honest.take_frame()):
            say(one if isinstance(one, bytes) else frame(*one))


def lie_to_probe(change: Callable[[Any], bytes]) -> None:
    """Relay, and change what the probe says: `change` is given each line as JSON, and returns the bytes to send."""
    held = b""

    def changed(header: Header, payload: bytes) -> Iterable[Said]:
        nonlocal held
        if header["type"] != "helper_output" or PROBE_GREETING in payload:
            return [(header, payload)]
        *lines, held = (held + payload).split(b"\n")
        data = b"".join(change(json.loads(line)) for line in lines)
        return [(header, data[at : at + 65536]) for at in range(0, len(data), 65536)]

    relay(changed)


def line(value: object) -> bytes:
    """Return a line of the probe."""
    return json.dumps(value).encode() + b"\n"
