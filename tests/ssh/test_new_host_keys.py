"""--accept-new-host-keys: what is added to known_hosts, in which words, and what is refused all the same."""

from __future__ import annotations

import asyncio
import fcntl
import itertools
import os
import subprocess
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import asyncssh
import pytest

from gpulayer import errors, known_hosts
from gpulayer.ssh import SshConnector, SshSettings, SshTarget
from tests.support.jobs import GPULAYER, TELL, map_with_fake_torch, run, write_script
from tests.support.local_sshd import Home, LocalSshd, public
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tests.support.cluster import Cluster

pytestmark = pytest.mark.ssh

LOGIN_KEY = asyncssh.generate_private_key("ssh-ed25519")
OTHER_KEY = asyncssh.generate_private_key("ssh-ed25519")
ACCEPTING = SshSettings(accept_new_host_keys=True)
ADD = "--accept-new-host-keys"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalSshd]:
    """A plain server that lets LOGIN_KEY in."""
    with LocalSshd(tmp_path_factory.mktemp("server"), public(LOGIN_KEY)) as sshd:
        yield sshd


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Home:
    """A home folder with the login key, an empty SSH config and no known_hosts."""
    home = Home(tmp_path / "home")
    home.ssh.mkdir(mode=0o700, parents=True)
    home.key(LOGIN_KEY)
    home.config("HashKnownHosts no")
    monkeypatch.setenv("HOME", str(home.path))
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    return home


def at(server: LocalSshd) -> SshTarget:
    """The server by its address and port."""
    return SshTarget("127.0.0.1", port=server.port)


def accept(*targets: SshTarget, settings: SshSettings = ACCEPTING) -> list[str]:
    """Log in to all at once, and return what was told. Raises the first failure."""
    said: list[str] = []

    async def all_of_them() -> None:
        connector = SshConnector(settings, said.append)
        try:
            done = await asyncio.gather(*(connector.connect(target) for target in targets), return_exceptions=True)
        finally:
            await connector.close()
        for result in done:
            if isinstance(result, BaseException):
                raise result

    asyncio.run(all_of_them())
    return said


def refused(target: SshTarget, kind: type[errors.NodeError], settings: SshSettings = ACCEPTING) -> tuple[str, str]:
    """The message and hint with which logging in fails."""
    with pytest.raises(errors.NodeError) as caught:
        accept(target, settings=settings)
    assert type(caught.value) is kind, caught.value
    return str(caught.value), caught.value.hint or ""


def known(home: Home, name: str = "known_hosts") -> list[str]:
    """The lines of a known_hosts file."""
    path = home.ssh / name
    return path.read_text().splitlines() if path.exists() else []


def as_ssh_writes(home: Home, folder: Path, *words: str) -> list[str]:
    """What OpenSSH's accept-new makes of the same known_hosts, which is left as it was."""
    file = folder / "as-ssh"
    file.write_text((home.ssh / "known_hosts").read_text() if (home.ssh / "known_hosts").exists() else "")
    options = [f"UserKnownHostsFile={file}", "StrictHostKeyChecking=accept-new", f"IdentityFile={home.ssh}/id_ed25519"]
    words = tuple(itertools.chain.from_iterable(("-o", option) for option in options)) + words
    argv = ["ssh", "-F", str(home.ssh / "config"), "-o", "BatchMode=yes", "-o", "UpdateHostKeys=no", *words, "true"]
    subprocess.run(argv, check=True, capture_output=True, stdin=subprocess.DEVNULL)
    return file.read_text().splitlines()


# -- what is added


def test_a_new_key_is_added_as_openssh_adds_it_and_told_with_its_fingerprint(
    home: Home, server: LocalSshd, tmp_path: Path
) -> None:
    """The line is the one that `ssh` writes; the next login needs no option; another line of the file stays."""
    home.know(f"else.where {public(OTHER_KEY)}\n")
    expected = as_ssh_writes(home, tmp_path, "-p", str(server.port), "127.0.0.1")
    home.know(f"else.where {public(OTHER_KEY)}")  # without an end, the last line must not grow
    assert accept(at(server)) == [
        f"added the host key of {server.place} to ~/.ssh/known_hosts: ssh-ed25519 {server.fingerprint()}"
    ]
    assert known(home) == expected == [f"else.where {public(OTHER_KEY)}", server.known_hosts().strip()]
    assert accept(at(server)) == []
    assert accept(at(server), settings=SshSettings()) == []
    assert known(home) == expected


