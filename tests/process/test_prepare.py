"""What was planned is what runs, byte for byte, or the node says why it cannot."""

from __future__ import annotations

import os
import signal
import socket
import sys
from typing import TYPE_CHECKING

import pytest

from tests.process.programs import POLITE
from tests.support.local_node import LocalNode, free_port

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    ScriptWriter = Callable[[str], Path]

# Writes its argv, environment and working directory as the kernel has them to files in FOLDER.
SHOW = """
import os, sys
for name in ("cmdline", "environ"):
    with open("/proc/self/" + name, "rb") as source, open(sys.argv[1] + "/" + name, "wb") as target:
        target.write(source.read())
with open(sys.argv[1] + "/cwd", "wb") as target:
    target.write(os.getcwdb())
"""

ODD = [
    "",
    "a b  c",
    'it\'s "so" `cmd` $HOME $(x) \\ ! * ? ~ # ; & | < >',
    "line\nline\r\n\ttab",
    "ünïcödé 漢字 🚀",
    b"\xff\xfe not utf-8 \x80".decode("utf-8", "surrogateescape"),
    "y" * 100_000,
]


def _show(node: LocalNode, script: ScriptWriter, *args: str, **changes: object) -> dict[bytes, bytes]:
    """Run SHOW and return the environment that it saw."""
    argv = [sys.executable, str(script(SHOW)), str(node.folder), *args]
    node.run(argv, **({"nproc_per_node": 0, "env": {}} | changes))
    node.finish()
    assert node.wait_for("exit")["status"] == 0, node.output
    entries = (node.folder / "environ").read_bytes().split(b"\0")[:-1]
    return dict(entry.partition(b"=")[::2] for entry in entries)


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


def test_argv_environment_and_workdir_arrive_byte_for_byte(
    node: LocalNode, script: ScriptWriter, tmp_path: Path
) -> None:
    """Spaces, quotes, newlines, nothing, 100 kB and bytes that are no text are what the command sees."""
    workdir = tmp_path / b"w \xe9 'd\"\n".decode("utf-8", "surrogateescape")
    workdir.mkdir()
    env = {f"V{number}": text for number, text in enumerate(ODD)} | {"A.B-c ü": "odd name"}
    seen = _show(node, script, *ODD, env=env, workdir=str(workdir))
    assert (tmp_path / "cmdline").read_bytes().split(b"\0")[3:-1] == [_bytes(text) for text in ODD]
    assert {name: seen[_bytes(name)] for name in env} == {name: _bytes(value) for name, value in env.items()}
    assert (tmp_path / "cwd").read_bytes() == os.fsencode(workdir)


def test_the_environment_is_the_nodes_own_cleaned_and_marked(tmp_path: Path, script: ScriptWriter) -> None:
    """What torchrun would read by mistake is gone, the marker is there, the rest is as the login shell had it."""
    own = {"PATH": os.environ["PATH"], "KEPT": "a=b", "EMPTY": ""}
    stale = {"PET_NNODES": "9", "TORCHELASTIC_RUN_ID": "x", "RANK": "7", "MASTER_ADDR": "old", "GPULAYER_MARKER": "old"}
    shell = {"PWD", "OLDPWD", "SHLVL", "_"}  # what /bin/sh may set
    with LocalNode(tmp_path, environ=own | stale) as node:
        seen = _show(node, script, env={"RANK_OF": "me"}, address="192.0.2.1", nnodes=1, master_addr="::1")
    expected = own | {"RANK_OF": "me", "GPULAYER_MARKER": node.marker, "GPULAYER_NODE_RANK": "1"}
    if seen.pop(b"GLOO_SOCKET_IFNAME", None):  # an address that is not here has an interface where a route has one
        del seen[b"NCCL_SOCKET_IFNAME"], seen[b"TP_SOCKET_IFNAME"]
    assert {name.decode(): value.decode() for name, value in seen.items() if name.decode() not in shell} == expected


@pytest.mark.parametrize(
    ("of_node", "of_job", "interface", "expected"),
    [
        ({}, {}, None, ["lo", "=lo"]),
        ({"GLOO_SOCKET_IFNAME": "mine"}, {}, None, ["mine", "=lo"]),
        ({"GLOO_SOCKET_IFNAME": "mine"}, {"NCCL_SOCKET_IFNAME": "^x"}, None, ["mine", "^x"]),
        ({"GLOO_SOCKET_IFNAME": "mine"}, {"GLOO_SOCKET_IFNAME": "lo"}, "lo", ["lo", "=lo"]),
        ({}, {"GLOO_SOCKET_IFNAME": ""}, "lo", ["", "=lo"]),
    ],
)
def test_the_interface_is_set_unless_the_user_has_set_it(
    tmp_path: Path,
    script: ScriptWriter,
    of_node: dict[str, str],
    of_job: dict[str, str],
    interface: str | None,
    expected: list[str],
) -> None:
    """The job's own variables win over the node's, and those over what is found. `interface` is in the job's."""
    clean = {name: value for name, value in os.environ.items() if not name.endswith("_SOCKET_IFNAME")}
    with LocalNode(tmp_path, environ=clean | of_node) as node:
        seen = _show(node, script, env=of_job, interface=interface)
    assert node.wait_for("prepared")["interface"] == "lo"
    assert [seen[name].decode() for name in (b"GLOO_SOCKET_IFNAME", b"NCCL_SOCKET_IFNAME")] == expected


