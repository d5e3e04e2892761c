"""The manifest: the description of an artifact. It is written last, and an artifact exists if its manifest does."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from puna.storage import digest
from puna.storage.errors import PunaError
from puna.storage.files import Files
from puna.storage.schemas import TABLES, table_schema
from puna.storage.shards import FileRecord, Shard

FORMAT = 2
NAME = "manifest.json"
SMALL = 1 << 20  # maximum size in bytes of manifests that a process caches
IMPORT = "import"  # stage name in manifests of imported tables, which no stage made


@dataclass(frozen=True)
class InputRecord:
    """One input of a stage: an artifact, or external files when `kind` is `external`."""

    name: str
    kind: str
    key: str
    data_digest: str
    stage: str = ""


@dataclass(frozen=True)
class Source:
    """An artifact whose rows a table keeps by reference, and the digest of that artifact's main table."""

    kind: str
    key: str
    digest: str


@dataclass(frozen=True)
class TableRecord:
    """One stored table: its shards in key order, and its `sources`. `cut`: number of shards with fixed id bounds; 0: other bounds."""

    rows: int
    digest: str
    columns: dict[str, str]
    shards: list[Shard]
    cut: int = 1
    sources: list[Source] = field(default_factory=list)

    @property
    def characters(self) -> int:
        return sum(s.characters or 0 for s in self.shards)

    @property
    def files(self) -> set[str]:
        return {name for s in self.shards for name in (s.file, s.order, s.facts) if name}


@dataclass(frozen=True)
class Manifest:
    """All that is recorded about an artifact. `metrics`, timings and versions are not part of its identity.

    `inputs_compared`: the checksums of all files that the stage declares to read were verified after it read them. `timings`: wall and CPU
    seconds of the stage and its workers. `peak_memory_bytes`: largest sampled resident memory of the stage and its workers together.
    `libraries`: versions. `project`: the run's project, empty for the default project. `checksum`: a checksum of all other fields."""

    kind: str
    key: str
    stage: str
    data_digest: str
    code_version: str
    code: dict[str, str]
    config: dict[str, Any]
    inputs: list[InputRecord]
    tables: dict[str, TableRecord]
    files: dict[str, FileRecord]
    inputs_compared: bool = False
    metrics: dict[str, bool | int | float | str] = field(default_factory=dict)
    figures: dict[str, Any] = field(default_factory=dict)
    timings: dict[str, float] = field(default_factory=dict)
    peak_memory_bytes: int = 0
    libraries: dict[str, str] = field(default_factory=dict)
    seed: int | None = None
    run: str = ""
    project: str = ""
    created_at: str = ""
    format: int = FORMAT
    checksum: str = ""

    def to_json(self) -> str:
        """Return the manifest as JSON text, one line per field, with a checksum over all other fields."""
        data: dict[str, Any] = json.loads(json.dumps(vars(self), default=vars, allow_nan=False))
        lines = (f" {json.dumps(n)}: {json.dumps(v, ensure_ascii=False)}" for n, v in (data | {"checksum": _checksum(data)}).items())
        return "{\n" + ",\n".join(lines) + "\n}\n"

    @property
    def sources(self) -> list[Source]:
        return [source for table in self.tables.values() for source in table.sources]

    def contradictions(self) -> list[str]:
        """Return a clause for each inconsistency in the manifest, which indicates manual edits; [] if there is none."""
        sentences = []
        if self.data_digest != content_digest(self.tables, self.files):
            sentences.append("data_digest does not match its tables and files")
        for name, table in self.tables.items():
            if table.digest != table_digest(table.columns, table.shards) or table.rows != sum(s.rows for s in table.shards):
                sentences.append(f"the table {name} does not match its shards")
        if self.code and self.code_version != code_version(self.code):
            sentences.append("code_version does not match its code")
        # An import's key depends on the order in which its rows came, which is not recorded.
        if self.stage != IMPORT and self.key != key_of(self.stage, self.code_version, self.config, self.inputs):
            sentences.append("key does not match its stage, code, config and inputs")
        return sentences

    @classmethod
    def read(cls, files: Files, name: str) -> Manifest:
        """Return the manifest in a file of the store. Raise PunaError if it cannot be read, was changed or has another format."""
        try:
            data = files.read(name)
            return _parse(data) if len(data) <= SMALL else _parse.__wrapped__(data)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise PunaError(f"{files.uri}/{name}: not a readable manifest ({error}); `puna verify` lists damaged artifacts") from error


@lru_cache(maxsize=256)
def _parse(data: bytes) -> Manifest:
    """Return the manifest in a JSON text, cached. If it is invalid, raise ValueError, KeyError, TypeError or AttributeError."""
    value = json.loads(data)
    if value.get("format") != FORMAT:
        raise ValueError(f"it has format {value.get('format')}; this Puna reads {FORMAT}")
    inputs, files = [InputRecord(**one) for one in value["inputs"]], {name: FileRecord(**one) for name, one in value["files"].items()}
    manifest = Manifest(**value | {"inputs": inputs, "files": files, "tables": {n: _table(one) for n, one in value["tables"].items()}})
    if unknown := set(manifest.tables) - set(TABLES):
        raise ValueError(f"unknown tables {sorted(unknown)}")
    if manifest.checksum != _checksum(value):
        raise ValueError("; ".join(["it was changed: its checksum does not match", *manifest.contradictions()]))
    return manifest


def _table(value: dict[str, Any]) -> TableRecord:
    shards, sources = [Shard.of(one) for one in value["shards"]], [Source(**one) for one in value["sources"]]
    return TableRecord(**value | {"shards": shards, "sources": sources})


def key_of(stage: str, code_version: str, config: dict[str, Any], inputs: list[InputRecord]) -> str:
    """Return the key of a stage's output: sha256 over stage, code version, configuration, and the inputs' names, kinds and data digests."""
    return digest.of_value(
        {"stage": stage, "code": code_version, "config": config, "inputs": [[i.name, i.kind, i.data_digest] for i in inputs]}
    )


MEANING = "meaning"  # the name, among a stage's code symbols, of the single hash of all its code without module names


def code_version(symbols: dict[str, str]) -> str:
    """Return one hash of a stage's code, given as name → hash; 64 hex digits. If `MEANING` is given, ignore names with `.` or `:`."""
    relevant = {name: value for name, value in symbols.items() if MEANING not in symbols or ("." not in name and ":" not in name)}
    return digest.of_value({"format": FORMAT, "symbols": relevant})


def table_digest(columns: dict[str, str], shards: list[Shard]) -> str:
    """Return the digest of a table: sha256 over its columns and the digests of its shards that have rows."""
    return digest.of_value({"columns": columns, "shards": [s.digest for s in shards if s.rows]})


def content_digest(tables: dict[str, TableRecord], files: dict[str, FileRecord]) -> str:
    """Return the data digest: sha256 over the content of the tables with `identity`, and over the bytes of files outside tables."""
    others = {n: r.sha256 for n, r in files.items() if not any(n in t.files for t in tables.values())}
    return digest.of_value({"tables": {n: r.digest for n, r in tables.items() if table_schema(n).identity}, "files": others})


def _checksum(data: dict[str, Any]) -> str:
    text = json.dumps({name: value for name, value in data.items() if name != "checksum"}, sort_keys=True, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()
