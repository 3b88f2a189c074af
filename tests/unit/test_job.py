"""What to run is checked when it is said: options, times and environment names."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from gpulayer.errors import JobError
from gpulayer.job import (
    DistributedJob,
    EnvValue,
    RendezvousSpec,
    parse_env_option,
    parse_env_options,
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("A=b", ("A", EnvValue("b"))),
        ("A=", ("A", EnvValue(""))),
        ("A=b=c", ("A", EnvValue("b=c"))),
        ("A=$NODE_RANK", ("A", EnvValue("$NODE_RANK"))),
        ("A.B=64(x2)", ("A.B", EnvValue("64(x2)"))),
        ("HOME", ("HOME", EnvValue("/home/$me", literal=True))),
    ],
)
def test_env_option(text: str, expected: tuple[str, EnvValue]) -> None:
    """`NAME=VALUE` is text with placeholders, `NAME` is data from the login environment."""
    assert parse_env_option(text, {"HOME": "/home/$me"}) == expected


def test_env_option_unset() -> None:
    """A name that the login environment lacks is an error, not an empty value."""
    with pytest.raises(JobError, match=r"`--env DATA`: `DATA` is not set here") as caught:
        parse_env_option("DATA", {})
    assert caught.value.hint == "export it first, or give a value: `--env DATA=VALUE`"


@pytest.mark.parametrize("text", ["", "=x", "-u=x"])
def test_env_option_without_name(text: str) -> None:
    """A name that no variable can have, or that `env` would take for an option, is an error."""
    with pytest.raises(JobError, match="is no variable name"):
        parse_env_option(text, {})


def test_env_options_twice() -> None:
    """One name with two values is an error; saying the same twice is not."""
    assert parse_env_options(["A=1", "B=2", "A=1"], {}) == {"A": EnvValue("1"), "B": EnvValue("2")}
    with pytest.raises(JobError, match="`--env A` is given twice with different values"):
        parse_env_options(["A=1", "A=2"], {})


@pytest.mark.parametrize(
    "name",
    [
        *("PET_NNODES", "TORCHELASTIC_RUN_ID", "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK"),
        *("GROUP_WORLD_SIZE", "ROLE_RANK", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "PYTHON_EXEC"),
        *("TORCH_ELASTIC_WORKER_IDENTICAL", "GPULAYER_JOB_ID", "GPULAYER_MARKER", "GPULAYER_NODE_RANK"),
    ],
)
def test_owned_names(name: str) -> None:
    """A variable that torchrun or gpulayer sets is refused with the way to have it, however it is given."""
    with pytest.raises(JobError, match=f"`{name}` cannot be set") as caught:
        parse_env_option(f"{name}=1", {})
    assert caught.value.hint
    with pytest.raises(JobError, match=f"`{name}` cannot be set"):
        parse_env_option(name, {name: "1"})
    with pytest.raises(JobError, match=f"`{name}` cannot be set"):
        DistributedJob(entrypoint="train.py", env={name: EnvValue("1")})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"entrypoint": ""}, "the script is an empty string"),
        ({"entrypoint": "-x.py"}, "the script `-x.py` begins with `-`"),
        ({"python": ""}, "`--python`: `` is empty"),
        ({"python": "py'3"}, "`--python`: `py'3` holds '"),
        ({"python": "$HOME/python"}, r"`--python`: `\$HOME/python` holds `~` or `\$`"),
        ({"workdir": ""}, "`--workdir`: `` is empty"),
        ({"workdir": "~/x"}, "`--workdir ~/x`: nothing expands `~` here"),
        ({"interface": "eth0,eth1"}, "`--interface`: `eth0,eth1` is a list or a pattern"),
        ({"timeout_s": 0}, "`--timeout` is 0, a number of seconds above 0 is expected"),
        ({"timeout_s": float("nan")}, "`--timeout` is nan"),
        ({"grace_s": -1}, "`--grace` is -1, a number of seconds from 0 up is expected"),
        ({"lost_after_s": float("inf")}, "`--lost-after` is inf"),
    ],
)
def test_refused_settings(settings: dict[str, object], message: str) -> None:
    """A setting that cannot be obeyed is refused by the name of its option."""
    with pytest.raises(JobError, match=message):
        DistributedJob.model_validate({"entrypoint": "train.py"} | settings)


def test_refused_join_timeout() -> None:
    """Ranks that have no time to start never start."""
    with pytest.raises(JobError, match="`--join-timeout` is 0"):
        RendezvousSpec(join_timeout_s=0)


def test_job_is_frozen_and_closed() -> None:
    """A job cannot change after it was checked, and knows no other settings."""
    job = DistributedJob(entrypoint="train.py", grace_s=0)
    with pytest.raises(ValidationError, match="frozen"):
        job.grace_s = 5
    with pytest.raises(ValidationError, match="nodes"):
        DistributedJob.model_validate({"entrypoint": "train.py", "nodes": 2})


def test_undecodable_arguments() -> None:
    """Arguments that are no UTF-8 arrive from the command line as surrogates, and stay as they are."""
    assert DistributedJob(entrypoint="a\udcff.py", args=("\udcfe", "")).args == ("\udcfe", "")
