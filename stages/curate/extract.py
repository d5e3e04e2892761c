"""`extract`: the text and title of each page."""

from __future__ import annotations

import codecs
import re
from typing import Any

import pyarrow as pa
from pydantic import Field

from puna.stages.contract import Pages, StageConfig, StageRun, stage
from puna.storage.schemas import table_schema

HTML_TYPES = ("text/html", "application/xhtml+xml")
# Elements that a parser closes by itself, or that hold nothing: an open tag of these does not nest for ever.
SELF_CLOSING = (
    "a|area|base|body|br|button|col|colgroup|dd|dt|embed|head|hr|html|img|input|li|link|meta|nobr|optgroup|option|p|param|rp|rt|"
    "source|tbody|td|tfoot|th|thead|tr|track|wbr"
)
TAG = re.compile(rb"<(/?)(?!(?:" + SELF_CLOSING.encode() + rb")[\s/>])[a-z][^\s/>]*", re.IGNORECASE)
OPAQUE = re.compile(rb"<(script|style|textarea|title)\b.*?</\1|<!--.*?-->", re.IGNORECASE | re.DOTALL)
MATHS = 'img[class*="math"], img[class*="tex"], script[type^="math/tex"]'
PERMALINKS = (".headerlink", ".mw-editsection", "a.anchor")
CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f\u00ad\u200b\u2060\ufeff\ufffe\uffff]")
LINE_END_SPACE = re.compile(r"[ \t\u00a0]+$", re.MULTILINE)
BLANK_LINES = re.compile(r"\n{3,}")
BOMS = ((codecs.BOM_UTF8, "utf-8"), (codecs.BOM_UTF16_LE, "utf-16-le"), (codecs.BOM_UTF16_BE, "utf-16-be"))


class ExtractConfig(StageConfig):
    """Bounds of extraction, and when to distrust the main-content heuristic."""

    max_body_bytes: int = Field(8 << 20, ge=1024, description="Larger HTML pages are dropped, bytes")
    max_depth: int = Field(
        1000, ge=16, le=100_000, description="Pages with deeper nested elements are dropped: extraction takes quadratic time in them"
    )
    fallback_fraction: float = Field(
        0.1,
        ge=0,
        le=1,
        description="Where the main content is a smaller share of the page's whole text, the whole text is taken",
    )
    max_replacement_fraction: float = Field(
        0.01, ge=0, le=1, description="Texts with a larger share of undecodable characters are dropped, fraction of characters"
    )


class Unreadable(Exception):
    """Why a page gives no text: a rule, the measured value and its bound."""

    def __init__(self, rule: str, detail: str, value: float | None = None, threshold: float | None = None) -> None:
        super().__init__(detail)
        self.rule, self.detail, self.value, self.threshold = rule, detail, value, threshold


@stage(kind="documents", filters="pages")
def extract(pages: Pages, config: ExtractConfig, run: StageRun) -> None:
    """Turn pages into documents: the main content of HTML (Resiliparse, no language-specific rule), plain text and code as they are.

    Structure of code and tables is kept, maths in images' alternative texts and in scripts too; permalink marks go.
    """
    run.transform(_extract, pages, config)


def _extract(pages: pa.Table, config: ExtractConfig) -> dict[str, pa.Table]:
    """Documents and dropped rows of a part of `pages`."""
    kept: list[int] = []
    titles: list[str | None] = []
    texts: list[str] = []
    dropped: list[dict[str, Any]] = []
    columns = [pages.column(name).to_pylist() for name in ("id", "url", "content_type", "charset", "body")]
    for index, (identity, url, media, charset, body) in enumerate(zip(*columns, strict=True)):
        try:
            title, text = page_text(body, media, charset, config)
        except Unreadable as why:
            row = {"id": identity, "rule": why.rule, "value": why.value, "threshold": why.threshold, "detail": f"{url}: {why.detail}"}
            dropped.append(row)
            continue
        kept.append(index)
        titles.append(title)
        texts.append(text)
    documents = pages.select(["id", "url", "fetched_at", "source"]).take(pa.array(kept, pa.int64()))
    documents = documents.append_column("title", pa.array(titles, pa.string())).append_column("text", pa.array(texts, pa.string()))
    return {"documents": documents, "dropped": pa.Table.from_pylist(dropped, schema=table_schema("dropped").schema)}


