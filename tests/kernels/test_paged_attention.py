"""Decoding from pages with shared prefixes, against one sequence at a time and the forest's own attention."""

import pytest
import torch

from puna.kernels import paged_attention as module
from puna.kernels.attention import ForestMask, attention
from puna.kernels.kv_append import kv_append_
from puna.kernels.paged_attention import DecodePlan, Run, paged_attention, paged_attention_reference


@pytest.mark.parametrize("split", [5, 16, 1000])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_shared_and_own_runs(within_budget, monkeypatch, split, dtype):
    monkeypatch.setattr(module, "SPLIT", split)
    runs = [Run(0, 3, [4, 1, 7], 11), Run(3, 1, [2], 3), Run(0, 1, [0], 4), Run(1, 2, [3, 5], 7), Run(2, 1, [6], 1)]
    plan = DecodePlan.from_runs(runs, 4, 4)
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(shape, dtype=torch.float64, generator=generator) for shape in ((4, 4, 6), (8, 4, 2, 6), (8, 4, 2, 6))]
    within_budget(lambda q, k, v: paged_attention(q, k, v, plan), lambda q, k, v: paged_attention_reference(q, k, v, runs), inputs, dtype)


def test_a_prompt_and_its_answers_equal_the_forest():
    """The last token of each of three answers sees what it sees in training: the prompt once, then its own answer."""
    prompt, answers = 9, (3, 5, 1)
    ends = [prompt + sum(answers)] * prompt
    for i, size in enumerate(answers):
        ends += [prompt + sum(answers[: i + 1])] * size
    T = len(ends)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(T, heads, 6, dtype=torch.float64, generator=generator) for heads in (4, 2, 2))
    whole = attention(q, k, v, ForestMask.from_end(torch.tensor(ends, dtype=torch.int32)))
    last = torch.tensor([prompt + sum(answers[: i + 1]) - 1 for i in range(3)])
    pages = [torch.zeros(8, 4, 2, 6, dtype=torch.float64) for _ in range(2)]
    rows = {0: ([0, 1, 2], range(prompt))}
    for i, size in enumerate(answers):
        rows[i + 1] = ([3 + i] if i != 1 else [4, 6], range(int(last[i]) - size + 1, int(last[i]) + 1))
    runs = []
    for number, (where, tokens) in rows.items():
        places = torch.tensor([where[n // 4] * 4 + n % 4 for n in range(len(tokens))])
        kv_append_(*pages, k[list(tokens)], v[list(tokens)], places)
        runs.append(Run(0, 3, where, len(tokens)) if number == 0 else Run(number - 1, 1, where, len(tokens)))
    ours = paged_attention(q[last], *pages, DecodePlan.from_runs(runs, 3, 4))
    torch.testing.assert_close(ours, whole[last])


def test_what_cannot_be_is_refused():
    for runs, message in (
        ([Run(0, 2, [0], 4)], "sequences 0 to 1, of 1"),
        ([Run(0, 1, [0], 5)], "5 tokens in 1 pages of 4"),
        ([], "sequence 0 is in no run"),
    ):
        with pytest.raises(ValueError, match=message):
            DecodePlan.from_runs(runs, 1, 4)
    plan = DecodePlan.from_runs([Run(0, 1, [0], 4)], 1, 4)
    with pytest.raises(ValueError, match="do not fit"):
        paged_attention(torch.zeros(2, 2, 4), torch.zeros(1, 4, 1, 4), torch.zeros(1, 4, 1, 4), plan)
