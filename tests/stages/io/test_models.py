"""Import and export of models: imported models run through the stages, and exported models answer in transformers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from puna.flows.cli.main import app
from puna.models.config import ModelConfig
from puna.models.forest import Forest
from puna.models.formats.awq_search import pack_layers, stretches
from puna.models.formats.checkpoint import load, load_with_tokenizer, save
from puna.models.formats.gguf.files import write
from puna.models.generation import Engine, SamplingParams
from puna.models.tokens.tokenizer import LLAMA3, Tokenizer
from puna.models.transformer import Transformer
from puna.stages.align.dpo import DpoConfig, dpo
from puna.stages.align.reward_model import RewardModelConfig, reward_model
from puna.stages.contract import External, SeededConfig, StageRun, execute, stage
from puna.stages.conversations import answering, asking
from puna.stages.io.export import export_model
from puna.stages.io.import_model import ImportModelConfig, import_model
from puna.storage import Artifact, PunaError, Store
from tests.models.dialogues import families, made

FAMILIES = {"qwen2_5": {"model_type": "qwen2", "qkv_bias": True, "tie_word_embeddings": True}, "llama3": {"model_type": "llama"}}


def checkpoint(name: str, folder: Path, **changes: object) -> Tokenizer:
    """Write a random model in Hugging Face's layout; return its tokenizer."""
    if name not in families():
        pytest.skip("the template comes with TRL, which is not installed")
    tokenizer = made(name)
    config = ModelConfig(
        vocab_size=tokenizer.vocab_size + 3, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, initializer_range=0.2, **{**FAMILIES[name], **changes},
    )  # fmt: skip
    save(Transformer(config, seed=0), folder, tokenizer)
    return tokenizer


def imported(path: Path, store: Store, **config: str) -> Artifact:
    (external,) = External.resolve(f"model={path}")
    return execute(import_model, ImportModelConfig(**config), {"model": external}, store)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.open(tmp_path / "store")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_checkpoint_of_transformers_comes_in_and_goes_out(name: str, dtype: torch.dtype, tmp_path: Path, store: Store):
    transformers = pytest.importorskip("transformers")
    checkpoint(name, tmp_path / "own")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "own", dtype=dtype)
    theirs.save_pretrained(tmp_path / "theirs", max_shard_size="20KB")
    assert (tmp_path / "theirs" / "model.safetensors.index.json").is_file()
    twin = transformers.AutoTokenizer.from_pretrained(tmp_path / "own")
    twin.save_pretrained(tmp_path / "theirs")
    artifact = imported(tmp_path / "theirs", store)
    metrics = artifact.manifest.metrics
    assert metrics["family"] == FAMILIES[name]["model_type"] and metrics["format"] == "safetensors"
    assert metrics["dtype"] == str(dtype).removeprefix("torch.")
    assert metrics["embedding_rows"] == metrics["tokens"] + 3
    assert made(name).token(made(name).stop_ids[-1]) in metrics["stop_tokens"]
    files = export_model(artifact, tmp_path / "out")
    assert {file.name for file in files} >= {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=dtype)
    for key, tensor in theirs.state_dict().items():
        assert torch.equal(again.state_dict()[key], tensor)
    messages = [{"role": "user", "content": "What is 3 + 4?"}]
    back = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    asked = back.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert asked == twin.apply_chat_template(messages, add_generation_prompt=True, return_dict=False) == made(name).chat(messages)


