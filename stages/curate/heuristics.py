"""`heuristics`: signals for the rules of Gopher, C4 and FineWeb, and for repetition, adult words and divergence from the corpus."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from pydantic import Field, field_validator

from puna.stages import plugins
from puna.stages.contract import (
    FAILURE,
    SIGNALS,
    Documents,
    Figure,
    SeededConfig,
    Signal,
    Signals,
    StageRun,
    declare_signal,
    did_you_mean,
    stage,
)
from puna.stages.contract.signals import signals_of
from puna.stages.curate.classifiers.classifier import read_table, write_table
from puna.stages.curate.signals.divergence import BINS, LENGTHS, Corpus, Tally, expected_at
from puna.stages.curate.signals.measure import (
    ANY_LIST,
    NAMES,
    NO_LIST,
    Measurements,
    OwnWords,
    check_against_definitions,
    measure,
    own_words,
)
from puna.stages.curate.signals.user_signals import FAILED, Budget, Failures, failed_in, with_own
from puna.storage import Artifact, Part
from puna.storage.digest import of_value
from puna.storage.work import write_array

CALIBRATED = ("token_kl_excess", "ngram_coverage", "dirty_word_ratio", "words", "top_2gram_character_fraction")
ENGLISH = "en"
QUANTILES = (0.01, 0.1, 0.5, 0.9, 0.99)
CURVE = tuple(point / 50 for point in range(51))
declare_signal(FAILURE, str, "", "why a document was not measured; null if it was", optional=True)
declare_signal("token_kl", float, "nats", "Kullback-Leibler divergence of the document's words from the corpus's", optional=True)
declare_signal("token_kl_excess", float, "nats", "token_kl minus that of random text of the same length", optional=True)
FINAL_PUNCTUATION = (".", "?", "!", '"')


class HeuristicsConfig(SeededConfig):
    """Settings of the measurement. Thresholds are settings of `select`."""

    coverage_n: int = Field(5, ge=2, le=20, description="Length of the n-grams of ngram_coverage, in words")
    line_coverage: float = Field(0.5, ge=0, le=0.5, description="Minimum share of a line's words in repeated n-grams, for line_signals")
    c4_lines: bool = Field(False, description="Write the table c4_lines, with one row per line, for C4's line rules")
    min_language_words: int = Field(50_000, ge=1, description="Minimum words of a language for comparisons; else token_kl is null")
    max_text_bytes: int = Field(8 << 20, ge=1024, description="Maximum size of a measured document, in bytes of UTF-8")
    signals: tuple[str, ...] = Field((), description="Names of your own signals to measure as well")
    signal_seconds: float = Field(30.0, gt=0, le=3600, description="Maximum CPU seconds per document for a signal of your own")
    signal_memory_mb: int = Field(4096, ge=64, le=1 << 20, description="Maximum memory of a signal of your own, in MiB (Linux only)")

    @field_validator("signals")
    @classmethod
    def _are_known(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        plugins.offers("puna.signals")
        own = {name for name, signal in SIGNALS.items() if signal.definition and not signal.compiled}
        for name in names:
            if name not in own:
                raise ValueError(f"{name!r} is not a signal that you defined{did_you_mean(name, sorted(own))}")
        return tuple(dict.fromkeys(names))

    def reaches(self) -> list[tuple[str, str]]:
        results = [SIGNALS[name].definition for name in self.signals]
        return [(one.__module__, one.__qualname__) for one in results if one is not None]


def table_columns(config: HeuristicsConfig) -> dict[str, tuple[str, ...]]:
    results: dict[str, tuple[str, ...]] = {
        "signals": ("id", *NAMES, FAILURE, *config.signals, "token_kl", "token_kl_excess"),
        "line_signals": ("id", "line", "words", "ngram_coverage"),
    }
    return results | ({"c4_lines": ("id", "line", "words", "final_punctuation")} if config.c4_lines else {})


@stage(kind="signals", signals=table_columns)
def heuristics(documents: Documents, language: Signals | None, config: HeuristicsConfig, run: StageRun) -> None:
    """Measure the signals for the rules of Gopher, C4 and FineWeb, and three signals of Llama 3.

    Gopher's (arXiv 2112.11446), C4's (1910.10683) and FineWeb's (2406.17557) are defined as in datatrove 0.10. Llama 3's (2407.21783,
    section 3.1.1) are n-grams seen earlier, per document and per line (`line_signals`); adult vocabulary; and the Kullback-Leibler
    divergence of the document's words from the corpus, or with `language` from the texts in its language. `signals.definitions` defines all
    signals in Python. Your own `signals` are measured in a separate process. If one fails or exceeds its limits on a document, it is null
    there, and `failed_NAME` counts the document; PunaError is raised if it fails on all. `failure` is the reason why a document, or one of
    your signals on it, was not measured; `select` drops such documents as `failed`."""
    own = [SIGNALS[name] for name in config.signals]
    columns = ["id", "text", *{name: None for signal in own for name in signal.columns if name != "text"}]
    parts = run.parts(documents, columns=columns)
    failures, total = Failures(), 0
    tallies: dict[str, Tally] = {}
    for done, part in enumerate(run.map(_measure_part, parts, language, str(run.scratch), config, own), 1):
        failures.add(part["failed"])
        total += part["measured"]
        for name, (bins, counts) in part["counts"].items():
            tallies.setdefault(name, Tally()).add(bins, counts)
        run.progress(done, 2 * len(parts), "words")
    failures.check(total)
    folder = run.scratch / "corpora"
    folder.mkdir(exist_ok=True)
    files = {}
    for number, name in enumerate(sorted(tallies)):
        if tallies[name].words >= config.min_language_words or not name:
            files[name] = folder / f"{number}.npy"
            np.save(files[name], tallies[name].dense())
    draws = [(str(file), run.generator("expected", name)) for name, file in files.items()]
    expected = {name: (str(file), levels) for (name, file), levels in zip(files.items(), run.map(_expected_divergence, draws), strict=True)}
    run.transform(_diverge, documents, str(run.scratch), expected, columns=["id"])
    if not parts:
        empty = {"id": pa.array([], pa.string())}
        run.write(pa.table({**empty, **{name: pa.array([], pa.float64()) for name in CALIBRATED}}))
        for name in ("line_signals", *["c4_lines"] * config.c4_lines):
            run.write_rows([], name)
    failures.report(run)
    quantiles = dict(zip(CALIBRATED, run.map(_quantiles, CALIBRATED, str(run.scratch)), strict=True))
    _report(run, quantiles, {name: tallies[name].words for name in tallies}, expected)


def _expected_divergence(job: tuple[str, np.random.Generator]) -> NDArray[np.float64]:
    file, generator = job
    return Corpus.of(np.load(file)).expected_divergence(generator)


def _report(run: StageRun, quantiles: dict[str, dict[float, float]], words: dict[str, int], expected: dict[str, Any]) -> None:
    series: dict[str, list[tuple[Any, float]]] = {}
    for name, results in quantiles.items():
        for quantile in QUANTILES if results else ():
            run.metric(f"{name}_q{quantile:g}", results[quantile])
        if name in ("token_kl_excess", "ngram_coverage") and results:
            series[name] = [(point, results[point]) for point in CURVE]
    run.metric("corpus_words", sum(words.values()))
    for name in expected:
        if name:
            run.metric(f"corpus_words_{name}", words[name])
    if series:
        note = "There is no published threshold: choose one here"
        run.figure("calibration", Figure("Distribution of signals", "quantile", "value", series, note=note))
    curves = {name or "all": list(zip(np.log2(LENGTHS).tolist(), e.tolist(), strict=True)) for name, (_, e) in sorted(expected.items())}
    run.figure("expected_divergence", Figure("Divergence of random text from the corpus", "log2 words", "nats", curves))


def _measure_part(part: Part, language: Artifact | None, scratch: str, config: HeuristicsConfig, own: list[Signal]) -> dict[str, Any]:
    documents = part.read()
    file = _scratch_file(scratch, documents["id"], "arrow")
    if not file.exists():
        size = pc.binary_length(documents["text"])
        over = pc.greater(size, config.max_text_bytes)
        short = pc.if_else(over, "", documents["text"].cast(pa.large_string()))
        documents = documents.set_column(documents.schema.get_field_index("text"), "text", short)
        ids = documents["id"].to_pylist()
        languages, listed = [""] * len(ids), None
        if language is not None:
            languages = [name or "" for name in signals_of(language, documents["id"], ["language"])["language"].to_pylist()]
            listed = _own_words(language, documents["id"])
        results = measure(documents["text"], config.coverage_n, config.line_coverage, listed)
        # The definition of `stop_words` assumes an unknown language, so only texts measured in this way can be compared with it.
        comparable = np.array(pc.invert(over)) if listed is None else np.array(pc.invert(over)) & (listed.of == ANY_LIST)
        check_against_definitions(results, documents["text"].filter(pa.array(comparable)))
        results.values[np.array(over)] = np.nan
        table = _table(documents["id"], languages, results)
        if config.c4_lines:
            table = _with_c4_lines(table, documents["text"])
        table = with_own(table, documents, own, Budget(config.signal_seconds, config.signal_memory_mb))
        for signal in own:
            value = pc.if_else(over, pa.scalar(None, signal.field.type), table[signal.name])
            table = table.set_column(table.schema.get_field_index(signal.name), signal.name, value)
        table = table.append_column(FAILURE, _why(over, table[FAILED], config))
        write_table(table, file)
    table = read_table(file)
    return {"counts": _language_counts(table), "failed": failed_in(table), "measured": table.num_rows}


def _why(over: pa.ChunkedArray, failed: pa.ChunkedArray, config: HeuristicsConfig) -> pa.ChunkedArray:
    broken = pc.greater(pc.list_value_length(failed), 0)
    reasons = ["; ".join(f"signal {one}".replace("\t", ": ", 1) for one in own) for own in failed.filter(broken).to_pylist()]
    why = pc.replace_with_mask(pa.nulls(len(failed), pa.string()), broken.combine_chunks(), pa.array(reasons, pa.string()))
    return pc.if_else(over, f"heuristics: the text is longer than {config.max_text_bytes} bytes", why)


def _scratch_file(scratch: str, ids: pa.ChunkedArray, end: str) -> Path:
    return Path(scratch) / f"measured-{of_value([ids[0].as_py(), ids[-1].as_py()])[:32]}.{end}"


def _quantiles(name: str, scratch: str) -> dict[float, float]:
    pieces = [np.load(file, mmap_mode="r") for file in sorted(Path(scratch).glob("measured-*.npy"))]
    values = np.concatenate([np.empty(0), *(piece[CALIBRATED.index(name)] for piece in pieces)])
    values = values[~np.isnan(values)]
    points = sorted({*QUANTILES, *CURVE})
    return dict(zip(points, np.quantile(values, points).tolist(), strict=True)) if len(values) else {}


def _own_words(language: Artifact, ids: pa.ChunkedArray) -> OwnWords | None:
    if "languages" not in language.tables:
        return None
    rows = language.read("languages").to_pylist()
    lists = [tuple((row["stop_words"] or "").split()) for row in rows]
    places = {(row["language"], row["script"]): at if words else NO_LIST for at, (row, words) in enumerate(zip(rows, lists, strict=True))}
    # English and texts of unknown language are measured with Gopher's own stop words.
    places |= {(ENGLISH, row["script"]): ANY_LIST for row in rows}
    table = signals_of(language, ids, ["language", "script"])
    return own_words(lists, [places[key] for key in zip(table["language"].to_pylist(), table["script"].to_pylist(), strict=True)])


def _table(ids: pa.ChunkedArray, languages: list[str], found: Measurements) -> pa.Table:
    columns: dict[str, pa.Array] = {"id": ids.combine_chunks()}
    for name in NAMES:
        values = pa.array(np.ascontiguousarray(found.values[name]), from_pandas=True)  # NaN is null
        columns[name] = values.cast(SIGNALS[name].field.type)
    columns["_language"] = pa.array(languages, pa.string())
    lists = {"_bins": found.bin_offsets, "_counts": found.bin_offsets}
    lists |= dict.fromkeys(("_line", "_line_words", "_line_covered"), found.line_offsets)
    for name, offsets in lists.items():
        columns[name] = pa.LargeListArray.from_arrays(offsets, getattr(found, name[1:]))
    return pa.table(columns)


def _with_c4_lines(table: pa.Table, texts: pa.ChunkedArray) -> pa.Table:
    lines = [text.split("\n") for text in texts.to_pylist()]
    ends = [[(end := line.rstrip()).endswith(FINAL_PUNCTUATION) and not end.endswith("...") for line in own] for own in lines]
    words = [[len(line.split()) for line in own] for own in lines]
    table = table.append_column("_c4_ends", pa.array(ends, pa.list_(pa.bool_())))
    return table.append_column("_c4_words", pa.array(words, pa.list_(pa.int32())))


def _language_counts(table: pa.Table) -> dict[str, tuple[NDArray[np.uint32], NDArray[np.int64]]]:
    names = np.array(table["_language"].to_pylist(), dtype="U")
    lengths = _lengths(table["_bins"])
    bins, counts = _flat(table["_bins"]), _flat(table["_counts"])
    languages, number = np.unique(names, return_inverse=True)
    # Most languages have few documents in a part, so sorting their bins is faster than counting over all bins.
    order = np.argsort(np.repeat(number.astype(np.uint16), lengths), kind="stable")
    ends = np.cumsum(np.bincount(number, weights=lengths, minlength=len(languages)).astype(np.int64)).tolist()
    result = {}
    for name, start, stop in zip(languages.tolist(), [0, *ends], ends, strict=False):
        own, times = bins[order[start:stop]], counts[order[start:stop]]
        if stop - start < BINS // 8:
            slots, place = np.unique(own, return_inverse=True)
            result[name] = (slots.astype(np.uint32), np.bincount(place, weights=times, minlength=len(slots)).astype(np.int64))
        else:
            total = np.bincount(own, weights=times, minlength=BINS).astype(np.int64)
            slots = np.flatnonzero(total).astype(np.uint32)
            result[name] = (slots, total[slots])
    return result


def _flat(column: pa.ChunkedArray) -> NDArray[Any]:
    return np.asarray(column.combine_chunks().flatten())


def _lengths(column: pa.ChunkedArray) -> NDArray[np.int64]:
    return np.asarray(column.combine_chunks().value_lengths(), np.int64)


def _of_lines(table: pa.Table, column: str) -> pa.ChunkedArray:
    return table["id"].take(pa.array(np.repeat(np.arange(table.num_rows), _lengths(table[column]))))


def _diverge(documents: pa.Table, scratch: str, expected: dict[str, tuple[str, NDArray[np.float64]]]) -> dict[str, pa.Table]:
    table = read_table(_scratch_file(scratch, documents["id"], "arrow"))
    names = np.array(table["_language"].to_pylist(), dtype="U")
    offsets = np.r_[0, np.cumsum(_lengths(table["_bins"]))]
    bins, counts = _flat(table["_bins"]), _flat(table["_counts"])
    both = np.full((2, table.num_rows), np.nan)
    for name, (path, levels) in expected.items():
        rows = np.flatnonzero(names == name)
        if not len(rows):
            continue
        corpus = Corpus.of(np.load(path, mmap_mode="r"))
        both[0, rows] = corpus.divergences(rows, offsets, bins, counts)
        words = np.add.reduceat(np.r_[counts, 0].astype(np.int64), offsets[:-1]) * (np.diff(offsets) > 0)
        both[1, rows] = both[0, rows] - expected_at(words[rows], levels)
    both[:, table[FAILURE].is_valid().to_numpy()] = np.nan
    # Round to six digits: the last bits of logarithms differ between processors.
    divergences, excesses = (pa.array(np.round(values, 6), pa.float64(), from_pandas=True) for values in both)
    words = _flat(table["_line_words"])
    coverage = _flat(table["_line_covered"]) / np.maximum(words, 1)
    ids, line = _of_lines(table, "_line"), _flat(table["_line"])
    lines = {"line_signals": pa.table({"id": ids, "line": line, "words": words, "ngram_coverage": coverage})}
    if "_c4_words" in table.column_names:
        numbers = np.concatenate([np.zeros(0, np.int32), *map(np.arange, _lengths(table["_c4_words"]))]).astype(np.int32)
        columns = {"words": _flat(table["_c4_words"]), "final_punctuation": table["_c4_ends"].combine_chunks().flatten()}
        lines["c4_lines"] = pa.table({"id": _of_lines(table, "_c4_words"), "line": numbers, **columns})
    signals = table.drop_columns([name for name in table.column_names if name.startswith("_")])
    signals = signals.append_column("token_kl", divergences).append_column("token_kl_excess", excesses)
    calibrated = [signals[name].cast(pa.float64()).to_numpy() for name in CALIBRATED]
    write_array(_scratch_file(scratch, documents["id"], "npy"), np.array(calibrated, np.float64))
    return {"signals": signals, **lines}
