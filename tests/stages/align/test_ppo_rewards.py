"""PPO with verifiers: the reward rises if possible; the product is the verifier's score times the reward model's probability."""

from __future__ import annotations

import math
import re
import statistics
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
from fastapi.testclient import TestClient

from puna.flows.engine.trace import flow_named, trace
from puna.flows.engine.trace import load as load_recipe
from puna.flows.web import application
from puna.models.forest import Forest
from puna.models.formats.checkpoint import load
from puna.models.generation import Completion
from puna.models.tokens.tokenizer import Tokenizer
from puna.models.training.rl_settings import RolloutSettings
from puna.models.training.trainer import Trainer
from puna.stages.align.average import AverageConfig, SearchConfig
from puna.stages.align.data_quality import DataQualityConfig
from puna.stages.align.reinforcement import GrpoConfig, PpoConfig, RolloutsConfig, grpo, ppo
from puna.stages.align.reward_model import RewardModelConfig, reward_model
from puna.stages.align.sample import SampleConfig, sample
from puna.stages.contract import Facts, InputFacts, Model, Prompts, SeededConfig, StageRun, execute, stage
from puna.stages.conversations import answering, asking, prompt_ids
from puna.stages.evaluation.evaluate import EvaluateConfig, evaluate
from puna.stages.training.rewards import rewards_of
from puna.stages.training.settings import AdapterConfig, DpoConfig
from puna.stages.verifiers import scoring
from puna.stages.verifiers.base import Score, ScoringConfig
from puna.stages.verifiers.registry import to_text
from puna.stages.verifiers.scoring import Scorer
from puna.storage import Artifact, PunaError, Store, catalog
from puna.storage.schemas import table_schema
from tests.models.test_vllm_engine import Asked
from tests.models.test_vllm_engine import Model as StandIn

Tiny = Callable[..., Artifact]
FOUND: list[list[list[float]]] = []
SETTINGS: dict[str, Any] = {
    "rollouts": 8, "prompts": 6, "answers": 8, "max_tokens": 4, "critic_learning_rate": 3e-3, "kl_coefficient": 0.0, "unfinished_penalty": 0.0,
    "schedule": {"learning_rate": 5e-3},
}  # fmt: skip
# A letter that random weights sometimes write, so that there is something to reinforce.
LETTER = to_text("regex", pattern="[a-m]", extract=False)


def asked(store: Store, verifier: str | None = LETTER, count: int = 6) -> Artifact:
    rows = [
        {"id": f"{i:02d}", "task": "t", "split": "train", "messages": asking(f"say {i}"), "tools": None, "reference": None, "verifier": verifier}
        for i in range(count)
    ]  # fmt: skip
    return store.import_table("prompts", pa.Table.from_pylist(rows, schema=table_schema("prompts").schema))


def rewarding(store: Store, model: Artifact) -> Artifact:
    rows = [
        {"id": f"{i}", "prompt_id": f"{i}", "task": "t", "split": "train", "messages": asking(f"say {i}"), "tools": None,
         "chosen": answering("1"), "rejected": answering("no no"), "edited": None, "others": None, "level": "better", "margin": 0.5, "chosen_model": "a", "rejected_model": "b"}
        for i in range(8)
    ]  # fmt: skip
    given = store.import_table("preferences", pa.Table.from_pylist(rows, schema=table_schema("preferences").schema))
    config = RewardModelConfig(training={"epochs": 8.0, "batch_size": 8, "schedule": {"learning_rate": 3e-3}})
    return execute(reward_model, config, {"model": model, "preferences": [given]}, store)


@pytest.mark.parametrize(("seed", "with_model"), [(0, False), (1, True)])
def test_the_verifiers_reward_rises(tmp_path: Path, tiny_model: Tiny, seed: int, with_model: bool) -> None:
    store = Store.open(tmp_path)
    model = tiny_model(store)
    given = {"policy": model, "prompts": asked(store), "reward_model": rewarding(store, model) if with_model else None}
    made = execute(ppo, PpoConfig(reward="verifier", seed=seed, **SETTINGS), given, store)
    metrics, log = made.manifest.metrics, made.read("training_log").to_pylist()
    assert all(0 <= row["score"] <= 1 for row in log) and metrics["final_score"] > metrics["first_score"] + 0.15, [row["score"] for row in log]
    assert metrics["unscored_answers"] == 0 and load(made.path()).head == "lm"


