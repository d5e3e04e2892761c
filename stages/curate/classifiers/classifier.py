"""Training of fastText classifiers, one per fold, so that no document is scored by a model that was trained on it.

A hash of a document's id determines its fold. A fold's model is trained on the labelled documents of all other folds, in a fixed order, so
training is deterministic (`puna.models.classifiers.fasttext`)."""

from __future__ import annotations

import functools
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from pydantic import Field

from puna.kernels.text.words import join_words
from puna.models.classifiers.fasttext import Model, Settings, fit, write
from puna.stages.contract import Figure, SeededConfig, StageRun
from puna.stages.draws import folds, uniform
from puna.storage import Artifact, Part, PunaError, errors_at

FOLD = "fold-{}.bin"
MAX_REPEATS = 10
GOLDEN = 0.6180339887498949
FINEST = 1_000_000  # number of score steps: scores are rounded to six digits and counted, which bounds memory
BARS = 20
ENDS_WORD = re.compile(r"[\0\t-\r ]")  # characters at which fastText splits a line
Labels = dict[str, list[str | None]]  # classifier → the class of each document, or None

DIMENSION = functools.partial(Field, ge=8, le=1000, description="Dimension of the word vectors")
LEARNING_RATE = functools.partial(Field, gt=0, le=10, description="Initial learning rate, which decays linearly to 0")
EPOCHS = functools.partial(Field, ge=1, le=1000, description="Number of passes over the training documents (epochs)")
MAX_CHARACTERS = functools.partial(Field, ge=1, description="Maximum number of characters read from each document")
"""Fields of the four settings whose defaults differ between classifiers."""


class ClassifierConfig(SeededConfig):
    """Settings of fastText and the folds. Defaults: word bigrams as in DCLM (Li et al. 2024), fewer buckets, otherwise fastText's."""

    folds: int = Field(3, ge=2, le=20, description="Number of folds that documents are split into for out-of-fold scores")
    word_ngrams: int = Field(2, ge=1, le=5, description="Maximum length of word n-grams, in words")
    dimension: int = DIMENSION(100)
    learning_rate: float = LEARNING_RATE(0.1)
    epochs: int = EPOCHS(5)
    min_count: int = Field(1, ge=1, description="Minimum number of occurrences of a word; rarer words are ignored")
    buckets: int = Field(200_000, ge=10_000, description="Hash buckets for word n-grams; fastText's 2,000,000 make models of 0.8 GB")
    max_characters: int = MAX_CHARACTERS(4000)
    max_class_documents: int = Field(100_000, ge=1, description="Maximum number of training documents per class")
    class_ratio: float = Field(3.0, ge=1, description="Maximum ratio of a class to the median class; classes below 1/ratio are repeated")


@dataclass(frozen=True)
class Examples:
    """Files of labelled documents. Columns: `id`, `fold`, `draw` (a random number by which training documents are sorted), `line` (the
    document's words), and for each classifier the document's class, null without a label.

    `documents`: number of documents outside the exempt sources. `counts`: classifier → class → documents per fold, int64[folds]."""

    files: list[str]
    documents: int
    counts: dict[str, dict[str, NDArray[np.int64]]]

    def of(self, name: str) -> Counter[str]:
        """Return class → number of documents with this label, for the classifier `name`."""
        return Counter({label: int(results.sum()) for label, results in self.counts.get(name, {}).items()})


@dataclass(frozen=True)
class Scores:
    """Out-of-fold scores of the labelled documents. `labels`: the classes. `confusion` int64[classes, classes]: documents by class (row)
    and most probable class (column). `counted`: `score_counts` of the score for the class `positive`."""

    labels: list[str]
    confusion: NDArray[np.int64]
    counted: NDArray[np.int64]


@dataclass(frozen=True)
class _Job:
    """A model to train on the documents outside `fold` that have a class in the column `name`; it scores the documents of the fold.
    `quota`: class → (number of training documents, copies of each document). `state`: folder of the training's checkpoints."""

    fold: int
    name: str
    classes: tuple[str, ...]
    quota: dict[str, tuple[int, int]]
    state: str
    model: str
    positive: str


