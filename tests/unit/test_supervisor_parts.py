"""The supervisor's parts by themselves: who belongs to a job, signals, interfaces, ports, and what it may import."""

from __future__ import annotations

import ast
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from gpulayer import ending, frames, network, processes, ranks, streams
from gpulayer.bootstrap import SUPERVISOR
from gpulayer.ending import Ending
from gpulayer.network import RefusalError, choose_interface, interface_addresses, lock_port, reserve_port
from gpulayer.processes import Process, read_process, select_job, signal_process
from gpulayer.ranks import RankWatch
from gpulayer.streams import Stream, remove_tree
from tests.support.local_node import free_port
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gpulayer.wire import Header


def _process(pid: int, ppid: int, *, state: str = "S", threads: int = 1, name: str = "x", status: int = 0) -> Process:
    """A process as /proc/PID/stat would show it."""
    fields = [state, str(ppid), *("0" * 15), str(threads), "0", str(1000 + pid), *("0" * 29), str(status)]
    return Process(pid, f"{pid} ({name}) {' '.join(fields)}\n".encode())


def _selected(processes: list[Process], roots: set[int], spared: set[int]) -> set[int]:
    return {process.pid for process in select_job({one.pid: one for one in processes}, roots, spared)}


TREE = [_process(1, 0), _process(10, 1), _process(11, 10), _process(12, 11), _process(20, 1), _process(21, 20)]


def test_descendants_belong_to_the_job_and_nobody_else() -> None:
    """All below a root, whatever lies between, and nothing beside it."""
    assert _selected(TREE, {10}, set()) == {10, 11, 12}
    assert _selected(TREE, {11, 21}, set()) == {11, 12, 21}
    assert _selected(TREE, set(), set()) == set()
    assert _selected(TREE, {99}, set()) == set()


def test_the_spared_are_passed_over_not_their_descendants() -> None:
    """The guard is spared; what comes to it is not."""
    assert _selected(TREE, {10}, {10}) == {11, 12}
    assert _selected(TREE, {10}, {11}) == {10, 12}
    assert _selected(TREE, {10}, {10, 11, 12}) == set()


def test_zombies_do_not_count_but_lead_on() -> None:
    """A zombie cannot be killed; its children can, and so can one whose other threads live."""
    table = [_process(10, 1), _process(11, 10, state="Z"), _process(12, 11), _process(13, 10, state="Z", threads=2)]
    assert _selected(table, {10}, set()) == {10, 12, 13}


def test_a_table_that_changed_while_it_was_read_is_no_trap() -> None:
    """Cycles and missing parents end the walk like anything else."""
    table = [_process(10, 12), _process(11, 10), _process(12, 11), _process(13, 13), _process(14, 99)]
    assert _selected(table, {11}, set()) == {10, 11, 12}
    assert _selected(table, {13}, set()) == {13}
    assert _selected(table, {99}, set()) == {14}


def test_init_is_never_of_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even where pid 1 carries the marker, or the job's process is gone and its pid has come to 1."""
    monkeypatch.setattr(processes, "process_table", lambda: {one.pid: one for one in TREE})
    monkeypatch.setattr(processes, "environment_of", lambda pid: [b"GPULAYER_MARKER=m"] if pid in (1, 20) else [])
    assert {process.pid for process in processes.job_processes("m", set())} == {20, 21}
    assert {process.pid for process in processes.job_processes("m", {20})} == {21}
    assert processes.job_processes("another", set()) == []


@pytest.mark.parametrize("name", ["plain", "a b", "x) S 1 (y", "))((", ") Z 0 0"])
def test_a_process_is_read_whatever_its_name(name: str) -> None:
    """Names may hold spaces and parentheses."""
    process = _process(7, 3, name=name, status=9)
    assert (process.pid, process.ppid, process.name, process.start) == (7, 3, name.encode(), 1007)
    assert (process.state, process.alive, process.wait_status) == ("S", True, 9)


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    """A process that sleeps."""
    with subprocess.Popen(["sleep", "1000"]) as process:
        yield process
        process.kill()


@pytest.mark.parametrize("pidfd", [True, False])
def test_a_recycled_pid_is_not_hit(
    sleeper: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch, pidfd: bool
) -> None:
    """A signal meant for an earlier process of that pid is not sent, with and without pidfds."""
    if not pidfd:
        monkeypatch.setattr(processes, "open_pidfd", lambda pid: -1)
    found = read_process(sleeper.pid)
    assert found
    real_start = found.start
    found.start -= 1
    signal_process(found, signal.SIGKILL)
    with pytest.raises(subprocess.TimeoutExpired):
        sleeper.wait(0.2)
    found.start = real_start
    signal_process(found, signal.SIGKILL)
    assert sleeper.wait(10) == -signal.SIGKILL
    signal_process(found, signal.SIGKILL)  # gone: no error


