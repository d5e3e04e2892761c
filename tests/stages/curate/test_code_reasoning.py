"""Pages with code and pages with reasoning: the counts, the labels from them, and classifiers that find both."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from puna.kernels.text.characters import code_points
from puna.kernels.text.technical import Technical, code_lines, formula_marks, measure
from puna.stages.contract import StageConfig, execute
from puna.stages.contract.config import parse
from puna.stages.curate.code_reasoning import TrainCodeReasoningConfig, _label, code_reasoning, train_code_reasoning
from puna.stages.curate.signals.definitions.lines import CALCULATION, is_code
from puna.storage import PunaError, Store

SMALL = {"dimension": 8, "buckets": 10_000, "epochs": 20}
PROSE = [
    "The river rises in the hills, crosses the old town and reaches the sea after a week (in winter sooner).",
    "She said: \"We'll be there at nine, won't we?\" - and closed the door.",
    "Jones, P. (2012). The history of tea; a study. London: Harper, pp. 12-19.",
    "Les principales causes sont les suivantes : la pluie, le vent, la neige ;",
    "Population: 12,304 (2011) [3]",
    "1234 (45) | 5678 (90) = 12",
    "Judith C (157)",
    "Price range: $$-$$$",
    "• C++ (C plus plus) = {a list's item}",
]
ARITHMETIC = [
    "Natalia sold 48/2 = <<48/2=24>>24 clips in May.",
    "So the total is (12+3)*$5 = $<<15*5=75>>75.",
    "He pays (x) = [4*.5%] = £<<4*.5=2>>2, so y = 7% = €.07",
]
CODE = [
    "def area(self, width=3, height=4):",
    "    return self._width * height[0]",
    "for (int i = 0; i < n; i++) {",
    "}",
    'print("hello", end="")',
    "result = sorted(np.ones(3))",
    "SELECT COUNT(*) FROM users WHERE name='x';",
    "<div class=\"note\">{{ value }}</div>",
]
TEXTS = {
    "prose": "the visitors of the harbour enjoy music and food in summer while boats come and go near the market",
    "code": "install the package then call the function from your script and check the returned object in the console",
    "reasoning": "the teacher writes a chain of steps on the board and each step follows from the one before it",
}


@pytest.mark.parametrize("line", PROSE)
def test_prose_and_tables_are_no_code(line):
    assert code_lines(code_points(line)) == (1, 0, 0)


@pytest.mark.parametrize("line", ARITHMETIC)
def test_worked_arithmetic_is_no_code(line):
    assert code_lines(code_points(line)) == (1, 0, 2) == (1, is_code(line), len(CALCULATION.findall(line)))
    assert code_lines(code_points(line.replace("=", "~"))) == (1, 1, 0)


@given(st.text(alphabet="12,._=<$ %x+é€\n", max_size=40))
@example("assert 1 + 1 == 2\nx1 = 2, y_1=2 a,2=3 [0] = 1; 3 => 4")
def test_calculations_are_those_of_the_pattern(text):
    assert code_lines(code_points(text))[2] == sum(len(CALCULATION.findall(line)) for line in text.split("\n"))
    assert code_lines(code_points(text))[1] == sum(map(is_code, text.split("\n")))


@pytest.mark.parametrize("line", CODE)
def test_lines_of_code(line):
    assert code_lines(code_points(line)) == (1, 1, 0)


def test_lines_are_counted_one_by_one():
    generator = np.random.default_rng(0)
    for _ in range(20):
        lines = [str(generator.choice([*PROSE, *CODE, "", "   "])) for _ in range(generator.integers(1, 12))]
        shown = [line for line in lines if line.strip()]
        assert code_lines(code_points("\n".join(lines))) == (len(shown), sum(line in CODE for line in shown), 0)
    assert measure(pa.array(["", "\n \n"]), 10) == [Technical(0, 0, 0, 0, 0)] * 2


def test_formulas_by_hand():
    # \frac and \sum are commands, a path is two as well; ∑, ≤ and ² are characters of formulas; a bare backslash is nothing.
    assert formula_marks(code_points(r"\frac{a}{b} + \sum_i x_i")) == 2
    assert formula_marks(code_points("∑ x² ≤ 9, ×")) == 4
    assert formula_marks(code_points("the price is 5 € \\ 10 \\")) == 0
    text = "Suppose the theorem is false. Then the Theorem implies, hence, an equation x² = 2."
    # suppose, theorem (once), implies, hence, equation; words beyond the characters read do not count
    assert measure(pa.array([text, "", text]), 100) == [Technical(1, 0, 1, 0, 5), Technical(0, 0, 0, 0, 0), Technical(1, 0, 1, 0, 5)]
    assert measure(pa.array(["²" * 9, text]), 5) == [Technical(1, 0, 5, 0, 0), Technical(1, 0, 0, 0, 0)]


@pytest.mark.parametrize(
    ("kind", "found", "label"),
    [
        ("code", Technical(30, 3, 0, 0, 0), True),
        ("code", Technical(20, 2, 0, 0, 0), None),  # a tenth of the lines, but only two lines
        ("code", Technical(31, 3, 0, 0, 0), None),
        ("code", Technical(50, 1, 0, 0, 0), False),
        ("reasoning", Technical(9, 0, 0, 0, 3), True),
        ("reasoning", Technical(9, 0, 3, 0, 2), True),
        ("reasoning", Technical(9, 0, 3, 0, 1), None),
        ("reasoning", Technical(9, 0, 2, 0, 2), None),
        ("reasoning", Technical(9, 0, 0, 0, 1), False),
        ("reasoning", Technical(9, 0, 1, 0, 0), None),
        ("reasoning", Technical(9, 0, 0, 3, 0), True),
        ("reasoning", Technical(9, 0, 0, 2, 0), None),
    ],
)
def test_labels_at_their_bounds(kind, found, label):
    assert _label(kind, found, TrainCodeReasoningConfig()) is label


def corpus(count, seed=0):
    """Return pages of three kinds; a third of those with code and with reasoning lack the signs that label them."""
    generator = np.random.default_rng(seed)
    words = {kind: text.split() for kind, text in TEXTS.items()}
    rows, kinds = [], {}
    for n in range(count):
        kind = ("prose", "code", "reasoning")[n % 3]
        lines = [" ".join(generator.choice(words[kind], 14)) for _ in range(4)]
        if n % 9 < 6:
            lines += {"prose": [], "code": CODE[:4], "reasoning": ["Hence the theorem, a lemma and the equation prove it; q."]}[kind]
        else:
            lines += {"prose": [], "code": ["call(value) = object"], "reasoning": ["Hence, suppose so."]}[kind]
        rows.append((f"{n:04d}", "web", "\n".join(lines)))
        kinds[f"{n:04d}"] = kind
    return [*rows, ("source", "code", "\n".join(CODE))], kinds


def trained_and_applied(store, documents, **inputs):
    """Return classifiers of both kinds, and their signals on the documents that they learned from."""
    made = execute(train_code_reasoning, TrainCodeReasoningConfig(**SMALL), {"documents": documents, **inputs}, store)
    return made, execute(code_reasoning, StageConfig(), {"documents": documents, "classifier": made}, store)


def test_pages_without_the_signs_are_found(tmp_path, make_documents):
    store = Store.open(tmp_path)
    rows, kinds = corpus(270)
    classifier, made = trained_and_applied(store, make_documents(store, rows))
    table = {r["id"]: r for r in made.read().to_pylist()}
    source = table.pop("source")
    assert all(value is None for name, value in source.items() if name != "id")
    alone = make_documents(store, rows[-1:])  # part of the excluded sources
    assert execute(code_reasoning, StageConfig(), {"documents": alone, "classifier": classifier}, store).read().to_pylist() == [source]
    metrics = classifier.manifest.metrics
    # 60 of the 90 pages of a kind have its signs.
    assert (metrics["code_positives"], metrics["reasoning_positives"]) == (60, 60)
    assert metrics["code_auc"] > 0.99 and metrics["reasoning_auc"] > 0.99
    for kind in ("code", "reasoning"):
        right = [(table[i][f"{kind}_score"] > 0.5) == (of == kind) for i, of in kinds.items()]
        assert np.mean(right) > 0.98


def test_grades_of_a_judge_come_before_the_signs(tmp_path, make_documents):
    store = Store.open(tmp_path)
    rows, kinds = corpus(180)
    docs = make_documents(store, rows[:-1])
    ids = sorted(kinds)
    # The judge takes prose for code, and has not seen every fifth page.
    judged = {
        "code_judgement": [None if n % 5 == 0 else 4.0 if kinds[i] == "prose" else 1.0 for n, i in enumerate(ids)],
        "reasoning_judgement": [4.0 if n < 3 else 1.0 for n in range(len(ids))],
    }
    labels = store.import_table("signals", pa.table({"id": ids, **judged}))
    classifier, made = trained_and_applied(store, docs, labels=labels)
    scores = {r["id"]: r["code_score"] for r in made.read().to_pylist()}
    assert np.mean([(scores[i] > 0.5) == (kinds[i] == "prose") for i in ids]) > 0.98
    metrics = classifier.manifest.metrics
    assert metrics["code_positives"] == sum(grade == 4.0 for grade in judged["code_judgement"])
    assert metrics["code_positives"] + metrics["code_negatives"] == sum(grade is not None for grade in judged["code_judgement"])
    # Three positive examples are too few to learn from: there is no score, and the metrics say why.
    assert metrics["reasoning_positives"] == 3 and "reasoning_auc" not in metrics
    assert made.read()["reasoning_score"].null_count == len(ids)
    none = store.import_table("signals", pa.table({"id": ids, "judgement": [1.0] * len(ids)}))
    with pytest.raises(PunaError, match="must have the signal 'code_judgement' of a judge's grades, but 0 have it"):
        trained_and_applied(store, docs, labels=none)


def test_bounds_that_cross_are_refused():
    with pytest.raises(PunaError, match=r"min_reasoning_words=1 must be above max_reasoning_words=1"):
        parse(TrainCodeReasoningConfig, {"min_reasoning_words": 1}, "train_code_reasoning")


def test_no_documents(tmp_path, make_documents):
    store = Store.open(tmp_path)
    _, made = trained_and_applied(store, make_documents(store, []))
    assert made.rows() == 0
