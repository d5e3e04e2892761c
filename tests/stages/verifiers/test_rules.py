"""Verifiers that judge a text by rules: expected values by hand, with jsonschema and Python's fractions as oracles."""

from __future__ import annotations

import json
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from puna.stages.verifiers.base import Question, Score
from puna.stages.verifiers.constraints import KINDS, count_sentences
from puna.stages.verifiers.extraction import final_answer
from puna.stages.verifiers.numeric import numbers
from puna.stages.verifiers.registry import from_text, to_text
from puna.stages.verifiers.scoring import leaves
from puna.storage import PunaError

Q = Question("q1", "t", "How much is it?", "42")


def score(answer: str, name: str, /, **parameters: Any) -> float | None:
    return from_text(to_text(name, **parameters)).score(Q, answer).value


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The answer is -4.", "-4"), ("so **the final answer is: `x y`**.", "x y"), ("#### 1,234", "1,234"), ("no mark", None),
        (r"thus \boxed{\frac{1}{2}} and done", r"\frac{1}{2}"), (r"\boxed{1} or \boxed{2}", "2"), (r"\boxed{open", None),
        ("<answer>a\nb</answer> The answer is 3", "a\nb"), ('Answer: "yes"', "yes"), ("my answers are many", None),
    ],
)  # fmt: skip
def test_final_answers(text: str, expected: str | None) -> None:
    assert final_answer(text) == expected


@given(st.text(alphabet="\\boxed{}<answer>/# is:\n$*", max_size=300))
def test_extraction_takes_any_text(text: str) -> None:
    found = final_answer(text)
    assert found is None or len(found) <= len(text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1,234.5", [Fraction("1234.5")]), ("-4", [-4]), ("−4", [-4]), ("–4", [-4]), ("10-3", [10, 3]), ("10–3 – 2", [10, 3, 2]), ("3/4", [Fraction(3, 4)]), ("1 1/2", [Fraction(3, 2)]),
        (r"-\frac{1}{2}", [Fraction(-1, 2)]), (r"2\frac{1}{2}", [Fraction(5, 2)]), ("1.5e3", [1500]), (r"2 \times 10^{3}", [2000]),
        ("$12.50", [Fraction(25, 2)]), ("1,2,3", [1, 2, 3]), ("1e999999999", []), ("9" * 500, []), ("1/0", []), ("v2 x3", []),
        ("10^5", [100_000]), ("10^{-2}", [Fraction(1, 100)]), ("2**10", [1024]), ("-2^2", [-4]), ("x^2 = 9", [9]), ("x**2 + y^{-3}", []), ("9^999999999", []),
        ("**5** and **42**", [5, 42]), ("3 ^ 2", [9]), ("0^-1", []),
    ],
)  # fmt: skip
def test_numbers_are_read_exactly(text: str, expected: list[Any]) -> None:
    assert [found.value for found in numbers(text)] == expected


@given(st.integers(-10**15, 10**15), st.integers(0, 6))
def test_numbers_with_separators_mean_what_python_says(value: int, places: int) -> None:
    exact = Fraction(value, 10**places)
    shown = f"{abs(value) // 10**places:,}" + (f".{abs(value) % 10**places:0{places}d}" if places else "")
    (found,) = numbers(("-" if value < 0 else "") + shown)
    assert found.value == exact


@pytest.mark.parametrize(
    ("answer", "parameters", "expected"),
    [
        ("It is 42.", {}, 1), ("41 then 42", {}, 1), ("42 then 41", {}, 0), ("42 or 41", {"take": "only"}, 0), ("The answer is 42, not 41 apples", {"take": "first"}, 1),
        ("42.4", {"absolute": 0.5}, 1), ("43", {"relative": 0.01}, 0), ("43", {"relative": 0.03}, 1), ("none", {}, 0),
        ("4200 cm", {"units": {"m": 1, "cm": 0.01}}, 1), ("42 cm", {"units": {"m": 1, "cm": 0.01}}, 0), ("42", {"units": {"m": 1}}, 0),
        ("42", {"units": {"m": 1, "": 1}}, 1), ("42 km", {"units": {"m": 1, "": 1}}, 0), ("1.042,0", {"answer": 1042, "decimal": "comma"}, 1),
        ("0.1", {"answer": "1/10"}, 1), (r"\boxed{42}, after 7 steps", {}, 1),
    ],
)  # fmt: skip
def test_numeric(answer: str, parameters: dict[str, Any], expected: int) -> None:
    assert score(answer, "numeric", **parameters) == expected


