"""What the user's SSH files say about a target: route, host keys to trust, keys to log in with. Connects nowhere.

Reads ~/.ssh/config (or another file) through asyncssh's parser, key files and the agent's key list, once a run;
known_hosts.py reads known_hosts. Where asyncssh is stricter than OpenSSH about files that do not concern the target (an
IdentityFile that does not exist), this module is as lenient as OpenSSH.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, cast

import asyncssh

from gpulayer.errors import SshConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from gpulayer.hosts import Node
    from gpulayer.plan import NodeCommand

# A key on a security token would ask for a touch, and DSA is gone from servers: neither is tried unasked.
DEFAULT_KEYS = ("~/.ssh/id_ed25519", "~/.ssh/id_ecdsa", "~/.ssh/id_rsa")
USER_KNOWN_HOSTS = ("~/.ssh/known_hosts", "~/.ssh/known_hosts2")
GLOBAL_KNOWN_HOSTS = ("/etc/ssh/ssh_known_hosts", "/etc/ssh/ssh_known_hosts2")
MAX_HOPS = 16


@dataclass(frozen=True, slots=True)
class SshTarget:
    """Where to log in. `host` is a name, an address or a ~/.ssh/config alias; None leaves the choice to the config."""

    host: str
    user: str | None = None
    port: int | None = None

    @classmethod
    def of(cls, node: Node | NodeCommand) -> SshTarget:
        """Return where to log in to a node of the map, or of a plan."""
        return cls(node.ssh, node.user, node.port)

    def __str__(self) -> str:
        user = f"{self.user}@" if self.user else ""
        host = f"[{self.host}]" if self.port and ":" in self.host else self.host
        return f"{user}{host}" + (f":{self.port}" if self.port else "")


@dataclass(frozen=True, slots=True)
class SshSettings:
    """How to connect. `config`: None is ~/.ssh/config if there is one, `none` is no file at all, as in `ssh -F`.

    `accept_new_host_keys`: the key of a host that known_hosts knows nothing of is added there, in place of an error.
    """

    config: Path | None = None
    connect_timeout_s: float = 10
    keepalive_s: float = 10
    accept_new_host_keys: bool = False


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A target as the config resolves it. `options` holds the parsed config for asyncssh to go on from."""

    target: SshTarget
    host: str
    port: int
    user: str
    jumps: tuple[SshTarget, ...]
    host_key_alias: str | None
    user_known_hosts: tuple[Path, ...]
    known_hosts: tuple[Path, ...]
    identity: Identity
    config: Path | None
    options: asyncssh.SSHClientConnectionOptions = field(compare=False, repr=False)

    @property
    def known_name(self) -> str:
        """The host as known_hosts spells it: with its port, unless that is 22 or there is an alias."""
        name = self.known_name_anywhere
        return name if self.port == 22 or self.host_key_alias else f"[{name}]:{self.port}"

    @property
    def known_name_anywhere(self) -> str:
        """The host as known_hosts spells it without a port."""
        return self.host_key_alias or self.host.lower()

    @property
    def ssh_command(self) -> tuple[str, ...]:
        """The OpenSSH command line that goes to the same place."""
        default = default_config()
        config = () if self.config == default else ("-F", str(self.config) if self.config else "none")
        port = ("-p", str(self.target.port)) if self.target.port else ()
        user = f"{self.target.user}@" if self.target.user else ""
        return ("ssh", *config, *port, f"{user}{self.target.host}")


@dataclass(frozen=True, slots=True)
class Identity:
    """Where login keys come from. `explicit`: IdentityFile names the files; `agent` is a socket path or None."""

    files: tuple[Path, ...]
    certificates: tuple[Path, ...]
    explicit: bool
    only: bool
    agent: str | None


@dataclass(frozen=True, slots=True)
class LoginKey:
    """A key to offer, and how to name it to the user."""

    pair: asyncssh.SSHKeyPair
    label: str


@dataclass(frozen=True, slots=True)
class KeyRing:
    """The keys to offer, in order, and the files whose keys need a passphrase that only an agent could spare."""

    keys: tuple[LoginKey, ...] = ()
    locked: tuple[str, ...] = ()


