"""What the SSH layer decides without a server: config errors, ProxyJump, the order of keys, words for failures."""

from __future__ import annotations

import errno
import os
import socket
from pathlib import Path

import asyncssh
import pytest

from gpulayer import errors
from gpulayer.known_hosts import load_known_hosts
from gpulayer.ssh_config import (
    Identity,
    SshSettings,
    SshTarget,
    build_ring,
    parse_jumps,
    read_endpoint,
)
from gpulayer.ssh_errors import LoginFacts, explain, explain_session

NO_CONFIG = SshSettings(Path("none"))


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty home folder with .ssh in it."""
    (tmp_path / ".ssh").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    return tmp_path


# -- targets and jump hosts


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("bastion", [SshTarget("bastion")]),
        ("me@bastion:2222", [SshTarget("bastion", "me", 2222)]),
        ("a, b@c ,[fd00::1]:22", [SshTarget("a"), SshTarget("c", "b"), SshTarget("fd00::1", None, 22)]),
        ("ssh://me@bastion:2222/", [SshTarget("bastion", "me", 2222)]),
        ("user@realm@bastion", [SshTarget("bastion", "user@realm")]),
        ("[fd00::1]", [SshTarget("fd00::1")]),
    ],
)
def test_proxy_jump_is_read_in_every_form_that_ssh_knows(text: str, expected: list[SshTarget]) -> None:
    """Hosts in order of travel, with user and port where they are given."""
    assert list(parse_jumps(text)) == expected


@pytest.mark.parametrize("text", ["a,,b", "bastion:port", "bastion:70000", "fd00::1", "@", "a b"])
def test_a_proxy_jump_that_names_no_host_is_an_error(text: str) -> None:
    """The part that is wrong is shown."""
    with pytest.raises(errors.SshConfigError, match="is not a host") as caught:
        parse_jumps(text)
    assert caught.value.hint == "write `[user@]host[:port]`"


@pytest.mark.parametrize(
    ("target", "text"),
    [
        (SshTarget("gpu-01"), "gpu-01"),
        (SshTarget("gpu-01", "me", 2222), "me@gpu-01:2222"),
        (SshTarget("fd00::1", None, 22), "[fd00::1]:22"),
        (SshTarget("fd00::1"), "fd00::1"),
    ],
)
def test_a_target_is_shown_as_ssh_would_have_it_typed(target: SshTarget, text: str) -> None:
    """User and port only where the hosts map gives them."""
    assert str(target) == text


# -- config errors


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (b"Host gpu\n  Port many\n", "{path} line 2: Invalid Port integer value: many"),
        (b"User\n", "{path} line 1: Missing User value"),
        (b'HostName "gpu\n', "{path} line 1: No closing quotation"),
        (b"Host *\n# caf\xe9\n", "{path}: not UTF-8 text (invalid continuation byte at byte 12)"),
        (b"Match nonsense x\n", "{path} line 1: Invalid match condition nonsense"),
        (b"IdentityFile %Z\n", "{path}: Invalid token expansion: Z"),
        (b"UserKnownHostsFile %Z\n", None),
        (b"UserKnownHostsFile ${GPULAYER_UNSET}\n", None),
    ],
)
def test_a_config_that_cannot_be_read_names_file_line_and_problem(home: Path, text: bytes, problem: str | None) -> None:
    """Each as an SshConfigError, with the way round it."""
    path = home / ".ssh" / "config"
    path.write_bytes(text)
    with pytest.raises(errors.SshConfigError) as caught:
        read_endpoint(SshTarget("gpu"), SshSettings())
    if problem:
        assert str(caught.value) == f"the SSH config cannot be used: {problem.format(path=path)}"
        assert caught.value.hint == "mend that line, or give another file (or `none`) with --ssh-config"
    else:
        name = text.split()[1].decode()
        assert str(caught.value) == f"the SSH config uses {name} in `{name}`, which has no value here"


def test_a_condition_that_needs_another_package_says_which(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`Match localnetwork` needs ifaddr."""
    monkeypatch.setattr("asyncssh.config._ifaddr_available", False)
    (home / ".ssh" / "config").write_text("Match localnetwork 10.0.0.0/8\n  User x\n")
    with pytest.raises(errors.SshConfigError, match="line 1: Local network match requires ifaddr module") as caught:
        read_endpoint(SshTarget("gpu"), SshSettings())
    assert caught.value.hint is not None
    assert caught.value.hint.startswith("`pip install ifaddr` makes it work; else ")


