"""The source bundle on the login node: which files of a folder it takes, and those as one tar with one digest.

The same files give the same tar, byte for byte: names sorted, no times, no owners, and of modes only whether a file can
be executed. node_bundle.py unpacks it, and takes nothing but what is made here.
"""

from __future__ import annotations

import hashlib
import os
import stat
import subprocess
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from gpulayer.errors import JobError
from gpulayer.values import bytes_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    import pathspec

IGNORE_FILE = ".gpulayerignore"
# What is nobody's code. Of a git checkout only what git does not track is held to it.
JUNK = (
    *(".git", ".hg", ".svn", ".DS_Store", "__pycache__/", "*.py[co]", "*.egg-info/", "*.swp", "*~"),
    *(".venv", "venv", "node_modules", ".tox/", ".nox/"),
    *(".mypy_cache/", ".pytest_cache/", ".ruff_cache/", ".ipynb_checkpoints/", ".hypothesis/"),
    "/runs",  # a link to a larger disk, perhaps
)
RUN_FILES = frozenset({"plan.json", "events.jsonl"})  # what every run directory of gpulayer's own has
PLAN_HEAD = b'{\n  "version": 1,\n  "digest": "sha256:'  # how plan_file.py begins
GIT_HOOK_NAMES = frozenset({"GIT_DIR", "GIT_INDEX_FILE", "GIT_WORK_TREE"})  # of another checkout, where a hook runs us
WARN_BYTES = 200_000_000
PIECE_BYTES = 1 << 20
BLOCK_BYTES = 512
MOST_NAMED = 5
DIGITS_SHOWN = 12
_NOT_HERE = f"take it out of the folder, or write it in {IGNORE_FILE}"


@dataclass(frozen=True, slots=True)
class BundleRef:
    """Which files a job runs on: the digest of their tar, its size, how many they are, and where they were taken."""

    digest: str
    size_bytes: int
    file_count: int
    folder: str

    @property
    def short_digest(self) -> str:
        """As much of the digest as people compare."""
        return self.digest[: len("sha256:") + DIGITS_SHOWN]

    @property
    def text(self) -> str:
        """How much it is, in words."""
        return f"{self.file_count} file{'' if self.file_count == 1 else 's'}, {bytes_text(self.size_bytes)}"


class Spool:
    """A file without a name, which is closed, and gone, when nobody needs it any more."""

    def __init__(self) -> None:
        self.file: BinaryIO = tempfile.TemporaryFile()  # noqa: SIM115 - __del__ closes it

    def __del__(self) -> None:
        """Close it."""
        if hasattr(self, "file"):
            self.file.close()


@dataclass(frozen=True, slots=True)
class Bundle:
    """A folder's files as a tar in a file without a name. `names` are relative to the folder, in the tar's order."""

    ref: BundleRef
    names: tuple[str, ...]
    largest: tuple[str, int]
    spool: Spool

    @property
    def tar(self) -> BinaryIO:
        """The tar itself."""
        return self.spool.file

    def check_inside(self, script: str | None, workdir: str | None) -> None:
        """Raise JobError where the script or the job's working directory is not among the files.

        Both as typed: what a placeholder stands for differs between nodes, and each of them will say.
        """
        folder = os.path.normpath(workdir or ".")
        if "$" not in folder and folder != "." and not any(name.startswith(f"{folder}/") for name in self.names):
            raise JobError(
                f"`--workdir {workdir}`: no file of the bundle {self.ref.folder} is in such a folder",
                hint="with `--bundle`, the working directory is a folder of the bundle",
            )
        if script is None or "$" in script or "$" in folder:
            return
        path = os.path.normpath(os.path.join(folder, script))  # noqa: PTH118 - Path would keep `..`
        if path not in self.names and f"{path}/__main__.py" not in self.names:
            raise JobError(f"the script `{script}` is not in the bundle {self.ref.folder}", hint=self._missing(path))

    def _missing(self, path: str) -> str:
        if path.startswith(("/", "../")):
            return "write its path as it is inside of the bundle, from the folder in which the job starts"
        if (Path(self.ref.folder) / path).exists():
            return f"it is there, but git or {IGNORE_FILE} leaves it out"
        return "its path starts from the bundle's root, or from `--workdir` in it"

    def warning(self) -> str | None:
        """Return what to say of a bundle that holds more than code does; None of any other."""
        if self.ref.size_bytes <= WARN_BYTES:
            return None
        name, size = self.largest
        return (
            f"the bundle {self.ref.folder} has {self.ref.text}, the largest is {name} with {bytes_text(size)}: it is"
            f" for code; put data where the nodes can read it, and write it in {IGNORE_FILE}"
        )


