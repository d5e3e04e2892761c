"""Unfinished artifacts: their identity, the parts and files of an attempt, the commit, and the keys that a process uses."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import threading
import uuid
import warnings
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from puna.storage import digest, tables
from puna.storage.artifact import Artifact, place_of
from puna.storage.errors import PunaError
from puna.storage.files import LOCKS, Files, sync, write_bytes
from puna.storage.manifest import NAME, InputRecord, Manifest, Source, TableRecord, content_digest, key_of, table_digest
from puna.storage.parts import ShardRows, Stored
from puna.storage.schemas import table_schema
from puna.storage.shards import FileRecord, Shard
from puna.storage.staging import Damaged, Outputs, Staged, Staging
from puna.storage.tables import Made, Mapper, Pieces

INPUTS = "inputs.json"
LOGS = "runs/held-"  # prefix of the names of logs with the keys that live processes use; `gc` keeps the artifacts with these keys
WITHOUT_TABLE = {"tokenizer", "model", "classifier"}


@dataclass
class Identity:
    """The fields of a manifest that determine the artifact's key."""

    stage: str
    code_version: str = ""
    code: dict[str, str] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    inputs: list[InputRecord] = field(default_factory=list)

    @cached_property
    def key(self) -> str:
        """Return the artifact's key, a sha256 over the fields other than `code`, whose hash is `code_version` (see `manifest.key_of`)."""
        return key_of(self.stage, self.code_version, self.config, self.inputs)


