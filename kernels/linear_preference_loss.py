"""Preference losses of pairs of answers straight from hidden states, without all logits in memory.

An answer's number is the sum (or mean) of its tokens' log-probabilities, less the reference's; a pair's margin is the
chosen answer's less the rejected one's. With b = beta and e the label smoothing:

    sigmoid   -(1 - e) log s(b margin - t) - e log s(t - b margin)   DPO (Rafailov et al. 2023); with means, no reference
                                                                     and a target t SimPO (Meng et al. 2024)
    hinge     max(0, 1 - b margin)                                   SLiC (Zhao et al. 2023)
    ipo       (margin - 1 / (2 b))^2                                 IPO (Azar et al. 2024)

A loss's gradient at a token's log-probability is one number per answer, known as soon as its pairs' margins are. So rows
are worked on in groups of answers that share pairs, and the forward makes dX and dW at once: three matrix products
where a group's logits fit a chunk, four for longer groups, whose logits are computed again. See `output_layer.py`.

Shapes: N tokens, answer by answer, in A answers; M pairs; D width; V vocabulary; C rows of one chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from puna.kernels import linear_token_logprobs as rows
from puna.kernels.linear import product
from puna.kernels.operators import differentiable, operator, wide
from puna.kernels.output_layer import accumulate, chunks, fake_gradients, gradients

Kind = Literal["sigmoid", "hinge", "ipo"]
KINDS = ("sigmoid", "hinge", "ipo")


def preference_losses(margins_M: Tensor, kind: Kind, beta: float, smoothing: float = 0.0, target: float = 0.0) -> Tensor:
    """[M] losses of the margins, in nats for `sigmoid`."""
    if kind == "ipo":
        return (margins_M - 1 / (2 * beta)).square()
    if kind == "hinge":
        return (1 - beta * margins_M).clamp_min(0)
    logits = beta * margins_M - target
    return -(1 - smoothing) * F.logsigmoid(logits) - smoothing * F.logsigmoid(-logits)


def _slopes(margins_M: Tensor, kind: str, beta: float, smoothing: float, target: float) -> Tensor:
    """Derivatives of `preference_losses` by the margins."""
    if kind == "ipo":
        return 2 * (margins_M - 1 / (2 * beta))
    if kind == "hinge":
        return -beta * (beta * margins_M < 1).to(margins_M.dtype)
    p = torch.sigmoid(beta * margins_M - target)
    return beta * (smoothing * p - (1 - smoothing) * (1 - p))


def linear_preference_loss_reference(
    x_ND: Tensor, w_VD: Tensor, targets: Tensor, weights: Tensor, nll: Tensor, lengths: Tensor, chosen: Tensor, rejected: Tensor,
    reference: Tensor, kind: Kind, beta: float, smoothing: float = 0.0, target: float = 0.0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(loss, [M] margins): the definition, in the inputs' dtype; see `linear_preference_loss`."""
    logp = torch.log_softmax(x_ND @ w_VD.T, -1).gather(1, targets[:, None])[:, 0]
    answer = torch.arange(len(lengths), device=lengths.device).repeat_interleave(lengths)
    relative = logp.new_zeros(len(lengths)).index_add(0, answer, logp * weights) - reference.to(logp.dtype)
    margins = relative[chosen] - relative[rejected]
    return preference_losses(margins, kind, beta, smoothing, target).mean() - (nll * logp).sum(), margins


# --- both versions ---------------------------------------------------------------------------------------


