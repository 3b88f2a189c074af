"""The hosts map: hosts.toml -> HostMap. Owns the file format, its ranges and where the file is looked for.

values.py has the rules for single values, problems.py the words for what breaks them. ranges.py expands and folds.
"""

import ipaddress
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    WithJsonSchema,
    field_validator,
    model_validator,
)

from gpulayer import toml_files, values
from gpulayer.errors import HostsFileError, PoolError
from gpulayer.problems import Problem, explain, fail, place, table
from gpulayer.ranges import MAX_NAMES, expand, expand_ranges, fold, has_range, without_ranges
from gpulayer.toml_files import FileKind, parse_toml
from gpulayer.values import ValueRefusedError

__all__ = [
    "HostMap",
    "HostsFile",
    "Node",
    "NodeKeys",
    "expand",
    "find_hosts_file",
    "fold",
    "gpus_meet",
    "load_hosts",
    "read_text",
]

T = TypeVar("T")

RANGED_KEYS = ("ssh", "address", "python", "workdir", "scratch")
"""The keys whose ranges count along with the range of the node id."""

HOSTS_MAP = FileKind(
    name="hosts map",
    option="--hosts FILE",
    error=HostsFileError,
    header_hint='write an id with brackets or other signs in quotes: [nodes."gpu-[02-16]"]',
)

_STRICT = ConfigDict(frozen=True, extra="forbid", strict=True)

# What the rules of values.py say of numbers, for editors: gpulayer/schemas.
_PORT = WithJsonSchema({"type": "integer", "minimum": 1, "maximum": 65535})
_COUNT = WithJsonSchema({"type": "integer", "minimum": 1})
_DEVICES = WithJsonSchema(
    {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1, "uniqueItems": True}
)


def _rule(check: Callable[[T], None]) -> AfterValidator:
    """Make a rule of values.py a validator. A text with a range meets it when the range is expanded, not before."""

    def validate(value: T) -> T:
        if not (isinstance(value, str) and has_range(value)):
            check(value)
        return value

    return AfterValidator(validate)


class NodeKeys(BaseModel):
    """The keys that `[defaults]` and every `[nodes.ID]` may have. docs/generate_reference.py reads the docstrings."""

    model_config = _STRICT

    ssh: Annotated[str, _rule(values.check_ssh)] = ""
    """The SSH host name, IP address or `~/.ssh/config` alias to log in to, without user and port.
    Left out: the node id."""
    port: Annotated[int, _rule(values.check_port), _PORT] | None = None
    """The port of the node's SSH server. Left out: what `~/.ssh/config` says, else 22."""
    user: Annotated[str, _rule(values.check_user)] | None = None
    """The login name. Left out: what `~/.ssh/config` says, else the login name on the login node."""
    address: Annotated[str, _rule(values.check_address)] | None = None
    """How the other nodes reach this one: an IP address, or a name that the login node can look up. It becomes
    `MASTER_ADDR` on the first node, and decides the network interface. Left out: what `ssh` resolves to."""
    python: Annotated[str, _rule(values.check_python)] = "python3"
    """The Python that runs on the node, with PyTorch in it: a full path, or a name on the `PATH`."""
    workdir: Annotated[str, _rule(values.check_workdir)] | None = None
    """The folder on the node in which the job starts, as a full path. Placeholders such as `$NODE_ID` are replaced.
    Left out: the folder that gpulayer was started in. Jobs with a bundle start in that instead."""
    gpus: Annotated[int, _COUNT] | Annotated[tuple[int, ...], _DEVICES] | None = None
    """How many processes the node runs: a count of GPUs, or a list of device indices such as `[0, 1, 2, 3]`. A list
    also sets `CUDA_VISIBLE_DEVICES`. Left out: `--nproc-per-node` must say it."""
    interface: Annotated[str, _rule(values.check_interface)] | None = None
    """The network interface for gloo and NCCL, such as `ib0`. Left out: the one that holds the node's address."""
    scratch: Annotated[str, _rule(values.check_scratch)] = "/tmp"  # noqa: S108 - the job's folder in it is private
    """The folder on the node in which a job's own folder is made while the job runs, as a full path."""
    env: Mapping[Annotated[str, _rule(values.check_env_name)], Annotated[str, _rule(values.check_env_value)]] = Field(
        default_factory=dict
    )
    """Environment variables for every process, as strings. A node's variables are added to those of `[defaults.env]`;
    where both name one, the node's wins. Placeholders such as `$NODE_RANK` are replaced."""

    @field_validator("gpus", mode="before")
    @classmethod
    def _gpus_are_devices(cls, value: object) -> object:
        if value is not None:
            values.check_gpus(value)
        return tuple(value) if isinstance(value, list) else value


