"""The command `puna clean`, which turns your own pages into clean documents in plain files, with a report."""

from __future__ import annotations

import json
import shlex
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from puna.flows.cli.inspect import replacing
from puna.flows.curate import curate
from puna.flows.engine import preflight
from puna.flows.engine.inputs import column_changes, parse_inputs
from puna.flows.engine.perform import Performer
from puna.flows.engine.preflight import document_texts, page_texts
from puna.flows.engine.recipe import read_values
from puna.flows.engine.session import Session, session
from puna.flows.engine.trace import load
from puna.flows.report import write
from puna.stages.contract import External
from puna.stages.contract.declaration import LOOK
from puna.stages.curate.domains import TrainDomainsConfig, looked_at, seed_label
from puna.stages.curate.ingest import IngestConfig, check_inputs, first_rejection, hints, ingest, peek
from puna.stages.curate.language import identify
from puna.stages.reading.dates import EPOCH
from puna.stages.reading.field_detection import sniff
from puna.stages.reading.pages import NO_PAGE
from puna.storage import Artifact, PunaError, Store, errors_at

ENDINGS = {".jsonl": "jsonl", ".parquet": "parquet"}
ROWS = 10_000
RECIPE = "clean"


@dataclass
class Choices:
    """Changes of the recipe that fit the inputs, and messages to the user about the inputs and the changes (`said`)."""

    changes: list[str] = field(default_factory=list)
    said: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Cleaned:
    """The files that `puna clean` wrote, and counts. `kept`: clean documents. `pages`: all pages, kept or dropped. `rules`: rule
    (`step.rule`) → pages that it dropped, largest count first. `no_page`: rule → input records that hold no page. `files_without_page`: a
    message about files that hold no page; empty if there are none."""

    documents: Path
    dropped: Path
    report: Path
    kept: int
    pages: int
    rules: dict[str, int]
    no_page: dict[str, int]
    files_without_page: str


def clean(
    paths: Sequence[str], output: Path, store: Store, *, changes: Sequence[str] = (), columns: Sequence[str] = (),
    recipe: str = RECIPE, workers: int | None = None, say: Callable[[str], None] = print, quiet: bool = False,
) -> Cleaned:  # fmt: skip
    """Clean pages: inspect them, choose settings and print the choices, run the flow `curate`, write plain files. `output`: a folder, or a
    file that ends in .jsonl or .parquet. `recipe`: a name or a YAML file, which inherits from `clean` unless it names a `base`. Raise
    PunaError for a wrong input before anything runs, and if a file cannot be written at the end."""
    kind, target = _target(output)
    store = store.within(read_values(recipe, list(changes), RECIPE)[0].get("project"))
    parsed = parse_inputs(paths, curate.inputs, store, "clean")
    flow_input = curate.by_kind(parsed.items, parsed.named, parsed.sources)
    imported = [item for item in parsed.items if isinstance(item, Artifact) and item.kind == "documents"]
    mappings = column_changes(columns, "ingest")
    choices = look([item for item in parsed.items if isinstance(item, External)], imported, (*mappings, *changes), recipe)
    for sentence in choices.said:
        say(sentence)
    every = [*choices.changes, *mappings, *changes]
    steps = load(recipe, every, "curate", RECIPE)
    preflight.check(curate, steps, flow_input, store)
    options = [*(["--recipe", recipe] if recipe != RECIPE else []), *(word for text in (*mappings, *changes) for word in ("--set", text))]
    command = shlex.join(["puna", "clean", *paths, "-o", str(output), *options])
    request = {"command": command, "recipe": recipe, "changes": every, "inputs": list(paths)}
    with session(store, flow="curate", workers=workers, json=quiet, parameters=request) as now:
        performer = Performer(steps)
        documents = performer.walk(curate, flow_input).documents.items[0]
    sources = [*(outcome.artifact for step, outcome in now.outcomes if step == "ingest"), *imported]
    dropped, page = (target.with_name(f"{target.stem}.{name}") for name in ("dropped.jsonl", "report.html"))
    with errors_at(f"clean: {target.parent}: cannot be created; name another place with -o", OSError):
        target.parent.mkdir(parents=True, exist_ok=True)
    with _replacing(target) as file:
        _write(_rows(documents, now), file, kind)
    with _replacing(dropped) as file:
        _write(_dropped_rows(now, sources), file, "jsonl")
    with _replacing(page) as file:
        shutil.copyfile(write(store, now.run, None), file)
    now.refresh()
    rules = _rules(now)
    no_page = {name: rules.pop(f"ingest.{name}") for name in NO_PAGE if f"ingest.{name}" in rules}
    refused = sum(count for name, count in rules.items() if name.startswith("ingest."))
    metrics = [artifact.manifest.metrics for artifact in sources if "files_without_page" in artifact.manifest.metrics]
    bare = "; ".join(f"{m['files_without_page']:,} files contain no page at all: {m['files_without_page_are']}" for m in metrics)
    pages = refused + sum(artifact.rows() for artifact in sources)
    return Cleaned(target, dropped, page, documents.rows(), pages, rules, no_page, bare)


