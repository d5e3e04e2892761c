"""Prompts to be answered, in the field's layouts."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from puna.stages.contract import External, StageRun, stage
from puna.stages.io.importing import SplitConfig, import_rows


class ImportPromptsConfig(SplitConfig):
    """How files become prompts."""

    layout: Literal["auto", "messages", "prompt", "instruction"] = Field(
        "auto", description="Layout of the rows; auto looks for one and stops where several fit"
    )


@stage(kind="prompts")
def import_prompts(inputs: list[External], config: ImportPromptsConfig, run: StageRun) -> None:
    """Prompts to be answered: conversations, questions or instructions, with a reference answer and a verifier where there is one.

    Of a conversation that ends in an answer, that answer is the reference.

    `examples` shows each input's layout, why it was taken, the columns and a row; `dropped` names every row that could not be
    taken, with file, row, field and reason. Rows that are there twice are kept once.
    """
    import_rows("prompts", config.layout, inputs, config, run)
