"""Detection of damage: artifacts whose bytes have changed are reported, moved to `quarantine/`, and never read silently.

An artifact is suspect if an input was found damaged after the artifact was made, unless its stage verified its inputs after reading them
(`inputs_compared`, as current stages do). It is also suspect if an input is suspect, or was suspect and is now gone or has other content.
Making it again, or `puna verify ID --trust`, clears it of suspicion. Suspects are computed from the manifests and a journal of findings."""

from __future__ import annotations

import contextlib
import os
import time
import uuid
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import BinaryIO, Literal

from puna.storage import index
from puna.storage.artifact import Artifact, place_of
from puna.storage.digest import of_stored
from puna.storage.errors import DamagedArtifact, PunaError
from puna.storage.files import Files, LocalFiles
from puna.storage.manifest import NAME

JOURNAL = "quarantine/journal.jsonl"
FIELDS = {"time", "kind", "key", "what"}
Finding = Literal["damaged", "suspect", "trusted"]
"""`damaged`: bytes were wrong. `suspect`: a suspect artifact was set aside to be made again. `trusted`: a user trusts the artifact."""
FRESH_SECONDS = 600.0  # seconds after a checksum's verification during which a process does not repeat it
_COMPARED: dict[tuple[str, str], tuple[str, float]] = {}  # (store's URI, file) → (verified version, when)


def check(files: Files, artifact: Artifact, read: Sequence[str] = (), *, whole: bool = False) -> Artifact:
    """Return `artifact` if a check finds no damage. Otherwise move it, and the damaged artifacts whose rows it refers to, to `quarantine/`
    (if the store is writable), and raise DamagedArtifact.

    `read`: see `Artifact.damage`. The default check detects changed or removed files. `whole`: verify all bytes, unless the store verifies
    every read. Only verifying all bytes detects bit rot, which changes neither size nor modification time."""
    artifact = Artifact(artifact.kind, artifact.key, artifact.files)  # so that its manifest is read again
    if not (damage := artifact.damage(read, quick=not whole or artifact.files.checks_reads)):
        return artifact
    aside: list[str | None] = []
    with contextlib.suppress(PunaError, OSError):
        aside += [quarantine(files, one, own=True) for one in _with_sources(files, artifact)]
    raise DamagedArtifact.of(artifact.id, damage, [place for place in aside if place is not None])


def _with_sources(files: Files, artifact: Artifact) -> list[Artifact]:
    """Return the artifact and all artifacts whose rows it keeps by reference."""
    artifacts = [artifact]
    with contextlib.suppress(PunaError):
        for one in artifact.manifest.sources:
            artifacts += _with_sources(files, Artifact(one.kind, one.key, files))
    return artifacts


def quarantine(files: Files, artifact: Artifact, *, own: bool = False) -> str | None:
    """Move a damaged artifact to `quarantine/`; return its new address, None if it is intact or gone. `own`: ignore damage of sources."""
    with files.lease(artifact.key):
        current = Artifact(artifact.kind, artifact.key, files)
        lost = files.stat(f"{current.place}/{NAME}") is None
        damaged = bool(files.stats(current.place)) if lost else bool(current.damage(own=own))
        return set_aside(files, artifact.kind, artifact.key) if damaged else None


def set_aside(files: Files, kind: str, key: str, *, damaged: bool = True) -> str:
    """Move a key's folder to `quarantine/`; return its new address. First log it as suspect if it is, and as damaged if `damaged`."""
    target = f"quarantine/{kind}-{key[:12]}-{uuid.uuid4().hex}"
    if key in suspects(files):
        note(files, kind, key, "suspect")
    if damaged:
        note(files, kind, key, "damaged")
    files.move(place_of(kind, key), target)
    return f"{files.uri}/{target}"


