"""Packing of documents into rows of tokens, and readers of these rows for training."""

from __future__ import annotations

import contextlib
import os
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from puna.models.training.packing import Later, batch_by_size
from puna.models.training.schedules import Ramp
from puna.stages.executors import ranks
from puna.stages.training.corpus import rank
from puna.storage import Artifact, PunaError

if TYPE_CHECKING:
    from puna.models.training.objectives.base import Targets
    from puna.models.transformer import Transformer


def pack(tokens: Any, ids: list[str], sequence_length: int) -> dict[str, pa.Array]:
    """Return rows packed from documents (lists of token ids), in order: `tokens`, and per piece `lengths` and `documents` (ids)."""
    if isinstance(tokens, pa.ChunkedArray):
        tokens = tokens.combine_chunks()
    flat = tokens.flatten()
    ends = np.cumsum(pc.list_value_length(tokens).to_numpy(zero_copy_only=False).astype(np.int64))
    total = int(ends[-1]) if len(ends) else 0
    cuts = np.arange(0, total + sequence_length, sequence_length).clip(max=total)
    cuts = np.unique(cuts) if total else np.zeros(1, np.int64)
    borders = np.unique(np.concatenate([cuts, ends]))
    pieces = np.diff(borders, prepend=0)[borders > 0] if total else np.zeros(0, np.int64)
    stops = borders[borders > 0] if total else np.zeros(0, np.int64)
    owners = np.searchsorted(ends, stops - 1, side="right")
    offsets = np.searchsorted(stops, cuts, side="right")
    return {
        "tokens": pa.ListArray.from_arrays(pa.array(cuts, pa.int32()), flat),
        "lengths": pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), pa.array(pieces, pa.int32())),
        "documents": pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), pa.array([ids[o] for o in owners], pa.string())),
    }


Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Packed:
    """All packed rows as flat arrays. A piece is the part of a document in one row.

    tokens   [T] int32
    starts   [P + 1], where each piece starts in `tokens`
    rows     [R + 1], the first piece of each row
    owners   [P], index into `ids` of each piece's document
    largest  the largest token id that was read"""

    tokens: npt.NDArray[np.int32]
    starts: Ints
    rows: Ints
    owners: Ints
    ids: tuple[str, ...]
    largest: int = -1

    @staticmethod
    def read(source: Artifact | pa.Table, file: Path | None = None) -> Packed:
        """Return the rows of an artifact's table `tokens`, or of a table in memory. With `file`, each rank of a training run writes a share
        of the tokens to it, and all ranks memory-map it. Raise PunaError without rows, or if `lengths` do not fit the tokens."""
        source_name = source.id if isinstance(source, Artifact) else "a pool"
        mesh = ranks.mesh()
        count, at = (1, 0) if file is None else (mesh.layout.processes, mesh.index)
        flat = {name: list[Any]() for name in ("tokens", "sizes", "per_row", "owners")}
        numbers: dict[str, int] = {}
        total, largest = 0, -1
        part = None if file is None else file.with_name(f".{file.name}.part")
        with contextlib.nullcontext() if part is None else open(os.open(part, os.O_RDWR | os.O_CREAT), "r+b") as out:
            for number, piece in enumerate(_pieces(source)):
                rows = piece(["lengths", "documents"])
                lengths, documents = rows["lengths"].combine_chunks(), rows["documents"].combine_chunks().flatten().dictionary_encode()
                flat["sizes"].append(lengths.flatten().to_numpy().astype(np.int64))
                flat["per_row"].append(pc.list_value_length(lengths).to_numpy().astype(np.int64))
                lookup = np.array([numbers.setdefault(id_, len(numbers)) for id_ in documents.dictionary.to_pylist()], dtype=np.int64)
                flat["owners"].append(lookup[documents.indices.to_numpy()])
                size = int(flat["sizes"][-1].sum())
                if number % count == at:
                    ids = piece(["tokens"])["tokens"].combine_chunks().flatten().to_numpy().astype(np.int32)
                    if len(ids) != size:
                        raise PunaError(f"{source_name}: {len(rows)} rows have {len(ids)} tokens, but {size} according to their `lengths`")
                    largest = max(largest, int(ids.max(initial=-1)))
                    if out is None:
                        flat["tokens"].append(ids)
                    else:
                        os.pwrite(out.fileno(), ids.data, ids.itemsize * total)
                total += size
        if not flat["sizes"]:
            raise PunaError(f"{source_name} has no rows to train on")
        columns = {name: np.concatenate(arrays) for name, arrays in flat.items() if arrays}
        if file is not None and part is not None:
            largest = max(map(int, mesh.gather_texts(str(largest))))  # now all have written
            if at == 0:
                os.truncate(part, 4 * total)
                os.replace(part, file)
            mesh.wait()
            columns["tokens"] = np.memmap(file, np.int32, "r") if total else np.zeros(0, np.int32)
        return Packed(
            tokens=columns["tokens"], starts=np.concatenate([[0], np.cumsum(columns["sizes"])]),
            rows=np.concatenate([[0], np.cumsum(columns["per_row"])]), owners=columns["owners"], ids=tuple(numbers), largest=largest,
        )  # fmt: skip

    @property
    def sizes(self) -> Ints:
        """Return the number of tokens of each piece, [P]."""
        return np.diff(self.starts)

    @property
    def row_length(self) -> int:
        """Return the number of tokens of the longest row."""
        return int(np.diff(self.starts[self.rows]).max())

    def piece(self, index: int) -> npt.NDArray[np.int32]:
        return self.tokens[self.starts[index] : self.starts[index + 1]]

    def of(self, ids: Collection[str]) -> npt.NDArray[np.bool_]:
        """Return a mask [P] of the pieces of the documents `ids`."""
        return np.asarray(np.array([id_ in ids for id_ in self.ids], dtype=bool)[self.owners], dtype=np.bool_)

    def validation(self, share: float, tokens: int) -> npt.NDArray[np.bool_]:
        """Return a mask [P] of the pieces held out for the validation loss.

        They are all pieces of the documents with the smallest id hashes: enough for `tokens` tokens, counting one copy of each document,
        but at most `share` of all documents and at least one. Raise PunaError if no other document remains."""
        order = sorted(range(len(self.ids)), key=lambda d: (rank("validation", self.ids[d]), self.ids[d]))
        once = self._first_copies()
        sizes = np.bincount(self.owners[once], weights=self.sizes[once], minlength=len(self.ids))
        count = max(1, int(share * len(self.ids)))
        count = min(count, int(np.searchsorted(np.cumsum(sizes[order]), tokens)) + 1)
        if count >= len(self.ids):
            raise PunaError("the tokens are from only one document, but one is needed to train on and one to measure the loss on")
        mask = np.zeros(len(self.ids), dtype=bool)
        mask[order[:count]] = True
        return np.asarray(mask[self.owners], dtype=np.bool_)

    def _first_copies(self) -> npt.NDArray[np.bool_]:
        """Return a mask [P] of every document's first copy: its pieces up to the first that does not continue in the next row."""
        first_of_row = np.zeros(len(self.owners) + 1, dtype=bool)
        first_of_row[self.rows] = True
        # A piece continues in the next row if the next piece starts that row and belongs to the same document. If two copies meet at the
        # end of a row, the second counts as the end of the first, which is harmless.
        goes_on = np.zeros(len(self.owners), dtype=bool)
        goes_on[:-1] = first_of_row[1:-1] & (self.owners[1:] == self.owners[:-1])
        ends = np.flatnonzero(~goes_on)
        # np.unique returns the first end of each document, in the order of `ids`.
        return np.arange(len(self.owners)) <= ends[np.unique(self.owners[ends], return_index=True)[1]][self.owners]

    def validation_pieces(self, held: npt.NDArray[np.bool_]) -> list[Ints]:
        """Return the token ids of the pieces in the mask `held` that have a token to predict, each document once."""
        candidates = np.flatnonzero(held & self._first_copies() & (self.sizes > 1))
        return [self.piece(int(index)).astype(np.int64) for index in candidates]


