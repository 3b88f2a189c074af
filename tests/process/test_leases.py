"""The record of leases between real processes: races, deaths, and whatever else stands in the folder."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import stat
import subprocess
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from gpulayer import lease_folder
from gpulayer.errors import HeldError
from gpulayer.lease_folder import LeaseFolder
from gpulayer.leases import Lease, Machine, Record, State, look_up, write_record
from tests.support.lease_jobs import LeaseJob, draw
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from gpulayer.placement import Hold

NODES = ("a", "b", "c")
RACES = 20


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of records that is not there yet."""
    return tmp_path / "leases"


def _records(folder: Path) -> list[str]:
    return sorted(path.name.partition(".")[0] for path in folder.glob("*.json"))


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """A file that somebody holds, as a launcher holds its own."""
    with path.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield


def _record(job_id: str, *node_ids: str, state: State = State.HELD, ticket: int = 0) -> bytes:
    machines = tuple(Machine(f"{node_id}:22", None) for node_id in node_ids)
    return write_record(Record(job_id, "somebody", "login", 1, 1e9, state, ticket, machines))


def test_of_two_that_race_one_gets_all(folder: Path) -> None:
    """Two processes draw two of three nodes at the same moment, twenty times: one has them, the other has none."""
    with LeaseJob(folder, "x", NODES) as one, LeaseJob(folder, "y", NODES) as other:
        for race in range(RACES):
            for job in (one, other) if race % 2 else (other, one):
                job.tell("draw 2")
            answers = {"x": one.hear(), "y": other.hear()}
            (winner,) = [job_id for job_id, answer in answers.items() if answer == "drew a,b"]
            (loser,) = set(answers) - {winner}
            assert answers[loser].startswith(f"held asked for 2 nodes, 1 is free: c; a,b are held by job {winner} of ")
            assert _records(folder) == [winner]
            assert [job.ask("release") for job in (one, other)] == ["released", "released"]
            assert _records(folder) == []


def test_a_killed_launcher_holds_nothing(folder: Path) -> None:
    """SIGKILL frees the nodes at once; the file it left says nothing, and goes with the next draw."""
    with LeaseJob(folder, "x", NODES) as job:
        assert job.ask("draw 3") == "drew a,b,c"
        with Lease(folder, "y") as lease:
            assert draw(lease, NODES, 1).startswith("held asked for 1 node, none is free; ")
            job.process.send_signal(signal.SIGKILL)
            job.process.wait()
            assert _records(folder) == ["x"]
            assert draw(lease, NODES, 3) == "drew a,b,c"
            assert _records(folder) == ["y"]
    assert _records(folder) == []


def test_waiting_is_in_order_of_arrival(folder: Path) -> None:
    """Who came first draws first; who doesn't wait comes after all that do; a waiter that dies lets the others on."""
    jobs = [LeaseJob(folder, job_id, NODES) for job_id in ("x", "u", "v", "w")]
    with contextlib.ExitStack() as stack:
        holder, *waiters = [stack.enter_context(job) for job in jobs]
        assert holder.ask("draw 2") == "drew a,b"
        for waiter in waiters:
            assert waiter.ask("draw 2 60").startswith("says waiting for nodes: asked for 2 nodes, ")
        with Lease(folder, "z") as lease:
            said = draw(lease, NODES, 1)
        assert said.startswith("held asked for 1 node, none is free; a,b are held by job x of ")
        assert "; c is waited for by job u of " in said
        waiters[0].process.kill()
        holder.ask("release")
        for waiter in waiters[1:]:
            assert waiter.hear().startswith("says drew a,b after ")
            assert waiter.hear() == "drew a,b"
            waiter.ask("release")


def test_waiting_ends(folder: Path) -> None:
    """After the time that was given, the job is refused, and nobody waits behind it any more."""
    with LeaseJob(folder, "x", NODES) as holder, LeaseJob(folder, "y", NODES) as waiter:
        holder.ask("draw 2")
        waiter.tell("draw 2 0.7")
        assert waiter.hear().startswith("says waiting for nodes: ")
        assert waiter.hear().startswith("held waited for 0.7 s, but asked for 2 nodes, 1 is free: c; ")
        assert waiter.ask("release") == "released"
        with Lease(folder, "z") as lease:
            assert draw(lease, NODES, 1) == "drew c"


def test_a_wait_that_is_over_does_not_advise_to_wait(folder: Path) -> None:
    """The next step is a longer one, or other nodes."""

    def acquire(held: Mapping[str, Hold]) -> tuple[str, ...]:
        raise HeldError("asked for 1 node, none is free", hint="wait for them with `--wait`, or ask for fewer")

    with (
        Lease(folder, "x") as lease,
        pytest.raises(HeldError, match=r"^waited for 0\.1 s, but asked for 1 node") as over,
    ):
        lease.draw({}, acquire, 0.1, lambda _: None)
    assert over.value.hint == "wait longer for them with `--wait`, or ask for fewer"


