"""Bundles on a node: kept whole or not at all, checked before every use, and a fresh copy for each job."""

from __future__ import annotations

import os
import signal
import stat
import sys
import tarfile
import threading
import time
import zlib
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from gpulayer import node_bundle
from gpulayer.node_bundle import BundleError, check_members, unpack
from tests.support.bundles import STORE, ask, digest_of, member, place, send, tar_of
from tests.support.local_node import LocalNode, fake_torchrun
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

TAR = tar_of([("train.py", b"print('from the bundle')\n"), ("steps/a.py", b"x = 1\n")])
LARGE = tar_of([("noise", os.urandom(3_000_000))])
OLD_PYTHONS = [
    *sorted(Path("/usr/bin").glob("python3.8")),
    *sorted(Path("~/.pyenv/versions").expanduser().glob("3.8.*/bin/python3.8")),
]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., LocalNode]]:
    """`start()`: a supervisor whose home is HOME in the test's folder; as many as are wanted."""
    nodes: list[LocalNode] = []
    (tmp_path / "HOME").mkdir()

    def begin(python: str = sys.executable, **environ: str) -> LocalNode:
        env = {"PATH": os.environ["PATH"], "HOME": str(tmp_path / "HOME"), **environ}
        nodes.append(LocalNode(tmp_path, python=python, environ=env))
        return nodes[-1]

    yield begin
    for node in nodes:
        node.__exit__(None, None, None)


def _store(tmp_path: Path) -> Path:
    return tmp_path / "HOME" / STORE


def _kept(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in _store(tmp_path).iterdir())


def _name(tar: bytes) -> str:
    return digest_of(tar).removeprefix("sha256:") + ".tar"


def test_a_bundle_is_sent_once_and_the_job_starts_in_a_copy_of_it(
    start: Callable[..., LocalNode], tmp_path: Path
) -> None:
    """It is kept read-only under its digest; the next supervisor has it; the job's folder is gone at the end."""
    node = start()
    assert ask(node, TAR)["type"] == "bundle_want"
    assert send(node, TAR)["type"] == "bundle_kept"
    assert place(node) == {"type": "bundle_placed", "workdir": f"{node.job_dir}/work"}
    kept = _store(tmp_path) / _name(TAR)
    assert (kept.read_bytes(), stat.S_IMODE(kept.stat().st_mode)) == (TAR, 0o400)
    assert stat.S_IMODE(node.job_dir.stat().st_mode) == 0o700
    work = node.job_dir / "work"
    node.run(fake_torchrun(node, Path("train.py")), workdir=str(work))
    node.wait_for_output(0, b"from the bundle\n")
    assert node.finish()["type"] == "ended"
    assert not node.job_dir.exists()
    other = start()
    assert ask(other, TAR)["type"] == "bundle_have"
    assert place(other)["type"] == "bundle_placed"
    (other.job_dir / "work/train.py").write_text("changed by the job")
    assert kept.read_bytes() == TAR
    assert _kept(tmp_path) == [_name(TAR)]


@pytest.mark.parametrize("python", OLD_PYTHONS or [pytest.param(None, marks=pytest.mark.skip("no Python 3.8 here"))])
def test_an_old_python_keeps_and_unpacks_bundles(start: Callable[..., LocalNode], tmp_path: Path, python: Path) -> None:
    """All of it runs on Python 3.8."""
    node = start(str(python))
    assert ask(node, TAR)["type"] == "bundle_want"
    assert send(node, TAR)["type"] == "bundle_kept"
    assert place(node)["type"] == "bundle_placed"
    assert (node.job_dir / "work/steps/a.py").read_bytes() == b"x = 1\n"
    assert ask(start(str(python)), TAR)["type"] == "bundle_have"


def test_xdg_cache_home_says_where_bundles_are_kept(start: Callable[..., LocalNode], tmp_path: Path) -> None:
    """A relative one is none, as its specification has it."""
    assert ask(start(XDG_CACHE_HOME=str(tmp_path / "elsewhere")), TAR)["type"] == "bundle_want"
    assert (tmp_path / "elsewhere/gpulayer/bundles").is_dir()
    ask(start(XDG_CACHE_HOME="relative"), TAR)
    assert _store(tmp_path).is_dir()


