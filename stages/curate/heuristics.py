"""Heuristic numbers about documents: Gopher, C4, FineWeb, repetition, dirty words, distance from the corpus."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pydantic import Field

from puna.stages.contract import Documents, Figure, SeededConfig, Signals, StageRun, stage
from puna.stages.curate.select import signals_of
from puna.stages.curate.signals.divergence import BINS, LENGTHS, Corpus, expected_at
from puna.stages.curate.signals.measure import Measurements, Splitter, measure, names
from puna.storage import Artifact, Part
from puna.storage.signals import SIGNALS

CALIBRATED = ("token_kl_excess", "ngram_coverage", "dirty_word_ratio", "words", "top_2gram_character_fraction")
QUANTILES = (0.01, 0.1, 0.5, 0.9, 0.99)
LINE_SCHEMA = pa.schema([("id", pa.string()), ("line", pa.int32()), ("words", pa.int32()), ("ngram_coverage", pa.float64())])


class HeuristicsConfig(SeededConfig):
    """What is measured; thresholds are `select`'s."""

    words: Splitter = Field(
        "universal",
        description="How words are split: for any script, or exactly as datatrove 0.10 does in English; "
        "dolma: what dolma 1.2 measures is measured as it does, with words between white space, the rest as for any script",
    )
    coverage_n: int = Field(5, ge=2, le=20, description="Length of the n-grams of ngram_coverage, words")
    line_coverage: float = Field(0.5, ge=0, le=1, description="Lines covered at least so much get a row in line_signals, fraction of words")
    min_language_words: int = Field(
        50_000, ge=1, description="A language with fewer words is not compared with itself: token_kl is null, words"
    )


@stage(kind="signals")
def heuristics(documents: Documents, language: Signals | None, config: HeuristicsConfig, run: StageRun) -> None:
    """Measure documents with every number that Gopher's, C4's and FineWeb's rules ask for, and three of Llama 3's.

    Gopher (arXiv 2112.11446), C4 (1910.10683) and FineWeb (2406.17557) as datatrove 0.10 defines them, with words and
    symbols as `puna.stages.curate.text.words` and `gopher` say; where it is asked for, Gopher and C4 as dolma 1.2 does
    (`puna.stages.curate.signals.dolma`). Llama 3 (2407.21783, section 3.1.1): n-grams seen earlier in the document, per
    document and per line (`line_signals`); adult vocabulary; Kullback-Leibler divergence of the document's words from the
    corpus's. With the signals of `language`, a document is compared with its own language.
    """
    parts = run.parts(documents, columns=["id", "text"])
    files = []
    tallies: dict[str, Tally] = {}
    for done, part in enumerate(run.map(_measure_part, parts, language, str(run.scratch), config), 1):
        files.append(part["file"])
        for name, (bins, counts) in part["counts"].items():
            tallies.setdefault(name, Tally()).add(bins, counts)
        run.progress(done, 2 * len(parts), "words")
    folder = run.scratch / "corpora"
    folder.mkdir(exist_ok=True)
    expected = {}
    for number, name in enumerate(sorted(tallies)):
        counts = tallies[name].dense()
        if counts.sum() >= config.min_language_words or not name:
            np.save(folder / f"{number}.npy", counts)
            expected[name] = (str(folder / f"{number}.npy"), Corpus.of(counts).expected(run.generator("expected", name)))
    calibration: dict[str, list[NDArray[np.float64]]] = {name: [] for name in CALIBRATED}
    for done, (table, lines) in enumerate(run.map(_diverge_part, files, expected), 1):
        run.write(table)
        run.write(lines, "line_signals")
        for name in CALIBRATED:
            calibration[name].append(np.array(table[name].drop_null(), np.float64))
        run.progress(len(parts) + done, 2 * len(parts), "divergence")
    if not parts:
        empty = {"id": pa.array([], pa.string())}
        run.write(pa.table({**empty, **{name: pa.array([], pa.float64()) for name in CALIBRATED}}))
        run.write(LINE_SCHEMA.empty_table(), "line_signals")
    _report(run, calibration, {name: tallies[name].words for name in tallies}, expected)


def _report(run: StageRun, calibration: dict[str, Any], words: dict[str, int], expected: dict[str, Any]) -> None:
    """Record the distribution of the signals whose thresholds have no published value."""
    series: dict[str, list[tuple[Any, float]]] = {}
    for name, pieces in calibration.items():
        values = np.concatenate([*pieces, np.empty(0)])
        for quantile in QUANTILES if len(values) else ():
            run.metric(f"{name}_q{quantile:g}", float(np.quantile(values, quantile)))
        if name in ("token_kl_excess", "ngram_coverage") and len(values):
            series[name] = [(q / 50, float(np.quantile(values, q / 50))) for q in range(51)]
    run.metric("corpus_words", sum(words.values()))
    for name in expected:
        if name:
            run.metric(f"corpus_words_{name}", words[name])
    if series:
        note = "Thresholds have no published value: choose them here"
        run.figure("calibration", Figure("Distribution of signals", "quantile", "value", series, note=note))
    run.figure(
        "expected_divergence",
        Figure(
            "Divergence of random text from the corpus", "log2 words", "nats",
            {name or "all": list(zip(np.log2(LENGTHS).tolist(), e.tolist(), strict=True)) for name, (_, e) in sorted(expected.items())},
        ),
    )  # fmt: skip


