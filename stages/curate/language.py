"""`language`: identification of the language and script of each document."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pydantic import Field, field_validator

from puna.kernels.text.characters import letters_and_capitals
from puna.kernels.text.code_lines import looks_like_code
from puna.kernels.text.strings import buffers, readonly
from puna.models.languages.prose import WINDOWS, Prose, prose
from puna.models.languages.registry import LanguageRow, Names, as_table, read_rows, row_of, shipped_names, with_rows
from puna.models.languages.scripts import script
from puna.models.languages.vote import NO_LANGUAGE, NO_SCRIPT, TOGETHER, Found, group_numbers, vote, voters, votes
from puna.stages.contract import MACHINE_ERRORS, Classifier, Documents, StageConfig, StageRun, declare_signal, stage
from puna.stages.curate.classifiers.fold_models import load_classifier
from puna.stages.curate.signals.user_signals import Failures
from puna.storage import Artifact

declare_signal("language", str, "ISO 639 code", "most probable language")
declare_signal("language_score", float, "probability", "probability of that language and of languages confused with it")
declare_signal("script", str, "ISO 15924 code", "script of most letters; Qaag: Burmese in the Zawgyi encoding")
NONE = Found(NO_LANGUAGE, 1.0, NO_SCRIPT)
UNDETERMINED = Found("und", 0.0, NO_SCRIPT)
ENOUGH = 40
PROGRAM_ENOUGH = 120
MIN_PROGRAM_LINES = 5


class LanguageConfig(StageConfig):
    max_characters: int = Field(10_000, ge=100, le=10_000_000, description="Maximum characters read, in windows spread over longer texts")
    code_sources: tuple[str, ...] = Field(("code",), description="Sources of program text; its language is zxx (no linguistic content)")
    rows: tuple[LanguageRow, ...] = Field((), description="Custom rows for the table of languages, or the path of a tab-separated file")

    @field_validator("rows", mode="before")
    @classmethod
    def _of_file(cls, given: Any) -> Any:
        return read_rows(given) if isinstance(given, str) else given


@stage(kind="signals", signals=("language", "language_score", "script"))
def language(documents: Documents, classifier: Classifier | None, config: LanguageConfig, run: StageRun) -> None:
    """Identify the language and script (Llama 3, section 3.1.1), with `puna.models.languages.vote` or with `classifier`.

    If a document has enough lines of prose, only these are classified, so that the code in a manual does not decide its language. Program
    text and text without letters get the language zxx with score 1. The score is the language's probability plus those of languages easily
    confused with it. The classes of `classifier` (from `import_classifier` with the purpose `language`) are ISO 639 codes, optionally with
    a script: `en`, `eng`, `eng_Latn`. The table `languages` has stop words for `heuristics` and threshold factors for `select`. If
    identification fails, the language is und (undetermined) with score 0, counted in failed_language."""
    if classifier is not None:
        load_classifier(classifier, "language")
    counts: Counter[tuple[str, str]] = Counter()
    failures = Failures()
    for results, failed in run.transform(_identify, documents, classifier, config, columns=["id", "source", "text"]):
        counts.update({(code, written): number for code, written, number in results})
        failures.add(failed)
    failures.report(run)
    if not documents.rows():
        run.write(_signals(pa.chunked_array([], pa.string()), []))
    table = with_rows(config.rows)
    rows = [(code, written, counts[code, written], row_of(table, code, written)) for code, written in sorted(counts)]
    run.write(as_table(rows), "languages")


def _identify(
    documents: pa.Table, classifier: Artifact | None, config: LanguageConfig
) -> tuple[pa.Table, tuple[list[tuple[str, str, int]], list[tuple[str, str, str]]]]:
    if classifier is not None:
        load_classifier(classifier, "language")
    names = Names.of(config.rows) if config.rows else shipped_names()
    group = group_numbers(voters().languages, names.groups) if config.rows and classifier is None else None
    ids, texts = documents["id"].to_pylist(), documents["text"]
    wanted = ~np.asarray(pc.is_in(documents["source"], pa.array(config.code_sources, pa.string())))
    read = prose(*buffers(texts), wanted, config.max_characters)

    def languages_of(rows: Sequence[int]) -> list[Found]:
        seen = {row: classifier_text(texts[row].as_py, read, row, config.max_characters) for row in rows if wanted[row]}
        classifier_texts = {row: text for row, text in seen.items() if text is not None}
        if classifier is None:
            answers = votes(list(classifier_texts.values()), group)
        else:
            answers = [_classify(classifier, ids[row], text, names) for row, text in classifier_texts.items()]
        by_row = dict(zip(classifier_texts, answers, strict=True))
        return [by_row.get(row, NONE) for row in rows]

    results: list[Found] = []
    failed: list[tuple[str, str, str]] = []
    todo = [range(at, min(at + TOGETHER, len(ids))) for at in range(0, len(ids), TOGETHER)][::-1]
    while todo:
        rows = todo.pop()
        try:
            results += languages_of(rows)
        except MACHINE_ERRORS:
            raise
        except Exception as error:  # noqa: BLE001 - any error fails only its own document
            if len(rows) > 1:
                todo += [range(row, row + 1) for row in reversed(rows)]
                continue
            results.append(UNDETERMINED)
            failed.append(("language", ids[rows[0]], f"{type(error).__name__}: {error}"))
    counts = Counter((one[0], one[2]) for one in results)
    return _signals(documents["id"], results), ([(*name, number) for name, number in counts.items()], failed)


def _signals(ids: pa.ChunkedArray, found: list[Found]) -> pa.Table:
    languages, scores, scripts = ([one[field] for one in found] for field in range(3))
    columns = {"language": pa.array(languages, pa.string()), "language_score": pa.array(scores, pa.float64())}
    return pa.table({"id": ids, **columns, "script": pa.array(scripts, pa.string())})


def _classify(classifier: Artifact, identity: str, seen: str, names: Names) -> Found:
    model = load_classifier(classifier, "language")
    results = model.probabilities([identity], pa.array([seen]))[0]
    codes, groups = [names.canonical(name) for name in model.classes], names.groups
    best = codes[int(results.argmax())]
    together = sum(float(p) for code, p in zip(codes, results, strict=True) if groups.get(code, code) == groups.get(best, best))
    return Found(best, min(together, 1.0), script(seen) or NO_SCRIPT)


def identify(text: str, max_characters: int = 10_000) -> Found:
    """Return language, score and script of `text` as the stage `language` does without a classifier."""
    data = np.frombuffer(text.encode("utf-8", "surrogatepass"), np.uint8)
    results = prose(data, readonly(np.array([0, len(data)])), np.array([True]), max_characters)
    seen = classifier_text(lambda: text, results, 0, max_characters)
    return NONE if seen is None else vote(seen)


def classifier_text(text: Callable[[], str], found: Prose, number: int, max_characters: int) -> str | None:
    """Return the text from which a document's language is identified: its prose, or a sample of the whole text if there is little prose;
    lower-cased if most letters are capitals. Return None for code or a text without letters. `found`: the prose of several documents;
    `number`: this document's index in it. `text` returns the whole text; it is called only if there is little prose."""
    seen, letters, capitals = found.of(number), found.letters[number], found.capitals[number]
    if letters < PROGRAM_ENOUGH:
        sample = _sample(text(), max_characters)
        lines = [line for line in map(str.strip, sample.splitlines()) if line]
        if 2 * sum(map(looks_like_code, lines)) > max(len(lines), MIN_PROGRAM_LINES):
            return None
        if letters < ENOUGH:
            seen = " ".join(sample.split())
            letters, capitals = letters_and_capitals(seen)
    if not letters:
        return None
    # The classifiers saw few texts in capital letters in training.
    return seen.lower() if capitals > 0.5 * letters else seen


def _sample(text: str, limit: int) -> str:
    if len(text) <= limit:
        return text
    size = limit // WINDOWS
    starts = [i * (len(text) - size) // (WINDOWS - 1) for i in range(WINDOWS)]
    return "\n".join(text[start : start + size] for start in starts)
