"""The rules for single values of the hosts map and the job file: what each may look like, and what to write instead.

Standard library only, so that options which override a key of the map can be held to the same rule.
Every `check_` function returns nothing when the value is good and raises ValueRefusedError when it is not.
"""

from __future__ import annotations

import ipaddress
import math
import re

NODE_ID = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")
_HOST_NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9._-]*[A-Za-z0-9_])?\.?")
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")
_RANGE_HINT = "write a range such as `[01-16]` or `[1,3-5]`, and an IPv6 address without brackets"
SIZE = re.compile(r"^\s*([0-9]+(?:\.[0-9]+)?)\s*([kKMGT]i?B|B)\s*$")
_UNITS = {"B": 1, "kB": 10**3, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"kiB": 1 << 10, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_MAX_INTERFACE = 15  # Linux: IFNAMSIZ is 16 with the final NUL


class ValueRefusedError(ValueError):
    """A value that cannot be used. `str(error)` says what is wrong with it, `hint` what to write instead."""

    def __init__(self, text: str, hint: str | None = None) -> None:
        super().__init__(text)
        self.hint = hint


def _check_text(value: str, *, spaces: bool = False) -> None:
    """Refuse what no value may be: empty, with control characters, or (unless `spaces`) with white space."""
    if not value:
        raise ValueRefusedError("is empty", "leave the key out to get its default")
    if _CONTROL.search(value):
        raise ValueRefusedError("holds a control character")
    if not spaces and any(char.isspace() for char in value):
        raise ValueRefusedError("holds white space")


def is_ipv6(value: str) -> bool:
    """True for a literal IPv6 address, with or without a zone."""
    try:
        return ipaddress.ip_address(value).version == 6
    except ValueError:
        return False


def _check_host(value: str, *, port_hint: str) -> None:
    """Refuse the usual decorations of a host name: URL, user, brackets, port."""
    _check_text(value)
    if "://" in value:
        raise ValueRefusedError("is a URL", "write the name alone, without `ssh://`")
    if "@" in value:
        user, _, host = value.rpartition("@")
        raise ValueRefusedError("holds a user name", f'write "{host}" here, and `user = "{user}"`')
    if "[" in value or "]" in value:
        raise ValueRefusedError("holds brackets that are no range", _RANGE_HINT)
    if ":" in value and not is_ipv6(value):
        raise ValueRefusedError("holds a port, or is no IPv6 address", port_hint)


def check_node_id(value: str) -> None:
    """A node id names folders and tags, so it has few characters."""
    if value.startswith("@"):
        raise ValueRefusedError("is a node group, and groups are not read", "write the node ids themselves")
    if "[" in value or "]" in value:
        raise ValueRefusedError("holds brackets that are no range", "write a range such as `gpu-[01-16]`")
    if not NODE_ID.fullmatch(value):
        raise ValueRefusedError(
            "is no node id: letters, digits, `.`, `_` and `-` only, and no `.` or `-` in front",
            "name the node with an id such as `gpu-01`, and write any other name as its `ssh`",
        )


def check_ssh(value: str) -> None:
    """An SSH host name, address or ~/.ssh/config alias, with neither user nor port."""
    _check_host(value, port_hint="write the name alone, and the port as `port`")
    if value.startswith("-"):
        raise ValueRefusedError("begins with `-`, so ssh would take it for an option")


def check_address(value: str) -> None:
    """A literal IP address, or a host name that the login node can look up."""
    if "%" in value and is_ipv6(value):
        raise ValueRefusedError(
            "has a zone (`%...`), which means something on one machine only", "write a routed address"
        )
    _check_host(value, port_hint="write the address alone; the rendezvous port is `--master-port`")
    if "/" in value:
        raise ValueRefusedError("is a network, not an address", f'write "{value.partition("/")[0]}"')
    try:
        ipaddress.ip_address(value)
    except ValueError:
        if re.fullmatch(r"[0-9.]+", value):  # the C library would read `10.1` as 10.0.0.1
            raise ValueRefusedError("is no IPv4 address", "write four numbers from 0 to 255") from None
        if not _HOST_NAME.fullmatch(value):
            raise ValueRefusedError("is neither an IP address nor a host name") from None


def check_port(value: int) -> None:
    """A TCP port."""
    if not 1 <= value <= 65535:
        raise ValueRefusedError("is no port", "write a number from 1 to 65535")


def check_user(value: str) -> None:
    """A login name."""
    _check_text(value)
    if value.startswith("-"):
        raise ValueRefusedError("begins with `-`, so ssh would take it for an option")


def check_python(value: str) -> None:
    """A Python that can stand between single quotes in a command that any login shell reads."""
    _check_text(value, spaces=True)
    if value.startswith("-"):
        raise ValueRefusedError("begins with `-`")
    if value.startswith("~") or "$" in value:
        raise ValueRefusedError("holds `~` or `$`, which nothing expands here", "write the full path")
    if "/" in value and not value.startswith("/"):  # it would mean one file at login and another in the workdir
        raise ValueRefusedError("is neither a full path nor a name without `/`", "write the full path")
    bad = [char for char in "'\\!" if char in value]
    if bad:
        raise ValueRefusedError(
            f"holds {bad[0]}, which login shells disagree about", "use a link to it with a plain path"
        )


def check_workdir(value: str) -> None:
    """An absolute folder; placeholders such as $NODE_ID are dealt with when the plan is made."""
    _check_text(value, spaces=True)
    if not value.startswith("/"):
        raise ValueRefusedError("is not a full path", "write a path that begins with `/`")


def check_scratch(value: str) -> None:
    """An absolute folder without placeholders."""
    check_workdir(value)
    if "$" in value:
        raise ValueRefusedError("holds `$`, which nothing expands here", "write the full path")


def check_interface(value: str) -> None:
    """The name of one network interface, without the prefixes and lists that NCCL knows."""
    _check_text(value)
    if any(char in value for char in ",=^"):
        raise ValueRefusedError("is a list or a pattern", 'write the name of one interface, such as "ib0"')
    if len(value) > _MAX_INTERFACE or "/" in value or value in {".", ".."}:
        raise ValueRefusedError("is no interface name", "`ip -brief address` on the node lists them")


def check_gpus(value: object) -> None:
    """A count of GPUs, at least 1, or a list of different device indices."""
    items = value if isinstance(value, list | tuple) else [value]
    devices = [item for item in items if type(item) is int]  # bool is an int, and no count
    if len(devices) < len(items):
        raise ValueRefusedError(
            "is neither a whole number nor a list of whole numbers", "write `gpus = 8` or `gpus = [0, 1, 2, 3]`"
        )
    if items is not value:
        if devices[0] < 1:
            raise ValueRefusedError("is not 1 or more", "leave the key out for a node without GPUs")
    elif not devices:
        raise ValueRefusedError("lists no device", "list at least one device, or leave the key out")
    elif min(devices) < 0:
        raise ValueRefusedError("holds a negative device index", "write the indices that `nvidia-smi -L` shows")
    elif len(set(devices)) < len(devices):
        raise ValueRefusedError("names a device twice", "name each device once")


def check_env_name(value: str) -> None:
    """A name that an environment variable can have."""
    if not value:
        raise ValueRefusedError("is no variable name: it is empty")
    if "=" in value or _CONTROL.search(value):
        raise ValueRefusedError("is no variable name: it holds `=` or a control character")


def check_env_value(value: str) -> None:
    """A value that an environment variable can have: anything but NUL."""
    if "\0" in value:
        raise ValueRefusedError("holds a NUL character, which no environment variable can")


def check_count(value: int) -> None:
    """A number of things of which there is at least one."""
    if value < 1:
        raise ValueRefusedError("is not 1 or more")


def check_seconds(value: float) -> None:
    """A time that something may take."""
    if not (math.isfinite(value) and value > 0):
        raise ValueRefusedError("is no number of seconds above 0")


def check_grace(value: float) -> None:
    """A time that may be none at all."""
    if not (math.isfinite(value) and value >= 0):
        raise ValueRefusedError("is no number of seconds from 0 up")


def check_word(value: str) -> None:
    """One word of a command: anything but NUL."""
    if "\0" in value:
        raise ValueRefusedError("holds a NUL character, which no argument can")


def check_script(value: str) -> None:
    """What stands first in a command, where an option would be taken for something else."""
    check_word(value)
    if not value:
        raise ValueRefusedError("is empty", "name the script that every rank runs")
    if value.startswith("-"):
        raise ValueRefusedError("begins with `-`", f'write "./{value}"')


def check_file_folder(value: str) -> None:
    """A folder, as a full path or from the folder of the file that names it."""
    _check_text(value, spaces=True)
    if value.startswith("~"):
        raise ValueRefusedError("begins with `~`, which nothing expands here", "write the full path")


def check_output(value: str) -> None:
    """A path or a pattern of what comes back at the end, from the working directory on."""
    _check_text(value, spaces=True)
    advice = "write it from the working directory on, or have the job write to $GPULAYER_OUTPUT_DIR"
    if value.startswith(("/", "~")):
        raise ValueRefusedError("is no path from the working directory on", advice)
    if ".." in value.split("/"):
        raise ValueRefusedError("leads out of the working directory", advice)


def bytes_text(size: float) -> str:
    """Return a size as people read it: `41.3 kB`."""
    for unit, name in ((10**9, "GB"), (10**6, "MB"), (10**3, "kB")):
        if size >= unit:
            return f"{size / unit:.{0 if size >= 100 * unit else 1}f} {name}"
    return f"{size:.0f} B"


def parse_size(value: object) -> int:
    """Return how many bytes a size stands for: a whole number of bytes, or a text such as `200MB` or `1.5 GiB`."""
    if type(value) is int:
        size = value
    else:
        match = SIZE.fullmatch(value) if isinstance(value, str) else None
        if match is None:
            raise ValueRefusedError("is no size", 'write a number of bytes, or a text such as "200MB" or "1.5GiB"')
        size = int(float(match[1]) * _UNITS[match[2]])
    if size < 1:
        raise ValueRefusedError("is no size of 1 byte or more")
    return size


def size_text(size: int) -> str:
    """Return a size as people write it: `2GB`."""
    units = [(name, unit) for name, unit in _UNITS.items() if size % unit == 0 and len(name) == 2 and name != "KB"]
    name, unit = max(units, key=lambda one: one[1], default=("B", 1))
    return f"{size // unit}{name}"
