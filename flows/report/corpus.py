"""Sections on the corpus: languages and domains before and after curation, mixture weights, kept documents."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from puna.flows.html.markup import Content, Html, join, legend, number, part, percent, stacked_bar, table, tag
from puna.flows.report.curate import card
from puna.flows.report.run import Run, Step, join_rows, lengths, rows_of
from puna.storage import Artifact

KEPT_SHOWN = 6
GROUPS_SHOWN = 10
NAMES = {"zxx": "zxx (no language: code)"}


def final_documents(run: Run) -> Artifact | None:
    steps = run.kind("documents")
    return steps[-1].artifact if steps else None


def shares_view(run: Run, column: str, title: str) -> Html:
    """Return a table of classified and kept documents per language or domain; empty without signals or documents."""
    signals, documents = run.signals(column), final_documents(run)
    if signals is None or documents is None:
        return Html("")
    came: Counter[Any] = Counter()
    kept: Counter[Any] = Counter()
    characters: Counter[Any] = Counter()
    for batch in signals.batches("signals", [column]):
        _add(came, pa.Table.from_batches([batch]), column, "count")
    for own, groups in lengths(documents, signals.beside(["id", column])):
        both = join_rows(own, groups)
        _add(kept, both, column, "count")
        _add(characters, both, column, "sum", "characters")
    del came[None], kept[None], characters[None]
    if not came:
        return Html("")
    ranked = sorted(came, key=lambda g: (-came[g], g))
    if len(ranked) > GROUPS_SHOWN:
        rest = ranked[GROUPS_SHOWN - 1 :]
        other = f"{len(rest)} others"
        for counter in (came, kept, characters):
            counter[other] = sum(counter[g] for g in rest)
        ranked = [*ranked[: GROUPS_SHOWN - 1], other]
    most, total = max(came.values()), sum(characters[g] for g in ranked)
    rows: list[list[Content]] = []
    for g in ranked:
        shares = (percent(kept[g], came[g]), percent(characters[g], total))
        picture = stacked_bar([("kept", 100 * kept[g] / max(1, most)), ("gone", 100 * (came[g] - kept[g]) / max(1, most))])
        rows.append([NAMES.get(g, g), picture, came[g], kept[g], *shares])
    head: list[Content] = [title, "", "classified", "kept", "share kept", "of kept text"]
    return part(title.capitalize(), legend({"kept": "kept", "gone": "dropped later"}), table(head, rows, numeric=(2, 3, 4, 5)))


def _add(counts: Counter[Any], rows: pa.Table, group: str, how: str, value: str = "") -> None:
    """Add to `counts` the number of rows in each group (`how`: "count"), or the sum of the column `value` (`how`: "sum")."""
    sums = rows.group_by(group).aggregate([(value or group, how, pc.CountOptions(mode="all") if how == "count" else None)])
    counts.update(dict(zip(sums[group].to_pylist(), sums[f"{value or group}_{how}"].to_pylist(), strict=True)))


def mixture_view(run: Run) -> Html:
    """Show, for each knowledge type, its share of the corpus and of training, its weight, most repeats, and held-out documents."""
    step = next((s for s in reversed(run.kind("mixture")) if s.has("mixture")), None)
    if step is None:
        return Html("")
    documents = next((a for a in run.inputs(step) if a.kind == "documents"), None)
    groups: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    beside = step.artifact.beside(["id", "category", "split", "repeats", "weight"])
    for own, signals in lengths(documents, beside) if documents is not None else ():
        signals = join_rows(signals, own)
        signals = signals.append_column("read", pc.multiply(signals["characters"].cast(pa.int64()), signals["repeats"]))
        sums = [("id", "count"), ("characters", "sum"), ("read", "sum"), ("weight", "max"), ("repeats", "max")]
        for row in signals.group_by(["category", "split"]).aggregate(sums).to_pylist():
            group = groups[row["category"]]
            if row["split"] == "heldout":
                group["heldout"] += row["id_count"]
                continue
            for name in ("characters", "read"):
                group[name] += row[f"{name}_sum"]
            for name in ("weight", "repeats"):
                group[name] = max(group[name], row[f"{name}_max"])
    natural = sum(g["characters"] for g in groups.values())
    read = sum(g["read"] for g in groups.values())
    ranked = sorted(groups, key=lambda name: (-groups[name]["weight"], name))
    most = max((max(_share(g["read"], read), _share(g["characters"], natural)) for g in groups.values()), default=1) or 1
    rows: list[list[Content]] = []
    for name, group in ((name, groups[name]) for name in ranked):
        before, after = _share(group["characters"], natural), _share(group["read"], read)
        bars = [stacked_bar([(kind, 100 * share / most)], "bar thin") for kind, share in (("gone", before), ("kept", after))]
        shares = [percent(group["weight"], 1), percent(before, 1), percent(after, 1)]
        rows.append([name, join(bars), *shares, f"{number(group['repeats'])} ×", number(group["heldout"])])
    head: list[Content] = ["knowledge type", "natural share → share of training", "weight", "natural", "training", "repeats", "held out"]
    chips = legend({"gone": "natural", "kept": "training"})
    note = f"Shares of characters. Weights are those requested in {step.label}; since repeats are bounded, shares of training can differ."
    return part("Mixture", chips, table(head, rows, numeric=(2, 3, 4, 5, 6)), note=note)


def _share(value: float, whole: float) -> float:
    return value / whole if whole else 0.0


def kept_view(run: Run) -> Html:
    """Show up to `KEPT_SHOWN` kept documents: one per language and domain, then documents at even distances in the order of ids."""
    documents = final_documents(run)
    if documents is None or not documents.rows():
        return Html("")
    artifacts = {name: artifact for name in ("language", "domain", "quality") if (artifact := run.signals(name)) is not None}
    words = [name for name in artifacts if name != "quality"]
    examples: dict[tuple[str | None, ...], str] = {}
    spread, at, step = [], 0, max(1, documents.rows() // KEPT_SHOWN)
    for rows, *signals in lengths(documents, *(artifacts[name].beside(["id", name]) for name in words)):
        spread += rows["id"].take(pa.array(range(-at % step, len(rows), step), pa.int64())).to_pylist()
        at += len(rows)
        for name, of in zip(words, signals, strict=True):
            rows = rows.append_column(name, of[name].take(pc.index_in(rows["id"], value_set=of["id"].combine_chunks())))
        for row in rows.group_by(words, use_threads=False).aggregate([("id", "first")]).to_pylist() if words else ():
            examples.setdefault(tuple(row[name] for name in words), row["id_first"])
    ids = list(dict.fromkeys([*list(examples.values())[: KEPT_SHOWN - 1], *spread]))[:KEPT_SHOWN]
    texts = rows_of(documents, ids)
    cards = []
    for one in ids:
        values = {name: of.between(one, one, columns=[name])[name].to_pylist() for name, of in artifacts.items()}
        tags = [tag("span", word, class_="tag") for name in words for word in values[name] if word]
        tags += [tag("span", f"quality {value:.2f}", class_="tag") for value in values.get("quality", ()) if value is not None]
        cards.append(card(texts[one], tags, 320))
    return part("What was kept", tag("div", cards, class_="cards"))


def examples_view(steps: list[Step]) -> Html:
    """Show rows of the `examples` tables that curation steps wrote, for example masked personal data."""
    examples = [(step, step.artifact.read("examples").slice(0, KEPT_SHOWN).to_pylist()) for step in steps if step.has("examples")]
    cards = {
        step.label: [card({"title": row["kind"], "prompt": row["prompt"], "text": row["text"]}, row["detail"]) for row in rows]
        for step, rows in examples
    }
    return join([part(label, tag("div", those, class_="cards")) for label, those in cards.items()])
