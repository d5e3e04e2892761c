"""Quality: a classifier that tells good sources from the rest, after Llama 3 and DCLM."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pydantic import Field

from puna.stages.contract import Documents, Figure, Signals, StageRun, stage
from puna.stages.curate.learned.classifier import ClassifierConfig, auc, calibration, out_of_fold, prepare
from puna.stages.curate.select import signals_of
from puna.storage import PunaError


class QualityConfig(ClassifierConfig):
    """What is good, and fastText's settings."""

    positive_sources: tuple[str, ...] = Field(("wikipedia",), min_length=1, description="Sources of good quality")
    exempt_sources: tuple[str, ...] = Field(("code",), description="Sources whose documents are neither examples nor scored")


@stage(kind="signals")
def quality(documents: Documents, language: Signals | None, config: QualityConfig, run: StageRun) -> None:
    """Score documents with a fastText classifier: positives are the documents of good sources, negatives all others.

    Llama 3 (arXiv 2407.21783, section 3.1.3) and DCLM (2406.11794) train such classifiers; ours is trained in the run, on
    the documents themselves, and every score is out of fold (`puna.stages.curate.learned.classifier`). `quality` is the
    probability of a good source, `quality_rank` the share of scored documents with a lower one, within the document's
    language where the signals of `language` are given. Null for documents of exempt sources. The model trained on all
    documents is `quality.bin`. The score says how much a document reads like the good sources, no more: where they differ
    from the others in subject or language, it learns that too.
    """
    if not documents.rows():
        raise PunaError(f"quality: {documents.id} has no documents to learn from; `dropped` of the stages before says why")
    head = documents.read(columns=["id", "source"]).to_pydict()
    ids = np.array(head["id"], dtype="U") if head["id"] else np.empty(0, "U1")
    sources = np.array(head["source"], dtype="U") if head["id"] else np.empty(0, "U1")
    scored = ~np.isin(sources, config.exempt_sources)
    positive = np.isin(sources, config.positive_sources) & scored
    if not positive.any() or not (scored & ~positive).any():
        raise PunaError(
            f"quality.positive_sources={list(config.positive_sources)}: documents of these sources and of others are needed; "
            f"the documents have the sources {', '.join(sorted(set(sources.tolist()))) or 'none'}"
        )
    names = np.where(positive, "good", "other")
    labels = dict(zip(ids[scored].tolist(), names[scored].tolist(), strict=True))
    found = out_of_fold(run, prepare(run, documents, config), labels, ids[scored].tolist(), config, "quality.bin")
    values = found.probabilities[:, found.labels.index("good")]
    groups = np.zeros(len(values), dtype="U1")
    if language is not None:
        table = signals_of(language, pa.chunked_array([pa.array(ids[scored].tolist(), pa.string())]), ["language"])
        groups = np.array([name or "" for name in table["language"].to_pylist()], dtype="U")
    ranks = ranks_within(values, groups)
    full = {"quality": np.full(len(ids), np.nan), "quality_rank": np.full(len(ids), np.nan)}
    full["quality"][scored], full["quality_rank"][scored] = values, ranks
    run.write(pa.table({"id": pa.array(ids.tolist(), pa.string()), **{k: pa.array(v, from_pandas=True) for k, v in full.items()}}))
    report(run, values, positive[scored])


def ranks_within(values: NDArray[np.float64], groups: NDArray[np.str_]) -> NDArray[np.float64]:
    """Share of its group with a lower value, float64[n] in [0, 1); equal values have equal ranks."""
    ranks = np.zeros(len(values))
    for group in np.unique(groups):
        members = groups == group
        inside = values[members]
        ranks[members] = np.searchsorted(np.sort(inside), inside, side="left") / len(inside)
    return ranks


def report(run: StageRun, values: NDArray[np.float64], positive: NDArray[np.bool_]) -> None:
    """Record area under the ROC curve, calibration and distribution of out-of-fold scores."""
    run.metric("auc", auc(values, positive))
    run.metric("positives", int(positive.sum()))
    run.metric("negatives", int((~positive).sum()))
    points = calibration(values, positive)
    series = {"documents": points, "perfect": [(0.0, 0.0), (1.0, 1.0)]}
    title = "Calibration of the quality classifier, out of fold"
    run.figure("calibration", Figure(title, "predicted probability", "share of good sources", series))
    edges = np.linspace(0, 1, 21)
    histogram = {}
    for name, chosen in (("good sources", positive), ("others", ~positive)):
        counts, _ = np.histogram(values[chosen], edges)
        histogram[name] = [(float(e), float(c / chosen.sum())) for e, c in zip(edges[:-1], counts, strict=True)]
    run.figure("scores", Figure("Quality scores, out of fold", "probability", "share of documents", histogram, kind="bar"))
