"""Models in which each rank holds a piece of the weights, or computes some of the tokens."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from puna.models.training.boxes import own
from puna.models.training.parallel.base import Parallel
from puna.models.training.parallel.context import ContextTransformer
from puna.models.training.parallel.cut_model import CutTransformer, piece_of, place
from puna.models.training.parallel.mesh import Mesh
from puna.models.transformer import Transformer


class Cut(Parallel):
    """A `Transformer` whose ranks hold pieces (layouts `tensor` and `expert`) or compute some of the tokens (layout `context`)."""

    def __init__(self, whole: Transformer, mesh: Mesh, device: torch.device | None = None, dtype: torch.dtype = torch.float32) -> None:
        super().__init__(whole, mesh, device, dtype)
        self.pieces = {name: piece_of(name, p, mesh) for name, p in whole.named_parameters()}
        self.model = model = (ContextTransformer if mesh.size("context") > 1 else CutTransformer)(whole, mesh)
        for name, parameter in whole.named_parameters():
            place(model, name, nn.Parameter(self._piece(name, parameter), parameter.requires_grad))
        if model.head == "lm" and model.config.tie_word_embeddings:
            model.lm_head.weight = model.model.embed_tokens.weight
        self.parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.frozen = {name: p for name, p in model.named_parameters() if not p.requires_grad}

    def _piece(self, name: str, weight: Tensor) -> Tensor:
        return own(weight, self.pieces[name].slices(), self.device)
