"""Code and reasoning: which pages teach programming, mathematics and reasoning (Llama 3, section 3.1.3)."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from pydantic import Field, model_validator

from puna.stages.contract import Documents, Figure, Signals, StageRun, stage
from puna.stages.curate.learned.classifier import ClassifierConfig, auc, calibration, out_of_fold, prepare
from puna.stages.curate.select import signals_of
from puna.stages.curate.text.technical import Technical, measured
from puna.storage import Artifact, Part, PunaError

KINDS = ("code", "reasoning")
DIGITS = 6


class CodeReasoningConfig(ClassifierConfig):
    """What labels a page, and fastText's settings."""

    dimension: int = Field(16, ge=8, le=1000, description="Length of a word's vector")
    learning_rate: float = Field(0.5, gt=0, le=10, description="Learning rate at the start, decaying to 0")
    epochs: int = Field(15, ge=1, le=1000, description="Passes over the training documents")
    max_characters: int = Field(2000, ge=1, description="Read of each document, characters")
    class_ratio: float = Field(
        10.0, ge=1, description="Pages of neither kind that are trained on for each page of the kind, at most: most pages are of neither"
    )
    exempt_sources: tuple[str, ...] = Field(
        ("code",), description="Sources whose documents are neither examples nor scored: they are code as a whole, by source alone"
    )
    min_code_lines: int = Field(3, ge=1, description="Least number of lines of code that label a page as code")
    min_code_line_fraction: float = Field(0.1, gt=0, le=1, description="Least fraction of lines of code that labels a page as code")
    max_code_line_fraction: float = Field(
        0.02, ge=0, lt=1, description="Greatest fraction of lines of code of a page that is labelled as having none"
    )
    min_reasoning_words: int = Field(3, ge=1, description="Least number of different words of deduction that label a page as reasoning")
    min_formulas: int = Field(
        3, ge=1, description="Marks of formulas that label a page as reasoning together with half of these words"
    )
    max_reasoning_words: int = Field(
        1, ge=0, description="Most different words of deduction of a page without formulas that is labelled as not reasoning"
    )
    min_judgement: float = Field(3.0, description="Least grade of a positive, where a judge's grades are given")
    min_labels: int = Field(
        20, ge=2, description="A classifier with fewer positives or fewer negatives is not trained and its score is null, documents"
    )

    @model_validator(mode="after")
    def _labels_are_apart(self) -> CodeReasoningConfig:
        for name in ("code_line_fraction", "reasoning_words"):
            least, most = getattr(self, f"min_{name}"), getattr(self, f"max_{name}")
            if least <= most:
                raise ValueError(f"min_{name}={least:g} must be above max_{name}={most:g}: what lies between has no label")
        return self


@stage(kind="signals")
def code_reasoning(documents: Documents, labels: list[Signals] | None, config: CodeReasoningConfig, run: StageRun) -> None:
    """Score documents with two fastText classifiers of their own: pages with code, pages that reason.

    The classifiers of Llama 3 (arXiv 2407.21783, section 3.1.3) learn from pages that a language model has graded for
    code interleaved with prose and for deduction in mathematics and the sciences. `labels` takes such grades (signals
    `code_judgement` and `reasoning_judgement`, which `judge` makes by its `signal`; null: not judged). Without them the
    text labels itself: where lines of code, or words of deduction and formulas, are plainly many or plainly missing; pages
    between are scored but not learned from. Then the figures measure consistency, not truth. `code_score` and
    `reasoning_score` are probabilities out of fold (`puna.stages.curate.learned.classifier`); `code_line_fraction`, `formulas` and
    `reasoning_words` are what was counted in the characters read. The models trained on all labels are `code.bin` and `reasoning.bin`.
    """
    parts = run.parts(documents, columns=["id", "source", "text"])
    counts: dict[str, Technical] = {}
    exempt: list[str] = []
    for found, spared in run.map(_measure, parts, config, rows=len(parts)):
        counts.update(found)
        exempt += spared
    ids = sorted(counts)
    graded = _grades(ids, labels, config) if labels else None
    files = prepare(run, documents, config) if ids else []
    columns: dict[str, list[float | None]] = {
        "code_line_fraction": [round(counts[i].code_lines / max(counts[i].lines, 1), DIGITS) for i in ids],
        "formulas": [counts[i].formulas for i in ids],
        "reasoning_words": [counts[i].reasoning_words for i in ids],
    }
    for kind in KINDS:
        known = graded[kind] if graded is not None else {i: label for i in ids if (label := _label(kind, counts[i], config)) is not None}
        columns[f"{kind}_score"] = _scores(run, kind, known, ids, files, config)
    types = {"formulas": pa.int64(), "reasoning_words": pa.int64()}
    table = {name: pa.array(values + [None] * len(exempt), types.get(name, pa.float64())) for name, values in columns.items()}
    run.write(pa.table({"id": pa.array([*ids, *exempt], pa.string()), **table}))
    run.metric("documents", len(ids))


