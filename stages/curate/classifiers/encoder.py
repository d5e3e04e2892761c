"""Encoders that turn documents into vectors for curation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from puna.stages.contract import External
from puna.stages.training.proxy_runs import one_thread
from puna.storage import Artifact, PunaError

Encode = Callable[[str], NDArray[np.float32]]


class Place(NamedTuple):
    """A network on the local disk: a folder, or a GGUF file, and its digest. `own`: True if it is a model artifact of this pipeline."""

    path: str
    digest: str
    own: bool = False


def place_of(stage: str, name: str, model: Artifact | None, external: External | None, *, gguf: bool = False) -> Place:
    """Return the location of the network given to `stage`: a model of this pipeline, or a Hugging Face folder as the input `name`. With
    `gguf`, that input may also be a GGUF file or a folder with one. Raise PunaError unless exactly one network is given."""
    if model is not None and external is None:
        return Place(str(model.path()), model.data_digest, own=True)
    if external is None or model is not None:
        raise PunaError(f"{stage}: give exactly one {name}: a model artifact, or the folder of a Hugging Face {name}")
    path = Path(external.uri.removeprefix("file://"))
    if (path / "config.json").is_file():
        return Place(str(path), external.data_digest)
    files = ([path] if path.suffix == ".gguf" else sorted(path.glob("*.gguf"))) if gguf else []
    if len(files) == 1 and files[0].is_file():
        return Place(str(files[0]), external.data_digest)
    more = f", and {len(files)} GGUF files" if gguf else ""
    raise PunaError(f"{stage}.{name}: {external.uri} is not a local folder of a Hugging Face model (it has no config.json{more})")


def embed(texts: Sequence[str], place: Place, max_tokens: int) -> NDArray[np.float32]:
    """Return the mean of the last hidden states over the first `max_tokens` tokens of each text, float32[n, D]. Texts are encoded one at a
    time, so that a vector does not depend on other texts. A Hugging Face encoder reads at most its own maximum."""
    import torch

    with one_thread(), torch.no_grad():
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
