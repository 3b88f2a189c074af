"""What runs on a node for the life of a job, and owns the job's processes. Standard library only, one file, Python 3.8.

    launcher == SSH ==> supervisor --- guard --- torchrun --- ranks, and whatever they start

The launcher sends this source (bootstrap.py); nothing is installed on a node. Both ends speak frames: one JSON line,
then as many bytes as its `size` says. The guard is the parent of torchrun, the one that orphans of the job come to, and
what ends the job when told to or when the supervisor is killed. If the guard is killed, the supervisor takes its place.

    frames                 encode_frame, FrameReader: the launcher uses the same two
    the process table      who belongs to the job, signals that cannot hit a recycled pid, and how a job is ended
    the guard              starts the command, and outlives the supervisor
    output                 following the files that ranks write to
    network                the interface that holds an address, and the reserved rendezvous port
    Supervisor             the event loop: prepare, start, watch the ranks, send their output, report the end
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import json
import os
import select
import signal
import socket
import struct
import sys
import time

VERSION = 1
MIN_PYTHON = (3, 8)
HELLO = b"\0gpulayer:"
MAX_HEADER_BYTES = 1 << 16
MAX_PAYLOAD_BYTES = 1 << 25  # a job's argv and environment may be megabytes
MAX_EVENT_BYTES = 1 << 18  # what a node sends comes in small pieces

KILL_LIMIT_S = 10.0
TICK_S = 0.02
IDLE_TICK_S = 0.05
QUICK_TICK_S = 0.003
QUICK_TICKS = 1000
CHUNK_BYTES = 1 << 16
QUEUE_BYTES = 1 << 18
KEEP_BYTES = 64 << 20
PUNCH_BYTES = 16 << 20
TAIL_BYTES = 1 << 13
ERROR_FILE_BYTES = 1 << 16

# What torchrun sets for itself. A leftover in the node's own environment misleads torchrun or the script.
STALE_NAMES = frozenset(
    b"MASTER_ADDR MASTER_PORT RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE GROUP_RANK GROUP_WORLD_SIZE NODE_RANK "
    b"ROLE_RANK ROLE_NAME ROLE_WORLD_SIZE TORCH_ELASTIC_WORKER_IDENTICAL PYTHON_EXEC".split()
)
STALE_PREFIXES = (b"PET_", b"TORCHELASTIC_")

PR_SET_PDEATHSIG = 1
PR_SET_NAME = 15
PR_SET_CHILD_SUBREAPER = 36
SYS_PIDFD_SEND_SIGNAL = 424
SYS_PIDFD_OPEN = 434
PIDFD_GET_INFO = 0xC040FF0B  # linux/pidfd.h, since 6.13; its exit code since 6.15
PIDFD_INFO_EXIT = 1 << 3
FALLOC_PUNCH_HOLE = 0x03  # FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE
SIOCGIFCONF = 0x8912
NEVER = float("inf")

libc = ctypes.CDLL(None, use_errno=True)

TYPE_CHECKING = False  # mypy takes it for true; importing typing would cost 5 ms
if TYPE_CHECKING:
    from typing import Any, Callable, Iterator

    Header = dict[str, Any]


class ProtocolError(Exception):
    """The other end sent something that is no frame, or a frame that has no place here."""


class RefusalError(Exception):
    """This node cannot take part; made of a code for programs and a message for people."""


# --- frames ---------------------------------------------------------------------------------------------------------


def encode_frame(header: Header, payload: bytes = b"") -> bytes:
    """Return one frame: the header as a JSON line (with `size` when there is a payload), then the payload."""
    if payload:
        header = dict(header, size=len(payload))
    return json.dumps(header, separators=(",", ":")).encode() + b"\n" + payload


class FrameReader:
    """Cuts a byte stream into frames; what it holds of it is bounded."""

    def __init__(self, max_payload_bytes: int = MAX_PAYLOAD_BYTES) -> None:
        self._max_payload_bytes = max_payload_bytes
        self._buffer = bytearray()
        self._header: Header | None = None

    def feed(self, data: bytes) -> Iterator[tuple[Header, bytes]]:
        """Yield the frames that `data` completes, as (header, payload). Raises ProtocolError after the good ones."""
        self._buffer += data
        while True:
            if self._header is None:
                end = self._buffer.find(b"\n", 0, MAX_HEADER_BYTES + 1)
                if end < 0 and len(self._buffer) > MAX_HEADER_BYTES:
                    raise ProtocolError(f"a header line is longer than {MAX_HEADER_BYTES} bytes")
                if end < 0:
                    return
                self._header = self._parse(bytes(self._buffer[:end]))
                del self._buffer[: end + 1]
            size = self._header.get("size", 0)
            if len(self._buffer) < size:
                return
            header, payload = self._header, bytes(self._buffer[:size])
            del self._buffer[:size]
            self._header = None
            yield header, payload

    def _parse(self, line: bytes) -> Header:
        try:
            header = json.loads(line)
        except (ValueError, RecursionError):
            header = None
        size = header.get("size", 0) if isinstance(header, dict) else None
        if type(size) is not int or not 0 <= size <= self._max_payload_bytes or type(header.get("type")) is not str:
            raise ProtocolError(f"not a frame: {line[:80]!r}")
        return header  # type: ignore[no-any-return]  # JSON is Any; the line above has looked


# --- the process table ----------------------------------------------------------------------------------------------


class Process:
    """A process as last seen. `start` (clock ticks since boot) tells it from another that got its pid later."""

    __slots__ = ("alive", "name", "pid", "ppid", "start", "state", "wait_status")

    def __init__(self, pid: int, stat: bytes) -> None:
        head, _, rest = stat.rpartition(b") ")
        fields = rest.split()
        self.pid = pid
        self.name = head.partition(b" (")[2]
        self.state = fields[0].decode()
        self.ppid = int(fields[1])
        self.start = int(fields[19])
        self.wait_status = int(fields[49])
        # A zombie leader whose other threads run on (pthread_exit in main) is alive.
        self.alive = self.state not in "ZX" or int(fields[17]) > 1


def read_file(path: str, limit: int = -1) -> bytes:
    """Return a file's bytes, or b"" where it is gone or not ours to read."""
    try:
        with open(path, "rb") as file:
            return file.read(limit)
    except OSError:
        return b""


