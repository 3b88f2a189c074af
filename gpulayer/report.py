"""The end of a job in words: the last block on the screen. And what the checks alone have found. Pure.

outcome.py decides how a job ended; receipt.py tells it to scripts.
"""

from __future__ import annotations

import json
import signal
from typing import TYPE_CHECKING

from gpulayer.findings import findings_json, render_findings
from gpulayer.hosts import fold
from gpulayer.messages import describe_status
from gpulayer.outcome import (
    EXIT_INCOMPLETE,
    LOGS_INCOMPLETE,
    OUTPUTS_MISSING,
    Cause,
    CauseKind,
    Fate,
    Ledger,
    NodeRecord,
)
from gpulayer.output_words import output_lines
from gpulayer.untrusted import printable

if TYPE_CHECKING:
    from pathlib import Path

    from gpulayer.events import ExitStatus, Survivor, Tail
    from gpulayer.plan import Plan
    from gpulayer.preflight import PreflightResult

CHECK_VERSION = 1  # counts up when a name in `check --format json` changes its meaning or goes
TAIL_LINES = 20
_INDENT = "    "


def render_report(plan: Plan, ledger: Ledger, took_s: float, run_dir: Path, found_by: str = "") -> str:
    """Return the last block: how the job ended, the first failure with its last words, then every node.

    `found_by` are the options by which the nodes were found, for the command that a hint names.
    """
    code = ledger.exit_code
    lines = [
        f"gpulayer: job {plan.job_id} {_verdict(ledger)} after {took_s:.1f} s" + (f", exit code {code}" if code else "")
    ]
    if ledger.cause:
        lines += [f"  first: {cause_text(plan, ledger, ledger.cause)}", *_last_words(ledger.cause.tail)]
        lines += _advice(plan, ledger.cause)
    lines += [
        *_node_lines(plan, ledger),
        *_kill_later(plan, ledger, found_by),
        *output_lines(plan, ledger, run_dir),
        f"  logs: {run_dir}{', incomplete' if ledger.logs_lost else ''}",
    ]
    return "\n".join(lines) + "\n"


def render_check(plan: Plan, result: PreflightResult) -> str:
    """Return what the checks found, for people: every finding, then one line that says what follows."""
    ids = fold(node.node_id for node in plan.nodes)
    verdict = f"{ids}: a job would {'not ' if result.failures else ''}run"
    if result.warnings and not result.failures:
        verdict += f", with {len(result.warnings)} warning{'s' if len(result.warnings) > 1 else ''}"
    blocks = [result.moved, render_findings(result.findings).rstrip(), verdict]
    return "\n\n".join(block for block in blocks if block) + "\n"


def check_json(plan: Plan, result: PreflightResult) -> str:
    """Return what the checks found, for scripts."""
    found = {
        "version": CHECK_VERSION,
        "nodes": [node.node_id for node in plan.nodes],
        "master_port": result.plan.master_port,
        "ok": not result.failures and not result.problems,
        "refused": [{"node_id": node_id, "text": str(one)} for node_id, one in result.problems.items()],
        "findings": findings_json(result.findings),
        "rendezvous_rtt_ms": {
            plan.nodes[rank].node_id: reached.rtt_ms for rank, reached in result.observations.rendezvous.items()
        },
    }
    return json.dumps(found, indent=2) + "\n"


def _verdict(ledger: Ledger) -> str:
    match ledger.cause.kind if ledger.cause else None:
        case None:
            incomplete = LOGS_INCOMPLETE if ledger.logs_lost else OUTPUTS_MISSING
            return {0: "succeeded", EXIT_INCOMPLETE: f"{incomplete},"}.get(
                ledger.exit_code, "ended, but something may still run,"
            )
        case CauseKind.SIGNAL:
            return "was stopped"
        case CauseKind.TIMEOUT:
            return "reached its time limit"
        case _:
            return "failed"


def cause_text(plan: Plan, ledger: Ledger, cause: Cause) -> str:
    """Return in words what went wrong first."""
    where = "" if cause.node_rank is None else f"node {cause.node_rank} ({ledger.nodes[cause.node_rank].node_id})"
    match cause.kind:
        case CauseKind.RANK:
            what = f"rank {cause.rank} on {where} {describe_status(cause.status)}"
        case CauseKind.COMMAND:
            what = f"{plan.command_name} on {where} {describe_status(cause.status)}"
        case CauseKind.LOST:
            what = f"{where} was lost: {cause.detail}"
        case CauseKind.JOIN_TIMEOUT:
            missing = fold(ledger.nodes[node_rank].node_id for node_rank in cause.missing)
            return f"within --join-timeout, {cause.detail}, not all ranks had started on {missing}"
        case CauseKind.TIMEOUT:
            return f"--timeout, {cause.detail}, was reached"
        case CauseKind.SIGNAL:
            what = f"gpulayer {describe_status(cause.status).replace('was killed by', 'received')}"
    return f"{what}, {cause.at_s:.1f} s into the job"


