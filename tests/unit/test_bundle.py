"""Which files a bundle takes, and that the same files are the same bundle, byte for byte."""

from __future__ import annotations

import io
import os
import socket
import subprocess
import tarfile
from typing import TYPE_CHECKING

import pytest

from gpulayer import node_bundle
from gpulayer.bundle import Bundle, pack, select_files
from gpulayer.errors import JobError
from tests.support.bundles import PACKAGE, write_tree

if TYPE_CHECKING:
    from pathlib import Path

MOST = 10**9


def _git(folder: Path, *words: str) -> None:
    identity = ["-c", "user.name=x", "-c", "user.email=x@example.com", "-c", "protocol.file.allow=always"]
    subprocess.run(["git", *identity, *words], cwd=folder, check=True, capture_output=True)


def _checkout(folder: Path, files: dict[str, str | bytes]) -> Path:
    """A git checkout in which these files are committed."""
    write_tree(folder, files)
    _git(folder, "init", "-q")
    _git(folder, "add", "-A")
    _git(folder, "commit", "-q", "-m", "first")
    return folder


def _refusal(folder: Path, max_bytes: int = MOST) -> tuple[str, str | None]:
    with pytest.raises(JobError) as caught:
        pack(folder, max_bytes)
    return str(caught.value).replace(str(folder), "FOLDER"), caught.value.hint


def _members(bundle: Bundle) -> list[tarfile.TarInfo]:
    bundle.tar.seek(0)
    with tarfile.open(fileobj=io.BytesIO(bundle.tar.read())) as tar:
        return tar.getmembers()


# --- which files ----------------------------------------------------------------------------------------------------


def test_a_git_checkout_gives_what_is_tracked_and_what_is_new(tmp_path: Path) -> None:
    """What .gitignore names and what was deleted is left out; so is junk that nobody has told git about."""
    _checkout(tmp_path, {"a.py": "", "gone.py": "", ".gitignore": "*.log\n", "out/keep.log": "", "pkg/b.py": ""})
    _git(tmp_path, "add", "-f", "out/keep.log")
    (tmp_path / "gone.py").unlink()
    write_tree(tmp_path, {"new.py": "", "x.log": "", "pkg/__pycache__/b.pyc": "", ".venv/lib/c.py": "", "runs/j/d": ""})
    assert select_files(tmp_path) == [".gitignore", "a.py", "new.py", "out/keep.log", "pkg/b.py"]
    assert select_files(tmp_path / "pkg") == ["b.py"]


def test_what_is_tracked_is_no_junk(tmp_path: Path) -> None:
    """A tracked file is taken, whatever it is called; `.gpulayerignore` leaves it out all the same."""
    _checkout(tmp_path, {"runs/a.py": "", "venv/b.py": "", "data/c.bin": "", ".gpulayerignore": "# big\ndata/\n"})
    assert select_files(tmp_path) == [".gpulayerignore", "runs/a.py", "venv/b.py"]


def test_submodules_and_checkouts_inside_are_taken(tmp_path: Path) -> None:
    """Of each, what git tracks there and what is new."""
    inner = _checkout(tmp_path / "inner", {"i.py": "", ".gitignore": "no\n"})
    outer = _checkout(tmp_path / "outer", {"o.py": ""})
    _git(outer, "submodule", "-q", "add", str(inner), "sub")
    _checkout(outer / "nested", {"n.py": "", ".gitignore": "no\n"})
    write_tree(outer, {"sub/new.py": "", "sub/no": "", "nested/new.py": "", "nested/no": ""})
    assert [name for name in select_files(outer) if name.endswith(".py")] == [
        *("nested/n.py", "nested/new.py", "o.py", "sub/i.py", "sub/new.py"),
    ]
    assert not [name for name in select_files(outer) if name.endswith("no")]


def test_another_folder_gives_all_but_the_usual_junk(tmp_path: Path) -> None:
    """Caches, environments, version control and run directories are left out; hidden files are taken."""
    junk = [
        *("__pycache__/a.pyc", "b.pyc", ".venv/c.py", "venv/c.py", "node_modules/d.js", "sub/.mypy_cache/e"),
        *(".pytest_cache/f", "runs/1/g", "x.egg-info/h", ".DS_Store", "sub/.hg/i"),
    ]
    ours = [".env.example", "a.py", "sub/b.py", "sub/runs/c.py"]
    write_tree(tmp_path, dict.fromkeys([*junk, *ours], ""))
    (tmp_path / "sub/venv").symlink_to("/opt/torch")
    assert select_files(tmp_path) == ours


def test_run_directories_are_left_out_wherever_they_are(tmp_path: Path) -> None:
    """A run that is kept inside of the folder would make each bundle another one."""
    write_tree(tmp_path, dict.fromkeys(["a.py", "logs/j1/plan.json", "logs/j1/events.jsonl", "logs/j1/node0/x"], ""))
    assert select_files(tmp_path) == ["a.py"]


