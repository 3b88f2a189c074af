"""The command line: help, spellings, errors, and that every option is obeyed."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import gpulayer
from gpulayer import cli, launch
from gpulayer.errors import GpulayerError, NodeError, RefusedError, RequestError
from gpulayer.options import HostsOptions
from gpulayer.options_job import ExecOptions, PlanOptions, RunOptions
from gpulayer.plan import plan_json

if TYPE_CHECKING:
    from collections.abc import Callable

    from gpulayer.findings import CheckOptions
    from gpulayer.launch import LaunchSettings
    from gpulayer.plan import Plan
    from gpulayer.screen import Terminal

GOLDEN = Path(__file__).parent.parent / "golden"
CHECKOUT = Path(__file__).parents[2]

HOSTS = """
[defaults]
gpus = 2
workdir = "/work"

[nodes."n[01-03]"]
address = "10.9.0.[1-3]"
"""
OTHER_HOSTS = '[nodes.other]\naddress = "10.9.9.9"\ngpus = 1\nworkdir = "/work"\n'
SSH_CONFIG = "Host alias\n  HostName 10.9.8.7\n"

Json = dict[str, Any]


class Recorder:
    """Stands in for `launch.launch`: remembers what the command would have carried out."""

    def __init__(self) -> None:
        self.calls: list[tuple[Plan, LaunchSettings]] = []

    def __call__(self, plan: Plan, settings: LaunchSettings, terminal: Terminal) -> int:
        """Return 0, as a job that went well."""
        self.calls.append((plan, settings))
        return 0


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder: with a hosts map of three nodes, and nothing of the user's own about."""
    (tmp_path / "hosts.toml").write_text(HOSTS)
    (tmp_path / "other.toml").write_text(OTHER_HOSTS)
    (tmp_path / "alias.toml").write_text('[nodes.alias]\ngpus = 1\nworkdir = "/work"\n')
    (tmp_path / "config").write_text(SSH_CONFIG)
    (tmp_path / "code").mkdir()
    (tmp_path / "code/train.py").touch()
    (tmp_path / "job.toml").write_text('entrypoint = "other.py"\nenv = { A = "file" }\n')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.delenv("GPULAYER_HOSTS", raising=False)
    return tmp_path


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    """What `run` hands on to launch, which carries nothing out."""
    recorder = Recorder()
    monkeypatch.setattr(launch, "launch", recorder)
    return recorder


