"""`train_encoder_quality`, `encoder_quality`: a quality classifier on an encoder's mean hidden states, after Llama 3 and FineWeb-Edu."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pydantic import Field

from puna.models.training.resumable_loop import iterate
from puna.stages.contract import Classifier, Documents, External, Model, SeededConfig, Signals, StageConfig, StageRun, stage
from puna.stages.curate.classifiers.classifier import report_quality, score_counts
from puna.stages.curate.classifiers.encoder import Place, embed, place_of
from puna.stages.curate.classifiers.fold_models import About, load_classifier
from puna.stages.curate.quality import GOOD, OTHER, scores_of, write_scores
from puna.stages.draws import folds
from puna.storage import Artifact, Part, PunaError
from puna.storage.exchange import Partition

DIGITS = 6
STEPS, TOLERANCE = 50, 1e-9
HEADS = "heads.npz"
PURPOSE = "encoder_quality"


class TrainEncoderQualityConfig(SeededConfig):
    positive_sources: tuple[str, ...] = Field(("wikipedia",), description="Sources whose documents are good, if no judgements are given")
    exempt_sources: tuple[str, ...] = Field(("code",), description="Sources whose documents are neither training examples nor scored")
    judgement: str = Field("judgement", min_length=1, description="Signal of `labels` that holds the judge's grade")
    min_judgement: float = Field(3.0, description="Minimum grade of a good document")
    max_tokens: int = Field(512, ge=8, le=32_768, description="Maximum tokens per document that the encoder reads")
    folds: int = Field(3, ge=2, le=20, description="Number of folds that documents are split into for out-of-fold scores")
    penalty: float = Field(0.01, gt=0, description="L2 penalty on the classifier's weights (ridge)")


class Head(NamedTuple):
    """A logistic classifier: standardization `mean` and `scale` float64[D], `weights` float64[D], and `bias`."""

    mean: NDArray[np.float64]
    scale: NDArray[np.float64]
    weights: NDArray[np.float64]
    bias: float

    def probabilities(self, vectors: NDArray[np.float32]) -> NDArray[np.float64]:
        """Return each document's probability of being good, float64[n], from vectors [n, D]."""
        logits = (vectors - self.mean) / self.scale @ self.weights + self.bias
        return np.asarray(1 / (1 + np.exp(-np.clip(logits, -60, 60))))


@stage(kind="classifier")
def train_encoder_quality(
    documents: Documents, model: Model | None, encoder: External | None, labels: Signals | None, config: TrainEncoderQualityConfig,
    run: StageRun,
) -> None:  # fmt: skip
    """Train a logistic classifier of good documents on mean-pooled hidden states of a frozen encoder.

    Llama 3 (arXiv 2407.21783, section 3.1.3) distils a chat model's judgements into a small encoder; FineWeb-Edu (2406.17557, section 4)
    trains only the head. Give `model`, a model of this pipeline, or `encoder`, the folder of a Hugging Face encoder. Positives are
    documents with good grades in `labels` or, without `labels`, documents of good sources. Each fold's head is trained on the other folds'
    documents; `encoder_quality` applies the heads to any documents. Metrics and figures are out of fold."""
    place = place_of("train_encoder_quality", "encoder", model, encoder)
    if labels is not None and config.judgement not in labels.columns():
        there = ", ".join(name for name in labels.columns() if name != "id")
        raise PunaError(f"train_encoder_quality.judgement: {labels.id} has no signal {config.judgement!r}; it has {there}")
    parts = run.parts(documents, columns=["id", "source", "text"])
    examples = run.exchange(_examples, parts, labels, place, config, by="all", partitions=1)
    ((heads, counts),) = run.map(_fit_heads, list(examples.parts), config, labels.id if labels is not None else "", str(run.scratch))
    mean, scale, weights, bias = (np.stack([getattr(head, name) for head in heads]) for name in Head._fields)
    np.savez(run.folder / HEADS, mean=mean, scale=scale, weights=weights, bias=bias)
    About(
        PURPOSE, (GOOD, OTHER), config.folds, config.seed, exempt_sources=config.exempt_sources, max_tokens=config.max_tokens,
        encoder=place.digest,
    ).write(run.folder)  # fmt: skip
    run.metric("labelled", int(counts.sum()))
    report_quality(run, counts)


def _fit_heads(examples: Partition, config: TrainEncoderQualityConfig, labels: str, scratch: str) -> tuple[list[Head], NDArray[np.int64]]:
    """Return each fold's head, and the `score_counts` of the out-of-fold scores. Unfinished fits are saved in `scratch`."""
    results = examples.read()
    positive = results["positive"].to_numpy() if results.num_rows else np.zeros(0, bool)
    of_fold = folds(results["id"].to_pylist(), config.seed, config.folds) if results.num_rows else np.zeros(0, np.int64)
    for fold in range(config.folds):
        rest = positive[of_fold != fold]
        if not rest.any() or rest.all():
            rule = f"min_judgement={config.min_judgement:g} on {labels}" if labels else f"positive_sources={list(config.positive_sources)}"
            raise PunaError(f"train_encoder_quality.{rule}: every training set of folds needs good documents and others, but there are "
            f"{int(positive.sum())} good ones of {len(positive)}")  # fmt: skip
    column = results["vector"].combine_chunks()
    vectors = column.flatten().to_numpy().reshape(len(column), -1)
    heads = []
    for fold in range(config.folds):
        rest = of_fold != fold
        heads.append(fit(vectors[rest], positive[rest], config.penalty, Path(scratch) / f"fold-{fold}"))
    return heads, score_counts(_probabilities(heads, of_fold, vectors), positive)


