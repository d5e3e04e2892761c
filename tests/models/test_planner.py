"""Plans for models larger than memory, compared with plans derived by hand."""

import dataclasses

import pytest
import torch

from puna.kernels.paged_attention import PAGE
from puna.models.config import ModelConfig
from puna.models.formats.checkpoint import load, save
from puna.models.memory import Work
from puna.models.memory.offload import Source
from puna.models.memory.planner import Rates, Shape, choose, measure, pass_seconds
from puna.models.transformer import Transformer

CONFIG = ModelConfig(vocab_size=1000, hidden_size=64, intermediate_size=128, num_hidden_layers=10, num_attention_heads=4, num_key_value_heads=4)
LAYER, REST = 100_000_000, 50_000_000
SHAPE = Shape(CONFIG, 4, LAYER, REST, LAYER, 2 * LAYER, 100_000)
FAST = Rates(loading=1e9, bandwidth=20e9, flops=1e15)


def kept(tokens):
    """Return the bytes of whole pages, plus one more page for a copy: 100 kB per token."""
    return (-(-tokens // PAGE) + 1) * PAGE * 100_000


def test_one_answer_leaves_all_the_memory_to_layers():
    """850 MB: 50 outside the layers, 200 for two streamed layers, one step's and one answer's share. Five layers stay and five are streamed
    at 100 ms each; a token takes half a second, plus a quarter of the reading time, and the prompt takes one more pass."""
    plan = choose(SHAPE, 850_000_000, FAST, Work(64, 16, 1))
    assert 50e6 + 200e6 + 500e6 + kept(80) < 850e6 < 50e6 + 200e6 + 600e6 + kept(80)
    assert (plan.streamed, plan.sequences, plan.bound) == (5, 1, "loading layers")
    first, step = (0.5 + (10 * LAYER + more) / 20e9 / 4 for more in (0, 1000 * 64 * 4 + kept(72)))
    assert plan.step_seconds == pytest.approx(step) and plan.tokens_per_second == pytest.approx(16 / (first + 16 * step))
    assert plan.memory <= 850_000_000 and plan.pages == kept(80)


def test_many_answers_take_the_place_of_layers_while_that_is_worth_more():
    """An answer's keys and values take a tenth of a layer: streaming one more layer costs at most as much as ten more answers gain."""
    work = Work(64, 16, 100)
    plan = choose(SHAPE, 850_000_000, FAST, work)
    assert plan.sequences > 10 and plan.streamed > 5 and plan.bound == "loading layers"
    assert plan.memory <= 850_000_000
    assert plan.tokens_per_second > 5 * choose(SHAPE, 850_000_000, FAST, work._replace(answers=1)).tokens_per_second


def test_more_answers_than_pay_are_not_begun_at_once():
    """If products are the bottleneck from one answer on, concurrent answers only cost memory."""
    slow = Rates(loading=1e15, bandwidth=1e15, flops=1e6)
    plan = choose(SHAPE, 850_000_000, slow, Work(64, 16, 8))
    assert plan.sequences == 1 and plan.bound == "products"


def test_what_fits_stays():
    plan = choose(SHAPE, 2_000_000_000, FAST, Work(64, 16, 4))
    assert (plan.streamed, plan.sequences, plan.bound) == (0, 4, "reading weights")
    assert plan.step_seconds == pytest.approx((10 * LAYER + 1000 * 64 * 4 + 4 * kept(72)) / 20e9)
    assert plan.line("disk").startswith("all 10 layers fit into memory; 4 answers at once")
    assert choose(SHAPE, 850_000_000, FAST, Work(64, 16, 1)).line("disk").startswith("5 of 10 layers stay in memory, 5 come from disk for each pass; 1 answers at once")


def test_the_longest_request_has_room():
    assert choose(SHAPE, 850_000_000, FAST, Work(64, 16, 1, longest=1000)).pages == kept(1000)
    with pytest.raises(ValueError, match=r"memory = 0\.3 GB is too little even with all layers offloaded: one answer of 1000 tokens with its prompt needs 0\.36\d GB"):
        choose(SHAPE, 300_000_000, FAST, Work(64, 16, 1, longest=1000))


def test_a_pass_takes_the_longest_of_what_overlaps_and_a_quarter_of_the_rest():
    """By the roofline: 5 layers at 1 GB/s, plus a quarter of the rest; 1 GB of weights at 20 GB/s; 2 FLOPs per weight and token, and per
    key."""
    assert pass_seconds(SHAPE, FAST, 5, 1, 100, 1) == (pytest.approx(0.5 + (10 * LAYER + 256_000 + kept(100)) / 20e9 / 4), "loading layers")
    seconds, bound = pass_seconds(SHAPE, FAST, 0, 1, 100, 0)
    assert bound == "reading weights" and seconds == pytest.approx(10 * LAYER / 20e9)
    D, F, tokens = 64, 128, 7
    matrices = 10 * (4 * D * D + 3 * D * F)
    pair = 10 * 2 * 2 * 4 * 16  # layers, score and value, multiply and add, heads, width
    seconds, bound = pass_seconds(SHAPE, Rates(1e15, 1e15, 1e6), 5, tokens, 100, 2)
    assert bound == "products"
    assert seconds == pytest.approx((2 * matrices * tokens + 101 * pair * tokens + 2 * 2 * 1000 * D) / 1e6)


def test_rates_are_measured_with_the_models_own_layer(tmp_path):
    config = CONFIG.replace(num_hidden_layers=2)
    save(Transformer(config, seed=0).to(torch.bfloat16), tmp_path)
    source = Source(tmp_path, torch.float32)
    model = load(tmp_path)
    layer = sum(p.nbytes for p in model.model.layers[0].parameters())
    assert source.layer_bytes == layer and source.rest_bytes == sum(p.nbytes for p in model.parameters()) - 2 * layer
    assert layer // 2 <= source.read_bytes < layer // 2 + 2 * 4096
    shape = Shape.of(source, torch.device("cpu"), config)
    assert shape.beside == 2 * source.read_bytes + layer  # bf16 on disk: the layer in use is converted
    assert shape.token == 2 * (2 * 2 * 4 * 16 * 4)  # twice, with a draft of the same shape: layers, keys and values, heads, width, bytes
    rates = measure(source, "disk", torch.device("cpu"))
    assert all(0 < rate < float("inf") for rate in dataclasses.astuple(rates))
