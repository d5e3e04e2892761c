"""The manifest: what an artifact is, written last; an artifact exists when its manifest does."""

from __future__ import annotations

import hashlib
import json
import types
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from typing import Any, Union, get_args, get_origin, get_type_hints

from puna.storage import digest
from puna.storage.errors import PunaError
from puna.storage.files import Files
from puna.storage.schemas import TABLES, table_schema
from puna.storage.shards import FileRecord, Shard

FORMAT = 2
NAME = "manifest.json"
IMPORT = "import"
"""The stage of tables that came from outside any stage."""


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
    """An artifact whose rows a table keeps by reference, and the digest of its table."""

    kind: str
    key: str
    digest: str


@dataclass(frozen=True)
class TableRecord:
    """One stored table: its shards in the order of the key, and the artifacts whose rows it keeps by reference.

    `cut`: number of shards that the ids are cut into; 0: every shard's range is its own.
    """

    rows: int
    digest: str
    columns: dict[str, str]
    shards: list[Shard]
    cut: int = 1
    sources: list[Source] = field(default_factory=list)

    @property
    def files(self) -> set[str]:
        """Names of its files."""
        return {name for s in self.shards for name in (s.file, s.order, s.facts) if name}


@dataclass(frozen=True)
class Manifest:
    """Everything known about an artifact; `metrics`, timings and versions are not part of its identity.

    `timings`: wall and CPU seconds of the stage and its workers. `peak_memory_bytes`: the largest sum of their resident
    memory, sampled. `libraries`: versions. `checksum`: of all the rest.
    """

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
    metrics: dict[str, bool | int | float | str] = field(default_factory=dict)
    figures: dict[str, Any] = field(default_factory=dict)
    timings: dict[str, float] = field(default_factory=dict)
    peak_memory_bytes: int = 0
    libraries: dict[str, str] = field(default_factory=dict)
    seed: int | None = None
    run: str = ""
    created_at: str = ""
    format: int = FORMAT
    checksum: str = ""

    def to_json(self) -> str:
        """Indented JSON text, with a checksum over everything else in it."""
        data = json.loads(json.dumps(asdict(self), allow_nan=False))
        return json.dumps(data | {"checksum": _checksum(data)}, indent=1, ensure_ascii=False) + "\n"

    @property
    def sources(self) -> list[Source]:
        """The artifacts that hold some of its rows."""
        return [source for table in self.tables.values() for source in table.sources]

    def contradictions(self) -> list[str]:
        """Where the manifest does not agree with itself: it was edited by hand. Empty when it is as it was written."""
        found = []
        if self.data_digest != content_digest(self.tables, self.files):
            found.append("data_digest is not that of its tables and files")
        for name, table in self.tables.items():
            if table.digest != table_digest(table.columns, table.shards) or table.rows != sum(s.rows for s in table.shards):
                found.append(f"the table {name} is not that of its shards")
        if self.code and self.code_version != code_version(self.code):
            found.append("code_version is not that of its code")
        # The key of an import is that of its rows in the order they came in, which is not kept.
        if self.stage != IMPORT and self.key != key_of(self.stage, self.code_version, self.config, self.inputs):
            found.append("key is not that of its stage, code, config and inputs")
        if self.checksum != _checksum(json.loads(json.dumps(asdict(self)))):
            found.append("checksum is not that of the manifest")
        return found

    @classmethod
    def read(cls, files: Files, name: str) -> Manifest:
        """The manifest in a file of the store; PunaError when it is not one of this format."""
        where = f"{files.uri}/{name}"
        try:
            data = json.loads(files.read(name))
            if data.get("format") != FORMAT:
                raise PunaError(f"{where}: manifest format {data.get('format')}; this Puna reads {FORMAT}")
            made: Manifest = _built(cls, data, "manifest")
            if unknown := set(made.tables) - set(TABLES):
                raise ValueError(f"unknown tables {sorted(unknown)}")
            return made
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise PunaError(f"{where}: not a readable manifest ({error}); `puna verify` lists damaged artifacts") from error


def _built(kind: Any, value: Any, where: str) -> Any:
    """A JSON value as what the annotation `kind` says; ValueError names the field that is of another type."""
    origin = get_origin(kind)
    if kind is Any:
        return value
    if is_dataclass(kind) and isinstance(kind, type):
        if not isinstance(value, dict):
            raise ValueError(f"{where} is a {type(value).__name__}, not an object")
        hints, known = get_type_hints(kind), {f.name for f in fields(kind)}
        if unknown := set(value) - known:
            raise ValueError(f"{where} has unknown fields {sorted(unknown)}")
        return kind(**{n: _built(hints[n], v, f"{where}.{n}") for n, v in value.items()})
    if origin in (Union, types.UnionType):
        allowed = get_args(kind)
        if not any(_is(value, one) for one in allowed):
            raise ValueError(f"{where} is a {type(value).__name__}")
        return value
    if origin is dict and isinstance(value, dict):
        return {n: _built(get_args(kind)[1], v, f"{where}.{n}") for n, v in value.items()}
    if origin in (list, tuple) and isinstance(value, list):
        return origin(_built(get_args(kind)[0], v, f"{where}[{n}]") for n, v in enumerate(value))
    if not (isinstance(kind, type) and _is(value, kind)):
        raise ValueError(f"{where} is a {type(value).__name__}")
    return value


def _is(value: Any, kind: type) -> bool:
    if kind in (int, float):
        return isinstance(value, (int, kind)) and not isinstance(value, bool)
    return isinstance(value, kind)


def key_of(stage: str, code_version: str, config: dict[str, Any], inputs: list[InputRecord]) -> str:
    """The key of what a stage makes: sha256 over stage, code version, configuration and the inputs' data digests."""
    return digest.of_value(
        {"stage": stage, "code": code_version, "config": config, "inputs": [[i.name, i.kind, i.data_digest] for i in inputs]}
    )


def code_version(symbols: dict[str, str]) -> str:
    """One hash for the code that a stage reaches, given as name → hash; 64 hex digits."""
    return digest.of_value({"format": FORMAT, "symbols": symbols})


def table_digest(columns: dict[str, str], shards: list[Shard]) -> str:
    """The digest of a table: sha256 over its columns and the digests of its shards that have rows."""
    return digest.of_value({"columns": columns, "shards": [s.digest for s in shards if s.rows]})


def content_digest(tables: dict[str, TableRecord], files: dict[str, FileRecord]) -> str:
    """The data digest: sha256 over the logical content of the tables that count and the bytes of all other files."""
    return digest.of_value(
        {
            "tables": {n: r.digest for n, r in tables.items() if table_schema(n).identity},
            "files": {n: r.sha256 for n, r in files.items() if not any(n in t.files for t in tables.values())},
        }
    )


def _checksum(data: dict[str, Any]) -> str:
    text = json.dumps({name: value for name, value in data.items() if name != "checksum"}, sort_keys=True, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()
