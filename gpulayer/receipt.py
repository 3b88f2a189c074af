"""The receipt: how a job and each of its nodes ended, as plain values for scripts. Pure; outcome.py decides.

RECEIPT_VERSION counts up when a name in the receipt changes its meaning or goes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING

from gpulayer import __version__
from gpulayer.checks_gpu import used_gpus
from gpulayer.output_words import outputs_json
from gpulayer.report import cause_text, kept_folder

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from datetime import datetime

    from gpulayer.errors import RefusedError
    from gpulayer.events import ExitStatus
    from gpulayer.facts import NodeFacts
    from gpulayer.outcome import Ledger, NodeRecord
    from gpulayer.plan import NodeCommand, Plan

RECEIPT_VERSION = 1


@dataclass(frozen=True, slots=True)
class RunFigures:
    """What the ledger does not know of a run. `started_at` has an offset; `facts` has no node that told none."""

    started_at: datetime
    took_s: float
    lost_log_bytes: int = 0
    output_bytes: Callable[[int], int] = lambda node_rank: 0
    facts: Mapping[int, NodeFacts] = field(default_factory=dict)


def receipt_json(plan: Plan, ledger: Ledger, figures: RunFigures) -> dict[str, object]:
    """Return the receipt: the outcome of the job and of each node, with plain values only."""
    cause = ledger.cause
    hide = plan.secrets().hide
    return {
        **_head(plan, ledger.exit_code, figures),
        "lost_log_bytes": figures.lost_log_bytes,
        "cause": cause
        and {
            "kind": cause.kind,
            "at_s": round(cause.at_s, 3),
            "node_rank": cause.node_rank,
            "node_id": None if cause.node_rank is None else ledger.nodes[cause.node_rank].node_id,
            "rank": cause.rank,
            **_status_json(cause.status),
            "text": cause_text(plan, ledger, cause),
        },
        "nodes": [_node_json(plan, node, figures, hide) for node in ledger.nodes],
    }


def refusal_json(plan: Plan, refused: RefusedError, figures: RunFigures) -> dict[str, object]:
    """Return the receipt of a job that did not start: what kept which node from taking part."""
    return {
        **_head(plan, refused.exit_code, figures),
        "text": str(refused),
        "refused": [
            {"node_id": node_id, "problem": type(problem).__name__, "text": str(problem), "hint": problem.hint}
            for node_id, problem in refused.problems.items()
        ],
        "findings": refused.findings,
    }


def _head(plan: Plan, exit_code: int, figures: RunFigures) -> dict[str, object]:
    return {
        "version": RECEIPT_VERSION,
        "gpulayer_version": __version__,
        "job_id": plan.job_id,
        "plan_digest": plan.digest,
        "bundle_digest": plan.bundle and plan.bundle.digest,
        "exit_code": exit_code,
        "started_at": figures.started_at.isoformat(timespec="milliseconds"),
        "ended_at": (figures.started_at + timedelta(seconds=figures.took_s)).isoformat(timespec="milliseconds"),
        "took_s": round(figures.took_s, 3),
    }


def _node_json(plan: Plan, node: NodeRecord, figures: RunFigures, hide: Callable[[str], str]) -> dict[str, object]:
    command = plan.nodes[node.node_rank]
    return {
        "node_rank": node.node_rank,
        "node_id": node.node_id,
        "ssh": command.ssh,
        "address": command.address,
        "outcome": node.fate,
        "verified_clean": node.clean,
        "verified": node.verified,
        "survivors": [{"pid": one.pid, "state": one.state, "command": one.command} for one in node.survivors],
        "hostname": node.hostname,
        "kernel": node.kernel,
        "python": node.python,
        **_facts_json(command, figures.facts.get(node.node_rank)),
        "interface": node.interface,
        "started_s": _rounded(node.started_s),
        "ended_s": _rounded(node.ended_s),
        **_status_json(node.status),
        "lost": node.lost or None,
        "output_bytes": figures.output_bytes(node.node_rank),
        "outputs": outputs_json(node.collected),
        "kept_on_node": kept_folder(plan, node),
        "ranks": [
            {
                "rank": rank,
                "pid": node.rank_pids.get(rank),
                **_status_json(node.rank_statuses.get(rank)),
                "error": hide(node.rank_errors[rank]) if rank in node.rank_errors else None,
            }
            for rank in node.ranks
        ],
    }


def _facts_json(command: NodeCommand, facts: NodeFacts | None) -> dict[str, object]:
    """Return what preflight has seen: null for what was not looked at or could not be read."""
    return {
        "job_python": facts.python.version if facts and facts.python else None,
        "torch": facts.torch.version or None if facts and facts.torch else None,
        "gpus": _gpu_names(command, facts),
    }


def _gpu_names(command: NodeCommand, facts: NodeFacts | None) -> list[str] | None:
    """Return the names of the GPUs that the job uses; null where no tool could tell of any."""
    if facts is None or facts.gpu is None or facts.gpu.state != "ok":
        return None
    return [device.name for device in used_gpus(command, facts.gpu)]


def _status_json(status: ExitStatus | None) -> dict[str, int | None]:
    return {"code": status.code if status else None, "signal": status.signal if status else None}


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 3)
