"""How a step's tokens are drawn.

Log-probs are those of the model's own distribution at the request's temperature, before penalties, masks and cuts, at temperature 1 when
the draw is greedy: what `Transformer.token_logprobs` gives for the same token at the same temperature.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from puna.kernels.operators import wide
from puna.kernels.token_cut import cut_draw
from puna.kernels.token_draw import LIKELIEST, token_draw
from puna.models.sampling_params import SamplingParams


class Draw(NamedTuple):
    """One row's draw: its parameters, a number in [0, 1), and the tokens of the prompt and of the answer so far."""

    params: SamplingParams
    uniform: float
    prompt: Sequence[int]
    answer: Sequence[int]


def draw(logits_SV: Tensor, rows: Sequence[Draw], settled: Mapping[int, int] = {}) -> tuple[list[int], list[float]]:
    """One token per row and its log-prob, by the inverse of the cumulative distribution at the row's number, or as `settled` says.

    Raises ValueError where a row of logits has a NaN or no finite entry, or a mask allows no token.
    """
    scale = torch.tensor([1.0 / (row.params.temperature or 1.0) for row in rows], dtype=wide(logits_SV.dtype))
    uniforms = torch.tensor([row.uniform if row.params.temperature else LIKELIEST for row in rows], dtype=torch.float64)
    tokens, lse = token_draw(logits_SV, scale, uniforms)
    if not all(map(math.isfinite, lse.tolist())):
        raise ValueError("the model's logits are not finite: its weights or its training have diverged")
    special = [i for i, row in enumerate(rows) if row.params.cuts or row.params.shifts]
    for cuts in (False, True) if special else ():
        changed = [i for i in special if rows[i].params.cuts == cuts]
        if changed:
            z_SV = logits_SV[torch.tensor(changed, device=logits_SV.device)]
            for z_V, number in zip(z_SV, changed, strict=True):
                shift(z_V, rows[number])
            given = (z_SV, scale[changed], uniforms[changed])
            tokens[changed] = cut_draw(*given, [rows[i].params for i in changed]) if cuts else token_draw(*given)[0]
    for row, token in settled.items():
        tokens[row] = token
    logprobs = logits_SV.gather(1, tokens[:, None])[:, 0] * scale.to(logits_SV.device) - lse
    return tokens.tolist(), logprobs.tolist()


def shift(z_V: Tensor, row: Draw) -> None:
    """Penalties, biases and the mask of a row, in place."""
    params = row.params
    if params.repetition_penalty != 1:
        seen = torch.tensor(sorted({*row.prompt, *row.answer}), device=z_V.device)
        z_V[seen] = torch.where(z_V[seen] > 0, z_V[seen] / params.repetition_penalty, z_V[seen] * params.repetition_penalty)
    if row.answer and (params.presence_penalty or params.frequency_penalty):
        found, times = np.unique(np.asarray(row.answer), return_counts=True)
        penalty = params.presence_penalty + params.frequency_penalty * times
        z_V[torch.from_numpy(found).to(z_V.device)] -= torch.from_numpy(penalty).to(z_V)
    for token, bias in params.logit_bias.items():
        z_V[token] += bias
    if params.mask is not None:
        allowed = params.mask(row.answer)
        if not bool(allowed.any()):
            raise ValueError(f"the mask allows no token after {list(row.answer)}")
        z_V.masked_fill_(~allowed.to(z_V.device), -math.inf)
