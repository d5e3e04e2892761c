"""Sections on curation: the funnel (a bar per step, a row per rule, examples of drops), duplicates, and removed lines."""

from __future__ import annotations

import csv
import difflib
import functools
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from puna.flows.html.markup import Content, Html, details, excerpt, join, legend, number, part, percent, short, size, table, tag
from puna.flows.report.funnel import Among, Example, Level, Rule
from puna.flows.report.run import Run, Step, query, rows_of

WORDS_COMPARED = 160
LINES_SHOWN = 10
RULES_SHOWN = 10
SLIM = 0.006  # share of the width below which a piece of a bar has no room for a gap


def funnel_view(levels: list[Level], per_token: float | None, unit: str = "documents") -> Html:
    """Show every level as a row with a bar, and below it the level's rules, each with examples to open."""
    most = max((level.came for level in levels), default=0)
    bare = {"again": "no page"} if any(level.no_page for level in levels) else {}
    titles = ("step", "", unit, "dropped", "text" if unit == "documents" else "")
    head = tag("div", [tag("span", title) for title in titles], class_="level head", aria_hidden="true")
    rows = [_level(level, most, per_token) for level in levels]
    return join([legend({"kept": "kept", "gone": "dropped by a rule"} | bare), tag("div", head, rows, class_="funnel")])


def _level(level: Level, most: int, per_token: float | None) -> Html:
    bar = tag("i", class_="kept", style=f"width:{100 * level.kept / max(1, most):.2f}%")
    losses = []
    for rule in level.rules:
        share = rule.rows / max(1, most)
        hover = f"{rule.name}: {number(rule.rows)} {'records' if rule.no_page else 'dropped'}"
        losses.append(tag("i", class_=f"{rule.look} slim" if share < SLIM else rule.look, style=f"width:{100 * share:.3f}%", title=hover))
    row = tag(
        "div", tag("b", level.step.label), tag("span", bar, losses, class_="bar", aria_hidden="true"), tag("span", level.kept, class_="n"),
        tag("span", f"−{level.dropped_rows:,}" if level.dropped_rows else "", class_="n minus"),
        tag("span", text_amount(level, per_token), class_="n dim"), class_="level",
    )  # fmt: skip
    notes: list[Content] = []
    if level.no_page:
        files = level.step.metrics.get("files_without_page")
        whole = f"; {files:,} files contain no page at all: {level.step.metrics['files_without_page_are']}" if files else ""
        notes.append(tag("p", f"{level.no_page:,} more records hold no page{whole}", class_="edited"))
    if edited := level.removed_characters:
        verb = "cut from" if edited > 0 else "added to"
        notes.append(tag("p", f"{short(abs(edited))} characters {verb} documents that were kept", class_="edited"))
    if level.lost_rows:
        counts = f"{level.came:,} in, {level.kept:,} kept, {level.dropped_rows + level.no_page:,} dropped"
        notes.append(tag("p", f"Rows do not add up: {counts}. This artifact is unsound.", class_="alarm"))
    rules, at = [], level.kept
    for rule in level.rules:
        rules.append(_rule(rule, level, at, most, per_token))
        at += rule.rows
    if len(rules) > RULES_SHOWN + 2:
        rest = sum(rule.rows for rule in level.rules[RULES_SHOWN:])
        note = f"{len(rules) - RULES_SHOWN} more rules dropped {rest:,} together"
        rules = [*rules[:RULES_SHOWN], details(note, rules[RULES_SHOWN:], class_="more rest")]
    return tag("div", row, rules, notes, class_="step")


def text_amount(level: Level, per_token: float | None) -> str:
    """Return the amount of text kept: bytes of pages; tokens of documents if `per_token` is known, else characters; empty if unknown."""
    if level.characters_out is None:
        return ""
    if level.step.artifact.kind == "pages":
        return size(level.characters_out)
    return amount(level.characters_out, per_token)


