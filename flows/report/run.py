"""The report's view of a run: its steps in order, their artifacts, and their inputs."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from puna.stages.conversations import as_text, content_of, messages_of
from puna.storage import Artifact, InputRecord, PunaError, Store
from puna.storage.parts import Beside, Follower
from puna.storage.runs import RunLog
from puna.storage.tables import connect, parquet

PIECE = 1 << 15  # maximum number of rows that `lengths` reads at once
ROUND = re.compile(r"(?:^|_)(?:round_?)?(\d+)$")
WRITTEN = {"sft": "SFT", "dpo": "DPO", "ppo": "PPO", "grpo": "GRPO", "pii": "PII", "url": "URL", "minhash": "MinHash", "lora": "LoRA"}


def for_people(name: str) -> str:
    """Return the name of a step as words: `url_filter` is "URL filter"."""
    words = " ".join(WRITTEN.get(word, word) for word in name.split("_"))
    return words[:1].upper() + words[1:]


@dataclass(frozen=True)
class Step:
    """One step of a run: its artifact, whether it was reused, and its seconds in this run."""

    name: str
    stage: str
    artifact: Artifact
    reused: bool
    seconds: float

    @property
    def metrics(self) -> dict[str, Any]:
        return self.artifact.manifest.metrics

    @property
    def made_seconds(self) -> float:
        """Return the seconds that making the artifact took, in this or an earlier run."""
        return float(self.artifact.manifest.timings.get("seconds", self.seconds))

    @property
    def round(self) -> int | None:
        """Return the number of the alignment round in the step's name, None without a number."""
        match = ROUND.search(self.name)
        return int(match[1]) if match else None

    @property
    def label(self) -> str:
        return for_people(self.name)

    def has(self, table: str) -> bool:
        record = self.artifact.manifest.tables.get(table)
        return record is not None and record.rows > 0


@dataclass
class Run:
    """A run's data for a report: its log, its steps in order, and the artifacts that are no longer in the store."""

    store: Store
    log: RunLog
    steps: list[Step]
    missing: list[str]

    @classmethod
    def open(cls, store: Store, name: str) -> Run:
        """Return the run `name`, or the newest run if `name` is "latest". Raise PunaError if there is no such run or its log is empty."""
        store = store.reading()
        if name == "latest":
            names = store.runs()
            if not names:
                raise PunaError(f"store {store.root}: holds no run yet; `puna run pipeline` makes one")
            name = names[-1]
        if name not in store.runs():  # a name, never a path
            raise PunaError(f"run {name}: no such run; `puna list --runs` shows them")
        if not store.events(name):
            raise PunaError(f"run {name}: its log is empty")
        log = store.log(name)
        latest: dict[str, Step] = {}
        missing: dict[str, None] = {}
        for record in log.made:
            artifact = store.find(record.kind, record.key)
            if artifact is None:
                missing[f"{record.step} ({record.kind}/{record.key[:12]})"] = None
                continue
            latest.pop(record.step, None)
            latest[record.step] = Step(record.step, record.stage, artifact, record.reused, record.seconds)
        return cls(store, log, list(latest.values()), list(missing))

    def kind(self, *kinds: str) -> list[Step]:
        return [s for s in self.steps if s.artifact.kind in kinds]

    def source(self, step: Step, record: InputRecord) -> Artifact | None:
        """Return the artifact that an input record names: an earlier step's (same key, else same content), else the store's, else None.
        Content counts because a reused artifact's record names the input of an earlier run."""
        if record.kind == "external":
            return None
        before = [s.artifact for s in reversed(self.steps[: self.steps.index(step)]) if s.artifact.kind == record.kind]
        same = [a for a in before if a.key == record.key] or [a for a in before if a.data_digest == record.data_digest]
        return same[0] if same else self.store.find(record.kind, record.key)

    def inputs(self, step: Step) -> list[Artifact]:
        artifacts = (self.source(step, record) for record in step.artifact.manifest.inputs)
        return [a for a in artifacts if a is not None]

    def filtered_inputs(self, step: Step) -> list[Artifact]:
        """Return the inputs whose rows the step kept or dropped: inputs of its output's kind or, without any, the extracted pages."""
        kinds = ["documents", "pages"] if step.artifact.kind == "documents" else [step.artifact.kind]
        records = sorted((i for i in step.artifact.manifest.inputs if i.kind in kinds), key=lambda i: kinds.index(i.kind))
        artifacts = [self.source(step, i) for i in records if (i.kind, i.name) == (records[0].kind, records[0].name)]
        return [a for a in artifacts if a is not None]

    def signals(self, column: str) -> Artifact | None:
        steps = (s for s in reversed(self.kind("signals")) if s.has("signals"))
        return next((step.artifact for step in steps if column in step.artifact.columns()), None)


