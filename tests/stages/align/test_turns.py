"""GRPO in several turns: environments and tools reply, verifiers see the conversation, and errors are reported to the model."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pyarrow as pa
import pytest
import torch
from fastapi.testclient import TestClient

from puna.flows.web import application
from puna.models.formats.checkpoint import load, save
from puna.models.generation import Completion
from puna.models.tokens.tokenizer import Tokenizer
from puna.models.untrusted import bounded_process
from puna.stages import plugins
from puna.stages.align.reinforcement import GrpoConfig, grpo
from puna.stages.contract import Model, SeededConfig, StageRun, execute, stage
from puna.stages.conversations import asking, prompt_ids
from puna.stages.training import turns
from puna.stages.training.turns import Replies, to_score
from puna.stages.verifiers import sandbox
from puna.stages.verifiers.base import BoundedVerifier, Question, Score, ScoringConfig, check_score
from puna.stages.verifiers.judges import Tools
from puna.stages.verifiers.registry import all_verifiers, from_text, register, to_text
from puna.stages.verifiers.scoring import combine
from puna.stages.verifiers.tools import TOOLS, results
from puna.storage import Artifact, PunaError, Store
from puna.storage.schemas import table_schema

from .test_round import scorer

Tiny = Callable[..., Artifact]
SETTINGS: dict[str, Any] = {"rollouts": 1, "prompts": 4, "answers": 4, "max_tokens": 96, "minibatches": 1, "kl_coefficient": 0.0, "turns": 3}
SEEN: list[tuple[Question, str]] = []


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(plugins, "_modules", {})
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = dict(all_verifiers())
    turns._child().close()
    yield
    all_verifiers().clear()
    all_verifiers().update(before)
    from_text.cache_clear()
    turns._child().close()


class Echo(BoundedVerifier):
    """Reply with the turn's length until a turn contains an e; score the number of e's in the turns before the last."""

    name: ClassVar[str] = "echo"

    def reply(self, question: Question, messages: Sequence[dict[str, Any]]) -> str | None:
        assert [one["role"] for one in messages] == ["assistant", "user", "assistant"][: len(messages)]
        return None if "e" in messages[-1]["content"] else f"{len(messages[-1]['content'])} of {question.id}"

    def score(self, question: Question, answer: str) -> Score:
        SEEN.append((question, answer))
        return Score(float("e" in answer))


class Never(Echo):
    """Score every answer 0."""

    name: ClassVar[str] = "never"

    def score(self, question: Question, answer: str) -> Score:
        return Score(0.0)


def asked(store: Store, verifier: str | None, count: int = 4) -> Artifact:
    rows = [
        {"id": f"{i:02d}", "task": "t", "split": "train", "messages": asking(f"say {i}"), "tools": None, "reference": None, "verifier": verifier}
        for i in range(count)
    ]  # fmt: skip
    return store.import_table("prompts", pa.Table.from_pylist(rows, schema=table_schema("prompts").schema))


class TalkativeConfig(SeededConfig):
    """The seed of a model."""


@stage(kind="model", version="1")
def talkative(policy: Model, config: TalkativeConfig, run: StageRun) -> None:
    """Write the tiny model with one number of all its embeddings equal, which makes its output layer likely to end a turn."""
    tokenizer, model = Tokenizer.load(policy.path()), load(policy.path())
    with torch.no_grad():
        model.model.embed_tokens.weight[:, 0] = 0.3
        model.model.embed_tokens.weight[tokenizer.stop_ids[-1], 0] = 1.0
    save(model, run.folder, tokenizer)


def test_the_policy_goes_on_behind_replies_and_the_table_has_every_turn(tmp_path: Path, tiny_model: Tiny) -> None:
    register(Echo)
    store = Store.open(tmp_path)
    policy, verifier = execute(talkative, TalkativeConfig(), {"policy": tiny_model(store)}, store), to_text("echo")
    SEEN.clear()
    made = execute(grpo, GrpoConfig(**SETTINGS), {"policy": policy, "prompts": asked(store, verifier)}, store)
    rows, (step,) = made.read("rollouts").to_pylist(), made.read("training_log").to_pylist()
    assert {row["turns"] for row in rows} == {1, 2, 3} and made.manifest.metrics["unscored_answers"] == 0
    assert step["turns"] == sum(row["turns"] for row in rows) / 16 and step["answer_tokens"] < sum(len(row["tokens"]) for row in rows) / 16
    assert len(SEEN) == len(rows) == 16
    for row, (question, answer) in zip(rows, sorted(SEEN, key=lambda one: one[0].id), strict=True):
        assert question.id == row["prompt_id"] and len(question.messages) == 2 * row["turns"] - 1
        if row["turns"] == 1:
            assert row["text"] == answer and question.text == f"say {int(row['prompt_id'])}"
            continue
        shown = row["text"].split("\n\nuser: ")
        assert shown[-1].endswith(f"assistant: {answer}") and question.text == f"user: say {int(row['prompt_id'])}\n\n" + row["text"].removesuffix(f"\n\nassistant: {answer}")
        for before, reply in zip(question.messages[1::2], question.messages[2::2], strict=True):
            assert before["role"] == "assistant" and "e" not in before["content"] and reply["content"] == f"{len(before['content'])} of {row['prompt_id']}"
        assert row["verifier"] == float("e" in answer) and row["tokens"].count(Tokenizer.load(made.path()).stop_ids[-1]) >= 2 * (row["turns"] - 1)
    page = TestClient(application(store, prefect=None, auth="")).get(f"/rollouts/{made.key[:12]}").text
    assert ">turns</" in page and "user: " in page


def test_one_turn_is_as_if_nothing_replied(tmp_path: Path, tiny_model: Tiny) -> None:
    register(Echo)
    store = Store.open(tmp_path)
    policy = execute(talkative, TalkativeConfig(), {"policy": tiny_model(store)}, store)
    tables = []
    for verifier in (to_text("echo"), to_text("regex", pattern="e", extract=False)):
        made = execute(grpo, GrpoConfig(**SETTINGS | {"turns": 1}), {"policy": policy, "prompts": asked(store, verifier)}, store)
        tables.append(made.read("rollouts"))
        assert "turns" not in made.read("training_log").column_names
    assert tables[0].equals(tables[1]) and set(tables[0]["turns"].to_pylist()) == {1}


class Twice(Echo):
    """Ask again once; only an answer of two turns is right."""

    name: ClassVar[str] = "twice"

    def reply(self, question: Question, messages: Sequence[dict[str, Any]]) -> str | None:
        return None if len(messages) > 1 else "sure?"

    def score(self, question: Question, answer: str) -> Score:
        return Score(float(len(question.messages) > 1))


@pytest.mark.parametrize("right", [True, False])
def test_the_center_is_that_of_answers_in_turns(tmp_path: Path, tiny_model: Tiny, right: bool) -> None:
    """A verifier that wants two turns scores each answer of one turn 0. Without a right answer, the center is that of all answers."""
    register(Twice if right else Never)
    store = Store.open(tmp_path)
    policy, verifier = execute(talkative, TalkativeConfig(), {"policy": tiny_model(store)}, store), to_text("twice" if right else "never")
    given = {"policy": policy, "prompts": asked(store, verifier), "reward_model": scorer(store, policy)}
    metrics = execute(grpo, GrpoConfig(**SETTINGS, reward="product"), given, store).manifest.metrics
    assert metrics["center"] != 0 and ("center_of" in metrics) is not right


def test_several_processes_are_refused_before_they_compute(tmp_path: Path, tiny_model: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store.open(tmp_path)
    given = {"policy": tiny_model(store), "prompts": asked(store, to_text("guess", number=3))}
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(PunaError, match="grpo: turns is untested with several processes: leave it out, or use one process"):
        execute(grpo, GrpoConfig(**SETTINGS), given, store)


def test_what_cannot_reply_is_refused_before_anything_runs(tmp_path: Path, tiny_model: Tiny) -> None:
    store = Store.open(tmp_path)
    given = {"policy": tiny_model(store), "prompts": asked(store, to_text("regex", pattern="e"))}
    with pytest.raises(PunaError, match="grpo: turns=3, but no prompt's verifier replies and there are no tools; set turns=1, or name tools"):
        execute(grpo, GrpoConfig(**SETTINGS), given, store)
    with pytest.raises(ValueError, match="tools reply between turns: set turns above 1"):
        GrpoConfig(**SETTINGS | {"turns": 1, "tools": ["python"]})
    with pytest.raises(ValueError, match="tools.0"):
        GrpoConfig(**SETTINGS, tools=["os.system"])


def call(name: Any, arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


@pytest.mark.parametrize(
    ("turn", "expected"),
    [
        (call("calculator", {"expression": "2 * (3 + 4)"}), ["14"]), (call("calculator", {"expression": "1 / 3"}), ["0.333333333333"]),
        ('{"name": "calculator", "parameters": {"expression": "2^70"}}', [str(2**70)]), ("The answer is 4.", []), ('{"answer": 4}', []),
        (call("calculator", {"expression": "1 / 0"}), ["Error: division by zero"]), (call("calculator", {"expression": "9**9**9"}), ["Error: computes numbers that are too large"]),
        (call("calculator", {"expression": "__import__('os')"}), ["Error: contains more than numbers"]), (call("calculator", {"expression": "x + 1"}), ["Error: name 'x' is not defined"]),
        (call("calculator", {"formula": "1"}), ['Error: the arguments of calculator are {"expression": "..."}']), (call("calculator", "1"), ["Error: the arguments"]),
        (call("shell", {"command": "ls"}), ["Error: there is no tool 'shell', only calculator"]), (call({}, 1), ["Error: there is no tool '{}', only calculator"]),
        (call("python", {"code": "print(1)"}), ["Error: there is no tool 'python', only calculator"]),  # not among this run's tools
        ('<tool_call>{"name": "calc', ["Error: a call is JSON"]), ("<tool_call>[1]</tool_call> and " + call("calculator", {"expression": "1+1"}), ["Error: a call is JSON", "2"]),
        ("<tool_call>" + "[" * 100_000, ["Error: a call is JSON"]), (call("calculator", {"expression": "1"}) * 5, ["1"] * 4 + ["Error: a turn has at most 4 calls"]),
    ],
)  # fmt: skip
def test_every_call_is_answered(turn: str, expected: list[str]) -> None:
    found = results(turn, ("calculator",), ScoringConfig())
    assert [one["role"] for one in found] == ["tool"] * len(expected)
    assert all(one["content"].startswith(text) for one, text in zip(found, expected, strict=True)), found


def test_tools_are_shown_as_json_schemas() -> None:
    shown = TOOLS["calculator"].definition("calculator")["function"]
    assert shown["name"] == "calculator" and shown["parameters"]["required"] == ["expression"] == list(shown["parameters"]["properties"])


class ReplyConfig(SeededConfig):
    """The seed of replies."""


FOUND: list[Any] = []
TURNS: list[tuple[dict[str, Any], str]] = []


@stage(kind="evaluation", version="1")
def reply_all(policy: Model, config: ReplyConfig, run: StageRun) -> None:
    """Write the replies to a test's turns."""
    tokenizer = Tokenizer.load(policy.path())
    rows = {tuple(prompt_ids(tokenizer, row)): row for row, _ in TURNS}
    stop = tokenizer.stop_ids[-1]
    answers = [(list(ids), Completion([*tokenizer.encode(text), stop], [], True)) for ids, (_, text) in zip(rows, TURNS, strict=True)]
    answers.append((answers[0][0], Completion([*tokenizer.encode(TURNS[0][1]), tokenizer.eos], [], True)))  # the end of a document
    FOUND[:] = Replies(rows, tokenizer, ("python", "calculator"), Tools(ScoringConfig(seconds=1.0), run))(answers)
    for (ids, one), reply in zip(answers[:-1], FOUND, strict=False):
        if reply is not None:  # the tokens after the answer equal those of the continued conversation
            row, turn = rows[tuple(ids)], {"role": "assistant", "content": tokenizer.decode(one.tokens[:-1])}
            whole = tokenizer.chat([*json.loads(row["messages"]), turn, *reply[1]])
            assert [*ids, *one.tokens, *reply[0]] == whole
            replied = one._replace(tokens=[*one.tokens, *reply[0], *tokenizer.encode("so 4"), stop], replies=[(len(one.tokens), len(one.tokens) + len(reply[0]), reply[1])])
            prompt, last = to_score(row, replied, tokenizer)
            assert json.loads(prompt["messages"]) == [*json.loads(row["messages"]), turn, *reply[1]] and last == "so 4"
    run.write_rows([])


