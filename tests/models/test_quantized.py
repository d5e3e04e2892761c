"""Models with 8-bit weights: which matrices are quantized, the errors, and use in the engine."""

import copy

import pytest
import torch

from puna.kernels.exact import exact_passes
from puna.kernels.quantized_linear import quantize_rows_reference, quantized_linear_reference
from puna.models.config import ModelConfig
from puna.models.forest import Forest
from puna.models.formats.quantized import QuantizedLinear, quantize
from puna.models.generation import Engine, SamplingParams
from puna.models.generation.dense import loops
from puna.models.layers import Linear
from puna.models.training.objectives.base import Targets
from puna.models.transformer import Transformer

CONFIG = ModelConfig(vocab_size=83, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, initializer_range=0.3)


def drawn(**also):
    return Transformer(CONFIG.replace(**also, model_type=""), seed=0)


def spelled_out(model, kind):
    """Return the model with each of its layers' products replaced by the definition."""
    for module in model.model.layers.modules():
        if isinstance(module, Linear):
            module.forward = lambda x, w=module.weight, b=module.bias: quantized_linear_reference(x, *quantize_rows_reference(w, kind)) + (0 if b is None else b)
    return model


@pytest.mark.parametrize("kind", ["int8", "fp8"])
@torch.no_grad()
def test_layers_multiply_by_the_definition_and_the_rest_is_as_it_was(kind):
    model = drawn(qkv_bias=True)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.normal_(generator=torch.Generator().manual_seed(len(name)))
    forest = Forest.pack([list(range(40)), list(range(30, 60))])
    expected = spelled_out(copy.deepcopy(model), kind).hidden(forest)
    embeddings, head = model.model.embed_tokens.weight, model.lm_head.weight
    assert quantize(model, kind) is model and model.model.embed_tokens.weight is embeddings and model.lm_head.weight is head
    assert sum(isinstance(module, QuantizedLinear) for module in model.modules()) == 2 * 7
    assert not any(isinstance(module, Linear) for module in model.model.layers.modules())
    torch.testing.assert_close(model.hidden(forest), expected, rtol=0, atol=2e-4)
    again = {name: p.data_ptr() for name, p in model.named_parameters()}
    assert {name: p.data_ptr() for name, p in quantize(model, kind).named_parameters()} == again


def test_the_engine_draws_what_a_pass_over_whole_sequences_gives():
    """Greedy tokens are the quantized model's likeliest, whatever else is in the batch: each token has its own scale."""
    model = quantize(drawn(), "int8")
    prompts = [[1, 2, 3], [4] * 20, [7, 8]]
    answers = Engine(model, step_tokens=9).generate(prompts, SamplingParams(temperature=0, max_tokens=12, stop=()))
    for prompt, (answer,) in zip(prompts, answers, strict=True):
        with torch.no_grad():
            logits = model.logits(model.hidden(Forest.pack([[*prompt, *answer.tokens]])))
        assert logits[len(prompt) - 1 : -1].argmax(-1).tolist() == answer.tokens


@torch.no_grad()
def test_distributions_stay_near_those_of_the_whole_weights():
    """The control has a quarter of the levels: 5-bit weights are much farther away."""
    tokens = torch.randint(0, 83, (200,), generator=torch.Generator().manual_seed(2)).tolist()
    model = drawn(initializer_range=0.1)

    def logprobs(model):
        return model.logits(model.hidden(Forest.pack([tokens]))).log_softmax(-1)

    p = logprobs(model)
    coarse = copy.deepcopy(model)
    for module in coarse.model.layers.modules():
        if isinstance(module, Linear):
            step = module.weight.abs().amax(1, keepdim=True) / 15
            module.weight.copy_((module.weight / step).round() * step)
    near, far = ((p.exp() * (p - logprobs(one))).sum(-1).mean() for one in (quantize(copy.deepcopy(model), "int8"), coarse))
    assert 0 < near < far / 8


def test_experts_are_refused():
    moe = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 8}
    with pytest.raises(ValueError, match="the experts' matrices of a mixture cannot be kept in 8 bits; choose 'same'"):
        quantize(Transformer(ModelConfig(**{**CONFIG.model_dump(), "moe": moe, "model_type": ""})), "int8")


@pytest.mark.parametrize("exact", [True, False])
def test_int8_layers_by_loops_have_the_bits_of_the_models(exact):
    """Widths that do not fill the vector unit's steps, biases, norms of heads; chunks, pauses and shared prompts; and the training pass's
    log-probs."""
    pytest.importorskip("numba")
    from puna.kernels.cpu.int8_products import AVAILABLE

    model = drawn(hidden_size=40, intermediate_size=84, head_dim=12, qkv_bias=True, o_bias=True, qk_norm=True)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter.uniform_(0.5, 1.5, generator=torch.Generator().manual_seed(len(name)))
    quantize(model, "int8")
    by_loops, plain = (Engine(model, exact=exact, step_tokens=9) for _ in range(2))
    assert (by_loops._loops[0] is not None) == AVAILABLE
    plain._loops = [None]
    asked, params = [[1, 2, 3], list(range(40)), [7, 8]], SamplingParams(n=3, max_tokens=12, stop=(), seed=1)
    answers = by_loops.generate(asked, params)
    assert answers == plain.generate(asked, params)
    if exact:
        targets = Targets.from_answers(asked, [[answer.tokens for answer in row] for row in answers])
        with torch.no_grad(), exact_passes(torch.float32, torch.device("cpu")):
            logprobs = model.token_logprobs(targets.forest, targets.positions, targets.tokens, 1.0)[0]
        assert torch.equal(logprobs, torch.tensor([p for row in answers for answer in row for p in answer.logprobs]))


def test_mixed_layers_are_computed_by_the_models_operators():
    """FP8, and a model that is only partly quantized: the loops support neither."""
    part = drawn()
    part.model.layers[0].mlp.up_proj = QuantizedLinear(part.model.layers[0].mlp.up_proj, "int8")
    assert loops(part) is None and loops(quantize(drawn(), "fp8")) is None