@dataclass
class Reader:
    """A reader of each training step's rows. It reads every row with a token to predict once per epoch, in a different order each epoch.

    `excluded` [P] marks pieces to leave out. `join` consecutive rows make one longer row, in which a document cut between these rows is
    whole again (`begin` is the token that starts every document). `growth` replaces `rows_per_step` with a number of rows for each step.
    `longest` gives a length for each step; documents are cut at its multiples. The constructor raises PunaError if no row remains."""

    packed: Packed
    excluded: npt.NDArray[np.bool_]
    rows_per_step: int
    seed: int
    begin: int
    join: int = 1
    growth: Ramp | None = None
    longest: Ramp | None = None
    first: int = 0  # row of the order at which step 1 begins; negative if the reader starts in a later step
    _groups: Ints = field(init=False)

    def __post_init__(self) -> None:
        useful = np.add.reduceat((~self.excluded & (self.packed.sizes > 1)).astype(np.int64), self.packed.rows[:-1]) > 0
        firsts = np.arange(0, len(self.packed.rows) - 1, self.join)
        self._groups = firsts[np.add.reduceat(useful.astype(np.int64), firsts) > 0]
        if not len(self._groups):
            raise PunaError("no row has tokens to train on: all its documents are held out")
        self._order = lru_cache(maxsize=4)(self._shuffle)

    @property
    def epoch_rows(self) -> int:
        """Return the number of rows, each of `join` packed rows, per epoch."""
        return len(self._groups)

    def _shuffle(self, epoch: int) -> Ints:
        return np.random.default_rng([self.seed, epoch]).permutation(self._groups)

    def pieces(self, step: int) -> list[tuple[int, int]]:
        """Return (start, stop) in `packed.tokens` of all pieces in step `step` (1-based)."""
        results: list[tuple[int, int]] = []
        for position in range(self.rows_before(step), self.rows_before(step + 1)):
            epoch, index = divmod(self.first + position, len(self._groups))
            row = self._row(int(self._order(epoch)[index]))
            results += row if self.longest is None else _cut(row, self.longest.at(step))
        return results

    def rows_before(self, step: int) -> int:
        return (step - 1) * self.rows_per_step if self.growth is None else self.growth.before(step)

    def _row(self, first: int) -> list[tuple[int, int]]:
        packed = self.packed
        results: list[tuple[int, int]] = []
        last = min(first + self.join, len(packed.rows) - 1)
        previous = -2
        for index in range(int(packed.rows[first]), int(packed.rows[last])):
            if self.excluded[index]:
                continue
            start, stop = int(packed.starts[index]), int(packed.starts[index + 1])
            whole = previous == index - 1 and packed.owners[index] == packed.owners[previous]
            if whole and packed.tokens[start] != self.begin:
                results[-1] = (results[-1][0], stop)
            else:
                results.append((start, stop))
            previous = index
        return results

    def lengths(self, step: int) -> list[int]:
        return [stop - start for start, stop in self.pieces(step)]

    def later(self, step: int, micro_batch_tokens: int) -> list[Later[Targets]]:
        """Return the step as micro-batches of about `micro_batch_tokens` tokens, whose gradients add up; each is read when needed."""
        spans = batch_by_size(self.pieces(step), lambda span: span[1] - span[0], micro_batch_tokens)
        return [Later(sum(stop - start for start, stop in some), partial(self._targets, some)) for some in spans]

    def batches(self, step: int, micro_batch_tokens: int) -> list[Targets]:
        """Return the micro-batches of `later`, already read."""
        return [one.make() for one in self.later(step, micro_batch_tokens)]

    def _targets(self, spans: Sequence[tuple[int, int]]) -> Targets:
        from puna.models.training.objectives.base import Targets

        return Targets.from_documents([self.packed.tokens[start:stop] for start, stop in spans])


