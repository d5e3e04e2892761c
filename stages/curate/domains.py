"""Domains: the knowledge type of each document (Llama 3, section 3.1.2)."""

from __future__ import annotations

from collections import Counter
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pydantic import Field

from puna.stages.contract import Documents, Figure, StageRun, stage
from puna.stages.curate.learned.classifier import ClassifierConfig, out_of_fold, prepare
from puna.storage import Part, PunaError

CODE = "code"
SEEDS = Path(__file__).parent / "data" / "domains.txt"


class DomainsConfig(ClassifierConfig):
    """When the seed words decide, and fastText's settings."""

    dimension: int = Field(16, ge=8, le=1000, description="Length of a word's vector")
    learning_rate: float = Field(0.5, gt=0, le=10, description="Learning rate at the start, decaying to 0")
    epochs: int = Field(40, ge=1, le=1000, description="Passes over the training documents")
    max_characters: int = Field(1500, ge=1, description="Read of each document, characters")
    code_sources: tuple[str, ...] = Field(("code",), description="Sources whose documents are code, by source alone")
    min_seeds: int = Field(3, ge=1, description="Least number of different seed words of a type that label a document")
    max_second: float = Field(
        0.5, ge=0, lt=1, description="Most seed words of the second type that a label allows, share of the best type's"
    )
    min_labels: int = Field(20, ge=2, description="A type with fewer labelled documents is left out, documents")


class Lexicon(NamedTuple):
    """`types` str; `hashes` uint64[n] sorted, `type_of` int64[n]: the seed words and the type each points to."""

    types: list[str]
    hashes: NDArray[np.uint64]
    type_of: NDArray[np.int64]


@lru_cache(maxsize=1)
def lexicon() -> Lexicon:
    """The seed words; a word that is listed for two types (in any two languages) points to none."""
    from puna.stages.curate.text.words import folded_hashes

    types: list[str] = []
    owner: dict[int, int] = {}
    for line in SEEDS.read_text(encoding="utf-8").splitlines():
        if not line or line.startswith("#"):
            continue
        head, _, words = line.partition(":")
        name = head.split()[0]
        if name not in types:
            types.append(name)
        for value in folded_hashes(words.split()).tolist():
            owner[value] = types.index(name) if owner.get(value, types.index(name)) == types.index(name) else -1
    pairs = sorted((value, at) for value, at in owner.items() if at >= 0)
    return Lexicon(types, np.array([v for v, _ in pairs], np.uint64), np.array([t for _, t in pairs], np.int64))


def seed_counts(text: str) -> NDArray[np.int64]:
    """Different seed words of each type in `text`, int64[types]."""
    from puna.stages.curate.text.characters import code_points
    from puna.stages.curate.text.words import split_codes

    words = lexicon()
    found = np.intersect1d(split_codes(code_points(text)).folded, words.hashes)
    return np.bincount(words.type_of[np.searchsorted(words.hashes, found)], minlength=len(words.types))


def seed_label(counts: NDArray[np.int64], min_seeds: int, max_second: float) -> str | None:
    """The type that the seed words give with confidence, or None."""
    order = np.argsort(-counts, kind="stable")
    best, second = int(counts[order[0]]), int(counts[order[1]])
    return lexicon().types[order[0]] if best >= min_seeds and second <= max_second * best else None


