"""Training of the quality model: `python -m tests.benchmarks.train_grades TEXTS [TEXTS ...] OUT`.

TEXTS are JSON lines with `text`, `grade` (0 to 5) and `site`; OUT is the weights file. `tests/benchmarks/quality.py --write` creates such
lines from the grades that come with Puna (`stages/curate/data/grades.tsv`). Texts are divided into folds by site: the printed figures, and
the calibration from grade to probability, use models that did not see the text's site; the written weights are trained on all texts. Two
models are trained: on the texts, for English, and on the texts without their words (`form_of`), for other languages.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from puna.models.classifiers.grades import BUCKETS, GOOD, MOST, READ, SHARE, SIZE, SIZES, Model, form_of, tokens
from puna.stages.curate.classifiers.classifier import auc, score_counts
from puna.storage import PunaError

FOLDS = 5
SHRINKAGE = 100.0  # L2 penalty of the ridge regression; 50 and 200 work as well
Grades = NDArray[np.float64]


class Text(NamedTuple):
    """A graded document."""

    text: str
    grade: float
    site: str

    @property
    def fold(self) -> int:
        return int.from_bytes(hashlib.sha256(self.site.encode()).digest()[:4], "big") % FOLDS


def read(files: list[Path]) -> list[Text]:
    """Return the graded documents of JSON lines; raise PunaError naming an invalid line."""
    result, named = [], ", ".join(map(str, files))
    for file in files:
        try:
            lines = file.read_text(encoding="utf-8").split("\n")
        except (OSError, UnicodeDecodeError) as error:
            raise PunaError(f"{file}: {error}; JSON lines in UTF-8 are needed") from error
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                result.append(_text(json.loads(line)))
            except (ValueError, KeyError, TypeError) as error:
                raise PunaError(f"{file}: line {number}: {type(error).__name__}: {error}; text, grade and site are needed") from error
    if len({row.fold for row in result}) < FOLDS:
        raise PunaError(f"{named}: {len(result)} graded texts of too few sites for {FOLDS} folds")
    if len({row.grade >= GOOD for row in result}) < 2:
        raise PunaError(f"{named}: grades of less than {GOOD} and of {GOOD} or more are needed")
    return result


def _text(row: dict[str, object]) -> Text:
    text, grade = row["text"], float(str(row["grade"]))
    if not isinstance(text, str):
        raise ValueError(f"text is {text!r}")
    if not 0 <= grade <= 5:
        raise ValueError(f"grade {grade} is none of 0 to 5")
    return Text(text, grade, str(row["site"]))


def rows_of(texts: list[str]) -> NDArray[np.float32]:
    """Return the features of each text, float32[texts, BUCKETS + sizes]."""
    out = np.zeros((len(texts), BUCKETS + len(SIZES)), np.float32)
    counts, met = np.zeros(BUCKETS, np.int32), np.empty(BUCKETS, np.int32)
    for row, text in zip(out, texts, strict=True):
        data = np.frombuffer(text.encode("utf-8", "surrogatepass"), np.uint8)
        words, number = tokens(data, 0, min(len(data), READ), counts, met)
        here = met[:number]
        row[here] = np.sqrt(np.minimum(counts[here] / max(words, 1), MOST)) * SHARE
        row[BUCKETS:] = (words * max(1.0, len(data) / READ) > SIZES) * SIZE
        counts[here] = 0
    return out


def ridge(rows: NDArray[np.float32], grades: Grades) -> tuple[NDArray[np.float32], float]:
    """Return weights and bias of the ridge regression with SHRINKAGE; the bias is not penalized. Solved in the dual, as there are fewer
    rows than buckets."""
    middle, mean = rows.mean(0), float(grades.mean())
    centred = rows - middle
    kernel = (centred @ centred.T).astype(np.float64)
    weights = centred.T @ np.linalg.solve(kernel + SHRINKAGE * np.eye(len(rows)), grades - mean).astype(np.float32)
    return weights, mean - float(middle @ weights)


def unseen_grades(rows: NDArray[np.float32], texts: list[Text]) -> Grades:
    grades, fold = np.array([text.grade for text in texts]), np.array([text.fold for text in texts])
    result = np.zeros(len(texts))
    for one in range(FOLDS):
        weights, bias = ridge(rows[fold != one], grades[fold != one])
        result[fold == one] = rows[fold == one] @ weights + bias
    return result


def calibrated(found: Grades, good: NDArray[np.bool_]) -> tuple[float, float]:
    """Return `slope` and `middle` of the logistic curve from grade to the probability of being good, fitted by Newton's method."""
    at = np.column_stack([found, np.ones(len(found))])
    line = np.zeros(2)
    for _ in range(30):
        chance = 1 / (1 + np.exp(-at @ line))
        line += np.linalg.solve(at.T @ (at * (chance * (1 - chance))[:, None]), at.T @ (good - chance))
    return float(line[0]), float(-line[1] / line[0])


def train(texts: list[Text]) -> tuple[Model, Grades]:
    """Return the model trained on all texts, and the texts' grades from models that did not see their sites."""
    rows, grades = rows_of([text.text for text in texts]), np.array([text.grade for text in texts])
    results = unseen_grades(rows, texts)
    weights, bias = ridge(rows, grades)
    slope, middle = calibrated(results, grades >= GOOD)
    return Model(weights.astype(np.float16).astype(np.float32), bias, slope, middle), results


def main() -> None:
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    from safetensors.numpy import save_file

    texts = read([Path(name) for name in sys.argv[1:-1]])
    forms = form_of(pa.chunked_array([pa.array([text.text for text in texts], pa.large_string())])).to_pylist()
    tensors = {}
    for name, own in (("", texts), ("form_", [text._replace(text=form) for text, form in zip(texts, forms, strict=True)])):
        model, results = train(own)
        print(f"\n{name}weights")
        _report(results, np.array([text.grade for text in own]))
        tensors[f"{name}weights"] = model.weights.astype(np.float16)
        tensors[f"{name}scale"] = np.array([model.bias, model.slope, model.middle], np.float64)
    save_file(tensors, sys.argv[-1])


def _report(results: Grades, grades: Grades) -> None:
    chances = 1 / (1 + np.exp(-results))  # in their order
    for least in (2, 3, 4):
        good = grades >= least
        if good.all() or not good.any():
            continue
        print(f"{len(grades)} texts, grade >= {least}: {good.mean():.2f}, AUC on unseen sites {auc(score_counts(chances, good)):.4f}")
    print(f"correlation {np.corrcoef(results, grades)[0, 1]:.3f}")


if __name__ == "__main__":
    try:
        main()
    except PunaError as error:
        sys.exit(str(error))
