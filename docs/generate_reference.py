"""Makes the reference pages that follow from code: `python docs/generate_reference.py hosts-file` writes that page.

Without a name it writes all of them. What a page says beyond the code stands in this file.
"""

from __future__ import annotations

import ast
import inspect
import itertools
import json
import sys
import textwrap
from collections.abc import Callable, Mapping
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args, get_origin

from gpulayer.cli import app
from gpulayer.hosts import RANGED_KEYS, HostsFile, NodeKeys
from gpulayer.job_file import JobFile, RendezvousKeys

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

A file that is named must be there. [hosts.example.toml](../../hosts.example.toml) is one to start from, and `gpulayer
hosts init` writes one. Instead of a map, the first two can also name a hostfile of MPI or DeepSpeed, or an allocation
of Slurm's: [where nodes come from](host-sources.md) tells of these, and of the schema that editors complete keys by.

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

_JOB_FILE_HEAD = """\
# The job file

<!-- Made from the docstrings in gpulayer/job_file.py: `python docs/generate_reference.py job-file` -->

A TOML file that says what to run, so that it can be kept, reviewed and run again:

```toml
entrypoint = "train.py"
args = ["--epochs", "3", "--out", "/data/$JOB_ID"]
nnodes = 4
comm_backend = "nccl"

[env]
NCCL_DEBUG = "WARN"
```

```sh
gpulayer run --job job.toml
```

`gpulayer job init` writes one with every key in it, most of them as comments. `run`, `exec`, `render` and `check` take
`--job` alike. The nodes still come from [the hosts map](hosts-file.md): a job file says how many, not which.

**What wins.** An option on the command line wins over the file, and the file over the hosts map. `-e` does so for each
variable by itself. A SCRIPT on the command line takes the place of `entrypoint`, `args` and `module` together, so that
`gpulayer run --job job.toml other.py` runs `other.py` without the arguments of another script.

**Paths.** A relative `workdir` or `bundle` starts from the folder that the job file is in, wherever gpulayer is
started; where the file has a `bundle`, its `workdir` is a folder of [that](../bundles.md). Without `workdir`, the
hosts map decides as it does for a job without a file. `entrypoint` is a path on the nodes and starts from the working
directory there.

**Mistakes.** A key that is not listed here and a value that cannot be used are errors, with exit code 2, and nothing is
contacted. All of a file's mistakes are told at once. In TOML a key below a `[table]` belongs to that table: write
`[rendezvous]` and `[env]` last.

**Secrets** do not belong in a file that others read. Pass them on from your own environment: `-e HF_TOKEN`.

**Editors.** The first line that `gpulayer job init` writes names a JSON schema. Editors with Taplo, such as the
extension Even Better TOML, then complete the keys, show what they mean, and mark what is no key.
"""

_BACKEND_LINES = """\
## The backend in the script

`comm_backend`, or `--backend`, is for the script to obey; nothing else can. It finds the value in the variable
`GPULAYER_COMM_BACKEND`:

```python
import os
import torch.distributed as dist

dist.init_process_group(os.environ.get("GPULAYER_COMM_BACKEND", "nccl"))
```

Where it is `nccl`, the [checks](../troubleshooting.md#preflight) make sure before the start that each node has GPUs
and a PyTorch with NCCL. Without the key the variable is not set, and the script is left to its own choice.
"""

_COMMANDS_HEAD = """\
# Commands

<!-- Made from what `--help` shows: `python docs/generate_reference.py commands` -->

`gpulayer --help` and `gpulayer COMMAND --help` say the same in short. `gpulayer --version` prints the version, and
`gpulayer --install-completion` teaches your shell to complete options. `python -m gpulayer` is `gpulayer`.

gpulayer's options stand before SCRIPT. All that follows SCRIPT belongs to the script, even where it looks like an
option of gpulayer: in `gpulayer run -N 2 train.py -N 4` the script gets `-N 4`. Long options take `-` and `_` alike,
as torchrun's do: `--nproc_per_node 2`. A time is in seconds and may have a fraction.

An option wins over the key of [the job file](job-file.md) or [the hosts map](hosts-file.md) that has its name. What
the command returns is in [exit codes](exit-codes.md).
"""

