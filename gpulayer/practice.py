"""A practice cluster: SSH servers on this machine's loopback address, in one process, for `gpulayer demo`.

`python -m gpulayer.practice DIR` runs as any user. It writes keys, an SSH config and a hosts map into DIR, says so in
one line on stdout, and serves until its stdin ends. Then it waits for the commands that it runs to see the same, and
removes DIR. DIR must be private: whoever can read the client key in it can run commands as this user.

Apart from ssh.py and its neighbours, which are the client, the only part that knows asyncssh.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import sys
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import asyncssh

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    Channel = asyncssh.SSHServerProcess[bytes]
    Handler = Callable[[Channel], Awaitable[None]]

ADDRESS = "127.0.0.1"
NODE_IDS = ("practice-1", "practice-2")
READY = "ready"
COMMANDS_END_S = 60.0
LAST_WORDS_S = 1.0
KEY_TYPE = "ssh-ed25519"


async def serve(folder: Path) -> None:
    """Serve from `folder` until stdin ends. Returns once no command runs any more, or after a minute."""
    commands = _Commands(folder)
    client_key, host_key = asyncssh.generate_private_key(KEY_TYPE), asyncssh.generate_private_key(KEY_TYPE)
    _write_key(client_key, folder / "client_key")
    async with AsyncExitStack() as stack:
        ports = {}
        for node_id in NODE_IDS:
            server = await _listen(host_key, client_key, commands.run)
            stack.push_async_callback(server.wait_closed)
            stack.callback(server.close)
            ports[node_id] = server.get_port()
        (folder / "known_hosts").write_text(_known_hosts(ports, host_key))
        (folder / "ssh_config").write_text(_ssh_config(folder), encoding="utf-8")
        (folder / "hosts.toml").write_text(_hosts_map(ports, folder), encoding="utf-8")
        sys.stdout.write(" ".join([READY, *(f"{node_id}:{port}" for node_id, port in ports.items())]) + "\n")
        sys.stdout.flush()
        await asyncio.to_thread(sys.stdin.buffer.read)
    await commands.ended()


class _Commands:
    """The commands that run for clients of any of the servers."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._channels: set[Channel] = set()
        self._none_left = asyncio.Event()
        self._none_left.set()

    async def run(self, channel: Channel) -> None:
        """Run what a client asked for, as a login shell would, and report how it ended."""
        self._channels.add(channel)
        self._none_left.clear()
        try:
            status = await self._run(channel)
            if status < 0:
                channel.exit_with_signal(signal.Signals(-status).name.removeprefix("SIG"))
            else:
                channel.exit(status)
        finally:
            self._channels.discard(channel)
            if not self._channels:
                self._none_left.set()

    async def ended(self) -> None:
        """Wait for commands whose clients are gone: their stdin has ended, and that is all they are told."""
        for channel in self._channels:
            channel.close()
        with suppress(TimeoutError):
            async with asyncio.timeout(COMMANDS_END_S):
                await self._none_left.wait()

    async def _run(self, channel: Channel) -> int:
        words = ("/bin/sh", "-c", channel.command) if channel.command else ("/bin/sh",)
        (stdin, to_stdin), (from_stdout, stdout), (from_stderr, stderr) = os.pipe(), os.pipe(), os.pipe()
        try:
            child = await asyncio.create_subprocess_exec(
                *words, stdin=stdin, stdout=stdout, stderr=stderr, cwd=self._folder, start_new_session=True
            )
        finally:
            for fd in (stdin, stdout, stderr):
                os.close(fd)
        # The channel owns our ends from here on, and closes them when it closes: the command sees that.
        await channel.redirect(stdin=to_stdin, stdout=from_stdout, stderr=from_stderr, send_eof=False)
        status = await child.wait()
        with suppress(TimeoutError, OSError):  # what it wrote last; a child of its own may hold the pipe for long
            async with asyncio.timeout(LAST_WORDS_S):
                await channel.stdout.drain()
                await channel.stderr.drain()
        return status


async def _listen(host_key: asyncssh.SSHKey, client_key: asyncssh.SSHKey, run: Handler) -> asyncssh.SSHAcceptor:
    """Serve on a free port, to whoever holds `client_key` and by no other way in."""
    return await asyncssh.listen(
        ADDRESS,
        0,
        server_host_keys=[host_key],
        authorized_client_keys=asyncssh.import_authorized_keys(client_key.export_public_key().decode()),
        process_factory=run,
        encoding=None,
        password_auth=False,
        kbdint_auth=False,
        gss_host=None,
        allow_pty=False,
        agent_forwarding=False,
        x11_forwarding=False,
    )


def _write_key(key: asyncssh.SSHKey, path: Path) -> None:
    path.touch(mode=0o600)
    path.write_bytes(key.export_private_key())


def _known_hosts(ports: Mapping[str, int], host_key: asyncssh.SSHKey) -> str:
    public = host_key.export_public_key().decode().strip()
    return "".join(f"[{ADDRESS}]:{port} {public}\n" for port in ports.values())


def _ssh_config(folder: Path) -> str:
    """Return an SSH config that leads to the servers and nowhere into the user's own SSH files."""
    place = str(folder).replace("%", "%%")
    return (
        "Host *\n"
        f"    HostName {ADDRESS}\n"
        "    User practice\n"
        f'    IdentityFile "{place}/client_key"\n'
        "    IdentitiesOnly yes\n"
        "    IdentityAgent none\n"
        f'    UserKnownHostsFile "{place}/known_hosts"\n'
        "    GlobalKnownHostsFile /dev/null\n"
    )


def _hosts_map(ports: Mapping[str, int], folder: Path) -> str:
    """Return a hosts map as a user would write it, but for `practice`, which allows loopback addresses."""
    nodes = (f'\n[nodes.{node_id}]\naddress = "{ADDRESS}"\nport = {port}\n' for node_id, port in ports.items())
    defaults = {"python": sys.executable, "workdir": str(folder), "scratch": str(folder)}
    keys = (f"{key} = {json.dumps(value, ensure_ascii=False)}\n" for key, value in defaults.items())
    return "".join(["practice = true\n\n[defaults]\n", *keys, *nodes])


def main(folder: Path) -> None:
    """Be the practice cluster of `folder`."""
    os.umask(0o077)
    try:
        asyncio.run(serve(folder))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
