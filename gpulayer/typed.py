"""From JSON that somebody else wrote to frozen dataclasses. These are the format: what differs is an error."""

from __future__ import annotations

import types
from dataclasses import MISSING, fields, is_dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from gpulayer.errors import HandshakeError
from gpulayer.untrusted import printable, shown

_LONGEST_TEXT = 4096
_MOST = 1 << 63


def read_typed(kind: Any, value: object, where: str) -> Any:
    """Return `value` as a `kind`: a dataclass, a union, a Literal, a tuple, a dict with text keys, or a plain type.

    `Annotated[int, range(...)]` is a number of that range. Raises HandshakeError for another key, another type, or a
    number that is none or out of range; `where` says in words what was read.
    """
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Annotated and type(value) is int and value in arguments[1]:
        return value
    if origin in (Union, types.UnionType):
        return None if value is None else read_typed(arguments[0], value, where)  # only `X | None` is used here
    if is_dataclass(kind) and isinstance(value, dict):
        return _read_fields(kind, value, where)
    if origin is Literal and isinstance(value, str) and value in arguments:
        return value
    if origin is tuple and isinstance(value, list):
        return tuple(read_typed(arguments[0], item, f"{where}[{place}]") for place, item in enumerate(value))
    if origin is dict and isinstance(value, dict):
        return {
            printable(key): read_typed(arguments[1], item, f"{where}.{printable(key):.40}")
            for key, item in value.items()
        }
    return _read_plain(kind, value, where)


def _read_fields(kind: Any, value: dict[str, Any], where: str) -> Any:
    hints = get_type_hints(kind, include_extras=True)
    unknown = sorted(value.keys() - hints.keys())
    missing = [field.name for field in fields(kind) if field.name not in value and field.default is MISSING]
    if unknown or missing:
        raise HandshakeError(f"{where} has no {missing}, or more than it should: {unknown}"[:300])
    return kind(**{name: read_typed(hints[name], item, f"{where}.{name}") for name, item in value.items()})


def _read_plain(kind: Any, value: object, where: str) -> Any:
    if kind is float and isinstance(value, int | float) and type(value) is not bool and abs(value) < _MOST:  # no NaN
        return float(value)
    if kind is str and isinstance(value, str) and len(value) <= _LONGEST_TEXT:
        return printable(value)
    if kind is bool and type(value) is bool:
        return value
    if kind is int and type(value) is int and abs(value) < _MOST:
        return value
    raise HandshakeError(f"{where} is {shown(value)}")
