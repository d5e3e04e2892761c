"""Pages to text: content, encodings, bounds and unreadable pages."""

from __future__ import annotations

import json
import random
import re
import sys
from datetime import UTC, datetime
from html import escape
from itertools import pairwise
from pathlib import Path

import ftfy.fixes
import numpy as np
import pyarrow as pa
import pytest

from puna.models.extraction import parse
from puna.models.extraction.clean import DOUBTFUL, MISREAD, clean_text, clean_texts, decode, plain, repair
from puna.models.extraction.parse import MAX_OPTIONS
from puna.models.extraction.scan import read_pages
from puna.models.untrusted.bounded_process import Process
from puna.stages.contract import execute
from puna.stages.curate import extract as extract_module
from puna.stages.curate.extract import ExtractConfig, Unreadable, extract, page_text
from puna.storage import Store

CONFIG = ExtractConfig()
WORD = re.compile(r"\w+")
CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f\u00ad\u200b\u2060\ufeff\ufffe\uffff]")
PARAGRAPH = "<p>This is a paragraph with enough words in it to be taken for the content of the page, and a few more.</p>"


def test_the_main_content_stays_and_the_frame_of_the_page_goes():
    html = f"""<html><head><title>A &amp; B
      news</title><script>var x = "scripted"</script><style>.a{{}}</style></head><body>
      <nav><ul><li><a href=/>Home</a></li><li><a href=/about>About us</a></li></ul></nav>
      <main><article><h1>Headline</h1>{PARAGRAPH * 3}<!-- a remark --></article></main>
      <footer>All rights reserved. <a href=/imprint>Imprint</a></footer></body></html>"""
    title, text = page_text(html.encode(), "text/html", None, CONFIG)
    assert title == "A & B news"
    assert text.endswith("This is a paragraph with enough words in it to be taken for the content of the page, and a few more.")
    assert text.count("This is a paragraph") == 3
    for gone in ("About us", "Imprint", "scripted", "remark"):
        assert gone not in text


def test_code_tables_and_formulas_keep_their_structure():
    html = f"""<main><h1>Of functions</h1>{PARAGRAPH}<pre>def f(x):
    if x:

        return  1
</pre>{PARAGRAPH}<table><tr><td>a</td><td>b</td></tr><tr><td>c</td><td>d</td></tr></table>
      <p>The formula <img class="math" src="x.png" alt="\\frac{{a}}{{b}}"> and <img src=y.png alt="a picture of a llama">
      <script type="math/tex">E = mc^2</script> are here.<a class="headerlink" href="#x">¶</a></p>{PARAGRAPH}</main>"""
    _, text = page_text(html.encode(), "text/html", None, CONFIG)
    assert "def f(x):\n    if x:\n\n        return  1\n" in text
    assert "The formula \\frac{a}{b} and" in text
    assert "E = mc^2" in text
    assert "llama" not in text  # alternative texts of images are not content
    assert "¶" not in text


def test_text_and_code_pass_with_their_white_space():
    source = "\ufeffdef f():\r\n\treturn 1   \n\n\n\nx = '\x07'\n"
    title, text = page_text(source.encode(), "text/x-python", "utf-8", CONFIG)
    assert (title, text) == (None, "def f():\n\treturn 1   \n\n\n\nx = ''\n")


@pytest.mark.parametrize(
    ("body", "media", "rule"),
    [
        (b"", "text/html", "extract_empty"),
        (b"<html><script>x()</script></html>", "text/html", "extract_empty"),
        (b" \n ", "text/plain", "extract_empty"),
        (b"%PDF", "application/pdf", "extract_content_type"),
        (b"\0\1\2" * 99, "text/plain", "extract_binary"),
        (b"<p>" + b"x" * 3000, "text/html", "extract_too_large"),
        (b"<div>" * 2000 + b"x", "text/html", "extract_too_deep"),
        (b"<br>x" * 2000, "text/html", "extract_too_many_blocks"),
    ],
)
def test_what_gives_no_text_says_why(body, media, rule):
    config = ExtractConfig(max_body_bytes=2048 if rule == "extract_too_large" else 1 << 20, max_blocks=1000)
    with pytest.raises(Unreadable) as why:
        page_text(body, media, None, config)
    assert why.value.rule == rule


