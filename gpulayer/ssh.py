"""Logging in to nodes over SSH: jump hosts, the bound on logins in flight, retries. Host keys are always checked.

ssh_config.py says where to and with what, known_hosts.py whom to trust, ssh_errors.py why it failed, ssh_link.py what
can be done once logged in; these five are all of the login node's side that knows asyncssh. Nothing ever prompts:
logging in is by key, from a file or the agent.
"""

from __future__ import annotations

import asyncio
import copy
import random
import threading
from typing import TYPE_CHECKING

import asyncssh

from gpulayer.errors import NodeError, SshConfigError
from gpulayer.known_hosts import NewKey, NotKeptError, NotNewError, add_key, find, load_known_hosts, ssh_says
from gpulayer.ssh_config import (
    MAX_HOPS,
    Endpoint,
    Identity,
    KeyRing,
    LoginKey,
    SshSettings,
    SshTarget,
    build_ring,
    default_config,
    read_endpoint,
    tilde,
)
from gpulayer.ssh_errors import DROPS, FAILURES, LoginFacts, explain, not_kept
from gpulayer.ssh_link import Receiver, SshChannel, SshLink

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

__all__ = ["Receiver", "SshChannel", "SshConnector", "SshLink", "SshSettings", "SshTarget"]

MAX_IN_FLIGHT = 64
RETRY_FIRST_S = 0.1
RETRY_MOST_S = 1.0
_CHANCE = random.SystemRandom()

# In front of asyncssh's own lists, unless the SSH config chooses. AES-GCM costs half of ChaCha20 in Python.
FAST_CIPHERS = "^aes128-gcm@openssh.com,aes256-gcm@openssh.com"
# asyncssh asks only for the host key types that known_hosts has. With these after them a server that has none of those
# types is an unknown host key with a fingerprint to show, as with OpenSSH, not a failed key exchange.
HOST_KEY_TYPES = "ssh-ed25519,ecdsa-sha2-nistp*,rsa-sha2-*"
# Keys first. The order also lets the whole list that a server offers be seen before asyncssh crosses methods off it.
AUTH_METHODS = "publickey,keyboard-interactive,password,gssapi-with-mic,hostbased"