def test_the_ignore_file_is_read_as_git_reads_its_own(tmp_path: Path) -> None:
    """Anchors, `**`, exceptions and comments mean what they mean there, and exceptions bring back junk as well."""
    write_tree(tmp_path, dict.fromkeys(["a.bin", "b.bin", "d/a.txt", "e/d/a.txt", "x/y/z", "runs/keep", "e/f.txt"], ""))
    (tmp_path / ".gpulayerignore").write_text("# no data\n*.bin\n!b.bin\n/d/\nx/**/z\n!/runs\n")
    assert select_files(tmp_path) == [".gpulayerignore", "b.bin", "e/d/a.txt", "e/f.txt", "runs/keep"]


def test_a_folder_that_git_ignores_as_a_whole_is_an_ordinary_one(tmp_path: Path) -> None:
    """There git has nothing to say."""
    _checkout(tmp_path, {".gitignore": "build/\n"})
    write_tree(tmp_path / "build", {"a.py": "", "__pycache__/a.pyc": ""})
    assert select_files(tmp_path / "build") == ["a.py"]


# --- the same again -------------------------------------------------------------------------------------------------


def test_the_same_files_are_the_same_bundle(tmp_path: Path) -> None:
    """A clone made at another time, by other people and with another umask has the same digest."""
    first = _checkout(tmp_path / "first", {**PACKAGE, "run.sh": "#!/bin/sh\n", "ünï/x": "y"})
    (first / "run.sh").chmod(0o744)
    (first / "link").symlink_to("steps/first.py")
    _git(first, "add", "-A")
    _git(first, "commit", "-q", "-m", "more")
    _git(tmp_path, "clone", "-q", "first", "second")
    (tmp_path / "second/train.py").chmod(0o600)
    os.utime(tmp_path / "second/train.py", (1, 1))
    one, again, two = pack(first, MOST), pack(first, MOST), pack(tmp_path / "second", MOST)
    assert one.ref.digest == again.ref.digest == two.ref.digest
    assert one.ref.file_count == 7
    kinds = {(found.name, found.mode, found.mtime, found.uid, found.uname, found.linkname) for found in _members(one)}
    assert ("run.sh", 0o755, 0, 0, "", "") in kinds
    assert ("train.py", 0o644, 0, 0, "", "") in kinds
    assert ("link", 0o777, 0, 0, "", "steps/first.py") in kinds


@pytest.mark.parametrize("change", ["content", "mode", "name", "link"])
def test_another_file_is_another_bundle(tmp_path: Path, change: str) -> None:
    """The digest changes with a byte, the executable bit, a name, and where a link leads."""
    write_tree(tmp_path, {"a": "1", "b": "2"})
    (tmp_path / "l").symlink_to("a")
    before = pack(tmp_path, MOST).ref.digest
    match change:
        case "content":
            (tmp_path / "a").write_text("3")
        case "mode":
            (tmp_path / "a").chmod(0o755)
        case "name":
            (tmp_path / "a").rename(tmp_path / "c")
        case "link":
            (tmp_path / "l").unlink()
            (tmp_path / "l").symlink_to("b")
    assert pack(tmp_path, MOST).ref.digest != before


def test_a_node_takes_what_is_made_here(tmp_path: Path) -> None:
    """Long names, bytes that are no text, empty files and links arrive as they are."""
    odd = os.fsdecode(b"\xff\xfe \n")
    files: dict[str, str | bytes] = {"d" * 90 + "/" + "f" * 120: "long", odd: "odd", "empty": "", "x/y/z": b"\0" * 1025}
    source = write_tree(tmp_path / "source", files)
    (source / "x/up").symlink_to("../empty")
    (source / "x/dangling").symlink_to("not/there")
    bundle = pack(source, MOST)
    assert len(node_bundle.check_members(bundle.tar)) == 6
    node_bundle.unpack(bundle.tar, os.fsencode(tmp_path / "target"))
    assert {name: (tmp_path / "target" / name).read_bytes() for name in files} == {
        name: content.encode() if isinstance(content, str) else content for name, content in files.items()
    }
    assert str((tmp_path / "target/x/up").readlink()) == "../empty"
    assert str((tmp_path / "target/x/dangling").readlink()) == "not/there"
    assert pack(tmp_path / "target", MOST).ref.digest == bundle.ref.digest


# --- what is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", ["/etc/passwd", "../outside", "d/../../outside", "s/../../outside", ".."])
def test_links_that_lead_out_are_refused_by_name(tmp_path: Path, target: str) -> None:
    """So are absolute ones into the folder: on a node it is elsewhere."""
    folder = write_tree(tmp_path / "in", {"a.py": "", "d/e/f": ""})
    (folder / "s").symlink_to("d/e")
    (folder / "link").symlink_to(target)
    text, hint = _refusal(folder)
    assert text == (
        f"the bundle FOLDER: `link -> {target}` leads out of the folder, and the nodes do not have what is there"
    )
    assert hint == "take it out of the folder, or write it in .gpulayerignore"


