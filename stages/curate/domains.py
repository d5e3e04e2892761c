"""`train_domains`, `domains`: classification of documents by knowledge type (Llama 3, section 3.1.2)."""

from __future__ import annotations

import re
from collections import Counter
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pydantic import Field

from puna.kernels.text.word_counts import Listed, kinds_held, list_words
from puna.kernels.text.words import words_listed
from puna.stages.contract import Classifier, Documents, Facts, Figure, InputFacts, StageConfig, StageRun, declare_signal, stage
from puna.stages.contract.declaration import GLANCE, LOOK
from puna.stages.curate.classifiers import classifier as fasttext
from puna.stages.curate.classifiers.classifier import Labels, out_of_fold, prepare
from puna.stages.curate.classifiers.fold_models import About, Trained, load_classifier
from puna.storage import Artifact, PunaError

declare_signal("domain", str, "", "knowledge type")
declare_signal("domain_score", float, "probability", "probability of the domain, from a model not trained on the document")
declare_signal("domain_seed", str, "", "knowledge type from the seed lexicon, if it is clear", optional=True)
CODE = "code"
NAME = "domain"
SEEDS = Path(__file__).parent / "data" / "domains.txt"


class TrainDomainsConfig(fasttext.ClassifierConfig):
    dimension: int = fasttext.DIMENSION(16)
    learning_rate: float = fasttext.LEARNING_RATE(0.5)
    epochs: int = fasttext.EPOCHS(40)
    max_characters: int = fasttext.MAX_CHARACTERS(1500)
    code_sources: tuple[str, ...] = Field(("code",), description="Sources whose documents are code, regardless of their text")
    min_seeds: int = Field(3, ge=1, description="Minimum number of different seed words of one type to label a document")
    max_second: float = Field(0.5, ge=0, lt=1, description="Maximum ratio of seed words, second type to best type, to label a document")
    min_labels: int = Field(20, ge=2, description="Minimum number of labelled documents per type; types with fewer are left out")


class Lexicon(NamedTuple):
    """Seed words of knowledge types: the names `types`, the n `words`, and `type_of` int64[n], the type index of each word."""

    types: list[str]
    words: Listed
    type_of: NDArray[np.int64]


@lru_cache(maxsize=1)
def seed_words() -> tuple[list[str], dict[str, int]]:
    """Return the types, and seed word → index of its type. Words listed for two types, in any languages, are left out."""
    types: list[str] = []
    owner: dict[str, int] = {}
    for line in SEEDS.read_text(encoding="utf-8").splitlines():
        if not line or line.startswith("#"):
            continue
        head, _, words = line.partition(":")
        name = head.split()[0]
        if name not in types:
            types.append(name)
        for word in words.lower().split():
            owner[word] = types.index(name) if owner.get(word, types.index(name)) == types.index(name) else -1
    return types, {word: at for word, at in owner.items() if at >= 0}


@lru_cache(maxsize=1)
def lexicon() -> Lexicon:
    types, owner = seed_words()
    return Lexicon(types, list_words(words_listed(list(owner)).folded), np.array(list(owner.values()), np.int64))


def looked_at(text: str) -> NDArray[np.int64]:
    """Return `seed_counts` of one text. For a few pages, plain Python takes less time than loading the compiled tokenizer."""
    types, owner = seed_words()
    words = set(re.findall(r"[^\W_]+", text.lower()))
    return np.bincount([owner[word] for word in words if word in owner], minlength=len(types))


def seed_counts(texts: pa.Array | pa.ChunkedArray, characters: int) -> NDArray[np.int64]:
    """Return the number of different seed words of each type in the first `characters` of each text, int64[texts, types]."""
    seeds = lexicon()
    return kinds_held(texts, characters, seeds.words, seeds.type_of, len(seeds.types))


def seed_label(counts: NDArray[np.int64], min_seeds: int, max_second: float) -> str | None:
    order = np.argsort(-counts, kind="stable")
    best, second = int(counts[order[0]]), int(counts[order[1]])
    return seed_words()[0][order[0]] if best >= min_seeds and second <= max_second * best else None


def needs(config: TrainDomainsConfig, facts: Facts) -> list[str]:
    """Return a message if sampled pages show that fewer than two types have enough labelled documents, else an empty list."""
    (documents,) = facts.inputs.get("documents") or (InputFacts("documents"),)
    if documents.look is None:
        return []
    for seconds in (GLANCE, LOOK):
        texts, share = documents.look(seconds)
        results: Counter[str | None] = Counter()
        for text in texts:
            results[seed_label(looked_at(text[: config.max_characters]), config.min_seeds, config.max_second)] += 1
            if sum(n >= config.min_labels for name, n in results.items() if name) >= 2:
                return []
        if share == 1:
            break
    if not share:
        return []
    # Complain only if a type is too rare even at four standard deviations above the sample.
    enough = [name for name, n in results.items() if name and (n + (4 * (n**0.5 + 1) if share < 1 else 0)) / share >= config.min_labels]
    if len(enough) >= 2:
        return []
    census = ", ".join(f"{n} of {name}" for name, n in results.most_common() if name) or "none"
    return [
        f"two knowledge types need at least min_labels={config.min_labels} labelled documents each, but of {len(texts)} pages "
        f"the seed words label {census}. Give more pages, lower min_labels, or skip knowledge types with --set domains=null"
    ]