# --- half of one ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["end_of_file", "kill_frame", "sigkill"])
def test_half_a_bundle_is_never_used(start: Callable[..., LocalNode], tmp_path: Path, how: str) -> None:
    """What was sent in part is gone with its supervisor, or once it is found without one; it is then sent anew."""
    node = start()
    assert ask(node, LARGE)["type"] == "bundle_want"
    data = zlib.compress(LARGE)
    for at in range(0, 2_000_000, 1 << 17):
        node.send("bundle_data", data[at : at + (1 << 17)])
    wait_until(lambda: _part(tmp_path).stat().st_size > 1_000_000, "half of it is there")
    assert not (_store(tmp_path) / _name(LARGE)).exists()
    if how == "end_of_file":
        node.end_of_file()
    elif how == "kill_frame":
        node.send("kill")
    else:
        node.process.kill()
    node.process.wait()
    if how == "sigkill":
        os.utime(_part(tmp_path), (time.time() - 60, time.time() - 60))
    other = start()
    assert ask(other, LARGE)["type"] == "bundle_want"
    assert [name for name in _kept(tmp_path) if name.endswith(".part")] == [_part(tmp_path).name]  # its own alone
    assert send(other, LARGE)["type"] == "bundle_kept"
    assert _kept(tmp_path) == [_name(LARGE)]


def _part(tmp_path: Path) -> Path:
    (found,) = _store(tmp_path).glob("*.part")
    return found


def test_two_that_receive_one_bundle_do_not_disturb_each_other(start: Callable[..., LocalNode], tmp_path: Path) -> None:
    """Each has a part of its own, which an hour does not make a leftover; the last one to be ready stays."""
    first, second = start(), start()
    assert ask(first, LARGE)["type"] == "bundle_want"
    first.send("bundle_data", zlib.compress(LARGE)[:1000])
    wait_until(lambda: _part(tmp_path).stat().st_size >= 0, "the first has begun")
    os.utime(_part(tmp_path), (time.time() - 3600, time.time() - 3600))
    assert ask(second, LARGE)["type"] == "bundle_want"
    assert len(list(_store(tmp_path).glob("*.part"))) == 2
    threads = [threading.Thread(target=send, args=(second, LARGE))]
    for thread in threads:
        thread.start()
    for at in range(1000, len(zlib.compress(LARGE)), 1 << 17):
        first.send("bundle_data", zlib.compress(LARGE)[at : at + (1 << 17)])
    first.send("bundle_end")
    first.wait_for("bundle_kept")
    for thread in threads:
        thread.join()
    assert [place(first)["type"], place(second)["type"]] == ["bundle_placed", "bundle_placed"]
    assert _kept(tmp_path) == [_name(LARGE)]


def test_the_first_to_keep_a_bundle_stays(start: Callable[..., LocalNode], tmp_path: Path) -> None:
    """Where nodes share a home, one that replaced it would take it from under the other that unpacks it."""
    first, second = start(), start()
    assert [ask(node, TAR)["type"] for node in (first, second)] == ["bundle_want"] * 2
    assert send(first, TAR)["type"] == "bundle_kept"
    inode = (_store(tmp_path) / _name(TAR)).stat().st_ino
    assert send(second, TAR)["type"] == "bundle_kept"
    assert (_store(tmp_path) / _name(TAR)).stat().st_ino == inode
    assert _kept(tmp_path) == [_name(TAR)]
    assert [place(node)["type"] for node in (first, second)] == ["bundle_placed"] * 2


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (zlib.compress(tar_of([("other", b"x")])), "did not arrive as it was sent: its digest is another one"),
        (zlib.compress(TAR)[:-20], "did not arrive as it was sent: its digest is another one"),
        (zlib.compress(TAR + b"x"), "did not arrive as it was sent: it is longer than it should be"),
        (zlib.compress(TAR) + b"more", "did not arrive as it was sent: it is longer than it should be"),
        (zlib.compress(bytes(1 << 26)), "did not arrive as it was sent: it is longer than it should be"),
        (b"no zlib at all", "did not arrive as it was sent: Error -3"),
        (b"", "did not arrive as it was sent: its digest is another one"),
    ],
    ids=["another", "cut", "a byte more", "more behind", "a flood", "not compressed", "nothing"],
)
def test_what_is_not_the_bundle_is_refused(
    start: Callable[..., LocalNode], tmp_path: Path, data: bytes, expected: str
) -> None:
    """Another digest, less, more, nothing like it: nothing is kept, there is one answer, and it can be sent again."""
    node = start()
    assert ask(node, TAR)["type"] == "bundle_want"
    for at in range(0, len(data), 1 << 17):
        node.send("bundle_data", data[at : at + (1 << 17)])
    node.send("bundle_end")
    answer = node.wait_for("refused")
    assert answer["code"] == "bundle"
    assert expected in answer["message"]
    assert _kept(tmp_path) == []
    assert ask(node, TAR)["type"] == "bundle_want"
    assert send(node, TAR)["type"] == "bundle_kept"
    assert [one["type"] for one in node.frames[1:]] == ["bundle_want", "refused", "bundle_want", "bundle_kept"]


