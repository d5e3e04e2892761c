"""Bits per byte: how well a model predicts documents it has not seen."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from puna.models.training.packing import batched

if TYPE_CHECKING:
    from puna.models.transformer import Transformer

class Window(NamedTuple):
    """Tokens start..stop of a document go through the model; those from `first` on are scored."""

    start: int
    stop: int
    first: int


def windows(length: int, context: int) -> list[Window]:
    """Return windows of at most `context` tokens over a document of `length` tokens.

    Every token but the first is scored once, and from the second window on it follows at least
    context // 2 tokens of its own document, so that a long document is not judged by its cold starts.
    """
    if context < 2:
        raise ValueError(f"context must be at least 2 tokens, not {context}")
    found, first = [], 1
    while first < length:
        start = 0 if first == 1 else first - context // 2
        stop = min(start + context, length)
        found.append(Window(start, stop, first))
        first = stop
    return found


def document_nats(
    model: Transformer,
    documents: Sequence[Sequence[int]],
    context: int,
    micro_batch_tokens: int,
    progress: Callable[[int, int], None] | None = None,
) -> list[float]:
    """Return -log p of each document (token ids, given its first token), in nats.

    Windows are packed into rows of about `micro_batch_tokens` tokens, documents side by side.
    """
    import torch

    from puna.models.training.objectives.base import Targets, target_logprobs

    nats = [0.0] * len(documents)
    jobs = [(index, window) for index, ids in enumerate(documents) for window in windows(len(ids), context)]
    done = 0
    device = next(model.parameters()).device
    for batch in batched(jobs, lambda job: job[1].stop - job[1].start, micro_batch_tokens):
        targets = Targets.from_documents([documents[index][w.start : w.stop] for index, w in batch]).to(device)
        with torch.no_grad():
            logprobs = target_logprobs(model, targets).double()
        for (index, window), values in zip(batch, logprobs.split(targets.lengths.tolist()), strict=True):
            # Target j of a window is its token j + 1.
            nats[index] -= float(values[window.first - window.start - 1 :].sum())
        done += len(batch)
        if progress:
            progress(done, len(jobs))
    return nats


def bits(nats: float) -> float:
    return nats / math.log(2.0)