def _measure(part: Part, config: CodeReasoningConfig) -> tuple[dict[str, Technical], list[str]]:
    """What each document of a part counts, and the documents of exempt sources."""
    counts, exempt = {}, []
    for row in part.read().to_pylist():
        if row["source"] in config.exempt_sources:
            exempt.append(row["id"])
        else:
            counts[row["id"]] = measured(row["text"][: config.max_characters])
    return counts, exempt


def _label(kind: str, found: Technical, config: CodeReasoningConfig) -> bool | None:
    """What the counts say with confidence, or None."""
    if kind == "code":
        fraction = found.code_lines / max(found.lines, 1)
        if found.code_lines >= config.min_code_lines and fraction >= config.min_code_line_fraction:
            return True
        return False if fraction <= config.max_code_line_fraction else None
    words = found.reasoning_words
    if words >= config.min_reasoning_words or (found.formulas >= config.min_formulas and 2 * words >= config.min_reasoning_words):
        return True
    return False if words <= config.max_reasoning_words and not found.formulas else None


def _grades(ids: list[str], labels: list[Artifact], config: CodeReasoningConfig) -> dict[str, dict[str, bool]]:
    """Kind → document → whether its grade is good enough; documents that were not judged are left out."""
    found = {}
    for kind in KINDS:
        name = f"{kind}_judgement"
        having = [artifact for artifact in labels if name in pq.read_schema(artifact.path("signals.parquet")).names]
        if len(having) != 1:
            given = ", ".join(artifact.id for artifact in labels)
            said = f"one of {given} is to have the signal {name!r} of a judge's grades; {len(having)} have it"
            raise PunaError(f"code_reasoning.labels: {said}")
        grades = signals_of(having[0], pa.chunked_array([pa.array(ids, pa.string())]), [name])[name].to_pylist()
        found[kind] = {i: grade >= config.min_judgement for i, grade in zip(ids, grades, strict=True) if grade is not None}
    return found


def _scores(
    run: StageRun, kind: str, known: dict[str, bool], ids: list[str], files: list[str], config: CodeReasoningConfig
) -> list[float | None]:
    """Probability of each document to be of the kind; of none where there are too few labels to learn it."""
    positives = sum(known.values())
    run.metric(f"{kind}_positives", positives)
    run.metric(f"{kind}_negatives", len(known) - positives)
    if min(positives, len(known) - positives) < config.min_labels:
        return [None] * len(ids)
    names = {identity: kind if positive else "other" for identity, positive in known.items()}
    found = out_of_fold(run, files, names, ids, config, f"{kind}.bin")
    values = found.probabilities[:, found.labels.index(kind)]
    at = np.array([identity in known for identity in ids])
    _report(run, kind, values[at], np.array([known[i] for i in ids if i in known]))
    return [float(value) for value in values]


def _report(run: StageRun, kind: str, values: NDArray[np.float64], positive: NDArray[np.bool_]) -> None:
    """Area under the ROC curve and calibration of a classifier on its labels, out of fold."""
    run.metric(f"{kind}_auc", auc(values, positive))
    series = {"documents": calibration(values, positive), "perfect": [(0.0, 0.0), (1.0, 1.0)]}
    title = f"Calibration of the classifier of {kind} pages, out of fold"
    run.figure(f"{kind}_calibration", Figure(title, "predicted probability", "share labelled so", series))