def page_text(body: bytes, media: str, charset: str | None, config: ExtractConfig) -> tuple[str | None, str]:
    """Title and text of one page; raises Unreadable."""
    if media in HTML_TYPES:
        if len(body) > config.max_body_bytes:
            raise Unreadable("extract_too_large", "the page is too large", float(len(body)), float(config.max_body_bytes))
        depth = nesting(body, config.max_depth)
        if depth > config.max_depth:
            raise Unreadable("extract_too_deep", "the elements are nested too deep", float(depth), float(config.max_depth))
        title, text = html_text(decode(body, charset, html=True), config.fallback_fraction)
        text = BLANK_LINES.sub("\n\n", LINE_END_SPACE.sub("", CONTROLS.sub("", text))).strip("\n")
    elif media.startswith("text/"):
        wide = body.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) or (charset or "").startswith("utf-16")
        if not wide and body.count(0) > len(body) // 1000:
            raise Unreadable("extract_binary", "the file is not text", float(body.count(0)), float(len(body) // 1000))
        title, text = None, decode(body, charset, html=False)
        text = CONTROLS.sub("", text.replace("\r\n", "\n").replace("\r", "\n"))
    else:
        raise Unreadable("extract_content_type", f"no text is known in {media}")
    if not text.strip():
        raise Unreadable("extract_empty", "there is no text")
    bad = text.count("\ufffd") / len(text)
    if bad > config.max_replacement_fraction:
        raise Unreadable("extract_encoding", "the text cannot be decoded", bad, config.max_replacement_fraction)
    return title, text


def html_text(html: str, fallback_fraction: float) -> tuple[str | None, str]:
    """Title and main text of a page; its whole text where the main content is too small a share of it.

    The share is taken because the heuristic sometimes keeps a teaser and loses the page; a threshold of 0.1 gave
    the best mean F1 of 0.05, 0.1, 0.2 and 0.3 on pages of seven types.
    """
    from resiliparse.extract.html2text import extract_plain_text
    from resiliparse.parse.html import HTMLParserException, HTMLTree

    try:
        tree = HTMLTree.parse(html)
        if "math" in html or "tex" in html:
            _keep_maths(tree)
        title = CONTROLS.sub("", tree.title or "").strip() or None
        options: dict[str, Any] = {"preserve_formatting": True, "alt_texts": False, "list_bullets": True, "skip_elements": list(PERMALINKS)}
        text: str = extract_plain_text(tree, main_content=True, comments=True, **options)
        if len(text) < fallback_fraction * len(html):
            whole: str = extract_plain_text(tree, main_content=False, **options)
            if len(text) < fallback_fraction * len(whole):
                text = whole
    except (HTMLParserException, ValueError, RuntimeError) as error:
        raise Unreadable("extract_failed", f"{type(error).__name__}: {error}") from error
    return title, text


def _keep_maths(tree: Any) -> None:
    """Put formulas that stand in an image's alternative text or in a script into the text itself."""
    for element in tree.document.query_selector_all(MATHS):
        formula = element.getattr("alt") if element.tag == "img" else element.text
        if formula and formula.strip() and element.parent is not None:
            element.parent.replace_child(tree.create_text_node(f" {formula.strip()} "), element)


def nesting(body: bytes, limit: int) -> int:
    """How deep the elements of a page nest, at most: cheap, and right enough to refuse a page built to hang a parser."""
    if body.count(b"<") <= limit:
        return 0
    depth = deepest = 0
    for match in TAG.finditer(OPAQUE.sub(b"", body)):
        if match[1]:
            depth -= depth > 0
        else:
            depth += 1
            deepest = max(deepest, depth)
    return deepest


def decode(body: bytes, charset: str | None, html: bool) -> str:
    """The page's characters.

    A byte order mark decides; then bytes that are valid UTF-8 beyond ASCII are UTF-8 whatever the server says (other
    encodings give that by chance almost never); then the server's character set, the page's own, and detection.
    """
    from resiliparse.parse.encoding import bytes_to_str, detect_encoding, map_encoding_to_html5

    for mark, name in BOMS:
        if body.startswith(mark):
            return body[len(mark) :].decode(name, "replace")
    given = map_encoding_to_html5(charset, fallback_utf8=False) if charset else None
    if given in ("utf-16-le", "utf-16-be", "iso2022_jp"):
        return bytes_to_str(body, given, errors="replace")
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError:
        text = None
    if text is not None and not (text.isascii() and b"\x1b$" in body):
        return text
    encoding = given if given and given != "utf-8" else detect_encoding(body, from_html_meta=html)
    return bytes_to_str(body, encoding or "utf-8", errors="replace")
