"""Pages, and WARC 1.1 files of pages, with one gzip member per record and deterministic bytes."""

from __future__ import annotations

import base64
import hashlib
import os
import uuid
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import format_datetime
from pathlib import Path

SAMPLE = uuid.uuid5(uuid.NAMESPACE_URL, "urn:puna:sample")


@dataclass(frozen=True)
class Member:
    """A file of a package's archive: its path, modification time (UTC) and content."""

    path: str
    modified: datetime
    body: bytes


@dataclass(frozen=True)
class Page:
    """A fetched page: `content_type` as in the HTTP header (with charset), `fetched_at` in UTC."""

    url: str
    fetched_at: datetime
    content_type: str
    body: bytes


def write_warc(path: Path, pages: Sequence[Page], description: dict[str, str]) -> None:
    """Write pages as response records after a warcinfo record; `path` appears only when complete.

    The same file name, pages and `description` give the same bytes: record ids derive from these, and gzip members carry no time.
    The warcinfo record has the date of the newest page.
    """
    newest = max((page.fetched_at for page in pages), default=datetime(1970, 1, 1, tzinfo=UTC))
    fields = "".join(f"{name}: {value}\r\n" for name, value in description.items()).encode()
    about = {"WARC-Filename": path.name, "Content-Type": "application/warc-fields"}
    partial = path.with_name(path.name + ".partial")
    with partial.open("wb") as stream:
        stream.write(_record("warcinfo", path.name + _digest(fields), _date(newest), about, fields))
        for page in pages:
            stream.write(_response(page))
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(partial, path)


def _response(page: Page) -> bytes:
    date, payload = _date(page.fetched_at), _digest(page.body)
    http = (f"HTTP/1.1 200 OK\r\nDate: {format_datetime(page.fetched_at.astimezone(UTC), usegmt=True)}\r\n"
        f"Content-Type: {page.content_type}\r\nContent-Length: {len(page.body)}\r\n\r\n")  # fmt: skip
    about = {"WARC-Target-URI": page.url, "WARC-Payload-Digest": payload, "Content-Type": "application/http; msgtype=response"}
    return _record("response", f"{page.url} {date} {payload}", date, about, http.encode() + page.body)


def _record(kind: str, identity: str, date: str, about: dict[str, str], block: bytes) -> bytes:
    """Return a WARC record as one gzip member."""
    headers = {"WARC-Type": kind, "WARC-Record-ID": f"<urn:uuid:{uuid.uuid5(SAMPLE, identity)}>", "WARC-Date": date, **about}
    headers |= {"WARC-Block-Digest": _digest(block), "Content-Length": str(len(block))}
    head = "\r\n".join(["WARC/1.1", *(f"{name}: {value}" for name, value in headers.items())])
    packer = zlib.compressobj(6, zlib.DEFLATED, 31)
    return packer.compress(head.encode() + b"\r\n\r\n" + block + b"\r\n\r\n") + packer.flush()


def _date(moment: datetime) -> str:
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _digest(body: bytes) -> str:
    return "sha1:" + base64.b32encode(hashlib.sha1(body, usedforsecurity=False).digest()).decode()
