"""What is said about every way to get a hosts.toml wrong, word for word."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from gpulayer.errors import HostsFileError
from gpulayer.hosts import load_hosts

if TYPE_CHECKING:
    from pathlib import Path


def complaint(tmp_path: Path, text: str | bytes) -> tuple[str, str | None]:
    """Load a hosts.toml with this text; return the message, with the folder left out, and the hint."""
    path = tmp_path / "hosts.toml"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    with pytest.raises(HostsFileError) as caught:
        load_hosts(path)
    assert caught.value.exit_code == 2
    return str(caught.value).replace(f"{tmp_path}/", ""), caught.value.hint


def one(line: str) -> str:
    """Return a map of one node that has this line."""
    return f"[nodes.gpu-01]\n{line}\n"


OTHER_TYPES = [
    (
        one('port = "22"'),
        'hosts.toml: [nodes.gpu-01] port = "22" is not a whole number',
        "leave the quotes out: `port = 22`",
    ),
    (one('port = "ssh"'), 'hosts.toml: [nodes.gpu-01] port = "ssh" is not a whole number', None),
    (one("port = true"), "hosts.toml: [nodes.gpu-01] port = true is not a whole number", None),
    (one("port = 22.0"), "hosts.toml: [nodes.gpu-01] port = 22.0 is not a whole number", None),
    (one("user = 1000"), "hosts.toml: [nodes.gpu-01] user = 1000 is not a string", 'put it in quotes: `user = "1000"`'),
    (one("ssh = []"), "hosts.toml: [nodes.gpu-01] ssh = [] is not a string", None),
    (
        one("env.KEY = 5"),
        "hosts.toml: [nodes.gpu-01.env] KEY is not a string",
        'put it in quotes: `KEY = "..."`',
    ),
    (
        one("env = 5"),
        "hosts.toml: [nodes.gpu-01] env = 5 is not a table",
        "write [nodes.gpu-01.env], and its keys below it",
    ),
    ("defaults = 3", "hosts.toml: defaults = 3 is not a table", "write [defaults], and its keys below it"),
    ('nodes = ["a"]', 'hosts.toml: nodes = ["a"] is not a table', "write [nodes], and its keys below it"),
    (
        '[nodes]\ngpu-01 = "10.0.0.1"',
        'hosts.toml: [nodes] gpu-01 = "10.0.0.1" is not a table',
        "write [nodes.gpu-01], and the node's keys below it",
    ),
    (
        'practice = "yes"\n[nodes.a]',
        'hosts.toml: practice = "yes" is not true or false',
        "write `practice = true`, or leave it out",
    ),
]

KEYS_OF_A_NODE = (
    "the keys here are `ssh`, `port`, `user`, `address`, `python`, `workdir`, `gpus`, `interface`, `scratch`, `env`"
)
UNKNOWN_KEYS = [
    (one('adress = "x"'), "hosts.toml: [nodes.gpu-01] adress is an unknown key", "did you mean `address`?"),
    (one('hostname = "x"'), "hosts.toml: [nodes.gpu-01] hostname is an unknown key", "did you mean `ssh`?"),
    (one("slots = 8"), "hosts.toml: [nodes.gpu-01] slots is an unknown key", "did you mean `gpus`?"),
    (one("zebra = 8"), "hosts.toml: [nodes.gpu-01] zebra is an unknown key", KEYS_OF_A_NODE),
    ("[defaults]\nid = 1", "hosts.toml: [defaults] id is an unknown key", KEYS_OF_A_NODE),
    ("[node.gpu-01]", "hosts.toml: node is an unknown key", "did you mean `nodes`?"),
    ("zebra = 1", "hosts.toml: zebra is an unknown key", "the keys here are `practice`, `defaults`, `nodes`"),
    (
        "[nodes.gpu-01.cluster]\nport = 22",
        "hosts.toml: [nodes.gpu-01] cluster is an unknown key",
        'write an id that has dots in quotes: [nodes."gpu-01.cluster"]',
    ),
]

BROKEN_FILES = [
    ("", "hosts.toml: the map names no nodes", "write a table for each node, such as [nodes.gpu-01]"),
    ("[nodes]", "hosts.toml: the map names no nodes", "write a table for each node, such as [nodes.gpu-01]"),
    (
        one("port = 22\nport = 23"),
        "hosts.toml, line 3: `port` has a value already",
        "keep one of the two lines",
    ),
    (
        "[nodes.a]\nport = 22\nport = 23",  # at the end of the file, TOML names no line
        "hosts.toml, line 3: `port` has a value already",
        "keep one of the two lines",
    ),
    (
        '[nodes.a.env]\nTOKEN = "x"\n[nodes.b]\nenv = { TOKEN = "secret", TOKEN = "secret" }\n',
        "hosts.toml, line 4: `env` has a value already",
        "keep one of the two lines",
    ),
    (
        "[nodes.a]\n\n[nodes.b]\n[nodes.a]\n",
        "hosts.toml, line 4: `[nodes.a]` is there already",
        "keep one of the two tables, and all of its keys in it",
    ),
    (
        "[nodes.gpu-[02-16]]\n",
        "hosts.toml, line 1: `[nodes.gpu-[02-16]]` is no TOML: expected ']' at the end of a table declaration",
        'write an id with brackets or other signs in quotes: [nodes."gpu-[02-16]"]',
    ),
    (one("env.TOKEN = secret"), "hosts.toml, line 2: `env.TOKEN` is no TOML: invalid value", None),
    (
        one('env.TOKEN "secret"'),
        "hosts.toml, line 2: `env.TOKEN` is no TOML: expected '=' after a key in a key/value pair",
        None,
    ),
    (
        one('env.TOKEN = """\nsecret and\nmore = secret'),
        "hosts.toml, line 4: `...` is no TOML: unterminated string",
        None,
    ),
    (
        one("env.A = [\n['secret', 'secret'"),
        "hosts.toml, line 3: `[` is no TOML: unclosed array",
        'write an id with brackets or other signs in quotes: [nodes."gpu-[02-16]"]',
    ),
    (
        one('env = "TOKEN=secret"'),
        "hosts.toml: [nodes.gpu-01] env is not a table",
        "write [nodes.gpu-01.env], and its keys below it",
    ),
    (b"[nodes.a]\nuser = 'Ren\xe9'\n", "hosts.toml, line 2: byte 0xe9 is not UTF-8", "save the file as UTF-8"),
]


