"""Triton version of appending keys and values to pages, compared with appending one token at a time."""

import pytest
import torch

from puna.kernels import kv_append as module
from puna.kernels.kv_append import kv_append_, kv_append_reference


@pytest.mark.parametrize("dtypes", [(torch.float32, torch.float32), (torch.float16, torch.float16), (torch.float16, torch.float32)])
@pytest.mark.parametrize("block", [8, 1024])  # a token's 12 numbers in two blocks, the second partial, and in one block
def test_equals_the_reference(monkeypatch, dtypes, block):
    monkeypatch.setattr(module, "BLOCK", block)
    generator = torch.Generator().manual_seed(0)
    pages = torch.randn(2, 3, 4, 2, 6, generator=generator).to(dtypes[0])
    joint = torch.randn(5, 4, 2, 6, generator=generator).to(dtypes[1])
    places = torch.tensor([11, 0, 4, 7, 3])
    expected = pages.clone()
    kv_append_reference(*expected, joint[:, 1], joint[:, 3], places)
    kv_append_(*pages, joint[:, 1], joint[:, 3], places)
    assert torch.equal(pages, expected)


def test_heads_that_lie_apart_and_places_in_no_page():
    pages, new = torch.zeros(2, 2, 4, 2, 6), torch.randn(3, 6, 2).transpose(1, 2)
    kv_append_(*pages, new, new, torch.tensor([-1, 5, 8]))
    expected = torch.zeros_like(pages)
    expected[:, 1, 1] = new[1]
    assert torch.equal(pages, expected)
