"""Verifiable prompts from reasoning-gym's procedural generators, split by question."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from typing import Any

from pydantic import Field, JsonValue, model_validator

from puna.stages.align.scoring import generator
from puna.stages.contract import SeededConfig, StageConfig, StageRun, stage
from puna.storage import PunaError

PATIENCE = 4
"""A generator is exhausted after this many times as many draws as it has given questions, none of them new."""
LEAST_PATIENCE = 2000


class Task(StageConfig):
    """One generator of reasoning-gym."""

    task: str = Field(description="Name of the reasoning-gym generator", min_length=1)
    parameters: dict[str, JsonValue] = Field(
        default_factory=dict, description="The generator's own parameters; those left out keep its defaults"
    )


class PromptsConfig(SeededConfig):
    """Which questions, and how many."""

    tasks: tuple[Task, ...] = Field(description="Generators, each giving the same number of questions", min_length=1)
    train: int = Field(400, ge=0, description="Training questions per task")
    heldout: int = Field(100, ge=0, description="Held-out questions per task; the same ones whatever `train` and `skip` are")
    skip: int = Field(0, ge=0, description="Training questions per task to pass over, so that rounds take disjoint slices")
    heldout_fraction: float = Field(
        0.2, gt=0, lt=1, description="Share of all different questions set aside for held-out use, fraction"
    )

    @model_validator(mode="after")
    def _asks_for_something(self) -> PromptsConfig:
        if self.train + self.heldout == 0:
            raise ValueError("train and heldout are both 0: there is nothing to generate")
        return self


@stage(kind="prompts")
def prompts(config: PromptsConfig, run: StageRun) -> None:
    """Questions with gold answers, from procedural generators with verifiable scorers.

    The generators repeat themselves at small sizes, so questions are counted by their text: a question
    belongs to the held-out side when its hash says so, whichever draw it came from, and no text occurs
    twice, over all tasks. PunaError when a generator has too few different questions.
    """
    taken: set[str] = set()
    total = len(config.tasks) * (config.train + config.heldout)
    done = 0
    for number, task in enumerate(config.tasks):
        rows = list(questions(task, config, run.seed("generator", number), taken))
        run.write_rows(rows)
        done += len(rows)
        run.progress(done, total, task.task)
    for split, count in (("train", config.train), ("heldout", config.heldout)):
        run.metric(f"{split}_prompts", count * len(config.tasks))


def questions(task: Task, config: PromptsConfig, seed: int, taken: set[str]) -> Iterator[dict[str, Any]]:
    """Rows of the prompts table for one task; `taken` holds the questions of the tasks before and grows."""
    parameters = json.dumps(task.parameters, sort_keys=True)
    # reasoning-gym draws entry i from seed + i with Python's generator, which takes any integer.
    dataset = generator(task.task, parameters, seed=seed, size=2**40)
    wanted = {"train": config.skip + config.train, "heldout": config.heldout}
    found = {"train": 0, "heldout": 0}
    draw = stale = 0
    while any(found[split] < wanted[split] for split in wanted):
        if stale > max(LEAST_PATIENCE, PATIENCE * sum(found.values())):
            raise PunaError(
                f"task {task.task}: its parameters {parameters} give only {sum(found.values())} different questions "
                f"({found['train']} train, {found['heldout']} held out), but {wanted['train']} train and "
                f"{wanted['heldout']} held out are asked for; widen the parameters or ask for fewer"
            )
        entry = _draw(dataset, draw, task, parameters)
        draw += 1
        question = str(entry["question"])
        if question in taken:
            stale += 1
            continue
        if entry["answer"] is None:
            raise PunaError(f"task {task.task}: gives no reference answers; choose another task")
        taken.add(question)
        stale = 0
        split = side(question, config.seed, config.heldout_fraction)
        found[split] += 1
        if found[split] <= wanted[split] and not (split == "train" and found[split] <= config.skip):
            yield {
                "id": identifier(question),
                "task": task.task,
                "split": split,
                "prompt": question,
                "reference": str(entry["answer"]),
                "entry": _entry(task, entry),
            }


def _draw(dataset: Any, index: int, task: Task, parameters: str) -> dict[str, Any]:
    try:
        entry: dict[str, Any] = dataset[index]
    except (AssertionError, AttributeError, KeyError, IndexError, TypeError, ValueError) as error:
        # Some generators check their parameters only when they draw.
        raise PunaError(f"task {task.task}: drawing with the parameters {parameters} failed: {error!r}") from error
    return entry


def side(question: str, seed: int, heldout_fraction: float) -> str:
    """`train` or `heldout`, from a hash of the question's text."""
    digest = hashlib.sha256(f"{seed}\0{question}".encode()).digest()
    return "heldout" if int.from_bytes(digest[:8], "big") < heldout_fraction * 2**64 else "train"


def identifier(*parts: Any) -> str:
    """32 hex digits that name what the parts name."""
    return hashlib.sha256("\0".join(map(str, parts)).encode()).hexdigest()[:32]


def _entry(task: Task, entry: dict[str, Any]) -> str:
    """The entry as JSON; its tuples come back as lists, which the scorers take."""
    try:
        return json.dumps({"parameters": task.parameters, "entry": entry}, sort_keys=True)
    except TypeError as error:
        raise PunaError(f"task {task.task}: its entries hold what JSON cannot ({error}); choose another task") from error
