"""An artifact: an immutable, committed folder of tables and files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from puna.storage import digest
from puna.storage.errors import PunaError
from puna.storage.manifest import NAME, Manifest
from puna.storage.tables import Part, batches_of

PART_ROWS = 1024


@dataclass(frozen=True)
class Artifact:
    """A reference to one committed artifact; everything is read from its folder on demand."""

    kind: str
    key: str
    folder: Path

    @classmethod
    def at(cls, folder: Path) -> Artifact:
        """The artifact in `folder` (…/objects/<kind>/<k[:2]>/<key>)."""
        return cls(folder.parent.parent.name, folder.name, folder)

    @cached_property
    def manifest(self) -> Manifest:
        """Its manifest."""
        return Manifest.read(self.folder / NAME)

    @property
    def data_digest(self) -> str:
        """Digest of its logical content, 64 hex digits."""
        return self.manifest.data_digest

    @property
    def id(self) -> str:
        """Short name for people: kind and the first 12 digits of the key."""
        return f"{self.kind}/{self.key[:12]}"

    @property
    def tables(self) -> tuple[str, ...]:
        """Names of its tables; the main table has the name of the kind."""
        return tuple(self.manifest.tables)

    def path(self, name: str = "") -> Path:
        """Local path of a file of the artifact, or of its folder."""
        path = self.folder / name if name else self.folder
        if not path.exists():
            raise PunaError(f"artifact {self.id} has no file {name!r}; it has {', '.join(self.manifest.files)}")
        return path

    def _file(self, table: str | None) -> Path:
        name = table or self.kind
        if name not in self.manifest.tables:
            raise PunaError(f"artifact {self.id} has no table {name!r}; it has {', '.join(self.tables) or 'none'}")
        return self.folder / f"{name}.parquet"

    def rows(self, table: str | None = None) -> int:
        """Rows of a table (default: the main one)."""
        self._file(table)
        return self.manifest.tables[table or self.kind].rows

    def read(self, table: str | None = None, columns: list[str] | None = None) -> pa.Table:
        """A whole table, sorted by its primary key."""
        return pq.ParquetFile(self._file(table)).read(columns=columns)

    def batches(self, table: str | None = None, columns: list[str] | None = None, rows: int = 8192) -> Iterator[pa.RecordBatch]:
        """A table in batches, in order, within bounded memory."""
        yield from batches_of(self._file(table), rows, columns)

    def parts(self, table: str | None = None, columns: list[str] | None = None, rows: int = PART_ROWS) -> list[Part]:
        """The table cut into parts of at most `rows` rows, to be read where the work is done."""
        file, total = str(self._file(table)), self.rows(table)
        chosen = tuple(columns) if columns is not None else None
        return [Part(file, start, min(start + rows, total), chosen) for start in range(0, total, rows)]

    def damage(self, read: Sequence[str] = ()) -> list[str]:
        """What is wrong with it, empty when it is whole.

        A manifest that cannot be read, lies elsewhere or was edited; a file missing, unknown, of another size or with
        another checksum. `read`: files, or folders ending in /, whose checksums alone are compared; none: all.
        """
        try:
            manifest = self.manifest
            found = [f"manifest.json was changed: {what}" for what in manifest.contradictions()]
        except PunaError as error:
            return [str(error)]
        if (manifest.kind, manifest.key) != (self.kind, self.key):
            found.append(f"manifest.json is that of {manifest.kind}/{manifest.key[:12]}")
        present = {str(f.relative_to(self.folder)) for f in self.folder.rglob("[!.]*") if not f.is_dir()} - {NAME}
        found += [f"{name} is not in the manifest" for name in sorted(present - set(manifest.files))]
        for name, record in manifest.files.items():
            file = self.folder / name
            if not file.is_file():
                found.append(f"{name} is missing")
            elif file.stat().st_size != record.bytes:
                found.append(f"{name} has {file.stat().st_size} bytes instead of {record.bytes}")
            elif (not read or name.startswith(tuple(read))) and digest.of_file(file) != record.sha256:
                found.append(f"{name} has a wrong checksum")
        return found