@pytest.mark.parametrize("content", [TAR[:-1], TAR.replace(b"from", b"FROM"), b""], ids=["cut", "changed", "empty"])
def test_a_damaged_bundle_is_sent_again(start: Callable[..., LocalNode], tmp_path: Path, content: bytes) -> None:
    """After a power cut a file may be shorter than it was; what is kept is hashed before it is used."""
    _store(tmp_path).mkdir(parents=True)
    (_store(tmp_path) / _name(TAR)).write_bytes(content)
    node = start()
    assert ask(node, TAR)["type"] == "bundle_want"
    assert send(node, TAR)["type"] == "bundle_kept"
    assert (_store(tmp_path) / _name(TAR)).read_bytes() == TAR


def test_a_frame_out_of_place_is_refused(start: Callable[..., LocalNode], tmp_path: Path) -> None:
    """Nothing is unpacked that was not asked for; a digest is no path."""
    node = start()
    assert place(node)["message"] == "there is no bundle to unpack"
    assert ask(node, TAR, digest="sha256:" + "../" * 21 + "x")["code"] == "bundle"
    assert ask(node, TAR, digest=digest_of(TAR).replace("sha256", "md5"))["code"] == "bundle"
    assert not _store(tmp_path).exists()


# --- what cannot be kept --------------------------------------------------------------------------------------------


def test_where_nothing_can_be_kept_the_folder_is_named(start: Callable[..., LocalNode], tmp_path: Path) -> None:
    """A file that is in the way, as root writes everywhere; and more than the disk has room for."""
    (tmp_path / "HOME/.cache").write_text("")
    answer = ask(start(), TAR)
    assert (answer["type"], answer["code"]) == ("refused", "bundle_store")
    assert answer["message"] == f"bundles cannot be kept in {_store(tmp_path)}: Not a directory"
    (tmp_path / "HOME/.cache").unlink()
    answer = ask(start(), TAR, bytes=1 << 60)
    assert answer["message"] == f"there is no room in {_store(tmp_path)} for a bundle of {1 << 60} bytes"


def test_a_job_folder_that_is_there_already_is_refused(start: Callable[..., LocalNode], tmp_path: Path) -> None:
    """Somebody else made it, so nothing is put there, and it stays."""
    node = start()
    ask(node, TAR)
    send(node, TAR)
    node.job_dir.mkdir()
    assert place(node)["message"] == f"the job's folder cannot be made as {node.job_dir}: File exists"
    node.send("kill")
    node.finish()
    assert node.job_dir.is_dir()


def test_a_job_that_does_not_start_leaves_no_copy(start: Callable[..., LocalNode], tmp_path: Path) -> None:
    """A launcher that goes away after the bundle was unpacked leaves nothing but what is kept."""
    node = start()
    ask(node, TAR)
    send(node, TAR)
    assert place(node)["type"] == "bundle_placed"
    node.end_of_file()
    node.process.wait()
    assert not node.job_dir.exists()
    assert _kept(tmp_path) == [_name(TAR)]


# --- pruning --------------------------------------------------------------------------------------------------------


def test_old_bundles_go_and_used_ones_stay(start: Callable[..., LocalNode], tmp_path: Path) -> None:
    """A month without a use ends one; a use counts from then on; what is open stays usable."""
    others = [tar_of([(name, b"")]) for name in ("old", "young")]
    for tar, days in zip([*others, TAR], (31, 29, 40), strict=True):
        path = _store(tmp_path) / _name(tar)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(tar)
        os.utime(path, (0, time.time() - days * 86400))
    node = start()
    assert ask(node, TAR)["type"] == "bundle_have"  # asked for in time
    assert _kept(tmp_path) == sorted([_name(others[1]), _name(TAR)])
    assert (_store(tmp_path) / _name(TAR)).stat().st_mtime > time.time() - 60
    (_store(tmp_path) / _name(TAR)).unlink()
    assert place(node)["type"] == "bundle_placed"


