"""The documentation says what the code does: links, commands, examples, tables and messages."""

from __future__ import annotations

import ast
import dataclasses
import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import typer

from docs.generate_reference import PAGES, REFERENCE
from gpulayer import errors, events, outcome
from gpulayer.bootstrap import SUPERVISOR
from gpulayer.cli import UsageError, app
from gpulayer.events import ExitStatus, Stage
from gpulayer.hosts import load_hosts
from gpulayer.job import EnvValue, check_env_name
from gpulayer.job_file import load_job
from gpulayer.logs import EVENT_NAMES, RunPaths, event_json, run_json
from gpulayer.outcome import CauseKind, Fate, Ledger, NodeRecord
from gpulayer.placeholders import ESCAPE, PLACEHOLDERS, placeholder_values
from gpulayer.plan import plan_json
from gpulayer.receipt import RunFigures, receipt_json
from gpulayer.signals import ENDING_SIGNALS
from gpulayer.wire import parse_event, parse_hello
from tests.support import plans
from tests.support.docs import ROOT, Block, anchors, blocks, code_spans, indented_lines, links, pages, table_rows
from tests.support.messages import ERROR_CLASSES, messages, plain
from tests.unit.test_architecture import LAYERS, OWNERS

if TYPE_CHECKING:
    from collections.abc import Iterator

TROUBLESHOOTING = ROOT / "docs/troubleshooting.md"
# What typer says of a command line, in troubleshooting.md only.
USAGE_SHAPES = ("Missing argument", "No such", "Invalid value for", "Option ")
PATTERNS = (["run"], ["render"], ["diff"], ["run", "--dry-run"], ["hosts", "init"])
FIGURES = RunFigures(datetime(2026, 11, 29, tzinfo=UTC), 2.0)
SHELL_WORDS = {"|", "&&", ";", ">", "2>"}


def all_blocks(*languages: str) -> list[Block]:
    """Return the fenced blocks in these languages, of all pages."""
    return [block for page in pages() for block in blocks(page) if block.language in languages]


def commands() -> Iterator[tuple[Path, str]]:
    """Yield every command of gpulayer's that a page shows to be typed."""
    for block in all_blocks("sh", "console"):
        text = block.text.replace("\\\n", " ")
        prompt = "$ " if block.language == "console" else ""
        for line in text.splitlines():
            if line.startswith(f"{prompt}gpulayer "):
                yield block.page, line.removeprefix(prompt)
    for page in pages():
        for span in code_spans(page):
            if span.startswith(("gpulayer ", "$ gpulayer ")):
                yield page, span.removeprefix("$ ")


def parse(line: str) -> None:
    """Parse a command line with the real parser; nothing is run."""
    words = shlex.split(line, comments=True)[1:]
    words = words[: next((at for at, word in enumerate(words) if word in SHELL_WORDS), len(words))]
    group: Any = typer.main.get_command(app)
    for parameter in group.params:
        parameter.callback = None  # --install-completion would do so
    context = group.make_context("gpulayer", list(words))
    rest = [*context._protected_args, *context.args]
    if rest:
        name, command, rest = group.resolve_command(context, rest)
        command.make_context(name, rest, parent=context)


def is_pattern(line: str) -> bool:
    """Tell whether a command is a shape, as `gpulayer COMMAND --help` and `gpulayer run`, instead of a line to type."""
    words = line.split()[1:]
    return "COMMAND" in words or "[OPTIONS]" in words or words in PATTERNS


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_somewhere(page: Path) -> None:
    """A relative link names a file that is there, and a heading that is in it."""
    broken = []
    for link in links(page):
        target, _, anchor = link.partition("#")
        path = (page.parent / target).resolve() if target else page
        if target.startswith(("http://", "https://", "mailto:")):
            continue
        if not path.exists() or (anchor and anchor not in anchors(path)):
            broken.append(link)
    assert broken == []


def test_every_command_can_be_parsed() -> None:
    """A command that a page shows is one that gpulayer takes."""
    refused = []
    for page, line in commands():
        if is_pattern(line):
            continue
        try:
            parse(line.replace("...", "train.py"))
        except typer.Exit:
            continue  # --help
        except UsageError as error:
            refused.append(f"{page.name}: {line}: {error}")
    assert refused == []


def test_a_wrong_command_would_be_noticed() -> None:
    """The parser that pages are held to is the real one."""
    with pytest.raises(UsageError):
        parse("gpulayer run --no-such-option train.py")
    with pytest.raises(UsageError):
        parse("gpulayer no-such-command")


