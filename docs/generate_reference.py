"""Makes the reference pages that follow from code: `python docs/generate_reference.py hosts-file` writes that page.

Without a name it writes all of them. What a page says beyond the code stands in this file.
"""

from __future__ import annotations

import ast
import inspect
import itertools
import sys
import textwrap
from collections.abc import Callable, Mapping
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_origin

from gpulayer.cli import app
from gpulayer.hosts import RANGED_KEYS, HostsFile, NodeKeys

if TYPE_CHECKING:
    from pydantic import BaseModel

REFERENCE = Path(__file__).parent / "reference"

_HOSTS_FILE_HEAD = """\
# The hosts map

<!-- Made from the docstrings in gpulayer/hosts.py: `python docs/generate_reference.py hosts-file` -->

A TOML file that lists the machines a job can run on. gpulayer uses the first of these that there is:

1. the file that `-H FILE` or `--hosts FILE` names
2. the file that the environment variable `GPULAYER_HOSTS` names
3. `hosts.toml` in the current folder
4. `~/.config/gpulayer/hosts.toml`

A file that is named must be there. [hosts.example.toml](../../hosts.example.toml) is one to start from.

A key that is not listed here, a value of the wrong type, one node id twice and two nodes at one address and port are
errors. All mistakes that can be seen at once are reported at once, each with its table and key.
"""

_RANGES = """\
## Ids and ranges

A node id has letters, digits, `.`, `_` and `-`, and begins with none of `.` and `-`. TOML wants quotes around an id
that has a dot or a range in it: `[nodes."gpu-01.cluster"]`.

`[nodes."gpu-[02-16]"]` stands for fifteen nodes. Numbers keep their zeros in front, `[1,3-5]` lists, `[1-9/2]` steps by
two, and an id with two ranges stands for every combination, the last range counting fastest. The order written is the
order of the nodes.

A range in {keys} counts along with the id: the first
node gets its first value, and so on, so both need the same length. A value without a range is the same for all.
Brackets with anything but numbers in them, as in `/data/[old]`, are no range; a path with a number alone in brackets
cannot be written.

Several entries may share one machine if each has a `gpus` list and no device is in two of them.
"""

_COMMANDS_HEAD = """\
# Commands

<!-- Made from what `--help` shows: `python docs/generate_reference.py commands` -->

`gpulayer --help` and `gpulayer COMMAND --help` say the same in short. `gpulayer --version` prints the version, and
`gpulayer --install-completion` teaches your shell to complete options. `python -m gpulayer` is `gpulayer`.

gpulayer's options stand before SCRIPT. All that follows SCRIPT belongs to the script, even where it looks like an
option of gpulayer: in `gpulayer run -N 2 train.py -N 4` the script gets `-N 4`. Long options take `-` and `_` alike,
as torchrun's do: `--nproc_per_node 2`. A time is in seconds and may have a fraction.

An option wins over the key of [the hosts map](hosts-file.md) that has its name. What the command returns is in [exit
codes](exit-codes.md).
"""

