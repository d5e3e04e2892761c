"""PPO's driver: it learns what is rewarded, stays near its reference if told to, and resumes bit by bit."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from puna.models.config import ModelConfig
from puna.models.generation import Completion
from puna.models.training import objectives as o
from puna.models.training.loop import weights_digest
from puna.models.training.ppo import train_grpo, train_ppo
from puna.models.training.rl_settings import GrpoSettings, PpoSettings
from puna.models.training.rollouts import Rollouts, reward_model_scorer
from puna.models.transformer import Transformer

from .nested import nested

CONFIG = ModelConfig(vocab_size=12, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1)
STOP = 0
PROMPTS = [[1, 2], [3], [4, 5, 6], [7, 8]]


def model(head: str = "lm", seed: int = 0) -> Transformer:
    return Transformer(CONFIG, head, seed=seed)


def share_of_nines(prompts, completions):
    """A verifier: return the share of an answer's tokens that are 9."""
    return [[sum(t == 9 for t in c.tokens) / len(c.tokens) for c in row] for row in completions]


def run(config: PpoSettings, policy: Transformer, scorer=share_of_nines, **more):
    critic = more.pop("critic", None) or model("scalar", 1)
    return train_ppo(Rollouts(policy, model(), scorer, PROMPTS, [STOP], config, seed=0), critic, **more)


def by_group(config: GrpoSettings, policy: Transformer, scorer=share_of_nines, reference=None, **more):
    return train_grpo(Rollouts(policy, reference or model(), scorer, PROMPTS, [STOP], config, 0), **more)


def settings(**more) -> PpoSettings:
    return PpoSettings(
        **nested(**{
            "rollouts": 2,
            "prompts": 4,
            "answers": 4,
            "max_tokens": 4,
            "learning_rate": 1e-2,
            "critic_learning_rate": 1e-2,
            "kl_coefficient": 0.01,
            "schedule": "constant",
            "warmup_steps": 0,
            "micro_batch_tokens": 64,
            **more,
        })
    )


def test_the_score_rises():
    log = run(settings(rollouts=15, answers=8, learning_rate=2e-2), model())
    assert log[0]["score"] < 0.3
    assert log[-1]["score"] > 0.7
    assert log[-1]["kl"] > 1.0
    for row in log:
        assert all(math.isfinite(value) for value in row.values())
        assert 0 <= row["clip_fraction"] <= 1 and row["explained_variance"] <= 1


def test_the_first_update_starts_at_ratio_one():
    # One update only: the ratio is 1 for all tokens and the whitened advantages have mean 0.
    row = run(settings(rollouts=1, epochs=1, minibatches=1), model())[0]
    assert row["approximate_kl"] == 0.0  # the training pass gives the bits of the sampled log-probs
    assert row["loss"] == pytest.approx(0.0, abs=1e-5)
    assert row["clip_fraction"] == 0.0
    assert row["kl"] == pytest.approx(0.0, abs=1e-4)


def group_settings(baseline: str = "grpo", **more) -> GrpoSettings:
    given = settings(**{"answers": 8, **more}).model_dump()
    return GrpoSettings(**{name: value for name, value in given.items() if name in GrpoSettings.model_fields}, baseline=baseline)


@pytest.mark.parametrize("baseline", ["grpo", "mean", "rloo"])
def test_group_advantages_by_hand(baseline: str):
    rewards = torch.tensor([[1.0, 2.0, 3.0, 6.0], [5.0, 5.0, 5.0, 5.0]], dtype=torch.float64)
    found = o.ppo.group_advantages(rewards, baseline)
    assert found[1].tolist() == [0.0] * 4
    rest = [(sum(rewards[0]) - r) / 3 for r in rewards[0]]
    if baseline == "rloo":
        assert found[0].tolist() == pytest.approx([float(r - mean) for r, mean in zip(rewards[0], rest, strict=True)])
    elif baseline == "mean":
        assert found[0].tolist() == [-2.0, -1.0, 0.0, 3.0]
    else:  # deviations -2 -1 0 3: their squares add up to 14, over n - 1
        assert found[0].tolist() == pytest.approx([d / math.sqrt(14 / 3) for d in (-2, -1, 0, 3)], rel=1e-5)


