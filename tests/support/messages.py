"""The messages that gpulayer's source can print when something is wrong, read from its syntax trees."""

from __future__ import annotations

import ast
import itertools
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from gpulayer import errors

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

SOURCE = Path(errors.__file__).parent

ERROR_CLASSES = {
    name: kind for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, BaseException)
}
# Other calls whose argument of this number is text for people.
MESSAGE_CALLS = {
    "ValueRefusedError": 0,
    "RefusalError": 1,
    "ProtocolError": 0,
    "BundleError": 0,
    "Problem": 1,
    "_UnknownNameError": -1,
    "_unreadable": 1,
    "_no_plan": 1,
    "_no_recipe": 0,
    "Notice": 0,
    "lose": 0,
    "tell": 0,
    "_give_up": 0,
    "failure": 2,
    "warning": 2,
    "_finding": 1,
    "PortChoice": 1,
}
# Calls that end their text with the values seen: after so many arguments come those.
SEEN_AFTER = {"failure": 4, "warning": 4, "_finding": 2}
ANYTHING = "\0"  # stands for a value in a message
FEW_LETTERS = 4  # a message with fewer of its own only wraps another one
ENOUGH_LETTERS = 10  # a shape with fewer of its own would stand for too much
MOST_VARIANTS = 64
MOST_DEPTH = 8
_VALUE = re.compile(r"HOST port PORT|\b[A-Z][A-Z-]*\b")


@dataclass(frozen=True, slots=True)
class Message:
    """A message that the source can print: where it is made, by which call, and its text with ANYTHING for values."""

    place: str
    made_by: str
    text: str

    @property
    def regex(self) -> re.Pattern[str]:
        """What the message matches. A text that is said of something, such as a key of the map, may follow its name."""
        own = re.escape(plain(self.text)).replace(re.escape(ANYTHING), ".+")
        return re.compile(own if self.made_by in ERROR_CLASSES else f"(?:.*[ :,)])?{own}")

    def is_in(self, shapes: Sequence[str]) -> bool:
        """Tell whether one of the shapes is of this message. A word in capitals in a shape stands for a value."""
        return any(
            self.regex.fullmatch(plain(shape)) or _stands_for(plain(shape), plain(self.text)) for shape in shapes
        )


def _stands_for(shape: str, text: str) -> bool:
    """Tell whether a shape with enough words of its own is the text with values left out."""
    literal = _VALUE.sub("", shape)
    return sum(char.isalpha() for char in literal) >= ENOUGH_LETTERS and is_shape_of(shape, text)


def is_shape_of(shape: str, text: str) -> bool:
    """Tell whether a text is a shape with values put in for its words in capitals."""
    pattern = ".+".join(map(re.escape, _VALUE.split(plain(shape))))
    return bool(re.fullmatch(pattern, plain(text)))


def plain(text: str) -> str:
    """Return a message without backticks and with single spaces."""
    return " ".join(text.replace("`", "").split())


def messages() -> list[Message]:
    """Return every message in gpulayer's source that is more than a wrapper of another one."""
    return [message for path in sorted(SOURCE.glob("*.py")) for message in _Reader(path).messages()]


class _Reader:
    """Reads one file. A text that is put together is followed to its parts, within the file."""

    def __init__(self, path: Path) -> None:
        self._name = path.name
        self._tree = ast.parse(path.read_text(encoding="utf-8"))
        self._functions = {
            node.name: node for node in ast.walk(self._tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        }

    def messages(self) -> Iterator[Message]:
        for function in self._functions.values():
            for call in (node for node in ast.walk(function) if isinstance(node, ast.Call)):
                name = _called(call)
                index = 0 if name in ERROR_CLASSES else MESSAGE_CALLS.get(name)
                if index is None or len(call.args) <= index:
                    continue
                seen = f": {ANYTHING}" if len(call.args) > SEEN_AFTER.get(name, len(call.args)) else ""
                for text in dict.fromkeys(one + seen for one in self._texts(call.args[index], function, 0)):
                    if sum(char.isalpha() for char in text) >= FEW_LETTERS:
                        yield Message(f"{self._name}:{call.lineno}", name, text.replace("``", f"`{ANYTHING}`"))

    def _texts(self, node: ast.expr, function: ast.AST, depth: int) -> list[str]:
        """Return the texts that an expression can be."""
        match node:
            case _ if depth > MOST_DEPTH:
                return [ANYTHING]
            case ast.Constant(value=value):
                return [value if isinstance(value, str) else ANYTHING]
            case ast.JoinedStr(values=parts):
                return _joined([self._texts(part, function, depth + 1) for part in parts])
            case ast.BinOp(op=ast.Add(), left=left, right=right):
                return _joined([self._texts(part, function, depth + 1) for part in (left, right)])
            case _:
                parts = self._parts(node, function)
                return [text for part in parts for text in self._texts(part, function, depth + 1)] or [ANYTHING]

    def _parts(self, node: ast.expr, function: ast.AST) -> list[ast.expr]:
        """Return the expressions of which one is the text; none where only the run knows it."""
        match node:
            case ast.FormattedValue(value=value) | ast.Starred(value=value) | ast.NamedExpr(value=value):
                return [value]
            case ast.IfExp(body=body, orelse=orelse):
                return [body, orelse]
            case ast.BoolOp(values=values) | ast.List(elts=values):
                return values
            case ast.ListComp(elt=element) | ast.GeneratorExp(elt=element):
                return [element]
            case ast.Name(id=name):
                return [value for value in _assigned(name, function) if not _mentions(value, name)]
            case ast.Call():
                return self._call_parts(node)
            case _:
                return []

    def _call_parts(self, call: ast.Call) -> list[ast.expr]:
        name = _called(call)
        if name == "join":
            return call.args
        if name == "format" and isinstance(call.func, ast.Attribute) and isinstance(call.func.value, ast.Constant):
            return [ast.Constant(re.sub(r"\{[^}]*\}", ANYTHING, str(call.func.value.value)))]
        function = self._functions.get(name)
        returns = [node.value for node in ast.walk(function) if isinstance(node, ast.Return)] if function else []
        return [value for value in returns if isinstance(value, ast.JoinedStr | ast.Constant)]


def _called(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def _joined(parts: list[list[str]]) -> list[str]:
    texts = ["".join(choice) for choice in itertools.islice(itertools.product(*parts), MOST_VARIANTS)]
    return [re.sub(f"{ANYTHING}(?: ?{ANYTHING})+", ANYTHING, text) for text in texts]


def _assigned(name: str, function: ast.AST) -> list[ast.expr]:
    """Return what a function assigns or appends to a name."""
    found: list[ast.expr] = []
    for node in ast.walk(function):
        match node:
            case ast.Assign(targets=[ast.Tuple(elts=targets)], value=ast.Tuple(elts=values)):
                pairs = zip(targets, values, strict=True)
                found += [value for target, value in pairs if isinstance(target, ast.Name) and target.id == name]
            case ast.Assign(targets=[ast.Name(id=target)], value=value) if target == name:
                found.append(value)
            case ast.NamedExpr(target=ast.Name(id=target), value=value) if target == name:
                found.append(value)
            case ast.Call(func=ast.Attribute(value=ast.Name(id=target), attr="append"), args=[value]) if target == name:
                found.append(value)
    return found


def _mentions(value: ast.expr, name: str) -> bool:
    return any(isinstance(node, ast.Name) and node.id == name for node in ast.walk(value))
