"""The union of two extractors: the blocks that either takes, and who took how many words."""

from __future__ import annotations

import re
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from puna.stages.curate.extraction import layout as L
from puna.stages.curate.extraction.layout import Scan

WORD = re.compile(r"\w+")


class Origin(NamedTuple):
    """Words of the text by who took them: both extractors, the model alone, the library alone."""

    both: int
    model: int
    library: int


def united(page: Scan, keep: NDArray[np.bool_], library: str) -> tuple[NDArray[np.bool_], Origin]:
    """The blocks of `keep` and those whose words follow each other in the library's text [blocks]."""
    theirs = " " + " ".join(WORD.findall(library)) + " "
    text = page.text.tobytes()
    taken = np.zeros(len(keep), np.bool_)
    for number, block in enumerate(page.blocks):
        words = WORD.findall(text[block[L.START] : block[L.STOP]].decode("utf-8", "replace"))
        taken[number] = bool(words) and f" {' '.join(words)} " in theirs
    sizes = page.blocks[:, L.WORDS]
    counts = (int(sizes[which].sum()) for which in (keep & taken, keep & ~taken, taken & ~keep))
    return keep | taken, Origin(*counts)
