"""The folder of the login node's records: its lock, and the files of launchers that live.

All users share it, so nobody in it is believed: no link is followed, no fifo is waited for, a file says whose it is by
its owner, and is read up to a bound. leases.py has what stands in the files.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import pwd
import stat
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SUFFIX = ".json"
MOST_BYTES = 1 << 20
MUTEX_LIMIT_S = 10.0
MUTEX = "mutex"
_AS_IT_IS = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class LeaseFolder:
    """The folder of records. Every call may raise OSError."""

    def __init__(self, path: Path, *, create: bool) -> None:
        """Open the folder, without following a link. `create`: make it where it is missing."""
        if create:
            with _for_all_users(), contextlib.suppress(FileExistsError):
                path.mkdir(mode=0o1777)
        self.fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | _AS_IT_IS)

    def close(self) -> None:
        """Close it."""
        os.close(self.fd)

    @contextlib.contextmanager
    def mutex(self) -> Iterator[None]:
        """Keep every other launcher from reading and writing meanwhile. Raises TimeoutError where one does not end."""
        fd = self._lock_mutex(time.monotonic() + MUTEX_LIMIT_S)
        try:
            yield
        finally:
            os.close(fd)

    def _lock_mutex(self, deadline: float) -> int:
        while True:
            fd = self._open_mutex()
            try:
                _wait_for_lock(fd, deadline)
                with contextlib.suppress(FileNotFoundError):
                    if os.stat(MUTEX, dir_fd=self.fd, follow_symlinks=False).st_ino == os.fstat(fd).st_ino:
                        return fd
            except BaseException:
                os.close(fd)
                raise
            os.close(fd)  # it was removed meanwhile, and others lock another one

    def _open_mutex(self) -> int:
        while True:
            # Never with O_CREAT alone: the kernel refuses that for another user's file in a sticky folder.
            for flags in (0, os.O_CREAT | os.O_EXCL):
                with _for_all_users(), contextlib.suppress(FileNotFoundError, FileExistsError):
                    return os.open(MUTEX, os.O_RDONLY | _AS_IT_IS | flags, 0o644, dir_fd=self.fd)

    def records(self, own_fd: int | None = None) -> list[tuple[bytes, str]]:
        """Return what living launchers wrote, each with its user's name, without what is open in `own_fd`.

        To be called under the mutex. The file of a launcher that has died is removed where that is allowed.
        """
        own = os.fstat(own_fd).st_ino if own_fd is not None else None
        with os.scandir(self.fd) as entries:
            names = sorted(entry.name for entry in entries if entry.name.endswith(SUFFIX))
        found = []
        for name in names:
            with contextlib.suppress(OSError):
                found.append(self._read(name, own))
        return [record for record in found if record]

    def _read(self, name: str, own: int | None) -> tuple[bytes, str] | None:
        fd = os.open(name, os.O_RDONLY | _AS_IT_IS, dir_fd=self.fd)
        try:
            facts = os.fstat(fd)
            if not stat.S_ISREG(facts.st_mode) or facts.st_ino == own:
                return None
            if _try_lock(fd, fcntl.LOCK_SH):
                if os.geteuid() in {0, facts.st_uid}:
                    os.unlink(name, dir_fd=self.fd)
                return None
            data = os.pread(fd, MOST_BYTES + 1, 0)
            return (data, user_name(facts.st_uid)) if len(data) <= MOST_BYTES else None
        finally:
            os.close(fd)

    def new_file(self, name: str) -> int:
        """Make a file, lock it, and return it open: the lock lasts until it is closed."""
        with _for_all_users():
            fd = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | _AS_IT_IS, 0o644, dir_fd=self.fd)
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return fd


def user_name(uid: int) -> str:
    """Return the login name of a user id, or the number where it has none."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"uid {uid}"


def _wait_for_lock(fd: int, deadline: float) -> None:
    while not _try_lock(fd, fcntl.LOCK_EX):
        if time.monotonic() > deadline:
            raise TimeoutError(errno.ETIMEDOUT, f"its file `mutex` was not free within {MUTEX_LIMIT_S:g} s")
        time.sleep(0.01)


def _try_lock(fd: int, kind: int) -> bool:
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextlib.contextmanager
def _for_all_users() -> Iterator[None]:
    """What is made meanwhile has the mode that is asked for, whatever this user's umask is."""
    before = os.umask(0)
    try:
        yield
    finally:
        os.umask(before)
