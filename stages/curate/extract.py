"""`extract`: extraction of each page's text and title."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import pyarrow as pa
from pydantic import Field

from puna.models.extraction.clean import MISREAD, WIDE_MARKS, clean_text, clean_texts, decode, plain, utf8
from puna.models.extraction.model import content, load
from puna.models.extraction.page_data import page_of_data
from puna.models.extraction.parse import FAILURES, Parsed, ParseError, parse
from puna.models.extraction.scan import read_pages
from puna.models.extraction.write import texts_of
from puna.models.untrusted.bounded_process import LimitError
from puna.stages.contract import MACHINE_ERRORS, Pages, StageConfig, StageRun, stage
from puna.storage.schemas import table_schema

HTML_TYPES = ("text/html", "application/xhtml+xml")
TOGETHER = 1 << 18  # maximum bytes of pages that the model reads in one batch
FEW, TIMES = 300, 5  # pages with fewer bytes of text have that of their JSON, if it is `TIMES` as long
DEEP = "the elements are nested too deeply"
# Titles stand between blank lines, which distinguishes them from comments in code.
TITLE = re.compile(r"(?:^|(?<=\n\n))#{1,6} +(?=\S[^\n]*(?:\n\n|\n*$))")
BOLD = re.compile(r"(?<![\w*])(\*{2,3})(?=[^\s*])([^*\n]*[^\s*])\1(?![\w*])")


class ExtractConfig(StageConfig):
    headline: bool = Field(False, description="Keep the page's main heading (h1) in the text, not only in the title")
    code_and_maths: bool = Field(True, description="First convert markup of code and formulas: code tables to code blocks, MathML to TeX")
    strip_markdown: bool = Field(False, description="Remove Markdown marks (**bold**, # titles) that a page spells out as text")
    max_body_bytes: int = Field(8 << 20, ge=1024, description="Maximum size of an HTML page in bytes; larger pages are dropped")
    max_depth: int = Field(1000, ge=16, le=10_000, description="Maximum depth of nested elements")
    max_elements: int = Field(500_000, ge=1000, le=10_000_000, description="Maximum number of elements on a page, including reopened ones")
    max_blocks: int = Field(30_000, ge=1000, le=1_000_000, description="Maximum number of text blocks (paragraphs, cells, lines)")
    max_replacement_fraction: float = Field(0.01, ge=0, le=1, description="Maximum fraction of undecodable characters in an extracted text")


class Unreadable(Exception):
    """An error for a page without usable text: the rule, the reason, and the measured value with its bound."""

    def __init__(self, rule: str, detail: str, value: float | None = None, threshold: float | None = None) -> None:
        super().__init__(detail)
        self.rule, self.detail, self.value, self.threshold = rule, detail, value, threshold


class PageText(NamedTuple):
    """The title and the text of a page."""

    title: str | None
    text: str


class _Found(NamedTuple):
    """The title of a page, and the page's text in UTF-8."""

    title: str | None
    text: bytes


@stage(kind="documents", filters="pages")
def extract(pages: Pages, config: ExtractConfig, run: StageRun) -> None:
    """Turn pages into documents: the main content of HTML pages; plain text and code unchanged.

    Code, lists and tables keep their structure. Formulas are read from MathML, scripts and alternative texts of images
    (`puna.models.extraction.technical`). If the HTML has almost no text, that of JSON in the page is taken (JSON-LD, Discourse, Next:
    `puna.models.extraction.page_data`). Permalink marks and Markdown-like markers are left out. Unreadable pages, pages without text and
    pages above a limit are in `dropped`."""
    run.transform(_extract, pages, config)


def _extract(pages: pa.Table, config: ExtractConfig) -> dict[str, pa.Table]:
    indices: list[int] = []
    titles: list[str | None] = []
    texts: list[bytes] = []
    dropped: list[dict[str, Any]] = []
    media, charsets = (pages.column(name).to_pylist() for name in ("content_type", "charset"))
    names = zip(*(pages.column(name).to_pylist() for name in ("id", "url")), strict=True)
    extracted = _extract_pages(pages.column("body"), media, charsets, config)
    for index, (results, (identity, url)) in enumerate(zip(extracted, names, strict=True)):
        if isinstance(results, Unreadable):
            why = {"rule": results.rule, "value": results.value, "threshold": results.threshold, "detail": f"{url}: {results.detail}"}
            dropped.append({"id": identity, **why})
        elif isinstance(results, MACHINE_ERRORS):  # avoids a parser process and loading the model
            raise results
        elif isinstance(results, Exception):
            dropped.append({"id": identity, "rule": "extract_failed", "detail": f"{url}: {type(results).__name__}: {results}"})
        else:
            indices.append(index)
            titles.append(results.title)
            texts.append(results.text)
    documents = pages.select(["id", "url", "fetched_at", "source"]).take(pa.array(indices, pa.int64()))
    documents = documents.append_column("title", pa.array(titles, pa.string())).append_column("text", pa.array(texts, pa.string()))
    return {"documents": documents, "dropped": pa.Table.from_pylist(dropped, schema=table_schema("dropped").schema)}


def page_text(body: bytes, media: str, charset: str | None, config: ExtractConfig) -> PageText:
    """Return the title and text of one page. Raise Unreadable if it has no text or exceeds a limit; other errors are not caught."""
    (results,) = _extract_pages(pa.array([body], pa.binary()), [media], [charset], config)
    if isinstance(results, Exception):
        raise results
    return PageText(results.title, results.text.decode())


