"""`ingest`: raw pages from archives, folders, tables and data sets."""

from __future__ import annotations

import fnmatch
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pydantic import Field

from puna.stages.contract import External, ExternalFile, StageConfig, StageRun, stage
from puna.stages.curate.reading import readers
from puna.stages.curate.reading.pages import Page, Rejected, page_id, rejected_id, repeated_id
from puna.stages.curate.reading.warc import read_warc
from puna.stages.curate.reading.warc_frames import GZIP_MAGIC, ZSTD_DICTIONARY_MAGIC, ZSTD_MAGIC
from puna.storage import PunaError
from puna.storage.schemas import table_schema

CHUNK_BYTES = 64 << 20
FORMATS = {
    ".warc": "warc", ".wet": "warc", ".wat": "warc", ".parquet": "parquet", ".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl",
    ".arrow": "dataset",
}  # fmt: skip


class IngestConfig(StageConfig):
    """How inputs become pages."""

    format: Literal["auto", "warc", "files", "parquet", "jsonl", "dataset"] = Field(
        "auto", description="Format of every input file; auto goes by each file's name and first bytes"
    )
    content_types: tuple[str, ...] = Field(
        ("text/html", "application/xhtml+xml", "text/plain", "text/markdown", "text/x-*"),
        min_length=1,
        description="Media types that are kept; * stands for any characters",
    )
    max_body_bytes: int = Field(32 << 20, ge=1024, le=1 << 31, description="Largest page that is kept, bytes")
    text_column: str = Field("text", min_length=1, description="Field of a row that holds plain text; a.b reaches into a structure")
    html_column: str | None = Field(None, min_length=1, description="Field of a row that holds HTML; it is then read instead of the text")
    url_column: str | None = Field(
        None, min_length=1, description="Field that holds the address; by default `url` where there is one, else the row's place"
    )
    date_column: str | None = Field(
        None, min_length=1, description="Field that holds the time of fetching; by default the first usual one, else 1970-01-01"
    )
    dataset_subset: str | None = Field(None, min_length=1, description="Configuration of a data set on the hub")
    dataset_split: str = Field("train", min_length=1, description="Split of a data set on the hub")

    @property
    def columns(self) -> readers.Columns:
        """The fields of a row that hold the page."""
        return readers.Columns(self.text_column, self.html_column, self.url_column, self.date_column)


class Job(NamedTuple):
    """One file (or one shard of a remote data set) to read."""

    number: int
    source: str
    format: str
    name: str
    file: ExternalFile | None
    uri: str = ""
    shard: int = 0
    shards: int = 1


@stage(kind="pages")
def ingest(inputs: list[External], config: IngestConfig, run: StageRun) -> None:
    """Read pages from WARC, WET, folders of pages, Parquet, JSON lines and Hugging Face data sets.

    Every record becomes a page or a row of `dropped` (not_a_response, http_status, content_type, empty,
    body_too_large, truncated_record, malformed_record, record_too_large, undecodable_body, duplicate_record).
    A page's id is a hash of source, address, time, media type and body: it does not depend on where the page lies.
    """
    jobs = list(_jobs(inputs, config))
    seen: set[bytes] = set()
    repeats: Counter[str] = Counter()
    rules: Counter[str] = Counter()
    files: list[tuple[str, str, list[int]]] = []
    body_bytes = 0
    for folder in run.map(_read, jobs, config, str(run.scratch), rows=len(jobs)):
        for file in sorted(Path(folder).glob("*.parquet")):
            name = file.name.split("-")[0]
            table = pq.read_table(file, columns=["id", "url", "bytes"] if name == "pages" else ["id", "rule"])
            run.count_input(table.num_rows)
            places, again = _repeated(table, name, seen, repeats)
            files.append((str(file), name, places))
            run.write_rows(again, "dropped")
            rules.update({"duplicate_record": len(again)} if again else {})
            if name == "dropped":
                rules.update(_without(table, places).column("rule").to_pylist())
            else:
                body_bytes += pc.sum(_without(table, places).column("bytes")).as_py() or 0
    run.produce(_kept, files)
    run.metric("body_bytes", body_bytes)
    if not body_bytes:
        inputs_named = ", ".join(dict.fromkeys(job.uri or (job.file.address if job.file else job.name) for job in jobs[:3]))
        raise PunaError(
            f"ingest: {inputs_named}{', …' if len(jobs) > 3 else ''}: no page is kept; files {len(jobs)}, "
            f"records {run.input_rows or 0}{_why(rules)}"
        )
    run.metric("files", len(jobs))
    for rule, count in sorted(rules.items()):
        run.metric(f"dropped_{rule}", count)


def _why(rules: Counter[str]) -> str:
    """What became of records, for an error message."""
    hint = "; WARC, WET, Parquet, JSONL, HTML and text are read, other media by ingest.content_types" if rules["content_type"] else ""
    return f": {', '.join(f'{count} {rule}' for rule, count in rules.most_common())}{hint}" if rules else ""


