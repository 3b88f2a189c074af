"""The plan as text: for people, for a shell, for scripts. Plain strings; console.py and cli.py print them.

Both command forms can be pasted into bash, zsh, dash or ksh. Values whose names look secret are taken from the
environment of that shell, so they are never shown.
"""

from __future__ import annotations

import json
import re
import shlex
from typing import TYPE_CHECKING

from gpulayer.hosts import fold
from gpulayer.masks import Part, Secrets
from gpulayer.plan import plan_json

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from gpulayer.plan import NodeCommand, Plan

WIDTH = 80
"""Columns that the text form keeps to, a single longer word aside."""

_LABEL = 10
_INDENT = " " * (2 + _LABEL)

# What a terminal would act upon, or what cannot be written as UTF-8 (bytes that came in as surrogates).
_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")


def render_text(plan: Plan) -> str:
    """Return the plan for people: a line about the job, then one block a node with its exact command."""
    return "\n\n".join(["\n".join(_header(plan)), *("\n".join(_block(plan, node)) for node in plan.nodes)]) + "\n"


def render_shell(plan: Plan) -> str:
    """Return the plan for pasting: for each node a comment, then its whole command on one line."""
    lines: list[str] = []
    for node in plan.nodes:
        bundle = f", in a copy of the bundle {plan.bundle.short_digest}" if plan.bundle else ""
        lines += [
            f"# node {node.node_rank}: {node.node_id}, {_login(node)}{bundle}",
            " ".join([f"cd {quote(node.workdir)} &&", *_environment(node), *map(quote_parts, node.argv_parts())]),
        ]
    return "\n".join(lines) + "\n"


def render_json(plan: Plan) -> str:
    """Return the plan for scripts: what plan.json in the run directory holds, pure ASCII."""
    return json.dumps(plan_json(plan), indent=2) + "\n"


def quote(word: str) -> str:
    """Return `word` as a shell needs it typed.

    Words with control characters or undecodable bytes are written as `$'...'` (POSIX 2024; bash, zsh and ksh have long
    had it), so that the text is safe to print; a newline or tab stays in plain quotes, which every shell knows.
    """
    if not _UNPRINTABLE.search(word):
        return shlex.quote(word)
    # Octal escapes: exactly three digits, so that whatever follows them cannot be drawn in.
    octal = "".join(
        char if char.isprintable() and char not in "'\\" else "".join(f"\\{byte:03o}" for byte in _bytes(char))
        for char in word
    )
    return f"$'{octal}'"


def quote_parts(parts: Sequence[Part]) -> str:
    """Return a word as a shell needs it typed, what is secret in it as a reference to the shell's own variable."""
    if not any(part.variable for part in parts):
        return quote("".join(part.text for part in parts))
    return "".join(f'"${{{part.variable}:?}}"' if part.variable else quote(part.text) for part in parts)


def _bytes(char: str) -> bytes:
    return char.encode("utf-8", "surrogateescape")


def _header(plan: Plan) -> Iterator[str]:
    nodes = _count(plan.nnodes, "node")
    processes = _count(plan.world_size, "process", "processes") if plan.has_ranks else "a command on each"
    by = "" if plan.launcher in ("torchrun", "command") else f" by {plan.launcher}"
    yield f"job {plan.job_id}: {nodes}, {processes}{by}"
    kind = "" if plan.rendezvous == "static" else f", {plan.rendezvous}"
    yield f"rendezvous: {plan.master_addr} port {plan.master_port}{kind}"
    if plan.uneven and plan.has_ranks:
        counts: dict[int, list[str]] = {}
        for node in plan.nodes:
            counts.setdefault(node.nproc_per_node, []).append(node.node_id)
        yield "nodes differ: " + ", ".join(
            f"{_count(count, 'process', 'processes')} on {fold(ids)}" for count, ids in counts.items()
        )
    if plan.bundle:
        yield f"bundle: {plan.bundle.text}, {plan.bundle.short_digest}, from {plan.bundle.folder}"
    if plan.practice:
        yield "practice: all nodes are this machine"
    limits = {"join": plan.join_timeout_s} if plan.has_ranks else {}
    limits |= {"grace": plan.grace_s, "lost after": plan.lost_after_s}
    if plan.timeout_s is not None:
        limits["timeout"] = plan.timeout_s
    yield "limits: " + ", ".join(f"{name} {seconds:g} s" for name, seconds in limits.items())


