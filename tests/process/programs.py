"""Programs that tests run on a node."""

from __future__ import annotations

# A rank that says "ready" and ends on SIGTERM, as most do.
POLITE = "import time; print('ready'); time.sleep(1000)"

# A rank that says nothing, ignores SIGTERM, and double-forks a daemon into a session of its own with nothing in its
# environment. Their pids are in FOLDER/worker-RANK and FOLDER/daemon-RANK.
STUBBORN = """
import os, signal, sys, time
def note(name):
    with open(sys.argv[1] + "/" + name + "-" + os.environ["RANK"], "w") as file:
        print(os.getpid(), file=file)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if os.fork() == 0:
    os.setsid()
    if os.fork():
        os._exit(0)
    null = os.open("/dev/null", os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    note("daemon")
    os.execve("/bin/sleep", ["sleep", "1000"], {})
os.wait()
note("worker")
time.sleep(1000)
"""

# A command with a child; both note each signal they get, in FOLDER/command and FOLDER/child, and go on.
NOTING = """
import os, signal, sys, time
name = "command" if os.fork() else "child"
file = open(sys.argv[1] + "/" + name, "a", buffering=1)
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
    signal.signal(number, lambda number, frame: print(signal.Signals(number).name, file=file))
os.write(1, b"ready %s\\n" % name.encode())
while True:
    time.sleep(1000)
"""

# A command that has had its workers and now waits for others, deaf to SIGTERM: torchrun in its exit barrier.
BARRIER = """
import os, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if os.fork() == 0:
    os._exit(0)  # its parent does not even reap it
print("ready", flush=True)
while True:
    time.sleep(1000)
"""

# A command that starts ranks `sh -c ARGUMENT` as torchrun does, and looks after them every 0.1 s.
QUICK = """
import os, subprocess, sys, time
ranks = []
for number, text in enumerate(sys.argv[2:]):
    folder = f"{sys.argv[1]}/ranks/x_1/attempt_0/{number}"  # torchrun makes a rank's files before it starts it
    os.makedirs(folder)
    open(f"{folder}/stdout.log", "w").close()
    env = dict(os.environ, LOCAL_RANK=str(number), RANK=str(number))
    ranks.append(subprocess.Popen(["/bin/sh", "-c", text], env=env, start_new_session=True))
time.sleep(0.1)
while any(rank.poll() is None for rank in ranks):
    time.sleep(0.1)
"""

# Part of a rank: a chain of processes, each gone before it can be signalled, and a tree of 121 of them.
CHAIN = """
import os, time
if os.fork() == 0:
    os.setsid()
    over_at = time.monotonic() + 60  # a chain that nobody ends must not last for ever
    while time.monotonic() < over_at:
        if os.fork():
            os._exit(0)
    os._exit(0)
"""
TREE = """
import os, time
def grow(depth):
    for _ in range(3):
        if depth and os.fork() == 0:
            os.setsid()
            grow(depth - 1)
            time.sleep(1000)
if os.fork() == 0:
    grow(4)
    time.sleep(1000)
"""
