"""The tables of a Prefect server on SQLite, made at once: its own migrations take as long as all the rest of a first start.

`prefect.sql` holds what the migrations of one version of Prefect lead to, and which version that is;
`python -m puna.flows.prefect.database` writes it anew. Another version of Prefect migrates by itself, as it does a database
that is there already.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

TABLES = Path(__file__).with_name("prefect.sql")
NAME = "prefect.db"


def prepared(home: Path) -> bool:
    """Whether a database was made in Prefect's folder: none is there, and the tables are those of the Prefect that is installed."""
    if (home / NAME).exists() or "PREFECT_API_DATABASE_CONNECTION_URL" in os.environ:
        return False
    script = TABLES.read_text(encoding="utf-8")
    if script.partition("\n")[0] != _title():
        return False
    home.mkdir(parents=True, exist_ok=True)
    made = home / f".{NAME}.{os.getpid()}"
    made.unlink(missing_ok=True)
    with contextlib.closing(sqlite3.connect(made)) as database:
        database.executescript(script)
    os.replace(made, home / NAME)
    return True


def dumped(database: sqlite3.Connection) -> str:
    """The tables and indices of a migrated database, and the migration that it is at, as SQL."""
    found = database.execute("select sql from sqlite_master where sql is not null and name not like 'sqlite_%' order by rowid")
    ((at,),) = database.execute("select version_num from alembic_version")
    last = f"INSERT INTO alembic_version VALUES ('{at}')"
    return _title() + "\n" + "".join(f"{statement};\n" for statement in ["BEGIN", *(sql for (sql,) in found), last, "COMMIT"])


def _title() -> str:
    return f"-- What the migrations of Prefect {version('prefect')} lead to; written by puna.flows.prefect.database"


def write() -> None:
    """Migrate a new database by Prefect's own means and write what it leads to."""
    with tempfile.TemporaryDirectory() as home:
        words = [sys.executable, "-m", "prefect", "server", "database", "upgrade", "-y"]
        subprocess.run(words, env={**os.environ, "PREFECT_HOME": home}, check=True)
        with contextlib.closing(sqlite3.connect(Path(home) / NAME)) as database:
            TABLES.write_text(dumped(database), encoding="utf-8")


if __name__ == "__main__":
    write()
