"""Removal of a page's invisible text: templates of page builders and scripts, notices to browsers without JavaScript, and tags in brackets
(WordPress's shortcodes) that a removed plugin left behind."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from puna.kernels.cpu.numba_cache import njit
from puna.models.extraction import layout as L
from puna.models.extraction.asides import CLASS, ID
from puna.models.extraction.layout import Scan
from puna.models.extraction.tags import begins, fnv, has, is_space

TEMPLATE, NOSCRIPT = L.BIT["template"], L.BIT["noscript"]
SAYS_TEMPLATE = np.array([fnv(name, kind) for name in ("template", "templates", "tmpl") for kind in (CLASS, ID)], np.uint64)
MOST = 0.5  # maximum share of the kept words in templates; more is content that a script shows (shadow roots)
NOTICE_BYTES = 400  # maximum bytes of a notice about JavaScript
NEAR = 32  # bytes on either side of "JavaScript" that are searched
MENTIONS = 2  # maximum blocks that mention JavaScript; a page with more is about JavaScript
TAG_BYTES = 1000  # maximum bytes of a tag in brackets
OPEN, CLOSE, EQUALS, SLASH, UNDERSCORE, HYPHEN = 0x5B, 0x5D, 0x3D, 0x2F, 0x5F, 0x2D


@njit(cache=True)
def without_unseen(page: Scan, keep: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return `keep` [blocks] without invisible text. Cut tags in brackets off both ends of kept blocks except `pre`, in place."""
    blocks, n = page.blocks, len(page.blocks)
    out, words, left = keep.copy(), 0, 0
    for e in range(len(page.elements)):
        if page.elements[e, L.FLAGS] & L.HIDDEN and _says_template(page, e):
            out[page.elements[e, L.FIRST] : page.elements[e, L.END]] = False
    for b in range(n):
        flags = page.elements[blocks[b, L.ELEMENT], L.FLAGS]
        out[b] &= not (flags & TEMPLATE or (flags & NOSCRIPT and _asks(page.text, blocks[b, L.START], blocks[b, L.STOP])))
        words, left = words + blocks[b, L.WORDS] * keep[b], left + blocks[b, L.WORDS] * out[b]
    if left < (1 - MOST) * words:
        out[:] = keep
    _drop_notices(page, out)
    for b in range(n):
        if out[b] and not blocks[b, L.PRE]:
            out[b] = _narrow(page, b)
    return out


@njit(cache=True, borrows=True)
def _says_template(page: Scan, element: int) -> bool:
    last = page.elements[element + 1, L.TOKENS] if element + 1 < len(page.elements) else len(page.tokens)
    for t in range(page.elements[element, L.TOKENS], last):
        for name in SAYS_TEMPLATE:
            if page.tokens[t] == name:
                return True
    return False


@njit(cache=True, borrows=True)
def _drop_notices(page: Scan, keep: NDArray[np.bool_]) -> None:
    """Drop from `keep`, in place, short blocks that ask for JavaScript, if at most `MENTIONS` kept blocks of the page mention it."""
    mentions = 0
    for b in range(len(keep)):
        mentions += keep[b] and has(page.text, page.blocks[b, L.START], page.blocks[b, L.STOP], b"javascript")
    if not 0 < mentions <= MENTIONS:
        return
    for b in range(len(keep)):
        start, stop = page.blocks[b, L.START], page.blocks[b, L.STOP]
        if keep[b] and not page.blocks[b, L.PRE] and stop - start <= NOTICE_BYTES:
            keep[b] = not _asks(page.text, start, stop)


@njit(cache=True, borrows=True)
def _asks(text: NDArray[np.uint8], start: int, stop: int) -> bool:
    """True if words near the first "JavaScript" ask to turn JavaScript on, or say that it is off, in one of several languages."""
    at = start
    while at < stop and not has(text, at, min(at + 10, stop), b"javascript"):
        at += 1
    if at == stop:
        return False
    start, stop = max(start, at - NEAR), min(stop, at + 10 + NEAR)
    asks = has(text, start, stop, b"enable") or has(text, start, stop, b"disabled") or _begins(text, start, stop, b"turn")
    asks |= has(text, start, stop, b"requires") or has(text, start, stop, b"without") or has(text, start, stop, b"your browser")
    asks |= _begins(text, start, stop, b"aktiv") or _begins(text, start, stop, b"deaktiv")  # not: interaktiv
    asks |= _begins(text, start, stop, b"activ") or has(text, start, stop, b"sactiv")  # as in `désactivé`; not: interactive
    return bool(asks or has(text, start, stop, b"habilit") or has(text, start, stop, b"abilita") or has(text, start, stop, b"inschakel"))


