"""Functions that distribute a model over processes as a layout says."""

from __future__ import annotations

import copy

import torch
from torch import nn

from puna.kernels.operators import PLAIN
from puna.models.accounting import DTYPES, Precision
from puna.models.config import ModelConfig
from puna.models.training.parallel.base import Parallel
from puna.models.training.parallel.context import Cut
from puna.models.training.parallel.cut_model import place
from puna.models.training.parallel.layout import Layout
from puna.models.training.parallel.mesh import Mesh, layout_of
from puna.models.training.parallel.pipeline import Pipelined
from puna.models.transformer import Transformer, initial_values


def parallel(
    model: nn.Module, layout: Layout, mesh: Mesh | None = None, device: torch.device | None = None, precision: Precision = "fp32",
    **used: object,
) -> Parallel:  # fmt: skip
    """Return a model under a layout (`mesh`'s, if given). Raise ValueError for a layout that is not proved, see `Layout.refusal`.
    `mesh`: the ranks; None: all processes. `device`: where this rank's pieces are; None: the model's device."""
    layout = mesh.layout if mesh is not None else layout_of(layout)
    config, place = model.config if isinstance(model, Transformer) else None, device or next(model.parameters()).device
    used["dropout"] = any(isinstance(module, nn.Dropout) and module.p for module in model.modules())
    used["dora"] = any(".lora_magnitude_vector." in name for name, _ in model.named_parameters())
    used["nf4"] = not all(p.is_floating_point() for p in model.parameters())
    if why := layout.refusal(place.type, config, **used):
        raise ValueError(why)
    mesh, dtype = mesh or Mesh(layout), DTYPES[precision]
    if layout.axes <= {"data"}:
        return Parallel(model, mesh, device, dtype)
    assert isinstance(model, Transformer)
    if model.held is not None:
        if (model.held.mesh.layout, model.held.dtype) != (layout, dtype):
            raise ValueError(f"the model is divided for {model.held.mesh.layout} in {model.held.dtype}, not for {layout} in {dtype}")
        model.held.owned = frozenset()
        return model.held
    if layout.pipeline > 1:
        return Pipelined(model, mesh, device, dtype)
    if layout.shard == 1:
        return Cut(model, mesh, device, dtype)
    # The import of FSDP takes a second, which other layouts do not wait for.
    from puna.models.training.parallel.shard import Sharded

    return Sharded(model, mesh, device, dtype)


def part_of(
    model: Transformer, layout: Layout, mesh: Mesh | None = None, device: torch.device | None = None, precision: Precision | None = None
) -> Parallel:
    """Return this rank's frozen part of a model in `precision` (None: fp32). A model that is not split is returned whole, or as a copy."""
    if layout.parts(model.config) is None:
        if precision is None:
            return alone(model)
        return Parallel(copy.deepcopy(model).requires_grad_(False).to(DTYPES[precision]), Mesh(Layout()), dtype=DTYPES[precision])
    if model.held is not None:
        return model.held
    held = parallel(model.requires_grad_(True), layout, mesh, device, precision or "fp32")
    for weight in held.model.requires_grad_(False).parameters():
        weight.data = weight.data.to(held.dtype) if type(weight) in PLAIN else weight.data  # FSDP2 rounds its own
    held.parameters, held.frozen = {}, held.parameters | held.frozen
    return held


def alone(model: Transformer | Parallel) -> Parallel:
    """Return the `Parallel` that has a model's weights: the argument itself, the ranks' pieces, or the whole model in one process."""
    return model if isinstance(model, Parallel) else model.held or Parallel(model, Mesh(Layout()))


def in_pieces(model: Transformer, layout: Layout, device: torch.device, precision: Precision) -> Transformer:
    """Return the model. If the layout divides it, it then holds only this rank's pieces, on `device`, to be trained in `precision`."""
    if layout.parts(model.config) is not None:
        parallel(model, layout, device=device, precision=precision).release()
    return model


@torch.no_grad()
def initial(config: ModelConfig, seed: int, layout: Layout, device: torch.device, precision: Precision) -> Transformer:
    """Return a model with its `initial_values`, on `device`, for training in `precision`; each rank draws only pieces that it holds."""
    if layout.parts(config) is None:
        return Transformer(config, seed=seed).to(device)
    with torch.device("meta"):
        model = Transformer(config)
    for name, weight in list(model.named_parameters(remove_duplicate=False)):
        place(model, name, nn.Parameter(torch.zeros(()).expand(weight.shape)))
    if config.tie_word_embeddings:
        model.lm_head.weight = model.model.embed_tokens.weight
    held = parallel(model, layout, device=device, precision=precision)
    for name, weight in held.parameters.items():
        piece = held.pieces[name]
        weight.copy_(initial_values(config, seed, name, piece.shape, piece.slices()))
    held.release()
    return model
