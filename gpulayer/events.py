"""What can happen while a job runs, as small frozen types.

fanout and remote make them; logs, console and outcome read them.

Every event names the node by `node_rank`. Times are seconds since the job began on the login node's monotonic clock;
fanout stamps them, so an event itself carries none.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal

StreamName = Literal["stdout", "stderr"]


class Stage(StrEnum):
    """How far a job has come. Nodes pass every stage together."""

    CONNECTING = "connecting"
    SENDING = "sending"
    PREPARING = "preparing"
    STARTING = "starting"
    RUNNING = "running"
    ENDING = "ending"
    COLLECTING = "collecting"
    DONE = "done"


@dataclass(frozen=True, slots=True)
class ExitStatus:
    """How a process ended: exactly one of `code` and `signal` is set, or neither when it could not be seen."""

    code: int | None = None
    signal: int | None = None

    @property
    def ok(self) -> bool:
        """True only for exit code 0. Not knowing is not success."""
        return self.code == 0


@dataclass(frozen=True, slots=True)
class Tail:
    """The last bytes a failed process wrote, and torchrun's error file where the script wrote one."""

    stdout: bytes = b""
    stderr: bytes = b""
    error_file: bytes = b""


@dataclass(frozen=True, slots=True)
class Survivor:
    """A process that outlived SIGKILL: pid, /proc state letter, command line."""

    pid: int
    state: str
    command: str


@dataclass(frozen=True, slots=True)
class StageReached:
    """All nodes reached this stage."""

    stage: Stage


@dataclass(frozen=True, slots=True)
class NodeConnected:
    """SSH login done and the supervisor's handshake received."""

    node_rank: int
    hostname: str
    python: str
    kernel: str
    supervisor_pid: int


@dataclass(frozen=True, slots=True)
class SendingProgress:
    """How far the source bundle is on its way to the nodes that lack it, all of them together; about once a second."""

    sent_bytes: int
    total_bytes: int
    bytes_per_s: int


@dataclass(frozen=True, slots=True)
class BundleReady:
    """The job's working directory is on the node. `sent_bytes`: what had to be sent, 0 where it had the bundle."""

    node_rank: int
    sent_bytes: int


@dataclass(frozen=True, slots=True)
class NodeChecked:
    """The node's probe has told what the node is like."""

    node_rank: int


@dataclass(frozen=True, slots=True)
class NodePrepared:
    """The node is ready to start; `interface` is what GLOO_SOCKET_IFNAME gets there, or "" when it needs none."""

    node_rank: int
    interface: str


@dataclass(frozen=True, slots=True)
class CommandStarted:
    """torchrun (or another command) runs on the node."""

    node_rank: int
    pid: int


@dataclass(frozen=True, slots=True)
class RankStarted:
    """A worker process of torchrun was seen."""

    node_rank: int
    rank: int
    pid: int


@dataclass(frozen=True, slots=True)
class RankExited:
    """A worker process ended, with its own exit code or signal; `tail` is filled when it failed."""

    node_rank: int
    rank: int
    status: ExitStatus
    tail: Tail = field(default_factory=Tail)


@dataclass(frozen=True, slots=True)
class Output:
    """Bytes that a rank wrote, or torchrun itself (`rank` None)."""

    node_rank: int
    rank: int | None
    stream: StreamName
    data: bytes


@dataclass(frozen=True, slots=True)
class CommandExited:
    """The node's command ended; `tail` is filled when it failed."""

    node_rank: int
    status: ExitStatus
    tail: Tail = field(default_factory=Tail)


@dataclass(frozen=True, slots=True)
class NodeSwept:
    """Nothing of the job is alive on the node but `survivors` (empty: verified clean)."""

    node_rank: int
    killed: int
    survivors: tuple[Survivor, ...] = ()


@dataclass(frozen=True, slots=True)
class NodeEnded:
    """The supervisor is done. `kept` is the folder it left on the node because not all output arrived, or "".

    `outputs`: the job has left something for its user there, or may have.
    """

    node_rank: int
    kept: str = ""
    outputs: bool = False


@dataclass(frozen=True, slots=True)
class CollectingProgress:
    """How far the outputs are on their way from these nodes, all of them together; about once a second."""

    received_bytes: int
    total_bytes: int
    bytes_per_s: int
    node_ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class OutputsCollected:
    """What a node left for its user is here now, but for what `problems` say; then its folder there may be `kept`.

    `links` were left out since what they lead to came too; `unmatched` are the patterns that nothing fits there.
    """

    node_rank: int
    files: int
    size_bytes: int
    links: int = 0
    problems: tuple[str, ...] = ()
    unmatched: tuple[str, ...] = ()
    kept: str = ""


@dataclass(frozen=True, slots=True)
class NodeStopping:
    """The node was told to end its part of the job (or told to do so at once, when `now`)."""

    node_rank: int
    now: bool = False


@dataclass(frozen=True, slots=True)
class NodeLost:
    """The node can no longer be heard, or its supervisor died. `supervisor_died`: the link was fine when it did."""

    node_rank: int
    reason: str
    supervisor_died: bool = False


@dataclass(frozen=True, slots=True)
class Notice:
    """Something worth one line on the screen. `node_ranks` is empty when it is about the whole job."""

    text: str
    node_ranks: tuple[int, ...] = ()


Event = (
    StageReached
    | NodeConnected
    | SendingProgress
    | BundleReady
    | NodeChecked
    | NodePrepared
    | CommandStarted
    | RankStarted
    | RankExited
    | Output
    | CommandExited
    | NodeSwept
    | NodeEnded
    | CollectingProgress
    | OutputsCollected
    | NodeStopping
    | NodeLost
    | Notice
)