def list_folder(path: str) -> list[str]:
    """Return the paths in a folder, sorted; none where it does not exist (yet, or any more)."""
    try:
        return sorted(os.path.join(path, name) for name in os.listdir(path))
    except OSError:
        return []


def read_process(pid: int) -> Process | None:
    """Return the process with this pid, zombies included, or None."""
    stat = read_file(f"/proc/{pid}/stat")
    return Process(pid, stat) if stat else None


def process_table() -> dict[int, Process]:
    """Return every process of this PID namespace by pid."""
    found = (read_process(int(name)) for name in os.listdir("/proc") if name.isdigit())
    return {process.pid: process for process in found if process}


def children_of(pid: int) -> list[Process]:
    """Return a process's children, oldest first."""
    tasks = list_folder(f"/proc/{pid}/task")
    if tasks and not os.path.exists(tasks[0] + "/children"):  # a kernel without CONFIG_PROC_CHILDREN
        return sorted((one for one in process_table().values() if one.ppid == pid), key=lambda one: one.start)
    found = (read_process(int(child)) for task in tasks for child in read_file(task + "/children").split())
    return [process for process in found if process]


def environment_of(pid: int) -> list[bytes]:
    """Return the `NAME=VALUE` entries that a process was started with; none for a zombie, or if it wrote over them."""
    return read_file(f"/proc/{pid}/environ").split(b"\0")


def marker_entry(marker: str) -> bytes:
    """Return the environment entry that marks a process of the job."""
    return b"GPULAYER_MARKER=" + marker.encode()


def keeper_name(marker: str) -> bytes:
    """Return the name that `ps` shows for the job's supervisor and guard, 15 bytes at most; sweeps know them by it."""
    return b"gpul-" + marker[:10].encode()


def select_job(table: dict[int, Process], roots: set[int], spared: set[int]) -> list[Process]:
    """Return the living processes that are in `roots` or descend from them, less `spared`; pure, for any table."""
    children: dict[int, list[int]] = {}
    for process in table.values():
        children.setdefault(process.ppid, []).append(process.pid)
    seen: set[int] = set()
    queue = list(roots)
    while queue:
        pid = queue.pop()
        if pid not in seen:
            seen.add(pid)
            queue.extend(children.get(pid, ()))
    return [table[pid] for pid in seen - spared if pid in table and table[pid].alive]


