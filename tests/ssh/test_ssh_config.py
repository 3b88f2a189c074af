"""The SSH config means to gpulayer what it means to OpenSSH: every case here is compared with `ssh -G`."""

from __future__ import annotations

import getpass
import subprocess
from typing import TYPE_CHECKING

import pytest

from gpulayer.ssh_config import SshSettings, SshTarget, read_endpoint

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.ssh

CONFIG = """
# what comes first counts
Host gpu-0[1-9]
    User wrong-because-no-brackets-in-patterns
Host gpu-?? !gpu-13
    HostName %h.cluster.example
    Port=2201
    IdentityFile {folder}/id_%r
    ProxyJump me@bastion:2222,second
Host gpu-13
    HostName "10.0.0.13"
Include {folder}/more.conf {folder}/absent-*.conf
Match host *.cluster.example user {me}
    UserKnownHostsFile {folder}/known_%k {folder}/known_all
    HostKeyAlias cluster-node
Match originalhost plain exec "true"
    User executed
Match originalhost plain exec "false"
    Port 1
Match !originalhost plain
    IdentityFile {folder}/id_second
Host direct-*
    ProxyJump none
Host *.far direct-*
    ProxyJump bastion
    IdentityFile none
Host *
    User {me}
    Port 2299
    HostName should-not-replace-%h
"""

INCLUDED = """
HostName-is-no-keyword
Host included
    HostName included.example
    Port 77
    User someone
"""

CASES = ("gpu-01", "gpu-13", "plain", "included", "direct-1", "x.far", "x.cluster.example", "fd00::1", "10.1.2.3")


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """A config file with an included one."""
    (tmp_path / "more.conf").write_text("\n".join(INCLUDED.splitlines()[2:]) + "\n")
    path = tmp_path / "config"
    path.write_text(CONFIG.format(folder=tmp_path, me=getpass.getuser()))
    return path


def openssh(config: Path, target: SshTarget) -> dict[str, list[str]]:
    """What `ssh -G` says, each keyword with all its values."""
    port = ["-p", str(target.port)] if target.port else []
    user = ["-l", target.user] if target.user else []
    argv = ["ssh", "-F", str(config), *port, *user, "-G", target.host]
    output = subprocess.run(argv, check=True, capture_output=True, text=True).stdout
    found: dict[str, list[str]] = {}
    for line in output.splitlines():
        keyword, _, value = line.partition(" ")
        found.setdefault(keyword, []).append(value)
    return found


@pytest.mark.parametrize("host", CASES)
@pytest.mark.parametrize("given", [{}, {"user": "root", "port": 5}])
def test_host_port_user_jumps_keys_and_known_hosts_are_what_openssh_makes_of_them(
    config: Path, host: str, given: dict[str, str | int]
) -> None:
    """Patterns, negation, Match, Include, quotes, tokens, first value wins; user and port of the hosts map win."""
    target = SshTarget(host, **given)  # type: ignore[arg-type]
    end = read_endpoint(target, SshSettings(config))
    says = openssh(config, target)
    assert end.host == says["hostname"][0]
    assert str(end.port) == says["port"][0]
    assert end.user == says["user"][0]
    jumps = [jump for jump in says.get("proxyjump", [""])[0].split(",") if jump]
    assert [str(jump) for jump in end.jumps] == jumps
    assert end.host_key_alias == says.get("hostkeyalias", [None])[0]
    if end.identity.explicit:
        expected = [value for value in says["identityfile"] if value != "none"]
        assert [str(path) for path in end.identity.files] == [value.replace("%r", end.user) for value in expected]
    alias = end.host_key_alias or host
    known = [name.replace("%k", alias) for name in says["userknownhostsfile"][0].split() if str(config.parent) in name]
    assert [str(path) for path in end.user_known_hosts if str(config.parent) in str(path)] == known
