"""Sizes declared by the pages of a Parquet file and the compressed buffers of an Arrow stream, read before anything is decompressed.

A Parquet file's footer may declare less than the pages decompress to, and an Arrow message is decompressed as a whole. Integers are
truncated to the same bit widths as in Arrow's readers; otherwise a crafted file could show other sizes here."""

from __future__ import annotations

import struct
from typing import Any, BinaryIO

HEAD_BYTES = (1 << 9, 1 << 16, 1 << 24)  # bytes to read of a page header: enough for most pages; for nearly all; Arrow's maximum
DEPTH = 64  # maximum nesting of structs, as in Thrift
LENGTHS = {1: 0, 2: 0, 3: 1, 7: 8, 13: 16}  # Thrift type → bytes of a value: true, false, byte, double, UUID


def page_bytes(handle: BinaryIO, column: Any) -> int:
    """Return the decompressed bytes of a column chunk's pages with headers, as a correct footer declares them, up to a damaged page."""
    at = column.data_page_offset
    if column.has_dictionary_page and column.dictionary_page_offset:
        at = min(at, column.dictionary_page_offset)
    end, size = at + column.total_compressed_size, 0
    while at < end and (page := _page(handle, at)):
        at, size = at + page[0], size + page[1]
    return size


def _page(handle: BinaryIO, at: int) -> tuple[int, int] | None:
    """Return a page's compressed and decompressed size, header included; None for a damaged header (Arrow's reader stops there, too)."""
    for most in HEAD_BYTES:
        handle.seek(at)
        try:
            return _sizes(handle.read(most))
        except IndexError:  # the header may be longer
            continue
        except ValueError:
            break
    return None


def _sizes(data: bytes) -> tuple[int, int]:
    """Return a page's two sizes (see `_page`) from its Thrift header. Raise IndexError if `data` is too short, ValueError if it is bad."""
    numbers: dict[int, int] = {}
    at, field = 0, 0
    while kind := data[at]:
        step, at = (kind >> 4, at + 1) if kind >> 4 else _number(data, at + 1)
        field = (field + step if kind >> 4 else step) & 0xFFFF
        if kind & 15 == 5:
            numbers[field], at = _number(data, at)
        else:
            at = _skip_value(data, at, kind & 15, 0)
    packed, unpacked = numbers.get(3, -1), numbers.get(2, -1)
    if packed < 0 or unpacked < 0:
        raise ValueError("a page has no size")
    return at + 1 + packed, at + 1 + unpacked


def _number(data: bytes, at: int) -> tuple[int, int]:
    """Return the zigzag-encoded integer at `at`, and the index after it."""
    value, at = _varint(data, at)
    return (value >> 1) ^ -(value & 1), at


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        value |= (data[at] & 127) << shift
        at += 1
        if data[at - 1] < 128:
            return value & 0xFFFFFFFF, at
    raise ValueError("a number is too long")


def _skip_value(data: bytes, at: int, kind: int, depth: int) -> int:
    """Return the index after the value at `at`, which has the Thrift type `kind`."""
    if depth > DEPTH:
        raise ValueError("structs are nested too deeply")
    if kind in LENGTHS:
        return at + LENGTHS[kind]
    if kind in (4, 5, 6, 8):  # integers, and text by its length
        value, at = _varint(data, at)
        return at + (value if kind == 8 else 0)
    if kind == 12:  # a struct
        while head := data[at]:
            at = _skip_value(data, at + 1 if head >> 4 else _varint(data, at + 1)[1], head & 15, depth + 1)
        return at + 1
    if kind in (9, 10):  # a list or a set
        head, at = data[at], at + 1
        count, at = _varint(data, at) if head >> 4 == 15 else (head >> 4, at)
        kinds = [head & 15]
    elif kind == 11:  # a map
        count, at = _varint(data, at)
        kinds, at = ([data[at] >> 4, data[at] & 15], at + 1) if count else ([], at)
    else:
        raise ValueError(f"a page's header has the unknown type {kind}")
    if count > len(data) - at:  # a value has at least one byte
        raise IndexError(count)
    for _ in range(count):
        for one in kinds:
            at = at + 1 if one in (1, 2) else _skip_value(data, at, one, depth + 1)
    return at


def stream_bytes(handle: BinaryIO) -> int:
    """Return the number of bytes to which an Arrow stream's compressed buffers decompress, by the length declared before each buffer."""
    place, total = handle.tell(), 0
    try:
        while len(head := handle.read(4)) == 4 and (size := struct.unpack("<i", head)[0]):
            size = struct.unpack("<i", handle.read(4))[0] if size == -1 else size
            if size <= 0:
                break
            buffers, length = _message(handle.read(size))
            body = handle.tell()
            for offset, packed in buffers:
                if packed >= 8 and 0 <= offset <= length - 8:  # readers reject other positions; these must not hide later buffers
                    handle.seek(body + offset)
                    total += max(0, struct.unpack("<q", handle.read(8))[0])
            if length < 0:
                break
            handle.seek(body + length)
    except (struct.error, IndexError, ValueError, OverflowError, OSError):
        pass  # Arrow's reader reports the error at the same place
    finally:
        handle.seek(place)
    return total


def _message(data: bytes) -> tuple[list[tuple[int, int]], int]:
    """Return the compressed buffers of an Arrow message (a FlatBuffer) as (offset in its body, bytes), and the length of the body."""

    def field(table: int, number: int) -> int:
        vtable = table - struct.unpack_from("<i", data, table)[0]
        known = 4 + 2 * number < struct.unpack_from("<H", data, vtable)[0]
        offset = struct.unpack_from("<H", data, vtable + 4 + 2 * number)[0] if known else 0
        return table + offset if offset else 0

    def at(place: int) -> int:
        return int(place + struct.unpack_from("<I", data, place)[0])

    message = at(0)
    kind, header, body = field(message, 1), field(message, 2), field(message, 3)
    which, batch = data[kind] if kind else 0, at(header) if header else 0
    if which == 2 and (inner := field(batch, 1)):  # a dictionary batch
        batch = at(inner)
    length = struct.unpack_from("<q", data, body)[0] if body else 0
    packed = batch and (field(batch, 3) or b"ARROW:experimental_compression" in data)  # as in Arrow 0.17, whose files can still be read
    if which not in (2, 3) or not packed or not (several := field(batch, 2)):
        return [], length
    start = at(several)
    count = struct.unpack_from("<I", data, start)[0]
    return [struct.unpack_from("<qq", data, start + 4 + 16 * n) for n in range(count)], length
