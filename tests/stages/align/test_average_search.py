"""Averaging weights searched on a development set, compared with making and evaluating every average."""

from __future__ import annotations

import itertools
import json
import math
import re
import statistics
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest
import torch
from safetensors.torch import load_file

from puna.models.formats.checkpoint import load, save
from puna.models.tokens.tokenizer import Tokenizer
from puna.models.training.average import average as averaged
from puna.models.transformer import Transformer
from puna.stages.align.average import AverageConfig, average, grid
from puna.stages.contract import StageRun, execute, parse, stage
from puna.stages.conversations import asking, prompt_ids
from puna.storage import Artifact, PunaError, Store
from puna.storage.schemas import table_schema

from .conftest import TinyConfig, tiny


@stage(kind="model", version="1")
def opinions(config: TinyConfig, run: StageRun) -> None:
    """Write a reward model with random weights, and the tokenizer of `tiny`."""
    tiny.function(config, run)
    tokenizer, sizes = Tokenizer.load(run.folder), load(run.folder).config
    save(Transformer(sizes, "scalar", seed=config.seed), run.folder, tokenizer)


@stage(kind="model", version="1")
def patient(config: TinyConfig, run: StageRun) -> None:
    """Write `tiny` with a longer context."""
    tiny.function(config, run)
    network = load(run.folder)
    network.config = network.config.replace(max_position_embeddings=1 << 15)
    save(network, run.folder, Tokenizer.load(run.folder))


@pytest.mark.parametrize(("models", "steps"), [(1, 3), (2, 4), (3, 4), (4, 2)])
def test_the_grid_is_every_way_to_share_out_the_even_ones_first(models: int, steps: int) -> None:
    found = list(grid(models, steps))
    every = {tuple(c / steps for c in counts) for counts in itertools.product(range(steps + 1), repeat=models) if sum(counts) == steps}
    assert len(found) == len(every) and set(found) == every
    spread = [max(weights) - min(weights) for weights in found]
    assert spread[0] == min(spread) and max(found[-1]) == 1.0


def development(store: Store, pattern: str) -> Artifact:
    rows = [
        {"id": f"d{n}", "task": "t", "split": "heldout", "messages": asking(f"say {n} and {7 * n}"), "tools": None, "reference": None,
         "verifier": json.dumps({"name": "regex", "pattern": pattern})}
        for n in range(12)
    ]  # fmt: skip
    return store.import_table("prompts", pa.Table.from_pylist(rows, schema=table_schema("prompts").schema))


def test_the_weights_that_answer_the_development_set_best_are_taken(tmp_path: Path, tiny_model: Callable[..., Artifact]) -> None:
    from puna.models.generation import Engine, SamplingParams
    from puna.stages.training.train import load_model

    store = Store.open(tmp_path)
    models = [tiny_model(store, seed) for seed in (0, 1)]
    config = parse(AverageConfig, {"search": {"steps": 3, "max_tokens": 90, "temperature": 1.0}}, "")
    network, tokenizer = load_model(models[0], "lm")
    states = [load_model(model, "lm")[0].state_dict() for model in models]
    trials = [(1 / 2, 1 / 2), *grid(2, 3)]
    questions = development(store, "[a-m]")
    made = execute(average, config, {"models": models, "prompts": questions}, store)
    rows = sorted(questions.read().to_pylist(), key=lambda row: row["id"])
    shares = []
    for weights in trials:
        network.load_state_dict(averaged(states, weights))
        # The draws are read from the stage's run, because they follow from its seed; the scores are computed here.
        params = SamplingParams(temperature=1.0, max_tokens=90, stop=tokenizer.stop_ids, seed=_seed(config, store))
        answers = Engine(network, tokenizer).generate([prompt_ids(tokenizer, row) for row in rows], params)
        texts = [(tokenizer.decode(one.tokens, skip_special_tokens=True), one.finished) for (one,) in answers]
        # A truncated answer counts as wrong, as in the evaluation.
        shares.append(sum(bool(re.search("[a-m]", text)) and finished for text, finished in texts) / len(texts))
    assert len(set(shares)) > 1
    metrics = made.manifest.metrics
    assert metrics["development_score"] == max(shares) and metrics["development_score_of_equal_weights"] == shares[0]
    best = trials[shares.index(max(shares))]
    assert (metrics["weight_1"], metrics["weight_2"]) == pytest.approx(best)
    expected = averaged(states, best)
    for name, value in load_file(made.path() / "model.safetensors").items():
        assert torch.equal(value, expected[name])


def _seed(config: AverageConfig, store: Store) -> int:
    """Return the seed that the stage draws answers from."""
    with store.work("0" * 64) as work:
        return StageRun("average", "model", config, work).seed("development")


