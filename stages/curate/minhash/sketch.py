"""Shingles, signatures and facts of documents, for `minhash_dedup`, its index and `minhash_update`."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from puna.stages.curate.minhash.config import MinhashDedupConfig
from puna.storage import Artifact, Part

if TYPE_CHECKING:
    from puna.kernels.text.hashing import I64, U64
    from puna.kernels.text.normal_words import Words


class Shingles(NamedTuple):
    """Shingles of some documents: XXH64 `hashes` in text order, uint64[S]; `offsets` of the documents in `hashes`, int64[D + 1]; number of
    `words` per document, int64[D]; and the `normal`ized texts."""

    hashes: U64
    offsets: I64
    words: I64
    normal: Words


def shingle(texts: pa.ChunkedArray, config: MinhashDedupConfig) -> Shingles:
    from puna.kernels.text.shingles import normal
    from puna.kernels.text.strings import buffers

    return of_words(normal(*buffers(texts)), config)


def of_words(words: Words, config: MinhashDedupConfig) -> Shingles:
    from puna.kernels.text.normal_words import shingle_hashes

    hashes, where = shingle_hashes(words, config.words)
    return Shingles(hashes, where, np.diff(words.words_D1), words)


def sign(found: Shingles, config: MinhashDedupConfig) -> tuple[NDArray[Any], U64]:
    """Return signatures [D, P] and band keys [D, B]."""
    from puna.kernels.minhash import signatures
    from puna.stages.curate.minhash.near_duplicates import band_keys

    if config.engine == "datasketch":
        values = _datasketch_signatures(found.hashes, found.offsets, config)
    else:
        values = signatures(found.hashes, found.offsets, config.bands * config.rows, config.seed)
    return values, band_keys(values, config.bands, config.rows)


def _datasketch_signatures(hashes: U64, offsets: I64, config: MinhashDedupConfig) -> NDArray[Any]:
    """Return the documents' signatures [D, P] from their shingle hashes, equal to those of `puna.kernels.minhash`."""
    from datasketch import MinHash

    size, rows = config.bands * config.rows, []
    for start, stop in pairwise(offsets):
        one = MinHash(size, config.seed, hashfunc=lambda value: value & 0xFFFFFFFF, scheme="affine32")
        if stop > start:
            one.update_batch(hashes[start:stop].tolist())
        rows.append(one.hashvalues)
    return np.array(rows, np.uint32).reshape(len(rows), size)


FACTS = np.dtype(
    [("fetched", "<i8"), ("preferred", "?"), ("words", "<i8"), ("shingles", "<i8"), ("score", "<f8"), ("text", "<i8"), ("bytes", "<i8"),
     ("raw", "<i8")]
)  # fmt: skip
"""Facts about a document. In an index, its normalized text starts at `text` in texts.bin and has `bytes` bytes, `raw` uncompressed."""


def facts_of(table: pa.Table, found: Shingles, signals: Artifact | None, config: MinhashDedupConfig) -> NDArray[Any]:
    """Return the facts that decide which near-duplicate is kept, FACTS[n], with `text`, `bytes` and `raw` 0. With `signals`, ids ascend."""
    facts = np.zeros(len(found.words), FACTS)
    facts["fetched"] = np.asarray(table["fetched_at"].cast(pa.int64()))
    facts["preferred"] = [source in config.prefer_sources for source in table["source"].to_pylist()]
    facts["words"], facts["shingles"] = found.words, np.diff(found.offsets)
    if signals is not None and len(facts):
        ids = table["id"]
        scores = signals.between(ids[0].as_py(), ids[-1].as_py(), columns=["id", config.score])
        place = pc.index_in(ids, value_set=scores["id"].combine_chunks())
        values = np.asarray(scores[config.score].cast(pa.float64()).take(place).fill_null(-np.inf), dtype=np.float64)
        facts["score"] = np.nan_to_num(values, nan=-np.inf)  # a missing score counts as the worst
    return facts


def sketch(job: tuple[int, Part], signals: Artifact | None, config: MinhashDedupConfig, scratch: str) -> str:
    """Write the ids, facts, signatures, band keys and texts of one part to files; return the files' common prefix."""
    number, part = job
    table = part.read()
    results = shingle(table["text"], config)
    values, keys = sign(results, config)
    facts = facts_of(table, results, signals, config)
    codec = pa.Codec("zstd", 1)
    bounds, whole = results.normal.offsets_D1.tolist(), memoryview(results.normal.data.tobytes())
    pieces = [codec.compress(whole[a:b], asbytes=True) for a, b in pairwise(bounds)]
    facts["bytes"], facts["raw"] = [len(piece) for piece in pieces], np.diff(results.normal.offsets_D1)
    begin = f"{scratch}/sketch-{number:06d}"
    Path(f"{begin}-texts.bin").write_bytes(b"".join(pieces))
    ids = np.array([i.encode() for i in table["id"].to_pylist()], dtype=bytes)
    for name, array in {"ids": ids, "facts": facts, "signatures": values, "keys": np.ascontiguousarray(keys.T)}.items():
        np.save(f"{begin}-{name}.npy", array)
    return begin