@pytest.mark.parametrize("pidfd", [True, False])
def test_a_rank_is_read_as_zombie_and_after_it_was_reaped(
    sleeper: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch, pidfd: bool
) -> None:
    """Its wait status is exact while it is a zombie; later, where the kernel still tells; never is it a success."""
    if not pidfd:
        monkeypatch.setattr(ranks, "open_pidfd", lambda pid: -1)
    found = read_process(sleeper.pid)
    assert found
    watch = RankWatch(found)
    assert watch.look()[0] is False
    sleeper.kill()
    wait_until(lambda: watch.look()[0], "it has ended")
    assert watch.look() == (True, signal.SIGKILL)
    sleeper.wait()
    release = tuple(int(part) for part in os.uname().release.split("-")[0].split(".")[:2])
    assert watch.look() == (True, signal.SIGKILL if pidfd and release >= (6, 15) else None)
    watch.reaped = 7 << 8
    assert watch.look() == (True, 7 << 8)
    if watch.fd >= 0:
        os.close(watch.fd)


class Table:
    """The looks that an ending takes, what it kills, and what it tells."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *looks: list[Process]) -> None:
        self.looks, self.killed = list(looks), list[int]()
        self.told: list[Header] = []
        self.reaped: list[tuple[int, int]] = []
        monkeypatch.setattr(ending, "job_processes", lambda marker, spared: self.looks.pop(0))
        monkeypatch.setattr(ending, "signal_process", lambda process, number: self.killed.append(process.pid))
        monkeypatch.setattr(ending, "children_of", lambda pid: [])
        monkeypatch.setattr(os, "waitpid", lambda pid, options: self.reaped.pop() if self.reaped else (0, 0))


def test_a_job_is_over_when_two_looks_in_a_row_find_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not before: one look can miss forks that exit at once, and the end of a child shows that there may be more."""
    table = Table(monkeypatch, [], [_process(9, 1)], [], [], [])
    ending = Ending("m", set(), table.told.append)
    assert ending.step() is False  # not begun: no look
    ending.begin(0)
    assert [ending.step() for _ in range(3)] == [False, False, False]
    table.reaped = [(9, 7)]
    assert [ending.step(), ending.step()] == [False, True]
    assert table.told == [
        {"type": "reaped", "pid": 9, "status": 7},
        {"type": "swept", "killed": 1, "survivors": []},
    ]
    assert (table.killed, table.looks) == ([9], [])


def test_what_outlives_sigkill_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """After the limit the wait is over, and the survivors are named."""
    stuck = _process(os.getpid(), 1, state="D")
    table = Table(monkeypatch, *([[stuck]] * 100))
    monkeypatch.setattr(ending, "KILL_LIMIT_S", 0.05)
    Ending("m", set(), table.told.append).run(0)
    (report,) = table.told
    assert report["killed"] == 1
    assert [(one["pid"], one["state"]) for one in report["survivors"]] == [(os.getpid(), "D")]
    assert "python" in report["survivors"][0]["command"]


def test_keepers_are_killed_after_all_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hung supervisor and its guard hold the job's orphans, so they are killed when nothing else is left."""
    keeper, worker = _process(8, 1, name=processes.keeper_name("m").decode()), _process(9, 8)
    table = Table(monkeypatch, [keeper, worker], [keeper], [], [])
    Ending("m", set(), table.told.append).run(0)
    assert table.killed == [9, 8]


