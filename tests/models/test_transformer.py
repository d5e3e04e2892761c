"""The decoder compared with transformers' Llama on the same weights, and the forest compared with separate rows."""

import math

import numpy as np
import pytest
import torch

from puna.models.config import ModelConfig, Moe
from puna.models.forest import Forest
from puna.models.parameters import normal_rows
from puna.models.transformer import Transformer, initial_values

CONFIG = ModelConfig(
    vocab_size=97,
    hidden_size=48,
    intermediate_size=80,
    num_hidden_layers=3,
    num_attention_heads=6,
    num_key_value_heads=2,
    head_dim=12,
    rope_theta=500_000.0,
    initializer_range=0.15,
)


def build(head="lm", seed=0, **changes):
    config = CONFIG.replace(**changes)
    return Transformer(config, head, seed=seed)


def llama(model):
    """Return transformers' model with the same weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    raw = model.config.model_dump()
    rope = {"rope_type": "default", "rope_theta": raw.pop("rope_theta")}
    twin = LlamaForCausalLM(LlamaConfig(**raw, rope_parameters=rope, attn_implementation="sdpa"))
    twin.load_state_dict(model.state_dict())
    return twin.to(model.model.embed_tokens.weight.dtype)


@pytest.fixture
def exact_llama(monkeypatch):
    """Make transformers compute norms and rotary angles in the model's dtype, not in fp32."""
    from transformers.models.llama import modeling_llama

    def norm(self, x):
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon))

    def rotary(self, x, position_ids):
        K, base = self.config.head_dim, self.config.rope_parameters["rope_theta"]
        angles = position_ids[..., None] / base ** (torch.arange(0, K, 2, dtype=torch.float64) / K)
        angles = torch.cat([angles, angles], dim=-1)
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)

    monkeypatch.setattr(modeling_llama.LlamaRMSNorm, "forward", norm)
    monkeypatch.setattr(modeling_llama.LlamaRotaryEmbedding, "forward", rotary)


def ids(*shape, seed=1):
    return torch.randint(0, CONFIG.vocab_size, shape, generator=torch.Generator().manual_seed(seed))


def next_tokens(forest):
    children = (forest.parents >= 0).nonzero()[:, 0]
    return forest.parents[children], forest.tokens[children]


def close(ours, expected, tolerance):
    return (ours - expected).abs().max() <= tolerance * expected.abs().max().clamp(min=1)


def compare_with_llama(model, tolerance):
    twin, tokens = llama(model), ids(4, 19)
    logits = model.logits(model.hidden(Forest.pack(list(tokens))))
    expected = twin(input_ids=tokens, use_cache=False).logits.flatten(0, 1)
    assert close(logits, expected, tolerance)
    upstream = torch.randn(logits.shape, dtype=logits.dtype, generator=torch.Generator().manual_seed(2)) / 76
    logits.backward(upstream)
    expected.backward(upstream)
    theirs = dict(twin.named_parameters())
    assert theirs.keys() == dict(model.named_parameters()).keys()
    for name, parameter in model.named_parameters():
        assert close(parameter.grad, theirs[name].grad, tolerance)


SHAPES = [{}, {"tie_word_embeddings": True}, {"num_key_value_heads": 6}, {"num_key_value_heads": 1}]


@pytest.mark.parametrize("changes", SHAPES)
def test_logits_and_gradients_equal_llama(changes):
    compare_with_llama(build(**changes), 2e-5)


@pytest.mark.parametrize("changes", SHAPES)
def test_logits_and_gradients_equal_llama_in_fp64(changes, exact_llama):
    compare_with_llama(build(**changes).double(), 1e-10)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-5), (torch.float64, 1e-10)])
def test_packed_equals_separate(dtype, tolerance):
    model = build().to(dtype)
    documents = [ids(length, seed=length) for length in (70, 1, 33, 5, 64)]
    packed = model.hidden(Forest.pack(documents))
    assert close(packed, torch.cat([model.hidden(Forest.pack([document])) for document in documents]), tolerance)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-5), (torch.float64, 1e-10)])
