"""Puna's own tasks: right answers are accepted, wrong ones are not, and no training question has a held-out structure."""

from __future__ import annotations

import json
import re
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa
import pytest

from puna.stages.align.instructions import ChosenConfig, InstructionsConfig, chosen, instructions
from puna.stages.align.preferences import PreferencesConfig, preferences
from puna.stages.align.rejection_sample import RejectionSampleConfig, rejection_sample
from puna.stages.contract import execute, parse
from puna.stages.conversations import answering, asking, messages_of, text_of
from puna.stages.prompts import tasks
from puna.stages.prompts.prompts import PromptsConfig, prompts
from puna.stages.verifiers.base import Question
from puna.stages.verifiers.registry import from_json
from puna.storage import Artifact, PunaError, Store
from puna.storage.schemas import table_schema

TASKS: list[dict[str, Any]] = [
    {"task": "digits", "name": "rising"},
    {"task": "digits", "name": "ending", "parameters": {"place": "last", "order": "falling", "count": 4}},
]
NOTHING = Question("", "", "", None)


def score(verifier: dict[str, Any], answer: str) -> float | None:
    made = from_json(verifier)
    parts = [part.score(NOTHING, answer) for part in made.parts()]
    return (made.combine(parts) if parts else made.score(NOTHING, answer)).value


@pytest.mark.parametrize("task", TASKS, ids=lambda task: str(task.get("name", task["task"])))
def test_a_drawn_answer_is_right_and_answers_a_step_beside_it_are_not(task: dict[str, Any]) -> None:
    generator = tasks.of(task["task"], task.get("parameters", {}))
    assert generator is not None
    random = Random(3)
    for _ in range(100):
        drawn = generator.draw(random)
        items = drawn.answer.split()
        assert score(drawn.verifier, drawn.answer) == score(drawn.verifier, f" {', '.join(items)}\n") == 1
        for wrong in (items[::-1], items[1:], [*items, items[-1]], [items[0], *items[:-1]], [*items[:-1], "1234"], [*items[:-1], "?"], []):
            assert score(drawn.verifier, " ".join(wrong)) == 0


def test_a_sentence_has_both_words_and_speaks_of_neither() -> None:
    generator = tasks.of("sentence", {})
    assert generator is not None
    random = Random(3)
    for _ in range(50):
        drawn = generator.draw(random)
        one, other = re.findall(r'"(\w+)"', drawn.question)
        assert {tasks.NOUNS.index(noun) % tasks.GROUPS for noun in (one, other)} == {int(drawn.structure.split()[1])}
        assert score(drawn.verifier, drawn.answer) == score(drawn.verifier, f" Two {one}s and a {other} lay on the floor!\n") == 1
        for wrong in (
            "", f"The {one} is red.", f"The {one} is an x{other}, as everybody there knows.", f"A {one}. A {other} beside it there.",
            f"the {one} stood beside the {other} there.", f"The {one} stood beside the {other} there", f'The "{one}" stood beside the {other} there.',
            f"The words {one} and {other} are in this.", f"This is a sentence with {one} and {other}.", f"A {one}, a {other}.",
        ):  # fmt: skip
            assert score(drawn.verifier, wrong) == 0, wrong


def test_a_scene_is_one_sentence_with_both() -> None:
    generator = tasks.of("scene", {})
    assert generator is not None
    random = Random(3)
    for _ in range(50):
        drawn = generator.draw(random)
        job, noun = re.findall(r"in which an? (\w+) finds an? (\w+)\.", drawn.question)[0]
        assert job in tasks.JOBS and tasks.NOUNS.index(noun) % tasks.GROUPS == int(drawn.structure.split()[1])
        assert score(drawn.verifier, drawn.answer) == score(drawn.verifier, f" Two {job}s came upon some {noun}s there!\n") == 1
        for wrong in (
            "", f"A {noun}.", f"Somebody found a {noun} in the old house.", f"The {job} found nothing in the old house.",
            f"The {job} looked. A {noun} lay there.", f'"A {noun}!" said the {job} and took it.', f"a {job} found a {noun} on the road.",
            f"A {job} found a {noun} on the road", f"The sentence: a {job} found a {noun}.", f"The {job} found an x{noun}x on the road.",
        ):  # fmt: skip
            assert score(drawn.verifier, wrong) == 0, wrong


def test_a_record_has_the_fields_asked_for_and_no_other() -> None:
    generator = tasks.of("record", {"fields": 2})
    assert generator is not None
    random = Random(3)
    for _ in range(50):
        drawn = generator.draw(random)
        job, keys = re.findall(r"made-up (\w+) as a JSON object with the keys (.+)\.", drawn.question)[0]
        right = json.loads(drawn.answer)
        assert list(right) == keys.split(", ") and job in tasks.JOBS
        assert drawn.structure == f"fields {', '.join(sorted(right))}"
        assert score(drawn.verifier, drawn.answer) == score(drawn.verifier, f"Here it is:\n```json\n{drawn.answer}\n```") == 1
        for wrong in ({**right, "more": 1}, {key: right[key] for key in list(right)[1:]}, {**right, keys.split(", ")[0]: None}, [right]):
            assert score(drawn.verifier, json.dumps(wrong)) == 0
        assert score(drawn.verifier, "") == score(drawn.verifier, str(right)[:-1]) == 0


