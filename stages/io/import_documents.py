"""Documents from files of rows with text: JSON, Parquet, CSV, data sets."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from puna.stages.contract import External, StageRun, stage
from puna.stages.io.importing import ImportConfig, import_rows


class ImportDocumentsConfig(ImportConfig):
    """How files become documents."""

    layout: Literal["auto", "text"] = Field(
        "auto", description="Layout of the rows; auto looks for one and stops where several fit"
    )


@stage(kind="documents")
def import_documents(inputs: list[External], config: ImportDocumentsConfig, run: StageRun) -> None:
    """Import documents from rows with a text, and perhaps a title, an address and a date; pages of HTML and archives go through `ingest`.

    `examples` shows each input's layout, why it was taken, the columns and a row; `dropped` names every row that could not be
    taken, with file, row, field and reason. Rows that are there twice are kept once.
    """
    import_rows("documents", config.layout, inputs, config, run)
