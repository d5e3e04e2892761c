"""The recipe for repeating a run: its command, recipe and data, the program's commit and versions."""

from __future__ import annotations

from typing import Any

from puna.flows.html.markup import Content, Html, details, number, tag
from puna.flows.report.run import Run

FILES_SHOWN = 4
DIGITS = 12


def again_view(run: Run) -> Html:
    """Return a list of terms; what the log of an older run does not say is said to be unknown."""
    about = run.log.about
    terms: list[tuple[str, Content]] = [
        ("Command", tag("code", about["command"]) if about.get("command") else "not told by the log"),
        ("Recipe", _recipe(about)),
        ("Data", _data(run)),
        ("Program", _program(run)),
    ]
    return tag("dl", [tag("div", tag("dt", name), tag("dd", value)) for name, value in terms], class_="again")


def _recipe(about: dict[str, Any]) -> Content:
    if "changes" not in about:
        return "not told by the log"
    changes = about["changes"]
    changed = [[" ", tag("code", change, class_="tag")] for change in changes]
    return [about.get("recipe") or "its own settings", " with " if changes else None, changed]


def _data(run: Run) -> Content:
    """Return the files that came from outside, and artifacts that earlier runs made."""
    records = [(step, record) for step in run.steps for record in step.artifact.manifest.inputs]
    files = {(i.name.partition(":")[2] or i.name, i.key, i.data_digest[:DIGITS]) for _, i in records if i.kind == "external"}
    own_keys = {step.artifact.key for step in run.steps}
    sources = {run.source(step, record) for step, record in records if record.kind != "external"}
    items = [tag("li", tag("b", name), " ", tag("code", digest), " ", tag("small", uri)) for name, uri, digest in sorted(files)]
    items += [tag("li", tag("code", name), " of an earlier run") for name in sorted(a.id for a in sources if a and a.key not in own_keys)]
    first, rest = items[:FILES_SHOWN], items[FILES_SHOWN:]
    more = details(f"{number(len(rest))} more", tag("ul", rest)) if rest else None
    return [tag("ul", first), more] if items else "none from outside"


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

