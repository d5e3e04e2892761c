"""Prompts to be answered, in the field's layouts."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from puna.stages.contract import External, StageRun, stage
from puna.stages.io.importing import HELDOUT, PromptRowsConfig, import_rows


class ImportPromptsConfig(PromptRowsConfig):
    """How files become prompts."""

    layout: Literal["auto", "messages", "prompt", "instruction"] = Field(
        "auto", description="Layout of the rows; auto looks for one and stops where several fit"
    )
    heldout_fraction: float = Field(0.1, ge=0, lt=1, description=HELDOUT)


@stage(kind="prompts")
def import_prompts(inputs: list[External], config: ImportPromptsConfig, run: StageRun) -> None:
    """Import prompts to be answered: conversations, questions or instructions, with a reference answer and a verifier where there is one.

    Of a conversation that ends in an answer, that answer is the reference.

    `examples` shows each input's layout, why it was taken, the columns and a row; `dropped` names every row that could not be
    taken, with file, row, field and reason; a verifier of a row may name code only in modules that `--module` or an installed plugin
    names. Rows that are there twice are kept once. A tenth of the prompts is held out by default.
    """
    import_rows("prompts", config.layout, inputs, config, run)
