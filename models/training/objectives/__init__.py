"""Objectives: each a pure function of log-probs (or rewards, values) and a thin class around it."""

from puna.models.training.objectives.base import Batch, Objective, Targets, sum_segments, target_logprobs
from puna.models.training.objectives.dpo import Dpo, DpoBatch, Kto, KtoBatch, reference_logprobs
from puna.models.training.objectives.likelihood import Distill, LanguageModeling, Sft, divergence
from puna.models.training.objectives.ppo import (
    Ppo,
    PpoBatch,
    Value,
    cispo_surrogate,
    clipped_surrogate,
    group_advantages,
    importance_weights,
    ppo_value_loss,
    step_advantages,
    token_values,
    whiten,
)  # fmt: skip
from puna.models.training.objectives.reward import Reward, RewardBatch, answer_rewards, ranked_pairs, reward_loss

__all__ = [
    "Batch", "Distill", "Dpo", "DpoBatch", "Kto", "KtoBatch", "LanguageModeling", "Objective", "Ppo", "PpoBatch", "Reward", "RewardBatch",
    "Sft", "Targets", "Value", "answer_rewards", "cispo_surrogate", "clipped_surrogate", "divergence", "group_advantages",
    "importance_weights", "ppo_value_loss", "ranked_pairs", "reference_logprobs", "reward_loss", "step_advantages", "sum_segments",
    "target_logprobs", "token_values", "whiten",
]  # fmt: skip
