"""The node's side of outputs: what is found, what is read, and that no link, pipe or change leads it astray."""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass, field
from hashlib import sha256
from typing import TYPE_CHECKING, Any

import pytest

from gpulayer import node_outputs
from gpulayer.frames import FrameReader
from gpulayer.node_outputs import OutputDesk
from tests.support.local_node import FAKE_TORCH, LocalNode, fake_torchrun

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    Header = dict[str, Any]

SECRET = b"nobody asked for this"


@dataclass
class Desk:
    """The desk itself, asked as a supervisor asks it; `job` and `work` are the two folders."""

    job: Path
    work: Path
    said: list[tuple[Header, bytes]] = field(default_factory=list)

    @property
    def out(self) -> Path:
        """GPULAYER_OUTPUT_DIR."""
        return self.job / "outputs"

    def ask(self, kind: str, value: object, **fields: object) -> list[tuple[Header, bytes]]:
        """Return the frames of an answer."""
        desk, reader, frames = OutputDesk(), FrameReader(), bytearray()
        places = {"job_dir": str(self.job), "workdir": str(self.work)}
        desk.obey({"type": kind, **places, **fields}, json.dumps(value).encode())
        answer = []
        while desk.busy:
            desk.work(frames, 1 << 18)
            answer += list(reader.feed(bytes(frames)))
            frames.clear()
        self.said += answer
        return answer

    def listing(self, *patterns: str) -> tuple[list[list[Any]], dict[str, Any]]:
        """Return the files and the last word."""
        *parts, (last, said) = self.ask("list", patterns)
        assert last["type"] == "listed"
        return [file for header, payload in parts for file in json.loads(payload)], json.loads(said)

    def names(self, *patterns: str) -> list[str]:
        """Return the paths of the files."""
        return [path for _, path, *_ in self.listing(*patterns)[0]]

    def read(self, file: Sequence[Any], offset: int = 0) -> tuple[Header, bytes]:
        """Return the last frame about a file, and its bytes."""
        place, _, source, size, mtime_ns = file
        *frames, (done, _) = self.ask("read", [[place, source, offset, size, mtime_ns]])
        assert done == {"type": "read_done"}
        return frames[-1][0], b"".join(payload for _, payload in frames[:-1])


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    """A job's folder, and a workdir with some files in it. Whatever is asked for, nothing outside is ever read."""
    desk = Desk(tmp_path / "job", tmp_path / "work")
    desk.out.mkdir(parents=True)
    for name in ("a.pt", "b.txt", ".hidden", "ckpt/1.pt", "ckpt/old/0.pt", "ckpt/.tmp", "logs/x/y.txt"):
        (desk.work / name).parent.mkdir(parents=True, exist_ok=True)
        (desk.work / name).write_text(name)
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "secret").write_bytes(SECRET)
    yield desk
    assert not [frame for frame in desk.said if SECRET in frame[1]]


PATTERNS = {
    ("a.pt",): ["a.pt"],
    ("./a.pt", "a.pt", "*.pt"): ["a.pt"],
    ("*",): ["a.pt", "b.txt", "ckpt/.tmp", "ckpt/1.pt", "ckpt/old/0.pt", "logs/x/y.txt"],
    (".*",): [".hidden"],
    ("ckpt",): ["ckpt/.tmp", "ckpt/1.pt", "ckpt/old/0.pt"],
    ("ckpt/",): ["ckpt/.tmp", "ckpt/1.pt", "ckpt/old/0.pt"],
    ("**/*.pt",): ["a.pt", "ckpt/1.pt", "ckpt/old/0.pt"],
    ("**/**/old/**",): ["ckpt/old/0.pt"],
    ("c*/[0-9].pt",): ["ckpt/1.pt"],
    ("*/*/?.txt",): ["logs/x/y.txt"],
    (".",): [".hidden", "a.pt", "b.txt", "ckpt/.tmp", "ckpt/1.pt", "ckpt/old/0.pt", "logs/x/y.txt"],
    ("a.pt/x", "no", "no/*", "**/no", "["): [],
}


@pytest.mark.parametrize("patterns", PATTERNS)
def test_patterns(desk: Desk, patterns: tuple[str, ...]) -> None:
    """As in a shell; a folder that fits means all in it, and nothing comes twice."""
    files, said = desk.listing(*patterns)
    assert [path for _, path, *_ in files] == PATTERNS[patterns]
    assert (said["passed_over"], said["cut"]) == ([], False)
    assert said["unmatched"] == ([] if files else list(range(len(patterns))))


def test_all_of_the_output_folder_comes(desk: Desk) -> None:
    """Hidden files and empty ones too; without a pattern, nothing of the workdir is even looked at."""
    (desk.out / "deep/er").mkdir(parents=True)
    (desk.out / ".state").touch()
    (desk.out / "deep/er/model.pt").write_bytes(b"123")
    files, _ = desk.listing()
    assert [file[:4] for file in files] == [
        ["folder", ".state", ".state", 0],
        ["folder", "deep/er/model.pt", "deep/er/model.pt", 3],
    ]


