"""What a job leaves for its user: found on the node and read from there, a little at a time. Runs on nodes.

Two folders hold it: the job's own output folder, all of which is meant, and its working directory, of which patterns
name a part. No link is ever followed below them: what leads elsewhere is told, not read. Standard library only.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import stat

from gpulayer.frames import encode_frame
from gpulayer.streams import remove_tree

FOLDER = "outputs"  # in the job's folder; GPULAYER_OUTPUT_DIR for every process
OF_FOLDER, OF_WORKDIR = "folder", "workdir"
REQUESTS = frozenset(["list", "read", "forget"])
PIECE_BYTES = 1 << 17
LIST_BYTES = 1 << 16
HASH_BYTES = 1 << 20
MOST_FILES = 50_000
MOST_PASSED_OVER = 100
MOST_NAMED = 300
MOST_DEEP = 100
STEPS_BEFORE_REST = 500  # entries that are looked at before anything else may be done
STEPS_BEFORE_WORD = 5_000  # and before the launcher is told that it goes on
WORD_BYTES = 1 << 26  # the same, of what is read again for its hash
_MAGIC = re.compile(r"[*?[]")
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # a pipe put in its place makes nobody wait

TYPE_CHECKING = False  # mypy takes it for true; importing typing would cost 5 ms
if TYPE_CHECKING:
    from typing import Any, Callable, Iterator

    Header = dict[str, Any]


class OutputError(Exception):
    """A file that cannot be given out: a code, and in words."""


def has_outputs(job_dir: str, patterns: list[str]) -> bool:
    """Tell whether there may be something to collect."""
    if patterns:
        return True
    try:
        with os.scandir(f"{job_dir}/{FOLDER}") as entries:
            return next(entries, None) is not None
    except OSError:
        return os.path.lexists(f"{job_dir}/{FOLDER}")


class OutputDesk:
    """Does what a launcher asks for, one thing after the other and each in small steps."""

    def __init__(self) -> None:
        self._works: list[Iterator[bytes]] = []

    @property
    def busy(self) -> bool:
        """True while something is still to be done."""
        return bool(self._works)

    def obey(self, header: Header, payload: bytes) -> None:
        """Take a request. Raises LookupError, TypeError or ValueError where it makes no sense."""
        if header["type"] == "list":
            places = _places(header)
            self._works.append(_list(places, [str(one) for one in json.loads(payload)]))
        elif header["type"] == "read":
            self._works.append(_read_all(_places(header), json.loads(payload)))
        else:
            self._works.append(_forget(header["job_dir"], bool(header["whole"])))

    def work(self, out: bytearray, most_bytes: int) -> None:
        """Do one step, or several while they add frames to `out` and it is short."""
        while self._works and len(out) < most_bytes:
            piece = next(self._works[0], None)
            if piece is None:
                del self._works[0]
            elif not piece:
                return
            else:
                out += piece


def _places(header: Header) -> dict[str, str]:
    """Return the folders that are meant, as this machine spells them."""
    return {
        OF_FOLDER: _path(f"{header['job_dir']}/{FOLDER}"),
        OF_WORKDIR: _path(header["workdir"]),
    }


def _path(text: str) -> str:
    """Return a path that means the same bytes here, whatever encoding this machine has for file names."""
    return os.fsdecode(text.encode("utf-8", "surrogateescape"))


def _spelled(path: str) -> str:
    """Return a path as it is sent: UTF-8, other bytes as lone surrogates."""
    return os.fsencode(path).decode("utf-8", "surrogateescape")


def _open_root(place: str, root: str) -> int:
    """Open one of the two folders. The workdir may be a link, as its user named it; the job's own folder may not."""
    return os.open(root, _DIRECTORY | (os.O_NOFOLLOW if place == OF_FOLDER else 0))


# -- what there is


def _list(places: dict[str, str], patterns: list[str]) -> Iterator[bytes]:
    """Send `list_part` frames with files, and `listed` with what was passed over and which patterns found nothing."""
    finder = Finder(places)
    for steps, _ in enumerate(finder.find(patterns), 1):
        if finder.untold_bytes > LIST_BYTES or steps % STEPS_BEFORE_WORD == 0:
            yield finder.take_part()
        elif steps % STEPS_BEFORE_REST == 0:
            yield b""
    if finder.untold:
        yield finder.take_part()
    said = {
        "passed_over": finder.passed_over,
        "more_passed_over": finder.more_passed_over,
        "unmatched": [number for number in range(len(patterns)) if number not in finder.matched],
        "cut": finder.cut,
    }
    yield encode_frame({"type": "listed"}, json.dumps(said).encode())


