"""Model folders that transformers reads and writes, and invalid folders, which are refused with an error that names them."""

import json
import weakref
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from puna.models.config import ModelConfig
from puna.models.forest import Forest
from puna.models.formats.checkpoint import WRITTEN, CheckpointError, load, read_config, save, write_tensors
from puna.models.memory.offload import Source, offload_layers
from puna.models.tokens.tokenizer import Tokenizer
from puna.models.transformer import Transformer

CONFIG = ModelConfig(vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=6, rope_theta=500_000.0, rms_norm_eps=1e-6)
TOKENS = torch.tensor([3, 1, 4, 1, 5, 9, 2, 6])


def build(head="lm", **changes):
    config = ModelConfig(**{**CONFIG.model_dump(), **changes})
    return Transformer(config, head, seed=0)


def logits(model):
    with torch.no_grad():
        return model.logits(model.hidden(Forest.pack([TOKENS])))


def edit(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize("tied", [False, True])
def test_round_trip(tmp_path, tied):
    model = build(tie_word_embeddings=tied)
    save(model, tmp_path)
    again = load(tmp_path)
    assert again.config == model.config
    assert again.head == "lm"
    assert all(torch.equal(tensor, again.state_dict()[name]) for name, tensor in model.state_dict().items())
    assert (again.lm_head.weight is again.model.embed_tokens.weight) == tied
    assert ("lm_head.weight" in load_file(tmp_path / "model.safetensors")) == (not tied)


def test_same_model_same_bytes(tmp_path):
    for name in ("a", "b"):
        save(build(), tmp_path / name)
    for file in ("config.json", "model.safetensors"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()


@pytest.mark.parametrize("tied", [False, True])
def test_transformers_reads_what_we_write(tmp_path, tied):
    from transformers import AutoModelForCausalLM, LlamaForCausalLM

    model = build(tie_word_embeddings=tied)
    save(model, tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(theirs) is LlamaForCausalLM
    expected = theirs(input_ids=TOKENS[None]).logits[0]
    assert (logits(model) - expected).abs().max() <= 2e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_we_read_what_transformers_writes_sharded(tmp_path, dtype):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    raw = CONFIG.model_dump()
    rope = {"rope_type": "default", "rope_theta": raw.pop("rope_theta")}
    theirs = LlamaForCausalLM(LlamaConfig(**raw, rope_parameters=rope)).to(dtype)
    theirs.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    ours = load(tmp_path)
    assert ours.config == CONFIG
    assert ours.lm_head.weight.dtype == torch.float32
    expected = theirs.float()(input_ids=TOKENS[None]).logits[0]
    assert (logits(ours) - expected).abs().max() <= 2e-5


def test_tables_that_follow_from_the_configuration_are_passed_over(tmp_path):
    """Old checkpoints, such as Llama 2's, hold each layer's rotary frequencies; transformers passes over them, too."""
    model = build()
    save(model, tmp_path)
    file = tmp_path / "model.safetensors"
    save_file({**load_file(file), **{f"model.layers.{i}.self_attn.rotary_emb.inv_freq": torch.ones(3) for i in range(2)}}, file, {"format": "pt"})
    again = load(tmp_path)
    streamed, _ = offload_layers(Source(tmp_path, torch.float32), "disk", 2, torch.device("cpu"))
    assert torch.equal(logits(again), logits(model))
    with torch.inference_mode():
        torch.testing.assert_close(logits(streamed), logits(model))


def test_reads_the_older_place_of_the_rotary_base(tmp_path):
    save(build(), tmp_path)
    edit(tmp_path, rope_parameters=None, rope_theta=1234.0, head_dim=None, num_attention_heads=4)
    config = read_config(tmp_path)
    assert config.rope_theta == 1234.0
    assert config.head_dim == 8


@pytest.mark.parametrize("head", [None, "scalar"])
def test_tensors_go_to_their_device_one_by_one(tmp_path, monkeypatch, head):
    """The device is torch's `meta`, in place of a GPU: no tensor of the model stays on the host."""
    save(build(), tmp_path)
    onto, held = torch.Tensor.to, []

    def to(tensor, *where):
        assert all(one() is None for one in held), "another tensor of the file is still on the host"
        held.append(weakref.ref(tensor))
        return onto(tensor, *where)

    monkeypatch.setattr(torch.Tensor, "to", to)
    model = load(tmp_path, head, torch.bfloat16, "meta")
    assert len(held) >= len(list(model.parameters())) - 1
    assert {(p.device.type, p.dtype) for p in model.parameters()} == {("meta", torch.bfloat16)}


def test_scalar_head(tmp_path):
    save(build(), tmp_path / "lm")
    model = load(tmp_path / "lm", "scalar")
    assert not model.score.weight.any()
    with torch.no_grad():
        model.score.weight.normal_(generator=torch.Generator().manual_seed(1))
    assert torch.equal(model.model.norm.weight, load(tmp_path / "lm").model.norm.weight)
    save(model, tmp_path / "scalar")
    again = load(tmp_path / "scalar")
    assert again.head == "scalar"
    assert torch.equal(again.score.weight, model.score.weight)
    with pytest.raises(CheckpointError, match="has no language-model head"):
        load(tmp_path / "scalar", "lm")

    from transformers import AutoModelForSequenceClassification

    theirs = AutoModelForSequenceClassification.from_pretrained(tmp_path / "scalar")
    expected = theirs(input_ids=TOKENS[None]).logits[0, 0]
    assert (model.scalar(model.hidden(Forest.pack([TOKENS])))[-1] - expected).abs() <= 2e-5


def test_the_tokenizer_travels_along(tmp_path):
    tokenizer = Tokenizer.train(["to be or not to be"], 270)
    save(build(vocab_size=tokenizer.vocab_size), tmp_path, tokenizer)
    assert Tokenizer.load(tmp_path).encode("to be") == tokenizer.encode("to be")
    raw = json.loads((tmp_path / "config.json").read_text())
    assert (raw["bos_token_id"], raw["pad_token_id"]) == (tokenizer.bos, tokenizer.pad)
    stops = json.loads((tmp_path / "generation_config.json").read_text())["eos_token_id"]
    assert stops == list(tokenizer.stop_ids)

    from transformers import AutoTokenizer

    assert AutoTokenizer.from_pretrained(tmp_path).encode(
        "to be", add_special_tokens=False
    ) == tokenizer.encode("to be")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gpt2"}, "model_type = 'gpt2' is not supported"),
        ({"attention_bias": True}, r"self_attn.q_proj.bias is missing"),
        ({"mlp_bias": True}, "mlp_bias = True is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu' is not supported"),
        (
            {"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4}},
            "type 'llama3' lacks factor, low_freq_factor",
        ),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4}}, "rope_type = 'dynamic' is not supported"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.0}}, "rope_parameters.attention_factor is not supported"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "rope_parameters and rope_scaling disagree"),
        ({"vocab_size": None}, "missing vocab_size"),
        ({"num_key_value_heads": 3}, "must be a multiple of num_key_value_heads"),
        (
            {"intermediate_size": 50},
            r"gate_proj.weight has shape \[48, 32\], config.json asks for \[50, 32\]",
        ),
        ({"num_hidden_layers": 3}, r"model.layers.2\S+ is missing.* more"),
        ({"num_hidden_layers": 1}, r"model.layers.1\S+ is unknown"),
    ],
)
def test_what_cannot_be_represented_is_named(tmp_path, changes, message):
    save(build(), tmp_path)
    edit(tmp_path, **changes)
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path)


