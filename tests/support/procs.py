"""Processes as /proc shows them from outside the hosts, where nothing inside can hide."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

NamespaceKind = Literal["pid", "net"]


@dataclass(frozen=True, slots=True)
class Process:
    """One process: its pid here and in its own pid namespace, /proc state letter, uid, name, argv, environment."""

    pid: int
    pid_inside: int
    parent_pid: int
    state: str
    uid: int
    name: str
    argv: tuple[str, ...]
    environ: bytes
    namespace: int


def namespace_id(pid: int, kind: NamespaceKind) -> int:
    """The inode that names a process's namespace; 0 once the process is gone."""
    try:
        return Path(f"/proc/{pid}/ns/{kind}").stat().st_ino
    except OSError:
        return 0


def processes_in(namespaces: Collection[int], kind: NamespaceKind, marker: str = "") -> list[Process]:
    """Every process in one of these namespaces whose environment holds `marker`. A zombie has no environment."""
    return [process for process in _scan(namespaces, kind) if marker.encode() in process.environ]


def _scan(namespaces: Collection[int], kind: NamespaceKind) -> Iterator[Process]:
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal():
            continue
        namespace = namespace_id(int(entry.name), kind)
        if namespace in namespaces and namespace:
            try:
                yield _read(entry, namespace)
            except (OSError, KeyError):  # it ended while it was read
                continue


def _read(entry: Path, namespace: int) -> Process:
    status = dict(line.split(":\t", 1) for line in (entry / "status").read_text().splitlines() if ":\t" in line)
    argv = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
    return Process(
        pid=int(entry.name),
        pid_inside=int(status["NSpid"].split()[-1]),
        parent_pid=int(status["PPid"]),
        state=status["State"][0],
        uid=int(status["Uid"].split()[0]),
        name=status["Name"],
        argv=tuple(argv[:-1]),
        environ=b"\0" + (entry / "environ").read_bytes(),
        namespace=namespace,
    )
