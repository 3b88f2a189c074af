"""Preflight on what every node runs and has room for: torch, NCCL, the script, folders, clocks, limits."""

from __future__ import annotations

import hashlib
import sys
from typing import TYPE_CHECKING

import pytest

from tests.support.jobs import FAKE_TORCH, map_with_fake_torch, run, write_script
from tests.support.preflight import check, nodes_env, refused, write_program, write_torch

if TYPE_CHECKING:
    from tests.support.cluster import Cluster, TomlValue

pytestmark = pytest.mark.ssh

PYTHON = ".".join(map(str, sys.version_info[:3]))
SCRATCH_HINT = "or name another with `scratch` in the hosts map (troubleshooting: scratch)"
LATE = """
import time
now = time.time
time.time = lambda: now() - 60
"""


def test_missing_and_different_torches_are_refused_with_a_table(cluster4: Cluster) -> None:
    """Three stubs that raise when imported, so only read: one torch is older and one NCCL differs; h03 has none."""
    folders = {
        "h00": write_torch(cluster4.new_folder("torch"), "2.7.1+cu126", cuda="12.6", nccl="2.26.2"),
        "h01": write_torch(cluster4.new_folder("torch"), "2.6.0+cu124", cuda="12.4", nccl="2.21.5"),
        "h02": write_torch(cluster4.new_folder("torch"), "2.7.1+cu126", cuda="12.6", nccl="2.27.5"),
    }
    nodes = nodes_env({name: {"PYTHONPATH": str(folder)} for name, folder in folders.items()})
    system = "/usr/bin/python3"
    hosts = cluster4.hosts_toml(defaults={"python": system}, nodes=nodes)
    version = (
        cluster4.hosts[0].run([system, "-c", "import sys; print('%d.%d.%d' % sys.version_info[:3])"]).stdout.strip()
    )
    done = check(cluster4, hosts)
    pad = " " * (len(version) - len("Python"))
    assert done.findings == [
        (
            f"h03: `{system}` has no torch\n"
            "hint: set `python` in the hosts map to the interpreter that has it, or install it: "
            f"`{system} -m pip install torch` (troubleshooting: torch-missing)"
        ),
        (
            "h[00-03]: different versions of torch, CUDA and NCCL:\n"
            f"  nodes  Python{pad}  torch        CUDA  NCCL\n"
            f"  h00    {version}  2.7.1+cu126  12.6  2.26.2\n"
            f"  h01    {version}  2.6.0+cu124  12.4  2.21.5\n"
            f"  h02    {version}  2.7.1+cu126  12.6  2.27.5\n"
            f"  h03    {version}  -            -     -\n"
            "hint: give all nodes the same environment: `python` in the hosts map names each node's interpreter "
            "(troubleshooting: torch-differs)"
        ),
    ]
    assert (done.returncode, done.verdict) == (3, "h[00-03]: a job would not run")


def test_nccl_is_refused_where_torch_has_no_cuda_or_the_node_no_gpu(cluster2: Cluster) -> None:
    """Both are told of before NCCL would say it in its own way."""
    folders = [
        write_torch(cluster2.new_folder("torch"), "2.7.1+cu126", cuda="12.6", nccl="2.26.2"),
        write_torch(cluster2.new_folder("torch"), "2.7.1+cpu"),
    ]
    nodes = nodes_env({f"h0{index}": {"PYTHONPATH": str(folder)} for index, folder in enumerate(folders)})
    done = check(cluster2, cluster2.hosts_toml(nodes=nodes), ["--backend", "nccl"])
    assert [finding.partition("\n")[0] for finding in done.findings] == [
        "h[00-01]: different versions of torch and CUDA:",
        f"h01: `--backend nccl`, but torch 2.7.1+cpu is built without CUDA: {folders[1]}/torch",
        "h[00-01]: `--backend nccl`, but the node shows no GPU",
    ]
    assert done.returncode == 3
    assert check(cluster2, map_with_fake_torch(cluster2), ["--backend", "gloo"]).returncode == 0


def test_a_script_that_differs_or_is_missing_and_a_missing_workdir_are_refused(cluster4: Cluster) -> None:
    """Each node has a folder of its own: one byte differs on h01, h02 has no script, h03 not even the folder."""
    texts = {"h00": "print(1)\n", "h01": "print(2)\n", "h02": None}
    for host in cluster4.hosts[:3]:
        folder = host.path("/home/project")
        folder.mkdir()
        if text := texts[host.name]:
            (folder / "train.py").write_text(text)
    hosts = map_with_fake_torch(cluster4, defaults={"workdir": "/home/project"})
    done = check(cluster4, hosts, [], "train.py")
    digests = [hashlib.sha256(text.encode()).hexdigest()[:12] for text in texts.values() if text]
    assert done.findings == [
        (
            "h03: workdir /home/project cannot be entered: No such file or directory\n"
            "hint: take the code along with `--bundle`, make the folder there, or name another with `--workdir` "
            "(troubleshooting: workdir)"
        ),
        (
            "h02: the script /home/project/train.py cannot be read: No such file or directory\n"
            "hint: its path starts from the workdir, which must hold it on every node; `--bundle` takes the code along "
            "(troubleshooting: script-missing)"
        ),
        (
            "h[00-01]: the script is not the same on all nodes:\n"
            f"  h00: /home/project/train.py, 9 bytes, sha256 {digests[0]}\n"
            f"  h01: /home/project/train.py, 9 bytes, sha256 {digests[1]}\n"
            "hint: copy the right one to all nodes, or use a shared folder (troubleshooting: script-differs)"
        ),
    ]
    assert done.returncode == 3
    same = check(cluster4, hosts, ["-w", "h[00-02]"])
    assert (same.returncode, same.stdout) == (0, "h[00-02]: a job would run\n")


