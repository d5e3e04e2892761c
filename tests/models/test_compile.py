"""torch.compile compiles a decoder as one graph, and does not recompile for every length."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from puna.models.config import ModelConfig
from puna.models.forest import Forest
from puna.models.transformer import Decoder, Transformer, forest_attend

SHAPE: dict[str, Any] = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2}
KINDS: dict[str, dict[str, Any]] = {
    "qk_norm": {"qk_norm": True},
    "experts": {"moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}},
    "latent": {"num_key_value_heads": 4, "mla": {"q_lora_rank": 8, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8}},
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_decoder_is_compiled_whole_and_for_all_lengths(kind: str) -> None:
    torch._dynamo.reset()
    config = ModelConfig(**{**SHAPE, **KINDS[kind]})
    decoder = Transformer(config, seed=0).model
    counter = CompileCounterWithBackend("aot_eager")

    def run(call: Decoder, lengths: list[int]) -> tuple[torch.Tensor, ...]:
        forest = Forest.pack([torch.arange(n) for n in lengths])
        x = torch.randn(sum(lengths), 32, generator=torch.Generator().manual_seed(sum(lengths)), requires_grad=True)
        y = call(x, forest.positions, forest_attend(config, forest.mask))
        (y.square().sum() + (0 if decoder.balance is None else decoder.balance)).backward()
        assert x.grad is not None
        return y.detach(), x.grad

    compiled: Any = torch.compile(decoder, fullgraph=True, backend=counter)
    for lengths in ([3, 5], [7, 9, 2], [4], [11, 13, 6, 8], [20, 1], [33]):
        for found, expected in zip(run(compiled, lengths), run(decoder, lengths), strict=True):
            torch.testing.assert_close(found, expected)
    assert counter.frame_count <= 3
