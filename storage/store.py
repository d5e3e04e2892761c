"""The store of artifacts, which holds committed artifacts, unfinished work, aliases and run logs.

store.json                      the layout version
objects/<kind>/<k[:2]>/<key>/   committed artifacts, immutable
work/<key>/                     an unfinished stage, part by part
locks/<key>                     held by the process that works on the key; locks/run-<run>: held by a run in progress
refs/                           aliases (see `aliases`) and accepted equivalences
index.jsonl, puna.duckdb        derived: summaries of the manifests, and SQL views (see `database`)
runs/<run>.jsonl                the events of a run, with the artifacts that it made or reused; runs/order: the runs by start time
runs/held-<id>                  the keys that a live process uses; locks/held-<id>: held by that process
quarantine/                     artifacts that were set aside; quarantine/journal.jsonl: the findings about artifacts"""

from __future__ import annotations

import contextlib
import copy
import errno
import json
import weakref
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pyarrow as pa

from puna.storage import aliases, damage, digest, index
from puna.storage.aliases import DEFAULT, Aliases, is_pointer, pointer, read_pointer
from puna.storage.artifact import Artifact, place_of
from puna.storage.errors import PunaError
from puna.storage.files import Files, LocalFiles
from puna.storage.index import Entry
from puna.storage.manifest import FORMAT, IMPORT, NAME
from puna.storage.runs import ENDS, RunLog
from puna.storage.schemas import KINDS, known_kind, table_schema
from puna.storage.work import Holding, Identity, Work

FOLDERS = ("objects", "work", "locks", "refs", "runs", "quarantine")
LAYOUT = "store.json"
ORDER = "runs/order"


