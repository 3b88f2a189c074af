"""A saved plan made again from its own recipe, with the hosts map of today: what no longer holds, and the plan to run.

Only where the very same plan comes out, secrets aside, is it run: by its digest. So what is run is what was reviewed,
and a plan that somebody has written by hand runs nothing that the recipe in it does not say.
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpulayer.errors import PlacementError, PlanFileError, RequestError
from gpulayer.hosts import HostMap, Node, fold
from gpulayer.job import EnvValue, parse_env_options
from gpulayer.plan import ScriptFile, plan_json
from gpulayer.plan_diff import changed_by_hand, differences
from gpulayer.plan_file import SavedPlan, read_plan
from gpulayer.recipe import Recipe, read_recipe, write_recipe
from gpulayer.request import Planned, Request, bundle_of, check_ssh_config, hosts_name
from gpulayer.resolve import resolve_addresses
from gpulayer.review import quote
from gpulayer.sources import read_hosts

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from gpulayer.job import DistributedJob
    from gpulayer.plan import Plan

TODAY = "the plan of today"
MOST_FAULTS = 40
_LOGIN = ("ssh", "user", "port")


@dataclass(frozen=True, slots=True)
class Remade:
    """A saved plan and the request that it is made again by; `faults` say what comes out otherwise today."""

    saved: SavedPlan
    recipe: Recipe
    request: Request
    faults: tuple[str, ...]


def remake(saved: SavedPlan, hosts: str | None, ssh_config: Path | None, environ: Mapping[str, str]) -> Remade:
    """Make a saved plan again, its secrets masked, with the hosts map and the SSH configuration that hold here.

    Those that the plan was made with are not taken for it: a plan may come from somebody else, and an SSH configuration
    can run commands. Raises RequestError where nothing can be compared: no recipe, no hosts map.
    """
    if saved.document.get("recipe") is None:
        raise PlanFileError(
            f"{saved.source}: does not say what it was made from, so it cannot be made again",
            hint="`gpulayer render -o plan.json` writes one that can",
        )
    recipe = read_recipe(saved.document["recipe"])
    check_ssh_config(ssh_config)
    host_map = read_hosts(hosts, environ, Path.cwd())
    known = {node.id: node for node in host_map.nodes if node.id in saved.nodes}
    gone = [node_id for node_id in saved.nodes if node_id not in known]
    addresses, lost = _addresses(list(known.values()), ssh_config)
    nodes = [
        known[node_id] if node_id in addresses else _stand_in(node, known.get(node_id))
        for node_id, node in saved.nodes.items()
    ]
    request = Request(
        job=recipe.job,
        job_id=saved.job_id,
        host_map=HostMap(host_map.source, tuple(nodes), host_map.practice),
        nodelist=",".join(saved.nodes),
        exclude=None,
        ssh_config=ssh_config,
        cwd=Path(recipe.cwd),
        hosts=recipe.hosts,
        only_these=True,
    )
    faults = changed_by_hand(saved) + ([f"{fold(gone)}: not in {host_map.source} any more"] if gone else []) + lost
    try:
        request = replace(request, bundle=bundle_of(recipe.job, request.cwd))
        today = _on_port(request, saved).plan
    except RequestError as error:
        faults += differences(saved, _with_logins(saved, known, addresses), gone)
        faults.append(f"no such plan can be made any more: {error}")
    else:
        faults += _otherwise(saved, today, gone)
    return Remade(saved, recipe, request, tuple(faults))


def plan_to_run(
    source: str,
    hosts: str | None,
    ssh_config: Path | None,
    *,
    env: Sequence[str],
    run_dir: Path | None,
    environ: Mapping[str, str],
) -> tuple[Request, Planned]:
    """Return a saved plan, ready to be run, and the request for it. `env` are `-e` options, for its secrets.

    Raises PlanFileError that tells all that no longer holds.
    """
    remade = remake(read_plan(source), hosts, ssh_config, environ)
    given = parse_env_options(env, environ)
    values = {**_of_map(remade), **given}
    faults = [*remade.faults, *_secret_faults(remade.recipe, given, values), *_used(remade.saved, run_dir)]
    if faults:
        lines = [f"  {line}" for line in faults[:MOST_FAULTS]]
        if more := len(faults) - len(lines):
            lines.append(f"  and {more} more: `gpulayer diff {source}` shows all")
        raise PlanFileError(
            "\n".join([f"{remade.saved.source} cannot be run as it stands, and nothing was contacted", *lines]),
            hint=_hint(remade),
        )
    request = replace(remade.request, job=remade.recipe.filled(values))
    return request, _with_secrets(remade, request)


def _hint(remade: Remade) -> str:
    made_with, today = remade.recipe.hosts, hosts_name(remade.request.host_map)
    hint = "mend what is named there, or make a new plan with `gpulayer render -o FILE`"
    return hint if made_with == today else f"{hint}; this one was made with `--hosts {quote(made_with)}`"


def changes_since(source: str, hosts: str | None, ssh_config: Path | None, environ: Mapping[str, str]) -> list[str]:
    """Return what today's hosts map makes otherwise than a saved plan, a line each. Raises RequestError."""
    return list(remake(read_plan(source), hosts, ssh_config, environ).faults)


def changes_between(first: str, second: str) -> list[str]:
    """Return what differs between two saved plans, a line each. Raises PlanFileError."""
    old, new = read_plan(first), read_plan(second)
    return [*changed_by_hand(old, new), *differences(old, new)]


