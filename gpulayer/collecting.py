"""What a job leaves on its nodes, brought back once it is over there: by the same login, or where that broke, another.

node_outputs.py finds and reads it on a node, output_files.py keeps it here. Whatever goes wrong is told, and changes
nothing about how the job ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from typing import TYPE_CHECKING

from gpulayer.errors import HandshakeError, NodeError
from gpulayer.events import CollectingProgress, Event, Notice, OutputsCollected, Stage, StageReached
from gpulayer.frames import ProtocolError
from gpulayer.output_files import LEFT, Incoming, Listing, NotKeptError, choose
from gpulayer.session import Session
from gpulayer.ssh import SshTarget
from gpulayer.untrusted import one_line
from gpulayer.values import bytes_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from gpulayer.outcome import NodeRecord
    from gpulayer.plan import NodeCommand, Plan
    from gpulayer.ssh import SshConnector, SshLink
    from gpulayer.wire import Header

AT_ONCE = 8  # nodes: more do not fill a link better, and each may have a list of megabytes here
TICK_S = 1.0
PING_S = 5.0
PAUSE_S = 1.0
MARGIN_S = 5.0
CLOSE_LIMIT_S = 3.0
MOST_LOGINS = 50
NOT_KEPT = "since nothing can be written here"


class OutputSession(Session):
    """A supervisor that gives files out, and nothing else. `broke` once it did what none may do."""

    def __init__(self, python: str) -> None:
        super().__init__(python)
        self.broke = False
        self.told_s = time.monotonic()
        self.not_kept: NotKeptError | None = None
        self._listing: Listing | None = None
        self._incoming: Incoming | None = None

    async def list(self, command: NodeCommand) -> Listing:
        """Return what there is. Raises NodeError."""
        self._listing = Listing()
        payload = json.dumps(command.outputs).encode()
        _, data = await self.ask("list", "listed", payload=payload, **_places(command))
        listing, self._listing = self._listing, None
        with self._judging():
            listing.end(data)
        return listing

    async def fetch(self, command: NodeCommand, incoming: Incoming) -> None:
        """Take what is still to come. Raises NodeError, and NotKeptError where nothing can be written here."""
        self._incoming = incoming
        while batch := incoming.next_batch():
            try:
                await self.ask("read", "read_done", payload=json.dumps(batch).encode(), **_places(command))
            except NodeError:
                if self.not_kept:
                    raise self.not_kept from None
                raise
            with self._judging():
                incoming.end_batch()

    async def forget(self, command: NodeCommand, *, whole: bool) -> None:
        """Have the job's folder removed, or only the outputs in it. Raises NodeError."""
        await self.ask("forget", "forgotten", job_dir=command.job_dir, whole=whole)

    def drop(self, what: str, *, broke: bool = False) -> None:
        """Wait for nothing of it any more."""
        self.broke |= broke
        self._give_up(HandshakeError(what))

    @contextlib.contextmanager
    def _judging(self) -> Iterator[None]:
        try:
            yield
        except ProtocolError as error:
            self._broke(f"the supervisor broke the protocol: {error}")
            raise HandshakeError(f"the supervisor broke the protocol: {error}") from error

    def _broke(self, what: str) -> None:
        self.broke = True
        super()._broke(what)

    def _take(self, header: Header, payload: bytes) -> None:
        kind = header["type"]
        if kind != "pong":
            self.told_s = time.monotonic()
        if kind == "list_part" and self._listing:
            self._listing.take_part(payload)
        elif kind in ("file_data", "file_end", "file_gone") and self._incoming and self._asked:
            try:
                self._incoming.take(header, payload)
            except NotKeptError as error:
                self.not_kept = error
                self._give_up(HandshakeError(str(error)))
        else:
            super()._take(header, payload)


def _places(command: NodeCommand) -> dict[str, str]:
    return {"job_dir": command.job_dir, "workdir": command.workdir}


class Collection:
    """One node whose outputs are wanted. `has_logs`: its folder stays there for those, whatever comes back."""

    def __init__(self, plan: Plan, record: NodeRecord, link: SshLink | None, folder_of: Callable[[int], Path]) -> None:
        self.command, self.folder = plan.nodes[record.node_rank], folder_of(record.node_rank)
        self.link = None if record.lost else link
        self.has_logs = bool(record.kept or record.lost)
        self.why_not = ""
        self.told = False
        self.listing = Listing()
        self.incoming: Incoming | None = None
        self.total_bytes = 0
        self.session: OutputSession | None = None
        self.forgotten = False

    @property
    def received_bytes(self) -> int:
        """How much has come, whether or not it is of use yet."""
        return self.incoming.received_bytes if self.incoming else 0

    @property
    def whole(self) -> bool:
        """Nothing in the job's folder is wanted any more."""
        incoming = self.incoming
        return incoming is not None and not (incoming.waiting or incoming.stays_there or self.listing.stays_there)

    def result(self, stopped: str) -> OutputsCollected:
        """Return what came of it; `stopped` is why it ended early, if the node itself was no reason."""
        problems, incoming, command = self.listing.problems, self.incoming, self.command
        why_not = self.why_not or stopped
        if incoming is None:
            problems.add(f"{LEFT}, {why_not}", ["the outputs"])
        elif incoming.waiting:
            problems.add(f"{LEFT}, {why_not}", [file.path for file in incoming.waiting])
        return OutputsCollected(
            command.node_rank,
            files=incoming.files if incoming else 0,
            size_bytes=incoming.size_bytes if incoming else 0,
            links=self.listing.links,
            problems=problems.texts(),
            unmatched=tuple(command.outputs[number] for number in sorted(self.listing.unmatched)),
            kept="" if self.forgotten else command.job_dir,
        )