def test_every_make_target_is_there() -> None:
    """`make X` on a page is a target of the Makefile."""
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    shown = [span for page in pages() for span in code_spans(page)]
    shown += [line for block in all_blocks("sh", "console") for line in block.text.splitlines()]
    named = {match[1] for text in shown if (match := re.match(r"(?:\$ )?make ([a-z-]+)", text))}
    assert named <= targets


def test_toml_and_json_examples_can_be_read(tmp_path: Path) -> None:
    """A TOML example loads, as a job file or a hosts map if it is one; a JSON example does, line by line if need be."""
    maps = 0
    for block in all_blocks("toml"):
        if "entrypoint" in tomllib.loads(block.text):
            assert load_job(tmp_path / "job.toml", block.text).job()
        elif "nodes" in tomllib.loads(block.text):
            maps += 1
            (tmp_path / "hosts.toml").write_text(block.text, encoding="utf-8")
            assert load_hosts(tmp_path / "hosts.toml").nodes
    for block in all_blocks("json"):
        assert json.loads(block.text)
    for text in hosts_toml_listings():
        maps += 1
        (tmp_path / "hosts.toml").write_text(text, encoding="utf-8")
        assert load_hosts(tmp_path / "hosts.toml").nodes
    assert load_hosts(ROOT / "hosts.example.toml").nodes
    assert maps > 0


def hosts_toml_listings() -> list[str]:
    """Return the maps that pages show as the output of `cat hosts.toml`."""
    listing = re.compile(r"^\$ cat hosts\.toml\n(.*?)(?=^\$ |\Z)", re.MULTILINE | re.DOTALL)
    return [match[1] for block in all_blocks("console") for match in listing.finditer(block.text)]


@pytest.mark.parametrize("name", sorted(PAGES))
def test_generated_pages_are_current(name: str) -> None:
    """`python docs/generate_reference.py` would change nothing."""
    assert (REFERENCE / f"{name}.md").read_text(encoding="utf-8") == PAGES[name]()


def test_every_option_is_on_the_commands_page() -> None:
    """What a command takes is in its table."""
    text = (REFERENCE / "commands.md").read_text(encoding="utf-8")
    group: Any = typer.main.get_command(app)
    for name, command in group.commands.items():
        section = text.partition(f"## gpulayer {name}\n")[2].partition("\n## ")[0]
        taken = {opt for parameter in command.params for opt in parameter.opts if opt.startswith("-")}
        listed = {span for row in table_rows(section) for span in re.findall(r"`(-[^`]+)`", row[0])}
        assert listed == taken - {"-h", "--help"}, name


def test_exit_codes_are_those_of_the_code() -> None:
    """The page lists the codes of the error classes, of an outcome and of the signals, and no others."""
    page = (REFERENCE / "exit-codes.md").read_text(encoding="utf-8")
    first_table = page.partition("## What counts")[0]
    listed = {int(row[0]) for row in table_rows(first_table)}
    classes = {kind.exit_code for kind in vars(errors).values() if getattr(kind, "exit_code", None)}
    ends = {value for name, value in vars(outcome).items() if name.startswith("EXIT_")}
    assert listed == {0, *classes, *ends, *(128 + number for number in ENDING_SIGNALS)}
    kinds = {row[0].strip("`") for row in table_rows(page.partition("## What counts")[2])}
    assert kinds == set(CauseKind)


def test_the_exit_codes_of_causes_are_those_of_the_code() -> None:
    """Each cause leads to the code that the page gives for it."""
    page = (REFERENCE / "exit-codes.md").read_text(encoding="utf-8").partition("## What counts")[2]
    for kind, _, code in table_rows(page):
        ledger = Ledger([NodeRecord(0, "gpu-01", (0,))])
        ledger.cause = outcome.Cause(CauseKind(kind.strip("`")), 1.0, status=ExitStatus(signal=15))
        assert str(ledger.exit_code) in code or ledger.cause.kind is CauseKind.SIGNAL


def test_placeholders_are_those_of_the_code() -> None:
    """The page lists each name, and the example value in its table is what it would be."""
    page = (REFERENCE / "placeholders.md").read_text(encoding="utf-8").partition("## Environment")[0]
    rows = {row[0].strip("`${}"): row[2].strip("`") for row in table_rows(page)}
    placement = plans.place(plans.nodes(8, 8))
    assert rows == placeholder_values(placement, placement.nodes[1], plans.JOB_ID)
    assert set(rows) == {*PLACEHOLDERS, ESCAPE}


