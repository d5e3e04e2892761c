"""Instructions to finetune on: reference answers for the first finetuning, chosen answers for a round, and mixes of both."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import Field, field_validator

from puna.stages.contract import Instructions, Preferences, Prompts, SeededConfig, StageConfig, StageRun, did_you_mean, stage
from puna.stages.conversations import Level, as_text, dump, message_of, messages_of
from puna.stages.draws import hash_of, identifier
from puna.stages.training.rankings import read_preferences
from puna.stages.training.settings import CLEAR
from puna.storage import PunaError

Row = dict[str, Any]


def instruction(name: str, prompt_id: str, prompt: Row, answer: Mapping[str, Any], source: str, score: float | None = None) -> Row:
    """Return a row of the instructions table: the messages of a prompt, followed by `answer` as the assistant's message."""
    messages = dump([*messages_of(prompt), dict(answer)])
    row = {"id": name, "prompt_id": prompt_id, "task": prompt["task"], "split": "train", "messages": messages, "tools": prompt["tools"]}
    return {**row, "source": source, "score": score}


def answer_message(text: str) -> Row:
    return {"role": "assistant", "content": text}


class ChosenConfig(StageConfig):
    levels: tuple[Level, ...] = Field(CLEAR, min_length=1, description="Preference levels whose better answers are used")
    source: str = Field("chosen", min_length=1, description="Name of the source in the instructions table")


@stage(kind="instructions")
def chosen(preferences: list[Preferences], config: ChosenConfig, run: StageRun) -> None:
    """Take the better answer, or its edited version, of training preferences with one of `levels` or no level; duplicates once."""
    rows = {}
    for row in read_preferences(preferences, config.levels):
        best = message_of(row, "edited") or message_of(row, "chosen")
        if row["split"] == "train" and best is not None:
            name = identifier(config.source, row["prompt_id"], dump(best))
            rows[name] = instruction(name, row["prompt_id"], row, best, config.source)
    if not rows:
        raise PunaError(f"chosen: no training preference with one of the levels {', '.join(config.levels)} has a better answer")
    run.write_rows(list(rows.values()))
    run.metric("instructions", len(rows))


class InstructionsConfig(StageConfig):
    source: str = Field("gold", min_length=1, description="Name of the source in the instructions table")


@stage(kind="instructions")
def instructions(prompts: Prompts, config: InstructionsConfig, run: StageRun) -> None:
    """Pair training prompts with their reference answers, in place of demonstrations by human annotators.

    Held-out prompts are left out. Training prompts without a reference are in `dropped`. Raise PunaError if no prompt has a reference."""
    questions = [row for row in prompts.read().to_pylist() if row["split"] == "train"]
    if not questions:
        raise PunaError(f"instructions: {prompts.id} has no training prompts; set prompts.train to get some")
    answered = [row for row in questions if row["reference"] is not None]
    if not answered:
        raise PunaError(f"instructions: none of the {len(questions)} training prompts of {prompts.id} has a reference answer to learn from")
    names = {row["id"]: identifier(config.source, row["id"]) for row in answered}
    run.write_rows([instruction(names[row["id"]], row["id"], row, answer_message(row["reference"]), config.source) for row in answered])
    bare = [row for row in questions if row["reference"] is None]
    run.count_input(len(questions))
    run.write_rows(
        [{"id": row["id"], "rule": "no_reference", "value": None, "threshold": None, "detail": as_text(messages_of(row))} for row in bare],
        "dropped",
    )
    run.metric("instructions", len(answered))


class MixInstructionsConfig(SeededConfig):
    shares: dict[str, float] = Field(
        default_factory=dict,
        description="Source → its share of the training rows, 0 to 1; the other sources divide the rest in proportion to their rows",
    )
    repeats: int = Field(4, ge=1, description="Maximum number of times that a row is repeated, so that small sources do not limit the mix")

    @field_validator("shares")
    @classmethod
    def _check_shares(cls, value: dict[str, float]) -> dict[str, float]:
        for name, share in value.items():
            if not 0 <= share <= 1:
                raise ValueError(f"the share {share} of {name} must lie between 0 and 1")
        if sum(value.values()) > 1 + 1e-9:
            raise ValueError(f"the shares add up to {sum(value.values()):g}, more than 1")
        return value


@stage(kind="instructions")
def mix_instructions(instructions: list[Instructions], config: MixInstructionsConfig, run: StageRun) -> None:
    """Choose training rows from several sets so that each source in `shares` has its share (see Llama 3, table 7).

    A hash of seed and id chooses among a source's rows; `row_counts` determines their number. Rows that several sets share count once. Rows
    that are not chosen are in `dropped`, with the rule `share`. Raise PunaError if a source with a share has no rows, or if the shares add
    up to less than 1 and there are no other sources."""
    every = [row for artifact in instructions for row in artifact.read().to_pylist()]
    rows: dict[str, Row] = {row["id"]: row for row in every if row["split"] == "train"}
    sources: dict[str, list[str]] = {}
    for key in sorted(rows, key=lambda one: (hash_of("mix_instructions", config.seed, one), one)):
        sources.setdefault(rows[key]["source"], []).append(key)
    for name, share in config.shares.items():
        if share and name not in sources:
            raise PunaError(f"mix_instructions: no training instruction has the source {name!r}{did_you_mean(name, sorted(sources))}")
    counts = row_counts({name: len(some) for name, some in sources.items()}, config.shares, config.repeats)
    mixed, dropped = [], []
    for name, some in sources.items():
        copies = [(place // len(some), some[place % len(some)]) for place in range(counts[name])]
        mixed += [{**rows[key], "id": identifier("mix_instructions", key, copy) if copy else key} for copy, key in copies]
        about = {"rule": "share", "value": None, "threshold": config.shares.get(name), "detail": name}
        dropped += [{"id": key, **about} for key in some[counts[name] :]]
    run.count_input(len(mixed) + len(dropped))  # each copy counts as an input row
    run.write_rows(mixed)
    run.write_rows(dropped, "dropped")
    run.metric("instructions", len(mixed))
    for name, count in counts.items():
        run.metric(f"from_{name}", count)


def row_counts(rows: dict[str, int], shares: dict[str, float], repeats: int) -> dict[str, int]:
    """Return source → number of rows in the largest mix with these shares. Raise PunaError if there is no such mix.

    `rows`: source → number of its rows. Sources without a share divide the rest in proportion to their rows. No row is used more than
    `repeats` times; the source with the most rows relative to its share repeats none."""
    rest = sum(count for name, count in rows.items() if name not in shares)
    left = 1 - sum(shares.values())
    if left > 1e-9 and not rest:
        raise PunaError(f"mix_instructions: the shares add up to {1 - left:g}, and no other source can fill the rest; add one")
    wanted = {name: shares[name] if name in shares else left * count / rest for name, count in rows.items()}
    sizes = [rows[name] / share for name, share in wanted.items() if share > 1e-9]
    whole = min(repeats * min(sizes), max(sizes))
    return {name: round(whole * share) for name, share in wanted.items()}