def lengths(documents: Artifact, *others: Beside) -> Iterator[tuple[pa.Table, ...]]:
    """Yield batches of documents (`id`, `characters`), each with the other tables' rows up to its last id. No text is read."""
    followers = [Follower(other, "", None) for other in others]
    for shard, facts in zip(documents.shards(), documents.facts(), strict=True):
        for start, stop in shard.pieces(PIECE):
            ids, sizes = shard.read(start, stop, ["id"]), facts.read(start, stop, ["characters"])
            last = ids["id"][-1].as_py()
            yield ids.append_column("characters", sizes["characters"]), *(follower.upto(last) for follower in followers)


def join_rows(rows: pa.Table, other: pa.Table) -> pa.Table:
    """Return the rows whose id is also in `other`, with the columns of `other`."""
    place = pc.index_in(rows["id"], value_set=other["id"].combine_chunks())
    both = rows.filter(pc.is_valid(place))
    matches = other.take(pc.drop_null(place))
    for name in matches.column_names:
        if name != "id":
            both = both.append_column(name, matches[name])
    return both


def rows_of(artifact: Artifact, wanted: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Return id → row, with the fields that a card shows, for the artifact's rows whose ids are `wanted`; {} if it has no texts."""
    names = artifact.columns()
    column = next((n for n in ("text", "body", "messages") if n in names), None)
    if column is None:
        return {}
    columns = ["id", column, *(n for n in ("title", "url", "source", "task") if n in names)]
    targets, rows = sorted(wanted), {}
    for shard in artifact.shards():
        inside = [i for i in targets if shard.rows and shard.low[0] <= i <= shard.high[0]]
        if inside:
            ids = shard.read(0, shard.rows, ["id"])["id"].combine_chunks()
            places = np.asarray(pc.drop_null(pc.index_in(pa.array(inside, pa.string()), value_set=ids)), np.int64)
            for together in shard.by_group(places):
                for row in shard.take(together, columns).to_pylist():
                    text = row[column].decode("utf-8", "replace") if isinstance(row[column], bytes) else row[column] or ""
                    rows[row["id"]] = row | (_turns(row) if column == "messages" else {"text": text})
    return rows


def query(artifact: Artifact, table: str, *queries: str) -> list[list[tuple[Any, ...]]]:
    """Return the rows of each DuckDB query. In queries, `found` is the artifact's table `table`, without rows kept by reference."""
    with (TemporaryDirectory() as folder, connect(memory_limit="128MB", threads=1, temp_directory=folder) as connection):
        before = artifact.files.sql(connection)
        files = [f"{before}{artifact.place}/{shard.file}" for shard in artifact.record(table).shards if shard.file]
        connection.execute(f"create view found as select * from {parquet(files)}")
        return [connection.execute(query).fetchall() for query in queries]


def _turns(row: dict[str, Any]) -> dict[str, str]:
    """Return a conversation for a card: the last turn as `text`, all earlier turns as `prompt`."""
    messages = messages_of(row)
    return {"prompt": as_text(messages[:-1]), "text": as_text(messages[-1:]) if len(messages) == 1 else content_of(messages[-1])}
