"""Leases: who has which nodes, decided from records alone; records that are read and written; drawing free nodes."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

import pytest

from gpulayer.errors import HeldError
from gpulayer.leases import Machine, Record, State, held_nodes, machine, next_ticket, read_record, write_record
from gpulayer.placement import Hold, NodePool
from tests.support.plans import node, nodes

if TYPE_CHECKING:
    from collections.abc import Iterator

NINE = 1_790_000_000.0
ALL = None


def record(job_id: str, *machines: Machine, state: State = State.HELD, ticket: int = 0, since: float = NINE) -> Record:
    """Return a record of one job."""
    return Record(job_id, "ada", "login", 4711, since, state, ticket, machines)


def waiting(job_id: str, ticket: int, *machines: Machine, since: float = NINE) -> Record:
    """Return the record of a job that waits."""
    return record(job_id, *machines, state=State.WAITING, ticket=ticket, since=since)


def at(key: str, *gpus: int) -> Machine:
    """Return all of a machine, or a part of it."""
    return Machine(key, gpus or ALL)


A, B, C = at("a:22"), at("b:22"), at("c:22")

# Records, the job that asks (None: one that has just come), and who has nodes a, b and c as it sees them.
DECISIONS: dict[str, tuple[list[Record], Record | None, dict[str, str]]] = {
    "nobody": ([], None, {}),
    "held": ([record("x", A, B)], None, {"a": "x", "b": "x"}),
    "two jobs": ([record("x", A), record("y", C)], None, {"a": "x", "c": "y"}),
    "another machine": ([record("x", at("d:22"))], None, {}),
    "another port": ([record("x", at("a:2222"))], None, {}),
    "a part of it": ([record("x", at("a:22", 7))], None, {"a": "x"}),
    "who came last is behind all that wait": ([waiting("w", 9, A)], None, {"a": "w"}),
    "held comes before waited for": ([waiting("w", 1, A), record("x", A)], None, {"a": "x"}),
    "the first of the line": ([waiting("w", 2, A, B)], waiting("v", 1, A), {}),
    "the second of the line": ([waiting("w", 1, A, B)], waiting("v", 2, A), {"a": "w", "b": "w"}),
    "the same ticket, earlier": ([waiting("w", 1, A, since=NINE - 1)], waiting("v", 1, A), {"a": "w"}),
    "the same ticket and time": ([waiting("w", 1, A)], waiting("x", 1, A), {"a": "w"}),
    "who waits is behind who holds": ([record("x", A, ticket=5)], waiting("v", 1, A), {"a": "x"}),
}


@pytest.mark.parametrize("case", DECISIONS)
def test_who_has_what(case: str) -> None:
    """A node is held by a job that has it, or that waits for it and came earlier."""
    records, own, expected = DECISIONS[case]
    for given in (records, records[::-1]):
        held = held_nodes({"a": A, "b": B, "c": C}, given, own)
        assert {node_id: hold.job_id for node_id, hold in held.items()} == expected


@pytest.mark.parametrize(
    ("one", "other", "meets"),
    [
        (at("a:22", 0, 1), at("a:22", 2, 3), False),
        (at("a:22", 0, 1), at("a:22", 1, 2), True),
        (at("a:22", 0, 1), at("a:22"), True),
        (at("a:22"), at("a:22"), True),
        (at("a:22"), at("b:22"), False),
        (at("a:22", 0), at("b:22", 0), False),
    ],
)
def test_parts_of_a_machine(one: Machine, other: Machine, meets: bool) -> None:
    """Two jobs share a machine only if both list their devices and share none."""
    assert one.meets(other) is other.meets(one) is meets


def test_what_a_map_entry_holds() -> None:
    """A list of devices is a part; a count, and nothing, are the whole machine."""
    held = [machine(node(1, gpus=gpus), "k").gpus for gpus in ([4, 5], 2, None)]
    assert held == [(4, 5), ALL, ALL]


def test_what_others_are_told() -> None:
    """A hold has the job, the user, the login node and the time, and whether it is a hold yet."""
    held = held_nodes({"a": A, "b": B}, [record("x", A), waiting("w", 1, B)])
    assert held == {"a": Hold("x", "ada", "login", NINE), "b": Hold("w", "ada", "login", NINE, waiting=True)}


def test_records_come_back_as_they_were_written() -> None:
    """Parts of one machine become one entry, and the whole of it wins; the owner of the file is the user."""
    written = record("x", A, at("b:22", 3), at("b:22", 1), at("c:22", 1), C, state=State.WAITING, ticket=3)
    read = read_record(write_record(written), "bob")
    assert read == Record("x", "bob", "login", 4711, NINE, State.WAITING, 3, (A, at("b:22", 1, 3), C))


def test_tickets_count_up() -> None:
    """A ticket comes after all that are there, and is never one that others would not believe."""
    assert [next_ticket([]), next_ticket([waiting("w", 7, A), record("x", B, ticket=3)])] == [1, 8]
    top = next_ticket([waiting("w", 1 << 53, A)])
    assert read_record(write_record(waiting("v", top, A)), "ada") is not None


GOOD: dict[str, Any] = json.loads(write_record(record("x", A, at("b:22", 1))))
BROKEN: dict[str, object] = {
    "version": 2,
    "job_id": "a\nb",
    "login": "\x1b[2J",
    "pid": "me",
    "since": 1e300,
    "state": "broken",
    "ticket": -1,
    "machines": [],
}
GARBAGE = [b"", b"\xff\xfe", b"null", b"[]", b"{}", b'"x"', b"[" * 100_000, b'{"machines": {}}', b"9" * 5000]


@pytest.mark.parametrize("key", [*BROKEN, "absent"])
def test_a_record_with_a_wrong_value_is_none(key: str) -> None:
    """Anyone can write anything there: what is not a record of ours is passed over, as a whole."""
    assert read_record(json.dumps(GOOD).encode(), "ada") is not None
    for name in GOOD if key == "absent" else [key]:
        said = {**GOOD, name: BROKEN.get(name)}
        if key == "absent":
            del said[name]
        assert (read_record(json.dumps(said).encode(), "ada") is None) == (name != "user")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1, None, [1], {"a": 1}])
@pytest.mark.parametrize("name", ["since", "ticket", "pid"])
def test_a_number_that_is_none(name: str, value: object) -> None:
    """No number in a record leads to more than that it is passed over."""
    found = read_record(json.dumps({**GOOD, name: value}).encode(), "ada")
    assert found is None or (name == "pid" and value == -1)


@pytest.mark.parametrize("gpus", ["0", {"0": 1}, [1.5], [True], [[0]], 3])
def test_devices_that_are_none(gpus: object) -> None:
    """A record whose devices are no list of whole numbers is passed over."""
    assert read_record(json.dumps({**GOOD, "machines": {"a:22": gpus}}).encode(), "ada") is None


@pytest.mark.parametrize("data", GARBAGE, ids=[str(number) for number in range(len(GARBAGE))])
def test_garbage_is_no_record(data: bytes) -> None:
    """Nothing that stands in a file makes the reader fail."""
    assert read_record(data, "ada") is None


# --- drawing --------------------------------------------------------------------------------------------------------


@pytest.fixture
def at_nine() -> Iterator[float]:
    """A time that is 2026-09-21 14:13:20 in UTC, while the local time is UTC."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TZ", "UTC")
        time.tzset()
        yield NINE
    time.tzset()


