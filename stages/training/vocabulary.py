"""Loading of an artifact's tokenizer, and a check that tokens were made by a tokenizer."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from puna.storage import Artifact, PunaError
from puna.storage.manifest import content_digest

if TYPE_CHECKING:
    from puna.models.tokens.tokenizer import Tokenizer

FILES = ("tokenizer.json", "tokenizer_config.json")  # files of a tokenizer artifact, also in a model artifact


@lru_cache(maxsize=2)
def load(folder: str) -> Tokenizer:
    """Return the tokenizer in a folder. The two most recently used tokenizers stay in memory."""
    from puna.models.tokens.tokenizer import Tokenizer

    return Tokenizer.load(folder)


def tokenizer_of(artifact: Artifact) -> Tokenizer:
    """Return the tokenizer of a tokenizer or model artifact."""
    return load(str(artifact.path()))


def check_tokens(tokens: Artifact, vocabulary: Artifact) -> None:
    """Raise PunaError if `tokens` were made by a tokenizer other than that of `vocabulary`."""
    own = {name: record for name, record in vocabulary.manifest.files.items() if name in FILES}
    for item in tokens.manifest.inputs:
        if item.kind == "tokenizer" and item.data_digest != content_digest({}, own):
            raise PunaError(f"{tokens.id} was made by tokenizer/{item.key[:12]}, not by the tokenizer of {vocabulary.id}")
