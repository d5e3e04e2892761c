"""Sampling of a step's tokens from the model's logits.

Log-probs are taken from the model's own distribution at the request's temperature (1 for a greedy draw), before penalties, biases,
masks, top-k, top-p and min-p: `Transformer.token_logprobs` returns the same values."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from puna.kernels.operators import wide
from puna.kernels.token_draw import LIKELIEST, invert, token_draw
from puna.models.generation.sampling_params import SamplingParams

NUCLEUS = 128  # number of likeliest tokens that `_likeliest` sorts first; flat distributions need more
DIVERGED = "the model's logits are not finite: its weights or its training have diverged"


class RowError(ValueError):
    """An error for a row whose token cannot be drawn. `asked`: True if the request's parameters are at fault, False if the model is."""

    def __init__(self, message: str, asked: bool = True) -> None:
        super().__init__(message)
        self.asked = asked


class Draw(NamedTuple):
    """One row's draw: its parameters, a random number in [0, 1), the prompt's tokens and, if `params.shifts`, the answer's so far."""

    params: SamplingParams
    uniform: float
    prompt: Sequence[int]
    answer: Sequence[int]


class Drawn(NamedTuple):
    """A token and a log-prob for each row. The values of a row in `errors` are meaningless."""

    tokens: list[int]
    logprobs: list[float]
    errors: dict[int, RowError]


def draw(logits_SV: Tensor, rows: Sequence[Draw], settled: Mapping[int, int] = {}) -> Drawn:
    """Draw one token per row by the inverse of the cumulative distribution at the row's `uniform`; a row in `settled` gets its token from
    there. A row fails alone if its logits have a NaN or no finite entry, or if its biases, penalties or mask leave nothing to draw from."""
    scale = torch.tensor([1.0 / (row.params.temperature or 1.0) for row in rows], dtype=wide(logits_SV.dtype))
    uniforms = torch.tensor([row.uniform if row.params.temperature else LIKELIEST for row in rows], dtype=torch.float64)
    tokens, lse = token_draw(logits_SV, scale, uniforms)
    errors = {row: RowError(DIVERGED, asked=False) for row, total in enumerate(lse.tolist()) if not math.isfinite(total)}
    special = [i for i, row in enumerate(rows) if row.params.cuts or row.params.shifts]
    for cuts in (False, True) if special else ():
        changed = [i for i in special if rows[i].params.cuts == cuts and i not in errors]
        if changed:
            z_SV = logits_SV[torch.tensor(changed, device=logits_SV.device)]
            errors |= {changed[i]: error for i, error in shift_rows(z_SV, [rows[i] for i in changed], scale[changed]).items()}
            if cuts:
                p_SV = torch.softmax(z_SV * scale[changed].to(z_SV)[:, None], -1)
                kept_SN, order_SN = _likeliest(p_SV, [rows[i].params for i in changed])
                tokens[changed] = order_SN.gather(1, invert(kept_SN, uniforms[changed].to(z_SV.device))[:, None])[:, 0]
            else:
                tokens[changed] = token_draw(z_SV, scale[changed], uniforms[changed])[0]
    for row, token in settled.items():
        tokens[row] = token
    logprobs = logits_SV.gather(1, tokens[:, None])[:, 0] * scale.to(logits_SV.device) - lse
    return Drawn(tokens.tolist(), logprobs.tolist(), errors)


def shift_rows(z_SV: Tensor, rows: Sequence[Draw], scale_S: Tensor) -> dict[int, RowError]:
    """Apply `shift` to the rows, in place. Return the errors of rows that cannot be drawn from; their logits become 0."""
    errors: dict[int, RowError] = {}
    for number, row in enumerate(rows):
        try:
            if row.params.shifts:
                shift(z_SV[number], row)
        except RowError as error:
            errors[number] = error
    if any(row.params.shifts for row in rows):
        for number, top in enumerate((z_SV.amax(1) * scale_S.to(z_SV)).tolist()):
            if not math.isfinite(top):
                message = "biases and penalties leave no finite logit to draw from: make logit_bias and repetition_penalty milder"
                errors.setdefault(number, RowError(message))
    for number in errors:
        z_SV[number] = 0
    return errors


def shift(z_V: Tensor, row: Draw) -> None:
    """Apply penalties, biases and the mask of a row, in place. Raise RowError for a bias on an unknown token or a failing or empty mask."""
    params = row.params
    if params.repetition_penalty != 1:
        context = torch.tensor(sorted({*row.prompt, *row.answer}), device=z_V.device)
        z_V[context] = torch.where(z_V[context] > 0, z_V[context] / params.repetition_penalty, z_V[context] * params.repetition_penalty)
    if row.answer and (params.presence_penalty or params.frequency_penalty):
        tokens, times = np.unique(np.asarray(row.answer), return_counts=True)
        penalty = params.presence_penalty + params.frequency_penalty * times
        z_V[torch.from_numpy(tokens).to(z_V.device)] -= torch.from_numpy(penalty).to(z_V)
    if params.logit_bias:
        tokens_B, biases_B = params.biases
        lowest, highest = (int(bound) for bound in tokens_B.aminmax())
        if lowest < 0 or highest >= len(z_V):
            raise RowError(f"logit_bias names token {min(lowest, 0) or highest}: token ids lie in 0 to {len(z_V) - 1}")
        z_V[tokens_B.to(z_V.device)] += biases_B.to(z_V.device, wide(z_V.dtype))
    if params.mask is not None:
        try:
            allowed = params.mask(row.answer)
            z_V.masked_fill_(~allowed.to(z_V.device), -math.inf)
        except Exception as error:  # a mask is the request's own code: its exceptions end only its row
            raise RowError(f"the mask failed after {len(row.answer)} tokens: {error}") from error
        if not bool(allowed.any()):
            raise RowError(f"the mask allows no token after {list(row.answer[-8:])}")


def cut(p_SV: Tensor, cuts: Sequence[SamplingParams]) -> Tensor:
    """Return the probabilities p_SV with all but each row's top-k, top-p and min-p tokens set to 0, renormalized, in p_SV's dtype."""
    kept_SN, order_SN = _likeliest(p_SV, cuts)
    whole = kept_SN.sum(-1, keepdim=True)
    return torch.zeros_like(p_SV).scatter_(1, order_SN, (kept_SN / whole).to(p_SV))


def _likeliest(p_SV: Tensor, cuts: Sequence[SamplingParams]) -> tuple[Tensor, Tensor]:
    """Return probabilities and ids of the tokens that each row keeps, likeliest first; other probabilities are zero."""
    V = p_SV.shape[-1]
    limits = zip(*((row.top_k if row.top_k < V else 0, row.top_p, row.min_p) for row in cuts), strict=True)
    top_k, top_p, min_p = (torch.tensor(limit, device=p_SV.device)[:, None] for limit in limits)
    top_k = torch.where(top_k == 0, V, top_k)
    size = min(max([NUCLEUS, *(row.top_k + 1 for row in cuts if row.top_k < V)]), V)  # top-p is a share of all of the top k
    while True:
        p, order = p_SV.topk(size, sorted=True)
        p = p.double() * (torch.arange(size, device=p.device) < top_k)
        before = p.cumsum(-1) - p
        whole = torch.where(top_k < size, p.sum(-1, keepdim=True), 1.0)
        inside = (before < top_p * whole) & (p >= min_p * p[:, :1])
        if size == V or not bool(inside[:, -1].any()):
            return p * inside, order
        size = min(8 * size, V)
