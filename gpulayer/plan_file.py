"""A saved plan: plan.json written whole or not at all, and read by people who trust nothing in it.

What stands in it is plan.py's matter. A key that is not known is kept: plans are compared key by key.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from gpulayer.errors import JobError, PlanFileError
from gpulayer.plan import PLAN_VERSION, check_job_id, digest_of
from gpulayer.ranges import fold
from gpulayer.untrusted import shown
from gpulayer.values import NODE_ID

if TYPE_CHECKING:
    from collections.abc import Mapping

MOST_BYTES = 64 << 20
MOST_DEPTH = 30  # of values in values
STDIN = "-"


@dataclass(frozen=True, slots=True)
class SavedPlan:
    """A plan as it stands in a file. `source` is what the file was called."""

    source: str
    document: Mapping[str, Any]

    @property
    def job_id(self) -> str:
        """The id of its job."""
        return str(self.document["job_id"])

    @property
    def master_port(self) -> int:
        """The port that its nodes meet at."""
        return int(self.document["master_port"])

    @property
    def nodes(self) -> dict[str, Mapping[str, Any]]:
        """Its nodes, in node order, by their ids."""
        return {node["node_id"]: node for node in self.document["nodes"]}

    @property
    def is_as_made(self) -> bool:
        """False where somebody has changed it since gpulayer wrote it."""
        return bool(self.document["digest"] == digest_of(self.document))


def read_plan(source: str) -> SavedPlan:
    """Return the plan that a file holds; `-` is stdin. Raises PlanFileError."""
    return parse_plan(_read(source), source)


def parse_plan(data: bytes, source: str) -> SavedPlan:
    """Return the plan that some bytes hold. Raises PlanFileError."""
    try:
        document = json.loads(data, object_pairs_hook=_each_once, parse_constant=_no_number)
        deep = _is_deep(document)
    except RecursionError:
        deep = True
    except ValueError as error:  # UnicodeDecodeError and json's own are among them
        _no_plan(source, f"is no JSON: {str(error)[:100]}")
    if deep:
        _no_plan(source, "has values in each other that go too deep")
    if not isinstance(document, dict) or "version" not in document or "job_id" not in document:
        _no_plan(source, "holds no plan of gpulayer", "`gpulayer render -o plan.json` writes one")
    if type(document["version"]) is not int or document["version"] != PLAN_VERSION:
        _no_plan(
            source,
            f"is a plan of version {shown(document['version'])}, and this gpulayer reads version {PLAN_VERSION}",
            "render it anew, or use the gpulayer that made it",
        )
    if fault := _fault(document):
        _no_plan(source, f"{fault}, as no plan of gpulayer has it", "render the plan anew")
    return SavedPlan(source, document)


def write_plan(path: Path, text: str) -> None:
    """Write a plan that only you can read, whole or not at all. Raises PlanFileError."""
    target = path.resolve()
    temporary = None
    try:
        if target.exists() and not target.is_file():
            raise PlanFileError(f"{path}: is no file", hint="name a file: `-o plan.json`, or `-o -` for stdout")
        with (
            tempfile.NamedTemporaryFile(  # of mode 0600
                "w", encoding="utf-8", prefix=f".{target.name[:100]}.", dir=target.parent, delete=False
            ) as file
        ):
            temporary = Path(file.name)
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(target)
    except OSError as error:
        raise PlanFileError(f"{path}: cannot be written: {error.strerror}") from None
    finally:
        if temporary:
            temporary.unlink(missing_ok=True)


def _read(source: str) -> bytes:
    try:
        if source == STDIN:
            data = sys.stdin.buffer.read(MOST_BYTES + 1)
        else:
            with Path(source).open("rb") as file:
                data = file.read(MOST_BYTES + 1)
    except FileNotFoundError:
        _no_plan(source, "no such file")
    except (OSError, ValueError) as error:
        _no_plan(source, f"cannot be read: {getattr(error, 'strerror', error)}")
    if len(data) > MOST_BYTES:
        _no_plan(source, f"is larger than {MOST_BYTES >> 20} MiB, so it is no plan")
    return data


def _no_plan(source: str, what: str, hint: str | None = None) -> NoReturn:
    raise PlanFileError(f"{_name_of(source)}: {what}", hint=hint)


def _name_of(source: str) -> str:
    return "stdin" if source == STDIN else source


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Refuse a key that stands there twice: whoever reviews the plan may have read the other one."""
    document = dict(pairs)
    if len(document) != len(pairs):
        raise ValueError("a key stands in it twice")
    return document


def _no_number(text: str) -> NoReturn:
    raise ValueError(f"{text} is no number")


def _fault(document: Mapping[str, Any]) -> str | None:
    """Say what a plan has that cannot be, or lacks: only what those who read it rely on."""
    texts = {name: document.get(name) for name in ("job_id", "digest", "gpulayer")}
    wrong = [name for name, text in texts.items() if not isinstance(text, str)]
    port = document.get("master_port")
    if type(port) is not int or not 1 <= port <= 65535:
        wrong.append("master_port")
    if wrong:
        return _odd(wrong[0], document.get(wrong[0]))
    try:
        check_job_id(document["job_id"])
    except JobError:
        return _odd("job_id", document["job_id"])
    recipe, nodes = document.get("recipe"), document.get("nodes")
    if recipe is not None and not isinstance(recipe, dict):
        return _odd("recipe", recipe)
    if not isinstance(nodes, list) or not nodes:
        return _odd("nodes", nodes)
    script = document.get("script")
    if script is not None and not _is_script(script):
        return _odd("script", script)
    return next(filter(None, map(_node_fault, nodes)), None) or _twice([node["node_id"] for node in nodes])


def _odd(key: str, value: object) -> str:
    return f"has `{key}` {shown(value)}"


def _is_script(value: Any) -> bool:
    if not isinstance(value, dict) or value.keys() != {"path", "sha256"}:
        return False
    return isinstance(value["path"], str) and isinstance(value["sha256"], str | None)


def _is_deep(value: Any) -> bool:
    level = [value]
    for _ in range(MOST_DEPTH):
        level = [
            inner
            for one in level
            if isinstance(one, dict | list)
            for inner in (one.values() if isinstance(one, dict) else one)
        ]
    return bool(level)


def _node_fault(node: Any) -> str | None:
    if not isinstance(node, dict):
        return f"has a node {shown(node)}"
    node_id, argv, env = node.get("node_id"), node.get("argv"), node.get("env")
    if not isinstance(node_id, str) or not NODE_ID.fullmatch(node_id):
        return f"has a node called {shown(node_id)}"
    if not isinstance(argv, list) or not argv or not all(isinstance(word, str) for word in argv):
        return f"has `argv` {shown(argv)} on node {node_id}"
    if not isinstance(env, dict) or not all(isinstance(value, str) for value in env.values()):
        return f"has `env` {shown(env)} on node {node_id}"
    return None


def _twice(ids: list[str]) -> str | None:
    again = [node_id for node_id, count in Counter(ids).items() if count > 1]
    return f"has two nodes called {fold(again)}" if again else None