@stage(kind="signals")
def encoder_quality(
    documents: Documents, classifier: Classifier, model: Model | None, encoder: External | None, language: Signals | None,
    config: StageConfig, run: StageRun,
) -> None:  # fmt: skip
    """Score documents with a classifier from `train_encoder_quality`, using the encoder that it was trained on.

    The signals have the same names as in `quality`, so that `select` applies the same rules. Documents that the classifier was trained on
    are scored by a head that was not trained on them. With `language`, ranks are computed per language."""
    place = place_of(PURPOSE, "encoder", model, encoder)
    if load_classifier(classifier, PURPOSE).about.encoder != place.digest:
        raise PunaError(f"{PURPOSE}: {classifier.id} was trained on another encoder; give that encoder, or train a classifier on this one")
    write_scores(run, documents, language, _score, classifier, place)


def _examples(part: Part, labels: Artifact | None, place: Place, config: TrainEncoderQualityConfig) -> pa.Table:
    table = part.read()
    ids, sources = table["id"].to_pylist(), table["source"].to_pylist()
    good: dict[str, bool] = {i: source in config.positive_sources for i, source in zip(ids, sources, strict=True)}
    if labels is not None:
        grades = labels.between(ids[0], ids[-1], columns=["id", config.judgement])
        pairs = zip(grades["id"].to_pylist(), grades[config.judgement].to_pylist(), strict=True)
        good = {i: grade >= config.min_judgement for i, grade in pairs if grade is not None}
    rows = [row for row, i in enumerate(ids) if i in good and sources[row] not in config.exempt_sources]
    subset = table.take(pa.array(rows, pa.int64()))
    vectors = embed(subset["text"].to_pylist(), place, config.max_tokens)
    columns = {"id": subset["id"], "positive": pa.array([good[ids[row]] for row in rows], pa.bool_())}
    values = pa.FixedSizeListArray.from_arrays(pa.array(vectors.ravel()), vectors.shape[1])
    return pa.table({"all": np.zeros(len(rows), np.int32), **columns, "vector": values})


def _score(part: Part, classifier: Artifact, place: Place) -> pa.Table:
    table, model = part.read(), load_classifier(classifier, PURPOSE)
    about, rows = model.about, model.rows_to_score(table)
    subset = table.take(pa.array(rows, pa.int64()))
    vectors = embed(subset["text"].to_pylist(), place, about.max_tokens)
    of_fold = folds(subset["id"].to_pylist(), about.seed, about.folds) if rows else np.zeros(0, np.int64)
    return scores_of(table["id"], rows, _probabilities(_heads(classifier.path(HEADS)), of_fold, vectors))


@lru_cache(maxsize=2)
def _heads(file: Path) -> list[Head]:
    with np.load(file) as results:
        return [Head(*(results[name][fold] for name in Head._fields)) for fold in range(len(results["bias"]))]


def _probabilities(heads: list[Head], of_fold: NDArray[np.int64], vectors: NDArray[np.float32]) -> NDArray[np.float64]:
    """Return each document's probability of being good, float64[n], from the head that was trained without its fold."""
    values = np.zeros(len(vectors))
    for fold, head in enumerate(heads):
        values[of_fold == fold] = head.probabilities(vectors[of_fold == fold])
    return np.round(values, DIGITS)


def fit(vectors: NDArray[np.float32], positive: NDArray[np.bool_], penalty: float, state: Path | None = None) -> Head:
    """Return the head that minimizes the mean log-loss plus `penalty` / 2 x the sum of squared weights, by Newton's method.

    `vectors` float32[n, D], `positive` bool[n]. The bias is not penalized, so the mean probability equals the share of positives. `state`:
    folder in which an unfinished fit is saved, to continue after a crash."""
    x = vectors.astype(np.float64)
    mean, scale = x.mean(axis=0), np.maximum(x.std(axis=0), 1e-6)
    design = np.column_stack([(x - mean) / scale, np.ones(len(x))])
    ridge = np.append(np.full(x.shape[1], penalty), 0.0)
    weights = np.zeros(design.shape[1])
    target = positive.astype(np.float64)

    def newton() -> bool:
        p = 1 / (1 + np.exp(-np.clip(design @ weights, -60, 60)))
        slope = design.T @ (p - target) / len(x) + ridge * weights
        curve = (design.T * (p * (1 - p))) @ design / len(x) + np.diag(ridge + 1e-9)
        step = np.linalg.solve(curve, slope)
        # A full Newton step may overshoot where the loss is flat.
        weights[:] -= step * min(1.0, 5.0 / max(float(np.abs(design @ step).max()), 1e-12))
        return float(np.abs(step).max()) < TOLERANCE

    identity = {"documents": len(x), "penalty": penalty}
    iterate(newton, STEPS, lambda: {"weights": weights}, lambda arrays: np.copyto(weights, arrays["weights"]), state, identity)
    return Head(mean, scale, weights[:-1], float(weights[-1]))