def prepare(
    run: StageRun, documents: Artifact, config: ClassifierConfig, exempt: tuple[str, ...], label: Callable[..., Labels], *args: Any
) -> Examples:
    """Write the labelled documents to files in the scratch folder, for `out_of_fold`. `label(rows, *args)` returns, for each classifier,
    the class or None of every document in `rows` (`id`, `source`, `text`). Documents of the sources `exempt` get no class."""
    parts = run.parts(documents, columns=["id", "source", "text"])
    files, rows = [], 0
    counts: dict[str, dict[str, NDArray[np.int64]]] = {}
    for file, count, results in run.map(_prepare, parts, str(run.scratch), config, exempt, label, *args, rows=len(parts)):
        files.append(file)
        rows += count
        for (name, label_, fold), number in results.items():
            of_class = counts.setdefault(name, {}).setdefault(label_, np.zeros(config.folds, np.int64))
            of_class[fold] += number
    return Examples(files, rows, counts)


def out_of_fold(
    run: StageRun, examples: Examples, name: str, classes: list[str], config: ClassifierConfig, folder: Path, positive: str = ""
) -> Scores:
    """Train a model per fold for `classes`; write it to `folder`. Return out-of-fold scores. Raise PunaError if a fold lacks examples."""
    folder.mkdir(exist_ok=True)
    counts = {label: examples.counts[name][label] for label in classes}
    jobs = []
    for fold in range(config.folds):
        usable = {label: int(results.sum() - results[fold]) for label, results in counts.items()}
        if len(classes) < 2 or not min(usable.values()):
            census = ", ".join(f"{label}: {results.sum()}" for label, results in counts.items()) or "none"
            raise PunaError(f"stage {run.stage}: a classifier needs two classes with labelled documents in every fold; there are "
                f"{census} in {config.folds} folds. Give more documents, fewer folds, or other labels")  # fmt: skip
        state = str(run.scratch / f"{name}-fold-{fold}")
        jobs.append(_Job(fold, name, tuple(classes), _quota(usable, config), state, str(folder / FOLD.format(fold)), positive))
    confusion, counted_ = np.zeros((len(classes), len(classes)), np.int64), np.zeros(2 * (FINEST + 1), np.int64)
    for confused, places, number in run.map(_train, jobs, examples.files, config, rows=len(jobs)):
        confusion += confused
        counted_[places] += number
    return Scores(classes, confusion, counted_.reshape(2, -1))


