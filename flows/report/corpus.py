"""What the corpus is made of: languages and domains before and after curation, mixture weights, kept documents."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from puna.flows.report.curate import card
from puna.flows.report.markup import Content, Html, join, number, part, percent, table, tag
from puna.flows.report.run import Run, Step
from puna.storage import Artifact

KEPT_SHOWN = 6
GROUPS_SHOWN = 10
NAMES = {"zxx": "zxx (no language: code)"}


def final_documents(run: Run) -> Artifact | None:
    """The documents that curation ended with."""
    steps = run.kind("documents")
    return steps[-1].artifact if steps else None


def words_of(run: Run, column: str) -> dict[str, str]:
    """A signal of words (language, domain) by document id, from the last step that wrote it."""
    for step in reversed(run.kind("signals")):
        if step.has("signals") and column in step.artifact.manifest.tables["signals"].columns:
            both = step.artifact.read(columns=["id", column])
            return {i: v for i, v in zip(both["id"].to_pylist(), both[column].to_pylist(), strict=True) if v is not None}
    return {}


def numbers_of(run: Run, column: str) -> dict[str, float]:
    """A signal of numbers by document id."""
    return {i: float(v) for i, v in words_of(run, column).items()}


def shares_view(run: Run, column: str, title: str) -> Html:
    """Documents per language or domain: those that were classified, and those of them that were kept."""
    groups = words_of(run, column)
    documents = final_documents(run)
    if not groups or documents is None:
        return Html("")
    lengths = run.scan(documents).lengths
    came: dict[str, int] = defaultdict(int)
    kept: dict[str, int] = defaultdict(int)
    characters: dict[str, int] = defaultdict(int)
    for name, group in groups.items():
        came[group] += 1
        if name in lengths:
            kept[group] += 1
            characters[group] += lengths[name]
    ranked = sorted(came, key=lambda g: (-came[g], g))
    if len(ranked) > GROUPS_SHOWN:
        rest = ranked[GROUPS_SHOWN - 1 :]
        other = f"{len(rest)} others"
        for counted in (came, kept, characters):
            counted[other] = sum(counted[g] for g in rest)
        ranked = [*ranked[: GROUPS_SHOWN - 1], other]
    most, total = max(came.values()), sum(characters[g] for g in ranked)
    rows: list[list[Content]] = []
    for g in ranked:
        shares = (percent(kept[g], came[g]), percent(characters[g], total))
        rows.append([NAMES.get(g, g), _double(kept[g], came[g], most), came[g], kept[g], *shares])
    head: list[Content] = [title, "", "classified", "kept", "share kept", "of kept text"]
    chips = tag("ul", tag("li", tag("i", class_="kept"), "kept"), tag("li", tag("i", class_="gone"), "dropped later"), class_="legend")
    return part(title.capitalize(), chips, table(head, rows, numeric=(2, 3, 4, 5)))


def _double(kept: int, came: int, most: int) -> Html:
    widths = (100 * kept / max(1, most), 100 * (came - kept) / max(1, most))
    bars = [tag("i", class_=name, style=f"width:{width:.2f}%") for name, width in zip(("kept", "gone"), widths, strict=True)]
    return tag("span", bars, class_="bar", aria_hidden="true")


# --- mixture ------------------------------------------------------------------------------------------


def mixture_view(run: Run) -> Html:
    """Per knowledge type: its documents, its natural share, and the share of training it gets."""
    step = next((s for s in reversed(run.kind("mixture")) if s.has("mixture")), None)
    if step is None:
        return Html("")
    documents = next((a for a in run.inputs(step) if a.kind == "documents"), None)
    lengths = run.scan(documents).lengths if documents is not None else {}
    groups: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for row in step.artifact.read().to_pylist():
        group = groups[row["category"]]
        if row["split"] == "heldout":
            group["heldout"] += 1
            continue
        length = lengths.get(row["id"], 0)
        group["train"] += 1
        group["characters"] += length
        group["read"] += length * row["repeats"]
        group["weight"] = max(group["weight"], row["weight"])
        group["repeats"] = max(group["repeats"], row["repeats"])
    natural = sum(g["characters"] for g in groups.values())
    read = sum(g["read"] for g in groups.values())
    ranked = sorted(groups, key=lambda name: (-groups[name]["weight"], name))
    most = max((max(_share(g["read"], read), _share(g["characters"], natural)) for g in groups.values()), default=1) or 1
    rows: list[list[Content]] = [_mixture_row(name, groups[name], natural, read, most) for name in ranked]
    head: list[Content] = ["knowledge type", "natural share → share of training", "weight", "natural", "training", "read up to", "held out"]
    chips = tag("ul", tag("li", tag("i", class_="gone"), "natural"), tag("li", tag("i", class_="kept"), "training"), class_="legend")
    note = f"Shares of characters; weights are what {step.label} was asked for, repeats are bounded, so the two can differ."
    return part("Mixture", chips, table(head, rows, numeric=(2, 3, 4, 5, 6)), note=note)


def _mixture_row(name: str, group: Mapping[str, float], natural: float, read: float, most: float) -> list[Content]:
    before, after = _share(group["characters"], natural), _share(group["read"], read)
    bars = [
        tag("span", tag("i", class_=kind, style=f"width:{100 * share / most:.1f}%"), class_="bar thin", aria_hidden="true")
        for kind, share in (("gone", before), ("kept", after))
    ]
    counts: list[Content] = [percent(before, 1), percent(after, 1), f"{number(group['repeats'])} ×", number(group["heldout"])]
    return [name, join(bars), percent(group["weight"], 1), *counts]


def _share(value: float, whole: float) -> float:
    return value / whole if whole else 0.0


# --- kept documents -----------------------------------------------------------------------------------


def kept_view(run: Run) -> Html:
    """Documents that passed every rule: one per language or domain first, then evenly through the ids."""
    documents = final_documents(run)
    if documents is None or not documents.rows():
        return Html("")
    ids = documents.read(columns=["id"])["id"].to_pylist()
    languages, domains, quality = words_of(run, "language"), words_of(run, "domain"), numbers_of(run, "quality")
    chosen: dict[str, str] = {}
    for name in ids:
        chosen.setdefault(f"{languages.get(name)} {domains.get(name)}", name)
    spread = ids[:: max(1, len(ids) // KEPT_SHOWN)]
    shown = list(dict.fromkeys([*list(chosen.values())[: KEPT_SHOWN - 1], *spread]))[:KEPT_SHOWN]
    rows = run.scan(documents, set(shown)).rows
    cards = []
    for name in shown:
        said = [tag("span", word, class_="tag") for word in (languages.get(name), domains.get(name)) if word]
        if name in quality:
            said.append(tag("span", f"quality {quality[name]:.2f}", class_="tag"))
        cards.append(card(rows[name], said, 320))
    return part("What was kept", tag("div", cards, class_="cards"))


def examples_view(steps: list[Step]) -> Html:
    """The `examples` tables that steps of curation wrote, for instance personal data that was masked."""
    found = [(step, step.artifact.read("examples").slice(0, KEPT_SHOWN).to_pylist()) for step in steps if step.has("examples")]
    return join([part(step.label, _examples(rows)) for step, rows in found])


def _examples(rows: list[dict[str, Any]]) -> Html:
    cards = [card({"title": row["kind"], "prompt": row["prompt"], "text": row["text"]}, row["detail"]) for row in rows]
    return tag("div", cards, class_="cards")