GSPO = {"ratio": "sequence", "normalizer": "answers", "baseline": "mean", "clip": 0.01}
CISPO = {"surrogate": "cispo", "clip_high": 3.0, "baseline": "rloo"}


@pytest.mark.parametrize(("method", "loss"), [("full", CISPO), ("lora", {}), ("full", GSPO)], ids=["cispo_rloo", "grpo", "gspo_mean"])
def test_without_a_critic_the_reward_rises_too(tmp_path: Path, tiny_model: Tiny, method: str, loss: dict[str, Any]) -> None:
    store = Store.open(tmp_path)
    model = tiny_model(store)
    given = {name: value for name, value in SETTINGS.items() if name != "critic_learning_rate"} | {"epochs": 2}
    given |= {"schedule": {"learning_rate": 3e-2 if method == "lora" else 5e-3}}
    config = GrpoConfig(method=method, **({"lora": {"rank": 4}} if method == "lora" else {}), **loss, **given)
    made = execute(grpo, config, {"policy": model, "prompts": asked(store)}, store)
    scores = made.read("training_log")["score"].to_pylist()
    # A rollout has 48 answers, with a standard error of .07: only the later four together show the increase.
    assert sum(scores[4:]) / 4 > scores[0] + 0.15, scores
    assert "value_loss" not in made.read("training_log").column_names
    before, after = load(model.path()), load(made.path())
    assert torch.equal(before.model.embed_tokens.weight, after.model.embed_tokens.weight) == (method == "lora")
    assert before.state_dict().keys() == after.state_dict().keys()


@pytest.mark.parametrize("noise", [0.0, 0.02])
def test_vllm_draws_answers_of_a_policy_in_training(tmp_path: Path, tiny_model: Tiny, monkeypatch: pytest.MonkeyPatch, noise: float) -> None:
    """With the stub of vLLM's `LLM`: its weights follow the policy's, and importance weights in the loss correct for its different
    numbers."""
    StandIn.made.clear()
    monkeypatch.setattr(StandIn, "noise", noise)
    monkeypatch.setitem(sys.modules, "vllm", types.SimpleNamespace(LLM=StandIn, SamplingParams=Asked))
    store = Store.open(tmp_path)
    given = {name: value for name, value in SETTINGS.items() if name != "critic_learning_rate"} | {"rollouts": 2}
    config = GrpoConfig(engine="vllm", gpu_memory=0.25, **given)
    made = execute(grpo, config, {"policy": tiny_model(store), "prompts": asked(store)}, store)
    log, (engine,) = made.read("training_log").to_pylist(), StandIn.made
    assert engine.share == 0.25 and len(engine.asked) == 2 * 6 and all(row["approximate_kl"] >= 0 for row in log)
    if noise:
        assert all(row["mismatch"] != 0 and 0 < row["importance"] != 1 for row in log)
    else:
        assert [(row["mismatch"], row["importance"]) for row in log] == [(0.0, 1.0)] * 2
    assert load(made.path()).head == "lm" and not any("vllm" in name for name in made.manifest.files)


def test_vllm_is_refused_where_it_is_not_or_reads_no_whole_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("puna.models.serving.find_spec", lambda name: None)
    steps = trace(flow_named("pipeline"), load_recipe("demo", ["grpo.engine=vllm"])).steps
    config = next(step.config for step in steps if step.label == "grpo_1")
    facts = Facts({name: (InputFacts("model", None, None),) for name in ("policy", "reward_model")}, None)
    assert grpo.needs is not None
    assert grpo.needs(config, facts) == ["engine: vLLM is not installed; pip install 'puna[vllm]', or set engine to puna"]
    assert grpo.needs(config.replace(engine="puna"), facts) == []
    with pytest.raises(ValueError, match="without merging adapters; set method to full"):
        GrpoConfig(engine="vllm", method="lora")