def pack(folder: Path, max_bytes: int) -> Bundle:
    """Return the bundle of a folder. Raises JobError for what cannot be taken, and for more than `max_bytes`."""
    files = _look_at(folder, select_files(folder))
    largest = max(files, key=lambda one: one.size)
    total = sum(one.size for one in files)
    if total > max_bytes:
        named = ", ".join(f"{one.name} {bytes_text(one.size)}" for one in sorted(files, key=lambda one: -one.size)[:3])
        raise JobError(
            f"the bundle {folder} has {bytes_text(total)}, and {bytes_text(max_bytes)} is the limit; largest: {named}",
            hint=f"write data in {IGNORE_FILE}, or raise the limit with `--max-bundle-size`",
        )
    digest, size = hashlib.sha256(), 0
    try:
        spool = Spool()
        for piece in _tar_pieces(folder, files):
            digest.update(piece)
            size += len(piece)
            spool.file.write(piece)
        spool.file.flush()
    except OSError as error:
        raise JobError(
            f"the bundle cannot be kept in {tempfile.gettempdir()}: {error.strerror}",
            hint="make room there, or set TMPDIR to another folder",
        ) from None
    ref = BundleRef(f"sha256:{digest.hexdigest()}", size, len(files), str(folder))
    return Bundle(ref, tuple(one.name for one in files), (largest.name, largest.size), spool)


# --- which files ----------------------------------------------------------------------------------------------------


def select_files(folder: Path) -> list[str]:
    """Return the files and links to take, relative to the folder, sorted by their bytes. Raises JobError."""
    if not folder.is_dir():
        raise JobError(f"`--bundle {folder}`: there is no such folder")
    ignored = _spec(_ignore_lines(folder))
    junk = _spec((*JUNK, *_ignore_lines(folder)))
    listed = _git_lists(folder)
    if listed:
        tracked, untracked = listed
        names = [name for name in tracked if not ignored.match_file(name)]
        names += [name for name in untracked - tracked if not junk.match_file(name)]
    else:
        names = list(_walk(folder, "", junk))
    names = [name for name in _without_runs(names) if not _is_plan(folder / name)]
    if not names:
        raise JobError(f"`--bundle {folder}`: there is no file to take in it")
    return sorted(names, key=os.fsencode)


def _spec(lines: Iterable[str]) -> pathspec.GitIgnoreSpec:
    import pathspec

    try:
        return pathspec.GitIgnoreSpec.from_lines(lines)
    except ValueError as error:
        raise JobError(f"{IGNORE_FILE}: {error}", hint="it is read as a .gitignore is") from None


def _ignore_lines(folder: Path) -> list[str]:
    path = folder / IGNORE_FILE
    try:
        return path.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except FileNotFoundError:
        return []
    except OSError as error:
        raise JobError(f"{path} cannot be read: {error.strerror}") from None


def _git_lists(folder: Path) -> tuple[set[str], set[str]] | None:
    """Return what git tracks, and what it neither tracks nor ignores; None where it has no say over the folder.

    So it is outside of a checkout, and where the checkout around the folder ignores it as a whole.
    """
    if not any((parent / ".git").exists() for parent in (folder.resolve(), *folder.resolve().parents)):
        return None
    tracked, untracked = _checkout(folder)
    return (tracked, untracked) if tracked or untracked else None


def _checkout(folder: Path) -> tuple[set[str], set[str]]:
    """Return what git tracks and what is new, with that of the checkouts inside: submodules, and any others."""
    tracked, untracked = set[str](), set[str]()
    for name in _ls_files(folder, "--cached"):
        if not (folder / name).is_dir() or (folder / name).is_symlink():
            tracked.add(name)
        elif (folder / name / ".git").exists():
            inner = [{f"{name}/{found}" for found in names} for names in _checkout(folder / name)]
            tracked, untracked = tracked | inner[0], untracked | inner[1]
    for name in _ls_files(folder, "--others", "--exclude-standard"):
        if name.endswith("/"):
            untracked |= {name + found for names in _checkout(folder / name) for found in names}
        else:
            untracked.add(name)
    return tracked, untracked


def _ls_files(folder: Path, *what: str) -> list[str]:
    """Return what `git ls-files` says, less what is not there any more."""
    env = {name: value for name, value in os.environ.items() if name not in GIT_HOOK_NAMES}
    try:
        done = subprocess.run(["git", "ls-files", "-z", *what], cwd=folder, env=env, capture_output=True, check=False)
    except OSError as error:
        raise JobError(
            f"{folder} is in a git checkout, and `git` cannot be run: {error.strerror}",
            hint="install git: it says which files are yours",
        ) from None
    if done.returncode:
        said = done.stderr.decode("utf-8", "replace").strip().splitlines() or [f"exit status {done.returncode}"]
        raise JobError(f"`git ls-files` in {folder}: {said[0]}")
    return [name for name in map(os.fsdecode, done.stdout.split(b"\0")) if name and os.path.lexists(folder / name)]


