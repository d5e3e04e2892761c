"""The generation engine, compared with the trainer's log-probs, transformers' greedy search and exact distributions."""

import dataclasses
import math

import numpy as np
import pytest
import torch

from puna.kernels.adamw import adamw_
from puna.kernels.exact import exact_passes
from puna.kernels.paged_attention import PAGE
from puna.models.config import ModelConfig
from puna.models.forest import Forest
from puna.models.generation import Engine, SamplingParams
from puna.models.generation.dense import loops
from puna.models.generation.draft import DraftedEngine, accept_guesses, distribution
from puna.models.generation.sampling import Draw, cut, draw
from puna.models.generation.schedule import Lookup
from puna.models.generation.step import Cache, run
from puna.models.tokens.tokenizer import Tokenizer
from puna.models.training.objectives.base import Targets
from puna.models.transformer import Transformer

CONFIG = ModelConfig(vocab_size=83, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, initializer_range=0.3)
NEVER: tuple[int, ...] = ()


@pytest.fixture(scope="module")
def model():
    return Transformer(CONFIG, seed=0)


def prompts(count, longest=20, seed=0):
    generator = np.random.default_rng(seed)
    return [generator.integers(0, CONFIG.vocab_size, generator.integers(1, longest + 1)).tolist() for _ in range(count)]


def packed_logprobs(model, asked, answers, temperature):
    """Return the log-probs that a training pass over all prompts with their answers in one row gives, in the order of the answers."""
    targets = Targets.from_answers(asked, [[answer.tokens for answer in row] for row in answers])
    return model.token_logprobs(targets.forest, targets.positions, targets.tokens, temperature)[0]


def drawn_logprobs(answers):
    return torch.tensor([p for row in answers for answer in row for p in answer.logprobs])


def pages(model, count):
    """Return the bytes of `count` pages."""
    return count * Cache(model, 1).bytes


def nothing_is_left(engine):
    """Check that all pages are free or held only as cached prefixes."""
    scheduler = engine.scheduler
    return scheduler.idle and scheduler.pool.available == len(scheduler.pool.references)


@pytest.mark.parametrize("sequences", [3, 64])
@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.6, 1.0), (1.7, 0.8)])
def test_logprobs_are_near_the_trainers(model, sequences, temperature, top_p):
    """Some answers stop earlier than others, and new answers take their slots."""
    asked = prompts(9)
    params = SamplingParams(n=3, temperature=temperature, top_p=top_p, max_tokens=25, stop=(0, 1, 2, 3, 4), seed=3)
    engine = Engine(model, sequences=sequences)
    answers = engine.generate(asked, params)
    assert [len(row) for row in answers] == [3] * 9 and nothing_is_left(engine)
    assert len({len(answer.tokens) for row in answers for answer in row}) > 5
    with torch.no_grad():
        torch.testing.assert_close(drawn_logprobs(answers), packed_logprobs(model, asked, answers, temperature), rtol=0, atol=1e-4)
    for row in answers:
        for answer in row:
            assert answer.finished == (answer.tokens[-1] < 5)
            assert all(token >= 5 for token in answer.tokens[:-1])
            assert answer.finished or len(answer.tokens) == 25


WAYS = {
    "all at once": {},
    "three places": {"sequences": 3},
    "chunks of 7 tokens": {"step_tokens": 7},
    "little memory": {"pages": 8},
    "little of everything": {"pages": 8, "sequences": 5, "step_tokens": 11},
}


def test_exact_logprobs_are_the_trainers_bit_by_bit(temperature=0.7):
    """For any batch, chunks, pauses and cached prefixes; and the pass with gradients has the same forward results."""
    wide = ModelConfig(vocab_size=131, hidden_size=64, intermediate_size=90, num_hidden_layers=2, num_attention_heads=6, num_key_value_heads=2, head_dim=20, initializer_range=0.2)
    model = Transformer(wide, seed=0)
    generator = np.random.default_rng(0)
    begin = generator.integers(0, 131, 40).tolist()
    asked = [begin[: 5 * i] + generator.integers(0, 131, generator.integers(1, 40)).tolist() for i in range(6)]
    params = SamplingParams(n=2, temperature=temperature, max_tokens=18, stop=(0, 1, 2, 3))
    first = None
    for name, way in WAYS.items():
        limits = {key: value for key, value in way.items() if key != "pages"}
        engine = Engine(model, exact=True, memory=pages(model, way.get("pages", 4000)), **limits)
        answers = engine.generate(asked, params)
        first = first or answers
        assert answers == first, name
        assert (engine.scheduler.preemptions > 0) == ("pages" in way) and nothing_is_left(engine), name
        if name == "three places":
            assert engine.generate(asked[::-1], params)[::-1] == first  # from cached prefixes
    with exact_passes(torch.float32, torch.device("cpu")):
        expected = packed_logprobs(model, asked, first, temperature)
    assert expected.requires_grad and torch.equal(drawn_logprobs(first), expected)


