"""Gold answers as training data: what the first fine-tuning round learns from."""

from __future__ import annotations

from pydantic import Field

from puna.stages.align.prompts import identifier
from puna.stages.contract import Prompts, StageConfig, StageRun, stage
from puna.storage import PunaError


class InstructionsConfig(StageConfig):
    """What the rows are called."""

    source: str = Field("gold", min_length=1, description="Name of the source in the instructions table")


@stage(kind="instructions")
def instructions(prompts: Prompts, config: InstructionsConfig, run: StageRun) -> None:
    """Training prompts with their reference answers, in place of human annotators' demonstrations.

    Held-out prompts are left out.
    """
    rows = [
        {
            "id": identifier(config.source, row["id"]),
            "prompt_id": row["id"],
            "task": row["task"],
            "prompt": row["prompt"],
            "response": row["reference"],
            "source": config.source,
            "score": None,
        }
        for row in prompts.read().to_pylist()
        if row["split"] == "train"
    ]
    if not rows:
        raise PunaError(f"instructions: {prompts.id} has no training prompts; ask for some with prompts.train")
    run.write_rows(rows)
    run.metric("instructions", len(rows))
