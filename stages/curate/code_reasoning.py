"""`train_code_reasoning`, `code_reasoning`: classifiers of pages with code and of pages with reasoning (Llama 3, section 3.1.3)."""

from __future__ import annotations

from dataclasses import replace

import pyarrow as pa
from pydantic import Field, model_validator

from puna.kernels.text.technical import Technical, measure
from puna.stages.contract import Classifier, Documents, Signals, StageConfig, StageRun, declare_signal, signals_of, stage
from puna.stages.curate.classifiers import classifier as fasttext
from puna.stages.curate.classifiers.classifier import Examples, Labels, auc, out_of_fold, prepare, report_calibration
from puna.stages.curate.classifiers.fold_models import ABOUT, About, Trained, load_classifier
from puna.storage import Artifact, PunaError

declare_signal("code_line_fraction", float, "fraction of lines", "lines that look like code, in the characters read", optional=True)
declare_signal("formulas", int, "marks", "number of TeX commands and formula characters in the characters read", optional=True)
declare_signal("reasoning_words", int, "distinct words", "deduction and calculation words in the characters read", optional=True)
declare_signal("code_score", float, "probability", "probability that the page contains code, from a model not trained on it", optional=True)
declare_signal("reasoning_score", float, "probability", "probability of reasoning, from a model not trained on it", optional=True)
KINDS = ("code", "reasoning")
OTHER = "other"
JUDGEMENT = "{}_judgement"
DIGITS = 6


class TrainCodeReasoningConfig(fasttext.ClassifierConfig):
    dimension: int = fasttext.DIMENSION(16)
    learning_rate: float = fasttext.LEARNING_RATE(0.5)
    epochs: int = fasttext.EPOCHS(15)
    max_characters: int = fasttext.MAX_CHARACTERS(2000)
    class_ratio: float = Field(10.0, ge=1, description="Maximum ratio of training pages of the larger class to the smaller class")
    exempt_sources: tuple[str, ...] = Field(("code",), description="Sources whose documents are all code; not used for training or scored")
    min_code_lines: int = Field(3, ge=1, description="Minimum number of code lines for the label code")
    min_code_line_fraction: float = Field(0.1, gt=0, le=1, description="Minimum fraction of code lines for the label code")
    max_code_line_fraction: float = Field(0.02, ge=0, lt=1, description="Maximum fraction of code lines for the label no code")
    min_reasoning_words: int = Field(3, ge=1, description="Minimum number of different deduction words for the label reasoning")
    min_formulas: int = Field(3, ge=1, description="Minimum formula marks that, with half of min_reasoning_words, give the label reasoning")
    min_calculations: int = Field(3, ge=1, description="Minimum calculations, such as 12 * 3 = 36, that give the label reasoning")
    max_reasoning_words: int = Field(
        1, ge=0, description="Maximum deduction words, without any formulas or calculations, for the label no reasoning"
    )
    min_judgement: float = Field(3.0, description="Minimum grade of a positive example, if a judge's grades are given")
    min_labels: int = Field(20, ge=2, description="Minimum positives and negatives to train a classifier; else its score is null")

    @model_validator(mode="after")
    def _labels_are_apart(self) -> TrainCodeReasoningConfig:
        for name in ("code_line_fraction", "reasoning_words"):
            least, most = getattr(self, f"min_{name}"), getattr(self, f"max_{name}")
            if least <= most:
                raise ValueError(f"min_{name}={least:g} must be above max_{name}={most:g}: pages between them get no label")
        return self


@stage(kind="classifier")
def train_code_reasoning(documents: Documents, labels: list[Signals] | None, config: TrainCodeReasoningConfig, run: StageRun) -> None:
    """Train two fastText classifiers: of pages with code, and of pages with reasoning.

    As in Llama 3 (arXiv 2407.21783, section 3.1.3), `labels` are a judge's grades (signals `code_judgement` and `reasoning_judgement` from
    `judge`; null: not judged). Without `labels`, pages with clearly many or clearly few code lines, deduction words, formulas and
    calculations get labels; the figures then measure consistency, not truth. A classifier with too few labels is not trained."""
    graded = _graded_labels(labels) if labels else None
    examples = prepare(run, documents, config, config.exempt_sources, _labels, graded, config)
    about = About("code_reasoning", (), config.folds, config.seed, config.max_characters, config.exempt_sources)
    about.write(run.folder)
    for kind in KINDS:
        _train(run, kind, examples, about, config)


