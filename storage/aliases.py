"""The aliases of a store: names that point to artifacts, by project. An alias is a small file with a checksum, changed by compare-and-swap.

refs/<name>/<version>.json                       NAME@VERSION of the project `default`
refs/.projects/<project>/<name>/<version>.json   NAME@VERSION of another project, which others call PROJECT/NAME@VERSION
refs/.journal                                    a line for each alias that was ever set, so that lost aliases are noticed"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from datetime import UTC, datetime

from puna.storage import index
from puna.storage.artifact import Artifact
from puna.storage.errors import PunaError
from puna.storage.files import Files

DEFAULT = "default"  # the project that is used if none is named
JOURNAL = "refs/.journal"
FIELDS = {"time", "alias", "artifact"}
PROJECTS = "refs/.projects"
PROJECT = r"[A-Za-z0-9_][A-Za-z0-9_-]{0,99}"
ALIAS = re.compile(rf"(?:({PROJECT})/)?([\w-][\w.-]*)@([\w-][\w.-]*)")
LONGEST = 200
NUMBERED = re.compile(r"(.*@[a-z]+-)([0-9]+)")  # such as policy@round-2; once set, it never points to another artifact


def checked_project(name: object) -> str:
    """Return `name` if it is a valid name of a project; otherwise raise PunaError."""
    if not isinstance(name, str) or not re.fullmatch(PROJECT, name):
        raise PunaError(f"project {name}: a project's name has only letters, digits, - and _, at most 100, for example news")
    return name


class Aliases:
    """The aliases of a store, as seen from one project: the project's own are NAME@VERSION, all others PROJECT/NAME@VERSION."""

    def __init__(self, files: Files, project: str = DEFAULT) -> None:
        self._files = files
        self.project = checked_project(project)

    def target(self, alias: str) -> tuple[str, str] | None:
        """Return an alias's (kind, key); None if it does not exist. Raise PunaError for an invalid name or a damaged file."""
        fields = read_pointer(self._files, self._file(alias))
        return None if fields is None else (fields["kind"], fields["key"])

    def set(self, alias: str, artifact: Artifact, expected: str | None = None) -> str:
        """Point an alias at an artifact and return the alias. If a numbered alias was ever set to another artifact, use the next free
        number.

        `expected`: the key that an alias without a number must point to now ("": no such alias). Raise PunaError if it does not."""
        if (number := NUMBERED.fullmatch(alias)) is not None:
            return self._set_numbered(number[1], int(number[2]), artifact)
        file, data = self._file(alias), pointer({"kind": artifact.kind, "key": artifact.key})
        while True:
            before = self._files.stat(file)
            if expected is not None and (now := (self.target(alias) or ("", ""))[1]) != expected:
                raise PunaError(f"{alias}: points to {now[:12] or 'nothing'}, not {expected[:12] or 'nothing'}; it was changed meanwhile")
            if self._files.swap(file, data, before.version if before else None):
                self._note(alias, artifact)
                return alias

    def _set_numbered(self, stem: str, first: int, artifact: Artifact) -> str:
        before, data = self.journal(), pointer({"kind": artifact.kind, "key": artifact.key})
        for number in itertools.count(first):
            alias = f"{stem}{number}"
            if before.get(self.name_for(alias), artifact.id) == artifact.id and self._files.swap(self._file(alias), data, None):
                self._note(alias, artifact)
                return alias
            if self.target(alias) == (artifact.kind, artifact.key):
                return alias
        raise AssertionError("unreachable")

    def parts(self, alias: str) -> tuple[str, str]:
        """Return (project, NAME@VERSION) of an alias. Raise PunaError if the text is not an alias."""
        if (match := ALIAS.fullmatch(alias)) is None or len(alias.encode()) > LONGEST:
            what = f"[PROJECT/]NAME@VERSION, of letters, digits, `_`, `-` and `.`, {LONGEST} bytes at most, for example policy@latest"
            raise PunaError(f"{alias}: no such alias; one is {what}")
        return match[1] or self.project, f"{match[2]}@{match[3]}"

    def name_for(self, alias: str, viewer: str = DEFAULT) -> str:
        """Return the name by which the project `viewer` knows an alias."""
        project, name = self.parts(alias)
        return name if project == viewer else f"{project}/{name}"

    def _file(self, alias: str) -> str:
        project, own = self.parts(alias)
        name, _, version = own.partition("@")
        return f"refs/{name}/{version}.json" if project == DEFAULT else f"{PROJECTS}/{project}/{name}/{version}.json"

    def files(self) -> dict[str, str]:
        """Return alias → name of its file, for all aliases of all projects."""
        files: dict[str, str] = {}
        for file in filter(is_pointer, self._files.list("refs")):
            project, inside = DEFAULT, file.removesuffix(".json").split("/")[1:]
            if file.startswith(f"{PROJECTS}/"):
                _, project, *inside = inside
            alias = f"{project}/{'@'.join(inside)}"
            if len(inside) == 2 and ALIAS.fullmatch(alias):
                files[self.name_for(alias, self.project)] = file
        return files

    def keys(self) -> dict[str, str]:
        """Return alias → key of its artifact, for all aliases of all projects. Raise PunaError if an alias file is damaged."""
        pointers = {alias: read_pointer(self._files, file) for alias, file in self.files().items()}
        return {alias: fields["key"] for alias, fields in pointers.items() if fields is not None}

    def find_lost(self) -> dict[str, str]:
        """Return alias → `Artifact.id` of its first artifact, for aliases of all projects that were set and no longer exist."""
        present = {self.name_for(alias) for alias in self.files()}
        return {alias: first for alias, first in self.journal().items() if alias not in present}

    def journal(self) -> dict[str, str]:
        """Return alias (named as in the default project) → `Artifact.id` of its first artifact. Skip damaged lines of the journal."""
        first: dict[str, str] = {}
        for entry in index.journal(self._files, JOURNAL, FIELDS)[0]:
            first.setdefault(str(entry["alias"]), str(entry["artifact"]))
        return first

    def _note(self, alias: str, artifact: Artifact) -> None:
        """Add an alias to the journal, unless it is already there."""
        if (name := self.name_for(alias)) not in self.journal():
            line = {"time": datetime.now(UTC).isoformat(), "alias": name, "artifact": artifact.id}
            self._files.append(JOURNAL, index.line(line))


def is_pointer(name: str) -> bool:
    return name.endswith(".json") and not name.rpartition("/")[2].startswith(".")


def pointer(data: dict[str, str]) -> bytes:
    return json.dumps(data | {"checksum": _checksum(data)}).encode() + b"\n"


def read_pointer(files: Files, name: str) -> dict[str, str] | None:
    """Return the fields of a pointer file, or None if there is no file. Raise PunaError if the file is damaged."""
    try:
        data = json.loads(files.read(name))
        if data.pop("checksum") != _checksum(data):
            raise ValueError("its checksum is wrong")
        return {str(field): str(value) for field, value in data.items()}
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        message = f"is damaged ({error}); remove the file, and the next run writes it again"
        raise PunaError(f"{files.uri}/{name}: {message}") from error


def _checksum(data: dict[str, str]) -> str:
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()
