"""The history of a document, or of a record that holds no page: the stages that kept, changed or dropped it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from puna.models.languages.registry import FACTOR
from puna.stages.contract import parse
from puna.stages.curate.rules.groups import active_rules
from puna.stages.curate.select import SelectConfig
from puna.storage import Artifact, PunaError, Store, catalog

EVENTS = {
    "pages": ("kept", "url, source"), "documents": ("kept", "length(text) as characters"),
    "signals": ("scored", "* exclude (id, artifact)"), "dropped": ("dropped", "rule, value, threshold, detail"),
    "duplicates": ("duplicate", "kept_id, method, similarity"), "removed_lines": ("line removed", "line, text, rule, value"),
    "mixture": ("kept", "category, split, repeats"),
}  # fmt: skip
"""Table → the meaning of its rows for a document, and the columns with details."""
REFUSED = """select artifact, rule, value, threshold, detail from dropped
where starts_with(id, ?) or list_contains(string_split(replace(detail, ': ', ' '), ' '), ?)"""


def fate(store: Store, document: str) -> list[dict[str, Any]]:
    """Return the events of a document, or of records without a page, oldest first. Raise PunaError if none or several documents fit."""
    artifacts = {artifact.key: artifact for artifact in store.artifacts()}
    order = {key: place for place, key in enumerate(artifacts)}
    steps: dict[str, dict[str, str]] = {}
    logs = set(store.runs())

    def step_of(run: str, key: str, stage: str) -> str:
        """Return the step that made an artifact, by the run's log; the stage if there is no log."""
        if run in logs and run not in steps:
            steps[run] = {record.key: record.step for record in store.log(run).made}
        return steps.get(run, {}).get(key, stage)

    with catalog.Catalog(store) as opened:
        opened.view("pages", "documents", "signals", "dropped", "duplicates", "removed_lines", "mixture")

        def events(verb: str, query: str, *parameters: str | None) -> Iterator[dict[str, Any]]:
            for row in opened.connection.sql(query, params=[*parameters]).to_arrow_table().to_pylist():
                key = row.pop("artifact")
                values = {name: value for name, value in row.items() if value is not None}
                what = ", ".join(f"{name}={value:.4g}" if isinstance(value, float) else f"{name}={value}" for name, value in values.items())
                own = artifacts[key].manifest
                # A scoring stage has no values for a document that it cannot judge, such as one in another language.
                said = f"{verb}: {what}" if what or verb != "scored" else "not scored"
                made = {"stage": own.stage, "step": step_of(own.run, key, own.stage), "artifact": key}
                yield {**made, "verb": verb, "values": values, "what": said}

        ids = opened.connection.execute(
            "select id from pages where starts_with(id, ?) or url = ? union select id from documents where starts_with(id, ?) or url = ?",
            [document] * 4,
        ).fetchall()
        if not ids:
            # Details hold words besides URLs: a search for `is` must not return every record with that word.
            rows = [*events("dropped", REFUSED, document, document if "/" in document or ":" in document else None)]
        else:
            queries = ((verb, f"select artifact, {columns} from {table} where id = ?") for table, (verb, columns) in EVENTS.items())
            rows = [row for verb, query in queries for row in events(verb, query, ids[0][0])]
    if len(ids) > 1 or not rows:
        raise PunaError(f"{document}: {f'{len(ids)} documents fit; give more digits' if ids else 'no page or document has this id or URL'}")
    rows.sort(key=lambda row: order[row["artifact"]])
    signals = {name: value for row in rows for name, value in row["values"].items() if row["verb"] == "scored"}
    for row in rows:
        if row["verb"] in ("kept", "dropped") and (silent := _abstentions(store, artifacts[row["artifact"]], signals)):
            row["abstained"] = silent
            row["what"] += f"; not judged without a threshold for {signals['language']}-{signals['script']}: {', '.join(silent)}"
    return rows


def _abstentions(store: Store, artifact: Artifact, known: dict[str, Any]) -> list[str]:
    """Return the rules of a selection that do not judge a document, since its language and script have no factor for the threshold."""
    if artifact.manifest.stage != "select" or not {"language", "script"} <= set(known):
        return []
    try:
        config = parse(SelectConfig, artifact.manifest.config, "select")
    except PunaError:  # the artifact was made with rules of another package or version
        return []
    signals = [store.find(item.kind, item.key) for item in artifact.manifest.inputs if item.kind == "signals"]
    languages = [row for item in signals if item is not None and "languages" in item.tables for row in item.read("languages").to_pylist()]
    own = [row for row in languages if all(row[name] == known[name] for name in ("language", "script"))]
    if not config.per_language or not own:
        return []
    return [rule.name for rule in active_rules(config) if own[0].get(rule.drop.signal + FACTOR, 0.0) is None]
