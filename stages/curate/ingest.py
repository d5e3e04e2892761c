"""`ingest`: import of raw pages from archives, folders, tables and data sets."""

from __future__ import annotations

import contextlib
import fnmatch
import itertools
import time
import zlib
from collections import Counter
from collections.abc import Container, Iterator
from contextlib import closing
from typing import Any, BinaryIO, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pydantic import Field

from puna.stages.contract import External, ExternalFile, StageConfig, StageRun, stage
from puna.stages.reading import readers
from puna.stages.reading.bodies import sniff
from puna.stages.reading.files import COMPRESSED, GZIP_MAGIC, ZSTD_MAGIC, Job, jobs_of, suffix
from puna.stages.reading.pages import NO_PAGE, UNREADABLE, Page, Rejected, page_id, rejected_id, repetitions
from puna.stages.reading.rows import FORMATS as TABLES
from puna.stages.reading.rows import SIDECARS
from puna.stages.reading.warc import read_warc
from puna.stages.reading.warc_frames import ZSTD_DICTIONARY_MAGIC
from puna.storage import PunaError, errors_at
from puna.storage.exchange import partitions
from puna.storage.schemas import table_schema
from puna.storage.shards import count

CHUNK_BYTES = 8 << 20  # maximum bytes of page bodies that are held as Python objects at once
BATCH_BYTES = 8 << 20  # small files are read together up to this total size
PACKED = 4  # approximate ratio of pages' size to their archives' size
HUB_BYTES = 1 << 30
ROW_BYTES = 6  # approximate maximum bytes of JSON per byte of a page, which may be escaped as \u0000
ENDINGS_SHOWN, EXAMPLES_SHOWN = 5, 3  # maximum numbers of endings of files without pages, and of files of an ending, that a message lists
RECORD = pa.schema(
    [
        ("id", pa.string()), *[f for f in table_schema("pages").schema if f.name != "id"],
        ("rule", pa.string()), ("value", pa.float64()), ("threshold", pa.float64()), ("detail", pa.string()),
    ]
)  # fmt: skip
RECORD = pa.schema([field.with_nullable(True) for field in RECORD])
FORMATS = dict.fromkeys((".warc", ".wet", ".wat"), "warc") | {end: "jsonl" if kind == "json" else kind for end, kind in TABLES.items()}


class InputColumns(StageConfig):
    """Names of the fields in the rows of one input."""

    text: str | None = Field(None, min_length=1, description="Field that holds plain text")
    html: str | None = Field(None, min_length=1, description="Field that holds HTML, which is read in place of text")
    url: str | None = Field(None, min_length=1, description="Field that holds the URL")
    date: str | None = Field(None, min_length=1, description="Field that holds the time of the fetch")


class IngestConfig(StageConfig):
    format: Literal["auto", "warc", "files", "parquet", "jsonl", "csv", "tsv", "dataset"] = Field(
        "auto", description="Format of every input file; auto: detect it from the file's name and first bytes"
    )
    content_types: tuple[str, ...] = Field(
        ("text/html", "application/xhtml+xml", "text/plain", "text/markdown", "text/x-*"),
        min_length=1,
        description="Media types to keep; * matches any characters",
    )
    max_body_bytes: int = Field(32 << 20, ge=1024, le=1 << 31, description="Maximum size of a page to keep, in bytes")
    text_column: str = Field("text", min_length=1, description="Field of a row that holds plain text; a.b names a nested field")
    html_column: str | None = Field(None, min_length=1, description="Field of a row that holds HTML, which is read in place of text")
    url_column: str | None = Field(None, min_length=1, description="Field with the URL; default: `url`. Null: the row's place in the file")
    date_column: str | None = Field(None, min_length=1, description="Field with the time of the fetch; default: a usual name, else 1970")
    inputs: dict[str, InputColumns] = Field(default_factory=dict, description="Input name → its fields, for inputs whose fields differ")
    dataset_subset: str | None = Field(None, min_length=1, description="Configuration of a hub data set")
    dataset_split: str = Field("train", min_length=1, description="Split of a hub data set")

    def columns_of(self, source: str) -> readers.Columns:
        own = self.inputs.get(source, InputColumns())
        html = None if own.text else self.html_column
        return readers.Columns(own.text or self.text_column, own.html or html, own.url or self.url_column, own.date or self.date_column)