def test_twelve_answers_equal_twelve_rows(dtype, tolerance):
    """Log-probs and the gradient of their weighted sum, with the prompt once and with the prompt twelve times."""
    model = build().to(dtype)
    prompt, answers = ids(50), [ids(5 + 7 * i, seed=i) for i in range(12)]
    branched = Forest.branch(prompt, answers)
    rows = Forest.pack([torch.cat([prompt, answer]) for answer in answers])
    assert len(branched) == len(rows) - 11 * 50
    sizes = torch.tensor([len(answer) for answer in answers])
    inner = torch.cat([torch.arange(size) for size in sizes])
    first = (50 + sizes.cumsum(0) - sizes).repeat_interleave(sizes)
    children = first + inner
    starts = ((50 + sizes).cumsum(0) - sizes).repeat_interleave(sizes)
    targets = torch.cat(answers)
    weights = torch.rand(len(targets), dtype=dtype, generator=torch.Generator().manual_seed(3))
    results = []
    for forest, where in ((branched, branched.parents[children]), (rows, starts + inner - 1)):
        logprobs, entropy = model.token_logprobs(forest, where, targets)
        gradients = torch.autograd.grad(
            (weights * (logprobs + 0.1 * entropy)).sum(), list(model.parameters())
        )
        results.append([logprobs, entropy, *gradients])
    for ours, expected in zip(*results, strict=True):
        assert close(ours, expected, 5 * tolerance)


def test_nested_branches_see_their_path():
    """A prompt, two turns after it, two answers after the first turn."""
    model = build().double()
    tokens = ids(10)
    end = torch.tensor([10, 10, 7, 7, 5, 7, 7, 10, 10, 10], dtype=torch.int32)
    positions = torch.tensor([0, 1, 2, 3, 4, 4, 5, 2, 3, 4])
    hidden = model.hidden(Forest(tokens, end, positions))
    for path in ([0, 1, 2, 3, 4], [0, 1, 2, 3, 5, 6], [0, 1, 7, 8, 9]):
        assert close(hidden[path], model.hidden(Forest.pack([tokens[path]])), 1e-10)


def test_token_logprobs_and_cross_entropy_are_those_of_the_logits():
    model = build().double()
    forest = Forest.concatenate(
        [Forest.branch(ids(6), [ids(4, seed=2), ids(3, seed=3)]), Forest.pack([ids(5)])]
    )
    positions, targets = next_tokens(forest)
    logits = model.logits(model.hidden(forest))[positions]
    for temperature in (1.0, 0.6):
        expected = torch.log_softmax(logits / temperature, -1)
        logprobs, entropy = model.token_logprobs(forest, positions, targets, temperature)
        assert close(logprobs, expected.gather(1, targets[:, None])[:, 0], 1e-12)
        assert close(entropy, -(expected.exp() * expected).sum(-1), 1e-12)
    weights = torch.full((len(targets),), 1 / len(targets), dtype=torch.float64)
    loss = model.cross_entropy(forest, positions, targets, weights)
    assert close(loss, torch.nn.functional.cross_entropy(logits, targets), 1e-12)


def test_scalar_head_reads_one_number_per_token():
    model = build("scalar").double()
    hidden = model.hidden(Forest.pack([ids(5)]))
    assert model.scalar(hidden).shape == (5,)
    assert close(model.scalar(hidden), hidden @ model.score.weight[0], 1e-12)


def test_weights_come_from_the_generator_alone():
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first, second, other = build(seed=0), build(seed=0), build(seed=1)
    assert torch.equal(torch.get_rng_state(), before)
    for name, tensor in first.state_dict().items():
        assert torch.equal(tensor, second.state_dict()[name])
    assert not torch.equal(first.lm_head.weight, other.lm_head.weight)
    assert first.lm_head.weight.std().item() == pytest.approx(CONFIG.initializer_range, rel=0.05)
    assert torch.equal(first.model.norm.weight, torch.ones(CONFIG.hidden_size))


