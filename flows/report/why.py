"""The fate of a document, or of a record that never was one."""

from __future__ import annotations

from typing import Any

from puna.models.languages.registry import FACTOR
from puna.stages.contract import parse
from puna.stages.curate.rules.groups import active_rules
from puna.stages.curate.select import SelectConfig
from puna.storage import Artifact, PunaError, Store, catalog


def fate(store: Store, document: str) -> list[dict[str, Any]]:
    """Return the events of a document, in the order of the stages."""
    with catalog.Catalog(store) as opened:
        connection = opened.connection
        opened.view("pages", "documents", "signals", "dropped", "duplicates", "removed_lines", "mixture")
        ids = connection.execute(
            "select id from pages where starts_with(id, ?) or url = ? union select id from documents where starts_with(id, ?) or url = ?",
            [document] * 4,
        ).fetchall()
        order = {a.key: (index, a) for index, a in enumerate(store.artifacts())}
        if not ids and (refused := _refused(connection, document, order)):
            return refused
        if len(ids) != 1:
            raise PunaError(
                f"{document}: {'no page or document has this id or URL' if not ids else f'{len(ids)} documents fit; give more digits'}"
            )
        identity = ids[0][0]
        rows = []
        for table, columns in (
            ("pages", "url, source"), ("documents", "length(text) as characters"), ("signals", "* exclude (id, artifact)"),
            ("dropped", "rule, value, threshold, detail"), ("duplicates", "kept_id, method, similarity"),
            ("removed_lines", "line, text, rule, value"), ("mixture", "category, split, repeats"),
        ):  # fmt: skip
            result = connection.execute(f"select artifact, {columns} from {table} where id = ?", [identity])
            names = [d[0] for d in result.description or []]
            for values in result.fetchall():
                details = {n: v for n, v in zip(names[1:], values[1:], strict=True) if v is not None}
                verb = {"dropped": "dropped", "duplicates": "duplicate", "signals": "scored", "removed_lines": "line removed"}.get(
                    table, "kept"
                )
                stage = order[values[0]][1].manifest.stage
                rows.append({"stage": stage, "artifact": values[0], "verb": verb, "values": details, "what": _what(verb, details)})
    rows.sort(key=lambda row: order[row["artifact"]][0])
    signals = {name: value for row in rows for name, value in row["values"].items() if row["verb"] == "scored"}
    for row in rows:
        if row["verb"] in ("kept", "dropped") and (silent := _abstained(store, order[row["artifact"]][1], signals)):
            row["abstained"] = silent
            row["what"] += f"; not judged for want of a basis in {signals['language']}-{signals['script']}: {', '.join(silent)}"
    return rows


def _refused(connection: Any, document: str, order: dict[str, tuple[int, Artifact]]) -> list[dict[str, Any]]:
    """Return the events of records that never were pages, found by id or by the address in their detail.

    The detail also holds other words, which are not addresses: a search for `is` must not find every record with that word.
    """
    address = document if "/" in document or ":" in document else None
    result = connection.execute(
        "select artifact, rule, value, threshold, detail from dropped "
        "where starts_with(id, ?) or list_contains(string_split(replace(detail, ': ', ' '), ' '), ?)",
        [document, address],
    ).fetchall()
    rows = []
    for key, *details in sorted(result, key=lambda row: order[row[0]][0]):
        values = {name: value for name, value in zip(("rule", "value", "threshold", "detail"), details, strict=True) if value is not None}
        stage, what = order[key][1].manifest.stage, _what("dropped", values)
        rows.append({"stage": stage, "artifact": key, "verb": "dropped", "values": values, "what": what})
    return rows


def _what(verb: str, values: dict[str, Any]) -> str:
    return f"{verb}: {', '.join(f'{n}={v:.4g}' if isinstance(v, float) else f'{n}={v}' for n, v in values.items())}"


def _abstained(store: Store, artifact: Artifact, known: dict[str, Any]) -> list[str]:
    """Return the rules of a selection that have no basis in a document's language and script."""
    if artifact.manifest.stage != "select" or not {"language", "script"} <= set(known):
        return []
    try:
        config = parse(SelectConfig, artifact.manifest.config, "select")
    except PunaError:  # made by rules of another package, or of another version
        return []
    signals = [store.find(item.kind, item.key) for item in artifact.manifest.inputs if item.kind == "signals"]
    languages = [row for item in signals if item is not None and "languages" in item.tables for row in item.read("languages").to_pylist()]
    own = [row for row in languages if all(row[name] == known[name] for name in ("language", "script"))]
    if not config.per_language or not own:
        return []
    return [rule.name for rule in active_rules(config) if own[0].get(rule.drop.signal + FACTOR, 0.0) is None]
