"""Personal data in text: e-mail and postal addresses, phone, card, account and social security numbers, IP addresses.

Precision comes first: a number counts only with its checksum, its grouping, or a word beside it that names its kind."""

from __future__ import annotations

import ipaddress
import re
from bisect import bisect
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache, reduce
from operator import or_
from typing import NamedTuple

from puna.kernels.text.number_hints import IBAN_LENGTHS, Hint, hints_of, phone_stretches
from puna.kernels.text.postal import postal_addresses


class Span(NamedTuple):
    """A piece of personal data: its start and stop in the text, and its kind (`entity`)."""

    start: int
    stop: int
    entity: str


EVERY = (1 << len(Hint)) - 1  # all hints, for a text whose hints are unknown

# An apostrophe is allowed only in names like O'Neil: elsewhere it opens a quotation.
EMAIL = re.compile(
    r"(?<![\w.%+-])(?:(?:\w[\w.%+-]{0,40}[._+-])?[oO]'(?=[A-Za-z]))?\w[\w.%+-]{0,63}@"
    r"(?:[\w](?:[\w-]{0,61}\w)?\.){1,6}[^\W\d_]{2,24}(?![\w@-]|\.\w)"
)
# A dot before a blank and a capital ends a sentence.
HIDDEN_EMAIL = re.compile(
    r"(?<![\w.%+-])(\w[\w.%+-]{0,63}) ?[\[({]at[\])}] ?"
    r"((?:\w[\w-]{0,62} ?(?:\.(?! (?-i:[A-Z]))|[\[({]dot[\])}]) ?){1,4}[a-z]{2,12})(?![\w-])",
    re.IGNORECASE,
)
HIDDEN_DOT = re.compile(r"[\[({]dot[\])}]")
BEFORE, AFTER = 112, 448  # characters before and after an @ that are searched for an address
NOT_MAIL = frozenset(
    ("png", "jpg", "jpeg", "gif", "svg", "webp", "css", "js", "py", "html", "htm", "json", "xml", "map", "txt", "local", "localhost",
     "invalid", "test", "example")
)  # fmt: skip
NO_PERSON = frozenset(("git", "hg", "svn"))
USER_OF_LINK = re.compile(r"://[^\s/?#]{0,77}\Z")  # text before a user name in a link, where @ precedes a host
EXAMPLE = re.compile(r"(?:^|\.)example\.(?:com|org|net|edu)$")


def emails(text: str, seen: int = EVERY) -> Iterator[Span]:
    """Yield spans of e-mail addresses with @, then of hidden ones: a [at] b.org. Skip example.com, x@2.png, git@…, ://x@host and so on."""
    if seen & Hint.AT:
        for match in _around("@", EMAIL, text):
            local, _, domain = match[0].lower().rpartition("@")
            if not _of_person(local, domain) or USER_OF_LINK.search(text, max(0, match.start() - 80), match.start()):
                continue
            yield Span(match.start(), match.end(), "email")
    if seen & Hint.HIDDEN_AT:
        for match in HIDDEN_EMAIL.finditer(text):
            local, domain = match[1].lower(), HIDDEN_DOT.sub(".", match[2].lower().replace(" ", ""))
            if _of_person(local, domain):
                yield Span(match.start(), match.end(), "email")


def _of_person(local: str, domain: str) -> bool:
    return domain.rpartition(".")[2] not in NOT_MAIL and not EXAMPLE.search(domain) and local not in NO_PERSON


def _around(sign: str, pattern: re.Pattern[str], text: str) -> Iterator[re.Match[str]]:
    """Yield the matches of a pattern that contain `sign`, at most one per sign, within `BEFORE` characters before the sign and `AFTER` from
    it on. A search never passes the next sign, so many signs cost little."""
    stop, place = 0, text.find(sign)
    while place >= 0:
        after = text.find(sign, place + 1)
        match = pattern.search(text, max(stop, place - BEFORE), min(place + AFTER, after + 1 if after >= 0 else len(text)))
        if match:
            yield match
        stop, place = match.end() if match else place + 1, after


# A pattern that begins with a rare character, here a digit, is found several times faster than one that begins with a letter.
IBAN_DIGITS = re.compile(r"\d{2}(?<=[A-Za-z]{2}\d{2})(?<![\w-][A-Za-z]{2}\d{2})(?= ?[A-Za-z0-9]{4})")


