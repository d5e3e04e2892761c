"""Postal addresses in contact blocks: a street with its number beside a postal code, a label or other contact data.

A street alone is not personal data (`Wall Street`, `10 Downing Street` in the news). An address counts only if the text beside it
shows that it receives post. The patterns cover English, German, Dutch, Swedish, French, Spanish, Italian and Portuguese addresses."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from puna.kernels.text.search import Words

# No pattern goes on with a blank or an end of line after a gap, so a gap is matched one way only (`(?>`, and `+` after a name in a town):
# otherwise a long row of blanks or hyphens could be cut into gaps or names in millions of ways.
GAP = r"(?>[ \t]*[,·|][ \t]*\n?[ \t]*|[ \t]*\n(?:[ \t]*\n)?[ \t]*|[ \t]+[-–][ \t]+|[ \t]+)"
NAME = r"[A-ZÀ-ÖØ-Þ][\w'’.-]{0,30}"
SMALL = r"(?:de la|de|la|le|les|sur|am|an|der|im|of|upon|del|los|di|den)"
CITY = rf"{NAME}+(?:[ -](?:{SMALL}[ -])?{NAME}+){{0,3}}"
NUMBER = r"\d{1,5}(?: ?[A-Za-z]\b)?(?:[-/]\d{1,4}[a-z]?)?"
UNIT = r"(?:(?:Apt|Apartment|Suite|Ste|Unit|Floor|Fl|Room|Rm|Bldg|Building|Dept)\b\.? ?#?\w{1,6}|#\d{1,5}|\d{1,2}(?:st|nd|rd|th) [Ff]loor)"

# 221B Baker Street, Suite 4; 1600 N. Main St. NW; 350 5th Ave
ENGLISH_KINDS = (
    "Street", "St", "Avenue", "Ave", "Road", "Rd", "Boulevard", "Blvd", "Lane", "Ln", "Drive", "Dr", "Court", "Ct", "Square", "Sq", "Place",
    "Pl", "Terrace", "Crescent", "Close", "Way", "Parkway", "Pkwy", "Highway", "Hwy", "Circle", "Cir", "Trail", "Walk", "Row", "Gardens",
    "Green", "Grove", "Hill", "Quay", "Mews", "Broadway", "Turnpike", "Plaza",
)  # fmt: skip
ENGLISH = (
    rf"{NUMBER} (?:[NSEW]{{1,2}}\.? )?(?:(?:{NAME}|\d{{1,3}}(?:st|nd|rd|th)|of|the) ){{0,4}}?(?:{'|'.join(ENGLISH_KINDS)})\b\.?"
    rf"(?: [NSEW]{{1,2}}\b\.?)?(?:{GAP}{UNIT})?"
)
BOX = r"(?:P\.? ?O\.? Box|Post Office Box|Postfach|Postbus|Apartado|BP) \d{1,7}(?: \d{2,3})*"
BOXES = ("Box", "Postfach", "Postbus", "Apartado", "BP")
# Hauptstraße 12a; Am Alten Markt 3; Keizersgracht 112; Storgatan 5
GERMANIC_ENDS = (
    "straße", "strasse", "str.", "weg", "platz", "allee", "gasse", "ufer", "damm", "ring", "markt", "straat", "laan", "gracht", "plein",
    "kade", "gatan", "vägen", "gade", "vej",
)  # fmt: skip
GERMANIC_STARTS = ("Am", "An der", "Im", "Auf der", "Unter den")
GERMANIC_END = "|".join(f"[{end[0].upper()}{end[0]}]{re.escape(end[1:])}" for end in GERMANIC_ENDS)
GERMANIC_NAME = r"[A-ZÀ-ÖØ-Þ][\w'’.-]{0,62}"
GERMANIC = re.compile(
    rf"(?:(?:{GERMANIC_NAME} ){{0,2}}(?:{GERMANIC_NAME})?(?:{GERMANIC_END})|(?:{'|'.join(GERMANIC_STARTS)}) {NAME}(?: {NAME})?)"
    r" \d{1,4}(?: ?[a-zA-Z]\b)?(?:[-/]\d{1,4})?(?!\w)"
)
# 12 bis, rue de la Paix
FRENCH_KINDS = ("rue", "avenue", "av.", "boulevard", "bd", "place", "chemin", "allée", "impasse", "quai", "cours", "route", "square")
FRENCH = (
    rf"{NUMBER}(?: (?:bis|ter))?,? (?:{'|'.join(map(re.escape, FRENCH_KINDS))}) "
    rf"(?:(?:de|du|des|la|le|les|l['’]|d['’]) ?){{0,3}}{NAME}(?:[ -](?:(?:de la|de|du|des|la|le|les) )?{NAME}){{0,3}}"
)
# Calle de Alcalá, 45; Via Garibaldi 7; Rua Augusta, 1508
ROMANCE_KINDS = (
    "Calle", "C/", "Avenida", "Avda.", "Av.", "Plaza", "Paseo", "Carrera", "Via", "Viale", "Piazza", "Corso", "Largo", "Rua", "Praça",
    "Travessa",
)  # fmt: skip
ROMANCE_SMALL = ("de", "del", "da", "do", "dos", "das", "di", "della", "dei", "la", "las", "los", "el")
ROMANCE = (
    rf"(?:{'|'.join(map(re.escape, ROMANCE_KINDS))}) ?(?:(?:{'|'.join(ROMANCE_SMALL)}) ){{0,3}}"
    rf"{NAME}(?: (?:(?:de|del|da|do|di) )?{NAME}){{0,3}}"
    r",? (?:n\.?[º°] ?)?\d{1,5}"
)
FORMS: tuple[tuple[re.Pattern[str], Words | None], ...] = tuple(
    (re.compile(rf"{form}(?!\w)"), words)
    for form, words in (
        (ENGLISH, Words(*(f" {kind}" for kind in ENGLISH_KINDS))),
        (BOX, Words(*(f"{box} " for box in BOXES))),
        (ROMANCE, None),
        (FRENCH, Words(*(f" {kind} " for kind in FRENCH_KINDS))),  # without these words, the pattern would be tried at every number
    )
)
"""Pairs (pattern of addresses, words): a text with such an address has at least one of the words. None: any text may have one."""
SPACE_DIGIT = re.compile(r" \d")

STATE = r"(?:A[KLRZ]|C[AOT]|D[CE]|FL|GA|HI|I[ADLN]|K[SY]|LA|M[ADEINOST]|N[CDEHJMVY]|O[HKR]|PA|PR|RI|S[CD]|T[NX]|UT|V[AT]|W[AIVY])"
POSTAL = re.compile(
    rf"{GAP}(?:"
    rf"(?:{CITY}{GAP})?(?:{STATE}|{CITY})[ ,]{{1,2}}\d{{5}}(?:-\d{{4}})?(?![\d-])"  # Springfield, IL 62704-1234
    rf"|(?:{CITY}{GAP}){{0,2}}[A-Z]{{1,2}}\d[A-Z\d]? \d[A-Z]{{2}}\b"  # London SW1A 2AA
    rf"|(?:{CITY}{GAP})?(?:[A-Z]{{2}}{GAP})?[ABCEGHJ-NPRSTVXY]\d[A-Z] ?\d[A-Z]\d\b"  # Toronto, ON M5V 2T6
    # 10115 Berlin; 111 51 Stockholm; 1012 AB Amsterdam; F-75002 Paris
    rf"|(?:[A-Z]{{1,3}}-)?(?:\d{{4,5}}(?: ?[A-Z]{{2}}\b)?|\d{{3}} \d{{2}}) {CITY}"
    rf"|{CITY}[ ,]{{1,2}}(?:NSW|VIC|QLD|SA|WA|TAS|ACT|NT) \d{{4}}\b"  # Sydney NSW 2000
    rf"|{CITY}{GAP}(?:[A-Z]{{2}}{GAP})?\d{{5}}-\d{{3}}\b"  # São Paulo - SP, 01305-100
    r")"
)
LABEL = re.compile(
    r"\b(?:(?:(?:post(?:al)?|mail(?:ing)?|home|street|visiting|office|our|billing|shipping|delivery) )?address|anschrift|adresse|"
    r"dirección|indirizzo|endereço|adres|lives? at|resid(?:es|ing) at|(?:write|mail|send|ship)(?: \w+){0,4} to)\b"
    r"(?:[:.]?\s{0,2}|[^\n]{0,24}:\s{0,2}| is )$",
    re.IGNORECASE,
)
BEFORE, AROUND, OWN_LINE = 64, 160, 40


def postal_addresses(text: str, contacts: Callable[[int, int], bool]) -> Iterator[tuple[int, int]]:
    """Yield start and stop of each address: a street with its number or a post office box, with the postal code and town if they follow.

    An address counts with a postal code and town after it, or a label before it (`Address:`). On a line of its own, it also counts in a
    block with other contact data; contacts(start, stop) returns whether text[start:stop] has contact data."""
    encoded = text.encode("utf-8", "surrogatepass")
    forms = (form for form, words in FORMS if words is None or words.any_in(encoded))
    results = {match.span() for form in forms for match in form.finditer(text)}
    end = 0
    for start, stop in sorted(results | set(_germanic(text)), key=lambda span: (span[0], -span[1])):
        if start < end or (start and (text[start - 1].isalnum() or text[start - 1] in "_/.,-")):
            continue
        postal = POSTAL.match(text, stop)
        if postal:
            stop = postal.end()
        elif not LABEL.search(text[max(0, start - BEFORE) : start]) and not _in_contact_block(text, start, stop, contacts):
            continue
        end = stop
        yield start, stop


def _germanic(text: str) -> Iterator[tuple[int, int]]:
    """Yield start and stop of streets like `Hauptstraße 12` or `Am Markt 3`. Only text before numbers is searched, to save time."""
    before = 0
    for match in SPACE_DIGIT.finditer(text):
        at = match.start()
        # No street has another number in its name: the text between two numbers is searched once.
        head = text[max(before, at - BEFORE) : at].rpartition("\n")[2]
        before = at + 1
        if head.lower().endswith(GERMANIC_ENDS) or any(f"{start} " in head for start in GERMANIC_STARTS):
            for street in GERMANIC.finditer(text, at - len(head), at + 16):
                yield street.span()


def _in_contact_block(text: str, start: int, stop: int, contacts: Callable[[int, int], bool]) -> bool:
    """True if the street is nearly alone on its line, and the block between blank lines has other contact data."""
    # Read no further than necessary: a text may be one line, or have no blank line.
    low, high = max(0, start - OWN_LINE - 1), stop + OWN_LINE + 1
    before, after = text[low:start].rpartition("\n")[2], text[stop:high].partition("\n")[0]
    if len(before) + len(after) > OWN_LINE:
        return False
    before, after = text[max(0, start - AROUND) : start].rpartition("\n\n")[2], text[stop : stop + AROUND].partition("\n\n")[0]
    return contacts(start - len(before), stop + len(after))
