"""The engine against the trainer's log-probs, transformers' greedy search and the distributions."""

import math

import numpy as np
import pytest
import torch

from puna.models import generation
from puna.models.config import ModelConfig
from puna.models.forest import Forest
from puna.models.generation import Engine, Sampling, draw
from puna.models.tokenizer import Tokenizer
from puna.models.transformer import Transformer

CONFIG = ModelConfig(vocab_size=83, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, initializer_range=0.3)
NEVER: tuple[int, ...] = ()


@pytest.fixture(scope="module")
def model():
    return Transformer(CONFIG, generator=torch.Generator().manual_seed(0))


def prompts(count, longest=20, seed=0):
    generator = np.random.default_rng(seed)
    return [
        generator.integers(0, CONFIG.vocab_size, generator.integers(1, longest + 1)).tolist()
        for _ in range(count)
    ]


def trainer_logprobs(model, prompt, tokens, temperature):
    forest = Forest.pack([[*prompt, *tokens]])
    positions = torch.arange(len(prompt) - 1, len(prompt) + len(tokens) - 1)
    with torch.no_grad():
        return model.token_logprobs(forest, positions, torch.tensor(tokens), temperature)[0]


def longest_difference(model, asked, answers, temperature):
    return max(
        (torch.tensor(answer.logprobs) - trainer_logprobs(model, prompt, answer.tokens, temperature))
        .abs()
        .max()
        .item()
        for prompt, row in zip(asked, answers, strict=True)
        for answer in row
    )


@pytest.mark.parametrize("slots", [3, 64])
@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.6, 1.0), (1.7, 0.8)])
def test_logprobs_equal_the_trainers(model, slots, temperature, top_p):
    """With many refills, rows that move back, and answers that stop at different times."""
    asked = prompts(9)
    sampling = Sampling(n=3, temperature=temperature, top_p=top_p, max_tokens=25, stop=(0, 1, 2, 3, 4))
    answers = Engine(model, slots=slots).generate(asked, sampling, seed=3)
    assert [len(row) for row in answers] == [3] * 9
    lengths = {len(answer.tokens) for row in answers for answer in row}
    assert len(lengths) > 5
    assert longest_difference(model, asked, answers, temperature) <= 1e-4
    for row in answers:
        for answer in row:
            assert answer.finished == (answer.tokens[-1] < 5)
            assert all(token >= 5 for token in answer.tokens[:-1])
            assert answer.finished or len(answer.tokens) == 25


@pytest.mark.parametrize("slots", [1, 2, 5, 100])
def test_answers_depend_on_nothing_but_prompt_and_seed(model, slots):
    """Not on the slots, the order or the company of the prompts. In fp64, where rounding flips no draw."""
    exact = Transformer(CONFIG, generator=torch.Generator().manual_seed(0)).double()
    asked = prompts(7)
    sampling = Sampling(n=2, max_tokens=12, stop=(0, 1, 2, 3))
    answers = Engine(exact).generate(asked, sampling, seed=11)
    shuffled = Engine(exact, slots=slots).generate(asked[::-1], sampling, seed=11)[::-1]
    for row, other in zip(answers, shuffled, strict=True):
        assert [answer.tokens for answer in row] == [answer.tokens for answer in other]
    alone = Engine(exact, slots=slots).generate(asked[4:5], sampling, seed=11)[0]
    assert [answer.tokens for answer in alone] == [answer.tokens for answer in answers[4]]
    assert Engine(exact).generate(asked, sampling, seed=12) != answers
    fewer = Engine(exact, slots=slots).generate(
        asked, Sampling(n=1, max_tokens=12, stop=(0, 1, 2, 3)), seed=11
    )
    assert [row[0].tokens for row in fewer] == [row[0].tokens for row in answers]


