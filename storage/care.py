"""Looking after a store: verifying checksums, removing what nothing needs."""

from __future__ import annotations

import shutil
import time
import uuid
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from puna.storage.artifact import Artifact
from puna.storage.manifest import NAME
from puna.storage.store import Store
from puna.storage.work import inputs_of


@dataclass(frozen=True)
class Finding:
    """The state of one artifact: what is damaged, empty when it is whole."""

    artifact: Artifact
    damage: list[str]


def verify(store: Store, artifacts: Iterable[Artifact] | None = None) -> list[Finding]:
    """Compare every file of the artifacts (default: all) with the manifest; a broken manifest is damage too."""
    return [Finding(artifact, artifact.damage()) for artifact in (artifacts if artifacts is not None else _all(store))]


def _all(store: Store) -> list[Artifact]:
    return [Artifact.at(m.parent) for m in sorted((store.root / "objects").glob(f"*/*/*/{NAME}"))]


@dataclass(frozen=True)
class Garbage:
    """What `collect` removed or would remove: folders and their size in bytes."""

    folder: Path
    reason: str
    bytes: int


def collect(store: Store, *, keep_runs: int, work_days: float, remove: bool) -> list[Garbage]:
    """Artifacts that nothing needs, and abandoned work.

    Needed is what an alias, a run at work, one of the last `keep_runs` runs that made or reused anything, an accepted
    equivalence or kept work names, and all that it was made from. Work stays while a process holds it, and for `work_days`
    days after anything in it was last written. With `remove=False` nothing is touched.
    """
    old = time.time() - work_days * 86_400
    works = sorted((store.root / "work").iterdir())
    abandoned = [folder for folder in works if _touched(folder) <= old and not _held(store, folder.name)]
    needed = _needed(store, keep_runs, [folder for folder in works if folder not in abandoned])
    unneeded = [a.folder for a in store.artifacts() if a.key not in needed]
    artifacts = [Garbage(folder, "no alias and no recent run needs it", _size(folder)) for folder in unneeded]
    works_left = [Garbage(folder, "abandoned work", _size(folder)) for folder in abandoned]
    aside = [Garbage(folder, "quarantined", _size(folder)) for folder in sorted((store.root / "quarantine").iterdir())]
    garbage = artifacts + works_left + aside
    if not remove:
        return garbage
    gone = []
    for item in garbage:
        # Whoever works on the key now keeps it; and no one begins while it goes.
        with store.lock(item.folder.name, wait=False) as mine:
            if mine and item.folder.exists():
                _remove(store, item.folder)
                gone.append(item)
    for lock in (store.root / "locks").iterdir():
        if lock.stat().st_mtime <= old or lock.name in {item.folder.name for item in gone}:
            with store.lock(lock.name, wait=False) as mine:
                if mine:
                    lock.unlink(missing_ok=True)
    return gone


def _remove(store: Store, folder: Path) -> None:
    # Out of the way in one step first: a half-removed artifact must not look like one, nor block its key.
    doomed = store.root / "quarantine" / f"removed-{folder.name[:12]}-{uuid.uuid4().hex}"
    folder.rename(doomed)
    shutil.rmtree(doomed)


def _needed(store: Store, keep_runs: int, works: list[Path]) -> set[str]:
    by_key = {a.key: a for a in store.artifacts()}
    todo = [*store.aliases().values(), *store.acceptances().values()]
    # A run that ended before its first artifact holds no place among the last ones.
    logs = [log for log in map(store.log, store.runs()) if log.made]
    recent = logs[len(logs) - keep_runs :] if keep_runs else []
    todo += [made.key for log in logs if log in recent or log.state == "at work" for made in log.made]
    for folder in works:
        todo += inputs_of(folder)
    needed: set[str] = set()
    while todo:
        key = todo.pop()
        if key in needed or key not in by_key:
            continue
        needed.add(key)
        todo += [i.key for i in by_key[key].manifest.inputs if i.kind != "external"]
    return needed


def _size(folder: Path) -> int:
    return sum(f.lstat().st_size for f in _below(folder) if f.is_file())


def _touched(folder: Path) -> float:
    """When anything in a folder was last written, seconds since the epoch: a folder's own time misses what is deeper."""
    return max((f.lstat().st_mtime for f in _below(folder)), default=folder.lstat().st_mtime)


def _below(folder: Path) -> list[Path]:
    """A folder and everything in it that is still there: a stage at work removes files too."""
    return [f for f in (folder, *folder.rglob("*")) if f.exists()]


def _held(store: Store, key: str) -> bool:
    if not (store.root / "locks" / key).exists():
        return False
    with store.lock(key, wait=False) as mine:
        return not mine
