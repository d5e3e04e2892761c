"""The layouts of checkpoints: how each model family names its configuration and its tensors.

In memory there is one decoder and one `ModelConfig`; on disk a model has the layout of its family (`ModelConfig.model_type`). So
transformers, vLLM, llama.cpp and lm-eval read Puna's files, and Puna reads theirs. Besides the configuration, only the experts' tensors
differ: in memory they are stacked, on disk each expert has its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args

import torch
from pydantic import ValidationError
from torch import Tensor

from puna.models.config import LAYOUTS, Mla, ModelConfig, ModelType, RopeScaling
from puna.models.settings import problems
from puna.models.untrusted.bounds import check_numbers

MODEL_TYPES = get_args(ModelType)
SUFFIX = {"lm": "ForCausalLM", "scalar": "ForSequenceClassification"}
# Fields of which this decoder supports only some values: name -> supported values, default last.
PLAIN: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", None), "mlp_bias": (False, None), "partial_rotary_factor": (1.0, None), "decoder_sparse_step": (1, None),
    "mlp_only_layers": ([], (), None),
}  # fmt: skip
# Where the experts of a layer lie on disk: their folder, and the names of gate, up and down.
EXPERTS = {"mixtral": ("block_sparse_moe", "w1", "w3", "w2"), "qwen3_moe": ("mlp", "gate_proj", "up_proj", "down_proj")}
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the outputs of AutoAWQ's packed int32, from its lowest four bits to the highest
AWQ_PARTS = ("qweight", "qzeros", "scales")


def architecture(model_type: str, head: str) -> str:
    """Return the name of transformers' class for models of a family with this head (`lm` or `scalar`)."""
    return model_type.title().replace("_", "") + SUFFIX[head]


def parse_config(raw: Mapping[str, Any]) -> ModelConfig:
    """Return the model's shape from a Hugging Face configuration. Raise ValueError for an unsupported type or field, or a missing field."""
    check_numbers(raw)
    kind = raw.get("model_type") or "llama"
    if kind not in MODEL_TYPES:
        raise ValueError(f"model_type = {kind!r} is not supported (only {', '.join(MODEL_TYPES)})")
    for name, plain in PLAIN.items():
        if raw.get(name, plain[-1]) not in plain:
            raise ValueError(f"{name} = {raw[name]!r} is not supported (only {plain[0]!r})")
    if raw.get("quantization_config") is not None:
        _check_awq(raw["quantization_config"])
    fields = ModelConfig.model_fields
    values = {"num_key_value_heads": raw.get("num_attention_heads"), **raw, "model_type": kind}
    values |= _rope(raw)
    if kind != "puna":
        must, may = LAYOUTS[kind]
        both = bool(raw.get("attention_bias")) and "attention_bias" in may
        values |= _window(raw, kind) | _experts(raw, kind) | _latent(raw, kind) | {"qkv_bias": both or "qkv_bias" in must, "o_bias": both}
        values |= {"qk_norm": "qk_norm" in must, "parallel_block": False}
    settings = {name: values[name] for name in fields if values.get(name) is not None}
    if missing := [name for name, field in fields.items() if field.is_required() and name not in settings]:
        raise ValueError(f"missing {', '.join(missing)}")
    try:
        return ModelConfig(**settings)
    except ValidationError as error:
        raise ValueError("; ".join(problems(error))) from error


