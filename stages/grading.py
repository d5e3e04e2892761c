"""Grades as expectations over a language model's answer probabilities, as in G-Eval (Liu et al., arXiv 2303.16634, section 2)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from puna.storage import PunaError

if TYPE_CHECKING:
    from torch import Tensor


def tokens_apart(ids: Sequence[list[int]], answers: Sequence[str]) -> tuple[list[int], list[int]]:
    """Return the common prefix of the encoded answers, and each answer's first token after it. `ids`: each answer's token ids. Raise
    PunaError if an answer has no such token, or two have the same one."""
    shared = 0
    while all(len(one) > shared for one in ids) and len({one[shared] for one in ids}) == 1:
        shared += 1
    tokens = [one[shared] if len(one) > shared else -1 for one in ids]
    if -1 in tokens or len(set(tokens)) < len(tokens):
        raise PunaError(f"judge: the model's tokenizer does not tell the answers {', '.join(answers)} apart by one token; "
            "change the answers, or choose another model")  # fmt: skip
    return ids[0][:shared], tokens


def mean_grades(logits: Tensor, tokens: Sequence[int], values: Sequence[float]) -> tuple[Tensor, Tensor]:
    """Return the mean grade, float64 [n], and the total probability of all answer tokens, float64 [n].

    The mean of `values` is weighted by the probabilities of `tokens`, normalized over these tokens. `logits` [n, vocabulary]."""
    import torch

    logits = logits.double()
    answers = logits[:, list(tokens)]
    weights = torch.tensor(list(values), dtype=torch.float64, device=logits.device)
    return answers.softmax(-1) @ weights, (answers.logsumexp(-1) - logits.logsumexp(-1)).exp()