def job_processes(marker: str, spared: set[int]) -> list[Process]:
    """Return the job's living processes but for `spared`: those marked, its keepers, and what descends from any."""
    table = process_table()
    name, entry = keeper_name(marker), marker_entry(marker)
    roots = {pid for pid in table if table[pid].name == name or entry in environment_of(pid)}
    return select_job(table, roots - {1}, spared | {1})


def open_pidfd(pid: int) -> int:
    """Return a pidfd, or -1 where the process is gone or the kernel older than 5.3. (os.pidfd_open is Python 3.9.)"""
    return int(libc.syscall(SYS_PIDFD_OPEN, pid, 0))


def signal_process(process: Process, number: int) -> None:
    """Signal this very process; never one that got its pid since. Gone, or not ours to signal, is no error."""
    fd = open_pidfd(process.pid)
    current = read_process(process.pid)
    if current and current.start == process.start:
        if fd >= 0:
            libc.syscall(SYS_PIDFD_SEND_SIGNAL, fd, int(number), None, 0)
        else:
            with contextlib.suppress(OSError):
                os.kill(process.pid, number)
    if fd >= 0:
        os.close(fd)


def describe(process: Process) -> Header:
    """Return pid, state and command line of a process, for people."""
    command = read_file(f"/proc/{process.pid}/cmdline", 200).replace(b"\0", b" ") or process.name
    return {"pid": process.pid, "state": process.state, "command": command.decode("utf-8", "replace").strip()}


