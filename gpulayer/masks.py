"""What counts as secret, and how a text with secrets in it is shown. The job itself gets every value as it is.

Secret are, in the environment of a job and among the arguments of its script:

- the value of a variable, of an option (`--api-key X`, `--api-key=X`) or of a setting (`model.token=X`) whose name
  looks secret. For options and settings named after tokens and keys, a number or the like is none: `--max-tokens 4096`
- the password in a URL, `https://me:PASSWORD@host`
- wherever it stands, the value of a variable whose name looks secret, unless that is too short to be told from chance
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from gpulayer.events import Event, NodeLost, NodeSwept, Notice

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

MASK = "***"
SHORTEST = 8  # characters of a secret that is also looked for in other texts

_CAMEL_STEP = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
_SECRET_PART = re.compile(r"(?:TOKEN|KEY|SECRET|PASSWORD)S?[0-9]*$")
_NEVER_A_COUNT = re.compile(r"(?:SECRET|PASSWORD)S?[0-9]*$")
# What options named after tokens and keys mostly hold: counts, switches, and tokens of a text, as `<pad>` and `[MASK]`.
_PLAIN_VALUE = re.compile(
    r"[+-]?(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?|true|false|yes|no|on|off|none|null|<[^<>]*>|\[\w*\]|", re.IGNORECASE
)
_SETTING = re.compile(r"(?P<name>[-+~]*[A-Za-z_][\w./-]*)=(?P<value>.*)", re.DOTALL)
_URL_PASSWORD = re.compile(r"(?<=://)(?P<user>[^/\s:@]*:)(?P<password>[^/\s@]+)(?=@)")
_NOT_IN_A_NAME = re.compile(r"[^A-Za-z0-9_]+")


@dataclass(frozen=True, slots=True)
class Part:
    """A piece of a text. `variable` is "" for what may be shown; else it names what a shell would take it from."""

    text: str
    variable: str = ""


def looks_secret(name: str) -> bool:
    """True when the name of an environment variable says that its value is not for reading.

    A part of the name (parts are split at `_`, `.`, `-` and between words in camelCase) ends in TOKEN, KEY, SECRET or
    PASSWORD, or in the plural of one: `HF_TOKEN`, `WANDB_API_KEY`, `apiKey`, but not `TOKENIZERS_PARALLELISM`.
    """
    return any(_SECRET_PART.search(part) for part in _name_parts(name))


def variable_name(name: str) -> str:
    """Return `name` as a shell can have it: options and settings in capitals, variables as they are."""
    plain = _NOT_IN_A_NAME.sub("_", name)
    if re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII):
        return name
    stripped = plain.strip("_").upper() if name.startswith("-") else f"_{plain}"
    return stripped if re.match(r"[A-Za-z_]", stripped) else f"_{stripped}"


def shown(parts: Iterable[Part]) -> str:
    """Return a text with MASK for what is secret in it."""
    return "".join(MASK if part.variable else part.text for part in parts)


class Secrets:
    """The secrets of one environment, and what is to be hidden of a text because of them.

    `more` are variables of other environments whose values are to be hidden too.
    """

    def __init__(self, env: Mapping[str, str], more: Iterable[tuple[str, str]] = ()) -> None:
        self._env = env
        known = {
            value: variable_name(name)
            for name, value in (*more, *env.items())
            if looks_secret(name) and len(value) >= SHORTEST and not _PLAIN_VALUE.fullmatch(value)
        }
        # torchrun is given each `$` of an argument twice.
        doubled = {value.replace("$", "$$"): f"{name}_WITH_DOLLARS_TWICE" for value, name in known.items()}
        self._known = {value: name for value, name in (doubled | known).items() if value}
        longest_first = sorted(self._known, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first))) if longest_first else None

    def variable(self, name: str) -> list[Part]:
        """Return the value of a variable, in parts."""
        value = self._env[name]
        if looks_secret(name):
            return [Part(value, variable_name(name))]
        return self._text(value, f"{variable_name(name)}_PASSWORD")

    def words(self, words: Sequence[str]) -> list[list[Part]]:
        """Return the parts of each word of a command line: of the script's arguments, or of a process."""
        found: list[list[Part]] = []
        option = ""
        for word in words:
            setting = _SETTING.fullmatch(word)
            if setting and _is_secret(setting["name"], setting["value"]):
                secret = Part(setting["value"], self._named(setting["value"], setting["name"]))
                found.append([Part(word[: setting.start("value")]), secret])
            elif option and not word.startswith("-") and _is_secret(option, word):
                found.append([Part(word, self._named(word, option))])
            else:
                found.append(self._text(word, "URL_PASSWORD"))
            option = word if word.startswith("-") and not setting else ""
        return found

    def command(self, text: str) -> str:
        """Return the command line of a process, which a node has joined with spaces, as it may be shown."""
        return " ".join(shown(parts) for parts in self.words(text.split(" ")))

    def hide(self, text: str) -> str:
        """Return a message as it may be shown: without known values and passwords in URLs."""
        return shown(self._text(text, MASK))

    def mask(self, event: Event) -> Event:
        """Return an event as it may be kept and shown. What ranks print is theirs, and stays."""
        match event:
            case NodeSwept():
                return self.mask_swept(event)
            case NodeLost():
                return replace(event, reason=self.hide(event.reason))
            case Notice():
                return replace(event, text=self.hide(event.text))
            case _:
                return event

    def mask_swept(self, event: NodeSwept) -> NodeSwept:
        """Return a sweep with command lines that may be shown."""
        survivors = tuple(replace(one, command=self.command(one.command)) for one in event.survivors)
        return replace(event, survivors=survivors)

    def _named(self, value: str, name: str) -> str:
        return self._known.get(value) or variable_name(name)

    def _text(self, text: str, url_variable: str) -> list[Part]:
        parts: list[Part] = []
        at = 0
        for match in _URL_PASSWORD.finditer(text):
            parts += [*self._values(text[at : match.start("password")]), Part(match["password"], url_variable)]
            at = match.end()
        return [*parts, *self._values(text[at:])]

    def _values(self, text: str) -> list[Part]:
        parts: list[Part] = []
        at = 0
        for match in self._pattern.finditer(text) if self._pattern else ():
            parts += [Part(text[at : match.start()]), Part(match[0], self._known[match[0]])]
            at = match.end()
        return [part for part in (*parts, Part(text[at:])) if part.text]


NONE_KNOWN = Secrets({})
"""For texts about processes that are no job's."""


def _name_parts(name: str) -> list[str]:
    return [part.upper() for part in re.split(r"[^A-Za-z0-9]+", _CAMEL_STEP.sub("_", name))]


def _is_secret(name: str, value: str) -> bool:
    """Tell whether an option or a setting holds a secret."""
    if any(_NEVER_A_COUNT.search(part) for part in _name_parts(name)):
        return bool(value)
    return looks_secret(name) and not _PLAIN_VALUE.fullmatch(value)
