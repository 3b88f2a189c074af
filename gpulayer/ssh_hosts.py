"""The Host names of an SSH configuration as a hosts map. What the lines below them mean is ssh_config.py's matter.

Standard library only: OpenSSH and asyncssh tell what holds for a name, and not which names there are.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from gpulayer.errors import HostsFileError
from gpulayer.hosts import HostMap, Node, fold, read_text
from gpulayer.problems import Problem, fail
from gpulayer.values import ValueRefusedError, check_node_id

if TYPE_CHECKING:
    from collections.abc import Iterator

MOST_NAMES = 20  # of a hint
_LINE = re.compile(r"\s*([A-Za-z]+)(?:\s*=\s*|\s+)(.*)")


def read_ssh_hosts(pattern: str, config: Path | None) -> HostMap:
    """Return the names that `pattern` (with `*` and `?`) matches, in the order of the file, each Host line once.

    `config` None is ~/.ssh/config. Raises HostsFileError.
    """
    path = Path.home() / ".ssh" / "config" if config is None else config.expanduser()
    lines = list(_host_lines(path, set()))
    wanted = re.compile("".join({"*": ".*", "?": "."}.get(char, re.escape(char)) for char in pattern), re.IGNORECASE)
    names = dict.fromkeys(next(filter(wanted.fullmatch, line), "") for line in lines)
    names.pop("", None)
    if not names:
        known = [line[0] for line in lines][:MOST_NAMES]
        raise HostsFileError(
            f"no Host of {path} matches `{pattern}`",
            hint=f"the names there are {fold(known)}" if known else "its Host lines are all patterns",
        )
    problems = list(_unusable(names))
    if problems:
        fail(path, problems)
    return HostMap(str(path), tuple(Node.model_validate({"id": name}) for name in names))


def _host_lines(path: Path, read: set[Path]) -> Iterator[list[str]]:
    """Yield the names of each Host line that has any; of a line, no patterns and no names that are left out.

    A file that has been `read` has no new names: files may include each other.
    """
    read.add(path.resolve())
    for line in read_text(path).splitlines():
        match = _LINE.match(line)
        keyword = match[1].lower() if match else ""
        if match and keyword == "host":
            names = [word for word in _words(match[2]) if not re.search(r"[*?!]", word)]
            yield from [names] if names else []
        elif match and keyword == "include":
            for word in _words(match[2]):
                place = Path.home() / ".ssh" / Path(word).expanduser()
                for file in sorted(Path(place.anchor).glob(str(place.relative_to(place.anchor)))):
                    if file.is_file() and file.resolve() not in read:
                        yield from _host_lines(file, read)


def _words(text: str) -> list[str]:
    try:
        return shlex.split(text, comments=True)
    except ValueError:  # a quote without its end
        return text.split()


def _unusable(names: dict[str, None]) -> Iterator[Problem]:
    for name in names:
        try:
            check_node_id(name)
        except ValueRefusedError as error:
            yield Problem(f"Host `{name}`", str(error), error.hint)
