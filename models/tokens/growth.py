"""Growth of a vocabulary: further merges for a byte-pair tokenizer, and embedding and output rows for the new tokens."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import TYPE_CHECKING

import tokenizers
from tokenizers import models, pre_tokenizers, trainers

from puna.models.tokens.tokenizer import Tokenizer, TokenizerError

if TYPE_CHECKING:
    from puna.models.transformer import Transformer

SIGN = 0x10000  # code point that stands for token 0 while merges are learned; SIGN + i stands for token i


def grown_tokenizer(tokenizer: Tokenizer, texts: Iterable[str], count: int) -> Tokenizer:
    """Return the tokenizer with up to `count` further tokens after its own. Raise TokenizerError if it is not a byte-level BPE tokenizer.

    New tokens merge the token pairs that are most frequent, and occur at least twice, within words of the texts. Old merges come first, so
    the new ids of a text are its old ids, some of them merged."""
    content = json.loads(tokenizer.backend.to_str())
    model, first = content["model"], tokenizer.vocab_size
    unfit = ("byte_fallback", "continuing_subword_prefix", "end_of_word_suffix", "dropout")
    if model["type"] != "BPE" or content["pre_tokenizer"] is None or any(model.get(name) for name in unfit):
        raise TokenizerError("new tokens can be learned only for byte-level BPE, as in GPT-2, Llama 3, Qwen and SmolLM")
    # Added tokens join the vocabulary: else they would be renumbered after the new ones.
    vocabulary = model["vocab"] = {**{token["content"]: token["id"] for token in content["added_tokens"]}, **model["vocab"]}
    pieces = {id_: text for text, id_ in vocabulary.items()}
    learned = tokenizers.Tokenizer(models.BPE())
    learned.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    signs = (" ".join("".join(chr(SIGN + id_) for id_ in word) for word in tokenizer.words(text)) for text in texts)
    # More merges than needed, because pairs whose text is already a token are skipped.
    size = len(pieces) + count + count // 8 + 64
    trainer = trainers.BpeTrainer(
        vocab_size=size, initial_alphabet=[chr(SIGN + id_) for id_ in pieces], min_frequency=2, show_progress=False
    )
    learned.train_from_iterator(signs, trainer)
    for pair in json.loads(learned.to_str())["model"]["merges"]:
        parts = ["".join(pieces[ord(sign) - SIGN] for sign in part) for part in pair]
        if len(vocabulary) < len(pieces) + count and "".join(parts) not in vocabulary and vocabulary.keys() >= {*parts}:
            vocabulary["".join(parts)] = first + len(vocabulary) - len(pieces)
            model["merges"].append(parts)
    return tokenizer.with_backend(tokenizers.Tokenizer.from_str(json.dumps(content)))


def grown_model(model: Transformer, old: Tokenizer, new: Tokenizer) -> Transformer:
    """Return a model of `model`'s weights with rows for the tokens that `new` adds, or `model` if there are none.

    A new row is the mean of the old rows of the tokens that encode the new token's text; of all old rows if no token does (Hewitt 2021).
    Old rows, and so the logits of old tokens, do not change. Raise ValueError if `new` changes old tokens or merges."""
    import torch

    from puna.models.transformer import Transformer

    first = old.vocab_size
    for id_ in range(first):
        if old.token(id_) != new.token(id_):
            raise ValueError(f"token {id_} is {old.token(id_)!r} in the model's and {new.token(id_)!r} in the other")
    merges, others = (json.loads(each.backend.to_str())["model"].get("merges") or [] for each in (old, new))
    if others[: len(merges)] != merges:
        raise ValueError("the other tokenizer's merges do not begin with the merges of the model's tokenizer")
    if new.vocab_size == first:
        return model
    parts = [_old_ids(new.token_bytes(id_), old) or list(range(first)) for id_ in range(first, new.vocab_size)]
    weights = model.state_dict()
    for name in weights.keys() & {"model.embed_tokens.weight", "lm_head.weight"}:
        rows = weights[name]
        weights[name] = torch.cat([rows[:first], *(rows[ids].mean(0, keepdim=True) for ids in parts), rows[new.vocab_size :]])
    with torch.device("meta"):
        grown = Transformer(model.config.replace(vocab_size=max(model.config.vocab_size, new.vocab_size)))
    grown.load_state_dict(weights, assign=True)
    if grown.config.tie_word_embeddings:
        grown.lm_head.weight = grown.model.embed_tokens.weight
    return grown


def _old_ids(piece: bytes | None, old: Tokenizer) -> list[int]:
    """Return the old token ids that encode `piece`, a new token's bytes; [] for a special token (None) or part of a character."""
    try:
        return old.encode((piece or b"").decode())
    except UnicodeDecodeError:
        return []