@pytest.mark.parametrize(("text", "message", "hint"), [*OTHER_TYPES, *UNKNOWN_KEYS, *BROKEN_FILES])
def test_what_a_broken_file_says(tmp_path: Path, text: str | bytes, message: str, hint: str | None) -> None:
    """A wrong type, an unknown key or text that is no TOML: file, place, fault and what to write instead."""
    assert complaint(tmp_path, text) == (message, hint)


@pytest.mark.parametrize(
    ("table", "message", "hint"),
    [
        (
            '[nodes."gpu 01"]',
            '[nodes."gpu 01"] is no node id: letters, digits, `.`, `_` and `-` only, and no `.` or `-` in front',
            "name the node with an id such as `gpu-01`, and write any other name as its `ssh`",
        ),
        (
            '[nodes."../x"]',
            '[nodes."../x"] is no node id: letters, digits, `.`, `_` and `-` only, and no `.` or `-` in front',
            "name the node with an id such as `gpu-01`, and write any other name as its `ssh`",
        ),
        (
            '[nodes."@all"]',
            '[nodes."@all"] is a node group, and groups are not read',
            "write the node ids themselves",
        ),
        (
            '[nodes."gpu-[a-b]"]',
            '[nodes."gpu-[a-b]"] holds brackets that are no range',
            "write a range such as `gpu-[01-16]`",
        ),
        (
            '[nodes."gpu-[01-3]"]',
            '[nodes."gpu-[01-3]"] holds the range `01-3`, whose ends do not fit each other',
            "write both ends with as many digits, and a step of 1 or more",
        ),
        (
            '[nodes."gpu-[01-16]"]\naddress = "10.0.0.[1-15]"',
            '[nodes."gpu-[01-16]"] address = "10.0.0.[1-15]" has 15 values for 16 nodes',
            "give its range as many numbers as the id's has",
        ),
        (
            '[nodes.a]\nssh = "gpu-[1-2]"',
            '[nodes.a] ssh = "gpu-[1-2]" has 2 values for 1 node',
            "give its range as many numbers as the id's has",
        ),
        (
            '[defaults]\nscratch = "/nvme[0-1]"\n[nodes.a]',
            '[defaults] scratch = "/nvme[0-1]" has 2 values for 1 node',
            "give its range as many numbers as the id's has",
        ),
        (
            '[nodes."a[1-2]"]\naddress = "10.0.0.[255-256]"',
            '[nodes."a[1-2]"] address = "10.0.0.256" is no IPv4 address',
            "write four numbers from 0 to 255",
        ),
        (
            '[nodes.gpu-03]\n[nodes."gpu-[02-16]"]',
            '[nodes."gpu-[02-16]"] names gpu-03 too, and so does [nodes.gpu-03]',
            "name each node once",
        ),
        ('[nodes."a[1-3,2-3]"]', '[nodes."a[1-3,2-3]"] names a[2-3] twice', "name each node once"),
        (
            '[nodes.a]\naddress = "10.0.0.1"\n[nodes.b]\naddress = "10.0.0.1"\nport = 22',
            "[nodes.b] is at 10.0.0.1, port 22, where a is too",
            "mend `ssh` or `address`, or give each its own `port` or `gpus` list",
        ),
        (
            '[nodes."a[1-2]"]\nssh = "Gate."\nport = 9',
            '[nodes."a[1-2]"] a2 is at Gate., port 9, where a1 is too',
            "mend `ssh` or `address`, or give each its own `port` or `gpus` list",
        ),
        (
            '[nodes.a]\nssh = "fd00::0:1"\ngpus = [0, 1]\n[nodes.b]\naddress = "fd00::1"\ngpus = [1, 2]',
            "[nodes.b] is at fd00::1, port 22, where a is too",
            "mend `ssh` or `address`, or give each its own `port` or `gpus` list",
        ),
        (
            'practice = true\n[nodes."a[1-2]"]\n[nodes.b]\naddress = "127.0.0.1"',
            "practice = true is for loopback addresses, which a[1-2] does not have",
            "leave `practice` out; it is for a cluster on one machine",
        ),
    ],
)
def test_what_a_wrong_table_says(tmp_path: Path, table: str, message: str, hint: str) -> None:
    """A wrong id, range, double or practice map: file, table, fault and what to write instead."""
    assert complaint(tmp_path, table) == (f"hosts.toml: {message}", hint)


