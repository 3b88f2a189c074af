"""The test cluster is what the other ssh tests take it for."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support import leaks, sshd
from tests.support.cluster import CHECKOUT, Cluster
from tests.support.procs import namespace_id
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from tests.conftest import ClusterFactory
    from tests.support.cluster import LoginNode

pytestmark = pytest.mark.ssh

# Says `up` when it is connected, then what ended the connection.
LISTEN = """
import socket, sys
link = socket.create_connection((sys.argv[1], 22), timeout=float(sys.argv[2]))
link.recv(100)
print("up", flush=True)
try:
    print("closed" if not link.recv(100) else "data")
except Exception as error:
    print(type(error).__name__)
"""


def _ssh(node: LoginNode, target: str, command: str) -> subprocess.CompletedProcess[str]:
    return node.run(["ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=3", target, command])


def _connect(cluster: Cluster, address: str, timeout_s: float) -> str:
    """What a TCP connect from the login node to port 22 comes to."""
    source = "import socket, sys\nsocket.create_connection((sys.argv[1], 22), timeout=float(sys.argv[2]))"
    done = cluster.login.run([sys.executable, "-c", source, address, str(timeout_s)])
    return done.stderr.strip().splitlines()[-1].split(":")[0] if done.returncode else "connected"


def _listen(cluster: Cluster, address: str, timeout_s: float) -> subprocess.Popen[bytes]:
    process = cluster.login.popen([sys.executable, "-c", LISTEN, address, str(timeout_s)])
    assert process.stdout is not None
    assert process.stdout.readline() == b"up\n"
    return process


def test_both_users_log_in_to_every_host_by_name_and_address(cluster4: Cluster) -> None:
    """Host keys are known under name, IPv4 and IPv6 address; root comes in as root and walker as walker."""
    for host in cluster4.hosts:
        for target in (host.name, host.address, host.address6):
            assert _ssh(cluster4.login, target, "hostname; id -un; pwd").stdout == f"{host.name}\nroot\n/root\n"
        assert (
            _ssh(cluster4.walker, host.name, "hostname; id -un; pwd").stdout == f"{host.name}\nwalker\n/home/walker\n"
        )


def test_an_unknown_host_key_is_refused(cluster2: Cluster) -> None:
    """Nothing in the set-up accepts host keys silently."""
    (cluster2.login.home / ".ssh/known_hosts").write_text("")
    done = _ssh(cluster2.login, "h00", "true")
    assert done.returncode == 255
    assert "Host key verification failed" in done.stderr


@pytest.mark.parametrize("user", [name for name in sshd.USERS if name.startswith("u-")])
def test_each_shell_is_somebodys_login_shell(cluster2: Cluster, user: str) -> None:
    """sshd runs commands through the account's own shell, in a home that the account can write to."""
    own_pid = "$fish_pid" if user == "u-fish" else "$$"
    done = _ssh(cluster2.walker, f"{user}@h00", f"ps -o comm= -p {own_pid} ; touch here; ls")
    assert (done.stdout.split(), done.stderr) == ([user.removeprefix("u-"), "here"], "")


def test_a_host_is_a_machine_of_its_own(cluster2: Cluster) -> None:
    """Host name, pids, network, /etc/hosts with Debian's line, accounts and /tmp are the host's own."""
    host, other = cluster2.hosts
    host.run(["touch", "/tmp/mine", "/dev/shm/mine", "/run/mine"])
    assert host.run(["hostname"]).stdout == "h00\n"
    assert int(host.run(["sh", "-c", "echo $$"]).stdout) < 1000
    assert {namespace_id(p.pid, "net") for p in host.processes()}.isdisjoint({namespace_id(os.getpid(), "net")})
    assert host.run(["getent", "ahostsv4", "h00"]).stdout.split()[0] == "127.0.1.1"
    assert host.run(["getent", "ahostsv4", "h01"]).stdout.split()[0] == other.address
    assert host.run(["ls", "/sys/class/net"]).stdout.split() == ["eth0", "lo"]
    assert other.run(["ls", "/tmp/mine", "/dev/shm/mine", "/run/mine"], check=False).stdout == ""
    assert not Path("/tmp/mine").exists()
    assert "walker" not in Path("/etc/passwd").read_text()
    assert host.run(["getent", "hosts", "nowhere"], check=False).returncode == 2
    with pytest.raises(subprocess.CalledProcessError):
        host.run(["false"])


def test_hosts_and_login_node_share_checkout_python_and_one_folder(cluster2: Cluster) -> None:
    """An ordinary user on a host runs this Python on this checkout and writes where everyone reads."""
    folder = cluster2.new_folder()
    program = f"import gpulayer, sys; open('{folder}/seen', 'w').write(gpulayer.__file__ + chr(10) + sys.prefix)"
    env = {"PYTHONPATH": str(CHECKOUT)}
    cluster2.hosts[1].run([sys.executable, "-c", program], user="walker", env=env)
    assert (folder / "seen").read_text() == f"{CHECKOUT}/gpulayer/__init__.py\n{sys.prefix}"
    assert cluster2.walker.run(["cat", "seen"], cwd=folder).stdout == (folder / "seen").read_text()
    assert cluster2.walker.run([sys.executable, "-c", "import gpulayer"]).returncode == 0