def ibans(text: str, _seen: int = EVERY) -> Iterator[Span]:
    """Yield the spans of IBANs that have their country's length and a valid checksum (ISO 13616), unspaced or in groups of four."""
    for match in IBAN_DIGITS.finditer(text):
        start = match.start() - 2
        length = IBAN_LENGTHS.get(text[start : start + 2].upper())
        if length is None:
            continue
        stop, compact = _compact(text, start, length)
        if len(compact) == length and not text[stop : stop + 1].isalnum():
            moved = compact[4:] + compact[:4]
            if int("".join(str(int(c, 36)) for c in moved)) % 97 == 1:
                yield Span(start, stop, "iban")


def _compact(text: str, start: int, length: int) -> tuple[int, str]:
    """Return (end, at most `length` ASCII letters and digits from `start` in upper case), skipping single spaces between groups of four."""
    results: list[str] = []
    at = start
    while at < len(text) and len(results) < length:
        character = text[at]
        if character == " " and len(results) % 4 == 0 and text[at - 1] != " ":
            at += 1
            continue
        if not (character.isascii() and character.isalnum()):
            break
        results.append(character.upper())
        at += 1
    return at, "".join(results)


CARD = re.compile(
    r"(?<![\w.,+/=-])\d{4}(?:(?P<s>[ -])\d{4}(?P=s)\d{4}(?P=s)\d{1,7}|(?P<t>[ -])\d{6}(?P=t)\d{4,5}|\d{8,15})"
    r"(?![\w-]|[.,]\d| ?\d)"
)
ISSUERS = re.compile(
    r"4(?:\d{12}|\d{15}|\d{18})|5[1-5]\d{14}|2(?:22[1-9]|2[3-9]\d|[3-6]\d\d|7[01]\d|720)\d{12}|3[47]\d{13}|3(?:0[0-5]|[68]\d)\d{11}|"
    r"6(?:011|5\d\d|4[4-9]\d)\d{12}|62\d{14,17}|35\d{14}|(?:2131|1800)\d{11}"
)

SAYS_CARD = re.compile(r"\b(?:card|cc|visa|mastercard|maestro|carte|tarjeta|karte)\b[^\n\d]{0,15}$", re.IGNORECASE)


def cards(text: str, _seen: int = EVERY) -> Iterator[Span]:
    """Yield spans of card numbers: usual grouping, valid Luhn checksum, and an issuer's prefix and length or a word like `card` before."""
    for match in CARD.finditer(text):
        digits = re.sub(r"\D", "", match[0])
        if len(set(digits)) == 1 or not luhn(digits):
            continue
        if ISSUERS.fullmatch(digits) or SAYS_CARD.search(text[max(0, match.start() - 30) : match.start()]):
            yield Span(match.start(), match.end(), "card")


def luhn(digits: str) -> bool:
    """True if the last digit is the Luhn checksum of the other digits (ISO/IEC 7812)."""
    total = 0
    for place, digit in enumerate(reversed(digits)):
        value = int(digit) * (1 + place % 2)
        total += value - 9 * (value > 9)
    return total % 10 == 0


SSN = re.compile(r"(?<![\w./-])(?!000|666|9)\d{3}-(?!00)\d{2}-(?!0000)\d{4}(?![\w/-]|\.\d)")


def ssns(text: str, _seen: int = EVERY) -> Iterator[Span]:
    """Yield spans of United States social security numbers: three groups joined by dashes, each of which may be issued."""
    for match in SSN.finditer(text):
        yield Span(match.start(), match.end(), "ssn")


IPV4 = re.compile(r"(?<![\w.-])(?:(?:25[0-5]|2[0-4]\d|1?\d?\d)\.){3}(?:25[0-5]|2[0-4]\d|1?\d?\d)(?![\w-]|\.\d)")
# Only 2000::/3 is allocated (RFC 4291).
IPV6 = re.compile(
    r"(?<![\w:.])[23][0-9a-fA-F]{3}:(?:[0-9a-fA-F]{1,4}:){1,6}(?::[0-9a-fA-F]{0,4}|[0-9a-fA-F]{1,4})(?::[0-9a-fA-F]{1,4}){0,5}(?![\w:])"
)
SAYS_ADDRESS = re.compile(r"\b(?:ip|ping|dns|whois|traceroute|logged in from|ip address(?: is)?)\W{0,3}$", re.IGNORECASE)
VERSION = re.compile(r"(?:\bv|version|versión|release|rel|update|build|firmware|driver|revision|[=<>~^]=?)\.?\s?$", re.IGNORECASE)