def look(files: list[External], imported: list[Artifact], named: Sequence[str], recipe: str = RECIPE) -> Choices:
    """Sample the inputs; return fitting recipe changes, and messages. `named`: the user's changes. Raise PunaError if no text is found."""
    choices = Choices()
    values = load(recipe, list(named), "curate", RECIPE).values
    reading = values.get("ingest") or {}
    inputs = dict(reading.get("inputs") or {})
    for external in files:
        size = sum(file.bytes for file in external.files)
        choices.said.append(f"{external.name}: {len(external.files):,} file{'s' * (len(external.files) != 1)}, {size / 1e6:,.1f} MB")
        fields = sniff(external)
        if fields is None or reading.keys() & {"text_column", "html_column"} or external.name in inputs:
            continue
        own = {"html" if fields.html else "text": fields.page} | ({"url": fields.url} if fields.url not in (None, "url") else {})
        inputs[external.name] = own
        address = f"URL in {fields.url}" if fields.url else "no field with a URL"
        time = f"date in {fields.date}" if fields.date else "no field with a date"
        what = "HTML" if fields.html else "plain text"
        names = ", ".join(fields.names)
        choices.said.append(f"  fields {names}: {fields.page} is read as {what}; {address}, {time} (--columns changes this)")
        if fields.others:
            choices.said.append(f"  other files have text in {', '.join(fields.others)}: no page is read from these; clean them separately")
    if inputs:
        choices.changes.append(f"ingest.inputs={json.dumps(inputs)}")
    texts: list[str] = []
    if files:
        config = load(recipe, [*choices.changes, *named], "curate", RECIPE).one("ingest", ingest, IngestConfig)
        texts += page_texts(*peek(files, config, LOOK), LOOK)[0]
    for artifact in imported:
        choices.said.append(f"{artifact.id}: {artifact.rows():,} documents")
        texts += document_texts(artifact, LOOK / len(imported))[1]
    texts = [text for text in texts if text.strip()]
    if not texts:
        names = ", ".join(f.uri for f in files) or imported[0].id
        if files:
            check_inputs(files, config)
        rejected = first_rejection(files, config) if files else None
        reason = f" ({rejected.rule}: {rejected.detail}{hints([rejected.rule])})" if rejected else ""
        raise PunaError(f"clean: no page of {names} contains text{reason}; `puna run ingest --input …` reports what was dropped")
    languages = Counter(identify(text)[0] for text in texts)
    shares = ", ".join(f"{name} {count / len(texts):.0%}" for name, count in languages.most_common(6))
    choices.said.append(f"languages of {len(texts):,} sampled pages: {shares}; all are kept (--set 'select.language={{…}}' selects some)")
    if values.get("domains") is None:
        _choose_topics(texts, choices)
    return choices


def _choose_topics(texts: list[str], choices: Choices) -> None:
    config = TrainDomainsConfig()
    labels = (seed_label(looked_at(text[: config.max_characters]), config.min_seeds, config.max_second) for text in texts)
    topics = Counter(label for label in labels if label is not None)
    # Ask for twice `min_labels`: duplicates are removed before the step `domains`.
    if sum(count >= 2 * config.min_labels for count in topics.values()) >= 2:
        choices.changes.append("domains={}")
        choices.said.append(f"topics: {', '.join(name for name, _ in topics.most_common(5))}, …; each document gets a topic (domains)")
    else:
        choices.said.append("topics: too few pages of two topics to train a classifier; documents get no topic (domains)")


