"""WARC 1.1 files as crawlers write them: one gzip member per record, deterministic bytes."""

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

_NAMESPACE = uuid.uuid5(uuid.NAMESPACE_URL, "urn:puna:sample")


@dataclass(frozen=True)
class Page:
    """A fetched page: ``content_type`` as in the HTTP header (with charset), ``fetched_at`` in UTC."""

    url: str
    fetched_at: datetime
    content_type: str
    body: bytes


def write_warc(path: Path, pages: Sequence[Page], description: dict[str, str]) -> None:
    """Write ``pages`` as response records after a warcinfo record; ``path`` appears only when complete.

    The same pages give the same bytes: record ids derive from the content, gzip members carry no time, and
    the warcinfo record bears the date of the newest page.
    """
    newest = max((page.fetched_at for page in pages), default=datetime(1970, 1, 1, tzinfo=UTC))
    partial = path.with_name(path.name + ".partial")
    with partial.open("wb") as stream:
        stream.write(_member(_information(path.name, newest, description)))
        for page in pages:
            stream.write(_member(_response(page)))
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(partial, path)


def _member(record: bytes) -> bytes:
    packer = zlib.compressobj(6, zlib.DEFLATED, 31)
    return packer.compress(record) + packer.flush()


def _date(moment: datetime) -> str:
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _digest(body: bytes) -> str:
    return "sha1:" + base64.b32encode(hashlib.sha1(body, usedforsecurity=False).digest()).decode()


def _record(headers: dict[str, str], block: bytes) -> bytes:
    headers["WARC-Block-Digest"] = _digest(block)
    headers["Content-Length"] = str(len(block))
    lines = ["WARC/1.1", *(f"{name}: {value}" for name, value in headers.items())]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + block + b"\r\n\r\n"


def _information(filename: str, date: datetime, description: dict[str, str]) -> bytes:
    block = "".join(f"{name}: {value}\r\n" for name, value in description.items()).encode()
    return _record(
        {
            "WARC-Type": "warcinfo",
            "WARC-Record-ID": f"<urn:uuid:{uuid.uuid5(_NAMESPACE, filename + _digest(block))}>",
            "WARC-Date": _date(date),
            "WARC-Filename": filename,
            "Content-Type": "application/warc-fields",
        },
        block,
    )


def _response(page: Page) -> bytes:
    fetched_at = page.fetched_at.astimezone(UTC)
    http = (
        "HTTP/1.1 200 OK\r\n"
        f"Date: {format_datetime(fetched_at, usegmt=True)}\r\n"
        f"Content-Type: {page.content_type}\r\n"
        f"Content-Length: {len(page.body)}\r\n\r\n"
    )
    date = _date(fetched_at)
    payload = _digest(page.body)
    return _record(
        {
            "WARC-Type": "response",
            "WARC-Record-ID": f"<urn:uuid:{uuid.uuid5(_NAMESPACE, f'{page.url} {date} {payload}')}>",
            "WARC-Date": date,
            "WARC-Target-URI": page.url,
            "WARC-Payload-Digest": payload,
            "Content-Type": "application/http; msgtype=response",
        },
        http.encode() + page.body,
    )
