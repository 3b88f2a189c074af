"""What `gpulayer diff` shows a reviewer: each field by name, nodes folded, secrets masked, nothing hidden."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from gpulayer import cli
from gpulayer.plan_diff import differences
from gpulayer.plan_file import parse_plan
from gpulayer.review import render_json
from tests.support.plans import GOLDEN, node, plan, script
from tests.support.saved_plans import edit, replaced, save, write_files

if TYPE_CHECKING:
    from collections.abc import Callable

    from gpulayer.plan_file import SavedPlan

CHECKOUT = Path(__file__).parents[2]
Json = dict[str, Any]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a map and a script."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("GPULAYER_HOSTS", raising=False)
    write_files(tmp_path)
    return tmp_path


def saved(change: Callable[[Json], object] = lambda _: None, **nodes: object) -> SavedPlan:
    """Return the plan of five nodes, changed."""
    job = script("--lr", "1", "data.txt", "--resume", env={}, timeout_s=60.0)
    document = json.loads(render_json(plan(job, [node(number, **nodes) for number in range(1, 6)])))
    change(document)
    return parse_plan(json.dumps(document).encode(), "p")


def _argv(change: Callable[[list[str]], object], *places: int) -> Callable[[Json], object]:
    return lambda document: [change(document["nodes"][place]["argv"]) for place in places or range(5)]


def _put(place: int, *words: str) -> Callable[[list[str]], object]:
    """Change the words from a place on, counted from the script."""

    def change(argv: list[str]) -> None:
        begin = argv.index("train.py") + place
        argv[begin : begin + len(words)] = words

    return change


def _insert(place: int, *words: str) -> Callable[[list[str]], object]:
    def change(argv: list[str]) -> None:
        begin = argv.index("train.py") + place
        argv[begin:begin] = words

    return change


def _of_node(place: int, **values: object) -> Callable[[Json], object]:
    return lambda document: document["nodes"][place].update(values)


CASES: dict[str, tuple[Callable[[Json], object], list[str]]] = {
    "nothing": (lambda _: None, []),
    "a limit": (lambda document: document.update(timeout_s=None), ["timeout_s: 60.0 -> none"]),
    "two fields of the plan": (
        lambda document: document.update(master_port=29501, practice=True),
        ["practice: false -> true", "master_port: 29500 -> 29501"],
    ),
    "an option's value": (_argv(_put(1, "--lr", "2")), ["gpu-[01-05]: argv: --lr 1 -> 2"]),
    "on some nodes": (
        _argv(_put(1, "--lr", "2"), 2, 3, 4),
        ["gpu-[03-05]: argv: --lr 1 -> 2"],
    ),
    "an option more": (_argv(_insert(1, "--seed", "7")), ["gpu-[01-05]: argv: + --seed 7"]),
    "an option less": (_argv(lambda argv: argv.remove("--resume")), ["gpu-[01-05]: argv: - --resume"]),
    "another script": (_argv(_put(0, "other.py")), ["gpu-[01-05]: argv: train.py -> other.py"]),
    "another word": (_argv(_put(3, "other data")), ["gpu-[01-05]: argv: data.txt -> 'other data'"]),
    "an equals sign": (
        _argv(lambda argv: argv.insert(argv.index("train.py") + 1, "--a=1")),
        ["gpu-[01-05]: argv: + --a=1"],
    ),
    "another order": (
        _argv(lambda argv: argv.insert(argv.index("train.py") + 1, argv.pop())),
        ["gpu-[01-05]: argv: + --resume", "gpu-[01-05]: argv: - --resume"],
    ),
    "ranks that do not follow": (_of_node(1, ranks=[7]), ["gpu-02: ranks: [2, 3] -> [7]"]),
    "a login": (
        _of_node(1, ssh="new host", user="me", port=2222),
        ["gpu-02: ssh: gpu-02 -> 'new host'", "gpu-02: user: none -> me", "gpu-02: port: none -> 2222"],
    ),
    "an unknown key": (_of_node(1, extra=[1]), ["gpu-02: extra: none -> [1]"]),
    "what steers a terminal": (
        _of_node(1, workdir="/a\x1b[2J\u202e"),
        ['gpu-02: workdir: /home/me/project -> "/a\\u001b[2J\\u202e"'],
    ),
    "an empty text": (_of_node(1, workdir=""), ["gpu-02: workdir: /home/me/project -> ''"]),
    "what is in a table": (
        lambda document: document.update(bundle={"digest": "sha256:1", "size_bytes": 5}),
        ['bundle: none -> {"digest": "sha256:1", "size_bytes": 5}'],
    ),
    "the environment": (
        lambda document: [
            one["env"].update({"NEW": "a b", "PYTHONUNBUFFERED": "0"}) or one["env"].pop("OMP_NUM_THREADS")
            for one in document["nodes"]
        ],
        [
            "gpu-[01-05]: env: PYTHONUNBUFFERED: 1 -> 0",
            "gpu-[01-05]: env: - OMP_NUM_THREADS=1",
            "gpu-[01-05]: env: + NEW='a b'",
        ],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_each_difference_is_a_line(name: str) -> None:
    """What differs is said, and nothing else is."""
    change, expected = CASES[name]
    assert differences(saved(), saved(change)) == expected


def test_nodes_come_and_go() -> None:
    """Nodes that are in one plan only are named once."""
    fewer = saved(lambda document: document["nodes"].__delitem__(slice(0, 3)))
    assert differences(saved(), fewer) == ["gpu-[01-03]: only in the first plan"]
    assert differences(fewer, saved()) == ["gpu-[01-03]: only in the second plan"]


def test_ranks_that_follow_are_not_told() -> None:
    """With another number of processes every later rank moves, and that is no news."""
    lines = differences(saved(), saved(gpus=4))
    assert lines == [
        "world_size: 10 -> 20",
        "gpu-[01-05]: nproc_per_node: 2 -> 4",
        "gpu-[01-05]: argv: --nproc-per-node 2 -> 4",
    ]


def test_long_words_are_cut_about_their_difference() -> None:
    """Of two long words the place where they differ is shown."""
    one, other = ("x" * 5000 + end + "y" * 5000 for end in ("1", "2"))
    lines = differences(saved(_argv(_put(3, one))), saved(_argv(_put(3, other))))
    assert len(lines) == 1
    assert len(lines[0]) < 700
    assert f"{'x' * 30}1{'y' * 30}" in lines[0]
    assert f"{'x' * 30}2{'y' * 30}" in lines[0]


def test_very_many_words_are_compared_quickly() -> None:
    """Words that cannot be aligned in a moment are counted, and the first that differs is shown."""
    words = [str(number) for number in range(50_000)]
    lines = differences(
        saved(_argv(lambda argv: argv.extend(words), 0)), saved(_argv(lambda argv: argv.extend([*words, "x"]), 0))
    )
    assert len(lines) == 1
    assert lines[0].endswith("the first that differs: none -> x")


# --- job ids --------------------------------------------------------------------------------------------------------


def test_two_plans_of_one_job_differ_in_its_id_alone(folder: Path) -> None:
    """Each render has an id of its own; what follows from it is not told, also where `$JOB_ID` was typed."""
    words = ["-e", "OUT=/data/$JOB_ID", "train.py", "--out", "/data/$JOB_ID"]
    for name in ("one", "two"):
        save("--job-id", f"job-{name}", *words, name=f"{name}.json")
    one, two = (parse_plan((folder / f"{name}.json").read_bytes(), name) for name in ("one", "two"))
    assert differences(one, two) == ["job_id: job-one -> job-two"]


def test_a_job_id_hides_nothing_else(folder: Path) -> None:
    """A word that was typed, or stands in the map, and happens to be an id is told."""
    hosts = (folder / "hosts.toml").read_text()
    for name in ("1", "2"):
        keys = f'ssh = "h{name}"\nscratch = "/s{name}"\nworkdir = "/w{name}"\nenv = {{B = "{name}"}}'
        (folder / "hosts.toml").write_text(hosts.replace("[nodes.n01]", f"[nodes.n01]\n{keys}"))
        save("--job-id", name, "-N", "1", "-e", f"A={name}", "train.py", "--lr", name, name=f"{name}.json")
    one, two = (parse_plan((folder / f"{name}.json").read_bytes(), name) for name in ("1", "2"))
    assert differences(one, two) == [
        "job_id: 1 -> 2",
        "n01: ssh: h1 -> h2",
        "n01: workdir: /w1 -> /w2",
        "n01: job_dir: /s1/gpulayer-JOB-ID-n0 -> /s2/gpulayer-JOB-ID-n0",
        "n01: argv: --log-dir /s1/gpulayer-JOB-ID-n0/ranks -> /s2/gpulayer-JOB-ID-n0/ranks",
        "n01: argv: --lr 1 -> 2",
        "n01: env: B: 1 -> 2",
        "n01: env: A: 1 -> 2",
        "n01: env: GPULAYER_OUTPUT_DIR: /s1/gpulayer-JOB-ID-n0/outputs -> /s2/gpulayer-JOB-ID-n0/outputs",
    ]


# --- the command ----------------------------------------------------------------------------------------------------


def diff(capfd: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    """Run `gpulayer diff`: exit code, stdout, stderr."""
    capfd.readouterr()
    code = cli.run_cli(["diff", *words])
    out, err = capfd.readouterr()
    return code, out, err


def _golden(name: str, text: str) -> None:
    if os.environ.get("GPULAYER_UPDATE_GOLDEN"):
        (GOLDEN / name).write_text(text, encoding="utf-8")
    assert text == (GOLDEN / name).read_text(encoding="utf-8")


def test_golden(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The whole text of a review, of two plans and of one; GPULAYER_UPDATE_GOLDEN=1 writes them."""
    common = ["-e", "HF_TOKEN=hf-5e77aa01"]
    first = ["-N", "2", *common, "-e", "OLD=1", "train.py", "--config", "7b.yaml", "--resume"]
    save("--job-id", "monday", *first, name="monday.json")
    changed = ["--timeout", "3600", *common, "-e", "NEW=2", "train.py", "--config", "13b.yaml", "--seed", "1"]
    replaced(folder / "hosts.toml", "[nodes.n02]", "[nodes.n02]\ngpus = 4")
    replaced(folder / "hosts.toml", '"10.9.0.1"', '"10.9.0.11"')
    (folder / "train.py").write_text("print('other')\n")
    save("--job-id", "tuesday", *changed, name="tuesday.json")
    code, out, err = diff(capfd, "monday.json", "tuesday.json")
    assert (code, err) == (1, "")
    _golden("diff-two.txt", out.replace(str(folder), "/project"))
    code, out, err = diff(capfd, "monday.json")
    assert (code, err) == (1, "")
    _golden("diff-today.txt", out.replace(str(folder), "/project"))
    assert "5e77aa01" not in out


