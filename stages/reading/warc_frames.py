"""Record boundaries of WARC and WET archives, robust to truncation and damage.

FastWARC parses the content of a record, but it ends silently at a truncated archive and stops at the first damaged byte. So this module
finds records by their headers (ISO 28500), reports bad records with their offsets, and continues at the next record."""

from __future__ import annotations

import re
import zlib
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO

import zstandard

from puna.stages.reading.bodies import unzstd
from puna.stages.reading.files import GZIP_MAGIC, SLICE_BYTES, ZSTD_MAGIC, Unpacking

CHUNK_BYTES = 1 << 20
PACKED_BYTES = 1 << 14  # compressed bytes per call: zlib copies the bytes after a member, and most members are small
OUTPUT_BYTES = 1 << 24
OVERRUNS = 8  # maximum number of damaged members for which the file is searched again from the start of the member
MAX_HEADER_BYTES = 1 << 16
ZSTD_DICTIONARY_MAGIC = b"\x5d\x2a\x4d\x18"
ANY_LENGTH = re.compile(rb"^[ \t]*content-length[ \t]*:[^\d\n]*(\d{1,4000})", re.IGNORECASE | re.MULTILINE)
LENGTH = re.compile(rb"^content-length[ \t]*:[ \t]*0*(\d{1,18})[ \t]*\r?$", re.IGNORECASE | re.MULTILINE)
LINE_ENDS = re.compile(rb"[\r\n]*")
HEADER_END = re.compile(rb"\r\n\r\n|\n\n")
RECORD_START = re.compile(rb"\nWARC/\d\.\d\r?\n")
HEADER_END_OR_START = re.compile(HEADER_END.pattern + b"|" + RECORD_START.pattern)
START_BYTES = len(b"\nWARC/1.0\r\n")


@dataclass(frozen=True)
class Frame:
    """One record: its offset in the file (compressed: its member's offset), and its bytes, or the violated rule and the problem."""

    offset: int
    problem: str = ""
    rule: str = ""
    value: float | None = None
    threshold: float | None = None
    data: bytes = b""


def frames(handle: BinaryIO, max_record_bytes: int, unpacking: Unpacking) -> Iterator[Frame]:
    """Yield every record of a WARC file (plain, gzip or zstd; one or many records per member), good or bad, in order."""
    head = handle.read(4)
    handle.seek(0)
    if head[:3] == GZIP_MAGIC:
        return _frames(_Buffer(_count_bytes(_gzip_blocks(handle), unpacking), members=True), max_record_bytes)
    if head in (ZSTD_MAGIC, ZSTD_DICTIONARY_MAGIC):
        return _frames(_Buffer(_count_bytes(_zstd_blocks(handle), unpacking), members=True), max_record_bytes)
    return _frames(_Buffer(_plain_blocks(handle), members=False), max_record_bytes)


Block = tuple[int, bytes | str]
"""(file offset of bytes, or of their compressed member; the bytes, or the reason why this part of the file cannot be read)."""


def _count_bytes(blocks: Iterator[Block], unpacking: Unpacking) -> Iterator[Block]:
    for block in blocks:
        unpacking.add(len(block[1]))
        yield block


def _plain_blocks(handle: BinaryIO) -> Iterator[Block]:
    offset = 0
    while chunk := handle.read(CHUNK_BYTES):
        yield offset, chunk
        offset += len(chunk)


