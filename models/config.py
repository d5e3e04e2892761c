"""The shape of a decoder of the Llama family, under the field names of a Hugging Face `config.json`."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, get_args


@dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are stretched for contexts longer than those first trained on.

    linear: every frequency is divided by `factor` (Chen et al. 2023). llama3: only wavelengths longer than
    `original_max_position_embeddings / low_freq_factor` tokens are; those shorter than `.../ high_freq_factor`
    stay, and between the two the change is gradual (Llama 3.1).
    """

    rope_type: Literal["linear", "llama3"]
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192

    def __post_init__(self) -> None:
        if self.rope_type not in ("linear", "llama3"):
            raise ValueError(f"rope_scaling.rope_type must be linear or llama3, not {self.rope_type!r}")
        if self.factor < 1:
            raise ValueError(f"rope_scaling.factor must be at least 1, not {self.factor}")
        if not 0 < self.low_freq_factor < self.high_freq_factor:
            raise ValueError("rope_scaling needs 0 < low_freq_factor < high_freq_factor")

    def scaled(self, frequency: float) -> float:
        """The stretched frequency, in radians per token."""
        if self.rope_type == "linear":
            return frequency / self.factor
        turns = self.original_max_position_embeddings * frequency / (2 * math.pi)
        share = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        share = min(max(share, 0.0), 1.0)
        return frequency * (share + (1 - share) / self.factor)


@dataclass(frozen=True)
class Moe:
    """A mixture of experts in place of each feed-forward block.

    Each token goes to the `num_experts_per_tok` experts of highest router probability, weighted by those
    probabilities, which are made to sum to one where `norm_topk_prob`. `router_aux_loss_coef` weighs the
    load-balancing loss (Fedus et al. 2022) in training.
    """

    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    norm_topk_prob: bool = True
    router_aux_loss_coef: float = 0.001

    def __post_init__(self) -> None:
        if not 1 <= self.num_experts_per_tok <= self.num_experts:
            raise ValueError(
                f"num_experts_per_tok must lie in 1..num_experts ({self.num_experts}), not {self.num_experts_per_tok}"
            )
        if self.moe_intermediate_size < 1 or self.router_aux_loss_coef < 0:
            raise ValueError(
                "moe_intermediate_size must be positive and router_aux_loss_coef must not be negative"
            )


