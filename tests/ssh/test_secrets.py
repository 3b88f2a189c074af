"""What others on the login node and on the nodes can see of a job: command lines, files, and what gpulayer shows."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Self

import pytest

from tests.support.jobs import FAKE_TORCH, GPULAYER, TELL, launch, map_with_fake_torch, run, told, write_script
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.cluster import Cluster

pytestmark = pytest.mark.ssh

VALUE = "in-the-environment-4f9a"
PASSED = "passed-by-name-77b1"
ARGUMENT = "an-argument-9c2d"
KINDS = ("-ISE", "torch.distributed.run", ARGUMENT)  # supervisor and guard, torchrun, ranks
HOLD = """
import os, time
open(os.environ["OUT"] + "/up" + os.environ["RANK"], "w").close()
while not os.path.exists(os.environ["OUT"] + "/go"):
    time.sleep(0.02)
"""


class CommandLines:
    """Every command line that a process of the hosts or of the login node has, from `with` on, as `ps` would see it."""

    def __init__(self, cluster: Cluster) -> None:
        self.hosts: set[tuple[str, ...]] = set()
        self.login: set[tuple[str, ...]] = set()
        self._cluster = cluster
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.is_set():
            self.hosts |= {process.argv for process in self._cluster.processes()}
            self.login |= {process.argv for process in self._cluster.login_processes()}


def _with(text: str, lines: set[tuple[str, ...]]) -> list[tuple[str, ...]]:
    return [line for line in lines if any(text in word for word in line)]


def test_environment_and_arguments_stand_in_no_command_line(cluster2: Cluster) -> None:
    """From the first login to the end: the environment nowhere; an argument in torchrun's and the ranks' own, which
    torchrun makes, and in what the user has typed here."""
    script = write_script(cluster2, f"{TELL}\n{HOLD}")
    out = script.parent
    hosts = cluster2.hosts_toml(
        by_name=True, defaults={"env": {"PYTHONPATH": str(FAKE_TORCH), "OPEN": VALUE, "OUT": str(out)}}
    )
    (cluster2.login.home / ".ssh/known_hosts").unlink()  # so that `ssh -G` is asked how to write the new ones
    options = ["--accept-new-host-keys", "-e", "GIVEN"]
    started = launch(cluster2.login, hosts, options, script, [ARGUMENT], env={"GIVEN": PASSED})
    with CommandLines(cluster2) as seen, started as live:
        wait_until(lambda: len(list(out.glob("up*"))) == 2, "both ranks run", timeout_s=40)
        wait_until(lambda: all(_with(part, seen.hosts) for part in KINDS), "each kind of process was seen")
        (out / "go").touch()
        done = live.finish()
    assert done.returncode == 0, done.stderr
    assert [one["env"]["OPEN"] + one["env"]["GIVEN"] for one in told(out).values()] == [VALUE + PASSED] * 2
    assert [one["argv"] for one in told(out).values()] == [[ARGUMENT]] * 2
    everywhere = seen.hosts | seen.login
    assert _with(VALUE, everywhere) == _with(PASSED, everywhere) == []
    typed = [*GPULAYER, "run"]
    assert [line for line in _with(ARGUMENT, seen.login) if list(line[: len(typed)]) != typed] == []
    ranks = [line for line in _with(ARGUMENT, seen.hosts) if line[-2:] == (str(script), ARGUMENT)]
    assert _with(ARGUMENT, seen.hosts) == ranks != []
    assert all("torch.distributed.run" in line or len(line) <= 4 for line in ranks), ranks


@pytest.mark.parametrize("umask", ["000", "022", "077"])
def test_files_are_for_the_user_alone_under_any_umask(cluster2: Cluster, umask: str) -> None:
    """Folders 0700 and files 0600, here and on the node, where the login shell has this umask too.

    The folder `runs` is the user's to share, but not with everybody to write to.
    """
    script = write_script(cluster2, HOLD + "\nprint('out')\n")
    login = cluster2.walker
    hosts = map_with_fake_torch(cluster2, hosts=cluster2.hosts[:1])
    home = cluster2.hosts[0].path("/home/walker")
    (home / ".bashrc").write_text(f"umask {umask}\n")
    work = login.home / f"work-{umask}"
    work.mkdir(mode=0o755)
    work.chmod(0o777)
    argv = [*GPULAYER, "run", "-H", str(hosts), "--job-id", f"job-{umask}", "-e", f"OUT={script.parent}", str(script)]
    process = login.popen(["sh", "-c", 'umask "$0"; exec "$@"', umask, *argv], cwd=work)
    try:
        wait_until((script.parent / "up0").exists, "the rank runs", timeout_s=40)
        on_node = cluster2.hosts[0].path(f"/tmp/gpulayer-job-{umask}-n0")
        assert _modes(on_node, within=False) == {"0o700"}
        (script.parent / "go").touch()
        _, stderr = process.communicate(timeout=60)
    finally:
        process.kill()
        process.communicate()
        (home / ".bashrc").unlink()
    assert process.returncode == 0, stderr
    run_dir = work / f"runs/job-{umask}"
    assert (run_dir / "node0/rank0.stdout.log").read_bytes() == b"out\n"
    assert {path.name for path in run_dir.iterdir()} == {
        "plan.json",
        "receipt.json",
        "events.jsonl",
        "output.jsonl",
        "node0",
    }
    assert _modes(run_dir) == {"0o700", "0o600"}
    assert (work / "runs").stat().st_mode & 0o777 == 0o775 & ~int(umask, 8)


def _modes(folder: Path, *, within: bool = True) -> set[str]:
    """The modes of a folder and, unless it is asked for alone, of all within it."""
    paths = [folder, *(folder.rglob("*") if within else ())]
    return {oct(path.stat().st_mode & 0o777) for path in paths}


def test_secrets_arrive_and_are_masked_in_all_that_gpulayer_keeps_and_shows(cluster2: Cluster) -> None:
    """Variables, options, settings and passwords in URLs, of a run that succeeds and of one whose node is refused."""
    script = write_script(cluster2, TELL)
    secrets = {"HF_TOKEN": "hf-5e77aa01", "PROXY": "http://me:pa55-b2c3@proxy:3128", "MAX_ITEMS": "31337"}
    words = ["--api-key", "k-81c9d2", "--auth=x:hf-5e77aa01", "wandb.token=w-77e1f0", "--max-tokens", "4096"]
    options = [
        "-v",
        "-e",
        f"OUT={script.parent}",
        *(word for item in secrets.items() for word in ("-e", "=".join(item))),
    ]
    hosts = map_with_fake_torch(cluster2)
    good = run(cluster2.login, hosts, options, script, words)
    cluster2.hosts[1].stop_sshd()
    bad = run(cluster2.login, hosts, options, script, words)
    assert (good.returncode, bad.returncode) == (0, 3), good.stderr + bad.stderr
    for one in told(script.parent).values():
        assert (one["argv"], {name: one["env"][name] for name in secrets}) == (words, secrets)
    kept = [path.read_text() for done in (good, bad) for path in done.run_dir.rglob("*") if path.is_file()]
    texts = [*kept, good.stdout, good.stderr, bad.stdout, bad.stderr]
    assert len(kept) >= 6
    for secret in ("hf-5e77aa01", "pa55-b2c3", "k-81c9d2", "w-77e1f0"):
        assert not [text for text in texts if secret in text], secret
    plan = (good.run_dir / "plan.json").read_text()
    assert plan.count("31337") == plan.count("4096") == 3  # on two nodes and in the recipe
