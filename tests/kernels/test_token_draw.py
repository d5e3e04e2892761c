"""Token draws by the inverse of the cumulative distribution, and their log-sum-exps."""

import pytest
import torch

from puna.kernels.token_draw import LIKELIEST, token_draw, token_draw_reference


@pytest.mark.parametrize("V", [5, 16, 83, 128, 300, 2000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_draws_invert_the_cumulative_distribution(V, dtype):
    generator = torch.Generator().manual_seed(V)
    logits = 3 * torch.randn(200, V, generator=generator, dtype=dtype)
    uniforms = torch.rand(200, dtype=torch.float64, generator=generator)
    uniforms[::9] = LIKELIEST
    scale = torch.rand(200, generator=generator, dtype=dtype) + 0.3
    tokens, lse = token_draw(logits, scale, uniforms)
    assert torch.equal(tokens, token_draw_reference(logits, scale, uniforms))
    expected = (logits.double() * scale.double()[:, None]).logsumexp(1)
    torch.testing.assert_close(lse.double(), expected, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_an_impossible_token_is_never_taken(dtype):
    """All mass on token 3 of 300, at both ends of the unit interval; and with all other tokens merely very unlikely."""
    for hopeless in (-torch.inf, -1000.0):
        logits = torch.full((4, 300), hopeless, dtype=dtype)
        logits[:, 3] = 0.0
        uniforms = torch.tensor([0.0, 0.5, 1.0 - 2**-53, LIKELIEST], dtype=torch.float64)
        tokens, lse = token_draw(logits, torch.ones(4, dtype=dtype), uniforms)
        assert tokens.tolist() == [3, 3, 3, 3] and lse.tolist() == [0.0] * 4


@pytest.mark.parametrize("wrong", [torch.nan, torch.inf])
def test_what_is_no_number_is_seen(wrong):
    logits = torch.zeros(2, 50)
    logits[1, 33] = wrong
    _, lse = token_draw(logits, torch.ones(2), torch.tensor([0.5, 0.5], dtype=torch.float64))
    assert lse.isfinite().tolist() == [True, False]


def test_a_row_has_the_same_bits_in_any_company():
    logits = torch.randn(9, 777, generator=torch.Generator().manual_seed(0))
    scale, uniforms = torch.full((9,), 0.7), torch.full((9,), 0.4, dtype=torch.float64)
    tokens, lse = token_draw(logits, scale, uniforms)
    for i in range(9):
        one = token_draw(logits[i : i + 1].clone(), scale[:1], uniforms[:1])
        assert torch.equal(one[0], tokens[i : i + 1]) and torch.equal(one[1], lse[i : i + 1])
