"""Training of the harm model: `python tests/benchmarks/train_harm.py HARM DATA OUT`.

HARM and DATA are the folders of `tests/benchmarks/harm_sets.py`, whose texts train the model; OUT is the weights file. The figures printed
are those of passages in folds, by text: the training labels' own, partly guessed from words. `evidence.py --part harm` has the test.
"""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]

import numpy as np  # noqa: E402
from harm_sets import Text, training_set  # noqa: E402
from numpy.typing import NDArray  # noqa: E402
from scipy.optimize import minimize  # noqa: E402
from scipy.sparse import csr_matrix  # noqa: E402

from puna.models.classifiers.harm import BUCKETS, CATEGORIES, MOST, SCALE, Model, passage  # noqa: E402
from puna.stages.curate.classifiers.classifier import auc, score_counts  # noqa: E402
from puna.storage import PunaError  # noqa: E402

FOLDS = 5
SHRINKAGE = 1.0  # L2 penalty of the weights
WEIGHTS = {"words": 0.3, "toxicity": 1.0, "wikipedia": 1.0}


def rows_of(texts: list[str]) -> tuple[csr_matrix, NDArray[np.int64]]:
    """Return the features of all passages of the texts, and the number of each passage's text."""
    tokens = np.empty(2 * MOST, np.int32)
    columns, values, ends, owners = [], [], [0], []
    for number, text in enumerate(texts):
        data, at = np.frombuffer(text.encode("utf-8", "surrogatepass"), np.uint8), 0
        while at < len(data):
            at, words = passage(data, at, len(data), tokens)
            if words:
                here = np.concatenate([tokens[:words], tokens[MOST : MOST + words - 1]])
                columns.append(here)
                values.append(np.full(len(here), 1 / np.sqrt(max(words, SCALE))))
                ends.append(ends[-1] + len(here))
                owners.append(number)
    rows = csr_matrix((np.concatenate(values), np.concatenate(columns), np.array(ends)), (len(owners), BUCKETS))
    rows.sum_duplicates()
    return rows, np.array(owners)


def fit(rows: csr_matrix, labels: NDArray[np.float64], weights: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return weights, then bias, of the logistic regression; the bias is not penalized."""

    def loss(at: NDArray[np.float64]) -> tuple[float, NDArray[np.float64]]:
        odds = rows @ at[:-1] + at[-1]
        chances = 1 / (1 + np.exp(-odds))
        errors = weights * (chances - labels)
        value = weights @ (np.logaddexp(0, odds) - labels * odds) + SHRINKAGE / 2 * at[:-1] @ at[:-1]
        return float(value), np.append(rows.T @ errors + SHRINKAGE * at[:-1], errors.sum())

    return np.asarray(minimize(loss, np.zeros(BUCKETS + 1), jac=True, method="L-BFGS-B", options={"maxiter": 200}).x)


def train(texts: list[Text]) -> tuple[Model, dict[str, float]]:
    """Return the model, and for each category the AUC of passages of texts that did not train it."""
    rows, owners = rows_of([text.text for text in texts])
    folds = np.array([hashlib.sha256(text.text.encode()).digest()[0] % FOLDS for text in texts])[owners]
    result, figures = np.zeros((BUCKETS + 1, len(CATEGORIES))), {}
    for k, name in enumerate(CATEGORIES):
        marks = np.array([np.nan if text.labels[k] is None else text.labels[k] for text in texts], np.float64)[owners]
        known = ~np.isnan(marks)
        weights = np.array([WEIGHTS.get(text.dataset, 1.0) for text in texts])[owners]
        weights[marks == 1] *= min(10.0, (weights * (marks == 0)).sum() / (weights * (marks == 1)).sum())
        print(f"{name}: {int((marks == 1).sum())} passages of {int(known.sum())} are harmful", file=sys.stderr)
        result[:, k] = fit(rows[known], marks[known], weights[known])
        train_rows, test_rows = known & (folds != 0), known & (folds == 0)
        own = fit(rows[train_rows], marks[train_rows], weights[train_rows])
        figures[name] = auc(score_counts(1 / (1 + np.exp(-(rows[test_rows] @ own[:-1] + own[-1]))), marks[test_rows] == 1))
    return Model(result[:-1].astype(np.float16).astype(np.float32), result[-1]), figures


def main() -> None:
    if len(sys.argv) != 4:
        sys.exit(__doc__)
    from safetensors.numpy import save_file

    model, figures = train(training_set(Path(sys.argv[1]), Path(sys.argv[2])))
    for name, value in figures.items():
        print(f"{name:10} AUC of unseen passages {value:.4f}")
    save_file({"weights": model.weights.astype(np.float16), "bias": model.bias}, sys.argv[3])


if __name__ == "__main__":
    try:
        main()
    except PunaError as error:
        sys.exit(str(error))
