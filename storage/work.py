"""An artifact in the making: its identity, the parts and files of this attempt, and the commit."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from puna.storage import digest, tables
from puna.storage.artifact import Artifact
from puna.storage.errors import PunaError
from puna.storage.manifest import NAME, FileRecord, InputRecord, Manifest, TableRecord, content_digest, key_of
from puna.storage.schemas import table_schema

if TYPE_CHECKING:
    from puna.storage.store import Store

INPUTS = "inputs.json"


class Identity:
    """What decides an artifact's key, and what is written about its making."""

    def __init__(
        self,
        stage: str,
        code_version: str = "",
        code: dict[str, str] | None = None,
        config: dict[str, Any] | None = None,
        inputs: list[InputRecord] | None = None,
    ) -> None:
        self.stage = stage
        self.code_version = code_version
        self.code = code or {}
        self.config = config or {}
        self.inputs = inputs or []

    @property
    def key(self) -> str:
        """sha256 over stage, code version, configuration and the inputs' data digests."""
        return key_of(self.stage, self.code_version, self.config, self.inputs)


class Work:
    """An unfinished artifact: parts of tables, files, and scratch that survives a crash.

    Parts outlive a crash too, but only those that this attempt writes or claims are committed.
    """

    def __init__(self, store: Store, folder: Path) -> None:
        self.store = store
        self.folder = folder
        self.output = folder / "output"
        self.scratch = folder / "scratch"
        self.parts = folder / "parts"
        self._claimed: dict[str, set[str]] = {}
        if self.output.exists():
            shutil.rmtree(self.output)
        for path in (self.output, self.scratch, self.parts):
            path.mkdir(parents=True, exist_ok=True)

    def uses(self, inputs: list[InputRecord]) -> None:
        """Say what the work reads, so that `gc` leaves it in place while the work goes on."""
        write_text(self.folder / INPUTS, json.dumps([i.key for i in inputs if i.kind != "external"]))

    def part(self, table: str, name: str) -> Path:
        """The file of one part of a table."""
        return self.parts / table / f"{name}.parquet"

    def add(self, table: str, rows: pa.Table, name: str) -> None:
        """Write one part of a table; it is checked against the table's schema."""
        tables.write_part(table_schema(table).conform(rows), self.part(table, name))
        self.claim(table, name)

    def claim(self, table: str, name: str) -> None:
        """Count a part, written by a worker of this attempt or of one before it, as a part of the artifact."""
        self._claimed.setdefault(table_schema(table).name, set()).add(name)

    def declare(self, table: str) -> None:
        """Have the table in the artifact even when it gets no rows: which tables there are must not depend on the data."""
        self._claimed.setdefault(table_schema(table).name, set())

    def files(self, table: str) -> list[Path]:
        """The files of the parts of a table so far."""
        return [self.part(table, name) for name in sorted(self._claimed.get(table, ()))]

    def rows(self, table: str) -> int:
        """Rows written to a table so far."""
        return sum(pq.read_metadata(file).num_rows for file in self.files(table))

    def discard(self) -> None:
        """Remove the work folder and all that was done: the artifact exists already, or cannot come of it."""
        shutil.rmtree(self.folder)

    def commit(self, kind: str, key: str, identity: Identity, **about: Any) -> Artifact:
        """Merge the parts, write the manifest last, and move the folder into place in one step.

        The first of two writers of one key wins; the second gets the first one's artifact. The metric `characters`
        is added where the main table has a column `text`.
        """
        self._check_output()
        merged, characters = self._merged(kind)
        files = {
            str(f.relative_to(self.output)): FileRecord(f.stat().st_size, digest.of_file(f))
            for f in sorted(self.output.rglob("*"))
            if f.is_file()
        }
        if kind in characters:
            about["metrics"] = {"characters": characters[kind], **about.get("metrics", {})}
        manifest = Manifest(
            kind=kind,
            key=key,
            stage=identity.stage,
            data_digest=content_digest(merged, files),
            code_version=identity.code_version,
            code=identity.code,
            config=identity.config,
            inputs=identity.inputs,
            tables=merged,
            files=files,
            created_at=datetime.now(UTC).isoformat(),
            **about,
        )
        for path in self.output.rglob("*"):
            sync(path)
        write_text(self.output / NAME, manifest.to_json())
        placed = self._placed(kind, key)
        # A worker of an attempt that failed may still be writing; what it leaves, `gc` removes.
        shutil.rmtree(self.folder, ignore_errors=True)
        return placed

    def _merged(self, kind: str) -> tuple[dict[str, TableRecord], dict[str, int]]:
        """Make every table of the artifact out of its parts; also gives the characters of each column `text`."""
        merged: dict[str, TableRecord] = {}
        characters: dict[str, int] = {}
        for name in sorted({*self._claimed, *({kind} if self._has_table(kind) else ())}):
            target = self.output / f"{name}.parquet"
            if target.exists():
                raise PunaError(f"{target}: a file of the stage has the name of its table; call it otherwise")
            files = self.files(name)
            if files:
                rows, schema = tables.merge(name, files, target)
            else:
                tables.empty(name, target)
                rows, schema = 0, table_schema(name).schema
            shutil.rmtree(self.output / ".sort", ignore_errors=True)
            content = digest.of_batches(schema, _batches(target, name, characters))
            merged[name] = TableRecord(rows, content, {f.name: str(f.type) for f in schema})
        return merged, characters

    def _placed(self, kind: str, key: str) -> Artifact:
        """Move the output to where the artifact lies, in one step; what another writer put there first stays."""
        target = self.store.folder(kind, key)
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.exists() and not (target / NAME).is_file():
            self.store.set_aside(kind, key)
        try:
            os.rename(self.output, target)
        except OSError as error:
            if not (target / NAME).is_file():
                raise PunaError(f"cannot commit {kind}/{key[:12]} to {target}: {error}") from error
        for folder in target.parents[:3]:
            sync(folder)
        return Artifact.at(target)

    def _check_output(self) -> None:
        """PunaError where the stage wrote what cannot be committed."""
        if (self.output / NAME).exists():
            raise PunaError(f"{self.output / NAME}: this name is the manifest's; the stage has to call its file otherwise")
        for path in self.output.rglob("*"):
            if path.is_symlink():
                raise PunaError(f"{path}: is a link, and what it points to may go; the stage has to write the file itself")

    @staticmethod
    def _has_table(kind: str) -> bool:
        return kind not in ("tokenizer", "model")


