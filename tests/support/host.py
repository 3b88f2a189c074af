"""One host of the test cluster: power, cable, sshd, and what runs inside."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

from tests.support import netns, procs, sshd
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tests.support.cluster import Cluster

LOGIN_ADDRESS = "10.77.0.1"
PRIVATE_FOLDERS = ("/tmp", "/root", "/home", "/run", "/dev/shm", "/var/log")

# $1 name, $2 address, $3 IPv6 address, $4 the host's folder, $5 the folder of /etc files
_BOOT = """set -eu
printf %s "$1" >/proc/sys/kernel/hostname
mount -n -t sysfs -o ro sysfs /sys
{private_folders}
bind() {{ if [ -e "/etc/$2" ]; then mount -n --bind "$1/$2" "/etc/$2"; fi; }}
for file in hosts hostname; do bind "$4" $file; done
for file in passwd shadow group nsswitch.conf; do bind "$5" $file; done
mkdir -p /run/sshd
{homes}
echo ready
read -r _
ip -batch - <<EOF
link set lo up
addr add $2/16 dev eth0
link set eth0 up
EOF
ip -6 addr add "$3/64" dev eth0 nodad || echo "no IPv6" >&2
{sshd} -f "$4/sshd_config" -E "$4/sshd.log"
echo up
exec </dev/null >/dev/null 2>&1
sleep infinity # not the last line: the shell must stay process 1, where it reaps orphans
exit 1
"""


def boot_script(visible: Sequence[Path], stage: Path) -> str:
    """The program that is process 1 of every host, as text for /bin/sh."""
    users = [user for user in sshd.USERS.values() if user.uid]
    homes = [f"mkdir {user.home} && chown {user.uid}:{user.uid} {user.home}" for user in users]
    private = netns.private_folders(PRIVATE_FOLDERS, visible, stage)
    return _BOOT.format(private_folders=private, homes="\n".join(homes), sshd=sshd.SSHD)


def is_stray(process: procs.Process) -> bool:
    """Whether a freshly booted host would not have this process; sshd's sessions are sshd's."""
    own = process.pid_inside == 1 or process.name.startswith("sshd") or process.argv == ("sleep", "infinity")
    return not own


class Host:
    """One host. `name` is h00, h01, ...; `address` and `address6` are how the others reach it."""

    def __init__(self, cluster: Cluster, index: int) -> None:
        self.index = index
        self.name = f"h{index:02d}"
        self.address = f"10.77.{1 + index // 200}.{10 + index % 200}"
        self.address6 = f"fd77::{1 + index // 200:x}:{10 + index % 200:x}"
        self.mac = f"02:77:00:00:{index // 256:02x}:{index % 256:02x}"
        self.folder = cluster.base / "hosts" / self.name
        self.sshd_config = self.folder / "sshd_config"  # read again by restart_sshd
        self.sshd_log = self.folder / "sshd.log"
        self.original_sshd_config = ""
        self.public_key = ""
        self._cluster = cluster
        self._cable = f"v{index}"
        self._holder: netns.Holder | None = None
        self._init_pid = 0
        self._cut = self._silent = False
        self.altered = False

    @property
    def powered(self) -> bool:
        """Whether the host is up."""
        return self._init_pid != 0

    @property
    def namespace(self) -> int:
        """The inode of the host's pid namespace; 0 when it is off."""
        return procs.namespace_id(self._init_pid, "pid") if self.powered else 0

    @property
    def holder_pid(self) -> int:
        """The process that keeps the host up; 0 when it is off."""
        return self._holder.pid if self._holder else 0

    # Power. Many hosts boot side by side: each stage is done for all of them before the next.

    def power_on(self) -> None:
        """First stage: start the machine. It has no cable yet."""
        argv = [self.name, self.address, self.address6, str(self.folder), str(self._cluster.etc)]
        flags = ["-n", "-u", "-i", "-m", "-p", "--fork", "--mount-proc", "--kill-child"]
        script = str(self._cluster.base / "host.sh")
        self._holder = netns.Holder(flags, ["/bin/sh", script, *argv], self.folder / "boot.log")

    def cable_lines(self) -> list[str]:
        """Second stage, once its namespaces are there: the `ip` commands that plug the cable in."""
        if self._holder is None:
            raise RuntimeError(f"{self.name} is off")
        self._holder.expect("ready")
        peer = f"peer name eth0 address {self.mac} netns {self._holder.pid}"
        return [f"link add {self._cable} type veth {peer}", f"link set {self._cable} master br0 up"]

    def finish_boot(self) -> None:
        """Third stage, for a host with a cable: network up, sshd listening."""
        if self._holder is None:
            raise RuntimeError(f"{self.name} is off")
        self._init_pid = self._holder.child_pid
        self._holder.expect("up")
        self._holder.hang_up()
        self._wait_for_sshd()

    def let_boot(self) -> None:
        """Let a host go on booting now that its cable is in."""
        if self._holder:
            self._holder.tell("go")

    def power_off(self) -> None:
        """SIGKILL to process 1, which takes every process of the host with it. Does not wait."""
        if self._holder:
            netns.kill([self._init_pid or self._holder.pid])

    def wait_off(self) -> None:
        """Wait until no process of the host is left."""
        if self._holder:
            self._holder.wait()
            self._holder.hang_up()
        self._holder, self._init_pid = None, 0
        self._cut = self._silent = self.altered = False

    def crash(self) -> None:
        """Power it off: silence at once (no FIN, no RST), then every process gone."""
        self._cluster.crash([self])

    def unplug_lines(self) -> list[str]:
        """The `ip` commands that take its cable away for good."""
        return [f"link del {self._cable}"]

    # The network.

    def cut(self) -> None:
        """Pull the cable. Established connections hear nothing any more."""
        netns.ip_batch(self._cluster.login_pid, [f"link set {self._cable} down"])
        self._cut = True

    def drop_syn(self) -> None:
        """Never answer the login node again, as a firewall does that drops its packets: a connect to it hangs."""
        netns.ip_batch(self._init_pid, [f"route add blackhole {LOGIN_ADDRESS}/32"])
        self._silent = True

    def ip(self, *lines: str) -> None:
        """Change its network by `ip` commands. To be undone, it is booted anew."""
        self.altered = True
        netns.ip_batch(self._init_pid, lines)

    def firewall(self, *rules: str) -> None:
        """Add rules of nftables to its chains `input` and `output`: `input tcp dport 29500 drop`. Undone likewise."""
        self.nft(
            "add table inet t",
            *(f"add chain inet t {hook} {{ type filter hook {hook} priority 0; }}" for hook in ("input", "output")),
            *(f"add rule inet t {rule}" for rule in rules),
        )

    def nft(self, *lines: str) -> None:
        """Run nftables commands. Undone likewise."""
        self.altered = True
        self.run(["nft", "; ".join(lines)])

    def mount(self, *words: str) -> None:
        """Mount something. Undone likewise."""
        self.altered = True
        self.run(["mount", "-n", *words])

    def heal(self) -> None:
        """Undo `cut`, `drop_syn`, `crash`, and all that has altered it."""
        if self.altered:
            self.crash()
        if not self.powered:
            self._cluster.boot([self])
        if self._cut:
            netns.ip_batch(self._cluster.login_pid, [f"link set {self._cable} up"])
        if self._silent:
            netns.ip_batch(self._init_pid, [f"route del blackhole {LOGIN_ADDRESS}/32"])
        self._cut = self._silent = False

    # OpenSSH's server.

    def stop_sshd(self, *, drop_sessions: bool = False) -> None:
        """Stop the listening sshd (a connect is then refused). Sessions go on, unless they are to be dropped too."""
        servers = [process for process in self.processes() if process.name.startswith("sshd")]
        listener = self._listener()
        doomed = [process.pid for process in servers if drop_sessions or process.pid_inside == listener]
        for pid in doomed:
            with contextlib.suppress(ProcessLookupError):  # one of a session's two processes takes the other with it
                os.kill(pid, signal.SIGTERM)
        wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in doomed), f"sshd of {self.name} stops")

    def start_sshd(self) -> None:
        """Start sshd with what `sshd_config` now says, and wait until it listens."""
        self.path(sshd.PID_FILE).unlink(missing_ok=True)
        self.run([sshd.SSHD, "-f", str(self.sshd_config), "-E", str(self.sshd_log)])
        self._wait_for_sshd()

    def restart_sshd(self, *, drop_sessions: bool = False) -> None:
        """Stop and start it, as an update of the package does: sessions go on, unless they are to be dropped."""
        self.stop_sshd(drop_sessions=drop_sessions)
        self.start_sshd()

    def restore_sshd(self) -> None:
        """Give it the configuration that it had at first, and start it if it does not run with that."""
        changed = self.sshd_config.read_text() != self.original_sshd_config
        if changed:
            self.sshd_config.write_text(self.original_sshd_config)
            self.stop_sshd()
        if changed or not self.path(f"proc/{self._listener()}/exe").is_symlink():
            self.start_sshd()

    def _listener(self) -> int:
        """The pid inside of the listening sshd, or 0. sshd writes the file once it listens."""
        try:
            return int(self.path(sshd.PID_FILE).read_text() or 0)
        except OSError:
            return 0

    def _wait_for_sshd(self) -> None:
        wait_until(lambda: self._listener() != 0, f"sshd of {self.name} listens, see {self.sshd_log}")

    # Looking and running inside.

    def path(self, inside: str | Path) -> Path:
        """A file of this host, seen from here."""
        return Path(f"/proc/{self._init_pid}/root/{str(inside).lstrip('/')}")

    def processes(self, marker: str = "") -> list[procs.Process]:
        """Every process of the host, seen from outside; with `marker`, those whose environment holds it."""
        return procs.processes_in({self.namespace}, "pid", marker)

    def strays(self) -> list[procs.Process]:
        """The processes that a freshly booted host does not have, sshd's sessions aside."""
        return [process for process in self.processes() if is_stray(process)]

    def run(
        self,
        argv: Sequence[str],
        *,
        user: str = "root",
        env: Mapping[str, str] | None = None,
        check: bool = True,
        timeout_s: float = 60,
    ) -> subprocess.CompletedProcess[str]:
        """Run a program inside as `user`, in their home, not by way of SSH."""
        account = sshd.USERS[user]
        return subprocess.run(
            [*netns.enter(self._init_pid, "muinp", uid=account.uid, cwd=account.home), *argv],
            env=netns.clean_environ(account.home, user, env or {}),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="surrogateescape",
            check=check,
            timeout=timeout_s,
        )

    def start(self, argv: Sequence[str], *, user: str = "root", env: Mapping[str, str] | None = None) -> None:
        """Start a program inside that goes on by itself, in a session of its own and with no output."""
        self.run(["sh", "-c", 'setsid -f "$@" </dev/null >/dev/null 2>&1', "sh", *argv], user=user, env=env)
