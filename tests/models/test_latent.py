"""A cache of latents: log-probs equal the trainer's bits in exact passes and its numbers in absorbed ones; greedy answers equal
transformers'."""

import numpy as np
import pytest
import torch

from puna.kernels.exact import exact_passes
from puna.models.accounting import cache_bytes
from puna.models.config import Mla, ModelConfig
from puna.models.formats.checkpoint import save
from puna.models.formats.quantized import quantize
from puna.models.generation import Engine, SamplingParams
from puna.models.generation.latent import LatentPages
from puna.models.generation.step import Cache
from puna.models.training.objectives.base import Targets
from puna.models.transformer import Transformer

CONFIG = ModelConfig(
    vocab_size=97, hidden_size=48, intermediate_size=80, num_hidden_layers=2, num_attention_heads=6, num_key_value_heads=6, initializer_range=0.15,
    mla=Mla(kv_lora_rank=20, qk_nope_head_dim=8, qk_rope_head_dim=6, v_head_dim=10, q_lora_rank=16),
)  # fmt: skip
WAYS = {"all at once": {}, "three places": {"sequences": 3}, "chunks of 7 tokens": {"step_tokens": 7}, "little of everything": {"pages": 8, "sequences": 5, "step_tokens": 11}}


@pytest.fixture
def model():
    made = Transformer(CONFIG, seed=0)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if parameter.ndim == 1:
                parameter.uniform_(0.5, 1.5, generator=torch.Generator().manual_seed(len(name)))
    return made


def prompts(count=6):
    generator = np.random.default_rng(0)
    begin = generator.integers(0, 97, 40).tolist()
    return [begin[: 5 * i] + generator.integers(0, 97, generator.integers(1, 40)).tolist() for i in range(count)]


def engine_of(model, pages=400, **how):
    return Engine(model, memory=pages * Cache(model, 1).bytes, **how)


def packed(model, asked, answers, temperature):
    targets = Targets.from_answers(asked, [[answer.tokens for answer in row] for row in answers])
    return model.token_logprobs(targets.forest, targets.positions, targets.tokens, temperature)[0]


def drawn(answers):
    return torch.tensor([p for row in answers for answer in row for p in answer.logprobs], dtype=torch.float64)


def test_exact_logprobs_are_the_trainers_bit_by_bit(model):
    asked, params, first = prompts(), SamplingParams(n=2, temperature=0.7, max_tokens=18, stop=(0, 1, 2, 3)), None
    for name, way in WAYS.items():
        engine = engine_of(model, exact=True, **way)
        answers = engine.generate(asked, params)
        first = first or answers
        assert answers == first and (engine.scheduler.preemptions > 0) == ("pages" in way), name
    with exact_passes(torch.float32, torch.device("cpu")):
        assert torch.equal(drawn(first).float(), packed(model, asked, first, 0.7))


@pytest.mark.parametrize("way", ["absorbed", "spelled out", "by cost"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-9), (torch.float32, 1e-4)])
def test_both_ways_give_the_trainers_logprobs(model, monkeypatch, way, dtype, tolerance):
    chosen = []
    by_cost = LatentPages._absorbing

    def absorbing(self, layer):
        chosen.append({"absorbed": True, "spelled out": False, "by cost": by_cost(self, layer)}[way])
        return chosen[-1]

    monkeypatch.setattr(LatentPages, "_absorbing", absorbing)
    model, asked, params = model.to(dtype), prompts(), SamplingParams(n=2, max_tokens=18, stop=(0, 1, 2, 3))
    answers = engine_of(model, step_tokens=50).generate(asked, params)
    with torch.no_grad():
        torch.testing.assert_close(drawn(answers), packed(model, asked, answers, 1.0).double(), rtol=0, atol=tolerance)
    assert set(chosen) == {"absorbed": {True}, "spelled out": {False}, "by cost": {True, False}}[way]


def test_prompts_are_spelled_out_and_long_contexts_absorbed(model, monkeypatch):
    """At DeepSeek-V3's widths, spelling out one token costs as much as the extra cost of 171 absorbed query-key pairs."""
    wide = Mla(kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128)
    layer = type("Layer", (), {"mla": wide})

    def absorbing(pairs, tokens, queries):
        pages = LatentPages([], None, torch.zeros(queries))
        pages.__dict__["_sizes"] = (pairs, tokens)
        return pages._absorbing(layer)

    assert absorbing(4096, 4096, 1)  # one token after 4,095 others
    assert not absorbing(512 * 513 // 2, 512, 512)  # a whole prompt: its keys and values must be spelled out anyway
    # 100 or 300 queries after 4,000 tokens each see about 4,000; the break-even is at 512 x 256 / 768 = 170.7 queries.
    assert absorbing(100 * 4000, 4100, 100) and not absorbing(300 * 4000, 4300, 300)


def test_pages_hold_latents_alone(model):
    """A latent of 20 numbers and 6 of a key in each of 2 layers; keys and values of 6 heads would be 6 (14 + 10)."""
    assert cache_bytes(CONFIG, 1) == 2 * 4 * (20 + 6)
    assert Cache(model, 5).bytes == cache_bytes(CONFIG, 5 * 16) and cache_bytes(CONFIG, 1, "bf16") == 2 * 2 * 26
    engine = Engine(model, memory=7 * 16 * 2 * 4 * 26)
    assert len(engine.scheduler.pool.references) == 7
    engine.generate([list(range(37))], SamplingParams(n=3, max_tokens=8, stop=()))
    assert engine.scheduler.pool.peak == 2 + 3 * 1  # two shared whole pages, and for each answer the page with its last tokens


@pytest.mark.parametrize("exact", [True, False])
def test_greedy_equals_transformers(tmp_path, model, exact):
    from transformers import DeepseekV3ForCausalLM

    save(model, tmp_path)
    twin = DeepseekV3ForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, attn_implementation="eager").eval()
    for prompt in prompts(4):
        ids = torch.tensor([prompt])
        how = {"attention_mask": torch.ones_like(ids), "do_sample": False, "max_new_tokens": 20, "eos_token_id": None, "pad_token_id": 0}
        expected = twin.generate(ids, **how)[0, len(prompt) :]
        ((answer,),) = Engine(model, exact=exact).generate([prompt], SamplingParams(temperature=0, max_tokens=20, stop=()))
        assert answer.tokens == expected.tolist()


def test_matrices_in_8_bits_are_absorbed_by_what_they_stand_for(model):
    """Log-probs differ from the trainer's by the rounding of latents to 8 bits, which absorbed products avoid."""
    small = quantize(model, "int8")
    asked, params = prompts(), SamplingParams(n=2, max_tokens=18, stop=())
    answers = engine_of(small).generate(asked, params)
    with torch.no_grad():
        difference = (drawn(answers) - packed(small, asked, answers, 1.0)).abs()
    assert difference.mean() < 0.03
