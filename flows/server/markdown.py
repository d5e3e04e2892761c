"""Steps and runs as Markdown for Prefect's pages: numbers, tables, plots, and links to Puna's own pages."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from pathlib import Path

from puna.flows.html.markup import counted_rows, duration, made_at, number, short, size, stored
from puna.flows.html.plot import Plot, draw
from puna.stages.contract import Outcome
from puna.storage import Artifact

MOST_METRICS = 30
MOST_PLOTS = 4


def headline(outcome: Outcome) -> str:
    artifact = outcome.artifact
    tables = {artifact.kind: "rows", "dropped": "dropped"}
    words = [f"{count} {name}" for table, name in tables.items() if (count := counted_rows(artifact, table))]
    if not words:
        metrics = list(artifact.manifest.metrics.items())
        words = [f"{name.replace('_', ' ')} {value if isinstance(value, str) else number(value)}" for name, value in metrics[:2]]
    return ", ".join([*words, "reused" if outcome.reused else duration(outcome.seconds)])


def markdown(outcome: Outcome) -> str:
    """Return a step's output as Markdown: its address, metrics and plots."""
    artifact, m = outcome.artifact, outcome.artifact.manifest
    state = f"reused, made {made_at(artifact)} UTC by run {m.run}" if outcome.reused else f"made in {duration(outcome.seconds)}"
    parts = [f"[**{artifact.id}**]({page_of(artifact)}): {state}, {size(stored(artifact))}, peak memory {size(m.peak_memory_bytes)}"]
    if m.tables:
        rows = "\n".join(f"| {name} | {record.rows:,} |" for name, record in m.tables.items())
        parts.append(f"| table | rows |\n|---|---:|\n{rows}")
    if m.metrics:
        metrics = list(m.metrics.items())[:MOST_METRICS]
        table = "\n".join(f"| {name.replace('_', ' ')} | {_plain(value)} |" for name, value in metrics)
        parts.append(f"| measured | |\n|---|---:|\n{table}")
    plots = [Plot.of(figure) for _, figure in sorted(m.figures.items())]
    parts += [f"![{plot.title}]({picture(plot)})" for plot in plots[:MOST_PLOTS] if not plot.empty]
    return "\n\n".join(parts)


def run_markdown(run: str, outcomes: Sequence[tuple[str, Outcome]], report: str | None) -> str:
    head = f"[The run's page](/puna/run/{run}) · [its report](/puna/report/{run})"
    head += f" (`{report}`)" if report else ""
    rows = []
    for label, one in outcomes:
        counts = f"{counted_rows(one.artifact)} | {counted_rows(one.artifact, 'dropped')}"
        took = "reused" if one.reused else duration(one.seconds)
        rows.append(f"| {label} | [{one.artifact.id}]({page_of(one.artifact)}) | {counts} | {took} |")
    return head + "\n\n| step | artifact | rows | dropped | |\n|---|---|---:|---:|---:|\n" + "\n".join(rows)


def page_of(artifact: Artifact) -> str:
    return f"/puna/artifact/{artifact.kind}/{artifact.key}"


def picture(plot: Plot) -> str:
    drawn = str(draw(plot))
    svg = drawn[drawn.index("<svg") : drawn.index("</svg>") + 6]
    opened, _, inside = svg.removeprefix("<svg").partition(">")
    whole = f'<svg xmlns="http://www.w3.org/2000/svg" width="570" font-family="sans-serif"{opened}><style>{style()}</style>{inside}'
    return "data:image/svg+xml;base64," + base64.b64encode(whole.encode()).decode()


def style() -> str:
    """Return the colours and the rules for plots of the report's style sheet, in light colours on a ground of their own."""
    sheet = (Path(__file__).parents[1] / "report" / "page.css").read_text(encoding="utf-8")
    colours = sheet[sheet.index(":root {") : sheet.index("}") + 1].replace(":root", "svg")
    plots = sheet[sheet.index("svg text {") : sheet.index(".lineage {")]
    return f"{colours} svg {{ background: var(--card); }} {plots}".replace("\n", " ")


def _plain(value: bool | int | float | str) -> str:
    if isinstance(value, str):
        return value.replace("|", "\\|")
    return number(value) if abs(value) < 1e7 else short(value)
