"""The store: where artifacts live, how one is begun, committed, found again and removed.

objects/<kind>/<k[:2]>/<key>/   committed artifacts, immutable
work/<key>/                     an unfinished stage, part by part
locks/<key>                     held by the process that works on it
refs/<name>/<version>.json      aliases, changed by compare-and-swap
runs/<run>.jsonl                what each run made or reused; held by the process at work on it
quarantine/                     artifacts that failed their checksums
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import uuid
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TextIO, cast
from urllib.parse import unquote, urlsplit

import duckdb
import pyarrow as pa

from puna.storage import digest
from puna.storage.artifact import Artifact
from puna.storage.errors import PunaError
from puna.storage.manifest import IMPORT, NAME
from puna.storage.runs import RunLog
from puna.storage.schemas import known_kind, table_schema
from puna.storage.work import Identity, Work, write_text

FOLDERS = ("objects", "work", "locks", "refs", "runs", "quarantine")


class Store:
    """A folder of artifacts on a local or mounted disk."""

    def __init__(self, root: Path) -> None:
        self.root = root
        try:
            with written(root):
                for name in FOLDERS:
                    (root / name).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise PunaError(f"store {root}: cannot be made ({error}); name another folder with --store") from error

    @classmethod
    def open(cls, uri: str | Path) -> Store:
        """The store at a path or `file://` URI; its folders are made on first use."""
        return cls(located(uri))

    # --- finding -----------------------------------------------------------------------------------

    def folder(self, kind: str, key: str) -> Path:
        """Where the artifact `key` of `kind` is or will be."""
        return self.root / "objects" / kind / key[:2] / key

    def find(self, kind: str, key: str) -> Artifact | None:
        """The committed artifact, or None."""
        folder = self.folder(kind, key)
        return Artifact.at(folder) if (folder / NAME).is_file() else None

    def artifacts(self) -> list[Artifact]:
        """Every committed artifact, oldest first; one whose manifest cannot be read is left out, `verify` names it."""
        found = []
        for manifest in (self.root / "objects").glob(f"*/*/*/{NAME}"):
            with contextlib.suppress(PunaError):
                artifact = Artifact.at(manifest.parent)
                _ = artifact.manifest
                found.append(artifact)
        return sorted(found, key=lambda a: (a.manifest.created_at, a.key))

    def resolve(self, name: str) -> Artifact:
        """The artifact that a person means: `kind/prefix`, a key's prefix, or an alias `name@version`."""
        if "@" in name:
            return self.alias(name)
        kind, _, prefix = name.rpartition("/")
        if kind:
            known_kind(kind)
        if len(prefix) < 4 or set(prefix) - set("0123456789abcdef"):
            raise PunaError(f"{name}: no such artifact; give at least 4 hex digits of the key, `puna list` shows them")
        folders = (self.root / "objects").glob(f"{kind or '*'}/{prefix[:2]}/{prefix}*/{NAME}")
        found = [Artifact.at(m.parent) for m in folders]
        if len(found) != 1:
            said = ", ".join(a.id for a in found)
            raise PunaError(f"{name}: fits several artifacts: {said}" if found else f"{name}: no such artifact in {self.root}")
        return found[0]

    def checked(self, artifact: Artifact, read: Sequence[str] = ()) -> Artifact:
        """`artifact`, after its checksums (of `read`, see `Artifact.damage`) were compared; PunaError names the damage."""
        if damage := artifact.damage(read):
            raise PunaError(
                f"artifact {artifact.id} is damaged: {'; '.join(damage)}. "
                "Run the stage that made it again, or `puna verify --quarantine` to set it aside"
            )
        return artifact

    def quarantine(self, artifact: Artifact) -> Path | None:
        """Move a damaged artifact out of the way; returns where it is now, None when it was mended or moved meanwhile."""
        with self.lock(artifact.key):
            found = self.find(artifact.kind, artifact.key)
            return self.set_aside(artifact.kind, artifact.key) if found is not None and found.damage() else None

    def set_aside(self, kind: str, key: str) -> Path:
        """Move the folder of a key out of the way, whatever is left in it; returns where it is now."""
        target = self.root / "quarantine" / f"{kind}-{key[:12]}-{uuid.uuid4().hex}"
        os.rename(self.folder(kind, key), target)
        return target

    # --- making ------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def lock(self, key: str, *, wait: bool = True) -> Iterator[bool]:
        """Hold `key` against other processes; without `wait`, give False when another one holds it."""
        file = self.root / "locks" / key
        while True:
            with self._opened(file) as lock:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
                except BlockingIOError:
                    yield False
                    return
                # `gc` removes old lock files; one that was removed while we waited holds nobody off.
                if file.exists() and os.path.samestat(os.fstat(lock.fileno()), os.stat(file)):
                    yield True
                    return

    def _opened(self, file: Path, mode: str = "w") -> TextIO:
        with written(self.root):
            return cast("TextIO", file.open(mode))

    @contextlib.contextmanager
    def work(self, key: str) -> Iterator[Work]:
        """The work folder of `key`, held against other processes; it survives a crash until the commit."""
        with written(self.root), self.lock(key):
            yield Work(self, self.root / "work" / key)

    def import_table(self, kind: str, table: pa.Table, **side: pa.Table) -> Artifact:
        """Commit a table (and side tables) made outside any stage, for scripts and tests."""
        names = {kind: table, **side}
        content = {name: digest.of_table(table_schema(name).conform(rows)) for name, rows in names.items()}
        key = digest.of_value({"import": kind, "tables": content})
        with self.work(key) as work:
            for name, rows in names.items():
                work.add(name, rows, "import")
            return work.commit(kind, key, Identity(IMPORT))

    def accepted(self, key: str) -> str:
        """The key of the artifact that stands for `key`: itself, or an older one declared equivalent."""
        file = self.root / "refs" / ".accepted" / f"{key}.json"
        return _pointer(file, "stands_for") if file.is_file() else key

    def accept(self, old: Artifact, new_key: str) -> None:
        """Declare that the artifact `old` is what `new_key` would be (a refactoring that changes nothing)."""
        file = self.root / "refs" / ".accepted" / f"{new_key}.json"
        with written(self.root):
            file.parent.mkdir(parents=True, exist_ok=True)
            write_text(file, json.dumps({"stands_for": old.key}) + "\n")

    def acceptances(self) -> dict[str, str]:
        """Every key that an older artifact stands for, and the older one's key."""
        files = sorted((self.root / "refs" / ".accepted").glob("[!.]*.json"))
        return {f.stem: _pointer(f, "stands_for") for f in files}

    # --- aliases -----------------------------------------------------------------------------------

    def alias(self, name: str) -> Artifact:
        """The artifact that `name@version` points to."""
        file = self._reference(name)
        if not file.is_file():
            raise PunaError(f"{name}: no such alias in {self.root}")
        kind, key = _pointer(file, "kind"), _pointer(file, "key")
        artifact = self.find(kind, key)
        if artifact is None:
            raise PunaError(f"{name}: points to {kind}/{key[:12]}, which is not in the store")
        return artifact

    def set_alias(self, name: str, artifact: Artifact, expected: str | None = None) -> None:
        """Point `name@version` at an artifact; with `expected`, only if it now points at that key."""
        file = self._reference(name)
        with written(self.root):
            file.parent.mkdir(parents=True, exist_ok=True)
            with (file.parent / ".lock").open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                if expected is not None:
                    now = _pointer(file, "key") if file.is_file() else ""
                    if now != expected:
                        raise PunaError(f"{name}: points to {now[:12] or 'nothing'}, not to {expected[:12]}; it was changed meanwhile")
                write_text(file, json.dumps({"kind": artifact.kind, "key": artifact.key}) + "\n")

    def _reference(self, name: str) -> Path:
        if not re.fullmatch(r"[\w-][\w.-]*@[\w-][\w.-]*", name):
            raise PunaError(f"{name}: no such alias; one is NAME@VERSION, of letters, digits, `_`, `-` and `.`, for example policy@latest")
        base, _, version = name.partition("@")
        return self.root / "refs" / base / f"{version}.json"

    def aliases(self) -> dict[str, str]:
        """Every alias and the key it points to."""
        files = sorted((self.root / "refs").glob("[!.]*/*.json"))
        return {f"{f.parent.name}@{f.stem}": _pointer(f, "key") for f in files}

    def names(self) -> dict[str, list[str]]:
        """Every key that an alias points to, with all its aliases."""
        found: dict[str, list[str]] = {}
        for name, key in self.aliases().items():
            found.setdefault(key, []).append(name)
        return found

    # --- runs --------------------------------------------------------------------------------------

    def record(self, run: str, event: dict[str, Any]) -> None:
        """Append one event to the log of a run."""
        line = json.dumps({"time": datetime.now(UTC).isoformat(), **event}, ensure_ascii=False).encode() + b"\n"
        with written(self.root), (self.root / "runs" / f"{run}.jsonl").open("a+b") as file:
            # What a crash or a full disk cut short must not take the next line with it.
            if file.seek(0, os.SEEK_END):
                file.seek(-1, os.SEEK_END)
                line = line if file.read(1) == b"\n" else b"\n" + line
            file.write(line)

    @contextlib.contextmanager
    def at_work(self, run: str) -> Iterator[None]:
        """Hold the log of a run while it is at work: `gc` then keeps what the run has, and a run that was killed is told from it."""
        with self._opened(self.root / "runs" / f"{run}.jsonl", "a") as log:
            fcntl.flock(log, fcntl.LOCK_EX)
            yield

    def runs(self) -> list[str]:
        """Names of the runs, oldest first."""
        return [f.stem for f in sorted((self.root / "runs").glob("*.jsonl"), key=lambda f: (f.stat().st_mtime_ns, f.name))]

    def events(self, run: str) -> list[dict[str, Any]]:
        """The events of a run; a line that a crash cut short is left out."""
        file = self.root / "runs" / f"{run}.jsonl"
        if not file.is_file():
            raise PunaError(f"run {run}: no such run; `puna list --runs` shows them")
        found = []
        for line in file.read_bytes().splitlines():
            with contextlib.suppress(ValueError):
                found.append(json.loads(line))
        return found

    def log(self, run: str) -> RunLog:
        """What the events of a run say."""
        events = self.events(run)
        with (self.root / "runs" / f"{run}.jsonl").open() as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return RunLog.of(run, events, at_work=True)
        return RunLog.of(run, events, at_work=False)


