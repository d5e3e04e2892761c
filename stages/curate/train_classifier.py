"""`train_classifier`, `import_classifier`, `classify`: a classifier that is trained or imported once and applied to any crawl."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Literal

import pyarrow as pa
from pydantic import Field

from puna.stages.contract import Classifier, Documents, External, Facts, Signals, StageConfig, StageRun, declare_signal, signals_of, stage
from puna.stages.curate.classifiers.classifier import FOLD, ClassifierConfig, Labels, out_of_fold, prepare, report_quality
from puna.stages.curate.classifiers.fold_models import About, load_classifier
from puna.stages.curate.quality import GOOD, OTHER
from puna.storage import Artifact, PunaError, errors_at

Purpose = Literal["quality", "language", "classify"]
NAME = "class"
PURPOSE = "Stage that applies the classifier: quality, language, or classify, which writes class and probability"
declare_signal("classifier_label", str, "", "most probable class of the applied classifier", optional=True)
declare_signal("classifier_score", float, "probability", "probability of that class", optional=True)


class TrainClassifierConfig(ClassifierConfig):
    purpose: Purpose = Field("quality", description=PURPOSE)
    positive_sources: tuple[str, ...] = Field(("wikipedia",), description="Sources of the class `good`, if no `labels` are given")
    exempt_sources: tuple[str, ...] = Field(("code",), description="Sources whose documents are neither training examples nor scored")
    label: str = Field("judgement", min_length=1, description="Signal of `labels`: text names the class; a number means `good` or `other`")
    min_label: float = Field(3.0, description="Minimum numeric label of the class `good`")


def needs(config: TrainClassifierConfig, facts: Facts) -> list[str]:
    """Return a message if there are no `labels` and the known sources do not give both classes, else an empty list."""
    names = {source for item in facts.inputs.get("documents", ()) for source in item.sources or ()} - set(config.exempt_sources)
    if facts.inputs.get("labels") or not names or (names & set(config.positive_sources) and names - set(config.positive_sources)):
        return []
    what = "all inputs have these names; others are needed too" if names & set(config.positive_sources) else "no input has such a name"
    return [
        f"positive_sources={list(config.positive_sources)}: {what} (they are {', '.join(sorted(names))}). "
        "Name the good input, --input wikipedia=URI, or set its source with --set 'train_quality.positive_sources=[NAME]', "
        "or give an already trained classifier, --input classifier/ID, "
        "or use Puna's own quality model, --set train_quality=null"
    ]


@stage(kind="classifier", needs=needs)
def train_classifier(documents: Documents, labels: Signals | None, config: TrainClassifierConfig, run: StageRun) -> None:
    """Train a fastText classifier that separates documents of good sources from all others, or that predicts an earlier stage's labels.

    For each fold, one model is trained on the documents of the other folds (see `puna.stages.curate.classifiers.fold_models`). The stage
    named by `purpose` applies the models. Equal inputs give byte-identical models. Metrics and figures are computed out of fold."""
    if labels is not None and config.label not in labels.columns():
        there = ", ".join(name for name in labels.columns() if name != "id")
        raise PunaError(f"train_classifier.label: {labels.id} has no signal {config.label!r}; it has {there}")
    examples = prepare(run, documents, config, config.exempt_sources, _labels, labels, config)
    counts = examples.of(NAME)
    classes = sorted(counts)
    if len(classes) < 2:
        sources = sorted({name for rows in documents.batches(columns=["source"]) for name in rows["source"].unique().to_pylist()})
        raise PunaError(f"train_classifier: {counts.total()} documents have a label, of {', '.join(classes) or 'no class'}, but two "
            f"classes are needed. The documents have the sources {', '.join(sources) or 'none'}")  # fmt: skip
    quality = classes == [GOOD, OTHER]
    results = out_of_fold(run, examples, NAME, classes, config, run.folder, GOOD if quality else "")
    about = About(config.purpose, tuple(results.labels), config.folds, config.seed, config.max_characters, config.exempt_sources)
    about.write(run.folder)
    run.metric("labelled", counts.total())
    run.metric("accuracy", int(results.confusion.trace()) / counts.total())
    if quality:
        report_quality(run, results.counted)


def _labels(documents: pa.Table, labels: Artifact | None, config: TrainClassifierConfig) -> Labels:
    if labels is None:
        return {NAME: [GOOD if source in config.positive_sources else OTHER for source in documents["source"].to_pylist()]}
    values = signals_of(labels, documents["id"], [config.label])[config.label].to_pylist()
    return {NAME: [v if v is None or isinstance(v, str) else GOOD if v >= config.min_label else OTHER for v in values]}


class ImportClassifierConfig(StageConfig):
    purpose: Purpose = Field("quality", description=PURPOSE)
    exempt_sources: tuple[str, ...] = Field(("code",), description="Sources whose documents are not scored")
    max_characters: int = Field(10_000, ge=1, description="Maximum number of characters per document that the model reads")
    split: bool = Field(False, description="Split texts into lower-case words, as for classifiers that Puna trains")


@stage(kind="classifier")
def import_classifier(model: External, config: ImportClassifierConfig, run: StageRun) -> None:
    """Import a local supervised fastText model (.bin, .ftz) as a classifier, which is applied like one from `train_classifier`."""
    file = Path(model.uri.removeprefix("file://"))
    if not file.is_file():
        raise PunaError(f"import_classifier: {model.uri} is not a local file; give a fastText model, .bin or .ftz")
    import fasttext

    with errors_at(f"import_classifier: {file} is not a fastText model", ValueError):
        labels = fasttext.load_model(str(file)).labels
    if not labels or not all(label.startswith("__label__") for label in labels):
        raise PunaError(f"import_classifier: {file} has no classes; give a supervised fastText model")
    shutil.copyfile(file, run.folder / FOLD.format(0))
    classes = tuple(sorted(label.removeprefix("__label__") for label in labels))
    about = About(config.purpose, classes, max_characters=config.max_characters, exempt_sources=config.exempt_sources, split=config.split)
    about.write(run.folder)
    run.metric("classes", len(classes))


@stage(kind="signals", signals=("classifier_label", "classifier_score"))
def classify(documents: Documents, classifier: Classifier, config: StageConfig, run: StageRun) -> None:
    """Write the most probable class of each document and its probability, using a trained or imported classifier.

    Documents that `train_classifier` was trained on are scored by models not trained on them. Both signals are null for exempt sources."""
    run.transform(_classify, documents, classifier, columns=["id", "source", "text"])


def _classify(documents: pa.Table, classifier: Artifact) -> pa.Table:
    about = load_classifier(classifier, "classify")
    ids, rows = documents["id"].to_pylist(), about.rows_to_score(documents)
    names: list[str | None] = [None] * len(ids)
    values: list[float | None] = [None] * len(ids)
    texts = documents["text"].take(pa.array(rows, pa.int64()))
    for row, one in zip(rows, about.probabilities([ids[row] for row in rows], texts), strict=True):
        names[row], values[row] = about.classes[int(one.argmax())], float(one.max())
    columns = {"classifier_label": pa.array(names, pa.string()), "classifier_score": pa.array(values, pa.float64())}
    return pa.table({"id": documents["id"], **columns})
