"""Weights of which each rank keeps some rows, and all of them only while a step or a question is computed.

A pipeline stage uses its weights once per micro-batch, so they are gathered once per step, and their gradients are scattered once: as for
Llama 3 (2024, section 3.3.2), where FSDP2 would gather and scatter them for each micro-batch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from puna.models.training.parallel.base import no_values
from puna.models.training.parallel.collectives import gather_single, padded, scatter_single
from puna.models.training.parallel.mesh import buckets, cut


class Gathered:
    """A context in which a module's weights `whole` have values, rounded to their dtype; outside, they are NaN and take no memory. At its
    end, the gradient of each rank's rows is the sum of all ranks' gradients.

    rows: this rank's rows of each weight, in fp32, as `bounds` divides them over the ranks of `group`."""

    def __init__(self, whole: Mapping[str, nn.Parameter], rows: Mapping[str, nn.Parameter], group: Any) -> None:
        self._whole, self._rows, self._group, self._ranks = whole, rows, group, dist.get_world_size(group)
        self._sums: dict[str, Tensor] = {}
        for name, weight in whole.items():
            if weight.requires_grad and weight.dtype != torch.float32:
                weight.register_post_accumulate_grad_hook(partial(self._collect, name))

    @torch.no_grad()
    def __enter__(self) -> None:
        for names, sizes in self._buckets(self._whole):
            flat = [self._rows[name].flatten() for name in names]
            own = torch.cat([nn.functional.pad(rows, (0, size - len(rows))) for rows, size in zip(flat, sizes, strict=True)])
            own = own.to(self._whole[names[0]].dtype)
            every = own.new_empty(self._ranks * len(own))
            gather_single(every, own, group=self._group)
            for name, values in zip(names, every.view(self._ranks, -1).split(sizes, 1), strict=True):
                weight = self._whole[name]
                weight.data = values.reshape(-1, *weight.shape[1:])[: len(weight)]

    @torch.no_grad()
    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        both = {name: self._sums.pop(name, weight.grad) for name, weight in self._whole.items()}
        sums = {name: gradient for name, gradient in both.items() if gradient is not None}  # in one order on all ranks
        for names, sizes in self._buckets(sums) if error is None else ():
            every = torch.cat([padded(sums[name], self._ranks).view(self._ranks, -1) for name in names], 1)
            own = every.new_empty(every.shape[1])
            scatter_single(own, every.flatten(), group=self._group)
            for name, values in zip(names, own.split(sizes), strict=True):
                rows = self._rows[name]
                rows.grad = values.view(-1, *rows.shape[1:])[: len(rows)]
        for weight in self._whole.values():
            weight.data, weight.grad = no_values(weight.shape, weight.dtype, weight.device), None

    def _collect(self, name: str, weight: Tensor) -> None:
        """Add up the gradient of one micro-batch in fp32. In fp32, gradients add up by themselves."""
        assert weight.grad is not None
        gradient, weight.grad = weight.grad.float(), None
        self._sums[name] = self._sums[name].add_(gradient) if name in self._sums else gradient

    def _buckets(self, names: Mapping[str, object]) -> Iterator[tuple[list[str], list[int]]]:
        """Yield buckets of names, with the number of elements of a rank's padded rows of each."""
        for some in buckets(names, lambda name: self._whole[name].numel()):
            yield some, [cut(n, self._ranks) * math.prod(rest) for n, *rest in (self._whole[name].shape for name in some)]
