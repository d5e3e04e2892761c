"""Pipeline parallelism: micro-batches pass stages of consecutive layers, in 1F1B or its interleaved form (Narayanan et al. 2021).

`schedule` orders micro-batches of any length and number. Alone, with untied weights, gradients are bit-identical to one process."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from puna.models.training.boxes import own
from puna.models.training.parallel.base import Compute, Part, Values, no_values
from puna.models.training.parallel.context import Cut
from puna.models.training.parallel.cut_model import EMBEDDING, sharded
from puna.models.training.parallel.gathered import Gathered
from puna.models.training.parallel.mesh import Mesh, cut
from puna.models.transformer import Transformer


class Action(NamedTuple):
    """One forward or backward pass of a micro-batch through a stage."""

    micro_batch: int
    stage: int
    backward: bool


def schedule(rank: int, ranks: int, stages: int, micro_batches: int) -> list[Action]:
    """Return a rank's actions in order. Stage s is on rank s modulo `ranks`: one stage per rank gives 1F1B, several its interleaved form.

    Groups of `ranks` micro-batches pass a rank's stages in turn. A rank first runs `stages - 1 - rank` forward passes, then one forward
    and one backward pass in turn. It never holds the activations of more than `stages - rank` passes: no more memory than the first
    rank of 1F1B needs. Each stage runs backward passes in the order of the micro-batches, so gradients add up as in one process."""
    own, rounds = range(rank, stages, ranks), [range(i, min(i + ranks, micro_batches)) for i in range(0, micro_batches, ranks)]
    forward = [Action(number, stage, False) for some in rounds for stage in own for number in some]
    backward = [Action(number, stage, True) for some in rounds for stage in reversed(own) for number in some]
    ahead = stages - 1 - rank
    turns = zip_longest(forward[ahead:], backward)
    return forward[:ahead] + [action for turn in turns for action in turn if action is not None]


def lane(source: int, target: int, ranks: int) -> int:
    """Return which of four process groups carries a message between two stages: in a group, any two ranks send in one direction only.

    Groups 0 and 1 carry messages to the next and the previous rank; 2 and 3 carry those between the last and the first rank."""
    return 2 * (target % ranks - source % ranks != target - source) + (target < source)


class Pipelined(Cut):
    """A `Transformer` in stages of layers: the layout `pipeline`. With `shard`, ranks divide a stage's weights between steps."""

    def __init__(self, whole: Transformer, mesh: Mesh, device: torch.device | None = None, dtype: torch.dtype = torch.float32) -> None:
        self.rounds = mesh.size("shard") > 1
        super().__init__(whole, mesh, device, dtype)
        self._rank, self._ranks, self._stages = mesh.at["pipeline"], mesh.size("pipeline"), mesh.layout.stages
        self._own = range(self._rank, self._stages, self._ranks)
        self._sent = [deque[tuple[Any, Tensor]]() for _ in mesh.lanes]
        self._gathered: Gathered | None = None
        if self.rounds:
            self.pieces = {name: sharded(piece, mesh) for name, piece in self.pieces.items()}
            weights, pieces = dict(whole.named_parameters()), self.pieces
            rows = {n: nn.Parameter(own(weights[n], pieces[n].slices(), self.device), p.requires_grad) for n, p in self.held.items()}
            self._gathered = Gathered(self.held, rows, mesh.group("shard"))
            self.parameters, self.frozen = ({n: p for n, p in rows.items() if p.requires_grad == on} for on in (True, False))

    def _piece(self, name: str, weight: Tensor) -> Tensor:
        shape = [stop - start for start, stop in self.pieces[name].box]
        return no_values(shape, self.dtype, self.device) if self.rounds else super()._piece(name, weight)

    def forward_backward(self, parts: Sequence[Part], compute: Compute, collect: Callable[[], None]) -> tuple[Tensor | None, Values]:
        waiting: dict[tuple[int, int], tuple[Tensor | None, Tensor, Values]] = {}
        total: Tensor | None = None
        metrics: Values = {}
        with self._gathered or nullcontext():
            for number, stage, backward in schedule(self._rank, self._ranks, self._stages, len(parts)):
                if backward:
                    self._backward(stage, *waiting.pop((number, stage))[:2])
                    collect()
                    continue
                waiting[number, stage] = self._forward(stage, *parts[number], compute)  # a local variable would keep the result alive
                if stage == self._stages - 1:
                    loss = waiting[number, stage][1].detach().float()
                    total = loss if total is None else total + loss
                    for name, value in waiting[number, stage][2].items():
                        metrics[name] = metrics[name] + value if name in metrics else value
            self._wait_for_sends()
        return total, metrics

    @torch.no_grad()
    def ask(self, compute: Callable[[Any, Any], Tensor], part: Any) -> Tensor:
        with self._gathered or nullcontext():
            for stage in self._own:
                out = self._forward(stage, part, True, lambda model, some, _: (compute(model, some), {}))[1]
            self._wait_for_sends()
        last, group = self.mesh.rank("pipeline", -1), self.mesh.group("pipeline")
        dist.broadcast(size := torch.tensor(len(out)), last, group)
        values = out.float().cpu() if self.mesh.is_last_stage else torch.empty(int(size))
        dist.broadcast(values, last, group)
        return values

    def _forward(self, stage: int, part: Any, counted: bool, compute: Compute) -> tuple[Tensor | None, Tensor, Values]:
        """Receive a stage's input, compute its output and send it to the next stage.

        Return the input (None for the first stage), the output (the loss for the last stage), and the last stage's metrics."""
        forest = getattr(part, "targets", part).forest
        device, dtype = self.model.place
        rows, inputs = self.model.rows(forest.to(device)), None
        if stage:  # between blocks, a rank has its piece of its tokens' rows
            count = cut(len(rows[0]), self.mesh.size("tensor"))
            inputs = torch.empty(count, self.model.config.hidden_size, dtype=dtype, device=device)
            self._receive(inputs, stage - 1, stage)
            inputs.requires_grad_()
        if stage < self._stages - 1:
            out = self.model.through(rows, inputs, self._own.index(stage))
            self._send(out.detach(), stage, stage + 1)
            return inputs, out, {}
        self.model.given = inputs
        loss, values = compute(self.model, part, counted)
        return inputs, loss, values

    def _backward(self, stage: int, given: Tensor | None, out: Tensor) -> None:
        gradient = None
        if stage < self._stages - 1:
            gradient = torch.empty_like(out)
            self._receive(gradient, stage + 1, stage)
        torch.autograd.backward(out, gradient)
        if given is not None:
            assert given.grad is not None
            self._send(given.grad, stage, stage - 1)

    def _send(self, values: Tensor, source: int, target: int) -> None:
        if not values.numel():  # of a few tokens, a rank of `context` may have none
            return
        values, number = values.contiguous(), lane(source, target, self._ranks)
        sent, group = self._sent[number], self.mesh.lanes[number]
        sent.append((dist.isend(values, self.mesh.rank("pipeline", target % self._ranks), group), values))
        if len(sent) > self._ranks:  # values stay in memory until they have arrived
            sent.popleft()[0].wait()

    def _receive(self, values: Tensor, source: int, target: int) -> None:
        if values.numel():
            dist.recv(values, self.mesh.rank("pipeline", source % self._ranks), self.mesh.lanes[lane(source, target, self._ranks)])

    def _wait_for_sends(self) -> None:
        for sent in self._sent:
            while sent:
                sent.popleft()[0].wait()

    def add_gradients(self, weights: Mapping[str, Tensor]) -> None:
        super().add_gradients(weights)
        if not self.model.is_tied or not self.whole.get_parameter(EMBEDDING).requires_grad:
            return
        weight = weights.get(EMBEDDING)  # with the output layer one matrix, held by the first and the last stage
        shape = [stop - start for start, stop in self.pieces[EMBEDDING].box]
        gradient = torch.zeros(shape, device=self.device) if weight is None or weight.grad is None else weight.grad
        self.mesh.add(gradient, "pipeline")
        if weight is not None:
            weight.grad = gradient