GERMAN = "Über die Brücke führt ein schöner Weg, den größten Teil davon säumen Bäume. " * 3
JAPANESE = "これは文字コードの検出をテストするための日本語の文章です。" * 3


@pytest.mark.parametrize(
    ("body", "charset", "expected"),
    [
        (GERMAN.encode(), None, GERMAN),
        (GERMAN.encode(), "iso-8859-1", GERMAN),  # servers often declare this by default; valid UTF-8 does not occur by accident
        (GERMAN.encode("latin-1"), "iso-8859-1", GERMAN),
        (GERMAN.encode("latin-1"), "utf-8", GERMAN),
        (GERMAN.encode("latin-1"), None, GERMAN),
        (GERMAN.encode("latin-1"), "no-such-charset", GERMAN),
        (b"\xef\xbb\xbf" + GERMAN.encode(), "latin-1", GERMAN),
        (b"\xff\xfe" + GERMAN.encode("utf-16-le"), None, GERMAN),
        (b"\xfe\xff" + GERMAN.encode("utf-16-be"), "utf-8", GERMAN),
        (GERMAN.encode("utf-16-le"), "utf-16le", GERMAN),
        (JAPANESE.encode("shift_jis"), "shift_jis", JAPANESE),
        (JAPANESE.encode("shift_jis"), None, JAPANESE),
        (JAPANESE.encode("euc_jp"), "EUC-JP", JAPANESE),
        (JAPANESE.encode("iso2022_jp"), "iso-2022-jp", JAPANESE),
        (JAPANESE.encode("iso2022_jp"), None, JAPANESE),
        ("caf\u00e9 \u2013 na\u00efve".encode("windows-1252"), "iso-8859-1", "caf\u00e9 \u2013 na\u00efve"),
    ],
)
def test_character_sets(body, charset, expected):
    assert decode(body, charset, html=False) == expected


POLISH = "Rada postanowiła w zeszłym tygodniu, że stary most na rzece zostanie naprawiony. " * 8
VIETNAMESE = "Hội đồng đã quyết định tuần trước rằng cây cầu cũ bắc qua sông sẽ được sửa chữa. " * 4
RUSSIAN = "Совет решил на прошлой неделе, что старый мост через реку будет отремонтирован. " * 4


@pytest.mark.parametrize("charset", [None, "utf-8", "iso-8859-1"])
@pytest.mark.parametrize("html", [False, True])
@pytest.mark.parametrize(
    ("broken", "meant"),
    [(b"caf\xe9 cr\xe9\xe9e", "café créée"), (b"\x93so\x94", "“so”"), (b"\xe1\xba x", "\ufffd x"), (b"x\x81", "x\ufffd")],
)
@pytest.mark.parametrize("text", [POLISH, VIETNAMESE, RUSSIAN, JAPANESE])
def test_some_broken_bytes_leave_the_rest_of_a_page_in_utf_8(text, broken, meant, html, charset):
    assert decode(f"{text}\n".encode() + broken + f"\n{text}".encode(), charset, html=html) == f"{text}\n{meant}\n{text}"


def test_a_page_that_ends_inside_a_character_is_in_utf_8():
    for cut in (1, 2):
        assert decode(JAPANESE.encode()[:-cut], "utf-8", html=True) == JAPANESE[:-1] + "\ufffd"


