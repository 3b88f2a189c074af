"""Secrets in saved plans: none is in the file, each is given again, and what cannot be told apart is not saved."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from gpulayer import cli
from gpulayer.errors import GpulayerError, PlanFileError
from gpulayer.plan import plan_json
from gpulayer.recipe import read_recipe
from tests.support.saved_plans import JOB_ID, edit, faults, save, to_run, write_files

if TYPE_CHECKING:
    from pathlib import Path

TOKEN = "hf-5e77" + "aa01$x"
OTHER = "k-81c9d2-other"
PASSWORD = "pa55" + "-b2c3"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a map whose nodes have a secret of their own, and a script."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("GPULAYER_HOSTS", raising=False)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    write_files(tmp_path)
    return tmp_path


def words_of(node: int = 0, **options: object) -> list[str]:
    """Return the script's own words on a node of the plan that would be run."""
    argv = to_run(**options).nodes[node].argv  # type: ignore[arg-type]  # as they are given
    return list(argv[argv.index("--") + 1 :])


def test_a_secret_variable_is_given_again(folder: Path) -> None:
    """By name or with a value; what stands in the file is `***`, and a placeholder in the value is one again."""
    save("-N", "2", "-e", f"HF_TOKEN={TOKEN.replace('$x', '-')}$NODE_ID", "-e", "PLAIN=a$$b", "train.py")
    text = (folder / "plan.json").read_text()
    assert "5e77aa01" not in text
    assert faults() == ["secrets: HF_TOKEN: not kept in the plan: give them again, `-e HF_TOKEN`"]
    given = to_run(env=[f"HF_TOKEN={TOKEN.replace('$x', '-')}$NODE_ID"])
    assert [node.env["HF_TOKEN"] for node in given.nodes] == ["hf-5e77aa01-n01", "hf-5e77aa01-n02"]
    passed = to_run(env=["HF_TOKEN"], environ={"HF_TOKEN": "of$HOME and $NODE_ID"})
    assert [node.env["HF_TOKEN"] for node in passed.nodes] == ["of$HOME and $NODE_ID"] * 2
    assert [node.env["PLAIN"] for node in passed.nodes] == ["a$$b"] * 2
    assert plan_json(given) == plan_json(passed) == json.loads(text)


def test_a_variable_that_was_passed_on_is_data_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`-e NAME` is not read for placeholders, neither the first time nor later."""
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    save("-N", "1", "-e", "HF_TOKEN", "train.py")
    assert to_run(env=["HF_TOKEN"]).nodes[0].env["HF_TOKEN"] == TOKEN
    assert to_run(env=["HF_TOKEN=other-${DOLLAR}value"]).nodes[0].env.get("HF_TOKEN") == "other-$value"
    assert TOKEN not in (folder / "plan.json").read_text()


def test_secrets_in_the_command_are_put_where_they_were(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of an option, a setting, a URL, and a variable's value within a word; names are those of the shell form."""
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    typed = TOKEN.replace("$", "${DOLLAR}")
    words = ["--api-key", OTHER, f"--auth=x:{typed}", f"http://me:{PASSWORD}@host/$NODE_ID", "--db-password=0"]
    save("-N", "1", "-e", "HF_TOKEN", "-e", f"PROXY=http://me:{PASSWORD}2@proxy", "train.py", *words)
    text = (folder / "plan.json").read_text()
    assert not [secret for secret in ("5e77aa01", OTHER, PASSWORD) if secret in text]
    names = "API_KEY, HF_TOKEN, URL_PASSWORD, DB_PASSWORD, PROXY_PASSWORD"
    assert faults() == [f"secrets: {names}: not kept in the plan: give them again, `-e {names.replace(', ', ' -e ')}`"]
    given = [f"API_KEY={OTHER}", "HF_TOKEN", f"URL_PASSWORD={PASSWORD}", "DB_PASSWORD=0", "PROXY_PASSWORD=it"]
    arrived = ["--api-key", OTHER, f"--auth=x:{TOKEN}", f"http://me:{PASSWORD}@host/n01", "--db-password=0"]
    assert words_of(env=given) == ["train.py", *(word.replace("$", "$$") for word in arrived)]
    assert to_run(env=given).nodes[0].env["PROXY"] == "http://me:it@proxy"
    new = ["API_KEY=new-key-1", "HF_TOKEN=new-token-1", "URL_PASSWORD=new-password", "DB_PASSWORD=1", given[-1]]
    arrived = ["--api-key", "new-key-1", "--auth=x:new-token-1", "http://me:new-password@host/n01", "--db-password=1"]
    assert words_of(env=new) == ["train.py", *arrived]


def test_secrets_of_the_map_come_from_the_map(folder: Path) -> None:
    """Also where one stands in the command; `-e` wins. A job's own variable is never taken from there."""
    save("-N", "1", "train.py", "--auth=of-the-map-12345")
    assert "of-the-map" not in (folder / "plan.json").read_text()
    assert words_of() == ["train.py", "--auth=of-the-map-12345"]
    assert to_run().nodes[0].env.get("MAP_TOKEN") == "of-the-map-12345"
    save("-N", "1", "-e", "MAP_TOKEN=given-98765", "train.py")
    assert faults() == ["secrets: MAP_TOKEN: not kept in the plan: give them again, `-e MAP_TOKEN`"]
    assert to_run(env=["MAP_TOKEN=given-98765"]).nodes[0].env.get("MAP_TOKEN") == "given-98765"


