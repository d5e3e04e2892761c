"""Objectives: each a pure function of log-probs (or rewards, values) and a thin class around it."""

from puna.models.training.objectives.base import Objective, Targets, sum_segments, target_logprobs
from puna.models.training.objectives.dpo import Dpo, DpoBatch, reference_logprobs
from puna.models.training.objectives.kto import Kto, KtoBatch
from puna.models.training.objectives.likelihood import Distill, LanguageModeling, Sft, divergence, language_modeling_loss, sft_loss
from puna.models.training.objectives.ppo import (
    Ppo,
    PpoBatch,
    Value,
    group_advantages,
    ppo_policy_loss,
    ppo_value_loss,
    token_values,
    whiten,
)
from puna.models.training.objectives.reward import (
    Reward,
    RewardBatch,
    answer_rewards,
    ranked_pairs,
    reward_loss,
)

__all__ = [
    "Distill",
    "Dpo",
    "DpoBatch",
    "Kto",
    "KtoBatch",
    "LanguageModeling",
    "Objective",
    "Ppo",
    "PpoBatch",
    "Reward",
    "RewardBatch",
    "Sft",
    "Targets",
    "Value",
    "answer_rewards",
    "divergence",
    "group_advantages",
    "language_modeling_loss",
    "ppo_policy_loss",
    "ppo_value_loss",
    "ranked_pairs",
    "reference_logprobs",
    "reward_loss",
    "sft_loss",
    "sum_segments",
    "target_logprobs",
    "token_values",
    "whiten",
]
