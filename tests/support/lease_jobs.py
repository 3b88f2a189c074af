"""Processes that draw nodes and hold them, as launchers do: `python -m tests.support.lease_jobs FOLDER JOB-ID NODE...`.

    with LeaseJob(folder, "x", ["a", "b"]) as job:
        job.tell("draw 2")
        assert job.hear() == "drew a,b"

It reads `draw N` or `draw N WAIT-SECONDS`, then `release`, from stdin, and answers with a line each: `drew`, `held`,
`says` for what a user would be told, `released`.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Self

from gpulayer.errors import HeldError
from gpulayer.hosts import Node
from gpulayer.leases import Lease, Machine
from gpulayer.placement import NodePool

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from types import TracebackType

    from gpulayer.placement import Hold

CHECKOUT = Path(__file__).resolve().parents[2]


class LeaseJob:
    """One such process."""

    def __init__(self, folder: Path, job_id: str, nodes: Sequence[str]) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.lease_jobs", str(folder), job_id, *nodes],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=CHECKOUT,
        )

    def tell(self, line: str) -> None:
        """Have it do something."""
        if self.process.stdin:
            self.process.stdin.write(line + "\n")
            self.process.stdin.flush()

    def hear(self) -> str:
        """Return its next answer."""
        return self.process.stdout.readline().rstrip("\n") if self.process.stdout else ""

    def ask(self, line: str) -> str:
        """Have it do something and return the answer."""
        self.tell(line)
        return self.hear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End it."""
        self.process.kill()
        self.process.communicate()


def draw(lease: Lease, node_ids: Sequence[str], count: int, wait_s: float | None = None) -> str:
    """Draw from whole machines of these names, and return what a LeaseJob answers."""
    nodes = [Node(id=node_id) for node_id in node_ids]

    def acquire(held: Mapping[str, Hold]) -> tuple[str, ...]:
        return NodePool(nodes, held).acquire(count)

    machines = {node_id: Machine(f"{node_id}:22", None) for node_id in node_ids}
    try:
        return "drew " + ",".join(lease.draw(machines, acquire, wait_s, lambda text: _say(f"says {text}")))
    except HeldError as error:
        return f"held {error}"


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main(folder: str, job_id: str, *node_ids: str) -> None:
    """Be such a process until stdin ends."""
    lease = Lease(Path(folder), job_id)
    for line in sys.stdin:
        match line.split():
            case ["draw", count]:
                _say(draw(lease, node_ids, int(count)))
            case ["draw", count, wait_s]:
                _say(draw(lease, node_ids, int(count), float(wait_s)))
            case _:
                lease.release()
                _say("released")


if __name__ == "__main__":
    main(*sys.argv[1:])