def _pointer(file: Path, field: str) -> str:
    """What a file of `refs/` says in `field`; PunaError where it cannot be read."""
    try:
        return str(json.loads(file.read_text(encoding="utf-8"))[field])
    except (ValueError, KeyError, TypeError) as error:
        raise PunaError(f"{file}: does not say what it points to ({error}); remove it, the next run sets it again") from error


@contextlib.contextmanager
def written(root: Path) -> Iterator[None]:
    """Turn a full disk and a store that may not be written into one clear PunaError."""
    try:
        yield
    except (OSError, duckdb.Error) as error:
        number = getattr(error, "errno", None)
        if number in (errno.ENOSPC, errno.EDQUOT) or "No space left on device" in str(error):
            said = "the disk is full. Nothing half-made was committed and the parts that were done are kept: make room and run again"
            raise PunaError(f"store {root}: {said} ({error})") from error
        inside = str(getattr(error, "filename", None) or "").startswith(str(root))
        if inside and number in (errno.EROFS, errno.EACCES, errno.EPERM):
            raise PunaError(f"store {root}: may not be written ({error}); mount it writable or name another with --store") from error
        raise


def located(uri: str | Path) -> Path:
    """The folder that a path or a `file://` URI names, absolute; it need not be there."""
    text = str(uri)
    parsed = urlsplit(text) if "://" in text else None
    if parsed is not None and (parsed.scheme != "file" or parsed.netloc not in ("", "localhost")):
        raise PunaError(f"store {text}: only local or mounted folders can hold a store; give a path")
    root = Path(unquote(parsed.path) if parsed is not None else text).expanduser().resolve()
    if root.exists() and not root.is_dir():
        raise PunaError(f"store {root}: is a file, not a folder")
    return root
