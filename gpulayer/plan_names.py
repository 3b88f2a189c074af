"""The nodes of two plans with one word in place of their job ids, so that comparing shows what differs besides. Pure.

The word is put in only where an id stands because it is the job's: in the names that gpulayer makes of it, and where
both plans were typed alike, so that the command or the variable can differ by `$JOB_ID` alone. A word that was typed
and happens to be an id stays.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from gpulayer.plan_file import SavedPlan

    Node = Mapping[str, Any]

JOB_ID = "JOB-ID"


def without_job_ids(old: SavedPlan, new: SavedPlan) -> tuple[dict[str, Node], dict[str, Node]]:
    """Return the nodes of both plans, by node id."""
    if old.job_id == new.job_id:
        return dict(old.nodes), dict(new.nodes)
    one, other = _typed(old), _typed(new)
    words = len(one[0]) if one[0] == other[0] else 0
    variables = {name for name, value in one[1].items() if other[1].get(name) == value}
    first, second = (
        {node_id: _renamed(node, plan.job_id, words, variables) for node_id, node in plan.nodes.items()}
        for plan in (old, new)
    )
    return first, second


def _typed(plan: SavedPlan) -> tuple[list[object], dict[str, object]]:
    """Return the command and the environment as they were typed; nothing where that is not known."""
    recipe = plan.document.get("recipe")
    job = recipe.get("job") if isinstance(recipe, dict) else None
    if not isinstance(job, dict) or not isinstance(job.get("args"), list):
        return [], {}
    env = job.get("env")
    return [job.get("entrypoint"), *job["args"]], env if isinstance(env, dict) else {}


def _renamed(node: Node, job_id: str, words: int, variables: set[str]) -> Node:
    job_dir = str(node.get("job_dir") or "")
    renamed = job_dir.replace(f"gpulayer-{job_id}-n", f"gpulayer-{JOB_ID}-n")

    def within(text: str) -> str:
        return renamed + text[len(job_dir) :] if job_dir and text.startswith(job_dir) else text

    def word(place: int, text: str) -> str:
        if place >= len(argv) - words:
            return text.replace(job_id, JOB_ID)
        return JOB_ID if text == job_id and argv[place - 1] == "--rdzv-id" else within(text)

    def variable(name: str, value: str) -> str:
        if name in variables:
            return value.replace(job_id, JOB_ID)
        return JOB_ID if name == "GPULAYER_JOB_ID" and value == job_id else within(value)

    argv: list[str] = node["argv"]
    texts = {key: within(value) for key, value in node.items() if isinstance(value, str)}
    return {
        **node,
        **texts,
        "argv": [word(place, text) for place, text in enumerate(argv)],
        "env": {name: variable(name, value) for name, value in node["env"].items()},
    }
