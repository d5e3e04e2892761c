"""Settings of stages that score answers."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from puna.stages.contract import StageConfig


class ScoringConfig(StageConfig):
    """Limits of verifiers."""

    seconds: float = Field(10.0, gt=0, le=600, description="Longest time to score one answer; one that takes longer has no score, seconds")
    isolation: Literal["namespaces", "limits"] = Field(
        "namespaces",
        description="What programs in answers must at least be kept in. namespaces: no network, no files of the machine, nothing outlives "
        "the run (bubblewrap, or namespaces where the system allows them); limits: limits of resources alone, on a machine without secrets",
    )
    memory_mb: int = Field(512, ge=64, le=1 << 20, description="Memory of a program, all its processes together, MiB")
    disk_mb: int = Field(64, ge=1, le=1 << 20, description="Files of a program, MiB")
    processes: int = Field(32, ge=1, le=10_000, description="Maximum number of a program's processes and threads")
