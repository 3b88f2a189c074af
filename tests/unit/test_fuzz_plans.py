"""Saved plans of any content: read, compared and run only as what they are, or refused in words."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpulayer import plan_again
from gpulayer.errors import GpulayerError
from gpulayer.plan import digest_of, plan_json
from gpulayer.plan_diff import differences
from gpulayer.plan_file import SavedPlan, parse_plan
from tests.support.fuzz import JSON, examples, nearly
from tests.support.saved_plans import save, write_files

ENV = ["HF_TOKEN=hf-5e77aa01", "API_KEY=another-one-2"]


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The current folder, with a map, a script, and a plan with secrets in it."""
    path = tmp_path_factory.mktemp("plans")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(path)
        patch.setenv("HOME", str(path))
        write_files(path)
        save("-N", "2", "-e", ENV[0], "train.py", "--api-key", "another-one-2", "--auth=hf-5e77aa01", "$NODE_RANK")
    return path


@pytest.fixture(autouse=True)
def _there(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setenv("HOME", str(folder))
    monkeypatch.delenv("GPULAYER_HOSTS", raising=False)


def right() -> Any:
    """Return the plan as it should be. The current folder has it."""
    return json.loads(Path("plan.json").read_text())


def try_all(data: bytes) -> None:
    """Read a plan, compare it with the right one, and run it: what would be run is exactly what stands in it."""
    with contextlib.suppress(GpulayerError):
        plan = parse_plan(data, "p")
        own = SavedPlan("right", right())
        for lines in (differences(own, plan), differences(plan, own), differences(plan, plan)):
            assert all(line.isprintable() for line in lines)
        Path("p").write_bytes(data)
        _, planned = plan_again.plan_to_run("p", "hosts.toml", None, env=ENV, run_dir=None, environ={})
        document = json.loads(data)
        assert plan_json(planned.plan) == document
        assert document["digest"] == digest_of(document)


@examples(150)
@given(st.binary(max_size=60))
def test_bytes_of_any_kind(data: bytes) -> None:
    """No file is too strange to be refused in words."""
    try_all(data)


@examples(150)
@given(JSON)
def test_json_of_any_kind(value: Any) -> None:
    """Neither is any JSON."""
    try_all(json.dumps(value).encode())


@examples(300)
@given(st.data())
def test_a_plan_with_other_values_in_some_places(data: st.DataObject) -> None:
    """Any type in any place; with the digest made right as well."""
    value = data.draw(nearly(right()))
    try_all(json.dumps(value).encode())
    if isinstance(value, dict):
        try_all(json.dumps({**value, "digest": digest_of(value)}).encode())


@examples(200)
@given(st.data(), st.sampled_from(["job", "blanks", "cwd", "hosts"]))
def test_a_recipe_with_other_values_in_some_places(data: st.DataObject, key: str) -> None:
    """Any type in any place of what the plan is made again from."""
    document = right()
    document["recipe"][key] = data.draw(nearly(document["recipe"][key]))
    try_all(json.dumps({**document, "digest": digest_of(document)}).encode())
