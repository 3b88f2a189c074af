"""How the supervisor gets onto a node: one constant command line, and its source down stdin.

Nothing else is ever read by a login shell, so it may be bash, dash, zsh, fish or tcsh.
"""

from __future__ import annotations

import importlib.resources
import zlib
from functools import cache

from gpulayer import frames, probe

# What is sent, the one with `main` last.
SUPERVISOR = (
    "frames",
    "processes",
    "environment",
    "ending",
    "programs",
    "guard",
    "streams",
    "network",
    "node_lease",
    "node_bundle",
    "node_outputs",
    "survey",
    "ranks",
    "supervisor",
)
PROBE = ("probe_host", "probe_gpu", "probe")

STAGE_ONE = 'import os;f=os.fdopen(0,"rb",0);exec(f.readline())'
STAGE_TWO = """
import os,sys
greeting={greeting!r}
if sys.version_info<{minimum!r}:
 os.write(1,greeting+('{{"type":"too_old","python":"%d.%d.%d"}}\\n'%sys.version_info[:3]).encode())
 os._exit(1)
import zlib
data=b''
while len(data)<{size}:
 piece=os.read(0,{size}-len(data))
 if not piece:
  os._exit(1)
 data+=piece
data=zlib.decompress(data)
for name,end in {modules!r}:
 module=sys.modules[name]=type(sys)(name)
 exec(compile(data[:end],name,"exec"),module.__dict__)
 data=data[end:]
module.main({nonce!r})
"""


def bootstrap_command(python: str) -> str:
    """Return the one command line that a login shell is given. bash, dash, zsh, fish and tcsh read it alike.

    The interpreter runs isolated (-I, -S, -E) and executes the first line of its stdin.
    """
    return f"exec '{python}' -ISE -c '{STAGE_ONE}'"


def probe_argv(python: str) -> list[str]:
    """Return what runs the probe: the job's own Python with all that the job finds there, so not isolated."""
    return [python, "-c", STAGE_ONE]


@cache
def _source(module: str) -> bytes:
    return importlib.resources.files("gpulayer").joinpath(f"{module}.py").read_bytes()


@cache
def _compressed(modules: tuple[str, ...]) -> bytes:
    return zlib.compress(b"".join(map(_source, modules)), 9)


def bootstrap_input(nonce: str) -> bytes:
    """Return what goes down a supervisor's stdin first: a line that any Python reads, then the compressed source."""
    return _input(SUPERVISOR, frames.HELLO + nonce.encode() + b"\n", nonce)


def probe_input(nonce: str) -> bytes:
    """Return what goes down a probe's stdin first."""
    return _input(PROBE, probe.HELLO + nonce.encode() + b"\n", nonce)


def _input(modules: tuple[str, ...], greeting: bytes, nonce: str) -> bytes:
    """Return the modules, each of which may import those before it, by the names that they have here."""
    source = _compressed(modules)
    stage = STAGE_TWO.format(
        greeting=greeting,
        minimum=frames.MIN_PYTHON,
        size=len(source),
        modules=[(f"gpulayer.{module}", len(_source(module))) for module in modules],
        nonce=nonce,
    )
    return b"exec(" + repr(stage.strip() + "\n").encode() + b")\n" + source