def amount(characters: int, per_token: float | None) -> str:
    """Return a number of characters as text, converted to tokens if `per_token` (characters per token) is known."""
    return f"≈ {short(round(characters / per_token))} tokens" if per_token else f"{short(characters)} characters"


def _rule(rule: Rule, level: Level, at: int, most: int, per_token: float | None) -> Html:
    """Return a rule's row. The rule's bar begins after `at` rows, under the rule's segment of the step's bar."""
    words = amount(rule.characters, per_token) if rule.characters and level.removed_characters is not None else ""
    place = f"margin-left:{100 * at / max(1, most):.2f}%;width:{100 * rule.rows / max(1, most):.2f}%"
    head = [
        tag("b", [[piece, Html("<wbr>")] for piece in re.findall(r"[^._]*[._]?", rule.name) if piece]),
        tag("span", tag("i", class_=rule.look, style=place), class_="bar", aria_hidden="true"),
        tag("span", percent(rule.rows, level.came), class_="n dim"),
        tag("span", f"{rule.rows:,}" if rule.no_page else f"−{rule.rows:,}", class_="n dim" if rule.no_page else "n minus"),
        tag("span", words, class_="n dim"),
    ]
    cost = _cost(f"{level.step.label}.{rule.name}")
    return details(tag("span", head, class_="rule"), cost, tag("div", [example_view(e) for e in rule.examples], class_="cards"))


def _cost(rule: str) -> Html | None:
    """Return a note with the shares of good and bad words that a rule drops on annotated pages; None if the rule was not measured."""
    row = _evidence().get(rule)
    if row is None:
        return None
    good, bad = (percent(float(row[name]), 1.0) for name in ("good_lost", "bad_caught"))
    text = f"On annotated pages, {row['drops']} loses {good} of the good words and catches {bad} of the bad ones (puna rules)."
    return tag("p", text, class_="note")


@functools.cache
def _evidence() -> dict[str, dict[str, str]]:
    """Return rule → row of the rule table in the repository, which `tests/benchmarks/evidence.py --write` writes."""
    with Path(__file__).with_name("rule_evidence.tsv").open(encoding="utf-8", newline="") as file:
        return {row["rule"]: row for row in csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE)}


def example_view(example: Example) -> Html:
    """Return a dropped row as a card: title, URL, the value beside the threshold, the beginning of its text."""
    d = example.decision
    decided: list[Content] = []
    if d.get("value") is not None:
        against = f" against {number(d['threshold'])}" if d.get("threshold") is not None else ""
        decided.append(tag("span", f"value {number(d['value'])}{against}", class_="decision"))
    if example.place:
        decided.append(tag("span", example.place, class_="tag"))
    if d.get("detail"):
        decided.append(tag("span", excerpt(str(d["detail"]), 300), class_="detail"))
    if example.row is None:
        return tag("article", tag("h4", f"id {d.get('id')}"), tag("p", decided), class_="card")
    return card(example.row, decided)


def heading(row: Mapping[str, Any]) -> str:
    """Return a row's title, else its task, the last part of its URL, or its source."""
    file = str(row.get("url") or "").rstrip("/").rpartition("/")[2]
    return str(row.get("title") or row.get("task") or file or row.get("source") or "untitled")


def card(row: Mapping[str, Any], about: Content, characters: int = 420) -> Html:
    """Return a document as a card: title, URL, facts, any prompt, the beginning of its text."""
    title = heading(row)
    url = tag("p", row["url"], class_="url") if row.get("url") else None
    prompt = tag("p", excerpt(str(row["prompt"]), 200), class_="prompt", dir="auto") if row.get("prompt") else None
    body = tag("blockquote", excerpt(row["text"], characters), dir="auto")
    return tag("article", tag("h4", title, dir="auto"), url, tag("p", about), prompt, body, class_="card")


