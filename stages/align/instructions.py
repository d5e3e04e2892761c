"""Training data from answers: reference answers for the first finetuning, chosen answers for a round's finetuning."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import Field

from puna.stages.contract import Preferences, Prompts, StageConfig, StageRun, stage
from puna.stages.conversations import Level, as_text, dump, message_of, messages_of
from puna.stages.draws import identifier
from puna.stages.training.rankings import check_splits, read_preferences
from puna.stages.training.settings import CLEAR
from puna.storage import PunaError

Row = dict[str, Any]


def instruction(name: str, prompt_id: str, prompt: Row, answer: Mapping[str, Any], source: str, score: float | None = None) -> Row:
    """Return a training row of the instructions table: the messages of a prompt, then the assistant's message `answer`."""
    messages = dump([*messages_of(prompt), dict(answer)])
    row = {"id": name, "prompt_id": prompt_id, "task": prompt["task"], "split": "train", "messages": messages, "tools": prompt["tools"]}
    return {**row, "source": source, "score": score}


def answer_message(text: str) -> Row:
    return {"role": "assistant", "content": text}


class ChosenConfig(StageConfig):
    """Levels of the preferences to use, and the name of the source."""

    levels: tuple[Level, ...] = Field(CLEAR, min_length=1, description="Preference levels whose better answers are taken")
    source: str = Field("chosen", min_length=1, description="Name of the source in the instructions table")


@stage(kind="instructions")
def chosen(preferences: list[Preferences], config: ChosenConfig, run: StageRun) -> None:
    """Take the better answer, or its edited version, of training preferences with one of `levels` or no level; equal answers once."""
    check_splits(preferences)
    rows = {}
    for row in read_preferences(preferences, config.levels):
        best = message_of(row, "edited") or message_of(row, "chosen")
        if row["split"] == "train" and best is not None:
            name = identifier(config.source, row["prompt_id"], dump(best))
            rows[name] = instruction(name, row["prompt_id"], row, best, config.source)
    if not rows:
        raise PunaError(f"chosen: no training preference of the levels {', '.join(config.levels)} has a better answer")
    run.write_rows(list(rows.values()))
    run.metric("instructions", len(rows))


class InstructionsConfig(StageConfig):
    """The name of the source of the instructions."""

    source: str = Field("gold", min_length=1, description="Name of the source in the instructions table")


@stage(kind="instructions")
def instructions(prompts: Prompts, config: InstructionsConfig, run: StageRun) -> None:
    """Pair training prompts with their reference answers, in place of human annotators' demonstrations.

    Held-out prompts are left out; training prompts without a reference are in `dropped`. Raise PunaError if none has a reference.
    """
    questions = [row for row in prompts.read().to_pylist() if row["split"] == "train"]
    if not questions:
        raise PunaError(f"instructions: {prompts.id} has no training prompts; ask for some with prompts.train")
    answered = [row for row in questions if row["reference"] is not None]
    if not answered:
        raise PunaError(f"instructions: the {len(questions)} training prompts of {prompts.id} have no reference to learn")
    names = {row["id"]: identifier(config.source, row["id"]) for row in answered}
    run.write_rows([instruction(names[row["id"]], row["id"], row, answer_message(row["reference"]), config.source) for row in answered])
    bare = [row for row in questions if row["reference"] is None]
    run.count_input(len(questions))
    run.write_rows(
        [{"id": row["id"], "rule": "no_reference", "value": None, "threshold": None, "detail": as_text(messages_of(row))} for row in bare],
        "dropped",
    )
    run.metric("instructions", len(answered))