def _run(capfd: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    """Run a command line in this process: exit code, stdout, stderr."""
    capfd.readouterr()
    code = cli.run_cli(list(args))
    out, err = capfd.readouterr()
    return code, out, err


def _render(capfd: pytest.CaptureFixture[str], *words: str) -> Json:
    code, out, err = _run(capfd, "render", "--job-id", "job", "--format", "json", *words)
    assert (code, err) == (0, "")
    plan: Json = json.loads(out)
    return plan


# --- help -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "command",
    [
        "",
        "run",
        "render",
        "check",
        "hosts",
        "hosts init",
        "job init",
        "exec",
        "diff",
        "ps",
        "kill",
        "runs",
        "logs",
        "demo",
    ],
)
def test_help_is_the_golden_text(command: str, folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """--help says what tests/golden/help-*.txt holds; GPULAYER_UPDATE_GOLDEN=1 writes it there."""
    words = command.split()
    code, out, err = _run(capfd, *words, "--help")
    assert (code, err) == (0, "")
    path = GOLDEN / f"help-{command.replace(' ', '-') or 'gpulayer'}.txt"
    if os.environ.get("GPULAYER_UPDATE_GOLDEN") == "1":
        path.write_text(out)
    assert out == path.read_text()
    assert _run(capfd, *words, "-h") == (0, out, "")


def test_no_argument_at_all_shows_the_help(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """`gpulayer` alone is a question, not a mistake."""
    assert _run(capfd) == _run(capfd, "--help")


def test_version(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """--version prints name and version on stdout."""
    assert _run(capfd, "--version") == (0, f"gpulayer {gpulayer.__version__}\n", "")


def test_the_module_is_the_command(folder: Path) -> None:
    """`python -m gpulayer` is `gpulayer`: same output, name and exit code."""
    env = {**os.environ, "PYTHONPATH": str(CHECKOUT)}
    argv = [sys.executable, "-m", "gpulayer", "render", "-w", "n09", "train.py"]
    done = subprocess.run(argv, env=env, cwd=folder, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("gpulayer: error: `--nodelist` names n09")


# --- how words are read ---------------------------------------------------------------------------------------------


def test_hyphens_and_underscores_are_alike_in_options_alone(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Long options take both, as torchrun's do; values and the script's own words stay as they are."""
    hyphens = ["--nproc-per-node", "3", "--master-port=4000", "--join-timeout", "9", "--env", "FOO_BAR=a_b"]
    underscores = ["--nproc_per_node", "3", "--master_port=4000", "--join_timeout", "9", "--env", "FOO_BAR=a_b"]
    words = ["my_script.py", "--foo_bar", "a_b", "--foo-bar"]
    plan = _render(capfd, *hyphens, *words)
    assert plan == _render(capfd, *underscores, *words)
    argv = plan["nodes"][0]["argv"]
    assert argv[argv.index("--") + 1 :] == words
    assert plan["nodes"][0]["env"]["FOO_BAR"] == "a_b"


@pytest.mark.parametrize(
    "words",
    [
        ["s.py", "--nnodes", "1", "-N1", "--help", "-h", "--version"],
        ["s.py", "--", "-x", "n01"],
        ["s.py", "", "a b", "--python=x", "-"],
        ["-m", "pkg.mod", "-m", "--module"],
    ],
)
def test_all_after_the_script_is_the_scripts(words: list[str], folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Nothing behind SCRIPT is read as an option of gpulayer, whatever it looks like."""
    plan = _render(capfd, *words)
    argv = plan["nodes"][0]["argv"]
    script = words[1:] if words[0] == "-m" else words
    assert argv[argv.index("--") + 1 :] == script
    assert plan["nnodes"] == 3
    assert ("--module" in argv[: argv.index("--")]) == (words[0] == "-m")


def test_a_double_dash_may_stand_before_the_script(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """`gpulayer render -N 1 -- train.py -- x`: the first `--` ends gpulayer's options, the second is the script's."""
    argv = _render(capfd, "-N", "1", "--", "train.py", "--", "x")["nodes"][0]["argv"]
    assert argv[argv.index("--") :] == ["--", "train.py", "--", "x"]


# --- every option is obeyed -----------------------------------------------------------------------------------------


def _env(plan: Json) -> Json:
    env: Json = plan["nodes"][0]["env"]
    return env


def _argv(plan: Json) -> list[str]:
    argv: list[str] = plan["nodes"][0]["argv"]
    return argv


def _ids(plan: Json) -> list[str]:
    return [node["node_id"] for node in plan["nodes"]]


# For each field: words, and what they make of the plan.
IN_THE_PLAN: dict[str, tuple[list[str], Callable[[Json], bool]]] = {
    "job_file": (["--job", "job.toml"], lambda plan: _env(plan).get("A") == "file"),
    "hosts": (["--hosts", "other.toml"], lambda plan: _ids(plan) == ["other"]),
    "ssh_config": (["-H", "alias.toml", "-F", "config"], lambda plan: plan["master_addr"] == "10.9.8.7"),
    "nnodes": (["-N", "2"], lambda plan: _ids(plan) == ["n01", "n02"]),
    "nodelist": (["-w", "n[02-03]"], lambda plan: _ids(plan) == ["n02", "n03"]),
    "exclude": (["-x", "n02"], lambda plan: _ids(plan) == ["n01", "n03"]),
    "nproc_per_node": (["--nproc-per-node", "3"], lambda plan: plan["world_size"] == 9),
    "module": (["-m"], lambda plan: _argv(plan)[_argv(plan).index("--") - 1] == "--module"),
    "python": (["--python", "/opt/py"], lambda plan: _argv(plan)[0] == "/opt/py"),
    "bundle": (
        ["--bundle", "code"],
        lambda plan: (
            (plan["bundle"]["file_count"], plan["nodes"][1]["workdir"])
            == (1, f"/tmp/gpulayer-{plan['job_id']}-n1/work")
        ),
    ),
    "workdir": (["-C", "/else/where"], lambda plan: plan["nodes"][2]["workdir"] == "/else/where"),
    "env": (["-e", "A=1", "-e", "LANG"], lambda plan: (_env(plan)["A"], _env(plan)["LANG"]) == ("1", "xx_XX")),
    "backend": (["--backend", "nccl"], lambda plan: _env(plan)["GPULAYER_COMM_BACKEND"] == "nccl"),
    "master_port": (["--master-port", "4000"], lambda plan: plan["master_port"] == 4000),
    "interface": (["--interface", "ib0"], lambda plan: plan["nodes"][1]["interface"] == "ib0"),
    "launcher": (["--launcher", "accelerate"], lambda plan: _argv(plan)[2] == "accelerate.commands.launch"),
    "rendezvous": (["--rendezvous", "c10d"], lambda plan: "--local-addr" in _argv(plan)),
    "timeout": (["--timeout", "90.5"], lambda plan: plan["timeout_s"] == 90.5),
    "join_timeout": (["--join-timeout", "7"], lambda plan: plan["join_timeout_s"] == 7 and "timeout=7" in _argv(plan)),
    "grace": (
        ["--grace", "5"],
        lambda plan: (plan["grace_s"], _env(plan)["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"]) == (5, "4"),
    ),
    "lost_after": (["--lost-after", "8"], lambda plan: plan["lost_after_s"] == 8),
    "outputs": (
        ["--outputs", "ckpt/*.pt", "--outputs", "out-$NODE_RANK"],
        lambda plan: [node["outputs"][1] for node in plan["nodes"]] == ["out-0", "out-1", "out-2"],
    ),
    "max_output_size": (["--max-output-size", "3MB"], lambda plan: plan["max_output_bytes"] == 3_000_000),
    "job_id": (["--job-id", "mine"], lambda plan: plan["job_id"] == _env(plan)["GPULAYER_JOB_ID"] == "mine"),
}


def _checks(settings: LaunchSettings) -> CheckOptions:
    assert settings.preflight is not None
    return settings.preflight.options


# For each field that is no matter of the plan: words, and what they make of the way it is carried out.
IN_THE_RUN: dict[str, tuple[list[str], Callable[[LaunchSettings], bool]]] = {
    "ssh_config": (["-F", "config"], lambda settings: settings.ssh.config == Path("config")),
    "connect_timeout": (["--connect-timeout", "3"], lambda settings: settings.ssh.connect_timeout_s == 3),
    "accept_new_host_keys": (["--accept-new-host-keys"], lambda settings: settings.ssh.accept_new_host_keys),
    "run_dir": (["--run-dir", "here"], lambda settings: settings.run_dir == Path("here")),
    "label": (["--label", "id"], lambda settings: settings.console.label == "id"),
    "verbose": (["-v"], lambda settings: settings.console.verbose),
    "as_json": (["--json"], lambda settings: settings.as_json),
    "no_preflight": (["--no-preflight"], lambda settings: settings.preflight is None),
    "preflight_timeout": (["--preflight-timeout", "7"], lambda settings: _checks(settings).limit_s == 7),
    "allow_dirty": (["--allow-dirty"], lambda settings: _checks(settings).allow_dirty),
    "strict": (["--strict"], lambda settings: _checks(settings).strict),
    "backend": (["--backend", "nccl"], lambda settings: _checks(settings).backend == "nccl"),
}
TESTED_ELSEWHERE = {"script", "args", "format", "dry_run", "wait", "max_bundle_size", "output", "plan"}


def test_no_option_is_missing_in_the_tables() -> None:
    """An option that is added needs a row that shows what it does."""
    fields = {field.name for field in dataclasses.fields(RunOptions)}
    assert fields == set(IN_THE_PLAN) | set(IN_THE_RUN) | TESTED_ELSEWHERE
    assert {field.name for field in dataclasses.fields(PlanOptions)} == set(IN_THE_PLAN) | {
        *("script", "args", "format", "max_bundle_size", "output")
    }
    assert {field.name for field in dataclasses.fields(HostsOptions)} == {"hosts", "ssh_config"}


@pytest.mark.parametrize("name", IN_THE_PLAN)
def test_options_change_the_plan(
    name: str, folder: Path, recorder: Recorder, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What an option says is in the plan that `render` prints, and `run` carries out that very plan."""
    monkeypatch.setenv("LANG", "xx_XX")
    words, is_obeyed = IN_THE_PLAN[name]
    plan = _render(capfd, *words, "train.py")
    assert is_obeyed(plan)
    hosts = ["-H", "alias.toml"] if "alias.toml" in words else []
    if "alias.toml" not in words:
        assert plan != _render(capfd, *hosts, "train.py")
    assert _run(capfd, "run", "--job-id", "job", *words, "train.py") == (0, "", "")
    assert [plan_json(sent) for sent, _ in recorder.calls] == [plan]


@pytest.mark.parametrize("name", IN_THE_RUN)
def test_options_change_the_run(name: str, folder: Path, recorder: Recorder, capfd: pytest.CaptureFixture[str]) -> None:
    """What an option says reaches whoever carries the plan out; the plan stays the same."""
    words, is_obeyed = IN_THE_RUN[name]
    assert _run(capfd, "run", "--job-id", "job", "train.py")[0] == 0
    assert _run(capfd, "run", "--job-id", "job", *words, "train.py")[0] == 0
    (plain_plan, plain), (plan, settings) = recorder.calls
    assert not is_obeyed(plain)
    assert is_obeyed(settings)
    assert plan == plain_plan or name == "backend"


def test_script_and_arguments_are_in_the_plan(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """SCRIPT and ARGS are the end of every node's command."""
    for node in _render(capfd, "train.py", "--lr", "$NODE_RANK")["nodes"]:
        assert node["argv"][-4:] == ["--", "train.py", "--lr", str(node["node_rank"])]


def test_exec_takes_the_options_of_run(folder: Path, recorder: Recorder, capfd: pytest.CaptureFixture[str]) -> None:
    """All that is about nodes, limits and how a plan is carried out; nothing that is about a script or ranks."""
    of_run = {field.name for field in dataclasses.fields(RunOptions)}
    of_exec = {field.name for field in dataclasses.fields(ExecOptions)}
    assert of_exec - of_run == {"command"}
    assert of_run - of_exec >= {"script", "module", "launcher", "rendezvous", "join_timeout"}
    words = ["--", "serve", "-N", "9", "--node", "$NODE_RANK"]
    for name in of_exec & IN_THE_PLAN.keys() - {"grace"}:
        options, is_obeyed = IN_THE_PLAN[name]
        if name in {"python", "bundle"} or "LANG" in options:
            continue  # what they make of a script's command
        assert _run(capfd, "exec", "--job-id", "job", *options, *words) == (0, "", "")
        assert is_obeyed(plan_json(recorder.calls[-1][0])), name
    for name in of_exec & IN_THE_RUN.keys():
        options, is_true = IN_THE_RUN[name]
        assert _run(capfd, "exec", *options, *words)[0] == 0
        assert is_true(recorder.calls[-1][1]), name
    code, out, err = _run(capfd, "exec", "-N", "1", "--dry-run", "--format", "json", *words)
    assert (code, err) == (0, "")
    assert json.loads(out)["nodes"][0]["argv"] == ["serve", "-N", "9", "--node", "0"]


def test_forms_of_a_plan(folder: Path, recorder: Recorder, capfd: pytest.CaptureFixture[str]) -> None:
    """Text, JSON and shell lines; --dry-run prints what render prints, and carries nothing out."""
    words = ["--job-id", "job", "-N", "1", "train.py"]
    texts = {}
    for form in ("text", "json", "shell"):
        rendered = _run(capfd, "render", "--format", form, *words)
        assert _run(capfd, "run", "--dry-run", "--format", form, *words) == rendered
        assert (rendered[0], rendered[2]) == (0, "")
        texts[form] = rendered[1]
    assert texts["text"] == _run(capfd, "render", *words)[1]
    assert texts["text"].startswith("job job: 1 node, 2 processes\nrendezvous: 10.9.0.1 port 29500\n")
    assert json.loads(texts["json"])["job_id"] == "job"
    assert texts["shell"].splitlines()[0] == "# node 0: n01, ssh n01"
    assert recorder.calls == []


def test_job_ids_are_new_each_time(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Without --job-id two jobs have different ids."""
    ids = {json.loads(_run(capfd, "render", "--format", "json", "s.py")[1])["job_id"] for _ in range(3)}
    assert len(ids) == 3


def test_hosts_shows_the_map(folder: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """One row a node in the order of drawing, from the file that --hosts, $GPULAYER_HOSTS or this folder names."""
    code, out, err = _run(capfd, "hosts")
    assert (code, err) == (0, "")
    rows = [line.split() for line in out.splitlines()]
    assert rows[0] == ["node", "state", "ssh", "address", "gpus", "python", "workdir"]
    assert rows[1:] == [[f"n0{n}", "free", f"n0{n}", f"10.9.0.{n}", "2", "python3", "/work"] for n in (1, 2, 3)]
    other = _run(capfd, "hosts", "-H", "other.toml")[1]
    assert other.splitlines()[1].split() == ["other", "free", "other", "10.9.9.9", "1", "python3", "/work"]
    monkeypatch.setenv("GPULAYER_HOSTS", "other.toml")
    assert _run(capfd, "hosts")[1] == other


# --- errors ---------------------------------------------------------------------------------------------------------

RUN_HELP = "`gpulayer run --help` shows what it takes"
ERRORS: list[tuple[list[str], str, str]] = [
    (["run"], "there is no SCRIPT to run, and no `--job FILE` that names one", RUN_HELP),
    (["run", "-m"], "`--module` says what SCRIPT is, and there is none", "name the module, or leave it out"),
    (["run", "--job", "no.toml"], "no.toml: no such file", "name the job file with `--job FILE`"),
    (
        ["exec", "-N", "1"],
        "there is no command to run, and no `--job FILE` that has one",
        "write it after the options: `gpulayer exec -N 2 -- CMD ARGS...`",
    ),
    (
        ["exec", "--job", "job.toml"],
        "`exec` is for commands, and `launcher` in job.toml is `torchrun`",
        "`gpulayer run --job job.toml` runs it",
    ),
    (["run", "--no-such-thing", "s.py"], "No such option: --no-such-thing", RUN_HELP),
    (["run", "-N"], "Option '-N' requires an argument", RUN_HELP),
    (["run", "-N", "two", "s.py"], "Invalid value for '-N' / '--nnodes': `two` is not a whole number", RUN_HELP),
    (["run", "--grace", "1m", "s.py"], "Invalid value for '--grace': `1m` is not a number of seconds", RUN_HELP),
    (["run", "--label", "x", "s.py"], "Invalid value for '--label': 'x' is not one of 'rank', 'id'", RUN_HELP),
    (["launch"], "No such command 'launch'", "`gpulayer --help` shows what it takes"),
    (["job"], "`job` alone is no command: there is `gpulayer job init`", "`gpulayer --help` shows what it takes"),
    (
        ["job", "int"],
        "`job` alone is no command: there is `gpulayer job init`",
        "`gpulayer --help` shows what it takes",
    ),
    (["hosts", "more"], "Got unexpected extra argument(s) (more)", "`gpulayer hosts --help` shows what it takes"),
    (["render", "-H", "no.toml", "s.py"], "{folder}/no.toml: no such file", "name the hosts map with `--hosts FILE`"),
    (
        ["render", "-w", "n09", "s.py"],
        "`--nodelist` names n09, which the hosts map does not have",
        "the hosts map has n[01-03]",
    ),
    (
        ["run", "--format", "json", "s.py"],
        "`--format json` says how a plan is printed, and a run prints none",
        "add `--dry-run` to print the plan, or leave `--format` out",
    ),
    (
        ["run", "--json", "--dry-run", "s.py"],
        "`--json` is about a run, and `--dry-run` makes none",
        "add `--format json` instead",
    ),
    (
        ["run", "--json", "-v", "s.py"],
        "`--verbose` is about what people see, and `--json` is for scripts",
        "keep one of the two",
    ),
    (["logs", "last"], "there is no run in runs", "`gpulayer logs DIR` takes a run directory too"),
    (["logs", "x"], "`x` is no run directory, and no job id of a run in runs", "`gpulayer runs` lists those here"),
    (
        ["runs", "x"],
        "`x` is no folder with runs: No such file or directory",
        "`gpulayer runs DIR` lists those of another folder",
    ),
    (
        ["run", "-e", "RANK=1", "s.py"],
        "`--env RANK`: `RANK` cannot be set, torchrun or gpulayer sets it on every node",
        "the layout of the nodes decides it",
    ),
]


@pytest.mark.parametrize(("words", "message", "hint"), ERRORS, ids=[" ".join(words) for words, _, _ in ERRORS])
def test_errors_say_what_is_wrong_and_what_to_do(
    words: list[str], message: str, hint: str, folder: Path, recorder: Recorder, capfd: pytest.CaptureFixture[str]
) -> None:
    """One error screen on stderr, exit code 2, nothing on stdout, nothing made, nothing carried out."""
    before = sorted(folder.iterdir())
    screen = f"gpulayer: error: {message.format(folder=folder)}\n\nhint: {hint}\n"
    assert _run(capfd, *words) == (2, "", screen)
    assert sorted(folder.iterdir()) == before
    assert recorder.calls == []


def test_no_map_at_all(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Without a hosts map the error names every place that was looked at."""
    (folder / "hosts.toml").unlink()
    code, out, err = _run(capfd, "render", "s.py")
    assert (code, out) == (2, "")
    assert err.startswith("gpulayer: error: ")
    assert f"{folder}/hosts.toml" in err
    assert ".config/gpulayer/hosts.toml" in err


@pytest.mark.parametrize(
    "error", [RequestError("it broke"), NodeError("it broke"), RefusedError("it broke", {})], ids=type
)
def test_an_error_of_ours_becomes_its_exit_code(
    error: GpulayerError, folder: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever a launch raises ends as a message and the class's own exit code, without a traceback."""

    def fail(*_: object) -> int:
        raise error

    monkeypatch.setattr(launch, "launch", fail)
    assert _run(capfd, "run", "s.py") == (error.exit_code, "", "gpulayer: error: it broke\n")


def test_ctrl_c_before_a_job_is_no_traceback(
    folder: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C while a command thinks: exit code 130."""

    def interrupted(*_: object) -> int:
        signal.raise_signal(signal.SIGINT)
        return 0

    monkeypatch.setattr(launch, "launch", interrupted)
    code, out, err = _run(capfd, "run", "s.py")
    assert (code, out) == (130, "")
    assert "Traceback" not in err


# --- cost -----------------------------------------------------------------------------------------------------------

WATCH = """
import sys
events = []
WATCHED = ("socket.connect", "socket.sendto", "socket.sendmsg", "socket.getaddrinfo", "subprocess.Popen", "open")
sys.addaudithook(lambda name, args: events.append((name, args)) if name in WATCHED else None)
from gpulayer.cli import run_cli
code = run_cli(sys.argv[1:])
import json
touched = [name for name, args in events if name != "open"]
written = [str(args[0]) for name, args in events if name == "open" and args[1] and set("wax+") & set(str(args[1]))]
known = ("asyncssh", "cryptography", "rich", "asyncio", "torch", "pydantic", "ClusterShell")
heavy = [name for name in known if name in sys.modules]
print(json.dumps([code, touched, written, heavy]), file=sys.stderr)
"""


def _watched(folder: Path, *words: str) -> tuple[int, list[str], list[str], list[str]]:
    """Exit code, connections and programs, files opened for writing, heavy libraries loaded: of a fresh process."""
    env = {**os.environ, "PYTHONPATH": str(CHECKOUT), "PYTHONDONTWRITEBYTECODE": "1"}
    argv = [sys.executable, "-c", WATCH, *words]
    done = subprocess.run(argv, env=env, cwd=folder, capture_output=True, text=True, check=True)
    code, touched, written, heavy = json.loads(done.stderr.splitlines()[-1])
    return code, touched, written, heavy


def test_render_opens_no_connection_and_writes_nothing(folder: Path) -> None:
    """With addresses in the map not even a name is looked up; the heavy libraries stay unloaded."""
    code, touched, written, heavy = _watched(folder, "render", "train.py")
    assert (code, touched, written) == (0, [], [])
    assert set(heavy) <= {"pydantic", "ClusterShell"}


def test_help_loads_nothing_heavy(folder: Path) -> None:
    """--help is quick: nothing is loaded for it but what typer itself needs."""
    code, touched, written, heavy = _watched(folder, "run", "--help")
    assert (code, touched, written) == (0, [], [])
    assert set(heavy) <= {"pydantic"}


def test_a_wrong_request_touches_nothing(folder: Path) -> None:
    """A surviving placeholder ends the command before anything is contacted or made."""
    code, touched, written, _ = _watched(folder, "run", "train.py", "$HOME/data")
    assert (code, touched, written) == (2, [], [])
    assert not (folder / "runs").exists()
