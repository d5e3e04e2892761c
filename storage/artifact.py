"""An artifact: an immutable, committed folder of tables and files."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pyarrow as pa

from puna.storage.digest import of_stored
from puna.storage.errors import PunaError
from puna.storage.files import Files
from puna.storage.manifest import NAME, Manifest, TableRecord
from puna.storage.parts import Beside, Part, ShardRows, Stored, between
from puna.storage.schemas import table_schema
from puna.storage.shards import Shard

CHECKED = ".checked"  # name of a file beside a manifest that lists the versions of the artifact's files whose checksums have been verified


@dataclass(frozen=True)
class Artifact:
    """A reference to one committed artifact. Its manifest, tables and files are read on demand."""

    kind: str
    key: str
    files: Files

    def __reduce__(self) -> tuple[Any, ...]:
        return Artifact, (self.kind, self.key, self.files)

    @property
    def place(self) -> str:
        return place_of(self.kind, self.key)

    @property
    def folder(self) -> Path:
        return self.files.local(self.place)

    @cached_property
    def manifest(self) -> Manifest:
        return Manifest.read(self.files, f"{self.place}/{NAME}")

    @property
    def data_digest(self) -> str:
        """Return the digest of the artifact's logical content, 64 hex digits."""
        return self.manifest.data_digest

    @property
    def id(self) -> str:
        """Return a short, readable name: the kind and the first 12 digits of the key."""
        return f"{self.kind}/{self.key[:12]}"

    @property
    def tables(self) -> tuple[str, ...]:
        """Return the names of the artifact's tables; the main table has the name of the kind."""
        return tuple(self.manifest.tables)

    def path(self, name: str = "") -> Path:
        """Return the path of a file of the artifact or of its folder (object store: of a cached copy). Raise PunaError if it is missing."""
        path = self.files.local(f"{self.place}/{name}" if name else self.place)
        if not path.exists():
            raise PunaError(f"artifact {self.id} has no file {name!r}; it has {', '.join(self.manifest.files)}")
        return path

    def record(self, table: str | None = None) -> TableRecord:
        """Return the manifest's record of a table (default: the main table). Raise PunaError if there is no such table."""
        name = table or self.kind
        if name not in self.manifest.tables:
            raise PunaError(f"artifact {self.id} has no table {name!r}; it has {', '.join(self.tables) or 'none'}")
        return self.manifest.tables[name]

    def columns(self, table: str | None = None) -> list[str]:
        return list(self.record(table).columns)

    def rows(self, table: str | None = None) -> int:
        return self.record(table).rows

    def stored_file(self, name: str, groups: tuple[int, ...] = ()) -> Stored:
        return Stored(self.files, f"{self.place}/{name}", self.manifest.files[name].sha256, groups)

    def sources(self, table: str | None = None) -> list[Artifact]:
        """Return the other artifacts that hold rows of the table. Raise PunaError if one no longer exists."""
        artifacts = [Artifact(source.kind, source.key, self.files) for source in self.record(table).sources]
        if lost := next((one for one in artifacts if self.files.stat(f"{one.place}/{NAME}") is None), None):
            raise PunaError(f"artifact {self.id} refers to rows of {lost.id}, which is not in the store")
        return artifacts

    def shards(self, table: str | None = None) -> list[ShardRows]:
        """Return the table's shards by reference, in primary key order."""
        return self._shards(table, lambda artifact, shard: artifact.stored_file(shard.file, shard.groups) if shard.file else None)

    def facts(self) -> list[ShardRows]:
        """Return shards of the documents' columns `digest` and `characters`, with the same boundaries as the documents' shards."""
        return self._shards(None, lambda artifact, shard: artifact.stored_file(shard.facts, (shard.own,)) if shard.facts else None)

    def _shards(self, table: str | None, stored: Callable[[Artifact, Shard], Stored | None]) -> list[ShardRows]:
        """Return a table's shards. `stored` returns the file with an artifact's own rows of a shard, or None if there are none."""
        record = self.record(table)
        files = [self, *self.sources(table)]
        columns = [artifact.record(table if artifact is self else artifact.kind).shards for artifact in files]
        owns = [tuple(map(stored, files, same)) for same in zip(*columns, strict=True)]
        return [
            ShardRows(shard.rows, tuple(shard.low), tuple(shard.high), own, self.stored_file(shard.order) if shard.order else None)
            for shard, own in zip(record.shards, owns, strict=True)
        ]

    def read(self, table: str | None = None, columns: list[str] | None = None) -> pa.Table:
        """Return a whole table, sorted by its primary key."""
        tables = [shard.read(0, shard.rows, columns) for shard in self.shards(table) if shard.rows]
        return pa.concat_tables(tables) if tables else self._empty(table, columns)

    def schema(self, table: str | None = None) -> pa.Schema:
        schema, own = table_schema(table or self.kind), self.record(table).columns
        more = [pa.field(name, pa.type_for_alias(kind)) for name, kind in own.items() if name not in schema.schema.names]
        return schema.schema_for(pa.schema([*schema.schema, *more]))

    def _empty(self, table: str | None, columns: Sequence[str] | None) -> pa.Table:
        empty = self.schema(table).empty_table()
        return empty if columns is None else empty.select(list(columns))

    def batches(self, table: str | None = None, columns: list[str] | None = None, rows: int = 8192) -> Iterator[pa.RecordBatch]:
        """Yield a table in order, in batches of at most `rows` rows, within bounded memory."""
        for shard in self.shards(table):
            for start, stop in shard.pieces():
                yield from shard.read(start, stop, columns).combine_chunks().to_batches(max_chunksize=rows)

    def parts(self, table: str | None = None, columns: list[str] | None = None, rows: int | None = None) -> list[Part]:
        """Return the table's parts of at most `rows` rows each (None: about a row group). A worker reads its part itself."""
        names, parts, before = None if columns is None else tuple(columns), list[Part](), 0
        for shard in self.shards(table):
            parts += [Part(shard, first, last - first, before + first, names) for first, last in shard.pieces(rows)]
            before += shard.rows
        return parts

    def between(self, low: str, high: str, table: str | None = None, columns: list[str] | None = None) -> pa.Table:
        """Return the rows with ids (the table's first key column) from `low` to `high`, both included."""
        tables = list(between(self.shards(table), low, f"{high}\0", columns, table_schema(table or self.kind).key[0]))
        return pa.concat_tables(tables) if tables else self._empty(table, columns)

    def beside(self, columns: list[str] | None = None, table: str | None = None) -> Beside:
        """Return the table as an argument of `run.transform`, whose function then gets this table's rows with the ids of each part."""
        return Beside(tuple(self.shards(table)), self._empty(table, columns).schema)

    def damage(self, read: Sequence[str] = (), *, quick: bool = False, own: bool = False, seen: set[str] | None = None) -> list[str]:
        """Return one clause per damage found; [] if the artifact is intact (the verified files are then recorded).

        Damage is: a manifest that is unreadable, edited or another artifact's; a file that is missing, not in the manifest, or has a wrong
        size or checksum; rows kept by reference whose artifact is gone, damaged or changed. `read`: verify checksums only of files whose
        names begin with one of these prefixes (NAME.parquet also stands for NAME/); empty: of all files. `quick`: skip the checksum of a
        file whose version (`Stat`) is that of its last verification. This still detects changed, truncated, replaced or removed files; only
        a full check detects bit rot. `own`: skip the artifacts whose rows this artifact keeps by reference. `seen`: checked folders."""
        try:
            manifest = self.manifest
            damage = [f"manifest.json was changed: {what}" for what in manifest.contradictions()]
        except PunaError as error:
            return [str(error)]
        if (manifest.kind, manifest.key) != (self.kind, self.key):
            damage.append(f"manifest.json belongs to {manifest.kind}/{manifest.key[:12]}")
        stats, known = self.files.stats(self.place), manifest.files
        present = {n: s for n, s in stats.items() if n in known or not any(p.startswith(".") for p in n.split("/"))}
        damage += [f"{name} is not in the manifest" for name in sorted(set(present) - set(manifest.files) - {NAME})]
        before = self._checked_versions()
        unchanged = before if quick else {}
        good: dict[str, str] = {}
        for name, record in manifest.files.items():
            compared = not read or name.startswith((*read, *map(_stem, read)))
            if name not in present:
                damage.append(f"{name} is missing")
            elif present[name].bytes != record.bytes:
                damage.append(f"{name} has {present[name].bytes} bytes instead of {record.bytes}")
            elif compared and unchanged.get(name) != present[name].version:
                if of_stored(self.files, f"{self.place}/{name}") != record.sha256:
                    damage.append(f"{name} has a wrong checksum")
                else:
                    good[name] = present[name].version
        seen = set() if seen is None else seen
        for source in () if own else manifest.sources:
            damage += self._damage_of_sources(source.kind, source.key, source.digest, read, quick, seen)
        if not damage and before | good != before:
            self.remember(before | good)
        return damage

    def _damage_of_sources(self, kind: str, key: str, digest: str, read: Sequence[str], quick: bool, seen: set[str]) -> list[str]:
        source = Artifact(kind, key, self.files)
        if self.files.stat(f"{source.place}/{NAME}") is None:
            return [f"it refers to rows of {source.id}, which is not in the store"]
        try:
            if source.record().digest != digest:
                return [f"it refers to rows of {source.id}, whose content has changed"]
        except PunaError as error:
            return [str(error)]
        if source.place in seen:
            return []
        seen.add(source.place)
        return [f"it refers to rows of {source.id}: {what}" for what in source.damage(read, quick=quick, seen=seen)]

    def _checked_versions(self) -> dict[str, str]:
        try:
            versions = json.loads(self.files.read(f"{self.place}/{CHECKED}"))
            return {str(n): str(v) for n, v in versions.items()}
        except (OSError, ValueError, AttributeError):
            return {}

    def remember(self, versions: dict[str, str] | None = None) -> None:
        """Record the versions of files with verified checksums (default: of all current files), if the store is writable."""
        if versions is None:
            versions = {n: s.version for n, s in self.files.stats(self.place).items() if n in self.manifest.files}
        with contextlib.suppress(OSError):
            self.files.write(f"{self.place}/{CHECKED}", json.dumps(versions).encode(), lasting=False)


def _stem(name: str) -> str:
    """Return the folder of a table's files, `dropped/` for `dropped.parquet`; other names are returned unchanged."""
    return name.removesuffix(".parquet") + "/" if name.endswith(".parquet") else name


def place_of(kind: str, key: str) -> str:
    """Return the name of the folder of the artifact with this kind and key, whether or not it exists."""
    return f"objects/{kind}/{key[:2]}/{key}"
