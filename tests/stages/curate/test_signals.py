"""Signals: declared signals are measured, compiled code equals the plain definitions, and other packages can add signals."""

from __future__ import annotations

import math
import sys
import textwrap

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from puna.stages import plugins
from puna.stages.contract import REGISTRY, SIGNALS, StageConfig, StageRun, declare_signal, execute, identify, signal, stage
from puna.stages.contract.config import parse
from puna.stages.curate import heuristics as module
from puna.stages.curate.heuristics import HeuristicsConfig, heuristics
from puna.stages.curate.select import SelectConfig, select
from puna.stages.curate.signals.measure import RECORD, measure
from puna.storage import PunaError, Store

PIECES = ("the", "and", "of", "de", "la", "alpha", "beta.", "Gamma", "#", "...", "…", "- x", "• y", "\n", "\n\n", "\r\n", "12", "{", "[3]",
          "javascript", "cookie policy", "lorem ipsum", "end.", "What?", "\u2028", "the cat sat on the mat.", " ", "日本。", "porn", "é",
          "one two three four five six.", "[citation needed]", "we collect", "you agree to", "this policy, and", "at any time", "by using our",
          "without prior notice", "please enable javascript", "error 404", "a\u3000b", "x" * 31)  # fmt: skip
TEXTS = st.lists(st.sampled_from(PIECES), max_size=60).map(" ".join) | st.lists(st.sampled_from(PIECES), max_size=60).map("".join)
DOCUMENTS = [
    "The first line of a page, which has words. It goes on! " * 3,
    "- a list\n- a list\n\nthe same\n\nthe same\n…\nlorem ipsum dolor sit amet\nA function { of javascript } here.\nTwo words",
]


def different(texts: list[str]) -> list[tuple[str, str, float, object]]:
    """Return (signal, text, compiled value, definition's value) for all differences."""
    values, wrong = measure(pa.array(texts, pa.string()), 5, 0.5).values, []
    for name, made in SIGNALS.items():
        if made.compiled and made.definition:
            for text, value in zip(texts, values[name].tolist(), strict=True):
                expected = made.definition(text)
                same = math.isnan(value) if expected is None else value == pytest.approx(expected, rel=1e-12, abs=1e-15)
                if not same:
                    wrong.append((name, text, value, expected))
    return wrong


@settings(deadline=None, max_examples=200)  # the first call compiles
@given(TEXTS)
def test_compiled_signals_are_what_their_definitions_say(text: str) -> None:
    assert different([text]) == []


# The share of stop words is measured only if a document's language is known.
@pytest.mark.parametrize("name", [name for name in RECORD.names if name != "stop_word_fraction"])
def test_a_measurement_that_is_missing_fails_at_commit(name, tmp_path, make_documents, monkeypatch) -> None:
    """Whichever compiled field is not filled, the run reports it."""

    def without(*args: object):
        found = measure(*args)
        found.values[name] = np.nan
        return found

    monkeypatch.setattr(module, "measure", without)
    store = Store.open(tmp_path / "without")
    rows = [(f"{n}", "web", text) for n, text in enumerate(DOCUMENTS)]
    documents = make_documents(store, rows)
    with pytest.raises(PunaError, match=f"signal {name} "):
        execute(heuristics, HeuristicsConfig(), {"documents": documents}, store)
    monkeypatch.undo()
    store = Store.open(tmp_path / "with")
    documents = make_documents(store, rows)
    made = execute(heuristics, HeuristicsConfig(), {"documents": documents}, store)
    assert set(made.read().column_names) - {"id"} >= set(RECORD.names)
    field = made.read().schema.field(name)
    assert field.metadata[b"unit"].decode() == SIGNALS[name].unit and field.type == SIGNALS[name].field.type


OWN = """
    from puna.stages.contract import signal

    @signal(unit="fraction of characters")
    def digit_share(text: str) -> float | None:
        '''Digits among the characters.'''
        if text == "broken":
            raise ValueError("nothing to measure")
        return sum(c.isdigit() for c in text) / len(text) if text else None

    @signal(unit="parts", meaning="parts of the address", name="own_path_depth")
    def path_depth(url: str) -> int:
        return url.count("/") - 2
    """


