"""The shape of a Llama-family decoder, under the field names of a Hugging Face `config.json`."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of the decoder. Widths and lengths are in elements and tokens.

    `head_dim` is the width of one attention head; left out, it is `hidden_size // num_attention_heads`.
    Query heads are shared evenly by the key-value heads (grouped-query attention, Ainslie et al. 2023).
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

    def __post_init__(self) -> None:
        if self.head_dim == 0 and self.num_attention_heads > 0:
            object.__setattr__(self, "head_dim", self.hidden_size // self.num_attention_heads)
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name == "tie_word_embeddings":
                continue
            if value <= 0:
                raise ValueError(f"ModelConfig.{field.name} must be positive, not {value!r}")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads ({self.num_attention_heads}) must be a multiple of "
                f"num_key_value_heads ({self.num_key_value_heads})"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim must be even for rotary embeddings, not {self.head_dim}")

    def to_dict(self) -> dict[str, Any]:
        """The fields as a plain dictionary, ready for JSON."""
        return asdict(self)