def default_config() -> Path | None:
    """~/.ssh/config under $HOME when there is one, as asyncssh looks for it."""
    path = Path("~/.ssh/config").expanduser()
    return path if path.exists() else None


def read_endpoint(target: SshTarget, settings: SshSettings) -> Endpoint:
    """Resolve a target through the config. Blocks (`Match exec` runs a command). Raises SshConfigError."""
    path = config_path(settings)
    try:
        options = asyncssh.SSHClientConnectionOptions(
            config=[path] if path else [],
            host=target.host,
            port=target.port if target.port is not None else (),
            username=target.user if target.user is not None else (),
            client_keys=None,
            known_hosts=b"",
            x509_trusted_certs=None,
            utf8_decode_errors="replace",
            compression_algs=None,
            gss_kex=False,
            agent_forwarding=False,
            x11_forwarding=False,
            connect_timeout=settings.connect_timeout_s,
            login_timeout=0,
            keepalive_interval=settings.keepalive_s,
            keepalive_count_max=2,
        )
        if options.config.has_match_final():  # a second pass adds to what the first one found
            options = asyncssh.SSHClientConnectionOptions(options, config=[path], host=options.host, final=True)
    except (OSError, ValueError, asyncssh.Error) as exc:
        raise _config_error(exc, path) from exc
    return _endpoint(target, path, options)


def _endpoint(target: SshTarget, path: Path | None, options: asyncssh.SSHClientConnectionOptions) -> Endpoint:
    tokens = {
        "%": "%",
        "d": str(Path.home()),
        "h": options.host,
        "k": options.host_key_alias or target.host,
        "n": target.host,
        "p": str(options.port),
        "r": options.username,
        "u": options.client_username,
        "i": str(os.getuid()),
    }
    user_files = _paths(_strings(options, "UserKnownHostsFile", USER_KNOWN_HOSTS), tokens)
    global_files = _paths(_strings(options, "GlobalKnownHostsFile", GLOBAL_KNOWN_HOSTS), tokens)
    named = options.config.get("IdentityFile")
    identity = Identity(
        files=_paths(_strings(options, "IdentityFile", DEFAULT_KEYS), {"%": "%"}),
        certificates=_paths(_strings(options, "CertificateFile", ()), {"%": "%"}),
        explicit=named is not None,
        only=bool(options.config.get("IdentitiesOnly")),
        agent=_agent_path(options.config.get("IdentityAgent", "SSH_AUTH_SOCK")),
    )
    jumps = options.config.get("ProxyJump")
    return Endpoint(
        target=target,
        host=options.host,
        port=options.port,
        user=options.username,
        jumps=parse_jumps(_expand(str(jumps), tokens)) if jumps else (),
        host_key_alias=options.host_key_alias,
        user_known_hosts=user_files,
        known_hosts=user_files + global_files,
        identity=identity,
        config=path,
        options=options,
    )


def config_path(settings: SshSettings) -> Path | None:
    """The config file to read, or None. Raises SshConfigError when a file that was asked for is not there."""
    if settings.config is None:
        return default_config()
    if str(settings.config) == "none":
        return None
    path = settings.config.expanduser()
    if not path.is_file():
        raise SshConfigError(f"the SSH config {path} does not exist", hint="name another file, or `none` for no file")
    return path


def parse_jumps(text: str) -> tuple[SshTarget, ...]:
    """ProxyJump's `[user@]host[:port],...` (each also as an ssh:// address) in order of travel."""
    return tuple(_parse_jump(hop.strip()) for hop in text.split(","))


def _parse_jump(text: str) -> SshTarget:
    user, _, place = text.removeprefix("ssh://").rstrip("/").rpartition("@")
    match = re.fullmatch(r"\[(?P<v6>[^\]]+)\](?::(?P<p6>\d+))?|(?P<host>[^:\s]+)(?::(?P<port>\d+))?", place)
    port = int((match["p6"] or match["port"] or 0) if match else 0)
    if match is None or port > 65535:
        raise SshConfigError(f"ProxyJump `{text}` is not a host", hint="write `[user@]host[:port]`")
    return SshTarget(match["v6"] or match["host"], user or None, port or None)