def ip_addresses(text: str, seen: int = EVERY) -> Iterator[Span]:
    """Yield spans of globally routed IP addresses. Skip IPv4 after a word like `version`, or with no part above 31 unless after `ip`."""
    for match in IPV4.finditer(text) if seen & Hint.IPV4 else ():
        parts = [int(part) for part in match[0].split(".")]
        before = text[max(0, match.start() - 24) : match.start()]
        if VERSION.search(before) or (max(parts) <= 31 and not SAYS_ADDRESS.search(before)):
            continue
        if ipaddress.IPv4Address(".".join(map(str, parts))).is_global:
            yield Span(match.start(), match.end(), "ip_address")
    if seen & Hint.IPV6:
        for match in IPV6.finditer(text):
            try:
                address = ipaddress.IPv6Address(match[0])
            except ValueError:
                continue
            if address.is_global and not match[0].isdecimal():
                yield Span(match.start(), match.end(), "ip_address")


EDGE, END = r"(?<![\w.,+/=#%$€£:-])", r"(?![\w/]|-\d|[.,:]\d)"
EXTENSION = r"(?: ?(?:x|ext\.?) ?\d{1,5})?"
WORDS = (
    r"tel|tél|phone|telephone|téléphone|telefono|teléfono|telefone|telefon|fon|fax|call|calling|mobile|mobil|móvil|handy|cell|cellphone|"
    r"celular|portable|whatsapp|hotline|rufnummer|dial|sms|desk|(?:answering|reach (?:me|us|him|her|them)) (?:at|on)|messages to|"
    r"registered (?:phone|mobile|number)"
)
SAYS_PHONE = re.compile(rf"(?:\b(?:{WORDS})\b|☎|☏|📞)(?:[^\n\d+]{{0,20}}|[:.]?\s{{0,3}})$", re.IGNORECASE)
SAID_PHONE = re.compile(r"[ \-,]{1,3}\(?(?:phone|fax|mobile|cell|office|tel)\b", re.IGNORECASE)
# Groups of digits are possessive (`+`): otherwise a long row of digits could be cut into groups in thousands of ways.
INTERNATIONAL = re.compile(
    r"(?<![\w./=+-])(?:\+[1-9]\d{0,2}[ .\-/]?|00[1-9]\d{0,2}[ \-/])(?:\(\d{1,4}\)[ .\-/]?)?(?=\d(?:[ .\-/]?\d){2})"
    r"\d{1,25}+(?:[ .\-/]\d{2,25}+){0,5}" + EXTENSION + END
)
NORTH_AMERICAN = re.compile(
    EDGE + r"(?:1[-. ])?(?:\([2-9]\d\d\) ?[2-9]\d\d[-. ]|[2-9]\d\d(?P<s>[-.])[2-9]\d\d(?P=s))\d{4}" + EXTENSION + END
)
FRENCH = re.compile(EDGE + r"0[1-9](?P<s>[ .-])\d\d(?:(?P=s)\d\d){3}" + END)
NATIONAL = re.compile(EDGE + r"(?<!\w\()(?:00[1-9]|0|\(0|\(?[1-9])\d{0,9}\)?(?:[ .\-/]{1,2}\(?\d{1,8}\)?){0,5}" + EXTENSION + END)
PHONE_FORMS = ((INTERNATIONAL, Hint.ABROAD, 9, 20), (NORTH_AMERICAN, Hint.TEN, 10, 16), (FRENCH, Hint.TEN, 10, 10))  # digits
BEHIND = 2  # characters that the patterns read after a number
FICTION = re.compile(r"555\D?01\d\d$")

YEARS = re.compile(r"(?:19|20)\d\d\D{1,2}(?:19|20)\d\d|\d{1,2}[./-]\d{1,2}[./-](?:19|20)\d\d|(?:19|20)\d\d[./-]\d{1,2}[./-]\d{1,2}")


def phones(text: str, seen: int = EVERY) -> Iterator[Span]:
    """Yield spans of phone numbers: international, in North American or French groups, or beside a word like `tel`. Spans may overlap."""
    stretches = phone_stretches(text)
    for pattern, needed, least, most in PHONE_FORMS:
        if not seen & needed:
            continue
        for match in _within(stretches, pattern, text):
            digits = sum(map(str.isdecimal, match[0]))
            short = digits == 8 and pattern is INTERNATIONAL and SAYS_PHONE.search(text[max(0, match.start() - 32) : match.start()])
            if (least <= digits <= most or short) and not FICTION.search(match[0]):
                yield Span(match.start(), match.end(), "phone")
    for match in _within(stretches, NATIONAL, text):
        if match.end() - match.start() < 7:
            continue
        if not 7 <= sum(map(str.isdecimal, match[0])) <= 16 or YEARS.fullmatch(match[0]) or FICTION.search(match[0]):
            continue
        if match[0].count("(") != match[0].count(")"):
            continue
        before = text[max(0, match.start() - 32) : match.start()]
        if SAYS_PHONE.search(before) or SAID_PHONE.match(text, match.end()):
            yield Span(match.start(), match.end(), "phone")


