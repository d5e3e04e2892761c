"""Language identification."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from unittest.mock import Mock

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from puna.kernels.text.code_lines import BLOCKS, QUERIES, STATEMENTS, WHOLE, looks_like_code, may_be_code
from puna.models.classifiers.fasttext import Settings, fit, write
from puna.models.languages.prose import prose
from puna.models.languages.registry import SCALED, read_rows, shipped_names, shipped_rows, with_rows
from puna.models.languages.vote import group_numbers, vote, voters, votes
from puna.stages.contract import External, execute
from puna.stages.curate import language as module
from puna.stages.curate.language import LanguageConfig, identify, language
from puna.stages.curate.train_classifier import ImportClassifierConfig, import_classifier
from puna.storage import Store

SENTENCES = {
    "en": "The council will decide next week whether the old bridge across the river is to be repaired.",
    "de": "Der Gemeinderat entscheidet in der nächsten Woche, ob die alte Brücke über den Fluss saniert wird.",
    "fr": "Le conseil décidera la semaine prochaine si le vieux pont sur la rivière doit être réparé.",
    "es": "El ayuntamiento decidirá la próxima semana si se repara el viejo puente sobre el río.",
    "ja": "市議会は来週、川にかかる古い橋を修理するかどうかを決める予定です。",
    "ru": "На следующей неделе совет решит, нужно ли ремонтировать старый мост через реку.",
    "ar": "سيقرر المجلس الأسبوع المقبل ما إذا كان سيتم إصلاح الجسر القديم فوق النهر.",
}
SCRIPTS = {"ja": "Jpan", "ru": "Cyrl", "ar": "Arab"}
CODE = "for (int i = 0; i < n; ++i) {\n    sum += values[i] * weights[i];\n}\n"


@pytest.mark.parametrize("code", SENTENCES)
def test_a_sentence_of_each_language(code):
    found, score, script = identify(SENTENCES[code])
    assert found == code
    assert 0.5 < score <= 1
    assert script == SCRIPTS.get(code, "Latn")


def test_a_script_of_one_language_decides_with_some_words_of_another():
    assert identify("สภาจะตัดสินใจในสัปดาห์หน้าว่าจะซ่อมสะพานเก่าข้ามแม่น้ำหรือไม่ (old bridge)") == ("th", 1.0, "Thai")
    assert identify(f"{SENTENCES['en']} สะพาน")[0] == "en"


def test_the_beginning_and_the_end_of_a_long_text_decide():
    english, german = (" ".join([SENTENCES[code]] * 30) for code in ("en", "de"))
    assert identify(english)[0] == "en"
    assert identify(f"{english}\n{german}")[0] in ("en", "de")
    assert identify(f"{english}\n{german}")[1] < identify(english)[1]


def test_a_document_that_breaks_an_identifier_is_undetermined_and_the_others_go_on(tmp_path, make_documents, monkeypatch):
    def broken(texts, group):
        if any("Brücke" in text for text in texts):
            raise ValueError("no such text")
        return votes(texts, group)

    monkeypatch.setattr(module, "votes", broken)
    store = Store.open(tmp_path)
    documents = make_documents(store, [(code, "web", SENTENCES[code]) for code in ("de", "en", "fr")])
    made = execute(language, LanguageConfig(), {"documents": documents}, store)
    assert {row["id"]: (row["language"], row["language_score"] > 0) for row in made.read().to_pylist()} == {
        "de": ("und", False), "en": ("en", True), "fr": ("fr", True),
    }  # fmt: skip
    assert made.manifest.metrics["failed_language"] == 1
    assert made.manifest.metrics["first_failure_language"] == "document de: ValueError: no such text"


@pytest.mark.parametrize("error", [OSError, ImportError])
def test_no_document_is_undetermined_for_a_fault_of_the_machine(tmp_path, make_documents, monkeypatch, error):
    monkeypatch.setattr(module, "votes", Mock(side_effect=error("no such file")))
    store = Store.open(tmp_path)
    with pytest.raises(Exception, match="no such file"):
        execute(language, LanguageConfig(), {"documents": make_documents(store, [("en", "web", SENTENCES["en"])])}, store)


def test_line_ends_and_capitals_do_not_matter():
    text = SENTENCES["en"]
    assert identify(text.replace(" ", "\n"))[0] == "en"
    assert identify(text.upper())[0] == "en"


def test_the_prose_of_a_manual_decides_not_its_code():
    assert identify(f"{SENTENCES['de']}\n{CODE * 40}{SENTENCES['de']}")[0] == "de"


# --- prose -----------------------------------------------------------------------------------------------


def is_prose(line):
    """Return True for prose by the definition, in plain Python; `line` has no white space around it."""
    line = line.lstrip("•–-* ")
    if len(line) < 4 or (" " not in line and line.isascii()):
        return False
    marks = len(re.findall(r"[^\w\s]|[\d_]", line))
    return marks <= 0.25 * len(line) and not looks_like_code(line)


def plainly(text, limit):
    """Return the prose of a text, the number of its letters, and how many are capitals."""
    size = limit // 4
    windows = [text] if len(text) <= limit else [text[i * (len(text) - size) // 3 :][:size] for i in range(4)]
    found = " ".join(line for window in windows for line in map(str.strip, window.splitlines()) if line and is_prose(line))
    letters = [c for c in found if c.isalnum() and not c.isdecimal()]
    return found, len(letters), sum(map(str.isupper, letters))


LINE_PIECES = [
    "The council", "decides", "Über die Brücke", "市議会は来週", "สภา", "ABC", "²", "٣", "\U0001d7d8", "\ud800", "\u00a0", "\u2028", "\x85", "\x1c", "\r\n", "\n", "\n", "\t", " ",
    " ", " ", "•", "–", "-", "* ", "_", "3", "42", ".", ", ", ";", ":", "=", " = ", "(", ")", "),", "):", "{", "[", "\\", ">>> ", "... ", "$ a", "@", "#", "//", "</p", "<",
    "def ", "class ", "from x import ", "for ", "while", "else:", "pass", "SELECT ", "INSERT INTO ", "#include ", "name (string)", "f(x)", "a.b", "x" * 30, "Name (list, required)",
]  # fmt: skip


@settings(max_examples=1000, deadline=None)
@given(st.lists(st.lists(st.sampled_from(LINE_PIECES), max_size=30).map("".join), min_size=1, max_size=5), st.sampled_from([100, 101, 10_000]))
def test_prose_is_that_of_the_definition(texts, limit):
    encoded = [text.encode("utf-8", "surrogatepass") for text in ["before", *texts]]
    offsets = np.cumsum([0, *map(len, encoded)])[1:]
    wanted = np.arange(len(texts)) % 4 != 3
    found = prose(np.frombuffer(b"".join(encoded), np.uint8), offsets, wanted, limit)
    for n, text in enumerate(texts):
        assert (found.of(n), found.letters[n], found.capitals[n]) == (plainly(text, limit) if wanted[n] else ("", 0, 0))


def test_what_may_be_code_is_asked():
    for line in (
        *(f"{word} some words here" for word in (*STATEMENTS, *BLOCKS, *WHOLE, *QUERIES, "from a import")), "from a import b here", "for a in some words:", "pass", "else:",
        ">>> some words", "... some words", "$ls and so on", "% some words", "# some words", "@name some words", "//some words", "/* some words", "<p some words", "</p some words",
        "name.of(some words)", "name.of(some words),", "name.of(some words):", "name.of(some words);", "some words;", "name (string, required)",
    ):  # fmt: skip
        data = np.frombuffer(line.encode(), np.uint8)
        assert may_be_code(data, 0, len(data)) or not looks_like_code(line)
    assert sum(bool(may_be_code(np.frombuffer(text.encode(), np.uint8), 0, len(text))) for text in (SENTENCES["en"], "formal words", "(words) here", "Passed.")) == 0


def test_names_in_a_list_are_no_prose():
    names = [f"• {verb}_{thing}" for verb in ("create", "delete", "describe") for thing in ("alias", "cluster", "gateway_endpoint", "vpc")]
    assert identify("\n".join([SENTENCES["en"], *names * 3])) == identify(SENTENCES["en"])


def test_program_text_without_prose_has_no_language_and_with_comments_theirs():
    program = "\n".join(f"from package import part{n}\nvalue_{n} = part{n}.make(width={n})" for n in range(20))
    assert identify(program) == ("zxx", 1.0, "Zyyy")
    assert identify(f'"""{SENTENCES["en"]}\n{SENTENCES["en"]}\n"""\n{program}')[0] == "en"


def test_the_items_of_a_list_are_prose():
    text = "Le mot peut se rapporter :\nà une personne qui vit dans une petite ville ;\n" + "à un grand jardin près de la rivière ;\n" * 4
    assert identify(text)[0] == "fr"


@pytest.mark.parametrize("text", ["", "  \n", "123 456.7", "{}[]();", "— … —"])
def test_text_without_letters_has_no_language(text):
    assert identify(text) == ("zxx", 1.0, "Zyyy")


def test_long_documents_are_looked_at_all_over():
    assert identify("7 " * 50_000 + (SENTENCES["fr"] + "\n") * 4000)[0] == "fr"


def test_the_stage_writes_one_row_per_document_and_spares_code(tmp_path):
    store = Store.open(tmp_path)
    when = datetime(2024, 1, 1, tzinfo=UTC)
    rows = [
        {"id": str(n), "url": f"https://x.com/{n}", "fetched_at": when, "source": source, "title": None, "text": text}
        for n, (source, text) in enumerate([("web", SENTENCES["es"]), ("code", f"# {SENTENCES['es']}\n{CODE}"), ("web", "")])
    ]
    made = execute(language, LanguageConfig(), {"documents": store.import_table("documents", pa.Table.from_pylist(rows))}, store)
    found = made.read().to_pylist()
    assert [(r["id"], r["language"]) for r in found] == [("0", "es"), ("1", "zxx"), ("2", "zxx")]
    assert found[1]["language_score"] == 1.0 and found[1]["script"] == "Zyyy"
    languages = made.read("languages").to_pylist()
    assert [(row["language"], row["script"], row["documents"]) for row in languages] == [("es", "Latn", 1), ("zxx", "Zyyy", 2)]
    assert "de" in languages[0]["stop_words"].split() and languages[0]["words_factor"] is not None
    # A text without a language has no stop words, and thresholds as they stand.
    assert languages[1]["stop_words"] is None and languages[1]["stop_word_fraction_factor"] is None
    assert languages[1]["words_factor"] == languages[1]["mean_word_length_factor"] == 1.0


# One sentence each, written for this test, in languages that lid.176 alone does not know or confuses.
RARER = {
    "sw": "Baraza la mji litaamua wiki ijayo iwapo daraja la zamani lililopo mtoni litakarabatiwa au la.",
    "zu": "Umkhandlu uzonquma ngesonto elizayo ukuthi ibhuloho elidala elinqamula umfula lizolungiswa yini.",
    "so": "Golaha deegaanka ayaa go'aan ka gaari doona toddobaadka soo socda in la dayactiro buundada hore ee webiga.",
    "mi": "Ka whakatau te kaunihera i tēnei wiki e tū mai nei mēnā ka whakatikaina te piriti tawhito i runga i te awa.",
    "ht": "Konsèy la pral deside semèn pwochèn si yo dwe repare ansyen pon ki sou rivyè a.",
}


@pytest.mark.parametrize("code", RARER)
def test_languages_that_are_rarer_on_the_web(code):
    assert identify(RARER[code])[0] == code


def test_confusable_languages_count_together():
    # Croatian, Bosnian and Serbian share these words: whichever is found, the group is certain.
    found, score, script = identify("Vlada je danas donijela odluku o novom zakonu, a ministar je rekao da je to dobro za sve ljude u zemlji.")
    assert found in ("hr", "bs", "sr") and score > 0.9 and script == "Latn"


def test_texts_together_are_told_as_each_alone():
    texts = [*SENTENCES.values(), *RARER.values(), "佢哋話聽日唔會嚟開會，因為係喺屋企有啲嘢要做", "1 2 3", "", "ok", "\u103b\u1019\u1014\u1039\u1019\u102c\u103b\u1015\u100a\u1039"] * 20
    assert votes(texts) == [vote(text) for text in texts]


def test_zawgyi_is_told_from_unicode():
    # "Myanmar" and "people" in Unicode, and the same signs in Zawgyi's order and encoding.
    assert identify("\u1019\u103c\u1014\u103a\u1019\u102c\u1015\u103c\u100a\u103a \u101c\u1030\u1010\u102d\u102f\u1004\u103a\u1038")[2] == "Mymr"
    assert identify("\u103b\u1019\u1014\u1039\u1019\u102c\u103b\u1015\u100a\u1039 \u101c\u1030\u1010\u102d\u102f\u1004\u1039\u1038")[2] == "Qaag"


def test_shan_is_no_zawgyi():
    # Shan letters begin syllables, and the vowel E follows them, as in Unicode.
    assert identify("ၵူၼ်းတင်းလၢႆ ၵိူတ်ႇမႃး လႆႈသုၼ်ႇလႅင်း ၽဵင်ႇပဵင်း ၵၼ် ၶဝ်ႈၸႂ် တေႃႇၵေႃႉ")[2] == "Mymr"


def test_cantonese_is_told_from_mandarin_by_everyday_words():
    assert identify("佢哋話聽日唔會嚟開會，因為係喺屋企有啲嘢要做，所以我哋等佢返嚟先至決定點樣整返好條橋。")[0] == "yue"
    assert identify("他们说明天不会来开会，因为家里有些事情要做，所以我们等他回来再决定怎样修好那座桥。")[0] == "zh"


def test_rows_of_ones_own_lie_over_the_table(tmp_path):
    file = tmp_path / "mine.tsv"
    file.write_text("# mine\nlanguage\tscript\tstop_words\twords\tmean_word_length\nde\tLatn\tdas ist\t-\t1.5\nqaa\tLatn\t\t\t\n", encoding="utf-8")
    config = LanguageConfig(rows=str(file))
    assert LanguageConfig(rows=[row.model_dump() for row in config.rows]) == config
    table, before = with_rows(config.rows), shipped_rows()
    mine, theirs = table["de-Latn"], before["de-Latn"]
    assert mine.stop_words == ("das", "ist") and mine.factors["words"] is None and mine.factors["mean_word_length"] == 1.5
    assert mine.factors["newline_ratio"] == theirs.factors["newline_ratio"] and mine.codes == theirs.codes
    assert table["fr-Latn"] == before["fr-Latn"]
    # A language without a row is measured like its script, and needs no stop words.
    assert table["qaa-Latn"].factors == before["-Latn"].factors and not table["qaa-Latn"].stop_words


def test_codes_and_groups_of_ones_own_rows_count(tmp_path, make_documents):
    """An untrained identifier gives each of its three classes a third, and so returns the first one."""
    lines, labels = pa.array(["kala mato", "kala veri", "der die"]), ["aq1", "aq2", "deu"]
    write(fit(lines, np.arange(3, dtype=np.int32), labels, Settings(0.1, 0, 1, 4, 1, 0, 0)), tmp_path / "lid.bin")
    store = Store.open(tmp_path / "store")
    given = {"documents": make_documents(store, [("0", "web", "kala mato veri kala mato veri kala mato veri kala mato veri")])}
    model = External.resolve(str(tmp_path / "lid.bin"))[0]
    given["classifier"] = execute(import_classifier, ImportClassifierConfig(purpose="language"), {"model": model}, store)

    def found(rows):
        (tmp_path / "mine.tsv").write_text(rows, encoding="utf-8")
        (row,) = execute(language, LanguageConfig(rows=str(tmp_path / "mine.tsv")), given, store).read().to_pylist()
        return row["language"], pytest.approx(row["language_score"], abs=1e-3)

    assert found("language\tscript\n") == ("aq1", 1 / 3)
    assert found("language\tscript\tcodes\nqab\tLatn\taq1\nqac\tLatn\taq2\n") == ("qab", 1 / 3)
    assert found("language\tscript\tcodes\tgroup\nqab\tLatn\taq1\tmine\nqac\tLatn\taq2\tmine\n") == ("qab", 2 / 3)


def test_languages_that_the_user_groups_count_together_in_the_vote():
    group = group_numbers(voters().languages, {**shipped_names().groups, "de": "x", "nds": "x", "nl": "x", "lb": "x"})
    text = "De Raat besluut tokamen Week, wat de ole Brüch över den Stroom repareert warrt."
    assert vote(text, group).language == vote(text).language and vote(text, group).score > vote(text).score


@pytest.mark.parametrize(
    ("factors", "said"),
    [({"wordz": 0.5}, "'wordz' is not a signal with a factor"), ({"words": -1.0}, "words is -1; a factor lies between 0"), ({"words": float("nan")}, "words is nan")],
)
def test_a_wrong_factor_of_ones_own_is_refused(factors, said):
    with pytest.raises(ValueError, match=said):
        LanguageConfig(rows=[{"language": "de", "script": "Latn", "factors": factors}])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("language\tscrpt\nde\tLatn\n", "there is no column 'scrpt'"),
        ("# mine\nlanguage\tscript\twords\twords\nde\tLatn\t1\t2\n", "line 2 names the column 'words' twice"),
        ("language\tscript\twords\nde\tLatn\tmany\n", "line 2: words is 'many'"),
        ("# mine\n\n# too\nlanguage\tscript\twords\nfr\tLatn\t1\n\nde\tLatn\tmany\n", "line 7: words is 'many'"),
        ("language\tscript\twords\nde\tLatn\t1\t2\n", "line 2 has 4 cells, the header has 3"),
        ("language\tscript\twords\nde\tLatn\t-1\n", "line 2: words is -1"),
    ],
)
def test_a_wrong_row_is_named(tmp_path, text, said):
    (tmp_path / "mine.tsv").write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=said):
        read_rows(tmp_path / "mine.tsv")


def test_a_table_as_editors_write_it(tmp_path):
    (tmp_path / "mine.tsv").write_bytes("\ufefflanguage\tscript\tstop_words\r\nde\tLatn\tDas Über\r\n".encode())
    (row,) = read_rows(tmp_path / "mine.tsv")
    assert (row.key, row.stop_words) == ("de-Latn", ("das", "über"))


def test_every_row_of_the_table_is_sound():
    table = shipped_rows()
    assert len(table) > 1500 and set(table["en-Latn"].factors.values()) <= {1.0, None}
    for row in table.values():
        assert set(row.factors) == set(SCALED), row.key
        assert all(word == word.lower() for word in row.stop_words) and row.evidence, row.key
        if row.evidence.startswith("NTREX 0"):  # only declarations: their frequent words are legal terms
            assert row.factors["stop_word_fraction"] is None, row.key
    canonical = shipped_names().canonical
    assert canonical("__label__eng_Latn") == canonical("eng") == canonical("en") == "en"
    assert canonical("hrv_Latn") == "hr" and canonical("xyz_Latn") == "xyz"
