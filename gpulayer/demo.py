"""`gpulayer demo`: a practice cluster on this machine, and a real job on it by the same commands that users type."""

from __future__ import annotations

import contextlib
import getpass
import importlib.resources
import importlib.util
import os
import secrets
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

from gpulayer.console import Console, Terminal
from gpulayer.errors import NodeError, RequestError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from gpulayer.messages import Tone

SCRIPT = "allreduce.py"
COLUMNS = 79
SERVERS_END_S = 90.0

INTRO = """\
gpulayer demo: a practice cluster on this machine; nothing is set up or kept
  Two SSH servers that live as long as this demo play the two nodes. The rest
  is real: SSH logins, a torchrun on each node, gloo between the ranks.
  folder    {folder}
  servers   {servers}
"""
RENDER = "1. The plan. Nothing is contacted for it."
RUN = "2. The run: this very plan, over SSH. Each rank brings its rank + 1."
OUTRO = """
gpulayer demo: over. Removed with its folder are the files of the run:
{files}
"""
NEXT = """\
  On your own machines it is the same two commands, with a hosts map that has
  their names: hosts.example.toml is one to start from.
"""


def run_demo(run_cli: Callable[[list[str]], int]) -> int:
    """Show a plan, then run it; `run_cli` carries out one gpulayer command line. Returns the run's exit code.

    Raises RequestError where PyTorch is missing and NodeError where the practice cluster does not start.
    """
    if importlib.util.find_spec("torch") is None:
        raise RequestError(
            f"the demo runs real torchrun, and {sys.executable} has no PyTorch",
            hint="`pip install 'gpulayer[torch]'`",
        )
    with _folder() as folder, _cluster(folder) as servers, _inside(folder):
        script = importlib.resources.files("gpulayer").joinpath("demo_allreduce.py")
        (folder / SCRIPT).write_bytes(script.read_bytes())
        _say(INTRO.format(folder=folder, servers=servers))
        job_id = f"demo-{secrets.token_hex(2)}"
        options = f"-H hosts.toml -F ssh_config --job-id {job_id} --nproc-per-node 2 --backend gloo".split()
        # GPUs are not used, so it is no matter who else uses them.
        code = _run(RENDER, ["render", *options, SCRIPT], run_cli) or _run(
            RUN, ["run", *options, "--allow-dirty", SCRIPT], run_cli
        )
        _say(OUTRO.format(files=_listing(folder / "runs" / job_id)) + ("" if code else NEXT))
    return code


def _run(title: str, args: list[str], run_cli: Callable[[list[str]], int]) -> int:
    """Carry out one command line, shown above its output as a shell takes it."""
    lines = textwrap.wrap(f"gpulayer {' '.join(args)}", COLUMNS - 4, break_long_words=False, break_on_hyphens=False)
    command = " \\\n    ".join(lines)
    _say(f"\n{title}\n\n$ {command}\n\n", "good")
    return run_cli(args)


def _say(text: str, tone: Tone = "plain") -> None:
    console = Console(Terminal.detect(os.environ))
    console.block(text, tone)
    console.close()


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    """A private folder, gone afterwards. Should this process die of SIGKILL, the practice cluster removes it."""
    with tempfile.TemporaryDirectory(prefix="gpulayer-demo-", ignore_cleanup_errors=True) as name:
        yield Path(name).resolve()


@contextlib.contextmanager
def _cluster(folder: Path) -> Iterator[str]:
    """Run the practice cluster in a process of its own, out of reach of the terminal's signals. Yields its servers."""
    _name_user(folder)
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "gpulayer.practice", str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            cwd=Path(__file__).resolve().parent.parent,
            start_new_session=True,
        )
        try:
            greeting = process.stdout.readline().decode().split() if process.stdout else []
            if greeting[:1] != ["ready"]:
                errors.seek(0)
                last = errors.read().decode("utf-8", "replace").strip().rpartition("\n")[2]
                raise NodeError(f"the practice cluster did not start: {last or 'it said nothing'}")
            yield ", ".join(greeting[1:])
        finally:
            _end(process)


def _name_user(folder: Path) -> None:
    """Give a user who is in no passwd file (as in some containers) what SSH needs of one: a home and a name."""
    try:
        Path.home()
    except RuntimeError:
        os.environ["HOME"] = str(folder)
    try:
        getpass.getuser()
    except (KeyError, OSError):
        os.environ["USER"] = "practice"


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the cluster, which waits for what still runs on it."""
    if process.stdin:
        process.stdin.close()
    try:
        process.wait(SERVERS_END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    if process.stdout:
        process.stdout.close()


@contextlib.contextmanager
def _inside(folder: Path) -> Iterator[None]:
    """Be in `folder`, as a user who types the commands would be; then go back, where that can be."""
    before = os.open(".", os.O_PATH)
    os.chdir(folder)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            os.fchdir(before)
        os.close(before)


def _listing(run_dir: Path) -> str:
    """Return the names of a run's files, folder by folder."""
    lines = []
    for folder in (run_dir, *sorted(path for path in run_dir.glob("*") if path.is_dir())):
        names = " ".join(sorted(path.name for path in folder.iterdir() if path.is_file())) if folder.exists() else ""
        place = "" if folder == run_dir else f"{folder.name}/"
        lines.append(textwrap.fill(f"  {place:<8}{names}", COLUMNS, subsequent_indent=" " * 10, break_on_hyphens=False))
    return "\n".join(lines)
