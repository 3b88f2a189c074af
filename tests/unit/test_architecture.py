"""The shape of the package: layers, one owner for each library, what runs on nodes, sizes, and the error tree."""

from __future__ import annotations

import ast
import re
import signal
import sys
import tomllib
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from gpulayer import errors, events, outcome, signals
from gpulayer.bootstrap import PROBE, SUPERVISOR
from gpulayer.outcome import Ledger

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "gpulayer"

# From the top down: a module imports from layers below its own, and from no other. Imports for types alone count.
LAYERS = (
    {"__main__"},
    {"cli"},
    {"hosts_init", "job_init", "options_init", "plan_again"},
    {"demo", "launch", "leftovers", "replay", "request"},
    {"options_history", "options_job", "receipt"},
    {"options_plan", "plan_diff"},
    {"console", "fanout", "history", "json_screen", "options", "report", "review", "states"},
    {"collecting", "holds", "output_words", "preflight", "sending", "verify", "visits"},
    {"remote", "logs", "messages", "screen", "lines", "outcome", "remains"},
    {"session"},
    {"checks"},
    {"checks_gpu", "checks_network", "checks_reach", "checks_room", "checks_software"},
    {"findings"},
    {"bootstrap", "facts", "inventory", "wire", "ssh", "practice"},
    {"ssh_link"},
    {"ssh_errors"},
    {"known_hosts", "ssh_config"},
    {"plan_names"},
    {"plan_file"},
    {"job_file", "plan"},
    {"launchers"},
    {"other_launchers", "torchrun"},
    {"parts", "recipe"},
    {"placeholders"},
    {"leases"},
    {"placement"},
    {"resolve", "sources"},
    {"hostfile", "map_text", "slurm", "ssh_hosts"},
    {"hosts", "job"},
    {"toml_files"},
    {"problems", "ranges", "bundle"},
    {"masks", "output_files", "timeline", "typed", "values"},
    {"supervisor", "probe"},
    {"guard", "survey", "node_bundle", "node_outputs"},
    {"ending", "environment", "programs", "ranks", "streams", "network", "node_lease", "probe_gpu"},
    {
        "errors",
        "events",
        "frames",
        "command_words",
        "lease_folder",
        "processes",
        "probe_host",
        "signals",
        "untrusted",
        "demo_allreduce",
        "__init__",
    },
)
OWNERS = {
    "asyncssh": {"known_hosts", "practice", "ssh", "ssh_config", "ssh_errors", "ssh_link"},
    "ClusterShell": {"ranges"},
    "pathspec": {"bundle"},
    "pydantic": {"hosts", "job", "job_file", "recipe"},
    "rich": {"console"},
    "torch": {"demo_allreduce"},  # which runs on the nodes
    "typer": {"cli", "command_words", "options", "options_history", "options_init", "options_job", "options_plan"},
    "uvloop": {"launch"},
}
MOST_LINES = 500
SENT_TO_NODES = [(module, sent[:place]) for sent in (SUPERVISOR, PROBE) for place, module in enumerate(sent)]


def _modules() -> list[str]:
    return sorted(path.stem for path in PACKAGE.glob("*.py"))


@cache
def _tree(module: str) -> ast.Module:
    return ast.parse((PACKAGE / f"{module}.py").read_text(encoding="utf-8"))


