"""The forest: one layout for packed documents, preference pairs and many answers to one prompt.

A forest is a row of T tokens in depth-first order with `end[T]`: query q sees key k exactly when
k <= q < end[k]. Positions restart with each tree and continue from the parent in each branch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from puna.kernels.attention import ForestMask


@dataclass(frozen=True, eq=False)
class Forest:
    """Tokens [T] int64, subtree ends [T] int32 and position ids [T] int64, depth first. `end[k]` is one past the last token of k's
    subtree. The intervals k .. end[k] must nest; if they do not, `mask` raises ValueError and says where."""

    tokens: Tensor
    end: Tensor
    positions: Tensor

    def __len__(self) -> int:
        return self.tokens.shape[0]

    @staticmethod
    def pack(documents: Sequence[Sequence[int] | Tensor]) -> Forest:
        """Return a forest of documents side by side; none sees another. Raise ValueError for an empty document, or for no documents."""
        parts = [_ids(document) for document in documents]
        _refuse_empty(parts, "document")
        lengths = torch.tensor([len(part) for part in parts], dtype=torch.int64)
        stops = lengths.cumsum(0)
        total = int(stops[-1])
        starts = (stops - lengths).repeat_interleave(lengths)
        return Forest(tokens=torch.cat(parts), end=stops.to(torch.int32).repeat_interleave(lengths), positions=torch.arange(total) - starts)

    @staticmethod
    def branch(prompt: Sequence[int] | Tensor, answers: Sequence[Sequence[int] | Tensor]) -> Forest:
        """Return a forest of a prompt and its answers. An answer sees the prompt and itself. Raise ValueError if one of these is empty.

        Answer i starts at `len(prompt) + sum(len(a) for a in answers[:i])`."""
        trunk, branches = _ids(prompt), [_ids(answer) for answer in answers]
        _refuse_empty([trunk], "prompt")
        _refuse_empty(branches, "answer")
        below = Forest.pack(branches) if branches else Forest(trunk[:0], trunk[:0].int(), trunk[:0])
        size = len(trunk)
        total = size + len(below)
        return Forest(
            tokens=torch.cat([trunk, below.tokens]),
            end=torch.cat([torch.full((size,), total, dtype=torch.int32), below.end + size]),
            positions=torch.cat([torch.arange(size), below.positions + size]),
        )

    @staticmethod
    def concatenate(forests: Sequence[Forest]) -> Forest:
        """Return one forest of all trees of `forests`, side by side in this order; raise ValueError if `forests` is empty."""
        if not forests:
            raise ValueError("Forest.concatenate needs at least one forest")
        ends, offset = [], 0
        for forest in forests:
            ends.append(forest.end + offset)
            offset += len(forest)
        return Forest(
            tokens=torch.cat([forest.tokens for forest in forests]),
            end=torch.cat(ends),
            positions=torch.cat([forest.positions for forest in forests]),
        )

    @cached_property
    def mask(self) -> ForestMask:
        """Return the attention mask, derived once and shared by all layers."""
        return ForestMask.from_end(self.end)

    @cached_property
    def parents(self) -> Tensor:
        """Return [T] int64: the index of the token before each token on its path from the root; -1 at the first token of a tree.

        With `children = (forest.parents >= 0).nonzero()[:, 0]`, the pairs `(forest.parents[children], forest.tokens[children])` are all
        next-token predictions: the inputs of `Transformer.cross_entropy`."""
        parents = torch.arange(-1, len(self) - 1)
        path: list[tuple[int, int]] = []  # (stop, end) of the segments above
        for start, stop, end in self.mask.segments:
            while path and path[-1][1] <= start:
                path.pop()
            parents[start] = path[-1][0] - 1 if path else -1
            path.append((stop, end))
        return parents.to(self.tokens.device)

    def to(self, device: torch.device | str) -> Forest:
        """Return the forest on another device. Build its mask on the current device first, so that no step waits to read the segments."""
        if torch.device(device) == self.tokens.device:
            return self
        mask = self.mask.to(device)
        moved = Forest(self.tokens.to(device), mask.end, self.positions.to(device))
        moved.__dict__["mask"] = mask
        return moved


def _ids(tokens: Sequence[int] | Tensor) -> Tensor:
    return torch.as_tensor(tokens, dtype=torch.int64).reshape(-1)


def _refuse_empty(parts: list[Tensor], name: str) -> None:
    if name == "document" and not parts:
        raise ValueError("a forest needs at least one document")
    for index, part in enumerate(parts):
        if not len(part):
            raise ValueError(f"{name} {index} is empty: a forest holds at least one token of each")