def test_an_unreadable_include_and_an_empty_or_absent_config_are_no_problem(home: Path) -> None:
    """What is not there has nothing to say."""
    assert read_endpoint(SshTarget("gpu"), SshSettings()).host == "gpu"
    (home / ".ssh" / "config").write_text("Include absent.conf */x\nInclude relative.conf\n")
    (home / ".ssh" / "relative.conf").write_text("Host gpu\n  HostName 10.0.0.1\n")
    assert read_endpoint(SshTarget("gpu"), SshSettings()).host == "10.0.0.1"


def test_match_final_sees_what_the_first_pass_found(home: Path) -> None:
    """`Match final host` matches the HostName that an earlier block set, and adds to it."""
    (home / ".ssh" / "config").write_text(
        "Host gpu\n  HostName gpu.far\n  User me\nMatch final host *.far\n  Port 2222\n  ProxyJump bastion\n"
    )
    end = read_endpoint(SshTarget("gpu"), SshSettings())
    assert (end.host, end.user, end.port, end.jumps) == ("gpu.far", "me", 2222, (SshTarget("bastion"),))


@pytest.mark.parametrize(
    ("lines", "agent"),
    [
        ("", "/run/agent"),
        ("IdentityAgent none", None),
        ("IdentityAgent SSH_AUTH_SOCK", "/run/agent"),
        ("IdentityAgent $OTHER_SOCK", "/run/other"),
        ("IdentityAgent ~/agent", "{home}/agent"),
    ],
)
def test_the_agent_is_the_one_that_the_config_names(
    home: Path, monkeypatch: pytest.MonkeyPatch, lines: str, agent: str | None
) -> None:
    """IdentityAgent in all its forms, else $SSH_AUTH_SOCK."""
    monkeypatch.setenv("SSH_AUTH_SOCK", "/run/agent")
    monkeypatch.setenv("OTHER_SOCK", "/run/other")
    (home / ".ssh" / "config").write_text(lines + "\n")
    found = read_endpoint(SshTarget("gpu"), SshSettings()).identity.agent
    assert found == (agent.format(home=home) if agent else None)


# -- keys


def make_key(path: Path, comment: str = "") -> asyncssh.SSHKey:
    """An ed25519 key pair in two files."""
    key = asyncssh.generate_private_key("ssh-ed25519", comment)
    key.write_private_key(path)
    key.write_public_key(f"{path}.pub")
    return key


def identity(*files: Path, explicit: bool = True, only: bool = False) -> Identity:
    """Keys from these files."""
    return Identity(files, (), explicit, only, None)


def test_named_keys_come_before_the_agents_others_and_each_key_is_offered_once(home: Path) -> None:
    """The agent's copy of a named key first, named files next, then what else the agent has, unless IdentitiesOnly."""
    first, second, other = (make_key(home / name, name) for name in ("first", "second", "other"))
    agent = asyncssh.load_keypairs([other, second])
    files = (home / "absent", home / "first", home / "second")
    named = build_ring(identity(*files), agent)
    assert [key.pair.public_data for key in named.keys] == [k.public_data for k in (second, first, other)]
    assert [key.label for key in named.keys] == ["second (agent)", "~/first", "other (agent)"]
    only = build_ring(identity(*files, only=True), agent)
    assert [key.label for key in only.keys] == ["second (agent)", "~/first"]
    default = build_ring(identity(*files, explicit=False), agent)
    assert [key.label for key in default.keys] == ["second (agent)", "other (agent)", "~/first"]


def test_a_public_key_file_picks_a_key_of_the_agent(home: Path) -> None:
    """IdentityFile may name the public half of a key whose private half only the agent has."""
    wanted, other = make_key(home / "wanted", "wanted"), make_key(home / "other", "other")
    agent = asyncssh.load_keypairs([other, wanted])
    ring = build_ring(identity(home / "wanted.pub", only=True), agent)
    assert [key.label for key in ring.keys] == ["wanted (agent)"]
    assert ring.locked == ()


def test_known_hosts_files_are_read_as_leniently_as_ssh_reads_them(home: Path) -> None:
    """Absent files, unreadable lines and unknown key types are passed over."""
    key = make_key(home / "key").export_public_key().decode()
    path = home / "known"
    path.write_bytes(
        b"# comment\n\nbroken\n@marker x y\n\xff\xff\nold ssh-dead AAAA\n" + f"gpu-01,gpu-02 {key}".encode()
    )
    known = load_known_hosts([home / "absent", home, path])
    assert [len(known.match(name, "", None)[0]) for name in ("gpu-01", "gpu-02", "old")] == [1, 1, 0]


# -- the words for failures