def test_a_judge_without_its_key_is_refused_before_any_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JUDGE_KEY", raising=False)
    scoring = {"endpoint": {"base_url": "http://127.0.0.1:9/v1", "model": "m", "key": "JUDGE_KEY"}}
    facts = Facts({"policy": (InputFacts("model", None, None),), "models": (InputFacts("model", None, None),)}, None)
    configs = {"scoring": (grpo, GrpoConfig(scoring=scoring)), "answers.scoring": (evaluate, EvaluateConfig(answers={"scoring": scoring}))}
    for where, (one, config) in {**configs, "scoring ": (sample, SampleConfig(scoring=scoring))}.items():
        message = f"{where.strip()}.endpoint.key: the environment variable JUDGE_KEY is not set; set it to the API key of http://127.0.0.1:9/v1"
        assert one.needs(config, facts) == [message]
    monkeypatch.setenv("JUDGE_KEY", "k")
    assert grpo.needs(GrpoConfig(scoring=scoring), facts) == []


def test_a_policy_in_bf16_begins_where_its_reference_is(tmp_path: Path, tiny_model: Tiny) -> None:
    store = Store.open(tmp_path)
    model = tiny_model(store)
    given = SETTINGS | {"rollouts": 1, "compute": {"precision": "bf16"}}
    made = execute(ppo, PpoConfig(reward="product", **given), {"policy": model, "prompts": asked(store), "reward_model": rewarding(store, model)}, store)
    (row,) = made.read("training_log").to_pylist()
    # A reference in fp32 differs by .0006 to .0075 nats per answer; the two passes in bf16 round a few sums otherwise.
    assert abs(row["kl"]) < 3e-4 and load(made.path()).model.embed_tokens.weight.dtype == torch.float32


def test_a_killed_run_goes_on_in_the_precision_that_it_was_begun_in(tmp_path: Path, tiny_model: Tiny, killed_and_resumed: Callable[..., tuple[Artifact, Artifact]]) -> None:
    """With the reference and the reward model, which are not trained, on a machine that is busy when the second process starts."""
    stores = [Store.open(tmp_path / name) for name in ("whole", "killed")]
    model = tiny_model(stores[0])
    given = {"policy": model, "prompts": asked(stores[0]), "reward_model": rewarding(stores[0], model)}
    config = PpoConfig(reward="product", **SETTINGS | {"rollouts": 3, "kl_coefficient": 0.1, "compute": {"precision": "fastest"}})
    whole, made = killed_and_resumed(ppo, config, given, stores, lambda done, note: done == 2)
    assert made.data_digest == whole.data_digest


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_ppo_trains_adapters(tmp_path: Path, tiny_model: Tiny, dropout: float) -> None:
    """Adapters start at zero, so dropout could change answers only from the second rollout on."""
    store = Store.open(tmp_path)
    model = tiny_model(store)
    config = PpoConfig(reward="verifier", method="lora", lora={"rank": 2, "dropout": dropout}, rollouts=2, prompts=4, answers=2, max_tokens=3)
    made = execute(ppo, config, {"policy": model, "prompts": asked(store)}, store)
    before, after = load(model.path()).state_dict(), load(made.path()).state_dict()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed and all("_proj" in name for name in changed) and before.keys() == after.keys()
    assert made.manifest.metrics["first_kl"] == pytest.approx(0.0, abs=1e-4)


def test_the_product_rises_too(tmp_path: Path, tiny_model: Tiny) -> None:
    store = Store.open(tmp_path)
    model = tiny_model(store)
    given = {"policy": model, "prompts": asked(store), "reward_model": rewarding(store, model)}
    made = execute(ppo, PpoConfig(reward="product", **SETTINGS), given, store)
    metrics = made.manifest.metrics
    assert metrics["final_score"] > metrics["first_score"] > 0
    # The verifiers' scores are logged beside the reward and the KL divergence.
    log = made.read("training_log").to_pylist()
    assert all(0 < row["score"] < row["gold"] <= 1 for row in log) and metrics["final_gold"] == log[-1]["gold"]
    shown = made.manifest.figures["against_kl"]["series"]
    assert shown["verifiers"] == [[row["kl"], row["gold"]] for row in log] and len(shown["reward"]) == len(log)


