"""Growth of a vocabulary: further merges for a byte-pair tokenizer, and the rows of a model for new tokens."""

from __future__ import annotations

import heapq
import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import tokenizers

from puna.models.tokens.tokenizer import Tokenizer, TokenizerError

if TYPE_CHECKING:
    from puna.models.transformer import Transformer

Pair = tuple[int, int]


def grown_tokenizer(tokenizer: Tokenizer, texts: Iterable[str], count: int) -> Tokenizer:
    """Return the tokenizer with up to `count` further tokens, numbered from its `vocab_size` on. TokenizerError if it is no BPE of words.

    They join the pairs of tokens that are most frequent within words of the texts. As the old merges come first, a text's ids are the old
    ones with some joined.
    """
    content = json.loads(tokenizer.backend.to_str())
    model, added = content["model"], content["added_tokens"]
    unfit = ("byte_fallback", "continuing_subword_prefix", "end_of_word_suffix", "dropout")
    if model["type"] != "BPE" or content["pre_tokenizer"] is None or any(model.get(name) for name in unfit):
        raise TokenizerError("further tokens are learned for byte-level BPE only, as GPT-2, Llama 3, Qwen and SmolLM have it")
    first, words = tokenizer.vocab_size, Counter[tuple[int, ...]]()
    for text in texts:
        words.update(tokenizer.words(text))
    # A token beside the vocabulary would be numbered anew, behind the new ones.
    model["vocab"] = {**{token["content"]: token["id"] for token in added}, **model["vocab"]}
    pieces = {id_: text for text, id_ in model["vocab"].items()}
    whole = {token["id"] for token in added} | {model["vocab"].get(model.get("unk_token"), -1)}
    for id_, pair in enumerate(_merges(words, count, first, pieces, whole), first):
        model["vocab"][pieces[id_]] = id_
        model["merges"].append([pieces[part] for part in pair])
    return tokenizer.with_backend(tokenizers.Tokenizer.from_str(json.dumps(content)))


def _merges(words: Mapping[tuple[int, ...], int], count: int, first: int, pieces: dict[int, str], whole: set[int]) -> list[Pair]:
    """Return the most frequent pairs, each counted after those before it are joined; add the new tokens' texts to `pieces`.

    whole: tokens that join no others. Of pairs as frequent, that of the smallest ids comes first."""
    current, texts = sorted(words.items()), set(pieces.values())
    counts, places = Counter[Pair](), defaultdict[Pair, set[int]](set)
    for place, (word, times) in enumerate(current):
        for pair in pairwise(word):
            counts[pair] += times
            places[pair].add(place)
    queue, merges = [(-times, pair) for pair, times in counts.items()], list[Pair]()
    heapq.heapify(queue)
    while queue and len(merges) < count:
        times, pair = heapq.heappop(queue)
        if counts[pair] < 2 or whole & {*pair} or (text := pieces[pair[0]] + pieces[pair[1]]) in texts:
            continue
        if counts[pair] != -times:  # other merges took some of them
            heapq.heappush(queue, (-counts[pair], pair))
            continue
        new, changed = first + len(merges), set[Pair]()
        merges.append(pair)
        pieces[new] = text
        texts.add(text)
        for place in places.pop(pair):
            word, times = current[place]
            for other in pairwise(word):
                counts[other] -= times
            joined = _joined(word, pair, new)
            current[place] = (joined, times)
            for other in pairwise(joined):
                counts[other] += times
                places[other].add(place)
                changed.add(other)
        for other in sorted(changed):
            heapq.heappush(queue, (-counts[other], other))
    return merges


def _joined(word: Sequence[int], pair: Pair, new: int) -> tuple[int, ...]:
    """Return a word with each such pair, from the left, as one token."""
    ids: list[int] = []
    for id_ in word:
        if ids and (ids[-1], id_) == pair:
            ids[-1] = new
        else:
            ids.append(id_)
    return tuple(ids)


def grown_model(model: Transformer, old: Tokenizer, new: Tokenizer) -> Transformer:
    """Return the model with rows for the tokens that `new` has beyond those of `old`; raise ValueError if it does not begin with them.

    A row is the mean of the rows of the old tokens that the new token's text was; of all rows if it is no text (Hewitt 2021). Old rows, and
    so the logits of old tokens, stay.
    """
    import torch

    from puna.models.transformer import Transformer

    first = old.vocab_size
    for id_ in range(first):
        if old.token(id_) != new.token(id_):
            raise ValueError(f"token {id_} is {old.token(id_)!r} in the model's and {new.token(id_)!r} in the other")
    merges, others = (json.loads(each.backend.to_str())["model"].get("merges") or [] for each in (old, new))
    if others[: len(merges)] != merges:
        raise ValueError("the other's merges do not begin with the model's")
    if new.vocab_size == first:
        return model
    parts = [_old_ids(new.token_bytes(id_), old) or list(range(first)) for id_ in range(first, new.vocab_size)]
    weights = model.state_dict()
    for name in weights.keys() & {"model.embed_tokens.weight", "lm_head.weight"}:
        rows = weights[name]
        weights[name] = torch.cat([rows[:first], *(rows[ids].mean(0, keepdim=True) for ids in parts), rows[new.vocab_size :]])
    grown = Transformer(model.config.replace(vocab_size=max(model.config.vocab_size, new.vocab_size)))
    grown.load_state_dict(weights)
    return grown.to(next(model.parameters()).device)


def _old_ids(piece: bytes | None, old: Tokenizer) -> list[int]:
    """Return the old tokens of a new one's bytes; none for a special token and for part of a character."""
    try:
        return old.encode((piece or b"").decode())
    except UnicodeDecodeError:
        return []
