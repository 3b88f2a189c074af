"""The JSON schemas that editors use: current, named in the files, and of one mind with what the code takes."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from docs.generate_schemas import FOLDER, SCHEMAS, schema_text
from gpulayer.errors import HostsFileError
from gpulayer.hosts import load_hosts
from tests.support.docs import ROOT

EXAMPLES = {"hosts": ROOT / "hosts.example.toml"}


def is_valid(name: str, document: object) -> bool:
    """Tell what the schema says of a document."""
    return bool(_validator(name).is_valid(document))


def _validator(name: str) -> Any:
    return jsonschema.Draft7Validator(json.loads(schema_text(name)))


@pytest.mark.parametrize("name", sorted(SCHEMAS))
def test_schemas_are_current(name: str) -> None:
    """`python -m docs.generate_schemas` would change nothing, and what it makes is a schema."""
    assert (FOLDER / f"{name}.schema.json").read_text(encoding="utf-8") == schema_text(name)
    jsonschema.Draft7Validator.check_schema(json.loads(schema_text(name)))


def test_no_schema_is_left_over() -> None:
    """Each file in the folder is made from a model."""
    assert sorted(path.name for path in FOLDER.iterdir()) == sorted(f"{name}.schema.json" for name in SCHEMAS)


def test_schemas_are_installed() -> None:
    """They are data of the package, so that a file can name them wherever gpulayer is installed."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert "schemas/*.json" in project["tool"]["setuptools"]["package-data"]["gpulayer"]


@pytest.mark.parametrize("name", sorted(EXAMPLES))
def test_the_example_names_its_schema_and_follows_it(name: str) -> None:
    """The first line of the example is where an editor looks, and the example is valid."""
    text = EXAMPLES[name].read_text(encoding="utf-8")
    assert text.splitlines()[0] == f"#:schema ./gpulayer/schemas/{name}.schema.json"
    assert (ROOT / text.splitlines()[0].split()[1]).samefile(FOLDER / f"{name}.schema.json")
    assert is_valid(name, tomllib.loads(text))


@pytest.mark.parametrize(
    "text",
    [
        "[nodes.a]\ngpus = 8",
        "[nodes.a]\ngpus = [0, 1]",
        "practice = false\n[defaults.env]\nA = '1'\n[nodes.a]\nport = 22",
        "[nodes.a]\ngpus = 0",
        "[nodes.a]\ngpus = []",
        "[nodes.a]\ngpus = [0, 0]",
        "[nodes.a]\ngpus = '8'",
        "[nodes.a]\nport = 65536",
        "[nodes.a]\nslots = 8",
        "[nodes.a]\nenv = { A = 1 }",
        "practice = 'yes'\n[nodes.a]",
        "hosts = 1\n[nodes.a]",
        "nodes = 3",
    ],
)
def test_the_schema_refuses_what_the_code_refuses(text: str) -> None:
    """Types, unknown keys and bounds of numbers are the same; what a string may be is told by the code alone."""
    try:
        taken = bool(load_hosts(Path("hosts.toml"), text).nodes)
    except HostsFileError:
        taken = False
    assert is_valid("hosts", tomllib.loads(text)) == taken


def test_each_key_has_its_description() -> None:
    """An editor shows what the reference page says."""
    schema = json.loads(schema_text("hosts"))
    for part in (schema, schema["definitions"]["NodeKeys"]):
        assert all(about["description"] for about in part["properties"].values())
