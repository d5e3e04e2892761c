"""The database that a first start begins with, against what the installed Prefect expects of one."""

from __future__ import annotations

import re
import sqlite3
from importlib.util import find_spec
from pathlib import Path

import pytest

from puna.flows.prefect import database


def head() -> str:
    """The newest migration of the installed Prefect: the one that no other follows."""
    (place,) = find_spec("prefect").submodule_search_locations or []  # type: ignore[union-attr]
    texts = [file.read_text() for file in Path(place, "server/database/_migrations/versions/sqlite").glob("*.py")]
    made = {found[1] for text in texts if (found := re.search(r'^revision(?:: str)? = "(\w+)"', text, re.M))}
    (last,) = made - {found[1] for text in texts if (found := re.search(r'^down_revision(?:: .*)? = "(\w+)"', text, re.M))}
    return last


def test_the_tables_are_those_of_the_newest_migration(tmp_path: Path) -> None:
    assert database.prepared(tmp_path)
    made = sqlite3.connect(tmp_path / "prefect.db")
    assert made.execute("select version_num from alembic_version").fetchall() == [(head(),)]
    assert {"flow_run", "deployment_schedule", "log"} <= {name for (name,) in made.execute("select name from sqlite_master")}
    # What is written anew of it is the same again, and one that is there stays.
    assert database.dumped(made) == database.TABLES.read_text()
    assert not database.prepared(tmp_path)


def test_another_prefect_migrates_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database, "version", lambda _: "9.9.9")
    assert not database.prepared(tmp_path) and not list(tmp_path.iterdir())
