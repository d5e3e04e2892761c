"""The stage `split`: training and held-out documents."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from pydantic import Field

from puna.stages import urls
from puna.stages.contract import Documents, SeededConfig, Signals, StageConfig, StageRun, signals_of, stage
from puna.stages.draws import uniform
from puna.stages.training.corpus import of_part
from puna.storage import Artifact, Part, PunaError

UNKNOWN = "unknown"
KINDS = ("language", "code_score", "code_line_fraction", "reasoning_score", "formulas", "domain")  # signals that give a document's kind


class KindsConfig(StageConfig):
    """Thresholds that sort documents into the kinds of Llama 3's mixture (3.1.2): code, multilingual, mathematics_reasoning, general."""

    language: str = Field("en", min_length=2, description="Language of general and mathematics_reasoning; others are multilingual")
    min_code: float = Field(0.5, ge=0, le=1, description="Minimum code_score of the kind code, in any language; domain code also counts")
    min_code_lines: float = Field(0.02, ge=0, le=1, description="Minimum code_line_fraction of code: code_score is high in unknown scripts")
    min_reasoning: float = Field(0.5, ge=0, le=1, description="Minimum reasoning_score of the kind mathematics_reasoning")
    min_formulas: int = Field(3, ge=0, description="Minimum formulas of a text with min_reasoning whose lines look like code but are not")


class SplitConfig(SeededConfig):
    category: str = Field("domain", min_length=1, description="Signal that holds a document's category")
    kinds: KindsConfig | None = Field(None, description="Thresholds of four kinds (language, code, reasoning, domain) replacing `category`")
    heldout_fraction: float = Field(0.02, ge=0, lt=1, description="Share of the URLs whose documents are held out (0 to 1; 0: none)")
    heldout_least: int = Field(4, ge=0, description="Minimum number of held-out documents per category, up to a third of the category")


@stage(kind="mixture")
def split(documents: Documents, signals: list[Signals] | None, config: SplitConfig, run: StageRun) -> None:
    """Hold out documents before the tokenizer, the mixture experiments and the model learn from the others.

    A hash of the URL decides, so all versions of a page are on the same side. A page stays on its side when the corpus grows, except in
    small categories (`heldout_least`). The output is a mixture that reads each training document once; `mix` turns it into the training
    mixture. Without signals, all documents are in one category."""
    if not documents.rows():
        raise PunaError(f"split: {documents.id} has no documents to hold out or to train on; give a corpus with text")
    names = KINDS if config.kinds else (config.category,)
    columns = [name for artifact in signals or () for name in artifact.columns()]
    for name in names if signals or config.kinds else ():
        if name not in columns:
            there = f"{', '.join(artifact.id for artifact in signals or ())} has" if signals else "split.kinds: there is"
            hint = f"give {', '.join(names)} as domains" if config.kinds else f"set split.category to one of {', '.join(columns)}"
            raise PunaError(f"{there} no signal {name!r}; {hint}")
    cut = max(1, documents.record().cut)
    facts = run.exchange(_measure, run.parts(documents, columns=["id", "url", "text"]), signals, config, by="id", partitions=cut)
    sides = sides_of(lambda function, *args: run.map(of_part, facts.nonempty_parts, function, *args), config)
    training, heldout_documents, heldout_bytes = Counter[str](), 0, 0
    for bytes_of, documents_out, bytes_out in run.map(of_part, facts.nonempty_parts, _amounts, sides):
        training.update(bytes_of)
        heldout_documents, heldout_bytes = heldout_documents + documents_out, heldout_bytes + bytes_out
    total = max(training.total(), 1)
    run.produce_shards(_mixture, facts, cut, sides, {category: size / total for category, size in training.items()})
    run.metric("documents", facts.rows)
    run.metric("heldout_documents", heldout_documents)
    run.metric("heldout_bytes", heldout_bytes)


def _measure(part: Part, signals: Sequence[Artifact] | None, config: SplitConfig) -> pa.Table:
    """Return a table of a part's documents: id, chance (a hash of the normalized URL, 0 to 1), category and `bytes` of text."""
    table = part.read()
    ids = table["id"]
    chance = uniform([urls.normalize(url) for url in table["url"].to_pylist()], config.seed, "heldout")
    category = pa.array([UNKNOWN] * len(ids)) if not signals else _categories(ids, signals, config)
    return pa.table({"id": ids, "chance": chance, "category": category, "bytes": pc.binary_length(table["text"]).cast(pa.int64())})


def _categories(ids: pa.ChunkedArray, signals: Sequence[Artifact], config: SplitConfig) -> pa.Array:
    """Return each document's category: its kind if `kinds` is set, else the signal `category` (`unknown` if that is null or "")."""
    if config.kinds is None:
        category = pc.fill_null(_signal(ids, signals, config.category).cast(pa.string()), UNKNOWN)
        return pc.if_else(pc.equal(category, ""), UNKNOWN, category)
    language, code, lines, reasoning, formulas, domain = (_signal(ids, signals, name) for name in KINDS)
    technical = pc.and_(pc.greater_equal(code, config.kinds.min_code), pc.greater_equal(lines, config.kinds.min_code_lines))
    reasons = pc.fill_null(pc.greater_equal(reasoning, config.kinds.min_reasoning), False)
    formal = pc.and_(reasons, pc.fill_null(pc.greater_equal(formulas, config.kinds.min_formulas), False))
    is_code = pc.or_(pc.and_not(pc.fill_null(technical, False), formal), pc.fill_null(pc.equal(domain, "code"), False))
    own = pc.is_in(language, pa.array([config.kinds.language, "zxx"]))
    return pc.if_else(is_code, "code", pc.if_else(own, pc.if_else(reasons, "mathematics_reasoning", "general"), "multilingual"))


