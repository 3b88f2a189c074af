"""What came back of a job's outputs, in the last lines on the screen and in the receipt. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpulayer.ranges import fold
from gpulayer.values import bytes_text

if TYPE_CHECKING:
    from pathlib import Path

    from gpulayer.events import OutputsCollected
    from gpulayer.outcome import Ledger
    from gpulayer.plan import Plan

_INDENT = "    "


def output_lines(plan: Plan, ledger: Ledger, run_dir: Path) -> list[str]:
    """Return how much is here and where, what is not, and which patterns nothing fits on any node."""
    collected = {node.node_id: node.collected for node in ledger.nodes if node.collected}
    lines = []
    if ranks := [one.node_rank for one in collected.values() if one.files]:
        files = sum(one.files for one in collected.values())
        size = bytes_text(sum(one.size_bytes for one in collected.values()))
        where = run_dir / (f"node{ranks[0]}" if len(ranks) == 1 else "node*") / "outputs"
        lines.append(f"  outputs: {files} file{'' if files == 1 else 's'}, {size}, in {where}")
    alike: dict[str, list[str]] = {}
    for node_id, one in collected.items():
        for text in one.problems:
            alike.setdefault(text, []).append(node_id)
    if alike:
        lines.append("  outputs that did not come back:")
    lines += [f"{_INDENT}{fold(node_ids)}: {text}" for text, node_ids in alike.items()]
    if unmatched := _nowhere(plan, ledger):
        lines.append(f"  no node has anything that fits {', '.join(f'`--outputs {one}`' for one in unmatched)}")
    return lines


def outputs_json(collected: OutputsCollected | None) -> dict[str, object] | None:
    """Return what came back from a node, null where it had nothing or was not asked."""
    if collected is None:
        return None
    return {
        "files": collected.files,
        "bytes": collected.size_bytes,
        "links": collected.links,
        "problems": list(collected.problems),
        "unmatched": list(collected.unmatched),
    }


def _nowhere(plan: Plan, ledger: Ledger) -> list[str]:
    """Return the patterns that nothing fits, where all nodes that have them were asked."""
    found: dict[str, bool] = {}
    for command, node in zip(plan.nodes, ledger.nodes, strict=True):
        for pattern in command.outputs:
            unmatched = node.collected is not None and pattern in node.collected.unmatched
            found[pattern] = found.get(pattern, False) or not unmatched
    return [pattern for pattern, somewhere in found.items() if not somewhere]