def _rope(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return `rope_theta` and `rope_scaling` from the fields of any transformers version; raise ValueError for unsupported values."""
    where = "rope_parameters" if raw.get("rope_parameters") else "rope_scaling"
    rope = dict(raw.get(where) or {})
    other = raw.get("rope_scaling") or {}
    if other and any(other.get(name) != rope.get(name) for name in ("rope_type", "factor") if name in other):
        raise ValueError(f"rope_parameters and rope_scaling disagree: {rope} and {other}")
    theta = rope.pop("rope_theta", raw.get("rope_theta"))
    kind = rope.pop("rope_type", None) or rope.pop("type", None) or "default"
    if kind == "default":
        return {"rope_theta": theta, "rope_scaling": None}
    if kind not in ("linear", "llama3", "yarn"):
        raise ValueError(f"{where}.rope_type = {kind!r} is not supported (only 'default', 'linear', 'llama3' and 'yarn')")
    if kind == "yarn":
        rope = {"beta_fast": 32.0, "beta_slow": 1.0, **{name: value for name, value in rope.items() if value is not None}}
        if other_way := [name for name in ("attention_factor", "mscale", "mscale_all_dim", "truncate") if name in rope]:
            raise ValueError(f"{where}.{other_way[0]} is not supported: leave it out of the yarn settings")
    needed = RopeScaling(rope_type=kind, factor=1).own
    if lacking := [name for name in needed if name not in rope]:
        raise ValueError(f"{where} of type {kind!r} lacks {', '.join(lacking)}")
    return {"rope_theta": theta, "rope_scaling": {"rope_type": kind, **{name: rope[name] for name in needed}}}


def _window(raw: Mapping[str, Any], kind: str) -> dict[str, Any]:
    window, layers = raw.get("sliding_window"), None
    if kind.startswith("qwen"):
        window = window if raw.get("use_sliding_window") else None
        count = raw.get("num_hidden_layers") or 0
        types = raw.get("layer_types")
        if window is not None and kind != "qwen3_moe":
            first = raw.get("max_window_layers", 28)
            layers = [i for i in range(count) if (types[i] == "sliding_attention" if types else i >= first)]
            window = window if layers else None
    elif kind not in ("mistral", "mixtral"):
        window = None
    return {"sliding_window": window, "sliding_layers": tuple(layers) if layers else None}


def _experts(raw: Mapping[str, Any], kind: str) -> dict[str, Any]:
    if kind not in EXPERTS:
        return {"moe": None}
    own = kind == "qwen3_moe"
    experts = raw.get("num_local_experts") or raw.get("num_experts")
    width = raw.get("moe_intermediate_size" if own else "intermediate_size")
    top_k = raw.get("num_experts_per_tok")
    if not (experts and width and top_k):
        raise ValueError("missing the number of experts, num_experts_per_tok or the experts' width")
    normed = bool(raw.get("norm_topk_prob", False)) if own else True
    return {"moe": {
        "num_experts": experts, "num_experts_per_tok": top_k, "moe_intermediate_size": width, "norm_topk_prob": normed,
        "router_aux_loss_coef": raw.get("router_aux_loss_coef", 0.001),
    }}  # fmt: skip


def _latent(raw: Mapping[str, Any], kind: str) -> dict[str, Any]:
    if kind != "deepseek_v3":
        return {"mla": None}
    dense = raw.get("first_k_dense_replace") or 0
    if dense < (raw.get("num_hidden_layers") or 0):
        raise ValueError(f"first_k_dense_replace = {dense}: DeepSeek's sigmoid-routed experts are not supported")
    if raw.get("rope_interleave", True):
        raise ValueError("rope_interleave = True is not supported (only False)")
    return {"mla": {name: raw.get(name) or 0 for name in Mla.model_fields}, "head_dim": None}


def hub_config(config: ModelConfig) -> dict[str, Any]:
    """Return the configuration under its family's own field names; `parse_config` is the inverse."""
    raw = config.model_dump()
    nested = {name: raw.pop(name) for name in ("rope_scaling", "moe", "mla")}
    if config.reward_pooling == "last":  # the default, which other programs assume
        del raw["reward_pooling"]
    if config.model_type == "puna":
        return {**raw, **nested, "hidden_act": "silu", "rope_parameters": _rope_parameters(config)}
    for name in ("sliding_window", "sliding_layers", "qkv_bias", "o_bias", "qk_norm", "parallel_block"):
        del raw[name]
    raw |= {"hidden_act": "silu", "rope_parameters": _rope_parameters(config)}
    if "attention_bias" in LAYOUTS[config.model_type][1]:
        raw["attention_bias"] = config.o_bias
    if config.model_type == "llama":
        raw["mlp_bias"] = False
    if config.model_type in ("mistral", "mixtral"):
        raw["sliding_window"] = config.sliding_window
    if config.model_type.startswith("qwen"):
        raw |= {"use_sliding_window": config.sliding_window is not None, "sliding_window": config.sliding_window}
    if config.model_type in ("qwen2", "qwen3"):
        kinds = ["full_attention" if window is None else "sliding_attention" for window in config.windows]
        raw |= {"layer_types": kinds, "max_window_layers": config.num_hidden_layers}
    if config.model_type == "mixtral":
        raw |= {name: nested["moe"][name] for name in ("num_experts_per_tok", "router_aux_loss_coef")}
        raw["num_local_experts"] = nested["moe"]["num_experts"]
    if config.model_type == "qwen3_moe":
        raw |= nested["moe"] | {"decoder_sparse_step": 1, "mlp_only_layers": []}
    if config.mla is not None:
        raw |= nested["mla"] | {"q_lora_rank": config.mla.q_lora_rank or None, "rope_interleave": False}
        raw |= {"first_k_dense_replace": config.num_hidden_layers, "num_nextn_predict_layers": 0}
        del raw["head_dim"]
    return raw


def _rope_parameters(config: ModelConfig) -> dict[str, Any]:
    if config.rope_scaling is None:
        return {"rope_type": "default", "rope_theta": config.rope_theta}
    scaling = config.rope_scaling
    return {"rope_theta": config.rope_theta, "rope_type": scaling.rope_type, **{name: getattr(scaling, name) for name in scaling.own}}


def to_disk(state: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """Return a state dict under the family's names on disk, with separate tensors per expert."""
    if config.model_type not in EXPERTS:
        return dict(state)
    folder, gate, up, down = EXPERTS[config.model_type]
    tensors: dict[str, Tensor] = {}
    for name, tensor in state.items():
        layer, separator, part = name.partition(".mlp.")
        if not separator:
            tensors[name] = tensor
            continue
        for expert in range(len(tensor) if part.startswith("experts.") else 0):
            place = f"{layer}.{folder}.experts.{expert}"
            if part == "experts.down_proj":
                tensors[f"{place}.{down}.weight"] = tensor[expert]
            else:
                tensors[f"{place}.{gate}.weight"], tensors[f"{place}.{up}.weight"] = tensor[expert].chunk(2)
        if part == "gate.weight":
            tensors[f"{layer}.{folder}.gate.weight"] = tensor
    return tensors


def from_disk(tensors: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """Return a state dict from tensors under their names on disk, the inverse of `to_disk`. Raise ValueError if an expert is missing."""
    if config.model_type not in EXPERTS or config.moe is None:
        return dict(tensors)
    folder, gate, up, down = EXPERTS[config.model_type]
    if config.moe.num_experts > len(tensors):
        raise ValueError(f"num_experts = {config.moe.num_experts:,}, but there are {len(tensors):,} tensors: the files hold fewer experts")
    state = {
        name.replace(f".{folder}.gate.", ".mlp.gate."): tensor for name, tensor in tensors.items() if f".{folder}.experts." not in name
    }
    for layer in range(config.num_hidden_layers):
        here, there = f"model.layers.{layer}.mlp.experts", f"model.layers.{layer}.{folder}.experts"
        names = [[f"{there}.{e}.{part}.weight" for e in range(config.moe.num_experts)] for part in (gate, up, down)]
        if lacking := [name for part in names for name in part if name not in tensors]:
            raise ValueError(f"{lacking[0]} is missing")
        if odd := [name for some in (names[0] + names[1], names[2]) for name in some if tensors[name].shape != tensors[some[0]].shape]:
            raise ValueError(f"{odd[0]} {list(tensors[odd[0]].shape)} has another shape than those of the other experts")
        gates, ups, downs = (torch.stack([tensors[name] for name in part]) for part in names)
        state |= {f"{here}.gate_up_proj": torch.cat([gates, ups], 1), f"{here}.down_proj": downs}
    return state


def _check_awq(settings: Mapping[str, Any]) -> None:
    """Raise ValueError if a checkpoint's quantization_config is not supported."""
    values = {"quant_method": ("awq",), "bits": (4, None), "version": ("gemm", "GEMM", None), "zero_point": (True, None)}
    for name, supported in values.items():
        if settings.get(name) not in supported:
            raise ValueError(f"quantization_config.{name} = {settings.get(name)!r} is not supported (only {supported[0]!r})")


def unpack(packed: Tensor) -> Tensor:
    """Return the numbers from 0 to 15 in `packed` [rows, M] int32, unpacked to [rows, 8 M] int32 in the order of the outputs."""
    places = torch.tensor([AWQ_ORDER.index(output) for output in range(8)], dtype=torch.int32, device=packed.device)
    return ((packed[:, :, None] >> (4 * places)) & 15).flatten(1)


def spelled_out(tensors: dict[str, Tensor], dtype: torch.dtype | None) -> dict[str, Tensor]:
    """Return the tensors with each AWQ matrix (Lin et al. 2024) unpacked to a `weight` [N, D] in `dtype` (None: the scales' dtype).

    w = (q - z) s, with z and s of the input's group. On disk a matrix of D inputs and N outputs is: `qweight` [D, N / 8] int32 with eight
    4-bit numbers per element; `qzeros` [D / group, N / 8], packed likewise; `scales` [D / group, N]. `tensors` is changed in place.
    Raise ValueError, naming the tensor, if a part is missing or does not fit the others."""
    for name in [name for name in tensors if name.endswith(".qweight")]:
        base = name.removesuffix("qweight")
        if lacking := [part for part in AWQ_PARTS if f"{base}{part}" not in tensors]:
            raise ValueError(f"{base}{lacking[0]} is missing")
        q, zeros, scales = (tensors.pop(f"{base}{part}") for part in AWQ_PARTS)
        groups, N = scales.shape if scales.dim() == q.dim() == 2 and len(scales) else (1, 0)
        packed = q.dtype == zeros.dtype == torch.int32 and N and tuple(zeros.shape) == (groups, q.shape[1])
        if not packed or 8 * q.shape[1] != N or len(q) % groups:
            raise ValueError(f"{name} {list(q.shape)} {q.dtype}, zeros {list(zeros.shape)} and scales {list(scales.shape)} do not fit")
        steps = (unpack(q).view(groups, -1, N) - unpack(zeros)[:, None]).float() * scales.float()[:, None]
        tensors[f"{base}weight"] = steps.flatten(0, 1).T.contiguous().to(dtype or scales.dtype)
    return tensors
