"""A node without SSH: the same bootstrap command and frames, over pipes to a local shell. Used by the process ring."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import sys
from typing import TYPE_CHECKING

from gpulayer.plan import NodeCommand, Plan
from tests.support.local_node import FAKE_TORCH

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from gpulayer.session import Session
    from gpulayer.ssh import SshTarget


class PipeChannel:
    """What `gpulayer.session.Channel` asks for, over a child process."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process

    def write(self, data: bytes) -> None:
        """Queue bytes for the child's stdin."""
        if self.process.stdin and not self.process.stdin.is_closing():
            self.process.stdin.write(data)

    async def drain(self) -> None:
        """Wait until the child has taken most of it."""
        with contextlib.suppress(ConnectionError):
            if self.process.stdin:
                await self.process.stdin.drain()

    def close(self) -> None:
        """Close the child's stdin: for the supervisor, the launcher is gone."""
        if self.process.stdin:
            self.process.stdin.close()


class PipeLink:
    """Opens channels as `gpulayer.ssh.SshLink` does."""

    def __init__(self) -> None:
        self.processes: list[asyncio.subprocess.Process] = []
        self._tasks: list[asyncio.Task[None]] = []

    async def open(self, command: str, receiver: Session) -> PipeChannel:
        """Run `command` in a shell and feed `receiver` from its pipes."""
        process = await asyncio.create_subprocess_exec(
            *("/bin/sh", "-c", command),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        self.processes.append(process)
        self._tasks.append(asyncio.create_task(self._read(process, receiver)))
        return PipeChannel(process)

    async def _read(self, process: asyncio.subprocess.Process, receiver: Session) -> None:
        async def pump(stream: asyncio.StreamReader | None, take: str) -> None:
            while stream and (data := await stream.read(1 << 16)):
                getattr(receiver, take)(data)

        await asyncio.gather(pump(process.stdout, "data_received"), pump(process.stderr, "stderr_received"))
        status = await process.wait()
        killed = status < 0
        receiver.channel_closed(None if killed else status, str(-status) if killed else None, None)

    def abort(self) -> None:
        """Close every child's stdin."""
        for process in self.processes:
            with contextlib.suppress(OSError):
                if process.stdin:
                    process.stdin.close()


class PipeConnector:
    """Connects as `gpulayer.ssh.SshConnector` does; each node is a child of this process."""

    def __init__(self) -> None:
        self.links: list[PipeLink] = []

    async def connect(self, target: SshTarget | None = None) -> PipeLink:
        """Return a link of its own for every node."""
        link = PipeLink()
        self.links.append(link)
        return link

    async def close(self) -> None:
        """Wait until all children have ended and everything they said is read."""
        for link in self.links:
            link.abort()
            await asyncio.gather(*link._tasks)


def pipe_plan(
    folder: Path,
    script: Sequence[str],
    *,
    nnodes: int = 1,
    nproc_per_node: int = 1,
    python: str = sys.executable,
    fake: bool = True,
    master_port: int = 29500,
    **limits: float | None,
) -> Plan:
    """Return the plan of a job under torchrun (the stand-in, unless not `fake`) whose nodes are all this machine."""
    job_id = f"pipes-{secrets.token_hex(4)}"
    port = secrets.randbelow(1 << 16)  # no two tests at one time hold the same nodes
    nodes = []
    for node_rank in range(nnodes):
        job_dir = f"{folder}/gpulayer-{job_id}-n{node_rank}"
        flags = (
            f"-m torch.distributed.run --nnodes {nnodes} --nproc-per-node {nproc_per_node} --node-rank {node_rank} "
            f"--master-addr 127.0.0.1 --master-port {master_port} --max-restarts=0 --rdzv-id {job_id} "
            f"--rdzv-conf timeout=60 --redirects 3 --log-dir {job_dir}/ranks --"
        )
        nodes.append(
            NodeCommand(
                node_rank=node_rank,
                node_id=f"here-{node_rank}",
                ssh="here",
                user=None,
                port=port + node_rank,
                address="127.0.0.1",
                nproc_per_node=nproc_per_node,
                ranks=tuple(range(node_rank * nproc_per_node, (node_rank + 1) * nproc_per_node)),
                workdir=str(folder),
                argv=(sys.executable, *flags.split(), *script),
                script_at=1 + len(flags.split()),
                env={
                    "PYTHONUNBUFFERED": "1",
                    "OMP_NUM_THREADS": "1",
                    "GPULAYER_OUTPUT_DIR": f"{job_dir}/outputs",
                    **({"PYTHONPATH": str(FAKE_TORCH)} if fake else {}),
                },
                python=python,
                job_dir=job_dir,
                interface=None,
            )
        )
    times = {"join_timeout_s": 60.0, "grace_s": 2.0, "lost_after_s": 30.0, "timeout_s": None} | limits
    return Plan(
        job_id=job_id,
        launcher="torchrun",
        rendezvous="static",
        nodes=tuple(nodes),
        master_addr="127.0.0.1",
        master_port=master_port,
        port_is_default=False,
        practice=True,
        **times,  # type: ignore[arg-type]  # the tests' own numbers
    )
