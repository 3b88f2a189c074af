"""What is wrong with a hosts map or a job file, in plain words: pydantic's errors, with places as the file has them."""

from __future__ import annotations

import difflib
import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

from gpulayer.errors import HostsFileError
from gpulayer.values import ValueRefusedError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

_MAX_PROBLEMS = 20  # of one file, on one screen
_MAX_VALUE = 60  # characters of a value that are shown
_OTHER_WORDS = {
    "host": "ssh", "hostname": "ssh", "ip": "address", "addr": "address", "username": "user", "cwd": "workdir",
    "dir": "workdir", "directory": "workdir", "slots": "gpus", "num_gpus": "gpus", "nproc_per_node": "gpus",
    "script": "entrypoint", "program": "entrypoint", "command": "entrypoint", "arguments": "args",
    "nodes": "nnodes", "num_nodes": "nnodes", "backend": "comm_backend", "environment_variables": "env",
    "iface": "interface", "ifname": "interface", "tmp": "scratch", "tmpdir": "scratch", "environment": "env",
}  # fmt: skip
_TYPE_WORDS = {
    "string_type": "is not a string",
    "int_type": "is not a whole number",
    "bool_type": "is not true or false",
    "model_type": "is not a table",
    "dict_type": "is not a table",
    "float_type": "is not a number",
    "list_type": "is not a list",
}


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing to mend: where it stands, what is wrong, and what to write instead (or None)."""

    where: str
    text: str
    hint: str | None = None


def fail(path: Path, problems: Iterable[Problem]) -> NoReturn:
    """Raise one HostsFileError for all problems of a file of nodes."""
    message, hint = listed(path, problems)
    raise HostsFileError(message, hint=hint)


def listed(path: Path, problems: Iterable[Problem]) -> tuple[str, str | None]:
    """Return the message and the hint for all problems of a file; a problem found twice is told once."""
    different = list(dict.fromkeys(problems))
    if len(different) == 1:
        problem = different[0]
        return f"{path}: {problem.where} {problem.text}", problem.hint
    lines = [
        f"  {problem.where} {problem.text}" + (f"; {problem.hint}" if problem.hint else "")
        for problem in different[:_MAX_PROBLEMS]
    ]
    if len(different) > _MAX_PROBLEMS:
        lines.append(f"  and {len(different) - _MAX_PROBLEMS} more")
    return "\n".join([f"{path} has {len(different)} mistakes:", *lines]), None


def toml_key(key: str) -> str:
    """The key as TOML writes it: quoted where it must be."""
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else json.dumps(key, ensure_ascii=False)


def table(*keys: str) -> str:
    """The table's header as TOML writes it: `[nodes.gpu-01]`."""
    return "[" + ".".join(toml_key(key) for key in keys) + "]"


def shown(value: object) -> str:
    """The value as TOML would write it, cut to a length that can be read."""
    if isinstance(value, dict):
        return "{...}"
    try:
        text = json.dumps(value, ensure_ascii=False, default=str)
    except ValueError:  # a number that is written in hexadecimal and has too many decimal digits for Python
        text = hex(value) if isinstance(value, int) else "..."
    return text if len(text) <= _MAX_VALUE else text[:_MAX_VALUE] + "..."


def place(keys: Sequence[str], value: object) -> str:
    """Where a value stands, and the value: `[nodes.gpu-01] port = 0`. Variables may be secret: theirs is left out."""
    *tables, key = keys
    text = f"{table(*tables)} {toml_key(key)}" if tables else toml_key(key)
    hidden = "env" in tables[-1:] or (key == "env" and isinstance(value, str | list))
    return text if hidden else f"{text} = {shown(value)}"


def explain(details: Mapping[str, Any], known_keys: tuple[Sequence[str], Sequence[str]]) -> Problem:
    """Put one entry of pydantic's `errors()` in plain words. `known_keys` is those of the file, those of a node."""
    keys = [key for key in map(str, details["loc"]) if key != "[key]"]
    if details["type"] == "extra_forbidden":
        return _unknown_key(keys, details["input"], known_keys)
    where = place(keys, details["input"])
    refused = details.get("ctx", {}).get("error")
    if isinstance(refused, ValueRefusedError):
        return Problem(where, str(refused), refused.hint)
    if details["type"] == "literal_error":
        return Problem(where, f"is not {_choices(details['ctx']['expected'])}")
    text = _TYPE_WORDS.get(details["type"], details["msg"])
    return Problem(where, text, _type_hint(details["type"], keys, details["input"]))


def _choices(expected: str) -> str:
    """Put pydantic's `'static' or 'c10d'` the way it stands in a file."""
    return expected.replace("'", '"')


def _unknown_key(keys: Sequence[str], value: object, known_keys: tuple[Sequence[str], Sequence[str]]) -> Problem:
    *tables, key = keys
    known = known_keys[0 if not tables else 1]
    where = f"{table(*tables)} {toml_key(key)}" if tables else toml_key(key)
    guess = _OTHER_WORDS.get(key.lower().replace("-", "_"))
    if guess not in known:
        likely = ["env"] if tables and isinstance(value, dict) else known
        guess = next(iter(difflib.get_close_matches(key.lower(), likely, n=1)), None)
    if guess is None and isinstance(value, dict) and tables[:1] == ["nodes"]:  # [nodes.gpu-01.cluster]
        return Problem(
            where, "is an unknown key", f"write an id that has dots in quotes: {table('nodes', f'{tables[1]}.{key}')}"
        )
    hint = f"did you mean `{guess}`?" if guess else "the keys here are " + ", ".join(f"`{name}`" for name in known)
    return Problem(where, "is an unknown key", hint)


def _type_hint(kind: str, keys: Sequence[str], value: object) -> str | None:
    key = toml_key(keys[-1])
    if kind == "string_type" and isinstance(value, int | float):
        return (
            f'put it in quotes: `{key} = "..."`' if "env" in keys else f'put it in quotes: `{key} = "{shown(value)}"`'
        )
    if kind in {"int_type", "float_type"} and isinstance(value, str) and value.isdecimal():
        return f"leave the quotes out: `{key} = {value}`"
    if kind == "bool_type":
        return f"write `{key} = true`, or leave it out"
    if kind == "model_type" and keys[0] == "nodes":
        return f"write {table(*keys)}, and the node's keys below it"
    if kind in {"model_type", "dict_type"}:
        return f"write {table(*keys)}, and its keys below it"
    return None
