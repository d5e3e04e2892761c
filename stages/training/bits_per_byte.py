"""Bits per byte of unseen documents under a model, an n-gram model and a compressor."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from puna.models.training.packing import batch_by_size

if TYPE_CHECKING:
    from puna.models.transformer import Transformer


class Window(NamedTuple):
    """A part of a document, tokens [start, stop), computed in one forward pass; the tokens [first, stop) are scored."""

    start: int
    stop: int
    first: int


def windows(length: int, context: int) -> list[Window]:
    """Return windows of at most `context` tokens (2 or more, else ValueError) over a document of `length` tokens.

    Every token except the first is scored once. From the second window on, at least context // 2 tokens of the window precede it."""
    if context < 2:
        raise ValueError(f"context must be at least 2 tokens, not {context}")
    results, first = [], 1
    while first < length:
        start = 0 if first == 1 else first - context // 2
        stop = min(start + context, length)
        results.append(Window(start, stop, first))
        first = stop
    return results


def document_nats(
    model: Transformer, documents: Sequence[Sequence[int]], context: int, micro_batch_tokens: int,
    progress: Callable[[int, int], None] | None = None,
) -> list[float]:  # fmt: skip
    """Return -log p of each document of token ids, given its first token, in nats.

    Windows are packed into rows of about `micro_batch_tokens` tokens. Passes are exact if dtype and device allow (`can_be_exact`)."""
    import torch

    from puna.kernels.exact import can_be_exact, exact_passes
    from puna.models.training.objectives.base import Targets, target_logprobs

    nats = [0.0] * len(documents)
    jobs = [(index, window) for index, ids in enumerate(documents) for window in windows(len(ids), context)]
    position = 0
    weight = model.model.embed_tokens.weight
    device, exact = weight.device, can_be_exact(weight.dtype, weight.device)
    for batch in batch_by_size(jobs, lambda job: job[1].stop - job[1].start, micro_batch_tokens):
        targets = Targets.from_documents([documents[index][w.start : w.stop] for index, w in batch]).to(device)
        with torch.no_grad(), exact_passes(weight.dtype, device, exact):
            logprobs = target_logprobs(model, targets).double()
        for (index, window), values in zip(batch, logprobs.split(targets.lengths.tolist()), strict=True):
            # The j-th target of a window is its token j + 1.
            nats[index] -= float(values[window.first - window.start - 1 :].sum())
        position += len(batch)
        if progress:
            progress(position, len(jobs))
    return nats


def bits(nats: float) -> float:
    return nats / math.log(2.0)


Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


class Level(NamedTuple):
    """n-gram counts of one order: sorted `keys` (context x vocabulary + token) and their `counts`; sorted `contexts`, and for each its
    total count (`totals`) and its number of distinct next tokens (`kinds`)."""

    keys: Ints
    counts: Ints
    contexts: Ints
    totals: Ints
    kinds: Ints


