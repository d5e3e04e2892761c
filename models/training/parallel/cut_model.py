"""A `Transformer` split over ranks: by matrices (`tensor`), experts (`expert`), tokens, also called rows (`context`), or stages of layers.

With `tensor`, each rank has a piece of the rows between blocks (sequence parallel, Korthikanti et al. 2022): rows are all-gathered before
the attention and feed-forward blocks, and reduce-scattered after these. Objectives see whole tensors, equal on all ranks."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from puna.kernels.dense_layers import Parts
from puna.kernels.linear import linear
from puna.models.forest import Forest
from puna.models.layers import Attend, Block, Embedding, Experts, Linear, MoeMLP
from puna.models.training.parallel import collectives, vocabulary
from puna.models.training.parallel.base import Piece
from puna.models.training.parallel.collectives import add_gradients, add_parts, exchange_rows, gather_rows, own_rows, scatter_rows
from puna.models.training.parallel.layout import READERS
from puna.models.training.parallel.mesh import Mesh, bounds, cut
from puna.models.training.parallel.vocabulary import Share
from puna.models.transformer import Decoder, Transformer, decode, forest_attend, softcap

Rows = tuple[Tensor, Tensor, Attend]  # tokens of a forest whose states a rank computes, their position ids, and their attention
OUTPUTS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "embed_tokens", "lm_head")
"""Modules whose weights tensor parallelism splits along the outputs (linear layers) or along the vocabulary."""
EMBEDDING, HEAD, NORM = "model.embed_tokens.weight", ("lm_head.", "score."), "model.norm."
INPUTS = ("o_proj", "down_proj")  # modules whose weights tensor parallelism splits along the inputs


class RowParallel(Linear):
    """A linear layer whose weight is split along its inputs; partial outputs are reduce-scattered along tokens. The bias is replicated."""

    group: Any = None

    def forward(self, x: Tensor) -> Tensor:
        y = scatter_rows(linear(x, self.weight), self.group)
        return y if self.bias is None else y + self.bias


class VocabularyEmbedding(Embedding):
    """An embedding of this rank's part of the vocabulary, from token `start` on; the ranks' outputs are reduce-scattered along the rows."""

    group: Any = None
    start = 0

    def forward(self, tokens: Tensor) -> Tensor:
        return scatter_rows(self.part(tokens), self.group)

    def part(self, tokens: Tensor) -> Tensor:
        """Return the vectors [T, D] of tokens [T]: zeros for tokens outside this rank's part of the vocabulary."""
        own = tokens - self.start
        inside = (own >= 0) & (own < len(self.weight))
        vectors = nn.functional.embedding(own.clamp(0, len(self.weight) - 1), self.weight)
        return torch.where(inside[:, None], vectors, 0.0)


class CutExperts(Experts):
    """The matrices of E / p experts, which compute the rows that all ranks of the axis `expert` route to them. All-to-all exchanges precede
    and follow the products, as in GShard (Lepikhin et al. 2020), but without a capacity limit: no row is dropped."""

    def __init__(self, whole: Experts, group: Any) -> None:
        nn.Module.__init__(self)
        self.gate_up_proj, self.down_proj, self.group = whole.gate_up_proj, whole.down_proj, group

    def forward(self, x_ND: Tensor, offsets_E1: Tensor) -> Tensor:
        """Return the outputs [N, D] of this rank's rows, which come sorted by expert. Rank i of p holds the i-th group of the E experts."""
        p = dist.get_world_size(self.group)
        counts_pe = offsets_E1.diff().view(p, -1)
        theirs_pe = torch.empty_like(counts_pe)
        dist.all_to_all_single(theirs_pe, counts_pe.contiguous(), group=self.group)
        send, receive = counts_pe.sum(1).tolist(), theirs_pe.sum(1).tolist()
        rows_MD = exchange_rows(x_ND, send, receive, self.group)
        # Rows come by rank, then by expert; the products take them by expert.
        experts_e = torch.arange(theirs_pe.shape[1], device=x_ND.device)
        order_M = experts_e.repeat(p).repeat_interleave(theirs_pe.flatten()).argsort(stable=True)
        offsets_e1 = torch.cat([theirs_pe.new_zeros(1), theirs_pe.sum(0).cumsum(0)])
        y_MD = super().forward(rows_MD[order_M], offsets_e1)
        return exchange_rows(y_MD[order_M.argsort()], receive, send, self.group)


