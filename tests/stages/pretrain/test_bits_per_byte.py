"""Windows, packing and compressors, compared with token-by-token scoring and known sizes."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from puna.models.config import ModelConfig
from puna.models.forest import Forest
from puna.models.training.packing import batch_by_size
from puna.models.transformer import Transformer
from puna.stages.training import bits_per_byte


def model(seed: int = 0) -> Transformer:
    return Transformer(ModelConfig(vocab_size=50, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, initializer_range=0.3), seed=seed)


@given(length=st.integers(1, 300), context=st.integers(2, 64))
def test_every_token_but_the_first_is_scored_once(length: int, context: int) -> None:
    scored: list[int] = []
    for window in bits_per_byte.windows(length, context):
        assert 0 <= window.start < window.first < window.stop <= length
        assert window.stop - window.start <= context
        # Enough of its own document precedes it: half a context, or everything there is.
        assert window.first - window.start >= min(context // 2, window.first)
        scored += range(window.first, window.stop)
    assert scored == list(range(1, length))


def test_nats_equal_scoring_one_token_at_a_time() -> None:
    scorer, context = model(), 8
    documents = [[1, 5, 9, 2], [7] * 30, [3, 4], [1]]
    expected = []
    for ids in documents:
        total = 0.0
        for window in bits_per_byte.windows(len(ids), context):
            for target in range(window.first, window.stop):
                hidden = scorer.hidden(Forest.pack([ids[window.start : target]]))
                logits = scorer.logits(hidden[-1:]).double()
                total -= float(torch.log_softmax(logits, -1)[0, ids[target]].detach())
        expected.append(total)
    for micro_batch_tokens in (8, 20, 1000):
        found = bits_per_byte.document_nats(scorer, documents, context, micro_batch_tokens)
        assert found == pytest.approx(expected, abs=1e-4)
    assert found[3] == 0.0


def test_a_uniform_model_needs_log2_of_the_vocabulary_per_token() -> None:
    flat = Transformer(ModelConfig(vocab_size=64, hidden_size=8, intermediate_size=16, num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1), seed=0)
    with torch.no_grad():
        for parameter in flat.parameters():
            parameter.zero_()
    nats = bits_per_byte.document_nats(flat, [[0, 1, 2, 3, 4]], 16, 16)
    assert bits_per_byte.bits(nats[0]) == pytest.approx(4 * math.log2(64), rel=1e-6)


def test_batches_keep_order_and_limit() -> None:
    groups = list(batch_by_size([3, 3, 9, 1, 1, 1], lambda n: n, 5))
    assert groups == [[3], [3], [9], [1, 1, 1]]