class Tally:
    """Word counts of many parts, added up as they come; at most a few million entries wait to be merged."""

    LIMIT = 1 << 22

    def __init__(self) -> None:
        self.pieces: list[tuple[NDArray[np.uint32], NDArray[np.int64]]] = []
        self.waiting = 0
        self.words = 0

    def add(self, bins: NDArray[np.uint32], counts: NDArray[np.int64]) -> None:
        """Count `counts` more words in `bins`."""
        self.pieces.append((bins, counts))
        self.words += int(counts.sum())
        self.waiting += len(bins)
        if self.waiting > self.LIMIT:
            total = self.dense()
            self.pieces = [(np.flatnonzero(total).astype(np.uint32), total[total > 0])]
            self.waiting = 0

    def dense(self) -> NDArray[np.int64]:
        """Counts of all bins, int64[BINS]."""
        total = np.zeros(BINS, np.int64)
        for bins, counts in self.pieces:
            total[bins] += counts
        return total


def _measure_part(part: Part, language: Artifact | None, scratch: str, config: HeuristicsConfig) -> dict[str, Any]:
    """Measure a part into a scratch file; returns the file and the word counts per language."""
    file = Path(scratch) / f"measured-{part.start}-{part.stop}.arrow"
    if not file.exists():
        documents = part.read()
        ids = documents["id"].to_pylist()
        languages = [""] * len(ids)
        if language is not None:
            languages = [name or "" for name in signals_of(language, documents["id"], ["language"])["language"].to_pylist()]
        found = measure(documents["text"], config.words, config.coverage_n, config.line_coverage)
        table = _table(documents["id"], languages, names(config.words), found)
        temporary = file.with_name(f".{file.name}.{os.getpid()}")
        with pa.OSFile(str(temporary), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
            writer.write_table(table)
        os.replace(temporary, file)
    return {"file": str(file), "counts": _language_counts(_read(file))}


def _table(ids: pa.ChunkedArray, languages: list[str], measured: tuple[str, ...], found: Measurements) -> pa.Table:
    """One row per document: id, signals, language, and the lists that later steps need."""
    columns: dict[str, pa.Array] = {"id": ids.combine_chunks()}
    for name, values in zip(measured, found.values.T, strict=True):
        values = pa.array(values, from_pandas=True)  # NaN is null
        columns[name] = values.cast(SIGNALS[name].type)
    columns["_language"] = pa.array(languages, pa.string())
    lists = {"_bins": found.bin_offsets, "_counts": found.bin_offsets}
    lists |= dict.fromkeys(("_line", "_line_words", "_line_covered"), found.line_offsets)
    for name, offsets in lists.items():
        columns[name] = pa.LargeListArray.from_arrays(offsets, getattr(found, name[1:]))
    return pa.table(columns)


def _read(file: str | Path) -> pa.Table:
    with pa.memory_map(str(file)) as source:
        return pa.ipc.open_file(source).read_all()


def _language_counts(table: pa.Table) -> dict[str, tuple[NDArray[np.uint32], NDArray[np.int64]]]:
    """Bins of the words of each language, and how often each occurs."""
    names = np.array(table["_language"].to_pylist(), dtype="U")
    lengths = np.asarray(table["_bins"].combine_chunks().value_lengths())
    bins, counts = _flat(table["_bins"]), _flat(table["_counts"])
    found = {}
    for name in sorted(set(names.tolist())):
        chosen = np.repeat(names == name, lengths)
        total = np.bincount(bins[chosen], weights=counts[chosen], minlength=BINS).astype(np.int64)
        used = np.flatnonzero(total).astype(np.uint32)
        found[name] = (used, total[used])
    return found


def _flat(column: pa.ChunkedArray) -> NDArray[Any]:
    return np.asarray(column.combine_chunks().flatten())


def _diverge_part(file: str, expected: dict[str, tuple[str, NDArray[np.float64]]]) -> tuple[pa.Table, pa.Table]:
    """Add the divergence to a measured part; returns the rows of `signals` and of `line_signals`."""
    table = _read(file)
    names = np.array(table["_language"].to_pylist(), dtype="U")
    offsets = np.r_[0, np.cumsum(np.asarray(table["_bins"].combine_chunks().value_lengths()))]
    bins, counts = _flat(table["_bins"]), _flat(table["_counts"])
    both = np.full((2, table.num_rows), np.nan)
    for name, (path, levels) in expected.items():
        rows = np.flatnonzero(names == name)
        corpus = Corpus.of(np.load(path, mmap_mode="r"))
        both[0, rows] = corpus.divergences(rows, offsets, bins, counts)
        words = np.add.reduceat(np.r_[counts, 0].astype(np.int64), offsets[:-1]) * (np.diff(offsets) > 0)
        both[1, rows] = both[0, rows] - expected_at(words[rows], levels)
    # Six digits: logarithms differ in their last bits from one processor to another.
    divergences, excesses = (pa.array(np.round(values, 6), pa.float64(), from_pandas=True) for values in both)
    lengths = np.asarray(table["_line"].combine_chunks().value_lengths())
    words = _flat(table["_line_words"])
    lines = pa.table(
        {
            "id": table["id"].take(pa.array(np.repeat(np.arange(table.num_rows), lengths))),
            "line": _flat(table["_line"]),
            "words": words,
            "ngram_coverage": _flat(table["_line_covered"]) / np.maximum(words, 1),
        }
    )
    signals = table.drop_columns([name for name in table.column_names if name.startswith("_")])
    return signals.append_column("token_kl", divergences).append_column("token_kl_excess", excesses), lines
