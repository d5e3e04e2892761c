"""Quality by an encoder: a classifier on the mean hidden state of a language model, after Llama 3 and FineWeb-Edu."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pydantic import Field

from puna.stages.contract import Documents, External, Model, SeededConfig, Signals, StageRun, stage
from puna.stages.curate.learned.classifier import report_quality
from puna.stages.curate.learned.encoder import embedded
from puna.stages.curate.learned.place import Place, place_of
from puna.stages.curate.quality import ranks_within
from puna.stages.curate.select import signals_of
from puna.stages.draws import folds
from puna.storage import Artifact, Part, PunaError
from puna.storage.work import write_array

DIGITS = 6
STEPS, TOLERANCE = 50, 1e-9


class EncoderQualityConfig(SeededConfig):
    """What is good, and how the classifier learns it."""

    positive_sources: tuple[str, ...] = Field(
        ("wikipedia",), description="Sources of good quality, where no judgements are given: their documents are the positives"
    )
    exempt_sources: tuple[str, ...] = Field(("code",), description="Sources whose documents are neither examples nor scored")
    judgement: str = Field("judgement", min_length=1, description="Signal that holds a judge's grade, where signals `labels` are given")
    min_judgement: float = Field(3.0, description="Minimum grade of a good document")
    max_tokens: int = Field(512, ge=8, le=32_768, description="Tokens of each document that the encoder reads")
    folds: int = Field(3, ge=2, le=20, description="Parts the documents are cut into for out-of-fold scores")
    penalty: float = Field(0.01, gt=0, description="Weight of the squared length of the classifier's weights (ridge)")
    keep: float = Field(0.9, gt=0, lt=1, description="Share of documents that reach the quality in the metric `threshold`, fraction")


class Head(NamedTuple):
    """A logistic classifier: standardisation `mean`, `scale` float64[D], `weights` float64[D] and `bias`."""

    mean: NDArray[np.float64]
    scale: NDArray[np.float64]
    weights: NDArray[np.float64]
    bias: float

    def probabilities(self, vectors: NDArray[np.float32]) -> NDArray[np.float64]:
        """Probability of a good document for each vector [n, D]."""
        logits = (vectors - self.mean) / self.scale @ self.weights + self.bias
        return np.asarray(1 / (1 + np.exp(-np.clip(logits, -60, 60))))


@stage(kind="signals")
def encoder_quality(
    documents: Documents,
    model: Model | None,
    encoder: External | None,
    labels: Signals | None,
    language: Signals | None,
    config: EncoderQualityConfig,
    run: StageRun,
) -> None:
    """Score documents with a logistic classifier on an encoder's frozen, mean-pooled hidden states.

    Llama 3 (arXiv 2407.21783, section 3.1.3) distils a chat model's judgements into a small encoder; FineWeb-Edu (2406.17557,
    section 4) trains only the head. `model` is a model of this pipeline, or `encoder` the folder of any Hugging Face encoder.
    Positives are documents that `labels` grades well, else those of good sources. Signals, folds, ranks and figures are those
    of `quality`, so that `select` applies the same rules; the head trained on all labels is `head.npz`, and the metric
    `threshold` the quality that the share `keep` of the documents reaches.
    """
    place = place_of("encoder_quality", "encoder", model, encoder)
    head = documents.read(columns=["id", "source"]).to_pydict()
    ids, sources = head["id"], np.array(head["source"], dtype=object)
    scored = np.flatnonzero(~np.isin(sources, config.exempt_sources))
    chosen = [ids[row] for row in scored]
    known, positive = _labels(chosen, sources[scored], labels, config)
    parts = run.parts(documents, columns=["id", "source", "text"])
    files = list(run.map(_embed, parts, place, config, str(run.scratch), rows=len(parts)))
    vectors = np.concatenate([np.load(file, mmap_mode="r") for file in files]) if files else np.zeros((0, 1), np.float32)
    values = _out_of_fold(vectors, chosen, known, positive, config)
    final = fit(vectors[known], positive[known], config.penalty)
    np.savez(run.folder / "head.npz", mean=final.mean, scale=final.scale, weights=final.weights, bias=np.float64(final.bias))
    groups = np.zeros(len(values), dtype="U1")
    if language is not None:
        named = signals_of(language, pa.chunked_array([pa.array(chosen, pa.string())]), ["language"])["language"].to_pylist()
        groups = np.array([name or "" for name in named], dtype="U")
    columns = {}
    for name, found in (("quality", values), ("quality_rank", ranks_within(values, groups))):
        full = np.full(len(ids), np.nan)
        full[scored] = found
        columns[name] = pa.array(full, from_pandas=True)
    run.write(pa.table({"id": pa.array(ids, pa.string()), **columns}))
    run.metric("threshold", float(np.quantile(values, 1 - config.keep)))
    run.metric("labelled", len(known))
    report_quality(run, values[known], positive[known])


def _labels(
    ids: list[str], sources: NDArray[np.object_], labels: Artifact | None, config: EncoderQualityConfig
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Rows with a label, int64[n], and whether each scored document is good, bool[documents]."""
    if labels is None:
        positive = np.isin(sources, config.positive_sources)
        known = np.arange(len(ids))
        said = f"encoder_quality.positive_sources={list(config.positive_sources)}"
    else:
        table = labels.read()
        if config.judgement not in table.schema.names:
            there = ", ".join(name for name in table.schema.names if name != "id")
            raise PunaError(f"encoder_quality.judgement: {labels.id} has no signal {config.judgement!r}; it has {there}")
        grades = dict(zip(table["id"].to_pylist(), table[config.judgement].to_pylist(), strict=True))
        found = np.array([np.nan if grades.get(i) is None else float(grades[i]) for i in ids])
        known, positive = np.flatnonzero(~np.isnan(found)), found >= config.min_judgement
        said = f"encoder_quality.min_judgement={config.min_judgement:g} on {labels.id}"
    of_fold = folds(ids, config.seed, config.folds)
    for fold in range(config.folds):
        rest = positive[known][of_fold[known] != fold]
        if not rest.any() or rest.all():
            raise PunaError(f"{said}: good and other documents are needed in every set of folds; there are "
                            f"{int(positive[known].sum())} good ones of {len(known)}")  # fmt: skip
    return known, positive