class Store:
    """A store of artifacts: a folder on a local or mounted disk, or a prefix on an object store."""

    def __init__(self, files: Files, project: str | None = None) -> None:
        self.files = files
        self._aliases = Aliases(files, project or DEFAULT)
        self._whole: Store | None = None  # the store of which this is a view (`within`); keeps its `holding` alive
        try:
            with explain_write_errors(self.uri):
                for name in FOLDERS:
                    files.scratch(name)
        except OSError as error:
            raise PunaError(f"store {self.uri}: cannot be created ({error}); give another folder with --store") from error
        self._check_layout()
        self.holding = Holding(files)
        weakref.finalize(self, self.holding.release)

    def _check_layout(self) -> None:
        """Raise PunaError if the store has another layout or a damaged `store.json`. Write `store.json` in a new store."""
        mark = json.dumps({"layout": FORMAT}).encode()
        marked = self.files.stat(LAYOUT) is not None
        layout = _field(self.files.read(LAYOUT), "layout") if marked else None
        if layout == FORMAT:
            return
        first = next((name for name in self.files.list("objects") if name.endswith(f"/{NAME}")), None)
        made_by = None if first is None else _field(self.files.read(first), "format")
        if marked and (layout is None or made_by == FORMAT):
            raise PunaError(f"{self.uri}/{LAYOUT}: is damaged and does not give the store's layout; remove the file and run again")
        if not marked and first is None:
            with contextlib.suppress(OSError), explain_write_errors(self.uri):
                self.files.create(LAYOUT, mark)
        elif (layout or made_by) != FORMAT:
            raise PunaError(
                f"store {self.uri}: has layout {layout or made_by}, but this Puna reads layout {FORMAT}; "
                "give a new folder with --store and run again"
            )

    @classmethod
    def open(cls, uri: str | Path, project: str | None = None) -> Store:
        """Return the store at a path, `file://` or `s3://` URI, within a project; create missing folders. Raise PunaError if unusable."""
        return cls(files_of(uri), project)

    @classmethod
    def existing(cls, uri: str | Path, project: str | None = None) -> Store:
        """Return a store for readers (see `reading`) within a project. Raise PunaError if the store or the project does not exist."""
        files = damage.reading(files_of(uri))
        if files.stat(LAYOUT) is None and not files.folders("objects"):
            raise PunaError(f"store {files.uri}: not found; `puna run` creates one, and --store or PUNA_STORE names another")
        return cls(files, project).require_project() if project else cls(files)

    @property
    def uri(self) -> str:
        """Return the address that `Store.open` accepts, without credentials."""
        return self.files.uri

    @property
    def root(self) -> Path:
        """Return the store's local folder: its own, or for an object store, a scratch folder in the cache."""
        return self.files.scratch("")

    def find(self, kind: str, key: str) -> Artifact | None:
        return Artifact(kind, key, self.files) if self.files.stat(f"{place_of(kind, key)}/{NAME}") is not None else None

    def committed_artifacts(self) -> list[Artifact]:
        """Return every artifact that has a manifest, readable or not."""
        return [Artifact(kind, key, self.files) for kind, key in sorted(index.manifests(self.files)) if kind in KINDS]

    def entries(self, project: str | None = None) -> list[Entry]:
        """Return the summaries of all artifacts, oldest first. `project`: only those made by the project's runs or named by its aliases."""
        entries = [one for one in index.entries(self.files) if one["kind"] in KINDS]
        if project is None:
            return entries
        aliases = self.names(project)
        return [one for one in entries if (one.get("project") or DEFAULT) == project or one["key"] in aliases]

    def unfinished_folders(self) -> list[str]:
        """Return the names of the artifact folders that have no manifest."""
        whole = {artifact.place for artifact in self.committed_artifacts()}
        folders = {"/".join(inside[:4]) for name in self.files.list("objects") if len(inside := name.split("/")) > 4 and inside[1] in KINDS}
        return sorted(folders - whole)

    def artifacts(self, kind: str | None = None, project: str | None = None) -> list[Artifact]:
        """Return the artifacts of `entries`, oldest first, of all kinds or only of `kind`."""
        return [Artifact(one["kind"], one["key"], self.files) for one in self.entries(project) if kind in (None, one["kind"])]

    def resolve(self, name: str) -> Artifact:
        """Return the artifact of a name (`kind/prefix`, key prefix, or alias `name@version`). Raise PunaError unless exactly one fits."""
        if "@" in name:
            return self.alias(name)
        kind, _, prefix = name.rpartition("/")
        if kind:
            known_kind(kind)
        if len(prefix) < 4 or set(prefix) - set("0123456789abcdef"):
            raise PunaError(f"{name}: no such artifact; give at least 4 hex digits of the key, `puna list` shows them")
        kinds = (kind,) if kind else KINDS
        names = (n.split("/") for one in kinds for n in self.files.list(f"objects/{one}/{prefix[:2]}"))
        artifacts = [Artifact(n[1], n[3], self.files) for n in names if len(n) == 5 and n[4] == NAME and n[3].startswith(prefix)]
        if len(artifacts) != 1:
            ids = ", ".join(a.id for a in artifacts)
            raise PunaError(f"{name}: matches several artifacts: {ids}" if artifacts else f"{name}: no such artifact in {self.uri}")
        return artifacts[0]

    def check(self, artifact: Artifact, read: Sequence[str] = (), *, whole: bool = False) -> Artifact:
        return damage.check(self.files, artifact, read, whole=whole)

    def quarantine(self, artifact: Artifact) -> str | None:
        """Move a damaged artifact to `quarantine/`; return its new address, None if it is intact or gone."""
        with explain_write_errors(self.uri):
            return damage.quarantine(self.files, artifact)

    def suspects(self) -> dict[str, str]:
        return damage.suspects(self.files)

    def reading(self) -> Store:
        """Return a store for readers that commit nothing. It reads a table file only after verifying the file's checksum."""
        return Store(damage.reading(self.files), self.project)

    @contextlib.contextmanager
    def lock(self, key: str, *, wait: bool = True) -> Iterator[bool]:
        """Hold the lock of `key` against other processes. Without `wait`, yield False if another process holds it."""
        with contextlib.ExitStack() as stack:
            with explain_write_errors(self.uri):
                mine = stack.enter_context(self.files.lease(key, wait=wait))
            yield mine

    @contextlib.contextmanager
    def work(self, key: str) -> Iterator[Work]:
        """Yield the work of `key`, locked against other processes. Its folder survives crashes until the commit."""
        with explain_write_errors(self.uri), self.lock(key):
            yield Work(self.files, key, "" if self.project == DEFAULT else self.project)

    def import_table(self, kind: str, table: pa.Table, **side: pa.Table) -> Artifact:
        """Commit a table (and side tables) made outside any stage, for scripts and tests; return the artifact."""
        names = {kind: table, **side}
        content = {name: digest.of_table(table_schema(name).conform(rows)) for name, rows in names.items()}
        key = digest.of_value({"import": kind, "tables": content})
        self.holding.add(key)
        with self.work(key) as work:
            for name, rows in names.items():
                work.add(name, rows, "import")
            return work.commit(kind, key, Identity(IMPORT))

    def accepted_key(self, key: str) -> str:
        """Return the key of the artifact to use for `key`: `key` itself, or that of an older artifact declared equivalent."""
        fields = read_pointer(self.files, _acceptance(key))
        return key if fields is None else fields["stands_for"]

    def accept(self, old: Artifact, new_key: str) -> None:
        """Declare the artifact `old` equivalent to `new_key`, for example after a refactoring that changes no content."""
        with explain_write_errors(self.uri):
            self.files.write(_acceptance(new_key), pointer({"stands_for": old.key}))

    def acceptances(self) -> dict[str, str]:
        """Return new key → key of the older artifact to use for it, for all accepted equivalences."""
        names = filter(is_pointer, self.files.list("refs/.accepted"))
        return {Path(n).stem: fields["stands_for"] for n in names if (fields := read_pointer(self.files, n)) is not None}

    @property
    def project(self) -> str:
        return self._aliases.project

    def within(self, project: str | None) -> Store:
        """Return a view of this store within a project, or the store itself if `project` is empty or its own."""
        if not project or project == self.project:
            return self
        view = copy.copy(self)
        view._aliases, view._whole = Aliases(self.files, project), self._whole or self
        return view

    def require_project(self) -> Store:
        """Return this store. Raise PunaError if its project has no alias or artifact."""
        if self.project != DEFAULT and self.project not in (projects := self.projects()):
            raise PunaError(f"project {self.project}: {self.uri} has no such project; it has {', '.join(projects)}")
        return self

    def projects(self) -> list[str]:
        """Return the projects of the store's aliases and of the runs that made its artifacts, the default project first."""
        names = {*map(self.project_of, self._aliases.files()), *(one.get("project") or DEFAULT for one in self.entries())}
        return [DEFAULT, *sorted(names - {DEFAULT})]

    def alias(self, name: str) -> Artifact:
        """Return the artifact that `[PROJECT/]NAME@VERSION` points to. Raise PunaError if the alias or artifact does not exist."""
        target = self._aliases.target(name)
        if target is None:
            project, own = self._aliases.parts(name)
            self.within(project).require_project()
            raise PunaError(f"{own}: no such alias in {'' if project == DEFAULT else f'project {project} of '}{self.uri}")
        artifact = self.find(*target)
        if artifact is None:
            raise PunaError(f"{name}: points to {target[0]}/{target[1][:12]}, which is not in the store")
        return artifact

    def set_alias(self, name: str, artifact: Artifact, expected: str | None = None) -> str:
        with explain_write_errors(self.uri):
            return self._aliases.set(name, artifact, expected)

    def full_name(self, alias: str) -> str:
        """Return the alias as named in the default project: aliases of other projects get the prefix PROJECT/."""
        return self._aliases.name_for(alias)

    def project_of(self, alias: str) -> str:
        return self._aliases.parts(alias)[0]

    def own(self, name: str) -> str:
        """Return `name` made specific to this project, for a lock or a note; in the default project, `name` unchanged."""
        return name if self.project == DEFAULT else f"{name}-{self.project}"

    def aliases(self) -> dict[str, str]:
        """Return alias → key for all aliases; aliases of other projects have their full names. Raise PunaError if one is damaged."""
        return self._aliases.keys()

    def lost_aliases(self) -> list[str]:
        """Return a message for each alias that is gone, unreadable or points to no artifact, and for each damaged line of a journal."""
        remedy = "is gone; the run or command that set it sets it again"
        messages = [f"{alias}: was set (to {first} at first) and {remedy}" for alias, first in self._aliases.find_lost().items()]
        for alias in self._aliases.files():
            try:
                self.alias(alias)
            except PunaError as error:
                messages.append(str(error))
        for name, fields in ((aliases.JOURNAL, aliases.FIELDS), (damage.JOURNAL, damage.FIELDS)):
            lines = index.journal(self.files, name, fields)[1]
            messages += [f"{self.uri}/{name}: line {n} is damaged; its information is lost. Remove the line" for n in lines]
        return messages

    def names(self, project: str | None = None) -> dict[str, list[str]]:
        """Return key → its aliases, in all projects or in one, for all keys that have such an alias."""
        names: dict[str, list[str]] = {}
        for name, key in self.aliases().items():
            if project in (None, self.project_of(name)):
                names.setdefault(key, []).append(name)
        return names

    def record(self, run: str, event: dict[str, Any]) -> None:
        line = json.dumps({"time": datetime.now(UTC).isoformat(), **event}, ensure_ascii=False).encode() + b"\n"
        with explain_write_errors(self.uri):
            if self.files.stat(f"runs/{run}.jsonl") is None:
                self.files.append(ORDER, run.encode() + b"\n")
            self.files.append(f"runs/{run}.jsonl", line)

    def at_work(self, run: str) -> AbstractContextManager[bool]:
        """Hold a lock while a run is in progress, so that `gc` keeps the run's artifacts and a killed run can be detected."""
        return self.lock(f"run-{run}")

    def runs(self) -> list[str]:
        """Return the names of the runs in the order in which they started."""
        names = {Path(n).stem for n in self.files.list("runs") if n.endswith(".jsonl")}
        order = self.files.read(ORDER).decode(errors="replace").split("\n") if self.files.stat(ORDER) else []
        sequence = [name for name in dict.fromkeys(order) if name in names]
        return [*sorted(names - set(sequence)), *sequence]

    def events(self, run: str) -> list[dict[str, Any]]:
        """Return the events of a run, skipping lines that a crash truncated. Raise PunaError if there is no such run."""
        if self.files.stat(f"runs/{run}.jsonl") is None:
            raise PunaError(f"run {run}: no such run; `puna list --runs` shows them")
        events = []
        for line in self.files.read(f"runs/{run}.jsonl").splitlines():
            with contextlib.suppress(ValueError):
                events.append(json.loads(line))
        return events

    def log(self, run: str) -> RunLog:
        events = self.events(run)
        # A look at the lock takes seconds on an object store: an end that is recorded needs none.
        ended = any(event.get("event") in ENDS for event in events)
        return RunLog.of(run, events, at_work=not ended and self.files.is_held(f"run-{run}"))


