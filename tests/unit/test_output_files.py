"""Outputs on the login node: names, limits, files that become whole, and what is said of those that did not."""

from __future__ import annotations

import errno
import json
import os
from hashlib import sha256
from typing import TYPE_CHECKING, Any

import pytest

from gpulayer.errors import JobError
from gpulayer.events import (
    CommandStarted,
    ExitStatus,
    NodeEnded,
    NodeLost,
    NodeSwept,
    OutputsCollected,
    RankExited,
    Survivor,
)
from gpulayer.frames import ProtocolError
from gpulayer.job import EnvValue, check_output
from gpulayer.outcome import EXIT_INCOMPLETE, Ledger, NodeRecord
from gpulayer.output_files import (
    Incoming,
    Listing,
    NotKeptError,
    OutputFile,
    Problems,
    choose,
    local_path,
)
from gpulayer.output_words import output_lines, outputs_json
from gpulayer.review import render_text
from tests.support.plans import nodes, plan, script

if TYPE_CHECKING:
    from pathlib import Path

    from gpulayer.plan import Plan


@pytest.mark.parametrize("path", ["a", "a/b/c.pt", ".hidden", "a b", "byte\udcff", "ü", "n" * 255, "..a", "a.part"])
def test_names_that_can_stand_here(path: str) -> None:
    """Whatever a file can be called, if it stays below its folder."""
    assert local_path(path) == path


@pytest.mark.parametrize(
    "path",
    [
        *("", ".", "..", "/a", "a/", "a//b", "../a", "a/../b", "./a", "a\0b", "a\nb", "\x7f", "\x9b", "\u2028"),
        *("\u202e", "\ud800", "n" * 256, "ü" * 128, "d/" * 1024 + "d"),
    ],
)
def test_names_that_cannot(path: str) -> None:
    """What would leave the folder, could steer a terminal, or is longer than a name can be."""
    assert local_path(path) is None


def _listing(*files: tuple[str, str, int]) -> Listing:
    listing = Listing()
    listing.take_part(json.dumps([[place, path, path, size, 7] for place, path, size in files]).encode())
    return listing


def test_what_has_room_is_chosen() -> None:
    """The output folder comes first; one of two files of one name; one that has no room makes none for others."""
    listing = _listing(
        ("workdir", "same", 1), ("workdir", "w", 30), ("folder", "same", 2), ("folder", "big", 90), ("folder", "f", 60)
    )
    chosen = choose(listing, 100, "100 B")
    assert [(file.place, file.path) for file in chosen] == [
        ("folder", "same"), ("folder", "big"),
    ]  # fmt: skip
    assert listing.problems.texts() == (
        "f, w: more than --max-output-size, 100 B, has room for",
        "same: another file has its name here",
    )
    assert listing.stays_there


def test_problems_are_told_by_reason() -> None:
    """Three names, and how many more; control characters are replaced, and long names cut."""
    problems = Problems()
    problems.add("gone", ["a\x1b"])
    problems.add("gone", [str(number) for number in range(5)])
    problems.add("lost", unnamed=1)
    problems.add("left", ["x" * 500])
    assert problems.texts() == ("a\ufffd, 0, 1 and 3 more: gone", "1 file: lost", f"{'x' * 120}...: left")


class Node:
    """Sends files to an Incoming as a node does."""

    def __init__(self, folder: Path, **files: bytes) -> None:
        self.files = files
        wanted = [OutputFile("folder", path, path, len(data), 7) for path, data in files.items()]
        self.incoming = Incoming(folder / "node0" / "outputs", wanted, Problems())
        self.folder = folder / "node0"

    def send(self, until: int | None = None) -> None:
        """Send all that is asked for; of each file, no more than `until` bytes and then nothing."""
        while batch := self.incoming.next_batch():
            for _, path, offset, *_ in batch:
                data = self.files[str(path)]
                self.data(data[int(str(offset)) : until])
                if until is not None:
                    return
                self.end(data)
            self.incoming.end_batch()

    def data(self, data: bytes) -> None:
        """Send some bytes."""
        for at in range(0, len(data), 1000):
            self.incoming.take({"type": "file_data"}, data[at : at + 1000])

    def end(self, data: bytes) -> None:
        """Say that a file is whole."""
        self.incoming.take({"type": "file_end", "sha256": sha256(data).hexdigest()}, b"")

    def here(self) -> dict[str, bytes]:
        """What stands in the run directory."""
        found = [path for path in self.folder.rglob("*") if path.is_file()]
        return {str(path.relative_to(self.folder)): path.read_bytes() for path in found}


