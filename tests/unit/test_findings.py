"""Findings: each cause once, in one order, for people and for scripts; and every message stands as golden text."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from gpulayer.checks import judge
from gpulayer.findings import (
    Check,
    CheckOptions,
    Finding,
    Observations,
    Severity,
    failure,
    findings_json,
    merge,
    render_findings,
    size,
    visible_devices,
    warning,
)
from tests.support import plans
from tests.support.findings import ENTRIES, everywhere, gpus, observed, plan_of, reached, said, script
from tests.support.messages import ANYTHING, messages, plain

if TYPE_CHECKING:
    from tests.support.findings import Changes

IDS = [f"gpu-{number:02}" for number in range(1, 6)]


def test_nothing_wrong() -> None:
    """Nodes in good order give no finding and no text, with GPUs or without; so does having seen nothing."""
    plan = plan_of(2, 2, 2)
    reach = {rank: reached("ok") for rank in range(3)}
    assert said(plan, everywhere(plan, gpu=gpus(4, 4)), CheckOptions(backend="nccl"), rendezvous=reach) == ""
    assert said(plan, options=CheckOptions(backend="gloo", strict=True), skew_s={0: 0.1, 1: 0.2, 2: 0.3}) == ""
    assert judge(plan, Observations(), CheckOptions()) == []


def test_a_node_that_is_late() -> None:
    """Nodes that do not answer in time are named first, and the others are judged all the same."""
    plan = plan_of(1, 1, 1, 1)
    hint = (
        "hint: log in and see what hangs: a network file system (`df`), the GPU driver (`nvidia-smi`); "
        "`--preflight-timeout` gives it longer (troubleshooting: no-answer)\n"
    )
    assert said(plan, {0: {"torch": None}}, CheckOptions(limit_s=12), missing={2: "", 3: ""}) == (
        f"gpu-[03-04]: no answer to the checks within 12 s\n{hint}"
        "\n"
        "gpu-01: `/opt/torch/bin/python3` has no torch\n"
        "hint: set `python` in the hosts map to the interpreter that has it, or install it: "
        "`/opt/torch/bin/python3 -m pip install torch` (troubleshooting: torch-missing)\n"
    )
    assert said(plan, missing={1: "its facts", 3: "how it reaches others"}) == (
        "gpu-[02,04]: no answer to the checks within 30 s:\n"
        "  gpu-02: its facts\n"
        "  gpu-04: how it reaches others\n"
        f"{hint}"
    )


def test_facts_that_could_not_be_read() -> None:
    """What a node could not look at is a warning, in plain words and with the reason; nothing else follows from it."""
    plan = plan_of(1, 1)
    lost = {"interfaces": None, "gpu": None, "torch": None, "shm": None, "boot_id": None}
    reasons = {"interfaces": "Operation not permitted", "shm": "x", "torch": "x", "gpu": "x", "boot_id": "x"}
    hint = (
        "hint: the job may still run; what keeps gpulayer from looking there may keep the job from it too "
        "(troubleshooting: fact-unread)\n"
    )
    expected = [
        f"warning: gpu-[01-02]: boot id could not be checked: x\n{hint}",
        f"warning: gpu-[01-02]: the GPUs could not be checked: x\n{hint}",
        f"warning: gpu-[01-02]: network interfaces could not be checked: Operation not permitted\n{hint}",
        f"warning: gpu-[01-02]: /dev/shm could not be checked: x\n{hint}",
        f"warning: gpu-[01-02]: the version of torch could not be checked: x\n{hint}",
    ]
    assert said(plan, everywhere(plan, **lost, errors=reasons)) == "\n".join(expected)


def test_no_fact_is_needed() -> None:
    """A node that can tell nothing at all but that breaks no check."""
    plan = plan_of(1, 1, interface="eth0")
    facts = observed(plan).facts[1]
    names = {name for name in facts.__slots__ if name not in {"errors", "free_ports"}}
    nothing = dict.fromkeys(names) | {"errors": dict.fromkeys(names, "x")}
    findings = judge(plan, observed(plan, everywhere(plan, **nothing)), CheckOptions(backend="nccl"))
    assert {finding.check for finding in findings} == {Check.FACT_UNREAD}


def test_strict() -> None:
    """`--strict` makes every warning a failure; words and order stay."""
    plan = plan_of(1, 1)
    nodes: Changes = {0: {"nofile": 1024}, 1: {"script": script("cd"), "infiniband": ("ib0",), "memlock_bytes": 0}}
    usual = judge(plan, observed(plan, nodes), CheckOptions())
    strict = judge(plan, observed(plan, nodes), CheckOptions(strict=True))
    assert [finding.severity for finding in usual] == [Severity.FAILURE, Severity.WARNING, Severity.WARNING]
    assert [finding.severity for finding in strict] == [Severity.FAILURE] * 3
    assert [(one.check, one.text) for one in strict] == [(one.check, one.text) for one in usual]
    dirty = CheckOptions(strict=True, allow_dirty=True)
    findings = judge(plan, observed(plan, {0: {"gpu": gpus(9000)}}), dirty)
    assert [(one.check, one.severity) for one in findings] == [(Check.GPU_MEMORY, Severity.FAILURE)]


def test_each_cause_once() -> None:
    """Findings that differ by their nodes alone become one, in node order, however they come in."""
    findings = [
        failure(Check.WORKDIR, ["gpu-03"], "gone", "make it"),
        failure(Check.WORKDIR, ["gpu-01"], "gone", "make it"),
        failure(Check.WORKDIR, ["gpu-02"], "closed", "make it"),
        failure(Check.WORKDIR, ["gpu-04"], "gone", "open it"),
    ]
    assert merge(findings, IDS) == [
        Finding(Check.WORKDIR, Severity.FAILURE, ("gpu-01", "gpu-03"), "gone", "make it"),
        Finding(Check.WORKDIR, Severity.FAILURE, ("gpu-02",), "closed", "make it"),
        Finding(Check.WORKDIR, Severity.FAILURE, ("gpu-04",), "gone", "open it"),
    ]


def test_values_that_differ_between_nodes() -> None:
    """One value for all ends the line; several become lines of their own, nodes with equal ones folded."""

    def text(*seen: tuple[str, ...]) -> str:
        findings = [failure(Check.SCRATCH, [IDS[at]], "low", "h", *values) for at, values in enumerate(seen)]
        return merge(findings, IDS)[0].text

    assert text(("a",), ("a",)) == "low: a"
    assert text(("a", "b")) == "low:\n  a\n  b"
    assert text(("a",), ("b",), ("a",)) == "low:\n  gpu-[01,03]: a\n  gpu-02: b"
    assert text(("a",), ("a", "b")) == "low:\n  gpu-01: a\n  gpu-02: a\n  gpu-02: b"
    assert text((), ("b",)) == "low: gpu-02: b"


def test_order() -> None:
    """Failures come before warnings, then checks in their order, then nodes in theirs."""
    findings = [
        warning(Check.FACT_UNREAD, ["gpu-01"], "w", "h"),
        failure(Check.GPU_ECC, ["gpu-02"], "e", "h"),
        failure(Check.PORT_TAKEN, ["gpu-02"], "b", "h"),
        failure(Check.PORT_TAKEN, ["gpu-01"], "a", "h"),
    ]
    assert [finding.text for finding in merge(findings, IDS)] == ["a", "b", "e", "w"]
    assert render_findings(findings).index("warning: gpu-01: w") > render_findings(findings).index("gpu-02: e")


def test_findings_for_scripts() -> None:
    """As data a finding has its check, severity, nodes, text and hint, and is plain JSON."""
    plan = plan_of(1, 1, 1)
    findings = judge(plan, observed(plan, {0: {"nofile": 1024}, 2: {"nofile": 1024}}), CheckOptions())
    data = findings_json(findings)
    assert (
        json.loads(json.dumps(data))
        == data
        == [
            {
                "check": "nofile-low",
                "severity": "warning",
                "nodes": ["gpu-01", "gpu-03"],
                "text": "`ulimit -n` is 1024, 4096 or more is expected",
                "hint": "raise `nofile` in /etc/security/limits.conf on the node",
            }
        ]
    )
    assert findings_json([]) == []


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 KiB"), (65536, "64 KiB"), (1 << 20, "1 MiB"), ((1 << 30) - 1, "1023.9 MiB"), (3 << 29, "1.5 GiB")],
)
def test_sizes(count: int, text: str) -> None:
    """Sizes are rounded down, so that what is too little never looks like enough."""
    assert size(count) == text


def test_the_gpus_of_a_node() -> None:
    """A `gpus` list, or the variable, says which GPUs a node may use; a count does not."""
    by_list, by_count = plans.plan(plans.script(), [plans.node(1, gpus=[2, 3]), plans.node(2, gpus=2)]).nodes
    assert (visible_devices(by_list), visible_devices(by_count)) == (("2", "3"), None)
    hidden = plan_of(1, env={"CUDA_VISIBLE_DEVICES": {"value": "-1"}}).nodes[0]
    assert visible_devices(hidden) == ()


# --- the texts ------------------------------------------------------------------------------------------------------


def golden_texts() -> str:
    """Return all text in the tests of the checks."""
    sources = [path.read_text(encoding="utf-8") for path in Path(__file__).parent.glob("test_checks_*.py")]
    sources.append(Path(__file__).read_text(encoding="utf-8"))
    nodes = [node for source in sources for node in ast.walk(ast.parse(source))]
    return plain("\n".join(str(node.value) for node in nodes if isinstance(node, ast.Constant)))


def test_every_check_has_an_entry() -> None:
    """docs/troubleshooting.md has an entry for each check, in their order, and for nothing else."""
    assert list(ENTRIES) == [str(check) for check in Check]
    assert [check for check, shapes in ENTRIES.items() if not shapes] == []


def test_every_message_stands_as_golden_text() -> None:
    """Each text that a check can say is in a test, word for word, with the hint that names its entry."""
    texts = golden_texts()
    assert [str(check) for check in Check if f"(troubleshooting: {check})" not in texts] == []
    said_by_checks = [one for one in messages() if one.place.startswith(("checks", "findings"))]
    missing = [
        one.text
        for one in said_by_checks
        if not all(piece.strip() in texts for piece in plain(one.text).split(ANYTHING))
    ]
    assert missing == []
    assert len(said_by_checks) >= len(Check)


def test_one_sentence_has_no_full_stop() -> None:
    """Neither a text nor a hint of the checks ends with one."""
    package = Path(judge.__code__.co_filename).parent
    texts = [
        argument
        for path in package.glob("checks*.py")
        for call in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(call, ast.Call) and getattr(call.func, "id", "") in {"failure", "warning"}
        for argument in call.args[2:4]
    ]
    assert len(texts) > len(Check)
    assert [text for text in map(ast.unparse, texts) if text.rstrip("'\"").endswith(".")] == []
