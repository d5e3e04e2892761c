"""The index of documents read by `minhash_dedup` or `minhash_update`, and the search for documents similar to a text.

ids.npy         bytes[D]       sorted ids
facts.npy       record[D]      fetched, preferred, words, shingles, score, position of the text in texts.bin
signatures.npy  [D, P]
keys.npy        uint64[B, F]   sorted keys of each band, for the F documents with shingles
rows.npy        int64[B, F]    rows of the documents with these keys
texts.bin                      normalized texts, each compressed separately, so that single texts can be read"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from puna.stages.curate.minhash.config import MinhashDedupConfig
from puna.stages.curate.minhash.sketch import FACTS, Shingles, of_words, shingle, sign
from puna.storage import Artifact, PunaError

if TYPE_CHECKING:
    from puna.kernels.text.hashing import I64, U64

INDEX = "index"
BLOCK_ROWS = 1024


def write_index(folder: Path, sketches: list[str], config: MinhashDedupConfig) -> None:
    """Write the index from the files of `sketch` with the prefixes `sketches`. Only ids, facts and one band's keys are in memory."""

    none = {  # there may be no documents
        "ids": np.zeros(0, "S1"), "facts": np.zeros(0, FACTS), "signatures": np.zeros((0, config.bands * config.rows), np.uint32),
        "keys": np.zeros((config.bands, 0), np.uint64),
    }  # fmt: skip

    def of(name: str) -> list[NDArray[Any]]:
        return [np.load(f"{begin}-{name}.npy", mmap_mode="r") for begin in sketches] or [none[name]]

    folder.mkdir(exist_ok=True)
    np.save(folder / "ids.npy", np.concatenate(of("ids")))
    facts = np.concatenate(of("facts"))
    facts["text"] = np.cumsum(facts["bytes"]) - facts["bytes"]
    np.save(folder / "facts.npy", facts)
    with (folder / "texts.bin").open("wb") as out:
        for begin in sketches:
            with Path(f"{begin}-texts.bin").open("rb") as file:
                shutil.copyfileobj(file, out)
    parts = of("signatures")
    signatures = np.lib.format.open_memmap(folder / "signatures.npy", "w+", parts[0].dtype, (len(facts), parts[0].shape[1]))
    at = 0
    for part in parts:
        signatures[at : at + len(part)] = part
        at += len(part)
    filled = np.flatnonzero(facts["shingles"])
    shape = (config.bands, len(filled))
    keys = np.lib.format.open_memmap(folder / "keys.npy", "w+", np.uint64, shape)
    rows = np.lib.format.open_memmap(folder / "rows.npy", "w+", np.int64, shape)
    for band in range(config.bands):
        own = np.concatenate([part[band] for part in of("keys")])[filled]
        order = np.argsort(own, kind="stable")
        keys[band], rows[band] = own[order], filled[order]


class Index(NamedTuple):
    """An open index in `folder`. Its arrays (see the module's docstring) are memory-mapped."""

    facts: NDArray[Any]
    signatures: NDArray[Any]
    keys: U64
    rows: I64
    folder: Path

    @classmethod
    def open(cls, folder: Path) -> Index:
        # Plain arrays over the mapped files: slicing a `np.memmap` is slow for small slices.
        names = ("facts", "signatures", "keys", "rows")
        facts, signatures, keys, rows = (np.asarray(np.load(folder / f"{name}.npy", mmap_mode="r")) for name in names)
        return cls(facts, signatures, keys, rows, folder)

    @classmethod
    def of(cls, artifact: Artifact) -> Index:
        """Return an artifact's index; raise PunaError if it has none."""
        if f"{INDEX}/facts.npy" not in artifact.manifest.files:
            raise PunaError(f"{artifact.id} has no index; make it with minhash_dedup.keep_index=true")
        return cls.open(artifact.path(INDEX))

    def ids(self) -> NDArray[np.bytes_]:
        return np.asarray(np.load(self.folder / "ids.npy", mmap_mode="r"))

    def sharing(self, keys: U64) -> I64:
        """Return the rows of documents that share a band key with any of M queries. `keys`: the queries' band keys [M, B]."""
        results = [np.zeros(0, np.int64)]
        for own, rows, queries in zip(self.keys, self.rows, keys.T, strict=True):
            low, high = np.searchsorted(own, queries, side="left"), np.searchsorted(own, queries, side="right")
            low, counts = low[high > low], (high - low)[high > low]
            results.append(rows[np.repeat(low - (np.cumsum(counts) - counts), counts) + np.arange(counts.sum())])
        return np.unique(np.concatenate(results))

    def shingles(self, rows: I64, config: MinhashDedupConfig) -> Shingles:
        """Return the shingles of the documents `rows`, from their stored texts."""
        from puna.kernels.text.shingles import words_of

        codec = pa.Codec("zstd")
        texts = np.memmap(self.folder / "texts.bin", np.uint8, "r") if (self.folder / "texts.bin").stat().st_size else np.zeros(0, np.uint8)
        pieces = []
        for fact in self.facts[rows]:
            piece = texts[int(fact["text"]) : int(fact["text"] + fact["bytes"])]
            pieces.append(codec.decompress(piece.tobytes(), int(fact["raw"]), asbytes=True))
        offsets = np.cumsum([0, *map(len, pieces)]).astype(np.int64)
        # The array is writable: for a read-only array, numba would compile the loops again.
        return of_words(words_of(np.frombuffer(bytearray().join(pieces), np.uint8), offsets), config)


