"""The characters of a page."""

from __future__ import annotations

import codecs

BOMS = (
    (codecs.BOM_UTF8, "utf-8"), (codecs.BOM_UTF32_LE, "utf-32-le"), (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF16_LE, "utf-16-le"), (codecs.BOM_UTF16_BE, "utf-16-be"),
)  # fmt: skip
WIDE_MARKS = tuple(mark for mark, name in BOMS if name != "utf-8")
BEGINNINGS = {b"<\0": "utf-16-le", b"\0<": "utf-16-be"}
"""How HTML begins in characters of two bytes without a mark."""


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
    wide = BEGINNINGS.get(body[:2]) if html else None
    if given in ("utf-16-le", "utf-16-be") and b"\0" not in body:  # no line end and no tag: the server is wrong
        given = None
    if given in ("utf-16-le", "utf-16-be", "iso2022_jp"):
        wide = wide or given
    if wide:
        return bytes_to_str(body, wide, errors="replace")
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError:
        text = None
    if text is not None and not (text.isascii() and b"\x1b$" in body):
        return text
    encoding = given if given and given != "utf-8" else detect_encoding(body, from_html_meta=html)
    return bytes_to_str(body, encoding or "utf-8", errors="replace")
