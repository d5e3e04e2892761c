"""Characters of a page: decoding before parsing; repair of wrong encodings, control characters and white space in the text."""

from __future__ import annotations

import codecs
import functools
import re
from collections import Counter

import numpy as np
from numpy.typing import NDArray

from puna.kernels.cpu.numba_cache import njit

LEAST = np.array([0, 0, 0x80, 0x800, 0x10000], np.int64)  # smallest code point by its number of bytes in UTF-8
TAB, LINE_END, SPACE, DELETED, NO_BREAK = 9, 10, 32, 127, 0xA0
MISREAD, DOUBTFUL = 1, 2  # doubts about a text, as bits: `repair` may change it; it may be blank or wrongly decoded


def plain(text: str) -> str:
    """Return the repaired text without control and invisible characters (see `_is_control`)."""
    return _of(text, False)


def clean_text(text: str) -> str:
    """Return `plain(text)` without trailing white space on lines, newlines at the text's start and end, or repeated blank lines."""
    return _of(text, True)


def _of(text: str, lines: bool) -> str:
    data = np.frombuffer(bytearray(repair(text).encode()), np.uint8)  # writable, like `texts_of`'s arrays: numba compiles once
    results: NDArray[np.uint8] = _clean_all(data, np.array([0, len(data)]), roles(), lines)[0]
    return results.tobytes().decode()


def clean_texts(texts: NDArray[np.uint8], ends: NDArray[np.int64]) -> tuple[NDArray[np.uint8], NDArray[np.int64], NDArray[np.uint8]]:
    """Return UTF-8 texts cleaned as by `clean_text`, but not repaired (see `MISREAD`); their bounds; and the doubts about each text."""
    return _clean_all(texts, ends, roles(), True)  # type: ignore[no-any-return]


@njit(cache=True)
def _clean_all(
    texts: NDArray[np.uint8], ends: NDArray[np.int64], roles: NDArray[np.uint8], lines: bool
) -> tuple[NDArray[np.uint8], NDArray[np.int64], NDArray[np.uint8]]:
    n = len(ends) - 1
    out, places, doubts = np.empty(len(texts), np.uint8), np.zeros(n + 1, np.int64), np.empty(n, np.uint8)
    for k in range(n):
        places[k + 1], doubts[k] = _clean(texts[ends[k] : ends[k + 1]], out, places[k], roles, lines)
    return out[: places[n]], places, doubts


@njit(cache=True, borrows=True)
def _clean(text: NDArray[np.uint8], out: NDArray[np.uint8], start: int, roles: NDArray[np.uint8], lines: bool) -> tuple[int, int]:
    """Write a cleaned text to `out` from `start` on; return its end and the doubts about it. `lines`: also clean line ends."""
    at, end, before = 0, start, np.int64(0)  # before: the role of the character before
    misread, sound, visible = False, True, False  # visible: not all is white space
    while at < len(text):
        c, length, role = np.int64(text[at]), 1, np.int64(0)
        if c >= 0x80:
            c, length = _character(text, at)
            role = np.int64(roles[c] if 0 <= c < 1 << 16 else 0)
            misread |= bool(before << 1 & role or role & CONTROL)
            sound &= bool(c >= 0 and c != 0xFFFD)
        before = role & FIRST
        if c == LINE_END and lines:
            end = _line_end(out, start, end)
            if end > start and not (end > start + 1 and out[end - 1] == LINE_END and out[end - 2] == LINE_END):
                out[end] = LINE_END
                end += 1
        elif not _is_control(c):
            for k in range(at, at + length):
                out[end] = text[k]
                end += 1
            visible |= bool(SPACE < c < 0x80 or NO_BREAK < c < 0x1680 or c > 0x3000)
        at += length
    end = _line_end(out, start, end) if lines else end
    while lines and end > start and out[end - 1] == LINE_END:
        end -= 1
    return end, MISREAD * misread + DOUBTFUL * (not (sound and visible))


@njit(cache=True, borrows=True)
def _line_end(out: NDArray[np.uint8], start: int, end: int) -> int:
    """Return the end of the line that `out` holds up to `end`, without trailing white space."""
    while end > start:
        if out[end - 1] == SPACE or out[end - 1] == TAB:
            end -= 1
        elif end > start + 1 and out[end - 1] == 0xA0 and out[end - 2] == 0xC2:
            end -= 2
        else:
            break
    return end


@njit(cache=True, borrows=True)
def _is_control(c: int) -> bool:
    """True if a character is an ASCII control (not tab or line end), a soft hyphen, zero-width space, word joiner, BOM or noncharacter."""
    if c < 0x80:
        return (0 <= c < SPACE and c != TAB and c != LINE_END) or c == DELETED
    return c == 0xAD or c == 0x200B or c == 0x2060 or c == 0xFEFF or c == 0xFFFE or c == 0xFFFF