def test_the_oldest_of_too_many_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All together stay below the limit, and the one that is about to be used is not counted."""
    monkeypatch.setattr(node_bundle, "MOST_BYTES", 25)
    for number in range(5):
        (tmp_path / f"{number}.tar").write_bytes(bytes(10))
        os.utime(tmp_path / f"{number}.tar", (0, time.time() - 100 + number))
    (tmp_path / "else").write_bytes(bytes(100))
    node_bundle.prune(str(tmp_path), "0")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0.tar", "3.tar", "4.tar", "else"]


# --- hostile tars ---------------------------------------------------------------------------------------------------


def _pax(name: str) -> bytes:
    """A tar in which a pax header gives a harmless member another name."""
    one = member("harmless")
    one.pax_headers = {"path": name}
    return one.tobuf(tarfile.PAX_FORMAT) + bytes(1024)


HOSTILE: dict[str, list[tarfile.TarInfo | tuple[str, bytes]]] = {
    "absolute": [member("/etc/x")],
    "up": [member("../x")],
    "up in the middle": [member("a/../../x")],
    "here": [member("./x")],
    "empty part": [member("a//x")],
    "folder": [member("a", kind=tarfile.DIRTYPE, mode=0o755)],
    "link out": [member("l", kind=tarfile.SYMTYPE, target="../x")],
    "deep link out": [member("a/b/l", kind=tarfile.SYMTYPE, target="../../../x")],
    "absolute link": [member("l", kind=tarfile.SYMTYPE, target="/etc/passwd")],
    "link up in the middle": [member("a/l", kind=tarfile.SYMTYPE, target="s/../../../x")],
    "link to nothing": [member("l", kind=tarfile.SYMTYPE, target="")],
    "through a link": [member("l", kind=tarfile.SYMTYPE, target="a"), ("l/x", b"x")],
    "hard link": [("a", b""), member("b", kind=tarfile.LNKTYPE, target="a")],
    "hard link out": [member("b", kind=tarfile.LNKTYPE, target="/etc/passwd")],
    "character device": [member("d", kind=tarfile.CHRTYPE)],
    "block device": [member("d", kind=tarfile.BLKTYPE)],
    "pipe": [member("f", kind=tarfile.FIFOTYPE)],
    "setuid": [member("s", mode=0o4755)],
    "setgid": [member("s", mode=0o2755)],
    "writable for all": [member("s", mode=0o666)],
    "twice": [("a", b"1"), ("a", b"2")],
    "file and link": [("a", b"1"), member("a", kind=tarfile.SYMTYPE, target="b")],
    "below a file": [("a", b"1"), ("a/b", b"2")],
    "sparse": [member("s", kind=tarfile.GNUTYPE_SPARSE)],
    "contiguous": [member("s", kind=tarfile.CONTTYPE)],
}


@pytest.mark.parametrize("kind", [*HOSTILE, "pax absolute", "pax up", "no tar"])
def test_a_tar_that_is_not_safe_is_neither_kept_nor_unpacked(tmp_path: Path, kind: str) -> None:
    """Whatever would be written elsewhere, or is no plain file: nothing of it is written."""
    data = {"pax absolute": _pax("/x"), "pax up": _pax("../x"), "no tar": b"x" * 2048}.get(kind)
    path = tmp_path / "one.tar"
    path.write_bytes(tar_of(HOSTILE[kind]) if data is None else data)
    (tmp_path / "in").mkdir()
    with path.open("rb") as tar:
        with pytest.raises(BundleError):
            check_members(tar)
        with pytest.raises(BundleError):
            unpack(tar, os.fsencode(tmp_path / "in/work"))
    assert sorted(tmp_path.rglob("*")) == [tmp_path / "in", path]


def test_an_unsafe_bundle_is_refused_on_its_arrival(start: Callable[..., LocalNode], tmp_path: Path) -> None:
    """The answer names the member; nothing is kept."""
    node, tar = start(), tar_of([member("../x")])
    assert ask(node, tar)["type"] == "bundle_want"
    assert send(node, tar)["message"] == "the bundle is not unpacked: '../x' is no path inside"
    assert _kept(tmp_path) == []


def test_safe_links_and_modes_are_unpacked(tmp_path: Path) -> None:
    """A link to a folder beside, one that leads nowhere, and a program."""
    links = [("a/l", "../b"), ("c", "a/l/x"), ("nowhere", "not/there")]
    members = [member(name, kind=tarfile.SYMTYPE, target=target) for name, target in links]
    path = tmp_path / "one.tar"
    path.write_bytes(tar_of([*members, ("b/x", b"found"), member("run", mode=0o755)]))
    with path.open("rb") as tar:
        unpack(tar, os.fsencode(tmp_path / "work"))
    assert (tmp_path / "work/c").read_bytes() == b"found"
    assert [str((tmp_path / "work" / name).readlink()) for name, _ in links] == [target for _, target in links]
    assert [stat.S_IMODE((tmp_path / "work" / name).stat().st_mode) for name in ("run", "b/x")] == [0o755, 0o644]


def test_a_supervisor_that_is_told_to_end_while_it_receives_leaves_nothing(
    start: Callable[..., LocalNode], tmp_path: Path
) -> None:
    """SIGTERM on the node, in the middle of a bundle."""
    node = start()
    ask(node, LARGE)
    node.send("bundle_data", zlib.compress(LARGE)[:100_000])
    node.process.send_signal(signal.SIGTERM)
    assert node.process.wait(10) == 1
    assert _kept(tmp_path) == []
