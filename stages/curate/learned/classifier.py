"""fastText classifiers trained in the run, with out-of-fold scores: no document is scored by a model that saw it.

Documents fall into folds by the hash of their id. One model per fold is trained on the labelled documents of the other
folds and scores the fold; one more, trained on all, is what the artifact keeps. fastText with one thread and its lines
in a fixed order gives the same model every time, given the care of `_zeroed_memory`.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from pydantic import Field

from puna.stages.contract import SeededConfig, StageRun
from puna.stages.curate.rows.draws import folds, uniform
from puna.storage import Artifact, Part, PunaError

BATCH = 1024
MAX_REPEATS = 10
GOLDEN = 0.6180339887498949
PERTURB = -6  # M_PERTURB of mallopt(3)


class ClassifierConfig(SeededConfig):
    """fastText's settings; the defaults are DCLM's (Li et al. 2024): pairs of words, otherwise fastText's own."""

    folds: int = Field(3, ge=2, le=20, description="Parts the documents are cut into for out-of-fold scores")
    word_ngrams: int = Field(2, ge=1, le=5, description="Longest word n-gram, words")
    dimension: int = Field(100, ge=8, le=1000, description="Length of a word's vector")
    learning_rate: float = Field(0.1, gt=0, le=10, description="Learning rate at the start, decaying to 0")
    epochs: int = Field(5, ge=1, le=1000, description="Passes over the training documents")
    min_count: int = Field(1, ge=1, description="Rarer words are left out, occurrences")
    buckets: int = Field(
        200_000, ge=10_000, description="Hash buckets for word n-grams; fastText's default of 2,000,000 makes models of 0.8 GB"
    )
    max_characters: int = Field(4000, ge=1, description="Read of each document, characters")
    max_class_documents: int = Field(100_000, ge=1, description="Training documents of one class, at most")
    class_ratio: float = Field(
        3.0, ge=1, description="Classes of more than so many times the median class are cut by hash; of fewer than its inverse, repeated"
    )


@dataclass(frozen=True)
class Scores:
    """Out-of-fold probabilities: `ids` str[n], `labels` the classes, `probabilities` float64[n, classes]."""

    ids: list[str]
    labels: list[str]
    probabilities: NDArray[np.float64]


@dataclass(frozen=True)
class _Job:
    """One model to train: on the lines with a label outside `fold` (None: on all), to score the fold."""

    fold: int | None
    labels: str
    model: str | None


def prepare(run: StageRun, documents: Artifact, config: ClassifierConfig) -> list[str]:
    """Write every document as one line of words (`id`, `line`) below the scratch folder; returns the files."""
    parts = run.parts(documents, columns=["id", "text"])
    return list(run.map(_prepare, parts, str(run.scratch), config.max_characters))


def out_of_fold(run: StageRun, files: list[str], labels: dict[str, str], scored: list[str], config: ClassifierConfig, model: str) -> Scores:
    """Train on the documents that `labels` names and score the documents `scored`; keep the full model as file `model`.

    `labels`: id → class, of at least two classes in every set of folds. `scored`: sorted ids.
    """
    classes = sorted(set(labels.values()))
    ids = sorted(labels)
    names = np.array([labels[i] for i in ids], dtype="U")
    of_fold = folds(ids, config.seed, config.folds)
    jobs = []
    for fold in (*range(config.folds), None):
        usable = np.ones(len(ids), np.bool_) if fold is None else of_fold != fold
        chosen = _balanced(ids, names, usable, config)
        if set(names[chosen].tolist()) != set(classes) or len(classes) < 2:
            raise PunaError(
                f"stage {run.stage}: a classifier needs two classes with labelled documents in every fold; it has "
                f"{_census(names)} over {config.folds} folds. Give more documents, fewer folds, or other labels"
            )
        jobs.append(_write_labels(run.scratch, ids, names, chosen, fold, None if fold is not None else str(run.folder / model), config))
    all_folds = dict(zip(scored, folds(scored, config.seed, config.folds).tolist(), strict=True))
    rows: dict[str, NDArray[np.float64]] = {}
    # The long jobs take turns on the workers; the one without a fold scores nothing.
    for result in run.map(_train, jobs, files, all_folds, classes, config, rows=len(jobs)):
        for identity, values in zip(*result, strict=True):
            rows[identity] = values
    missing = [identity for identity in scored if identity not in rows]
    if missing:
        raise PunaError(f"stage {run.stage}: document {missing[0]} was not scored")
    matrix = np.array([rows[identity] for identity in scored]).reshape(len(scored), len(classes))
    return Scores(scored, classes, matrix)


