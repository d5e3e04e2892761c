"""`quality`: scores of documents by their quality as training data, from Puna's own model or from a classifier (Llama 3, DCLM)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from pydantic import Field

from puna.models.classifiers import grades
from puna.stages.contract import Classifier, Documents, Facts, Signals, StageConfig, StageRun, declare_signal, signals_of, stage
from puna.stages.curate.classifiers.fold_models import Trained, load_classifier
from puna.storage import Artifact, Part, PunaError
from puna.storage.exchange import Partition

# Optional: a crawl may contain no English, or only sources that a classifier exempts.
declare_signal("quality", float, "probability", "probability that the document is good, from a model not trained on it", optional=True)
declare_signal("quality_rank", float, "fraction of documents", "share of scored documents with lower quality", optional=True)
GOOD, OTHER = "good", "other"
LEAST_RANKED = 10  # minimum scored documents of a language for ranks; of fewer, the worst would always be dropped


class QualityConfig(StageConfig):
    positive: str = Field(GOOD, min_length=1, description="Class of the input `classifier` whose probability is the quality")


LANGUAGES = (
    "without a classifier, the documents' languages are needed: --input language=signals/ID of the stage language; "
    "in a recipe, keep the step language, or leave this step out with --set quality=null --set select_model.quality=null"
)


def needs(config: QualityConfig, facts: Facts) -> list[str]:
    """Return messages if, without a classifier, `language` is missing or `positive` is not the default."""
    return [] if facts.inputs.get("classifier") else _lacking(config, bool(facts.inputs.get("language")))


def _lacking(config: QualityConfig, language: bool) -> list[str]:
    classes = f"positive={config.positive!r}: Puna's own model has no classes; give a classifier, or leave positive out"
    return [*([] if language else [LANGUAGES]), *([] if config.positive == GOOD else [classes])]


@stage(kind="signals", signals=("quality", "quality_rank"), needs=needs)
def quality(documents: Documents, classifier: Classifier | None, language: Signals | None, config: QualityConfig, run: StageRun) -> None:
    """Score documents with Puna's own model, or with a classifier from `train_classifier` or `import_classifier`.

    Puna's models (`puna.models.classifiers.grades`) learned a judge's grades of English documents: `quality` is the probability of a grade
    of 3 (good text) or more. English is judged by words and form, 117 others by form alone; `quality` is null for the rest, which the
    metrics `unscored_LANGUAGE` count. A `classifier`, as in Llama 3 (arXiv 2407.21783, section 3.1.3) and DCLM (2406.11794), usually
    separates good sources from others: `quality` is the probability of the class `positive`; null for exempt sources. A classifier from
    `train_classifier` scores each document with a model not trained on it; it also learns how sources differ in subject and language.
    `quality_rank` is the share of scored documents with lower quality, within the document's language if `language` is given."""
    if classifier is None:
        if language is None or _lacking(config, True):
            raise PunaError(f"quality: {_lacking(config, language is not None)[0]}")
        write_scores(run, documents, language, _grade, language)
    else:
        about = load_classifier(classifier, "quality")
        if config.positive not in about.classes:
            raise PunaError(f"quality.positive={config.positive!r}: {classifier.id} has the classes {', '.join(about.classes[:20])}")
        write_scores(run, documents, language, _score, classifier, config.positive)


def write_scores(run: StageRun, documents: Artifact, language: Artifact | None, score: Callable[..., Any], *args: Any) -> None:
    """Write the signals `quality`, from `score(part, *args)` (see `scores_of`), and `quality_rank`, per language if `language` is given,
    and the metrics `scored` and `unscored_LANGUAGE`. Ranks are null in groups of fewer than LEAST_RANKED documents."""
    parts, cut = run.parts(documents, columns=["id", "source", "text"]), max(1, documents.record().cut)
    if not parts:
        run.write_rows([])
        run.metric("scored", 0)
        return
    scores = run.exchange(score, parts, *args, by="all", partitions=1)
    ranked = run.exchange(_rank, scores.parts, language, by="id", partitions=cut)
    run.produce_shards(_signals, ranked, cut)
    for name, count in ranked.infos[0].items():
        run.metric(name, count)


def _rank(scores: Partition, language: Artifact | None) -> tuple[pa.Table, dict[str, int]]:
    results = scores.read()
    values = np.array(results["quality"].combine_chunks().to_numpy(zero_copy_only=False), np.float64)
    scored, unscored = ~np.isnan(values), {}
    groups = np.zeros(len(values), dtype="U1")
    if language is not None:
        names = signals_of(language, results["id"], ["language"])["language"].to_pylist()
        groups = np.array([name or "unknown" for name in names], dtype="U")
        unscored = {f"unscored_{name}": count for name, count in sorted(Counter(groups[~scored].tolist()).items())}
    ranks = np.full(len(values), np.nan)
    ranks[scored] = ranks_within(values[scored], groups[scored], LEAST_RANKED)
    columns = {"quality": pa.array(values, from_pandas=True), "quality_rank": pa.array(ranks, from_pandas=True)}
    return pa.table({"id": results["id"], **columns}), {"scored": int(scored.sum()), **unscored}


def _signals(rows: pa.Table) -> pa.Table:
    return rows


def _score(part: Part, classifier: Artifact, positive: str) -> pa.Table:
    table = part.read()
    about: Trained = load_classifier(classifier, "quality")
    rows = about.rows_to_score(table)
    documents = table.take(pa.array(rows, pa.int64()))
    results = about.probabilities(documents["id"].to_pylist(), documents["text"])
    return scores_of(table["id"], rows, results[:, about.classes.index(positive)])


def _grade(part: Part, language: Artifact) -> pa.Table:
    table = part.read()
    names, values = signals_of(language, table["id"], ["language"])["language"], np.full(table.num_rows, np.nan)
    for form, judged in ((False, [grades.LANGUAGE]), (True, grades.FORM_LANGUAGES)):
        rows = pc.is_in(names, pa.array(judged))
        values[np.asarray(rows)] = grades.good_chances(table["text"].filter(rows), grades.load(form))
    return scores_of(table["id"], np.arange(table.num_rows), values)


def scores_of(ids: pa.ChunkedArray, rows: Sequence[int] | NDArray[np.uint64], values: NDArray[np.float64]) -> pa.Table:
    """Return the table that `score` must return for `write_scores`: all `ids`, with quality `values` in `rows` and null in other rows."""
    quality = np.full(len(ids), np.nan)
    quality[rows] = values
    return pa.table({"all": np.zeros(len(ids), np.int32), "id": ids, "quality": pa.array(quality, from_pandas=True)})


def ranks_within(values: NDArray[np.float64], groups: NDArray[np.str_], least: int = 1) -> NDArray[np.float64]:
    """Return for each value the share of values in its group that are lower, float64[n] in [0, 1); equal values have equal ranks. NaN in
    groups of fewer than `least` values."""
    ranks = np.full(len(values), np.nan)
    for group in np.unique(groups):
        members = groups == group
        if len(inside := values[members]) >= least:
            ranks[members] = np.searchsorted(np.sort(inside), inside, side="left") / len(inside)
    return ranks
