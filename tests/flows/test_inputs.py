"""Inputs are inspected before any stage starts, and files that change during the run are refused."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from puna.flows.engine import preflight
from puna.flows.engine.trace import flow_named, load
from puna.stages.contract import External, Facts, InputFacts, perform
from puna.stages.contract.declaration import GLANCE, LOOK
from puna.stages.curate.domains import TrainDomainsConfig, needs, seed_words
from puna.stages.curate.ingest import IngestConfig, ingest
from puna.storage import PunaError, Store


def jsonl(file: Path, *lines: str) -> Path:
    file.write_text("".join(line + "\n" for line in lines))
    return file


def checked(*files: Path, changes: tuple[str, ...] = ()) -> None:
    """Inspect the inputs as before a start of the flow `curate`."""
    flow, recipe = flow_named("curate"), load("demo", ["quality=null", "select_model.quality=null", "domains=null", *changes], "curate")
    items = [item for file in files for item in External.resolve(str(file))]
    preflight.check(flow, recipe, flow.by_kind(items), Store.open(files[0].parent / "store"))


def test_a_missing_column_is_refused(tmp_path: Path) -> None:
    rows = jsonl(tmp_path / "rows.jsonl", '{"body": "a page", "url": "https://x.org"}', '{"body": "another"}')
    table = tmp_path / "table.parquet"
    pq.write_table(pa.table({"content": ["a page"]}), table)
    with pytest.raises(PunaError, match=r"rows\.jsonl, row 1: no text in a field 'text'; it has body, url; .*ingest\.text_column"):
        checked(rows)
    with pytest.raises(PunaError, match=r"table\.parquet: no column 'text'; it has content\."):
        checked(table)
    for file, column in ((rows, "body"), (table, "content")):
        checked(file, changes=(f"ingest.text_column={column}",))


def test_a_column_that_some_rows_lack_is_there(tmp_path: Path) -> None:
    checked(jsonl(tmp_path / "rows.jsonl", '{"url": "https://x.org"}', "no JSON", '{"text": "a page"}'))


def test_inputs_without_rows_are_refused(tmp_path: Path) -> None:
    nothing = jsonl(tmp_path / "nothing.jsonl")
    table = tmp_path / "table.parquet"
    pq.write_table(pa.table({"text": pa.array([], pa.string())}), table)
    for files, why in (((table,), "have no rows: there is nothing to read"), ((nothing, table), r"can be read: nothing\.jsonl: the file is empty")):
        with pytest.raises(PunaError, match=why):
            checked(*files)
    with pytest.raises(PunaError, match=r"have no rows that can be read: .*cut\.jsonl, row 1: .*JSON"):
        checked(nothing, jsonl(tmp_path / "cut.jsonl", "{", '"text": "a page"'))
    checked(nothing, jsonl(tmp_path / "pretty.jsonl", "{", '"text": "a page"', "}"))
    checked(nothing, jsonl(tmp_path / "rows.jsonl", '{"text": "a page"}'))


@pytest.mark.parametrize("change", ["longer", "as_long", "gone"])
def test_an_input_that_changes_while_it_is_read_is_refused(tmp_path: Path, change: str) -> None:
    file = jsonl(tmp_path / "rows.jsonl", '{"text": "a page"}')
    os.utime(file, ns=(0, 0))
    inputs = External.resolve(str(file))

    def meanwhile(*inputs_and_run) -> None:
        ingest.function(*inputs_and_run)
        if change == "gone":
            file.unlink()
        else:
            jsonl(file, '{"text": "a leaf"}' if change == "as_long" else '{"text": "a longer page"}')

    stage = dataclasses.replace(ingest, function=meanwhile, version="1")
    store = Store.open(tmp_path / "store")
    with pytest.raises(PunaError, match=r"input rows: .*rows.jsonl was changed or removed while it was read"):
        perform(stage, IngestConfig(), {"inputs": inputs}, store)
    assert store.artifacts() == [] and list((store.root / "work").iterdir()) == []
    jsonl(file, '{"text": "a longer page"}')
    assert perform(ingest, IngestConfig(), {"inputs": External.resolve(str(file))}, store).artifact.rows() == 1


def test_pages_are_read_only_where_a_step_asks_what_they_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = []
    monkeypatch.setattr(preflight, "peek", lambda *given: read.append(given) or ([], 1.0))
    rows = jsonl(tmp_path / "rows.jsonl", '{"text": "a page"}')
    checked(rows)
    assert not read
    flow = flow_named("curate")
    recipe = load("demo", ["quality=null", "select_model.quality=null"], "curate")
    store = Store.open(tmp_path / "other")
    preflight.check(flow, recipe, flow.by_kind(External.resolve(str(rows))), store)
    assert [seconds for *_, seconds in read] == [GLANCE, LOOK]  # the short look found nothing, so a longer one followed


def test_a_glance_is_enough_where_it_shows_what_a_step_needs(tmp_path: Path) -> None:
    """A short look is enough if it finds what a step needs, or if it covers the whole input: there is no second look."""
    asked: list[float] = []
    config = TrainDomainsConfig(min_labels=2)

    def needs_of(texts: tuple[str, ...], share: float) -> list[str]:
        asked.clear()
        looked = InputFacts("documents", look=lambda seconds: asked.append(seconds) or (texts, share))
        return needs(config, Facts({"documents": (looked,)}, None))

    types, owner = seed_words()
    words = [[word for word, at in owner.items() if types[at] == name][:20] for name in types[:2]]
    texts = tuple(" ".join(one) for one in words for _ in range(2))
    assert needs_of(texts, 0.01) == [] and asked == [GLANCE]
    assert needs_of(texts[:3], 0.01) == [] and asked == [GLANCE, LOOK]
    (said,) = needs_of(texts[:2], 1.0)
    assert "two knowledge types need at least min_labels=2" in said and asked == [GLANCE]
