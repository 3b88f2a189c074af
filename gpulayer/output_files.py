"""The files that a node gives back, as they come in here. Trusts nothing that it says of them.

A file gets its name once it is whole and is what the node says it is. Until then it stands, under a number, in a folder
beside, so that nothing half-written can be taken for an output.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
from collections import deque
from dataclasses import dataclass, field
from hashlib import sha256
from typing import TYPE_CHECKING, Any

from gpulayer.frames import ProtocolError
from gpulayer.node_outputs import MOST_FILES, OF_FOLDER, OF_WORKDIR
from gpulayer.untrusted import one_line, shown

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from pathlib import Path

    Header = dict[str, Any]

MOST_LIST_BYTES = 32 << 20
MOST_NAME_BYTES = 255
MOST_PATH_BYTES = 2048
BATCH_FILES = 256
BATCH_BYTES = 64 << 20
SHOWN_NAMES = 3
LONGEST_SHOWN = 120
# What a name may not hold: what steers a terminal, or turns around what is read.
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)

LEFT = "not brought back"
WHY: Mapping[str, str] = {
    "link": "a link that is not followed",
    "special": "no regular file",
    "gone": "no longer there",
    "denied": "cannot be read there",
    "deep": "in too many folders",
    "changed": "changed while it was read",
    "name": "cannot have such a name here",
    "taken": "another file has its name here",
    "damaged": "did not arrive as it is there",
}
STAYS_THERE = frozenset({"denied", "deep"})  # of what a node passes over, what somebody may still want from its folder


class NotKeptError(Exception):
    """Nothing can be written any more, whichever file it is: a full disk, a folder that is closed to us."""


@dataclass(frozen=True, slots=True)
class OutputFile:
    """A file on a node: in which folder, under which path there, where it is read, its size and its time."""

    place: str
    path: str
    source: str
    size_bytes: int
    mtime_ns: int


@dataclass(slots=True)
class Problems:
    """What did not come back, and why, in the order in which that was found."""

    found: dict[str, list[str]] = field(default_factory=dict)
    unnamed: dict[str, int] = field(default_factory=dict)

    def add(self, why: str, names: Iterable[str] = (), *, unnamed: int = 0) -> None:
        """Take note of files, by name or, with `unnamed`, by their number."""
        known = self.found.setdefault(why, [])
        for name in names:
            if len(known) < SHOWN_NAMES:
                known.append(one_line(name, LONGEST_SHOWN))
            else:
                unnamed += 1
        self.unnamed[why] = self.unnamed.get(why, 0) + unnamed

    def texts(self) -> tuple[str, ...]:
        """Return a line for each reason."""
        return tuple(f"{self._names(why)}: {why}" for why in self.found)

    def _names(self, why: str) -> str:
        names, more = self.found[why], self.unnamed[why]
        if not names:
            return f"{more} file{'' if more == 1 else 's'}"
        return ", ".join(names) + (f" and {more} more" if more else "")


class Listing:
    """What a node says that there is. `whole` once it has said all."""

    def __init__(self) -> None:
        self.files: list[OutputFile] = []
        self.problems = Problems()
        self.unmatched: frozenset[int] = frozenset()
        self.links = 0
        self.stays_there = False
        self._size = 0

    def take_part(self, payload: bytes) -> None:
        """Take some files. Raises ProtocolError where they make no sense, or there is no end of them."""
        self._size += len(payload)
        if self._size > MOST_LIST_BYTES:
            raise ProtocolError("its list of outputs has no end")
        self.files += [_file(entry) for entry in _json_list(json_value(payload))]
        if len(self.files) > MOST_FILES:
            raise ProtocolError(f"it lists more than {MOST_FILES} outputs")

    def end(self, payload: bytes) -> None:
        """Take what was passed over, and which patterns found nothing. Raises ProtocolError."""
        said = json_value(payload)
        try:
            passed_over = [[str(part) for part in entry] for entry in _json_list(said["passed_over"])]
            self.unmatched = frozenset(int(number) for number in _json_list(said["unmatched"]))
            more, cut = int(said["more_passed_over"]), bool(said["cut"])
            for place, path, why in passed_over:
                self._pass_over(place, path, why)
        except (LookupError, TypeError, ValueError) as error:
            raise ProtocolError(f"its list of outputs makes no sense: {shown(error, 200)}") from error
        if more:
            self.problems.add("not given out there", unnamed=more)
        if cut:
            self.problems.add(f"beyond {MOST_FILES}, which is all that is brought back from a node", ["all files"])
        self.stays_there |= bool(more or cut)

    def _pass_over(self, place: str, path: str, why: str) -> None:
        if why == "link_inside":
            self.links += 1
            return
        self.stays_there |= why in STAYS_THERE or why not in WHY
        self.problems.add(reason(why), [path or ("GPULAYER_OUTPUT_DIR" if place == OF_FOLDER else "the workdir")])


def reason(why: str) -> str:
    """Put in words why a node does not give a file out."""
    return WHY.get(why) or one_line(why.removeprefix("error "), LONGEST_SHOWN)


def json_value(payload: bytes) -> Any:
    """Read JSON. Raises ProtocolError."""
    try:
        return json.loads(payload)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"no JSON: {shown(payload[:80])}") from error


def _json_list(value: object) -> list[Any]:
    if not isinstance(value, list):
        raise ProtocolError(f"{shown(value)} is no list")
    return value


def _file(entry: object) -> OutputFile:
    match entry:
        case [("folder" | "workdir") as place, str(path), str(source), int(size), int(mtime_ns)] if size >= 0:
            return OutputFile(str(place), path, source, size, mtime_ns)
    raise ProtocolError(f"{shown(entry, 200)} is no file")


def local_path(path: str) -> str | None:
    """Return the path that a file has here, from the folder of a node's outputs on; None where it may have none."""
    parts = path.split("/")
    if any(part in ("", ".", "..") for part in parts) or _CONTROL.search(path):
        return None
    try:
        sizes = [len(os.fsencode(part)) for part in parts]
    except UnicodeEncodeError:
        return None
    return path if max(sizes) <= MOST_NAME_BYTES and sum(sizes) + len(sizes) <= MOST_PATH_BYTES else None


