"""The manifest: what an artifact is, written last; an artifact exists when its manifest does."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from puna.storage import digest
from puna.storage.errors import PunaError
from puna.storage.schemas import table_schema

FORMAT = 1
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
class TableRecord:
    """One stored table."""

    rows: int
    digest: str
    columns: dict[str, str]


@dataclass(frozen=True)
class FileRecord:
    """One stored file."""

    bytes: int
    sha256: str


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
    metrics: dict[str, Any] = field(default_factory=dict)
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

    def contradictions(self) -> list[str]:
        """Where the manifest does not agree with itself: it was edited by hand. Empty when it is as it was written."""
        found = []
        if self.data_digest != content_digest(self.tables, self.files):
            found.append("data_digest is not that of its tables and files")
        if self.code and self.code_version != code_version(self.code):
            found.append("code_version is not that of its code")
        # The key of an import is that of its rows in the order they came in, which is not kept.
        if self.stage != IMPORT and self.key != key_of(self.stage, self.code_version, self.config, self.inputs):
            found.append("key is not that of its stage, code, config and inputs")
        if self.checksum and self.checksum != _checksum(asdict(self)):
            found.append("checksum is not that of the manifest")
        return found

    @classmethod
    def read(cls, file: Path) -> Manifest:
        """The manifest in `file`; PunaError when it is not one of this format."""
        try:
            data = json.loads(file.read_text(encoding="utf-8"))
            if data.get("format") != FORMAT:
                raise PunaError(f"{file}: manifest format {data.get('format')}; this Puna reads {FORMAT}")
            known = {f.name for f in fields(cls)}
            if unknown := set(data) - known:
                raise PunaError(f"{file}: unknown manifest fields {sorted(unknown)}")
            data["inputs"] = [InputRecord(**item) for item in data["inputs"]]
            data["tables"] = {name: TableRecord(**item) for name, item in data["tables"].items()}
            data["files"] = {name: FileRecord(**item) for name, item in data["files"].items()}
            return cls(**data)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise PunaError(f"{file}: not a readable manifest ({error}); `puna verify` lists damaged artifacts") from error


def key_of(stage: str, code_version: str, config: dict[str, Any], inputs: list[InputRecord]) -> str:
    """The key of what a stage makes: sha256 over stage, code version, configuration and the inputs' data digests."""
    return digest.of_value(
        {"stage": stage, "code": code_version, "config": config, "inputs": [[i.name, i.kind, i.data_digest] for i in inputs]}
    )


def code_version(symbols: dict[str, str]) -> str:
    """One hash for the code that a stage reaches, given as name → hash; 64 hex digits."""
    return digest.of_value({"format": FORMAT, "symbols": symbols})


def content_digest(tables: dict[str, TableRecord], files: dict[str, FileRecord]) -> str:
    """The data digest: sha256 over the logical content of the tables that count and the bytes of all other files."""
    return digest.of_value(
        {
            "tables": {n: r.digest for n, r in tables.items() if table_schema(n).identity},
            "files": {n: r.sha256 for n, r in files.items() if n.removesuffix(".parquet") not in tables},
        }
    )


def _checksum(data: dict[str, Any]) -> str:
    text = json.dumps({name: value for name, value in data.items() if name != "checksum"}, sort_keys=True, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()
