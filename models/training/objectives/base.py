"""The common part of objectives: target tokens, and the totals by which a step's sums are divided.

Objectives count denominators (`totals`: tokens, answers, pairs) without the model. The loop adds these counts over the step, and every
micro-batch divides its sums by the totals. So losses, gradients and metrics of micro-batches add up (not with dropout or experts)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Generic, Protocol, Self, TypeVar

import numpy as np
import torch
from numpy.typing import ArrayLike, DTypeLike
from torch import Tensor

from puna.models.config import ModelConfig
from puna.models.forest import Forest

BatchT = TypeVar("BatchT")
Totals = Mapping[str, float]
Metrics = dict[str, Tensor]
Ask = Callable[[Callable[[Any, Any], Tensor], Any], Tensor]


class Model(Protocol):
    """The interface of a model that objectives call: `Transformer` has these methods, and PEFT's models forward the calls."""

    config: ModelConfig

    def parameters(self) -> Iterator[Tensor]:
        """Return an iterator over the weights."""

    def hidden(self, forest: Forest) -> Tensor:
        """Return the final hidden states [T, D]."""

    def scalar(self, hidden_ND: Tensor) -> Tensor:
        """Return the scalar head's output [N]."""

    def logits(self, hidden_ND: Tensor) -> Tensor:
        """Return the language-model head's logits [N, V]."""

    def token_logprobs(self, forest: Forest, positions: Tensor, targets: Tensor, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
        """Return, in nats, the targets' log-probs [N] and the entropies [N] of the distributions that predict them."""

    def normalizers(self, forest: Forest, positions: Tensor, targets: Tensor) -> Tensor:
        """Return, in nats, the targets' log-probs and the log-sum-exps of the logits that predict them, [2, N]."""

    def cross_entropy(self, forest: Forest, positions: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
        """Return the weighted sum of the targets' negative log-probs, a scalar in nats."""


@dataclass(frozen=True)
class Targets:
    """The target tokens of a forest, answer by answer.

    N targets in A answers to P prompts, in the order of the row:

    forest     the row of T tokens
    positions  [N] int64, index in the row of the token from which the target is predicted
    tokens     [N] int64, the targets
    mask       [N] bool, False if a target does not count in the loss
    lengths    [A] int64, targets per answer; they sum to N and an answer's targets are contiguous
    last       [A] int64, index in the row of each answer's last token
    prompt     [A] int64, index of each answer's prompt"""

    forest: Forest
    positions: Tensor
    tokens: Tensor
    mask: Tensor
    lengths: Tensor
    last: Tensor
    prompt: Tensor

    @staticmethod
    def from_documents(documents: Sequence[Sequence[int] | np.ndarray[Any, np.dtype[np.integer[Any]]]]) -> Targets:
        """Return the targets of documents side by side: every token except a document's first is a target."""
        row = np.concatenate([np.asarray(document, dtype=np.int64) for document in documents])
        return Targets.from_packed(row, [len(document) for document in documents])

    @staticmethod
    def from_packed(tokens: ArrayLike, lengths: Sequence[int]) -> Targets:
        """Return the targets of packed documents. `tokens`: ids [T]; `lengths`: at least 1 each, adding up to T (ValueError otherwise)."""
        row = torch.as_tensor(np.asarray(tokens, dtype=np.int64))
        sizes = torch.as_tensor(np.asarray(lengths, dtype=np.int64))
        if int(sizes.sum()) != len(row) or (len(sizes) and int(sizes.min()) < 1):
            raise ValueError(f"document lengths add up to {int(sizes.sum())}, the row has {len(row)} tokens")
        ends = sizes.cumsum(0)
        keep = torch.ones(len(row), dtype=torch.bool)
        keep[ends - 1] = False
        positions = keep.nonzero().squeeze(1)
        return Targets(
            forest=Forest.pack(row.split(sizes.tolist())), positions=positions, tokens=row[positions + 1],
            mask=torch.ones(len(positions), dtype=torch.bool), lengths=sizes - 1, last=ends - 1, prompt=torch.arange(len(sizes)),
        )  # fmt: skip

    @staticmethod
    def from_answers(
        prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[Sequence[int]]],
        masks: Sequence[Sequence[Sequence[bool]]] | None = None,
    ) -> Targets:  # fmt: skip
        """Return the targets of prompts with their answers as branches: every answer token. `masks[p][a]` holds one flag per token of the
        answer, False if the token does not count in the loss. Raise ValueError if a prompt or an answer is empty or flags are missing."""
        forests: list[Forest] = []
        positions: list[np.ndarray[Any, Any]] = []
        last: list[int] = []
        start = 0
        for p, (prompt, branches) in enumerate(zip(prompts, answers, strict=True)):
            if not len(prompt) or not all(len(answer) for answer in branches):
                raise ValueError(f"prompt {p} or one of its answers has no tokens")
            forests.append(Forest.branch(prompt, branches))
            offset = start + len(prompt)
            for answer in branches:
                before = np.arange(offset - 1, offset - 1 + len(answer))
                # An answer's first token follows the prompt, wherever its branch stands in the row.
                before[0] = start + len(prompt) - 1
                positions.append(before)
                offset += len(answer)
                last.append(offset - 1)
            start = offset
        flat = [np.asarray(answer, dtype=np.int64) for branches in answers for answer in branches]
        flat_masks = [mask for branches in masks for mask in branches] if masks is not None else [[True] * len(answer) for answer in flat]
        flags = [np.asarray(mask, bool) for mask in flat_masks]
        lengths = [len(answer) for answer in flat]
        if lengths != [len(flag) for flag in flags]:
            raise ValueError("each answer token needs one mask flag, answer by answer")
        return Targets(
            forest=Forest.concatenate(forests), positions=torch.from_numpy(_join(positions, np.int64)),
            tokens=torch.from_numpy(_join(flat, np.int64)), mask=torch.from_numpy(_join(flags, np.bool_)),
            lengths=torch.tensor(lengths, dtype=torch.int64), last=torch.tensor(last, dtype=torch.int64),
            prompt=torch.repeat_interleave(torch.arange(len(prompts)), torch.tensor([len(branches) for branches in answers])),
        )  # fmt: skip

    def __len__(self) -> int:
        """Return the number of tokens of the row, the cost of a step."""
        return len(self.forest)

    @property
    def answers(self) -> int:
        return len(self.lengths)

    @property
    def rows(self) -> Tensor:
        """Return [N] int64: each target's own index in the row, not that of the token from which it is predicted."""
        before = self.lengths.cumsum(0) - 1 - self.last
        return torch.arange(len(self.tokens), device=self.tokens.device) - before.repeat_interleave(self.lengths)

    def sum_by_answer(self, values: Tensor) -> Tensor:
        """Return the sums of `values` [N] over each answer's unmasked targets, [A]; 0 for an answer without such targets."""
        return sum_segments(torch.where(self.mask, values, values.new_zeros(())), self.lengths)

    def to(self, device: torch.device | str) -> Targets:
        return move(self, device)


@dataclass(frozen=True)
class Batch:
    """The targets of a batch; subclasses add the tensors that an objective needs."""

    targets: Targets

    def __len__(self) -> int:
        return len(self.targets)

    def to(self, device: torch.device | str) -> Self:
        return move(self, device)


def move(batch: BatchT, device: torch.device | str) -> BatchT:
    """Return a copy of a dataclass with its fields on a device, except those without a method `to`."""
    values = {field.name: getattr(batch, field.name) for field in fields(batch)}  # type: ignore[arg-type]
    changes = {name: value.to(device) for name, value in values.items() if hasattr(value, "to")}
    return replace(batch, **changes)  # type: ignore[type-var]


def _join(parts: list[np.ndarray[Any, Any]], dtype: DTypeLike) -> np.ndarray[Any, Any]:
    return np.concatenate(parts).astype(dtype) if parts else np.zeros(0, dtype)


def sum_segments(values: Tensor, lengths: Tensor) -> Tensor:
    """Return the sums [A] of consecutive runs of `values` [N]; `lengths` [A] int64 add up to N. A segmented reduction is used, because on a
    GPU the atomics of `index_add` add in a different order each time."""
    if not len(lengths):
        return values.new_zeros(0)
    return torch.segment_reduce(values, "sum", lengths=lengths, unsafe=True, initial=0)


class Objective(Generic[BatchT]):
    """A loss of a model on a batch.

    `objective(model, batch, totals)` returns ``(loss, metrics)``: the batch's share of the step's loss (a differentiable scalar), and
    the batch's shares of the step's metrics (detached scalars). Without `totals` the batch is the whole step."""

    def totals(self, batch: BatchT) -> dict[str, float]:
        """Return this batch's part of the step's denominators, by name."""
        raise NotImplementedError

    def measure(self, ask: Ask, batch: BatchT) -> dict[str, float]:
        """Return sums over this batch that need a forward pass, by name, without a gradient; the loop adds them to the step's totals.
        `ask(compute, targets)` returns `compute(model, targets)`, whichever processes hold the model."""
        return {}

    def __call__(self, model: Model, batch: BatchT, totals: Totals | None = None) -> tuple[Tensor, Metrics]:
        if totals is None:
            totals = {**self.totals(batch), **self.measure(lambda compute, part: compute(model, part), batch)}
        return self.loss(model, batch, totals)

    def loss(self, model: Model, batch: BatchT, totals: Totals) -> tuple[Tensor, Metrics]:
        """Return the loss and metrics of this batch, divided by `totals`, the step's totals."""
        raise NotImplementedError


def divide(value: Tensor, total: float) -> Tensor:
    """Return `value / total`; if `total` is 0, return 0 with a zero gradient, not NaN."""
    return value / total if total else value * 0.0


def target_logprobs(model: Model, targets: Targets) -> Tensor:
    """Return [N] float32, log p(target | tokens visible at its position)."""
    return model.token_logprobs(targets.forest, targets.positions, targets.tokens)[0]
