"""Updates of whole matrices that ranks hold in pieces, as Muon needs them: each matrix has an owner, the rank that updates it."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Collection, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from puna.models.training.optimizers import Optimizer
from puna.models.training.parallel.base import Parallel
from puna.models.training.parallel.mesh import by_load

Matrices = Mapping[str, nn.Parameter]


class Owners:
    """An optimizer of matrices that no rank holds whole.

    A matrix's owner gathers the matrix and its gradient, updates the matrix, and sends each rank its piece. Ranks with copies of pieces
    are owners, too, and share the work. Matrices are updated in waves: a rank holds one whole matrix at a time.

    names: the matrices that have an owner. state: as in `Optimizer`, by this rank's piece of a matrix; only a matrix's owner has it."""

    def __init__(self, held: Parallel, weights: Matrices, names: Collection[str]) -> None:
        mesh, shapes = held.mesh, {name: piece.shape for name, piece in held.pieces.items()}
        own = json.dumps({name: (held.pieces[name].box, held.pieces[name].counts(mesh.at)) for name in names})
        self._ranks: list[dict[str, tuple[tuple[slice, ...], bool]]] = [
            {name: (tuple(itertools.starmap(slice, box)), first) for name, (box, first) in json.loads(text).items()}
            for text in mesh.gather_texts(own)
        ]
        self._index, self._group, self._weights = mesh.index, mesh.everyone, weights
        cut = {n for rank in self._ranks for n, (box, _) in rank.items() if [s.stop - s.start for s in box[-2:]] != list(shapes[n][-2:])}
        self.names = sorted(cut)
        holders: dict[tuple[int, ...], list[str]] = {}  # each pipeline stage shares its own matrices
        for name in self.names:
            holders.setdefault(tuple(rank for rank, own in enumerate(self._ranks) if name in own), []).append(name)
        shares = [list[str]() for _ in self._ranks]
        for some, own_names in holders.items():
            costs = [math.prod(shapes[name]) * min(shapes[name][-2:]) for name in own_names]
            for rank, share in zip(some, by_load(costs, len(some)), strict=True):
                shares[rank] += [own_names[i] for i in share]
        self._waves = list(itertools.zip_longest(*shares, fillvalue=""))
        self._matrices = {name: nn.Parameter(torch.empty(shapes[name], device=held.device)) for name in shares[self._index]}
        self._none = torch.empty(0, device=held.device)
        held.owned = frozenset(cut)

    @torch.no_grad()
    def start(self, make: Callable[[Matrices], Optimizer]) -> Owners:
        """Gather the matrices that this rank owns, make their optimizer with `make`, and return this object."""
        for wave in self._waves:
            self._exchange(wave, self._weights, self._matrices.get(wave[self._index], self._none))
        self._optimizer = make(self._matrices)
        self.state = {self._weights[name]: self._optimizer.state[matrix] for name, matrix in self._matrices.items()}
        for matrix in self._matrices.values():
            _free(matrix)
        return self

    @torch.no_grad()
    def step(self, rate: float, factor: Tensor | None = None) -> None:
        """Update all matrices, as `Optimizer.step` does."""
        own = {name: self._weights[name] for name in self.names if name in self._weights}
        gradients = {name: torch.zeros_like(weight) if weight.grad is None else weight.grad for name, weight in own.items()}
        for wave in self._waves:
            name, whole, gradient = wave[self._index], self._none, self._none
            if name:
                whole, gradient = (torch.empty(self._matrices[name].shape, device=whole.device) for _ in range(2))
            self._exchange(wave, own, whole)
            self._exchange(wave, gradients, gradient)
            if name and own[name].grad is not None:  # a matrix without a gradient stays unchanged, as in one process
                self._matrices[name].data, self._matrices[name].grad = whole, gradient
                self._optimizer.step(rate, factor)
                _free(self._matrices[name])
            self._exchange(wave, own, whole, back=True)

    def _exchange(self, wave: Sequence[str], pieces: Mapping[str, Tensor], whole: Tensor, back: bool = False) -> None:
        """Gather a wave's matrix that this rank owns into `whole`, each piece from its first holder. `back`: send pieces to all holders."""
        here, name = self._ranks[self._index], wave[self._index]
        held = [pieces[other] if other in here and (back or here[other][1]) else self._none for other in wave]
        parts = [whole[rank[name][0]] if name in rank and (back or rank[name][1]) else self._none for rank in self._ranks]
        send, receive = (parts, held) if back else (held, parts)
        given, taken = ([tensor.numel() for tensor in tensors] for tensors in (send, receive))
        out = self._none.new_empty(sum(taken))
        dist.all_to_all_single(out, torch.cat([tensor.reshape(-1) for tensor in send]), taken, given, group=self._group)
        for tensor, values in zip(receive, out.split(taken), strict=True):
            tensor.copy_(values.view(tensor.shape))


def _free(matrix: nn.Parameter) -> None:
    """Free the memory of a matrix and of its gradient; the matrix keeps its shape."""
    matrix.data, matrix.grad = matrix.new_zeros(()).expand(matrix.shape), None
