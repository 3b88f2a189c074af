"""The source bundle brought to all nodes at once: asked who has it, sent where it is missing, unpacked for the job.

It is compressed once, into a file, and read from there for each node at the pace of that node's link.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
import zlib
from typing import TYPE_CHECKING, BinaryIO

from gpulayer.bundle import PIECE_BYTES, Spool
from gpulayer.errors import HandshakeError, NodeError, PrepareError
from gpulayer.events import BundleReady, Event, Notice, SendingProgress, Stage, StageReached
from gpulayer.ranges import fold
from gpulayer.values import bytes_text
from gpulayer.wire import parse_refused

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator, Sequence

    from gpulayer.bundle import Bundle
    from gpulayer.remote import RemoteNode
    from gpulayer.wire import Header

CHUNK_BYTES = 1 << 17
LEVEL = 1  # sources are half as large then; a higher one costs more time than it saves
TELL_S = 1.0
ANSWER_LIMIT_S = 30.0
SLOW_DISK_BYTES_PER_S = 20e6  # what a node's disk does at least, where it hashes or unpacks a bundle
HINTS = {
    "bundle_store": "make that folder one that can be written, with room in it; or have logins there set "
    "XDG_CACHE_HOME to another",
    "bundle_place": "set `scratch` in the hosts map to a folder on the node that can be written and has room",
}


class Sending:
    """One bundle on its way to the nodes of a job. `silence_s`: so long a node may take nothing before it is given up.

    `emit` is told how far it is.
    """

    def __init__(
        self, bundle: Bundle, nodes: Sequence[RemoteNode], silence_s: float, emit: Callable[[Event], None]
    ) -> None:
        self._bundle, self._nodes, self._silence_s, self._emit = bundle, nodes, silence_s, emit
        self._answer_s = ANSWER_LIMIT_S + bundle.ref.size_bytes / SLOW_DISK_BYTES_PER_S
        self._problems: dict[str, NodeError] = {}
        self._lacking: list[RemoteNode] = []
        self._sent: dict[int, int] = {}
        self._compressed: Spool | None = None
        self._size = 0
        self._began_s = 0.0

    async def run(self) -> dict[str, NodeError]:
        """Bring it to all nodes, and return the errors of those that it could not be brought to, by node id."""
        await self._on_each(self._nodes, self._ask)
        try:
            if self._lacking:
                await self._compress()
            able = [node for node in self._nodes if node.command.node_id not in self._problems]
            telling = asyncio.create_task(self._tell())
            try:
                await self._on_each(able, self._bring)
            finally:
                telling.cancel()
        finally:
            self._compressed = None
        if len(self._problems) < len(self._nodes):
            self._emit(Notice(self._summary()))
        return {node.command.node_id: self._problems[node.command.node_id] for node in self._failed()}

    def _failed(self) -> list[RemoteNode]:
        return [node for node in self._nodes if node.command.node_id in self._problems]

    def _summary(self) -> str:
        ref = self._bundle.ref
        sent = [node.command.node_id for node in self._lacking if node.command.node_id not in self._problems]
        what = f"bundle of {ref.text}, {ref.short_digest}"
        if not sent:
            return f"{what}: nothing sent, the nodes have it"
        each = " each" if len(sent) > 1 else ""
        return f"{what}: sent to {fold(sent)}, {bytes_text(self._size)}{each}"

    async def _on_each(self, nodes: Sequence[RemoteNode], step: Callable[[RemoteNode], Awaitable[None]]) -> None:
        """Take one step on some nodes at once, and note whose NodeError it was."""
        results = await asyncio.gather(*map(step, nodes), return_exceptions=True)
        for node, result in zip(nodes, results, strict=True):
            if isinstance(result, NodeError):
                self._problems[node.command.node_id] = result
            elif isinstance(result, TimeoutError):
                self._problems[node.command.node_id] = HandshakeError("it does not answer any more about the bundle")
            elif isinstance(result, BaseException):
                raise result

    async def _ask(self, node: RemoteNode) -> None:
        ref = self._bundle.ref
        async with asyncio.timeout(self._answer_s):
            answer, _ = await node.ask(
                "bundle", "bundle_have", "bundle_want", "refused", digest=ref.digest, bytes=ref.size_bytes
            )
        _refuse(answer)
        if answer["type"] == "bundle_want":
            self._lacking.append(node)

    async def _compress(self) -> None:
        self._emit(StageReached(Stage.SENDING))
        try:
            self._compressed, self._size = await asyncio.to_thread(compress, self._bundle.tar)
        except NodeError as error:
            self._problems |= {node.command.node_id: error for node in self._lacking}
        self._began_s = time.monotonic()

    async def _bring(self, node: RemoteNode) -> None:
        if node in self._lacking:
            await self._send(node)
        async with asyncio.timeout(self._answer_s):
            answer, _ = await node.ask("bundle_place", "bundle_placed", "refused", job_dir=node.command.job_dir)
        _refuse(answer)
        self._emit(BundleReady(node.command.node_rank, self._size if node in self._lacking else 0))

    async def _send(self, node: RemoteNode) -> None:
        loop = asyncio.get_running_loop()

        def pieces() -> Iterator[bytes]:
            """Yield it piece by piece; each time one is asked for, the one before was taken."""
            sent = 0
            while piece := self._read(sent):
                limit.reschedule(loop.time() + self._silence_s)
                yield piece
                sent += len(piece)
                self._sent[node.command.node_rank] = sent
            limit.reschedule(loop.time() + self._silence_s + self._answer_s)

        try:
            async with asyncio.timeout(None) as limit:
                answer = await node.stream("bundle_data", pieces(), "bundle_end", "bundle_kept", "refused")
        except TimeoutError:
            sent = self._sent.get(node.command.node_rank, 0)
            raise HandshakeError(
                f"nothing of the bundle was taken for {self._silence_s:g} s, after {bytes_text(sent)}"
                f" of {bytes_text(self._size)}",
                hint="see whether the node still answers; `--lost-after` sets how long it is waited for",
            ) from None
        _refuse(answer)

    def _read(self, offset: int) -> bytes:
        return os.pread(self._compressed.file.fileno(), CHUNK_BYTES, offset) if self._compressed else b""

    async def _tell(self) -> None:
        """Say how far it is, again and again, where there is something to send."""
        total = self._size * len(self._lacking)
        while total:
            await asyncio.sleep(TELL_S)
            sent = sum(self._sent.values())
            self._emit(SendingProgress(sent, total, int(sent / (time.monotonic() - self._began_s))))


def _refuse(answer: Header) -> None:
    """Raise PrepareError where a node has refused."""
    if answer["type"] == "refused":
        code, message = parse_refused(answer)
        raise PrepareError(message, hint=HINTS.get(code))


def compress(tar: BinaryIO) -> tuple[Spool, int]:
    """Return a file without a name that holds the tar compressed, and its size. Raises PrepareError."""
    deflate, size, offset = zlib.compressobj(LEVEL), 0, 0
    try:
        target = Spool()
        while piece := os.pread(tar.fileno(), PIECE_BYTES, offset):
            offset += len(piece)
            size += target.file.write(deflate.compress(piece))
        size += target.file.write(deflate.flush())
        target.file.flush()
    except OSError as error:
        raise PrepareError(
            f"the bundle cannot be kept in {tempfile.gettempdir()} here: {error.strerror}",
            hint="make room there, or set TMPDIR to another folder",
        ) from None
    return target, size
