"""Stage synthesize: problems and answers by a scripted model, so that the kept ones can be derived by hand."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from puna.models import generation
from puna.models.generation import Completion
from puna.models.tokens.tokenizer import Tokenizer
from puna.stages.align.synthesize import NO_ANSWER, SynthesizeConfig, assertions, score_agreement, synthesize, trigrams
from puna.stages.contract import execute
from puna.stages.conversations import asking, content_of, messages_of
from puna.storage import Artifact, PunaError, Store
from puna.storage.schemas import table_schema

Tiny = Callable[..., Artifact]
Script = Callable[[str, int], Sequence[str | None]]


def asked(store: Store, rows: list[dict[str, Any]]) -> Artifact:
    schema = table_schema("prompts").schema
    whole = [{**dict.fromkeys(schema.names), "id": f"{i:02d}", "task": "t", "split": "train", **row} for i, row in enumerate(rows)]
    return store.import_table("prompts", pa.Table.from_pylist(whole, schema=schema))


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> Callable[[Script], list[str]]:
    """Return `scripted(script)`: the model answers with `script(prompt, n)`, None for a truncated answer; it returns the prompts that it
    saw."""

    def use(script: Script) -> list[str]:
        seen: list[str] = []

        class Engine:
            def __init__(self, _model: Any, tokenizer: Tokenizer) -> None:
                self.tokenizer = tokenizer

            def generate(self, ids: Sequence[Sequence[int]], params: Any, _progress: Any = None) -> list[list[Completion]]:
                texts = [self.tokenizer.decode(some, skip_special_tokens=True) for some in ids]
                seen.extend(texts)
                return [[self.completion(one) for one in script(text, params.n)] for text in texts]

            def completion(self, text: str | None) -> Completion:
                found = tuple(self.tokenizer.encode(text or "cut"))
                return Completion(found, (0.0,) * len(found), text is not None)

        monkeypatch.setattr(generation, "Engine", Engine)
        return seen

    return use


def made_of(artifact: Artifact) -> dict[str, tuple[str, str]]:
    """Return the problem and the answer of each row, by its prompt."""
    return {row["prompt_id"]: tuple(content_of(one) for one in messages_of(row)) for row in artifact.read().to_pylist()}  # type: ignore[misc]


def test_given_prompts_keep_a_right_answer_and_are_tried_again(tmp_path: Path, tiny_model: Tiny, scripted: Callable[[Script], list[str]]) -> None:
    store = Store.open(tmp_path)
    rows = [{"messages": asking(f"say {word}"), "verifier": json.dumps({"name": "exact", "answer": word})} for word in ("one", "two", "three", "four")]
    questions = asked(store, [*rows, {**rows[0], "split": "heldout"}])

    def script(prompt: str, n: int) -> Sequence[str | None]:
        if "say one" in prompt:
            return ["one", "no", " one ", "one"]
        if "say two" in prompt:
            return ["two" if "That is not right" in prompt else "no"] * n
        return ["no"] * n if "say three" in prompt else [None] * n

    seen = scripted(script)
    made = execute(synthesize, SynthesizeConfig(answers=4, retries=2), {"model": tiny_model(store), "prompts": questions}, store)
    assert made_of(made) == {"00": ("say one", "one"), "01": ("say two", "two")}
    assert len(seen) == 4 + 3 + 2 and all("say one" not in text for text in seen[4:])
    assert {(row["id"], row["rule"]) for row in made.read("dropped").to_pylist()} == {("02", "none_right"), ("03", "none_right")}
    assert sorted((row["name"], row["value"]) for row in made.read("scores").to_pylist()) == [("right", 0.75), ("right", 1.0), ("tries", 1.0), ("tries", 2.0)]
    assert [made.manifest.metrics[f"right_after_{number}"] for number in (1, 2, 3)] == [1, 2, 2]
    # Nine questions with four answers each, all checked; each has at least one token.
    assert made.manifest.metrics["checker_calls"] == 36 and 36 <= made.manifest.metrics["sampled_tokens"] < 36 * 9
    bare = asked(store, [{"messages": asking("say it")}])
    with pytest.raises(PunaError, match="1 of 1 prompts have no verifier"):
        execute(synthesize, SynthesizeConfig(), {"model": tiny_model(store), "prompts": bare}, store)


def test_written_problems_of_maths_are_new_and_their_answers_agree(
    tmp_path: Path, tiny_model: Tiny, scripted: Callable[[Script], list[str]]
) -> None:
    store = Store.open(tmp_path)
    held = "A train goes 3 miles in one hour, how far in two?"
    questions = asked(store, [{"messages": asking("How much is 1 + 2 ?")}, {"messages": asking(held), "split": "heldout"}])
    written = iter([f"{held} Now.", "Two apples and five more of them: how many are there?", " ", None, "Sum of 2 and 2, of all things?"])

    def script(prompt: str, n: int) -> Sequence[str | None]:
        if "one more problem" in prompt:
            assert "1. How much is 1 + 2 ?" in prompt and "train" not in prompt
            return [next(written)]
        return ["2 + 5 = 7. The answer is 7.", "The answer is 7", "The answer is 8", "7"] if "apples" in prompt else [f"The answer is {k}" for k in range(n)]

    scripted(script)
    config = SynthesizeConfig(problems="maths", count=5, answers=4, retries=0)
    made = execute(synthesize, config, {"model": tiny_model(store), "prompts": questions}, store)
    ((problem, answer),) = made_of(made).values()
    assert problem.startswith("Two apples") and answer.endswith(("7.", "7")) and "answer is 7" in answer
    assert sorted(row["rule"] for row in made.read("dropped").to_pylist()) == ["copied", "empty", "none_right", "unfinished"]
    assert made.read()["task"].to_pylist() == ["synthetic_maths"]


def test_written_programs_pass_tests_that_tell_them_from_none(tmp_path: Path, tiny_model: Tiny, scripted: Callable[[Script], list[str]]) -> None:
    store = Store.open(tmp_path)
    questions = asked(store, [{"messages": asking("Write a function half(x) that halves a number.")}])
    written = iter(["Write a function double(x) that doubles.", "Write a function three() that returns 3, always and at once."])

    def script(prompt: str, n: int) -> Sequence[str | None]:
        if "one more problem" in prompt:
            return [next(written)]
        if "Do not solve this" in prompt:
            return ["```python\nassert double(2) == 4\nassert double(-1) == -2\nassert True\n```" if "double" in prompt else "assert three() == 3"]
        assert "double" in prompt
        return [f"```python\ndef double(x):\n    return {'2 * x' if '1 of 2 tests passed' in prompt else 'x * x'}\n```"] * n

    scripted(script)
    config = SynthesizeConfig(problems="code", count=2, answers=1)
    made = execute(synthesize, config, {"model": tiny_model(store), "prompts": questions}, store)
    ((problem, answer),) = made_of(made).values()
    # x * x passes only the first test; given that message, the model corrects it.
    assert "double" in problem and "2 * x" in answer
    assert [(row["rule"], row["value"]) for row in made.read("dropped").to_pylist()] == [("tests", 1.0)]
    assert made.manifest.metrics["right_after_1"] == 0 and made.manifest.metrics["right_after_2"] == 1


def test_agreement_by_its_definition() -> None:
    def values(texts: list[str], share: float = 0.5) -> list[float | None]:
        return [score.value for score in score_agreement(texts, share)]

    said = ["The answer is 4.", "#### 4", "the answer is 5", "I do not know"]
    assert values(said) == [1, 1, 0, 0] and values(said, 0.6) == [0, 0, 0, 0]
    assert values(["The answer is 4.", "The answer is 5."]) == [0, 0]  # equally many votes for each
    assert score_agreement(["perhaps"], 0.5)[0].detail == NO_ANSWER
    assert assertions("```python\nassert a(1)\n  assert a(1)\nx = 1\n```\nassert b") == ["assert a(1)"]
    assert trigrams("One two, THREE four") == {("one", "two", "three"), ("two", "three", "four")} and trigrams("?!") == set()


def test_a_problem_without_room_for_its_tests_is_dropped_once(tmp_path: Path, tiny_model: Tiny, scripted: Callable[[Script], list[str]]) -> None:
    store = Store.open(tmp_path)
    questions = asked(store, [{"messages": asking("Write a function half(x) that halves a number.")}])
    scripted(lambda prompt, n: [" ".join(f"w{i}" for i in range(3000))])
    made = execute(synthesize, SynthesizeConfig(problems="code", count=1), {"model": tiny_model(store), "prompts": questions}, store)
    assert made.rows() == 0 and [row["rule"] for row in made.read("dropped").to_pylist()] == ["too_long"]
    assert "dropped_tests" not in made.manifest.metrics