class HostsFile(BaseModel):
    """The tables and keys at the top of the file."""

    model_config = _STRICT

    practice: bool = False
    """Declares a practice cluster on one machine: every address is a loopback address, and that is meant. Only such
    a map may use loopback addresses for jobs of several nodes."""
    defaults: NodeKeys = NodeKeys()
    """Any keys of a node, for all nodes. A node's own key wins."""
    nodes: dict[str, NodeKeys] = Field(default_factory=dict)
    """One table for each node, `[nodes.gpu-01]`, or for each range of nodes, `[nodes."gpu-[02-16]"]`. The order of the
    file is the order of drawing, so of node ranks."""


class Node(NodeKeys):
    """One node of the map: defaults merged, ranges expanded, `ssh` filled in."""

    id: str
    """The node id: the key of its table."""

    @model_validator(mode="before")
    @classmethod
    def _ssh_is_the_id(cls, data: dict[str, object]) -> dict[str, object]:
        return data if data.get("ssh") else {**data, "ssh": data.get("id", "")}

    @property
    def devices(self) -> tuple[int, ...] | None:
        """The device indices that the map lists, None where the node is all of a machine."""
        return self.gpus if isinstance(self.gpus, tuple) else None

    @property
    def gpu_count(self) -> int | None:
        """How many GPUs the map says the node has, or None where it does not say."""
        return len(self.gpus) if isinstance(self.gpus, tuple) else self.gpus


@dataclass(frozen=True, slots=True)
class HostMap:
    """The nodes that there are, in their order, ranges expanded in place. `source` says where they were read."""

    source: str
    nodes: tuple[Node, ...]
    practice: bool = False

    def node(self, node_id: str) -> Node:
        """Return the node with this id. Raises PoolError where there is none."""
        for node in self.nodes:
            if node.id == node_id:
                return node
        raise PoolError(
            f"{node_id} is not in {self.source}", hint=f"the nodes there are {fold(node.id for node in self.nodes)}"
        )


def find_hosts_file(explicit: str | Path | None, environ: Mapping[str, str], cwd: Path) -> Path:
    """Return the hosts map to use: `explicit` (--hosts), $GPULAYER_HOSTS, ./hosts.toml, ~/.config/gpulayer/hosts.toml.

    A file that was named is returned as it is; load_hosts says what is wrong with it. Raises HostsFileError where none
    was named and none is found.
    """
    if named := explicit or environ.get("GPULAYER_HOSTS"):
        return cwd / named
    places = [cwd / "hosts.toml"]
    if home := environ.get("HOME"):
        places.append(Path(home) / ".config" / "gpulayer" / "hosts.toml")
    for candidate in places:
        if candidate.exists() or candidate.is_symlink():  # a broken link is told, not passed over
            return candidate
    raise HostsFileError(
        "no hosts map: there is no " + " and no ".join(map(str, places)),
        hint="write one (see hosts.example.toml), or name one with `--hosts FILE` or $GPULAYER_HOSTS",
    )


def load_hosts(path: Path, text: str | None = None) -> HostMap:
    """Read and check a hosts map, `text` or what the file holds.

    Raises HostsFileError naming the file and every key to mend that it found.
    """
    document = parse_toml(path, read_text(path) if text is None else text, HOSTS_MAP)
    try:
        file = HostsFile.model_validate(document)
    except ValidationError as error:
        fail(path, _explain(error))
    problems: list[Problem] = []
    owners: list[tuple[str, Node]] = []
    for key, entry in file.nodes.items():
        if len(owners) > MAX_NAMES:
            problems.append(Problem("the map", f"names more than {MAX_NAMES} nodes"))
            break
        try:
            owners += [(key, node) for node in _expand_entry(key, entry, file.defaults, problems)]
        except ValueRefusedError as error:
            problems.append(Problem(table("nodes", key), str(error), error.hint))
    problems = problems or [*_duplicates(owners), *_shared_machines(owners), *_practice(file, owners)]
    if not file.nodes:
        problems.append(Problem("the map", "names no nodes", "write a table for each node, such as [nodes.gpu-01]"))
    if problems:
        fail(path, problems)
    return HostMap(str(path), tuple(node for _, node in owners), file.practice)


def read_text(path: Path) -> str:
    """Return what a file of hosts holds. Raises HostsFileError."""
    return toml_files.read_text(path, HOSTS_MAP)


