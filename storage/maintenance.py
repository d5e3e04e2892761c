"""Maintenance of a store: verification of checksums, and removal of unneeded artifacts."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterable
from dataclasses import dataclass

from puna.storage.artifact import Artifact, place_of
from puna.storage.damage import note
from puna.storage.files import LOCKS
from puna.storage.index import Entry
from puna.storage.store import Store
from puna.storage.work import INPUTS, drop, scan_holdings


@dataclass(frozen=True)
class Finding:
    """The result of verifying one artifact: its damage (empty if intact), and why it is suspect (empty if it is not)."""

    artifact: Artifact
    damage: list[str]
    suspect: str = ""


def verify(store: Store, artifacts: Iterable[Artifact] | None = None, *, trust: bool = False) -> list[Finding]:
    """Verify all bytes of artifacts; return a finding for each. None: all artifacts, also folders without a manifest.

    Log artifacts whose own files are damaged. `trust`: log intact suspect artifacts as trusted, so that they are no longer suspect."""
    findings = [(artifact, artifact.damage()) for artifact in (store.committed_artifacts() if artifacts is None else artifacts)]
    for artifact, damage in findings:
        if damage and artifact.damage(own=True):
            note(store.files, artifact.kind, artifact.key, "damaged")
        elif trust and artifact.key in store.suspects():
            note(store.files, artifact.kind, artifact.key, "trusted")
    for place in store.unfinished_folders() if artifacts is None else ():
        kind, _, key = place.split("/")[1:]
        findings.append((Artifact(kind, key, store.files), ["its manifest is missing; the next run makes it again"]))
    suspects = store.suspects()
    return [Finding(artifact, damage, suspects.get(artifact.key, "")) for artifact, damage in findings]


@dataclass(frozen=True)
class Garbage:
    """A folder of the store that `collect` removed or would remove, with its size in bytes."""

    place: str
    reason: str
    bytes: int


def collect(store: Store, *, keep_runs: int, work_days: float, remove: bool) -> list[Garbage]:
    """Return unneeded artifacts, abandoned work and quarantined folders. `remove`: remove them and old locks, and return what was removed.

    An artifact is needed if something refers to it or to one of its descendants: an alias, a live run or process, one of the last
    `keep_runs` runs with artifacts, an accepted equivalence, or unfinished work. Keys that only `store` itself holds are not protected.
    Work is kept while a process holds it, and for `work_days` days after the last write to it."""
    files, old = store.files, time.time() - work_days * 86_400
    works = files.folders("work")
    abandoned = [key for key in works if all(s.written <= old for s in files.stats(f"work/{key}").values()) and not files.is_held(key)]
    (in_use, dead), by_key = scan_holdings(files, store.holding.name), {one["key"]: one for one in store.entries()}
    needed = _with_ancestors(by_key, [*in_use, *_needed_keys(store, keep_runs, [key for key in works if key not in abandoned])])
    unneeded = (place_of(one["kind"], key) for key, one in by_key.items() if key not in needed)
    reasons = dict.fromkeys(unneeded, "no alias and no recent run needs it")
    reasons |= {f"work/{key}": "abandoned work" for key in abandoned}
    reasons |= {f"quarantine/{name}": "quarantined" for name in files.folders("quarantine")}
    garbage = [Garbage(place, reason, sum(s.bytes for s in files.stats(place).values())) for place, reason in reasons.items()]
    if not remove:
        return garbage
    for name in dead:
        drop(files, name)
    removed: dict[str, Garbage] = {}
    for item in garbage:
        # The lock fails while a process works on the key, and keeps processes from starting during the removal.
        key = item.place.rpartition("/")[2]
        with store.lock(key, wait=False) as mine:
            held = _with_ancestors(by_key, scan_holdings(files, store.holding.name)[0])  # a process may use more by now
            if mine and key in files.folders(item.place.rpartition("/")[0]) and key not in held:
                files.remove(item.place)
                removed[item.place] = item
    keys = {place.rpartition("/")[2] for place in removed}
    for lock in files.list(LOCKS):
        stat, key = files.stat(lock), lock.rpartition("/")[2]
        if stat is not None and (stat.written <= old or key in keys):
            with store.lock(key, wait=False) as mine:
                if mine:
                    files.remove(lock)
    return list(removed.values())


def _needed_keys(store: Store, keep_runs: int, works: list[str]) -> list[str]:
    todo = [*store.aliases().values(), *store.acceptances().values()]
    # A run without an artifact does not count among the last `keep_runs`.
    logs = [log for log in map(store.log, store.runs()) if log.made]
    recent = logs[len(logs) - keep_runs :] if keep_runs else []
    todo += [record.key for log in logs if log in recent or log.state == "at work" for record in log.made]
    for key in works:
        with contextlib.suppress(FileNotFoundError):
            todo += map(str, json.loads(store.files.read(f"work/{key}/{INPUTS}")))
    return todo


def _with_ancestors(by_key: dict[str, Entry], keys: Iterable[str]) -> set[str]:
    todo, needed = list(keys), set[str]()
    while todo:
        key = todo.pop()
        if key in by_key and key not in needed:
            needed.add(key)
            todo += [one["input"] for one in by_key[key]["inputs"] if one["kind"] != "external"] + by_key[key]["sources"]
    return needed