def check_inputs(inputs: list[External], config: IngestConfig) -> None:
    """PunaError where the inputs cannot be read as configured, as far as a look at their beginnings can tell.

    Parquet files and JSON lines must have the named columns, and not all of the inputs may be without rows.
    """
    found = [_has_rows(job, config) for job in _jobs(inputs, config)]
    if not any(found):
        raise PunaError(f"the inputs {', '.join(external.uri for external in inputs)} have no rows: there is nothing to read")


def _has_rows(job: Job, config: IngestConfig) -> bool:
    """Whether a file may hold pages; of JSON lines it reads up to the first one."""
    if job.file is None or job.format not in ("parquet", "jsonl"):
        return job.file is None or job.file.bytes > 0
    with job.file.open() as handle:
        if job.format == "parquet":
            return bool(pq.ParquetFile(handle).metadata.num_rows)
        return any(isinstance(row, Page) for row in readers.read_jsonl(handle, job.source, job.file.address, config.columns))


def _repeated(table: pa.Table, name: str, seen: set[bytes], repeats: Counter[str]) -> tuple[list[int], list[dict[str, Any]]]:
    """Places of the rows whose ids were seen before, and a row of `dropped` for each."""
    places: list[int] = []
    again: list[dict[str, Any]] = []
    for place, identity in enumerate(table.column("id").to_pylist()):
        key = bytes.fromhex(identity)
        if key not in seen:
            seen.add(key)
            continue
        repeats[identity] += 1
        what = table.column("url" if name == "pages" else "rule")[place].as_py()
        row = {"id": repeated_id(identity, repeats[identity]), "rule": "duplicate_record", "detail": f"{identity}: {what}"}
        places.append(place)
        again.append(row | {"value": None, "threshold": None})
    return places, again


def _without(table: pa.Table, places: list[int]) -> pa.Table:
    """The table without the rows at `places`."""
    if not places:
        return table
    keep = np.ones(table.num_rows, dtype=bool)
    keep[places] = False
    return table.filter(pa.array(keep))


def _kept(file: tuple[str, str, list[int]]) -> dict[str, pa.Table]:
    """In a worker: the rows of one chunk, but for those at the given places."""
    path, name, places = file
    return {name: _without(pq.read_table(path, columns=table_schema(name).schema.names), places)}


# --- finding the work ------------------------------------------------------------------------------------


def _jobs(inputs: list[External], config: IngestConfig) -> Iterator[Job]:
    """One job per file; what can be refused is refused here, before any page is read."""
    number = 0
    for external in inputs:
        if not external.files:  # a whole data set of the hub
            shards = _hub(external.uri, config).num_shards
            for shard in range(shards):
                yield Job(number, external.name, "hub", f"{config.dataset_split}/{shard}", None, external.uri, shard, shards)
                number += 1
            continue
        saved = any(file.name.endswith(".arrow") for file in external.files)
        for file in external.files:
            if saved and file.name.rsplit("/", 1)[-1] in readers.DATASET_SIDECARS:
                continue
            kind = config.format if config.format != "auto" else _format(file)
            if kind == "parquet":
                with file.open() as handle:
                    readers.parquet_columns(handle, file.address, config.columns)
            yield Job(number, external.name, kind, file.name, file)
            number += 1


def _format(file: ExternalFile) -> str:
    """The format that a file's name tells, or else its first bytes."""
    known = FORMATS.get(readers.suffix(file.name))
    if known is not None:
        return known
    if readers.suffix(file.name) in readers.MEDIA_TYPES:
        return "files"
    with file.open() as handle:
        head = handle.read(1 << 16)
    if head.startswith(b"PAR1"):
        return "parquet"
    if head.startswith((GZIP_MAGIC, ZSTD_MAGIC, ZSTD_DICTIONARY_MAGIC)):
        with file.open() as handle:
            first = next(iter(read_warc(handle, file.name, 1 << 20)), None)
        return "files" if isinstance(first, Rejected) and first.rule != "not_a_response" else "warc"
    return "warc" if head.startswith(b"WARC/") else "files"


def _hub(uri: str, config: IngestConfig) -> Any:
    """A streaming data set of the hub, `hf://datasets/OWNER/NAME[@REVISION]` (or of a local folder in tests)."""
    import datasets

    name, _, revision = uri.removeprefix("hf://").removeprefix("datasets/").partition("@")
    try:
        return datasets.load_dataset(name, config.dataset_subset, split=config.dataset_split, streaming=True, revision=revision or None)
    except (ValueError, OSError) as error:
        raise PunaError(f"input {uri}: {error}") from error


# --- reading, in a worker --------------------------------------------------------------------------------