def _signal(ids: pa.ChunkedArray, signals: Sequence[Artifact], name: str) -> pa.ChunkedArray:
    return signals_of(next(artifact for artifact in signals if name in artifact.columns()), ids, [name])[name]


def _amounts(rows: pa.Table, sides: Sides) -> tuple[dict[str, int], int, int]:
    """Return category → bytes of training documents, the number of held-out documents, and the bytes of held-out documents."""
    out, sizes = sides.held_out(rows["chance"].to_numpy()), rows["bytes"].to_numpy()
    training: Counter[str] = Counter()
    for category, size in zip(rows["category"].to_pylist(), np.where(out, 0, sizes).tolist(), strict=True):
        training[category] += size
    return dict(training), int(out.sum()), int(sizes[out].sum())


def _mixture(rows: pa.Table, sides: Sides, weights: dict[str, float]) -> dict[str, pa.Table]:
    rows = rows.sort_by("id")
    out, categories = sides.held_out(rows["chance"].to_numpy()), rows["category"].to_pylist()
    columns = {
        "id": rows["id"], "category": rows["category"], "split": np.where(out, "heldout", "train").tolist(),
        "repeats": np.ones(len(rows), np.int32), "weight": pa.array([weights[c] for c in categories], pa.float64()),
    }  # fmt: skip
    return {"mixture": pa.table(columns)}


@dataclass(frozen=True)
class Sides:
    """The rule that holds out URLs. A URL's chance is a hash from 0 to 1; the URL is held out if its chance is in `chosen` (sorted), or
    below `fraction` and not in `spared`."""

    fraction: float
    chosen: NDArray[np.float64]
    spared: NDArray[np.float64]

    def held_out(self, chance: NDArray[np.float64]) -> NDArray[np.bool_]:
        """Return a mask bool [n], True where a chance is held out."""
        return np.isin(chance, self.chosen) | ((chance < self.fraction) & ~np.isin(chance, self.spared))


def sides_of(each: Callable[..., Iterable[Any]], config: SplitConfig) -> Sides:
    """Return the rule that holds out URLs: those with a chance below `heldout_fraction` (0: none), and more in small categories.

    A category holds out at least its `heldout_least` smallest chances, but at most a third of its documents. A category that would be held
    out completely is spared. Versions of a page may be in different categories; a URL held out in one category is held out in all.
    `each(function, *args)` yields `function(rows, *args)` for every part of the rows (columns `chance`, 0 to 1, and `category`)."""
    none = np.zeros(0)
    if config.heldout_fraction == 0:
        return Sides(0.0, none, none)
    count: Counter[str] = Counter()
    largest: dict[str, float] = {}
    smallest: dict[str, NDArray[np.float64]] = {}
    for census in each(_census, config.heldout_least):
        for category, (own, high, low) in census.items():
            count[category] += own
            largest[category] = max(high, largest.get(category, 0.0))
            smallest[category] = np.sort(np.append(smallest.get(category, none), low))[: config.heldout_least]
    whole, chances = set(), [none]
    for category, low in smallest.items():
        lowest = low[: min(config.heldout_least, count[category] // 3)]
        if largest[category] < config.heldout_fraction or (len(lowest) and largest[category] <= lowest[-1]):
            whole.add(category)
        else:
            chances.append(lowest)
    spared: set[float] = set()
    if whole:
        spared = set().union(*each(_of_categories, frozenset(whole), config.heldout_fraction))
        spared -= set().union(*each(_elsewhere, frozenset(whole), frozenset(spared)))
    return Sides(config.heldout_fraction, np.unique(np.concatenate(chances)), np.array(sorted(spared)))


def _census(rows: pa.Table, least: int) -> dict[str, tuple[int, float, NDArray[np.float64]]]:
    """Return each category's number of documents, largest chance, and `least` smallest chances."""
    chance, names = rows["chance"].to_numpy(), np.array(rows["category"].to_pylist(), dtype=object)
    results = {}
    for category in sorted(set(names.tolist())):
        own = np.sort(chance[names == category])
        results[category] = (len(own), float(own[-1]), own[:least])
    return results


def _of_categories(rows: pa.Table, categories: frozenset[str], fraction: float) -> set[float]:
    inside = np.isin(np.array(rows["category"].to_pylist(), dtype="U"), sorted(categories))
    chance = rows["chance"].to_numpy()
    return set(chance[inside & (chance < fraction)].tolist())


def _elsewhere(rows: pa.Table, categories: frozenset[str], chances: frozenset[float]) -> set[float]:
    """Return the `chances` that also occur in documents outside `categories`."""
    inside = np.isin(np.array(rows["category"].to_pylist(), dtype="U"), sorted(categories))
    return set(chances) & set(rows["chance"].to_numpy()[~inside].tolist())
