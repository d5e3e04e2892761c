"""Every checkpoint layout compared with transformers' own model: logits, gradients, files and generation."""

import json
import re
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from puna.models.config import Mla, ModelConfig, Moe, RopeScaling
from puna.models.forest import Forest
from puna.models.formats.checkpoint import CheckpointError, load, save
from puna.models.formats.families import parse_config
from puna.models.transformer import Transformer

SHAPE = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "max_position_embeddings": 256,
    "initializer_range": 0.15,
    "rms_norm_eps": 1e-6,
}
LONG = RopeScaling(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32)
FAMILIES = {
    "llama": {},
    "llama_biased": {"qkv_bias": True, "o_bias": True},
    "llama_3.1": {"rope_theta": 500_000.0, "rope_scaling": LONG},
    "llama_linear": {"rope_scaling": RopeScaling(rope_type="linear", factor=4.0), "tie_word_embeddings": True},
    "llama_yarn": {"rope_theta": 50_000.0, "rope_scaling": RopeScaling(rope_type="yarn", factor=4.0, beta_fast=8.0, original_max_position_embeddings=64)},
    "mistral": {"model_type": "mistral", "sliding_window": 7},
    "qwen2": {"model_type": "qwen2", "qkv_bias": True},
    "qwen2_sliding": {"model_type": "qwen2", "qkv_bias": True, "sliding_window": 5, "sliding_layers": (1, 2)},
    "qwen3": {"model_type": "qwen3", "qk_norm": True, "tie_word_embeddings": True},
    "mixtral": {"model_type": "mixtral", "moe": Moe(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=80), "sliding_window": 9},
    "qwen3_moe": {"model_type": "qwen3_moe", "qk_norm": True, "moe": Moe(num_experts=5, num_experts_per_tok=2, moe_intermediate_size=24, norm_topk_prob=False)},
    "deepseek_v3": {"num_key_value_heads": 6, "head_dim": 0, "mla": Mla(kv_lora_rank=20, qk_nope_head_dim=8, qk_rope_head_dim=6, v_head_dim=10, q_lora_rank=16)},
    "deepseek_v3_full_q": {"num_key_value_heads": 6, "head_dim": 0, "mla": Mla(kv_lora_rank=20, qk_nope_head_dim=8, qk_rope_head_dim=6, v_head_dim=10)},
}


def build(name, head="lm", dtype=torch.float32, seed=0):
    config = ModelConfig(**{**SHAPE, **FAMILIES[name]})
    model = Transformer(config, head, seed=seed)
    generator = torch.Generator().manual_seed(seed + 1)
    for parameter in model.parameters():  # random biases and gains, so that they affect the result
        if parameter.ndim == 1:
            parameter.data += 0.3 * torch.randn(parameter.shape, generator=generator)
    return model.to(dtype)


def theirs(folder, dtype=torch.float32):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager", experts_implementation="eager")
    assert model.__class__.__module__.startswith("transformers.models.")
    return model


@pytest.mark.parametrize(("name", "part"), [("mixtral", "w1"), ("mixtral", "w2"), ("qwen3_moe", "up_proj")])
def test_an_expert_of_another_shape_is_named(tmp_path, name, part):
    save(build(name), tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    odd = next(key for key in state if f"experts.1.{part}" in key)
    save_file({**state, odd: state[odd][1:].clone()}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=rf"{re.escape(odd)} \[.*\] has another shape than those of the other experts"):
        load(tmp_path)


@pytest.fixture
def exact(monkeypatch):
    """Make transformers compute norms, angles and routing in the model's dtype, not in fp32."""
    import transformers.models.deepseek_v3.modeling_deepseek_v3
    import transformers.models.llama.modeling_llama
    import transformers.models.mistral.modeling_mistral
    import transformers.models.mixtral.modeling_mixtral
    import transformers.models.qwen2.modeling_qwen2
    import transformers.models.qwen3.modeling_qwen3
    import transformers.models.qwen3_moe.modeling_qwen3_moe  # noqa: F401

    def norm(self, x):
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon))

    def rotary(self, x, position_ids):
        frequencies = torch.tensor(parse_config(self.config.to_dict()).rotary_frequencies(), dtype=torch.float64)
        angles = position_ids[..., None] * frequencies
        angles = torch.cat([angles, angles], dim=-1)
        return (self.attention_scaling * angles.cos()).to(x.dtype), (self.attention_scaling * angles.sin()).to(x.dtype)

    def route(self, x):
        logits = torch.nn.functional.linear(x.reshape(-1, self.hidden_dim), self.weight)
        weights, chosen = logits.softmax(-1).topk(self.top_k, -1)
        if getattr(self, "norm_topk_prob", True):
            weights = weights / weights.sum(-1, keepdim=True)
        return logits, weights, chosen

    plain = torch.nn.functional.softmax
    monkeypatch.setattr(torch.nn.functional, "softmax", lambda x, dim=None, dtype=None: plain(x, dim=dim))
    for name, module in list(sys.modules.items()):
        if name.startswith("transformers.models.") and ".modeling_" in name:
            for kind in ("RMSNorm", "RotaryEmbedding", "TopKRouter"):
                for attribute in [a for a in vars(module) if a.endswith(kind)]:
                    function = {"RMSNorm": norm, "RotaryEmbedding": rotary, "TopKRouter": route}[kind]
                    monkeypatch.setattr(getattr(module, attribute), "forward", function)


