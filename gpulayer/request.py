"""A request for a job, read and checked: which nodes it may draw, and the plan on those that it has drawn."""

from __future__ import annotations

import hashlib
import os
import secrets
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from gpulayer.bundle import pack
from gpulayer.errors import HeldError, JobError, PlanFileError
from gpulayer.launchers import arranged
from gpulayer.leases import machine
from gpulayer.options_job import NO_SCRIPT
from gpulayer.placeholders import placeholder_values, substitute
from gpulayer.placement import NodePool, plan_group
from gpulayer.plan import ScriptFile, build_plan, new_job_id
from gpulayer.recipe import write_recipe
from gpulayer.resolve import is_local_address, machine_keys, resolve_addresses
from gpulayer.sources import SLURM, read_hosts

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from gpulayer.bundle import Bundle
    from gpulayer.hosts import HostMap, Node
    from gpulayer.job import DistributedJob
    from gpulayer.leases import Machine
    from gpulayer.options_job import NodesOptions
    from gpulayer.placement import Hold, Placement
    from gpulayer.plan import Plan
    from gpulayer.recipe import Recipe


@dataclass(frozen=True, slots=True)
class Planned:
    """A plan, and how to have it with another rendezvous port. `unsaved` says why it has no recipe, if it has none."""

    plan: Plan
    replan: Callable[[int], Plan]
    unsaved: PlanFileError | None = None

    @property
    def node_ids(self) -> tuple[str, ...]:
        """The nodes it is for, in node order."""
        return tuple(node.node_id for node in self.plan.nodes)


@dataclass(frozen=True, slots=True)
class Request:
    """A job and the map that it draws from. `hosts` is what `--hosts` would name to have that map again.

    `only_these`: it is for the nodes of `nodelist`, and for no others.
    """

    job: DistributedJob
    job_id: str
    host_map: HostMap
    nodelist: str | None
    exclude: str | None
    ssh_config: Path | None
    cwd: Path
    hosts: str = ""
    only_these: bool = False
    bundle: Bundle | None = None

    def acquire(self, held: Mapping[str, Hold]) -> tuple[str, ...]:
        """Draw the nodes of the job, given which are held. Raises PoolError and HeldError."""
        try:
            return self._pool(held).acquire(self.job.nnodes)
        except HeldError as error:
            hint = "wait for them with `--wait`, or render a plan for others" if self.only_these else error.hint
            raise HeldError(str(error), hint=hint) from None

    def machines(self) -> dict[str, Machine]:
        """Return, by node id, the machines that it may draw."""
        return machines_of([self.host_map.node(node_id) for node_id in self._pool({}).ids], self.ssh_config)

    def plan(self, node_ids: Sequence[str]) -> Planned:
        """Place ranks on these nodes and resolve every command. Raises RequestError; contacts nothing."""
        nodes = [self.host_map.node(node_id) for node_id in node_ids]
        addresses = resolve_addresses(nodes, self.ssh_config)
        nodes = arranged(self.job, nodes, {node.id: addresses[node.id].value for node in nodes})
        placement = plan_group(
            nodes,
            nproc_per_node=self.job.nproc_per_node,
            master_port=self.job.rendezvous.port,
            resolve=lambda node: addresses[node.id],
            is_local=is_local_address,
            practice=self.host_map.practice,
        )
        plan = self._build(placement, self.job)
        script = script_file(self.job, placement, plan)
        unsaved = recipe = None
        try:
            recipe = self._recipe(placement, plan)
        except PlanFileError as error:
            unsaved = error

        def plan_with(port: int) -> Plan:
            made = self._build(replace(placement, master_port=port), self.job)
            return replace(made, script=script, recipe=recipe)

        return Planned(replace(plan, script=script, recipe=recipe), plan_with, unsaved)

    def _build(self, placement: Placement, job: DistributedJob) -> Plan:
        return build_plan(job, placement, self.job_id, self.cwd, self.bundle.ref if self.bundle else None)

    def _recipe(self, placement: Placement, plan: Plan) -> Recipe:
        """Return what the plan can be made from again. Raises PlanFileError where its secrets cannot be left out."""
        environments = [node.env for node in plan.nodes]
        recipe = write_recipe(self.job, environments, cwd=str(self.cwd), hosts=self.hosts)
        again = self._build(placement, recipe.job)
        if [(node.shown_argv(), node.shown_env()) for node in again.nodes] != [
            (node.shown_argv(), node.shown_env()) for node in plan.nodes
        ]:
            raise PlanFileError(
                "the plan cannot be saved: a secret in the command cannot be told from the text around it",
                hint="pass it on in an environment variable of its own: `-e NAME`, with a name such as MY_TOKEN",
            )
        return recipe

    def plan_if_all_were_free(self) -> Planned:
        """Return the plan that follows from the map and the options alone, whatever other jobs hold."""
        return self.plan(self.acquire({}))

    def _pool(self, held: Mapping[str, Hold]) -> NodePool:
        return NodePool(self.host_map.nodes, held).narrow(self.nodelist, self.exclude)


