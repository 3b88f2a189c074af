"""A real Slurm on a cluster: its controller on the login node, a slurmd on each host, one munged for all of them.

It is not installed: `make faults` unpacks Debian's packages into the virtual environment, which all hosts see.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Self

from tests.support import netns
from tests.support.host import LOGIN_ADDRESS
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Sequence
    from types import TracebackType

    from tests.support.cluster import Cluster

UNPACKED = Path(sys.prefix) / "slurm"
GPUS = 2  # of each host, as far as Slurm knows

_CONF = """\
ClusterName=test
SlurmctldHost=login({address})
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
PluginDir={plugins}
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdSpoolDir=/run/slurmd
SlurmdPidFile=/run/slurmd.pid
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,sched_min_interval=0
GresTypes=gpu
NodeName={nodes} CPUs=2 RealMemory=100
PartitionName=all Nodes=ALL Default=YES State=UP
"""


def _first(pattern: str) -> Path | None:
    """The first file of the unpacked packages that matches."""
    return next(iter(sorted(UNPACKED.glob(pattern))), None)


def missing() -> str:
    """What is missing for a Slurm, in words, or ""."""
    lacking = [name for name in ("slurmctld", "slurmd", "munged") if not _first(f"usr/sbin/{name}*")]
    return f"no {', '.join(lacking)} in {UNPACKED}: `make faults` puts it there" if lacking else ""


class Slurm:
    """Slurm on all hosts of a cluster, as a context manager. Its files are in the cluster's own folder."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._folder = cluster.base / "slurm"
        plugins = _first("usr/lib/**/auth_munge.so")
        hwloc = _first("usr/lib/**/libmunge.so.2")
        if plugins is None or hwloc is None:
            raise RuntimeError(missing() or "Slurm has no plugins")
        self._plugins = plugins.parent
        self.env = {
            "LD_LIBRARY_PATH": f"{hwloc.parent}:{self._plugins}",
            "SLURM_CONF": str(self._folder / "slurm.conf"),
            "PATH": f"{UNPACKED}/usr/bin:{Path(sys.executable).parent}:{netns.SYSTEM_PATH}",
        }
        self._daemons: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Self:
        self._write_files()
        try:
            self._daemon("munged", "--foreground", "--force", *self._munge_options())
            wait_until((self._folder / "munge.socket").exists, f"munged listens, see {self._folder}")
            self._daemon("slurmctld", "-D")
            for host in self._cluster.hosts:
                host.run(["mkdir", "-p", "/run/slurmd"])
                host.start([self._program("slurmd"), "-D", "-d", self._program("slurmstepd")], env=self.env)
            wait_until(lambda: self._idle() == len(self._cluster.hosts), "all nodes are idle", timeout_s=30)
            # Debian 12's Slurm reads no Gres from slurm.conf. This way it grants GPUs, and its slurmd knows of none.
            nodes = ",".join(host.name for host in self._cluster.hosts)
            self.run(["scontrol", "update", f"NodeName={nodes}", f"Gres=gpu:{GPUS}"], check=True)
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def run(
        self, argv: Sequence[str], *, check: bool = False, cwd: Path | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run a program on the login node that finds Slurm."""
        return self._cluster.login.run(argv, env=self.env, check=check, cwd=cwd, timeout_s=90)

    def batch(self, lines: Sequence[str], *options: str) -> tuple[int, str]:
        """Run a batch script to its end: its exit code, and what it wrote."""
        folder = self._cluster.new_folder("batch")
        script = folder / "job.sh"
        script.write_text("\n".join(["#!/bin/sh", *lines, ""]))
        argv = ["sbatch", "--wait", "-o", str(folder / "output"), *options, str(script)]
        done = self.run(argv, cwd=folder)
        return done.returncode, (folder / "output").read_text() + done.stderr

    def _idle(self) -> int:
        return self.run(["sinfo", "-h", "-N", "-t", "idle"]).stdout.count("idle")

    def _daemon(self, name: str, *options: str) -> None:
        log = (self._folder / f"{name}.out").open("wb")
        with log:
            argv = [self._program(name), *options]
            self._daemons.append(self._cluster.login.popen(argv, env=self.env, stdout=log, stderr=log))

    def _program(self, name: str) -> str:
        """Debian calls it `slurmd-wlm`."""
        found = next((path for path in UNPACKED.glob(f"usr/sbin/{name}*") if path.name in (name, f"{name}-wlm")), None)
        if found is None:
            raise RuntimeError(f"no {name} in {UNPACKED}")
        return str(found)

    def _munge_options(self) -> list[str]:
        places = {"socket": "munge.socket", "key-file": "munge.key", "pid-file": "munged.pid"}
        places |= {"log-file": "munged.log", "seed-file": "munged.seed"}
        return [f"--{option}={self._folder / name}" for option, name in places.items()]

    def _write_files(self) -> None:
        self._folder.mkdir()
        (self._folder / "state").mkdir()
        key = self._folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        nodes = ",".join(host.name for host in self._cluster.hosts)
        conf = _CONF.format(address=LOGIN_ADDRESS, folder=self._folder, plugins=self._plugins, nodes=nodes)
        (self._folder / "slurm.conf").write_text(conf)
        (self._folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")  # there may be none at all here

    def _end(self) -> None:
        for host in self._cluster.hosts:
            netns.kill(process.pid for process in host.processes() if process.name.startswith("slurm"))
        for daemon in self._daemons:
            daemon.kill()
            daemon.wait()
        self._daemons.clear()
