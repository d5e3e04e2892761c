"""Tasks of reasoning-gym for a small chat model: generators to train on, and tests by other ranges and by generators that trained nothing.

`SCREENED` are the generators whose answers by the model without training are measured. SmolLM2-135M-Instruct answers a tenth of the questions
of none of them by the scorers' measure, so the choice of the trained ones is by their short answers alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from puna.stages.prompts.lookups import answers_without_model
from puna.stages.prompts.prompts import PromptsConfig, Task

SEED = 541
TOKENS = 32
QUESTIONS = 30
"""Held-out questions per generator."""
GOLD = 200
"""Training questions per generator whose gold answers the baselines without a model use."""
SCREENED: dict[str, dict[str, Any]] = {
    "basic_arithmetic": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
    "chain_sum": {"min_terms": 2, "max_terms": 2, "min_digits": 2, "max_digits": 2},
    "leg_counting": {"min_animals": 1, "max_animals": 1, "min_instances": 1, "max_instances": 9},
    "needle_haystack": {"min_num_statements": 3, "max_num_statements": 5},
    "family_relationships": {"min_family_size": 4, "max_family_size": 5},
    "syllogism": {},
    "number_filtering": {"min_numbers": 3, "max_numbers": 3, "min_decimals": 0, "max_decimals": 0},
    "spell_backward": {"min_word_len": 3, "max_word_len": 3},
    "simple_equations": {"min_terms": 2, "max_terms": 2, "min_value": 1, "max_value": 9},
    "gcd": {"min_value": 1, "max_value": 30},
    "calendar_arithmetic": {"tasks": ["is_leap_year"]},
}

TRAINED = {name: SCREENED[name] for name in ("needle_haystack", "leg_counting")}
RANGES: dict[str, dict[str, Any]] = {
    "needle_haystack": {"min_num_statements": 8, "max_num_statements": 12},
    "leg_counting": {"min_animals": 1, "max_animals": 1, "min_instances": 10, "max_instances": 20},
}
UNSEEN = {name: SCREENED[name] for name in ("family_relationships", "basic_arithmetic")}


def screened() -> PromptsConfig:
    """Return the questions to screen the generators, with gold answers for the baselines."""
    return config(SCREENED, GOLD, QUESTIONS)


def config(generators: dict[str, dict[str, Any]], train: int, heldout: int, skip: int = 0) -> PromptsConfig:
    tasks = tuple(Task(task=name, parameters=parameters) for name, parameters in generators.items())
    return PromptsConfig(tasks=tasks, train=train, heldout=heldout, skip=skip, seed=SEED)


def without_model(gold: Sequence[dict[str, Any]], questions: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Return baseline → share of right answers to the questions; the baselines know the reference answers of the rows `gold`."""
    rows = [*({**row, "split": "train"} for row in gold), *({**row, "split": "heldout"} for row in questions)]
    return {name: sum(right.values()) / len(right) for name, right in answers_without_model(rows, trusted=True).items()}


def training(count: int, seed: int) -> PromptsConfig:
    """Return `count` training questions of the trained generators; each seed has its own. Seed 0: those whose gold answers baselines use."""
    each = -(-count // len(TRAINED))
    return config(TRAINED, each, 0, skip=(seed % 1000) * 64 if seed else 0)


def tests() -> dict[str, PromptsConfig]:
    """Return test → its held-out questions."""
    return {name: config(some, 0, QUESTIONS) for name, some in (("trained", TRAINED), ("ranges", RANGES), ("unseen", UNSEEN))}
