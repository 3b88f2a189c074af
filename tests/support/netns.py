"""Machines made of Linux namespaces: a process that holds them, the folders that are private in them, ways in.

The namespaces have no names, so they live exactly as long as the processes in them: nothing is left in /run/netns, in
the mount table or among the machine's own interfaces, however a test run ends.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
# A test run in the background of a script, or under nohup, ignores signals; what it starts must not inherit that.
DEFAULT_SIGNALS = ("env", "--default-signal=INT,QUIT,HUP,TERM")
FOLDER_MODES = {"/tmp": "1777", "/dev/shm": "1777"}  # everything else: 0755


class Holder:
    """A process in namespaces of its own. It must start in a thread that lives on: its end is tied to that thread's.

    The program writes one line when it is there, and reads and writes one more while it gets ready.
    """

    def __init__(self, flags: Sequence[str], argv: Sequence[str], log: Path) -> None:
        self._log = log
        # The parent-death signal survives the exec, so a killed test run takes every machine with it.
        command = [*DEFAULT_SIGNALS, "setpriv", "--pdeathsig", "KILL", "unshare", *flags, "--", *argv]
        with log.open("ab") as errors:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env={"PATH": SYSTEM_PATH, "LANG": "C.UTF-8"},
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """The pid of `unshare`, or of the program itself where there is no --fork."""
        return self._process.pid

    @property
    def child_pid(self) -> int:
        """The pid of what `unshare --fork` started: process 1 of the machine."""
        return int(Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()[0])

    def expect(self, word: str) -> None:
        """Wait for the program to write `word`."""
        pipe = self._process.stdout
        line = pipe.readline().decode().strip() if pipe else ""
        if line != word:
            raise RuntimeError(f"a machine did not come up: {line!r} in place of {word!r}: {self._log.read_text()}")

    def tell(self, word: str) -> None:
        """Send the program a line."""
        if self._process.stdin:
            self._process.stdin.write(f"{word}\n".encode())
            self._process.stdin.flush()

    def hang_up(self) -> None:
        """Close the pipes: the program runs on alone."""
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe:
                pipe.close()

    def wait(self) -> None:
        """Wait for the end. With a pid namespace, every process in it has then ended and been reaped."""
        self._process.wait()


def kill(pids: Iterable[int]) -> None:
    """SIGKILL to each pid that is still there."""
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


def enter(pid: int, namespaces: str, *, uid: int = 0, cwd: str = "/") -> list[str]:
    """The argv prefix that runs a program in the namespaces of `pid` (nsenter's letters, as in `mnu`)."""
    who = ["-S", str(uid), "-G", str(uid)] if uid else []
    return [
        "nsenter",
        "-t",
        str(pid),
        *(f"-{letter}" for letter in namespaces),
        *who,
        "--",
        *DEFAULT_SIGNALS,
        "-C",
        cwd,
    ]


def ip_batch(pid: int, lines: Sequence[str]) -> None:
    """Run many `ip` commands in the network namespace of `pid`, as one process."""
    argv = [*enter(pid, "n"), "ip", "-batch", "-"]
    done = subprocess.run(argv, input="\n".join(lines), capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"ip: {done.stderr}")


def private_folders(folders: Sequence[str], visible: Sequence[Path], stage: Path) -> str:
    """Shell lines that put an empty folder over each of `folders`, in which only the `visible` paths still show.

    Folders on the way to a visible path that an ordinary user cannot pass are made private too. The new folder is built
    on `stage` (an empty folder) and moved into place, since the paths it shows would be hidden once it is there.
    """
    lines = []
    for folder in dict.fromkeys([*folders, *_closed_folders(folders, visible)]):
        shown = [path for path in visible if path.is_relative_to(folder)]
        if not Path(folder).is_dir() or Path(folder) in shown:
            continue
        lines.append(f"mount -n -t tmpfs -o mode={FOLDER_MODES.get(folder, '0755')} tmpfs {stage}")
        for path in sorted(shown):
            target = f"{stage}/{path.relative_to(folder)}"
            lines += [
                f"mkdir -p {shlex.quote(target)}",
                f"mount -n --bind {shlex.quote(str(path))} {shlex.quote(target)}",
            ]
        lines.append(f"mount -n --move {stage} {shlex.quote(folder)}")
    return "\n".join(lines)


def _closed_folders(folders: Sequence[str], visible: Sequence[Path]) -> list[str]:
    closed = []
    for path in visible:
        if any(path.is_relative_to(folder) for folder in folders):
            continue
        on_the_way = [parent for parent in reversed(path.parents) if not parent.stat().st_mode & 0o001]
        closed += [str(parent) for parent in on_the_way[:1]]
    return closed


def clean_environ(home: str, user: str, extra: Mapping[str, str], path: str = SYSTEM_PATH) -> dict[str, str]:
    """The environment of a fresh login, and `extra`."""
    return {"HOME": home, "USER": user, "LOGNAME": user, "PATH": path, "LANG": "C.UTF-8", **extra}


def missing() -> list[str]:
    """What this machine lacks for machines made of namespaces, in words. Empty: they work."""
    if os.geteuid() != 0:
        return ["not root"]
    tools = ("ip", "unshare", "nsenter", "setpriv", "mount", "ssh")
    lacking = [f"`{tool}` is missing" for tool in tools if not shutil.which(tool, path=SYSTEM_PATH)]
    if lacking:
        return lacking
    attempt = ["unshare", "-n", "-u", "-i", "-m", "-p", "--fork", "--mount-proc", "ip", "link", "add", "type", "veth"]
    done = subprocess.run(attempt, capture_output=True, text=True, check=False)
    return [f"namespaces are refused here: {done.stderr.strip()}"] if done.returncode else []