def test_equal_prompts_draw_different_answers(model):
    answers = Engine(model).generate([[1, 2, 3]] * 4, Sampling(n=2, max_tokens=10, stop=NEVER), seed=0)
    assert len({tuple(answer.tokens) for row in answers for answer in row}) == 8


def test_greedy_equals_transformers(model):
    from transformers import LlamaConfig, LlamaForCausalLM

    raw = CONFIG.to_dict()
    rope = {"rope_type": "default", "rope_theta": raw.pop("rope_theta")}
    twin = LlamaForCausalLM(
        LlamaConfig(**raw, rope_parameters=rope, bos_token_id=None, eos_token_id=None, pad_token_id=0)
    )
    twin.load_state_dict(model.state_dict())
    asked = prompts(6)
    answers = Engine(model, slots=4).generate(
        asked, Sampling(temperature=0, max_tokens=20, stop=NEVER), seed=0
    )
    for prompt, (answer,) in zip(asked, answers, strict=True):
        row = torch.tensor([prompt])
        theirs = twin.generate(row, attention_mask=torch.ones_like(row), max_new_tokens=20, do_sample=False)
        assert answer.tokens == theirs[0, len(prompt) :].tolist()
    assert longest_difference(model, asked, answers, 1.0) <= 1e-4


def test_prompts_are_computed_once(model, monkeypatch):
    """12 answers to each of 5 prompts in 4 slots: each prompt's tokens pass the model once."""
    seen = []
    monkeypatch.setattr(
        generation.Forest,
        "pack",
        staticmethod(lambda rows, pack=Forest.pack: seen.extend(rows) or pack(rows)),
    )
    asked = prompts(5)
    Engine(model, slots=4).generate(asked, Sampling(n=12, max_tokens=6, stop=(0, 1, 2, 3)), seed=0)
    assert sorted(seen) == sorted(asked)


def test_many_prompts_are_prefilled_in_parts(model, monkeypatch):
    asked = prompts(9)
    sampling = Sampling(max_tokens=5, stop=NEVER)
    whole = Engine(model).generate(asked, sampling, seed=0)
    monkeypatch.setattr(generation, "PREFILL_TOKENS", 15)
    parts = Engine(model).generate(asked, sampling, seed=0)
    assert [row[0].tokens for row in parts] == [row[0].tokens for row in whole]


def test_first_tokens_follow_the_model(model):
    """4000 draws of one token: the chi-square statistic of the likely tokens is that of its distribution."""
    (row,) = Engine(model).generate([[7, 8, 9]], Sampling(n=4000, max_tokens=1, stop=NEVER), seed=5)
    counts = np.bincount([answer.tokens[0] for answer in row], minlength=CONFIG.vocab_size)
    with torch.no_grad():
        p = model.logits(model.hidden(Forest.pack([[7, 8, 9]])))[-1].double().softmax(-1).numpy()
    likely = p * 4000 > 5
    observed = np.append(counts[likely], counts[~likely].sum())
    expected = 4000 * np.append(p[likely], p[~likely].sum())
    statistic = ((observed - expected) ** 2 / expected).sum()
    freedom = likely.sum()
    assert statistic < freedom + 4 * math.sqrt(2 * freedom)


@pytest.mark.parametrize("V", [5, 128, 300])
def test_draw_inverts_the_cumulative_distribution(V):
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(200, V, generator=generator)
    uniforms = torch.rand(200, dtype=torch.float64, generator=generator)
    tokens, logprobs = draw(logits, Sampling(stop=NEVER), uniforms)
    cumulative = logits.softmax(-1).double().cumsum(-1)
    expected = (cumulative <= uniforms[:, None] * cumulative[:, -1:]).sum(-1)
    assert torch.equal(tokens, expected)
    torch.testing.assert_close(
        logprobs, logits.log_softmax(-1).gather(1, tokens[:, None])[:, 0], rtol=1e-5, atol=1e-5
    )


