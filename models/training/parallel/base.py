"""A model under a layout: one rank's part, and the sums over ranks that make results equal to those of one process.

Every rank knows all of a step's micro-batches; they are dealt to the data-parallel ranks by their numbers of tokens. Losses and gradients
are shares of the step's totals, so they add up over data-parallel ranks as they do over micro-batches."""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from puna.kernels.adamw import gradient_norm
from puna.models.training.parallel.boxes import load, save
from puna.models.training.parallel.layout import AXES, READERS
from puna.models.training.parallel.mesh import Mesh, broadcast_text, buckets, by_load
from puna.models.training.state import Job, load_state, write_state
from puna.models.transformer import Transformer

Part = tuple[Any, bool]  # a micro-batch, and False if it is only a repeat, whose loss does not count (see `Parallel.deal`)
Values = dict[str, Tensor]
Compute = Callable[[nn.Module, Any, bool], tuple[Tensor, Values]]
"""A function that returns a model's loss and metrics on a `Part`, as shares of the step's loss and metrics; zeros if it does not count."""


@dataclass(frozen=True)
class Piece:
    """A rank's piece of a weight.

    shape: of the whole weight. box: (start, stop) along each dimension. cut: the axes along which ranks have different pieces.
    sums: the axes along which ranks compute different parts of the piece's gradient.
    copy: True if this piece duplicates another rank's piece, although `cut` says that the two differ."""

    shape: tuple[int, ...]
    box: tuple[tuple[int, int], ...]
    cut: frozenset[str] = frozenset()
    sums: frozenset[str] = frozenset(READERS)
    copy: bool = False

    @staticmethod
    def of(weight: Tensor, **own: Any) -> Piece:
        """Return a piece that covers the whole weight. `own`: values of other fields."""
        return Piece(tuple(weight.shape), tuple((0, size) for size in weight.shape), **own)

    def counts(self, at: Mapping[str, int]) -> bool:
        """True if the rank with the coordinates `at` (axis → place) is the first rank that holds this piece."""
        return not self.copy and all(place == 0 or axis in self.cut for axis, place in at.items())

    def slices(self) -> tuple[slice, ...]:
        """Return the box as slices that index the whole weight."""
        return tuple(slice(start, stop) for start, stop in self.box)


