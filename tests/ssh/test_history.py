"""What a script reads of a run, and past runs: `run --json`, `gpulayer runs`, `gpulayer logs`, and the receipt."""

from __future__ import annotations

import json
import os
import re
from datetime import datetime
from typing import TYPE_CHECKING, Any

import pytest

import gpulayer
from tests.support import endings
from tests.support.endings import assert_clean
from tests.support.flood import FLOOD
from tests.support.jobs import GPULAYER, launch, map_with_fake_torch, run, write_script
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from tests.support.cluster import Cluster
    from tests.support.jobs import Finished

pytestmark = pytest.mark.ssh

# Each rank says three things; they take turns, half a second apart: 0, 1, 0, 1.
SPEAK = f"""{endings.BEGIN}
def turn(number):
    if number:
        wait_for(f"turn{{number}}")
        time.sleep(0.5)

turn(rank)
print("err of", rank, file=sys.stderr, flush=True)
print("out of", rank, flush=True)
note(f"turn{{rank + 1}}")
turn(rank + 2)
print("end of", rank, flush=True)
note(f"turn{{rank + 3}}")
"""
# Rank 1 fails as a script under torchrun's @record does: its error file says why.
FAIL = """
import json, os, sys
if os.environ["RANK"] == "1":
    with open(os.environ["TORCHELASTIC_ERROR_FILE"], "w") as file:
        json.dump({"message": {"message": "ValueError: no " + os.environ["API_KEY"], "extraInfo": {}}}, file)
    sys.exit(17)
"""
HOLD = f"{endings.BEGIN}print('begin', rank, flush=True)\nnote(f'ready{{rank}}')\nwait_for('go')\nprint('end', rank)\n"

Json = dict[str, Any]


def _lines(done: Finished) -> list[Json]:
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_a_run_for_scripts_and_its_record(cluster2: Cluster) -> None:
    """`--json` tells all that happens and nothing else, to the receipt; then the run can be listed and read again."""
    hosts = map_with_fake_torch(cluster2, env={"OUT": str(cluster2.new_folder("out"))})
    done = run(cluster2.login, hosts, ["--json"], write_script(cluster2, SPEAK))
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    assert_clean(cluster2)
    lines = _lines(done)
    first, last = lines[0], lines[-1]
    assert (first["event"], first["version"], first["gpulayer_version"]) == ("run", 1, gpulayer.__version__)
    assert (first["job_id"], first["run_dir"]) == (done.run_dir.name, str(done.run_dir))
    assert first["nodes"] == [{"node_rank": r, "node_id": f"h0{r}", "ranks": [r]} for r in (0, 1)]
    assert last == {"event": "receipt", **done.receipt}
    assert [one for one in lines if one["event"] not in {"output", "receipt"}] == done.events
    said = {
        (rank, stream): "".join(
            one["text"] for one in lines if one["event"] == "output" and (one["rank"], one["stream"]) == (rank, stream)
        )
        for rank in (0, 1)
        for stream in ("stdout", "stderr")
    }
    assert {key: text.encode() for key, text in said.items()} == {
        (rank, stream): done.log(rank, rank, stream) for rank in (0, 1) for stream in ("stdout", "stderr")
    }

    receipt = done.receipt
    started, ended = (datetime.fromisoformat(receipt[name]) for name in ("started_at", "ended_at"))
    assert started.utcoffset() is not None
    assert abs((ended - started).total_seconds() - receipt["took_s"]) < 0.01
    for rank, node in enumerate(receipt["nodes"]):
        assert (node["ssh"], node["hostname"]) == (f"h0{rank}", f"h0{rank}")
        assert (node["verified_clean"], node["verified"]) == (True, "by the supervisor")
        assert node["output_bytes"] == sum(len(done.log(rank, rank, name)) for name in ("stdout", "stderr"))
        assert re.match(r"3\.\d+\.\d+", node["job_python"])
        assert node["torch"]

    login = cluster2.login
    listed = login.run([*GPULAYER, "runs"], check=True).stdout.splitlines()[-1].split()
    assert (listed[0], listed[-3:]) == (done.run_dir.name, ["h[00-01]", "0", "succeeded"])
    shown = login.run([*GPULAYER, "logs", "last"], check=True)
    assert shown.stdout == "[0] out of 0\n[0] end of 0\n[1] out of 1\n[1] end of 1\n"
    assert shown.stderr == "[0] err of 0\n[1] err of 1\n"
    merged = login.run([*GPULAYER, "logs", done.run_dir.name, "--merge"], check=True).stdout.splitlines()
    assert merged == ["[0] out of 0", "[1] out of 1", "[0] end of 0", "[1] end of 1"]


