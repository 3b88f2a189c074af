"""Whole jobs on the test cluster: `python -m gpulayer run` on the login node, watched while it runs.

hosts_file = map_with_fake_torch(cluster)
with launch(cluster.login, hosts_file, ["--grace", "1"], write_script(cluster, "print('hello')")) as run:
    run.wait_for_event("rank_started", rank=1)
    done = run.finish()
assert (done.returncode, done.log(0, 0)) == (0, b"hello\n")
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Self

from gpulayer.logs import RunPaths

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from types import TracebackType

    from gpulayer.events import StreamName
    from tests.support.cluster import Cluster, LoginNode, TomlValue
    from tests.support.host import Host

FAKE_TORCH = Path(__file__).parent / "fake_torch"
GPULAYER = (sys.executable, "-m", "gpulayer")

# Each rank writes what it sees to $OUT/RANK.json; bytes that are no UTF-8 become lone surrogates.
TELL = """
import json, os, socket, sys
seen = {
    "argv": sys.argv[1:], "env": dict(os.environ), "cwd": os.getcwd(), "hostname": socket.gethostname(),
    "namespaces": {name: os.stat("/proc/self/ns/" + name).st_ino for name in ("pid", "net")},
    "uid": os.getuid(), "stdin": os.readlink("/proc/self/fd/0"),
}
with open(os.environ["OUT"] + "/" + os.environ["RANK"] + ".json", "w") as file:
    json.dump(seen, file)
"""

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Finished:
    """A run that is over: its exit code, its screens, and its run directory. `receipt` is {} where there is none."""

    returncode: int
    stdout: str
    stderr: str
    run_dir: Path
    receipt: Json
    events: list[Json]

    def log(self, node_rank: int, rank: int | None, stream: StreamName = "stdout") -> bytes:
        """The bytes of one stream of a rank, or of torchrun itself; b"" where it wrote nothing."""
        path = RunPaths(self.run_dir).output(node_rank, rank, stream)
        return path.read_bytes() if path.exists() else b""

    def named(self, event: str) -> list[Json]:
        """All events of this name, in order."""
        return [entry for entry in self.events if entry["event"] == event]


class LiveRun:
    """A `gpulayer run` that goes on. Its screens are read all the time, unless the caller gave files of its own."""

    def __init__(self, process: subprocess.Popen[bytes], run_dir: Path) -> None:
        self.process = process
        self.run_dir = run_dir
        self._screens = {"stdout": bytearray(), "stderr": bytearray()}
        self._readers = [
            threading.Thread(target=_read, args=(pipe, self._screens[name]), daemon=True)
            for name, pipe in (("stdout", process.stdout), ("stderr", process.stderr))
            if pipe
        ]
        for reader in self._readers:
            reader.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Kill it if it still runs, and close its pipes."""
        if self.process.poll() is None:
            self.process.kill()
        self._join()

    @property
    def stdout_so_far(self) -> str:
        """What it has printed on stdout until now."""
        return _text(self._screens["stdout"])

    @property
    def stderr_so_far(self) -> str:
        """What it has printed on stderr until now."""
        return _text(self._screens["stderr"])

    def events(self) -> list[Json]:
        """What events.jsonl holds now."""
        path = RunPaths(self.run_dir).events
        text = path.read_text() if path.exists() else ""
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]

    def wait_for_event(self, name: str, *, timeout_s: float = 30, **fields: object) -> Json:
        """Return the first event of this name with these fields. Raises TimeoutError, also when the run ends first."""
        deadline = time.monotonic() + timeout_s
        while True:
            over = self.process.poll() is not None  # asked first: what it wrote before it ended counts
            for entry in self.events():
                if entry["event"] == name and fields.items() <= entry.items():
                    return entry
            if over or time.monotonic() > deadline:
                why = f"ended with {self.process.returncode}" if over else f"{timeout_s} s"
                raise TimeoutError(f"no event {name} {fields}: {why}\n{self.stderr_so_far}")
            time.sleep(0.01)

    def interrupt(self, number: int = signal.SIGINT) -> None:
        """Send gpulayer a signal."""
        self.process.send_signal(number)

    def finish(self, timeout_s: float = 60) -> Finished:
        """Wait for its end. Raises TimeoutError with the screen so far."""
        try:
            self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"still running after {timeout_s} s:\n{self.stderr_so_far}") from None
        self._join()
        receipt = RunPaths(self.run_dir).receipt
        return Finished(
            self.process.returncode,
            self.stdout_so_far,
            self.stderr_so_far,
            self.run_dir,
            json.loads(receipt.read_text()) if receipt.exists() else {},
            self.events(),
        )

    def _join(self) -> None:
        self.process.wait()
        for reader in self._readers:
            reader.join()
        for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
            if pipe:
                pipe.close()


def launch(
    login: LoginNode,
    hosts_file: Path,
    options: Sequence[str],
    script: str | Path,
    args: Sequence[str] = (),
    *,
    env: Mapping[str, str] | None = None,
    stdin: int | IO[bytes] = subprocess.DEVNULL,
    stdout: int | IO[bytes] = subprocess.PIPE,
    stderr: int | IO[bytes] = subprocess.PIPE,
    start_new_session: bool = False,
    through: Sequence[str] = (),
    command: str = "run",
) -> LiveRun:
    """Start `gpulayer run` in the login node's home. The run directory is where it is by default: runs/JOB-ID.

    `through` is a program that becomes gpulayer, as `env` does. `command` is another one of gpulayer's, such as exec.
    """
    job_id = f"t{os.getpid()}-{secrets.token_hex(4)}"
    argv = [*through, *GPULAYER, command, "--hosts", str(hosts_file), "--job-id", job_id, *options, str(script), *args]
    process = login.popen(argv, env=env, stdin=stdin, stdout=stdout, stderr=stderr, start_new_session=start_new_session)
    return LiveRun(process, login.home / "runs" / job_id)


def run(
    login: LoginNode,
    hosts_file: Path,
    options: Sequence[str],
    script: str | Path,
    args: Sequence[str] = (),
    *,
    env: Mapping[str, str] | None = None,
    timeout_s: float = 60,
) -> Finished:
    """Run `gpulayer run` to its end."""
    with launch(login, hosts_file, options, script, args, env=env) as live:
        return live.finish(timeout_s)


def map_with_fake_torch(
    cluster: Cluster,
    *,
    hosts: Sequence[Host] | None = None,
    defaults: Mapping[str, TomlValue] | None = None,
    nodes: Mapping[str, Mapping[str, TomlValue]] | None = None,
    env: Mapping[str, str] | None = None,
) -> Path:
    """Write a hosts map whose nodes run tests/support/fake_torch in place of torch: quick, and no rendezvous."""
    variables = {"PYTHONPATH": str(FAKE_TORCH), **(env or {})}
    return cluster.hosts_toml(hosts=hosts, defaults={**(defaults or {}), "env": variables}, nodes=nodes)


def write_script(cluster: Cluster, source: str, name: str = "script.py") -> Path:
    """Write a program where every host finds it, in a folder that everyone may write to."""
    path = cluster.new_folder("job") / name
    path.write_text(source)
    return path


def told(folder: Path) -> dict[int, Json]:
    """What each rank that ran TELL saw, by rank."""
    return {int(path.stem): json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}


def _read(pipe: IO[bytes], into: bytearray) -> None:
    while piece := os.read(pipe.fileno(), 1 << 16):
        into += piece


def _text(data: bytearray) -> str:
    return bytes(data).decode("utf-8", "surrogateescape")
