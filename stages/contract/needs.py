"""What a stage needs before anything runs: the facts that are known by then, and the question it answers."""

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
    """What is known of one input before the run: its kind, its tables, which sources its rows come from.

    `kind`: of the artifact, or `external`. `tables`: name → columns; None where what makes it has not run and nobody
    can say. `sources`: names of the external inputs that it descends from; None where unknown. `bytes`: of its stored
    files, None where unknown. `look`: reads the first pages of those inputs, roughly as a stage will read them, for so many seconds, and
    gives their texts and the share of all bytes that they are; None where nobody can. `model`: of a model, the one that is
    there already and has its shape, tokenizer and chat template; None where unknown.
    """

    kind: str
    tables: dict[str, tuple[str, ...]] | None = None
    sources: tuple[str, ...] | None = None
    bytes: int | None = None
    look: Callable[[float], Looked] | None = None
    model: Artifact | None = None


@dataclass(frozen=True)
class Facts:
    """What is known before a run: of each input of the stage by name, and of the machine in bytes; the memory is None where another
    machine or an accelerator does the work.

    An input that is left out has no entry; one that takes several artifacts has an entry for each.
    """

    inputs: dict[str, tuple[InputFacts, ...]]
    free_disk_bytes: int
    available_memory_bytes: int | None


Needs = Callable[[Any, Facts], list[str]]
"""`needs(config, facts)`: one sentence for each need that cannot be met, naming the field and what to do; empty when all are.

What is not known (None) must not be complained about.
"""
