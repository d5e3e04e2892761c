"""Prompts like IFEval's: their text matches their checker, and none repeats a test prompt."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from random import Random
from types import ModuleType
from typing import Any

import pytest

from puna.stages.verifiers.base import Question
from puna.stages.verifiers.constraints import KINDS
from puna.stages.verifiers.registry import from_text

FILE = Path(__file__).parents[2] / "benchmarks" / "known_prompts.py"
REQUEST = "Write a slogan for rain."
TRANSLATED = {
    "fr": "La pluie tombe sur la ville et les enfants sont contents.",
    "de": "Der Regen fällt auf die Stadt und wir bleiben zu Hause.",
    "es": "La lluvia cae sobre la ciudad y los niños están contentos.",
    "it": "La pioggia cade sulla città e i bambini sono contenti.",
    "pt": "A chuva cai sobre a cidade e as crianças estão contentes.",
}


@pytest.fixture(scope="module")
def known() -> ModuleType:
    spec = importlib.util.spec_from_file_location("known_prompts", FILE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def followed(name: str, given: dict[str, Any], text: str) -> str:
    """Return an answer that follows an instruction, built from its arguments and its text."""
    number = next((value for value in given.values() if isinstance(value, int)), 0)
    answers = {
        "existence": " ".join(given.get("keywords", [])),
        "frequency": " ".join([str(given.get("keyword"))] * number),
        "forbidden_words": "Rain sings.",
        "letter_frequency": str(given.get("letter")) * number,
        "response_language": TRANSLATED.get(str(given.get("language")), ""),
        "english_capital": "THE RAIN IS GOOD FOR THE GARDEN.",
        "english_lowercase": "the rain is good for the garden.",
        "capital_word_frequency": " ".join(["RAIN"] * number),
        "number_sentences": "It rains." if "under" in text else "It rains. " * number,
        "number_words": "Rain." if given.get("relation") == "less than" else "rain " * number,
        "number_paragraphs": " *** ".join(["Rain"] * number),
        "number_placeholders": "[name] " * number,
        "nth_paragraph_first_word": f"{given.get('first_word')} one\n\n{given.get('first_word')} two",
        "postscript": f"Rain. {given.get('postscript_marker')} More rain.",
        "number_bullet_lists": "* rain\n" * number,
        "constrained_response": "My answer is yes.",
        "number_highlighted_sections": "*rain* " * number,
        "multiple_sections": f"{given.get('section_spliter')} 1 rain {given.get('section_spliter')} 2 sun",
        "json_format": '{"rain": 1}',
        "title": "<<Rain>> falls",
        "two_responses": "Rain ****** Sun",
        "repeat_prompt": f"{REQUEST} Rain!",
        "end_checker": f"Rain. {given.get('end_phrase')}",
        "quotation": '"Rain"',
        "no_comma": "Rain falls.",
    }
    return answers[name.partition(":")[2]]


def test_each_kind_has_a_maker(known: ModuleType) -> None:
    assert set(known.MAKERS) == set(KINDS)


@pytest.mark.parametrize("name", KINDS)
def test_an_answer_that_does_what_the_words_say_passes(known: ModuleType, name: str) -> None:
    for seed in range(12):
        text, given = known.MAKERS[name](Random(seed), REQUEST)
        check = from_text(json.dumps({"name": "constraints", "instruction_id_list": [name], "kwargs": [given]}))
        assert check.score(Question("", "", "", None), followed(name, given, text)).value == 1, (text, given)


def test_no_prompt_shares_eight_words_with_a_test_prompt(known: ModuleType) -> None:
    first = known.draw(50, 3, known.SUBJECTS[:5], [], True)
    tested = [row["prompt"] for row in first[:10]]
    drawn = [row["prompt"] for row in known.draw(50, 3, known.SUBJECTS[:5], tested, True)]
    assert len(set(drawn)) == 50
    assert not any(known.runs(one) & known.runs(other) for one in drawn for other in tested)


def test_kinds_come_in_turn(known: ModuleType) -> None:
    rows = known.draw(50, 1, known.SUBJECTS, [], True)
    firsts = [json.loads(row["verifier"])["instruction_id_list"][0] for row in rows]
    assert all(sorted(firsts[start : start + 25]) == sorted(KINDS) for start in (0, 25))


def test_a_kind_that_the_test_leaves_no_words_is_named(known: ModuleType) -> None:
    with pytest.raises(ValueError, match="has no other"):
        known.draw(2000, 0, ["rain"], [], True)