def test_verifiers_that_reward_nothing_are_asked_where_the_divergence_is_measured(tmp_path: Path, tiny_model: Tiny) -> None:
    store = Store.open(tmp_path)
    model = tiny_model(store)
    given = {"policy": model, "prompts": asked(store), "reward_model": rewarding(store, model)}
    few = {"rollouts": 12, "prompts": 2, "answers": 2, "max_tokens": 6, "minibatches": 1, "kl_coefficient": 0.0}
    made = execute(grpo, GrpoConfig(reward="reward_model", gold=True, **few), given, store)
    log, answers = made.read("training_log").to_pylist(), made.read("rollouts").to_pylist()
    assert [row["step"] for row in log if row["gold"] is not None] == [1, 3, 5, 7, 9, 11, 12]
    for row in log:
        verdicts = [one["verifier"] for one in answers if one["step"] == row["step"]]
        assert verdicts == [None] * 4 if row["gold"] is None else row["gold"] == pytest.approx(statistics.fmean(verdicts))
    assert 0 < sum(row["gold"] or 0 for row in log) < 7
    assert all(one["score"] == one["reward_model"] for one in answers) and made.manifest.metrics["checker_calls"] == 7 * 4


class RewardsConfig(SeededConfig):
    """The seed of a rollout."""


@stage(kind="evaluation", version="1")
def rewards_stage(reward_model: Model, prompts: Prompts, config: RewardsConfig, run: StageRun) -> None:
    """Write the three rewards of the same answers, and the last one with other centers."""
    rows, tokenizer = prompts.read().to_pylist(), Tokenizer.load(reward_model.path())
    asked = [prompt_ids(tokenizer, row) for row in rows]
    scorer, network = Scorer(rows, ScoringConfig(), run), load(reward_model.path(), "scalar")
    answers = [[completion(tokenizer, text) for text in ("abc", "xyz", "q a")] for _ in rows]
    for some in ((scorer, []), (None, [network]), (scorer, [network])):
        found = rewards_of(*some, rows, asked, tokenizer, 4096, floor=0.25)
        FOUND.append(found(asked, answers))
    # Of the first answers to the first prompt two are right; of the second prompt's answers none is.
    FOUND.append(found.center_by(asked[:1], answers[:1], run)(asked, answers))
    FOUND.append(found.center_by(asked[:1], [answers[0][1:2]], run)(asked, answers))
    run.write_rows([])


def completion(tokenizer: Tokenizer, text: str) -> Completion:
    ids = [*tokenizer.encode(text), tokenizer.stop_ids[0]]
    return Completion(tuple(ids), (0.0,) * len(ids), True)


def test_the_product_is_the_score_times_the_probability(tmp_path: Path, tiny_model: Tiny) -> None:
    store = Store.open(tmp_path)
    judge = rewarding(store, tiny_model(store))
    FOUND.clear()
    prompts = asked(store, count=2)
    execute(rewards_stage, RewardsConfig(), {"reward_model": judge, "prompts": prompts}, store)
    scores, numbers, products, centered, without_right = FOUND
    assert scores == [[1.0, 0.0, 1.0]] * 2
    network, tokenizer = load(judge.path(), "scalar"), Tokenizer.load(judge.path())
    for row, some in zip(prompts.read().to_pylist(), numbers, strict=True):
        for text, number in zip(("abc", "xyz", "q a"), some, strict=True):
            ids = [*prompt_ids(tokenizer, row), *tokenizer.encode(text), tokenizer.stop_ids[0]]
            assert number == pytest.approx(float(network.scalar(network.hidden(Forest.pack([ids])))[-1].detach()), abs=1e-4)
    # Without a right answer, the center is the mean of all answers: 0 has no meaning.
    for found, center in ((products, 0.0), (centered, (numbers[0][0] + numbers[0][2]) / 2), (without_right, numbers[0][1])):
        rows = [zip(*lines, strict=True) for lines in zip(scores, numbers, strict=True)]
        wanted = [[score * (0.25 + 1 / (1 + math.exp(center - number))) for score, number in row] for row in rows]
        assert [one for line in found for one in line] == pytest.approx([one for line in wanted for one in line])
    assert centered != products


