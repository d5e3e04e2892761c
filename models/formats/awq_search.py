"""Conversion of a dense model to AWQ's four bits (Lin et al. 2024). Before rounding, a matrix's large inputs are scaled down and the
weights that multiply them are scaled up. The model's function stays the same, and the rounding error of these weights falls.

An input's scale is s = (mean |x|)^a, normalized so that its largest and smallest value multiply to 1. The exponent a, one of 21 from 0
(plain rounding) to 1, minimizes the squared error of the products on the calibration texts (the paper's equations 4 and 5). The preceding
norm, or the rows of the preceding matrix, are divided by s. Then a group's range is clipped where that lowers the error. Matrices that read
the same inputs share scales.

Shapes: T calibration tokens, D inputs, N outputs, groups of `group` neighbouring inputs."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from puna.models.forest import Forest
from puna.models.formats.checkpoint import WEIGHTS, save
from puna.models.formats.families import AWQ_ORDER
from puna.models.layers import Attention, Linear
from puna.models.tokens.tokenizer import Tokenizer
from puna.models.transformer import Transformer, forest_attend, rotary_table

GROUPS = (128, 64, 32)
READ, LENGTH = 16, 512  # maximum pieces read from a text, and tokens per piece
EXPONENTS = 21
SHRINKS = tuple(1 - i / 20 for i in range(11))  # the shares of a group's range that the search tries
ROWS = 1024  # maximum tokens whose products are compared
FIRST = 2.0**-20  # minimum scale of a group, so that no number is divided by 0


class Packed(NamedTuple):
    """A matrix in AWQ's four bits: q [D / group, group, N] and zeros [D / group, N] from 0 to 15, scales [D / group, N] fp16."""

    q: Tensor
    zeros: Tensor
    scales: Tensor

    def weight(self) -> Tensor:
        return ((self.q - self.zeros[:, None]) * self.scales.float()[:, None]).flatten(0, 1).T.contiguous()

    def tensors(self, base: str) -> dict[str, Tensor]:
        """Return the packed tensors by name in a checkpoint; `base`: the prefix of the names."""
        return {f"{base}qweight": pack(self.q.flatten(0, 1)), f"{base}qzeros": pack(self.zeros), f"{base}scales": self.scales}


def pack(numbers: Tensor) -> Tensor:
    """Return `numbers` [rows, 8 M] from 0 to 15, packed into [rows, M] int32: eight numbers per element, in AutoAWQ's order."""
    eights = numbers.to(torch.int64).unflatten(1, (-1, 8))[..., list(AWQ_ORDER)]
    whole = (eights << (4 * torch.arange(8))).sum(-1)
    return torch.where(whole >= 1 << 31, whole - (1 << 32), whole).to(torch.int32)


def group_of(model: Transformer) -> int:
    """Return the largest group size that divides the inputs of all layers' matrices; raise ValueError if AWQ cannot hold the model."""
    config = model.config
    if model.head != "lm" or config.moe is not None or config.mla is not None or config.parallel_block:
        raise ValueError("AWQ supports only language models with plain attention, followed by plain feed-forward blocks")
    for name, module in model.model.layers.named_modules():
        if isinstance(module, Linear) and module.out_features % 8:
            raise ValueError(f"{name} has {module.out_features} outputs: AutoAWQ's layout packs eight, so they must be a multiple of 8")
    inputs = (config.hidden_size, config.intermediate_size, config.num_attention_heads * config.head_dim)
    group = next((group for group in GROUPS if all(width % group == 0 for width in inputs)), None)
    if group is None:
        raise ValueError(f"inputs of {inputs} cannot be divided into groups of {GROUPS}, which AWQ's layout needs")
    return group


def round_to_4_bits(w_ND: Tensor, group: int, share: Tensor | float = 1.0) -> Packed:
    """Return w [N, D] rounded to 16 levels in each group of `group` columns. The levels span the group's minimum and maximum, extended to
    include 0, times `share` [N, D / group]."""
    w_NgG = w_ND.detach().float().unflatten(1, (-1, group))
    low, high = w_NgG.amin(-1).clamp(max=0) * share, w_NgG.amax(-1).clamp(min=0) * share
    scales = ((high - low) / 15).clamp(min=FIRST).half()
    zeros = (-low / scales.float()).round().clamp(0, 15)
    q = ((w_NgG / scales.float()[..., None]).round() + zeros[..., None]).clamp(0, 15)
    return Packed(q.to(torch.int32).permute(1, 2, 0), zeros.to(torch.int32).T.contiguous(), scales.T.contiguous())


def scales_of(x_TD: Tensor, weights: Sequence[Tensor], group: int, heads: tuple[int, int] = (1, 1)) -> Tensor:
    """Return the divisors [D] of the inputs x [T, D] that minimize the 4-bit error of `weights` [N, D]. `heads` (G, R): the inputs are G
    groups of R heads, and the heads of a group share divisors."""
    size_GRK = x_TD.abs().mean(0).clamp(min=1e-8).view(*heads, -1)
    size_D = size_GRK.mean(1, keepdim=True).expand_as(size_GRK).flatten()
    best, scales = float("inf"), torch.ones_like(size_D)
    for number in range(EXPONENTS):
        s_D = size_D ** (number / (EXPONENTS - 1))
        s_D = s_D / (s_D.max() * s_D.min()).sqrt()
        differences = [w_ND - round_to_4_bits(w_ND * s_D, group).weight() / s_D for w_ND in weights]
        error = sum(float((x_TD @ difference.T).square().sum()) for difference in differences)
        if error < best:
            best, scales = error, s_D
    return scales


