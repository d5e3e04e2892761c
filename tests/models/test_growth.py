"""A tokenizer learns new merges after its own, and a model gets rows for the new tokens."""

from __future__ import annotations

import json
from collections import Counter
from itertools import pairwise

import pytest
import tokenizers
import torch
from hypothesis import given
from hypothesis import strategies as st

from puna.models.config import ModelShape
from puna.models.forest import Forest
from puna.models.tokens.growth import grown_model, grown_tokenizer
from puna.models.tokens.tokenizer import Tokenizer, TokenizerError
from puna.models.transformer import Transformer

OLD = Tokenizer.train(["the wind and the stone and the river, the cold night wind"] * 3, 285)
FIRST = OLD.vocab_size
DOMAIN = ["glucagon lowers glucose, glucagon-like peptide; émigré émigré", "glucose glucose gluten aaaa aaaaa 1234 1234"] * 2
NEW = grown_tokenizer(OLD, DOMAIN, 20)
CONTENT = json.loads(NEW.backend.to_str())["model"]
SHAPE = ModelShape(hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1)
MERGES = [tuple(CONTENT["vocab"][piece] for piece in pair) for pair in CONTENT["merges"]][-20:]


def pieces(id_: int) -> list[int]:
    """Return the old tokens of a token."""
    return [id_] if id_ < FIRST else [old for part in MERGES[id_ - FIRST] for old in pieces(part)]


def replaced(word: tuple[int, ...], pair: tuple[int, int], new: int) -> tuple[int, ...]:
    for i in range(len(word) - 1):
        if word[i : i + 2] == pair:
            return (*word[:i], new, *replaced(word[i + 2 :], pair, new))
    return word


def test_merges_are_those_of_counting_everything_anew() -> None:
    words = Counter(word for text in DOMAIN for word in OLD.words(text))
    texts = {OLD.token(id_) for id_ in range(FIRST)}
    token = dict(enumerate(map(OLD.token, range(FIRST))))
    for new, merge in enumerate(MERGES, FIRST):
        counts = Counter[tuple[int, int]]()
        for word, times in words.items():
            for pair in pairwise(word):
                if token[pair[0]] + token[pair[1]] not in texts:
                    counts[pair] += times
        assert merge == min(counts, key=lambda pair: (-counts[pair], pair)) and counts[merge] > 1
        token[new] = token[merge[0]] + token[merge[1]]
        texts.add(token[new])
        words = Counter({replaced(word, merge, new): times for word, times in words.items()})


@given(st.lists(st.sampled_from(["glucose", " glucagon", " the", "wind", "émi", "gré", "é", "aaa", " 123", "\n", "<|eot_id|>", "ß"])).map("".join))
def test_a_texts_ids_are_the_old_ones_joined(text: str) -> None:
    ids = NEW.encode(text)
    assert [old for id_ in ids for old in pieces(id_)] == OLD.encode(text)
    assert NEW.decode(ids) == text and not NEW.special & {*ids}


def test_the_grown_tokenizer_reads_its_domain_in_fewer_tokens(tmp_path) -> None:
    NEW.save(tmp_path)
    loaded = Tokenizer.load(tmp_path)
    assert loaded.vocab_size == FIRST + 20 and (loaded.bos, loaded.eos, loaded.pad) == (OLD.bos, OLD.eos, OLD.pad)
    assert loaded.encode(" glucose") == [NEW.backend.token_to_id("Ġglucose")] and len(OLD.encode(" glucose")) > 3
    assert len(grown_tokenizer(OLD, ["a b"], 5).backend.get_vocab()) == FIRST  # a pair that occurs once gets no token


def test_tokens_beside_the_vocabulary_keep_their_numbers() -> None:
    """Libraries that read tokenizer.json number added tokens after the vocabulary, which grows."""
    backend = tokenizers.Tokenizer.from_str(OLD.backend.to_str())
    backend.add_special_tokens(["<tool>"])
    grown = grown_tokenizer(OLD.with_backend(backend), DOMAIN, 20)
    assert grown.id_of("<tool>") == FIRST and grown.vocab_size == FIRST + 21 and FIRST in grown.special
    assert grown.encode(" glucose")[0] > FIRST


@pytest.mark.parametrize("tied", [True, False])
def test_old_logits_stay_and_new_rows_are_means(tied: bool) -> None:
    model = Transformer(SHAPE.replace(tie_word_embeddings=tied).complete(FIRST, 32), seed=0)
    grown = grown_model(model, OLD, NEW)
    text = torch.tensor(OLD.encode("the cold glucose"))
    before, after = (each.logits(each.hidden(Forest.pack([text]))) for each in (model, grown))
    assert after.shape == (len(text), FIRST + 20) and torch.equal(before, after[:, :FIRST])
    for name in ("model.embed_tokens", "lm_head"):
        old, new = (each.get_submodule(name).weight for each in (model, grown))
        for id_ in range(FIRST, FIRST + 20):
            whole = not NEW.token_bytes(id_).decode(errors="replace").count("\ufffd")
            torch.testing.assert_close(new[id_], (old[pieces(id_)] if whole else old).mean(0))
    assert (grown.lm_head.weight is grown.model.embed_tokens.weight) == tied
    assert grown_model(model, OLD, OLD) is model


def test_other_tokenizers_are_refused() -> None:
    model = Transformer(SHAPE.complete(FIRST, 32))
    with pytest.raises(ValueError, match="token 262 is 'th' in the model's and 'gl' in the other|token 26. is '.*' in the model's"):
        grown_model(model, OLD, Tokenizer.train(DOMAIN * 3, 290))
    with pytest.raises(ValueError, match="token 284 is .* in the model's and 'None' in the other"):
        grown_model(model, OLD, Tokenizer.train(["the wind and the stone and the river, the cold night wind"] * 3, 284))
    content = json.loads(NEW.backend.to_str())
    content["model"]["merges"].insert(0, content["model"]["merges"].pop())
    with pytest.raises(ValueError, match="merges do not begin with"):
        grown_model(model, OLD, OLD.with_backend(tokenizers.Tokenizer.from_str(json.dumps(content))))
    content = json.loads(OLD.backend.to_str())
    content["model"] = {"type": "WordLevel", "vocab": content["model"]["vocab"], "unk_token": "a"}
    with pytest.raises(TokenizerError, match="only for byte-level BPE"):
        grown_tokenizer(OLD.with_backend(tokenizers.Tokenizer.from_str(json.dumps(content))), DOMAIN, 4)
