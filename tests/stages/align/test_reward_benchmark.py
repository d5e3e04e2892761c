"""A reward model evaluated on pairs by subset and on n answers: compared with arithmetic on its rewards, and its rewards with
transformers."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from puna.models.tokens.tokenizer import Tokenizer
from puna.stages.align.rejection_sample import RewardedConfig
from puna.stages.align.reward_benchmark import reward_benchmark
from puna.stages.align.reward_model import RewardModelConfig, reward_model
from puna.stages.contract import execute
from puna.stages.conversations import answering, asking, messages_of
from puna.storage import Artifact, PunaError, Store
from tests.stages.align.test_conversations import preference, table

Tiny = Callable[..., Artifact]


def learned(store: Store, tiny_model: Tiny) -> Artifact:
    """Return a reward model that prefers the answer that ends with `and`."""
    rows = [preference(f"train{n}", f"{n}", chosen=answering(f"{n} {n % 7} and"), rejected=answering(f"{n % 5} {n} to")) for n in range(24)]
    return execute(reward_model, RewardModelConfig(head_only=True), {"model": tiny_model(store), "preferences": [table(store, "preferences", rows)]}, store)


def pair(name: str, subset: str, chosen: str, rejected: str | None) -> dict[str, Any]:
    bad = None if rejected is None else answering(rejected)
    return preference(name, name, chosen=answering(chosen), rejected=bad) | {"task": subset, "split": "heldout"}


def test_accuracy_by_subset_beside_length(tmp_path: Path, tiny_model: Tiny) -> None:
    from transformers import AutoModelForSequenceClassification

    store = Store.open(tmp_path)
    model = learned(store, tiny_model)
    data = [pair(f"f{n}", "fair", f"{n} and", f"{n} {n} to") for n in range(8)] + [pair(f"r{n}", "reversed", f"{n} to", f"{n} and") for n in range(4)]
    data += [pair("same", "reversed", "1 to", "1 to"), pair("alone", "fair", "1 and", None)]
    made = execute(reward_benchmark, RewardedConfig(), {"reward_model": [model], "preferences": [table(store, "preferences", data)]}, store)
    rewards = {(row["id"], row["name"]): row["value"] for row in made.read("scores").to_pylist()}
    rows = {(row["task"], row["metric"]): row for row in made.read().to_pylist()}
    for subset, letter in (("fair", "f"), ("reversed", "r")):
        names = [row["id"] for row in data if row["task"] == subset and row["id"] != "alone"]
        right = [rewards[name, "chosen_reward"] > rewards[name, "rejected_reward"] for name in names]
        assert rows[subset, "accuracy"]["value"] == pytest.approx(statistics.fmean(right)) and rows[subset, "accuracy"]["n"] == len(names)
        assert all(name.startswith(letter) or name == "same" for name in names)
    assert rows["fair", "accuracy"]["value"] > 0.8 and rows["reversed", "accuracy"]["value"] < 0.3  # a tie does not count as right
    # By characters, `0 and` is shorter than `0 0 to`, and `0 to` than `0 and`; in one pair, both sides are equally long.
    assert (rows["fair", "always_longer"]["value"], rows["fair", "always_shorter"]["value"]) == (0.0, 1.0)
    assert (rows["reversed", "always_longer"]["value"], rows["reversed", "always_shorter"]["value"]) == pytest.approx((0.1, 0.9))
    assert made.manifest.metrics["pairs"] == 13
    assert made.manifest.metrics["subset_mean"] == pytest.approx((rows["fair", "accuracy"]["value"] + rows["reversed", "accuracy"]["value"]) / 2)
    assert [(row["id"], row["rule"]) for row in made.read("dropped").to_pylist()] == [("alone", "one_sided")]
    prompt, answer, _ = Tokenizer.load(model.path()).render_pair(messages_of(data[0]), "0 and")
    with torch.no_grad():
        peer = AutoModelForSequenceClassification.from_pretrained(model.path(), dtype=torch.float32)(torch.tensor([[*prompt, *answer]])).logits
    assert rewards["f0", "chosen_reward"] == pytest.approx(peer.item(), abs=1e-4)


def test_rewards_of_n_answers(tmp_path: Path, tiny_model: Tiny) -> None:
    store = Store.open(tmp_path)
    asked = [{"id": f"q{n}", "task": "ab"[n % 2], "split": "heldout", "messages": asking(f"say {n}")} for n in range(4)]
    texts = ["1 and", "1 2 to", "and", "to"]
    answers = [
        {"id": f"q{n}a{i}", "prompt_id": f"q{n}", "sample": i, "model": "m", "text": text, "tokens": [1], "logprobs": [0.0], "finished": True, "gold": float("and" in text)}
        for n in range(4) for i, text in enumerate(texts)
    ]  # fmt: skip
    given = {"reward_model": [learned(store, tiny_model)], "answers": table(store, "answers", answers), "prompts": table(store, "prompts", asked)}
    made = execute(reward_benchmark, RewardedConfig(), given, store)
    rewards = {row["id"]: row["value"] for row in made.read("scores").to_pylist()}
    groups = [[rewards[f"q{n}a{i}"] for i in range(4)] for n in range(4)]
    metrics = made.manifest.metrics
    assert metrics["reward"] == pytest.approx(statistics.fmean(map(statistics.fmean, groups)))
    assert metrics["spread"] == pytest.approx(statistics.fmean(map(statistics.pstdev, groups)))
    assert metrics["best_reward"] == pytest.approx(statistics.fmean(map(max, groups)))
    assert (metrics["right"], metrics["right_of_any"]) == (0.5, 1.0)
    assert metrics["right_of_best"] == statistics.fmean("and" in texts[group.index(max(group))] for group in groups)
    assert metrics["answers"] == 16 and {row["task"] for row in made.read().to_pylist()} == {"all", "a", "b"}


def test_something_is_given(tmp_path: Path, tiny_model: Tiny) -> None:
    store = Store.open(tmp_path)
    with pytest.raises(PunaError, match="give preferences or answers"):
        execute(reward_benchmark, RewardedConfig(), {"reward_model": [tiny_model(store)]}, store)


def test_preferences_without_rows_are_named(tmp_path: Path, tiny_model: Tiny) -> None:
    store = Store.open(tmp_path)
    given = {"reward_model": [tiny_model(store)], "preferences": [table(store, "preferences", [])]}
    with pytest.raises(PunaError, match="none of the 0 pairs can be used: there are none"):
        execute(reward_benchmark, RewardedConfig(), given, store)
