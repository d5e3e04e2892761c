"""Stages of consecutive layers, which a step's micro-batches pass one after the other (1F1B, Narayanan et al. 2021).

Stage s of S runs S - 1 - s micro-batches forward, then one forward and one backward in turn: it never holds more than S - s. Micro-batches
may have any length. The numbers are bit-identical to one process.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from puna.models.forest import Forest
from puna.models.training.boxes import own
from puna.models.training.parallel.base import Compute, Parallel, Part, Piece, Values
from puna.models.training.parallel.cut_model import place
from puna.models.training.parallel.mesh import Mesh, bounds
from puna.models.transformer import Attend, Transformer, forest_attend, rotary_table

EMBEDDING, HEAD, NORM = "model.embed_tokens.weight", ("lm_head.", "score."), "model.norm."


class StageTransformer(Transformer):
    """The layers first .. last - 1 of a model, on the first stage with the embedding, on the last one with norm and head."""

    def __init__(self, whole: Transformer, first: int, last: int) -> None:
        with torch.device("meta"):
            super().__init__(whole.config, whole.head)
        self.first, self.last = first, last
        self.given: Tensor | None = None

    @property
    def blocks(self) -> nn.ModuleList:
        return self.model.layers[self.first : self.last]

    def embedded(self, tokens: Tensor) -> Tensor:
        inputs, self.given = self.given, None
        return self.model.embed_tokens(tokens) if inputs is None else inputs

    def decoded(self, x_ND: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        cos, sin = rotary_table(self.config, positions, x_ND.dtype)
        for layer in self.blocks:
            x_ND, _ = layer(x_ND, cos, sin, attend)
        return self.model.norm(x_ND) if self.last == self.config.num_hidden_layers else x_ND

    def through(self, forest: Forest, x_TD: Tensor | None) -> Tensor:
        """Return the hidden states for the next stage, from this stage's input; the first stage embeds the tokens."""
        x_TD = self.model.embed_tokens(forest.tokens) if x_TD is None else x_TD
        return self.decoded(x_TD, forest.positions, forest_attend(self.config, forest.mask))

    def hidden(self, forest: Forest) -> Tensor:
        """Return the final hidden states [T, D] from the last stage's input, once for each micro-batch."""
        inputs, self.given = self.given, None
        if inputs is None:
            raise ValueError("this objective asks the model more than once in a micro-batch (as kto does): set layout.pipeline to 1")
        return self.through(forest, inputs)


class Pipelined(Parallel):
    """A `Transformer` in stages of layers: the layout `pipeline`, with copies of each stage if there is `data`."""

    def __init__(self, whole: Transformer, mesh: Mesh, device: torch.device | None = None) -> None:
        super().__init__(whole, mesh, device)
        self._stage, self._stages = mesh.at["pipeline"], mesh.size("pipeline")
        first, last = bounds(whole.config.num_hidden_layers, self._stages, self._stage)
        self._tied = whole.head == "lm" and whole.config.tie_word_embeddings
        self.held = self.model = StageTransformer(whole, first, last)
        copy = self._tied and self._is_last
        self.pieces = {n: Piece.of(p, cut=frozenset({"pipeline"}), copy=copy and n == EMBEDDING) for n, p in whole.named_parameters()}
        held = {name: nn.Parameter(own(p, (), self.device), p.requires_grad) for name, p in whole.named_parameters() if self._has(name)}
        for name, parameter in held.items():
            place(self.model, "lm_head.weight" if copy and name == EMBEDDING else name, parameter)
        for module in [layer for i, layer in enumerate(self.model.model.layers) if not first <= i < last]:
            module.to_empty(device="meta")
        self.parameters = {name: p for name, p in held.items() if p.requires_grad}
        self._sent: list[tuple[Any, Tensor]] = []

    @property
    def _is_last(self) -> bool:
        return self._stage == self._stages - 1

    def _has(self, name: str) -> bool:
        if name == EMBEDDING:
            return self._stage == 0 or (self._tied and self._is_last)
        if name.startswith((*HEAD, NORM)):
            return self._is_last
        return self.held.first <= int(name.split(".")[2]) < self.held.last

    def forward_backward(self, parts: Sequence[Part], compute: Compute, collect: Callable[[], None]) -> tuple[Tensor | None, Values]:
        waiting: list[tuple[Tensor | None, Tensor]] = []
        total: Tensor | None = None
        metrics: Values = {}
        ahead = min(self._stages - 1 - self._stage, len(parts))
        for number in range(len(parts) + ahead):
            if number < len(parts):
                part, counted = parts[number]
                inputs, out, values = self._forward(part, counted, compute)
                waiting.append((inputs, out))
                if self._is_last:
                    total = out.detach().float() if total is None else total + out.detach().float()
                    for name, value in values.items():
                        metrics[name] = metrics[name] + value if name in metrics else value
            if number >= ahead:
                self._backward(*waiting.pop(0))
                collect()
        self._arrived()
        if self._tied:
            self._add_tied()
        return total, metrics

    @torch.no_grad()
    def ask(self, compute: Callable[[Any, Any], Tensor], part: Any) -> Tensor:
        _, out, _ = self._forward(part, True, lambda model, some: (compute(model, some), {}))
        self._arrived()
        last, group = self.mesh.rank("pipeline", -1), self.mesh.group("pipeline")
        dist.broadcast(size := torch.tensor(len(out)), last, group)
        values = out.float().cpu() if self._is_last else torch.empty(int(size))
        dist.broadcast(values, last, group)
        return values

    def _arrived(self) -> None:
        for work, _ in self._sent:
            work.wait()
        self._sent.clear()

    def _forward(self, part: Any, counted: bool, compute: Compute) -> tuple[Tensor | None, Tensor, Values]:
        """Return the stage's input, its output (on the last stage the loss), and metrics."""
        forest = getattr(part, "targets", part).forest
        weight = next(iter(self.parameters.values()))
        inputs = None
        if self._stage:
            inputs = torch.empty(len(forest), self.held.config.hidden_size, dtype=weight.dtype, device=weight.device)
            dist.recv(inputs, self.mesh.rank("pipeline", self._stage - 1))
            inputs.requires_grad_()
        if not self._is_last:
            out = self.held.through(forest.to(weight.device), inputs)
            self._send(out.detach(), self._stage + 1, None)
            return inputs, out, {}
        self.held.given = inputs
        loss, values = compute(self.model, part)
        if not counted:
            loss, values = loss * 0.0, {name: value * 0.0 for name, value in values.items()}
        return inputs, loss, values

    def _backward(self, given: Tensor | None, out: Tensor) -> None:
        gradient = None
        if not self._is_last:
            gradient = torch.empty_like(out)
            dist.recv(gradient, self.mesh.rank("pipeline", self._stage + 1), self.mesh.back)
        torch.autograd.backward(out, gradient)
        if given is not None:
            assert given.grad is not None
            self._send(given.grad, self._stage - 1, self.mesh.back)

    def _send(self, values: Tensor, stage: int, group: Any) -> None:
        values = values.contiguous()
        self._sent.append((dist.isend(values, self.mesh.rank("pipeline", stage), group), values))

    def _add_tied(self) -> None:
        """Add the gradients of the embedding and of the output layer, which are one matrix on two stages."""
        weight = self.parameters.get(EMBEDDING)
        shape = self.pieces[EMBEDDING].shape
        gradient = torch.zeros(shape, device=self.device) if weight is None or weight.grad is None else weight.grad
        self.mesh.add(gradient, "pipeline")
        if weight is not None:
            weight.grad = gradient
