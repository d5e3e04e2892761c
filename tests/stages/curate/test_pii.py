"""Personal data: what is masked, and what must stay unmasked."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from puna.kernels.text import personal
from puna.kernels.text.number_hints import Hint, hints, hints_of, phone_stretches
from puna.kernels.text.personal import FINDERS, NEEDED, find, luhn, mask
from puna.kernels.text.strings import buffers
from puna.stages.contract import execute
from puna.stages.curate import pii as module
from puna.stages.curate.pii import PiiConfig, pii
from puna.storage import Store
from tests.linear import stopped_if_quadratic

ALL = tuple(FINDERS)


def clean(text, entities=ALL):
    return mask(text, find(text, entities))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Write to jane.doe+news@mail.company.co.uk.", "Write to <EMAIL>."),
        ("(jürgen.müller@bücher.de)", "(<EMAIL>)"),
        ("jane [at] company [dot] com", "<EMAIL>"),
        ("E-Mail: info(at)verlag.de, Fax", "E-Mail: <EMAIL>, Fax"),
        ("a [at] example.company.com. Then b (at) company . com or c [at] company. com", "<EMAIL>. Then <EMAIL> or <EMAIL>"),
        ("Address(u'jane@yahoo.com')", "Address(u'<EMAIL>')"),
        ("https://a.net/x?to=jane@company.com&n=1 ftp://a.net/~jane@company.com", "https://a.net/x?to=<EMAIL>&n=1 ftp://a.net/~<EMAIL>"),
        ("Call +1 (415) 867-5309 now", "Call <PHONE> now"),
        ("Tel.: +49 (0) 89-98103987", "Tel.: <PHONE>"),
        ("0031 (0) 614392096", "<PHONE>"),
        ("001-518-640-0854 home", "<PHONE> home"),
        ("at 415-867-5309 x459.", "at <PHONE>."),
        ("(415) 867-5309", "<PHONE>"),
        ("415.867.5309", "<PHONE>"),
        ("Tél : 04 76 40 63 62", "Tél : <PHONE>"),
        ("06.12.34.56.78", "<PHONE>"),
        ("Telefon:\n\n034771/28076", "Telefon:\n\n<PHONE>"),
        ("móvil 612 345 678", "móvil <PHONE>"),
        ("card 4111 1111 1111 1111, thanks", "card <CARD>, thanks"),
        ("3782-822463-10005", "<CARD>"),
        ("4111111111111111", "<CARD>"),
        ("IBAN GB82 WEST 1234 5698 7654 32 and more", "IBAN <IBAN> and more"),
        ("DE89370400440532013000", "<IBAN>"),
        ("SSN 078-05-1120.", "SSN <SSN>."),
        ("from 93.184.216.34 at", "from <IP_ADDRESS> at"),
        ("2606:2800:220:1:248:1893:25c8:1946", "<IP_ADDRESS>"),
    ],
)
def test_masked(text, expected):
    assert clean(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "user@example.com and me@mail.example.org",  # reserved for documentation
        "user [at] example.com. Then me (at) mail [dot] example [dot] org, or you {AT} Example.NET",
        "logo [at] 2x.png, someone (at) my.localhost, git [at] github.com",
        "git@github.com:puna/puna.git",
        "postgresql://scott:tiger@db.host.com/test",
        "logo@2x.png", "@pytest.mark.slow", "a @ b", "someone@localhost", "x@y",
        "version 1.2.3.4 and v10.200.30.4", "release 2.0.36.1", "pip install x==115.190.3.44",
        "10.0.0.1, 192.168.1.254, 127.0.0.1, 203.0.113.9, 255.255.255.0, 0.0.0.0",
        "1.2.3.4.5", "section 4.5.6.7", "12:30:45", "::1", "fe80::1", "std::vector", "a::b::c",
        "2024-05-01 10:20:30.123456", "2012-2024", "between 1990-2020", "01.02.2003", "call 1990-2000",
        "ISBN 978-3-16-148410-0", "ISSN 1234-5678", "DOI 10.1000/182", "arXiv:1706.03762",
        "x = 4111111111111112", "0x41111111", "1234567890123456", "0000000000000000", "1609459200000",
        "GB82 WEST 1234 5698 7654 33", "DE8937040044053201300", "ABCD1234",
        "000-12-3456, 666-12-3456, 900-12-3456, 123-00-4567, 123-45-0000",
        "550e8400-e29b-41d4-a716-446655440000", "123-456-7890-1234", "call (202) 555-0134",
        "3.14159265358979", "1,234,567,890", "$415-867-5309", "id=415-867-5309", "/415-867-5309/",
        "table 120 340 5600 780 9000 120", "e = 2.718281828, call f(1234567)",
    ],
)  # fmt: skip
def test_left_alone(text):
    assert clean(text) == text


PIECES = [
    *"0123456789", *"0123456789", *" .-/()+:@,x\n", "a@b.com", "é", "١٢", "\U0001d7d8", "DE89", "GB29 ", "4111 1111", "2001:db8:", "8.8.", "(at)", "[DOT]",
    "tel ", "o'", "10 Downing Street", "BP ", "rue ", "+49", "00", "078-05-", "x.y", "word", "_", "[at]",
]  # fmt: skip


@settings(max_examples=600, deadline=None)
@given(st.lists(st.sampled_from(PIECES), max_size=40).map("".join))
def test_a_search_that_is_spared_would_have_found_nothing(text):
    seen = hints_of(text)
    assert bool(seen & Hint.HIDDEN_AT) == (re.search(r"[\[({]at[\])}]", text, re.IGNORECASE) is not None)
    for entity, finder in FINDERS.items():
        assert (list(finder(text, seen)) if seen & NEEDED[entity] else []) == list(finder(text))
    for pattern, needed, _, _ in personal.PHONE_FORMS:
        assert seen & needed or not pattern.search(text)
    assert seen & Hint.NUMBERS or not personal.NUMBERS.search(text)
    assert [m.span() for m in personal._around("@", personal.EMAIL, text)] == [m.span() for m in personal.EMAIL.finditer(text)]


STREET_PIECES = [
    "12", "221B", "7 a", "12-14a", "5", " ", " ", " ", ", ", ",", "\n", ".", "(", "é", "٣", "ǅ", "10115 Berlin", "75002 Paris", "N. ", "NW ", "Main ", "of ", "the ", "5th ",
    "Street", "Ave", "Broadway", "Straße", "Hauptstraße ", "Alte Gasse ", "storgatan ", "str. ", "Am ", "An der ", "Markt ", "Unter den ", "Linden ", "P.O. Box ", "Postfach ",
    "bis ", "ter, ", "rue ", "place ", "allée ", "de ", "la ", "l'", "Paix", "Calle", "Calle ", "C/ ", "C/", "Avda. ", "Via ", "dei ", "Praça ", "do ", "Augusta", "n.º ", "nº", "n° ",
    "Address: ", "tel ", "+49 30 1234567", "a@b.com", "x" * 40,
]  # fmt: skip


@settings(max_examples=1500, deadline=None)
@given(st.lists(st.sampled_from(STREET_PIECES), max_size=16).map("".join))
def test_an_address_stands_at_a_number_beside_a_word_of_addresses(text):
    assert hints_of(text) & Hint.STREET or not list(FINDERS["address"](text))


def test_the_forms_at_their_longest_are_seen():
    name = "É" + "ö" * 30
    for text in (
        f"Address: 12 a NW. {name} {name} {name} {name} Street", f"Address: 12-14a {' '.join([name] * 4)} Mews.", f"Address: 5 bis, boulevard de la {name}",
        f"Address: Carrera de la de {name} de {name} de {name} da {name}, n.º 5", f"Address: Praça{name} do {name}, nº5", f"Address: Unter den {name} {name[:20]} 5", f"Adresse: {name}vägen 5",
    ):  # fmt: skip
        assert [span.entity for span in FINDERS["address"](text)] == ["address"]
        assert hints_of(text) & Hint.STREET


def test_hints_of_texts_together_are_those_of_each():
    texts = ["".join(pieces) for pieces in itertools.permutations(["12", " Main Street", "@b.com", "+4", "00-12-3456"], 4)]
    column = pa.chunked_array([texts]).slice(7)
    together = hints(*buffers(column)).tolist()
    assert together == [hints_of(text) for text in texts[7:]]
    assert len(set(together)) > 10


PHONE_PIECES = [*"0123456789" * 3, *" .-/()+ext,:a#€_\n", "(212) 555-0199", "+49 30 ", "01 23 45 67 89", "1 800 ", "٣", "\U0001d7d8", " ext. 12", "x7", "tel "]


@settings(max_examples=600, deadline=None)
@given(st.lists(st.sampled_from(PHONE_PIECES), max_size=40).map("".join))
def test_stretches_hold_whatever_a_form_of_phone_numbers_finds_in_the_whole_text(text):
    stretches = phone_stretches(text)
    assert all(stop <= start for (_, stop), (start, _) in itertools.pairwise(stretches))
    for pattern in (personal.NATIONAL, *(form for form, *_ in personal.PHONE_FORMS)):
        whole = [m.span() for m in pattern.finditer(text) if sum(map(str.isdecimal, m[0])) >= 7]
        parts = [m.span() for m in personal._within(stretches, pattern, text) if sum(map(str.isdecimal, m[0])) >= 7]
        assert parts == whole


def test_addresses_of_any_length_are_found_around_their_sign():
    longest = f"{'a' * 41}.o'{'b' * 64}@{'.'.join(['c' * 63] * 6)}.{'d' * 24}"
    for text in (longest, f"{longest} {longest}", f"@@{longest}", f"{longest}@", f"a@{longest}", f"x@y {longest};{longest[1:]}"):
        assert [m.span() for m in personal._around("@", personal.EMAIL, text)] == [m.span() for m in personal.EMAIL.finditer(text)]
    assert personal.EMAIL.fullmatch(longest)


def test_luhn_against_published_numbers():
    for good in ("4111111111111111", "5555555555554444", "378282246310005", "6011111111111117", "30569309025904", "3530111333300000"):
        assert luhn(good)
        assert not any(luhn(good[:-1] + str(d)) for d in range(10) if str(d) != good[-1])


@given(st.text(alphabet="0123456789 .-+()@:/abcdefGB\n", max_size=80))
@settings(max_examples=300, deadline=None)
def test_spans_are_ordered_apart_and_masking_keeps_the_rest(text):
    spans = find(text, ALL)
    assert all(a.stop <= b.start for a, b in itertools.pairwise(spans))
    rest, at = [], 0
    for span in spans:
        rest.append(text[at : span.start])
        at = span.stop
    out = mask(text, spans)
    for piece in rest:
        assert piece in out
    assert out.endswith(text[at:])


def test_a_page_of_numbers_is_searched_to_its_end():
    """A search that restarts at each number would take hours."""
    text = "1234567 " * 20_000 + "A-" * 20_000 + "Am Rue A, 1 " * 5_000 + "1 A " * 9_000 + "+1 2 3 " * 5_000 + "a@" * 20_000 + "1.2.3." * 20_000 + "ab:" * 20_000 + "º1" * 50_000 + "A" * 50_000 + " 1A" * 20_000 + "@" + "a" * 50_000
    assert find(text, ALL) == []


def test_the_stage_masks_counts_and_spares_numbers_in_code(tmp_path):
    store = Store.open(tmp_path)
    when = datetime(2024, 1, 1, tzinfo=UTC)
    texts = [
        ("web", "jane@company.com or joe@company.com, tel 415-867-5309"),
        ("code", "IP = '93.184.216.34'  # jane@company.com"),
        ("web", "nothing"),
    ]
    rows = [
        {"id": str(n), "url": f"https://x.com/{n}", "fetched_at": when, "source": source, "title": "t", "text": text}
        for n, (source, text) in enumerate(texts)
    ]
    documents = store.import_table("documents", pa.Table.from_pylist(rows))
    made = execute(pii, PiiConfig(), {"documents": documents}, store)
    assert made.read()["text"].to_pylist() == ["<EMAIL> or <EMAIL>, tel <PHONE>", "IP = '93.184.216.34'  # <EMAIL>", "nothing"]
    assert [(r["id"], r["name"], r["value"]) for r in made.read("scores").to_pylist()] == [
        ("0", "masked_email", 2.0),
        ("0", "masked_phone", 1.0),
        ("1", "masked_email", 1.0),
    ]
    only = execute(pii, PiiConfig(entities=("phone",)), {"documents": documents}, store)
    assert only.read()["text"][0].as_py() == "jane@company.com or joe@company.com, tel <PHONE>"


# --- labelled sentences ----------------------------------------------------------------------------------

PIECE = re.compile(r"⟦(\w+):([^⟧]*)⟧")


def labelled():
    """Return the texts of `pii_sentences.txt` with the set of their spans (start, stop, entity)."""
    found = []
    for line in (Path(__file__).parent / "pii_sentences.txt").read_text(encoding="utf-8").splitlines():
        if line.startswith("#"):
            continue
        text, spans, at, line = "", set(), 0, line.replace("\\n", "\n")
        for match in PIECE.finditer(line):
            text += line[at : match.start()]
            spans.add((len(text), len(text) + len(match[2]), match[1]))
            text += match[2]
            at = match.end()
        found.append((text + line[at:], spans))
    return found


def test_span_f1_on_labelled_sentences():
    texts = labelled()
    assert len(texts) >= 150
    assert sum(not spans for _, spans in texts) >= 60  # hard negatives
    right, found, wanted = Counter(), Counter(), Counter()
    for text, spans in texts:
        got = set(map(tuple, find(text, ALL)))
        for counts, some in ((right, got & spans), (found, got), (wanted, spans)):
            counts.update(entity for _, _, entity in some)
    f1 = {entity: 2 * right[entity] / (found[entity] + wanted[entity]) for entity in ALL}
    assert min(wanted.values()) >= 5
    assert min(f1.values()) >= 0.98, f1


def test_a_document_that_cannot_be_searched_is_dropped_by_name(tmp_path, make_documents, monkeypatch):
    def broken(text, entities, seen):
        if text == "b@c.com":
            raise RecursionError("too deep")
        return find(text, entities, seen)

    monkeypatch.setattr(module, "find", broken)
    store = Store.open(tmp_path)
    made = execute(pii, PiiConfig(), {"documents": make_documents(store, [("a", "web", "a"), ("b", "web", "b@c.com")])}, store)
    assert made.read()["id"].to_pylist() == ["a"]
    assert [(r["id"], r["rule"], r["detail"]) for r in made.read("dropped").to_pylist()] == [("b", "pii_failed", "RecursionError: too deep")]


@pytest.mark.parametrize("error", [OSError, ImportError])
def test_no_document_is_dropped_for_a_fault_of_the_machine(tmp_path, make_documents, monkeypatch, error):
    monkeypatch.setattr(module, "find", Mock(side_effect=error("no such file")))
    store = Store.open(tmp_path)
    with pytest.raises(Exception, match="no such file"):
        execute(pii, PiiConfig(), {"documents": make_documents(store, [("b", "web", "b@c.com")])}, store)


def test_bytes_that_are_no_text_are_dropped_by_name_and_the_others_are_searched():
    texts = [b"a@b.org", b"caf\xe9 c@d.org", b"none"]
    bounds = np.cumsum([0, *map(len, texts)], dtype=np.int32)
    column = pa.StringArray.from_buffers(len(texts), pa.py_buffer(bounds), pa.py_buffer(b"".join(texts)))
    made = module._mask(pa.table({"id": ["a", "b", "c"], "source": ["web"] * 3, "text": column}), PiiConfig())
    assert made["documents"].select(["id", "text"]).to_pylist() == [{"id": "a", "text": "<EMAIL>"}, {"id": "c", "text": "none"}]
    assert [(row["id"], row["rule"]) for row in made["dropped"].to_pylist()] == [("b", "pii_failed")]
    assert "UnicodeDecodeError" in made["dropped"]["detail"][0].as_py()


def test_a_document_with_too_much_of_a_kind_is_dropped(tmp_path):
    store = Store.open(tmp_path)
    texts = ["SSN 457-55-5462, a@mail.com", "a@mail.com b@mail.com", "a@mail.com b@mail.com c@mail.com", "nobody"]
    rows = [
        {"id": str(n), "url": f"https://x.com/{n}", "fetched_at": datetime(2024, 1, 1, tzinfo=UTC), "source": "web", "title": None, "text": text}
        for n, text in enumerate(texts)
    ]
    documents = store.import_table("documents", pa.Table.from_pylist(rows))
    made = execute(pii, PiiConfig(entities=("email",), drop={"ssn": 1, "email": 3}), {"documents": documents}, store)
    assert made.read()["text"].to_pylist() == ["<EMAIL> <EMAIL>", "nobody"]
    dropped = [(row["id"], row["rule"], row["value"], row["threshold"]) for row in made.read("dropped").to_pylist()]
    assert dropped == [("0", "pii_ssn", 1.0, 1.0), ("2", "pii_email", 3.0, 3.0)]
    assert {row["id"] for row in made.read("scores").to_pylist()} == {"1"}


PHONE_PIECES = ("+", "00", "1", "2", "34", "567", "8901", "+49", "+1 ", "(12)", " ", "-", ".", "/", "x", "a", " ext. 5", "\n")


@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from(PHONE_PIECES), min_size=3, max_size=14).map("".join))
def test_international_numbers_are_those_of_groups_of_two_to_five_digits(text):
    # The same numbers as groups of two to five digits, with or without separators: simple, but slow on long rows of digits.
    body = r"(?:\+[1-9]\d{0,2}[ .\-/]?|00[1-9]\d{0,2}[ \-/])(?:\(\d{1,4}\)[ .\-/]?)?\d{1,5}(?:[ .\-/]?\d{2,5}){1,5}"
    pieces = re.compile(rf"(?<![\w./=+-]){body}{personal.EXTENSION}{personal.END}")

    def spans(pattern):
        return [m.span() for m in pattern.finditer(text) if 8 <= sum(map(str.isdecimal, m[0])) <= 20]

    assert spans(personal.INTERNATIONAL) == spans(pieces)


def test_rows_of_digits_that_are_no_number_take_no_time():
    # Takes a tenth of a second; trying each number in all its groupings took a minute and a half.
    assert not list(FINDERS["phone"](("+" + "1" * 41 + "x ") * 23_000))


def test_streets_that_repeat_are_looked_around_once():
    looked = []
    for times in (500, 1000):
        personal._has_contact.cache_clear()
        assert not list(FINDERS["address"]("call 12 Main Street\n" * times))
        looked.append(personal._has_contact.cache_info().misses)
    assert looked[0] == looked[1] < 40
    personal._has_contact.cache_clear()
    assert not list(FINDERS["address"]("".join(f"{number} Main Street\n" for number in range(10, 1000))))
    assert personal._has_contact.cache_info().misses == 0  # nothing in the text gives a way to contact anybody


@pytest.mark.parametrize(
    "text",
    [
        "12 Main Street," + " " * 20_000,  # spaces distributed around a comma
        "12 Main Street," + " \t" * 10_000 + "\n" + "\t " * 10_000,
        f"12 Main Street, {'A-' * 29}a, {'B-' * 29}b, {'C-' * 29}c, ",  # hyphens within a name or between two names
        f"Am {'A-' * 28}a 1x\n{'A-' * 28}weg 1_x\n" * 2_500,
    ],
    ids=["blanks", "lines", "towns", "streets"],
)
def test_blanks_and_hyphens_beside_a_street_are_cut_in_one_way(text):
    with stopped_if_quadratic():  # trying all ways took from 40 seconds to years
        assert find(text, ("address",)) == []


def test_spans_of_a_kind_between_those_of_another_are_put_in_order_at_once(monkeypatch):
    count = 500_000
    for entity, start in (("email", 1), ("ip_address", 2), ("address", 0)):  # the last span overlaps both
        spans = [personal.Span(at + start, at + start + 1 + (start == 0), entity) for at in range(0, 3 * count, 3)]
        monkeypatch.setitem(personal.FINDERS, entity, lambda _text, _seen, spans=spans: iter(spans))
    with stopped_if_quadratic():  # inserting each span in its place took half a minute
        spans = find(" " * 3 * count, ("email", "ip_address", "address"), personal.EVERY)
    assert [span[:2] for span in spans] == [(at, at + 1) for at in range(3 * count) if at % 3]


def test_a_text_too_long_to_be_searched_is_dropped(tmp_path, make_documents):
    store = Store.open(tmp_path)
    given_ = {"documents": make_documents(store, [("a", "web", "é" * 512), ("b", "web", "é" * 512 + ".")])}
    made = execute(pii, PiiConfig(max_text_bytes=1024), given_, store)
    assert made.read()["id"].to_pylist() == ["a"]
    assert [(r["id"], r["rule"], r["value"], r["threshold"]) for r in made.read("dropped").to_pylist()] == [("b", "pii_failed", 1025.0, 1024.0)]


@given(st.lists(st.sampled_from(["@", "a", "x.y", "-", "+", "%", ".com", ".", " ", "O'B", "'", "ü", "1", "@@", "a@b.de", "J.Doe@site.co.uk", "//u:p@h.io"]), max_size=40))
def test_addresses_looked_for_between_two_signs_are_all_there_are(pieces: list[str]) -> None:
    text = "".join(pieces)
    assert [m.span() for m in personal._around("@", personal.EMAIL, text)] == [m.span() for m in personal.EMAIL.finditer(text)]
