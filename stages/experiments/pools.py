"""Text by category for small runs: a pool to train on, and held-out pages, chosen by hashes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa

from puna.stages.contract import StageRun
from puna.stages.training.bits_per_byte import batched
from puna.stages.training.corpus import chosen_of, folder, rank
from puna.stages.training.pack import pack
from puna.stages.training.packed import Packed, Reader
from puna.stages.training.vocabulary import loaded
from puna.storage import Artifact, Part, PunaError
from puna.storage.shards import write_table

if TYPE_CHECKING:
    from puna.models.training.objectives.base import Targets

OTHER = "other"
TEXT_PER_TOKEN = 6
"""Bytes of text taken for each token wanted: more than a token holds, so that a pool is seldom short."""
MOST_PER_TOKEN = 64
"""Characters that no long text exceeds per token."""


class Row(NamedTuple):
    """A document's place in the order, its category and its size in bytes."""

    order: int
    id: str
    category: str
    bytes: int


@dataclass(frozen=True)
class Group:
    """Categories that get one share: `members` with their bytes, and their documents in order."""

    name: str
    members: dict[str, int]
    rows: tuple[Row, ...]

    @property
    def bytes(self) -> int:
        """Text of the group."""
        return sum(self.members.values())

    @property
    def documents(self) -> int:
        """Documents of the group."""
        return len(self.rows)


def grouped(documents: Artifact, mixture: Artifact, most: int, run: StageRun) -> list[Group]:
    """The mixture's largest categories by bytes, the others together, each with its training documents in hashed order."""
    parts = run.parts(documents, columns=["id", "text"])
    rows = sorted(row for found in run.map(_rows, parts, mixture, run.seed("order")) for row in found)
    if not rows:
        raise PunaError(f"{documents.id} has no training documents with text: there is nothing to mix")
    sizes: dict[str, int] = {}
    for row in rows:
        sizes[row.category] = sizes.get(row.category, 0) + row.bytes
    ranked = sorted(sizes, key=lambda name: (-sizes[name], name))
    single = ranked if len(ranked) <= most else ranked[: most - 1]
    groups = [(name, [name]) for name in sorted(single)]
    if len(ranked) > len(single):
        groups.append((OTHER, sorted(set(ranked) - set(single))))
    return [
        Group(name, {member: sizes[member] for member in members}, tuple(row for row in rows if row.category in members))
        for name, members in groups
    ]


def _rows(part: Part, mixture: Artifact | None, seed: int) -> list[Row]:
    """A part's training documents with text; without a mixture, all of them."""
    documents = [row for row in chosen_of(part, mixture, "train") if row.text]
    return [Row(rank(seed, row.id), row.id, row.category, len(row.text.encode())) for row in documents]


def one_group(documents: Artifact, name: str, run: StageRun) -> Group:
    """All documents as one group, in hashed order."""
    parts = run.parts(documents, columns=["id", "text"])
    rows = sorted(row for found in run.map(_rows, parts, None, run.seed("order")) for row in found)
    if not rows:
        raise PunaError(f"{documents.id} has no documents with text")
    return Group(name, {name: sum(row.bytes for row in rows)}, tuple(rows))


@dataclass(frozen=True)
class Sizes:
    """How much text of each group small runs need, in tokens.

    `row`: length of a packed row. `document`: only this much of a document's beginning is read, so that few
    tokens still come from many documents.
    """

    training: int
    heldout: int
    row: int
    document: int


def build_pools(documents: Artifact, groups: Sequence[Group], tokenizer: Artifact, sizes: Sizes, run: StageRun) -> str:
    """Encode what the trials need, into a folder of the run's scratch; returns the folder."""
    uses: dict[str, tuple[int, int]] = {}
    for number, group in enumerate(groups):
        held, pool = _divide(group, sizes)
        uses |= {row.id: (number, 1) for row in held} | {row.id: (number, 0) for row in pool}
    target = Path(run.scratch) / "pools"
    target.mkdir(exist_ok=True)
    if (target / "complete").exists():
        return str(target)
    parts = run.parts(documents, columns=["id", "text"])
    order = {row.id: index for group in groups for index, row in enumerate(group.rows)}
    found: list[list[tuple[int, str, list[int]]]] = [[] for _ in range(2 * len(groups))]
    for encoded in run.map(_encode, parts, uses, folder(tokenizer), sizes.document):
        for id_, ids in encoded:
            number, held_out = uses[id_]
            found[2 * number + held_out].append((order[id_], id_, ids))
    for number in range(len(groups)):
        for held_out, name in ((0, "pool"), (1, "heldout")):
            rows = sorted(found[2 * number + held_out])
            _write(target / f"{name}-{number}.parquet", rows, sizes.row)
    (target / "limit").write_text(str(sizes.heldout))
    (target / "complete").touch()
    return str(target)


