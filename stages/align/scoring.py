"""The verifiable scorer: reasoning-gym's own, for the question an entry was made from."""

from __future__ import annotations

import json
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from puna.storage import PunaError

if TYPE_CHECKING:
    from reasoning_gym.dataset import ProceduralDataset

CORRECT = 1.0 - 1e-6
"""An answer counts as correct from this score on; scorers give part marks below it."""


def score(task: str, answer: str, entry: str) -> float:
    """Gold score of an answer, 0 to 1.

    `task` is the prompt's task, for messages, and `entry` the JSON that `prompts` wrote for the question. Blanks
    around the answer do not count. PunaError when the entry is not of its making.
    """
    try:
        record: dict[str, Any] = json.loads(entry)
        name, parameters, question = record["generator"], record["parameters"], record["entry"]
    except (ValueError, KeyError, TypeError) as error:
        raise PunaError(f"task {task}: the scorer's entry is not what `prompts` writes: {entry[:80]!r}") from error
    dataset = generator(name, json.dumps(parameters, sort_keys=True))
    return float(dataset.score_answer(answer.strip(), question))


def is_correct(gold: float) -> bool:
    """Whether a gold score means a right answer."""
    return gold >= CORRECT


@lru_cache(maxsize=256)
def generator(task: str, parameters: str, seed: int = 0, size: int = 1) -> ProceduralDataset:
    """reasoning-gym's generator `task` with its parameters (JSON), which entry i draws from `seed + i`.

    PunaError names a task or parameter that reasoning-gym does not know.
    """
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    if task not in DATASETS:
        close = [name for name in sorted(DATASETS) if task.split("_")[0] in name]
        raise PunaError(f"task {task!r}: reasoning-gym has no such generator" + (f"; close: {', '.join(close)}" if close else ""))
    values = json.loads(parameters)
    known = set(DATASETS[task][1].__dataclass_fields__) - {"seed", "size"}
    if unknown := sorted(set(values) - known):
        raise PunaError(f"task {task}: no parameter {unknown[0]!r}; it has {', '.join(sorted(known))}")
    try:
        return reasoning_gym.create_dataset(task, **values, seed=seed, size=size)
    except (AssertionError, TypeError, ValueError) as error:
        raise PunaError(f"task {task}: its parameters {parameters} are refused: {error}") from error
