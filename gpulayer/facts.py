"""What a node's probe is asked, and what it says, as types. Nothing that a node sends is trusted.

The dataclasses are the format: an answer with another key, another type or a number that is none is a HandshakeError.
A fact that the node could not read is None here, and `NodeFacts.errors` says why.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from gpulayer import probe
from gpulayer.errors import HandshakeError
from gpulayer.typed import read_typed

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

ReachState = Literal["ok", "refused", "timeout", "unreachable", "other"]
PortState = Literal["free", "taken", "denied"]
GpuTool = Literal["nvidia-smi", "amd-smi", "rocm-smi"]
GpuState = Literal["ok", "missing", "hangs", "failed"]
ScriptState = Literal["ok", "missing", "unreadable", "not_found_module", "not_found_command", "unknown"]
WorkdirState = Literal["ok", "missing", "denied", "not_a_folder"]
Port = Annotated[int, range(1, 1 << 16)]  # another node is sent there: no honest one shall be blamed for it


# --- what is asked --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FactsRequest:
    """What a node must know to tell its facts. `script` and `command` are as in the argv.

    At most one of them and `module` is set.

    `nonce` (letters and digits) is what the node's listeners say, so it is another one for every node.
    """

    node_rank: int
    master_addr: str
    master_port: int
    workdir: str
    script: str | None
    module: str | None
    scratch: str
    nonce: str
    smi_limit_s: float = 10
    command: str | None = None

    def encode(self) -> bytes:
        """Return the line for the probe."""
        return _line({"type": "facts", **asdict(self)})


@dataclass(frozen=True, slots=True)
class ReachTarget:
    """A listener to connect to. `name` comes back with the result."""

    name: str
    address: str
    port: int
    nonce: str


def encode_reach(targets: Sequence[ReachTarget], limit_s: float) -> bytes:
    """Return the line that has the probe connect to all targets at once, giving up after `limit_s`."""
    return _line({"type": "reach", "targets": [asdict(target) for target in targets], "limit_s": limit_s})


def encode_rendezvous(port: int) -> bytes:
    """Return the line that has the head's probe listen on another rendezvous port."""
    return _line({"type": "rendezvous", "port": port})


def encode_gpus(limit_s: float) -> bytes:
    """Return the line that has the probe ask the vendor's tool, and nothing else."""
    return _line({"type": "gpus", "smi_limit_s": limit_s})


def encode_end() -> bytes:
    """Return the line that ends the probe."""
    return _line({"type": "end"})


def _line(request: Mapping[str, object]) -> bytes:
    return json.dumps(request, separators=(",", ":")).encode() + b"\n"


# --- what is said ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Interface:
    """A network interface. `up`: switched on and with a carrier. `kind`: ethernet, loopback, bond, veth and so on."""

    name: str
    switched_on: bool
    up: bool
    kind: str
    addresses: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Route:
    """The address that packets to the master leave from, and the interface that holds it ("": none does)."""

    interface: str
    source: str


@dataclass(frozen=True, slots=True)
class RendezvousPort:
    """The port on the head. `denied`: it cannot be bound for another reason than being taken, which `detail` says.

    `user` of the holder is known whenever `taken`, unless it only holds the port and neither listens nor is connected;
    `pid` (None) and `command` ("") only where the job's user may see them.
    """

    port: Port
    state: PortState
    pid: int | None
    command: str
    user: str
    detail: str


@dataclass(frozen=True, slots=True)
class Listener:
    """The ephemeral port on which the node answers with its nonce."""

    port: Port


@dataclass(frozen=True, slots=True)
class PythonFact:
    """The job's Python on the node."""

    version: str
    executable: str
    prefix: str


@dataclass(frozen=True, slots=True)
class TorchFact:
    """The torch that the job's Python would import. `version` is "" where nothing states it; `path` is its folder.

    `cuda` and `hip` are what it was built with. `nccl` is the version installed beside a CUDA build, if as a package.
    """

    version: str
    cuda: str | None
    hip: str | None
    nccl: str | None
    path: str


@dataclass(frozen=True, slots=True)
class Xid:
    """A GPU error in the kernel's log, and how long ago it was last seen there."""

    code: int
    age_s: float


@dataclass(frozen=True, slots=True)
class GpuDevice:
    """One GPU. None stands for what the tool does not say. `ecc_errors`: uncorrected, since the driver was loaded."""

    index: int
    uuid: str
    name: str
    memory_used_mib: int | None
    memory_total_mib: int | None
    ecc_errors: int | None
    xids: tuple[Xid, ...]


@dataclass(frozen=True, slots=True)
class GpuProcess:
    """A compute process. `device` None: the tool does not say which. `user` "": not visible from here."""

    device: int | None
    pid: int
    user: str
    command: str
    memory_mib: int | None