def _imported(module: str) -> Iterator[str]:
    """Every module that is imported anywhere in a file, by its full name."""
    for node in ast.walk(_tree(module)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module == "gpulayer":
            known = set(_modules())
            yield from (
                f"gpulayer.{alias.name}" if alias.name in known else "gpulayer.__init__" for alias in node.names
            )
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module


def _own_imports(module: str) -> set[str]:
    return {name.split(".")[1] for name in _imported(module) if name.startswith("gpulayer.")}


def _libraries(module: str) -> set[str]:
    tops = {name.split(".")[0] for name in _imported(module)}
    return tops - set(sys.stdlib_module_names) - {"gpulayer"}


def test_every_module_has_one_layer() -> None:
    """A new file is given its place in LAYERS."""
    placed = [module for layer in LAYERS for module in layer]
    assert sorted(placed) == _modules()


@pytest.mark.parametrize("module", _modules())
def test_imports_point_down(module: str) -> None:
    """A module knows only modules of the layers below its own."""
    level = next(number for number, layer in enumerate(LAYERS) if module in layer)
    below = set().union(*LAYERS[level + 1 :])
    assert _own_imports(module) - below == set()


def test_each_library_has_its_owners() -> None:
    """Nobody else imports a library, so that what it does is translated in one place."""
    found: dict[str, set[str]] = {}
    for module in _modules():
        for library in _libraries(module):
            found.setdefault(library, set()).add(module)
    assert found == OWNERS


def test_what_is_imported_is_what_is_declared() -> None:
    """pyproject.toml names every library that is used, and none that is not."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    declared = [*project["dependencies"], *extras["torch"], *extras["uvloop"]]
    assert sorted(re.split(r"[<>=~!;\[ ]", text)[0] for text in declared) == sorted(OWNERS)


@pytest.mark.parametrize(("module", "sent_before"), SENT_TO_NODES)
def test_what_is_sent_to_nodes_stands_alone(module: str, sent_before: tuple[str, ...]) -> None:
    """It needs nothing but what is sent before it and the standard library of Python 3.8."""
    source = (PACKAGE / f"{module}.py").read_text(encoding="utf-8")
    ast.parse(source, feature_version=(3, 8))
    assert _own_imports(module) <= set(sent_before)
    assert _libraries(module) == set()


@pytest.mark.parametrize("module", _modules())
def test_a_module_can_be_read_in_one_sitting(module: str) -> None:
    """No file is longer than its limit."""
    lines = (PACKAGE / f"{module}.py").read_text(encoding="utf-8").count("\n")
    assert lines <= MOST_LINES


@pytest.mark.parametrize("module", sorted(set(_modules()) - {"demo_allreduce"}))
def test_nothing_asserts_and_nothing_prints(module: str) -> None:
    """Checks hold under -O too, and what people see goes through the console."""
    nodes = list(ast.walk(_tree(module)))
    assert not [node.lineno for node in nodes if isinstance(node, ast.Assert)]
    names = [node.func for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)]
    assert not [name.lineno for name in names if name.id == "print"]


def test_errors_are_caught_once() -> None:
    """Only the command line turns a GpulayerError into a screen and an exit code."""
    catching = [
        module
        for module in _modules()
        for node in ast.walk(_tree(module))
        if isinstance(node, ast.ExceptHandler) and node.type and "GpulayerError" in ast.unparse(node.type)
    ]
    assert catching == ["cli"]


# --- the error tree -------------------------------------------------------------------------------------------------


def _error_classes() -> dict[str, type[errors.GpulayerError]]:
    return {
        name: kind
        for name, kind in vars(errors).items()
        if isinstance(kind, type) and issubclass(kind, errors.GpulayerError)
    }


def test_the_drawing_of_the_error_tree_is_right() -> None:
    """errors.py draws every class in its place, with its exit code where a branch begins."""
    drawn: list[tuple[str, str, str | None]] = []
    parents = {0: ""}
    for line in (errors.__doc__ or "").splitlines():
        match = re.match(r"([│ ]*)(?:[├└]── )?(\w+Error)(?: +(\d))?(?: |$)", line)
        if match:
            depth = 0 if match[2] == "GpulayerError" else len(match[1]) // 4 + 1
            parents[depth + 1] = match[2]
            drawn.append((match[2], parents[depth], match[3]))
    real = {name: kind.__bases__[0].__name__ for name, kind in _error_classes().items()}
    assert {name: parent or "Exception" for name, parent, _ in drawn} == real
    for name, _, code in drawn:
        assert code is None or _error_classes()[name].exit_code == int(code)


@pytest.mark.parametrize("name", sorted(set(_error_classes()) - {"GpulayerError", "RequestError", "NodeError"}))
def test_every_error_is_raised_somewhere(name: str) -> None:
    """No class of the tree is there for nothing, and each has a docstring and an exit code."""
    kind = _error_classes()[name]
    assert kind.__doc__
    assert kind.exit_code in {2, 3}
    used = {
        module
        for module in set(_modules()) - {"errors"}
        for node in ast.walk(_tree(module))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == name
    }
    assert used


def test_exit_codes_are_documented() -> None:
    """docs/reference/exit-codes.md has a row for each exit code, and each kind of cause."""
    page = ROOT / "docs/reference/exit-codes.md"
    if not page.exists():
        pytest.skip("the page is not written")
    text = page.read_text(encoding="utf-8")
    codes = {0, *(kind.exit_code for kind in _error_classes().values())}
    codes |= {value for name, value in vars(outcome).items() if name.startswith("EXIT_")}
    codes |= {128 + number for number in signals.ENDING_SIGNALS}
    assert {int(code) for code in re.findall(r"^\| (\d+) \|", text, re.MULTILINE)} == codes
    kinds = [str(kind) for kind in outcome.CauseKind]
    assert [kind for kind in kinds if f"| `{kind}` |" not in text] == []


# --- events ---------------------------------------------------------------------------------------------------------


def test_every_event_is_frozen_and_has_its_name_in_the_union() -> None:
    """`Event` holds each class of events.py that can happen."""
    parts = {events.ExitStatus, events.Tail, events.Survivor}
    classes = {
        kind for kind in vars(events).values() if isinstance(kind, type) and hasattr(kind, "__dataclass_fields__")
    }
    assert set(events.Event.__args__) == classes - parts
    assert all(vars(kind)["__dataclass_params__"].frozen for kind in classes)


def test_signals_that_end_a_job_have_the_exit_codes_of_a_shell() -> None:
    """128 and the number, as every shell says it; SIGKILL cannot be caught and is none of them."""
    assert set(signals.ENDING_SIGNALS) == {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT}
    ledger = Ledger([])
    ledger.interrupted(signal.SIGHUP, 1.0)
    assert ledger.exit_code == 129