@stage(kind="classifier", needs=needs)
def train_domains(documents: Documents, config: TrainDomainsConfig, run: StageRun) -> None:
    """Train the classifier of knowledge types on documents that seed words label.

    A lexicon of seed words in English, French, Spanish and German labels the documents in which words of one type clearly prevail. One
    fastText classifier per fold is trained on these labels. The metric `agreement` of out-of-fold predictions with the seed labels measures
    consistency, not truth. If all documents come from code sources, the classifier has no classes."""
    examples = prepare(run, documents, config, config.code_sources, _seeds, config)
    labels = Counter({name: count for name, count in examples.of(NAME).items() if count >= config.min_labels})
    types = sorted(labels)
    if examples.documents and len(types) < 2:
        raise PunaError(
            f"train_domains: the seed words label {labels.total()} documents of {', '.join(types) or 'no type'}, but two types need at "
            f"least train_domains.min_labels={config.min_labels} each. Give more pages, lower min_labels, use an existing classifier, "
            "or skip knowledge types with --set domains=null"
        )
    if examples.documents:
        scores = out_of_fold(run, examples, NAME, types, config, run.folder)
        counts, right = scores.confusion.sum(axis=1).tolist(), scores.confusion.diagonal().tolist()
        run.metric("labelled", sum(counts))
        run.metric("agreement", sum(right) / sum(counts))
        for name, count, right_ones in zip(scores.labels, counts, right, strict=True):
            run.metric(f"labelled_{name}", count)
            run.metric(f"recall_{name}", right_ones / count)
    rule = {"min_seeds": config.min_seeds, "max_second": config.max_second}
    About("domains", tuple(types), config.folds, config.seed, config.max_characters, config.code_sources, settings=rule).write(run.folder)


@stage(kind="signals", signals=("domain", "domain_score", "domain_seed"))
def domains(documents: Documents, classifier: Classifier, config: StageConfig, run: StageRun) -> None:
    """Label each document with a knowledge type, using a classifier from `train_domains`.

    A type's weight is its probability, from a model that was not trained on the document, times (1 + its number of seed words)². `domain`
    is the type with the largest weight, `domain_score` its share of all weights, and `domain_seed` the label from seed words. Documents in
    other languages are classified by words that they share with the lexicon's four languages. Documents of code sources are `code`."""
    counts: Counter[str] = Counter()
    for results in run.transform(_type, documents, classifier, columns=["id", "source", "text"]):
        counts.update(results)
    _report(run, counts)


def _seeds(documents: pa.Table, config: TrainDomainsConfig) -> Labels:
    counts = seed_counts(documents["text"], config.max_characters)
    return {NAME: [seed_label(counter, config.min_seeds, config.max_second) for counter in counts]}


def _type(table: pa.Table, classifier: Artifact) -> tuple[pa.Table, dict[str, int]]:
    model: Trained = load_classifier(classifier, "domains")
    rule = model.about.settings or {}
    ids = table["id"].to_pylist()
    names: list[str] = [CODE] * len(ids)
    values = [1.0] * len(ids)
    seeds: list[str | None] = [None] * len(ids)
    rows = model.rows_to_score(table)
    if rows and model.classes:
        texts = table["text"].take(rows)
        counts = seed_counts(texts, model.about.max_characters)
        indices = [lexicon().types.index(name) for name in model.classes]
        joint = model.probabilities([ids[row] for row in rows], texts) * (1.0 + counts[:, indices]) ** 2
        joint /= joint.sum(axis=1, keepdims=True)
        for row, one, count in zip(rows, joint, counts, strict=True):
            names[row], values[row] = model.classes[int(one.argmax())], float(np.round(one.max(), 6))
            seeds[row] = seed_label(count, int(rule["min_seeds"]), rule["max_second"])
    elif rows:
        raise PunaError(f"domains: {classifier.id} has no types, because it was trained without documents; train it on documents")
    domain, score, seed = pa.array(names, pa.string()), pa.array(values, pa.float64()), pa.array(seeds, pa.string())
    return pa.table({"id": table["id"], "domain": domain, "domain_score": score, "domain_seed": seed}), dict(Counter(names))


def _report(run: StageRun, counts: Counter[str]) -> None:
    run.metric("documents", counts.total())
    for name, count in sorted(counts.items()):
        run.metric(f"documents_{name}", count)
    ranked = sorted(counts.items(), key=lambda pair: (-pair[1], pair[0]))
    run.figure("domains", Figure("Knowledge types", "type", "documents", {"documents": [(n, float(c)) for n, c in ranked]}, kind="bar"))
