"""The comparison of two runs: how to repeat them, their key figures, and the differences between their steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from puna.flows.html.markup import Content, Html, details, number, section, stored, table, tag
from puna.flows.report.run import Run, Step
from puna.storage import Artifact
from puna.storage.explain import changes

CHANGES_SHOWN = 6
METRICS_SHOWN = 12
FILES_SHOWN = 4
DIGITS = 12
Link = Callable[[Artifact], Content]


def plain(artifact: Artifact) -> Content:
    return tag("code", artifact.id)


def compare_view(first: Run, second: Run, link: Link = plain) -> Html:
    """Return the comparison as sections of a page. `link`: a function that returns an artifact's markup."""
    rows = steps(first, second)
    same = sum(one is not None and other is not None and one.artifact.key == other.artifact.key for one, other in rows)
    head: list[Content] = ["step", tag("code", first.log.name), tag("code", second.log.name), "differs in"]
    commands = tag("div", [tag("div", tag("h3", run.log.name), again_view(run)) for run in (first, second)], class_="sides")
    lead = f"{same} of {len(rows)} steps gave the same artifact. Differences are shown beside the artifacts they led to."
    return Html(
        section("begun", "How they were started", None, commands)
        + section("figures", "What they measured", "Metrics that differ, of the steps that both runs have.", figures_view(rows))
        + section("steps", "Step by step", lead, table(head, [_comparison_row(one, other, link) for one, other in rows]))
    )


def steps(first: Run, second: Run) -> list[tuple[Step | None, Step | None]]:
    here, there = ({step.name: step for step in run.steps} for run in (first, second))
    return [(here.get(name), there.get(name)) for name in dict.fromkeys([*here, *there])]


def figures_view(rows: list[tuple[Step | None, Step | None]]) -> Html | None:
    """Return a table of the metrics that differ in steps of both runs; None if there are none."""
    differences: list[list[Content]] = []
    for one, other in rows:
        if one is None or other is None or one.artifact.key == other.artifact.key:
            continue
        theirs = other.metrics
        for name, value in one.metrics.items():
            if name in theirs and theirs[name] != value and not {str, bool} & {type(value), type(theirs[name])}:
                cells: list[Content] = [number(value), number(theirs[name]), f"{theirs[name] - value:+.4g}"]
                differences.append([one.label, name.replace("_", " "), *cells])
    return table(["step", "metric", "first", "second", "difference"], differences, numeric=(2, 3, 4)) if differences else None


def _comparison_row(one: Step | None, other: Step | None, link: Link) -> list[Content]:
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
    """Return a step's output with its size and the metrics that differ from the other step's."""
    if step is None:
        return "–"
    artifact = step.artifact
    rows = f"{artifact.rows():,} rows" if artifact.kind in artifact.tables else stored(artifact)
    theirs = {} if other is None else other.metrics
    metrics = [
        [name.replace("_", " "), " ", tag("b", value if isinstance(value, str) else number(value)), Html("<br>")]
        for name, value in step.metrics.items()
        if name not in theirs or theirs[name] != value
    ]
    return [link(artifact), tag("small", rows), tag("small", metrics[:METRICS_SHOWN])]


def again_view(run: Run) -> Html:
    """Return a list of the facts needed to repeat a run: command, recipe, data, program. Facts that the log lacks are shown as unknown."""
    about = run.log.about
    command: Content = tag("code", about["command"]) if about.get("command") else "not recorded"
    terms = {"Command": command, "Recipe": _recipe(about), "Data": _data(run), "Program": _program(run)}
    return tag("dl", [tag("div", tag("dt", name), tag("dd", value)) for name, value in terms.items()], class_="again")


def _recipe(about: dict[str, Any]) -> Content:
    if "changes" not in about:
        return "not recorded"
    changes = about["changes"]
    changed = [[" ", tag("code", change, class_="tag")] for change in changes]
    return [about.get("recipe") or "its own settings", " with " if changes else None, changed]


def _data(run: Run) -> Content:
    """Return a list of the external files and of the earlier runs' artifacts that a run read."""
    records = [(step, record) for step in run.steps for record in step.artifact.manifest.inputs]
    files = {(i.name.partition(":")[2] or i.name, i.key, i.data_digest[:DIGITS]) for _, i in records if i.kind == "external"}
    own_keys = {step.artifact.key for step in run.steps}
    sources = {run.source(step, record) for step, record in records if record.kind != "external"}
    items = [tag("li", tag("b", name), " ", tag("code", digest), " ", tag("small", uri)) for name, uri, digest in sorted(files)]
    items += [tag("li", tag("code", name), " from an earlier run") for name in sorted(a.id for a in sources if a and a.key not in own_keys)]
    first, rest = items[:FILES_SHOWN], items[FILES_SHOWN:]
    more = details(f"{number(len(rest))} more", tag("ul", rest)) if rest else None
    return [tag("ul", first), more] if items else "no external data"


def _program(run: Run) -> Content:
    about = run.log.about
    commit = about.get("commit")
    versions = dict(about.get("versions") or {})
    for step in run.steps:
        versions = {**step.artifact.manifest.libraries, **versions}
    first = {name: versions.pop(name) for name in ("puna", "python", "torch", "duckdb", "pyarrow") if name in versions}
    rest = details(f"{len(versions)} more versions", tag("p", ", ".join(f"{n} {v}" for n, v in sorted(versions.items())), class_="note"))
    seeds = sorted({step.artifact.manifest.seed for step in run.steps if step.artifact.manifest.seed is not None})
    return [
        tag("p", ["commit ", tag("code", commit)] if commit else "commit unknown", [f", {name} {one}" for name, one in first.items()]),
        tag("small", f"seeds {', '.join(map(str, seeds[:6]))}{' …' if len(seeds) > 6 else ''}") if seeds else None,
        rest if versions else None,
    ]  # fmt: skip
