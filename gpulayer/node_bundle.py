"""Source bundles on a node: kept under their digest, unpacked as a fresh folder for each job. Runs on nodes.

What is kept is the tar itself, read-only, in ~/.cache/gpulayer/bundles/SHA256.tar. It is written under another name and
gets its own once it is all there and what it should be, and it is hashed again before each use: a half-written or
damaged one is never used. A job gets a copy that is its own: `work` in its folder.
"""

from __future__ import annotations

import contextlib
import os
import time

from gpulayer.environment import to_bytes
from gpulayer.processes import list_folder
from gpulayer.streams import remove_tree

FRAMES = ("bundle", "bundle_data", "bundle_end", "bundle_place")
KEEP_S = 30 * 86400.0  # one that nobody has used for this long is removed
MOST_BYTES = 10 * 10**9  # of all, the oldest go first
PART = ".part"
LOCKED_BY_S = 10.0  # a part has its lock long before it is this old
NO_LOCK_S = 86400.0  # where files cannot be locked, whoever wrote such an old part is gone
PIECE_BYTES = 1 << 20
SPARE_BYTES = 1 << 20
MODES = (0o644, 0o755)

TYPE_CHECKING = False  # mypy takes it for true; importing typing would cost 5 ms
if TYPE_CHECKING:
    import tarfile
    from typing import Any, BinaryIO, Callable

    Header = dict[str, Any]


class BundleError(Exception):
    """A bundle cannot be had here: what is wrong, in words."""


class NodeBundles:
    """What a supervisor does about bundles: keeps one that is sent, and makes a job's folder of it.

    `answer` sends a frame to the launcher. `job_dir` is the folder that was made, "" so far.
    """

    def __init__(self, answer: Callable[[Header], None]) -> None:
        self.job_dir = ""
        self._answer = answer
        self._tar: BinaryIO | None = None  # open, so that nothing is lost where somebody removes it meanwhile
        self._store = self._digest = ""
        self._receiver: Receiver | None = None

    def obey(self, header: Header, payload: bytes) -> None:
        """Do what a frame says. What cannot be done is answered `refused`, once; what still comes is passed over."""
        steps = dict(zip(FRAMES, (self._begin, self._receive, self._keep, self._place)))
        try:
            steps[header["type"]](header, payload)
        except BundleError as problem:
            self._refuse("bundle", str(problem))
        except OSError as problem:
            self._refuse("bundle_store", f"bundles cannot be kept in {self._store}: {problem.strerror}")

    def _refuse(self, code: str, message: str) -> None:
        self.close()
        self._answer({"type": "refused", "code": code, "message": message[:1000]})

    def close(self) -> None:
        """Use no bundle any more; one that is half here is removed."""
        if self._receiver:
            self._receiver.discard()
        if self._tar:
            self._tar.close()
        self._receiver = self._tar = None

    def _begin(self, header: Header, payload: bytes) -> None:
        self.close()
        kind, _, self._digest = str(header["digest"]).partition(":")
        if kind != "sha256" or len(self._digest) != 64 or not set(self._digest) <= set("0123456789abcdef"):
            raise BundleError("{} is no digest of a bundle".format(repr(header["digest"])[:80]))
        self._store = store_folder()
        os.makedirs(self._store, 0o700, exist_ok=True)
        prune(self._store, self._digest)
        self._tar = find_bundle(self._store, self._digest)
        if not self._tar:
            self._receiver = Receiver(self._store, self._digest, int(header["bytes"]))
        self._answer({"type": "bundle_have" if self._tar else "bundle_want"})

    def _receive(self, header: Header, payload: bytes) -> None:
        if self._receiver:  # else it was refused, and the launcher has not heard it yet
            self._receiver.take(payload)

    def _keep(self, header: Header, payload: bytes) -> None:
        if self._receiver:
            self._tar, self._receiver = self._receiver.keep(), None
            self._answer({"type": "bundle_kept"})

    def _place(self, header: Header, payload: bytes) -> None:
        if not self._tar or self.job_dir:
            raise BundleError("there is no bundle to unpack")
        job_dir = os.fsdecode(to_bytes(header["job_dir"]))
        try:
            os.mkdir(job_dir, 0o700)
            self.job_dir = job_dir
            unpack(self._tar, to_bytes(job_dir) + b"/work")
        except OSError as error:
            what = "the bundle cannot be unpacked in" if self.job_dir else "the job's folder cannot be made as"
            self._refuse("bundle_place", "{} {}: {}".format(what, header["job_dir"], error.strerror))
            return
        self.close()
        self._answer({"type": "bundle_placed", "workdir": header["job_dir"] + "/work"})


