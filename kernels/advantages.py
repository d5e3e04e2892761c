"""Advantages and returns of sampled answers: KL-penalized rewards and generalized advantage estimation in one pass.

    r_t = -c (logp_t - ref_t), plus the answer's score at its last token (Ziegler et al. 2019)
    delta_t = r_t + gamma v_{t+1} - v_t;  a_t = delta_t + gamma lambda a_{t+1};  returns_t = a_t + v_t

Each answer is a separate episode (Schulman et al. 2016): v and a are 0 past the answer's end. 20 bytes per token are read and
written. Shapes: N tokens, answer by answer, in A answers; offsets[a] : offsets[a + 1] are the tokens of answer a."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from puna.kernels.cpu.lazy_jit import numba_jit, triton_jit
from puna.kernels.cpu.loops import by_rows
from puna.kernels.operators import fused_on_cpu, operator

if TYPE_CHECKING:
    import triton.language as tl

NUMERICS = {"advantages": 1}
BLOCK = 1024  # tokens that a Triton program holds at once


def advantages_reference(
    logprobs: Tensor, reference: Tensor, values: Tensor, scores: Tensor, offsets: Tensor, kl: float, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """Return ([N] advantages, [N] returns) by the definition, one token at a time, in the inputs' dtype."""
    advantages = torch.zeros_like(values)
    for answer, (start, stop) in enumerate(zip(offsets.tolist(), offsets.tolist()[1:], strict=False)):
        running = after = values.new_zeros(())
        for t in reversed(range(start, stop)):
            reward = -kl * (logprobs[t] - reference[t])
            if t == stop - 1:
                reward = reward + scores[answer]
            running = reward + gamma * after - values[t] + gamma * lam * running
            advantages[t], after = running, values[t]
    return advantages, advantages + values


# --- CPU -------------------------------------------------------------------------------------------------


@numba_jit
def _loop(
    part: Any, first: Any, last: Any, logprobs: Any, reference: Any, values: Any, scores: Any, offsets: Any, numbers: Any,
    advantages: Any, returns: Any,
) -> None:  # fmt: skip
    kl, gamma, decay = numbers[0], numbers[1], numbers[2]
    for a in range(first, last):
        running, after, reward = numbers[3], numbers[3], scores[a]
        for t in range(offsets[a + 1] - 1, offsets[a] - 1, -1):
            reward -= kl * (logprobs[t] - reference[t])
            running = reward + gamma * after - values[t] + decay * running
            after = values[t]
            advantages[t] = running
            returns[t] = running + after
            reward = numbers[3]


def _advantages(
    logprobs: Tensor, reference: Tensor, values: Tensor, scores: Tensor, offsets: Tensor, kl: float, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    inputs = (logprobs, reference, values, scores)
    if not fused_on_cpu(*inputs):
        return advantages_reference(*inputs, offsets, kl, gamma, lam)
    made = torch.empty_like(values), torch.empty_like(values)
    numbers = torch.tensor([kl, gamma, gamma * lam, 0.0], dtype=torch.float32)
    by_rows(_loop, len(scores), max(1, len(values) // max(1, len(scores))), *inputs, offsets, numbers, *made)
    return made


# --- Triton ----------------------------------------------------------------------------------------------


@triton_jit
def _join(decay, value, next_decay, next_value):  # type: ignore[no-untyped-def]
    """Return the composition of two steps a = value + decay * a_before, the second applied to the first's result."""
    return decay * next_decay, value * next_decay + next_value


@triton_jit
def _advantages_kernel(  # type: ignore[no-untyped-def]
    logprobs, reference, values, scores, offsets, advantages, returns, kl, gamma, decay, BLOCK: tl.constexpr
):  # fmt: skip
    """Compute one answer, from its end, BLOCK tokens at a time: lane i has the token i places before the block's last token."""
    answer = tl.program_id(0)
    start = tl.load(offsets + answer)
    stop = tl.load(offsets + answer + 1)
    score = tl.load(scores + answer)
    lane = tl.arange(0, BLOCK)
    carried = 0.0
    for done in range(0, stop - start, BLOCK):
        t = stop - 1 - done - lane
        inside = t >= start
        v = tl.load(values + t, inside, 0.0)
        after = tl.load(values + t + 1, inside & (t + 1 < stop), 0.0)
        reward = kl * (tl.load(reference + t, inside, 0.0) - tl.load(logprobs + t, inside, 0.0))
        delta = tl.where(t == stop - 1, reward + score, reward) + gamma * after - v
        delta = tl.where(lane == 0, delta + decay * carried, delta)
        _, a = tl.associative_scan((tl.full([BLOCK], 1.0, tl.float32) * decay, delta), 0, _join)
        tl.store(advantages + t, a, inside)
        tl.store(returns + t, a + v, inside)
        carried = tl.sum(tl.where(lane == BLOCK - 1, a, 0.0), 0)


def _advantages_triton(
    logprobs: Tensor, reference: Tensor, values: Tensor, scores: Tensor, offsets: Tensor, kl: float, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    made = torch.empty_like(values), torch.empty_like(values)
    if len(scores):
        inputs = (x.contiguous() for x in (logprobs, reference, values, scores, offsets))
        _advantages_kernel[(len(scores),)](*inputs, *made, kl, gamma, gamma * lam, BLOCK=BLOCK, num_warps=4)
    return made


# --- façade ----------------------------------------------------------------------------------------------


_operator = operator(
    "advantages(Tensor logprobs, Tensor reference, Tensor values, Tensor scores, Tensor offsets, float kl, float gamma, float lam)"
    " -> (Tensor, Tensor)",
    _advantages, _advantages_triton, lambda logprobs, reference, values, *_: (torch.empty_like(values), torch.empty_like(values)),
)  # fmt: skip


def advantages(
    logprobs: Tensor, reference: Tensor, values: Tensor, scores: Tensor, lengths: Tensor, kl: float, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """Return ([N] advantages, [N] returns), in the inputs' dtype, without autograd.

    logprobs, reference [N]: log-probabilities of the sampled tokens under policy and reference, nats; values [N]: the critic's
    values of the states before the tokens; scores [A]; lengths [A] int64, adding up to N. `kl`: penalty per nat; `gamma`: discount;
    `lam`: GAE's lambda. The score of an answer without tokens is ignored. Raise ValueError for unequal shapes (not for a wrong sum)."""
    if not logprobs.shape == reference.shape == values.shape or scores.shape != lengths.shape:
        raise ValueError(
            f"log-probs {list(logprobs.shape)}, reference {list(reference.shape)} and values {list(values.shape)} must be alike, "
            f"and so must scores {list(scores.shape)} and lengths {list(lengths.shape)}"
        )
    offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    with torch.no_grad():
        return _operator(logprobs, reference, values, scores, offsets, kl, gamma, lam)  # type: ignore[no-any-return]
