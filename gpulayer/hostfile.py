"""Hostfiles, as MPI and DeepSpeed read them: text -> HostMap. Owns which of their words mean something here.

None of them has written its format down, so it was read off their sources: Open MPI's hostfile_lex.l and hostfile.c
(and PRRTE's), Hydra's args.c for MPICH and Intel MPI, DeepSpeed's launcher/runner.py. A word that they take and that
could change nothing here, such as `binding=`, is refused.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from gpulayer import values
from gpulayer.hosts import HostMap, Node
from gpulayer.problems import Problem, fail
from gpulayer.ranges import MAX_NAMES, has_range
from gpulayer.values import ValueRefusedError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

# `-` and `_` are alike in them. Hydra has `user`, Open MPI the others; `port` is PRRTE's, for ssh.
WORDS = {
    "slots": "gpus", "cpu": "gpus", "count": "gpus",
    "max_slots": "most", "slots_max": "most", "max_cpu": "most", "cpu_max": "most",
    "max_count": "most", "count_max": "most",
    "user": "user", "username": "user", "user_name": "user",
    "port": "port",
}  # fmt: skip
_COMMENT = re.compile(r"(^|\s)#.*")
_TOML = re.compile(r"\[|[^\s=]+\s*=")
_WORDS_HINT = "a line is `HOST`, `HOST:8` or `HOST slots=8`, and may go on with `user=NAME` and `port=NUMBER`"


@dataclass(slots=True)
class _Line:
    """What a line says of its host. `most` is what `max_slots` says."""

    number: int
    host: str = ""
    keys: dict[str, str] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)

    def refuse(self, word: str, error: ValueRefusedError) -> None:
        """Note what is wrong with a word."""
        self.problems.append(Problem(f"line {self.number}: `{word}`", str(error), error.hint))

    @property
    def node(self) -> Node:
        """The node that the line names."""
        keys: dict[str, object] = {**self.keys, "id": self.host.replace(":", "-"), "ssh": self.host}
        keys |= {name: int(self.keys[name]) for name in ("gpus", "port") if name in self.keys}
        most = keys.pop("most", None)
        return Node.model_validate(keys if most is None or "gpus" in keys else {**keys, "gpus": int(str(most))})


def is_toml(text: str) -> bool:
    """Tell a hosts.toml from a hostfile by its first line with content: `[...`, or a word that `=` follows."""
    first = next((line for line in map(str.strip, text.splitlines()) if line and not line.startswith("#")), "")
    return bool(_TOML.match(first))


def parse_hostfile(path: Path, text: str) -> HostMap:
    """Read a hostfile's text. Raises HostsFileError naming the file, and each line to mend."""
    lines = list(_lines(text))
    problems = [problem for line in lines for problem in line.problems]
    problems = problems or list(_duplicates(lines))
    if len(lines) > MAX_NAMES:
        problems = [Problem("the hostfile", f"names more than {MAX_NAMES} hosts")]
    if not lines:
        problems.append(Problem("the hostfile", "names no hosts", "write a line for each, such as `gpu-01 slots=8`"))
    if problems:
        fail(path, problems)
    return HostMap(str(path), tuple(line.node for line in lines))


def _lines(text: str) -> Iterator[_Line]:
    for number, content in enumerate(text.split("\n"), 1):
        line = " ".join(_COMMENT.sub("", content).split())
        if words := re.sub(" ?= ?", "=", line).split():  # Open MPI takes `slots = 8` too
            yield _read_line(number, words)


def _read_line(number: int, words: list[str]) -> _Line:
    line = _Line(number)
    try:
        _read_host(line, words[0])
    except ValueRefusedError as error:
        line.refuse(words[0], error)
    for word in words[1:]:
        try:
            _read_word(line, word)
        except ValueRefusedError as error:
            line.refuse(word, error)
    if not line.problems and int(line.keys.get("most", "0")) < int(line.keys.get("gpus", "0")) and "most" in line.keys:
        line.refuse(" ".join(words), ValueRefusedError("allows fewer slots than it has", "mend one of the two numbers"))
    return line


def _read_host(line: _Line, word: str) -> None:
    """Read `[USER@]HOST[:SLOTS]`, the first word of a line."""
    user, at, place = word.rpartition("@")
    host, colon, slots = (place, "", "") if values.is_ipv6(place) else place.partition(":")
    if has_range(host):
        raise ValueRefusedError(
            "is a range, which hostfiles do not have", "write a line for each host, or a hosts.toml, which has ranges"
        )
    values.check_node_id(host.replace(":", "-"))
    line.host = host
    if at:
        _keep(line, "user", user)
    if colon:
        _keep(line, "gpus", slots)


def _read_word(line: _Line, word: str) -> None:
    """Read `NAME=VALUE`."""
    name, equals, value = word.partition("=")
    key = WORDS.get(name.replace("-", "_"))
    if key is None or not equals:
        raise ValueRefusedError("means nothing in a hostfile here", _WORDS_HINT)
    _keep(line, key, value)


def _keep(line: _Line, key: str, value: str) -> None:
    if key in line.keys:
        raise ValueRefusedError("says again what the line has said", "keep one of the two")
    if key == "user":
        values.check_user(value)
    else:
        if not re.fullmatch(r"[0-9]{1,9}", value):
            raise ValueRefusedError("has no whole number", "write one, as in `slots=8`")
        (values.check_port if key == "port" else values.check_gpus)(int(value))
    line.keys[key] = value


def _duplicates(lines: list[_Line]) -> Iterator[Problem]:
    """Find hosts that are named twice. Some tools add their slots up, others refuse them, so neither is guessed."""
    first: dict[str, int] = {}
    for line in lines:
        key = line.host.lower().rstrip(".")
        if key in first:
            yield Problem(
                f"line {line.number}: `{line.host}`",
                f"is on line {first[key]} too",
                "name each host once, with all of its slots",
            )
        first.setdefault(key, line.number)
