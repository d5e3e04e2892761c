"""Declared sizes of Parquet pages and Arrow buffers: false sizes are refused before anything is unpacked."""

from __future__ import annotations

import io
import random
import struct
import tracemalloc
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from puna.stages.reading import files
from puna.stages.reading.declared import DEPTH, _sizes, page_bytes, stream_bytes
from puna.stages.reading.readers import Columns, read_arrow, read_parquet
from puna.stages.reading.rows import read_rows
from puna.storage import PunaError

BOUND = 1 << 16
COLUMNS = Columns("text", None, None, None)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the maximum unpacked size of a file to 64 kB."""
    monkeypatch.setattr(files, "FREE_BYTES", BOUND)


def varint(number: int) -> bytes:
    pieces = bytearray()
    while number > 127:
        pieces.append(number & 127 | 128)
        number >>= 7
    return bytes([*pieces, number])


def lying(data: bytes, told: int) -> bytes:
    """Return a Parquet file whose footer declares another size than its one group and chunk have (numbers may be padded)."""
    size = pq.read_metadata(io.BytesIO(data)).row_group(0).total_byte_size
    true, false = varint(size << 1), bytearray(varint(told << 1))
    assert len(false) <= len(true)
    false[-1] |= 128 if len(false) < len(true) else 0
    while len(false) < len(true):
        false.append(0 if len(false) == len(true) - 1 else 128)
    footer = len(data) - 8 - struct.unpack("<I", data[-8:-4])[0]
    made = data[:footer] + data[footer:].replace(true, bytes(false))
    group = pq.read_metadata(io.BytesIO(made)).row_group(0)
    assert (group.total_byte_size, group.column(0).total_uncompressed_size) == (told, told)
    return made


def parquet(table: pa.Table, **options: Any) -> bytes:
    file = io.BytesIO()
    pq.write_table(table, file, **options)
    return file.getvalue()


def arrow(table: pa.Table, compression: str | None, most: int | None = None) -> bytes:
    file = io.BytesIO()
    with pa.ipc.new_stream(file, table.schema, options=pa.ipc.IpcWriteOptions(compression=compression)) as writer:
        writer.write_table(table, max_chunksize=most)
    return file.getvalue()


def read(kind: str, reader: str, data: bytes) -> Callable[[], list[Any]]:
    handle, name = io.BytesIO(data), f"x.{kind}"
    if reader == "rows":
        return lambda: list(read_rows(handle, name, "dataset" if kind == "arrow" else kind, 1 << 30))
    return lambda: list(read_parquet(handle, "s", name, COLUMNS, 1 << 30) if kind == "parquet" else read_arrow(handle, "s", name, COLUMNS))


@pytest.mark.parametrize("reader", ["rows", "pages"])
@pytest.mark.parametrize("version", ["1.0", "2.0"])
def test_a_footer_that_declares_less_than_its_pages_hold_is_refused_unread(monkeypatch: pytest.MonkeyPatch, reader: str, version: str) -> None:
    text = "a" * (1 << 20)
    sound = parquet(pa.table({"text": [text]}), use_dictionary=False, write_statistics=False, store_schema=False, data_page_version=version, compression="zstd")
    data = lying(sound, 100)
    monkeypatch.setattr(pq.ParquetFile, "iter_batches", lambda *given, **more: pytest.fail("its pages were read"))
    with pytest.raises(PunaError, match=rf"x\.parquet: its {len(data):,} bytes unpack to 1,04\d,\d+ and more"):
        read("parquet", reader, data)()


@pytest.mark.parametrize("reader", ["rows", "pages"])
def test_a_packed_buffer_that_declares_more_than_a_file_may_is_refused_unread(monkeypatch: pytest.MonkeyPatch, reader: str) -> None:
    data = arrow(pa.table({"text": ["a" * (1 << 20)]}), "zstd")
    monkeypatch.setattr(pa.ipc, "open_stream", lambda *given: pytest.fail("its messages were read"))
    with pytest.raises(PunaError, match=rf"x\.arrow: its {len(data):,} bytes unpack to 1,04\d,\d+ and more"):
        read("arrow", reader, data)()


def table(draw: random.Random) -> pa.Table:
    """Return columns of all kinds that pages hold: repetitive and other text, numbers, nulls, lists, an empty column."""
    rows = draw.choice((1, 700))
    words = ["".join(draw.choices("abc é", k=draw.randrange(60))) for _ in range(draw.choice((1, 5, 300)))]
    return pa.table({
        "text": pa.array([draw.choice(words) if draw.random() < 0.9 else None for _ in range(rows)], pa.string()),
        "n": pa.array([draw.getrandbits(40) for _ in range(rows)], pa.int64()), "x": pa.array([draw.random() for _ in range(rows)], pa.float64()),
        "yes": pa.array([draw.random() < 0.5 for _ in range(rows)], pa.bool_()), "none": pa.nulls(rows, pa.string()),
        "many": pa.array([[draw.choice(words)] * draw.randrange(4) for _ in range(rows)], pa.list_(pa.string())),
    })  # fmt: skip


@pytest.mark.parametrize("codec", ["none", "snappy", "gzip", "brotli", "zstd", "lz4"])
@pytest.mark.parametrize("version", ["1.0", "2.0"])
@pytest.mark.parametrize("dictionary", [True, False])
def test_the_pages_of_an_honest_file_hold_what_its_footer_declares(codec: str, version: str, dictionary: bool) -> None:
    """The oracle is the footer that Arrow wrote, which also counts the page headers."""
    draw = random.Random(f"{codec} {version} {dictionary}")
    for page in (64, 1 << 20):
        options: dict[str, Any] = {name: draw.random() < 0.5 for name in ("write_page_index", "write_statistics", "write_page_checksum")}
        options |= {"compression": codec, "data_page_version": version, "use_dictionary": dictionary, "data_page_size": page}
        data = parquet(table(draw), row_group_size=500, **options)
        meta = pq.read_metadata(io.BytesIO(data))
        for chunk in (meta.row_group(group).column(number) for group in range(meta.num_row_groups) for number in range(meta.num_columns)):
            assert page_bytes(io.BytesIO(data), chunk) == chunk.total_uncompressed_size, (chunk.path_in_schema, options)


@pytest.mark.parametrize("dictionary", [True, False])
@pytest.mark.parametrize("codec", ["zstd", "lz4"])
def test_the_buffers_of_an_honest_stream_declare_what_it_holds_unpacked(codec: str, dictionary: bool) -> None:
    """The oracle is the table in memory; each buffer of a batch may be padded to 64 bytes, and a batch has one more offset than rows."""
    made = pa.table({"text": [f"text {n} " * 40 for n in range(300)], "n": range(300)})
    made = made.set_column(0, "text", made["text"].dictionary_encode()) if dictionary else made
    handle = io.BytesIO(b"before" + arrow(made, codec, 100))
    handle.seek(6)
    assert 0 <= stream_bytes(handle) - made.nbytes <= 7 * 64 and handle.tell() == 6
    assert stream_bytes(io.BytesIO(arrow(made, None, 100))) == 0


def test_a_buffer_that_arrow_does_not_read_hides_none_after_it() -> None:
    """If no value is null, the offset of the validity bitmap is not followed."""
    made = pa.table({"text": ["a" * 5000, "b" * 5000]})
    sound = arrow(made, "zstd", 1)
    wrong = sound.replace(struct.pack("<Iqqq", 3, 0, 0, 0), struct.pack("<Iqqq", 3, 1 << 50, 8, 0))
    assert wrong != sound and pa.ipc.open_stream(wrong).read_all() == made
    assert stream_bytes(io.BytesIO(wrong)) == stream_bytes(io.BytesIO(sound)) >= 10_000


def test_numbers_of_a_page_are_cut_to_their_bits_as_arrow_cuts_them() -> None:
    """A page's type, unpacked size (7), packed size (3) and bytes, twice; in the first one, fields and sizes have bits beyond their 32 and
    16."""
    plain = b"\x15\x00\x15\x0e\x15\x06\x00" + b"abc"
    wide = b"\x15\x00\x05" + varint((65536 + 2) << 1) + varint(1 << 32 | 14) + b"\x15" + varint(1 << 33 | 6) + b"\x00" + b"abc"
    for first in (plain, wide):
        column = SimpleNamespace(data_page_offset=0, has_dictionary_page=False, total_compressed_size=len(first + plain))
        assert page_bytes(io.BytesIO(first + plain), column) == len(first + plain) + 2 * (7 - 3)


def test_nested_maps_of_a_header_take_no_memory_per_value_and_level() -> None:
    """Each map declares more maps than the rest of the header can hold, or half as many as it has bytes; a small map precedes the sizes."""
    size = 1 << 16
    tracemalloc.start()
    for count in (size, size // 2):
        with pytest.raises(IndexError):
            _sizes(b"\x1b" + (varint(count) + b"\xbb") * (DEPTH - 1) + b"\0" * size)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 4 * size
    head = b"\x1b\x02\xbb" + b"\x01\xb5\0\x0e" + b"\0" * 3 + b"\x15\x0e\x15\x06\0"
    assert _sizes(head) == (len(head) + 3, len(head) + 7)
