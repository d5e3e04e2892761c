"""Place and mode of computing of the network that a stage of curation reads documents with."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from puna.stages.contract import External
from puna.storage import Artifact, PunaError


class Place(NamedTuple):
    """A network on the local disk: a folder, or a GGUF file; `own`: it is a model of this pipeline."""

    path: str
    own: bool = False


def place_of(stage: str, name: str, model: Artifact | None, external: External | None, *, gguf: bool = False) -> Place:
    """Return the place of the one network that `stage` was given: a model of this pipeline, or the folder that its input `name` names.

    With `gguf` such an input may be a GGUF file, or a folder that holds one. PunaError where neither or both are given, or
    nothing lies there.
    """
    if model is not None and external is None:
        return Place(str(model.path()), own=True)
    if external is None or model is not None:
        raise PunaError(f"{stage}: give one {name}, an artifact of a model or the folder of a Hugging Face {name}")
    path = Path(external.uri.removeprefix("file://"))
    if (path / "config.json").is_file():
        return Place(str(path))
    files = ([path] if path.suffix == ".gguf" else sorted(path.glob("*.gguf"))) if gguf else []
    if len(files) == 1 and files[0].is_file():
        return Place(str(files[0]))
    more = f", and {len(files)} GGUF files" if gguf else ""
    raise PunaError(f"{stage}.{name}: {external.uri} is no local folder of a Hugging Face model (it has no config.json{more})")


@contextlib.contextmanager
def reading() -> Iterator[None]:
    """Compute without gradients and on one thread: a document's vector must not depend on the number of documents."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.no_grad():
            yield
    finally:
        torch.set_num_threads(threads)
