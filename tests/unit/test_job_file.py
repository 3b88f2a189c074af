"""A job file says what to run: each key is obeyed, options win over it, and what cannot be obeyed is refused."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jsonschema
import pytest

from docs.generate_schemas import schema_text
from gpulayer import cli, launch
from gpulayer.errors import JobFileError
from gpulayer.job import DistributedJob, EnvValue
from gpulayer.job_file import JobFile, RendezvousKeys, load_job
from gpulayer.job_init import job_template

if TYPE_CHECKING:
    from collections.abc import Callable

    from gpulayer.launch import LaunchSettings
    from gpulayer.plan import Plan

HOSTS = '[defaults]\ngpus = 2\nworkdir = "/work"\n\n[nodes."n[01-03]"]\naddress = "10.9.0.[1-3]"\n'
PLAIN = 'entrypoint = "train.py"\n'

Json = dict[str, Any]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a hosts map of three nodes, and code in a folder `code`."""
    (tmp_path / "code/sub").mkdir(parents=True)
    (tmp_path / "code/sub/train.py").touch()
    (tmp_path / "hosts.toml").write_text(HOSTS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("GPULAYER_HOSTS", raising=False)
    return tmp_path


def run(capfd: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    """Run a command line in this process: exit code, stdout, stderr."""
    capfd.readouterr()
    code = cli.run_cli(list(words))
    out, err = capfd.readouterr()
    return code, out, err


def rendered(capfd: pytest.CaptureFixture[str], *words: str) -> Json:
    """Return the plan that these words make."""
    code, out, err = run(capfd, "render", "--job-id", "job", "--format", "json", *words)
    assert (code, err) == (0, "")
    plan: Json = json.loads(out)
    return plan


def from_file(capfd: pytest.CaptureFixture[str], folder: Path, text: str, *words: str) -> Json:
    """Return the plan of a job file."""
    (folder / "job.toml").write_text(text)
    return rendered(capfd, "--job", "job.toml", *words)


def argv(plan: Json) -> list[str]:
    """Return the command of the first node."""
    words: list[str] = plan["nodes"][0]["argv"]
    return words


def env(plan: Json) -> Json:
    """Return the environment of the first node."""
    variables: Json = plan["nodes"][0]["env"]
    return variables


def script_of(plan: Json) -> list[str]:
    """Return the script and its arguments, as the first node gets them."""
    words = argv(plan)
    return words[words.index("--") + 1 :]


# For each key: lines of a file, and what they make of the plan.
KEYS: dict[str, tuple[str, Callable[[Json], bool]]] = {
    "entrypoint": ('entrypoint = "other.py"', lambda plan: script_of(plan) == ["other.py"]),
    "args": (PLAIN + 'args = ["--lr", "$NODE_RANK"]', lambda plan: script_of(plan) == ["train.py", "--lr", "0"]),
    "module": (
        PLAIN + "module = true",
        lambda plan: argv(plan)[argv(plan).index("--") - 1] == "--module",
    ),
    "nnodes": (PLAIN + "nnodes = 2", lambda plan: plan["nnodes"] == 2),
    "nproc_per_node": (PLAIN + "nproc_per_node = 3", lambda plan: plan["world_size"] == 9),
    "comm_backend": (PLAIN + 'comm_backend = "gloo"', lambda plan: env(plan).get("GPULAYER_COMM_BACKEND") == "gloo"),
    "python": (PLAIN + 'python = "/opt/py"', lambda plan: argv(plan)[0] == "/opt/py"),
    "workdir": (PLAIN + 'workdir = "/else/where"', lambda plan: plan["nodes"][2]["workdir"] == "/else/where"),
    "bundle": (
        PLAIN + 'bundle = "code"\nworkdir = "sub"',
        lambda plan: (
            bool(plan["bundle"])
            and Path(plan["nodes"][2]["workdir"]) == Path(f"/tmp/gpulayer-{plan['job_id']}-n2", "work", "sub")
        ),
    ),
    "launcher": (PLAIN + 'launcher = "deepspeed"', lambda plan: argv(plan)[2] == "deepspeed.launcher.launch"),
    "rendezvous.kind": (PLAIN + 'rendezvous.kind = "c10d"', lambda plan: "--local-addr" in argv(plan)),
    "outputs": (PLAIN + 'outputs = ["model.pt"]', lambda plan: "model.pt" in plan["nodes"][0]["outputs"]),
    "max_output_size": (PLAIN + 'max_output_size = "1GB"', lambda plan: plan["max_output_bytes"] == 10**9),
    "interface": (PLAIN + 'interface = "ib0"', lambda plan: plan["nodes"][1]["interface"] == "ib0"),
    "timeout_s": (PLAIN + "timeout_s = 90", lambda plan: plan["timeout_s"] == 90),
    "grace_s": (PLAIN + "grace_s = 0.5", lambda plan: plan["grace_s"] == 0.5),
    "lost_after_s": (PLAIN + "lost_after_s = 8", lambda plan: plan["lost_after_s"] == 8),
    "rendezvous.port": (PLAIN + "rendezvous.port = 4000", lambda plan: plan["master_port"] == 4000),
    "rendezvous.join_timeout_s": (
        PLAIN + "rendezvous.join_timeout_s = 7",
        lambda plan: plan["join_timeout_s"] == 7 and "timeout=7" in argv(plan),
    ),
    "env": (PLAIN + 'env = { A = "$NODE_ID" }', lambda plan: env(plan).get("A") == "n01"),
}
# Keys that have one value, and what is said of any other.
ONE_VALUE = {
    "failure_policy": ('"keep_going"', "the first failure ends the job everywhere"),
    "max_attempts": ("2", "a distributed job is not repeated behind its user's back"),
}
TESTED_ELSEWHERE = {"max_bundle_size"}  # test_bundle_options.py


def test_each_key_has_its_row() -> None:
    """A key that is added needs a row that shows what it does."""
    keys = set(JobFile.model_fields) - {"rendezvous"} | {f"rendezvous.{name}" for name in RendezvousKeys.model_fields}
    assert keys == KEYS.keys() | ONE_VALUE.keys() | TESTED_ELSEWHERE


@pytest.mark.parametrize("key", KEYS)
def test_each_key_is_obeyed(
    key: str, folder: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a key says is in the plan, `run` carries out that very plan, and without the key it is another one."""
    sent: list[Plan] = []

    def launched(plan: Plan, *_: object) -> int:
        sent.append(plan)
        return 0

    monkeypatch.setattr(launch, "launch", launched)
    text, is_obeyed = KEYS[key]
    plain = from_file(capfd, folder, PLAIN)
    plan = from_file(capfd, folder, text)
    assert is_obeyed(plan)
    assert not is_obeyed(plain)
    assert run(capfd, "run", "--job-id", "job", "--job", "job.toml") == (0, "", "")
    assert [one.nodes[0].argv for one in sent] == [tuple(argv(plan))]
    assert [one.master_port for one in sent] == [plan["master_port"]]


@pytest.mark.parametrize("key", ONE_VALUE)
def test_a_key_of_one_value_says_why_there_is_no_other(key: str, folder: Path) -> None:
    """The value that there is changes nothing; any other is refused with the reason."""
    value, reason = ONE_VALUE[key]
    with pytest.raises(JobFileError, match=f"job.toml: {key} = {value} is not obeyed: {reason}") as caught:
        load_job(folder / "job.toml", f"{PLAIN}{key} = {value}")
    assert str(caught.value.hint).startswith("leave it out")
    default = json.dumps(DistributedJob.model_fields[key].default)
    assert load_job(folder / "job.toml", f"{PLAIN}{key} = {default}").job() == load_job(folder / "j", PLAIN).job()


def test_the_default_port_of_a_file_is_a_port_that_was_asked_for(folder: Path) -> None:
    """A job whose file names 29500 does not move to another port."""
    assert load_job(folder / "job.toml", PLAIN).job().rendezvous.port_is_default
    asked = load_job(folder / "job.toml", PLAIN + "rendezvous.port = 29500").job().rendezvous
    assert (asked.port, asked.port_is_default) == (29500, False)


# --- options win ----------------------------------------------------------------------------------------------------

FULL = """
entrypoint = "train.py"
args = ["--epochs", "3"]
module = true
nnodes = 2
nproc_per_node = 1
comm_backend = "gloo"
python = "/file/python"
workdir = "/file"
interface = "eth7"
timeout_s = 1000
grace_s = 11
lost_after_s = 12
rendezvous = { port = 4100, join_timeout_s = 13 }
env = { A = "file", B = "file" }
"""
OVERRIDES: list[tuple[list[str], Callable[[Json], bool]]] = [
    (["-N", "1"], lambda plan: plan["nnodes"] == 1),
    (["--nproc-per-node", "2"], lambda plan: plan["world_size"] == 4),
    (["--backend", "nccl"], lambda plan: env(plan)["GPULAYER_COMM_BACKEND"] == "nccl"),
    (["--python", "/opt/py"], lambda plan: argv(plan)[0] == "/opt/py"),
    (["-C", "/option"], lambda plan: plan["nodes"][0]["workdir"] == "/option"),
    (["--interface", "eth8"], lambda plan: plan["nodes"][0]["interface"] == "eth8"),
    (["--timeout", "5"], lambda plan: plan["timeout_s"] == 5),
    (["--grace", "6"], lambda plan: plan["grace_s"] == 6),
    (["--lost-after", "7"], lambda plan: plan["lost_after_s"] == 7),
    (["--master-port", "4200"], lambda plan: (plan["master_port"], plan["join_timeout_s"]) == (4200, 13)),
    (["--join-timeout", "8"], lambda plan: (plan["master_port"], plan["join_timeout_s"]) == (4100, 8)),
    (["-e", "A=option"], lambda plan: (env(plan)["A"], env(plan)["B"]) == ("option", "file")),
    (["other.py", "x"], lambda plan: script_of(plan) == ["other.py", "x"] and "--module" not in argv(plan)),
    (["-m", "pkg"], lambda plan: script_of(plan) == ["pkg"] and "--module" in argv(plan)),
]


@pytest.mark.parametrize(("words", "is_obeyed"), OVERRIDES, ids=[" ".join(words) for words, _ in OVERRIDES])
def test_options_win_over_the_file(
    words: list[str], is_obeyed: Callable[[Json], bool], folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """What is typed replaces what the file says, and nothing else of it."""
    plain, plan = from_file(capfd, folder, FULL), from_file(capfd, folder, FULL, *words)
    assert is_obeyed(plan)
    assert not is_obeyed(plain)


def test_a_file_is_what_the_same_options_are(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A job file and a command line that say the same make the same plan."""
    words = [
        *("-N", "2", "--nproc-per-node", "1", "--backend", "gloo", "--python", "/file/python", "-C", "/file"),
        *("--interface", "eth7", "--timeout", "1000", "--grace", "11", "--lost-after", "12", "--master-port", "4100"),
        *("--join-timeout", "13", "-e", "A=file", "-e", "B=file", "-m", "train.py", "--epochs", "3"),
    ]
    assert from_file(capfd, folder, FULL) == rendered(capfd, *words)


def test_the_checks_take_the_file_too(
    folder: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`check` looks for the file's script and backend, and `run` has the same looked for."""
    asked: list[tuple[str | None, bool, str | None]] = []

    def looked_for(preflight: Any) -> int:
        asked.append((preflight.script, preflight.is_module, preflight.options.backend))
        return 0

    def launched(_: Plan, settings: LaunchSettings, __: object) -> int:
        return looked_for(settings.preflight)

    monkeypatch.setattr(launch, "check_nodes", lambda _plan, _ssh, preflight, *_, **__: looked_for(preflight))
    monkeypatch.setattr(launch, "launch", launched)
    (folder / "job.toml").write_text(FULL)
    for words in (["check", "--job", "job.toml"], ["run", "--job", "job.toml"], ["check", "s.py"], ["check"]):
        assert run(capfd, *words) == (0, "", "")
    assert asked == [("train.py", True, "gloo"), ("train.py", True, "gloo"), ("s.py", False, None), (None, False, None)]


# --- where things are -----------------------------------------------------------------------------------------------


def test_folders_start_from_the_file(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A relative `workdir` means the same from wherever gpulayer is started; a `$` in the folder's name is data."""
    home = folder / "a$b ${c}"
    home.mkdir()
    (home / "job.toml").write_text(PLAIN + 'workdir = "sub/$NODE_ID"')
    plan = rendered(capfd, "--job", str(home / "job.toml"))
    assert [node["workdir"] for node in plan["nodes"]] == [f"{home}/sub/n0{number}" for number in (1, 2, 3)]
    assert plan == rendered(capfd, "--job", "a$b ${c}/job.toml")
    assert load_job(home / "job.toml", PLAIN + 'bundle = "src"').fields["bundle"] == f"{home}/src"


def test_without_a_folder_the_map_decides(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A file without `workdir` leaves it to the hosts map."""
    assert from_file(capfd, folder, PLAIN)["nodes"][0]["workdir"] == "/work"


# --- mistakes -------------------------------------------------------------------------------------------------------


def test_all_mistakes_are_told_at_once(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Each with its key, the value that was seen and what to write instead; nothing is contacted."""
    text = """
entrypoint = "-x.py"
args = ["a", 5]
nnodes = 0
timeout = 5
timeout_s = "5"
port = 3
launcher = "mpi"
max_bundle_size = "2 apples"
grace_s = inf
[rendezvous]
kind = "etcd"
workdir = "a"
[env]
RANK = "1"
workdir = "a"
SECRET = 12345
"""
    (folder / "job.toml").write_text(text)
    code, out, err = run(capfd, "run", "--job", "job.toml")
    assert (code, out) == (2, "")
    assert err.splitlines() == [
        "gpulayer: error: job.toml has 14 mistakes:",
        '  entrypoint = "-x.py" begins with `-`; write "./-x.py"',
        "  args[1] = 5 is not a string; put it in quotes",
        '  launcher = "mpi" is not "torchrun", "command", "deepspeed" or "accelerate"',
        "  nnodes = 0 is not 1 or more",
        '  max_bundle_size = "2 apples" is no size; write a number of bytes, or a text such as "200MB" or "1.5GiB"',
        '  timeout_s = "5" is not a number; leave the quotes out: `timeout_s = 5`',
        "  grace_s = Infinity is no number of seconds from 0 up",
        '  [rendezvous] kind = "etcd" is not "static" or "c10d"',
        "  [rendezvous] workdir is a key of the job, not of this table; write it above the first [table] of the file",
        "  [env] RANK cannot be set, torchrun or gpulayer sets it on every node; the layout of the nodes decides it",
        "  [env] workdir is a key of the job, not a variable; write it above the first [table] of the file",
        '  [env] SECRET is not a string; put it in quotes: `SECRET = "..."`',
        "  timeout is an unknown key; did you mean `timeout_s`?",
        "  port is a key of a table; write it below [rendezvous]",
    ]


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("nnodes = 2", "job.toml: has no `entrypoint`, and the command line names no SCRIPT", None),
        ('entrypoint = ""', 'job.toml: entrypoint = "" is empty', "name the script that every rank runs"),
        ("entrypoint = ", "job.toml, line 1: `entrypoint` is no TOML: invalid value", None),
        (
            f"{PLAIN}x{'.a' * 101} = 1",
            "job.toml, line 2: has more than 100 dots, as no line of a job file has",
            None,
        ),
        (None, "job.toml: no such file", "name the job file with `--job FILE`"),
    ],
)
def test_one_mistake(
    text: str | None, message: str, hint: str | None, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A file that says nothing to run, is no TOML or is not there is told in one sentence."""
    if text is not None:
        (folder / "job.toml").write_text(text)
    code, out, err = run(capfd, "render", "--job", "job.toml")
    assert (code, out) == (2, "")
    assert err == f"gpulayer: error: {message}\n" + (f"\nhint: {hint}\n" if hint else "")


def test_secrets_of_a_file_are_not_shown(folder: Path) -> None:
    """A mistake among variables is told without the value."""
    with pytest.raises(JobFileError) as caught:
        load_job(folder / "job.toml", PLAIN + '[env]\nMY_TOKEN = "hunter2"\nOTHER = 77177\n')
    assert "hunter2" not in str(caught.value)
    assert "77177" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "size"), [("5", 5), ('"5B"', 5), ('"2GB"', 2 * 10**9), ('"1.5 GiB"', 3 << 29), ('" 200kB "', 200_000)]
)
def test_sizes(text: str, size: int, folder: Path) -> None:
    """A size is a number of bytes, or a text with a unit of a thousand or of 1024."""
    assert load_job(folder / "job.toml", f"max_bundle_size = {text}").fields["max_bundle_bytes"] == size


@pytest.mark.parametrize("text", ["0", '"0MB"', "-1", '"5"', '"1 mb"', '"1.GB"', "1.5", "true", '""'])
def test_no_sizes(text: str, folder: Path) -> None:
    """Anything else is refused with what to write."""
    with pytest.raises(JobFileError, match="is no size"):
        load_job(folder / "job.toml", f"max_bundle_size = {text}")


# --- the schema, and the file to start from ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        FULL,
        "nnodes = 0",
        "nnodes = '2'",
        "nnodes = true",
        "args = 'x'",
        "args = [1]",
        "grace_s = 0",
        "grace_s = -1",
        "timeout_s = 0",
        "rendezvous = { port = 65536 }",
        "rendezvous = { kind = 'c10d' }",
        "rendezvous = { kind = 'etcd' }",
        "rendezvous = 3",
        "env = { A = 1 }",
        "launcher = 'accelerate'",
        "launcher = 'mpi'",
        "max_attempts = 2",
        "failure_policy = 'fail_fast'",
        "max_bundle_size = '200 MB'",
        "max_bundle_size = '200 apples'",
        "max_bundle_size = 1.5",
        "ports = 1",
    ],
)
def test_the_schema_refuses_what_the_code_refuses(text: str, folder: Path) -> None:
    """Types, unknown keys, choices and bounds of numbers are the same in an editor and here."""
    try:
        taken = bool(load_job(folder / "job.toml", text))
    except JobFileError:
        taken = False
    validator = jsonschema.Draft7Validator(json.loads(schema_text("job")))
    assert validator.is_valid(tomllib.loads(text)) == taken


def test_a_new_file_loads_and_renders_as_it_is(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """`gpulayer job init` writes a file that names its schema, follows it, and is what an empty one would be."""
    assert run(capfd, "job", "init") == (
        *(0, ""),
        "gpulayer: wrote job.toml; `gpulayer render --job job.toml` shows what it would run\n",
    )
    text = (folder / "job.toml").read_text()
    schema = text.splitlines()[0].removeprefix("#:schema ")
    jsonschema.Draft7Validator(json.loads(Path(schema).read_text())).validate(tomllib.loads(text))
    assert rendered(capfd, "--job", "job.toml") == rendered(capfd, "train.py")


def test_a_new_file_has_every_key(folder: Path) -> None:
    """Without the comment signs each key is one that the file can have; what is left out by default is shown so."""
    text = re.sub(r"^# (?=[a-zA-Z_]+ = |\[)", "", job_template("job.toml"), flags=re.MULTILINE)
    said = load_job(folder / "job.toml", text)
    assert said.env == {"NCCL_DEBUG": EnvValue("WARN")}
    keys = set(tomllib.loads(text))
    assert keys == JobFile.model_fields.keys()
    assert set(tomllib.loads(text)["rendezvous"]) == set(RendezvousKeys.model_fields)
    for name in ("module", "launcher", "grace_s", "lost_after_s", "failure_policy", "max_attempts"):
        assert said.fields[name] == DistributedJob.model_fields[name].default


def test_a_file_that_is_there_is_left_alone(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """`gpulayer job init` never overwrites, a broken link included."""
    (folder / "mine.toml").write_text("mine")
    (folder / "link.toml").symlink_to("nowhere")
    for name in ("mine.toml", "link.toml"):
        code, out, err = run(capfd, "job", "init", name)
        assert (code, out) == (2, "")
        assert err == f"gpulayer: error: {name} is there already\n\nhint: name another file: `gpulayer job init FILE`\n"
    assert (folder / "mine.toml").read_text() == "mine"
    assert run(capfd, "job", "init", "no/such/job.toml")[:2] == (2, "")


def test_a_command_takes_the_place_of_a_files_script(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """`exec` keeps what the file says of nodes and limits; nothing that was said of the script is left."""
    (folder / "job.toml").write_text(FULL)
    words = ["exec", "--dry-run", "--format", "json", "--job", "job.toml", "--", "serve", "$NODE_RANK"]
    code, out, err = run(capfd, *words)
    assert (code, err) == (0, "")
    plan = json.loads(out)
    assert (plan["launcher"], plan["nnodes"], plan["grace_s"], plan["master_port"]) == ("command", 2, 11, 4100)
    assert argv(plan) == ["serve", "0"]
