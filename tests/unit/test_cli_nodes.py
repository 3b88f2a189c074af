"""The command line of what asks nodes: every option of `ps`, `kill` and `hosts` is obeyed, or is an error."""

from __future__ import annotations

import dataclasses
import io
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from gpulayer import cli, leftovers
from gpulayer.options import AskOptions, KillOptions, MapOptions
from gpulayer.states import NodeFound, NodeState

if TYPE_CHECKING:
    from collections.abc import Callable

    from gpulayer.leftovers import Asking

HOSTS = '[nodes."n[01-03]"]\naddress = "10.9.0.[1-3]"\n'
Call = dict[str, Any]


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Call]:
    """What the commands would have asked of the nodes; nothing is contacted."""
    (tmp_path / "hosts.toml").write_text(HOSTS)
    (tmp_path / "other.toml").write_text("[nodes.other]\n")
    (tmp_path / "config").write_text("# nothing\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("GPULAYER_LEASES", str(tmp_path / "leases"))
    monkeypatch.delenv("GPULAYER_HOSTS", raising=False)
    seen: list[Call] = []

    def show_jobs(asking: Asking) -> int:
        seen.append({"asking": asking})
        return 0

    def end_jobs(asking: Asking, job_id: str | None, grace_s: float, confirm: object) -> int:
        seen.append({"asking": asking, "job_id": job_id, "grace_s": grace_s, "asks": confirm is not None})
        return 0

    def probe_nodes(asking: Asking, *, practice: bool) -> dict[str, NodeFound]:
        seen.append({"asking": asking, "practice": practice})
        return {node.id: NodeFound(NodeState.DIRTY, f"dirty: {node.id}") for node in asking.nodes}

    monkeypatch.setattr(leftovers, "show_jobs", show_jobs)
    monkeypatch.setattr(leftovers, "end_jobs", end_jobs)
    monkeypatch.setattr(leftovers, "probe_nodes", probe_nodes)
    return seen


def _ids(call: Call) -> list[str]:
    return [node.id for node in call["asking"].nodes]


# For each field: words, and what is asked of the nodes then.
ASKED: dict[str, tuple[list[str], Callable[[Call], bool]]] = {
    "hosts": (["-H", "other.toml"], lambda call: _ids(call) == ["other"]),
    "ssh_config": (["-F", "config"], lambda call: call["asking"].ssh.config == Path("config")),
    "nodelist": (["-w", "n[02-03]"], lambda call: _ids(call) == ["n02", "n03"]),
    "exclude": (["-x", "n02"], lambda call: _ids(call) == ["n01", "n03"]),
    "connect_timeout": (["--connect-timeout", "3"], lambda call: call["asking"].ssh.connect_timeout_s == 3),
    "accept_new_host_keys": (["--accept-new-host-keys"], lambda call: call["asking"].ssh.accept_new_host_keys),
    "as_json": (["--json"], lambda call: call["asking"].as_json),
}
KILLED: dict[str, tuple[list[str], Callable[[Call], bool]]] = {
    "job": (["j1"], lambda call: call["job_id"] == "j1"),
    "all": (["--all", "--yes"], lambda call: call["job_id"] is None),
    "yes": (["--all", "-y"], lambda call: not call["asks"]),
    "grace": (["j1", "--grace", "0"], lambda call: call["grace_s"] == 0),
}


def test_no_option_is_missing_in_the_tables() -> None:
    """An option that is added needs a row that shows what it does."""
    assert {field.name for field in dataclasses.fields(AskOptions)} == set(ASKED)
    assert {field.name for field in dataclasses.fields(KillOptions)} == set(ASKED) | set(KILLED)
    assert {field.name for field in dataclasses.fields(MapOptions)} == set(ASKED) | {"probe"}


@pytest.mark.parametrize("command", [["ps"], ["kill", "j1"], ["hosts", "--probe"]], ids=lambda words: words[0])
@pytest.mark.parametrize("name", ASKED)
def test_options_decide_whom_to_ask(name: str, command: list[str], calls: list[Call]) -> None:
    """What an option says is what is asked, and it is not so without it."""
    words, is_obeyed = ASKED[name]
    assert cli.run_cli([*command, *words]) == 0
    assert cli.run_cli(command) == 0
    assert [is_obeyed(call) for call in calls] == [True, False]
    assert _ids(calls[1]) == ["n01", "n02", "n03"]


@pytest.mark.parametrize("name", KILLED)
def test_options_decide_what_to_end(name: str, calls: list[Call]) -> None:
    """Which job, after which question, how soon."""
    words, is_obeyed = KILLED[name]
    assert cli.run_cli(["kill", *words]) == 0
    assert is_obeyed(calls[0])


def test_all_asks_on_a_terminal(calls: list[Call], monkeypatch: pytest.MonkeyPatch) -> None:
    """Without `--yes`; what was not asked is not done."""

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(sys, "stdin", Terminal())
    assert cli.run_cli(["kill", "--all"]) == 0
    assert (calls[0]["asks"], calls[0]["grace_s"]) == (True, 30)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["kill"], "JOB or `--all`: neither of them is given"),
        (["kill", "j1", "--all"], "JOB or `--all`: both name what to end"),
        (["kill", "j1", "--yes"], "`--yes` answers what `--all` asks"),
        (["kill", "../x"], "`../x` cannot be a job id"),
        (["kill", "j1", "--grace", "-1"], "`--grace` is -1, a number of seconds from 0 up is expected"),
        (["ps", "--connect-timeout", "0"], "`--connect-timeout` is 0, a number of seconds above 0 is expected"),
        (["ps", "-w", "n09"], "`--nodelist` names n09, which the hosts map does not have"),
        (["ps", "-x", "n[01-03]"], "no node is left to draw"),
        (["ps", "-F", "nowhere"], "`--ssh-config nowhere`: there is no such file"),
        (
            ["hosts", "--connect-timeout", "3"],
            "`--connect-timeout` is about logging in, which only `--probe` does here",
        ),
    ],
)
def test_what_is_wrong_is_told_before_anything_is_asked(
    words: list[str], message: str, calls: list[Call], capfd: pytest.CaptureFixture[str]
) -> None:
    """Exit code 2, and no node hears of it."""
    assert cli.run_cli(words) == 2
    assert capfd.readouterr().err.startswith(f"gpulayer: error: {message}\n")
    assert calls == []


def test_hosts_for_scripts(calls: list[Call], capfd: pytest.CaptureFixture[str]) -> None:
    """One document; what the nodes say with `--probe`, and what the record says without."""
    assert cli.run_cli(["hosts", "--json", "-w", "n[01-02]"]) == 0
    document = json.loads(capfd.readouterr().out)
    assert [(one["node_id"], one["state"], one["address"]) for one in document["nodes"]] == [
        ("n01", "free", "10.9.0.1"),
        ("n02", "free", "10.9.0.2"),
    ]
    assert calls == []
    assert cli.run_cli(["hosts", "--json", "--probe", "-w", "n01"]) == 0
    (node,) = json.loads(capfd.readouterr().out)["nodes"]
    assert (node["state"], node["detail"]) == ("dirty", "dirty: n01")