def duplicates_view(run: Run, step: Step) -> Html:
    """Show examples of removed documents beside their kept duplicates, with differences marked, and count all documents and clusters."""
    every, near = Among(), Among()
    for batch in step.artifact.batches("duplicates"):
        rows = pa.Table.from_batches([batch])
        every.add(rows, rows["similarity"].to_numpy())
        rows = rows.filter(pc.less(rows["similarity"], 1))
        near.add(rows, rows["similarity"].to_numpy())
    examples = [row for _, row in (near if near.rows else every).selection()]
    ids = {str(i) for row in examples for i in (row["id"], row["kept_id"])}
    documents = {name: doc for source in run.filtered_inputs(step) for name, doc in rows_of(source, ids).items()}
    whole = [row for row in examples if row["id"] in documents and row["kept_id"] in documents]
    pairs = [_pair(row, documents[row["id"]], documents[row["kept_id"]], opened=row is whole[0]) for row in whole]
    of_clusters = "select count(*), max(rows) from (select count(*) as rows from found group by cluster)"
    of_methods = "select distinct method from found order by method"
    ((clusters, largest),), records = query(step.artifact, "duplicates", of_clusters, of_methods)
    methods = ", ".join(method for (method,) in records)
    note = f"{every.rows:,} documents removed in {clusters:,} clusters (the largest lost {largest:,}); found by {methods}."
    return part(f"{step.label}: what was removed, beside what was kept", tag("div", pairs, class_="pairs"), note=note)


def _pair(row: Mapping[str, Any], gone: Mapping[str, Any], kept: Mapping[str, Any], *, opened: bool) -> Html:
    left, right = mark_differences(gone["text"], kept["text"])
    sides = []
    for side, doc, words in (("removed", gone, left), ("kept", kept, right)):
        where = tag("p", doc.get("url") or doc.get("title") or doc["id"], class_="url")
        sides.append(tag("div", tag("h4", side), where, tag("blockquote", words, dir="auto")))
    name = tag("b", heading(gone), dir="auto")
    about = tag("span", f"similarity {row['similarity']:.3f}", class_="tag")
    return details([name, about], tag("div", sides, class_="sides"), open_=opened)


def mark_differences(first: str, second: str) -> tuple[Html, Html]:
    """Return excerpts of two texts with differing words marked, from shortly before the first difference; equal texts from the start."""
    a, b = re.findall(r"\s*\S+", first), re.findall(r"\s*\S+", second)
    same = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    start = max(0, same - 25) if a != b else 0
    cut = "… " if start else ""
    a, b = a[start : start + WORDS_COMPARED], b[start : start + WORDS_COMPARED]
    sides: tuple[list[Content], list[Content]] = ([cut], [cut])
    for kind, i, j, k, m in difflib.SequenceMatcher(None, a, b, autojunk=False).get_opcodes():
        for side, words in ((sides[0], "".join(a[i:j])), (sides[1], "".join(b[k:m]))):
            side.append(words if kind == "equal" else tag("mark", words) if words else None)
    return join(sides[0]), join(sides[1])


def lines_view(step: Step) -> Html:
    white = "' ' || chr(9) || chr(10) || chr(13)"
    texts = f"select trim(text, {white}) as said, rule, count(*) as times, sum(length(text)) as size from found group by said, found.rule"
    once = f"create temp table texts as {texts}"
    totals = "select sum(times), sum(size), count(*), (select count(distinct id) from found) from texts"
    most = f"from texts order by times desc, said, rule limit {LINES_SHOWN}"
    _, ((times, characters, distinct, documents),), ranked = query(step.artifact, "removed_lines", once, totals, most)
    rows: list[list[Content]] = [[count, tag("q", excerpt(line, 160) or "(blank)", dir="auto"), rule] for line, rule, count, _ in ranked]
    note = f"{times:,} lines ({short(characters)} characters) cut from {documents:,} documents; {distinct:,} distinct."
    return part(f"{step.label}: the lines removed most often", table(["times", "line", "rule"], rows, numeric=(0,)), note=note)
