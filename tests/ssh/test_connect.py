"""Logging in to real OpenSSH servers: host keys, login keys, jump hosts, retries, and every way of failing."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import getpass
import os
import socket
import subprocess
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import asyncssh
import pytest

from gpulayer import errors
from gpulayer.ssh import SshConnector, SshSettings, SshTarget
from tests.support.local_sshd import Home, LocalSshd, deaf_port, free_port, listener, public, ssh_agent

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Sequence

    from gpulayer.ssh import SshChannel, SshLink

pytestmark = pytest.mark.ssh

ME = getpass.getuser()
NOTE = (
    "`--accept-new-host-keys` adds the keys of new hosts;"
    " gpulayer does not read StrictHostKeyChecking from the SSH config"
)
LOGIN_KEY = asyncssh.generate_private_key("ssh-ed25519")
OTHER_KEY = asyncssh.generate_private_key("ssh-ed25519")
MANY = 70  # more than the bound on logins in flight


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalSshd]:
    """A plain server that lets LOGIN_KEY in."""
    with LocalSshd(tmp_path_factory.mktemp("server"), public(LOGIN_KEY)) as sshd:
        yield sshd


@pytest.fixture
def empty_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Home:
    """A home folder with an empty .ssh, no agent."""
    home = Home(tmp_path / "home")
    home.ssh.mkdir(parents=True)
    monkeypatch.setenv("HOME", str(home.path))
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    return home


@pytest.fixture
def home(empty_home: Home, server: LocalSshd) -> Home:
    """A home folder with the login key, and the server in known_hosts."""
    empty_home.key(LOGIN_KEY)
    empty_home.know(server.known_hosts())
    return empty_home


@dataclasses.dataclass
class Recorder:
    """A Receiver that keeps everything."""

    stdout: bytearray = dataclasses.field(default_factory=bytearray)
    stderr: bytearray = dataclasses.field(default_factory=bytearray)
    ends: list[tuple[int | None, str | None, str | None]] = dataclasses.field(default_factory=list)
    changed: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)

    def data_received(self, data: bytes) -> None:
        """Keep stdout."""
        self.stdout += data
        self.changed.set()

    def stderr_received(self, data: bytes) -> None:
        """Keep stderr."""
        self.stderr += data
        self.changed.set()

    def channel_closed(self, exit_status: int | None, exit_signal: str | None, reason: str | None) -> None:
        """Keep each end that is reported."""
        self.ends.append((exit_status, exit_signal, reason))
        self.changed.set()

    async def until(self, text: bytes = b"", *, ended: bool = False) -> None:
        """Wait for a text on stdout, or for the end."""
        async with asyncio.timeout(30):
            while not (self.ends if ended else text in self.stdout):
                self.changed.clear()
                await self.changed.wait()


@contextlib.asynccontextmanager
async def connecting() -> AsyncIterator[SshConnector]:
    """A connector that is closed in the end, with nothing left in the event loop."""
    connector = SshConnector(SshSettings())
    try:
        yield connector
    finally:
        await connector.close()
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def login_and_run(target: SshTarget, command: str = "echo in", settings: SshSettings | None = None) -> bytes:
    """Log in, run one command and return what it wrote."""
    connector = SshConnector(settings or SshSettings())
    try:
        link = await connector.connect(target)
        recorder = Recorder()
        await link.open(command, recorder)
        await recorder.until(ended=True)
        await link.close()
        assert recorder.ends == [(0, None, None)]
        return bytes(recorder.stdout)
    finally:
        await connector.close()


async def login_all(targets: Sequence[SshTarget]) -> list[BaseException | None]:
    """Log in to all at once, stay connected until all are, and return what each one raised."""
    connector = SshConnector(SshSettings())
    results = await asyncio.gather(*(connector.connect(target) for target in targets), return_exceptions=True)
    await connector.close()
    return [result if isinstance(result, BaseException) else None for result in results]


def works(target: SshTarget, settings: SshSettings | None = None) -> None:
    """Logging in and running a command works."""
    assert asyncio.run(login_and_run(target, settings=settings)) == b"in\n"


def fails(target: SshTarget, kind: type[errors.NodeError], settings: SshSettings | None = None) -> tuple[str, str]:
    """The message and hint with which logging in fails; the error is of exactly this kind."""
    with pytest.raises(errors.NodeError) as caught:
        asyncio.run(login_and_run(target, settings=settings))
    assert type(caught.value) is kind, caught.value
    assert caught.value.hint
    return str(caught.value), caught.value.hint


def at(server: LocalSshd) -> SshTarget:
    """The server by its address and port."""
    return SshTarget("127.0.0.1", port=server.port)


# -- host keys


def test_an_unknown_host_key_is_refused_with_its_fingerprint_and_the_command_that_adds_it(
    home: Home, server: LocalSshd
) -> None:
    """Nothing in known_hosts: the message shows what the server offers; the command in the hint makes it work."""
    home.know("")
    message, hint = fails(at(server), errors.UnknownHostKeyError)
    scan = f"ssh-keyscan -t ed25519 -p {server.port} 127.0.0.1 >> ~/.ssh/known_hosts"
    assert message == (
        f"the host key of {server.place} is not in known_hosts: it offers ssh-ed25519 {server.fingerprint()}"
    )
    assert hint == (
        "compare it with `ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub` run there, then"
        f" add it with `{scan}`; {NOTE}"
    )
    subprocess.run(scan, shell=True, check=True, stderr=subprocess.DEVNULL)  # noqa: S602  # as a user would type it
    works(at(server))


def test_strict_host_key_checking_no_in_the_config_does_not_let_an_unknown_key_in(
    home: Home, server: LocalSshd
) -> None:
    """Switching the check off in the SSH config, in any of the ways that ssh has, changes nothing."""
    for lines in (
        ["StrictHostKeyChecking no"],
        ["UserKnownHostsFile none", "GlobalKnownHostsFile none"],
        ["UserKnownHostsFile /dev/null", "StrictHostKeyChecking accept-new"],
    ):
        home.know("")
        home.config("Host *", *lines)
        _, hint = fails(at(server), errors.UnknownHostKeyError)
        assert NOTE in hint
        assert ("set UserKnownHostsFile in the SSH config to a file" in hint) == ("UserKnownHosts" in lines[0])


def test_a_changed_host_key_is_refused_with_both_fingerprints(home: Home, server: LocalSshd) -> None:
    """Another key of the same type in known_hosts: both are shown, and the two commands of the hint mend it."""
    home.know(f"[127.0.0.1]:{server.port} {public(OTHER_KEY)}\n")
    message, hint = fails(at(server), errors.ChangedHostKeyError)
    forget = f"ssh-keygen -R '[127.0.0.1]:{server.port}'"
    scan = f"ssh-keyscan -t ed25519 -p {server.port} 127.0.0.1 >> ~/.ssh/known_hosts"
    assert message == (
        f"the host key of {server.place} has changed: known_hosts has ssh-ed25519 {OTHER_KEY.get_fingerprint()},"
        f" it now offers ssh-ed25519 {server.fingerprint()}"
    )
    assert hint == (
        "another machine may be answering in its place; if you know why it changed, forget the old key with"
        f" `{forget}`, then add it with `{scan}`"
    )
    # ssh-keygen finds ~ in the account, not in $HOME, so here it is told the file.
    mend = f"{forget} -f ~/.ssh/known_hosts && {scan}"
    subprocess.run(mend, shell=True, check=True, capture_output=True)  # noqa: S602  # as a user would type it
    works(at(server))


def test_a_revoked_host_key_is_refused(home: Home, server: LocalSshd) -> None:
    """@revoked wins over a line that trusts the key."""
    home.know(server.known_hosts(), "@revoked * ", public(server.host_keys["ssh-ed25519"]), "\n")
    message, hint = fails(at(server), errors.ChangedHostKeyError)
    assert message == f"the host key of {server.place} is marked as revoked in known_hosts"
    assert hint == "do not log in there before it has a new key"


def test_a_host_key_known_only_for_the_address_does_not_vouch_for_a_name(home: Home, server: LocalSshd) -> None:
    """Addresses are handed on from machine to machine, so the name decides, as with OpenSSH."""
    message, hint = fails(SshTarget("localhost", port=server.port), errors.UnknownHostKeyError)
    assert message.startswith(f"the host key of localhost port {server.port} is not in known_hosts")
    assert f"`ssh-keyscan -t ed25519 -p {server.port} localhost >> ~/.ssh/known_hosts`" in hint


def test_known_hosts_may_be_hashed_broken_in_places_upper_case_or_another_file(
    home: Home, server: LocalSshd, tmp_path: Path
) -> None:
    """Every way of writing known_hosts that OpenSSH reads is read."""
    subprocess.run(["ssh-keygen", "-q", "-H", "-f", home.ssh / "known_hosts"], check=True, capture_output=True)
    hashed = (home.ssh / "known_hosts").read_text()
    assert "127.0.0.1" not in hashed
    works(at(server))
    (home.ssh / "known_hosts").write_bytes(
        b"not a line\n\xff\xfe ssh-ed25519 AAAA\n|1|x ssh-ed25519\n" + hashed.encode()
    )
    works(at(server))
    home.know(server.known_hosts("node-a"))
    home.config("Host NODE-A", "HostName 127.0.0.1", f"Port {server.port}", "HostKeyAlias node-a")
    works(SshTarget("NODE-A"))
    (tmp_path / f"known-{ME}").write_text(server.known_hosts())
    home.know("")
    home.config(f"UserKnownHostsFile {tmp_path}/absent {tmp_path}/known-%r")
    works(at(server))


def test_a_server_with_several_host_keys_is_asked_for_the_one_that_is_known(home: Home, tmp_path: Path) -> None:
    """known_hosts has only the type that the server likes least: that one is used, as OpenSSH does."""
    kinds = ("ssh-ed25519", "ecdsa-sha2-nistp256", "ssh-rsa")
    with LocalSshd(tmp_path / "sshd", public(LOGIN_KEY), key_types=kinds) as server:
        for kind in kinds:
            home.know(server.known_hosts(kinds=[kind]))
            works(at(server))


def test_a_server_without_the_known_type_of_host_key_is_unknown_and_the_types_are_named(
    home: Home, tmp_path: Path
) -> None:
    """known_hosts has an ed25519 key, the server only ecdsa: no failed key exchange but a key to compare."""
    kind = "ecdsa-sha2-nistp256"
    with LocalSshd(tmp_path / "sshd", public(LOGIN_KEY), key_types=[kind]) as server:
        home.know(f"[127.0.0.1]:{server.port} {public(OTHER_KEY)}\n")
        message, hint = fails(at(server), errors.UnknownHostKeyError)
        assert message == (
            f"the host key of {server.place} is not in known_hosts: it offers {kind} {server.fingerprint(kind)}"
            " (known_hosts has only ssh-ed25519 for it)"
        )
        assert "/etc/ssh/ssh_host_ecdsa_key.pub" in hint
        assert f"`ssh-keyscan -t ecdsa -p {server.port} 127.0.0.1 >> ~/.ssh/known_hosts`" in hint


def test_a_host_certificate_counts_when_its_authority_is_known(home: Home, tmp_path: Path) -> None:
    """@cert-authority lets a certificate in; without that line the authority's fingerprint is shown."""
    authority = asyncssh.generate_private_key("ssh-ed25519")
    folder = tmp_path / "sshd"
    server = LocalSshd(folder, public(LOGIN_KEY), options=[f"HostCertificate {folder}/host-cert.pub"])
    key = server.host_keys["ssh-ed25519"]
    authority.generate_host_certificate(key, "host", principals=["127.0.0.1"]).write_certificate(
        folder / "host-cert.pub"
    )
    with server:
        home.know(f"@cert-authority [127.0.0.1]:* {public(authority)}\n")
        works(at(server))
        home.know("")
        message, hint = fails(at(server), errors.UnknownHostKeyError)
        assert message == (
            f"the host key of {server.place} is not in known_hosts: it offers a certificate signed by"
            f" ssh-ed25519 {authority.get_fingerprint()}, which known_hosts does not name as an authority"
        )
        assert f"`@cert-authority [127.0.0.1]:{server.port} KEY`" in hint


