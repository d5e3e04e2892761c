"""Pipeline parallelism: micro-batches pass stages of consecutive layers, in 1F1B or its interleaved form (Narayanan et al. 2021).

`schedule` orders micro-batches of any length and number. Without `data` or tied weights, gradients are bit-identical to one process."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from puna.models.forest import Forest
from puna.models.layers import Attend
from puna.models.training.boxes import own
from puna.models.training.parallel.base import Compute, Parallel, Part, Piece, Values
from puna.models.training.parallel.cut_model import place, without_values
from puna.models.training.parallel.mesh import Mesh
from puna.models.transformer import Transformer, decode, forest_attend

EMBEDDING, HEAD, NORM = "model.embed_tokens.weight", ("lm_head.", "score."), "model.norm."


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


class StageTransformer(Transformer):
    """A rank's stages of a model: some layers, with the embedding before the first layer, and norm and head after the last layer."""

    def __init__(self, whole: Transformer, stages: Sequence[range]) -> None:
        with torch.device("meta"):
            super().__init__(whole.config, whole.head)
        self.model = without_values(whole.model)
        self.stages, self.first = stages, stages[0].start
        self.given: Tensor | None = None

    @property
    def blocks(self) -> nn.ModuleList:
        return nn.ModuleList(self.model.layers[layer] for stage in self.stages for layer in stage)

    def embed(self, tokens: Tensor) -> Tensor:
        inputs, self.given = self.given, None
        return self.model.embed_tokens(tokens) if inputs is None else inputs

    def decode(self, x_ND: Tensor, positions: Tensor, attend: Attend, number: int = 0) -> Tensor:
        stage = self.stages[number]
        norm = self.model.norm if stage.stop == self.config.num_hidden_layers else nn.Identity()
        return decode(self.model.running(self.model.layers[layer] for layer in stage), norm, self.config, x_ND, positions, attend)[0]

    def through(self, forest: Forest, x_TD: Tensor | None, number: int) -> Tensor:
        """Return the hidden states for the next stage, from the input `x_TD` of this rank's stage `number`; None: embed the tokens."""
        x_TD = self.model.embed_tokens(forest.tokens) if x_TD is None else x_TD
        return self.decode(x_TD, forest.positions, forest_attend(self.config, forest.mask), number)

    def hidden(self, forest: Forest) -> Tensor:
        """Return the final hidden states [T, D] from the last stage's input; an objective may call the model once in a micro-batch."""
        inputs, self.given = self.given, None
        return self.through(forest, inputs, -1)


class Pipelined(Parallel):
    """A `Transformer` in stages of layers: the layout `pipeline`, with copies of each stage if there is `data`."""

    def __init__(self, whole: Transformer, mesh: Mesh, device: torch.device | None = None, dtype: torch.dtype = torch.float32) -> None:
        super().__init__(whole, mesh, device, dtype)
        self._rank, self._ranks, self._stages = mesh.at["pipeline"], mesh.size("pipeline"), mesh.layout.stages
        layers = whole.config.num_hidden_layers
        starts = [-(-layers * stage // self._stages) for stage in range(self._stages + 1)]
        self._own = range(self._rank, self._stages, self._ranks)
        self._tied = whole.head == "lm" and whole.config.tie_word_embeddings
        self.held = self.model = StageTransformer(whole, [range(starts[stage], starts[stage + 1]) for stage in self._own])
        copy = self._tied and self._is_last
        self.pieces = {n: Piece.of(p, cut=frozenset({"pipeline"}), copy=copy and n == EMBEDDING) for n, p in whole.named_parameters()}
        held = {name: nn.Parameter(own(p, (), self.device), p.requires_grad) for name, p in whole.named_parameters() if self._has(name)}
        for name, parameter in held.items():
            place(self.model, "lm_head.weight" if copy and name == EMBEDDING else name, parameter)
        self.parameters = {name: p for name, p in held.items() if p.requires_grad}
        self.frozen = {name: p for name, p in held.items() if not p.requires_grad}
        self._sent = [deque[tuple[Any, Tensor]]() for _ in mesh.lanes]

    @property
    def _is_last(self) -> bool:
        return self._rank == self._ranks - 1

    def _has(self, name: str) -> bool:
        if name == EMBEDDING:
            return self._rank == 0 or (self._tied and self._is_last)
        if name.startswith((*HEAD, NORM)):
            return self._is_last
        return any(int(name.split(".")[2]) in stage for stage in self.held.stages)

    def forward_backward(self, parts: Sequence[Part], compute: Compute, collect: Callable[[], None]) -> tuple[Tensor | None, Values]:
        waiting: dict[tuple[int, int], tuple[Tensor | None, Tensor, Values]] = {}
        total: Tensor | None = None
        metrics: Values = {}
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
        for stage in self._own:
            out = self._forward(stage, part, True, lambda model, some, _: (compute(model, some), {}))[1]
        self._wait_for_sends()
        last, group = self.mesh.rank("pipeline", -1), self.mesh.group("pipeline")
        dist.broadcast(size := torch.tensor(len(out)), last, group)
        values = out.float().cpu() if self._is_last else torch.empty(int(size))
        dist.broadcast(values, last, group)
        return values

    def _forward(self, stage: int, part: Any, counted: bool, compute: Compute) -> tuple[Tensor | None, Tensor, Values]:
        """Receive a stage's input, compute its output and send it to the next stage.

        Return the input (None for the first stage), the output (the loss for the last stage), and the last stage's metrics."""
        forest = getattr(part, "targets", part).forest
        device, dtype = self.held.place
        inputs = None
        if stage:
            inputs = torch.empty(len(forest), self.held.config.hidden_size, dtype=dtype, device=device)
            self._receive(inputs, stage - 1, stage)
            inputs.requires_grad_()
        if stage < self._stages - 1:
            out = self.held.through(forest.to(device), inputs, self._own.index(stage))
            self._send(out.detach(), stage, stage + 1)
            return inputs, out, {}
        self.held.given = inputs
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
        values, number = values.contiguous(), lane(source, target, self._ranks)
        sent, group = self._sent[number], self.mesh.lanes[number]
        sent.append((dist.isend(values, self.mesh.rank("pipeline", target % self._ranks), group), values))
        if len(sent) > self._ranks:  # values stay in memory until they have arrived
            sent.popleft()[0].wait()

    def _receive(self, values: Tensor, source: int, target: int) -> None:
        dist.recv(values, self.mesh.rank("pipeline", source % self._ranks), self.mesh.lanes[lane(source, target, self._ranks)])

    def _wait_for_sends(self) -> None:
        for sent in self._sent:
            while sent:
                sent.popleft()[0].wait()

    def add_gradients(self, weights: Mapping[str, Tensor]) -> None:
        super().add_gradients(weights)
        if not self._tied or not self.whole.get_parameter(EMBEDDING).requires_grad:
            return
        weight = weights.get(EMBEDDING)  # with the output layer one matrix, held by the first and the last stage
        shape = self.pieces[EMBEDDING].shape
        gradient = torch.zeros(shape, device=self.device) if weight is None or weight.grad is None else weight.grad
        self.mesh.add(gradient, "pipeline")
        if weight is not None:
            weight.grad = gradient
