"""The supervisor: what runs on a node for the life of a job, and owns the job's processes.

    launcher == SSH ==> supervisor --- guard --- torchrun --- ranks, and whatever they start

The launcher sends this source and that of the modules it imports (bootstrap.py); nothing is installed on a node. The
guard is the parent of torchrun, the one that orphans of the job come to, and what ends the job when told to or when the
supervisor is killed. If the guard is killed, the supervisor takes its place. Standard library only, Python 3.8.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import time

from gpulayer.ending import KILL_LIMIT_S, NEVER, TICK_S, Ending
from gpulayer.environment import job_environment, node_environment, to_bytes
from gpulayer.frames import HELLO, VERSION, FrameReader, ProtocolError, encode_frame
from gpulayer.guard import ALIVE, PR_SET_CHILD_SUBREAPER, catch_signals, fork_guard, tell_guard
from gpulayer.network import RefusalError, choose_interface, lock_port, reserve_port
from gpulayer.node_bundle import FRAMES, NodeBundles
from gpulayer.node_lease import LEASE_FACTS, Lease, LeaseHeldError
from gpulayer.node_outputs import REQUESTS, OutputDesk, has_outputs
from gpulayer.processes import children_of, environment_of, job_processes, keeper_name, libc, signal_process
from gpulayer.programs import Helper
from gpulayer.ranks import Children, RankWatch, number_in
from gpulayer.streams import JobStreams, Pace, make_job_dir, remove_tree
from gpulayer.survey import survey

IDLE_TICK_S = 0.05
QUICK_TICK_S = 0.003
QUICK_TICKS = 1000
QUEUE_BYTES = 1 << 18
GUARD_MARGIN_S = 5.0

PR_SET_NAME = 15
# What the launcher may send before the start, and once a job is prepared: each has its method `_obey_NAME`.
UNPREPARED = frozenset(["hold", "release", "survey", "sweep", "helper", "helper_input", "reserve", "prepare", *FRAMES])
PREPARED = frozenset(["helper", "helper_input", "start"])

TYPE_CHECKING = False  # mypy takes it for true; importing typing would cost 5 ms
if TYPE_CHECKING:
    import socket
    from typing import Any

    Header = dict[str, Any]


class Supervisor:
    """The event loop on the node.

    `phase` goes waiting -> running -> draining (nothing of the job is alive; until the launcher has all output)
    -> closing (the last frame) -> done. What may be sent to it when: see `_obey`.
    """

    def __init__(self) -> None:
        self.phase = "waiting"
        self.job: Header = {}
        self.job_dir = self.interface = ""
        self.reader, self.out = FrameReader(), bytearray()
        self.link_up = True
        self.last_heard = time.monotonic()
        self.lost_after_s = 60.0
        self.ending = self.drained = self.arrived = self.leaving = False
        self.guard_pid = self.command_pid = 0
        self.guard_link: socket.socket | None = None
        self.guard_told_s, self.guard_limit_s = 0.0, NEVER
        self.port_holders: list[socket.socket] = []
        self.held_port = 0
        self.helper: Helper | None = None
        self.lease: Lease | None = None
        self.bundles = NodeBundles(self._send)
        self.desk = OutputDesk()
        self.quick_ticks = QUICK_TICKS
        self.ranks: dict[int, RankWatch] = {}
        self.children = Children()
        self.streams: JobStreams | None = None
        self.pace = Pace()
        os.set_blocking(1, False)
        self.wake = catch_signals(signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
        libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)

    def run(self) -> None:
        """Serve until the job is over here and everything is told."""
        self._flush()
        while self.phase != "done":
            self._wait()
            self._watch_ranks()
            self._pump()
            self._look_after_guard()
            if self.link_up and time.monotonic() - self.last_heard > self.lost_after_s:
                self._give_up(f"nothing was heard there of gpulayer for {self.lost_after_s:g} s")
            if self.phase == "draining":
                self._drain()
            self._flush()
            if self.phase == "closing" and not (self.out and self.link_up):
                self.phase = "done"

    def _wait(self) -> None:
        handlers = {self.wake: self._hear_signal}
        if self.link_up:
            handlers[0] = self._receive
        if self.guard_link:
            handlers[self.guard_link.fileno()] = self._hear_guard
        if self.helper:
            handlers[self.helper.output] = self._hear_helper
        poller = select.poll()
        for fd in [*handlers, *(watch.fd for watch in self.ranks.values() if watch.fd >= 0)]:
            poller.register(fd, select.POLLIN)
        if self.link_up:
            poller.register(1, select.POLLOUT if self.out else 0)
        for fd, events in poller.poll(self._tick_s() * 1000):
            if fd in handlers:
                handlers[fd]()
            elif fd == 1 and events & (select.POLLERR | select.POLLHUP | select.POLLNVAL):
                self._link_lost()

    def _tick_s(self) -> float:
        if self.desk.busy and not self.out:
            return 0.0
        if self.phase != "running":
            return 1.0 if self.phase == "waiting" else TICK_S
        if len(self.ranks) == self.job["nproc_per_node"]:
            return IDLE_TICK_S
        if (
            self.streams and self.streams.some_of_ranks and self.quick_ticks
        ):  # ranks are being started, and may not live for long
            self.quick_ticks -= 1
            return QUICK_TICK_S
        return TICK_S

    # -- the launcher

    def _hear_signal(self) -> None:
        name = signal.Signals(os.read(self.wake, 1)[0]).name
        self._give_up(f"its supervisor got {name} there")

    def _receive(self) -> None:
        try:
            data = os.read(0, 1 << 16)
        except OSError:
            data = b""
        if not data:
            self._link_lost()
            return
        self.last_heard = time.monotonic()
        try:
            for header, payload in self.reader.feed(data):
                self._obey(header, payload)
        except (ProtocolError, LookupError, TypeError, ValueError) as error:
            self._give_up(f"its supervisor does not understand what it was sent: {error!r:.200}")

    def _obey(self, header: Header, payload: bytes) -> None:
        kind = header["type"]
        if kind == "ping":
            self._send({"type": "pong"})
        elif kind == "stop":
            self._end(float(header["grace_s"]))
        elif kind == "kill":
            self._end(0.0)
        elif kind == "leave":  # the launcher does not wait for the rest of the output
            self.leaving = True
        elif kind == "seen":
            self.pace.seen(header["bytes"], time.monotonic())
        elif kind == "arrived" and self.drained:
            self.arrived = True
        elif kind in REQUESTS and self.phase == "waiting" and not self.job:
            self.desk.obey(header, payload)
        elif self.phase == "waiting" and kind in (PREPARED if self.job else UNPREPARED):
            getattr(self, "_obey_" + kind)(header, payload)
        else:
            raise ProtocolError(f"frame {kind!r:.80} has no place here")

    def _send(self, header: Header, payload: bytes = b"") -> None:
        if self.link_up:
            self.out += encode_frame(header, payload)

    def _flush(self) -> None:
        try:
            while self.out and self.link_up:
                with memoryview(self.out) as view:
                    written = os.write(1, view[: 1 << 18])
                del self.out[:written]
        except BlockingIOError:
            pass
        except OSError:
            self._link_lost()

    def _give_up(self, reason: str) -> None:
        """End the job of our own accord, and say why if anyone hears it."""
        self._send({"type": "error", "message": reason})
        self._flush()
        self._link_lost()

    def _link_lost(self) -> None:
        self.link_up = False
        self._end(self.job.get("grace_s", 0.0))

    def _end(self, grace_s: float) -> None:
        self.ending = True
        if self.phase == "waiting":
            self._end_helper()
            self.bundles.close()
            self.phase = "draining"
        elif self.guard_link:
            tell_guard(self.guard_link, b"%f" % grace_s)
            self.guard_limit_s = min(self.guard_limit_s, time.monotonic() + grace_s + KILL_LIMIT_S + GUARD_MARGIN_S)

    # -- before the start

    def _obey_reserve(self, header: Header, payload: bytes) -> None:
        """Hold the rendezvous port, and no other; answer `reserved` or `refused`."""
        self._release_port()
        try:
            self._hold_port(header["port"])
        except RefusalError as refusal:
            self._release_port()
            self._refuse(*refusal.args)
        else:
            self._send({"type": "reserved"})

    def _hold_port(self, port: int) -> None:
        if port != self.held_port:
            self.port_holders.append(lock_port(port))
            self.port_holders.append(reserve_port(port))
            self.held_port = port

    def _release_port(self) -> None:
        for holder in self.port_holders:
            holder.close()
        self.port_holders, self.held_port = [], 0

    def _obey_helper(self, header: Header, payload: bytes) -> None:
        program = json.loads(payload)
        self._end_helper()
        try:
            self.helper = Helper([to_bytes(arg) for arg in program["argv"]], node_environment(program["env"]))
        except OSError as error:
            self._refuse("system", str(error))

    def _obey_helper_input(self, header: Header, payload: bytes) -> None:
        if self.helper:
            self.helper.write(payload)

    def _hear_helper(self) -> None:
        data = self.helper.read() if self.helper else b""
        self._send({"type": "helper_output" if data else "helper_end"}, data)
        if not data:
            self._end_helper()

    def _end_helper(self) -> None:
        if self.helper:
            self.helper.end()
            self.helper = None

    def _refuse(self, code: str, message: str) -> None:
        self._send({"type": "refused", "code": code, "message": message[:1000]})

    def _obey_prepare(self, header: Header, payload: bytes) -> None:
        """Make sure that the job can start here, and answer `prepared` or `refused`."""
        job = json.loads(payload)
        try:
            self._check(job)
        except (RefusalError, OSError) as problem:
            code, message = problem.args if isinstance(problem, RefusalError) else ("system", str(problem))
            self._refuse(code, message)
            return
        self.job = job
        self.lost_after_s = job["lost_after_s"]
        libc.prctl(PR_SET_NAME, keeper_name(job["marker"]), 0, 0, 0)
        self._send({"type": "prepared", "interface": self.interface})

    def _check(self, job: Header) -> None:
        if not os.path.exists("/proc/self/stat"):
            raise RefusalError("proc", "/proc is not mounted, so processes could not be found and ended")
        workdir, scratch = job["workdir"], job["job_dir"]
        try:
            os.chdir(to_bytes(workdir))
        except OSError as error:
            raise RefusalError("workdir", f"workdir {workdir} cannot be entered: {error.strerror}") from None
        self.interface = choose_interface(job["address"], job["master_addr"], job["interface"])
        if not self.interface and job["nnodes"] > 1:
            raise RefusalError(
                "interface", "no interface holds {address} or has a route to {master_addr}".format(**job)
            )
        if job["node_rank"] == 0:
            self._hold_port(job["master_port"])
        job_dir = os.fsdecode(to_bytes(scratch))  # the same bytes, whatever encoding this machine has for file names
        try:
            make_job_dir(job_dir, made=job_dir == self.bundles.job_dir)
        except OSError as error:
            raise RefusalError("job_dir", f"the job's folder {scratch} cannot be made: {error.strerror}") from None
        self.job_dir = job_dir

    def _obey_hold(self, header: Header, payload: bytes) -> None:
        """Hold this node for a job, in place of what was held before; answer `held` or `refused` with the holders."""
        self._release_lease()
        self.lost_after_s = float(header.get("lost_after_s", self.lost_after_s))
        try:
            self.lease = Lease({name: header[name] for name in LEASE_FACTS})
        except LeaseHeldError as held:
            self._send({"type": "refused", "code": "held", "message": ""}, json.dumps(held.args[0]).encode())
        except (OSError, ValueError) as error:
            self._refuse("lease", f"no lease can be had there: {getattr(error, 'strerror', error)}")
        else:
            self._send({"type": "held"})

    def _obey_release(self, header: Header, payload: bytes) -> None:
        self._release_lease()
        self._send({"type": "released"})

    def _release_lease(self) -> None:
        if self.lease:
            self.lease.release()
            self.lease = None

    def _obey_bundle(self, header: Header, payload: bytes) -> None:
        self.bundles.obey(header, payload)
        self.job_dir = self.bundles.job_dir
        self.last_heard = time.monotonic()  # hashing and unpacking take their time, in which nobody listened

    _obey_bundle_data = _obey_bundle_end = _obey_bundle_place = _obey_bundle

    def _obey_survey(self, header: Header, payload: bytes) -> None:
        self._send({"type": "surveyed"}, json.dumps(survey()).encode())

    def _obey_sweep(self, header: Header, payload: bytes) -> None:
        """End what another supervisor has left, or still runs: wait as long as the grace, then kill it and all.

        `term`: with SIGTERM first. Without it, what is left has been told before, by its own supervisor or guard.
        """
        marker = header["marker"]
        for process in job_processes(marker, {os.getpid()}):
            if process.name == keeper_name(marker) and process.state in "Tt":
                signal_process(process, signal.SIGKILL)  # stopped, it ends nothing; the other keeper does then
        Ending(marker, {os.getpid()}, self._send).run(float(header["grace_s"]), ask=bool(header.get("term")))
        self.last_heard = time.monotonic()  # nobody listened meanwhile

    # -- the command and its ranks

    def _obey_start(self, header: Header, payload: bytes) -> None:
        job = self.job
        self.phase = "running"
        self._end_helper()
        argv = [to_bytes(arg) for arg in job["argv"]]
        held = [holder.fileno() for holder in self.lease.sockets] if self.lease else []
        outputs = []
        self.streams = JobStreams(self.job_dir, job["nproc_per_node"], job["launcher"], job["first_rank"])
        try:
            outputs = self.streams.create_own()
            self.guard_pid, self.guard_link = fork_guard(job, argv, job_environment(job, self.interface), outputs, held)
        except OSError as error:
            self._give_up(f"nothing can be started there: {error}")
            self.phase = "draining"
        for fd in outputs:
            os.close(fd)

    def _look_after_guard(self) -> None:
        """Show it that this end goes on. One that does not end the job in time stands still: kill and replace it."""
        now = time.monotonic()
        if self.guard_link and self.phase == "running" and now > self.guard_limit_s:
            os.kill(self.guard_pid, signal.SIGKILL)
            self.guard_limit_s = NEVER
        if self.guard_link and now - self.guard_told_s > min(1.0, self.lost_after_s / 8):
            tell_guard(self.guard_link, ALIVE)
            self.guard_told_s = now

    def _hear_guard(self) -> None:
        try:
            message = json.loads((self.guard_link and self.guard_link.recv(1 << 17)) or "{}")
        except OSError:
            message = {}
        kind = message.get("type")
        if kind == "reaped":
            self._reaped(message["pid"], message["status"])
        elif kind:
            self.command_pid = message.get("pid", 0)
            self.phase = "draining" if kind == "swept" else self.phase
            self._send(message)
        else:  # it was killed; the kernel has told the command to end
            self.guard_link, self.guard_pid = None, 0
            if self.phase == "running":
                self._give_up("its guard process was killed there")
                Ending(self.job["marker"], {os.getpid()}, self._send).run(self.job["grace_s"])
                self.phase = "draining"

    def _hear_guard_now(self) -> None:
        while self.guard_link and select.select([self.guard_link], [], [], 0)[0]:
            self._hear_guard()

    def _reaped(self, pid: int, status: int) -> None:
        for watch in self.ranks.values():
            if watch.process.pid == pid and not watch.told:
                watch.reaped = status
        if pid == self.command_pid:
            if not os.WIFSIGNALED(status):  # else it was not over when it died: its ranks are being killed, after it
                self._watch_ranks()
            self._send_exit({"type": "exit"}, status, None)
            self.ending, self.command_pid = True, 0

    def _watch_ranks(self) -> None:
        """Find torchrun's workers, and tell of each that ended, before torchrun has said a word."""
        if self.phase == "running" and len(self.ranks) < self.job["nproc_per_node"]:
            self._find_ranks()
        looks = {local_rank: watch.look() for local_rank, watch in self.ranks.items() if not watch.told}
        ends = {local_rank: status for local_rank, (ended, status) in looks.items() if ended}
        if ends:
            self._hear_guard_now()  # if it is the guard that killed them, it has said why before
        for local_rank, status in ends.items():
            watch = self.ranks[local_rank]
            if not watch.told:
                if watch.fd >= 0:
                    os.close(watch.fd)
                watch.told, watch.fd = True, -1
                self._pump_once()
                self._send_exit({"type": "rank_exit", "local_rank": local_rank}, status, local_rank)

    def _find_ranks(self) -> None:
        known = {watch.process.pid: local_rank for local_rank, watch in self.ranks.items()}
        following = 0
        for process in children_of(self.command_pid) if self.command_pid else ():
            has_file = self.streams is not None and self.streams.has_file(following)
            found = self.children.local_rank(process, self.job["marker"], following, has_file)
            local_rank = known.get(process.pid, found)
            if local_rank is not None and local_rank < self.job["nproc_per_node"]:
                following = local_rank + 1
                if local_rank not in self.ranks:
                    self.ranks[local_rank] = RankWatch(process)
                    rank = number_in(environment_of(process.pid), b"RANK=")
                    self._send({"type": "rank", "local_rank": local_rank, "pid": process.pid, "rank": rank})

    def _send_exit(self, header: Header, status: int | None, local_rank: int | None) -> None:
        """Tell of an end; of one that is news and a failure, with the last bytes written and torchrun's error file."""
        parts = {}
        if status and not self.ending and self.streams:
            parts = self.streams.last_words(local_rank)
        sizes = [[name, len(data)] for name, data in parts.items()]
        self._send(dict(header, status=status, parts=sizes), b"".join(parts.values()))

    # -- output

    def _pump(self) -> None:
        """Queue new output while the queue is short and little is under way, so that news are not late behind it."""
        self.desk.work(self.out, QUEUE_BYTES)
        if self.streams and self.link_up and not self.leaving and self.phase != "closing":
            self.streams.find()
            while len(self.out) < QUEUE_BYTES and self.pace.room and self._pump_once():
                pass

    def _pump_once(self) -> bool:
        if not self.streams or not self.link_up:
            return False
        frames, size = self.streams.next_frames()
        self.out += frames
        self.pace.sent(size, time.monotonic())
        return bool(frames)

    def _drain(self) -> None:
        """Go once the launcher says that all output has arrived, or nobody is there or waits for it."""
        if self.streams and self.link_up and not self.leaving and not self.arrived:
            if not self.drained and self.streams.at_end():
                self.drained = True
                self._send({"type": "drained"})
            return
        kept = self.job_dir if self.streams and not self.arrived else ""
        outputs = bool(self.streams) and has_outputs(self.job_dir, self.job["outputs"])  # for whoever comes for them
        if not kept and not outputs:
            remove_tree(self.job_dir)
        self._release_port()
        if self.guard_pid:
            os.kill(self.guard_pid, signal.SIGKILL)
            os.waitpid(self.guard_pid, 0)
        self._release_lease()
        self._send({"type": "ended", "kept": kept, "outputs": outputs})
        self.phase = "closing"


def hello() -> Header:
    """Return what the launcher learns of the node by logging in."""
    uname = os.uname()
    python = ".".join(map(str, sys.version_info[:3]))
    names = {"hostname": uname.nodename, "kernel": uname.release, "python": python}
    return dict(names, type="hello", version=VERSION, pid=os.getpid())


def main(nonce: str) -> None:
    """Greet and serve. `nonce` comes with the source: whatever a login shell prints cannot pass for the greeting."""
    supervisor = Supervisor()
    supervisor.out += HELLO + nonce.encode() + b"\n" + encode_frame(hello())
    supervisor.run()
    sys.exit(0 if supervisor.link_up else 1)
