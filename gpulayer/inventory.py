"""What a node says of the leases and the jobs on it, as types. Nothing that a node sends is trusted.

survey.py and node_lease.py say it there. The dataclasses are the format, as in facts.py.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any

from gpulayer.errors import HandshakeError
from gpulayer.hosts import gpus_meet
from gpulayer.masks import NONE_KNOWN
from gpulayer.placement import Hold
from gpulayer.typed import read_typed

FAR_FUTURE_S = 4e9  # of the epoch: the year 2096


@dataclass(frozen=True, slots=True)
class NodeLease:
    """What a job holds of a node: `gpus` are device indices, None the whole machine.

    `since` is in seconds of the epoch. `scope` is "", or on practice maps, whose nodes are one machine, one for each.
    """

    job_id: str
    user: str
    login: str
    since: float
    scope: str
    gpus: tuple[int, ...] | None

    @property
    def hold(self) -> Hold:
        """Who holds it, in words. Anyone on the node can write a lease, with any number in it."""
        return Hold(self.job_id, self.user, self.login, min(max(0.0, self.since), FAR_FUTURE_S))

    def meets(self, scope: str, gpus: tuple[int, ...] | None) -> bool:
        """Tell whether it is about any of these GPUs (None: the whole machine)."""
        return scope == self.scope and gpus_meet(self.gpus, gpus)


@dataclass(frozen=True, slots=True)
class LeftProcess:
    """A process of a job. `state` is the kernel's letter, `rank` None where it is no rank or does not say."""

    pid: int
    state: str
    command: str
    age_s: float
    rank: int | None


@dataclass(frozen=True, slots=True)
class LeftJob:
    """What is alive of a job on a node, under one marker. `processes` may be fewer than `count`: an answer has a bound.

    `supervisor`: there is one, and it is not stopped. `keepers` are the pids of supervisor and guard.
    """

    job_id: str
    marker: str
    node_rank: int | None
    user: str
    supervisor: bool
    keepers: tuple[int, ...]
    processes: tuple[LeftProcess, ...]
    count: int
    age_s: float
    command: str

    @property
    def pids(self) -> set[int]:
        """All that is known to be of the job."""
        return {*self.keepers, *(process.pid for process in self.processes)}


@dataclass(frozen=True, slots=True)
class Survey:
    """Everything of any job on a node that the user who logged in may see."""

    leases: tuple[NodeLease, ...]
    jobs: tuple[LeftJob, ...]


def parse_survey(payload: bytes) -> Survey:
    """Read what comes with `surveyed`. Raises HandshakeError."""
    survey: Survey = read_typed(Survey, _plain(payload), "the node's survey")
    return replace(survey, jobs=tuple(map(_masked, survey.jobs)))


def parse_holders(payload: bytes) -> tuple[NodeLease, ...]:
    """Read what comes with a refused `hold`: at least one lease. Raises HandshakeError."""
    holders: tuple[NodeLease, ...] = read_typed(tuple[NodeLease, ...], _plain(payload), "the node's list of holders")
    if not holders:
        raise HandshakeError("the node's list of holders is empty")
    return holders


def _masked(job: LeftJob) -> LeftJob:
    """Return a job whose command lines may be shown."""
    processes = tuple(replace(one, command=NONE_KNOWN.command(one.command)) for one in job.processes)
    return replace(job, command=NONE_KNOWN.command(job.command), processes=processes)


def _plain(payload: bytes) -> Any:
    try:
        return json.loads(payload)
    except (ValueError, RecursionError):
        return None