def _divide(group: Group, sizes: Sizes) -> tuple[list[Row], list[Row]]:
    """The first documents of a group as held out (at most a third of its text), the next ones as its pool."""
    reached = np.cumsum([min(row.bytes, sizes.document * TEXT_PER_TOKEN) for row in group.rows])
    limit = min(sizes.heldout * TEXT_PER_TOKEN, int(reached[-1]) // 3)
    held = max(1, int(np.searchsorted(reached, limit, side="right")))
    before = int(reached[held - 1])
    pool = int(np.searchsorted(reached, before + sizes.training * TEXT_PER_TOKEN)) + 1
    if held == len(group.rows):
        raise PunaError(
            f"category {group.name!r} has one document: one is needed to train on and one to measure the loss on; "
            "lower mix_experiment.categories, so that small ones are taken together"
        )
    return list(group.rows[:held]), list(group.rows[held:pool])


def _encode(part: Part, uses: dict[str, tuple[int, int]], tokenizer: str, most: int) -> list[tuple[str, list[int]]]:
    """(id, tokens) of the part's documents that are used: the first `most` tokens, the end token only if it is among them."""
    table = part.read()
    chosen = [(id_, text) for id_, text in zip(table["id"].to_pylist(), table["text"].to_pylist(), strict=True) if id_ in uses]
    vocabulary = loaded(tokenizer)
    # A book need not be encoded for its first page.
    encodings = vocabulary.encode_batch([text[: MOST_PER_TOKEN * most] for _, text in chosen])
    return [(id_, [vocabulary.begin, *ids, *vocabulary.end][:most]) for (id_, _), ids in zip(chosen, encodings, strict=True)]


def _write(file: Path, rows: list[tuple[int, str, list[int]]], sequence_length: int) -> None:
    packed = pack(pa.array([ids for _, _, ids in rows], pa.list_(pa.int32())), [id_ for _, id_, _ in rows], sequence_length)
    write_table(file, pa.table({"row": pa.array(range(len(packed["tokens"])), pa.int64()), **packed}))


@dataclass(frozen=True)
class Pools:
    """Packed text of each group, its held-out pieces, and the ids of their documents."""

    training: tuple[Packed, ...]
    heldout: tuple[list[Any], ...]
    heldout_ids: tuple[frozenset[str], ...]

    @staticmethod
    @lru_cache(maxsize=1)
    def read(folder: str) -> Pools:
        """What `build_pools` wrote."""
        path = Path(folder)
        count = len(list(path.glob("pool-*.parquet")))
        limit = int((path / "limit").read_text())
        held = [Packed.read(path / f"heldout-{i}.parquet") for i in range(count)]
        return Pools(
            tuple(Packed.read(path / f"pool-{i}.parquet") for i in range(count)),
            tuple(_pieces(packed, limit) for packed in held),
            tuple(frozenset(packed.ids) for packed in held),
        )

    def mixed(self, shares: Sequence[float], rows_per_step: int, begin: int) -> Mixed:
        """Batches whose rows come from the groups in these shares."""
        readers = [Reader(p, np.zeros(len(p.owners), dtype=bool), 1, seed=0, begin=begin) for p in self.training]
        return Mixed(readers, np.asarray(shares, dtype=np.float64), rows_per_step)


def _pieces(packed: Packed, limit: int) -> list[Any]:
    """Pieces with a token to predict, until there are `limit` tokens."""
    found, size = [], 0
    for index in np.flatnonzero(packed.sizes > 1).tolist():
        if size >= limit:
            break
        found.append(packed.piece(index).astype(np.int64))
        size += len(found[-1])
    return found


@dataclass
class Mixed:
    """Steps that draw rows from several readers in fixed shares.

    Row t comes from the group that is farthest behind its share, so that the shares are met at every moment
    within one row; the k-th row of a group is the same in every mixture.
    """

    readers: list[Reader]
    shares: np.ndarray[Any, np.dtype[np.float64]]
    rows_per_step: int
    _taken: list[tuple[int, int]] = field(default_factory=list)
    _counts: list[int] = field(default_factory=list)

    def _slot(self, index: int) -> tuple[int, int]:
        """(group, how many of its rows came before) of row `index`."""
        if not self._counts:
            self._counts = [0] * len(self.readers)
        while len(self._taken) <= index:
            behind = self.shares * (len(self._taken) + 1) - np.array(self._counts)
            group = int(behind.argmax())
            self._taken.append((group, self._counts[group]))
            self._counts[group] += 1
        return self._taken[index]

    def _spans(self, step: int) -> list[tuple[int, int, int]]:
        found = []
        for index in range((step - 1) * self.rows_per_step, step * self.rows_per_step):
            group, number = self._slot(index)
            found += [(group, start, stop) for start, stop in self.readers[group].pieces(number + 1)]
        return found

    def lengths(self, step: int) -> list[int]:
        """Lengths of the documents of a step, in tokens."""
        return [stop - start for _, start, stop in self._spans(step)]

    def batches(self, step: int, micro_batch_tokens: int) -> list[Targets]:
        """The step's rows as micro-batches of about so many tokens, whose gradients add up."""
        from puna.models.training.objectives.base import Targets

        return [
            Targets.from_documents([self.readers[group].packed.tokens[start:stop] for group, start, stop in spans])
            for spans in batched(self._spans(step), lambda span: span[2] - span[1], micro_batch_tokens)
        ]
