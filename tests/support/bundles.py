"""Folders to bundle, tars of every kind, and what nodes keep of them."""

from __future__ import annotations

import hashlib
import io
import tarfile
import zlib
from typing import TYPE_CHECKING

from gpulayer.frames import encode_frame

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from gpulayer.wire import Header
    from tests.support.host import Host
    from tests.support.local_node import LocalNode

STORE = ".cache/gpulayer/bundles"  # below the home

# A package of two modules, of which one imports the other, and a script that needs both.
PACKAGE = {
    "train.py": "from steps.first import answer\nprint('answer', answer())\n",
    "steps/__init__.py": "",
    "steps/first.py": "from steps.second import NUMBER\n\n\ndef answer():\n    return NUMBER + 1\n",
    "steps/second.py": "NUMBER = 41\n",
}


def write_tree(folder: Path, files: Mapping[str, str | bytes]) -> Path:
    """Write files into a folder, and return it."""
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    return folder


def member(name: str, *, mode: int = 0o644, kind: bytes = tarfile.REGTYPE, target: str = "") -> tarfile.TarInfo:
    """One member of a tar, empty."""
    one = tarfile.TarInfo(name)
    one.mode, one.type, one.linkname = mode, kind, target
    return one


def tar_of(members: Iterable[tarfile.TarInfo | tuple[str, bytes]]) -> bytes:
    """A tar of these members; a pair is a file with its content."""
    target = io.BytesIO()
    with tarfile.open(fileobj=target, mode="w", format=tarfile.GNU_FORMAT) as tar:
        for one in members:
            if isinstance(one, tuple):
                made = member(one[0])
                made.size = len(one[1])
                tar.addfile(made, io.BytesIO(one[1]))
            else:
                tar.addfile(one)
    return target.getvalue()


def digest_of(data: bytes) -> str:
    """The digest that a bundle of these bytes has."""
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def answer_to(node: LocalNode, kind: str, fields: Mapping[str, object] | None = None) -> Header:
    """Send a supervisor a frame, and return the next one that it sends."""
    before = len(node.frames)
    node.write(encode_frame({"type": kind, **(fields or {})}))
    node.read_until(lambda: len(node.frames) > before, f"an answer to {kind}")
    return node.frames[before]


def ask(node: LocalNode, tar: bytes, **changes: object) -> Header:
    """Ask a supervisor whether it has a bundle, and return the answer."""
    fields = {"digest": digest_of(tar), "bytes": len(tar)} | changes
    return answer_to(node, "bundle", fields)


def send(node: LocalNode, tar: bytes, *, piece_bytes: int = 1 << 17) -> Header:
    """Send a bundle that was asked for, and return the answer."""
    data = zlib.compress(tar, 1)
    for at in range(0, len(data), piece_bytes):
        node.send("bundle_data", data[at : at + piece_bytes])
    return answer_to(node, "bundle_end")


def place(node: LocalNode) -> Header:
    """Have a bundle unpacked in the node's job folder, and return the answer."""
    return answer_to(node, "bundle_place", {"job_dir": str(node.job_dir)})


def kept_on(host: Host, home: str = "/root") -> list[str]:
    """The names of what a host keeps of bundles, parts among them."""
    folder = host.path(f"{home}/{STORE}")
    return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
