"""WARC and WET archives as pages: the HTTP responses inside the records that `warc_frames` finds."""

from __future__ import annotations

import io
import re
import zlib
from collections.abc import Iterator
from datetime import datetime
from typing import Any, BinaryIO
from urllib.parse import urlsplit

from fastwarc.stream_io import BrotliReader
from fastwarc.warc import WarcRecord

from puna.stages.curate.reading.pages import Page, Rejected
from puna.stages.curate.reading.warc_frames import GZIP_MAGIC, MAX_HEADER_BYTES, ZSTD_MAGIC, frames, unzstd
from puna.stages.reading.dates import microseconds

GZIP, ZLIB = 31, 15  # zlib's window bits for either header
GZIP_HEADER = 10  # bytes, at least
SCHEMES = ("http", "https", "ftp", "file", "")
SCRIPTS = re.compile(r"text/x-(?:(?:java|ecma|live|j)script|component|cross-domain-policy)")


def read_warc(handle: BinaryIO, name: str, max_body_bytes: int) -> Iterator[Page | Rejected]:
    """Every record of the archive `name` as a page, or as the reason why it is none."""
    for number, frame in enumerate(frames(handle, max_body_bytes + MAX_HEADER_BYTES)):
        where, said = f"{name}#{number}", f"{name}, offset {frame.offset}"
        if frame.problem:
            yield Rejected(frame.rule, where, f"{said}: {frame.problem}", frame.value, frame.threshold)
            continue
        try:
            record = WarcRecord.from_bytes(frame.data)
        except OSError as error:
            yield Rejected("malformed_record", where, f"{said}: {error}")
            continue
        found: Page | Rejected
        try:
            found = _page(record, where, said, frame.data, max_body_bytes)
        except Exception as error:  # noqa: BLE001 - what nobody foresaw costs this record, not those after it
            found = Rejected("failed", where, f"{said}: {type(error).__name__}: {error}")
        yield found


def _page(record: Any, where: str, said: str, data: bytes, limit: int) -> Page | Rejected:
    kind = record.headers.get("WARC-Type", "").lower()
    url = (record.headers.get("WARC-Target-URI") or "").strip("<> ")
    said = f"{said}: {kind or 'no type'} {url}".rstrip()
    if kind not in ("response", "resource", "conversion"):
        return Rejected("not_a_response", where, said)
    fetched = _date(record.headers.get("WARC-Date"))
    if fetched is None or not url:
        return Rejected("malformed_record", where, f"{said}: no usable {'WARC-Target-URI' if not url else 'WARC-Date'}")
    if (why := _no_page(url)) is not None:
        return Rejected("not_a_page", where, f"{said}: {why}")
    header = (record.headers.get("Content-Type") or "").strip()
    if kind == "response" and header.lower().startswith("application/http"):
        return _response(record, where, said, url, fetched, data, limit)
    if kind == "response" and not url.startswith(("http://", "https://")):
        return Rejected("not_a_response", where, f"{said}: not an HTTP response")
    media, charset = media_type(header)
    if kind == "conversion":
        media, charset = media or "text/plain", charset or "utf-8"
    return _of_media(Page(url, fetched, media, charset, record.reader.read(), where), said)


def _no_page(url: str) -> str | None:
    """Why what stands at an address is no page whatever it holds: a crawler's own records, and what is told to crawlers."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return None
    if parts.scheme.lower() not in SCHEMES:
        return f"{parts.scheme}: is no address of a page"
    return "it is for crawlers" if parts.path == "/robots.txt" else None


def _of_media(page: Page, said: str) -> Page | Rejected:
    """The page, unless its medium is a script's, which a website serves to browsers; of a folder of code it is a document."""
    return Rejected("not_a_page", page.where, f"{said}: {page.content_type}") if SCRIPTS.fullmatch(page.content_type) else page