def _within(stretches: list[tuple[int, int]], pattern: re.Pattern[str], text: str) -> Iterator[re.Match[str]]:
    """Yield all matches of a pattern, searching only the stretches of the text that can contain one."""
    for start, stop in stretches:
        yield from pattern.finditer(text, start, stop + BEHIND)


# Every e-mail address and phone number contains one of these or is beside one: an @, an international prefix, digits in groups, `phone`.
SAYS_CONTACT = re.compile(
    rf"@|[\[({{]at[\])}}]|\+[1-9]|00[1-9]|\d[-. ]\d{{4}}|\d\d[ .-]\d\d|\b(?:{WORDS}|cell|office)\b|[☎☏📞]", re.IGNORECASE
)


@lru_cache(maxsize=256)  # for repetitive texts, such as forms or attacks
def _has_contact(block: str) -> bool:
    """True if a short text has an e-mail address or a phone number."""
    seen = hints_of(block)
    return any(any(finder(block, seen)) for finder in (emails, phones))


def addresses(text: str, _seen: int = EVERY) -> Iterator[Span]:
    """Yield spans of postal addresses (see `puna.kernels.text.postal`)."""
    contact_spans: list[tuple[int, int]] | None = None

    def contacts(start: int, stop: int) -> bool:
        nonlocal contact_spans
        contact_spans = [match.span() for match in SAYS_CONTACT.finditer(text)] if contact_spans is None else contact_spans
        last = bisect(contact_spans, (stop,)) - 1
        return last >= 0 and contact_spans[last][1] > start and _has_contact(text[start:stop])

    for start, stop in postal_addresses(text, contacts):
        yield Span(start, stop, "address")


FINDERS: dict[str, Callable[..., Iterator[Span]]] = {
    "email": emails, "iban": ibans, "card": cards, "ssn": ssns, "ip_address": ip_addresses, "address": addresses, "phone": phones,
}  # fmt: skip
"""Finders in order of certainty: if spans overlap, the earlier finder's span counts. Arguments: a text and, if known, the text's hints."""

NUMBERS = re.compile(r"\d[\d .()/\-]{5,}\d")

NEEDED = {
    "email": int(Hint.AT | Hint.HIDDEN_AT), "iban": int(Hint.IBAN), "card": int(Hint.TWELVE), "ssn": int(Hint.SSN),
    "ip_address": int(Hint.IPV4 | Hint.IPV6), "address": int(Hint.STREET), "phone": int(Hint.PHONE),
}  # fmt: skip
"""Entity → hints: a text with none of these hints has no data of this entity."""


def needed_hints(entities: Iterable[str]) -> int:
    """Return the hints for these kinds of data: a text with such data has at least one of the hints."""
    return reduce(or_, (NEEDED[entity] for entity in entities), 0)


def find(text: str, entities: tuple[str, ...], seen: int | None = None) -> list[Span]:
    """Return spans of the wanted entities, in text order, without overlaps. `seen`: the text's hints, if they are known."""
    result: list[Span] = []
    taken = bytearray(len(text))  # 1 at each character of a span
    seen = hints_of(text) if seen is None else seen
    numbers = bool(seen & Hint.NUMBERS) and NUMBERS.search(text) is not None
    for entity, finder in FINDERS.items():
        if entity not in entities or not seen & NEEDED[entity] or (entity in ("card", "ssn", "phone") and not numbers):
            continue
        for span in finder(text, seen):
            if taken.find(1, span.start, span.stop) < 0:
                taken[span.start : span.stop] = b"\1" * (span.stop - span.start)
                result.append(span)
    return sorted(result)


def mask(text: str, spans: list[Span]) -> str:
    """Return the text with `<EMAIL>`, `<PHONE>`, … in place of `spans`, which are in order and do not overlap."""
    pieces, at = [], 0
    for span in spans:
        pieces += [text[at : span.start], f"<{span.entity.upper()}>"]
        at = span.stop
    return "".join([*pieces, text[at:]])
