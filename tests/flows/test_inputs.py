"""What inputs hold is looked at before any stage starts."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from puna.flows import pipeline
from puna.flows.recipe import load
from puna.stages.contract import External
from puna.storage import PunaError


class Started(Exception):
    """The first stage was about to run."""


@pytest.fixture(autouse=True)
def no_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    def step(stage, *_, **__):
        raise Started(stage.name)

    monkeypatch.setattr(pipeline, "step", step)


def jsonl(file: Path, *lines: str) -> Path:
    file.write_text("".join(line + "\n" for line in lines))
    return file


def curate(*files: Path, changes: tuple[str, ...] = ()) -> None:
    pipeline.curate(load("demo", list(changes)), [item for file in files for item in External.resolve(str(file))])


def test_a_missing_column_is_refused(tmp_path: Path) -> None:
    rows = jsonl(tmp_path / "rows.jsonl", '{"body": "a page", "url": "https://x.org"}', '{"body": "another"}')
    table = tmp_path / "table.parquet"
    pq.write_table(pa.table({"content": ["a page"]}), table)
    with pytest.raises(PunaError, match=r"rows\.jsonl: no column 'text'; it has body, url\. Name another one with ingest\.text_column"):
        curate(rows)
    with pytest.raises(PunaError, match=r"table\.parquet: no column 'text'; it has content\."):
        curate(table)
    for file, column in ((rows, "body"), (table, "content")):
        with pytest.raises(Started):
            curate(file, changes=(f"ingest.text_column={column}",))


def test_a_column_that_some_rows_lack_is_there(tmp_path: Path) -> None:
    with pytest.raises(Started):
        curate(jsonl(tmp_path / "rows.jsonl", '{"url": "https://x.org"}', "no JSON", '{"text": "a page"}'))


def test_inputs_without_rows_are_refused(tmp_path: Path) -> None:
    nothing = jsonl(tmp_path / "nothing.jsonl")
    table = tmp_path / "table.parquet"
    pq.write_table(pa.table({"text": pa.array([], pa.string())}), table)
    for files in ((nothing,), (table,), (nothing, table)):
        with pytest.raises(PunaError, match="have no rows: there is nothing to read"):
            curate(*files)
    with pytest.raises(Started):  # an empty shard among others is none of our business
        curate(nothing, jsonl(tmp_path / "rows.jsonl", '{"text": "a page"}'))
