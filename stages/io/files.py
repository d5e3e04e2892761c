"""Files of an input that hold rows, and the data set's split of each."""

from __future__ import annotations

import re
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import PurePosixPath

from puna.stages.contract import External, ExternalFile
from puna.stages.io.convert import HELDOUT
from puna.stages.reading.files import suffix
from puna.stages.reading.rows import SIDECARS, format_of
from puna.storage import PunaError

BESIDE = (
    "", ".md", ".rst", ".txt", ".pdf", ".html", ".py", ".ipynb", ".sh", ".yaml", ".yml", ".toml", ".cfg", ".bib", ".svg", ".png", ".jpg",
    ".jpeg", ".gif",
)  # fmt: skip
"""Endings of what lies beside the rows of a repository: its description, licence, code and pictures."""
SHARD = re.compile(r"-\d{5}-of-\d{5}$")


@dataclass
class Found:
    """Files of an input: format and split by name, and the names of those without rows.

    Splits are known only of a data set whose files or folders are named by them, one of them `train`."""

    formats: dict[str, str] = field(default_factory=dict)
    splits: dict[str, str] = field(default_factory=dict)
    beside: list[str] = field(default_factory=list)

    def heldout(self, name: str) -> bool:
        """True if a file's split is not for training."""
        return self.splits.get(name, "") in HELDOUT


def look(external: External, format: str) -> Found:
    """Inspect the files of an input. PunaError if none holds rows, or the format of one is unclear."""
    found, whole = Found(), len(external.files) == 1
    for file in external.files:
        if PurePosixPath(file.name).name in SIDECARS or not file.bytes:
            continue
        aside = not whole and suffix(file.name) in BESIDE
        kind = format_of(file.name, b"") or ("" if aside else format)
        if kind and format != "auto":
            kind = format
        elif kind == "auto" or (aside and not suffix(file.name)):
            kind = _by_content(file)
        if kind:
            found.formats[file.name] = kind
        elif not aside:
            raise PunaError(
                f"{file.location}: is neither JSON, Parquet, CSV, TSV nor a saved data set by name and beginning; say which with format"
            )
        else:
            found.beside.append(file.name)
    if found.beside and not found.formats:
        raise PunaError(f"input {external.uri}: none of its {len(external.files)} files holds rows: {', '.join(found.beside[:5])}")
    splits = {name: split for name in found.formats if (split := split_named(name))}
    if not whole and "train" in splits.values():
        found.splits = splits
    return found


def _by_content(file: ExternalFile) -> str:
    with closing(file.open()) as handle:
        return format_of(file.name, handle.read(4096)) or ""


def split_named(name: str) -> str:
    """Return the split named by a file or a folder above it: `train-00000-of-00002`, `hh_test.jsonl`, `validation/…`."""
    path = PurePosixPath(name.lower())
    stem = SHARD.sub("", path.name.partition(".")[0])
    words = [word for part in (stem, *reversed(path.parts[:-1])) for word in re.split(r"[-._ ]+", part)]
    return next((word for word in words if word in ("train", *HELDOUT)), "")
