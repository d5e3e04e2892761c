"""Text by category for small runs: a training pool and held-out documents, chosen by hashes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache, reduce
from operator import add
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from puna.models.training.packing import batch_by_size
from puna.stages.contract import StageRun
from puna.stages.training.corpus import KEPT, Chosen, chosen_of, rank
from puna.stages.training.token_rows import Packed, Reader, pack
from puna.stages.training.vocabulary import load
from puna.storage import Artifact, Part, PunaError
from puna.storage.exchange import Partition

if TYPE_CHECKING:
    from puna.models.training.objectives.base import Targets

OTHER = "other"
TEXT_PER_TOKEN = 6  # bytes of text to take per needed token: more than usual, so that a pool is seldom too small
MOST_PER_TOKEN = 64  # upper bound on a long text's characters per token
JOB_ROWS = 1 << 14
STEPS = 1024  # number of equal ranges of the 63-bit hashes, used to count the text up to a hash


@dataclass(frozen=True)
class Sizes:
    """The amounts of text, in tokens, that small runs need from each group.

    `row`: length of a packed row. `document`: maximum tokens read from a document; small runs should read many documents."""

    training: int
    heldout: int
    row: int
    document: int


@dataclass(frozen=True)
class Amount:
    """The size of one category: documents, bytes, and the bytes to read in each of the `STEPS` ranges of hashes."""

    documents: int
    bytes: int
    read: npt.NDArray[np.int64]

    def __add__(self, other: Amount) -> Amount:
        return Amount(self.documents + other.documents, self.bytes + other.bytes, self.read + other.read)


@dataclass(frozen=True)
class Group:
    """Categories that share one weight: `members` with their amounts, and their total amount."""

    name: str
    members: dict[str, Amount]
    amount: Amount


def grouped_documents(documents: Artifact, mixture: Artifact | None, most: int, sizes: Sizes, run: StageRun) -> list[Group]:
    """Return up to `most` groups of training documents: `KEPT`, the largest by bytes, one for the rest. Raise PunaError without text."""
    totals: dict[str, Amount] = {}
    for part in run.map(_count, documents.parts(columns=["id", "text"], rows=JOB_ROWS), mixture, run.seed("order"), sizes.document):
        for name, one in part.items():
            totals[name] = totals[name] + one if name in totals else one
    if not totals:
        raise PunaError(f"{documents.id} has no {'documents' if mixture is None else 'training documents'} with text")
    ranked = sorted(totals, key=lambda name: (name != KEPT, -totals[name].bytes, name))
    single = ranked if len(ranked) <= most else ranked[: most - 1]
    groups = [(name, [name]) for name in sorted(single)]
    if len(ranked) > len(single):
        rest = OTHER + "s" * (OTHER in single)  # a category may be called other
        groups.append((rest, sorted(set(ranked) - set(single))))
    return [Group(name, {one: totals[one] for one in members}, reduce(add, (totals[one] for one in members))) for name, members in groups]


def _training(part: Part, mixture: Artifact | None) -> list[Chosen]:
    return [row for row in chosen_of(part, mixture, "train") if row.text]


def _count(part: Part, mixture: Artifact | None, seed: int, most: int) -> dict[str, Amount]:
    """Return the amount of each category in a part. Small runs read at most `most` tokens per document."""
    counts: dict[str, tuple[list[int], list[int]]] = {}
    for row in _training(part, mixture):
        sizes, steps = counts.setdefault(row.category, ([], []))
        sizes.append(len(row.text.encode()))
        steps.append(rank(seed, row.id) * STEPS >> 63)
    read = {name: np.minimum(sizes, most * TEXT_PER_TOKEN) for name, (sizes, _) in counts.items()}
    return {
        name: Amount(len(sizes), sum(sizes), np.bincount(steps, weights=read[name], minlength=STEPS).astype(np.int64))
        for name, (sizes, steps) in counts.items()
    }


@dataclass(frozen=True)
class PoolRows:
    """References to the documents that small runs read: a partition per group, and the number of bytes to read in the whole group."""

    parts: tuple[Partition, ...]
    totals: tuple[int, ...]
    sizes: Sizes


def build_pools(
    documents: Artifact, mixture: Artifact | None, groups: Sequence[Group], tokenizer: Artifact, sizes: Sizes, run: StageRun
) -> PoolRows:
    """Encode enough documents of each group, in hash order, for small runs; return references. Raise PunaError for a group of one."""
    last: dict[str, tuple[int, int]] = {}
    for number, group in enumerate(groups):
        if group.amount.documents == 1:
            raise PunaError(f"category {group.name!r} has only one document, but needs one to train on and one to measure the loss on; "
                f"lower {run.stage}.categories, so that small ones are grouped")  # fmt: skip
        bytes_needed = (sizes.heldout + sizes.document + sizes.training) * TEXT_PER_TOKEN
        last |= dict.fromkeys(group.members, (number, int(np.searchsorted(np.cumsum(group.amount.read), bytes_needed))))
    arguments = (mixture, last, str(tokenizer.path()), run.seed("order"), sizes.document)
    parts = run.exchange(_encode, documents.parts(columns=["id", "text"], rows=JOB_ROWS), *arguments, by="group", partitions=len(groups))
    return PoolRows(parts.parts, tuple(int(group.amount.read.sum()) for group in groups), sizes)


def _encode(part: Part, mixture: Artifact | None, last: dict[str, tuple[int, int]], tokenizer: str, seed: int, most: int) -> pa.Table:
    """Return a table with the first `most` tokens of each document in the groups, up to the last range of hashes that its group needs."""
    rows = [(rank(seed, row.id), row) for row in _training(part, mixture) if row.category in last]
    rows = [(order, row) for order, row in rows if order * STEPS >> 63 <= last[row.category][1]]
    vocabulary = load(tokenizer)
    # Do not encode a whole book if only its first page is read.
    encodings = vocabulary.encode_batch([row.text[: MOST_PER_TOKEN * most] for _, row in rows])
    return pa.table(
        {
            "group": pa.array([last[row.category][0] for _, row in rows], pa.int32()),
            "order": pa.array([order for order, _ in rows], pa.int64()),
            "id": pa.array([row.id for _, row in rows], pa.string()),
            "bytes": pa.array([min(len(row.text.encode()), most * TEXT_PER_TOKEN) for _, row in rows], pa.int64()),
            "tokens": pa.array([[vocabulary.begin, *ids, *vocabulary.end][:most] for ids in encodings], pa.list_(pa.int32())),
        }
    )


def _divide(rows: pa.Table, total: int, sizes: Sizes) -> tuple[Packed, Packed]:
    """Return a group's training pool and held-out documents: the first by hash, at least one, up to `heldout` or a third of the text."""
    rows = rows.sort_by([("order", "ascending"), ("id", "ascending")])
    reached = np.cumsum(rows["bytes"].to_numpy())
    limit = min(sizes.heldout * TEXT_PER_TOKEN, total // 3)
    count = max(1, int(np.searchsorted(reached, limit, side="right")))
    pool = int(np.searchsorted(reached, int(reached[count - 1]) + sizes.training * TEXT_PER_TOKEN)) + 1
    return _pack(rows.slice(count, pool - count), sizes.row), _pack(rows.slice(0, count), sizes.row)


def _pack(rows: pa.Table, sequence_length: int) -> Packed:
    return Packed.read(pa.table(pack(rows["tokens"], rows["id"].to_pylist(), sequence_length)))


@dataclass(frozen=True)
class Pools:
    """The packed training text, the held-out pieces and the held-out documents' ids of each group."""

    training: tuple[Packed, ...]
    heldout: tuple[list[Any], ...]
    heldout_ids: tuple[frozenset[str], ...]

    @staticmethod
    @lru_cache(maxsize=1)
    def read(rows: PoolRows) -> Pools:
        divided = [_divide(part.read(), total, rows.sizes) for part, total in zip(rows.parts, rows.totals, strict=True)]
        return Pools(
            tuple(pool for pool, _ in divided),
            tuple(_pieces(held, rows.sizes.heldout) for _, held in divided),
            tuple(frozenset(held.ids) for _, held in divided),
        )

    def mix(self, shares: Sequence[float], rows_per_step: int, seed: int, begin: int) -> Mixed:
        """Return steps whose rows come from the groups in these shares. `seed`: for the row order of each group."""
        readers = [Reader(p, np.zeros(len(p.owners), dtype=bool), 1, seed, begin) for p in self.training]
        return Mixed(readers, np.asarray(shares, dtype=np.float64), rows_per_step)


def _pieces(packed: Packed, limit: int) -> list[Any]:
    """Return the first pieces of at least two tokens each with at least `limit` tokens in total, or all such pieces."""
    useful = np.flatnonzero(packed.sizes > 1)
    count = int(np.searchsorted(np.cumsum(packed.sizes[useful]), limit)) + 1
    return [packed.piece(index).astype(np.int64) for index in useful[:count].tolist()]


@dataclass
class Mixed:
    """Steps that draw rows from several readers in fixed shares.

    Row t comes from the reader that is farthest behind its share, so that the rows so far match the shares to about one row. The k-th row
    of a reader is the same in every mixture with the same seed."""

    readers: list[Reader]
    shares: np.ndarray[Any, np.dtype[np.float64]]
    rows_per_step: int
    _taken: list[tuple[int, int]] = field(default_factory=list)
    _counts: list[int] = field(default_factory=list)

    def _slot(self, index: int) -> tuple[int, int]:
        """Return the number of the reader of row `index`, and the number of earlier rows from this reader."""
        if not self._counts:
            self._counts = [0] * len(self.readers)
        while len(self._taken) <= index:
            behind = self.shares * (len(self._taken) + 1) - np.array(self._counts)
            group = int(behind.argmax())
            self._taken.append((group, self._counts[group]))
            self._counts[group] += 1
        return self._taken[index]

    def _spans(self, step: int) -> list[tuple[int, int, int]]:
        results = []
        for index in range((step - 1) * self.rows_per_step, step * self.rows_per_step):
            group, number = self._slot(index)
            results += [(group, start, stop) for start, stop in self.readers[group].pieces(number + 1)]
        return results

    def lengths(self, step: int) -> list[int]:
        return [stop - start for _, start, stop in self._spans(step)]

    def batches(self, step: int, micro_batch_tokens: int) -> list[Targets]:
        """Return the step's rows as micro-batches of about `micro_batch_tokens`, whose gradients add up."""
        from puna.models.training.objectives.base import Targets

        return [
            Targets.from_documents([self.readers[group].packed.tokens[start:stop] for group, start, stop in spans])
            for spans in batch_by_size(self._spans(step), lambda span: span[2] - span[1], micro_batch_tokens)
        ]