def test_login_processes_keep_their_pid_and_get_a_fresh_environment(cluster2: Cluster) -> None:
    """The test can signal what it starts there, and no variable of the test run reaches it."""
    process = cluster2.walker.popen(["sh", "-c", "echo $$ $HOME $USER $EXTRA; env | sort"], env={"EXTRA": "here"})
    out = process.communicate()[0].decode().split("\n")
    assert out[0] == f"{process.pid} {cluster2.walker.home} walker here"
    names = {line.split("=")[0] for line in out[1:] if line}
    expected = {"HOME", "USER", "LOGNAME", "PATH", "LANG", "PYTHONPATH", "GPULAYER_LEASES", "EXTRA"}
    assert names - {"PWD", "OLDPWD"} == expected


def test_hosts_toml_has_the_hosts_and_what_was_asked_for(cluster2: Cluster) -> None:
    """Defaults, per-node keys and addresses are in the file; names resolve on the login node."""
    path = cluster2.hosts_toml(defaults={"gpus": 2, "env": {"A": 'x "y"'}}, nodes={"h01": {"gpus": [0, 1]}})
    assert tomllib.loads(path.read_text()) == {
        "defaults": {"python": sys.executable, "workdir": str(cluster2.shared), "gpus": 2, "env": {"A": 'x "y"'}},
        "nodes": {"h00": {"address": "10.77.1.10"}, "h01": {"address": "10.77.1.11", "gpus": [0, 1]}},
    }
    by_name = cluster2.hosts_toml(hosts=cluster2.hosts[1:], by_name=True)
    assert tomllib.loads(by_name.read_text())["nodes"] == {"h01": {}}
    assert cluster2.login.run(["getent", "ahostsv4", "h01"]).stdout.split()[0] == "10.77.1.11"


def test_cut_is_silence_and_heal_ends_it(cluster2: Cluster) -> None:
    """A connection over a cut cable hears nothing, no end and no error; the host runs on; healed, it is heard again."""
    host = cluster2.hosts[0]
    link = _listen(cluster2, host.address, 1)
    host.cut()
    before = {process.pid for process in host.processes()}
    assert link.communicate()[0] == b"TimeoutError\n"
    assert {process.pid for process in host.processes()} >= before
    assert _connect(cluster2, cluster2.hosts[1].address, 3) == "connected"
    host.heal()
    assert _ssh(cluster2.login, host.name, "echo back").stdout == "back\n"


def test_crash_is_silence_too_and_ends_every_process(cluster2: Cluster) -> None:
    """No FIN and no RST comes from a host that lost power, and nothing of it is left; healed, it boots as it was."""
    host = cluster2.hosts[0]
    host.start(["sleep", "1000"], user="walker")
    pids = [process.pid for process in host.processes()]
    link = _listen(cluster2, host.address, 1)
    host.crash()
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    assert link.communicate()[0] == b"TimeoutError\n"
    assert not host.powered
    assert host.processes() == []
    host.heal()
    assert _ssh(cluster2.login, host.name, "hostname").stdout == f"{host.name}\n"


def test_a_host_that_drops_syn_makes_a_connect_hang(cluster2: Cluster) -> None:
    """A connect runs into its own timeout, longer than an unanswered ARP takes to be an error; the others answer."""
    host = cluster2.hosts[0]
    host.drop_syn()
    start = time.monotonic()
    assert _connect(cluster2, host.address, 5) == "TimeoutError"
    assert time.monotonic() - start >= 5
    assert _connect(cluster2, cluster2.hosts[1].address, 3) == "connected"
    host.heal()
    assert _connect(cluster2, host.address, 3) == "connected"


def test_sshd_restarts_with_or_without_its_sessions(cluster2: Cluster) -> None:
    """A restart leaves sessions alone unless told otherwise; stopped, the port is closed; the config is read again."""
    host = cluster2.hosts[0]
    ssh = ["ssh", "-o", "BatchMode=yes", "h00", "echo in; exec cat"]
    with cluster2.login.popen(ssh, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL) as session:
        assert session.stdout is not None
        assert session.stdin is not None
        assert session.stdout.readline() == b"in\n"
        host.stop_sshd()
        assert _connect(cluster2, host.address, 3) == "ConnectionRefusedError"
        host.sshd_config.write_text("AllowUsers walker\n" + host.original_sshd_config)
        host.start_sshd()
        assert _ssh(cluster2.login, "h00", "true").returncode == 255
        session.stdin.write(b"still here\n")
        session.stdin.flush()
        assert session.stdout.readline() == b"still here\n"
        host.sshd_config.write_text(host.original_sshd_config)
        host.restart_sshd(drop_sessions=True)
        assert session.wait(10) == 255
    assert _ssh(cluster2.login, "h00", "true").returncode == 0


