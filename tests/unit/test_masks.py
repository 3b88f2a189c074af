"""What counts as secret, and what is shown in its place."""

from __future__ import annotations

import json

import pytest

from gpulayer.errors import PlaceholderError
from gpulayer.events import CommandStarted, NodeLost, NodeSwept, Notice, Survivor
from gpulayer.inventory import parse_survey
from gpulayer.job import EnvValue
from gpulayer.masks import NONE_KNOWN, Secrets, looks_secret, shown, variable_name
from gpulayer.plan import plan_json
from gpulayer.review import render_json, render_shell, render_text
from tests.support.plans import node, nodes, plan, script

TOKEN = "hf_" + "0123456789"


@pytest.mark.parametrize(
    "name",
    [
        *(
            "HF_TOKEN",
            "WANDB_API_KEY",
            "AWS_SECRET_ACCESS_KEY",
            "PASSWORD",
            "DB_PASSWORD",
            "password",
            "apiKey",
            "APIKEY",
        ),
        *("TOKEN_2", "TOKEN2", "SECRETS", "KEY_ID", "a.secret.b", "githubTokenFile"),
    ],
)
def test_secret_names(name: str) -> None:
    """A name with TOKEN, KEY, SECRET or PASSWORD as a word, or at the end of one, is a secret's."""
    assert looks_secret(name)


@pytest.mark.parametrize("name", ["TOKENIZERS_PARALLELISM", "NCCL_DEBUG", "KEYBOARD", "PATH", "SECRETARY", ""])
def test_open_names(name: str) -> None:
    """A name that only begins like one of these words is no secret's."""
    assert not looks_secret(name)


def seen(*words: str, env: dict[str, str] | None = None) -> list[str]:
    """Return the words of a script as they are shown."""
    return [shown(parts) for parts in Secrets(env or {}).words(words)]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--api-key", "abc"], ["--api-key", "***"]),
        (["--api-key=abc"], ["--api-key=***"]),
        (["--api_key=abc=="], ["--api_key=***"]),
        (["-token", "abc"], ["-token", "***"]),
        (["--hf-token", "abc", "abc"], ["--hf-token", "***", "abc"]),
        (
            ["model.api_key=abc", "+wandb.token=x", "++a/b.secret=y"],
            ["model.api_key=***", "+wandb.token=***", "++a/b.secret=***"],
        ),
        (["--password", "1234"], ["--password", "***"]),
        (["--client-secret=true"], ["--client-secret=***"]),
        (["HF_TOKEN=two\nlines"], ["HF_TOKEN=***"]),
        (["--data", "https://me:pa55@host/x?y"], ["--data", "https://me:***@host/x?y"]),
        (["--data=s3://me:pa55@host"], ["--data=s3://me:***@host"]),
    ],
)
def test_secret_arguments(words: list[str], expected: list[str]) -> None:
    """Options and settings with a secret's name hide their value, in either spelling; so do passwords in URLs."""
    assert seen(*words) == expected


@pytest.mark.parametrize(
    "words",
    [
        ["--max-tokens", "4096", "--max-tokens=4096", "model.max_tokens=1e6", "--key-dim", "64", "--use-token=true"],
        ["--pad-token", "<pad>", "--mask-token=[MASK]", "--eos-token="],
        ["--token", "--lr", "0.1"],
        ["--tokenizer", "gpt2", "--monitor", "x", "--lr=0.1", "a=b", "=", "--", "-", ""],
        ["--url", "https://host:8080/a@b", "me@host:path", "file://x"],
    ],
)
def test_open_arguments(words: list[str]) -> None:
    """Counts, switches, tokens of a text, and options without a value are shown as they are."""
    assert seen(*words) == words


def test_a_secret_variables_value_is_hidden_wherever_it_stands() -> None:
    """In an argument with an open name, within a word, in another variable; also as torchrun has to be given it."""
    env = {"HF_TOKEN": "pa$word-123", "URL": "x?auth=pa$word-123&y", "MAX_TOKENS": "100000000", "CACHE_KEY": "default"}
    assert seen("--auth", "pa$word-123", "a:pa$$word-123:b", "100000000", "default", env=env) == (
        ["--auth", "***", "a:***:b", "100000000", "default"]
    )
    secrets = Secrets(env)
    assert shown(secrets.variable("URL")) == "x?auth=***&y"
    assert secrets.hide("it said pa$word-123 twice: pa$word-123") == "it said *** twice: ***"


