"""AWQ's search: scaling leaves the model's function unchanged, files are read back exactly, and large inputs lose less precision."""

import json

import numpy as np
import pytest
import torch

from puna.models.config import Mla, ModelConfig, Moe
from puna.models.forest import Forest
from puna.models.formats import awq_search
from puna.models.formats.awq_search import group_of, pack, pack_layers, round_to_4_bits, scales_of, shares_of, stretches, write
from puna.models.formats.checkpoint import load
from puna.models.formats.families import unpack
from puna.models.tokens.tokenizer import Tokenizer
from puna.models.transformer import Transformer

TOKENIZER = Tokenizer.train(["to be or not to be, that is the question"], 280)
SHAPE = {"vocab_size": TOKENIZER.vocab_size, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "qkv_bias": True}
ROWS = torch.randint(0, 256, (6, 80), generator=torch.Generator().manual_seed(1)).tolist()


def model_of(**more):
    """Return a model in which some inputs of each layer are thirty times as large as others, as in trained models."""
    model = Transformer(ModelConfig(**SHAPE, **more), seed=0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            generator = torch.Generator().manual_seed(len(name))
            if "layernorm" in name:
                parameter.copy_(torch.where(torch.rand(parameter.shape, generator=generator) < 0.05, 30.0, 1.0))
            elif name.endswith("bias") or "_proj" in name:
                parameter.normal_(0, 0.1, generator=generator)
    return model


def logits(model):
    with torch.no_grad():
        return model.logits(model.hidden(Forest.pack(ROWS)))


def test_four_bits_by_hand():
    """From -3 to 12 in steps of 1: zero is 3; a group of positive numbers starts at 0; with share one half, the range is clipped."""
    w = torch.stack([torch.arange(32.0) % 16 - 3, torch.linspace(0, 30, 32)])
    found = round_to_4_bits(w, 32)
    assert found.scales.tolist() == [[1.0, 2.0]] and found.zeros.tolist() == [[3, 0]]
    assert torch.equal(found.weight()[0], w[0]) and torch.equal(found.q[0, :, 1], (w[1] / 2).round().int())
    assert round_to_4_bits(w, 32, torch.tensor([[1.0], [0.5]])).weight()[1].max() == 15
    assert round_to_4_bits(torch.zeros(1, 32), 32).weight().abs().max() == 0


def test_packing_is_what_reading_unpacks():
    numbers = torch.randint(0, 16, (5, 24), generator=torch.Generator().manual_seed(0), dtype=torch.int32)
    assert torch.equal(unpack(pack(numbers)), numbers)
    assert pack(torch.arange(8)[None]).tolist() == [[0x75316420]]


def test_scales_move_without_changing_the_model(monkeypatch):
    """Without rounding: norms and preceding matrices shrink by the factors by which the following matrices grow."""
    class Whole:
        def __init__(self, w, *_):
            self.w = w

        def weight(self):
            return self.w

    model = model_of()
    before, norm = logits(model), model.model.layers[0].input_layernorm.weight.clone()
    chosen = iter([0.5] * 99)
    monkeypatch.setattr(awq_search, "scales_of", lambda x, weights, group, heads=(1, 1): _steep(x, heads, next(chosen)))
    monkeypatch.setattr(awq_search, "round_to_4_bits", Whole)
    pack_layers(model, ROWS)
    assert not torch.allclose(norm, model.model.layers[0].input_layernorm.weight)
    torch.testing.assert_close(logits(model), before, rtol=1e-4, atol=1e-3)


def _steep(x, heads, power):
    size = x.abs().mean(0).view(*heads, -1)
    return (size.mean(1, keepdim=True).expand_as(size).flatten() ** power).clamp(min=0.1)


def test_the_best_exponent_and_shares_are_found():
    """Compared with all candidates one by one; at exponent 0 the scales are 1, so the result is never worse than plain rounding."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(200, 64, generator=generator) * torch.where(torch.arange(64) % 16 == 0, 20.0, 1.0)
    w = torch.randn(24, 64, generator=generator)

    def error(difference):
        return float((x @ difference.T).square().sum())

    s = scales_of(x, [w], 32)
    size = x.abs().mean(0)
    tried = []
    for exponent in np.linspace(0, 1, 21):
        one = size ** float(exponent)
        one = one / (one.max() * one.min()).sqrt()
        tried.append(error(w - round_to_4_bits(w * one, 32).weight() / one))
    assert error(w - round_to_4_bits(w * s, 32).weight() / s) == pytest.approx(min(tried), rel=1e-4) and min(tried) < 0.7 * tried[0]
    shares = shares_of(x, w, 32)
    assert shares.shape == (24, 2) and error(w - round_to_4_bits(w, 32, shares).weight()) < tried[0] and len(shares.unique()) > 2


def test_inputs_that_are_large_are_spared():
    """At most half of plain rounding's divergence."""
    whole = logits(model_of()).log_softmax(-1)
    divergence = {}
    for search in (False, True):
        model = model_of()
        pack_layers(model, ROWS, search)
        divergence[search] = float((whole.exp() * (whole - logits(model).log_softmax(-1))).sum(-1).mean())
    assert 0 < divergence[True] < divergence[False] / 2


def test_what_is_written_is_read_back(tmp_path):
    model, again = model_of(), model_of()
    write(model, TOKENIZER, ROWS, tmp_path)
    numbers = pack_layers(again, ROWS)
    found = load(tmp_path)
    assert len(numbers) == 14
    for base, one in numbers.items():
        assert torch.equal(found.get_parameter(f"{base}weight"), one.weight())
    rest = {name: p.half().float() for name, p in again.named_parameters() if f"{name.removesuffix('weight')}" not in numbers}
    assert rest and all(torch.equal(found.get_parameter(name), p) for name, p in rest.items())
    settings = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert settings == {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}


def test_what_cannot_be_is_refused():
    assert group_of(model_of()) == 32
    mla = Mla(kv_lora_rank=20, qk_nope_head_dim=8, qk_rope_head_dim=6, v_head_dim=10)
    plain = {**SHAPE, "qkv_bias": False}
    for shape in ({"moe": Moe(num_experts=2, num_experts_per_tok=1, moe_intermediate_size=32)}, {"mla": mla, "num_key_value_heads": 4}):
        with pytest.raises(ValueError, match="plain attention, followed by plain feed-forward blocks"):
            group_of(Transformer(ModelConfig(**{**plain, **shape})))
    with pytest.raises(ValueError, match=r"cannot be divided into groups of \(128, 64, 32\)"):
        group_of(Transformer(ModelConfig(**{**plain, "intermediate_size": 72})))
    with pytest.raises(ValueError, match="multiple of 8"):
        group_of(Transformer(ModelConfig(**{**plain, "head_dim": 6, "num_attention_heads": 16})))
    with pytest.raises(ValueError, match="a text of 511 tokens is too short"):
        stretches(range(511))
    assert [one[0] for one in stretches(range(512 * 40))] == [1280 * i for i in range(16)]