@stage(kind="pages")
def ingest(inputs: list[External], config: IngestConfig, run: StageRun) -> None:
    """Read pages from WARC, WET, folders of pages, Parquet, JSON Lines, JSON arrays, CSV and Hugging Face data sets.

    Every record becomes a page or a row of `dropped` (not_a_response, not_a_page, http_status, content_type, empty, body_too_large,
    truncated_record, malformed_record, record_too_large, undecodable_body, duplicate_record; failed if reading it raised an error); so does
    a file that cannot be read, or the rest of it (unreadable_file). A page's id is a hash of source, URL, time, media type and body, not of
    its position in the inputs. Raise PunaError if no page is kept."""
    jobs = list(_jobs(inputs, config))
    input_bytes = sum(job.file.bytes * PACKED if job.file else HUB_BYTES for job in jobs)
    batches = list(_batches(jobs))
    read = run.exchange(_read, batches, config, by="id", partitions=partitions(input_bytes))
    came, raw = (sum(info[name] for info in read.infos) for name in ("rows", "bytes"))
    run.count_input(came)
    shards = run.produce_shards(_sort, read, count(table_schema("pages"), raw))
    without = sum((Counter(info["without_page"]) for info in read.infos), Counter[str]())
    examples = {ending: sorted(why for one in read.infos for why in one["examples"].get(ending, ()))[:EXAMPLES_SHOWN] for ending in without}
    rules = sum((Counter(shard["rules"]) for shard in shards), Counter[str]())
    body_bytes = sum(shard["bytes"] for shard in shards)
    run.metric("body_bytes", body_bytes)
    if not body_bytes:
        inputs_named = ", ".join(dict.fromkeys(job.uri or (job.file.location if job.file else job.name) for job in jobs[:3]))
        outcomes = f": {', '.join(f'{count} {rule}' for rule, count in rules.most_common())}{hints(rules)}" if rules else ""
        raise PunaError(f"ingest: {inputs_named}{', …' if len(jobs) > 3 else ''}: no page is kept; files {len(jobs)}, records {came}"
            f"{outcomes}{_kinds(without, examples) if rules.keys() & {'not_a_page', UNREADABLE} else ''}")  # fmt: skip
    run.metric("files", len(jobs))
    if without:
        run.metric("files_without_page", without.total())
        run.metric("files_without_page_are", _kinds(without, examples).removeprefix("; "))
    for rule, number in sorted(rules.items()):
        run.metric(f"dropped_{rule}", number)


def _kinds(without: Counter[str], examples: dict[str, list[str]]) -> str:
    endings = sorted(without.items(), key=lambda item: (-item[1], item[0]))[:ENDINGS_SHOWN]
    more = f"; {len(without) - len(endings)} more endings" if len(without) > len(endings) else ""
    few = {ending: " | ".join([*examples[ending], *(["…"] if count > len(examples[ending]) else [])]) for ending, count in endings}
    return "".join(f"; {count:,} {ending} ({few[ending]})" for ending, count in endings) + more


def _batches(jobs: list[Job]) -> Iterator[list[Job]]:
    held: list[Job] = []
    size = 0
    for job in jobs:
        held.append(job)
        size += job.file.bytes if job.file else BATCH_BYTES
        if size >= BATCH_BYTES:
            yield held
            held, size = [], 0
    if held:
        yield held


def _sort(rows: pa.Table) -> tuple[dict[str, pa.Table], dict[str, Any]]:
    """Return pages and dropped rows of a range of ids, and counts of bytes and rules. Of rows with the same id, the first is kept."""
    ids = rows["id"].to_pylist()
    first, repeated = repetitions(ids)
    is_page = np.asarray(pc.is_valid(rows["body"]), bool)
    pages = rows.select(table_schema("pages").schema.names)
    if not (first & is_page).all():
        pages = pages.filter(pa.array(first & is_page))
    schema = table_schema("dropped").schema
    again = []
    for at, identity in repeated.items():
        what = rows["url"][at].as_py() or rows["rule"][at].as_py()
        again.append({"id": identity, "rule": "duplicate_record", "detail": f"{ids[at]}: {what}"})
    other = rows.select(schema.names).filter(pa.array(first & ~is_page)).cast(schema)
    dropped = pa.concat_tables([other, pa.Table.from_pylist(again, schema=schema)])
    size = pc.sum(pc.binary_length(pages["body"]).cast(pa.int64())).as_py() or 0
    return {"pages": pages, "dropped": dropped}, {"bytes": size, "rules": dict(Counter(dropped["rule"].to_pylist()))}


LOOKED_AT = 100  # number of records, from the start of each file, that `first_rejection` reads
HINTS = {
    "body_too_large": "ingest.max_body_bytes is the limit",
    "not_a_page": "a row is a page if it has the field named by ingest.text_column or ingest.html_column",
    "content_type": "WARC, WET, Parquet, JSONL, HTML and text are read; other media types can be added to ingest.content_types",
    "not_a_response": "an archive's responses, resources and conversions (WET) are pages; metadata (WAT) and requests are not",
}
"""Rule → hint for the error message when no page is kept."""