def test_files_come_in(tmp_path: Path) -> None:
    """Each gets its name when it is whole; at the end no trace of parts is left."""
    node = Node(tmp_path, a=b"1" * 2500, empty=b"", **{"deep/er/b": b"2"})
    node.send(until=2000)
    assert node.here() == {"outputs.part/1": b"1" * 2000}
    node.send()  # after another login
    node.incoming.close()
    assert node.here() == {"outputs/a": b"1" * 2500, "outputs/empty": b"", "outputs/deep/er/b": b"2"}
    assert (node.incoming.files, node.incoming.size_bytes, node.incoming.received_bytes) == (3, 2501, 2501)
    assert not (node.folder / "outputs.part").exists()


def test_a_part_is_removed(tmp_path: Path) -> None:
    """What is not whole when nothing comes any more has no name and leaves nothing."""
    node = Node(tmp_path, a=b"1", b=b"2" * 10)
    node.incoming.next_batch()
    node.data(b"1")
    node.end(b"1")
    node.data(b"2" * 5)
    node.incoming.close()
    assert node.here() == {"outputs/a": b"1"}
    assert [path.name for path in node.folder.iterdir()] == ["outputs"]


def test_many_small_files_are_asked_for_together(tmp_path: Path) -> None:
    """256 at a time, or so many that they have 64 MiB; a larger one alone."""
    small = Incoming(tmp_path, [OutputFile("folder", str(n), str(n), 1, 0) for n in range(300)], Problems())
    assert len(small.next_batch()) == 256
    sizes = (1 << 30, 1, 63 << 20, 1 << 20)
    large = Incoming(tmp_path, [OutputFile("folder", str(n), str(n), n, 0) for n in sizes], Problems())
    assert [size for *_, size, _ in large.next_batch()] == [1 << 30]


Frame = tuple[dict[str, Any], bytes]
WRONG: dict[str, list[Frame]] = {
    "too many bytes": [({"type": "file_data"}, b"12345")],
    "too few": [({"type": "file_data"}, b"123"), ({"type": "file_end", "sha256": ""}, b"")],
    "one file too many": [({"type": "file_gone", "why": "gone"}, b"")] * 2,
}


@pytest.mark.parametrize("frames", WRONG.values(), ids=WRONG)
def test_what_no_node_may_say(tmp_path: Path, frames: list[Frame]) -> None:
    """Bytes and ends that do not fit what was listed."""
    node = Node(tmp_path, a=b"1234")
    node.incoming.next_batch()
    *before, (header, payload) = frames
    for frame in before:
        node.incoming.take(*frame)
    with pytest.raises(ProtocolError):
        node.incoming.take(header, payload)
    with pytest.raises(ProtocolError):
        Node(tmp_path, a=b"").incoming.take({"type": "file_data"}, b"")


def test_a_name_that_is_taken_here(tmp_path: Path) -> None:
    """By a file, by a folder, by a file where a folder should be: told, and what stands there stays."""
    node = Node(tmp_path, a=b"a", b=b"b", c=b"c", **{"d/e": b"e", "f": b"f"})
    (node.folder / "outputs/b").mkdir(parents=True)
    for name in ("a", "d"):
        (node.folder / "outputs" / name).write_bytes(b"mine")
    node.send()
    node.incoming.close()
    assert node.here() == {"outputs/a": b"mine", "outputs/d": b"mine", "outputs/c": b"c", "outputs/f": b"f"}
    assert node.incoming.problems.texts() == ("a, b, d/e: another file has its name here",)
    assert node.incoming.stays_there