def _last_words(tail: Tail) -> list[str]:
    """Return the traceback of the error file where there is one, else the last lines of stderr, else of stdout."""
    traceback = _error_file_traceback(tail.error_file)
    if traceback:
        return ["  its error file says:", *_block(traceback)]
    for name, data in (("stderr", tail.stderr), ("stdout", tail.stdout)):
        text = data.decode("utf-8", "replace").strip()
        if text:
            return [f"  its last lines on {name}:", *_block(text)]
    return []


def _advice(plan: Plan, cause: Cause) -> list[str]:
    """Return what follows where torchrun could not have the rendezvous port, which was free when it was checked."""
    said = cause.tail.stderr
    if cause.kind is not CauseKind.COMMAND or b"port: %d" % plan.master_port not in said or b"EADDRINUSE" not in said:
        return []
    taken = f"another process took port {plan.master_port} on {plan.nodes[0].node_id} after it was found free"
    return [f"  hint: {taken}: start the job again, or name another port with `--master-port`"]


def _block(text: str) -> list[str]:
    lines = [line.rstrip("\r").expandtabs() for line in text.split("\n")[-TAIL_LINES:]]
    return [_INDENT + printable(line) for line in lines]


def _error_file_traceback(data: bytes) -> str:
    """Return `message.extraInfo.py_callstack` of torchrun's error.json, "" where it is not as expected."""
    try:
        text = json.loads(data)["message"]["extraInfo"]["py_callstack"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return ""
    return text.strip() if isinstance(text, str) else ""


def _node_lines(plan: Plan, ledger: Ledger) -> list[str]:
    """Return a line for each group of nodes that fared alike, in the order of their first nodes."""
    groups: dict[tuple[str, tuple[Survivor, ...]], list[NodeRecord]] = {}
    for node in ledger.nodes:
        groups.setdefault((_fate_text(plan, node), node.survivors), []).append(node)
    lines: list[str] = []
    for (text, survivors), nodes in groups.items():
        lines.append(f"  {fold(node.node_id for node in nodes)}: {text}")
        lines += [f"{_INDENT}still there: {_survivor_text(one)}" for one in survivors]
        lines += _kept_lines(plan, nodes)
    return lines


def _fate_text(plan: Plan, node: NodeRecord) -> str:
    match node.fate:
        case Fate.STOPPED:
            text = "stopped by gpulayer"
        case Fate.FAILED:
            failed = [f"rank {rank} {describe_status(status)}" for rank, status in _failed_ranks(node)]
            if not node.ranks and node.status:
                failed = [f"{plan.command_name} {describe_status(node.status)}"]
            text = "failed" + (f": {', '.join(failed)}" if failed else "")
        case Fate.LOST:
            text = f"lost: {node.lost}"
        case fate:
            text = str(fate)
    if node.fate is Fate.NEVER_STARTED:
        return text
    if node.clean:
        return f"{text}; verified clean"
    if node.may_still_run:
        return f"{text}; something may still run there"
    within_s = plan.lost_after_s + plan.grace_s
    return f"{text}; could not be verified, its supervisor ends its part by itself within {within_s:g} s"


def _failed_ranks(node: NodeRecord) -> list[tuple[int, ExitStatus]]:
    """Return the ranks that failed by themselves; a SIGTERM is torchrun's way of ending the others."""
    failed = [(rank, status) for rank, status in sorted(node.rank_statuses.items()) if not status.ok]
    return [(rank, status) for rank, status in failed if status.signal != signal.SIGTERM] or failed


def _kept_lines(plan: Plan, nodes: list[NodeRecord]) -> list[str]:
    """Return where output was left: on several nodes in folders that differ in the node rank alone, `*` there."""
    groups: dict[str, list[tuple[str, str]]] = {}
    for node in nodes:
        if kept := kept_folder(plan, node):
            groups.setdefault(kept.removesuffix(str(node.node_rank)), []).append((node.node_id, kept))
    return [
        f"{_INDENT}output that did not arrive is on {fold(node_id for node_id, _ in group)} in "
        f"{group[0][1] if len(group) == 1 else f'{stem}*'}"
        for stem, group in groups.items()
    ]


def _kill_later(plan: Plan, ledger: Ledger, found_by: str) -> list[str]:
    """Return the command for the nodes where something may still run, or could not be looked for."""
    left = [node.node_id for node in ledger.nodes if not node.clean and node.fate is not Fate.NEVER_STARTED]
    if not left:
        return []
    return [f"  hint: `gpulayer kill {plan.job_id} -w {fold(left)}{found_by}` looks there again, and ends what is left"]


def kept_folder(plan: Plan, node: NodeRecord) -> str | None:
    """Return the folder that was left on the node. A lost one could not say so, and leaves it."""
    left = plan.nodes[node.node_rank].job_dir if node.lost and node.started_s is not None else None
    return node.kept or left


def _survivor_text(survivor: Survivor) -> str:
    return f"pid {survivor.pid}, state {survivor.state}, {survivor.command}"