def _gzip_blocks(handle: BinaryIO) -> Iterator[Block]:
    """Yield decompressed gzip members. After a damaged member, continue at the next member that begins with a record."""
    base, data, at = 0, handle.read(CHUNK_BYTES), 0  # offset of `data` in the file, data, bytes of `data` consumed
    overruns = 0
    while data:
        if not data[at] and not data[at:].strip(b"\0"):  # padding after the last member
            base, data, at = base + len(data), handle.read(CHUNK_BYTES), 0
            continue
        member, start, engine = base + at, at, zlib.decompressobj(31)
        pending: list[bytes] = []  # a small member is yielded only after its checksum has been verified
        size = 0
        try:
            while not engine.eof:
                packed = data[at : at + PACKED_BYTES]
                pending.append(engine.decompress(packed, OUTPUT_BYTES))
                size += len(pending[-1])
                if size >= OUTPUT_BYTES:
                    yield member, b"".join(pending)
                    pending, size = [], 0
                at += len(packed) - len(engine.unused_data if engine.eof else engine.unconsumed_tail)
                if at == len(data):
                    base, data, at, start = base + len(data), handle.read(CHUNK_BYTES), 0, 0
                if not data and not engine.eof:
                    if overruns < OVERRUNS:
                        handle.seek(member + 3)
                        base, data, at = _next_member(handle, member + 3, handle.read(CHUNK_BYTES), 0)
                    if data:
                        overruns += 1
                        yield member, "damaged gzip data (it overlaps the next member)"
                        break
                    yield member, b"".join(pending)
                    yield member, "the file ends inside a gzip member"
                    return
            else:
                yield member, b"".join(pending)
        except zlib.error as error:
            if "check" not in str(error):  # bytes before the damage are right, but a wrong checksum does not locate the damage
                yield member, b"".join(pending)
            yield member, f"damaged gzip data ({error})"
            base, data, at = _next_member(handle, base, data, start + 3 if base + start == member else start)


def _next_member(handle: BinaryIO, base: int, data: bytes, at: int) -> tuple[int, bytes, int]:
    """Return (offset of the data, data, index in the data) of the first member at or after data[at] that begins with a record. The data are
    empty at the end of the file. `base`: offset of `data` in the file; `handle` is positioned at the end of `data`."""
    while True:
        position = data.find(GZIP_MAGIC, at)
        skip = position if position >= 0 else max(0, len(data) - 2)  # no magic number before this position
        if (position < 0 or len(data) - position < PACKED_BYTES) and (more := handle.read(CHUNK_BYTES)):
            base, data, at = base + skip, data[skip:] + more, 0
        elif position < 0:
            return base + len(data), b"", 0
        else:
            try:  # the magic number also occurs by chance inside compressed data
                if zlib.decompressobj(31).decompress(data[position : position + PACKED_BYTES], 16).startswith(b"WARC/"):
                    return base, data, position
            except zlib.error:
                pass
            at = position + 1


def _zstd_blocks(handle: BinaryIO) -> Iterator[Block]:
    """Yield decompressed zstd frames. After a damaged frame, continue at the next frame's magic number. A dictionary may come first, in a
    skippable frame (WARC-Zstandard)."""
    offset, damages = 0, 0
    try:
        dictionary, offset = _dictionary(handle)
        decompressor = zstandard.ZstdDecompressor(dict_data=dictionary)
        decompressor.decompressobj()  # parses the dictionary
    except (ValueError, EOFError, zstandard.ZstdError) as error:
        yield 0, f"the archive's dictionary cannot be read: {error}"
        return
    while packed := handle.read(SLICE_BYTES):
        member, engine = offset, decompressor.decompressobj()
        pending = bytearray()  # a small frame is yielded only after its checksum, if any, has been verified
        try:
            while not engine.eof:
                if not packed:
                    yield member, bytes(pending)
                    yield member, "the file ends inside a zstd frame"
                    return
                pending += engine.decompress(packed)
                offset += len(packed)
                if len(pending) >= OUTPUT_BYTES:
                    yield member, bytes(pending)
                    pending.clear()
                packed = b"" if engine.eof else handle.read(SLICE_BYTES)
            yield member, bytes(pending)
            offset -= len(engine.unused_data)
        except zstandard.ZstdError as error:
            if "checksum" not in str(error):
                yield member, bytes(pending)
            yield member, f"damaged zstd data ({error})"
            damages += 1
            # A damaged frame may have consumed the next frames, so search again from its start, but only a few times.
            behind = member + len(ZSTD_MAGIC)
            offset = _next_frame(handle, behind if damages <= OVERRUNS else max(behind, offset))
        handle.seek(offset)


