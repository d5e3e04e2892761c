"""A cache with sinks and a window, compared with dense attention over exactly the kept tokens, at the paper's positions."""

import dataclasses
from contextlib import closing
from itertools import islice, pairwise

import numpy as np
import pytest
import torch

from puna.kernels.rope import rope
from puna.models.config import Mla, ModelConfig, RopeScaling
from puna.models.generation import Engine, SamplingParams
from puna.models.generation.draft import DraftedEngine
from puna.models.generation.schedule import UNIFORMS
from puna.models.generation.sinks import PAGE, Kept
from puna.models.generation.step import Cache
from puna.models.transformer import Transformer, rotary_table

SHAPE = {"vocab_size": 83, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.3, "max_position_embeddings": 256}
MODELS = {
    "grouped": {},
    "latent": {"num_key_value_heads": 4, "mla": Mla(kv_lora_rank=20, qk_nope_head_dim=8, qk_rope_head_dim=6, v_head_dim=10)},
}
WAYS = {
    "all at once": {},
    "three places": {"sequences": 3},
    "chunks of 7 tokens": {"step_tokens": 7},
    "little memory": {"pages": 14},
    "little of everything": {"pages": 12, "sequences": 5, "step_tokens": 11},
}
ASKED = [np.random.default_rng(i).integers(0, 83, length).tolist() for i, length in enumerate((5, 64, 97, 200))]


def model_of(name, dtype=torch.float64):
    return Transformer(ModelConfig(**{**SHAPE, **MODELS[name]}), seed=0).to(dtype)


def engine_of(model, pages=400, **how):
    return Engine(model, memory=pages * Cache(model, 1).bytes, **how)