def test_the_product_is_centered_by_the_start(tmp_path: Path, tiny_model: Tiny) -> None:
    """With one rollout at a negligible learning rate, the numbers' center is the policy's, trained or not; `zero` has none."""
    store = Store.open(tmp_path)
    model = tiny_model(store)
    given = {"policy": model, "prompts": asked(store), "reward_model": rewarding(store, model)}
    few: dict[str, Any] = {"reward": "product", "rollouts": 1, "prompts": 6, "answers": 8, "max_tokens": 4, "unfinished_penalty": 0.0}
    still, fast = (
        execute(grpo, GrpoConfig(schedule={"learning_rate": rate, "warmup_steps": 0, "shape": "constant"}, **few), given, store).manifest.metrics
        for rate in (1e-9, 3e-2)
    )
    zero = execute(grpo, GrpoConfig(center="zero", **few), given, store).manifest.metrics
    assert still["center"] == fast["center"] != 0 and "center" not in zero
    assert still["first_score"] != zero["first_score"]


PARTS: dict[str, Any] = {"floor": 0.5, "center": "zero", "ensemble": "min", "gold": True, "scoring": {"seconds": 9.0}}
"""Setting of the reward -> another value; the settings of `RewardSettings` and `RolloutsConfig` must have one."""
UNUSED = {"verifier": {"floor", "center", "ensemble", "gold"}, "reward_model": {"floor", "center", "scoring"}, "product": {"gold"}}


@pytest.mark.parametrize("reward", UNUSED)
def test_each_part_of_the_reward_changes_the_run_or_is_refused(tmp_path: Path, tiny_model: Tiny, reward: str) -> None:
    store = Store.open(tmp_path)
    model = tiny_model(store)
    given = {"policy": model, "prompts": asked(store), "reward_model": [rewarding(store, one) for one in (model, tiny_model(store, 1))]}
    few = {"rollouts": 1, "prompts": 4, "answers": 4, "max_tokens": 4, "minibatches": 1, "reward": reward}

    def digest(**more: Any) -> tuple[str, list[str]]:
        made = execute(grpo, GrpoConfig(**few | more), given, store)
        return made.data_digest, made.read("training_log").column_names

    plain, refused = digest(), set()
    own = RolloutsConfig.model_fields.keys() - RolloutSettings.model_fields.keys() - AdapterConfig.model_fields.keys() - {"reward"}
    for name in own:
        try:
            changed = digest(**{name: PARTS[name]}) != plain
            # A limit that no verifier reaches changes nothing.
            assert changed or name == "scoring", f"{name}={PARTS[name]} changes nothing and is not refused"
        except ValueError as error:
            assert f"{name} " in str(error) and "leave it out" in str(error)
            refused.add(name)
    assert refused == UNUSED[reward]
    with pytest.raises(ValueError, match="lora .*has no effect: method is full; leave it out"):
        GrpoConfig(**few, lora={"rank": 4})
    with pytest.raises(ValueError, match=r"floor 0.5 has no effect: it is a part of reward product; leave it out"):
        SearchConfig(floor=0.5)


@stage(kind="evaluation", version="1")
def ensembles_stage(reward_model: list[Model], prompts: Prompts, config: RewardsConfig, run: StageRun) -> None:
    """Write the numbers of each member, of the mean and of the minimum."""
    rows, tokenizer = prompts.read().to_pylist(), Tokenizer.load(reward_model[0].path())
    asked = [prompt_ids(tokenizer, row) for row in rows]
    answers = [[completion(tokenizer, text) for text in ("abc", "xyz")] for _ in rows]
    members = [load(one.path(), "scalar") for one in reward_model]
    for some, how in (*(([one], "mean") for one in members), (members, "mean"), (members, "min"), (members[::-1], "mean")):
        FOUND.append(rewards_of(None, some, rows, asked, tokenizer, 4096, ensemble=how)(asked, answers))
    run.write_rows([])