def test_all_mistakes_are_told_at_once(tmp_path: Path) -> None:
    """Several mistakes come as a list, each once, though a default has it for every node."""
    text = '[defaults]\nport = 0\n[nodes."a[1-9]"]\nuser = ""\npyhton = "x"\n[nodes.b]\ngpus = "8"\n'
    assert complaint(tmp_path, text) == (
        (
            "hosts.toml has 4 mistakes:\n"
            "  [defaults] port = 0 is no port; write a number from 1 to 65535\n"
            '  [nodes."a[1-9]"] user = "" is empty; leave the key out to get its default\n'
            '  [nodes."a[1-9]"] pyhton is an unknown key; did you mean `python`?\n'
            '  [nodes.b] gpus = "8" is neither a whole number nor a list of whole numbers; '
            "write `gpus = 8` or `gpus = [0, 1, 2, 3]`"
        ),
        None,
    )


def test_a_hundred_mistakes_fit_a_screen(tmp_path: Path) -> None:
    """The list ends after twenty, with a count of the rest."""
    message, _ = complaint(tmp_path, "\n".join(f"x{n:03} = 1" for n in range(100)))
    lines = message.splitlines()
    assert (len(lines), lines[0], lines[-1]) == (22, "hosts.toml has 100 mistakes:", "  and 80 more")


def test_a_long_value_is_cut(tmp_path: Path) -> None:
    """A value of a thousand characters does not fill the screen."""
    message, _ = complaint(tmp_path, one(f'user = " {"x" * 1000}"'))
    assert message == f'hosts.toml: [nodes.gpu-01] user = " {"x" * 58}... holds white space'


def test_a_missing_file(tmp_path: Path) -> None:
    """A file that is not there is named."""
    with pytest.raises(HostsFileError) as caught:
        load_hosts(tmp_path / "no.toml")
    assert (str(caught.value), caught.value.hint) == (
        f"{tmp_path}/no.toml: no such file",
        "name the hosts map with `--hosts FILE`",
    )


def test_a_folder(tmp_path: Path) -> None:
    """A folder is no hosts map."""
    with pytest.raises(HostsFileError) as caught:
        load_hosts(tmp_path)
    assert (str(caught.value), caught.value.hint) == (
        f"{tmp_path}: is a folder, not a file",
        "name the hosts map in it",
    )


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    """A file without permission says so, to root's tests as well."""
    path = tmp_path / "hosts.toml"
    path.write_text("[nodes.a]")
    path.chmod(0)
    user = os.geteuid()
    try:
        if user == 0:
            os.seteuid(65534)
        with pytest.raises(HostsFileError) as caught:
            load_hosts(path)
    finally:
        os.seteuid(user)
    assert (str(caught.value), caught.value.hint) == (f"{path}: cannot be read: Permission denied", None)
