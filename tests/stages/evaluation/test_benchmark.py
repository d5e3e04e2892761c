"""The stage `benchmark`: its prompts written out by hand, its numbers recomputed from likelihoods of whole texts."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from puna.models.forest import Forest
from puna.models.formats.checkpoint import load_with_tokenizer
from puna.models.generation import Completion, Engine
from puna.models.tokens.tokenizer import Tokenizer
from puna.models.transformer import Transformer
from puna.stages.contract import External, execute
from puna.stages.evaluation.benchmark import RESULTS, BenchmarkConfig, benchmark
from puna.stages.evaluation.question_scores import verified_columns, with_letters
from puna.storage import Artifact, PunaError, Store

Make = Callable[..., Artifact]
Task = Callable[..., External]
ROWS: list[dict[str, Any]] = [
    {"q": "what eats grass?", "options": ["a cow", "é", "a blue car"], "right": 0},
    {"q": "what barks?", "options": ["a fish", "a dog"], "right": 1},
    {"q": "what swims?", "options": ["a stone", "trees", "fish"], "right": 2},
]
CHOICE = {
    "output_type": "multiple_choice", "doc_to_text": "Question: {{q}}\nAnswer:", "doc_to_choice": "options", "doc_to_target": "right",
    "metric_list": [{"metric": name} for name in ("acc", "acc_norm", "acc_bytes")],
}  # fmt: skip


def nats(model: Transformer, tokenizer: Tokenizer, text: str, ending: str) -> float:
    """Return log p(ending | text) after BOS, from the tokens of the whole text."""
    before, whole = ([tokenizer.bos, *tokenizer.encode(one)] for one in (text, text + ending))
    logprobs = torch.log_softmax(model.logits(model.hidden(Forest.pack([whole]))).double(), -1).detach()
    return sum(float(logprobs[at - 1, whole[at]]) for at in range(len(before), len(whole)))


def opened(artifact: Artifact) -> tuple[Transformer, Tokenizer]:
    return load_with_tokenizer(artifact.path())


def numbers(made: Artifact) -> dict[tuple[str, str], dict[str, Any]]:
    return {(row["task"], row["metric"]): row for row in made.read("task_scores").to_pylist()}


def test_multiple_choice_with_examples(store: Store, model: Make, task: Task) -> None:
    given = model()
    shots = {"fewshot_split": "train", "num_fewshot": 1, "fewshot_config": {"sampler": "first_n"}, "description": "Quiz.\n"}
    tasks = task(ROWS, [ROWS[2] | {"q": "what swam?"}], metadata={"version": 2}, **CHOICE, **shots)
    made = execute(benchmark, BenchmarkConfig(), {"model": given, "tasks": [tasks]}, store)
    network, tokenizer = opened(given)
    before = "Quiz.\nQuestion: what swam?\nAnswer: fish\n\n"
    right: dict[str, list[bool]] = {"acc": [], "acc_norm": [], "acc_bytes": []}
    for row in ROWS:
        sums = [nats(network, tokenizer, f"{before}Question: {row['q']}\nAnswer:", f" {option}") for option in row["options"]]
        for name, size in (("acc", lambda text: 1), ("acc_norm", len), ("acc_bytes", lambda text: len(text.encode()))):
            values = [value / size(option) for value, option in zip(sums, row["options"], strict=True)]
            right[name].append(values.index(max(values)) == row["right"])
        shown = next(one for one in made.read("examples").to_pylist() if row["q"] in one["prompt"])
        assert list(json.loads(shown["detail"])["nats"].values()) == [pytest.approx(value, abs=2e-4) for value in sums]
        assert shown["text"] == row["options"][sums.index(max(sums))]
    rows = numbers(made)
    for name, values in right.items():
        row = rows["mine", name]
        assert row["value"] == sum(values) / 3 and row["low"] <= row["value"] <= row["high"] and row["n"] == 3
        assert (row["version"], row["shots"], row["format"], row["seed"]) == ("2", 1, "plain, cloze", 0) and row["tokens"] > 0
        single = [one["value"] for one in made.read("scores").to_pylist() if one["name"] == f"mine/{name}"]
        assert sorted(single) == sorted(map(float, values))
    written = json.loads(made.path(RESULTS).read_text())
    assert written["results"]["mine"]["acc,none"] == rows["mine", "acc"]["value"] and written["n-shot"] == {"mine": 1}
    assert written["configs"]["mine"]["doc_to_text"] == CHOICE["doc_to_text"] and written["versions"] == {"mine": "2"}


def test_letters_and_the_better_of_both(store: Store, model: Make, task: Task) -> None:
    given, tasks = model(), task(ROWS, **CHOICE)
    made = execute(benchmark, BenchmarkConfig(options="best"), {"model": given, "tasks": [tasks]}, store)
    rows = numbers(made)
    both = {name: rows[f"mine:{name}", "acc"] for name in ("cloze", "letters")}
    better = max(both.values(), key=lambda row: row["value"])
    assert (rows["mine", "acc"]["value"], rows["mine", "acc"]["format"]) == (better["value"], better["format"])
    network, tokenizer = opened(given)
    expected = []
    for row in ROWS:
        text = "\n".join([f"Question: {row['q']}", *(f" {letter}. {one}" for letter, one in zip("ABC", row["options"], strict=False)), "Answer:"])
        sums = [nats(network, tokenizer, text, f" {letter}") for letter in "ABC"[: len(row["options"])]]
        expected.append(sums.index(max(sums)) == row["right"])
    assert both["letters"]["value"] == sum(expected) / 3


def test_permuted_options_change_the_letters_and_nothing_else(store: Store, model: Make, task: Task) -> None:
    given = model()
    rows = [{**row, "n": n} for n in range(8) for row in ROWS]
    made = {}
    for permuted in (False, True):
        tasks = task(rows, task=f"mine{permuted}", permuted=permuted, **CHOICE)
        made[permuted] = execute(benchmark, BenchmarkConfig(options="best"), {"model": given, "tasks": [tasks]}, store)
    values = [numbers(made[permuted])[f"mine{permuted}:cloze", "acc"]["value"] for permuted in (False, True)]
    assert values[0] == values[1]  # the likelihood of an option's text does not depend on the options' order
    network, tokenizer = opened(given)
    orders, expected = set(), []
    for one in (row for row in made[True].read("examples").to_pylist() if json.loads(row["detail"])["task"] == "mineTrue:letters"):
        about, listed = json.loads(one["detail"]), re.findall(r"^ ([A-Z])\. (.+)$", one["prompt"], re.M)
        row = next(row for row in ROWS if row["q"] in one["prompt"])
        assert {text for _, text in listed} == set(row["options"]) and listed[about["target"]][1] == row["options"][row["right"]]
        sums = [nats(network, tokenizer, one["prompt"], f" {letter}") for letter, _ in listed]
        expected.append(sums.index(max(sums)) == about["target"])
        orders.add((row["q"], tuple(row["options"].index(text) for _, text in listed)))
    assert numbers(made[True])["mineTrue:letters", "acc"]["value"] == sum(expected) / len(rows) and len(orders) > 8
    with pytest.raises(PunaError, match="permuted needs multiple_choice with options of each row"):
        execute(benchmark, BenchmarkConfig(), {"model": given, "tasks": [task(ROWS, permuted=True, doc_to_target="q")]}, store)


def test_lettered_questions() -> None:
    assert with_letters("Question: q\nAnswer:", ["x", " y"]) == "Question: q\n A. x\n B. y\nAnswer:"
    assert with_letters("q", ["x"]) == "q\n A. x\nAnswer:"


def test_options_before_one_ending(store: Store, model: Make, task: Task) -> None:
    """Winogrande's form: doc_to_text is the index of the right option, and the ending is common."""
    given = model()
    rows = [{"start": ["a cow", "a car"], "end": "eats grass.", "right": "0"}]
    tasks = task(rows, output_type="multiple_choice", doc_to_text="{{right}}", doc_to_choice="start", doc_to_target="end")
    made = execute(benchmark, BenchmarkConfig(), {"model": given, "tasks": [tasks]}, store)
    sums = [nats(*opened(given), start, " eats grass.") for start in rows[0]["start"]]
    assert numbers(made)["mine", "acc"]["value"] == float(sums[0] > sums[1])