# -- keys and the agent


def test_permission_denied_names_user_methods_and_the_keys_that_were_tried(home: Home, server: LocalSshd) -> None:
    """A key that the server does not know."""
    home.key(OTHER_KEY)
    message, hint = fails(SshTarget("127.0.0.1", "walter", server.port), errors.PermissionDeniedError)
    assert message == (
        f"permission denied for user walter on {server.place}: it accepts publickey; tried ~/.ssh/id_ed25519"
    )
    assert hint == (
        f"is walter the right user? `ssh-copy-id -p {server.port} walter@127.0.0.1` installs your key there"
    )


def test_permission_denied_without_any_key_says_how_to_make_one(empty_home: Home, server: LocalSshd) -> None:
    """An empty ~/.ssh and no agent."""
    empty_home.know(server.known_hosts())
    message, hint = fails(at(server), errors.PermissionDeniedError)
    assert message == f"permission denied for user {ME} on {server.place}: it accepts publickey; tried no key"
    assert hint == (f"make a key with `ssh-keygen` and install it with `ssh-copy-id -p {server.port} 127.0.0.1`")


def test_a_server_that_only_takes_passwords_is_refused_at_once_without_a_prompt(home: Home, tmp_path: Path) -> None:
    """Batch mode: what the server would accept is named, and no one is asked for anything."""
    options = ["PubkeyAuthentication no", "PasswordAuthentication yes", "KbdInteractiveAuthentication yes"]
    with LocalSshd(tmp_path / "sshd", public(LOGIN_KEY), options=options) as server:
        home.know(server.known_hosts())
        message, hint = fails(at(server), errors.PermissionDeniedError)
        methods = "keyboard-interactive, password"
        assert message == f"permission denied for user {ME} on {server.place}: it accepts {methods}; tried no key"
        assert hint == "gpulayer logs in with keys and never asks for a password: allow public keys there"


