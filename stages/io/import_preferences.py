"""Preferences between answers, in the field's layouts."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from puna.stages.contract import External, StageRun, stage
from puna.stages.io.importing import HELDOUT, SplitConfig, import_rows


class ImportPreferencesConfig(SplitConfig):
    """How files become preferences."""

    layout: Literal["auto", "pairs", "kto", "ranked"] = Field(
        "auto", description="Layout of the rows; auto looks for one and stops where several fit"
    )
    heldout_fraction: float = Field(0.1, ge=0, lt=1, description=HELDOUT)


@stage(kind="preferences")
def import_preferences(inputs: list[External], config: ImportPreferencesConfig, run: StageRun) -> None:
    """Import preferences between answers: chosen and rejected, labelled single answers (KTO), or answers with scores or ranks.

    Chosen and rejected are text, messages, or dialogues of HH ("\\n\\nHuman:"); without a prompt, the context is what both have in
    common, message by message. A ranking is one row: the best answer is chosen, the worst rejected, the others keep their rank.

    `examples` shows each input's layout, why it was taken, the columns and a row; `dropped` names every row that could not be
    taken, with file, row, field and reason. Rows that are there twice are kept once. A tenth of the prompts is held out by
    default: what is trained on the others is measured on these.
    """
    import_rows("preferences", config.layout, inputs, config, run)