def shares_of(x_TD: Tensor, w_ND: Tensor, group: int) -> Tensor:
    """Return the share of each group's range to keep, [N, D / group], that minimizes the squared error of the group's products."""
    x_gTG = x_TD.unflatten(1, (-1, group)).transpose(0, 1)
    gram_gGG = x_gTG.transpose(1, 2) @ x_gTG
    best = torch.full((len(w_ND), len(gram_gGG)), float("inf"))
    shares = torch.ones_like(best)
    for share in SHRINKS:
        d_gNG = (w_ND - round_to_4_bits(w_ND, group, share).weight()).unflatten(1, (-1, group)).transpose(0, 1)
        error_Ng = ((d_gNG @ gram_gGG) * d_gNG).sum(-1).T
        shares = torch.where(error_Ng < best, share, shares)
        best = torch.minimum(error_Ng, best)
    return shares


def stretches(ids: Sequence[int]) -> list[Sequence[int]]:
    """Return up to `READ` pieces of `LENGTH` tokens, evenly spread over a text; raise ValueError if the text is shorter than one piece."""
    count = min(READ, len(ids) // LENGTH)
    if not count:
        raise ValueError(f"a text of {len(ids)} tokens is too short to choose scales: give at least {LENGTH}, better {READ * LENGTH}")
    return [ids[at : at + LENGTH] for at in (i * (len(ids) // count) for i in range(count))]


def write(model: Transformer, tokenizer: Tokenizer, rows: Sequence[Sequence[int]], folder: Path) -> None:
    """Write the model in AutoAWQ's layout (layers' matrices in four bits, the rest in fp16); `model` changes. `rows`: see `pack_layers`."""
    group, matrices = group_of(model), pack_layers(model, rows)
    save(model.half(), folder, tokenizer)
    state = load_file(folder / WEIGHTS)
    for base, one in matrices.items():
        del state[f"{base}weight"]
        state |= one.tensors(base)
    save_file({name: tensor.contiguous() for name, tensor in state.items()}, folder / WEIGHTS, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config["quantization_config"] = {"quant_method": "awq", "bits": 4, "group_size": group, "version": "gemm", "zero_point": True}
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")


@torch.no_grad()
def pack_layers(model: Transformer, rows: Sequence[Sequence[int]], search: bool = True) -> dict[str, Packed]:
    """Return the layers' packed matrices by name; the model's norms and matrices are changed in place to match. rows: token ids of
    calibration texts, similar to the model's future input. `search=False` only rounds to nearest. Raise ValueError as `group_of` does."""
    group, matrices = group_of(model), dict[str, Packed]()
    for number, (block, linears, inputs_of) in enumerate(_layers(model, rows)):
        heads = (model.config.num_key_value_heads, model.config.num_attention_heads // model.config.num_key_value_heads)
        made_by: dict[nn.Module, tuple[str, ...]] = {
            block.input_layernorm: ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
            block.self_attn.v_proj: ("self_attn.o_proj",),
            block.post_attention_layernorm: ("mlp.gate_proj", "mlp.up_proj"),
            block.mlp.up_proj: ("mlp.down_proj",),
        }
        for before, names in made_by.items() if search else ():
            alike = heads if before is block.self_attn.v_proj else (1, 1)
            s_D = scales_of(inputs_of[names[0]], [linears[name].weight for name in names], group, alike)
            _divide(before, s_D.view(*alike, -1)[:, 0].flatten())
            for name in names:
                linears[name].weight *= s_D
                inputs_of[name] = inputs_of[name] / s_D
        for name, module in linears.items():
            # Attention multiplies queries by keys, so the error of one projection is a poor criterion: AWQ does not clip these two.
            cut = search and not name.endswith(("q_proj", "k_proj"))
            whole = round_to_4_bits(module.weight, group, shares_of(inputs_of[name], module.weight, group) if cut else 1.0)
            matrices[f"model.layers.{number}.{name}."] = whole
            module.weight.copy_(whole.weight())
    return matrices


def _divide(module: Any, s_N: Tensor) -> None:
    for parameter in (module.weight, getattr(module, "bias", None)):
        if parameter is not None:
            parameter /= s_N if parameter.ndim == 1 else s_N[:, None]


def _layers(model: Transformer, rows: Sequence[Sequence[int]]) -> Iterator[tuple[Any, dict[str, Linear], dict[str, Tensor]]]:
    """Yield each layer, its matrices by name, and their inputs [T, D] of up to `ROWS` tokens, before the caller changes the layer."""
    forest = Forest.pack([list(row) for row in rows])
    attend, x_TD = forest_attend(model.config, forest.mask), model.model.embed_tokens(forest.tokens)
    cos, sin = rotary_table(model.config, forest.positions, x_TD.dtype)
    some = torch.linspace(0, len(x_TD) - 1, min(ROWS, len(x_TD))).long()

    def keep(inputs_of: dict[str, Tensor], name: str, _: nn.Module, arguments: tuple[Tensor, ...]) -> None:
        inputs_of[name] = arguments[0][some].float()

    for block in model.model.layers:
        assert isinstance(block.self_attn, Attention)
        inputs_of: dict[str, Tensor] = {}
        linears = {name: module for name, module in block.named_modules() if isinstance(module, Linear)}
        hooks = [module.register_forward_pre_hook(partial(keep, inputs_of, name)) for name, module in linears.items()]
        x_TD, _ = block(x_TD, cos, sin, attend)
        for hook in hooks:
            hook.remove()
        yield block, linears, inputs_of
