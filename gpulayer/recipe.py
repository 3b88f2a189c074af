"""What a plan was made from, so that it can be made again: the job, without its secrets, and where its nodes came from.

A secret leaves a blank in the text that held it. Each blank has the name of a variable, and whoever makes the plan
again gives the value of that variable. Values with one name are one secret, or there is no recipe.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from gpulayer.errors import PlanFileError
from gpulayer.job import DistributedJob, EnvValue
from gpulayer.masks import Part, Secrets, shown
from gpulayer.placeholders import ESCAPE, substitute

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

_KEYS = {"job", "cwd", "hosts", "blanks"}
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True, slots=True)
class Recipe:
    """A job with blanks, the folder that gpulayer was started in, and where the nodes came from.

    `blanks` has the texts that held secrets, by their place in the job: turn by turn what stands there and the name of
    a secret. `hosts` is what `--hosts` would name.
    """

    job: DistributedJob
    cwd: str
    hosts: str
    blanks: Mapping[str, tuple[str, ...]]

    @property
    def secret_names(self) -> tuple[str, ...]:
        """The names of the secrets that are to be filled in."""
        return tuple(dict.fromkeys(name for words in self.blanks.values() for name in words[1::2]))

    def filled(self, values: Mapping[str, EnvValue]) -> DistributedJob:
        """Return the job with these secrets in its blanks."""
        texts = {
            place: "".join(
                _as_it_is(values[word], literal=_is_literal(self.job, place)) if number % 2 else word
                for number, word in enumerate(words)
            )
            for place, words in self.blanks.items()
        }
        return _with_texts(self.job, texts)

    def json(self) -> dict[str, object]:
        """Return the form in a plan."""
        return {
            "job": job_json(self.job),
            "cwd": self.cwd,
            "hosts": self.hosts,
            "blanks": {place: list(words) for place, words in self.blanks.items()},
        }


def write_recipe(job: DistributedJob, environments: Sequence[Mapping[str, str]], *, cwd: str, hosts: str) -> Recipe:
    """Return the recipe of a job. `environments` are those of its nodes, secrets included.

    Raises PlanFileError where two secrets would have one name.
    """
    resolved = [(name, value) for env in environments for name, value in env.items()]
    typed = [(name, value.replace("$", f"${{{ESCAPE}}}")) for name, value in resolved]
    secrets = Secrets({name: item.value for name, item in job.env.items()}, [*typed, *resolved])
    blanks: dict[str, tuple[str, ...]] = {}
    values: dict[str, str] = {}
    for place, parts in _secret_texts(job, secrets):
        blanks[place] = tuple(_turn_by_turn(parts))
        for part in parts:
            meaning = part.text if _is_literal(job, place) else substitute(part.text, {ESCAPE: "$"})
            if part.variable and values.setdefault(part.variable, meaning) != meaning:
                raise PlanFileError(
                    f"the plan cannot be saved: two secrets of the job would both be called `{part.variable}`",
                    hint="pass one of them on in an environment variable: `-e NAME`, with a name such as MY_TOKEN",
                )
    return Recipe(_with_texts(job, {place: _masked(words) for place, words in blanks.items()}), cwd, hosts, blanks)


def read_recipe(document: Mapping[str, Any]) -> Recipe:
    """Return the recipe that a plan holds. Raises PlanFileError for anything but a recipe."""
    if document.keys() != _KEYS:
        raise _no_recipe(f"has the keys {', '.join(sorted(document))}")
    job, cwd, hosts, blanks = (document[key] for key in ("job", "cwd", "hosts", "blanks"))
    if not all(isinstance(text, str) and "\0" not in text for text in (cwd, hosts)) or not cwd.startswith("/"):
        raise _no_recipe("has no `cwd` and no `hosts`")
    if not isinstance(job, dict) or not isinstance(blanks, dict):
        raise _no_recipe("has no job")
    try:
        made = DistributedJob.model_validate(job)
    except ValidationError:
        made = None
    if made is None or job_json(made) != job:
        raise _no_recipe("has another job than this version of gpulayer can write")
    found = {place: tuple(words) for place, words in blanks.items() if _are_words(words)}
    if len(found) != len(blanks) or any(_text_at(made, place) != _masked(words) for place, words in found.items()):
        raise _no_recipe("has blanks where the job has none")
    return Recipe(made, cwd, hosts, found)


def job_json(job: DistributedJob) -> dict[str, Any]:
    """Return a job as JSON has it."""
    plain: dict[str, Any] = _plain(job.model_dump())
    return plain


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, tuple | list) else value


def _no_recipe(what: str) -> PlanFileError:
    return PlanFileError(f"what the plan was made from cannot be read: it {what}", hint="render the plan anew")


def _secret_texts(job: DistributedJob, secrets: Secrets) -> Iterator[tuple[str, list[Part]]]:
    """Yield the texts of a job that hold secrets, in parts, each with its place."""
    script, *args = secrets.words((job.entrypoint, *job.args))
    texts = [("entrypoint", script), *((f"args.{number}", parts) for number, parts in enumerate(args))]
    texts += [(f"env.{name}", secrets.variable(name)) for name in job.env]
    yield from ((place, parts) for place, parts in texts if any(part.variable for part in parts))


def _turn_by_turn(parts: Sequence[Part]) -> Iterator[str]:
    text = ""
    for part in parts:
        if part.variable:
            yield from (text, part.variable)
            text = ""
        else:
            text += part.text
    yield text


def _masked(words: Sequence[str]) -> str:
    return shown(Part(word, word if number % 2 else "") for number, word in enumerate(words))


def _are_words(words: object) -> bool:
    if not isinstance(words, list) or len(words) % 2 == 0 or not all(isinstance(word, str) for word in words):
        return False
    return all(_NAME.fullmatch(word) for word in words[1::2])


def _text_at(job: DistributedJob, place: str) -> str | None:
    """Return the text at one place of a job, None where there is no such place."""
    kind, _, name = place.partition(".")
    if place == "entrypoint":
        return job.entrypoint
    if kind == "env" and name in job.env:
        return job.env[name].value
    return next((arg for number, arg in enumerate(job.args) if place == f"args.{number}"), None)


def _with_texts(job: DistributedJob, texts: Mapping[str, str]) -> DistributedJob:
    env = {name: EnvValue(texts.get(f"env.{name}", item.value), item.literal) for name, item in job.env.items()}
    args = tuple(texts.get(f"args.{number}", arg) for number, arg in enumerate(job.args))
    return job.model_copy(update={"entrypoint": texts.get("entrypoint", job.entrypoint), "args": args, "env": env})


def _is_literal(job: DistributedJob, place: str) -> bool:
    kind, _, name = place.partition(".")
    return kind == "env" and job.env[name].literal


def _as_it_is(given: EnvValue, *, literal: bool) -> str:
    """Return a value for a text that is read with placeholders, or for one that is data."""
    if literal:
        return given.value if given.literal else substitute(given.value, {ESCAPE: "$"})
    return given.value.replace("$", f"${{{ESCAPE}}}") if given.literal else given.value