@stage(kind="signals")
def domains(documents: Documents, config: DomainsConfig, run: StageRun) -> None:
    """Give each document a knowledge type, by weak supervision.

    A lexicon of seed words in English, French, Spanish and German labels the documents in which words of one type clearly
    prevail (`domain_seed`); a fastText classifier is trained on those in the run. The type (`domain`, `domain_score`) has
    the greatest product of the classifier's probability, out of fold, and the square of one plus the number of the type's
    seed words found. No human labelled anything: the types mean what the lexicon says, documents in other languages are typed by the
    words they share with these four, and `agreement` (of seed labels and the out-of-fold classifier alone) measures
    consistency, not truth. Documents of code sources are `code`. The model trained on all labels is `domains.bin`.
    """
    parts = run.parts(documents, columns=["id", "source", "text"])
    counts: dict[str, NDArray[np.int64]] = {}
    code: list[str] = []
    for found, of_code in run.map(_seed, parts, config, rows=len(parts)):
        counts.update(found)
        code += of_code
    scored = sorted(counts)
    seeds = {identity: seed_label(counts[identity], config.min_seeds, config.max_second) for identity in scored}
    kept, labels = _usable(seeds, config.min_labels)
    if scored and len(kept) < 2:
        raise PunaError(
            f"domains: the seed words label {len(labels)} documents of {', '.join(kept) or 'no type'}; two types with at least "
            f"domains.min_labels={config.min_labels} are needed. Give more pages or a lower number; the flow curate can do "
            "without knowledge types, --set domains=null"
        )
    names: list[str] = []
    values: list[float] = []
    if scored:
        scores = out_of_fold(run, prepare(run, documents, config), labels, scored, config, "domains.bin")
        known = [lexicon().types.index(name) for name in scores.labels]
        joint = scores.probabilities * (1.0 + np.array([counts[identity][known] for identity in scored])) ** 2
        joint /= joint.sum(axis=1, keepdims=True)
        names = [scores.labels[at] for at in joint.argmax(axis=1)]
        values = np.round(joint.max(axis=1), 6).tolist()
        _report_labels(run, [scores.labels[at] for at in scores.probabilities.argmax(axis=1)], [labels.get(i) for i in scored])
    columns = {
        "id": pa.array([*scored, *code], pa.string()),
        "domain": pa.array([*names, *[CODE] * len(code)], pa.string()),
        "domain_score": pa.array([*values, *[1.0] * len(code)], pa.float64()),
        "domain_seed": pa.array([*seeds.values(), *[None] * len(code)], pa.string()),
    }
    run.write(pa.table(columns))
    _report(run, [*names, *[CODE] * len(code)])


def _usable(seeds: dict[str, str | None], least: int) -> tuple[list[str], dict[str, str]]:
    """Types with enough labels, and the labels of those types."""
    labelled = {identity: name for identity, name in seeds.items() if name is not None}
    counts = Counter(labelled.values())
    kept = sorted(name for name, count in counts.items() if count >= least)
    return kept, {identity: name for identity, name in labelled.items() if name in kept}


def _seed(part: Part, config: DomainsConfig) -> tuple[dict[str, NDArray[np.int64]], list[str]]:
    """Seed words of each document of a part, and the documents that are code."""
    table = part.read()
    counts = {}
    code = []
    for row in table.to_pylist():
        identity, source, text = row["id"], row["source"], row["text"]
        if source in config.code_sources:
            code.append(identity)
        else:
            counts[identity] = seed_counts(text[: config.max_characters])
    return counts, code


def _report_labels(run: StageRun, predicted: list[str], labels: list[str | None]) -> None:
    """How well the classifier alone finds the labels of documents that it did not see."""
    both = [(name, label) for name, label in zip(predicted, labels, strict=True) if label is not None]
    run.metric("labelled", len(both))
    run.metric("agreement", sum(name == label for name, label in both) / len(both))
    for name in sorted({label for _, label in both}):
        told = [predicted for predicted, label in both if label == name]
        run.metric(f"labelled_{name}", len(told))
        run.metric(f"recall_{name}", told.count(name) / len(told))


def _report(run: StageRun, names: list[str]) -> None:
    counts = {name: names.count(name) for name in sorted(set(names))}
    run.metric("documents", len(names))
    for name, count in counts.items():
        run.metric(f"documents_{name}", count)
    ranked = sorted(counts.items(), key=lambda pair: (-pair[1], pair[0]))
    run.figure("domains", Figure("Knowledge types", "type", "documents", {"documents": [(n, float(c)) for n, c in ranked]}, kind="bar"))
