"""The page of thresholds: sliders, and the documents that `select` would drop with the chosen thresholds, computed from stored signals."""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
import pyarrow as pa
from fastapi import Request

from puna.flows.html.markup import Content, Html, number, part, percent, section, table, tag
from puna.flows.report.curate import card
from puna.flows.report.run import rows_of
from puna.flows.web.frame import Here, artifact_link, hidden_input, note, pages, tab
from puna.stages.contract import parse, signals_of
from puna.stages.curate.rules.decide import SqlRule, decide, numeric
from puna.stages.curate.rules.groups import Rule, active_rules
from puna.stages.curate.select import SelectConfig, carried_signals
from puna.storage import Artifact, PunaError, Store

BINS = 40
EXAMPLES = 6
MOST_SELECTIONS = 3  # maximum number of selections in memory
router = pages("rules", "Rules", at=5)


@dataclass(frozen=True)
class Selection:
    """The data of an artifact of `select`: documents, configuration, signals (`table`), rules, and the documents that the rules drop."""

    artifact: Artifact
    documents: Artifact
    config: SelectConfig
    table: pa.Table
    languages: pa.Table | None
    rules: list[Rule | SqlRule]
    step: str
    gone: Mapping[str, str]  # id → name of the rule, for each document that the unchanged rules drop


_lock = threading.Lock()


@lru_cache(MOST_SELECTIONS)
def _selection(store: Store, artifact: Artifact) -> Selection:
    """Return the data of an artifact of `select`. Raise PunaError for another stage's artifact, or if an input is not in the store."""
    m = artifact.manifest
    if m.stage != "select":
        raise PunaError(f"{artifact.id}: was made by {m.stage}; only artifacts of the stage select have thresholds")
    inputs = [store.find(item.kind, item.key) for item in m.inputs]
    documents = next((item for item in inputs if item is not None and item.kind == "documents"), None)
    signals = [item for item in inputs if item is not None and item.kind == "signals"]
    if documents is None or None in inputs:
        raise PunaError(f"{artifact.id}: its inputs are no longer in the store")
    config = parse(SelectConfig, m.config, "select")
    rules: list[Rule | SqlRule] = [*active_rules(config), *config.expressions()]
    languages = next((item for item in signals if "languages" in item.tables), None) if config.per_language else None
    carried = carried_signals(signals)
    needed: dict[str, list[str]] = {}
    names = [signal for rule in rules for signal in rule.signals] + (["language", "script"] if languages is not None else [])
    for name in dict.fromkeys(names):
        needed.setdefault(carried[name], []).append(name)
    whole = documents.read(columns=["id", "source"])
    for item in signals:
        columns = signals_of(item, whole["id"], names) if (names := needed.get(item.id, [])) else {}
        for name in names:
            whole = whole.append_column(name, columns[name])
    tables = languages.read("languages") if languages is not None else None
    made = store.log(m.run).made if m.run in store.runs() else ()
    step = next((one.step for one in made if one.key == artifact.key), "select")
    return Selection(artifact, documents, config, whole, tables, rules, step, _decide(whole, rules, tables))


def _decide(whole: pa.Table, rules: list[Rule | SqlRule], languages: pa.Table | None) -> dict[str, str]:
    dropped = decide(whole, rules, languages)
    return dict(zip(dropped["id"].to_pylist(), dropped["rule"].to_pylist(), strict=True))


def selection(store: Store, artifact: Artifact) -> Selection:
    """Return the cached data of an artifact of `select`; simultaneous requests read the data once."""
    with _lock:
        return _selection(store, artifact)


@router.get("/rules")
def rules_page(site: Here, request: Request) -> str:
    """Return the page with links to the newest selections, and the sliders of one: the query's, else the one that dropped most rows."""
    store, query = site.store, request.query_params
    name = query.get("artifact")
    selections = [artifact for artifact in reversed(store.artifacts()) if artifact.manifest.stage == "select"]
    if not selections:
        return site.page("Rules", here="rules", lead="No selection was made yet: run `curate`, or the stage `select`.")
    choice = store.resolve(name) if name else max(selections[:12], key=lambda artifact: artifact.rows("dropped"))
    of = selection(store, choice)
    newest = [(f"{one.id} · {one.rows():,} rows", one.key) for one in selections[:12]]
    others = [tab(words, f"/puna/rules?artifact={key[:12]}", key == choice.key) for words, key in newest]
    moved = _moved_thresholds(of, query)
    sliders = [_slider(of, rule, moved.get(rule.name)) for rule in of.rules if isinstance(rule, Rule) and rule.number is not None]
    return site.page(
        "Rules", tag("nav", others, aria_label="Selections"),
        tag("form", tag("div", replay(of, query), id="outcome", aria_live="polite"), tag("div", sliders, class_="sliders"),
            tag("p", tag("button", "Show"), " ", tag("button", "As they were", type="reset")),
            hidden_input("artifact", choice.key[:12]), action="/puna/rules", id="rules",
            data_from="/puna/rules/outcome"),
        here="rules",
        lead=["Move a threshold of ", artifact_link(choice), ": its rules are applied again to the stored signals. Nothing is changed."],
    )  # fmt: skip