def hints(rules: Container[str]) -> str:
    return "".join(f"; {hint}" for rule, hint in HINTS.items() if rule in rules)


def check_inputs(inputs: list[External], config: IngestConfig) -> None:
    """Raise PunaError if the inputs cannot be read as configured. At least one file must contain a row and the named columns (Parquet), a
    row that gives a page (JSON, CSV), or a byte (other formats)."""
    rejected: list[Rejected] = []
    for job in _jobs(inputs, config):
        first = _first(job, config)
        if first is True:
            return
        rejected += [first] if first else []
    why = "; ".join(one.detail for one in rejected[:3]) + hints({one.rule for one in rejected[:3]})
    wrong = f" that can be read: {why}{'; …' if len(rejected) > 3 else ''}" if rejected else ": there is nothing to read"
    raise PunaError(f"the inputs {', '.join(external.uri for external in inputs)} have no rows{wrong}")


def peek(inputs: list[External], config: IngestConfig, seconds: float) -> tuple[list[Page], float]:
    """Return sample pages from every input file except streamed data sets, read in about `seconds`, and about their share of bytes."""
    jobs = [job for job in _jobs(inputs, config) if job.file is not None]
    pages: list[Page] = []
    read, total = 0.0, sum(job.file.bytes for job in jobs if job.file is not None)
    start = time.monotonic()
    for number, job in enumerate(jobs):
        # Later files also get the time that earlier files did not use.
        until = start + seconds * (number + 1) / len(jobs)
        assert job.file is not None
        body_bytes = 0
        for record in _records(job, config):
            judged = _judge(record, config, {})
            if isinstance(judged, Page):
                pages.append(judged)
                body_bytes += len(judged.body)
            if time.monotonic() > until:
                packed = job.format == "parquet" or job.file.name.endswith(COMPRESSED)
                read += min(job.file.bytes * 0.99, body_bytes / (5 if packed else 1))
                break
        else:
            read += job.file.bytes
    return pages, min(1.0, read / total) if total else 0.0


def first_rejection(inputs: list[External], config: IngestConfig) -> Rejected | None:
    """Return the first rejected record among the first `LOOKED_AT` records of each file, or None if there is none."""
    jobs = [job for job in _jobs(inputs, config) if job.file is not None]
    judged = (_judge(record, config, {}) for job in jobs for record in itertools.islice(_records(job, config), LOOKED_AT))
    return next((one for one in judged if isinstance(one, Rejected)), None)


def _first(job: Job, config: IngestConfig) -> bool | Rejected:
    """Return True if a file may contain pages. A JSON or CSV file is read up to its first page; without one, return its first rejection."""
    if job.file is None or job.format not in ("parquet", "jsonl", "csv", "tsv", "arc"):
        return job.file is None or job.file.bytes > 0
    wrong: Rejected | None = None
    for row in _records(job, config):
        if isinstance(row, Page) or (job.format == "parquet" and row.rule != UNREADABLE):
            return True
        wrong = wrong or row
    return wrong or False


def _jobs(inputs: list[External], config: IngestConfig) -> Iterator[Job]:
    """Yield a job per file. Raise PunaError for an unknown name in `config.inputs`."""
    names = [external.name for external in inputs]
    if unknown := sorted(set(config.inputs).difference(names)):
        raise PunaError(f"ingest.inputs names {unknown[0]!r}, but the inputs are named {', '.join(names)}")
    saved = {external.name for external in inputs if any(file.name.endswith(".arrow") for file in external.files)}

    def format_(external: External, file: ExternalFile) -> str | None:
        if external.name in saved and file.name.rsplit("/", 1)[-1] in SIDECARS:
            return None
        return config.format if config.format != "auto" else _format(file)

    return jobs_of(inputs, config.dataset_subset, config.dataset_split, format_)


def _format(file: ExternalFile) -> str:
    file_format = FORMATS.get(suffix(file.name))
    if file_format is not None:
        return file_format
    if suffix(file.name) in readers.MEDIA_TYPES:
        return "files"
    with file.open() as handle:
        head = handle.read(1 << 16)
    if _begins(head, b"filedesc://"):
        return "arc"
    if head.startswith(b"PAR1"):
        return "parquet"
    if head.startswith((GZIP_MAGIC, ZSTD_MAGIC, ZSTD_DICTIONARY_MAGIC)):
        with file.open() as handle:
            first = next(iter(read_warc(handle, file.name, 1 << 20)), None)
        return "files" if isinstance(first, Rejected) and first.rule != "not_a_response" else "warc"
    return "warc" if head.startswith(b"WARC/") else "files"


