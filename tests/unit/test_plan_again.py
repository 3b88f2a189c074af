"""A saved plan is run as it is, or refused with all that no longer holds."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from gpulayer import cli, launch
from gpulayer.errors import PlanFileError
from gpulayer.leases import Lease, leases_folder
from gpulayer.plan import plan_json
from gpulayer.plan_again import changes_since
from tests.support.saved_plans import JOB_ID, edit, faults, replaced, save, to_run, write_files

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from gpulayer.launch import LaunchSettings
    from gpulayer.plan import Plan
    from gpulayer.screen import Terminal


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a map, a script and the plan of two nodes."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("GPULAYER_HOSTS", raising=False)
    write_files(tmp_path)
    save()
    return tmp_path


def in_the_map(old: str, new: str) -> Callable[[Path], None]:
    """Change the hosts map."""
    return lambda folder: replaced(folder / "hosts.toml", old, new)


def in_the_plan(name: str, value: object) -> Callable[[Path], None]:
    """Change a field of the plan by hand, without its digest."""
    return lambda folder: edit(folder / "plan.json", lambda document: document.update({name: value}))


def _new_script(folder: Path) -> None:
    (folder / "train.py").write_text("print('other')\n")


def _no_script(folder: Path) -> None:
    (folder / "train.py").unlink()


def _run_directory(folder: Path) -> None:
    (folder / "runs" / JOB_ID).mkdir(parents=True)
    (folder / "runs" / JOB_ID / "receipt.json").write_text("{}")


def _no_address(folder: Path) -> None:
    replaced(folder / "hosts.toml", '"10.9.0.2"', '"no.such.host.invalid"')


SHA = "03e693d9f2f6"  # of the script that the plan was made with
LOOPBACK = "node n01: 127.0.0.1 (`address` in the hosts map) is a loopback address, which other nodes cannot reach"
NO_SUCH_PLAN = (
    "no such plan can be made any more: "
    "node n01: 127.0.0.1 (`address` in the hosts map) is a loopback address, which other nodes cannot reach"
)
# What has changed since, and what is said of it.
OTHERWISE: dict[str, tuple[Callable[[Path], None], list[str]]] = {
    "node gone": (in_the_map("n02", "other"), ["n02: not in {folder}/hosts.toml any more"]),
    "all nodes gone": (
        in_the_map("nodes.n0", "nodes.m0"),
        ["n[01-02]: not in {folder}/hosts.toml any more"],
    ),
    "address": (in_the_map("10.9.0.2", "10.9.0.22"), ["n02: address: 10.9.0.2 -> 10.9.0.22"]),
    "address of the head": (
        in_the_map("10.9.0.1", "10.9.0.11"),
        [
            "master_addr: 10.9.0.1 -> 10.9.0.11",
            "n01: address: 10.9.0.1 -> 10.9.0.11",
            "n[01-02]: argv: --master-addr 10.9.0.1 -> 10.9.0.11",
        ],
    ),
    "no address": (
        _no_address,
        ["node n02: no address for `no.such.host.invalid` (`address` in the hosts map): Name or service not known"],
    ),
    "addresses that cannot meet": (
        in_the_map("10.9.0.1", "127.0.0.1"),
        [
            "n01: address: 10.9.0.1 -> 127.0.0.1",
            NO_SUCH_PLAN,
        ],
    ),
    "ssh name": (in_the_map("[nodes.n02]", '[nodes.n02]\nssh = "new"'), ["n02: ssh: n02 -> new"]),
    "user": (in_the_map('user = "me"', 'user = "you"'), ["n[01-02]: user: me -> you"]),
    "port": (in_the_map("[nodes.n01]", "[nodes.n01]\nport = 2222"), ["n01: port: none -> 2222"]),
    "python": (
        in_the_map("[nodes.n02]", '[nodes.n02]\npython = "/opt/py"'),
        ["n02: python: python3 -> /opt/py", "n02: argv: python3 -> /opt/py"],
    ),
    "workdir": (
        in_the_map('workdir = "{folder}"', 'workdir = "/elsewhere"'),
        [
            f"script: {{folder}}/train.py: sha256 {SHA} -> not readable here",
            "n[01-02]: workdir: {folder} -> /elsewhere",
        ],
    ),
    "scratch": (
        in_the_map("[nodes.n02]", '[nodes.n02]\nscratch = "/s"'),
        [
            f"n02: job_dir: /tmp/gpulayer-{JOB_ID}-n1 -> /s/gpulayer-{JOB_ID}-n1",
            f"n02: argv: --log-dir /tmp/gpulayer-{JOB_ID}-n1/ranks -> /s/gpulayer-{JOB_ID}-n1/ranks",
            f"n02: env: GPULAYER_OUTPUT_DIR: /tmp/gpulayer-{JOB_ID}-n1/outputs -> /s/gpulayer-{JOB_ID}-n1/outputs",
        ],
    ),
    "interface": (
        in_the_map("[nodes.n02]", '[nodes.n02]\ninterface = "ib0"'),
        [
            "n02: interface: none -> ib0",
            "n02: env: + GLOO_SOCKET_IFNAME=ib0",
            "n02: env: + NCCL_SOCKET_IFNAME==ib0",
            "n02: env: + TP_SOCKET_IFNAME=ib0",
        ],
    ),
    "how many GPUs": (
        in_the_map("[nodes.n02]", "[nodes.n02]\ngpus = 4"),
        [
            "world_size: 4 -> 6",
            "n02: nproc_per_node: 2 -> 4",
            "n02: argv: --nproc-per-node 2 -> 4",
        ],
    ),
    "which GPUs": (
        in_the_map("[nodes.n02]", "[nodes.n02]\ngpus = [4, 5]"),
        [
            "n02: gpus: none -> [4, 5]",
            "n02: env: + CUDA_VISIBLE_DEVICES=4,5",
            "n02: env: + CUDA_DEVICE_ORDER=PCI_BUS_ID",
        ],
    ),
    "environment": (
        in_the_map('NCCL_DEBUG = "WARN"', 'NEW = "1"'),
        ["n[01-02]: env: - NCCL_DEBUG=WARN", "n[01-02]: env: + NEW=1"],
    ),
    "script": (_new_script, [f"script: {{folder}}/train.py: sha256 {SHA} -> b74b5fe42240"]),
    "script gone": (_no_script, [f"script: {{folder}}/train.py: sha256 {SHA} -> not readable here"]),
    "run directory": (
        _run_directory,
        [f"run directory: {{folder}}/runs/{JOB_ID} is not empty: has the plan been run? `--run-dir DIR` names another"],
    ),
    "by hand": (
        in_the_plan("grace_s", 5.0),
        ["digest: plan.json has been changed since it was made", "grace_s: 5.0 -> 30.0"],
    ),
}


@pytest.mark.parametrize("name", OTHERWISE)
def test_what_no_longer_holds_is_said(name: str, folder: Path) -> None:
    """Each thing that is other than when the plan was made refuses it, in words that say what it was and what it is."""
    assert faults() == []
    change, expected = OTHERWISE[name]
    hosts = folder / "hosts.toml"
    hosts.write_text(hosts.read_text().replace(str(folder), "{folder}"))
    change(folder)
    hosts.write_text(hosts.read_text().replace("{folder}", str(folder)))
    assert faults() == [line.replace("{folder}", str(folder)) for line in expected]


def test_all_of_it_is_said_at_once(folder: Path) -> None:
    """Nobody has to mend one thing after the other."""
    for name in ("node gone", "address of the head", "user", "script", "run directory"):
        OTHERWISE[name][0](folder)
    assert [line.partition(":")[0] for line in faults(env=["EXTRA=1"])] == [
        *("n02", "master_addr", "script", "n01", "n01", "n01", "secrets", "run directory"),
    ]


@pytest.mark.parametrize(
    "change",
    [
        in_the_map("[nodes.n01]", '[nodes.n00]\naddress = "10.9.0.9"\n[nodes.n01]'),
        lambda folder: replaced(folder / "hosts.toml", "n03", "n04"),
        lambda folder: replaced(folder / "hosts.toml", "of-the-map-12345", "another-one-6789"),
        lambda folder: (folder / "runs" / JOB_ID).mkdir(parents=True),
    ],
    ids=["a node before", "another node", "a secret of the map", "an empty run directory"],
)
def test_what_a_plan_does_not_depend_on_may_change(change: Callable[[Path], None], folder: Path) -> None:
    """Other nodes, their order, and secrets that the plan does not hold."""
    change(folder)
    assert faults() == []
    assert [node.node_id for node in to_run().nodes] == ["n01", "n02"]


class _Launched:
    """Stands in for `launch.launch`: keeps what it is given."""

    def __init__(self) -> None:
        self.calls: list[tuple[Plan, LaunchSettings]] = []

    def __call__(self, plan: Plan, settings: LaunchSettings, _: Terminal) -> int:
        self.calls.append((plan, settings))
        return 0


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> _Launched:
    """What `run` hands on to be carried out."""
    launched = _Launched()
    monkeypatch.setattr(launch, "launch", launched)
    return launched


def run(*words: str) -> int:
    """Run `gpulayer run`."""
    return cli.run_cli(["run", *words])


def test_the_very_plan_is_run(folder: Path, launched: _Launched, monkeypatch: pytest.MonkeyPatch) -> None:
    """From any folder: every field is the file's, so is the digest, and the port may not move."""
    (folder / "elsewhere").mkdir()
    monkeypatch.chdir(folder / "elsewhere")
    words = ["-H", "../hosts.toml", "--run-dir", "here", "--connect-timeout", "3", "--no-preflight"]
    assert run("--plan", "../plan.json", *words) == 0
    ((plan, settings),) = launched.calls
    saved = json.loads((folder / "plan.json").read_text())
    assert plan_json(plan) == saved
    assert [list(node.argv) for node in plan.nodes] == [node["argv"] for node in saved["nodes"]]
    assert (plan.digest, plan.port_is_default) == (saved["digest"], False)
    assert settings.cwd == folder / "elsewhere"
    assert (str(settings.run_dir), settings.ssh.connect_timeout_s, settings.preflight) == ("here", 3, None)


