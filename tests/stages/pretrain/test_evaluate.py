"""The evaluation stage: its rows, recomputed from its parts."""

from __future__ import annotations

import dataclasses
import json

import pytest
from pydantic import Field

from puna.models.config import ModelConfig
from puna.models.formats.checkpoint import load, save
from puna.models.memory import planner
from puna.models.serving import ServingSettings
from puna.models.tokens.tokenizer import Tokenizer
from puna.models.transformer import Transformer
from puna.stages.contract import SeededConfig, StageRun, execute, stage
from puna.stages.conversations import messages_of, text_of
from puna.stages.evaluation import evaluate as module
from puna.stages.evaluation.evaluate import AnswersConfig, EvaluateConfig, PagesConfig, evaluate
from puna.stages.prompts.prompts import PromptsConfig, Task, prompts
from puna.stages.search import SearchConfig
from puna.stages.training import bits_per_byte, intervals
from puna.stages.training.bits_per_byte import NGrams
from puna.storage import PunaError

from .conftest import sentences

SETTINGS = EvaluateConfig(
    pages=PagesConfig(max_bytes=6000, questions=8, options=3, prompt_words=6, option_words=4, continuations=2),
    answers=AnswersConfig(prompts_per_task=5, max_tokens=6, examples=2),
)


class TinyConfig(SeededConfig):
    """The tokens that the model claims to be trained on."""

    trained_tokens: int = Field(100_000, description="Tokens that it read")
    context: int = Field(32, description="Its longest text, tokens")


@stage(kind="model")
def tiny_model(config: TinyConfig, run: StageRun) -> None:
    """Write a small random model."""
    tokenizer = Tokenizer.train([sentences(i, 60) for i in range(30)], 300)
    shape = ModelConfig(vocab_size=300, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=config.context, initializer_range=0.2)
    save(Transformer(shape, seed=config.seed), run.folder, tokenizer)
    run.metric("trained_tokens", config.trained_tokens)


@pytest.fixture
def model(store):
    return execute(tiny_model, TinyConfig(), {}, store)


@pytest.fixture
def answerer(store):
    """A model whose context holds the prompts."""
    return execute(tiny_model, TinyConfig(context=512), {}, store)


def table(artifact) -> dict[tuple[str, str], dict]:
    return {(row["task"], row["metric"]): row for row in artifact.read().to_pylist()}


