"""Chosen answers as training data: what the finetuning of a round learns of its preferences."""

from __future__ import annotations

from pydantic import Field

from puna.stages.contract import Preferences, StageConfig, StageRun, stage
from puna.stages.conversations import Level, dump, message_of, messages_of
from puna.stages.draws import identifier
from puna.stages.training.settings import CLEAR
from puna.storage import PunaError


class ChosenConfig(StageConfig):
    """Which preferences, and what the rows are called."""

    levels: tuple[Level, ...] = Field(CLEAR, min_length=1, description="Preference levels whose better answers are taken")
    source: str = Field("chosen", min_length=1, description="Name of the source in the instructions table")


@stage(kind="instructions")
def chosen(preferences: list[Preferences], config: ChosenConfig, run: StageRun) -> None:
    """Take the better answer of each training preference, edited where there is an edit; an answer stands once for a prompt."""
    rows = {}
    for artifact in preferences:
        for row in artifact.read().to_pylist():
            best = message_of(row, "edited") or message_of(row, "chosen")
            if row["split"] != "train" or best is None or (row["level"] is not None and row["level"] not in config.levels):
                continue
            name = identifier(config.source, row["prompt_id"], dump(best))
            rows[name] = {
                "id": name,
                "prompt_id": row["prompt_id"],
                "task": row["task"],
                "split": "train",
                "messages": dump([*messages_of(row), best]),
                "tools": row["tools"],
                "source": config.source,
                "score": None,
            }
    if not rows:
        raise PunaError(f"chosen: no training preference of the levels {', '.join(config.levels)} has a better answer")
    run.write_rows(list(rows.values()))
    run.metric("instructions", len(rows))