@dataclass(frozen=True)
class Relay:
    """The consecutive readers of a phase: `readers[i]` reads from step `starts[i]` (1-based) on."""

    readers: Sequence[Reader]
    starts: Sequence[int]

    def at(self, step: int) -> Reader:
        return self.readers[bisect_right(self.starts, step) - 1]

    @property
    def epoch_rows(self) -> int:
        return sum({id(reader.packed): reader.epoch_rows for reader in self.readers}.values())


def _pieces(source: Artifact | pa.Table) -> Iterator[Callable[[list[str]], pa.Table]]:
    """Yield functions that read given columns of up to 4096 rows each, since an Arrow list array cannot hold more than 2^31 elements."""
    if isinstance(source, Artifact):
        yield from (lambda columns, part=part: part.of(columns).read() for part in source.parts("tokens", rows=4096))
    else:
        yield from (lambda columns, part=part: part.select(columns) for part in map(pa.table, source.to_batches(4096)))


def _cut(row: list[tuple[int, int]], length: int) -> list[tuple[int, int]]:
    cuts, at = [], 0
    for start, stop in row:
        while start < stop:
            size = min(stop - start, length - at % length)
            cuts.append((start, start + size))
            start, at = start + size, at + size
    return cuts


def total_nats(model: Transformer, rows: Iterable[Targets]) -> tuple[float, int]:
    """Return the cross-entropy summed over all targets of packed rows, in nats, and the number of targets. If the model is divided among
    ranks, all must call this together."""
    import torch

    from puna.models.training.objectives.base import target_logprobs
    from puna.models.training.parallel.parallel import alone

    held, total, count = alone(model), 0.0, 0
    for targets in rows:
        with torch.no_grad():
            total -= float(held.ask(target_logprobs, targets.to(held.device)).double().sum())
        count += len(targets.tokens)
    return total, count


def mean_loss(model: Transformer, pieces: Sequence[Any], micro_batch_tokens: int = 8192) -> float:
    """Return the mean cross-entropy over the targets of all pieces (token ids), in nats per token. Raise PunaError without targets."""
    from puna.models.training.objectives.base import Targets

    total, count = total_nats(model, map(Targets.from_documents, batch_by_size(list(pieces), len, micro_batch_tokens)))
    if not count:
        raise PunaError("the held-out documents have no token to predict")
    return total / count
