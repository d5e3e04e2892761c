"""Gold answers as training data: what the first fine-tuning round learns from."""

from __future__ import annotations

from pydantic import Field

from puna.stages.contract import Prompts, StageConfig, StageRun, stage
from puna.stages.conversations import dump, messages_of
from puna.stages.draws import identifier
from puna.storage import PunaError


class InstructionsConfig(StageConfig):
    """What the rows are called."""

    source: str = Field("gold", min_length=1, description="Name of the source in the instructions table")


@stage(kind="instructions")
def instructions(prompts: Prompts, config: InstructionsConfig, run: StageRun) -> None:
    """Training prompts with their reference answers, in place of human annotators' demonstrations.

    Held-out prompts are left out. PunaError where a prompt has no reference.
    """
    asked = [row for row in prompts.read().to_pylist() if row["split"] == "train"]
    if bare := [row["id"] for row in asked if row["reference"] is None]:
        raise PunaError(f"instructions: {len(bare)} of {len(asked)} training prompts have no reference to learn, for example {bare[0]}")
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
        for row in asked
    ]
    if not rows:
        raise PunaError(f"instructions: {prompts.id} has no training prompts; ask for some with prompts.train")
    run.write_rows(rows)
    run.metric("instructions", len(rows))