def test_a_link_that_looks_inside_and_leads_out_is_refused(tmp_path: Path) -> None:
    """`..` behind the name of another link goes up from where that one leads."""
    folder = write_tree(tmp_path / "in", {"x/y/z": "", "other": ""})
    (folder / "x/y/s").symlink_to("../..")
    (folder / "x/y/k").symlink_to("s/../../other")
    assert "`x/y/k -> s/../../other` leads out" in _refusal(folder)[0]


def test_sockets_and_pipes_are_refused_by_name(tmp_path: Path) -> None:
    """They are no code, and reading a pipe would take for ever."""
    folder = write_tree(tmp_path / "in", {"a.py": ""})
    os.mkfifo(folder / "pipe")
    with socket.socket(socket.AF_UNIX) as holder:
        holder.bind(str(folder / "sock"))
        assert _refusal(folder)[0] == "the bundle FOLDER: `pipe`, `sock` is no file, folder or link"


def test_what_cannot_be_read_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At most five names are shown."""
    folder = write_tree(tmp_path / "in", {f"{number}.py": "" for number in range(8)})
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may read everything
    text, _ = _refusal(folder)
    shown = "`0.py`, `1.py`, `2.py`, `3.py`, `4.py` and 3 more, each"
    assert text == f"the bundle FOLDER: {shown} cannot be read: Permission denied"


def test_sizes_are_held_to_the_limit(tmp_path: Path) -> None:
    """Above the limit the largest files are named; what is large for code is told."""
    folder = write_tree(tmp_path / "in", {"a.py": "x" * 10, "data/b.bin": b"x" * 5000, "c": "x"})
    text, hint = _refusal(folder, 5010)
    assert text == "the bundle FOLDER has 5.0 kB, and 5.0 kB is the limit; largest: data/b.bin 5.0 kB, a.py 10 B, c 1 B"
    assert hint == "write data in .gpulayerignore, or raise the limit with `--max-bundle-size`"
    assert pack(folder, 5011).warning() is None


def test_a_bundle_that_is_large_for_code_is_warned_of(tmp_path: Path) -> None:
    """The largest file is named; a sparse file is as large as it looks."""
    folder = write_tree(tmp_path / "in", {"a.py": ""})
    with (folder / "data.bin").open("wb") as file:
        file.truncate(200_000_001)
    warning = pack(folder, MOST).warning()
    assert warning == (
        f"the bundle {folder} has 2 files, 200 MB, the largest is data.bin with 200 MB: it is for code;"
        " put data where the nodes can read it, and write it in .gpulayerignore"
    )


@pytest.mark.parametrize(
    ("script", "workdir", "expected"),
    [
        ("train.py", None, None),
        ("./steps/../train.py", None, None),
        ("steps", None, "the script `steps` is not in the bundle"),
        ("tool", None, None),
        ("first.py", "steps", None),
        ("../train.py", "steps", None),
        ("train.py", "steps", "the script `train.py` is not in the bundle"),
        ("../train.py", None, "the script `../train.py` is not in the bundle"),
        ("left_out.py", None, "the script `left_out.py` is not in the bundle"),
        ("$NODE_RANK.py", None, None),
        (None, "steps", None),
        (None, "step", "`--workdir step`: no file of the bundle"),
        (None, "train.py", "`--workdir train.py`: no file of the bundle"),
    ],
)
def test_the_script_and_the_workdir_are_in_the_bundle(
    tmp_path: Path, script: str | None, workdir: str | None, expected: str | None
) -> None:
    """A script's path starts from the working directory; a folder with a __main__.py is a script too."""
    write_tree(tmp_path, {**PACKAGE, "tool/__main__.py": "", "left_out.py": "", ".gpulayerignore": "left_out.py"})
    bundle = pack(tmp_path, MOST)
    if expected is None:
        bundle.check_inside(script, workdir)
        return
    with pytest.raises(JobError) as caught:
        bundle.check_inside(script, workdir)
    assert str(caught.value).startswith(expected)
    if script == "left_out.py":
        assert caught.value.hint == "it is there, but git or .gpulayerignore leaves it out"


def test_a_folder_that_is_not_there_or_has_nothing_is_an_error(tmp_path: Path) -> None:
    """Both are mistakes in `--bundle`."""
    assert _refusal(tmp_path / "nope")[0] == "`--bundle FOLDER`: there is no such folder"
    assert _refusal(tmp_path)[0] == "`--bundle FOLDER`: there is no file to take in it"


def test_a_checkout_without_git_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is guessed of what git would leave out."""
    _checkout(tmp_path, {"a.py": ""})
    monkeypatch.setenv("PATH", "/nowhere")
    assert _refusal(tmp_path)[0] == "FOLDER is in a git checkout, and `git` cannot be run: No such file or directory"
    monkeypatch.undo()
    (tmp_path / ".git/index").write_text("broken")
    assert _refusal(tmp_path)[0].startswith("`git ls-files` in FOLDER: ")