def test_exact_and_regex() -> None:
    assert score(" 42\n", "exact") == score("The answer is 42.", "exact") == 1 and score("The answer is 42.", "exact", extract=False) == 0
    assert score("Cafe\u0301!", "exact", answer="café", ignore_case=True, ignore_punctuation=True) == 1
    assert score("no", "exact", also=["no"]) == 1
    assert score("a42b", "regex", pattern=r"\d+") == 1 and score("a42b", "regex", pattern=r"\d+", match="whole") == 0
    assert score("ab", "regex", pattern="x", absent=True) == 1
    # Exponential in a backtracking engine.
    assert score("a" * 50_000 + "b", "regex", pattern="(a+)+$") == 0


def test_json_schema_agrees_with_jsonschema() -> None:
    import jsonschema

    schema = {"type": "object", "required": ["a"], "properties": {"a": {"type": "integer", "minimum": 0}, "d": {"type": "string", "format": "date"}}}
    oracle = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER)
    for value in ({"a": 1}, {"a": -1}, {}, [], {"a": 1, "d": "2024-02-30"}, {"a": 1, "d": "2024-02-29"}, {"a": 1.5}):
        expected = float(oracle.is_valid(value))
        for text in (json.dumps(value), f"Here:\n```json\n{json.dumps(value)}\n```\n"):
            assert score(text, "json_schema", json_schema=schema) == expected
    assert score('{"a": NaN}', "json_schema", json_schema={}) == score('{"a": 1, "a": 2}', "json_schema", json_schema={}) == 0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("no json", "a verifier is JSON"), ("[]", "a verifier is a JSON object"), ('{"name": "exakt"}', "there is no verifier 'exakt'; did you mean exact"),
        ('{"name": "exact", "answr": 1}', "exact.answr: no such field; did you mean answer"), ('{"name": "regex", "pattern": "(?=a)"}', "is not valid RE2 syntax"),
        ('{"name": "json_schema", "json_schema": {"format": "colour"}}', "the format 'colour' cannot be checked"),
        ('{"name": "json_schema", "json_schema": {"items": {"$ref": "http://example.com/x.json"}}}', "cannot be resolved to a schema"),
        ('{"name": "json_schema", "json_schema": {"$ref": "#/$defs/b", "$defs": {"a": {}}}}', "cannot be resolved to a schema"),
        ('{"name": "json_schema", "json_schema": {"$ref": "#/const", "const": 3}}', "'#/const' cannot be resolved to a schema"),
        ('{"name": "json_schema", "json_schema": {"properties": {"a": {"requried": ["b"]}}}}', "no keyword 'requried'; did you mean 'required'"),
        ('{"name": "json_schema", "json_schema": {"dependencies": {"a": ["b"]}}}', "the draft has no keyword 'dependencies'"),
        ('{"name": "json_schema", "json_schema": {"$schema": []}}', r"json_schema\.\$schema: is not text"),
        ('{"name": "product", "of": [{"name": "json_schema", "json_schema": {"$schema": 5}}]}', r"json_schema\.\$schema: is not text"),
        ('{"name": "json_schema", "json_schema": {"type": 3}}', "json_schema"), ('{"name": "numeric", "answer": "none"}', "contains no number"),
        ('{"name": "python", "function": "puna.stages.draws:nothing"}', "is Puna's own; a prompt may name Puna's verifiers by their names"), ('{"name": "weighted", "of": [{"name": "exact"}], "weights": []}', "0 weights for 1"),
        ('{"name": "constraints", "instruction_id_list": ["punctuation:no_coma"], "kwargs": [{}]}', "did you mean punctuation:no_comma"),
        ('{"name": "constraints", "instruction_id_list": ["keywords:existence"], "kwargs": [{}]}', "missing argument 'keywords'"),
    ],
)  # fmt: skip
def test_wrong_settings_are_named(text: str, message: str) -> None:
    with pytest.raises(PunaError, match=message):
        from_text(text)


def test_combinations() -> None:
    parts = [{"name": "exact", "answer": "42"}, {"name": "regex", "pattern": "4"}]
    product, mean = from_text(to_text("product", of=parts)), from_text(to_text("weighted", of=parts, weights=[1, 3]))
    assert [leaf.name for leaf in leaves(from_text(to_text("product", of=[json.loads(to_text("product", of=parts)), parts[0]])))] == ["exact", "regex", "exact"]
    assert product.combine([Score(0.5), Score(0.5)]).value == 0.25 and mean.combine([Score(0.0), Score(1.0)]).value == 0.75


