"""The store: where artifacts live, how one is begun, committed, found again and removed.

objects/<kind>/<k[:2]>/<key>/   committed artifacts, immutable
work/<key>/                     an unfinished stage, part by part
locks/<key>                     held by the process that works on it
refs/<name>/<version>.json      aliases, changed by compare-and-swap
runs/<run>.jsonl                what each run made or reused
quarantine/                     artifacts that failed their checksums
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from puna.storage import digest, tables
from puna.storage.artifact import Artifact
from puna.storage.errors import PunaError
from puna.storage.manifest import NAME, FileRecord, InputRecord, Manifest, TableRecord
from puna.storage.schemas import KINDS, table_schema

FOLDERS = ("objects", "work", "locks", "refs", "runs", "quarantine")


class Store:
    """A folder of artifacts on a local or mounted disk."""

    def __init__(self, root: Path) -> None:
        self.root = root
        for name in FOLDERS:
            (root / name).mkdir(parents=True, exist_ok=True)

    @classmethod
    def open(cls, uri: str | Path) -> Store:
        """The store at a path or `file://` URI; its folders are made on first use."""
        text = str(uri)
        if "://" in text and not text.startswith("file://"):
            raise PunaError(f"store {text}: only local or mounted folders can hold a store; give a path")
        root = Path(text.removeprefix("file://")).expanduser().resolve()
        if root.exists() and not root.is_dir():
            raise PunaError(f"store {root}: is a file, not a folder")
        return cls(root)

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
        if kind and kind not in KINDS:
            raise PunaError(f"{name}: {kind!r} is no kind of artifact; the kinds are {', '.join(KINDS)}")
        if len(prefix) < 4:
            raise PunaError(f"{name}: give at least 4 digits of the key, `puna list` shows them")
        folders = (self.root / "objects").glob(f"{kind or '*'}/{prefix[:2]}/{prefix}*/{NAME}")
        found = [Artifact.at(m.parent) for m in folders]
        if len(found) != 1:
            said = ", ".join(a.id for a in found)
            raise PunaError(f"{name}: fits several artifacts: {said}" if found else f"{name}: no such artifact in {self.root}")
        return found[0]

    def checked(self, artifact: Artifact) -> Artifact:
        """`artifact`, after its checksums were compared; PunaError names the damage."""
        if damage := artifact.damage():
            raise PunaError(
                f"artifact {artifact.id} is damaged: {'; '.join(damage)}. "
                "Run the stage that made it again, or `puna verify --quarantine` to set it aside"
            )
        return artifact

    def quarantine(self, artifact: Artifact) -> Path:
        """Move a damaged artifact out of the way; returns where it is now."""
        return self.set_aside(artifact.kind, artifact.key)

    def set_aside(self, kind: str, key: str) -> Path:
        """Move the folder of a key out of the way, whatever is left in it; returns where it is now."""
        target = self.root / "quarantine" / f"{kind}-{key[:12]}-{time.time_ns()}"
        os.rename(self.folder(kind, key), target)
        return target

    # --- making ------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def work(self, key: str) -> Iterator[Work]:
        """The work folder of `key`, held against other processes; it survives a crash until the commit."""
        file = self.root / "locks" / key
        while True:
            with file.open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                # `gc` removes old lock files; one that was removed while we waited holds nobody off.
                if file.exists() and os.path.samestat(os.fstat(lock.fileno()), os.stat(file)):
                    yield Work(self, self.root / "work" / key)
                    return

    def import_table(self, kind: str, table: pa.Table, **side: pa.Table) -> Artifact:
        """Commit a table (and side tables) made outside any stage, for scripts and tests."""
        names = {kind: table, **side}
        content = {name: digest.of_table(table_schema(name).conform(rows)) for name, rows in names.items()}
        key = digest.of_value({"import": kind, "tables": content})
        with self.work(key) as work:
            for name, rows in names.items():
                work.add(name, rows, "import")
            return work.commit(kind, key, Identity(stage="import"))

    def accepted(self, key: str) -> str:
        """The key of the artifact that stands for `key`: itself, or an older one declared equivalent."""
        file = self.root / "refs" / ".accepted" / f"{key}.json"
        return str(json.loads(file.read_text())["stands_for"]) if file.is_file() else key

    def accept(self, old: Artifact, new_key: str) -> None:
        """Declare that the artifact `old` is what `new_key` would be (a refactoring that changes nothing)."""
        file = self.root / "refs" / ".accepted" / f"{new_key}.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        _write_text(file, json.dumps({"stands_for": old.key}) + "\n")

    # --- aliases -----------------------------------------------------------------------------------

    def alias(self, name: str) -> Artifact:
        """The artifact that `name@version` points to."""
        base, _, version = name.partition("@")
        file = self.root / "refs" / base / f"{version}.json"
        if not base or not version or not file.is_file():
            raise PunaError(f"{name}: no such alias in {self.root}")
        data = json.loads(file.read_text())
        artifact = self.find(data["kind"], data["key"])
        if artifact is None:
            raise PunaError(f"{name}: points to {data['kind']}/{data['key'][:12]}, which is not in the store")
        return artifact

    def set_alias(self, name: str, artifact: Artifact, expected: str | None = None) -> None:
        """Point `name@version` at an artifact; with `expected`, only if it now points at that key."""
        base, _, version = name.partition("@")
        if not base or not version or "/" in name or ".." in name:
            raise PunaError(f"{name}: an alias is NAME@VERSION, for example policy@latest")
        file = self.root / "refs" / base / f"{version}.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        with (file.parent / ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if expected is not None:
                now = json.loads(file.read_text())["key"] if file.is_file() else ""
                if now != expected:
                    raise PunaError(f"{name}: points to {now[:12] or 'nothing'}, not to {expected[:12]}; it was changed meanwhile")
            _write_text(file, json.dumps({"kind": artifact.kind, "key": artifact.key}) + "\n")

    def aliases(self) -> dict[str, str]:
        """Every alias and the key it points to."""
        files = sorted((self.root / "refs").glob("[!.]*/*.json"))
        return {f"{f.parent.name}@{f.stem}": json.loads(f.read_text())["key"] for f in files}

    # --- runs --------------------------------------------------------------------------------------

    def record(self, run: str, event: dict[str, Any]) -> None:
        """Append one event to the log of a run."""
        line = json.dumps({"time": datetime.now(UTC).isoformat(), **event}, ensure_ascii=False) + "\n"
        with (self.root / "runs" / f"{run}.jsonl").open("a", encoding="utf-8") as file:
            file.write(line)

    def runs(self) -> list[str]:
        """Names of the runs, oldest first."""
        return [f.stem for f in sorted((self.root / "runs").glob("*.jsonl"), key=lambda f: (f.stat().st_mtime_ns, f.name))]

    def events(self, run: str) -> list[dict[str, Any]]:
        """The events of a run; a line that a crash cut short is left out."""
        file = self.root / "runs" / f"{run}.jsonl"
        if not file.is_file():
            raise PunaError(f"run {run}: no such run; `puna list --runs` shows them")
        found = []
        for line in file.read_text(encoding="utf-8").splitlines():
            with contextlib.suppress(ValueError):
                found.append(json.loads(line))
        return found


class Identity:
    """What decides an artifact's key, and what is written about its making."""

    def __init__(
        self,
        stage: str,
        code_version: str = "",
        code: dict[str, str] | None = None,
        config: dict[str, Any] | None = None,
        inputs: list[InputRecord] | None = None,
    ) -> None:
        self.stage = stage
        self.code_version = code_version
        self.code = code or {}
        self.config = config or {}
        self.inputs = inputs or []

    @property
    def key(self) -> str:
        """sha256 over stage, code version, configuration and the inputs' data digests."""
        return digest.of_value(
            {
                "stage": self.stage,
                "code": self.code_version,
                "config": self.config,
                "inputs": [[i.name, i.kind, i.data_digest] for i in self.inputs],
            }
        )