def inputs_of(folder: Path) -> list[str]:
    """Keys of the artifacts that the work in a folder reads."""
    file = folder / INPUTS
    return [str(key) for key in json.loads(file.read_text())] if file.is_file() else []


def _batches(file: Path, table: str, characters: dict[str, int]) -> Iterator[pa.RecordBatch]:
    """The rows of a table; adds the characters of its column `text`, where it has one, to `characters`."""
    if "text" in pq.read_schema(file).names:
        characters[table] = 0
    for batch in tables.batches_of(file):
        yield batch
        if table in characters:
            characters[table] += pc.sum(pc.utf8_length(batch.column("text"))).as_py() or 0


def write_text(file: Path, text: str) -> None:
    """Write a small file so that it exists whole or not at all, a loss of power included."""
    temporary = file.with_name(f".{file.name}.{os.getpid()}")
    with temporary.open("w", encoding="utf-8") as out:
        out.write(text)
        out.flush()
        os.fsync(out.fileno())
    os.replace(temporary, file)
    sync(file.parent)


def write_array(file: Path, array: npt.NDArray[Any]) -> None:
    """Write an array as .npy so that it exists whole or not at all after a crash of the process."""
    temporary = file.with_name(f".{os.getpid()}-{file.name}")
    np.save(temporary, array)
    os.replace(temporary, file)


def sync(path: Path) -> None:
    """Have the disk keep a file, or the names in a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
