"""Bits that flip on a disk: cases for the reliability test and for benchmarks."""

from __future__ import annotations

import os
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

import duckdb
import numpy as np
import pyarrow as pa
from pydantic import Field

from puna.stages.contract import Documents, StageConfig, StageRun, declare_signal, execute, perform, stage
from puna.storage import Artifact, PunaError, Store

DOCUMENTS = 300
DURING = "PUNA_TEST_FLIP_DURING"
"""Environment variable: `POSITION:BIT:PATH` of a bit that flips while the stage reads."""


class Rot(NamedTuple):
    """The results of flips: committed wrong artifacts, errors that do not name the damage, detected flips."""

    committed_wrong: int
    raw_errors: int
    named: int


class RotConfig(StageConfig):
    turn: int = Field(0, ge=0, description="Number of the flip, so that no result is reused")


declare_signal("rot_characters", int, "characters", "A number of this test")


@stage(kind="documents", filters="documents")
def rot_keeping(documents: Documents, config: RotConfig, run: StageRun) -> None:
    """Keep two thirds of the documents, by reference."""
    run.transform(keep, documents)


def keep(rows: pa.Table) -> dict[str, pa.Table]:
    """Keep the documents whose number is not a multiple of three."""
    kept = [int(i, 16) % 3 != 0 for i in rows["id"].to_pylist()]
    gone = rows.filter(pa.array([not k for k in kept]))
    n = gone.num_rows
    dropped = {"id": gone["id"], "rule": ["third"] * n, "value": [1.0] * n, "threshold": [1.0] * n, "detail": pa.nulls(n, pa.string())}
    return {"documents": rows.filter(pa.array(kept)), "dropped": pa.table(dropped)}


@stage(kind="signals")
def rot_measuring(documents: Documents, config: RotConfig, run: StageRun) -> None:
    """Measure every text with Arrow and count the dropped rows with DuckDB."""
    flip_during()
    rows = documents.read(columns=["id", "text"])
    dropped = str(documents.path("dropped.parquet"))
    with duckdb.connect() as connection:
        query = "select count(distinct id || rule) + cast(sum(value) as int) from read_parquet(?)"
        ((count,),) = connection.execute(query, [dropped]).fetchall()
    sums = [sum(text.encode()) + count for text in rows["text"].to_pylist()]
    run.write(pa.table({"id": rows["id"], "rot_characters": pa.array(sums, pa.int64())}))


def flip_during() -> None:
    """Flip the bit that the environment variable names, if it is set."""
    if given := os.environ.pop(DURING, ""):
        position, bit, path = given.split(":", 2)
        flip(Path(path), int(position), int(bit))


def flip(path: Path, position: int, bit: int) -> None:
    """Flip one bit of a file; its size, path and modification time stay the same."""
    stat = path.stat()
    path.chmod(0o644)
    with path.open("r+b") as file:
        file.seek(position)
        byte = file.read(1)[0]
        file.seek(position)
        file.write(bytes([byte ^ 1 << bit]))
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    path.chmod(stat.st_mode)


def prepare(store: Store) -> tuple[Artifact, Artifact]:
    """Return documents and a selection of them; whatever is missing is made again."""
    words = np.random.default_rng(7).integers(97, 123, (DOCUMENTS, 120), dtype=np.uint8)
    rows = pa.table(
        {
            "id": [f"{i:032x}" for i in range(DOCUMENTS)],
            "url": [f"https://x.org/{i}" for i in range(DOCUMENTS)],
            "fetched_at": [datetime(2026, 1, 1, tzinfo=UTC)] * DOCUMENTS,
            "source": ["web"] * DOCUMENTS,
            "title": pa.nulls(DOCUMENTS, pa.string()),
            "text": [row.tobytes().decode() for row in words],
        }
    )
    documents = store.import_table("documents", rows)
    return documents, execute(rot_keeping, RotConfig(), {"documents": documents}, store)


def rot(folder: Path, flips: int, seed: int = 0) -> Rot:
    """Flip bits of committed artifacts, before or while a stage reads them, and count the results."""
    store, generator = Store.open(folder), np.random.default_rng(seed)
    documents, kept = prepare(store)
    right = execute(rot_measuring, RotConfig(), {"documents": kept}, store).data_digest
    wrong = raw = named = 0
    for turn in range(1, flips + 1):
        one = (documents, kept)[turn % 2]
        names = sorted(p for p in one.folder.rglob("*") if p.is_file() and not p.name.startswith("."))
        path = names[int(generator.integers(len(names)))]
        before, stat = path.read_bytes(), path.stat()
        position, bit = int(generator.integers(len(before))), int(generator.integers(8))
        if turn % 3:
            flip(path, position, bit)
        else:
            os.environ[DURING] = f"{position}:{bit}:{path}"
        try:
            given = Artifact(kept.kind, kept.key, store.files)
            made = perform(rot_measuring, RotConfig(turn=turn), {"documents": given}, store).artifact
            wrong += made.data_digest != right or made.manifest.inputs[0].data_digest != kept.data_digest
        except PunaError as error:
            named += 1
            raw += path.relative_to(folder).parts[3][:12] not in str(error)
        except Exception:  # noqa: BLE001 - any other error is what is counted
            raw += 1
        finally:
            os.environ.pop(DURING, None)
        if path.exists():
            path.chmod(0o644)
            path.write_bytes(before)
            os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
        documents, kept = prepare(store)
    return Rot(wrong, raw, named)


def rot_cases(folder: Path, flips: int, seed: int = 0) -> tuple[int, int]:
    """Return how many flips led to a committed wrong result, and how many to an error that does not name the artifact."""
    found = rot(folder, flips, seed)
    return found.committed_wrong, found.raw_errors
