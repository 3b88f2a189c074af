"""A rank that writes as fast as it can, and what its log must then hold."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

# sys.argv[1] megabytes of numbered lines, as fast as they can be written.
FLOOD = """
import sys
line = b"%08d " + b"y" * 90 + b"\\n"
for first in range(0, int(sys.argv[1]) * 10_000, 1000):
    sys.stdout.buffer.write(b"".join(line % number for number in range(first, first + 1000)))
sys.stdout.flush()
"""


def flood_hash(megabytes: int, more: bytes = b"") -> str:
    """The hash of what FLOOD writes, with `more` after it."""
    digest = hashlib.sha256()
    for first in range(0, megabytes * 10_000, 1000):
        digest.update(b"".join(b"%08d %s\n" % (number, b"y" * 90) for number in range(first, first + 1000)))
    digest.update(more)
    return digest.hexdigest()


def file_hash(path: Path) -> str:
    """The hash of what a file holds."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
