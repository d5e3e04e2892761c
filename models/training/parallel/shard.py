"""Weights, gradients and optimizer state sharded over ranks by torch's FSDP2, which gathers a layer's weights while the layer computes.

The optimizer works on this rank's rows of each weight, as plain tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor

from puna.models.training.boxes import own
from puna.models.training.parallel.base import Compute, Part, Values
from puna.models.training.parallel.context import Cut
from puna.models.training.parallel.cut_model import sharded
from puna.models.training.parallel.mesh import Mesh
from puna.models.transformer import Transformer

METHODS = ("hidden", "scalar", "logits", "token_logprobs", "normalizers", "cross_entropy")


class Sharded(Cut):
    """A `Transformer` whose weights are sharded over ranks by rows: the layout `shard`."""

    rounds = True

    def __init__(self, whole: Transformer, mesh: Mesh, device: torch.device | None = None, dtype: torch.dtype = torch.float32) -> None:
        super().__init__(whole, mesh, device, dtype)
        model = self.model
        ranks = DeviceMesh.from_group(mesh.group("shard"), self.device.type)
        # Shards stay in fp32: FSDP2 rounds the weights that it gathers, and adds up gradients in fp32.
        policy = MixedPrecisionPolicy(dtype, torch.float32, cast_forward_inputs=False)
        for block in model.model.layers:
            fully_shard(block, mesh=ranks, mp_policy=policy)
        # `cross_entropy` calls `hidden`, at whose end the output layer's weights would be freed.
        fully_shard(model, mesh=ranks, reshard_after_forward=False, mp_policy=policy)
        for method in METHODS:
            register_fsdp_forward_method(model, method)
        for module in model.modules():
            if isinstance(module, FSDPModule):  # settings of the root do not reach its layers
                module.set_gradient_divide_factor(1)
                module.set_force_sum_reduction_for_comms(True)
        self.pieces = {name: sharded(piece, mesh) for name, piece in self.pieces.items()}
        model.to_empty(device=self.device)
        if model.head == "lm" and model.config.tie_word_embeddings:
            model.lm_head.weight = model.model.embed_tokens.weight
        shards = dict(model.named_parameters())
        for name, weight in whole.named_parameters():
            _local(shards[name]).detach().copy_(own(weight, self.pieces[name].slices(), self.device))
        self._shards = {name: p for name, p in shards.items() if p.requires_grad}
        self.parameters = {name: nn.Parameter(_local(p).detach()) for name, p in self._shards.items()}
        self.frozen = {name: nn.Parameter(_local(p).detach(), False) for name, p in shards.items() if not p.requires_grad}

    def _piece(self, name: str, weight: Tensor) -> Tensor:
        """Return a meta tensor of the piece's shape: the rank's rows are read later, once FSDP2 has sharded the tensor."""
        return torch.empty([stop - start for start, stop in self.pieces[name].box], device="meta")

    def ask(self, compute: Callable[[Any, Any], Tensor], part: Any) -> Tensor:
        values = super().ask(compute, part)
        cast("FSDPModule", self.model).reshard()  # else the weights outside layers stay gathered until a backward pass
        return values

    def forward_backward(self, parts: Sequence[Part], compute: Compute, collect: Callable[[], None]) -> tuple[Tensor | None, Values]:
        numbers = super().forward_backward(parts, compute, collect)
        for name, shard in self._shards.items():
            if shard.grad is not None:
                self.parameters[name].grad = _local(shard.grad)
                shard.grad = None
        return numbers


def _local(tensor: Tensor) -> Tensor:
    assert isinstance(tensor, DTensor)
    local: Tensor = tensor.to_local()
    return local

