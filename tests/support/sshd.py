"""What an OpenSSH server and its users need: keys, sshd_config, passwd files. Nothing is started here."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

SSHD = "/usr/sbin/sshd"
PID_FILE = "/run/sshd.pid"


@dataclass(frozen=True, slots=True)
class User:
    """An account on every machine of a cluster; its group has the same name and number."""

    name: str
    uid: int
    shell: str

    @property
    def home(self) -> str:
        """The home folder on hosts."""
        return f"/home/{self.name}" if self.uid else "/root"

    def passwd_line(self, home: str) -> str:
        """The account as /etc/passwd has it."""
        return f"{self.name}:x:{self.uid}:{self.uid}:{self.name}:{home}:{self.shell}\n"


ROOT = User("root", 0, "/bin/bash")
WALKER = User("walker", 7001, "/bin/bash")
_SHELLS = ("bash", "dash", "fish", "tcsh")
USERS: dict[str, User] = {
    user.name: user
    for user in (
        ROOT,
        WALKER,
        *(
            User(f"u-{shell}", 7002 + index, f"/usr/bin/{shell}")
            for index, shell in enumerate(_SHELLS)
            if shutil.which(shell, path="/usr/bin")
        ),
    )
}


def write_accounts(folder: Path, homes: dict[str, str]) -> None:
    """Write passwd, shadow, group and nsswitch.conf: the machine's own accounts, its root and ours replaced.

    Names are looked up in files alone, so that an unknown host name fails at once and the same way everywhere.
    """
    folder.mkdir(parents=True, exist_ok=True)
    system = [line for line in Path("/etc/passwd").read_text().splitlines(keepends=True) if _name(line) not in USERS]
    ours = [user.passwd_line(homes.get(user.name, user.home)) for user in USERS.values()]
    (folder / "passwd").write_text("".join([*ours, *system]))
    # `*` is an account without a password; `!` would be a locked one, which sshd turns away.
    (folder / "shadow").write_text("".join(f"{_name(line)}:*:19000:0:99999:7:::\n" for line in [*ours, *system]))
    (folder / "shadow").chmod(0o600)
    groups = [line for line in Path("/etc/group").read_text().splitlines(keepends=True) if _name(line) not in USERS]
    (folder / "group").write_text("".join([*(f"{user.name}:x:{user.uid}:\n" for user in USERS.values()), *groups]))
    (folder / "nsswitch.conf").write_text("passwd: files\ngroup: files\nshadow: files\nhosts: files\n")


def _name(line: str) -> str:
    return line.split(":", 1)[0]


def write_key(path: Path) -> str:
    """Make an ed25519 key pair: the private half in `path`, the public half returned as `ssh-ed25519 AAAA...`."""
    import asyncssh

    key = asyncssh.generate_private_key("ssh-ed25519")
    path.write_bytes(key.export_private_key())
    path.chmod(0o600)
    return key.export_public_key().decode().strip()


def sshd_config(host_key: Path, authorized_keys: Path, options: Sequence[str]) -> str:
    """The text of sshd_config. `options` come first: sshd takes the first value that it reads."""
    lines = [
        *options,
        "Port 22",
        f"HostKey {host_key}",
        f"AuthorizedKeysFile {authorized_keys}",
        f"PidFile {PID_FILE}",
        "StrictModes no",
        "UsePAM no",
        "UseDNS no",
        "PermitRootLogin yes",
        "PasswordAuthentication no",
        "KbdInteractiveAuthentication no",
        "PrintMotd no",
    ]
    return "\n".join(lines) + "\n"