def _walk(folder: Path, inside: str, junk: pathspec.GitIgnoreSpec) -> Iterator[str]:
    try:
        entries = list(os.scandir(folder / inside))
    except OSError as error:
        raise JobError(f"{folder / inside} cannot be read: {error.strerror}", hint=_NOT_HERE) from None
    for entry in entries:
        name = inside + entry.name
        if entry.is_dir(follow_symlinks=False):
            if not junk.match_file(name + "/"):
                yield from _walk(folder, name + "/", junk)
        elif not junk.match_file(name):
            yield name


def _without_runs(names: Sequence[str]) -> list[str]:
    """Leave out run directories of gpulayer's own, wherever they were put: else each run would change the bundle."""
    found: dict[str, set[str]] = {}
    for name in names:
        above, _, last = name.rpartition("/")
        if last in RUN_FILES:
            found.setdefault(above, set()).add(last)
    runs = tuple(f"{above}/" for above, files in found.items() if above and files == RUN_FILES)
    return [name for name in names if not name.startswith(runs)] if runs else list(names)


def _is_plan(path: Path) -> bool:
    """Tell whether a file is a saved plan: it has the bundle's digest in it, and cannot be part of that."""
    if path.suffix != ".json" or path.is_symlink() or not path.is_file():
        return False
    try:
        with path.open("rb") as file:
            return file.read(len(PLAN_HEAD)) == PLAN_HEAD
    except OSError:  # told when it is taken
        return False


# --- the tar --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _File:
    """One file to take. `target`: of a link, where it leads."""

    name: str
    size: int
    executable: bool
    target: str | None = None


def _look_at(folder: Path, names: Sequence[str]) -> list[_File]:
    """Look at every file before any is read. Raises JobError naming those that cannot be taken, a reason at a time."""
    files: list[_File] = []
    refused: dict[str, list[str]] = {}
    root = folder.resolve()
    for name in names:
        path = folder / name
        try:
            found = path.lstat()
            if stat.S_ISLNK(found.st_mode):
                target = _target_inside(root, name)
                files.append(_File(name, 0, executable=False, target=target))
                if target is None:
                    refused.setdefault("leads out of the folder, and the nodes do not have what is there", []).append(
                        f"{name} -> {path.readlink()}"
                    )
            elif not stat.S_ISREG(found.st_mode):
                refused.setdefault("is no file, folder or link", []).append(name)
            elif not os.access(path, os.R_OK):
                refused.setdefault("cannot be read: Permission denied", []).append(name)
            else:
                files.append(_File(name, found.st_size, executable=bool(found.st_mode & stat.S_IXUSR)))
        except OSError as error:
            refused.setdefault(f"cannot be read: {error.strerror}", []).append(name)
    if refused:
        reason, which = next(iter(refused.items()))
        raise JobError(f"the bundle {folder}: {_some(which)} {reason}", hint=_NOT_HERE)
    return files


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - MOST_NAMED} more, each" if len(names) > MOST_NAMED else ""
    return ", ".join(f"`{name}`" for name in names[:MOST_NAMED]) + more


def _target_inside(root: Path, name: str) -> str | None:
    """Return where a link leads, with each `..` in front; None where that is not inside the folder.

    A `..` behind the name of another link would lead elsewhere than it seems, and such links are refused as well.
    """
    link = root / name
    raw = str(link.readlink())
    target = os.path.normpath(raw)
    depth = name.count("/")
    if raw.startswith("/") or target.split("/")[: depth + 1].count("..") > depth:
        return None
    real = Path(os.path.realpath(link))
    return target if real == Path(os.path.realpath(link.parent / target)) and real.is_relative_to(root) else None


def _tar_pieces(folder: Path, files: Sequence[_File]) -> Iterator[bytes]:
    for file in files:
        header = tarfile.TarInfo(file.name)
        header.mode = 0o755 if file.executable else 0o644
        if file.target is None:
            header.size = file.size
        else:
            header.type, header.linkname, header.mode = tarfile.SYMTYPE, file.target, 0o777
        yield header.tobuf(tarfile.GNU_FORMAT, "utf-8", "surrogateescape")
        if file.size:
            yield from _content(folder / file.name, file.size)
            yield bytes(-file.size % BLOCK_BYTES)
    yield bytes(2 * BLOCK_BYTES)


def _content(path: Path, size: int) -> Iterator[bytes]:
    """Yield the bytes of a file of this size. Raises JobError where it has changed since, or cannot be read."""
    left = size
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise JobError(f"{path} cannot be read: {error.strerror}", hint=_NOT_HERE) from None
    with os.fdopen(fd, "rb", buffering=0) as file:
        while left:
            try:
                piece = file.read(min(left, PIECE_BYTES))
            except OSError as error:
                raise JobError(f"{path} cannot be read: {error.strerror}", hint=_NOT_HERE) from None
            if not piece:
                break
            left -= len(piece)
            yield piece
        if left or os.fstat(fd).st_size != size:
            raise JobError(f"{path} changed while it was read", hint="wait until it is written, then start again")