def test_draw_never_takes_an_impossible_token():
    """All mass on token 3 of 300, at both ends of the unit interval."""
    logits = torch.full((3, 300), -torch.inf)
    logits[:, 3] = 0.0
    uniforms = torch.tensor([0.0, 0.5, 1.0 - 2**-53], dtype=torch.float64)
    for sampling in (
        Sampling(stop=NEVER),
        Sampling(top_p=0.5, stop=NEVER),
        Sampling(temperature=0, stop=NEVER),
    ):
        tokens, logprobs = draw(logits, sampling, uniforms)
        assert tokens.tolist() == [3, 3, 3]
        assert logprobs.tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("size", [1, 2, 100])
def test_the_nucleus_is_the_smallest_set_that_reaches_top_p(monkeypatch, size):
    """p = 0.4, 0.3, 0.2, 0.1: 0.7 needs two tokens, a little more needs three; log-probs stay those of p."""
    monkeypatch.setattr(generation, "NUCLEUS", size)
    p = torch.tensor([[0.1, 0.4, 0.2, 0.3]])
    grid = (torch.arange(1000, dtype=torch.float64) + 0.5) / 1000
    for top_p, kept in (
        (0.3, {1: 1.0}),
        (0.69, {1: 4 / 7, 3: 3 / 7}),
        (0.75, {1: 4 / 9, 3: 3 / 9, 2: 2 / 9}),
    ):
        tokens, logprobs = draw(p.log().expand(1000, 4), Sampling(top_p=top_p, stop=NEVER), grid)
        shares = (torch.bincount(tokens, minlength=4) / 1000).tolist()
        assert shares == pytest.approx([kept.get(token, 0.0) for token in range(4)], abs=2e-3)
        assert torch.allclose(logprobs, p[0, tokens].log(), atol=1e-6)


def test_progress_counts_answers(model):
    seen = []
    Engine(model, slots=2).generate(
        prompts(3), Sampling(n=2, max_tokens=4, stop=NEVER), seed=0, progress=lambda *now: seen.append(now)
    )
    assert seen == [(done, 6) for done in range(1, 7)]


def test_the_tokenizer_names_the_default_stop(model):
    tokenizer = Tokenizer.train(["aaa"], 262)
    small = Transformer(
        ModelConfig(vocab_size=tokenizer.vocab_size, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1), generator=torch.Generator().manual_seed(0)
    )
    (row,) = Engine(small, tokenizer).generate([[70]], Sampling(n=300, max_tokens=40), seed=0)
    assert any(answer.finished for answer in row)
    assert all(answer.finished == (answer.tokens[-1] in tokenizer.stop_ids) for answer in row)
    with pytest.raises(ValueError, match="no tokenizer to name the end of turn"):
        Engine(small).generate([[1]], Sampling(), seed=0)


def test_no_prompts_no_answers(model):
    assert Engine(model).generate([], Sampling(stop=NEVER), seed=0) == []


def test_bad_requests_are_refused(model):
    with pytest.raises(ValueError, match="prompt 1 is empty"):
        Engine(model).generate([[1], []], Sampling(stop=NEVER), seed=0)
    with pytest.raises(ValueError, match="needs a language-model head"):
        Engine(Transformer(CONFIG, "scalar"))
    for wrong, message in (
        ({"n": 0}, "at least 1"),
        ({"max_tokens": 0}, "at least 1"),
        ({"temperature": -1.0}, "temperature must be"),
        ({"temperature": math.nan}, "temperature must be"),
        ({"top_p": 0.0}, "top_p must lie in"),
    ):
        with pytest.raises(ValueError, match=message):
            Sampling(**wrong)


def test_a_broken_model_is_reported():
    broken = Transformer(CONFIG, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        broken.lm_head.weight[3] = math.nan
    with pytest.raises(ValueError, match="not finite"):
        Engine(broken).generate([[1, 2]], Sampling(max_tokens=3, stop=NEVER), seed=0)
