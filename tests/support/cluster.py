"""The test cluster: hosts with an OpenSSH server each, and a login node, as namespaces of this machine.

    with Cluster(4) as cluster:
        hosts_file = cluster.hosts_toml(defaults={"gpus": 2})
        done = cluster.login.run(["ssh", "h02", "hostname"])
        cluster.hosts[1].cut()

Every host has its own network, host name, processes, System V IPC, accounts, /etc/hosts (with Debian's 127.0.1.1
line), /tmp, /root, /home, /run, /dev/shm and /var/log; it sees the rest of this machine's files, and the checkout, the
Python that runs the tests and `cluster.shared` wherever they lie. No packet leaves: the login node holds the bridge
that all cables end in.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import IO, TYPE_CHECKING, Self

from tests.support import netns, procs, sshd
from tests.support.host import LOGIN_ADDRESS, Host, boot_script, is_stray

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from types import TracebackType

TomlValue = str | int | float | bool | list[int] | list[str] | dict[str, str]

CHECKOUT = Path(__file__).resolve().parents[2]
VENV_PATH = f"{Path(sys.executable).parent}:{netns.SYSTEM_PATH}"
RUNNING: list[Cluster] = []  # every cluster that is up, for the leak check

# $1 the folder of /etc files
_LOGIN_BOOT = """set -eu
printf %s login >/proc/sys/kernel/hostname
mount -n -t sysfs -o ro sysfs /sys
{private_folders}
bind() {{ if [ -e "/etc/$2" ]; then mount -n --bind "$1/$2" "/etc/$2"; fi; }}
for file in passwd shadow group nsswitch.conf hosts; do bind "$1" $file; done
ip -batch - <<EOF
link set lo up
link add br0 type bridge mcast_snooping 0
addr add {address}/16 dev br0
link set br0 up
EOF
ip -6 addr add fd77::1/64 dev br0 nodad || echo "no IPv6" >&2
echo ready
exec </dev/null >/dev/null 2>&1
exec sleep infinity
"""


class LoginNode:
    """The login node as one user sees it: `home` with keys, known_hosts and config; programs run in its network.

    Its processes have the same pids as they have here. It has /etc/hosts and accounts of its own and an empty /root and
    /home; /tmp and the rest are this machine's.
    """

    def __init__(self, cluster: Cluster, user: sshd.User) -> None:
        self.user = user
        self.home = cluster.base / "login" / user.name
        self._cluster = cluster

    def write_home(self, private_key: str) -> None:
        """Make ~/.ssh what it was at first. Other files are left as they are."""
        folder = self.home / ".ssh"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "id_ed25519").write_text(private_key)
        (folder / "known_hosts").write_text(self._cluster.known_hosts())
        (folder / "config").write_text("# nothing yet\n")
        for path in (self.home, folder, *folder.iterdir()):
            os.chown(path, self.user.uid, self.user.uid)
            path.chmod(0o700 if path.is_dir() else 0o600)

    def popen(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | Path | None = None,
        stdin: int | IO[bytes] = subprocess.DEVNULL,
        stdout: int | IO[bytes] = subprocess.PIPE,
        stderr: int | IO[bytes] = subprocess.PIPE,
        start_new_session: bool = False,
    ) -> subprocess.Popen[bytes]:
        """Start a program there, in `cwd` (default: the home), with a fresh login's environment and `env`.

        The pid is the program's own.
        """
        return subprocess.Popen(
            [*self._prefix(cwd), *argv],
            env=self._environ(env),
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            start_new_session=start_new_session,
        )

    def run(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | Path | None = None,
        input_text: str = "",
        check: bool = False,
        timeout_s: float = 60,
    ) -> subprocess.CompletedProcess[str]:
        """Run a program there to its end."""
        return subprocess.run(
            [*self._prefix(cwd), *argv],
            env=self._environ(env),
            input=input_text,
            capture_output=True,
            text=True,
            errors="surrogateescape",
            check=check,
            timeout=timeout_s,
        )

    def _prefix(self, cwd: str | Path | None) -> list[str]:
        return netns.enter(self._cluster.login_pid, "mnu", uid=self.user.uid, cwd=str(cwd or self.home))

    def _environ(self, env: Mapping[str, str] | None) -> dict[str, str]:
        extra = {"PYTHONPATH": str(CHECKOUT), "GPULAYER_LEASES": str(self._cluster.leases), **(env or {})}
        return netns.clean_environ(str(self.home), self.user.name, extra, path=VENV_PATH)


class Cluster:
    """`size` hosts and a login node. `sshd_options` are lines of sshd_config (as `MaxStartups 3:100:3`) for all hosts.

    `login` is root's view of the login node, `walker` an ordinary user's; both may log in to every account of every
    host. `shared` is a folder that everyone everywhere sees and may write to, `leases` the login node's record of who
    holds which host: all clusters have the same addresses, so each has its own.
    """

    def __init__(self, size: int, *, sshd_options: Sequence[str] = ()) -> None:
        self.base = Path(tempfile.mkdtemp(prefix=f"glt{os.getpid()}-")).resolve()
        self.base.chmod(0o755)
        self.shared = self.base / "shared"
        self.leases = self.base / "leases"
        self.etc = self.base / "etc"
        self.hosts = [Host(self, index) for index in range(size)]
        self.login = LoginNode(self, sshd.ROOT)
        self.walker = LoginNode(self, sshd.WALKER)
        self._options = sshd_options
        self._login_holder: netns.Holder | None = None
        self._private_key = ""

    @property
    def login_pid(self) -> int:
        """The process that holds the login node's namespaces."""
        if self._login_holder is None:
            raise RuntimeError("the cluster is not up")
        return self._login_holder.pid

    def __enter__(self) -> Self:
        """Write the files, start the login node, boot all hosts. What was started is ended if any of it fails."""
        try:
            self._write_files()
            self._start_login()
            self.boot(self.hosts)
        except BaseException:
            self.close()
            raise
        RUNNING.append(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End everything."""
        self.close()

    def close(self) -> None:
        """End every process, and with them the namespaces, cables and mounts; remove the files."""
        if self in RUNNING:
            RUNNING.remove(self)
        if self._login_holder:
            netns.kill([*(process.pid for process in self.login_processes()), self.login_pid])
            self._login_holder.wait()
            self._login_holder.hang_up()
            self._login_holder = None
        for host in self.hosts:
            host.power_off()
        for host in self.hosts:
            host.wait_off()
        shutil.rmtree(self.base, ignore_errors=True)

    def reset(self) -> None:
        """Make it as new for the next test: strays ended, hosts up, cables in, sshd as at first, ~/.ssh rewritten.

        Files that a test left on hosts stay until the host is crashed or the cluster is closed.
        """
        netns.kill(process.pid for process in [*self.login_processes(), *filter(is_stray, self.processes())])
        for host in self.hosts:
            if host.altered:
                host.crash()
        self.boot([host for host in self.hosts if not host.powered])
        for host in self.hosts:
            host.heal()
            host.restore_sshd()
        self._write_homes()

    def boot(self, hosts: Sequence[Host]) -> None:
        """Boot these hosts side by side and wait until they can be logged in to."""
        for host in hosts:
            host.power_on()
        if hosts:
            netns.ip_batch(self.login_pid, [line for host in hosts for line in host.cable_lines()])
        for host in hosts:
            host.let_boot()
        for host in hosts:
            host.finish_boot()

    def crash(self, hosts: Sequence[Host]) -> None:
        """Power these hosts off at the same moment: silence first (no FIN, no RST), then every process gone."""
        netns.ip_batch(self.login_pid, [line for host in hosts for line in host.unplug_lines()])
        for host in hosts:
            host.power_off()
        for host in hosts:
            host.wait_off()

    def processes(self, marker: str = "") -> list[procs.Process]:
        """Every process of every host whose environment holds `marker`, seen from outside."""
        return procs.processes_in({host.namespace for host in self.hosts}, "pid", marker)

    def login_processes(self) -> list[procs.Process]:
        """What runs on the login node now."""
        here = procs.namespace_id(self.login_pid, "net")
        return [process for process in procs.processes_in({here}, "net") if process.pid != self.login_pid]

    def holder_pids(self) -> list[int]:
        """The children of this process that keep the cluster up."""
        return [self.login_pid, *(host.holder_pid for host in self.hosts if host.powered)]

    def new_folder(self, name: str = "work") -> Path:
        """A fresh folder in `shared` that everyone may write to, at the same path on all hosts and the login node."""
        folder = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=self.shared))
        folder.chmod(0o1777)
        return folder

    def hosts_toml(
        self,
        path: Path | None = None,
        *,
        hosts: Sequence[Host] | None = None,
        defaults: Mapping[str, TomlValue] | None = None,
        nodes: Mapping[str, Mapping[str, TomlValue]] | None = None,
        by_name: bool = False,
    ) -> Path:
        """Write a hosts map of these hosts (default: all) and return its path (default: hosts.toml in a fresh folder).

        Unless `defaults` says otherwise, a node has the Python that runs the tests, `shared` as workdir and one GPU.
        `nodes` adds keys to single nodes. `by_name` leaves `address` out, so that it is what the name resolves to.
        """
        common: dict[str, TomlValue] = {
            "python": sys.executable,
            "workdir": str(self.shared),
            "gpus": 1,
            **(defaults or {}),
        }
        blocks = [_toml_table("defaults", common)]
        for host in self.hosts if hosts is None else hosts:
            keys: dict[str, TomlValue] = {} if by_name else {"address": host.address}
            blocks.append(_toml_table(f"nodes.{host.name}", {**keys, **(nodes or {}).get(host.name, {})}))
        path = path or self.new_folder("map") / "hosts.toml"
        path.write_text("\n".join(blocks))
        return path

    def known_hosts(self) -> str:
        """Every host's key under its name and its addresses."""
        return "".join(f"{host.name},{host.address},{host.address6} {host.public_key}\n" for host in self.hosts)

    def _write_files(self) -> None:
        self.shared.mkdir()
        self.shared.chmod(0o1777)
        self.leases.mkdir()
        self.leases.chmod(0o1777)
        (self.base / "stage").mkdir()
        sshd.write_accounts(self.etc, {})
        sshd.write_accounts(
            self.base / "login-etc", {node.user.name: str(node.home) for node in (self.login, self.walker)}
        )
        peers = {host.name: f"{host.address} {host.name}\n" for host in self.hosts}
        (self.base / "login-etc" / "hosts").write_text(
            "127.0.0.1 localhost\n127.0.1.1 login\n" + "".join(peers.values())
        )
        authorized_keys = self.base / "authorized_keys"
        authorized_keys.write_text(sshd.write_key(self.base / "user_key") + "\n")
        self._private_key = (self.base / "user_key").read_text()
        for host in self.hosts:
            self._write_host_files(host, peers, authorized_keys)
        self._write_homes()
        self._write_scripts()

    def _write_host_files(self, host: Host, peers: Mapping[str, str], authorized_keys: Path) -> None:
        host.folder.mkdir(parents=True)
        host.public_key = sshd.write_key(host.folder / "host_key")
        others = "".join(line for name, line in peers.items() if name != host.name)
        own = f"127.0.0.1 localhost\n127.0.1.1 {host.name}\n{LOGIN_ADDRESS} login\n"
        (host.folder / "hosts").write_text(own + others)
        (host.folder / "hostname").write_text(f"{host.name}\n")
        host.original_sshd_config = sshd.sshd_config(host.folder / "host_key", authorized_keys, self._options)
        host.sshd_config.write_text(host.original_sshd_config)

    def _write_homes(self) -> None:
        for node in (self.login, self.walker):
            node.write_home(self._private_key)

    def _write_scripts(self) -> None:
        interpreter = Path(sys.executable).resolve().parents[1]
        visible = list(
            dict.fromkeys([self.base, CHECKOUT, *(Path(p) for p in (sys.prefix, sys.base_prefix)), interpreter])
        )
        stage = self.base / "stage"
        (self.base / "host.sh").write_text(boot_script(visible, stage))
        private = netns.private_folders(["/root", "/home"], visible, stage)
        (self.base / "login.sh").write_text(_LOGIN_BOOT.format(private_folders=private, address=LOGIN_ADDRESS))

    def _start_login(self) -> None:
        argv = ["/bin/sh", str(self.base / "login.sh"), str(self.base / "login-etc")]
        self._login_holder = netns.Holder(["-n", "-u", "-m"], argv, self.base / "login.log")
        self._login_holder.expect("ready")
        self._login_holder.hang_up()


def _toml_table(name: str, values: Mapping[str, TomlValue]) -> str:
    return f"[{name}]\n" + "".join(f"{key} = {_toml(value)}\n" for key, value in values.items())


def _toml(value: TomlValue) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{json.dumps(key)} = {json.dumps(item)}" for key, item in value.items()) + " }"
    return json.dumps(value)  # a TOML string, number, boolean or list is written as JSON writes it
