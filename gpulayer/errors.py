"""The error tree. Exit codes stand on the classes, advice stands on the instance as `hint`.

GpulayerError
├── RequestError              2   the request is wrong; nothing was contacted
│   ├── HostsFileError            the hosts map cannot be read or used
│   ├── PoolError                 the nodes asked for are not there
│   ├── PlacementError            ranks, address or port cannot be laid out
│   ├── PlaceholderError          a `$NAME` would have reached a node as text
│   ├── JobFileError              the job file cannot be read or used
│   ├── PlanFileError             a saved plan cannot be read, made or run as it stands
│   └── JobError                  an option, a job setting or an environment name is wrong
├── HeldError                 3   too few nodes are free: other jobs have them; nothing was contacted
├── RefusedError              3   some nodes cannot take part, or would not run the job; nothing was started
└── NodeError                 3   one node cannot take part (fanout gathers these into a RefusedError)
    ├── SshConfigError            ~/.ssh/config (or -F FILE) cannot be read
    ├── NameNotFoundError         the SSH name has no address
    ├── ConnectTimeoutError       no answer within --connect-timeout
    ├── ConnectRefusedError       the machine answers, its SSH port does not
    ├── ConnectionDroppedError    the SSH server hung up before login
    ├── UnknownHostKeyError       the host key is not in known_hosts
    ├── ChangedHostKeyError       the host key is another one than known_hosts has
    ├── PermissionDeniedError     no way of logging in was accepted
    ├── PythonMissingError        `python` does not exist there
    ├── PythonTooOldError         `python` is older than the supervisor needs
    ├── HandshakeError            logged in, but the supervisor did not answer as it should
    ├── NodeHeldError             another job has the node, or one of the GPUs that are asked for
    └── PrepareError              the supervisor runs and says why the job cannot start there

How a job that has started ends is no exception: outcome.py decides that.
"""

from __future__ import annotations


class GpulayerError(Exception):
    """Something a user can cause and mend. `str(error)` is the message; `hint` is the next step or None."""

    exit_code = 1

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.hint = hint


class RequestError(GpulayerError):
    """The request is wrong: options, hosts map, placeholders, addresses. Nothing was contacted."""

    exit_code = 2


class HostsFileError(RequestError):
    """The hosts map cannot be found, read or used."""


class PoolError(RequestError):
    """The node pool does not have the nodes that were asked for."""


class PlacementError(RequestError):
    """Ranks, rendezvous address or port cannot be laid out over these nodes."""


class PlaceholderError(RequestError):
    """A `$NAME`, `${NAME}` or `$(...)` would have reached a node as text."""


class JobFileError(RequestError):
    """The job file cannot be read or used."""


class PlanFileError(RequestError):
    """A saved plan cannot be read, made or run as it stands."""


class JobError(RequestError):
    """An option, a job setting or an environment name is wrong."""


class HeldError(GpulayerError):
    """Too few of the nodes that were asked for are free: other jobs have them. Nothing was contacted."""

    exit_code = 3


class NodeError(GpulayerError):
    """One node cannot take part. The message does not name the node: whoever reports it does."""

    exit_code = 3


class SshConfigError(NodeError):
    """The SSH client configuration cannot be read or holds something asyncssh does not understand."""


class NameNotFoundError(NodeError):
    """The SSH name has no address."""


class ConnectTimeoutError(NodeError):
    """No answer within the connect timeout."""


class ConnectRefusedError(NodeError):
    """The machine answers, but nothing listens on the SSH port (or there is no route to it)."""


class ConnectionDroppedError(NodeError):
    """The SSH server hung up before the login was complete."""


class UnknownHostKeyError(NodeError):
    """The host key is not in known_hosts."""


class ChangedHostKeyError(NodeError):
    """The host key is another one than known_hosts holds for this name."""


class PermissionDeniedError(NodeError):
    """The SSH server accepted no way of logging in that was tried."""


class PythonMissingError(NodeError):
    """The node's `python` does not exist or cannot be run."""


class PythonTooOldError(NodeError):
    """The node's `python` is older than the supervisor needs."""


class HandshakeError(NodeError):
    """Logged in, but the supervisor did not answer as it should."""


class NodeHeldError(NodeError):
    """Another job has the node, or one of the GPUs that are asked for."""


class PrepareError(NodeError):
    """The supervisor runs and says why the job cannot start on its node."""


class RefusedError(GpulayerError):
    """Some nodes cannot take part, or checks say that the job would not run there, so nothing was started anywhere.

    `problems` maps each node id to its NodeError, in node order. `report` is what the checks found in words, `findings`
    the same as plain values.
    """

    exit_code = 3

    def __init__(
        self,
        message: str,
        problems: dict[str, NodeError],
        report: str = "",
        findings: list[dict[str, object]] | None = None,
    ) -> None:
        super().__init__(message)
        self.problems = problems
        self.report = report
        self.findings = findings or []