class Work:
    """An unfinished artifact. Parts and `scratch` survive a crash; `output` does not. Only parts claimed by this attempt are committed."""

    def __init__(self, files: Files, key: str, project: str = "") -> None:
        self.files = files
        self.project = project
        self.place = f"work/{key}"
        files.remove(f"{self.place}/output")
        self.output = files.scratch(f"{self.place}/output")
        self.scratch = files.scratch(f"{self.place}/scratch")
        self.staging = Staging(files, f"{self.place}/parts")
        self.mapper: Mapper = map
        self.cut = 0  # number of shards of the corpus that the artifact's rows belong to; 0: no corpus
        self.ranges: set[str] = set()  # names of tables whose pieces have disjoint key ranges, so that the pieces can be shards
        self._claimed: dict[str, list[Staged]] = {}
        self._made: dict[str, Made] | None = None
        self.shift = 0
        self._sources: tuple[Source, ...] = ()
        self._source_shards: tuple[tuple[Stored | None, ...], ...] = ()

    def uses(self, inputs: list[InputRecord]) -> None:
        """Record the keys of the work's inputs, so that `gc` keeps these artifacts."""
        self.files.write(f"{self.place}/{INPUTS}", json.dumps([i.key for i in inputs if i.kind != "external"]).encode(), lasting=False)

    def add(self, table: str, rows: pa.Table, name: str) -> None:
        """Write and claim rows as part `name` of a table, after checking them against the table's schema."""
        with Outputs(self.staging, f"{table}-{name}") as outputs:
            outputs.add(table, rows)
            self.claim(outputs.finish())

    def earlier(self, job: str) -> list[Staged] | None:
        """Return the tables that an earlier attempt at a job wrote; None if there are none or, after a warning, if they are damaged."""
        try:
            return self.staging.earlier(job)
        except Damaged as damaged:
            self.say(str(damaged))
            return None

    def say(self, damaged: str) -> None:
        warnings.warn(f"{damaged}, left by an earlier attempt, is damaged; its job runs again", stacklevel=2)

    def claim(self, staged: Iterable[Staged]) -> None:
        """Make a job's tables, from this attempt or an earlier one, part of the artifact."""
        for one in staged:
            self._claimed.setdefault(table_schema(one.table).name, []).append(one)

    def declare(self, table: str) -> None:
        """Add a table to the artifact even if it gets no rows, because the set of tables must not depend on the data."""
        self._claimed.setdefault(table_schema(table).name, [])

    def refers(self, documents: Artifact) -> tuple[tuple[Stored | None, ...], ...] | None:
        """Return, for each shard, the facts files of the sources to which kept rows may refer; None if rows cannot be kept by reference.

        The sources are `documents`, if it has rows of its own, and the sources of `documents`. They are numbered from 1, in the order of
        the files; 0 stands for new rows. Set `shift`, which the caller adds to the source numbers in order files of `documents`."""
        if documents.files != self.files or not table_schema(documents.kind).selectable or self._sources:
            return None
        record = documents.record()
        artifacts, self._sources, self.shift = documents.sources(), tuple(record.sources), 0
        if any(s.file for s in record.shards):
            artifacts = [documents, *artifacts]
            self._sources, self.shift = (Source(documents.kind, documents.key, record.digest), *self._sources), 1
        shards = [a.record(a.kind).shards for a in artifacts]
        columns = list(zip(artifacts, shards, strict=True))
        self._source_shards = tuple(tuple(a.stored_file(s.file, s.groups) if s.file else None for s in own) for a, own in columns)
        facts = [[a.stored_file(s.facts) if s.facts else None for s in own] for a, own in columns]
        return tuple(zip(*facts, strict=True))

    def rows(self, table: str) -> int:
        return sum(one.shard.rows for one in self._claimed.get(table, ()))

    def values(self, table: str) -> dict[str, int]:
        counts: Counter[str] = Counter()
        for one in self._claimed.get(table, ()):
            counts.update(one.values)
        return counts

    def finish_tables(self, kind: str) -> dict[str, Made]:
        """Return all tables of the artifact by name, merged if needed. Rows added afterwards are ignored."""
        if self._made is None:
            self._made = {}
            for name in sorted({*self._claimed, *({kind} - WITHOUT_TABLE)}):
                pieces = self._pieces(name, kind)
                table = tables.finish(pieces, self.staging, self.mapper)
                self._made[name] = table if table.record.rows else self._empty(name, table)
        return self._made

    def _pieces(self, name: str, kind: str) -> Pieces:
        sources, files = (self._sources, self._source_shards) if name == kind else ((), ())
        return Pieces(name, self._claimed.get(name, []), self.cut, sources, files, name in self.ranges)

    def _empty(self, name: str, whole: Made) -> Made:
        """Return a table without rows: one file that has the columns of the table's schema."""
        data = tables.empty(name)
        self.files.write(f"{self.staging.folder}/{name}/empty.parquet", data)
        record = FileRecord(len(data), hashlib.sha256(data).hexdigest())
        shard = Shard(0, "", [], [], file=f"{name}.parquet")
        columns = {f.name: str(f.type) for f in table_schema(name).schema}
        table = TableRecord(0, table_digest(columns, [shard]), columns, [shard])
        return Made(table, {f"{name}.parquet": (f"{self.staging.folder}/{name}/empty.parquet", record)}, {})

    def shards(self, table: str, kind: str) -> list[ShardRows]:
        """Return the shards of a finished table by reference, before the commit."""
        return tables.shard_rows(self._pieces(table, kind), self.finish_tables(kind)[table], self.staging)

    def discard(self) -> None:
        """Remove the work folder, if the artifact already exists or the parts must not be committed."""
        self.files.remove(self.place)

    def commit(self, kind: str, key: str, identity: Identity, **about: Any) -> Artifact:
        """Finish the tables, publish all files with the manifest last, remove the work folder, and return the artifact.

        If another process has committed the key first, return that process's artifact. If the main table has a column `text`, add the
        metric `characters`. Raise PunaError if the artifact cannot be written."""
        tables_made = self.finish_tables(kind)
        content = {name: file for table in tables_made.values() for name, (file, _) in table.content.items()}
        records = {name: record for table in tables_made.values() for name, (_, record) in table.content.items()}
        own = self._own_files(set(content), set(tables_made))
        content |= {name: f"{self.place}/output/{name}" for name in own}
        if kind in tables_made and "text" in tables_made[kind].record.columns:
            about["metrics"] = {"characters": tables_made[kind].record.characters, **about.get("metrics", {})}
        all_tables = {name: one.record for name, one in tables_made.items()}
        manifest = Manifest(
            kind=kind, key=key, stage=identity.stage, data_digest=content_digest(all_tables, records | own),
            code_version=identity.code_version, code=identity.code, config=identity.config, inputs=identity.inputs, tables=all_tables,
            files=dict(sorted((records | own).items())), created_at=datetime.now(UTC).isoformat(), project=self.project, **about,
        )  # fmt: skip
        place, files = place_of(kind, key), self.files
        try:
            won = files.publish(place, content, (NAME, manifest.to_json().encode()), f"{self.place}/commit")
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM):
                raise  # `explain_write_errors` explains these
            raise PunaError(f"cannot commit {kind}/{key[:12]} to {place}: {error}") from error
        artifact = Artifact(kind, key, files)
        if won:
            artifact.remember()
        # A worker of a failed attempt may still be writing; `gc` removes what it leaves.
        with contextlib.suppress(OSError):
            files.remove(self.place)
        return artifact

    def _own_files(self, taken: set[str], names: set[str]) -> dict[str, FileRecord]:
        """Store the files that the stage itself wrote to `output`; return their records. Raise PunaError if a file cannot be committed."""
        files = {}
        for path in sorted(self.output.rglob("*")):
            name = str(path.relative_to(self.output))
            if name == NAME:
                raise PunaError(f"{path}: this name is reserved for the manifest; the stage must give its file another name")
            if path.is_symlink():
                raise PunaError(f"{path}: is a link, whose target may disappear; the stage must write the file itself")
            if name in taken or name.removesuffix(".parquet") in names:
                raise PunaError(f"{path}: a file of the stage has the name of one of its tables; give the file another name")
            sync(path)
            if path.is_file():
                files[name] = FileRecord(path.stat().st_size, digest.of_file(path))
                self.files.put(f"{self.place}/output/{name}", path)
        return files