def _begins(head: bytes, magic: bytes) -> bool:
    if head.startswith(GZIP_MAGIC):
        with contextlib.suppress(zlib.error):
            head = zlib.decompressobj(31).decompress(head, len(magic))
    return head.startswith(magic)


def _read(jobs: list[Job], config: IngestConfig) -> Iterator[Any]:
    """Yield the records of the files as tables, then one dictionary: the numbers of records and of body bytes and, for each file ending,
    the number of files without a page and the first reasons."""
    accepted: dict[str, bool] = {}
    held: list[tuple[Page | Rejected, str]] = []
    size, rows, total = 0, 0, 0
    without: Counter[str] = Counter()
    examples: dict[str, list[str]] = {}
    for job in jobs:
        why: str | None = None
        for record in _records(job, config):
            results = _judge(record, config, accepted)
            if isinstance(results, Page) or results.rule not in NO_PAGE:
                why = ""  # the file has a page
            elif why is None:
                why = results.detail
            held.append((results, job.source))
            bytes_ = len(results.body) if isinstance(results, Page) else 0
            size, rows, total = size + bytes_ + 500, rows + 1, total + bytes_
            if size >= CHUNK_BYTES:
                yield _table(held)
                held, size = [], 0
        if why:
            ending = suffix(job.name) or "without an ending"
            without[ending] += 1
            examples[ending] = sorted([why, *examples.get(ending, ())])[:EXAMPLES_SHOWN]
    yield _table(held)
    yield {"rows": rows, "bytes": total, "without_page": dict(without), "examples": examples}


def _table(held: list[tuple[Page | Rejected, str]]) -> pa.Table:
    columns = {name: [getattr(record, name, None) for record, _ in held] for name in RECORD.names}
    columns["id"] = [page_id(source, one) if isinstance(one, Page) else rejected_id(source, one) for one, source in held]
    columns["source"] = [source if isinstance(one, Page) else None for one, source in held]
    return pa.table(columns, schema=RECORD)


def _records(job: Job, config: IngestConfig) -> Iterator[Page | Rejected]:
    if job.file is None:
        yield from readers.read_stream(job.stream(), job.source, job.name, config.columns_of(job.source))
        return
    with errors_at(f"input {job.file.location}: the file no longer exists", FileNotFoundError), closing(job.file.open()) as handle:
        try:
            yield from _in_file(job, handle, config)
        except PunaError as error:
            yield Rejected(UNREADABLE, job.name, str(error))


def _in_file(job: Job, handle: BinaryIO, config: IngestConfig) -> Iterator[Page | Rejected]:
    columns = config.columns_of(job.source)
    if job.file and not job.file.bytes and job.format in ("warc", "jsonl", "csv", "tsv"):
        raise PunaError(f"{job.name}: the file is empty")
    if job.format == "arc":
        raise PunaError(f"{job.name}: ARC archives are not supported; convert it to WARC (warcio recompress OLD.arc.gz NEW.warc.gz)")
    if job.format == "warc":
        yield from read_warc(handle, job.name, config.max_body_bytes)
    elif job.format == "parquet":
        yield from readers.read_parquet(handle, job.source, job.name, columns, config.max_body_bytes)
    elif job.format in ("jsonl", "csv", "tsv"):
        kind = "json" if job.format == "jsonl" else job.format
        yield from readers.read_table(handle, job.source, job.name, kind, columns, ROW_BYTES * config.max_body_bytes)
    elif job.format == "dataset":
        yield from readers.read_arrow(handle, job.source, job.name, columns)
    else:
        yield from readers.read_file(handle, job.source, job.name, config.max_body_bytes)


def _judge(record: Page | Rejected, config: IngestConfig, accepted: dict[str, bool]) -> Page | Rejected:
    """Return the record as a page, or the reason to reject it. `accepted` caches whether each media type is kept."""
    if isinstance(record, Rejected):
        return record
    if not record.body.strip():
        return Rejected("empty", record.where, f"{record.where}: {record.url}")
    if len(record.body) > config.max_body_bytes:
        size, limit = float(len(record.body)), float(config.max_body_bytes)
        return Rejected("body_too_large", record.where, f"{record.where}: {record.url}", size, limit)
    media = record.content_type or sniff(record.body)
    if media not in accepted:
        accepted[media] = any(fnmatch.fnmatchcase(media, pattern) for pattern in config.content_types)
    if not accepted[media]:
        return Rejected("content_type", record.where, f"{record.where}: {media or 'none'} {record.url}")
    return record._replace(content_type=media)