def test_four_bits_go_out_by_a_text_and_come_in(tmp_path: Path, store: Store):
    """By the command line; impossible conversions are refused without leaving a file."""
    tokenizer = made("qwen2_5")
    config = ModelConfig(vocab_size=tokenizer.vocab_size, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, initializer_range=0.2)
    save(Transformer(config, seed=0), tmp_path / "own", tokenizer)
    model, text = imported(tmp_path / "own", store), tmp_path / "text.txt"
    command = ["export", model.id, str(tmp_path / "out"), "--store", str(store.root)]
    text.write_text("What is the capital of Peru? " * 20)
    for more, told in ((["--format", "awq"], "give a text file"), (["--text", str(text)], "--text is for --format awq only"), (["--format", "awq", "--text", str(text)], "too short")):
        with pytest.raises(PunaError, match=told):
            CliRunner().invoke(app, [*command, *more], catch_exceptions=False)
        assert not (tmp_path / "out").exists()
    text.write_bytes(b"\xff\xfe" * 40)
    with pytest.raises(PunaError, match=r"text\.txt cannot be read as text"):
        CliRunner().invoke(app, [*command, "--format", "awq", "--text", str(text)], catch_exceptions=False)
    text.write_text("What is the capital of Peru? " * 400)
    assert CliRunner().invoke(app, [*command, "--format", "awq", "--text", str(text)], catch_exceptions=False).exit_code == 0
    imported(tmp_path / "out", store)
    again, (expected, words) = load(tmp_path / "out"), load_with_tokenizer(model.path())
    for name, one in pack_layers(expected, stretches(words.encode(text.read_text()))).items():
        assert torch.equal(again.get_parameter(f"{name}weight"), one.weight())


def test_gguf_comes_in_and_goes_out(tmp_path: Path, store: Store):
    tokenizer = checkpoint("qwen2_5", tmp_path / "own")
    model = load(tmp_path / "own")
    (tmp_path / "file").mkdir()
    write(tmp_path / "file" / "small.gguf", model.config, model.state_dict(), tokenizer)
    for place in (tmp_path / "file", tmp_path / "file" / "small.gguf"):
        artifact = imported(place, store)
        assert artifact.manifest.metrics["format"] == "gguf"
    (file,) = export_model(artifact, tmp_path / "out", "gguf")
    assert file.name == "out.gguf"
    again, words = load_with_tokenizer(file)
    assert all(torch.equal(again.state_dict()[key], tensor) for key, tensor in model.state_dict().items())
    assert words.chat([{"role": "user", "content": "a"}]) == tokenizer.chat([{"role": "user", "content": "a"}])


def test_a_template_is_given_where_the_checkpoint_has_none(tmp_path: Path, store: Store):
    own = checkpoint("llama3", tmp_path / "own")
    raw = json.loads((tmp_path / "own" / "tokenizer_config.json").read_text())
    del raw["chat_template"]
    (tmp_path / "own" / "tokenizer_config.json").write_text(json.dumps(raw))
    assert imported(tmp_path / "own", store).manifest.metrics["chat_template"] == "none"
    (tmp_path / "mine.jinja").write_text(LLAMA3)
    made_ = [imported(tmp_path / "own", store, chat_template=given) for given in ("llama3", LLAMA3, str(tmp_path / "mine.jinja"))]
    assert len({artifact.key for artifact in made_}) == 1
    messages = [{"role": "user", "content": "a"}]
    assert Tokenizer.load(made_[0].path()).chat(messages) == own.chat(messages)
    with pytest.raises(PunaError, match=r"the chat template does not fit the tokenizer: turn 1"):
        imported(tmp_path / "own", store, chat_template="chatml")
    with pytest.raises(ValueError, match="neither a chat template's name"):
        ImportModelConfig(chat_template="llama9")


def test_what_does_not_fit_is_refused(tmp_path: Path, store: Store):
    checkpoint("llama3", tmp_path / "own")
    raw = json.loads((tmp_path / "own" / "config.json").read_text())

    def changed(name: str, **fields: object) -> Path:
        shutil.copytree(tmp_path / "own", tmp_path / name)
        (tmp_path / name / "config.json").write_text(json.dumps({**raw, **fields}))
        return tmp_path / name

    with pytest.raises(PunaError, match="model_type = 'bert' is not supported"):
        imported(changed("family", model_type="bert"), store)
    with pytest.raises(PunaError, match="has shape"):
        imported(changed("shape", intermediate_size=64), store)
    without = changed("without")
    (without / "tokenizer.json").unlink()
    with pytest.raises(PunaError, match=r"tokenizer\.json does not exist"):
        imported(without, store)
    other = changed("other")
    large = Tokenizer.train(["".join(chr(0x4E00 + (i * j) % 900) for j in range(40)) for i in range(400)], 1500)
    large.save(other)
    with pytest.raises(PunaError, match=r"the tokenizer has \d+ tokens, the embeddings \d+ rows"):
        imported(other, store)
    with pytest.raises(PunaError, match="give the model's folder"):
        imported(tmp_path / "own" / "model.safetensors", store)
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("a")
    (tmp_path / "texts" / "b.txt").write_text("b")
    with pytest.raises(PunaError, match=r"no config\.json of a Hugging Face model, and no GGUF file"):
        imported(tmp_path / "texts", store)


