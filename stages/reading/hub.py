"""Data sets of the hub, read as a stream."""

from __future__ import annotations

from typing import Any

from puna.storage import PunaError


def hub_stream(uri: str, subset: str | None, split: str) -> Any:
    """A streaming data set of the hub, `hf://datasets/OWNER/NAME[@REVISION]` (or of a local folder in tests)."""
    import datasets

    name, _, revision = uri.removeprefix("hf://").removeprefix("datasets/").partition("@")
    try:
        return datasets.load_dataset(name, subset, split=split, streaming=True, revision=revision or None)
    except (ValueError, OSError) as error:
        raise PunaError(f"input {uri}: {error}") from error
