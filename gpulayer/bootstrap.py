"""How the supervisor gets onto a node: one constant command line, and its source down stdin.

Nothing else is ever read by a login shell, so it may be bash, dash, zsh, fish or tcsh.
"""

from __future__ import annotations

import importlib.resources
import zlib
from functools import cache

from gpulayer import supervisor


def bootstrap_command(python: str) -> str:
    """Return the one command line that a login shell is given. bash, dash, zsh, fish and tcsh read it alike.

    The interpreter runs isolated (-I, -S, -E) and executes the first line of its stdin.
    """
    return f"exec '{python}' -ISE -c 'import os;f=os.fdopen(0,\"rb\",0);exec(f.readline())'"


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
scope={{"__name__":"gpulayer_supervisor"}}
exec(compile(zlib.decompress(data),"gpulayer_supervisor","exec"),scope)
scope["main"]({nonce!r})
"""


@cache
def supervisor_source() -> bytes:
    """Return the supervisor's source, compressed."""
    return zlib.compress(importlib.resources.files("gpulayer").joinpath("supervisor.py").read_bytes(), 9)


def bootstrap_input(nonce: str) -> bytes:
    """Return what goes down stdin first: a line of Python that any version reads, then the compressed supervisor."""
    source = supervisor_source()
    greeting = supervisor.HELLO + nonce.encode() + b"\n"
    stage = STAGE_TWO.format(greeting=greeting, minimum=supervisor.MIN_PYTHON, size=len(source), nonce=nonce)
    return b"exec(" + repr(stage.strip() + "\n").encode() + b")\n" + source