class Finder:
    """What was found so far. Its walks yield at each step whether there was anything."""

    def __init__(self, places: dict[str, str]) -> None:
        self.untold: list[tuple[str, str, str, int, int]] = []
        self.untold_bytes = self.more_passed_over = 0
        self.passed_over: list[tuple[str, str, str]] = []
        self.matched: set[int] = set()
        self.cut = False
        self._places, self._place = places, ""
        self._seen: set[tuple[str, str]] = set()

    def take_part(self) -> bytes:
        """Return a frame with the files that were not told yet: place, path, where it is read, size, time."""
        files, self.untold, self.untold_bytes = self.untold, [], 0
        return encode_frame({"type": "list_part"}, json.dumps(files).encode())

    def find(self, patterns: list[str]) -> Iterator[bool]:
        """Find all in the job's folder, and what the patterns mean in the workdir."""
        for self._place in (OF_FOLDER, OF_WORKDIR) if patterns else (OF_FOLDER,):
            try:
                folder = _open_root(self._place, self._places[self._place])
            except FileNotFoundError:
                continue
            except OSError as error:
                self._pass_over("", _reason(error))
                continue
            try:
                if self._place == OF_FOLDER:
                    yield from self._take_all(folder, "")
                    continue
                for number, pattern in enumerate(patterns):
                    for found in self._match(folder, "", _parts(pattern)):
                        if found:
                            self.matched.add(number)
                        yield found
            finally:
                os.close(folder)

    def _match(self, folder: int, prefix: str, parts: list[str]) -> Iterator[bool]:
        """Take what the parts of a pattern mean, from an open folder on. None left: all that is there."""
        if not parts:
            yield from self._take_all(folder, prefix)
        elif parts[0] == "**":
            if parts[1:]:
                yield from self._match(folder, prefix, parts[1:])
            for name, status in self._entries(folder, prefix):
                if name[:1] != "." and (stat.S_ISDIR(status.st_mode) or not parts[1:]):
                    yield from self._go_on(folder, prefix + name, status, parts if parts[1:] else [])
                yield False
        elif _MAGIC.search(parts[0]):
            fits = _fitting(parts[0])
            for name, status in self._entries(folder, prefix):
                if fits(name):
                    yield from self._go_on(folder, prefix + name, status, parts[1:])
                yield False
        else:
            yield from self._named(folder, prefix + parts[0], parts)

    def _named(self, folder: int, path: str, parts: list[str]) -> Iterator[bool]:
        try:
            status = os.stat(parts[0], dir_fd=folder, follow_symlinks=False)
        except OSError as error:
            if not isinstance(error, (FileNotFoundError, NotADirectoryError)):
                self._pass_over(path, _reason(error))
            yield False
            return
        yield from self._go_on(folder, path, status, parts[1:])

    def _take_all(self, folder: int, prefix: str) -> Iterator[bool]:
        for name, status in self._entries(folder, prefix):
            yield from self._go_on(folder, prefix + name, status, [])

    def _go_on(self, folder: int, path: str, status: os.stat_result, rest: list[str]) -> Iterator[bool]:
        """Go into a folder that fits; take a file that does, where nothing of the pattern is left."""
        if stat.S_ISDIR(status.st_mode):
            yield from self._inside(folder, path, rest)
        elif rest:
            if stat.S_ISLNK(status.st_mode):
                self._pass_over(path, "link")
            yield False
        else:
            if stat.S_ISREG(status.st_mode):
                self._take(path, path, status)
            elif stat.S_ISLNK(status.st_mode):
                self._take_link(path)
            else:
                self._pass_over(path, "special")
            yield True

    def _inside(self, folder: int, path: str, parts: list[str]) -> Iterator[bool]:
        if path.count("/") >= MOST_DEEP:
            self._pass_over(path, "deep")
            yield True
            return
        try:
            inner = os.open(os.path.basename(path), _DIRECTORY | os.O_NOFOLLOW, dir_fd=folder)
        except OSError as error:
            self._pass_over(path, _reason(error))
            yield True
            return
        try:
            yield from self._match(inner, path + "/", parts)
        finally:
            os.close(inner)

    def _entries(self, folder: int, prefix: str) -> Iterator[tuple[str, os.stat_result]]:
        """Yield what is in an open folder, in the order of names."""
        try:
            names = sorted(os.listdir(folder))
        except OSError as error:
            self._pass_over(prefix.rstrip("/"), _reason(error))
            return
        for name in names:
            if self.cut:
                return
            with contextlib.suppress(FileNotFoundError):
                yield name, os.stat(name, dir_fd=folder, follow_symlinks=False)

    def _take(self, path: str, source: str, status: os.stat_result) -> None:
        if (self._place, path) in self._seen:
            return
        if len(self._seen) >= MOST_FILES:
            self.cut = True
            return
        self._seen.add((self._place, path))
        self.untold.append((self._place, _spelled(path), _spelled(source), status.st_size, status.st_mtime_ns))
        self.untold_bytes += 6 * len(path + source) + 64

    def _take_link(self, path: str) -> None:
        """In the job's folder, a link to what is there too adds nothing. In the workdir, it was named: read the file.

        A link is resolved here and never again: what is read later is found without following any.
        """
        root = os.path.realpath(self._places[self._place])
        target = os.path.realpath(f"{root}/{path}")
        if os.path.commonpath([root, target]) != root or not os.path.lexists(target):
            self._pass_over(path, "link")
        elif self._place == OF_FOLDER:
            self._pass_over(path, "link_inside")
        elif os.path.isfile(target):
            self._take(path, os.path.relpath(target, root), os.lstat(target))
        else:
            self._pass_over(path, "link")

    def _pass_over(self, path: str, why: str) -> None:
        if (self._place, path) in self._seen:
            return
        self._seen.add((self._place, path))
        if len(self.passed_over) < MOST_PASSED_OVER:
            self.passed_over.append((self._place, _spelled(path)[:MOST_NAMED], why))
        else:
            self.more_passed_over += 1