def test_a_full_disk_ends_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No other file would have room either."""
    node = Node(tmp_path, a=b"1234")
    node.incoming.next_batch()
    node.data(b"12")

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(NotKeptError, match=r"cannot write .*node0/outputs/a: No space left on device"):
        node.data(b"34")
    monkeypatch.undo()
    node.incoming.close()
    assert node.here() == {}


@pytest.mark.parametrize(
    ("pattern", "problem"),
    [
        ("", "is empty"),
        ("/abs", "is no path from the working directory on"),
        ("~/x", "is no path from the working directory on"),
        ("a/../../b", "leads out of the working directory"),
        ("..", "leads out of the working directory"),
        ("a\nb", "holds a control character"),
    ],
)
def test_patterns_that_are_refused(pattern: str, problem: str) -> None:
    """Before anything is contacted."""
    with pytest.raises(JobError) as caught:
        check_output(pattern)
    assert str(caught.value) == f"`--outputs`: `{pattern}` {problem}"


def test_placeholders_in_patterns() -> None:
    """Each node has its own; where the job may write is not for the user to say."""
    assert [node.outputs for node in _plan("out-$NODE_RANK/*").nodes] == [("out-0/*",), ("out-1/*",)]
    assert "outputs   'out-1/*' x\n" in render_text(_plan("out-$NODE_RANK/*", "x"))
    with pytest.raises(JobError, match="GPULAYER_OUTPUT_DIR"):
        plan(script(env={"GPULAYER_OUTPUT_DIR": EnvValue("/x")}), nodes(1))


def _plan(*outputs: str) -> Plan:
    return plan(script(outputs=outputs), nodes(1, 1))


def _ledger(job: Plan, *collected: OutputsCollected) -> Ledger:
    """A job that has succeeded, and whose outputs were asked for."""
    ledger = Ledger([NodeRecord(one.node_rank, one.node_id, one.ranks) for one in job.nodes])
    for one in job.nodes:
        ledger.apply(CommandStarted(one.node_rank, 40), 1.0)
        ledger.apply(RankExited(one.node_rank, one.ranks[0], ExitStatus(code=0)), 1.0)
        ledger.apply(NodeSwept(one.node_rank, 0), 1.0)
        ledger.apply(NodeEnded(one.node_rank, outputs=True), 1.0)
    for event in collected:
        ledger.apply(event, 2.0)
    return ledger


def test_outputs_in_the_last_lines(tmp_path: Path) -> None:
    """How many files and where; each problem with its nodes; patterns that fit nothing anywhere."""
    job = _plan("a", "b")
    ledger = _ledger(
        job,
        OutputsCollected(0, 2, 1500, problems=("x: gone",), unmatched=("a", "b"), kept="/tmp/kept"),
        OutputsCollected(1, 1, 500, problems=("x: gone", "y: gone too"), unmatched=("b",)),
    )
    assert output_lines(job, ledger, tmp_path) == [
        f"  outputs: 3 files, 2.0 kB, in {tmp_path}/node*/outputs",
        "  outputs that did not come back:",
        "    gpu-[01-02]: x: gone",
        "    gpu-02: y: gone too",
        "  no node has anything that fits `--outputs b`",
    ]
    assert [node.kept for node in ledger.nodes] == ["/tmp/kept", ""]
    assert ledger.exit_code == EXIT_INCOMPLETE
    assert outputs_json(ledger.nodes[0].collected) == {
        "files": 2, "bytes": 1500, "links": 0, "problems": ["x: gone"], "unmatched": ["a", "b"],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("swept", "asked"),
    [(None, False), (NodeSwept(0, 1), True), (NodeSwept(0, 1, (Survivor(7, "D", "python"),)), False)],
)
def test_a_lost_node_is_asked_once_nothing_runs_there(swept: NodeSwept | None, asked: bool) -> None:
    """It was reached again, and nothing of the job could change its files any more."""
    ledger = Ledger([NodeRecord(0, "n", (0,))])
    ledger.apply(CommandStarted(0, 40), 1.0)
    ledger.apply(NodeLost(0, "silence"), 2.0)
    if swept:
        ledger.apply(swept, 3.0)
    assert ledger.nodes[0].may_have_outputs == asked


def test_nothing_is_said_where_there_is_nothing(tmp_path: Path) -> None:
    """A job that has left nothing, and was asked for nothing."""
    job = _plan()
    ledger = _ledger(job, OutputsCollected(0, 0, 0))
    assert output_lines(job, ledger, tmp_path) == []
    assert (ledger.exit_code, outputs_json(None)) == (0, None)
