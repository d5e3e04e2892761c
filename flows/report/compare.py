"""The comparison of two runs: their commands, their key figures, and the differences of each step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from puna.flows.html.markup import Content, Html, number, section, size, stored, table, tag
from puna.flows.report.rerun import again_view
from puna.flows.report.run import Run, Step
from puna.storage import Artifact
from puna.storage.explain import changes

CHANGES_SHOWN = 6
METRICS_SHOWN = 12
Link = Callable[[Artifact], Content]


def plain(artifact: Artifact) -> Content:
    """Return an artifact's id, for pages that stand alone."""
    return tag("code", artifact.id)


def compare_view(first: Run, second: Run, link: Link = plain) -> Html:
    """Return the comparison, as sections of a page; `link`: how an artifact is shown."""
    rows = steps(first, second)
    same = sum(one is not None and other is not None and one.artifact.key == other.artifact.key for one, other in rows)
    head: list[Content] = ["step", tag("code", first.log.name), tag("code", second.log.name), "differs in"]
    commands = tag("div", [tag("div", tag("h3", run.log.name), again_view(run)) for run in (first, second)], class_="sides")
    lead = f"{same} of {len(rows)} steps gave the same artifact. What differs stands beside what it led to."
    return Html(
        section("begun", "How they were begun", None, commands)
        + section("figures", "What they measured", "The last value of each metric of a step that both runs have.", figures_view(rows))
        + section("steps", "Step by step", lead, table(head, [_compared(one, other, link) for one, other in rows]))
    )


def steps(first: Run, second: Run) -> list[tuple[Step | None, Step | None]]:
    """Return the steps of both runs by name, in order."""
    here, there = ({step.name: step for step in run.steps} for run in (first, second))
    return [(here.get(name), there.get(name)) for name in dict.fromkeys([*here, *there])]


def figures_view(rows: list[tuple[Step | None, Step | None]]) -> Html | None:
    """Return the numbers that differ, of steps that both runs have."""
    shown: list[list[Content]] = []
    for one, other in rows:
        if one is None or other is None or one.artifact.key == other.artifact.key:
            continue
        theirs = other.metrics
        for name, value in one.metrics.items():
            if name in theirs and theirs[name] != value and all(_counts(v) for v in (value, theirs[name])):
                cells: list[Content] = [number(value), number(theirs[name]), f"{theirs[name] - value:+.4g}"]
                shown.append([one.label, name.replace("_", " "), *cells])
    return table(["step", "metric", "first", "second", "difference"], shown, numeric=(2, 3, 4)) if shown else None


def _counts(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _compared(one: Step | None, other: Step | None, link: Link) -> list[Content]:
    if one is None or other is None:
        there = one or other
        assert there is not None
        return [tag("b", there.label), _output_text(one, None, link), _output_text(other, None, link), "only in one"]
    if one.artifact.key == other.artifact.key:
        return [tag("span", one.label, class_="dim"), link(one.artifact), tag("span", "the same", class_="dim"), ""]
    differences = changes(one.artifact.manifest, other.artifact.manifest)
    more = tag("li", f"and {len(differences) - CHANGES_SHOWN} more") if len(differences) > CHANGES_SHOWN else None
    why = tag("ul", [tag("li", str(change)) for change in differences[:CHANGES_SHOWN]], more)
    return [tag("b", one.label), _output_text(one, other, link), _output_text(other, one, link), why]


def _output_text(step: Step | None, other: Step | None, link: Link) -> Content:
    """Return the description of a step's output; metrics only where the other's differ."""
    if step is None:
        return "–"
    artifact = step.artifact
    rows = f"{artifact.rows():,} rows" if artifact.kind in artifact.tables else size(stored(artifact))
    theirs = {} if other is None else other.metrics
    metrics = [
        [name.replace("_", " "), " ", tag("b", value if isinstance(value, str) else number(value)), Html("<br>")]
        for name, value in step.metrics.items()
        if name not in theirs or theirs[name] != value
    ]
    return [link(artifact), tag("small", rows), tag("small", metrics[:METRICS_SHOWN])]
