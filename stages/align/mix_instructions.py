"""A mix of instructions with set shares of its sources."""

from __future__ import annotations

from typing import Any

from pydantic import Field, field_validator

from puna.stages.contract import Figure, Instructions, SeededConfig, StageRun, did_you_mean, stage
from puna.stages.draws import hash_of, identifier
from puna.storage import PunaError


class MixInstructionsConfig(SeededConfig):
    """The shares of the mix."""

    shares: dict[str, float] = Field(
        default_factory=dict,
        description="Source → its share of the training rows, 0 to 1; sources not named share the rest in proportion to their rows",
    )
    repeats: int = Field(4, ge=1, description="Times that a row may occur, so that a small source need not make the mix small")

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

    A hash of seed and id chooses among a source's rows; see `row_counts` for their number. Equal rows of several sets count once. Rows
    that stay out are in `dropped`, with the rule `share`. Raise PunaError for a share of a source that has no rows, or for a rest that no
    other source fills.
    """
    every = [row for artifact in instructions for row in artifact.read().to_pylist()]
    rows: dict[str, dict[str, Any]] = {row["id"]: row for row in every if row["split"] == "train"}
    sources: dict[str, list[str]] = {}
    for key in sorted(rows, key=lambda one: (hash_of("mix_instructions", config.seed, one), one)):
        sources.setdefault(rows[key]["source"], []).append(key)
    for name, share in config.shares.items():
        if share and name not in sources:
            raise PunaError(f"mix_instructions: no training instruction has the source {name!r}{did_you_mean(name, sorted(sources))}")
    counts = row_counts({name: len(some) for name, some in sources.items()}, config.shares, config.repeats)
    mixed, dropped = [], []
    for name, some in sources.items():
        for place in range(counts[name]):
            copy, at = divmod(place, len(some))
            row = rows[some[at]]
            mixed.append({**row, "id": identifier("mix_instructions", row["id"], copy)} if copy else row)
        about = {"rule": "share", "value": None, "threshold": config.shares.get(name), "detail": name}
        dropped += [{"id": key, **about} for key in some[counts[name] :]]
    run.count_input(len(mixed) + len(dropped))  # each copy counts as an input row
    run.write_rows(mixed)
    run.write_rows(dropped, "dropped")
    run.metric("instructions", len(mixed))
    bars: list[tuple[Any, float]] = [(name, count) for name, count in sorted(counts.items()) if count]
    run.figure("mix", Figure("Rows of the mix", "source", "rows", {"rows": bars}, kind="bar"))


def row_counts(rows: dict[str, int], shares: dict[str, float], repeats: int) -> dict[str, int]:
    """Return source → number of rows in the largest mix with these shares. No row occurs more than `repeats` times, and no row of the
    source that is most plentiful for its share occurs twice. Raise PunaError if there is no such mix.

    `rows`: source → number of its rows. Sources without a share are in proportion to their rows."""
    rest = sum(count for name, count in rows.items() if name not in shares)
    left = 1 - sum(shares.values())
    if left > 1e-9 and not rest:
        raise PunaError(f"mix_instructions: the shares add up to {1 - left:g}, and no other source fills the rest: give one")
    wanted = {name: shares[name] if name in shares else left * count / rest for name, count in rows.items()}
    sizes = [rows[name] / share for name, share in wanted.items() if share > 1e-9]
    whole = min(repeats * min(sizes), max(sizes))
    return {name: round(whole * share) for name, share in wanted.items()}