def test_without_the_option_nothing_is_added(home: Home, server: LocalSshd) -> None:
    """The key is refused, the option is named, and known_hosts is not even made."""
    _, hint = refused(at(server), errors.UnknownHostKeyError, SshSettings())
    assert "`--accept-new-host-keys` adds the keys of new hosts" in hint
    assert not (home.ssh / "known_hosts").exists()


@pytest.mark.parametrize("umask", [0o000, 0o077])
def test_the_folder_and_the_file_are_made_for_the_user_alone(
    home: Home, server: LocalSshd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, umask: int
) -> None:
    """~/.ssh is made with mode 0700 and known_hosts with 0600, whatever the umask; a file that is there keeps its."""
    (home.ssh / "config").write_text("")
    new_home = Home(tmp_path / "new")
    new_home.path.mkdir()
    settings = SshSettings(tmp_path / "config", accept_new_host_keys=True)
    settings.config.write_text(f"HashKnownHosts no\nIdentityFile {home.ssh}/id_ed25519\n")  # type: ignore[union-attr]
    monkeypatch.setenv("HOME", str(new_home.path))
    before = os.umask(umask)
    try:
        accept(at(server), settings=settings)
    finally:
        os.umask(before)
    assert known(new_home) == [server.known_hosts().strip()]
    assert oct(new_home.ssh.stat().st_mode & 0o777) == "0o700"
    assert oct((new_home.ssh / "known_hosts").stat().st_mode & 0o777) == "0o600"
    new_home.know("")
    (new_home.ssh / "known_hosts").chmod(0o640)
    accept(at(server), settings=settings)
    assert oct((new_home.ssh / "known_hosts").stat().st_mode & 0o777) == "0o640"


def test_names_are_hashed_where_ssh_would_hash_them(home: Home, server: LocalSshd, tmp_path: Path) -> None:
    """HashKnownHosts, of the host's own block in the config too: no name is in the file, and `ssh-keygen` finds it."""
    home.config("Host 127.*", "HashKnownHosts yes")
    assert len(accept(at(server))) == 1
    (line,) = known(home)
    (home.ssh / "known_hosts").rename(home.ssh / "ours")
    (of_ssh,) = as_ssh_writes(home, tmp_path, "-p", str(server.port), "127.0.0.1")
    (home.ssh / "ours").rename(home.ssh / "known_hosts")
    assert [len(part) for part in line.split("|")] == [len(part) for part in of_ssh.split("|")]
    assert line.startswith("|1|")
    assert line.split()[1:] == server.known_hosts().split()[1:]
    name = f"[127.0.0.1]:{server.port}"
    found = subprocess.run(["ssh-keygen", "-F", name, "-f", home.ssh / "known_hosts"], capture_output=True, check=True)
    assert line.encode() in found.stdout
    assert accept(at(server)) == []
    assert known(home) == [line]


def test_aliases_capitals_and_other_files_are_obeyed(home: Home, server: LocalSshd, tmp_path: Path) -> None:
    """HostKeyAlias, a HostName in capitals and UserKnownHostsFile give the line that `ssh` writes."""
    block = ["HostName 127.0.0.1", f"Port {server.port}"]
    home.config(
        "HashKnownHosts no", "Host one", *block, "HostKeyAlias Node-A", "Host two", "HostName LOCALHOST", *block
    )
    for name in ("one", "two"):
        home.know("")
        expected = as_ssh_writes(home, tmp_path, name)
        accept(SshTarget(name))
        assert known(home) == expected, name
        assert len(expected) == 1
    home.know("")
    home.config("HashKnownHosts no", f"UserKnownHostsFile {home.ssh}/first {home.ssh}/known_hosts")
    (told,) = accept(at(server))
    assert "to ~/.ssh/first: " in told
    assert (known(home, "first"), known(home)) == ([server.known_hosts().strip()], [])


def test_a_server_with_several_keys_gives_the_one_that_openssh_takes(home: Home, tmp_path: Path) -> None:
    """One line, of the type that `ssh` prefers."""
    kinds = ("ssh-rsa", "ecdsa-sha2-nistp256", "ssh-ed25519")
    with LocalSshd(tmp_path / "sshd", public(LOGIN_KEY), key_types=kinds) as server:
        expected = as_ssh_writes(home, tmp_path, "-p", str(server.port), "127.0.0.1")
        accept(at(server))
        assert known(home) == expected == [server.known_hosts(kinds=["ssh-ed25519"]).strip()]


