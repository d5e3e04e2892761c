"""A mix of instructions with set shares of its sources."""

from __future__ import annotations

from typing import Any

from pydantic import Field, field_validator

from puna.stages.contract import Figure, Instructions, SeededConfig, StageRun, did_you_mean, stage
from puna.stages.draws import hash_of
from puna.storage import PunaError


class MixInstructionsConfig(SeededConfig):
    """The shares of the mix."""

    shares: dict[str, float] = Field(
        default_factory=dict,
        description="Source → its share of the training rows, 0 to 1; sources not named share the rest in proportion to their rows",
    )

    @field_validator("shares")
    @classmethod
    def _check_shares(cls, value: dict[str, float]) -> dict[str, float]:
        for name, share in value.items():
            if not 0 <= share <= 1:
                raise ValueError(f"share {share} of {name}: must lie between 0 and 1")
        if sum(value.values()) > 1 + 1e-9:
            raise ValueError(f"the shares add up to {sum(value.values()):g}, more than 1")
        return value


@stage(kind="instructions")
def mix_instructions(instructions: list[Instructions], config: MixInstructionsConfig, run: StageRun) -> None:
    """Choose training rows of several sets so that each source in `shares` has its share (cf. Llama 3, table 7).

    As many rows stay as the shares allow without repeating a row; a hash of seed and id chooses among a source's rows. Equal rows of
    several sets count once. Rows that stay out are in `dropped`, with the rule `share`. Raise PunaError for a share of a source that
    has no rows, or for a rest that no other source fills.
    """
    every = [row for artifact in instructions for row in artifact.read().to_pylist()]
    rows: dict[str, dict[str, Any]] = {row["id"]: row for row in every if row["split"] == "train"}
    sources: dict[str, list[str]] = {}
    for key in sorted(rows, key=lambda one: (hash_of("mix_instructions", config.seed, one), one)):
        sources.setdefault(rows[key]["source"], []).append(key)
    for name, share in config.shares.items():
        if share and name not in sources:
            raise PunaError(f"mix_instructions: no training instruction has the source {name!r}{did_you_mean(name, sorted(sources))}")
    counts = row_counts({name: len(some) for name, some in sources.items()}, config.shares)
    kept = {key for name, some in sources.items() for key in some[: counts[name]]}
    run.count_input(len(rows))
    run.write_rows([row for key, row in rows.items() if key in kept])
    run.write_rows(
        [{"id": key, "rule": "share", "value": None, "threshold": config.shares.get(row["source"]), "detail": row["source"]}
         for key, row in rows.items() if key not in kept],
        "dropped",
    )  # fmt: skip
    run.metric("instructions", len(kept))
    bars: list[tuple[Any, float]] = [(name, count) for name, count in sorted(counts.items()) if count]
    run.figure("mix", Figure("Rows of the mix", "source", "rows", {"rows": bars}, kind="bar"))


def row_counts(rows: dict[str, int], shares: dict[str, float]) -> dict[str, int]:
    """Return source → number of rows of the largest mix with these shares that repeats no row. PunaError if there is none.

    `rows`: source → number of its rows. Sources without a share are in proportion to their rows."""
    rest = sum(count for name, count in rows.items() if name not in shares)
    left = 1 - sum(shares.values())
    if left > 1e-9 and not rest:
        raise PunaError(f"mix_instructions: the shares add up to {1 - left:g}, and no other source fills the rest: give one")
    wanted = {name: shares[name] if name in shares else left * count / rest for name, count in rows.items()}
    whole = min((rows[name] / share for name, share in wanted.items() if share > 1e-9), default=0.0)
    return {name: round(whole * share) for name, share in wanted.items()}