def test_numbers_by_their_definition() -> None:
    """Every pair of numbers, compared with the sentence by which a person would check them."""
    verifier = {"name": "numbers", "count": 2, "lower": 3, "upper": 9, "divisor": 2, "remainder": 1, "order": "rising"}
    for a in range(13):
        for b in range(13):
            right = a % 2 == b % 2 == 1 and 3 <= a < b <= 9
            assert score(verifier, f"{a} {b}") == right
            assert score({**verifier, "order": "falling"}, f"{b} {a}") == right
    with pytest.raises(PunaError, match="3 numbers from 3 to 8 leave 1 when divided by 2: too few"):
        from_json({**verifier, "count": 4, "upper": 8})


def test_given_digits_by_their_definition() -> None:
    """Every pair of numbers below 100, compared with the sentence by which a person would check them."""
    first = {"name": "numbers", "count": 2, "lower": 10, "upper": 99, "digits": [7, 2], "order": "rising"}
    last = {**first, "place": "last", "lower": 20, "upper": 50, "order": "falling"}
    for a in range(100):
        for b in range(100):
            assert score(first, f"{a} {b}") == (10 <= a < b and sorted((a // 10, b // 10)) == [2, 7])
            assert score(last, f"{a} {b}") == (50 >= a > b >= 20 and sorted((a % 10, b % 10)) == [2, 7])
    for wrong in ([7], [7, 12]):
        with pytest.raises(PunaError, match="digits must be 2 digits from 0 to 9"):
            from_json({**first, "digits": wrong})


def asked(store: Store, **values: Any) -> Artifact:
    config = parse(PromptsConfig, {"tasks": TASKS, "train": 60, "heldout": 30, "draws": 1500, **values}, "prompts")
    return execute(prompts, config, {}, store)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_no_training_question_has_the_structure_of_a_held_out_one(tmp_path: Path, seed: int) -> None:
    """The structure is the sum of the digits modulo 5; in every task and every slice."""
    store = Store.open(tmp_path)
    found: dict[str, set[int]] = {"heldout": set(), "train": set()}
    for skip in (0, 60):
        for row in asked(store, seed=seed, skip=skip).read().to_pylist():
            text = text_of(messages_of(row))
            given = re.search(r"that (?:begin with|end in) (.*)\.", text)
            assert given is not None
            found[row["split"]].add(sum(map(int, re.findall(r"\d", given[1]))) % 5)
    assert len(found["heldout"]) == 1 and len(found["train"]) == 4 and not found["heldout"] & found["train"]


def test_prompts_without_references_are_scored_but_not_learned(tmp_path: Path) -> None:
    store = Store.open(tmp_path)
    bare = asked(store, references=False)
    assert all(row["reference"] is None and row["verifier"] for row in bare.read().to_pylist())
    with pytest.raises(PunaError, match="has a reference answer to learn from"):
        execute(instructions, InstructionsConfig(), {"prompts": bare}, store)


def test_a_task_without_gold_answers_leaves_the_others_theirs(tmp_path: Path) -> None:
    store = Store.open(tmp_path)
    config = parse(PromptsConfig, {"tasks": [{"task": "sentence", "gold": False}, {"task": "record"}], "train": 6, "heldout": 2, "draws": 100}, "prompts")
    made = execute(prompts, config, {}, store)
    rows = made.read().to_pylist()
    assert {(row["task"], row["reference"] is None) for row in rows} == {("sentence", True), ("record", False)}
    gold = execute(instructions, InstructionsConfig(), {"prompts": made}, store)
    train = [row for row in rows if row["split"] == "train"]
    assert {row["prompt_id"] for row in gold.read().to_pylist()} == {row["id"] for row in train if row["task"] == "record"}
    assert {(row["id"], row["rule"]) for row in gold.read("dropped").to_pylist()} == {
        (row["id"], "no_reference") for row in train if row["task"] == "sentence"
    }


# --- what rounds learn from answers to them ---------------------------------------------------------------


TEXTS = ["2 4", "2 6", "3 5", "2 4", "6 2", "4 6"]
PROMPT = {"name": "numbers", "count": 2, "lower": 2, "upper": 8, "divisor": 2, "remainder": 0, "order": "rising"}


def answered(store: Store, prompt_count: int = 40) -> dict[str, Any]:
    """Return prompts with one verifier, each with six answers: four are right, and two of these begin with a 4."""
    rows = [
        {"id": f"p{i}", "task": "t", "split": "train", "messages": asking(f"say {i}"), "tools": None, "reference": None,
         "verifier": from_text_json(PROMPT)} for i in range(prompt_count)
    ]  # fmt: skip
    answers = [
        {"id": f"p{i}-{k}", "prompt_id": f"p{i}", "sample": k, "model": "m", "text": text, "tokens": [1], "logprobs": [0.0],
         "finished": True, "score": None, "gold": score(PROMPT, text), "detail": None}
        for i in range(prompt_count) for k, text in enumerate(TEXTS)
    ]  # fmt: skip
    return {
        "prompts": store.import_table("prompts", pa.Table.from_pylist(rows, schema=table_schema("prompts").schema)),
        "answers": store.import_table("answers", pa.Table.from_pylist(answers, schema=table_schema("answers").schema)),
    }


def from_text_json(verifier: dict[str, Any]) -> str:
    from puna.stages.verifiers.registry import to_text

    return to_text(verifier["name"], **{key: value for key, value in verifier.items() if key != "name"})


def test_preferences_are_by_right_and_then_by_taste(tmp_path: Path) -> None:
    store = Store.open(tmp_path)
    given = answered(store)
    taste = {"name": "regex", "pattern": "6$"}
    config = PreferencesConfig(pairs_per_prompt=3, noise=0.0, taste=taste, judged_fraction=0.5, heldout_fraction=0.0)
    rows = execute(preferences, config, given, store).read().to_pylist()
    assert 8 < len({row["prompt_id"] for row in rows}) < 32
    rank = {"2 6": 3, "4 6": 3, "2 4": 2, "3 5": 0, "6 2": 0}
    for row in rows:
        better, worse = rank[content(row["chosen"])], rank[content(row["rejected"])]
        assert better > worse and row["edited"] is None
        # .6 for right, .4 for the preference.
        assert row["margin"] == pytest.approx({(3, 2): 0.4, (2, 0): 0.6, (3, 0): 1.0}[better, worse])
    flipped = execute(preferences, config.model_copy(update={"flips": 0.3}), given, store).read().to_pylist()
    wrong = sum(rank[content(row["chosen"])] < rank[content(row["rejected"])] for row in flipped)
    assert len(flipped) == len(rows) and 0.1 < wrong / len(flipped) < 0.55
    with pytest.raises(Exception, match="taste"):
        PreferencesConfig(taste={"name": "regexp"})


def content(answer: str) -> str:
    import json

    return str(json.loads(answer)["content"])


def test_picks_take_what_they_say(tmp_path: Path) -> None:
    store = Store.open(tmp_path)
    given = answered(store)
    texts = {}
    for pick in ("random", "majority", "verifier"):
        made = execute(rejection_sample, RejectionSampleConfig(pick=pick), given, store)
        texts[pick] = [content_of(row) for row in made.read().to_pylist()]
        assert len(texts[pick]) == 40
    assert set(texts["majority"]) == {"2 4"} and set(texts["verifier"]) == {"2 4", "2 6", "4 6"} and set(texts["random"]) == set(TEXTS)
    many = execute(rejection_sample, RejectionSampleConfig(pick="verifier", most=9), given, store)
    by_prompt: dict[str, list[str]] = {}
    for row in many.read().to_pylist():
        by_prompt.setdefault(row["prompt_id"], []).append(content_of(row))
    # All right answers, each text once; "2 4" was given twice.
    assert len(by_prompt) == 40 and all(sorted(some) == ["2 4", "2 6", "4 6"] for some in by_prompt.values())
    with pytest.raises(PunaError, match="pick=reward_model needs a reward_model"):
        execute(rejection_sample, RejectionSampleConfig(), given, store)


def content_of(row: dict[str, Any]) -> str:
    return str(messages_of(row)[-1]["content"])


def test_chosen_answers_are_learned_once_and_held_out_ones_never(tmp_path: Path) -> None:
    store = Store.open(tmp_path)

    def pair(number: int, better: str, split: str = "train", level: str = "better", edited: str | None = None) -> dict[str, Any]:
        return {
            "id": str(number), "prompt_id": "p5" if split == "heldout" else f"p{number % 2}", "task": "t", "split": split, "messages": asking("q"), "tools": None,
            "chosen": answering(better), "rejected": answering("no"), "edited": edited and answering(edited), "others": None,
            "level": level, "margin": 0.5, "chosen_model": "m", "rejected_model": "m",
        }  # fmt: skip

    rows = [pair(0, "a"), pair(2, "a"), pair(4, "b"), pair(1, "a"), pair(3, "c", edited="d"), pair(5, "h", split="heldout"),
            pair(6, "s", level="slightly_better")]  # fmt: skip
    given = store.import_table("preferences", pa.Table.from_pylist(rows, schema=table_schema("preferences").schema))
    found = execute(chosen, ChosenConfig(levels=("better",)), {"preferences": [given]}, store).read().to_pylist()
    assert sorted((row["prompt_id"], content_of(row)) for row in found) == [("p0", "a"), ("p0", "b"), ("p1", "a"), ("p1", "d")]
