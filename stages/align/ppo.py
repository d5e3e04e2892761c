"""Proximal policy optimization of a policy against a reward model, verifiers or both."""

from __future__ import annotations

import copy

from pydantic import Field

from puna.models.training.settings import PpoSettings
from puna.stages.align.rewards import REWARDS, Reward, rewards_of
from puna.stages.contract import Facts, Model, Prompts, SeededConfig, StageRun, stage
from puna.stages.conversations import prompt_ids
from puna.stages.training.bad_rows import BadRows, BadRowsConfig, Limit
from puna.stages.training.needs import chat_template, one_tokenizer, trained
from puna.stages.training.train import check_one_tokenizer, divergence_named, load_model, save_model, write_log
from puna.stages.verifiers.scoring import Scorer, verifiers_named
from puna.stages.verifiers.settings import ScoringConfig
from puna.storage import PunaError


class PpoConfig(PpoSettings, BadRowsConfig, SeededConfig):
    """How the policy is optimized, and what for."""

    reward: Reward = Field("reward_model", description=REWARDS)
    scoring: ScoringConfig = Field(ScoringConfig(), description="Limits within which the prompts' verifiers score the answers")


def needs(config: PpoConfig, facts: Facts) -> list[str]:
    """A chat template, one tokenizer for policy and reward model, and memory."""
    return [*chat_template(facts, "policy"), *one_tokenizer(facts, "policy", "reward_model"), *trained(facts, "policy")]


@stage(kind="model", device=True, needs=needs, named=verifiers_named)
def ppo(
    policy: Model, reward_model: Model | None, prompts: Prompts, judges: list[Model] | None, config: PpoConfig, run: StageRun
) -> None:
    """PPO with a frozen reference, the starting policy (Schulman et al. 2017; Ziegler et al. 2019).

    The reward is a frozen reward model's number, the score of each prompt's verifier, or their product; see `reward`. The critic
    starts as the reward model, without one as the policy with a head of zeros. `judges` are models that verifiers name. An
    answer whose verifier fails has the score 0 and is counted in the metric `unscored_answers`. Prompts that the chat template refuses, and
    those that with their answers may be longer than a row, are in `dropped`; see `bad_rows`.
    """
    from puna.models.training.ppo import train_ppo

    if reward_model is None and config.reward != "verifier":
        raise PunaError(f"ppo: reward={config.reward} needs a reward_model; give one, or set reward=verifier")
    if reward_model is not None:
        check_one_tokenizer([policy, reward_model], "ppo: the reward model reads the policy's tokens")
    model, tokenizer = load_model(policy, "lm")
    critic, _ = load_model(policy, "scalar", new=True) if reward_model is None else load_model(reward_model, "scalar")
    rows = [row for row in prompts.read().to_pylist() if row["split"] == "train"]
    what = f"the prompt with {config.answers} answers of max_tokens={config.max_tokens}"
    limit = Limit(config.compute.micro_batch_tokens, "compute.micro_batch_tokens", what)
    bad = BadRows(config, "ppo")
    answers = config.answers * config.max_tokens
    rendered = bad.examples(rows, lambda row: prompt_ids(tokenizer, row), lambda ids: len(ids) + answers, limit)
    if rows:
        bad.check_left(len(rendered), f"{len(rows)} training prompts")
    if len(rendered) < config.prompts:
        left = f"{len(rows)} training prompts" + (f", {len(bad.dropped)} of them dropped" if bad.dropped else "")
        raise PunaError(f"ppo: a rollout takes {config.prompts} prompts, but {prompts.id} has {left}")
    bad.write(run)
    rows, asked = [row for row, _ in rendered], [ids for _, ids in rendered]
    scorer = None if config.reward == "reward_model" else Scorer(rows, config.scoring, run, judges or (), needed="ppo")
    frozen = None if config.reward == "verifier" else copy.deepcopy(critic).requires_grad_(False)
    rewards = rewards_of(scorer, frozen, rows, asked, tokenizer, config.compute.micro_batch_tokens)
    with divergence_named(run.stage):
        log = train_ppo(
            model,
            copy.deepcopy(model).requires_grad_(False),
            rewards,
            critic,
            asked,
            tokenizer.stop_ids,
            config,
            run.seed("loop"),
            checkpoint_dir=run.scratch / "training",
            on_step=lambda row: run.progress(row["step"], config.rollouts, f"reward {row['score']:.3f}"),
        )
    if scorer is not None:
        scorer.report()
    write_log(log, run)
    for name in ("score", "kl", "entropy", "explained_variance"):
        run.metric(f"first_{name}", log[0][name])
        run.metric(f"final_{name}", log[-1][name])
    save_model(model, tokenizer, run.folder)
