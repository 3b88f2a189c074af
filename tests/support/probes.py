"""A probe as a child over pipes, started as a node starts it: source and requests down its stdin."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Self

from gpulayer.bootstrap import STAGE_ONE, probe_input
from gpulayer.facts import (
    FactsRequest,
    NodeFacts,
    ReachResult,
    ReachTarget,
    Rendezvous,
    encode_end,
    encode_reach,
    encode_rendezvous,
    parse_facts,
    parse_reach,
    parse_rendezvous,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


def request(workdir: Path, **fields: object) -> FactsRequest:
    """A request for facts about a job in `workdir`; `fields` replace its values."""
    values: dict[str, object] = {
        "node_rank": 1,
        "master_addr": "127.0.0.1",
        "master_port": 29500,
        "workdir": str(workdir),
        "script": "train.py",
        "module": None,
        "scratch": str(workdir),
        "nonce": "abc",
        "smi_limit_s": 10,
    }
    return FactsRequest(**{**values, **fields})  # type: ignore[arg-type]


class ProbeProcess:
    """`with ProbeProcess() as node: node.facts(request(tmp_path))`."""

    def __init__(
        self,
        python: Sequence[str] = (sys.executable,),
        *,
        env: Mapping[str, str] | None = None,
        prefix: Sequence[str] = (),
    ) -> None:
        self.process = subprocess.Popen(
            [*prefix, *python, "-c", STAGE_ONE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd="/",
            env={"PATH": os.environ["PATH"], **(env or {})},
        )
        self._send(probe_input("n1"))
        self.greeting = self._receive()

    def _send(self, data: bytes) -> None:
        if self.process.stdin:
            self.process.stdin.write(data)
            self.process.stdin.flush()

    def _receive(self) -> bytes:
        return self.process.stdout.readline() if self.process.stdout else b""

    def send_facts(self, asked: FactsRequest) -> None:
        """Ask without waiting for the answer."""
        self._send(asked.encode())

    def facts(self, asked: FactsRequest) -> NodeFacts:
        """Ask for the facts."""
        self.send_facts(asked)
        return parse_facts(self._receive())

    def rendezvous(self, port: int) -> Rendezvous:
        """Move the head's listener."""
        self._send(encode_rendezvous(port))
        return parse_rendezvous(self._receive())

    def reach(self, targets: Sequence[ReachTarget], limit_s: float = 5) -> tuple[ReachResult, ...]:
        """Try to connect to all targets."""
        self._send(encode_reach(targets, limit_s))
        return parse_reach(self._receive(), targets)

    def end(self) -> tuple[int, str]:
        """Tell it to end; return its exit status and what it complained about."""
        if self.process.poll() is None:
            self._send(encode_end())
        return self.wait()

    def wait(self) -> tuple[int, str]:
        """Close its stdin and wait for it; return its exit status and what it complained about."""
        _, errors = self.process.communicate(timeout=20)
        return self.process.returncode, errors.decode()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.returncode is None:
            self.process.kill()
            self.process.communicate()


def pythons() -> list[str]:
    """Every Python from 3.8 on that is found here, one of each version; this one among them."""
    names = [f"python3.{minor}" for minor in range(8, 16)]
    folders = [Path(folder) for folder in os.environ["PATH"].split(os.pathsep) if folder]
    for manager in (".pyenv/versions", ".local/share/uv/python"):
        folders += sorted((Path.home() / manager).glob("*/bin"))
    found = {f"python3.{sys.version_info[1]}": sys.executable}
    for name in names:
        for path in (folder / name for folder in folders):
            if name not in found and os.access(path, os.X_OK) and _works(path):
                found[name] = str(path)
    return list(found.values())


def _works(path: Path) -> bool:
    """Whether it is a Python: a version manager's stand-in may refuse."""
    return subprocess.run([path, "-c", "pass"], capture_output=True, check=False).returncode == 0