def _target(output: Path) -> tuple[str, Path]:
    """Return the format and the path of the file for the clean documents. Raise PunaError if `output` cannot be used."""
    place = next(folder for folder in output.absolute().parents if folder.exists())
    if not place.is_dir():
        raise PunaError(f"clean: {output}: cannot be written, since {place} is a file; name another place with -o")
    if output.suffix in ENDINGS and not output.is_dir():
        return ENDINGS[output.suffix], output
    if output.suffix and not output.is_dir():
        raise PunaError(f"clean: {output}: name a folder, or a file that ends in {' or '.join(ENDINGS)}")
    if output.exists() and not output.is_dir():
        raise PunaError(f"clean: {output}: is a file; name a folder")
    return "jsonl", output / "documents.jsonl"


def _rows(documents: Artifact, now: Session) -> Iterator[pa.RecordBatch]:
    """Yield batches of the clean documents, with columns for language and topic if the run computed these signals."""
    signals = []
    for artifact in (outcome.artifact for step, outcome in now.outcomes if step in ("language", "domains")):
        names = artifact.manifest.tables["signals"].columns
        signals.append(artifact.read(columns=["id", *(name for name in ("language", "language_score", "domain") if name in names)]))
    for table in (part.read() for part in documents.parts(None, None, ROWS)) if documents.rows() else [documents.read()]:
        # The store marks a missing date by the epoch; plain files get null.
        at, fetched = table.schema.get_field_index("fetched_at"), table["fetched_at"]
        table = table.set_column(at, "fetched_at", pc.if_else(pc.equal(fetched, EPOCH), pa.scalar(None, fetched.type), fetched))
        for rows in signals:
            table = _beside(table, rows, rows.column_names[1:])
        yield from table.to_batches() or [pa.RecordBatch.from_pylist([], table.schema)]  # a file without rows has columns, too


def _dropped_rows(now: Session, sources: Sequence[Artifact]) -> Iterator[pa.RecordBatch]:
    """Yield batches of all dropped rows, with step, source and URL. Source and URL are null if no row of `sources` has the id."""
    tables = [(step, outcome.artifact.read("dropped")) for step, outcome in now.outcomes if "dropped" in outcome.artifact.tables]
    ids = pa.chunked_array([table["id"] for _, table in tables], pa.string())
    pieces = (part.read() for artifact in sources for part in artifact.parts(None, ["id", "source", "url"], ROWS))
    none = pa.schema([(name, pa.string()) for name in ("id", "source", "url")]).empty_table()
    pages = pa.concat_tables([none, *(rows.filter(pc.is_in(rows["id"], value_set=ids)) for rows in pieces)], promote_options="default")
    for step, table in tables:
        whole = _beside(table, pages, ["source", "url"]).append_column("step", pa.array([step] * table.num_rows, pa.string()))
        yield from whole.select(["step", "source", "url", *table.column_names]).to_batches()


def _beside(table: pa.Table, rows: pa.Table, names: Sequence[str]) -> pa.Table:
    """Return the table with the columns `names` of `rows` appended, joined by id; null where `rows` lacks the id."""
    place = pc.index_in(table["id"], value_set=rows["id"].combine_chunks())
    for name in names:
        table = table.append_column(name, rows[name].take(place))
    return table


def _rules(now: Session) -> dict[str, int]:
    artifacts = [(step, outcome.artifact) for step, outcome in now.outcomes if "dropped" in outcome.artifact.tables]
    counts = Counter(f"{step}.{rule}" for step, artifact in artifacts for rule in artifact.read("dropped", ["rule"])["rule"].to_pylist())
    return dict(counts.most_common())


def _write(batches: Iterator[pa.RecordBatch], file: Path, kind: str) -> None:
    if kind == "parquet":
        writer: pq.ParquetWriter | None = None
        for batch in batches:
            writer = writer or pq.ParquetWriter(file, batch.schema.remove_metadata(), compression="zstd")
            writer.write_batch(batch.replace_schema_metadata(None))
        if writer is not None:
            writer.close()
        return
    with file.open("w", encoding="utf-8") as out:
        for batch in batches:
            for row in batch.to_pylist():
                out.write(json.dumps(row, ensure_ascii=False, default=str) + "\n")


def _replacing(target: Path) -> AbstractContextManager[Path]:
    return replacing(target, f"clean: {target}", "name another place with -o")