def test_a_target_that_is_no_option_is_refused(store: Store, model: Make, task: Task) -> None:
    tasks = task([ROWS[0] | {"right": 7}], **CHOICE)
    with pytest.raises(PunaError, match=r"task.yaml: doc_to_target, row 1: '7' is none of the 3 options of 'Question: what eats grass"):
        execute(benchmark, BenchmarkConfig(), {"model": model(), "tasks": [tasks]}, store)


def test_whole_texts(store: Store, model: Make, task: Task) -> None:
    given = model()
    texts = ["grass stones\ncars cat", "dog fish water é trees " * 9]
    tasks = task([{"text": text} for text in texts], output_type="loglikelihood_rolling", doc_to_target="text")
    made = execute(benchmark, BenchmarkConfig(), {"model": given, "tasks": [tasks]}, store)
    network, tokenizer = opened(given)
    total = 0.0
    for text in texts:
        ids = [tokenizer.bos, tokenizer.bos, *tokenizer.encode(text)]  # the tokenizer's own BOS is scored after the prefix
        logprobs = torch.log_softmax(network.logits(network.hidden(Forest.pack([ids]))).double(), -1).detach()
        total += sum(float(logprobs[at - 1, ids[at]]) for at in range(1, len(ids)))
    size, words = sum(len(text.encode()) for text in texts), sum(len(re.split(r"\s+", text)) for text in texts)
    rows = numbers(made)
    assert rows["mine", "bits_per_byte"]["value"] == pytest.approx(-total / size / math.log(2), rel=1e-6)
    assert rows["mine", "byte_perplexity"]["value"] == pytest.approx(math.exp(-total / size), rel=1e-5)
    assert rows["mine", "word_perplexity"]["value"] == pytest.approx(math.exp(-total / words), rel=1e-4)