# --- what holds -----------------------------------------------------------------------------------------------------


def _addresses(nodes: Sequence[Node], ssh_config: Path | None) -> tuple[dict[str, str], list[str]]:
    """Return the addresses that nodes have today, by node id, and what is wrong with the names of the others."""
    try:
        return {node_id: found.value for node_id, found in resolve_addresses(nodes, ssh_config).items()}, []
    except PlacementError as error:
        if len(nodes) == 1:
            return {}, [str(error)]
        one_by_one = [_addresses([node], ssh_config)[0] for node in nodes]
        return {node_id: address for found in one_by_one for node_id, address in found.items()}, [str(error)]


def _stand_in(saved: Mapping[str, Any], node: Node | None) -> Node:
    """Return a node where the map has none, or one without an address, so that the others can be compared."""
    try:
        address = str(ipaddress.ip_address(str(saved.get("address"))))
        if node:
            return node.model_copy(update={"address": address})
        gpus = saved.get("gpus") or saved.get("nproc_per_node")
        return Node.model_validate({"id": saved["node_id"], "address": address, "gpus": gpus})
    except ValueError:  # pydantic's errors are some
        raise PlanFileError(f"node {saved['node_id']} of the plan has no address, or no processes") from None


def _otherwise(saved: SavedPlan, today: Plan, gone: Sequence[str]) -> Iterator[str]:
    """Yield what today's plan has otherwise. Nodes that are `gone` are told already."""
    document: dict[str, Any] = plan_json(today)
    if not _has_sha256(saved):
        document["script"] = saved.document.get("script")
    lines = differences(saved, SavedPlan(TODAY, document), gone)
    yield from lines
    if saved.is_as_made and not (lines or gone) and _to_compare(saved.document) != _to_compare(document):
        yield "this version of gpulayer makes another plan of it"


def _with_logins(saved: SavedPlan, known: Mapping[str, Node], addresses: Mapping[str, str]) -> SavedPlan:
    """Return the saved plan with where its nodes are today."""
    logins = {
        node_id: {**{key: getattr(known[node_id], key) for key in _LOGIN}, "address": address}
        for node_id, address in addresses.items()
    }
    nodes = [{**node, **logins.get(node_id, {})} for node_id, node in saved.nodes.items()]
    return SavedPlan(TODAY, {**saved.document, "nodes": nodes})


def _on_port(request: Request, saved: SavedPlan) -> Planned:
    planned = request.plan(list(saved.nodes))
    return replace(planned, plan=planned.replan(saved.master_port))


def _has_sha256(saved: SavedPlan) -> bool:
    script = saved.document.get("script")
    return isinstance(script, dict) and script.get("sha256") is not None


def _to_compare(document: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in document.items() if key not in {"digest", "gpulayer", "recipe"}}


def _used(saved: SavedPlan, run_dir: Path | None) -> Iterator[str]:
    folder = run_dir or Path.cwd() / "runs" / saved.job_id
    try:
        used = any(folder.iterdir())
    except OSError:
        return
    if used:
        yield f"run directory: {folder} is not empty: has the plan been run? `--run-dir DIR` names another"


# --- secrets --------------------------------------------------------------------------------------------------------


def _of_map(remade: Remade) -> dict[str, EnvValue]:
    """Return the secrets that the hosts map has. One that the job had from elsewhere is to come from there again."""
    found: dict[str, EnvValue] = {}
    for name in remade.recipe.secret_names:
        values = {node.env[name] for node in remade.request.host_map.nodes if name in node.env}
        if len(values) == 1 and name not in remade.recipe.job.env:
            found[name] = EnvValue(values.pop())
    return found


def _secret_faults(recipe: Recipe, given: Mapping[str, EnvValue], values: Mapping[str, EnvValue]) -> Iterator[str]:
    unasked = [name for name in given if name not in recipe.secret_names]
    if unasked:
        yield f"secrets: {', '.join(unasked)}: given with `-e`, and the plan has no secret of that name"
    missing = [name for name in recipe.secret_names if name not in values]
    if missing:
        options = " ".join(f"-e {name}" for name in missing)
        yield f"secrets: {', '.join(missing)}: not kept in the plan: give them again, `{options}`"


def _with_secrets(remade: Remade, request: Request) -> Planned:
    """Make the plan once more, now with its secrets. It is the same one, by its digest."""
    saved, recipe = remade.saved, remade.recipe
    script = saved.document.get("script")
    plan = replace(
        _on_port(request, saved).plan,
        recipe=recipe,
        script=None if script is None else ScriptFile(script.get("path"), script.get("sha256")),
        gpulayer=saved.document["gpulayer"],
        port_is_default=False,  # on the plan's port, or not at all
    )
    if not _same_blanks(recipe, request.job, plan) or plan.digest != saved.document["digest"]:
        raise PlanFileError(
            f"{saved.source}: with the secrets that were given, the job would be another one: "
            f"{', '.join(recipe.secret_names) or 'it has none'}",
            hint="a secret has at least 8 characters and is no number, and nothing else in the command holds it",
        )
    return Planned(plan, lambda _: plan)


def _same_blanks(recipe: Recipe, job: DistributedJob, plan: Plan) -> bool:
    """Tell whether the secrets that were given are masked in the places of the first ones, and nowhere else."""
    environments = [node.env for node in plan.nodes]
    try:
        found = write_recipe(job, environments, cwd=recipe.cwd, hosts=recipe.hosts)
    except PlanFileError:
        return False
    return found == recipe