@torch.no_grad()
def dense_logprobs(model, tokens, sinks, window, step):
    """Return the log-probs of tokens 1, 2, ..., computed one after the other. A layer stores unrotated keys, and at sinks + window + step
    keys it drops the `step` after the sinks; positions are indices among the kept keys."""
    kept = [([], []) for _ in model.model.layers]
    mla, found = model.config.mla, []

    def turned(x_nHK):
        R = x_nHK.shape[2] if mla is None else mla.qk_rope_head_dim
        plain, part = x_nHK.split([x_nHK.shape[2] - R, R], -1)
        return torch.cat([plain, rope(part, *table)], -1)

    def attend(layer, q_1HK, k_1GK, v_1GV):
        nonlocal table
        for store, new in zip(kept[layer], (k_1GK, v_1GV), strict=True):
            if len(store) == sinks + window + step:
                del store[sinks : sinks + step]
            store.append(new[0])
        keys, values = map(torch.stack, kept[layer])
        table = rotary_table(model.config, torch.arange(len(keys)), keys.dtype)
        k_nHK, v_nHV = (x.repeat_interleave(q_1HK.shape[1] // x.shape[1], 1) for x in (turned(keys), values))
        q_HK = turned(q_1HK.expand(len(keys), -1, -1).contiguous())[-1]
        p_Hn = (torch.einsum("hk,nhk->hn", q_HK, k_nHK) / q_HK.shape[1] ** 0.5).softmax(-1)
        return torch.einsum("hn,nhv->hv", p_Hn, v_nHV)[None]

    table = None
    for token, following in pairwise(tokens):
        x_1D = model.model.embed_tokens(torch.tensor([token]))
        hidden = model.model(x_1D, torch.tensor([0]), attend)  # at position 0 the rotation is the identity
        found.append(model.logits(hidden).log_softmax(-1)[0, following].item())
    return found


def test_an_answer_may_be_asked_for_without_end():
    """The first tokens, more than the number of random numbers drawn at once, equal those of a shorter answer."""
    engine, params = engine_of(model_of("grouped"), sinks=16, window=32), SamplingParams(max_tokens=2 * UNIFORMS + 9, stop=(), seed=4)
    ((wanted,),) = engine.generate(ASKED[:1], params)
    with closing(engine.stream(ASKED[0], dataclasses.replace(params, max_tokens=10**15))) as events:
        assert [event.token for event in islice(events, params.max_tokens)] == wanted.tokens


def test_keys_that_turn_back_under_yarn_are_as_if_rotated_there():
    scaling = RopeScaling(rope_type="yarn", factor=4.0, beta_fast=4.0, original_max_position_embeddings=64)
    config, keys = ModelConfig(**SHAPE, rope_scaling=scaling), torch.randn(PAGE, 2, 8, generator=torch.Generator().manual_seed(0))
    there, back = (rope(keys, *rotary_table(config, torch.arange(PAGE) + first, keys.dtype))[None] for first in (PAGE + 48, 48))
    Kept(0, 4 * PAGE).turn_back([there], [0], config)
    torch.testing.assert_close(there, back, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("sinks", "window", "step"), [(16, 32, 16), (0, 128, 32), (32, 64, 16)])
def test_logprobs_are_those_of_dense_attention_over_what_is_kept(name, sinks, window, step):
    model, params = model_of(name), SamplingParams(n=2, max_tokens=80, stop=(), seed=2)
    (answers,) = engine_of(model, sinks=sinks, window=window).generate(ASKED[2:3], params)
    for answer in answers:
        expected = dense_logprobs(model, [*ASKED[2], *answer.tokens], sinks, window, step)[len(ASKED[2]) - 1 :]
        np.testing.assert_allclose(answer.logprobs, expected, rtol=0, atol=1e-9)
        assert len(ASKED[2]) + len(answer.tokens) > sinks + window + step


@pytest.mark.parametrize("name", MODELS)
def test_answers_depend_on_nothing_but_prompt_and_seed(name):
    """For any chunks, slots, pauses and cached prefixes."""
    model, params, first = model_of(name), SamplingParams(n=2, max_tokens=70, stop=(0,), seed=1), None
    for way, how in WAYS.items():
        engine = engine_of(model, sinks=16, window=64, **how)
        answers = engine.generate(ASKED, params)
        first = first or answers
        for mine, before in zip((a for row in answers for a in row), (a for row in first for a in row), strict=True):
            assert mine.tokens == before.tokens, way
            np.testing.assert_allclose(mine.logprobs, before.logprobs, rtol=0, atol=1e-9)
        scheduler = engine.scheduler
        assert scheduler.idle and scheduler.pool.available == len(scheduler.pool.references)
        assert (scheduler.preemptions > 0) == ("pages" in how), way
        if way == "three places":
            assert [[a.tokens for a in row] for row in engine.generate(ASKED[::-1], params)[::-1]] == [[a.tokens for a in row] for row in first]


def test_guesses_change_no_answer():
    model, params = model_of("grouped"), SamplingParams(n=2, temperature=0, max_tokens=150, stop=())
    plain, *others = (
        engine_of(model, sinks=16, window=64).generate(ASKED, dataclasses.replace(params, speculate=speculate))
        for speculate in (0, 6, 5)
    )
    for other in others:
        assert [[a.tokens for a in row] for row in other] == [[a.tokens for a in row] for row in plain]


def test_layers_by_loops_keep_the_same():
    """In fp32 with numba's loops, compared with fp64: 16 + 64 + 16 tokens are kept of 400."""
    model, double = model_of("grouped", torch.float32), model_of("grouped")
    ((answer,),) = engine_of(model, sinks=16, window=64).generate([ASKED[3]], SamplingParams(max_tokens=200, stop=()))
    expected = dense_logprobs(double, [*ASKED[3], *answer.tokens], 16, 64, 16)[199:]
    np.testing.assert_allclose(answer.logprobs, expected, rtol=0, atol=2e-4)


@pytest.mark.parametrize(("number", "tokens", "peak"), [(3, 300, 6), (3, 3000, 6), (1, 3000, 7)])
def test_memory_does_not_grow(number, tokens, peak):
    """A cache of 16 + 64 + 16 tokens has six pages; one more is used for copies if a prompt fitted and is in the tree of prefixes."""
    engine = engine_of(model_of("grouped", torch.float32), pages=7, sinks=16, window=64)
    ((answer,),) = engine.generate([ASKED[number]], SamplingParams(max_tokens=tokens, stop=()))
    assert len(answer.tokens) == tokens and engine.scheduler.pool.peak == peak
    assert not engine.scheduler.preemptions


def test_what_falls_out():
    """At 16 + 64 + 16 tokens the cache is full; before the 97th token 16 are dropped, before the 113th another 16."""
    kept = Kept(16, 64)
    assert (kept.step, kept.room) == (16, 96) and Kept(0, 1024).step == 256
    assert [kept.dropped_tokens(n) for n in (0, 96, 97, 112, 113, 1000)] == [0, 0, 16, 16, 32, 912]


def test_what_cannot_be_is_refused():
    model = model_of("grouped")
    for how, told in (
        ({"sinks": 16}, "only with a window"),
        ({"sinks": 4, "window": 64}, "whole pages of 16 tokens"),
        ({"sinks": 0, "window": 0}, "whole pages of 16 tokens"),
        ({"sinks": 16, "window": 256}, "the model's context has only 256"),
        ({"sinks": 16, "window": 64, "exact": True}, "exact"),
    ):
        with pytest.raises(ValueError, match=told):
            Engine(model, **how)
    with pytest.raises(ValueError, match="a draft"):
        DraftedEngine(model, model, sinks=16, window=64)
    sliding = Transformer(ModelConfig(**SHAPE, sliding_window=5))
    with pytest.raises(ValueError, match="sliding window of its own, 5 tokens"):
        Engine(sliding, window=64)
