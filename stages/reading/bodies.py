"""Decoders of page bodies and compressed files, with a limit on the decoded bytes."""

from __future__ import annotations

import io
import re
import struct
import zlib
from collections.abc import Callable
from typing import Any

import zstandard
from fastwarc.stream_io import BrotliReader

from puna.stages.reading.files import GZIP_MAGIC, ZSTD_MAGIC, zstd_pieces

GZIP, ZLIB, RAW = 31, 15, -15  # zlib's window bits for a gzip header, a zlib header and no header
TRAILER = 8  # bytes of checksum and length at the end of a gzip member
PACKED_BYTES = 1 << 12  # compressed bytes per call: zlib copies the bytes after a gzip member, and a body may have many members
CHUNK = re.compile(rb"([0-9a-fA-F]{1,8})[ \t]*(?:;[^\r\n]*)?\r?\n")
LINE_END = re.compile(rb"\r?\n")
MOST_ENCODINGS = 4  # maximum number of encodings of a body: servers use one besides chunked
SNIFF_BYTES = 1024
HEAD_BYTES = 10  # maximum bytes of a chunk header without extensions
HEAD_BEGUN = re.compile(rb"[0-9a-fA-F]{0,8}\r?")
NO_TEXT = re.compile(rb"(?!\xff\xfe|\xfe\xff)[\s\S]{0,1023}?[\x00-\x08\x0e-\x1a\x1c-\x1f]")  # controls, no UTF-16 BOM first


def sniff(body: bytes) -> str:
    """Return text/html if a body starts like HTML and is not a template in PHP, else an empty string."""
    head = body[:SNIFF_BYTES].lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    return "text/html" if head.startswith((b"<!doctype html", b"<html")) and b"<?php" not in body and b"<?=" not in body else ""


def decode(body: bytes, encodings: str, limit: int) -> bytes:
    """Return the decoded body. `encodings`: content encodings in the order of application. Unencoded HTML is returned unchanged. Raise
    ValueError if the body is damaged, truncated, larger than `limit` bytes when decoded, or has too many or unknown encodings."""
    several = [e.strip() for e in encodings.split(",") if e.strip()]
    if len(several) > MOST_ENCODINGS:
        raise ValueError(f"{len(several)} nested encodings; at most {MOST_ENCODINGS} are decoded")
    for encoding in reversed(several):
        if encoding == "identity" or body[:1024].lstrip()[:1] == b"<":
            continue
        if encoding not in DECODERS:
            raise ValueError(f"unknown content encoding {encoding!r}")
        try:
            body = DECODERS[encoding](body, limit)
        except (zlib.error, zstandard.ZstdError, OSError) as error:
            raise ValueError(f"damaged {encoding} body ({error})") from error
        except EOFError as error:
            raise ValueError(f"truncated {encoding} body") from error
        if len(body) > limit:
            raise ValueError(f"the {encoding} body decompresses to more than {limit} bytes")
    return body


def gunzip(body: bytes, limit: int) -> bytes:
    """Return the content of consecutive gzip members, at most `limit` + 1 bytes. Any other bytes after them are ignored. Raise EOFError if
    the data end inside a member, zlib.error for damage. A missing checksum or length at the very end is accepted."""
    out, at, member = bytearray(), 0, True
    while member and len(out) <= limit:
        engine, first = zlib.decompressobj(GZIP), len(out)
        while not engine.eof and at < len(body) and len(out) <= limit:
            packed = body[at : at + PACKED_BYTES]
            out += engine.decompress(packed, limit + 1 - len(out))
            at += len(packed) - len(engine.unused_data)
        if not engine.eof and len(out) <= limit and not _lacks_trailer_alone(engine, bytes(out[first:])):
            raise EOFError("it ends inside a gzip member")
        member = body.startswith(GZIP_MAGIC, at)
    return bytes(out)


def _lacks_trailer_alone(engine: Any, piece: bytes) -> bool:
    """True if the gzip member that decompressed to `piece` lacks only bytes of its checksum and length."""
    trailer = struct.pack("<II", zlib.crc32(piece), len(piece) & 0xFFFFFFFF)
    for missing in range(1, TRAILER + 1):
        twin = engine.copy()
        try:
            if twin.decompress(trailer[-missing:]) == b"" and twin.eof:
                return True
        except zlib.error:
            continue
    return False


def _inflate(body: bytes, limit: int) -> bytes:
    """Return a deflate body, with or without zlib's header, decompressed to at most `limit` + 1 bytes. Return a body that is already text
    unchanged, unless it begins with x (the first byte of zlib's header)."""
    bare = body[:1] != b"\x78" or int.from_bytes(body[:2], "big") % 31 != 0  # zlib's header contains a checksum
    text = bare and not NO_TEXT.match(body)  # the body may already be decoded
    engine = zlib.decompressobj(RAW if bare else ZLIB)
    try:
        out = engine.decompress(body, limit + 1)
    except zlib.error:
        if text:
            return body
        raise
    if engine.eof or len(out) > limit:
        return out
    if text:
        return body
    raise EOFError("it ends inside the data")


def unzstd(body: bytes, limit: int) -> bytes:
    """Return the content of zstd frames, at most `limit` bytes plus one decompressed slice. Raise EOFError if a frame is truncated."""
    out = bytearray()
    for piece in zstd_pieces(iter([body])):
        out += piece
        if len(out) > limit:
            break
    return bytes(out)


def _join_chunks(body: bytes, limit: int) -> bytes:
    """Return the joined chunks of a chunked body, which may be truncated after its first chunk; return any other body unchanged."""
    pieces: list[bytes] = []
    at, end = 0, None
    while head := CHUNK.match(body, at):
        size, start = int(head[1], 16), head.end()
        if size == 0:
            return b"".join(pieces) if pieces or not body[start:].strip() else body
        pieces.append(body[start : start + size])
        end = LINE_END.match(body, start + size)
        at = end.end() if end else start + size
        if end is None:
            break
    left = len(body) - at  # a truncated body ends with nothing, or with part of a chunk header
    chain = left < HEAD_BYTES if len(pieces) > 1 else end is not None and HEAD_BEGUN.fullmatch(body, at) is not None
    return b"".join(pieces) if chain else body


def _unbrotli(body: bytes, limit: int) -> bytes:
    out: bytes = BrotliReader(io.BytesIO(body)).read(limit + 1)
    if body and not out:
        raise OSError("it is empty")
    return out


DECODERS: dict[str, Callable[[bytes, int], bytes]] = {
    "gzip": lambda body, limit: gunzip(body, limit) if body.startswith(GZIP_MAGIC[:2]) else body,
    "deflate": _inflate,
    "zstd": lambda body, limit: unzstd(body, limit) if body.startswith(ZSTD_MAGIC) else body,
    "br": _unbrotli,
    "chunked": _join_chunks,
}
"""Encoding → decoder. gzip, zstd and chunked return unencoded bodies unchanged; deflate, text (see `_inflate`). Brotli is not detected."""
DECODERS["x-gzip"] = DECODERS["gzip"]
