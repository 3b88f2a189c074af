"""How words are read where typer has no way: commands of two words, and `--wait` with or without a number."""

from __future__ import annotations

import re
from typing import Any

import typer.core

_DURATION = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[a-z]{0,3}|inf|nan")  # `5m` too, to be refused: it is no script


class CommandGroup(typer.core.TyperGroup):
    """The commands, among them some of two words: `hosts init` beside `hosts`, which takes no words of its own."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the name, the command and the words left for it."""
        name = " ".join(args[:2])
        if len(args) > 1 and name in self.commands:
            return name, self.commands[name], args[2:]
        longer = [known for known in self.commands if args and known.startswith(f"{args[0]} ")]
        if longer and args[0] not in self.commands:
            known = ", ".join(f"`gpulayer {name}`" for name in longer)
            ctx.fail(f"`{args[0]}` alone is no command: there is {known}")
        return super().resolve_command(ctx, args)


class RunCommand(typer.core.TyperCommand):
    """`run`, whose `--wait` may stand without a number. typer has no such options."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse what the user typed."""
        valued = {name for param in self.params if not getattr(param, "is_flag", False) for name in param.opts}
        return list(super().parse_args(ctx, spell_out_wait(args, valued)))


def spell_out_wait(words: list[str], valued: set[str]) -> list[str]:
    """Return the words with each `--wait` that no number follows as `--wait=inf`. What begins with SCRIPT is left.

    `valued` are the options that take a value, which may look like anything.
    """
    rest, read = list(words), list[str]()
    while rest and rest[0].startswith("-") and rest[0] not in {"-", "--"}:
        word = rest.pop(0)
        if word == "--wait" and not (rest and _DURATION.fullmatch(rest[0])):
            word = "--wait=inf"
        read.append(word)
        if rest and _takes_next(word.replace("_", "-"), valued):
            read.append(rest.pop(0))
    return read + rest


def _takes_next(word: str, valued: set[str]) -> bool:
    """True for an option whose value is the next word: `--nnodes`, `-N`, `-vN`, but not `--nnodes=2` nor `-N2`."""
    if word.startswith("--"):
        return word in valued
    first = next((at for at, letter in enumerate(word) if at and f"-{letter}" in valued), None)
    return first == len(word) - 1