def test_an_ensemble_is_the_mean_or_the_least_of_its_members(tmp_path: Path, tiny_model: Tiny) -> None:
    store = Store.open(tmp_path)
    judges = [rewarding(store, tiny_model(store, seed)) for seed in range(3)]
    FOUND.clear()
    execute(ensembles_stage, RewardsConfig(), {"reward_model": judges, "prompts": asked(store, count=3)}, store)
    *members, mean, least, other_way = FOUND
    assert len({str(one) for one in members}) == 3
    for prompt in range(3):
        for answer in range(2):
            values = [one[prompt][answer] for one in members]
            assert mean[prompt][answer] == other_way[prompt][answer] == pytest.approx(sum(values) / 3)
            assert least[prompt][answer] == min(values)


@pytest.mark.parametrize("ensemble", ["mean", "min"])
def test_a_policy_is_rewarded_by_several_models(tmp_path: Path, tiny_model: Tiny, ensemble: str) -> None:
    store = Store.open(tmp_path)
    model = tiny_model(store)
    judges = [rewarding(store, tiny_model(store, seed)) for seed in range(2)]
    config = GrpoConfig(reward="reward_model", ensemble=ensemble, rollouts=2, prompts=4, answers=4, max_tokens=3)
    made = [execute(grpo, config, {"policy": model, "prompts": asked(store), "reward_model": some}, Store.open(tmp_path / str(number)))
            for number, some in enumerate((judges, judges[::-1], judges[:1]))]  # fmt: skip
    first, turned, alone = (one.data_digest for one in made)
    assert first == turned != alone


def test_ppo_refuses_a_reward_that_it_cannot_have(tmp_path: Path, tiny_model: Tiny) -> None:
    store = Store.open(tmp_path)
    model, few = tiny_model(store), {"rollouts": 1, "prompts": 2, "answers": 2, "max_tokens": 2}
    for reward in ("product", "reward_model"):
        with pytest.raises(PunaError, match=f"ppo: reward={reward} needs a reward_model; give one, or set reward=verifier"):
            execute(ppo, PpoConfig(reward=reward, **few), {"policy": model, "prompts": asked(store)}, store)
    with pytest.raises(PunaError, match="ppo: 6 of 6 prompts have no verifier, for example 00; give each one"):
        execute(ppo, PpoConfig(reward="verifier", **few), {"policy": model, "prompts": asked(store, None)}, store)
    table = asked(store).read().to_pylist()
    twice = [{**row, "messages": asking("say"), "verifier": to_text("regex", pattern=row["id"])} for row in table]
    same = store.import_table("prompts", pa.Table.from_pylist(twice, schema=table_schema("prompts").schema))
    with pytest.raises(PunaError, match="prompts 00 and 01 have the same text but are scored differently"):
        execute(ppo, PpoConfig(reward="verifier", **few), {"policy": model, "prompts": same}, store)


def test_a_judge_rewards_the_policy(tmp_path: Path, tiny_model: Tiny) -> None:
    store = Store.open(tmp_path)
    prompts = asked(store, to_text("judge", rubric="r"))
    config = PpoConfig(reward="verifier", rollouts=1, prompts=2, answers=2, max_tokens=2)
    judge = tiny_model(store, 7)
    made = execute(ppo, config, {"policy": tiny_model(store), "prompts": prompts, "judges": [judge]}, store)
    assert 0 < made.manifest.metrics["first_score"] < 1 and made.manifest.metrics["unscored_answers"] == 0