def write_text(file: Path, text: str) -> None:
    """Write a small file completely or not at all; it survives a power failure."""
    write_bytes(file, text.encode())


def write_array(file: Path, array: npt.NDArray[Any]) -> None:
    """Write an array as .npy, completely or not at all if the process crashes."""
    temporary = file.with_name(f".{os.getpid()}-{file.name}")
    np.save(temporary, array)
    os.replace(temporary, file)


class Holding:
    """The keys that one process uses, which `gc` keeps. Nothing is written before the first key."""

    def __init__(self, files: Files) -> None:
        self._files = files
        self.name = uuid.uuid4().hex
        self._keys: set[str] = set()
        self._guard = threading.Lock()
        self._lease = contextlib.ExitStack()

    def add(self, *keys: str) -> None:
        """Record that this process uses artifacts with these keys, if the store is writable."""
        with self._guard, contextlib.suppress(OSError, PunaError):
            if new := [key for key in dict.fromkeys(keys) if key not in self._keys]:
                if not self._keys:
                    self._lease.enter_context(self._files.lease(f"held-{self.name}"))
                self._files.append(f"{LOGS}{self.name}", "\n".join([*new, ""]).encode())
                self._keys.update(new)

    def release(self) -> None:
        """Release all keys. If the store can no longer be written, the lease expires with the process."""
        with self._guard, contextlib.suppress(OSError, PunaError):
            if self._keys:
                self._lease.close()
                drop(self._files, self.name)
                self._keys.clear()


def drop(files: Files, name: str) -> None:
    """Remove the log and the lease of a process that has ended or no longer needs any keys. `name`: the name of its `Holding`."""
    files.remove(f"{LOGS}{name}")
    files.remove(f"{LOCKS}/held-{name}")


def scan_holdings(files: Files, but: str) -> tuple[set[str], list[str]]:
    """Return the keys that live processes use, and the `Holding` names of dead processes. `but`: the caller's own name, to skip."""
    keys: set[str] = set()
    dead = []
    for log in files.list("runs"):
        name = log.removeprefix(LOGS)
        if name in (log, but):
            continue
        if not files.is_held(f"held-{name}"):
            dead.append(name)
            continue
        with contextlib.suppress(FileNotFoundError):  # the process ended meanwhile
            keys |= set(files.read(log).decode(errors="replace").split())
    return keys, dead
