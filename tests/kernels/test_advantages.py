"""Advantages: by hand, against the definition, and against a sum over each token's future."""

import pytest
import torch

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


def test_with_lambda_one_returns_are_discounted_futures():
    *given, counts = draw([7, 5])
    logp, ref, _, scores = given
    _, returns = advantages(*given, counts, 0.2, 0.9, 1.0)
    reward = -0.2 * (logp - ref)
    reward[6] += scores[0]
    reward[11] += scores[1]
    for t, stop in ((0, 7), (3, 7), (7, 12), (11, 12)):
        torch.testing.assert_close(returns[t], sum(0.9 ** (s - t) * reward[s] for s in range(t, stop)))


def test_refusals_and_registration():
    *given, counts = draw([3, 2])
    with pytest.raises(ValueError, match="must be alike"):
        advantages(given[0][:-1], *given[1:], counts, 0.1, 1.0, 0.95)
    torch.library.opcheck(module._operator, (*given, torch.tensor([0, 3, 5]), 0.1, 1.0, 0.95))