def _moved_thresholds(of: Selection, query: Mapping[str, str]) -> dict[str, float]:
    moved = {}
    for rule in of.rules:
        if isinstance(rule, Rule) and rule.number is not None and rule.name in query:
            try:
                value = float(query[rule.name])
            except ValueError as error:
                raise PunaError(f"{rule.name}: takes a number (got {query[rule.name]!r})") from error
            if isinstance(rule.threshold, int) and value % 1 != 0:
                raise PunaError(f"{rule.name}: takes a whole number (got {query[rule.name]!r})")
            if abs(value - rule.number) > 1e-9:
                moved[rule.name] = value
    return moved


@router.get("/rules/outcome")
def outcome(site: Here, request: Request) -> str:
    """Return the view of the drops with the query's thresholds (`replay`), which the page's script requests when a slider moves."""
    query = request.query_params
    return replay(selection(site.store, site.store.resolve(query.get("artifact", ""))), query)


def replay(of: Selection, query: Mapping[str, str]) -> Html:
    """Return a view that compares the drops at the query's thresholds with the actual drops, and shows the options for these thresholds."""
    moved = _moved_thresholds(of, query)
    if not moved:
        return _counts(of, of.gone, of.gone)
    rules = [replace(rule, threshold=moved[rule.name]) if isinstance(rule, Rule) and rule.name in moved else rule for rule in of.rules]
    now = _decide(of.table, rules, of.languages)
    more, fewer = [i for i in now if i not in of.gone], [i for i in of.gone if i not in now]
    change = " ".join(f"--set {of.step}.{name}={value:.12g}" for name, value in moved.items())
    return tag(
        "div", _counts(of, of.gone, now),
        tag("p", "On the command line: ", tag("code", change)),
        tag("div",
            part(f"{len(more):,} more would go", _cards(of, more)), part(f"{len(fewer):,} would stay", _cards(of, fewer)), class_="two"),
    )  # fmt: skip


def _counts(of: Selection, before: Mapping[str, str], now: Mapping[str, str]) -> Html:
    count = of.table.num_rows
    was, is_ = Counter(before.values()), Counter(now.values())
    names = sorted({*was, *is_}, key=lambda name: (-abs(is_[name] - was[name]), -is_[name], name))
    rows: list[list[Content]] = [[name, was[name], is_[name], f"{more:+,}" if (more := is_[name] - was[name]) else ""] for name in names]
    summary = f"{count - len(now):,} of {count:,} documents are kept ({percent(count - len(now), count)})"
    head = summary if len(before) == len(now) else f"{summary}; before {count - len(before):,}"
    return section("outcome-counts", head, None, table(["rule", "dropped", "would drop", ""], rows, numeric=(1, 2, 3)))


def _cards(of: Selection, ids: list[str]) -> Html:
    rows = rows_of(of.documents, sorted(ids)[:EXAMPLES])
    return tag("div", [card(row, None, 300) for row in rows.values()], class_="cards") if rows else note("None.")


def _slider(of: Selection, rule: Rule, moved: float | None) -> Html:
    """Return a slider for a rule's threshold, below a histogram of the rule's signal."""
    assert rule.number is not None
    values = numeric(of.table[rule.drop.signal])
    finite = values[~np.isnan(values)]
    low, high = _span(finite, rule.number)
    whole = isinstance(rule.threshold, int)
    if whole:
        low, high = math.floor(low), math.ceil(high)
    counts, _ = np.histogram(np.clip(finite, low, high), BINS, (low, high))
    top = max(1, int(counts.max(initial=0)))
    heights = [20 * (int(count) / top) ** 0.5 for count in counts]
    bars = [tag("rect", x=n, y=f"{20 - height:.1f}", width=0.9, height=f"{height:.1f}") for n, height in enumerate(heights)]
    step = 1 if whole else (high - low) / 400
    now = rule.number if moved is None else moved
    label = f"{rule.drop.signal} {rule.drop.when} "
    control = tag("input", type="range", min=f"{low:.12g}", max=f"{high:.12g}", step=f"{step:.12g}", value=f"{now:.12g}",
                  data_was=f"{rule.number:.12g}", aria_label=f"{rule.name}: drop when {label}")  # fmt: skip
    box = tag("input", type="number", name=rule.name, step=1 if whole else "any", value=f"{now:.12g}", aria_label=rule.name)
    histogram = tag("svg", bars, viewBox=f"0 0 {BINS} 20", preserveAspectRatio="none", aria_hidden="true")
    unit = f"{number(low, 3)} to {number(high, 3)}"
    return tag("div", tag("b", rule.name), tag("p", "drop when ", label, box), histogram, control, tag("small", unit), class_="slider")


def _span(finite: Any, threshold: float) -> tuple[float, float]:
    """Return the range of a slider: from the 0.5 % to the 99.5 % quantile of a signal, widened to include the threshold."""
    if not len(finite):
        return min(0.0, threshold), max(1.0, threshold)
    low, high = (float(q) for q in np.quantile(finite, (0.005, 0.995)))
    low, high = min(low, threshold), max(high, threshold)
    return (low, high) if high > low else (low, low + 1.0)