@pytest.mark.parametrize("baseline", ["grpo", "mean", "rloo"])
def test_equal_rewards_give_no_advantage(baseline: str):
    for count, reward in itertools.product((2, 3, 7, 8, 12), (0.1, 0.3, 0.7, 1 / 3, -8.437, 12.3, 100.1)):
        assert not o.ppo.group_advantages(torch.full((2, count), reward), baseline).any(), (count, reward)
        assert not o.ppo.step_advantages([[(2, reward)]] * count, baseline).any(), (count, reward)


def test_step_advantages_by_hand():
    # All rewards of the group: 1 0 1 | 0 0, mean .4; the squared differences .36 .16 .36 .16 .16 add up to 1.2, over n - 1: .3.
    steps = [[(2, 1.0), (2, 0.0), (5, 1.0)], [(1, 0.0), (3, 0.0)]]
    up, down = 0.6, -0.4
    expected = [up + down + up] * 2 + [up] * 3 + [2 * down] + [down] * 2
    assert o.ppo.step_advantages(steps, "mean").tolist() == pytest.approx(expected, abs=1e-6)
    assert o.ppo.step_advantages(steps, "grpo").tolist() == pytest.approx([a / math.sqrt(0.3) for a in expected], rel=1e-5)
    # Answers without steps are compared as a whole.
    rewards = torch.tensor([[1.0, 0.0, 0.25]])
    alone = o.ppo.step_advantages([[(4, reward)] for reward in rewards[0].tolist()], "grpo")
    assert torch.equal(alone, o.ppo.group_advantages(rewards, "grpo")[0].repeat_interleave(4))


def test_rewards_of_steps_reach_the_tokens_before_them():
    """Compared with an independent sum over each answer's steps; the answer's own reward, minus the penalty, counts at its end."""

    def scorer(prompts, completions):
        scores = share_of_nines(prompts, completions)
        steps = [[[(k, float(c.tokens[k - 1] % 3 == 0)) for k in range(2, len(c.tokens), 2)] for c in row] for row in completions]
        return {"score": scores, "verifier": scores, "steps": steps}

    rows, seen = [], {}
    config = group_settings(rollouts=1, answers=4, max_tokens=7, kl_coefficient=0.0, unfinished_penalty=0.5).replace(credit="steps")
    train_grpo(Rollouts(model(), model(), scorer, PROMPTS, [STOP], config, seed=0, keep=lambda _, given: rows.extend(given or ())))
    for row in rows:
        seen.setdefault(tuple(row["prompt"]), []).append(row)
    for group in seen.values():
        whole = [[*row["steps"], (len(row["completion"].tokens), row["score"] - 0.5 * (not row["finished"]))] for row in group]
        flat = [reward for some in whole for _, reward in some]
        mean = sum(flat) / len(flat)
        deviation = math.sqrt(sum((reward - mean) ** 2 for reward in flat) / (len(flat) - 1)) + 1e-6
        for row, some in zip(group, whole, strict=True):
            size = len(row["completion"].tokens)
            by_token = [sum((reward - mean) / deviation for end, reward in some if end > place) for place in range(size)]
            assert row["advantage"] == pytest.approx(sum(by_token) / size, rel=1e-4, abs=1e-5)
    assert len(seen) == 4


def test_a_wider_range_above_one_lets_the_ratio_rise():
    new = torch.tensor([1.25, 1.5, 0.75, 0.7]).log()
    a = torch.tensor([1.0, 1.0, -1.0, -1.0])
    assert o.ppo.clipped_surrogate(new, a, 0.2).tolist() == pytest.approx([1.2, 1.2, -0.8, -0.8])
    assert o.ppo.clipped_surrogate(new, a, 0.2, 0.4).tolist() == pytest.approx([1.25, 1.4, -0.8, -0.8])


