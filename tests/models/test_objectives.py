"""Losses compared with values derived by hand, and gradients that are the same in every layout."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from puna.models.config import ModelConfig
from puna.models.training import objectives as o
from puna.models.training.loop import TrainConfig, Trainer
from puna.models.transformer import Transformer

VOCABULARY = 23
CONFIG = ModelConfig(vocab_size=VOCABULARY, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)


def model(head: str = "lm", seed: int = 0) -> Transformer:
    # Larger weights than the initial ones, so that attention affects the result.
    made = Transformer(CONFIG, head, seed=seed)
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.ndim > 1:
                parameter.mul_(10.0)
    return made


def examples(count: int, answers: int, seed: int = 0) -> list[tuple[list[int], list[list[int]]]]:
    rng = np.random.default_rng(seed)

    def some(low: int, high: int) -> list[int]:
        return rng.integers(0, VOCABULARY, rng.integers(low, high)).tolist()

    return [(some(1, 7), [some(1, 6) for _ in range(answers)]) for _ in range(count)]


def targets(some: list[tuple[list[int], list[list[int]]]]) -> o.Targets:
    return o.Targets.from_answers([p for p, _ in some], [a for _, a in some])


# ---- the pure losses --------------------------------------------------------------------------------


def test_a_masked_row_gives_zero_and_a_zero_gradient():
    made, batch = model(), o.Targets.from_documents([[1, 2, 3, 4]])
    loss, _ = o.LanguageModeling()(made, dataclasses.replace(batch, mask=torch.zeros_like(batch.mask)))
    loss.backward()
    assert loss.item() == 0.0
    assert all(not p.grad.any() for p in made.parameters() if p.grad is not None)


def test_whiten():
    # 1, 3 have mean 2 and sample variance 2, as in TRL's `masked_whiten`; the masked 100 does not count.
    got = o.ppo.whiten(torch.tensor([1.0, 100.0, 3.0]), torch.tensor([True, False, True]))
    assert got.tolist() == pytest.approx([-(0.5**0.5), 0.0, 0.5**0.5], abs=1e-6)
    assert o.ppo.whiten(torch.tensor([5.0, 7.0]), torch.tensor([True, False])).tolist() == [0.0, 0.0]
    assert o.ppo.whiten(torch.ones(3), torch.zeros(3, dtype=torch.bool)).tolist() == [0.0, 0.0, 0.0]


class Fixed:
    """A model with given log-probabilities [N] and entropies [N]."""

    def __init__(self, logprobs: torch.Tensor, entropies: torch.Tensor | None = None) -> None:
        self.given = logprobs, torch.zeros_like(logprobs) if entropies is None else entropies

    def token_logprobs(self, *_: object, **__: object) -> tuple[torch.Tensor, torch.Tensor]:
        return self.given


def test_ppo_policy_loss_by_hand():
    # Ratios 1.5, 1.5, .5, .5 with clip .2 and advantages +1, -1, +1, -1:
    #   min(1.5, 1.2) = 1.2 (clipped, no gradient); min(-1.5, -1.2) = -1.5;
    #   min(.5, .8) = .5;                           min(-.5, -.8) = -.8 (clipped, no gradient)
    # The last token has a ratio of infinity and is masked.
    new = torch.tensor([1.5, 1.5, 0.5, 0.5, 1.0], dtype=torch.float64).log()
    new[4] = 1e6
    new.requires_grad_()
    advantages = torch.tensor([1.0, -1.0, 1.0, -1.0, 1.0], dtype=torch.float64)
    targets, zero = o.Targets.from_answers([[1]], [[[2, 3], [4, 5, 6]]], [[[True, True], [True, True, False]]]), torch.zeros(5)
    batch = o.PpoBatch(targets, zero.double(), advantages, zero, zero)
    loss, metrics = o.Ppo(clip=0.2)(Fixed(new), batch)
    loss.backward()
    assert loss.item() == pytest.approx(-(1.2 - 1.5 + 0.5 - 0.8) / 4)
    # d/d log ratio of ratio * a is ratio * a
    assert new.grad.tolist() == pytest.approx([0.0, 1.5 / 4, -0.5 / 4, 0.0, 0.0])
    assert metrics["clip_fraction"].item() == 1.0

    # The others with the same ratios: an answer's ratio is the geometric mean of its tokens' ratios.
    root = math.sqrt(1.5 * 1.5), math.sqrt(0.5 * 0.5)
    for objective, expected in (
        (o.Ppo(clip=0.2, normalizer="answers"), -((1.2 - 1.5) / 2 + (0.5 - 0.8) / 2) / 2),
        (o.Ppo(clip=0.2, normalizer="constant", max_tokens=7), -(1.2 - 1.5 + 0.5 - 0.8) / 14),
        (o.Ppo(clip=0.2, ratio="sequence", normalizer="answers"), -((1.2 - root[0]) / 2 + (root[1] - 0.8) / 2) / 2),
        (o.Ppo(clip=0.2, surrogate="cispo"), -(1.2 * new[0] - 1.2 * new[1] + 0.5 * new[2] - 0.5 * new[3]).item() / 4),
    ):
        assert objective(Fixed(new), batch)[0].item() == pytest.approx(expected, rel=1e-6)


def test_ppo_value_loss_by_hand():
    # v = 1.0, old = .5, R = 0, clip .2: the clipped value is .7; max(1, .49) = 1
    # v = 1.0, old = .5, R = 2: max((1-2)^2, (.7-2)^2) = 1.69, clipped: no gradient
    values = torch.tensor([1.0, 1.0, 9.0], dtype=torch.float64, requires_grad=True)
    old = torch.full((3,), 0.5, dtype=torch.float64)
    returns = torch.tensor([0.0, 2.0, 0.0], dtype=torch.float64)
    loss = o.ppo.ppo_value_loss(values, old, returns, torch.tensor([True, True, False]), clip=0.2, total=2)
    loss.backward()
    assert loss.item() == pytest.approx(0.5 * (1.0 + 1.69) / 2)
    assert values.grad.tolist() == pytest.approx([0.5, 0.0, 0.0])


def test_ranked_pairs_and_reward_loss_by_hand():
    # Prompt 0 ranks three answers (3 pairs), prompt 1 has a tie (none), prompt 2 two answers (1 pair).
    prompt = torch.tensor([0, 0, 0, 1, 1, 2, 2])
    rank = torch.tensor([0, 1, 2, 0, 0, 1, 0])
    better, worse, weight = o.reward.ranked_pairs(prompt, rank)
    assert list(zip(better.tolist(), worse.tolist(), strict=True)) == [(0, 1), (0, 2), (1, 2), (6, 5)]
    assert weight.tolist() == pytest.approx([1 / 3, 1 / 3, 1 / 3, 1.0])
    rewards = torch.tensor([2.0, 0.0, 0.0, 9.0, 9.0, 0.0, 1.0])

    def nll(x: float) -> float:
        return math.log1p(math.exp(-x))

    expected = ((2 * nll(2.0) + nll(0.0)) / 3 + nll(1.0)) / 2
    assert o.reward.reward_loss(rewards[better], rewards[worse], weight, 2).item() == pytest.approx(
        expected, rel=1e-6
    )


# ---- targets ------------------------------------------------------------------------------------------


def test_divergence_by_hand():
    student, teacher = torch.tensor([[0.5, 0.5], [0.5, 0.5]]).log(), torch.tensor([[0.5, 0.5], [0.75, 0.25]]).log()
    forward = 0.75 * math.log(1.5) + 0.25 * math.log(0.5)
    reverse = -0.5 * (math.log(1.5) + math.log(0.5))
    assert o.likelihood.divergence(student, teacher, 0.0).tolist() == pytest.approx([0.0, forward], abs=1e-7)
    assert o.likelihood.divergence(student, teacher, 1.0).tolist() == pytest.approx([0.0, reverse], abs=1e-7)
    # The mixture is (5/8, 3/8): half of each side's divergence to it.
    half = 0.5 * (0.75 * math.log(6 / 5) + 0.25 * math.log(2 / 3)) + 0.5 * (0.5 * math.log(4 / 5) + 0.5 * math.log(4 / 3))
    assert o.likelihood.divergence(student, teacher, 0.5).tolist() == pytest.approx([0.0, half], abs=1e-7)


def test_a_teachers_further_logits_only_pad():
    wide = Transformer(CONFIG.replace(vocab_size=VOCABULARY + 5), seed=1)
    narrow = Transformer(CONFIG)
    narrow.load_state_dict({name: w[:VOCABULARY] if w.shape[0] == VOCABULARY + 5 else w for name, w in wide.state_dict().items()})
    batch, student = targets(examples(4, 2)), model()
    assert o.Distill(wide)(student, batch)[0].item() == pytest.approx(o.Distill(narrow)(student, batch)[0].item(), rel=1e-6)


def test_targets_of_documents():
    got = o.Targets.from_documents([[5, 6, 7], [8], [9, 10]])
    assert got.forest.tokens.tolist() == [5, 6, 7, 8, 9, 10]
    assert got.positions.tolist() == [0, 1, 4]
    assert got.tokens.tolist() == [6, 7, 10]
    assert got.lengths.tolist() == [2, 0, 1]
    assert got.last.tolist() == [2, 3, 5]
    assert len(got) == 6


def test_targets_of_answers():
    got = o.Targets.from_answers([[1, 2], [3]], [[[4, 5], [6]], [[7]]], [[[True, False], [True]], [[True]]])
    assert got.forest.tokens.tolist() == [1, 2, 4, 5, 6, 3, 7]
    assert got.positions.tolist() == [1, 2, 1, 5]
    assert got.tokens.tolist() == [4, 5, 6, 7]
    assert got.mask.tolist() == [True, False, True, True]
    assert got.lengths.tolist() == [2, 1, 1]
    assert got.last.tolist() == [3, 4, 6]
    assert got.prompt.tolist() == [0, 0, 1]
    assert got.sum_by_answer(torch.tensor([1.0, 2.0, 4.0, 8.0])).tolist() == [1.0, 4.0, 8.0]


def test_targets_refuse_nonsense():
    with pytest.raises(ValueError, match="prompt 1"):
        o.Targets.from_answers([[1], []], [[[2]], [[3]]])
    with pytest.raises(ValueError, match="flag"):
        o.Targets.from_answers([[1]], [[[2, 3]]], [[[True]]])
    with pytest.raises(ValueError, match="add up"):
        o.Targets.from_packed([1, 2, 3], [2])


@given(st.lists(st.integers(0, 5), min_size=1, max_size=8))
@settings(max_examples=30, deadline=None)
def test_sum_segments(lengths: list[int]):
    values = torch.arange(float(sum(lengths)), dtype=torch.float64, requires_grad=True)
    got = o.base.sum_segments(values, torch.tensor(lengths))
    assert got.tolist() == [float(part.sum()) for part in values.detach().split(lengths)]
    (got * torch.arange(1.0, len(lengths) + 1)).sum().backward()
    assert values.grad.tolist() == [i + 1.0 for i, n in enumerate(lengths) for _ in range(n)]


# ---- gradients do not depend on the layout ------------------------------------------------------------


def dpo_batch(some: list[tuple[list[int], list[list[int]]]], reference: Transformer) -> o.DpoBatch:
    answers = [a for _, a in some]
    masks = [[[i + 1 < len(answer) for i in range(len(answer))] for answer in row] for row in answers]
    laid_out = o.Targets.from_answers([p for p, _ in some], answers, masks)
    even = torch.arange(0, 2 * len(some), 2)
    return o.DpoBatch(laid_out, even, even + 1, o.reference_logprobs(reference, laid_out))


def ppo_batch(some: list[tuple[list[int], list[list[int]]]], reference: Transformer) -> o.PpoBatch:
    laid_out = targets(some)
    # Numbers that depend on the token, not on its row.
    noise = torch.sin(
        laid_out.tokens * 3.1 + torch.arange(1000)[laid_out.forest.positions[laid_out.positions]]
    )
    old = o.base.target_logprobs(reference, laid_out).detach()
    return o.PpoBatch(laid_out, old, noise, 0.3 * noise, noise.cos())


def gradients(made: Transformer, objective: o.Objective, micro: list) -> tuple[float, dict, torch.Tensor]:
    made.zero_grad()
    totals: dict[str, float] = {}
    for part in micro:
        for name, value in objective.totals(part).items():
            totals[name] = totals.get(name, 0.0) + value
    loss, metrics = 0.0, {}
    for part in micro:
        share, values = objective(made, part, totals)
        share.backward()
        loss += share.item()
        for name, value in values.items():
            metrics[name] = metrics.get(name, 0.0) + float(value)
    return loss, metrics, torch.cat([p.grad.flatten() for p in made.parameters()])


CASES = {
    "sft": ("lm", 1, o.Sft(), lambda some, _: targets(some)),
    "dpo": ("lm", 2, o.Dpo(beta=0.5), dpo_batch),
    "dpo_tokens": ("lm", 2, o.Dpo(beta=0.5, nll_normalization="tokens"), dpo_batch),
    "reward": (
        "scalar",
        3,
        o.Reward(),
        lambda some, _: o.RewardBatch(targets(some), torch.arange(3).repeat(len(some))),
    ),
    "reward_nll": (
        "scalar",
        3,
        o.Reward(0.5, torch.randn(VOCABULARY, 16, generator=torch.Generator().manual_seed(5))),
        lambda some, _: o.RewardBatch(targets(some), torch.arange(3).repeat(len(some))),
    ),
    "ppo": ("lm", 2, o.Ppo(entropy_weight=0.01), ppo_batch),
    "gspo": ("lm", 2, o.Ppo(ratio="sequence", normalizer="answers"), ppo_batch),
    "cispo": ("lm", 2, o.Ppo(surrogate="cispo", normalizer="constant", max_tokens=9), ppo_batch),
    "value": ("scalar", 2, o.Value(), ppo_batch),
    "distill": ("lm", 2, o.Distill(model(seed=3), beta=0.7), lambda some, _: targets(some)),
}


@pytest.mark.parametrize("name", CASES)
def test_gradients_do_not_depend_on_order_split_or_prefix_sharing(name: str):
    head, answers, objective, collate = CASES[name]
    made, reference = model(head), model("lm", seed=1)
    some = examples(7, answers)
    layouts = {
        "reversed": [collate(some[::-1], reference)],
        "split": [collate(some[:1], reference), collate(some[1:3], reference), collate(some[3:], reference)],
        "one by one": [collate([example], reference) for example in some],
    }
    loss, metrics, gradient = gradients(made, objective, [collate(some, reference)])
    assert gradient.abs().max() > 1e-3
    for layout, micro in layouts.items():
        other_loss, other_metrics, other = gradients(made, objective, micro)
        assert other_loss == pytest.approx(loss, rel=1e-5, abs=1e-6), layout
        assert other_metrics == pytest.approx(metrics, rel=1e-4, abs=1e-5), layout
        assert (other - gradient).abs().max() <= 1e-5 * gradient.abs().max(), layout


def test_likelihood_beside_rewards_has_the_policys_soft_cap():
    generator = torch.Generator().manual_seed(6)
    made, head, some = model("scalar"), 3 * torch.randn(VOCABULARY, 16, generator=generator), examples(4, 3)
    batch = o.RewardBatch(targets(some), torch.arange(3).repeat(len(some)))
    objective = o.Reward(0.5, head, 2.0)
    _, metrics = objective.loss(made, batch, objective.totals(batch))
    nll = []
    for prompt, (best, *_) in some:
        row = targets([(prompt, [best])])
        logits = made.hidden(row.forest)[row.positions].double() @ head.double().T
        nll.append(-(2 * torch.tanh(logits / 2)).log_softmax(-1)[torch.arange(len(best)), best].mean())
    assert metrics["nll"].item() == pytest.approx(torch.stack(nll).mean().item(), rel=1e-5)


def test_prefix_sharing_equals_separate_rows():
    made = model()
    some = examples(5, 3)
    apart = [(prompt, [answer]) for prompt, answers in some for answer in answers]
    shared = gradients(made, o.Sft(), [targets(some)])
    separate = gradients(made, o.Sft(), [targets(apart)])
    assert shared[0] == pytest.approx(separate[0], rel=1e-6)
    assert (shared[2] - separate[2]).abs().max() <= 1e-5 * shared[2].abs().max()


def test_language_modeling_is_the_mean_over_documents_together():
    made = model()
    rng = np.random.default_rng(3)
    documents = [rng.integers(0, VOCABULARY, n).tolist() for n in (9, 1, 4, 17)]
    together = gradients(made, o.LanguageModeling(), [o.Targets.from_documents(documents)])
    apart = gradients(made, o.LanguageModeling(), [o.Targets.from_documents([d]) for d in documents])
    assert together[0] == pytest.approx(apart[0], rel=1e-6)
    assert (together[2] - apart[2]).abs().max() <= 1e-5 * together[2].abs().max()
    laid_out = o.Targets.from_documents(documents)
    logprobs = o.base.target_logprobs(made, laid_out)
    assert together[0] == pytest.approx(-logprobs.mean().item(), rel=1e-6)
    assert together[1]["bits_per_token"] == pytest.approx(together[0] / math.log(2), rel=1e-6)


# ---- what the losses mean -----------------------------------------------------------------------------


def test_dpo_leaves_format_tokens_out_of_the_preference_and_in_the_nll():
    made, reference = model(), model(seed=1)
    some = [([1, 2, 3], [[4, 5, 20], [6, 20]])]
    plain = dpo_batch(some, reference)
    logprobs = o.base.target_logprobs(made, plain.targets).detach()
    base = o.base.target_logprobs(reference, plain.targets).detach()
    difference = (logprobs - base)[:2].sum() - (logprobs - base)[3:4].sum()
    nll = -logprobs[:3].mean()
    loss, metrics = o.Dpo(beta=0.1, nll_weight=0.2)(made, plain)
    expected = -torch.nn.functional.logsigmoid(0.1 * difference) + 0.2 * nll
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    assert metrics["nll"].item() == pytest.approx(nll.item(), rel=1e-6)
    assert metrics["margin"].item() == pytest.approx(0.1 * difference.item(), rel=1e-5)


def test_dpo_of_the_reference_itself_is_log_two():
    made = model()
    loss, metrics = o.Dpo(nll_weight=0.0)(made, dpo_batch(examples(4, 2), made))
    assert loss.item() == pytest.approx(math.log(2), rel=1e-6)
    assert metrics["chosen_reward"].item() == 0.0


def test_dpo_wants_its_reference():
    batch = o.DpoBatch(targets(examples(1, 2)), torch.tensor([0]), torch.tensor([1]))
    with pytest.raises(ValueError, match="reference"):
        o.Dpo()(model(), batch)
    with pytest.raises(ValueError, match="2 answers but 3 reference log-probs"):
        o.DpoBatch(batch.targets, batch.chosen, batch.rejected, torch.zeros(3))


@pytest.mark.parametrize("name", ["sft", "dpo", "reward"])
def test_training_lowers_the_loss(name: str):
    head, answers, objective, collate = CASES[name]
    made = model(head)
    batch = collate(examples(6, answers), model(seed=1))
    trainer = Trainer(made, objective, TrainConfig(steps=30, schedule={"learning_rate": 3e-3, "shape": "constant"}))
    losses = [trainer.step(step, batch, 0)["loss"] for step in range(1, 31)]
    assert losses[-1] < 0.7 * losses[0]
