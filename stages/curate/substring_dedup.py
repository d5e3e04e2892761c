"""`substring_dedup`: passages that repeat word for word across and inside documents."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pydantic import Field

from puna.stages.contract import Documents, StageConfig, StageRun, stage
from puna.storage import Part
from puna.storage.schemas import table_schema


class SubstringDedupConfig(StageConfig):
    """Which passages repeat, and which documents they leave behind."""

    words: int = Field(50, ge=2, le=10_000, description="A passage of at least so many words that occurred before is removed, words")
    min_words: int = Field(20, ge=0, description="A document of which something was removed and fewer words are left is dropped, words")
    sources_exempt: tuple[str, ...] = Field(("code",), description="Sources whose documents are neither searched nor cut")
    memory_windows: int = Field(1 << 26, ge=1 << 10, description="Windows that are sorted at a time, 16 bytes each")


class Windows(NamedTuple):
    """The windows of one part: their hashes in a file, and how many each document has."""

    file: str
    counts: NDArray[np.int64]


@stage(kind="documents", filters="documents")
def substring_dedup(documents: Documents, config: SubstringDedupConfig, run: StageRun) -> None:
    """Remove passages of `words` or more words but for their first occurrence, in the order of ids (Lee et al. 2021, ExactSubstr).

    White space does not count. `removed_spans` holds every removed passage. A document of which too little is left is dropped.
    """
    parts = run.parts(documents, columns=["source", "text"])
    made = list(run.map(_windows, list(enumerate(parts)), config, str(run.scratch), rows=len(parts)))
    hashes, first = _repeated(made, config)
    ids = documents.read(columns=["id"]).column("id")
    row, place = first >> 32, first & 0xFFFFFFFF
    folder = Path(run.scratch)
    np.save(folder / "hashes.npy", hashes)
    np.save(folder / "places.npy", place)
    np.save(folder / "ids.npy", np.array([i.encode() for i in ids.take(pa.array(row)).to_pylist()] or [b""]))
    run.transform(_cut, documents, config, str(folder))
    run.metric("repeated_windows", len(hashes))


def _found(texts: pa.ChunkedArray, exempt: NDArray[np.bool_], config: SubstringDedupConfig) -> tuple[Any, ...]:
    """`window_hashes` of texts, where those of exempt sources are empty; and their bytes."""
    from puna.stages.curate.text.shingles import bytes_of
    from puna.stages.curate.text.windows import window_hashes

    masked = pa.chunked_array([pa.array(["" if out else text for text, out in zip(texts.to_pylist(), exempt, strict=True)], pa.string())])
    data, offsets = bytes_of(masked)
    return (*window_hashes(data, offsets, config.words), data, offsets)


def _exempt(table: pa.Table, config: SubstringDedupConfig) -> NDArray[np.bool_]:
    return np.array([source in config.sources_exempt for source in table.column("source").to_pylist()], bool)


def _windows(job: tuple[int, Part], config: SubstringDedupConfig, scratch: str) -> Windows:
    number, part = job
    table = part.read()
    hashes, offsets, *_ = _found(table.column("text"), _exempt(table, config), config)
    file = Path(scratch) / f"windows-{number:06d}.npy"
    np.save(file, hashes)
    return Windows(str(file), np.diff(offsets))


def _repeated(made: list[Windows], config: SubstringDedupConfig) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
    """Windows that occur more than once: hashes in order, and the first place of each as row << 32 | window of the document.

    Sorted a range of hashes at a time, so that memory stays bounded.
    """
    total = sum(int(w.counts.sum()) for w in made)
    ranges = -(-total // config.memory_windows) or 1
    hashes, places = [np.zeros(0, np.uint64)], [np.zeros(0, np.int64)]
    width = (1 << 64) // ranges + 1
    for number in range(ranges):
        held, where, row = [np.zeros(0, np.uint64)], [np.zeros(0, np.int64)], 0
        for windows in made:
            values = np.load(windows.file, mmap_mode="r")
            here = np.flatnonzero((values >= np.uint64(number * width)) & (values <= np.uint64(min((number + 1) * width, 1 << 64) - 1)))
            bounds = np.cumsum(windows.counts)
            document = np.searchsorted(bounds, here, side="right")
            held.append(values[here])
            where.append((document + row << 32) | (here - (bounds[document] - windows.counts[document])))
            row += len(windows.counts)
        value, place = np.concatenate(held), np.concatenate(where)
        order = np.lexsort((place, value))
        value, place = value[order], place[order]
        begins = np.flatnonzero(np.append(True, value[1:] != value[:-1])) if len(value) else np.zeros(0, np.int64)
        begins = begins[np.diff(begins, append=len(value)) > 1]
        hashes.append(value[begins])
        places.append(place[begins])
    return np.concatenate(hashes), np.concatenate(places)


def _cut(documents: pa.Table, config: SubstringDedupConfig, folder: str) -> dict[str, pa.Table]:
    """In a worker: the documents of a part without their repeated passages."""
    known, places, firsts = (np.load(Path(folder) / f"{name}.npy", mmap_mode="r") for name in ("hashes", "places", "ids"))
    hashes, windows, begins, ends, words, data, offsets = _found(documents.column("text"), _exempt(documents, config), config)
    at = np.minimum(np.searchsorted(known, hashes), max(0, len(known) - 1))
    repeated = known[at] == hashes if len(known) else np.zeros(len(hashes), bool)
    ids, texts = documents.column("id").to_pylist(), documents.column("text").to_pylist()
    keep = np.ones(len(ids), bool)
    spans: list[dict[str, Any]] = []
    dropped: list[dict[str, Any]] = []
    for d in np.unique(np.searchsorted(windows, np.flatnonzero(repeated), side="right") - 1).tolist():
        own = np.arange(windows[d], windows[d + 1])
        here = own[repeated[own]]
        is_first = (firsts[at[here]] == ids[d].encode()) & (places[at[here]] == here - windows[d])
        gone = here[~is_first]
        if not len(gone):
            continue
        covered = np.zeros(words[d + 1] - words[d] + 1, np.int64)
        np.add.at(covered, gone - windows[d], 1)
        np.add.at(covered, gone - windows[d] + config.words, -1)
        removed = np.cumsum(covered)[:-1] > 0
        edges = np.flatnonzero(np.diff(removed.astype(np.int8), prepend=0, append=0)).reshape(-1, 2)
        raw = data[offsets[d] : offsets[d + 1]].tobytes()
        pieces, last = [], 0
        for start, stop in edges.tolist():
            low, high = (int(v - offsets[d]) for v in (begins[words[d] + start], ends[words[d] + stop - 1]))
            pieces.append(raw[last:low])
            keeper = firsts[at[windows[d] + start]].decode()
            place = len(raw[:low].decode())
            spans.append({"id": ids[d], "start": place, "text": raw[low:high].decode(), "kept_id": keeper})
            last = high
        texts[d] = b"".join([*pieces, raw[last:]]).decode().strip()
        left = int((~removed).sum())
        if left < max(1, config.min_words):
            keep[d] = False
            detail = f"{len(edges)} repeated passages removed"
            dropped.append(
                {"id": ids[d], "rule": "substring_dedup.words_left", "value": left, "threshold": config.min_words, "detail": detail}
            )
    column = documents.schema.get_field_index("text")
    kept = documents.set_column(column, documents.schema.field("text"), pa.array(texts, pa.string())).filter(pa.array(keep))
    made = {"documents": kept}
    for name, rows in (("removed_spans", spans), ("dropped", dropped)):
        made[name] = pa.Table.from_pylist(rows, schema=table_schema(name).schema)
    return made