def _logprobs(logits_CV: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """([C] log-probabilities, [C] log-sum-exps); the logits stay as they are."""
    logits = logits_CV.to(wide(logits_CV.dtype))
    lse = logits.logsumexp(1)
    return logits.gather(1, targets[:, None])[:, 0] - lse, lse


def _logprobs_triton(logits_CV: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    logp, _, lse = rows._logprob_rows_triton(logits_CV, targets, 1.0)
    return logp, lse


def _groups(lengths: list[int], pairs: list[tuple[int, int]]) -> Iterator[tuple[slice, slice, list[int]]]:
    """(answers, tokens, pairs) of neighbouring answers, so that no pair joins two groups."""
    reach = list(range(len(lengths)))
    members: dict[int, list[int]] = {}
    for number, pair in enumerate(pairs):
        reach[min(pair)] = max(reach[min(pair)], *pair)
        members.setdefault(min(pair), []).append(number)
    first = token = 0
    while first < len(lengths):
        last = at = first
        while at <= last:
            last = max(last, reach[at])
            at += 1
        size = sum(lengths[first : last + 1])
        yield slice(first, last + 1), slice(token, token + size), [m for a in range(first, last + 1) for m in members.get(a, [])]
        first, token = last + 1, token + size


def _by(logprobs: Callable[..., tuple[Tensor, Tensor]], gradient_rows: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, ...]]:
    def preference(
        x_ND: Tensor, w_VD: Tensor, targets: Tensor, weights: Tensor, nll: Tensor, lengths: Tensor, chosen: Tensor, rejected: Tensor,
        reference: Tensor, kind: str, beta: float, smoothing: float, target: float, want_x: bool, want_w: bool,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        high = wide(x_ND.dtype)
        weights, nll, reference = (t.to(high) for t in (weights, nll, reference))
        answer = torch.arange(len(lengths), device=x_ND.device).repeat_interleave(lengths)
        loss, margins = x_ND.new_zeros((), dtype=high), x_ND.new_empty(len(chosen), dtype=high)
        dx_ND, dw_VD = gradients(x_ND, w_VD, want_x, want_w)
        for answers, tokens, members in _groups(lengths.tolist(), list(zip(chosen.tolist(), rejected.tolist(), strict=True))):
            cuts = [slice(tokens.start + c.start, tokens.start + c.stop) for c in chunks(tokens.stop - tokens.start, w_VD)]
            found, logits_CV = [], None
            for cut in cuts:
                logits_CV = product(x_ND[cut], w_VD)
                found.append(logprobs(logits_CV, targets[cut]))
            logp, lse = (torch.cat([f[i] for f in found]) if found else weights.new_empty(0) for i in (0, 1))
            local = answer[tokens] - answers.start
            sums = torch.segment_reduce(logp * weights[tokens], "sum", lengths=lengths[answers], unsafe=True, initial=0)
            relative = sums - reference[answers]
            mine = torch.tensor(members, device=x_ND.device, dtype=torch.int64)
            better, worse = chosen[mine] - answers.start, rejected[mine] - answers.start
            margins[mine] = relative[better] - relative[worse]
            losses = preference_losses(margins[mine], kind, beta, smoothing, target)  # type: ignore[arg-type]
            loss += losses.sum() / max(1, len(chosen)) - (nll[tokens] * logp).sum()
            slopes = _slopes(margins[mine], kind, beta, smoothing, target) / max(1, len(chosen))
            signs_MA = F.one_hot(better, len(relative)) - F.one_hot(worse, len(relative))  # no atomics: an answer may be in several pairs
            by_answer = (slopes[:, None] * signs_MA).sum(0)
            dlogp = by_answer[local] * weights[tokens] - nll[tokens]
            for cut in cuts if want_x or want_w else ():
                here = slice(cut.start - tokens.start, cut.stop - tokens.start)
                logits_CV = logits_CV if len(cuts) == 1 else product(x_ND[cut], w_VD)
                d_CV = gradient_rows(logits_CV, targets[cut], dlogp[here].contiguous(), None, lse[here], lse[here], 1.0)
                if want_x:
                    dx_ND[cut] = product(d_CV, w_VD.T)
                if want_w:
                    accumulate(dw_VD, d_CV, x_ND[cut])
        return loss, margins, dx_ND, dw_VD.to(w_VD.dtype)

    return preference


# --- façade ----------------------------------------------------------------------------------------------


def _fake(x_ND: Tensor, w_VD: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    high = wide(x_ND.dtype)
    return x_ND.new_empty((), dtype=high), x_ND.new_empty(len(rest[4]), dtype=high), *fake_gradients(x_ND, w_VD, *rest[-2:])


_preference_loss = operator(
    "linear_preference_loss(Tensor x, Tensor w, Tensor targets, Tensor weights, Tensor nll, Tensor lengths, Tensor chosen,"
    " Tensor rejected, Tensor reference, str kind, float beta, float smoothing, float target, bool want_x, bool want_w)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    _by(_logprobs, rows._logprob_gradient_rows), _by(_logprobs_triton, rows._logprob_gradient_rows_triton), _fake,
)  # fmt: skip


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(*output[2:])


def _backward(ctx: Any, grad: Tensor | None, *_: Any) -> tuple[Any, ...]:
    if grad is None:
        return (None,) * 15
    dx_ND, dw_VD = ctx.saved_tensors
    need_x, need_w = ctx.needs_input_grad[:2]
    return dx_ND * grad if need_x else None, dw_VD * grad if need_w else None, *(None,) * 13


differentiable("linear_preference_loss", _backward, _setup)


def linear_preference_loss(
    x_ND: Tensor, w_VD: Tensor, targets: Tensor, weights: Tensor, nll: Tensor, lengths: Tensor, chosen: Tensor, rejected: Tensor,
    reference: Tensor, kind: Kind, beta: float, smoothing: float = 0.0, target: float = 0.0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(mean loss of the pairs plus sum_i nll[i] * -log p(targets[i]), [M] margins); the loss is differentiable in x and w.

    targets [N] int64; lengths [A] int64, adding up to N. An answer's number is the sum of weights [N] times its tokens'
    log-probabilities, less reference [A]: weights are 1 (0 at tokens left out), or 1 / length for means. `nll` [N] are the
    weights of a likelihood term, 0 for none. chosen, rejected [M] int64 are answers; answers of one prompt should be
    neighbours, since all between the two of a pair are worked on together.
    """
    if kind not in KINDS or beta <= 0 or not 0 <= smoothing < 0.5:
        raise ValueError(f"kind is one of {KINDS}, beta > 0, 0 <= smoothing < 0.5: {kind!r}, {beta}, {smoothing}")
    if not len(x_ND) == len(targets) == len(weights) == len(nll) or lengths.shape != reference.shape or chosen.shape != rejected.shape:
        raise ValueError("targets, weights and nll need a number for each row of x, reference one for each length, pairs two answers")
    if kind != "sigmoid" and (smoothing or target):
        raise ValueError(f"smoothing and target belong to the loss 'sigmoid', not to {kind!r}")
    graph = torch.is_grad_enabled()
    want = (graph and x_ND.requires_grad, graph and w_VD.requires_grad)
    given = (x_ND, w_VD, targets, weights, nll, lengths, chosen, rejected, reference)
    return _preference_loss(*given, kind, float(beta), float(smoothing), float(target), *want)[:2]  # type: ignore[no-any-return]
