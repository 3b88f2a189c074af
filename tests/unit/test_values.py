"""The rule for each value of the hosts map: what passes, and what is said about the rest."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from gpulayer import values
from gpulayer.values import ValueRefusedError

if TYPE_CHECKING:
    from collections.abc import Callable

GOOD: list[tuple[Callable[[Any], None], list[object]]] = [
    (values.check_node_id, ["gpu-01", "a", "1", "_x", "gpu-01.cluster"]),
    (values.check_ssh, ["gpu-01", "10.0.0.1", "fd00::1", "fe80::1%eth0", "alias+1", "häst"]),
    (values.check_address, ["10.0.0.1", "fd00::1", "127.0.0.1", "gpu-01.cluster", "a_b", "1a", "x."]),
    (values.check_port, [1, 22, 65535]),
    (values.check_user, ["me", "DOMAIN\\me", "me@domain"]),
    (values.check_python, ["python3", "/opt/my torch/bin/python", '/opt/t"x/python', "/opt/é/python"]),
    (values.check_workdir, ["/", "/shared/$NODE_ID", "/a b", "/it's"]),
    (values.check_scratch, ["/tmp", "/a b"]),
    (values.check_interface, ["ib0", "enp1s0f0np0", "bond0.100"]),
    (values.check_gpus, [1, 8, [0], [3, 1], (0, 1)]),
    (values.check_env_name, ["A", "a.b", "1", "a b"]),
    (values.check_env_value, ["", "a\nb", "=", "é"]),
]


@pytest.mark.parametrize(("check", "value"), [(check, value) for check, many in GOOD for value in many])
def test_what_passes(check: Callable[[Any], None], value: object) -> None:
    """A good value is let through."""
    check(value)


FULL_PATH = "write the full path"
BAD: list[tuple[Callable[[Any], None], object, str, str | None]] = [
    (values.check_ssh, "", "is empty", "leave the key out to get its default"),
    (values.check_ssh, "a\nb", "holds a control character", None),
    (values.check_ssh, "a b", "holds white space", None),
    (values.check_ssh, "me@gpu-01", "holds a user name", 'write "gpu-01" here, and `user = "me"`'),
    (values.check_ssh, "ssh://gpu-01", "is a URL", "write the name alone, without `ssh://`"),
    (values.check_ssh, "-oProxyCommand=x", "begins with `-`, so ssh would take it for an option", None),
    (
        values.check_ssh,
        "gpu-01:22",
        "holds a port, or is no IPv6 address",
        "write the name alone, and the port as `port`",
    ),
    (
        values.check_ssh,
        "[fd00::1]",
        "holds brackets that are no range",
        "write a range such as `[01-16]` or `[1,3-5]`, and an IPv6 address without brackets",
    ),
    (values.check_address, "", "is empty", "leave the key out to get its default"),
    (
        values.check_address,
        "10.0.0.1:29500",
        "holds a port, or is no IPv6 address",
        "write the address alone; the rendezvous port is `--master-port`",
    ),
    (
        values.check_address,
        "fe80::1%eth0",
        "has a zone (`%...`), which means something on one machine only",
        "write a routed address",
    ),
    (values.check_address, "10.0.0.1/24", "is a network, not an address", 'write "10.0.0.1"'),
    (values.check_address, "10.0.0.256", "is no IPv4 address", "write four numbers from 0 to 255"),
    (values.check_address, "10.1", "is no IPv4 address", "write four numbers from 0 to 255"),
    (values.check_address, "010.0.0.1", "is no IPv4 address", "write four numbers from 0 to 255"),
    (values.check_address, "$HEAD_ADDR", "is neither an IP address nor a host name", None),
    (values.check_address, "-x", "is neither an IP address nor a host name", None),
    (values.check_port, 0, "is no port", "write a number from 1 to 65535"),
    (values.check_port, 65536, "is no port", "write a number from 1 to 65535"),
    (values.check_user, "", "is empty", "leave the key out to get its default"),
    (values.check_user, "a b", "holds white space", None),
    (values.check_user, "-l", "begins with `-`, so ssh would take it for an option", None),
    (values.check_python, "", "is empty", "leave the key out to get its default"),
    (values.check_python, "-c", "begins with `-`", None),
    (values.check_python, "~/venv/bin/python", "holds `~` or `$`, which nothing expands here", FULL_PATH),
    (values.check_python, "$HOME/python", "holds `~` or `$`, which nothing expands here", FULL_PATH),
    (values.check_python, "venv/bin/python", "is neither a full path nor a name without `/`", FULL_PATH),
    (
        values.check_python,
        "/it's/python",
        "holds ', which login shells disagree about",
        "use a link to it with a plain path",
    ),
    (values.check_python, "/a\\b", "holds \\, which login shells disagree about", "use a link to it with a plain path"),
    (values.check_python, "/a!b", "holds !, which login shells disagree about", "use a link to it with a plain path"),
    (values.check_python, "/a\nb", "holds a control character", None),
    (values.check_workdir, "", "is empty", "leave the key out to get its default"),
    (values.check_workdir, "project", "is not a full path", "write a path that begins with `/`"),
    (values.check_workdir, "~/project", "is not a full path", "write a path that begins with `/`"),
    (values.check_workdir, "/a\0b", "holds a control character", None),
    (values.check_scratch, "tmp", "is not a full path", "write a path that begins with `/`"),
    (values.check_scratch, "/tmp/$USER", "holds `$`, which nothing expands here", FULL_PATH),
    (values.check_interface, "ib0,ib1", "is a list or a pattern", 'write the name of one interface, such as "ib0"'),
    (values.check_interface, "^lo", "is a list or a pattern", 'write the name of one interface, such as "ib0"'),
    (values.check_interface, "=ib0", "is a list or a pattern", 'write the name of one interface, such as "ib0"'),
    (values.check_interface, "x" * 16, "is no interface name", "`ip -brief address` on the node lists them"),
    (values.check_gpus, 0, "is not 1 or more", "leave the key out for a node without GPUs"),
    (values.check_gpus, [], "lists no device", "list at least one device, or leave the key out"),
    (values.check_gpus, [0, -1], "holds a negative device index", "write the indices that `nvidia-smi -L` shows"),
    (values.check_gpus, [0, 1, 0], "names a device twice", "name each device once"),
    *(
        (
            values.check_gpus,
            value,
            "is neither a whole number nor a list of whole numbers",
            "write `gpus = 8` or `gpus = [0, 1, 2, 3]`",
        )
        for value in (True, "8", 8.0, ["0"], [True], {"a": 1})
    ),
    (values.check_env_name, "", "is no variable name: it is empty", None),
    (values.check_env_name, "A=B", "is no variable name: it holds `=` or a control character", None),
    (values.check_env_name, "A\0", "is no variable name: it holds `=` or a control character", None),
    (values.check_env_value, "a\0b", "holds a NUL character, which no environment variable can", None),
]


@pytest.mark.parametrize(("check", "value", "text", "hint"), BAD)
def test_what_is_refused(check: Callable[[Any], None], value: object, text: str, hint: str | None) -> None:
    """A bad value is refused with its fault and what to write instead."""
    with pytest.raises(ValueRefusedError) as caught:
        check(value)
    assert (str(caught.value), caught.value.hint) == (text, hint)


@pytest.mark.parametrize(
    ("size", "text"), [(0, "0 B"), (999, "999 B"), (41_300, "41.3 kB"), (200_000_001, "200 MB"), (2e9, "2.0 GB")]
)
def test_sizes_are_shown_as_people_read_them(size: float, text: str) -> None:
    """In powers of ten, as disks and links are sold."""
    assert values.bytes_text(size) == text
