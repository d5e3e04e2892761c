"""Routing, dispatch to experts and combination, compared with the definitions."""

import pytest
import torch

from puna.kernels import moe as module
from puna.kernels.moe import (
    combine,
    combine_reference,
    dispatch,
    dispatch_reference,
    sort_by_expert,
    top_k_routing,
    top_k_routing_reference,
)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize(("E", "k"), [(8, 2), (5, 1), (4, 4)])
def test_routing(within_budget, normal, E, k, normalize, dtype):
    ours, reference = (lambda z, f=f: f(z, k, normalize)[:2] for f in (top_k_routing, top_k_routing_reference))
    within_budget(ours, reference, (normal(20, E),), dtype)
    assert torch.autograd.gradcheck(lambda z: top_k_routing(z, k, normalize)[:2], (normal(20, E),))
    for pick in (0, 1):  # gradients of only one output
        within_budget(lambda z, i=pick: ours(z)[i], lambda z, i=pick: reference(z)[i], (normal(20, E),), dtype)


def test_routing_by_hand():
    logits = torch.log(torch.tensor([[0.1, 0.6, 0.3]]))
    weight, p, chosen = top_k_routing(logits, 2, True)
    assert chosen.tolist() == [[1, 2]]
    torch.testing.assert_close(weight, torch.tensor([[2 / 3, 1 / 3]]))
    torch.testing.assert_close(p, torch.tensor([[0.1, 0.6, 0.3]]))
    with pytest.raises(ValueError, match="number of experts, 3, not 4"):
        top_k_routing(logits, 4, True)


def test_registered_as_torch_expects(normal):
    torch.library.opcheck(module._top_k_routing.dispatched, (normal(7, 5).detach().float().requires_grad_(), 2, True))


def sorted_choices(T, E, k, seed=0):
    chosen = torch.stack([torch.randperm(E, generator=torch.Generator().manual_seed(100 * seed + t))[:k] for t in range(T)])
    return chosen, *sort_by_expert(chosen, E)


@pytest.mark.parametrize(("T", "E", "k"), [(20, 8, 2), (5, 5, 1), (9, 4, 4), (1, 3, 2)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_to_the_experts_and_back(within_budget, normal, T, E, k, dtype):
    for seed in range(3):
        chosen, order, place, offsets = sorted_choices(T, E, k, seed)
        for e in range(E):  # the rows of expert e come from the tokens that chose it, in order
            assert (order[offsets[e] : offsets[e + 1]] // k).tolist() == [t for t in range(T) if e in chosen[t]]
        assert order[place].tolist() == list(range(T * k))
        within_budget(lambda x, o=order, p=place: dispatch(x, o, p), lambda x, o=order: dispatch_reference(x, o), (normal(T, 6),), dtype)
        inputs = (normal(T * k, 6, seed=seed), normal(T, k, seed=seed + 1))
        within_budget(
            lambda y, w, o=order, p=place: combine(y, w, o, p), lambda y, w, o=order: combine_reference(y, w, o), inputs, dtype, ulps=8
        )
    assert torch.autograd.gradcheck(lambda x: dispatch(x, order, place), (normal(T, 6),))
    assert torch.autograd.gradcheck(lambda y, w: combine(y, w, order, place), inputs)
    torch.library.opcheck(module._dispatch_rows.dispatched, (normal(T, 6).detach().float().requires_grad_(), order, place))
    torch.library.opcheck(module._combine_rows.dispatched, (*(x.detach().float().requires_grad_() for x in inputs), order, place))


def test_no_tokens_and_rows_that_do_not_fit():
    order, place, offsets = sort_by_expert(torch.empty(0, 2, dtype=torch.int64), 3)
    assert offsets.tolist() == [0, 0, 0, 0] and dispatch(torch.empty(0, 4), order, place).shape == (0, 4)
    assert combine(torch.empty(0, 4), torch.empty(0, 2), order, place).shape == (0, 4)
    with pytest.raises(ValueError, match="each weight has one"):
        combine(torch.empty(3, 4), torch.empty(1, 2), order, place)