def test_a_module_is_looked_for_and_compared_without_being_imported(cluster4: Cluster) -> None:
    """In a package that raises when imported: one byte differs on h01, h02 has no such module."""
    for host in cluster4.hosts:
        package = host.path("/root/pkg")
        package.mkdir()
        (package / "__init__.py").write_text("raise ImportError('preflight imports nothing of the job')\n")
        if host.name != "h02":
            (package / "train.py").write_text("print(2)\n" if host.name == "h01" else "print(1)\n")
    hosts = map_with_fake_torch(cluster4, defaults={"workdir": "/root"})
    done = check(cluster4, hosts, ["-m"], "pkg.train")
    missing, differs = done.findings
    assert missing == (
        "h02: there is no module `pkg.train`\n"
        f"hint: it must be in /root, on PYTHONPATH or installed for `{sys.executable}`; `--workdir` names the folder "
        "(troubleshooting: script-missing)"
    )
    assert differs.splitlines()[0] == "h[00-01,03]: the script is not the same on all nodes:"
    assert [line.partition(", sha256")[0] for line in differs.splitlines()[1:3]] == [
        "  h[00,03]: /root/pkg/train.py, 9 bytes",
        "  h01: /root/pkg/train.py, 9 bytes",
    ]
    assert done.returncode == 3
    fine = check(cluster4, hosts, ["-m", "-w", "h[00,03]"], "pkg.train")
    assert (fine.returncode, fine.stdout) == (0, "h[00,03]: a job would run\n")


def test_what_is_small_low_or_off_is_a_warning_which_strict_takes_for_a_failure(cluster4: Cluster) -> None:
    """A small /dev/shm, a full scratch folder, `ulimit -n` and a clock: told once each, and the job runs."""
    small, full, low, late = cluster4.hosts
    small.mount("-o", "remount,size=16m", "/dev/shm")
    full.path("/root/small").mkdir()
    full.mount("-t", "tmpfs", "-o", "size=100m", "tmpfs", "/root/small")
    python = write_program(
        cluster4.new_folder("bin") / "python3", f'#!/bin/sh\nulimit -n 1000\nexec {sys.executable} "$@"\n'
    )
    site = cluster4.new_folder("site")
    (site / "sitecustomize.py").write_text(LATE)
    nodes: dict[str, dict[str, TomlValue]] = {
        full.name: {"scratch": "/root/small"},
        low.name: {"python": str(python)},
        late.name: {"env": {"PYTHONPATH": f"{FAKE_TORCH}:{site}"}},
    }
    hosts = map_with_fake_torch(cluster4, nodes=nodes)
    script = write_script(cluster4, "print('ran')")
    done = run(cluster4.login, hosts, [], script)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("ran") == 4
    notices = [entry["text"].removeprefix("warning: ").partition("\n")[0] for entry in done.named("notice")]
    assert notices == [
        "h00: /dev/shm has 16 MiB, 64 MiB or more is expected for 1 process",
        "h01: less than 1 GiB is free in /root/small, where the job's output goes: 100 MiB",
        "h03: the clock is more than 2 s away from that of h[00-02]: -60.0 s",
        "h02: `ulimit -n` is 1000, 4096 or more is expected",
    ]
    assert [done.stderr.count(notice) for notice in notices] == [1, 1, 1, 1]
    strict = refused(cluster4, hosts, ["--strict"])
    assert [entry["severity"] for entry in strict.receipt["findings"]] == ["failure"] * 4
    assert strict.stderr.startswith(
        "gpulayer: error: the job would not run on h[00-03], so nothing was started\n\nh00: "
    )
    assert "warning" not in strict.stderr


def test_an_output_folder_that_cannot_be_written_is_refused(cluster2: Cluster) -> None:
    """Seen by trying, as the user who runs the job; the trial leaves nothing."""
    nodes = {"h00": {"scratch": "/home"}, "h01": {"scratch": "/nowhere"}}
    done = check(cluster2, map_with_fake_torch(cluster2, nodes=nodes), login=cluster2.walker)
    assert done.findings == [
        (
            "h00: no folder for the job's output can be made in /home: Permission denied\n"
            f"hint: free or open it for your user, {SCRATCH_HINT}"
        ),
        (
            "h01: no folder for the job's output can be made in /nowhere: No such file or directory\n"
            f"hint: free or open it for your user, {SCRATCH_HINT}"
        ),
    ]
    assert done.returncode == 3
