"""Which examples a step sees, and how they are packed into rows: pure functions of the step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import numpy as np

ExampleT = TypeVar("ExampleT")
BatchT = TypeVar("BatchT")


def epoch_order(count: int, epoch: int, seed: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """The order [count] int64 in which an epoch (from 0) visits the examples."""
    return np.random.default_rng([seed, epoch]).permutation(count)


def step_indices(step: int, count: int, batch_size: int, seed: int) -> list[int]:
    """Examples of a step, counted from 1: `batch_size` next ones of the endless row of epochs.

    Every example comes exactly once per epoch, also where a step spans two of them, so a resumed run
    neither skips nor repeats one.
    """
    if count < 1 or batch_size < 1 or step < 1:
        raise ValueError(f"step, count and batch_size must be positive: {step}, {count}, {batch_size}")
    first = (step - 1) * batch_size
    chosen: list[int] = []
    while len(chosen) < batch_size:
        epoch, start = divmod(first + len(chosen), count)
        order = epoch_order(count, epoch, seed)
        chosen += order[start : start + batch_size - len(chosen)].tolist()
    return chosen


def pack(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Examples [n] of given lengths into rows of at most `capacity` tokens: lists of indices.

    First-fit decreasing; at most 11/9 of the fewest rows possible, plus one. ValueError for an example
    longer than a row.
    """
    for index, length in enumerate(lengths):
        if length > capacity:
            raise ValueError(f"example {index} has {length} tokens, a row holds {capacity}")
    rows: list[list[int]] = []
    room: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        row = next((r for r, free in enumerate(room) if free >= lengths[index]), None)
        if row is None:
            rows.append([])
            room.append(capacity)
            row = len(rows) - 1
        rows[row].append(index)
        room[row] -= lengths[index]
    return [sorted(row) for row in rows]


def pack_documents(
    documents: Sequence[Sequence[int]], length: int
) -> tuple[np.ndarray[Any, np.dtype[np.int64]], list[list[tuple[int, int]]]]:
    """Documents end to end, cut into rows of exactly `length` tokens.

    Returns rows [R, length] int64 and, for each row, its pieces as (document, tokens). A document that
    crosses a row's end goes on in the next row; the last tokens that fill no row are left out.
    """
    stream = np.concatenate([np.asarray(d, dtype=np.int64) for d in documents] or [np.zeros(0, np.int64)])
    count = len(stream) // length
    ends = np.cumsum([len(d) for d in documents], dtype=np.int64)
    pieces: list[list[tuple[int, int]]] = []
    for row in range(count):
        position, stop, found = row * length, (row + 1) * length, []
        document = int(np.searchsorted(ends, position, side="right"))
        while position < stop:
            end = min(int(ends[document]), stop)
            if end > position:
                found.append((document, end - position))
            position, document = end, document + 1
        pieces.append(found)
    return stream[: count * length].reshape(count, length), pieces


class Sampler(Generic[ExampleT, BatchT]):
    """Batches of a list of examples as the training loop wants them: step -> micro-batches.

    A step takes `batch_size` examples, packs them into rows of at most `capacity` tokens by `length` of
    an example, and calls `collate` on the examples of each row.
    """

    def __init__(
        self,
        examples: Sequence[ExampleT],
        batch_size: int,
        collate: Callable[[list[ExampleT]], BatchT],
        *,
        length: Callable[[ExampleT], int],
        capacity: int,
        seed: int,
    ) -> None:
        if not len(examples):
            raise ValueError("there are no examples to train on")
        self.examples, self.batch_size, self.collate = examples, batch_size, collate
        self.length, self.capacity, self.seed = length, capacity, seed

    def steps(self, epochs: float) -> int:
        """Steps in that many epochs, the last one full."""
        return max(1, int(np.ceil(epochs * len(self.examples) / self.batch_size)))

    def __call__(self, step: int) -> list[BatchT]:
        chosen = step_indices(step, len(self.examples), self.batch_size, self.seed)
        examples = [self.examples[i] for i in chosen]
        rows = pack([self.length(example) for example in examples], self.capacity)
        return [self.collate([examples[i] for i in row]) for row in rows]