@dataclass(frozen=True, slots=True)
class GpuFact:
    """What the vendor's tool says. `device_files`: how many GPUs the kernel shows, whatever the tool says."""

    tool: GpuTool | None
    state: GpuState
    message: str
    driver: str | None
    device_files: int
    devices: tuple[GpuDevice, ...]
    processes: tuple[GpuProcess, ...]


@dataclass(frozen=True, slots=True)
class ScriptFact:
    """The file that every rank runs. `unknown`: a module that cannot be found without importing packages."""

    path: str
    state: ScriptState
    sha256: str | None
    size_bytes: int | None
    detail: str


@dataclass(frozen=True, slots=True)
class WorkdirFact:
    """The job's folder, and whether it can be entered."""

    path: str
    state: WorkdirState
    detail: str


@dataclass(frozen=True, slots=True)
class ScratchFact:
    """The folder for the job's output. `free_bytes` is None where it does not exist."""

    path: str
    free_bytes: int | None
    writable: bool
    detail: str


@dataclass(frozen=True, slots=True)
class ShmFact:
    """What there is of shared memory (/dev/shm)."""

    total_bytes: int
    free_bytes: int


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """Everything a node says of itself.

    None stands for a fact that could not be read, except: `port` is None on every node but the head, `torch` and `shm`
    where there is none, `script` where none was asked for. `errors` tells these apart: the names of facts, and why.
    """

    time_s: float | None  # the node's clock at the moment of answering
    boot_id: str | None
    machine_id: str | None  # "" where there is none
    hostname: str | None
    namespaces: dict[str, int] | None  # inodes of net, pid, uts, mnt, ipc, user, cgroup
    interfaces: tuple[Interface, ...] | None
    route_to_master: Route | None
    port: RendezvousPort | None
    free_ports: tuple[Port, ...]  # the next ones, where the port is taken
    listener: Listener | None
    ephemeral_range: tuple[int, ...] | None  # first and last
    reserved_ports: tuple[tuple[int, ...], ...] | None  # ranges left out of it
    python: PythonFact | None
    torch: TorchFact | None
    gpu: GpuFact | None
    script: ScriptFact | None
    workdir: WorkdirFact | None
    scratch: ScratchFact | None
    shm: ShmFact | None
    nofile: int | None  # soft limit; -1: none
    memlock_bytes: int | None  # soft limit; -1: none
    infiniband: tuple[str, ...] | None  # device names
    errors: dict[str, str]


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """The answer to encode_rendezvous."""

    port: RendezvousPort
    free_ports: tuple[Port, ...]


@dataclass(frozen=True, slots=True)
class ReachResult:
    """How a connection went. `rtt_ms`: until it stood; None where it never did.

    `other`: something took the connection, and it was not the probe of that node.
    """

    name: str
    state: ReachState
    rtt_ms: float | None
    detail: str


def parse_facts(line: bytes) -> NodeFacts:
    """Read the answer to a FactsRequest. Raises HandshakeError."""
    answer = _answer(line, "facts")
    errors = {name: value["error"] for name, value in answer.items() if isinstance(value, dict) and "error" in value}
    answer = {name: None if name in errors else value for name, value in answer.items()}
    answer["errors"] = errors
    facts: NodeFacts = read_typed(NodeFacts, answer, "the probe's facts")
    return facts


def parse_rendezvous(line: bytes) -> Rendezvous:
    """Read the answer to encode_rendezvous. Raises HandshakeError."""
    rendezvous: Rendezvous = read_typed(Rendezvous, _answer(line, "rendezvous"), "the probe's rendezvous")
    return rendezvous


def parse_gpus(line: bytes) -> GpuFact | None:
    """Read the answer to encode_gpus; None where nothing could be asked. Raises HandshakeError."""
    value = _answer(line, "gpus").get("gpu")
    unread = isinstance(value, dict) and "error" in value
    fact: GpuFact | None = None if unread else read_typed(GpuFact, value, "the probe's gpu")
    return fact


def parse_reach(line: bytes, targets: Sequence[ReachTarget]) -> tuple[ReachResult, ...]:
    """Read the answer to encode_reach: one result for each target, in their order. Raises HandshakeError."""
    answer = _answer(line, "reach")
    results: tuple[ReachResult, ...] = read_typed(tuple[ReachResult, ...], answer.get("results"), "the probe's reach")
    if [result.name for result in results] != [target.name for target in targets]:
        raise HandshakeError("the probe answered for other targets than it was asked for")
    return results


# --- from JSON to types ---------------------------------------------------------------------------------------------


def _answer(line: bytes, kind: str) -> dict[str, Any]:
    try:
        answer = json.loads(line) if len(line) <= probe.MAX_LINE_BYTES else None
    except (ValueError, RecursionError):
        answer = None
    if not isinstance(answer, dict) or answer.pop("type", None) != kind:
        raise HandshakeError(f"the probe answered {line[:80]!r} where {kind} was due")
    return answer