def test_an_encrypted_key_works_through_the_agent_and_else_says_ssh_add(
    empty_home: Home, server: LocalSshd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """~/.ssh/id_ed25519 has a passphrase, by default or named in the config: no prompt; the agent's copy is used."""
    empty_home.know(server.known_hosts())
    key = empty_home.key(LOGIN_KEY)
    subprocess.run(["ssh-keygen", "-q", "-p", "-N", "open sesame", "-f", key], check=True, capture_output=True)
    bare = tmp_path / "bare"
    LOGIN_KEY.write_private_key(bare)
    bare.chmod(0o600)
    for lines in ([], ["IdentityFile ~/.ssh/id_ed25519", "IdentitiesOnly yes"]):
        empty_home.config(*lines)
        message, hint = fails(at(server), errors.PermissionDeniedError)
        assert message == f"permission denied for user {ME} on {server.place}: it accepts publickey; tried no key"
        assert hint == (
            "~/.ssh/id_ed25519 needs a passphrase, which gpulayer never asks for: `ssh-add ~/.ssh/id_ed25519` first"
        )
        with ssh_agent(tmp_path, bare) as path:
            monkeypatch.setenv("SSH_AUTH_SOCK", path)
            works(at(server))
        monkeypatch.delenv("SSH_AUTH_SOCK")


def test_an_agent_full_of_other_keys_does_not_use_up_the_attempts_for_the_named_key(
    empty_home: Home, server: LocalSshd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight keys in the agent, six attempts at the server: it fails and says why; with IdentityFile it works."""
    empty_home.know(server.known_hosts())
    empty_home.key(LOGIN_KEY, "work")
    others = [empty_home.key(asyncssh.generate_private_key("ssh-ed25519", f"other {n}"), f"other{n}") for n in range(8)]
    with ssh_agent(tmp_path, *others) as path:
        monkeypatch.setenv("SSH_AUTH_SOCK", path)
        message, hint = fails(at(server), errors.PermissionDeniedError)
        tried = ", ".join(f"other {n} (agent)" for n in range(6))
        assert message == (
            f"permission denied for user {ME} on {server.place}: it accepts publickey; tried {tried},"
            " and then it allowed no more attempts"
        )
        assert hint == "name the right key with IdentityFile and set IdentitiesOnly yes in the SSH config"
        empty_home.config("IdentityFile ~/.ssh/absent", "IdentityFile ~/.ssh/work")
        works(at(server))
        empty_home.config("IdentityFile ~/.ssh/work", "IdentitiesOnly yes", "IdentityAgent none")
        works(at(server))


def test_many_nodes_log_in_through_one_connection_to_the_agent(
    empty_home: Home, server: LocalSshd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Agents that serve one client at a time are common, so the agent is asked over one connection."""
    empty_home.know(server.known_hosts())
    empty_home.key(asyncssh.generate_private_key("ssh-rsa", key_size=2048), "wrong")
    key = empty_home.key(LOGIN_KEY, "right")
    with ssh_agent(tmp_path, empty_home.ssh / "wrong", key) as path, one_client_proxy(tmp_path, path) as proxy:
        monkeypatch.setenv("SSH_AUTH_SOCK", proxy)
        assert asyncio.run(login_all([at(server)] * 12)) == [None] * 12


@contextlib.contextmanager
def one_client_proxy(folder: Path, upstream: str) -> Iterator[str]:
    """A socket in front of an agent that serves exactly one client, ever."""
    path = str(folder / "proxy.sock")

    def pump(source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)

    def serve() -> None:
        client, _ = door.accept()
        door.close()
        with client, socket.socket(socket.AF_UNIX) as agent:
            agent.connect(upstream)
            back = threading.Thread(target=pump, args=(agent, client))
            back.start()
            pump(client, agent)
            back.join()

    with socket.socket(socket.AF_UNIX) as door:
        door.bind(path)
        door.listen()
        thread = threading.Thread(target=serve)
        thread.start()
        yield path
        thread.join(10)
        assert not thread.is_alive()


# -- getting there


def test_a_name_without_an_address_is_said_to_have_none(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    """The resolver's own words, and where the name comes from."""

    def no_such_name(*_: object, **__: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", no_such_name)
    message, hint = fails(SshTarget("gpu-77"), errors.NameNotFoundError)
    assert message == "the name gpu-77 cannot be resolved: Name or service not known"
    assert hint == "see `ssh` in the hosts map and HostName in the SSH config, or write the IP address there"
    monkeypatch.undo()
    monkeypatch.setenv("HOME", str(home.path))
    message, _ = fails(SshTarget("x" * 64), errors.NameNotFoundError)
    assert message.startswith(f"the name {'x' * 64} cannot be resolved: ")


def test_a_closed_port_refuses(home: Home) -> None:
    """Also for a name with an IPv4 and an IPv6 address."""
    port = free_port()
    for host in ("127.0.0.1", "localhost"):
        message, hint = fails(SshTarget(host, port=port), errors.ConnectRefusedError)
        assert message == f"{host} port {port} refuses connections: the machine is up, but nothing listens there"
        assert hint == "is sshd running there, and is `port` right?"


def test_a_machine_that_drops_packets_times_out_once(home: Home) -> None:
    """No answer to SYN."""
    with deaf_port() as port:
        message, hint = fails(SshTarget("127.0.0.1", port=port), errors.ConnectTimeoutError, SshSettings(None, 0.3))
        assert message == f"127.0.0.1 port {port} did not answer within 0.3 s"
        assert hint == ("is the machine on, and does a firewall drop the connection? --connect-timeout gives it longer")


def test_a_server_that_accepts_and_stays_silent_times_out(home: Home) -> None:
    """TCP connects, no SSH greeting comes; then a greeting and nothing more. A timeout is not tried again."""
    settings = SshSettings(connect_timeout_s=0.3)
    with listener() as sock:
        port = sock.getsockname()[1]
        message, hint = fails(SshTarget("127.0.0.1", port=port), errors.ConnectTimeoutError, settings)
        assert message == f"127.0.0.1 port {port} accepts connections but sent no SSH greeting within 0.3 s"
        assert hint == "is it an SSH port? A hanging or overloaded machine does this too"
        sock.setblocking(False)
        sock.accept()[0].close()
        with pytest.raises(BlockingIOError):  # there was no second connection
            sock.accept()
    with answering(b"SSH-2.0-Slow\r\n", hold=True) as port:
        message, hint = fails(SshTarget("127.0.0.1", port=port), errors.ConnectTimeoutError, settings)
        assert message == f"127.0.0.1 port {port} did not finish the login within 0.3 s"
        assert "--connect-timeout gives it longer" in hint


@contextlib.contextmanager
def answering(greeting: bytes, *, hold: bool) -> Iterator[int]:
    """A port that sends the greeting to whoever connects, then holds the connection or closes it."""
    held: list[socket.socket] = []

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = sock.accept()
                client.sendall(greeting)
                if hold:
                    held.append(client)
                else:
                    client.close()

    with listener() as sock:
        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield sock.getsockname()[1]
        finally:
            sock.shutdown(socket.SHUT_RDWR)
            thread.join()
            for client in held:
                client.close()


def test_a_server_that_always_hangs_up_is_given_up_within_the_connect_timeout(home: Home) -> None:
    """Drops before the login are tried again, but not for ever."""
    with answering(b"Exceeded MaxStartups\r\n", hold=False) as port:
        message, hint = fails(SshTarget("127.0.0.1", port=port), errors.ConnectionDroppedError, SshSettings(None, 0.5))
        assert message == f"127.0.0.1 port {port} closed the connection before the login, every time"
        assert hint == (
            "see MaxStartups in its sshd_config, and whether a firewall or hosts.deny turns this machine away"
        )


def test_a_port_that_speaks_another_protocol_is_told_apart(home: Home) -> None:
    """An SSH 1 server."""
    with answering(b"SSH-1.5-Old\r\n", hold=True) as port:
        message, hint = fails(SshTarget("127.0.0.1", port=port), errors.ConnectionDroppedError)
        assert message == f"127.0.0.1 port {port} broke off the SSH handshake: Unsupported SSH version"
        assert hint == f"see what `ssh -v -p {port} 127.0.0.1` says"


def test_no_common_algorithm_is_told_apart(home: Home, server: LocalSshd) -> None:
    """The config's Ciphers are obeyed, so they can also be what is wrong."""
    home.config("Ciphers 3des-cbc")
    message, _ = fails(at(server), errors.ConnectionDroppedError)
    assert message.startswith(f"{server.place} and gpulayer have no algorithm in common: No matching encryption")
    home.config("Ciphers aes256-ctr", "HostKeyAlgorithms ssh-ed25519", "Compression yes")
    works(at(server))


def test_a_server_that_drops_most_connections_is_tried_until_all_are_in(home: Home, tmp_path: Path) -> None:
    """MaxStartups 3:100:3 and 24 logins at once: all get in, each exactly once."""
    with LocalSshd(tmp_path / "sshd", public(LOGIN_KEY), options=["MaxStartups 3:100:3"]) as server:
        home.know(server.known_hosts())
        assert asyncio.run(login_all([at(server)] * 24)) == [None] * 24
        assert server.logged("Accepted publickey") == 24


def test_more_nodes_than_the_bound_are_all_connected_at_once(home: Home, server: LocalSshd) -> None:
    """The bound is on logins in flight, not on connections."""
    before = server.logged("Accepted publickey")
    assert asyncio.run(login_all([at(server)] * MANY)) == [None] * MANY
    assert server.logged("Accepted publickey") == before + MANY


def test_a_banner_of_any_bytes_changes_nothing(home: Home, tmp_path: Path) -> None:
    """Latin-1 in the banner, which is no UTF-8."""
    (tmp_path / "banner").write_bytes(b"Zugang nur f\xfcr Befugte\n" * 50)
    with LocalSshd(tmp_path / "sshd", public(LOGIN_KEY), options=[f"Banner {tmp_path}/banner"]) as server:
        home.know(server.known_hosts())
        works(at(server))


def test_cancelling_a_login_leaves_nothing_behind(home: Home, server: LocalSshd) -> None:
    """Ctrl-C while some nodes are connected, some are silent and some wait for their turn."""

    async def interrupted(port: int) -> None:
        async with connecting() as connector:
            silent = SshTarget("127.0.0.1", port=port)
            tasks = [asyncio.create_task(connector.connect(target)) for target in (at(server), *[silent] * MANY)]
            await tasks[0]
            for task in tasks:
                task.cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
            assert all(isinstance(result, asyncio.CancelledError) for result in results[1:])

    with listener() as sock:
        asyncio.run(interrupted(sock.getsockname()[1]))


# -- jump hosts


@pytest.fixture
def jump(tmp_path: Path) -> Iterator[LocalSshd]:
    """A jump host that lets in three logins at a time and drops the rest."""
    with LocalSshd(tmp_path / "jump", public(LOGIN_KEY), options=["MaxStartups 3:100:3"]) as sshd:
        yield sshd


def nodes_behind(server: LocalSshd, jumps: str) -> list[str]:
    """Config lines for nodes that are this server behind jump hosts."""
    return ["Host node-*", "HostName 127.0.0.1", f"Port {server.port}", f"ProxyJump {jumps}"]


def test_all_nodes_behind_a_jump_host_share_one_connection_to_it(
    home: Home, server: LocalSshd, jump: LocalSshd
) -> None:
    """70 nodes, one login at a jump host that would drop more than three."""
    home.know(server.known_hosts(), jump.known_hosts("bastion"))
    alias = ["Host bastion", "HostName 127.0.0.1", f"Port {jump.port}", "HostKeyAlias bastion"]
    home.config(*alias, *nodes_behind(server, "bastion"))
    assert asyncio.run(login_all([SshTarget(f"node-{n}") for n in range(MANY)])) == [None] * MANY
    assert jump.logged("Accepted publickey") == 1


def test_several_hops_are_travelled_in_order_and_shared(
    home: Home, server: LocalSshd, jump: LocalSshd, tmp_path: Path
) -> None:
    """Two hops written with user and port; each is logged in to once, the second one through the first."""
    with LocalSshd(tmp_path / "second", public(LOGIN_KEY)) as second:
        home.know(server.known_hosts(), jump.known_hosts(), second.known_hosts())
        hops = f"{ME}@127.0.0.1:{jump.port},ssh://127.0.0.1:{second.port}"
        home.config(*nodes_behind(server, hops), "Host direct", "HostName 127.0.0.1", f"Port {server.port}")
        assert asyncio.run(login_all([SshTarget(f"node-{n}") for n in range(3)])) == [None] * 3
        assert (jump.logged("Accepted publickey"), second.logged("Accepted publickey")) == (1, 1)
        home.config("Host node-1", "ProxyJump none", *nodes_behind(server, hops))
        works(SshTarget("node-1"))
        assert jump.logged("Accepted publickey") == 1


def test_a_failure_at_the_jump_host_names_the_jump_host_for_every_node(
    home: Home, server: LocalSshd, jump: LocalSshd
) -> None:
    """Unknown host key, closed port and an unknown user of the jump host, not of the node."""
    home.config(*nodes_behind(server, f"127.0.0.1:{jump.port}"))
    results = asyncio.run(login_all([SshTarget("node-1"), SshTarget("node-2")]))
    assert [type(result) for result in results] == [errors.UnknownHostKeyError] * 2
    assert results[0] is not results[1]
    assert (
        str(results[0])
        == str(results[1])
        == (
            f"jump host 127.0.0.1:{jump.port}: the host key of {jump.place} is not in known_hosts: it offers"
            f" ssh-ed25519 {jump.fingerprint()}"
        )
    )
    home.know(server.known_hosts(), jump.known_hosts())
    home.config(*nodes_behind(server, f"nobody-here@127.0.0.1:{jump.port}"))
    message, _ = fails(SshTarget("node-1"), errors.PermissionDeniedError)
    assert message.startswith(f"jump host nobody-here@127.0.0.1:{jump.port}: permission denied for user nobody-here on")
    port = free_port()
    home.config(*nodes_behind(server, f"127.0.0.1:{jump.port},127.0.0.1:{port}"))
    message, _ = fails(SshTarget("node-1"), errors.ConnectRefusedError)
    assert message.startswith(
        f"jump host 127.0.0.1:{port}: the jump host 127.0.0.1:{jump.port} cannot connect to 127.0.0.1 port {port}: "
    )


def test_a_node_that_the_jump_host_cannot_reach_is_told_apart(home: Home, server: LocalSshd, jump: LocalSshd) -> None:
    """The jump host is fine, the node's port is closed, or silent, or its key unknown; or forwarding is forbidden."""
    home.know(jump.known_hosts())
    home.config(*nodes_behind(server, f"127.0.0.1:{jump.port}"))
    port = free_port()
    message, hint = fails(SshTarget("node-1", port=port), errors.ConnectRefusedError)
    assert message == (
        f"the jump host 127.0.0.1:{jump.port} cannot connect to 127.0.0.1 port {port}: Connection refused"
    )
    assert hint == "is sshd running there, and is `port` right?"
    message, hint = fails(SshTarget("node-1"), errors.UnknownHostKeyError)
    assert message.startswith(f"the host key of {server.place} is not in known_hosts")
    assert "add it by answering the question of `ssh node-1`" in hint
    with listener() as sock:
        port = sock.getsockname()[1]
        target = SshTarget("node-1", port=port)
        message, _ = fails(target, errors.ConnectTimeoutError, SshSettings(connect_timeout_s=1))
        assert message == f"127.0.0.1 port {port} accepts connections but sent no SSH greeting within 1 s"


def test_a_jump_host_that_forbids_forwarding_is_told_apart(home: Home, server: LocalSshd, tmp_path: Path) -> None:
    """AllowTcpForwarding no."""
    with LocalSshd(tmp_path / "jump", public(LOGIN_KEY), options=["AllowTcpForwarding no"]) as jump:
        home.know(jump.known_hosts(), server.known_hosts())
        home.config(*nodes_behind(server, f"127.0.0.1:{jump.port}"))
        message, hint = fails(SshTarget("node-1"), errors.ConnectRefusedError)
        assert message.startswith(f"the jump host 127.0.0.1:{jump.port} cannot connect to {server.place}: ")
        assert hint == "see AllowTcpForwarding and PermitOpen in the jump host's sshd_config"


def test_a_proxy_jump_that_goes_in_a_circle_is_an_error(home: Home) -> None:
    """`Host *` with ProxyJump also holds for the jump host."""
    home.config("Host *", "ProxyJump bastion")
    message, hint = fails(SshTarget("gpu-01"), errors.SshConfigError)
    assert message == "ProxyJump in the SSH config goes in a circle: gpu-01 -> bastion -> bastion"
    assert hint == "exempt it: `Host bastion` with `ProxyJump none`, above the block that sets ProxyJump"


def test_a_lost_jump_host_ends_its_links_with_a_reason_and_is_reached_anew(
    home: Home, server: LocalSshd, jump: LocalSshd
) -> None:
    """The jump host's session dies: the channel ends with a reason; the next login gets a new connection."""
    home.know(server.known_hosts(), jump.known_hosts())
    home.config(*nodes_behind(server, f"127.0.0.1:{jump.port}"))

    async def scenario() -> None:
        async with connecting() as connector:
            link = await connector.connect(SshTarget("node-1"))
            recorder = Recorder()
            await link.open("echo $$; exec sleep 300", recorder)
            await recorder.until(b"\n")
            kill_sessions(jump)
            await recorder.until(ended=True)
            ((status, signal, reason),) = recorder.ends
            assert (status, signal, bool(reason)) == (None, None, True)
            os.kill(int(recorder.stdout), 9)
            again = await connector.connect(SshTarget("node-1"))
            await again.close()

    asyncio.run(scenario())
    assert jump.logged("Accepted publickey") == 2


def kill_sessions(server: LocalSshd) -> None:
    """SIGKILL to what serves the server's connections."""
    for child in server.session_pids():
        os.kill(child, 9)


# -- channels


def test_a_command_gets_bytes_and_gives_bytes_and_its_exit_status(home: Home, server: LocalSshd) -> None:
    """stdin to end of file, stdout and stderr apart, every byte as it was, the status at the end; once each."""
    data = bytes(range(256)) * 1000

    async def scenario() -> None:
        async with connecting() as connector:
            link = await connector.connect(at(server))
            recorder = Recorder()
            channel = await link.open("cat; echo oops >&2; exit 7", recorder)
            channel.write(data)
            channel.write_eof()
            await recorder.until(ended=True)
            assert (bytes(recorder.stdout), bytes(recorder.stderr)) == (data, b"oops\n")
            assert recorder.ends == [(7, None, None)]
            channel.write(b"too late")
            channel.write_eof()
            channel.close()
            killed = Recorder()
            await link.open("kill -KILL $$", killed)
            await killed.until(ended=True)
            assert killed.ends == [(None, "KILL", None)]
            await link.close()

    asyncio.run(scenario())


def test_stdin_stays_open_after_the_command_has_closed_its_stdout(home: Home, server: LocalSshd) -> None:
    """The end of the command's output is not the end of its input."""

    async def scenario() -> None:
        async with connecting() as connector:
            link = await connector.connect(at(server))
            recorder = Recorder()
            channel = await link.open('echo ready; exec >&-; read line; test "$line" = go', recorder)
            await recorder.until(b"ready\n")
            channel.write(b"go\n")
            await recorder.until(ended=True)
            assert recorder.ends == [(0, None, None)]

    asyncio.run(scenario())


def test_130_megabytes_arrive_whole_and_a_paused_channel_holds_them_back(home: Home, server: LocalSshd) -> None:
    """While paused nothing is delivered; afterwards every byte is, in order."""
    size = 130_000_000

    class Counter(Recorder):
        count = 0
        paused = False

        def data_received(self, data: bytes) -> None:
            assert not self.paused
            assert data.count(0) == len(data)
            self.count += len(data)
            self.changed.set()

    async def scenario() -> None:
        async with connecting() as connector:
            link = await connector.connect(at(server))
            counter = Counter()
            channel = await link.open(f"head -c {size} /dev/zero; echo end >&2", counter)
            while counter.count < 10_000_000:
                counter.changed.clear()
                await counter.changed.wait()
            channel.pause()
            counter.paused = True
            other = Recorder()
            await link.open("true", other)  # a whole command meanwhile, on the same connection
            await other.until(ended=True)
            counter.paused = False
            channel.resume()
            await counter.until(ended=True)
            assert (counter.count, bytes(counter.stderr), counter.ends) == (size, b"end\n", [(0, None, None)])

    asyncio.run(scenario())


def test_max_sessions_1_is_enough_and_a_refused_session_is_explained(home: Home, tmp_path: Path) -> None:
    """One command at a time works, one after the other too; a second at once is refused in words."""
    with LocalSshd(tmp_path / "sshd", public(LOGIN_KEY), options=["MaxSessions 1"]) as server:
        home.know(server.known_hosts())

        async def scenario() -> None:
            async with connecting() as connector:
                link = await connector.connect(at(server))
                first, second, third = Recorder(), Recorder(), Recorder()
                channel = await link.open("cat", first)
                with pytest.raises(errors.ConnectionDroppedError) as caught:
                    await link.open("true", second)
                assert (
                    str(caught.value) == f"{server.place} accepted the login but refused to run a command: open failed"
                )
                assert caught.value.hint == (
                    "see MaxSessions and ForceCommand in its sshd_config,"
                    " and the options of your key in authorized_keys"
                )
                channel.write_eof()
                await first.until(ended=True)
                await link.open("true", third)
                await third.until(ended=True)
                assert (first.ends, second.ends, third.ends) == ([(0, None, None)], [], [(0, None, None)])

        asyncio.run(scenario())


def test_ending_a_link_or_channel_here_gives_no_reason_and_losing_it_does(home: Home, server: LocalSshd) -> None:
    """close, abort and a channel's own close end without a reason; a dead sshd session is a loss."""

    async def start(connector: SshConnector) -> tuple[SshLink, SshChannel, Recorder]:
        link = await connector.connect(at(server))
        recorder = Recorder()
        channel = await link.open("echo up; exec cat", recorder)
        await recorder.until(b"up\n")
        return link, channel, recorder

    async def scenario() -> None:
        async with connecting() as connector:
            _, channel, recorder = await start(connector)
            channel.close()
            await recorder.until(ended=True)
            assert recorder.ends in ([(None, None, None)], [(0, None, None)])  # cat may end first
            for hard in (True, False):
                link, channel, recorder = await start(connector)
                if hard:
                    link.abort()
                else:
                    await link.close()
                await recorder.until(ended=True)
                channel.write(b"nobody there")
                assert recorder.ends == [(None, None, None)]
            _, channel, recorder = await start(connector)
            kill_sessions(server)
            await recorder.until(ended=True)
            ((status, signal, reason),) = recorder.ends
            assert (status, signal) == (None, None)
            assert reason

    asyncio.run(scenario())


def test_agent_forwarding_environment_and_terminal_are_never_asked_for(
    home: Home, server: LocalSshd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the config says: the node gets no way back to the user's keys, and no terminal."""
    home.config(
        "ForwardAgent yes", "RequestTTY force", "SendEnv *", "SetEnv A=b", "RemoteCommand false", "ForwardX11 yes"
    )
    with ssh_agent(tmp_path) as path:
        monkeypatch.setenv("SSH_AUTH_SOCK", path)
        command = 'echo "${SSH_AUTH_SOCK-none} ${SSH_TTY-none} ${DISPLAY-none} ${A-none}"'
        assert asyncio.run(login_and_run(at(server), command)) == b"none none none none\n"


# -- config


def test_the_config_is_read_from_home_from_another_file_or_not_at_all(
    home: Home, server: LocalSshd, tmp_path: Path
) -> None:
    """$HOME decides; a file can be named; `none` is none; a file that is not there is an error."""
    home.config("Host alias", "HostName 127.0.0.1", f"Port {server.port}")
    works(SshTarget("alias"))
    (home.ssh / "config").rename(tmp_path / "other")
    works(SshTarget("alias"), SshSettings(tmp_path / "other"))
    (tmp_path / "other").rename(home.ssh / "config")
    home.config("Port 1")
    works(at(server), SshSettings(Path("none")))
    message, _ = fails(at(server), errors.SshConfigError, SshSettings(tmp_path / "other"))
    assert message == f"the SSH config {tmp_path}/other does not exist"


def test_a_proxy_command_is_used(home: Home, server: LocalSshd) -> None:
    """ProxyCommand reaches the node; when it fails, that is said once and not tried again and again."""
    program = (
        "import os,socket,sys,threading as t;s=socket.create_connection((sys.argv[1],int(sys.argv[2])));"
        "f=lambda r,w:[w(d) for d in iter(lambda:r(65536),b'')];"
        "t.Thread(target=f,args=(s.recv,lambda d:os.write(1,d)),daemon=True).start();"
        "f(lambda n:os.read(0,n),s.sendall)"
    )
    home.config(f'ProxyCommand python3 -c "{program}" %h %p')
    works(at(server))
    tries = home.path / "tries"
    home.config(f"ProxyCommand sh -c 'echo try >> {tries}'")
    message, _ = fails(at(server), errors.ConnectionDroppedError)
    assert message.startswith(f"{server.place} closed the connection before the login")
    assert tries.read_text() == "try\n"


def test_a_server_that_does_not_start_says_why(tmp_path: Path) -> None:
    """The helper of these tests does not hang on a broken sshd_config."""
    with pytest.raises(RuntimeError, match="NoSuchOption"), LocalSshd(tmp_path, "", options=["NoSuchOption yes"]):
        pass