@pytest.mark.parametrize("train, max_stale", [(ppo, 0), (grpo, 1)])
def test_every_answer_is_a_row_of_the_table_rollouts(tmp_path: Path, tiny_model: Tiny, monkeypatch: pytest.MonkeyPatch, train: Any, max_stale: int) -> None:
    """A run that stops in the second of three rollouts and resumes has the same rows as an uninterrupted run, each once."""
    settings = {**SETTINGS, "rollouts": 3, "prompts": 4, "answers": 3, "max_stale": max_stale, "reward": "product", "kl_coefficient": 0.1}
    if train is grpo:
        del settings["critic_learning_rate"]
    config = (PpoConfig if train is ppo else GrpoConfig)(**settings, center="zero", floor=0.25)
    tables = []
    for name in ("whole", "parts"):
        store = Store.open(tmp_path / name)
        model = tiny_model(store)
        given = {"policy": model, "prompts": asked(store), "reward_model": rewarding(store, model)}
        if name == "parts":
            step, ends = Trainer.step, iter([False] * 5 + [True])

            def stopped(*args: Any, **named: Any) -> Any:
                if next(ends, False):  # noqa: B023
                    raise KeyboardInterrupt
                return step(*args, **named)  # noqa: B023

            monkeypatch.setattr(Trainer, "step", stopped)
            with pytest.raises(KeyboardInterrupt):
                execute(train, config, given, store)
        made = execute(train, config, given, store)
        tables.append(made.read("rollouts"))
    whole, parts = tables
    assert whole.equals(parts) and len(whole) == 3 * 4 * 3
    log, rows = made.read("training_log").to_pylist(), whole.to_pylist()
    for entry in log:
        own = [row for row in rows if row["step"] == entry["step"]]
        assert sum(row["score"] for row in own) / 12 == pytest.approx(entry["score"], abs=1e-6) and {row["version"] for row in own} == {entry["version"]}
        kl = [(row["logprob"] - row["reference_logprob"]) * len(row["tokens"]) for row in own]
        assert sum(kl) / 12 == pytest.approx(entry["kl"], abs=1e-5)
    for row in rows:
        assert row["score"] == pytest.approx(row["verifier"] * (0.25 + 1 / (1 + math.exp(-row["reward_model"]))), rel=1e-5)
        assert row["sample"] in range(6) and (row["verifier"] == 1.0) == any(c in "abcdefghijklm" for c in row["text"])
    rows.sort(key=lambda row: (row["step"], row["prompt_id"], row["sample"]))
    for group in [rows[i : i + 3] for i in range(0, 36, 3) if train is grpo]:
        worth = [row["score"] for row in group]
        kl = [(row["logprob"] - row["reference_logprob"]) * len(row["tokens"]) for row in group]
        if (deviation := statistics.stdev(worth)) > 0.01:
            expected = [(one - sum(worth) / 3) / deviation - 0.1 * (nats - sum(kl) / 3) for one, nats in zip(worth, kl, strict=True)]
            assert [row["advantage"] for row in group] == pytest.approx(expected, abs=1e-2)
    with catalog.Catalog(store) as opened:
        best = catalog.run(opened, "select max(score) as score, count(*) as answers from newest.rollouts").to_pylist()
    assert best == [{"score": max(row["score"] for row in rows), "answers": 36}]
    client = TestClient(application(store, prefect=None, auth=""))
    page = client.get(f"/rollouts/{made.key[:12]}").text
    for part, order in (("best", -1), ("worst", 1)):
        shown = re.findall(r"<tr>(.*?)</tr>", page.partition(f'id="{part}"')[2].partition("</section>")[0], re.DOTALL)[1:]
        expected = sorted(rows, key=lambda row: order * row["score"])[:20]
        assert [f">{row['score']:.6g}<" in one for row, one in zip(expected, shown, strict=True)] == [True] * 20
    steps = {name: [row["step"] for row in rows if row["prompt_id"] == name] for name in {row["prompt_id"] for row in rows}}
    mean = {(n, s): statistics.fmean(r["score"] for r in rows if (r["prompt_id"], r["step"]) == (n, s)) for n in steps for s in steps[n]}
    gains = sorted((mean[n, max(some)] - mean[n, min(some)] for n, some in steps.items()), key=lambda gain: -abs(gain))
    changed = re.findall(r"<tr><td>say \d</td>.*?</tr>", page.partition('id="changed"')[2], re.DOTALL)
    assert [f">{gain:.6g}<" in one for gain, one in zip([gain for gain in gains if gain], changed, strict=True)] == [True] * len(changed) != []
    assert f"/puna/rollouts/{made.key[:12]}" in client.get(f"/artifact/model/{made.key[:12]}").text
    assert "only ppo and grpo write one" in client.get(f"/rollouts/{model.key[:12]}").text