def test_a_failure_and_a_refusal_for_scripts(cluster2: Cluster) -> None:
    """The exit code is the same; the rank's own error is in the receipt, masked; a refusal has its receipt too."""
    hosts = map_with_fake_torch(cluster2)
    done = run(cluster2.login, hosts, ["--json", "-e", "API_KEY=s3cr3t-value"], write_script(cluster2, FAIL))
    assert (done.returncode, done.stderr) == (1, ""), done.stdout
    assert_clean(cluster2)
    last = _lines(done)[-1]
    assert last == {"event": "receipt", **done.receipt}
    assert (last["exit_code"], last["cause"]["rank"], last["cause"]["code"]) == (1, 1, 17)
    assert [rank["error"] for node in last["nodes"] for rank in node["ranks"]] == [None, "ValueError: no ***"]
    assert "s3cr3t" not in done.stdout

    done = run(cluster2.login, hosts, ["--json", "-C", "/no/such/folder"], write_script(cluster2, SPEAK))
    assert done.returncode == 3
    assert done.stderr.startswith("gpulayer: error: ")
    last = _lines(done)[-1]
    assert last == {"event": "receipt", **done.receipt}
    assert (last["exit_code"], last["refused"]) == (3, [])
    assert {one["check"] for one in last["findings"]} == {"workdir"}
    assert last["text"] in done.stderr


def test_a_run_is_followed_while_it_goes_on(cluster2: Cluster) -> None:
    """From another shell: `runs` says that it runs, `logs -f` shows what comes until the end, and says how it ended."""
    out = cluster2.new_folder("out")
    hosts, script = map_with_fake_torch(cluster2, env={"OUT": str(out)}), write_script(cluster2, HOLD)
    login = cluster2.login
    with launch(login, hosts, [], script) as live:
        endings.wait_ready(out, 2)
        name = live.run_dir.name
        assert login.run([*GPULAYER, "runs"], check=True).stdout.splitlines()[-1].endswith("  -     running")
        follower = login.popen([*GPULAYER, "logs", "last", "--follow", "--merge"], stdout=-1, stderr=-1)
        assert follower.stdout
        begun = {follower.stdout.readline() for _ in range(2)}
        (out / "go").touch()
        done = live.finish()
    rest, err = follower.communicate(timeout=30)
    assert (done.returncode, follower.returncode) == (0, 0)
    assert begun == {b"[0] begin 0\n", b"[1] begin 1\n"}
    assert sorted(rest.splitlines()) == [b"[0] end 0", b"[1] end 1"]
    assert err.decode() == f"gpulayer: job {name}: succeeded, exit code 0\n"


def test_a_script_that_does_not_read_holds_nothing_up(cluster2: Cluster) -> None:
    """With `--json` into a pipe that nobody reads, the job runs to its end and its files are whole."""
    reading, writing = os.pipe()
    hosts = map_with_fake_torch(cluster2, hosts=cluster2.hosts[:1])
    with launch(cluster2.login, hosts, ["--json"], write_script(cluster2, FLOOD), ["12"], stdout=writing) as live:
        os.close(writing)
        done = live.finish()
    os.close(reading)
    assert (done.returncode, done.receipt["exit_code"], len(done.log(0, 0))) == (0, 0, 12_000_000)
    wait_until(lambda: live.process.poll() is not None, "it has left")
    assert_clean(cluster2)