# --- the store ------------------------------------------------------------------------------------------------------


def store_folder() -> str:
    """Return the path of the store, which may not be there yet."""
    cache = os.environ.get("XDG_CACHE_HOME", "")
    return (cache if cache.startswith("/") else os.path.expanduser("~/.cache")) + "/gpulayer/bundles"


def find_bundle(store: str, digest: str) -> BinaryIO | None:
    """Return a bundle that is kept, open. One that is not what its name says is removed."""
    path = f"{store}/{digest}.tar"
    try:
        tar = os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb")
    except FileNotFoundError:
        return None
    if _hash(tar) != digest:
        tar.close()
        os.unlink(path)
        return None
    with contextlib.suppress(OSError):  # else it is as old as it was
        os.utime(path)
    return tar


def _hash(tar: BinaryIO) -> str:
    import hashlib

    digest = hashlib.sha256()
    tar.seek(0)
    for piece in iter(lambda: tar.read(PIECE_BYTES), b""):
        digest.update(piece)
    return digest.hexdigest()


class Receiver:
    """One bundle on its way into the store, sent compressed. It is locked, so that nobody takes it for left behind."""

    def __init__(self, store: str, digest: str, size: int) -> None:
        import hashlib
        import zlib

        room = os.statvfs(store)
        if room.f_bavail * room.f_frsize < size + SPARE_BYTES:
            raise BundleError(f"there is no room in {store} for a bundle of {size} bytes")
        self._store, self._digest, self._left = store, digest, size
        self._path = f"{store}/{digest}.{os.urandom(6).hex()}{PART}"
        self._final = f"{store}/{digest}.tar"
        self._hash, self._inflate = hashlib.sha256(), zlib.decompressobj()
        fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        self._file = os.fdopen(fd, "r+b", 0)
        _lock(self._file)

    def take(self, data: bytes) -> None:
        """Take some of it. Raises BundleError where it is not what it was said to be."""
        import zlib

        while data:
            try:
                piece = self._inflate.decompress(data, min(PIECE_BYTES, self._left + 1))
            except zlib.error as error:
                raise BundleError(f"the bundle did not arrive as it was sent: {error}") from None
            data = self._inflate.unconsumed_tail
            self._left -= len(piece)
            if self._left < 0 or self._inflate.unused_data:
                raise BundleError("the bundle did not arrive as it was sent: it is longer than it should be")
            self._hash.update(piece)
            with memoryview(piece) as view:
                at = 0
                while at < len(view):
                    at += self._file.write(view[at:]) or 0

    def keep(self) -> BinaryIO:
        """Give it its name, and return it open. Raises BundleError where it is not what it was said to be."""
        if self._left or not self._inflate.eof or self._hash.hexdigest() != self._digest:
            raise BundleError("the bundle did not arrive as it was sent: its digest is another one")
        check_members(self._file)
        os.fchmod(self._file.fileno(), 0o400)
        try:
            os.link(self._path, self._final)  # a rename would take it from under another node, where homes are shared
        except FileExistsError:
            earlier = find_bundle(self._store, self._digest)
            if earlier:
                self.discard()
                return earlier
            os.rename(self._path, self._final)
        except OSError:  # a file system without hard links
            os.rename(self._path, self._final)
        else:
            os.unlink(self._path)
        return self._file

    def discard(self) -> None:
        """Remove what has come."""
        with contextlib.suppress(OSError):
            os.unlink(self._path)
        self._file.close()


def prune(store: str, spared: str) -> None:
    """Remove bundles that were not used for long, the oldest of too many, and parts that nobody writes any more.

    Whoever has one open keeps it: it is gone from the folder alone.
    """
    now, kept = time.time(), []
    for path in list_folder(store):
        try:
            found = os.stat(path, follow_symlinks=False)
        except OSError:
            continue
        if path.endswith(PART):
            if _is_left_behind(path, now - found.st_mtime):
                _remove(path)
        elif path.endswith(".tar") and not path.endswith(f"/{spared}.tar"):
            if now - found.st_mtime > KEEP_S:
                _remove(path)
            else:
                kept.append((found.st_mtime, found.st_size, path))
    left = sum(size for _, size, _ in kept)
    for _, size, path in sorted(kept):
        if left > MOST_BYTES:
            _remove(path)
            left -= size


