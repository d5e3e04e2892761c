"""The index: a summary of a store's manifests in one file, so that not all manifests need to be read every time.

Each line has a checksum and the version of its manifest. All manifests are listed and their versions compared before the index is used, so
an outdated or damaged index costs only time."""

from __future__ import annotations

import contextlib
import json
import zlib
from typing import Any

from puna.storage.artifact import Artifact
from puna.storage.errors import PunaError
from puna.storage.files import Files
from puna.storage.manifest import NAME

FILE = "index.jsonl"
SPARE = 1000  # number of outdated lines, beyond one per artifact, above which the index is rewritten

Entry = dict[str, Any]  # summary of one artifact (see `entry`)


def manifests(files: Files) -> dict[tuple[str, str], str]:
    """Return the version of every manifest in the store, by kind and key of its artifact."""
    versions = files.versions("objects", 3, NAME)
    return {(inside[0], inside[2]): version for name, version in versions.items() if len(inside := name.split("/")) == 3}


def entries(files: Files) -> list[Entry]:
    """Return the entries of all artifacts whose manifests can be read, oldest first. Update the index, if the store is writable."""
    versions = manifests(files)
    lines = _lines(files)
    on_file = {(entry_read["kind"], entry_read["key"]): entry_read for one in lines if (entry_read := parse(one)) is not None}
    current = {place: on_file[place] for place, version in versions.items() if place in on_file and on_file[place]["version"] == version}
    new = []
    for place in versions.keys() - current.keys():
        with contextlib.suppress(PunaError):
            current[place] = entry(Artifact(*place, files), versions[place])
            new.append(line(current[place]))
    with contextlib.suppress(OSError):  # a store may be mounted read-only
        if len(lines) + len(new) > 2 * len(current) + SPARE:
            files.write(FILE, b"".join(map(line, current.values())))
        elif new:
            files.append(FILE, b"".join(new))
    return sorted(current.values(), key=lambda one: (one["created_at"], one["key"]))


def entry(artifact: Artifact, version: str) -> Entry:
    """Return the summary of a manifest; `sound`: the manifest is consistent and belongs to the artifact. Raise PunaError if unreadable."""
    m = artifact.manifest
    tables = {
        name: {"files": [s.file for s in table.shards if s.file], "sources": len(table.sources), "rows": table.rows}
        for name, table in m.tables.items()
    }
    return {
        "kind": artifact.kind, "key": artifact.key, "version": version, "stage": m.stage,
        "rows": m.tables[m.kind].rows if m.kind in m.tables else None, "bytes": sum(f.bytes for f in m.files.values()),
        "seconds": m.timings.get("seconds"), "created_at": m.created_at, "run": m.run, "project": m.project, "data_digest": m.data_digest,
        "code_version": m.code_version, "config": json.dumps(m.config), "seed": m.seed, "tables": tables, "metrics": m.metrics,
        "inputs": [{"input": i.key, "name": i.name, "kind": i.kind, "data_digest": i.data_digest} for i in m.inputs],
        "inputs_compared": m.inputs_compared, "sources": [source.key for source in m.sources],
        "sound": (m.kind, m.key) == (artifact.kind, artifact.key) and not m.contradictions(),
    }  # fmt: skip


def _lines(files: Files) -> list[bytes]:
    try:
        return files.read(FILE).splitlines()
    except (OSError, PunaError):
        return []


def journal(files: Files, name: str, fields: set[str]) -> tuple[list[Entry], list[int]]:
    """Return the entries of a journal, and the line numbers, from 1, of its damaged lines: truncated, changed, or lacking a field."""
    entries, damaged = [], []
    for number, text in enumerate(files.read(name).splitlines() if files.stat(name) else (), 1):
        if (one := parse(text)) is not None and fields <= one.keys():
            entries.append(one)
        else:
            damaged.append(number)
    return entries, damaged


def line(entry: Entry) -> bytes:
    """Return an entry as a line of a journal or the index: a checksum and JSON."""
    data = json.dumps(entry, separators=(",", ":")).encode()
    return b"%08x %b\n" % (zlib.crc32(data), data)


def parse(line: bytes) -> Entry | None:
    """Return the entry in a line of a journal, or None if the line is damaged. Old journals of aliases have lines without a checksum."""
    data = line if line.startswith(b"{") else line[9:]
    try:
        entry: Entry = json.loads(data.decode())
    except ValueError:
        return None
    return entry if data is line or line[:9] == b"%08x " % zlib.crc32(data) else None
