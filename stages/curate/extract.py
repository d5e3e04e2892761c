"""`extract`: the text and title of each page."""

from __future__ import annotations

import re
from typing import Any, Literal, NamedTuple

import pyarrow as pa
from pydantic import Field

from puna.stages.contract import Pages, StageConfig, StageRun, stage
from puna.stages.curate.extraction.bounds import Burden, burden
from puna.stages.curate.extraction.decode import WIDE_MARKS, decode
from puna.stages.curate.extraction.layout import DEPTH
from puna.stages.curate.extraction.library import library_text
from puna.stages.curate.extraction.model import content, load
from puna.stages.curate.extraction.repair import repaired
from puna.stages.curate.extraction.scan import read_page
from puna.stages.curate.extraction.technical import hinted, prepared
from puna.stages.curate.extraction.text import text_of
from puna.stages.curate.extraction.union import Origin, united
from puna.stages.curate.extraction.whole import with_headline
from puna.storage.schemas import table_schema

HTML_TYPES = ("text/html", "application/xhtml+xml")
CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f\u00ad\u200b\u2060\ufeff\ufffe\uffff]")
SPACES = " \t\u00a0"
LINE_END_SPACE = re.compile(r"(?<![ \t\u00a0])[ \t\u00a0]+$", re.MULTILINE)  # linear: only the first of a run is tried
BLANK_LINES = re.compile(r"\n{3,}")
MAX_ATTRIBUTES = 5000  # of one tag, or of many that cost as much; the parser compares each with all
MAX_OPTIONS = 2000  # of a page; the parser looks for each through all before it
OPTION = re.compile(r"<opt(?:ion|group)\b[^<>]*>[^<]*|</opt(?:ion|group)\s*>", re.IGNORECASE)


class ExtractConfig(StageConfig):
    """Who finds the main content of HTML, and the bounds of extraction."""

    extractor: Literal["model", "resiliparse", "union"] = Field(
        "model",
        description="Main content by the model that comes with Puna, by Resiliparse's rules, or all that either of them takes; "
        "union writes which words came from where into `scores`",
    )
    headline: bool = Field(
        False, description="Whether the model's texts and unions have the page's main heading (h1), which is left to the title otherwise"
    )
    code_and_maths: bool = Field(
        True,
        description="Whether the markup of code and formulas is read before the main content is looked for: numbers of lines go, "
        "lines of code in tables and formulas on lines of their own become blocks of code, MathML becomes TeX",
    )
    max_body_bytes: int = Field(8 << 20, ge=1024, description="Larger HTML pages are dropped, bytes")
    max_depth: int = Field(
        1000, ge=16, le=10_000, description="Pages with deeper nested elements are dropped: parsing takes quadratic time in them"
    )
    max_elements: int = Field(
        500_000,
        ge=1000,
        le=10_000_000,
        description="Pages with more elements, those that unclosed formatting opens again included, are dropped",
    )
    max_blocks: int = Field(
        30_000,
        ge=1000,
        le=1_000_000,
        description="Pages with more blocks of text (paragraphs, cells, lines) are dropped by the model: a second each",
    )
    fallback_fraction: float = Field(
        0.1,
        ge=0,
        le=1,
        description="Where Resiliparse's main content is a smaller share of the page's whole text, the whole text is taken",
    )
    max_replacement_fraction: float = Field(
        0.01, ge=0, le=1, description="Texts with a larger share of undecodable characters are dropped, fraction of characters"
    )


class Unreadable(Exception):
    """Why a page gives no text: a rule, the measured value and its bound."""

    def __init__(self, rule: str, detail: str, value: float | None = None, threshold: float | None = None) -> None:
        super().__init__(detail)
        self.rule, self.detail, self.value, self.threshold = rule, detail, value, threshold


class PageText(NamedTuple):
    """Title and text of a page; `origin`: who took how many words, where two extractors did."""

    title: str | None
    text: str
    origin: Origin | None = None


@stage(kind="documents", filters="pages")
def extract(pages: Pages, config: ExtractConfig, run: StageRun) -> None:
    """Turn pages into documents: the main content of HTML, plain text and code as they are.

    Structure of code, lists and tables is kept, maths in images' alternative texts, MathML and scripts too
    (`puna.stages.curate.extraction.technical`); permalink marks and Markdown-like markers are not written.
    """
    run.transform(_extract, pages, config)