@pytest.mark.parametrize("sequences", [1, 2, 5, 100])
def test_answers_depend_on_nothing_but_prompt_and_seed(model, sequences):
    """Answers do not depend on the number of slots, or on the other prompts and their order. In fp64, so that rounding flips no draw."""
    exact = Transformer(CONFIG, seed=0).double()
    asked = prompts(7)
    params = SamplingParams(n=2, max_tokens=12, stop=(0, 1, 2, 3), seed=11)
    answers = Engine(exact).generate(asked, params)
    shuffled = Engine(exact, sequences=sequences).generate(asked[::-1], params)[::-1]
    for row, other in zip(answers, shuffled, strict=True):
        assert [answer.tokens for answer in row] == [answer.tokens for answer in other]
    alone = Engine(exact, sequences=sequences).generate(asked[4:5], params)[0]
    assert [answer.tokens for answer in alone] == [answer.tokens for answer in answers[4]]
    assert Engine(exact).generate(asked, dataclasses.replace(params, seed=12)) != answers
    fewer = Engine(exact, sequences=sequences).generate(asked, dataclasses.replace(params, n=1))
    assert [row[0].tokens for row in fewer] == [row[0].tokens for row in answers]


def test_forks_of_an_older_prompt_between_those_of_a_newer_one_draw_from_their_own(model):
    """Of four slots, one computes the second prompt, one starts the first prompt's last answer, two start the second prompt's answers."""
    params, asked = SamplingParams(n=5, max_tokens=3, stop=NEVER), prompts(2)
    engine = Engine(model, exact=True, sequences=4)
    requests, found = [engine.submit(asked[0], params)], {}
    while not engine.scheduler.idle:
        for event in engine.step():
            if event.completion is not None:
                found[requests.index(event.request), event.number] = event.completion
        if len(requests) == 1:
            requests.append(engine.submit(asked[1], params))
    expected = Engine(model, exact=True).generate(asked, params)
    assert found == {(i, n): answer for i, row in enumerate(expected) for n, answer in enumerate(row)}


def test_equal_prompts_draw_different_answers(model):
    answers = Engine(model).generate([[1, 2, 3]] * 4, SamplingParams(n=2, max_tokens=10, stop=NEVER))
    assert len({tuple(answer.tokens) for row in answers for answer in row}) == 8


def test_greedy_equals_transformers(model):
    from transformers import LlamaConfig, LlamaForCausalLM

    raw = CONFIG.model_dump()
    rope = {"rope_type": "default", "rope_theta": raw.pop("rope_theta")}
    twin = LlamaForCausalLM(LlamaConfig(**raw, rope_parameters=rope, bos_token_id=None, eos_token_id=None, pad_token_id=0))
    twin.load_state_dict(model.state_dict())
    asked = prompts(6)
    answers = Engine(model, sequences=4).generate(asked, SamplingParams(temperature=0, max_tokens=20, stop=NEVER))
    for prompt, (answer,) in zip(asked, answers, strict=True):
        row = torch.tensor([prompt])
        theirs = twin.generate(row, attention_mask=torch.ones_like(row), max_new_tokens=20, do_sample=False)
        assert answer.tokens == theirs[0, len(prompt) :].tolist()


@pytest.fixture
def computed(monkeypatch):
    """Return a list of the number of tokens that each step computed."""
    counts = []
    monkeypatch.setattr("puna.models.generation.engine.run", lambda *given: counts.append(sum(len(w.tokens) for w in given[2])) or run(*given))
    return counts


def test_prompts_are_computed_once(model, computed):
    """12 answers of 6 tokens to each of 5 prompts in 4 slots: each prompt's tokens pass through the model once."""
    asked = prompts(5)
    Engine(model, sequences=4).generate(asked, SamplingParams(n=12, max_tokens=6, stop=NEVER))
    assert sum(computed) == sum(map(len, asked)) + 5 * 12 * 5


def test_steps_keep_to_their_budget_and_prompts_do_not_hold_up_answers(model, computed):
    engine = Engine(model, step_tokens=15)
    engine.submit([1, 2, 3], SamplingParams(max_tokens=8, stop=NEVER))
    assert len(engine.step()) == 1
    engine.submit(prompts(1, 20, seed=4)[0] * 20, SamplingParams(max_tokens=2, stop=NEVER))
    while not engine.scheduler.idle:
        engine.step()
    assert max(computed) == 15
    assert computed[1:4] == [15] * 3  # the answer's token, and 14 of the prompt


