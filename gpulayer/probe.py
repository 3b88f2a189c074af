"""What looks at a node before a job starts. Standard library only, Python 3.8; torch is not imported.

The supervisor starts it as a child with the job's Python and the job's environment, in a folder that holds no modules
(`/`), and passes lines of JSON on both ways. facts.py makes the requests and reads the answers.

    {"type": "facts", ...}         all that probe_host.py and probe_gpu.py find, told once; opens the listeners
    {"type": "rendezvous", ...}    the head listens on another port instead
    {"type": "reach", ...}         connects to the listeners of other nodes, to all at once
    {"type": "gpus", ...}          what the vendor's tool says of the GPUs, and nothing else
    {"type": "end"}, end of file   closes everything

A fact that cannot be had is {"error": "why"} and takes no other with it. GPU tools run beside everything else; nothing
here waits for one longer than its limit.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import select
import signal
import socket
import struct
import sys
import time

from gpulayer.probe_gpu import STARTED, GpuQuery, kill_group
from gpulayer.probe_host import FACTS, MISTAKES, free_ports, listen, port_holder

HELLO = b"\0gpulayer-probe:"
MAX_LINE_BYTES = 1 << 20
MOST_GUESTS = 1024
UNREACHABLE = "unreachable"
REACH_STATES = {errno.ECONNREFUSED: "refused", errno.ETIMEDOUT: "timeout", errno.ECONNRESET: "other"}

TYPE_CHECKING = False  # mypy takes it for true
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from gpulayer.probe_host import Record


def attempt(find: Callable[[], Any]) -> Any:
    """Return a fact, or why there is none."""
    try:
        return find()
    except MISTAKES as error:
        return {"error": (f"{error.strerror or error}" if isinstance(error, OSError) else repr(error))[:300]}


# --- reaching others ------------------------------------------------------------------------------------------------


def abandon(connection: socket.socket) -> None:
    """Close with a reset, so that neither end keeps the port for a minute."""
    with contextlib.suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


class Attempt:
    """One connection to the listener of another node, until it is known how that went (`state`)."""

    def __init__(self, target: Record) -> None:
        self.name = target["name"]
        self.state, self.detail = "", ""
        self.rtt_ms: float | None = None
        self._expected = (target["nonce"] + "\n").encode()
        self._heard = b""
        self._begun = time.monotonic()
        self.socket = socket.socket(socket.AF_INET6 if ":" in target["address"] else socket.AF_INET)
        self.socket.setblocking(False)
        number = self.socket.connect_ex((target["address"], target["port"]))
        if number not in (0, errno.EINPROGRESS):
            self._failed(number)

    @property
    def events(self) -> int:
        """What to wait for next."""
        return select.POLLOUT if self.rtt_ms is None else select.POLLIN

    def _failed(self, number: int) -> None:
        self._over(REACH_STATES.get(number, UNREACHABLE), os.strerror(number))

    def _over(self, state: str, detail: str) -> None:
        self.state, self.detail = state, detail
        abandon(self.socket)

    def advance(self) -> None:
        """Go on: connected, or something was said."""
        if self.rtt_ms is None:
            number = self.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if number:
                self._failed(number)
            else:
                self.rtt_ms = round((time.monotonic() - self._begun) * 1000, 3)
            return
        try:
            data = self.socket.recv(256)
        except OSError as error:
            self._over("other", error.strerror or "")
            return
        self._heard += data
        if self._heard == self._expected:
            self._over("ok", "")
        elif not data:
            self._over("other", "it hung up")
        elif not self._expected.startswith(self._heard):
            self._over("other", f"it said {self._heard[:40]!r}")

    def give_up(self) -> None:
        """The time is over."""
        if self.rtt_ms is None:
            self._over("timeout", "no answer")
        else:
            self._over("other", "it took the connection and said nothing")

    def result(self) -> Record:
        """Return how it went."""
        return {"name": self.name, "state": self.state, "rtt_ms": self.rtt_ms, "detail": self.detail}


class Probe:
    """The event loop: requests from stdin, visitors to the listeners, connections to others."""

    def __init__(self) -> None:
        self._lines = bytearray()
        self._over = False
        self._nonce = b""
        self._listener: socket.socket | None = None
        self._rendezvous: socket.socket | None = None
        self._guests: dict[int, socket.socket] = {}
        self._attempts: list[Attempt] = []
        self._deadline = 0.0

    def run(self) -> None:
        """Serve until told to end."""
        while not self._over:
            self._wait()
        for one in (self._listener, self._rendezvous):
            if one:
                one.close()
        for guest in self._guests.values():
            abandon(guest)

    def _wait(self) -> None:
        listeners = {one.fileno(): one for one in (self._listener, self._rendezvous) if one}
        attempts = {one.socket.fileno(): one for one in self._attempts if not one.state}
        poller = select.poll()
        for fd in (0, *listeners, *self._guests):
            poller.register(fd, select.POLLIN)
        for fd, one in attempts.items():
            poller.register(fd, one.events)
        limit_s = max(0.0, self._deadline - time.monotonic()) if self._attempts else None
        for fd, _ in poller.poll(None if limit_s is None else limit_s * 1000 + 1):
            if fd in listeners:
                self._greet(listeners[fd])
            elif fd in attempts:
                attempts[fd].advance()
            elif fd in self._guests:
                abandon(self._guests.pop(fd))
            else:
                self._receive()
        self._finish_reach()

    def _greet(self, listener: socket.socket) -> None:
        """Say the nonce. The visitor hangs up first, so that no old connection is left on the rendezvous port."""
        try:
            guest, _ = listener.accept()
            guest.setblocking(False)
            guest.send(self._nonce)
        except OSError:
            return
        self._guests[guest.fileno()] = guest
        if len(self._guests) > MOST_GUESTS:
            abandon(self._guests.pop(next(iter(self._guests))))

    def _receive(self) -> None:
        data = os.read(0, 1 << 16)
        self._lines += data
        self._over = not data or len(self._lines) > MAX_LINE_BYTES
        while b"\n" in self._lines and not self._over:
            line, _, rest = bytes(self._lines).partition(b"\n")
            self._lines[:] = rest
            self._obey(json.loads(line))

    def _obey(self, request: Record) -> None:
        kind = request["type"]
        if kind == "facts":
            self._tell_facts(request)
        elif kind == "rendezvous":
            self._say({"type": "rendezvous", **self._open_rendezvous(request["port"])})
        elif kind == "gpus":
            self._say({"type": "gpus", "gpu": attempt(lambda: GpuQuery(request["smi_limit_s"]).finish())})
        elif kind == "reach":
            self._deadline = time.monotonic() + request["limit_s"]
            self._attempts = [Attempt(target) for target in request["targets"]]
            if not self._attempts:
                self._say({"type": "reach", "results": []})
        else:
            self._over = True

    def _say(self, answer: Record) -> None:
        data = json.dumps(answer, separators=(",", ":")).encode() + b"\n"
        while data:
            data = data[os.write(1, data) :]

    def _tell_facts(self, request: Record) -> None:
        gpus = attempt(lambda: GpuQuery(request["smi_limit_s"]))
        self._nonce = (request["nonce"] + "\n").encode()
        facts: Record = {"type": "facts"}
        # Before the listener, which could get this very port.
        head = request["node_rank"] == 0
        facts.update(self._open_rendezvous(request["master_port"]) if head else {"port": None, "free_ports": []})
        facts["listener"] = attempt(self._open_listener)
        for name, find in FACTS.items():
            facts[name] = attempt(lambda find=find: find(request))  # type: ignore[misc]
        facts["gpu"] = attempt(gpus.finish) if isinstance(gpus, GpuQuery) else gpus
        facts["time_s"] = time.time()
        self._say(facts)

    def _open_listener(self) -> Record:
        if self._listener is None:
            self._listener = listen(0)
        return {"port": self._listener.getsockname()[1]}

    def _open_rendezvous(self, port: int) -> Record:
        """Listen where torch's store will, beside the supervisor, which holds the port without listening."""
        if self._rendezvous:
            self._rendezvous.close()
            self._rendezvous = None
        fact: Record = {"port": port, "state": "free", "pid": None, "command": "", "user": "", "detail": ""}
        try:
            self._rendezvous = listen(port, reuse=True)
        except OSError as error:
            taken = error.errno == errno.EADDRINUSE
            fact.update(state="taken" if taken else "denied", detail=error.strerror or "")
            fact.update(attempt(lambda: port_holder(port)) if taken else {})
            fact["detail"] = fact.pop("error", fact["detail"])
        return {"port": fact, "free_ports": free_ports(port) if fact["state"] == "taken" else []}

    def _finish_reach(self) -> None:
        late = bool(self._attempts) and time.monotonic() >= self._deadline
        for one in self._attempts:
            if late and not one.state:
                one.give_up()
        if self._attempts and all(one.state for one in self._attempts):
            self._say({"type": "reach", "results": [one.result() for one in self._attempts]})
            self._attempts = []


def hang_up() -> None:
    """End stdin, so that everything goes on as where the launcher has gone."""
    reader, writer = os.pipe()
    os.close(writer)
    os.dup2(reader, 0)


def main(nonce: str) -> None:
    """Greet and serve. Whatever a sitecustomize prints cannot pass for the greeting, whose `nonce` it does not know."""
    sys.path[:] = [entry for entry in sys.path if entry]  # modules in the job's folder are the job's, not ours
    signal.signal(signal.SIGTERM, lambda number, frame: hang_up())  # by the kernel: the supervisor has died
    try:
        os.write(1, HELLO + nonce.encode() + b"\n")
        Probe().run()
    finally:
        for child in STARTED:
            kill_group(child)