def test_names_of_any_bytes(desk: Desk) -> None:
    """Names are sent so that the launcher gets the same bytes, and can ask for them."""
    names = [b"byte\xff", b"new\nline", "ü".encode(), b"tab\t", b'"quoted\\']
    for name in names:
        (desk.out / os.fsdecode(name)).write_bytes(name)
    files, _ = desk.listing()
    assert sorted(os.fsencode(path) for _, path, *_ in files) == sorted(names)
    for file in files:
        assert desk.read(file)[1] == os.fsencode(file[1])


def test_links_are_not_followed(desk: Desk) -> None:
    """What a link leads to is not listed; in the workdir one that was named is read where it leads, inside only."""
    for folder in (desk.out, desk.work):
        (folder / "real").write_bytes(b"real")
        (folder / "same").symlink_to("real")
        (folder / "out").symlink_to("../outside/secret")
        (folder / "folder").symlink_to("/etc")
        (folder / "dangling").symlink_to("nothing")
    files, said = desk.listing("same", "out", "folder", "folder/passwd", "dangling", "**/secret")
    assert [file[:3] for file in files] == [["folder", "real", "real"], ["workdir", "same", "real"]]
    assert desk.read(files[1]) == ({"type": "file_end", "sha256": sha256(b"real").hexdigest()}, b"real")
    whys = [(place, path, why) for place, path, why in said["passed_over"]]
    assert sorted(whys) == [
        ("folder", "dangling", "link"),
        ("folder", "folder", "link"),
        ("folder", "out", "link"),
        ("folder", "same", "link_inside"),
        ("workdir", "dangling", "link"),
        ("workdir", "folder", "link"),
        ("workdir", "out", "link"),
    ]


def test_an_output_folder_that_became_a_link(desk: Desk) -> None:
    """The job may have put a link in the folder's place: nothing of where it leads is listed or read."""
    desk.out.rmdir()
    desk.out.symlink_to("../outside")
    files, said = desk.listing()
    assert (files, said["passed_over"]) == ([], [["folder", "", "link"]])
    assert desk.read(["folder", "", "secret", len(SECRET), 0]) == ({"type": "file_gone", "why": "link"}, b"")


def test_what_is_no_file(desk: Desk) -> None:
    """A pipe and a socket are passed over; nobody waits for one that took a file's place."""
    os.mkfifo(desk.out / "pipe")
    (desk.out / "file").write_bytes(b"data")
    (file,), said = desk.listing()
    assert said["passed_over"] == [["folder", "pipe", "special"]]
    (desk.out / "file").unlink()
    os.mkfifo(desk.out / "file")
    assert desk.read(file) == ({"type": "file_gone", "why": "special"}, b"")


@pytest.mark.parametrize("swapped", ["deep/er/file", "deep/er", "deep"])
def test_a_link_that_is_put_in_place_meanwhile(desk: Desk, tmp_path: Path, swapped: str) -> None:
    """Between list and read, a file or a folder on the way to it becomes a link: it is not followed."""
    (desk.out / "deep/er").mkdir(parents=True)
    (desk.out / "deep/er/file").write_bytes(SECRET)
    os.utime(desk.out / "deep/er/file", ns=(5, 5))
    (file,), _ = desk.listing()
    for name in ("file", "er/file", "secret"):
        (tmp_path / "outside" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "outside" / name).write_bytes(SECRET)
        os.utime(tmp_path / "outside" / name, ns=(5, 5))
    (desk.out / swapped).rename(tmp_path / "moved")
    target = tmp_path / "outside" / ("file" if swapped.endswith("file") else "")
    (desk.out / swapped).symlink_to(target)
    header, data = desk.read(file)
    assert (header, data) == ({"type": "file_gone", "why": "link"}, b"")


def test_a_path_that_leads_out_is_not_read(desk: Desk) -> None:
    """Whatever a launcher asks for."""
    for path in ("../../outside/secret", "/etc/passwd", "x/../../../outside/secret"):
        assert desk.read(["folder", "", path, len(SECRET), 0]) == ({"type": "file_gone", "why": "link"}, b"")


@pytest.mark.parametrize("offset", [0, 1, 131_072, 999_999, 1_000_000])
def test_reading_goes_on_where_it_stopped(desk: Desk, offset: int) -> None:
    """From an offset on, only the rest is sent; the hash is that of the whole file."""
    content = os.urandom(1_000_000)
    (desk.out / "file").write_bytes(content)
    (file,), _ = desk.listing()
    header, data = desk.read(file, offset)
    assert header == {"type": "file_end", "sha256": sha256(content).hexdigest()}
    assert data == content[offset:]