class Collecting:
    """The outputs of one job on their way. `emit` is told how far it is and what came of each node.

    Each login that is made for it is told to `opened`.
    """

    def __init__(
        self,
        plan: Plan,
        connector: SshConnector,
        collections: Sequence[Collection],
        emit: Callable[[Event], None],
        opened: Callable[[SshLink], None],
    ) -> None:
        self._plan, self._connector, self._collections = plan, connector, collections
        self._emit, self._opened = emit, opened
        self._slots = asyncio.Semaphore(AT_ONCE)
        self._began_s = time.monotonic()
        self._why_not = "since gpulayer was told to stop"

    async def run(self) -> None:
        """Bring back what is on these nodes. When it is cancelled, what is not here yet stays there."""
        self._emit(StageReached(Stage.COLLECTING))
        self._tell_progress()
        ticking = asyncio.create_task(self._tick())
        tasks = [asyncio.create_task(self._bring(collection)) for collection in self._collections]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            for error in [task.exception() for task in done]:
                if isinstance(error, NotKeptError):
                    self._why_not = NOT_KEPT
                    self._emit(Notice(f"{error}; the outputs that are not here yet stay on the nodes"))
                elif error:
                    raise error
        finally:
            for task in (ticking, *tasks):
                task.cancel()
            await asyncio.gather(ticking, *tasks, return_exceptions=True)
            self._tell_progress()

    def tell_rest(self) -> None:
        """Tell of the nodes that nothing was told of yet: what they have stays there."""
        for collection in self._collections:
            if not collection.told:
                collection.told = True
                self._emit(collection.result(self._why_not))

    async def _tick(self) -> None:
        """Tell how far it is, keep the nodes waiting for us, and give up those that are silent."""
        pinged_s = 0.0
        while True:
            await asyncio.sleep(TICK_S)
            self._tell_progress()
            now, limit_s = time.monotonic(), self._plan.lost_after_s
            ping = now - pinged_s >= min(PING_S, limit_s / 4)
            pinged_s = now if ping else pinged_s
            for session in [collection.session for collection in self._collections if collection.session]:
                if now - session.last_heard > limit_s:
                    session.drop(f"nothing was heard of it for {limit_s:g} s")
                elif now - session.told_s > limit_s:  # one that looks through millions of files says that it goes on
                    session.drop(f"it answers, but gives nothing out for {limit_s:g} s", broke=True)
                elif ping:
                    session.ping()

    def _tell_progress(self) -> None:
        received = sum(collection.received_bytes for collection in self._collections)
        rate = int(received / max(TICK_S, time.monotonic() - self._began_s))
        waiting = tuple(collection.command.node_rank for collection in self._collections if not collection.told)
        self._emit(
            CollectingProgress(received, sum(collection.total_bytes for collection in self._collections), rate, waiting)
        )

    async def _bring(self, collection: Collection) -> None:
        try:
            async with self._slots:
                await self._try(collection)
        finally:
            if collection.incoming:
                collection.incoming.close()
            collection.told = True
            self._emit(collection.result(self._why_not))

    async def _try(self, collection: Collection) -> None:
        """Log in as often as the connection breaks, for as long as the grace after something came, and some more."""
        patience_s = self._plan.grace_s + MARGIN_S
        give_up_s = time.monotonic() + patience_s
        for _ in range(MOST_LOGINS):
            before = collection.received_bytes
            try:
                await self._attempt(collection)
            except NotKeptError:
                collection.why_not = NOT_KEPT
                raise
            except (NodeError, TimeoutError) as error:
                collection.why_not = one_line(str(error)) or "no answer"
                broke = collection.session is not None and collection.session.broke
            else:
                collection.why_not = ""
                return
            if collection.received_bytes > before:
                give_up_s = time.monotonic() + patience_s
            if broke or time.monotonic() > give_up_s:
                return
            collection.link = None
            self._emit(
                Notice(f"{collection.why_not}; logging in again for the outputs", (collection.command.node_rank,))
            )
            await asyncio.sleep(PAUSE_S)

    async def _attempt(self, collection: Collection) -> None:
        command, link = collection.command, collection.link
        session = collection.session = OutputSession(command.python)
        if link is None:
            link = await self._connector.connect(SshTarget.of(command))
            self._opened(link)
        try:
            await session.begin(link, command.ssh)
            if collection.incoming is None:
                await self._look(collection, session)
            if collection.incoming:
                await session.fetch(command, collection.incoming)
            if collection.whole:
                await session.forget(command, whole=not collection.has_logs)
                collection.forgotten = True
            session.dismiss()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CLOSE_LIMIT_S):
                    await session.closed.wait()
        finally:
            session.close()

    async def _look(self, collection: Collection, session: OutputSession) -> None:
        collection.listing = await session.list(collection.command)
        limit = self._plan.max_output_bytes
        files = choose(collection.listing, limit, bytes_text(limit))
        collection.total_bytes = sum(file.size_bytes for file in files)
        collection.incoming = Incoming(collection.folder, files, collection.listing.problems)