@pytest.mark.parametrize("variant", [{}, {"moe": Moe(num_experts=2, num_experts_per_tok=1, moe_intermediate_size=8), "model_type": ""}])
def test_layers_that_add_nothing_at_the_start_learn_all_the_same(variant):
    made = build(zero_residual=True, **variant)
    embedded = made.model.embed_tokens(ids(9))
    torch.testing.assert_close(made.hidden(Forest.pack([ids(9)])), made.model.norm(embedded))
    said = Forest.pack([ids(9)]), torch.arange(8), ids(9)[1:], torch.ones(8)
    loss, weights = made.cross_entropy(*said), dict(made.named_parameters())
    assert loss.item() == pytest.approx(8 * math.log(CONFIG.vocab_size))
    written = {name for name, p in weights.items() if p.ndim > 1 and not p.detach().any()}
    assert len(written) == 7 and all("o_proj" in name or "down_proj" in name or name == "lm_head.weight" for name in written)
    # The output layer changes first, and through its gradient the other layers.
    for name in ("lm_head.weight", *written):
        made.cross_entropy(*said).backward()
        assert weights[name].grad.abs().max() > 1e-4
        weights["lm_head.weight"].data.add_(weights["lm_head.weight"].grad, alpha=-0.1)


def test_an_output_layer_that_is_the_embedding_is_drawn_whatever_the_layers_begin_with():
    made = build(zero_residual=True, tie_word_embeddings=True)
    assert made.lm_head.weight.std().item() == pytest.approx(CONFIG.initializer_range, rel=0.05)


@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "model.layers.1.mlp.experts.down_proj"])
def test_a_row_of_initial_weights_is_a_function_of_seed_name_and_row(name):
    every = range(400)
    whole = normal_rows(3, name, every, 64)
    for rows in (range(1), range(20), range(399), range(17, 230)):
        assert (normal_rows(3, name, rows, 64) == whole[rows.start : rows.stop]).all()
    for other in (normal_rows(4, name, every, 64), normal_rows(3, name + "x", every, 64), whole[::-1]):
        assert abs(np.corrcoef(whole.ravel(), other.ravel())[0, 1]) < 5 / 160
    # 25,600 draws: bounds are five standard errors of each moment of the normal distribution, and of each row's correlations.
    assert abs(whole.mean()) < 5 / 160 and abs((whole**2).mean() - 1) < 5 * 2**0.5 / 160 and abs((whole**4).mean() - 3) < 5 * 96**0.5 / 160
    assert np.abs(np.corrcoef(whole) - np.eye(400)).max() < 6 / 8


@pytest.mark.parametrize("name, shape, box", [
    ("model.layers.0.mlp.down_proj.weight", (48, 80), (slice(10, 30), slice(40, 80))), ("model.norm.weight", (48,), (slice(24, 48),)),
    ("model.layers.0.mlp.experts.down_proj", (6, 5, 8), (slice(2, 4), slice(0, 5), slice(0, 8))), ("lm_head.weight", (97, 48), (slice(97, 97), slice(0, 48))),
])  # fmt: skip
def test_a_part_of_initial_weights_is_that_of_the_whole(name, shape, box):
    for config in (CONFIG, CONFIG.replace(zero_residual=True)):
        assert torch.equal(initial_values(config, 3, name, shape, box), initial_values(config, 3, name, shape)[box])


def test_more_tokens_and_layers_leave_the_other_initial_weights_as_they_were():
    small, large = build().state_dict(), build(vocab_size=120, num_hidden_layers=4).state_dict()
    assert all(torch.equal(weight, large[name][: len(weight)]) for name, weight in small.items())


def test_impossible_shapes_are_refused():
    with pytest.raises(ValueError, match="num_attention_heads 6 must be a multiple"):
        CONFIG.replace(num_key_value_heads=4)
    with pytest.raises(ValueError, match="head_dim 7 must be even"):
        CONFIG.replace(head_dim=7)
    with pytest.raises(ValueError, match="vocab_size\n.*greater than or equal to 1"):
        CONFIG.replace(vocab_size=0)
    with pytest.raises(ValueError, match="head must be 'lm' or 'scalar'"):
        Transformer(CONFIG, "value")
    assert CONFIG.replace(head_dim=0).head_dim == 8
