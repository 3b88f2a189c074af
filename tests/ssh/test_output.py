"""What ranks write: every byte in its file, every line tagged on the screen. Screens that stop: tests/faults."""

from __future__ import annotations

import re
import signal
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support.flood import FLOOD
from tests.support.jobs import GPULAYER, TELL, launch, map_with_fake_torch, run, told, write_script
from tests.support.terminal import terminal
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.cluster import Cluster
    from tests.support.jobs import Finished
    from tests.support.terminal import Pty

pytestmark = pytest.mark.ssh

FULL_SPEED = """
import os
for number in range(3000):
    print("rank", os.environ["RANK"], "line", number, "x" * 60)
"""

SPEAK = """
import os, sys
print("out of", os.environ["RANK"])
print("err of", os.environ["RANK"], file=sys.stderr)
"""

STRANGE_OUT = (
    b"plain\n"
    b"invalid \xff\xfe\xc3( utf-8\n"
    b"NUL \0 here\0\n"
    b"ansi \x1b[31mred\x1b[0m \x1b[2J\x1b[H\x1b]0;title\x07 cleared\n"
    + b"".join(b"\r%3d%%|%s" % (percent, b"#" * percent) for percent in range(101))
    + b"\n\r\n\n\r\r"
    + "grüße 世界 🚀\n".encode()
    + bytes(range(256))
    + b"L" * 5_000_000
    + b"\nno newline at the end"
)
STRANGE_ERR = b"\xf0\x9f\x9a" * 1000 + b"\n" + b"\r" * 5000 + b"E" * 100_000
WRITE_STRANGE = """
import os, sys
folder = os.path.dirname(os.path.abspath(__file__))
for fd, name in ((1, "out"), (2, "err")):
    data = open(os.path.join(folder, name), "rb").read()
    while data:
        data = data[os.write(fd, data[:7919]):]
"""

# Says that it is there, and runs until it is told to go on.
HOLD = """
import os, time
print("secret is", len(os.environ["HF_TOKEN"]), "long", flush=True)
while not os.path.exists(os.environ["OUT"] + "/go"):
    time.sleep(0.05)
"""


@pytest.fixture
def pty() -> Iterator[Pty]:
    """A terminal of 80 columns."""
    with terminal() as pty:
        yield pty


@pytest.mark.torch
def test_four_ranks_at_full_speed_break_no_line(cluster2: Cluster) -> None:
    """Four ranks of a real torchrun print 3000 lines each: whole, in order, under their own tag, and in their file."""
    script = write_script(cluster2, FULL_SPEED)
    hosts = cluster2.hosts_toml(hosts=cluster2.hosts[:1], defaults={"gpus": 4})
    done = run(cluster2.login, hosts, [], script, timeout_s=100)
    assert done.returncode == 0, done.stderr
    expected = {rank: [f"rank {rank} line {number} {'x' * 60}" for number in range(3000)] for rank in range(4)}
    for rank, lines in expected.items():
        assert done.log(0, rank).decode().splitlines() == lines
        assert done.log(0, rank, "stderr") == b""
    shown: defaultdict[str, list[str]] = defaultdict(list)
    for line in done.stdout.splitlines():
        tag, _, text = line.partition(" ")
        shown[tag].append(text)
    assert shown == {f"[0/{rank}]": lines for rank, lines in expected.items()}