def _acceptance(key: str) -> str:
    return f"refs/.accepted/{key}.json"


def _field(data: bytes, name: str) -> object:
    try:
        return json.loads(data).get(name)
    except (ValueError, AttributeError):
        return None


@contextlib.contextmanager
def explain_write_errors(uri: str) -> Iterator[None]:
    """Turn errors of a full disk or a read-only store inside the `with` block into a PunaError that says what to do."""
    try:
        yield
    except PunaError:
        raise
    except Exception as error:
        number = getattr(error, "errno", None)
        if number in (errno.ENOSPC, errno.EDQUOT) or "No space left on device" in str(error):
            message = "the disk is full. Nothing incomplete was committed, and finished parts are kept: make room and run again"
            raise PunaError(f"store {uri}: {message} ({error})") from error
        inside = str(getattr(error, "filename", None) or "").startswith(uri)
        if inside and number in (errno.EROFS, errno.EACCES, errno.EPERM):
            raise PunaError(f"store {uri}: cannot be written ({error}); mount it writable or give another with --store") from error
        raise


def files_of(uri: str | Path) -> Files:
    """Return the files at a path, a `file://` or an `s3://` URI. Raise PunaError for other addresses."""
    if str(uri).startswith("s3://"):
        try:
            from puna.storage.s3 import S3Files
        except ImportError as error:
            raise PunaError("a store on S3 needs the package obstore; install puna[s3]") from error
        return S3Files.at(str(uri))
    return LocalFiles(folder_of(uri))


def folder_of(uri: str | Path) -> Path:
    """Return the absolute path of the folder at a path or `file://` URI, which need not exist. Raise PunaError for files and other URIs."""
    text = str(uri)
    parsed = urlsplit(text) if "://" in text else None
    if parsed is not None and (parsed.scheme != "file" or parsed.netloc not in ("", "localhost")):
        raise PunaError(f"store {text}: only folders and object stores can hold a store; give a path, or s3://BUCKET/PREFIX")
    root = Path(unquote(parsed.path) if parsed is not None else text).expanduser().resolve()
    if root.exists() and not root.is_dir():
        raise PunaError(f"store {root}: is a file, not a folder")
    return root
