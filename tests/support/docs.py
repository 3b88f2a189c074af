"""Reading the project's Markdown, for tests that hold it to what the code does."""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

_FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
_CODE_SPAN = re.compile(r"(?<!`)(`+)(?!`)(.+?)(?<!`)\1(?!`)", re.DOTALL)
_LINK = re.compile(r"!?\[(?:[^\[\]]|\[[^\[\]]*\])*\]\(([^()\s]+)\)")
_HEADING = re.compile(r"^#{1,6} +(.+?) *#*$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block of a page: its language ("" for none) and its text."""

    page: Path
    language: str
    text: str


def pages() -> list[Path]:
    """Return every Markdown file of the project."""
    return sorted(
        path
        for path in ROOT.rglob("*.md")
        if not any(part.startswith((".", "build", "runs")) for part in path.relative_to(ROOT).parts)
    )


def blocks(page: Path) -> list[Block]:
    """Return the fenced blocks of a page."""
    return [Block(page, match[1], match[2]) for match in _FENCE.finditer(page.read_text(encoding="utf-8"))]


def prose(page: Path) -> str:
    """Return a page without its fenced blocks and comments."""
    return _COMMENT.sub("", _FENCE.sub("", page.read_text(encoding="utf-8")))


def code_spans(page: Path) -> list[str]:
    """Return the inline code of a page, white space folded."""
    return [" ".join(match[2].split()) for match in _CODE_SPAN.finditer(prose(page))]


def links(page: Path) -> list[str]:
    """Return the targets of a page's links."""
    return _LINK.findall(_CODE_SPAN.sub("code", prose(page)))


def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub makes of a page's headings."""
    found: set[str] = set()
    for heading in _HEADING.findall(prose(page)):
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        base = re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")
        numbered = (base if number == 0 else f"{base}-{number}" for number in itertools.count())
        found.add(next(name for name in numbered if name not in found))
    return found


def indented_lines(page: Path) -> list[str]:
    """Return the lines of a page's indented blocks: in troubleshooting.md, the shapes of messages."""
    lines = prose(page).splitlines()
    return [line[4:].rstrip() for line in lines if line.startswith("    ") and line.strip()]


def entries(page: Path, section: str) -> dict[str, list[str]]:
    """Return the shapes of messages under each `###` heading of a section."""
    text = page.read_text(encoding="utf-8").partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    parts = [part.partition("\n") for part in re.split(r"^### ", text, flags=re.MULTILINE)[1:]]
    return {head: [line[4:] for line in body.splitlines() if line.startswith("    ")] for head, _, body in parts}


def table_rows(text: str) -> list[list[str]]:
    """Return the cells of all table rows in a piece of Markdown, heads left out."""
    lines = text.splitlines()
    heads = {at - 1 for at, line in enumerate(lines) if re.fullmatch(r"\|[-|: ]+\|", line)}
    rows = [line for at, line in enumerate(lines) if line.startswith("|") and at not in heads and at - 1 not in heads]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
