"""Makes the JSON schemas that are installed with gpulayer, for editors: `python -m docs.generate_schemas`.

Each follows from a pydantic model and its docstrings. To add one, give it a row in SCHEMAS.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from docs.generate_reference import attribute_docstrings
from gpulayer.hosts import HostsFile, NodeKeys
from gpulayer.job_file import JobFile, RendezvousKeys

if TYPE_CHECKING:
    from pydantic import BaseModel

FOLDER = Path(__file__).parents[1] / "gpulayer" / "schemas"

# By name: the model of the whole file, what the file is, and the models whose fields have docstrings.
SCHEMAS: dict[str, tuple[type[BaseModel], str, tuple[type[BaseModel], ...]]] = {
    "hosts": (HostsFile, "A hosts map of gpulayer", (HostsFile, NodeKeys)),
    "job": (JobFile, "A job of gpulayer", (JobFile, RendezvousKeys)),
}


def schema_text(name: str) -> str:
    """Return the text of gpulayer/schemas/NAME.schema.json."""
    model, title, parts = SCHEMAS[name]
    # Draft 7 is what TOML editors read; its place for parts is `definitions`.
    schema = model.model_json_schema(ref_template="#/definitions/{model}")
    definitions: dict[str, Any] = schema.pop("$defs", {})
    for part in parts:
        target = schema if part is model else definitions[part.__name__]
        _describe(target, part)
    whole = {
        "$schema": "http://json-schema.org/draft-07/schema#",
        **schema,
        "title": title,
        "definitions": definitions,
    }
    return json.dumps(whole, indent=2) + "\n"


def _describe(target: dict[str, Any], part: type[BaseModel]) -> None:
    """Put each field's docstring where an editor shows it; leave out the titles that pydantic makes of names."""
    target["description"] = " ".join((part.__doc__ or "").split()).partition(" docs/")[0]
    target.pop("title", None)
    for field, text in attribute_docstrings(part).items():
        about = target["properties"][field]
        about.pop("title", None)
        about["description"] = text.replace("`", "")
        _drop_null(about)
        if "$ref" in about:  # Draft 7 reads nothing beside a reference
            about["allOf"] = [{"$ref": about.pop("$ref")}]


def _drop_null(about: dict[str, Any]) -> None:
    """Leave out what a TOML file cannot say: null, and a default that stands for "left out"."""
    choices = [choice for choice in about.pop("anyOf", []) if choice != {"type": "null"}]
    about |= choices[0] if len(choices) == 1 else {"anyOf": choices} if choices else {}
    if not isinstance(about.get("default", ""), bool | int | float) and not (
        isinstance(about.get("default"), str) and about["default"]
    ):
        about.pop("default", None)


def main(names: list[str]) -> None:
    """Write the named schemas, or all."""
    FOLDER.mkdir(exist_ok=True)
    for name in names or SCHEMAS:
        (FOLDER / f"{name}.schema.json").write_text(schema_text(name), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