@pytest.mark.parametrize("baseline", ["grpo", "rloo"])
def test_the_score_rises_without_a_critic(tmp_path: Path, baseline: str):
    config = group_settings(rollouts=8, learning_rate=3e-2, baseline=baseline, epochs=2, unfinished_penalty=0.0, kl_coefficient=0.0)

    class Stop(Exception):
        pass

    def stop(row: dict) -> None:
        if row["step"] == 2:
            raise Stop

    whole, resumed = model(), model()
    log = by_group(config, whole)
    assert log[0]["score"] < 0.3 and log[-1]["score"] > 0.6 and "value_loss" not in log[0]
    assert 0 < log[0]["unequal_prompts"] <= 1
    with pytest.raises(Stop):
        by_group(config, model(), checkpoint_dir=tmp_path, on_step=stop)
    by_group(config, resumed, checkpoint_dir=tmp_path)
    assert weights_digest(resumed) == weights_digest(whole)


def test_equal_answers_teach_nothing():
    policy, before = model(), weights_digest(model())
    config = group_settings(rollouts=1, kl_coefficient=0.0, unfinished_penalty=0.0)
    (row,) = by_group(config, policy, lambda _, found: [[0.5] * len(some) for some in found])
    assert weights_digest(policy) == before and row["unequal_prompts"] == 0.0 == row["gradient_norm"]


NORMALIZERS = ({}, {"normalizer": "answers", "ratio": "sequence"}, {"normalizer": "constant", "surrogate": "cispo"})


@pytest.mark.parametrize("chosen", NORMALIZERS, ids=lambda given: given.get("normalizer", "tokens"))
def test_groups_that_teach_nothing_are_left_out_and_change_nothing(chosen: dict[str, str]):
    def scorer(prompts, completions):  # all answers to a one-token prompt have equal rewards
        return [[0.5 if len(prompt) == 1 else c.tokens[0] / 11 for c in row] for prompt, row in zip(prompts, completions, strict=True)]

    config = group_settings(rollouts=3, kl_coefficient=0.0, unfinished_penalty=0.0, minibatches=1, micro_batch_tokens=512).replace(**chosen)
    found = {}
    for weight in (0.0, 1e-12):  # with an entropy bonus, however small, every group is computed
        policy = model()
        log = by_group(config.replace(entropy_weight=weight), policy, scorer)
        found[weight] = [p.detach() for p in policy.parameters()], log
    assert all(row["tokens"] < other["tokens"] and row["unequal_prompts"] == 0.75 for row, other in zip(found[0.0][1], found[1e-12][1], strict=True))
    assert [row["loss"] for row in found[0.0][1]] == pytest.approx([row["loss"] for row in found[1e-12][1]], abs=1e-5)
    assert all(torch.allclose(a, b, atol=2e-4) for a, b in zip(found[0.0][0], found[1e-12][0], strict=True))


def test_prompts_whose_answers_earn_the_same_give_way_to_others():
    """Only [3] and [7, 8] have answers of different scores. With resampling, a rollout of four contains as many of them as were drawn."""
    asked: list[list[int]] = []

    def scorer(prompts, completions):
        asked.extend(map(list, prompts))
        return [[float(n % 2) if prompt in ([3], [7, 8]) else 1.0 for n in range(len(row))] for prompt, row in zip(prompts, completions, strict=True)]

    seen = {}
    for resample in (0, 1, 3):
        asked.clear()
        config = GrpoSettings(**nested(rollouts=1, prompts=4, answers=4, max_tokens=4, minibatches=1, unfinished_penalty=0.0, kl_coefficient=0.0, resample=resample))
        (row,) = by_group(config, model(), scorer)
        seen[resample] = len(asked), row["tokens"]
        assert row["score"] == 0.75 and row["unequal_prompts"] == 0.5
        # Only prompts that were drawn count.
        assert row["drawn_answers"] == 4 * len(asked) and row["drawn_answers"] <= row["drawn_tokens"] <= 4 * row["drawn_answers"]
    assert [count for count, _ in seen.values()] == [4, 8, 8]
    # The first rollout's update has two of the four groups, the other's four: each prompt twice.
    assert seen[1] == seen[3] and seen[1][1] > seen[0][1]