def build_ring(identity: Identity, agent_pairs: Sequence[asyncssh.SSHKeyPair]) -> KeyRing:
    """The keys to offer, each once. Blocks: reads key files. Nothing ever asks for a passphrase.

    Servers allow about six attempts, so keys that the config names go first, and an agent's copy of a key is used
    instead of its file.
    """
    wanted: set[bytes] = set()
    file_keys: list[LoginKey] = []
    locked: list[tuple[str, bytes | None]] = []
    held = {pair.key_public_data for pair in agent_pairs}
    for path in identity.files:
        pairs, public, is_locked = _read_key_file(path, identity.certificates)
        wanted.update(pair.key_public_data for pair in pairs)
        wanted.update({public} if public else ())
        file_keys += [LoginKey(pair, tilde(path)) for pair in pairs if pair.key_public_data not in held]
        if is_locked:
            locked.append((tilde(path), public))
    first = [_agent_key(pair) for pair in agent_pairs if pair.key_public_data in wanted]
    rest = [_agent_key(pair) for pair in agent_pairs if pair.key_public_data not in wanted and not identity.only]
    keys = [*first, *file_keys, *rest] if identity.explicit else [*first, *rest, *file_keys]
    return KeyRing(tuple(keys), tuple(label for label, public in locked if public not in held))


def _agent_key(pair: asyncssh.SSHKeyPair) -> LoginKey:
    comment = (pair.get_comment_bytes() or b"").decode("utf-8", "replace")
    return LoginKey(pair, f"{comment or pair.get_algorithm()} (agent)")


def _read_key_file(
    path: Path, certificates: Sequence[Path]
) -> tuple[Sequence[asyncssh.SSHKeyPair], bytes | None, bool]:
    """A file's key pairs, its public key if that is known, and whether a passphrase stands in the way."""
    certs = [str(cert) for cert in certificates if cert.is_file()]
    pairs: Sequence[asyncssh.SSHKeyPair] = ()
    locked = False
    try:
        pairs = asyncssh.load_keypairs(str(path), certlist=certs, ignore_encrypted=True)
        locked = not pairs
    except (OSError, ValueError):
        pass
    for candidate in (f"{path}.pub", str(path)):
        try:
            return pairs, asyncssh.read_public_key(candidate).public_data, locked
        except (OSError, ValueError):
            continue
    return pairs, None, locked


def tilde(path: Path) -> str:
    """A path as users write it."""
    home = Path.home()
    return f"~/{path.relative_to(home)}" if path.is_relative_to(home) else str(path)


def _strings(options: asyncssh.SSHClientConnectionOptions, key: str, default: Sequence[str]) -> Sequence[str]:
    return cast("Sequence[str]", options.config.get(key, default))


def _paths(texts: Sequence[str], tokens: Mapping[str, str]) -> tuple[Path, ...]:
    return tuple(dict.fromkeys(Path(_expand(text, tokens)).expanduser() for text in texts))


def _expand(text: str, tokens: Mapping[str, str]) -> str:
    """%-tokens and ${NAME}, for the keywords in which asyncssh leaves them alone."""

    def replace(match: re.Match[str]) -> str:
        source, key = (tokens, match[1]) if match[1] else (os.environ, match[2])
        if key not in source:
            raise SshConfigError(f"the SSH config uses {match[0]} in `{text}`, which has no value here")
        return source[key]

    return re.sub(r"%(.)|\$\{(\w+)\}", replace, text)


def _agent_path(value: object) -> str | None:
    """IdentityAgent: a path, `none`, SSH_AUTH_SOCK, or the $NAME of another variable."""
    if value is None:
        return None
    text = str(value)
    if text == "SSH_AUTH_SOCK":
        text = "$SSH_AUTH_SOCK"
    if text.startswith("$"):
        text = os.environ.get(text[1:], "")
    return str(Path(text).expanduser()) if text else None


def _config_error(exc: Exception, path: Path | None) -> SshConfigError:
    text = str(exc)
    where = "" if path is None or str(path) in text else f"{path}: "
    if isinstance(exc, UnicodeDecodeError):
        text = f"not UTF-8 text ({exc.reason} at byte {exc.start})"
    hint = "mend that line, or give another file (or `none`) with --ssh-config"
    if "ifaddr" in text:
        hint = f"`pip install ifaddr` makes it work; else {hint}"
    return SshConfigError(f"the SSH config cannot be used: {where}{text}", hint=hint)