def _extract_pages(
    bodies: pa.Array | pa.ChunkedArray, types: Sequence[str], charsets: Sequence[str | None], config: ExtractConfig
) -> list[_Found | Exception]:
    """Return the extraction or the error of each page (body, media type, character set), in order. HTML pages are parsed one by one and
    given to the model in batches of up to `TOGETHER` bytes."""
    results: dict[int, _Found | Exception] = {}
    waiting: dict[int, Parsed] = {}
    size = 0
    for number, (scalar, media, charset) in enumerate(zip(bodies, types, charsets, strict=True)):
        try:
            body = scalar.as_py()
            tables = _of_html(body, charset, config) if media in HTML_TYPES else _of_text(body, media, charset, config)
        except Exception as error:  # noqa: BLE001 - the error is the page's result
            results[number] = error
            continue
        if isinstance(tables, _Found):
            results[number] = tables
            continue
        if size + len(tables.html) > TOGETHER:
            results |= _read(waiting, config)
            waiting, size = {}, 0
        waiting[number], size = tables, size + len(tables.html)
    results |= _read(waiting, config)
    for number, result in results.items():
        if types[number] in HTML_TYPES and _size(result) < FEW and (found := _of_data(bodies[number].as_py(), charsets[number], config)):
            results[number] = found if _size(found) >= TIMES * _size(result) else result
    return [results[number] for number in range(len(results))]


def _size(result: _Found | Exception) -> int:
    """Return the number of bytes of a page's text. A page that was dropped for another reason than lack of text has `FEW`."""
    if isinstance(result, _Found):
        return len(result.text)
    return 0 if isinstance(result, Unreadable) and result.rule == "extract_empty" else FEW


def _of_data(body: bytes, charset: str | None, config: ExtractConfig) -> _Found | None:
    """Return the text of a page's JSON; None if it has none that can be read."""
    if (page := page_of_data(utf8(body, charset).decode())) is None:
        return None
    try:
        parsed = _of_html(page.encode("utf-8", "replace"), "utf-8", config)
    except Unreadable:
        return None
    found = _read({0: parsed}, config)[0]
    return found if isinstance(found, _Found) else None


def _read(pages: dict[int, Parsed], config: ExtractConfig) -> dict[int, _Found | Exception]:
    """Return page number → extraction. If the model fails on the whole batch, pages are read one by one."""
    try:
        return dict(zip(pages, _by_model(list(pages.values()), config), strict=True)) if pages else {}
    except Exception as error:  # noqa: BLE001 - the error is the pages' result
        if len(pages) > 1:
            return {number: tables for number, page in pages.items() for tables in _read({number: page}, config).values()}
        failed = Unreadable("extract_failed", f"{type(error).__name__}: {error}") if isinstance(error, FAILURES) else error
        return dict.fromkeys(pages, failed)


def _of_text(body: bytes, media: str, charset: str | None, config: ExtractConfig) -> _Found:
    if not media.startswith("text/"):
        raise Unreadable("extract_content_type", f"the media type {media} is not supported")
    wide = body.startswith(WIDE_MARKS) or (charset or "").startswith("utf-16")
    if not wide:
        _check_bound("extract_binary", "the file is not text", body.count(0), len(body) // 1000)
    text = re.sub("\r\n|[\r\v\f]", "\n", decode(body, charset, html=False))
    found = _readable(plain(text), config)
    return _Found(None, _without_marks(found) if config.strip_markdown and media in ("text/plain", "text/markdown") else found)


def _without_marks(text: bytes) -> bytes:
    return BOLD.sub(r"\2", TITLE.sub("", text.decode())).encode()


def _readable(text: str, config: ExtractConfig) -> bytes:
    if not text.strip():
        raise Unreadable("extract_empty", "the page has no text")
    _check_bound("extract_encoding", "the text cannot be decoded", text.count("\ufffd") / len(text), config.max_replacement_fraction)
    return text.encode()


def _of_html(body: bytes, charset: str | None, config: ExtractConfig) -> Parsed:
    """Parse a page for the model. Raise Unreadable if the page is too large, or if parsing fails or takes too long."""
    _check_bound("extract_too_large", "the page is too large", len(body), config.max_body_bytes)
    try:
        parsed = parse(utf8(body, charset), config.code_and_maths)
    except ParseError as error:
        raise Unreadable("extract_failed", str(error)) from error
    except LimitError as error:
        raise Unreadable("extract_too_costly", f"the parser was stopped: {error}") from error
    if len(parsed.html) > 3 * config.max_elements:  # an element takes at least three bytes
        elements = parsed.html.count(b"<") - parsed.html.count(b"</")
        _check_bound("extract_too_many_elements", "the page has too many elements", elements, config.max_elements)
    return parsed


def _by_model(parsed: list[Parsed], config: ExtractConfig) -> list[_Found | Exception]:
    pages, measures = read_pages([page.html for page in parsed], config.max_depth, config.max_blocks)
    keep = content(pages, load(), config.headline)
    raw, ends = texts_of(pages, keep)
    texts, places, doubts = clean_texts(raw, ends)
    result: list[_Found | Exception] = []
    for number, (depth, blocks) in enumerate(measures.tolist()):
        try:
            _check_bound("extract_too_deep", DEEP, depth, config.max_depth)
            _check_bound("extract_too_many_blocks", "the page has too many blocks of text", blocks, config.max_blocks)
            text = texts[places[number] : places[number + 1]].tobytes()
            if doubts[number] & MISREAD:
                text = clean_text(raw[ends[number] : ends[number + 1]].tobytes().decode("utf-8", "replace")).encode()
            if doubts[number]:
                text = _readable(text.decode("utf-8", "replace"), config)
            result.append(_Found(parsed[number].title, _without_marks(text) if config.strip_markdown else text))
        except Unreadable as why:
            result.append(why)
    return result


def _check_bound(rule: str, detail: str, value: float, most: float) -> None:
    if value > most:
        raise Unreadable(rule, detail, float(value), float(most))