@pytest.mark.parametrize("baseline", ["grpo", "mean", "rloo"])
def test_answers_of_equal_scores_teach_no_more_than_the_kl_penalty(baseline: str):
    """The penalty minus its mean over the group (rloo: over the others), in nats times its coefficient: no division by the deviation
    enlarges it."""
    rows = []
    config = group_settings(baseline, rollouts=1, kl_coefficient=0.05, unfinished_penalty=0.0)
    scorer = lambda prompts, completions: [[1.0] * len(row) for row in completions]  # noqa: E731
    keep = lambda _, given: rows.extend(given or ())  # noqa: E731
    train_grpo(Rollouts(model(), model(seed=3), scorer, PROMPTS, [STOP], config, seed=0, keep=keep))
    groups: dict[tuple[int, ...], list] = {}
    for row in rows:
        groups.setdefault(tuple(row["prompt"]), []).append(row)
    assert len(groups) == 4
    for group in groups.values():
        kl = [(row["logprob"] - row["reference_logprob"]) * len(row["completion"].tokens) for row in group]
        factor = 0.05 * (8 / 7 if baseline == "rloo" else 1)
        assert [row["advantage"] for row in group] == pytest.approx([-factor * (one - sum(kl) / 8) for one in kl], rel=1e-3, abs=1e-6)


def test_a_first_rollout_of_equal_scores_does_not_blow_up_later_rewards():
    """At first all answers are wrong; a later right answer has reward 1, not 1 divided by a tiny deviation."""
    seen = []

    def scorer(prompts, completions):
        seen.append(None)
        return [[float(len(seen) > 1 and n == 0) for n in range(len(row))] for row in completions]

    log = run(settings(rollouts=2, kl_coefficient=0.0), model(), scorer)
    assert log[0]["score"] == 0 and log[1]["score"] > 0 and all(row["value_error"] < 5 and row["value_loss"] < 5 for row in log)


def test_a_large_kl_coefficient_holds_the_policy():
    free, held = (run(settings(rollouts=10, kl_coefficient=k), model())[-1]["kl"] for k in (0.0, 5.0))
    assert abs(held) < 0.3 * free


def test_without_a_penalty_the_reference_is_computed_in_few_rollouts_only():
    config = group_settings(rollouts=20, prompts=1, minibatches=1, answers=4, unfinished_penalty=0.0)
    reference, seen, logs = model(seed=3), [], []
    compute = reference.token_logprobs
    reference.token_logprobs = lambda *given, **more: seen.append(1) or compute(*given, **more)

    for coefficient in (0.0, 1e-30):
        changed = config.replace(kl_coefficient=coefficient)
        logs.append(by_group(changed, model(), reference=reference))
    measured = [row["step"] for row in logs[0] if "kl" in row]
    assert measured == [*range(1, 20, 2), 20] and len(seen) == len(measured) + 20
    # A penalty that rounds to nothing gives the same policy, and the same divergence in rollouts where both measure it.
    for free, held in zip(*logs, strict=True):
        assert free["loss"] == pytest.approx(held["loss"], abs=1e-9) and free.get("kl", held["kl"]) == held["kl"]


@pytest.mark.parametrize("stop_after", [1, 2, 3])
def test_resuming_ends_with_the_same_bits(tmp_path: Path, stop_after: int):
    config = settings(rollouts=4)

    class Stop(Exception):
        pass

    def stop(row: dict) -> None:
        if row["step"] == stop_after:
            raise Stop

    whole, whole_critic = model(), model("scalar", 1)
    expected = run(config, whole, critic=whole_critic)
    with pytest.raises(Stop):
        run(config, model(), checkpoint_dir=tmp_path, on_step=stop)
    resumed, critic = model(), model("scalar", 1)
    log = run(config, resumed, critic=critic, checkpoint_dir=tmp_path)
    assert weights_digest(resumed) == weights_digest(whole)
    assert weights_digest(critic) == weights_digest(whole_critic)
    for row in log + expected:
        del row["seconds"]
    assert log == expected
    with pytest.raises(ValueError, match="another run"):
        run(settings(rollouts=5), model(), checkpoint_dir=tmp_path)