@dataclass(frozen=True)
class Mla:
    """Multi-head latent attention (DeepSeek-V2): keys and values from one latent vector per token.

    Widths in elements: `kv_lora_rank` of that vector, `q_lora_rank` of the queries' (0: queries straight from
    the hidden state), `qk_nope_head_dim` and `qk_rope_head_dim` of a key's parts without and with position,
    the latter shared by all heads, `v_head_dim` of a value.
    """

    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    q_lora_rank: int = 0

    def __post_init__(self) -> None:
        for name in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be positive, not {getattr(self, name)}")
        if self.q_lora_rank < 0 or self.qk_rope_head_dim % 2:
            raise ValueError("q_lora_rank must not be negative and qk_rope_head_dim must be even")

    @property
    def qk_head_dim(self) -> int:
        """Width of a query or key."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim


ModelType = Literal["llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen3_moe", "deepseek_v3", "puna"]
# What each layout must have and what it may have beyond a plain Llama; `puna` is the layout of all the rest.
LAYOUTS: dict[ModelType, tuple[frozenset[str], frozenset[str]]] = {
    "llama": (frozenset(), frozenset({"attention_bias"})),
    "mistral": (frozenset(), frozenset({"window"})),
    "qwen2": (frozenset({"qkv_bias"}), frozenset({"window", "window_in_some_layers"})),
    "qwen3": (frozenset({"qk_norm"}), frozenset({"attention_bias", "window", "window_in_some_layers"})),
    "mixtral": (frozenset({"moe"}), frozenset({"window"})),
    "qwen3_moe": (
        frozenset({"moe", "qk_norm"}),
        frozenset({"attention_bias", "window", "own_expert_width", "raw_expert_weights"}),
    ),
    "deepseek_v3": (frozenset({"mla"}), frozenset({"attention_bias"})),
}


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of the decoder and which of the family's variations it has. Widths and lengths are in elements
    and tokens.

    head_dim           width of a query or key head; left out, it is hidden_size // num_attention_heads, and
                       with mla the sum of that's two parts
    num_key_value_heads  shared evenly by the query heads: as many as those is multi-head, one multi-query,
                       between them grouped-query attention (Ainslie et al. 2023)
    sliding_window     tokens a query sees, itself included, in `sliding_layers` (None: in all layers)
    qkv_bias, o_bias   biases of the attention's projections
    qk_norm            RMSNorm on each query and key head before rotation
    parallel_block     attention and feed-forward both read one normalised input and add up (PaLM)
    rope_scaling, moe, mla  see their classes
    model_type         whose layout a checkpoint has; left out, the first of `LAYOUTS` that can hold the model
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int = 0
    rope_theta: float = 10_000.0
    rms_norm_eps: float = 1e-5
    tie_word_embeddings: bool = False
    max_position_embeddings: int = 2048
    initializer_range: float = 0.02
    rope_scaling: RopeScaling | None = None
    sliding_window: int | None = None
    sliding_layers: tuple[int, ...] | None = None
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: bool = False
    parallel_block: bool = False
    moe: Moe | None = None
    mla: Mla | None = None
    model_type: str = ""

    def __post_init__(self) -> None:
        for name, kind in (("rope_scaling", RopeScaling), ("moe", Moe), ("mla", Mla)):
            if isinstance(value := getattr(self, name), dict):
                object.__setattr__(self, name, kind(**value))
        if self.head_dim == 0 and self.num_attention_heads > 0:
            width = self.hidden_size // self.num_attention_heads if self.mla is None else self.mla.qk_head_dim
            object.__setattr__(self, "head_dim", width)
        if self.sliding_layers is not None:
            object.__setattr__(self, "sliding_layers", tuple(sorted(set(self.sliding_layers))))
        self._check()
        object.__setattr__(self, "model_type", self._layout())

    def _check(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, int | float) and not isinstance(value, bool) and value <= 0:
                raise ValueError(f"ModelConfig.{field.name} must be positive, not {value!r}")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads ({self.num_attention_heads}) must be a multiple of "
                f"num_key_value_heads ({self.num_key_value_heads})"
            )
        if self.head_dim % 2 and self.mla is None:
            raise ValueError(f"head_dim must be even for rotary embeddings, not {self.head_dim}")
        layers = self.sliding_layers or ()
        if layers and (self.sliding_window is None or not 0 <= layers[0] <= layers[-1] < self.num_hidden_layers):
            raise ValueError(
                f"sliding_layers {layers} must be layers of 0..{self.num_hidden_layers - 1}, with a sliding_window"
            )
        if self.mla and (self.num_key_value_heads != self.num_attention_heads or self.qkv_bias != self.o_bias):
            raise ValueError("latent attention (mla) has as many key-value as query heads, and all biases or none")
        if self.mla and self.head_dim != self.mla.qk_head_dim:
            raise ValueError(f"head_dim must be left out or {self.mla.qk_head_dim} with mla, not {self.head_dim}")
        if self.mla and (self.qk_norm or self.sliding_window):
            raise ValueError("latent attention (mla) has neither qk_norm nor sliding_window here")

    def _layout(self) -> str:
        """The layout that holds this model; ValueError where `model_type` names one that cannot."""
        has = self.features
        fitting = [
            name for name, (must, may) in LAYOUTS.items() if must <= has <= must | may
        ]
        if not self.model_type:
            return fitting[0] if fitting else "puna"
        if self.model_type not in get_args(ModelType):
            raise ValueError(
                f"model_type = {self.model_type!r} is not supported (only {', '.join(get_args(ModelType))})"
            )
        if self.model_type != "puna" and self.model_type not in fitting:
            raise ValueError(
                f"a checkpoint of model_type {self.model_type!r} cannot hold a model with "
                f"{', '.join(sorted(has)) or 'no variation'}; leave model_type out to have one chosen"
            )
        return self.model_type

    @property
    def features(self) -> frozenset[str]:
        """What the model has beyond a plain Llama."""
        found = {
            "attention_bias": self.qkv_bias and self.o_bias,
            "qkv_bias": self.qkv_bias and not self.o_bias,
            "o_bias": self.o_bias and not self.qkv_bias,
            "qk_norm": self.qk_norm,
            "parallel_block": self.parallel_block,
            "window": self.sliding_window is not None and self.sliding_layers is None,
            "window_in_some_layers": bool(self.sliding_layers),
            "moe": self.moe is not None,
            "own_expert_width": self.moe is not None and self.moe.moe_intermediate_size != self.intermediate_size,
            "raw_expert_weights": self.moe is not None and not self.moe.norm_topk_prob,
            "mla": self.mla is not None,
        }
        return frozenset(name for name, there in found.items() if there)

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Each layer's sliding window in tokens; None where a query sees all of its path."""
        sliding = range(self.num_hidden_layers) if self.sliding_layers is None else self.sliding_layers
        return tuple(self.sliding_window if i in sliding else None for i in range(self.num_hidden_layers))

    @property
    def value_dim(self) -> int:
        """Width of a value head."""
        return self.head_dim if self.mla is None else self.mla.v_head_dim

    def rotary_frequencies(self) -> list[float]:
        """Angle of each rotated pair of elements from one token to the next, in radians."""
        width = self.head_dim if self.mla is None else self.mla.qk_rope_head_dim
        plain = [self.rope_theta ** (-2 * i / width) for i in range(width // 2)]
        return plain if self.rope_scaling is None else [self.rope_scaling.scaled(f) for f in plain]

    def to_dict(self) -> dict[str, Any]:
        """The fields as a plain dictionary, ready for JSON; `ModelConfig(**d)` is the inverse."""
        return asdict(self)