@pytest.fixture
def own(tmp_path, monkeypatch):
    """Return a user's module of signals, loaded as by `--module`, and unloaded after the test."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(plugins, "_modules", {})
    before = dict(SIGNALS)
    file = tmp_path / "own_signals_of_mine.py"
    file.write_text(textwrap.dedent(OWN))
    plugins.add(str(file))
    yield file
    sys.modules.pop("own_signals_of_mine", None)
    SIGNALS.clear()
    SIGNALS.update(before)


def test_a_signal_from_outside_is_measured_and_judged(own, tmp_path, make_documents) -> None:
    store = Store.open(tmp_path / "store")
    documents = make_documents(store, [("a", "web", "1 2 3 4"), ("b", "web", "one two"), ("c", "web", "broken"), ("d", "web", "")])
    config = parse(HeuristicsConfig, {"signals": ["digit_share", "own_path_depth"]}, "heuristics")
    made = execute(heuristics, config, {"documents": documents}, store)
    table = made.read()
    assert table["digit_share"].to_pylist() == [4 / 7, 0.0, None, None] and table["own_path_depth"].to_pylist() == [1, 1, 1, 1]
    assert table.schema.field("digit_share").metadata == {b"meaning": b"Digits among the characters", b"unit": b"fraction of characters"}
    assert made.manifest.metrics["failed_digit_share"] == 1
    assert made.manifest.metrics["first_failure_digit_share"] == "document c: ValueError: nothing to measure"
    rules = {**dict.fromkeys(n for n in SelectConfig.model_fields if n not in ("groups", "sql")), "sql": {"digits": "digit_share > 0.5"}}
    chosen = execute(select, parse(SelectConfig, rules, "select"), {"documents": documents, "signals": [made]}, store)
    assert chosen.read()["id"].to_pylist() == ["b", "d"]
    assert [(row["id"], row["rule"], row["value"], row["detail"]) for row in chosen.read("dropped").to_pylist()] == [
        ("a", "sql.digits", 4 / 7, f"digit_share > 0.5: digit_share = {4 / 7}"), ("c", "failed", None, "signal digit_share: ValueError: nothing to measure"),
    ]  # fmt: skip


COSTLY = """
    import os
    import re
    from puna.stages.contract import signal

    @signal(unit="")
    def costly(text: str) -> int:
        '''What a document makes of the machine.'''
        if text == "loops":
            while True:
                pass
        if text == "backtracks":
            return len(re.findall("(a+)+$", "a" * 60 + "b"))
        if text == "takes memory":
            return len(bytearray(1 << 40))
        if text == "ends":
            os.abort()
        print("heard by nobody")
        return len(text)
    """


def test_a_definition_that_hangs_or_explodes_costs_its_document(own, tmp_path, make_documents) -> None:
    (tmp_path / "costly_signals.py").write_text(textwrap.dedent(COSTLY))
    plugins.add(str(tmp_path / "costly_signals.py"))
    store = Store.open(tmp_path / "store")
    texts = ["loops", "fine", "backtracks", "takes memory", "ends", "good"]
    documents = make_documents(store, [(f"{n}", "web", text) for n, text in enumerate(texts)])
    config = parse(HeuristicsConfig, {"signals": ["costly"], "signal_seconds": 0.5, "signal_memory_mb": 512}, "heuristics")
    table = execute(heuristics, config, {"documents": documents}, store).read()
    assert table["costly"].to_pylist() == [None, 4, None, None, None, 4]
    assert table["failure"].to_pylist() == [
        "signal costly: it takes more than 0.5 s of CPU time", None, "signal costly: it takes more than 0.5 s of CPU time", "signal costly: MemoryError: ",
        "signal costly: its process ended", None,
    ]  # fmt: skip


def test_a_definition_that_fails_everywhere_ends_the_run(own, tmp_path, make_documents) -> None:
    store = Store.open(tmp_path / "store")
    documents = make_documents(store, [("a", "web", "broken"), ("b", "web", "broken")])
    config = parse(HeuristicsConfig, {"signals": ["digit_share"]}, "heuristics")
    with pytest.raises(PunaError, match="signal digit_share: its definition failed for all 2 documents; document a: ValueError: nothing"):
        execute(heuristics, config, {"documents": documents}, store)


def test_the_code_of_a_signal_from_outside_counts_in_the_key(own, tmp_path, make_documents) -> None:
    documents = {"documents": make_documents(Store.open(tmp_path / "store"), [("a", "web", "1")])}
    config = parse(HeuristicsConfig, {"signals": ["digit_share"]}, "heuristics")
    assert any("digit_share" in name for name in identify(heuristics, config, documents).code)
    assert not any("digit_share" in name for name in identify(heuristics, HeuristicsConfig(), documents).code)
    own.write_text(own.read_text().replace("c.isdigit()", "c.isdecimal()"))
    with pytest.raises(PunaError, match="was edited while this process runs"):
        identify(heuristics, config, documents)


def test_an_unknown_signal_is_refused_by_name(own) -> None:
    with pytest.raises(PunaError, match=r"'digit_shar' is not a signal that you defined; did you mean digit_share\?"):
        parse(HeuristicsConfig, {"signals": ["digit_shar"]}, "heuristics")
    with pytest.raises(PunaError, match="'words' is not a signal that you defined"):
        parse(HeuristicsConfig, {"signals": ["words"]}, "heuristics")


def test_a_definition_that_gives_another_type_is_named(tmp_path, make_documents, monkeypatch) -> None:
    monkeypatch.setitem(SIGNALS, "wrong_kind", SIGNALS["words"])
    del SIGNALS["wrong_kind"]

    @signal(unit="", name="wrong_kind", meaning="a number that is a word")
    def wrong(text: str) -> float:
        return text  # type: ignore[return-value]

    store = Store.open(tmp_path)
    documents = make_documents(store, [("a", "web", "x")])
    config = parse(HeuristicsConfig, {"signals": ["wrong_kind"]}, "heuristics")
    with pytest.raises(PunaError, match=r"signal wrong_kind: its definition returned 'x' \(str\) but declares float"):
        execute(heuristics, config, {"documents": documents}, store)
    del SIGNALS["wrong_kind"]


def test_what_is_declared_wrongly_is_refused() -> None:
    def no_type(text: str):
        """A docstring."""

    def no_text(words: str) -> float:
        """A docstring."""
        return 0.0

    def undocumented(text: str) -> float:
        return 0.0

    for function, said in ((no_type, "returns None"), (no_text, r"takes \['words'\]"), (undocumented, "needs a docstring")):
        with pytest.raises(TypeError, match=said):
            signal(unit="")(function)
    with pytest.raises(TypeError, match="signal words is declared twice"):
        declare_signal("words", int, "words", "again")


class UndeclaredConfig(StageConfig):
    """A configuration without fields."""


def test_a_stage_writes_only_declared_signals(tmp_path) -> None:
    @stage(kind="signals", version="1")
    def undeclared(config: UndeclaredConfig, run: StageRun) -> None:
        """Write a column that nobody declared."""
        run.write(pa.table({"id": ["a"], "never_declared": [1.0]}))

    del REGISTRY["undeclared"]
    with pytest.raises(PunaError, match="signal 'never_declared' is not declared"):
        execute(undeclared, UndeclaredConfig(), {}, Store.open(tmp_path))
