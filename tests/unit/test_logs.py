"""The run directory: names, bytes, modes, and what a full disk or too few files do."""

from __future__ import annotations

import errno
import json
import os
import resource
import stat
from pathlib import Path
from typing import TYPE_CHECKING, get_args

import pytest

from gpulayer import events
from gpulayer.errors import JobError
from gpulayer.events import (
    CommandExited,
    ExitStatus,
    NodeStopping,
    NodeSwept,
    Notice,
    Output,
    RankExited,
    Stage,
    StageReached,
    Survivor,
    Tail,
)
from gpulayer.logs import EVENT_NAMES, RunDirectory, RunPaths, event_json, raise_file_limit

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def run_dir(tmp_path: Path) -> Iterator[RunDirectory]:
    """Return a run directory that is closed after the test."""
    with RunDirectory.create(tmp_path / "runs", "job-1") as directory:
        yield directory


@pytest.fixture
def _file_limit() -> Iterator[None]:
    """Put the limit on open files back after the test."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def mode(path: Path) -> int:
    """Return the permission bits of a path."""
    return stat.S_IMODE(path.stat().st_mode)


def test_file_names() -> None:
    """The names that the reference documents."""
    paths = RunPaths(Path("runs/j"))
    names = [
        paths.plan, paths.receipt, paths.events, paths.timeline,
        paths.output(1, 5, "stdout"), paths.output(1, 5, "stderr"),
        paths.output(0, None, "stdout"), paths.output(0, None, "stderr"),
    ]  # fmt: skip
    assert [str(name) for name in names] == [
        "runs/j/plan.json",
        "runs/j/receipt.json",
        "runs/j/events.jsonl",
        "runs/j/output.jsonl",
        "runs/j/node1/rank5.stdout.log",
        "runs/j/node1/rank5.stderr.log",
        "runs/j/node0/command.stdout.log",
        "runs/j/node0/command.stderr.log",
    ]


def test_bytes_are_kept_exactly_and_privately(run_dir: RunDirectory) -> None:
    """Every byte of every stream is in its own file; nobody else may read any of it."""
    chunks = [b"one\r\n", b"\x00\xff\xfe\x1b[2J", b"", b"x" * 3_000_000]
    for chunk in chunks:
        assert run_dir.write_output(Output(1, 5, "stdout", chunk)) is None
    run_dir.write_output(Output(1, None, "stderr", b"torchrun says"))
    run_dir.write_plan({"job_id": "job-1"})
    run_dir.write_receipt({"exit_code": 0})
    paths = run_dir.paths
    assert paths.output(1, 5, "stdout").read_bytes() == b"".join(chunks)
    assert paths.output(1, None, "stderr").read_bytes() == b"torchrun says"
    assert json.loads(paths.plan.read_text()) == {"job_id": "job-1"}
    assert json.loads(paths.receipt.read_text()) == {"exit_code": 0}
    everything = [paths.root, *paths.root.rglob("*")]
    assert {path.relative_to(paths.root).as_posix(): oct(mode(path)) for path in everything} == {
        ".": "0o700",
        "node1": "0o700",
        "plan.json": "0o600",
        "receipt.json": "0o600",
        "events.jsonl": "0o600",
        "output.jsonl": "0o600",
        "node1/rank5.stdout.log": "0o600",
        "node1/command.stderr.log": "0o600",
    }
    assert (run_dir.lost_bytes, run_dir.losses) == (0, {})


def test_bytes_are_on_file_at_once(run_dir: RunDirectory) -> None:
    """What was written can be read by others before anything is closed."""
    run_dir.write_output(Output(0, 0, "stdout", b"now"))
    run_dir.record(Notice("hello"), 0.0)
    assert run_dir.paths.output(0, 0, "stdout").read_bytes() == b"now"
    assert run_dir.paths.events.read_text().endswith("\n")


def test_events_file(run_dir: RunDirectory) -> None:
    """One JSON object a line, under stable names; output and tails are left to the logs."""
    tail = Tail(b"\xff", b"secret", b"{}")
    run_dir.record(StageReached(Stage.RUNNING), 0.25)
    run_dir.record(Output(0, 0, "stdout", b"text"), 0.5)
    run_dir.record(RankExited(2, 5, ExitStatus(code=17), tail), 1.23456)
    run_dir.record(CommandExited(2, ExitStatus(signal=9)), 1.5)
    run_dir.record(NodeStopping(0), 2)
    run_dir.record(NodeSwept(2, 3, (Survivor(77, "D", "python 'é'"),)), 2.0)
    run_dir.record(Notice("x", (0, 1)), 3.0)
    assert run_dir.paths.events.read_text() == (
        '{"t": 0.25, "event": "stage_reached", "stage": "running"}\n'
        '{"t": 1.235, "event": "rank_exited", "node_rank": 2, "rank": 5, "code": 17, "signal": null}\n'
        '{"t": 1.5, "event": "command_exited", "node_rank": 2, "code": null, "signal": 9}\n'
        '{"t": 2, "event": "node_stopping", "node_rank": 0, "now": false}\n'
        '{"t": 2.0, "event": "node_swept", "node_rank": 2, "killed": 3, '
        '"survivors": [{"pid": 77, "state": "D", "command": "python \'\\u00e9\'"}]}\n'
        '{"t": 3.0, "event": "notice", "text": "x", "node_ranks": [0, 1]}\n'
    )


def test_every_event_has_a_name() -> None:
    """An event that is added to events.py needs a name in events.jsonl, or is output."""
    assert set(EVENT_NAMES) == set(get_args(events.Event)) - {Output}


def test_used_directory_is_refused(tmp_path: Path) -> None:
    """A directory with anything in it is not written into; an empty one is taken."""
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "events.jsonl").write_text("mine")
    with pytest.raises(JobError) as caught:
        RunDirectory.create(tmp_path, "old")
    assert str(caught.value) == f"the run directory {tmp_path}/old is not empty"
    assert caught.value.hint
    assert (tmp_path / "old" / "events.jsonl").read_text() == "mine"
    (tmp_path / "empty").mkdir()
    RunDirectory.create_at(tmp_path / "empty").close()


def test_impossible_directory_is_refused(tmp_path: Path) -> None:
    """A place that cannot hold a directory is an error that names it, before anything starts."""
    (tmp_path / "file").write_text("")
    for root in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(JobError, match=f"cannot use the run directory {root}: ") as caught:
            RunDirectory.create_at(root)
        assert "--run-dir" in (caught.value.hint or "")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_unwritable_directory_is_refused(tmp_path: Path) -> None:
    """An existing directory without write permission is an error."""
    (tmp_path / "ro").mkdir(mode=0o500)
    with pytest.raises(JobError, match="Permission denied"):
        RunDirectory.create_at(tmp_path / "ro")


def test_full_disk_is_told_once_and_counted(run_dir: RunDirectory) -> None:
    """On a full disk the job goes on: one notice, bytes counted by file, other files still whole."""
    node = run_dir.paths.node(0)
    node.mkdir()
    reason = os.strerror(errno.ENOSPC)
    for rank in (0, 1):
        run_dir.paths.output(0, rank, "stdout").symlink_to("/dev/full")
    notices = [run_dir.write_output(Output(0, rank, "stdout", b"12345")) for rank in (0, 1, 0)]
    assert notices[1:] == [None, None]
    assert notices[0] == Notice(
        f"cannot write {node}/rank0.stdout.log: {reason}; the job goes on, but its logs miss bytes", (0,)
    )
    assert run_dir.write_output(Output(0, 2, "stdout", b"fine")) is None
    assert run_dir.paths.output(0, 2, "stdout").read_bytes() == b"fine"
    assert run_dir.lost_bytes == 15
    assert run_dir.losses == {node / "rank0.stdout.log": 10, node / "rank1.stdout.log": 5}


def test_when_output_came(run_dir: RunDirectory) -> None:
    """output.jsonl says how far each file had grown by when; what a full disk cost does not count."""
    run_dir.paths.node(1).mkdir()
    run_dir.paths.output(1, None, "stderr").symlink_to("/dev/full")
    for at_s, event in ((0.5, Output(0, 0, "stdout", b"12345")), (0.55, Output(0, 0, "stdout", b"678"))):
        run_dir.write_output(event, at_s)
    run_dir.write_output(Output(1, None, "stderr", b"lost"), 0.6)
    assert run_dir.tick(0.58) is None
    assert run_dir.paths.timeline.read_text() == ""
    assert run_dir.tick(0.7) is None
    assert run_dir.paths.timeline.read_text() == '[0.5,0,0,"stdout",8]\n'
    run_dir.write_output(Output(0, 0, "stdout", b"9"), 0.9)
    run_dir.close_files()
    assert run_dir.paths.timeline.read_text() == '[0.5,0,0,"stdout",8]\n[0.9,0,0,"stdout",9]\n'
    assert (run_dir.node_bytes(0), run_dir.node_bytes(1)) == (9, 0)


@pytest.mark.usefixtures("_file_limit")
def test_no_half_of_an_event_is_kept(run_dir: RunDirectory) -> None:
    """A line that did not fit is taken back and counted: what is written later is a line of its own."""
    run_dir.record(StageReached(Stage.CONNECTING), 0.0)
    size = run_dir.paths.events.stat().st_size
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 10, resource.RLIM_INFINITY))
    try:
        notice = run_dir.record(StageReached(Stage.RUNNING), 1.0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert run_dir.record(StageReached(Stage.DONE), 2.0) is None
    lines = run_dir.paths.events.read_text().splitlines()
    assert notice is not None
    assert [json.loads(line)["stage"] for line in lines] == ["connecting", "done"]
    assert run_dir.lost_bytes == len(json.dumps(event_json(StageReached(Stage.RUNNING), 1.0))) + 1
    assert run_dir.incomplete


def test_the_receipt_has_its_room(run_dir: RunDirectory) -> None:
    """It is taken before, used by a receipt that is shorter than it, and given back where there is none."""
    room = run_dir.paths.root / ".receipt.json.tmp"
    run_dir.reserve_receipt(100_000)
    assert room.stat().st_blocks * 512 >= 100_000
    assert run_dir.write_receipt({"a": 1}) is None
    assert json.loads(run_dir.paths.receipt.read_text()) == {"a": 1}
    assert (room.exists(), run_dir.paths.receipt.stat().st_size) == (False, 13)
    run_dir.reserve_receipt(100_000)
    run_dir.close()
    assert not room.exists()
    assert not run_dir.incomplete


def test_a_run_directory_can_be_taken_back(tmp_path: Path) -> None:
    """What gpulayer made is removed; a folder that was there before stays, empty as it was."""
    (tmp_path / "old").mkdir()
    for name in ("old", "new"):
        directory = RunDirectory.create_at(tmp_path / name)
        directory.write_plan({})
        directory.reserve_receipt(100)
        directory.remove()
    assert [path.name for path in tmp_path.iterdir()] == ["old"]
    assert list((tmp_path / "old").iterdir()) == []


def test_receipt_is_whole_or_absent(run_dir: RunDirectory) -> None:
    """A receipt that cannot be written is told, and leaves neither half a file nor a temporary one."""
    run_dir.paths.receipt.mkdir()
    notice = run_dir.write_receipt({"a": 1})
    assert notice is not None
    assert str(run_dir.paths.receipt) in notice.text
    with pytest.raises(TypeError):
        run_dir.write_plan({"a": object()})
    assert sorted(path.name for path in run_dir.paths.root.iterdir()) == [
        "events.jsonl",
        "output.jsonl",
        "receipt.json",
    ]


@pytest.mark.usefixtures("_file_limit")
def test_more_streams_than_open_files(run_dir: RunDirectory) -> None:
    """With fewer descriptors than streams, files are closed and opened again, and every byte is there."""
    fd = os.dup(0)
    os.close(fd)
    resource.setrlimit(resource.RLIMIT_NOFILE, (fd + 10, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    for turn in range(3):
        for rank in range(40):
            assert run_dir.write_output(Output(rank // 8, rank, "stdout", b"%d.%d " % (rank, turn))) is None
    assert run_dir.lost_bytes == 0
    run_dir.close()
    for rank in range(40):
        expected = b"".join(b"%d.%d " % (rank, turn) for turn in range(3))
        assert run_dir.paths.output(rank // 8, rank, "stdout").read_bytes() == expected


def test_logs_leave_descriptors_to_others(run_dir: RunDirectory) -> None:
    """No more output files are open at a time than `most_open`: a new login to a node needs one too."""
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - counted
    run_dir.most_open = 10
    for turn in range(2):
        for rank in range(40):
            assert run_dir.write_output(Output(0, rank, "stdout", b"%d" % turn)) is None
            assert len(os.listdir("/proc/self/fd")) <= before + 10  # noqa: PTH208 - counted
    assert {run_dir.paths.output(0, rank, "stdout").read_bytes() for rank in range(40)} == {b"01"}


@pytest.mark.usefixtures("_file_limit")
def test_raise_file_limit() -> None:
    """The soft limit rises as far as the hard one allows, and never falls."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    assert raise_file_limit(100) == 100
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (256, hard)
    assert raise_file_limit(300) == 300
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (300, hard)
    if hard != resource.RLIM_INFINITY:
        assert raise_file_limit(hard + 1) == hard
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
