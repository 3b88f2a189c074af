"""The file of a saved plan: written whole or not at all, and read with trust in nothing."""

from __future__ import annotations

import copy
import io
import json
import os
import stat
import sys
from typing import TYPE_CHECKING, Any

import pytest

from gpulayer import cli, plan_file
from gpulayer.errors import PlanFileError
from gpulayer.plan import digest_of, plan_json
from gpulayer.plan_file import parse_plan, read_plan, write_plan
from gpulayer.review import render_json
from tests.support.plans import node, plan, script
from tests.support.saved_plans import JOB_ID, save, write_files

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

Json = dict[str, Any]


def document() -> Json:
    """Return a plan in its JSON form."""
    made: Json = json.loads(render_json(plan(script("a", timeout_s=9.0), [node(1), node(2, gpus=[4, 5])])))
    return made


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a map and a script."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("GPULAYER_HOSTS", raising=False)
    write_files(tmp_path)
    return tmp_path


# --- the digest -----------------------------------------------------------------------------------------------------


def _leaves(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield each place that holds a single value: what it is in, and its key."""
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
        if isinstance(inner, dict | list) and inner:
            yield from _leaves(inner)
        else:
            yield value, key


def test_every_value_counts() -> None:
    """Whatever changes in a plan, its digest changes; that of the digest itself aside."""
    plain = document()
    digests = {digest_of(plain)}
    changed = 0
    for container, key in _leaves(plain):
        if key == "digest":
            continue
        kept = container[key]
        container[key] = "changed"
        digests.add(digest_of(plain))
        container[key] = kept
        changed += 1
    assert len(digests) == changed + 1 > 60


def test_the_form_of_the_json_does_not_count() -> None:
    """Spaces, the order of keys and escapes are nobody's change."""
    made = document()
    others = (json.dumps(made, indent=8), json.dumps(dict(reversed(made.items())), ensure_ascii=False))
    assert all(parse_plan(text.encode(), "p").is_as_made for text in others)
    assert not parse_plan(json.dumps({**made, "grace_s": 1}).encode(), "p").is_as_made


def test_the_digest_is_the_plans() -> None:
    """The plan has it, and its JSON; secrets do not count."""
    job = script(env={})
    made = plan(job, [node(1, env={"API_KEY": "one"})])
    assert made.digest == plan_json(made)["digest"] == plan(job, [node(1, env={"API_KEY": "two"})]).digest
    assert made.digest != plan(job, [node(1, env={"API_K": "two"})]).digest


# --- writing --------------------------------------------------------------------------------------------------------


def test_a_plan_is_saved_for_the_user_alone(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Mode 0600 under any umask; what was there is replaced; nothing else is left, and stderr has the digest."""
    (folder / "plan.json").write_text("old")
    (folder / "plan.json").chmod(0o644)
    before = sorted(path.name for path in folder.iterdir())
    umask = os.umask(0)
    try:
        save()
    finally:
        os.umask(umask)
    out, err = capfd.readouterr()
    saved = json.loads((folder / "plan.json").read_text())
    assert (out, err) == ("", f"gpulayer: wrote plan.json: job {JOB_ID}, {saved['digest']}\n")
    assert stat.S_IMODE((folder / "plan.json").stat().st_mode) == 0o600
    assert sorted(path.name for path in folder.iterdir()) == before
    assert saved["digest"] == digest_of(saved)


def test_a_plan_on_stdout_is_the_same(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """`-o -`, `--format json` and `run --dry-run -o -` print what a file would hold."""
    save()
    capfd.readouterr()
    words = ["--job-id", JOB_ID, "-N", "2", "train.py"]
    texts = []
    for command in (["render", "-o", "-"], ["render", "--format", "json"], ["run", "--dry-run", "-o", "-"]):
        assert cli.run_cli([*command, *words]) == 0
        texts.append(capfd.readouterr().out)
    assert texts == [(folder / "plan.json").read_text()] * 3


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["run", "-o", "p", "train.py"], "`--output` saves a plan, and nothing is run then"),
        (["render", "-o", "p", "--format", "shell", "train.py"], "`--format shell` is no form that a plan is saved in"),
        (["render", "-o", "no/p", "train.py"], "no/p: cannot be written: No such file or directory"),
        (["render", "-o", ".", "train.py"], ".: is no file"),
        (["render", "-o", "/dev/null", "train.py"], "/dev/null: is no file"),
    ],
)
def test_what_cannot_be_saved(words: list[str], message: str, folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """An error says why, and nothing is made."""
    before = sorted(folder.iterdir())
    assert cli.run_cli(words) == 2
    assert capfd.readouterr().err.partition("\n")[0] == f"gpulayer: error: {message}"
    assert sorted(folder.iterdir()) == before


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk, or a signal in the middle: what was there stays, whole, and no part of the new one does."""
    path = tmp_path / "plan.json"
    write_plan(path, "old")

    def fail(_: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(KeyboardInterrupt):
        write_plan(path, "new")
    assert (path.read_text(), [one.name for one in tmp_path.iterdir()]) == ("old", ["plan.json"])


def test_a_link_is_followed(tmp_path: Path) -> None:
    """The file that a link names is replaced, and the link stays one."""
    (tmp_path / "far").mkdir()
    (tmp_path / "plan.json").symlink_to("far/real.json")
    write_plan(tmp_path / "plan.json", "text")
    assert (tmp_path / "plan.json").is_symlink()
    assert (tmp_path / "far/real.json").read_text() == "text"


# --- reading --------------------------------------------------------------------------------------------------------


def _with(**changes: object) -> Callable[[Json], str]:
    return lambda made: json.dumps({**made, **changes})


def _node(**changes: object) -> Callable[[Json], str]:
    def change(made: Json) -> str:
        made = copy.deepcopy(made)
        made["nodes"][1].update(changes)
        return json.dumps(made)

    return change


WRONG: dict[str, tuple[Callable[[Json], str], str]] = {
    "empty": (lambda _: "", "is no JSON: Expecting value: line 1 column 1 (char 0)"),
    "cut": (lambda made: json.dumps(made)[:-9], "is no JSON: "),
    "a list": (lambda _: "[]", "holds no plan of gpulayer"),
    "null": (lambda _: "null", "holds no plan of gpulayer"),
    "another file": (lambda _: '{"version": 1, "leases": []}', "holds no plan of gpulayer"),
    "NaN": (_with(grace_s=float("nan")), "is no JSON: NaN is no number"),
    "a long number": (lambda _: '{"version": ' + "9" * 5000 + "}", "is no JSON: Exceeds the limit"),
    "a key twice": (lambda made: json.dumps(made)[:-1] + ', "nodes": []}', "is no JSON: a key stands in it twice"),
    "deep": (lambda _: "[" * 100_000, "has values in each other that go too deep"),
    "deep and whole": (lambda _: "[" * 500 + "]" * 500, "has values in each other that go too deep"),
    "version 2": (_with(version=2), "is a plan of version 2, and this gpulayer reads version 1"),
    "version true": (_with(version=True), "is a plan of version True, and this gpulayer reads version 1"),
    "a version in words": (_with(version="1"), "is a plan of version '1', and this gpulayer reads version 1"),
    "no digest": (_with(digest=None), "has `digest` None, as no plan of gpulayer has it"),
    "no port": (_with(master_port=0), "has `master_port` 0, as no plan of gpulayer has it"),
    "a true port": (_with(master_port=True), "has `master_port` True, as no plan of gpulayer has it"),
    "job id": (_with(job_id="../x"), "has `job_id` '../x', as no plan of gpulayer has it"),
    "no nodes": (_with(nodes=[]), "has `nodes` [], as no plan of gpulayer has it"),
    "nodes in words": (_with(nodes="n1"), "has `nodes` 'n1', as no plan of gpulayer has it"),
    "a node in words": (_with(nodes=["n1"]), "has a node 'n1', as no plan of gpulayer has it"),
    "recipe": (_with(recipe=[]), "has `recipe` [], as no plan of gpulayer has it"),
    "script": (_with(script={"path": 1}), "has `script` {'path': 1}, as no plan of gpulayer has it"),
    "node id": (_node(node_id="a/b"), "has a node called 'a/b', as no plan of gpulayer has it"),
    "two nodes": (_node(node_id="gpu-01"), "has two nodes called gpu-01, as no plan of gpulayer has it"),
    "argv": (_node(argv=["a", 1]), "has `argv` ['a', 1] on node gpu-02, as no plan of gpulayer has it"),
    "no argv": (_node(argv=[]), "has `argv` [] on node gpu-02, as no plan of gpulayer has it"),
    "env": (_node(env={"A": None}), "has `env` {'A': None} on node gpu-02, as no plan of gpulayer has it"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_no_plan_is_refused(name: str) -> None:
    """One sentence says what is wrong, and where it was read."""
    change, message = WRONG[name]
    with pytest.raises(PlanFileError) as caught:
        parse_plan(change(document()).encode(), "p.json")
    assert str(caught.value).startswith(f"p.json: {message}")


def test_files_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No file, a folder, bytes, one that never ends, and stdin."""
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(plan_file, "MOST_BYTES", 1 << 20)
    for name, message in (
        ("none", "none: no such file"),
        (".", ".: cannot be read: Is a directory"),
        ("a\0b", "a\0b: cannot be read: "),
        ("bytes", "bytes: is no JSON: "),
        ("/dev/zero", "/dev/zero: is larger than 1 MiB, so it is no plan"),
    ):
        with pytest.raises(PlanFileError) as caught:
            read_plan(name)
        assert str(caught.value).startswith(message)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"{}")))
    with pytest.raises(PlanFileError, match=r"^stdin: holds no plan of gpulayer$"):
        read_plan("-")