def test_a_longer_prompt_begins_where_the_cache_ends(model, computed):
    """In a continued conversation, earlier turns are recomputed only from the end of their last whole page."""
    prompt, params = list(range(37)), SamplingParams(temperature=0, max_tokens=20, stop=NEVER)
    engine = Engine(model)
    ((answer,),) = engine.generate([prompt], params)
    longer = [*prompt, *answer.tokens, 5, 6]
    computed.clear()
    ((found,),) = engine.generate([longer], params)
    assert computed[0] == len(longer) - (37 + 19) // PAGE * PAGE
    assert found.tokens == Engine(model).generate([longer], params)[0][0].tokens


@pytest.mark.parametrize(("way", "temperature", "tokens"), [("all at once", 0.0, 1), ("all at once", 1.0, 4), ("little of everything", 1.0, 3)])
def test_guesses_change_no_answer_and_save_steps(model, computed, way, temperature, tokens):
    """Passes are exact, so that rounding flips no draw; a bias leaves only `tokens` tokens to draw, so that earlier text recurs."""
    asked = prompts(4)
    params = SamplingParams(n=2, temperature=temperature, max_tokens=40, stop=NEVER, seed=5, logit_bias=dict.fromkeys(range(tokens), 30.0))
    limits = {key: value for key, value in WAYS[way].items() if key != "pages"}
    engine = Engine(model, exact=True, memory=pages(model, WAYS[way].get("pages", 4000)), **limits)
    plain = engine.generate(asked, params)
    steps = len(computed)
    engine.scheduler.restart()
    guessed = engine.generate(asked, dataclasses.replace(params, speculate=6))
    assert guessed == plain and nothing_is_left(engine)
    assert steps == 40 or way != "all at once"
    assert len(computed) - steps < (12 if tokens == 1 else 40) or way != "all at once"


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_guesses_after_penalties_change_no_answer_and_leave_nothing(model, computed, way, temperature):
    """With a penalty, a row must know the tokens before it."""
    asked = prompts(4)
    params = SamplingParams(n=2, temperature=temperature, max_tokens=60, stop=NEVER, seed=5, logit_bias=dict.fromkeys(range(4), 30.0), frequency_penalty=0.1)
    limits = {key: value for key, value in WAYS[way].items() if key != "pages"}
    plain = Engine(model, exact=True).generate(asked, params)
    engine = Engine(model, exact=True, memory=pages(model, WAYS[way].get("pages", 4000)), **limits)
    computed.clear()
    assert engine.generate(asked, dataclasses.replace(params, speculate=5)) == plain and nothing_is_left(engine)
    assert max(computed) <= limits.get("step_tokens", math.inf) + 8  # in addition to one for each answer


@pytest.fixture(scope="module")
def near(model):
    """Return a model that often draws the same tokens as the other: its weights, slightly changed."""
    other = Transformer(CONFIG, seed=0)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)) * 0.03)
    return other


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_drafts_guesses(model, near, way, temperature):
    """At temperature 0 the answers equal those without a draft; log-probs equal the trainer's bit by bit, with pauses, chunks and few
    slots."""
    params = SamplingParams(n=3, temperature=temperature, max_tokens=20, stop=(0, 1), seed=5, presence_penalty=0.5)
    limits = {"memory": 2 * pages(model, 4000), **WAYS[way]}
    if "pages" in limits:
        limits["memory"] = 2 * pages(model, limits.pop("pages"))
    engine = DraftedEngine(model, near, exact=True, **limits)
    asked = prompts(4)
    answers = engine.generate(asked, dataclasses.replace(params, speculate=4))
    assert nothing_is_left(engine) and (engine.scheduler.preemptions > 0) == ("pages" in WAYS[way])
    if temperature == 0:
        assert answers == Engine(model, exact=True).generate(asked, params)
    else:
        with exact_passes(torch.float32, torch.device("cpu")):
            assert torch.equal(drawn_logprobs(answers), packed_logprobs(model, asked, answers, temperature))


def test_answers_with_a_draft_follow_from_the_seed():
    """Answers do not depend on concurrent requests, as long as a step has room for guesses. In fp64, so that rounding flips no draw."""
    model, smaller = (Transformer(CONFIG, seed=seed).double() for seed in (0, 1))
    params, asked = SamplingParams(n=2, max_tokens=15, stop=NEVER, seed=3, speculate=3), prompts(4)
    answers = DraftedEngine(model, smaller).generate(asked, params)
    (alone,) = DraftedEngine(model, smaller).generate(asked[2:3], params)
    assert [answer.tokens for answer in alone] == [answer.tokens for answer in answers[2]]
    assert DraftedEngine(model, smaller).generate(asked, dataclasses.replace(params, seed=4)) != answers


