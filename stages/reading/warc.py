"""A reader of pages from WARC and WET archives: it parses the records that `warc_frames` finds, and the HTTP responses in them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache
from typing import Any, BinaryIO
from urllib.parse import urlsplit

from fastwarc.warc import WarcRecord

from puna.stages.reading.bodies import decode
from puna.stages.reading.dates import moment
from puna.stages.reading.files import Unpacking
from puna.stages.reading.pages import Page, Rejected
from puna.stages.reading.warc_frames import MAX_HEADER_BYTES, frames

STATUS = re.compile(r"(?:HTTP/\d(?:\.\d)?|ICY) +(\d{3})(?!\d)", re.IGNORECASE)
HEADER_END = re.compile(rb"\r?\n\r?\n")
HEADER_LINE = re.compile(r"\r?\n(?![ \t])")  # a line that starts with a space or tab continues the previous line
WEB = ("http://", "https://")
SCHEMES = ("http", "https", "ftp", "file", "")
SCRIPTS = re.compile(r"text/x-(?:(?:java|ecma|live|j)script|component|cross-domain-policy)")


def read_warc(handle: BinaryIO, name: str, max_body_bytes: int) -> Iterator[Page | Rejected]:
    """Yield every record of the archive `name` as a page, or as a rejection with its reason."""
    unpacking = Unpacking(name, handle)
    for number, frame in enumerate(frames(handle, max_body_bytes + MAX_HEADER_BYTES, unpacking)):
        where, label = f"{name}#{number}", f"{name}, offset {frame.offset}"
        if frame.problem:
            yield Rejected(frame.rule, where, f"{label}: {frame.problem}", frame.value, frame.threshold)
            continue
        try:
            record = WarcRecord.from_bytes(frame.data)
        except OSError as error:
            yield Rejected("malformed_record", where, f"{label}: {error}")
            continue
        page: Page | Rejected
        try:
            page = _page(record, where, label, max_body_bytes)
        except Exception as error:  # noqa: BLE001 - an unforeseen error costs only this record
            page = Rejected("failed", where, f"{label}: {type(error).__name__}: {error}")
        unpacking.add(len(page.body) if isinstance(page, Page) else 0, records=5)
        yield page


def _page(record: Any, where: str, said: str, limit: int) -> Page | Rejected:
    kind = record.headers.get("WARC-Type", "").lower()
    url = (record.headers.get("WARC-Target-URI") or "").strip("<> ")
    said = f"{said}: {kind or 'no type'} {url}".rstrip()
    if kind not in ("response", "resource", "conversion"):
        return Rejected("not_a_response", where, said)
    date = (record.headers.get("WARC-Date") or "").strip()  # W3C's profile of ISO 8601, up to nanoseconds
    fetched = moment(date) if date else None
    if fetched is None or not url:
        return Rejected("malformed_record", where, f"{said}: no usable {'WARC-Target-URI' if not url else 'WARC-Date'}")
    if (why := _no_page(url)) is not None:
        return Rejected("not_a_page", where, f"{said}: {why}")
    header = (record.headers.get("Content-Type") or "").strip()
    if kind == "response" and header.lower().startswith("application/http"):
        return _response(record.reader.read(), where, said, url, fetched, limit)
    if kind == "response" and not url.startswith(WEB):
        return Rejected("not_a_response", where, f"{said}: not an HTTP response")
    media, charset = media_type(header)
    if kind == "conversion":
        media, charset = media or "text/plain", charset or "utf-8"
    return _of_media(Page(url, fetched, media, charset, record.reader.read(), where), said)


def _no_page(url: str) -> str | None:
    """Return why the content of a URL is never a page (a scheme such as dns: or metadata:, or /robots.txt), else None."""
    if url.startswith(WEB) and "/robots.txt" not in url and url.isprintable():
        return None  # the usual case; `urlsplit` drops some unprintable characters
    try:
        parts = urlsplit(url)
    except ValueError:
        return None
    if parts.scheme.lower() not in SCHEMES:
        return f"{parts.scheme}: is not a scheme of pages"
    return "it is for crawlers" if parts.path == "/robots.txt" else None


def _of_media(page: Page, said: str) -> Page | Rejected:
    """Return the page, or a rejection if it is a script: scripts of websites are not documents, unlike source files in a folder."""
    return Rejected("not_a_page", page.where, f"{said}: {page.content_type}") if SCRIPTS.fullmatch(page.content_type) else page


def _response(block: bytes, where: str, said: str, url: str, fetched: int, limit: int) -> Page | Rejected:
    end = HEADER_END.search(block, 0, MAX_HEADER_BYTES)
    first, *lines = HEADER_LINE.split(block[: end.start() if end else MAX_HEADER_BYTES].decode("utf-8", "replace"))
    status = STATUS.match(first)
    if status is None:
        return Rejected("malformed_record", where, f"{said}: no HTTP status line")
    if not 200 <= int(status[1]) < 300:
        return Rejected("http_status", where, said, float(status[1]))
    fields: dict[str, str] = {}
    for name, _, value in (line.partition(":") for line in lines):
        fields.setdefault(name.strip().lower(), value.strip())
    encodings = f"{fields.get('content-encoding', '')},{fields.get('transfer-encoding', '')}"
    try:
        body = decode(block[end.end() :] if end else b"", encodings.lower(), limit)
    except ValueError as error:
        return Rejected("undecodable_body", where, f"{said}: {error}")
    media, charset = media_type(fields.get("content-type", ""))
    return _of_media(Page(url, fetched, media, charset, body, where), said)


@lru_cache(maxsize=128)
def media_type(header: str) -> tuple[str, str | None]:
    """Return the media type and the character set (None if absent) of a Content-Type header, in lower case."""
    media, _, parameters = header.partition(";")
    charset = None
    for parameter in parameters.split(";"):
        key, _, value = parameter.partition("=")
        if key.strip().lower() == "charset":
            charset = value.strip().strip("\"'").lower() or None
    return media.strip().lower(), charset
