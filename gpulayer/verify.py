"""A node that was lost: log in to it again, end what is left of the job there, and see that it is gone."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from gpulayer import ending
from gpulayer.errors import NodeError
from gpulayer.session import Session
from gpulayer.ssh import SshTarget

if TYPE_CHECKING:
    from collections.abc import Callable

    from gpulayer.events import NodeSwept
    from gpulayer.remote import RemoteNode
    from gpulayer.ssh import SshConnector, SshLink

MARGIN_S = 5.0
PAUSE_S = 1.0
SWEEP_LIMIT_S = ending.KILL_LIMIT_S + 5.0


class Verifier:
    """Looks after lost nodes over connections of its own; each of these is told to `opened`."""

    def __init__(self, connector: SshConnector, grace_s: float, opened: Callable[[SshLink], None]) -> None:
        self._connector, self._grace_s, self._opened = connector, grace_s, opened

    async def verify(self, lost: RemoteNode, hurry: Callable[[], bool]) -> NodeSwept | None:
        """Try for as long as the grace, and some more, or until there is need to hurry. None: nobody could look."""
        give_up_s = time.monotonic() + self._grace_s + MARGIN_S
        while (left_s := give_up_s - time.monotonic()) > 0 and not hurry():
            try:
                return await self._sweep(lost, left_s)
            except (NodeError, TimeoutError):
                await asyncio.sleep(min(PAUSE_S, max(0.0, left_s)))
        return None

    async def _sweep(self, lost: RemoteNode, left_s: float) -> NodeSwept:
        command = lost.command
        async with asyncio.timeout(left_s):
            link = await self._connector.connect(SshTarget.of(command))
        self._opened(link)
        async with asyncio.timeout(left_s + SWEEP_LIMIT_S):
            session = Session(command.python)
            await session.begin(link, command.ssh)
            swept = await session.sweep(lost.marker, max(0.0, left_s - MARGIN_S))
            session.dismiss()
            return replace(swept, node_rank=command.node_rank)
