"""MinHash signatures, Triton's versions: every bit that of the CPU's loops, which equal the field's libraries."""

import numpy as np
import pytest

from puna.kernels import minhash_triton
from puna.kernels.minhash import chosen_device, signatures


@pytest.mark.parametrize("seed", [1, 42])
def test_every_bit(monkeypatch, seed):
    monkeypatch.setattr(minhash_triton, "PERMUTATIONS", 16)
    monkeypatch.setattr(minhash_triton, "SHINGLES", 16)
    generator = np.random.default_rng(seed)
    sizes = [3, 0, 50, 1, 16]
    hashes = generator.integers(0, 2**64, sum(sizes), dtype=np.uint64)
    hashes[:4] = [0, 2**64 - 1, 2**32, 2**61 - 1]
    offsets = np.cumsum([0, *sizes])
    ours, expected = signatures(hashes, offsets, 24, seed, "cuda"), signatures(hashes, offsets, 24, seed)
    assert ours.dtype == expected.dtype and np.array_equal(ours, expected)


def test_the_interpreter_stands_in_for_a_device(monkeypatch):
    called = []
    launched = minhash_triton.signatures_tensor
    monkeypatch.setattr(minhash_triton, "signatures_tensor", lambda *given: called.append(1) or launched(*given))
    assert chosen_device("cuda") == "cuda" and chosen_device("cpu") == "cpu"
    one = np.arange(3, dtype=np.uint64)
    assert np.array_equal(signatures(one, np.array([0, 3]), 8, 1, "cpu"), signatures(one, np.array([0, 3]), 8, 1, "cuda"))
    assert called == [1]  # by Triton's kernel, once