def ids(*shape, seed=1):
    return torch.randint(0, 97, shape, generator=torch.Generator().manual_seed(seed))


def close(ours, expected, tolerance):
    return (ours - expected).abs().max() <= tolerance * expected.abs().max().clamp(min=1)


def compare(name, folder, dtype, tolerance):
    """Compare logits and all gradients of a model with those of transformers' model loaded from its files."""
    model, tokens = build(name, dtype=dtype), ids(3, 21)
    save(model, folder)
    twin = theirs(folder, dtype)
    logits = model.logits(model.hidden(Forest.pack(list(tokens))))
    expected = twin(input_ids=tokens, use_cache=False).logits.flatten(0, 1)
    assert close(logits, expected, tolerance)
    upstream = torch.randn(logits.shape, dtype=dtype, generator=torch.Generator().manual_seed(2)) / 63
    logits.backward(upstream)
    expected.backward(upstream)
    gradients = dict(twin.named_parameters())
    assert gradients.keys() == dict(model.named_parameters()).keys()
    for parameter_name, parameter in model.named_parameters():
        assert close(parameter.grad, gradients[parameter_name].grad, tolerance)


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_and_gradients_equal_transformers(tmp_path, name):
    compare(name, tmp_path, torch.float32, 2e-5)


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_and_gradients_equal_transformers_in_fp64(tmp_path, name, exact):
    compare(name, tmp_path, torch.float64, 1e-10)


@pytest.mark.parametrize("name", FAMILIES)
def test_files_go_round(tmp_path, name):
    """Files written by Puna, by transformers' model and by the hub model have one layout, and each is read by the others."""
    from puna.models.formats.hub import PunaForCausalLM

    model = build(name)
    save(model, tmp_path / "ours")
    theirs(tmp_path / "ours").save_pretrained(tmp_path / "theirs")
    hub = PunaForCausalLM.from_pretrained(tmp_path / "theirs")
    hub.save_pretrained(tmp_path / "hub")
    tables = {folder: load_file(tmp_path / folder / "model.safetensors") for folder in ("ours", "theirs", "hub")}
    for folder, table in tables.items():
        assert table.keys() == tables["ours"].keys(), folder
        assert all(torch.equal(table[key], tables["ours"][key]) for key in table), folder
        again = load(tmp_path / folder)
        assert again.config == model.config
        assert all(torch.equal(a, b) for a, b in zip(again.parameters(), model.parameters(), strict=True))
    raw = [json.loads((tmp_path / folder / "config.json").read_text()) for folder in tables]
    assert raw[0]["model_type"] == raw[1]["model_type"] == raw[2]["model_type"] == model.config.model_type
    assert raw[0]["architectures"] == raw[1]["architectures"] == raw[2]["architectures"]