def auc(scores: NDArray[np.float64], positive: NDArray[np.bool_]) -> float:
    """Area under the ROC curve: the chance that a positive scores above a negative, ties counted half (Mann-Whitney)."""
    positives, negatives = int(positive.sum()), int((~positive).sum())
    if not positives or not negatives:
        raise ValueError("an ROC curve needs positives and negatives")
    order = np.argsort(scores, kind="stable")
    _, where, counts = np.unique(scores[order], return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    ranks = (last - (counts - 1) / 2)[where]
    return float((ranks[positive[order]].sum() - positives * (positives + 1) / 2) / (positives * negatives))


def calibration(scores: NDArray[np.float64], positive: NDArray[np.bool_], bins: int = 10) -> list[tuple[float, float]]:
    """Points of a calibration curve: mean score and share of positives of each non-empty bin of scores."""
    at = np.minimum((scores * bins).astype(np.int64), bins - 1)
    return [(float(scores[at == b].mean()), float(positive[at == b].mean())) for b in range(bins) if (at == b).any()]


def _census(names: NDArray[np.str_]) -> str:
    classes, counts = np.unique(names, return_counts=True)
    return ", ".join(f"{c}: {n}" for c, n in zip(classes.tolist(), counts.tolist(), strict=True)) or "none"


def _balanced(ids: list[str], names: NDArray[np.str_], usable: NDArray[np.bool_], config: ClassifierConfig) -> NDArray[np.int64]:
    """Indices of the training documents in a random order that ids alone decide; classes cut or repeated.

    Without this a type with few documents is never predicted, and the order of the classes' sizes decides instead.
    """
    draw = uniform(ids, config.seed, "training")
    classes, counts = np.unique(names[usable], return_counts=True)
    if not len(classes):
        return np.zeros(0, np.int64)
    # The lower median: of two classes the smaller one.
    median = int(np.sort(counts)[(len(counts) - 1) // 2])
    most = min(config.max_class_documents, int(config.class_ratio * median))
    least = min(most, int(median / config.class_ratio))
    chosen = []
    for name in classes:
        members = np.flatnonzero(usable & (names == name))
        members = members[np.argsort(draw[members], kind="stable")][:most]
        chosen.append(np.tile(members, min(MAX_REPEATS, max(1, -(-least // len(members))))))
    joined = np.concatenate(chosen)
    copy = np.concatenate([np.zeros(0, np.int64), *[np.arange(len(c)) // max(len(np.unique(c)), 1) for c in chosen]])
    # Each copy of a document has its own place in the order.
    places = np.modf(draw[joined] + copy * GOLDEN)[0]
    return joined[np.lexsort((joined, places))]


def _write_labels(
    scratch: Path, ids: list[str], names: NDArray[np.str_], chosen: NDArray[np.int64], fold: int | None, model: str | None, config: Any
) -> _Job:
    file = scratch / f"labels-{'all' if fold is None else fold}.parquet"
    pq.write_table(pa.table({"id": [ids[i] for i in chosen], "label": names[chosen].tolist()}), file)
    return _Job(fold, str(file), model)


def _prepare(part: Part, scratch: str, limit: int) -> str:
    from puna.stages.curate.text.words import split

    file = Path(scratch) / f"lines-{part.start}-{part.stop}.parquet"
    if not file.exists():
        table = part.read()
        lines = [" ".join(split(text[:limit].lower())) for text in table["text"].to_pylist()]
        temporary = file.with_name(f".{file.name}.{os.getpid()}")
        pq.write_table(pa.table({"id": table["id"], "line": pa.array(lines, pa.string())}), temporary, compression="lz4")
        os.replace(temporary, file)
    return str(file)


def _train(
    job: _Job, files: list[str], of_fold: dict[str, int], classes: list[str], config: ClassifierConfig
) -> tuple[list[str], list[NDArray[np.float64]]]:
    """Train one model; score its fold."""
    labels = pq.read_table(job.labels).to_pydict()
    wanted = dict(zip(labels["id"], labels["label"], strict=True))
    lines = {identity: line for identity, line in _lines(files) if identity in wanted}
    text = Path(job.labels).with_suffix(".txt")
    with text.open("w", encoding="utf-8") as out:
        for identity in labels["id"]:
            out.write(f"__label__{wanted[identity]} {lines[identity]}\n")
    model = _fit(text, config)
    text.unlink()
    if job.model is not None:
        model.save_model(job.model)
    if job.fold is None:
        return [], []
    ids: list[str] = []
    rows: list[NDArray[np.float64]] = []
    batch: list[tuple[str, str]] = []
    for identity, line in _lines(files):
        if of_fold.get(identity) == job.fold:
            batch.append((identity, line))
        if len(batch) == BATCH:
            rows += _predict(model, [line for _, line in batch], classes)
            ids += [identity for identity, _ in batch]
            batch = []
    if batch:
        rows += _predict(model, [line for _, line in batch], classes)
        ids += [identity for identity, _ in batch]
    return ids, rows


def _fit(text: Path, config: ClassifierConfig) -> Any:
    """The fastText model of a training file."""
    import fasttext

    if not hasattr(fasttext, "train_supervised"):
        raise PunaError(
            "the installed fasttext cannot train: the package fasttext-predict overwrote it. "
            "Install it again, last: pip install --force-reinstall --no-deps fasttext==0.9.3"
        )
    try:
        with _zeroed_memory():
            # Seeds 0 and 1 are one seed to fastText's generator.
            return fasttext.train_supervised(
                input=str(text), lr=config.learning_rate, dim=config.dimension, epoch=config.epochs, wordNgrams=config.word_ngrams,
                minCount=config.min_count, bucket=config.buckets, loss="softmax", thread=1, seed=config.seed + 1, verbose=0,
            )  # fmt: skip
    except RuntimeError as error:
        raise PunaError(f"fastText gave up: {error} Try a smaller learning_rate than {config.learning_rate}") from error


@contextmanager
def _zeroed_memory() -> Iterator[None]:
    """Have memory come zeroed from the allocator.

    fastText 0.9.3 with one thread initialises only a tenth of its input matrix and takes the rest as it finds it: results
    would differ from run to run, and training fail now and then with "Encountered NaN". glibc fills what it hands out with
    the complement of this byte; other C libraries have no such setting and are left as they are.
    """
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is not None:
        set_option(PERTURB, 0xFF)
    try:
        yield
    finally:
        if set_option is not None:
            set_option(PERTURB, 0)


def _lines(files: list[str]) -> Iterator[tuple[str, str]]:
    for file in files:
        table = pq.read_table(file)
        yield from zip(table["id"].to_pylist(), table["line"].to_pylist(), strict=True)


def _predict(model: Any, lines: list[str], classes: list[str]) -> list[NDArray[np.float64]]:
    """Probability of every class for each line, float64[classes] each."""
    # A list, because fastText 0.9.3 cannot predict a single string under numpy 2.
    labels, probabilities = model.predict(lines, k=len(classes))
    index = {f"__label__{name}": at for at, name in enumerate(classes)}
    rows = []
    for names, values in zip(labels, probabilities, strict=True):
        row = np.zeros(len(classes))
        for name, value in zip(names, values, strict=True):
            row[index[name]] = value
        # fastText's softmax table leaves sums a little off one; six digits are what it has.
        rows.append(np.round(np.clip(row / max(row.sum(), 1e-12), 0, 1), 6))
    return rows
