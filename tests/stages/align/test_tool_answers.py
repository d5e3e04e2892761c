"""Tool calls in synthetic data and in evaluation: a scripted model calls the calculator, whose results are computed, not scripted."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from puna.models import generation
from puna.models.generation import Completion
from puna.models.tokens.tokenizer import Tokenizer
from puna.stages.align.synthesize import NO_CALL, SynthesizeConfig, synthesize
from puna.stages.contract import execute
from puna.stages.conversations import asking, messages_of, tools_of
from puna.stages.evaluation.evaluate import EvaluateConfig, evaluate
from puna.stages.training.train import render_conversation
from puna.storage import Artifact, Store
from tests.stages.align.test_synthesize import asked

Tiny = Callable[..., Artifact]
Script = Callable[[str, int], Sequence[str]]
TOOLS: dict[str, Any] = {"turns": 3, "tools": ["calculator"]}


def call(expression: str) -> str:
    return f'<tool_call>{json.dumps({"name": "calculator", "arguments": {"expression": expression}})}</tool_call>'


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> Callable[[Script], list[str]]:
    """Return `scripted(script)`: `script(context, n)` gives the turns that follow a context; it returns the contexts that the model saw."""

    def use(script: Script) -> list[str]:
        seen: list[str] = []

        class Engine:
            def __init__(self, _model: Any, tokenizer: Tokenizer, **_limits: Any) -> None:
                self.tokenizer = tokenizer

            def generate(self, ids: Sequence[Sequence[int]], params: Any, _progress: Any = None) -> list[list[Completion]]:
                counts = [one.n for one in params] if isinstance(params, list) else [params.n] * len(ids)
                texts = [self.tokenizer.decode(some) for some in ids]
                seen.extend(texts)
                return [[self.turn(one) for one in script(text, n)] for text, n in zip(texts, counts, strict=True)]

            def turn(self, text: str) -> Completion:
                tokens = [*self.tokenizer.encode(text), self.tokenizer.stop_ids[-1]]
                return Completion(tokens, [0.0] * len(tokens), True)

        monkeypatch.setattr(generation, "Engine", Engine)
        return seen

    return use


def sums(store: Store, split: str, *pairs: tuple[int, int]) -> Artifact:
    rows = [
        {"messages": asking(f"say {a} times {b}"), "split": split, "verifier": json.dumps({"name": "numeric", "answer": a * b})} for a, b in pairs
    ]
    return asked(store, rows)


def test_answers_are_kept_with_calls_that_ran(tmp_path: Path, tiny_model: Tiny, scripted: Callable[[Script], list[str]]) -> None:
    """Four attempts: with the tool, without it, with a call that fails, and with the tool but wrong. Then: without it, until asked to use
    it."""
    store = Store.open(tmp_path)

    def script(context: str, n: int) -> Sequence[str]:
        if n == 1:  # the turn after a reply
            return ["It is 150." if "12 * 13 * 1" in context else "It is 156." if "12" in context else "It is 35."]
        if "say 12" in context:
            return [call("12 * 13"), "It is 156.", call("12 * "), call("12 * 13 * 1")]
        return [call("5 * 7") if NO_CALL in context else "It is 35."] * n

    seen = scripted(script)
    prompts = sums(store, "train", (12, 13), (5, 7), (2, 2))
    given = {"model": tiny_model(store), "prompts": prompts}
    made = execute(synthesize, SynthesizeConfig(answers=4, retries=1, **TOOLS), given, store)
    rows = {row["prompt_id"]: row for row in made.read().to_pylist()}
    turns = {name: [(one["role"], one["content"]) for one in messages_of(row)] for name, row in rows.items()}
    assert turns == {
        "00": [("user", "say 12 times 13"), ("assistant", call("12 * 13")), ("tool", str(12 * 13)), ("assistant", "It is 156.")],
        "01": [("user", "say 5 times 7"), ("assistant", call("5 * 7")), ("tool", str(5 * 7)), ("assistant", "It is 35.")],
    }
    assert [(row["id"], row["rule"]) for row in made.read("dropped").to_pylist()] == [("02", "none_right")]
    scores = {(row["id"], row["name"]): row["value"] for row in made.read("scores").to_pylist()}
    assert scores[rows["00"]["id"], "right"] == 0.25 and scores[rows["01"]["id"], "tries"] == 2
    for row in rows.values():
        (tool,) = tools_of(row) or ()
        assert tool["function"]["name"] == "calculator"
    assert sum(NO_CALL in text for text in seen) == 2 + 2 * 4  # two problems requested again, and four calls after each

    # Finetuning trains on the calls and the last turn, not on the tool's replies, which no model wrote.
    tokenizer = Tokenizer.load(given["model"].path())
    for row in rows.values():
        (example,) = render_conversation(tokenizer, row)
        learned = tokenizer.decode([t for t, own in zip(example.answers[0], example.masks[0], strict=True) if own], skip_special_tokens=True)
        said = [one["content"] for one in messages_of(row) if one["role"] == "assistant"]
        assert all(text in learned for text in said) and len(learned) == sum(map(len, said))


def test_what_is_evaluated_may_call_tools(tmp_path: Path, tiny_model: Tiny, scripted: Callable[[Script], list[str]]) -> None:
    """A model that copies the tool's result is right on all prompts with the tool, and on none without it."""
    store = Store.open(tmp_path)

    def script(context: str, n: int) -> Sequence[str]:
        numbers = context.split("say ")[1].split("\n")[0].split("<")[0].split(" times ")
        product = str(int(numbers[0]) * int(numbers[1].split()[0]))
        return [f"It is {product}."] if product in context else [call(f"{numbers[0]} * {numbers[1].split()[0]}")]

    scripted(script)
    given = {"model": tiny_model(store), "prompts": sums(store, "heldout", (12, 13), (15, 17))}
    for tools, right in ((TOOLS, 1.0), ({}, 0.0)):
        config = EvaluateConfig(answers={"max_tokens": 200, **tools})
        rows = execute(evaluate, config, given, store).read().to_pylist()
        assert {row["value"] for row in rows if row["metric"] == "accuracy"} == {right}
    with pytest.raises(ValueError, match="answers.turns is untested with a search or vLLM; set answers.turns to 1"):
        EvaluateConfig(answers={**TOOLS, "temperature": 1, "search": {"n": 2}})


@pytest.mark.parametrize("wrong", [{"problems": "maths"}, {"endpoint": {"base_url": "http://localhost:1/v1", "model": "other"}}])
def test_turns_are_for_given_prompts_and_the_stores_model(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="turns above 1 need given prompts and an input model"):
        SynthesizeConfig(**TOOLS, **wrong)
