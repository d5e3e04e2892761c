"""Conversations to learn from, in the field's layouts."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from puna.stages.contract import External, StageRun, stage
from puna.stages.io.importing import SplitConfig, import_rows


class ImportInstructionsConfig(SplitConfig):
    """How files become instructions."""

    layout: Literal["auto", "messages", "prompt_completion", "instruction_output"] = Field(
        "auto", description="Layout of the rows; auto looks for one and stops where several fit"
    )


@stage(kind="instructions")
def import_instructions(inputs: list[External], config: ImportInstructionsConfig, run: StageRun) -> None:
    """Import conversations to learn from: messages (role and content, or from and value), prompt and completion, or instruction and output.

    `examples` shows each input's layout, why it was taken, the columns and a row; `dropped` names every row that could not be
    taken, with file, row, field and reason. Rows that are there twice are kept once.
    """
    import_rows("instructions", config.layout, inputs, config, run)