def test_checks_are_those_of_the_job(folder: Path, launched: _Launched) -> None:
    """The script and the backend of the plan are checked for."""
    save("-N", "1", "--backend", "nccl", "train.py")
    assert run("--plan", "plan.json", "--strict") == 0
    preflight = launched.calls[0][1].preflight
    assert preflight is not None
    assert (preflight.script, preflight.is_module, preflight.options.backend) == ("train.py", False, "nccl")
    assert preflight.options.strict


def test_a_port_that_has_moved_is_the_plans_port(folder: Path) -> None:
    """The plan in a run directory has the port that was free then; it can be run again as it is."""
    plan = replace(to_run(), port_is_default=True)
    saved = json.loads((folder / "plan.json").read_text())
    assert plan_json(plan) == saved
    text = json.dumps(saved).replace('"29500"', '"29503"').replace('"master_port": 29500', '"master_port": 29503')
    (folder / "moved.json").write_text(text)
    edit(folder / "moved.json", lambda _: None, sign=True)
    moved = to_run("moved.json")
    assert (moved.master_port, moved.nodes[1].argv[moved.nodes[1].argv.index("--master-port") + 1]) == (29503, "29503")
    assert not moved.port_is_default


def test_dry_run_says_whether_a_plan_holds(
    folder: Path, launched: _Launched, capfd: pytest.CaptureFixture[str]
) -> None:
    """`run --plan P --dry-run` prints the plan, or says what `run` would."""
    capfd.readouterr()
    assert run("--plan", "plan.json", "--dry-run", "--format", "json") == 0
    assert capfd.readouterr().out == (folder / "plan.json").read_text()
    OTHERWISE["script"][0](folder)
    OTHERWISE["user"][0](folder)
    assert run("--plan", "plan.json", "--dry-run") == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert err.splitlines()[0] == "gpulayer: error: plan.json cannot be run as it stands, and nothing was contacted"
    assert err.splitlines()[1:3] == [f"  {line}" for line in faults()]
    assert launched.calls == []


