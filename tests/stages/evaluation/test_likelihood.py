"""Likelihoods with shared prefixes equal those of each sequence alone; encoding and windows equal the harness's."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from tokenizers import processors

from puna.models.config import ModelConfig
from puna.models.forest import Forest
from puna.models.formats.checkpoint import load_with_tokenizer
from puna.models.tokens.tokenizer import Tokenizer
from puna.models.transformer import Transformer
from puna.stages.evaluation.likelihood import Encoder, Request, likelihoods, share_beginnings
from puna.storage import PunaError
from tests.stages.evaluation.conftest import saved


def alone(model: Transformer, request: Request, longest: int) -> tuple[float, bool]:
    """Return the summed log-likelihood and the greedy flag of one sequence alone, in float64."""
    ids, n = [*request.context, *request.continuation][-(longest + 1) :], len(request.continuation)
    logprobs = torch.log_softmax(model.logits(model.hidden(Forest.pack([ids[:-1]]))).double(), -1).detach()[-n:]
    tokens = torch.tensor(request.continuation)
    return float(logprobs[torch.arange(n), tokens].sum()), bool((logprobs.argmax(-1) == tokens).all())


def test_shared_sequences_score_as_each_alone() -> None:
    shape = ModelConfig(
        vocab_size=4, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, initializer_range=0.3
    )
    model = Transformer(shape, seed=0)
    draw = random.Random(0)
    base = [draw.randrange(3) for _ in range(20)]
    requests = [
        Request([*base[: draw.randrange(1, 20)], *(draw.randrange(3) for _ in range(draw.randrange(3)))], [draw.randrange(3) for _ in range(draw.randrange(1, 4))])
        for _ in range(30)
    ]
    expected = [alone(model, request, 12) for request in requests]  # contexts of more than 12 tokens lose their beginning
    first = likelihoods(model, requests, 12, 16)
    for limit in (16, 64, 10_000):
        found = likelihoods(model, requests, 12, limit)
        assert found == first  # bit by bit, whatever else was computed in the batch
        assert [one.sum for one in found] == pytest.approx([value for value, _ in expected], abs=1e-4)
        assert [one.greedy for one in found] == [greedy for _, greedy in expected]
    assert {greedy for _, greedy in expected} == {True, False}


def test_equal_beginnings_are_one_node() -> None:
    forest, paths = share_beginnings([[1, 2, 3], [1, 2, 3, 4], [1, 2, 5], [6]])
    assert forest.tokens.tolist() == [1, 2, 3, 4, 5, 6]
    assert forest.end.tolist() == [5, 5, 4, 4, 5, 6]
    assert forest.positions.tolist() == [0, 1, 2, 3, 2, 0]
    assert paths == [[0, 1, 2], [0, 1, 2, 3], [0, 1, 4], [5]]


def test_context_and_continuation_are_encoded_as_one(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(saved(tmp_path / "m"))
    encoder = Encoder(tokenizer)
    assert encoder.lead == [tokenizer.bos]  # tokenizers trained by Puna add BOS
    request = encoder.pair("Question: what is 1", " and 2?")
    whole = [tokenizer.bos, *tokenizer.encode("Question: what is 1 and 2?")]
    assert [*request.context, *request.continuation] == whole and request.context[0] == tokenizer.bos
    # A space at the context's end belongs to the continuation; an empty context is BOS.
    assert encoder.pair("Question: ", "what") == encoder.pair("Question:", " what")
    assert encoder.pair("", "what") == Request([tokenizer.bos], tokenizer.encode("what"))
    tokenizer.backend.post_processor = processors.Sequence([])
    assert Encoder(tokenizer).lead == [] and Encoder(tokenizer).prefix == tokenizer.bos


def test_windows_score_each_token_once_with_bos_scored(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(saved(tmp_path / "m"))
    encoder, text = Encoder(tokenizer), "grass stones cars cat dog fish"
    ids = [tokenizer.bos, *tokenizer.encode(text)]
    first, *others = encoder.document(text, 4)
    assert first == Request([tokenizer.bos], ids[:4])  # BOS after the prefix is scored, too
    assert [token for one in (first, *others) for token in one.continuation] == ids
    for one in others:
        # As in the harness, the last window's first token sees four tokens: input and scored tokens are at most five.
        assert len(one.context) + len(one.continuation) == 5
        start = len(ids) if one is others[-1] else ids.index(one.continuation[0], 4) + len(one.continuation)
        assert start and one.context[-1] == ids[ids.index(one.continuation[0], 4) - 1]
    assert encoder.document(text, 100) == [Request([tokenizer.bos], ids)]


def test_a_continuation_longer_than_the_context_is_refused(tmp_path: Path) -> None:
    model, _ = load_with_tokenizer(saved(tmp_path / "m"))
    with pytest.raises(PunaError, match="continuation 0 has 5 tokens; the model's context allows 1 to 4"):
        likelihoods(model, [Request([1], [1, 2, 3, 4, 5])], 4, 100)