def test_jump_hosts_are_added_too(home: Home, server: LocalSshd, tmp_path: Path) -> None:
    """A line for the jump host and one for the nodes behind it, however many of them connect at once."""
    with LocalSshd(tmp_path / "jump", public(LOGIN_KEY)) as jump:
        home.config(
            "HashKnownHosts no",
            *("Host node-*", "HostName 127.0.0.1", f"Port {server.port}", f"ProxyJump 127.0.0.1:{jump.port}"),
        )
        told = accept(*(SshTarget(f"node-{n}") for n in range(4)))
        assert known(home) == [jump.known_hosts().strip(), server.known_hosts().strip()]
        assert [line.partition(" to ")[0] for line in told] == [
            f"added the host key of {one.place}" for one in (jump, server)
        ]


def test_a_key_is_kept_also_where_the_login_is_refused_then(home: Home, server: LocalSshd) -> None:
    """As with `ssh`: the server has shown that it holds the key, whatever it thinks of the user."""
    home.key(OTHER_KEY)
    message, _ = refused(at(server), errors.PermissionDeniedError)
    assert message.startswith("permission denied")
    assert known(home) == [server.known_hosts().strip()]


# -- many at once


def test_many_logins_at_once_add_one_line_for_each_host(home: Home, tmp_path: Path) -> None:
    """Twelve logins of two connectors to three servers: three lines, none of them broken, none twice."""
    with (
        LocalSshd(tmp_path / "a", public(LOGIN_KEY)) as a,
        LocalSshd(tmp_path / "b", public(LOGIN_KEY)) as b,
        LocalSshd(tmp_path / "c", public(LOGIN_KEY)) as c,
    ):
        told: list[str] = []
        targets = [at(one) for one in (a, b, c)] * 4
        threads = [threading.Thread(target=lambda: told.extend(accept(*targets))) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(known(home)) == sorted(one.known_hosts().strip() for one in (a, b, c))
        assert len(told) == 3


def test_two_processes_that_add_keys_wait_for_each_other(home: Home) -> None:
    """Eight processes add the same twenty names and four more each: every line is there once, and whole."""
    key = home.ssh / "other.pub"
    key.write_text(public(OTHER_KEY))
    program = (
        "import sys, asyncssh; from pathlib import Path; from gpulayer.known_hosts import NewKey, add_key\n"
        "key, file = asyncssh.read_public_key(sys.argv[1]), Path(sys.argv[2])\n"
        "for name in [f'n{n}' for n in range(20)] + [f'own{sys.argv[3]}-{n}' for n in range(4)]:\n"
        "    add_key(NewKey(name, key, file, (file,)), hashed=False)\n"
    )
    argv = [GPULAYER[0], "-c", program, str(key), str(home.ssh / "known_hosts")]
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    processes = [subprocess.Popen([*argv, str(number)], env=env) for number in range(8)]
    assert [process.wait(60) for process in processes] == [0] * 8
    names = [f"n{n}" for n in range(20)] + [f"own{p}-{n}" for p in range(8) for n in range(4)]
    assert sorted(known(home)) == sorted(f"{name} {public(OTHER_KEY)}" for name in names)


def test_a_file_that_is_replaced_while_it_was_waited_for_is_opened_anew(home: Home) -> None:
    """`ssh-keygen -R` puts a new file in place: the line goes there, and not into the one that is gone."""
    home.know("")
    file = home.ssh / "known_hosts"
    new = known_hosts.NewKey("n", OTHER_KEY.convert_to_public(), file, (file,))
    with file.open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        thread = threading.Thread(target=known_hosts.add_key, args=(new,), kwargs={"hashed": False})
        thread.start()
        wait_until(lambda: len(_open_files(file)) == 2, "the other one has opened it")
        (home.ssh / "new").write_text("# new\n")
        (home.ssh / "new").rename(file)
    thread.join(10)
    assert known(home) == ["# new", f"n {public(OTHER_KEY)}"]


def _open_files(path: Path) -> list[str]:
    return [fd for fd in map(str, Path("/proc/self/fd").iterdir()) if os.path.realpath(fd) == str(path)]


def test_a_lock_that_is_never_given_back_is_not_waited_for_for_ever(
    home: Home, server: LocalSshd, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The login is refused, with the reason, and nothing is written."""
    monkeypatch.setattr(known_hosts, "LOCK_LIMIT_S", 0.2)
    home.know("")
    with (home.ssh / "known_hosts").open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        message, _ = refused(at(server), errors.UnknownHostKeyError)
    assert message == (
        f"the host key of {server.place} is new, and cannot be added to known_hosts: ~/.ssh/known_hosts:"
        " another process has locked it for 0.2 s"
    )
    assert known(home) == []


# -- what is refused all the same


def test_a_changed_key_is_refused(home: Home, server: LocalSshd) -> None:
    """Another key of the same type, hashed or not: nothing is added, and the words are those without the option."""
    for pattern in (f"[127.0.0.1]:{server.port}", known_hosts.hashed_name(f"[127.0.0.1]:{server.port}"), "*"):
        home.know(f"{pattern} {public(OTHER_KEY)}\n")
        message, _ = refused(at(server), errors.ChangedHostKeyError)
        assert message.startswith(f"the host key of {server.place} has changed: known_hosts has ssh-ed25519 ")
        assert len(known(home)) == 1


def test_a_host_that_is_known_by_another_type_of_key_is_not_new(home: Home, tmp_path: Path) -> None:
    """Stricter than `ssh`, which would take it: who answers in a host's place need only offer another type."""
    with LocalSshd(tmp_path / "sshd", public(LOGIN_KEY), key_types=["ecdsa-sha2-nistp256"]) as server:
        home.know(f"[127.0.0.1]:{server.port} {public(OTHER_KEY)}\n")
        message, hint = refused(at(server), errors.UnknownHostKeyError)
        assert message.endswith(" (known_hosts has only ssh-ed25519 for it)")
        assert hint.endswith("`--accept-new-host-keys` is for hosts that known_hosts has nothing of")
        assert len(known(home)) == 1


@pytest.mark.parametrize("pattern", ["*", "[127.0.0.1]:{port}", "127.0.0.1"])
def test_a_revoked_key_is_refused_even_where_nothing_else_is_known(home: Home, server: LocalSshd, pattern: str) -> None:
    """@revoked for all hosts, for this host and port, and in the second file; a key with that mark is never added."""
    home.config("HashKnownHosts no", f"UserKnownHostsFile {home.ssh}/known_hosts {home.ssh}/marks")
    line = f"@revoked {pattern.format(port=server.port)} {public(server.host_keys['ssh-ed25519'])}\n"
    (home.ssh / "marks").write_text(line)
    message, _ = refused(at(server), errors.ChangedHostKeyError)
    assert message == f"the host key of {server.place} is marked as revoked in known_hosts"
    assert known(home) == []


def test_a_key_that_somebody_else_adds_meanwhile_wins(home: Home, server: LocalSshd) -> None:
    """Two logins that meet different machines under one name: the one that comes second is refused."""
    file = home.ssh / "known_hosts"
    files = (file, home.ssh / "marks")
    new = known_hosts.NewKey("n", LOGIN_KEY.convert_to_public(), file, files)
    known_hosts.add_key(known_hosts.NewKey("n", OTHER_KEY.convert_to_public(), file, files), hashed=True)
    with pytest.raises(known_hosts.NotNewError) as caught:
        known_hosts.add_key(new, hashed=False)
    assert (caught.value.keys, caught.value.revoked) == ([OTHER_KEY.convert_to_public()], False)
    home.know("")
    files[1].write_text(f"@revoked * {public(LOGIN_KEY)}\n")
    with pytest.raises(known_hosts.NotNewError, match="revoked"):
        known_hosts.add_key(new, hashed=False)
    assert known(home) == []


def test_host_certificates_are_judged_by_their_authority_alone(home: Home, tmp_path: Path) -> None:
    """A known authority is enough, and adds nothing; beside one, a plain key is not new; without one, it is added."""
    authority = asyncssh.generate_private_key("ssh-ed25519")
    folder = tmp_path / "sshd"
    server = LocalSshd(folder, public(LOGIN_KEY), options=[f"HostCertificate {folder}/host-cert.pub"])
    key = server.host_keys["ssh-ed25519"]
    certificate = authority.generate_host_certificate(key, "host", principals=["127.0.0.1"])
    certificate.write_certificate(folder / "host-cert.pub")
    with server, LocalSshd(tmp_path / "plain", public(LOGIN_KEY)) as plain:
        for pattern in ("[127.0.0.1]:*", "127.0.0.1"):
            trust = f"@cert-authority {pattern} {public(authority)}\n"
            home.know(trust)
            assert accept(at(server)) == []
            message, _ = refused(at(plain), errors.UnknownHostKeyError)
            assert message.endswith(" (known_hosts has only an authority for it)")
            assert known(home) == [trust.strip()]
        home.know("")
        expected = as_ssh_writes(home, tmp_path, "-p", str(server.port), "127.0.0.1")
        assert len(accept(at(server))) == 1
        assert known(home) == expected == [server.known_hosts().strip()]


def test_a_host_known_on_port_22_is_new_on_another_as_for_openssh(
    home: Home, server: LocalSshd, tmp_path: Path
) -> None:
    """The same key there is enough; another key there is that of another server."""
    home.know(server.known_hosts("127.0.0.1"))
    assert accept(at(server)) == []
    home.know(f"127.0.0.1 {public(OTHER_KEY)}\n")
    expected = as_ssh_writes(home, tmp_path, "-p", str(server.port), "127.0.0.1")
    accept(at(server))
    assert known(home) == expected
    assert len(expected) == 2


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("UserKnownHostsFile /dev/null", "/dev/null: it is no regular file"),
        ("UserKnownHostsFile none", "the SSH config sets UserKnownHostsFile none"),
        ("UserKnownHostsFile ~/no/such/file", "~/no/such/file: No such file or directory"),
        ("RevokedHostKeys /etc/hostname", "the SSH config sets RevokedHostKeys, which gpulayer does not read"),
    ],
)
def test_a_key_that_cannot_be_kept_is_not_accepted(home: Home, server: LocalSshd, line: str, reason: str) -> None:
    """Accepted and forgotten, it would be accepted from anyone the next time."""
    home.config(line)
    message, hint = refused(at(server), errors.UnknownHostKeyError)
    assert message == f"the host key of {server.place} is new, and cannot be added to known_hosts: {reason}"
    assert "UserKnownHostsFile" in hint