@pytest.mark.parametrize("train", [ppo, grpo])
def test_answers_that_could_not_be_scored_before_a_stop_are_counted(tmp_path: Path, tiny_model: Tiny, monkeypatch: pytest.MonkeyPatch, train: Any) -> None:
    """A run that stops in its third rollout and resumes reports as many unscored answers as an uninterrupted run: half of all."""
    settings = {**SETTINGS, "rollouts": 3, "prompts": 4, "answers": 4, "reward": "verifier"}
    if train is grpo:
        del settings["critic_learning_rate"]
    config = (PpoConfig if train is ppo else GrpoConfig)(**settings)
    real, step = scoring.score_items, Trainer.step
    steps = iter([False] * 2 * config.updates * (2 if train is ppo else 1))

    def half(items: Any, tools: Any) -> list[Score]:
        return [Score(None, "broken") if number % 2 else score for number, score in enumerate(real(items, tools))]

    def stopped(*args: Any, **named: Any) -> Any:
        if next(steps, True):
            raise KeyboardInterrupt
        return step(*args, **named)

    monkeypatch.setattr(scoring, "score_items", half)
    store = Store.open(tmp_path)
    given = {"policy": tiny_model(store), "prompts": asked(store)}
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "step", stopped)
        with pytest.raises(KeyboardInterrupt):
            execute(train, config, given, store)
    assert execute(train, config, given, store).manifest.metrics["unscored_answers"] == 3 * 4 * 4 / 2


def test_unscored_answers_of_before_a_stop_are_counted(tmp_path: Path, tiny_model: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts are answered two at a time; the run stops before the second pair. No answer can be scored."""
    store, calls = Store.open(tmp_path), iter([False, True])

    def broken(items: Any, tools: Any) -> list[Score]:
        if next(calls, False):
            raise KeyboardInterrupt
        return [Score(None, "broken")] * len(items)

    monkeypatch.setattr(scoring, "score_items", broken)
    monkeypatch.setattr(sys.modules[sample.function.__module__], "STRETCH", 2)
    given = {"models": [tiny_model(store)], "prompts": asked(store)}
    with pytest.raises(KeyboardInterrupt):
        execute(sample, SampleConfig(answers=2, max_tokens=2), given, store)
    made = execute(sample, SampleConfig(answers=2, max_tokens=2), given, store)
    assert made.manifest.metrics["unscored_answers"] == made.rows() == 2 * asked(store).rows() > 4


@pytest.mark.parametrize(
    ("kind", "values", "name", "used"),
    [
        (DpoConfig, {"nll_normalization": "tokens"}, "nll_normalization", {"nll_weight": 0.1}),
        (AverageConfig, {"search": {"steps": 8}}, "search", {}),
        (DataQualityConfig, {"min_agreement": 0.9}, "min_agreement", {}),
        (SampleConfig, {"top_k": 5}, "top_k", {"temperature": 0.5}),
        (GrpoConfig, {"scoring": {"reply_tokens": 9}}, "scoring.reply_tokens", {"scoring": {"reply_tokens": 9, "endpoint": {"base_url": "http://h/v1", "model": "m"}}}),
    ],
)  # fmt: skip
def test_settings_without_effect_are_refused(kind: Any, values: dict[str, Any], name: str, used: dict[str, Any]) -> None:
    unused = {DpoConfig: {"nll_weight": 0}, AverageConfig: {"weights": (1, 1)}, DataQualityConfig: {"judge": {}}, SampleConfig: {"temperature": 0}}
    with pytest.raises(ValueError, match=f"{name} .* has no effect"):
        kind(**values | unused.get(kind, {}))
    kind(**unused.get(kind, {}))
    kind(**values | used)
