"""Answers by search against every answer that a tiny model can give."""

from itertools import product

import numpy as np
import pytest
import torch

from puna.models.config import ModelConfig
from puna.models.forest import Forest
from puna.models.generation import Completion, Engine, SamplingParams
from puna.models.generation.search import best_of, likelihood, majority, tree
from puna.models.transformer import Transformer

V, END = 4, 0
CONFIG = ModelConfig(vocab_size=V, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, initializer_range=0.6)
PROMPT = [1, 2]


@pytest.fixture(scope="module", params=[0, 1])
def model(request):
    return Transformer(CONFIG, generator=torch.Generator().manual_seed(request.param))


def all_answers(model, longest):
    """Every answer of at most `longest` tokens with its mean log-prob: each ends with END, or at the last token."""
    found = {}
    for length in range(1, longest + 1):
        for answer in product(range(V), repeat=length):
            if END in answer[:-1] or (answer[-1] != END and length < longest):
                continue
            with torch.no_grad():
                hidden = model.hidden(Forest.pack([[*PROMPT, *answer[:-1]]]))[len(PROMPT) - 1 :]
                logp = model.logits(hidden).double().log_softmax(-1)
            found[answer] = float(logp[range(length), list(answer)].mean())
    return found


def test_a_whole_tree_finds_the_best_of_all_answers(model):
    """With so many draws that no step is missed, and as many expansions as there are leaves."""
    known = all_answers(model, 3)
    params = SamplingParams(n=150, max_tokens=3, stop=(END,))
    told = {}

    def score(answers):
        told.update({tuple(answer.tokens): value for (_, answer), value in zip(answers, likelihood(answers), strict=True)})
        return likelihood(answers)

    (found,) = tree(Engine(model), [PROMPT], params, score, expansions=1 + 3 + 9, step="", step_tokens=1)
    assert told.keys() <= known.keys() and len(told) > 10
    assert all(value == pytest.approx(known[answer], abs=1e-4) for answer, value in told.items())
    best = max(known, key=known.__getitem__)
    assert tuple(found.completion.tokens) == best and found.value == pytest.approx(known[best], abs=1e-4)
    (other,) = tree(Engine(model), [PROMPT], params, lambda answers: [-len(one.tokens) for _, one in answers], expansions=2, step="", step_tokens=1)
    assert other.completion.tokens == [END] and other.completion.finished and other.value == -1


def test_the_leaf_of_most_promise_is_grown_wherever_it_hangs(model):
    """Promise by a table: the path [3, 1] is grown although a sibling of its parent promised more at first."""
    promise = {(3,): 2.0, (2,): 1.5, (3, 1): 1.8, (3, 2): 0.5, (2, 1): 9.0}
    grown = []
    engine = Engine(model)
    generate = engine.generate
    engine.generate = lambda prompts, params: [grown.append(tuple(prompts[0][len(PROMPT) :])), generate(prompts, params)][1]
    tree(engine, [PROMPT], SamplingParams(n=100, max_tokens=5, stop=(END,), temperature=9.0), expansions=5, step="", step_tokens=1, promise=lambda answers: [promise.get(tuple(a.tokens), 0.0) for _, a in answers])
    assert grown == [(), (3,), (3, 1), (2,), (2, 1)]


def test_best_of_and_majority_choose_among_the_same_answers(model):
    prompts, params = [PROMPT, [3], [1, 1]], SamplingParams(n=9, max_tokens=4, stop=(END,), seed=2)
    rows = Engine(model).generate(prompts, params)
    drawn = [sum(len(answer.tokens) for answer in row) for row in rows]

    def score(answers):
        return [(7 * number + sum(answer.tokens)) % 5 for number, answer in answers]

    best = best_of(Engine(model), prompts, params, score)
    for number, (found, row) in enumerate(zip(best, rows, strict=True)):
        values = score([(number, answer) for answer in row])
        assert found.value == max(values) and found.completion == row[int(np.argmax(values))] and found.tried == 9
    most = majority(Engine(model), prompts, params, lambda answer: str(answer.tokens[0]))
    for found, row in zip(most, rows, strict=True):
        times = np.bincount([answer.tokens[0] for answer in row], minlength=V)
        assert times[found.completion.tokens[0]] == times.max() and found.value == times.max() / 9
    assert [found.tokens for found in best] == [found.tokens for found in most] == drawn


def test_a_tree_without_an_end_gives_its_best_leaf_and_counts_its_tokens(model):
    """One expansion, no answer can be whole: of three tokens each, all drawn ones counted."""
    (found,) = tree(Engine(model), [PROMPT], SamplingParams(n=6, max_tokens=9, stop=()), expansions=1, step="", step_tokens=3)
    assert len(found.completion.tokens) == 3 and not found.completion.finished
    assert (found.tokens, found.tried) == (18, 6) and found.value == likelihood([(0, found.completion)])[0]
    with pytest.raises(ValueError, match="expansions and step_tokens must be at least 1"):
        tree(Engine(model), [PROMPT], SamplingParams(stop=()), expansions=0)


def test_likelihood_is_the_mean_of_logprobs():
    assert likelihood([(0, Completion([1, 2], [-1.0, -3.0], True))]) == [-2.0]
