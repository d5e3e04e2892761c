"""Advantages by hand, against the definition, and against a sum over each token's future."""

import numpy as np
import pytest
import torch
from hypothesis import given as drawn
from hypothesis import settings
from hypothesis import strategies as st

from puna.kernels import advantages as module
from puna.kernels.advantages import advantages, advantages_reference


def draw(lengths, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    n = sum(lengths)
    tokens = [torch.randn(n, generator=generator, dtype=torch.float64).to(dtype) for _ in range(3)]
    return *tokens, torch.randn(len(lengths), generator=generator, dtype=torch.float64).to(dtype), torch.tensor(lengths)


def test_by_hand():
    # Rewards -0.5 (1 - 0) = -0.5 and 0 + 3; deltas -0.5 + 0.5 * 4 - 2 = -0.5 and 3 - 4 = -1; a_0 = -0.5 + 0.5 * 0.5 * -1.
    a, r = advantages(*(torch.tensor(x) for x in ([1.0, 2.0], [0.0, 2.0], [2.0, 4.0], [3.0], [2])), kl=0.5, gamma=0.5, lam=0.5)
    assert a.tolist() == [-0.75, -1.0] and r.tolist() == [1.25, 3.0]


@pytest.mark.parametrize("lengths", [[3, 1, 0, 40], [], [1], [0, 0], [500] * 3])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_definition(lengths, dtype):
    *given, counts = draw(lengths, dtype)
    ours = advantages(*given, counts, 0.1, 0.99, 0.95)
    offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0)]).long()
    expected = advantages_reference(*(x.double() for x in given), offsets, 0.1, 0.99, 0.95)
    for mine, other in zip(ours, expected, strict=True):
        assert mine.dtype == dtype
        torch.testing.assert_close(mine.double(), other, rtol=1e-5, atol=1e-5)


@drawn(st.lists(st.integers(0, 6), min_size=1, max_size=6), st.floats(0, 1), st.floats(0, 1), st.integers(0, 99))
@settings(max_examples=50, deadline=None)
def test_advantages_are_discounted_sums_of_temporal_differences(lengths, gamma, lam, seed):
    """a_t = sum over k >= t of (gamma lambda)^(k - t) delta_k (Schulman et al. 2016, equation 16)."""
    *tokens, counts = draw(lengths, seed=seed)
    ours, returns = advantages(*tokens, counts, 0.3, gamma, lam)
    logp, reference, values, scores = (x.numpy() for x in tokens)
    expected, start = [], 0
    for n, score in zip(lengths, scores, strict=True):
        rewards, v = -0.3 * (logp - reference)[start : start + n], np.append(values[start : start + n], 0.0)
        rewards[n - 1 :] += score
        delta = rewards + gamma * v[1:] - v[:-1]
        expected += [sum((gamma * lam) ** (k - t) * delta[k] for k in range(t, n)) for t in range(n)]
        start += n
    np.testing.assert_allclose(ours.numpy(), expected, atol=1e-12)
    np.testing.assert_allclose(returns.numpy(), np.array(expected) + values, atol=1e-12)


def test_refusals_and_registration():
    *given, counts = draw([3, 2])
    with pytest.raises(ValueError, match="must be alike"):
        advantages(given[0][:-1], *given[1:], counts, 0.1, 1.0, 0.95)
    torch.library.opcheck(module._operator.dispatched, (*given, torch.tensor([0, 3, 5]), 0.1, 1.0, 0.95))