def test_a_full_disk_leaves_no_half_line(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was written of the line is taken back, and the key is refused."""
    home.know("# first\n")
    file = home.ssh / "known_hosts"
    new = known_hosts.NewKey("n", OTHER_KEY.convert_to_public(), file, (file,))
    write = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, data[:9]))
    with pytest.raises(known_hosts.NotKeptError, match="No space left"):
        known_hosts.add_key(new, hashed=False)
    assert file.read_text() == "# first\n"


# -- the commands


def test_run_and_check_take_the_option_and_say_what_they_added(cluster2: Cluster) -> None:
    """Refused without the option; with it, check adds both keys and says so, and the run after it adds none."""
    hosts, script = map_with_fake_torch(cluster2), write_script(cluster2, TELL)
    file = cluster2.login.home / ".ssh/known_hosts"
    (cluster2.login.home / ".ssh/config").write_text("HashKnownHosts no\n")
    file.unlink()
    first = run(cluster2.login, hosts, ["-e", f"OUT={script.parent}"], script)
    assert (first.returncode, file.exists()) == (3, False)
    argv = [*GPULAYER, "check", "-H", str(hosts), ADD, "--format", "json"]
    checked = cluster2.login.run(argv)
    assert checked.returncode == 0, checked.stderr
    fingerprints = {host.name: _fingerprint(host.public_key) for host in cluster2.hosts}
    assert sorted(_added(checked.stderr.splitlines())) == [
        f"gpulayer: added the host key of {name} port 22 to ~/.ssh/known_hosts: ssh-ed25519 {fingerprint}"
        for name, fingerprint in fingerprints.items()
    ]
    assert sorted(file.read_text().splitlines()) == [f"{host.name} {host.public_key}" for host in cluster2.hosts]
    again = run(cluster2.login, hosts, [ADD, "-e", f"OUT={script.parent}"], script)
    assert (again.returncode, _added(again.stderr.splitlines())) == (0, [])


def test_a_run_tells_each_key_once_on_the_screen_and_in_its_events(cluster2: Cluster) -> None:
    """One host is new: one line, one notice, one line in known_hosts, and the job runs."""
    hosts, script = map_with_fake_torch(cluster2), write_script(cluster2, TELL)
    file = cluster2.login.home / ".ssh/known_hosts"
    lines = [line for line in cluster2.known_hosts().splitlines() if not line.startswith("h01")]
    file.write_text("\n".join(lines))
    (cluster2.login.home / ".ssh/config").write_text("HashKnownHosts no\n")
    done = run(cluster2.login, hosts, [ADD, "-e", f"OUT={script.parent}"], script)
    assert done.returncode == 0, done.stderr
    assert len(_added(done.stderr.splitlines())) == 1
    (notice,) = done.named("notice")
    host = cluster2.hosts[1]
    fingerprint = _fingerprint(host.public_key)
    assert notice["text"] == f"added the host key of h01 port 22 to ~/.ssh/known_hosts: ssh-ed25519 {fingerprint}"
    assert file.read_text().splitlines() == [*lines, f"h01 {host.public_key}"]


def _added(lines: Sequence[str]) -> list[str]:
    return [line for line in lines if "added the host key" in line]


def _fingerprint(line: str) -> str:
    return asyncssh.import_public_key(line).get_fingerprint()