def test_variables_that_no_secret_is_called_are_refused(folder: Path) -> None:
    """`-e` beside a plan is for its secrets, and changes nothing else."""
    save("-N", "1", "-e", "HF_TOKEN=x", "train.py")
    assert faults(env=["HF_TOKEN=x", "OTHER=1", "MORE=2"]) == [
        "secrets: OTHER, MORE: given with `-e`, and the plan has no secret of that name"
    ]


@pytest.mark.parametrize(
    "given",
    [
        ["HF_TOKEN=short", f"API_KEY={OTHER}"],
        ["HF_TOKEN=123456789", f"API_KEY={OTHER}"],
        [f"HF_TOKEN={OTHER}", f"API_KEY={OTHER}"],
        ["HF_TOKEN=hf-5e77aa01", "API_KEY=12"],
        ["HF_TOKEN=train.py", f"API_KEY={OTHER}"],
        ["HF_TOKEN=of-n01-secret", f"API_KEY={OTHER}"],
    ],
    ids=["too short", "a number", "two alike", "an option's number", "stands elsewhere", "stands there on one node"],
)
def test_a_secret_that_would_be_shown_is_refused(folder: Path, given: list[str]) -> None:
    """A value that gpulayer could not hide in the places of the first one changes the plan, and is not shown."""
    words = ["--api-key", OTHER, "--auth=hf-5e77aa01", "of-$NODE_ID-secret"]
    save("-N", "1", "-e", "HF_TOKEN=hf-5e77aa01", "train.py", *words)
    with pytest.raises(PlanFileError) as caught:
        to_run(env=given)
    assert str(caught.value) == (
        "plan.json: with the secrets that were given, the job would be another one: API_KEY, HF_TOKEN"
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["train.py", "http://a:first-one@x", "http://b:second-one@x"],
            "two secrets of the job would both be called `URL_PASSWORD`",
        ),
        (
            ["-e", "API_KEY=one-of-them-1", "train.py", "--api-key", "another-one-2"],
            "two secrets of the job would both be called `API_KEY`",
        ),
        (
            ["-e", "A_TOKEN=of-n01-secret", "train.py", "of-$NODE_ID-secret"],
            "a secret in the command cannot be told from the text around it",
        ),
    ],
    ids=["passwords of URLs", "a variable and an option", "made of a placeholder"],
)
def test_a_plan_whose_secrets_cannot_be_told_apart_is_not_saved(
    folder: Path, words: list[str], message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """It is refused with the reason, and nothing is written; it can be printed and run, and says nothing of them."""
    code = cli.run_cli(["render", "-o", "plan.json", "-N", "1", *words])
    err = capfd.readouterr().err
    assert (code, err.partition("\n")[0]) == (2, f"gpulayer: error: the plan cannot be saved: {message}")
    assert not (folder / "plan.json").exists()
    assert cli.run_cli(["render", "--format", "json", "--job-id", JOB_ID, "-N", "1", *words]) == 0
    text = capfd.readouterr().out
    assert json.loads(text)["recipe"] is None
    assert not [secret for secret in ("first-one", "one-of-them", "another-one", "of-n01") if secret in text]


def test_words_that_look_like_a_mask_are_words(folder: Path) -> None:
    """`***` in a command is no blank."""
    save("-N", "1", "-e", "HF_TOKEN=hf-5e77aa01", "train.py", "***", "--x=***", "--auth=***hf-5e77aa01***")
    assert words_of(env=["HF_TOKEN=hf-5e77aa01"]) == ["train.py", "***", "--x=***", "--auth=***hf-5e77aa01***"]


@pytest.mark.parametrize(
    "change",
    [
        {"cwd": "relative"},
        {"cwd": "/nul\0"},
        {"hosts": None},
        {"more": 1},
        {"job": {}},
        {"job": []},
        {"blanks": []},
        {"blanks": {"args.0": ["", "A", ""]}},
        {"blanks": {"args.9": ["x"]}},
        {"blanks": {"env.HF_TOKEN": ["", "no name", ""]}},
        {"blanks": {"env.HF_TOKEN": ["", "", "***"]}},
        {"blanks": {"env.HF_TOKEN": ["***", "A"]}},
        {"blanks": {"env.HF_TOKEN": 5}},
    ],
    ids=str,
)
def test_what_is_no_recipe_is_refused(folder: Path, change: dict[str, object]) -> None:
    """Other keys, other types, and blanks where the job has none."""
    save("-N", "1", "-e", "HF_TOKEN=x", "train.py", "word")
    edit(folder / "plan.json", lambda document: document["recipe"].update(change), sign=True)
    recipe = json.loads((folder / "plan.json").read_text())["recipe"]
    with pytest.raises(PlanFileError, match=r"^what the plan was made from cannot be read: it has "):
        read_recipe(recipe)
    with pytest.raises(GpulayerError):
        to_run(env=["HF_TOKEN=x"])


def test_a_job_of_another_version_is_refused(folder: Path) -> None:
    """A field that is missing or that is not known, and a value that would be read as another."""
    save("-N", "1", "train.py")
    recipe = json.loads((folder / "plan.json").read_text())["recipe"]
    for job in (
        {**recipe["job"], "new": 1},
        {key: value for key, value in recipe["job"].items() if key != "args"},
        {**recipe["job"], "nnodes": "1"},
    ):
        with pytest.raises(PlanFileError, match="another job than this version of gpulayer can write"):
            read_recipe({**recipe, "job": job})
    with pytest.raises(GpulayerError, match="a number of seconds above 0 is expected"):
        read_recipe({**recipe, "job": {**recipe["job"], "timeout_s": -1}})