def _out_of_fold(
    vectors: NDArray[np.float32], ids: list[str], known: NDArray[np.int64], positive: NDArray[np.bool_], config: EncoderQualityConfig
) -> NDArray[np.float64]:
    """Probability of a good document, by a head that saw no document of its fold, float64[documents]."""
    of_fold, values = folds(ids, config.seed, config.folds), np.zeros(len(ids))
    for fold in range(config.folds):
        seen = known[of_fold[known] != fold]
        own = of_fold == fold
        values[own] = fit(vectors[seen], positive[seen], config.penalty).probabilities(vectors[own])
    return np.round(values, DIGITS)


def fit(vectors: NDArray[np.float32], positive: NDArray[np.bool_], penalty: float) -> Head:
    """The head that minimises the mean log-loss plus `penalty` / 2 times the squared weights, by Newton's method.

    vectors float32[n, D], positive bool[n]. The bias is not penalised, so that the mean probability is the share of positives.
    """
    x = vectors.astype(np.float64)
    mean, scale = x.mean(axis=0), np.maximum(x.std(axis=0), 1e-6)
    design = np.column_stack([(x - mean) / scale, np.ones(len(x))])
    ridge = np.append(np.full(x.shape[1], penalty), 0.0)
    weights = np.zeros(design.shape[1])
    target = positive.astype(np.float64)
    for _ in range(STEPS):
        p = 1 / (1 + np.exp(-np.clip(design @ weights, -60, 60)))
        slope = design.T @ (p - target) / len(x) + ridge * weights
        curve = (design.T * (p * (1 - p))) @ design / len(x) + np.diag(ridge + 1e-9)
        step = np.linalg.solve(curve, slope)
        # A step as long as this may overshoot where the curve is flat.
        weights -= step * min(1.0, 5.0 / max(float(np.abs(design @ step).max()), 1e-12))
        if float(np.abs(step).max()) < TOLERANCE:
            break
    return Head(mean, scale, weights[:-1], float(weights[-1]))


def _embed(part: Part, place: Place, config: EncoderQualityConfig, scratch: str) -> str:
    """In a worker: mean hidden states of a part's documents in a file, float32[n, D]."""
    file = Path(scratch) / f"vectors-{part.start}-{part.stop}.npy"
    if file.exists():
        return str(file)
    table = part.read()
    texts = [
        text
        for text, source in zip(table["text"].to_pylist(), table["source"].to_pylist(), strict=True)
        if source not in config.exempt_sources
    ]
    write_array(file, embedded(texts, place, config.max_tokens))
    return str(file)
