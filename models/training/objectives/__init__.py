"""Objectives: each a pure function of log-probs (or rewards, values) and a thin class around it."""

from puna.models.training.objectives.base import Batch, Objective, Targets
from puna.models.training.objectives.dpo import Dpo, DpoBatch, Kto, KtoBatch, reference_logprobs
from puna.models.training.objectives.likelihood import Distill, LanguageModeling, Sft
from puna.models.training.objectives.ppo import Ppo, PpoBatch, Value
from puna.models.training.objectives.reward import Reward, RewardBatch, answer_rewards

__all__ = [
    "Batch", "Distill", "Dpo", "DpoBatch", "Kto", "KtoBatch", "LanguageModeling", "Objective", "Ppo", "PpoBatch", "Reward", "RewardBatch",
    "Sft", "Targets", "Value", "answer_rewards", "reference_logprobs",
]  # fmt: skip
