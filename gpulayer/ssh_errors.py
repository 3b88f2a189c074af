"""Why a login failed, in words: every exception of asyncssh and the socket layer becomes one NodeError with advice."""

from __future__ import annotations

import errno
import re
import shlex
import socket
from dataclasses import dataclass, field

import asyncssh

from gpulayer.errors import (
    ChangedHostKeyError,
    ConnectionDroppedError,
    ConnectRefusedError,
    ConnectTimeoutError,
    NameNotFoundError,
    NodeError,
    PermissionDeniedError,
    UnknownHostKeyError,
)
from gpulayer.ssh_config import Endpoint, KeyRing, tilde

# What asyncssh.connect() and create_session() raise.
FAILURES = (asyncssh.Error, OSError, ValueError, EOFError)
DROPS = (asyncssh.ConnectionLost, ConnectionResetError, ConnectionAbortedError, BrokenPipeError)
CONFIG_NOTE = (
    "`--accept-new-host-keys` adds the keys of new hosts;"
    " gpulayer does not read StrictHostKeyChecking from the SSH config"
)
NOT_NEW_NOTE = "`--accept-new-host-keys` is for hosts that known_hosts has nothing of"


@dataclass(slots=True)
class LoginFacts:
    """What was seen during one attempt to log in. `via` is the jump host's name, or None for a direct connection.

    `trusted` and `authorities` are what known_hosts has for the host. `accepted` is the key of a new host that is to be
    added there; it is one of `accept_new` only.
    """

    endpoint: Endpoint
    timeout_s: float
    via: str | None = None
    connected: bool = False
    greeted: bool = False
    accept_new: bool = False
    is_new: bool = False
    trusted: list[asyncssh.SSHKey] = field(default_factory=list)
    authorities: list[asyncssh.SSHKey] = field(default_factory=list)
    accepted: asyncssh.SSHKey | None = None
    offered: asyncssh.SSHKey | None = None
    offered_ca: asyncssh.SSHKey | None = None
    methods: tuple[str, ...] = ()
    tried: list[str] = field(default_factory=list)
    ring: KeyRing = field(default_factory=KeyRing)

    @property
    def place(self) -> str:
        """Host and port as messages name them."""
        return f"{self.endpoint.host} port {self.endpoint.port}"

    @property
    def auth_began(self) -> bool:
        """The server has answered a login request, so it was no longer a matter of getting through to it."""
        return bool(self.methods)


def explain(exc: BaseException, facts: LoginFacts) -> NodeError:
    """The NodeError for what went wrong while logging in."""
    if isinstance(exc, asyncssh.HostKeyNotVerifiable):
        return _host_key(exc, facts)
    if isinstance(exc, asyncssh.PermissionDenied) or "too many authentication failures" in str(exc).lower():
        return _permission(exc, facts)
    if isinstance(exc, asyncssh.ChannelOpenError):
        return _jump_refused(exc, facts)
    if isinstance(exc, asyncssh.KeyExchangeFailed):
        return ConnectionDroppedError(
            f"{facts.place} and gpulayer have no algorithm in common: {exc}",
            hint="see Ciphers, KexAlgorithms, MACs and HostKeyAlgorithms in the SSH config and in its sshd_config",
        )
    if isinstance(exc, DROPS):
        return _dropped(facts)
    if isinstance(exc, (socket.gaierror, UnicodeError)):
        return _no_address(exc, facts)
    if isinstance(exc, OSError):
        return _socket(exc, facts)
    return ConnectionDroppedError(f"{facts.place} broke off the SSH handshake: {exc}", hint=_try_ssh(facts))


def explain_session(exc: BaseException, place: str) -> NodeError:
    """The NodeError for a server that let us in but ran no command."""
    if isinstance(exc, asyncssh.ChannelOpenError) and "closed" not in str(exc).lower():
        return ConnectionDroppedError(
            f"{place} accepted the login but refused to run a command: {exc}",
            hint="see MaxSessions and ForceCommand in its sshd_config, and the options of your key in authorized_keys",
        )
    return ConnectionDroppedError(f"{place} closed the connection right after login", hint="see its sshd log")


def _no_address(exc: OSError | UnicodeError, facts: LoginFacts) -> NodeError:
    reason = exc.strerror if isinstance(exc, OSError) else "it is no host name"  # UnicodeError: a label is too long
    return NameNotFoundError(
        f"the name {facts.endpoint.host} cannot be resolved: {reason}",
        hint="see `ssh` in the hosts map and HostName in the SSH config, or write the IP address there",
    )