def _dictionary(handle: BinaryIO) -> tuple[zstandard.ZstdCompressionDict | None, int]:
    """Return an archive's dictionary and the size of its frame; (None, 0) without one. `handle` is left after the frame."""
    head = handle.read(8)
    if head[:4] != ZSTD_DICTIONARY_MAGIC:
        handle.seek(0)
        return None, 0
    size = int.from_bytes(head[4:], "little")
    if size > OUTPUT_BYTES:
        raise ValueError(f"{size} bytes are declared, but at most {OUTPUT_BYTES} are read")
    raw = handle.read(size)
    raw = unzstd(raw, OUTPUT_BYTES) if raw[:4] == ZSTD_MAGIC else raw
    return zstandard.ZstdCompressionDict(raw), 8 + size


def _next_frame(handle: BinaryIO, offset: int) -> int:
    """Return the offset of the first zstd magic number from `offset` on, or of the end of the file."""
    handle.seek(offset)
    data = b""
    while more := handle.read(SLICE_BYTES):  # small reads: the next frame is often near
        data += more
        if (position := data.find(ZSTD_MAGIC)) >= 0:
            return offset + position
        tail = data[1 - len(ZSTD_MAGIC) :]
        offset, data = offset + len(data) - len(tail), tail
    return offset + len(data)


def _frames(buffer: _Buffer, max_record_bytes: int) -> Iterator[Frame]:
    while buffer.skip_blank():
        offset, header = buffer.offset, buffer.header()
        rule, problem = _header_fault(buffer, header)
        if not problem and header is not None:
            length = int(LENGTH.findall(header)[0])
            size = len(header) + length
            if length > max_record_bytes and buffer.discard(size):
                yield Frame(offset, f"the record has {length} bytes", "record_too_large", float(length), float(max_record_bytes))
                continue
            data = buffer.take(size) if length <= max_record_bytes else None
            if data is not None:
                yield Frame(offset, data=data)
                continue
            end = "gzip member or zstd frame" if buffer.cut else "file"
            problem = buffer.damage or f"the {end} ends inside the record ({length} bytes declared)"
        yield Frame(offset, problem, rule)
        buffer.resynchronize()


def _header_fault(buffer: _Buffer, header: bytes | None) -> tuple[str, str]:
    """Return the violated rule and a message. For a valid header, return the rule to use if the record is truncated, and ""."""
    if header is None and buffer.damage is None and buffer.size > MAX_HEADER_BYTES:
        return "malformed_record", f"no header of at most {MAX_HEADER_BYTES} bytes"
    if header is None:
        return "truncated_record", buffer.damage or "the file ends inside the record's header"
    if not header.startswith(b"WARC/"):
        return "malformed_record", "no WARC record starts here"
    length = LENGTH.search(header)
    if length is None:
        return "malformed_record", "the record's header has no usable Content-Length"
    if HEADER_END.search(header) is None:
        return "malformed_record", "the next record begins inside the record's header"
    if any(int(other) != int(length[1]) for other in ANY_LENGTH.findall(header)):
        # Another reader may use a different one of the lengths, and allocate that much memory.
        return "malformed_record", "the record's header declares several lengths"
    return "truncated_record", ""