def facts(**seen: object) -> LoginFacts:
    """An attempt at gpu-01."""
    end = read_endpoint(SshTarget("gpu-01", "me"), NO_CONFIG)
    return LoginFacts(end, 10.0, **seen)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("exc", "kind", "message"),
    [
        (OSError(errno.EHOSTUNREACH, "x"), errors.ConnectRefusedError, "there is no route to gpu-01 port 22"),
        (OSError(errno.ENETUNREACH, "x"), errors.ConnectRefusedError, "there is no route to gpu-01 port 22"),
        (
            OSError("Multiple exceptions: [Errno 113] Connect call failed, [Errno 111] Connect call failed"),
            errors.ConnectRefusedError,
            "gpu-01 port 22 refuses connections: the machine is up, but nothing listens there",
        ),
        (OSError(errno.ETIMEDOUT, "x"), errors.ConnectTimeoutError, "gpu-01 port 22 did not answer within 10 s"),
        (TimeoutError(), errors.ConnectTimeoutError, "gpu-01 port 22 did not answer within 10 s"),
        (
            OSError(errno.EACCES, "Permission denied"),
            errors.ConnectRefusedError,
            "cannot connect to gpu-01 port 22: [Errno 13] Permission denied",
        ),
        (
            socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution"),
            errors.NameNotFoundError,
            "the name gpu-01 cannot be resolved: Temporary failure in name resolution",
        ),
        (
            asyncssh.DisconnectError(2, "Too many authentication failures"),
            errors.PermissionDeniedError,
            (
                "permission denied for user me on gpu-01 port 22: it accepts publickey; tried ~/.ssh/a,"
                " and then it allowed no more attempts"
            ),
        ),
        (
            asyncssh.ConnectionLost("Connection lost"),
            errors.ConnectionDroppedError,
            "gpu-01 port 22 closed the connection during the login of user me",
        ),
        (
            asyncssh.DisconnectError(11, "Bye"),
            errors.ConnectionDroppedError,
            "gpu-01 port 22 broke off the SSH handshake: Bye",
        ),
        (
            asyncssh.HostKeyNotVerifiable("Host certificate expired for host gpu-01"),
            errors.UnknownHostKeyError,
            "the host certificate of gpu-01 port 22 cannot be trusted: Host certificate expired",
        ),
    ],
)
def test_every_way_of_failing_has_its_own_words(exc: Exception, kind: type[errors.NodeError], message: str) -> None:
    """Those that a test with a server cannot easily bring about."""
    error = explain(exc, facts(methods=("publickey",), tried=["~/.ssh/a"]))
    assert type(error) is kind
    assert str(error) == message
    assert error.hint


@pytest.mark.parametrize(
    ("code", "reason", "kind"),
    [
        (asyncssh.OPEN_CONNECT_FAILED, "Connection timed out", errors.ConnectTimeoutError),
        (asyncssh.OPEN_CONNECT_FAILED, "Name or service not known", errors.NameNotFoundError),
        (asyncssh.OPEN_CONNECT_FAILED, "No route to host", errors.ConnectRefusedError),
        (asyncssh.OPEN_ADMINISTRATIVELY_PROHIBITED, "open failed", errors.ConnectRefusedError),
    ],
)
def test_what_a_jump_host_says_about_a_node_is_sorted_like_the_rest(
    code: int, reason: str, kind: type[errors.NodeError]
) -> None:
    """The jump host's own words are kept."""
    error = explain(asyncssh.ChannelOpenError(code, reason), facts(via="bastion"))
    assert type(error) is kind
    assert str(error) == f"the jump host bastion cannot connect to gpu-01 port 22: {reason}"


def test_a_connection_that_ends_while_a_command_is_started_is_told_apart() -> None:
    """Lost, as against refused."""
    error = explain_session(asyncssh.ConnectionLost("Connection lost"), "gpu-01 port 22")
    assert str(error) == "gpu-01 port 22 closed the connection right after login"


def test_the_ssh_command_in_a_hint_goes_to_the_same_place(home: Path) -> None:
    """It names the config file when that isn't the default one, and what the hosts map adds."""
    other = home / "other config"
    other.write_text("")
    assert read_endpoint(SshTarget("gpu"), SshSettings()).ssh_command == ("ssh", "gpu")
    (home / ".ssh" / "config").write_text("")
    assert read_endpoint(SshTarget("gpu"), SshSettings()).ssh_command == ("ssh", "gpu")
    assert read_endpoint(SshTarget("gpu"), NO_CONFIG).ssh_command == ("ssh", "-F", "none", "gpu")
    assert read_endpoint(SshTarget("gpu", "me", 5), SshSettings(other)).ssh_command == (
        *("ssh", "-F", str(other)),
        *("-p", "5", "me@gpu"),
    )
    assert os.environ["HOME"] == str(home)