_COMMAND_NOTES = {
    "check": """\
The checks are those that `run` makes before it starts anything: see [preflight](../troubleshooting.md#preflight).
Without SCRIPT, no script is looked for. The exit code is 0 where a job would run, with warnings or without, and 3
where it would not. `--format json` gives the findings, the port that a job would use, and how long each node's
connection to it took.
""",
    "run": """\
**What to run** is SCRIPT, or what [the job file](job-file.md) of `--job` says. Options and SCRIPT win over the file.

**What starts the ranks** is torchrun, or what `--launcher` names; how torchruns meet is for `--rendezvous` to say. See
[launchers](launchers.md).

**A saved plan.** `--plan FILE` runs a plan that `render -o` has saved, exactly or not at all. Options that would change
it are refused, and `-e` gives its secrets again: see [saved plans](../plans.md).

**Nodes.** `--nodelist` and `--exclude` narrow the map; then the first N nodes that are left and free are drawn, in the
map's order. That order is the order of node ranks, whatever the order in `--nodelist`. Ranges are written as [in the
map](hosts-file.md#ids-and-ranges).

**Leases.** A node that another job has is not free. With too few, the job is refused with exit code 3, and nothing is
contacted. With `--wait` it waits instead, in order of arrival, for at most as many seconds as are given, or without a
number for as long as it takes. See [leases](../leases.md). `render`, `run --dry-run` and `check` draw as if all nodes
were free: a plan follows from the map and the options alone.

**Ranks.** Node r hosts ranks r*P to (r+1)*P - 1. Without `--nproc-per-node` each node has as many ranks as its `gpus`
say; where nodes differ, ranks run on from node to node, and the plan says so.

**Folder.** The job starts in `--workdir`, else in the node's `workdir`, else in the folder that gpulayer is started
in. A relative `--workdir` starts from that folder too. The folder must be there on every node. With `--bundle`, which
takes [your code to the nodes](../bundles.md), it is the root of the bundle there, or `--workdir` in it.

**Environment.** `-e NAME=VALUE` sets a variable, `-e NAME` passes on the value that it has here. Both are explained,
with the names that cannot be set, in [placeholders and environment](placeholders.md).

**Checks.** Before anything starts, [preflight](../troubleshooting.md#preflight) looks at all nodes at once. A failure
refuses the job, with exit code 3; a warning is shown and the job goes on. Where nobody asked for a port and 29500 is
taken, the next free one up to 29599 is used, and gpulayer says so.

**Host keys** are checked as [security](../security.md#host-keys) says. `--accept-new-host-keys` adds the keys of hosts
that `known_hosts` has nothing of, and tells each with its fingerprint.

**Limits.** `--timeout` and `--join-timeout` count from the moment when all nodes are ready and the command is
started. `--join-timeout` is also torchrun's own patience, rounded up to whole seconds. `--lost-after` is how long a
node may be silent before it counts as lost, and how long a node that hears nothing from here goes on before it ends
its part.

**Output.** What a rank writes on stdout comes out on stdout, each line with a tag in front: `[1] ` for node rank 1,
or `[1/3] ` for rank 3 on node rank 1 where a node has several ranks. stderr goes to stderr, and so does all that
gpulayer itself says. Lines tagged with a node alone, on a node with several ranks, are torchrun's. Colours appear on
a terminal only, and not where `NO_COLOR` is set. Once a node has been told to end, its output goes to its files
alone; `--verbose` shows it. `gpulayer run ... | head -1` ends the printing, not the job. The files are described in
[the run directory](run-directory.md), and `gpulayer logs` shows them again.

**Scripts** read `--json`: what happens, the ranks' output and at last the receipt, as lines of JSON on stdout. See
[events](events.md).

**Input.** The job reads nothing: its stdin is `/dev/null`.

**Ctrl-C**, or SIGTERM, SIGHUP or SIGQUIT: the first ends the job on every node, with `--grace` seconds between
SIGTERM and SIGKILL. The second sends SIGKILL at once. The third leaves at once and says where something may still
run. Before the job has started, the first one closes all connections and leaves. Ctrl-Z is refused while a job runs.
""",
    "render": """\
Prints what `run` with the same options would send, and opens no connection; the name of a node without a literal
`address` is looked up. `--format text` is for reading, `--format shell` gives one line a node as a shell would read it
(less what is made on the node first: the job's folder, and the interface that is chosen there), `--format json` gives
what [plan.json](run-directory.md#planjson) holds. Without `--job-id` the job id is made of the time and chance, so it
differs from call to call. `--output FILE` [saves the plan](../plans.md) in place of printing it, for `run --plan`;
`--output -` prints it as JSON.
""",
    "diff": """\
One line for each thing that differs: see [saved plans](../plans.md#gpulayer-diff). With one PLAN, it is compared with
what today's hosts map makes of it. `-` is stdin. The exit code is 0 where nothing differs, 1 where something does,
and 2 where a plan or the hosts map cannot be read.
""",
    "hosts": """\
One row a node, ranges expanded. `-` stands for what the map leaves open. The state is what this login node's
[record](../leases.md#on-the-login-node) says: `free`, held by a job, or waited for by one. With `--probe` the nodes are
[asked themselves](../leftovers.md#hosts---probe), and may also be `dirty` or `unreachable`.
""",
    "ps": """\
See [what runs on the nodes](../leftovers.md#ps). The exit code is 3 where a node could not be asked; the others are
listed all the same.
""",
    "kill": """\
See [what runs on the nodes](../leftovers.md#kill). The exit code is 0 where nothing of the job is left, 5 where
something may be, 3 where no node could be asked.
""",
    "hosts init": """\
See [where nodes come from](host-sources.md#from-another-source-to-a-map). Nothing is contacted without `--probe`. The
exit code is 3 where a node cannot be asked, and no file is written then.
""",
    "exec": """\
CMD is started once on each node, with its arguments as they were typed: no shell reads them. A `--` before CMD may be
left out if CMD does not begin with `-`. [Placeholders](placeholders.md) are replaced, and CMD finds `MASTER_ADDR`,
`MASTER_PORT`, `NODE_RANK`, `NNODES`, `NPROC_PER_NODE` and `WORLD_SIZE` in its environment: see
[launchers](launchers.md#commands). All else is as for `run`: leases, checks, limits, output, what the first failure
does and what Ctrl-C does. The checks look for CMD on every node, and not for PyTorch. With `--job`, the file's
`launcher` must be `command` where no CMD is given.
""",
    "job init": """\
The file is `job.toml` where none is named. Its keys are those of [the job file](job-file.md).
""",
    "runs": """\
One row a run: when it began, how long it took, its nodes, what gpulayer returned, and how it ended, as its
[receipt](run-directory.md#receiptjson) says. DIR is a folder with run directories in it, or one of them. A run that
goes on holds a lock in its directory, so none is `running` that is not. `ended without a receipt`: its gpulayer was
killed, or the machine went down; `gpulayer ps` shows what it may have left on nodes. Over a network file system
without locks, a run that another machine looks after is taken for one of these.

`--json` prints an object with `version`, which is 1, and `runs`: for each run, an object with `job_id`, `run_dir`,
`state` (`running`, `ended` or `no receipt`), `started_at`, `took_s`, `nodes`, `exit_code` and `outcome`. What is not
known is null.
""",
    "logs": """\
Without RUN it is the last one. Lines are tagged as they were on the screen of the run, what was written on stdout goes
to stdout, and stderr to stderr. Nothing is left out: whoever reads slowly is waited for, and output is here that the
screen hid while the job ended.

Without `--merge` one stream follows the other: rank after rank, stdout before stderr, then what torchrun itself wrote.
`--merge` puts all lines in the order in which they came to the login node, to a tenth of a second, as
[output.jsonl](run-directory.md#outputjsonl) has it. `--follow` shows what is there and then what comes, until the run
is over, and says how it ended. The exit code is 0, whatever the run returned, 130 after Ctrl-C, and 1 where stdout
cannot be written.
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


def job_file_page() -> str:
    """Return the text of docs/reference/job-file.md."""
    return "\n".join(
        [
            _JOB_FILE_HEAD,
            _BACKEND_LINES,
            "## Keys\n",
            *_fields(JobFile),
            "## Keys of [rendezvous]\n",
            *_fields(RendezvousKeys),
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
    if isinstance(default, float):
        return f" Default: `{default:g}`."
    return f" Default: `{json.dumps(default)}`." if isinstance(default, str | int) and default else ""


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
    names = {str: "string", int: "whole number", float: "seconds", bool: "true or false"}
    names |= {NodeKeys: "table", RendezvousKeys: "table"}
    if isinstance(annotation, type) and annotation in names:
        return names[annotation]
    origin, arguments = get_origin(annotation), get_args(annotation)
    if annotation == int | str:
        return "size, such as `200MB`, or a number of bytes"
    if origin is tuple:
        return "list of whole numbers"
    if origin is list:
        return "list of strings"
    if origin is Literal:
        return " or ".join(f"`{json.dumps(choice)}`" for choice in arguments)
    if origin in {dict, Mapping}:
        return "table of tables" if arguments[1] is NodeKeys else "table of strings"
    if hasattr(annotation, "__metadata__"):  # Annotated[...]
        return _type_words(arguments[0])
    return " or ".join(_type_words(part) for part in arguments if part is not type(None))


def commands_page() -> str:
    """Return the text of docs/reference/commands.md."""
    sections = [
        _command(command.name or command.callback.__name__, command.callback)
        for command in app.registered_commands
        if command.callback
    ]
    return "\n".join([_COMMANDS_HEAD, *sections])


def _command(name: str, callback: Callable[..., Any]) -> str:
    signature = inspect.signature(callback).parameters.values()
    parameters = [_described(parameter) for parameter in signature]
    rows = [_option_row(kind, info) for kind, info in parameters if _option_names(info)]
    arguments = "".join(
        f" {info.metavar}" if parameter.default is parameter.empty else _argument_words(info)
        for parameter, (_, info) in zip(signature, parameters, strict=True)
        if not _option_names(info)
    )
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


def _argument_words(info: Any) -> str:
    """Return an argument as `--help` shows it."""
    return f" [{info.metavar}]" + ("..." if info.metavar == "ARGS" else "")


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


PAGES = {"hosts-file": hosts_file_page, "job-file": job_file_page, "commands": commands_page}


def main(names: list[str]) -> None:
    """Write the named pages, or all."""
    for name in names or PAGES:
        (REFERENCE / f"{name}.md").write_text(PAGES[name](), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
