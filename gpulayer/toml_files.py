"""Files that people write in TOML: read with a bound, parsed, and what TOML minds in plain words.

hosts.py and job_file.py say what stands in them.
"""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from gpulayer.errors import RequestError

MOST_BYTES = 4 << 20
MOST_DOTS = 100


@dataclass(frozen=True, slots=True)
class FileKind:
    """What a file is, by which option it is named, how a table with odd signs is mended, and whose error it raises."""

    name: str
    option: str
    error: type[RequestError]
    header_hint: str | None = None


def read_text(path: Path, kind: FileKind) -> str:
    """Return what a file holds. Raises the error of its kind."""
    try:
        with path.open("rb") as file:
            data = file.read(MOST_BYTES + 1)
    except FileNotFoundError:
        raise _unreadable(kind, f"{path}: no such file", f"name the {kind.name} with `{kind.option}`") from None
    except IsADirectoryError:
        raise _unreadable(kind, f"{path}: is a folder, not a file", f"name the {kind.name} in it") from None
    except OSError as error:
        raise _unreadable(kind, f"{path}: cannot be read: {error.strerror}") from None
    if len(data) > MOST_BYTES:
        raise _unreadable(kind, f"{path}: is larger than {MOST_BYTES >> 20} MiB", f"is this a {kind.name}?")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise _unreadable(
            kind, f"{path}, line {line}: byte 0x{data[error.start]:02x} is not UTF-8", "save the file as UTF-8"
        ) from None


def parse_toml(path: Path, text: str, kind: FileKind) -> dict[str, object]:
    """Return the file as TOML has it. What a small file can make tomllib spend hours on is refused before."""
    for number, line in enumerate(text.split("\n"), 1):
        if line.count(".") > MOST_DOTS:  # of a key with n parts, tomllib makes n*n/2
            raise _unreadable(
                kind, f"{path}, line {number}: has more than {MOST_DOTS} dots, as no line of a {kind.name} has"
            )
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise _no_toml(path, text, error, kind) from None
    except RecursionError:
        raise _unreadable(kind, f"{path}: has arrays or tables in each other that go too deep") from None
    except ValueError:  # what Python says to numbers of more than 4300 digits
        raise _unreadable(kind, f"{path}: has a number with too many digits") from None


def _unreadable(kind: FileKind, message: str, hint: str | None = None) -> RequestError:
    return kind.error(message, hint=hint)


def _no_toml(path: Path, text: str, error: tomllib.TOMLDecodeError, kind: FileKind) -> RequestError:
    """Name the line, and say what TOML minds. Values are not shown: they may be secret."""
    reason = re.sub(r" \(at .*\)$", "", str(error))
    lines = text.splitlines()
    at_line = re.search(r"\(at line ([0-9]+),", str(error))
    number = int(at_line[1]) if at_line else max((n for n, line in enumerate(lines, 1) if line.strip()), default=1)
    content = _without_value(lines, number)
    where = f"{path}, line {number}: `{content}`"
    if reason.startswith(("Cannot overwrite", "Duplicate inline table key")):
        return _unreadable(kind, f"{where} has a value already", "keep one of the two lines")
    if reason.startswith("Cannot declare"):
        return _unreadable(kind, f"{where} is there already", "keep one of the two tables, and all of its keys in it")
    hint = kind.header_hint if content.startswith("[") else None
    return _unreadable(kind, f"{where} is no TOML: {reason[:1].lower()}{reason[1:]}", hint)


def _without_value(lines: Sequence[str], number: int) -> str:
    """Return what stands before the value in a line, or the header of a table; `...` within a text of several lines."""
    before = "\n".join(lines[: number - 1])
    if before.count('"""') % 2 or before.count("'''") % 2:
        return "..."
    content = lines[number - 1].strip() if number <= len(lines) else ""
    is_header = re.match(r"\[\[?\s*[\w.]", content) and "=" not in content
    return content if is_header else re.split(r"""[="']""", content)[0].strip()
