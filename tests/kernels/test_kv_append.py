"""Appending keys and values to pages, compared with one token at a time."""

import pytest
import torch

from puna.kernels.kv_append import kv_append_, kv_append_reference
from puna.kernels.paged_attention import PAGE, new_pages

P, S, G, K = 3, 4, 2, 6


def draw(N, dtype=torch.float32, new=None, seed=0):
    """Return (key pages, value pages, new keys, new values, places); the new ones are slices of a joint projection."""
    generator = torch.Generator().manual_seed(seed)
    pages = [torch.randn(P, S, G, K, generator=generator).to(dtype) for _ in "kv"]
    joint = torch.randn(N, 4, G, K, generator=generator).to(new or dtype)
    return *pages, joint[:, 1], joint[:, 3], torch.randperm(P * S, generator=generator)[:N]


@pytest.mark.parametrize("dtypes", [(torch.float64, None), (torch.float32, None), (torch.bfloat16, torch.float32)])
@pytest.mark.parametrize("N", [0, 1, 5, P * S])
def test_equals_the_reference(N, dtypes):
    for seed in range(3):
        given = draw(N, *dtypes, seed=seed)
        expected = [x.clone() for x in given[:2]]
        kv_append_reference(*expected, *given[2:])
        kv_append_(*given)
        assert all(torch.equal(a, b) for a, b in zip(given, expected, strict=False))


def test_pages_as_the_loops_read_them():
    """Keys and values of different widths, scattered places, in the layout of `new_pages`."""
    generator = torch.Generator().manual_seed(0)
    pages = new_pages(5, G, 6, 20, torch.float32)
    expected = [x.clone() for x in pages]
    k, v = (torch.randn(30, G, width, generator=generator) for width in (6, 20))
    places = torch.randperm(5 * PAGE, generator=generator)[:30]
    kv_append_reference(*expected, k, v, places)
    kv_append_(*pages, k, v, places)
    assert all(torch.equal(a, b) for a, b in zip(pages, expected, strict=True))


def test_what_cannot_be_written_is_refused():
    k_pages, v_pages, k, v, places = draw(3)
    with pytest.raises(ValueError, match="do not fit"):
        kv_append_(k_pages, v_pages, k, v, places[:2])
    with pytest.raises(ValueError, match="do not fit"):
        kv_append_(k_pages, v_pages, k[:, :1], v[:, :1], places)
    with pytest.raises(IndexError):
        kv_append_(k_pages, v_pages, k, v, torch.tensor([0, 1, P * S]))