def read_request(options: NodesOptions, job: DistributedJob, job_id: str | None) -> Request:
    """Read the hosts map. Raises RequestError; contacts nothing."""
    cwd = Path.cwd()
    check_ssh_config(options.ssh_config)
    host_map = read_hosts(options.hosts, os.environ, cwd)
    known_id = new_job_id(datetime.now(), secrets.token_hex(2)) if job_id is None else job_id
    hosts = hosts_name(host_map)
    request = Request(job, known_id, host_map, options.nodelist, options.exclude, options.ssh_config, cwd, hosts)
    return replace(request, bundle=bundle_of(job, cwd))


def hosts_name(host_map: HostMap) -> str:
    """Return what `--hosts` would name to have this map again, from any folder."""
    return host_map.source if host_map.source.startswith("/") else SLURM


def bundle_of(job: DistributedJob, cwd: Path) -> Bundle | None:
    """Return the files that a job takes along, None where it takes none. Raises JobError."""
    if job.bundle is None:
        return None
    workdir = job.workdir
    if workdir is not None and (workdir.startswith("/") or ".." in workdir.split("/")):
        raise JobError(
            f"`--workdir {workdir}`: with `--bundle`, the working directory is a folder of the bundle",
            hint="write its path from the bundle's root, or leave it out for the root itself",
        )
    bundle = pack(cwd / job.bundle, job.max_bundle_bytes)
    is_file = not job.module and job.launcher != "command" and job.entrypoint != NO_SCRIPT
    bundle.check_inside(job.entrypoint if is_file else None, workdir)
    return bundle


def script_file(job: DistributedJob, placement: Placement, plan: Plan) -> ScriptFile | None:
    """Return the script as this machine sees it where the nodes look for it; None for what is no file of theirs."""
    if job.module or job.bundle or job.launcher == "command":
        return None
    paths = {
        Path(node.workdir) / substitute(job.entrypoint, placeholder_values(placement, placed, plan.job_id))
        for node, placed in zip(plan.nodes, placement.nodes, strict=True)
    }
    return ScriptFile(str(path := paths.pop()), _sha256(path)) if len(paths) == 1 else None


def _sha256(path: Path) -> str | None:
    try:
        if not path.is_file():  # a pipe would be waited for
            return None
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except (OSError, ValueError):  # ValueError: a name that no file can have
        return None


def machines_of(nodes: Sequence[Node], ssh_config: Path | None) -> dict[str, Machine]:
    """Return which machine, or which part of one, each of these nodes is, by node id."""
    keys = machine_keys(nodes, ssh_config)
    return {node.id: machine(node, keys[node.id]) for node in nodes}


def check_ssh_config(path: Path | None) -> None:
    """Raise JobError for a file that is not there: read much later, it would be every node's fault."""
    if path and str(path) != "none" and not path.is_file():
        raise JobError(f"`--ssh-config {path}`: there is no such file", hint="`--ssh-config none` reads none")
