"""A measure of how far answers to different questions follow one template."""

from __future__ import annotations

import pytest

from puna.stages.evaluation.evaluate import variety


def test_a_template_in_which_the_questions_words_change_has_none() -> None:
    nouns = ["lemon", "bridge", "queen"]
    assert variety([(f'Write one sentence with "{noun}".', f"There was a {noun.upper()} here.") for noun in nouns]) == [0, 0, 0]


def test_runs_of_three_words_by_hand() -> None:
    # Beginning and end are separate words: the first two answers share four runs, the last three, and all share the first run.
    assert variety([("dog?", "The old one ran."), ("dog?", "The old cat sat."), ("cat?", "The old dog!")]) == pytest.approx([3 / 4, 3 / 4, 2 / 3])


def test_answers_of_no_words_are_alike_and_a_single_answer_is_its_own() -> None:
    assert variety([("a b", "b a"), ("a b", ""), ("a b", "c")]) == [0, 0, 1]
    assert variety([("", "")]) == [1]