@pytest.mark.parametrize("name", FAMILIES)
def test_hub_model_generates_as_transformers_does(tmp_path, name):
    from puna.models.formats.hub import PunaForCausalLM

    save(build(name), tmp_path)
    tokens, mask = ids(3, 12), torch.ones(3, 12, dtype=torch.long)
    mask[0, :5] = 0
    options = {"attention_mask": mask, "max_new_tokens": 14, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    ours, expected = (m.generate(tokens, **options) for m in (PunaForCausalLM.from_pretrained(tmp_path), theirs(tmp_path)))
    assert torch.equal(ours, expected)


@pytest.mark.parametrize("name", FAMILIES)
def test_engine_draws_what_the_whole_forest_would(name):
    """Greedy answers token by token from the cache, and their log-probs, compared with full forward passes."""
    from puna.models.generation import Engine, SamplingParams

    model = build(name, dtype=torch.float64)
    prompts = [ids(n, seed=n).tolist() for n in (3, 17, 9)]
    params = SamplingParams(n=2, temperature=0.0, max_tokens=12, stop=())
    for prompt, answers in zip(prompts, Engine(model, sequences=4).generate(prompts, params), strict=True):
        for answer in answers:
            row = torch.tensor(prompt + answer.tokens)
            logits = model.logits(model.hidden(Forest.pack([row])))[len(prompt) - 1 : -1]
            assert logits.argmax(-1).tolist() == answer.tokens
            expected = logits.log_softmax(-1).gather(1, row[len(prompt) :, None])[:, 0]
            assert close(torch.tensor(answer.logprobs, dtype=torch.float64), expected, 1e-9)


@pytest.mark.parametrize("name", FAMILIES)
def test_packed_equals_separate_and_a_forest_of_12_answers_equals_12_rows(name):
    model = build(name, dtype=torch.float64)
    documents = [ids(length, seed=length) for length in (70, 1, 33, 5)]
    packed = model.hidden(Forest.pack(documents))
    assert close(packed, torch.cat([model.hidden(Forest.pack([d])) for d in documents]), 1e-10)
    prompt, answers = ids(20), [ids(3 + i, seed=50 + i) for i in range(12)]
    hidden = model.hidden(Forest.branch(prompt, answers))
    start = len(prompt)
    for answer in answers:
        row = model.hidden(Forest.pack([torch.cat([prompt, answer])]))
        assert close(hidden[start : start + len(answer)], row[len(prompt) :], 1e-10)
        start += len(answer)


def test_parallel_block_is_its_formula_and_goes_round(tmp_path):
    from puna.models.formats.hub import PunaForCausalLM

    config = ModelConfig(**SHAPE, parallel_block=True)
    model = Transformer(config, seed=0).double()
    assert config.model_type == "puna"
    seen = {}
    block = model.model.layers[1]
    handles = [
        module.register_forward_hook(lambda _, args, out, name=name: seen.update({name: (args[0], out)}))
        for name, module in (("block", block), ("attention", block.self_attn), ("mlp", block.mlp))
    ]
    tokens = ids(9)
    logits = model.logits(model.hidden(Forest.pack([tokens])))
    for handle in handles:
        handle.remove()
    x, out = seen["block"]
    normed = x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * block.input_layernorm.weight
    assert close(seen["attention"][0], normed, 1e-12)
    assert close(seen["mlp"][0], normed, 1e-12)
    assert close(out[0], x + seen["attention"][1] + seen["mlp"][1], 1e-12)
    save(model.float(), tmp_path)
    assert load(tmp_path).config == config
    hub = PunaForCausalLM.from_pretrained(tmp_path)
    hub.save_pretrained(tmp_path / "hub")
    assert load(tmp_path / "hub").config == config
    assert close(hub(input_ids=tokens[None]).logits[0].double(), logits, 1e-5)


@pytest.mark.parametrize("family", ["Llama", "Mistral", "Qwen2", "Qwen3", "Mixtral", "Qwen3Moe"])
def test_transformers_defaults_are_understood(family):
    """A family's configuration with its class's defaults has the same shape after writing and reading."""
    import transformers

    config = getattr(transformers, f"{family}Config")()
    shape = parse_config(config.to_dict())
    assert shape.num_hidden_layers == config.num_hidden_layers
    assert shape.model_type == config.model_type
    from puna.models.formats.hub import PunaConfig, shape_of

    assert shape_of(PunaConfig.from_shape(shape)) == shape


def test_balance_loss_is_its_formula():
    model = build("mixtral", dtype=torch.float64)
    inputs = {}
    for number, layer in enumerate(model.model.layers):
        layer.mlp.register_forward_hook(lambda _, args, out, n=number: inputs.update({n: args[0].detach()}))
    model.hidden(Forest.pack([ids(40), ids(30, seed=3)]))
    expected = 0.0
    for number, layer in enumerate(model.model.layers):
        p = (inputs[number] @ layer.mlp.gate.weight.T).softmax(-1)
        chosen = torch.zeros_like(p).scatter(1, p.topk(2, -1).indices, 1.0)
        expected += 4 * (chosen.mean(0) * p.mean(0)).sum() / 3
    loss = model.take_balance_loss()
    assert close(loss, 0.001 * expected, 1e-12)
    loss.backward()
    assert all(layer.mlp.gate.weight.grad.abs().sum() > 0 for layer in model.model.layers)
    with torch.no_grad():
        model.hidden(Forest.pack([ids(4)]))
    assert model.take_balance_loss() is None
    assert build("llama").take_balance_loss() is None


def test_layouts_that_cannot_hold_a_model_are_refused():
    with pytest.raises(ValueError, match="'llama' cannot hold a model with qk_norm"):
        ModelConfig(**SHAPE, qk_norm=True, model_type="llama")
    with pytest.raises(ValueError, match="'qwen2' cannot hold a model with no variation"):
        ModelConfig(**SHAPE, model_type="qwen2")
    assert ModelConfig(**SHAPE, sliding_window=4).model_type == "mistral"
    assert ModelConfig(**SHAPE, moe=Moe(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=80)).model_type == "mixtral"
    assert ModelConfig(**SHAPE, moe=Moe(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24)).model_type == "puna"
    with pytest.raises(ValueError, match="num_experts_per_tok 5 exceeds num_experts 4"):
        Moe(num_experts=4, num_experts_per_tok=5, moe_intermediate_size=80)
    with pytest.raises(ValueError, match=r"sliding_layers \[3\] must be layers of 0..2"):
        ModelConfig(**SHAPE, sliding_window=4, sliding_layers=(3,))


def write_gguf(model, path, extra=()):
    """Write the model as llama.cpp's converter does: projections in Q8_0, query and key rows interleaved."""
    import gguf

    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    short = {"embed_tokens": "token_embd", "lm_head": "output", "norm": "output_norm"}
    short |= {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}
    short |= {f"{x}_proj": f"attn_{x}" for x in "qkv"} | {"o_proj": "attn_output"}
    short |= {f"{x}_proj": f"ffn_{x}" for x in ("gate", "up", "down")}
    for name, tensor in model.state_dict().items():
        parts = name.split(".")
        prefix = f"blk.{parts[2]}." if parts[1] == "layers" else ""
        value = tensor.numpy()
        if parts[-2] in ("q_proj", "k_proj"):
            value = value.reshape(-1, 2, config.head_dim // 2, value.shape[1]).swapaxes(1, 2).reshape(value.shape)
        kind = gguf.GGMLQuantizationType.Q8_0 if prefix and value.ndim == 2 else gguf.GGMLQuantizationType.F32
        packed = gguf.quantize(value, kind) if kind == gguf.GGMLQuantizationType.Q8_0 else value
        writer.add_tensor(f"{prefix}{short[parts[-2]]}.weight", packed, raw_dtype=kind)
    for name, tensor in extra:
        writer.add_tensor(name, tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_gguf_files_load_and_save_as_safetensors(tmp_path):
    pytest.importorskip("gguf")
    from transformers import AutoModelForCausalLM

    from puna.models.formats.hub import PunaForCausalLM

    config = ModelConfig(vocab_size=64, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16, rope_theta=500_000.0, initializer_range=0.1)
    model = Transformer(config, seed=0)
    write_gguf(model, tmp_path / "tiny.gguf")
    hub = PunaForCausalLM.from_transformer(load(tmp_path / "tiny.gguf"))
    twin = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="tiny.gguf", dtype=torch.float32)
    tokens = torch.randint(0, 64, (2, 15), generator=torch.Generator().manual_seed(1))
    assert close(hub(input_ids=tokens).logits, twin(input_ids=tokens).logits, 2e-5)
    for name, tensor in model.state_dict().items():
        # Q8_0 keeps each block of 32 within half a step of its largest value / 127.
        error = (hub.state_dict()[name] - tensor).abs().max()
        assert error <= (0 if tensor.ndim == 1 or "layers" not in name else 0.51 * tensor.abs().max() / 127)
    hub.save_pretrained(tmp_path / "plain")
    again = load(tmp_path / "plain")
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), hub.parameters(), strict=True))
