"""Every byte arrives, in a stream of its own, and nobody waits for whoever reads."""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from gpulayer.processes import libc
from gpulayer.streams import FALLOC_PUNCH_HOLE, KEEP_BYTES, PUNCH_BYTES
from tests.process.programs import POLITE
from tests.support.local_node import LocalNode, fake_torchrun, wait_gone
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable

    ScriptWriter = Callable[[str], Path]

BLOCK = hashlib.sha256(b"gpulayer").digest() * (1 << 11)  # 64 KiB

# Writes this many blocks that differ, then FOLDER/written, and stays.
WRITE = f"""
import hashlib, os, sys, time
block = {BLOCK[:32]!r} * (1 << 11)
for number in range(int(sys.argv[2])):
    piece = block[:-8] + number.to_bytes(8, "big")
    while piece:
        piece = piece[os.write(1, piece):]
open(sys.argv[1] + "/written", "w").close()
"""


def _digest_of_blocks(count: int) -> str:
    digest = hashlib.sha256()
    for number in range(count):
        digest.update(BLOCK[:-8] + number.to_bytes(8, "big"))
    return digest.hexdigest()


def _holes_can_be_punched(folder: Path) -> bool:
    with (folder / "probe").open("wb+") as file:
        file.write(b"x" * 65536)
        file.flush()
        return int(libc.fallocate(file.fileno(), FALLOC_PUNCH_HOLE, 0, 4096)) == 0


def test_100_megabytes_arrive_exactly_and_do_not_fill_the_disk(
    node: LocalNode, script: ScriptWriter, tmp_path: Path
) -> None:
    """Nothing is lost or changed, and what has been sent is given back to the disk, all but the last 64 MiB."""
    if not _holes_can_be_punched(tmp_path):
        pytest.skip("this file system cannot punch holes")
    count = 1600
    node.run(fake_torchrun(node, script(WRITE + POLITE), str(tmp_path), str(count)))
    node.wait_for_output(0, b"ready")
    (log,) = node.job_dir.glob("ranks/*/attempt_0/0/stdout.log")
    assert log.stat().st_size == count * len(BLOCK) + len("ready\n")
    kept_bytes = log.stat().st_blocks * 512
    assert KEEP_BYTES <= kept_bytes <= KEEP_BYTES + PUNCH_BYTES + len(BLOCK)
    data = node.output[0, "stdout"].removesuffix(b"ready\n")
    assert hashlib.sha256(data).hexdigest() == _digest_of_blocks(count)
    node.send("kill")
    node.finish()


def test_a_reader_that_stops_blocks_no_rank_and_costs_no_memory(
    node: LocalNode, script: ScriptWriter, tmp_path: Path
) -> None:
    """With nobody reading, a rank writes all it has; later all of it arrives. The supervisor stays small throughout."""
    count = 480
    node.answers_drained = False
    node.run(fake_torchrun(node, script(WRITE), str(tmp_path), str(count)))
    wait_until((tmp_path / "written").exists, "the rank has written all of it", timeout_s=20)
    node.wait_for("drained")
    status = Path(f"/proc/{node.hello['pid']}/status").read_text()
    assert int(status.partition("VmHWM:")[2].split()[0]) < 30_000
    node.send("arrived")
    assert node.finish() == {"type": "ended", "kept": "", "outputs": False}
    assert hashlib.sha256(node.output[0, "stdout"]).hexdigest() == _digest_of_blocks(count)
    assert not node.job_dir.exists()


def test_a_stream_that_floods_does_not_hide_the_others(node: LocalNode, script: ScriptWriter) -> None:
    """What rank 1 says after its neighbours have written 20 MB each does not wait for that, nor does its failure."""
    source = (
        "import os, sys, time\n"
        "if os.environ['RANK'] != '1':\n"
        "    for _ in range(320): os.write(1, b'x' * 65536)\n"
        "    open(sys.argv[1] + '/written' + os.environ['RANK'], 'w').close(); time.sleep(1000)\n"
        "while not all(os.path.exists(sys.argv[1] + '/written' + rank) for rank in '02'): time.sleep(0.01)\n"
        "print('here'); open(sys.argv[1] + '/said', 'w').close(); os._exit(9)\n"
    )
    argv = fake_torchrun(node, script(source), str(node.folder), nproc_per_node=3)
    node.run(argv, nproc_per_node=3, grace_s=0.2)
    wait_until((node.folder / "said").exists, "rank 1 has said it", timeout_s=20)
    node.wait_for_output(1, b"here")
    assert node.wait_for("rank_exit", local_rank=1)["status"] == 9 << 8
    assert sum(map(len, node.output.values())) < 10 << 20
    node.send("kill")
    node.send("leave")
    node.finish(60)


def test_lines_of_ranks_are_never_mixed(node: LocalNode, script: ScriptWriter) -> None:
    """Four ranks that print at full speed have a stream each, and torchrun has its own."""
    source = "import os, sys\nfor n in range(3000): print('rank', os.environ['RANK'], 'line', n)\n"
    node.run(fake_torchrun(node, script(source), nproc_per_node=4), nproc_per_node=4)
    node.finish()
    for rank in range(4):
        lines = node.output[rank, "stdout"].decode().splitlines()
        assert lines == [f"rank {rank} line {number}" for number in range(3000)]


def test_the_folder_stays_until_the_launcher_has_all_of_it(node: LocalNode, script: ScriptWriter) -> None:
    """What the launcher has not confirmed is not removed."""
    node.answers_drained = False
    node.run(fake_torchrun(node, script("print('hello')")))
    node.wait_for("drained")
    (log,) = node.job_dir.glob("ranks/*/attempt_0/0/stdout.log")
    assert log.read_text() == "hello\n"
    node.send("arrived")
    assert node.finish() == {"type": "ended", "kept": "", "outputs": False}
    assert not node.job_dir.exists()


def test_told_to_leave_a_node_keeps_the_rest(node: LocalNode, script: ScriptWriter, tmp_path: Path) -> None:
    """A launcher that will not wait for a slow link gets the name of the folder that holds what it missed."""
    count = 100
    node.run(fake_torchrun(node, script(WRITE), str(tmp_path), str(count)))
    wait_until((tmp_path / "written").exists, "the rank has written all of it", timeout_s=60)
    wait_gone(node.wait_for("started")["pid"])
    node.send("leave")
    assert node.finish() == {"type": "ended", "kept": str(node.job_dir), "outputs": False}
    (log,) = node.job_dir.glob("ranks/*/attempt_0/0/stdout.log")
    assert hashlib.sha256(log.read_bytes()).hexdigest() == _digest_of_blocks(count)
    assert len(node.output[0, "stdout"]) < log.stat().st_size


def test_the_folder_stays_when_the_launcher_is_gone(node: LocalNode, script: ScriptWriter) -> None:
    """Nothing is removed that nobody has."""
    node.run(fake_torchrun(node, script(POLITE)))
    node.wait_for_output(0, b"ready")
    node.end_of_file()
    assert node.process.wait(10) == 1
    (log,) = node.job_dir.glob("ranks/*/attempt_0/0/stdout.log")
    assert log.read_text() == "ready\n"


def test_output_of_the_command_itself_is_apart(node: LocalNode) -> None:
    """torchrun's own words have no rank."""
    node.run([sys.executable, "-c", "import os; os.write(1, b'out'); os.write(2, b'err\\xff\\0')"], nproc_per_node=0)
    node.finish()
    assert node.output == {(None, "stdout"): b"out", (None, "stderr"): b"err\xff\0"}