def _block(plan: Plan, node: NodeCommand) -> Iterator[str]:
    yield f"node {node.node_rank}: {node.node_id}"
    rows = {
        "ssh": _login(node),
        "address": node.address,
        "interface": node.interface or "chosen on the node, by its address",
        "ranks": f"{_span(node.ranks)} of {plan.world_size}" if node.ranks else "",
        "workdir": quote(node.workdir),
        "outputs": " ".join(map(quote, node.outputs)),
    }
    rows = {label: value for label, value in rows.items() if value}
    for label, value in rows.items():
        yield f"  {label:<{_LABEL}}{value}"
    first, *rest = _command_lines(node)
    yield f"  {'command':<{_LABEL}}{first}"
    yield from (_INDENT + line for line in rest)


def _login(node: NodeCommand) -> str:
    user = [] if node.user is None else ["-l", quote(node.user)]
    port = [] if node.port is None else ["-p", str(node.port)]
    return " ".join(["ssh", *user, *port, quote(node.ssh)])


def _span(ranks: tuple[int, ...]) -> str:
    return str(ranks[0]) if len(ranks) == 1 else f"{ranks[0]}-{ranks[-1]}"


def _count(number: int, one: str, many: str | None = None) -> str:
    return f"{number} {one if number == 1 else many or one + 's'}"


def _command_lines(node: NodeCommand) -> list[str]:
    """Return the command broken between words, each line but the last one ending in ` \\` or `&&`."""
    words = [*zip(node.argv, map(quote_parts, node.argv_parts()), strict=True)]
    launcher, (script, *arguments) = words[: node.script_at], words[node.script_at :]
    groups = [_environment(node), [script[1], *_paired(arguments)]]
    if launcher:
        module, options, dashes = (
            launcher[:3],
            launcher[3:-1],
            launcher[-1][1],
        )  # python -m torch.distributed.run ... --
        groups[1][0] = f"{dashes} {script[1]}"
        groups.insert(1, [" ".join(quoted for _, quoted in module), *_paired(options)])
    # The first group opens the line; the others are set in below it.
    lines = [*_filled(groups[0], ""), *(line for group in groups[1:] for line in _filled(group, "  "))]
    return [f"cd {quote(node.workdir)} &&", *(f"{line} \\" for line in lines[:-1]), lines[-1]]


def _environment(node: NodeCommand) -> list[str]:
    """Return `env` and its assignments, a secret value as a reference to the pasting shell's own variable."""
    secrets = Secrets(node.env)
    return ["env", *(quote_parts([Part(f"{name}="), *secrets.variable(name)]) for name in node.env)]


def _paired(words: Sequence[tuple[str, str]]) -> list[str]:
    """Join quoted words for reading: an option and what follows it stay on one line."""
    units: list[str] = []
    open_option = False
    for word, quoted in words:
        is_option = word.startswith("-") and "=" not in word
        if open_option and not word.startswith("-"):
            units[-1] += f" {quoted}"
            open_option = False
        else:
            units.append(quoted)
            open_option = is_option
    return units


def _filled(units: Iterable[str], hanging: str) -> list[str]:
    """Fill lines with units, WIDTH wide at most with the indent and the ` \\` at the end; later lines hang."""
    room = WIDTH - len(_INDENT) - len(" \\")
    lines: list[str] = []
    for unit in units:
        if lines and len(lines[-1]) + 1 + len(unit) <= room:
            lines[-1] += f" {unit}"
        else:
            lines.append(unit if not lines else hanging + unit)
    return lines