def test_orphans_are_reaped_and_processes_are_seen_from_outside(cluster2: Cluster) -> None:
    """Process 1 reaps what is left to it; a marker finds a process in whatever session, on the right host only."""
    host, other = cluster2.hosts
    host.start(["sleep", "1000"], user="walker", env={"GPULAYER_MARKER": "m1"})
    wait_until(lambda: [p.argv for p in host.processes("GPULAYER_MARKER=m1")] == [("sleep", "1000")], "it runs")
    (found,) = host.processes("GPULAYER_MARKER=m1")
    assert (found.uid, host.run(["ps", "-o", "user=", str(found.pid_inside)]).stdout) == (7001, "walker\n")
    assert [p.pid for p in leaks.job_processes(cluster2)] == [found.pid]
    assert leaks.left_behind(cluster2, settle_s=0) == [f"h00: pid {found.pid} (S) sleep 1000"]
    assert other.processes("GPULAYER_MARKER") == []
    cluster2.reset()
    wait_until(lambda: not Path(f"/proc/{found.pid}").exists(), "the killed orphan is reaped")
    assert leaks.left_behind(cluster2) == []


def test_reset_makes_a_broken_cluster_whole(cluster4: Cluster) -> None:
    """Cut, crashed, silent and without sshd: after a reset all hosts can be logged in to, and ~/.ssh is as at first."""
    cut, crashed, silent, without = cluster4.hosts
    cut.sshd_config.write_text("PermitRootLogin no\n" + cut.original_sshd_config)
    cut.restart_sshd()
    cut.cut()
    crashed.crash()
    silent.drop_syn()
    without.stop_sshd()
    stray = cluster4.login.popen(["sleep", "1000"])
    wait_until(lambda: leaks.left_behind(cluster4, settle_s=0) == [f"login: pid {stray.pid} (S) sleep 1000"], "it runs")
    (cluster4.login.home / ".ssh/config").write_text("Host *\n  Port 1\n")
    cluster4.reset()
    assert stray.wait(5) == -9
    stray.communicate()
    assert [_ssh(cluster4.login, host.name, "true").returncode for host in cluster4.hosts] == [0, 0, 0, 0]


def test_sshd_options_come_first(make_cluster: ClusterFactory) -> None:
    """A cluster's own lines win over the defaults of its sshd_config."""
    cluster = make_cluster(1, sshd_options=["PermitRootLogin no"])
    assert _ssh(cluster.login, "h00", "true").returncode == 255
    assert _ssh(cluster.walker, "h00", "true").returncode == 0


def test_seventy_hosts_come_up_in_seconds_and_leave_nothing() -> None:
    """70 hosts boot, answer, and go: no process, namespace, mount, interface or file of theirs is left."""
    before = _footprint()
    with Cluster(70) as cluster, Cluster(1):  # two side by side, with the same addresses
        login, hosts = cluster.login_pid, [process.pid for process in cluster.processes()]
        greet = "import socket, sys\nfor h in sys.argv[1:]: print(socket.create_connection((h, 22)).recv(8))"
        greetings = cluster.login.run([sys.executable, "-c", greet, *(host.name for host in cluster.hosts)]).stdout
        assert greetings.split() == ["b'SSH-2.0-'"] * 70
        assert _ssh(cluster.login, "h69", "hostname").stdout == "h69\n"
        assert len({process.namespace for process in cluster.processes()}) == 70
        base = cluster.base
    assert not any(Path(f"/proc/{pid}").exists() for pid in [login, *hosts])
    assert not base.exists()
    assert _footprint() == before


@pytest.mark.parametrize("ending", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_nothing_outlives_the_test_run(ending: signal.Signals) -> None:
    """Killed, stopped or interrupted, a test run takes its clusters with it."""
    source = """
import signal
from tests.support.cluster import Cluster
signal.signal(signal.SIGINT, signal.default_int_handler)
with Cluster(2) as cluster:
    cluster.hosts[0].start(["sleep", "1000"], user="walker")
    print(cluster.login_pid, *(process.pid for process in cluster.processes()), cluster.base, flush=True)
    signal.pause()
"""
    argv = [sys.executable, "-c", source]
    with subprocess.Popen(argv, cwd=CHECKOUT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as run:
        assert run.stdout is not None
        *pids, base = run.stdout.readline().decode().split()
        run.send_signal(ending)
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), "all processes are gone")
    assert Path(base).exists() == (ending != signal.SIGINT)  # only what can still run code removes the files
    shutil.rmtree(base, ignore_errors=True)


def _footprint() -> tuple[list[str], list[str], str]:
    interfaces = sorted(name for _, name in socket.if_nameindex())
    named = Path("/run/netns")
    namespaces = sorted(str(path) for path in named.iterdir()) if named.exists() else []
    return interfaces, namespaces, Path("/proc/self/mounts").read_text()
