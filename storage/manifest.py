"""The manifest: what an artifact is, written last; an artifact exists when its manifest does."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from puna.storage.errors import PunaError

FORMAT = 1
NAME = "manifest.json"


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
    """Everything known about an artifact; `metrics`, timings and versions are not part of its identity."""

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

    def to_json(self) -> str:
        """Indented JSON text."""
        return json.dumps(asdict(self), indent=1, ensure_ascii=False, allow_nan=False) + "\n"

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
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise PunaError(f"{file}: not a readable manifest ({error}); `puna verify` lists damaged artifacts") from error
