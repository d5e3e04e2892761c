"""Training of fastText classifiers, one model per fold: no document is scored by a model that saw it.

Documents fall into folds by the hash of their id. The model of a fold is trained on the labelled documents of the other
folds. fastText with one thread and its lines in a fixed order gives the same model every time, given the care of
`_zeroed_memory`.
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

from puna.stages.contract import Figure, SeededConfig, StageRun
from puna.stages.draws import folds, uniform
from puna.storage import Artifact, Part, PunaError

FOLD = "fold-{}.bin"
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
    """One model to train: on the lines with a label outside `fold`, to score the fold."""

    fold: int
    labels: str
    model: str


def prepare(run: StageRun, documents: Artifact, config: ClassifierConfig) -> list[str]:
    """Write every document as one line of words (`id`, `line`) below the scratch folder; returns the files."""
    parts = run.parts(documents, columns=["id", "text"])
    return list(run.map(_prepare, parts, str(run.scratch), config.max_characters))


def out_of_fold(run: StageRun, files: list[str], labels: dict[str, str], config: ClassifierConfig, folder: Path) -> Scores:
    """Train on the documents that `labels` names, keep the model of each fold in `folder`, and score these documents.

    `labels`: id → class, of at least two classes in every set of folds.
    """
    folder.mkdir(exist_ok=True)
    classes = sorted(set(labels.values()))
    ids = sorted(labels)
    names = np.array([labels[i] for i in ids], dtype="U")
    of_fold = folds(ids, config.seed, config.folds)
    jobs = []
    for fold in range(config.folds):
        chosen = _balanced(ids, names, of_fold != fold, config)
        if set(names[chosen].tolist()) != set(classes) or len(classes) < 2:
            raise PunaError(
                f"stage {run.stage}: a classifier needs two classes with labelled documents in every fold; it has "
                f"{_census(names)} over {config.folds} folds. Give more documents, fewer folds, or other labels"
            )
        file = run.scratch / f"{folder.name}-{fold}.parquet"
        pq.write_table(pa.table({"id": [ids[i] for i in chosen], "label": names[chosen].tolist()}), file)
        jobs.append(_Job(fold, str(file), str(folder / FOLD.format(fold))))
    all_folds = dict(zip(ids, of_fold.tolist(), strict=True))
    rows: dict[str, NDArray[np.float64]] = {}
    for result in run.map(_train, jobs, files, all_folds, classes, config, rows=len(jobs)):
        for identity, values in zip(*result, strict=True):
            rows[identity] = values
    missing = [identity for identity in ids if identity not in rows]
    if missing:
        raise PunaError(f"stage {run.stage}: document {missing[0]} has a label and no text")
    return Scores(ids, classes, np.array([rows[identity] for identity in ids]))


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


def report_calibration(run: StageRun, name: str, what: str, scores: NDArray[np.float64], positive: NDArray[np.bool_]) -> None:
    """Calibration of a classifier on its labels, out of fold, as the figure `name`."""
    series = {"documents": calibration(scores, positive), "perfect": [(0.0, 0.0), (1.0, 1.0)]}
    run.figure(name, Figure(f"Calibration of the classifier of {what}, out of fold", "predicted probability", f"share of {what}", series))


def report_quality(run: StageRun, scores: NDArray[np.float64], positive: NDArray[np.bool_]) -> None:
    """How well a classifier tells good documents from others, out of fold: area under the ROC curve, calibration, histogram."""
    run.metric("auc", auc(scores, positive))
    run.metric("positives", int(positive.sum()))
    run.metric("negatives", int((~positive).sum()))
    report_calibration(run, "calibration", "good documents", scores, positive)
    edges = np.linspace(0, 1, 21)
    histogram = {}
    for name, chosen in (("good documents", positive), ("others", ~positive)):
        counts, _ = np.histogram(scores[chosen], edges)
        histogram[name] = [(float(e), float(c / chosen.sum())) for e, c in zip(edges[:-1], counts, strict=True)]
    run.figure("scores", Figure("Quality scores, out of fold", "probability", "share of documents", histogram, kind="bar"))


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
    """Train one model, keep it; score the labelled documents of its fold."""
    labels = pq.read_table(job.labels).to_pydict()
    wanted = dict(zip(labels["id"], labels["label"], strict=True))
    lines = {identity: line for identity, line in _lines(files) if identity in wanted}
    text = Path(job.labels).with_suffix(".txt")
    with text.open("w", encoding="utf-8") as out:
        for identity in labels["id"]:
            out.write(f"__label__{wanted[identity]} {lines[identity]}\n")
    model = _fit(text, config)
    text.unlink()
    model.save_model(job.model)
    ids: list[str] = []
    rows: list[NDArray[np.float64]] = []
    batch: list[tuple[str, str]] = []
    for identity, line in _lines(files):
        if of_fold.get(identity) == job.fold:
            batch.append((identity, line))
        if len(batch) == BATCH:
            rows += predict(model, [line for _, line in batch], classes)
            ids += [identity for identity, _ in batch]
            batch = []
    if batch:
        rows += predict(model, [line for _, line in batch], classes)
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


def predict(model: Any, lines: list[str], classes: list[str]) -> list[NDArray[np.float64]]:
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