def test_a_command_that_cannot_be_run_exits_127_with_a_reason(node: LocalNode) -> None:
    """No such program: as in a shell, the code is 127 and stderr says what is wrong."""
    node.run(["/no/such/python", "x"])
    assert node.finish()["type"] == "ended"
    end = node.wait_for("exit")
    assert end["status"] == 127 << 8
    message = b"gpulayer: /no/such/python cannot be run: No such file or directory\n"
    assert node.payload_of(end)["stderr"] == message
    assert node.output == {(None, "stderr"): message}


def test_the_command_starts_with_a_clean_slate(node: LocalNode, script: ScriptWriter) -> None:
    """Session of its own, stdin from /dev/null, default signals, no file descriptor of the supervisor."""
    source = (
        "import os, signal\n"
        "print(os.getsid(0) == os.getpid(), os.readlink('/proc/self/fd/0'), len(os.listdir('/proc/self/fd')))\n"
        "status = dict(line.split(':\\t') for line in open('/proc/self/status') if ':\\t' in line)\n"
        # Signals 32 and 33 are the C library's own: who starts us with one ignored has it ignored in all we start.
        "ours = sum(1 << number - 1 for number in signal.valid_signals())\n"
        "print(*(f'{int(status[name], 16) & ours:016x}' for name in ('SigBlk', 'SigCgt', 'SigIgn')))\n"
    )
    node.run([sys.executable, "-c", source], nproc_per_node=0)
    node.finish()
    pythons_own = _bit(signal.SIGPIPE) | _bit(signal.SIGXFSZ)
    expected = f"True /dev/null 4\n{0:016x} {_bit(signal.SIGINT):016x} {pythons_own:016x}\n"
    assert node.output[None, "stdout"].decode() == expected


def _bit(number: int) -> int:
    return 1 << (number - 1)


@pytest.mark.parametrize(
    ("changes", "code", "message"),
    [
        ({"workdir": "/no/such"}, "workdir", "workdir /no/such cannot be entered: No such file or directory"),
        ({"workdir": "/etc/passwd"}, "workdir", "workdir /etc/passwd cannot be entered: Not a directory"),
        ({"job_dir": "/no/such/x"}, "job_dir", "the job's folder /no/such/x cannot be made: No such file or directory"),
        ({"job_dir": "/tmp"}, "job_dir", "the job's folder /tmp cannot be made: File exists"),
        ({"interface": "nope0"}, "interface", "interface `nope0` does not exist; there are: "),
        ({"workdir": "/" + "x" * 100_000}, "workdir", "workdir /xxx"),
    ],
)
def test_a_node_that_cannot_take_part_says_why(
    node: LocalNode, changes: dict[str, object], code: str, message: str
) -> None:
    """Each refusal has a code and a message, and leaves nothing behind."""
    answer = node.prepare([sys.executable], **changes)
    assert (answer["type"], answer["code"]) == ("refused", code)
    assert answer["message"].startswith(message)
    node.send("kill")
    assert node.finish() == {"type": "ended", "kept": "", "outputs": False}
    assert not node.job_dir.exists()


def test_a_job_that_never_starts_leaves_no_folder(node: LocalNode) -> None:
    """Dismissed after it was ready, a node is as it was."""
    assert node.prepare([sys.executable]) == {"type": "prepared", "interface": "lo"}
    assert (node.job_dir / "ranks").is_dir()
    assert node.job_dir.stat().st_mode & 0o777 == 0o700
    node.send("kill")
    assert node.finish() == {"type": "ended", "kept": "", "outputs": False}
    assert not node.job_dir.exists()


def test_the_rendezvous_port_is_held_but_not_from_torch(node: LocalNode, script: ScriptWriter) -> None:
    """While the job runs nobody gets the port by chance or without SO_REUSEADDR; torch, which sets it, can listen."""
    port = free_port()
    changes = {"node_rank": 0, "master_port": port, "nproc_per_node": 0}
    node.run([sys.executable, str(script(POLITE))], **changes)
    with socket.socket() as plain, pytest.raises(OSError, match="in use"):
        plain.bind(("127.0.0.1", port))
    with socket.socket(socket.AF_INET6) as torch:
        torch.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        torch.bind(("::", port))
        torch.listen()
    node.send("kill")
    node.finish()
    with socket.socket() as plain:
        plain.bind(("127.0.0.1", port))


def test_a_port_that_is_taken_is_refused(node: LocalNode, tmp_path: Path) -> None:
    """A listener, and another gpulayer job that has not begun to listen, are told of; only the head needs the port."""
    with socket.socket() as listener:
        listener.bind(("", 0))
        listener.listen()
        port = listener.getsockname()[1]
        answer = node.prepare([sys.executable], node_rank=0, master_port=port)
        assert answer == {"type": "refused", "code": "port", "message": f"port {port} is in use"}
        with LocalNode(tmp_path) as other:
            assert other.prepare([sys.executable], node_rank=1, master_port=port)["type"] == "prepared"
    port = free_port()
    with LocalNode(tmp_path) as first, LocalNode(tmp_path) as second:
        assert first.prepare([sys.executable], node_rank=0, master_port=port)["type"] == "prepared"
        answer = second.prepare([sys.executable], node_rank=0, master_port=port)
        assert answer["message"] == f"port {port} is held by another job of gpulayer"