class Answering:
    """A stub of the engine that answers by the prompt's text and records its prompts."""

    def __init__(self, tokenizer: Tokenizer, answers: dict[str, list[str]]) -> None:
        self.tokenizer, self.answers, self.asked, self.params = tokenizer, answers, [], None

    def generate(self, prompts: Any, params: Any, progress: Any = None) -> list[list[Completion]]:
        self.asked, self.params = [self.tokenizer.decode(ids) for ids in prompts], params
        rows = []
        for text in self.asked:
            given = next(several for question, several in self.answers.items() if question in text)
            tokens = [self.tokenizer.encode(one) for one in given[: params.n]]
            rows.append([Completion(ids, [0.0] * len(ids), "CUT" not in one) for ids, one in zip(tokens, given, strict=False)])
        return rows


GENERATED = {
    "doc_to_text": "Q: {{q}}\nA:", "doc_to_target": "{{a}}", "generation_kwargs": {"until": ["\n"], "max_gen_toks": 9, "temperature": 1.0},
    "filter_list": [{"name": "digits", "filter": [{"function": "regex", "regex_pattern": r"(\d+)"}, {"function": "take_first"}]}],
}  # fmt: skip


def answered(store: Store, given: Artifact, tasks: External, config: BenchmarkConfig, answers: dict[str, list[str]]) -> tuple[Artifact, Answering]:
    engines = []

    def engine(model: Any, tokenizer: Tokenizer, **limits: Any) -> Answering:
        engines.append(Answering(tokenizer, answers))
        return engines[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("puna.stages.evaluation.benchmark.engine_of", engine)
        return execute(benchmark, config, {"model": given, "tasks": [tasks]}, store), engines[0]


def test_answers_are_filtered_matched_and_verified(store: Store, model: Make, task: Task) -> None:
    rows = [{"q": "one", "a": "12"}, {"q": "two", "a": "7"}, {"q": "three", "a": "3"}]
    answers = {"one": ["12 apples\n99"], "two": ["none 8"], "three": ["it is 3 CUT"]}
    made, engine = answered(store, model(), task(rows, verifier="numeric", **GENERATED), BenchmarkConfig(temperature=0.0), answers)
    assert engine.asked == ["<|begin_of_text|>Q: one\nA:", "<|begin_of_text|>Q: two\nA:", "<|begin_of_text|>Q: three\nA:"]
    assert engine.params.max_tokens == 9 and "\n" in engine.params.stop and engine.params.temperature == 0
    found = numbers(made)
    assert found["mine", "exact_match,digits"]["value"] == 2 / 3
    assert found["mine", "verified"]["value"] == pytest.approx(1 / 3)  # a truncated answer is not right
    assert {row["text"] for row in made.read("examples").to_pylist()} == {"12 apples", "none 8", "it is 3 CUT"}


def test_several_answers(store: Store, model: Make, task: Task) -> None:
    rows = [{"q": "one", "a": "1"}, {"q": "two", "a": "2"}]
    answers = {"one": ["1", "5", "5", "1"], "two": ["8", "9", "8", "2"]}
    made, engine = answered(store, model(), task(rows, verifier="numeric", repeats=4, **GENERATED), BenchmarkConfig(), answers)
    found = {metric: row["value"] for (_, metric), row in numbers(made).items()}
    assert engine.params.n == 4
    # 2 and 1 of 4 are right: pass@2 is the mean of 1 - 1/6 and 1 - 3/6; on a tie, the first answer is the most frequent.
    assert found["verified"] == (2 / 4 + 1 / 4) / 2 and found["pass@4"] == 1
    assert found["pass@2"] == pytest.approx((5 / 6 + 1 / 2) / 2) and found["majority@4"] == 0.5
    assert [column.metric for column in verified_columns([[1.0]], [["a"]])] == ["verified"]
    with pytest.raises(PunaError, match="4 answers at temperature 0 are all equal"):
        answered(store, model(), task(rows, repeats=4, **GENERATED), BenchmarkConfig(temperature=0.0), answers)


def test_answers_of_the_engine_end_where_they_are_told_to(store: Store, model: Make, task: Task) -> None:
    given, rows = model(), [{"q": "one", "a": "1"}]
    made = execute(benchmark, BenchmarkConfig(temperature=0.0), {"model": given, "tasks": [task(rows, **GENERATED)]}, store)
    network, tokenizer = opened(given)
    from puna.models.generation import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=9, stop=(*tokenizer.stop_ids, "\n"))
    ((answer,),) = Engine(network, tokenizer).generate([[tokenizer.bos, *tokenizer.encode("Q: one\nA:")]], params)
    (shown,) = made.read("examples").to_pylist()
    assert shown["text"] == tokenizer.decode(answer.tokens, skip_special_tokens=True).split("\n")[0]


