"""Gold answers as training data: what the first fine-tuning round learns from."""

from __future__ import annotations

from pydantic import Field

from puna.stages.contract import Prompts, StageConfig, StageRun, stage
from puna.stages.conversations import dump, messages_of, shown
from puna.stages.draws import identifier
from puna.storage import PunaError


class InstructionsConfig(StageConfig):
    """What the rows are called."""

    source: str = Field("gold", min_length=1, description="Name of the source in the instructions table")


@stage(kind="instructions")
def instructions(prompts: Prompts, config: InstructionsConfig, run: StageRun) -> None:
    """Pair training prompts with their reference answers, in place of human annotators' demonstrations.

    Held-out prompts are left out; those without a reference are in `dropped`. PunaError where none has one.
    """
    asked = [row for row in prompts.read().to_pylist() if row["split"] == "train"]
    if not asked:
        raise PunaError(f"instructions: {prompts.id} has no training prompts; ask for some with prompts.train")
    answered = [row for row in asked if row["reference"] is not None]
    if not answered:
        raise PunaError(f"instructions: the {len(asked)} training prompts of {prompts.id} have no reference to learn")
    rows = [
        {
            "id": identifier(config.source, row["id"]),
            "prompt_id": row["id"],
            "task": row["task"],
            "split": "train",
            "messages": dump([*messages_of(row), {"role": "assistant", "content": row["reference"]}]),
            "tools": row["tools"],
            "source": config.source,
            "score": None,
        }
        for row in answered
    ]
    run.write_rows(rows)
    bare = [row for row in asked if row["reference"] is None]
    run.count_input(len(asked))
    run.write_rows(
        [{"id": row["id"], "rule": "no_reference", "value": None, "threshold": None, "detail": shown(messages_of(row))} for row in bare],
        "dropped",
    )
    run.metric("instructions", len(answered))