_COMMAND_NOTES = {
    "check": """\
The checks are those that `run` makes before it starts anything: see [preflight](../troubleshooting.md#preflight).
Without SCRIPT, no script is looked for. The exit code is 0 where a job would run, with warnings or without, and 3
where it would not. `--format json` gives the findings, the port that a job would use, and how long each node's
connection to it took.
""",
    "run": """\
**Nodes.** `--nodelist` and `--exclude` narrow the map; then the first N nodes that are left are drawn, in the map's
order. That order is the order of node ranks, whatever the order in `--nodelist`. Ranges are written as [in the
map](hosts-file.md#ids-and-ranges).

**Ranks.** Node r hosts ranks r*P to (r+1)*P - 1. Without `--nproc-per-node` each node has as many ranks as its `gpus`
say; where nodes differ, ranks run on from node to node, and the plan says so.

**Folder.** The job starts in `--workdir`, else in the node's `workdir`, else in the folder that gpulayer is started
in. A relative `--workdir` starts from that folder too. The folder must be there on every node.

**Environment.** `-e NAME=VALUE` sets a variable, `-e NAME` passes on the value that it has here. Both are explained,
with the names that cannot be set, in [placeholders and environment](placeholders.md).

**Checks.** Before anything starts, [preflight](../troubleshooting.md#preflight) looks at all nodes at once. A failure
refuses the job, with exit code 3; a warning is shown and the job goes on. Where nobody asked for a port and 29500 is
taken, the next free one up to 29599 is used, and gpulayer says so.

**Limits.** `--timeout` and `--join-timeout` count from the moment when all nodes are ready and the command is
started. `--join-timeout` is also torchrun's own patience, rounded up to whole seconds. `--lost-after` is how long a
node may be silent before it counts as lost, and how long a node that hears nothing from here goes on before it ends
its part.

**Output.** What a rank writes on stdout comes out on stdout, each line with a tag in front: `[1] ` for node rank 1,
or `[1/3] ` for rank 3 on node rank 1 where a node has several ranks. stderr goes to stderr, and so does all that
gpulayer itself says. Lines tagged with a node alone, on a node with several ranks, are torchrun's. Colours appear on
a terminal only, and not where `NO_COLOR` is set. Once a node has been told to end, its output goes to its files
alone; `--verbose` shows it. `gpulayer run ... | head -1` ends the printing, not the job. The files are described in
[the run directory](run-directory.md).

**Input.** The job reads nothing: its stdin is `/dev/null`.

**Ctrl-C**, or SIGTERM, SIGHUP or SIGQUIT: the first ends the job on every node, with `--grace` seconds between
SIGTERM and SIGKILL. The second sends SIGKILL at once. The third leaves at once and says where something may still
run. Before the job has started, the first one closes all connections and leaves. Ctrl-Z is refused while a job runs.
""",
    "render": """\
Prints what `run` with the same options would send, and opens no connection; the name of a node without a literal
`address` is looked up. `--format text` is for reading, `--format shell` gives one line a node that can be pasted into
a shell there, `--format json` gives what [plan.json](run-directory.md#planjson) holds. Without `--job-id` the job id
is made of the time and chance, so it differs from call to call.
""",
    "hosts": """\
One row a node, ranges expanded. `-` stands for what the map leaves open.
""",
    "demo": """\
Starts two SSH servers on this machine's loopback address, as the user you are, with keys of their own. Then it prints
the plan and runs an all-reduce over two nodes with two ranks each, by the same `render` and `run` that you would
type. It needs PyTorch on this machine: `pip install 'gpulayer[torch]'`. It keeps nothing.
""",
}


def hosts_file_page() -> str:
    """Return the text of docs/reference/hosts-file.md."""
    keys = ", ".join(f"`{key}`" for key in RANGED_KEYS[:-1]) + f" or `{RANGED_KEYS[-1]}`"
    return "\n".join(
        [
            _HOSTS_FILE_HEAD,
            "## Top of the file\n",
            *_fields(HostsFile),
            "## Keys of a node\n",
            "In `[nodes.ID]` for one node or one range, in `[defaults]` for all.\n",
            *_fields(NodeKeys),
            _RANGES.format(keys=keys).rstrip("\n"),
            "",
        ]
    )


def _fields(model: type[BaseModel]) -> list[str]:
    docs = attribute_docstrings(model)
    sections = []
    for name, field in model.model_fields.items():
        kind = _type_words(field.annotation)
        text = f"{kind[0].upper()}{kind[1:]}.{_default_words(field.get_default(call_default_factory=False))}"
        sections.append(f"### `{name}`\n\n{text}\n\n{_wrapped(docs[name])}\n")
    return sections


def _wrapped(text: str) -> str:
    return textwrap.fill(text, 118, break_long_words=False, break_on_hyphens=False)


