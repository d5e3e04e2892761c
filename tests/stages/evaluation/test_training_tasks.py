"""Tasks evaluated during training: their scores equal those of `benchmark`, and training is the same with and without them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest

from puna.stages.align.sft import sft
from puna.stages.contract import External, execute
from puna.stages.conversations import dump
from puna.stages.evaluation import training_tasks
from puna.stages.evaluation.benchmark import BenchmarkConfig, benchmark
from puna.stages.identity.code import symbols
from puna.stages.pretrain.pretrain import PretrainConfig, pretrain
from puna.stages.pretrain.tokenize import TokenizeConfig, tokenize
from puna.stages.pretrain.tokenizer import TokenizerConfig, tokenizer
from puna.stages.training.phase import Phase
from puna.stages.training.settings import SftConfig
from puna.stages.training.train import code_of_tasks
from puna.storage import Artifact, PunaError, Store
from puna.storage.schemas import table_schema
from tests.stages.evaluation.test_benchmark import CHOICE
from tests.stages.evaluation.test_comparison import ROWS
from tests.stages.pretrain.conftest import documents, sentences  # noqa: F401
from tests.stages.pretrain.test_pretrain import SHAPE


def scores(made: Artifact, name: str) -> dict[int, float]:
    return {row["step"]: row[name] for row in made.read("training_log").to_pylist() if row.get(name) is not None}


@pytest.fixture
def tasks(task: Callable[..., External]) -> list[External]:
    numbers = {"doc_to_text": "q", "doc_to_target": "{{right}}", "verifier": "numeric", "generation_kwargs": {"max_gen_toks": 4}}
    return [task(ROWS[:9], **CHOICE), task(ROWS[:2], task="numbers", **numbers)]


def test_scores_of_a_pretraining_survive_a_crash_and_change_nothing(
    store: Store, tasks: list[External], documents: Callable[..., Artifact], tmp_path: Any, monkeypatch: pytest.MonkeyPatch  # noqa: F811
) -> None:
    text = documents([sentences(i, 40) for i in range(20)])
    vocabulary = execute(tokenizer, TokenizerConfig(vocab_size=300), {"documents": text}, store)
    given: dict[str, Any] = {"tokens": execute(tokenize, TokenizeConfig(sequence_length=64), {"documents": text, "tokenizer": vocabulary}, store), "tokenizer": vocabulary}
    phases = tuple(Phase(name=name, steps=5, rows_per_step=2, schedule={"learning_rate": 1e-2, "warmup_steps": 1}) for name in ("one", "two"))
    config = PretrainConfig(model=SHAPE, phases=phases, ask_every=3, checkpoint_every=2, validation_share=0.1)
    plain = execute(pretrain, config, given, store)
    whole = execute(pretrain, config, given | {"tasks": tasks}, store)
    assert whole.path("model.safetensors").read_bytes() == plain.path("model.safetensors").read_bytes()
    # Every third step of each phase of five steps, and its last step.
    assert list(scores(whole, "mine_acc")) == [3, 5, 8, 10] == list(scores(whole, "numbers_verified"))
    measured = execute(benchmark, BenchmarkConfig(), {"model": whole, "tasks": tasks}, store).manifest.metrics
    for name in ("mine_acc", "numbers_verified"):
        assert scores(whole, name)[10] == whole.manifest.metrics[name] == measured[name]

    ask, calls = training_tasks.TaskWatch.ask, []

    def crashing(self: Any, step: int, model: Any) -> None:
        calls.append(step)
        if len(calls) == 2:
            raise KeyboardInterrupt
        ask(self, step, model)

    monkeypatch.setattr(training_tasks.TaskWatch, "ask", crashing)
    other = Store.open(tmp_path / "other")
    with pytest.raises(KeyboardInterrupt):
        execute(pretrain, config, given | {"tasks": tasks}, other)
    resumed = execute(pretrain, config, given | {"tasks": tasks}, other)
    assert scores(resumed, "mine_acc") == scores(whole, "mine_acc") and calls == [3, 5, 5, 8, 10]


def test_scores_of_a_fine_tuning(store: Store, model: Callable[..., Artifact], tasks: list[External]) -> None:
    turns = [
        {"id": str(n), "prompt_id": str(n), "task": "t", "split": "train", "tools": None, "source": "s", "score": None,
         "messages": dump([{"role": "user", "content": row["q"]}, {"role": "assistant", "content": row["options"][0]}])}
        for n, row in enumerate(ROWS)
    ]  # fmt: skip
    rows = store.import_table("instructions", pa.Table.from_pylist(turns, schema=table_schema("instructions").schema))
    given = {"model": model(), "instructions": [rows]}
    config = SftConfig(training={"steps": 5, "batch_size": 4}, ask_every=2, method="lora")
    made = execute(sft, config, given | {"tasks": tasks}, store)
    asked = scores(made, "mine_acc")
    assert list(asked) == [2, 4, 5] and made.path("model.safetensors").read_bytes() == execute(sft, config, given, store).path("model.safetensors").read_bytes()
    measured = execute(benchmark, BenchmarkConfig(), {"model": made, "tasks": tasks}, store).manifest.metrics
    assert asked[5] == measured["mine_acc"] and scores(made, "numbers_verified")[5] == measured["numbers_verified"]
    with pytest.raises(PunaError, match="only engine=puna evaluates tasks"):
        execute(sft, config.replace(engine="trl"), given | {"tasks": tasks}, store)


def test_a_task_that_needs_a_judge_is_refused_before_the_training(store: Store, model: Callable[..., Artifact], task: Callable[..., External]) -> None:
    judged = task(ROWS[:2], task="liked", doc_to_text="q", doc_to_target="{{right}}", verifier={"name": "judge", "rubric": "0 bad, 5 good"})
    broken = task(ROWS[:2], task="typo", doc_to_text="q", doc_to_target="{{right}}", verifier="numerik")
    turn = {"id": "1", "prompt_id": "1", "task": "t", "split": "train", "tools": None, "source": "s", "score": None,
            "messages": dump([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}])}  # fmt: skip
    rows = store.import_table("instructions", pa.Table.from_pylist([turn], schema=table_schema("instructions").schema))
    for one, message in (
        (judged, r"task.yaml: verifier judge needs a language model, but the input `judges` has none; judges are not available during training"),
        (broken, "there is no verifier 'numerik'; did you mean numeric"),
    ):
        with pytest.raises(PunaError, match=message):
            execute(sft, SftConfig(training={"steps": 1, "batch_size": 1}), {"model": model(), "instructions": [rows], "tasks": [one]}, store)


@pytest.mark.parametrize(
    ("row", "keys", "message"),
    [
        ({"q": "which?", "options": ["a", "b" * 300], "right": 0}, CHOICE, "continuation 1 has .* tokens; the model's context allows 1 to 64"),
        ({"q": "who?", "right": 1}, {"doc_to_text": "q", "doc_to_target": "{{right}}"}, "max_gen_toks 256 leaves no room for a question in a context of 64"),
        ({"t": 5}, {"output_type": "loglikelihood_rolling", "doc_to_target": "t"}, "doc_to_target, row 1: '5' is not text"),
    ],
)  # fmt: skip
def test_a_task_that_does_not_fit_is_refused_before_the_pretraining(
    store: Store, task: Callable[..., External], documents: Callable[..., Artifact], monkeypatch: pytest.MonkeyPatch,  # noqa: F811
    row: dict[str, Any], keys: dict[str, Any], message: str,
) -> None:  # fmt: skip
    """Otherwise the error would come after hours, and training without the task would start again at the first step."""
    text = documents([sentences(i, 40) for i in range(20)])
    vocabulary = execute(tokenizer, TokenizerConfig(vocab_size=300), {"documents": text}, store)
    given: dict[str, Any] = {"tokens": execute(tokenize, TokenizeConfig(sequence_length=64), {"documents": text, "tokenizer": vocabulary}, store), "tokenizer": vocabulary}
    monkeypatch.setattr("puna.stages.pretrain.pretrain._train", lambda *more: pytest.fail("the training has begun"))
    config = PretrainConfig(model=SHAPE, phases=(Phase(steps=5, rows_per_step=2, schedule={"warmup_steps": 1}),), validation_share=0.1)
    with pytest.raises(PunaError, match=message):
        execute(pretrain, config, given | {"tasks": [task([row], **keys)]}, store)


def test_only_a_model_that_was_asked_depends_on_how_models_are_asked(task: Callable[..., External]) -> None:
    def evaluating(*named: tuple[str, str]) -> bool:
        return any(name.startswith("puna.stages.evaluation.benchmark") for name in symbols(sft, named))

    assert code_of_tasks({"tasks": []}) == [] and not evaluating()
    code = code_of_tasks({"tasks": [task(ROWS[:2], doc_to_text="q", doc_to_target="{{right}}", verifier="numeric")]})
    assert evaluating(*code) and any("numeric" in module for module, _ in code)
