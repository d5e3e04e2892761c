"""The choice of a step's examples and their packing into rows, as pure functions of the step."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Generic, TypeVar

import numpy as np

T = TypeVar("T")
ExampleT = TypeVar("ExampleT")
BatchT = TypeVar("BatchT")


@lru_cache(maxsize=4)
def epoch_order(count: int, epoch: int, seed: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return a permutation [count] int64: the order in which an epoch (0-based) visits the examples."""
    return np.random.default_rng([seed, epoch]).permutation(count)


def step_indices(step: int, count: int, batch_size: int, seed: int) -> list[int]:
    """Return the indices of the examples of a step (1-based): the next `batch_size` in an endless sequence of epochs. Every example occurs
    exactly once per epoch, even if a step spans two epochs. Raise ValueError if `step` or `count` is below 1."""
    if count < 1 or step < 1:
        raise ValueError(f"step and count must be positive: {step}, {count}")
    indices: list[int] = []
    while len(indices) < batch_size:
        epoch, start = divmod((step - 1) * batch_size + len(indices), count)
        order = epoch_order(count, epoch, seed)
        indices += order[start : start + batch_size - len(indices)].tolist()
    return indices


def pack(lengths: Sequence[int], micro_batch_tokens: int) -> list[list[int]]:
    """Return rows of at most `micro_batch_tokens` tokens, as lists of indices of examples.

    Best-fit decreasing: the longest example first, into the fullest row that has room, found by bisection. There are at most 11/9 of the
    fewest possible rows, plus one. Raise ValueError if an example is longer than a row."""
    for index, length in enumerate(lengths):
        if length > micro_batch_tokens:
            raise ValueError(f"example {index} has {length} tokens, a row holds {micro_batch_tokens}")
    rows: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (free tokens, row), ascending
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        place = bisect_left(room, (lengths[index], 0))
        free, row = room.pop(place) if place < len(room) else (micro_batch_tokens, len(rows))
        if row == len(rows):
            rows.append([])
        rows[row].append(index)
        insort(room, (free - lengths[index], row))
    return [sorted(row) for row in rows]


@dataclass(frozen=True)
class Later(Generic[BatchT]):
    """A micro-batch of `size` tokens that is built only on the rank that computes it."""

    size: int
    make: Callable[[], BatchT]

    def __len__(self) -> int:
        return self.size


def batch_by_size(items: Sequence[T], size: Callable[[T], int], limit: int) -> Iterator[list[T]]:
    """Yield consecutive items in groups of total size at most `limit`; a larger item is a group of its own."""
    group: list[T] = []
    filled = 0
    for item in items:
        if group and filled + size(item) > limit:
            yield group
            group, filled = [], 0
        group.append(item)
        filled += size(item)
    if group:
        yield group


class Sampler(Generic[ExampleT, BatchT]):
    """A function from a step to its micro-batches, for the training loop. The constructor raises ValueError without examples.

    A step takes `batch_size` examples, and packs them into rows of at most `micro_batch_tokens` tokens. `length` returns an example's
    number of tokens. `collate` makes a micro-batch of a row's examples."""

    def __init__(
        self, examples: Sequence[ExampleT], batch_size: int, collate: Callable[[list[ExampleT]], BatchT], *,
        length: Callable[[ExampleT], int], micro_batch_tokens: int, seed: int,
    ) -> None:  # fmt: skip
        if not len(examples):
            raise ValueError("there are no examples to train on")
        self.examples, self.batch_size, self.collate = examples, batch_size, collate
        self.length, self.micro_batch_tokens, self.seed = length, micro_batch_tokens, seed

    def visited_examples(self, steps: int) -> list[int]:
        """Return the indices of the examples that the first `steps` steps see, in ascending order."""
        return sorted(epoch_order(len(self.examples), 0, self.seed)[: self.batch_size * steps].tolist())

    def __call__(self, step: int) -> list[BatchT]:
        indices = step_indices(step, len(self.examples), self.batch_size, self.seed)
        examples = [self.examples[i] for i in indices]
        rows = pack([self.length(example) for example in examples], self.micro_batch_tokens)
        return [self.collate([examples[i] for i in row]) for row in rows]
