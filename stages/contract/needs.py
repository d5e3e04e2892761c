"""Needs of a stage that are checked before anything runs, and the facts known by then."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from puna.storage import Artifact

Looked = tuple[tuple[str, ...], float]
"""Texts of the first pages of some inputs, and the share of all their bytes that was looked at for them."""
GLANCE, LOOK = 0.1, 0.4
"""Seconds of a look that is often enough, and of one that a complaint may rest on: to read pages, and as many again for their texts."""


@dataclass(frozen=True)
class InputFacts:
    """Facts about one input before the run; None stands for an unknown fact.

    kind     kind of the artifact, or `external`
    tables   name → columns
    sources  names of the external inputs that it descends from
    bytes    size of its stored files
    look     a function that reads the first pages for a number of seconds and returns their texts and their share of all bytes
    model    the existing model with the same shape, tokenizer and chat template
    """

    kind: str
    tables: dict[str, tuple[str, ...]] | None = None
    sources: tuple[str, ...] | None = None
    bytes: int | None = None
    look: Callable[[float], Looked] | None = None
    model: Artifact | None = None


@dataclass(frozen=True)
class Facts:
    """Facts before a run, of each input by name and of the machine in bytes. An omitted input has no entry.

    `available_memory_bytes` is None if another machine or an accelerator does the work.
    """

    inputs: dict[str, tuple[InputFacts, ...]]
    free_disk_bytes: int
    available_memory_bytes: int | None


Needs = Callable[[Any, Facts], list[str]]
"""`needs(config, facts)`: one sentence for each need that cannot be met, naming the field and what to do; empty when all are.

What is not known (None) must not be complained about.
"""
