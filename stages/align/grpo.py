"""Policy optimization without a critic (GRPO, RLOO) against verifiers, a reward model or both."""

from __future__ import annotations

from pydantic import Field

from puna.models.training.settings import GrpoSettings
from puna.stages.contract import Model, Prompts, StageRun, stage
from puna.stages.training.rewards import REWARDS, Reward
from puna.stages.training.rollouts import RolloutsConfig, needs, optimize
from puna.stages.verifiers.scoring import verifiers_named


class GrpoConfig(GrpoSettings, RolloutsConfig):
    """Settings of the optimization."""

    reward: Reward = Field("verifier", description=REWARDS)


@stage(kind="model", device=True, needs=needs, named=verifiers_named)
def grpo(
    policy: Model, reward_model: list[Model] | None, prompts: Prompts, judges: list[Model] | None, config: GrpoConfig, run: StageRun
) -> None:
    """Train by comparing each answer with the others to its prompt: GRPO (Shao et al. 2024) or RLOO (Ahmadian et al. 2024), see `baseline`.

    The loss is PPO's clipped surrogate, a mean over the tokens of an update (as DAPO has it); the KL divergence to the starting
    policy is taken off the reward of the answer. Rewards, `judges` and dropped prompts are those of `ppo`. Prompts whose answers
    all have one reward teach nothing: the log's `unequal_prompts` is the share of the others.
    """
    from puna.models.training.ppo import train_grpo

    optimize(policy, reward_model or (), prompts, judges or (), config, run, train_grpo, critic=False)