@pytest.mark.parametrize("change", ["grown", "shrunk", "rewritten", "gone"])
def test_a_file_that_changed_since_it_was_listed(desk: Desk, change: str) -> None:
    """It is not given out: what came of it before would not fit."""
    path = desk.out / "file"
    path.write_bytes(b"before")
    (file,), _ = desk.listing()
    if change == "gone":
        path.unlink()
    else:
        path.write_bytes({"grown": b"before, and more", "shrunk": b"b", "rewritten": b"behind"}[change])
        os.utime(path, ns=(1, 1))
    expected = "gone" if change == "gone" else "changed"
    assert desk.read(file) == ({"type": "file_gone", "why": expected}, b"")


def test_folders_without_end(desk: Desk) -> None:
    """Folders in folders are followed so far; a list that is too long is cut, and both are told."""
    deep = desk.out
    for _ in range(120):
        deep = deep / "d"
    deep.mkdir(parents=True)
    (deep / "file").touch()
    files, said = desk.listing()
    assert files == []
    assert [why for *_, why in said["passed_over"]] == ["deep"]


def test_a_list_that_is_too_long_is_cut(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """So many files are listed, and that there are more."""
    monkeypatch.setattr(node_outputs, "MOST_FILES", 5)
    for number in range(7):
        (desk.out / str(number)).touch()
    files, said = desk.listing()
    assert (len(files), said["cut"]) == (5, True)


def test_what_is_passed_over_is_counted(desk: Desk) -> None:
    """A hundred are named."""
    for number in range(150):
        (desk.out / f"link{number}").symlink_to("/etc/passwd")
    _, said = desk.listing()
    assert (len(said["passed_over"]), said["more_passed_over"]) == (100, 50)


def test_a_supervisor_gives_files_out(tmp_path: Path) -> None:
    """Ten thousand files are listed in frames that a launcher takes, and meanwhile it answers pings."""
    job = tmp_path / "job"
    (job / "outputs").mkdir(parents=True)
    for number in range(10_000):
        (job / "outputs" / f"{number:05}-{'x' * 100}").touch()
    with LocalNode(tmp_path) as node:
        node.send("list", b"[]", job_dir=str(job), workdir=str(tmp_path))
        node.send("ping")
        began = time.monotonic()
        node.wait_for("listed")
        assert time.monotonic() - began < 20
        kinds = [header["type"] for header in node.frames]
        assert kinds.index("pong") < kinds.index("listed")
        parts = [payload for kind, payload in zip(kinds, node.payloads, strict=True) if kind == "list_part"]
        assert len([file for part in parts for file in json.loads(part)]) == 10_000
        node.send("forget", job_dir=str(job), whole=True)
        node.wait_for("forgotten")
        assert not job.exists()
        node.send("kill")
        assert node.finish() == {"type": "ended", "kept": "", "outputs": False}


def test_a_file_that_grows_while_it_is_read(tmp_path: Path) -> None:
    """The launcher learns that what it got is not all, whenever it happened."""
    job = tmp_path / "job"
    (job / "outputs").mkdir(parents=True)
    path = job / "outputs" / "log"
    path.write_bytes(bytes(8 << 20))
    with LocalNode(tmp_path) as node:
        node.send("list", b"[]", job_dir=str(job), workdir=str(tmp_path))
        node.wait_for("listed")
        ((_, _, source, size, mtime_ns),) = json.loads(node.payloads[node.frames.index(node.wait_for("list_part"))])
        wanted = json.dumps([["folder", source, 0, size, mtime_ns]]).encode()
        node.send("read", wanted, job_dir=str(job), workdir=str(tmp_path))
        node.wait_for("file_data")  # it is on its way, and no more is read here
        with path.open("ab") as file:
            file.write(b"more")
        assert node.wait_for("file_gone", "file_end") == {"type": "file_gone", "why": "changed"}
        assert len([one for one in node.frames if one["type"] == "file_data"]) > 10


@pytest.mark.parametrize(
    ("writes", "patterns", "stays"), [(False, [], False), (True, [], True), (False, ["*.pt"], True)]
)
def test_a_job_that_leaves_something(tmp_path: Path, writes: bool, patterns: list[str], stays: bool) -> None:
    """Its folder stays until somebody has come for the outputs, and the end says that there are some."""
    script = tmp_path / "script.py"
    script.write_text("import os\n" + ("open(os.environ['OUT'] + '/x', 'w')\n" if writes else ""))
    with LocalNode(tmp_path) as node:
        env = {"OUT": f"{node.job_dir}/outputs", "PYTHONPATH": str(FAKE_TORCH)}
        node.run(fake_torchrun(node, script), env=env, outputs=patterns)
        assert node.finish() == {"type": "ended", "kept": "", "outputs": stays}
        assert node.job_dir.exists() == stays