def test_only_records_of_the_living_count(folder: Path) -> None:
    """Garbage, links, fifos, folders, records that are too long and records of the dead hold nothing, locked or not."""
    with Lease(folder, "first") as lease:
        assert draw(lease, NODES, 1) == "drew a"
    everything = _record("no", *NODES)
    (folder / "garbage.json").write_bytes(b"\xff{")
    (folder / "empty.json").touch()
    (folder / "huge.json").write_bytes(everything + b" " * (1 << 20))
    (folder / "other-name").write_bytes(everything)
    (folder.parent / "elsewhere").write_bytes(everything)
    (folder / "link.json").symlink_to(folder.parent / "elsewhere")
    (folder / "loop.json").symlink_to("loop.json")
    (folder / "folder.json").mkdir()
    os.mkfifo(folder / "fifo.json")
    (folder / "dead.json").write_bytes(everything)
    with contextlib.ExitStack() as stack:
        for name in ("garbage.json", "empty.json", "huge.json", "other-name"):
            stack.enter_context(_locked(folder / name))
        stack.enter_context(_locked(folder.parent / "elsewhere"))
        with Lease(folder, "y") as lease:
            assert draw(lease, NODES, 3) == "drew a,b,c"
    left = {path.name for path in folder.iterdir()} - {"mutex"}
    assert left == {
        *("garbage.json", "empty.json", "huge.json", "other-name", "link.json", "loop.json", "folder.json", "fifo.json")
    }
    assert (folder.parent / "elsewhere").exists()


def test_children_hold_nothing(folder: Path) -> None:
    """What a launcher starts does not keep its lock: a child that outlives it blocks no node."""
    with Lease(folder, "x") as lease:
        assert draw(lease, NODES, 3) == "drew a,b,c"
        child = subprocess.Popen(["sleep", "1000"], close_fds=False)
        try:
            links = [fd.readlink() for fd in Path(f"/proc/{child.pid}/fd").iterdir()]
        finally:
            child.kill()
            child.wait()
    assert not [link for link in links if link.is_relative_to(folder)]


def test_modes_are_for_all_users(folder: Path) -> None:
    """Whatever the umask of who comes first: everyone may add a record, only its owner may change it."""
    before = os.umask(0o077)
    try:
        with Lease(folder, "x") as lease:
            assert draw(lease, NODES, 1) == "drew a"
            found = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (folder, *folder.iterdir())}
    finally:
        os.umask(before)
    (record,) = set(found) - {"leases", "mutex"}
    assert found == {"leases": 0o1777, "mutex": 0o644, record: 0o644}


@pytest.mark.parametrize("place", ["a file", "a link", "nowhere", "not a mutex"])
def test_a_folder_that_cannot_be_used(place: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The user is told once, and the job goes on: whether a node is free is then for the node to say."""
    path = tmp_path / "leases"
    if place == "a file":
        path.touch()
    elif place == "a link":
        (tmp_path / "real").mkdir()
        path.symlink_to(tmp_path / "real")
    elif place == "nowhere":
        path /= "deeper"
    else:
        path.mkdir()
        (path / "mutex").symlink_to(tmp_path / "made")
    with Lease(path, "x") as lease:
        assert draw(lease, NODES, 2, 60) == "drew a,b"
    said = capfd.readouterr().out
    assert said.startswith(f"says warning: leases cannot be kept in {path}: ")
    assert said.count("\n") == 1
    assert not (tmp_path / "made").exists()


def test_a_mutex_that_is_never_free(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Somebody who keeps it locked keeps nobody from working."""
    monkeypatch.setattr(lease_folder, "MUTEX_LIMIT_S", 0.2)
    folder.mkdir()
    (folder / "mutex").touch()
    told: list[str] = []
    with _locked(folder / "mutex"), Lease(folder, "x") as lease:
        assert draw(lease, NODES, 1) == "drew a"
        assert look_up(folder, {}, told.append) is None
    reason = "its file `mutex` was not free within 0.2 s"
    assert capfd.readouterr().out.splitlines() == [
        f"says warning: leases cannot be kept in {folder}: {reason}; other jobs may draw these nodes"
    ]
    assert told == [f"warning: leases cannot be read from {folder}: {reason}"]


def test_a_mutex_that_is_removed_meanwhile(folder: Path) -> None:
    """Who waited for a mutex that is no longer there takes its turn at the one that is."""
    LeaseFolder(folder, create=True).close()
    order: list[str] = []

    def enter() -> None:
        one = LeaseFolder(folder, create=False)
        with one.mutex():
            order.append("entered")
        one.close()

    other = LeaseFolder(folder, create=False)
    waiter = threading.Thread(target=enter)
    with contextlib.ExitStack() as second:
        with other.mutex():
            waiter.start()
            wait_until(lambda: _waits_for(folder / "mutex"), "it waits")
            (folder / "mutex").unlink()
            second.enter_context(other.mutex())
        with contextlib.suppress(TimeoutError):
            wait_until(lambda: bool(order), "it would enter by mistake", timeout_s=0.3)
        order.append("left")
    waiter.join()
    other.close()
    assert order == ["left", "entered"]


def _waits_for(path: Path) -> bool:
    """True when this process has the file open twice."""
    links = []
    for fd in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            links.append(fd.readlink())
    return links.count(path) == 2


def test_looking_changes_nothing(folder: Path) -> None:
    """To look at a folder that is not there makes none; to look at one does not take part in the order."""
    machines = {"a": Machine("a:22", None), "b": Machine("b:22", None)}
    told: list[str] = []
    assert look_up(folder, machines, told.append) == {}
    assert not folder.exists()
    with LeaseJob(folder, "x", NODES) as job:
        job.ask("draw 1")
        held = look_up(folder, machines, told.append)
        assert held is not None
        assert {node_id: hold.job_id for node_id, hold in held.items()} == {"a": "x"}
        assert _records(folder) == ["x"]
    assert told == []