class NGrams:
    """An interpolated n-gram model of tokens (Witten and Bell 1991; Chen and Goodman 1999, section 2.4).

    p(w | h) = (c(h w) + N(h) p(w | h')) / (c(h) + N(h)), where c counts, N(h) is the number of distinct tokens that follow h, and h' is h
    without its first token. For the empty h, p(w | h') is the same for all tokens. Contexts do not cross the start of a document."""

    def __init__(self, documents: Sequence[Sequence[int]], order: int, vocabulary: int) -> None:
        self.order, self.vocabulary = order, vocabulary
        self.levels: list[Level] = []
        tokens, places = _flat(documents)
        contexts = np.zeros(len(tokens), np.int64)
        for length in range(order):
            valid = places >= length
            keys, positions, counts = np.unique(contexts[valid] * vocabulary + tokens[valid], return_inverse=True, return_counts=True)
            seen, first, kinds = np.unique(keys // vocabulary, return_index=True, return_counts=True)
            self.levels.append(Level(keys, counts, seen, np.add.reduceat(counts, first), kinds))
            ids = np.full(len(tokens), -1)
            ids[valid] = positions
            contexts = np.roll(ids, 1)

    def nats(self, documents: Sequence[Sequence[int]], *, page: bool = False) -> list[float]:
        """Return -log p of each document, given its first token, in nats.

        `page`: also interpolate with n-gram counts of the document's own earlier tokens (a cache LM), as a baseline for repetition."""
        tokens, places = _flat(documents)
        share = self._share(tokens, places)
        if page:
            share = self._with_page_counts(tokens, places, share)
        logs = np.where(places > 0, -np.log(share), 0.0)
        ends = np.cumsum([len(document) for document in documents])
        return [float(part.sum()) for part in np.split(logs, ends[:-1])]

    def _share(self, tokens: Ints, places: Ints) -> Floats:
        share = np.full(len(tokens), 1.0 / self.vocabulary)
        contexts = np.zeros(len(tokens), np.int64)
        for length, level in enumerate(self.levels):
            mask = (places >= length) & (contexts >= 0)
            at, hit = _find(level.keys, np.where(mask, contexts * self.vocabulary + tokens, -1))
            of, there = _find(level.contexts, np.where(mask, contexts, -1))
            counts, totals, kinds = level.counts[at] * hit, level.totals[of] * there, level.kinds[of] * there
            share = _interpolate(counts, totals, kinds, share)
            contexts = np.roll(np.where(hit, at, -1), 1)
        return share

    def _with_page_counts(self, tokens: Ints, places: Ints, share: Floats) -> Floats:
        """Return `share` interpolated, order by order, with n-gram counts of the earlier tokens in the same document."""
        contexts = np.cumsum(places == 0) - 1
        for length in range(self.order):
            valid = places >= length
            _, grams = np.unique(np.where(valid, contexts * self.vocabulary + tokens, -1), return_inverse=True)
            there = valid.astype(np.int64)
            before = _earlier(grams, there)
            totals, kinds = _earlier(contexts, there), _earlier(contexts, there * (before == 0))
            share = np.where(valid, _interpolate(before, totals, kinds, share), share)
            contexts = np.roll(grams, 1)
        return share


def _flat(documents: Sequence[Sequence[int]]) -> tuple[Ints, Ints]:
    """Return the tokens of all documents as one array, and each token's index in its document."""
    tokens = np.concatenate([np.asarray(document, np.int64) for document in documents])
    return tokens, np.concatenate([np.arange(len(document)) for document in documents])


def _find(keys: Ints, wanted: Ints) -> tuple[Ints, NDArray[np.bool_]]:
    """Return the index of each wanted number in the sorted `keys`, and a mask of the wanted numbers that are in `keys`."""
    at = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return at, keys[at] == wanted


def _earlier(groups: Ints, values: Ints) -> Ints:
    """Return, for each item, the sum of the values before it in its group."""
    order = np.argsort(groups, kind="stable")
    sums = np.cumsum(values[order]) - values[order]
    sorted_groups = groups[order]
    begins = np.flatnonzero(np.r_[True, sorted_groups[1:] != sorted_groups[:-1]])
    sums -= np.repeat(sums[begins], np.diff(np.r_[begins, len(groups)]))
    total = np.empty_like(sums)
    total[order] = sums
    return total


def _interpolate(counts: Ints, totals: Ints, kinds: Ints, lower: Floats) -> Floats:
    """Return Witten-Bell probabilities, interpolated with those of the lower order (`lower`); for an unseen context, `lower` itself."""
    below = np.maximum(totals + kinds, 1)
    return np.where(totals > 0, (counts + kinds * lower) / below, lower)


def dictionary_bits(texts: Sequence[str], training: bytes, level: int = 19) -> list[int]:
    """Return each text's size in bits, compressed by zstd with `training` as the dictionary, without fields for size and checksum."""
    import zstandard

    dictionary = zstandard.ZstdCompressionDict(training, dict_type=zstandard.DICT_TYPE_RAWCONTENT)
    window = max(10, min(27, (len(training) + max(len(text.encode()) for text in texts)).bit_length()))
    plain = {"write_content_size": 0, "write_checksum": 0, "write_dict_id": 0}
    parameters = zstandard.ZstdCompressionParameters.from_level(level, window_log=window, **plain)
    dictionary.precompute_compress(compression_params=parameters)
    compressor = zstandard.ZstdCompressor(compression_params=parameters, dict_data=dictionary)
    return [8 * len(compressor.compress(text.encode())) for text in texts]