def test_answers_with_a_draft_have_the_models_distribution(near):
    """3000 answers of three tokens, with a guess for the second: chi-square of all three against every path of the model."""
    model = Transformer(CONFIG, seed=0)
    params = SamplingParams(n=3000, temperature=0.7, max_tokens=3, stop=NEVER, seed=5, speculate=2)
    (row,) = DraftedEngine(model, near, sequences=500).generate([[7, 8, 9]], params)

    def following(paths):
        with torch.no_grad():
            last = torch.tensor([len(path) for path in paths]).cumsum(0) - 1
            return (model.logits(model.hidden(Forest.pack(paths))[last]).double() / 0.7).softmax(-1).numpy()

    V = CONFIG.vocab_size
    first = following([[7, 8, 9]])[0]
    pairs = first[:, None] * following([[7, 8, 9, a] for a in range(V)])
    third = pairs.reshape(-1) @ np.concatenate([following([[7, 8, 9, a, b] for b in range(V)]) for a in range(V)])
    for place, p in enumerate((first, pairs.sum(0), third)):
        counts = np.bincount([answer.tokens[place] for answer in row], minlength=V)
        likely = p * 3000 > 5
        observed, expected = (np.append(x[likely], x[~likely].sum()) for x in (counts, 3000 * p))
        assert ((observed - expected) ** 2 / expected).sum() < likely.sum() + 4 * math.sqrt(2 * likely.sum())


