"""Artifacts of different runs that do not fit together are refused with an error that names them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest
import torch

from puna.models.formats.checkpoint import load, save
from puna.models.tokens.tokenizer import Tokenizer
from puna.models.training.settings import TrainingSettings
from puna.stages.align.average import AverageConfig, average
from puna.stages.align.instructions import InstructionsConfig, chosen, instructions
from puna.stages.align.preferences import PreferencesConfig, preferences
from puna.stages.align.reinforcement import PpoConfig, ppo
from puna.stages.align.rejection_sample import RejectionSampleConfig, rejection_sample
from puna.stages.align.reward_model import RewardModelConfig, reward_model
from puna.stages.align.sample import SampleConfig, sample
from puna.stages.align.sft import SftConfig, sft
from puna.stages.contract import SeededConfig, StageRun, execute, stage
from puna.stages.conversations import answering, asking
from puna.stages.training.train import report_ends, write_log
from puna.storage import Artifact, PunaError, Store
from puna.storage.schemas import table_schema

from .conftest import TEXT, TinyConfig, tiny
from .test_round import asked, scorer

Tiny = Callable[..., Artifact]


class FrenchConfig(SeededConfig):
    """The seed of a model."""


@stage(kind="model", version="1")
def tiny_french(config: FrenchConfig, run: StageRun) -> None:
    """Write a model of the same shape as `tiny`, with a tokenizer of the same size trained on other words."""
    tiny.function(TinyConfig(seed=config.seed), run)
    model = load(run.folder)
    vocabulary = Tokenizer.train(["donne la bonne réponse à la question suivante " * 9 + TEXT], model.config.vocab_size)
    assert vocabulary.vocab_size == model.config.vocab_size
    save(model, run.folder, vocabulary)


def french(store: Store) -> Artifact:
    return execute(tiny_french, FrenchConfig(), {}, store)


def test_models_of_different_tokenizers_are_not_averaged(tmp_path: Path, tiny_model: Tiny) -> None:
    store = Store.open(tmp_path)
    with pytest.raises(PunaError, match="have different tokenizers: average"):
        execute(average, AverageConfig(), {"models": [tiny_model(store), french(store)]}, store)


def test_a_policy_is_not_scored_by_a_reward_model_of_another_tokenizer(tmp_path: Path, tiny_model: Tiny) -> None:
    store = Store.open(tmp_path)
    given = {"policy": tiny_model(store), "reward_model": scorer(store, french(store)), "prompts": asked(store)}
    with pytest.raises(PunaError, match="have different tokenizers: ppo"):
        execute(ppo, PpoConfig(rollouts=1, prompts=2, answers=2, max_tokens=2), given, store)


def test_a_language_model_is_no_reward_model(tmp_path: Path, tiny_model: Tiny) -> None:
    """Otherwise all its rewards would be 0, and the answer with the largest id the best."""
    store = Store.open(tmp_path)
    model, questions = tiny_model(store), asked(store)
    given = execute(sample, SampleConfig(answers=2, max_tokens=2), {"models": [model], "prompts": questions}, store)
    inputs = {"answers": given, "reward_model": model, "prompts": questions}
    message = rf"{model.id} is a language model, made by tiny; give a reward model"
    with pytest.raises(PunaError, match=message):
        execute(rejection_sample, RejectionSampleConfig(), inputs, store)
    inputs = {"policy": model, "reward_model": model, "prompts": questions}
    with pytest.raises(PunaError, match=message):
        execute(ppo, PpoConfig(rollouts=1, prompts=2, answers=2, max_tokens=2), inputs, store)


def test_a_reward_model_is_no_language_model(tmp_path: Path, tiny_model: Tiny) -> None:
    store = Store.open(tmp_path)
    questions = asked(store)
    rewards = scorer(store, tiny_model(store))
    message = f"{rewards.id} is a reward model, made by reward_model; give a language model"
    with pytest.raises(PunaError, match=message):
        execute(sample, SampleConfig(), {"models": [rewards], "prompts": questions}, store)
    gold = execute(instructions, InstructionsConfig(), {"prompts": questions}, store)
    with pytest.raises(PunaError, match=message):
        execute(sft, SftConfig(), {"model": rewards, "instructions": [gold]}, store)


def test_steps_beyond_those_of_the_settings_are_steps_of_one_run(tmp_path: Path, tiny_model: Tiny) -> None:
    """A control arm with 2 steps more than 3 equals a run of 5 steps, including the schedule; epochs are converted to steps first."""
    store = Store.open(tmp_path)
    gold = execute(instructions, InstructionsConfig(), {"prompts": asked(store)}, store)
    given = {"model": tiny_model(store), "instructions": [gold]}
    short, long = TrainingSettings(steps=3, batch_size=2), TrainingSettings(steps=5, batch_size=2)
    more = execute(sft, SftConfig(training=short, more_steps=2), given, store)
    whole = execute(sft, SftConfig(training=long), given, store)
    assert more.manifest.metrics["steps"] == 5 and more.data_digest == whole.data_digest and more.key != whole.key
    assert SftConfig(training=TrainingSettings(epochs=2, batch_size=16), more_steps=4).with_more_steps(40).training.steps == 5 + 4


def test_a_reward_model_may_be_trained_further(tmp_path: Path, tiny_model: Tiny) -> None:
    store = Store.open(tmp_path)
    first = scorer(store, tiny_model(store))
    again = scorer(store, first)
    torch.testing.assert_close(load(first.path()).score.weight, load(again.path()).score.weight, rtol=0, atol=0.2)
    assert first.data_digest != again.data_digest


def test_answers_to_held_out_prompts_are_never_trained_on(tmp_path: Path, tiny_model: Tiny) -> None:
    store = Store.open(tmp_path)
    model, questions = tiny_model(store), asked(store)
    given = execute(sample, SampleConfig(answers=2, max_tokens=2, split="heldout"), {"models": [model], "prompts": questions}, store)
    message = r"answers 2 held-out prompts, for example [0-9a-f]{32}; they must not be trained on"
    with pytest.raises(PunaError, match=message):
        execute(preferences, PreferencesConfig(), {"answers": given, "prompts": questions}, store)
    inputs = {"answers": given, "reward_model": scorer(store, model), "prompts": questions}
    with pytest.raises(PunaError, match=message):
        execute(rejection_sample, RejectionSampleConfig(), inputs, store)


def pairs(store: Store, split: str, prompts: range, name: str) -> Artifact:
    rows = [
        {"id": f"{name}{i}", "prompt_id": f"{i:02d}", "task": "t", "split": split, "messages": asking(f"say {i}"), "tools": None,
         "chosen": answering("1"), "rejected": answering("no no"), "edited": None, "others": None, "level": "better", "margin": 0.5, "chosen_model": "a", "rejected_model": "b"}
        for i in prompts
    ]  # fmt: skip
    return store.import_table("preferences", pa.Table.from_pylist(rows, schema=table_schema("preferences").schema))


def test_prompts_held_out_in_one_set_of_preferences_are_held_out_in_all(tmp_path: Path, tiny_model: Tiny) -> None:
    """Otherwise the accuracy on held-out pairs would be measured on prompts that the reward model was trained on."""
    store = Store.open(tmp_path)
    first, second = pairs(store, "train", range(6), "a"), pairs(store, "heldout", range(5, 8), "b")
    other_id = pa.array(["another id" if i == "05" else i for i in second.read()["prompt_id"].to_pylist()])
    renamed = second.read().set_column(second.read().column_names.index("prompt_id"), "prompt_id", other_id)
    for given in ([first, second], [first, store.import_table("preferences", renamed)]):  # equal ids, or only equal messages
        model = execute(reward_model, RewardModelConfig(), {"model": tiny_model(store), "preferences": given}, store)
        assert model.manifest.metrics["heldout_pairs"] == 4
        assert execute(chosen, chosen.config(), {"preferences": given}, store).rows() == 5


def test_ends_of_a_log_are_those_of_steps_that_were_taken(tmp_path: Path) -> None:
    """A skipped step has no loss; a run without any accepted step learned nothing, and reports that."""
    nan = float("nan")
    log = [{"step": float(step), "tokens": 1.0, "loss": loss, "learning_rate": 0.1, "accuracy": loss} for step, loss in enumerate((nan, 2.0, 1.0, nan), 1)]
    with Store.open(tmp_path).work("0" * 64) as work:
        run = StageRun("dpo", "model", TrainingSettings(), work)
        report_ends(log, ("accuracy", "margin"), run)
        write_log(log, run)
        assert run.metrics == {"first_accuracy": 2.0, "final_accuracy": 1.0, "steps": 4, "trained_tokens": 4.0}
        with pytest.raises(PunaError, match="dpo diverged: the loss is not finite in any of 2 steps"):
            write_log([log[0], log[3]], run)


def test_a_schedule_that_does_not_fit_is_refused_before_the_run() -> None:
    with pytest.raises(ValueError, match=r"warmup_steps must lie in 0..steps-1 \(49\), not 100"):
        TrainingSettings(steps=50, schedule={"warmup_steps": 100})
    assert TrainingSettings(steps=101, schedule={"warmup_steps": 100}).steps == 101
