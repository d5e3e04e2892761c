"""Parsing of HTML pages. Pages whose cost has no small bound are parsed by a process with limits of time and memory.

A parser's cost grows with products: of elements and open elements, of an element's attributes with themselves, of elements and open
formatting elements (`b`, `font`, …), which each paragraph opens again. A page can mislead any estimate of the open elements. So the counts
are upper bounds, whatever the parser's rules: each `<` counts as a tag, also in comments, scripts and attributes."""

from __future__ import annotations

import re
from codecs import BOM_UTF8
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from puna.kernels.cpu.numba_cache import njit
from puna.models.extraction.clean import plain
from puna.models.extraction.scan import serialize
from puna.models.extraction.tags import find, flags, is_space, tag_name
from puna.models.extraction.technical import HINTS, rewrite_technical
from puna.models.untrusted import bounded_process
from puna.models.untrusted.bounded_process import BYTES, CHARACTERS, LimitError, Process

FORMATTING = flags("a b big code em font i nobr s small strike strong tt u")
OPTIONS = flags("option optgroup")
MAX_TAGS, MAX_ATTRIBUTES = 10_000, 30_000  # about a second for the parser, if each costs time for all others
MAX_BYTES = 1e9  # memory of formatting elements that are opened again at each tag
ELEMENT_BYTES, ATTRIBUTE_BYTES = 250, 200


class Counts(NamedTuple):
    """Upper bounds on a page's numbers of tags, attributes, formatting elements (with their attributes and bytes) and options."""

    tags: int
    attributes: int
    formats: int
    format_attributes: int
    format_bytes: int
    options: int

    def is_cheap(self) -> bool:
        """True if a parser surely takes at most a few seconds and about `MAX_BYTES` of memory for the page, as for nine of ten pages."""
        again = ELEMENT_BYTES * self.formats + ATTRIBUTE_BYTES * self.format_attributes + self.format_bytes
        return self.tags <= MAX_TAGS and self.attributes <= MAX_ATTRIBUTES and self.tags * again <= MAX_BYTES


def counts(html: bytes) -> Counts:
    """Return upper bounds on the counts that a parser reaches with a page."""
    return Counts(*_counts(np.frombuffer(html, np.uint8)))


@njit(cache=True, borrows=True)
def _attributes(html: NDArray[np.uint8], at: int) -> tuple[int, int]:
    """Return the number of attributes of a tag from the end of its name at `at`, and the tag's end, by the rules of the HTML standard."""
    count, size = 0, len(html)
    while at < size and html[at] != 62:
        if is_space(html[at]) or html[at] == 47:
            at += 1
            continue
        count += 1
        at += 1
        while at < size and html[at] != 61 and not is_space(html[at]) and html[at] != 62 and html[at] != 47:
            at += 1
        while at < size and is_space(html[at]):
            at += 1
        if at < size and html[at] == 61:
            at += 1
            while at < size and is_space(html[at]):
                at += 1
            if at < size and (html[at] == 34 or html[at] == 39):
                at = find(html, at + 1, html[at]) + 1
            else:
                while at < size and not is_space(html[at]) and html[at] != 62:
                    at += 1
    return count, min(at + 1, size)


@njit(cache=True, borrows=True)
def _counts(html: NDArray[np.uint8]) -> tuple[int, int, int, int, int, int]:
    size = len(html)
    tags = attributes = formats = format_attributes = format_bytes = options = scanned = at = 0
    while True:
        at = find(html, at, 60) + 1
        if at >= size:
            return tags, attributes, formats, format_attributes, format_bytes, options
        tags += 1
        if 97 <= (html[at] | 32) <= 122:
            tag, _, stop = tag_name(html, at)
            own, end = _attributes(html, stop)
            attributes += own
            scanned += end - at
            options += OPTIONS[tag]
            if FORMATTING[tag]:
                formats += 1
                format_attributes += own
                format_bytes += end - at
            if scanned > 4 * size:  # tags in attributes of tags: each byte may be part of many
                attributes += size
                at = size


FAILURES = (ValueError, RuntimeError)  # errors of the parser, and numbers out of range
SECONDS, MEMORY = 10.0, 2 << 30
MAX_OPTIONS = 2000  # options of selection lists, which hold no text of the page; the parser searches all earlier ones for each
OPTION = re.compile(r"<opt(?:ion|group)\b[^<>]*>[^<]*|</opt(?:ion|group)\s*>", re.IGNORECASE)


class Parsed(NamedTuple):
    """A parsed page for the extraction model: the title, and the DOM tree serialized as HTML."""

    title: str | None
    html: bytes


class ParseError(ValueError):
    """An error: a page cannot be parsed."""


def parse(html: bytes, technical: bool) -> Parsed:
    """Return the title and the tree, serialized as HTML, of a page in UTF-8. `technical`: convert markup of code and formulas first.

    `<option>` elements are removed if there are more than `MAX_OPTIONS`. Raise ParseError if the parser fails; LimitError if it takes more
    than `SECONDS` of CPU time or `MEMORY` bytes, or its output is too large."""
    own = counts(html)
    if own.options > MAX_OPTIONS:
        html = OPTION.sub("", html.decode()).encode()
        own = counts(html)
    return _parse(html, technical) if own.is_cheap() else _parse_apart(html, technical)


def _parse(html: bytes, technical: bool) -> Parsed:
    from resiliparse.parse.html import HTMLParserException, HTMLTree

    try:
        marked = html.startswith(BOM_UTF8)  # a second byte-order mark is text, which the parser would drop from bytes
        tree = HTMLTree.parse(html.decode()) if marked else HTMLTree.parse_from_bytes(html, "utf-8")
        title = tree.title or ""
        title = (title if title.isascii() and title.isprintable() else plain(title)).strip()
        if technical and HINTS.any_in(html):
            rewrite_technical(tree, len(html.decode()))
        result = serialize(tree)
    except (HTMLParserException, *FAILURES) as error:
        raise ParseError(f"{type(error).__name__}: {error}") from error
    if len(result) > CHARACTERS:
        raise LimitError(f"it writes more than {CHARACTERS >> 20} MB")
    return Parsed(title or None, result)


def _parse_apart(html: bytes, technical: bool) -> Parsed:
    answer = _process.ask((html, technical), b"", None, seconds=SECONDS)
    if (error := answer.get("error")) is not None:
        raise ParseError(error)
    return Parsed(answer["title"], answer.get(BYTES, b""))


_process = Process(__name__, own=True)


def serve() -> None:
    """Answer the requests of `_parse_apart`."""

    def answer(key: bytes, context: Any, request: Any) -> dict[str, Any]:
        try:
            title, html = _parse(*request)
        except ParseError as error:
            return {"error": str(error)}
        except LimitError as error:
            return {"limit": str(error)}
        except MemoryError:
            return {"limit": f"it takes more than {MEMORY >> 20} MB"}
        return {"title": title, BYTES: html}

    bounded_process.bound_memory(MEMORY)
    bounded_process.serve(answer, own=True)
