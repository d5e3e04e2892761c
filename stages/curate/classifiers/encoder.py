"""Documents as vectors: the mean of an encoder's last hidden states."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from puna.stages.curate.classifiers.device import Place, reading

Encode = Callable[[str], NDArray[np.float32]]


def embedded(texts: Sequence[str], place: Place, max_tokens: int) -> NDArray[np.float32]:
    """Mean hidden states of the first `max_tokens` tokens of each text, float32[n, D].

    One text at a time: a vector must not depend on its company.
    """
    with reading():
        encode, width = (_own if place.own else _hugging_face)(place.path, max_tokens)
        return np.array([encode(text) for text in texts], np.float32).reshape(len(texts), width)


def _own(folder: str, limit: int) -> tuple[Encode, int]:
    import torch

    from puna.models.forest import Forest
    from puna.models.formats.checkpoint import load
    from puna.models.tokens.tokenizer import Tokenizer

    model, tokenizer = load(folder, "lm").eval(), Tokenizer.load(folder)

    def encode(text: str) -> NDArray[np.float32]:
        tokens = tokenizer.document(text[: 16 * limit])[:limit]
        return np.asarray(model.hidden(Forest.pack([torch.tensor(tokens)])).mean(dim=0))

    return encode, model.config.hidden_size


def _hugging_face(folder: str, limit: int) -> tuple[Encode, int]:
    from transformers import AutoModel, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    model = AutoModel.from_pretrained(folder, local_files_only=True).float().eval()
    most = min(limit, getattr(model.config, "max_position_embeddings", limit) or limit)

    def encode(text: str) -> NDArray[np.float32]:
        tokens = tokenizer(text[: 16 * limit], truncation=True, max_length=most, return_tensors="pt")
        return np.asarray(model(**tokens).last_hidden_state[0].mean(dim=0))

    return encode, int(model.config.hidden_size)