def test_the_reward_models_scores_do_not_depend_on_the_rows():
    made = model("scalar", 2)
    config = settings(rollouts=1)
    seen = {}

    def keep(prompts, completions):
        seen["asked"] = (prompts, completions)
        scores = reward_model_scorer(made, micro_batch_tokens=24)(prompts, completions)
        seen["scores"] = scores
        return scores

    run(config, model(), scorer=keep)
    prompts, completions = seen["asked"]
    for prompt, row, scores in zip(prompts, completions, seen["scores"], strict=True):
        for completion, score in zip(row, scores, strict=True):
            alone = o.Targets.from_answers([prompt], [[completion.tokens]])
            assert score == pytest.approx(o.answer_rewards(made, alone).item(), abs=1e-5)


def test_equal_answers_have_equal_rewards():
    """Rounding depends on an answer's place in its row, and a group's deviation would magnify the differences."""
    wide = Transformer(CONFIG.replace(hidden_size=160, num_attention_heads=8), "scalar", seed=0)
    torch.nn.init.normal_(wide.score.weight, generator=torch.Generator().manual_seed(1))
    score, random = reward_model_scorer(wide), np.random.default_rng(0)
    for size in range(1, 12):
        prompt, answer, other = (random.integers(1, 12, size + extra).tolist() for extra in (20, 0, 0))
        rows = [[Completion(one, [0.0] * size, True) for one in (answer, other, answer, answer, answer, other)]] * 2
        for rewards in score([prompt, prompt[:3]], rows):
            assert len(set(rewards)) <= 2 and rewards[0] == rewards[2] == rewards[3] == rewards[4] and rewards[1] == rewards[5]


@pytest.mark.parametrize("wrong", [{"rollouts": 0}, {"minibatches": 9}, {"lam": 1.5}, {"kl_coefficient": -1.0}])
def test_a_wrong_configuration_is_refused(wrong: dict):
    with pytest.raises(ValueError, match=next(iter(wrong)).replace("minibatches", "minibatch")):
        settings(**wrong)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"ratio": "sequence"}, "ratio sequence weighs whole answers: set normalizer to answers"),
        ({"ratio": "sequence", "normalizer": "answers", "surrogate": "cispo"}, "surrogate to clipped"),
        ({"credit": "steps", "baseline": "rloo"}, "set ratio to token, and baseline to grpo or mean"),
    ],
)
def test_losses_that_exclude_each_other_are_refused(wrong: dict, message: str):
    with pytest.raises(ValueError, match=message):
        GrpoSettings(**wrong)


@pytest.mark.parametrize(("name", "value"), [("spike_window", 8), ("spike_limit", 3.0), ("max_skipped", 2)])
def test_settings_of_skipped_steps_that_rollouts_do_not_have_are_refused(name: str, value: float):
    for kind in (PpoSettings, GrpoSettings):
        with pytest.raises(ValueError, match=rf"optimizer\.{name} {value} has no effect: rollouts have no spike detection"):
            kind(optimizer={name: value})
        assert kind(optimizer={"max_skipped": 5, "spike_window": 0}).optimizer.spike_limit == 10