@pytest.mark.parametrize(
    ("text", "encoding"),
    [(POLISH, "iso-8859-2"), (POLISH, "cp1250"), (RUSSIAN, "windows-1251"), (RUSSIAN, "koi8-r"), (RUSSIAN, "cp866"),
     (JAPANESE, "euc-jp"), (JAPANESE, "shift_jis"), ("委员会上周决定修理河上的旧桥。" * 9, "gb18030"), ("委員會上週決定修理河上的舊橋。" * 9, "big5"),
     ("위원회는 지난주에 강 위의 오래된 다리를 수리하기로 결정했다. " * 4, "euc-kr"), ("สภาตัดสินใจเมื่อสัปดาห์ที่แล้ว" * 6, "tis-620")],
)  # fmt: skip
def test_other_encodings_are_no_broken_utf_8(text, encoding):
    assert decode(text.encode(encoding), encoding, html=False) == text


@pytest.mark.parametrize("mark", ["\r\n", "\r", "\v", "\f"])
def test_every_kind_of_line_end_parts_words(mark):
    assert page_text(f"one{mark}two".encode(), "text/plain", "utf-8", CONFIG).text == "one\ntwo"


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be", "utf-32"])
def test_pages_in_wide_characters_need_not_say_so(encoding):
    html = f"<!doctype html><title>x</title><p>{GERMAN}</p>"
    assert decode(html.encode(encoding), None, html=True).lstrip("\ufeff") == html


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be", "utf-32-le", "utf-32-be"])
def test_a_text_in_wide_characters_is_no_binary(encoding):
    assert page_text(f"\ufeff{GERMAN}".encode(encoding), "text/plain", None, CONFIG) == page_text(GERMAN.encode(), "text/plain", None, CONFIG)


def test_a_server_that_calls_bytes_utf_16_is_not_believed():
    html = f"<!doctype html><title>x</title><p>{GERMAN}</p>"
    assert decode(html.encode(), "utf-16", html=True) == decode(html.encode(), "utf-16le", html=False) == html


def test_the_page_names_its_character_set():
    html = '<html><head><meta charset="windows-1251"></head><body>' + "<p>Съешь ещё этих мягких французских булок, да выпей чаю.</p>" * 5
    assert "французских" in decode(html.encode("windows-1251"), None, html=True)


KOREAN = "위원회는 지난주에 강 위의 오래된 다리를 수리하기로 결정했다. " * 4


@pytest.mark.parametrize(
    ("text", "label", "encoding"),
    [("①髙﨑 " + JAPANESE, "shift_jis", "cp932"), ("똠방각하 " + KOREAN, "euc-kr", "cp949"), ("嘅㗎喺啲 委員會上週決定修理河上的舊橋。", "big5", "big5hkscs")],
)
def test_a_character_that_only_browsers_know_costs_no_page(text, label, encoding):
    assert decode(text.encode(encoding), label, html=False) == text
    assert decode(f"<meta charset={label}><p>{text}".encode(encoding), None, html=True).endswith(text)


def test_a_broken_byte_costs_one_character():
    for encoding, text in (("shift_jis", JAPANESE), ("euc_jp", JAPANESE), ("euc_kr", KOREAN)):
        assert decode(text.encode(encoding) + b"\x81 end", encoding, html=False) == f"{text}\ufffd end"


def test_korean_is_detected():
    assert decode(KOREAN.encode("euc_kr"), None, html=True) == KOREAN


def test_a_header_that_does_not_fit_the_bytes_is_not_believed():
    assert decode(RUSSIAN.encode("koi8-r"), "euc-jp", html=False) == RUSSIAN


def test_text_that_cannot_be_decoded_is_dropped():
    with pytest.raises(Unreadable) as why:
        page_text("\ufffd\ufffd readable \ufffd".encode(), "text/plain", "utf-8", CONFIG)
    assert why.value.rule == "extract_encoding"


def test_control_characters_and_runs_of_blank_lines_go():
    marked = PARAGRAPH.replace("paragraph", "para\u200bg\u00adra\x07ph")
    _, text = page_text(f"<main>{PARAGRAPH}{marked}<br><br><br><br>{PARAGRAPH}</main>".encode(), "text/html", None, CONFIG)
    assert text.count("This is a paragraph with enough words") == 3
    assert "\n\n\n" not in text


