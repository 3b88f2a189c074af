"""known_hosts files: reading them, and adding the key of a host that they do not know, as OpenSSH's accept-new does.

Whoever adds a key holds a lock on the file, reads all files anew and decides again: several logins at once, of several
gpulayers, add one line. OpenSSH takes no lock, so a line is one write at the end of the file, which may not be cut.
"""

from __future__ import annotations

import base64
import contextlib
import errno
import fcntl
import hashlib
import hmac
import os
import secrets
import stat
import subprocess
import time
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import asyncssh

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

LOCK_LIMIT_S = 10.0
_LOCK_PAUSE_S = 0.02
_SALT_BYTES = 20  # of HMAC-SHA1, as sshd(8) has it under SSH_KNOWN_HOSTS FILE FORMAT
_SSH_TIMEOUT_S = 10
_SYSTEM_CONFIG = "/etc/ssh/ssh_config"


class NotKeptError(Exception):
    """The key cannot be written down; the text says why."""


class NotNewError(Exception):
    """The files know the host after all: another login has added a key since, or this one is revoked."""

    def __init__(self, keys: Sequence[asyncssh.SSHKey], *, revoked: bool) -> None:
        super().__init__("Host key is revoked" if revoked else "Host key is not trusted")
        self.keys = list(keys)
        self.revoked = revoked


@dataclass(frozen=True, slots=True)
class Known:
    """What known_hosts has for one name exactly, with its port, and for no other."""

    keys: tuple[asyncssh.SSHKey, ...]
    authorities: tuple[asyncssh.SSHKey, ...]
    revoked: tuple[asyncssh.SSHKey, ...]

    @property
    def nothing(self) -> bool:
        """True for a host that is new: no key of any type, and no authority that would vouch for one."""
        return not self.keys and not self.authorities


@dataclass(frozen=True, slots=True)
class NewKey:
    """A key to add. `name` is the host as known_hosts spells it; `files` are all that are read, `file` is written."""

    name: str
    key: asyncssh.SSHKey
    file: Path
    files: tuple[Path, ...]

    def line(self, *, hashed: bool) -> str:
        """Return the line for the file, without its end."""
        host = self.name.lower()  # as OpenSSH, an alias too
        host = hashed_name(host) if hashed else host
        kind, data = self.key.export_public_key().decode().split()[:2]
        return f"{host} {kind} {data}"


def load_known_hosts(paths: Sequence[Path]) -> asyncssh.SSHKnownHosts:
    """All host keys in these files. Missing files and lines that make no sense are passed over, as OpenSSH does."""
    known = asyncssh.SSHKnownHosts()
    for path in paths:
        try:
            text = path.read_text(encoding="utf-8", errors="replace")
        except OSError:
            continue
        for line in text.splitlines():
            try:
                known.load(line)
            except ValueError:
                continue
    return known


def find(known: asyncssh.SSHKnownHosts, name: str) -> Known:
    """What the files have for `name`, which is `[host]:port` where the port is not 22.

    asyncssh's own match falls back to the name without the port, and forgets then what is revoked for the port. It also
    takes capitals as they are, where OpenSSH does not.
    """
    found = [known.match(spelling, "", None)[:3] for spelling in dict.fromkeys((name, name.lower()))]
    keys, authorities, revoked = (tuple(dict.fromkeys(chain.from_iterable(part))) for part in zip(*found, strict=True))
    return Known(keys, authorities, revoked)


def hashed_name(name: str) -> str:
    """Return a host's name as `HashKnownHosts yes` writes it: nobody can read from the file where one logs in."""
    salt = secrets.token_bytes(_SALT_BYTES)
    digest = hmac.new(salt, name.encode(), hashlib.sha1).digest()
    return f"|1|{base64.b64encode(salt).decode()}|{base64.b64encode(digest).decode()}"


def add_key(new: NewKey, *, hashed: bool) -> str | None:
    """Add the key, and return its line; None where another login has just added the same one. Blocks.

    Raises NotKeptError, and NotNewError where the files now have another key or say that this one is revoked.
    """
    with _locked(new.file) as fd:
        known = find(load_known_hosts(new.files), new.name)
        if new.key in known.revoked:
            raise NotNewError(known.keys, revoked=True)
        if new.key in known.keys:
            return None
        if not known.nothing:
            raise NotNewError(known.keys, revoked=False)
        line = new.line(hashed=hashed)
        try:
            _append(fd, line)
        except OSError as exc:
            raise NotKeptError(exc.strerror) from exc
        return line


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[int]:
    """The file, open to read and to append, and locked against other gpulayers. It is made where it is missing."""
    give_up_s = time.monotonic() + LOCK_LIMIT_S
    while True:
        fd = _open(path)
        try:
            if not _lock(fd, give_up_s):
                raise NotKeptError(f"another process has locked it for {LOCK_LIMIT_S:g} s")
            if _is_at(fd, path):  # not, where `ssh-keygen -R` has put another file in its place
                yield fd
                return
        finally:
            os.close(fd)


def _open(path: Path) -> int:
    try:
        if path.parent == Path("~/.ssh").expanduser():
            path.parent.mkdir(mode=0o700, exist_ok=True)
        fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK, 0o600)
    except OSError as exc:
        raise NotKeptError(exc.strerror) from exc
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise NotKeptError("it is no regular file")
    return fd


def _lock(fd: int, give_up_s: float) -> bool:
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > give_up_s:
                return False
            time.sleep(_LOCK_PAUSE_S)
            continue
        except OSError:  # a file system without locks: what OpenSSH does everywhere
            return True
        return True


def _is_at(fd: int, path: Path) -> bool:
    with contextlib.suppress(OSError):
        return os.path.samestat(os.fstat(fd), path.stat())
    return False


def _append(fd: int, line: str) -> None:
    size = os.fstat(fd).st_size
    start = "\n" if size and os.pread(fd, 1, size - 1) != b"\n" else ""
    data = f"{start}{line}\n".encode()
    written = os.write(fd, data)
    if written < len(data):
        if os.fstat(fd).st_size == size + written:
            os.ftruncate(fd, size)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def ssh_says(config: Path | None, *, is_default: bool, options: Sequence[str], host: str) -> dict[str, str]:
    """What `ssh` makes of its configuration for a host, for the keywords that asyncssh does not read. Blocks.

    Where no other file was asked for, the system's own is read after the user's, as `ssh` does. {} where there is no
    `ssh` to ask.
    """
    text = ""
    if is_default:
        own = [f'Include "{config}"'] if config else []
        text = "\n".join([*own, f"Include {_SYSTEM_CONFIG}", ""])
    file = "/dev/stdin" if is_default else str(config or "none")
    try:
        done = subprocess.run(
            ["ssh", "-F", file, "-G", *options, "--", host],
            input=text,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=_SSH_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return {}
    words = (line.split(maxsplit=1) for line in done.stdout.splitlines())
    return {pair[0]: pair[1] for pair in words if len(pair) == 2}
