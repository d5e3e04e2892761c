"""Language identification."""

from __future__ import annotations

from datetime import UTC, datetime

import pyarrow as pa
import pytest

from puna.stages.contract import execute
from puna.stages.curate.language import LanguageConfig, identify, language
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
CODE = "for (int i = 0; i < n; ++i) {\n    sum += values[i] * weights[i];\n}\n"


@pytest.mark.parametrize("code", SENTENCES)
def test_a_sentence_of_each_language(code):
    found, score = identify(SENTENCES[code])
    assert found == code
    assert 0.5 < score <= 1


def test_line_ends_and_capitals_do_not_matter():
    text = SENTENCES["en"]
    assert identify(text.replace(" ", "\n"))[0] == "en"
    assert identify(text.upper())[0] == "en"


def test_the_prose_of_a_manual_decides_not_its_code():
    assert identify(f"{SENTENCES['de']}\n{CODE * 40}{SENTENCES['de']}")[0] == "de"


def test_names_in_a_list_are_no_prose():
    names = [f"• {verb}_{thing}" for verb in ("create", "delete", "describe") for thing in ("alias", "cluster", "gateway_endpoint", "vpc")]
    assert identify("\n".join([SENTENCES["en"], *names * 3])) == identify(SENTENCES["en"])


def test_program_text_without_prose_has_no_language_and_with_comments_theirs():
    program = "\n".join(f"from package import part{n}\nvalue_{n} = part{n}.make(width={n})" for n in range(20))
    assert identify(program) == ("zxx", 1.0)
    assert identify(f'"""{SENTENCES["en"]}\n{SENTENCES["en"]}\n"""\n{program}')[0] == "en"


def test_the_items_of_a_list_are_prose():
    text = "Le mot peut se rapporter :\nà une personne qui vit dans une petite ville ;\n" + "à un grand jardin près de la rivière ;\n" * 4
    assert identify(text)[0] == "fr"


@pytest.mark.parametrize("text", ["", "  \n", "123 456.7", "{}[]();", "— … —"])
def test_text_without_letters_has_no_language(text):
    assert identify(text) == ("zxx", 1.0)


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
    assert found[1]["language_score"] == 1.0