def test_a_conversation_has_a_turn_for_each_example(store: Store, model: Make, task: Task) -> None:
    rows = [{"q": "<|eot_id|> one", "a": "1"}, {"q": "two", "a": "2"}]
    shots = {"fewshot_split": "test", "num_fewshot": 1, "fewshot_config": {"sampler": "first_n"}, "description": "Add."}
    keys = {**GENERATED, **shots, "doc_to_text": "q"}
    _, engine = answered(store, model(), task(rows, **keys), BenchmarkConfig(prompts="chat", temperature=0.0), {"one": ["1"], "two": ["2"]})

    def turn(role: str, text: str) -> str:
        return f"<|start_header_id|>{role}<|end_header_id|>\n\n{text}<|eot_id|>"

    tokenizer = engine.tokenizer
    expected = "<|begin_of_text|>" + turn("system", "Add.") + turn("user", "two") + turn("assistant", "2") + turn("user", "<|eot_id|> one")
    assert engine.asked[0] == expected + "<|start_header_id|>assistant<|end_header_id|>\n\n"
    assert tokenizer.chat([{"role": "user", "content": "<|eot_id|>"}]).count(tokenizer.id_of("<|eot_id|>")) == 1  # read as text


def test_tasks_of_one_name_are_refused(store: Store, model: Make, task: Task, tmp_path: Any) -> None:
    tasks = task(ROWS, **CHOICE)
    other = tmp_path / "task-mine" / "again.yaml"
    other.write_bytes((tmp_path / "task-mine" / "task.yaml").read_bytes())
    (both,) = External.resolve(f"both={tmp_path / 'task-mine'}")
    with pytest.raises(PunaError, match="are both named 'mine'; rename one"):
        execute(benchmark, BenchmarkConfig(), {"model": model(), "tasks": [both]}, store)
    assert tasks.files
