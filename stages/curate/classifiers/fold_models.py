"""A classifier as an artifact: the fastText model of each fold, and the settings for applying the models.

A document is scored by the model of its fold, which was trained without that fold's documents. So no document, old or new, is scored by a
model that was trained on it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pydantic import TypeAdapter

from puna.kernels.text.words import join_words
from puna.models.classifiers.fasttext import read
from puna.stages.curate.classifiers.classifier import FOLD, predict
from puna.stages.draws import folds
from puna.storage import Artifact, PunaError, errors_at

ABOUT = "classifier.json"


@dataclass(frozen=True)
class About:
    """The description of a classifier, a file stored beside its models.

    `purpose`: the stage that applies the models. `classes`: sorted names, empty if there was nothing to learn. `exempt_sources`: not
    scored. `split`: split texts into lower-case words, as in training. `settings`: further settings of the stage `purpose`. `max_tokens`:
    number of tokens per document that an encoder reads. `encoder`: the encoder's digest."""

    purpose: str
    classes: tuple[str, ...] = ()
    folds: int = 1
    seed: int = 0
    max_characters: int = 0
    exempt_sources: tuple[str, ...] = ()
    split: bool = True
    settings: dict[str, float] | None = None
    max_tokens: int = 0
    encoder: str = ""

    def write(self, folder: Path) -> None:
        (folder / ABOUT).write_text(json.dumps(asdict(self), indent=1, sort_keys=True) + "\n", encoding="utf-8")


class Trained:
    """A classifier loaded from its folder."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.about = folder, read_about(folder)

    @property
    def classes(self) -> list[str]:
        return list(self.about.classes)

    def rows_to_score(self, documents: pa.Table) -> list[int]:
        """Return the indices of the documents to score: all except documents of exempt sources."""
        return [row for row, source in enumerate(documents["source"].to_pylist()) if source not in self.about.exempt_sources]

    def probabilities(self, ids: list[str], texts: pa.Array | pa.ChunkedArray) -> NDArray[np.float64]:
        """Return the probability of each class for each document, float64[n, classes]."""
        return self.of_lines(ids, self.lines(texts))

    def lines(self, texts: pa.Array | pa.ChunkedArray) -> pa.Array:
        """Return each text as one line of words, the models' input format."""
        most = self.about.max_characters
        if self.about.split:
            return join_words(texts, most)
        return pa.array([" ".join(text[:most].split()) for text in texts.to_pylist()], pa.string())

    def of_lines(self, ids: list[str], lines: pa.Array) -> NDArray[np.float64]:
        """Return the class probabilities of the documents' `lines`, float64[n, classes]. Several classifiers can share the lines."""
        result = np.zeros((len(ids), len(self.classes)))
        of_fold = folds(ids, self.about.seed, self.about.folds)
        for fold in np.unique(of_fold).tolist():
            rows = np.flatnonzero(of_fold == fold)
            model = _model(str(self.folder / FOLD.format(fold)), self.about.split)
            result[rows] = predict(model, lines.take(pa.array(rows)), self.classes)
        return result


def read_about(folder: Path) -> About:
    return TypeAdapter(About).validate_json((folder / ABOUT).read_bytes())


def purpose_of(classifier: Artifact) -> str:
    """Return the name of the stage that applies a classifier, such as `quality` or `classify`."""
    return read_about(classifier.path()).purpose


def load_classifier(classifier: Artifact, purpose: str) -> Trained:
    """Return an artifact's classifier. Raise PunaError if it was made for a stage other than `purpose`; `classify` accepts all."""
    result = _load(classifier.path())
    if result.about.purpose != purpose and purpose != "classify":
        raise PunaError(f"{purpose}: {classifier.id} was made for {result.about.purpose!r}; give one that was made for {purpose!r}")
    return result


@lru_cache(maxsize=4)
def _load(folder: Path) -> Trained:
    return Trained(folder)


@lru_cache(maxsize=20)
def _model(file: str, split: bool) -> Any:
    """Return the model in a file, loaded by Puna if texts are split into words (`split`) and Puna can read the file, else by fastText."""
    if split and (model := read(Path(file))) is not None:
        return model
    import fasttext

    with errors_at(f"{file}: not a fastText model", ValueError):
        return fasttext.load_model(file)