def test_damaged_folders_are_named(tmp_path):
    with pytest.raises(CheckpointError, match=r"config.json does not exist"):
        load(tmp_path)
    save(build(), tmp_path)
    weights = tmp_path / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-100])
    with pytest.raises(CheckpointError, match=r"model.safetensors is damaged"):
        load(tmp_path)
    weights.unlink()
    (tmp_path / "pytest_model.bin").write_bytes(b"pickle")
    with pytest.raises(CheckpointError, match="weights are read from safetensors only"):
        load(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config.json is not JSON"):
        load(tmp_path)


def test_a_missing_head_is_named(tmp_path):
    save(build(), tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    del state["lm_head.weight"]
    save_file(state, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="has no language-model head"):
        load(tmp_path)


@pytest.mark.parametrize("metadata", [None, {"format": "pt"}])
def test_tensors_written_one_by_one_are_the_file_of_the_library(metadata: dict[str, str] | None, tmp_path: Path) -> None:
    tensors = {f'{number} "{dtype}" é': torch.arange(15).view(3, 5)[:, : number % 4].to(dtype) for number, dtype in enumerate(2 * list(WRITTEN))}
    tensors |= {"scalar": torch.tensor(1.5), "turned": torch.randn(4, 3).T}
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, tmp_path / "library", metadata=metadata)
    empty = {name: tensor.to("meta") for name, tensor in tensors.items()}
    write_tensors(tmp_path / "own", empty, reversed(tensors.items()), metadata)
    assert (tmp_path / "own").read_bytes() == (tmp_path / "library").read_bytes()
    with pytest.raises(ValueError, match="the tensor scalar is missing"):
        write_tensors(tmp_path / "own", empty, [one for one in tensors.items() if one[0] != "scalar"], metadata)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["library", "own"]
    assert (tmp_path / "own").read_bytes() == (tmp_path / "library").read_bytes()