def choose(listing: Listing, max_bytes: int, limit_text: str) -> list[OutputFile]:
    """Return the files to bring back: with a name that can stand here, once each, as long as they fit.

    What is written to the output folder comes first. All others are noted as problems of the listing.
    """
    chosen: dict[str, OutputFile] = {}
    left_bytes = max_bytes
    for file in sorted(listing.files, key=lambda file: file.place == OF_WORKDIR):
        if local_path(file.path) is None:
            listing.problems.add(WHY["name"], [file.path])
        elif file.path in chosen:
            listing.problems.add(WHY["taken"], [file.path])
        elif file.size_bytes > left_bytes:
            listing.problems.add(f"more than --max-output-size, {limit_text}, has room for", [file.path])
        else:
            left_bytes -= file.size_bytes
            chosen[file.path] = file
            continue
        listing.stays_there = True
    return list(chosen.values())


class _Part:
    """A file that is coming in. `fd` is -1 where it cannot be kept; then `problem` says why."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.received = 0
        self.digest = sha256()
        self.problem = ""
        self.fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)

    def write(self, data: bytes) -> None:
        """Add bytes."""
        self.received += len(data)
        self.digest.update(data)
        view = memoryview(data)
        while view and self.fd >= 0:
            view = view[os.write(self.fd, view) :]

    def close(self) -> None:
        """Close it; only now a network file system may say that its disk is full."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)