def test_replies_of_others_code_and_of_programs(tmp_path: Path, tiny_model: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (bounded_process, sandbox):  # a busy machine may give less than a tenth of a core
        monkeypatch.setattr(module, "CLOCK", 200.0)
    mine = tmp_path / "my_environments.py"
    mine.write_text(
        "from typing import ClassVar\nfrom pydantic import Field\nfrom puna.stages.verifiers.base import Score, Verifier\nfrom puna.stages.verifiers.registry import register\n\n"
        "@register\nclass Mine(Verifier):\n    name: ClassVar[str] = 'mine'\n    how: str = Field('echo', description='How it replies')\n\n"
        "    def score(self, question, answer):\n        return Score(1.0)\n\n"
        "    def reply(self, question, messages):\n        if self.how == 'fail':\n            raise ValueError('no')\n"
        "        while self.how == 'hang':\n            pass\n"
        "        return None if self.how == 'end' else f'{question.text}? {messages[-1][\"content\"]}!'\n"
    )
    plugins.add(str(mine))
    both = to_text("product", of=[{"name": "exact", "answer": "x"}, {"name": "mine", "how": "echo"}])
    verifiers = [*(to_text("mine", how=how) for how in ("echo", "fail", "end")), both, to_text("mine", how="hang"), None, None, None]
    texts = ["hi"] * 5 + [call("python", {"code": "print(6 * 7)\n1 / 0"}), call("python", {"code": "while True: pass"}), "hi"]
    TURNS[:] = [
        ({"id": str(i), "task": "t", "messages": asking(f"say {i}"), "tools": None, "reference": None, "verifier": verifier}, text)
        for i, (verifier, text) in enumerate(zip(verifiers, texts, strict=True))
    ]
    store = Store.open(tmp_path / "store")
    execute(reply_all, ReplyConfig(), {"policy": tiny_model(store)}, store)
    said = [None if reply is None else [(one["role"], one["content"]) for one in reply[1]] for reply in FOUND]
    assert said == [
        [("user", "say 0? hi!")], [("user", "mine failed: ValueError: no")], None, [("user", "say 3? hi!")], [("user", "mine: it takes more than 1 s of CPU time")],
        [("tool", "Error: ZeroDivisionError: division by zero (answer.py, line 2)\n42\n")], [("tool", "Error: time")], None, None,
    ]  # fmt: skip


def test_steps_of_a_chain() -> None:
    chain, partial = (from_text(to_text("chain", numbers=[3, 4, 2, 5], signs=["+", "*", "-"], partial=some)) for some in (False, True))
    question = Question("q", "t", "3 + 4 * 2 - 5", None)
    for text, rewards, whole, share in (
        ("3 + 4 = 7\n7 * 2 = 14\n14 - 5 = 9", [1, 1, 1], 1.0, 1.0), ("7\n\n14\n9\n", [1, 1, 1], 1.0, 1.0), ("7\n13\n9", [1, 0, 1], 0.0, 2 / 3),
        ("7\n14\n9\n9", [1, 1, 1, 0], 0.0, 3 / 4), ("so 9", [0], 0.0, 0.0), ("", [], 0.0, 0.0), ("-7\n1" + "4" * 30, [0, 0], 0.0, 0.0), ("7", [1], 0.0, 1 / 3),
    ):  # fmt: skip
        score = chain.score(question, text)
        assert [reward for _, reward in score.steps] == rewards and score.value == whole and partial.score(question, text).value == pytest.approx(share)
        ends = [end for end, _ in score.steps]
        assert [len(one.strip().splitlines()) <= 1 for one in (text[a:b] for a, b in zip([0, *ends], ends, strict=False))] == [True] * len(ends)
    assert check_score(Score(1.0, steps=[(3, 2.0)]), "mine").value is None and check_score(Score(1.0, steps=5), "mine").value is None
    assert check_score(Score(1.0, steps=[(3, 1.0), (2, 1.0)]), "mine").value is None and check_score(Score(1.0, steps=[(2, 1), (3, 0)]), "mine").steps == [(2, 1.0), (3, 0.0)]
    both = from_text(to_text("product", of=[{"name": "regex", "pattern": "7"}, {"name": "chain", "numbers": [3, 4], "signs": ["+"]}]))
    assert combine(both, iter([Score(1.0), Score(0.5, steps=[(1, 0.5)])]).__next__) == Score(0.5, "regex 1; chain 0.5", [(1, 0.5)])


def test_steps_end_at_tokens(tmp_path: Path, tiny_model: Tiny) -> None:
    tokenizer = Tokenizer.load(tiny_model(Store.open(tmp_path)).path())
    tokens = [*tokenizer.encode("état: 7\n14"), tokenizer.stop_ids[-1]]
    before = [*tokenizer.encode("8\n"), tokenizer.stop_ids[-1], 5, 6]
    score = Score(0.5, steps=[(8, 1.0), (10, 0.0)])
    for start, one in ((0, Completion(tokens, [], True)), (len(before), Completion(before + tokens, [], True, [(len(before) - 2, len(before), [])]))):
        (first, _), (last, _) = found = turns.steps_of(score, one, tokenizer)
        assert tokenizer.decode(one.tokens[start:first]) == "état: 7\n" and last == len(one.tokens) - 1 and [reward for _, reward in found] == [1.0, 0.0]


def test_steps_are_rewarded_and_stand_in_the_table(tmp_path: Path, tiny_model: Tiny) -> None:
    store = Store.open(tmp_path)
    given = {"policy": tiny_model(store), "prompts": asked(store, to_text("chain", numbers=[1, 2], signs=["+"]))}
    few = SETTINGS | {"turns": 1, "max_tokens": 12, "credit": "steps"}
    rows = execute(grpo, GrpoConfig(**few), given, store).read("rollouts").to_pylist()
    assert [len(row["steps"]) for row in rows] == [sum(bool(line.strip()) for line in row["text"].splitlines()) for row in rows] and any(row["steps"] for row in rows)
    with pytest.raises(PunaError, match="credit=steps needs verifiers that check steps, such as chain; no prompt has one: set credit=answer"):
        execute(grpo, GrpoConfig(**few), given | {"prompts": asked(store, to_text("regex", pattern="e"))}, store)
    with pytest.raises(ValueError, match="credit=steps takes its steps from the verifier; set reward to verifier or product"):
        GrpoConfig(**few, reward="reward_model")


def test_the_page_on_ones_own_environment(tmp_path: Path) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", (Path(__file__).parents[3] / "docs" / "how-to" / "turns.md").read_text(), re.DOTALL)
    file = tmp_path / "my_environment.py"
    file.write_text(code)
    plugins.add(str(file))
    row = {"id": "0", "task": "t", "messages": asking("say"), "tools": None, "reference": None, "verifier": to_text("word", word="llama")}
    job = turns.Job(Question("q", "t", "?", None), [{"role": "assistant", "content": "lhama"}], turns.environment_of(row), ())
    assert job.reply(ScoringConfig()) == [{"role": "user", "content": "4 letters"}]


def test_guessing_by_hints() -> None:
    guess, blind = from_text(to_text("guess", number=7)), from_text(to_text("guess", number=7, hints=False))
    question = Question("q", "t", "?", None)
    for text, reply, without, score in (("3", "higher", "wrong", 0.0), (" 12 ", "lower", "wrong", 0.0), ("7", None, None, 1.0), ("seven", "Answer with a whole number only.", "Answer with a whole number only.", 0.0)):
        turn = [{"role": "assistant", "content": text}]
        assert (guess.reply(question, turn), blind.reply(question, turn), guess.score(question, text).value) == (reply, without, score)
    assert re.match("the number is 7", guess.score(question, "3").detail)