def _parts(pattern: str) -> list[str]:
    """Return the parts of a pattern; of one `**` after the other, one."""
    parts = [part for part in _path(pattern).split("/") if part not in ("", ".")]
    return [part for before, part in zip(["", *parts], parts) if not before == part == "**"]


def _fitting(part: str) -> Callable[[str], bool]:
    """Return what tells whether a name fits. As in a shell, one that begins with a dot fits only where that is said."""
    from fnmatch import translate

    fits, hidden = re.compile(translate(part)).match, part[:1] == "."
    return lambda name: bool(fits(name)) and (hidden or name[:1] != ".")


def _kind(status: os.stat_result) -> str:
    return "link" if stat.S_ISLNK(status.st_mode) else "special"


def _reason(error: OSError) -> str:
    if error.errno in (errno.ELOOP, errno.ENOTDIR):
        return "link"
    if error.errno in (errno.ENOENT, errno.ESTALE):
        return "gone"
    return "denied" if error.errno in (errno.EACCES, errno.EPERM) else f"error {error.strerror}"


# -- what is in it


def _read_all(places: dict[str, str], wanted: list[list[Any]]) -> Iterator[bytes]:
    """Send these files, each as [place, path, offset, size, mtime_ns], from its offset on; then `read_done`."""
    for place, path, offset, size, mtime_ns in wanted:
        yield from _read_or_say_why(places, place, _path(path), (int(offset), int(size), int(mtime_ns)))
    yield encode_frame({"type": "read_done"})


def _read_or_say_why(places: dict[str, str], place: str, path: str, expected: tuple[int, int, int]) -> Iterator[bytes]:
    try:
        yield from _read(places, place, path, expected)
    except OutputError as error:
        yield encode_frame({"type": "file_gone", "why": error.args[0]})
    except OSError as error:
        yield encode_frame({"type": "file_gone", "why": _reason(error)})


def _read(places: dict[str, str], place: str, path: str, expected: tuple[int, int, int]) -> Iterator[bytes]:
    from hashlib import sha256

    offset, size, mtime_ns = expected
    fd = _open_below(_open_root(place, places[place]), path)
    try:
        digest, at = sha256(), 0
        if _version(fd) != (size, mtime_ns):
            raise OutputError("changed")
        while at < size:
            wanted = at >= offset  # what is there already counts for the hash alone
            piece = os.pread(fd, min(PIECE_BYTES, size - at) if wanted else min(HASH_BYTES, offset - at), at)
            if not piece:
                raise OutputError("changed")
            digest.update(piece)
            at += len(piece)
            if wanted or at % WORD_BYTES == 0:
                yield encode_frame({"type": "file_data"}, piece if wanted else b"")
            else:
                yield b""
        if _version(fd) != (size, mtime_ns):
            raise OutputError("changed")
        yield encode_frame({"type": "file_end", "sha256": digest.hexdigest()})
    finally:
        os.close(fd)


def _version(fd: int) -> tuple[int, int]:
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        raise OutputError("special")
    return status.st_size, status.st_mtime_ns


def _open_below(folder: int, path: str) -> int:
    """Open a file below an open folder, which is closed; not through any link, put there when it may be."""
    *parents, name = path.split("/")
    if ".." in path.split("/") or path.startswith("/"):
        os.close(folder)
        raise OutputError("link")
    try:
        for parent in parents:
            inner = os.open(parent, _DIRECTORY | os.O_NOFOLLOW, dir_fd=folder)
            os.close(folder)
            folder = inner
        return os.open(name, _FILE, dir_fd=folder)
    finally:
        os.close(folder)


def _forget(job_dir: str, whole: bool) -> Iterator[bytes]:
    """Remove the job's folder, or only its outputs, where logs are in there that have not arrived."""
    path = _path(job_dir)
    remove_tree(path if whole else f"{path}/{FOLDER}")
    yield encode_frame({"type": "forgotten"})
