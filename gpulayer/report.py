"""The end of a job in words, the last block on the screen, and as the receipt for scripts. Pure; outcome.py decides.

RECEIPT_VERSION counts up when a name in the receipt changes its meaning or goes.
"""

from __future__ import annotations

import json
import signal
from typing import TYPE_CHECKING

from gpulayer.findings import findings_json, render_findings
from gpulayer.hosts import fold
from gpulayer.messages import describe_status
from gpulayer.outcome import Cause, CauseKind, Fate, Ledger, NodeRecord

if TYPE_CHECKING:
    from pathlib import Path

    from gpulayer.errors import RefusedError
    from gpulayer.events import ExitStatus, Survivor, Tail
    from gpulayer.plan import Plan
    from gpulayer.preflight import PreflightResult

RECEIPT_VERSION = 1
TAIL_LINES = 20
_INDENT = "    "


def render_report(plan: Plan, ledger: Ledger, took_s: float, run_dir: Path) -> str:
    """Return the last block: how the job ended, the first failure with its last words, then every node."""
    code = ledger.exit_code
    lines = [
        f"gpulayer: job {plan.job_id} {_verdict(ledger)} after {took_s:.1f} s" + (f", exit code {code}" if code else "")
    ]
    if ledger.cause:
        lines += [f"  first: {_cause_text(plan, ledger, ledger.cause)}", *_last_words(ledger.cause.tail)]
        lines += _advice(plan, ledger.cause)
    lines += _node_lines(plan, ledger)
    lines.append(f"  logs: {run_dir}")
    return "\n".join(lines) + "\n"


def receipt_json(plan: Plan, ledger: Ledger, took_s: float, lost_log_bytes: int) -> dict[str, object]:
    """Return the receipt: the outcome of the job and of each node, with plain values only."""
    cause = ledger.cause
    return {
        "version": RECEIPT_VERSION,
        "job_id": plan.job_id,
        "exit_code": ledger.exit_code,
        "took_s": round(took_s, 3),
        "lost_log_bytes": lost_log_bytes,
        "cause": cause
        and {
            "kind": cause.kind,
            "at_s": round(cause.at_s, 3),
            "node_rank": cause.node_rank,
            "node_id": None if cause.node_rank is None else ledger.nodes[cause.node_rank].node_id,
            "rank": cause.rank,
            **_status_json(cause.status),
            "text": _cause_text(plan, ledger, cause),
        },
        "nodes": [_node_json(plan, node) for node in ledger.nodes],
    }


def refusal_json(plan: Plan, refused: RefusedError, took_s: float) -> dict[str, object]:
    """Return the receipt of a job that did not start: what kept which node from taking part."""
    return {
        "version": RECEIPT_VERSION,
        "job_id": plan.job_id,
        "exit_code": refused.exit_code,
        "took_s": round(took_s, 3),
        "refused": [
            {"node_id": node_id, "problem": type(problem).__name__, "text": str(problem), "hint": problem.hint}
            for node_id, problem in refused.problems.items()
        ],
        "findings": refused.findings,
    }


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
        "version": RECEIPT_VERSION,
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


def _node_json(plan: Plan, node: NodeRecord) -> dict[str, object]:
    return {
        "node_rank": node.node_rank,
        "node_id": node.node_id,
        "outcome": node.fate,
        "verified_clean": node.clean,
        "survivors": [{"pid": one.pid, "state": one.state, "command": one.command} for one in node.survivors],
        "hostname": node.hostname,
        "kernel": node.kernel,
        "python": node.python,
        "interface": node.interface,
        "started_s": _rounded(node.started_s),
        "ended_s": _rounded(node.ended_s),
        **_status_json(node.status),
        "lost": node.lost or None,
        "kept_on_node": _kept(plan, node),
        "ranks": [
            {"rank": rank, "pid": node.rank_pids.get(rank), **_status_json(node.rank_statuses.get(rank))}
            for rank in node.ranks
        ],
    }


def _status_json(status: ExitStatus | None) -> dict[str, int | None]:
    return {"code": status.code if status else None, "signal": status.signal if status else None}


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 3)


def _verdict(ledger: Ledger) -> str:
    match ledger.cause.kind if ledger.cause else None:
        case None:
            return "ended, but something may still run," if ledger.exit_code else "succeeded"
        case CauseKind.SIGNAL:
            return "was stopped"
        case CauseKind.TIMEOUT:
            return "reached its time limit"
        case _:
            return "failed"


def _cause_text(plan: Plan, ledger: Ledger, cause: Cause) -> str:
    where = "" if cause.node_rank is None else f"node {cause.node_rank} ({ledger.nodes[cause.node_rank].node_id})"
    match cause.kind:
        case CauseKind.RANK:
            what = f"rank {cause.rank} on {where} {describe_status(cause.status)}"
        case CauseKind.COMMAND:
            what = f"torchrun on {where} {describe_status(cause.status)}"
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
    return [_INDENT + line.rstrip("\r") for line in text.split("\n")[-TAIL_LINES:]]


def _error_file_traceback(data: bytes) -> str:
    """Return `message.extraInfo.py_callstack` of torchrun's error.json, "" where it is not as expected."""
    try:
        text = json.loads(data)["message"]["extraInfo"]["py_callstack"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return ""
    return text.strip() if isinstance(text, str) else ""


def _node_lines(plan: Plan, ledger: Ledger) -> list[str]:
    """Return a line for each group of nodes that fared alike, in the order of their first nodes."""
    groups: dict[str, list[NodeRecord]] = {}
    for node in ledger.nodes:
        groups.setdefault(_fate_text(plan, node), []).append(node)
    lines: list[str] = []
    for text, nodes in groups.items():
        lines.append(f"  {fold(node.node_id for node in nodes)}: {text}")
        for node in nodes:
            lines += _remains(plan, node)
    return lines


def _fate_text(plan: Plan, node: NodeRecord) -> str:
    match node.fate:
        case Fate.STOPPED:
            text = "stopped by gpulayer"
        case Fate.FAILED:
            failed = [f"rank {rank} {describe_status(status)}" for rank, status in _failed_ranks(node)]
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


def _remains(plan: Plan, node: NodeRecord) -> list[str]:
    lines: list[str] = [f"{_INDENT}still there: {_survivor_text(one)}" for one in node.survivors]
    if node.may_still_run:
        lines.append(
            f"{_INDENT}hint: on {node.node_id}, `grep -lzx GPULAYER_JOB_ID={plan.job_id} /proc/[0-9]*/environ` "
            "names what is left; end it with `kill -9`"
        )
    if kept := _kept(plan, node):
        lines.append(f"{_INDENT}output that did not arrive is on {node.node_id} in {kept}")
    return lines


def _kept(plan: Plan, node: NodeRecord) -> str | None:
    """Return the folder that was left on the node. A lost one could not say so, and leaves it."""
    left = plan.nodes[node.node_rank].job_dir if node.lost and node.started_s is not None else None
    return node.kept or left


def _survivor_text(survivor: Survivor) -> str:
    return f"pid {survivor.pid}, state {survivor.state}, {survivor.command}"
