"""The shape of a decoder of the Llama family, under the field names of a Hugging Face `config.json`."""

from __future__ import annotations

import math
from typing import Literal, get_args

from pydantic import Field, model_validator

from puna.models.settings import Settings


class RopeScaling(Settings):
    """Scaling (stretching) of the rotary frequencies for contexts longer than in pretraining.

    linear: every frequency is divided by `factor` (Chen et al. 2023). llama3: frequencies with a wavelength above
    `original_max_position_embeddings / low_freq_factor` tokens are divided, frequencies with a wavelength below
    `.../ high_freq_factor` stay, and between the two the change is gradual (Llama 3.1). yarn: frequencies of more than `beta_fast`
    turns over the original context stay, frequencies of fewer than `beta_slow` turns are divided, and between the two the change is
    linear in the frequency's index; queries and keys are multiplied by 0.1 ln(factor) + 1 (Peng et al. 2023)."""

    rope_type: Literal["linear", "llama3", "yarn"] = Field(description="linear: all frequencies alike; llama3, yarn: long wavelengths only")
    factor: float = Field(ge=1, description="Divisor of the frequencies")
    low_freq_factor: float = Field(1.0, gt=0, description="llama3: wavelengths above context / low_freq_factor are stretched in full")
    high_freq_factor: float = Field(4.0, gt=0, description="llama3: wavelengths below context / high_freq_factor stay")
    beta_fast: float = Field(32.0, gt=0, description="yarn: turns over the original context above which frequencies stay")
    beta_slow: float = Field(1.0, gt=0, description="yarn: turns over the original context below which frequencies are divided in full")
    original_max_position_embeddings: int = Field(8192, ge=1, description="llama3, yarn: the context before stretching, tokens")

    @model_validator(mode="after")
    def _factors_in_order(self) -> RopeScaling:
        if self.low_freq_factor >= self.high_freq_factor:
            raise ValueError(f"low_freq_factor {self.low_freq_factor} must lie below high_freq_factor {self.high_freq_factor}")
        if self.beta_slow >= self.beta_fast:
            raise ValueError(f"beta_slow {self.beta_slow} must lie below beta_fast {self.beta_fast}")
        return self

    @property
    def own(self) -> tuple[str, ...]:
        """Return the names of the fields that this `rope_type` uses."""
        bands = {"linear": (), "llama3": ("low_freq_factor", "high_freq_factor"), "yarn": ("beta_fast", "beta_slow")}[self.rope_type]
        return ("factor", *bands, "original_max_position_embeddings") if bands else ("factor",)

    @property
    def growth(self) -> float:
        """Return the factor by which rotated queries and keys are multiplied: 1 unless `rope_type` is yarn."""
        return 0.1 * math.log(self.factor) + 1 if self.rope_type == "yarn" else 1.0

    def stretch(self, frequencies: list[float], theta: float) -> list[float]:
        """Return the stretched frequencies of all pairs of elements, in radians per token. `theta`: base of `frequencies`."""
        if self.rope_type != "yarn":
            return [self._stretch_one(frequency) for frequency in frequencies]
        pairs, context = len(frequencies), self.original_max_position_embeddings
        low, high = (pairs * math.log(context / (turns * 2 * math.pi)) / math.log(theta) for turns in (self.beta_fast, self.beta_slow))
        first, last = max(math.floor(low), 0), min(math.ceil(high), 2 * pairs - 1)
        shares = [min(max((i - first) / (last - first or 0.001), 0.0), 1.0) for i in range(pairs)]
        return [f * (1 - share + share / self.factor) for f, share in zip(frequencies, shares, strict=True)]

    def _stretch_one(self, frequency: float) -> float:
        """Return the stretched frequency of one pair (linear or llama3)."""
        if self.rope_type == "linear":
            return frequency / self.factor
        turns = self.original_max_position_embeddings * frequency / (2 * math.pi)
        share = min(max((turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor), 0.0), 1.0)
        return frequency * (share + (1 - share) / self.factor)


class Moe(Settings):
    """A mixture of experts in place of each feed-forward block.

    Each token goes to the `num_experts_per_tok` experts of highest router probability, weighted by these
    probabilities, which are scaled to add up to 1 if `norm_topk_prob`."""

    num_experts: int = Field(ge=1, description="Experts per layer")
    num_experts_per_tok: int = Field(ge=1, description="Experts per token")
    moe_intermediate_size: int = Field(ge=1, description="Width of an expert's feed-forward block")
    norm_topk_prob: bool = Field(True, description="Scale the chosen experts' router probabilities to add up to 1")
    router_aux_loss_coef: float = Field(0.001, ge=0, description="Weight of the load-balancing loss in training (Fedus et al. 2022)")

    @model_validator(mode="after")
    def _enough_experts(self) -> Moe:
        if self.num_experts_per_tok > self.num_experts:
            raise ValueError(f"num_experts_per_tok {self.num_experts_per_tok} exceeds num_experts {self.num_experts}")
        return self


