"""A network that reads a page's blocks in order and judges a block by the blocks around it and by the page.

A dense layer reads each block, another the mean over the page; then come convolutions over ever wider neighbourhoods. All sums are taken
in a fixed order, so that all processors compute the same bits."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from puna.kernels.cpu.numba_cache import njit
from puna.kernels.cpu.vector_products import AHEAD, scores_one
from puna.kernels.cpu.vectors import LANES

WIDTH = 48  # hidden width of a block in each layer: three vectors
STEPS = (1, 2, 4, 8)  # distances of the blocks that a convolution joins
HIGHEST = np.float32(4)  # maximum distance from the mean, in standard deviations
ONE, FRACTION = np.int32(0x3F800000), np.float32(2.0**-23)
VECTORS = np.arange(WIDTH // LANES + AHEAD, dtype=np.int32) % (WIDTH // LANES)


class Network(NamedTuple):
    """Weights [vectors of outputs, inputs, LANES] and biases. Convolution k reads the blocks at the distances -STEPS[k], 0 and STEPS[k]."""

    mean: NDArray[np.float32]  # [columns] mean of the inputs
    scale: NDArray[np.float32]  # [columns] 1 / standard deviation of the inputs
    enter: NDArray[np.float32]
    enter_bias: NDArray[np.float32]
    page: NDArray[np.float32]
    page_bias: NDArray[np.float32]
    layers: NDArray[np.float32]  # [steps, vectors, 3 WIDTH, LANES]
    layer_bias: NDArray[np.float32]  # [steps, WIDTH]
    leave: NDArray[np.float32]  # [WIDTH]
    leave_bias: NDArray[np.float32]  # [1]


@njit(cache=True)
def inputs(rows: NDArray[np.float32], mean: NDArray[np.float32], scale: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return features [blocks, columns] on a logarithmic scale, standardized by `mean` and `scale`, and clipped to ±`HIGHEST`.

    The bits of 1 + |x|, read as an integer, are a piecewise linear logarithm to base 2."""
    out = np.abs(rows) + np.float32(1)
    bits = out.view(np.int32)
    for b in range(len(rows)):
        for c in range(rows.shape[1]):
            size = np.float32(bits[b, c] - ONE) * FRACTION
            value = ((-size if rows[b, c] < 0 else size) - mean[c]) * scale[c]
            out[b, c] = min(max(value, -HIGHEST), HIGHEST)
    return out


@njit(cache=True)
def _dense(x: NDArray[np.float32], weights: NDArray[np.float32], bias: NDArray[np.float32]) -> NDArray[np.float32]:
    out, depth = np.empty((len(x), len(bias)), np.float32), x.shape[1]
    for v in range(len(weights)):
        to = out.ctypes.data + 4 * LANES * v
        table, size = VECTORS.ctypes.data + 4 * v, 4 * LANES * depth
        scores_one(len(x), depth, x.ctypes.data, 4 * depth, table, weights.ctypes.data, size, to, 4 * len(bias))
    for r in range(len(x)):
        for c in range(len(bias)):
            out[r, c] = max(out[r, c] + bias[c], np.float32(0))
    return out


@njit(cache=True)
def network_logits(network: Network, rows: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return a logit for each block of one page [blocks], from the features `rows` [blocks, columns]."""
    n = len(rows)
    state = _dense(inputs(rows, network.mean, network.scale), network.enter, network.enter_bias)
    mean = np.zeros((1, WIDTH), np.float32)
    for b in range(n):
        mean[0] += state[b]
    state += _dense(mean / np.float32(n), network.page, network.page_bias)
    for k, step in enumerate(STEPS):
        wide = np.zeros((n, 3 * WIDTH), np.float32)
        wide[:, WIDTH : 2 * WIDTH] = state
        if step < n:
            wide[step:, :WIDTH], wide[: n - step, 2 * WIDTH :] = state[: n - step], state[step:]
        state += _dense(wide, network.layers[k], network.layer_bias[k])
    out = np.empty(n, np.float32)
    for b in range(n):
        total = network.leave_bias[0]
        for c in range(WIDTH):
            total += state[b, c] * network.leave[c]
        out[b] = total
    return out
