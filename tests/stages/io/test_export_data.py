"""Export of tables: other tools load the files, the imports read them back, and no partial file remains."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pytest

from puna.stages.contract import External, execute
from puna.stages.conversations import answering, asking, dump
from puna.stages.io import export as module
from puna.stages.io.export import export_data
from puna.stages.io.imports import ImportInstructionsConfig, ImportPreferencesConfig, import_instructions, import_preferences
from puna.storage import Artifact, PunaError, Store
from puna.storage.schemas import table_schema

TURNS = [
    {"role": "user", "content": "1 + 1?"},
    {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add", "arguments": {"a": 1, "b": [1]}}}]},
    {"role": "tool", "content": "2"},
    {"role": "assistant", "content": "zwei — 2"},
]


def table(store: Store, kind: str, rows: list[dict[str, Any]]) -> Artifact:
    loose = pa.schema([field.with_nullable(True) for field in table_schema(kind).schema])
    return store.import_table(kind, table_schema(kind).conform(pa.Table.from_pylist(rows, schema=loose)))


def instructions(store: Store, count: int = 3000) -> Artifact:
    about = {"task": "t", "split": "train", "source": "s", "messages": dump(TURNS), "tools": dump([{"name": "add"}])}
    return table(store, "instructions", [{"id": f"{i:05d}", "prompt_id": "p", **about} for i in range(count)])


def preferences(store: Store) -> Artifact:
    about = {"prompt_id": "p", "task": "t", "split": "train", "messages": asking("q")}
    other = dump([{"role": "assistant", "content": "c", "rank": 1}])
    rows = [{"id": f"{i}", **about, "chosen": answering(f"a{i}"), "rejected": answering("b")} for i in range(3)]
    return table(store, "preferences", [*rows, {"id": "9", **about, "chosen": answering("a"), "rejected": answering("b"), "others": other}])


def test_duckdb_and_datasets_load_what_is_written(tmp_path: Path) -> None:
    import datasets

    made = instructions(Store.open(tmp_path / "store"))
    whole = export_data(made, tmp_path / "parquet")
    lines = export_data(made, tmp_path / "out" / "jsonl", "jsonl")
    assert duckdb.sql(f"select count(*), min(messages->>'$[3].content') from '{whole}'").fetchall() == [(3000, "zwei — 2")]
    assert duckdb.sql(f"select count(*), min(messages[4].content) from '{lines}'").fetchall() == [(3000, "zwei — 2")]
    for kind, file in (("parquet", whole), ("json", lines)):
        loaded = datasets.load_dataset(kind, data_files=str(file), split="train", cache_dir=str(tmp_path / "cache"))
        assert loaded.num_rows == 3000
    first = json.loads(lines.read_text().partition("\n")[0])
    assert first["messages"] == TURNS and first["tools"] == [{"name": "add"}] and "score" not in first


def test_what_is_exported_is_imported_again(tmp_path: Path) -> None:
    store = Store.open(tmp_path / "store")
    for made, stage, config in (
        (instructions(store, 1), import_instructions, ImportInstructionsConfig()),
        (preferences(store), import_preferences, ImportPreferencesConfig()),
    ):
        for format in ("jsonl", "parquet"):
            file = export_data(made, tmp_path / f"{made.kind}-{format}", format)  # type: ignore[arg-type]
            again = execute(stage, config, {"inputs": External.resolve(f"s={file}")}, store)
            for name in {"messages", "tools", "chosen", "rejected", "others", "task", "split"} & set(made.read().schema.names):
                assert sorted(map(str, again.read()[name].to_pylist())) == sorted(map(str, made.read()[name].to_pylist()))


def test_a_label_stands_for_the_side_that_is_missing(tmp_path: Path) -> None:
    about = {"prompt_id": "p", "task": "t", "split": "train", "messages": asking("q")}
    rows = [{"id": "1", **about, "chosen": answering("a")}, {"id": "2", **about, "rejected": answering("b")}]
    file = export_data(table(Store.open(tmp_path / "store"), "preferences", rows), tmp_path / "out", "jsonl")
    found = [json.loads(line) for line in file.read_text().splitlines()]
    assert [(row["completion"][0]["content"], row["label"]) for row in found] == [("a", True), ("b", False)]


def test_nothing_half_written_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = instructions(Store.open(tmp_path / "store"))

    def broken(row: dict[str, Any]) -> dict[str, Any]:
        if row["id"] == "02000":
            raise OSError("the disk is full")
        return row

    monkeypatch.setitem(module.SHAPES, "instructions", broken)
    with pytest.raises(PunaError, match="disk is full"):
        export_data(made, tmp_path / "out" / "here", "jsonl")
    assert list((tmp_path / "out").iterdir()) == []
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "mine.txt").write_text("x")
    with pytest.raises(PunaError, match="taken already exists"):
        export_data(made, tmp_path / "taken")
