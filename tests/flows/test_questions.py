"""The queries of docs/questions.md, each run on a store with the artifacts of a whole run; and the command that runs queries."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow.csv
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

import puna
from puna.flows.cli import sql
from puna.flows.cli.main import app
from puna.storage import PunaError, Store, catalog
from tests.flows.report.conftest import everything

PAGE = Path(__file__).parents[2] / "docs" / "questions.md"
QUESTIONS = re.findall(r"### \d+\. (.*?)\n.*?```sql\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
NOTHING_HERE = {"Which setting differs between artifacts of one stage?"}
"""Queries whose result is correctly empty on this store."""


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    built = everything(tmp_path_factory.mktemp("questions"))
    built.store.set_alias("documents@latest", built.at["decontaminate"])
    built.store.set_alias("policy@latest", built.at["average_2"])
    return built.store


@pytest.fixture(scope="module")
def answers(store: Store) -> dict[str, list[dict[str, Any]]]:
    with catalog.Catalog(store) as opened:
        address = opened.sql("select url from newest.pages limit 1").fetchall()[0][0].replace("'", "''")
        return {words: catalog.run(opened, query.replace("https://example.org/a-page", address)).to_pylist() for words, query in QUESTIONS}


def test_there_are_twenty_and_each_is_answered(answers: dict[str, list[dict[str, Any]]]) -> None:
    assert len(answers) == 20
    assert {words for words, rows in answers.items() if not rows} <= NOTHING_HERE


def test_answers_are_those_of_the_artifacts(store: Store, answers: dict[str, list[dict[str, Any]]]) -> None:
    last = store.alias("documents@latest").read()
    assert {row["source"]: row["documents"] for row in answers["How many documents are left, and how much text?"]} == Counter(last["source"].to_pylist())
    dropped: Counter[str] = Counter()
    for artifact in store.artifacts():
        if artifact.kind in ("pages", "documents") and "dropped" in artifact.tables:
            dropped.update(artifact.read("dropped")["rule"].to_pylist())
    assert {row["rule"]: row["documents"] for row in answers["Which rules dropped most on the way to `documents@latest`?"]} == dropped
    kept = {row["step"]: (row["kept"], row["dropped"]) for row in answers["What did each stage of the last run keep?"]}
    assert kept["ingest"] == (420, 3) and kept["extract"][0] + kept["extract"][1] == 420
    policy = answers["Which artifacts led to the policy, and how long did they take?"]
    assert {"pretrain", "ingest", "average"} <= {row["stage"] for row in policy}


def ask(store: Store, *words: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, ["sql", "--store", str(store.root), *words])
    if isinstance(result.exception, PunaError):
        raise result.exception
    assert result.exit_code == code, result.output
    return result.stdout


def test_a_result_goes_to_a_file_outside_the_store(store: Store, tmp_path: Path) -> None:
    query = "select rule, count(*) as n from dropped group by rule order by rule"
    with catalog.Catalog(store) as opened:
        expected = catalog.run(opened, query).to_pylist()
    ask(store, query, "-o", str(tmp_path / "rules.parquet"))
    ask(store, query + ";", "-o", str(tmp_path / "rules.csv"))
    assert pq.read_table(tmp_path / "rules.parquet").to_pylist() == expected
    assert pyarrow.csv.read_csv(tmp_path / "rules.csv")["n"].to_pylist() == [row["n"] for row in expected]
    for output, words, said in (
        (store.root / "objects" / "x.csv", query, "is in the store"),
        (tmp_path / "none" / "x.csv", query, "there is no folder"),
        (tmp_path / "x.xlsx", query, "suffix must name the format"),
        (tmp_path / "x.csv", "select nothing from dropped", "nothing"),
        (tmp_path / "x.csv", f"copy dropped to '{tmp_path}/y.csv'", "read-only"),
    ):
        with pytest.raises(PunaError, match=said):
            ask(store, words, "-o", str(output))
    assert sorted(file.name for file in tmp_path.iterdir()) == ["rules.csv", "rules.parquet"]


def test_the_file_for_other_clients_is_named(store: Store) -> None:
    file = Path(ask(store, "--file").strip())
    assert file == store.root / "puna.duckdb" and file.is_file()
    with pytest.raises(PunaError, match="takes no query"):
        ask(store, "--file", "select 1")


def test_names_are_completed(store: Store) -> None:
    with catalog.Catalog(store) as opened:
        assert sql.completions(opened, "newest.dup", "from newest.dup") == ["newest.duplicates"]
        assert "kept_id" in sql.completions(opened, "kep", "select kep from duplicates")
        assert sql.completions(opened, "kept_i", "select kept_i") == []
        assert "select" in sql.completions(opened, "sel", "sel") and "upstream(" in sql.completions(opened, "ups", "ups")
        assert sql.completions(opened, "'pol", "from upstream('pol") == ["'policy@latest'"]
        assert opened.several("select count(*) from documents") == {"documents": 9}
        assert opened.several("select artifact, count(*) from documents group by 1") == opened.several("from newest.documents") == {}


def test_from_python(store: Store) -> None:
    table = puna.connect(store.root).sql("select count(*) as n from newest.documents").to_arrow_table()
    assert table["n"].to_pylist() == [store.alias("documents@latest").rows()]