def test_judged_guesses_have_the_larger_models_distribution():
    """Over a grid of random numbers: guesses drawn from q, each accepted or replaced, are distributed as p, up to the grid's resolution."""
    p, q, size = torch.tensor([0.1, 0.4, 0.2, 0.3]), torch.tensor([0.4, 0.1, 0.25, 0.25]), 400
    grid = (torch.arange(size, dtype=torch.float64) + 0.5) / size
    found = torch.zeros(4, dtype=torch.float64)
    for guess in range(4):
        numbers, uniforms = (x.flatten() for x in torch.meshgrid(grid, grid, indexing="ij"))
        rows = (x.expand(size * size, 4) for x in (p, q))
        tokens = accept_guesses(*rows, [guess] * size**2, numbers.tolist(), uniforms)
        found += q[guess] * torch.bincount(tokens, minlength=4) / size**2
    torch.testing.assert_close(found, p.double(), rtol=0, atol=2e-3)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_a_draft_that_is_the_model_is_always_right(computed, temperature):
    """In fp64, so that rounding flips no draw: six guesses and one token per step, also for forks of a prompt and with a cached prefix, so
    a draft has computed everything in the pages."""
    model = Transformer(CONFIG, seed=0).double()
    engine = DraftedEngine(model, model, step_tokens=30)
    params = SamplingParams(n=2, temperature=temperature, max_tokens=36, stop=NEVER, speculate=6)
    ((answer, _),) = engine.generate([list(range(50))], params)
    assert len(computed) == 2 + 35 // 7  # the prompt in two chunks
    engine.generate([[*range(50), *answer.tokens, 3, 4]], dataclasses.replace(params, n=1))
    assert computed[7:] == [88 - 85 // PAGE * PAGE, *[7] * 5]


def test_a_wrong_draft_is_seldom_asked(model, computed):
    """A draft that is never right gets six guesses, then one, after 1, 3 and then every 4 steps without a guess."""
    backwards = Transformer(CONFIG, seed=0)
    with torch.no_grad():
        backwards.lm_head.weight.neg_()
    DraftedEngine(model, backwards).generate([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=40, stop=NEVER, speculate=6))
    assert computed == [3, 7, *(2 if step in {3, 7, *range(12, 39, 5)} else 1 for step in range(2, 40))]


def test_a_guess_is_what_followed_the_longest_run_before():
    lookup = Lookup(4)
    assert lookup.guess([1, 2, 3, 4, 5, 2, 3], 9) == [4, 5, 2, 3]
    lookup.learn(4, 1)
    assert lookup.guess([1, 2, 3, 4, 5, 2, 3, 4, 1, 2, 3], 9) == [4, 5, 2]  # after 1 2 3, not the later 2 3; at most three guesses after one right one
    lookup.learn(3, 0)
    longer = [1, 2, 3, 4, 5, 2, 3, 4, 1, 2, 3, 9, 2, 3]
    assert [lookup.guess(longer, 9) for _ in range(2)] == [[], [9]]  # after a step without a guess
    branching = [1, 2, 3, 4, 1, 2, 5, 6, 7, 2, 8, 1, 2]  # 1 2 was last followed by 5, before that by 3; 2 alone was last followed by 8
    assert Lookup(4).guess([0, *branching], 3) == [5, 6, 7]  # pairs are the shortest n-grams; the latest occurrence counts
    assert Lookup(4).guess([9, 1, 2, 7, 3, 1, 2, 4, 9, 1, 2], 2) == [7, 3]  # a longer n-gram takes precedence over a later shorter one
    assert Lookup(4).guess([1, 2, 3], 9) == [] and Lookup(4).guess([1, 5, 6, 5, 6], 3) == [5, 6, 5]


@pytest.mark.parametrize("by", ["optimizer", "hand"])
def test_a_change_of_the_weights_empties_the_cache(by):
    changing = Transformer(CONFIG, seed=0)
    engine, params = Engine(changing), SamplingParams(temperature=0, max_tokens=8, stop=NEVER)
    prompt = list(range(40))
    engine.generate([prompt], params)
    weight = changing.model.layers[0].self_attn.v_proj.weight
    with torch.no_grad():
        if by == "optimizer":
            adamw_([weight], [torch.ones_like(weight)], [torch.zeros_like(weight)], [torch.zeros_like(weight)], step=1, lr=0.5)
        else:
            weight.mul_(-3.0)
    assert engine.generate([prompt], params) == Engine(changing).generate([prompt], params)


@pytest.mark.parametrize(("length", "n", "new"), [(37, 6, 30), (48, 4, 17), (5, 1, 40), (31, 5, 90)])
def test_the_most_pages_in_use_follow_from_the_lengths(model, length, n, new):
    """A prompt's whole pages count once, and each answer's own pages; once all answers have started, one of them uses the prompt's partial
    page."""
    engine = Engine(model)
    engine.generate([list(range(length))], SamplingParams(n=n, max_tokens=new, stop=NEVER))
    whole, written = length // PAGE, length + new - 1  # the last token is drawn, not computed
    assert engine.scheduler.pool.peak == whole + n * (-(-written // PAGE) - whole)


def test_first_tokens_follow_the_model(model):
    """4000 draws of one token: the chi-square statistic of the likely tokens fits the model's distribution."""
    (row,) = Engine(model).generate([[7, 8, 9]], SamplingParams(n=4000, max_tokens=1, stop=NEVER, seed=5))
    counts = np.bincount([answer.tokens[0] for answer in row], minlength=CONFIG.vocab_size)
    with torch.no_grad():
        p = model.logits(model.hidden(Forest.pack([[7, 8, 9]])))[-1].double().softmax(-1).numpy()
    likely = p * 4000 > 5
    observed = np.append(counts[likely], counts[~likely].sum())
    expected = 4000 * np.append(p[likely], p[~likely].sum())
    statistic = ((observed - expected) ** 2 / expected).sum()
    freedom = likely.sum()
    assert statistic < freedom + 4 * math.sqrt(2 * freedom)


# --- draws ---

GRID = (np.arange(1000) + 0.5) / 1000


def shares(p, **params):
    """Return how often each token is drawn over a grid of random numbers, and the draws' true and reported probabilities."""
    logits = torch.tensor(p).log().expand(1000, len(p)).contiguous()
    rows = [Draw(SamplingParams(stop=NEVER, **params), u, [0], [1, 1, 2]) for u in GRID]
    tokens, logprobs, errors = draw(logits, rows)
    assert not errors
    return (np.bincount(tokens, minlength=len(p)) / 1000).tolist(), np.array(p)[tokens], np.exp(logprobs)


@pytest.mark.parametrize("size", [1, 2, 100])
@pytest.mark.parametrize(
    ("params", "kept"),
    [
        ({"top_p": 0.3}, {1: 1.0}),
        ({"top_p": 0.69}, {1: 4 / 7, 3: 3 / 7}),
        ({"top_p": 0.75}, {1: 4 / 9, 3: 3 / 9, 2: 2 / 9}),
        ({"top_k": 2}, {1: 4 / 7, 3: 3 / 7}),
        ({"top_k": 3, "top_p": 0.42}, {1: 1.0}),  # 4/9 of the mass that top_k leaves
        ({"min_p": 0.49}, {1: 4 / 9, 3: 3 / 9, 2: 2 / 9}),
        ({"min_p": 0.51}, {1: 4 / 7, 3: 3 / 7}),
        ({"top_k": 1, "temperature": 2.0}, {1: 1.0}),
    ],
)
def test_cuts_keep_the_likeliest_and_logprobs_stay_the_models(monkeypatch, size, params, kept):
    monkeypatch.setattr("puna.models.generation.sampling.NUCLEUS", size)
    found, p, said = shares([0.1, 0.4, 0.2, 0.3], **params)
    assert found == pytest.approx([kept.get(token, 0.0) for token in range(4)], abs=2e-3)
    rows = [Draw(SamplingParams(stop=NEVER, **some), 0.5, [0], []) for some in (params, {}, {"temperature": 0.0})]
    whole, _ = distribution(torch.tensor([[0.1, 0.4, 0.2, 0.3]] * 3).log(), rows)
    torch.testing.assert_close(whole, torch.tensor([[kept.get(token, 0.0) for token in range(4)], [0.1, 0.4, 0.2, 0.3], [0.0, 1.0, 0.0, 0.0]]))
    if "temperature" not in params:
        assert said == pytest.approx(p, abs=1e-6)


@pytest.mark.parametrize("top_k", [127, 128, 200])
def test_top_p_is_a_share_of_all_that_top_k_leaves(top_k):
    """The first 128 tokens hold the nucleus, and the share of the rest of the top k counts, too: as in transformers."""
    from transformers import TopKLogitsWarper, TopPLogitsWarper

    logits = 3.2 * torch.randn(4, 5000, generator=torch.Generator().manual_seed(0))
    expected = TopPLogitsWarper(0.6)(None, TopKLogitsWarper(top_k)(None, logits.clone())).softmax(-1)
    torch.testing.assert_close(cut(logits.softmax(-1), [SamplingParams(top_k=top_k, top_p=0.6)] * 4), expected)


def test_shifts_change_the_draw_and_not_the_logprobs():
    """The answer so far is 1, 1, 2 after the prompt 0. All tokens have probability 1/4; the expected changes are computed by hand."""
    even = [0.25] * 4
    for params, weights in (
        ({"presence_penalty": math.log(2)}, [1, 1 / 2, 1 / 2, 1]),
        ({"frequency_penalty": math.log(2)}, [1, 1 / 4, 1 / 2, 1]),
        ({"logit_bias": {3: math.log(4)}}, [1, 1, 1, 4]),
        ({"mask": lambda answer: torch.tensor([False, True, True, False])}, [0, 1, 1, 0]),
        ({"repetition_penalty": 2.0}, [1 / 4, 1 / 4, 1 / 4, 1]),  # logits of log 1/4 are negative: doubled
        ({"presence_penalty": math.log(2), "top_k": 2}, [1, 0, 0, 1]),
    ):
        found, p, said = shares(even, **params)
        assert found == pytest.approx((np.array(weights) / sum(weights)).tolist(), abs=2e-3), params
        assert said == pytest.approx(p, abs=1e-6)


def test_each_row_is_drawn_by_its_own_parameters():
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(0))
    some = [{"temperature": 0.0}, {"top_k": 3}, {"logit_bias": {7: 50.0}}, {"temperature": 2.5}]
    rows = [Draw(SamplingParams(stop=NEVER, **params), 0.9, [0], []) for params in some]
    tokens, logprobs, errors = draw(logits, rows)
    assert not errors
    for i, row in enumerate(rows):
        assert draw(logits[i : i + 1].clone(), [row]) == ([tokens[i]], [logprobs[i]], {})
    assert tokens[0] == logits[0].argmax() and tokens[1] in logits[1].topk(3).indices and tokens[2] == 7


def test_a_row_that_cannot_be_drawn_fails_alone():
    """The other rows keep the bits that they have without the failing row, in the loops (fp32) and in PyTorch (fp64)."""
    def mask(allowed):
        return lambda _: torch.full((50,), allowed)

    wrong = [
        ({"mask": mask(False)}, "the mask allows no token after [1]"),
        ({"mask": lambda _: 1 / 0}, "the mask failed after 1 tokens: division by zero"),
        ({"mask": lambda _: torch.ones(49, dtype=torch.bool)}, "the mask failed after 1 tokens"),
        ({"logit_bias": {3: 1e308}, "temperature": 0.01}, "leave no finite logit"),
        ({"logit_bias": {3: 1e308}, "temperature": 0.01, "top_k": 3}, "leave no finite logit"),
        ({"logit_bias": {50: 1.0}}, "logit_bias names token 50"),
    ]
    good = [{}, {"top_k": 3}, {"temperature": 0.0}, {"mask": mask(True)}, {"logit_bias": {7: 2.0}, "min_p": 0.1}]
    rows = [Draw(SamplingParams(stop=NEVER, **params), 0.7, [0], [1]) for params in [*(params for params, _ in wrong), *good]]
    for dtype in (torch.float32, torch.float64):
        logits = torch.randn(len(rows) + 1, 50, generator=torch.Generator().manual_seed(0), dtype=dtype)
        logits[-1, 3] = math.nan
        found = draw(logits.clone(), [*rows, Draw(SamplingParams(), 0.7, [0], [1])])
        alone = draw(logits[len(wrong) : -1].clone(), rows[len(wrong) :])
        assert sorted(found.errors) == [*range(len(wrong)), len(rows)]
        assert all(message in str(found.errors[row]) for row, (_, message) in enumerate(wrong))
        assert not found.errors[len(rows)].asked and "weights" in str(found.errors[len(rows)])
        assert (found.tokens[len(wrong) : -1], found.logprobs[len(wrong) : -1]) == alone[:2] and not alone.errors


# --- requests ---


def test_progress_counts_answers(model):
    seen = []
    Engine(model, sequences=2).generate(prompts(3), SamplingParams(n=2, max_tokens=4, stop=NEVER), progress=lambda *now: seen.append(now))
    assert seen == [(done, 6) for done in range(1, 7)]


def test_a_stream_gives_what_generate_does_and_may_be_left(model):
    engine, params = Engine(model), SamplingParams(n=2, max_tokens=9, stop=(0, 1, 2), seed=3)
    (expected,) = engine.generate([[4, 5, 6]], params)
    tokens = {0: [], 1: []}
    for event in engine.stream([4, 5, 6], params):
        tokens[event.number].append(event.token)
        if event.completion is not None:
            assert event.completion == expected[event.number]
    assert [tokens[0], tokens[1]] == [answer.tokens for answer in expected]
    begun = engine.stream([4, 5, 6], params)
    next(begun)
    begun.close()
    assert nothing_is_left(engine)


def test_lower_priorities_are_begun_first(model):
    engine = Engine(model, sequences=1)
    late, soon = (engine.submit([1, 2], SamplingParams(max_tokens=1, stop=NEVER, priority=p)) for p in (5, 1))
    assert [engine.step()[0].request for _ in "12"] == [soon, late]


def test_the_tokenizer_names_the_default_stop_and_finds_texts():
    tokenizer = Tokenizer.train(["aaa"], 262)
    small = Transformer(
        ModelConfig(vocab_size=tokenizer.vocab_size, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1), seed=0
    )
    engine = Engine(small, tokenizer)
    (row,) = engine.generate([[70]], SamplingParams(n=300, max_tokens=40))
    assert any(answer.finished for answer in row)
    assert all(answer.finished == (answer.tokens[-1] in tokenizer.stop_ids) for answer in row)
    (row,) = engine.generate(["q"], SamplingParams(n=300, max_tokens=40, stop=("e", "ab")))
    texts = [tokenizer.decode(answer.tokens, skip_special_tokens=True) for answer in row]
    assert all(answer.finished == ("e" in text or "ab" in text) for answer, text in zip(row, texts, strict=True))
    assert all(text.find("e") in (-1, len(text) - 1) for text in texts) and any(answer.finished for answer in row)
    with pytest.raises(ValueError, match="no tokenizer to name the end of turn"):
        Engine(small).generate([[1]], SamplingParams())
    with pytest.raises(ValueError, match="prompt 0 is text"):
        Engine(small).generate(["a"], SamplingParams(stop=NEVER))
    with pytest.raises(ValueError, match="no tokenizer to find the text 'x'"):
        Engine(small).generate([[1]], SamplingParams(stop=("x",)))


def test_an_answer_is_cut_off_where_the_context_ends():
    most = 32
    model = Transformer(CONFIG.model_copy(update={"max_position_embeddings": most}), seed=0)
    prompts = [[1 + n % 50 for n in range(length)] for length in (most - 3, most, 5)]
    params = SamplingParams(max_tokens=10, temperature=1.0, stop=(), seed=1)
    answers = [row[0] for row in Engine(model).generate(prompts, params)]
    assert [(len(one.tokens), one.finished) for one in answers] == [(3, False), (1, False), (10, False)]


def test_no_prompts_no_answers(model):
    assert Engine(model).generate([], SamplingParams(stop=NEVER)) == []


def test_bad_requests_are_refused(model):
    with pytest.raises(ValueError, match="prompt 1 is empty"):
        Engine(model).generate([[1], []], SamplingParams(stop=NEVER))
    most = CONFIG.max_position_embeddings
    with pytest.raises(ValueError, match=f"prompt 1 has {most + 1} tokens, but the model's context {most}: shorten it, or set a window"):
        Engine(model).generate([[1] * most, [1] * (most + 1)], SamplingParams(max_tokens=1, stop=NEVER))
    with pytest.raises(ValueError, match="needs a language-model head"):
        Engine(Transformer(CONFIG, "scalar"))
    with pytest.raises(ValueError, match="over the model's 83 tokens"):
        DraftedEngine(model, Transformer(ModelConfig(**{**CONFIG.model_dump(), "vocab_size": 84})))
    with pytest.raises(ValueError, match="needs 7 pages of 16 tokens, the cache has 3"):
        Engine(model, memory=pages(model, 3)).generate([[1] * 90], SamplingParams(max_tokens=10, stop=NEVER))
    with pytest.raises(ValueError, match="exact passes need fp32"):
        Engine(Transformer(CONFIG, seed=0).double(), exact=True).generate([[1]], SamplingParams(stop=NEVER))
    for wrong, message in (
        ({"n": 0}, "at least 1"),
        ({"max_tokens": 0}, "at least 1"),
        ({"temperature": -1.0}, "temperature must be"),
        ({"temperature": math.nan}, "temperature must be"),
        ({"top_p": 0.0}, "top_p must lie in"),
        ({"top_k": -1}, "top_k must not be negative"),
        ({"min_p": 1.5}, "min_p must lie in"),
        ({"repetition_penalty": 0.0}, "repetition_penalty must be"),
        ({"logit_bias": {1: math.inf}}, "must be finite"),
        ({"seed": -1}, "seed must not be negative"),
        ({"speculate": -1}, "speculate must not be negative"),
        ({"speculate": 2, "mask": bool}, "set only one of the two"),
    ):
        with pytest.raises(ValueError, match=message):
            SamplingParams(**wrong)


def test_a_broken_model_is_reported_and_can_be_mended():
    """A diverged model's values in the cache are dropped with the model."""
    broken = Transformer(CONFIG, seed=0)
    weight = broken.model.layers[0].self_attn.v_proj.weight
    engine, params = Engine(broken), SamplingParams(max_tokens=3, stop=NEVER)
    with torch.no_grad():
        whole = weight.clone()
        weight[3] = math.nan
    with pytest.raises(ValueError, match="not finite"):
        engine.generate([[1, 2]], params)
    with torch.no_grad():
        weight.copy_(whole)
    assert engine.generate([[1, 2]], params) == Engine(broken).generate([[1, 2]], params) and nothing_is_left(engine)


def test_weights_that_change_midway_are_seen_by_what_runs():
    """After the change, an answer continues as if its tokens so far were a prompt to the new weights."""
    changing = Transformer(CONFIG, seed=0)
    engine = Engine(changing)
    request = engine.submit(list(range(30)), SamplingParams(temperature=0, max_tokens=12, stop=NEVER))
    tokens = [event.token for _ in range(5) for event in engine.step()]
    with torch.no_grad():
        changing.model.layers[0].mlp.up_proj.weight.mul_(-1.5)
    while not engine.scheduler.idle:
        tokens += [event.token for event in engine.step() if event.request is request]
    (rest,) = Engine(changing).generate([[*range(30), *tokens[:5]]], SamplingParams(temperature=0, max_tokens=7, stop=NEVER))
    assert tokens[5:] == rest[0].tokens and nothing_is_left(engine)


@pytest.mark.parametrize("also", [{"qkv_bias": True, "o_bias": True, "qk_norm": True, "head_dim": 12}, {"sliding_window": 5, "sliding_layers": (1,)}])
def test_layers_by_loops_have_the_bits_of_the_models(also):
    """Exact answers from a few compiled loops per layer equal those from the model's own operators, which training uses."""
    config = ModelConfig(**{**CONFIG.model_dump(), "head_dim": 0, **also, "model_type": ""})
    model = Transformer(config, seed=0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter.uniform_(0.5, 1.5, generator=torch.Generator().manual_seed(len(name)))
    params = SamplingParams(n=2, max_tokens=20, stop=(0, 1), seed=1)
    by_loops, plain = Engine(model, exact=True), Engine(model, exact=True)
    assert by_loops._loops[0] is not None
    plain._loops = [None]
    assert by_loops.generate(prompts(4, 40), params) == plain.generate(prompts(4, 40), params)


def test_layers_by_loops_serve_dense_models_in_fp32(model):
    assert loops(Transformer(CONFIG).double()) is None
    experts = ModelConfig(**{**CONFIG.model_dump(), "moe": {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 8}, "model_type": ""})
    assert loops(Transformer(experts)) is None and loops(model) is not None