# id, arguments, an answer that follows the instruction, one that does not
CASES: list[tuple[str, dict[str, Any], str, str]] = [
    ("keywords:existence", {"keywords": ["Llama", "grass"]}, "A llama eats grass.", "A llama eats."),
    ("keywords:frequency", {"keyword": "war", "frequency": 2, "relation": "at least"}, "War and war", "war"),
    ("keywords:forbidden_words", {"forbidden_words": ["rock"]}, "rocket", "Rock!"),
    ("keywords:letter_frequency", {"letter": "a", "let_frequency": 2, "let_relation": "less than"}, "a b", "A a"),
    ("language:response_language", {"language": "de"}, "Das ist ein ganz gewöhnlicher deutscher Satz.", "This is an ordinary English sentence."),
    ("length_constraints:number_sentences", {"num_sentences": 3, "relation": "at least"}, "One. Two! Three?", "Mr. Smith paid 3.5 euros. Fine."),
    ("length_constraints:number_words", {"num_words": 3, "relation": "at least"}, "one two three", "one two"),
    ("length_constraints:number_paragraphs", {"num_paragraphs": 2}, "a\n***\nb", "a\n\nb"),
    ("length_constraints:nth_paragraph_first_word", {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "weekend"}, "a\n\n\"Weekend, yes", "weekend\n\na"),
    ("detectable_content:number_placeholders", {"num_placeholders": 2}, "[name] at [place]", "[name]"),
    ("detectable_content:postscript", {"postscript_marker": "P.P.S"}, "Bye.\nP. P.S. more", "Bye.\nP.S. more"),
    ("detectable_format:number_bullet_lists", {"num_bullets": 2}, "* a\n- b\n**c**", "* a"),
    ("detectable_format:constrained_response", {}, "My answer is maybe.", "Maybe."),
    ("detectable_format:number_highlighted_sections", {"num_highlights": 2}, "*a* and **b**", "*a* and b"),
    ("detectable_format:multiple_sections", {"section_spliter": "SECTION", "num_sections": 2}, "SECTION 1\na\nSECTION 2\nb", "SECTION 1\na"),
    ("detectable_format:json_format", {}, "```json\n{\"a\": 1}\n```", "{a: 1}"),
    ("detectable_format:title", {}, "<<A title>>\ntext", "<<>>\ntext"),
    ("combination:two_responses", {}, "a\n******\nb", "a\n******\na"),
    ("combination:repeat_prompt", {"prompt_to_repeat": "Say it."}, "say it. Well", "Well: say it."),
    ("startend:end_checker", {"end_phrase": "Any more?"}, "Text. \"any more?\"", "Any more? No."),
    ("startend:quotation", {}, "\"a\"", "a\""),
    ("change_case:capital_word_frequency", {"capital_frequency": 2, "capital_relation": "at least"}, "WELL-KNOWN LLAMA", "LLAMA eats"),
    ("change_case:english_capital", {}, "THIS IS A SENTENCE IN ENGLISH", "This is a sentence in English"),
    ("change_case:english_lowercase", {}, "this is a sentence in english", "das ist ein kleiner deutscher satz ohne alles"),
    ("punctuation:no_comma", {}, "a; b", "a, b"),
]  # fmt: skip


def test_every_instruction_of_ifeval_has_a_case() -> None:
    assert sorted(name for name, *_ in CASES) == sorted(KINDS) and len(KINDS) == 25


@pytest.mark.parametrize(("name", "arguments", "good", "bad"), CASES, ids=[case[0] for case in CASES])
def test_instructions(name: str, arguments: dict[str, Any], good: str, bad: str) -> None:
    given = {"instruction_id_list": [f"en:{name}"], "kwargs": [{**arguments, "unused": None}]}
    assert score(good, "constraints", **given) == 1 and score(bad, "constraints", **given) == 0 and score(" ", "constraints", **given) == 0


def test_constraints_loose_and_partial() -> None:
    two = {"instruction_id_list": ["punctuation:no_comma", "startend:quotation"], "kwargs": [{}, {}]}
    assert score("a, b", "constraints", **two) == 0 and score("a b", "constraints", **two, partial=True) == 0.5
    assert score("Here you are:\n\"a b\"", "constraints", **two) == 0 and score("Here you are:\n\"a b\"", "constraints", **two, loose=True) == 1


@pytest.mark.parametrize(("text", "count"), [("", 0), ("No end", 1), ("Hello Mr. Smith. How are you? Fine.", 3), ("e.g. this one. Wait... what?", 2), ("1. One\n2. Two", 1)])
def test_sentences(text: str, count: int) -> None:
    assert count_sentences(text) == count