SOUND = (
    "Œuvre à prix réduit : « l’été » coûte 5 € — ça alors…", "A MAÇÃ DO JOÃO É ÓTIMA, NÃO É?", "Các bạn có khỏe không? Ồ, tôi khỏe.",
    "Zażółć gęślą jaźń – „cytat”", "Съешь ещё этих мягких французских булок", "Рішення № 5 — «Січень»", "ΑΘΗΝΑ: Ά, τι ωραία μέρα…",
    "今日は良い天気ですね。", "AKPEKPEGÃ LE GBEƑÃ ƉEM", "Þetta er ágætt, sagði Ævar", "x² ± ½ × 3 ÷ 2° → ∞", "naïve café №1 ™ © ®", "ครับ ภาษาไทย",
    # Capitals and quotation marks that look like misread Cyrillic, or like a misread letter.
    "RÁÐHERRANN SAGÐI AÐ BRÚIN VÆRI „REIÐUBÚIÐ“.", "OLMOOŠVUOIGÂDVUOĐÂI ALMOSMAAILMLÂŠ JULGÁŠTUS",
)  # fmt: skip


@pytest.mark.parametrize("text", SOUND)
def test_sound_text_stays_as_it_is(text):
    assert repair(text) == text


GERMAN, RUSSIAN = "Das Café schließt – «à bientôt», sagte Zoë.", "Съешь ещё этих булок"


@pytest.mark.parametrize(
    ("text", "wrong"),
    [(GERMAN, "latin-1"), (GERMAN, "cp1252"), (GERMAN, "cp1250"), (GERMAN, "macroman"), (GERMAN, "cp437"), (RUSSIAN, "latin-1"), (RUSSIAN, "cp1251")],
)
def test_text_that_was_decoded_wrongly_is_decoded_right(text, wrong):
    spoilt = text.encode().decode(wrong)
    assert repair(f"{SOUND[0]}\n{spoilt}\n{SOUND[7]}") == f"{SOUND[0]}\n{text}\n{SOUND[7]}"
    _, found = page_text(f"<main>{PARAGRAPH}<p>{spoilt}</p>{PARAGRAPH}</main>".encode(), "text/html", None, CONFIG)
    assert text in found


def test_c1_controls_are_what_windows_meant_or_go():
    assert repair("It\x92s 5\x80 \x81here\x85") == "It’s 5€ here…"
    every = "".join(map(chr, range(0x80, 0xA0)))
    assert repair(every) == "".join(c for c in ftfy.fixes.fix_c1_controls(every) if c not in every)