@stage(kind="signals", signals=("code_score", "reasoning_score", "code_line_fraction", "formulas", "reasoning_words"))
def code_reasoning(documents: Documents, classifier: Classifier, config: StageConfig, run: StageRun) -> None:
    """Score documents with the two classifiers of `train_code_reasoning`, for code and for reasoning.

    `code_score` and `reasoning_score` are probabilities from models that were not trained on the document; null if there were too few
    labels for training. `code_line_fraction`, `formulas` and `reasoning_words` are measured in the characters read. All signals are null
    for documents of the classifier's exempt sources."""
    load_classifier(classifier, "code_reasoning")
    run.transform(_score, documents, classifier, columns=["id", "source", "text"])


def _score(documents: pa.Table, classifier: Artifact) -> pa.Table:
    about = load_classifier(classifier, "code_reasoning")
    rows = about.rows_to_score(documents)
    subset = documents.take(pa.array(rows, pa.int64()))
    ids, texts = subset["id"].to_pylist(), subset["text"]
    counts = measure(texts, about.about.max_characters)
    columns: dict[str, tuple[pa.DataType, list[float | None]]] = {
        "code_line_fraction": (pa.float64(), [round(text.code_lines / max(text.lines, 1), DIGITS) for text in counts]),
        "formulas": (pa.int64(), [text.formulas for text in counts]),
        "reasoning_words": (pa.int64(), [text.reasoning_words for text in counts]),
    }
    lines = about.lines(texts)
    for kind in KINDS:
        values: list[float | None] = [None] * len(rows)
        if (about.folder / kind / ABOUT).is_file():
            model = Trained(about.folder / kind)
            values = model.of_lines(ids, lines)[:, model.classes.index(kind)].tolist()
        columns[f"{kind}_score"] = (pa.float64(), values)
    at = {row: number for number, row in enumerate(rows)}
    place = pa.array([at.get(row) for row in range(documents.num_rows)], pa.int64())  # null: not scored
    return pa.table({"id": documents["id"]} | {name: pa.array(results, of).take(place) for name, (of, results) in columns.items()})


def _labels(documents: pa.Table, graded: dict[str, Artifact] | None, config: TrainCodeReasoningConfig) -> Labels:
    results: dict[str, list[bool | None]] = {}
    if graded is None:
        counts = measure(documents["text"], config.max_characters)
        results = {kind: [_label(kind, one, config) for one in counts] for kind in KINDS}
    for kind, artifact in (graded or {}).items():
        name = JUDGEMENT.format(kind)
        grades = signals_of(artifact, documents["id"], [name])[name].to_pylist()
        results[kind] = [None if grade is None else grade >= config.min_judgement for grade in grades]
    return {kind: [None if one is None else kind if one else OTHER for one in labels] for kind, labels in results.items()}


def _label(kind: str, found: Technical, config: TrainCodeReasoningConfig) -> bool | None:
    if kind == "code":
        fraction = found.code_lines / max(found.lines, 1)
        if found.code_lines >= config.min_code_lines and fraction >= config.min_code_line_fraction:
            return True
        return False if fraction <= config.max_code_line_fraction else None
    words = found.reasoning_words
    if max(words / config.min_reasoning_words, found.calculations / config.min_calculations) >= 1:
        return True
    if found.formulas >= config.min_formulas and 2 * words >= config.min_reasoning_words:
        return True
    return False if words <= config.max_reasoning_words and not found.formulas and not found.calculations else None


def _graded_labels(labels: list[Artifact]) -> dict[str, Artifact]:
    result = {}
    for kind in KINDS:
        name = JUDGEMENT.format(kind)
        having = [artifact for artifact in labels if name in artifact.columns("signals")]
        if len(having) != 1:
            ids = ", ".join(artifact.id for artifact in labels)
            problem = f"exactly one of {ids} must have the signal {name!r} of a judge's grades, but {len(having)} have it"
            raise PunaError(f"train_code_reasoning.labels: {problem}")
        (result[kind],) = having
    return result


def _train(run: StageRun, kind: str, examples: Examples, about: About, config: TrainCodeReasoningConfig) -> None:
    counts = examples.of(kind)
    run.metric(f"{kind}_positives", counts[kind])
    run.metric(f"{kind}_negatives", counts[OTHER])
    if min(counts[kind], counts[OTHER]) < config.min_labels:
        return
    results = out_of_fold(run, examples, kind, sorted(counts), config, run.folder / kind, kind)
    replace(about, classes=tuple(results.labels)).write(run.folder / kind)
    run.metric(f"{kind}_auc", auc(results.counted))
    report_calibration(run, f"{kind}_calibration", f"{kind} pages", results.counted)
