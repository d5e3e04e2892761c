"""Context parallelism: a micro-batch's tokens, called rows, are dealt to ranks by cost; a rank has its own queries and all keys and values.

Without a sliding window, a row's attention costs one product per visible key: its depth in the forest plus one. Chunks are dealt by this
cost, so ranks have nearly equal attention work, whatever the lengths of the documents."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from puna.kernels.attention import attention_of_rows
from puna.kernels.forest_mask import TILE_ROWS
from puna.models.forest import Forest
from puna.models.training.boxes import own
from puna.models.training.parallel.base import Parallel
from puna.models.training.parallel.collectives import add_parts, gather_rows
from puna.models.training.parallel.cut_model import EMBEDDING, CutTransformer, Rows, piece_of, place
from puna.models.training.parallel.mesh import Mesh, by_load
from puna.models.transformer import Transformer

CHUNKS = 16  # minimum chunks per rank, if there are enough rows


@dataclass(frozen=True)
class Deal:
    """An assignment of rows to ranks. `chunks`: ranges (start, stop) of rows, by rank; `size`: rows per rank after padding; `place` [T]:
    each row's index in the concatenation of all ranks' padded rows."""

    chunks: list[list[tuple[int, int]]]
    size: int
    place: Tensor

    def rows(self, rank: int) -> Tensor:
        return torch.cat([torch.arange(start, stop) for start, stop in self.chunks[rank]] or [torch.arange(0)])


def deal(depths: Tensor, ranks: int) -> Deal:
    """Return an assignment of rows to `ranks` ranks, balanced by cost. `depths` [T]: each row's depth in the forest."""
    count = len(depths)
    step = max(1, min(TILE_ROWS, count // (ranks * CHUNKS)))
    cuts = [(start, min(start + step, count)) for start in range(0, count, step)]
    costs = [int(depths[start:stop].sum()) + stop - start for start, stop in cuts]
    chunks = [sorted(cuts[i] for i in some) for some in by_load(costs, ranks)]
    sizes = [sum(stop - start for start, stop in some) for some in chunks]
    place = torch.empty(count, dtype=torch.int64)
    for rank, some in enumerate(chunks):
        at = rank * max(sizes)
        for start, stop in some:
            place[start:stop] = torch.arange(at, at + stop - start)
            at += stop - start
    return Deal(chunks, max(sizes), place)


class ContextTransformer(CutTransformer):
    """A model in which each rank computes some tokens of each forest, on CPUs only; objectives see whole tensors."""

    def __init__(self, whole: Transformer, mesh: Mesh) -> None:
        super().__init__(whole, mesh)
        self.context, self.rank = mesh.group("context"), mesh.at["context"]

    def rows(self, forest: Forest) -> Rows:
        return self._rows(forest, deal(forest.mask.depths, self.mesh.size("context")))

    def _rows(self, forest: Forest, dealt: Deal) -> Rows:
        own = dealt.rows(self.rank)
        masks = {window: forest.mask.within(window).some_tiles(dealt.chunks[self.rank]) for window in set(self.config.windows)}

        def attend(layer: int, q_nHK: Tensor, k_nGK: Tensor, v_nGV: Tensor) -> Tensor:
            k_TGK, v_TGV = (self._all_rows_of(x, dealt, partial=True).contiguous() for x in (k_nGK, v_nGV))
            return attention_of_rows(q_nHK, k_TGK, v_TGV, masks[self.config.windows[layer]])

        return forest.tokens[own], forest.positions[own], attend

    def _own_hidden(self, forest: Forest) -> tuple[Tensor, Deal]:
        """Return the final hidden states of this rank's rows, and the assignment of rows to ranks."""
        dealt = deal(forest.mask.depths, self.mesh.size("context"))
        return self.final(self._rows(forest, dealt)), dealt

    def _all_rows_of(self, x: Tensor, dealt: Deal, *, partial: bool) -> Tensor:
        """Return the rows `x` of all ranks, gathered in the forest's order. `partial`: see `gather_rows`."""
        padded = nn.functional.pad(x, (0, 0) * (x.ndim - 1) + (0, dealt.size - len(x)))
        gathered = gather_rows(padded, dealt.size * len(dealt.chunks), self.context, partial=partial)
        return gathered.index_select(0, dealt.place)

    def hidden(self, forest: Forest) -> Tensor:
        x_nD, dealt = self._own_hidden(forest)
        return self._all_rows_of(x_nD, dealt, partial=False)

    def _own_places(self, dealt: Deal, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return the indices into `positions` [N] of those that this rank holds, and their row numbers on this rank."""
        places = dealt.place[positions] - self.rank * dealt.size
        mine = ((places >= 0) & (places < dealt.size)).nonzero()[:, 0]
        return mine, places[mine]

    def token_logprobs(self, forest: Forest, positions: Tensor, targets: Tensor, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
        x_nD, dealt = self._own_hidden(forest)
        mine, places = self._own_places(dealt, positions)
        both = torch.stack(self._logprobs(x_nD[places], targets[mine], temperature))
        return add_parts(both.new_zeros(2, len(positions)).index_copy(1, mine, both), self.context).unbind()  # type: ignore[return-value]

    def cross_entropy(self, forest: Forest, positions: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
        x_nD, dealt = self._own_hidden(forest)
        mine, places = self._own_places(dealt, positions)
        return add_parts(self._cross_entropy(x_nD[places], targets[mine], weights[mine]), self.context)


class Cut(Parallel):
    """A `Transformer` whose ranks hold pieces (layouts `tensor`, `expert`, `pipeline`) or compute some of the tokens (`context`)."""

    model: CutTransformer

    def __init__(self, whole: Transformer, mesh: Mesh, device: torch.device | None = None, dtype: torch.dtype = torch.float32) -> None:
        super().__init__(whole, mesh, device, dtype)
        self.model = model = (ContextTransformer if mesh.size("context") > 1 else CutTransformer)(whole, mesh)
        self.pieces = {name: piece_of(name, p, mesh) for name, p in whole.named_parameters()}
        if model.is_tied and model.first:  # the output layer, which is the first stage's embedding
            self.pieces[EMBEDDING] = replace(self.pieces[EMBEDDING], copy=True)
        self.held = {n: nn.Parameter(self._piece(n, p), p.requires_grad) for n, p in whole.named_parameters() if model.has(n)}
        for name, parameter in self.held.items():
            place(model, name, parameter)
        if model.is_tied:
            model.lm_head.weight = model.model.embed_tokens.weight
        self.parameters, self.frozen = ({n: p for n, p in self.held.items() if p.requires_grad == on} for on in (True, False))

    def _piece(self, name: str, weight: Tensor) -> Tensor:
        return own(weight, self.pieces[name].slices(), self.device)
