"""What people and scripts read of a plan, as whole texts, and that both command forms can really be pasted."""

from __future__ import annotations

import json
import os
import re
import subprocess
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from gpulayer.job import EnvValue
from gpulayer.review import WIDTH, quote, render_json, render_shell, render_text
from tests.support.plans import GOLDEN, node, nodes, plan, script

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from gpulayer.plan import Plan

AWKWARD = (
    "",
    "it's",
    'say "hi"',
    "back\\slash",
    "bang!",
    "two\nlines",
    "a$$b",
    "$5",
    "*",
    "~",
    "--",
    "Grüße",
    "tab\t.",
)
UNPRINTABLE = ("\x1b[31mred", "\r", "it's\x07\\", "\udcff7", "\x7f", "\x85é")


def sample() -> Plan:
    """Return a plan with everything in it that has a look of its own."""
    job = script(
        *("--config", "conf/7b.yaml", "--name", "run of $NODE_ID", "--json", '{"a": false}', "--resume"),
        env={"HF_TOKEN": EnvValue("hf_abc", literal=True), "DATA": EnvValue("/data/$NODE_RANK")},
        comm_backend="nccl",
        timeout_s=3600.0,
    )
    chosen = [
        node(1, ssh="gpu-01.cluster", user="me", port=2222, gpus=8, python="/opt/torch/bin/python", workdir="/my work"),
        node(2, gpus=[4, 5], interface="ib0", env={"NCCL_DEBUG": "WARN"}),
        node(3, gpus=1),
    ]
    return replace(plan(job, chosen), gpulayer="1.2.3")


@pytest.mark.parametrize(
    ("name", "render"), [("plan.txt", render_text), ("plan.sh", render_shell), ("plan.json", render_json)]
)
def test_golden(name: str, render: Callable[[Plan], str]) -> None:
    """The three forms of one plan are these texts. GPULAYER_UPDATE_GOLDEN=1 writes them anew, and fails once."""
    text = render(sample())
    if os.environ.get("GPULAYER_UPDATE_GOLDEN"):
        (GOLDEN / name).write_text(text, encoding="utf-8")
        pytest.fail(f"{name} was written: read the difference, then run without GPULAYER_UPDATE_GOLDEN")
    assert text == (GOLDEN / name).read_text(encoding="utf-8")


def test_text_width() -> None:
    """The text form keeps to its width, but for words that are longer themselves."""
    lines = render_text(plan(script(*map(str, range(300)), "x" * 300), nodes(1, 2))).splitlines()
    wide = [line for line in lines if len(line) > WIDTH]
    assert len(wide) == 2
    assert all(line.split() == ["x" * 300] for line in wide)


def test_text_of_one_node() -> None:
    """A plain job on one node has a short heading, in the singular."""
    assert render_text(plan(script(), nodes(1))).splitlines()[:4] == [
        "job 20261129-150210-k3f9: 1 node, 1 process",
        "rendezvous: 10.0.0.11 port 29500",
        "limits: join 300 s, grace 30 s, lost after 30 s",
        "",
    ]


def test_practice_is_said() -> None:
    """A plan on a practice cluster says so."""
    text = render_text(plan(script(), [node(1, address="127.0.0.1")], practice=True))
    assert "practice: all nodes are this machine\n" in text


def test_json_is_the_plan() -> None:
    """The JSON form is one document, pure ASCII, whatever the arguments are."""
    text = render_json(plan(script("Grüße", "\udcff"), nodes(1)))
    assert text.isascii()
    assert json.loads(text)["nodes"][0]["argv"][-2:] == ["Grüße", "\udcff"]


@pytest.mark.parametrize("render", [render_text, render_shell, render_json])
def test_secrets_are_not_shown(render: Callable[[Plan], str]) -> None:
    """No form of the plan shows a value whose name looks secret."""
    assert "hf_abc" not in render(sample())


@pytest.mark.parametrize("render", [render_text, render_shell, render_json])
def test_safe_to_print(render: Callable[[Plan], str]) -> None:
    """Nothing in any form can move a terminal's cursor or fail to be written as UTF-8."""
    text = render(plan(script(*UNPRINTABLE), nodes(1)))
    text.encode()
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]", text)


def command_in_text(text: str) -> str:
    """Return the command of a one-node text form, as somebody would copy it."""
    return text.partition("\n  command   ")[2]


def whole(text: str) -> str:
    """Return all of it: the comment of the shell form is pasted too."""
    return text


@pytest.mark.parametrize("shell", ["bash", "sh"])
@pytest.mark.parametrize(("render", "copied"), [(render_text, command_in_text), (render_shell, whole)])
def test_pasted(tmp_path: Path, shell: str, render: Callable[[Plan], str], copied: Callable[[str], str]) -> None:
    """A pasted command starts the same argv in the same folder with the same environment, the secret from the shell."""
    workdir = tmp_path / "a'$(touch pwned)'b"
    workdir.mkdir()
    python = tmp_path / "my python"
    python.write_text('#!/bin/sh\npwd\nprintf "%s\\0" "$0" "$@" "$A" "$HF_TOKEN" "$OMP_NUM_THREADS"\n')
    python.chmod(0o700)
    arguments = AWKWARD if shell == "sh" else (*AWKWARD, *UNPRINTABLE)
    env = {"A": EnvValue("64(x2) 'q'\n$", literal=True), "HF_TOKEN": EnvValue("not this")}
    made = plan(
        script(*arguments, "y" * 200, workdir=str(workdir).replace("$", "${DOLLAR}"), python=str(python), env=env),
        nodes(2),
    )
    done = subprocess.run(
        [shell, "-c", copied(render(made))],
        env={"HF_TOKEN": "from here", "PATH": os.environ["PATH"]},
        capture_output=True,
        check=True,
        cwd=tmp_path,
    )
    folder, _, words = done.stdout.partition(b"\n")
    expected = [*made.nodes[0].argv, "64(x2) 'q'\n$", "from here", "1"]
    assert folder == os.fsencode(workdir)
    assert words.split(b"\0")[:-1] == [os.fsencode(word) for word in expected]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a'$(touch pwned)'b", "my python"]


def test_secret_without_value(tmp_path: Path) -> None:
    """Pasting where the secret is not set stops, naming it, instead of running without it."""
    command = render_shell(plan(script(env={"A.KEY": EnvValue("x")}), [node(1, workdir=str(tmp_path))]))
    done = subprocess.run(["sh", "-c", command], env={}, capture_output=True, check=False, text=True)
    assert done.returncode != 0
    assert "_A_KEY" in done.stderr


@pytest.mark.parametrize(
    ("word", "quoted"),
    [("plain", "plain"), ("", "''"), ("a b", "'a b'"), ("two\nlines", "'two\nlines'"), ("\x1b7'é", r"$'\0337\047é'")],
)
def test_quote(word: str, quoted: str) -> None:
    """Words are quoted as in any shell; only what must not be printed is written in octal."""
    assert quote(word) == quoted