def test_the_environment_that_gpulayer_sets_is_on_the_page() -> None:
    """Each variable of a plan, and each that the supervisor adds, has its row; the others refused are listed."""
    text = (REFERENCE / "placeholders.md").read_text(encoding="utf-8")
    section = text.partition("### What gpulayer sets")[2].partition("\n### ")[0]
    listed = {name for row in table_rows(section) for name in re.findall(r"`([A-Z_]+)`", row[0])}
    plan = plans.plan(plans.script(comm_backend="gloo"), [plans.node(1, gpus=[0, 1]), plans.node(2)])
    added = {name for node in plan.nodes for name in node.env}
    on_the_node = {"GPULAYER_MARKER", "GPULAYER_NODE_RANK"}
    on_the_node |= {"GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"}
    assert listed == added | on_the_node
    source = "".join((ROOT / f"gpulayer/{module}.py").read_text(encoding="utf-8") for module in SUPERVISOR)
    assert all(name in source for name in on_the_node)
    refused = text.partition("### Names that cannot be set")[2].partition("\n### ")[0].partition("What the node")[0]
    for name in re.findall(r"`([A-Z_]+)`", refused):
        with pytest.raises(errors.JobError):
            check_env_name(f"{name}X" if name.endswith("_") else name, "a test")


def test_the_run_directory_page_has_every_file_and_field() -> None:
    """Names of files, and of fields in plan.json, receipt.json and events.jsonl, are those that the code writes."""
    text = (REFERENCE / "run-directory.md").read_text(encoding="utf-8")
    paths = RunPaths(Path())
    files = {
        paths.plan,
        paths.receipt,
        paths.events,
        paths.timeline,
        paths.output(0, 0, "stdout"),
        paths.output(0, None, "stderr"),
    }
    assert all(f"`{re.sub(r'(node|rank)0', _hole, str(path))}`" in text for path in files)
    plan = plans.plan(plans.script(env={"A": EnvValue("1")}), plans.nodes(1, 1))
    records = [NodeRecord(node.node_rank, node.node_id, node.ranks) for node in plan.nodes]
    ledger = Ledger(records)
    ledger.apply(events.RankExited(0, 0, ExitStatus(code=1)), 1.0)
    for heading, document in (("plan.json", plan_json(plan)), ("receipt.json", receipt_json(plan, ledger, FIGURES))):
        section = text.partition(f"## {heading}\n")[2].partition("\n## ")[0]
        listed = {name for row in table_rows(section) for name in re.findall(r"`(\w+)`", row[0])}
        assert listed == _keys(document) - {"A"} - set(plan.nodes[0].env), heading
    section = (REFERENCE / "events.md").read_text(encoding="utf-8").partition("## With --json\n")[0]
    listed_events = {row[0].strip("`"): set(re.findall(r"`(\w+)`", row[1])) for row in table_rows(section)}
    assert listed_events == {name: _event_fields(kind) for kind, name in EVENT_NAMES.items()}


def _hole(match: re.Match[str]) -> str:
    return f"{match[1]}<{'r' if match[1] == 'node' else 'g'}>"


def _keys(document: object) -> set[str]:
    """Return the names of all fields, at whatever depth; the words that describe one process are told in the text."""
    if isinstance(document, dict):
        return set(document).union(*(_keys(value) for key, value in document.items() if key not in {"env", "ranks"}))
    if isinstance(document, list):
        return set().union(*(_keys(value) for value in document))
    return set()


def _event_fields(kind: type[events.Event]) -> set[str]:
    fields = {field.name for field in dataclasses.fields(kind)} - {"tail"}
    return fields - {"status"} | ({"code", "signal"} if "status" in fields else set())


def test_events_have_the_fields_that_the_page_is_held_to() -> None:
    """A status is written as code and signal, a tail not at all."""
    line = event_json(events.RankExited(1, 2, ExitStatus(code=17)), 9.582)
    assert set(line) == {"t", "event", *_event_fields(events.RankExited)}
    page = (REFERENCE / "events.md").read_text(encoding="utf-8")
    assert json.dumps(line) in page
    assert {stage for stage in Stage if f"`{stage}`" in page} >= set(Stage) - {Stage.PREPARING}
    page = (REFERENCE / "run-directory.md").read_text(encoding="utf-8")
    assert all(f"`{word}`" in page for word in (*Fate, *outcome.Verified))


def test_the_first_line_of_the_events_is_the_one_on_the_page() -> None:
    """It has these fields, and the version of today."""
    page = (REFERENCE / "events.md").read_text(encoding="utf-8")
    (shown,) = [line for block in page.split("```json\n")[1:] if '"run"' in (line := block.partition("\n")[0])]
    plan = plans.plan(plans.script(), plans.nodes(2))
    first = run_json(plan.job_id, Path("x"), FIGURES.started_at, plan.nodes)
    assert list(json.loads(shown)) == list(first)
    assert list(json.loads(shown)["nodes"][0]) == list(first["nodes"][0])  # type: ignore[index]
    assert json.loads(shown)["version"] == first["version"]


