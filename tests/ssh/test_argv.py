"""What is typed arrives byte for byte, whatever the login shell is and whatever it says."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING

import pytest

from tests.support import sshd
from tests.support.jobs import TELL, map_with_fake_torch, run, told, write_script

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.cluster import Cluster
    from tests.support.jobs import Finished, Json

pytestmark = pytest.mark.ssh

SHELL_USERS = [name for name in sshd.USERS if name.startswith("u-")]
WORDS = (
    "--",
    "two words",
    " ",
    "",
    "it's",
    '"quoted"',
    "'",
    "back\\slash\\",
    "!! bang!",
    "line one\nline two\n",
    "tab\there\rreturn",
    "grüße, 世界 🚀",
    os.fsdecode(b"no \xff utf-8"),
    "a$$b",
    "^foo$",
    "$5",
    "`touch pwned`",
    "*?[a-z]{b,c}~#;&|<>()",
    "--nnodes=9",
    "-c",
    "%s %%",
    "x" * 100_000,
)
# The bracket opens no command in a folder that is data; ${DOLLAR} is how to type it where placeholders are read.
ODD_FOLDER = "a'$(touch pwned)'b \"c\"\\ !d"
VALUES = {
    "QUOTES": 'it\'s "this"',
    "LINES": "one\ntwo\n",
    "BRACKETS": "(a) {b} [c] <d>; e & f | g",
    "EQUALS": "a=b=c",
    "EMPTY": "",
    "BACKSLASH": "\\n \\\\ !x `y`",
    "ODD.NAME": "dots",
}


def _run_words(cluster: Cluster, user: str, words: tuple[str, ...] = WORDS) -> tuple[Finished, Json]:
    """Run TELL on h00 as this user with these words; return the run and what rank 0 saw."""
    script = write_script(cluster, TELL, name="odd name's $script.py".replace("$", ""))
    folder = script.parent / ODD_FOLDER
    folder.mkdir(mode=0o777)
    options = [option for name, value in VALUES.items() for option in ("-e", f"{name}={value}")]
    options += ["-e", f"OUT={script.parent}", "-C", str(folder).replace("$", "${DOLLAR}")]
    hosts = map_with_fake_torch(cluster, hosts=cluster.hosts[:1], defaults={"user": user})
    done = run(cluster.login, hosts, options, script, words)
    assert done.returncode == 0, done.stderr
    assert _names(script.parent) == {script.name, ODD_FOLDER, "0.json"}
    assert _names(folder) == set()
    return done, told(script.parent)[0]


def _names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def _arrived(cluster: Cluster, user: str, seen: Json) -> None:
    assert (seen["uid"], seen["env"]["SHELL"]) == (sshd.USERS[user].uid, sshd.USERS[user].shell)
    assert seen["argv"] == list(WORDS)
    assert {name: seen["env"].get(name) for name in VALUES} == VALUES
    assert seen["cwd"].endswith("/" + ODD_FOLDER)
    assert not cluster.hosts[0].path(f"{sshd.USERS[user].home}/pwned").exists()


@pytest.mark.parametrize("user", SHELL_USERS)
def test_everything_arrives_byte_for_byte(cluster2: Cluster, user: str) -> None:
    """Arguments, values and folder are not touched by bash, dash, fish or tcsh, and nothing in them is run."""
    _, seen = _run_words(cluster2, user)
    _arrived(cluster2, user, seen)


def test_the_folder_that_gpulayer_is_started_in_is_data(cluster2: Cluster) -> None:
    """Without a workdir anywhere, ranks run in the launcher's own folder, even where its name reads as a command."""
    script = write_script(cluster2, TELL)
    folder = script.parent / "here $HOME $(touch pwned)"
    folder.mkdir()
    hosts = map_with_fake_torch(cluster2, hosts=cluster2.hosts[:1])
    text = "".join(line for line in hosts.read_text().splitlines(keepends=True) if not line.startswith("workdir"))
    hosts.write_text(text)
    argv = ["gpulayer", "run", "-H", str(hosts), "-e", f"OUT={script.parent}", str(script)]
    done = cluster2.login.run(["python3", "-m", *argv], cwd=folder)
    assert done.returncode == 0, done.stderr
    assert told(script.parent)[0]["cwd"] == str(folder)
    assert _names(folder) == {"runs"}


@pytest.mark.parametrize(
    ("user", "file", "noise", "expected"),
    [
        ("u-bash", ".bashrc", "echo 'hello, $USER'; echo oops >&2; printf 'no newline'\n", "no newline"),
        ("u-tcsh", ".tcshrc", "echo hello\n", "hello"),
        ("u-fish", ".config/fish/config.fish", "printf '\\0gpulayer:00\\n{}\\n'\n", "\0gpulayer:00\n{}\n"),
    ],
    ids=["a greeting", "tcsh", "a false handshake"],
)
def test_a_chatty_login_shell_changes_nothing(
    cluster2: Cluster, user: str, file: str, noise: str, expected: str
) -> None:
    """What a start-up file of the login shell prints is neither taken for the handshake nor shown."""
    if user not in sshd.USERS:
        pytest.skip(f"the shell of {user} is not installed")
    home = sshd.USERS[user].home
    path = cluster2.hosts[0].path(f"{home}/{file}")
    cluster2.hosts[0].run(["mkdir", "-p", f"{home}/{file.rpartition('/')[0]}"], user=user)
    path.write_text(noise)
    try:
        heard = cluster2.login.run(["ssh", "-l", user, "h00", "true"]).stdout
        done, seen = _run_words(cluster2, user)
    finally:
        path.unlink()
    assert expected in heard
    _arrived(cluster2, user, seen)
    assert done.stdout == ""
    own = ("gpulayer: running 1 rank", f"gpulayer: job {done.run_dir.name} succeeded", "  h00: succeeded", "  logs: ")
    others = [line for line in done.stderr.splitlines() if not line.startswith(own)]
    assert [line for line in others if not re.fullmatch(r"gpulayer: \w+, waiting for h00 \(\d+ s\)", line)] == []


def test_a_banner_of_sshd_changes_nothing(cluster2: Cluster) -> None:
    """A banner in front of the login is neither taken for the handshake nor shown."""
    host = cluster2.hosts[0]
    banner = cluster2.shared / "banner"
    banner.write_text("AUTHORISED USE ONLY\n" * 100)
    original = host.sshd_config.read_text()
    host.sshd_config.write_text(f"Banner {banner}\n{original}")
    host.restart_sshd()
    try:
        assert "AUTHORISED" in cluster2.login.run(["ssh", "h00", "true"]).stderr
        done, seen = _run_words(cluster2, SHELL_USERS[0])
    finally:
        host.sshd_config.write_text(original)
        host.restart_sshd()
    _arrived(cluster2, SHELL_USERS[0], seen)
    assert "AUTHORISED" not in done.stdout + done.stderr
