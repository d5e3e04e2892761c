"""The extractor's network: numbers compared with PyTorch's layers, inputs with logarithms, and its part in the predictions beside the
trees."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from resiliparse.parse.html import HTMLTree

from puna.models.extraction.layout import alone
from puna.models.extraction.model import COLUMNS, chances
from puna.models.extraction.network import HIGHEST, STEPS, Network, inputs, network_logits
from puna.models.extraction.trees import splits
from tests.benchmarks.train_extraction import as_arrays
from tests.benchmarks.train_network import _as_arrays, _Module
from tests.stages.curate.scans import read_page


def module_and_network(columns: int):
    torch.manual_seed(3)
    module = _Module(columns)
    for weights in module.parameters():
        weights.data = weights.data.half().float()
    return module, _as_arrays(module, np.full(columns, 0.5, np.float32), np.full(columns, 0.25, np.float32))


def test_inputs_are_logarithms_to_base_two_by_their_deviations_within_bounds():
    values = np.array([[0, 1, -1, 3, -7, 1.5, 2.0**30]], np.float32)
    mean, scale = np.zeros(7, np.float32), np.full(7, 0.5, np.float32)
    mean[3] = 1
    # 1.5: 2.5 lies a quarter of the way from 2 to 4.
    assert inputs(values, mean, scale).tolist() == [[0, 0.5, -0.5, 0.5, -1.5, 0.625, HIGHEST]]


@pytest.mark.parametrize("blocks", [1, 2, 3, 9, 40])
def test_the_network_is_pytorchs(blocks):
    columns = 21
    module, network = module_and_network(columns)
    rows = np.random.default_rng(blocks).normal(0, 20, (blocks, columns)).astype(np.float32)
    state = F.relu(module.enter(torch.from_numpy(inputs(rows, network.mean, network.scale))))
    state = state + F.relu(module.page(state.mean(0, keepdim=True)))
    for layer in module.layers:
        state = state + F.relu(layer(state.T[None]))[0].T
    np.testing.assert_allclose(network_logits(network, rows), module.leave(state)[:, 0].detach().numpy(), rtol=1e-4, atol=1e-5)


def test_a_page_is_judged_alike_whatever_is_trained_with_it(monkeypatch):
    monkeypatch.setattr("tests.benchmarks.train_network.HIDDEN", -1.0)  # no input is dropped, each counts half
    monkeypatch.setattr("tests.benchmarks.train_network.DROPPED", 0.0)
    module, _ = module_and_network(9)
    generator = np.random.default_rng(0)
    pages = [torch.from_numpy(generator.normal(0, 1, (size, 9)).astype(np.float32)) for size in (5, 12)]
    gap = 2 * STEPS[-1]
    x = torch.cat([part for one in pages for part in (one, torch.zeros(gap, 9))])
    page = torch.cat([torch.full((len(one) + gap,), number) for number, one in enumerate(pages)])
    filled = torch.cat([part for one in pages for part in (torch.ones(len(one), 1), torch.zeros(gap, 1))])
    both, one = module(x, page, filled)[:5], module(pages[0], page[:5], filled[:5])
    np.testing.assert_allclose(both.detach().numpy(), one.detach().numpy(), rtol=1e-5, atol=1e-6)


def test_trees_and_network_have_the_same_say():
    page = read_page(HTMLTree.parse("<body><p>one two three</p><p>four five six</p></body>"))
    rows = np.zeros((2, COLUMNS), np.float32)
    _, network = module_and_network(COLUMNS)
    silent = Network(*(np.zeros_like(values) for values in network))._replace(leave_bias=np.array([-1], np.float32))
    trees = splits(as_arrays([{"leaf_value": 2.0}]))
    np.testing.assert_allclose(chances(alone(page), rows, trees, silent), 1 / (1 + np.exp(-0.5)), rtol=1e-5)
