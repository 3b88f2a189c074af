"""The answers of a probe: read strictly, refused whole where anything is off."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest

from gpulayer import probe
from gpulayer.errors import HandshakeError
from gpulayer.facts import (
    FactsRequest,
    GpuDevice,
    GpuFact,
    GpuProcess,
    Interface,
    Listener,
    NodeFacts,
    PythonFact,
    ReachResult,
    ReachTarget,
    Rendezvous,
    RendezvousPort,
    Route,
    ScratchFact,
    ScriptFact,
    ShmFact,
    TorchFact,
    WorkdirFact,
    Xid,
    encode_end,
    encode_reach,
    encode_rendezvous,
    parse_facts,
    parse_reach,
    parse_rendezvous,
)

PORT = {"port": 29500, "state": "taken", "pid": 7, "command": "python a.py", "user": "ann", "detail": "in use"}
ANSWER: dict[str, Any] = {
    "type": "facts",
    "time_s": 1795966807,
    "boot_id": "b",
    "machine_id": "",
    "hostname": "gpu-01",
    "namespaces": {"net": 4026531833, "pid": 4026531836},
    "interfaces": [
        {"name": "lo", "switched_on": True, "up": True, "kind": "loopback", "addresses": ["127.0.0.1", "::1"]}
    ],
    "route_to_master": {"interface": "eth0", "source": "10.0.0.1"},
    "port": PORT,
    "free_ports": [29501, 29502],
    "listener": {"port": 40000},
    "ephemeral_range": [32768, 60999],
    "reserved_ports": [[29500, 29599]],
    "python": {"version": "3.11.7", "executable": "/usr/bin/python3", "prefix": "/usr"},
    "torch": {"version": "2.7.1", "cuda": "12.6", "hip": None, "nccl": None, "path": "/torch"},
    "gpu": {
        "tool": "nvidia-smi",
        "state": "ok",
        "message": "",
        "driver": "550.90.07",
        "device_files": 8,
        "devices": [
            {
                "index": 0,
                "uuid": "GPU-0",
                "name": "H100",
                "memory_used_mib": 4,
                "memory_total_mib": None,
                "ecc_errors": None,
                "xids": [{"code": 79, "age_s": 3}],
            }
        ],
        "processes": [{"device": None, "pid": 9, "user": "", "command": "x", "memory_mib": 5}],
    },
    "script": {"path": "/w/a.py", "state": "ok", "sha256": "ab", "size_bytes": 3, "detail": ""},
    "workdir": {"path": "/w", "state": "ok", "detail": ""},
    "scratch": {"path": "/tmp", "free_bytes": 1, "writable": True, "detail": ""},
    "shm": {"total_bytes": 2, "free_bytes": 1},
    "nofile": 1024,
    "memlock_bytes": -1,
    "infiniband": ["mlx5_0"],
}


def line(answer: dict[str, Any]) -> bytes:
    """An answer as it comes from a node."""
    return json.dumps(answer).encode() + b"\n"


def changed(path: str, value: object) -> bytes:
    """The answer with another value at `path`, keys and places divided by dots."""
    answer = copy.deepcopy(ANSWER)
    *parents, last = [int(part) if part.isdigit() else part for part in path.split(".")]
    place: Any = answer
    for part in parents:
        place = place[part]
    place[last] = value
    return line(answer)


def test_facts() -> None:
    """Every fact has its place."""
    assert parse_facts(line(ANSWER)) == NodeFacts(
        time_s=1795966807.0,
        boot_id="b",
        machine_id="",
        hostname="gpu-01",
        namespaces={"net": 4026531833, "pid": 4026531836},
        interfaces=(Interface("lo", True, True, "loopback", ("127.0.0.1", "::1")),),
        route_to_master=Route("eth0", "10.0.0.1"),
        port=RendezvousPort(29500, "taken", 7, "python a.py", "ann", "in use"),
        free_ports=(29501, 29502),
        listener=Listener(40000),
        ephemeral_range=(32768, 60999),
        reserved_ports=((29500, 29599),),
        python=PythonFact("3.11.7", "/usr/bin/python3", "/usr"),
        torch=TorchFact("2.7.1", "12.6", None, None, "/torch"),
        gpu=GpuFact(
            "nvidia-smi",
            "ok",
            "",
            "550.90.07",
            8,
            (GpuDevice(0, "GPU-0", "H100", 4, None, None, (Xid(79, 3.0),)),),
            (GpuProcess(None, 9, "", "x", 5),),
        ),
        script=ScriptFact("/w/a.py", "ok", "ab", 3, ""),
        workdir=WorkdirFact("/w", "ok", ""),
        scratch=ScratchFact("/tmp", 1, True, ""),
        shm=ShmFact(2, 1),
        nofile=1024,
        memlock_bytes=-1,
        infiniband=("mlx5_0",),
        errors={},
    )


def test_a_fact_that_could_not_be_read() -> None:
    """A fact in error is None, with its reason; one that is not there is None without."""
    answer = {**ANSWER, "interfaces": {"error": "Operation not permitted"}, "gpu": {"error": "x"}, "torch": None}
    facts = parse_facts(line(answer))
    assert (facts.interfaces, facts.gpu, facts.torch, facts.shm) == (None, None, None, ShmFact(2, 1))
    assert facts.errors == {"interfaces": "Operation not permitted", "gpu": "x"}


@pytest.mark.parametrize(
    ("path", "value", "where"),
    [
        ("hostname", 5, "facts.hostname is 5"),
        ("hostname", "x" * 5000, "facts.hostname is '" + "x" * 79),
        ("nofile", "many", "facts.nofile is 'many'"),
        ("nofile", True, "facts.nofile is True"),
        ("nofile", 1.5, "facts.nofile is 1.5"),
        ("nofile", {"error": 5}, "facts.errors.nofile is 5"),
        ("time_s", float("nan"), "facts.time_s is nan"),
        ("time_s", float("inf"), "facts.time_s is inf"),
        ("time_s", "now", "facts.time_s is 'now'"),
        ("scratch.writable", 1, "facts.scratch.writable is 1"),
        ("interfaces", {}, "facts.interfaces is {}"),
        ("interfaces.0.addresses.1", None, "facts.interfaces[0].addresses[1] is None"),
        ("gpu.tool", "cat", "facts.gpu.tool is 'cat'"),
        ("gpu.state", None, "facts.gpu.state is None"),
        ("gpu.devices.0.index", "0", "facts.gpu.devices[0].index is '0'"),
        ("gpu.devices.0.xids", 3, "facts.gpu.devices[0].xids is 3"),
        ("namespaces.net", [], "facts.namespaces.net is []"),
        ("reserved_ports.0", 5, "facts.reserved_ports[0] is 5"),
        ("port", [], "facts.port is []"),
        ("script.extra", 1, "facts.script has no [], or more than it should: ['extra']"),
        ("torch", {}, "facts.torch has no ['version', 'cuda', 'hip', 'nccl', 'path'], or more than it should: []"),
        ("extra", 1, "facts has no [], or more than it should: ['extra']"),
    ],
)
def test_answers_that_make_no_sense(path: str, value: object, where: str) -> None:
    """A value of the wrong type, a key too few and one too many are refused, and named."""
    with pytest.raises(HandshakeError) as caught:
        parse_facts(changed(path, value))
    assert str(caught.value) == f"the probe's {where}"


@pytest.mark.parametrize(
    "data",
    [b"", b"\n", b"[]", b"{}", b"nonsense\n", b"\xff\xfe", b"[" * 100000, b'{"type": "reach"}', b'{"type": ["facts"]}'],
)
def test_what_is_no_answer(data: bytes) -> None:
    """Anything but the answer that is due is refused, and shown in part."""
    with pytest.raises(HandshakeError) as caught:
        parse_facts(data)
    assert str(caught.value) == f"the probe answered {data[:80]!r} where facts was due"


def test_a_line_that_is_too_long() -> None:
    """A node cannot make the login node read without end."""
    with pytest.raises(HandshakeError):
        parse_facts(line({**ANSWER, "infiniband": ["x" * 4000] * 300}))


def test_text_cannot_steer_a_terminal() -> None:
    """Control characters, and bytes that were no UTF-8, are replaced in every text."""
    facts = parse_facts(changed("hostname", "\x1b[2Jgpu\n01\udcff é日\u202e"))
    assert facts.hostname == "\ufffd[2Jgpu\ufffd01\ufffd é日\ufffd"
    facts = parse_facts(changed("shm", {"error": "a\x07b"}))
    assert facts.errors == {"shm": "a\ufffdb"}


def test_rendezvous() -> None:
    """The answer to a move of the rendezvous port."""
    answer = line({"type": "rendezvous", "port": PORT, "free_ports": []})
    assert parse_rendezvous(answer) == Rendezvous(RendezvousPort(29500, "taken", 7, "python a.py", "ann", "in use"), ())
    with pytest.raises(HandshakeError):
        parse_rendezvous(line({"type": "rendezvous", "port": None, "free_ports": []}))


TARGETS = [ReachTarget("b", "10.0.0.2", 40000, "n2"), ReachTarget("c", "fd00::3", 40001, "n3")]
RESULTS = [
    {"name": "b", "state": "ok", "rtt_ms": 0.25, "detail": ""},
    {"name": "c", "state": "timeout", "rtt_ms": None, "detail": "no answer"},
]


def test_reach() -> None:
    """One result for each target, in their order."""
    assert parse_reach(line({"type": "reach", "results": RESULTS}), TARGETS) == (
        ReachResult("b", "ok", 0.25, ""),
        ReachResult("c", "timeout", None, "no answer"),
    )
    assert parse_reach(line({"type": "reach", "results": []}), []) == ()


@pytest.mark.parametrize("results", [RESULTS[:1], RESULTS[::-1], [*RESULTS, RESULTS[0]], None, [{"name": "b"}]])
def test_reach_for_other_targets(results: object) -> None:
    """Results that are not those of the targets are refused."""
    with pytest.raises(HandshakeError):
        parse_reach(line({"type": "reach", "results": results}), TARGETS)


def test_requests() -> None:
    """What a probe is asked, as it travels: one line of JSON each."""
    asked = FactsRequest(0, "10.0.0.1", 29500, "/w", "a.py", None, "/tmp", "n1")
    lines = [asked.encode(), encode_rendezvous(29501), encode_reach(TARGETS, 5), encode_end()]
    assert all(data.endswith(b"\n") and data.count(b"\n") == 1 and len(data) < probe.MAX_LINE_BYTES for data in lines)
    assert [json.loads(data) for data in lines] == [
        {
            "type": "facts",
            "node_rank": 0,
            "master_addr": "10.0.0.1",
            "master_port": 29500,
            "workdir": "/w",
            "script": "a.py",
            "module": None,
            "scratch": "/tmp",
            "nonce": "n1",
            "smi_limit_s": 10,
            "command": None,
        },
        {"type": "rendezvous", "port": 29501},
        {
            "type": "reach",
            "targets": [
                {"name": "b", "address": "10.0.0.2", "port": 40000, "nonce": "n2"},
                {"name": "c", "address": "fd00::3", "port": 40001, "nonce": "n3"},
            ],
            "limit_s": 5,
        },
        {"type": "end"},
    ]