def _explain(error: ValidationError, *, owner: Callable[[str], tuple[str, ...]] = lambda _: ()) -> list[Problem]:
    """Translate pydantic's errors. `owner` says in which table a node's key was written."""
    known = (tuple(HostsFile.model_fields), tuple(NodeKeys.model_fields))
    details = error.errors(include_url=False)
    return [explain({**item, "loc": (*owner(str(item["loc"][0])), *item["loc"])}, known) for item in details]


def _expand_entry(key: str, entry: NodeKeys, defaults: NodeKeys, problems: list[Problem]) -> list[Node]:
    """Make the nodes of one table. Adds to `problems`; raises ValueRefusedError when the table's own name is wrong."""
    values.check_node_id(without_ranges(key))
    ids = expand_ranges(key)
    own = entry.model_fields_set

    def owner(name: str) -> tuple[str, ...]:
        return ("nodes", key) if name in own or name not in defaults.model_fields_set else ("defaults",)

    keys = defaults.model_dump(exclude_unset=True) | entry.model_dump(exclude_unset=True)
    keys["env"] = {**defaults.env, **entry.env}
    columns: dict[str, list[str]] = {}
    for name in RANGED_KEYS:
        if name in keys and has_range(keys[name]):
            try:
                columns[name] = _count_along(keys[name], len(ids))
            except ValueRefusedError as error:
                problems.append(Problem(place((*owner(name), name), keys[name]), str(error), error.hint))
    nodes = []
    for index, node_id in enumerate(ids):
        row = {name: column[index] for name, column in columns.items()}
        try:
            nodes.append(Node.model_validate({**keys, **row, "id": node_id}))
        except ValidationError as error:
            problems += _explain(error, owner=owner)
    return nodes


def _count_along(value: str, count: int) -> list[str]:
    texts = expand_ranges(value)
    if len(texts) != count:
        many = "1 value" if len(texts) == 1 else f"{len(texts)} values"
        raise ValueRefusedError(
            f"has {many} for {count} node{'s' if count > 1 else ''}", "give its range as many numbers as the id's has"
        )
    return texts


def _duplicates(owners: Sequence[tuple[str, Node]]) -> list[Problem]:
    first: dict[str, str] = {}
    twice: dict[tuple[str, str], list[str]] = defaultdict(list)
    for key, node in owners:
        if node.id in first:
            twice[first[node.id], key].append(node.id)
        first.setdefault(node.id, key)
    return [
        Problem(
            table("nodes", key),
            f"names {fold(ids)} " + ("twice" if key == other else f"too, and so does {table('nodes', other)}"),
            "name each node once",
        )
        for (other, key), ids in twice.items()
    ]


def _shared_machines(owners: Sequence[tuple[str, Node]]) -> list[Problem]:
    """Find nodes at one place and port, by SSH name or by address, unless their lists of GPUs tell them apart."""
    problems = []
    seen: dict[tuple[str, int], list[Node]] = defaultdict(list)
    for key, node in owners:
        for name in dict.fromkeys((node.ssh, node.address or node.ssh)):
            neighbours = seen[str(_address(name) or name.lower().rstrip(".")), node.port or 22]
            for other in neighbours:
                if other.id != node.id and gpus_meet(node.devices, other.devices):
                    text = f"is at {name}, port {node.port or 22}, where {other.id} is too"
                    where = f"{table('nodes', key)} {node.id}" if key != node.id else table("nodes", key)
                    problems.append(
                        Problem(where, text, "mend `ssh` or `address`, or give each its own `port` or `gpus` list")
                    )
                    break
            neighbours.append(node)
    return problems


def _address(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(name)
    except ValueError:
        return None


def _practice(file: HostsFile, owners: Sequence[tuple[str, Node]]) -> list[Problem]:
    """Hold the map to its word: where practice is declared, no real machine may be reached without its checks."""
    places = {node.id: node.address or node.ssh for _, node in owners}
    loopback = {name for name in places.values() if (ip := _address(name)) and ip.is_loopback} | {"localhost"}
    real = [node_id for node_id, name in places.items() if name not in loopback]
    if not file.practice or not real:
        return []
    text = f"is for loopback addresses, which {fold(real)} does not have"
    return [Problem("practice = true", text, "leave `practice` out; it is for a cluster on one machine")]


def gpus_meet(one: Iterable[int] | None, other: Iterable[int] | None) -> bool:
    """Tell whether two parts of one machine, by their device indices, share any. None: all of it."""
    return one is None or other is None or not set(one).isdisjoint(other)