def test_every_message_has_an_entry() -> None:
    """What the source can say when something is wrong stands in troubleshooting.md, as an indented line."""
    shapes = indented_lines(TROUBLESHOOTING)
    found = messages()
    missing = [f"{message.place}: {message.text!r}" for message in found if not message.is_in(shapes)]
    assert missing == []
    raised = {message.made_by for message in found}
    trees = {base.__name__ for kind in ERROR_CLASSES.values() for base in kind.__mro__[1:]}
    elsewhere = {"PrepareError"}  # says what the supervisor's RefusalErrors say
    assert set(ERROR_CLASSES) - trees - elsewhere <= raised  # no class is without a message, so none without an entry


def test_no_entry_is_about_a_message_that_is_gone() -> None:
    """Every word of an entry's message is a word that the source can say."""
    sources = [path.read_text(encoding="utf-8") for path in (ROOT / "gpulayer").glob("*.py")]
    said = " ".join(
        str(node.value)
        for source in sources
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    )
    known = set(re.findall(r"[a-z]{4,}", said))
    stale = {
        shape: words
        for shape in indented_lines(TROUBLESHOOTING)
        if not shape.startswith(USAGE_SHAPES) and (words := set(re.findall(r"\b[a-z]{4,}\b", plain(shape))) - known)
    }
    assert stale == {}


def test_the_architecture_page_is_the_one_that_the_code_is_held_to() -> None:
    """docs/architecture.md has a row for every file, and the layers and owners of tests/unit/test_architecture.py."""
    text = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    tour = re.findall(r"^\| `(\w+\.py)` \|", text, re.MULTILINE)
    files = [path.name for path in (ROOT / "gpulayer").glob("*.py") if not path.name.startswith("__")]
    assert sorted(tour) == sorted(files)
    layers = table_rows(text.partition("## Layers")[2].partition("\n## ")[0])
    assert [set(re.findall(r"`(\w+)`", row[1])) for row in layers] == list(LAYERS)
    owners = table_rows(text.partition("## Who owns")[2].partition("\n## ")[0])
    assert {row[0]: set(re.findall(r"`(\w+)`", row[1])) for row in owners} == OWNERS


def test_the_glossary_is_in_order() -> None:
    """Each word has one row, in the order of the alphabet."""
    words = [row[0].lower() for row in table_rows((ROOT / "docs/glossary.md").read_text(encoding="utf-8"))]
    assert words == sorted(set(words))


EARLY = {"held", "reserved", "helper_output", "helper_end", "prepared", "drained"}  # read before there are events
EARLY |= {"bundle_want", "bundle_kept", "bundle_placed"}
EARLY |= {"list_part", "listed", "file_data", "file_end", "read_done", "forgotten"}


def test_the_frames_on_the_wire_are_frames_of_today() -> None:
    """Each whole frame in docs/how-it-works.md is one that the launcher reads, or one that the supervisor obeys."""
    page = (ROOT / "docs/how-it-works.md").read_text(encoding="utf-8")
    source = "".join((ROOT / f"gpulayer/{module}.py").read_text(encoding="utf-8") for module in SUPERVISOR)
    seen = set()
    for arrow, text in re.findall(r"^(?:h0\d )?(<<|>>) (\{.*\})$", page, re.MULTILINE):
        header = json.loads(text)
        seen.add(header["type"])
        if arrow == ">>" or header["type"] in EARLY:
            assert f'"{header["type"]}"' in source
        elif header["type"] == "hello":
            assert parse_hello(header).hostname == "h00"
        else:
            parse_event(header, b"", 0, (0, 1))
    assert seen >= {"hello", "prepare", "prepared", "start", "started", "rank", "output", "stop", "rank_exit", "exit"}
    assert seen >= {"swept", "drained", "arrived", "ended", "ping", "pong"}


def test_the_fault_matrix_is_the_one_that_is_tested(tmp_path: Path) -> None:
    """docs/reliability.md has a row for each row of tests/faults, and no other."""
    names = tmp_path / "names.json"
    argv = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", "tests/faults"]
    subprocess.run(
        argv, cwd=ROOT, env={**os.environ, "GPULAYER_FAULT_NAMES": str(names)}, check=True, capture_output=True
    )
    page = (ROOT / "docs/reliability.md").read_text(encoding="utf-8")
    matrix = page.partition("## The matrix")[2].partition("\n## ")[0].replace("\\|", "\0")
    assert {row[0].replace("\0", "|") for row in table_rows(matrix)} == set(json.loads(names.read_text()))
