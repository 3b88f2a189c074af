"""OpenSSH servers on 127.0.0.1 with their own keys and ports, a home folder for the client, an agent. No namespaces.

For tests of logging in, where one machine is enough. tests/support/cluster.py has whole machines.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

import asyncssh

from tests.support.sshd import SSHD
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


def free_port() -> int:
    """A TCP port of 127.0.0.1 that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@dataclass(frozen=True, slots=True)
class Home:
    """A user's home folder on the login node."""

    path: Path

    @property
    def ssh(self) -> Path:
        """~/.ssh."""
        return self.path / ".ssh"

    def key(self, key: asyncssh.SSHKey, name: str = "id_ed25519") -> Path:
        """Write a key pair; returns the private file."""
        key.write_private_key(self.ssh / name)
        key.write_public_key(self.ssh / f"{name}.pub")
        (self.ssh / name).chmod(0o600)
        return self.ssh / name

    def config(self, *lines: str) -> None:
        """Write ~/.ssh/config."""
        (self.ssh / "config").write_text("\n".join(lines) + "\n")

    def know(self, *texts: str) -> None:
        """Write ~/.ssh/known_hosts."""
        (self.ssh / "known_hosts").write_text("".join(texts))


class LocalSshd:
    """One sshd on 127.0.0.1, as a context manager. `options` are sshd_config lines that win over the ones here."""

    def __init__(
        self, folder: Path, authorized: str, *, options: Sequence[str] = (), key_types: Sequence[str] = ("ssh-ed25519",)
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.port = free_port()
        self.log_file = folder / "sshd.log"
        self.host_keys = {kind: asyncssh.generate_private_key(kind) for kind in key_types}
        lines = [*options, f"Port {self.port}", "ListenAddress 127.0.0.1"]
        for kind, key in self.host_keys.items():
            path = folder / f"host_{kind}"
            key.write_private_key(path)
            path.chmod(0o600)
            lines.append(f"HostKey {path}")
        (folder / "authorized_keys").write_text(authorized + "\n")
        lines += [
            f"AuthorizedKeysFile {folder}/authorized_keys",
            "PidFile none",
            "StrictModes no",
            "UsePAM no",
            "UseDNS no",
            "PermitRootLogin yes",
            "PasswordAuthentication no",
            "KbdInteractiveAuthentication no",
            "MaxStartups 200",
            "LogLevel VERBOSE",
        ]
        self._config = folder / "sshd_config"
        self._config.write_text("\n".join(lines) + "\n")
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def place(self) -> str:
        """The server as gpulayer's messages name it."""
        return f"127.0.0.1 port {self.port}"

    def known_hosts(self, *names: str, kinds: Sequence[str] | None = None) -> str:
        """known_hosts lines for these names (default: its address and port), for all or some of its key types."""
        pattern = ",".join(names or (f"[127.0.0.1]:{self.port}",))
        return "".join(f"{pattern} {public(self.host_keys[kind])}\n" for kind in kinds or self.host_keys)

    def fingerprint(self, kind: str = "ssh-ed25519") -> str:
        """SHA256 fingerprint of a host key."""
        return self.host_keys[kind].get_fingerprint()

    def logged(self, text: str) -> int:
        """How often the server's log has this text."""
        return self.log_file.read_text(errors="replace").count(text)

    def session_pids(self) -> list[int]:
        """The sshd processes that serve connections now."""
        pending = [self._process.pid] if self._process else []
        found: list[int] = []
        while pending:
            with contextlib.suppress(OSError):
                task = Path(f"/proc/{pending.pop()}/task")
                children = [int(pid) for thread in task.iterdir() for pid in (thread / "children").read_text().split()]
                servers = [pid for pid in children if Path(f"/proc/{pid}/comm").read_text().startswith("sshd")]
                pending += servers
                found += servers
        return found

    def __enter__(self) -> Self:
        if os.geteuid() == 0:
            Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
        with self.log_file.open("wb") as log:
            self._process = subprocess.Popen(
                [SSHD, "-D", "-e", "-f", str(self._config)], stdin=subprocess.DEVNULL, stderr=log
            )
        process = self._process
        wait_until(lambda: self.logged("Server listening on") > 0 or process.poll() is not None, "sshd listens")
        if process.poll() is not None:
            raise RuntimeError(f"sshd did not start: {self.log_file.read_text(errors='replace')}")
        return self

    def __exit__(self, *_: object) -> None:
        if self._process:
            self._process.terminate()
            self._process.wait(10)


def public(key: asyncssh.SSHKey) -> str:
    """The public half as `ssh-ed25519 AAAA...`."""
    return key.export_public_key().decode().strip()


@contextlib.contextmanager
def ssh_agent(folder: Path, *keys: Path) -> Iterator[str]:
    """An ssh-agent that holds these key files; yields the path of its socket."""
    path = str(folder / "agent.sock")
    agent = subprocess.Popen(["ssh-agent", "-D", "-a", path], stdout=subprocess.DEVNULL)
    try:
        wait_until(Path(path).exists, "the agent listens")
        for key in keys:
            subprocess.run(["ssh-add", "-q", str(key)], env={**os.environ, "SSH_AUTH_SOCK": path}, check=True)
        yield path
    finally:
        agent.terminate()
        agent.wait(10)


@contextlib.contextmanager
def listener(backlog: int = 128) -> Iterator[socket.socket]:
    """A socket on 127.0.0.1 that accepts TCP connections and says nothing."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen(backlog)
        yield sock


@contextlib.contextmanager
def deaf_port() -> Iterator[int]:
    """A port of 127.0.0.1 that drops SYN packets: its queue of connections is full."""
    with listener(backlog=0) as sock, contextlib.ExitStack() as stack:
        for _ in range(4):
            filler = stack.enter_context(socket.socket())
            filler.setblocking(False)
            filler.connect_ex(sock.getsockname())
        yield sock.getsockname()[1]