def test_held_nodes_refuse_the_plan(folder: Path, launched: _Launched, capfd: pytest.CaptureFixture[str]) -> None:
    """Exit code 3 names the job that has one of its nodes; other free nodes are not taken instead."""
    from gpulayer.request import machines_of
    from gpulayer.sources import read_hosts

    nodes = read_hosts(None, os.environ, folder).nodes
    with Lease(leases_folder(os.environ), "other") as lease:
        lease.draw(machines_of(nodes, None), lambda _: ("n02",), None, lambda _: None)
        capfd.readouterr()
        assert run("--plan", "plan.json") == 3
        err = capfd.readouterr().err
        assert err.startswith("gpulayer: error: asked for 2 nodes, 1 is free: n01; n02 is held by job other of ")
        assert err.endswith("hint: wait for them with `--wait`, or render a plan for others\n")
    assert launched.calls == []
    assert run("--plan", "plan.json") == 0


def test_options_that_would_change_the_plan_are_refused(
    folder: Path, launched: _Launched, capfd: pytest.CaptureFixture[str]
) -> None:
    """Each of them is named; those that say how a plan is carried out are taken."""
    capfd.readouterr()
    words = ["-N", "2", "-w", "n01", "--master-port", "4", "--job-id", "x", "--grace", "3", "-o", "p", "-m", "train.py"]
    assert run("--plan", "plan.json", *words) == 2
    assert capfd.readouterr().err == (
        "gpulayer: error: `--plan` runs a plan as it is, and `--nnodes`, `--nodelist`, `--master-port`, SCRIPT, "
        "`--module`, `--grace`, `--job-id`, `--output` would change it\n\n"
        "hint: leave that out, or render a new plan with it\n"
    )
    assert launched.calls == []


