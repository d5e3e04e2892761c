"""The model under autocast, as other trainers compute in bf16: products in bf16, the residual stream and everything else in fp32."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from puna.models.config import ModelConfig
from puna.models.formats.hub import PunaForCausalLM
from puna.models.transformer import Transformer

SHAPE: dict[str, Any] = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.1}
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "qk_norm": {"qk_norm": True},
    "biases": {"qkv_bias": True, "o_bias": True},
    "experts": {"moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}},
    "latent": {"num_key_value_heads": 4, "mla": {"q_lora_rank": 8, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8}},
}


@pytest.mark.parametrize("kind", KINDS)
def test_loss_and_gradients_are_those_of_fp32_but_for_rounding(kind: str) -> None:
    model = Transformer(ModelConfig(**{**SHAPE, **KINDS[kind]}), seed=1)
    hub = PunaForCausalLM.from_transformer(model)
    ids = torch.randint(0, 61, (2, 17), generator=torch.Generator().manual_seed(1))
    plain = hub(ids, labels=ids).loss
    plain.backward()
    expected = {name: p.grad.clone() for name, p in hub.named_parameters() if p.grad is not None}
    hub.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        out = hub(ids, labels=ids)
        hidden = hub.model(ids).last_hidden_state
    assert out.logits.dtype == torch.bfloat16 and hidden.dtype == torch.float32
    out.loss.backward()
    # A bf16 number has a relative error of up to 2^-9, which changes the choice of an expert with other weights, but not with these.
    assert float(out.loss.detach()) == pytest.approx(float(plain.detach()), rel=2e-3)
    for name, p in hub.named_parameters():
        assert p.grad is not None and float((p.grad - expected[name]).norm() / expected[name].norm()) < 0.1, name
