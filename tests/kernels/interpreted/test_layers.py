"""RMSNorm, SwiGLU and rotary embedding: the Triton versions against the fp64 definitions."""

import pytest
import torch

from puna.kernels.rms_norm import add_rms_norm, add_rms_norm_reference, rms_norm, rms_norm_reference
from puna.kernels.rope import rope, rope_reference, rope_table
from puna.kernels.swiglu import swiglu, swiglu_reference

DTYPES = [torch.float32, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(3, 7), (5, 64), (1, 1)])
def test_rms_norm(within_budget, normal, shape, dtype):
    inputs = (normal(*shape), normal(shape[-1], seed=1))
    within_budget(lambda x, w: rms_norm(x, w, 1e-5), lambda x, w: rms_norm_reference(x, w, 1e-5), inputs, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(3, 7), (5, 64)])
def test_add_rms_norm(within_budget, normal, shape, dtype):
    inputs = (normal(*shape), normal(*shape, seed=2), normal(shape[-1], seed=1))
    within_budget(lambda x, r, w: add_rms_norm(x, r, w, 1e-5), lambda x, r, w: add_rms_norm_reference(x, r, w, 1e-5), inputs, dtype)


def test_more_rows_than_programs(within_budget, normal, monkeypatch):
    monkeypatch.setattr("puna.kernels.rms_norm.PROGRAMS", 3)
    monkeypatch.setattr("puna.kernels.rms_norm.ELEMENTS", 32)  # two rows at once
    inputs = (normal(11, 8), normal(8, seed=1))
    within_budget(lambda x, w: rms_norm(x, w, 1e-5), lambda x, w: rms_norm_reference(x, w, 1e-5), inputs, torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(3, 7), (2, 3, 2049)])
def test_swiglu(within_budget, normal, shape, dtype):
    within_budget(swiglu, swiglu_reference, (normal(*shape, scale=2.0), normal(*shape, seed=1)), dtype)


def test_swiglu_of_the_halves_of_one_product(within_budget, normal):
    within_budget(lambda x: swiglu(*x.chunk(2, -1)), lambda x: swiglu_reference(*x.chunk(2, -1)), (normal(5, 24),), torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(4, 3, 8), (3, 9, 20)])
def test_rope(within_budget, normal, shape, dtype):
    cos, sin = rope_table(torch.tensor([0, 5, 2000, 7])[: shape[0]], shape[-1], 10_000.0, torch.float64)
    within_budget(rope, rope_reference, (normal(*shape), cos, sin), dtype)


def test_rope_of_a_slice_of_one_product(within_budget, normal):
    cos, sin = rope_table(torch.arange(4), 8, 10_000.0, torch.float64)
    within_budget(
        lambda x, c, s: rope(x.view(4, 5, 8)[:, 1:4], c, s),
        lambda x, c, s: rope_reference(x.view(4, 5, 8)[:, 1:4], c, s), (normal(4, 40), cos, sin), torch.float32,
    )  # fmt: skip
