"""Domains: the knowledge type of each document (Llama 3, section 3.1.2)."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pydantic import Field

from puna.stages.contract import Documents, Figure, StageRun, stage
from puna.stages.curate.classifier import ClassifierConfig, Scores, out_of_fold, prepare
from puna.storage import Part, PunaError

CODE = "code"
SEEDS = Path(__file__).parent / "data" / "domains.txt"


class DomainsConfig(ClassifierConfig):
    """When the seed words decide, and fastText's settings."""

    code_sources: tuple[str, ...] = Field(("code",), description="Sources whose documents are code, by source alone")
    min_seeds: int = Field(4, ge=1, description="Least number of different seed words of a type that label a document")
    max_second: float = Field(0.5, ge=0, lt=1, description="Greatest share of the best type's seed words that the second may have, for a label")
    min_labels: int = Field(20, ge=2, description="A type with fewer labelled documents is left out, documents")


class Lexicon(NamedTuple):
    """`types` str; `hashes` uint64[n] sorted, `type_of` int64[n]: the seed words and the type each points to."""

    types: list[str]
    hashes: NDArray[np.uint64]
    type_of: NDArray[np.int64]


@lru_cache(maxsize=1)
def lexicon() -> Lexicon:
    """The seed words; a word that is listed for two types (in any two languages) points to none."""
    from puna.stages.curate.words import folded_hashes

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
    from puna.stages.curate.characters import code_points
    from puna.stages.curate.words import split_codes

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
    prevail (`domain_seed`); a fastText classifier is trained on those in the run and types every document, out of fold
    (`domain`, `domain_score`). No human labelled anything: the types mean what the lexicon says, documents in other
    languages are typed by the words they share with these four, and `agreement` (of seed and out-of-fold classifier)
    measures consistency, not truth. Documents of code sources are `code`. The model trained on all labels is `domains.bin`.
    """
    parts = run.parts(documents, columns=["id", "source", "text"])
    seeds: dict[str, str | None] = {}
    code = []
    for rows in run.map(_seed, parts, config, rows=len(parts)):
        seeds.update(rows["seeds"])
        code += rows["code"]
    kept, labels = _usable(seeds, config.min_labels)
    if len(kept) < 2 and seeds:
        raise PunaError(
            f"domains: the seed words label {len(labels)} documents of {', '.join(kept) or 'no type'}; two types with at least "
            f"domains.min_labels={config.min_labels} are needed"
        )
    scored = sorted(seeds)
    found = out_of_fold(run, prepare(run, documents, config), labels, scored, config, "domains.bin") if scored else Scores([], kept, np.zeros((0, 1)))
    best = found.probabilities.argmax(axis=1) if scored else np.zeros(0, np.int64)
    names = [found.labels[at] for at in best]
    values = found.probabilities[np.arange(len(best)), best].tolist()
    columns = {
        "id": pa.array([*scored, *code], pa.string()),
        "domain": pa.array([*names, *[CODE] * len(code)], pa.string()),
        "domain_score": pa.array([*values, *[1.0] * len(code)], pa.float64()),
        "domain_seed": pa.array([*[seeds[i] for i in scored], *[None] * len(code)], pa.string()),
    }
    run.write(pa.table(columns))
    _report(run, names, [labels.get(i) for i in scored], len(code))


def _usable(seeds: dict[str, str | None], least: int) -> tuple[list[str], dict[str, str]]:
    """Types with enough labels, and the labels of those types."""
    labelled = {identity: name for identity, name in seeds.items() if name is not None}
    names, counts = np.unique(np.array(list(labelled.values()), dtype="U"), return_counts=True) if labelled else ([], [])
    kept = [str(name) for name, count in zip(names, counts, strict=True) if count >= least]
    return kept, {identity: name for identity, name in labelled.items() if name in kept}


def _seed(part: Part, config: DomainsConfig) -> dict[str, object]:
    table = part.read()
    seeds: dict[str, str | None] = {}
    code = []
    for identity, source, text in zip(*(table[c].to_pylist() for c in ("id", "source", "text")), strict=True):
        if source in config.code_sources:
            code.append(identity)
        else:
            seeds[identity] = seed_label(seed_counts(text[: config.max_characters]), config.min_seeds, config.max_second)
    return {"seeds": seeds, "code": code}


def _report(run: StageRun, names: list[str], labels: list[str | None], code: int) -> None:
    both = [(name, label) for name, label in zip(names, labels, strict=True) if label is not None]
    run.metric("labelled", len(both))
    run.metric("documents", len(names) + code)
    if both:
        run.metric("agreement", sum(name == label for name, label in both) / len(both))
    everything = [*names, *["code"] * code]
    counts = {name: everything.count(name) for name in sorted(set(everything))}
    for name, count in counts.items():
        run.metric(f"documents_{name}", count)
        told = [(n, label) for n, label in both if label == name]
        if told:
            run.metric(f"recall_{name}", sum(n == label for n, label in told) / len(told))
    ranked = sorted(counts.items(), key=lambda pair: (-pair[1], pair[0]))
    run.figure("domains", Figure("Knowledge types", "type", "documents", {"documents": [(n, float(c)) for n, c in ranked]}, kind="bar"))