@njit(cache=True, borrows=True)
def _begins(text: NDArray[np.uint8], start: int, stop: int, words: bytes) -> bool:
    """True if a word in text[start:stop] begins with the lower-case bytes `words`, ignoring ASCII case."""
    for at in range(start, stop - len(words) + 1):
        if (at == 0 or not 97 <= text[at - 1] | 32 <= 122) and has(text, at, at + len(words), words):
            return True
    return False


@njit(cache=True, borrows=True)
def _narrow(page: Scan, block: int) -> bool:
    """Cut tags in brackets and white space off both ends of a block, in place; return True if text is left."""
    text, start, stop = page.text, page.blocks[block, L.START], page.blocks[block, L.STOP]
    moved = True
    while moved:
        moved = False
        while start < stop and is_space(text[start]):
            start += 1
        while start < stop and is_space(text[stop - 1]):
            stop -= 1
        end = _tag_end(text, start, stop)
        if end > start:
            start, moved = end, True
            continue
        if stop - start > 2 and text[stop - 1] == CLOSE:
            begin = stop - 2
            while begin > start and begin > stop - TAG_BYTES and text[begin] != OPEN:
                begin -= 1
            # A name before the bracket makes it a type or an index; a closing tag may touch the last word.
            apart = begin == start or is_space(text[begin - 1]) or text[begin - 1] == CLOSE or text[begin + 1] == SLASH
            if apart and _tag_end(text, begin, stop) == stop:
                stop, moved = begin, True
    if start > page.blocks[block, L.START] or stop < page.blocks[block, L.STOP]:
        page.blocks[block, L.START], page.blocks[block, L.STOP] = start, stop
    return bool(stop > start)


@njit(cache=True, borrows=True)
def _is_builders(text: NDArray[np.uint8], first: int, last: int) -> bool:
    """True if the shortcode's name text[first:last] has a prefix of WPBakery, Divi, Avada, tagDiv, Jupiter, Enfold or Salient."""
    wide = begins(text, first, last, b"vc_") or begins(text, first, last, b"et_pb_") or begins(text, first, last, b"fusion_")
    wide |= begins(text, first, last, b"tdc_") or begins(text, first, last, b"mk_") or begins(text, first, last, b"av_")
    return bool(wide or begins(text, first, last, b"nectar_"))


@njit(cache=True, borrows=True)
def _tag_end(text: NDArray[np.uint8], at: int, stop: int) -> int:
    """Return the end of the tag in brackets that begins at `at`: `[name word="value"]`, `[vc_row]`, `[/name]`; without a tag, `at`.

    A bare lower-case name (`[sic]`) is not a tag, nor are notes, lists and BBCode's `[b]`. A tag has an attribute with a value in quotes, a
    page builder's prefix, or a slash before a name of at least four letters."""
    begin = at
    if at + 3 > stop or text[at] != OPEN:
        return begin
    at += 1
    closes = text[at] == SLASH
    at += closes
    first = at
    while at < stop and (97 <= text[at] <= 122 or (at > first and (48 <= text[at] <= 57 or text[at] == UNDERSCORE or text[at] == HYPHEN))):
        at += 1
    length, built = at - first, _is_builders(text, first, at)
    if length < 2 or at >= stop:
        return begin
    valued, quote = False, 0
    rest = at
    while at < stop and at - begin < TAG_BYTES:
        c = int(np.int64(text[at]))
        if quote:
            quote = 0 if c == quote else quote
        elif c in (0x22, 0x27) and at > rest and text[at - 1] == EQUALS:
            quote, valued = c, True
        elif c == 0xE2 and at > rest and text[at - 1] == EQUALS:  # typographic quotes, which an editor has set
            valued = True
        elif c in (OPEN, 10):
            return begin
        elif c == CLOSE:
            is_tag = built or (valued and is_space(text[rest])) or (closes and length >= 4)
            return at + 1 if is_tag and (rest == at or is_space(text[rest]) or text[rest] == SLASH) else begin
        at += 1
    return begin