@njit(cache=True, borrows=True)
def _character(text: NDArray[np.uint8], at: int) -> tuple[int, int]:
    """Return the code point of a character beyond ASCII, and its number of bytes; the code point is -1 if the bytes are not UTF-8."""
    first = np.int64(text[at])
    length = 2 if first < 0xE0 else 3 if first < 0xF0 else 4
    if first < 0xC2 or first > 0xF4 or at + length > len(text):
        return -1, 1
    c = first & (0x7F >> length)
    for k in range(1, length):
        if text[at + k] & 0xC0 != 0x80:
            return -1, 1
        c = c << 6 | np.int64(text[at + k] & 0x3F)
    return (-1 if c < LEAST[length] or 0xD800 <= c < 0xE000 or c > 0x10FFFF else int(c)), length


C1 = re.compile("[\x80-\x9f]")
MEANT = {code: bytes([code]).decode("cp1252", "ignore") for code in range(0x80, 0xA0)}  # Windows-1252's characters at the C1 controls
FIRST, LATER, CONTROL = 1, 2, 4  # roles of a character, see `roles`; LATER is FIRST << 1
ACCENTED = re.compile("[\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u024f]")
MEANT_A_SPACE = re.compile("Ã(?=[ \u00a0])")  # "à" whose second byte became a space; some languages write "Ã" at a word's end


def repair(text: str) -> str:
    """Return the text with doubly encoded lines decoded once more, and Windows-1252's characters (or nothing) instead of C1 controls."""
    if text.isascii():
        return text
    units = np.frombuffer(text.encode("utf-16-le", "surrogatepass"), np.uint16)
    suspicious, control = _looked_at(units, roles())
    if len(suspicious):
        text = _decoded_again(text, suspicious.tolist())
    return text.translate(MEANT) if control or (len(suspicious) and C1.search(text)) else text


def _decoded_again(text: str, suspicious: list[int]) -> str:
    """Return the text with its suspicious lines (given by index) repaired if one of them is certainly bad, else unchanged."""
    from ftfy.badness import is_bad

    lines = text.split("\n")
    if not any(is_bad(MEANT_A_SPACE.sub("", lines[place])) for place in suspicious):
        return text
    for place in suspicious:
        lines[place] = _undone(lines[place])
    return "\n".join(lines)


def _undone(line: str) -> str:
    """Return the line as ftfy repairs it. Return it unchanged if more accented letters survive the repair than it removes characters:
    misread letters would not survive. Example: in "STAÐ“", Ð is Icelandic and “ ends a quotation, but "Ð“" may also be a misread "Г"."""
    from ftfy import fix_encoding

    fixed = fix_encoding(line)
    sound = Counter(ACCENTED.findall(line)) & Counter(ACCENTED.findall(fixed))
    return fixed if len(line) - len(fixed) >= sound.total() else line


@functools.cache
def roles() -> NDArray[np.uint8]:
    """Return the roles of each UTF-16 unit, as bits. `FIRST`: some single-byte encoding decodes the first byte of a UTF-8 character to the
    unit. `LATER`: some single-byte encoding decodes a later byte to the unit. `CONTROL`: the unit is a C1 control."""
    import ftfy.bad_codecs  # noqa: F401 - registers the encodings "sloppy-…", which have no gaps
    from ftfy.chardata import CHARMAP_ENCODINGS

    result = np.zeros(1 << 16, np.uint8)
    for role, numbers in ((FIRST, range(0xC2, 0xF5)), (LATER, range(0x80, 0xC0))):
        for name in CHARMAP_ENCODINGS:
            result[[ord(character) for character in bytes(numbers).decode(name, "ignore")]] |= role
    result[0x80:0xA0] |= CONTROL
    return result


@njit(cache=True)
def _looked_at(units: NDArray[np.uint16], roles: NDArray[np.uint8]) -> tuple[NDArray[np.int64], bool]:
    """Return the indices of lines in which a `LATER` unit follows a `FIRST` unit, and True if there is a `CONTROL` unit."""
    lines = 1
    for unit in units:
        lines += unit == 10
    results, count, line = np.empty(lines, np.int64), 0, 0
    control = before = np.int64(0)
    for unit in units:
        role = np.int64(roles[unit] if unit >= 0x80 else 0)
        if before << 1 & role and (count == 0 or results[count - 1] != line):
            results[count] = line
            count += 1
        control |= role & CONTROL
        before = role & FIRST
        line += unit == 10
    return results[:count], bool(control)