def _socket(exc: OSError, facts: LoginFacts) -> NodeError:
    number = exc.errno
    if number is None:  # asyncio joins the failures of several addresses into one text
        found = re.findall(r"\[Errno (\d+)\]", str(exc))
        number = int(found[-1]) if found else None
    if number == errno.ETIMEDOUT or (isinstance(exc, TimeoutError) and number is None):
        return _timeout(facts)
    if number == errno.ECONNREFUSED:
        return ConnectRefusedError(
            f"{facts.place} refuses connections: the machine is up, but nothing listens there",
            hint="is sshd running there, and is `port` right?",
        )
    if number in {errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN, errno.ENETDOWN}:
        return ConnectRefusedError(
            f"there is no route to {facts.place}", hint="is the machine on, and is this the right network or address?"
        )
    return ConnectRefusedError(f"cannot connect to {facts.place}: {exc}", hint=_try_ssh(facts))


def _timeout(facts: LoginFacts) -> NodeError:
    limit = f"{facts.timeout_s:g} s"
    if facts.greeted:
        message = f"{facts.place} did not finish the login within {limit}"
        hint = "the machine, its user directory or the SSH agent is slow; --connect-timeout gives it longer"
    elif facts.connected:
        message = f"{facts.place} accepts connections but sent no SSH greeting within {limit}"
        hint = "is it an SSH port? A hanging or overloaded machine does this too"
    else:
        message = f"{facts.place} did not answer within {limit}"
        hint = "is the machine on, and does a firewall drop the connection? --connect-timeout gives it longer"
    return ConnectTimeoutError(message, hint=hint)


def _dropped(facts: LoginFacts) -> NodeError:
    if facts.auth_began:
        return ConnectionDroppedError(
            f"{facts.place} closed the connection during the login of user {facts.endpoint.user}",
            hint="its sshd log says why: the account may be locked, or the login time (LoginGraceTime) is over",
        )
    return ConnectionDroppedError(
        f"{facts.place} closed the connection before the login, every time",
        hint="see MaxStartups in its sshd_config, and whether a firewall or hosts.deny turns this machine away",
    )


def _jump_refused(exc: asyncssh.ChannelOpenError, facts: LoginFacts) -> NodeError:
    text = exc.reason
    lowered = text.lower()
    message = f"the jump host {facts.via} cannot connect to {facts.place}: {text}"
    if "timed out" in lowered:
        return ConnectTimeoutError(message, hint="is the machine on, and may the jump host reach it?")
    if "name" in lowered and ("known" in lowered or "resol" in lowered):
        return NameNotFoundError(message, hint="the jump host looks this name up: it must know it")
    if "prohibited" in lowered or exc.code == asyncssh.OPEN_ADMINISTRATIVELY_PROHIBITED:
        return ConnectRefusedError(message, hint="see AllowTcpForwarding and PermitOpen in the jump host's sshd_config")
    return ConnectRefusedError(message, hint="is sshd running there, and is `port` right?")


def _permission(exc: BaseException, facts: LoginFacts) -> NodeError:
    user, methods = facts.endpoint.user, ", ".join(facts.methods) or "no way of logging in that gpulayer knows"
    tried = ", ".join(facts.tried) or "no key"
    locked = facts.ring.locked
    message = f"permission denied for user {user} on {facts.place}: it accepts {methods}; tried {tried}"
    if not isinstance(exc, asyncssh.PermissionDenied):
        message = f"{message}, and then it allowed no more attempts"
        hint = "name the right key with IdentityFile and set IdentitiesOnly yes in the SSH config"
    elif "publickey" not in facts.methods:
        hint = "gpulayer logs in with keys and never asks for a password: allow public keys there"
    elif locked:
        hint = f"{locked[0]} needs a passphrase, which gpulayer never asks for: `ssh-add {locked[0]}` first"
    elif not facts.tried:
        hint = f"make a key with `ssh-keygen` and install it with `{_copy_id(facts)}`"
    else:
        hint = f"is {user} the right user? `{_copy_id(facts)}` installs your key there"
    return PermissionDeniedError(message, hint=hint)


