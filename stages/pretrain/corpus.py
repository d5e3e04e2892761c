"""Documents joined with the mixture that says what each is for."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from puna.storage import Artifact, Part, PunaError


class Chosen(NamedTuple):
    """One document of a split: how often it is read, and the knowledge type it belongs to."""

    id: str
    text: str
    category: str
    repeats: int


def mixture_file(mixture: Artifact | None) -> str | None:
    """The mixture's table as a file that workers read."""
    return None if mixture is None else str(mixture.path("mixture.parquet"))


def chosen(documents: pa.Table, mixture: str | None, split: str) -> Iterator[Chosen]:
    """The rows of `documents` (sorted by id) that the mixture puts into `split`; without one, all of them, once."""
    ids = documents.column("id").to_pylist()
    if not ids:
        return
    uses: dict[str, tuple[str, int]]
    if mixture is None:
        uses = dict.fromkeys(ids, ("all", 1))
    else:
        wanted = (pc.field("id") >= ids[0]) & (pc.field("id") <= ids[-1]) & (pc.field("split") == split)
        rows = pq.read_table(mixture, columns=["id", "category", "repeats", "split"], filters=wanted)
        uses = {
            id_: (category, repeats)
            for id_, category, repeats in zip(
                rows["id"].to_pylist(), rows["category"].to_pylist(), rows["repeats"].to_pylist(), strict=True
            )
        }
    for id_, text in zip(ids, documents.column("text").to_pylist(), strict=True):
        if id_ in uses and uses[id_][1] > 0:
            yield Chosen(id_, text, *uses[id_])


def chosen_of(part: Part, mixture: str | None, split: str) -> list[Chosen]:
    """`chosen` of one part of a documents table, for workers."""
    return list(chosen(part.read(), mixture, split))


def check_mixture(documents: Artifact, mixture: Artifact) -> None:
    """PunaError when the mixture is not of these documents: it names others, or lacks some of them."""
    said, there = (set(artifact.read(columns=["id"])["id"].to_pylist()) for artifact in (mixture, documents))
    for more, less, verb in ((said - there, documents, "names"), (there - said, mixture, "lacks")):
        if more:
            what = f"that {less.id} does not have" if verb == "names" else f"of {documents.id}"
            raise PunaError(
                f"{mixture.id} {verb} {len(more)} documents {what}, for example {min(more)}; "
                "give the documents that the mixture was made of"
            )


def rank(*parts: object) -> int:
    """A 63-bit hash that puts rows in an order that no file order or number of workers changes."""
    digest = hashlib.blake2b("\0".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def folder(artifact: Artifact) -> str:
    """The artifact's folder, as workers get it."""
    return str(Path(artifact.path()))
