"""Stages and flows run from a script, and the package puna, which a folder of the same name must not shadow."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import puna
from puna.stages.contract import Documents, StageConfig, StageRun, stage
from puna.storage import PunaError

ROOT = Path(__file__).parents[2]


class NothingConfig(StageConfig):
    """A configuration without fields."""


@stage(kind="documents", filters="documents")
def first_half_of_the_rows(documents: Documents, config: NothingConfig, run: StageRun) -> None:
    """Keep the first half of the rows."""
    table = documents.read()
    half = table.num_rows // 2
    run.write(table.slice(0, half))
    run.write_rows([{"id": row, "rule": "second_half", "detail": ""} for row in table.column("id").to_pylist()[half:]], "dropped")


def test_a_stage_alone_is_three_lines(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("".join(f'{{"text": "page number {n}"}}\n' for n in range(6)))
    store = puna.open(tmp_path / "store")
    pages = puna.run("ingest", tmp_path / "rows.jsonl", store=store)
    documents = puna.run("extract", pages, store=store)
    assert puna.run("extract", pages.id, store=tmp_path / "store").key == documents.key
    half = puna.run(first_half_of_the_rows, documents, store=store)
    assert half.rows() == documents.rows() // 2 > 0 and half.rows("dropped") == documents.rows() - half.rows()


def test_wrong_uses_are_named(tmp_path: Path) -> None:
    store = puna.open(tmp_path)
    with pytest.raises(PunaError, match="ingest.formt: no such field; did you mean format"):
        puna.run("ingest", store=store, formt="warc")
    with pytest.raises(PunaError, match="needs the input 'documents'"):
        puna.run("pii", store=store)
    with pytest.raises(PunaError, match="did you mean heuristics"):
        puna.run("heuristic", store=store)
    with pytest.raises(AttributeError, match="no attribute 'opne'"):
        puna.opne  # noqa: B018


def test_a_folder_named_puna_beside_the_script_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "puna").mkdir()
    (tmp_path / "script.py").write_text("import puna, sys\nprint(sorted(m for m in sys.modules if m.startswith('puna')), callable(puna.open))\n")
    environment = {**os.environ, "PYTHONPATH": str(ROOT / ".pkg")}
    done = subprocess.run([sys.executable, "script.py"], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['puna'] True"


def test_arrows_allocator_is_told_before_arrow_is_loaded_and_a_users_word_stands() -> None:
    said = "import sys, puna, os; print('pyarrow' in sys.modules, os.environ['MIMALLOC_PURGE_DELAY'], os.environ['MIMALLOC_ALLOW_THP'])"
    plain = {name: value for name, value in os.environ.items() if not name.startswith("MIMALLOC_")}
    for given, expected in (({}, "False 1000 0"), ({"MIMALLOC_PURGE_DELAY": "5"}, "False 5 0")):
        done = subprocess.run([sys.executable, "-c", said], env=plain | given, capture_output=True, text=True, check=True)
        assert done.stdout.strip() == expected