@pytest.mark.parametrize(
    ("name", "variable"),
    [
        ("HF_TOKEN", "HF_TOKEN"),
        ("--api-key", "API_KEY"),
        ("a.KEY", "_a_KEY"),
        ("+x/y.token", "_x_y_token"),
        ("-9key", "_9KEY"),
    ],
)
def test_the_variable_that_a_secret_is_taken_from(name: str, variable: str) -> None:
    """A shell can have it, and it is near to what was typed."""
    assert variable_name(name).lstrip("_") == variable.lstrip("_")
    assert variable_name(name).isidentifier()


def test_events_are_masked() -> None:
    """Command lines of survivors, reasons and notices; what holds no secret stays the same event."""
    secrets = Secrets({"HF_TOKEN": TOKEN})
    swept = NodeSwept(0, 1, (Survivor(7, "D", f"python train.py --api-key abc --x {TOKEN}"),))
    assert secrets.mask(swept) == NodeSwept(0, 1, (Survivor(7, "D", "python train.py --api-key *** --x ***"),))
    assert secrets.mask(NodeLost(0, f"its supervisor died: {TOKEN}")) == NodeLost(0, "its supervisor died: ***")
    assert secrets.mask(Notice(f"a {TOKEN} b")) == Notice("a *** b")
    assert secrets.mask(CommandStarted(0, 1)) == CommandStarted(0, 1)
    assert NONE_KNOWN.command("python -m x --token=abc  y") == "python -m x --token=***  y"


def test_what_a_node_says_of_left_jobs_is_masked() -> None:
    """`gpulayer ps` and `kill` know no environment: they go by the names of options and settings."""
    process = {"pid": 5, "state": "R", "command": "python t.py --api-key=abc", "age_s": 1.0, "rank": None}
    job = {
        **dict.fromkeys(("job_id", "marker", "user"), "j"),
        "node_rank": 0,
        "supervisor": False,
        "keepers": [],
        "processes": [process],
        "count": 1,
        "age_s": 1.0,
        "command": "python -m torch.distributed.run -- t.py --api-key abc",
    }
    (left,) = parse_survey(json.dumps({"leases": [], "jobs": [job]}).encode()).jobs
    assert left.command == "python -m torch.distributed.run -- t.py --api-key ***"
    assert left.processes[0].command == "python t.py --api-key=***"


def test_no_form_of_a_plan_shows_a_secret() -> None:
    """Text, shell lines and JSON: variables, arguments and passwords in URLs; the commands name where each is from."""
    env = {"HF_TOKEN": EnvValue(TOKEN), "PROXY": EnvValue("http://me:pa55word@proxy")}
    words = ["--api-key", "k-12345", "--auth", TOKEN, "wandb.token=w-12345", f"--x=a:{TOKEN}:b", "--max-tokens", "4096"]
    made = plan(script(*words, env=env), [node(1, env={"DB_PASSWORD": "db-1"})])
    for render in (render_text, render_shell, render_json):
        text = render(made)
        assert not [one for one in (TOKEN, "pa55word", "k-12345", "w-12345", "db-1") if one in text], text
        assert "4096" in text
    shell = render_shell(made)
    for part in (
        'HF_TOKEN="${HF_TOKEN:?}"', 'PROXY=http://me:"${PROXY_PASSWORD:?}"@proxy', '--api-key "${API_KEY:?}"',
        '--auth "${HF_TOKEN:?}"', 'wandb.token="${_wandb_token:?}"', '--x=a:"${HF_TOKEN:?}":b',
    ):  # fmt: skip
        assert part in shell
    assert made.nodes[0].argv[-8:] == tuple(words)
    (shown_node,) = json.loads(json.dumps(plan_json(made)))["nodes"]
    assert shown_node["argv"][-8:] == [
        "--api-key",
        "***",
        "--auth",
        "***",
        "wandb.token=***",
        "--x=a:***:b",
        "--max-tokens",
        "4096",
    ]
    assert shown_node["env"]["PROXY"] == "http://me:***@proxy"


def test_a_dollar_sign_in_a_secret_is_refused_without_showing_it() -> None:
    """The place is named, and not what stands there."""
    env = {"DB_PASSWORD": EnvValue("pa$word-1"), "OPEN": EnvValue("$HOME"), "URL": EnvValue("x://a:pa$ss@h")}
    with pytest.raises(PlaceholderError) as caught:
        plan(script("--password", "s3$cret", env=env), nodes(1, 1))
    assert str(caught.value) == (
        "node gpu-01: argument 2: `$***` has no value there, nor on gpu-02\n"
        "node gpu-01: environment variable `DB_PASSWORD`: `$***` has no value there, nor on gpu-02\n"
        "node gpu-01: environment variable `OPEN`: `$HOME` has no value there, nor on gpu-02\n"
        "node gpu-01: environment variable `URL`: `$***` has no value there, nor on gpu-02"
    )
