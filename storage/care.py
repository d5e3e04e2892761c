"""Looking after a store: verifying checksums, removing what nothing needs."""

from __future__ import annotations

import fcntl
import shutil
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from puna.storage.artifact import Artifact
from puna.storage.errors import PunaError
from puna.storage.manifest import NAME
from puna.storage.store import Store


@dataclass(frozen=True)
class Finding:
    """The state of one artifact: what is damaged, empty when it is whole."""

    artifact: Artifact
    damage: list[str]


def verify(store: Store, artifacts: Iterable[Artifact] | None = None) -> list[Finding]:
    """Compare every file of the artifacts (default: all) with the manifest; a broken manifest is damage too."""
    found = []
    chosen = artifacts if artifacts is not None else _all(store)
    for artifact in chosen:
        try:
            found.append(Finding(artifact, artifact.damage()))
        except PunaError as error:
            found.append(Finding(artifact, [str(error)]))
    return found


def _all(store: Store) -> list[Artifact]:
    return [Artifact.at(m.parent) for m in sorted((store.root / "objects").glob(f"*/*/*/{NAME}"))]


@dataclass(frozen=True)
class Garbage:
    """What `collect` removed or would remove: folders and their size in bytes."""

    folder: Path
    reason: str
    bytes: int


def collect(store: Store, *, keep_runs: int, work_days: float, remove: bool) -> list[Garbage]:
    """Artifacts that no alias, none of the last `keep_runs` runs and none of their ancestors need, and abandoned work.

    Work younger than `work_days` days, or held by a process, stays. With `remove=False` nothing is touched.
    """
    needed = _needed(store, keep_runs)
    garbage = [Garbage(a.folder, "no alias and no recent run needs it", _size(a.folder)) for a in store.artifacts() if a.key not in needed]
    old = time.time() - work_days * 86_400
    for folder in sorted((store.root / "work").iterdir()):
        if folder.stat().st_mtime <= old and not _held(store.root / "locks" / folder.name):
            garbage.append(Garbage(folder, "abandoned work", _size(folder)))
    for folder in sorted((store.root / "quarantine").iterdir()):
        garbage.append(Garbage(folder, "quarantined", _size(folder)))
    if remove:
        for lock in (store.root / "locks").iterdir():
            if lock.stat().st_mtime <= old and not _held(lock):
                lock.unlink(missing_ok=True)
        for item in garbage:
            # Out of the way in one step first: a half-removed artifact must not look like one, nor block its key.
            doomed = store.root / "quarantine" / f"removed-{item.folder.name[:12]}-{time.time_ns()}"
            item.folder.rename(doomed)
            shutil.rmtree(doomed)
    return garbage


def _needed(store: Store, keep_runs: int) -> set[str]:
    by_key = {a.key: a for a in store.artifacts()}
    todo = list(store.aliases().values())
    runs = store.runs()
    for run in runs[len(runs) - keep_runs :] if keep_runs else []:
        todo += [e["key"] for e in store.events(run) if "key" in e]
    needed: set[str] = set()
    while todo:
        key = todo.pop()
        if key in needed or key not in by_key:
            continue
        needed.add(key)
        todo += [i.key for i in by_key[key].manifest.inputs if i.kind != "external"]
    return needed


def _size(folder: Path) -> int:
    return sum(f.stat().st_size for f in folder.rglob("*") if f.is_file())


def _held(lock: Path) -> bool:
    if not lock.exists():
        return False
    with lock.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False