class CutTransformer(Transformer):
    """This rank's piece of a model, with the methods that objectives call.

    stages: this rank's ranges of layers; without pipeline stages, one range of all layers. Before the first layer comes the embedding,
    after the last layer the norm and the head. given: the last stage's input; an objective may use it once in a micro-batch."""

    def __init__(self, whole: Transformer, mesh: Mesh) -> None:
        with torch.device("meta"):
            super().__init__(whole.config, whole.head)
        self.model = without_values(whole.model)
        self.mesh, self.tensor = mesh, mesh.group("tensor")
        layers, count = whole.config.num_hidden_layers, mesh.layout.stages
        starts = [-(-layers * stage // count) for stage in range(count + 1)]
        self.stages = [range(*starts[stage : stage + 2]) for stage in range(mesh.at["pipeline"], count, mesh.size("pipeline"))]
        self.first = self.stages[0].start
        self.given: Tensor | None = None
        tokens, p = whole.config.vocab_size, mesh.size("tensor")
        self.share = Share(bounds(tokens, p, mesh.at["tensor"])[0], cut(tokens, p), self.tensor, whole.config.final_logit_softcapping)
        if self.tensor is not None:
            self._cut_matrices(self.model)
            self.parts = Parts(partial(dist.all_reduce, group=self.tensor), mesh.at["tensor"] == 0)
        if (experts := mesh.group("expert")) is not None:
            for block in self.model.layers:
                assert isinstance(block, Block) and isinstance(block.mlp, MoeMLP)
                block.mlp.experts = CutExperts(block.mlp.experts, experts)

    @property
    def is_tied(self) -> bool:
        return self.head == "lm" and self.config.tie_word_embeddings

    @property
    def blocks(self) -> nn.ModuleList:
        return nn.ModuleList(self.model.layers[layer] for stage in self.stages for layer in stage)

    def has(self, name: str) -> bool:
        """True if this rank's stages need the weight `name`. The embedding is also a tied output layer."""
        if name == EMBEDDING:
            return self.first == 0 or (self.is_tied and self.mesh.is_last_stage)
        if name.startswith((*HEAD, NORM)):
            return self.mesh.is_last_stage
        return any(int(name.split(".")[2]) in stage for stage in self.stages)

    def _cut_matrices(self, decoder: Decoder) -> None:
        with torch.device("meta"):
            embedding = VocabularyEmbedding(self.config.vocab_size, self.config.hidden_size)
        embedding.group, embedding.start = self.tensor, self.share.start
        decoder.embed_tokens = embedding
        for block in decoder.layers:
            assert isinstance(block, Block)
            self._cut_inputs(block.self_attn, "o_proj")
            self._cut_inputs(block.mlp, "down_proj")
            block.self_attn.register_forward_pre_hook(lambda _, given: (self._all_rows(given[0], len(given[1])), *given[1:]))
            block.mlp.register_forward_pre_hook(lambda _, given: (self._all_rows(given[0], len(given[0]) * self.mesh.size("tensor")),))

    def _cut_inputs(self, module: nn.Module, name: str) -> None:
        """Replace the linear layer `name` of a module by one that is split along its inputs; if it has an adapter, split its A, too."""
        given = getattr(module, name)
        if hasattr(given, "lora_A"):  # PEFT's layers, without its import
            self._cut_inputs(given, "base_layer")
            self._cut_inputs(given.lora_A, "default")
            return
        with torch.device("meta"):
            matrix = RowParallel(given.in_features, given.out_features, given.bias is not None)
        matrix.group = self.tensor
        setattr(module, name, matrix)

    def _all_rows(self, x_TD: Tensor, rows: int) -> Tensor:
        return gather_rows(x_TD, rows, self.tensor, partial=True)

    @property
    def key_value_heads(self) -> int:
        return self.config.num_key_value_heads // self.mesh.size("tensor")

    def embed(self, tokens: Tensor) -> Tensor:
        if (inputs := self._take()) is not None:
            return inputs
        embedding = self.model.embed_tokens
        return add_parts(embedding.part(tokens), self.tensor) if isinstance(embedding, VocabularyEmbedding) else embedding(tokens)

    def decode(self, x_ND: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        return gather_rows(self._run(own_rows(x_ND, self.tensor), positions, attend, -1), len(positions), self.tensor, partial=False)

    def _take(self) -> Tensor | None:
        inputs, self.given = self.given, None
        return inputs

    def _run(self, x_nD: Tensor, positions: Tensor, attend: Attend, number: int) -> Tensor:
        stage = self.stages[number]
        norm = self.model.norm if stage.stop == self.config.num_hidden_layers else nn.Identity()
        layers = self.model.running(self.model.layers[layer] for layer in stage)
        y_nD, balance = decode(layers, norm, self.config, x_nD, positions, attend)
        if torch.is_grad_enabled():
            self.model.balance = balance
        return y_nD

    def rows(self, forest: Forest) -> Rows:
        return forest.tokens, forest.positions, forest_attend(self.config, forest.mask)

    def through(self, rows: Rows, x_nD: Tensor | None, number: int) -> Tensor:
        """Return the output of this rank's stage `number` for its input, the states between blocks; None: embed the tokens."""
        return self._run(self.model.embed_tokens(rows[0]) if x_nD is None else x_nD, *rows[1:], number)

    def final(self, rows: Rows) -> Tensor:
        """Return the final hidden states of the rows."""
        return gather_rows(self.through(rows, self._take(), -1), len(rows[0]), self.tensor, partial=False)

    def hidden(self, forest: Forest) -> Tensor:
        return self._own(self.final(self.rows(forest)))

    def scalar(self, hidden_ND: Tensor) -> Tensor:
        return self._own(linear(hidden_ND, self._shared(self.score.weight))[:, 0])

    def _own(self, values: Tensor) -> Tensor:
        """Return `values`, cloned if FSDP2 is used (`shard`): it warns that a view changed in place would lose its hook."""
        return values.clone() if self.mesh.size("shard") > 1 else values

    def _shared(self, weight: Tensor) -> Tensor:
        """Return a weight whose gradient all ranks of `context` compute alike; these are added up later, so each is scaled down."""
        return collectives.scale_gradient(weight, 1 / self.mesh.size("context"))

    def logits(self, hidden_ND: Tensor) -> Tensor:
        if self.tensor is None:
            return softcap(linear(hidden_ND, self._shared(self.lm_head.weight)), self.config.final_logit_softcapping)
        logits_VN = linear(add_gradients(hidden_ND, self.tensor), self._shared(self.lm_head.weight)).T
        padded_VN = nn.functional.pad(logits_VN, (0, 0, 0, self.share.most - len(logits_VN)))
        logits_NV = gather_rows(padded_VN, self.config.vocab_size, self.tensor, partial=False).T.contiguous()
        return softcap(logits_NV, self.config.final_logit_softcapping)

    def _logprobs(self, hidden_ND: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        if self.tensor is None:
            return super()._logprobs(hidden_ND, targets, temperature)
        return vocabulary.token_logprobs(hidden_ND, self.lm_head.weight, targets, temperature, self.share)[:2]

    def normalizers(self, forest: Forest, positions: Tensor, targets: Tensor) -> Tensor:
        if self.tensor is None:
            return super().normalizers(forest, positions, targets)
        hidden_ND = self.hidden(forest)[positions]
        return torch.stack(vocabulary.token_logprobs(hidden_ND, self._shared(self.lm_head.weight), targets, 1.0, self.share)[::2])

    def _cross_entropy(self, hidden_ND: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
        if self.tensor is None:
            return super()._cross_entropy(hidden_ND, targets, weights)
        return vocabulary.cross_entropy(hidden_ND, self.lm_head.weight, targets, weights, self.share)


def piece_of(name: str, weight: Tensor, mesh: Mesh) -> Piece:
    """Return this rank's piece of a weight, split along the axis `tensor` or `expert`, or else whole; stages have different weights."""
    p, at, stages = mesh.size("tensor"), mesh.at["tensor"], frozenset({"pipeline"} & mesh.layout.axes)
    # Ranks along `context` compute different rows of a micro-batch, so each computes a part of the gradient.
    whole = Piece.of(weight, cut=stages, sums=frozenset({*READERS, "context"}))
    module, kind = name.replace(".base_layer.", ".").split(".")[-2:]
    if ".lora_" in name:  # as PEFT names matrices A and B: MODULE.lora_A.default.weight
        module, kind = name.split(".")[-4:-2]
    if module == "experts":
        experts = bounds(len(weight), mesh.size("expert"), mesh.at["expert"])
        return replace(whole, box=(experts, *whole.box[1:]), cut=stages | {"expert"}, sums=whole.sums - {"expert"})
    if p == 1 or module == "score":
        return whole
    if (module in OUTPUTS and kind != "lora_A") or (module in INPUTS and kind in ("weight", "lora_A")):
        axis = 0 if module in OUTPUTS else 1
        box = tuple(bounds(size, p, at) if i == axis else (0, size) for i, size in enumerate(weight.shape))
        return replace(whole, box=box, cut=stages | {"tensor"})
    # Norms, and biases and matrices B after a reduce-scatter, see a piece of the rows; norms of heads see a piece of the heads, and the
    # other matrices A a piece of their outputs' gradients.
    return replace(whole, sums=whole.sums | {"tensor"})


def sharded(piece: Piece, mesh: Mesh) -> Piece:
    """Return a piece's rows that a rank of `shard` has, as a piece. What shards weights also sums their gradients over this axis."""
    start, stop = piece.box[0]
    first, last = bounds(stop - start, mesh.size("shard"), mesh.at["shard"])
    box = ((start + first, start + last), *piece.box[1:])
    return replace(piece, box=box, cut=piece.cut | {"shard"}, sums=piece.sums - {"shard"})


def without_values(module: nn.Module) -> Any:
    """Return a copy of a module whose parameters are on the device `meta`."""
    memo: dict[int, Any] = {id(p): nn.Parameter(torch.empty_like(p, device="meta"), p.requires_grad) for p in module.parameters()}
    return copy.deepcopy(module, memo | {id(held): None for held in [getattr(module, "held", None)]})


def place(model: nn.Module, name: str, parameter: nn.Parameter) -> None:
    module, _, own = name.rpartition(".")
    setattr(model.get_submodule(module), own, parameter)
