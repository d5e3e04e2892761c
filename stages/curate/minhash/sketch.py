"""From texts to signatures and shingles, for `minhash_dedup`: what workers do."""

from __future__ import annotations

import hashlib
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from puna.stages.curate.minhash.config import MinhashDedupConfig
from puna.storage import Part

if TYPE_CHECKING:
    from puna.kernels.minhash import Device
    from puna.kernels.shingles import Words


class Shingles(NamedTuple):
    """Shingles of some documents: their XXH64 in text order uint64[S], `offsets` int64[D + 1] in them, `words` int64[D],
    the values that are permuted uint64[S], and the normal texts they are of."""

    hashes: NDArray[np.uint64]
    offsets: NDArray[np.int64]
    words: NDArray[np.int64]
    values: NDArray[np.uint64]
    normal: Words


class Sketches(NamedTuple):
    """What one part of the documents was reduced to; signatures [D, P] and band keys [B, D] lie in files, and for an index the
    compressed normal texts, of `stored` bytes each, `raw` before compression."""

    documents: int
    fetched: NDArray[np.int64]
    preferred: NDArray[np.bool_]
    words: NDArray[np.int64]
    shingles: NDArray[np.int64]
    signatures: str
    keys: str
    texts: str
    stored: NDArray[np.int64]
    raw: NDArray[np.int64]


def shingled(texts: pa.ChunkedArray, config: MinhashDedupConfig) -> Shingles:
    """The shingles of a column of texts."""
    from puna.stages.curate.text.shingles import bytes_of

    data, offsets = bytes_of(texts)
    if config.normal_form == "datatrove":
        from puna.stages.curate.text.datatrove_words import datatrove_words

        return of_words(datatrove_words(data, offsets), config)
    from puna.kernels.shingles import normal_words
    from puna.stages.curate.text.shingles import table

    return of_words(normal_words(data, offsets, table()), config)


def of_words(words: Words, config: MinhashDedupConfig) -> Shingles:
    """The shingles of normal texts."""
    from puna.kernels.shingles import shingle_hashes

    hashes, where = shingle_hashes(words, config.words, short=config.normal_form == "puna")
    values = hashes if config.hash == "xxh64" else _sha1(words, where, config)
    return Shingles(hashes, where, np.diff(words.words_D1), values, words)


def _sha1(words: Words, where: NDArray[np.int64], config: MinhashDedupConfig) -> NDArray[np.uint64]:
    """The first bytes of each shingle's SHA-1 as a little-endian number: the default hash of datasketch, and datatrove's sha1."""
    size = 8 if config.scheme in ("affine64", "mersenne") else 4
    found = []
    for text, count in zip(words.texts(), np.diff(where).tolist(), strict=True):
        parts = text.split(" ")
        for start in range(count):
            found.append(int.from_bytes(hashlib.sha1(" ".join(parts[start : start + config.words]).encode()).digest()[:size], "little"))
    return np.array(found, dtype=np.uint64)


def signed(found: Shingles, config: MinhashDedupConfig, device: Device = "cpu") -> tuple[NDArray[Any], NDArray[np.uint64]]:
    """Signatures [D, P] and band keys [D, B]."""
    from puna.kernels.minhash import signatures
    from puna.kernels.near_duplicates import band_keys

    values = signatures(found.values, found.offsets, config.bands * config.rows, config.seed, config.scheme, device)
    return values, band_keys(values, config.bands, config.rows)


def sketch(job: tuple[int, Part], config: MinhashDedupConfig, device: Device, scratch: str) -> Sketches:
    """Signatures and band keys of one part, in files: the driver holds a few bytes per document."""
    number, part = job
    read = part.read()
    found = shingled(read.column("text"), config)
    values, keys = signed(found, config, device)
    files = [str(Path(scratch) / f"{name}-{number:06d}.npy") for name in ("signatures", "keys")]
    np.save(files[0], values)
    np.save(files[1], np.ascontiguousarray(keys.T))
    fetched = np.asarray(read.column("fetched_at").cast(pa.int64()))
    preferred = np.array([source in config.prefer_sources for source in read.column("source").to_pylist()], dtype=bool)
    texts = Path(scratch) / f"texts-{number:06d}.bin"
    stored = np.zeros(0, np.int64)
    if config.keep_index:
        codec = pa.Codec("zstd", 1)
        bounds, whole = found.normal.offsets_D1.tolist(), memoryview(found.normal.data)
        pieces = [codec.compress(whole[a:b], asbytes=True) for a, b in pairwise(bounds)]
        texts.write_bytes(b"".join(pieces))
        stored = np.array([len(piece) for piece in pieces], np.int64)
    shingles, raw = np.diff(found.offsets), np.diff(found.normal.offsets_D1)
    return Sketches(part.rows, fetched, preferred, found.words, shingles, files[0], files[1], str(texts), stored, raw)


def band_edges(band: int, files: list[str], documents: int) -> NDArray[np.int64]:
    """Neighbouring rows that share the key of one band, int64[E, 2]."""
    from puna.kernels.near_duplicates import edges

    keys = np.empty(documents, dtype=np.uint64)
    at = 0
    for file in files:
        found = np.load(file, mmap_mode="r")
        keys[at : at + found.shape[1]] = found[band]
        at += found.shape[1]
    return edges(keys)  # type: ignore[no-any-return]


class Place(NamedTuple):
    """Candidates of one part: their rows in it, and where each one's shingles go in the file of all."""

    part: Part
    rows: NDArray[np.int64]
    start: NDArray[np.int64]


def store_shingles(place: Place, config: MinhashDedupConfig, file: str) -> None:
    """Write the candidates' shingles where they belong.

    Texts are read a second time, because few documents are candidates and the shingles of all need more room than the texts.
    """
    found = shingled(place.part.read().column("text").take(pa.array(place.rows)), config)
    sequence = np.load(file, mmap_mode="r+")
    for k, start in enumerate(place.start.tolist()):
        own = found.hashes[found.offsets[k] : found.offsets[k + 1]]
        sequence[start : start + len(own)] = own