def test_children_are_found_without_kernel_help(
    sleeper: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where /proc has no `children` file, the table of processes tells the same."""
    assert sleeper.pid in [child.pid for child in processes.children_of(os.getpid())]
    monkeypatch.setattr(os.path, "exists", lambda path: False)
    assert sleeper.pid in [child.pid for child in processes.children_of(os.getpid())]


def test_loopback_is_found_by_any_spelling_of_its_address() -> None:
    """Every address of this machine is known with its interface; IPv6 may be written in many ways."""
    assert ("lo", "127.0.0.1") in interface_addresses()
    assert choose_interface("127.0.0.1", "192.0.2.1", None) == "lo"
    if ("lo", "::1") in interface_addresses():
        assert choose_interface("0:0::0:1", "192.0.2.1", None) == "lo"


def test_an_address_translated_on_the_way_gets_the_route_to_the_master() -> None:
    """An address that no interface holds is no error where there is a route to the master."""
    assert choose_interface("192.0.2.1", "127.0.0.1", None) == "lo"


@pytest.mark.parametrize(
    ("address", "wanted", "message"),
    [
        ("127.0.0.1", "nope0", "interface `nope0` does not exist; there are: "),
        ("192.0.2.1", "lo", ""),
    ],
)
def test_a_wanted_interface_is_taken_or_refused(address: str, wanted: str, message: str) -> None:
    """It must exist; an address that is nowhere here is translated on the way."""
    if not message:
        assert choose_interface(address, "192.0.2.1", wanted) == wanted
        return
    with pytest.raises(RefusalError) as caught:
        choose_interface(address, "192.0.2.1", wanted)
    code, text = caught.value.args
    assert code == "interface"
    assert text.startswith(message)


def test_a_wanted_interface_must_hold_the_address_that_is_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """An address that another interface holds contradicts `interface`."""
    held = [("lo", "127.0.0.1"), ("eth9", "10.0.0.9"), ("eth9", "10.0.0.10")]
    monkeypatch.setattr(network, "interface_addresses", lambda: held)
    assert choose_interface("10.0.0.10", "10.0.0.9", None) == "eth9"
    with pytest.raises(RefusalError, match=r"interface `lo` holds 127\.0\.0\.1, not 10\.0\.0\.10"):
        choose_interface("10.0.0.10", "10.0.0.9", "lo")


def test_a_reserved_port_is_free_again_when_let_go() -> None:
    """Taken twice it is refused; let go, it can be had again at once."""
    port = free_port()
    for _ in range(2):
        with reserve_port(port), lock_port(port), pytest.raises(RefusalError, match="another job of gpulayer"):
            lock_port(port)
    with socket.socket() as listener:
        listener.bind(("", port))
        listener.listen()
        with pytest.raises(RefusalError, match=f"port {port} is in use"):
            reserve_port(port)


def test_a_tree_is_removed_and_nothing_a_link_points_to(tmp_path: Path) -> None:
    """Folders, files and links go; what links point to stays."""
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "file").touch()
    tree = tmp_path / "tree"
    (tree / "a" / "b").mkdir(parents=True)
    (tree / "a" / "file").touch()
    (tree / "a" / "folder").symlink_to(tmp_path / "kept")
    (tree / "link").symlink_to(tmp_path / "kept" / "file")
    (tree / "dangling").symlink_to("nowhere")
    remove_tree(str(tree))
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["file", "kept"]
    remove_tree(str(tree))


def test_a_stream_follows_a_file(tmp_path: Path) -> None:
    """What is written later comes later, and the tail is the end of all of it."""
    path = tmp_path / "log"
    path.write_bytes(b"one")
    stream = Stream(str(path), 2, "stdout")
    reader = frames.FrameReader()
    header = {"type": "output", "local_rank": 2, "stream": "stdout", "size": 3}
    assert list(reader.feed(stream.next_frame())) == [(header, b"one")]
    assert (stream.next_frame(), stream.at_end()) == (b"", True)
    with path.open("ab") as file:
        file.write(b"two")
    assert stream.at_end() is False
    assert list(reader.feed(stream.next_frame())) == [(header, b"two")]
    path.write_bytes(b"x" * 10_000 + b"end")
    assert stream.tail() == b"x" * (streams.TAIL_BYTES - 3) + b"end"
    os.close(stream._fd)


WHERE_NEEDED = {"fnmatch", "fcntl", "hashlib", "tarfile", "zlib"}  # imported by the few functions that use them


@pytest.mark.parametrize("place", range(len(SUPERVISOR)), ids=SUPERVISOR)
def test_it_needs_little_of_the_standard_library(place: int) -> None:
    """What is sent imports quick modules alone; typing, which is slow, is for the type checker only."""
    source = (Path(ending.__file__).parent / f"{SUPERVISOR[place]}.py").read_text()
    tree = ast.parse(source, feature_version=(3, 8))
    imported: set[str] = set()
    for statement in tree.body:  # imports stand at the top; one inside `if TYPE_CHECKING` is none
        if isinstance(statement, ast.Import):
            imported |= {alias.name for alias in statement.names}
        if isinstance(statement, ast.ImportFrom):
            imported.add(statement.module or ".")
    inside = [one for one in ast.walk(tree) if isinstance(one, ast.Import | ast.ImportFrom) and one not in tree.body]
    sent_before = {f"gpulayer.{module}" for module in SUPERVISOR[:place]}
    assert imported - {"__future__"} - sent_before <= sys.stdlib_module_names
    assert not imported & {"typing", "subprocess", "asyncio", "pathlib", "shutil", "logging"}
    assert {ast.unparse(one).split()[1] for one in inside} <= {"typing", "socket", *WHERE_NEEDED}
    assert not source.startswith("#!")