class Work:
    """An unfinished artifact: parts of tables, files, and scratch that survives a crash."""

    def __init__(self, store: Store, folder: Path) -> None:
        self.store = store
        self.folder = folder
        self.output = folder / "output"
        self.scratch = folder / "scratch"
        self.parts = folder / "parts"
        for path in (self.output, self.scratch, self.parts):
            path.mkdir(parents=True, exist_ok=True)

    def part(self, table: str, name: str) -> Path:
        """The file of one part of a table."""
        return self.parts / table / f"{name}.parquet"

    def add(self, table: str, rows: pa.Table, name: str) -> None:
        """Write one part of a table; it is checked against the table's schema."""
        tables.write_part(table_schema(table).conform(rows), self.part(table, name))

    def forget(self, prefix: str) -> None:
        """Remove parts whose name begins with `prefix`: what a crashed driver had written."""
        for file in self.parts.glob(f"*/{prefix}*.parquet"):
            file.unlink()

    def rows(self, table: str) -> int:
        """Rows written to a table so far."""
        return sum(pq.read_metadata(f).num_rows for f in (self.parts / table).glob("*.parquet"))

    def discard(self) -> None:
        """Remove the work folder: the artifact exists already."""
        shutil.rmtree(self.folder)

    def commit(self, kind: str, key: str, identity: Identity, **about: Any) -> Artifact:
        """Merge the parts, write the manifest last, and move the folder into place in one step.

        The first of two writers of one key wins; the second gets the first one's artifact.
        """
        merged: dict[str, TableRecord] = {}
        names = sorted({p.name for p in self.parts.iterdir() if p.is_dir()} | ({kind} if self._has_table(kind) else set()))
        for name in names:
            target = self.output / f"{name}.parquet"
            files = sorted((self.parts / name).glob("*.parquet"))
            if files:
                rows, schema = tables.merge(name, files, target)
            else:
                tables.empty(name, target)
                rows, schema = 0, table_schema(name).schema
            shutil.rmtree(self.output / ".sort", ignore_errors=True)
            content = digest.of_batches(schema, _batches(target))
            merged[name] = TableRecord(rows, content, {f.name: str(f.type) for f in schema})
        files_found = {
            str(f.relative_to(self.output)): FileRecord(f.stat().st_size, digest.of_file(f))
            for f in sorted(self.output.rglob("*"))
            if f.is_file() and f.name != NAME
        }
        content_digest = digest.of_value(
            {
                "tables": {n: r.digest for n, r in merged.items() if table_schema(n).identity},
                "files": {n: r.sha256 for n, r in files_found.items() if n.removesuffix(".parquet") not in merged},
            }
        )
        manifest = Manifest(
            kind=kind,
            key=key,
            stage=identity.stage,
            data_digest=content_digest,
            code_version=identity.code_version,
            code=identity.code,
            config=identity.config,
            inputs=identity.inputs,
            tables=merged,
            files=files_found,
            created_at=datetime.now(UTC).isoformat(),
            **about,
        )
        for name in files_found:
            _sync(self.output / name)
        _write_text(self.output / NAME, manifest.to_json())
        target_folder = self.store.folder(kind, key)
        target_folder.parent.mkdir(parents=True, exist_ok=True)
        if target_folder.exists() and not (target_folder / NAME).is_file():
            self.store.set_aside(kind, key)
        try:
            os.rename(self.output, target_folder)
        except OSError as error:
            if not (target_folder / NAME).is_file():
                raise PunaError(f"cannot commit {kind}/{key[:12]} to {target_folder}: {error}") from error
        _sync(target_folder.parent)
        shutil.rmtree(self.folder)
        return Artifact.at(target_folder)

    @staticmethod
    def _has_table(kind: str) -> bool:
        return kind not in ("tokenizer", "model")


def _batches(file: Path) -> Iterator[pa.RecordBatch]:
    yield from pq.ParquetFile(file).iter_batches()


def _write_text(file: Path, text: str) -> None:
    temporary = file.with_name(f".{file.name}.{os.getpid()}")
    with temporary.open("w", encoding="utf-8") as out:
        out.write(text)
        out.flush()
        os.fsync(out.fileno())
    os.replace(temporary, file)
    _sync(file.parent)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
