"""Conversion of a model's shape and tensors between GGUF's names and Hugging Face's.

In the architecture `llama`, the rows of the query and key projections are ordered differently: llama.cpp rotates pairs of neighbouring
rows of a head, Hugging Face rotates row i together with row i + head_dim / 2."""

from __future__ import annotations

import re
from collections.abc import Container, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from puna.models.config import ModelConfig, RopeScaling

ARCHITECTURES = {"llama": "llama", "mistral": "llama", "mixtral": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "qwen3_moe": "qwen3moe"}
"""Family → name of its architecture in GGUF."""
PERMUTED = "llama"

OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
LAYER = {
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj", "ffn_gate_inp": "mlp.gate",
}  # fmt: skip
FIELDS = {
    "context_length": "max_position_embeddings", "embedding_length": "hidden_size", "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size", "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads", "attention.key_length": "head_dim",
}  # fmt: skip
EXPERT_FIELDS = {"expert_count": "num_experts", "expert_feed_forward_length": "moe_intermediate_size"}
"""GGUF's names of sizes → names in Hugging Face's configuration (`EXPERT_FIELDS`: of a mixture of experts)."""
EXPERTS = ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps")
SKIPPED = ("rope_freqs.weight",)
LLAMA3_FACTORS = (4.0, 8.0, 16.0, 32.0)


def number(value: Any) -> float:
    """Return a float32 as the shortest decimal that rounds to it: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def raw_config(fields: Mapping[str, Any], names: Container[str], vocabulary: int, frequencies: Tensor | None) -> dict[str, Any]:
    """Return a file's configuration in Hugging Face's names. `fields`: without the architecture's prefix; `names`: the tensors' names;
    `frequencies`: the tensor `rope_freqs`. Raise ValueError, naming the field, for anything missing or unsupported."""
    architecture = fields["general.architecture"]
    experts = int(fields.get("expert_count") or 0)
    families = {family: kind for family, kind in ARCHITECTURES.items() if kind == architecture}
    if not families:
        supported = ", ".join(sorted(set(ARCHITECTURES.values())))
        raise ValueError(f"general.architecture = {architecture!r} is not supported (only {supported})")
    family = "mixtral" if experts and architecture == "llama" else next(iter(families))
    needed = ("embedding_length", "block_count", "attention.head_count", "attention.layer_norm_rms_epsilon")
    if missing := [name for name in needed if name not in fields]:
        raise ValueError(f"the file lacks {architecture}.{missing[0]}")
    heads = int(fields["attention.head_count"])
    head = int(fields.get("attention.key_length") or fields["embedding_length"] // heads)
    if (rotated := int(fields.get("rope.dimension_count") or head)) != head:
        raise ValueError(f"{architecture}.rope.dimension_count = {rotated} is not supported (only {head}, the whole head)")
    raw: dict[str, Any] = {
        "intermediate_size": int(fields.get("expert_feed_forward_length") or 0), "num_key_value_heads": heads,
        "max_position_embeddings": 2048, **{hub: int(fields[name]) for name, hub in FIELDS.items() if fields.get(name)},
        "model_type": family, "head_dim": head, "vocab_size": vocabulary,
        "rms_norm_eps": number(fields["attention.layer_norm_rms_epsilon"]), "tie_word_embeddings": "output.weight" not in names,
        "rope_parameters": _rope(fields, frequencies, head),
    }  # fmt: skip
    if experts:
        raw |= {"num_local_experts": experts, "num_experts_per_tok": int(fields["expert_used_count"]), "norm_topk_prob": True}
        raw["moe_intermediate_size"] = int(fields.get("expert_feed_forward_length") or raw["intermediate_size"])
    return raw


def _rope(fields: Mapping[str, Any], frequencies: Tensor | None, head: int) -> dict[str, Any]:
    theta = number(fields.get("rope.freq_base", 10000.0))
    # As in llama.cpp: a factor without a type is linear; `rope.scale_linear` is an older name.
    kind, factor = fields.get("rope.scaling.type", "linear"), fields.get("rope.scaling.factor", fields.get("rope.scale_linear"))
    if frequencies is not None:
        for scale in LLAMA3_FACTORS:
            scaling = RopeScaling(rope_type="llama3", factor=scale)
            if torch.allclose(_divisors(theta, head, scaling), frequencies, rtol=1e-4):
                return {"rope_type": "llama3", "rope_theta": theta, **{name: getattr(scaling, name) for name in scaling.own}}
        raise ValueError("rope_freqs scales the rotary frequencies differently from Llama 3.1")
    if kind == "linear" and factor:
        return {"rope_type": "linear", "rope_theta": theta, "factor": number(factor)}
    if kind not in ("none", "linear"):
        raise ValueError(f"rope.scaling.type = {kind!r} is not supported (only 'none' and 'linear')")
    return {"rope_type": "default", "rope_theta": theta}


def _divisors(theta: float, head: int, scaling: RopeScaling) -> Tensor:
    """Return the tensor `rope_freqs`, float32[head / 2]: the numbers by which `scaling` divides the rotary frequencies of base `theta`."""
    plain = [theta ** (-2 * i / head) for i in range(head // 2)]
    return torch.tensor([own / scaled for own, scaled in zip(plain, scaling.stretch(plain, theta), strict=True)], dtype=torch.float32)


def config_fields(config: ModelConfig) -> tuple[str, dict[str, Any], Tensor | None]:
    """Return the architecture, its fields without prefix, and `rope_freqs` or None. Raise ValueError if GGUF cannot express a setting."""
    if config.model_type not in ARCHITECTURES or config.mla is not None or config.parallel_block:
        raise ValueError(f"GGUF has no architecture for a model of the family {config.model_type}")
    if config.sliding_window is not None:
        raise ValueError(f"sliding_window = {config.sliding_window}: llama.cpp attends to everything in this architecture")
    architecture = ARCHITECTURES[config.model_type]
    fields: dict[str, Any] = {
        "vocab_size": config.vocab_size, **{name: getattr(config, hub) for name, hub in FIELDS.items()},
        "attention.value_length": config.head_dim, "rope.dimension_count": config.head_dim,
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps), "rope.freq_base": float(config.rope_theta),
    }  # fmt: skip
    if config.moe is not None:
        if not config.moe.norm_topk_prob:
            raise ValueError("norm_topk_prob = false: llama.cpp normalizes the chosen experts' weights")
        fields |= {"expert_count": config.moe.num_experts, "expert_used_count": config.moe.num_experts_per_tok}
        fields["expert_feed_forward_length"] = config.moe.moe_intermediate_size
    scaling, frequencies = config.rope_scaling, None
    if scaling is not None and scaling.rope_type == "linear":
        fields |= {"rope.scaling.type": "linear", "rope.scaling.factor": float(scaling.factor)}
    elif scaling is not None and scaling.rope_type == "yarn":
        raise ValueError("rope_scaling yarn is not written to GGUF: export in the layout of Hugging Face")
    elif scaling is not None:
        frequencies = _divisors(config.rope_theta, config.head_dim, scaling)
    return architecture, fields, frequencies


def to_state(tensors: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """Return the decoder's state dict from the tensors of a GGUF file; raise ValueError for an unknown tensor."""
    permuted = ARCHITECTURES[config.model_type] == PERMUTED
    state: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if name in SKIPPED or name.rpartition(".")[0].rpartition(".")[2] in EXPERTS:
            continue
        if permuted and (match := re.search(r"\.attn_([qk])\.", name)):
            tensor = unpermute(tensor, config.num_attention_heads if match[1] == "q" else config.num_key_value_heads)
        state[hub_name(name)] = tensor
    for layer in range(config.num_hidden_layers if config.moe else 0):
        gate, up, down = (tensors[f"blk.{layer}.{name}.weight"] for name in EXPERTS)
        place = f"model.layers.{layer}.mlp.experts"
        state |= {f"{place}.gate_up_proj": torch.cat([gate, up], 1), f"{place}.down_proj": down}
    return state