def _read(job: Job, config: IngestConfig, scratch: str) -> str:
    """Read one file into chunks below `scratch`; returns their folder. Done once, also after a crash."""
    folder = Path(scratch) / f"job-{job.number:06d}"
    marker = folder / "done"
    if marker.exists():
        return str(folder)
    folder.mkdir(exist_ok=True)
    for file in folder.glob("*.parquet"):
        file.unlink()
    chunk = _Chunk(folder, job.source)
    for record in _records(job, config):
        chunk.add(_judged(record, config, chunk.accepted))
    chunk.flush()
    marker.touch()
    return str(folder)


def _records(job: Job, config: IngestConfig) -> Iterator[Page | Rejected]:
    if job.file is None:
        rows = _hub(job.uri, config).shard(job.shards, job.shard)
        yield from readers.read_stream(rows, job.source, job.name, config.columns)
        return
    try:
        with closing(job.file.open()) as handle:
            if job.format == "warc":
                yield from read_warc(handle, job.name, config.max_body_bytes)
            elif job.format == "parquet":
                yield from readers.read_parquet(handle, job.source, job.name, config.columns)
            elif job.format == "jsonl":
                yield from readers.read_jsonl(handle, job.source, job.name, config.columns)
            elif job.format == "dataset":
                yield from readers.read_arrow(handle, job.source, job.name, config.columns)
            else:
                yield from readers.read_file(handle, job.source, job.name)
    except FileNotFoundError as error:
        raise PunaError(f"input {job.file.address}: the file is gone ({error})") from error


def _judged(record: Page | Rejected, config: IngestConfig, accepted: dict[str, bool]) -> Page | Rejected:
    """The page, or why it is not kept; `accepted` remembers the verdict on each media type."""
    if isinstance(record, Rejected):
        return record
    if not record.body.strip():
        return Rejected("empty", record.where, f"{record.where}: {record.url}")
    if len(record.body) > config.max_body_bytes:
        size, limit = float(len(record.body)), float(config.max_body_bytes)
        return Rejected("body_too_large", record.where, f"{record.where}: {record.url}", size, limit)
    media = record.content_type or _sniffed(record.body)
    if media not in accepted:
        accepted[media] = any(fnmatch.fnmatchcase(media, pattern) for pattern in config.content_types)
    if not accepted[media]:
        return Rejected("content_type", record.where, f"{record.where}: {media or 'none'} {record.url}")
    return record._replace(content_type=media)


def _sniffed(body: bytes) -> str:
    """The media type of a page whose server gave none: HTML by its first tag, else nothing."""
    head = body[:1024].lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    return "text/html" if head.startswith((b"<!doctype html", b"<html")) else ""


class _Chunk:
    """Rows held until there are enough for a file."""

    def __init__(self, folder: Path, source: str) -> None:
        self.accepted: dict[str, bool] = {}
        self._folder = folder
        self._source = source
        self._number = 0
        self._bytes = 0
        self._pages: list[tuple[str, Page]] = []
        self._dropped: list[tuple[str, Rejected]] = []

    def add(self, record: Page | Rejected) -> None:
        """Hold one record; write a chunk when it is full."""
        if isinstance(record, Page):
            self._pages.append((page_id(self._source, record), record))
            self._bytes += len(record.body) + 500
        else:
            self._dropped.append((rejected_id(self._source, record), record))
            self._bytes += 500
        if self._bytes >= CHUNK_BYTES:
            self.flush()

    def flush(self) -> None:
        """Write what is held."""
        if self._pages:
            pages = [page for _, page in self._pages]
            columns: dict[str, list[Any]] = {
                "id": [identity for identity, _ in self._pages],
                "url": [page.url for page in pages],
                "fetched_at": [page.fetched_at for page in pages],
                "source": [self._source] * len(pages),
                "content_type": [page.content_type for page in pages],
                "charset": [page.charset for page in pages],
                "body": [page.body for page in pages],
            }
            self._write("pages", columns)
        if self._dropped:
            rejected = [record for _, record in self._dropped]
            columns = {
                "id": [identity for identity, _ in self._dropped],
                "rule": [record.rule for record in rejected],
                "value": [record.value for record in rejected],
                "threshold": [record.threshold for record in rejected],
                "detail": [record.detail for record in rejected],
            }
            self._write("dropped", columns)
        self._pages, self._dropped, self._bytes = [], [], 0
        self._number += 1

    def _write(self, name: str, columns: dict[str, list[Any]]) -> None:
        schema = table_schema(name).schema
        table = pa.table({field.name: pa.array(columns[field.name], field.type) for field in schema}, schema=schema)
        if name == "pages":  # so that nobody needs to read the bodies to know their size
            table = table.append_column("bytes", pc.binary_length(table.column("body")))
        pq.write_table(table, self._folder / f"{name}-{self._number:06d}.parquet", compression="zstd", compression_level=1)