def score_counts(scores: NDArray[np.float64], positive: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Return the number of positives (row 0) and negatives (row 1) per score, rounded to millionths: int64[2, FINEST + 1]."""
    return np.bincount(_places(scores, positive), minlength=2 * (FINEST + 1)).reshape(2, -1)


def _places(scores: NDArray[np.float64], positive: NDArray[np.bool_]) -> NDArray[np.int64]:
    return np.where(positive, 0, FINEST + 1) + np.rint(scores * FINEST).astype(np.int64)


def auc(counts: NDArray[np.int64]) -> float:
    """Return the area under the ROC curve from `score_counts` (a tie counts as half). Raise ValueError without positives or negatives."""
    positive, negative = counts[:, counts.any(axis=0)]
    if not positive.any() or not negative.any():
        raise ValueError("an ROC curve needs positives and negatives")
    twice = 2 * np.cumsum(negative) - negative  # twice the number of negatives with a lower score, plus those with the same score
    return int((positive * twice).sum()) / (2 * int(positive.sum()) * int(negative.sum()))


def calibration(counts: NDArray[np.int64], bins: int = 10) -> list[tuple[float, float]]:
    """Return a calibration curve from `score_counts`: (mean score, share of positives) for each non-empty bin of scores."""
    places = np.flatnonzero(counts.any(axis=0))
    positive, both = counts[0, places], counts[:, places].sum(axis=0)
    at = np.minimum(places * bins // FINEST, bins - 1)
    rows, good, total = (np.bincount(at, values, bins) for values in (both, positive, both * places))
    return [(total[b] / FINEST / rows[b], good[b] / rows[b]) for b in np.flatnonzero(rows).tolist()]


def report_calibration(run: StageRun, name: str, what: str, counts: NDArray[np.int64]) -> None:
    """Report the out-of-fold calibration of a classifier against its labels, as the figure `name`."""
    series = {"documents": calibration(counts), "perfect": [(0.0, 0.0), (1.0, 1.0)]}
    run.figure(name, Figure(f"Calibration of the classifier of {what}, out of fold", "predicted probability", f"share of {what}", series))


def report_quality(run: StageRun, counts: NDArray[np.int64]) -> None:
    run.metric("auc", auc(counts))
    positives, negatives = counts.sum(axis=1).tolist()
    run.metric("positives", positives)
    run.metric("negatives", negatives)
    report_calibration(run, "calibration", "good documents", counts)
    bar_of = np.minimum(np.arange(FINEST + 1) * BARS // FINEST, BARS - 1)
    shares = {name: np.bincount(bar_of, side, BARS) / side.sum() for name, side in zip(("good documents", "others"), counts, strict=True)}
    histogram = {name: [(bar / BARS, share) for bar, share in enumerate(bars.tolist())] for name, bars in shares.items()}
    run.figure("scores", Figure("Quality scores, out of fold", "probability", "share of documents", histogram, kind="bar"))


def _quota(counts: dict[str, int], config: ClassifierConfig) -> dict[str, tuple[int, int]]:
    """Return class → (number of training documents, copies of each). Large classes are cut and small ones repeated; otherwise a small class
    would never be predicted."""
    # The lower median, so that of two classes the larger one is cut.
    median = sorted(counts.values())[(len(counts) - 1) // 2]
    most = min(config.max_class_documents, int(config.class_ratio * median))
    least = min(most, int(median / config.class_ratio))
    sizes = {name: min(count, most) for name, count in counts.items()}
    return {name: (count, min(MAX_REPEATS, max(1, -(-least // count)))) for name, count in sizes.items()}


def _prepare(
    part: Part, scratch: str, config: ClassifierConfig, exempt: tuple[str, ...], label: Callable[..., Labels], *args: Any
) -> tuple[str, int, Counter[tuple[str, str, int]]]:
    """Write a part's labelled documents. Return the file, the number of non-exempt documents, and counts by (classifier, class, fold)."""
    file = Path(scratch) / f"examples-{part.start}-{part.stop}.arrow"
    table = part.read()
    table = table.filter(pc.invert(pc.is_in(table["source"], pa.array(exempt, pa.string()))))
    if not file.exists():
        labels = {name: pa.array(results, pa.string()) for name, results in label(table, *args).items()}
        having = functools.reduce(pc.or_, (pc.is_valid(column) for column in labels.values()))
        ids, lines = table["id"].filter(having).to_pylist(), join_words(table["text"].filter(having), config.max_characters)
        columns = {name: results.filter(having) for name, results in labels.items()}
        examples = {
            "id": pa.array(ids, pa.string()),
            "fold": folds(ids, config.seed, config.folds),
            "draw": uniform(ids, config.seed, "training"),
        }
        write_table(pa.table(examples | {"line": lines} | columns), file)
    results = read_table(file)
    names = [name for name in results.column_names if name not in ("id", "fold", "draw", "line")]
    counts: Counter[tuple[str, str, int]] = Counter()
    for name in names:
        rows = zip(results[name].to_pylist(), results["fold"].to_pylist(), strict=True)
        counts.update((name, label_, fold) for label_, fold in rows if label_ is not None)
    return str(file), len(table), counts


def _train(job: _Job, files: list[str], config: ClassifierConfig) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Train and write one model. Return its fold's scores: `confusion`, and indices and values of nonzero entries of `Scores.counted`."""
    lines, places = _training_lines(job, files)
    c, labels = config, [label_of(name) for name in job.classes]
    settings = Settings(c.learning_rate, c.epochs, c.word_ngrams, c.dimension, c.min_count, c.buckets, c.seed)
    with errors_at(f"classifier {job.name}, fold {job.fold}", ValueError):
        model = fit(lines, places, labels, settings, Path(job.state))
    write(model, Path(job.model))
    classes, index = list(job.classes), {name: at for at, name in enumerate(job.classes)}
    confusion, scores = np.zeros((len(classes), len(classes)), np.int64), [np.zeros(0, np.int64)]
    for rows in _rows(job, files, ["line"], inside=True):
        values = predict(model, rows["line"], classes)
        own = np.array([index[name] for name in rows[job.name].to_pylist()], np.int64)
        np.add.at(confusion, (own, values.argmax(axis=1)), 1)
        if job.positive:
            scores.append(_places(values[:, index[job.positive]], own == index[job.positive]))
    return confusion, *np.unique(np.concatenate(scores), return_counts=True)


def write_table(table: pa.Table, file: Path) -> None:
    """Write a table atomically and uncompressed, so that `read_table` can memory-map the file."""
    temporary = file.with_name(f".{file.name}.{os.getpid()}")
    with pa.OSFile(str(temporary), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    os.replace(temporary, file)


def read_table(file: str | Path) -> pa.Table:
    """Return the memory-mapped table of a file that `write_table` wrote."""
    with pa.memory_map(str(file)) as source:
        return pa.ipc.open_file(source).read_all()


def _rows(job: _Job, files: list[str], columns: list[str], *, inside: bool, chosen: pa.Array | None = None) -> Iterator[pa.Table]:
    """Yield the labelled documents, file by file, of the job's fold (`inside`) or of the other folds. `chosen`: yield these ids only."""
    for file in files:
        table = read_table(file).select(["fold", job.name, *columns])
        here = pc.equal(table["fold"], job.fold)
        mask = pc.and_(here if inside else pc.invert(here), pc.is_in(table[job.name], pa.array(job.classes)))
        yield table.filter(mask if chosen is None else pc.and_(mask, pc.is_in(table["id"], chosen)))


def _training_lines(job: _Job, files: list[str]) -> tuple[pa.ChunkedArray, NDArray[np.int32]]:
    """Return a model's training lines and the class index of each line. The random order depends only on the ids and the seed."""
    by_draw = [("draw", "ascending"), ("id", "ascending")]
    candidates: dict[str, list[pa.Table]] = {name: [] for name in job.classes}
    for rows in _rows(job, files, ["id", "draw"], inside=False):
        for name, tables in candidates.items():
            tables.append(rows.filter(pc.equal(rows[job.name], name)).select(["draw", "id", job.name]))
            if sum(map(len, tables)) > 2 * job.quota[name][0]:
                tables[:] = [pa.concat_tables(tables).sort_by(by_draw).slice(0, job.quota[name][0])]
    order = []
    for name, tables in candidates.items():
        count, copies = job.quota[name]
        own = pa.concat_tables(tables).sort_by(by_draw).slice(0, count)
        order += [own.set_column(0, "draw", pa.array((own["draw"].to_numpy() + copy * GOLDEN) % 1.0)) for copy in range(copies)]
    chosen = pa.concat_tables(order).sort_by([*by_draw, (job.name, "ascending")])
    lines = pa.concat_tables(_rows(job, files, ["id", "line"], inside=False, chosen=chosen["id"].combine_chunks()))
    at = pc.index_in(chosen["id"], lines["id"])
    places = pc.index_in(chosen[job.name], pa.array(job.classes))
    return lines["line"].cast(pa.large_string()).take(at), places.to_numpy()


def label_of(name: str) -> str:
    """Return a class name as a fastText label. White space is escaped, since it would end the label."""
    return ENDS_WORD.sub(lambda match: f"%{ord(match[0]):02X}", name)


def predict(model: Any, lines: pa.Array | pa.ChunkedArray, classes: list[str]) -> NDArray[np.float64]:
    """Return the probability of each class for each line, float64[lines, classes]. `model`: a `Model` or fastText's own."""
    if isinstance(model, Model):
        rows = model.probabilities(lines)[:, [model.labels.index(label_of(name)) for name in classes]].astype(np.float64)
    else:
        # fastText 0.9.3 cannot predict a single string under numpy 2, so it gets a list.
        index, rows = {f"__label__{label_of(name)}": at for at, name in enumerate(classes)}, np.zeros((len(lines), len(classes)))
        for row, names, values in zip(rows, *model.predict(lines.to_pylist(), k=len(classes)), strict=True):
            row[[index[name] for name in names]] = values
    # fastText reads the softmax from a table with six digits, so the sums are not exactly one.
    result: NDArray[np.float64] = np.round(np.clip(rows / np.maximum(rows.sum(axis=1, keepdims=True), 1e-12), 0, 1), 6)
    return result
