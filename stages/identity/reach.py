"""A cache of the code that symbols reach, since following code takes seconds.

An entry is valid while every source file it was built from, the list of Puna's files, the analyser's own code and the Python version are
unchanged. A damaged entry is ignored. Only code within Puna is cached, because data files may be added beside a user's module."""

from __future__ import annotations

import contextlib
import hashlib
import json
import platform
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from puna.stages.identity import sources
from puna.stages.identity.modules import source_file
from puna.storage import cache
from puna.storage.files import write_bytes

FOLDER = "code"


@dataclass(frozen=True)
class Reach:
    """The code, data files and libraries that some symbols reach.

    symbols    `module.symbol` → hash
    sources    source file → digest
    data       (name in a key, data file) for each opened data file
    libraries  top-level modules of libraries
    meaning    one hash of the symbols and their uses, without module names"""

    symbols: dict[str, str]
    sources: dict[str, str]
    data: list[tuple[str, str]]
    libraries: list[str]
    meaning: str

    @property
    def files(self) -> list[str]:
        return [*sorted(self.sources), *(file for _, file in self.data)]


_known: dict[str, Reach] = {}
"""Reaches that this process has read or computed, by their dependencies (`_of`)."""


def cached_reach(roots: Sequence[tuple[str, str]]) -> Reach | None:
    """Return the cached reach of these symbols, or None. Raise PunaError if a source has changed since this process imported it."""
    if not _own(roots):
        return None
    try:
        of = _of(roots)
        reach = _known[of] if of in _known else _read(roots, of)
        if any(sources.source_digest(file) != digest for file, digest in reach.sources.items()):
            return None
        if any(source_file(name) for name in reach.libraries):
            return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    sources.check(reach.sources)
    _known[of] = reach
    return reach


def _read(roots: Sequence[tuple[str, str]], of: str) -> Reach:
    """Return a cached entry. Raise ValueError, or an error of reading JSON, if it is damaged or out of date."""
    data = json.loads(_file(roots).read_bytes())
    if data["of"] != of or data["checksum"] != _checksum(data["reach"]):
        raise ValueError
    return Reach(**data["reach"])


def keep(roots: Sequence[tuple[str, str]], reach: Reach) -> None:
    """Save the reach of these symbols, if it contains only Puna's code and the cache is writable."""
    if not _own(name.split(".") for name in reach.symbols):
        return
    file, of, content = _file(roots), _of(roots), asdict(reach)
    _known[of] = reach
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        write_bytes(file, json.dumps({"of": of, "reach": content, "checksum": _checksum(content)}).encode(), lasting=False)


def _own(names: Iterable[Sequence[str]]) -> bool:
    return all(name[0].split(".")[0] == "puna" for name in names)


def _file(roots: Sequence[tuple[str, str]]) -> Path:
    """Return the cache file for these symbols of this checkout."""
    return cache.folder() / FOLDER / f"{hashlib.sha256(json.dumps([str(sources.ROOT), *roots]).encode()).hexdigest()[:32]}.json"


def _of(roots: Sequence[tuple[str, str]]) -> str:
    """Return, as JSON, everything that a cached entry depends on, except its source files."""
    return json.dumps([platform.python_version(), sources.contract(), sources.listing(), *roots])


def _checksum(content: object) -> str:
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()