def _default_words(default: object) -> str:
    """Name a default that can be written in the file; the docstring tells of the others."""
    if isinstance(default, bool):
        return f" Default: `{str(default).lower()}`."
    return f" Default: `{default}`." if isinstance(default, str) and default else ""


def attribute_docstrings(model: type) -> dict[str, str]:
    """Return the text below each field of a class, in one line."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(model)))
    body = tree.body[0].body if isinstance(tree.body[0], ast.ClassDef) else []
    docs = {}
    for field, text in itertools.pairwise(body):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            if not (isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)):
                raise TypeError(f"{model.__name__}.{field.target.id} has no docstring")
            docs[field.target.id] = " ".join(str(text.value.value).split())
    return docs


def _type_words(annotation: object) -> str:
    """Name a field's type as TOML has it."""
    names = {str: "string", int: "whole number", bool: "true or false", NodeKeys: "table"}
    if isinstance(annotation, type) and annotation in names:
        return names[annotation]
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is tuple:
        return "list of whole numbers"
    if origin in {dict, Mapping}:
        return "table of tables" if arguments[1] is NodeKeys else "table of strings"
    if hasattr(annotation, "__metadata__"):  # Annotated[...]
        return _type_words(arguments[0])
    return " or ".join(_type_words(part) for part in arguments if part is not type(None))


def commands_page() -> str:
    """Return the text of docs/reference/commands.md."""
    sections = [_command(command.callback) for command in app.registered_commands if command.callback]
    return "\n".join([_COMMANDS_HEAD, *sections])


def _command(callback: Callable[..., Any]) -> str:
    name = callback.__name__
    parameters = [_described(parameter) for parameter in inspect.signature(callback).parameters.values()]
    rows = [_option_row(kind, info) for kind, info in parameters if _option_names(info)]
    arguments = " SCRIPT [ARGS]..." if len(rows) < len(parameters) else ""
    table = ["| option | value | meaning | left out |", "|---|---|---|---|", *rows, ""] if rows else []
    return "\n".join(
        [
            f"## gpulayer {name}\n",
            f"    gpulayer {name}{' [OPTIONS]' if rows else ''}{arguments}\n",
            f"{_wrapped(' '.join((callback.__doc__ or '').split()))}\n",
            *table,
            _COMMAND_NOTES[name],
        ]
    )


def _described(parameter: inspect.Parameter) -> tuple[object, Any]:
    """Return a parameter's type and typer's description of it."""
    if get_origin(parameter.annotation) is not Annotated:
        raise TypeError(f"{parameter.name} is no option")
    kind, info = get_args(parameter.annotation)
    return kind, info


def _option_names(info: Any) -> list[str]:
    """Return the names of an option, none for an argument. typer takes the first of them for a default."""
    return [
        name for name in (info.default, *(info.param_decls or ())) if isinstance(name, str) and name.startswith("-")
    ]


def _option_row(kind: object, info: Any) -> str:
    """Return an option's row. `--help` puts in brackets, at the end, what holds where the option is left out."""
    text, bracket, default = info.help.rstrip("].").rpartition(" [")
    if not bracket:
        text, default = info.help, ""
    names = ", ".join(f"`{name}`" for name in _option_names(info))
    return f"| {names} | {_value_words(kind, info)} | {text.rstrip('.')} | {default} |"


def _value_words(kind: object, info: Any) -> str:
    choices = [one for one in (*get_args(kind), kind) if isinstance(one, type) and issubclass(one, StrEnum)]
    if choices:
        return ", ".join(f"`{choice}`" for choice in choices[0])
    return f"`{info.metavar}`" if info.metavar else ""


PAGES = {"hosts-file": hosts_file_page, "commands": commands_page}


def main(names: list[str]) -> None:
    """Write the named pages, or all."""
    for name in names or PAGES:
        (REFERENCE / f"{name}.md").write_text(PAGES[name](), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