OTHER: dict[str, Any] = {
    "rollouts": 3, "prompts": 3, "answers": 6, "epochs": 3, "minibatches": 1, "schedule": {"learning_rate": 0.02}, "optimizer": {"beta2": 0.9},
    "clip": 0.07, "entropy_weight": 0.1, "kl_coefficient": 0.5, "temperature": 1.5, "max_tokens": 3, "unfinished_penalty": 0.2, "max_stale": 1,
    "importance_cap": 1.5, "gpu_memory": 0.3, "critic_learning_rate": 0.02, "value_clip": 0.01, "gamma": 0.5, "lam": 0.5,
    "normalize_rewards": False, "baseline": "rloo", "credit": "steps", "surrogate": "cispo", "ratio": "sequence", "normalizer": "constant",
    "clip_high": 0.04, "resample": 2,
}  # fmt: skip
"""Setting -> another value than those of `VARIANTS`. A new setting must have one, or be named in `ELSEWHERE`."""
ELSEWHERE = {"compute", "generate", "generate_tensor", "engine", "turns"}
"""Settings of speed, or of what this test has not: several processes, vLLM, environments."""
SAMPLING = {"rollouts", "prompts", "answers", "epochs", "minibatches", "schedule", "optimizer", "max_tokens", "max_stale", "resample"}
"""Settings that are tried with one loss only, since no loss reads them."""
VARIANTS: dict[str, dict[str, Any]] = {
    "ppo": {}, "grpo": {}, "cispo": {"surrogate": "cispo", "clip": 0.2},
    "cispo_high": {"surrogate": "cispo", "clip": 0.2, "clip_high": 0.02},
    "gspo": {"ratio": "sequence", "normalizer": "answers", "clip": 0.01}, "steps": {"credit": "steps"},
}  # fmt: skip


@pytest.mark.parametrize("variant", VARIANTS)
def test_each_setting_changes_the_weights_or_is_refused(variant: str):
    kind = PpoSettings if variant == "ppo" else GrpoSettings

    def scorer(prompts, completions):  # prompts of one token have equal rewards, so that `resample` draws others
        scores = [[0.5 if len(prompt) == 1 else c.tokens[0] / 11 for c in row] for prompt, row in zip(prompts, completions, strict=True)]
        steps = [[[(1, float(len(prompt) > 1 and c.tokens[0] > 5))] for c in row] for prompt, row in zip(prompts, completions, strict=True)]
        return {"score": scores, "steps": steps}

    def digest(values: dict[str, Any]) -> str:
        given = {"rollouts": 2, "prompts": 4, "answers": 4, "max_tokens": 4, "epochs": 2, "minibatches": 2, "clip": 0.05, "unfinished_penalty": 0.0}
        given |= {"schedule": {"learning_rate": 3e-2, "warmup_steps": 0, "shape": "constant"}, "compute": {"micro_batch_tokens": 64}}
        given |= {"value_clip": 0.05} if kind is PpoSettings else {}
        policy, config = model(), kind(**given | VARIANTS[variant] | values)
        (run if kind is PpoSettings else by_group)(config, policy, scorer)
        return weights_digest(policy)

    plain, refused = digest({}), set()
    for name in kind.model_fields.keys() - ELSEWHERE - (set() if variant in ("ppo", "grpo") else SAMPLING):
        if OTHER[name] != VARIANTS[variant].get(name):
            try:
                assert digest({name: OTHER[name]}) != plain, f"{name}={OTHER[name]} changes nothing and is not refused"
            except ValueError as error:
                assert name in str(error)
                refused.add(name)
    also = {"ppo": set(), "gspo": {"normalizer", "surrogate", "credit"}, "steps": {"baseline", "ratio"}, "cispo_high": {"ratio", "clip"}}
    assert refused == {"importance_cap", "gpu_memory"} | also.get(variant, {"ratio"})


@pytest.mark.parametrize("who", ["policy", "critic"])
def test_a_model_that_computed_in_bf16_gets_its_fp32_weights_back(who: str):
    config = settings(precision="bf16", activation_checkpointing=True)
    trained = {"policy": model(), "critic": model("scalar", 1)}
    run(config, trained["policy"], critic=trained["critic"])
    weights = [p.detach() for p in trained[who].parameters()]
    assert all(w.dtype == torch.float32 for w in weights)
    assert any(not torch.equal(w, w.bfloat16().float()) for w in weights)
    assert not trained[who].model.checkpointing