def test_the_weights_may_be_chosen_by_the_reward_of_reinforcement_learning(tmp_path: Path, tiny_model: Callable[..., Artifact]) -> None:
    """For every average: the verifier's score times (floor plus sigmoid of the reward model's number minus its mean over the first model's
    right answers), computed one by one."""
    from puna.models.generation import Engine, SamplingParams
    from puna.models.training.rollouts import reward_model_scorer
    from puna.stages.training.train import load_model

    store = Store.open(tmp_path)
    models, judge = [tiny_model(store, seed) for seed in (0, 1)], execute(opinions, TinyConfig(seed=3), {}, store)
    settings = {"steps": 2, "max_tokens": 90, "temperature": 1.0, "reward": "product", "floor": 0.25}
    config, questions = parse(AverageConfig, {"search": settings}, ""), development(store, "[a-m]")
    made = execute(average, config, {"models": models, "prompts": questions, "reward_model": judge}, store)
    network, tokenizer = load_model(models[0], "lm")
    numbers = reward_model_scorer(load_model(judge, "scalar")[0])
    states = [load_model(model, "lm")[0].state_dict() for model in models]
    asked = [prompt_ids(tokenizer, row) for row in sorted(questions.read().to_pylist(), key=lambda row: row["id"])]
    params = SamplingParams(temperature=1.0, max_tokens=90, stop=tokenizer.stop_ids, seed=_seed(config, store))

    def answered(weights: tuple[float, ...]) -> list[tuple[bool, float, bool]]:
        network.load_state_dict(averaged(states, weights))
        answers = Engine(network, tokenizer).generate(asked, params)
        right = [bool(re.search("[a-m]", tokenizer.decode(one.tokens, skip_special_tokens=True))) for (one,) in answers]
        return list(zip(right, [number for (number,) in numbers(asked, answers)], [one.finished for (one,) in answers], strict=True))

    center = statistics.fmean(number for right, number, _ in answered((1.0, 0.0)) if right)
    # A truncated answer has reward 0.
    rewards = [sum(r * f * (0.25 + 1 / (1 + math.exp(center - x))) for r, x, f in answered(weights)) / len(asked) for weights in grid(2, 2)]
    assert len(set(rewards)) == 3 and made.manifest.metrics["development_score"] == pytest.approx(max(rewards), abs=1e-5)
    assert made.manifest.metrics["center"] == pytest.approx(center, abs=1e-5)
    best = list(grid(2, 2))[rewards.index(max(rewards))]
    assert (made.manifest.metrics["weight_1"], made.manifest.metrics["weight_2"]) == pytest.approx(best)
    with pytest.raises(PunaError, match="search.reward=product needs a reward_model"):
        execute(average, config, {"models": models, "prompts": questions}, store)


@pytest.mark.parametrize("context", [2048, 1 << 15])
def test_a_long_development_prompt_ends_no_search(tmp_path: Path, tiny_model: Callable[..., Artifact], context: int) -> None:
    """A prompt beyond the model's context is dropped; a shorter one may be longer than the rows that a reward model otherwise scores."""
    store = Store.open(tmp_path)
    models = [execute(patient, TinyConfig(seed=seed), {}, store) if context > 2048 else tiny_model(store, seed) for seed in (0, 1)]
    judge = execute(opinions, TinyConfig(seed=3), {}, store)
    rows = development(store, "[a-m]").read().to_pylist()[:2]
    rows[0]["messages"] = asking("q9z " * 2300)
    questions = store.import_table("prompts", pa.Table.from_pylist(rows, schema=table_schema("prompts").schema))
    config = parse(AverageConfig, {"search": {"steps": 1, "max_tokens": 2, "reward": "reward_model"}}, "")
    made = execute(average, config, {"models": models, "prompts": questions, "reward_model": judge}, store)
    assert made.manifest.metrics["development_prompts"] == 1 + (context > 2048)
    assert made.manifest.metrics.get("dropped_too_long", 0) == (context == 2048)


def test_without_a_choice_all_weigh_the_same(tmp_path: Path, tiny_model: Callable[..., Artifact]) -> None:
    store = Store.open(tmp_path)
    models = [tiny_model(store, seed) for seed in (0, 1)]
    nothing = store.import_table("prompts", table_schema("prompts").schema.empty_table())
    plain = execute(average, AverageConfig(), {"models": models}, store)
    # No prompt has a score: all averages are equally good, and the uniform one wins. An empty development set chooses nothing.
    never = execute(average, parse(AverageConfig, {"search": {"max_tokens": 2}}, ""), {"models": models, "prompts": development(store, "zzzz")}, store)
    empty = execute(average, AverageConfig(), {"models": models, "prompts": nothing}, store)
    assert plain.data_digest == never.data_digest == empty.data_digest and plain.manifest.metrics["weight_1"] == 0.5
    with pytest.raises(PunaError, match=r"search.steps=20 asks for 1771 averages; the maximum is 500"):
        more = [*models, tiny_model(store, 2), tiny_model(store, 3)]
        config = parse(AverageConfig, {"search": {"steps": 20}}, "")
        execute(average, config, {"models": more, "prompts": development(store, "a")}, store)