def test_nothing_half_written_is_left(tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch):
    checkpoint("llama3", tmp_path / "own")
    artifact = imported(tmp_path / "own", store)
    monkeypatch.setattr("shutil.copyfile", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(PunaError, match="disk full"):
        export_model(artifact, tmp_path / "out")
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob(".out*"))
    monkeypatch.undo()
    export_model(artifact, tmp_path / "out")
    with pytest.raises(PunaError, match="already exists and is not empty"):
        export_model(artifact, tmp_path / "out")


def test_a_damaged_model_is_not_exported(tmp_path: Path, store: Store):
    checkpoint("llama3", tmp_path / "own")
    artifact = imported(tmp_path / "own", store)
    weights = artifact.path("model.safetensors")
    weights.chmod(0o644)
    weights.write_bytes(weights.read_bytes()[:-1] + b"\0")
    with pytest.raises(PunaError, match=r"is damaged: model\.safetensors"):
        export_model(artifact, tmp_path / "out")
    assert not (tmp_path / "out").exists()


# --- the journey ---------------------------------------------------------------------------------------------

PAIRS = [("What is 3 + 4?", "It is 7.", "I don't know"), ("Where is Lima?", "In Peru.", "On the moon"), ("Say hello", "Hello!", "No")]


class PairsConfig(SeededConfig):
    """A configuration without fields of its own."""


@stage(kind="preferences", version="1")
def pairs(config: PairsConfig, run: StageRun) -> None:
    """Write three questions, each with a better and a worse answer, in both splits."""
    rows = []
    for number, (asked, better, worse) in enumerate(PAIRS * 2):
        rows.append(
            {
                "id": f"{number}", "prompt_id": f"{number}", "task": "say", "split": "heldout" if number >= 4 else "train",
                "messages": asking(asked), "chosen": answering(better), "rejected": answering(worse), "level": "better",
            }
        )  # fmt: skip
    run.write_rows(rows)


def journey(model: Artifact, tmp_path: Path, store: Store) -> None:
    """Run reward model, DPO with adapters, and export; transformers then answers as the exported policy does in Puna."""
    transformers = pytest.importorskip("transformers")
    preferred = execute(pairs, PairsConfig(), {}, store)
    training = {"batch_size": 2, "epochs": 1.0}
    rewards = execute(reward_model, RewardModelConfig(training=training), {"model": model, "preferences": [preferred]}, store)
    assert rewards.manifest.metrics["heldout_pairs"] == 2
    adapted = DpoConfig(method="lora", lora={"rank": 2}, training=training)
    policy = execute(dpo, adapted, {"model": model, "preferences": [preferred]}, store)
    assert policy.manifest.metrics["final_margin"] != 0
    export_model(policy, tmp_path / "out")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    words = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    own, tokenizer = load_with_tokenizer(policy.path())
    messages = [{"role": "user", "content": "What is the capital of Peru?"}]
    asked = words.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert asked == tokenizer.chat(messages)
    said = theirs.generate(torch.tensor([asked]), attention_mask=torch.ones(1, len(asked)), max_new_tokens=8, do_sample=False)[0]
    ((completion,),) = Engine(own, tokenizer).generate([asked], SamplingParams(temperature=0, max_tokens=8))
    assert said[len(asked) :].tolist() == list(completion.tokens)
    assert theirs.generation_config.eos_token_id == list(tokenizer.stop_ids)
    with torch.no_grad():
        logits = theirs(torch.tensor([asked])).logits[0]
        ours = own.logits(own.hidden(Forest.pack([torch.tensor(asked)])))
    assert torch.allclose(ours, logits, atol=2e-3, rtol=1e-4)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_journey_of_a_small_model(name: str, tmp_path: Path, store: Store):
    checkpoint(name, tmp_path / "own")
    journey(imported(tmp_path / "own", store), tmp_path, store)