class Mla(Settings):
    """Multi-head latent attention (DeepSeek-V2): keys and values from one latent vector per token."""

    kv_lora_rank: int = Field(ge=1, description="Width of the latent vector of keys and values")
    qk_nope_head_dim: int = Field(ge=1, description="Width of the part of a key that is not rotated")
    qk_rope_head_dim: int = Field(ge=2, multiple_of=2, description="Width of the rotated part of a key, which all heads share")
    v_head_dim: int = Field(ge=1, description="Width of a value")
    q_lora_rank: int = Field(0, ge=0, description="Width of the queries' latent vector; 0: queries straight from the hidden state")

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim


class ModelShape(Settings):
    """Sizes of the decoder, and its differences from a plain Llama. Widths are in elements."""

    hidden_size: int = Field(ge=1, description="Width of the model")
    intermediate_size: int = Field(ge=1, description="Width of the feed-forward blocks")
    num_hidden_layers: int = Field(ge=1, description="Layers")
    num_attention_heads: int = Field(ge=1, description="Query heads")
    num_key_value_heads: int = Field(ge=1, description="Key-value heads, shared evenly by the query heads (MHA, GQA or MQA)")
    head_dim: int = Field(0, ge=0, description="Width of query and key heads; 0: hidden_size / num_attention_heads (mla: sum of its parts)")
    rope_theta: float = Field(10_000.0, gt=1, description="Base of the rotary position frequencies")
    rope_scaling: RopeScaling | None = Field(None, description="Stretching of the rotary frequencies for a longer context; null: none")
    rms_norm_eps: float = Field(1e-5, gt=0, lt=1, description="Added to the mean square in RMSNorm")
    tie_word_embeddings: bool = Field(False, description="The output layer shares the embedding's matrix")
    initializer_range: float = Field(0.02, gt=0, le=1, description="Standard deviation of the initial weights")
    zero_residual: bool = Field(
        False, description="Start with layers that add nothing and with uniform logits: o_proj, down_proj and untied output layer are 0"
    )
    sliding_window: int | None = Field(None, ge=1, description="Sliding window in tokens, the query included; null: none")
    sliding_layers: tuple[int, ...] | None = Field(None, description="Layers with the sliding window, counted from 0; null: all")
    qkv_bias: bool = Field(False, description="Biases of the query, key and value projections")
    o_bias: bool = Field(False, description="Bias of the attention's output projection")
    qk_norm: bool = Field(False, description="RMSNorm on each query and key head before rotation")
    final_logit_softcapping: float | None = Field(None, gt=0, description="Soft cap c of the logits: c tanh(logit / c) (Gemma 2: 30)")
    parallel_block: bool = Field(False, description="Attention and feed-forward read one normalized input; their outputs are added (PaLM)")
    moe: Moe | None = Field(None, description="Mixture of experts in place of the feed-forward blocks; null: none")
    mla: Mla | None = Field(None, description="Multi-head latent attention; null: none")

    @model_validator(mode="after")
    def _parts_fit(self) -> ModelShape:
        heads, groups = self.num_attention_heads, self.num_key_value_heads
        if heads % groups:
            raise ValueError(f"num_attention_heads {heads} must be a multiple of num_key_value_heads {groups}")
        layers = sorted(set(self.sliding_layers or ()))
        if layers and (self.sliding_window is None or not 0 <= layers[0] <= layers[-1] < self.num_hidden_layers):
            raise ValueError(f"sliding_layers {layers} must be layers of 0..{self.num_hidden_layers - 1}, with a sliding_window")
        if self.mla is not None:
            self._check_latent(self.mla)
        elif not self.head_dim and self.hidden_size % heads:
            raise ValueError(f"hidden_size {self.hidden_size} must be a multiple of num_attention_heads {heads}, or head_dim be given")
        elif self._head_dim() % 2:
            raise ValueError(f"head_dim {self._head_dim()} must be even for rotary embeddings")
        return self

    def _check_latent(self, mla: Mla) -> None:
        if self.num_key_value_heads != self.num_attention_heads or self.qkv_bias != self.o_bias:
            raise ValueError("latent attention (mla) needs as many key-value heads as query heads, and all biases or none")
        if self.head_dim not in (0, mla.qk_head_dim):
            raise ValueError(f"head_dim must be left out or {mla.qk_head_dim} with mla, not {self.head_dim}")
        if self.qk_norm or self.sliding_window:
            raise ValueError("latent attention (mla) has neither qk_norm nor sliding_window here")
        if self.rope_scaling is not None and self.rope_scaling.rope_type == "yarn":
            raise ValueError("latent attention (mla) under yarn is not supported: choose rope_type llama3 or linear")

    def _head_dim(self) -> int:
        if self.head_dim:
            return self.head_dim
        return self.hidden_size // self.num_attention_heads if self.mla is None else self.mla.qk_head_dim

    def complete(self, vocab_size: int, max_position_embeddings: int) -> ModelConfig:
        """Return the full configuration: this shape with the size of the vocabulary and the longest context, in tokens."""
        return ModelConfig(vocab_size=vocab_size, max_position_embeddings=max_position_embeddings, **dict(self))