def _remove(path: str) -> None:
    with contextlib.suppress(OSError):
        os.unlink(path)


def _is_left_behind(path: str, age_s: float) -> bool:
    """Tell whether whoever wrote a part is gone: its lock is free."""
    if age_s < LOCKED_BY_S:
        return False
    try:
        with open(path, "r+b") as file:
            free = _lock(file)
    except OSError:
        return False
    return free or (free is None and age_s > NO_LOCK_S)


def _lock(file: BinaryIO) -> bool | None:
    """Lock a file; False where somebody else has it, None where it cannot be locked."""
    import fcntl

    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


# --- the tar --------------------------------------------------------------------------------------------------------


def check_members(tar: BinaryIO) -> list[tarfile.TarInfo]:
    """Return what is in a tar: files and links that stay inside. Raises BundleError for anything else."""
    import tarfile

    tar.seek(0)
    try:
        with tarfile.open(fileobj=tar, mode="r:", encoding="utf-8", errors="surrogateescape") as opened:
            members = opened.getmembers()
    except (tarfile.TarError, ValueError, EOFError) as error:
        raise BundleError(f"the bundle is no tar: {error}") from None
    names = {member.name for member in members}
    for member in members:
        reason = _unsafe(member, names)
        if reason:
            raise BundleError(f"the bundle is not unpacked: {member.name!r:.200} {reason}")
    if len(names) < len(members):
        raise BundleError("the bundle is not unpacked: it has two files of one name")
    return members


def _unsafe(member: tarfile.TarInfo, names: set[str]) -> str:
    """Say why a member cannot be unpacked safely, "" where it can. `names` are those of all members."""
    import tarfile

    parts = member.name.split("/")
    if "\0" in member.name or not {"", ".", ".."}.isdisjoint(parts):
        return "is no path inside"
    if any("/".join(parts[:end]) in names for end in range(1, len(parts))):
        return "is below a file or a link"
    if member.type == tarfile.SYMTYPE:
        return "" if stays_inside(member.linkname, len(parts) - 1) else "leads out"
    if member.type not in (tarfile.REGTYPE, tarfile.AREGTYPE) or member.issparse():
        return "is neither a file nor a link"
    return "" if member.mode in MODES else f"has the mode {member.mode:o}"


def stays_inside(target: str, depth: int) -> bool:
    """Tell whether a link so many folders deep leads to a place inside, wherever other links lead; pure.

    Each `..` stands in front: behind the name of another link it would go up from where that one leads.
    """
    parts = target.split("/")
    ups = parts.count("..")
    return bool(target) and "\0" not in target and parts[0] != "" and parts[:ups] == [".."] * ups and ups <= depth


def unpack(tar: BinaryIO, target: bytes) -> None:
    """Unpack a bundle as the folder `target`, which is there once all is in it. Raises BundleError and OSError."""
    import tarfile

    members = check_members(tar)
    half = target + b".half"
    os.mkdir(half, 0o700)
    try:
        tar.seek(0)
        with tarfile.open(fileobj=tar, mode="r:", encoding="utf-8", errors="surrogateescape") as opened:
            for member in [one for one in members if one.type != tarfile.SYMTYPE]:
                _write(opened, member, half + b"/" + to_bytes(member.name))
        for member in [one for one in members if one.type == tarfile.SYMTYPE]:  # last: nothing is written through one
            path = half + b"/" + to_bytes(member.name)
            os.makedirs(os.path.dirname(path), exist_ok=True)
            os.symlink(to_bytes(member.linkname), path)
        os.rename(half, target)
    except BaseException:
        remove_tree(os.fsdecode(half))
        raise


def _write(opened: tarfile.TarFile, member: tarfile.TarInfo, path: bytes) -> None:
    os.makedirs(os.path.dirname(path), exist_ok=True)
    source = opened.extractfile(member)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600), "wb") as file:
        file.writelines(iter(lambda: source.read(PIECE_BYTES) if source else b"", b""))
        os.fchmod(file.fileno(), member.mode)