def test_only_free_nodes_are_drawn(at_nine: float) -> None:
    """Held nodes are passed over; with too few, the error says which are free and who has the others since when."""
    held = {"gpu-01": Hold("x", "ada", "login", at_nine), "gpu-03": Hold("x", "ada", "login", at_nine)}
    pool = NodePool(nodes(1, 1, 1, 1, 1), held)
    assert pool.ids == ("gpu-02", "gpu-04", "gpu-05")
    with pytest.raises(HeldError) as caught:
        pool.acquire(4)
    assert str(caught.value) == (
        "asked for 4 nodes, 3 are free: gpu-[02,04-05]; "
        "gpu-[01,03] are held by job x of ada on login since 2026-09-21 14:13:20"
    )
    assert caught.value.hint == "wait for them with `--wait`, or ask for fewer with `--nnodes`"
    assert caught.value.exit_code == 3
    assert pool.acquire(2) == ("gpu-02", "gpu-04")
    assert pool.narrow("gpu-[03,05]", None).acquire(1) == ("gpu-05",)


def test_all_nodes_are_all_of_the_map(at_nine: float) -> None:
    """Without a number a job wants every node, and is not made smaller by what others hold."""
    held = {"gpu-02": Hold("w", "ada", "login", at_nine, waiting=True)}
    with pytest.raises(HeldError, match=r"asked for 2 nodes, 1 is free: gpu-01; gpu-02 is waited for by job w of ada"):
        NodePool(nodes(1, 1), held).acquire(None)
    with pytest.raises(HeldError, match=r"asked for 1 node, none is free; gpu-02 is waited for") as caught:
        NodePool(nodes(1, 1), held).narrow("gpu-02", None).acquire(None)
    assert caught.value.hint == "wait for them with `--wait`, or name others with `--nodelist`"
    assert NodePool(nodes(1, 1), held).narrow(None, "gpu-02").acquire(None) == ("gpu-01",)


def test_many_holders_are_counted(at_nine: float) -> None:
    """An error names five jobs; of the others it says how many, and their nodes."""
    held = {f"gpu-{number:02}": Hold(f"j{number}", "ada", "login", at_nine) for number in range(1, 9)}
    with pytest.raises(HeldError) as caught:
        NodePool(nodes(*[1] * 8), held).acquire(8)
    said = str(caught.value).split("; ")
    assert [text.partition(" is held by job ")[0] for text in said[1:6]] == [f"gpu-0{n}" for n in range(1, 6)]
    assert said[6:] == ["gpu-[06-08] are held by 3 more"]


def test_todays_times_have_no_date() -> None:
    """A hold of today is told by its time of day alone."""
    now = time.time()
    assert Hold("x", "ada", "login", now).clock() == time.strftime("%H:%M:%S", time.localtime(now))
