"""How a job is ended on a node: SIGTERM, the grace, SIGKILL until none is left. Runs on nodes."""

from __future__ import annotations

import contextlib
import os
import signal
import time

from gpulayer.processes import Process, children_of, describe, job_processes, keeper_name, signal_process

KILL_LIMIT_S = 10.0
TICK_S = 0.02
NEVER = float("inf")

TYPE_CHECKING = False  # mypy takes it for true; importing typing would cost 5 ms
if TYPE_CHECKING:
    from typing import Any, Callable

    Header = dict[str, Any]


class Ending:
    """How a job is ended: SIGTERM to the command alone, once; the grace; then SIGKILL to all until none is left.

    torchrun passes SIGTERM on to its ranks; a third one would make it drop them. `to_group`: the command is anything,
    a shell for instance, which passes nothing on. Its process group gets the SIGTERM, as from a terminal, and whatever
    of the job goes on has the grace. `spared` are keepers that go on.
    `tell` is given what the launcher or the supervisor has to know: each child that was reaped, and in the end `swept`.
    """

    def __init__(
        self,
        marker: str,
        spared: set[int],
        tell: Callable[[Header], None],
        command: int = 0,
        *,
        to_group: bool = False,
    ) -> None:
        self._to_group = to_group
        self._marker, self._spared, self._tell, self._command = marker, spared, tell, command
        self._kill_at = self._give_up_at = NEVER
        self._empty_looks = 0
        self._killed: set[tuple[int, int]] = set()

    @property
    def begun(self) -> bool:
        """True once the job is to end."""
        return self._kill_at < NEVER

    def begin(self, grace_s: float) -> None:
        """End the job within this time. Told again, a shorter time counts."""
        if self._command and grace_s > 0 and not self.begun:
            tell = self._tell_group if self._to_group else os.kill
            tell(self._command, signal.SIGTERM)  # a child of ours, not reaped: the pid is its own
        self._kill_at = min(self._kill_at, time.monotonic() + grace_s)

    def step(self) -> bool:
        """Do what is due, which before `begin` is little; True once nothing is left, or nothing that can be killed."""
        self._reap()
        now = time.monotonic()
        if not self.begun or (now < self._kill_at and self._is_worth_waiting()):
            return False
        self._kill_at = 0.0
        self._give_up_at = min(self._give_up_at, now + KILL_LIMIT_S)
        left = job_processes(self._marker, self._spared)
        self._empty_looks = 0 if left else self._empty_looks + 1
        name = keeper_name(self._marker)  # keepers come last: orphans come to them
        self._kill([one for one in left if one.name != name] or left)
        self._chase_orphans()
        over = self._empty_looks >= 2 or now > self._give_up_at
        if over:
            survivors = [describe(process) for process in left[:32]]
            self._tell({"type": "swept", "killed": len(self._killed), "survivors": survivors})
        return over

    def run(self, grace_s: float, *, ask: bool = False) -> None:
        """Begin, and see it through. `ask`: with SIGTERM first, for a job whose command is no child of ours."""
        if ask:
            self._ask()
        self.begin(grace_s)
        while not self.step():
            time.sleep(TICK_S)

    def _ask(self) -> None:
        """Have the keepers end the job; without any, tell its topmost processes. One SIGTERM to each, no more."""
        found = job_processes(self._marker, self._spared)
        keepers = [one for one in found if one.name == keeper_name(self._marker)]
        pids = {one.pid for one in found}
        for process in keepers or [one for one in found if one.ppid not in pids]:
            signal_process(process, signal.SIGTERM)

    def _reap(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if not pid:
                    break
                self._empty_looks = 0  # the last look may have missed what this one left behind
                if pid == self._command:  # nothing of the job has a reason to live any more
                    self._command = 0
                    self._kill_at = self._kill_at if self._to_group and self.begun else 0.0
                self._tell({"type": "reaped", "pid": pid, "status": status})

    def _is_worth_waiting(self) -> bool:
        """Tell whether anything may still end by itself. torchrun alone does not: its exit barrier ignores SIGTERM."""
        if self._command and self._to_group:
            return True
        if self._command:
            return any(child.alive for child in children_of(self._command))
        return bool(job_processes(self._marker, self._spared))

    @staticmethod
    def _tell_group(command: int, number: int) -> None:
        try:
            os.killpg(command, number)
        except OSError:  # it has not come to make a session of its own
            os.kill(command, number)

    def _kill(self, processes: list[Process]) -> None:
        for process in processes:
            self._killed.add((process.pid, process.start))
            signal_process(process, signal.SIGKILL)

    def _chase_orphans(self) -> None:
        """Kill what comes to us as it comes: forks that exit at once outrun a look at the whole table."""
        for _ in range(100):
            self._reap()
            orphans = [one for one in children_of(os.getpid()) if one.alive and one.pid not in self._spared]
            if not orphans:
                break
            self._kill(orphans)
