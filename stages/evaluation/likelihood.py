"""Log-likelihoods of continuations, following the conventions of lm-evaluation-harness 0.4.13.

Context and continuation are encoded together and split after as many tokens as the context alone has. Common prefixes of token sequences,
such as the question before several options or a task's few-shot examples, are computed once. Where passes can be exact
(`kernels/exact.py`), a likelihood has the same bits in every batch; this costs no time and halves the rounding error."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from puna.storage import PunaError

if TYPE_CHECKING:
    from torch import Tensor

    from puna.models.forest import Forest
    from puna.models.tokens.tokenizer import Tokenizer
    from puna.models.transformer import Transformer

LOGITS = 1 << 24  # maximum number of logits in memory at once


class Request(NamedTuple):
    """Token ids of a context and of the continuation to score."""

    context: list[int]
    continuation: list[int]


class Likelihood(NamedTuple):
    """The log-likelihood of a continuation in nats, and whether each of its tokens was the model's likeliest (`greedy`)."""

    sum: float
    greedy: bool


class Encoder:
    """A tokenizer with the harness's conventions. `lead`: tokens that the tokenizer puts before every text (BOS, or none). `prefix`: the
    token that stands for an empty context (BOS, or end of text if there is no BOS)."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        plain, whole = tokenizer.encode("a"), tokenizer.backend.encode("a").ids
        self.lead: list[int] = whole[: next(at for at in range(len(whole)) if whole[at : at + len(plain)] == plain)]
        self.prefix = tokenizer.begin

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text, after `lead` (BOS, or none)."""
        return [*self.lead, *self.tokenizer.encode(text)]

    def encode_chat(self, text: str, mark: str | None) -> list[int]:
        """Return the token ids of text from a chat template, after `lead` unless the text starts with it. `mark`: see `Tokenizer.guard`."""
        ids = self.tokenizer.encode_markup(text, mark)[0]
        return ids if ids[: len(self.lead)] == self.lead else [*self.lead, *ids]

    def pair(self, context: str, continuation: str, encode: Callable[[str], list[int]] | None = None) -> Request:
        """Return a context and a continuation, encoded together. Trailing white space of the context is moved to the continuation."""
        if not context:
            ids = self.tokenizer.encode(continuation)
            return Request([self.prefix], ids) if ids[:1] != [self.prefix] else Request(ids[:1], ids[1:])
        encode = encode or self.encode
        before = encode(context.rstrip())
        return Request(before or [self.prefix], encode(context + continuation)[len(before) :])

    def document(self, text: str, longest: int) -> list[Request]:
        """Return windows of at most `longest` tokens that score each token of a text once, including its BOS.

        Each later window has the previous token as context; the last window is filled up with earlier tokens."""
        ids = self.encode(text)
        windows = [Request([self.prefix], ids[:longest])] if ids else []
        for start in range(longest, len(ids), longest):
            stop = min(start + longest, len(ids))
            windows.append(Request(ids[stop - longest - 1 : start], ids[start:stop]))
        return windows


def likelihoods(
    model: Transformer, requests: Sequence[Request], longest: int, micro_batch_tokens: int,
    progress: Callable[[int, int], None] | None = None,
) -> list[Likelihood]:  # fmt: skip
    """Return each continuation's likelihood. Contexts beyond `longest` lose their beginning. Raise PunaError for empty or overlong ones."""
    import torch

    from puna.kernels.exact import can_be_exact, exact_passes

    weight = model.model.embed_tokens.weight
    exact = can_be_exact(weight.dtype, weight.device)
    results = [Likelihood(0.0, True)] * len(requests)
    done = 0
    for batch in batches(requests, longest, micro_batch_tokens):
        forest, nodes = share_beginnings([ids for _, ids in batch])
        counts = [len(requests[number].continuation) for number, _ in batch]
        positions = torch.tensor([node for path, count in zip(nodes, counts, strict=True) for node in path[len(path) - count :]])
        targets = torch.tensor([token for number, _ in batch for token in requests[number].continuation])
        with torch.no_grad(), exact_passes(weight.dtype, weight.device, exact):
            logprobs, top = _score(model, forest, positions, targets)
        parts = zip(logprobs.double().split(counts), top.split(counts), strict=True)
        for (number, _), (values, likeliest) in zip(batch, parts, strict=True):
            results[number] = Likelihood(float(values.sum()), bool(likeliest.all()))
        done += len(batch)
        if progress:
            progress(done, len(requests))
    return results


def batches(requests: Sequence[Request], longest: int, limit: int) -> Iterator[list[tuple[int, list[int]]]]:
    """Yield batches of (request index, input ids), sorted by ids, of at most about `limit` tokens; a common prefix counts once. Raise
    PunaError for an empty or overlong continuation."""
    inputs = []
    for number, (context, continuation) in enumerate(requests):
        if not 0 < len(continuation) <= longest:
            problem = f"has {len(continuation):,} tokens" if continuation else "has no token of its own"
            raise PunaError(f"continuation {number} {problem}; the model's context allows 1 to {longest:,}")
        inputs.append((number, [*context, *continuation][-(longest + 1) :][:-1]))
    inputs.sort(key=lambda pair: pair[1])
    group: list[tuple[int, list[int]]] = []
    size = 0
    for number, ids in inputs:
        new = len(ids) - (_common(group[-1][1], ids) if group else 0)
        if group and size + new > limit:
            yield group
            group, size, new = [], 0, len(ids)
        group.append((number, ids))
        size += new
    if group:
        yield group


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """Return the length of the longest common prefix of two sequences."""
    return next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def share_beginnings(sequences: Sequence[Sequence[int]]) -> tuple[Forest, list[list[int]]]:
    """Return a forest in which sorted sequences share their prefixes, and the positions of each sequence's tokens in the forest's row."""
    import torch

    from puna.models.forest import Forest

    tokens: list[int] = []
    ends: list[int] = []
    depths: list[int] = []
    paths: list[list[int]] = []
    path: list[int] = []
    for before, ids in itertools.pairwise([(), *sequences]):
        prefix = _common(before, ids)
        for node in path[prefix:]:
            ends[node] = len(tokens)
        path = [*path[:prefix], *range(len(tokens), len(tokens) + len(ids) - prefix)]
        tokens += ids[prefix:]
        depths += range(prefix, len(ids))
        ends += [0] * (len(ids) - prefix)
        paths.append(path)
    for node in path:
        ends[node] = len(tokens)
    return Forest(torch.tensor(tokens), torch.tensor(ends, dtype=torch.int32), torch.tensor(depths)), paths


def _score(model: Transformer, forest: Forest, positions: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return, as CPU tensors, log p of each target at its position, and whether it is the likeliest token there."""
    import torch

    device = next(model.parameters()).device
    hidden = model.hidden(forest.to(device))
    places, at = torch.unique(positions, return_inverse=True)
    logprobs, top = torch.empty(len(targets)), torch.empty(len(targets), dtype=torch.bool)
    size = max(1, LOGITS // model.config.vocab_size)
    for start in range(0, len(places), size):
        logits = model.logits(hidden[places[start : start + size].to(device)]).float()
        indices = ((at >= start) & (at < start + size)).nonzero()[:, 0]
        rows, tokens = (at[indices] - start).to(device), targets[indices].to(device)
        logprobs[indices] = (logits[rows, tokens] - logits.logsumexp(-1)[rows]).cpu()
        top[indices] = (logits.argmax(-1)[rows] == tokens).cpu()
    return logprobs, top
