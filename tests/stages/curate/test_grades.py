"""The shipped quality models: their counts compared with a second implementation, their training with dense algebra, and which documents they
grade."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import settings as tried
from hypothesis import strategies as st

from puna.flows.engine.trace import flow_named, trace
from puna.flows.engine.trace import load as recipe
from puna.models.classifiers import grades
from puna.stages.contract import execute
from puna.stages.curate.heuristics import HeuristicsConfig, heuristics
from puna.stages.curate.language import LanguageConfig, language
from puna.stages.curate.quality import QualityConfig, quality
from puna.stages.curate.rules.decide import decide
from puna.stages.curate.rules.groups import active_rules
from puna.stages.curate.select import SelectConfig, select
from puna.storage import PunaError, Store
from tests.benchmarks import train_grades as training

PROSE = (
    "The river rises in the hills north of the town and flows for thirty miles before it reaches the sea. In spring, when the snow melts, "
    "its level may rise by two metres within a day, which is why the old mills were built well above the banks.\n\n"
    "Historians have long argued about who built the first of them. Records of the abbey mention a mill in 1180, but the stones that can be "
    "seen today belong to a later building, which was finished after the fire that destroyed most of the valley's houses."
)  # fmt: skip
MENU = "Home\nProducts\nShop now\nSale!\nContact us\nLog in\nRegister\n© 2024\nTerms\nPrivacy\nFollow us\nFacebook\nTwitter\n0 items\n"
MOVED = "We have moved!\n\nThis page has been removed. Click here."
MASK = (1 << 64) - 1


def bucket(token: int) -> int:
    state = token * int(grades.BASE) & MASK
    state = (state ^ state >> 32) * int(grades.MIXED) & MASK
    return (state >> 40) % grades.BUCKETS


def hashed(word: bytes) -> int:
    value = 0
    for byte in word:
        value = (value * int(grades.BASE) + byte + 1) & MASK
    return value


TOKEN = re.compile(
    rb"(?P<word>(?:(?!\xe2[\x80\x81][\x00-\xff])[A-Za-z\x80-\xff])(?:(?!\xe2[\x80\x81][\x00-\xff])[A-Za-z\x80-\xff]|(?:'|\xe2\x80\x99)(?=[a-z]))*)"
    rb"|(?P<number>[0-9]+)|(?P<wide>\xe2[\x80\x81][\x00-\xff])|(?P<line>\n)|(?P<mark>[!-~])",
    re.DOTALL,
)


def counted(data: bytes) -> tuple[Counter[int], int]:
    """Return tokens by bucket and the number of words, by regular expressions."""
    found: Counter[int] = Counter()
    words = in_line = 0
    last = ""

    def end() -> None:
        nonlocal in_line, last
        if last:
            length = sum(in_line > bound for bound in (1, 3, 9, 19, 49))
            kind = 3 * length + {".": 1, "!": 1, "?": 1, '"': 1, ":": 2}.get(last, 0)
            found[bucket(0x110300 + kind)] += 1
            found[bucket(0x110200 + kind)] += 1 + in_line
        in_line, last = 0, ""

    for match in TOKEN.finditer(data):
        text = match[0]
        if match["line"]:
            end()
            continue
        if match["word"]:
            plain = text.replace(b"\xe2\x80\x99", b"'")
            if capitals := len(re.findall(rb"[A-Z]", text)):
                found[bucket(0x110001 if 1 < capitals == len(text) else 0x110000)] += 1
            found[bucket(hashed(plain.lower()))] += 1
        elif match["number"]:
            found[bucket(0x110100 + min(len(text), 5))] += 1
        else:
            found[bucket(ord(text.decode()))] += 1
        if match["word"] or match["number"]:
            words, in_line, last = words + 1, in_line + 1, "a"
        elif text not in (b"'", b")"):
            last = {"\u201d": '"', "\u2026": "."}.get(text.decode(), text.decode())
    end()
    return found, words


texts = st.text(st.sampled_from("abcXYZ019 .,!?:()'\"\n\t-|$\u2019\u201c\u201d\u2026\u2013é漢\x07"), max_size=120)


@tried(deadline=None, max_examples=300)
@given(texts)
def test_tokens_are_those_of_a_second_reading(text: str) -> None:
    data = text.encode()
    counts, met = np.zeros(grades.BUCKETS, np.int32), np.empty(grades.BUCKETS, np.int32)
    words, number = grades.tokens(np.frombuffer(data, np.uint8), 0, len(data), counts, met)
    expected, expected_words = counted(data)
    assert words == expected_words
    assert {int(b): int(counts[b]) for b in met[:number]} == dict(expected)


@tried(deadline=None, max_examples=50)
@given(st.lists(texts, min_size=1, max_size=6), st.randoms())
def test_a_grade_is_the_documents_own_whatever_it_stands_among(documents: list[str], chance: Any) -> None:
    model = grades.load()
    cuts = sorted(chance.sample(range(len(documents) + 1), k=min(2, len(documents))))
    parts = [documents[a:b] for a, b in zip([0, *cuts], [*cuts, len(documents)], strict=True)]
    together = grades.grades_of(pa.chunked_array([pa.array(part, pa.string()) for part in parts], pa.string()), model)
    alone = [grades.grades_of(pa.chunked_array([pa.array([text], pa.string())]), model)[0] for text in documents]
    assert together.tolist() == alone
    seen = training.rows_of(documents)
    assert together == pytest.approx(seen @ model.weights + model.bias, abs=1e-4)


def test_sound_text_is_told_from_what_is_none() -> None:
    chances = grades.good_chances(pa.chunked_array([[PROSE, MENU, MOVED, ""]]), grades.load())
    assert chances[0] > 0.7
    assert max(grades.good_chances(pa.chunked_array([["|" * 5000, "12345 " * 3000, "sale " * 4000]]), grades.load())) < 0.5
    assert max(chances[1:]) < 0.2


# A menu and the same river in languages with spaces, with marks of their own, and without spaces.
OTHERS = {
    "de": (
        "Der Fluss entspringt in den Hügeln nördlich der Stadt und fließt dreißig Meilen weit, bevor er das Meer erreicht. Im Frühjahr, wenn "
        "der Schnee schmilzt, kann sein Pegel an einem Tag um zwei Meter steigen. Deshalb wurden die alten Mühlen weit oberhalb der Ufer "
        "gebaut.\n\nHistoriker streiten seit langem darüber, wer die erste von ihnen gebaut hat. Aufzeichnungen der Abtei erwähnen 1180 eine "
        "Mühle, aber die Steine, die man heute sieht, gehören zu einem späteren Gebäude.",
        "Startseite\nProdukte\nJetzt kaufen\nSonderangebot!\nKontakt\nAnmelden\nRegistrieren\n© 2024\nAGB\nDatenschutz\n0 Artikel\n",
    ),
    "hi": (
        "नदी शहर के उत्तर में पहाड़ियों से निकलती है और समुद्र तक पहुँचने से पहले तीस मील बहती है। वसंत में, जब बर्फ पिघलती है, इसका जल स्तर एक दिन में दो मीटर "
        "बढ़ सकता है। इसलिए पुरानी चक्कियाँ किनारों से बहुत ऊपर बनाई गई थीं।\n\nइतिहासकार लंबे समय से बहस करते रहे हैं कि पहली चक्की किसने बनाई। मठ के अभिलेख "
        "११८० में एक चक्की का उल्लेख करते हैं, लेकिन आज दिखने वाले पत्थर बाद की इमारत के हैं।",
        "होम\nउत्पाद\nअभी खरीदें\nसेल!\nसंपर्क करें\nलॉग इन\nपंजीकरण\n© 2024\nशर्तें\nगोपनीयता\n0 आइटम\n",
    ),
    "ja": (
        "川は町の北の丘から流れ出し、海に着くまで三十マイルを流れる。春になって雪が解けると、水位は一日で二メートルも上がることがある。そのため、"
        "古い水車小屋は岸からずっと高いところに建てられた。\n\n最初の水車小屋を誰が建てたのかについて、歴史家は長いあいだ議論してきた。修道院の記録"
        "は1180年に水車小屋があったと伝えているが、今日見られる石は後の建物のものである。",
        "ホーム\n商品\n今すぐ購入\nセール！\nお問い合わせ\nログイン\n登録\n© 2024\n利用規約\n個人情報\n0点\n",
    ),
}  # fmt: skip


def test_texts_without_words_by_hand() -> None:
    texts = ["Das ist „gut“: 12 Äpfel.", "今天天气好。我去！", "これはペンです、", "एक दिन है। ११", "l’été n'a", "ཨ་ཨ", ""]
    expected = ['x x "x": 00 x.', " x  x  x .  x . ", " x  x  x  x , ", "x x x.  00", "x x", "x x", ""]
    assert grades.form_of(pa.chunked_array([texts])).to_pylist() == expected
    assert grades.form_of(pa.chunked_array([["a " * 15_000]])).to_pylist() == ["x " * 10_000]


@pytest.mark.parametrize("name", OTHERS)
def test_sound_text_is_told_from_menus_by_form_in_other_languages(name: str) -> None:
    good, menu = grades.good_chances(pa.chunked_array([OTHERS[name]]), grades.load(form=True))
    assert good > 0.3 and menu < 0.1
    seen = training.rows_of(grades.form_of(pa.chunked_array([OTHERS[name]])).to_pylist())
    assert grades.grades_of(pa.chunked_array([OTHERS[name]]), grades.load(form=True)) == pytest.approx(
        seen @ grades.load(form=True).weights + grades.load(form=True).bias, abs=1e-4
    )


def test_each_language_has_its_own_model_or_no_score_at_all(tmp_path: Path, make_documents: Any) -> None:
    store = Store.open(tmp_path)
    latin = "Gallia est omnis divisa in partes tres, quarum unam incolunt Belgae, aliam Aquitani, tertiam Galli."
    texts = {"a": (PROSE, "en"), "b": (OTHERS["de"][0], "de"), "c": (MENU, "en"), "d": (latin, "la"), "e": (latin, None)}
    texts |= {f"f{n}": (OTHERS["hi"][n % 2], "hi") for n in range(10)}
    documents = make_documents(store, [(key, "web", text) for key, (text, _) in texts.items()])
    table = pa.table({"id": list(texts), "language": pa.array([name for _, name in texts.values()], pa.string())})
    given = {"documents": documents, "language": store.import_table("signals", table)}
    made = execute(quality, QualityConfig(), given, store)
    found = {row["id"]: (row["quality"], row["quality_rank"]) for row in made.read().to_pylist()}
    english, german = (grades.good_chances(pa.chunked_array([[texts[key][0]]]), grades.load(form))[0] for key, form in (("a", False), ("b", True)))
    # No ranks in languages of fewer than ten documents: the worst of them would be dropped whatever it is.
    assert found["a"] == (pytest.approx(english), None) and found["b"] == (pytest.approx(german), None)
    assert found["d"] == found["e"] == (None, None)
    assert [found[f"f{n}"][1] for n in range(10)] == [0.5, 0.0] * 5
    metrics = made.manifest.metrics
    assert {name: value for name, value in metrics.items() if "scored" in name} == {"scored": 13, "unscored_la": 1, "unscored_unknown": 1}
    settings = SelectConfig.model_validate({"quality": {"min_quality": 0.99}})
    rules = [replace(rule, kinds=()) for rule in active_rules(settings) if rule.name.startswith("quality.")]
    table = pa.table({"id": ["a", "b"], "source": ["web", "web"], "quality": [0.5, None], "quality_rank": [0.5, None]})
    assert decide(table, rules)["id"].to_pylist() == ["a"]
    with pytest.raises(PunaError, match=r"without a classifier, the documents' languages are needed.*--set select_model\.quality=null"):
        execute(quality, QualityConfig(), {"documents": documents}, store)
    with pytest.raises(PunaError, match="positive='bad': Puna's own model has no classes"):
        execute(quality, QualityConfig(positive="bad"), given, store)


def test_a_crawl_in_a_language_that_is_not_judged_has_no_scores_and_stays(tmp_path: Path, make_documents: Any) -> None:
    store = Store.open(tmp_path)
    latin = "Gallia est omnis divisa in partes tres, quarum unam incolunt Belgae, aliam Aquitani, tertiam qui ipsorum lingua Celtae appellantur."
    documents = make_documents(store, [("a", "web", latin), ("b", "web", latin.replace("Gallia", "Britannia"))])
    languages = execute(language, LanguageConfig(), {"documents": documents}, store)
    assert "la" not in grades.FORM_LANGUAGES and set(languages.read()["language"].to_pylist()) == {"la"}
    made = execute(quality, QualityConfig(), {"documents": documents, "language": languages}, store)
    assert made.read().to_pylist() == [{"id": key, "quality": None, "quality_rank": None} for key in "ab"]
    assert made.manifest.metrics["scored"] == 0 and made.manifest.metrics["unscored_la"] == 2
    off = {name: None for name, value in SelectConfig().model_dump().items() if isinstance(value, dict) and name not in ("groups", "sql")}
    rules = SelectConfig.model_validate(off | {"quality": {"min_quality": 0.5, "min_rank": 0.5}})
    signals = [made, execute(heuristics, HeuristicsConfig(), {"documents": documents, "language": languages}, store)]
    kept = execute(select, rules, {"documents": documents, "signals": signals}, store)
    assert kept.read()["id"].to_pylist() == ["a", "b"]


def test_recipes_judge_by_the_model_that_comes_with_puna_unless_they_train_one() -> None:
    def trains(name: str) -> bool:
        return any(step.label == "train_quality" for step in trace(flow_named("curate"), recipe(name, [], "curate")).steps)

    assert {name: trains(name) for name in ("clean", "demo", "llama3-8b")} == {"clean": False, "demo": True, "llama3-8b": True}


# --- training ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
def test_ridge_is_that_of_the_normal_equations_with_a_free_bias(seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows, marks = rng.random((30, 7)).astype(np.float32) * 20, rng.random(30) * 5
    weights, bias = training.ridge(rows, marks)
    wide = np.column_stack([rows, np.ones(30)]).astype(np.float64)
    penalty = training.SHRINKAGE * np.diag([1.0] * 7 + [0.0])
    expected = np.linalg.solve(wide.T @ wide + penalty, wide.T @ marks)
    assert np.append(weights, bias) == pytest.approx(expected, rel=1e-3, abs=1e-4)


@pytest.mark.parametrize("seed", range(3))
def test_calibration_is_the_likeliest_curve(seed: int) -> None:
    rng = np.random.default_rng(seed)
    marks = rng.normal(3, 1, 200).round(1)
    good = rng.random(200) < 1 / (1 + np.exp(-2 * (marks - 2.5)))
    slope, middle = training.calibrated(marks, good)

    def surprise(s: float, m: float) -> float:
        chance = 1 / (1 + np.exp(-s * (marks - m)))
        return -float(np.log(np.where(good, chance, 1 - chance)).sum())

    least = surprise(slope, middle)
    assert all(surprise(slope + a, middle + b) > least for a, b in ((0.05, 0), (-0.05, 0), (0, 0.05), (0, -0.05)))


def test_unseen_grades_are_of_models_without_the_site(tmp_path: Path) -> None:
    lines = [{"text": f"{'good words here' if n % 2 else 'bad stuff there'} {n}", "grade": 4 if n % 2 else 1, "site": f"s{n % 20}"} for n in range(60)]
    file = tmp_path / "texts.jsonl"
    file.write_text("\n".join(json.dumps(line) for line in lines))
    read = training.read([file])
    rows, fold = training.rows_of([text.text for text in read]), np.array([text.fold for text in read])
    found = training.unseen_grades(rows, read)
    marks = np.array([text.grade for text in read])
    for one in range(training.FOLDS):
        weights, bias = training.ridge(rows[fold != one], marks[fold != one])
        assert found[fold == one] == pytest.approx(rows[fold == one] @ weights + bias)
    assert len({text.fold for text in read if text.site == "s3"}) == 1


GRADED = [{"text": "a", "grade": 4, "site": f"s{n}"} for n in range(40)]


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([{"text": "a", "grade": "x", "site": "s"}], r"texts\.jsonl: line 1: ValueError.*text, grade and site are needed"),
        ([*GRADED[:2], {"text": None, "grade": 3, "site": "s"}], r"texts\.jsonl: line 3: ValueError: text is None"),
        ([{"text": "a", "grade": float("nan"), "site": "s"}], r"line 1: ValueError: grade nan is none of 0 to 5"),
        ([{"text": "a", "grade": 50, "site": "s"}], r"line 1: ValueError: grade 50\.0 is none of 0 to 5"),
        ([["a", 3, "s"]], "line 1: TypeError"),
        (GRADED[:1], "1 graded texts of too few sites for 5 folds"),
        (GRADED, "grades of less than 3 and of 3 or more are needed"),
    ],
)
def test_what_no_model_can_learn_from_is_named(tmp_path: Path, rows: list[Any], said: str) -> None:
    file = tmp_path / "texts.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    with pytest.raises(PunaError, match=said):
        training.read([file])


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    file = tmp_path / "texts.jsonl"
    with pytest.raises(PunaError, match=r"texts\.jsonl.*JSON lines in UTF-8 are needed"):
        training.read([file])
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(PunaError, match=r"texts\.jsonl.*JSON lines in UTF-8 are needed"):
        training.read([file])
