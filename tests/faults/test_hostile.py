"""A node that lies: its supervisor sends what no supervisor would. It is dropped, and harms neither screen nor disk."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import time
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from tests.support import jobs
from tests.support.endings import assert_clean, outcomes
from tests.support.hostile import MOST_BYTES, Peak, Places, assert_harmless, lying_map
from tests.support.liar import TOKEN
from tests.support.terminal import terminal as open_terminal

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from tests.conftest import ClusterFactory
    from tests.faults.conftest import Row
    from tests.support.cluster import Cluster
    from tests.support.jobs import Finished

pytestmark = pytest.mark.ssh

QUICK = ("--no-preflight", "--grace", "1", "--lost-after", "5")
BROKE = "the supervisor broke the protocol: "

# What a node says in place of a hello, and what is then said of it.
GREETINGS = {
    "greet(b'{\"type\":\"'); flood(b'x')": BROKE + "a header line is longer than 65536 bytes",
    "greet(frame({**HELLO, 'size': 10**9}))": BROKE + "not a frame: b'{",
    "greet(b'\\x1b[2J\\0\\xff\\n'); wait()": BROKE + r"not a frame: b'\x1b[2J\x00\xff'",
    "greet(b'[1, 2]\\n'); wait()": BROKE + "not a frame: b'[1, 2]'",
    "greet(frame({**HELLO, 'version': DEEP})); wait()": "the supervisor answered {",
    "greet(frame({**HELLO, 'pid': float('nan')})); wait()": "the supervisor's hello makes no sense: ",
    "greet(frame({**HELLO, 'pid': 10**4000})); wait()": "the supervisor's hello makes no sense: ",
    "greet(frame({**HELLO, 'hostname': 'h' * 60000})); wait()": "the supervisor's hello makes no sense: ",
    "greet(frame({'type': 'too_old', 'python': NASTY})); wait()": "its Python is ",
    "greet(frame({'type': 'started', 'pid': 1})); wait()": "the supervisor answered {",
    "greet(frame(HELLO) + frame(HELLO)); wait()": "the supervisor answered {'type': 'hello', ",
    "stdin.take_boot(); say(b'\\0gpulayer:' + b'0' * 32 + frame(HELLO)); os._exit(3)": "no supervisor answered",
    "os.write(2, NASTY.encode('utf-8', 'replace')); os._exit(127)": "cannot be run there: ",
    "flood(b'\\x1b[2J' + b'noise')": "no supervisor answered, and its login shell printed ",
}

HOLDER = "{'job_id': NASTY, 'user': NASTY, 'login': NASTY, 'since': 0, 'scope': '', 'gpus': None}"

# What it says where the node is to be held, and where its part is to be prepared.
HOLDS = {
    f"greet(); hear('hold'); tell('refused', line([{HOLDER}] * 100), code='held', message=NASTY); wait()": "held by",
    "greet(); hear('hold'); tell('refused', b'[]', code='held', message=''); wait()": "holders is empty",
    "greet(); hear('hold'); tell('refused', b'[' * 9000, code='held', message=''); wait()": "list of holders is None",
    "greet(); hear('hold'); tell('refused', line([{NASTY: 1}]), code='held', message=''); wait()": "has no ['job_id', ",
    "greet(); hear('hold'); tell('refused', code=NASTY, message=NASTY * 99); wait()": "../../../../tmp/",
    "greet(); hear('hold'); tell('held', size=10**9); wait()": BROKE,
    "greet(); tell('ended', kept=''); wait()": "the supervisor answered {'type': 'ended', 'kept': ''}",
}
PREPARES = {
    "refused', code=NASTY, message=NASTY": "../../../../tmp/",
    "refused', code=[], message=7": "the supervisor answered {",
    "prepared', interface='e' * 60000": "the supervisor answered {",
    "prepared', interface=['eth0']": "the supervisor answered {",
    "x', y=DEEP": "the supervisor answered {",
    "started', pid=4": "the supervisor answered {",
    "helper_output', b'x'": "the supervisor answered {",
}
ANSWERS = {f"greet(); hear('prepare'); tell('{said}); wait()": reason for said, reason in PREPARES.items()}
ANSWERS["greet(); hear('prepare'); flood(frame({'type': 'output', 'local_rank': 0}, b'x'))"] = (
    "the supervisor answered {"
)


def _run(
    cluster: Cluster,
    hosts_file: Path,
    options: Sequence[str],
    script: str,
    limit_s: float = 60,
    *,
    terminal: bool = False,
) -> Finished:
    """Run a job, and see that the liars did the login node no harm. `terminal`: what it draws there is its stderr."""
    places = Places(cluster.login)
    path = jobs.write_script(cluster, script)
    with contextlib.ExitStack() as stack:
        pty = stack.enter_context(open_terminal()) if terminal else None
        pipe, env = pty.slave if pty else subprocess.PIPE, {"TERM": "xterm"}
        live = stack.enter_context(
            jobs.launch(cluster.login, hosts_file, options, path, env=env, stdout=pipe, stderr=pipe)
        )
        if pty:
            pty.start_reading()
        peak = Peak(live)
        done = live.finish(limit_s)
        if pty:
            pty.hang_up()
            done = replace(done, stderr=pty.text)
    print(done.stderr[:6000], done.returncode, peak.read() >> 20)
    assert "Traceback" not in done.stderr
    assert_harmless(done.stderr, terminal=terminal)
    assert peak.read() < MOST_BYTES
    places.assert_unchanged()
    assert_clean(cluster)
    return done


def _note_time(done: Finished, row: Row) -> None:
    """How long it took from the first node that was dropped to the end of the run, which was clean."""
    row.begins()
    row.clean(time.monotonic() + done.receipt["took_s"] - done.receipt["cause"]["at_s"])


def _assert_refused(done: Finished, reasons: Sequence[str], row: Row) -> None:
    """Nothing was started, and each liar, h01 and on, is named with its own reason in one line."""
    assert done.returncode == done.receipt["exit_code"] == 3
    assert done.named("command_started") == []
    verdict = f"{len(reasons)} of {len(reasons) + 1} nodes cannot take part, so nothing was started"
    assert f"gpulayer: error: {verdict}\n" in done.stderr
    said = {one["node_id"]: one["text"] for one in done.receipt["refused"]}
    for number, reason in enumerate(reasons, 1):
        text = said.pop(f"h{number:02d}")
        assert reason in text
        assert len(text) < 1500
        assert "\n" not in text
    assert said == {}
    row.says(f"exit 3; `{verdict}`, and each node's own reason")


@pytest.mark.parametrize(
    "behaviours",
    [
        pytest.param(GREETINGS, marks=pytest.mark.fault("a node greets with what is no greeting"), id="greeting"),
        pytest.param(HOLDS, marks=pytest.mark.fault("a node answers `hold` with what is no answer"), id="hold"),
        pytest.param(ANSWERS, marks=pytest.mark.fault("a node answers `prepare` with what is no answer"), id="prepare"),
    ],
)
def test_before_the_start(make_cluster: ClusterFactory, behaviours: dict[str, str], row: Row) -> None:
    """Frames that are huge, endless, malformed, out of order or for another nonce: each such node is named with why."""
    cluster = make_cluster(1 + len(behaviours))
    row.begins()
    hosts_file = lying_map(cluster, {f"h{number:02d}": one for number, one in enumerate(behaviours, 1)})
    done = _run(cluster, hosts_file, QUICK, "raise SystemExit(9)")
    _assert_refused(done, list(behaviours.values()), row)


# What a node says once its command runs, and what is then said of it.
NEWS = {
    "tell('output', local_rank=0, stream='stdout', size=10**9)": BROKE + "not a frame: b'{",
    "say(b'{\"type\":'); flood(b' ')": BROKE + "a header line is longer than 65536 bytes",
    "say(b'\\x1b[2J\\0\\xff\\n')": BROKE + "not a frame: b",
    "say(b'[[1], 2]\\n')": BROKE + "not a frame: b'[[1], 2]'",
    "tell('exit', status=DEEP, parts=[])": BROKE + "a 'exit' frame",
    "tell('rank_exit', local_rank=0, status=float('nan'), parts=[])": BROKE + "a 'rank_exit' frame",
    "tell('exit', status=-1, parts=[])": BROKE + "a 'exit' frame",
    "tell('swept', killed=10**4000, survivors=[])": BROKE + "a 'swept' frame",
    'say(b\'{"type":"pong","type":"exit","type":"x"}\\n\')': BROKE + "frame 'x' has no place here",
    "tell('exit', status=9, parts=[['stdout', 1]] * 3000)": BROKE + "a 'exit' frame",
    "tell('error', message=NASTY * 99)": "../../../../tmp/",
    "tell('rank', local_rank=99, pid=1)": BROKE + "a 'rank' frame",
    "tell('rank_exit', local_rank=1, status=0, parts=[])": BROKE + "a 'rank_exit' frame",
    "tell('started', pid=1)": BROKE + "frame 'started' came twice",
    "say(frame(HELLO))": BROKE + "frame 'hello' has no place here",
    "succeed(); tell('exit', status=0, parts=[])": BROKE + "frame 'exit' came twice",
    "tell('ended', kept='', outputs=False)": BROKE + "frame 'ended' came before 'swept'",
    "tell('prepared', interface='eth0')": BROKE + "frame 'prepared' has no place here",
    "flood(frame({'type': 'rank', 'local_rank': 0, 'pid': 1}))": BROKE + "frame 'rank' came twice",
    "flood(frame({'type': 'pong'}))": BROKE + "a pong that nobody asked for",
    "say(b'\\0gpulayer:' + b'0' * 32 + b'\\n')": BROKE + "not a frame: b",
    "succeed(); flood(frame({'type': 'drained'}))": BROKE + "frame 'drained' came twice",
    "flood(frame({'type': 'helper_output'}, b'x' * 60000))": BROKE + "frame 'helper_output' has no",
}


@pytest.mark.fault("a node tells what cannot be, while the job runs")
def test_while_it_runs(make_cluster: ClusterFactory, row: Row) -> None:
    """Each such node is lost with one clear line; the honest one is ended and verified; exit code 4."""
    cluster = make_cluster(1 + len(NEWS))
    liars = {f"h{number:02d}": f"run(); {news}; wait()" for number, news in enumerate(NEWS, 1)}
    done = _run(cluster, lying_map(cluster, liars), QUICK, "import time; time.sleep(1000)")
    _note_time(done, row)
    assert done.returncode == done.receipt["exit_code"] == 4
    assert outcomes(done.receipt) == [("stopped", True)] + [("lost", True)] * len(NEWS)
    for node, (news, reason) in zip(done.receipt["nodes"][1:], NEWS.items(), strict=True):
        assert reason in node["lost"], news
        assert len(node["lost"]) < 1200
        assert "\n" not in node["lost"]
    assert re.search(r"  first: node \d+ \(h\d\d\) was lost: the supervisor broke the protocol: ", done.stderr)
    row.says("exit 4; `node 1 (h01) was lost: the supervisor broke the protocol: frame 'rank' came twice`")


# What is said to the launcher that logs in again to clean up behind a node that was lost.
SWEEPS = (
    "b'x' * 100000",
    "frame({**SWEPT, 'size': 10**9})",
    "frame({**SWEPT, 'killed': -1})",
    "frame({**SWEPT, 'survivors': [NASTY]})",
    "frame({**SWEPT, 'survivors': [{'pid': 1, 'state': 'S', 'command': NASTY}] * 99})",
    "frame(HELLO)",
    "frame({'type': 'refused', 'code': NASTY, 'message': NASTY})",
)


@pytest.mark.fault("a node lies to the launcher that comes to clean up")
@pytest.mark.slow
def test_a_lie_to_who_cleans_up(make_cluster: ClusterFactory, row: Row) -> None:
    """No such node is taken for clean: exit 5, each is named, and the honest one is ended and verified."""
    cluster = make_cluster(1 + len(SWEEPS))
    liars = {f"h{number:02d}": f"run({one}); say(b'no frame\\n'); wait()" for number, one in enumerate(SWEEPS, 1)}
    done = _run(cluster, lying_map(cluster, liars), QUICK, "import time; time.sleep(1000)")
    _note_time(done, row)
    assert done.returncode == done.receipt["exit_code"] == 5
    assert outcomes(done.receipt) == [("stopped", True)] + [("lost", False)] * len(SWEEPS)
    assert "something may still run there" in done.stderr
    assert done.stderr.count("still there: pid 1, state S, ../../../../tmp/") == 32
    row.says("exit 5; `h[01-07]: lost: the supervisor broke the protocol: ...; something may still run there`")


# What a probe says in place of what it has seen. `facts` are the true ones, or an answer about connections.
FACTS = {
    "lie_to_probe(lambda facts: b'\\n' * 500000 + line(facts))": "the probe answered b'' where facts was due",
    "lie_to_probe(lambda facts: b'x' * (1 << 20) * 9)": BROKE + "a line of its probe has no end",
    "lie_to_probe(lambda facts: line({**facts, 'time_s': 10**400}))": "the probe's facts.time_s is 1000000",
    "lie_to_probe(lambda facts: line({**facts, 'time_s': DEEP}))": "the probe's facts.time_s is [[[",
    "lie_to_probe(lambda facts: line({**facts, 'listener': {'port': 70000}}))": "facts.listener.port is 70000",
    "lie_to_probe(lambda facts: line({**facts, 'free_ports': [-1]}))": "the probe's facts.free_ports[0] is -1",
    "lie_to_probe(lambda facts: line({**facts, NASTY: {'error': 7}}))": "the probe's facts has no [], or more",
    "lie_to_probe(lambda facts: line({**facts, 'python': {'error': {}}}))": "the probe's facts.errors.python is {}",
    "lie_to_probe(lambda facts: line({**facts, 'hostname': 'x' * 5000}))": "the probe's facts.hostname is 'xxx",
    "lie_to_probe(lambda facts: line({**facts, 'type': NASTY}))": "where facts was due",
    "relay(lambda header, data: flood(frame(OUTPUT, b'\\n' * 9999)) if header == END else [(header, data)])": "not end",
}


@pytest.mark.fault("a node's probe lies during preflight")
def test_in_preflight(make_cluster: ClusterFactory, row: Row) -> None:
    """Each such node is named with what it said; the honest ones are not blamed for it."""
    cluster = make_cluster(1 + len(FACTS))
    liars = {f"h{number:02d}": one for number, one in enumerate(FACTS, 1)}
    row.begins()
    done = _run(cluster, lying_map(cluster, liars), ["--preflight-timeout", "8"], "raise SystemExit(9)", 90)
    _assert_refused(done, list(FACTS.values()), row)


HEAD_WAITS = "import os, time; time.sleep(0 if os.environ['RANK'] == '1' else 1000)"
EVERY_TEXT = """
def change(header, payload):
    header = nasty(header)
    if header["type"] == "swept":
        header["survivors"] = [{"pid": 1, "state": "D", "command": NASTY}]
    if header["type"] == "exit":
        header, payload = dict(header, status=256, parts=[["stderr", len(WORDS)]]), WORDS
    return [(header, payload)]
