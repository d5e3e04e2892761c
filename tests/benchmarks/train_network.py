"""The training of the extractor's network, by PyTorch on one thread; for `train_extraction`."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from puna.kernels.cpu.vectors import LANES
from puna.models.extraction.network import STEPS, WIDTH, Network, inputs

EPOCHS = 12
PAGES = 12  # pages per step
MAX_BLOCKS = 800  # maximum blocks of a page in a step; longer pages are cut
GAP = 2 * STEPS[-1]  # empty blocks between pages
RATE, DECAY = 4e-3, 0.02
HIDDEN, DROPPED = 0.15, 0.2  # dropout of inputs and of convolution outputs


class _Module(nn.Module):
    def __init__(self, columns: int) -> None:
        super().__init__()
        self.enter, self.page, self.leave = nn.Linear(columns, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
        self.layers = nn.ModuleList([nn.Conv1d(WIDTH, WIDTH, 3, dilation=step, padding=step) for step in STEPS])

    def forward(self, x: Tensor, page: Tensor, filled: Tensor) -> Tensor:
        """Return logits [blocks] of concatenated blocks [blocks, columns]; `page`: the index of each block's page; `filled`: 0 in gaps."""
        x = x * (torch.rand_like(x) > HIDDEN) / (1 - HIDDEN)
        state = F.relu(self.enter(x)) * filled
        pages = int(page[-1]) + 1
        mean = torch.zeros(pages, WIDTH).index_add_(0, page, state) / torch.zeros(pages, 1).index_add_(0, page, filled)
        state = state + F.relu(self.page(mean))[page] * filled
        for layer in self.layers:
            state = state + F.dropout(F.relu(layer(state.T[None]))[0].T, DROPPED) * filled
        return self.leave(state)[:, 0]  # type: ignore[no-any-return]


def fit_network(rows: NDArray[np.float32], data: Any, without: int | None) -> Network:
    """Return the network trained on the pages outside a fold, from the features of all blocks [blocks, columns]."""
    inside = (data.fold != (-1 if without is None else without)) & (data.weight > 0)
    ones = np.ones(rows.shape[1], np.float32)
    plain = inputs(rows[inside], 0 * ones, ones / 8)  # within the clipping bound: logarithms to base 2 are below 32
    mean, deviation = 8 * plain.mean(0, dtype=np.float64), 8 * plain.std(0, dtype=np.float64)
    mean, scale = mean.astype(np.float32), (1 / (deviation + 1e-3)).astype(np.float32)
    x = torch.from_numpy(inputs(rows, mean, scale))
    label, weight = torch.from_numpy(data.label), torch.from_numpy(data.weight * (inside > 0).astype(np.float32))
    starts = np.searchsorted(data.page, np.arange(len(data.pages) + 1))
    pages = np.unique(data.page[inside])
    torch.manual_seed(1)
    generator, threads = np.random.default_rng(1), torch.get_num_threads()
    torch.set_num_threads(1)  # for a fixed order of sums
    module = _Module(rows.shape[1])
    steps = EPOCHS * (len(pages) // PAGES)
    optimizer = torch.optim.AdamW(module.parameters(), lr=RATE, weight_decay=DECAY)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, total_steps=steps)
    for _ in range(EPOCHS):
        order = generator.permutation(pages)
        for at in range(0, len(order) - PAGES + 1, PAGES):
            spans = [_cut(int(starts[page]), int(starts[page + 1]), generator) for page in order[at : at + PAGES]]
            loss = _loss(module, x, label, weight, spans)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(module.parameters(), 1.0)
            optimizer.step()
            schedule.step()
    torch.set_num_threads(threads)
    return _as_arrays(module, mean, scale)


def _cut(first: int, end: int, generator: np.random.Generator) -> slice:
    if end - first > MAX_BLOCKS:
        first += int(generator.integers(0, end - first - MAX_BLOCKS + 1))
        end = first + MAX_BLOCKS
    return slice(first, end)


def _loss(module: _Module, x: Tensor, label: Tensor, weight: Tensor, spans: list[slice]) -> Tensor:
    """Return the mean cross-entropy over some pages' blocks, weighted."""

    def joined(values: Tensor) -> Tensor:
        gap = torch.zeros(GAP, *values.shape[1:])
        return torch.cat([part for span in spans for part in (values[span], gap)])

    page = torch.cat([torch.full((span.stop - span.start + GAP,), number) for number, span in enumerate(spans)])
    filled = torch.cat([part for span in spans for part in (torch.ones(span.stop - span.start, 1), torch.zeros(GAP, 1))])
    weights = joined(weight)
    losses = F.binary_cross_entropy_with_logits(module(joined(x), page, filled), joined(label), reduction="none")
    return (losses * weights).sum() / weights.sum().clamp(min=1e-9)


def _as_arrays(module: _Module, mean: NDArray[np.float32], scale: NDArray[np.float32]) -> Network:
    """Return a module's weights in the extractor's form, rounded as in the weights file."""

    def rounded(values: Tensor) -> NDArray[np.float32]:
        return values.detach().numpy().astype(np.float16).astype(np.float32)

    def by_vectors(weights: Tensor) -> NDArray[np.float32]:
        """Return weights [outputs, inputs] as [vectors of outputs, inputs, LANES]."""
        return np.ascontiguousarray(rounded(weights).reshape(WIDTH // LANES, LANES, -1).transpose(0, 2, 1))

    layers = np.stack([by_vectors(layer.weight.permute(0, 2, 1).reshape(WIDTH, 3 * WIDTH)) for layer in module.layers])
    biases = np.stack([rounded(layer.bias) for layer in module.layers])
    return Network(
        mean, scale, by_vectors(module.enter.weight), rounded(module.enter.bias), by_vectors(module.page.weight), rounded(module.page.bias),
        layers, biases, rounded(module.leave.weight[0]), rounded(module.leave.bias),
    )  # fmt: skip
