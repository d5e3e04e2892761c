"""What code reaches, kept for the next process: following it takes seconds, and it rarely changes.

What was kept counts while every source that was reached is the one that it was made of, the same files lie in Puna's folders, and
it was found out by the same contract under the same Python. A damaged file counts for nothing. Only what reaches nothing but Puna's
own sources is kept: beside a user's module another data file may appear at any time.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from puna.stages.identity import sources
from puna.stages.identity.modules import source_file
from puna.storage import cache

FOLDER = "code"


@dataclass(frozen=True)
class Reach:
    """What some symbols reach. `symbols`: `module.symbol` → hash. `sources`: the files that they come from, with their digests.

    `data`: the data files that they open, with the name that each has in a key. `libraries`: top-level modules from outside.
    `meaning`: one hash of the symbols and of what each uses, wherever they stand.
    """

    symbols: dict[str, str]
    sources: dict[str, str]
    data: list[tuple[str, str]]
    libraries: list[str]
    meaning: str

    @property
    def files(self) -> list[str]:
        """All files that were read."""
        return [*sorted(self.sources), *(file for _, file in self.data)]


_known: dict[str, Reach] = {}
"""What this process knows, by what it depends on."""


def kept(roots: Sequence[tuple[str, str]]) -> Reach | None:
    """What was found before that these symbols (module, name) reach; None where that does not hold, or nothing is kept.

    PunaError where a source is no longer what this process imported.
    """
    if not _own(roots):
        return None
    try:
        of = _of(roots)
        found = _known[of] if of in _known else _read(roots, of)
        if any(sources.seen(file) != digest for file, digest in found.sources.items()):
            return None
        if any(source_file(name) for name in found.libraries):
            return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    sources.check(found.sources)
    _known[of] = found
    return found


def _read(roots: Sequence[tuple[str, str]], of: str) -> Reach:
    """What an earlier process kept; raises where that is damaged, or depends on something else."""
    data = json.loads(_file(roots).read_bytes())
    if data["of"] != of or data["checksum"] != _checksum(data["reach"]):
        raise ValueError
    return Reach(**data["reach"])


def keep(roots: Sequence[tuple[str, str]], found: Reach) -> None:
    """Keep what these symbols reach, where it may be written."""
    if not _own(name.split(".") for name in found.symbols):
        return
    file, of, content = _file(roots), _of(roots), asdict(found)
    _known[of] = found
    temporary = file.with_name(f".{file.name}.{uuid.uuid4().hex}")
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps({"of": of, "reach": content, "checksum": _checksum(content)}))
        os.replace(temporary, file)


def _own(names: Iterable[Sequence[str]]) -> bool:
    return all(name[0].split(".")[0] == "puna" for name in names)


def _file(roots: Sequence[tuple[str, str]]) -> Path:
    """One file for the symbols of one checkout, written anew when they reach something else."""
    return cache.folder() / FOLDER / f"{hashlib.sha256(json.dumps([str(sources.ROOT), *roots]).encode()).hexdigest()[:32]}.json"


def _of(roots: Sequence[tuple[str, str]]) -> str:
    """What the result depends on beside the sources that were reached."""
    return json.dumps([platform.python_version(), sources.contract(), sources.listing(), *roots])


def _checksum(content: object) -> str:
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()