def _response(record: Any, where: str, said: str, url: str, fetched: int, data: bytes, limit: int) -> Page | Rejected:
    try:
        record.parse_http(auto_decode="transfer")
        body = record.reader.read()
    except OSError:
        # Archives often hold the body already decoded, with the old headers.
        record = WarcRecord.from_bytes(data)
        try:
            record.parse_http(auto_decode="none")
            body = record.reader.read()
        except OSError as error:
            return Rejected("malformed_record", where, f"{said}: {error}")
    status = record.http_headers.status_code if record.http_headers is not None else None
    if status is None:
        return Rejected("malformed_record", where, f"{said}: no HTTP status line")
    if not 200 <= status < 300:
        return Rejected("http_status", where, said, float(status))
    try:
        body = _decoded(body, (record.http_headers.get("Content-Encoding") or "").lower(), limit)
    except ValueError as error:
        return Rejected("undecodable_body", where, f"{said}: {error}")
    media, charset = media_type(record.http_headers.get("Content-Type") or "")
    return _of_media(Page(url, fetched, media, charset, body, where), said)


def _decoded(body: bytes, encodings: str, limit: int) -> bytes:
    """Undo the content encodings; a body that plainly is not encoded is returned as it is. ValueError: it is damaged."""
    for encoding in reversed([e.strip() for e in encodings.split(",") if e.strip()]):
        if encoding in ("gzip", "x-gzip"):
            body = _inflate(body, GZIP, encoding, limit) if body[:2] == GZIP_MAGIC[:2] else body
        elif encoding == "deflate":
            body = _inflate(body, ZLIB, encoding, limit) if body[:1] == b"\x78" else body
        elif encoding == "zstd":
            body = unzstd(body, limit) if body[:4] == ZSTD_MAGIC else body
        elif encoding == "br":
            body = body if body.lstrip()[:1] == b"<" else _unbrotli(body, limit)
        elif encoding != "identity":
            raise ValueError(f"unknown content encoding {encoding!r}")
    return body


def _inflate(body: bytes, bits: int, encoding: str, limit: int) -> bytes:
    engine = zlib.decompressobj(bits)
    try:
        out = engine.decompress(body, limit + 1)
    except zlib.error as error:
        raise ValueError(f"damaged {encoding} body ({error})") from error
    if len(out) > limit:
        raise ValueError(f"the {encoding} body unpacks to more than {limit} bytes")
    try:
        whole = engine.eof or (bits == GZIP and _whole_without_trailer(body, limit))
    except zlib.error:  # its header does not end where it says
        whole = False
    if not whole:
        raise ValueError(f"truncated {encoding} body")
    return out


def _whole_without_trailer(body: bytes, limit: int) -> bool:
    """Whether of a gzip body only (some of) the checksum and the length at its end are missing."""
    if len(body) <= GZIP_HEADER:
        return False
    flags, at = body[3], GZIP_HEADER
    if flags & 4:  # extra field
        at += 2 + int.from_bytes(body[at : at + 2], "little")
    for flag in (8, 16):  # name, comment
        if flags & flag:
            at = body.find(b"\0", at) + 1
    engine = zlib.decompressobj(-ZLIB)
    engine.decompress(body[at + 2 * (flags >> 1 & 1) :], limit + 1)
    return engine.eof


def _unbrotli(body: bytes, limit: int) -> bytes:
    try:
        out: bytes = BrotliReader(io.BytesIO(body)).read(limit + 1)
    except OSError as error:
        raise ValueError(f"damaged br body ({error})") from error
    if body and not out:
        raise ValueError("damaged br body")
    if len(out) > limit:
        raise ValueError(f"the br body unpacks to more than {limit} bytes")
    return out


def media_type(header: str) -> tuple[str, str | None]:
    """A Content-Type header as lower-case media type and character set."""
    media, _, parameters = header.partition(";")
    charset = None
    for parameter in parameters.split(";"):
        key, _, value = parameter.partition("=")
        if key.strip().lower() == "charset":
            charset = value.strip().strip("\"'").lower() or None
    return media.strip().lower(), charset


def _date(text: str | None) -> int | None:
    """WARC-Date (W3C profile of ISO 8601, up to nanoseconds) in microseconds since 1970, or None."""
    if not text:
        return None
    text = re.sub(r"(\.\d{6})\d+", r"\1", text.strip())
    try:
        return microseconds(datetime.fromisoformat(text))
    except ValueError:
        return None
