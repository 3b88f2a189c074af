"""A folder with a hosts map, a script and a saved plan, for tests of what becomes of a plan later."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

from gpulayer import cli, plan_again
from gpulayer.errors import RequestError
from gpulayer.plan import digest_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from gpulayer.plan import Plan

HOSTS = """
[defaults]
gpus = 2
workdir = "{folder}"
user = "me"

[defaults.env]
NCCL_DEBUG = "WARN"
MAP_TOKEN = "of-the-map-12345"

[nodes.n01]
address = "10.9.0.1"
[nodes.n02]
address = "10.9.0.2"
[nodes.n03]
address = "10.9.0.3"
"""
JOB_ID = "20261129-150210-k3f9"
Json = dict[str, Any]


def write_files(folder: Path) -> None:
    """Write hosts.toml and train.py."""
    (folder / "hosts.toml").write_text(HOSTS.format(folder=folder))
    (folder / "train.py").write_text("print('hello')\n")


def save(*words: str, name: str = "plan.json") -> None:
    """Save a plan in the current folder: of train.py on the first two nodes, or with other words."""
    job_id = () if "--job-id" in words else ("--job-id", JOB_ID)
    code = cli.run_cli(["render", "-o", name, *job_id, *(words or ("-N", "2", "train.py"))])
    assert code == 0


def edit(path: Path, change: Callable[[Json], object], *, sign: bool = False) -> None:
    """Change a saved plan; `sign` makes its digest right again."""
    document = json.loads(path.read_text())
    change(document)
    if sign:
        document["digest"] = digest_of(document)
    path.write_text(json.dumps(document))


def replaced(path: Path, old: str, new: str) -> None:
    """Put one text in place of another in a file."""
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def to_run(
    name: str = "plan.json",
    *,
    env: Sequence[str] = (),
    run_dir: Path | None = None,
    environ: Mapping[str, str] | None = None,
) -> Plan:
    """Return the plan that `run --plan` would run."""
    given = os.environ if environ is None else environ
    return plan_again.plan_to_run(name, None, None, env=env, run_dir=run_dir, environ=given)[1].plan


def faults(**options: Any) -> list[str]:
    """Return what `run --plan` says does not hold any more, in order."""
    try:
        to_run(**options)
    except RequestError as error:
        return [line.removeprefix("  ") for line in str(error).splitlines()[1:]] or [str(error)]
    return []
