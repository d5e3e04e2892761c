"""The aliases of a store: `NAME@VERSION` points to an artifact. Each is a small checksummed file, changed by compare-and-swap.

refs/<name>/<version>.json   an alias
refs/.journal                a line for each alias that was ever set; lines are only added, so that a lost alias is noticed
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import re
from datetime import UTC, datetime
from pathlib import PurePosixPath

from puna.storage.artifact import Artifact
from puna.storage.errors import PunaError
from puna.storage.files import Files

JOURNAL = "refs/.journal"
ALIAS = re.compile(r"[\w-][\w.-]*@[\w-][\w.-]*")
NUMBERED = re.compile(r"(.*@[a-z]+-)([0-9]+)")
"""An alias that counts, such as policy@round-2. It never points to another artifact."""


class Aliases:
    """The aliases of one store."""

    def __init__(self, files: Files) -> None:
        self._files = files

    def target(self, alias: str) -> tuple[str, str] | None:
        """Return kind and key of the artifact that an alias points to, None where there is no such alias."""
        found = read_pointer(self._files, _file(alias))
        return None if found is None else (found["kind"], found["key"])

    def set(self, alias: str, artifact: Artifact, expected: str | None = None) -> str:
        """Point an alias at an artifact and return the alias.

        A numbered alias that stood for another artifact is passed over: the next free number is taken. `expected`: the key that
        the alias must point to before, empty for none.
        """
        if (counted := NUMBERED.fullmatch(alias)) is not None:
            return self._set_numbered(counted[1], int(counted[2]), artifact)
        file, data = _file(alias), pointer({"kind": artifact.kind, "key": artifact.key})
        while True:
            before = self._files.stat(file)
            if expected is not None and (now := (self.target(alias) or ("", ""))[1]) != expected:
                raise PunaError(f"{alias}: points to {now[:12] or 'nothing'}, not to {expected[:12]}; it was changed meanwhile")
            if self._files.swap(file, data, before.version if before else None):
                self._note(alias, artifact)
                return alias

    def _set_numbered(self, stem: str, first: int, artifact: Artifact) -> str:
        before, data = self.journal(), pointer({"kind": artifact.kind, "key": artifact.key})
        for number in itertools.count(first):
            alias = f"{stem}{number}"
            if before.get(alias, artifact.id) == artifact.id and self._files.swap(_file(alias), data, None):
                self._note(alias, artifact)
                return alias
            if self.target(alias) == (artifact.kind, artifact.key):
                return alias
        raise AssertionError("unreachable")

    def files(self) -> dict[str, str]:
        """Return the files of all aliases, by alias."""
        paths = (PurePosixPath(name) for name in self._files.list("refs") if is_pointer(name))
        return {f"{p.parent.name}@{p.stem}": str(p) for p in paths if len(p.parts) == 3 and not p.parts[1].startswith(".")}

    def keys(self) -> dict[str, str]:
        """Return every alias with the key that it points to."""
        pointers = {alias: read_pointer(self._files, file) for alias, file in self.files().items()}
        return {alias: found["key"] for alias, found in pointers.items() if found is not None}

    def journal(self) -> dict[str, str]:
        """Return every alias that was ever set, with the artifact that it first pointed to. A line that cannot be read is left out."""
        first: dict[str, str] = {}
        for line in self._files.read(JOURNAL).splitlines() if self._files.stat(JOURNAL) else ():
            with contextlib.suppress(ValueError, KeyError, TypeError):
                entry = json.loads(line)
                first.setdefault(str(entry["alias"]), str(entry["artifact"]))
        return first

    def _note(self, alias: str, artifact: Artifact) -> None:
        """Add an alias to the journal, unless the journal has it already."""
        if alias not in self.journal():
            line = {"time": datetime.now(UTC).isoformat(), "alias": alias, "artifact": artifact.id}
            self._files.append(JOURNAL, json.dumps(line).encode() + b"\n")


def _file(alias: str) -> str:
    if not ALIAS.fullmatch(alias):
        raise PunaError(f"{alias}: no such alias; one is NAME@VERSION, of letters, digits, `_`, `-` and `.`, for example policy@latest")
    name, _, version = alias.partition("@")
    return f"refs/{name}/{version}.json"


def is_pointer(name: str) -> bool:
    """True if a name is that of a pointer, and of none in the making."""
    return name.endswith(".json") and not name.rpartition("/")[2].startswith(".")


def pointer(data: dict[str, str]) -> bytes:
    """Return the content of a pointer file: JSON with a checksum."""
    return json.dumps(data | {"checksum": _checksum(data)}).encode() + b"\n"


def read_pointer(files: Files, name: str) -> dict[str, str] | None:
    """Return the fields of a pointer file, None where there is none. PunaError where it cannot be read or was damaged."""
    try:
        data = json.loads(files.read(name))
        if data.pop("checksum") != _checksum(data):
            raise ValueError("its checksum is wrong")
        return {str(field): str(value) for field, value in data.items()}
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        message = f"does not say what it points to ({error}); remove it, the next run sets it again"
        raise PunaError(f"{files.uri}/{name}: {message}") from error


def _checksum(data: dict[str, str]) -> str:
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()