N = 40_000
NAMES = " ".join(f"a{i}" for i in range(95))
HOSTILE = {
    "end tags of nothing": "<x></y>" * N + "<hr>" * N,
    "end tags across a block": "<x><div></x>" * N + "<hr>" * N,
    "a slash in a drawing's page": "<svg><foreignObject>" + "<x/>" * N + "<hr>" * N,
    "a slash after a closed drawing": "<svg/>" + "<x/>" * N + "<hr>" * N,
    "a drawing in a list": "<select><svg></select>" + "<x/>" * N + "<hr>" * N,
    "cells in a drawing": "<svg>" + "<td>" * N + "</zz>" * N,
    "rows of no table": "<rt>" * N + "<hr>" * N,
    "items of items": "<li><dd>" * N + "<hr>" * N,
    "a control character": '<p a=\x01">' + "<div>" * N + "<hr>" * N,
    "end tags in text": "<div><svg><![CDATA[></svg></div>]]></svg>" * N + "<hr>" * N,
    "options that are no options": '<select>' + '<option a="<">' * N,
    "attributes of one element": "".join(f"<body a{i}>" for i in range(N)),
    "formats that no end tag closes": "".join(f"<b {k}></i>" for k in range(N // 10)) + "<p>x" * N,
    "formats in a list": "<p>" + "".join(f"<b {k}><select></b></select>" for k in range(N // 10)) + "</p>" + "<p>x" * N,
    "formats outside a cell": "".join(f"<table><b {k}><td></b></table>" for k in range(N // 10)) + "<p>x" * N,
    "formats with many attributes": "".join(f"<b {NAMES} k={i}>" for i in range(900)) + "".join(f"<b {NAMES} j={i}></b>" for i in range(2000)),
    "formats with long attributes": f"<p><b a='{'x' * 100_000}'>" + "<p>x" * (N // 4),
}


@pytest.mark.parametrize("html", HOSTILE.values(), ids=HOSTILE)
def test_a_page_that_would_hang_the_parser_is_stopped(html, monkeypatch):
    """The parser takes 3 s to minutes for each page, or gigabytes of memory; all grow with the square of the page's size."""
    monkeypatch.setattr(parse, "SECONDS", 0.3)
    with pytest.raises(Unreadable) as why:
        page_text(html.encode(), "text/html", None, CONFIG)
    assert why.value.rule in ("extract_too_costly", "extract_failed", "extract_too_deep")


def test_a_page_that_is_parsed_apart_has_the_same_tree():
    for html in (f"<title>a &amp; ü</title><main>{PARAGRAPH * 3000}</main>", "<b>\ufeff<table><td><pre>x = 1" + "<p>" * 20, ""):
        assert parse._parse_apart(html.encode(), True) == parse._parse(html.encode(), True)


@pytest.mark.parametrize(("problem", "message"), [
    (lambda patch: patch.setattr(parse, "_process", Process("string")), "the process of string did not start"),
    (lambda patch: patch.setattr(extract_module, "load", lambda: Path("/no/weights").read_bytes()), "No such file.*weights"),
    (lambda patch: patch.setitem(sys.modules, "resiliparse.parse.html", None), "resiliparse.parse.html"),
], ids=["no process", "no weights", "no parser"])  # fmt: skip
def test_no_page_is_dropped_for_a_fault_of_the_machine(problem, message, monkeypatch):
    """One page needs the parser's separate process; beside it is a good page."""
    problem(monkeypatch)
    bodies = [b"<p>" + b"<b x><table>" * 2000, PARAGRAPH.encode()]
    columns = {"id": ["0", "1"], "url": ["a", "b"], "fetched_at": [None, None], "source": ["web", "web"], "content_type": ["text/html"] * 2}
    with pytest.raises((OSError, ImportError), match=message):
        extract_module._extract(pa.table({**columns, "charset": ["utf-8"] * 2, "body": bodies}), CONFIG)


def test_ordinary_faults_of_pages_are_no_attack():
    drawing = "<svg>" + "<path d='M 0 0'/>" * 5000 + "</svg>"
    mixed = "<div><b>some <i>words</b></i><span><p>x</div>" * 3000
    tables = "<font size=2><table><tr><td><b>x</b><td>y</font></table>" * 300
    for html in (drawing, mixed, tables):
        assert "This is a paragraph" in page_text(f"<main>{PARAGRAPH * 3}</main>{html}".encode(), "text/html", None, CONFIG)[1]


@pytest.mark.parametrize("option", ["<option value={0}>Town {0}</option>", "<OPTION>Town {0}", "<optgroup label=x>Town {0}"])
def test_a_page_keeps_its_text_and_not_its_many_options(option):
    towns = "".join(map(option.format, range(MAX_OPTIONS + 1)))
    html = f"<main>{PARAGRAPH}<select name=town>{towns}</select>{PARAGRAPH}</main>"
    _, text = page_text(html.encode(), "text/html", None, CONFIG)
    assert text.count("This is a paragraph") == 2 and "Town" not in text


def test_a_page_that_raises_anything_is_dropped_and_the_others_go_on(tmp_path, monkeypatch):
    def failing(body, *rest, **more):
        if b"odd" in body:
            raise KeyError("odd")
        return decode(body, *rest, **more)

    monkeypatch.setattr("puna.stages.curate.extract.decode", failing)
    when = datetime(2024, 1, 1, tzinfo=UTC)
    rows = [
        {"id": f"{n:02d}", "url": f"https://x.org/{n}", "fetched_at": when, "content_type": "text/plain", "charset": "utf-8",
         "body": body, "source": "web"}
        for n, body in enumerate([b"a text", b"an odd one", b"another"])
    ]  # fmt: skip
    store = Store.open(tmp_path)
    made = execute(extract, CONFIG, {"pages": store.import_table("pages", pa.Table.from_pylist(rows))}, store)
    assert made.read()["id"].to_pylist() == ["00", "02"]
    assert [(r["id"], r["rule"], r["detail"]) for r in made.read("dropped").to_pylist()] == [
        ("01", "extract_failed", "https://x.org/1: KeyError: 'odd'")
    ]


def cleaned_by_patterns(text):
    """Return the result of `clean_text`, computed with regular expressions."""
    text = "\n".join(line.rstrip(" \t\u00a0") for line in CONTROLS.sub("", repair(text)).split("\n"))
    return re.sub(r"\n{3,}", "\n\n", text).strip("\n")


@pytest.mark.parametrize("seed", range(5))
def test_white_space_and_controls_go_from_the_ends_of_lines_and_texts(seed):
    pieces = ["a", "word", " ", "\t", "\n", "\n\n", "\u00a0", "\x00", "\r", "\x7f", "\u00ad", "\u200b", "\ufeff", "\uffff", "é", "à", "Ã", "©", "Ã©", "\x92",
              "Â", "»", "中", "\u3000", "𝄞", "\u2028", "\ufffd", "\x85"]  # fmt: skip
    choose = random.Random(seed)
    texts = ["".join(choose.choices(pieces, k=choose.randrange(12))) for _ in range(2000)]
    assert [clean_text(text) for text in texts] == [cleaned_by_patterns(text) for text in texts]
    assert [plain(text) for text in texts] == [CONTROLS.sub("", repair(text)) for text in texts]
    data = [text.encode() for text in texts]
    out, ends, doubts = clean_texts(np.frombuffer(b"".join(data), np.uint8), np.cumsum([0, *map(len, data)]))
    found = [out[a:z].tobytes().decode() for a, z in pairwise(ends)]
    for text, one, doubt in zip(texts, found, doubts, strict=True):
        if not doubt & MISREAD:
            assert (repair(text), one) == (text, cleaned_by_patterns(text))
        assert doubt & DOUBTFUL or (one.strip() and "\ufffd" not in one)
    assert {0, MISREAD, DOUBTFUL} <= set(doubts.tolist())


def site(seed):
    """Return pages of many kinds: small and large, in other encodings, empty, hostile, plain text."""
    choose = random.Random(seed)
    pieces = [PARAGRAPH, "<h2>A part</h2>", "<li><a href=/x>Elsewhere</a>", "<pre>x = 1\n\n\n  y </pre>", "<table><tr><td>1<td>2</table>",
              '<div class="comment">Thanks a lot!</div>', "<p>Ã©tÃ© caf\u00e9 \u2014 na\u00efve</p>", "<p>El perro y el gato.</p>", "<div>"]  # fmt: skip
    for _ in range(60):
        body = "".join(choose.choices(pieces, k=choose.choice([0, 1, 5, 40, 300])))
        name = choose.choice(["utf-8", "utf-8", "utf-8", "windows-1252", "utf-16"])
        yield body.encode(name, "replace"), choose.choice(["text/html"] * 5 + ["text/plain"]), choose.choice([name, None])
    yield b"<div>" * 2000, "text/html", None
    yield f"<main>{PARAGRAPH * 900}</main>".encode(), "text/html", None


def outcomes(rows, config):
    bodies, types, charsets = zip(*rows, strict=True)
    extracted = extract_module._extract_pages(pa.array(bodies, pa.binary()), types, charsets, config)
    return [(type(one), str(one)) if isinstance(one, Exception) else one for one in extracted]


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("config", [{}, {"headline": True, "max_blocks": 1000}], ids=str)
def test_pages_give_the_same_text_whatever_they_are_read_with(monkeypatch, seed, config):
    rows, settings = list(site(seed)), ExtractConfig(**config)
    together = outcomes(rows, settings)
    assert {one[0] for one in together if type(one) is tuple} == {Unreadable} and sum(hasattr(one, "text") for one in together) > 30
    assert outcomes(rows[::-1], settings)[::-1] == together
    assert [one for row in rows for one in outcomes([row], settings)] == together
    monkeypatch.setattr(extract_module, "TOGETHER", 5000)
    assert outcomes(rows, settings) == together


@pytest.mark.parametrize("seed", range(3))
def test_damaged_pages_give_the_same_text_in_any_company(monkeypatch, seed):
    """Pages that are truncated, have 0 to 65 bytes, or contain other bytes; in groups of any composition."""
    choose = random.Random(seed)
    rows = []
    for body, media, charset in site(seed):
        body = bytearray(body[: choose.choice([len(body), choose.randrange(66), choose.randrange(len(body) + 1)])])
        for _ in range(choose.choice([0, 1, 50]) if body else 0):
            body[choose.randrange(len(body))] = choose.choice([0, 10, 34, 38, 47, 60, 62, choose.randrange(256)])
        rows.append((bytes(body), media, charset))
    alone = [one for row in rows for one in outcomes([row], CONFIG)]
    assert len(set(map(type, alone))) == 2  # both texts and errors
    for size in (1, 300, 3000, 1 << 30):
        monkeypatch.setattr(extract_module, "TOGETHER", size)
        order = choose.sample(range(len(rows)), len(rows))
        assert outcomes([rows[n] for n in order], CONFIG) == [alone[n] for n in order]


def test_a_page_that_spoils_the_reading_of_others_fails_alone(monkeypatch):
    rows = [(f"<main>{PARAGRAPH}<p>{name}".encode(), "text/html", None) for name in ("one", "odd", "two")]
    expected = outcomes(rows, CONFIG)

    def failing(htmls, *bounds):
        if any(b"odd" in html for html in htmls):
            raise MemoryError("odd")
        return read_pages(htmls, *bounds)

    monkeypatch.setattr(extract_module, "read_pages", failing)
    assert outcomes(rows, CONFIG) == [expected[0], (MemoryError, "odd"), expected[2]]


def test_the_stage_keeps_or_drops_every_page(tmp_path):
    when = datetime(2024, 1, 1, tzinfo=UTC)
    bodies = [PARAGRAPH.encode(), b"", b"plain"]
    rows = [
        {
            "id": str(n),
            "url": f"https://a.example.net/{n}",
            "fetched_at": when,
            "source": "s",
            "content_type": media,
            "charset": None,
            "body": body,
        }
        for n, (media, body) in enumerate(zip(["text/html", "text/html", "text/plain"], bodies, strict=True))
    ]
    store = Store.open(tmp_path)
    made = execute(extract, CONFIG, {"pages": store.import_table("pages", pa.Table.from_pylist(rows))}, store)
    assert made.read()["id"].to_pylist() == ["0", "2"]
    (gone,) = made.read("dropped").to_pylist()
    assert (gone["id"], gone["rule"]) == ("1", "extract_empty")
    assert "https://a.example.net/1" in gone["detail"]


def test_marks_of_markdown_go_where_that_is_asked_for():
    """Comments in code, powers, arguments and lists keep their signs."""
    lines = ["# How to bake", "Mix **two eggs** with flour, and **do not wait** for it.", "x = 2**3**4\n# a comment\nf(*args, **kwargs)", "* an item"]
    body = "".join(f"<p>{line}</p>" if "\n" not in line else f"<pre>{line}</pre>" for line in lines).encode()
    text = "\n\n".join(lines)
    assert page_text(b"<article>" + body, "text/html", None, CONFIG).text == text
    wanted = text.replace("# How", "How").replace("**two eggs**", "two eggs").replace("**do not wait**", "do not wait")
    assert page_text(b"<article>" + body, "text/html", None, ExtractConfig(strip_markdown=True)).text == wanted
    assert page_text(text.encode(), "text/markdown", None, ExtractConfig(strip_markdown=True)).text == wanted
    assert page_text(text.encode(), "text/x-python", None, ExtractConfig(strip_markdown=True)).text == text
    assert page_text(b"***both***", "text/plain", None, ExtractConfig(strip_markdown=True)).text == "both"


def test_lists_are_numbered_as_the_page_says():
    item = "The council voted on Tuesday to close the old bridge for repairs that may last until spring."
    body = f"<main><ol><li>{item}<li>{item}</ol><p>{item}</p><ol start=3><li>{item}<li value=9>{item}<li value=''>{item}</ol></main>"
    text = page_text(body.encode(), "text/html", None, ExtractConfig()).text
    assert re.findall(r"^(\d+)\. ", text, re.MULTILINE) == ["1", "2", "3", "9", "10"]


POST = "The bakery on Mill Street opened again on Monday after three months of repairs, and the queue reached the bridge."
DATA = {"posts": [{"cooked": f"<p>{POST} {n}</p>"} for n in range(3)], "labels": ["Sign in", "text"], "description": POST}


@pytest.mark.parametrize(
    "data",
    [
        f'<script type="application/ld+json">{json.dumps({"articleBody": "".join(f"{POST} {n} " for n in range(3))})}</script>',
        f'<script id="__NEXT_DATA__" type="application/json">{json.dumps({"blocks": [{"text": f"{POST} {n}"} for n in range(3)]})}</script>',
        f'<div data-preloaded="{escape(json.dumps({"topic": json.dumps(DATA)}))}"></div>',
    ],
)
def test_a_page_without_text_has_that_of_its_json(data):
    """Text in the HTML is not replaced."""
    page = f"<html><head><title>Bakery</title></head><body>{data}<noscript>Please enable JavaScript</noscript></body></html>"
    made = page_text(page.encode(), "text/html", None, ExtractConfig())
    assert made.title == "Bakery" and made.text.split() == " ".join(f"{POST} {n}" for n in range(3)).split()
    own = "".join(f"<p>The river rose by {n} metres in the night, and the old mill was closed to visitors.</p>" for n in range(9))
    assert "bakery" not in page_text(page.replace("<noscript>", f"{own}<noscript>").encode(), "text/html", None, ExtractConfig()).text


@pytest.mark.parametrize(("body", "text"), [
    (f"[Update, 4 May] {POST}", f"[Update, 4 May] {POST}"), (f"{{{{ad}}}} {POST}", f"{{{{ad}}}} {POST}"),
    (f"It&#8217;s open &amp; warm. {POST}", f"It’s open & warm. {POST}"),
    (f"A vector<int> holds numbers.\n{POST}", f"A vector<int> holds numbers.\n\n{POST}"),
    ([{"type": "p", "children": [{"text": POST[:40]}, {"type": "a", "children": [{"text": POST[40:44]}]}, {"text": POST[44:]}]}], POST),
    ([{"type": "paragraph", "content": [{"type": "text", "text": POST[:3]}, {"type": "text", "text": POST[3:]}]}], POST),
])  # fmt: skip
def test_text_in_json_is_read_as_it_is_meant(body, text):
    data = json.dumps({"body": body, "text": "".join(f"{POST} {n}" for n in range(3))})
    page = f'<html><body><script type="application/json">{data}</script></body></html>'
    assert page_text(page.encode(), "text/html", None, ExtractConfig()).text.startswith(f"{text}\n")


@pytest.mark.parametrize("data", ["{broken", "[" * 100_000, json.dumps({"text": "short"}), '<script type="application/json">' * 100_000, "<script " + "application/json " * 50_000])
def test_json_without_text_leaves_the_page_empty(data):
    with pytest.raises(Unreadable, match="the page has no text"):
        page_text(f'<script type="application/json">{data}</script>'.encode(), "text/html", None, ExtractConfig())