def from_state(state: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """Return the tensors of a GGUF file by name, the inverse of `to_state`, without the output layer if it is tied to the embeddings."""
    permuted = ARCHITECTURES[config.model_type] == PERMUTED
    inner = {hub: own for own, hub in LAYER.items()}
    outer = {hub: own for own, hub in OUTER.items()}
    tensors: dict[str, Tensor] = {}
    for name, tensor in state.items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        match = re.fullmatch(r"model\.layers\.(\d+)\.(.+?)(\.(?:weight|bias))?", name)
        if match is None:
            place, _, leaf = name.rpartition(".")
            tensors[f"{outer[place]}.{leaf}"] = tensor
        elif match[2] == "mlp.experts.gate_up_proj":
            gate, up = tensor.chunk(2, 1)
            tensors |= {f"blk.{match[1]}.{EXPERTS[0]}.weight": gate, f"blk.{match[1]}.{EXPERTS[1]}.weight": up}
        elif match[2] == "mlp.experts.down_proj":
            tensors[f"blk.{match[1]}.{EXPERTS[2]}.weight"] = tensor
        else:
            if permuted and match[2] in ("self_attn.q_proj", "self_attn.k_proj"):
                tensor = permute(tensor, config.num_attention_heads if "q_proj" in match[2] else config.num_key_value_heads)
            tensors[f"blk.{match[1]}.{inner[match[2]]}{match[3]}"] = tensor
    return tensors


def hub_name(name: str) -> str:
    """Return Hugging Face's name of the GGUF tensor `name`; raise ValueError if the tensor is unknown."""
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
    if match and match[2] in LAYER:
        return f"model.layers.{match[1]}.{LAYER[match[2]]}.{match[3]}"
    place, _, leaf = name.rpartition(".")
    if place not in OUTER:
        raise ValueError(f"the tensor {name} has no place in this model")
    return f"{OUTER[place]}.{leaf}"


def permute(tensor: Tensor, heads: int) -> Tensor:
    """Return a projection in llama.cpp's order: rows i and i + head_dim / 2 of a head become neighbours."""
    return tensor.reshape(heads, 2, -1, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)


def unpermute(tensor: Tensor, heads: int) -> Tensor:
    """Return a projection in Hugging Face's order; the inverse of `permute`."""
    return tensor.reshape(heads, -1, 2, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)
