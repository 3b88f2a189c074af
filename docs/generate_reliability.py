"""Fills the tables of docs/reliability.md with what was measured: `python docs/generate_reliability.py FILE`.

FILE holds a line of JSON for each row, as tests/faults writes them with GPULAYER_FAULTS=FILE (conftest.py there).
A row that ran several times, or as several tests, is one line here, with its shortest and its longest time.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

PAGE = Path(__file__).parent / "reliability.md"
SECTIONS = {
    "On the launcher": "test_launcher_",
    "On the network": "test_network_",
    "On a node": "test_node_",
    "Many": "test_many",
    "A hostile node": "test_hostile",
}
HEAD = "| fault | what the user sees | clean after, s |\n|---|---|---|\n"


def rows(lines: list[str]) -> dict[str, list[str]]:
    """Return the table rows of each section, in the order of the file."""
    seen: dict[str, dict[str, tuple[str, list[float]]]] = {title: {} for title in SECTIONS}
    for line in lines:
        entry = json.loads(line)
        file = Path(entry["test"].partition("::")[0]).name
        title = next(title for title, start in SECTIONS.items() if file.startswith(start))
        for fault in entry["faults"]:
            _, times = seen[title].setdefault(fault, (entry["says"], []))
            seen[title][fault] = (entry["says"], times)
            if entry["clean_s"] is not None:
                times.append(entry["clean_s"])
    return {
        title: [f"| {_cell(fault)} | {_cell(says)} | {_range(times)} |\n" for fault, (says, times) in found.items()]
        for title, found in seen.items()
    }


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _range(times: list[float]) -> str:
    if not times:
        return ""
    low, high = f"{min(times):.1f}", f"{max(times):.1f}"
    return low if low == high else f"{low} to {high}"


def fill(page: str, found: dict[str, list[str]]) -> str:
    """Put the rows in place of the table below each section's heading."""
    for title, lines in found.items():
        table = re.compile(rf"(\n### {re.escape(title)}\n(?:(?!\n#|\n\|).|\n(?![#|]))*\n)(?:\|.*\n)+", re.MULTILINE)
        page, count = table.subn(lambda match, lines=lines: match[1] + HEAD + "".join(lines), page)  # type: ignore[misc]
        if count != 1:
            raise SystemExit(f"{PAGE.name} has no table below `### {title}`")
    return page


if __name__ == "__main__":
    lines = [line for name in sys.argv[1:] for line in Path(name).read_text().splitlines()]
    PAGE.write_text(fill(PAGE.read_text(), rows(lines)))