ModelType = Literal["llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen3_moe", "deepseek_v3", "puna"]
# Features that each layout must have, and may have, beyond a plain Llama; `puna` is the layout of all other models.
LAYOUTS: dict[str, tuple[frozenset[str], frozenset[str]]] = {
    "llama": (frozenset(), frozenset({"attention_bias"})),
    "mistral": (frozenset(), frozenset({"window"})),
    "qwen2": (frozenset({"qkv_bias"}), frozenset({"window", "window_in_some_layers"})),
    "qwen3": (frozenset({"qk_norm"}), frozenset({"attention_bias", "window", "window_in_some_layers"})),
    "mixtral": (frozenset({"moe"}), frozenset({"window"})),
    "qwen3_moe": (frozenset({"moe", "qk_norm"}), frozenset({"attention_bias", "window", "own_expert_width", "raw_expert_weights"})),
    "deepseek_v3": (frozenset({"mla"}), frozenset({"attention_bias"})),
}


class ModelConfig(ModelShape):
    """A decoder's shape with its vocabulary and context. Validation fills in `head_dim` and `model_type`, and sorts `sliding_layers`."""

    vocab_size: int = Field(ge=1, description="Tokens of the vocabulary")
    max_position_embeddings: int = Field(2048, ge=1, description="Longest context, tokens")
    reward_pooling: Literal["last", "mean"] = Field("last", description="Reward of an answer: at its last token, or their mean")
    model_type: str = Field("", description="Layout of a checkpoint; empty: the first family that can hold the model")

    @model_validator(mode="after")
    def _resolve(self) -> ModelConfig:
        # The model is frozen: these fields are derived once, here.
        object.__setattr__(self, "head_dim", self._head_dim())
        if self.sliding_layers is not None:
            object.__setattr__(self, "sliding_layers", tuple(sorted(set(self.sliding_layers))))
        object.__setattr__(self, "model_type", self._layout())
        return self

    def _layout(self) -> str:
        """Return `model_type` or, if empty, the first layout that fits the model. Raise ValueError if it is unknown or does not fit."""
        has = self.features
        able = [name for name, (must, may) in LAYOUTS.items() if must <= has <= must | may]
        if not self.model_type:
            return able[0] if able else "puna"
        if self.model_type not in get_args(ModelType):
            raise ValueError(f"model_type = {self.model_type!r} is not supported (only {', '.join(get_args(ModelType))})")
        if self.model_type != "puna" and self.model_type not in able:
            raise ValueError(f"a checkpoint of model_type {self.model_type!r} cannot hold a model with "
                f"{', '.join(sorted(has)) or 'no variation'}; leave model_type out to have one chosen")  # fmt: skip
        return self.model_type

    @property
    def features(self) -> frozenset[str]:
        """Return the names of the model's features beyond a plain Llama."""
        features = {
            "attention_bias": self.qkv_bias and self.o_bias,
            "qkv_bias": self.qkv_bias and not self.o_bias,
            "o_bias": self.o_bias and not self.qkv_bias,
            "qk_norm": self.qk_norm,
            "parallel_block": self.parallel_block,
            "softcapping": self.final_logit_softcapping is not None,
            "window": self.sliding_window is not None and self.sliding_layers is None,
            "window_in_some_layers": bool(self.sliding_layers),
            "moe": self.moe is not None,
            "own_expert_width": self.moe is not None and self.moe.moe_intermediate_size != self.intermediate_size,
            "raw_expert_weights": self.moe is not None and not self.moe.norm_topk_prob,
            "mla": self.mla is not None,
            "reward_pooling": self.reward_pooling != "last",
        }
        return frozenset(name for name, there in features.items() if there)

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Return each layer's sliding window in tokens; None for a layer whose queries see all tokens before them."""
        sliding = range(self.num_hidden_layers) if self.sliding_layers is None else self.sliding_layers
        return tuple(self.sliding_window if i in sliding else None for i in range(self.num_hidden_layers))

    @property
    def value_dim(self) -> int:
        return self.head_dim if self.mla is None else self.mla.v_head_dim

    def rotary_frequencies(self) -> list[float]:
        """Return each rotated pair's frequency: the angle in radians by which its rotation grows from one token to the next."""
        width = self.head_dim if self.mla is None else self.mla.qk_rope_head_dim
        plain = [self.rope_theta ** (-2 * i / width) for i in range(width // 2)]
        return plain if self.rope_scaling is None else self.rope_scaling.stretch(plain, self.rope_theta)
