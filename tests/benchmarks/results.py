"""The tables of RESULTS.md, rendered from results.json.

    python tests/benchmarks/curation.py --part flow --json > out.json
    python tests/benchmarks/results.py --take out.json --machine "EPYC Zen 5, idle"

A figure in results.json holds the names and numbers that its benchmark printed (`measured`) and the text around them (`value`, `peer`).
`--take` replaces the numbers, machine and date of every figure whose names are all in the benchmark's output; several outputs are several
runs, and the text shows their range. A figure with a `source` reads a JSON file of the repository. A figure without `measured` was entered
by hand. Without `--take`, the script only regenerates the tables.

In README and pages of docs/, the script also updates each number between `<!--NAME:FORMAT-->` and `<!---->` to that of the figure NAME;
`NAME[KEY]` is one of several numbers under a name.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from datetime import date, timedelta
from pathlib import Path
from string import Formatter
from typing import Any

ROOT = Path(__file__).parents[2]
FIGURES, PAGE = Path(__file__).with_name("results.json"), Path(__file__).with_name("RESULTS.md")
HEAD = ("figure", "Puna", "peer, same run", "goal", "command", "machine", "date")
BEGIN, END = "<!-- table: {} -->", "<!-- end -->"
MARK = re.compile(r"(<!--(\w+(?:\[\w+\])?:[^>]*?)-->).*?<!---->")
Figure = dict[str, Any]


class Runs(Formatter):
    """A formatter that writes a list of runs as a range from minimum to maximum."""

    def format_field(self, value: Any, format_spec: str) -> str:
        """Return the formatted value, or the formatted ends of a list's range."""
        ends = [format(one, format_spec) for one in (min(value), max(value))] if isinstance(value, list) else [format(value, format_spec)]
        return " to ".join(dict.fromkeys(ends))


def numbers(figure: Figure) -> dict[str, Any]:
    """Return the numbers of a figure: its own, or those in the file that it names."""
    if "source" in figure:
        return dict(json.loads((ROOT / figure["source"]).read_text(encoding="utf-8")))
    return dict(figure.get("measured", {}))


def row(figure: Figure, newest: date) -> list[str]:
    """Return the table cells of a figure. A figure two days older than the newest one shows its date."""
    found = numbers(figure)
    day = str(figure["date"] if "date" in figure else found["day"])
    late = newest - date.fromisoformat(day) > timedelta(days=1)
    value, peer = (Runs().vformat(figure.get(name, ""), (), found) for name in ("value", "peer"))
    command = f"`{figure['command']}`" if "command" in figure else "by hand"
    return [figure["figure"], value, peer, figure.get("goal", ""), command, figure["machine"], f"not since {day}" if late else day]


def table(figures: list[Figure], newest: date) -> str:
    """Return the Markdown table of an area."""
    rows = [list(HEAD), ["---"] * len(HEAD), *(row(one, newest) for one in figures)]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |" for cells in rows)


def render(text: str, areas: dict[str, list[Figure]]) -> str:
    """Return the page's text with each area's table between its markers. Exit if a marker is missing."""
    newest = max(date.fromisoformat(one["date"]) for figures in areas.values() for one in figures if "date" in one)
    for area, figures in areas.items():
        before, begin, rest = text.partition(BEGIN.format(area))
        _, end, after = rest.partition(END)
        if not begin or not end:
            sys.exit(f"{PAGE.name}: lacks the markers {BEGIN.format(area)} and {END} of an area of {FIGURES.name}")
        text = f"{before}{begin}\n{table(figures, newest)}\n{end}{after}"
    return text


def inline(text: str, areas: dict[str, list[Figure]]) -> str:
    """Return a page's text with current numbers in its marks. Raise KeyError if a mark names no figure."""
    known = {name: value for figures in areas.values() for one in figures for name, value in one.get("measured", {}).items()}
    return MARK.sub(lambda at: f"{at[1]}{Runs().vformat('{' + at[2] + '}', (), known)}<!---->", text)


def pages(areas: dict[str, list[Figure]]) -> dict[Path, str]:
    """Return the up-to-date text of RESULTS.md, README and every page of docs/."""
    docs = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return {PAGE: render(PAGE.read_text(encoding="utf-8"), areas)} | {one: inline(one.read_text(encoding="utf-8"), areas) for one in docs}


def take(areas: dict[str, list[Figure]], outputs: list[dict[str, Any]], machine: str, day: str) -> list[str]:
    """Replace the numbers of every figure whose names are all in the outputs. Return the names of these figures."""
    taken = []
    for figure in (one for figures in areas.values() for one in figures if "measured" in one):
        names = figure["measured"]
        if all(name in output for output in outputs for name in names):
            runs = {name: [output[name] for output in outputs] for name in names}
            figure |= {"measured": {name: some if len(some) > 1 else some[0] for name, some in runs.items()}, "machine": machine, "date": day}
            taken.append(figure["figure"])
    return taken


def save(areas: dict[str, list[Figure]]) -> None:
    """Write results.json with one figure per line."""
    parts = [f' {json.dumps(area)}: [\n  ' + ",\n  ".join(json.dumps(one, ensure_ascii=False) for one in figures) + "\n ]" for area, figures in areas.items()]
    FIGURES.write_text("{\n" + ",\n".join(parts) + "\n}\n", encoding="utf-8")


def main() -> None:
    """Take over outputs of benchmarks, if given, and write the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--take", type=Path, nargs="+", default=[], help="what a benchmark printed with --json; several files are several runs")
    parser.add_argument("--machine", help="the machine of these runs, and its load")
    parser.add_argument("--date", default=date.today().isoformat(), help="the day of these runs")
    given = parser.parse_args()
    if bool(given.take) != bool(given.machine):
        parser.error("give --take and --machine together, or neither")
    areas = json.loads(FIGURES.read_text(encoding="utf-8"))
    if given.take:
        outputs = [json.loads(file.read_text(encoding="utf-8")) for file in given.take]
        taken = take(areas, outputs, given.machine, given.date)
        if not taken:
            sys.exit(f"{given.take[0]}: has no name of a figure in {FIGURES.name}; add the figure there first")
        print("\n".join(taken))
        save(areas)
    for page, text in pages(areas).items():
        if page.read_text(encoding="utf-8") != text:
            page.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
