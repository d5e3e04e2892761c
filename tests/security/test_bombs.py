"""Small files that unpack to many bytes are refused with a clear error; real repetitive text is read."""

from __future__ import annotations

import gzip
import io
import json
import lzma
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from puna.stages.contract import External, execute
from puna.stages.curate.ingest import IngestConfig, ingest
from puna.stages.io.imports import ImportInstructionsConfig, import_instructions
from puna.stages.reading import files, warc_frames
from puna.stages.reading.pages import Page, Rejected
from puna.stages.reading.readers import Columns, read_arrow, read_parquet, read_table
from puna.stages.reading.rows import Fault, Row, read_rows
from puna.stages.reading.warc import read_warc
from puna.storage import PunaError, Store

ROWS, TEXT = 32, "a" * (1 << 19)
LINES = "".join(json.dumps({"text": TEXT, "n": n}) + "\n" for n in range(ROWS)).encode()
TABLE = pa.table({"text": [TEXT] * ROWS, "n": range(ROWS)})
RECORD = b"WARC/1.0\r\nWARC-Type: resource\r\nWARC-Target-URI: https://a.example/\r\nWARC-Date: 2024-01-01T00:00:00Z\r\nContent-Type: text/plain\r\n"
PAGES = (RECORD + b"Content-Length: %d\r\n\r\n" % len(TEXT) + TEXT.encode() + b"\r\n\r\n") * ROWS
COLUMNS = Columns("text", None, None, None)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the maximum unpacked size of a file to 4 MB; the bombs unpack to 16 MB."""
    monkeypatch.setattr(files, "FREE_BYTES", 4 << 20, raising=False)


def parquet(table: pa.Table, **options: Any) -> bytes:
    file = io.BytesIO()
    pq.write_table(table, file, **options)
    return file.getvalue()


def arrow(table: pa.Table, compression: str | None = None) -> bytes:
    file = io.BytesIO()
    with pa.ipc.new_stream(file, table.schema, options=pa.ipc.IpcWriteOptions(compression=compression)) as writer:
        writer.write_table(table)
    return file.getvalue()


SHARED = pa.DictionaryArray.from_arrays(pa.array([0] * ROWS, pa.int32()), pa.array([TEXT]))
BOMBS: dict[str, tuple[bytes, str]] = {
    "dictionary.parquet": (parquet(TABLE), "parquet"), "pages.parquet": (parquet(TABLE, use_dictionary=False, compression="zstd"), "parquet"),
    "nulls.parquet": (parquet(pa.table({"text": pa.nulls(1 << 16, pa.string())})), "parquet"),
    "empty.jsonl.zst": (zstandard.compress(b"{}\n" * (1 << 16)), "json"), "commas.json.zst": (zstandard.compress(b"," * (1 << 16)), "json"),
    "ends.csv.zst": (zstandard.compress(b"text\n" + b"\n" * (1 << 16)), "csv"),
    "dictionary.arrow": (arrow(pa.table({"text": SHARED}), "zstd"), "dataset"),
    "packed.arrow": (arrow(TABLE, "zstd"), "dataset"),
    "rows.jsonl.gz": (gzip.compress(LINES), "json"), "rows.jsonl.zst": (zstandard.compress(LINES), "json"), "rows.jsonl.xz": (lzma.compress(LINES), "json"),
    "rows.csv.gz": (gzip.compress(b"text\n" + LINES.replace(b'"', b"'").replace(b",", b";")), "csv"), "blank.json.zst": (zstandard.compress(b"\n" * (16 << 20)), "json"),
    "pages.warc.gz": (gzip.compress(PAGES), "warc"), "pages.warc.zst": (zstandard.compress(PAGES), "warc"), "heads.warc.zst": (zstandard.compress(b"WARC/1.0\r\nContent-Length: 0\r\n\r\n" * (1 << 13)), "warc"),
    "ends.warc.gz": (gzip.compress(b"\r\n" * (8 << 20)), "warc"),
    "bodies.warc": (b"".join(RECORD.replace(b"resource", b"response").replace(b"text/plain", b"application/http") + b"Content-Length: %d\r\n\r\n" % len(block) + block + b"\r\n\r\n"
                             for block in [b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\n\r\n" + gzip.compress(TEXT.encode())] * ROWS), "warc"),
}  # fmt: skip


def read(handle: BinaryIO, name: str, kind: str) -> Iterator[Any]:
    return read_warc(handle, name, 2 << 20) if kind == "warc" else read_rows(handle, name, kind, 2 << 20)


@pytest.mark.parametrize("name", BOMBS)
def test_a_file_that_unpacks_to_what_none_of_its_size_holds_is_refused_by_name(name: str) -> None:
    data, kind = BOMBS[name]
    assert len(data) < 4 << 20
    with pytest.raises(PunaError, match=f"{name}: its {len(data):,} bytes unpack to"):
        list(read(io.BytesIO(data), name, kind))


@pytest.mark.parametrize("name", [name for name, (_, kind) in BOMBS.items() if kind != "warc"])
def test_pages_are_read_within_the_same_bounds(name: str) -> None:
    data, kind = BOMBS[name]
    reader: Callable[[BinaryIO], Iterator[Any]] = {
        "parquet": lambda handle: read_parquet(handle, "s", name, COLUMNS, 2 << 20), "dataset": lambda handle: read_arrow(handle, "s", name, COLUMNS),
    }.get(kind, lambda handle: read_table(handle, "s", name, kind, COLUMNS, 2 << 20))  # fmt: skip
    with pytest.raises(PunaError, match=f"{name}: its {len(data):,} bytes unpack to"):
        list(reader(io.BytesIO(data)))


@pytest.mark.parametrize("broken", ["[\n", "{\n"])
def test_lines_of_brackets_count_as_many_records(broken: str) -> None:
    """Each such line costs as much time as several rows, or is decoded with lines before it; as many valid rows are still read."""
    lines, name = 3000, "x.json.zst"
    data = zstandard.compress(broken.encode() * lines)
    assert sum(1 for _ in read_rows(io.BytesIO(zstandard.compress(b"{}\n" * lines)), name, "json", 1 << 20)) == lines
    with pytest.raises(PunaError, match=rf"x\.json\.zst: its {len(data):,} bytes unpack to 4,(19|20)[\d,]+ and more"):
        list(read_rows(io.BytesIO(data), name, "json", 1 << 20))


def layered(layers: int) -> bytes:
    body = b"a body"
    for _ in range(layers):
        body = gzip.compress(body)
    block = b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nContent-Encoding: " + b", ".join([b"gzip"] * layers) + b"\r\n\r\n" + body
    head = RECORD.replace(b"resource", b"response").replace(b"text/plain", b"application/http; msgtype=response")
    return head + b"Content-Length: %d\r\n\r\n" % len(block) + block + b"\r\n\r\n"


def test_a_body_packed_more_often_than_servers_do_is_refused_by_name() -> None:
    whole, refused, after = read_warc(io.BytesIO(layered(4) + layered(5) + layered(1)), "x.warc", 1 << 20)
    assert [one.body for one in (whole, after) if isinstance(one, Page)] == [b"a body"] * 2
    assert isinstance(refused, Rejected) and refused.rule == "undecodable_body"
    assert "5 nested encodings; at most 4 are decoded" in refused.detail


def test_zstd_with_a_long_window_is_read_whole() -> None:
    """As packed by `zstd --long=28`; a frame without a declared size needs the whole window."""
    lines = b"".join(b'{"text": "line %d"}\n' % n for n in range(1000))
    packer = zstandard.ZstdCompressor(compression_params=zstandard.ZstdCompressionParameters(window_log=28)).compressobj()
    data = packer.compress(lines) + packer.flush()
    assert zstandard.get_frame_parameters(data).window_size == 1 << 28
    rows = list(read_rows(io.BytesIO(data), "x.jsonl.zst", "json", 1 << 20))
    assert [row.fields for row in rows if isinstance(row, Row)] == [{"text": f"line {n}"} for n in range(1000)]
    assert len(list(read_table(io.BytesIO(data), "s", "x.jsonl.zst", "json", COLUMNS, 1 << 20))) == 1000


@pytest.mark.parametrize(
    "column",
    [
        pa.array(["a"], pa.string_view()), pa.array([[1]], pa.list_view(pa.int64())), pa.DictionaryArray.from_arrays(pa.array([0], pa.int32()), pa.array([["a"]])),
        pa.array([{"in": "a"}], pa.struct([("in", pa.string_view())])),
    ],
)  # fmt: skip
def test_types_whose_values_share_bytes_are_refused_by_name(column: pa.Array) -> None:
    with pytest.raises(PunaError, match=r"x\.arrow.*: the column '(text|in)' has the type .*, which is not supported"):
        list(read_rows(io.BytesIO(arrow(pa.table({"text": column}))), "x.arrow", "dataset", 1 << 20))


def test_an_import_and_an_ingest_say_so(tmp_path: Path) -> None:
    (tmp_path / "bomb.parquet").write_bytes(parquet(pa.table({"prompt": [TEXT] * ROWS, "completion": map(str, range(ROWS))})))
    inputs = External.resolve(str(tmp_path / "bomb.parquet"))
    store = Store.open(tmp_path / "store")
    made = execute(import_instructions, ImportInstructionsConfig(), {"inputs": inputs}, store)
    (words,) = [row["detail"] for row in made.read("dropped").to_pylist() if row["rule"] == "unreadable_file"]
    assert re.search(r"bomb\.parquet: its [\d,]+ bytes unpack to [\d,]+ and more", words) is not None and 0 < made.rows() < ROWS
    with pytest.raises(PunaError, match=r"no page is kept; .*bomb\.parquet: its [\d,]+ bytes unpack to [\d,]+ and more"):
        execute(ingest, IngestConfig(text_column="prompt"), {"inputs": inputs}, store)


def test_real_text_that_repeats_itself_is_read() -> None:
    """A long system prompt in each row, as in data sets with tools: 20 kB per row, of which about 60 bytes are distinct."""
    draw = random.Random(0)
    system = "".join(f"Tool {n}: {n * 7919 % 10007:05d} gives the {n}th value of a table.\n" for n in range(200))
    rows = [{"system": system, "text": f"What do {draw.getrandbits(400):x} and {n} have in common?", "n": n} for n in range(900)]
    lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
    table = pa.Table.from_pylist(rows)
    whole = len(lines)
    assert whole > 2 * (4 << 20)
    for name, data, kind in (
        ("views.parquet", parquet(table.cast(pa.schema([("system", pa.string_view()), ("text", pa.string_view()), ("n", pa.int64())]))), "parquet"),
        ("a.jsonl.gz", gzip.compress(lines), "json"), ("a.jsonl.zst", zstandard.compress(lines, 10), "json"), ("a.parquet", parquet(table), "parquet"),
        ("b.parquet", parquet(table, compression="zstd"), "parquet"), ("a.arrow", arrow(table, "zstd"), "dataset"),
    ):  # fmt: skip
        assert whole > 50 * len(data), name
        assert ([one.fields for one in read_rows(io.BytesIO(data), name, kind, 1 << 20)] == rows) is True, name


def test_a_batch_of_parquet_is_bounded_by_its_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    from puna.stages.reading import columns as module

    table = pa.table({"text": [f"{n}" + "b" * 1000 for n in range(500)]})
    monkeypatch.setattr(module, "BATCH_BYTES", 50_000)
    batches = [batch.num_rows for batch in module.batches(io.BytesIO(parquet(table, use_dictionary=False)), "x.parquet", "parquet")]
    assert sum(batches) == 500 and max(batches) < 50


def test_a_stranger_s_offsets_are_checked_before_they_are_followed() -> None:
    """Offsets that point outside their text would read this process's memory, or crash it."""
    sound = arrow(pa.table({"text": ["abcdefg", "hijk"]}))
    wrong = sound.replace(b"\0\0\0\0\x07\0\0\0\x0b\0\0\0", b"\0\0\0\0\x07\0\0\0\xff\xff\xff\x0f")
    assert wrong != sound
    with pytest.raises(PunaError, match=r"x\.arrow, after row 0: not a readable Arrow file"):
        list(read_rows(io.BytesIO(wrong), "x.arrow", "dataset", 1 << 20))


def test_a_record_of_csv_is_bounded_whole() -> None:
    """An endless line of commas, and a record of many lines, each in a separate cell."""
    text = b"a,b\n1,2\n" + b"," * 50_000 + b"\n3,4\n" + b'"x\n",' * 20_000 + b"\n5,6\n"
    rows = list(read_rows(io.BytesIO(text), "x.csv", "csv", 10_000))
    faults = [row for row in rows if isinstance(row, Fault)]
    assert any("longer than 10000 bytes" in fault.reason for fault in faults)
    assert [row.fields for row in rows if not isinstance(row, Fault)][:2] == [{"a": "1", "b": "2"}, {"a": "3", "b": "4"}]
    assert warc_frames.LINE_ENDS.match(b"\r\n\r\nx").end() == 4  # type: ignore[union-attr]