def _extract(pages: pa.Table, config: ExtractConfig) -> dict[str, pa.Table]:
    """Documents and dropped rows of a part of `pages`."""
    kept: list[int] = []
    titles: list[str | None] = []
    texts: list[str] = []
    dropped: list[dict[str, Any]] = []
    scores: list[dict[str, Any]] = []
    columns = [pages.column(name).to_pylist() for name in ("id", "url", "content_type", "charset", "body")]
    for index, (identity, url, media, charset, body) in enumerate(zip(*columns, strict=True)):
        try:
            title, text, origin = page_text(body, media, charset, config)
        except Unreadable as why:
            row = {"id": identity, "rule": why.rule, "value": why.value, "threshold": why.threshold, "detail": f"{url}: {why.detail}"}
            dropped.append(row)
            continue
        except Exception as error:  # noqa: BLE001 - one page may fail in any way, and the others go on
            dropped.append({"id": identity, "rule": "extract_failed", "detail": f"{url}: {type(error).__name__}: {error}"})
            continue
        kept.append(index)
        titles.append(title)
        texts.append(text)
        if origin is not None:
            scores += [{"id": identity, "name": f"words_{name}", "value": float(value)} for name, value in origin._asdict().items()]
    documents = pages.select(["id", "url", "fetched_at", "source"]).take(pa.array(kept, pa.int64()))
    documents = documents.append_column("title", pa.array(titles, pa.string())).append_column("text", pa.array(texts, pa.string()))
    made = {"documents": documents, "dropped": pa.Table.from_pylist(dropped, schema=table_schema("dropped").schema)}
    if scores:
        made["scores"] = pa.Table.from_pylist(scores, schema=table_schema("scores").schema)
    return made


def page_text(body: bytes, media: str, charset: str | None, config: ExtractConfig) -> PageText:
    """Title and text of one page; raises Unreadable."""
    title: str | None = None
    origin: Origin | None = None
    if media in HTML_TYPES:
        if len(body) > config.max_body_bytes:
            raise Unreadable("extract_too_large", "the page is too large", float(len(body)), float(config.max_body_bytes))
        title, text, origin = html_text(decode(body, charset, html=True), config)
        text = _without_trailing_space(CONTROLS.sub("", repaired(text)))
    elif media.startswith("text/"):
        wide = body.startswith(WIDE_MARKS) or (charset or "").startswith("utf-16")
        if not wide and body.count(0) > len(body) // 1000:
            raise Unreadable("extract_binary", "the file is not text", float(body.count(0)), float(len(body) // 1000))
        text = decode(body, charset, html=False)
        text = CONTROLS.sub("", repaired(text).replace("\r\n", "\n").replace("\r", "\n"))
    else:
        raise Unreadable("extract_content_type", f"no text is known in {media}")
    if not text.strip():
        raise Unreadable("extract_empty", "there is no text")
    bad = text.count("\ufffd") / len(text)
    if bad > config.max_replacement_fraction:
        raise Unreadable("extract_encoding", "the text cannot be decoded", bad, config.max_replacement_fraction)
    return PageText(title, text, origin)


def _without_trailing_space(text: str) -> str:
    """The text without white space at the ends of lines and without more than one blank line; plain searches spare most texts a pattern."""
    if any(space + "\n" in text or text.endswith(space) for space in SPACES):
        text = LINE_END_SPACE.sub("", text)
    return (BLANK_LINES.sub("\n\n", text) if "\n\n\n" in text else text).strip("\n")


def html_text(html: str, config: ExtractConfig) -> PageText:
    """Title and main text of an HTML page; raises Unreadable where the page is built to hang a parser."""
    from resiliparse.parse.html import HTMLParserException, HTMLTree

    encoded = html.encode("utf-8", "replace")
    if _check_burden(encoded, config).options > MAX_OPTIONS:
        html = OPTION.sub("", html)
    try:
        tree = HTMLTree.parse(html)
        title = CONTROLS.sub("", repaired(tree.title or "")).strip() or None
        if config.code_and_maths and hinted(encoded):
            html = prepared(tree, html)
        if config.extractor == "resiliparse":
            return PageText(title, library_text(html, config.fallback_fraction))
        page = read_page(tree)
        depth = int(page.elements[:, DEPTH].max())
        if depth > config.max_depth:
            raise Unreadable("extract_too_deep", "the elements are nested too deep", float(depth), float(config.max_depth))
        if len(page.blocks) > config.max_blocks:
            raise Unreadable(
                "extract_too_many_blocks", "the page has too many blocks of text", float(len(page.blocks)), float(config.max_blocks)
            )
        keep = content(page, load())
        if config.headline:
            keep = with_headline(page, keep)
        if config.extractor == "model":
            return PageText(title, text_of(page, keep))
        keep, origin = united(page, keep, library_text(html, config.fallback_fraction))
        return PageText(title, text_of(page, keep), origin)
    except (HTMLParserException, ValueError, RuntimeError) as error:
        raise Unreadable("extract_failed", f"{type(error).__name__}: {error}") from error


def _check_burden(html: bytes, config: ExtractConfig) -> Burden:
    """Refuse a page that would take a parser too much time or memory."""
    found = burden(html)
    tags, depth, attributes, copies, _ = found
    if depth > config.max_depth:
        raise Unreadable("extract_too_deep", "the elements are nested too deep", float(depth), float(config.max_depth))
    if tags + copies > config.max_elements:
        raise Unreadable("extract_too_many_elements", "the page has too many elements", float(tags + copies), float(config.max_elements))
    if attributes > MAX_ATTRIBUTES:
        raise Unreadable("extract_too_many_attributes", "tags have too many attributes", float(attributes), float(MAX_ATTRIBUTES))
    return found
