"""Detection of the fields with the page, URL and date of a row."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from puna.stages.contract import External, ExternalFile
from puna.stages.reading.dates import moment
from puna.stages.reading.files import suffix
from puna.stages.reading.readers import DATE_COLUMNS
from puna.stages.reading.rows import FORMATS, SIDECARS, Row, read_rows
from puna.storage import PunaError

TEXT = ("text", "content", "body", "raw_content", "document", "article", "maintext", "plain_text", "markdown", "passage", "page_content")
HTML = ("html", "raw_html", "page_html", "html_content", "content_html", "body_html")
URL = ("url", "uri", "link", "source_url", "page_url", "warc_target_uri", "href")
TAG = re.compile(r"<(?:!doctype|html|head|body|div|p|span|a|h[1-6]|li|td)\b", re.IGNORECASE)
ROWS, FILES = 50, 50  # maximum number of rows and files to examine
TEXT_CHARACTERS, HTML_CHARACTERS = 100, 40  # minimum mean lengths of pages (text, HTML) in a field with an unusual name
CELL_BYTES = 1 << 26  # maximum bytes of an examined row


@dataclass(frozen=True)
class Found:
    """Names of a row's fields. `page`: the page, which is HTML if `html`, else text; `url`, `date`: None if missing; `names`: all fields.
    `others`: the page fields of other files of the input, each with an example file."""

    page: str
    html: bool
    url: str | None
    date: str | None
    names: tuple[str, ...]
    others: tuple[str, ...] = ()


def sniff(external: External) -> Found | None:
    """Return the fields in an input's rows, or None if no file has any. Raise PunaError if all files are tables and one has no text. If
    files differ, fields with usual names are preferred, then the fields of the files with the most bytes."""
    tables = [file for file in external.files if suffix(file.name) in FORMATS and file.name.rsplit("/", 1)[-1] not in SIDECARS]
    every = tables[:: max(1, len(tables) // FILES)][:FILES]
    votes: dict[Found, tuple[int, int]] = {}
    examples: dict[Found, str] = {}
    without: PunaError | None = None
    for file in every:
        try:
            rows = [dict(flat(row)) for row in itertools.islice(_rows(file), max(ROWS // len(every), 1))]
            found = fields_of(rows, file.location) if rows else None
        except PunaError as error:
            without = without or error
            continue
        if found is not None:
            same = next((one for one in votes if (one.page, one.html) == (found.page, found.html)), found)
            usual = found.page.lower().rpartition(".")[2] in (*TEXT, *HTML)
            size = votes.pop(same, (0, 0))[1] + file.bytes
            # A URL field that some files lack is not used, since rows without it would be lost.
            both = same if same.url == found.url else replace(same, url=None)
            votes[both], examples[both] = (usual, size), examples.pop(same, file.name)
    if not votes and without is not None and len(tables) == len(external.files):
        raise without
    best = max(votes, key=lambda found: votes[found], default=None)
    return best and replace(best, others=tuple(f"{found.page} ({examples[found]})" for found in votes if found is not best))


def fields_of(rows: list[dict[str, Any]], where: str) -> Found:
    """Return the fields of flat rows; the page's is found by its name (HTML first), else by mean length. Raise PunaError without text."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    texts = {name: [value for row in rows if isinstance(value := row.get(name), str | bytes) and value] for name in names}
    texts = {name: values for name, values in texts.items() if len(values) * 2 >= len(rows)}
    mean = {name: sum(map(len, values)) / len(values) for name, values in texts.items()}
    html = [name for name, values in texts.items() if sum(bool(TAG.search(_head(value))) for value in values) * 2 > len(values)]
    candidates = [name for usual in HTML for name in html if name.lower() == usual]
    candidates += [name for usual in TEXT for name in texts if name.lower().rpartition(".")[2] == usual]
    least = {name: HTML_CHARACTERS if name in html else TEXT_CHARACTERS for name in texts}
    others = (name for name in texts if mean[name] >= least[name] and not all("://" in _head(text)[:12] for text in texts[name]))
    candidates += sorted(others, key=lambda name: -mean[name])
    if not candidates:
        if not texts:
            raise PunaError(f"{where}: no field contains text; the fields are {', '.join(names) or 'none'}")
        # A short text in a field with an unusual name may be a label; only the user knows.
        with_text = ", ".join(f"{name} (mean {mean[name]:.0f} characters)" for name in texts)
        raise PunaError(
            f"{where}: no field is surely the page; fields with text are {with_text}. Name one with --columns text=FIELD or html=FIELD"
        )
    addresses = [name for name in names if all(name in row for row in rows)]  # as in `sniff`
    url = next((name for usual in URL for name in addresses if name.lower().rpartition(".")[2].replace("-", "_") == usual), None)
    date = next((name for name in DATE_COLUMNS if any(moment(row.get(name)) for row in rows)), None)
    return Found(candidates[0], candidates[0] in html, url, date, tuple(names))


def _head(value: str | bytes) -> str:
    head = value[:4000]
    return head.decode("utf-8", errors="replace") if isinstance(head, bytes) else head


def flat(row: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in row.items():
        if isinstance(value, dict):
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _rows(file: ExternalFile) -> Iterator[dict[str, Any]]:
    kind = FORMATS[suffix(file.name)]
    with file.open() as handle:
        # Lines that are not objects are skipped here; `ingest` reports them.
        yield from (row.fields for row in read_rows(handle, file.location, kind, CELL_BYTES) if isinstance(row, Row))
