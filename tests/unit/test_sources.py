"""Which source of nodes a name stands for, and the Host names of an SSH configuration."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING

import pytest

from gpulayer import options_init, sources
from gpulayer.errors import HostsFileError
from gpulayer.sources import read_hosts, read_source

if TYPE_CHECKING:
    from pathlib import Path

SLURM = {"SLURM_JOB_ID": "17", "SLURM_JOB_NODELIST": "h[00-01]"}
TOML = "[nodes.from-toml]\n"
HOSTFILE = "from-hostfile slots=2\n"
CONFIG = """
Host gpu-01 gpu-01.cluster
  HostName 10.0.0.11
Host=gpu-02 # the second one
host "gpu-03"
Host gpu-* !gpu-09
  User me
Host *
Host login GPU-04
Match host gpu-77
Include more/*.conf absent
"""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home folder with an SSH configuration that includes another file."""
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".ssh/more").mkdir(parents=True)
    (tmp_path / ".ssh/config").write_text(CONFIG)
    (tmp_path / ".ssh/more/b.conf").write_text("Host gpu-06\n")
    (tmp_path / ".ssh/more/a.conf").write_text("Host gpu-05 gpu-01\nInclude ~/.ssh/config\n")  # in a circle
    return tmp_path


def ids(folder: Path, named: str | None, environ: dict[str, str] | None = None) -> list[str]:
    """Return the node ids that `-H NAMED` gives in a folder."""
    return [node.id for node in read_hosts(named, environ or {}, folder).nodes]


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("hosts.toml", TOML, "from-toml"),
        ("hosts", TOML, "from-toml"),
        ("hosts", f"# a comment\n\n{TOML}", "from-toml"),
        ("hostfile", HOSTFILE, "from-hostfile"),
        ("hosts", f"# [nodes.a]\n{HOSTFILE}", "from-hostfile"),
        ("toml", HOSTFILE, "from-hostfile"),
        ("slurm.txt", HOSTFILE, "from-hostfile"),
    ],
)
def test_a_file_is_known_by_its_name_or_its_first_line(name: str, text: str, expected: str, tmp_path: Path) -> None:
    """`.toml` is a hosts map; in any other file the first line decides."""
    (tmp_path / name).write_text(text)
    assert ids(tmp_path, name) == ids(tmp_path, None, {"GPULAYER_HOSTS": name}) == [expected]


def test_a_hostfile_that_is_called_toml_is_told_so(tmp_path: Path) -> None:
    """The name is a promise: what is in a `.toml` file is TOML, or an error."""
    (tmp_path / "hosts.toml").write_text(HOSTFILE)
    with pytest.raises(HostsFileError, match=r"line 1: `from-hostfile slots` is no TOML"):
        ids(tmp_path, "hosts.toml")


def test_the_word_slurm_is_the_allocation(tmp_path: Path) -> None:
    """`slurm` is never a file, `./slurm` always; the environment variable means the same."""
    (tmp_path / "slurm").write_text(HOSTFILE)
    assert ids(tmp_path, "slurm", SLURM) == ["h00", "h01"]
    assert ids(tmp_path, None, {**SLURM, "GPULAYER_HOSTS": "slurm"}) == ["h00", "h01"]
    assert ids(tmp_path, "./slurm", SLURM) == ["from-hostfile"]
    assert ids(tmp_path, str(tmp_path / "slurm"), SLURM) == ["from-hostfile"]
    with pytest.raises(HostsFileError, match="for the inside of a Slurm allocation"):
        ids(tmp_path, "slurm")


@pytest.mark.timeout(20)  # to read it again would take for ever
@pytest.mark.parametrize(("text", "expected"), [(TOML, "from-toml"), (HOSTFILE, "from-hostfile")])
def test_a_pipe_is_read_once(text: str, expected: str, tmp_path: Path) -> None:
    """A shell's `-H <(...)` is a pipe, which says what it says one time."""
    os.mkfifo(tmp_path / "pipe")
    writer = threading.Thread(target=(tmp_path / "pipe").write_text, args=(text,), daemon=True)
    writer.start()
    assert ids(tmp_path, "pipe") == [expected]
    writer.join()


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    """It is named, and nothing else is tried."""
    with pytest.raises(HostsFileError, match="no such file"):
        ids(tmp_path, "hostfile", SLURM)


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("gpu-*", ["gpu-01", "gpu-02", "gpu-03", "GPU-04", "gpu-05", "gpu-06"]),
        ("gpu-0?.cluster", ["gpu-01.cluster"]),
        ("*", ["gpu-01", "gpu-02", "gpu-03", "login", "gpu-05", "gpu-06"]),
        ("login", ["login"]),
    ],
)
def test_names_of_the_ssh_configuration(pattern: str, expected: list[str], home: Path) -> None:
    """The first name of each Host line that matches, in the order of the files; patterns are no names."""
    found = read_source(f"ssh:{pattern}", {}, home, None)
    assert [node.model_dump(exclude_unset=True) for node in found.nodes] == [
        {"id": name, "ssh": name} for name in expected
    ]
    assert found.source == str(home / ".ssh/config")


@pytest.mark.parametrize(
    ("source", "config", "message"),
    [
        ("ssh:node*", None, "no Host of HOME/.ssh/config matches `node*`"),
        ("ssh:gpu-[01-02]", None, "no Host of HOME/.ssh/config matches `gpu-[01-02]`"),
        ("ssh:", None, "`--from ssh:` has no pattern of Host names"),
        ("ssh:*", "none", "`--from ssh:*` has no SSH configuration to look in"),
        ("ssh:*", "patterns", "no Host of patterns matches `*`"),
        ("ssh:*", "odd", "odd: Host `a/b` is no node id"),
        ("ssh:*", "no-such", "no-such: no such file"),
    ],
)
def test_names_that_there_are_not(source: str, config: str | None, message: str, home: Path) -> None:
    """Nothing that matches, and nothing to look in, are errors that name the file and the next step."""
    (home / "patterns").write_text("Host *.cluster\n")
    (home / "odd").write_text("Host a/b 'c\n")
    path = (
        None
        if config is None
        else home / config
        if config != "none"
        else home.with_name("none").relative_to(home.parent)
    )
    with pytest.raises(HostsFileError) as caught:
        read_source(source, {}, home, path)
    assert str(caught.value).replace(f"{home}/{config}", str(config)).startswith(message.replace("HOME", str(home)))
    assert caught.value.hint


def test_the_prefix_is_spelled_alike() -> None:
    """options_init.py has it too, as sources.py takes long to import."""
    assert options_init.SSH == sources.SSH