def test_pages(store, documents, mixture, model, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [sentences(i, 20 + 5 * i) for i in range(20)]
    rows = [(i, "dry" if i % 2 else "wet", "heldout" if i >= 8 else "train", 1) for i in range(20)]
    given = {"model": model, "documents": documents(texts), "mixture": mixture(rows)}
    made = execute(evaluate, SETTINGS, given, store)
    found = table(made)
    assert found["pages", "document_bits_per_byte"]["n"] == 12
    held = {"pages": texts[8:], "pages/dry": texts[9::2], "pages/wet": texts[8::2]}
    network, tokenizer = load(model.path()), Tokenizer.load(model.path())
    # The whole training split, which is smaller than the model's training, and nothing else.
    counted = NGrams([tokenizer.document(t) for t in texts[:8]], 4, tokenizer.vocab_size)
    for task, own in held.items():
        size = sum(len(t.encode()) for t in own)
        documents_ = [tokenizer.document(t) for t in own]
        for name, page in (("ngram", False), ("ngram_page", True)):
            expected = bits_per_byte.bits(sum(counted.nats(documents_, page=page))) / size
            assert found[task, f"{name}_bits_per_byte"]["value"] == pytest.approx(expected)
        assert 0 < found[task, "dictionary_bits_per_byte"]["value"] < 8
        nats = bits_per_byte.document_nats(network, [tokenizer.document(t) for t in own], 32, 50)
        assert found[task, "document_bits_per_byte"]["value"] == pytest.approx(bits_per_byte.bits(sum(nats)) / size, rel=1e-5)
        targets = sum(len(tokenizer.document(t)) - 1 for t in own)
        assert found[task, "nats_per_token"]["value"] == pytest.approx(sum(nats) / targets, rel=1e-5)
        row = found[task, "document_bits_per_byte"]
        assert row["low"] < row["value"] < row["high"]
    choice = found["choice", "accuracy_per_byte"]
    assert choice["n"] == 8 == found["choice/dry", "accuracy"]["n"] + found["choice/wet", "accuracy"]["n"]
    assert intervals.wilson(round(8 * choice["value"]), 8) == pytest.approx((choice["value"], choice["low"], choice["high"]))
    examples = made.read("examples").to_pylist()
    assert len(examples) == 2 and all(row["kind"] == "continuation" for row in examples)
    assert any(text.startswith(examples[0]["prompt"]) for text in texts[8:])
    assert made.manifest.metrics["choice_chance"] == pytest.approx(1 / 3)
    # The same numbers with all layers offloaded to disk.
    chosen = planner.choose
    monkeypatch.setattr(planner, "choose", lambda shape, *given: dataclasses.replace(chosen(shape, *given), streamed=shape.config.num_hidden_layers))
    from_disk = execute(evaluate, SETTINGS.replace(serving=ServingSettings(offload="disk", memory=0.1)), given, store)
    assert from_disk.id != made.id and from_disk.data_digest == made.data_digest
    assert "0 of 2 layers stay in memory" in from_disk.manifest.metrics[f"offload_{model.data_digest[:12]}"]
    # The same numbers for any shards.
    again = execute(evaluate, SETTINGS.model_copy(update={"seed": 0}), given, store, part_rows=3)
    assert again.data_digest == made.data_digest


def test_the_baselines_read_of_all_pages_as_much_as_the_model_read(store, documents, mixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten training pages of about 500 tokens, of which the model read 1,000: pieces of its context length, from every page."""
    read: list[list[int]] = []
    counted = NGrams.__init__
    monkeypatch.setattr(NGrams, "__init__", lambda self, texts, *more: read.extend(texts) or counted(self, texts, *more))
    model = execute(tiny_model, TinyConfig(trained_tokens=1000), {}, store)
    texts = [" ".join(f"{word}{i}" for word in sentences(i, 150).split()) for i in range(12)]
    rows = [(i, "all", "heldout" if i >= 10 else "train", 1) for i in range(12)]
    execute(evaluate, SETTINGS, {"model": model, "documents": documents(texts), "mixture": mixture(rows)}, store)
    tokenizer = Tokenizer.load(model.path())
    whole = [tokenizer.document(text) for text in texts[:10]]
    assert sum(map(len, whole)) > 3000 and sum(map(len, read)) == 1000
    pieces = {tuple(ids[at : at + 32]): i for i, ids in enumerate(whole) for at in range(0, len(ids), 32)}
    *full, last = map(tuple, read)
    assert {pieces[piece] for piece in full} == set(range(10)) and len(set(full)) == len(full)
    assert sum(piece[: len(last)] == last for piece in pieces) >= 1


def test_pages_are_limited_and_chosen_by_hash(store, documents, model) -> None:
    texts = [sentences(i, 60) for i in range(30)]
    small = SETTINGS.model_copy(update={"pages": SETTINGS.pages.model_copy(update={"max_bytes": 1500, "max_page_bytes": 400})})
    made = execute(evaluate, small, {"model": model, "documents": documents(texts)}, store)
    assert made.manifest.metrics["page_bytes"] <= 1500 and found_pages(made) >= 3
    assert ("pages/all", "document_bits_per_byte") not in table(made)  # only one category: no separate row
    with pytest.raises(PunaError, match="no held-out page of at most 100 bytes"):
        tight = SETTINGS.model_copy(update={"pages": SETTINGS.pages.model_copy(update={"max_page_bytes": 100})})
        execute(evaluate, tight, {"model": model, "documents": documents(texts)}, store)


def test_a_page_of_long_words_does_not_stop_the_evaluation(store, documents, model) -> None:
    """Encoded data, and text in a script without spaces: a word may have more tokens than the context."""
    texts = [sentences(i, 60) for i in range(12)] + [" ".join([f"{i}{'xq' * 40}"] * 12) for i in range(3)] + ["市议会将于下周修理河上的旧桥" * 9]
    made = execute(evaluate, SETTINGS, {"model": model, "documents": documents(texts)}, store)
    assert table(made)["choice", "accuracy"]["n"] == 8 and made.read("examples").num_rows == 2


def found_pages(artifact) -> int:
    return table(artifact)["pages", "document_bits_per_byte"]["n"]


def test_a_task_may_be_called_all(store, answerer) -> None:
    """Its prompts are part of the mean over all tasks, which has this name, too."""
    tasks = (Task(task="gcd", name="all"), Task(task="chain_sum"))
    asked = execute(prompts, PromptsConfig(tasks=tasks, train=0, heldout=3), {}, store)
    found = table(execute(evaluate, SETTINGS, {"model": answerer, "prompts": asked}, store))
    assert {task: found[task, "accuracy"]["n"] for task, metric in found if metric == "accuracy"} == {"all": 6, "chain_sum": 3}


def test_answers_are_judged_by_the_scorer(store, answerer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stub engine knows four of five answers, and truncates one of these."""
    tasks = (Task(task="chain_sum", parameters={"min_digits": 1, "max_digits": 1}), Task(task="gcd"))
    asked = execute(prompts, PromptsConfig(tasks=tasks, train=4, heldout=9), {}, store)
    rows = {text_of(messages_of(row)): row for row in asked.read().to_pylist()}
    tokenizer = Tokenizer.load(answerer.path())
    order: list[str] = []

    class Oracle:
        def __init__(self, model, tokenizer, exact: bool) -> None:
            assert exact
            self.tokenizer = tokenizer

        def generate(self, given, params, progress=None):
            from puna.models.generation import Completion

            found = []
            for ids in given:
                (prompt,) = [p for p in rows if tokenizer.chat([{"role": "user", "content": p}]) == list(ids)]
                order.append(prompt)
                # The third answer is right so far, but truncated; the fifth is wrong and complete.
                number = sum(rows[p]["task"] == rows[prompt]["task"] for p in order)
                text = rows[prompt]["reference"] if number != 5 else "no idea"
                found.append([Completion([*tokenizer.encode(text), tokenizer.stop_ids[-1]], [], number != 3)])
            return found

    monkeypatch.setattr("puna.models.generation.Engine", Oracle)
    made = execute(evaluate, SETTINGS, {"model": answerer, "prompts": asked}, store)
    found = table(made)
    # 5 per task: number 5 is wrong, and number 3, whose text is right, is truncated: 3 of 5 are right, twice.
    for task, n in (("chain_sum", 5), ("gcd", 5), ("all", 10)):
        assert found[task, "accuracy"]["n"] == n
        assert found[task, "accuracy"]["value"] == pytest.approx(0.6) and found[task, "finished"]["value"] == pytest.approx(0.8)
        assert found[task, "accuracy"]["low"] == pytest.approx(intervals.wilson(3 * n // 5, n).low)
    assert made.manifest.metrics["cut_off_right"] == 2
    assert all(rows[p]["split"] == "heldout" for p in order)
    assert not any(task.startswith("pages") for task, _ in found)
    examples = made.read("examples").to_pylist()
    assert len(examples) == 4
    for row in examples:
        detail = json.loads(row["detail"])
        whole = order.index(row["prompt"]) % 5 != 2
        assert detail["reference"] == rows[row["prompt"]]["reference"]
        assert (detail["score"] == 1.0) == (row["text"] == detail["reference"] and whole)


def test_a_real_engine_answers(store, answerer) -> None:
    asked = execute(prompts, PromptsConfig(tasks=(Task(task="gcd"),), train=0, heldout=6), {}, store)
    made = execute(evaluate, SETTINGS, {"model": answerer, "prompts": asked}, store)
    assert table(made)["gcd", "accuracy"]["value"] == 0.0 and made.manifest.metrics["prompts"] == 5


def test_a_model_whose_context_holds_no_prompt_is_measured_on_pages_alone(store, documents, mixture, model) -> None:
    texts = [sentences(i, 40) for i in range(6)]
    read = {"documents": documents(texts), "mixture": mixture([(i, "a", "heldout", 1) for i in range(6)])}
    asked = execute(prompts, PromptsConfig(tasks=(Task(task="gcd"),), train=0, heldout=6), {}, store)
    found = execute(evaluate, SETTINGS, {"model": model, "prompts": asked, **read}, store)
    assert {row["rule"] for row in found.read("dropped").to_pylist()} == {"too_long"} and "document_bits_per_byte" in found.manifest.metrics
    with pytest.raises(PunaError, match="none of the 5 held-out prompts can be used"):
        execute(evaluate, SETTINGS, {"model": model, "prompts": asked}, store)


def test_needs_something_to_measure(store, documents, mixture, model) -> None:
    with pytest.raises(PunaError, match="needs documents or prompts"):
        execute(evaluate, SETTINGS, {"model": model}, store)
    with pytest.raises(PunaError, match="needs its documents"):
        execute(evaluate, SETTINGS, {"model": model, "mixture": mixture([(0, "a", "heldout", 1)]), "prompts": asked_of(store)}, store)
    with pytest.raises(ValueError, match="does not fit into micro_batch_tokens"):
        EvaluateConfig(context=9000)


def asked_of(store):
    return execute(prompts, PromptsConfig(tasks=(Task(task="gcd"),), train=0, heldout=2), {}, store)


def test_held_out_prompts_are_asked_by_hash() -> None:
    class Rows:
        id = "prompts/x"

        def __init__(self, rows) -> None:
            self.rows = rows

        def read(self):
            import pyarrow as pa

            return pa.Table.from_pylist(self.rows)

    rows = [{"id": f"{i}", "task": "t" if i % 2 else "s", "split": "heldout" if i % 3 else "train"} for i in range(30)]
    first = module._heldout_prompts(Rows(rows), 4, seed=1)
    assert first == module._heldout_prompts(Rows(rows[::-1]), 4, seed=1) and len(first) == 8
    assert first != module._heldout_prompts(Rows(rows), 4, seed=2)
    with pytest.raises(PunaError, match="no held-out prompts"):
        module._heldout_prompts(Rows(rows[::3]), 4, seed=1)


def test_answers_by_search_are_told_in_tokens(store, answerer) -> None:
    """All candidates count, including those that were not chosen."""
    asked = execute(prompts, PromptsConfig(tasks=(Task(task="gcd"),), train=0, heldout=6), {}, store)
    wanted = {"name": "regex", "pattern": "[aeiou]{2}"}
    found = {}
    for name, search in (("one", None), ("best", SearchConfig(n=6, verifier=wanted)), ("majority", SearchConfig(method="majority", n=6))):
        answers = AnswersConfig(temperature=1.0, max_tokens=12, taste=wanted, search=search)
        made = execute(evaluate, EvaluateConfig(answers=answers), {"model": answerer, "prompts": asked}, store)
        found[name] = made.manifest.metrics["answer_tokens"]
        spent = {key: made.manifest.metrics[key] for key in ("sampled_tokens", "checker_calls") if key in made.manifest.metrics}
        assert spent == ({} if search is None else {"sampled_tokens": found[name], "checker_calls": 36 if name == "best" else 0})
    assert found["one"] < found["best"] == found["majority"] <= 6 * 12 * 6
    with pytest.raises(ValueError, match="verifier .* has no effect: method majority scores no answer; leave it out"):
        SearchConfig(method="majority", verifier=wanted)
    with pytest.raises(ValueError, match="set a temperature above 0"):
        AnswersConfig(search=SearchConfig())