def no_values(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a tensor of NaN in this shape that takes no memory."""
    return torch.full((), math.nan, dtype=dtype, device=device).expand(*shape)


class Parallel:
    """A model that every rank holds whole and runs on some micro-batches: the layout `data`, or one process.

    whole: the model that is trained. model: the module that computes, with the methods that objectives call. parameters: this rank's
    trained parameters by name; `frozen`: those that are not trained. pieces: each local tensor's part of the whole tensor. owned: weights
    whose optimizer state one rank has whole. beside: other models in the checkpoint, by the prefix of their tensors' names. device: of the
    pieces; None: the whole model's. dtype: in which the model computes. rounds: True if the model itself rounds the weights to it."""

    rounds = False

    def __init__(self, whole: nn.Module, mesh: Mesh, device: torch.device | None = None, dtype: torch.dtype = torch.float32) -> None:
        self.whole, self.mesh, self.dtype = whole, mesh, dtype
        self.beside: dict[str, Parallel] = {}
        self.owned: frozenset[str] = frozenset()
        self.model: nn.Module = whole
        self.device = device or next(whole.parameters()).device
        self.parameters = {name: p for name, p in whole.named_parameters() if p.requires_grad}
        self.pieces = {name: Piece.of(p) for name, p in self.parameters.items()}
        self.frozen = {name: p for name, p in whole.named_parameters() if not p.requires_grad}
        self._published = False

    @property
    def processes(self) -> int:
        return self.mesh.layout.processes

    def deal(self, micro: Sequence[Sized]) -> list[Part]:
        """Return this rank's micro-batches in the order of the step. All ranks get the same number, if necessary by uncounted repeats."""
        shares = by_load([len(part) for part in micro], self.mesh.layout.readers)
        own = [(micro[i], True) for i in sorted(shares[self.mesh.reader])]
        missing = max(map(len, shares)) - len(own)
        return [*own, *([(min(micro, key=len), False)] * missing if missing else [])]

    def totals(self, values: Mapping[str, float]) -> dict[str, float]:
        """Return each count in `values`, summed over the ranks with different micro-batches."""
        if self.mesh.layout.readers == 1:
            return dict(values)
        numbers = torch.tensor(list(values.values()), dtype=torch.float64)
        for axis in READERS:
            self.mesh.add(numbers, axis)
        return dict(zip(values, numbers.tolist(), strict=True))

    def forward_backward(self, parts: Sequence[Part], compute: Compute, collect: Callable[[], None]) -> tuple[Tensor | None, Values]:
        """Run this rank's micro-batches forward and backward, and call `collect` after each. Return the sums of losses and of metrics."""
        total: Tensor | None = None
        metrics: Values = {}
        for part, counted in parts:
            loss, values = compute(self.model, part, counted)
            loss.backward()
            collect()
            loss = loss.detach().float()
            total = loss if total is None else total + loss
            for name, value in values.items():
                metrics[name] = metrics[name] + value if name in metrics else value
        return total, metrics

    def add_up(self, loss: Tensor | None, metrics: Values) -> tuple[Tensor, Values]:
        """Return the step's loss and metrics from the ranks' shares, bit-identical on all ranks."""
        if self.processes == 1:
            assert loss is not None
            return loss, metrics
        text = "\n".join(metrics)
        if (group := self.mesh.group("pipeline")) is not None:
            text = broadcast_text(text, self.mesh.rank("pipeline", -1), group)
        names = [name for name in text.split("\n") if name]
        values = torch.zeros(1 + len(names), dtype=torch.float64)
        if self.mesh.counts:
            assert loss is not None
            values = torch.stack([loss, *(metrics[name] for name in names)]).double().cpu()
        values = self.mesh.add_everywhere(values).float().to(self.device)
        return values[0], dict(zip(names, values[1:], strict=True))

    def add_gradients(self, weights: Mapping[str, Tensor]) -> None:
        """Sum the gradients of weights, in place, over the ranks that computed parts of the gradients."""
        if self.processes == 1:
            return
        kinds: dict[tuple[tuple[str, ...], torch.dtype], list[Tensor]] = {}
        for name, weight in weights.items():
            axes = tuple(axis for axis in sorted(self.pieces[name].sums) if self.mesh.size(axis) > 1)
            if weight.grad is not None and axes:
                kinds.setdefault((axes, weight.grad.dtype), []).append(weight.grad)
        for (axes, _), gradients in kinds.items():
            for some in buckets(gradients, Tensor.numel):
                flat = torch.cat([gradient.reshape(-1) for gradient in some])
                for axis in axes:
                    self.mesh.add(flat, axis)
                for gradient, sums in zip(some, flat.split([gradient.numel() for gradient in some]), strict=True):
                    gradient.copy_(sums.view(gradient.shape))

    def norm(self, weights: Mapping[str, Tensor]) -> Tensor:
        """Return the global norm of the gradients; each piece counts once, however many ranks have it."""
        gradients = [w.grad for name, w in weights.items() if w.grad is not None and self.pieces[name].counts(self.mesh.at)]
        norm = gradient_norm(gradients).to(self.device)  # without gradients, the norm is on the CPU
        return norm if self.processes == 1 else self.mesh.add_everywhere(norm.double().square()).sqrt().float()

    def ask(self, compute: Callable[[Any, Any], Tensor], part: Any) -> Tensor:
        """Return `compute(model, part)`, without training. If ranks hold pieces of the model, all ranks must call this method together."""
        return compute(self.model, part)

    @torch.no_grad()
    def gather(self, pieces: Mapping[str, Piece], values: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Yield each name of `pieces` with its whole tensor, bit-identical, from all ranks. `values`: this rank's pieces, by name."""
        for names in buckets(pieces, lambda name: math.prod(pieces[name].shape)):
            whole = self._gather(names, pieces, values)
            yield from ((name, whole.pop(name)) for name in names)

    def _gather(self, names: Sequence[str], pieces: Mapping[str, Piece], values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        whole = {name: values[name] for name in names if name in values and not pieces[name].cut}
        rest = {name: pieces[name] for name in names if name not in whole}
        flat = torch.zeros(sum(sizes := [math.prod(piece.shape) for piece in rest.values()]))
        for (name, piece), out in zip(rest.items(), flat.split(sizes), strict=True):
            whole[name] = out.view(piece.shape)
            if name in values and piece.counts(self.mesh.at):
                whole[name][piece.slices()] = values[name]
        if rest:  # As integers: a sum of floats would lose the sign of negative zeros.
            self.mesh.add_everywhere(flat.view(torch.int32))
        return whole

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the model's weights by name, each whole, from all ranks."""
        return self.gather(self.pieces, {**self.parameters, **self.frozen})

    @torch.no_grad()
    def publish(self, dtype: torch.dtype | None = None) -> None:
        """Write the ranks' pieces into the whole model in `dtype` (None: fp32); do nothing if this rank trains the whole model."""
        if self.model is self.whole:
            return
        weights = dict(self.whole.named_parameters())
        for name, value in self.weights():
            if self._published:
                weights[name].copy_(value)
            else:  # copying into weights that are mapped from a file would read all of them
                weights[name].data = value.to(self.device, dtype, copy=True)
        self._published = True

    def release(self) -> None:
        """Free the whole weights if this rank trains pieces of them: the pieces are now the model's weights (`held`). A result that is
        computed from whole weights is then NaN. `publish` allocates and writes them again."""
        if isinstance(self.whole, Transformer) and self.model is not self.whole:
            for parameter in self.whole.parameters():
                parameter.data = no_values(parameter.shape, torch.float32, parameter.device)
            self.whole.held, self._published = self, False

    def piece_of(self, name: str, tensor: Tensor) -> Piece:
        """Return the piece that a state tensor represents. A tensor whose name ends in a weight's name, in the shape of the weight's piece,
        is divided like the weight."""
        owner, _, rest = name.partition(".")
        if owner in self.beside:
            return self.beside[owner].piece_of(rest, tensor)
        weight = name
        while weight not in self.pieces:
            _, dot, weight = weight.partition(".")
            if not dot:
                return Piece.of(tensor)
        own = self.pieces[weight]
        if weight in self.owned and "state." in name.removesuffix(weight):
            return Piece.of(tensor, cut=frozenset(AXES))
        if tuple(tensor.shape) == tuple(stop - start for start, stop in own.box):
            return own
        inner = Piece.of(tensor, cut=own.cut & {"pipeline"}, copy=own.copy)
        if tensor.ndim == len(own.shape) > 2:  # state of a stack of matrices, which is cut like the stack
            return replace(own, shape=own.shape[:-2] + inner.shape[-2:], box=own.box[:-2] + inner.box[-2:])
        return inner

    def save_state(self, folder: Path, step: int, tensors: Mapping[str, Tensor], record: dict[str, Any], later: bool = False) -> Job | None:
        """Write a checkpoint; `tensors` are this rank's. later: copy them now, and return a job that writes the copies (in any thread)."""
        text = json.dumps({"step": step, **record}) if self.mesh.index == 0 else ""
        pieces = {name: self.piece_of(name, tensor) for name, tensor in tensors.items()}
        own = {name: tensor for name, tensor in tensors.items() if pieces[name].counts(self.mesh.at)}
        write: Callable[..., object] = write_state if self.processes == 1 else partial(save, self.mesh, pieces)
        if later:
            own = {name: torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor.detach()) for name, tensor in own.items()}
            return partial(write, folder, step, own, text)
        write(folder, step, own, text)
        return None

    def load_state(
        self, folder: Path, tensors: Mapping[str, Tensor], optional: Mapping[str, Tensor]
    ) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        """Return this rank's pieces of `tensors` (overwritten in place), its pieces of the `optional` tensors that were saved, and the
        record; None if no state is saved. A single process gets copies of all saved tensors."""
        if self.processes == 1:
            return load_state(folder)
        pieces, more = ({name: self.piece_of(name, tensor) for name, tensor in some.items()} for some in (tensors, optional))
        return load(folder, pieces, more, self.mesh, tensors)


@contextmanager
def whole(model: nn.Module, dtype: torch.dtype | None = None) -> Iterator[None]:
    """Give a model in pieces its whole weights within the context, in `dtype` (None: fp32); all ranks must enter together."""
    if (held := getattr(model, "held", None)) is not None:
        held.publish(dtype)
    try:
        yield
    finally:
        if held is not None:
            held.release()


def assemble(model: Transformer) -> None:
    """Give a model whose weights the ranks hold in pieces its whole weights, in fp32, for good; all ranks must call this together."""
    if model.held is not None:
        model.held.publish()
        model.held = None


def write_weights(held: Parallel, write: Callable[[Iterable[tuple[str, Tensor]]], None]) -> None:
    """Call `write` on rank 0 with each whole weight by name, which all collect. An error of `write` is raised on all ranks at once."""
    mesh = held.mesh

    def weights() -> Iterator[tuple[str, Tensor]]:
        every = held.weights()
        while True:
            agree(None)
            if (weight := next(every, None)) is None:
                return
            yield weight

    def agree(error: Exception | None) -> None:
        if mesh.agree(error is not None):
            words = mesh.gather_texts(f"rank 0 could not write the weights: {error}")
            raise error or OSError(words[0])

    try:
        (write if mesh.index == 0 else deque[Any](maxlen=0).extend)(weights())
    except Exception as error:
        if mesh.index == 0:
            agree(error)
        raise
    agree(None)
