"""The text of pages that have it only as JSON for their scripts: JSON-LD, Discourse's `data-preloaded`, Next's data."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from html import escape, unescape
from typing import Any

SCRIPT = re.compile(r"<script\b[^<>]*>", re.IGNORECASE)
DATA = re.compile(r"application/(?:ld\+)?json|__NEXT_DATA__", re.IGNORECASE)
PRELOADED = re.compile(r'\bdata-preloaded="([^"]*)"')
NAMES = "[abipu]|blockquote|br|code|div|em|figure|h[1-6r]|iframe|img|[ou]l|li|pre|section|span|strong|su[bp]|table|t[dhr]"
TAG = re.compile(rf"</?(?:{NAMES})(?:[\s/][^<>]*)?>")
TITLE = re.compile(r"<title[^<>]*>[^<>]*</title>", re.IGNORECASE)
KEYS = frozenset({"articleBody", "body", "content", "cooked", "html", "text"})
"""Keys of strings that may belong to the main text. `cooked`: a Discourse post."""
SHORT, LEAST = 20, 200  # minimum characters of a string, to tell it from labels, and of all strings together


def page_of_data(html: str) -> str | None:
    """Return an HTML page made of the texts in a page's JSON, in order and each once; None if they have fewer than `LEAST` characters."""
    texts = dict.fromkeys(text for block in _blocks(html) for text in _texts(block))
    if sum(map(len, texts)) < LEAST:
        return None
    title = TITLE.search(html)
    return f"{title[0] if title else ''}<body><article>{''.join(map(_markup, texts))}</article>"


def _blocks(html: str) -> Iterator[Any]:
    end = 0
    while (found := SCRIPT.search(html, end)) and (end := html.find("</script", found.end())) >= 0:
        if DATA.search(found[0]):
            yield _parsed(html[found.end() : end])
    for found in PRELOADED.finditer(html):
        yield _parsed(unescape(found[1]))


def _parsed(text: str) -> Any:
    """Return a parsed JSON text, or None."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _texts(value: Any) -> Iterator[str]:
    """Yield strings of at least `SHORT` characters under `KEYS`, also in strings that are JSON themselves."""
    stack = [("", value)]
    while stack:
        key, value = stack.pop()
        if isinstance(value, dict):
            stack += reversed(value.items())
        elif isinstance(value, list):
            text = _paragraph(value, key)
            stack += [("text", text)] if text else [(key, each) for each in reversed(value)]
        elif isinstance(value, str) and value[:1] in ("{", "[") and (parsed := _parsed(value)) is not None:
            stack.append((key, parsed))
        elif isinstance(value, str) and key in KEYS and len(value) >= SHORT:
            yield value


def _paragraph(nodes: list[Any], key: str) -> str:
    """Return the text of the list `key` if its items are parts of a paragraph (Slate's `children`, ProseMirror's nodes of type `text`)."""
    texts, stack = [], [node for node in reversed(nodes) if isinstance(node, dict)]
    if any(isinstance(node.get("text"), str) and (key == "children" or node.get("type") == "text") for node in stack):
        while stack:
            node = stack.pop()
            inside = node.get("children") or node.get("content") or []
            stack += [each for each in reversed(inside) if isinstance(each, dict)] if isinstance(inside, list) else []
            texts += [node["text"]] if isinstance(node.get("text"), str) else []
    return "".join(texts)


def _markup(text: str) -> str:
    lines = [] if TAG.search(text) else [line for line in text.splitlines() if line.strip()]
    return "".join(f"<p>{escape(unescape(line))}</p>" for line in lines) or f"<div>{text}</div>"
