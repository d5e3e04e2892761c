"""The README's five commands, as written there, run on small random models and generated pairs."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from puna.flows.cli.main import app
from puna.models.config import ModelConfig
from puna.models.formats.checkpoint import load, save
from puna.models.tokens.tokenizer import Tokenizer
from puna.models.transformer import Transformer
from puna.stages import executors
from puna.storage import Store
from tests.models.dialogues import families, made

README = Path(__file__).parents[2] / "README.md"
COLOURS = ["red", "green", "blue", "white", "black"]


def journey() -> list[list[str]]:
    """Return the words of the README's five commands."""
    section = README.read_text(encoding="utf-8").partition("## Your model and data")[2]
    block = section.partition("\n\n    ")[2].partition("\n\n")[0]
    return [shlex.split(line, comments=True) for line in block.splitlines()]


def random_model(name: str, folder: Path) -> Tokenizer:
    """Write a model with random weights in Hugging Face's layout, with the family's tokenizer and chat template."""
    if name not in families():
        pytest.skip("the template comes with TRL, which is not installed")
    own = {"model_type": "qwen2", "qkv_bias": True, "tie_word_embeddings": True} if name == "qwen2_5" else {"model_type": "llama"}
    tokenizer = made(name)
    config = ModelConfig(
        vocab_size=tokenizer.vocab_size, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, initializer_range=0.2, **own,
    )  # fmt: skip
    save(Transformer(config, seed=0), folder, tokenizer)
    return tokenizer


@pytest.mark.parametrize("name", ["qwen2_5", "llama3"])
def test_five_commands_from_a_chat_model_and_pairs_to_a_tuned_model(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    transformers = pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(executors, "cores", lambda: 1)
    own = random_model(name, tmp_path / "chat-model")
    pairs = [{"prompt": f"Say {c} {n} times.", "chosen": " ".join([c] * n), "rejected": c} for c in COLOURS for n in range(2, 8)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs), encoding="utf-8")
    commands = journey()
    assert [words[:2] for words in commands] == [["puna", "import"], ["puna", "import"], ["puna", "run"], ["puna", "run"], ["puna", "export"]]
    for _, *words in commands:
        done = CliRunner().invoke(app, ["chat-model" if word.endswith(".gguf") else word for word in words], catch_exceptions=False)
        assert done.exit_code == 0, done.output
    store = Store.open(".puna")
    judged = next(artifact for artifact in store.artifacts() if artifact.manifest.stage == "reward_model").manifest.metrics
    heldout = store.alias("pairs@latest").read()["split"].to_pylist().count("heldout")
    assert 0 < heldout == judged["heldout_pairs"] and 0 <= judged["heldout_accuracy"] <= 1
    model, words = (kind.from_pretrained("out") for kind in (transformers.AutoModelForCausalLM, transformers.AutoTokenizer))
    messages = [{"role": "user", "content": "Say red 3 times."}]
    asked = words.apply_chat_template(messages, add_generation_prompt=True, return_dict=True, return_tensors="pt")
    assert asked["input_ids"][0].tolist() == own.chat(messages)
    answer = model.generate(**asked, max_new_tokens=8, do_sample=False)
    assert answer.shape[1] > asked["input_ids"].shape[1]
    # The exported model is the one that dpo trained: the same prompt has other logits than before.
    before, tuned = (load(store.alias(f"{name}@latest").path()) for name in ("smollm2", "tuned"))
    assert store.alias("tuned@latest").manifest.stage == "dpo"
    assert all(torch.equal(model.state_dict()[key], tensor) for key, tensor in tuned.state_dict().items())
    assert any(not torch.equal(before.state_dict()[key], tensor) for key, tensor in tuned.state_dict().items())


def test_continue_trains_a_model_from_elsewhere_on_documents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The recipe `continue`, as its file says it is run: both models are measured on the documents held out, and the trained one is better."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(executors, "cores", lambda: 1)
    random_model("llama3", tmp_path / "chat-model")
    rows = [{"url": f"https://x.org/{n}", "text": "".join(f"Say {c} {n} times. " for c in COLOURS) * 4} for n in range(60)]
    (tmp_path / "pages.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    short = ["tokenize.sequence_length=64", "pretrain.phases.0.until=12000", "pretrain.phases.0.schedule.learning_rate=0.01", "split.heldout_fraction=0.2"]
    for words in (
        ["import", "model", "chat-model", "--as", "small"], ["import", "documents", "pages.jsonl", "--as", "pages"],
        ["run", "pretrain", "--recipe", "continue", "--input", "documents=pages@latest", "--input", "model=small@latest",
         *(word for change in short for word in ("--set", change))],
    ):  # fmt: skip
        done = CliRunner().invoke(app, words, catch_exceptions=False)
        assert done.exit_code == 0, done.output
    store = Store.open(".puna")
    given, trained = store.alias("small@latest"), store.alias("base@latest")
    assert json.loads(trained.path("config.json").read_text())["hidden_size"] == json.loads(given.path("config.json").read_text())["hidden_size"]
    measured = [one for one in store.artifacts() if one.manifest.stage == "evaluate"]
    of = {next(entry.key for entry in one.manifest.inputs if entry.name == "model"): one.manifest.metrics for one in measured}
    assert len(measured) == 2 and of[trained.key]["document_bits_per_byte"] < of[given.key]["document_bits_per_byte"] - 0.5