def test_another_map_may_be_named(folder: Path) -> None:
    """`--hosts` says which map is today's."""
    (folder / "hosts.toml").rename(folder / "moved.toml")
    with pytest.raises(PlanFileError) as caught:
        changes_since("no.json", None, None, os.environ)
    assert str(caught.value) == "no.json: no such file"
    assert changes_since("plan.json", "moved.toml", None, os.environ) == []
    replaced(folder / "moved.toml", 'user = "me"', "")
    assert changes_since("plan.json", "moved.toml", None, os.environ) == ["n[01-02]: user: me -> none"]


def test_the_plan_does_not_say_which_map_and_which_ssh_configuration_are_right(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Both are the reader's own; the hint names the map that the plan was made with."""
    (folder / "config").write_text('Match exec "touch ran"\n  User x\n')
    (folder / "own.toml").write_text((folder / "hosts.toml").read_text().replace("10.9.0.2", "10.9.0.22"))
    assert cli.run_cli(["render", "-H", "own.toml", "-F", "config", "-o", "own.json", "-N", "2", "train.py"]) == 0
    (folder / "ran").unlink(missing_ok=True)
    capfd.readouterr()
    assert run("--plan", "own.json") == 2
    assert capfd.readouterr().err == (
        "gpulayer: error: own.json cannot be run as it stands, and nothing was contacted\n"
        "  n02: address: 10.9.0.22 -> 10.9.0.2\n\n"
        "hint: mend what is named there, or make a new plan with `gpulayer render -o FILE`; this one was made with "
        f"`--hosts {folder}/own.toml`\n"
    )
    assert not (folder / "ran").exists()
    assert changes_since("own.json", "own.toml", None, os.environ) == []


def _more_words(document: dict[str, object]) -> None:
    nodes = document["nodes"]
    assert isinstance(nodes, list)
    nodes[1]["argv"].append("--evil")


def test_a_plan_written_by_hand_runs_nothing_that_its_recipe_does_not_say(folder: Path) -> None:
    """A digest can be made by anybody, so a plan is made again from its recipe, and has to come out the same."""
    edit(folder / "plan.json", _more_words, sign=True)
    assert faults() == ["n02: argv: - --evil"]
    save()
    edit(folder / "plan.json", lambda document: document.update(new_key={"a": 1}, uneven=True), sign=True)
    assert faults() == ['new_key: {"a": 1} -> none']
    save()
    edit(folder / "plan.json", lambda document: document.update(uneven=True), sign=True)
    assert faults() == ["this version of gpulayer makes another plan of it"]


def test_a_plan_without_a_recipe(folder: Path) -> None:
    """It cannot be made again, and says how one that can is written."""
    edit(folder / "plan.json", lambda document: document.update(recipe=None), sign=True)
    assert faults() == ["plan.json: does not say what it was made from, so it cannot be made again"]


def test_a_script_that_was_not_here_is_not_compared(folder: Path) -> None:
    """Where the login node did not see the script, preflight compares the nodes' copies alone."""
    (folder / "train.py").unlink()
    save()
    saved = json.loads((folder / "plan.json").read_text())
    assert saved["script"] == {"path": str(folder / "train.py"), "sha256": None}
    (folder / "train.py").write_text("print('now')\n")
    assert faults() == []
    assert to_run().digest == saved["digest"]
    save("-N", "1", "-m", "train")
    assert json.loads((folder / "plan.json").read_text())["script"] is None
    assert faults() == []


def test_a_bundle_is_compared_by_its_digest(folder: Path) -> None:
    """Its files decide, and the script's own hash does not count. The plan may lie among them, and another one too."""
    save("-N", "1", "--bundle", ".", "train.py")
    save("-N", "1", "--bundle", ".", "train.py", name="other.json")
    saved, other = (json.loads((folder / name).read_text()) for name in ("plan.json", "other.json"))
    assert saved["bundle"] == other["bundle"]
    assert saved["script"] is None
    assert faults() == []
    assert to_run().digest == saved["digest"]
    (folder / "train.py").write_text("print('other')\n")
    assert [line.partition(":")[0] for line in faults()][:1] == ["bundle.digest"]
    (folder / "train.py").unlink()
    (line,) = faults()
    assert line.startswith("no such plan can be made any more: the script `train.py` is not in the bundle ")


def test_many_differences_are_counted(folder: Path) -> None:
    """The error names the first forty; `diff` has them all."""
    variables = "".join(f'V{number:02} = "x"\n' for number in range(60))
    in_the_map('NCCL_DEBUG = "WARN"\n', f'NCCL_DEBUG = "WARN"\n{variables}')(folder)
    lines = faults()
    assert len(lines) == 41
    assert lines[-1] == "and 20 more: `gpulayer diff plan.json` shows all"
    assert len(changes_since("plan.json", None, None, os.environ)) == 60