@dataclass(frozen=True, eq=False)
class ComparedFiles(LocalFiles):
    """A local store for readers that commit nothing: a table file is read only after its checksum has been verified."""

    def __eq__(self, other: object) -> bool:
        """True for a local store with the same root, whether or not it verifies checksums."""
        return isinstance(other, LocalFiles) and self.root == other.root

    __hash__ = LocalFiles.__hash__

    def table(self, name: str) -> BinaryIO:
        compare(self, [name])
        return self.open(name)


def reading(files: Files) -> Files:
    """Return `files` that verify tables' checksums before reads, for readers that commit nothing. Stages verify inputs before a commit."""
    return ComparedFiles(files.root) if isinstance(files, LocalFiles) else files


def compare(files: Files, names: Iterable[str], most: int | None = None) -> int:
    """Verify the checksums of existing files, at most `most` bytes (None: all), unless they were verified in the last `FRESH_SECONDS`.
    Return the bytes beyond `most`, which were not verified. On a mismatch, call `check`, which raises DamagedArtifact."""
    todo, beyond = [], 0
    for name in dict.fromkeys(names) if not files.checks_reads else ():
        stat = files.stat(name)
        version, when = _COMPARED.get((files.uri, name), ("", 0.0))
        if stat is None or (version == stat.version and time.monotonic() - when < FRESH_SECONDS):
            continue
        if most is not None and stat.bytes > most:
            beyond += stat.bytes
            continue
        most = None if most is None else most - stat.bytes
        todo.append((name, stat.version))
    with ThreadPoolExecutor(min(len(todo), os.cpu_count() or 1) or 1) as threads:
        for (name, version), whole in zip(todo, threads.map(lambda one: _whole(files, one[0]), todo), strict=True):
            if not whole:
                kind, _, key = name.split("/")[1:4]
                check(files, Artifact(kind, key, files), whole=True)
            _COMPARED[files.uri, name] = version, time.monotonic()
    return beyond


def _whole(files: Files, name: str) -> bool:
    """True if an artifact's file has the checksum in the manifest; False if it differs, or the file or the manifest cannot be read."""
    _, kind, _, key, inside = name.split("/", 4)
    try:
        expected = Artifact(kind, key, files).manifest.files[inside].sha256
        return of_stored(files, name) == expected
    except (PunaError, KeyError, OSError):
        return False


def note(files: Files, kind: str, key: str, what: Finding) -> None:
    """Add a finding about an artifact to the journal, if the store is writable."""
    line = {"time": datetime.now(UTC).isoformat(), "kind": kind, "key": key, "what": what}
    with contextlib.suppress(OSError):  # a store may be mounted read-only
        files.append(JOURNAL, index.line(line))


def suspects(files: Files) -> dict[str, str]:
    """Return key → reason, as a clause for messages, for all suspect artifacts (see the module's docstring)."""
    findings, _ = index.journal(files, JOURNAL, FIELDS)
    if not findings:
        return {}
    entries = {one["key"]: one for one in index.entries(files)}
    reasons: dict[str, str | None] = {}

    def why(key: str) -> str | None:
        if key not in reasons:
            reasons[key] = None
            reasons[key] = _why(key)
        return reasons[key]

    def _why(key: str) -> str | None:
        one = entries[key]
        later = [event for event in findings if event["time"] > one["created_at"]]
        if any(event["key"] == key and event["what"] == "trusted" for event in later):
            return None
        for source in one["inputs"]:
            name, present = f"{source['kind']}/{source['input'][:12]}", entries.get(source["input"])
            read = {source["input"], *(present["sources"] if present else ())}
            events = {event["what"]: event["time"][:10] for event in later if event["key"] in read}
            if "damaged" in events and not one.get("inputs_compared"):
                return f"it was made from {name}, which was found damaged on {events['damaged']}"
            if "suspect" in events and (present is None or present["data_digest"] != source["data_digest"]):
                return f"it was made from {name}, which was suspect and {'is gone' if present is None else 'has other content now'}"
            if present is not None and why(source["input"]):
                return f"it was made from {name}, which is suspect"
        return None

    return {key: clause for key in entries if (clause := why(key)) is not None}