def has_index(documents: Artifact) -> bool:
    return f"{INDEX}/facts.npy" in documents.manifest.files


def configuration(documents: Artifact) -> MinhashDedupConfig:
    """Return the configuration of the `minhash_dedup` that made the index; for a `minhash_update`, that of its first `previous`."""
    index = documents
    if index.manifest.stage == "minhash_update":
        first = next(record for record in index.manifest.inputs if record.name == "previous")
        index = Artifact(first.kind, first.key, index.files)
    return MinhashDedupConfig(**index.manifest.config)


def signature_table(documents: Artifact) -> pa.Table:
    """Return ids and signatures of documents with words; metadata: bands, rows, seed, scheme. Raise PunaError without an index."""
    index, config = Index.of(documents), configuration(documents)
    facts = {name: str(getattr(config, name)) for name in ("bands", "rows", "seed")} | {"scheme": "affine32"}
    filled = np.flatnonzero(index.facts["shingles"])
    signatures = index.signatures[filled]
    columns = {
        "id": pa.array([identity.decode() for identity in index.ids()[filled]], pa.string()),
        "signature": pa.FixedSizeListArray.from_arrays(pa.array(signatures.ravel()), signatures.shape[1]),
    }
    return pa.table(columns).replace_schema_metadata(facts)


class Resemblance(NamedTuple):
    """The shingle overlap of a document and a text: `similarity` (Jaccard), and the shared fraction of the text's shingles (`of_text`) and
    of the document's (`of_document`)."""

    id: str
    similarity: float
    of_text: float
    of_document: float


def resembling(text: str, documents: Artifact, least: float = 0.1) -> list[Resemblance]:
    """Return the documents with a `similarity`, `of_text` or `of_document` of at least `least`, the most similar first.

    With an index (`minhash_dedup.keep_index`), removed documents are compared, too, but only documents that share a band key with the text,
    so some may be missed. Raise PunaError if the text has no words."""
    at_hand = has_index(documents)
    config = configuration(documents) if at_hand else MinhashDedupConfig()
    own = shingle(pa.chunked_array([pa.array([text], pa.large_string())]), config)
    if not len(own.hashes):
        raise PunaError("near: the text has no words to compare; give a longer text")
    shingles = np.unique(own.hashes)
    results = _by_index(own, documents, config) if at_hand else _by_reading(documents, config)
    rows = [_beside(shingles, identity, hashes) for identity, hashes in results]
    rows = [row for row in rows if max(row.similarity, row.of_text, row.of_document) >= least]
    return sorted(rows, key=lambda row: (-row.similarity, -row.of_text, row.id))


def _beside(wanted: U64, identity: str, hashes: U64) -> Resemblance:
    theirs = np.unique(hashes)
    both = len(np.intersect1d(wanted, theirs, assume_unique=True))
    return Resemblance(identity, both / (len(wanted) + len(theirs) - both), both / len(wanted), both / max(1, len(theirs)))


def _by_index(own: Shingles, documents: Artifact, config: MinhashDedupConfig) -> Iterator[tuple[str, U64]]:
    index = Index.of(documents)
    rows = index.sharing(sign(own, config)[1])
    shingles = index.shingles(rows, config)
    for place, identity in enumerate(index.ids()[rows]):
        yield identity.decode(), shingles.hashes[shingles.offsets[place] : shingles.offsets[place + 1]]


def _by_reading(documents: Artifact, config: MinhashDedupConfig) -> Iterator[tuple[str, U64]]:
    for batch in documents.batches(columns=["id", "text"], rows=BLOCK_ROWS):
        table = pa.Table.from_batches([batch])
        results = shingle(table["text"], config)
        for place, identity in enumerate(table["id"].to_pylist()):
            yield identity, results.hashes[results.offsets[place] : results.offsets[place + 1]]


def describe(rows: list[Resemblance], documents: Artifact) -> list[dict[str, Any]]:
    """Return `rows` as dictionaries with `kept`, `url` and `title`. A removed document has `kept` false, and null URL and title."""
    matches = []
    for row in rows:
        here = documents.between(row.id, row.id, columns=["url", "title"]).to_pylist()
        matches.append({**row._asdict(), "kept": bool(here), **(here[0] if here else {"url": None, "title": None})})
    return matches