class Incoming:
    """The files of one node on their way into `folder`, by way of `folder.part`.

    Its methods raise ProtocolError for what a node may not say, and NotKeptError.
    """

    def __init__(self, folder: Path, files: Iterable[OutputFile], problems: Problems) -> None:
        self.waiting = deque(files)
        self.problems = problems
        self.files = self.size_bytes = self.received_bytes = 0
        self.stays_there = False
        self._folder, self._parts = folder, folder.with_name(f"{folder.name}.part")
        self._made: set[Path] = set()
        self._part: _Part | None = None
        self._number = self._batch = 0

    def next_batch(self) -> list[list[object]]:
        """Return what to ask for next: from where on, and what each file was when it was listed."""
        batch: list[list[object]] = []
        size = 0
        offset = self._part.received if self._part else 0
        for file in self.waiting:
            if len(batch) >= BATCH_FILES or (batch and size + file.size_bytes > BATCH_BYTES):
                break
            batch.append([file.place, file.source, offset, file.size_bytes, file.mtime_ns])
            size += file.size_bytes
            offset = 0
        self._batch = len(batch)
        return batch

    def take(self, header: Header, payload: bytes) -> None:
        """Take a `file_data`, `file_end` or `file_gone` frame."""
        if not self._batch:
            raise ProtocolError(f"a {shown(header['type'])} frame that nobody asked for")
        file = self.waiting[0]
        if header["type"] == "file_data":
            self._receive(file, payload)
            return
        if header["type"] == "file_end":
            self._finish(file, header)
        else:
            why = header.get("why")
            self._drop(file, reason(why) if isinstance(why, str) else LEFT)
        self.waiting.popleft()
        self._batch -= 1

    def end_batch(self) -> None:
        """All that was asked for is said to have come."""
        if self._batch:
            raise ProtocolError(f"{self._batch} files did not come")

    def close(self) -> None:
        """Nothing comes any more: remove what is not whole."""
        if self._part:
            with contextlib.suppress(OSError):
                self._part.close()
            self._part.path.unlink(missing_ok=True)
            self._part = None
        with contextlib.suppress(OSError):
            self._parts.rmdir()

    def _receive(self, file: OutputFile, payload: bytes) -> None:
        if (self._part.received if self._part else 0) + len(payload) > file.size_bytes:
            raise ProtocolError("more bytes of a file than it has")
        self.received_bytes += len(payload)
        with self._keeping(file):
            self._begun().write(payload)

    def _finish(self, file: OutputFile, header: Header) -> None:
        with self._keeping(file):
            part = self._begun()
            if part.received != file.size_bytes:
                raise ProtocolError("fewer bytes of a file than it has")
            if not part.problem and part.digest.hexdigest() != header.get("sha256"):
                part.problem = WHY["damaged"]
            part.close()
            if not part.problem:
                self._name(file, part)
        self._part = None
        if part.problem:
            part.path.unlink(missing_ok=True)
            self._note(file, part.problem)
        else:
            self.files += 1
            self.size_bytes += file.size_bytes

    def _name(self, file: OutputFile, part: _Part) -> None:
        """Give a whole file its name, which no other has."""
        target = self._folder / file.path
        if target.parent not in self._made:
            for folder in (self._folder, *reversed(target.relative_to(self._folder).parents[:-1])):
                (self._folder / folder).mkdir(mode=0o700, exist_ok=True)
            self._made.add(target.parent)
        if os.path.lexists(target):
            part.problem = WHY["taken"]
        else:
            part.path.rename(target)

    def _begun(self) -> _Part:
        if self._part is None:
            self._number += 1
            if self._number == 1:
                self._folder.parent.mkdir(mode=0o700, exist_ok=True)
                self._parts.mkdir(mode=0o700, exist_ok=True)
            self._part = _Part(self._parts / str(self._number))
        return self._part

    @contextlib.contextmanager
    def _keeping(self, file: OutputFile) -> Iterator[None]:
        """A name that cannot be had here is a problem of the file; a full disk is one of all."""
        try:
            yield
        except OSError as error:
            if self._part is None or error.errno in _NO_ROOM:
                raise NotKeptError(f"cannot write {self._folder / file.path}: {error.strerror}") from error
            taken = error.errno in (errno.EEXIST, errno.ENOTDIR)
            self._part.problem = WHY["taken"] if taken else f"cannot be written here: {error.strerror}"
            with contextlib.suppress(OSError):
                self._part.close()

    def _drop(self, file: OutputFile, why: str) -> None:
        if self._part:
            with contextlib.suppress(OSError):
                self._part.close()
            self._part.path.unlink(missing_ok=True)
            self._part = None
        self._note(file, why)

    def _note(self, file: OutputFile, why: str) -> None:
        self.stays_there = True
        self.problems.add(why, [file.path])
