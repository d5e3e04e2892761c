"""A reward that is the mean over an answer's tokens: its definition, its field in the model's configuration, and the programs that must
refuse it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from puna.models.config import ModelConfig
from puna.models.forest import Forest
from puna.models.formats.checkpoint import load
from puna.models.formats.hub import PunaForSequenceClassification
from puna.models.tokens.tokenizer import Tokenizer
from puna.models.training import objectives as o
from puna.models.transformer import Transformer
from puna.stages.align.average import AverageConfig, average
from puna.stages.align.reward_model import RewardModelConfig, reward_model, score_answers
from puna.stages.contract import execute
from puna.stages.conversations import answering
from puna.stages.io.export import export_model
from puna.stages.training.bad_rows import BadRows, Limit
from puna.stages.training.rankings import read_preferences, render_ranked
from puna.storage import Artifact, PunaError, Store
from tests.stages.align.test_conversations import preference, table

Tiny = Callable[..., Artifact]
PROMPT = "say a number"


def rewards_by_hand(model: Transformer, prompt: list[int], answer: list[int]) -> list[float]:
    """Return the scalar head's output at each of an answer's tokens, from a pass over only this prompt and answer."""
    with torch.no_grad():
        states = model.hidden(Forest.pack([torch.tensor([*prompt, *answer])]))
        return [float(states[len(prompt) + place] @ model.score.weight[0]) for place in range(len(answer))]


def test_the_mean_is_over_the_answers_own_tokens() -> None:
    config = ModelConfig(vocab_size=20, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2, initializer_range=0.4)
    mean = Transformer(config.replace(reward_pooling="mean", model_type=""), "scalar", seed=1)
    last = Transformer(config, "scalar", seed=1)
    prompts, answers = [[1, 2, 3], [4]], [[[5], [6, 7, 8]], [[9, 10], [11, 12, 13, 14]]]
    targets = o.Targets.from_answers(prompts, answers)
    flat = [(prompt, answer) for prompt, some in zip(prompts, answers, strict=True) for answer in some]
    assert targets.forest.tokens[targets.rows].tolist() == [token for _, answer in flat for token in answer] == targets.tokens.tolist()
    by_token = [rewards_by_hand(mean, *pair) for pair in flat]
    assert o.answer_rewards(mean, targets).tolist() == pytest.approx([sum(some) / len(some) for some in by_token], rel=1e-4)
    assert o.answer_rewards(last, targets).tolist() == pytest.approx([some[-1] for some in by_token], rel=1e-4)
    packed = o.Targets.from_packed([1, 2, 3, 7, 8], [3, 2])
    assert packed.forest.tokens[packed.rows].tolist() == packed.tokens.tolist() == [2, 3, 8]


def rows(split: str, numbers: range) -> list[dict[str, object]]:
    """Return rows in which the answer that contains `and` is preferred; the last word is the same."""
    said = [(f"{n} and 1 say", f"{n} or 1 say") for n in numbers]
    return [
        preference(f"{split}{n}", f"{n}", chosen=answering(better), rejected=answering(worse)) | {"split": split}
        for n, (better, worse) in zip(numbers, said, strict=True)
    ]


@pytest.mark.parametrize("more", [{"head_only": True}, {"training": {"steps": 12, "batch_size": 8, "schedule": {"learning_rate": 3e-3}}}], ids=["head", "all"])
def test_the_model_says_how_its_reward_is_read(tmp_path: Path, tiny_model: Tiny, more: dict[str, Any]) -> None:
    store = Store.open(tmp_path / "store")
    base = tiny_model(store)
    data = table(store, "preferences", [*rows("train", range(40)), *rows("heldout", range(40, 60))])
    given = {"model": base, "preferences": [data]}
    made = {pooling: execute(reward_model, RewardModelConfig(pooling=pooling, **more), given, store) for pooling in ("mean", "last")}
    raw = {pooling: json.loads(one.path("config.json").read_text()) for pooling, one in made.items()}
    assert (raw["mean"]["model_type"], raw["mean"]["reward_pooling"]) == ("puna", "mean")
    assert raw["last"]["model_type"] == "llama" and "reward_pooling" not in raw["last"]
    assert made["mean"].manifest.metrics["heldout_accuracy"] == 1.0

    tokenizer = Tokenizer.load(base.path())
    bad, limit = BadRows(RewardModelConfig(), "test"), Limit(4096, "")
    examples = [one.example for one in render_ranked(tokenizer, read_preferences([data], None)[:6], limit, bad)]
    network = load(made["mean"].path())
    found = score_answers(network, examples, 256)
    for example, rewards in zip(examples, found, strict=True):
        for answer, reward in zip(example.answers, rewards, strict=True):
            by_token = rewards_by_hand(network, example.prompt, answer)
            assert reward == pytest.approx(sum(by_token) / len(by_token), rel=1e-3, abs=1e-5)

    for format in ("hf", "gguf", "adapter"):
        with pytest.raises(PunaError, match=f"its reward is a mean over the answer's tokens, which the format {format} cannot represent; train it with pooling=last"):
            export_model(made["mean"], tmp_path / format, format)
    export_model(made["last"], tmp_path / "hf")
    assert AutoModelForSequenceClassification.from_pretrained(tmp_path / "hf").config.num_labels == 1
    with pytest.raises(ValueError, match="whose start transformers does not know; train with pooling=last"):
        PunaForSequenceClassification.from_pretrained(made["mean"].path())
    with pytest.raises(PunaError, match=r"config\.json differs"):
        execute(average, AverageConfig(), {"models": [made["mean"], made["last"]]}, store)
    # After further training, the reward is read as set for that training.
    again = execute(reward_model, RewardModelConfig(head_only=True), {**given, "model": made["mean"]}, store)
    assert json.loads(again.path("config.json").read_text()) == raw["last"]


def test_trl_reads_the_last_token() -> None:
    with pytest.raises(ValueError, match="pooling must be last with engine trl"):
        RewardModelConfig(engine="trl", pooling="mean")
    with pytest.raises(ValueError, match="cannot hold a model with reward_pooling"):
        ModelConfig(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1, reward_pooling="mean", model_type="llama")