def _host_key(exc: BaseException, facts: LoginFacts) -> NodeError:
    if facts.offered is None:
        return _host_certificate(exc, facts)
    offered = _describe(facts.offered)
    same_type = [key for key in facts.trusted if key.get_algorithm() == facts.offered.get_algorithm()]
    if same_type:
        known = " and ".join(_describe(key) for key in same_type)
        return ChangedHostKeyError(
            f"the host key of {facts.place} has changed: known_hosts has {known}, it now offers {offered}",
            hint="another machine may be answering in its place; if you know why it changed, forget the old key"
            f" with `{_forget(facts)}`, then {_add(facts, facts.offered)}",
        )
    others = ", ".join(sorted({key.get_algorithm() for key in facts.trusted}))
    if facts.authorities and not others:
        others = "an authority"
    note = f" (known_hosts has only {others} for it)" if others else ""
    return UnknownHostKeyError(
        f"the host key of {facts.place} is not in known_hosts: it offers {offered}{note}",
        hint=f"compare it with `ssh-keygen -lf /etc/ssh/ssh_host_{_scan_type(facts.offered)}_key.pub` run there, then"
        f" {_add(facts, facts.offered)}; {NOT_NEW_NOTE if facts.accept_new else CONFIG_NOTE}",
    )


def not_kept(facts: LoginFacts, reason: str) -> NodeError:
    """The NodeError for a new host whose key would be forgotten again."""
    return UnknownHostKeyError(
        f"the host key of {facts.place} is new, and cannot be added to known_hosts: {reason}",
        hint="a key that is not kept would be taken from anyone the next time: see to that, or name another file with"
        " UserKnownHostsFile in the SSH config",
    )


def _host_certificate(exc: BaseException, facts: LoginFacts) -> NodeError:
    reason = str(exc).rpartition(" for host ")[0] or str(exc)
    if "revoked" in reason:
        return ChangedHostKeyError(
            f"the host key of {facts.place} is marked as revoked in known_hosts",
            hint="do not log in there before it has a new key",
        )
    if facts.offered_ca is not None:
        return UnknownHostKeyError(
            f"the host key of {facts.place} is not in known_hosts: it offers a certificate signed by"
            f" {_describe(facts.offered_ca)}, which known_hosts does not name as an authority",
            hint=f"add a line `@cert-authority {facts.endpoint.known_name} KEY` to known_hosts; {CONFIG_NOTE}",
        )
    return UnknownHostKeyError(
        f"the host certificate of {facts.place} cannot be trusted: {reason}", hint="it needs a new certificate"
    )


def _describe(key: asyncssh.SSHKey) -> str:
    return f"{key.get_algorithm()} {key.get_fingerprint()}"


def _scan_type(key: asyncssh.SSHKey) -> str:
    """The key's type as ssh-keyscan's -t and the names of host key files have it."""
    return key.get_algorithm().removeprefix("ssh-").partition("-")[0]


def _forget(facts: LoginFacts) -> str:
    path = next(iter(facts.endpoint.user_known_hosts), None)
    file = () if path is None or tilde(path) == "~/.ssh/known_hosts" else ("-f", str(path))
    return shlex.join(("ssh-keygen", *file, "-R", facts.endpoint.known_name))


def _add(facts: LoginFacts, key: asyncssh.SSHKey) -> str:
    """How to make the key known. ssh-keyscan knows neither jump hosts nor aliases; `ssh` itself does."""
    end = facts.endpoint
    if not end.user_known_hosts or str(end.user_known_hosts[0]) == "/dev/null":
        return "set UserKnownHostsFile in the SSH config to a file that can hold it"
    if facts.via is not None or end.host_key_alias or end.options.proxy_command:
        return f"add it by answering the question of `{shlex.join(end.ssh_command)}`"
    port = ("-p", str(end.port)) if end.port != 22 else ()
    scan = shlex.join(("ssh-keyscan", "-t", _scan_type(key), *port, end.host))
    file = tilde(end.user_known_hosts[0])
    return f"add it with `{scan} >> {file if file.startswith('~/') and ' ' not in file else shlex.quote(file)}`"


def _copy_id(facts: LoginFacts) -> str:
    return shlex.join(("ssh-copy-id", *facts.endpoint.ssh_command[1:]))


def _try_ssh(facts: LoginFacts) -> str:
    return f"see what `{shlex.join(('ssh', '-v', *facts.endpoint.ssh_command[1:]))}` says"