def test_exit_codes_are_those_of_diff(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """0 for the same, 1 for a difference, 2 for trouble; `-` is stdin; nothing on stdout where nothing differs."""
    save(name="a.json")
    assert diff(capfd, "a.json", "a.json") == diff(capfd, "a.json") == (0, "", "gpulayer: no difference\n")
    argv = [sys.executable, "-m", "gpulayer", "diff", "a.json", "-"]
    env = {**os.environ, "PYTHONPATH": str(CHECKOUT)}
    for text, code in (((folder / "a.json").read_text(), 0), ("{}", 2)):
        done = subprocess.run(argv, env=env, input=text, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout) == (code, ""), done.stderr
    assert "stdin: holds no plan of gpulayer" in done.stderr
    assert diff(capfd, "a.json", "none.json")[0] == diff(capfd, "-", "-")[0] == 2
    assert diff(capfd, "a.json", "a.json", "-H", "hosts.toml")[0] == 2
    assert diff(capfd, "a.json", "-H", "hosts.toml")[0] == 0
    assert diff(capfd, "a.json", "-H", "none.toml")[0] == 2


def test_a_plan_that_was_changed_by_hand_is_shown(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Both that it was changed and what was."""
    save(name="a.json")
    save(name="b.json")
    edit(folder / "b.json", lambda document: document.update(grace_s=1.0))
    said = "digest: b.json has been changed since it was made\ngrace_s: 30.0 -> 1.0\n"
    assert diff(capfd, "a.json", "b.json") == (1, said, "")
    edit(folder / "b.json", lambda document: document["recipe"]["job"].update(grace_s=1.0), sign=True)
    assert diff(capfd, "a.json", "b.json") == (1, "grace_s: 30.0 -> 1.0\n", "")
    assert diff(capfd, "b.json")[0] == 1