@pytest.mark.parametrize(
    ("options", "gpus", "tags"),
    [
        ([], 1, ["[0]", "[1]"]),
        ([], 2, ["[0/0]", "[0/1]", "[1/2]", "[1/3]"]),
        (["--label", "id"], 1, ["[h00]", "[h01]"]),
        (["--label", "id"], 2, ["[h00/0]", "[h00/1]", "[h01/2]", "[h01/3]"]),
    ],
)
def test_stdout_and_stderr_stay_apart_under_their_tags(
    cluster2: Cluster, options: list[str], gpus: int, tags: list[str]
) -> None:
    """Ranks' stdout is stdout and nothing else is; their stderr is on stderr, with gpulayer's own lines."""
    script = write_script(cluster2, SPEAK)
    done = run(cluster2.login, map_with_fake_torch(cluster2, defaults={"gpus": gpus}), options, script)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"{tag} out of {rank}" for rank, tag in enumerate(tags)]
    assert sorted(line for line in done.stderr.splitlines() if line.startswith("[")) == [
        f"{tag} err of {rank}" for rank, tag in enumerate(tags)
    ]
    for rank in range(2 * gpus):
        assert done.log(rank // gpus, rank) == f"out of {rank}\n".encode()
        assert done.log(rank // gpus, rank, "stderr") == f"err of {rank}\n".encode()


def test_strange_bytes_are_exact_in_the_files(cluster2: Cluster) -> None:
    """Invalid UTF-8, NUL, ANSI, progress bars and a line of 5 MB stop nothing and are kept as they came."""
    script = write_script(cluster2, WRITE_STRANGE)
    (script.parent / "out").write_bytes(STRANGE_OUT)
    (script.parent / "err").write_bytes(STRANGE_ERR)
    done = run(cluster2.login, map_with_fake_torch(cluster2), [], script)
    assert done.returncode == 0, done.stderr[-2000:]
    for rank in range(2):
        assert done.log(rank, rank) == STRANGE_OUT
        assert done.log(rank, rank, "stderr") == STRANGE_ERR
    lines = done.stdout.splitlines()
    assert all(line.startswith(("[0] ", "[1] ")) for line in done.stdout.split("\n")[:-1])
    assert sum("plain" in line for line in lines) == 2
    assert sum("100%|" in line for line in lines) == 2
    assert done.stdout.count("grüße 世界 🚀") == 2
    assert done.stdout.count("more bytes of this line are only in") == 2
    assert done.receipt["lost_log_bytes"] == 0


def test_a_terminal_gets_colours_and_nothing_that_could_harm_it(cluster2: Cluster, pty: Pty) -> None:
    """A colour for each node, the ranks' own colours kept, and control sequences shown as text."""
    script = write_script(cluster2, f"import sys\nsys.stdout.buffer.write({STRANGE_OUT[:300]!r} + b'\\n')")
    pty.start_reading()
    hosts = map_with_fake_torch(cluster2)
    env = {"TERM": "xterm"}
    with launch(cluster2.login, hosts, [], script, env=env, stdout=pty.slave, stderr=pty.slave) as live:
        done = live.finish()
    pty.hang_up()
    assert done.returncode == 0
    for node_rank, color in enumerate((36, 35)):
        assert f"\x1b[{color}m[{node_rank}]\x1b[0m plain" in pty.text
    assert "ansi \x1b[31mred\x1b[0m ^[[2J^[[H^[]0;title^G cleared" in pty.text
    assert "NUL ^@ here^@" in pty.text
    assert "\x1b" not in re.sub("\x1b\\[([0-9;]*m|K)", "", pty.text)


def test_no_color_is_honoured(cluster2: Cluster, pty: Pty) -> None:
    """With NO_COLOR there is no colour of gpulayer's on a terminal."""
    pty.start_reading()
    hosts, script = map_with_fake_torch(cluster2), write_script(cluster2, SPEAK)
    env = {"TERM": "xterm", "NO_COLOR": "1"}
    with launch(cluster2.login, hosts, [], script, env=env, stdout=pty.slave, stderr=pty.slave) as live:
        done = live.finish()
    pty.hang_up()
    assert done.returncode == 0
    assert "[0] out of 0" in pty.text
    assert not re.findall("\x1b\\[[0-9;]*m", pty.text)


def test_the_last_words_before_a_crash_arrive(cluster2: Cluster) -> None:
    """A rank that floods, says one thing more and is killed: all of it is in the file, and its end in the report."""
    source = f"{FLOOD}\nimport os, signal\nos.write(2, b'last words')\nos.kill(os.getpid(), signal.SIGKILL)"
    script = write_script(cluster2, source)
    hosts = map_with_fake_torch(cluster2, hosts=cluster2.hosts[:1])
    done = run(cluster2.login, hosts, ["--grace", "2"], script, ["5"])
    assert done.returncode == 1
    assert len(done.log(0, 0)) == 5_000_000
    assert done.log(0, 0, "stderr") == b"last words"
    assert done.receipt["cause"]["signal"] == signal.SIGKILL
    assert "its last lines on stderr:\n    last words\n" in done.stderr


def test_the_run_directory_is_its_owners_alone(cluster2: Cluster) -> None:
    """Folders have mode 0700 and files 0600, under the usual umask; nothing else lies in it."""
    hosts, script = map_with_fake_torch(cluster2), write_script(cluster2, SPEAK)
    done = run(cluster2.walker, hosts, [], script)
    assert done.returncode == 0, done.stderr
    found = {
        str(path.relative_to(done.run_dir)): (path.is_dir(), oct(path.stat().st_mode & 0o777), path.stat().st_uid)
        for path in done.run_dir.rglob("*")
    }
    folders = ["node0", "node1"]
    files = ["plan.json", "receipt.json", "events.jsonl", "output.jsonl"]
    files += [f"node{rank}/rank{rank}.{stream}.log" for rank in (0, 1) for stream in ("stdout", "stderr")]
    assert found == dict.fromkeys(folders, (True, "0o700", 7001)) | dict.fromkeys(files, (False, "0o600", 7001))
    assert oct(done.run_dir.stat().st_mode & 0o777) == "0o700"


def test_run_dir_moves_the_run_directory(cluster2: Cluster) -> None:
    """--run-dir names the folder itself."""
    hosts, script = map_with_fake_torch(cluster2), write_script(cluster2, SPEAK)
    done = run(cluster2.login, hosts, ["--run-dir", "deep/down here"], script)
    assert done.returncode == 0, done.stderr
    moved = cluster2.login.home / "deep/down here"
    assert (moved / "node1/rank1.stdout.log").read_bytes() == b"out of 1\n"
    assert not done.run_dir.exists()
    assert f"logs: {Path('deep/down here')}" in done.stderr


def test_a_secret_arrives_and_is_seen_nowhere(cluster2: Cluster) -> None:
    """A token passed by name is in the ranks' environment, and in no file, on no screen and in no command line."""
    value = "s3cr3t-4f9a\"'$x"
    script = write_script(cluster2, f"{TELL}\n{HOLD}")
    out = script.parent
    hosts = map_with_fake_torch(cluster2)
    options = ["-v", "-e", "HF_TOKEN", "-e", f"OUT={out}", "-e", "API_KEY=typed-5e77"]
    with launch(cluster2.login, hosts, options, script, env={"HF_TOKEN": value}) as live:
        wait_until(lambda: live.stdout_so_far.count("secret is") == 2, "both ranks run", timeout_s=40)
        command_lines = [" ".join(one.argv) for one in [*cluster2.processes(), *cluster2.login_processes()]]
        (out / "go").touch()
        done = live.finish()
    rendered = [
        cluster2.login.run(
            [*GPULAYER, "render", "-H", str(hosts), *options[1:], "--format", form, "s.py"], env={"HF_TOKEN": value}
        )
        for form in ("text", "json", "shell")
    ]
    assert done.returncode == 0, done.stderr
    assert [one["env"]["HF_TOKEN"] for one in told(out).values()] == [value] * 2
    assert [one["env"]["API_KEY"] for one in told(out).values()] == ["typed-5e77"] * 2
    kept = [path.read_text(errors="replace") for path in done.run_dir.rglob("*") if path.is_file()]
    shown = [done.stdout, done.stderr, *(one.stdout + one.stderr for one in rendered)]
    assert [one.returncode for one in rendered] == [0, 0, 0]
    assert len(command_lines) > 8
    assert not [text for text in [*kept, *shown, *command_lines] if "s3cr3t" in text]
    typed = [text for text in [*kept, *shown] if "typed-5e77" in text]
    assert typed == []


def _lines(done: Finished) -> list[str]:
    """gpulayer's own lines, less those that a busy machine brings: what is waited for after a second."""
    return [line for line in done.stderr.splitlines() if line.startswith("gpulayer: ") and ", waiting for " not in line]


def test_verbose_tells_each_nodes_steps(cluster2: Cluster) -> None:
    """Without -v a run that goes well has two lines of its own and the report's; with -v each step of each node."""
    hosts, script = map_with_fake_torch(cluster2), write_script(cluster2, SPEAK)
    quiet, verbose = (run(cluster2.login, hosts, options, script) for options in ([], ["-v"]))
    assert [re.sub(r"t\d+-\w+|\d+\.\d+|/\S+", "*", line) for line in _lines(quiet)] == [
        "gpulayer: running 2 ranks on 2 nodes, h[00-01]; logs in *",
        "gpulayer: job * succeeded after * s",
    ]
    told_steps = "\n".join(_lines(verbose))
    for name in ("h00", "h01"):
        assert f"{name}: connected to {name}, Python " in told_steps
        assert f"{name}: ready, interface eth0" in told_steps
        assert f"{name}: torchrun started, pid " in told_steps
        assert f"rank {name[-1]} on {name} exited with code 0" in told_steps
