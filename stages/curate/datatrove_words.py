"""Words as datatrove's MinHash takes them (to be written)."""

from __future__ import annotations

from typing import Any

from puna.kernels.shingles import Words


def datatrove_words(data: Any, offsets: Any) -> Words:
    raise NotImplementedError
