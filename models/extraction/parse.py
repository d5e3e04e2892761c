"""Parsing of HTML pages. Pages whose cost has no small bound are parsed by a process with limits of time and memory."""

from __future__ import annotations

import re
from codecs import BOM_UTF8
from typing import Any, NamedTuple

from puna.models.extraction.bounds import counts
from puna.models.extraction.clean import plain
from puna.models.extraction.scan import serialise
from puna.models.extraction.technical import HINTS, rewrite_technical
from puna.models.untrusted import bounded_process
from puna.models.untrusted.bounded_process import BYTES, CHARACTERS, LimitError, Process

FAILURES = (ValueError, RuntimeError)  # errors of the parser, and numbers out of range
SECONDS, MEMORY = 10.0, 2 << 30
MAX_OPTIONS = 2000
"""Maximum options of selection lists in a page: the parser searches all earlier options for each. They hold no text of the page."""
OPTION = re.compile(r"<opt(?:ion|group)\b[^<>]*>[^<]*|</opt(?:ion|group)\s*>", re.IGNORECASE)


class Parsed(NamedTuple):
    """A parsed page for the extraction model: the title, and the DOM tree serialised as HTML."""

    title: str | None
    html: bytes


class ParseError(ValueError):
    """An error: a page cannot be parsed."""


def parse(html: bytes, technical: bool) -> Parsed:
    """Return the title and the tree, serialised as HTML, of a page in UTF-8. `technical`: convert markup of code and formulas first.

    `<option>` elements are removed if there are more than `MAX_OPTIONS`. Raise ParseError if the parser fails; LimitError if it takes more
    than `SECONDS` of CPU time or `MEMORY` bytes, or its output is too large.
    """
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
        result = serialise(tree)
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