BOMS = (
    (codecs.BOM_UTF8, "utf-8"), (codecs.BOM_UTF32_LE, "utf-32-le"), (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF16_LE, "utf-16-le"), (codecs.BOM_UTF16_BE, "utf-16-be"),
)  # fmt: skip
WIDE_MARKS = tuple(mark for mark, name in BOMS if name != "utf-8")
BEGINNINGS = {b"<\0": "utf-16-le", b"\0<": "utf-16-be"}  # how HTML begins in characters of two bytes without a mark
SOUND = 9  # minimum sound characters beyond ASCII for each broken one in UTF-8; text in other encodings has fewer than one
# Codecs that contain what browsers read as these encodings: ① is no character of Shift_JIS, but of its pages
SUPERSETS = {"shift_jis": "cp932", "euc_kr": "cp949", "big5": "big5hkscs", "gb2312": "gb18030", "gbk": "gb18030"}
BROKEN = re.compile("[\udcc2-\udcf4][\udc80-\udcbf]+|[\udc80-\udcff]")  # bytes that are not UTF-8, as Python escapes them


def utf8(body: bytes, charset: str | None) -> bytes:
    """Return an HTML page re-encoded in UTF-8; `decode` describes how its encoding is found."""
    text, same = _decode(body, charset, html=True)
    return body if same else text.encode("utf-8", "replace")


def decode(body: bytes, charset: str | None, html: bool) -> str:
    """Return the text of a page. The first of these that applies gives the encoding: a byte order mark; signs of UTF-16 or ISO-2022-JP;
    UTF-8 with few broken characters, whatever the server says (text in other encodings is seldom valid UTF-8 by chance); the server's
    header (`charset`), if it fits; with `html`, the page's own declaration; detection."""
    return _decode(body, charset, html)[0]


def _decode(body: bytes, charset: str | None, html: bool) -> tuple[str, bool]:
    """Return the text of a page, and True if `body` is exactly this text in UTF-8."""
    from resiliparse.parse.encoding import bytes_to_str, detect_encoding

    for mark, name in BOMS:
        if body.startswith(mark):
            return body[len(mark) :].decode(name, "replace"), False
    declared = _encoding_named(charset) if charset else None
    wide = BEGINNINGS.get(body[:2]) if html else None
    if declared in ("utf-16-le", "utf-16-be") and b"\0" not in body:  # no line end and no tag: the server is wrong
        declared = None
    if declared in ("utf-16-le", "utf-16-be", "iso2022_jp"):
        wide = wide or declared
    if wide:
        return body.decode(wide, "replace"), False
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError:
        text = None
    if text is not None and not (text.isascii() and b"\x1b$" in body):
        return text, True
    if text is None and (text := _of_broken(body)) is not None:
        return text, False
    if declared in (None, "utf-8") or (text := _mostly_sound(body, declared)) is None:
        named = detect_encoding(body, from_html_meta=html)
        korean = named == "utf-8" and detect_encoding(body, html5_compatible=False) == "cp949"  # which its table of names lacks
        text = _mostly_sound(body, "cp949" if korean else named or "utf-8")
    return text or bytes_to_str(body, "utf-8", errors="replace"), False


def _mostly_sound(body: bytes, encoding: str) -> str | None:
    """Return the text of a page in an encoding; None if so many characters are broken that it must be in another encoding."""
    text = body.decode(SUPERSETS.get(encoding, encoding), "replace")
    return text if len(text.encode("ascii", "ignore")) + (SOUND + 1) * text.count("\ufffd") <= len(text) else None


def _of_broken(body: bytes) -> str | None:
    """Return the text of a page in UTF-8 that has broken characters; None if it has so many that it must be in another encoding."""
    text = body.decode("utf-8", "surrogateescape")
    broken = BROKEN.findall(text)
    sound = len(text) - len(body.translate(None, bytes(range(0x80, 0x100)))) - sum(map(len, broken))
    return BROKEN.sub(_meant, text) if sound >= SOUND * len(broken) else None


def _meant(broken: re.Match[str]) -> str:
    """Return the Windows-1252 character of a lone byte, or U+FFFD for a part of a character."""
    lone = len(broken[0]) == 1 and broken.end() < len(broken.string)
    return bytes([ord(broken[0]) - 0xDC00]).decode("cp1252", "replace") if lone else "\ufffd"


@functools.lru_cache(maxsize=1000)
def _encoding_named(charset: str) -> str | None:
    from resiliparse.parse.encoding import map_encoding_to_html5

    return map_encoding_to_html5(charset, fallback_utf8=False)