class SshConnector:
    """Makes all connections of one run. Connections through one jump host share one connection to it.

    At most 64 logins are in flight at a time; how many stay connected is not bounded. `tell` hears of each host key
    that was added to known_hosts.
    """

    def __init__(self, settings: SshSettings, tell: Callable[[str], None] = lambda _: None) -> None:
        self.tell = tell
        self._settings = settings
        self._slots = asyncio.Semaphore(MAX_IN_FLIGHT)
        self._lock = threading.Lock()
        self._endpoints: dict[SshTarget, Endpoint] = {}
        self._known: dict[tuple[Path, ...], asyncssh.SSHKnownHosts] = {}
        self._jumps: dict[tuple[SshTarget, ...], asyncio.Task[asyncssh.SSHClientConnection]] = {}
        self._rings: dict[Identity, asyncio.Task[KeyRing]] = {}
        self._agents: list[asyncssh.SSHAgentClient] = []
        self._open: set[asyncssh.SSHClientConnection] = set()

    async def connect(self, target: SshTarget) -> SshLink:
        """Log in. Raises one of the NodeErrors from SshConfigError to PermissionDeniedError, each with advice."""
        route = await asyncio.to_thread(self._route, target, ())
        conn = await self._login(route)
        return SshLink(conn, f"{route[-1].host} port {route[-1].port}", self._settings.connect_timeout_s)

    async def close(self) -> None:
        """Close every connection that is still open, the jump hosts' last. Links must not be used after this."""
        tasks = [*self._jumps.values(), *self._rings.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        remaining = tuple(self._open)
        for conn in remaining:
            conn.abort()
        await asyncio.gather(*(conn.wait_closed() for conn in remaining))
        for agent in self._agents:
            agent.close()
            await agent.wait_closed()

    def _route(self, target: SshTarget, trail: tuple[SshTarget, ...]) -> tuple[Endpoint, ...]:
        """The jump hosts on the way, then the target. Blocks: runs in a thread.

        As with OpenSSH, the first of several jump hosts may have a ProxyJump of its own; the others are reached
        through the one before.
        """
        endpoint = self._endpoint(target)
        trail = (*trail, target)
        hops: tuple[Endpoint, ...] = ()
        for jump in endpoint.jumps:
            if jump in trail or len(trail) > MAX_HOPS:
                path = " -> ".join(str(step) for step in (*trail, jump))
                raise SshConfigError(
                    f"ProxyJump in the SSH config goes in a circle: {path}",
                    hint=f"exempt it: `Host {jump.host}` with `ProxyJump none`, above the block that sets ProxyJump",
                )
            hops = (*hops, self._endpoint(jump)) if hops else self._route(jump, trail)
        return (*hops, endpoint)

    def _endpoint(self, target: SshTarget) -> Endpoint:
        with self._lock:
            known = self._endpoints.get(target)
        if known is None:
            known = read_endpoint(target, self._settings)
            with self._lock:
                known = self._endpoints.setdefault(target, known)
                if known.known_hosts not in self._known:
                    self._known[known.known_hosts] = load_known_hosts(known.known_hosts)
        return known

    async def _through(self, hops: tuple[Endpoint, ...]) -> asyncssh.SSHClientConnection | None:
        """The shared connection to the last of these jump hosts. A failure is the same for all who wait for it."""
        if not hops:
            return None
        key = tuple(hop.target for hop in hops)
        task = self._jumps.get(key)
        if task is None or (task.done() and (not _succeeded(task) or task.result().is_closed())):
            task = asyncio.create_task(self._login(hops))
            task.add_done_callback(_succeeded)
            self._jumps[key] = task
        try:
            return await asyncio.shield(task)
        except NodeError as exc:
            text = str(exc) if len(hops) > 1 and str(exc).startswith("jump host ") else f"jump host {key[-1]}: {exc}"
            raise type(exc)(text, hint=exc.hint) from None

    def _doubt(self, hops: tuple[Endpoint, ...], tunnel: asyncssh.SSHClientConnection | None) -> None:
        """Nothing came through this jump host: it may be gone without a word, so the next login connects to it anew."""
        key = tuple(hop.target for hop in hops)
        task = self._jumps.get(key)
        if task and _succeeded(task) and task.result() is tunnel:
            del self._jumps[key]

    async def _login(self, route: tuple[Endpoint, ...]) -> asyncssh.SSHClientConnection:
        """Connect to the end of the route, again and again while the server drops connections before the login."""
        loop = asyncio.get_running_loop()
        pause_s = RETRY_FIRST_S
        give_up_s: float | None = None
        while True:
            tunnel = await self._through(route[:-1])
            facts = LoginFacts(route[-1], self._settings.connect_timeout_s)
            facts.accept_new = self._settings.accept_new_host_keys
            facts.via = str(route[-2].target) if tunnel else None
            try:
                async with self._slots:
                    return await self._accepting(facts, tunnel)
            except FAILURES as exc:
                if isinstance(exc, TimeoutError) and not facts.connected:
                    self._doubt(route[:-1], tunnel)
                give_up_s = give_up_s or loop.time() + self._settings.connect_timeout_s
                if not _may_retry(exc, facts) or loop.time() + pause_s > give_up_s:
                    raise explain(exc, facts) from exc
            await asyncio.sleep(pause_s * _CHANCE.uniform(0.5, 1))
            pause_s = min(2 * pause_s, RETRY_MOST_S)

    async def _accepting(
        self, facts: LoginFacts, tunnel: asyncssh.SSHClientConnection | None
    ) -> asyncssh.SSHClientConnection:
        """Log in; keep the key of a new host that has proven to have it, whether it has let us in or not, as `ssh`."""
        try:
            conn = await self._attempt(facts, tunnel)
        except FAILURES:
            if facts.accepted and facts.auth_began:
                await self._keep(facts, facts.accepted)
            raise
        if facts.accepted:
            try:
                await self._keep(facts, facts.accepted)
            except BaseException:
                conn.abort()
                raise
        return conn

    async def _keep(self, facts: LoginFacts, key: asyncssh.SSHKey) -> None:
        """Add a new host's key to known_hosts. Raises UnknownHostKeyError, or what asyncssh says to a wrong key."""
        end = facts.endpoint
        if not end.user_known_hosts:
            raise not_kept(facts, "the SSH config sets UserKnownHostsFile none")
        new = NewKey(end.known_name, key, end.user_known_hosts[0], end.known_hosts)
        says = await asyncio.to_thread(_ssh_says, end)
        if says.get("revokedhostkeys", "none") != "none":
            raise not_kept(facts, "the SSH config sets RevokedHostKeys, which gpulayer does not read")
        try:
            line = await asyncio.to_thread(add_key, new, hashed=says.get("hashknownhosts") == "yes")
        except NotKeptError as exc:
            raise not_kept(facts, f"{tilde(new.file)}: {exc}") from None
        except NotNewError as exc:
            facts.trusted, facts.offered = exc.keys, None if exc.revoked else key
            raise asyncssh.HostKeyNotVerifiable(f"{exc} for host {end.host}") from None
        if line:
            with self._lock:
                for paths, known in self._known.items():
                    if new.file in paths:
                        known.load(line)
            self.tell(
                f"added the host key of {facts.place} to {tilde(new.file)}:"
                f" {key.get_algorithm()} {key.get_fingerprint()}"
            )

    async def _attempt(
        self, facts: LoginFacts, tunnel: asyncssh.SSHClientConnection | None
    ) -> asyncssh.SSHClientConnection:
        end = facts.endpoint
        config = end.options.config
        known = self._known[end.known_hosts]
        exactly = find(known, end.known_name)
        facts.is_new = facts.accept_new and exactly.nothing and not find(known, end.known_name_anywhere).authorities
        # A certificate would say nothing of a new host: nobody knows who signs for it. Its plain key is what is kept.
        key_types = HOST_KEY_TYPES if facts.is_new else f"+{HOST_KEY_TYPES}"
        login = _Login(facts, self)

        def trusted(host: str, _address: str, port: int | None) -> Sequence[object]:
            # By name only, as OpenSSH does: a key that is known for the address alone vouches for no name.
            match = known.match(host if end.host_key_alias else host.lower(), "", port)
            facts.trusted = list(dict.fromkeys((*match[0], *exactly.keys)))
            facts.authorities = list(dict.fromkeys((*match[1], *exactly.authorities)))
            return (facts.trusted, facts.authorities, [*match[2], *exactly.revoked])

        return await asyncssh.connect(
            end.target.host,
            end.target.port if end.target.port is not None else (),
            options=end.options,
            # The parsed config is in `options`; only a canonical name makes asyncssh start from the file again.
            config=[end.config] if end.config and end.options.canonicalize_hostname else None,
            final=False,
            tunnel=tunnel,
            client_factory=lambda: login,
            known_hosts=trusted,
            encryption_algs=() if config.get("Ciphers") else FAST_CIPHERS,
            server_host_key_algs=() if config.get("HostKeyAlgorithms") else key_types,
            preferred_auth=() if config.get("PreferredAuthentications") else AUTH_METHODS,
        )

    def opened(self, conn: asyncssh.SSHClientConnection) -> None:
        """A connection is made, logged in or not yet: close() knows of it."""
        self._open.add(conn)

    def closed(self, conn: asyncssh.SSHClientConnection) -> None:
        """A connection has ended."""
        self._open.discard(conn)

    async def keys_for(self, identity: Identity) -> KeyRing:
        """The keys to offer; files and agent are asked once a run."""
        if identity not in self._rings:
            self._rings[identity] = asyncio.create_task(self._load_ring(identity))
        return await asyncio.shield(self._rings[identity])

    async def _load_ring(self, identity: Identity) -> KeyRing:
        pairs: Sequence[asyncssh.SSHKeyPair] = ()
        if identity.agent:
            agent = asyncssh.SSHAgentClient(identity.agent)
            self._agents.append(agent)
            try:
                pairs = await agent.get_keys()
            except ValueError:  # no agent there: the same as an empty one
                pairs = ()
        return await asyncio.to_thread(build_ring, identity, pairs)


class _Login(asyncssh.SSHClient):
    """Watches one login, notes the facts that explain a failure, and hands out the keys one by one."""

    def __init__(self, facts: LoginFacts, connector: SshConnector) -> None:
        self._facts = facts
        self._connector = connector
        self._conn: asyncssh.SSHClientConnection | None = None
        self._left: list[LoginKey] | None = None

    def connection_made(self, conn: asyncssh.SSHClientConnection) -> None:
        self._conn = conn
        self._facts.connected = True
        self._connector.opened(conn)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._conn is not None:
            self._facts.greeted = self._conn.get_extra_info("server_version") is not None
            self._connector.closed(self._conn)

    def validate_host_public_key(self, host: str, addr: str, port: int, key: asyncssh.SSHKey) -> bool:
        if self._facts.is_new:
            self._facts.accepted = key
            return True
        self._facts.offered = key
        return False

    def validate_host_ca_key(self, host: str, addr: str, port: int, key: asyncssh.SSHKey) -> bool:
        self._facts.offered_ca = key
        return False

    async def public_key_auth_requested(self) -> asyncssh.SSHKeyPair | None:
        self._note_methods()
        if self._left is None:
            self._facts.ring = await self._connector.keys_for(self._facts.endpoint.identity)
            self._left = list(self._facts.ring.keys)
        if not self._left:
            return None
        key = self._left.pop(0)
        if key.label not in self._facts.tried:
            self._facts.tried.append(key.label)
        return copy.copy(key.pair)  # asyncssh notes in it what this server accepts

    def password_auth_requested(self) -> None:
        self._note_methods()

    def kbdint_auth_requested(self) -> None:
        self._note_methods()

    def _note_methods(self) -> None:
        if self._conn is not None and not self._facts.methods:
            self._facts.methods = tuple(self._conn.get_server_auth_methods())


def _ssh_says(end: Endpoint) -> dict[str, str]:
    """What `ssh` reads in its configuration for this target. Blocks."""
    target = end.target
    user = ("-l", target.user) if target.user else ()
    port = ("-p", str(target.port)) if target.port else ()
    return ssh_says(end.config, is_default=end.config == default_config(), options=[*user, *port], host=target.host)


def _succeeded(task: asyncio.Task[asyncssh.SSHClientConnection]) -> bool:
    """Whether it is done and has a result. Asking also tells asyncio that its exception was seen."""
    return task.done() and not task.cancelled() and task.exception() is None


def _may_retry(exc: BaseException, facts: LoginFacts) -> bool:
    """Only a drop before the login (MaxStartups): a refusal, a timeout or a failed login would be the same again."""
    return isinstance(exc, DROPS) and not facts.auth_began and facts.endpoint.options.proxy_command is None
