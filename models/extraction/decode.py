"""The characters of a page."""

from __future__ import annotations

import codecs
import functools

BOMS = (
    (codecs.BOM_UTF8, "utf-8"), (codecs.BOM_UTF32_LE, "utf-32-le"), (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF16_LE, "utf-16-le"), (codecs.BOM_UTF16_BE, "utf-16-be"),
)  # fmt: skip
WIDE_MARKS = tuple(mark for mark, name in BOMS if name != "utf-8")
BEGINNINGS = {b"<\0": "utf-16-le", b"\0<": "utf-16-be"}
"""How HTML begins in characters of two bytes without a mark."""


def utf8(body: bytes, charset: str | None) -> bytes:
    """Return the characters of an HTML page in UTF-8, see `decode`."""
    text, same = _decoded(body, charset, html=True)
    return body if same else text.encode("utf-8", "replace")


def decode(body: bytes, charset: str | None, html: bool) -> str:
    """Return the page's characters.

    A byte order mark decides; then bytes that are valid UTF-8 beyond ASCII are UTF-8 whatever the server says (other
    encodings give that by chance almost never); then the server's character set, the page's own, and detection.
    """
    return _decoded(body, charset, html)[0]


def _decoded(body: bytes, charset: str | None, html: bool) -> tuple[str, bool]:
    """Return the page's characters, and whether the body is these in UTF-8."""
    from resiliparse.parse.encoding import bytes_to_str, detect_encoding

    for mark, name in BOMS:
        if body.startswith(mark):
            return body[len(mark) :].decode(name, "replace"), False
    declared = _known(charset) if charset else None
    wide = BEGINNINGS.get(body[:2]) if html else None
    if declared in ("utf-16-le", "utf-16-be") and b"\0" not in body:  # no line end and no tag: the server is wrong
        declared = None
    if declared in ("utf-16-le", "utf-16-be", "iso2022_jp"):
        wide = wide or declared
    if wide:
        return bytes_to_str(body, wide, errors="replace"), False
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError:
        text = None
    if text is not None and not (text.isascii() and b"\x1b$" in body):
        return text, True
    encoding = declared if declared and declared != "utf-8" else detect_encoding(body, from_html_meta=html)
    return bytes_to_str(body, encoding or "utf-8", errors="replace"), False


@functools.lru_cache(maxsize=1000)
def _known(charset: str) -> str | None:
    """Return the encoding that browsers take for a name."""
    from resiliparse.parse.encoding import map_encoding_to_html5

    return map_encoding_to_html5(charset, fallback_utf8=False)