class Ending:
    """How a job is ended: SIGTERM to the command alone, once; the grace; then SIGKILL to all until none is left.

    torchrun passes SIGTERM on to its ranks; a third one would make it drop them. `spared` are keepers that go on.
    `tell` is given what the launcher or the supervisor has to know: each child that was reaped, and in the end `swept`.
    """

    def __init__(self, marker: str, spared: set[int], tell: Callable[[Header], None], command: int = 0) -> None:
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
            os.kill(self._command, signal.SIGTERM)  # a child of ours, not reaped: the pid is its own
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

    def run(self, grace_s: float) -> None:
        """Begin, and see it through."""
        self.begin(grace_s)
        while not self.step():
            time.sleep(TICK_S)

    def _reap(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if not pid:
                    break
                self._empty_looks = 0  # the last look may have missed what this one left behind
                if pid == self._command:  # nothing of the job has a reason to live any more
                    self._command, self._kill_at = 0, 0.0
                self._tell({"type": "reaped", "pid": pid, "status": status})

    def _is_worth_waiting(self) -> bool:
        """Tell whether anything may still end by itself. torchrun alone does not: its exit barrier ignores SIGTERM."""
        if self._command:
            return any(child.alive for child in children_of(self._command))
        return bool(job_processes(self._marker, self._spared))

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


# --- the guard ------------------------------------------------------------------------------------------------------


def catch_signals(*numbers: int) -> int:
    """Return a file descriptor from which these signals can be read, a byte each."""
    reader, writer = os.pipe()
    for fd in (reader, writer):
        os.set_blocking(fd, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    for number in numbers:
        signal.signal(number, lambda number, frame: None)
    return reader


def fork_guard(
    job: Header, argv: list[bytes], env: dict[bytes, bytes], outputs: list[int]
) -> tuple[int, socket.socket]:
    """Fork the guard, which starts the command, and return its pid and the link to it."""
    mine, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    keepers = {os.getpid()}
    pid = os.fork()
    if pid:
        its.close()
        return pid, mine
    try:
        os.setsid()
        libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        for fd, source in enumerate((os.open(os.devnull, os.O_RDONLY), *outputs)):
            os.dup2(source, fd)
        for fd in map(int, os.listdir("/proc/self/fd")):
            if fd > 2 and fd != its.fileno():
                with contextlib.suppress(OSError):
                    os.close(fd)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        run_guard(its, keepers | {os.getpid()}, job, start_command(argv, env))
    finally:
        os._exit(0)
    raise AssertionError("not reached")


def start_command(argv: list[bytes], env: dict[bytes, bytes]) -> int:
    """Start the command in a session of its own and return its pid. One that cannot be run exits 127 with a message."""
    parent = os.getpid()
    pid = os.fork()
    if not pid:
        become(argv, env, parent)
    return pid


def become(argv: list[bytes], env: dict[bytes, bytes], parent: int) -> None:
    """In a child: run a program in a session of its own that gets SIGTERM when the parent dies. Never returns."""
    try:
        os.setsid()
        for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
            signal.signal(number, signal.SIG_DFL)
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        if os.getppid() == parent:
            os.execvpe(argv[0], argv, env)  # noqa: S606 - what runs is the plan's argv, as it is
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        os.write(2, b"gpulayer: %s cannot be run: %s\n" % (argv[0], str(reason).encode()))
    finally:
        os._exit(127)
    raise AssertionError("not reached")


def run_guard(link: socket.socket, keepers: set[int], job: Header, command: int) -> None:
    """Tell the supervisor of all that ends; end the job when it says how soon, or when it dies."""

    def tell(message: Header) -> None:
        with contextlib.suppress(OSError):  # it is dead, as the next look at the link shows
            link.send(json.dumps(message).encode())

    wake = catch_signals(signal.SIGCHLD)
    poller = select.poll()
    poller.register(link, select.POLLIN)
    poller.register(wake, select.POLLIN)
    ending = Ending(job["marker"], keepers, tell, command)
    tell({"type": "started", "pid": command})
    while not ending.step():
        for fd, _ in poller.poll(TICK_S * 1000 if ending.begun else None):
            if fd == wake:
                os.read(wake, 4096)
                continue
            try:
                told = link.recv(64)
            except ConnectionError:
                told = b""
            if not told:
                poller.unregister(link)
            ending.begin(float(told or job["grace_s"]))
    with contextlib.suppress(OSError):
        link.recv(64)  # nothing comes; it ends when the supervisor has


# --- a helper before the start --------------------------------------------------------------------------------------


class Helper:
    """A program that the launcher talks with before the start, over pipes; its stderr is the supervisor's."""

    def __init__(self, argv: list[bytes], env: dict[bytes, bytes]) -> None:
        stdin, self.input = os.pipe()
        self.output, stdout = os.pipe()
        os.set_blocking(self.input, False)
        parent = os.getpid()
        self.pid = os.fork()
        if not self.pid:
            os.dup2(stdin, 0)
            os.dup2(stdout, 1)
            os.chdir("/")  # Python looks for modules where it is started, and a job's json.py is not for us
            become(argv, env, parent)
        for fd in (stdin, stdout):
            os.close(fd)

    def write(self, data: bytes) -> None:
        """Give it some input. One that does not read, or is gone, misses it."""
        with contextlib.suppress(OSError):
            os.write(self.input, data)

    def read(self) -> bytes:
        """Return what it has said, b"" at its end."""
        return os.read(self.output, CHUNK_BYTES)

    def end(self) -> None:
        """Kill it and what it has started, in sessions of their own too; reap it."""
        for process in select_job(process_table(), {self.pid}, set()):
            signal_process(process, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        for fd in (self.input, self.output):
            os.close(fd)


# --- output ---------------------------------------------------------------------------------------------------------


class Stream:
    """One file that a rank (or torchrun itself: None) writes to, sent as it grows and given back to the disk."""

    def __init__(self, path: str, local_rank: int | None, name: str) -> None:
        self.local_rank, self.name = local_rank, name
        self._fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        self._sent = self._punched = 0

    def next_frame(self) -> bytes:
        """Return the next piece as an `output` frame, or b"" when there is nothing new."""
        data = os.pread(self._fd, CHUNK_BYTES, self._sent)
        if not data:
            return b""
        self._sent += len(data)
        length = self._sent - KEEP_BYTES - self._punched
        if length >= PUNCH_BYTES:
            libc.fallocate(self._fd, FALLOC_PUNCH_HOLE, ctypes.c_int64(self._punched), ctypes.c_int64(length))
            self._punched += length
        return encode_frame({"type": "output", "local_rank": self.local_rank, "stream": self.name}, data)

    def at_end(self) -> bool:
        """Tell whether everything written so far has been taken."""
        return os.fstat(self._fd).st_size <= self._sent

    def tail(self) -> bytes:
        """Return the last bytes written."""
        return os.pread(self._fd, TAIL_BYTES, max(0, os.fstat(self._fd).st_size - TAIL_BYTES))


def remove_tree(path: str) -> None:
    """Remove a folder and all in it (shutil would cost its import at every start). What resists stays."""
    for root, folders, files in os.walk(path, topdown=False):
        for full in [os.path.join(root, name) for name in files + folders]:
            with contextlib.suppress(OSError):
                (os.unlink if os.path.islink(full) or not os.path.isdir(full) else os.rmdir)(full)
    with contextlib.suppress(OSError):
        os.rmdir(path)


# --- network --------------------------------------------------------------------------------------------------------


def family_of(address: str) -> socket.AddressFamily:
    """Return the address family of a literal address."""
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def interface_addresses() -> list[tuple[str, str]]:
    """Return (interface, address) for every address of this machine, secondary ones too."""
    found = []
    buffer = ctypes.create_string_buffer(1 << 16)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        reply = fcntl.ioctl(probe, SIOCGIFCONF, struct.pack("iP", len(buffer), ctypes.addressof(buffer)))
    entry = struct.Struct(f"16s4x4s{2 * struct.calcsize('P')}x")  # struct ifreq
    for name, packed in entry.iter_unpack(buffer.raw[: struct.unpack_from("i", reply)[0]]):
        label = name.partition(b"\0")[0].partition(b":")[0]  # eth0:1 is a label on eth0
        found.append((label.decode(), socket.inet_ntop(socket.AF_INET, packed)))
    for line in read_file("/proc/net/if_inet6").decode().splitlines():
        fields = line.split()
        found.append((fields[5], socket.inet_ntop(socket.AF_INET6, bytes.fromhex(fields[0]))))
    return found


def choose_interface(address: str, master_addr: str, wanted: str | None) -> str:
    """Return the interface that gloo and NCCL shall use, or "".

    That is `wanted`, else the one that holds `address`, else (the address is translated on the way) the one that routes
    to the master. Raises RefusalError where `wanted` does not fit.
    """
    held = interface_addresses()
    address = socket.inet_ntop(family_of(address), socket.inet_pton(family_of(address), address))  # fd00::0:1
    if wanted:
        names = sorted(name for _, name in socket.if_nameindex())
        if wanted not in names:
            there = ", ".join(names)
            raise RefusalError("interface", f"interface `{wanted}` does not exist; there are: {there}")
        here = [value for name, value in held if name == wanted]
        if address not in here and any(value == address for _, value in held):
            there = ", ".join(here) or "nothing"
            raise RefusalError("interface", f"interface `{wanted}` holds {there}, not {address}")
        return wanted
    local = {value: name for name, value in reversed(held)}
    return local.get(address) or local.get(source_address(master_addr)) or ""


def source_address(target: str) -> str:
    """Return the address that packets to `target` leave from, or "". Connecting a UDP socket sends none."""
    with socket.socket(family_of(target), socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((target, 9))
            return str(probe.getsockname()[0])
        except OSError:
            return ""


def reserve_port(port: int) -> socket.socket:
    """Hold the rendezvous port: bound on every address, not listening, SO_REUSEADDR. Raises RefusalError when taken.

    So nobody's ephemeral port lands on it, and torch can still bind it (measured, torch 2.13).
    """
    try:
        holder = socket.socket(socket.AF_INET6, socket.SOCK_STREAM)
        holder.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    except OSError:  # a kernel without IPv6
        holder = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    return bind_or_refuse(holder, ("", port), f"port {port} is in use")


def lock_port(port: int) -> socket.socket:
    """Keep other gpulayer jobs on this machine off the port: sockets that reserve it do not exclude each other."""
    holder = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    return bind_or_refuse(holder, f"\0gpulayer-port-{port}", f"port {port} is held by another job of gpulayer")


def bind_or_refuse(holder: socket.socket, address: str | tuple[str, int], taken: str) -> socket.socket:
    """Bind a socket and return it. Raises RefusalError."""
    try:
        holder.bind(address)
    except OSError as error:
        holder.close()
        raise RefusalError("port", taken if error.errno == errno.EADDRINUSE else f"{address}: {error}") from None
    return holder


# --- the supervisor -------------------------------------------------------------------------------------------------


class RankWatch:
    """One worker process of torchrun, from when it is seen until its own wait status is known."""

    def __init__(self, process: Process) -> None:
        self.process = process
        self.fd = open_pidfd(process.pid)
        self.told = False
        self.reaped: int | None = None  # its wait status, if torchrun died and the guard had to reap it

    def look(self) -> tuple[bool, int | None]:
        """Return whether it has ended, and its wait status, None where that could not be seen."""
        current = read_process(self.process.pid)
        if current and current.start == self.process.start:
            return not current.alive, current.wait_status
        return True, self._status_after_reaping() if self.reaped is None else self.reaped

    def _status_after_reaping(self) -> int | None:
        """torchrun was quicker than we were: ask the kernel through the pidfd (Linux 6.15 and later)."""
        request = bytearray(struct.pack("=Q56x", PIDFD_INFO_EXIT))
        try:
            fcntl.ioctl(self.fd, PIDFD_GET_INFO, request)
        except (OSError, ValueError):
            return None
        return struct.unpack_from("=i", request, 60)[0] if request[0] & PIDFD_INFO_EXIT else None


def to_bytes(text: str) -> bytes:
    """Return the bytes that a string stands for; lone surrogates are bytes that were no UTF-8 on the login node."""
    return text.encode("utf-8", "surrogateescape")


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
        self.port_holders: list[socket.socket] = []
        self.held_port = 0
        self.helper: Helper | None = None
        self.quick_ticks = QUICK_TICKS
        self.ranks: dict[int, RankWatch] = {}
        self.streams: dict[str, Stream] = {}
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
        if self.phase != "running":
            return 1.0 if self.phase == "waiting" else TICK_S
        if len(self.ranks) == self.job["nproc_per_node"]:
            return IDLE_TICK_S
        if len(self.streams) > 2 and self.quick_ticks:  # ranks are being started, and may not live for long
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
        elif kind == "arrived" and self.drained:
            self.arrived = True
        elif self.phase != "waiting" or not self._obey_early(kind, header, payload):
            raise ProtocolError(f"frame {kind!r:.80} has no place here")

    def _obey_early(self, kind: str, header: Header, payload: bytes) -> bool:
        """Obey what may only come before the start; False for anything else."""
        if kind == "start" and self.job:
            self._start(self.job)
        elif kind == "helper" and not self.helper:
            self._start_helper(json.loads(payload))
        elif kind == "helper_input":
            if self.helper:
                self.helper.write(payload)
        elif self.job:
            return False
        elif kind == "reserve":
            self._reserve(header["port"])
        elif kind == "prepare":
            self._prepare(json.loads(payload))
        elif kind == "sweep":
            self._sweep_for_another(header["marker"], float(header["grace_s"]))
        else:
            return False
        return True

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
            self.phase = "draining"
        elif self.guard_link:
            with contextlib.suppress(OSError):  # it is dead, and _hear_guard is about to know
                self.guard_link.send(b"%f" % grace_s)

    # -- before the start

    def _reserve(self, port: int) -> None:
        """Hold the rendezvous port, and no other; answer `reserved` or `refused`."""
        self._release_port()
        try:
            self._hold_port(port)
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

    def _start_helper(self, program: Header) -> None:
        try:
            self.helper = Helper([to_bytes(arg) for arg in program["argv"]], self._environment(program["env"]))
        except OSError as error:
            self._refuse("system", str(error))

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

    def _prepare(self, job: Header) -> None:
        """Make sure that the job can start here, and answer `prepared` or `refused`."""
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
            os.mkdir(job_dir, 0o700)
            os.mkdir(job_dir + "/ranks", 0o700)
        except OSError as error:
            raise RefusalError("job_dir", f"the job's folder {scratch} cannot be made: {error.strerror}") from None
        self.job_dir = job_dir

    def _sweep_for_another(self, marker: str, grace_s: float) -> None:
        """End what another supervisor, dead or unheard, has left: wait as long as the grace, then kill it and all."""
        for process in job_processes(marker, {os.getpid()}):
            if process.name == keeper_name(marker) and process.state in "Tt":
                signal_process(process, signal.SIGKILL)  # stopped, it ends nothing; the other keeper does then
        Ending(marker, {os.getpid()}, self._send).run(grace_s)
        self.phase = "draining"

    # -- the command and its ranks

    def _start(self, job: Header) -> None:
        self.phase = "running"
        self._end_helper()
        argv = [to_bytes(arg) for arg in job["argv"]]
        outputs = []
        try:
            for name in ("stdout", "stderr"):
                path = f"{self.job_dir}/torchrun.{name}.log"
                outputs.append(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_APPEND, 0o600))
                self.streams[path] = Stream(path, None, name)
            self.guard_pid, self.guard_link = fork_guard(job, argv, self._job_environment(job), outputs)
        except OSError as error:
            self._give_up(f"nothing can be started there: {error}")
            self.phase = "draining"
        for fd in outputs:
            os.close(fd)

    def _environment(self, added: dict[str, str]) -> dict[bytes, bytes]:
        """Return the node's own environment, less what would mislead torchrun, and what the plan adds to it."""
        # As the login shell gave it: os.environ has what Python adds to it on a machine without a locale.
        pairs = (entry.partition(b"=") for entry in environment_of(os.getpid()) if entry)
        env = {name: value for name, _, value in pairs}
        env = {name: env[name] for name in env if name not in STALE_NAMES and not name.startswith(STALE_PREFIXES)}
        env.update((to_bytes(name), to_bytes(value)) for name, value in added.items())
        return env

    def _job_environment(self, job: Header) -> dict[bytes, bytes]:
        env = self._environment(job["env"])
        if self.interface:
            interface = self.interface.encode()
            chosen = {b"GLOO_SOCKET_IFNAME": interface, b"TP_SOCKET_IFNAME": interface}
            chosen[b"NCCL_SOCKET_IFNAME"] = b"=" + interface
            env = {**chosen, **env}
        env[b"PWD"] = to_bytes(job["workdir"])  # as after `cd`
        env[b"GPULAYER_MARKER"] = job["marker"].encode()
        return env

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
            local_rank = known.get(process.pid, self._local_rank(process.pid, following))
            if local_rank is not None and local_rank < self.job["nproc_per_node"]:
                following = local_rank + 1
                if local_rank not in self.ranks:
                    self.ranks[local_rank] = RankWatch(process)
                    self._send({"type": "rank", "local_rank": local_rank, "pid": process.pid})

    def _local_rank(self, pid: int, following: int) -> int | None:
        """Return a child's local rank, None if it is no worker (yet). `following` is one more than its elder's.

        A worker that ended before it was seen shows no environment any more, but torchrun starts workers in order.
        """
        entries = environment_of(pid)
        for entry in entries:
            if entry.startswith(b"LOCAL_RANK="):
                return int(entry[11:])
        return None if marker_entry(self.job["marker"]) in entries else following

    def _send_exit(self, header: Header, status: int | None, local_rank: int | None) -> None:
        """Tell of an end; of one that is news and a failure, with the last bytes written and torchrun's error file."""
        parts = {}
        if status and not self.ending:
            parts = {stream.name: stream.tail() for stream in self.streams.values() if stream.local_rank == local_rank}
            for attempt in self._attempt_folders() if local_rank is not None else ():
                parts["error_file"] = read_file(f"{attempt}/{local_rank}/error.json", ERROR_FILE_BYTES)
        sizes = [[name, len(data)] for name, data in parts.items()]
        self._send(dict(header, status=status, parts=sizes), b"".join(parts.values()))

    # -- output

    def _attempt_folders(self) -> list[str]:
        runs = list_folder(self.job_dir + "/ranks")
        return [path for run in runs for path in list_folder(run) if "/attempt_" in path]

    def _find_streams(self) -> None:
        if len(self.streams) < 2 + 2 * self.job["nproc_per_node"]:
            for folder in [path for attempt in self._attempt_folders() for path in list_folder(attempt)]:
                local_rank = os.path.basename(folder)
                for name in ("stdout", "stderr"):
                    path = f"{folder}/{name}.log"
                    if local_rank.isdigit() and path not in self.streams and os.path.exists(path):
                        self.streams[path] = Stream(path, int(local_rank), name)

    def _pump(self) -> None:
        """Queue new output while the queue is short, so that a slow link costs no memory here."""
        if self.streams and self.link_up and self.phase != "closing":
            self._find_streams()
            while len(self.out) < QUEUE_BYTES and self._pump_once():
                pass

    def _pump_once(self) -> bool:
        """Queue a piece of every stream: one that floods does not hold up the others."""
        frames = [stream.next_frame() for stream in self.streams.values()] if self.link_up else []
        self.out += b"".join(frames)
        return any(frames)

    def _drain(self) -> None:
        """Go once the launcher says that all output has arrived, or nobody is there or waits for it."""
        if self.streams and self.link_up and not self.leaving and not self.arrived:
            if not self.drained and all(stream.at_end() for stream in self.streams.values()):
                self.drained = True
                self._send({"type": "drained"})
            return
        kept = self.job_dir if self.streams and not self.arrived else ""
        if not kept:
            remove_tree(self.job_dir)
        self._release_port()
        if self.guard_pid:
            os.kill(self.guard_pid, signal.SIGKILL)
            os.waitpid(self.guard_pid, 0)
        self._send({"type": "ended", "kept": kept})
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