class _Buffer:
    """A buffer of bytes read ahead, with their offset in the file (plain files) or their member's offset (compressed files)."""

    def __init__(self, blocks: Iterator[Block], members: bool) -> None:
        self._blocks = blocks
        self._members = members
        self._data = bytearray()
        self._starts: deque[tuple[int, int]] = deque()  # (bytes dropped or held before a block, the block's offset)
        self._records: deque[int] = deque()  # bytes dropped or held before a member that begins with a record
        self._dropped = 0
        self.damage: str | None = None
        self.cut = False
        """True if the last `take` or `discard` asked for bytes beyond the end of the member. A record never extends beyond its member."""

    @property
    def size(self) -> int:
        return len(self._data)

    @property
    def offset(self) -> int:
        """Return the file offset of the first byte (plain files) or of its member (compressed files)."""
        if not self._starts:
            return 0
        before, offset = self._starts[0]
        return offset if self._members else offset + self._dropped - before

    def _more(self) -> bool:
        """Read one block; return False at the end of the file or at damage. `damage` stays set until `resynchronize`."""
        block = next(self._blocks, None) if self.damage is None else None
        if block is None:
            return False
        offset, data = block
        if not self._data:
            self._starts.clear()
        place = self._dropped + len(self._data)
        if self._members and isinstance(data, bytes) and data.startswith(b"WARC/") and self._starts and self._starts[-1][1] != offset:
            self._records.append(place)
        self._starts.append((place, offset))
        if isinstance(data, str):
            self.damage = data
            return False
        self._data += data
        return True

    def _drop(self, count: int) -> None:
        del self._data[:count]
        self._dropped += count
        while len(self._starts) > 1 and self._starts[1][0] <= self._dropped:
            self._starts.popleft()

    def skip_blank(self) -> bool:
        """Drop line ends between records; return True if bytes or damage are left."""
        while True:
            blank = LINE_ENDS.match(self._data)
            assert blank is not None
            self._drop(blank.end())
            if self._data or self.damage is not None:
                return True
            if not self._more() and self.damage is None:
                return False

    def header(self) -> bytes | None:
        """Return the header up to its blank line, inclusive, or up to the next record if that begins first.

        Return None if the header is truncated or longer than `MAX_HEADER_BYTES`. Bytes after the
        header are not scanned, so that many false starts do not take quadratic time."""
        searched = 0
        while True:
            if match := HEADER_END_OR_START.search(self._data, searched):
                end = match.start() + 1 if RECORD_START.match(self._data, match.start()) else match.end()
                return bytes(self._data[:end]) if end <= MAX_HEADER_BYTES else None
            searched = max(0, len(self._data) - START_BYTES)
            if len(self._data) > MAX_HEADER_BYTES or not self._more():
                return None

    def _member_end(self) -> int | None:
        """Return the number of bytes before the next member that begins with a record; None if no such member is in the buffer. Other
        members are ignored: members of a fixed size, as written by bgzip, may end inside a record."""
        while self._records and self._records[0] <= self._dropped:
            self._records.popleft()
        return self._records[0] - self._dropped if self._records else None

    def _is_cut(self, count: int) -> bool:
        end = self._member_end()
        self.cut = end is not None and end < count
        return self.cut

    def take(self, count: int) -> bytes | None:
        """Return the first `count` bytes; None, dropping nothing, if the file or member has fewer or if damage comes first."""
        while not self._is_cut(count):
            if len(self._data) >= count:
                data = bytes(self._data[:count])
                self._drop(count)
                return data
            if not self._more():
                break
        return None

    def discard(self, count: int) -> bool:
        """Drop `count` bytes in pieces. If the file or member has fewer, or damage comes first, drop some and return False."""
        while not self._is_cut(count):
            if count <= len(self._data):
                self._drop(count)
                return True
            # One byte is kept, because it tells which member the next block belongs to.
            count -= max(0, len(self._data) - 1)
            self._drop(max(0, len(self._data) - 1))
            if not self._more():
                break
        return False

    def resynchronize(self) -> None:
        """Drop everything up to the position where the next record may start."""
        if self.damage is not None:
            self.damage = None
            self._drop(len(self._data))
            return
        while True:
            match, end = RECORD_START.search(self._data), self._member_end()
            positions = [at for at in (match and match.start() + 1, end) if at is not None]
            if positions:
                self._drop(min(positions))
                return
            self._drop(max(0, len(self._data) - (START_BYTES - 1)))
            if not self._more():
                self._drop(len(self._data))
                return