WORDS = NASTY.encode("utf-8", "replace") * 30
relay(change)
"""


@pytest.mark.fault("a node has terminal escapes in every text")
@pytest.mark.parametrize("terminal", [False, True], ids=["pipe", "terminal"])
def test_escapes_in_every_text(cluster2: Cluster, row: Row, terminal: bool) -> None:
    """The screen and the receipt have harmless characters in their place; the folder named is the plan's own."""
    row.begins()
    hosts_file = lying_map(cluster2, {"h01": EVERY_TEXT})
    done = _run(cluster2, hosts_file, [*QUICK, "--verbose"], HEAD_WAITS, terminal=terminal)
    assert done.returncode == done.receipt["exit_code"] == 5
    assert outcomes(done.receipt) == [("stopped", True), ("failed", False)]
    node = done.receipt["nodes"][1]
    assert node["kept_on_node"] == f"/tmp/gpulayer-{done.run_dir.name}-n1"
    assert TOKEN in node["hostname"]
    assert_harmless(json.dumps(done.receipt, ensure_ascii=False))
    row.says(
        "exit 5; `h01: failed; something may still run there`, the texts with all that could steer a terminal replaced"
    )


@pytest.mark.fault("a node says nothing more during preflight")
def test_silence_in_preflight(cluster2: Cluster, row: Row) -> None:
    """The head answers pings and does not say that it holds the port: the time for the checks is the limit."""
    row.begins()
    silent = "relay(lambda header, data: [(header, data)] if header['type'] != 'reserved' else [])"
    done = _run(cluster2, lying_map(cluster2, {"h00": silent}), ["--preflight-timeout", "2"], "raise SystemExit(9)")
    assert done.returncode == 3
    assert "h00: no answer to the checks within 2 s: its rendezvous port\n" in done.stderr
    assert done.named("command_started") == []
    row.says("exit 3; `h00: no answer to the checks within 2 s: its rendezvous port`")
