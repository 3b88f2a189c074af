"""`--bundle` and what goes with it on the command line and in a job file: in the plan, or refused before anything."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from gpulayer import cli, launch
from tests.support.bundles import PACKAGE, write_tree

if TYPE_CHECKING:
    from pathlib import Path

HOSTS = '[defaults]\ngpus = 1\nworkdir = "/$NOT_LOOKED_AT"\n[nodes."n[01-02]"]\naddress = "10.9.0.[1-2]"\n'


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a hosts map and a package in the folder `code`."""
    (tmp_path / "hosts.toml").write_text(HOSTS)
    write_tree(tmp_path / "code", dict(PACKAGE))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("GPULAYER_HOSTS", raising=False)
    return tmp_path


def _run(capfd: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    capfd.readouterr()
    code = cli.run_cli(list(words))
    shown = capfd.readouterr()
    return code, shown.out, shown.err


def _rendered(capfd: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    code, out, err = _run(capfd, "render", "--format", "json", "--job-id", "job", *words)
    assert (code, err) == (0, "")
    plan: dict[str, Any] = json.loads(out)
    return plan


def test_a_plan_with_a_bundle_says_what_it_runs_on(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Digest, size and folder stand in it; each node's folder is its own; the map's workdir does not matter."""
    plan = _rendered(capfd, "--bundle", "code", "train.py")
    assert plan["bundle"].keys() == {"digest", "size_bytes", "file_count", "folder"}
    assert (plan["bundle"]["file_count"], plan["bundle"]["folder"]) == (4, f"{folder}/code")
    assert [node["workdir"] for node in plan["nodes"]] == [f"/tmp/gpulayer-job-n{rank}/work" for rank in (0, 1)]
    assert [node["argv"][-1] for node in plan["nodes"]] == ["train.py"] * 2
    _, text, _ = _run(capfd, "render", "--job-id", "job", "--bundle", "code", "train.py")
    assert f"\nbundle: 4 files, 4.6 kB, {plan['bundle']['digest'][:19]}, from {folder}/code\n" in text


def test_a_changed_file_makes_another_plan(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The plan's digest holds the bundle's."""
    before = _rendered(capfd, "--bundle", "code", "train.py")
    assert _rendered(capfd, "--bundle", "code", "train.py") == before
    (folder / "code/steps/second.py").write_text("NUMBER = 42\n")
    after = _rendered(capfd, "--bundle", "code", "train.py")
    assert before["bundle"]["digest"] != after["bundle"]["digest"]
    assert before["digest"] != after["digest"]


@pytest.mark.parametrize(("workdir", "expected"), [("steps", "/steps"), ("./steps/", "/steps"), (".", "")])
def test_workdir_is_a_folder_of_the_bundle(
    folder: Path, capfd: pytest.CaptureFixture[str], workdir: str, expected: str
) -> None:
    """A relative `--workdir` starts from the bundle's root, and so does a job file's beside its `bundle`."""
    (folder / "job.toml").write_text(f'entrypoint = "x"\nmodule = true\nbundle = "code"\nworkdir = "{workdir}"\n')
    for words in (["--bundle", "code", "-C", workdir, "-m", "x"], ["--job", "job.toml"]):
        plan = _rendered(capfd, *words)
        assert plan["nodes"][1]["workdir"] == f"/tmp/gpulayer-job-n1/work{expected}"


REFUSED = {
    "absolute workdir": (
        ["--bundle", "code", "-C", "/x", "train.py"],
        "`--workdir /x`: with `--bundle`, the working directory is a folder of the bundle",
    ),
    "workdir that leads out": (
        ["--bundle", "code", "-C", "steps/../..", "train.py"],
        "`--workdir steps/../..`: with `--bundle`, the working directory is a folder of the bundle",
    ),
    "no such workdir": (
        ["--bundle", "code", "-C", "no", "train.py"],
        "`--workdir no`: no file of the bundle FOLDER/code is in such a folder",
    ),
    "script outside": (["--bundle", "code", "hosts.toml"], "the script `hosts.toml` is not in the bundle FOLDER/code"),
    "no such folder": (["--bundle", "no", "train.py"], "`--bundle FOLDER/no`: there is no such folder"),
    "no folder": (["--bundle", "", "train.py"], "`--bundle`: `` is empty"),
    "home": (["--bundle", "~/code", "train.py"], "`--bundle`: `~/code` begins with `~`, which nothing expands here"),
    "too large": (
        ["--bundle", "code", "--max-bundle-size", "100", "train.py"],
        "the bundle FOLDER/code has 139 B, and 100 B is the limit; largest: steps/first.py 70 B, train.py 57 B, ",
    ),
    "no size": (
        ["--bundle", "code", "--max-bundle-size", "big", "train.py"],
        "Invalid value for '--max-bundle-size': `big` is no size",
    ),
    "a size of nothing": (
        ["--max-bundle-size", "1GB", "train.py"],
        "`--max-bundle-size` says how large a bundle may be, and there is none",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_is_refused(
    folder: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    """Exit code 2, and nothing is contacted, whichever command it is."""
    monkeypatch.setattr(launch, "launch", lambda *_: pytest.fail("a node would be contacted"))
    words, expected = REFUSED[case]
    for command in ("render", "run"):
        code, out, err = _run(capfd, command, *words)
        assert (code, out) == (2, "")
        assert err.startswith("gpulayer: error: " + expected.replace("FOLDER", str(folder)))


def test_the_limit_stands_in_a_job_file_too(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """There it is a size or a number of bytes, and an option wins over it."""
    text = 'entrypoint = "train.py"\nbundle = "code"\nmax_bundle_size = "0.1kB"\n'
    (folder / "job.toml").write_text(text)
    code, _, err = _run(capfd, "render", "--job", "job.toml")
    assert code == 2
    assert "and 100 B is the limit" in err
    assert _rendered(capfd, "--job", "job.toml", "--max-bundle-size", "1MB")["bundle"]["file_count"] == 4
    (folder / "job.toml").write_text(text.replace('bundle = "code"\n', ""))
    assert _run(capfd, "render", "--job", "job.toml")[0] == 2


def test_a_bundle_that_is_large_for_code_is_told_of(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """On stderr, and the plan is printed all the same."""
    with (folder / "code/data.bin").open("wb") as file:
        file.truncate(201_000_000)
    code, out, err = _run(capfd, "render", "--bundle", "code", "train.py")
    assert (code, out[:4]) == (0, "job ")
    assert err.startswith(
        f"gpulayer: the bundle {folder}/code has 5 files, 201 MB, the largest is data.bin with 201 MB"
    )


def test_a_module_may_be_anywhere_and_a_command_too(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Only a script must be in the bundle: modules may be installed on the nodes."""
    assert _rendered(capfd, "--bundle", "code", "-m", "somewhere.else")["bundle"]["file_count"] == 4
    (folder / "job.toml").write_text('launcher = "command"\nentrypoint = "nvidia-smi"\nbundle = "code"\n')
    assert _rendered(capfd, "--job", "job.toml")["bundle"]["file_count"] == 4
