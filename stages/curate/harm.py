"""`harm`: probabilities that a document is hateful, violent, sexual, or about self-harm, from Puna's own model."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from puna.models.classifiers.harm import CATEGORIES, LANGUAGE, harm_chances, load
from puna.stages.contract import Documents, Signals, StageConfig, StageRun, declare_signal, stage
from puna.stages.contract.signals import align_signals

MEANINGS = {
    "hate": "hate against people for what they are", "violence": "violence, or help with it", "sexual": "sexual acts",
    "self_harm": "self-harm, or help with it",
}  # fmt: skip
SIGNALS = tuple(f"harm_{name}" for name in CATEGORIES)
for _name, _signal in zip(CATEGORIES, SIGNALS, strict=True):
    declare_signal(_signal, float, "probability", f"probability that the worst third of the document is {MEANINGS[_name]}", optional=True)


@stage(kind="signals", signals=SIGNALS)
def harm(documents: Documents, language: Signals, config: StageConfig, run: StageRun) -> None:
    """Score documents by harm, with Puna's own model (`puna.models.classifiers.harm`): one probability per category.

    A document's probability is the mean over the worst third of its passages of 40 to 100 words. Only English is scored: the signals are
    null for other languages, which the metrics `unscored_LANGUAGE` count."""
    counts: Counter[str] = Counter()
    for unscored in run.transform(_harm, documents, language.beside(["id", "language"]), columns=["id", "text"]):
        counts.update(unscored)
    run.metric("scored", documents.rows() - counts.total())
    for name, count in sorted(counts.items()):
        run.metric(f"unscored_{name}", count)


def _harm(documents: pa.Table, language: pa.Table) -> tuple[pa.Table, dict[str, int]]:
    names = pc.fill_null(align_signals(language, documents["id"], "language")["language"], "unknown")
    rows = np.asarray(pc.equal(names, LANGUAGE))
    values = np.full((len(rows), len(SIGNALS)), np.nan)
    values[rows] = np.round(harm_chances(documents["text"].filter(pa.array(rows)), load()), 6)  # last bits differ between processors
    columns = {name: pa.array(values[:, k], from_pandas=True) for k, name in enumerate(SIGNALS)}
    return pa.table({"id": documents["id"], **columns}), dict(Counter(names.filter(pa.array(~rows)).to_pylist()))
