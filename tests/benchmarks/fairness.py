"""The effect of curation on each language, measured on labelled documents. On parallel documents every difference is due to curation."""

from __future__ import annotations

import random
import re
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from statistics import mean, median
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from puna.flows.engine.trace import load
from puna.stages.contract import execute
from puna.stages.curate.heuristics import HeuristicsConfig, heuristics
from puna.stages.curate.language import LanguageConfig, language
from puna.stages.curate.rules.decide import factors_of, fires
from puna.stages.curate.rules.groups import active_rules
from puna.stages.curate.select import SelectConfig, select
from puna.storage import PunaError, Store

GOOD_KIND = "good"
NEAR = 0.1
SENTENCE_END = re.compile(r"(?<=[.!?。！？।։።])\s*|\n+")


class Labelled(NamedTuple):
    """A document in a known language. `kind`: good, or the way in which it was spoilt."""

    language: str
    text: str
    kind: str = GOOD_KIND


@dataclass
class Fairness:
    """The results of a fairness run: one row per language, and figures over all languages."""

    rows: list[dict[str, Any]]
    figures: dict[str, float]


def repeats(text: str) -> str:
    """Return a third of the paragraphs, four times each."""
    return "\n".join(line for number, line in enumerate(text.split("\n")) for _ in range(1 if number % 3 else 4))


def misread(text: str) -> str:
    """Return the text's UTF-8 bytes read as cp1252."""
    return text.encode("utf-8").decode("cp1252", "replace").replace("\ufffd", "")


def menu(text: str) -> str:
    """Return the first two words of every sentence, one sentence per line; of a sentence without spaces, its first six characters."""
    lines: list[str] = []
    for sentence in SENTENCE_END.split(text):
        words = sentence.split()
        if words:
            lines += words[:2] if len(words) > 2 else [sentence.strip()[:3], sentence.strip()[3:6]]
    return "\n".join(lines)


def salad(text: str) -> str:
    """Return the words that occur once, shuffled."""
    words = text.split()
    if len(words) < 2 * len(text.split("\n")):  # a script without spaces: pieces of three characters
        joined = "".join(words)
        words = [joined[at : at + 3] for at in range(0, len(joined), 3)]
    counts = Counter(words)
    once = [word for word in words if counts[word] == 1]
    random.Random(0).shuffle(once)
    return " ".join(once)


SPOILT: dict[str, Callable[[str], str]] = {"repeats": repeats, "misread": misread, "menu": menu, "salad": salad}


def twins(documents: Sequence[Labelled]) -> list[Labelled]:
    """Return a spoilt copy of every good document, for each way of spoiling that changes it."""
    spoilt = [Labelled(d.language, spoil(d.text), kind) for d in documents if d.kind == GOOD_KIND for kind, spoil in SPOILT.items()]
    texts = {document.text for document in documents}
    return [twin for twin in spoilt if twin.text.strip() and twin.text not in texts]


def fairness(documents: Sequence[Labelled], recipe: str = "clean", changes: Sequence[str] = (), reference: str = "en") -> Fairness:
    """Run language, heuristics and select of a recipe over the documents, then every rule alone.

    A language is near the reference if its share of kept good documents is at most 0.1 lower.
    """
    loaded = load(recipe, list(changes), "curate")
    found_config = loaded.one("language", language, LanguageConfig)
    measured_config = loaded.one("heuristics", heuristics, HeuristicsConfig)
    # Rules on classifiers that were trained on other pages are not meaningful here.
    chosen = loaded.one("select", select, SelectConfig).model_copy(update={"code_reasoning": None, "quality": None, "domains": None})
    with tempfile.TemporaryDirectory() as folder:
        store = Store.open(folder)
        table = pa.Table.from_pylist([_row(number, document) for number, document in enumerate(documents)])
        texts = store.import_table("documents", table)
        languages = execute(language, found_config, {"documents": texts}, store)
        measured = execute(heuristics, measured_config, {"documents": texts, "language": languages}, store)
        selected = execute(select, chosen, {"documents": texts, "signals": [languages, measured]}, store)
        kept = {int(name, 16) for name in selected.read(columns=["id"])["id"].to_pylist()}
        signals = measured.read()
        for column in languages.read().column_names[1:]:
            signals = signals.append_column(column, languages.read()[column])
        factors = factors_of(languages.read("languages"), signals) if chosen.per_language else {}
        sources = pa.chunked_array([["web"] * signals.num_rows])
        alone = {rule.name: fires(rule, signals, sources, factors) for rule in active_rules(chosen)}
    return _summary(documents, kept, signals, alone, reference)


def _row(number: int, document: Labelled) -> dict[str, Any]:
    when = datetime(2024, 1, 1, tzinfo=UTC)
    return {"id": f"{number:032x}", "url": f"https://example.org/{number}", "fetched_at": when, "source": "web", "title": None,
            "text": document.text}  # fmt: skip


def _summary(documents: Sequence[Labelled], kept: set[int], signals: pa.Table, alone: dict[str, Any], reference: str) -> Fairness:
    names, scores = signals["language"].to_pylist(), signals["language_score"].to_pylist()
    good: dict[str, list[int]] = defaultdict(list)
    spoilt: dict[str, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for number, document in enumerate(documents):
        if document.kind == GOOD_KIND:
            good[document.language].append(number)
        else:
            spoilt[document.kind][document.language].append(number)
    share = {name: mean(number in kept for number in numbers) for name, numbers in good.items()}
    if reference not in share:
        raise PunaError(
            f"fairness: no good document is in {reference!r}, the reference; there is {', '.join(sorted(share))}"
        )
    wrong = {kind: {name: mean(n in kept for n in numbers) for name, numbers in of.items()} for kind, of in spoilt.items()}
    rows = []
    for name, numbers in sorted(good.items()):
        most = Counter(names[n] for n in numbers).most_common(1)[0][0]
        firing = {rule: float(fired[numbers].mean()) for rule, fired in alone.items() if fired[numbers].any()}
        rows.append({
            "language": name, "documents": len(numbers), "kept": share[name], "found": most,
            "score": median(scores[n] for n in numbers), **{kind: of[name] for kind, of in sorted(wrong.items()) if name in of},
            "rules": ", ".join(f"{rule} {value:.2f}" for rule, value in sorted(firing.items(), key=lambda pair: -pair[1])),
        })  # fmt: skip
    values = np.sort(list(share.values()))
    figures = {
        "languages": float(len(values)), "mean_kept": float(values.mean()), "languages_at_zero": float((values == 0).sum()),
        "languages_near_reference": float((values >= share[reference] - NEAR).sum()), "gini": gini(values),
        **{f"spoilt_kept_{kind}": float(mean(of.values())) for kind, of in sorted(wrong.items())},
    }  # fmt: skip
    if wrong:
        figures["spoilt_kept"] = float(mean(figures[f"spoilt_kept_{kind}"] for kind in wrong))
    return Fairness(rows, figures)


def gini(values: Any) -> float:
    """Return the Gini coefficient of shares; 0 if all are equal."""
    ordered = np.sort(np.asarray(values, np.float64))
    if not ordered.sum():
        return 0.0
    ranks = np.arange(1, len(ordered) + 1)
    return float((2 * ranks - len(ordered) - 1) @ ordered / (len(ordered) * ordered.sum()))
